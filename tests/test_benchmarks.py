"""The benchmarks: the arithmetic of models, what is measured of a loop, the page of a GPU machine."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import cost, throughput

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("name", "layers", "width", "tokens", "patch", "out"),
    [("ViT-B-32", 12, 768, 50, 32, 512), ("ViT-L-14", 24, 1024, 257, 14, 768)],
)
def test_the_arithmetic_is_that_of_the_vision_transformer(name, layers, width, tokens, patch, out):
    flops, parameters = cost.flops_of(name)
    block = 24 * tokens * width**2 + 4 * tokens**2 * width  # projections and MLP; attention
    expected = layers * block + 2 * (tokens - 1) * 3 * patch**2 * width + 2 * width * out
    assert flops == pytest.approx(expected, rel=1e-3)
    assert parameters == {"ViT-B-32": 151_277_313, "ViT-L-14": 427_616_513}[name]  # as OpenAI's CLIP


@pytest.mark.slow
def test_hours_are_operations_by_operations_an_hour(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", "cost --models ViT-B-32 --tflops 1".split())
    cost.main()
    hours = [float(cell) for cell in capsys.readouterr().out.splitlines()[-1].strip("| ").split("|")[3:]]
    expected = [steps * cost.flops_of("ViT-B-32")[0] / 1e12 / 3600 for steps in (3e6, 3e6, 1e7)]
    assert hours == pytest.approx(expected, rel=0.05)
    monkeypatch.setattr(sys, "argv", "cost --models no-such".split())
    with pytest.raises(SystemExit, match="2"):
        cost.main()


@pytest.mark.slow
@pytest.mark.parametrize("script", throughput.Script.__args__)
def test_rounds_that_are_measured_learn_and_are_not_evaluated(script, monkeypatch):
    """Of the scripts themselves, in a process each, whose curves tell."""
    curves = {}

    class Events(throughput.EventAccumulator):
        def Scalars(self, name):
            for tag in self.Tags()["scalars"]:
                curves[tag] = [event.step for event in super().Scalars(tag)]
            return super().Scalars(name)

    monkeypatch.setattr(throughput, "EventAccumulator", Events)
    small = {"num_envs": 2, "episode_length": 5, "gradient_steps": 3, "batch_size": 8}
    assert throughput.run_loop(script, small | {"clip_model": "tiny", "device": "cpu"}, 3) > 0
    assert curves["charts/SPS"] == [10, 20, 30, 40, 50]
    assert curves["losses/q_values"] == [20, 30, 40, 50]
    assert curves["evaluation/clip_return"] == [50]  # after what is measured


TABLE = "| script | loop |\\n|---|---|\\n| dqn | 1,234 |\\n| sac | failed: out of memory |\\n"


@pytest.mark.parametrize("fails", [False, True])
def test_the_page_of_a_gpu_machine(fails, tmp_path):
    """`benchmarks/gpu.sh` with a python that answers at once, where a scheduler lends GPUs 3 and 5."""
    python = f"""#!/bin/sh
        case "$*" in
            *device_name*) printf 'NVIDIA H200\\nNVIDIA H200\\n';;
            *throughput*)
                echo "$CUDA_VISIBLE_DEVICES" >>{tmp_path}/used
                printf 'cuda\\n{TABLE}'; exit {int(fails)};;
            *pytest*--slow*) echo 12 passed; exit {int(fails)};;
        esac"""
    for name, command in {"python": python, "git": "#!/bin/sh\necho abc"}.items():
        (tmp_path / name).write_text(command)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "results").mkdir()
    script = shutil.copy(ROOT / "benchmarks" / "gpu.sh", tmp_path / "benchmarks")
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "3,5"}
    assert subprocess.run([script], env=environment, capture_output=True).returncode == int(fails)
    page = (tmp_path / "results" / "gpu.md").read_text()
    rows = ["| 1 | dqn | 1,234 |", "| 1 | sac | failed: out of memory |"]
    rows += [row.replace("| 1 |", "| 2 |") for row in rows]
    assert "\n".join(["| GPUs | script | loop |", "|---|---|---|", *rows]) in page
    assert "12 passed" in page and "- NVIDIA H200\n- NVIDIA H200" in page and ("Failed" in page) == fails
    assert (tmp_path / "used").read_text() == "3\n3,5\n"
    csv = (tmp_path / "results" / "gpu.csv").read_text().splitlines()
    assert csv[:2] == ["GPUs,script,loop", "1,dqn,1;234"] and len(csv) == 5
