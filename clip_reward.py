"""A CLIP model as a reward function: how well does a frame show what a sentence says?

"Vision-Language Models are Zero-Shot Reward Models for Reinforcement Learning" (Rocamonde et al., ICLR 2024,
arXiv 2310.12921), and the contrastive reward of Baumli et al. (2023, arXiv 2312.09187).

    reward = CLIPReward("ViT-B-32/openai", "pole vertically upright on top of the cart", "pole and cart", 0.5)
    reward(frames)  # (N, 3, H, W) uint8 -> (N,) float32
"""

import json
import logging
import math
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

import torch
import torch.nn.functional as F
from tqdm import tqdm

HERE = Path(__file__).resolve().parent


class UsageError(ValueError):
    """One line for the user."""


# ---- The rewards


def goal_baseline_reward(
    embeddings: torch.Tensor, goal: torch.Tensor, baseline: torch.Tensor, alpha: float
) -> torch.Tensor:
    """Reward under goal-baseline regularization (Rocamonde et al., Definition 1); α = 0: the cosine (Eq. 2).

    With s, g, b the unit embeddings (or means) of frame, goal, baseline and d = (g - b) / ‖g - b‖,

        R(s) = 1 - ½ ‖α·proj_L(s) + (1 - α)·s - g‖²,   proj_L(s) = g + d dᵀ(s - g),   L the line through b, g.

    The vector inside the norm has length |dᵀ(s - g)| along d for any α; α shrinks only what is across:

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
    """Probability of the goal among the negatives: softmax of s·g / τ, s·n₁ / τ, … (N, D) -> (N,)."""
    logits = embeddings @ torch.cat([goal[None], negatives]).T / temperature  # (N, 1 + K)
    return logits.softmax(dim=1)[:, 0]


class CLIPReward(torch.nn.Module):
    """Frames -> rewards: `goal_baseline_reward`, with negative prompts `contrastive_reward`.

    The model is open_clip's `NAME/TAG`, `NAME/weights.pt`, `hf-hub:org/name` or `local-dir:PATH`, or `tiny`;
    else UsageError. Of several prompts the embeddings' mean counts. With a threshold β the reward is 1 where
    R(s) > β, else 0.
    """

    def __init__(
        self, clip_model: str, prompts: Sequence[str], baseline_prompts: Sequence[str] = (),
        alpha: float = 0.0, device: str | torch.device = "cpu", batch_size: int = 256,
        precision: str = "fp32", negative_prompts: Sequence[str] = (), temperature: float | None = None,
        threshold: float | None = None, head: str | None = None
    ):  # fmt: skip
        import open_clip

        super().__init__()
        lacks_baseline = alpha > 0 and not baseline_prompts and not negative_prompts
        if not prompts or not 0 <= alpha <= 1 or lacks_baseline:
            raise UsageError("it takes a prompt, α in [0, 1], and for α > 0 a baseline prompt")
        try:
            name, how = find_clip_model(clip_model)
            self.tokenizer = open_clip.get_tokenizer(name)
            how |= {"precision": precision, "return_transform": False}
            self.model = open_clip.create_model_from_pretrained(name, **how).to(device)
            self.eval().requires_grad_(False)
            goal = self.embed_text(prompts).mean(0)  # (D,)
            if head:
                from reward_check.mend import read

                goal = read(head, clip_model, goal)["goal"].to(device)
            baseline = self.embed_text(baseline_prompts or prompts).mean(0)
            negatives = self.embed_text(negative_prompts) if negative_prompts else None  # (K, D)
        except Exception as error:  # downloads fail in many ways
            raise UsageError(f"cannot use {clip_model}: {' '.join(str(error).split())[:300]}") from error
        self.model.visual.to(memory_format=torch.channels_last)  # convolutions are up to twice as fast
        self.alpha = alpha
        self.threshold = threshold
        self.batch_size = batch_size
        self.input_dtype = open_clip.get_input_dtype(precision) or torch.float32
        self.temperature = temperature or 1 / self.model.logit_scale.exp().item()

        cfg = self.model.visual.preprocess_cfg  # the model's own, never constants of ours
        size = cfg["size"]
        self.size = (size, size) if isinstance(size, int) else tuple(size)  # height, width
        self.interpolation = "bicubic" if cfg["interpolation"] == "random" else cfg["interpolation"]
        mean, std = (torch.tensor(cfg[name], device=device).view(3, 1, 1) * 255 for name in ("mean", "std"))
        buffers = {"goal": goal, "baseline": baseline, "negatives": negatives, "mean": mean, "std": std}
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def train(self, mode: bool = True):
        return super().train(False)  # frozen, whatever it is a part of

    @property
    def device(self) -> torch.device:
        return self.goal.device

    @torch.no_grad()
    def embed_text(self, texts: Sequence[str]) -> torch.Tensor:
        """A text or several -> unit embeddings (N, D) float32."""
        texts = [texts] if isinstance(texts, str) else list(texts)
        room = self.tokenizer.context_length
        padding = self.tokenizer([""], 2 * room)[0, -2]  # (the last may be a class token)
        short, long = ((self.tokenizer(texts, n) != padding).sum() for n in (room, 2 * room))
        if long > short:  # or the end would be cut off
            raise UsageError(f"longer than the {room} tokens that this model reads: {texts}")
        tokens = self.tokenizer(texts).to(self.model.logit_scale.device)
        return F.normalize(self.model.encode_text(tokens).float(), dim=-1)

    @torch.no_grad()
    def embed(self, frames: torch.Tensor) -> torch.Tensor:
        """Frames (N, 3, H, W) uint8 -> unit embeddings (N, D) float32. Other sizes are squashed."""
        if frames.dtype != torch.uint8:
            raise UsageError(f"frames are (N, 3, H, W) uint8, not {frames.dtype}")
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
        """Frames (N, 3, H, W) uint8 -> rewards (N,) float32 on the model's device."""
        return torch.cat([self.reward(self.embed(chunk)) for chunk in frames.split(self.batch_size)])


