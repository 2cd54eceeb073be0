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
from importlib import import_module

import pytest
import tyro
from PIL import Image

import sac_clip_humanoid
from results import tables

ROOT = tables.ROOT
README, RESULTS = (path.read_text() for path in (ROOT / "README.md", ROOT / "results" / "README.md"))


def settings(name: str):
    """A run's settings, as its script takes them."""
    script, options = tables.RUNS[name]
    return tyro.cli(import_module(script.replace("/", ".")).Args, args=shlex.split(options))


def test_the_tables_are_those_of_the_csv_files():
    assert tables.fill_in(RESULTS) == RESULTS
    made = re.findall(r"<!-- results: (\w+) -->\n(.*?)\n<!-- end -->", RESULTS, re.DOTALL)
    assert {name for name, _ in made} == set(tables.TABLES) and len(made) == len(tables.TABLES)
    assert all(table.count("\n") >= 2 for _, table in made)
    broken = re.sub(r"(\| kneeling \(paper: 100 %\) \| \d+-\d+ \| )\d", r"\g<1>7", RESULTS)
    assert broken != RESULTS and tables.fill_in(broken) == RESULTS


CLAIMED = {
    "CartPole is learned from a sentence": "cartpole/fp32 cartpole/bf16",
    "MountainCar, too": "mountaincar/fp32 mountaincar/bf16 mountaincar/o mountaincar/re",
    "the humanoid's five": "table1/kneeling table1/lotus table1/standing-up table1/arms-raised table1/doing",
    "its three others .paper": "table1/hands table1/standing-on table1/arms-crossed",
    "kneeling in other words": "prompts/",
    "other textures and cameras": "figure3/",
}


@pytest.mark.parametrize("claim", CLAIMED)
def test_the_first_table_counts_the_runs(claim):
    kinds = tuple(CLAIMED[claim].split())
    rows = tables.read(tables.HERE / f"{kinds[0].partition('/')[0]}.csv")
    success = [float(row["success_rate"]) >= 0.9 for row in rows if row["run"].startswith(kinds)]
    (line,) = re.findall(rf"^\| {claim}.*", RESULTS.partition("\n## ")[0], re.MULTILINE)
    assert f" {sum(success)} of {len(success)} " in line


@pytest.mark.parametrize("folder", [".", "results", "reward_check", "neighbours", "tiny_clip", "code_reward"])
def test_what_a_readme_links_to_is_there(folder):
    page = ROOT / folder / "README.md"
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", page.read_text()):
        path = page.parent / target if target else page
        heads = re.findall(r"^#+ (.*)", path.read_text().lower(), re.MULTILINE) if anchor else []
        anchors = [re.sub(r"[^\w -]", "", head).replace(" ", "-") for head in heads]
        assert path.exists() and (not anchor or anchor in anchors), (target, anchor)


def test_results_are_small_and_know_no_machine():
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
    rewordings = rows[-1]["words"].split("|")
    poses = [prompt for task, (prompt, _) in sac_clip_humanoid.TASKS.items() if task != "kneeling"]
    for kind, row in tables.KINDS.items():
        name = f"{kind}_{row['seeds'].partition('-')[0]}"
        args = settings(name)
        args.check()
        claim, _, what = kind.partition("/")
        assert name.endswith(f"_{args.seed}") and (claim != "table1" or what == args.task)
        if claim == "prompts":
            chosen = (0, 2, 3, 4) if what == "average" else (int(kind[-1]) - 1,)
            assert (args.prompt, args.task) == (tuple(rewordings[k] for k in chosen), "kneeling")
        assert kind != "contrastive/kneeling" or list(args.negative_prompt) == poses


@pytest.mark.parametrize("name", ["cartpole_201", "mountaincar_201", "kneeling_201"])
def test_the_thresholds_of_runs_are_those_that_the_check_proposed(name):
    args = settings(f"threshold/{name}")
    rows = tables.read(ROOT / "reward_check" / f"reward_models_{name.partition('_')[0]}.csv")
    (beta,) = (row["threshold"] for row in rows if row["alpha"] == f"{args.goal_baseline_alpha:g}")
    assert args.threshold == pytest.approx(float(beta), abs=2e-3)  # of rewards in float32 or bfloat16


def test_a_printed_table_becomes_a_csv_file_and_a_table_again(tmp_path, monkeypatch):
    text = "tiny in bf16\n| script | ours |\n|---|---|\n| a | 1.0 (0.9 to 1.1) |\n| b | 2 |\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    monkeypatch.setattr(tables, "describe", lambda *code: {"commit": "abc", "tiny": "def"})
    tables.printed("compare", tmp_path)
    rows = tables.read(tmp_path / "compare.csv")
    assert [row["script"] for row in rows] == ["a", "b"] and rows[0]["what"] == "tiny in bf16"
    one = tables.printed_table("compare", output=tmp_path)
    assert one.splitlines()[2] == "| a | 1.0 (0.9 to 1.1) |"
    both = tables.printed_table("compare", "none", output=tmp_path, columns=("ours",))
    assert both.splitlines()[::2] == ["| CLIP model | ours |", "| tiny | 1.0 (0.9 to 1.1) |"]


