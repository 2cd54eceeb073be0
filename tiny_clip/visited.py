"""States of the humanoid that policies visited while a model rewarded them, into visited.npy.

    python -m tiny_clip.visited --run-dirs runs/kneeling_1 runs/kneeling_2

The next training names them like all others: this is how a reward is mended that policies have hacked. Of
each run half of the states are of those that were rewarded most, the rest any; all runs give as many.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro

from reward_check.runs import rounds_of
from sac_clip_humanoid import POSE_SIZE
from tiny_clip.scenes import VISITED

BEST = 0.1  # share of a run's states that counts as rewarded most


@dataclass
class Args:
    """Add states of these runs to visited.npy."""

    run_dirs: tuple[Path, ...]
    states: int = 1000  # of each run
    limit: int = 41_500  # states in all, 2 MB: of those before as many stay, by chance, as there is room for
    output: Path = VISITED
    seed: int = 1  # of the choice


def states_of(run_dir: Path, n: int, rng: np.random.Generator) -> np.ndarray:
    """-> n poses (n, 24) of a run's rounds, half floats."""
    rounds = [torch.load(path, weights_only=True)["round"] for path in rounds_of(run_dir)]
    poses = torch.cat([states[1:, :, :POSE_SIZE].flatten(0, 1) for states, _, _ in rounds])
    rewards = torch.cat([rewards.flatten() for _, _, rewards in rounds])
    best = rewards.topk(int(BEST * len(rewards))).indices.numpy()
    chosen = np.concatenate([rng.choice(best, n // 2), rng.integers(len(poses), size=n - n // 2)])
    return poses[torch.from_numpy(chosen)].numpy().astype(np.float16)


def main() -> None:
    args = tyro.cli(Args)
    rng = np.random.default_rng(args.seed)
    visited = np.concatenate([states_of(run_dir, args.states, rng) for run_dir in args.run_dirs])
    if args.output.exists():
        before = rng.permutation(np.load(args.output))
        visited = np.concatenate([before[: max(args.limit - len(visited), 0)], visited])
    np.save(args.output, visited)
    print(f"{args.output}: {len(visited)} states")


if __name__ == "__main__":
    main()
