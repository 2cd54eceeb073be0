"""How good must a reward be? CartPole and the car learn from their ground truth, of which a share is wrong.

    python -m reward_check.dose --script dqn_clip_cartpole --wrong 0.2 --errors both --output one.json
    python -m results.predict --runs one.json another.json --output dose.png

The errors are false positives, false negatives, or both: of the states that can be wrong in this way a share
is. They are drawn anew at each visit, as noise is, or fixed for each state, as those of a model are. With a
share p of both wrong, and half of the states goal states, the correlation with the truth is 1 - 2p.
"""

import hashlib
import json
import math
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro

from reward_check.runs import script_of

# What looks alike is wrong alike: a tenth of a metre and a degree; a hundredth of the car's unit.
CELLS = {
    "dqn_clip_cartpole": (0.1, math.inf, math.radians(1), math.inf),
    "sac_clip_mountaincar": (0.01, math.inf),
}


def hashed(states: torch.Tensor, cell: float | torch.Tensor, key: int) -> torch.Tensor:
    """States (N, S) -> numbers in [0, 1) that look random (N,), one for all states of a cell of this size."""
    cells = (states.double() / cell).round().numpy().astype("<i8")
    how = {"digest_size": 4, "key": key.to_bytes(8, "little")}
    digests = b"".join(hashlib.blake2b(one.tobytes(), **how).digest() for one in cells)
    return torch.from_numpy(np.frombuffer(digests, "<u4") / 2.0**32)


@dataclass
class Noise:
    """What is wrong with a reward that is 1 in goal states and else 0. Stands in for a `Labeller`: it rewards
    states without a picture or a model."""

    script: Literal["dqn_clip_cartpole", "sac_clip_mountaincar"] = "dqn_clip_cartpole"
    errors: Literal["false-positives", "false-negatives", "both"] = (
        "both"  # in no goal states, in these, in all
    )
    wrong: float = 0.2  # the share of these that is
    fixed: bool = True  # wrong for the same states, as a hash of the state decides; or drawn at each visit
    seed: int = 1  # of the errors, and of the training

    def __post_init__(self):
        self.rng = torch.Generator().manual_seed(self.seed)
        self.device = torch.device("cpu")
        self.pool = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))
        self.states = []

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """States (N, S) -> rewards and ground-truth rewards (N, 2)."""
        truth = script_of(asdict(self)).ground_truth_reward(states)
        of_kind = {"false-positives": truth == 0, "false-negatives": truth == 1, "both": truth >= 0}
        drawn = torch.rand(len(states), generator=self.rng)
        if self.fixed:
            drawn = hashed(states, torch.tensor(CELLS[self.script]), self.seed)
        wrong = of_kind[self.errors] & (drawn < self.wrong)
        return torch.stack([torch.where(wrong, 1 - truth, truth), truth], dim=1)

    def add(self, states: torch.Tensor) -> None:
        self.states.append(states)

    def result(self) -> torch.Tensor:
        labels = self(torch.cat(self.states))
        self.states = []
        return labels


def train(noise: Noise, output: Path, steps: int = 64_000) -> None:
    """Train with such a reward, in the script's own loop; write the best policy's success (JSON)."""
    torch.set_num_threads(1)
    module = script_of(asdict(noise))
    how = {"total_timesteps": steps, "evaluate_every": 6_400}  # as with tiny
    with tempfile.TemporaryDirectory() as folder:
        run_dir = f"{folder}/run"
        settings = module.Args(clip_model=__file__, device="cpu", seed=noise.seed, run_dir=run_dir, **how)
        module.train(settings, noise)
        result = json.loads(Path(run_dir, "result.json").read_text())
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(asdict(noise) | {"success_rate": result["success_rate"]}))


if __name__ == "__main__":
    tyro.cli(train, config=(tyro.conf.OmitArgPrefixes,))
