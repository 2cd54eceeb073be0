"""results/: what its README claims is what the CSV files say, and these are what runs left."""

import csv
import inspect
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from operator import attrgetter
from pathlib import Path

import pytest
import tyro
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "results"))
import tables  # noqa: E402

import dqn_clip_cartpole  # noqa: E402
import sac_clip_humanoid  # noqa: E402
import sac_clip_mountaincar  # noqa: E402

SCRIPTS = {script.SCRIPT: script for script in (dqn_clip_cartpole, sac_clip_mountaincar, sac_clip_humanoid)}
README, RESULTS = (path.read_text() for path in (ROOT / "README.md", ROOT / "results" / "README.md"))


def test_the_tables_are_those_of_the_csv_files():
    assert tables.fill_in(RESULTS) == RESULTS
    made = re.findall(r"<!-- results: \w+ -->\n(.*?)\n<!-- end -->", RESULTS, re.DOTALL)
    assert RESULTS.count("<!-- results: ") == len(made) == len(tables.TABLES)
    assert all(table.count("\n") >= 2 for table in made)
    assert re.search(r"<!-- results: cartpole -->\n\| what \|.*?\n\| defaults \|.*?[01]\.\d\d, ", RESULTS, re.DOTALL)
    broken = re.sub(r"(\| kneeling \| 100 % \| 3 \| )\d", r"\g<1>7", RESULTS)
    assert broken != RESULTS and tables.fill_in(broken) == RESULTS


@pytest.mark.parametrize("folder", [".", "results"])
def test_the_pictures_and_pages_that_a_readme_names_are_there_and_all_results_are_small(folder):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / folder / "README.md").read_text()):
        assert target.startswith("http") or (ROOT / folder / target).exists(), target
    assert sum(path.stat().st_size for path in (ROOT / "results").rglob("*") if path.is_file()) < 10e6


def test_no_result_knows_of_the_machine_it_was_made_on():
    for path in (ROOT / "results").rglob("*.csv"):
        assert not re.search(r"/(home|root|tmp|work|Users)/", path.read_text()), path


def test_what_the_readme_says_to_search_for_is_there_once():
    rows = re.findall(r"^\| [^|]+ \| `([^`]+)` in `([^`]+)` \|$", README, re.MULTILINE)
    assert {"labeller.add(", "rb.add(", "td_target ="} <= {phrase for phrase, _ in rows}
    for phrase, place in rows:
        if place.endswith(".py"):
            assert (ROOT / place).read_text().count(phrase) == 1, phrase
        else:
            for script in SCRIPTS.values():
                assert inspect.getsource(attrgetter(place)(script)).count(phrase) == 1, (phrase, script.SCRIPT)


@pytest.mark.parametrize("name", tables.RUNS)
def test_every_run_has_settings_that_its_script_takes(name):
    script, options = tables.RUNS[name]
    args = tyro.cli(SCRIPTS[script].Args, args=shlex.split(options))
    kind, _, seed = name.rpartition("_")
    assert int(seed) == args.seed and kind in tables.KINDS
    claim, _, what = kind.partition("/")
    assert claim != "table1" or what == args.task
    rows = [row for row in tables.read(ROOT / "tiny_clip" / "captions.csv") if row["kind"] == "rewording"]
    rewordings = rows[-1]["words"].split("|")
    assert claim != "prompts" or (args.prompt == (rewordings[int(kind[-1]) - 1],) and args.task == "kneeling")
    poles = ["pole leaning to the side on top of the cart", "pole hanging down from the cart"]
    poses = [prompt for task, (prompt, _) in sac_clip_humanoid.TASKS.items() if task != "kneeling"]
    assert list(args.negative_prompt) == {"contrastive/cartpole": poles, "contrastive/kneeling": poses}.get(kind, [])


def rows_of(path: Path) -> list[dict]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_a_printed_table_becomes_a_csv_file_and_a_table_again(tmp_path, monkeypatch):
    text = "tiny on cpu\n| script | ours |\n|---|---|\n| a | 1.0 (0.9 to 1.1) |\n| b | 2 |\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    monkeypatch.setattr(tables, "describe", lambda: {"commit": "abc", "tiny": "def"})
    tables.printed("compare", tmp_path)
    rows = rows_of(tmp_path / "compare.csv")
    assert [row["script"] for row in rows] == ["a", "b"] and rows[0]["what"] == "tiny on cpu"
    assert tables.printed_table("compare")(tmp_path).splitlines()[2] == "| a | 1.0 (0.9 to 1.1) | abc |"
    assert tables.printed_table("compare", "none")(tmp_path).splitlines()[0] == "| CLIP model | script | ours | commit |"


