"""Judge the judge: where each success condition of the humanoid ends, in pictures.

    python -m results.conditions results/conditions.png

For each task ten simulated states in which its condition holds, and below each the most alike in which not.
"""

import sys

import matplotlib.pyplot as plt
import numpy as np
import torch

import sac_clip_humanoid as humanoid
from reward_check.states import humanoid_states

COUNT = 10
CPU = torch.device("cpu")


def main(path: str) -> None:
    rng = np.random.default_rng(1)
    states = humanoid_states(20_000, rng)
    states[:, :2] = 0  # in the middle of the picture
    _, points = humanoid.Scene(8, 8, "realistic", "fixed", 1, 1024, CPU).render(states)
    body = torch.cat([at - points["seat"] * torch.tensor([1, 1, 0]) for at in points.values()], dim=1)
    scene = humanoid.Scene(240, 240, "realistic", "fixed", 2, 4, CPU)
    _, axes = plt.subplots(len(humanoid.TASKS), 1, figsize=(10, 17.5), layout="constrained")
    for axis, (task, (_, condition)) in zip(axes, humanoid.TASKS.items()):
        holds = condition(points)
        chosen = torch.from_numpy(rng.choice(holds.nonzero().flatten(), COUNT, replace=False))
        nearest = torch.cdist(body[chosen], body[~holds]).argmin(dim=1)
        others = (~holds).nonzero().flatten()[nearest]
        frames, _ = scene.render(states[torch.cat([chosen, others])])
        lines = frames[:, :, 40:216, 32:208].unflatten(0, (2, COUNT)).permute(0, 3, 1, 4, 2)
        axis.imshow(lines.reshape(352, 176 * COUNT, 3))
        axis.set_title(f"{task}: yes above, no below ({holds.sum()} of {len(states):,} states: yes)")
        axis.axis("off")
    plt.savefig(path, dpi=100)


if __name__ == "__main__":
    main(*sys.argv[1:])
