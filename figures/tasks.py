"""One row a task: curves of CLIP return and success, and frames of the best policy.

python figures/tasks.py runs/kneeling_1 runs/standing-up_1 … --output figures/tasks.png
"""

import json
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

STRIP = 240 + 22  # pixels: the height of an episode's row on a contact sheet of sac_clip_humanoid.py


@dataclass
class Args:
    """Plot runs of sac_clip_humanoid.py, one task each."""

    run_dirs: tyro.conf.Positional[tuple[Path, ...]]
    """run folders"""
    output: Path = Path("tasks.png")
    """PNG to write"""


def main() -> None:
    args = tyro.cli(Args)
    figure, axes = plt.subplots(
        len(args.run_dirs),
        2,
        figsize=(14, 1.75 * len(args.run_dirs)),
        width_ratios=[1, 5],
        layout="constrained",
        squeeze=False,
    )
    print("| task | prompt | seed | success rate | CLIP return | steps/s |\n|---|---|---|---|---|---|")
    for (left, right), run_dir in zip(axes, args.run_dirs):
        result = json.loads((run_dir / "result.json").read_text())
        events = EventAccumulator(str(run_dir), {"scalars": 0}).Reload()
        task, prompt = result["settings"]["task"], "; ".join(result["settings"]["prompt"])
        twin = left.twinx()
        for axis, name, colour in ((left, "charts/clip_return", "tab:blue"), (twin, "charts/success_rate", "tab:orange")):
            if name in events.Tags()["scalars"]:
                steps, values = zip(*((event.step / 1000, event.value) for event in events.Scalars(name)))
                axis.plot(steps, values, colour, linewidth=0.8)
            axis.tick_params(labelsize="x-small", labelcolor=colour)
        twin.set_ylim(-0.05, 1.05)
        left.set_title("CLIP return (blue), success rate (orange); thousand steps", fontsize="xx-small")
        right.imshow(plt.imread(run_dir / "result.png")[:STRIP])
        right.set_title(prompt, fontsize="small")
        right.axis("off")
        rate = f"{result['success_rate']:.2f}" if "success_rate" in result else ""
        row = [task or "", prompt, result["settings"]["seed"], rate, f"{result['clip_return']:.2f}"]
        print(f"| {' | '.join(map(str, row))} | {result['steps_per_second']:.0f} |")
    figure.savefig(args.output, dpi=110)


if __name__ == "__main__":
    main()
