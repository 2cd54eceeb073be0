"""Makes what the README claims: trains what is missing and writes tables (CSV) and pictures into this folder and the README.

python results/make.py                         # everything: days on two CPU cores
python results/make.py --only table1           # one claim
python results/make.py --only table1/kneeling  # those of its runs whose names begin so
python results/make.py --only none             # nothing new: pictures and the README's tables from the CSV files

A run that was interrupted goes on; one that is finished (in `--run-dir`) is not made again. Ctrl-C is the run's to answer: it ends
its round and saves it (a second Ctrl-C does not wait), and then this program ends. A finished run is a line in CLAIM.csv
(settings, seed, figures, versions), a line a round in curves.csv, and a strip of frames.
"""

import csv
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import harmonic_mean, mean

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import tyro
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))
import sac_clip_humanoid  # noqa: E402

# ---- What is claimed

CARTPOLE, CAR, HUMANOID = "dqn_clip_cartpole", "sac_clip_mountaincar", "sac_clip_humanoid"
TASKS = {  # success in the paper's Table 1
    "kneeling": "100 %",
    "lotus-position": "100 %",
    "standing-up": "100 %",
    "arms-raised": "100 %",
    "doing-splits": "100 %",
    "hands-on-hips": "64 %",
    "standing-on-one-leg": "0 %",
    "arms-crossed": "0 %",
}
REWORDINGS = (  # no caption of tiny_clip is one of these
    "a kneeling humanoid robot",
    "a humanoid robot has dropped to its knees",
    "the robot has knelt down",
    "a robot resting on its two knees",
    "a humanoid in a kneeling pose",
)
LOOKS = {("original", "original"): "36 %", ("realistic", "original"): "91 %", ("realistic", "fixed"): "100 %"}  # Figure 3
LADDER = (8, 24, 32)  # widths of tiny_clip's image encoder beside the bundled 16, trained in the same way on the same batches

# CLAIM/name_SEED: script and options.
RUNS = {f"cartpole/default_{seed}": (CARTPOLE, f"--seed {seed}") for seed in (1, 2, 3, 4, 5)}
PAPER_DQN = "--learning-rate 2.3e-3 --batch-size 32 --target-network-frequency 100"
RUNS |= {f"cartpole/paper_{seed}": (CARTPOLE, f"{PAPER_DQN} --seed {seed}") for seed in (1, 2, 3)}
RUNS |= {f"mountaincar/default_{seed}": (CAR, f"--seed {seed}") for seed in (1, 2, 3, 4, 5)}
RUNS |= {
    f"mountaincar/{textures}-{alpha}_{seed}": (CAR, f"--textures {textures} --goal-baseline-alpha {alpha} --seed {seed}")
    for textures, alpha in (("original", 0), ("original", 0.5), ("original", 1), ("realistic", 0), ("realistic", 1))
    for seed in (1, 2, 3)
}
RUNS |= {f"mountaincar/truth_{seed}": (CAR, f"--reward ground-truth --seed {seed}") for seed in (1, 2, 3)}
RUNS |= {f"table1/{task}_{seed}": (HUMANOID, f"--task {task} --seed {seed}") for seed in (1, 2, 3) for task in TASKS}
RUNS |= {
    f"figure3/{textures}-{camera}_1": (HUMANOID, f"--task kneeling --textures {textures} --camera {camera} --seed 1")
    for textures, camera in (("original", "original"), ("original", "fixed"), ("realistic", "original"))
}
RUNS |= {
    f"prompts/rewording-{k}_1": (HUMANOID, f"--task kneeling --seed 1 --prompt '{prompt}'")
    for k, prompt in enumerate(REWORDINGS, 1)
}
RUNS |= {f"paper/kneeling_{seed}": (HUMANOID, f"--paper --total-timesteps 256000 --seed {seed}") for seed in (1, 2, 3)}
RUNS |= {  # what failed within the default steps
    f"longer/{task}_2": (HUMANOID, f"--task {task} --total-timesteps 512000 --seed 2")
    for task in ("arms-raised", "doing-splits")
}
NEGATIVE_POLES = ("pole leaning to the side on top of the cart", "pole hanging down from the cart")
NEGATIVE_POSES = [prompt for task, (prompt, _) in sac_clip_humanoid.TASKS.items() if task != "kneeling"]
RUNS |= {
    "contrastive/cartpole_1": (CARTPOLE, f"--seed 1 --negative-prompt {shlex.join(NEGATIVE_POLES)}"),
    "contrastive/kneeling_1": (HUMANOID, f"--task kneeling --seed 1 --negative-prompt {shlex.join(NEGATIVE_POSES)}"),
}
RUNS |= {
    f"ladder/width-{width}_{seed}": (
        HUMANOID,
        f"--task kneeling --seed {seed} --clip-model local-dir:{{ladder}}/width_{width}",
    )
    for width in (min(LADDER), max(LADDER))
    for seed in (1, 2)
}

