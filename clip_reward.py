"""A CLIP model as a reward function: how well does a frame show what a sentence says?

The one module that the scripts share: the reward of "Vision-Language Models are Zero-Shot Reward Models for
Reinforcement Learning" (Rocamonde et al., ICLR 2024, arXiv 2310.12921); that of "Vision-Language Models as a
Source of Rewards" (Baumli et al., 2023, arXiv 2312.09187), which asks which of several sentences fits; their
settings; the `Labeller`, which has many frames rewarded at once; and `replayed`, a GPU's fast updates.

    reward = CLIPReward("ViT-B-32/openai", "pole vertically upright on top of the cart", "pole and cart", 0.5)
    reward(frames)  # (N, 3, H, W) uint8 -> (N,) float32
"""

import difflib
import json
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

import torch
import torch.nn.functional as F
from tqdm import tqdm

# open_clip, torchvision and the hub's client are imported where they are used: they take seconds.

HERE = Path(__file__).resolve().parent
TINY = f"local-dir:{HERE / 'tiny_clip'}"  # the bundled model, see tiny_clip/README.md
Texts = str | Sequence[str]


class UsageError(ValueError):
    """A model, prompt or setting that cannot be used; the message is one line for the user."""


# ---- The rewards


def goal_baseline_reward(
    embeddings: torch.Tensor, goal: torch.Tensor, baseline: torch.Tensor, alpha: float
) -> torch.Tensor:
    """Reward under goal-baseline regularization (Rocamonde et al., Definition 1); α = 0: the cosine (Eq. 2).

    With s, g, b the unit embeddings of frame, goal and baseline and d = (g - b) / ‖g - b‖,

        R(s) = 1 - ½ ‖α·proj_L(s) + (1 - α)·s - g‖²,   proj_L(s) = g + d dᵀ(s - g),   L the line through b, g.

    The vector inside the norm is α·d dᵀ(s - g) + (1 - α)(s - g): its part along d has length |dᵀ(s - g)| for
    any α, the part across is shrunk by 1 - α. Hence the closed form that is computed here:

        R(s) = 1 - ½ [ (dᵀ(s - g))² + (1 - α)² (‖s - g‖² - (dᵀ(s - g))²) ].

    Embeddings s (N, D), goal g (D,), baseline b (D,) -> rewards (N,).
    """
    direction = F.normalize(goal - baseline, dim=0)  # d
    error = embeddings - goal  # s - g
    along = error @ direction  # dᵀ(s - g): what the projection onto the goal-baseline line keeps, (N,)
    across = error.square().sum(-1) - along.square()
    return 1 - 0.5 * (along.square() + (1 - alpha) ** 2 * across)


