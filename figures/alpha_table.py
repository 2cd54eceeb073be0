"""Success against α and textures, a Markdown table of many runs of sac_clip_mountaincar.py.

python figures/alpha_table.py runs/alpha_*
"""

import json
import sys
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
        try:
            result = json.loads((run_dir / "result.json").read_text())
            settings = result["settings"]
            cell = cells[settings["textures"], settings["goal_baseline_alpha"]]
            if settings["reward"] != "clip":
                raise ValueError
        except (OSError, KeyError, ValueError):
            print(f"alpha_table.py: error: {run_dir} holds no finished CLIP run of sac_clip_mountaincar.py", file=sys.stderr)
            sys.exit(2)
        curve = EventAccumulator(str(run_dir), {"scalars": 0}).Reload().Scalars("charts/success_rate")
        learned = next((f"{point.step / 1000:.0f}k" for point in curve if point.value >= 0.9), "never")
        late = [point.value for point in curve][len(curve) // 2 :]
        cell.append((settings["seed"], f"{result['success_rate']:.2f}", learned, f"{sum(late) / len(late):.2f}"))
    print("| textures | α | seeds | success rate | steps to 90 % success | success in the second half of training |")
    print("|---|---|---|---|---|---|")
    for (textures, alpha), rows in sorted(cells.items()):
        print(f"| {textures} | {alpha} | {' | '.join(', '.join(map(str, column)) for column in zip(*sorted(rows)))} |")


if __name__ == "__main__":
    main()
