"""results/: what its README claims is what the CSV files say, and these are what runs left."""

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
from pathlib import Path

import pytest
import tyro
from PIL import Image

import dqn_clip_cartpole
import sac_clip_humanoid
import sac_clip_mountaincar
from neighbours import dqn_preference_cartpole, sac_shaped_mountaincar
from results import tables

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {
    "dqn_clip_cartpole": dqn_clip_cartpole,
    "sac_clip_mountaincar": sac_clip_mountaincar,
    "sac_clip_humanoid": sac_clip_humanoid,
    "neighbours/dqn_preference_cartpole": dqn_preference_cartpole,
    "neighbours/sac_shaped_mountaincar": sac_shaped_mountaincar,
}
README, RESULTS = (path.read_text() for path in (ROOT / "README.md", ROOT / "results" / "README.md"))


def test_the_tables_are_those_of_the_csv_files():
    assert tables.fill_in(RESULTS) == RESULTS
    made = re.findall(r"<!-- results: \w+ -->\n(.*?)\n<!-- end -->", RESULTS, re.DOTALL)
    made_of = {name: f"{name}.csv" for name in tables.TABLES} | {
        "agreement": "../reward_check/reward_models_kneeling.csv"
    }
    there = {name for name, file in made_of.items() if (tables.HERE / file).exists()}  # runs may be missing
    assert set(re.findall(r"<!-- results: (\w+) -->", RESULTS)) == there and len(made) == len(there)
    assert all(table.count("\n") >= 2 for table in made)
    broken = re.sub(r"(\| kneeling \(paper: 100 %\) \| 1\d*-\d+ \| )\d", r"\g<1>7", RESULTS)
    assert broken != RESULTS and tables.fill_in(broken) == RESULTS


@pytest.mark.parametrize("folder", [".", "results", "reward_check", "neighbours"])
def test_what_a_readme_links_to_is_there_and_results_are_small_and_know_no_machine(folder):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / folder / "README.md").read_text()):
        assert target.startswith("http") or (ROOT / folder / target).exists(), target
    files = [*(ROOT / "results").rglob("*"), *(ROOT / "reward_check").rglob("*")]
    assert sum(path.stat().st_size for path in files) < 10e6
    text = "".join(path.read_text() for path in files if path.suffix == ".csv")
    assert not re.search(r"/(home|root|tmp|work|Users)/", text)


def test_what_the_readme_says_to_search_for_is_there_once():
    rows = re.findall(r"^\| [^|]+ \| `([^`]+)` in `([^`]+)` \|$", README, re.MULTILINE)
    assert {"labeller.add(", "td_target ="} <= {phrase for phrase, _ in rows}
    for phrase, place in rows:
        assert (ROOT / place).read_text().count(phrase) == 1, phrase


def test_every_run_has_settings_that_its_script_takes():
    rows = [row for row in tables.read(ROOT / "tiny_clip" / "captions.csv") if row["kind"] == "rewording"]
    rewordings = [(words,) for words in rows[-1]["words"].split("|")]
    poses = [prompt for task, (prompt, _) in sac_clip_humanoid.TASKS.items() if task != "kneeling"]
    for name, (script, options) in tables.RUNS.items():
        args = tyro.cli(SCRIPTS[script].Args, args=shlex.split(options))
        args.check()
        kind, _, seed = name.rpartition("_")
        claim, _, what = kind.partition("/")
        assert int(seed) == args.seed and kind in tables.KINDS and (claim != "table1" or what == args.task)
        assert claim != "prompts" or (args.prompt, args.task) == (rewordings[int(kind[-1]) - 1], "kneeling")
        assert kind != "contrastive/kneeling" or list(args.negative_prompt) == poses


def test_the_thresholds_of_runs_are_those_that_the_check_proposed():
    names = [name for name in tables.RUNS if name.startswith("threshold/")]
    for name in names:
        script, options = tables.RUNS[name]
        args = tyro.cli(SCRIPTS[script].Args, args=shlex.split(options))
        task = name.partition("/")[2].rpartition("_")[0]
        rows = tables.read(ROOT / "reward_check" / f"reward_models_{task}.csv")
        (beta,) = (row["threshold"] for row in rows if row["alpha"] == f"{args.goal_baseline_alpha:g}")
        assert args.threshold == pytest.approx(float(beta), abs=2e-3)  # of rewards in float32 or bfloat16
    assert len(names) == 7


