"""results/make.py: what the README claims is what the CSV files say, and these are what runs left."""

import csv
import inspect
import re
import shlex
import signal
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest
import tyro
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "results"))
import make  # noqa: E402

import dqn_clip_cartpole  # noqa: E402
import sac_clip_humanoid  # noqa: E402
import sac_clip_mountaincar  # noqa: E402

SCRIPTS = {script.SCRIPT: script for script in (dqn_clip_cartpole, sac_clip_mountaincar, sac_clip_humanoid)}
README = (ROOT / "README.md").read_text()


def test_the_readmes_tables_are_those_of_the_csv_files():
    assert make.fill_in(README) == README
    tables = re.findall(r"<!-- results: \w+ -->\n(.*?)\n<!-- end -->", README, re.DOTALL)
    assert README.count("<!-- results: ") == len(tables) == len(make.TABLES)
    assert all(table.count("\n") >= 2 and "to be made" not in table for table in tables)
    assert re.search(r"<!-- results: cartpole -->\n\| seed \|.*?\n\| 1 \| [01]\.\d\d \|", README, re.DOTALL)
    hand, made = README.split("<!-- results: ", 1)
    broken = f"{hand}<!-- results: " + made.replace("| 1 | 1.00 |", "| 1 | 0.99 |", 1)
    assert broken != README and make.fill_in(broken) == README


def test_the_pictures_of_the_readme_are_there_and_all_results_are_small():
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target
    assert sum(path.stat().st_size for path in (ROOT / "results").rglob("*") if path.is_file()) < 10e6


def test_no_result_knows_of_the_machine_it_was_made_on():
    for path in (ROOT / "results").glob("*.csv"):
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


@pytest.mark.parametrize("name", make.RUNS)
def test_every_run_has_settings_that_its_script_takes(name):
    script, options = make.RUNS[name]
    args = tyro.cli(SCRIPTS[script].Args, args=shlex.split(options))
    assert name.endswith(f"_{args.seed}")
    claim, _, what = name.partition("/")
    assert claim != "table1" or what == f"{args.task}_{args.seed}"
    assert claim != "prompts" or (args.prompt[0] in make.REWORDINGS and len(args.prompt) == 1 and args.task == "kneeling")
    assert len(args.negative_prompt) == {"contrastive/cartpole_1": 2, "contrastive/kneeling_1": 7}.get(name, 0)


def rows_of(path: Path) -> list[dict]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_runs_are_made_stored_skipped_and_gone_on_with(tmp_path, monkeypatch, capfd):
    short = "--total-timesteps 1200 --num-envs 4 --episode-length 30 --learning-starts 240 --gradient-steps 2 --episodes 3"
    runs = {f"cartpole/default_0.5_{seed}": ("dqn_clip_cartpole", f"{short} --seed {seed}") for seed in (1, 2)}
    monkeypatch.setattr(make, "RUNS", runs | {"cartpole/paper_1": ("dqn_clip_cartpole", "--no-such-flag")})
    calls, call = [], make.call
    monkeypatch.setattr(make, "call", lambda command, **k: calls.append([*map(str, command)]) or call(command, **k))
    readme = (ROOT / "README.md").read_bytes()

    def run(*arguments: str) -> list[list[str]]:
        """-> what was trained."""
        calls.clear()
        folders = ["--run-dir", str(tmp_path / "runs"), "--output", str(tmp_path / "out"), "--device", "cpu"]
        monkeypatch.setattr(sys, "argv", ["make.py", *folders, *arguments])
        make.main()
        return [command for command in calls if command[0].endswith("cartpole.py")]

    assert len(run("--only", "cartpole/default_0.5_1")) == 1
    first = rows_of(tmp_path / "out/cartpole.csv")
    assert (
        [row["run"] for row in first] == ["cartpole/default_0.5_1"] and first[0]["seed"] == "1" and first[0]["episodes"] == "3"
    )
    assert len(rows_of(tmp_path / "out/curves.csv")) == 10
    assert (
        Image.open(tmp_path / "out/frames/cartpole/default_0.5_1.jpg").width == 960
        and (tmp_path / "out/cartpole.png").exists()
    )
    (trained,) = run("--only", "cartpole/default")  # the second seed only
    assert trained[trained.index("--seed") + 1] == "2"
    rows = rows_of(tmp_path / "out/cartpole.csv")
    assert [row["run"] for row in rows] == list(runs) and rows[0]["clip_return"] == first[0]["clip_return"]

    (tmp_path / "runs/cartpole/default_0.5_2/result.json").unlink()  # as if it had been killed
    (resumed,) = run("--only", "cartpole/default")
    assert resumed[1:] == ["--resume", str(tmp_path / "runs/cartpole/default_0.5_2")]
    assert rows_of(tmp_path / "out/cartpole.csv") == rows and len(rows_of(tmp_path / "out/curves.csv")) == 20
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    assert run("--only", "cartpole/default", "--missing") == [] and run("--only", "none") == []
    assert len(run("--only", "cartpole/default_0.5_1")) == 1  # without its folder it is made again
    assert f"success rate {rows[0]['success_rate']} (stored before: {rows[0]['success_rate']})" in "".join(capfd.readouterr())
    with pytest.raises(SystemExit) as stopped:
        run("--only", "cartpole/paper")
    assert stopped.value.code == 2 and len(rows_of(tmp_path / "out/cartpole.csv")) == 2
    with pytest.raises(SystemExit) as stopped:
        run("--only", "cartpool")
    assert stopped.value.code == 2 and "nothing begins with cartpool" in "".join(capfd.readouterr())
    assert (ROOT / "README.md").read_bytes() == readme


