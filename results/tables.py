"""What results/README.md claims: the runs behind it, and how they become tables and pictures.

    python -m results.tables readme  # only the tables of README.md anew, from the CSV files

A run: a line in CLAIM.csv (settings, results), one a round in curves/CLAIM.csv, a strip of frames.
"""

import csv
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import textwrap
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from statistics import harmonic_mean, median

import matplotlib.pyplot as plt
import numpy as np
import tyro

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
# Not used here:
OTHER_CODE = (":!tests", ":!results", ":!examples", ":!code_reward", ":!neighbours/sac_sentences_humanoid.py")
TINY = hashlib.sha256((ROOT / "tiny_clip" / "open_clip_model.safetensors").read_bytes()).hexdigest()[:8]


def read(path: Path) -> list[dict]:
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines())) if path.is_file() else []


def write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


# ---- The runs, CLAIM/KIND_SEED: script and options

KINDS = {row["kind"]: row for row in read(HERE / "runs.csv")}
RUNS = {}
for kind, row in KINDS.items():
    first, _, last = row["seeds"].partition("-")
    for seed in range(int(first), int(last or first) + 1):
        options = row["options"].replace("SEED", str(seed))  # of a head
        RUNS[f"{kind}_{seed}"] = row["script"], f"{options} --seed {seed}".strip()
TASKS = [kind.removeprefix("table1/") for kind in KINDS if kind.startswith("table1/")]
CLAIMS = list(dict.fromkeys(kind.partition("/")[0] for kind in KINDS))
PREDICTED = ("cartpole", "mountaincar", "table1", "prompts", "figure3", "contrastive", "threshold", "ladder")

VIT = "--models ViT-B-32 --rounds 1 --repetitions 2 --clip-batch-size 32 --steps-per-round 320"
GROWTH = "--num-envs 8 64 512 4096 --steps-per-round 8192 --rounds 1 --repetitions 1"
PLAIN_VIT = "--scripts sac_clip_humanoid --clip-model ViT-B-32 --rounds 1 --plain-episodes 1 --repetitions 3"
COMMANDS = {  # what is not trained but printed as a table by other programs
    "throughput": "benchmarks.throughput --models tiny",
    "throughput_vit": f"benchmarks.throughput {VIT}",
    "growth": f"benchmarks.throughput --models tiny {GROWTH}",
    "cost": "benchmarks.cost",
    "compare": "benchmarks.compare --repetitions 3",
    "compare_vit": f"benchmarks.compare {PLAIN_VIT}",
    "robustness": "reward_check.robustness --dataset runs/states/kneeling",
}

# ---- Results become files


def wilson(successes: float, n: int) -> tuple[float, float]:
    """95 % interval of a share, of which `successes` of n were seen (Wilson, 1927)."""
    z = 1.96
    middle = (successes + z**2 / 2) / (n + z**2)
    half = z / (n + z**2) * (successes * (n - successes) / n + z**2 / 4) ** 0.5
    return max(middle - half, 0.0), min(middle + half, 1.0)  # rounding may lead outside


def describe(*code: str, unused: tuple = OTHER_CODE) -> dict:
    """The last commit of this code or the bundled weights, these weights, and machine of now."""

    def git(*words: str) -> str:
        command = ["git", *words, "--", *code, "tiny_clip/*.safetensors", *unused]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()

    import torch

    changes = " and changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    card = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    machine = f"{platform.machine()}, {os.cpu_count()} cores{card}, torch {torch.__version__}"
    return {"machine": machine, "commit": git("log", "-1", "--format=%h") + changes, "tiny": TINY}


def about(script: str) -> None:
    """Print that of a script, for a run that begins."""
    beside = f"*_clip_{script.rpartition('_')[2]}.py"  # itself, or what a neighbour is built on
    print(json.dumps(describe(f"{script}.py", beside, "clip_reward.py", "scale/*.py")))


