"""What a run leaves in its folder, for all who read it.

`checkpoint.pt` holds the "script" (the name of its file), its "settings", "step", "best_return" and what has
been learned, `rounds/K.pt` the "round" K: states (T + 1, N, S), actions (T, N, …), rewards (T, N).
"""

import importlib
from pathlib import Path
from types import ModuleType

import torch

import clip_reward


def settings_of(run_dir: Path) -> dict:
    """-> the settings of a run, and its "script"."""
    kept = torch.load(run_dir / "checkpoint.pt", map_location="cpu", weights_only=True)
    return kept["settings"] | {"script": kept["script"]}


def script_of(settings: dict) -> ModuleType:
    """The script that a run or dataset names: a file beside the others, as a dataset may be a stranger's."""
    if not (clip_reward.HERE / f"{settings['script']}.py").is_file():
        raise clip_reward.UsageError(f"there is no script {settings['script']}.py here")
    return importlib.import_module(settings["script"])


def rounds_of(run_dir: Path) -> list[Path]:
    """-> the files of the rounds that a run still holds, from its oldest to its newest."""
    return sorted((run_dir / "rounds").glob("*.pt"), key=lambda path: int(path.stem))


def states_of(path: Path) -> torch.Tensor:
    """-> states (T + 1, N, S) of a round, from its file."""
    return torch.load(path, map_location="cpu", weights_only=True)["round"][0]
