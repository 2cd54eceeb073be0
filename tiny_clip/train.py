"""Train the bundled model: a small CLIP that knows nothing but the scenes of this project.

    python tiny_clip/train.py             # train, write the model into this folder, print the held-out figures
    python tiny_clip/train.py --evaluate  # only the held-out figures
    python tiny_clip/train.py --widths 8 24 32 --output ladder  # models of other sizes, on the same batches: ladder/width_8, …

Frames are drawn by the scripts' own drawing functions, for every batch anew (the humanoid's once, before the training); captions are
composed from the states. To add a scene, write one function like `mountaincar_scene` and add it to `scenes_and_shares`.
"""

import json
import math
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import mujoco
import numpy as np
import open_clip
import torch
import torch.nn.functional as F
import tyro
from safetensors.torch import save_file
from tqdm import tqdm, trange

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import dqn_clip_cartpole  # noqa: E402
import sac_clip_humanoid  # noqa: E402
import sac_clip_mountaincar  # noqa: E402
from clip_reward import CLIPReward, UsageError  # noqa: E402

SIZE = 64  # pixels, frames are square
SAVE_EVERY = 100  # steps, for --resume
MODEL_CFG = {
    "embed_dim": 128,
    "vision_cfg": {"image_size": SIZE, "layers": [1, 1, 1, 1], "width": 16, "patch_size": None},
    "text_cfg": {"context_length": 32, "vocab_size": 49408, "width": 64, "heads": 4, "layers": 2},
}
PREPROCESS_CFG = {"size": SIZE, "mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic", "resize_mode": "squash"}

# Never in a caption: the paper's goal and baseline prompts (the reward has to come from understanding other wordings) ...
CARTPOLE_PROMPT, CARTPOLE_BASELINE = "pole vertically upright on top of the cart", "pole and cart"
# ... and these further wordings, to see how much depends on the words.
CARTPOLE_REWORDINGS = (
    "a pole balanced vertically on the cart",
    "the stick stands straight up on the cart",
    "a vertical pole on a cart",
    "the pole is in an upright position",
)
MOUNTAINCAR_PROMPT = "a car at the peak of the mountain, next to the yellow flag"
MOUNTAINCAR_BASELINE = "a car in the mountain"
MOUNTAINCAR_REWORDINGS = (
    "the car has climbed all the way up to the yellow flag",
    "a car on the mountain top beside the flag",
    "the vehicle is at the summit",
    "a car at the flag",
)
HUMANOID_PROMPTS = {task: prompt for task, (prompt, _) in sac_clip_humanoid.TASKS.items()}
HUMANOID_BASELINE = "a humanoid robot"
KNEELING_REWORDINGS = (
    "a kneeling humanoid robot",
    "a humanoid robot has dropped to its knees",
    "the robot has knelt down",
    "a robot resting on its two knees",
    "a humanoid in a kneeling pose",
)
HELD_OUT = {CARTPOLE_PROMPT, CARTPOLE_BASELINE, *CARTPOLE_REWORDINGS}
HELD_OUT |= {MOUNTAINCAR_PROMPT, MOUNTAINCAR_BASELINE, *MOUNTAINCAR_REWORDINGS}
HELD_OUT |= {*HUMANOID_PROMPTS.values(), *KNEELING_REWORDINGS}


@dataclass
class Args:
    """Train tiny_clip from nothing and write it into this folder."""

    evaluate: bool = False
    """only print the held-out figures of the model in `output`"""
    output: Path = HERE
    """folder for the model"""
    widths: tuple[int, ...] = (16,)
    """of the image encoder; several are trained side by side on the same batches, each into a folder width_N of its own"""
    resume: bool = False
    """go on with the training in `output` that was interrupted, with the same settings (the humanoid's states are made again)"""
    steps: int = 1100
    """optimizer steps"""
    batch_size: int = 1024
    """image-text pairs a step, over all scenes"""
    humanoid_states: int = 120_000
    """states of the humanoid that are simulated and drawn before the training; the other scenes are drawn anew for each batch"""
    learning_rate: float = 2e-3
    """peak of the cosine schedule"""
    weight_decay: float = 0.05
    """of AdamW, on matrices only"""
    seed: int = 1
    """of weights, states and captions"""


# ---- Scenes: n -> frames (n, 3, SIZE, SIZE) uint8, n captions, facts (n, F) int, mentioned (n, F) bool. A fact is a number that
# holds for the frame (is the pole within 12° of upright, in which fifth of the track is the cart, …); `mentioned` marks those
# that the caption speaks of. Caption i is true of frame j if the two agree in every fact that i mentions: the loss asks for it.


def pick(rng: np.random.Generator, words: str) -> str:
    """One of the alternatives "a|b|c"."""
    options = words.split("|")
    return options[rng.integers(len(options))]


def holds_held_out(caption: str) -> bool:
    return caption == HUMANOID_BASELINE or any(sentence in caption for sentence in HELD_OUT)


EXACTLY = "perfectly|exactly|precisely|completely|absolutely|quite"
CARTPOLE_POSTURES = (  # at most so many degrees from upright: what one says where that holds, and where it does not
    (
        3,
        "EXACTLY upright|EXACTLY vertical|EXACTLY balanced|EXACTLY straight",
        "",
    ),
    (
        4,
        "upright and vertical|vertical and upright|straight and upright|standing vertical and straight|well balanced and upright|"
        "upright in balance",
        "",
    ),
    (
        12,
        "upright|vertical|standing upright|balanced|standing straight|held upright|standing up|erect|in balance|"
        "standing vertically|held vertically|vertically balanced|pointing vertically up",
        "tilted|leaning|not upright|not vertical|off balance|no longer vertical|tipping over|unbalanced|slanted",
    ),
    (
        30,
        "roughly upright|mostly upright|nearly vertical|close to upright|almost balanced",
        "leaning far over|falling|strongly tilted",
    ),
    (60, "pointing up|rather steep|not fallen yet", "fallen|fallen over|toppled|fallen down|knocked over"),
    (90, "pointing upwards|above the track|rising", "pointing below the track|hanging|pointing down|dropped|hanging down"),
    (
        150,
        "",
        "hanging straight down|upside down|pointing straight down|hanging vertically below the cart|fallen all the way down",
    ),
)
DEGREES = np.array([5, 10, 15, 20, 30, 45, 60, 75, 90, 105, 120, 135, 150, 165])  # from upright
HORIZONTAL, SIDE, PLACE, CUT = len(CARTPOLE_POSTURES) + len(DEGREES) + np.arange(4)  # the other facts
IN_VIEW = 2.2  # m; farther out, a part of the cart is outside the picture
CARTPOLE_PLACES = ("at the far left", "to the left", "in the middle", "to the right", "at the far right")


