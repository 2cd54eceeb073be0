"""A CLIP model as a reward function: how well does a frame show what a sentence says?

This is the one module that the scripts share. It implements the reward of "Vision-Language Models are Zero-Shot Reward
Models for Reinforcement Learning" (Rocamonde et al., ICLR 2024, arXiv 2310.12921): Eq. 2 and Definition 1; the one of
"Vision-Language Models as a Source of Rewards" (Baumli et al., 2023, arXiv 2312.09187), which asks which of several sentences fits;
and the `Labeller`, which has many frames scored at once.

    reward = CLIPReward("ViT-B-32/openai", ["pole vertically upright on top of the cart"], ["pole and cart"], alpha=0.5)
    reward(frames)  # (N, 3, H, W) uint8 -> (N,) float32
"""

import difflib
import logging
import math
import os
import re
import sys
import zipfile
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import torch
import torch.nn.functional as F
from tqdm import tqdm

# open_clip, torchvision and the hub's client are imported where they are used: they take seconds, and --help needs none of them.

TINY = f"local-dir:{Path(__file__).resolve().parent / 'tiny_clip'}"  # the bundled model, see tiny_clip/README.md
Texts = str | Sequence[str]
ELSEWHERE = "choose another --clip-model, a local file (ViT-B-32//path/to/weights.pt), or the bundled one (tiny)"


class UsageError(ValueError):
    """A model, prompt or α that cannot be used; the message is one line for the user."""


def goal_baseline_reward(embeddings: torch.Tensor, goal: torch.Tensor, baseline: torch.Tensor, alpha: float) -> torch.Tensor:
    """Reward under goal-baseline regularization (Rocamonde et al., Definition 1); α = 0 is the plain cosine (Eq. 2).

    With s, g, b the unit embeddings of frame, goal and baseline and d = (g - b) / ‖g - b‖,

        R(s) = 1 - ½ ‖α·proj_L(s) + (1 - α)·s - g‖²,    L = the line through b and g,   proj_L(s) = g + d dᵀ(s - g).

    The vector inside the norm is α·d dᵀ(s - g) + (1 - α)(s - g): its part along d has length |dᵀ(s - g)| whatever α is, the
    part across is shrunk by 1 - α. Hence the closed form that is computed here:

        R(s) = 1 - ½ [ (dᵀ(s - g))² + (1 - α)² (‖s - g‖² - (dᵀ(s - g))²) ].

    Embeddings s (N, D), goal g (D,), baseline b (D,) -> rewards (N,).
    """
    direction = F.normalize(goal - baseline, dim=0)  # d
    error = embeddings - goal  # s - g
    along = error @ direction  # dᵀ(s - g): what the projection onto the goal-baseline line keeps, (N,)
    across = error.square().sum(-1) - along.square()
    return 1 - 0.5 * (along.square() + (1 - alpha) ** 2 * across)


def contrastive_reward(
    embeddings: torch.Tensor, goal: torch.Tensor, negatives: torch.Tensor, temperature: float, threshold: float | None = None
) -> torch.Tensor:
    """Probability of the goal among it and the negatives: how clearly it fits the frame best (Baumli et al., Section 3).

    With s, g, n₁ … n_K the unit embeddings of frame, goal and negatives and the temperature τ,

        p(s) = exp(s·g / τ) / [ exp(s·g / τ) + Σ_k exp(s·n_k / τ) ],    R(s) = p(s), or with a threshold β: 1 if p(s) > β, else 0.

    Embeddings s (N, D), goal g (D,), negatives (K, D) -> rewards (N,).
    """
    logits = embeddings @ torch.cat([goal[None], negatives]).T / temperature  # (N, 1 + K)
    p = logits.softmax(dim=1)[:, 0]
    return p if threshold is None else (p > threshold).float()