def test_a_printed_table_becomes_a_csv_file_and_a_table_again(tmp_path, monkeypatch):
    text = "tiny on cpu\n| script | ours |\n|---|---|\n| a | 1.0 (0.9 to 1.1) |\n| b | 2 |\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    monkeypatch.setattr(tables, "describe", lambda *code: {"commit": "abc", "tiny": "def"})
    tables.printed("compare", tmp_path)
    rows = tables.read(tmp_path / "compare.csv")
    assert [row["script"] for row in rows] == ["a", "b"] and rows[0]["what"] == "tiny on cpu"
    one, both = (tables.printed_table("compare", *more, output=tmp_path) for more in ((), ("none",)))
    assert one.splitlines()[2] == "| a | 1.0 (0.9 to 1.1) | abc |"
    assert both.splitlines()[0] == "| CLIP model | script | ours | commit |"
    some = tables.printed_table("compare", output=tmp_path, columns=("ours",))
    assert some.splitlines()[2] == "| 1.0 (0.9 to 1.1) | abc |"


def test_a_run_names_the_last_commit_of_its_own_script(tmp_path, monkeypatch, capsys):
    """A change elsewhere does not make it look old; one that is not committed shows."""

    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(
            ["git", *who, *words], cwd=tmp_path, capture_output=True, text=True
        ).stdout.strip()

    def about(script: str) -> str:
        tables.about(script)
        return json.loads(capsys.readouterr().out)["commit"]

    monkeypatch.setattr(tables, "ROOT", tmp_path)
    git("init")
    commits = []
    for name in ("clip_reward", "one", "other"):
        (tmp_path / f"{name}.py").write_text("1\n")
        git("add", ".")
        git("commit", "-m", name)
        commits.append(git("log", "-1", "--format=%h"))
    assert [about("one"), about("other"), about("third")] == [commits[1], commits[2], commits[0]]
    (tmp_path / "one.py").write_text("2\n")
    assert about("one") == f"{commits[1]} and changes" and about("other") == commits[2]


def test_tables_tell_rows_of_earlier_weights(tmp_path):
    names = {f"prompts/rewording-{k}_1": tiny for k, tiny in ((1, tables.TINY), (2, "another"))}
    row = {"seed": 1, "success_rate": "1.00", "clip_return": "1", "ground_truth_return": "2", "commit": "abc"}
    tables.write(tmp_path / "prompts.csv", [{"run": name, "tiny": names[name]} | row for name in names])
    points = [{"step": 1000 * k, "clip_return": 1, "success_rate": k / 3} for k in (1, 2, 3, 4)]
    points = [{"run": name} | point for name in names for point in points]
    tables.write(tmp_path / "curves" / "prompts.csv", points)
    filled = tables.fill_in("<!-- results: prompts -->\n<!-- end -->", tmp_path)
    assert "| 1 | 1.00 | 1 of 1 (0.21 to 1.00) | 3k | abc |\n" in filled
    assert "| abc (earlier weights) |\n" in filled


def test_wilsons_interval_and_medians_of_runs_that_never_succeed(tmp_path):
    assert tables.wilson(19, 20) == pytest.approx((0.7639, 0.9911), abs=1e-4)
    assert tables.wilson(0, 1)[0] == 0 and tables.wilson(1, 1)[1] == 1
    columns = {"clip_return": "1", "ground_truth_return": "2", "commit": "abc", "tiny": tables.TINY}
    runs = {
        f"prompts/rewording-1_{seed}": {"seed": seed, "success_rate": rate} for seed, rate in ((1, 1), (2, 0))
    }
    tables.write(tmp_path / "prompts.csv", [{"run": name} | run | columns for name, run in runs.items()])
    points = [{"run": name, "step": 1000, "success_rate": run["success_rate"]} for name, run in runs.items()]
    tables.write(tmp_path / "curves" / "prompts.csv", points)
    filled = tables.fill_in("<!-- results: prompts -->\n<!-- end -->", tmp_path)
    assert "| 1-2 | 0.50 (0.00 to 1.00) | 1 of 2 (0.09 to 0.91) | never | abc |" in filled
    late = tables.runs_table("prompts/", output=tmp_path, late=True)
    assert "| never | 0.50 (0.00 to 1.00) | abc |" in late


