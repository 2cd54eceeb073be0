"""Curves of several seeds from their TensorBoard files, above frames of the first one before and after training.

python figures/learning_curves.py runs/cartpole_1 runs/cartpole_2 … --output figures/cartpole.png
"""

import json
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

CURVES = {
    "charts/clip_return": "CLIP return (what the agent learns from)",
    "charts/success_rate": "success rate (never shown to it)",
}


@dataclass
class Args:
    """Plot CLIP return and success rate over the seeds of one experiment."""

    run_dirs: tyro.conf.Positional[tuple[Path, ...]]
    """run folders, one a seed"""
    output: Path = Path("curves.png")
    """PNG to write"""


def main() -> None:
    args = tyro.cli(Args)
    runs = [EventAccumulator(str(run_dir), {"scalars": 0}).Reload() for run_dir in args.run_dirs]
    results = [json.loads((run_dir / "result.json").read_text()) for run_dir in args.run_dirs]

    figure = plt.figure(figsize=(11, 5.4), layout="constrained")
    axes = figure.subplot_mosaic([list(CURVES), ["start"] * 2, ["end"] * 2], height_ratios=[3, 1, 1])
    for name, title in CURVES.items():
        curves = [run.Scalars(name) for run in runs]
        for curve, result in zip(curves, results):
            steps, values = zip(*((point.step, point.value) for point in curve))
            axes[name].plot(steps, values, linewidth=0.8, alpha=0.6, label=f"seed {result['settings']['seed']}")
        if len({len(curve) for curve in curves}) == 1:
            axes[name].plot(
                steps, np.mean([[point.value for point in curve] for curve in curves], axis=0), "black", label="mean"
            )
        axes[name].set(title=title, xlabel="environment steps")
        axes[name].grid(alpha=0.3)
    axes["charts/success_rate"].legend(fontsize="small")
    start, end = (plt.imread(args.run_dirs[0] / f"{file}.png") for file in ("frames_start", "result"))
    for where, picture, title in (("start", start, "first episode"), ("end", end[: len(start)], "after training")):
        axes[where].imshow(picture)
        axes[where].set_title(f"{title} (seed {results[0]['settings']['seed']})", fontsize="small")
        axes[where].axis("off")
    figure.savefig(args.output, dpi=110)

    print("| seed | success rate | CLIP return | ground-truth return | success in the second half of training | steps/s |")
    print("|---|---|---|---|---|---|")
    for run, result in zip(runs, results):
        successes = [point.value for point in run.Scalars("charts/success_rate")]
        row = [f"{result[name]:.2f}" for name in ("success_rate", "clip_return", "ground_truth_return")]
        row += [f"{np.mean(successes[len(successes) // 2 :]):.2f}", f"{result['steps_per_second']:.0f}"]
        print(f"| {result['settings']['seed']} | {' | '.join(row)} |")


if __name__ == "__main__":
    main()
