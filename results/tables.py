"""What results/README.md claims: the runs behind it, and how they become tables and pictures.

    python -m results.tables readme  # only the tables of README.md anew, from the CSV files

A run: a line in CLAIM.csv (settings, results, versions), one a round in curves/CLAIM.csv, a strip of frames.
"""

import csv
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from statistics import harmonic_mean, mean

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TINY = hashlib.sha256((ROOT / "tiny_clip" / "open_clip_model.safetensors").read_bytes()).hexdigest()[:8]


def read(path: Path) -> list[dict]:
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines())) if path.is_file() else []


def write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


# ---- The runs, CLAIM/KIND_SEED: script and options; of each kind the name of its row and the paper's success

RUNS, KINDS, CONDITIONS = {}, {}, {}
for row in read(HERE / "runs.csv"):
    KINDS[row["kind"]] = row["called"], row["paper"]
    CONDITIONS[row["kind"]] = row["condition"]  # in words
    for seed in range(1, int(row["seeds"]) + 1):
        RUNS[f"{row['kind']}_{seed}"] = row["script"], f"{row['options']} --seed {seed}".strip()
TASKS = [kind.removeprefix("table1/") for kind in KINDS if kind.startswith("table1/")]
CLAIMS = list(dict.fromkeys(name.partition("/")[0] for name in RUNS))

VIT = "--models ViT-B-32 --rounds 1 --repetitions 2 --clip-batch-size 32"
GROWTH = "--num-envs 8 64 512 4096 --steps-per-round 8192 --rounds 1 --repetitions 1"
PLAIN_VIT = "--scripts sac_clip_humanoid --clip-model ViT-B-32 --rounds 1 --plain-episodes 1 --repetitions 3"
COMMANDS = {  # what is not trained but printed as a table by other programs
    "throughput": "benchmarks.throughput --models tiny",
    "throughput_vit_bf16": f"benchmarks.throughput {VIT} --precisions bf16 --steps-per-round 1600",
    "throughput_vit_fp32": f"benchmarks.throughput {VIT} --precisions fp32 --steps-per-round 800",
    "growth": f"benchmarks.throughput --models tiny {GROWTH}",
    "cost": "benchmarks.cost",
    "compare": "benchmarks.compare",
    "compare_vit": f"benchmarks.compare {PLAIN_VIT}",
}

# ---- Results become files


