"""How acting grows with cores: the humanoid's physics in 1, 2, … threads, and Amdahl's law for more.

    python -m benchmarks.acting

MuJoCo's C code lets other threads run; what Gymnasium and the policy do around it in Python does not. With f
the share of a round's time that is outside the interpreter, n threads can at best be 1 / (1 - f + f / n)
times as fast.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import mujoco
import numpy as np
import torch
import tyro

from clip_reward import THREADS
from sac_clip_humanoid import SAC, Args, Humanoids, rollout


@dataclass
class Acting:
    """Measure the speed of acting alone, in steps/s of all environments."""

    repetitions: int = 5  # rounds each, in turns; the median is shown
    threads: tuple[int, ...] = (2, 4, 8, 16)  # computed for these


class NoLabeller:
    def add(self, states: torch.Tensor) -> None:
        pass


def main() -> None:
    acting = tyro.cli(Acting)
    torch.set_num_threads(1)
    args = Args()
    envs = Humanoids(args.num_envs, args)
    policy = SAC(envs.single_observation_space.shape[0], args).policy

    def seconds() -> float:
        started = time.perf_counter()
        rollout(policy, 1.0, envs, NoLabeller(), 1, args)
        return time.perf_counter() - started

    def physics() -> float:
        """The C part of a round alone, in one thread."""
        robots = [env.unwrapped for env in envs.envs]
        rng = np.random.default_rng(1)
        actions = rng.uniform(-0.4, 0.4, (args.episode_length, args.num_envs, 17))
        envs.reset(seed=1)
        started = time.perf_counter()
        for step in actions:
            for robot, action in zip(robots, step):
                robot.data.ctrl[:] = action
                mujoco.mj_step(robot.model, robot.data, robot.frame_skip)
                mujoco.mj_rnePostConstraint(robot.model, robot.data)
        return time.perf_counter() - started

    steps = args.num_envs * args.episode_length
    seconds()
    times = {threads: [] for threads in range(1, THREADS + 1)}
    alone = []
    for _ in range(acting.repetitions):
        for threads, measured in times.items():
            envs.pool = ThreadPoolExecutor(threads)
            measured.append(seconds())
        alone.append(physics())
    one = np.median(times[1])
    share = min(np.median(alone) / one, 1)
    print("| threads | acting, steps/s | against one | |\n|---|---|---|---|")
    for threads, measured in times.items():
        ratio = one / np.median(measured)
        print(f"| {threads} | {steps / np.median(measured):.0f} | {ratio:.2f} | measured |")
    for threads in acting.threads:
        ratio = 1 / (1 - share + share / threads)
        print(f"| {threads} | {steps * ratio / one:.0f} | {ratio:.2f} | computed: {share:.2f} in MuJoCo |")


if __name__ == "__main__":
    main()
