"""A humanoid robot learned from one sentence: SAC whose only reward is a CLIP model's opinion of the frame.

    python sac_clip_humanoid.py --prompt "a humanoid robot kneeling"

The method is VLM-RM (Rocamonde et al., ICLR 2024, arXiv 2310.12921), its Algorithm 1 with SAC (Haarnoja et
al., 2018). Read from top to bottom; the loop is in `train`, the reward in clip_reward.py.

C MuJoCo moves the robots, mujoco_warp renders them, on a CPU or a CUDA GPU, without OpenGL or a display.
"""

import fcntl
import json
import math
import os
import sys
import time
import zipfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from threading import Lock
from typing import Literal

os.environ["MUJOCO_GL"] = "disable"  # or importing mujoco fails where this names a library that is not there

import gymnasium
import imageio.v3 as iio
import mujoco
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from PIL import Image, ImageDraw, ImageFont
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from clip_reward import THREADS, Labeller, RewardArgs, UsageError, make_reward, replayed

SCRIPT = Path(__file__).stem


# warp and mujoco_warp are imported where they are used: they take seconds, and --help needs neither.


Task = Literal[
    "kneeling", "lotus-position", "standing-up", "arms-raised", "doing-splits", "hands-on-hips",
    "arms-crossed", "standing-on-one-leg"
]  # fmt: skip


@dataclass
class Args(RewardArgs):
    """Teach a humanoid with a sentence: SAC on a CLIP model's reward (in brackets: the values of --paper)."""

    prompt: tuple[str, ...] | None = None  # the goal; several are averaged (default: that of --task)
    task: Task | None = None  # whose success is measured (default: that of the prompt, or none)
    baseline_prompt: tuple[str, ...] = ("a humanoid robot",)  # what the scene looks like in general
    goal_baseline_alpha: float = 0.0  # α: 0 plain cosine (as in Table 1), 1 only along baseline-goal
    textures: Literal["realistic", "original"] = "realistic"  # plastic and metal, or Gymnasium's
    camera: Literal["fixed", "original"] = "fixed"  # the paper's, or Gymnasium's, which follows the robot
    supersample: int = 1  # N: N x N rays a pixel of what CLIP sees (pictures and video: always 2)

    paper: bool = False  # the values in brackets below, where no other is given
    seed: int = 1  # of weights, start states and exploration
    total_timesteps: int | None = None  # of all environments (default: 128,000 with tiny) (10,000,000)
    num_envs: int = 16  # environments side by side (32)
    episode_length: int = 100  # steps of 15 ms; a round is one episode in every environment
    gradient_steps: int = 200  # updates per round (100)
    policy_frequency: int = 2  # updates of the critics for each of the actor (1)
    learning_starts: int = 6_400  # rounds that begin before this step are random, nothing is learned (50,000)
    learning_rate: float = 6e-4  # of Adam, for actor, critics and entropy coefficient
    anneal_lr: bool = True  # it falls to 0 (not)
    buffer_size: int = 1_000_000  # transitions kept, in whole rounds (Stable-Baselines3's default)
    gamma: float = 0.98  # discount factor: looks some 50 steps ahead, half an episode (0.95: some 20)
    n_step: int = 3  # rewards summed before the critics' value stands for the rest (1)
    tau: float = 0.005  # how far targets follow the critics, and the mean actor the actor, at each update
    batch_size: int = 256  # transitions per update (512)
    ent_coef: float = 0.03  # weight of the entropy at first; then tuned for -17, -1 a motor (1.0)
    log_std_min: float = -5.0  # least log σ of the actor, a floor for exploration (-20)
    noise_correlation: float = 0.9  # of the exploration noise from step to step; 0 is SAC's own (0)
    full_obs: bool = False  # observe all that Gymnasium can (so)
    normalize_obs: bool = True  # by the mean and variance of all so far (not)
    standardize_rewards: bool = True  # by the mean and deviation of all in the replay buffer (not)
    layer_norm: bool = True  # in the critics (not)
    act_with_mean: bool = True  # the running mean of the actor's weights acts (not)

    run_dir: str | None = None  # folder of this run, made anew (default: runs/SCRIPT__SEED__TIME)
    evaluate_every: int = 16_000  # steps between two evaluations; the newest of the best is kept (64,000)
    episodes: int = 100  # of the final evaluation, or of --evaluate
    resume: str | None = None  # go on with the run in this folder; its settings hold, but for those named
    evaluate: str | None = None  # only evaluate this checkpoint, with its settings, but for those named
    track: bool = False  # log to Weights & Biases, too (WANDB_PROJECT names the project)


PAPER = {
    "total_timesteps": 10_000_000, "num_envs": 32, "gradient_steps": 100, "policy_frequency": 1,
    "learning_starts": 50_000, "anneal_lr": False, "gamma": 0.95, "n_step": 1, "batch_size": 512,
    "ent_coef": 1.0, "log_std_min": -20.0, "noise_correlation": 0.0, "full_obs": True, "normalize_obs": False,
    "standardize_rewards": False, "layer_norm": False, "act_with_mean": False, "evaluate_every": 64_000,
}  # fmt: skip

# ---- Environment

POSE_SIZE = 24  # a state's first 24 numbers are the pose, all that a frame shows
ACTION_SIZE = 17  # motors
MAX_CTRL = 0.4  # the motors' control goes from -0.4 to 0.4, actions from -1 to 1