# What is not trained but printed as a table by one of the other programs.
VIT = "--models ViT-B-32 --rounds 1 --repetitions 2 --clip-batch-size 32"
COMMANDS = {
    "throughput": "benchmarks/throughput.py --models tiny",
    "throughput_vit_bf16": f"benchmarks/throughput.py {VIT} --precisions bf16 --steps-per-round 1600",
    "throughput_vit_fp32": f"benchmarks/throughput.py {VIT} --precisions fp32 --steps-per-round 800",
    "cost": "benchmarks/cost.py",
    "growth": "benchmarks/throughput.py --models tiny --num-envs 8 64 512 4096 --steps-per-round 8192 --rounds 1 --repetitions 1",
    "compare": "benchmarks/compare.py",
    "compare_vit": "benchmarks/compare.py --scripts sac_clip_humanoid --clip-model ViT-B-32 --rounds 1 --plain-episodes 1 --repetitions 3",
}
# Reward models judged on the states of these runs: figures/reward_models.py's own CSV file and sheet, reward_models_TASK.
SHEETS = {f"reward_models_{task}": [f"table1/{task}_{seed}" for seed in (1, 2, 3)] for task in TASKS}


@dataclass
class Args:
    """Train what is missing, one run after the other, and write results/ and the README's tables."""

    only: tuple[str, ...] = ()
    """claims, or beginnings of the names of runs (default: all)"""
    missing: bool = False
    """only what has no line in the CSV files yet (default: also what has one, but no run folder here)"""
    clip_model: str = "tiny"
    """train with this model instead; what comes out goes into a folder of its own, not into the README"""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """cpu or cuda"""
    run_dir: Path = ROOT / "runs" / "results"
    """where the runs are trained"""
    output: Path = HERE
    """folder of the CSV files and pictures"""


# ---- Files


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


def replace_rows(path: Path, new: list[dict]) -> None:
    """Put the lines of one run in the place of those that it had."""
    order = {name: k for k, name in enumerate(RUNS)}
    rows = [old for old in read(path) if old["run"] != new[0]["run"] and old["run"] in order] + new
    write(path, sorted(rows, key=lambda row: order[row["run"]]))


def weights() -> str:
    """Of the bundled tiny, in short."""
    return hashlib.sha256((ROOT / "tiny_clip" / "open_clip_model.safetensors").read_bytes()).hexdigest()[:8]


def about() -> dict:
    """Code, bundled weights and machine of now."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "*.py", "tiny_clip")
    commit = git("rev-parse", "--short", "HEAD") + (" and changes" if changed else "")
    return {"machine": f"{platform.machine()}, {torch.get_num_threads()} cores", "commit": commit, "tiny": weights()}


def call(command: list, **options) -> tuple[int, str | None]:
    """Run a Python program -> its exit code and, with stdout=PIPE, what it printed.

    Ctrl-C and SIGTERM are passed on, and end this program when that one has ended as it sees fit: a training saves its round.
    """
    child, received = subprocess.Popen([sys.executable, *command], start_new_session=True, text=True, **options), []

    def pass_on(number: int, _) -> None:
        received.append(number)
        child.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        printed = child.communicate()[0]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        sys.exit(128 + received[0])
    return child.returncode, printed


def started_file(run_dir: Path) -> Path:
    """Beside a run's folder: by which options and code it was begun."""
    return Path(f"{run_dir}.json")  # with_suffix would take the .5_1 of original-0.5_1 for a suffix


