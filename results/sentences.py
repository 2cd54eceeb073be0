"""Finished runs of neighbours/sac_sentences_humanoid.py -> results/sentences.csv, and a film of one as a GIF.

    python -m results.sentences runs/sentences/* --film runs/sentences/default_201

A line for each sentence that a run's policy was told, in training or (best_evaluation.json) never before.
"""

import json
import math
from pathlib import Path

import imageio.v3 as iio
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from results.tables import HERE, describe, write
from sac_clip_humanoid import TASKS


def learned(folder: Path, prompt: str, settings: dict) -> dict:
    """When was success 0.9 for the first time? -> steps, updates, minutes; empty if never or never told."""
    events = EventAccumulator(str(folder), {"scalars": 0}).Reload()
    tag = f"success_rate/{prompt}"
    known = tag in events.Tags()["scalars"]
    reached = [event for event in events.Scalars(tag) if event.value >= 0.9] if known else []
    if not reached:
        return {"steps": "", "updates": "", "minutes": ""}
    begun = (folder / "rounds" / "0.pt").stat().st_mtime
    a_round = settings["num_envs"] * settings["episode_length"]
    rounds = reached[0].step / a_round - math.ceil(settings["learning_starts"] / a_round)
    updates = rounds * settings["gradient_steps"]
    minutes = (reached[0].wall_time - begun) / 60  # right if it was not resumed
    return {"steps": reached[0].step, "updates": round(updates), "minutes": f"{minutes:.1f}"}


def main(folders: tyro.conf.Positional[tuple[Path, ...]], film: Path | None = None) -> None:
    rows = []
    for folder in folders:
        for name in ("result.json", "best_evaluation.json"):
            if not (folder / name).exists():
                continue
            found = json.loads((folder / name).read_text())
            for prompt, met in found["sentences"].items():
                row = {"run": folder.name, "seed": found["settings"]["seed"], "told": prompt}
                row |= {"in_training": name == "result.json", "success": f"{found['success'][prompt]:.2f}"}
                row |= {"after_a_change": f"{found['changed'][prompt]:.2f}"}
                row |= {task: f"{met[task]:.2f}" for task in TASKS}
                rows.append(row | learned(folder, prompt, found["settings"]))
    code = ("neighbours/sac_sentences_humanoid.py", "sac_clip_humanoid.py", "clip_reward.py")
    how = describe(*code, unused=())
    write(HERE / "sentences.csv", [row | how for row in rows])
    if film:
        frames = iio.imread(film / "result.mp4", plugin="pyav")[::4, :, :240]  # the first robot
        iio.imwrite(HERE / "sentences.gif", frames, duration=120, loop=0)


if __name__ == "__main__":
    tyro.cli(main)
