"""benchmarks/cost.py: arithmetic and parameters of models without their weights."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import cost  # noqa: E402


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
def test_hours_are_operations_by_operations_an_hour():
    command = [sys.executable, ROOT / "benchmarks" / "cost.py", "--models", "ViT-B-32", "--tflops", "1"]
    row = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    hours = [float(cell) for cell in row.strip("| ").split("|")[3:]]
    expected = [steps * cost.flops_of("ViT-B-32")[0] / 1e12 / 3600 for steps in (3e6, 3e6, 1e7)]
    assert hours == pytest.approx(expected, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--models", "no-such"], ["--tflops", "0"]])
def test_what_makes_no_sense_is_refused_in_a_line(options):
    command = [sys.executable, ROOT / "benchmarks" / "cost.py", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (
        done.returncode == 2
        and done.stdout == ""
        and done.stderr.startswith("cost.py: error: ")
        and done.stderr.count("\n") == 1
    )
