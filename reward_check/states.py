"""States of the humanoid in all kinds of postures: hand-made poses, what physics makes of them, variations.

The check's fixed states are such, and those that `tiny` was trained with, of another seed.
"""

import csv
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mujoco
import numpy as np
import torch
import torch.nn.functional as F
from tqdm import trange

import sac_clip_humanoid as humanoid

# poses.csv has joint angles in degrees, of both sides alike. Legs: hip x (-25 to 5, out), hip z (-60 to 35,
# outwards), hip y (-110 to 20, forwards), knee (-160 to -2), then waist y and the lean of the trunk. Arms:
# shoulder 1 and 2 (-85 to 60; the left one's have the opposite sign) and elbow (-90 to 50).
HERE = Path(__file__).resolve().parent
with open(HERE / "poses.csv", newline="") as file:
    POSES = [(row["limbs"], np.array(row["angles"].split(), float)) for row in csv.DictReader(file)]
LEGS = np.stack([angles for limbs, angles in POSES if limbs == "legs"])
ARMS = np.stack([angles for limbs, angles in POSES if limbs == "arms"])
MOTORS = [1, 0, *range(2, 17)]  # their order among the joints: the XML names the abdomen's y before its z
SNAPSHOTS = (0, 3, 8, 15, 25, 40)  # environment steps after which a pose is looked at
SIDES = ("right", "left")
# What counts as a posture, by conditions on `humanoid_knowledge`: whatever has a name for `tiny`.
with open(HERE.parent / "tiny_clip" / "captions.csv", newline="") as file:
    POSTURES = [row for row in csv.DictReader(file) if (row["scene"], row["kind"]) == ("humanoid", "posture")]