class Humanoids(gymnasium.vector.SyncVectorEnv):
    """Gymnasium's Humanoid-v5, many at once; as in the paper no episode ends early: that would tell the task.

    A state is MuJoCo's qpos, the pose (position in m and quaternion of the torso, 17 joint angles in rad),
    qvel, the 23 speeds, and cinert, the inertia of its 13 bodies about the centre of mass, which tells where
    the limbs are; with --full-obs all that Gymnasium has. The agent does not see the first two numbers, the
    place on the floor.
    """

    def __init__(self, num_envs: int, args: Args):
        full = ("cvel", "qfrc_actuator", "cfrc_ext")
        options = {f"include_{name}_in_observation": args.full_obs for name in full}
        options["exclude_current_positions_from_observation"] = False
        super().__init__([lambda: gymnasium.make("Humanoid-v5", **options)] * num_envs)
        self.pool = ThreadPoolExecutor(min(THREADS, 8))  # more than 8 were slower on 16 cores

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        """As in Gymnasium, without rewards; in MuJoCo's C code several robots move at once."""
        states = np.stack([*self.pool.map(self.move, self.envs, actions)])
        no = np.zeros(self.num_envs, dtype=bool)
        return states, no.astype(np.float32), no, no, {}

    @staticmethod
    def move(env: gymnasium.Env, action: np.ndarray) -> np.ndarray:
        env.unwrapped.do_simulation(action, env.unwrapped.frame_skip)
        return env.unwrapped._get_obs()


# ---- Rendering and labelling

COLORS = {  # of the realistic look's parts, by the ends of their names
    "torso1": "#e8eaee", "butt": "#e8eaee", "waist": "#808690", "uarm1": "#f07814", "larm": "#fac432",
    "thigh1": "#1e54be", "shin1": "#ced2d8", "hand": "#24262c", "foot": "#24262c", "head": "#eceef0",
    "floor": "#ffffff",
}  # fmt: skip


def scene_spec(textures: str) -> mujoco.MjSpec:
    """Gymnasium's humanoid, dressed as `textures` says, with the paper's camera, "fixed", beside its own."""
    spec = mujoco.MjSpec.from_file(str(Path(gymnasium.__file__).parent / "envs/mujoco/assets/humanoid.xml"))
    spec.option.solver = mujoco.mjtSolver.mjSOL_NEWTON  # mujoco_warp has no PGS, and nothing is solved here
    sin, cos, distance = math.sin(math.radians(-10)), math.cos(math.radians(-10)), 3.5
    # It looks at (0, 0, 1), 10° down.
    camera = spec.worldbody.add_camera(name="fixed", pos=[distance * cos, 0, 1 - distance * sin])
    camera.alt.type = mujoco.mjtOrientation.mjORIENTATION_XYAXES
    camera.alt.xyaxes = [0, 1, 0, sin, 0, cos]  # the picture's right, and up
    if textures == "original":
        return spec

    sky = next(texture for texture in spec.textures if texture.type == mujoco.mjtTexture.mjTEXTURE_SKYBOX)
    sky.rgb1, sky.rgb2 = [0.18, 0.44, 0.78], [1, 1, 1]  # overhead and underfoot; between them the horizon
    tiles = spec.texture("texplane")  # calm: a chessboard would be most of what a model sees
    tiles.builtin = mujoco.mjtBuiltin.mjBUILTIN_FLAT
    tiles.mark = mujoco.mjtMark.mjMARK_EDGE
    tiles.rgb1, tiles.markrgb = [0.62, 0.6, 0.57], [0.44, 0.42, 0.4]
    floor = spec.material("MatPlane")
    floor.texrepeat, floor.specular, floor.reflectance = [20, 20], 0, 0
    head = spec.body("torso")
    ellipsoid, sphere = mujoco.mjtGeom.mjGEOM_ELLIPSOID, mujoco.mjtGeom.mjGEOM_SPHERE
    head.add_geom(name="visor", type=ellipsoid, pos=[0.055, 0, 0.2], size=[0.045, 0.075, 0.04])
    for y in (-0.03, 0.03):
        head.add_geom(name=f"eye{y}", type=sphere, pos=[0.09, y, 0.2], size=[0.016, 0, 0])
    for geom in spec.geoms:
        name = next((part for part in COLORS if geom.name.endswith(part)), None)
        color = COLORS[name] if name else "#181c24" if geom.name == "visor" else "#5adcff"
        geom.rgba = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)] + [1]
        if geom.name != "floor":
            geom.material = ""
    sun = spec.lights[0]
    sun.dir, sun.diffuse, sun.specular = [-0.5, 0.35, -1], [0.75, 0.73, 0.68], [0.4, 0.4, 0.4]
    spec.visual.headlight.ambient = [0.38, 0.4, 0.44]
    spec.visual.headlight.diffuse, spec.visual.headlight.specular = [0.12] * 3, [0] * 3
    return spec


# Where the parts of the body are: the middle of a geom, or the joint where a body begins (shin: the knee).
GEOM_POINTS = {"head": "head", "seat": "butt"}
BODY_POINTS = {}
for side in ("right", "left"):
    GEOM_POINTS |= {f"{side}_{point}": f"{side}_{point}" for point in ("hand", "foot")}
    begin_at = {"hip": "thigh", "knee": "shin", "shoulder": "upper_arm", "elbow": "lower_arm"}
    BODY_POINTS |= {f"{side}_{point}": f"{side}_{body}" for point, body in begin_at.items()}
Points = dict[str, torch.Tensor]  # where they are: name -> (N, 3), m

WARP = Lock()  # what Warp launches goes to one device, the same for all threads


