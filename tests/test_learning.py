"""Each script learns its task, in fewer steps than by default. The robot takes two minutes: --slow."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LEARNS = {
    "the pole": ("dqn_clip_cartpole", "--total-timesteps=51200"),
    "the car, by a program": (
        "sac_clip_mountaincar",
        "--total-timesteps=128000",
        f"--reward-program={ROOT}/code_reward/programs/mountaincar.py",
    ),
    "the car, by its sentence": ("sac_clip_mountaincar",),
    "the robot": ("sac_clip_humanoid", "--total-timesteps=51200"),
}


@pytest.mark.slow("by its sentence", "robot")
@pytest.mark.parametrize("who", LEARNS)
def test_it_learns(who, tmp_path):
    script, *options = LEARNS[who]
    command = [sys.executable, ROOT / f"{script}.py", *options]
    command += "--episodes 48 --seed 1 --device cpu --clip-model tiny --run-dir run".split()
    subprocess.run(command, cwd=tmp_path, check=True)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["success_rate"] >= 0.7