def test_a_printed_table_becomes_a_csv_file_and_a_table_again(tmp_path):
    text = "tiny on cpu\n| script | ours |\n|---|---|\n| a | 1.0 (0.9 to 1.1) |\n| b | 2 |\n"
    make.store_table("compare", text, tmp_path)
    rows = rows_of(tmp_path / "compare.csv")
    assert [row["script"] for row in rows] == ["a", "b"] and rows[0]["what"] == "tiny on cpu"
    assert make.printed_table("compare")(tmp_path) == "\n".join(text.splitlines()[1:])
    assert make.printed_table("compare", "none")(tmp_path).splitlines()[0] == "| CLIP model | script | ours |"


def test_an_interrupt_is_the_programs_own_to_answer_and_ends_make(tmp_path):
    """A program that needs a second to end as it wants to gets that second."""
    slow = """
import signal, sys, time
def stop(number, frame):
    time.sleep(1)
    print("saved", number, flush=True)
    sys.exit(0)
signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
time.sleep(60)
"""
    (tmp_path / "slow.py").write_text(slow)
    command = f"import sys; sys.path.insert(0, {str(ROOT / 'results')!r}); import make; make.call([{str(tmp_path / 'slow.py')!r}]); print('on')"
    for number in (signal.SIGINT, signal.SIGTERM):
        program = subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE, text=True)
        assert program.stdout.readline() == "ready\n"
        program.send_signal(number)
        assert program.communicate(timeout=30)[0] == f"saved {number.value}\n" and program.returncode == 128 + number


def test_tables_tell_rows_of_earlier_weights_and_how_many_runs_are_missing(tmp_path):
    rows = [{"run": f"prompts/rewording-{k}_1", "seed": 1, "success_rate": "1.00", "clip_return": "1"} for k in (1, 2)]
    about = ({"commit": "abc", "tiny": make.weights()}, {"commit": "abc", "tiny": "another"})
    rows = [row | {"prompt": "x"} | how for row, how in zip(rows, about)]
    make.write(tmp_path / "prompts.csv", rows)
    points = [{"run": row["run"], "step": 1, "clip_return": 1, "success_rate": 0.5} for row in rows]
    make.write(tmp_path / "curves.csv", points)
    filled = make.fill_in("<!-- results: prompts -->\n<!-- end -->", tmp_path)
    assert "| 0.50 | abc |\n" in filled and "| 0.50 | abc (earlier weights) |\n" in filled
    assert "\n\n*Runs still to be made: 3 of 5.*\n<!-- end -->" in filled


def test_a_sheet_brings_its_runs_along(tmp_path, monkeypatch):
    made, sheet = [], "reward_models_kneeling"
    monkeypatch.setattr(make, "call", lambda command, **_: (made.append(str(command[0])) or 7, None))
    folders = ["--run-dir", str(tmp_path / "runs"), "--output", str(tmp_path / "out"), "--only", sheet]
    monkeypatch.setattr(sys, "argv", ["make.py", *folders])
    with pytest.raises(SystemExit) as stopped:
        make.main()
    assert stopped.value.code == 7 and made == [str(ROOT / "sac_clip_humanoid.py")]
