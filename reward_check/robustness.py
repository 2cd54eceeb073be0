"""How much of a reward is left when the picture changes and the posture does not?

    python -m reward_check.robustness --dataset runs/states/kneeling

EPIC distances (half goal states, 95 % interval) of one model and sentence: plain, with α = 0.5 and 1, and of
the raw dot product, where neither embedding has length 1 (the paper's authors: noisier than the cosine).
"""

import math
from pathlib import Path

import mujoco
import torch
import tyro
from torchvision.transforms.functional import adjust_brightness, gaussian_blur

import sac_clip_humanoid as humanoid
from clip_reward import CLIPReward, goal_baseline_reward, native_precision
from reward_check.dataset import load
from reward_check.dose import hashed
from reward_check.reward_models import measure


class Surrounded(humanoid.Scene):
    """The same with two boxes and two balls around the robot, for each state elsewhere: its hash decides."""

    @staticmethod
    def spec(textures: str) -> mujoco.MjSpec:
        spec = humanoid.scene_spec(textures)
        colors = ([0.8, 0.2, 0.2, 1], [0.2, 0.6, 0.3, 1], [0.9, 0.8, 0.2, 1], [0.4, 0.3, 0.8, 1])
        for k, rgba in enumerate(colors):
            kind = mujoco.mjtGeom.mjGEOM_BOX if k < 2 else mujoco.mjtGeom.mjGEOM_SPHERE
            spec.worldbody.add_body(mocap=True).add_geom(type=kind, size=[0.2, 0.2, 0.2], rgba=rgba)
        return spec

    def render(self, poses: torch.Tensor) -> tuple[torch.Tensor, humanoid.Points]:
        """Poses (N, 24), N at most the batch size -> as every scene. Objects are 0.8 to 1.8 m away."""
        import warp as wp

        numbers = torch.stack([hashed(poses, 0.05, key) for key in range(8)], dim=1).view(-1, 4, 2)
        angle = math.pi * (0.25 + 1.5 * numbers[:, :, 0])  # not between robot and camera
        distance = 0.8 + numbers[:, :, 1]
        places = torch.stack([angle.cos() * distance, angle.sin() * distance, 0 * angle + 0.2], dim=2)
        places[:, :, :2] += poses[:, None, :2]
        wp.to_torch(self.data.mocap_pos)[: len(poses)] = places.to(self.device)
        return super().render(poses)


def main(dataset: Path, clip_model: str = "tiny", device: str = "cpu", resamples: int = 1000) -> None:
    """Print the table, for a dataset of the humanoid."""
    settings, states, label, _ = load(dataset)
    texts = settings["prompt"], settings["baseline_prompt"]
    model = CLIPReward(clip_model, *texts, device=device, precision=native_precision(device))
    lengths = []  # of the frames' embeddings, before they are normalized
    model.model.visual.register_forward_hook(lambda _, given, out: lengths.append(out.float().norm(dim=1)))
    look = {"textures": settings["textures"], "camera": settings["camera"]}
    textures = "original" if look["textures"] == "realistic" else "realistic"
    camera = "original" if look["camera"] == "fixed" else "fixed"
    changes = {
        "as in training": {},
        "boxes and balls": {"scene": Surrounded},
        "the other textures": {"textures": textures},
        "the other camera": {"camera": camera},
        "blurred": {"alter": lambda frames: gaussian_blur(frames, 5)},
        "half as bright": {"alter": lambda frames: adjust_brightness(frames, 0.5)},
        "1.5 times as bright": {"alter": lambda frames: adjust_brightness(frames, 1.5)},
    }
    print(f"{clip_model}, {'; '.join(settings['prompt'])}, {len(states)} states")
    print("| the picture | α = 0 | α = 0.5 | α = 1 | dot product |\n|---|---|---|---|---|")
    for name, changed in changes.items():
        how = {"scene": humanoid.Scene, "alter": lambda frames: frames} | look | changed
        scene = how["scene"](*model.size, how["textures"], how["camera"], 1, 128, torch.device(device))
        lengths.clear()
        frames = (how["alter"](scene.render(some)[0]) for some in states.split(128))
        embedded = torch.cat([model.embed(some) for some in frames])
        rewards = [goal_baseline_reward(embedded, model.goal, model.baseline, alpha) for alpha in (0, 0.5, 1)]
        rewards.append(torch.cat(lengths) * (embedded @ model.goal))  # the text's length changes no distance
        cells = [name]
        for reward in rewards:
            m = measure(reward.cpu(), label, resamples, 1)
            low, high = m["epic_balanced_low"], m["epic_balanced_high"]
            cells.append(f"{m['epic_balanced']:.3f} ({low:.3f} to {high:.3f})")
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    tyro.cli(main)