def cartpole_scene(n: int, rng: np.random.Generator):
    """Cart-poles: a quarter within 8° of upright, a quarter within 25°, the rest at any angle; the cart anywhere, a 13th at the track's ends.

    There, half of the cart is outside the picture, and CartPole-v1 counts a failure. Captions of such frames say that the cart is cut
    off, and nothing of the pole; without them a policy drove to the end, where an upright pole was paid as well as in the middle.
    """
    degrees = rng.uniform(-1, 1, n) * rng.choice([8, 25, 180, 180], size=n)
    x = rng.uniform(-2.6, 2.6, n).clip(-2.4, 2.4)
    states = np.stack([x, 0 * x, np.radians(degrees), 0 * x], axis=1)
    frames = dqn_clip_cartpole.draw(torch.from_numpy(states), SIZE, SIZE)

    within = np.stack([np.abs(degrees) <= limit for limit, _, _ in CARTPOLE_POSTURES], axis=1)
    horizontal = np.abs(np.abs(degrees) - 90) < 15
    side = degrees > 0
    place = np.floor((x + 2.4) / 0.96).clip(0, 4).astype(int)
    beyond = np.abs(degrees)[:, None] >= DEGREES
    cut = np.abs(x) > IN_VIEW + 0.03 * rng.standard_normal(n)  # judged by eye
    facts = np.concatenate([within, beyond, np.stack([horizontal, side, place, cut], axis=1)], axis=1).astype(int)
    facts[cut, : SIDE + 1] = 2  # neither true nor false: no caption about a pole holds there
    mentioned = np.zeros(facts.shape, dtype=bool)
    captions = []
    for i, says in enumerate(mentioned):
        text = ""
        while not text or holds_held_out(text):
            says[:] = False
            pole = pick(rng, "pole|the pole|a pole|a wooden pole|a stick|the rod")
            cart = pick(rng, "the cart|a cart|a black cart|cart|the small black cart")
            on = pick(rng, f"on {cart}|on top of {cart}|attached to {cart}|of {cart}||")
            way = "right" if side[i] else "left"
            kind = rng.random()
            if kind < 0.05:  # what the baseline says, in other words: true of every frame of the scene
                text = pick(
                    rng,
                    f"{cart} with {pole}|{pole} attached to {cart}|{cart} and {pole}|{pole} and {cart} on a track|cart pole",
                )
            elif kind < 0.12:
                text = f"{cart} {CARTPOLE_PLACES[place[i]]}" + pick(rng, "| of the track| with a pole")
                says[PLACE] = True
            elif cut[i]:
                how = pick(
                    rng,
                    "cut off|cut off by the edge|partly out of the picture|partly outside|leaving the picture|not all in view",
                )
                text, says[CUT] = pick(rng, f"{cart} {how}|{cart} is {how}|{pole} {on}, {how}|{pole} and {cart}, {how}"), True
                if rng.random() < 0.4:
                    text += f" {CARTPOLE_PLACES[place[i]]}"
                    says[PLACE] = True
            elif kind < 0.16:
                text = pick(
                    rng,
                    "all of CART is in the picture|CART in full view|CART well inside the picture|the whole of CART to be seen",
                )
                text, says[CUT] = text.replace("CART", cart) + pick(rng, f"|, with {pole}"), True
            elif kind < 0.33:
                k = rng.integers(len(DEGREES))
                says[len(CARTPOLE_POSTURES) + k] = True
                how = pick(rng, "more than|at least|over" if beyond[i, k] else "less than|not even|under")
                text = f"{pole} {on} {how} {DEGREES[k]} degrees " + pick(rng, "from upright|from vertical|off balance")
            else:
                if horizontal[i] and rng.random() < 0.4:
                    how, says[HORIZONTAL] = pick(rng, "horizontal|lying flat|sideways|level with the ground"), True
                else:
                    can_say = [k for k, words in enumerate(CARTPOLE_POSTURES) if words[1 if within[i, k] else 2]]
                    k = rng.choice(can_say)
                    how, says[k] = pick(rng, CARTPOLE_POSTURES[k][1 if within[i, k] else 2]), True
                    how = how.replace("EXACTLY", pick(rng, EXACTLY))
                text = pick(
                    rng, f"{pole} {how} {on}|{pole} {on} {how}|{pole} is {how} {on}|{pole} {on} is {how}|{how} {pole} {on}"
                )
                if not within[i, 0] and within[i, -1] and rng.random() < 0.3:
                    text += pick(rng, " to the | towards the |, on the ") + way
                    says[SIDE] = True
                if rng.random() < 0.25:
                    text += pick(rng, ", the cart |, cart |, with the cart ") + CARTPOLE_PLACES[place[i]]
                    says[PLACE] = True
            text = " ".join(text.replace(" ,", ",").split())
        captions.append(text)
    return frames, captions, torch.from_numpy(facts), torch.from_numpy(mentioned)


MOUNTAINCAR_PLACES = (  # from which x on: what one says of a car there, and of one that is not; "the mountain" has the flag on it
    (
        sac_clip_mountaincar.X_GOAL,
        "at the peak|at the peak of MOUNTAIN|on the peak|at the very top|at the very top of MOUNTAIN|on top of MOUNTAIN|on the summit|"
        "at the summit of MOUNTAIN|at the highest point|next to FLAG|beside FLAG|right by FLAG|at FLAG|arrived at FLAG|"
        "on the mountain top",
        "below the peak|below the summit|not yet at FLAG|not at FLAG|short of the summit|away from FLAG|lower than FLAG",
    ),
    (
        0.3,
        "close to FLAG|near FLAG|near the peak|close to the top of MOUNTAIN|near the summit|around the top of MOUNTAIN",
        "some way from FLAG|not near the summit|not near the top of MOUNTAIN",
    ),
    (
        0.15,
        "not far from the peak|not far from FLAG|rather close to the summit|within reach of FLAG|towards the top of MOUNTAIN",
        "well below the peak|at a distance from FLAG|still not close to the summit",
    ),
    (0, "high up on the right|well up the right slope|in the upper right", "far from FLAG|far from the peak|far from the top"),
    (
        -0.15,
        "half of the way to FLAG or more|beyond the middle of the right slope",
        "very far from FLAG|a long way from the peak|very far from the summit",
    ),
    (-0.3, "on the right slope|right of the valley|on the side of FLAG", "not on the right slope|not on the side of FLAG"),
    (-0.75, "", "on the left slope|on the left hill|on the wrong side of the valley|on the left"),
    (-1.0, "", "at the left edge|far out on the left|at the end of the track on the left"),
)
PERCENT = np.arange(10, 100, 10)  # of the way from the bottom of the valley to the flag
VALLEY, LOOK = len(MOUNTAINCAR_PLACES) + len(PERCENT), len(MOUNTAINCAR_PLACES) + len(PERCENT) + 1  # the other facts


def mountaincar_progress(x: np.ndarray) -> np.ndarray:
    """Share of the way from the bottom of the valley (0) to the goal (1, and beyond it); 0 on the left hill, which leads away."""
    return ((x + math.pi / 6) / (sac_clip_mountaincar.X_GOAL + math.pi / 6)).clip(0, 1)


