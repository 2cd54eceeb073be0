"""States of an environment, their pictures and labels: what figures/reward_models.py judges a reward model on.

python figures/dataset.py --run-dirs runs/kneeling_1 runs/kneeling_2 --output datasets/kneeling
python figures/dataset.py --script dqn_clip_cartpole --output datasets/cartpole

A dataset is a folder: `labels.csv` with one line a state (its picture, the label of the script's success condition, and
`human_label`, empty: fill it with 0 or 1 wherever you disagree, or everywhere), `frames/`, `states.npy`, and `dataset.json`.
"""

import csv
import importlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from PIL import Image
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tiny_clip")]

Script = Literal["dqn_clip_cartpole", "sac_clip_mountaincar", "sac_clip_humanoid"]
LOOK = ("textures", "camera", "supersample")  # settings that change the frames


class DatasetError(ValueError):
    """What the user got wrong, in one line."""


@dataclass
class Args:
    """Collect states from runs, or at random and from poses; draw and label them, and write them into a new folder."""

    run_dirs: tuple[Path, ...] = ()
    """run folders of one script, whose replay buffers the states are drawn from; they bring prompt, task and look"""
    script: Script | None = None
    """without runs: whose states (CartPole's and the car's at random, the humanoid's from poses; if possible, a quarter are goal states)"""
    task: str | None = None
    """without runs: of the humanoid (default: kneeling)"""
    prompt: tuple[str, ...] = ()
    """without runs: a sentence of your own, which no condition labels: fill in human_label, or judge by eye"""
    states: int = 1000
    """states in the dataset"""
    seed: int = 1
    """of the choice of the states"""
    output: Path = Path("dataset")
    """folder to write, made anew"""


def states_of_runs(run_dirs: tuple[Path, ...]) -> tuple[torch.Tensor, dict]:
    """-> all states in the replay buffers of these runs, and their common settings."""
    states, settings = [], []
    for run_dir in run_dirs:
        if not os.path.isfile(run_dir / "checkpoint.pt"):
            raise DatasetError(f"{run_dir} is no run folder: it holds no checkpoint.pt")
        try:
            checkpoint = torch.load(run_dir / "checkpoint.pt", map_location="cpu", weights_only=True, mmap=True)
            script = checkpoint["script"]
            _, steps, num_envs = checkpoint["rb"]["rewards"].shape
            played = checkpoint["progress"][0] // (steps * num_envs)  # rounds; those beyond are still empty
            # What each step led to; of the humanoid's numbers those that say what there is to see.
            states.append(checkpoint["rb"]["states"][:played, 1:, :, :24].flatten(0, 2))
            if not os.path.isfile(ROOT / f"{script}.py"):
                raise FileNotFoundError(script)
        except Exception:  # whatever the file holds instead
            raise DatasetError(f"{run_dir / 'checkpoint.pt'} is no checkpoint of a script here") from None
        keep = ("prompt", "baseline_prompt", "task", *LOOK)
        settings.append({"script": script} | {k: checkpoint["settings"].get(k) for k in keep})
        different = [name for name, value in settings[-1].items() if value != settings[0][name]]
        if different:
            raise DatasetError(f"{run_dir} differs from {run_dirs[0]} in {', '.join(different)}: one dataset, one task")
    states = torch.cat(states)
    if not len(states):
        raise DatasetError(f"{', '.join(map(str, run_dirs))}: nothing has been played yet")
    return states, settings[0]


def states_at_random(script: Script, task: str | None, n: int, rng: np.random.Generator) -> tuple[torch.Tensor, dict]:
    """-> n states and the script's default settings."""
    module = importlib.import_module(script)
    defaults = module.Args()
    settings = {"script": script, "prompt": defaults.prompt, "baseline_prompt": defaults.baseline_prompt, "task": None}
    settings |= {name: getattr(defaults, name, None) for name in LOOK}
    if script == "sac_clip_humanoid":
        from train import humanoid_states  # of tiny_clip: but these states are none of its own

        task = task or "kneeling"
        if task not in module.TASKS:
            raise DatasetError(f"no task {task}: there are {', '.join(module.TASKS)}")
        return humanoid_states(n, rng), settings | {"task": task, "prompt": (module.TASKS[task][0],)}
    if script == "sac_clip_mountaincar":
        x = rng.uniform(-1.2, 0.6, n)
        return torch.from_numpy(np.stack([x, 0 * x], axis=1)).float(), settings
    degrees = rng.uniform(-1, 1, n) * np.where(rng.random(n) < 0.5, 20, 180)
    x = rng.uniform(-2.4, 2.4, n)
    return torch.from_numpy(np.stack([x, 0 * x, np.radians(degrees), 0 * x], axis=1)).float(), settings


def label(states: torch.Tensor, settings: dict) -> torch.Tensor | None:
    """States (N, …) -> whether the script's success condition holds (N,) bool; None if it has none for this sentence."""
    module = importlib.import_module(settings["script"])
    if settings["script"] != "sac_clip_humanoid":
        return module.ground_truth_reward(states) > 0
    if settings["task"] is None:
        return None
    look = (settings[name] for name in LOOK)
    scene = module.Scene(8, 8, *look, 1024, torch.device("cpu"))  # small frames: only where the parts of the body are
    holds = module.TASKS[settings["task"]][1]
    return torch.cat([holds(scene.draw(chunk)[1]) for chunk in tqdm(states.split(8192), desc="label", leave=False)])


