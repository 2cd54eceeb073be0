"""How acting grows with cores: the humanoid's physics in 1, 2, … threads, and Amdahl's law for more.

    python -m benchmarks.acting

MuJoCo's C code lets other threads run; what Gymnasium and the policy do around it in Python does not. With f
the share of a round's time that threads can divide, n of them are 1 / (1 - f + f / n) times as fast. f is
taken from the speed with as many threads as there are cores.
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
import tyro

from clip_reward import THREADS
from sac_clip_humanoid import SAC, Args, Humanoids, rollout


@dataclass
class Acting:
    """Measure the speed of acting alone, in steps/s of all environments."""

    repetitions: int = 5  # rounds each, in turns; the median is shown
    more: tuple[int, ...] = (4, 8, 16)  # threads, computed for these


class NoLabeller:
    def add(self, states: torch.Tensor) -> None:
        pass


def main() -> None:
    acting = tyro.cli(Acting)
    torch.set_num_threads(1)
    sys.setswitchinterval(0.0005)  # as in the script
    args = Args()
    envs = Humanoids(args.num_envs, args)
    policy = SAC(envs.single_observation_space.shape[0], args).policy

    def speed() -> float:
        started = time.perf_counter()
        rollout(policy, 1.0, envs, NoLabeller(), 1, args)
        return args.num_envs * args.episode_length / (time.perf_counter() - started)

    speed()
    speeds = {threads: [] for threads in range(1, THREADS + 1)}
    for _ in range(acting.repetitions):
        for threads, measured in speeds.items():
            envs.pool = ThreadPoolExecutor(threads)
            measured.append(speed())
    medians = {threads: np.median(measured) for threads, measured in speeds.items()}
    print("| threads | acting, steps/s | against one | |\n|---|---|---|---|")
    for threads, median in medians.items():
        print(f"| {threads} | {median:.0f} | {median / medians[1]:.2f} | measured |")
    if THREADS > 1:
        share = (1 - medians[1] / medians[THREADS]) * THREADS / (THREADS - 1)
        for threads in acting.more:
            ratio = 1 / (1 - share + share / threads)
            print(f"| {threads} | {medians[1] * ratio:.0f} | {ratio:.2f} | computed, f = {share:.2f} |")


if __name__ == "__main__":
    main()