def test_a_run_names_the_last_commit_of_its_own_script(tmp_path, monkeypatch, capsys):
    """A change elsewhere does not make it look old; one that is not committed shows."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    subprocess.run([*git, "init", "-q"], cwd=tmp_path, check=True)
    commits = []
    for name in ("clip_reward", "one", "other"):
        (tmp_path / f"{name}.py").write_text("1\n")
        subprocess.run([*git, "add", "."], cwd=tmp_path, check=True)
        subprocess.run([*git, "commit", "-qm", name], cwd=tmp_path, check=True)
        commits.append(
            subprocess.check_output([*git, "log", "-1", "--format=%h"], cwd=tmp_path, text=True).strip()
        )
    (tmp_path / "one.py").write_text("2\n")
    for script in ("one", "other", "third"):
        tables.about(script)
    named = [json.loads(line)["commit"] for line in capsys.readouterr().out.splitlines()]
    assert named == [f"{commits[1]} and changes", commits[2], commits[0]]


def test_a_table_of_runs_weighs_seeds_and_tells_rows_of_earlier_weights(tmp_path):
    rows = []
    for run, success, tiny in (("1_1", 1, tables.TINY), ("1_3", 0, tables.TINY), ("2_1", 1, "another")):
        row = {"run": f"prompts/rewording-{run}", "seed": run[2:], "success_rate": success}
        row["clip_return"] = -success
        rows.append(row | {"commit": "abc", "tiny": tiny, "machine": "m"})
    tables.write(tmp_path / "prompts.csv", rows)
    points = [{name: row[name] for name in ("run", "success_rate")} | {"step": 3000} for row in rows]
    tables.write(tmp_path / "curves" / "prompts.csv", points)
    filled = tables.fill_in("<!-- results: prompts -->\n<!-- end -->", tmp_path)
    assert "| 1, 3 | 0.50 (0.00 to 1.00) | 1 of 2 (0.09 to 0.91) | never |\n" in filled
    assert "| 1 | 1.00 | 1 of 1 (0.21 to 1.00) | 3k |\n" in filled
    late = tables.runs_table("prompts", output=tmp_path, late=True)
    assert "| never | 0.50 (0.00 to 1.00) |" in late
    assert "| never | 0 (3) |" in tables.runs_table("prompts", output=tmp_path, choose=True)
    made = ["| abc | m | prompts |", "| abc (earlier weights) | m | prompts |"]
    assert tables.made_by(tmp_path).splitlines()[2:] == made
    assert tables.wilson(19, 20) == pytest.approx((0.7639, 0.9911), abs=1e-4)
    assert tables.wilson(0, 1)[0] == 0 and tables.wilson(1, 1)[1] == 1


@pytest.mark.slow("hacking", "preferences")
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
        first = rows[0]["run"].rpartition("_")[2]
        expected = {f"shaping/{reward}-wrong_{first}" for reward in ("sum", "shaped", "furl")}
    assert set(shown) == expected


def test_each_rule_of_the_snakefile_has_a_name_of_its_own():
    rules = re.findall(r"^rule (\w+):", (ROOT / "results/Snakefile").read_text(), re.MULTILINE)
    names = [*rules, *tables.CLAIMS, *tables.COMMANDS]
    assert len(names) == len(set(names)) and set(tables.PREDICTED) < set(tables.CLAIMS)


TOY = """
SHORT = "--total-timesteps 2400 --num-envs 4 --episode-length 30 --learning-starts 240 --gradient-steps 100"
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

    def start(*words: str) -> subprocess.Popen:
        how = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
        # What a shell starts in the background ignores Ctrl-C, and hands that on.
        how["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
        return subprocess.Popen([sys.executable, "-m", "snakemake", "-c2", *words], cwd=results, **how)

    def snakemake(*words: str) -> str:
        return start(*words).communicate()[0]

    assert "Nothing to be done" in snakemake("-n", "cartpole")  # what is stored is there, as in a clone
    cost = (results / "cost.csv").read_text()
    assert "no_such" in snakemake("-F", "cost")
    assert (results / "cost.csv").read_text() == cost  # what a job that fails would have made anew
    for path in made:
        path.unlink()
    training = start("cartpole", "--config", "cores=1")
    while not (runs / "fp32_1/rounds/1.pt").is_file():
        time.sleep(0.05)
        assert training.poll() is None, training.communicate()[0]
    os.killpg(training.pid, signal.SIGINT)  # Ctrl-C in the middle
    training.communicate()
    assert training.returncode and not (runs / "fp32_1.finished").exists()
    snakemake("cartpole")
    rows, points = tables.read(made[0]), tables.read(made[1])
    assert [row["run"] for row in rows] == ["cartpole/fp32_1", "cartpole/fp32_2"]
    assert [int(point["step"]) for point in points] == 2 * list(range(120, 2401, 120))
    assert Image.open(results / "frames/cartpole/fp32_2.jpg").width == 960 and made[2].is_file()
    assert "| defaults, in fp32" in (results / "README.md").read_text()
    (runs / "fp32_2.finished").unlink()
    made[0].unlink()
    assert re.search(r"train +1\b", snakemake("-n", "cartpole"))  # the second only
    shorter = TOY.replace("2400", "1200")
    (results / "tables.py").write_text(source.replace("# ---- Results become", shorter, 1))
    snakemake("cartpole")  # with other options a run begins anew
    assert all("1200" in row["options"] for row in tables.read(made[0]))
    assert [int(point["step"]) for point in tables.read(made[1])] == 2 * list(range(120, 1201, 120))
    stored = [path.read_bytes() for path in made[:2]]
    (runs / "fp32_2.finished").unlink()
    where = ["--claim", "cartpole", "--run-dir", runs.parent, "--output", results]
    subprocess.run([sys.executable, "-m", "results.tables", "store", *where], cwd=results.parent, check=True)
    assert [path.read_bytes() for path in made[:2]] == stored  # the row of a run that is elsewhere stays
