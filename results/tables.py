"""What results/README.md claims: the runs behind it, and how they become tables and pictures. `Snakefile` calls this file.

    python results/tables.py readme  # only the tables of README.md anew, from the CSV files

A finished run is a line in CLAIM.csv (settings, seed, figures, versions), a line a round in curves/CLAIM.csv, and a strip of frames.
"""

import csv
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from statistics import harmonic_mean, mean

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

# ---- The runs: CLAIM/KIND_SEED -> script and options; and of each kind what its row is called, and the paper's success rate


def read(path: Path) -> list[dict]:
    if not path.is_file():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


RUNS, KINDS, CONDITIONS = {}, {}, {}
for row in read(HERE / "runs.csv"):
    KINDS[row["kind"]] = row["called"], row["paper"]
    CONDITIONS[row["kind"]] = row["condition"]  # in words
    for seed in range(1, int(row["seeds"]) + 1):
        RUNS[f"{row['kind']}_{seed}"] = row["script"], f"{row['options']} --seed {seed}".strip()
TASKS = [kind.removeprefix("table1/") for kind in KINDS if kind.startswith("table1/")]
CLAIMS = list(dict.fromkeys(name.partition("/")[0] for name in RUNS))

# What is not trained but printed as a table by one of the other programs.
VIT = "--models ViT-B-32 --rounds 1 --repetitions 2 --clip-batch-size 32"
COMMANDS = {
    "throughput": "benchmarks/throughput.py --models tiny",
    "throughput_vit_bf16": f"benchmarks/throughput.py {VIT} --precisions bf16 --steps-per-round 1600",
    "throughput_vit_fp32": f"benchmarks/throughput.py {VIT} --precisions fp32 --steps-per-round 800",
    "growth": "benchmarks/throughput.py --models tiny --num-envs 8 64 512 4096 --steps-per-round 8192 --rounds 1 --repetitions 1",
    "cost": "benchmarks/cost.py",
    "compare": "benchmarks/compare.py",
    "compare_vit": "benchmarks/compare.py --scripts sac_clip_humanoid --clip-model ViT-B-32 --rounds 1 --plain-episodes 1 --repetitions 3",
}

# ---- Files


def write(path: Path, rows: list[dict]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".tmp"), "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    os.replace(path.with_suffix(".tmp"), path)


def weights() -> str:
    """Of the bundled tiny, in short."""
    return hashlib.sha256((ROOT / "tiny_clip" / "open_clip_model.safetensors").read_bytes()).hexdigest()[:8]


