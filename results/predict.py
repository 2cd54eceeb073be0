"""Does the check predict? How well rewards fit states that no run has chosen, beside what training gave.

    python -m results.predict --output results/predict.png  # of the runs in results/
    python -m results.predict --runs one.json another.json --output results/dose.png  # of reward_check.dose

EPIC distance and average precision are judged on the fixed states of each reward's task, which
reward_check/dataset.py made before any training.
"""

import json
import shlex
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
import tyro
from scipy.stats import rankdata

from results.tables import HERE, PREDICTED, RUNS, TINY, describe, kind_of, read, wilson, write
from reward_check.dataset import load
from reward_check.dose import Noise
from reward_check.reward_models import measure
from reward_check.runs import script_of

FIGURES = {"epic_balanced": "EPIC distance, half goal states", "average_precision": "average precision"}


def rewards_of(script: str, options: str, datasets: Path) -> tuple[str, torch.Tensor, torch.Tensor]:
    """-> task of a run with these options, its rewards and the labels of the task's fixed states (N,)."""
    module = script_of({"script": script})
    args = tyro.cli(module.Args, args=["--clip-model", "tiny", *shlex.split(options)])
    args.check()
    task = getattr(args, "task", None) or script.split("_")[-1]
    _, states, label, _ = load(datasets / task)
    worker = module.Worker(args, torch.device("cpu"))
    rewards = torch.cat([worker.label(some)[:, 0] for some in states.split(args.clip_batch_size)])
    return task, rewards, label


def of_results(datasets: Path) -> Iterator[dict]:
    """A row for each kind of run with a CLIP reward: what it is, figures, success of its seeds."""
    for claim in PREDICTED:
        found = [row for row in read(HERE / f"{claim}.csv") if row["run"] in RUNS and row["tiny"] == TINY]
        for kind, group in groupby(found, kind_of):
            runs = list(group)
            if not kind.endswith(("/truth", "/bf16")):
                script = runs[0]["script"]
                task, *both = rewards_of(script, runs[0]["options"], datasets)
                row = {"script": script, "task": task, "group": claim, "name": kind.partition("/")[2]}
                yield row | measure(*both, 1000, 1) | succeeded([float(run["success_rate"]) for run in runs])


def of_doses(runs: tuple[Path, ...], datasets: Path) -> Iterator[dict]:
    """The same for each run, as each seed has errors of its own."""
    for run in sorted((json.loads(path.read_text()) for path in runs), key=lambda run: [*run.values()]):
        success = run.pop("success_rate")
        task = run["script"].split("_")[-1]
        _, states, label, _ = load(datasets / task)
        group = run["errors"] + ("" if run["fixed"] else ", drawn at each visit")
        row = {"script": run["script"], "task": task, "group": group, "name": f"{run['wrong']:g}"}
        yield row | measure(Noise(**run)(states)[:, 0], label, 1000, 1) | succeeded([success])


def succeeded(rates: list[float]) -> dict:
    """Success rates of the seeds -> what is told of them; a run at 0.9 or above has learned its task."""
    spread = {"success_rate": np.mean(rates), "lowest": min(rates), "highest": max(rates)}
    return {"seeds": len(rates), "learned": sum(rate >= 0.9 for rate in rates)} | spread


def rank_correlation(rows: list[dict], figure: str, within: bool) -> str:
    """Spearman's of a figure with success, with its 95 % interval over the choice of rewards; `within` each
    task, the ranks are those among its own rewards, so that what tasks differ in does not count."""
    names = dict.fromkeys(row["task"] for row in rows) if within else [None]
    pools = [[row for row in rows if name in (None, row["task"])] for name in names]
    rng = np.random.default_rng(1)
    values = []
    for k in range(1001):
        ranks = []
        for own in pools:
            chosen = rng.integers(len(own), size=len(own)) if k else np.arange(len(own))
            both = [[own[i][name] for i in chosen] for name in (figure, "success_rate")]
            ranks.append((rankdata(both, axis=1) - (len(own) + 1) / 2) / len(own))
        x, y = np.concatenate(ranks, axis=1)
        scale = np.sqrt((x @ x) * (y @ y))
        values.append(x @ y / scale if scale else np.nan)
    low, high = np.nanquantile(values, (0.025, 0.975))
    return f"{values[0]:.2f} ({low:.2f} to {high:.2f})"


def doses(axis: plt.Axes, rows: list[dict], name: str) -> None:
    """The share of each dose's seeds that learn, with its interval, against the mean of their figure."""
    points = []
    for _, group in groupby(rows, itemgetter("name")):
        own = list(group)
        learned = sum(row["learned"] for row in own)
        low, high = wilson(learned, len(own))
        share = learned / len(own)
        points.append((np.mean([row[name] for row in own]), share, share - low, high - share))
    x, share, *interval = np.array(points).T
    axis.errorbar(x, share, interval, fmt="o-", alpha=0.7, elinewidth=0.7, capsize=3, label=rows[0]["group"])


def dots(axis: plt.Axes, rows: list[dict], name: str) -> None:
    """The mean success of each reward's seeds, from the lowest to the highest, against its figure."""
    columns = (name, "success_rate", "lowest", "highest")
    x, success, lowest, highest = np.array([[row[column] for column in columns] for row in rows]).T
    spread = np.maximum((success - lowest, highest - success), 0)  # a mean of equals may be rounded
    axis.errorbar(x, success, spread, fmt="o", alpha=0.6, elinewidth=0.7, label=rows[0]["group"])
    for row in rows:
        if row["success_rate"] < 0.9:
            axis.annotate(row["name"], (row[name], row["success_rate"]), fontsize="x-small")


def main(
    runs: tuple[Path, ...] = (), datasets: Path = Path("runs/states"), output: Path = Path("predict.png")
) -> None:
    """Print the rank correlations; write a table (CSV) and a picture."""
    torch.set_num_threads(1)
    rows = list(of_doses(runs, datasets) if runs else of_results(datasets))
    made = describe("*.py")
    text = [{k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()} | made for row in rows]
    write(output.with_suffix(".csv"), text)

    if not runs:
        for name, called in FIGURES.items():
            both = (rank_correlation(rows, name, within) for within in (False, True))
            print("{}, all {} rewards: rank correlation {}, within tasks {}".format(called, len(rows), *both))
    scripts = list(dict.fromkeys(row["script"] for row in rows))
    size = {"figsize": (12, 4.2 * len(scripts)), "layout": "constrained", "squeeze": False, "sharey": True}
    figure, axes = plt.subplots(len(scripts), 2, **size)
    for line, script in zip(axes, scripts):
        shown = [row for row in rows if row["script"] == script]
        for axis, (name, called) in zip(line, FIGURES.items()):
            about = f"{script.split('_')[-1]}, {len(shown)} rewards: rank correlation"
            about += f" {rank_correlation(shown, name, False)}"
            print(f"{called}: {about}")
            axis.set_title(about, fontsize="small")
            axis.set_xlabel(called)
            for group in dict.fromkeys(row["group"] for row in shown):
                own = [row for row in shown if row["group"] == group]
                (doses if runs else dots)(axis, own, name)
        line[0].set_ylabel("share of the runs that learn" if runs else "success of what was learned")
        line[1].legend(fontsize="x-small")
    figure.savefig(output, dpi=90)


if __name__ == "__main__":
    tyro.cli(main)
