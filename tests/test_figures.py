"""The figure of the reward landscapes: its numbers, its maxima, and bad input."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import sac_clip_mountaincar
from clip_reward import CLIPReward, UsageError

SCRIPT = Path(__file__).resolve().parent.parent / "figures" / "reward_landscape.py"
sys.path.insert(0, str(SCRIPT.parent))
import reward_landscape  # noqa: E402

BAD = [
    ("--clip-model ViT-B-23/openai", "did you mean ViT-B-32"),
    ("--points 1", "--points must be at least 2"),
    ("--clip-batch-size 0", "must be at least 1"),
    ("--output no/such/folder/x.png", "cannot write to"),
    ("--output x.jpg", "must end in .png"),
]


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, SCRIPT, "--device", "cpu", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


def test_upright_and_the_flag_are_the_maxima_at_every_alpha(tmp_path):
    done = run("--clip-model", "tiny", "--output", "figure.png", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert Image.open(tmp_path / "figure.png").width > 1000
    with open(tmp_path / "figure.csv", newline="") as file:
        rows = [
            (row["panel"], float(row["alpha"]), float(row["angle_or_x"]), float(row["reward"])) for row in csv.DictReader(file)
        ]
    assert len(rows) == 3 * 5 * 181
    for panel in ("CartPole", "MountainCar, original", "MountainCar, realistic"):
        for alpha in (0.0, 0.25, 0.5, 0.75, 1.0):
            curve = [(reward, place) for name, a, place, reward in rows if name == panel and a == alpha]
            assert len(curve) == 181
            place = max(curve)[1]
            assert abs(place) <= 6 if panel == "CartPole" else place >= 0.449
            if panel == "CartPole":  # the top is flat: see the model card
                upright = next(reward for reward, place in curve if place == 0)
                assert max(curve)[0] - upright <= 0.04 * (max(curve)[0] - min(curve)[0])
            assert f"| {panel} | {alpha} | {place:+.2f} |" in done.stdout

    prompt, baseline = sac_clip_mountaincar.Args().prompt, sac_clip_mountaincar.Args().baseline_prompt
    some = [row for row in rows if row[0] == "MountainCar, original" and row[1] == 0.75][::30]
    scene = sac_clip_mountaincar.Scene(64, 64, "original", torch.device("cpu"))
    frames = scene.draw(torch.tensor([[row[2], 0.0] for row in some]))
    assert CLIPReward("tiny", prompt, baseline, 0.75)(frames).tolist() == pytest.approx([row[3] for row in some], abs=1e-4)


@pytest.mark.parametrize("arguments, expected", BAD)
def test_bad_input_is_one_line_and_nothing_is_written(arguments, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["reward_landscape.py", "--device", "cpu", *arguments.split()])
    with pytest.raises(UsageError, match=expected):
        reward_landscape.main()
    assert capsys.readouterr() == ("", "") and not list(tmp_path.iterdir())


def test_bad_input_has_exit_code_2(tmp_path):
    done = run("--points", "1", folder=tmp_path)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("reward_landscape.py: error: --points must be at least 2")