def store(name: str, run_dir: Path, output: Path) -> dict:
    """A finished run -> its line in CLAIM.csv; writes that, its curves and its strip of frames."""
    script, options = RUNS[name]
    result, started = (json.loads(path.read_text()) for path in (run_dir / "result.json", started_file(run_dir)))
    settings = result["settings"]
    events = EventAccumulator(str(run_dir), {"scalars": 0}).Reload()
    tags = ("clip_return", "ground_truth_return", "success_rate")
    rounds = [
        {"run": name, "step": points[0].step} | {tag: f"{point.value:.4g}" for tag, point in zip(tags, points)}
        for points in zip(*(events.Scalars(f"charts/{tag}") for tag in tags))
    ]
    row = {"run": name, "seed": settings["seed"]} | {tag: f"{result[tag]:.2f}" for tag in reversed(tags)}
    speed = harmonic_mean([point.value for point in events.Scalars("charts/SPS")])
    row |= {"steps_per_second": f"{speed:.0f}", "episodes": settings["episodes"]}
    row |= {"script": script, "options": options, "prompt": "; ".join(settings["prompt"])}
    row |= {
        "clip_model": settings["clip_model"].rpartition("/")[2]
        if "local-dir" in settings["clip_model"]
        else settings["clip_model"]
    }
    row |= {"precision": settings["precision"], "device": settings["device"]} | started["about"]
    row |= {"versions": " ".join(f"{package} {number}" for package, number in result["versions"].items())}
    with Image.open(
        run_dir / "result.png"
    ) as sheet:  # eight frames of an episode a row, each with a caption below; of them the first
        strip = sheet.crop((0, 0, sheet.width, sheet.height // min(settings["episodes"], 4)))
        (output / "frames" / name).parent.mkdir(parents=True, exist_ok=True)
        strip.resize((960, 960 * strip.height // strip.width), Image.Resampling.LANCZOS).convert("RGB").save(
            output / "frames" / f"{name}.jpg", quality=85
        )
    if name.startswith("table1/") and settings["seed"] == 1:
        shutil.copy(run_dir / "result.mp4", output / "frames" / f"{name}.mp4")
    replace_rows(output / "curves.csv", rounds)
    replace_rows(output / f"{name.partition('/')[0]}.csv", [row])  # the last: whoever has a line has everything
    return row


def store_table(name: str, text: str, output: Path) -> None:
    """A program's Markdown table -> NAME.csv, with the line above it, the command, and the commit."""
    lines = text.splitlines()
    first = next(k for k, line in enumerate(lines) if line.startswith("|"))
    table = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines[first:] if line.startswith("| ")]
    how = {"what": lines[first - 1] if first else "", "command": COMMANDS[name]} | about()
    write(output / f"{name}.csv", [dict(zip(table[0], cells)) | how for cells in table[1:]])


# ---- The README's tables, each a function of the CSV files


def markdown(head: str, rows: list[list]) -> str:
    if not rows:
        return "*Not run yet.*"
    lines = [f"| {head} |", "|---" * (head.count("|") + 1) + "|"]
    return "\n".join(lines + [f"| {' | '.join(map(str, row))} |" for row in rows])


def curve(output: Path, run: str) -> list[tuple[int, float, float]]:
    """-> steps, CLIP return and success rate of each round."""
    return [
        (int(r["step"]), float(r["clip_return"]), float(r["success_rate"]))
        for r in read(output / "curves.csv")
        if r["run"] == run
    ]


def late_success(output: Path, run: str) -> str:
    """Mean over the second half of the rounds, played with exploration."""
    successes = [success for _, _, success in curve(output, run)]
    return f"{mean(successes[len(successes) // 2 :]):.2f}"


def learned_at(output: Path, run: str) -> str:
    return next((f"{step / 1000:.0f}k" for step, _, success in curve(output, run) if success >= 0.9), "never")


def some(output: Path, beginning: str) -> list[dict]:
    """The lines of the runs whose names begin so."""
    return [row for row in read(output / f"{beginning.partition('/')[0]}.csv") if row["run"].startswith(beginning)]


def commits(rows: list[dict]) -> str:
    """Where the code was when these were made, and whether the bundled weights were those of now."""
    return ", ".join(dict.fromkeys(r["commit"] + ("" if r["tiny"] == weights() else " (earlier weights)") for r in rows))


def seeds_table(beginning: str) -> Callable[[Path], str]:
    def table(output: Path) -> str:
        head = "seed | success rate | CLIP return | ground-truth return | success in the second half of training | steps/s"
        columns = ("success_rate", "clip_return", "ground_truth_return")
        rows = [
            [
                row["seed"],
                *(row[c] for c in columns),
                late_success(output, row["run"]),
                row["steps_per_second"],
                commits([row]),
            ]
            for row in some(output, beginning)
        ]
        return markdown(head + " | commit", rows)

    return table


def table1(output: Path) -> str:
    rows = []
    for task, paper in TASKS.items():
        runs = some(output, f"table1/{task}_")
        late = [late_success(output, row["run"]) for row in runs]
        columns = ([row[c] for row in runs] for c in ("seed", "success_rate", "clip_return", "ground_truth_return"))
        rows.append([task, paper, *(", ".join(c) for c in (*columns, late)), commits(runs)])
    head = "task | paper, ViT-bigG-14 | seeds | success rate, `tiny` | CLIP return | steps of 100 in which the condition holds"
    return markdown(head + " | success in the second half of training | commit", rows)


def alpha_table(output: Path) -> str:
    cells = {}
    for row in some(output, "mountaincar/"):
        found = re.search(r"--textures (\w+) --goal-baseline-alpha ([\d.]+)", row["options"])
        cell = found.groups() if found else ("realistic", "0.5") if "/default_" in row["run"] else None
        if cell and int(row["seed"]) <= 3:
            cells.setdefault((cell[0], float(cell[1])), []).append(row)
    rows = [
        [
            *(textures, f"{alpha:g}", ", ".join(row["seed"] for row in runs)),
            ", ".join(row["success_rate"] for row in runs),
            ", ".join(learned_at(output, row["run"]) for row in runs),
            ", ".join(late_success(output, row["run"]) for row in runs),
            commits(runs),
        ]
        for (textures, alpha), runs in sorted(cells.items())
    ]
    head = "textures | α | seeds | success rate | steps to 90 % success | success in the second half of training"
    return markdown(head + " | commit", rows)


def figure3(output: Path) -> str:
    rows = []
    for textures in ("original", "realistic"):
        for camera in ("original", "fixed"):
            default = (textures, camera) == ("realistic", "fixed")
            for row in some(output, "table1/kneeling_1" if default else f"figure3/{textures}-{camera}_"):
                columns = (row["seed"], row["success_rate"], row["clip_return"], late_success(output, row["run"]))
                rows.append([textures, camera, LOOKS.get((textures, camera), "not given"), *columns, commits([row])])
    head = "textures | camera | paper | seed | success rate, `tiny` | CLIP return | success in the second half of training | commit"
    return markdown(head, rows)


def prompts_table(output: Path) -> str:
    runs = [*some(output, "table1/kneeling_1"), *some(output, "prompts/")]
    columns = ("seed", "success_rate", "clip_return")
    rows = [[f"“{r['prompt']}”", *(r[c] for c in columns), late_success(output, r["run"]), commits([r])] for r in runs]
    return markdown("prompt | seed | success rate | CLIP return | success in the second half of training | commit", rows)


def paper_table(output: Path) -> str:
    rows = []
    for name, beginning in (("defaults", "table1/kneeling_"), ("`--paper`", "paper/kneeling_")):
        runs = some(output, beginning)
        early = [[point for point in curve(output, row["run"]) if point[0] <= 160_000][-5:] for row in runs]
        cells = [", ".join(f"{mean(point[k] for point in points):.2f}" for points in early) for k in (1, 2)]
        rows.append(
            [name, ", ".join(r["seed"] for r in runs), *cells, ", ".join(r["success_rate"] for r in runs), commits(runs)]
        )
    head = "settings | seeds | CLIP return before 160,000 steps | success rate before 160,000 steps | success rate of the best policy"
    return markdown(head + " | commit", rows)


def rows_table(beginning: str) -> Callable[[Path], str]:
    """One line a run, with its options."""

    def table(output: Path) -> str:
        columns = ("seed", "success_rate", "clip_return", "ground_truth_return")
        rows = [
            [
                f"`{r['script']}.py {r['options']}`",
                *(r[c] for c in columns),
                late_success(output, r["run"]),
                commits([r]),
            ]
            for r in some(output, beginning)
        ]
        head = (
            "run | seed | success rate | CLIP return | ground-truth return | success in the second half of training | commit"
        )
        return markdown(head, rows)

    return table


def hacked_table(output: Path) -> str:
    """Runs of older commits with older weights, kept because of what they did; hacked.jpg shows them."""
    rows = [
        [f"`{r['script']}.py {r['options']}`", *(r[c] for c in ("commit", "success_rate", "clip_return"))]
        for r in some(output, "hacked/")
    ]
    return markdown("run | commit | success rate | CLIP return", rows)


def best_alpha(rows: list[dict]) -> dict:
    return min((row for row in rows if row["alpha"] != "contrastive"), key=lambda row: float(row["epic_balanced"]))


def interval(row: dict, name: str) -> str:
    value, low, high = (float(row[name + end]) for end in ("", "_low", "_high"))
    return f"{value:.3f} ({low:.3f} to {high:.3f})"


def agreement_table(output: Path) -> str:
    """The tasks, with the bundled model."""
    rows = []
    for task in TASKS:
        found = [row for row in read(output / f"reward_models_{task}.csv") if row["model"] == "tiny"]
        if found:
            zero, best = next(row for row in found if row["alpha"] == "0"), best_alpha(found)
            rows.append(
                [
                    task,
                    zero["states"],
                    f"{float(zero['goal_share']):.2f}",
                    interval(zero, "epic"),
                    interval(zero, "epic_balanced"),
                ]
            )
            rows[-1] += [f"{float(best['epic_balanced']):.3f} ({best['alpha']})", f"{float(zero['average_precision']):.3f}"]
            rows[-1] += [commits([zero])]
    head = "task | states | goal states | EPIC distance, α = 0 (95 % interval) | with half goal states | with the best α"
    return markdown(head + " | average precision | commit", rows)


def figure4(output: Path) -> str:
    """Kneeling, models of several sizes."""
    found, rows = read(output / "reward_models_kneeling.csv"), []
    sizes = {row["model"]: int(row["parameters"]) for row in found}
    for model in sorted(sizes, key=sizes.get):
        own = [row for row in found if row["model"] == model]
        zero, best = next(row for row in own if row["alpha"] == "0"), best_alpha(own)
        name = "width 16 (`tiny`, bundled)" if model == "tiny" else Path(model).name.replace("_", " ")
        size = [f"{int(zero[kind]) / 1e6:.1f} M" for kind in ("parameters", "image_parameters")]
        trained = some(output, f"ladder/{name.replace(' ', '-')}_") if model != "tiny" else some(output, "table1/kneeling_")
        rows.append([name, *size, f"{float(zero['goal_share']):.2f}", interval(zero, "epic"), interval(zero, "epic_balanced")])
        rows[-1] += [f"{float(best['epic_balanced']):.3f} ({best['alpha']})", f"{float(zero['average_precision']):.3f}"]
        rows[-1] += [", ".join(row["success_rate"] for row in trained) or "not trained", commits([zero, *trained])]
    head = "model | parameters | of the image encoder | goal states | EPIC distance, α = 0 (95 % interval) | with half goal states"
    return markdown(head + " | with the best α | average precision | success rate after training, a seed each | commit", rows)


def printed_table(*names: str) -> Callable[[Path], str]:
    """What the programs printed, without the columns about how."""

    def table(output: Path) -> str:
        rows = [row for name in names for row in read(output / f"{name}.csv")]
        keep = [column for column in (rows or [{}])[0] if column not in ("what", "command", "machine", "commit", "tiny")]
        if len(names) > 1 and "CLIP model" not in keep:
            rows = [{"CLIP model": row["what"].partition(" in ")[0]} | row for row in rows]
            keep = ["CLIP model", *keep]
        return markdown(" | ".join(keep), [[row[column] for column in keep] for row in rows])

    return table


TABLES = {
    "cartpole": seeds_table("cartpole/default_"),
    "cartpole_paper": seeds_table("cartpole/paper_"),
    "mountaincar": seeds_table("mountaincar/default_"),
    "truth": seeds_table("mountaincar/truth_"),
    "alpha": alpha_table,
    "table1": table1,
    "hacked": hacked_table,
    "figure3": figure3,
    "prompts": prompts_table,
    "paper": paper_table,
    "longer": rows_table("longer/"),
    "contrastive": rows_table("contrastive/"),
    "agreement": agreement_table,
    "figure4": figure4,
    "throughput": printed_table("throughput", "throughput_vit_bf16", "throughput_vit_fp32"),
    "cost": printed_table("cost"),
    "growth": printed_table("growth"),
    "compare": printed_table("compare", "compare_vit"),
}


RUNS_OF = {  # how the names of a table's own runs begin
    "cartpole": ("cartpole/default_",),
    "cartpole_paper": ("cartpole/paper_",),
    "mountaincar": ("mountaincar/default_",),
    "truth": ("mountaincar/truth_",),
    "alpha": ("mountaincar/original-", "mountaincar/realistic-"),
    "figure4": ("ladder/",),
} | {name: (f"{name}/",) for name in ("table1", "figure3", "prompts", "paper", "longer", "contrastive")}


def still_to_be_made(table: str, output: Path) -> str:
    beginnings = RUNS_OF.get(table, ())
    runs = {run for run in RUNS if run.startswith(beginnings)} if beginnings else set()
    missing = runs - {row["run"] for beginning in beginnings for row in some(output, beginning)}
    return f"\n\n*Runs still to be made: {len(missing)} of {len(runs)}.*" if missing else ""


def fill_in(readme: str, output: Path = HERE) -> str:
    """The README with each table between `<!-- results: NAME -->` and `<!-- end -->` made anew."""
    pattern = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

    def table(found: re.Match) -> str:
        return f"{found[1]}{TABLES[found[2]](output)}{still_to_be_made(found[2], output)}\n{found[3]}"

    return pattern.sub(table, readme)


# ---- Pictures


def draw_curves(output: Path, claim: str, title: str, start: Image.Image | None = None) -> None:
    """CLAIM.png: CLIP return and success over the steps of the runs CLAIM/default_*, above frames of the best policy."""
    runs = some(output, f"{claim}/default_")
    if not runs:
        return
    figure = plt.figure(figsize=(11, 4.6), layout="constrained")
    axes = figure.subplot_mosaic([["return", "success"], ["frames"] * 2], height_ratios=[3, 1])
    for row in runs:
        steps, returns, successes = zip(*curve(output, row["run"]))
        axes["return"].plot(steps, returns, linewidth=0.8, alpha=0.8)
        axes["success"].plot(steps, successes, linewidth=0.8, alpha=0.8, label=f"seed {row['seed']}")
    axes["return"].set(title="CLIP return (what the agent learns from)", xlabel="environment steps")
    axes["success"].set(title="success rate (never shown to it)", xlabel="environment steps")
    axes["success"].legend(fontsize="small")
    for name in ("return", "success"):
        axes[name].grid(alpha=0.3)
    axes["frames"].imshow(Image.open(output / "frames" / f"{runs[0]['run']}.jpg"))
    axes["frames"].set_title(f"an episode after training, seed {runs[0]['seed']}", fontsize="small")
    axes["frames"].axis("off")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(output / f"{claim}.png", dpi=100)
    plt.close(figure)


def draw_table1(output: Path) -> None:
    """table1.png: for each task an episode of the seed with the highest success."""
    best = {task: max(some(output, f"table1/{task}_"), key=lambda r: float(r["success_rate"]), default=None) for task in TASKS}
    best = {task: row for task, row in best.items() if row}
    if not best:
        return
    figure, axes = plt.subplots(len(best), 1, figsize=(11, 1.72 * len(best)), layout="constrained", squeeze=False)
    for axis, row in zip(axes.flat, best.values()):
        axis.imshow(Image.open(output / "frames" / f"{row['run']}.jpg"))
        axis.set_title(f"“{row['prompt']}” (seed {row['seed']}: success {row['success_rate']})", fontsize="small")
        axis.axis("off")
    figure.savefig(output / "table1.png", dpi=100)
    plt.close(figure)


def draw_hacking(output: Path) -> None:
    """hacking.png: CLIP return and success over training, a panel for each kind of run, all its seeds in it."""
    kinds = {}
    for name in RUNS:
        points = curve(output, name)
        if points:
            kinds.setdefault(name.rpartition("_")[0], []).append(points)
    if not kinds:
        return
    columns = 6
    figure, axes = plt.subplots(
        -(-len(kinds) // columns), columns, figsize=(15, 2.1 * -(-len(kinds) // columns)), squeeze=False
    )
    for axis, (kind, runs) in zip(axes.flat, kinds.items()):
        twin = axis.twinx()
        for points in runs:
            steps, returns, successes = zip(*((step / 1000, *values) for step, *values in points))
            axis.plot(steps, returns, "tab:blue", linewidth=0.7)
            twin.plot(steps, successes, "tab:orange", linewidth=0.7)
        twin.set_ylim(-0.05, 1.05)
        axis.set_title(kind, fontsize="x-small")
        for side, colour in ((axis, "tab:blue"), (twin, "tab:orange")):
            side.tick_params(labelsize="xx-small")
            side.tick_params(axis="y", labelcolor=colour)
    for axis in axes.flat[len(kinds) :]:
        axis.remove()
    figure.suptitle("CLIP return (blue), success rate (orange); thousand steps; a line a seed", fontsize="small")
    figure.tight_layout()
    figure.savefig(output / "hacking.png", dpi=90)
    plt.close(figure)


# ---- Making it


def judge(name: str, args: Args, ladder: Path) -> int:
    """A sheet of reward models, from those of its runs that are finished here -> exit code."""
    run_dirs = [str(args.run_dir / run) for run in SHEETS[name] if (args.run_dir / run / "result.json").is_file()]
    if not run_dirs:
        tqdm.write(f"{name}: none of its runs is here; its figures are left as they are")
        return 0
    dataset, script = args.run_dir / "datasets" / name, ROOT / "figures"
    dataset.parent.mkdir(exist_ok=True)
    if dataset.is_dir() and json.loads((dataset / "dataset.json").read_text())["runs"] != run_dirs:
        shutil.rmtree(dataset)  # more runs are finished now
    if not dataset.is_dir():
        if code := call([script / "dataset.py", "--run-dirs", *run_dirs, "--states", "4000", "--output", dataset])[0]:
            return code
    models = [args.clip_model]
    if name == "reward_models_kneeling":
        if code := train_ladder(ladder):
            return code
        models += [f"local-dir:{os.path.relpath(ladder, ROOT)}/width_{width}" for width in LADDER]
    command = [script / "reward_models.py", "--dataset", dataset, "--clip-model", *models, "--device", args.device]
    code, _ = call([*command, "--output", args.output / f"{name}.png"], cwd=ROOT)
    if not code:
        table = args.output / f"{name}.csv"
        write(table, [row | about() for row in read(table)])
    return code


def train_ladder(ladder: Path) -> int:
    """tiny_clip in several sizes, unless they are there -> exit code."""
    if all((ladder / f"width_{width}" / "open_clip_config.json").is_file() for width in LADDER):
        return 0
    resume = ["--resume"] if (ladder / "training.pt").is_file() else []
    command = [ROOT / "tiny_clip" / "train.py", "--widths", *map(str, LADDER), "--output", ladder, *resume]
    return call(command)[0]


def main() -> None:
    args = tyro.cli(Args)
    args.run_dir, args.output = args.run_dir.resolve(), args.output.resolve()
    main_set = args.clip_model == "tiny" and args.output == HERE
    if args.clip_model != "tiny":
        folder = re.sub(r"\W+", "_", args.clip_model)
        args.run_dir, args.output = args.run_dir / folder, args.output / folder
    only = args.only if args.only != ("none",) else ()
    everything = (*RUNS, *SHEETS, *COMMANDS)
    unknown = [name for name in only if not any(other.startswith(name) for other in everything)]
    if unknown:
        claims = ", ".join(dict.fromkeys(name.partition("/")[0] for name in everything))
        print(f"make.py: error: nothing begins with {unknown[0]}; there are {claims}", file=sys.stderr)
        sys.exit(2)
    args.output.mkdir(parents=True, exist_ok=True)
    names = [name for name in everything if args.only != ("none",) and (not only or name.startswith(only))]
    needed = {run for name in names if name in SHEETS for run in SHEETS[name]}
    names = [name for name in everything if name in names or name in needed]
    if args.clip_model != "tiny":
        names = [name for name in names if name in RUNS and not name.startswith("ladder/")]
    ladder = args.run_dir.parent / "ladder"
    progress = tqdm(names, unit="run", disable=not names)
    for name in progress:
        progress.set_description(name)
        stored = {row["run"]: row for row in read(args.output / f"{name.partition('/')[0]}.csv") if "run" in row}
        if args.missing and (name in stored or name not in RUNS and (args.output / f"{name}.csv").is_file()):
            continue
        if name in COMMANDS:
            code, printed = call(COMMANDS[name].split(), cwd=ROOT, stdout=subprocess.PIPE)
            if code:
                sys.exit(code)
            store_table(name, printed, args.output)
            continue
        if name in SHEETS:
            if code := judge(name, args, ladder):
                sys.exit(code)
            continue
        if name.startswith("ladder/") and (code := train_ladder(ladder)):
            sys.exit(code)
        run_dir, (script, options) = args.run_dir / name, RUNS[name]
        started = started_file(run_dir)
        if started.is_file() and json.loads(started.read_text())["options"] != options:
            print(f"make.py: error: {run_dir} was trained with other options: remove it", file=sys.stderr)
            sys.exit(2)
        if not (run_dir / "result.json").is_file():
            words = [word.format(ladder=ladder) for word in shlex.split(options)]
            words += [] if "--clip-model" in words else ["--clip-model", args.clip_model]
            words += ["--device", args.device, "--run-dir", run_dir]
            if (run_dir / "checkpoint.pt").is_file():
                words = ["--resume", run_dir]
            else:
                started.parent.mkdir(parents=True, exist_ok=True)
                started.write_text(json.dumps({"options": options, "about": about()}))
            if code := call([ROOT / f"{script}.py", *words])[0]:
                sys.exit(code)  # it has said why
        row = store(name, run_dir, args.output)
        before = f" (stored before: {stored[name]['success_rate']})" if name in stored else ""
        tqdm.write(f"{name}: success rate {row['success_rate']}{before}, CLIP return {row['clip_return']}")
    draw_curves(args.output, "cartpole", "CartPole: “pole vertically upright on top of the cart”")
    draw_curves(args.output, "mountaincar", "MountainCar: “a car at the peak of the mountain, next to the yellow flag”")
    draw_table1(args.output)
    draw_hacking(args.output)
    if main_set:
        temporary = ROOT / "README.tmp"
        temporary.write_text(fill_in((ROOT / "README.md").read_text()))
        os.replace(temporary, ROOT / "README.md")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
