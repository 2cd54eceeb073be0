"""A humanoid robot learned from one sentence: SAC whose only reward is a CLIP model's opinion of the frame.

    python sac_clip_humanoid.py --prompt "a humanoid robot kneeling"

The method is VLM-RM (Rocamonde et al., ICLR 2024, arXiv 2310.12921), its Algorithm 1 with SAC (Haarnoja et al., 2018). Read from
top to bottom: settings, environment, drawing, tasks, several processes, replay buffer, networks, labelling, evaluation, and the loop:
act, learn, label, report.

C MuJoCo moves the robots, mujoco_warp draws them, on a CPU or a CUDA GPU, without OpenGL and without a display. Several
processes share the work, each with environments and (on GPUs) a device of its own; torchrun gives each of them one thread
beside the learning, if OMP_NUM_THREADS does not say more:

    torchrun --nproc-per-node=2 sac_clip_humanoid.py --task kneeling
"""

import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

import imageio.v3 as iio
import mujoco
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from PIL import Image, ImageDraw, ImageFont
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm, trange

from clip_reward import CLIPReward, RewardModelError, native_precision

# warp and mujoco_warp are imported where they are used: they take seconds, and --help needs none of them.

SCRIPT = Path(__file__).stem
THREADS = torch.get_num_threads()  # one a core, or OMP_NUM_THREADS
RANK, LOCAL_RANK = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))  # this process among torchrun's, ...
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))  # ... which are so many
Task = Literal[
    "kneeling", "lotus-position", "standing-up", "arms-raised", "doing-splits", "hands-on-hips", "arms-crossed", "standing-on-one-leg"
]  # fmt: skip


@dataclass
class Args:
    """Teach a humanoid with a sentence: SAC on the reward of a CLIP model.

    The defaults learn faster than the paper's values (--paper): see README, The paper's settings. They were compared as a whole, not
    one by one.
    """

    prompt: tuple[str, ...] | None = None
    """what the goal looks like; several sentences are averaged (default: the task's)"""
    task: Task | None = None
    """one of the paper's, with its prompt, and a success condition that is measured but never learned from
    (default: the one that has this prompt; kneeling, if there is no prompt)"""
    baseline_prompt: tuple[str, ...] = ("a humanoid robot",)
    """what the scene looks like in general"""
    goal_baseline_alpha: float = 0.0
    """α of goal-baseline regularization, 0 (plain cosine, as in the paper's Table 1) to 1"""
    textures: Literal["realistic", "original"] = "realistic"
    """how the scene is drawn: a robot of metal and plastic under the sky, or as Gymnasium does"""
    camera: Literal["fixed", "original"] = "fixed"
    """the paper's, in front of the robot, or the one of Gymnasium's XML, which follows it from the side"""
    supersample: int = 1
    """N: N x N samples a pixel of what CLIP sees (pictures and video: always 2)"""
    clip_model: str | None = None
    """NAME/TAG, NAME//path/to/weights, hf-hub:ORG/NAME, local-dir:PATH or tiny
    (default: the paper's ViT-bigG-14/laion2b_s39b_b160k on CUDA, the bundled tiny on a CPU)"""
    clip_batch_size: int = 128
    """frames drawn and scored at once"""
    precision: Literal["fp32", "bf16"] | None = None
    """what the CLIP model computes in (default: bf16 where the processor or GPU has instructions for it, else fp32)"""
    reward: Literal["clip", "contrastive"] = "clip"
    """what the agent learns from: clip is goal-baseline regularization, contrastive (without baseline and α) the probability of the
    prompt among it and the negative ones (Baumli et al., 2023)"""
    negative_prompt: tuple[str, ...] | None = None
    """contrastive: what else there might be to see (default: the prompts of the paper's other tasks)"""
    temperature: float | None = None
    """contrastive: τ of the softmax (default: the model's own)"""
    threshold: float | None = None
    """contrastive: β, above which the reward is 1, and else 0 (default: the probability itself is the reward)"""

    paper: bool = False
    """the paper's values where the settings below name them; what the command line says holds all the same"""
    seed: int = 1
    """seed of the weights, the start states and the exploration"""
    device: str | None = None
    """cpu or cuda (default: cuda where there is one)"""
    total_timesteps: int = 256_000
    """environment steps over all environments, rounded up to whole rounds of one episode in each of them
    (paper: 10,000,000, with a model that has never seen the scene)"""
    num_envs: int = 32
    """environments simulated side by side, over all processes"""
    episode_length: int = 100
    """steps of every episode, of 15 ms"""
    gradient_steps: int = 300
    """updates per round (paper: 100)"""

    learning_starts: int = 6_400
    """random steps before learning (paper: 50,000)"""
    learning_rate: float = 6e-4
    """of Adam, for actor, critics and entropy coefficient"""
    anneal_lr: bool = True
    """lower it evenly to 0 at the end of training, so that the last policies change little (paper: no)"""
    buffer_size: int = 1_000_000
    """transitions kept, over all processes, at least one round of them (Stable-Baselines3's default, as in the paper)"""
    gamma: float = 0.95
    """discount factor"""
    tau: float = 0.005
    """share of the critics that the target critics take over at each update, and of the actor that its running mean does"""
    batch_size: int = 256
    """transitions per update, over all processes (paper: 512)"""
    ent_coef: float = 0.03
    """weight of the policy's entropy at the start; it is then tuned to keep the entropy at -17, minus one per action (paper: 1.0)"""
    normalize_obs: bool = True
    """scale observations by their running mean and variance (paper: no)"""
    normalize_reward: bool = True
    """scale rewards by their running mean and variance: CLIP's hardly vary (paper: no)"""
    policy_frequency: int = 2
    """updates of the critics per update of the actor (paper: 1)"""
    layer_norm: bool = True
    """layer normalization in the critics (paper: no)"""
    average_actor: bool = True
    """act with the running mean of the actor's weights: its success swings less from round to round (paper: no)"""

    run_dir: Path | None = None
    """folder of this run, made anew (default: runs/SCRIPT__SEED__TIME)"""
    checkpoint_every: int = 128_000
    """environment steps between two checkpoints"""
    episodes: int = 100
    """episodes of the final evaluation, or of --evaluate"""
    resume: Path | None = None
    """go on with the run in this folder, exactly and with its own settings"""
    evaluate: Path | None = None
    """only evaluate this checkpoint (with --episodes, --seed, --device) and make its video"""
    track: bool = False
    """log to Weights & Biases as well"""
    wandb_project_name: str = "clip-reward"
    """its project there"""

    def to_save(self) -> dict:
        """The settings that make a run what it is, as plain values."""
        return {k: str(v) if isinstance(v, Path) else v for k, v in asdict(self).items() if k not in ("resume", "evaluate")}


PAPER = {"total_timesteps": 10_000_000, "gradient_steps": 100, "learning_starts": 50_000, "batch_size": 512, "ent_coef": 1.0}
PAPER |= {"normalize_obs": False, "normalize_reward": False, "layer_norm": False, "policy_frequency": 1, "anneal_lr": False}
PAPER |= {"average_actor": False, "paper": True}

# ---- Environment

XML = Path(find_spec("gymnasium").origin).parent / "envs/mujoco/assets/humanoid.xml"
MAX_CTRL = 0.4  # range of the XML's motors, and so of Gymnasium's actions
FRAME_SKIP = 5  # simulation steps of 3 ms per environment step, as in Gymnasium
OBS_SIZE, STATE_SIZE, ACTION_SIZE = 348, 24, 17


