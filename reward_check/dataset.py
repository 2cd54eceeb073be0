"""States of an environment, their pictures and labels: what reward models are judged on.

    python -m reward_check.dataset --script sac_clip_humanoid --task kneeling --output datasets/kneeling
    python -m reward_check.dataset --run-dirs runs/kneeling_1 runs/kneeling_2 --output datasets/visited

The first are fixed states, made before any training and the same for every model; half are goal states. The
second were visited by the policies of runs: they show what these did, and predict nothing of them. A dataset is
a folder: `labels.csv` with one line a state (its picture, the label of the script's success condition, and
`human_label`, empty: fill it with 0 or 1 wherever you disagree, or everywhere), `frames/`, `states.npy`, and
`dataset.json`.
"""

import csv
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
import torch
import tyro
from PIL import Image
from tqdm import trange

from clip_reward import UsageError
from reward_check.runs import rounds_of, script_of, settings_of, states_of

Script = Literal["dqn_clip_cartpole", "sac_clip_mountaincar", "sac_clip_humanoid"]
LOOK = ("textures", "camera", "supersample")  # settings that change the frames


@dataclass
class Args:
    """Collect states from runs, or at random and from poses; render and label them; write a new folder."""

    run_dirs: tuple[Path, ...] = ()  # of one script: states of their rounds, with their prompt, task and look
    script: Script | None = None  # without runs: whose fixed states, half of them goal states
    task: str | None = None  # without runs: of the humanoid, labels the states (default: kneeling)
    prompt: tuple[str, ...] = ()  # without runs: a sentence of your own, for states at random
    states: int = 1000  # states in the dataset
    seed: int = 1  # of the choice of the states
    output: Path = Path("dataset")  # folder to write, made anew


def states_of_runs(run_dirs: tuple[Path, ...]) -> tuple[torch.Tensor, dict]:
    """-> what can be seen of all states in the rounds that these runs hold, and the runs' common settings."""
    states = []
    common = None
    for run_dir in run_dirs:
        settings = settings_of(run_dir)
        own = {name: settings.get(name) for name in ("script", "prompt", "baseline_prompt", "task", *LOOK)}
        common = common or own
        different = [name for name in own if own[name] != common[name]]
        if different:
            raise UsageError(f"{run_dir} differs from {run_dirs[0]} in {', '.join(different)}")
        states += [seen(states_of(path), own) for path in rounds_of(run_dir)]
    return torch.cat(states), common


def seen(states: torch.Tensor, settings: dict) -> torch.Tensor:
    """States of a round (T + 1, N, S) -> those after its steps, as far as a frame shows them (T N, …)."""
    return states[1:, :, : getattr(script_of(settings), "POSE_SIZE", None)].flatten(0, 1)


def states_at_random(script: str, task: str | None, n: int, rng: np.random.Generator) -> tuple:
    """-> n states (n, …) without a policy, the humanoid's from poses, and the script's default settings."""
    module = script_of({"script": script})
    defaults = module.Args()
    settings = {"script": script, "task": None}
    settings |= {name: getattr(defaults, name, None) for name in ("prompt", "baseline_prompt", *LOOK)}
    if hasattr(module, "TASKS"):
        from reward_check.states import humanoid_states  # but not those that `tiny` was trained with

        task = task or "kneeling"
        if task not in module.TASKS:
            raise UsageError(f"no task {task}: there are {', '.join(module.TASKS)}")
        return humanoid_states(n, rng), settings | {"task": task, "prompt": (module.TASKS[task][0],)}
    if hasattr(module, "MountainCar"):
        x = rng.uniform(-1.2, 0.6, n)
        return torch.from_numpy(np.stack([x, 0 * x], axis=1)).float(), settings
    degrees = rng.uniform(-1, 1, n) * np.where(rng.random(n) < 0.5, 20, 180)
    x = rng.uniform(-2.4, 2.4, n)
    return torch.from_numpy(np.stack([x, 0 * x, np.radians(degrees), 0 * x], axis=1)).float(), settings