class Scene:
    """Poses -> frames and body points, ray-traced by mujoco_warp, `batch_size` at once; for one thread.

    The first use on a machine compiles kernels for some ten seconds; the user's cache folder keeps them.
    """

    spec = staticmethod(scene_spec)  # others add to it, as reward_check/robustness.py does

    def __init__(
        self, height: int, width: int, textures: str, camera: str, supersample: int, batch_size: int,
        device: torch.device
    ):  # fmt: skip
        import warp as wp

        wp.config.log_level = wp.LOG_WARNING  # or it reports each kernel that it compiles or finds
        import mujoco_warp

        self.height = height
        self.width = width
        self.batch_size = batch_size
        self.device = device
        wp.init()
        if device.type == "cuda" and not wp.is_cuda_available():
            raise UsageError("Warp sees no GPU here: it needs NVIDIA's driver 580 or newer, or --device cpu")
        self.warp_device = wp.get_device(str(device))
        self.lock = WARP if device.type == "cuda" else nullcontext()
        wp.set_device(self.warp_device)
        model = self.spec(textures).compile()
        self.geoms = torch.tensor([model.geom(name).id for name in GEOM_POINTS.values()], device=device)
        self.bodies = torch.tensor([model.body(name).id for name in BODY_POINTS.values()], device=device)
        data = mujoco.MjData(model)
        mujoco.mj_forward(model, data)
        self.model = mujoco_warp.put_model(model)
        self.data = mujoco_warp.put_data(model, data, nworld=batch_size)
        self.context = mujoco_warp.create_render_context(
            model, batch_size, (width, height), cam_active=["fixed" if camera == "fixed" else "track"],
            render_rgb=True, render_depth=False, render_seg=False, render_skybox=True, use_shadows=True,
            samples_per_pixel=supersample, enable_emission=False, enable_per_light_ambient=False
        )  # fmt: skip
        self.render(torch.zeros(1, POSE_SIZE))  # compiles or loads the kernels, while there is one thread

    def render(self, poses: torch.Tensor) -> tuple[torch.Tensor, Points]:
        """Poses (N, 24) -> frames (N, 3, height, width) uint8, and where the points of the body are."""
        import mujoco_warp
        import warp as wp

        frames = torch.empty(len(poses), 3, self.height, self.width, dtype=torch.uint8, device=self.device)
        points = torch.empty(len(poses), len(self.geoms) + len(self.bodies), 3, device=self.device)
        if self.device.type == "cuda":  # in step with PyTorch
            wp.set_stream(wp.stream_from_torch(torch.cuda.current_stream(self.device)), self.warp_device)
        for first in range(0, len(poses), self.batch_size):
            i = slice(first, first + self.batch_size)
            n = len(poses[i])  # the last batch may be smaller; what the other worlds show does not matter
            wp.to_torch(self.data.qpos)[:n] = poses[i].to(self.device)
            with self.lock:
                wp.set_device(self.warp_device)
                mujoco_warp.kinematics(self.model, self.data)  # where bodies and geoms are
                mujoco_warp.com_pos(self.model, self.data)
                mujoco_warp.camlight(self.model, self.data)  # where lights and cameras hang
                mujoco_warp.refit_bvh(self.model, self.data, self.context)  # boxes that rays are tested with
                mujoco_warp.render(self.model, self.data, self.context)
            pixels = wp.to_torch(self.context.rgb_data)[:n].view(torch.uint8)  # blue, green, red, alpha
            frames[i] = torch.stack(pixels.view(n, self.height, self.width, 4).unbind(-1)[2::-1], dim=1)
            points[i, : len(self.geoms)] = wp.to_torch(self.data.geom_xpos)[:n, self.geoms]
            points[i, len(self.geoms) :] = wp.to_torch(self.data.xpos)[:n, self.bodies]
        return frames, dict(zip([*GEOM_POINTS, *BODY_POINTS], points.unbind(1)))


class Worker:
    """Renders states and rewards the frames on one device; the `Labeller` has one for each core or GPU."""

    def __init__(self, args: Args, device: torch.device, reward_model: nn.Module | None = None):
        self.reward_model = reward_model or make_reward(args, device)  # a CPU's workers share one
        look = (args.textures, args.camera, args.supersample)
        self.scene = Scene(*self.reward_model.size, *look, args.clip_batch_size, device)
        self.condition = TASKS[args.task][1] if args.task else lambda points: torch.nan * points["head"][:, 0]

    @torch.no_grad()
    def label(self, poses: torch.Tensor) -> torch.Tensor:
        """Poses (N, 24) -> rewards, and 1.0 where the task's condition holds, else 0.0 (N, 2), on the CPU."""
        frames, points = self.scene.render(poses)  # (N, 3, height, width) uint8, never stored
        rewards = self.reward_model(frames)  # R(s): `CLIPReward.reward` in clip_reward.py
        return torch.stack([rewards.cpu(), self.condition(points).float().cpu()], dim=1)


# ---- Replay buffer


class ReplayBuffer:
    """The newest rounds, played and rewarded, in preallocated tensors on the learner's device.

    Rewards are standardized by the mean and deviation of all kept. As no episode ends early, that changes no
    optimal policy; without it the values' differences would be lost, as CLIP's rewards are nearly alike.

    There is no "done": every next state's value is bootstrapped. An episode ends by its time limit alone, no
    property of the state. (The paper's code makes the last step terminal; the agent cannot see the time.)
    """

    def __init__(self, state_size: int, args: Args, device: torch.device):
        steps, num_envs = args.episode_length, args.num_envs
        self.capacity = math.ceil(min(args.buffer_size, args.total_timesteps) / (steps * num_envs))  # rounds
        shape = (self.capacity, steps, num_envs)
        self.states = torch.zeros(self.capacity, steps + 1, num_envs, state_size, device=device)
        self.actions = torch.zeros(*shape, ACTION_SIZE, device=device)
        self.rewards = torch.zeros(shape, device=device)
        self.rounds = 0  # taken in so far
        self.standardize = args.standardize_rewards
        self.mean = 0.0
        self.std = 1.0

    def add(self, states: torch.Tensor, actions: torch.Tensor, rewards: torch.Tensor) -> None:
        """Take in a round: states (T + 1, N, S), actions (T, N, 17), rewards (T, N), over the oldest."""
        i = self.rounds % self.capacity
        self.states[i] = states
        self.actions[i] = actions
        self.rewards[i] = rewards
        self.rounds += 1
        if self.standardize:
            kept = self.rewards[: self.rounds].double()  # so that equal rewards come out as 0
            self.mean = kept.mean()
            self.std = kept.std(correction=0) + 1e-8

    def sample(self, batch_size: int, n_step: int) -> tuple[torch.Tensor, ...]:
        """Uniformly -> states (B, S), those n_step later, actions (B, 17), rewards between (n_step, B)."""
        _, steps, num_envs = self.rewards.shape
        starts = steps - n_step + 1  # nothing reaches beyond the end of an episode
        size = min(self.rounds, self.capacity) * starts * num_envs
        k = torch.randint(size, (batch_size,), device=self.rewards.device)
        i, t, n = k // (starts * num_envs), k // num_envs % starts, k % num_envs
        rewards = (torch.stack([self.rewards[i, t + j, n] for j in range(n_step)]) - self.mean) / self.std
        return self.states[i, t, n], self.states[i, t + n_step, n], self.actions[i, t, n], rewards