class Humanoid:
    """`num_envs` humanoids with the dynamics, start states and observations of Gymnasium's Humanoid-v5, all at the same step.

    C MuJoCo steps them in float64 on `threads` threads of the CPU, and gives the same result on any number of them. A state is
    MuJoCo's qpos: position (m) and quaternion of the torso, then 17 joint angles (rad). As in the paper, no episode ends early,
    because that would tell the agent what the task is: each lasts `episode_length` steps of 15 ms. Nothing resets itself: call `reset`.
    """

    def __init__(self, num_envs: int, episode_length: int, threads: int):
        self.num_envs, self.episode_length, self.threads = num_envs, episode_length, min(threads, num_envs)
        self.model = mujoco.MjModel.from_xml_path(str(XML))
        self.datas = [mujoco.MjData(self.model) for _ in range(num_envs)]
        # What Gymnasium observes (body 0, the world, has nothing to tell): views of MuJoCo's own memory.
        self.views = [
            (d.qpos[2:], d.qvel, d.cinert[1:].ravel(), d.cvel[1:].ravel(), d.qfrc_actuator[6:], d.cfrc_ext[1:].ravel())
            for d in self.datas
        ]
        self.rngs = [np.random.default_rng() for _ in range(num_envs)]
        self.obs, self.states = np.empty((num_envs, OBS_SIZE)), np.empty((num_envs, STATE_SIZE))
        self.pool = ThreadPoolExecutor(self.threads)

    def reset(self, seed: int | None = None) -> tuple[torch.Tensor, dict]:
        """Start all episodes anew -> obs (num_envs, 348) float32, infos: {"states": (num_envs, 24) float32}.

        With a seed, environment i starts like `gymnasium.make("Humanoid-v5").reset(seed=seed + i)`.
        """
        if seed is not None:
            self.rngs = [np.random.default_rng(seed + i) for i in range(self.num_envs)]
        for data, rng in zip(self.datas, self.rngs):
            mujoco.mj_resetData(self.model, data)
            data.qpos[:] = self.model.qpos0 + rng.uniform(-0.01, 0.01, self.model.nq)
            data.qvel[:] = rng.uniform(-0.01, 0.01, self.model.nv)
        self.t = 0
        self.each(mujoco.mj_forward)
        return self.observe()

    def step(self, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, dict]:
        """Actions (num_envs, 17), torques in units of their motors, in ±0.4 -> obs, rewards, terminations, truncations, infos.

        The rewards are 0: giving them is the CLIP model's task, once the frames are drawn from infos["states"].
        """
        for data, action in zip(self.datas, actions.numpy()):
            data.ctrl[:] = action

        def simulate(model: mujoco.MjModel, data: mujoco.MjData) -> None:
            mujoco.mj_step(model, data, FRAME_SKIP)
            mujoco.mj_rnePostConstraint(model, data)  # the contact forces of the observation

        self.each(simulate)
        self.t += 1
        obs, infos = self.observe()
        rewards = torch.zeros(self.num_envs)
        terminations = torch.zeros(self.num_envs, dtype=torch.bool)  # no state is terminal
        truncations = torch.full_like(terminations, self.t >= self.episode_length)
        return obs, rewards, terminations, truncations, infos

    def each(self, work: Callable) -> None:
        """Do `work(model, data)` for every environment and write down what there is to observe."""

        def some(first: int) -> None:
            for i in range(first, self.num_envs, self.threads):
                work(self.model, self.datas[i])
                np.concatenate(self.views[i], out=self.obs[i])
                self.states[i] = self.datas[i].qpos

        list(self.pool.map(some, range(self.threads)))

    def observe(self) -> tuple[torch.Tensor, dict]:
        obs, states = (torch.tensor(array, dtype=torch.float32) for array in (self.obs, self.states))
        return obs, {"states": states}


# ---- Drawing


def smooth_noise(points: torch.Tensor, cells: int) -> torch.Tensor:
    """Smooth random values in [0, 1] at points (..., 3) of the cube [-1, 1]³: static of ever finer grain, the finer the fainter."""
    rng = torch.Generator().manual_seed(3)  # clouds in view of the fixed camera
    static = [torch.rand(1, 1, *[cells << k] * 3, generator=rng) / 2**k for k in range(4)]
    where = points.view(1, 1, 1, -1, 3)
    smooth = sum(F.grid_sample(grain, where, padding_mode="reflection", align_corners=False) for grain in static)
    return ((smooth - smooth.min()) / (smooth.max() - smooth.min())).view(points.shape[:-1])


