"""Workers in processes of their own, here or on other machines, by Ray (`--ray-workers N`)."""

import os
import sys
from importlib import import_module
from pathlib import Path

import ray
import torch

from clip_reward import HERE, RewardArgs, UsageError

CODE = ("tiny_clip", "code_reward", "scale")  # folders that a worker needs, beside the files at the top


class Actor:
    """A worker, in the folder of the one who asks for it, so that paths mean the same."""

    def __init__(self, Worker: type, args: RewardArgs, folder: str):
        if os.path.isdir(folder):
            os.chdir(folder)
        self.worker = Worker(args, torch.device(args.device))

    def label(self, states: torch.Tensor) -> torch.Tensor:
        return self.worker.label(states)


class RayWorker:
    """States travel there, labels back. Ray starts an actor that is lost anew, and repeats its batch."""

    def __init__(self, Worker: type, args: RewardArgs):
        if not ray.is_initialized():
            others = [path for path in HERE.iterdir() if path.suffix != ".py" and path.name not in CODE]
            code = {"working_dir": str(HERE), "excludes": [f"/{path.name}" for path in others]}
            ray.init(runtime_env=code, include_dashboard=False, log_to_driver=False, logging_level="error")
        kind = "GPU" if args.device == "cuda" else "CPU"
        if ray.cluster_resources().get(kind, 0) < args.ray_workers:  # the others would wait for ever
            raise UsageError(f"--ray-workers {args.ray_workers} need as many {kind}s of the Ray cluster")
        if Worker.__module__ == "__main__":  # by its name; by value Ray would pickle all that it refers to
            Worker = import_module(Path(sys.argv[0]).stem).Worker
        how = {"num_cpus": 1, "num_gpus": int(kind == "GPU"), "max_restarts": -1, "max_task_retries": -1}
        self.actor = ray.remote(**how)(Actor).remote(Worker, args, os.getcwd())

    def label(self, states: torch.Tensor) -> torch.Tensor:
        return ray.get(self.actor.label.remote(states.cpu())).to(states.device)
