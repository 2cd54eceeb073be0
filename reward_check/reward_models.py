"""Is a CLIP model with a prompt a usable reward? Its rewards against labels, before anyone trains with it.

python -m reward_check.dataset --run-dirs runs/kneeling_1 --output datasets/kneeling
python -m reward_check.reward_models --dataset datasets/kneeling --clip-model tiny ViT-B-32/openai

For every model, prompt and α: EPIC distance with a confidence interval (paper, Figure 4), average precision
and the precision-recall curve over the threshold β (Baumli et al., 2023), histograms of the rewards of goal
and other states (paper, Figure 7), and the frames that the reward gets wrong. For a sentence without labels:
the frames that it rewards most and least, to judge by eye. Embeddings are computed once a model and kept in
the dataset's folder.
"""

import csv
import hashlib
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from scipy.stats import bootstrap
from sklearn.metrics import average_precision_score, precision_recall_curve
from tqdm import tqdm

from clip_reward import (
    HERE,
    CLIPReward,
    UsageError,
    contrastive_reward,
    goal_baseline_reward,
    native_precision,
)
from reward_check import sheet
from reward_check.dataset import load, renderer
from reward_check.runs import script_of


@dataclass
class Args:
    """Judge reward models on a dataset: a table, a CSV file and a sheet of pictures.

    Exit code 3: some of the models were skipped; 2: all were, or a bad setting.
    """

    dataset: Path  # folder written by reward_check/dataset.py; human_label counts wherever it is filled in
    clip_model: tuple[str, ...] = ("tiny",)  # NAME/TAG, NAME/FILE, hf-hub:ORG/NAME, local-dir:PATH or tiny
    # α (default: those of the paper's Figure 4a)
    goal_baseline_alpha: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99)
    prompt: tuple[str, ...] = ()  # each a reward of its own (default: the dataset's, averaged if several)
    baseline_prompt: tuple[str, ...] = ()  # the scene in general; averaged (default: the dataset's)
    negative_prompt: tuple[str, ...] = ()  # with these the contrastive reward is judged as well
    temperature: float | None = None  # of the contrastive reward (default: the model's own)
    resamples: int = 1000  # bootstrap resamples of the states, for the 95 % confidence intervals
    clip_batch_size: int = 128  # frames rendered and embedded at once
    precision: Literal["fp32", "bf16"] | None = None  # of the models (default: as the scripts choose)
    device: str = "cuda" if torch.cuda.is_available() else "cpu"  # cpu, cuda or cuda:N
    seed: int = 1  # of the resamples
    output: Path = Path("reward_models.png")  # sheet to write; the table goes into a CSV file beside it


# ---- What a reward is measured by; a label is 1 for goal states and 0 for others


def epic_distance(reward: torch.Tensor, label: torch.Tensor, weight: torch.Tensor | None = None):
    """EPIC distance of rewards (…, N) to labels (…, N), the states weighted by (…, N) or all the same -> (…).

    Of rewards that depend on the next state only, as these do, canonicalization (Gleave et al., 2021)
    subtracts a constant; what is left of the distance is sqrt((1 - ρ) / 2), ρ the Pearson correlation over
    the states (paper, Lemma 1). 0 is best, 1 worst.
    """
    reward, label = reward.double(), label.double()
    weight = torch.ones_like(reward) if weight is None else weight.double()
    weight = weight / weight.sum(-1, keepdim=True)
    reward = reward - (weight * reward).sum(-1, keepdim=True)
    label = label - (weight * label).sum(-1, keepdim=True)
    scale = ((weight * reward**2).sum(-1) * (weight * label**2).sum(-1)).sqrt()
    correlation = (weight * reward * label).sum(-1) / scale
    return ((1 - correlation.clamp(-1, 1)) / 2).sqrt()


def balanced(label: torch.Tensor) -> torch.Tensor:
    """Labels (…, N) -> weights (…, N), half of them on goal states."""
    share = label.double().mean(-1, keepdim=True)
    return torch.where(label, 1 / share, 1 / (1 - share))


def distances(reward: np.ndarray, label: np.ndarray, axis: int = -1) -> np.ndarray:
    """Rewards and labels (…, N) -> EPIC distances (2, …), of the states as they are, and half goal states."""
    reward, label = torch.from_numpy(reward), torch.from_numpy(label)
    both = epic_distance(reward, label), epic_distance(reward, label, balanced(label))
    return torch.stack(both).numpy()


def threshold(reward: torch.Tensor, label: torch.Tensor, precision: float = 0.95) -> float:
    """The lowest β above which so many of the rewarded states (N,) are goal states; NaN without one."""
    precisions, _, rewards = precision_recall_curve(label, reward)
    enough = (precisions[:-1] >= precision).nonzero()[0]
    if not len(enough) or enough[0] == 0:
        return math.nan
    return float(rewards[enough[0] - 1] + rewards[enough[0]]) / 2  # between two rewards


