"""Mend a reward with a few labels: a person says which of fifty frames show the sentence, and its goal moves.

    python -m reward_check.dataset --script sac_clip_humanoid --prompt "..." --output runs/own
    python -m reward_check.mend --dataset runs/own --output runs/own.safetensors
    python sac_clip_humanoid.py --prompt "..." --head runs/own.safetensors

The weights of a logistic regression on the frozen embeddings, and on their cosine with the sentence, take the
place of the sentence's embedding (for α = 0). A second round labels what the run has found (--run-dirs).
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from safetensors import safe_open
from safetensors.torch import save_file
from sklearn.linear_model import LogisticRegression

from clip_reward import UsageError
from reward_check import sheet
from reward_check.dataset import load
from reward_check.reward_models import balanced, embed_dataset, epic_distance

TRUST = 3  # in the sentence: its direction is held back so much less than all others


@dataclass
class Args:
    """Ask for labels of some frames of a dataset; write a file for --head of the training scripts."""

    dataset: Path
    clip_model: str = "tiny"
    prompt: tuple[str, ...] = ()  # (default: the dataset's)
    head: str | None = None  # of a round before: it tells what is rewarded most, and its labels count
    labels: int = 50  # frames to label: half of them those that are rewarded most, half any
    wrong: float | None = None  # nobody is asked: the dataset's labels answer, this share of them wrong
    seed: int = 1  # of the choice, and of wrong answers
    clip_batch_size: int = 128
    precision: Literal["fp32", "bf16"] | None = None
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    output: Path = Path("head.safetensors")  # beside it, as .png, the frames to label


def read(path: str, clip_model: str, sentence: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a head (no code), refused with any other model or sentence, by its embedding (D,)."""
    with safe_open(path, "pt") as file:
        head = {name: file.get_tensor(name) for name in file.keys()}
        alike = file.metadata()["clip_model"] == clip_model
        if not alike or F.cosine_similarity(head["sentence"], sentence.cpu(), dim=0) < 0.999:
            raise UsageError(f"{path} is for other weights or prompts: {file.metadata()}")
    return head


def learn(embeddings: torch.Tensor, labels: torch.Tensor, sentence: torch.Tensor) -> torch.Tensor:
    """Embeddings (n, D), labels (n,) bool, the sentence's embedding (D,) -> a goal (D,), a unit vector."""
    features = torch.cat([TRUST * embeddings @ sentence[:, None], embeddings], dim=1)
    weights = LogisticRegression(class_weight="balanced").fit(features, labels).coef_[0]
    return F.normalize(torch.from_numpy(TRUST * weights[0] * sentence.numpy() + weights[1:]), dim=0).float()


def main() -> None:
    args = tyro.cli(Args)
    settings, states, label, _ = load(args.dataset)
    prompts = list(args.prompt or settings["prompt"])
    embedded = embed_dataset(args, args.clip_model, prompts)
    frames, sentence = embedded["frames"], torch.stack([embedded["texts"][text] for text in prompts]).mean(0)
    before = {"goal": sentence, "embeddings": frames[:0], "labels": torch.zeros(0, dtype=torch.bool)}
    if args.head:
        before = read(args.head, args.clip_model, sentence)
    rng = np.random.default_rng(args.seed)
    order = (frames @ before["goal"]).argsort(descending=True).numpy()
    best = args.labels // 2
    chosen = rng.permutation([*order[:best], *rng.permutation(order[best:])[: args.labels - best]])
    if args.wrong is None:
        path = args.output.with_suffix(".png")
        sheet.numbered(path, chosen, settings["pictures"])
        question = f"{path} has {len(chosen)} frames. Which show “{'; '.join(prompts)}”? "
        numbers = input(question).replace(",", " ").split()
        names = [str(k + 1) for k in range(len(chosen))]
        if {*numbers} - {*names}:
            raise UsageError(f"no frames have the numbers {sorted({*numbers} - {*names})}")
        answers = torch.tensor([name in numbers for name in names])
    else:
        answers = label[chosen] ^ torch.tensor(rng.permutation(len(chosen)) < round(args.wrong * len(chosen)))
    labels = torch.cat([before["labels"], answers])
    embeddings = torch.cat([before["embeddings"], frames[chosen]])
    if labels.all() or not labels.any():
        raise UsageError("all answers are alike: try more --labels, or other states")
    goal = learn(embeddings, labels, sentence)
    head = {"goal": goal, "sentence": sentence, "embeddings": embeddings, "labels": labels}
    save_file(head, args.output, {"clip_model": args.clip_model, "prompt": "; ".join(prompts)})
    print(f"{args.output}: of {len(labels)} labels, {int(labels.sum())} of them goal states")
    if label is not None:
        rest = np.setdiff1d(np.arange(len(states)), chosen)
        for name, vector in (("before", before["goal"]), ("now", goal)):
            epic = epic_distance(frames[rest] @ vector, label[rest], balanced(label[rest]))
            print(f"{name}: EPIC distance {epic:.3f} on the dataset's other states")


if __name__ == "__main__":
    try:
        main()
    except (UsageError, OSError) as error:
        print(f"mend.py: error: {error}", file=sys.stderr)
        sys.exit(2)
