"""How well the CLIP reward of a humanoid run agrees with its task's success condition, on the states of its replay buffer.

python figures/reward_quality.py runs/kneeling_1 runs/kneeling_2 runs/kneeling_3

The paper's protocol: the states of a training run, half of them goal states, the others drawn from the rest.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tiny_clip")]
from train import epic_distance, roc_auc  # noqa: E402

import sac_clip_humanoid  # noqa: E402
from clip_reward import CLIPReward  # noqa: E402


@dataclass
class Args:
    """Print ROC AUC and EPIC distances for each run, with the prompt and the look that it was trained with."""

    run_dirs: tyro.conf.Positional[tuple[Path, ...]]
    """run folders of sac_clip_humanoid.py, of a known task"""
    states: int = 10_000
    """states looked at, at most; half of them goal states"""
    alphas: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """strengths of goal-baseline regularization"""
    seed: int = 1
    """of the choice of the states"""


def main() -> None:
    args = tyro.cli(Args)
    device = torch.device("cpu")
    columns = ["run", "prompt", "states", "goal states in the run", "ROC AUC, α = 0"]
    columns += [f"EPIC distance, α = {alpha:g}" for alpha in args.alphas]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for run_dir in args.run_dirs:
        checkpoint = torch.load(run_dir / "checkpoint.pt", map_location="cpu", weights_only=True, mmap=True)
        settings, own = checkpoint["settings"], [checkpoint, *checkpoint["others"]]
        states = torch.cat([process["rb"]["states"] for process in own])
        model, prompt, baseline = settings["clip_model"], settings["prompt"], settings["baseline_prompt"]
        precision = settings["precision"]
        reward_models = [CLIPReward(model, prompt, baseline, alpha, device, precision=precision) for alpha in args.alphas]
        size, look = reward_models[0].size, (settings["textures"], settings["camera"], settings["supersample"])
        holds = sac_clip_humanoid.TASKS[settings["task"]][1]

        locate = sac_clip_humanoid.Scene(8, 8, *look, 1024, device)  # small frames: only where the parts of the body are
        rng = torch.Generator().manual_seed(args.seed)
        states = states[torch.randperm(len(states), generator=rng)[: 4 * args.states]]  # enough, unless goals are rare
        goal = torch.cat([holds(locate.draw(chunk)[1]) for chunk in tqdm(states.split(8192), desc="label", leave=False)])
        yes, no = (some[torch.randperm(len(some), generator=rng)] for some in (goal.nonzero()[:, 0], (~goal).nonzero()[:, 0]))
        count = min(args.states // 2, len(yes), len(no))
        if count == 0:
            print(f"| {run_dir.name} | {'; '.join(prompt)} | 0 | {goal.float().mean():.3f} |" + " |" * (1 + len(args.alphas)))
            continue
        chosen = torch.cat([yes[:count], no[:count]])
        scene = sac_clip_humanoid.Scene(*size, *look, 128, device)
        chunks = tqdm(states[chosen].split(1024), desc="score", leave=False)
        embedded = torch.cat([reward_models[0].embed(scene.draw(chunk)[0]) for chunk in chunks])
        rewards, label = [reward_model.reward(embedded) for reward_model in reward_models], goal[chosen]
        row = [
            run_dir.name,
            "; ".join(prompt),
            str(2 * count),
            f"{goal.float().mean():.3f}",
            f"{roc_auc(rewards[0], label):.3f}",
        ]
        print(f"| {' | '.join(row + [f'{epic_distance(reward, label):.3f}' for reward in rewards])} |")


if __name__ == "__main__":
    main()