def measure(reward: torch.Tensor, label: torch.Tensor, resamples: int, seed: int) -> dict:
    """Rewards and labels (N,) -> average precision, β, how many of the ten best rewarded states are no goal
    states, and both EPIC distances with their 95 % intervals."""
    data = reward.numpy(), label.numpy()
    how = {"paired": True, "method": "percentile", "batch": 50, "n_resamples": resamples, "rng": seed}
    interval = bootstrap(data, distances, **how).confidence_interval
    measured = {"average_precision": average_precision_score(label, reward)}
    measured["threshold"] = threshold(reward, label)
    measured["wrong_of_10"] = 10 - int(label[reward.topk(10).indices].sum())
    for name, *values in zip(("epic", "epic_balanced"), distances(*data), interval.low, interval.high):
        measured |= {name + end: value.item() for end, value in zip(("", "_low", "_high"), values)}
    return measured


# EPIC distances, half goal states, by which trainings of CartPole and the car can be told apart, and how many
# of these learned (results/dose.csv without errors drawn anew, results/predict.csv). A test compares.
LIKELY, MANY = 0.38, "142 of 143"
USELESS, FEW = 0.58, "7 of 17"


def verdict(row: dict, settings: dict) -> str:
    """What to expect of a training with this reward, where trainings so far say something about it."""
    distance, low, high = (row[f"epic_balanced{end}"] for end in ("", "_low", "_high"))
    why = f"EPIC distance {distance:.2f} ({low:.2f} to {high:.2f})"
    why += f", {row['wrong_of_10']} of the 10 best rewarded frames are not the goal"
    if settings["runs"] or row["human_labels"]:
        return f"no verdict: only fixed states with a condition's labels were compared with trainings; {why}"
    if not {"CartPole", "MountainCar"} & vars(script_of(settings)).keys():
        return f"no verdict: only on CartPole and the car have these figures told what is learned; {why}"
    if row["model"] != "tiny":
        return f"no verdict: these trainings were with tiny, its kin and falsified truths; {why}"
    if low >= USELESS:
        return f"often not learned: {why}; {FEW} trainings with {USELESS} or more learned"
    if high <= LIKELY:
        return f"likely to be learned: {why}; {MANY} trainings with up to {LIKELY} learned"
    return (
        f"no verdict: on CartPole or the car no model between {LIKELY} and {USELESS} was trained with; {why}"
    )


# ---- Embeddings