# ---- Networks and update


class Normalize(nn.Module):
    """Values (N, size) -> the same scaled by mean and variance of all that `update` has seen, cut to ±10."""

    def __init__(self, size: int):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("var", torch.ones(size))

    def update(self, values: torch.Tensor) -> None:
        """Take in values (N, size)."""
        values = values.double()  # in single precision the variance of what hardly varies is lost to rounding
        share = len(values) / (self.count + len(values))
        delta = values.mean(0) - self.mean
        within = (1 - share) * self.var + share * values.var(0, correction=0)
        self.var.copy_(within + share * (1 - share) * delta.square())  # Chan et al.'s parallel variance
        self.mean.add_(share * delta)
        self.count.add_(len(values))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return ((values - self.mean) * (self.var + 1e-8).rsqrt()).clamp(-10, 10)


class SoftQNetwork(nn.Sequential):
    """Normalized observations (N, O) and actions (N, 17) -> action values (N,)."""

    def __init__(self, obs_size: int, args: Args):
        norm = nn.LayerNorm if args.layer_norm else nn.Identity
        super().__init__(
            nn.Linear(obs_size + ACTION_SIZE, 256), norm(256), nn.ReLU(),
            nn.Linear(256, 256), norm(256), nn.ReLU(), nn.Linear(256, 1)
        )  # fmt: skip

    def forward(self, obs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.cat([obs, actions], dim=1)).squeeze(1)


