"""Is a CLIP model with a prompt a usable reward? Its rewards against labels, before anyone trains with it.

python figures/dataset.py --run-dirs runs/kneeling_1 --output datasets/kneeling
python figures/reward_models.py --dataset datasets/kneeling --clip-model tiny ViT-B-32/openai --output kneeling.png

For every model, prompt and α: EPIC distance with a confidence interval (paper, Figure 4), average precision and precision-recall
curve over the threshold β (Baumli et al., 2023), histograms of the rewards of goal and other states (paper, Figure 7), and the
frames that the reward gets wrong. Of a sentence that nobody has labelled states for: what it pays most and least, to judge by eye.
Embeddings are computed once a model and kept in the dataset's folder.
"""

import csv
import math
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import tyro
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter
from tqdm import tqdm

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]
from dataset import DatasetError, drawer, load, picture  # noqa: E402

from clip_reward import (  # noqa: E402
    TINY,
    CLIPReward,
    Labeller,
    UsageError,
    contrastive_reward,
    goal_baseline_reward,
    native_precision,
)


@dataclass
class Args:
    """Judge reward models on a dataset: a table, a CSV file and a sheet of pictures. Exit code 3: some of the models were skipped; 2: all were, or a bad setting."""

    dataset: Path
    """folder written by figures/dataset.py; human_label counts wherever it is filled in"""
    clip_model: tuple[str, ...] = ("tiny",)
    """NAME/TAG, NAME//path/to/weights, hf-hub:ORG/NAME, local-dir:PATH or tiny"""
    goal_baseline_alpha: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99)
    """strengths of goal-baseline regularization (default: those of the paper's Figure 4a)"""
    prompt: tuple[str, ...] = ()
    """each of them a reward of its own (default: the dataset's; several are averaged, as in its runs)"""
    baseline_prompt: tuple[str, ...] = ()
    """what the scene looks like in general; several are averaged (default: the dataset's)"""
    negative_prompt: tuple[str, ...] = ()
    """with these the contrastive reward is judged as well"""
    temperature: float | None = None
    """of the contrastive reward; the model's own, unless given"""
    resamples: int = 1000
    """bootstrap resamples of the states, for the 95 % confidence intervals"""
    clip_batch_size: int = 128
    """frames drawn and embedded at once"""
    precision: Literal["fp32", "bf16"] | None = None
    """of the models, fp32 or bf16 (default: what the scripts choose on this device)"""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """cpu or cuda"""
    seed: int = 1
    """of the resamples"""
    output: Path = Path("reward_models.png")
    """sheet to write; the table goes into a CSV file beside it"""


# ---- What a reward is measured by. The states are those of the dataset; a label is 1 for goal states and 0 for others.