def describe() -> dict:
    """The last commit of what results depend on, bundled weights and machine of now."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words, "--", "*.py", "tiny_clip/*.safetensors", ":!tests", ":!results"], cwd=ROOT, capture_output=True, text=True).stdout.strip()  # fmt: skip

    commit = git("log", "-1", "--format=%h") + (" and changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    return {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "commit": commit, "tiny": weights()}


def about() -> None:
    """Print that, for a run that begins."""
    print(json.dumps(describe()))


def store(claim: str, run_dir: Path, output: Path) -> None:
    """The finished runs of a claim -> CLAIM.csv, curves/CLAIM.csv, and frames."""
    from PIL import Image
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows, rounds, tags = [], [], ("clip_return", "ground_truth_return", "success_rate")
    for name, (script, options) in RUNS.items():
        folder = run_dir / name
        if not (name.startswith(f"{claim}/") and Path(f"{folder}.finished").exists()):
            continue
        result, begun = (json.loads(Path(path).read_text()) for path in (folder / "result.json", f"{folder}.begun"))
        settings, events = result["settings"], EventAccumulator(str(folder), {"scalars": 0}).Reload()
        for points in zip(*(events.Scalars(f"charts/{tag}") for tag in tags)):
            rounds.append({"run": name, "step": points[0].step} | {tag: f"{at.value:.4g}" for tag, at in zip(tags, points)})
        speed = harmonic_mean([point.value for point in events.Scalars("charts/SPS")])
        row = {"run": name, "seed": settings["seed"]} | {tag: f"{result[tag]:.2f}" for tag in reversed(tags)}
        row |= {"steps_per_second": f"{speed:.0f}", "episodes": settings["episodes"], "script": script, "options": options}
        row |= {"prompt": "; ".join(settings["prompt"]), "clip_model": settings["clip_model"]}
        row |= {key: settings[key] for key in ("precision", "device")} | begun
        rows.append(row | {"versions": " ".join(f"{package} {number}" for package, number in result["versions"].items())})
        frames = output / "frames" / name
        frames.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(folder / "result.png") as sheet:  # of four episodes, each eight frames and their captions, the first
            strip = sheet.crop((0, 0, sheet.width, sheet.height // min(settings["episodes"], 4)))
            strip = strip.resize((960, 960 * strip.height // strip.width), Image.Resampling.LANCZOS)
            strip.convert("RGB").save(f"{frames}.jpg", quality=85)
        if name == "table1/kneeling_1":
            film(folder / "result.mp4", output / "kneeling.gif")
    write(output / "curves" / f"{claim}.csv", rounds)
    write(output / f"{claim}.csv", rows)


def film(video: Path, path: Path) -> None:
    """The first of a video's episodes, every second frame, as a GIF."""
    import imageio.v3 as iio

    frames = iio.imread(video, plugin="pyav")
    iio.imwrite(path, frames[: len(frames) // 3 : 2], extension=".gif", duration=60, loop=0)


def printed(name: str, output: Path) -> None:
    """A program's Markdown table (stdin) -> NAME.csv, with the line above it, the command, and the commit."""
    lines = sys.stdin.read().splitlines()
    first = next(k for k, line in enumerate(lines) if line.startswith("|"))
    table = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines[first:] if line.startswith("| ")]
    how = {"what": lines[first - 1] if first else "", "command": COMMANDS[name]} | describe()
    write(output / f"{name}.csv", [dict(zip(table[0], cells)) | how for cells in table[1:]])


def judged(path: Path) -> None:
    """Add commit, weights and machine to a table of figures/reward_models.py."""
    write(path, [row | describe() for row in read(path)])


# ---- The tables of README.md, each a function of the CSV files


def markdown(head: str, rows: list[list]) -> str:
    lines = [f"| {head} |", "|---" * (head.count("|") + 1) + "|"]
    return "\n".join(lines + [f"| {' | '.join(map(str, row))} |" for row in rows]) if rows else "*Not run yet.*"


def commits(rows: list[dict]) -> str:
    """Where the code was when these were made, and whether the bundled weights were those of now."""
    return ", ".join(dict.fromkeys(r["commit"] + ("" if r["tiny"] == weights() else " (earlier weights)") for r in rows))


def curve(output: Path, run: str) -> list[tuple[int, float, float]]:
    """-> steps, CLIP return and success rate of each round."""
    rows = read(output / "curves" / f"{run.partition('/')[0]}.csv")
    return [(int(r["step"]), float(r["clip_return"]), float(r["success_rate"])) for r in rows if r["run"] == run]


def runs_table(*beginnings: str) -> Callable[[Path], str]:
    """A line for each kind of run, with the figures of all its seeds."""

    def table(output: Path) -> str:
        lines = []
        for beginning in beginnings:
            found = [row for row in read(output / f"{beginning.partition('/')[0]}.csv") if row["run"].startswith(beginning)]
            for kind, rows in groupby(found, lambda row: row["run"].rpartition("_")[0]):
                rows = list(rows)
                success = [[success for _, _, success in curve(output, row["run"])] for row in rows]
                first = [next((step for step, _, now in curve(output, row["run"]) if now >= 0.9), None) for row in rows]
                cells = [[row[column] for row in rows] for column in ("success_rate", "clip_return", "ground_truth_return")]
                cells += [[f"{step / 1000:.0f}k" if step else "never" for step in first]]
                cells += [[f"{mean(now[len(now) // 2 :]):.2f}" for now in success]]
                lines.append([*KINDS[kind], len(rows), *(", ".join(cell) for cell in cells), commits(rows)])
        head = "what | paper | seeds | success rate | CLIP return | ground-truth return | steps to 90 % success"
        return markdown(head + " | success in the second half of training | commit", lines)

    return table


def best_alpha(rows: list[dict]) -> dict:
    return min((row for row in rows if row["alpha"] != "contrastive"), key=lambda row: float(row["epic_balanced"]))


def interval(row: dict, name: str) -> str:
    value, low, high = (float(row[name + end]) for end in ("", "_low", "_high"))
    return f"{value:.3f} ({low:.3f} to {high:.3f})"


def judged_table(*names: str) -> Callable[[Path], str]:
    """A line for each task and model."""

    def table(output: Path) -> str:
        lines = []
        for name in names:
            found = read(output / f"reward_models_{name}.csv")
            for model, rows in groupby(sorted(found, key=lambda row: int(row["parameters"])), lambda row: row["model"]):
                rows = list(rows)
                zero, best = next(row for row in rows if row["alpha"] == "0"), best_alpha(rows)
                line = [
                    name,
                    Path(model).name,
                    f"{int(zero['image_parameters']) / 1e6:.1f} M",
                    zero["states"],
                    f"{float(zero['goal_share']):.2f}",
                ]
                line += [
                    interval(zero, "epic"),
                    interval(zero, "epic_balanced"),
                    f"{float(best['epic_balanced']):.3f} ({best['alpha']})",
                ]
                lines.append([*line, f"{float(zero['average_precision']):.3f}", commits([zero])])
        head = "task | model | parameters of the image encoder | states | goal states | EPIC distance, α = 0 (95 % interval)"
        return markdown(head + " | with half goal states | with the best α | average precision | commit", lines)

    return table


def printed_table(*names: str) -> Callable[[Path], str]:
    """What the programs printed, without the columns about how."""

    def table(output: Path) -> str:
        rows = [row for name in names for row in read(output / f"{name}.csv")]
        keep = [column for column in (rows or [{}])[0] if column not in ("what", "command", "machine", "commit", "tiny")]
        if len(names) > 1 and "CLIP model" not in keep:
            rows = [{"CLIP model": row["what"].partition(" in ")[0]} | row for row in rows]
            keep = ["CLIP model", *keep]
        return markdown(" | ".join([*keep, "commit"]), [[*(row[column] for column in keep), row["commit"]] for row in rows])

    return table


TABLES = {
    "cartpole": runs_table("cartpole/"),
    "mountaincar": runs_table("mountaincar/"),
    "table1": runs_table("table1/"),
    "figure3": runs_table("figure3/", "table1/kneeling"),
    "prompts": runs_table("table1/kneeling", "prompts/"),
    "paper": runs_table("paper/"),
    "contrastive": runs_table("contrastive/"),
    "agreement": judged_table(*TASKS),
    "throughput": printed_table("throughput", "throughput_vit_bf16", "throughput_vit_fp32"),
    "growth": printed_table("growth"),
    "cost": printed_table("cost"),
    "compare": printed_table("compare", "compare_vit"),
}


def fill_in(readme: str, output: Path = HERE) -> str:
    """README.md with each table between `<!-- results: NAME -->` and `<!-- end -->` made anew."""
    pattern = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return pattern.sub(lambda found: f"{found[1]}{TABLES[found[2]](output)}\n{found[3]}", readme)


def readme(path: Path = HERE / "README.md") -> None:
    text = fill_in(path.read_text())
    path.with_suffix(".tmp").write_text(text)
    os.replace(path.with_suffix(".tmp"), path)


# ---- Pictures


def figure(name: str, output: Path) -> None:
    """NAME.png from the CSV files and frames."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    {"table1": draw_table1, "hacking": draw_hacking}.get(name, draw_curves)(plt, name, output)
    plt.savefig(output / f"{name}.png", dpi=100)


def draw_curves(plt, claim: str, output: Path) -> None:
    """CLIP return and success over the steps of the runs CLAIM/default_*, mean and range, above frames of the best policy of seed 1."""
    rows = [row for row in read(output / f"{claim}.csv") if "/default_" in row["run"]]
    curves = [curve(output, row["run"]) for row in rows]  # of each seed: steps, returns, successes, round by round
    figure = plt.figure(figsize=(11, 4.6), layout="constrained")
    axes = figure.subplot_mosaic([["return", "success"], ["frames"] * 2], height_ratios=[3, 1])
    for k, name in ((1, "return"), (2, "success")):
        rounds = [[point[k] for point in points] for points in zip(*curves)]
        steps = [step / 1000 for step, *_ in curves[0]]
        axes[name].fill_between(steps, [min(r) for r in rounds], [max(r) for r in rounds], alpha=0.25, label="range")
        axes[name].plot(steps, [mean(r) for r in rounds], label=f"mean of {len(rows)} seeds")
        axes[name].set_xlabel("environment steps, thousands")
        axes[name].grid(alpha=0.3)
        axes[name].legend(fontsize="small", loc="lower right")
    axes["return"].set(title="what the agent learns from", ylabel="CLIP return: sum of an episode's rewards")
    axes["success"].set(title="never shown to it", ylabel="success rate of a round (1: every episode)")
    axes["frames"].imshow(plt.imread(output / "frames" / f"{rows[0]['run']}.jpg"))
    axes["frames"].set_title("an episode after training, seed 1, from its first to its last step", fontsize="small")
    axes["frames"].axis("off")
    figure.suptitle(f"“{rows[0]['prompt']}”", fontsize="medium")


def draw_table1(plt, name: str, output: Path) -> None:
    """For each task an episode of the seed with the highest success."""
    rows = sorted(read(output / "table1.csv"), key=lambda row: -float(row["success_rate"]))
    tasks = [[row for row in rows if row["run"].startswith(f"table1/{task}_")] for task in TASKS]
    tasks = [seeds for seeds in tasks if seeds]
    _, axes = plt.subplots(len(tasks), 1, figsize=(11, 1.95 * len(tasks)), layout="constrained", squeeze=False)
    for axis, (row, *others) in zip(axes[:, 0], tasks):
        axis.imshow(plt.imread(output / "frames" / f"{row['run']}.jpg"))
        seeds = f"seed {row['seed']}, the best of {1 + len(others)}" if others else f"seed {row['seed']}"
        asks = f"success asks for: {CONDITIONS[row['run'].rpartition('_')[0]]}"
        holds = f"so it is in {float(row['ground_truth_return']):.0f} of 100 steps"
        title = f"“{row['prompt']}” ({seeds}: success {row['success_rate']})"
        axis.set_title(f"{title}\n{asks}; {holds}", fontsize="small")
        axis.axis("off")


def draw_hacking(plt, name: str, output: Path) -> None:
    """CLIP return and success over training, a panel for each task of the humanoid, all its seeds in it."""
    figure, axes = plt.subplots(2, 4, figsize=(13, 5), layout="constrained")
    for axis, task in zip(axes.flat, TASKS):
        twin = axis.twinx()
        for row in read(output / "table1.csv"):
            if row["run"].startswith(f"table1/{task}_"):
                steps, returns, successes = zip(*curve(output, row["run"]))
                axis.plot([step / 1000 for step in steps], returns, "tab:blue", linewidth=0.8)
                twin.plot([step / 1000 for step in steps], successes, "tab:orange", linewidth=0.8)
        twin.set_ylim(-0.05, 1.05)
        axis.set_title(task.replace("-", " "), fontsize="small")
        axis.tick_params(axis="y", labelcolor="tab:blue")
        twin.tick_params(axis="y", labelcolor="tab:orange")
    figure.suptitle(
        "Blue, left: CLIP return of a round. Orange, right: its success rate. A line for each seed. Both should rise together."
    )
    figure.supxlabel("environment steps, thousands", fontsize="small")


if __name__ == "__main__":
    import tyro

    tyro.extras.subcommand_cli_from_dict({f.__name__: f for f in (about, store, printed, judged, figure, readme)})