def test_tables_tell_rows_of_earlier_weights(tmp_path):
    rows = [{"run": f"prompts/rewording-{k}_1", "seed": 1, "success_rate": "1.00", "clip_return": "1"} for k in (1, 2)]
    about = ({"commit": "abc", "tiny": tables.weights()}, {"commit": "abc", "tiny": "another"})
    tables.write(tmp_path / "prompts.csv", [row | {"ground_truth_return": "2"} | how for row, how in zip(rows, about)])
    points = [
        {"run": row["run"], "step": 1000 * k, "clip_return": 1, "success_rate": k / 3} for row in rows for k in (1, 2, 3, 4)
    ]
    tables.write(tmp_path / "curves" / "prompts.csv", points)
    filled = tables.fill_in("<!-- results: prompts -->\n<!-- end -->", tmp_path)
    assert "| 1 | 1.00 | 1 | 2 | 3k | 1.17 | abc |\n" in filled and "| 1.17 | abc (earlier weights) |\n" in filled


SHORT = "--total-timesteps 2400 --num-envs 4 --episode-length 30 --learning-starts 240 --gradient-steps 2 --episodes 3 --seed"


@pytest.mark.slow
def test_the_workflow_trains_stores_goes_on_and_has_nothing_to_do_in_a_clone(tmp_path):
    pytest.importorskip("snakemake")
    for name in ("results", "tiny_clip", "clip_reward.py", "dqn_clip_cartpole.py"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    with open(tmp_path / "results" / "tables.py") as file:
        source = file.read()
    runs = {f"cartpole/default_{seed}": ("dqn_clip_cartpole", f"{SHORT} {seed}") for seed in (1, 2)}
    toy = f'RUNS = {runs}\nCLAIMS, COMMANDS = ["cartpole"], {{}}\n\n# ---- Files'
    (tmp_path / "results" / "tables.py").write_text(source.replace("# ---- Files", toy, 1))
    (tmp_path / "results" / "README.md").write_text("<!-- results: cartpole -->\n<!-- end -->\n")
    made = [tmp_path / "results" / name for name in ("cartpole.csv", "curves/cartpole.csv", "cartpole.png")]
    run_dir = tmp_path / "runs" / "results" / "cartpole" / "default_1"

    def snakemake(*words: str, cores: int = 2) -> subprocess.Popen:
        command = [sys.executable, "-m", "snakemake", f"-c{cores}", "--nocolor", "cartpole", *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
        return subprocess.Popen(command, cwd=tmp_path / "results", **pipes)

    assert "Nothing to be done" in snakemake("-n").communicate()[0]  # what is stored is there, as in a clone
    for path in made:
        path.unlink()
    training = snakemake("--config", "cores=1")
    while not (run_dir / "checkpoint.pt").is_file():
        time.sleep(0.05)
        assert training.poll() is None, training.communicate()[0]
    os.killpg(training.pid, signal.SIGINT)  # Ctrl-C in the middle
    assert training.communicate()[1] is None and training.returncode
    assert (run_dir / "checkpoint.pt").is_file() and not (run_dir.parent / "default_1.finished").exists()
    printed = snakemake().communicate()[0]
    rows = rows_of(made[0])
    assert [row["run"] for row in rows] == list(runs) and [row["seed"] for row in rows] == ["1", "2"], printed
    assert {"commit", "tiny", "machine", "versions"} <= rows[0].keys() and len(rows_of(made[1])) == 2 * 20
    assert json.loads((run_dir / "result.json").read_text())["settings"]["total_timesteps"] == 2400
    assert Image.open(tmp_path / "results/frames/cartpole/default_2.jpg").width == 960 and made[2].is_file()
    assert "| defaults |" in (tmp_path / "results" / "README.md").read_text()
    assert "Nothing to be done" in snakemake("-n").communicate()[0]
    (run_dir.parent / "default_2.finished").unlink()
    made[0].unlink()
    assert re.search(r"train +1\b", snakemake("-n").communicate()[0])  # the second only
