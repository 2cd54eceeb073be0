"""Train the bundled model: a small CLIP that knows nothing but the scenes of this project.

    python tiny_clip/train.py             # train, write the model into this folder, print the held-out figures
    python tiny_clip/train.py --evaluate  # only the held-out figures

Frames are drawn by the scripts' own drawing functions, for every batch anew (the humanoid's once, before the training). What captions
say of them is a table, captions.csv. To add a scene, write a function like `mountaincar`, its lines of the table, and its share in
`SHARES`.
"""

import csv
import json
import math
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

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
TOKENIZER = open_clip.SimpleTokenizer(context_length=MODEL_CFG["text_cfg"]["context_length"])
SHARES = {"cartpole": 0.21, "mountaincar": 0.22, "humanoid": 0.57}  # of a batch
FACTS = 5  # weight of `fact_loss`

with open(HERE / "captions.csv", newline="") as file:
    TABLE = list(csv.DictReader(file))

# Never in a caption: the paper's goal and baseline prompts (the reward has to come from understanding other wordings), and further
# wordings, to see how much depends on the words. The last two of kneeling were written down before the training, and never tuned for.
CARTPOLE_PROMPT, CARTPOLE_BASELINE = *dqn_clip_cartpole.Args.prompt, *dqn_clip_cartpole.Args.baseline_prompt
MOUNTAINCAR_PROMPT, MOUNTAINCAR_BASELINE = *sac_clip_mountaincar.Args.prompt, *sac_clip_mountaincar.Args.baseline_prompt
HUMANOID_PROMPTS = {task: prompt for task, (prompt, _) in sac_clip_humanoid.TASKS.items()}
(HUMANOID_BASELINE,) = sac_clip_humanoid.Args.baseline_prompt  # only as a whole: every other caption may say what it does
REWORDINGS = {row["scene"]: row["words"].split("|") for row in TABLE if row["kind"] == "rewording"}
HELD_OUT = {CARTPOLE_PROMPT, CARTPOLE_BASELINE, MOUNTAINCAR_PROMPT, MOUNTAINCAR_BASELINE, *HUMANOID_PROMPTS.values()}
HELD_OUT |= {sentence for sentences in REWORDINGS.values() for sentence in sentences}


@dataclass
class Args:
    """Train tiny_clip from nothing and write it into this folder."""

    evaluate: bool = False  # only print the held-out figures of the model in `output`
    output: Path = HERE  # folder for the model
    resume: bool = False  # go on with the training in `output` that was interrupted, with the same settings
    steps: int = 2400  # optimizer steps
    batch_size: int = 1024  # image-text pairs a step, over all scenes
    humanoid_states: int = 120_000  # simulated and drawn before the training; the other scenes are drawn anew for each batch
    learning_rate: float = 2e-3  # peak of the cosine schedule
    weight_decay: float = 0.05  # of AdamW, on matrices only
    seed: int = 1  # of weights, states and captions


# ---- Captions

CHANCES = (0.55, 0.15, 0.15, 0.15), (0.1, 0.1, 0.45, 0.35)  # of what is said first, and second: see `Captions.groups`
CAR_CHANCES = (1, 1, 0, 0.25), (1, 1, 0, 0.25)  # of each line by itself: that the flag is still far shows the way to it
SECOND, STREWN = 0.4, 0.3  # how many captions say a second thing, and have words of no meaning strewn in


class Line(NamedTuple):
    """A line of captions.csv, for one number of its column N."""

    kind: str
    condition: object  # compiled
    unless: object  # compiled
    words: tuple[list[str], list[str], list[str]]  # by fact: not so, so, and (none) neither