def embed_dataset(args: Args, clip_model: str, texts: list[str]) -> dict:
    """Embeddings of a model, from the dataset's folder as far as they are there.

    -> "frames" (N, D) of all states, rendered for this model as in training; "texts", a dict of (D,);
    "temperature" of the model; "parameters" of it, and "image_parameters" of its image encoder.
    """
    precision = args.precision or native_precision(args.device)
    name = hashlib.sha256(f"{clip_model} {precision}".encode()).hexdigest()[:16]
    path = args.dataset / "embeddings" / f"{name}.pt"
    folder = HERE / "tiny_clip" if clip_model == "tiny" else Path(clip_model.removeprefix("local-dir:"))
    files = sorted(folder.iterdir()) if folder.is_dir() else [Path(clip_model.partition("/")[2])]
    about = [(file.stat().st_size, file.stat().st_mtime) for file in files if file.is_file()]
    settings, states, _, _ = load(args.dataset)
    some = states[:: len(states) // 8 + 1]
    look = renderer(settings, 64, 96, len(some), torch.device("cpu"))(some)
    digest = hashlib.sha256(states.numpy().tobytes() + look.numpy().tobytes()).hexdigest()
    kept = torch.load(path, weights_only=True) if path.is_file() else {}
    if kept.get("of") != [about, digest]:  # other weights, states or rendering are embedded anew
        kept = {"of": [about, digest], "texts": {}}
    if "frames" in kept and not set(texts) - set(kept["texts"]):
        return kept

    how = {"device": args.device, "batch_size": args.clip_batch_size, "precision": precision}
    reward_model = CLIPReward(clip_model, texts, **how)
    kept["texts"] |= dict(zip(texts, reward_model.embed_text(texts).cpu()))
    if "frames" not in kept:
        render = renderer(settings, *reward_model.size, args.clip_batch_size, reward_model.device)
        chunks = tqdm(states.split(args.clip_batch_size), desc=f"embed with {clip_model}", leave=False)
        kept["frames"] = torch.cat([reward_model.embed(render(chunk)).cpu() for chunk in chunks])
        kept["temperature"] = reward_model.temperature
        kept["parameters"] = sum(p.numel() for p in reward_model.model.parameters())
        kept["image_parameters"] = sum(p.numel() for p in reward_model.model.visual.parameters())
    path.parent.mkdir(exist_ok=True)
    torch.save(kept, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)
    return kept


def rewards_of(args: Args, embedded: dict, prompts: list[str], baseline: list[str]) -> Iterator:
    """Name and rewards (N,) of each kind of reward, one after the other."""
    frames, texts = embedded["frames"], embedded["texts"]
    goal = torch.stack([texts[text] for text in prompts]).mean(0)
    base = torch.stack([texts[text] for text in baseline or prompts]).mean(0)
    for alpha in args.goal_baseline_alpha:
        if alpha > 0 and torch.allclose(goal, base, atol=1e-5):
            raise UsageError("α > 0 needs a --baseline-prompt that does not mean the same as the prompt")
        yield f"{alpha:g}", goal_baseline_reward(frames, goal, base, alpha)
    if args.negative_prompt:
        negatives = torch.stack([texts[text] for text in args.negative_prompt])
        temperature = args.temperature or embedded["temperature"]
        yield "contrastive", contrastive_reward(frames, goal, negatives, temperature)


def all_rewards(args: Args, settings: dict, skipped: list[str]) -> Iterator[tuple[dict, Iterator]]:
    """What each model and prompt is called, and its rewards; unusable models join the `skipped`."""
    prompts = [[prompt] for prompt in args.prompt] or [settings["prompt"]]
    baseline = list(args.baseline_prompt or settings["baseline_prompt"])
    texts = list(dict.fromkeys([*sum(prompts, []), *baseline, *args.negative_prompt]))
    for clip_model in tqdm(args.clip_model, desc="judge", unit="model", disable=len(args.clip_model) == 1):
        try:
            embedded = embed_dataset(args, clip_model, texts)
        except UsageError as error:
            tqdm.write(f"reward_models.py: skipped {clip_model}: {error}", file=sys.stderr)
            skipped.append(clip_model)
            continue
        sizes = {name: embedded[name] for name in ("parameters", "image_parameters")}
        for prompt in prompts:
            about = {"model": clip_model, "prompt": "; ".join(prompt)} | sizes
            yield about, rewards_of(args, embedded, prompt, baseline)
    if len(skipped) == len(args.clip_model):
        raise UsageError("none of the models could be used")


def main() -> int:
    sys.stdout.reconfigure(errors="replace")  # α, where the terminal has none
    args = tyro.cli(Args)
    if not all(0 <= alpha <= 1 for alpha in args.goal_baseline_alpha):
        raise UsageError("--goal-baseline-alpha must be values between 0 and 1")
    settings, states, label, people = load(args.dataset)
    rows, best, skipped = [], [], []
    if label is None:
        for about, rewards in all_rewards(args, settings, skipped):
            kinds = [(about | {"alpha": alpha}, reward) for alpha, reward in rewards]
            best += kinds[:1] + kinds[1:][-1:]
        sheet.ranking(args.output, best, settings["pictures"])
        print(f"{args.dataset} has no labels: judge by eye what is rewarded most and least, in {args.output}")
        return 3 if skipped else 0
    count = int(label.sum())
    if min(count, len(label) - count) < 20:  # or a resample might have none
        raise UsageError(f"{args.dataset} has {count} goal states of {len(label)}; it takes 20 of each kind")
    about_states = {"states": len(label), "goal_share": count / len(label), "human_labels": people}
    share = f"{count / len(label):.3f} of them goal states"
    print(f"{args.dataset}: {len(label)} states, {share}, {people} labelled by a person")
    if set(args.prompt) - set(settings["prompt"]) and people < len(label):
        print(f"the labels are those of “{'; '.join(settings['prompt'])}”, where no person's stand instead")

    for about, rewards in all_rewards(args, settings, skipped):
        of_prompt = []
        for alpha, reward in rewards:
            if reward.min() == reward.max():
                tqdm.write(f"left out: {sheet.describe(about | {'alpha': alpha})} rewards all states alike")
                continue
            row = about | {"alpha": alpha} | measure(reward, label, args.resamples, args.seed) | about_states
            of_prompt.append((row, reward))
        rows += [row for row, _ in of_prompt]
        best += sorted(of_prompt, key=lambda entry: entry[0]["epic_balanced"])[:1]
    if not rows:
        raise UsageError("no reward tells one state from another")
    head = "| model | parameters | prompt | α | EPIC distance (95 % interval) | with half goal states |"
    print(f"{head} average precision | β for a precision of 0.95 |\n" + "|---" * 8 + "|")
    for row in rows:
        names = ("epic", "epic_balanced")
        both = " | ".join(f"{row[n]:.3f} ({row[f'{n}_low']:.3f} to {row[f'{n}_high']:.3f})" for n in names)
        about = f"{row['model']} | {row['parameters'] / 1e6:.1f} M | {row['prompt']} | {row['alpha']}"
        print(f"| {about} | {both} | {row['average_precision']:.3f} | {row['threshold']:.3f} |")
    table = args.output.with_suffix(".csv")
    with open(table, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
    sheet.judged(args.output, rows, best, label, settings["pictures"])
    print(f"written to {args.output} and {table}")
    for row, _ in best:
        print(f"{sheet.describe(row)}: {verdict(row, settings)}")
    return 3 if skipped else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (UsageError, OSError) as error:
        print(f"reward_models.py: error: {error}", file=sys.stderr)
        sys.exit(2)
