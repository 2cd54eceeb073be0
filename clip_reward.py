"""A CLIP model as a reward function: how well does a frame show what a sentence says?

This is the one module that the scripts share. It implements the reward of "Vision-Language Models are Zero-Shot Reward
Models for Reinforcement Learning" (Rocamonde et al., ICLR 2024, arXiv 2310.12921): Eq. 2 and Definition 1; and the one of
"Vision-Language Models as a Source of Rewards" (Baumli et al., 2023, arXiv 2312.09187), which asks which of several sentences fits.

    reward = CLIPReward("ViT-B-32/openai", ["pole vertically upright on top of the cart"], ["pole and cart"], alpha=0.5)
    reward(frames)  # (N, 3, H, W) uint8 -> (N,) float32
"""

import difflib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval

# open_clip, torchvision and the hub's client are imported where they are used: they take seconds, and --help needs none of them.

TINY = f"local-dir:{Path(__file__).resolve().parent / 'tiny_clip'}"  # the bundled model, see tiny_clip/README.md
ELSEWHERE = "choose another --clip-model, a local file (ViT-B-32//path/to/weights.pt), or the bundled one (tiny)"


class RewardModelError(ValueError):
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
        clip_model: `NAME/TAG` (`ViT-B-32/openai`), `NAME//path/to/weights.pt`, `hf-hub:org/name`, `local-dir:PATH`, or `tiny`.
            (A file of OpenAI's own weights wants the architecture `NAME-quickgelu`; with a tag that goes by itself.)
        prompts, baseline_prompts: one text or several; g and b are the means of the texts' unit embeddings, as in the
            paper's code (so with several goals R is the cosine with their mean plus a constant, at α = 0).
        alpha: the regularization strength α in [0, 1]; a baseline is only needed above 0.
        negative_prompts: what else there might be to see, one text or several; with them α and baseline do not count.
        temperature: τ of the contrastive reward (default: the one that the model was trained with, 1 / its logit scale).
        threshold: β of the contrastive reward, in [0, 1]; without it the reward is the probability itself.
        batch_size: frames encoded at once.
        precision: open_clip's name for what the encoder computes in (`fp32`, `bf16`, …; the scripts take `native_precision`);
            rewards are float32 all the same.

    Raises:
        RewardModelError: for whatever of these the user got wrong. Cheap checks come first; weights are loaded last.
    """

    def __init__(
        self,
        clip_model: str,
        prompts: str | Sequence[str],
        baseline_prompts: str | Sequence[str] = (),
        alpha: float = 0.0,
        device: str | torch.device = "cpu",
        batch_size: int = 256,
        precision: str = "fp32",
        negative_prompts: str | Sequence[str] = (),
        temperature: float | None = None,
        threshold: float | None = None,
    ):
        import open_clip
        from open_clip.modified_resnet import ModifiedResNet

        super().__init__()
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        baseline_prompts = [baseline_prompts] if isinstance(baseline_prompts, str) else list(baseline_prompts)
        negative_prompts = [negative_prompts] if isinstance(negative_prompts, str) else list(negative_prompts)
        texts = prompts + baseline_prompts + negative_prompts
        if not 0 <= alpha <= 1:
            raise RewardModelError(f"the goal-baseline α must lie between 0 and 1, not {alpha}")
        if batch_size < 1:
            raise RewardModelError(f"the CLIP batch size must be at least 1, not {batch_size}")
        if temperature is not None and not temperature > 0:
            raise RewardModelError(f"the temperature must be above 0, not {temperature}")
        if threshold is not None and not 0 <= threshold <= 1:
            raise RewardModelError(f"the threshold β must lie between 0 and 1, not {threshold}")
        if not prompts or not all(text.strip() for text in texts):
            raise RewardModelError("a prompt is empty: say in a few words what there is to see")
        if alpha > 0 and not baseline_prompts and not negative_prompts:
            raise RewardModelError(f"α = {alpha} needs a baseline prompt: describe the scene without the goal")

        name, pretrained, quick_gelu = find_clip_model(clip_model)
        logging.disable(logging.ERROR)  # open_clip and the hub log each failure several times: it becomes one line below
        try:
            tokenizer = open_clip.get_tokenizer(name)
            for text in texts:
                check_length(text, tokenizer)
            self.model = open_clip.create_model_from_pretrained(
                name,
                pretrained,
                precision=precision,
                device=device,
                force_quick_gelu=quick_gelu,
                return_transform=False,
            )
        except RewardModelError:
            raise
        except Exception as error:  # anything may be wrong with a file or a download, and each library says it its own way
            reason = str(error).strip().split("\n")[0]
            raise RewardModelError(f"cannot load the CLIP model {clip_model}: {reason[:300]}; {ELSEWHERE}") from error
        finally:
            logging.disable(logging.NOTSET)
        self.model.eval().requires_grad_(False)
        if isinstance(self.model.visual, ModifiedResNet):
            fold_batch_norms(self.model.visual)
        self.model.visual.to(memory_format=torch.channels_last)  # convolutional towers run up to twice as fast
        self.alpha, self.threshold = alpha, threshold
        self.batch_size, self.device = batch_size, torch.device(device)
        self.input_dtype = open_clip.get_input_dtype(precision) or torch.float32

        cfg = self.model.visual.preprocess_cfg  # the model's own, never constants of ours
        self.size = (cfg["size"],) * 2 if isinstance(cfg["size"], int) else tuple(cfg["size"])  # (height, width)
        self.interpolation = "bicubic" if cfg["interpolation"] == "random" else cfg["interpolation"]
        mean, std = (torch.tensor(cfg[key], device=device).view(3, 1, 1) * 255 for key in ("mean", "std"))
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

        goal = self.embed_text(tokenizer(prompts).to(device)).mean(0)
        baseline = self.embed_text(tokenizer(baseline_prompts).to(device)).mean(0) if baseline_prompts else goal
        if alpha > 0 and not negative_prompts and torch.allclose(goal, baseline, atol=1e-5):
            raise RewardModelError("goal and baseline prompt mean the same to this model: no line runs through the two")
        self.register_buffer("goal", goal)  # (D,)
        self.register_buffer("baseline", baseline)  # (D,)
        negatives = self.embed_text(tokenizer(negative_prompts).to(device)) if negative_prompts else None
        self.register_buffer("negatives", negatives)  # (K, D) or None
        self.temperature = temperature or 1 / self.model.logit_scale.exp().item()

    @torch.no_grad()
    def embed_text(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens (N, context length) -> unit embeddings (N, D) float32."""
        return F.normalize(self.model.encode_text(tokens).float(), dim=-1)

    @torch.no_grad()
    def embed(self, frames: torch.Tensor) -> torch.Tensor:
        """Frames (N, 3, H, W) uint8 -> unit embeddings (N, D) float32, all in one batch.

        Frames of another size are squashed to the model's input, neither cropped nor padded, as in the paper.
        """
        frames = frames.to(self.device)
        if frames.shape[-2:] != self.size:
            from torchvision.transforms import InterpolationMode
            from torchvision.transforms.functional import resize

            frames = resize(frames, self.size, InterpolationMode(self.interpolation), antialias=True)
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


def native_precision(device: str | torch.device) -> str:
    """`bf16` where a GPU or x86 processor has instructions for it (two to three times as fast where we measured), else `fp32`."""
    if torch.device(device).type == "cuda":
        return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp32"
    capabilities = torch.cpu.get_capabilities()
    return "bf16" if capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") else "fp32"


def fold_batch_norms(module: torch.nn.Module) -> None:
    """Put each batch normalization of a ResNet in evaluation mode into the convolution before it: the same result, sooner."""
    children = list(module.named_children())
    for (first, conv), (second, norm) in zip(children, children[1:]):
        if isinstance(norm, torch.nn.BatchNorm2d):
            setattr(module, first, fuse_conv_bn_eval(conv, norm))
            setattr(module, second, torch.nn.Identity())
    for _, child in children:
        fold_batch_norms(child)


def find_clip_model(clip_model: str) -> tuple[str, str | None, bool]:
    """What open_clip calls the model: its name, its weights (a tag, a file, or None), and whether it wants QuickGELU.

    Loads nothing; asks the hub, once and briefly, for weights that are not in the cache.

    Raises:
        RewardModelError: no such model, tag, file or folder, or a hub that does not answer.
    """
    import open_clip
    from open_clip.pretrained import get_pretrained_cfg

    if clip_model == "tiny":
        clip_model = TINY
    if clip_model.startswith("local-dir:"):
        folder = Path(clip_model.removeprefix("local-dir:"))
        if not os.path.isfile(folder / "open_clip_config.json"):
            raise RewardModelError(f"no CLIP model in {folder}: it holds no open_clip_config.json")
        return clip_model, None, False
    if clip_model.startswith("hf-hub:"):
        check_hub(clip_model, clip_model.removeprefix("hf-hub:"), "")
        return clip_model, None, False
    name, _, pretrained = clip_model.partition("/")
    if name not in open_clip.list_models():
        if os.path.isdir(clip_model):
            raise RewardModelError(f"{clip_model} is a folder; for the model in it write local-dir:{clip_model}")
        raise RewardModelError(f"unknown CLIP model {name}{nearest(name, [*open_clip.list_models(), 'tiny'])}")
    cfg = get_pretrained_cfg(name, pretrained)
    if cfg:
        check_hub(clip_model, *os.path.split(cfg["hf_hub"]))
    elif not os.path.isfile(pretrained):
        tags = open_clip.list_pretrained_tags_by_model(name)
        if not pretrained:
            raise RewardModelError(
                f"{name} needs a weights tag or file, as in {name}/{tags[0] if tags else '/path/to/weights.pt'}"
            )
        what = "weights file" if "/" in pretrained else "weights tag"
        raise RewardModelError(f"{name} has no {what} {pretrained}{nearest(pretrained, tags)}")
    return name, pretrained, cfg.get("quick_gelu", False)  # OpenAI's weights are wrong with plain GELU


def nearest(name: str, known: list[str]) -> str:
    """The end of an error line: `; did you mean A, B or C?`"""
    lower = {other.lower(): other for other in known}
    close = [lower[match] for match in difflib.get_close_matches(name.lower(), lower, n=3, cutoff=0.3)] or known[:3]
    return f"; did you mean {' or '.join(close)}?" if close else "; give a path to a weights file"


def check_hub(clip_model: str, repo: str, file: str) -> None:
    """Find out at once, rather than after open_clip's minute of retries, that weights cannot be had."""
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    file = file or "open_clip_pytorch_model.bin"  # open_clip takes this or, where there is one, its .safetensors sibling
    files = (file, str(Path(file).with_suffix(".safetensors")), "open_clip_model.safetensors")
    try:
        if any(isinstance(huggingface_hub.try_to_load_from_cache(repo, file), str) for file in files):
            return
        huggingface_hub.HfApi().model_info(repo, timeout=10)
    except (RepositoryNotFoundError, HFValidationError):
        raise RewardModelError(f"the hub has no model {repo} (or it is private): check {clip_model}") from None
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise RewardModelError(f"cannot fetch {clip_model}: no answer from the hub ({reason}); {ELSEWHERE}") from error


def check_length(text: str, tokenizer) -> None:
    """Refuse a text that the tokenizer would cut: with twice the room it must not come out longer."""
    room = tokenizer.context_length
    padding = tokenizer([""], context_length=2 * room)[0, -2]  # (the last place of some models' texts is a class token)
    length, full_length = ((tokenizer([text], context_length=n) != padding).sum() for n in (room, 2 * room))
    if full_length > length:
        raise RewardModelError(f'too long for this model, which reads {room} tokens; shorten it: "{text}"')