class Captions:
    """What may be said of a scene's frames: its lines of captions.csv, each a condition on what is known of a frame.

    Alternatives are separated by |, words in capitals are replaced by one of the alternatives in the line of that kind. Kinds:
    "posture" is what somebody does, "part" a detail, "measure" one with numbers (a line for each number N), "whole" a sentence by
    itself, "caption" a sentence around a PHRASE of the other kinds. `words` are for frames in which the condition holds, `otherwise`
    for those in which it does not. Where `unless` holds neither is said, and no caption about the condition is true.
    """

    def __init__(self, scene: str):
        rows = [row for row in TABLE if row["scene"] == scene and row["kind"] != "rewording"]
        self.alternatives = {row["kind"]: row["words"].split("|") for row in rows if not row["condition"]}
        self.lines, self.rarity, self.by_line = [], None, scene == "mountaincar"
        for row in rows:
            for number in row["N"].split() or [""] if row["condition"] else []:
                fill = partial(re.sub, r"\bN\b", number)
                words = tuple([w for w in fill(row[column]).split("|") if w] for column in ("otherwise", "words"))
                conditions = fill(row["condition"]), fill(row["unless"] or "False")
                code = [compile(text, f"captions.csv: {text}", "eval") for text in conditions]
                self.lines.append(Line(row["kind"], *code, (*words, [])))
        self.can_say = np.array([[len(words) > 0 for words in line.words] for line in self.lines])  # (F, 3)
        self.kinds = np.array([line.kind for line in self.lines])

    def judge(self, known: dict[str, np.ndarray]) -> np.ndarray:
        """What is known of n frames, name -> (n,) -> facts (n, F): 1 where a line's condition holds, 0 where not, 2 where `unless` does."""
        columns = [np.where(eval(line.unless, {}, known), 2, eval(line.condition, {}, known)) for line in self.lines]
        n = len(next(iter(known.values())))
        facts = np.stack([np.broadcast_to(column, n) for column in columns], axis=1)
        if self.rarity is None:  # of what the first frames show
            self.rarity = (facts == 1).mean(0).clip(1e-3) ** -0.5
        return facts

    def groups(self, facts: np.ndarray) -> list[np.ndarray]:
        """Lines that can be said of a frame with these facts (F,): postures that it shows, others that it lacks, parts, measures, wholes."""
        can_say = self.can_say[np.arange(len(facts)), facts]
        postures = can_say & (self.kinds == "posture")
        others = [can_say & (self.kinds == kind) for kind in ("part", "measure", "whole")]
        return [np.flatnonzero(lines) for lines in (postures & (facts == 1), postures & (facts == 0), *others)]

    def describe(self, facts: np.ndarray, rng: np.random.Generator) -> tuple[str, list[int]]:
        """Facts of a frame (F,) -> a caption, and which lines it speaks of."""
        *groups, wholes = self.groups(facts)
        first, second = CAR_CHANCES if self.by_line else CHANCES

        def pick(words: list[str]) -> str:
            return words[rng.integers(len(words))]

        def choose(chances: tuple[float, ...]) -> int:
            weigh = len if self.by_line else lambda group: len(group) > 0
            chances = np.cumsum([chance * weigh(group) for chance, group in zip(chances, groups)])
            k = int(np.searchsorted(chances, rng.random() * chances[-1], side="right"))
            if k > 0:
                return int(rng.choice(groups[k]))
            rarity = np.cumsum(self.rarity[groups[0]])  # the rarer a posture, the more it is worth telling
            return int(groups[0][np.searchsorted(rarity, rng.random() * rarity[-1], side="right")])

        while True:
            if rng.random() < 0.1:
                said = [int(rng.choice(wholes))]
                text = pick(self.lines[said[0]].words[facts[said[0]]])
            else:
                said = [choose(first)] + ([choose(second)] if rng.random() < SECOND else [])
                said = list(dict.fromkeys(said))
                phrases = pick([", ", " and ", ", "]).join(pick(self.lines[k].words[facts[k]]) for k in said)
                text = pick(self.alternatives["caption"]).replace("PHRASE", phrases)
            while found := re.search("[A-Z]{2,}", text):
                text = text[: found.start()] + pick(self.alternatives[found[0]]) + text[found.end() :]
            text = " ".join(re.sub(r" is (with|that|after|without)\b", r" \1", text).replace(" ,", ",").split())
            if text != HUMANOID_BASELINE and not any(sentence in text for sentence in HELD_OUT):
                return text, said


