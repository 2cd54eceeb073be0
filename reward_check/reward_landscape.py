"""Figure 2 of the paper, for any CLIP model: reward against pole angle and the car's x, for five values of α.

python -m reward_check.reward_landscape --clip-model tiny --output reward_check/reward_landscape.png
"""

import csv
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import tyro
from tqdm import tqdm

import dqn_clip_cartpole
import sac_clip_mountaincar
from clip_reward import CLIPReward, UsageError

ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass
class Args:
    """Plot the reward landscapes of the paper's prompts; the raw rewards go into a CSV file beside it."""

    clip_model: str = "tiny"  # NAME/TAG, NAME/FILE, hf-hub:ORG/NAME, local-dir:PATH or tiny
    device: str = "cuda" if torch.cuda.is_available() else "cpu"  # cpu or cuda
    points: int = 181  # states along each axis
    clip_batch_size: int = 32  # frames rewarded at once
    output: Path = Path("reward_landscape.png")  # picture to write


def pole(degrees: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Angles (N,) -> frames (N, 3, height, width) with the cart in the middle."""
    states = torch.zeros(len(degrees), 4, device=degrees.device)
    states[:, 2] = torch.deg2rad(degrees)
    return dqn_clip_cartpole.render(states, height, width)


def car(x: torch.Tensor, height: int, width: int, textures: str) -> torch.Tensor:
    """Places (N,) -> frames (N, 3, height, width)."""
    states = torch.stack([x, 0 * x], dim=1)
    return sac_clip_mountaincar.Scene(height, width, textures, x.device).render(states)


# name: script with the prompts, renderer, name of the axis, its ends, the goal's, places of sample frames
TRACK = ("x of the car", (-1.2, 0.6), (0.45, 0.6), (-0.9, -0.3, 0.45))
PANELS = {
    "CartPole": (dqn_clip_cartpole, pole, "pole angle in degrees", (-180, 180), (-12, 12), (-120, 0, 120)),
    "MountainCar, original": (sac_clip_mountaincar, partial(car, textures="original"), *TRACK),
    "MountainCar, realistic": (sac_clip_mountaincar, partial(car, textures="realistic"), *TRACK),
}


def main() -> None:
    args = tyro.cli(Args)
    plt.rcParams["text.parse_math"] = False  # a path may hold dollar signs
    sys.stdout.reconfigure(errors="replace")  # α, where the terminal has none
    figure = plt.figure(figsize=(15, 5.2), layout="constrained")
    axes = figure.subplots(2, len(PANELS), height_ratios=[3.2, 1], sharex="col")
    rows = []
    maxima = []
    progress = tqdm(total=args.points * len(PANELS), unit="frame", desc="reward")
    for (above, below), (name, (script, render, axis, ends, goal, samples)) in zip(axes.T, PANELS.items()):
        settings = script.Args()
        reward_model = None  # an old model's memory is free before a new one is loaded
        texts = settings.prompt, settings.baseline_prompt
        reward_model = CLIPReward(args.clip_model, *texts, 1.0, args.device, args.clip_batch_size)
        places = torch.linspace(*ends, args.points, device=args.device)
        embeddings = []
        for chunk in places.split(args.clip_batch_size):
            embeddings.append(reward_model.embed(render(chunk, *reward_model.size)))
            progress.update(len(chunk))
        for alpha, colour in zip(ALPHAS, plt.cm.viridis(torch.linspace(0, 0.9, len(ALPHAS)).tolist())):
            reward_model.alpha = alpha
            curve = reward_model.reward(torch.cat(embeddings)).cpu()
            points = zip(places.tolist(), curve.tolist())
            rows += [(name, alpha, f"{place:.4f}", f"{reward:.7f}") for place, reward in points]
            rescaled = (curve - curve.min()) / (curve.max() - curve.min())
            above.plot(places.tolist(), rescaled.tolist(), color=colour, label=f"α = {alpha}")
            maxima.append(f"| {name} | {alpha} | {places[curve.argmax()].item():+.2f} |")
        above.axvspan(*goal, color="gold", alpha=0.35, linewidth=0, label="goal")
        above.set(title=f"{name}\n“{settings.prompt[0]}”", xlim=ends, ylim=(-0.03, 1.03))
        above.title.set_fontsize("small")
        width = (ends[1] - ends[0]) / 3 * 0.98
        frames = render(torch.tensor(samples, dtype=torch.float32), 200, 300).permute(0, 2, 3, 1).numpy()
        for place, frame in zip(samples, frames):
            left = min(max(place - width / 2, ends[0]), ends[1] - width)
            below.imshow(frame, extent=(left, left + width, 0, 1), aspect="auto")
            box = {"color": "white", "pad": 1}
            below.text(left + width / 2, 0.97, place, va="top", ha="center", fontsize="small", bbox=box)
        below.set(xlabel=f"{axis} (and of the sample frames)", xlim=ends, ylim=(0, 1), yticks=[])
    axes[0, 0].set_ylabel("reward, rescaled to [0, 1]")
    axes[0, 0].legend(fontsize="small", loc="upper left")
    progress.close()
    print("\n".join(["| panel | α | highest reward at |", "|---|---|---|", *maxima]))

    weights = "tiny, trained on these very scenes" if args.clip_model == "tiny" else args.clip_model
    figure.suptitle(f"Reward landscapes, CLIP model: {weights}", fontsize="medium")
    figure.savefig(args.output, dpi=90)
    with open(args.output.with_suffix(".csv"), "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("panel", "alpha", "angle_or_x", "reward"))
        writer.writerows(rows)
    print(f"written to {args.output} and {args.output.with_suffix('.csv')}")


if __name__ == "__main__":
    try:
        main()
    except (UsageError, OSError) as error:
        print(f"reward_landscape.py: error: {error}", file=sys.stderr)
        sys.exit(2)