def describe() -> dict:
    """The last commit of what results depend on, bundled weights and machine of now."""

    def git(*words: str) -> str:
        files = "*.py", "tiny_clip/*.safetensors", ":!tests", ":!results"
        done = subprocess.run(["git", *words, "--", *files], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    commit = git("log", "-1", "--format=%h") + (" and changes" if changed else "")
    return {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "commit": commit, "tiny": TINY}


def about() -> None:
    """Print that, for a run that begins."""
    print(json.dumps(describe()))


def store(claim: str, run_dir: Path, output: Path) -> None:
    """The runs of a claim, all finished -> CLAIM.csv, curves/CLAIM.csv, and frames."""
    import imageio.v3 as iio
    from PIL import Image
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows, rounds = [], []
    tags = ("clip_return", "ground_truth_return", "success_rate")
    for name in [name for name in RUNS if name.startswith(f"{claim}/")]:
        folder = run_dir / name
        script, options = RUNS[name]
        result = json.loads((folder / "result.json").read_text())
        settings = result["settings"]
        curves = defaultdict(dict)  # of each the values by their steps, whichever event file has them
        for path in folder.glob("*tfevents*"):
            events = EventAccumulator(str(path), {"scalars": 0}).Reload()
            for tag in events.Tags()["scalars"]:
                curves[tag] |= {point.step: point.value for point in events.Scalars(tag)}
        for step in sorted(curves["charts/SPS"]):
            values = {tag: f"{curves[f'charts/{tag}'][step]:.4g}" for tag in tags}
            rounds.append({"run": name, "step": step} | values)
        speed = harmonic_mean(curves["charts/SPS"].values())
        row = {"run": name, "seed": settings["seed"]} | {tag: f"{result[tag]:.2f}" for tag in reversed(tags)}
        row |= {"steps_per_second": f"{speed:.0f}", "episodes": settings["episodes"]}
        row |= {"script": script, "options": options, "prompt": "; ".join(settings["prompt"])}
        row |= {key: settings[key] for key in ("clip_model", "precision", "device")}
        row |= json.loads(Path(f"{folder}.begun").read_text())
        row["versions"] = " ".join(f"{package} {number}" for package, number in result["versions"].items())
        rows.append(row)
        frames = output / "frames" / f"{name}.jpg"
        frames.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(folder / "result.png") as sheet:  # of four episodes, one below the other, the first
            strip = sheet.crop((0, 0, sheet.width, sheet.height // min(settings["episodes"], 4)))
            strip = strip.resize((960, 960 * strip.height // strip.width), Image.Resampling.LANCZOS)
            strip.convert("RGB").save(frames, quality=85)
        if name == "table1/kneeling_1":
            film = iio.imread(folder / "result.mp4", plugin="pyav")  # three episodes
            iio.imwrite(output / "kneeling.gif", film[: len(film) // 3 : 2], duration=60, loop=0)
    write(output / "curves" / f"{claim}.csv", rounds)
    write(output / f"{claim}.csv", rows)


def printed(name: str, output: Path) -> None:
    """A program's Markdown table (stdin) -> NAME.csv, with the line above it, the command, and the commit."""
    lines = sys.stdin.read().splitlines()
    first = next(k for k, line in enumerate(lines) if line.startswith("|"))
    table = [line.strip("| ").split("|") for line in lines[first:] if line.startswith("| ")]
    head, *table = [[cell.strip() for cell in cells] for cells in table]
    how = {"what": lines[first - 1] if first else "", "command": COMMANDS[name]} | describe()
    write(output / f"{name}.csv", [dict(zip(head, cells)) | how for cells in table])


def judged(path: Path) -> None:
    """Add commit, weights and machine to a table of reward_check/reward_models.py."""
    write(path, [row | describe() for row in read(path)])


# ---- The tables of README.md, each a function of the CSV files


def markdown(head: str, rows: list[list]) -> str:
    lines = [f"| {head} |", "|---" * (head.count("|") + 1) + "|"]
    return (
        "\n".join(lines + [f"| {' | '.join(map(str, row))} |" for row in rows]) if rows else "*Not run yet.*"
    )


def commits(rows: list[dict]) -> str:
    """Where the code was when these were made, and whether the bundled weights were those of now."""
    earlier = ["" if row["tiny"] == TINY else " (earlier weights)" for row in rows]
    return ", ".join(dict.fromkeys(row["commit"] + mark for row, mark in zip(rows, earlier)))


def curve(output: Path, run: str) -> list[tuple[int, float, float]]:
    """-> steps, CLIP return and success rate of each round."""
    rows = read(output / "curves" / f"{run.partition('/')[0]}.csv")
    return [
        (int(r["step"]), float(r["clip_return"]), float(r["success_rate"])) for r in rows if r["run"] == run
    ]


def runs_table(*beginnings: str, output: Path) -> str:
    """A line for each kind of run, with the results of all its seeds."""
    lines = []
    for beginning in beginnings:
        found = read(output / f"{beginning.partition('/')[0]}.csv")
        found = [row for row in found if row["run"].startswith(beginning)]
        for kind in dict.fromkeys(row["run"].rpartition("_")[0] for row in found):
            rows = [row for row in found if row["run"].rpartition("_")[0] == kind]
            first, late = [], []
            for row in rows:
                points = curve(output, row["run"])
                steps = [step for step, _, success in points if success >= 0.9]
                first.append(f"{steps[0] / 1000:.0f}k" if steps else "never")
                late.append(f"{mean(success for _, _, success in points[len(points) // 2 :]):.2f}")
            columns = "success_rate", "clip_return", "ground_truth_return"
            cells = [*([row[column] for row in rows] for column in columns), first, late]
            lines.append([*KINDS[kind], len(rows), *(", ".join(cell) for cell in cells), commits(rows)])
    head = "what | paper | seeds | success rate | CLIP return | ground-truth return"
    head += " | steps to 90 % success | success in the second half of training | commit"
    return markdown(head, lines)


def interval(row: dict, name: str) -> str:
    value, low, high = (float(row[name + end]) for end in ("", "_low", "_high"))
    return f"{value:.3f} ({low:.3f} to {high:.3f})"


def judged_table(*names: str, output: Path) -> str:
    """A line for each task and model, from the CSV files in reward_check/, beside `output`."""
    lines = []
    for name in names:
        found = read(output.parent / "reward_check" / f"reward_models_{name}.csv")
        for model in dict.fromkeys(row["model"] for row in found):
            rows = [row for row in found if row["model"] == model and row["alpha"] != "contrastive"]
            zero = next(row for row in rows if row["alpha"] == "0")
            best = min(rows, key=lambda row: float(row["epic_balanced"]))
            size = f"{int(zero['image_parameters']) / 1e6:.1f} M"
            line = [name, Path(model).name, size, zero["states"], f"{float(zero['goal_share']):.2f}"]
            line += [interval(zero, "epic"), interval(zero, "epic_balanced")]
            line += [f"{float(best['epic_balanced']):.3f} ({best['alpha']})"]
            lines.append([*line, f"{float(zero['average_precision']):.3f}", commits([zero])])
    head = "task | model | parameters of the image encoder | states | goal states"
    head += " | EPIC distance, α = 0 (95 % interval) | with half goal states | with the best α"
    return markdown(head + " | average precision | commit", lines)


def printed_table(*names: str, output: Path) -> str:
    """What the programs printed, without the columns about how."""
    rows = [row for name in names for row in read(output / f"{name}.csv")]
    if len(names) > 1 and "CLIP model" not in (rows or [{}])[0]:
        rows = [{"CLIP model": row["what"].partition(" in ")[0]} | row for row in rows]
    how = ("what", "command", "machine", "commit", "tiny")
    columns = [column for column in (rows or [{}])[0] if column not in how] + ["commit"]
    return markdown(" | ".join(columns), [[row[column] for column in columns] for row in rows])


TABLES = {
    "cartpole": partial(runs_table, "cartpole/"),
    "mountaincar": partial(runs_table, "mountaincar/"),
    "table1": partial(runs_table, "table1/"),
    "figure3": partial(runs_table, "figure3/", "table1/kneeling"),
    "prompts": partial(runs_table, "table1/kneeling", "prompts/"),
    "paper": partial(runs_table, "paper/"),
    "contrastive": partial(runs_table, "contrastive/"),
    "agreement": partial(judged_table, *TASKS),
    "throughput": partial(printed_table, "throughput", "throughput_vit_bf16", "throughput_vit_fp32"),
    "growth": partial(printed_table, "growth"),
    "cost": partial(printed_table, "cost"),
    "compare": partial(printed_table, "compare", "compare_vit"),
}


def fill_in(readme: str, output: Path = HERE) -> str:
    """README.md with each table between `<!-- results: NAME -->` and `<!-- end -->` made anew."""
    pattern = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return pattern.sub(lambda found: f"{found[1]}{TABLES[found[2]](output=output)}\n{found[3]}", readme)


def readme(path: Path = HERE / "README.md") -> None:
    path.write_text(fill_in(path.read_text(encoding="utf-8")), encoding="utf-8")


# ---- Pictures


def figure(name: str, output: Path) -> None:
    """NAME.png from the CSV files and frames."""
    import matplotlib.pyplot as plt

    plt.rcParams["text.parse_math"] = False  # prompts may hold dollar signs
    {"table1": plot_table1, "hacking": plot_hacking}.get(name, plot_curves)(plt, name, output)
    plt.savefig(output / f"{name}.png", dpi=100)


def plot_curves(plt, claim: str, output: Path) -> None:
    """CLIP return and success of the runs CLAIM/default_*, mean and range, above frames of seed 1."""
    rows = [row for row in read(output / f"{claim}.csv") if "/default_" in row["run"]]
    curves = [curve(output, row["run"]) for row in rows]  # of each seed: steps, returns, successes
    figure = plt.figure(figsize=(11, 4.6), layout="constrained")
    axes = figure.subplot_mosaic([["return", "success"], ["frames"] * 2], height_ratios=[3, 1])
    steps = [step / 1000 for step, *_ in curves[0]]
    for k, name in ((1, "return"), (2, "success")):
        rounds = [[point[k] for point in points] for points in zip(*curves)]
        low, high = list(map(min, rounds)), list(map(max, rounds))
        axes[name].fill_between(steps, low, high, alpha=0.25, label="range")
        axes[name].plot(steps, list(map(mean, rounds)), label=f"mean of {len(rows)} seeds")
        axes[name].set_xlabel("environment steps, thousands")
        axes[name].grid(alpha=0.3)
        axes[name].legend(fontsize="small", loc="lower right")
    axes["return"].set(title="what the agent learns from", ylabel="CLIP return: sum of an episode's rewards")
    axes["success"].set(title="never shown to it", ylabel="success rate of a round (1: every episode)")
    axes["frames"].imshow(plt.imread(output / "frames" / f"{rows[0]['run']}.jpg"))
    title = "an episode after training, seed 1, from its first to its last step"
    axes["frames"].set_title(title, fontsize="small")
    axes["frames"].axis("off")
    figure.suptitle(f"“{rows[0]['prompt']}”", fontsize="medium")


def plot_table1(plt, name: str, output: Path) -> None:
    """For each task an episode of the seed with the highest success."""
    rows = sorted(read(output / "table1.csv"), key=lambda row: -float(row["success_rate"]))
    tasks = [[row for row in rows if row["run"].startswith(f"table1/{task}_")] for task in TASKS]
    _, axes = plt.subplots(len(tasks), 1, figsize=(11, 1.95 * len(tasks)), layout="constrained")
    for axis, (row, *others) in zip(axes, tasks):
        axis.imshow(plt.imread(output / "frames" / f"{row['run']}.jpg"))
        seed = f"seed {row['seed']}" + (f", the best of {1 + len(others)}" if others else "")
        asks = f"success asks for: {CONDITIONS[row['run'].rpartition('_')[0]]}"
        holds = f"so it is in {float(row['ground_truth_return']):.0f} of 100 steps"
        title = f"“{row['prompt']}” ({seed}: success {row['success_rate']})"
        axis.set_title(f"{title}\n{asks}; {holds}", fontsize="small")
        axis.axis("off")


def plot_hacking(plt, name: str, output: Path) -> None:
    """CLIP return and success over training, a panel for each task of the humanoid, all its seeds in it."""
    figure, axes = plt.subplots(2, 4, figsize=(13, 5), layout="constrained")
    for axis, task in zip(axes.flat, TASKS):
        twin = axis.twinx()
        for row in read(output / "table1.csv"):
            if row["run"].startswith(f"table1/{task}_"):
                steps, returns, successes = zip(*curve(output, row["run"]))
                steps = [step / 1000 for step in steps]
                axis.plot(steps, returns, "tab:blue", linewidth=0.8)
                twin.plot(steps, successes, "tab:orange", linewidth=0.8)
        twin.set_ylim(-0.05, 1.05)
        axis.set_title(task.replace("-", " "), fontsize="small")
        axis.tick_params(axis="y", labelcolor="tab:blue")
        twin.tick_params(axis="y", labelcolor="tab:orange")
    both = "Blue, left: CLIP return of a round. Orange, right: its success rate."
    figure.suptitle(f"{both} A line for each seed. Both should rise together.")
    figure.supxlabel("environment steps, thousands", fontsize="small")


if __name__ == "__main__":
    from tyro.extras import subcommand_cli_from_dict

    subcommand_cli_from_dict({f.__name__: f for f in (about, store, printed, judged, figure, readme)})