def contrastive_reward(
    embeddings: torch.Tensor, goal: torch.Tensor, negatives: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Probability of the goal among it and the negatives (Baumli et al., Section 3).

    With s, g, n₁ … n_K the unit embeddings of frame, goal and negatives and the temperature τ,

        R(s) = exp(s·g / τ) / [ exp(s·g / τ) + Σ_k exp(s·n_k / τ) ].

    s (N, D), g (D,), negatives (K, D) -> (N,).
    """
    logits = embeddings @ torch.cat([goal[None], negatives]).T / temperature  # (N, 1 + K)
    return logits.softmax(dim=1)[:, 0]


class CLIPReward(torch.nn.Module):
    """Frames -> rewards: `goal_baseline_reward` or, where there are negative prompts, `contrastive_reward`.

    Args:
        clip_model: `NAME/TAG`, `NAME/weights.pt`, `hf-hub:org/name`, `local-dir:PATH`, or `tiny`.
        prompts, baseline_prompts: one text or several; g and b are the means of their unit embeddings, as in
            the paper's code (so R at α = 0 is the cosine with the goals' mean plus a constant).
        alpha: the regularization strength α in [0, 1]; a baseline is only needed above 0.
        batch_size, precision: frames encoded at once, in `fp32` or `bf16`; rewards are float32 all the same.
        negative_prompts: what else there might be to see; with them α and baseline do not count.
        temperature: τ of the contrastive reward (default: the model's own, 1 / its logit scale).
        threshold: β; with it the reward is 1 where R(s) > β, else 0 (as in Baumli et al.).

    Raises UsageError for what the user got wrong of these, before the weights are loaded if possible.
    """

    def __init__(
        self, clip_model: str, prompts: Texts, baseline_prompts: Texts = (), alpha: float = 0.0,
        device: str | torch.device = "cpu", batch_size: int = 256, precision: str = "fp32",
        negative_prompts: Texts = (), temperature: float | None = None, threshold: float | None = None
    ):  # fmt: skip
        import open_clip

        super().__init__()
        lists = (prompts, baseline_prompts, negative_prompts)
        lists = ([texts] if isinstance(texts, str) else list(texts) for texts in lists)
        prompts, baseline_prompts, negative_prompts = lists
        texts = prompts + baseline_prompts + negative_prompts
        if not 0 <= alpha <= 1 or not -1 <= (threshold or 0) < 1:
            raise UsageError(
                f"α must lie in [0, 1], the threshold in [-1, 1); they are {alpha} and {threshold}"
            )
        if temperature is not None and not temperature > 0:
            raise UsageError(f"the temperature must be above 0, not {temperature}")
        if temperature is not None and not negative_prompts:
            raise UsageError("a temperature needs a contrastive reward: give a negative prompt")
        if not prompts or not all(text.strip() for text in texts):
            raise UsageError("a prompt is empty: say in a few words what there is to see")
        if alpha > 0 and not baseline_prompts + negative_prompts:
            raise UsageError(f"α = {alpha} needs a baseline prompt: describe the scene without the goal")
        if clip_model == "tiny":
            read = re.findall(r"\w+", (HERE / "tiny_clip" / "captions.csv").read_text().lower())
            unknown = sorted(set(re.findall(r"\w+", " ".join(texts).lower())) - set(read))
            if unknown:
                tqdm.write(f"tiny has never read these words, which mean nothing to it: {', '.join(unknown)}")
        logging.disable(logging.ERROR)  # open_clip and the hub log a failure many times; one line will do
        try:
            name, how = find_clip_model(clip_model)
            tokenizer = open_clip.get_tokenizer(name)
            for text in texts:
                check_length(text, tokenizer)
            how |= {"precision": precision, "return_transform": False}
            # In its precision before it goes to the GPU, where float32 would take twice the room.
            self.model = open_clip.create_model_from_pretrained(name, **how).to(device)
            self.model.eval().requires_grad_(False)
            goal = self.embed_text(tokenizer(prompts).to(device)).mean(0)  # (D,)
        except (UsageError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # files and downloads fail in many ways, in each library's own words
            advice = "take another --clip-model, a file, tiny, or --precision fp32"
            raise UsageError(f"cannot load {clip_model} ({one_line(error)}): {advice}") from error
        finally:
            logging.disable(logging.NOTSET)
        self.model.visual.to(memory_format=torch.channels_last)  # convolutions are up to twice as fast
        self.alpha = alpha
        self.threshold = threshold
        self.batch_size = batch_size
        self.input_dtype = open_clip.get_input_dtype(precision) or torch.float32

        cfg = self.model.visual.preprocess_cfg  # the model's own, never constants of ours
        size = cfg["size"]
        self.size = (size, size) if isinstance(size, int) else tuple(size)  # height, width
        self.interpolation = "bicubic" if cfg["interpolation"] == "random" else cfg["interpolation"]
        baseline, negatives = goal, None
        if baseline_prompts:
            baseline = self.embed_text(tokenizer(baseline_prompts).to(device)).mean(0)
        if negative_prompts:
            negatives = self.embed_text(tokenizer(negative_prompts).to(device))  # (K, D)
        elif alpha > 0 and torch.allclose(goal, baseline, atol=1e-5):
            raise UsageError("goal and baseline prompt mean the same to this model: there is no line")
        self.temperature = temperature or 1 / self.model.logit_scale.exp().item()
        self.fingerprint = goal.cpu()  # does a run go on with the reward that it began with?
        mean, std = (torch.tensor(cfg[name], device=device).view(3, 1, 1) * 255 for name in ("mean", "std"))
        buffers = {"goal": goal, "baseline": baseline, "negatives": negatives, "mean": mean, "std": std}
        for name, buffer in buffers.items():  # they go where the model goes
            self.register_buffer(name, buffer)

    @property
    def device(self) -> torch.device:
        return self.goal.device

    @torch.no_grad()
    def embed_text(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens (N, context length) -> unit embeddings (N, D) float32."""
        return F.normalize(self.model.encode_text(tokens).float(), dim=-1)

    @torch.no_grad()
    def embed(self, frames: torch.Tensor) -> torch.Tensor:
        """Frames (N, 3, H, W) uint8 -> unit embeddings (N, D) float32.

        Frames of another size than the model's are squashed, antialiased as where CLIP models are trained.
        (The paper's code did not, which changes the rewards; the scripts render at the model's size.)
        """
        frames = frames.to(self.device)
        if frames.shape[-2:] != self.size:
            from torchvision.transforms import InterpolationMode, functional

            mode = InterpolationMode(self.interpolation)
            frames = functional.resize(frames, self.size, mode, antialias=True)
        pixels = (frames.float() - self.mean) / self.std
        pixels = pixels.to(self.input_dtype, memory_format=torch.channels_last)
        return F.normalize(self.model.encode_image(pixels).float(), dim=-1)

    def reward(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Unit embeddings s (N, D) -> rewards R(s), or whether they are above β, 1 or 0 (N,)."""
        if self.negatives is not None:
            rewards = contrastive_reward(embeddings, self.goal, self.negatives, self.temperature)
        else:
            rewards = goal_baseline_reward(embeddings, self.goal, self.baseline, self.alpha)
        return rewards if self.threshold is None else (rewards > self.threshold).float()

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """Frames (N, 3, H, W) uint8, any N, any device -> rewards (N,) float32 on the model's device."""
        rewards = [self.reward(self.embed(chunk)) for chunk in frames.split(self.batch_size) if len(chunk)]
        return torch.cat(rewards) if rewards else torch.zeros(0, device=self.device)


# ---- The settings that all scripts share


@dataclass
class RewardArgs:
    """What is rewarded, by which model, and where; each script's own `Args` begin with these."""

    prompt: tuple[str, ...] = ()  # the goal; several sentences are averaged
    baseline_prompt: tuple[str, ...] = ()  # what the scene looks like in general
    goal_baseline_alpha: float = 0.5  # α: 0 plain cosine, 1 only what lies along baseline-goal
    # NAME/TAG, NAME/FILE (OpenAI's: NAME-quickgelu/FILE), hf-hub:ORG/NAME, local-dir:FOLDER, tiny, or a
    # reward program, FILE.py (default: tiny on a CPU, the paper's ViT-bigG-14/laion2b_s39b_b160k on a GPU)
    clip_model: str | None = None
    clip_batch_size: int = 128  # frames rendered and rewarded at once
    precision: Literal["fp32", "bf16"] | None = None  # of the model (default: bf16 where the hardware has it)
    device: Literal["cpu", "cuda"] | None = None  # cuda: every GPU in sight (default: where there is one)
    ray_workers: int = 0  # more workers, on the Ray cluster that RAY_ADDRESS names or on this machine
    negative_prompt: tuple[str, ...] = ()  # contrastive reward: what else might be seen (Baumli et al., 2023)
    temperature: float | None = None  # contrastive: τ of the softmax (default: the model's own)
    threshold: float | None = None  # β, above which the reward is 1, else 0 (default: the reward itself)

    def complete(self) -> None:
        """Fill in what is None, and refuse what cannot be, of the script's own settings, too (UsageError)."""
        for name, value in vars(self).items():
            flag = "--" + name.replace("_", "-")
            least = 0 if name in ("seed", "learning_starts", "ray_workers") else 1
            if type(value) is int and value < least:
                raise UsageError(f"{flag} must be at least {least}, not {value}")
            anything = name in ("temperature", "threshold", "log_std_min", "rho")
            if type(value) is float and not (anything or 0 <= value <= 1):
                raise UsageError(f"{flag} must lie between 0 and 1, not {value}")
            if name.endswith("prompt") and sum(len(text.split()) == 1 for text in value) > 1:
                raise UsageError(f"{flag} takes sentences, not words: put quotes around each")
        for package, wanted in {"ray": self.ray_workers, "wandb": getattr(self, "track", False)}.items():
            if wanted and find_spec(package) is None:
                raise UsageError(f"{package} is not installed here: pip install {package}")
        self.device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UsageError("PyTorch sees no CUDA GPU here: --device cpu")
        self.precision = self.precision or native_precision(self.device)
        if self.clip_model is None:
            self.clip_model = "tiny" if self.device == "cpu" else "ViT-bigG-14/laion2b_s39b_b160k"
        # Files by their whole paths: Ray's workers run in another folder.
        kind, path = re.fullmatch(r"(local-dir:|(?!.*\.py$)[\w.-]+/|)(.*)", self.clip_model).groups()
        there = os.path.isdir(path) if kind == "local-dir:" else os.path.isfile(path)
        if there and (kind or path.endswith(".py")):
            self.clip_model = kind + os.path.abspath(path)

    def check_resumed(self, before: dict) -> None:
        """The rounds that a run has kept were played and rewarded by these settings: refuse others."""
        names = "seed prompt baseline_prompt goal_baseline_alpha negative_prompt temperature threshold reward"
        names += " textures camera supersample full_obs num_envs episode_length teacher teacher_error"
        for name in names.split():
            if name in before and before[name] != getattr(self, name):
                raise UsageError(
                    f"this run began with --{name.replace('_', '-')} {before[name]}, and keeps it"
                )
        if self.total_timesteps < before["total_timesteps"]:
            raise UsageError(f"this run has {before['total_timesteps']:,} steps, and can only be made longer")

    def describe(self) -> None:
        """Print who rewards what."""
        if self.clip_model.endswith(".py"):
            print(f"reward program {self.clip_model}; the prompt is not used")
        else:
            print(f"CLIP model {self.clip_model} in {self.precision} on {self.device}")
            print(f"prompt {', '.join(self.prompt)}")
        if self.clip_model == "tiny":
            print("tiny was trained on the very scenes rendered here: no evidence of zero-shot ability")


def make_reward(args: RewardArgs, device: torch.device):
    """-> the `CLIPReward` of these settings on one device, or a `ProgramReward` (see code_reward/)."""
    if args.clip_model.endswith(".py"):
        from code_reward.program import ProgramReward

        return ProgramReward(args.clip_model)
    texts = (args.prompt, args.baseline_prompt, args.goal_baseline_alpha)
    how = (device, args.clip_batch_size, args.precision)
    return CLIPReward(args.clip_model, *texts, *how, args.negative_prompt, args.temperature, args.threshold)


# ---- Many frames at once

THREADS = torch.get_num_threads()  # one a core, or OMP_NUM_THREADS


class Labeller:
    """States -> rewards, batch by batch, on all workers at once, and the same whoever makes a batch.

    A worker renders states and rewards the frames on one device: `Worker(args, device)` has a `reward_model`,
    and `label` takes states (N, …) to labels (N, 2), reward and ground-truth reward. On a CPU there is one a
    core, on one thread, which is faster than PyTorch's own threads; they share the weights. `cuda` is every
    GPU. `args.ray_workers` more are Ray actors.
    """

    def __init__(self, Worker: type, args: RewardArgs):
        device = torch.device(args.device)
        devices = [device]
        if device.type == "cuda" and device.index is None:
            devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
        if len(devices) > 1:  # as many batches a round for each, as even as possible
            frames = args.num_envs * args.episode_length
            batches = len(devices) * math.ceil(frames / args.clip_batch_size / len(devices))
            args = replace(args, clip_batch_size=math.ceil(frames / batches))
        self.device = devices[0]
        workers = [Worker(args, self.device)]
        reward_model = workers[0].reward_model
        self.fingerprint = reward_model.fingerprint
        workers += [Worker(args, other, deepcopy(reward_model).to(other)) for other in devices[1:]]
        if device.type == "cpu":
            workers += [Worker(args, device, reward_model) for _ in range(THREADS - 1)]
        workers += [RayWorker(Worker, args, device) for _ in range(args.ray_workers)]
        self.free = SimpleQueue()  # workers with nothing to do
        for worker in workers:
            self.free.put(worker)
        # Threads that play and label; on a CPU one core is left to the thread that learns.
        threads = max(len(workers) - 1, 1) if device.type == "cpu" else len(workers) + 1
        self.pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
        self.batch_size = args.clip_batch_size
        self.rest = None  # states that do not fill a batch yet
        self.tasks = []  # batches, and what becomes of each

    def add(self, states: torch.Tensor, last: bool = False) -> None:
        """Take in states (N, …); a batch begins when it is full and more come, or when these are the last."""
        states = states if self.rest is None else torch.cat([self.rest, states])
        *full, self.rest = states.split(self.batch_size)
        for batch in [*full, self.rest] if last else full:
            self.tasks.append((batch, self.pool.submit(self.label, batch)))

    def label(self, states: torch.Tensor) -> torch.Tensor:
        """Label a batch with the next worker that is free."""
        worker = self.free.get()
        try:
            labels = worker.label(states)
        except ConnectionError as error:  # this worker does not come back: another one takes the batch
            tqdm.write(f"a Ray worker is lost, the others go on: {error}")
            return self.label(states)
        except BaseException:
            self.free.put(worker)
            raise
        self.free.put(worker)
        return labels

    def result(self, show: str | None = None) -> torch.Tensor:
        """-> labels (N, 2) of all states since the last result, in order; `show` names a progress bar."""
        self.add(self.rest[:0], last=True)
        labels = []
        # This thread helps, from the last batch backwards, with those that no other thread has begun.
        for batch, task in tqdm(self.tasks[::-1], desc=show, leave=False, disable=not show or None):
            labels.append(self.label(batch) if task.cancel() else task.result())
        self.rest = None
        self.tasks = []
        labels = torch.cat(labels[::-1])
        if not labels[:, 0].isfinite().all():
            raise UsageError("the reward is NaN or infinite: try --precision fp32, or another --temperature")
        return labels


class RayWorker:
    """A worker in a process of its own, here or on another machine: only states and labels travel."""

    def __init__(self, Worker: type, args: RewardArgs, device: torch.device):
        import ray

        if not ray.is_initialized():
            needed = ("tiny_clip", "code_reward")
            others = [p for p in HERE.iterdir() if p.suffix != ".py" and p.name not in needed]
            code = {"working_dir": str(HERE), "excludes": [f"/{path.name}" for path in others]}
            ray.init(runtime_env=code, include_dashboard=False, log_to_driver=False, logging_level="error")
        kind = "GPU" if device.type == "cuda" else "CPU"
        if ray.cluster_resources().get(kind, 0) < args.ray_workers:  # the others would wait for ever
            raise UsageError(f"--ray-workers {args.ray_workers} need as many {kind}s of the Ray cluster")
        self.ray = ray
        if Worker.__module__ == "__main__":  # by its name; by value Ray would pickle all that it refers to
            Worker = import_module(Path(sys.argv[0]).stem).Worker
        actor = ray.remote(num_cpus=1, num_gpus=int(kind == "GPU"))(Worker)
        self.actor = actor.remote(args, torch.device(device.type))

    def label(self, states: torch.Tensor) -> torch.Tensor:
        try:
            return self.ray.get(self.actor.label.remote(states.cpu())).to(states.device)
        except self.ray.exceptions.RayActorError as error:
            raise ConnectionError(str(error).strip().splitlines()[-1]) from None


# ---- A GPU's updates


def replayed(update: Callable[..., dict], device: torch.device) -> Callable[..., dict]:
    """On a GPU an update is recorded as a CUDA graph and replayed: Python launches its kernels too slowly.

    Of the calls with the same arguments the first just runs, so that libraries get ready; the second is
    recorded; the others replay it, with the same tensors and new random numbers, but with Python's own
    numbers (a learning rate, how much there is to sample) as they were: record anew when these change.
    What the update returns must be detached, and its optimizers `capturable`.
    """
    if device.type == "cpu":
        return update
    graphs = {}

    def replay(*arguments) -> dict:
        if arguments not in graphs:
            graphs[arguments] = None
            return update(*arguments)
        if graphs[arguments] is None:
            graph = torch.cuda.CUDAGraph()
            # On this GPU, whichever Warp has left current; other threads work on.
            with torch.cuda.device(device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                graphs[arguments] = graph, update(*arguments)
        graph, losses = graphs[arguments]
        graph.replay()
        return {name: loss.clone() for name, loss in losses.items()}  # the next replay writes over them

    return replay


# ---- Loading


def native_precision(device: str | torch.device) -> str:
    """`bf16` where the GPU or x86 processor has instructions for it (2 to 3 times as fast), else `fp32`."""
    if torch.device(device).type == "cuda":
        return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp32"
    capabilities = torch.cpu.get_capabilities()
    return "bf16" if capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") else "fp32"


def find_clip_model(clip_model: str) -> tuple[str, dict]:
    """What open_clip calls the model, and what else it must be told: weights, activation, pixels."""
    import huggingface_hub
    import open_clip

    clip_model = TINY if clip_model == "tiny" else clip_model
    if clip_model.startswith(("local-dir:", "hf-hub:")):
        kind, _, place = clip_model.partition(":")
        config = f"{place}/open_clip_config.json"
        if kind == "hf-hub":
            config = huggingface_hub.hf_hub_download(place, "open_clip_config.json")
        text_cfg = json.loads(Path(config).read_text())["model_cfg"]["text_cfg"]
        if text_cfg.get("tokenizer_kwargs", {}).get("trust_remote_code"):
            raise UsageError(f"the tokenizer of {clip_model} is code of its own, which is not run")
        if text_cfg.get("hf_tokenizer_name"):
            from transformers import dynamic_module_utils

            dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0  # nor offered to be run
        return clip_model, {}

    name, _, pretrained = clip_model.partition("/")
    if name not in open_clip.list_models():
        close = difflib.get_close_matches(name, [*open_clip.list_models(), "tiny"], cutoff=0)
        how = "NAME/TAG, NAME/FILE, hf-hub:ORG/NAME, local-dir:FOLDER or tiny"
        raise UsageError(f"unknown CLIP model {name!r}, did you mean {' or '.join(close)}? Write {how}")
    cfg = open_clip.get_pretrained_cfg(name, pretrained)
    if cfg:
        return name, {"pretrained": pretrained, "force_quick_gelu": cfg.get("quick_gelu", False)}
    tags = open_clip.list_pretrained_tags_by_model(name)
    if not os.path.isfile(pretrained):
        raise UsageError(f"{name} has no weights {pretrained!r}, but {', '.join(tags)}, or {name}/FILE")
    return name, {"pretrained": pretrained} | about_file(name, pretrained, tags)


def about_file(name: str, path: str, tags: list[str]) -> dict:
    """How weights from a file want their pixels: as all tagged weights of the model, if these agree."""
    import open_clip

    cfgs = [open_clip.get_pretrained_cfg(name, tag) for tag in tags]
    wanted = [{f"image_{key}": cfg[key] for key in ("mean", "std", "interpolation")} for cfg in cfgs]
    if f"{name}-quickgelu" in open_clip.list_models():
        print(f"{path} is computed with GELU; for weights made with QuickGELU write {name}-quickgelu/{path}")
    if not wanted or any(other != wanted[0] for other in wanted):
        print(f"{path}: pixels are normalized as OpenAI's (weights of {name} do not say, or disagree)")
        return {}
    return wanted[0]


def check_length(text: str, tokenizer) -> None:
    """Refuse a text that the tokenizer would cut: with twice the room it must not come out longer."""
    room = tokenizer.context_length
    padding = tokenizer([""], context_length=2 * room)[0, -2]  # (the last may be a class token)
    length, full_length = ((tokenizer([text], context_length=n) != padding).sum() for n in (room, 2 * room))
    if full_length > length:
        raise UsageError(f'too long for this model, which reads {room} tokens: "{text[:60]}…"')


def one_line(error: Exception) -> str:
    text = "".join(filter(str.isprintable, " ".join(str(error).split())))
    return f"{type(error).__name__}: {text}"[:300]