def drawer(
    settings: dict, height: int, width: int, batch_size: int, device: torch.device
) -> Callable[[torch.Tensor], torch.Tensor]:
    """-> a function from states (N, …) to frames (N, 3, height, width) uint8."""
    module = importlib.import_module(settings["script"])
    if settings["script"] == "sac_clip_humanoid":
        scene = module.Scene(height, width, *(settings[name] for name in LOOK), batch_size, device)
        return lambda states: scene.draw(states)[0]
    if hasattr(module, "Scene"):
        return module.Scene(height, width, *(settings[name] for name in LOOK if settings[name]), device).draw
    return lambda states: module.draw(states.to(device), height, width)


def load(folder: Path) -> tuple[dict, torch.Tensor, torch.Tensor | None, int]:
    """-> settings, states (N, …), labels (N,) bool, a person's wherever there is one, and how many these are; None if there are none."""
    for name in ("dataset.json", "states.npy", "labels.csv"):
        if not os.path.isfile(folder / name):
            raise DatasetError(f"{folder} is no dataset: it holds no {name} (figures/dataset.py makes one)")
    settings, states = json.loads((folder / "dataset.json").read_text()), torch.from_numpy(np.load(folder / "states.npy"))
    values, people, path = {}, 0, folder / "labels.csv"
    with open(path, newline="", encoding="utf-8-sig") as file:  # as spreadsheets may save it
        reader = csv.DictReader(file)
        if not {"frame", "label", "human_label"} <= set(reader.fieldnames or ()):
            raise DatasetError(f"{path}: the first line must be frame,label,human_label, with commas")
        rows = list(reader)
        if not any((row["human_label"] or row["label"] or "").strip() for row in rows):
            return settings, states, None, 0
        for line, row in enumerate(rows, 2):
            own = (row["human_label"] or "").strip()
            value = own or (row["label"] or "").strip()
            if value not in ("0", "1", "0.0", "1.0"):  # the latter as pandas writes a column with gaps
                hint = "" if value else "; fill in human_label"
                raise DatasetError(f"{path}, line {line}: labels are 0 or 1, not {value!r}{hint}")
            values[row["frame"]] = value[0] == "1"
            people += bool(own)
    missing = [frame for frame in map(picture, range(len(states))) if frame not in values]
    if missing:
        raise DatasetError(f"{path} has no line for {missing[0]}: none may be missing")
    return settings, states, torch.tensor([values[picture(i)] for i in range(len(states))]), people


def picture(i: int) -> str:
    """Where the picture of state i is, in the dataset's folder."""
    return f"frames/{i:06}.png"


def main() -> None:
    args = tyro.cli(Args)
    if bool(args.run_dirs) == bool(args.script):
        raise DatasetError("give either --run-dirs or --script: where are the states to come from?")
    if args.task and args.script != "sac_clip_humanoid":
        raise DatasetError("--task belongs to --script sac_clip_humanoid: runs bring their own")
    if args.prompt and (args.run_dirs or args.task):
        raise DatasetError("--prompt belongs to --script, without --task: runs and tasks bring their own")
    if args.states < 1:
        raise DatasetError(f"--states must be at least 1, not {args.states}")
    if os.path.exists(args.output):
        raise DatasetError(f"{args.output} exists: choose another --output")
    parent = args.output.absolute().parent
    if not (os.path.isdir(parent) and os.access(parent, os.W_OK)):
        raise DatasetError(f"cannot write to {args.output}: {parent} is not a folder that can be written to")
    rng = np.random.default_rng(40_000 + args.seed)  # not the one that tiny_clip was trained with
    if args.run_dirs:
        states, settings = states_of_runs(args.run_dirs)
        if len(states) < args.states:
            raise DatasetError(f"these runs hold {len(states)} states: lower --states")
        states = states[torch.from_numpy(rng.choice(len(states), args.states, replace=False))]
    else:
        states, settings = states_at_random(args.script, args.task, max(10 * args.states, 10_000), rng)
        if args.prompt:
            settings |= {"prompt": args.prompt, "task": None}
            states = states[rng.permutation(len(states))[: args.states]]
        else:
            holds = label(states, settings)
            goal, other = holds.nonzero()[: args.states // 4, 0], (~holds).nonzero()[:, 0]
            chosen = torch.cat([goal, other[: args.states - len(goal)]])
            states = states[chosen[torch.from_numpy(rng.permutation(len(chosen)))]]
    labels = None if args.prompt else label(states, settings)
    settings |= {"runs": [str(run_dir) for run_dir in args.run_dirs], "seed": args.seed}

    folder = Path(tempfile.mkdtemp(dir=parent))  # becomes the dataset when it is whole
    try:
        (folder / "frames").mkdir()
        np.save(folder / "states.npy", states.numpy())
        (folder / "dataset.json").write_text(json.dumps(settings, indent=2) + "\n")
        with open(folder / "labels.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("frame", "label", "human_label"))
            values = [""] * len(states) if labels is None else labels.int().tolist()
            writer.writerows((picture(i), value, "") for i, value in enumerate(values))
        screen = importlib.import_module(settings["script"])  # frames larger than most models see them
        size = getattr(screen, "SCREEN_HEIGHT", 480) // 2, getattr(screen, "SCREEN_WIDTH", 480) // 2
        progress, draw = tqdm(total=len(states), desc="draw", unit="frame"), drawer(settings, *size, 64, torch.device("cpu"))
        for chunk in torch.arange(len(states)).split(64):
            for i, frame in zip(chunk.tolist(), draw(states[chunk]).permute(0, 2, 3, 1).numpy()):
                Image.fromarray(frame).save(folder / picture(i))
                progress.update()
        progress.close()
        folder.chmod(0o755)  # a temporary folder is its owner's alone
        os.rename(folder, args.output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    share = "without labels" if labels is None else f"{labels.float().mean():.3f} of them goal states"
    print(f"{len(states)} states, {share}; written to {args.output}")


if __name__ == "__main__":
    try:
        main()
    except DatasetError as error:
        print(f"dataset.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