def store(claim: str, run_dir: Path, output: Path) -> None:
    """The finished runs of a claim -> CLAIM.csv, curves/CLAIM.csv, and frames; others stay."""
    import imageio.v3 as iio
    from PIL import Image
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    paths = (output / f"{claim}.csv", output / "curves" / f"{claim}.csv")
    stored = {row["run"]: row for row in read(paths[0]) if row["tiny"] == TINY}
    stored_rounds = read(paths[1])
    rows = []
    rounds = []
    tags = ("success_rate", "ground_truth_return", "clip_return")
    for name, (script, options) in RUNS.items():
        if not name.startswith(f"{claim}/"):
            continue
        folder = run_dir / name
        if not Path(f"{folder}.finished").exists():
            if name in stored and stored[name]["options"] == options:
                rows.append(stored[name])
                rounds += [row for row in stored_rounds if row["run"] == name]
            continue
        result = json.loads((folder / "result.json").read_text())
        settings = result["settings"]
        events = EventAccumulator(str(folder), {"scalars": 0}, purge_orphaned_data=False).Reload()
        charts = {}  # by tag and step; what a resumed run has written anew comes last, and stays
        for tag in events.Tags()["scalars"]:
            charts[tag.removeprefix("charts/")] = {event.step: event.value for event in events.Scalars(tag)}
        for step in sorted(charts["success_rate"]):
            values = {tag: f"{charts[tag][step]:.4g}" for tag in reversed(tags)}
            rounds.append({"run": name, "step": step} | values)

        episodes = settings["episodes"]
        low, high = wilson(result["success_rate"] * episodes, episodes)
        row = {"run": name, "seed": settings["seed"]} | {tag: f"{result[tag]:.2f}" for tag in tags}
        row |= {"success_low": f"{low:.3f}", "success_high": f"{high:.3f}", "episodes": episodes}
        if "SPS" in charts:
            row["steps_per_second"] = f"{harmonic_mean(charts['SPS'].values()):.0f}"
        if "answers" in charts:
            row["answers"] = f"{charts['answers'][max(charts['answers'])]:.0f}"
        row |= {"script": script, "options": options, "prompt": "; ".join(settings["prompt"])}
        row |= {key: settings[key] for key in ("clip_model", "precision", "device")}
        rows.append(row | json.loads(Path(f"{folder}.begun").read_text()))

        film = iio.imread(folder / "result.mp4", plugin="pyav")  # three episodes or fewer
        episode = film[: settings["episode_length"]]
        eight = np.linspace(0, len(episode) - 1, 8).round().astype(int)
        strip = Image.fromarray(np.concatenate(episode[eight], axis=1))
        strip = strip.resize((960, 960 * strip.height // strip.width), Image.Resampling.LANCZOS)
        frames = output / "frames" / f"{name}.jpg"
        frames.parent.mkdir(parents=True, exist_ok=True)
        strip.save(frames, quality=70)
        if name == "table1/kneeling_201":
            iio.imwrite(output / "kneeling.gif", episode[::2], duration=60, loop=0)
    write(paths[1], rounds)
    write(paths[0], rows)


def printed(name: str, output: Path) -> None:
    """A program's Markdown table (stdin) -> NAME.csv, with the line above it, the command, and the commit."""
    lines = sys.stdin.read().splitlines()
    first = next(k for k, line in enumerate(lines) if line.startswith("| "))
    head, *table = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    how = {"what": lines[first - 1], "command": COMMANDS[name]} | describe("*.py")
    write(output / f"{name}.csv", [dict(zip(head, cells)) | how for cells in table])


def judged(path: Path) -> None:
    """Add commit, weights and machine to a table of reward_check/reward_models.py."""
    write(path, [row | describe("*.py") for row in read(path)])


# ---- The tables of README.md, each a function of the CSV files


def markdown(head: str, rows: list[list]) -> str:
    lines = [f"| {head} |", "|---" * (head.count("|") + 1) + "|"]
    return "\n".join(lines + [f"| {' | '.join(map(str, row))} |" for row in rows])


def made_by(output: Path) -> str:
    """Which commit, weights and machine made which CSV files."""
    made = {}
    for path in sorted([*output.glob("*.csv"), *output.parent.glob("reward_check/reward_models_*.csv")]):
        for row in read(path):
            if "commit" in row:
                earlier = "" if row["tiny"] == TINY else " (earlier weights)"
                made.setdefault((row["commit"] + earlier, row["machine"]), {})[path.stem] = None
    return markdown("commit | machine | files", [[*how, ", ".join(files)] for how, files in made.items()])


@cache
def curves(path: Path) -> np.ndarray:
    return np.genfromtxt(path, delimiter=",", names=True, dtype=None, encoding="utf-8")


def curve(output: Path, run: str) -> np.ndarray:
    """-> the rounds of a run, with fields step, clip_return and success_rate."""
    rounds = curves(output / "curves" / f"{run.partition('/')[0]}.csv")
    return rounds[rounds["run"] == run]


def kind_of(row: dict) -> str:
    return row["run"].rpartition("_")[0]


def spread(values: list[float]) -> str:
    """Mean, and in brackets lowest and highest."""
    brackets = f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else ""
    return f"{np.mean(values):.2f}{brackets}"


def runs_table(*claims: str, output: Path, late: bool = False, choose: bool = False) -> str:
    """A line for each kind of run, with all its seeds; late: with the success late in training; choose: with
    that of the seed that one would keep, by the CLIP return, who does not know the success."""
    lines = []
    for kind, group in groupby([row for claim in claims for row in read(output / f"{claim}.csv")], kind_of):
        rows = list(group)
        success = [float(row["success_rate"]) for row in rows]
        good = sum(rate >= 0.9 for rate in success)
        low, high = wilson(good, len(rows))
        first = []
        second_half = []
        for row in rows:
            points = curve(output, row["run"])
            first.append(points["step"][points["success_rate"] >= 0.9].min(initial=1e9))
            second_half.append(points["success_rate"][len(points) // 2 :].mean())
        steps = median(first)
        what = KINDS[kind]
        cells = [what["called"] + (f" (paper: {what['paper']})" if what["paper"] else "")]
        seeds = [row["seed"] for row in rows]
        gaps = int(seeds[-1]) - int(seeds[0]) >= len(seeds)
        cells.append(", ".join(seeds) if gaps else "-".join(dict.fromkeys((seeds[0], seeds[-1]))))
        cells += [spread(success), f"{good} of {len(rows)} ({low:.2f} to {high:.2f})"]
        cells.append(f"{steps / 1000:.0f}k" if steps < 1e8 else "never")
        cells += [spread(second_half)] if late else []
        if choose:
            kept = max(rows, key=lambda row: float(row["clip_return"]))
            cells.append(f"{kept['success_rate']} ({kept['seed']})")
        lines.append(cells)
    head = "what | seeds | success rate | runs at 0.9 or above | steps to 90 %"
    head += " | late in training" if late else ""
    head += " | of the seed with the highest CLIP return" if choose else ""
    return markdown(head, lines)


def judged_table(*names: str, output: Path) -> str:
    """A line for each task and model, from the CSV files in reward_check/, beside `output`."""
    lines = []
    for name in names:
        for row in read(output.parent / "reward_check" / f"reward_models_{name}.csv"):
            if row["alpha"] == "0":
                ends = ("", "_low", "_high")
                epic, low, high = (f"{float(row[f'epic_balanced{end}']):.3f}" for end in ends)
                precision = f"{float(row['average_precision']):.3f}"
                lines.append([name, Path(row["model"]).name, f"{epic} ({low} to {high})", precision])
    return markdown("task | model | EPIC distance, α = 0 (95 % interval) | average precision", lines)


def printed_table(*names: str, output: Path, columns: tuple[str, ...] = ()) -> str:
    """What programs printed: these columns, or all but those about how; of several files also the model."""
    rows = [row for name in names for row in read(output / f"{name}.csv")]
    if len(names) > 1 and "CLIP model" not in rows[0]:
        rows = [{"CLIP model": row["what"].partition(" in ")[0]} | row for row in rows]
        columns = columns and ("CLIP model", *columns)
    left_out = ("what", "command", "machine", "commit", "tiny")
    columns = columns or [column for column in rows[0] if column not in left_out]
    return markdown(" | ".join(columns), [[row[column] for column in columns] for row in rows])


LOOP = ("script", "CLIP model", "precision", "encode_image", "update", "loop", "efficiency (range)")
PLAIN = ("script", "ours", "ours ÷ every step", "ours ÷ end of episode")
ALONE = ("cartpole", "mountaincar", "prompts", "mend", "preferences", "shaping")
TABLES = {claim: partial(runs_table, claim) for claim in ALONE} | {
    "made_by": made_by,
    "mattered": partial(runs_table, "mattered", late=True),
    "table1": partial(runs_table, "table1", "precision", choose=True),
    "figure3": partial(runs_table, "figure3", "distractors"),
    "rewards": partial(runs_table, "alpha", "contrastive", "threshold"),
    "agreement": partial(judged_table, "cartpole", "mountaincar", *TASKS),
    "robustness": partial(printed_table, "robustness", columns=("the picture", "α = 0", "α = 1")),
    "throughput": partial(printed_table, "throughput", "throughput_vit", columns=LOOP),
    "cost": partial(printed_table, "cost"),
    "compare": partial(printed_table, "compare", "compare_vit", columns=PLAIN),
}


def fill_in(readme: str, output: Path = HERE) -> str:
    """README.md with each table between `<!-- results: NAME -->` and `<!-- end -->` made anew."""
    pattern = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return pattern.sub(lambda found: f"{found[1]}{TABLES[found[2]](output=output)}\n{found[3]}", readme)


def readme() -> None:
    path = HERE / "README.md"
    path.write_text(fill_in(path.read_text(encoding="utf-8")), encoding="utf-8")


# ---- Pictures


def figure(name: str, output: Path) -> None:
    """NAME.png from the CSV files and frames."""
    plt.rcParams["text.parse_math"] = False  # prompts may hold dollar signs
    globals().get(f"plot_{name}", partial(plot_curves, name))(output)
    plt.savefig(output / f"{name}.png", dpi=100)


def show_frames(axis: plt.Axes, output: Path, run: str, title: str) -> None:
    axis.imshow(plt.imread(output / "frames" / f"{run}.jpg"))
    axis.set_title(title, fontsize="small")
    axis.axis("off")


def show_seeds(axis: plt.Axes, output: Path, rows: list[dict], column: str, label: str) -> None:
    """A column of the runs' rounds against the steps: median and quartiles of the seeds."""
    curves = [curve(output, row["run"]) for row in rows]
    steps = curves[0]["step"] / 1000
    values = np.stack([points[column] for points in curves])  # (seeds, rounds)
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75), axis=0)
    axis.plot(steps, middle, label=label)
    axis.fill_between(steps, low, high, alpha=0.25)
    axis.set_xlabel("environment steps, thousands")
    axis.grid(alpha=0.3)


def plot_curves(claim: str, output: Path) -> None:
    """CLIP return and success, learned from either reward, above frames of the first run."""
    rows = read(output / f"{claim}.csv")
    figure = plt.figure(figsize=(11, 4.6), layout="constrained")
    panels = [["clip_return", "success_rate"], ["frames", "frames"]]
    axes = figure.subplot_mosaic(panels, height_ratios=[3, 1])
    for kind, reward in ((kind_of(rows[0]), "CLIP"), (f"{claim}/truth", "ground truth")):
        own = [row for row in rows if kind_of(row) == kind]
        label = f"from {reward}, median and quartiles of {len(own)} seeds"
        for column in panels[0] if own else []:
            show_seeds(axes[column], output, own, column, label)
    axes["clip_return"].legend(fontsize="small", loc="lower right")
    axes["clip_return"].set_title("what the agent learns from")
    axes["clip_return"].set_ylabel("CLIP return: sum of an episode's rewards")
    axes["success_rate"].set(title="never shown to it", ylabel="success rate of a round (1: every episode)")
    title = f"an episode after training, seed {rows[0]['seed']}, from its first to its last step"
    show_frames(axes["frames"], output, rows[0]["run"], title)
    figure.suptitle(f"“{rows[0]['prompt']}”", fontsize="medium")


def plot_table1(output: Path) -> None:
    """For each task an episode of the seed with the highest success."""
    kinds = [(kind, list(rows)) for kind, rows in groupby(read(output / "table1.csv"), kind_of)]
    height = 2.05 * len(kinds)
    _, axes = plt.subplots(len(kinds), 1, figsize=(11, height), layout="constrained", squeeze=False)
    for axis, (kind, seeds) in zip(axes.flat, kinds):
        best = max(seeds, key=lambda row: float(row["success_rate"]))
        of = f", the best of {len(seeds)}" if len(seeds) > 1 else ""
        asks = f"success asks for: {KINDS[kind]['condition']}"
        asks += f"; so it is in {float(best['ground_truth_return']):.0f} of 100 steps"
        title = f"“{best['prompt']}” (seed {best['seed']}{of}: success {best['success_rate']})"
        show_frames(axis, output, best["run"], title + "\n" + textwrap.fill(asks, 165))


def plot_hacking(output: Path) -> None:
    """CLIP return and success over training, a panel for each task of the humanoid, all its seeds in it."""
    rows = read(output / "table1.csv")
    kinds = dict.fromkeys(map(kind_of, rows))
    figure, axes = plt.subplots(2, 4, figsize=(13, 5), layout="constrained")
    for axis, kind in zip(axes.flat, kinds):
        twin = axis.twinx()
        for row in rows:
            if kind_of(row) == kind:
                points = curve(output, row["run"])
                axis.plot(points["step"] / 1000, points["clip_return"], "tab:blue", linewidth=0.8)
                twin.plot(points["step"] / 1000, points["success_rate"], "tab:orange", linewidth=0.8)
        twin.set_ylim(-0.05, 1.05)
        axis.set_title(kind.removeprefix("table1/").replace("-", " "), fontsize="small")
        axis.tick_params(axis="y", labelcolor="tab:blue")
        twin.tick_params(axis="y", labelcolor="tab:orange")
    both = "Blue, left: CLIP return of a round. Orange, right: its success rate."
    figure.suptitle(f"{both} A line for each seed. Both should rise together.")
    figure.supxlabel("environment steps, thousands", fontsize="small")


def plot_preferences(output: Path) -> None:
    """Success against the teacher's errors, after training and during it."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True)
    for kind, group in groupby(read(output / "preferences.csv"), kind_of):
        own = list(group)
        error = float(kind.partition("/")[2])
        success = [float(row["success_rate"]) for row in own]
        label = f"{error:.0%} wrong: {sum(rate >= 0.9 for rate in success)} of {len(own)} at 0.9 or above"
        (dots,) = left.plot([error] * len(own), success, "o", alpha=0.5, label=label)
        left.plot(error, np.mean(success), "_", markersize=24, color=dots.get_color())
        show_seeds(right, output, own, "success_rate", label)
    left.set(xlabel="share of the teacher's answers that are wrong", ylabel="success rate")
    left.set_title("after training: each seed, and the mean", fontsize="small")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    left.grid(alpha=0.3)
    right.set_title("in training, 50 questions every 6,400 steps: median and quartiles", fontsize="small")
    figure.suptitle("CartPole from a teacher's preferences", fontsize="medium")


def plot_mend(output: Path) -> None:
    """Success against the number of labels, each seed, and the mean."""
    kinds = [(kind, list(rows)) for kind, rows in groupby(read(output / "mend.csv"), kind_of)]
    _, axis = plt.subplots(figsize=(9, 4), layout="constrained")
    for place, (_, rows) in enumerate(kinds):
        success = [float(row["success_rate"]) for row in rows]
        axis.plot([place] * len(rows), success, "o", alpha=0.5)
        axis.plot(place, np.mean(success), "_k", markersize=24)
    names = [textwrap.fill(KINDS[kind]["called"], 16) for kind, _ in kinds]
    axis.set_xticks(range(len(kinds)), names, fontsize="small")
    axis.set(ylabel="success rate", ylim=(-0.05, 1.05))
    axis.grid(alpha=0.3)


def plot_ladder(output: Path) -> None:
    """Average precision of earlier and later models' rewards, and success with them, against their age."""
    _, axes = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained", sharey=True)
    for axis, script in zip(axes, ("cartpole", "mountaincar")):
        rows = [
            row for row in read(output / "predict.csv") if row["group"] == "ladder" and row["task"] == script
        ]
        ages = [row["name"].partition("-")[2] for row in rows]
        for column in ("average_precision", "success_rate"):
            axis.plot(ages, [float(row[column]) for row in rows], "o-", label=column.replace("_", " "))
        axis.set_title(script)
        axis.set_xlabel("batches that the model was trained with")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small")


def plot_shaping(output: Path) -> None:
    """Success in training with the right sentence and with a wrong one."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True)
    for kind, group in groupby(read(output / "shaping.csv"), kind_of):
        own = list(group)
        reward, _, which = kind.partition("/")[2].partition("-")
        for axis, sentence in zip(axes, ("right", "wrong")):
            if which in ("", sentence):
                show_seeds(axis, output, own, "success_rate", reward)
                axis.set_title(f"“{own[0]['prompt']}”", fontsize="small")
    axes[0].set_ylabel("success rate of a round")
    axes[1].legend(fontsize="small")
    figure.suptitle("The car, paid for the flag, with a sentence: median and quartiles of the seeds")


def plot_shaping_frames(output: Path) -> None:
    """What the first seed of each reward does in the end when the sentence is wrong."""
    rows = {kind_of(row): row for row in reversed(read(output / "shaping.csv"))}
    _, axes = plt.subplots(3, 1, figsize=(11, 4.2), layout="constrained")
    for axis, reward in zip(axes, ("sum", "shaped", "furl")):
        row = rows[f"shaping/{reward}-wrong"]
        show_frames(axis, output, row["run"], f"{reward}, “{row['prompt']}”, seed {row['seed']}")


if __name__ == "__main__":
    commands = about, store, printed, judged, figure, readme
    tyro.extras.subcommand_cli_from_dict({command.__name__: command for command in commands})