@pytest.mark.parametrize("name", ["cartpole", "hacking", "preferences", "shaping", "shaping_frames"])
def test_a_picture_shows_each_run_that_it_should(name, tmp_path, monkeypatch):
    for path in tables.HERE.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / f"{name}.png").unlink(missing_ok=True)
    shown = []
    curve, show_frames = tables.curve, tables.show_frames
    monkeypatch.setattr(tables, "curve", lambda *a: shown.append(a[1]) or curve(*a))
    monkeypatch.setattr(tables, "show_frames", lambda *a: shown.append(a[2]) or show_frames(*a))
    tables.figure(name, tmp_path)
    assert Image.open(tmp_path / f"{name}.png").width > 900
    rows = tables.read(tmp_path / f"{'table1' if name == 'hacking' else name.partition('_')[0]}.csv")
    expected = {row["run"] for row in rows if "bf16" not in row["run"]}
    if name == "shaping_frames":
        expected = {f"shaping/{reward}-wrong_121" for reward in ("sum", "shaped", "furl")}
    assert set(shown) == expected


def test_each_rule_of_the_snakefile_has_a_name_of_its_own():
    rules = re.findall(r"^rule (\w+):", (ROOT / "results/Snakefile").read_text(), re.MULTILINE)
    names = [*rules, *tables.CLAIMS, *tables.COMMANDS]
    assert len(names) == len(set(names)) and set(tables.PREDICTED) < set(tables.CLAIMS)


TOY = """
SHORT = "--total-timesteps 2400 --num-envs 4 --episode-length 30 --learning-starts 240 --gradient-steps 2"
RUNS = {f"cartpole/fp32_{seed}": ("dqn_clip_cartpole", f"{SHORT} --seed {seed}") for seed in (1, 2)}
CLAIMS, COMMANDS = ["cartpole"], {"cost": "benchmarks.no_such"}

# ---- Results become"""


@pytest.mark.slow
def test_the_workflow_trains_stores_goes_on_and_has_nothing_to_do_in_a_clone(tmp_path):
    pytest.importorskip("snakemake")
    shutil.copytree(ROOT, tmp_path / "a clone", ignore=shutil.ignore_patterns(".*", "runs", "__pycache__"))
    results, runs = tmp_path / "a clone/results", tmp_path / "a clone/runs/results/cartpole"
    source = (results / "tables.py").read_text()
    (results / "tables.py").write_text(source.replace("# ---- Results become", TOY, 1))
    (results / "README.md").write_text("<!-- results: cartpole -->\n<!-- end -->\n")
    made = [results / name for name in ("cartpole.csv", "curves/cartpole.csv", "cartpole.png")]

    def snakemake(*words: str) -> subprocess.Popen:
        how = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
        return subprocess.Popen([sys.executable, "-m", "snakemake", "-c2", *words], cwd=results, **how)

    def left_to_do() -> str:
        return snakemake("-n", "cartpole").communicate()[0]

    assert "Nothing to be done" in left_to_do()  # what is stored is there, as in a clone
    cost = (results / "cost.csv").read_text()
    assert "no_such" in snakemake("-F", "cost").communicate()[0]
    assert (results / "cost.csv").read_text() == cost  # what a job that fails would have made anew
    for path in made:
        path.unlink()
    training = snakemake("cartpole", "--config", "cores=1")
    while not (runs / "fp32_1/rounds/1.pt").is_file():
        time.sleep(0.05)
        assert training.poll() is None, training.communicate()[0]
    os.killpg(training.pid, signal.SIGINT)  # Ctrl-C in the middle
    assert training.communicate()[1] is None and training.returncode
    assert not (runs / "fp32_1.finished").exists()
    snakemake("cartpole").communicate()
    rows, points = tables.read(made[0]), tables.read(made[1])
    assert [row["run"] for row in rows] == ["cartpole/fp32_1", "cartpole/fp32_2"]
    assert [int(point["step"]) for point in points] == 2 * list(range(120, 2401, 120))
    assert Image.open(results / "frames/cartpole/fp32_2.jpg").width == 960 and made[2].is_file()
    assert "| defaults, in fp32 |" in (results / "README.md").read_text()
    assert "Nothing to be done" in left_to_do()
    (runs / "fp32_2.finished").unlink()
    made[0].unlink()
    assert re.search(r"train +1\b", left_to_do())  # the second only