def tokenize(captions: list[str], rng: np.random.Generator) -> torch.Tensor:
    """Captions -> tokens (N, 32), in some of them random ones strewn in: a word that no caption has shall mean nothing."""
    tokens = torch.zeros(len(captions), TOKENIZER.context_length, dtype=torch.long)
    for row, caption in zip(tokens, captions):
        ids = TOKENIZER.encode(caption)[: len(row) - 2]  # hardly any is longer
        while rng.random() < STREWN and len(ids) < len(row) - 2:
            ids.insert(rng.integers(len(ids) + 1), int(rng.integers(TOKENIZER.sot_token_id)))
        row[: len(ids) + 2] = torch.tensor([TOKENIZER.sot_token_id, *ids, TOKENIZER.eot_token_id])
    return tokens


# ---- Scenes: n -> frames (n, 3, SIZE, SIZE) uint8, and what is known of them, name -> (n,): the names in captions.csv

IN_VIEW = 2.2  # m; farther out, a part of the cart is outside the picture


def cartpole(n: int, rng: np.random.Generator) -> tuple[torch.Tensor, dict]:
    """Cart-poles: a quarter within 8° of upright, a quarter within 25°, the rest at any angle; the cart anywhere, a 13th at the track's ends.

    There, half of the cart is outside the picture, and CartPole-v1 counts a failure. Captions of such frames say that the cart is cut
    off, and nothing of the pole; without them a policy drove to the end, where an upright pole was paid as well as in the middle.
    """
    angle = rng.uniform(-1, 1, n) * rng.choice([8, 25, 180, 180], size=n)
    x = rng.uniform(-2.6, 2.6, n).clip(-2.4, 2.4)
    states = np.stack([x, 0 * x, np.radians(angle), 0 * x], axis=1)
    place = np.floor((x + 2.4) / 0.96).clip(0, 4)  # fifths of the track
    cut = np.abs(x) > IN_VIEW + 0.03 * rng.standard_normal(n)  # judged by eye
    known = {"angle": angle, "tilt": np.abs(angle), "place": place, "cut": cut}
    return dqn_clip_cartpole.draw(torch.from_numpy(states), SIZE, SIZE), known


def mountaincar_progress(x: np.ndarray) -> np.ndarray:
    """Share of the way from the bottom of the valley (0) to the goal (1, and beyond it); 0 on the left hill, which leads away."""
    return ((x + math.pi / 6) / (sac_clip_mountaincar.X_GOAL + math.pi / 6)).clip(0, 1)