def mix(one: tuple | torch.Tensor, other: tuple | torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Two colours or pictures (..., 3), the second with a share, cut to [0, 1], of each pixel."""
    one, other = (torch.tensor(it, dtype=torch.float32) if isinstance(it, tuple) else it for it in (one, other))
    return one + (other - one) * share.clamp(0, 1)[..., None]


def paint_sky(size: int = 256) -> torch.Tensor:
    """Blue, paler towards the horizon, with clouds: a sky box, the six faces of OpenGL's cube map one below the other."""
    t, s = torch.meshgrid(*[(torch.arange(size) + 0.5) / size * 2 - 1] * 2, indexing="ij")
    one = torch.ones_like(s)
    cube = torch.stack([one, -t, -s, -one, -t, s, s, one, t, s, -one, -t, s, -t, one, -s, -t, -one]).view(6, 3, size, size)
    direction = F.normalize(torch.stack([cube[:, 0], -cube[:, 2], cube[:, 1]], dim=-1), dim=-1)  # MuJoCo's z is the cube's y
    up = direction[..., 2]
    pixels = mix((205, 226, 245), (58, 120, 205), up * 2.2)
    clouds = smooth_noise(direction * torch.tensor([1, 1, 3]) / 3, 12)
    return mix(pixels, (255, 255, 255), (clouds - 0.5) * 7 * (up * 25).clamp(0, 1)).reshape(6 * size, size, 3)


def paint_tiles(size: int = 512, tiles: int = 4) -> torch.Tensor:
    """Stone tiles with dark joints. They are calm: at 64 pixels a chessboard would be most of what a model sees."""
    y, x = torch.meshgrid(*[(torch.arange(size) + 0.5) / size * tiles] * 2, indexing="ij")
    shade = torch.rand(tiles, tiles, generator=torch.Generator().manual_seed(0))[y.long(), x.long()]
    edge = torch.minimum((x - x.round()).abs(), (y - y.round()).abs())
    return mix((112, 108, 102), mix((150, 146, 138), (166, 162, 152), shade), (edge - 0.015) * 60)


def paint_face(size: int = 128) -> torch.Tensor:
    """The head's map, longitude across and latitude down: a dark visor with two eyes that looks forwards, where the map's ends meet."""
    image = Image.new("RGB", (2 * size, size), (236, 238, 240))
    pen = ImageDraw.Draw(image)
    for middle in (0, 2 * size):
        pen.rounded_rectangle((middle - 46, 40, middle + 46, 78), 14, (24, 28, 36))
        for eye in (middle - 20, middle + 20):
            pen.ellipse((eye - 9, 50, eye + 9, 68), (90, 220, 255))
    return torch.from_numpy(np.array(image))


PLASTIC, METAL = (0.3, 0.5), (0.9, 0.7)  # specular, shininess
MATERIALS = {  # of the realistic look: colour, surface, and the ends of the names of the geoms made of it
    "white": ((232, 234, 238), PLASTIC, ("torso1", "butt")),
    "steel": ((128, 134, 144), METAL, ("uwaist", "lwaist")),
    "orange": ((240, 120, 20), PLASTIC, ("uarm1",)),
    "yellow": ((250, 196, 50), PLASTIC, ("larm",)),
    "blue": ((30, 84, 190), PLASTIC, ("thigh1",)),
    "silver": ((206, 210, 216), METAL, ("shin1",)),
    "black": ((36, 38, 44), PLASTIC, ("hand", "foot")),
    "face": ((255, 255, 255), PLASTIC, ("head",)),
    "tiles": ((255, 255, 255), (0.0, 0.0), ("floor",)),
}


@cache
def scene_model(textures: str) -> mujoco.MjModel:
    """Gymnasium's humanoid with the paper's camera, "fixed", beside the XML's own, "track", and dressed as `textures` says."""
    spec = mujoco.MjSpec.from_file(str(XML))
    spec.option.solver = mujoco.mjtSolver.mjSOL_NEWTON  # mujoco_warp has no PGS; nothing is solved here anyway
    elevation, distance = math.radians(-10), 3.5
    sin, cos = math.sin(elevation), math.cos(elevation)
    camera = spec.worldbody.add_camera(name="fixed", pos=[distance * cos, 0, 1 - distance * sin])  # azimuth 180°, at (0, 0, 1)
    camera.alt.type = mujoco.mjtOrientation.mjORIENTATION_XYAXES
    camera.alt.xyaxes = [0, 1, 0, sin, 0, cos]
    if textures == "original":
        return spec.compile()

    spec.delete(next(texture for texture in spec.textures if texture.type == mujoco.mjtTexture.mjTEXTURE_SKYBOX))
    for name, kind, pixels in (
        ("sky", mujoco.mjtTexture.mjTEXTURE_SKYBOX, paint_sky()),
        ("tiles", mujoco.mjtTexture.mjTEXTURE_2D, paint_tiles()),
        ("face", mujoco.mjtTexture.mjTEXTURE_2D, paint_face()),
    ):
        height, width, channels = pixels.shape
        texture = spec.add_texture(name=name, type=kind, width=width, height=height, nchannel=channels)
        texture.data = pixels.round().byte().numpy().tobytes()
    for name, (colour, (specular, shininess), parts) in MATERIALS.items():
        rgba = [c / 255 for c in colour] + [1]
        material = spec.add_material(name=name, rgba=rgba, specular=specular, shininess=shininess)
        if name in ("tiles", "face"):
            material.textures[mujoco.mjtTextureRole.mjTEXROLE_RGB] = name
            material.texrepeat = (10, 10) if name == "tiles" else (1, 1)  # tiles of 1 m on a floor of 40 m
        for geom in spec.geoms:
            if geom.name.endswith(parts):
                geom.material, geom.rgba = name, [0.5, 0.5, 0.5, 1]  # MuJoCo's default rgba: the material's colour counts
    sun = spec.lights[0]
    sun.dir, sun.diffuse, sun.specular = [-0.5, 0.35, -1], [0.75, 0.73, 0.68], [0.4, 0.4, 0.4]
    spec.visual.headlight.ambient = [0.38, 0.4, 0.44]
    spec.visual.headlight.diffuse, spec.visual.headlight.specular = [0.12] * 3, [0] * 3
    return spec.compile()


# Where the parts of the body are: at geoms' middles, or at the bodies that begin in those joints.
GEOM_POINTS = {"head": "head", "seat": "butt"} | {f"{s}_{p}": f"{s}_{p}" for s in ("right", "left") for p in ("hand", "foot")}
BODY_POINTS = {"hip": "thigh", "knee": "shin", "shoulder": "upper_arm", "elbow": "lower_arm"}
BODY_POINTS = {f"{side}_{point}": f"{side}_{body}" for side in ("right", "left") for point, body in BODY_POINTS.items()}


class Scene:
    """States -> frames and body points, ray-traced by mujoco_warp on the device: no OpenGL, no display.

    The first use ever on a machine compiles kernels for some ten seconds; they are kept in the user's cache folder. On a CPU a
    scene uses one thread; scenes of their own can be used by several threads at once.
    """

    def __init__(
        self, height: int, width: int, textures: str, camera: str, supersample: int, batch_size: int, device: torch.device
    ):
        import warp as wp

        wp.config.log_level = wp.LOG_WARNING  # or it reports each kernel that it compiles or finds in its cache
        import mujoco_warp

        self.height, self.width, self.batch_size, self.device = height, width, batch_size, device
        wp.init()
        self.warp_device = wp.device_from_torch(device)
        wp.set_device(self.warp_device)  # or all would go to the first GPU that there is
        model = scene_model(textures)
        self.geoms = [model.geom(name).id for name in GEOM_POINTS.values()]
        self.bodies = [model.body(name).id for name in BODY_POINTS.values()]
        data = mujoco.MjData(model)
        mujoco.mj_forward(model, data)
        options = {"cam_active": ["fixed" if camera == "fixed" else "track"], "samples_per_pixel": supersample}
        options |= {"render_rgb": True, "render_depth": False, "render_seg": False, "render_skybox": True, "use_shadows": True}
        options |= {"enable_emission": False, "enable_per_light_ambient": False}  # nothing in the scene has any
        self.model = mujoco_warp.put_model(model)
        self.data = mujoco_warp.put_data(model, data, nworld=batch_size)  # so many states are drawn at once
        self.context = mujoco_warp.create_render_context(model, batch_size, (width, height), **options)
        self.draw(torch.zeros(1, STATE_SIZE, device=device))  # compiles or loads the kernels: not a thing for several threads

    def draw(self, states: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """States (N, 24) -> frames (N, 3, height, width) uint8, and where each point of the body is (N, 3), m, by its name."""
        import mujoco_warp
        import warp as wp

        frames = torch.empty(len(states), 3, self.height, self.width, dtype=torch.uint8, device=self.device)
        points = torch.empty(len(states), len(self.geoms) + len(self.bodies), 3, device=self.device)
        if self.device.type == "cuda":  # in step with PyTorch
            wp.set_stream(wp.stream_from_torch(torch.cuda.current_stream(self.device)), self.warp_device)
        for first in range(0, len(states), self.batch_size):
            i = slice(first, first + self.batch_size)
            n = len(states[i])  # what the worlds beyond show does not matter
            wp.to_torch(self.data.qpos)[:n] = states[i]
            mujoco_warp.kinematics(self.model, self.data)
            mujoco_warp.com_pos(self.model, self.data)
            mujoco_warp.camlight(self.model, self.data)
            mujoco_warp.refit_bvh(self.model, self.data, self.context)
            mujoco_warp.render(self.model, self.data, self.context)
            pixels = wp.to_torch(self.context.rgb_data)[:n].view(torch.uint8)  # a view: blue, green, red, alpha
            frames[i] = torch.stack(pixels.view(n, self.height, self.width, 4).unbind(-1)[2::-1], dim=1)
            points[i, : len(self.geoms)] = wp.to_torch(self.data.geom_xpos)[:n, self.geoms]
            points[i, len(self.geoms) :] = wp.to_torch(self.data.xpos)[:n, self.bodies]
        return frames, dict(zip([*GEOM_POINTS, *BODY_POINTS], points.unbind(1)))


# ---- Tasks

# What a person would have to see in the frame (paper, Table 2), from where the parts of the body are. No agent ever learns from
# these conditions. They are the ground truth beside the CLIP reward, so that reward hacking shows.

SEAT, KNEE, FOOT = 0.09, 0.049, 0.075  # radii, m: so high is the middle of a part that lies on the floor
TOUCH = 0.04  # m above the floor that pass for touching it


def tilt(p: dict[str, torch.Tensor]) -> torch.Tensor:
    """Angle between the trunk, from the seat to the head, and the vertical (N,), degrees: upright is 0."""
    return torch.rad2deg(torch.acos(F.normalize(p["head"] - p["seat"], dim=-1)[..., 2].clamp(-1, 1)))


def bend(p: dict[str, torch.Tensor], side: str, limb: tuple[str, str, str] = ("hip", "knee", "foot")) -> torch.Tensor:
    """How far a knee, or another limb's middle joint, is bent (N,), degrees: a straight leg is 0."""
    upper, lower = (F.normalize(p[f"{side}_{b}"] - p[f"{side}_{a}"], dim=-1) for a, b in zip(limb, limb[1:]))
    return torch.rad2deg(torch.acos((upper * lower).sum(-1).clamp(-1, 1)))


def spread(p: dict[str, torch.Tensor]) -> torch.Tensor:
    """Angle between the legs, from hips to feet, seen from above (N,), degrees."""
    right, left = (F.normalize((p[f"{side}_foot"] - p[f"{side}_hip"])[..., :2], dim=-1) for side in ("right", "left"))
    return torch.rad2deg(torch.acos((right * left).sum(-1).clamp(-1, 1)))


def leftwards(p: dict[str, torch.Tensor], part: str) -> torch.Tensor:
    """How far a part is to the robot's left of its seat (N,), m."""
    left = F.normalize(p["left_shoulder"] - p["right_shoulder"], dim=-1)
    return ((p[part] - p["seat"]) * left).sum(-1)


def forwards(p: dict[str, torch.Tensor], part: str) -> torch.Tensor:
    """How far a part is in front of the seat, as the trunk sees it (N,), m."""
    left, up = F.normalize(p["left_shoulder"] - p["right_shoulder"], dim=-1), F.normalize(p["head"] - p["seat"], dim=-1)
    return ((p[part] - p["seat"]) * F.normalize(torch.linalg.cross(left, up), dim=-1)).sum(-1)


def on_floor(p: dict[str, torch.Tensor], part: str, radius: float, tolerance: float = TOUCH) -> torch.Tensor:
    """Do both of the knees or feet touch the floor? (N,) bool."""
    return torch.maximum(p[f"right_{part}"][..., 2], p[f"left_{part}"][..., 2]) <= radius + tolerance


def kneeling(p: dict[str, torch.Tensor]) -> torch.Tensor:
    """Both knees on the floor, in balance (a kneeler can lean back by 50° and stay so), and not sitting lower than on the heels."""
    return on_floor(p, "knee", KNEE) & (tilt(p) <= 60) & (p["seat"][..., 2] > SEAT + 2 * FOOT)


def lotus_position(p: dict[str, torch.Tensor]) -> torch.Tensor:
    """Seated on the floor or on crossed feet, both knees on the floor and outside the hips, the feet between the knees."""
    seated = (p["seat"][..., 2] <= SEAT + 2 * FOOT) & (tilt(p) <= 45)
    wide, together = ((p[f"left_{part}"] - p[f"right_{part}"]).norm(dim=-1) for part in ("knee", "foot"))
    return seated & on_floor(p, "knee", KNEE, 2 * TOUCH) & (wide >= 0.5) & (together <= wide - 0.2)


def standing_up(p: dict[str, torch.Tensor]) -> torch.Tensor:
    """On at least one foot, the trunk within 30° of upright, the head at four fifths of its full height of 1.48 m or above."""
    feet = torch.minimum(p["right_foot"][..., 2], p["left_foot"][..., 2])
    return (feet <= FOOT + TOUCH) & (tilt(p) <= 30) & (p["head"][..., 2] >= 1.2)


def arms_raised(p: dict[str, torch.Tensor]) -> torch.Tensor:
    """Standing, both hands above the middle of the head."""
    hands = torch.minimum(p["right_hand"][..., 2], p["left_hand"][..., 2])
    return standing_up(p) & (hands >= p["head"][..., 2])


def doing_splits(p: dict[str, torch.Tensor]) -> torch.Tensor:
    """Seat and feet on the floor, the legs straight within 30°, 90° or more between them (the joints allow 120°)."""
    down = (p["seat"][..., 2] <= SEAT + 2 * TOUCH) & on_floor(p, "foot", FOOT, 2 * TOUCH)
    straight = torch.maximum(bend(p, "right"), bend(p, "left")) <= 30
    return down & straight & (spread(p) >= 90) & (tilt(p) <= 60)


def hands_on_hips(p: dict[str, torch.Tensor]) -> torch.Tensor:
    """Standing, each hand within 20 cm of the hip joint on its side (the hip itself is 9 cm thick, the hand 4), both elbows bent
    by 40° or more: arms that merely hang down come as close."""
    far = torch.maximum(*((p[f"{side}_hand"] - p[f"{side}_hip"]).norm(dim=-1) for side in ("right", "left")))
    bent = torch.minimum(*(bend(p, side, ("shoulder", "elbow", "hand")) for side in ("right", "left")))
    return standing_up(p) & (far <= 0.2) & (bent >= 40)


def arms_crossed(p: dict[str, torch.Tensor]) -> torch.Tensor:
    """Standing, each hand at least 5 cm beyond the middle, in front of the trunk between seat and shoulders."""
    beyond = torch.minimum(leftwards(p, "right_hand"), -leftwards(p, "left_hand")) >= 0.05
    front = torch.minimum(forwards(p, "right_hand"), forwards(p, "left_hand")) > 0
    above = torch.minimum(p["right_hand"][..., 2], p["left_hand"][..., 2]) > p["seat"][..., 2]
    shoulders = torch.minimum(p["right_shoulder"][..., 2], p["left_shoulder"][..., 2])
    below = torch.maximum(p["right_hand"][..., 2], p["left_hand"][..., 2]) < shoulders
    return standing_up(p) & beyond & front & above & below


def standing_on_one_leg(p: dict[str, torch.Tensor]) -> torch.Tensor:
    """Standing with exactly one foot on the floor, the other at least 10 cm above it."""
    return standing_up(p) & (torch.maximum(p["right_foot"][..., 2], p["left_foot"][..., 2]) >= FOOT + 0.1)


TASKS = {  # goal prompt (paper, Table 3) and success condition of each
    "kneeling": ("a humanoid robot kneeling", kneeling),
    "lotus-position": ("a humanoid robot seated down, meditating in the lotus position", lotus_position),
    "standing-up": ("a humanoid robot standing up", standing_up),
    "arms-raised": ("a humanoid robot standing up, with both arms raised", arms_raised),
    "doing-splits": ("a humanoid robot practicing gymnastics, doing the side splits", doing_splits),
    "hands-on-hips": ("a humanoid robot standing up with hands on hips", hands_on_hips),
    "arms-crossed": ("a humanoid robot standing up, with its arms crossed", arms_crossed),
    "standing-on-one-leg": ("a humanoid robot standing up on one leg", standing_on_one_leg),
}


# ---- Several processes


def total(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of all processes' tensors, in place."""
    if WORLD_SIZE > 1:
        dist.all_reduce(tensor)
    return tensor


def average_gradients(parameters: list[torch.Tensor]) -> None:
    if WORLD_SIZE > 1:
        gradients = total(torch.cat([p.grad.view(-1) for p in parameters])) / WORLD_SIZE
        for p, gradient in zip(parameters, gradients.split([p.numel() for p in parameters])):
            p.grad.copy_(gradient.view_as(p))


# ---- Replay buffer and networks


class ReplayBuffer:
    """A ring of labelled transitions in preallocated tensors on the device, beside each the state after it (see figures/).

    There is no "done": the value of every next state is bootstrapped. An episode only ever ends by its time limit, which is no
    property of the state. (The paper's code treats the last step as terminal, although the agent cannot see the time.)
    """

    FIELDS = ("obs", "next_obs", "actions", "rewards", "states")

    def __init__(self, capacity: int, device: torch.device):
        self.capacity, self.device = capacity, device
        # Empty, not zeros: on a CPU memory is taken only as the buffer fills.
        self.obs = torch.empty(capacity, OBS_SIZE, device=device)
        self.next_obs = torch.empty(capacity, OBS_SIZE, device=device)
        self.actions = torch.empty(capacity, ACTION_SIZE, device=device)
        self.rewards = torch.empty(capacity, device=device)
        self.states = torch.empty(capacity, STATE_SIZE, device=device)
        self.pos = self.size = 0  # next place to write; transitions held

    def add(self, *transitions: torch.Tensor) -> None:
        """Append N transitions: obs (N, 348), next_obs (N, 348), actions (N, 17), rewards (N,), states (N, 24)."""
        n = len(transitions[0])
        i = (self.pos + torch.arange(n, device=self.device)) % self.capacity
        for name, values in zip(self.FIELDS, transitions):
            getattr(self, name)[i] = values
        self.pos, self.size = (self.pos + n) % self.capacity, min(self.size + n, self.capacity)

    def sample(self, batch_size: int, rng: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Transitions, uniformly with replacement -> obs, next_obs, actions, rewards."""
        i = torch.randint(self.size, (batch_size,), generator=rng, device=self.device)
        return self.obs[i], self.next_obs[i], self.actions[i], self.rewards[i]

    def state_dict(self) -> dict:
        # Copies of parts only: torch.save would write the whole of what a part is a view of.
        tensors = {name: getattr(self, name) for name in self.FIELDS}
        tensors = {name: (t if self.size == self.capacity else t[: self.size].clone()).cpu() for name, t in tensors.items()}
        return tensors | {"pos": self.pos, "size": self.size}

    def load_state_dict(self, state: dict) -> None:
        self.pos, self.size = state["pos"], state["size"]
        for name in self.FIELDS:
            getattr(self, name)[: self.size] = state[name]


class Normalize(nn.Module):
    """Values (N, size) -> the same scaled by the mean and variance of all that `update` has seen, cut to ±10."""

    def __init__(self, size: int):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("var", torch.ones(size))

    def update(self, values: torch.Tensor) -> None:
        """Take in values (N, size) of this process, and of all the others."""
        values = values.double()  # in single precision the variance of what hardly varies is lost to rounding
        sums = total(torch.cat([values.new_tensor([len(values)]), values.sum(0), values.square().sum(0)]))
        count, mean, square = sums[0], *(sums[1:].view(2, -1) / sums[0])
        var = (square - mean.square()).clamp(0)
        share, delta = count / (self.count + count), mean - self.mean  # of the new ones (Chan et al.'s parallel variance)
        self.var.copy_((1 - share) * self.var + share * var + share * (1 - share) * delta.square())
        self.mean.add_(share * delta)
        self.count.add_(count)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return ((values - self.mean) * (self.var + 1e-8).rsqrt()).clamp(-10, 10)


LOG_STD_MIN, LOG_STD_MAX = -5, 2


class SoftQNetwork(nn.Module):
    """Normalized observations (N, 348) and actions (N, 17) -> action values (N,)."""

    def __init__(self, layer_norm: bool):
        super().__init__()
        norm = nn.LayerNorm if layer_norm else nn.Identity
        self.net = nn.Sequential(
            *(nn.Linear(OBS_SIZE + ACTION_SIZE, 256), norm(256), nn.ReLU()),
            *(nn.Linear(256, 256), norm(256), nn.ReLU()),
            nn.Linear(256, 1),
        )

    def forward(self, obs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        return self.net(torch.cat([obs, actions], dim=1)).squeeze(1)


class Actor(nn.Module):
    """Normalized observations (N, 348) -> mean and log standard deviation (N, 17) of a Gaussian; its sample's tanh is the action."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(OBS_SIZE, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2 * ACTION_SIZE)
        )

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_std = self.net(obs).split(ACTION_SIZE, dim=1)
        return mean, log_std.clamp(LOG_STD_MIN, LOG_STD_MAX)

    def get_action(self, obs: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalized observations (N, 348), standard normal noise (N, 17) -> actions (N, 17) in (-1, 1), their log probabilities (N,)."""
        mean, log_std = self(obs)
        raw = mean + log_std.exp() * noise
        log_prob = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        log_prob -= 2 * (math.log(2) - raw - F.softplus(-2 * raw))  # log of tanh's slope, 1 - tanh², without underflow
        return raw.tanh(), log_prob.sum(1)


# ---- Labelling


class Labeller:
    """States -> CLIP rewards, batch by batch, by the threads of `pool` and, while it waits for them, the one that asks for the result.

    On a CPU one thread a core, with PyTorch's operations on one thread each, is faster than PyTorch's own threads: most operations
    here are small. The batches, and so the rewards, are the same whoever labels them.
    """

    def __init__(self, reward_model: CLIPReward, args: Args, pool: ThreadPoolExecutor):
        self.reward_model, self.task, self.batch_size, self.pool = reward_model, args.task, args.clip_batch_size, pool
        self.batches, self.rest = [], torch.empty(0, STATE_SIZE)
        look = (args.textures, args.camera, args.supersample, args.clip_batch_size, reward_model.device)
        self.scenes = SimpleQueue()  # of those that nobody draws with
        for _ in range(max(THREADS, 2) if reward_model.device.type == "cpu" else 1):  # one for each thread that labels
            self.scenes.put(Scene(*reward_model.size, *look))

    def submit(self, states: torch.Tensor) -> None:
        """Take in states (N, 24); a batch begins when it is full and more come."""
        *full, self.rest = torch.cat([self.rest, states]).split(self.batch_size)
        self.batches += [(self.pool.submit(self.label, batch), batch) for batch in full]

    @torch.no_grad()
    def label(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float, float]:
        """States (N, 24) -> rewards (N,), 1.0 where the task's condition holds (N,), seconds spent drawing, and scoring."""
        scene = self.scenes.get()
        start = time.perf_counter()
        try:
            frames, points = scene.draw(states.to(self.reward_model.device))  # (N, 3, height, width) uint8, never stored
        finally:
            self.scenes.put(scene)
        drawn = time.perf_counter()
        rewards = self.reward_model(frames)
        true_rewards = TASKS[self.task][1](points).float() if self.task else torch.zeros_like(rewards)
        return rewards, true_rewards, drawn - start, time.perf_counter() - drawn

    def result(self, show: str | None = None) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
        """-> rewards and true rewards of all states since the last result, in their order; seconds spent on them, the sum of all threads'."""
        self.batches.append((self.pool.submit(self.label, self.rest), self.rest))
        batches = tqdm(self.batches, desc=show, leave=False, disable=not show)
        own = [self.label(states) if task.cancel() else None for task, states in batches]  # what no thread has begun yet
        labels = [mine or task.result() for mine, (task, _) in zip(own, self.batches)]
        self.batches, self.rest = [], self.rest[:0]
        rewards, true_rewards, draw_seconds, clip_seconds = zip(*labels)
        return torch.cat(rewards), torch.cat(true_rewards), {"draw": sum(draw_seconds), "clip": sum(clip_seconds)}


# ---- Evaluation, pictures, files


@torch.no_grad()
def evaluate(actor: Actor, obs_norm: nn.Module, labeller: Labeller, args: Args) -> tuple[dict, torch.Tensor, torch.Tensor]:
    """Play `args.episodes` episodes without exploration -> metrics, states (episode_length, episodes, 24), their CLIP rewards."""
    actor, obs_norm = deepcopy(actor).cpu(), deepcopy(obs_norm).cpu()
    envs = Humanoid(args.episodes, args.episode_length, THREADS)
    obs, _ = envs.reset(seed=(args.seed + 1) * 1_000_000)  # start states that no training sees, and no other seed
    states = []
    for _ in trange(args.episode_length, desc=f"play {args.episodes} episodes", leave=False):
        obs, _, _, _, infos = envs.step(MAX_CTRL * actor(obs_norm(obs))[0].tanh())
        states.append(infos["states"])
    states = torch.stack(states)
    labeller.submit(states.flatten(0, 1))
    rewards, true_rewards, _ = labeller.result(f"score {args.episodes} episodes")
    states = states.to(rewards.device)
    rewards, true_rewards = rewards.view(states.shape[:2]), true_rewards.view(states.shape[:2])
    metrics = {
        "success_rate": succeeded(true_rewards).float().mean().item(),
        "clip_return": rewards.sum(0).mean().item(),
        "ground_truth_return": true_rewards.sum(0).mean().item(),
    }
    if not args.task:
        metrics = {"clip_return": metrics["clip_return"]}  # no more is known
    return metrics, states, rewards


def succeeded(true_rewards: torch.Tensor) -> torch.Tensor:
    """True rewards (T, N) -> whether the condition holds at half of an episode's steps or more (N,) bool (paper, Table 2)."""
    return true_rewards.mean(0) >= 0.5


def draw_large(states: torch.Tensor, size: int, args: Args) -> np.ndarray:
    """States (N, 24) -> smooth frames for people (N, size, size, 3) uint8."""
    n = min(THREADS, len(states)) if states.device.type == "cpu" else 1
    scenes = [Scene(size, size, args.textures, args.camera, 2, 4, states.device) for _ in range(n)]
    frames = np.empty((len(states), size, size, 3), dtype=np.uint8)
    with ThreadPoolExecutor(n) as pool:
        for k, part in enumerate(pool.map(lambda k: scenes[k].draw(states[k::n])[0], range(n))):
            frames[k::n] = part.permute(0, 2, 3, 1).cpu().numpy()
    return frames


def picture(states: torch.Tensor, rewards: torch.Tensor, args: Args) -> Image.Image:
    """States (T, N, 24) and their rewards (T, N) -> a contact sheet: eight frames of an episode a row, with step and CLIP reward."""
    size = 240
    steps = torch.linspace(0, len(states) - 1, 8).round().long().to(states.device)
    frames = draw_large(states[steps].transpose(0, 1).flatten(0, 1), size - 4, args)
    sheet = Image.new("RGB", (8 * size, states.shape[1] * (size + 22)), "gray")
    pen = ImageDraw.Draw(sheet)
    for n, frame in enumerate(frames):
        row, k = divmod(n, 8)
        sheet.paste(Image.fromarray(frame), (k * size + 2, row * (size + 22) + 2))
        text = f"step {steps[k] + 1}   reward {rewards[steps[k], row]:.3f}"
        pen.text((k * size + 40, row * (size + 22) + size), text, "white", ImageFont.load_default(14))
    return sheet


def write_video(path: Path, states: torch.Tensor, rewards: torch.Tensor, args: Args) -> None:
    """States (T, N, 24) and rewards (T, N) -> the N episodes one after another as an mp4, each frame with its CLIP reward."""
    temporary = path.with_suffix(".tmp.mp4")
    try:
        with iio.imopen(temporary, "w", plugin="pyav") as file:
            file.init_video_stream("libx264", fps=30)  # less than half of the real speed, which is 67
            for episode in trange(states.shape[1], desc="draw the video", leave=False):
                for frame, reward in zip(draw_large(states[:, episode], 320, args), rewards[:, episode]):
                    frame = Image.fromarray(frame)
                    text = f"episode {episode + 1}   CLIP reward {reward:.3f}"
                    ImageDraw.Draw(frame).text((10, 10), text, "black", ImageFont.load_default(18))
                    file.write_frame(np.asarray(frame))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def report_evaluation(path: Path, args: Args, metrics: dict, states: torch.Tensor, rewards: torch.Tensor) -> Image.Image:
    """Write an evaluation to path.json, path.mp4 and path.png and print its table -> the picture."""
    versions = {name: version(name) for name in ("torch", "open_clip_torch", "mujoco", "mujoco_warp")}
    sheet = picture(states[:, :4], rewards[:, :4], args)
    write_video(Path(f"{path}.mp4"), states[:, :3], rewards[:, :3], args)
    sheet.save(f"{path}.png")
    save(Path(f"{path}.json"), metrics | {"settings": args.to_save(), "versions": versions})
    print(f"{'prompt':>20}  {'; '.join(args.prompt)}")
    for name, value in metrics.items():
        print(f"{name.replace('_', ' '):>20}  {value:10.3f}")
    print(f"{'written to':>20}  {path}.json, .mp4, .png")
    return sheet


def save(path: Path, content: dict) -> None:
    """Write a .pt or .json file whole or not at all: a kill at any moment leaves the old one."""
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        if path.suffix == ".json":
            file.write((json.dumps(content, indent=2) + "\n").encode())
        else:
            torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def fail(message: str) -> None:
    if RANK == 0:
        print(f"{SCRIPT}.py: error: {message}", file=sys.stderr)
    sys.exit(2)


def read_checkpoint(args: Args) -> tuple[Args, dict]:
    """The checkpoint that --resume or --evaluate names -> its settings with what the command line may change, and its content."""
    path = args.evaluate or args.resume / "checkpoint.pt"
    if not os.path.isfile(path):
        fail(f"there is no checkpoint {path}{': give the best.pt in it' if os.path.isdir(path) else ''}")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if checkpoint["script"] != SCRIPT or ("actor" if args.evaluate else "rngs") not in checkpoint:
            raise ValueError
        own = Args(**checkpoint["settings"] | {"resume": args.resume, "evaluate": args.evaluate})
        processes = 1 if args.evaluate else 1 + len(checkpoint["others"])
    except Exception:  # whatever the file holds instead
        fail(f"{path} is not a checkpoint of {SCRIPT}.py{' that can be resumed' if args.resume else ''}")
    if args.resume and processes != WORLD_SIZE:
        fail(f"this run has {processes} processes, not {WORLD_SIZE}: give torchrun as many (--nproc-per-node)")
    own.run_dir = args.resume or args.evaluate.parent
    own.device = None if args.evaluate else own.device  # a run goes on exactly on its own kind of device only
    args = tyro.cli(Args, default=own)
    changed = {name for name, value in asdict(args).items() if value != getattr(own, name)}
    changed -= {"episodes", "seed", "device"} if args.evaluate else set()
    if changed:
        fail(
            f"{path} brings its own settings: leave out {', '.join('--' + name.replace('_', '-') for name in sorted(changed))}"
        )
    return args, checkpoint


def read_settings() -> tuple[Args, dict | None]:
    """The command line -> checked settings and, with --resume or --evaluate, the checkpoint that most of them come from."""
    args, checkpoint = tyro.cli(Args), None
    if args.resume and args.evaluate:
        fail("--resume goes on with a training, --evaluate only looks at one: give one of the two")
    if args.resume or args.evaluate:
        args, checkpoint = read_checkpoint(args)
    elif args.paper:
        args = tyro.cli(Args, default=replace(Args(), **PAPER))
    for name, value in asdict(args).items():
        flag, least = "--" + name.replace("_", "-"), 0 if name in ("seed", "learning_starts") else 1
        if type(value) is int and not least <= value < 2**40:
            fail(f"{flag} must be at least {least}{' and less than 2^40' if value > least else ''}, not {value}")
        if type(value) is float and name != "temperature" and not 0 <= value <= 1:
            fail(f"{flag} must lie between 0 and 1, not {value}")
    if args.ent_coef == 0:
        fail("--ent-coef must be above 0: it is tuned by factors")
    if args.evaluate and WORLD_SIZE > 1:
        fail("--evaluate is the work of one process: leave out torchrun")
    if args.num_envs % WORLD_SIZE or args.batch_size % WORLD_SIZE:
        fail(f"{WORLD_SIZE} processes need --num-envs and --batch-size that are multiples of {WORLD_SIZE}")
    args.task = args.task or ("kneeling" if args.prompt is None else None)
    args.prompt = (TASKS[args.task][0],) if args.prompt is None else args.prompt
    args.task = args.task or next((task for task, (prompt, _) in TASKS.items() if args.prompt == (prompt,)), None)
    if args.reward == "contrastive" and args.negative_prompt is None:
        args.negative_prompt = tuple(p for task, (p, _) in TASKS.items() if task != args.task and p not in args.prompt)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.device.split(":")[0] not in ("cpu", "cuda"):
        fail(f"no device {args.device} here: only cpu and cuda are supported")
    try:
        torch.zeros(1, device=f"cuda:{LOCAL_RANK}" if args.device == "cuda" else args.device)
    except (RuntimeError, AssertionError) as error:  # no driver, no such GPU, a CPU-only build of PyTorch
        hint = "a run goes on only on its own kind of device" if args.resume else "try --device cpu"
        fail(f"no device {args.device} here ({str(error).splitlines()[0]}); {hint}")
    if args.device.startswith("cuda") and WORLD_SIZE > 1:
        if ":" in args.device or int(os.environ["LOCAL_WORLD_SIZE"]) > torch.cuda.device_count():
            fail(f"each process needs a GPU of its own: give --device cuda and at most {torch.cuda.device_count()} processes")
    args.precision = args.precision or native_precision(args.device)
    args.clip_model = args.clip_model or ("ViT-bigG-14/laion2b_s39b_b160k" if args.device.startswith("cuda") else "tiny")
    args.run_dir = args.run_dir or Path("runs") / f"{SCRIPT}__{args.seed}__{int(time.time())}"
    if RANK == 0 and not checkpoint and os.path.exists(args.run_dir):  # the others may come when it has been made
        resumable = os.path.exists(args.run_dir / "checkpoint.pt")
        fail(f"{args.run_dir} exists: choose another --run-dir{f' or --resume {args.run_dir}' if resumable else ''}")
    target = args.evaluate or args.run_dir
    folder = args.resume or next(parent for parent in target.absolute().parents if os.path.exists(parent))
    if not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
        fail(f"cannot write to {target}: {folder} is not a folder that can be written to")
    if args.reward == "contrastive" and not args.negative_prompt:
        fail("--reward contrastive needs a --negative-prompt: say what else there might be to see")
    contrastive, plain = ("negative_prompt", "temperature", "threshold"), ("baseline_prompt", "goal_baseline_alpha")
    for name in plain if args.reward == "contrastive" else contrastive:
        if getattr(args, name) != getattr(Args, name):
            why = "does not go with" if name in plain else "belongs to"
            fail(f"--{name.replace('_', '-')} {why} --reward contrastive")
    if args.track and not find_spec("wandb"):
        fail("--track needs Weights & Biases: pip install wandb")
    return args, checkpoint


# ---- The loop


@torch.no_grad()
def act(
    actor: Actor, obs_norm: nn.Module, envs: Humanoid, labeller: Labeller, rng: torch.Generator, step: int, args: Args
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """One episode in all environments at once, on the CPU, where the physics is; the labeller gets the states as they come.

    -> obs (episode_length + 1, num_envs, 348), actions (episode_length, num_envs, 17), states (episode_length, num_envs, 24), seconds.
    """
    start = time.perf_counter()
    obs, _ = envs.reset()
    all_obs, all_actions, all_states = [obs], [], []
    for _ in range(args.episode_length):
        noise = torch.randn(envs.num_envs, ACTION_SIZE, generator=rng)
        if step < args.learning_starts:
            actions = torch.erf(noise / math.sqrt(2))  # uniform in [-1, 1]
        else:
            actions, _ = actor.get_action(obs_norm(obs), noise)
        obs, _, _, _, infos = envs.step(MAX_CTRL * actions)
        labeller.submit(infos["states"])
        all_obs.append(obs)
        all_actions.append(actions)
        all_states.append(infos["states"])
        step += args.num_envs
    return torch.stack(all_obs), torch.stack(all_actions), torch.stack(all_states), time.perf_counter() - start


def main() -> None:
    args, checkpoint = read_settings()
    torch.set_num_threads(1)  # threads of our own are faster: see Labeller
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", LOCAL_RANK if device.index is None else device.index)
        torch.cuda.set_device(device)
    if WORLD_SIZE > 1:
        dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    try:
        reward_model = CLIPReward(
            *(args.clip_model, args.prompt, args.baseline_prompt, args.goal_baseline_alpha),
            *(device, args.clip_batch_size, args.precision),
            *(args.negative_prompt if args.reward == "contrastive" else (), args.temperature, args.threshold),
        )
    except RewardModelError as error:
        fail(str(error))
    about = " (bundled: trained on these very scenes, good for trying and testing, no evidence of zero-shot ability)"
    if RANK == 0:
        print(f"CLIP model {args.clip_model}{about if args.clip_model == 'tiny' else ''} in {args.precision} on {args.device}")
        print(f"prompt {'; '.join(args.prompt)}; {f'success is measured as {args.task}' if args.task else 'no known task'}")
    if RANK == 0 and not args.evaluate:
        print(f"run folder {args.run_dir}; watch it with: tensorboard --logdir {args.run_dir.parent}")

    # One core is left to the learning, here; on a GPU one thread acts and one labels.
    threads = max(THREADS - 1, 1) if device.type == "cpu" else 2
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    labeller = Labeller(reward_model, args, pool)

    torch.manual_seed(args.seed)
    actor = Actor().to(device)
    mean_actor = deepcopy(actor) if args.average_actor else actor  # the one that acts
    qf1, qf2, qf1_target, qf2_target = (SoftQNetwork(args.layer_norm).to(device) for _ in range(4))
    qf1_target.load_state_dict(qf1.state_dict())
    qf2_target.load_state_dict(qf2.state_dict())
    obs_norm = Normalize(OBS_SIZE).to(device) if args.normalize_obs else nn.Identity()
    reward_norm = Normalize(1).to(device) if args.normalize_reward else nn.Identity()
    if args.evaluate:
        actor.load_state_dict(checkpoint.get("mean_actor", checkpoint["actor"]))  # best.pt has only the one that acted
        obs_norm.load_state_dict(checkpoint["obs_norm"])
        path = args.evaluate.with_name(f"{args.evaluate.stem}_evaluation")
        report_evaluation(path, args, *evaluate(actor, obs_norm, labeller, args))
        return
    log_ent_coef = torch.tensor(math.log(args.ent_coef), device=device, requires_grad=True)
    actor_parameters, q_parameters = list(actor.parameters()), [*qf1.parameters(), *qf2.parameters()]
    averaged = [*q_parameters, *actor_parameters]
    averages = [*qf1_target.parameters(), *qf2_target.parameters(), *mean_actor.parameters()]
    follow = get_ema_multi_avg_fn(1 - args.tau)  # moves the running means, all in one operation
    actor_optimizer = torch.optim.Adam(actor_parameters, lr=args.learning_rate, fused=True)
    q_optimizer = torch.optim.Adam(q_parameters, lr=args.learning_rate, fused=True)
    ent_coef_optimizer = torch.optim.Adam([log_ent_coef], lr=args.learning_rate, fused=True)
    num_envs, batch_size = args.num_envs // WORLD_SIZE, args.batch_size // WORLD_SIZE  # of this process
    rb = ReplayBuffer(max(args.buffer_size // WORLD_SIZE, num_envs * args.episode_length), device)
    envs = Humanoid(num_envs, args.episode_length, max(THREADS - 1, 1))
    envs.reset(seed=10_000 * args.seed + RANK * num_envs)  # each environment has its own
    rngs = {"act": torch.Generator(), "sample": torch.Generator(device)}
    for k, rng in enumerate(rngs.values(), 1):
        rng.manual_seed(args.seed + 1_000 * k + 1_000_000 * RANK)
    global_step, best_return, training_seconds = 0, -math.inf, 0.0
    parts = {"actor": actor, "qf1": qf1, "qf2": qf2, "qf1_target": qf1_target, "qf2_target": qf2_target}
    parts |= {"mean_actor": mean_actor, "obs_norm": obs_norm, "reward_norm": reward_norm}
    parts |= {"actor_optimizer": actor_optimizer, "q_optimizer": q_optimizer, "ent_coef_optimizer": ent_coef_optimizer}

    def save_checkpoint() -> None:
        """All that the rest of the run depends on between two rounds: a resumed run is the unbroken one, bit for bit on a CPU."""
        own = {"rb": rb.state_dict(), "rngs": {name: rng.get_state() for name, rng in rngs.items()}}
        own["envs_rngs"] = [rng.bit_generator.state for rng in envs.rngs]
        every = [own] * WORLD_SIZE  # the own parts of every process
        if WORLD_SIZE > 1:
            dist.gather_object(own, every if RANK == 0 else None)
        if RANK == 0:
            counters = {"global_step": global_step, "best_return": best_return, "log_ent_coef": log_ent_coef.detach()}
            content = {"script": SCRIPT, "settings": args.to_save(), "training_seconds": training_seconds} | counters
            content |= own | {"others": every[1:]} | {name: part.state_dict() for name, part in parts.items()}
            save(args.run_dir / "checkpoint.pt", content)

    if args.track and RANK == 0:
        import wandb

        name = args.run_dir.name
        wandb.init(project=args.wandb_project_name, id=name, config=args.to_save(), resume="allow", sync_tensorboard=True)
    if args.resume:
        global_step, best_return = checkpoint["global_step"], checkpoint["best_return"]
        training_seconds = checkpoint["training_seconds"]
        if global_step >= args.total_timesteps and RANK == 0:
            print("this run is already trained: only its evaluation is made again")
        own = [checkpoint, *checkpoint["others"]][RANK]
        for name, rng in rngs.items():
            rng.set_state(own["rngs"][name])
        rb.load_state_dict(own["rb"])
        for env_rng, state in zip(envs.rngs, own["envs_rngs"]):
            env_rng.bit_generator.state = state
        log_ent_coef.data.copy_(checkpoint["log_ent_coef"])
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])
        del checkpoint, own  # the replay buffer is large
    else:
        try:
            if RANK == 0:
                args.run_dir.mkdir(parents=True)
        except OSError as error:
            fail(f"cannot write to {args.run_dir}: {error.strerror}")
        save_checkpoint()
    if RANK == 0:
        # What a killed run logged after its last checkpoint is to be forgotten: hence purge_step.
        writer = SummaryWriter(args.run_dir, purge_step=global_step + 1)
        rows = "\n".join(f"|{name}|{value}|" for name, value in args.to_save().items())
        writer.add_text("hyperparameters", f"|setting|value|\n|-|-|\n{rows}")

    stop = []  # the signal that asks to stop, once it came; the round in progress is finished first

    def request_stop(signum: int, _) -> None:
        if stop:
            raise KeyboardInterrupt
        stop.append(signum)
        os.write(2, b"\nfinishing this round first (once more: stop at once, back to the last checkpoint)\n")

    def stopping() -> bool:
        return total(torch.tensor(len(stop), device=device)).item() > 0  # all processes, or none

    progress = tqdm(
        total=args.total_timesteps, initial=global_step, unit="step", desc="train", smoothing=0.05, disable=RANK > 0
    )
    signal.signal(signal.SIGINT, request_stop)
    signal.signal(signal.SIGTERM, request_stop)
    while global_step < args.total_timesteps and not stopping():
        start, step_before = time.perf_counter(), global_step
        learning = step_before >= max(args.learning_starts, 1)

        # ---- Act, in a thread, with the policy as it is now: its successor is learned meanwhile.
        played = {"actor": deepcopy(mean_actor).cpu(), "obs_norm": deepcopy(obs_norm).cpu()}
        acting = pool.submit(act, *played.values(), envs, labeller, rngs["act"], step_before, args)

        # ---- Learn: SAC, on the transitions of the rounds before.
        if args.anneal_lr:
            for optimizer in (actor_optimizer, q_optimizer, ent_coef_optimizer):
                optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - step_before / args.total_timesteps)
        for update in range(args.gradient_steps if learning else 0):
            b_obs, b_next_obs, b_actions, b_rewards = rb.sample(batch_size, rngs["sample"])
            b_obs, b_next_obs, b_rewards = obs_norm(b_obs), obs_norm(b_next_obs), reward_norm(b_rewards)
            ent_coef = log_ent_coef.detach().exp()
            b_noise = torch.randn(2, batch_size, ACTION_SIZE, generator=rngs["sample"], device=device)
            with torch.no_grad():  # every next state bootstraps: see ReplayBuffer
                next_actions, next_log_prob = actor.get_action(b_next_obs, b_noise[0])
                next_q = torch.min(qf1_target(b_next_obs, next_actions), qf2_target(b_next_obs, next_actions))
                td_target = b_rewards + args.gamma * (next_q - ent_coef * next_log_prob)
            q_values = qf1(b_obs, b_actions)
            qf_loss = F.mse_loss(q_values, td_target) + F.mse_loss(qf2(b_obs, b_actions), td_target)
            q_optimizer.zero_grad()
            qf_loss.backward()
            average_gradients(q_parameters)
            q_optimizer.step()

            if update % args.policy_frequency == 0:
                actions, log_prob = actor.get_action(b_obs, b_noise[1])
                actor_loss = (ent_coef * log_prob - torch.min(qf1(b_obs, actions), qf2(b_obs, actions))).mean()
                actor_optimizer.zero_grad()
                actor_loss.backward(inputs=actor_parameters)  # the critics need no gradient of it
                average_gradients(actor_parameters)
                actor_optimizer.step()

                ent_coef_loss = -(log_ent_coef.exp() * (log_prob.detach() - ACTION_SIZE).mean())  # target entropy: -17
                ent_coef_optimizer.zero_grad()
                ent_coef_loss.backward()
                average_gradients([log_ent_coef])
                ent_coef_optimizer.step()
            follow(averages, averaged, None)
        seconds = {"update": time.perf_counter() - start}

        # ---- Label: the frame after each step is drawn and scored with CLIP (Algorithm 1; Definition 1), by whatever threads
        # are free, and now by this one, too. Then the round enters the buffer.
        all_obs, actions, states, seconds["simulate"] = acting.result()
        clip_rewards, true_rewards, label_seconds = labeller.result()
        seconds |= label_seconds
        all_obs, actions, states = all_obs.to(device), actions.to(device), states.to(device)
        obs, next_obs, actions = all_obs[:-1].flatten(0, 1), all_obs[1:].flatten(0, 1), actions.flatten(0, 1)
        rb.add(obs, next_obs, actions, clip_rewards, states.flatten(0, 1))
        global_step += args.num_envs * args.episode_length
        if args.normalize_obs:
            obs_norm.update(all_obs.flatten(0, 1))
        if args.normalize_reward:
            reward_norm.update(clip_rewards.view(-1, 1))

        # ---- Report.
        clip_rewards, true_rewards = (r.view(args.episode_length, num_envs) for r in (clip_rewards, true_rewards))
        sums = torch.stack([clip_rewards.sum(), true_rewards.sum(), succeeded(true_rewards).sum()])
        clip_return, ground_truth_return, success_rate = (total(sums) / args.num_envs).tolist()
        if clip_return > best_return:
            best_return = clip_return if step_before >= args.learning_starts else -math.inf  # random actions do not count
            if RANK == 0:
                best = {"script": SCRIPT, "settings": args.to_save(), "global_step": step_before}
                save(args.run_dir / "best.pt", best | {name: part.state_dict() for name, part in played.items()})
        elapsed = time.perf_counter() - start
        training_seconds += elapsed
        progress.update(min(global_step, args.total_timesteps) - progress.n)
        if RANK == 0:
            shown, scalars = {"clip_return": f"{clip_return:.1f}"}, {"charts/clip_return": clip_return}
            if args.task:
                shown["success"] = f"{success_rate:.2f}"
                scalars |= {"charts/ground_truth_return": ground_truth_return, "charts/success_rate": success_rate}
            progress.set_postfix(shown)
            scalars |= {"charts/SPS": (global_step - step_before) / elapsed}
            scalars |= {f"seconds_per_round/{phase}": value for phase, value in seconds.items()}
            if learning:
                scalars |= {"losses/qf_loss": qf_loss.item(), "losses/actor_loss": actor_loss.item()}
                scalars |= {"losses/q_values": q_values.mean().item(), "losses/entropy": -log_prob.mean().item()}
                scalars |= {"losses/ent_coef": ent_coef.item()}
            for name, value in scalars.items():
                writer.add_scalar(name, value, global_step)
            if step_before == 0 or step_before < args.total_timesteps / 2 <= global_step:
                sheet = picture(states[:, :1], clip_rewards[:, :1], args)  # the first environment's
                writer.add_image("frames", np.asarray(sheet), global_step, dataformats="HWC")
                sheet.save(args.run_dir / f"frames_{'middle' if step_before else 'start'}.png")
        if step_before // args.checkpoint_every < global_step // args.checkpoint_every and global_step < args.total_timesteps:
            if RANK == 0:
                writer.flush()
            save_checkpoint()

    stopped = stopping()
    progress.close()
    if RANK == 0:
        writer.flush()
    save_checkpoint()
    if WORLD_SIZE > 1:
        dist.barrier()
        dist.destroy_process_group()
    if RANK > 0:
        return
    if stopped:
        launcher = f"torchrun --nproc-per-node={WORLD_SIZE}" if WORLD_SIZE > 1 else "python"
        print(f"stopped at step {global_step}, nothing lost; go on with: {launcher} {SCRIPT}.py --resume {args.run_dir}")
        sys.exit(128 + (stop or [signal.SIGTERM])[0])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # No round has played the last policy: it takes the place of the best one if it earns more.
    best = torch.load(args.run_dir / "best.pt", map_location=device, weights_only=True)
    last = deepcopy(best | {"actor": mean_actor.state_dict(), "obs_norm": obs_norm.state_dict(), "global_step": global_step})
    evaluations = []
    for policy in (best, last):
        actor.load_state_dict(policy["actor"])
        obs_norm.load_state_dict(policy["obs_norm"])
        evaluations.append(evaluate(actor, obs_norm, labeller, args))
    metrics, states, rewards = max(evaluations, key=lambda evaluation: evaluation[0]["clip_return"])
    if metrics is evaluations[1][0]:
        save(args.run_dir / "best.pt", last)
    metrics["steps_per_second"] = global_step / training_seconds
    sheet = report_evaluation(args.run_dir / "result", args, metrics, states, rewards)
    writer.add_image("frames", np.asarray(sheet), global_step, dataformats="HWC")
    writer.close()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("interrupted; a training that had begun goes on from its last checkpoint with --resume", file=sys.stderr)
        sys.stdout.flush()
        os._exit(130)  # sys.exit would wait until the threads have labelled what they were given