def poses(n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """n hand-made poses with generous noise: the trunk's quaternions (n, 4), joint angles (n, 17), rad."""

    def some(poses: np.ndarray) -> np.ndarray:
        return poses[rng.integers(len(poses), size=n)]

    def change(share: float, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        return np.where(rng.random((n, 1)) < share, other, one)

    pose = some(LEGS)
    stand = rng.random((n, 1)) < 0.12  # on one leg, with the other anywhere
    pose = np.where(stand, LEGS[0], pose)
    free = rng.uniform((-25, -30, -110, -120), (0, 20, 0, -5), (n, 4))
    left_leg = np.where(stand, free, change(0.2, pose, some(LEGS))[:, :4])
    limits = (-85, -85, -90), (60, 60, 50)
    right_arm = change(0.2, some(ARMS), rng.uniform(*limits, (n, 3)))
    left_arm = change(0.2, change(0.3, right_arm, some(ARMS)), rng.uniform(*limits, (n, 3)))
    both = rng.random((n, 1)) < 0.16  # stands, on one leg or two, with both arms alike
    legs = np.where(both & ~stand, LEGS[0, :4], np.stack([pose[:, :4], left_leg]))
    arms = np.where(both, some(ARMS), np.stack([right_arm, left_arm]))
    swap, swap_arms = rng.random((2, n, 1)) < 0.5
    legs = np.where(swap, legs[::-1], legs)
    arms = np.where(swap_arms, arms[::-1], arms)
    waist = rng.normal(0, (8, 12, 8), (n, 3)) + pose[:, 4:5] * [0, 1, 0]  # about z, y, x
    angles = np.concatenate([waist, *legs, arms[0], arms[1] * [-1, -1, 1]], axis=1)
    angles += rng.normal(0, 1, angles.shape) * rng.choice([4, 12, 30], size=(n, 1), p=[0.4, 0.4, 0.2])

    yaw = np.where(rng.random(n) < 0.75, rng.normal(0, 25, n), rng.uniform(-180, 180, n))
    pitch, roll = rng.normal(0, 1, (2, n)) * rng.choice([4, 15], size=(2, n)) + [pose[:, 5], 0 * pose[:, 5]]
    lying = rng.random(n) < 0.15
    pitch += lying * (rng.choice([-90, 90, 0, 60, -60], size=n) + rng.normal(0, 15, n))
    roll += lying * rng.choice([0, 0, 90, -90], size=n)
    turns = np.empty((n, 4))
    for turn, angle in zip(turns, np.radians([yaw, pitch, roll]).T):
        mujoco.mju_euler2Quat(turn, angle, "zyx")
    return turns, np.radians(angles)


def variations(states: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """States (n, 24) -> what `poses` returns, for poses like theirs with some joints and the trunk turned."""
    n = len(states)
    noise = rng.choice([4, 10, 30], size=(n, 1)) * rng.normal(0, 1, (n, 17))
    angles = states[:, 7:] + np.radians(noise * (rng.random((n, 17)) < rng.choice([0.15, 0.4], size=(n, 1))))
    turns = states[:, 3:7].astype(float)
    for turn, by, about in zip(turns, rng.normal(0, 0.25, (n, 3)), rng.normal(0, 0.6, n)):
        mujoco.mju_quatIntegrate(turn, by, 1)  # about the trunk's own axes ...
        yaw = np.array([math.cos(about / 2), 0, 0, math.sin(about / 2)])
        mujoco.mju_mulQuat(turn, yaw, turn.copy())  # ... and the vertical
    return turns, angles


def robots(n: int) -> list:
    """n of Gymnasium's, each with its `model` and `data`."""
    return [env.unwrapped for env in humanoid.Humanoids(n).envs]


def play(turns: np.ndarray, angles: np.ndarray, robots: list, rng: np.random.Generator) -> list[torch.Tensor]:
    """Poses as of `poses`, one for each of Gymnasium's robots -> states (n, 24) after each of SNAPSHOTS.

    A quarter starts as every episode does, in the air and upright, and moves into the pose; the others start
    in it, most of them on the floor. Some hold it, firmly or weakly, some let go, and some jerk about.
    """
    n = len(robots)
    model = robots[0].model
    seed = int(rng.integers(2**31))
    for i, robot in enumerate(robots):
        robot.reset(seed=seed + i)
    angles = angles.clip(*model.jnt_range[1:].T)
    for i in range(n // 4, n):
        data = robots[i].data
        data.qpos[:2] = rng.normal(0, 0.3, 2)
        data.qpos[3:] = [*turns[i], *angles[i]]
        data.qvel[:] = 0
        mujoco.mj_kinematics(model, data)
        below = data.geom_xpos[1:, 2] - model.geom_size[1:, 0]
        below -= abs(data.geom_xmat[1:, 8]) * model.geom_size[1:, 1]
        data.qpos[2] -= below.min() - rng.choice([0.005, rng.uniform(0, 0.3)], p=[0.8, 0.2])
        mujoco.mj_forward(model, data)
    hold = rng.choice([0, 0.3, 1], size=(n, 1), p=[0.15, 0.25, 0.6])
    jerk = rng.choice([0, 1], size=(n, 1), p=[0.7, 0.3])
    states = []
    with ThreadPoolExecutor() as pool:
        for step in range(SNAPSHOTS[-1] + 1):
            pose = np.stack([robot.data.qpos for robot in robots])
            speeds = np.stack([robot.data.qvel for robot in robots])
            if step in SNAPSHOTS:
                states.append(torch.from_numpy(pose).float())
            if step % 5 == 0:
                shake = rng.uniform(-0.4, 0.4, (n, 17)) * jerk
            torques = hold * (1.5 * (angles - pose[:, 7:]) - 0.08 * speeds[:, 6:])
            motors = (torques[:, MOTORS] + shake).clip(-0.4, 0.4)
            list(pool.map(lambda robot, motor: robot.do_simulation(motor, robot.frame_skip), robots, motors))
    return states


def humanoid_states(n: int, rng: np.random.Generator, others: torch.Tensor | None = None) -> torch.Tensor:
    """n states (n, 24): poses and what becomes of them, then variations of these, and of others (…, 24), of
    each posture alike.

    The variations are what a policy finds that is rewarded for a posture: states around it in all directions.
    """
    num_envs = min(256, n)
    bodies = robots(num_envs)
    states = []
    showing = []
    for _ in trange(math.ceil(n / num_envs / len(SNAPSHOTS)), desc="simulate the humanoid", leave=False):
        if len(states) * num_envs < n // 2:
            turns, angles = poses(num_envs, rng)
        else:
            if not showing:
                first = torch.cat(states if others is None else [*states, others])
                scene = humanoid.Scene(8, 8, "original", "fixed", 1, 1024, torch.device("cpu"))
                showing = frames_of_postures(
                    humanoid_knowledge(scene.render(first)[1], "original", "fixed", rng)
                )
            parents = [rng.choice(showing[rng.integers(len(showing))]) for _ in range(num_envs)]
            turns, angles = variations(first[parents].numpy(), rng)
        states += play(turns, angles, bodies, rng)
    states = torch.cat(states)
    return states[torch.from_numpy(rng.permutation(len(states))[:n])]


def frames_of_postures(known: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Knowledge of frames -> the frames that clearly show each posture, of those that any shows.

    The tasks' own, which come first, are there three times: they are rare, and hard to hold.
    """
    showing = []
    for row in POSTURES:
        doubtful = eval(row["unless"] or "False", {}, known)
        showing.append(np.flatnonzero(np.where(doubtful, False, eval(row["condition"], {}, known))))
    showing += 2 * showing[: len(humanoid.TASKS)]
    return [frames for frames in showing if len(frames)]


def humanoid_knowledge(points: dict, textures: str, camera: str, rng: np.random.Generator) -> dict:
    """Body points -> what the eye can tell: m, degrees, conditions; _low is the lesser of both sides."""
    p = {k: at + 0.01 * torch.from_numpy(rng.standard_normal(at.shape)).float() for k, at in points.items()}
    parts = ("hand", "elbow", "hip", "knee", "foot")
    hands, elbows, hips, knees, feet = (torch.stack([p[f"{side}_{k}"] for side in SIDES]) for k in parts)
    out = torch.stack([-humanoid.leftwards(p, "right_hand"), humanoid.leftwards(p, "left_hand")])
    two = {"hand": hands[..., 2], "knee": knees[..., 2], "foot": feet[..., 2], "out": out, "aside": out.abs()}
    two["bend"] = torch.stack([humanoid.bend(p, side) for side in SIDES])
    two["elbow"] = torch.stack([humanoid.bend(p, side, ("shoulder", "elbow", "hand")) for side in SIDES])
    two["front"] = torch.stack([humanoid.forwards(p, f"{side}_hand") for side in SIDES])
    two["ahead"] = torch.stack([humanoid.forwards(p, f"{side}_foot") for side in SIDES])
    two["over"] = hands[..., 2] - p["head"][:, 2]
    two["beside"] = (hands - p["head"]).norm(dim=-1)
    two["hips"] = (hands - hips).norm(dim=-1)
    two["across"] = (hands - elbows.flip(0)).norm(dim=-1)
    known = {f"{name}_low": sides.amin(0) for name, sides in two.items()}
    known |= {f"{name}_high": sides.amax(0) for name, sides in two.items()}
    known |= {task.replace("-", "_"): holds(p) for task, (_, holds) in humanoid.TASKS.items()}
    known |= {"tilt": humanoid.tilt(p), "spread": humanoid.spread(p)}
    known |= {"head": p["head"][:, 2], "seat": p["seat"][:, 2]}
    known["shoulders"] = torch.minimum(p["right_shoulder"][:, 2], p["left_shoulder"][:, 2])
    known["between_knees"] = (knees[1] - knees[0]).norm(dim=-1)
    known["between_feet"] = (feet[1] - feet[0]).norm(dim=-1)
    left = F.normalize(p["left_shoulder"] - p["right_shoulder"], dim=-1)
    front = torch.linalg.cross(left, F.normalize(p["head"] - p["seat"], dim=-1))
    sight = torch.tensor([3.5, 0]) - p["seat"][:, :2] if camera == "fixed" else torch.tensor([[0.0, -4.0]])
    known["chest_up"] = front[:, 2]
    # 1: faces the camera, -1: turns its back on it
    known["facing"] = (F.normalize(front[:, :2], dim=-1) * F.normalize(sight, dim=-1)).sum(-1)
    known["one_at_hip"] = ((two["hips"] < 0.18) & (two["elbow"] > 50)).any(0)
    known["seated"] = known["seat"] < humanoid.SEAT + 0.07
    off_the_floor = known["seat"] > humanoid.SEAT + 2 * humanoid.FOOT
    known["low_knees"] = (known["knee_high"] < 0.3) & (known["tilt"] < 60) & off_the_floor
    known["realistic"] = torch.full((len(left),), textures == "realistic")
    return {name: values.numpy() for name, values in known.items()}
