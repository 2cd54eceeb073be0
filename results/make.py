"""Makes what the README claims: trains what is missing, and writes its figures as CSV files into this folder.

python results/make.py                        # everything: days on a CPU of two cores
python results/make.py --only table1          # one claim
python results/make.py --only table1/kneeling # those of its runs whose names begin so

A run that was interrupted goes on, one that is finished (in `--run-dir`) is not made again. Each finished run is one line of
`runs.csv` (settings, seed, figures, versions) and as many of `curves.csv` as it had rounds.
"""

import csv
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TASKS = ("kneeling", "lotus-position", "standing-up", "arms-raised", "doing-splits", "hands-on-hips", "arms-crossed", "standing-on-one-leg")  # fmt: skip
CARTPOLE, CAR, HUMANOID = "dqn_clip_cartpole", "sac_clip_mountaincar", "sac_clip_humanoid"
PAPER_DQN = "--learning-rate 2.3e-3 --batch-size 32 --target-network-frequency 100"
REWORDINGS = (
    "a humanoid robot on its knees",
    "a robot kneeling on the floor",
    "the robot has knelt down",
    "a robot resting on its two knees",
    "a humanoid in a kneeling pose",
)

# What is trained, claim/name_SEED: script and options. A run that several claims need stands under the first.
RUNS = {f"cartpole/default_{seed}": (CARTPOLE, f"--seed {seed}") for seed in (1, 2, 3, 4, 5)}
RUNS |= {f"cartpole/paper_{seed}": (CARTPOLE, f"{PAPER_DQN} --seed {seed}") for seed in (1, 2, 3)}
RUNS |= {f"mountaincar/default_{seed}": (CAR, f"--seed {seed}") for seed in (1, 2, 3, 4, 5)}
RUNS |= {
    f"mountaincar/{textures}_{alpha}_{seed}": (CAR, f"--textures {textures} --goal-baseline-alpha {alpha} --seed {seed}")
    for textures, alpha in (("plain", 0), ("plain", 0.5), ("plain", 1), ("realistic", 0), ("realistic", 1))
    for seed in (1, 2, 3)
}
RUNS |= {f"mountaincar/truth_{seed}": (CAR, f"--reward ground-truth --seed {seed}") for seed in (1, 2, 3)}
RUNS |= {f"table1/{task}_{seed}": (HUMANOID, f"--task {task} --seed {seed}") for seed in (1, 2, 3) for task in TASKS}
RUNS |= {
    f"figure3/{textures}_{camera}_1": (HUMANOID, f"--task kneeling --textures {textures} --camera {camera} --seed 1")
    for textures, camera in (("original", "original"), ("original", "fixed"), ("realistic", "original"))
}
RUNS |= {
    f"prompts/rewording-{k}_1": (HUMANOID, f"--task kneeling --seed 1 --prompt={prompt}")
    for k, prompt in enumerate(REWORDINGS, 1)
}
RUNS |= {f"paper/kneeling_{seed}": (HUMANOID, f"--paper --total-timesteps 256000 --seed {seed}") for seed in (1, 2, 3)}


@dataclass
class Args:
    """Train what is missing, one run after the other, and write results/."""

    only: tuple[str, ...] = ()
    """claims, or beginnings of the names of runs (default: all)"""
    kept: bool = False
    """do not make again what already has its line in runs.csv, even if its run folder is not here"""
    clip_model: str = "tiny"
    """train with this model instead; what comes out goes into a folder of its own"""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """cpu or cuda"""
    run_dir: Path = ROOT / "runs" / "results"
    """where the runs are trained"""
    output: Path = HERE
    """folder of the CSV files"""


def read(path: Path) -> list[dict]:
    if not path.is_file():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: list[dict]) -> None:
    """Whole or not at all."""
    temporary = path.with_suffix(".tmp")
    with open(temporary, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    os.replace(temporary, path)


def store(name: str, run_dir: Path, output: Path) -> dict:
    """Write a finished run into runs.csv and curves.csv -> its line of runs.csv, in place of the one that was there."""
    script, options = RUNS[name]
    result = json.loads((run_dir / "result.json").read_text())
    events = EventAccumulator(str(run_dir), {"scalars": 0}).Reload()
    charts = {tag: events.Scalars(f"charts/{tag}") for tag in ("clip_return", "ground_truth_return", "success_rate")}
    rounds = [
        {"run": name, "step": points[0].step} | {tag: f"{point.value:.4g}" for tag, point in zip(charts, points)}
        for points in zip(*charts.values())
    ]
    late = [float(point["success_rate"]) for point in rounds[len(rounds) // 2 :]]
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout
    row = {"run": name, "script": script, "options": options, "clip_model": result["settings"]["clip_model"]}
    row |= {tag: f"{result[tag]:.2f}" for tag in ("success_rate", "clip_return", "ground_truth_return")}
    row |= {"late_success_rate": f"{sum(late) / len(late):.2f}", "steps_per_second": f"{result['steps_per_second']:.0f}"}
    row |= {"episodes": result["settings"]["episodes"], "precision": result["settings"]["precision"]}
    row |= {"device": f"{result['settings']['device']}, {torch.get_num_threads()} {platform.machine()} cores"}
    row |= {"versions": " ".join(f"{k} {v}" for k, v in result["versions"].items()), "commit": commit.strip()}
    order = {name: k for k, name in enumerate(RUNS)}
    for path, new in ((output / "runs.csv", [row]), (output / "curves.csv", rounds)):
        rows = [old for old in read(path) if old["run"] != name and old["run"] in order] + new
        write(path, sorted(rows, key=lambda row: order[row["run"]]))
    return row


def main() -> None:
    args = tyro.cli(Args)
    if args.clip_model != "tiny":
        folder = "".join(c if c.isalnum() else "_" for c in args.clip_model)
        args.run_dir, args.output = args.run_dir / folder, args.output / folder
    unknown = [name for name in args.only if not any(run.startswith(name) for run in RUNS)]
    if unknown:
        print(f"make.py: error: no run begins with {unknown[0]}; there are {', '.join(RUNS)}", file=sys.stderr)
        sys.exit(2)
    args.output.mkdir(parents=True, exist_ok=True)
    there = {row["run"]: row for row in read(args.output / "runs.csv")}
    names = [name for name in RUNS if not args.only or name.startswith(args.only)]
    progress = tqdm(names, unit="run")
    for name in progress:
        progress.set_description(name)
        run_dir, (script, options) = args.run_dir / name, RUNS[name]
        if args.kept and name in there:
            continue
        if not (run_dir / "result.json").is_file():
            first, _, prompt = options.partition(" --prompt=")
            new = [*first.split(), *(["--prompt", prompt] if prompt else []), "--clip-model", args.clip_model]
            new += ["--device", args.device, "--run-dir", run_dir]
            resume = ["--resume", run_dir] if (run_dir / "checkpoint.pt").is_file() else new
            code = subprocess.run([sys.executable, ROOT / f"{script}.py", *resume]).returncode
            if code:
                sys.exit(code)  # it has said why; if it was interrupted, the next call goes on with it
        row = store(name, run_dir, args.output)
        stored = f", stored before: {there[name]['success_rate']}" if name in there else ""
        tqdm.write(f"{name}: success rate {row['success_rate']}{stored}")


if __name__ == "__main__":
    main()