def find_clip_model(clip_model: str) -> tuple[str, dict]:
    """What open_clip calls it, and what else it must be told; a stranger's model runs no code."""
    import huggingface_hub
    import open_clip
    from transformers import dynamic_module_utils

    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0  # code is not even offered to be run
    clip_model = f"local-dir:{HERE / 'tiny_clip'}" if clip_model == "tiny" else clip_model
    kind, _, place = clip_model.partition(":")
    if kind in ("local-dir", "hf-hub"):
        config = f"{place}/open_clip_config.json"
        if kind == "hf-hub":
            config = huggingface_hub.hf_hub_download(place, "open_clip_config.json")
        text_cfg = json.loads(Path(config).read_text())["model_cfg"]["text_cfg"]
        if {*text_cfg.get("tokenizer_kwargs", {})} - {"clean", "strip_sep_token"}:
            raise UsageError("its tokenizer might run code")
        return clip_model, {}

    name, _, pretrained = clip_model.partition("/")
    cfg = open_clip.get_pretrained_cfg(name, pretrained)
    if not cfg and Path(pretrained).is_file():
        print(f"{pretrained}: pixels as OpenAI's; if made with QuickGELU, write {name}-quickgelu/…")
    return name, {"pretrained": pretrained, "force_quick_gelu": cfg.get("quick_gelu", False)}


def native_precision(device: str | torch.device) -> str:
    """`bf16` where the hardware has instructions for it, which is 2 to 3 times as fast, else `fp32`."""
    if torch.device(device).type == "cuda":
        native = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        has = torch.cpu.get_capabilities()
        native = has.get("avx512_bf16") or has.get("amx_bf16")
    return "bf16" if native else "fp32"


# ---- The settings that all scripts share


@dataclass
class RewardArgs:
    """What is rewarded, by which model, where; the scripts' `Args` begin with these."""

    prompt: tuple[str, ...] = ()  # the goal; several sentences are averaged
    baseline_prompt: tuple[str, ...] = ()  # the scene in general
    goal_baseline_alpha: float = 0.5  # α: 0 plain cosine, 1 only what lies along baseline-goal
    # NAME/TAG (the paper's: ViT-bigG-14/laion2b_s39b_b160k), NAME/FILE, hf-hub:ORG/NAME, local-dir:FOLDER,
    # tiny, or a reward program, FILE.py
    clip_model: str = "tiny"
    clip_batch_size: int = 128  # frames rewarded at once
    precision: Literal["fp32", "bf16"] | None = None  # of the model (default: bf16 where it is native)
    device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"  # cuda: every GPU
    ray_workers: int = 0  # more workers, on a Ray cluster (RAY_ADDRESS) or this machine
    negative_prompt: tuple[str, ...] = ()  # contrastive reward: what else might be seen
    temperature: float | None = None  # contrastive: τ of the softmax (default: the model's own)
    threshold: float | None = None  # β, above which the reward is 1, else 0 (default: the reward itself)
    head: str | None = None  # FILE of reward_check/mend.py: a mended goal

    def check(self) -> None:
        """Refuse likely mistakes."""
        for texts in (self.prompt, self.baseline_prompt):
            if len(texts) > 1 and all(text.isascii() and " " not in text for text in texts):
                raise UsageError("a prompt is a sentence: put quotes around it")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UsageError("PyTorch sees no CUDA GPU here: --device cpu")
        self.precision = self.precision or native_precision(self.device)
        a_round = self.num_envs * self.episode_length
        random_steps = a_round * max(1, math.ceil(self.learning_starts / a_round))
        if self.total_timesteps <= random_steps:
            raise UsageError(f"nothing would be learned: the first {random_steps} steps are random")
        if self.n_step > self.episode_length:
            raise UsageError("--n-step is above --episode-length")

    def check_resumed(self, before: "RewardArgs") -> None:
        """A run keeps its settings, but a few."""
        changing = "total_timesteps learning_rate evaluate_every episodes clip_model clip_batch_size device"
        for name, value in vars(before).items():
            if value != getattr(self, name) and name not in f"{changing} ray_workers resume".split():
                raise UsageError(f"this run began with {name} {value}, and keeps it")


