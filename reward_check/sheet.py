"""The sheets of pictures that reward_check/reward_models.py writes."""

import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter
from sklearn.metrics import precision_recall_curve

plt.rcParams["text.parse_math"] = False  # prompts may hold dollar signs
Judged = list[tuple[dict, torch.Tensor]]  # what a reward is called and how good it is, and the rewards (N,)


def describe(row: dict) -> str:
    return f"{row['model']}, “{row['prompt']}”, {kind(row)}"


def kind(row: dict) -> str:
    return row["alpha"] if row["alpha"] == "contrastive" else f"α = {row['alpha']}"


def frames(panel, title: str, indices: torch.Tensor, reward: torch.Tensor, pictures: list[Path]) -> None:
    """The pictures of some states, side by side, with their rewards."""
    panel.suptitle(title, fontsize="small")
    for axes, k in zip(panel.subplots(1, len(indices)), indices.tolist()):
        axes.imshow(plt.imread(pictures[k]))
        axes.set_title(f"{reward[k]:.3f}", fontsize="small")
        axes.set(xticks=[], yticks=[])  # the border stays: frames may be as white as the page


def numbered(path: Path, chosen, pictures: list[Path]) -> None:
    """The pictures of some states with the numbers 1, 2, …, ten a line."""
    figure = plt.figure(figsize=(15, 1.75 * math.ceil(len(chosen) / 10)), layout="constrained")
    for k, i in enumerate(chosen):
        axes = figure.add_subplot(math.ceil(len(chosen) / 10), 10, k + 1)
        axes.imshow(plt.imread(pictures[i]))
        axes.set(title=k + 1, xticks=[], yticks=[])
    figure.savefig(path, dpi=80)
    plt.close(figure)


def ranking(path: Path, rewards: Judged, pictures: list[Path]) -> None:
    """Without labels: for each reward a line of frames, from the most rewarded to the least."""
    figure = plt.figure(figsize=(15, 2.3 * len(rewards)), layout="constrained")
    places = torch.tensor([0, 0.005, 0.01, 0.02, 0.05, 0.25, 0.5, 0.75, 0.95, 1])
    for panel, (row, reward) in zip(figure.subfigures(len(rewards), 1, squeeze=False).flat, rewards):
        order = reward.argsort(descending=True)
        chosen = order[(places * (len(order) - 1)).round().long()]
        frames(panel, f"{describe(row)}: from the most rewarded to the least", chosen, reward, pictures)
    figure.savefig(path, dpi=80)


def judged(path: Path, rows: list[dict], best: Judged, label: torch.Tensor, pictures: list[Path]) -> None:
    """EPIC against α and size, precision-recall, histograms of the best rewards, frames of the best one."""
    names = [row["model"].split("/")[-1] if ":" in row["model"] else row["model"] for row, _ in best]
    if len({row["prompt"] for row, _ in best}) > 1:
        names = [f"{name}\n“{row['prompt']}”" for name, (row, _) in zip(names, best)]
    colours = plt.cm.viridis(torch.linspace(0, 0.85, len(best)).tolist())
    columns = min(4, len(best))
    lines = math.ceil(len(best) / columns)
    figure = plt.figure(figsize=(15, 8.6 + 2.3 * lines), layout="constrained")
    above, middle, below = figure.subfigures(3, 1, height_ratios=[4, 2.3 * lines, 4.6])

    sizes = {row["image_parameters"] for row, _ in best}
    distance, curve, *others = above.subplots(1, 3 if len(sizes) > 1 else 2)
    for (row, reward), name, colour in zip(best, names, colours):
        same = [r for r in rows if (r["model"], r["prompt"]) == (row["model"], row["prompt"])]
        plain = [r for r in same if r["alpha"] != "contrastive"]
        alphas = [float(r["alpha"]) for r in plain]
        low, value, high = ([r[f"epic_balanced{end}"] for r in plain] for end in ("_low", "", "_high"))
        distance.plot(alphas, value, ".-", color=colour, label=name)
        distance.fill_between(alphas, low, high, color=colour, alpha=0.2, linewidth=0)
        distance.plot(alphas, [r["epic"] for r in plain], ":", color=colour, linewidth=1)
        for r, style in ((same[0], "o"), (row, "*")):
            value = r["epic_balanced"]
            ends = [[max(value - r["epic_balanced_low"], 0)], [max(r["epic_balanced_high"] - value, 0)]]
            for size in others:
                size.errorbar(r["image_parameters"], value, ends, fmt=style, color=colour, capsize=3)
        precision, recall, _ = precision_recall_curve(label, reward)
        about = f"{name} ({row['average_precision']:.2f})"
        curve.plot(recall[:-1], precision[:-1], color=colour, label=about)  # the last one is of no state
    chance = label.float().mean().item()
    curve.axhline(chance, color="gray", linestyle=":", label=f"at random ({chance:.2f})")
    curve.set(title="Precision and recall over the threshold β\n(best reward of each; average precision)")
    curve.set(xlabel="recall", ylabel="precision", xlim=(0, 1.01), ylim=(0, 1.01))
    distance.axhline(math.sqrt(0.5), color="gray", linestyle=":")
    distance.set(
        title="EPIC distance (lower is better; grey: chance)\n— balanced, 95 % interval   ⋯ as in the dataset"
    )
    distance.set(xlabel="α")
    about = f"● {kind(rows[0])}   ★ with the α (or kind) of the lowest distance"
    for size in others:
        size.set(title=f"EPIC distance, balanced, against size\n{about}", xscale="log")
        size.set(xlabel="parameters of the image encoder")
        size.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        size.xaxis.set_major_formatter(EngFormatter(sep=""))
        size.xaxis.set_minor_formatter(NullFormatter())
    for axes in (distance, curve, *others):
        axes.grid(alpha=0.3)
    for axes in (distance, curve):
        axes.legend(fontsize="x-small")

    panels = list(middle.subplots(lines, columns, squeeze=False).flat)
    for axes, (row, reward), name in zip(panels, best, names):
        bins = torch.linspace(reward.min(), reward.max() + 1e-6, 41)
        how = {"bins": bins, "alpha": 0.55, "density": True}
        axes.hist(reward[label], color="tab:green", label="goal states", **how)
        axes.hist(reward[~label], color="tab:red", label="other states", **how)
        axes.set_title(f"rewards, {name}, {kind(row)}", fontsize="small")
        axes.set(xlabel="reward", ylabel="share of the states", yticks=[])
        axes.legend(fontsize="x-small")
    for axes in panels[len(best) :]:
        axes.remove()

    row, reward = min(best, key=lambda entry: entry[0]["epic_balanced"])
    order = reward.argsort(descending=True)
    goal, other = order[label[order]], order[~label[order]]
    for panel, title, some in zip(
        below.subfigures(2, 2).flat,
        (
            "most rewarded, goal states",
            "most rewarded, NOT goal states: what an agent may end up doing",
            "least rewarded, goal states: what the reward misses",
            "least rewarded, not goal states",
        ),
        (goal, other, goal.flip(0), other.flip(0)),
    ):
        spread = torch.linspace(0, max(len(some) // 50, 4), 5).long()  # not five of a kind
        frames(panel, title, some[spread], reward, pictures)
    below.suptitle(f"Frames and rewards of the best: {describe(row)}", fontsize="medium")
    figure.suptitle(
        f"{pictures[0].parents[1].name}: {len(label)} states, {chance:.1%} of them goal states by their labels"
    )
    figure.savefig(path, dpi=80)