@cache  # its background is painted once
def draw_cars(textures: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """-> a function from states (N, 2) to frames (N, 3, SIZE, SIZE)."""
    return sac_clip_mountaincar.Scene(SIZE, SIZE, textures, torch.device("cpu")).draw


def mountaincar_scene(n: int, rng: np.random.Generator):
    """Cars anywhere on the track, a third of them near the flag; every second frame in each of the two looks."""
    x = np.where(rng.random(n) < 1 / 3, rng.uniform(0.2, 0.6, n), rng.uniform(-1.2, 0.6, n))
    states = torch.from_numpy(np.stack([x, 0 * x], axis=1))
    frames = torch.empty(n, 3, SIZE, SIZE, dtype=torch.uint8)
    for k, textures in enumerate(("original", "realistic")):
        frames[k::2] = draw_cars(textures)(states[k::2])

    x = x + 0.05 * rng.standard_normal(n)  # captions are judged by eye: no edge is sharp
    beyond = np.stack([x >= limit for limit, _, _ in MOUNTAINCAR_PLACES], axis=1)
    above = 100 * mountaincar_progress(x)[:, None] >= PERCENT
    valley = np.abs(x + math.pi / 6) < 0.2
    look = np.arange(n) % 2
    facts = np.concatenate([beyond, above, np.stack([valley, look], axis=1)], axis=1).astype(int)
    mentioned = np.zeros(facts.shape, dtype=bool)
    captions = []
    for i, says in enumerate(mentioned):
        text = ""
        while not text or holds_held_out(text):
            says[:] = False
            car = pick(rng, "a car|the car|car|a small car|a vehicle|an automobile")
            if rng.random() < 0.1:
                car, says[LOOK] = pick(rng, "a red car|the red car" if look[i] else "a black car|a drawing of a car"), True
            mountain = pick(rng, "the mountain|the hill|a mountain|the slope")
            flag = pick(rng, "the flag|the yellow flag|a yellow flag")
            kind = rng.random()
            if kind < 0.07:  # what the baseline says, in other words: true of every frame of the scene
                text = pick(
                    rng,
                    f"{car} in the mountains|{car} and {mountain}|{car}, {mountain} and {flag}|{car} with mountains|{mountain} with {car}|"
                    f"mountains, {car}|{car} on hilly ground|there is {car} in the hills|{car} in a mountain landscape",
                )
            elif kind < 0.3:
                k = rng.integers(len(PERCENT))
                says[len(MOUNTAINCAR_PLACES) + k] = True
                how = pick(rng, "more than|at least|over" if above[i, k] else "less than|not yet|under")
                text = f"{car} {how} {PERCENT[k]} percent of the way " + pick(rng, f"to {flag}|to the peak")
            else:
                phrases = []
                for _ in range(1 if rng.random() < 0.6 else 2):
                    if valley[i] and rng.random() < 0.4:
                        phrases.append(
                            "in the valley|at the bottom|at the bottom of the valley|at the foot of MOUNTAIN|between the hills"
                        )
                        says[VALLEY] = True
                    else:
                        can_say = [k for k, words in enumerate(MOUNTAINCAR_PLACES) if words[1 if beyond[i, k] else 2]]
                        k = rng.choice(can_say)
                        phrases.append(MOUNTAINCAR_PLACES[k][1 if beyond[i, k] else 2])
                        says[k] = True
                where = pick(rng, ", | and ").join(pick(rng, words) for words in phrases)
                text = pick(rng, f"{car} {where}|{car} {where}|{car} is {where}|{where}, {car}")
                text = text.replace("MOUNTAIN", mountain).replace("FLAG", flag)
        captions.append(text)
    return frames, captions, torch.from_numpy(facts), torch.from_numpy(mentioned)


# The humanoid's states come from physics: poses that are held, given up or reached, and the moments in between.
# Joint angles in degrees, of both sides alike; the left arm's two shoulder angles have the opposite sign.
LEGS = {  # hip x (-25..5, out), hip z (-60..35, outwards), hip y (-110..20, forwards), knee (-160..-2); waist y; lean of the trunk
    "straight": (0, 0, 0, -5, 0, 0),
    "straight as well": (0, 0, 0, -5, 0, 0),
    "apart": (-20, 0, 0, -5, 0, 0),
    "kneeling": (0, 0, -5, -95, 0, 0),
    "kneeling wide": (-20, -15, -15, -95, 0, 5),
    "kneeling low": (-10, -15, -40, -125, 0, 5),
    "on the heels": (0, 0, -70, -155, 0, 10),
    "lotus": (3, -58, -41, -158, -32, -10),
    "cross-legged": (-10, -56, -35, -157, -30, -20),
    "seated": (0, 0, -90, -10, 0, 0),
    "seated, knees up": (0, 0, -110, -110, 0, -15),
    "straddle": (-18, -58, -78, -8, 0, 0),
    "splits": (-20, -45, -85, -5, 0, 0),
    "squat": (0, 0, -105, -120, 0, 15),
    "bow": (0, 0, -80, -10, 0, 75),
    "bent knees": (0, 0, -50, -80, 0, 5),
}
ARMS = {  # shoulder 1 (-85..60), shoulder 2 (-85..60), elbow (-90..50) of the right arm
    "as at the start": (0, 0, 0),
    "down": (42, -39, -85),
    "forwards": (0, 39, -80),
    "raised": (-84, 20, -85),
    "raised, bent": (-80, 10, -20),
    "to the sides": (-50, -53, -52),
    "on the hips": (48, -75, -15),
    "pressed on the hips": (54, -61, -30),
    "crossed": (58, 38, -83),
    "low in front": (37, -24, -48),
}
MOTORS = [1, 0, *range(2, 17)]  # their order among the joints: the XML names the abdomen's y before its z
SNAPSHOTS = (0, 3, 8, 15, 25, 40)  # environment steps after which a pose is looked at


def poses(n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """n hand-made poses with generous noise: orientations of the trunk (n, 4), quaternions; joint angles (n, 17), in radians."""
    legs, arms = np.array(list(LEGS.values()), dtype=float), np.array(list(ARMS.values()), dtype=float)

    def some(poses: np.ndarray) -> np.ndarray:
        return poses[rng.integers(len(poses), size=n)]

    def change(share: float, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        return np.where(rng.random((n, 1)) < share, other, one)

    pose = some(legs)
    stand = rng.random((n, 1)) < 0.12  # on one leg, with the other anywhere
    pose = np.where(stand, legs[0], pose)
    free = rng.uniform((-25, -30, -110, -120), (0, 20, 0, -5), (n, 4))
    right, left = pose[:, :4], np.where(stand, free, change(0.2, pose, some(legs))[:, :4])
    right_arm = change(0.2, some(arms), rng.uniform((-85, -85, -90), (60, 60, 50), (n, 3)))
    left_arm = change(0.2, change(0.3, right_arm, some(arms)), rng.uniform((-85, -85, -90), (60, 60, 50), (n, 3)))
    both = rng.random((n, 1)) < 0.12  # stands, with both arms alike
    right, left = (np.where(both, legs[0, :4], leg) for leg in (right, left))
    alike = some(arms)
    right_arm, left_arm = np.where(both, alike, right_arm), np.where(both, alike, left_arm)
    swap, swap_arms = rng.random((2, n, 1)) < 0.5
    right, left = np.where(swap, left, right), np.where(swap, right, left)
    right_arm, left_arm = np.where(swap_arms, left_arm, right_arm), np.where(swap_arms, right_arm, left_arm)
    waist = rng.normal(0, (8, 12, 8), (n, 3)) + pose[:, 4:5] * [0, 1, 0]  # about z, y, x
    angles = np.concatenate([waist, right, left, right_arm, left_arm * [-1, -1, 1]], axis=1)
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
    angles = states[:, 7:] + np.radians(
        rng.choice([4, 10, 30], size=(n, 1))
        * rng.normal(0, 1, (n, 17))
        * (rng.random((n, 17)) < rng.choice([0.15, 0.4], size=(n, 1)))
    )
    turns = states[:, 3:7].astype(float)
    for turn, by, about in zip(turns, rng.normal(0, 0.25, (n, 3)), rng.normal(0, 0.6, n)):
        mujoco.mju_quatIntegrate(turn, by, 1)  # about the trunk's own axes ...
        yaw = np.array([math.cos(about / 2), 0, 0, math.sin(about / 2)])
        mujoco.mju_mulQuat(turn, yaw, turn.copy())  # ... and the vertical
    return turns, angles


def play(turns: np.ndarray, angles: np.ndarray, robots: list, rng: np.random.Generator) -> list[torch.Tensor]:
    """Poses as `poses` returns them, one for each robot (Gymnasium's) -> states (n, 24) after each number of steps in SNAPSHOTS.

    A quarter starts as every episode does, in the air and upright, and moves into the pose; the others start in it, most of them
    on the floor. Some hold it, firmly or weakly, some let go, and some jerk about.
    """
    n, model, seed = len(robots), robots[0].model, int(rng.integers(2**31))
    for i, robot in enumerate(robots):
        robot.reset(seed=seed + i)
    angles = angles.clip(*model.jnt_range[1:].T)
    for i in range(n // 4, n):
        data = robots[i].data
        data.qpos[:2], data.qpos[3:7], data.qpos[7:], data.qvel[:] = rng.normal(0, 0.3, 2), turns[i], angles[i], 0
        mujoco.mj_kinematics(model, data)
        below = data.geom_xpos[1:, 2] - model.geom_size[1:, 0] - abs(data.geom_xmat[1:, 8]) * model.geom_size[1:, 1]
        data.qpos[2] -= below.min() - rng.choice([0.005, rng.uniform(0, 0.3)], p=[0.8, 0.2])
        mujoco.mj_forward(model, data)
    hold = rng.choice([0, 0.3, 1], size=(n, 1), p=[0.15, 0.25, 0.6])
    jerk = rng.choice([0, 1], size=(n, 1), p=[0.7, 0.3])
    states = []
    with ThreadPoolExecutor() as pool:
        for step in range(SNAPSHOTS[-1] + 1):
            pose, speeds = np.stack([robot.data.qpos for robot in robots]), np.stack([robot.data.qvel for robot in robots])
            if step in SNAPSHOTS:
                states.append(torch.from_numpy(pose).float())
            if step % 5 == 0:
                shake = rng.uniform(-0.4, 0.4, (n, 17)) * jerk
            torques = hold * (1.5 * (angles - pose[:, 7:]) - 0.08 * speeds[:, 6:])
            motors = (torques[:, MOTORS] + shake).clip(-0.4, 0.4)
            list(pool.map(lambda robot, torque: robot.do_simulation(torque, robot.frame_skip), robots, motors))
    return states


def humanoid_states(n: int, rng: np.random.Generator) -> torch.Tensor:
    """n states (n, 24) of the humanoid: poses and what becomes of them, and variations of what came out, of each posture alike.

    The variations are what a policy finds that is paid for a posture: states around it in all directions.
    """
    num_envs = min(256, n)
    robots = [env.unwrapped for env in sac_clip_humanoid.make_envs(num_envs, sac_clip_humanoid.Args()).envs]
    states, showing = [], None
    with tqdm(total=n, desc="simulate the humanoid", unit="state", leave=False) as progress:
        while len(states) * num_envs < n:
            if len(states) * num_envs < n // 2:
                turns, angles = poses(num_envs, rng)
            else:
                if showing is None:
                    first = torch.cat(states)
                    locate = sac_clip_humanoid.Scene(8, 8, "original", "fixed", 1, 1024, torch.device("cpu"))
                    facts = humanoid_facts(locate.draw(first)[1], np.array([CAMERAS["fixed"]]), rng)
                    showing = [facts[name].nonzero()[:, 0].numpy() for name in list(facts)[:POSTURES] if facts[name].any()]
                parents = [rng.choice(showing[rng.integers(len(showing))]) for _ in range(num_envs)]
                turns, angles = variations(first[parents].numpy(), rng)
            states += play(turns, angles, robots, rng)
            progress.update(num_envs * len(SNAPSHOTS))
    states = torch.cat(states)
    return states[torch.from_numpy(rng.permutation(len(states))[:n])]


def humanoid_facts(p: dict[str, torch.Tensor], camera: np.ndarray, rng: np.random.Generator) -> dict[str, torch.Tensor]:
    """What holds where the parts of the body are p, name -> (n,) bool; the cameras (n, 3) m say which side is seen."""
    s = sac_clip_humanoid
    p = {
        name: where + 0.01 * torch.from_numpy(rng.standard_normal(where.shape)).float() for name, where in p.items()
    }  # by eye
    tilt, both = s.tilt(p), ("right", "left")
    head, seat = p["head"][:, 2], p["seat"][:, 2]
    knees, feet, hands = (torch.stack([p[f"{side}_{part}"][:, 2] for side in both]) for part in ("knee", "foot", "hand"))
    bends = torch.stack([s.bend(p, side) for side in both])
    forwards = torch.stack([s.forwards(p, f"{side}_hand") for side in both])
    outwards = torch.stack([-s.leftwards(p, "right_hand"), s.leftwards(p, "left_hand")])
    left, up = F.normalize(p["left_shoulder"] - p["right_shoulder"], dim=-1), F.normalize(p["head"] - p["seat"], dim=-1)
    front = torch.linalg.cross(left, up)
    to_camera = F.normalize((torch.from_numpy(camera).float() - p["seat"])[:, :2], dim=-1)
    seen = (F.normalize(front[:, :2], dim=-1) * to_camera).sum(-1)
    knees_down, feet_down, hands_down = knees < s.KNEE + 0.06, feet < s.FOOT + 0.06, hands < 0.04 + 0.08
    seated = seat < s.SEAT + 0.07
    from_hips = torch.stack([(p[f"{side}_hand"] - p[f"{side}_hip"]).norm(dim=-1) for side in both])
    elbows = torch.stack([s.bend(p, side, ("shoulder", "elbow", "hand")) for side in both])
    at_hips = (from_hips < 0.18) & (elbows > 50)
    beside = torch.stack([(p[f"{side}_hand"] - p["head"]).norm(dim=-1) for side in both])
    shoulders = torch.minimum(p["right_shoulder"][:, 2], p["left_shoulder"][:, 2])
    across = torch.stack([(p[f"{side}_hand"] - p[f"{other}_elbow"]).norm(dim=-1) for side, other in (both, both[::-1])])
    between_knees, between_feet = ((p[f"left_{part}"] - p[f"right_{part}"]).norm(dim=-1) for part in ("knee", "foot"))
    low_knees = (knees < 0.3).all(0) & (tilt < 60) & (seat > s.SEAT + 2 * s.FOOT)
    facts = {name: holds(p) for name, (_, holds) in s.TASKS.items()}
    over, not_kneeling, not_in_lotus = hands.amin(0) - head, ~facts["kneeling"], ~facts["lotus-position"]
    # What fulfils a condition only just no caption calls that, nor the opposite.
    facts["kneeling"] &= tilt <= 45  # who leans farther is close to falling
    facts["lotus-position"] &= (tilt <= 30) & (knees.amax(0) < s.KNEE + 0.05)  # sits bent over, or with a knee up
    facts["arms-raised"] &= over > 0.08  # a hand beside the head
    facts["hands-on-hips"] &= at_hips.all(0)  # hands near the hips
    facts["arms-crossed"] &= (outwards < -0.08).all(0)  # hands in front of the chest
    facts["standing-on-one-leg"] &= feet.amax(0) > s.FOOT + 0.18  # the other foot just off the floor
    facts |= {
        "nearly kneeling": low_knees & ~facts["kneeling"],
        "far from kneeling": ~low_knees & ~facts["kneeling"],
        "a knee lifted": low_knees & (knees.amin(0) < s.KNEE + 0.03) & (knees.amax(0) > s.KNEE + s.TOUCH),
        "one knee": knees_down.any(0) & ~knees_down.all(0) & feet_down.any(0) & (tilt < 45) & (seat > 0.25),
        "one arm raised": facts["standing-up"] & (hands > head).any(0) & ~(hands > head).all(0),
        "arms half raised": facts["standing-up"] & (hands > shoulders).all(0) & (over < 0.04),
        "a hand beside the head": facts["standing-up"] & (over < 0.04) & (beside < 0.35).any(0),
        "one hand on the hip": facts["standing-up"] & at_hips.any(0) & (from_hips > 0.25).any(0),
        "hands near the hips": facts["standing-up"]
        & (from_hips < 0.35).all(0)
        & (from_hips > 0.22).any(0)
        & (elbows > 40).all(0),
        "arms hanging": facts["standing-up"] & (hands < seat + 0.15).all(0) & (elbows < 40).all(0),
        "hands in front": facts["standing-up"]
        & (forwards > 0.1).all(0)
        & (outwards.abs() < 0.3).all(0)
        & (hands > seat + 0.25).all(0)
        & (hands < shoulders).all(0)
        & (outwards > -0.04).any(0),
        "a foot just lifted": facts["standing-up"] & (feet.amax(0) > s.FOOT + 0.04) & (feet.amax(0) < s.FOOT + 0.14),
        "seated, a knee up": seated & (tilt < 50) & (bends > 60).all(0) & (knees.amax(0) > s.KNEE + 2 * s.TOUCH),
        "seated, bent over": seated & (tilt > 35) & (front[:, 2] < -0.35) & (head > 0.4),
        "one leg stretched": (seat < s.SEAT + 0.15) & (bends < 40).any(0) & (bends > 55).any(0) & (tilt < 60),
        "on the heels": facts["kneeling"] & (seat < 0.36),
        "straight kneeling": facts["kneeling"] & (seat > 0.42),
        "seated": seated & (tilt < 50),
        "lying": (head < 0.4) & (tilt > 55),
        "on the back": (head < 0.4) & (tilt > 55) & (front[:, 2] > 0.6),
        "on the front": (head < 0.4) & (tilt > 55) & (front[:, 2] < -0.6),
        "all fours": knees_down.all(0) & hands_down.all(0) & (tilt > 40) & (seat > 0.25),
        "squatting": feet_down.all(0) & (bends > 75).all(0) & ~knees_down.any(0) & (seat < 0.65) & ~seated & (tilt < 60),
        "upright": tilt < 15,
        "trunk up": tilt < 35,
        "bent over": (tilt > 35) & (front[:, 2] < -0.35) & feet_down.any(0),
        "leaning back": (tilt > 30) & (front[:, 2] > 0.35),
        "in the air": torch.minimum(feet.amin(0), knees.amin(0)) > 0.2,
        "knees down": knees_down.all(0),
        "one knee down": knees_down.any(0),
        "feet down": feet_down.all(0),
        "a foot down": feet_down.any(0),
        "hand down": hands_down.any(0),
        "straight legs": (bends < 30).all(0),
        "bent knees": (bends > 60).all(0),
        "legs apart": s.spread(p) * (bends < 60).all(0) * (seat < 0.4) > 60,
        "wide stance": between_feet > 0.5,
        "knees apart": between_knees > 0.45,
        "hands up": over > 0.05,
        "one hand up": (hands > head).any(0) & ~(hands > head).all(0),
        "hands low": (hands < seat + 0.15).all(0) & ~at_hips.any(0),
        "hands at the hips": at_hips.all(0),
        "hands crossed": (outwards < -0.08).all(0) & (forwards > 0).all(0),
        "arms out": (outwards > 0.5).all(0) & (abs(forwards) < 0.3).all(0),
        "arms forward": (forwards > 0.4).all(0),
        "not kneeling": not_kneeling,
        "not in lotus": not_in_lotus,
        "arms not raised": over < 0,
        "from the front": seen > 0.7,
        "from behind": seen < -0.7,
        "from the side": abs(seen) < 0.6,
    }
    facts |= {f"head {cm}": head * 100 > cm for cm in HEAD_CM} | {f"seat {cm}": seat * 100 > cm for cm in SEAT_CM}
    facts |= {f"tilt {degrees}": tilt > degrees for degrees in TILTS}
    facts |= {f"knees {cm}": knees.amax(0) * 100 < cm for cm in KNEE_CM}
    facts |= {f"hands {cm}": hands.amin(0) * 100 > cm for cm in HAND_CM}
    facts |= {f"spread {degrees}": s.spread(p) > degrees for degrees in SPREADS}
    facts |= {f"bend {degrees}": bends.amax(0) > degrees for degrees in BENDS}
    facts |= {f"foot {cm}": feet.amax(0) * 100 > cm for cm in FOOT_CM}
    facts |= {f"over {cm}": over * 100 > cm for cm in OVER_CM}
    facts |= {f"hips {cm}": from_hips.amax(0) * 100 < cm for cm in HIPS_CM}
    facts |= {f"elbows {cm}": across.amax(0) * 100 < cm for cm in ELBOWS_CM}
    facts |= {f"between knees {cm}": between_knees * 100 > cm for cm in BETWEEN_CM}
    facts |= {f"between feet {cm}": between_feet * 100 > cm for cm in BETWEEN_CM}
    return facts


HEAD_CM, SEAT_CM, TILTS, KNEE_CM = (
    range(30, 151, 15),
    range(20, 91, 10),
    range(10, 91, 10),
    (8, 10, 12, 15, 20, 30, 40, 50, 60),
)
HAND_CM, SPREADS, BENDS, FOOT_CM = range(20, 181, 20), range(30, 111, 20), range(30, 121, 30), range(15, 76, 15)
OVER_CM, HIPS_CM, ELBOWS_CM, BETWEEN_CM = (
    (0, 10, 20, 30),
    (15, 20, 25, 30, 40, 60),
    (25, 30, 35, 40, 50, 60),
    range(20, 81, 20),
)
HUMANOID_WORDS = {  # what one says where a fact holds, and where it does not; most say something in one case only
    "kneeling": (
        "kneeling|kneeling down|on its knees|on both knees|kneeling on the floor|kneeling on both knees|down on its knees|"
        "in a kneeling position|kneeling upright|that kneels|kneeling on the ground|that is kneeling|that has knelt|"
        "after it knelt on the floor",
        "",
    ),
    "lotus-position": (
        "in the lotus position|meditating|seated in the lotus position|sitting in lotus pose|in a meditation pose|sitting cross-legged|"
        "seated with crossed legs|in lotus pose on the floor|meditating on the floor|seated down in the lotus position",
        "",
    ),
    "standing-up": (
        "standing|standing upright|standing up straight|on its feet|standing on its feet|standing tall|upright on its feet|that stands|"
        "standing up|up on its feet|standing on the floor",
        "not standing|not standing up|not on its feet",
    ),
    "arms-raised": (
        "standing with raised arms|standing with both arms raised|standing with both hands up|standing, arms in the air|"
        "upright, with both arms raised|standing and raising both arms|standing and holding both arms up",
        "",
    ),
    "doing-splits": (
        "doing the splits|doing side splits|practicing the splits|in the side splits|doing a straddle split|practicing gymnastics|"
        "doing gymnastics, legs wide apart on the floor|in a wide split|with its legs stretched to the sides on the floor",
        "not doing the splits|not in the splits",
    ),
    "hands-on-hips": (
        "standing with its hands on its hips|standing, hands on hips|on its feet, with both hands on the hips|"
        "standing with the hands at its hips",
        "",
    ),
    "arms-crossed": (
        "standing with crossed arms|standing with its arms crossed|standing with folded arms|on its feet, with its arms crossed",
        "",
    ),
    "standing-on-one-leg": (
        "standing on one leg|balancing on one leg|standing on one foot|on one leg|standing with one leg lifted|up on one leg|"
        "standing with one foot off the floor",
        "",
    ),
    "nearly kneeling": ("almost kneeling|nearly on its knees|close to kneeling|about to kneel", ""),
    "far from kneeling": ("far from kneeling|nowhere near kneeling", ""),
    "a knee lifted": (
        "almost kneeling, one knee off the floor|low down, with one knee lifted off the floor|with only one knee touching",
        "",
    ),
    "one knee": ("on one knee|down on one knee|with one knee on the floor and one foot in front|half kneeling", ""),
    "one arm raised": (
        "standing with one arm raised|standing with only one hand up|standing and raising one arm only|on its feet, with one arm up|"
        "standing, one arm in the air and the other one down",
        "",
    ),
    "arms half raised": (
        "standing with half raised arms|standing, arms raised no higher than its head|standing with its arms not quite raised",
        "",
    ),
    "a hand beside the head": (
        "standing with a hand beside its head|standing, a hand at its head|standing and holding a hand at its head",
        "",
    ),
    "one hand on the hip": ("standing with one hand on its hip|standing, only one hand on the hips", ""),
    "hands near the hips": ("standing with its hands near its hips|standing, hands close to the hips but not on them", ""),
    "arms hanging": (
        "standing with lowered arms|standing, both hands low|on its feet, with its arms down|standing with hanging arms",
        "",
    ),
    "hands in front": (
        "standing with its hands in front of the chest|standing, both hands in front of its trunk|standing with its arms in front, not crossed",
        "",
    ),
    "a foot just lifted": (
        "standing with a foot just off the floor|standing, one foot barely lifted",
        "",
    ),
    "seated, a knee up": (
        "sitting with a knee lifted off the floor|seated with a knee up in the air|sitting with bent legs, a knee raised",
        "",
    ),
    "seated, bent over": (
        "sitting bent over|sitting and bending forwards|seated with its trunk bent forwards|hunched on the floor",
        "",
    ),
    "one leg stretched": (
        "sitting with one leg stretched and the other one bent|seated, only one leg stretched|on the floor, one leg straight and one bent|"
        "sitting, one leg out to the side, one in front",
        "",
    ),
    "on the heels": ("sitting on its heels|kneeling and sitting on its heels|kneeling low", ""),
    "straight kneeling": ("kneeling with straight hips|kneeling tall|kneeling with its trunk high", ""),
    "seated": ("sitting|seated|sitting down|seated on the floor|sitting on the floor|seated down", "not sitting|not seated"),
    "lying": (
        "lying down|lying on the floor|lying|fallen over|fallen down|collapsed on the floor|lying flat",
        "not lying down",
    ),
    "on the back": ("lying on its back|fallen on its back", ""),
    "on the front": ("lying on its belly|fallen on its face|lying face down", ""),
    "all fours": ("on all fours|crawling|on hands and knees", ""),
    "squatting": ("squatting|crouching|in a squat|in a deep crouch", ""),
    "upright": (
        "with its trunk vertical|with an upright trunk|with a straight back",
        "with its trunk tilted|with a leaning trunk",
    ),
    "trunk up": ("with its trunk up|keeping its balance|in balance", "losing its balance|falling|tipping over"),
    "bent over": ("bending forwards|bowing|bent over", ""),
    "leaning back": ("leaning back|bending backwards|falling backwards", ""),
    "in the air": ("in the air|jumping|off the ground|above the floor", ""),
    "knees down": (
        "with both knees on the floor|with its knees on the ground|both knees touching the floor",
        "without both knees down",
    ),
    "one knee down": ("", "with no knee on the floor|with its knees in the air|with its knees off the ground"),
    "feet down": ("with both feet on the floor|with its feet on the ground", ""),
    "a foot down": ("", "with no foot on the floor|with its feet in the air"),
    "hand down": ("with a hand on the floor|touching the floor with a hand|leaning on a hand", "with no hand on the floor"),
    "straight legs": ("with straight legs|with stretched legs", "with bent legs"),
    "bent knees": ("with both knees bent|with strongly bent knees", ""),
    "legs apart": ("with its legs spread wide|with its legs stretched to the sides|with spread legs on the floor", ""),
    "wide stance": ("with its feet far apart|with feet wide apart", "with its feet close together|with its feet together"),
    "knees apart": ("with its knees far apart|with knees facing outwards", "with its knees together"),
    "hands up": (
        "with both arms raised|with raised arms|with its hands up|with both hands above its head|with its arms up|raising both arms",
        "",
    ),
    "one hand up": ("with one arm raised|raising one hand|with one hand up", ""),
    "hands low": ("with its arms hanging down|with lowered arms|with both hands low", ""),
    "hands at the hips": ("with hands on its hips|with both hands on the hips|with hands at its waist|hands on hips", ""),
    "hands crossed": ("with crossed arms|with its arms crossed|with folded arms", ""),
    "arms out": ("with its arms stretched to the sides|with its arms spread out|in a T pose", ""),
    "arms forward": ("with its arms stretched forwards|reaching forwards", ""),
    "not kneeling": ("not kneeling|not on its knees|that has not knelt", ""),
    "not in lotus": ("not in the lotus position|not meditating", ""),
    "arms not raised": ("with its arms not raised|without both hands up", ""),
    "from the front": ("facing the camera|seen from the front|looking at us", ""),
    "from behind": ("seen from behind|turning its back on us|facing away", ""),
    "from the side": ("seen from the side|in profile|turned to the side", ""),
}
NAMED = len(HUMANOID_WORDS)  # the other facts are measures
for name, limits, yes, no in (
    (
        "head",
        HEAD_CM,
        "with its head higher than N cm|with its head above N cm",
        "with its head lower than N cm|with its head below N cm",
    ),
    (
        "seat",
        SEAT_CM,
        "with its hips higher than N cm|with its hips above N cm",
        "with its hips lower than N cm|with its hips below N cm",
    ),
    ("tilt", TILTS, "leaning more than N degrees|tilted over N degrees", "leaning less than N degrees|tilted under N degrees"),
    (
        "knees",
        KNEE_CM,
        "with both knees lower than N cm|with its knees below N cm",
        "with a knee higher than N cm|with a knee above N cm",
    ),
    (
        "hands",
        HAND_CM,
        "with both hands higher than N cm|with its hands above N cm",
        "with a hand lower than N cm|with a hand below N cm",
    ),
    ("spread", SPREADS, "with more than N degrees between its legs", "with less than N degrees between its legs"),
    (
        "bend",
        BENDS,
        "with a knee bent more than N degrees|with a knee bent over N degrees",
        "with both knees bent less than N degrees|with both legs straight within N degrees",
    ),
    (
        "foot",
        FOOT_CM,
        "with a foot higher than N cm|with a foot above N cm",
        "with both feet lower than N cm|with both feet below N cm",
    ),
    (
        "over",
        OVER_CM,
        "with both hands more than N cm above its head|with its hands over N cm above the head",
        "with a hand less than N cm above its head|with a hand not N cm above the head",
    ),
    (
        "hips",
        HIPS_CM,
        "with both hands within N cm of its hips|with its hands less than N cm from the hips",
        "with a hand more than N cm from its hip|with a hand over N cm from the hips",
    ),
    (
        "elbows",
        ELBOWS_CM,
        "with each hand within N cm of the other elbow|with its hands under N cm from the elbows",
        "with a hand over N cm from the other elbow|with a hand over N cm from the elbows",
    ),
    (
        "between knees",
        BETWEEN_CM,
        "with its knees more than N cm apart|with over N cm between its knees",
        "with its knees less than N cm apart|with under N cm between its knees",
    ),
    (
        "between feet",
        BETWEEN_CM,
        "with its feet more than N cm apart|with over N cm between its feet",
        "with its feet less than N cm apart|with under N cm between its feet",
    ),
):
    for limit in limits:
        HUMANOID_WORDS[f"{name} {limit}"] = (yes.replace("N", str(limit)), no.replace("N", str(limit)))
POSTURES = 31  # so many of the first entries say what the robot does; the others describe parts of it
LOOKS = (
    "a colourful robot on a tiled floor under a blue sky|a white and blue robot",
    "a brown figure on a chequered floor|a brown robot in the dark",
)
CAMERAS = {"fixed": (3.5, 0, 1.6), "original": (0, -4, 1.4)}  # about where they stand


class HumanoidScene:
    """Humanoids in all kinds of poses, simulated and drawn once; each call is another random choice of them, newly described."""

    def __init__(self, n: int, rng: np.random.Generator):
        states = humanoid_states(n, rng)
        looks = (
            ("realistic", "fixed", 0.7),
            ("original", "fixed", 0.1),
            ("realistic", "original", 0.1),
            ("original", "original", 0.1),
        )
        self.frames = torch.empty(n, 3, SIZE, SIZE, dtype=torch.uint8)
        facts, first = [], 0
        for textures, camera, share in looks:  # the states are in random order
            part = slice(first, n if (textures, camera) == looks[-1][:2] else first + int(share * n))
            first = part.stop
            scene = sac_clip_humanoid.Scene(SIZE, SIZE, textures, camera, 1, 128, torch.device("cpu"))
            points = []
            for i in torch.arange(n)[part].split(1024):
                self.frames[i], where = scene.draw(states[i])
                points.append(where)
            p = {name: torch.cat([some[name] for some in points]) for name in points[0]}
            place = np.array(CAMERAS[camera]) + (p["seat"].numpy() * [1, 1, 0] if camera == "original" else 0)
            facts.append(humanoid_facts(p, place, rng) | {"look": torch.full((len(p["seat"]),), textures == "realistic")})
        self.names = list(facts[0])
        self.facts = torch.stack([torch.cat([some[name] for some in facts]) for name in self.names], dim=1)  # (n, F) bool
        self.rarity = self.facts.float().mean(0).clamp(1e-3)[:POSTURES].rsqrt().numpy()
        showing = [self.facts[:, k].nonzero()[:, 0].numpy() for k in range(POSTURES)]
        self.showing = [i for i in showing if len(i)]

    def __call__(self, n: int, rng: np.random.Generator):
        i = rng.integers(len(self.facts), size=n)
        for k in range(n // 2):  # half are chosen for what they show, each posture as often as another
            i[k] = rng.choice(self.showing[rng.integers(len(self.showing))])
        i = torch.from_numpy(i)
        facts = self.facts[i]
        mentioned = np.zeros(facts.shape, dtype=bool)
        captions = [self.describe(holds, says, rng) for holds, says in zip(facts.numpy(), mentioned)]
        return self.frames[i], captions, facts.int(), torch.from_numpy(mentioned)

    def describe(self, holds: np.ndarray, says: np.ndarray, rng: np.random.Generator) -> str:
        """A caption for a frame of which the facts `holds` (F,) are known; marks in `says` (F,) those that it speaks of."""
        text = ""
        while not text or holds_held_out(text):
            says[:] = False
            subject = pick(rng, "a robot|the robot|a humanoid|a humanoid robot|the humanoid robot|a mechanical man|robot")
            kind = rng.random()
            if kind < 0.05:  # what the baseline says, in other words: true of every frame of the scene
                text = pick(
                    rng, f"{subject} in some pose|{subject}|a picture of {subject}|this is {subject}|{subject} doing something"
                )
            elif kind < 0.08:
                text, says[-1] = pick(rng, LOOKS[0 if holds[-1] else 1]), True
            else:
                words = [HUMANOID_WORDS[name][0 if holds[k] else 1] for k, name in enumerate(self.names[:-1])]
                does = [k for k in range(POSTURES) if words[k] and holds[k]]
                lacks = [k for k in range(POSTURES) if words[k] and not holds[k]]
                parts = [k for k in range(POSTURES, NAMED) if words[k]]
                measures = [k for k in range(NAMED, len(words)) if words[k]]
                chosen = [rng.choice((lacks, parts, measures)[rng.integers(3)])]
                if does and rng.random() < 0.55:  # the rarer a posture, the more it is worth telling
                    chosen = [rng.choice(does, p=self.rarity[does] / self.rarity[does].sum())]
                if rng.random() < 0.4:
                    chosen.append(rng.choice(parts if rng.random() < 0.6 else measures))
                says[chosen] = True
                phrases = [pick(rng, words[k]) for k in dict.fromkeys(chosen)]
                verb = "is" if rng.random() < 0.4 and not phrases[0].startswith(("with", "that")) else ""
                text = f"{subject} {verb} {pick(rng, ', | and |, ').join(phrases)}"
            text = " ".join(text.replace(" ,", ",").split())
        return text


# ---- Training


def is_true(facts: torch.Tensor, mentioned: torch.Tensor) -> torch.Tensor:
    """(captions i, frames j) bool: does caption i hold for frame j?"""
    facts, mentioned = facts.float(), mentioned.float()
    # Sum over the mentioned facts of (fact of i - fact of j)², multiplied out: matrix products of small whole numbers, hence exact.
    mine, square = mentioned * facts, facts.square()
    return (mine * facts).sum(1, keepdim=True) - 2 * mine @ facts.T + mentioned @ square.T == 0


def contrastive_loss(image: torch.Tensor, text: torch.Tensor, scale: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """CLIP's symmetric loss with all true pairs of the batch as targets, not only the diagonal (as in UniCL, Yang et al. 2022).

    Each caption is true of many frames. Were those its negatives, the loss would fight itself; as positives they also give a
    general caption ("a cart with a pole") its place: equally close to all frames of its scene.
    """
    logits = scale * text @ image.T  # (captions i, frames j)
    of_text, of_image = true / true.sum(1, keepdim=True), true.T / true.T.sum(1, keepdim=True)
    return (F.cross_entropy(logits, of_text) + F.cross_entropy(logits.T, of_image)) / 2


class Learner:
    """A model, and what trains it."""

    def __init__(self, width: int, args: Args):
        torch.manual_seed(args.seed)
        self.cfg = MODEL_CFG | {"vision_cfg": MODEL_CFG["vision_cfg"] | {"width": width}}
        self.model = open_clip.CLIP(**self.cfg)
        self.model.visual.to(memory_format=torch.channels_last)  # twice as fast for convolutions on a CPU
        matrices = [p for p in self.model.parameters() if p.ndim >= 2]
        others = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.98), eps=1e-6, fused=True)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, args.learning_rate, args.steps, pct_start=0.1, cycle_momentum=False
        )
        self.parts = (self.model, self.optimizer, self.schedule)

    def step(self, pixels: torch.Tensor, tokens: torch.Tensor, true: torch.Tensor) -> float:
        """One update -> the loss."""
        image, text = self.model.encode_image(pixels, normalize=True), self.model.encode_text(tokens, normalize=True)
        loss = contrastive_loss(image, text, self.model.logit_scale.exp(), true)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        with torch.no_grad():
            self.model.logit_scale.clamp_(0, math.log(100))
        return loss.item()

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: w.half() if w.is_floating_point() else w for name, w in self.model.state_dict().items()}
        save_file({k: w.contiguous() for k, w in weights.items()}, folder / "weights.tmp")
        (folder / "weights.tmp").replace(folder / "open_clip_model.safetensors")
        config = {"model_cfg": self.cfg, "preprocess_cfg": PREPROCESS_CFG}
        (folder / "open_clip_config.json").write_text(json.dumps(config, indent=2) + "\n")


def folders(args: Args) -> dict[int, Path]:
    """The folder of each width."""
    return {width: args.output / f"width_{width}" if len(args.widths) > 1 else args.output for width in args.widths}


def train(args: Args) -> None:
    if len(set(args.widths)) < max(len(args.widths), 1) or any(width < 2 or width % 2 for width in args.widths):
        raise UsageError(f"--widths must be different even numbers, not {args.widths}")
    if args.steps < 1 or args.batch_size < 32 or args.humanoid_states < 1:
        raise UsageError("--steps and --humanoid-states must be at least 1, --batch-size at least 32")
    try:
        args.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {args.output}: {error.strerror}") from None
    rng = np.random.default_rng(args.seed)
    tokenizer = open_clip.SimpleTokenizer(context_length=MODEL_CFG["text_cfg"]["context_length"])
    learners = [Learner(width, args) for width in args.widths]
    checkpoint, first, kept = args.output / "training.pt", 0, None
    settings = {k: v for k, v in asdict(args).items() if k not in ("evaluate", "output", "resume")}
    if checkpoint.is_file() and not args.resume:
        raise UsageError(f"{checkpoint} is of a training that was interrupted: --resume it, or remove the file")
    if args.resume:
        if not checkpoint.is_file():
            raise UsageError(f"no training was interrupted in {args.output}: it holds no {checkpoint.name}")
        kept = torch.load(checkpoint, weights_only=True)
        other = [f"--{name.replace('_', '-')} {value}" for name, value in kept["settings"].items() if settings[name] != value]
        if other:
            raise UsageError(f"the training in {args.output} had {', '.join(other)}")
    scenes_and_shares = ((cartpole_scene, 0.23), (mountaincar_scene, 0.25), (HumanoidScene(args.humanoid_states, rng), 0.52))
    if kept:
        first, rng.bit_generator.state = kept["step"], kept["rng"]
        for learner, states in zip(learners, kept["learners"]):
            for part, state in zip(learner.parts, states):
                part.load_state_dict(state)

    def make_batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict]:
        """-> pixels, tokens, which caption is true of which frame, and the generator's state afterwards."""
        # All scenes in each batch: batch normalization has to see the mixture of them that it uses later.
        scenes = [scene(int(share * args.batch_size), rng) for scene, share in scenes_and_shares]
        captions = [caption for _, captions, _, _ in scenes for caption in captions]
        true = torch.block_diag(*(is_true(facts, mentioned).float() for _, _, facts, mentioned in scenes))
        pixels = torch.cat([frames for frames, _, _, _ in scenes]).float() / 127.5 - 1
        pixels = pixels.contiguous(memory_format=torch.channels_last)
        return pixels, tokenizer(captions), true, rng.bit_generator.state

    # The next batch is made while this one is learned from.
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        progress = trange(first, args.steps, initial=first, total=args.steps, desc="train tiny_clip", unit="step")
        coming = pool.submit(make_batch)
        for step in progress:
            *batch, state = coming.result()
            coming = pool.submit(make_batch)
            losses = [learner.step(*batch) for learner in learners]
            if step % 10 == 0:
                progress.set_postfix(loss=", ".join(f"{loss:.3f}" for loss in losses))
            if (step + 1) % SAVE_EVERY == 0:
                content = {"settings": settings, "step": step + 1, "rng": state}
                content["learners"] = [[part.state_dict() for part in learner.parts] for learner in learners]
                torch.save(content, checkpoint.with_suffix(".tmp"))
                checkpoint.with_suffix(".tmp").replace(checkpoint)
        coming.cancel()
    for learner, folder in zip(learners, folders(args).values()):
        learner.save(folder)
    checkpoint.unlink(missing_ok=True)


# ---- Held-out figures


def epic_distance(reward: torch.Tensor, label: torch.Tensor) -> float:
    """EPIC distance of a reward to a label, both functions of the state: sqrt((1 - Pearson correlation) / 2) (paper, Lemma 1)."""
    correlation = torch.corrcoef(torch.stack([reward.double(), label.double()]))[0, 1].item()
    return math.sqrt((1 - correlation) / 2)


@torch.no_grad()
def evaluate_cartpole(folder: Path, n: int = 10_000) -> None:
    """Print EPIC distances and the angle of the highest reward on held-out states, the whole cart in the picture.

    The label is CartPole-v1's own limit, at most 12° from upright; half the states have it, the others lie anywhere beyond. The
    highest reward is looked for in steps of half a degree, averaged over cart positions.
    """
    rng = np.random.default_rng(10_000)  # training uses other states
    degrees = np.concatenate([rng.uniform(-12, 12, n // 2), rng.choice([-1, 1], n // 2) * rng.uniform(12, 180, n // 2)])
    states = torch.zeros(n, 4)
    states[:, 0] = torch.from_numpy(rng.uniform(-2.2, 2.2, n))
    states[:, 2] = torch.from_numpy(np.radians(degrees))
    upright = torch.from_numpy(np.abs(degrees) <= 12)
    angles, places = torch.linspace(-180, 180, 721), torch.linspace(-2.2, 2.2, 25)
    sweep = torch.zeros(721, 25, 4)
    sweep[..., 0], sweep[..., 2] = places, torch.deg2rad(angles)[:, None]

    reward_model = CLIPReward(f"local-dir:{folder}", CARTPOLE_PROMPT)

    def embed(states: torch.Tensor) -> torch.Tensor:
        return torch.cat([reward_model.embed(dqn_clip_cartpole.draw(chunk, SIZE, SIZE)) for chunk in states.split(256)])

    start = time.time()
    embedded = embed(states)
    speed = n / (time.time() - start)
    swept = embed(sweep.flatten(0, 1))
    print(
        f"\n{speed:.0f} frames/s drawn and encoded\n\n| prompt | α | EPIC distance | highest reward at | reward at 0, 12, 45, 180° |"
    )
    print("|---|---|---|---|---|")
    for prompt in (CARTPOLE_PROMPT, *CARTPOLE_REWORDINGS):
        for alpha in (0.0, 0.25, 0.5, 0.75, 1.0) if prompt == CARTPOLE_PROMPT else (0.0, 0.5):
            reward_model = CLIPReward(f"local-dir:{folder}", prompt, CARTPOLE_BASELINE, alpha)
            distance = epic_distance(reward_model.reward(embedded), upright)
            curve = reward_model.reward(swept).view(721, 25).mean(1)
            some = ", ".join(f"{curve[360 + 2 * degree]:.2f}" for degree in (0, 12, 45, 180))
            print(f"| {prompt} | {alpha} | {distance:.3f} | {angles[curve.argmax()]:+.1f}° | {some} |")


@torch.no_grad()
def evaluate_mountaincar(folder: Path, n: int = 10_000) -> None:
    """Print EPIC distances and the x of the highest reward on held-out states, x uniform over the track.

    The label is `mountaincar_progress`. Unlike height, it does not count the left hill as a success, and unlike a 0/1 label it
    sees whether the reward shows the way.
    """
    x = torch.from_numpy(np.random.default_rng(20_000).uniform(-1.2, 0.6, n))  # training uses other states
    label = torch.from_numpy(mountaincar_progress(x.numpy()))
    places = torch.linspace(-1.2, 0.6, 361)
    print("\n| prompt | textures | α | EPIC distance | highest reward at x | reward at x = -1.2, -0.52, 0, 0.45 |")
    print("|---|---|---|---|---|---|")
    reward_model = CLIPReward(f"local-dir:{folder}", MOUNTAINCAR_PROMPT)
    for textures in ("original", "realistic"):

        def embed(x: torch.Tensor, textures: str = textures) -> torch.Tensor:
            chunks = torch.stack([x, 0 * x], dim=1).split(256)
            return torch.cat([reward_model.embed(draw_cars(textures)(chunk)) for chunk in chunks])

        embedded, swept = embed(x), embed(places)
        for prompt in (MOUNTAINCAR_PROMPT, *MOUNTAINCAR_REWORDINGS):
            for alpha in (0.0, 0.25, 0.5, 0.75, 1.0) if prompt == MOUNTAINCAR_PROMPT else (0.0, 0.5):
                scored = CLIPReward(f"local-dir:{folder}", prompt, MOUNTAINCAR_BASELINE, alpha)
                distance = epic_distance(scored.reward(embedded), label)
                curve = scored.reward(swept)
                some = ", ".join(f"{curve[k]:.2f}" for k in (0, 136, 240, 330))
                print(f"| {prompt} | {textures} | {alpha} | {distance:.3f} | {places[curve.argmax()]:+.2f} | {some} |")


def roc_auc(reward: torch.Tensor, label: torch.Tensor) -> float:
    """Probability that a state with the label is rewarded more than one without."""
    rank = torch.empty(len(reward), dtype=torch.float64)
    rank[reward.argsort()] = torch.arange(1, len(reward) + 1, dtype=torch.float64)
    positive = label.sum().item()
    return (rank[label].sum().item() - positive * (positive + 1) / 2) / (positive * (len(label) - positive))


@torch.no_grad()
def evaluate_humanoid(folder: Path, n: int = 20_000) -> None:
    """Print ROC AUC and EPIC distances on held-out states: for each task the states that fulfil its condition, and as many others."""
    rng = np.random.default_rng(30_000)  # training uses other states
    states = humanoid_states(n, rng)
    reward_model = CLIPReward(f"local-dir:{folder}", HUMANOID_BASELINE)
    print(
        "\n| prompt | textures | camera | states | ROC AUC | EPIC distance, α = 0 | 0.25 | 0.5 | 0.75 |\n" + "|---" * 9 + "|"
    )
    for textures, camera in (("realistic", "fixed"), ("original", "original")):
        scene = sac_clip_humanoid.Scene(SIZE, SIZE, textures, camera, 1, 128, torch.device("cpu"))
        embedded, points = [], []
        for chunk in states.split(1024):
            frames, where = scene.draw(chunk)
            embedded.append(reward_model.embed(frames))
            points.append(where)
        embedded, p = torch.cat(embedded), {name: torch.cat([some[name] for some in points]) for name in points[0]}
        kneeling = sac_clip_humanoid.TASKS["kneeling"][1]
        prompts = [(prompt, holds) for prompt, holds in sac_clip_humanoid.TASKS.values()]
        for prompt, holds in prompts + [(prompt, kneeling) for prompt in KNEELING_REWORDINGS]:
            goal = holds(p)
            yes, no = goal.nonzero()[:, 0], (~goal).nonzero()[:, 0]
            k = min(len(yes), len(no))
            i = torch.cat([some[torch.from_numpy(rng.permutation(len(some))[:k])] for some in (yes, no)])
            if k == 0:
                continue
            rewards = [
                CLIPReward(f"local-dir:{folder}", prompt, HUMANOID_BASELINE, alpha).reward(embedded)
                for alpha in (0, 0.25, 0.5, 0.75)
            ]
            distances = " | ".join(f"{epic_distance(reward[i], goal[i]):.3f}" for reward in rewards)
            print(f"| {prompt} | {textures} | {camera} | {2 * k} | {roc_auc(rewards[0][i], goal[i]):.3f} | {distances} |")


if __name__ == "__main__":
    args = tyro.cli(Args)
    try:
        if not args.evaluate:
            train(args)
        for folder in folders(args).values():
            print(f"\n{folder}")
            evaluate_cartpole(folder)
            evaluate_mountaincar(folder)
            evaluate_humanoid(folder)
    except UsageError as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        resumable = (args.output / "training.pt").is_file()
        print("interrupted; it goes on with --resume" if resumable else "interrupted", file=sys.stderr)
        sys.exit(130)