def make_reward(args: RewardArgs, device: torch.device):
    """-> the `CLIPReward` or `ProgramReward` of these settings."""
    if args.clip_model.endswith(".py"):
        from code_reward.program import ProgramReward

        return ProgramReward(args.clip_model, UsageError)
    texts = (args.prompt, args.baseline_prompt, args.goal_baseline_alpha)
    how = (device, args.clip_batch_size, args.precision)
    others = (args.negative_prompt, args.temperature, args.threshold, args.head)
    logging.disable(logging.ERROR)  # open_clip and the hub log a failure many times; one line will do
    reward_model = CLIPReward(args.clip_model, *texts, *how, *others)
    print(f"reward model {args.clip_model}, {args.precision} on {device}: {'; '.join(args.prompt)}")
    if args.clip_model == "tiny":
        from tiny_clip.words import caution

        print(caution(args))
    return reward_model


# ---- Many frames at once

THREADS = torch.get_num_threads()  # one a core, or OMP_NUM_THREADS


class Labeller:
    """States -> rewards, batch by batch, on all workers at once, and the same whoever makes a batch.

    A script's `Worker` takes states (N, …) to labels (N, 2), reward and ground-truth reward. Each GPU has
    one, or each core of a CPU, on one thread, which is faster than PyTorch's own; they share a model.
    """

    def __init__(self, Worker: type, args: RewardArgs):
        torch.set_num_threads(1)
        sys.setswitchinterval(0.0005)  # with 0.005 s threads wait
        devices = [torch.device("cpu")]
        if args.device == "cuda":
            devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
        self.device = devices[0]
        workers = [Worker(args, self.device)]
        self.reward_model = workers[0].reward_model
        workers += [Worker(args, other, deepcopy(self.reward_model).to(other)) for other in devices[1:]]
        if self.device.type == "cpu":
            workers += [Worker(args, self.device, self.reward_model) for _ in range(THREADS - 1)]
        if args.ray_workers:
            from scale.ray_workers import RayWorker

            workers += [RayWorker(Worker, args) for _ in range(args.ray_workers)]
        self.free = SimpleQueue()  # workers with nothing to do
        for worker in workers:
            self.free.put(worker)
        # They play and label; on a CPU one core is left to the thread that learns.
        threads = max(len(workers) - 1, 1) if self.device.type == "cpu" else len(workers) + 1
        self.pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
        self.batch_size = args.clip_batch_size
        self.binary = args.clip_model.endswith(".py") or args.threshold is not None
        self.rest = None  # states short of a batch
        self.tasks = []  # batches, futures

    def add(self, states: torch.Tensor, last: bool = False) -> None:
        """Take in states (N, …); a full batch begins when more come."""
        states = states if self.rest is None else torch.cat([self.rest, states])
        *full, self.rest = states.split(self.batch_size)
        for batch in [*full, self.rest] if last else full:
            held = [batch]  # till labelled
            self.tasks.append((held, self.pool.submit(self.label, held)))

    def label(self, held: list) -> torch.Tensor:
        worker = self.free.get()
        try:
            return worker.label(held.pop())
        finally:
            self.free.put(worker)

    def result(self) -> torch.Tensor:
        """-> labels (N, 2) of all states since the last result, in order."""
        self.add(self.rest[:0], last=True)
        labels = []
        # This thread helps from the end, with what no other has begun.
        for held, task in tqdm(self.tasks[::-1], "label", leave=False, disable=None):
            labels.append(self.label(held) if task.cancel() else task.result())
        self.rest = None
        self.tasks = []
        labels = torch.cat(labels[::-1])
        low, high = labels[:, 0].aminmax()
        if not math.isfinite(high - low):
            raise UsageError("the reward is not finite: try --precision fp32")
        if low == high and len(labels) > 1 and not self.binary:
            raise UsageError("the reward is the same everywhere: try another prompt")
        return labels

    def check(self, states: torch.Tensor, rewards: torch.Tensor) -> None:
        """Is the reward still that by which a run's states (N, …) earned `rewards` (N,)?"""
        self.add(states)
        off = (self.result()[:, 0] - rewards).abs().mean()
        if off > 0.1 * rewards.std() + 1e-6:  # more than rounding on another device
            raise UsageError("this run began with another reward: model or rendering changed")
