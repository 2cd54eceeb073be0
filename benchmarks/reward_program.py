"""What a reward program costs, beside rendering and beside CLIP: the Markdown table of code_reward/README.md.

    python -m benchmarks.reward_program

A frame's cost is of one thread, in batches as in training. The loop's steps/s are the scripts' own, in turns
(median and range).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import tyro
from tqdm import tqdm

from benchmarks.throughput import ROOT, run_loop
from clip_reward import CLIPReward, native_precision
from code_reward.program import ProgramReward
from reward_check.dataset import renderer


@dataclass
class Args:
    """Time a program, rendering and `tiny`, and the loops with each."""

    repetitions: int = 3  # of the loops, in turns


def microseconds(function: Callable, batch: torch.Tensor) -> float:
    """A frame's share of the fastest of some calls."""
    times = []
    for _ in range(12):
        start = time.perf_counter()
        function(batch)
        times.append(time.perf_counter() - start)
    return 1e6 * min(times) / len(batch)


def row(script: str, name: str, state_size: int, repetitions: int) -> list[str]:
    path = str(ROOT / "code_reward" / "programs" / f"{name}.py")
    program = ProgramReward(path)
    tiny = CLIPReward("tiny", "a pole", "a scene", 0.5, precision=native_precision("cpu"))
    settings = {"script": script, "textures": "realistic", "camera": None, "supersample": None}
    render = renderer(settings, *program.size, 128, torch.device("cpu"))
    states = torch.rand(128, state_size) - 0.5
    frames = render(states)
    costs = [microseconds(render, states), microseconds(program, frames), microseconds(tiny, frames)]
    ways = ({"clip_model": path}, {"clip_model": "tiny"}, {"clip_model": "tiny", "reward": "ground-truth"})
    speeds = [[] for _ in ways]
    for _ in tqdm(range(repetitions), desc=script, disable=None):
        for way, speed in zip(ways, speeds):
            speed.append(run_loop(script, way | {"device": "cpu"}, 8))
    cells = [f"{median(speed):.0f} ({min(speed):.0f} to {max(speed):.0f})" for speed in speeds]
    return [script, *(f"{cost:.0f}" for cost in costs), *cells]


def main() -> None:
    args = tyro.cli(Args)
    torch.set_num_threads(1)
    rows = [row("dqn_clip_cartpole", "cartpole", 4, args.repetitions)]
    rows.append(row("sac_clip_mountaincar", "mountaincar", 2, args.repetitions))
    head = "script | rendering, µs a frame | program | `tiny` | loop with the program, steps/s | with `tiny`"
    print(f"| {head} | ground truth |", "|---" * 7 + "|", sep="\n")
    print(*(f"| {' | '.join(cells)} |" for cells in rows), sep="\n")


if __name__ == "__main__":
    main()