class Critics(nn.ModuleList):
    """Two critics, asked at once: observations and actions -> action values (2, N)."""

    def forward(self, obs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        return torch.stack([critic(obs, actions) for critic in self])


class Actor(nn.Sequential):
    """Normalized observations (N, O) -> mean and log σ (N, 17) of a Gaussian; actions are samples' tanh."""

    def __init__(self, obs_size: int, args: Args):
        super().__init__(
            nn.Linear(obs_size, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(),
            nn.Linear(256, 2 * ACTION_SIZE)
        )  # fmt: skip
        self.log_std_min = args.log_std_min

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_std = super().forward(obs).split(ACTION_SIZE, dim=1)
        return mean, log_std.clamp(self.log_std_min, 2)


def squash(mean: torch.Tensor, log_std: torch.Tensor, noise: torch.Tensor) -> tuple:
    """A Gaussian and standard normal noise, (N, 17) each -> tanh of its sample, with log probability (N,)."""
    raw = mean + log_std.exp() * noise
    log_prob = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    log_prob -= 2 * (math.log(2) - raw - F.softplus(-2 * raw))  # log of tanh's slope, without underflow
    return raw.tanh(), log_prob.sum(1)


class SAC(nn.Module):
    """All that is learned: actor, critics, entropy coefficient, running means, the observations' scale."""

    def __init__(self, state_size: int, args: Args):
        super().__init__()
        obs_size = state_size - 2
        self.obs_norm = Normalize(obs_size) if args.normalize_obs else nn.Identity()
        self.actor = Actor(obs_size, args)
        self.critics = Critics(SoftQNetwork(obs_size, args) for _ in range(2))
        self.mean_actor = deepcopy(self.actor)
        self.target_critics = deepcopy(self.critics)
        self.log_ent_coef = nn.Parameter(torch.tensor(math.log(args.ent_coef)))
        actor = self.mean_actor if args.act_with_mean else self.actor
        self.policy = nn.Sequential(self.obs_norm, actor)  # what acts

    def optimizers(self, learning_rate: float) -> dict[str, torch.optim.Adam]:
        groups = {
            "q_optimizer": self.critics.parameters(),
            "actor_optimizer": self.actor.parameters(),
            "ent_coef_optimizer": [self.log_ent_coef],
        }
        return {name: torch.optim.Adam(group, learning_rate, fused=True) for name, group in groups.items()}


def sac_update(sac: SAC, optimizers: dict, batch: tuple, update_actor: bool, args: Args) -> dict:
    """One update by a batch of transitions -> what to log."""
    states, next_states, actions, rewards = batch
    obs = sac.obs_norm(states[:, 2:])
    next_obs = sac.obs_norm(next_states[:, 2:])
    ent_coef = sac.log_ent_coef.detach().exp()
    n_step_return = sum(args.gamma**k * reward for k, reward in enumerate(rewards))
    with torch.no_grad():  # every last state bootstraps: see ReplayBuffer; steps before it earn no entropy
        next_actions, next_log_prob = squash(*sac.actor(next_obs), torch.randn_like(actions))
        next_q = torch.min(*sac.target_critics(next_obs, next_actions))
        td_target = n_step_return + args.gamma**args.n_step * (next_q - ent_coef * next_log_prob)
    q_values = sac.critics(obs, actions)
    qf_loss = (q_values - td_target).square().mean(dim=1).sum()
    optimizers["q_optimizer"].zero_grad()
    qf_loss.backward()
    optimizers["q_optimizer"].step()
    losses = {"qf_loss": qf_loss, "q_values": q_values.mean(), "ent_coef": ent_coef}

    if update_actor:
        new_actions, log_prob = squash(*sac.actor(obs), torch.randn_like(actions))
        new_q = torch.min(*sac.critics(obs, new_actions))
        actor_loss = (ent_coef * log_prob - new_q).mean()
        optimizers["actor_optimizer"].zero_grad()
        actor_loss.backward(inputs=[*sac.actor.parameters()])  # the critics need no gradient of it
        optimizers["actor_optimizer"].step()

        entropy_gap = -(log_prob.detach() - ACTION_SIZE).mean()  # how far the entropy is above -17
        ent_coef_loss = sac.log_ent_coef.exp() * entropy_gap
        optimizers["ent_coef_optimizer"].zero_grad()
        ent_coef_loss.backward()
        optimizers["ent_coef_optimizer"].step()
        losses |= {"actor_loss": actor_loss, "entropy": -log_prob.mean()}

    with torch.no_grad():  # mean <- (1 - τ) mean + τ learned
        for target, learned in ((sac.target_critics, sac.critics), (sac.mean_actor, sac.actor)):
            for mean, value in zip(target.parameters(), learned.parameters()):
                mean.lerp_(value, args.tau)
    return {name: value.detach() for name, value in losses.items()}


# ---- The loop


@torch.no_grad()
def rollout(
    policy: nn.Module | None, noise_scale: float, envs: Humanoids, labeller: Labeller,
    seed: int, args: Args
) -> tuple:  # fmt: skip
    """An episode in each environment, on the CPU; without a policy at random.

    -> states (T + 1, N, S), actions (T, N, 17)
    """
    rng = torch.Generator().manual_seed(seed)
    obs, _ = envs.reset(seed=seed)
    states = [torch.from_numpy(obs).float()]
    actions = []
    noise = torch.randn(envs.num_envs, ACTION_SIZE, generator=rng)
    for _ in range(args.episode_length):
        fresh = torch.randn(envs.num_envs, ACTION_SIZE, generator=rng)
        # Correlated with the step before, and yet standard normal at each step.
        noise = args.noise_correlation * noise + math.sqrt(1 - args.noise_correlation**2) * fresh
        if policy:
            action, _ = squash(*policy(states[-1][:, 2:]), noise_scale * noise)
        else:
            action = torch.erf(noise / math.sqrt(2))  # the normal's distribution: uniform in [-1, 1]
        actions.append(action)
        obs, _, _, _, _ = envs.step(MAX_CTRL * action.numpy())
        states.append(torch.from_numpy(obs).float())
        labeller.add(states[-1][:, :POSE_SIZE])  # the pose after each step: other threads reward it
    return torch.stack(states), torch.stack(actions)


def train(args: Args, labeller: Labeller) -> None:
    """The paper's Algorithm 1, by rounds; all chance comes from seed and round, so that --resume repeats it.

    A round's first three phases go on at once; acting and learning begin with what the rounds before left:

        act    =============          one thread, and more for MuJoCo: play round k with a copy of the policy
        learn  =================      this thread: update on rounds 0 to k - 1
        label     ===============     other threads, then this one, too: render what was played, reward it
        report                   ===  this thread: store round k; curves, evaluation, checkpoint
    """
    device = labeller.device  # the first GPU, by its number
    envs = Humanoids(args.num_envs, args)
    state_size = envs.single_observation_space.shape[0]
    torch.manual_seed(args.seed)
    sac = SAC(state_size, args).to(device)
    optimizers = sac.optimizers(args.learning_rate)
    rb = ReplayBuffer(state_size, args, device)
    parts = {"policy": sac.policy, "sac": sac, **optimizers}  # of a checkpoint
    global_step, best_return, _lock = open_run(args, labeller, rb, parts)  # locked as long as _lock lives

    def update(update_actor: bool) -> dict:
        batch = rb.sample(args.batch_size, args.n_step)
        return sac_update(sac, optimizers, batch, update_actor, args)

    def checkpoint(name: str) -> None:  # with the rounds' files all that the rest of the training depends on
        content = {name: part.state_dict() for name, part in parts.items()}
        content |= {"script": SCRIPT, "settings": asdict(args), "reward": labeller.fingerprint}
        save(f"{args.run_dir}/{name}", step=global_step, best_return=best_return, **content)

    checkpoint("checkpoint.pt")
    if args.track:
        import wandb

        wandb.init(config=asdict(args), dir=args.run_dir, resume="auto", sync_tensorboard=True)
    writer = SummaryWriter(args.run_dir, purge_step=global_step + 1)  # drops what a kill left behind
    bar = tqdm(total=args.total_timesteps, initial=global_step, unit="step", disable=None)
    started = time.perf_counter()

    while global_step < args.total_timesteps:
        warmup = global_step < args.learning_starts
        play_seed, learn_seed = np.random.SeedSequence((args.seed, rb.rounds)).generate_state(2).tolist()

        # ---- Act, in a thread, with the policy as it is now.
        policy = None if warmup else deepcopy(sac.policy).cpu()
        playing = labeller.pool.submit(rollout, policy, 1.0, envs, labeller, play_seed, args)

        # ---- Learn, at the same time: SAC on the rounds before (the first has none).
        torch.manual_seed(learn_seed)
        share = 1 - global_step / args.total_timesteps if args.anneal_lr else 1
        for optimizer in optimizers.values():
            optimizer.param_groups[0] |= {"lr": args.learning_rate * share, "capturable": True}
        losses = defaultdict(list)
        if rb.rounds > 0 and not warmup:
            fast_update = replayed(update, device)  # anew: there is more to sample
            for i in range(args.gradient_steps):
                for name, loss in fast_update(i % args.policy_frequency == 0).items():
                    losses[name].append(loss)

        # ---- Label: threads have begun to render states and to reward the frames (`Worker.label`).
        states, actions = playing.result()
        labels = labeller.result().view(args.episode_length, args.num_envs, 2)
        rewards = labels[:, :, 0]  # labels[:, :, 1] is whether the task's condition holds

        # ---- Report: store the round; curves, now and then an evaluation, a checkpoint.
        rb.add(states, actions, rewards)
        if args.normalize_obs:  # the buffer keeps raw values: each update scales them anew
            sac.obs_norm.update(states[..., 2:].flatten(0, 1).to(device))
        save(f"{args.run_dir}/rounds/{rb.rounds - 1}.pt", round=(states, actions, rewards))
        global_step += rewards.numel()
        means = summary(labels)
        scalars = {f"charts/{name}": value for name, value in means.items()}
        scalars["charts/SPS"] = rewards.numel() / (time.perf_counter() - started)
        started = time.perf_counter()
        for name, values in losses.items():
            scalars[f"losses/{name}"] = torch.stack(values).mean().item()
        if not all(map(math.isfinite, scalars.values())):
            raise UsageError(f"losses are not finite at step {global_step}: lower the --learning-rate")
        bar.update(rewards.numel())
        if rb.rounds == 1:
            tqdm.write(f"a policy that has learned nothing: {in_words(means)}")
            sparse = args.clip_model.endswith(".py") or args.threshold is not None
            if rewards.min() == rewards.max() and not sparse:
                raise UsageError("the reward is the same in all states: try another prompt")
        passed = global_step % args.evaluate_every < rewards.numel()  # a multiple of it
        if passed or global_step >= args.total_timesteps:
            states, labels = evaluate(sac.policy, args.num_envs, labeller, args)
            means = summary(labels)
            tqdm.write(f"step {global_step:,} of {args.total_timesteps:,}: {in_words(means)}")
            scalars |= {f"evaluation/{name}": value for name, value in means.items()}
            frames = pictures(states[:, :1], labels[:, :1, 0], 8, args)[:, 0]
            writer.add_images("frames", frames, global_step, dataformats="NHWC")
            earned = means["clip_return"]
            best_return = max(best_return, earned)
            if earned >= best_return - 0.001 * abs(best_return):  # of what earns alike, the newest
                checkpoint("best.pt")
        for name, value in scalars.items():
            writer.add_scalar(name, value, global_step)
        writer.flush()
        checkpoint("checkpoint.pt")
        old = Path(f"{args.run_dir}/rounds/{rb.rounds - 1 - rb.capacity}.pt")  # no longer in the buffer
        old.unlink(missing_ok=True)

    bar.close()
    load(f"{args.run_dir}/best.pt", policy=sac.policy)
    states, labels = evaluate(sac.policy, args.episodes, labeller, args)
    for name, value in summary(labels).items():
        writer.add_scalar(f"result/{name}", value, global_step + 1)  # --resume drops it
    writer.close()
    write_result(Path(args.run_dir, "result"), states, labels, args)


# ==== Nothing below belongs to the method: success, evaluation, pictures, files, and the command line.


# What a person would have to see in the frame (paper, Table 2), from where the parts of the body are: the
# ground truth beside the CLIP reward, so that reward hacking shows. No agent learns from these conditions.

HEAD, SEAT, KNEE, FOOT = 0.09, 0.09, 0.049, 0.075  # radii, m: so high lies the middle of a part on the floor
TOUCH = 0.04  # m above the floor that pass for touching it


def tilt(p: Points) -> torch.Tensor:
    """Angle between the trunk, from the seat to the head, and the vertical (N,), degrees: upright is 0."""
    return torch.rad2deg(torch.acos(F.normalize(p["head"] - p["seat"], dim=-1)[..., 2].clamp(-1, 1)))


def bend(p: Points, side: str, limb: tuple[str, str, str] = ("hip", "knee", "foot")) -> torch.Tensor:
    """How far a knee, or another limb's middle joint, is bent (N,), degrees: a straight leg is 0."""
    upper, lower = (F.normalize(p[f"{side}_{b}"] - p[f"{side}_{a}"], dim=-1) for a, b in zip(limb, limb[1:]))
    return torch.rad2deg(torch.acos((upper * lower).sum(-1).clamp(-1, 1)))


def spread(p: Points) -> torch.Tensor:
    """Angle between the legs, from hips to feet, seen from above (N,), degrees."""
    legs = ((p[f"{side}_foot"] - p[f"{side}_hip"])[..., :2] for side in ("right", "left"))
    right, left = (F.normalize(leg, dim=-1) for leg in legs)
    return torch.rad2deg(torch.acos((right * left).sum(-1).clamp(-1, 1)))


def leftwards(p: Points, part: str) -> torch.Tensor:
    """How far a part is to the robot's left of its seat (N,), m."""
    left = F.normalize(p["left_shoulder"] - p["right_shoulder"], dim=-1)
    return ((p[part] - p["seat"]) * left).sum(-1)


def forwards(p: Points, part: str) -> torch.Tensor:
    """How far a part is in front of the seat, as the trunk sees it (N,), m."""
    left = F.normalize(p["left_shoulder"] - p["right_shoulder"], dim=-1)
    up = F.normalize(p["head"] - p["seat"], dim=-1)
    return ((p[part] - p["seat"]) * F.normalize(torch.linalg.cross(left, up), dim=-1)).sum(-1)


def low(p: Points, part: str, radius: float, above: float = TOUCH) -> torch.Tensor:
    """Are both knees or feet on the floor, or `above` m at most above it? (N,) bool."""
    return torch.maximum(p[f"right_{part}"][..., 2], p[f"left_{part}"][..., 2]) <= radius + above


def off_balance(p: Points, part: str, radius: float) -> torch.Tensor:
    """How far the head is from above the line between the feet, or knees, that are on the floor (N,), m."""
    right, left = p[f"right_{part}"], p[f"left_{part}"]
    one = torch.where((right[..., 2] <= radius + TOUCH)[..., None], right, left)[..., :2]
    other = torch.where((left[..., 2] <= radius + TOUCH)[..., None], left, right)[..., :2]
    head = p["head"][..., :2]
    along = ((head - one) * (other - one)).sum(-1) / (other - one).square().sum(-1).clamp(min=1e-8)
    return (one + along.clamp(0, 1)[..., None] * (other - one) - head).norm(dim=-1)


def kneeling(p: Points) -> torch.Tensor:
    """Both knees on the floor and bent, upright, not falling: a foot near the floor or the head above the
    knees; not sitting lower than on the heels."""
    legs = low(p, "knee", KNEE) & (torch.minimum(bend(p, "right"), bend(p, "left")) >= 60)
    feet = torch.minimum(p["right_foot"][..., 2], p["left_foot"][..., 2])
    balance = (feet <= 0.2) | (off_balance(p, "knee", KNEE) <= 0.35)
    return legs & balance & (tilt(p) <= 50) & (p["seat"][..., 2] > SEAT + 2 * FOOT)


def lotus_position(p: Points) -> torch.Tensor:
    """Seated on the floor or crossed feet, the knees low and outside the hips, the feet in front of it."""
    seated = (p["seat"][..., 2] <= SEAT + 2 * FOOT) & (tilt(p) <= 45)
    wide, together = ((p[f"left_{part}"] - p[f"right_{part}"]).norm(dim=-1) for part in ("knee", "foot"))
    front = torch.minimum(forwards(p, "right_foot"), forwards(p, "left_foot")) > 0
    return seated & low(p, "knee", KNEE, 0.25) & (wide >= 0.5) & (together <= wide - 0.2) & front


def standing_up(p: Points) -> torch.Tensor:
    """On a foot and in balance, the trunk within 30° of upright, the head at four fifths of its 1.48 m."""
    feet = torch.minimum(p["right_foot"][..., 2], p["left_foot"][..., 2])
    upright = (tilt(p) <= 30) & (p["head"][..., 2] >= 1.2)
    return (feet <= FOOT + TOUCH) & upright & (off_balance(p, "foot", FOOT) <= 0.35)


def arms_raised(p: Points) -> torch.Tensor:
    """Standing, both hands above the top of the head."""
    hands = torch.minimum(p["right_hand"][..., 2], p["left_hand"][..., 2])
    return standing_up(p) & (hands >= p["head"][..., 2] + HEAD)


def doing_splits(p: Points) -> torch.Tensor:
    """Seated, the legs straight within 30°, 90° or more between them (120° at most), the feet low."""
    down = (p["seat"][..., 2] <= SEAT + 2 * TOUCH) & low(p, "foot", FOOT, 0.18)
    straight = torch.maximum(bend(p, "right"), bend(p, "left")) <= 30
    return down & straight & (spread(p) >= 90) & (tilt(p) <= 60)


def hands_on_hips(p: Points) -> torch.Tensor:
    """Standing, each hand within 20 cm of its hip joint (the hip is 9 cm thick, the hand 4), both elbows bent
    by 40° or more: arms that merely hang down come as close."""
    far = torch.maximum(*((p[f"{side}_hand"] - p[f"{side}_hip"]).norm(dim=-1) for side in ("right", "left")))
    bent = torch.minimum(*(bend(p, side, ("shoulder", "elbow", "hand")) for side in ("right", "left")))
    return standing_up(p) & (far <= 0.2) & (bent >= 40)


def arms_crossed(p: Points) -> torch.Tensor:
    """Standing, each hand at least 5 cm beyond the middle, before the trunk between seat and shoulders."""
    beyond = torch.minimum(leftwards(p, "right_hand"), -leftwards(p, "left_hand")) >= 0.05
    front = torch.minimum(forwards(p, "right_hand"), forwards(p, "left_hand")) > 0
    above = torch.minimum(p["right_hand"][..., 2], p["left_hand"][..., 2]) > p["seat"][..., 2]
    shoulders = torch.minimum(p["right_shoulder"][..., 2], p["left_shoulder"][..., 2])
    below = torch.maximum(p["right_hand"][..., 2], p["left_hand"][..., 2]) < shoulders
    return standing_up(p) & beyond & front & above & below


def standing_on_one_leg(p: Points) -> torch.Tensor:
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


def summary(labels: torch.Tensor) -> dict[str, float]:
    """Labels (T, N, 2) -> means over N episodes; one succeeds if the condition holds in half its steps."""
    clip, truth = labels.sum(0).mean(0).tolist()
    if math.isnan(truth):  # no known task
        return {"clip_return": clip}
    success = (labels[:, :, 1].mean(0) >= 0.5).float().mean().item()
    return {"success_rate": success, "clip_return": clip, "ground_truth_return": truth}


def in_words(means: dict[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in means.items())


def evaluate(policy: nn.Module, episodes: int, labeller: Labeller, args: Args) -> tuple:
    """Play without exploration, from starts of its own -> states (T, N, S), labels (T, N, 2)."""
    seed = np.random.SeedSequence((args.seed, 2**32, episodes)).generate_state(1).item()
    states, _ = rollout(deepcopy(policy).cpu(), 0.0, Humanoids(episodes, args), labeller, seed, args)
    return states[1:], labeller.result(show="evaluate").view(args.episode_length, episodes, -1)


@cache
def picture_scene(textures: str, camera: str, device: str) -> Scene:  # made once
    return Scene(240, 240, textures, camera, 2, 4, torch.device("cuda:0" if device == "cuda" else "cpu"))


def pictures(states: torch.Tensor, rewards: torch.Tensor, count: int, args: Args) -> np.ndarray:
    """States (T, N, S), rewards (T, N) -> captioned frames of `count` steps (count, N, H, W, 3)."""
    scene = picture_scene(args.textures, args.camera, args.device)
    images = []
    steps = np.linspace(0, len(states) - 1, count).round().astype(int)
    for t in tqdm(steps, "render pictures", leave=False, disable=None):
        frames = scene.render(states[t, :, :POSE_SIZE])[0].cpu()
        for frame, reward in zip(F.pad(frames, (0, 0, 0, 24)).permute(0, 2, 3, 1).numpy(), rewards[t]):
            image = Image.fromarray(frame)
            text = f"step {t + 1}   reward {reward:.3f}"
            ImageDraw.Draw(image).text((8, len(frame) - 21), text, "white", ImageFont.load_default(14))
            images.append(np.asarray(image))
    return np.stack(images).reshape(count, -1, *images[0].shape)


def write_result(path: Path, states: torch.Tensor, labels: torch.Tensor, args: Args) -> None:
    """Print what an evaluation gave, and write path.json, .png (frames of four episodes) and .mp4 (three)."""
    result = summary(labels)
    print(f"{labels.shape[1]} episodes: {in_words(result)}")
    result["settings"] = asdict(args)
    result["versions"] = {
        name: metadata.version(name)
        for name in ("torch", "open_clip_torch", "gymnasium", "mujoco", "mujoco_warp")
    }
    Path(f"{path}.json").write_text(json.dumps(result, indent=2))
    sheet = pictures(states[:, :4], labels[:, :4, 0], 8, args).transpose(1, 2, 0, 3, 4)  # (4, H, 8, W, 3)
    iio.imwrite(f"{path}.png", sheet.reshape(-1, 8 * sheet.shape[3], 3))
    film = pictures(states[:, :3], labels[:, :3, 0], len(states), args).swapaxes(0, 1)  # (3, T, H, W, 3)
    iio.imwrite(f"{path}.mp4", film.reshape(-1, *film.shape[2:]), plugin="pyav", codec="libx264", fps=30)
    print(f"written to {path}.json, .png, .mp4")


def save(path: str, **content) -> None:
    """Write a file whole or not at all: a kill at any moment leaves the old one."""
    torch.save(content, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)


def load(path: str, **parts) -> dict:
    """Read what `save` wrote, tensors and settings but no code, into these parts."""
    if not zipfile.is_zipfile(path) or zipfile.ZipFile(path).testzip():  # PyTorch overlooks flipped bits
        raise UsageError(f"{path} is missing, damaged, or no checkpoint")
    content = torch.load(path, map_location="cpu", weights_only=True)
    try:
        for name, part in parts.items():
            part.load_state_dict(content[name])
    except RuntimeError:
        raise UsageError(f"{path} has other networks than this {SCRIPT}.py") from None
    return content


def open_run(args: Args, labeller: Labeller, rb: ReplayBuffer, parts: dict) -> tuple:
    """Make the run's folder, or with --resume restore parts and buffer -> step, best return, lock."""
    os.makedirs(f"{args.run_dir}/rounds", exist_ok=args.resume is not None)
    lock = open(f"{args.run_dir}/lock", "w")  # held until it is closed or the process ends
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(f"{args.run_dir} belongs to a training that still goes on") from None
    except OSError:
        pass  # a file system without locks
    if args.resume is None:
        return 0, -math.inf, lock
    kept = load(f"{args.run_dir}/checkpoint.pt", **parts)
    fingerprint = labeller.fingerprint
    if kept["reward"].shape != fingerprint.shape or (kept["reward"] - fingerprint).norm() > 0.05:
        raise UsageError(f"{args.run_dir} began with another reward model, or its weights have changed")
    rounds = kept["step"] // (args.num_envs * args.episode_length)
    rb.rounds = max(0, rounds - rb.capacity)
    while rb.rounds < rounds:
        rb.add(*load(f"{args.run_dir}/rounds/{rb.rounds}.pt")["round"])
    for k, events in enumerate(sorted(Path(args.run_dir).glob("events*"))):
        events.rename(events.with_name(f"events.out.tfevents.{k:010}"))  # read by name, before new ones
    return kept["step"], kept["best_return"], lock


def read_settings() -> Args:
    """The command line -> complete settings; those of a checkpoint are the defaults."""
    args = tyro.cli(Args)
    if args.evaluate is not None or args.resume is not None:
        path = args.evaluate or f"{args.resume}/checkpoint.pt"
        checkpoint = load(path)
        if checkpoint.get("script") != SCRIPT or checkpoint["settings"].keys() != asdict(Args()).keys():
            raise UsageError(f"{path} is no checkpoint of this {SCRIPT}.py")
        settings = checkpoint["settings"] | {"resume": None, "evaluate": None}
        settings["run_dir"] = os.path.dirname(path) or "."
        if settings["clip_model"].rstrip("/").endswith(".py"):
            settings["clip_model"] = tyro.MISSING  # a checkpoint runs nothing: a program is to be named again
        args = tyro.cli(Args, default=Args(**settings))
        if args.evaluate is None:
            args.check_resumed(settings)
    elif args.run_dir and os.path.exists(args.run_dir):
        raise UsageError(f"{args.run_dir} exists: choose another --run-dir, or --resume {args.run_dir}")
    elif args.paper:
        args = tyro.cli(Args, default=replace(args, **PAPER))
    if args.prompt is None:
        args.prompt = (TASKS[args.task or "kneeling"][0],)
    by_prompt = {(prompt,): task for task, (prompt, _) in TASKS.items()}
    args.task = args.task or by_prompt.get(tuple(args.prompt))
    args.complete()
    if args.total_timesteps is None:
        args.total_timesteps = 128_000 if args.clip_model.endswith(("tiny", ".py")) else 10_000_000
    a_round = args.num_envs * args.episode_length
    random_steps = a_round * max(1, math.ceil(args.learning_starts / a_round))
    if args.evaluate is None and args.total_timesteps <= random_steps:
        raise UsageError(f"nothing would be learned: --total-timesteps must be above {random_steps:,}")
    args.run_dir = args.run_dir or f"runs/{SCRIPT}__{args.seed}__{int(time.time())}_{os.getpid()}"
    return args


def main() -> None:
    sys.stdout.reconfigure(line_buffering=True)  # into files and pipes, too
    args = read_settings()
    torch.set_num_threads(1)  # the Labeller has a thread for each core
    sys.setswitchinterval(0.0005)  # s; by default, 0.005, threads wait too long for the interpreter
    args.describe()
    print(f"task {args.task or 'unknown, without a success rate'}")
    labeller = Labeller(Worker, args)
    if args.evaluate is None:
        print(f"{args.total_timesteps:,} steps; run folder {args.run_dir}")
        train(args, labeller)
    else:
        policy = SAC(Humanoids(1, args).single_observation_space.shape[0], args).policy
        load(args.evaluate, policy=policy)
        path = Path(args.run_dir, f"{Path(args.evaluate).stem}_evaluation")
        os.makedirs(args.run_dir, exist_ok=True)
        Path(f"{path}.json").touch()  # can it be written to?
        write_result(path, *evaluate(policy, args.episodes, labeller, args), args)


if __name__ == "__main__":
    try:
        main()
    except (UsageError, OSError, torch.OutOfMemoryError) as error:
        print(f"{SCRIPT}.py: error: {error}", file=sys.stderr)
        os._exit(2)  # without waiting for the threads
    except KeyboardInterrupt:
        print("interrupted; a training goes on with --resume and its folder", file=sys.stderr)
        os._exit(130)