@cache  # its background is painted once
def draw_cars(textures: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """-> a function from states (N, 2) to frames (N, 3, SIZE, SIZE)."""
    return sac_clip_mountaincar.Scene(SIZE, SIZE, textures, torch.device("cpu")).draw


def mountaincar(n: int, rng: np.random.Generator) -> tuple[torch.Tensor, dict]:
    """Cars anywhere on the track, a third of them near the flag; every second frame in each of the two looks."""
    x = np.where(rng.random(n) < 1 / 3, rng.uniform(0.2, 0.6, n), rng.uniform(-1.2, 0.6, n))
    states = torch.from_numpy(np.stack([x, 0 * x], axis=1))
    frames = torch.empty(n, 3, SIZE, SIZE, dtype=torch.uint8)
    for k, textures in enumerate(("original", "realistic")):
        frames[k::2] = draw_cars(textures)(states[k::2])
    x = x + 0.05 * rng.standard_normal(n)  # captions are judged by eye: no edge is sharp
    return frames, {"x": x, "percent": 100 * mountaincar_progress(x), "realistic": np.arange(n) % 2 == 1}


# The humanoid's states come from physics: poses that are held, given up or reached, and the moments in between. poses.csv has joint
# angles in degrees, of both sides alike. Legs: hip x (-25 to 5, out), hip z (-60 to 35, outwards), hip y (-110 to 20, forwards),
# knee (-160 to -2), then waist y and the lean of the trunk. Arms: shoulder 1 and 2 (-85 to 60; the left one's have the opposite
# sign) and elbow (-90 to 50).
with open(HERE / "poses.csv", newline="") as file:
    POSES = list(csv.DictReader(file))
LEGS, ARMS = (np.array([row["angles"].split() for row in POSES if row["limbs"] == limbs], float) for limbs in ("legs", "arms"))
MOTORS = [1, 0, *range(2, 17)]  # their order among the joints: the XML names the abdomen's y before its z
SNAPSHOTS = (0, 3, 8, 15, 25, 40)  # environment steps after which a pose is looked at


def poses(n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """n hand-made poses with generous noise: orientations of the trunk (n, 4), quaternions; joint angles (n, 17), in radians."""

    def some(poses: np.ndarray) -> np.ndarray:
        return poses[rng.integers(len(poses), size=n)]

    def change(share: float, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        return np.where(rng.random((n, 1)) < share, other, one)

    pose = some(LEGS)
    stand = rng.random((n, 1)) < 0.12  # on one leg, with the other anywhere
    pose = np.where(stand, LEGS[0], pose)
    free = rng.uniform((-25, -30, -110, -120), (0, 20, 0, -5), (n, 4))
    right, left = pose[:, :4], np.where(stand, free, change(0.2, pose, some(LEGS))[:, :4])
    right_arm = change(0.2, some(ARMS), rng.uniform((-85, -85, -90), (60, 60, 50), (n, 3)))
    left_arm = change(0.2, change(0.3, right_arm, some(ARMS)), rng.uniform((-85, -85, -90), (60, 60, 50), (n, 3)))
    both = rng.random((n, 1)) < 0.16  # stands, on one leg or two, with both arms alike
    right, left = (np.where(both & ~stand, LEGS[0, :4], leg) for leg in (right, left))
    alike = some(ARMS)
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
    noise = rng.choice([4, 10, 30], size=(n, 1)) * rng.normal(0, 1, (n, 17))
    angles = states[:, 7:] + np.radians(noise * (rng.random((n, 17)) < rng.choice([0.15, 0.4], size=(n, 1))))
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
    num_envs, states, showing = min(256, n), [], None
    robots = [env.unwrapped for env in sac_clip_humanoid.make_envs(num_envs, sac_clip_humanoid.Args()).envs]
    with tqdm(total=n, desc="simulate the humanoid", unit="state", leave=False) as progress:
        while len(states) * num_envs < n:
            if len(states) * num_envs < n // 2:
                turns, angles = poses(num_envs, rng)
            else:
                if showing is None:
                    first = torch.cat(states)
                    locate = sac_clip_humanoid.Scene(8, 8, "original", "fixed", 1, 1024, torch.device("cpu"))
                    known = humanoid_knowledge(locate.draw(first)[1], "original", "fixed", rng)
                    showing = those_showing(Captions("humanoid"), known)
                parents = [rng.choice(showing[rng.integers(len(showing))]) for _ in range(num_envs)]
                turns, angles = variations(first[parents].numpy(), rng)
            states += play(turns, angles, robots, rng)
            progress.update(num_envs * len(SNAPSHOTS))
    states = torch.cat(states)
    return states[torch.from_numpy(rng.permutation(len(states))[:n])]


def those_showing(captions: Captions, known: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The frames that show each posture, of those that any frame shows."""
    facts = captions.judge(known)
    showing = [np.flatnonzero(facts[:, k] == 1) for k, kind in enumerate(captions.kinds) if kind == "posture"]
    return [frames for frames in showing if len(frames)]


def humanoid_knowledge(points: dict, textures: str, camera: str, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Where the parts of the body are -> what can be told of it by eye: m, degrees, and the tasks' conditions; _low is the lesser, or
    the lower, of both sides."""
    s, both = sac_clip_humanoid, ("right", "left")
    p = {name: at + 0.01 * torch.from_numpy(rng.standard_normal(at.shape)).float() for name, at in points.items()}
    left, up = F.normalize(p["left_shoulder"] - p["right_shoulder"], dim=-1), F.normalize(p["head"] - p["seat"], dim=-1)
    front = torch.linalg.cross(left, up)
    sight = torch.tensor([3.5, 0]) - p["seat"][:, :2] if camera == "fixed" else torch.tensor([[0.0, -4.0]])
    known = {
        "tilt": s.tilt(p),
        "spread": s.spread(p),
        "head": p["head"][:, 2],
        "seat": p["seat"][:, 2],
        "chest_up": front[:, 2],
    }
    # 1: faces the camera, -1: turns its back on it
    known["facing"] = (F.normalize(front[:, :2], dim=-1) * F.normalize(sight, dim=-1)).sum(-1)
    for part, name in (("knee", "between_knees"), ("foot", "between_feet")):
        known[name] = (p[f"left_{part}"] - p[f"right_{part}"]).norm(dim=-1)
    hips = torch.stack([(p[f"{side}_hand"] - p[f"{side}_hip"]).norm(dim=-1) for side in both])
    elbows = torch.stack([s.bend(p, side, ("shoulder", "elbow", "hand")) for side in both])
    out = torch.stack([-s.leftwards(p, "right_hand"), s.leftwards(p, "left_hand")])
    two = {part: torch.stack([p[f"{side}_{part}"][:, 2] for side in both]) for part in ("knee", "foot", "hand")}
    two |= {"bend": torch.stack([s.bend(p, side) for side in both]), "elbow": elbows, "out": out, "hips": hips}
    two["front"] = torch.stack([s.forwards(p, f"{side}_hand") for side in both])
    two["beside"] = torch.stack([(p[f"{side}_hand"] - p["head"]).norm(dim=-1) for side in both])
    two["across"] = torch.stack([(p[f"{a}_hand"] - p[f"{b}_elbow"]).norm(dim=-1) for a, b in (both, both[::-1])])
    two["over"], two["aside"] = two["hand"] - known["head"], out.abs()
    known |= {f"{name}_low": sides.amin(0) for name, sides in two.items()}
    known |= {f"{name}_high": sides.amax(0) for name, sides in two.items()}
    known["shoulders"] = torch.minimum(p["right_shoulder"][:, 2], p["left_shoulder"][:, 2])
    known["one_at_hip"] = ((hips < 0.18) & (elbows > 50)).any(0)
    known["seated"] = known["seat"] < s.SEAT + 0.07
    known["realistic"] = torch.full((len(left),), textures == "realistic")
    known["low_knees"] = (known["knee_high"] < 0.3) & (known["tilt"] < 60) & (known["seat"] > s.SEAT + 2 * s.FOOT)
    known |= {task.replace("-", "_"): holds(p) for task, (_, holds) in s.TASKS.items()}
    return {name: values.numpy() for name, values in known.items()}


class Humanoids:
    """Humanoids in all kinds of poses, simulated and drawn once; each call is another random choice of them."""

    def __init__(self, n: int, rng: np.random.Generator):
        states = humanoid_states(n, rng)
        looks = ("realistic", "fixed"), ("original", "fixed"), ("realistic", "original"), ("original", "original")
        ends = (n * np.array([0, 0.7, 0.8, 0.9, 1])).round().astype(int)  # most in the look of the script's defaults
        self.frames, parts = torch.empty(n, 3, SIZE, SIZE, dtype=torch.uint8), []
        for (textures, camera), first, last in zip(looks, ends, ends[1:]):  # the states are in random order
            scene = sac_clip_humanoid.Scene(SIZE, SIZE, textures, camera, 1, 128, torch.device("cpu"))
            for i in torch.arange(first, last).split(1024):
                self.frames[i], points = scene.draw(states[i])
                parts.append(humanoid_knowledge(points, textures, camera, rng))
        self.known = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        self.showing = those_showing(Captions("humanoid"), self.known)

    def __call__(self, n: int, rng: np.random.Generator) -> tuple[torch.Tensor, dict]:
        i = rng.integers(len(self.frames), size=n)
        for k in range(n // 2):  # half are chosen for what they show, each posture as often as another
            i[k] = rng.choice(self.showing[rng.integers(len(self.showing))])
        return self.frames[torch.from_numpy(i)], {name: values[i] for name, values in self.known.items()}


class Batch(NamedTuple):
    frames: torch.Tensor  # (N, 3, SIZE, SIZE) uint8
    captions: list[str]
    facts: dict[str, torch.Tensor]  # scene -> (n, F) int, of its frames, which lie one after the other
    true: torch.Tensor  # (N, N) float: is caption i true of frame j?


def make_batch(scenes: dict[str, Callable], captions: dict[str, Captions], size: int, rng: np.random.Generator) -> Batch:
    """All scenes in each batch: batch normalization has to see the mixture of them that it uses later."""
    frames, texts, all_facts, true = [], [], {}, []
    for name, scene in scenes.items():
        drawn, known = scene(int(SHARES[name] * size), rng)
        facts = captions[name].judge(known)
        mentioned = np.zeros(facts.shape, dtype=bool)
        for i, says in enumerate(mentioned):
            text, said = captions[name].describe(facts[i], rng)
            texts.append(text)
            says[said] = True
        frames.append(drawn)
        all_facts[name] = torch.from_numpy(facts)
        true.append(is_true(all_facts[name], torch.from_numpy(mentioned)).float())
    return Batch(torch.cat(frames), texts, all_facts, torch.block_diag(*true))


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


def fact_loss(logits: torch.Tensor, facts: torch.Tensor) -> torch.Tensor:
    """Cross entropy of what a frame's embedding tells of all facts (N, F), where they are known, not only of those in a caption."""
    known = (facts < 2).float()
    return F.binary_cross_entropy_with_logits(logits, facts.clamp(max=1).float(), weight=known, reduction="sum") / known.sum()


class Learner:
    """A model, and what trains it."""

    def __init__(self, captions: dict[str, Captions], args: Args):
        torch.manual_seed(args.seed)
        self.model = open_clip.CLIP(**MODEL_CFG)
        self.model.visual.to(memory_format=torch.channels_last)  # twice as fast for convolutions on a CPU
        size = MODEL_CFG["embed_dim"]
        self.heads = torch.nn.ModuleDict({name: torch.nn.Linear(size, len(own.lines)) for name, own in captions.items()})
        parameters = [*self.model.parameters(), *self.heads.parameters()]
        matrices, others = ([p for p in parameters if (p.ndim >= 2) == kind] for kind in (True, False))
        groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.98), eps=1e-6, fused=True)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, args.learning_rate, args.steps, pct_start=0.1, cycle_momentum=False
        )
        self.parts = (self.model, self.heads, self.optimizer, self.schedule)

    def step(self, batch: Batch, tokens: torch.Tensor) -> float:
        """One update -> the contrastive loss."""
        pixels = (batch.frames.float() / 127.5 - 1).contiguous(memory_format=torch.channels_last)
        with torch.autocast("cpu", torch.bfloat16):  # a step takes two thirds of the time
            embedded = self.model.encode_image(pixels), self.model.encode_text(tokens)
        image, text = (F.normalize(x.float(), dim=-1) for x in embedded)
        loss = contrastive_loss(image, text, self.model.logit_scale.exp(), batch.true)
        spread = image.split([len(facts) for facts in batch.facts.values()])
        told = [fact_loss(self.heads[name](10 * part), facts) for part, (name, facts) in zip(spread, batch.facts.items())]
        self.optimizer.zero_grad(set_to_none=True)
        (loss + FACTS * sum(told)).backward()
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
        config = {"model_cfg": MODEL_CFG, "preprocess_cfg": PREPROCESS_CFG}
        (folder / "open_clip_config.json").write_text(json.dumps(config, indent=2) + "\n")


def train(args: Args) -> None:
    if args.steps < 1 or args.batch_size < 32 or args.humanoid_states < 1:
        raise UsageError("--steps and --humanoid-states must be at least 1, --batch-size at least 32")
    try:
        args.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {args.output}: {error.strerror}") from None
    rng = np.random.default_rng(args.seed)
    captions = {name: Captions(name) for name in SHARES}
    learner = Learner(captions, args)
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
    scenes = {"cartpole": cartpole, "mountaincar": mountaincar, "humanoid": Humanoids(args.humanoid_states, rng)}
    make_batch(scenes, captions, 8192, np.random.default_rng(0))  # tells what is rare
    if kept:
        first, rng.bit_generator.state = kept["step"], kept["rng"]
        for part, state in zip(learner.parts, kept["parts"]):
            part.load_state_dict(state)

    def next_batch() -> tuple[Batch, torch.Tensor, dict]:
        """-> a batch, its tokens, and the generator's state afterwards."""
        batch = make_batch(scenes, captions, args.batch_size, rng)
        return batch, tokenize(batch.captions, rng), rng.bit_generator.state

    # The next batch is made while this one is learned from.
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        progress = trange(first, args.steps, initial=first, total=args.steps, desc="train tiny_clip", unit="step")
        coming = pool.submit(next_batch)
        for step in progress:
            *batch, state = coming.result()
            coming = pool.submit(next_batch)
            loss = learner.step(*batch)
            if step % 10 == 0:
                progress.set_postfix(loss=f"{loss:.3f}")
            if (step + 1) % SAVE_EVERY == 0:
                content = {"settings": settings, "step": step + 1, "rng": state}
                content["parts"] = [part.state_dict() for part in learner.parts]
                torch.save(content, checkpoint.with_suffix(".tmp"))
                checkpoint.with_suffix(".tmp").replace(checkpoint)
        coming.cancel()
    learner.save(args.output)
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

    embedded, swept = embed(states), embed(sweep.flatten(0, 1))
    print("\n| prompt | α | EPIC distance | highest reward at | reward at 0, 12, 45, 180° |")
    print("|---|---|---|---|---|")
    for prompt in (CARTPOLE_PROMPT, *REWORDINGS["cartpole"]):
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
        for prompt in (MOUNTAINCAR_PROMPT, *REWORDINGS["mountaincar"]):
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
    print("\n| prompt | textures | camera | states | ROC AUC | EPIC distance, α = 0 | 0.25 | 0.5 | 0.75 |")
    print("|---" * 9 + "|")
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
        for prompt, holds in prompts + [(prompt, kneeling) for prompt in REWORDINGS["humanoid"]]:
            goal = holds(p)
            yes, no = goal.nonzero()[:, 0], (~goal).nonzero()[:, 0]
            k = min(len(yes), len(no))
            i = torch.cat([some[torch.from_numpy(rng.permutation(len(some))[:k])] for some in (yes, no)])
            if k == 0:
                continue
            models = [CLIPReward(f"local-dir:{folder}", prompt, HUMANOID_BASELINE, alpha) for alpha in (0, 0.25, 0.5, 0.75)]
            rewards = [model.reward(embedded) for model in models]
            distances = " | ".join(f"{epic_distance(reward[i], goal[i]):.3f}" for reward in rewards)
            print(f"| {prompt} | {textures} | {camera} | {2 * k} | {roc_auc(rewards[0][i], goal[i]):.3f} | {distances} |")


if __name__ == "__main__":
    args = tyro.cli(Args)
    try:
        if not args.evaluate:
            train(args)
        evaluate_cartpole(args.output)
        evaluate_mountaincar(args.output)
        evaluate_humanoid(args.output)
    except UsageError as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        resumable = (args.output / "training.pt").is_file()
        print("interrupted; it goes on with --resume" if resumable else "interrupted", file=sys.stderr)
        sys.exit(130)