class CLIPReward(torch.nn.Module):
    """Frames -> rewards: `goal_baseline_reward` or, where there are negative prompts, `contrastive_reward`.

    Args:
        clip_model: `NAME/TAG`, `NAME//path/to/weights.pt` (OpenAI's own: `NAME-quickgelu//…`), `hf-hub:org/name`,
            `local-dir:PATH`, or `tiny`.
        prompts, baseline_prompts: one text or several; g and b are the means of the texts' unit embeddings, as in the
            paper's code (so with several goals R is the cosine with their mean plus a constant, at α = 0).
        alpha: the regularization strength α in [0, 1]; a baseline is only needed above 0.
        batch_size, precision: frames encoded at once, in what (`fp32`, `bf16`); rewards are float32 all the same.
        negative_prompts: what else there might be to see, one text or several; with them α and baseline do not count.
        temperature, threshold: τ (default: the one that the model was trained with, 1 / its logit scale) and β.

    Raises UsageError for whatever of these the user got wrong, before the weights are loaded if possible.
    """

    def __init__(
        self, clip_model: str, prompts: Texts, baseline_prompts: Texts = (), alpha: float = 0.0,
        device: str | torch.device = "cpu", batch_size: int = 256, precision: str = "fp32",
        negative_prompts: Texts = (), temperature: float | None = None, threshold: float | None = None
    ):  # fmt: skip
        import open_clip

        super().__init__()
        prompts, baseline_prompts, negative_prompts = (
            [texts] if isinstance(texts, str) else list(texts) for texts in (prompts, baseline_prompts, negative_prompts)
        )
        texts = prompts + baseline_prompts + negative_prompts
        if not 0 <= alpha <= 1 or not 0 <= (threshold or 0) <= 1:
            raise UsageError(f"α and the threshold must lie between 0 and 1; they are {alpha} and {threshold}")
        if temperature is not None and not 0 < temperature < math.inf:
            raise UsageError(f"the temperature must be above 0 and finite, not {temperature}")
        if not negative_prompts and not temperature is threshold is None:
            raise UsageError("temperature and threshold belong to the contrastive reward: give a negative prompt")
        if not prompts or not all(text.strip() for text in texts):
            raise UsageError("a prompt is empty: say in a few words what there is to see")
        if alpha > 0 and not baseline_prompts + negative_prompts:
            raise UsageError(f"α = {alpha} needs a baseline prompt: describe the scene without the goal")
        name, how = find_clip_model(clip_model)
        if clip_model == "tiny":
            read = (Path(__file__).parent / "tiny_clip" / "captions.csv").read_text().lower()
            strange = {word for text in texts for word in re.findall(r"\w+", text.lower())} - {*re.findall(r"\w+", read)}
            if strange:
                tqdm.write(f"tiny has no captions with these words, which mean nothing to it: {', '.join(sorted(strange))}")
        logging.disable(logging.ERROR)  # open_clip and the hub log each failure several times: it becomes one line below
        try:
            tokenizer = open_clip.get_tokenizer(name)
            for text in texts:
                check_length(text, tokenizer)
            # In its precision before it goes to the GPU, where float32 would take twice the room.
            model = open_clip.create_model_from_pretrained(name, precision=precision, return_transform=False, **how)
            self.model = model.to(device)
        except UsageError:
            raise
        except Exception as error:  # anything may be wrong with a file or a download, and each library says it its own way
            raise UsageError(f"cannot load {clip_model} as a CLIP model ({first_line(error)}); {ELSEWHERE}") from error
        finally:
            logging.disable(logging.NOTSET)
        self.model.eval().requires_grad_(False)
        self.model.visual.to(memory_format=torch.channels_last)  # convolutional towers run up to twice as fast
        self.alpha, self.threshold = alpha, threshold
        self.batch_size, self.device = batch_size, torch.device(device)
        self.input_dtype = open_clip.get_input_dtype(precision) or torch.float32

        cfg = self.model.visual.preprocess_cfg  # the model's own, never constants of ours
        self.size = (cfg["size"],) * 2 if isinstance(cfg["size"], int) else tuple(cfg["size"])  # (height, width)
        self.interpolation = "bicubic" if cfg["interpolation"] == "random" else cfg["interpolation"]
        self.mean, self.std = (torch.tensor(cfg[key], device=device).view(3, 1, 1) * 255 for key in ("mean", "std"))

        try:
            self.embed(torch.zeros(1, 3, *self.size, dtype=torch.uint8))
            self.goal = self.embed_text(tokenizer(prompts).to(device)).mean(0)  # (D,)
        except (RuntimeError, TypeError) as error:  # as CoCa's text encoder in bf16
            advice = "try --precision fp32" if precision != "fp32" else ELSEWHERE
            raise UsageError(f"{clip_model} does not work in {precision}: {first_line(error)}; {advice}") from error
        self.baseline = self.embed_text(tokenizer(baseline_prompts).to(device)).mean(0) if baseline_prompts else self.goal
        self.negatives = self.embed_text(tokenizer(negative_prompts).to(device)) if negative_prompts else None  # (K, D)
        if alpha > 0 and not negative_prompts and torch.allclose(self.goal, self.baseline, atol=1e-5):
            raise UsageError("goal and baseline prompt mean the same to this model: no line runs through the two")
        self.temperature = temperature or 1 / self.model.logit_scale.exp().item()

    @torch.no_grad()
    def embed_text(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens (N, context length) -> unit embeddings (N, D) float32."""
        return F.normalize(self.model.encode_text(tokens).float(), dim=-1)

    @torch.no_grad()
    def embed(self, frames: torch.Tensor) -> torch.Tensor:
        """Frames (N, 3, H, W) uint8, squashed to the model's size if they have another -> unit embeddings (N, D) float32.

        The squashing is antialiased, as where CLIP models are trained. The paper's code shrank its frames without, which changes
        the rewards; the scripts draw at the model's size.
        """
        frames = frames.to(self.device)
        if frames.shape[-2:] != self.size:
            from torchvision.transforms import InterpolationMode, functional

            frames = functional.resize(frames, self.size, InterpolationMode(self.interpolation), antialias=True)
        pixels = (frames.float() - self.mean) / self.std
        pixels = pixels.to(self.input_dtype, memory_format=torch.channels_last)
        return F.normalize(self.model.encode_image(pixels).float(), dim=-1)

    def reward(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Unit embeddings s (N, D) -> rewards R(s) (N,)."""
        if self.negatives is not None:
            return contrastive_reward(embeddings, self.goal, self.negatives, self.temperature, self.threshold)
        return goal_baseline_reward(embeddings, self.goal, self.baseline, self.alpha)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """Frames (N, 3, H, W) uint8, any N, any device -> rewards (N,) float32 on the model's device."""
        rewards = [self.reward(self.embed(chunk)) for chunk in frames.split(self.batch_size) if len(chunk)]
        return torch.cat(rewards) if rewards else torch.zeros(0, device=self.device)


# ---- Many frames at once

THREADS = torch.get_num_threads()  # one a core, or OMP_NUM_THREADS


class Labeller:
    """States -> labels, batch by batch, on all workers at once; the batches, and so the labels, are the same whoever makes them.

    A worker draws states and scores the frames on one device: `Worker(args, device)` has a `reward_model`, and `label` takes states
    (N, …) to labels (N, 2), reward and true reward. On a CPU there is one a core, each on one thread, which is faster than PyTorch's
    own threads; they share the weights. `cuda` without a number is every GPU in sight. `args.ray_workers` more are Ray actors.
    """

    def __init__(self, Worker: type, args, device: torch.device):
        torch.set_num_threads(1)
        sys.setswitchinterval(0.0005)  # s; or a thread that holds the interpreter keeps another one from its next operation
        gpus = range(torch.cuda.device_count()) if device.type == "cuda" and device.index is None else ()
        workers = [Worker(args, torch.device("cuda", i)) for i in gpus] or [Worker(args, device)]
        if device.type == "cpu":
            workers += [Worker(args, device, workers[0].reward_model) for _ in range(THREADS - 1)]
        workers += [RayWorker(Worker, args, device) for _ in range(args.ray_workers)]
        self.free = SimpleQueue()  # workers with nothing to do
        for worker in workers:
            self.free.put(worker)
        # Threads that play and label; on a CPU one core is left to the thread that learns, and labels when it has learned.
        threads = max(len(workers) - 1, 1) if device.type == "cpu" else len(workers) + 1
        self.pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
        self.batch_size, self.rest = args.clip_batch_size, None
        self.batches, self.tasks, self.labels = deque(), [], {}  # batches that nobody has begun, with their numbers

    def add(self, states: torch.Tensor, last: bool = False) -> None:
        """Take in states (N, …); a batch begins when it is full and more come, or when these are the last."""
        states = states if self.rest is None else torch.cat([self.rest, states])
        *full, self.rest = states.split(self.batch_size)
        for batch in [*full, self.rest] if last else full:
            self.batches.append((len(self.tasks), batch))
            self.tasks.append(self.pool.submit(self.label_next))

    def label_next(self) -> None:
        """Label the oldest batch that nobody has begun, if there is one, with the next worker that is free."""
        try:
            number, states = self.batches.popleft()
        except IndexError:  # each has been begun by a thread
            return
        worker = self.free.get()
        try:
            self.labels[number] = worker.label(states)
        except ConnectionError as error:  # this worker does not come back: another one takes the batch
            tqdm.write(f"a Ray worker is lost, the others go on: {error}")
            self.batches.appendleft((number, states))
            return self.label_next()
        except BaseException:
            self.free.put(worker)
            raise
        self.free.put(worker)

    def result(self, show: str | None = None) -> torch.Tensor:
        """-> labels (N, 2) of all states since the last result, in their order; `show` names a progress bar."""
        self.add(self.rest[:0], last=True)
        for task in tqdm(self.tasks, desc=show, leave=False, disable=not show or None):
            self.label_next()  # this thread helps
            task.result()
        labels = torch.cat([self.labels[number] for number in range(len(self.tasks))])
        self.rest, self.tasks, self.labels = None, [], {}
        if not labels[:, 0].isfinite().all():
            raise UsageError("the reward model pays NaN or infinity: try --precision fp32, or another --temperature")
        return labels


class RayWorker:
    """A worker in a process of its own, here or on a machine of the cluster that RAY_ADDRESS names: only states and labels travel."""

    def __init__(self, Worker: type, args, device: torch.device):
        import ray

        if not ray.is_initialized():
            code = {"working_dir": str(Path(__file__).parent), "excludes": [".?*", "runs", "results", "tests"]}
            ray.init(runtime_env=code, include_dashboard=False, log_to_driver=False, logging_level="error")
        kind = "GPU" if device.type == "cuda" else "CPU"
        if ray.cluster_resources().get(kind, 0) < args.ray_workers:  # the others would wait for ever
            raise UsageError(f"--ray-workers {args.ray_workers} need as many {kind}s of the Ray cluster")
        self.ray, actor = ray, ray.remote(num_cpus=1, num_gpus=int(kind == "GPU"))(Worker)
        self.actor = actor.remote(args, torch.device(device.type))

    def label(self, states: torch.Tensor) -> torch.Tensor:
        try:
            return self.ray.get(self.actor.label.remote(states.cpu())).to(states.device)
        except self.ray.exceptions.RayActorError as error:
            raise ConnectionError(str(error).strip().splitlines()[-1]) from None


# ---- Loading


def native_precision(device: str | torch.device) -> str:
    """`bf16` where a GPU or x86 processor has instructions for it (two to three times as fast where we measured), else `fp32`."""
    if torch.device(device).type == "cuda":
        return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp32"
    capabilities = torch.cpu.get_capabilities()
    return "bf16" if capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") else "fp32"


def find_clip_model(clip_model: str) -> tuple[str, dict]:
    """What open_clip calls the model, and what else it must be told: weights, activation, normalization of pixels."""
    import open_clip
    from open_clip.pretrained import get_pretrained_cfg

    clip_model = TINY if clip_model == "tiny" else clip_model
    if clip_model.startswith("local-dir:"):
        folder = Path(clip_model.removeprefix("local-dir:"))
        if not (folder / "open_clip_config.json").is_file():
            raise UsageError(f"no CLIP model in {folder}: it holds no open_clip_config.json")
        if "hf_tokenizer_name" in (folder / "open_clip_config.json").read_text() and not [*folder.glob("tokenizer*")]:
            raise UsageError(f"{folder} holds no tokenizer: put its files there (tokenizer.json, tokenizer_config.json)")
        return clip_model, {}
    if clip_model.startswith("hf-hub:"):
        check_hub(clip_model, clip_model.removeprefix("hf-hub:"), "")
        return clip_model, {}
    name, _, pretrained = clip_model.partition("/")
    if name not in open_clip.list_models():
        if os.path.isdir(clip_model):
            raise UsageError(f"{clip_model} is a folder; for the model in it write local-dir:{clip_model}")
        if os.path.isfile(clip_model):
            raise UsageError(f"whose weights are in {clip_model}? Write NAME/{clip_model}, as in ViT-B-32/{clip_model}")
        close = nearest(name, [*open_clip.list_models(), "tiny"])
        raise UsageError(f"unknown CLIP model {name or repr(clip_model)}{close} Write NAME/TAG as in ViT-B-32/openai, or tiny")
    cfg, tags = get_pretrained_cfg(name, pretrained), open_clip.list_pretrained_tags_by_model(name)
    tokenizer = open_clip.get_model_config(name)["text_cfg"].get("hf_tokenizer_name")
    if cfg:
        check_hub(clip_model, *os.path.split(cfg["hf_hub"]))
    elif not pretrained:
        raise UsageError(f"{name} needs a weights tag or file, as in {name}/{(tags or ['/path/to/weights.pt'])[0]}")
    elif not os.path.isfile(pretrained):
        raise UsageError(f"{name} has no weights file or tag {pretrained}{nearest(pretrained, tags)}")
    if tokenizer:
        check_hub(f"the tokenizer of {name}", tokenizer, "tokenizer_config.json")
    how = {"pretrained": pretrained, "force_quick_gelu": cfg.get("quick_gelu", False)}  # OpenAI's are wrong with plain GELU
    return name, how if cfg else how | about_file(name, pretrained, [get_pretrained_cfg(name, tag) for tag in tags])


def about_file(name: str, path: str, tags: list[dict]) -> dict:
    """How to load weights from a file, and how they want their pixels: as all tagged weights of the model, if these agree."""
    keys = ("mean", "std", "interpolation")
    wanted = [{f"image_{key}": tag[key] for key in keys} for tag in tags]
    if not wanted or any(other != wanted[0] for other in wanted):
        print(f"{path}: pixels are assumed to be normalized as OpenAI's (published weights of {name} do not say, or disagree)")
        wanted = [{}]
    archive = zipfile.is_zipfile(path) and any("constants.pkl" in entry for entry in zipfile.ZipFile(path).namelist())
    return wanted[0] | {"weights_only": not archive}  # OpenAI's own are TorchScript archives: code instead of pickles


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().split("\n")[0][:300]


def nearest(name: str, known: list[str]) -> str:
    """The end of an error line: `; did you mean A or B or C?`"""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.3) or known[:3]
    return f"; did you mean {' or '.join(close)}?" if close else "; give a path to a weights file"


