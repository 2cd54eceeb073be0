"""Success against α and textures, a Markdown table of many runs of sac_clip_mountaincar.py.

python figures/alpha_table.py runs/alpha_*
"""

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


@dataclass
class Args:
    """Print success for each pair of textures and α, one figure a seed."""

    run_dirs: tyro.conf.Positional[tuple[Path, ...]]
    """run folders"""


def main() -> None:
    cells = defaultdict(list)
    for run_dir in tyro.cli(Args).run_dirs:
        result = json.loads((run_dir / "result.json").read_text())
        curve = EventAccumulator(str(run_dir), {"scalars": 0}).Reload().Scalars("charts/success_rate")
        settings = result["settings"]
        learned = next((f"{point.step / 1000:.0f}k" for point in curve if point.value >= 0.9), "never")
        late = [point.value for point in curve][len(curve) // 2 :]
        row = (settings["seed"], f"{result['success_rate']:.2f}", learned, f"{sum(late) / len(late):.2f}")
        cells[settings["textures"], settings["goal_baseline_alpha"]].append(row)
    print(
        "| textures | α | seeds | success rate | first round with 90 % success, steps | success in the second half of training |"
    )
    print("|---|---|---|---|---|---|")
    for (textures, alpha), rows in sorted(cells.items()):
        print(f"| {textures} | {alpha} | {' | '.join(', '.join(map(str, column)) for column in zip(*sorted(rows)))} |")


if __name__ == "__main__":
    main()