def epic_distance(reward: torch.Tensor, label: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """EPIC distance of rewards (N,) to labels (N,) under each of B weightings of the states (B, N) -> (B,).

    Of rewards that depend on the next state only, as these do, canonicalization (Gleave et al., 2021) subtracts a constant; what
    is left of the distance is sqrt((1 - ρ) / 2), ρ the Pearson correlation over the states (paper, Lemma 1). 0 is best, 1 worst.
    """
    reward, label = reward.double() - reward.double().mean(), label.double() - label.double().mean()
    parts = torch.stack([reward, label, reward * label, reward.square(), label.square()], dim=1)
    r, y, ry, rr, yy = (weight @ parts.to(weight.dtype) / weight.sum(1, keepdim=True)).unbind(1)
    correlation = (ry - r * y) / ((rr - r.square()) * (yy - y.square())).sqrt()
    return ((1 - correlation.clamp(-1, 1)) / 2).sqrt()


def balanced(weight: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Weightings (B, N) -> the same with half of the weight on goal states."""
    goal = weight * label
    other = weight - goal
    return goal / goal.sum(1, keepdim=True) + other / other.sum(1, keepdim=True)


def precision_recall(reward: torch.Tensor, label: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Precision and recall of "reward ≥ β" as a finder of goal states, for each β that occurs, from the highest down."""
    order = reward.argsort(descending=True)
    reward, label = reward[order], label[order].double()
    last = torch.cat([reward[1:] != reward[:-1], torch.ones(1, dtype=torch.bool)])  # of the states with the same reward
    hits, found = label.cumsum(0)[last], torch.arange(1, len(label) + 1, dtype=torch.float64)[last]
    return hits / found, hits / label.sum()


def average_precision(reward: torch.Tensor, label: torch.Tensor) -> float:
    """Mean of the precision over the recall that each β adds; a reward at random has the share of goal states."""
    precision, recall = precision_recall(reward, label)
    return (precision * recall.diff(prepend=torch.zeros(1, dtype=torch.float64))).sum().item()


# ---- Embeddings


class Worker:
    """Draws states as the environment's script does, and embeds the frames: what it makes takes the place of the `Labeller`'s labels."""

    def __init__(self, args: SimpleNamespace, device: torch.device, reward_model: CLIPReward | None = None):
        self.reward_model = args.reward_model
        self.draw = drawer(args.settings, *self.reward_model.size, args.clip_batch_size, device)

    @torch.no_grad()
    def label(self, states: torch.Tensor) -> torch.Tensor:
        return self.reward_model.embed(self.draw(states)).cpu()


def embed_dataset(args: Args, clip_model: str, texts: list[str]) -> dict:
    """Embeddings of a model, from the dataset's folder as far as they are there.

    -> "frames" (N, D) of all states, drawn by the environment's script for this model as they are in training; "texts", a dict of
    (D,); "temperature" of the model; "parameters" of it, and "image_parameters" of its image encoder.
    """
    precision = args.precision or native_precision(args.device)
    path = args.dataset / "embeddings" / (re.sub(r"[^\w.-]+", "_", f"{clip_model}_{precision}") + ".pt")
    folder, file = (TINY if clip_model == "tiny" else clip_model).partition("local-dir:")[2], clip_model.partition("/")[2]
    files = sorted(Path(folder).iterdir()) if os.path.isdir(folder) else [file] if os.path.isfile(file) else []
    about = {"weights": [(os.stat(file).st_size, os.stat(file).st_mtime) for file in files if os.path.isfile(file)]}
    try:
        kept = torch.load(path, weights_only=True)
    except Exception:  # there is none, or only half of it
        kept = {}
    if kept.get("weights") != about["weights"]:  # weights made anew are embedded anew
        kept = {"texts": {}}
    missing = [text for text in texts if text not in kept["texts"]]
    if "frames" in kept and not missing:
        return kept

    reward_model = CLIPReward(
        clip_model, texts[0], device=args.device, batch_size=args.clip_batch_size, precision=precision, negative_prompts=texts
    )
    kept["texts"] |= dict(zip(texts, reward_model.negatives.cpu()))
    if "frames" not in kept:
        settings, states, _, _ = load(args.dataset)
        how = SimpleNamespace(
            settings=settings, reward_model=reward_model, clip_batch_size=args.clip_batch_size, ray_workers=0
        )
        threads = torch.get_num_threads()
        labeller = Labeller(Worker, how, reward_model.goal.device)  # one GPU: that which has the model
        try:
            labeller.add(states)
            kept["frames"] = labeller.result(f"embed with {clip_model}")
        finally:
            labeller.pool.shutdown(cancel_futures=True)
            torch.set_num_threads(threads)  # the labeller has set it to one
        kept["temperature"] = reward_model.temperature
        kept["parameters"] = sum(p.numel() for p in reward_model.model.parameters())
        kept["image_parameters"] = sum(p.numel() for p in reward_model.model.visual.parameters())
    path.parent.mkdir(exist_ok=True)
    torch.save(kept | about, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)
    return kept


def embed_with_all(args: Args, texts: list[str], skipped: list[str]) -> Iterator[tuple[str, dict]]:
    """Name and embeddings of each model; those that cannot be used are told of and join the `skipped`."""
    for clip_model in tqdm(args.clip_model, desc="judge", unit="model", disable=len(args.clip_model) == 1):
        try:
            embedded = embed_dataset(args, clip_model, texts)
        except UsageError as error:
            tqdm.write(f"reward_models.py: skipped {clip_model}: {error}", file=sys.stderr)
            skipped.append(clip_model)
            continue
        yield clip_model, embedded


def rewards_of(args: Args, embedded: dict, prompts: list[str], baseline: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and rewards (N,) of each kind of reward, one after the other."""
    frames = embedded["frames"]
    goal, baseline = (
        torch.stack([embedded["texts"][text] for text in texts]).mean(0) for texts in (prompts, baseline or prompts)
    )
    for alpha in args.goal_baseline_alpha:
        if alpha > 0 and torch.allclose(goal, baseline, atol=1e-5):
            raise DatasetError("α > 0 needs a --baseline-prompt that does not mean the same as the prompt")
        yield f"{alpha:g}", goal_baseline_reward(frames, goal, baseline, alpha)
    if args.negative_prompt:
        negatives = torch.stack([embedded["texts"][text] for text in args.negative_prompt])
        yield "contrastive", contrastive_reward(frames, goal, negatives, args.temperature or embedded["temperature"])


# ---- The sheet


def draw_ranking(path: Path, best: list[tuple[dict, torch.Tensor]], args: Args) -> None:
    """Write the picture where there are no labels: for each reward a line of the frames that it pays most to least."""
    figure = plt.figure(figsize=(15, 2.3 * len(best)), layout="constrained")
    for panel, (row, reward) in zip(figure.subfigures(len(best), 1, squeeze=False).flat, best):
        panel.suptitle(f"{describe(row)}: from what is paid most to what is paid least", fontsize="medium")
        order = reward.argsort(descending=True)
        places = torch.tensor([0, 0.005, 0.01, 0.02, 0.05, 0.25, 0.5, 0.75, 0.95, 1]) * (len(order) - 1)
        for axes, k in zip(panel.subplots(1, len(places)), order[places.round().long()].tolist()):
            axes.imshow(plt.imread(args.dataset / picture(k)))
            axes.set_title(f"{reward[k]:.3f}", fontsize="small")
            axes.set(xticks=[], yticks=[])  # the border stays: frames may be as white as the page
    write_picture(figure, path)


def describe(row: dict) -> str:
    kind = row["alpha"] if row["alpha"] == "contrastive" else f"α = {row['alpha']}"
    return f"{row['model']}, “{row['prompt']}”, {kind}"


def write_picture(figure: plt.Figure, path: Path) -> None:
    """Whole or not at all."""
    temporary = path.with_suffix(".tmp.png")
    figure.savefig(temporary, dpi=80)
    os.replace(temporary, path)


def draw_sheet(path: Path, rows: list[dict], best: list[tuple[dict, torch.Tensor]], label: torch.Tensor, args: Args) -> None:
    """Write the picture: EPIC against α and size, precision-recall, histograms of the best rewards, and frames of the best of all."""
    names = [Path(row["model"]).name if row["model"].startswith("local-dir:") else row["model"] for row, _ in best]
    if len({row["prompt"] for row, _ in best}) > 1:
        names = [f"{name}\n“{row['prompt']}”" for name, (row, _) in zip(names, best)]
    colours = plt.cm.viridis(torch.linspace(0, 0.85, len(best)).tolist())
    columns = min(4, len(best))
    lines = -(-len(best) // columns)
    figure = plt.figure(figsize=(15, 8.6 + 2.3 * lines), layout="constrained")
    above, middle, below = figure.subfigures(3, 1, height_ratios=[4, 2.3 * lines, 4.6])

    sizes = {row["image_parameters"] for row, _ in best}
    distance, curve, *others = above.subplots(1, 3 if len(sizes) > 1 else 2)
    for (row, reward), name, colour in zip(best, names, colours):
        same = [r for r in rows if r["model"] == row["model"] and r["prompt"] == row["prompt"]]
        plain = [r for r in same if r["alpha"] != "contrastive"]
        alphas = [float(r["alpha"]) for r in plain]
        distance.plot(alphas, [r["epic_balanced"] for r in plain], ".-", color=colour, label=name)
        distance.fill_between(
            alphas,
            *([r[f"epic_balanced_{end}"] for r in plain] for end in ("low", "high")),
            color=colour,
            alpha=0.2,
            linewidth=0,
        )
        distance.plot(alphas, [r["epic"] for r in plain], ":", color=colour, linewidth=1)
        for r, style in ((plain[0], "o"), (row, "*")):
            value = r["epic_balanced"]
            ends = [[max(value - r["epic_balanced_low"], 0)], [max(r["epic_balanced_high"] - value, 0)]]
            for size in others:
                size.errorbar(r["image_parameters"], value, ends, fmt=style, color=colour, capsize=3)
        precision, recall = precision_recall(reward, label)
        curve.plot(recall, precision, color=colour, label=f"{name} ({row['average_precision']:.2f})")
    chance = label.float().mean().item()
    curve.axhline(chance, color="gray", linestyle=":", label=f"at random ({chance:.2f})")
    distance.axhline(math.sqrt(0.5), color="gray", linestyle=":")
    distance.set(
        title="EPIC distance (lower is better; grey: chance)\n— balanced, 95 % interval   ⋯ as in the dataset", xlabel="α"
    )
    about = f"● α = {rows[0]['alpha']}   ★ with the α (or kind) of the lowest distance"
    for size in others:
        size.set(
            title=f"EPIC distance, balanced, against size\n{about}", xlabel="parameters of the image encoder", xscale="log"
        )
        size.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        size.xaxis.set_major_formatter(EngFormatter(sep=""))
        size.xaxis.set_minor_formatter(NullFormatter())
    curve.set(title="Precision and recall over the threshold β\n(best reward of each; average precision)", xlabel="recall")
    curve.set(ylabel="precision", xlim=(0, 1.01), ylim=(0, 1.01))
    for axes in (distance, curve, *others):
        axes.grid(alpha=0.3)
    for axes in (distance, curve):
        axes.legend(fontsize="x-small")

    for axes, entry, name in zip(middle.subplots(lines, columns, squeeze=False).flat, best, names):
        row, reward = entry
        bins = torch.linspace(reward.min(), reward.max() + 1e-6, 41)
        for what, some, colour in (("goal states", reward[label], "tab:green"), ("other states", reward[~label], "tab:red")):
            axes.hist(some, bins, color=colour, alpha=0.55, density=True, label=what)
        kind = f"α = {row['alpha']}" if row["alpha"] != "contrastive" else "contrastive"
        axes.set_title(f"rewards, {name}, {kind}", fontsize="small")
        axes.set_yticks([])
        axes.set(xlabel="reward", ylabel="share of the states")
        axes.legend(fontsize="x-small")
    for axes in middle.axes[len(best) :]:
        axes.remove()

    row, reward = min(best, key=lambda entry: entry[0]["epic_balanced"])
    order = reward.argsort(descending=True)
    panels = below.subfigures(2, 2)
    for panel, title, some in (
        (panels[0, 0], "paid most, goal states", order[label[order]]),
        (panels[0, 1], "paid most, NOT goal states: what an agent may end up doing", order[~label[order]]),
        (panels[1, 0], "paid least, goal states: what the reward misses", order[label[order]].flip(0)),
        (panels[1, 1], "paid least, not goal states", order[~label[order]].flip(0)),
    ):
        panel.suptitle(title, fontsize="small")
        spread = torch.linspace(0, max(len(some) // 50, 4), 5).long()  # not five of a kind
        for axes, k in zip(panel.subplots(1, 5), some[spread].tolist()):
            axes.imshow(plt.imread(args.dataset / picture(k)))
            axes.set_title(f"{reward[k]:.3f}", fontsize="small")
        for axes in panel.axes:
            axes.set(xticks=[], yticks=[])  # the border stays: frames may be as white as the page
    below.suptitle(f"Frames and rewards of the best: {describe(row)}", fontsize="medium")
    figure.suptitle(f"{args.dataset.name}: {len(label)} states, {chance:.1%} of them goal states, by the dataset's labels")
    write_picture(figure, path)


def main() -> None:
    args = tyro.cli(Args)
    folder = args.output.absolute().parent
    if not (os.path.isdir(folder) and os.access(folder, os.W_OK)):
        raise DatasetError(f"cannot write to {args.output}: {folder} is not a folder that can be written to")
    if args.output.suffix != ".png":
        raise DatasetError(f"--output must end in .png, not {args.output}")
    if not args.goal_baseline_alpha or not all(0 <= alpha <= 1 for alpha in args.goal_baseline_alpha):
        raise DatasetError("--goal-baseline-alpha must be values between 0 and 1")
    if args.resamples < 2:
        raise DatasetError(f"--resamples must be at least 2, not {args.resamples}")
    if args.clip_batch_size < 1:
        raise DatasetError(f"--clip-batch-size must be at least 1, not {args.clip_batch_size}")
    if args.temperature is not None and not args.temperature > 0:
        raise DatasetError(f"--temperature must be above 0, not {args.temperature}")
    if args.temperature is not None and not args.negative_prompt:
        raise DatasetError("--temperature belongs to the contrastive reward: give a --negative-prompt")
    try:
        torch.zeros(1, device=args.device)
    except (RuntimeError, AssertionError) as error:
        raise DatasetError(f"no device {args.device} here ({str(error).splitlines()[0]}); try --device cpu") from None
    settings, states, label, people = load(args.dataset)
    prompts = [[prompt] for prompt in args.prompt] or [settings["prompt"]]
    baseline = list(args.baseline_prompt or settings["baseline_prompt"])
    texts = [*dict.fromkeys([*sum(prompts, []), *baseline, *args.negative_prompt])]
    skipped = []
    if label is None:
        best = []
        for clip_model, embedded in embed_with_all(args, texts, skipped):
            for prompt in prompts:
                rewards = list(rewards_of(args, embedded, prompt, baseline))
                for kind, reward in [rewards[0], *rewards[1:][-1:]]:
                    best.append(({"model": clip_model, "prompt": "; ".join(prompt), "alpha": kind}, reward))
        if not best:
            raise DatasetError("none of the models could be used")
        draw_ranking(args.output, best, args)
        print(f"{args.dataset} has no labels, so what is paid most and least is to be judged by eye: written to {args.output}")
        sys.exit(3 if skipped else 0)
    count = int(label.sum())
    if min(count, len(label) - count) < 20:  # or a resample might have none
        raise DatasetError(f"{args.dataset} has {count} goal states of {len(label)}: at least 20 of each kind are needed")
    print(f"{args.dataset}: {len(label)} states, {count / len(label):.3f} of them goal states, {people} labelled by a person")
    if set(args.prompt) - set(settings["prompt"]) and people < len(label):
        print(f"the labels are those of “{'; '.join(settings['prompt'])}”, except where a person's stand instead")

    rng = torch.Generator().manual_seed(args.seed)
    # Row 0 is the dataset itself; the others say how often each state is drawn. The same for all rewards.
    weight = torch.ones(args.resamples, len(label))
    for row in weight[1:]:
        row.copy_(torch.bincount(torch.randint(len(label), (len(label),), generator=rng), minlength=len(label)))
    weights = {"epic": weight, "epic_balanced": balanced(weight, label)}
    rows, best = [], []
    for clip_model, embedded in embed_with_all(args, texts, skipped):
        for prompt in prompts:
            kinds = []
            for alpha, reward in rewards_of(args, embedded, prompt, baseline):
                if reward.min() == reward.max():
                    kind = alpha if alpha == "contrastive" else f"α = {alpha}"
                    tqdm.write(
                        f"left out: {clip_model}, {kind} pays all states the same, so nothing can be said of its distance"
                    )
                    continue
                row = {
                    "model": clip_model,
                    "prompt": "; ".join(prompt),
                    "alpha": alpha,
                    "average_precision": average_precision(reward, label),
                }
                for name, weighting in weights.items():
                    distances = epic_distance(reward, label, weighting)
                    low, high = distances[1:].quantile(torch.tensor([0.025, 0.975])).tolist()
                    row |= {name: distances[0].item(), f"{name}_low": low, f"{name}_high": high}
                row |= {"parameters": embedded["parameters"], "image_parameters": embedded["image_parameters"]}
                row |= {"states": len(label), "goal_share": count / len(label), "human_labels": people}
                rows.append(row)
                if not kinds or row["epic_balanced"] < kinds[0][0]["epic_balanced"]:
                    kinds = [(row, reward)]  # of all rewards only the best is kept
            best += kinds
    if not rows:
        raise DatasetError("none of the models could be used" if skipped else "no reward tells one state from another")
    print("| model | parameters | prompt | α | EPIC distance (95 % interval) | with half goal states | average precision |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        distances = " | ".join(f"{row[n]:.3f} ({row[f'{n}_low']:.3f} to {row[f'{n}_high']:.3f})" for n in weights)
        about = f"{row['model']} | {row['parameters'] / 1e6:.1f} M | {row['prompt']} | {row['alpha']}"
        print(f"| {about} | {distances} | {row['average_precision']:.3f} |")
    table = args.output.with_suffix(".csv")
    with open(table.with_suffix(".tmp"), "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)
    os.replace(table.with_suffix(".tmp"), table)
    draw_sheet(args.output, rows, best, label, args)
    print(f"written to {args.output} and {table}")
    sys.exit(3 if skipped else 0)


if __name__ == "__main__":
    try:
        main()
    except (DatasetError, UsageError) as error:
        print(f"reward_models.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