def check_hub(clip_model: str, repo: str, file: str) -> None:
    """Find out at once, rather than after open_clip's minute of retries, that weights cannot be had."""
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    file = file or "open_clip_pytorch_model.bin"  # open_clip takes this or, where there is one, its .safetensors sibling
    files = (file, str(Path(file).with_suffix(".safetensors")), "open_clip_model.safetensors")
    try:
        if not any(isinstance(huggingface_hub.try_to_load_from_cache(repo, name), str) for name in files):
            huggingface_hub.HfApi().model_info(repo, timeout=10)
    except (RepositoryNotFoundError, HFValidationError):
        raise UsageError(f"the hub has no model {repo} (or it is private): check {clip_model}") from None
    except Exception as error:
        raise UsageError(f"cannot fetch {clip_model}: no answer from the hub ({first_line(error)}); {ELSEWHERE}") from error


def check_length(text: str, tokenizer) -> None:
    """Refuse a text that the tokenizer would cut: with twice the room it must not come out longer."""
    room = tokenizer.context_length
    padding = tokenizer([""], context_length=2 * room)[0, -2]  # (the last place of some models' texts is a class token)
    length, full_length = ((tokenizer([text], context_length=n) != padding).sum() for n in (room, 2 * room))
    if full_length > length:
        raise UsageError(f'too long for this model, which reads {room} tokens; shorten it: "{text[:60]}…"')