def fixed_states(script: str, task: str | None, n: int, rng: np.random.Generator) -> tuple:
    """-> n states (n, …) and the script's default settings. Half are goal states, random or posed; a quarter
    are other such states; a quarter are others that a random policy visits."""
    posed, settings = states_at_random(script, task, max(10 * n, 5000), rng)
    holds = label(posed, settings)
    goal = posed[holds]
    if settings["task"] and len(goal) < n // 2:  # few poses are splits: more like those
        from reward_check.states import play, robots, variations

        bodies = robots(256)
        while len(goal) < n // 2:
            parents = goal[torch.from_numpy(rng.integers(len(goal), size=256))]
            states = torch.cat(play(*variations(parents.numpy(), rng), bodies, rng))
            goal = torch.cat([goal, states[label(states, settings)]])
    played = states_of_a_random_policy(settings, max(32, n // 100), int(rng.integers(2**31)))
    rest = n - n // 2 - n // 4
    kinds = ((goal, n // 2), (posed[~holds], n // 4), (played[~label(played, settings)], rest))
    chosen = [states[torch.from_numpy(rng.permutation(len(states))[:size])] for states, size in kinds]
    return torch.cat(chosen)[torch.from_numpy(rng.permutation(n))], settings


def states_of_a_random_policy(settings: dict, episodes: int, seed: int) -> torch.Tensor:
    """-> the states (N, S) of so many episodes."""
    module = script_of(settings)
    names = {"CartPole", "MountainCar", "Humanoids"} & vars(module).keys()
    envs = vars(module)[names.pop()](episodes)
    policy = module.QNetwork() if hasattr(module, "QNetwork") else None  # not heeded, with ε = 1
    nobody = SimpleNamespace(add=lambda states: None)
    return seen(module.rollout(policy, 1.0, envs, nobody, seed, module.Args())[0], settings)


def scene_of(settings: dict, height: int, width: int, batch_size: int, device: torch.device):
    """-> the script's `Scene`, in the look of these settings."""
    module = script_of(settings)
    look = [settings[name] for name in LOOK if settings.get(name) is not None]
    if hasattr(module, "TASKS"):  # the humanoid's is for so many at once
        look.append(batch_size)
    return module.Scene(height, width, *look, device)


def label(states: torch.Tensor, settings: dict) -> torch.Tensor | None:
    """States (N, …) -> whether the script's success condition holds (N,) bool; None where it has none."""
    module = script_of(settings)
    if not hasattr(module, "TASKS"):
        return module.ground_truth_reward(states) > 0
    if settings["task"] is None:
        return None
    scene = scene_of(settings, 8, 8, 1024, torch.device("cpu"))  # only where the parts of the body are
    return module.TASKS[settings["task"]][1](scene.render(states)[1])


def renderer(settings: dict, height: int, width: int, batch_size: int, device: torch.device) -> Callable:
    """-> a function from states (N, …) to frames (N, 3, height, width) uint8."""
    module = script_of(settings)
    if not hasattr(module, "Scene"):
        return lambda states: module.render(states.to(device), height, width)
    scene = scene_of(settings, height, width, batch_size, device)
    return (lambda states: scene.render(states)[0]) if hasattr(module, "TASKS") else scene.render


def picture(i: int) -> str:
    """Where the picture of state i is, in the dataset's folder."""
    return f"frames/{i:06}.png"


def load(folder: Path) -> tuple[dict, torch.Tensor, torch.Tensor | None, int]:
    """-> settings, states (N, …), labels (N,) bool, a person's where there is one, and how many these are.

    States without a label, or whose row was deleted, are left out; the settings' "pictures" are those of the
    others. Where nothing is labelled, the labels are None.
    """
    settings = json.loads((folder / "dataset.json").read_text())
    states = torch.from_numpy(np.load(folder / "states.npy"))
    pictures = [folder / picture(i) for i in range(len(states))]
    text = (folder / "labels.csv").read_text(encoding="utf-8-sig").replace(";", ",")  # of a spreadsheet
    rows = {}
    for row in csv.DictReader(text.splitlines()):
        rows[row.get("frame")] = [(row.get(name) or "").strip() for name in ("human_label", "label")]
    of_states = [rows.get(picture(i), ["", ""]) for i in range(len(states))]
    labels = [person or given for person, given in of_states]
    if not any(labels):
        return settings | {"pictures": pictures}, states, None, 0
    wrong = [value for value in labels if value not in ("", "0", "1", "0.0", "1.0")]  # pandas writes 1.0
    if wrong:
        raise UsageError(f"{folder}/labels.csv: a label is 0 or 1, or missing, not {wrong[0]!r}")
    there = [i for i, value in enumerate(labels) if value]
    people = sum(bool(of_states[i][0]) for i in there)
    labels = torch.tensor([float(labels[i]) == 1 for i in there])
    return settings | {"pictures": [pictures[i] for i in there]}, states[there], labels, people


def main() -> None:
    args = tyro.cli(Args)
    if bool(args.run_dirs) == bool(args.script):
        raise UsageError("give either --run-dirs or --script: where are the states to come from?")
    if args.task and args.script != "sac_clip_humanoid" or args.prompt and args.run_dirs:
        raise UsageError("--task belongs to --script sac_clip_humanoid, --prompt to --script")
    if args.output.exists():
        raise UsageError(f"{args.output} exists: choose another --output")
    rng = np.random.default_rng(40_000 + args.seed)  # not the one that tiny_clip was trained with
    if args.run_dirs:
        states, settings = states_of_runs(args.run_dirs)
        if len(states) < args.states:
            raise UsageError(f"these runs hold {len(states)} states: lower --states")
        states = states[torch.from_numpy(rng.choice(len(states), args.states, replace=False))]
    else:
        make = states_at_random if args.prompt else fixed_states
        states, settings = make(args.script, args.task, args.states, rng)
        if args.prompt:
            settings |= {"prompt": args.prompt, "task": args.task}
    labels = label(states, settings) if args.task or not args.prompt else None

    (args.output / "frames").mkdir(parents=True)
    screen = script_of(settings)  # frames larger than most models see them
    size = getattr(screen, "SCREEN_HEIGHT", 480) // 2, getattr(screen, "SCREEN_WIDTH", 480) // 2
    render = renderer(settings, *size, 1, torch.device("cpu"))
    for i in trange(len(states), desc="render", unit="frame"):
        Image.fromarray(render(states[i : i + 1])[0].permute(1, 2, 0).numpy()).save(args.output / picture(i))
    np.save(args.output / "states.npy", states.numpy())
    with open(args.output / "labels.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("frame", "label", "human_label"))
        values = [""] * len(states) if labels is None else labels.int().tolist()
        writer.writerows((picture(i), value, "") for i, value in enumerate(values))
    settings |= {"runs": [str(run_dir) for run_dir in args.run_dirs], "seed": args.seed}
    (args.output / "dataset.json").write_text(json.dumps(settings, indent=2) + "\n")
    share = "without labels" if labels is None else f"{labels.float().mean():.3f} of them goal states"
    print(f"{len(states)} states, {share}; written to {args.output}")


if __name__ == "__main__":
    try:
        main()
    except (UsageError, OSError) as error:
        print(f"dataset.py: error: {error}", file=sys.stderr)
        sys.exit(2)
