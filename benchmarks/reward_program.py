"""What a reward program costs, beside drawing and beside CLIP: the Markdown table of code_reward/README.md.

    python benchmarks/reward_program.py

A frame's cost is of one thread, in batches as in training. The loop's steps/s are the scripts' own, in turns (median and range).
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from types import ModuleType

import torch
import tyro
from throughput import run_loop
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import dqn_clip_cartpole as pole  # noqa: E402
import sac_clip_mountaincar as car  # noqa: E402
from clip_reward import CLIPReward, native_precision  # noqa: E402
from code_reward.program import ProgramReward  # noqa: E402


@dataclass
class Args:
    """Time a program, drawing and `tiny`, and the loops with each."""

    repetitions: int = 3  # of the loops, in turns


def microseconds(function: Callable, batch: torch.Tensor) -> float:
    """A frame's share of the fastest of some calls."""
    times = []
    for _ in range(12):
        start = time.perf_counter()
        function(batch)
        times.append(time.perf_counter() - start)
    return 1e6 * min(times) / len(batch)


def row(script: ModuleType, name: str, state_size: int, repetitions: int) -> list[str]:
    path = str(ROOT / "code_reward" / "programs" / f"{name}.py")
    program, tiny = ProgramReward(path), CLIPReward("tiny", "a goal", "a scene", 0.5, precision=native_precision("cpu"))
    scene = None if script is pole else script.Scene(*program.size, "realistic", torch.device("cpu"))
    draw = scene.draw if scene else partial(pole.draw, height=program.size[0], width=program.size[1])
    states = torch.rand(128, state_size) - 0.5
    frames = draw(states)
    costs = [microseconds(draw, states), microseconds(program, frames), microseconds(tiny, frames)]
    ways = ({"reward_program": path}, {}, {"reward": "ground-truth"})
    speeds = [[] for _ in ways]
    for _ in tqdm(range(repetitions), desc=script.__name__, disable=None):
        for way, speed in zip(ways, speeds):
            options = {"total_timesteps": 38_400, "checkpoint_every": 38_400, "clip_model": "tiny", "device": "cpu"}
            speed.append(run_loop(script.__name__, options | way, 8))
    cells = [f"{median(speed):.0f} ({min(speed):.0f} to {max(speed):.0f})" for speed in speeds]
    return [script.__name__, *(f"{cost:.0f}" for cost in costs), *cells]


def main() -> None:
    args = tyro.cli(Args)
    torch.set_num_threads(1)
    rows = [row(pole, "cartpole", 4, args.repetitions), row(car, "mountaincar", 2, args.repetitions)]
    head = "script | draw, µs a frame | program | `tiny` | loop with the program, steps/s | with `tiny` | ground truth"
    print(f"| {head} |", "|---" * 7 + "|", *(f"| {' | '.join(cells)} |" for cells in rows), sep="\n")


if __name__ == "__main__":
    main()
