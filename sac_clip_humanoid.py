"""A humanoid robot learned from one sentence: SAC whose only reward is a CLIP model's opinion of the frame.

    python sac_clip_humanoid.py --prompt "a humanoid robot kneeling"

The method is VLM-RM (Rocamonde et al., ICLR 2024, arXiv 2310.12921), its Algorithm 1 with SAC (Haarnoja et al., 2018). Read from top
to bottom: settings, environment, drawing and labelling, replay buffer, networks and update, and the loop: act, learn, label, report.

C MuJoCo moves the robots, mujoco_warp draws them, on a CPU or a CUDA GPU, without OpenGL and without a display.
"""

import fcntl
import json
import math
import os
import re
import signal
import sys
import tempfile
import threading
import time
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from threading import Lock
from typing import Literal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of the imports below

import gymnasium
import imageio.v3 as iio
import mujoco
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from PIL import Image, ImageDraw, ImageFont
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from clip_reward import CLIPReward, Labeller, UsageError, first_line, native_precision

# warp and mujoco_warp are imported where they are used: they take seconds, and --help needs neither.

SCRIPT = Path(__file__).stem


@dataclass
class Args:
    """Teach a humanoid with a sentence: SAC on the reward of a CLIP model; `--paper` brings the paper's values."""

    prompt: tuple[str, ...] | None = None  # the goal; several sentences are averaged; None is that of --task
    # One of the paper's tasks, whose success is measured but never learned from: kneeling, lotus-position, standing-up,
    # arms-raised, doing-splits, hands-on-hips, arms-crossed, standing-on-one-leg. None is that of --prompt, so none if the
    # sentence is your own, and without --prompt kneeling.
    task: str | None = None
    baseline_prompt: tuple[str, ...] = ("a humanoid robot",)  # what the scene looks like in general
    goal_baseline_alpha: float = 0.0  # α of goal-baseline regularization, 0 (plain cosine, as in the paper's Table 1) to 1
    negative_prompt: tuple[str, ...] = ()  # a contrastive reward instead: what else might be seen (Baumli et al., 2023)
    temperature: float | None = None  # contrastive: τ of the softmax; None is the model's own
    threshold: float | None = None  # contrastive: β, above which the reward is 1, else 0; None pays the probability itself
    textures: Literal["realistic", "original"] = "realistic"  # plastic and metal under the sky, or as Gymnasium draws it
    camera: Literal["fixed", "original"] = "fixed"  # the paper's, in front of the robot, or Gymnasium's, which follows it
    supersample: int = 1  # N: N x N samples a pixel of what CLIP sees (pictures and video: always 2)
    reward_program: str | None = None  # a file, as those in code_reward/programs, that pays instead of the CLIP model
    clip_model: str | None = None  # NAME/TAG, NAME//FILE, hf-hub:ORG/NAME, local-dir:FOLDER or tiny; None: tiny, on CUDA bigG
    clip_batch_size: int = 128  # frames drawn and scored at once
    precision: Literal["fp32", "bf16"] | None = None  # of the CLIP model; None is bf16 where the hardware has it
    ray_workers: int = 0  # more workers that label, on the Ray cluster that RAY_ADDRESS names or on this machine

    # The paper's values, below in brackets, and the full observation, without what was added: normalized observations,
    # standardized rewards, layer normalization, a falling learning rate, a floor for exploration (log σ ≥ -5), fewer updates of
    # the actor, and the running mean of its weights acting.
    paper: bool = False
    seed: int = 1  # of the weights, the start states and the exploration
    device: Literal["cpu", "cuda"] | None = None  # cuda is every GPU in sight; None takes it where there is one
    total_timesteps: int | None = None  # of all environments, in whole rounds; None: 128,000 with tiny (10,000,000)
    num_envs: int = 16  # environments side by side (32)
    episode_length: int = 100  # steps of 15 ms; a round is one episode in every environment
    gradient_steps: int = 200  # updates per round (100)
    learning_starts: int = 6_400  # rounds that begin before this step are random, without learning (50,000)
    learning_rate: float = 6e-4  # of Adam, for actor, critics and entropy coefficient
    buffer_size: int = 1_000_000  # transitions kept, in whole rounds (Stable-Baselines3's default, as in the paper)
    gamma: float = 0.98  # discount factor: looks some 50 steps ahead, half an episode (0.95: some 20)
    n_step: int = 3  # n of the n-step return: rewards summed before the critics' value stands for the rest (1)
    tau: float = 0.005  # how far, at each update, targets move towards the critics, and the mean actor towards the actor
    batch_size: int = 256  # transitions per update (512)
    ent_coef: float = 0.03  # weight of the entropy at first; then tuned to hold the entropy at -17, minus one per motor (1.0)
    noise_correlation: float = 0.9  # of the exploration noise from one step to the next; 0 is SAC's own (0)

    run_dir: str | None = None  # folder of this run, made anew; None is runs/SCRIPT__SEED__TIME
    checkpoint_every: int = 16_000  # steps between two checkpoints, each evaluated (64,000)
    episodes: int = 100  # of the final evaluation, or of --evaluate
    resume: str | None = None  # go on with the run in this folder, exactly and with its own settings
    evaluate: str | None = None  # only evaluate this checkpoint (with --episodes, --seed, --device) and make its video
    track: bool = False  # log to Weights & Biases as well (WANDB_PROJECT names the project there)


PAPER = {
    "total_timesteps": 10_000_000, "num_envs": 32, "gradient_steps": 100, "learning_starts": 50_000, "gamma": 0.95,
    "n_step": 1, "batch_size": 512, "ent_coef": 1.0, "noise_correlation": 0.0, "checkpoint_every": 64_000,
}  # fmt: skip

# ---- Environment

POSE_SIZE, ACTION_SIZE = 24, 17  # a state's first 24 numbers are the pose, all that a frame shows; 17 motors
MAX_CTRL = 0.4  # the motors' control goes from -0.4 to 0.4, actions from -1 to 1


def make_envs(num_envs: int, args: Args) -> gymnasium.vector.VectorEnv:
    """Gymnasium's Humanoid-v5, many side by side; no episode ends early, as in the paper: that would tell what the task is.

    A state is MuJoCo's qpos, the pose (position in m and quaternion of the torso, 17 joint angles in rad), qvel, the 23 speeds, and
    cinert, the inertia of its 13 bodies as seen from the centre of mass, which tells where the limbs are; with --paper all that
    Gymnasium can observe. The agent sees the state but for its first two numbers, the place on the floor.
    """
    observed = {f"include_{name}_in_observation": args.paper for name in ("cvel", "qfrc_actuator", "cfrc_ext")}
    return gymnasium.make_vec(
        "Humanoid-v5", num_envs, vectorization_mode="sync", max_episode_steps=args.episode_length,
        terminate_when_unhealthy=False, exclude_current_positions_from_observation=False, **observed
    )  # fmt: skip


# ---- Drawing and labelling

COLORS = {  # of the realistic look's parts, by the ends of their names
    "torso1": "#e8eaee", "butt": "#e8eaee", "waist": "#808690", "uarm1": "#f07814", "larm": "#fac432", "thigh1": "#1e54be",
    "shin1": "#ced2d8", "hand": "#24262c", "foot": "#24262c", "head": "#eceef0", "floor": "#ffffff",
}  # fmt: skip


def scene_model(textures: str) -> mujoco.MjModel:
    """Gymnasium's humanoid with the paper's camera, "fixed", beside the XML's own, "track", and dressed as `textures` says."""
    spec = mujoco.MjSpec.from_file(str(Path(gymnasium.__file__).parent / "envs/mujoco/assets/humanoid.xml"))
    spec.option.solver = mujoco.mjtSolver.mjSOL_NEWTON  # mujoco_warp has no PGS; nothing is solved here anyway
    sin, cos, distance = math.sin(math.radians(-10)), math.cos(math.radians(-10)), 3.5
    # It looks at (0, 0, 1), 10° down.
    camera = spec.worldbody.add_camera(name="fixed", pos=[distance * cos, 0, 1 - distance * sin])
    camera.alt.type = mujoco.mjtOrientation.mjORIENTATION_XYAXES
    camera.alt.xyaxes = [0, 1, 0, sin, 0, cos]  # the picture's right, and up
    if textures == "original":
        return spec.compile()

    sky = next(texture for texture in spec.textures if texture.type == mujoco.mjtTexture.mjTEXTURE_SKYBOX)
    sky.rgb1, sky.rgb2 = [0.18, 0.44, 0.78], [1, 1, 1]  # overhead and underfoot; between them the horizon
    tiles, floor = spec.texture("texplane"), spec.material("MatPlane")  # calm: a chessboard would be most of what a model sees
    tiles.builtin, tiles.mark = mujoco.mjtBuiltin.mjBUILTIN_FLAT, mujoco.mjtMark.mjMARK_EDGE
    tiles.rgb1, tiles.markrgb = [0.62, 0.6, 0.57], [0.44, 0.42, 0.4]
    floor.texrepeat, floor.specular, floor.reflectance = [20, 20], 0, 0
    head = spec.body("torso")
    head.add_geom(name="visor", type=mujoco.mjtGeom.mjGEOM_ELLIPSOID, pos=[0.055, 0, 0.2], size=[0.045, 0.075, 0.04])
    for y in (-0.03, 0.03):
        head.add_geom(name=f"eye{y}", type=mujoco.mjtGeom.mjGEOM_SPHERE, pos=[0.09, y, 0.2], size=[0.016, 0, 0])
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
    return spec.compile()


# Where the parts of the body are: at the middle of a geom, or at the joint in which a body begins (the shin: at the knee).
GEOM_POINTS = {"head": "head", "seat": "butt"} | {f"{s}_{p}": f"{s}_{p}" for s in ("right", "left") for p in ("hand", "foot")}
BODY_POINTS = {"hip": "thigh", "knee": "shin", "shoulder": "upper_arm", "elbow": "lower_arm"}
BODY_POINTS = {f"{side}_{point}": f"{side}_{body}" for side in ("right", "left") for point, body in BODY_POINTS.items()}


WARP = Lock()  # what Warp launches goes to one device, the same for all threads


class Scene:
    """Poses -> frames and body points, ray-traced by mujoco_warp on one device, `batch_size` at once; not for several threads.

    The first use ever on a machine compiles kernels for some ten seconds; they are kept in the user's cache folder.
    """

    def __init__(
        self, height: int, width: int, textures: str, camera: str, supersample: int, batch_size: int, device: torch.device
    ):
        import warp as wp

        wp.config.log_level = wp.LOG_WARNING  # or it reports each kernel that it compiles or finds in its cache
        import mujoco_warp

        self.height, self.width, self.batch_size, self.device = height, width, batch_size, device
        try:
            wp.init()
        except OSError:  # a home folder that cannot be written to
            wp.config.kernel_cache_dir = f"{tempfile.gettempdir()}/warp-{os.getuid()}"
            wp.init()
        self.warp_device, self.lock = wp.get_device(str(device)), WARP if device.type == "cuda" else nullcontext()
        wp.set_device(self.warp_device)
        model = scene_model(textures)
        self.geoms = torch.tensor([model.geom(name).id for name in GEOM_POINTS.values()], device=device)
        self.bodies = torch.tensor([model.body(name).id for name in BODY_POINTS.values()], device=device)
        data = mujoco.MjData(model)
        mujoco.mj_forward(model, data)
        self.model = mujoco_warp.put_model(model)
        self.data = mujoco_warp.put_data(model, data, nworld=batch_size)
        self.context = mujoco_warp.create_render_context(
            model, batch_size, (width, height), cam_active=["fixed" if camera == "fixed" else "track"], render_rgb=True,
            render_depth=False, render_seg=False, render_skybox=True, use_shadows=True, samples_per_pixel=supersample,
            enable_emission=False, enable_per_light_ambient=False
        )  # fmt: skip
        self.draw(torch.zeros(1, POSE_SIZE))  # compiles or loads the kernels: not a thing for several threads

    def draw(self, poses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Poses (N, 24) -> frames (N, 3, height, width) uint8, and where each point of the body is (N, 3), m, by its name."""
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
                mujoco_warp.camlight(self.model, self.data)  # where lights and cameras hang, by the centres of mass
                mujoco_warp.refit_bvh(self.model, self.data, self.context)  # the boxes that rays are tested with
                mujoco_warp.render(self.model, self.data, self.context)
            pixels = wp.to_torch(self.context.rgb_data)[:n].view(torch.uint8)  # a view: blue, green, red, alpha
            frames[i] = torch.stack(pixels.view(n, self.height, self.width, 4).unbind(-1)[2::-1], dim=1)
            points[i, : len(self.geoms)] = wp.to_torch(self.data.geom_xpos)[:n, self.geoms]
            points[i, len(self.geoms) :] = wp.to_torch(self.data.xpos)[:n, self.bodies]
        return frames, dict(zip([*GEOM_POINTS, *BODY_POINTS], points.unbind(1)))


class Worker:
    """Draws poses and scores the frames with CLIP on one device; the `Labeller` has one for each core or GPU."""

    def __init__(self, args: Args, device: torch.device, reward_model: CLIPReward | None = None):
        if args.reward_program and not reward_model:
            from code_reward.program import ProgramReward

            reward_model = ProgramReward(args.reward_program)
        self.reward_model = reward_model or CLIPReward(
            args.clip_model, args.prompt, args.baseline_prompt, args.goal_baseline_alpha, device, args.clip_batch_size,
            precision=args.precision, negative_prompts=args.negative_prompt,
            temperature=args.temperature, threshold=args.threshold
        )  # fmt: skip
        self.scene = Scene(*self.reward_model.size, args.textures, args.camera, args.supersample, args.clip_batch_size, device)
        self.condition = TASKS[args.task][1] if args.task else lambda points: torch.nan * points["head"][:, 0]

    @torch.no_grad()
    def label(self, poses: torch.Tensor) -> torch.Tensor:
        """Poses (N, 24) -> CLIP rewards, and 1.0 where the task's condition holds, else 0.0 (N, 2), both on the CPU."""
        frames, points = self.scene.draw(poses)  # (N, 3, height, width) uint8, never stored
        rewards = self.reward_model(frames)  # R(s): `CLIPReward.reward` in clip_reward.py
        return torch.stack([rewards, self.condition(points).float()], dim=1).cpu()


# ---- Replay buffer


class ReplayBuffer(nn.Module):
    """The newest rounds, played and labelled, in preallocated tensors (a Module for its `to` and `state_dict`).

    What is learned from are rewards standardized by the mean and deviation of all kept. As episodes never end early, that changes
    no optimal policy; but CLIP's rewards lie close together and far from 0, and would bury the values' differences under their sum.
    (With --paper they are learned from as they are.)

    There is no "done": the value of every next state is bootstrapped. An episode only ever ends by its time limit, which is no
    property of the state. (The paper's code treats the last step as terminal, although the agent cannot see the time.)
    """

    def __init__(self, state_size: int, args: Args):
        super().__init__()
        steps, num_envs = args.episode_length, args.num_envs
        rounds = math.ceil(min(args.buffer_size, args.total_timesteps) / (steps * num_envs))
        self.register_buffer("states", torch.zeros(rounds, steps + 1, num_envs, state_size))  # step t leads from t to t + 1
        self.register_buffer("actions", torch.zeros(rounds, steps, num_envs, ACTION_SIZE))
        self.register_buffer("rewards", torch.zeros(rounds, steps, num_envs))
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("std", torch.ones(()))
        self.standardize = not args.paper

    def add(self, number: int, states: torch.Tensor, actions: torch.Tensor, rewards: torch.Tensor) -> None:
        """Store round `number` (the first is 0): states (T + 1, num_envs, S), actions (T, num_envs, 17), rewards (T, num_envs)."""
        place = number % len(self.rewards)  # once full, over the oldest
        self.states[place], self.actions[place], self.rewards[place] = states, actions, rewards
        if self.standardize:
            kept = self.rewards[: number + 1]
            self.mean, self.std = kept.mean(), kept.std() + 1e-8

    def sample(self, batch_size: int, n_step: int, rounds: int) -> tuple[torch.Tensor, ...]:
        """Of the `rounds` so far, uniformly -> states (N, S), states n_step later, actions (N, 17), rewards between (n_step, N)."""
        kept, steps, num_envs = self.rewards.shape
        starts = steps - n_step + 1  # nothing reaches beyond the end of an episode
        i = torch.randint(min(rounds, kept) * starts * num_envs, (batch_size,), device=self.rewards.device)
        place, t, n = i // (starts * num_envs), i // num_envs % starts, i % num_envs
        rewards = (torch.stack([self.rewards[place, t + k, n] for k in range(n_step)]) - self.mean) / self.std
        return self.states[place, t, n], self.states[place, t + n_step, n], self.actions[place, t, n], rewards


# ---- Networks and update


class Normalize(nn.Module):
    """Values (N, size) -> the same scaled by the mean and variance of all that `update` has seen, cut to ±10."""

    def __init__(self, size: int):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("var", torch.ones(size))

    def update(self, values: torch.Tensor) -> None:
        """Take in values (N, size)."""
        values = values.double()  # in single precision the variance of what hardly varies is lost to rounding
        share, delta = len(values) / (self.count + len(values)), values.mean(0) - self.mean  # Chan et al.'s parallel variance
        self.var.copy_((1 - share) * self.var + share * values.var(0, correction=0) + share * (1 - share) * delta.square())
        self.mean.add_(share * delta)
        self.count.add_(len(values))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return ((values - self.mean) * (self.var + 1e-8).rsqrt()).clamp(-10, 10)


class SoftQNetwork(nn.Sequential):
    """Normalized observations (N, O) and actions (N, 17) -> action values (N,)."""

    def __init__(self, obs_size: int, paper: bool):
        norm = nn.Identity if paper else nn.LayerNorm
        super().__init__(
            nn.Linear(obs_size + ACTION_SIZE, 256), norm(256), nn.ReLU(),
            nn.Linear(256, 256), norm(256), nn.ReLU(), nn.Linear(256, 1)
        )  # fmt: skip

    def forward(self, obs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.cat([obs, actions], dim=1)).squeeze(1)


class Actor(nn.Sequential):
    """Normalized observations (N, O) -> mean and log standard deviation (N, 17) of a Gaussian; its sample's tanh is the action."""

    def __init__(self, obs_size: int, paper: bool):
        super().__init__(nn.Linear(obs_size, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2 * ACTION_SIZE))
        self.log_std_min = -20 if paper else -5

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_std = super().forward(obs).split(ACTION_SIZE, dim=1)
        return mean, log_std.clamp(self.log_std_min, 2)


def squash(mean: torch.Tensor, log_std: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A Gaussian and standard normal noise, (N, 17) each -> its sample's tanh, the actions (N, 17), and their log probabilities (N,)."""
    raw = mean + log_std.exp() * noise
    log_prob = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    log_prob -= 2 * (math.log(2) - raw - F.softplus(-2 * raw))  # log of tanh's slope, 1 - tanh², without underflow
    return raw.tanh(), log_prob.sum(1)


class SAC(nn.Module):
    """All that is learned: actor, critics and entropy coefficient, their running means, and the observations' scale."""

    def __init__(self, state_size: int, args: Args):
        super().__init__()
        obs_size = state_size - 2
        self.obs_norm = nn.Identity() if args.paper else Normalize(obs_size)
        self.actor = Actor(obs_size, args.paper)
        self.qf1, self.qf2 = SoftQNetwork(obs_size, args.paper), SoftQNetwork(obs_size, args.paper)
        self.mean_actor, self.qf1_target, self.qf2_target = deepcopy(self.actor), deepcopy(self.qf1), deepcopy(self.qf2)
        self.log_ent_coef = nn.Parameter(torch.tensor(math.log(args.ent_coef)))
        self.policy = nn.Sequential(self.obs_norm, self.actor if args.paper else self.mean_actor)  # what acts

    def optimizers(self, learning_rate: float) -> dict[str, torch.optim.Adam]:
        groups = {"q": [*self.qf1.parameters(), *self.qf2.parameters()], "actor": [*self.actor.parameters()]}
        groups["ent_coef"] = [self.log_ent_coef]
        return {f"{name}_optimizer": torch.optim.Adam(group, learning_rate, fused=True) for name, group in groups.items()}


def sac_update(sac: SAC, optimizers: dict, batch: tuple, update_actor: bool, args: Args) -> dict[str, torch.Tensor]:
    """One update by a batch of transitions -> what to log."""
    states, next_states, actions, rewards = batch
    obs, next_obs, ent_coef = sac.obs_norm(states[:, 2:]), sac.obs_norm(next_states[:, 2:]), sac.log_ent_coef.detach().exp()
    n_step_return = sum(args.gamma**k * reward for k, reward in enumerate(rewards))
    with torch.no_grad():  # every last state bootstraps: see ReplayBuffer; the steps before it earn no entropy
        next_actions, next_log_prob = squash(*sac.actor(next_obs), torch.randn_like(actions))
        next_q = torch.min(sac.qf1_target(next_obs, next_actions), sac.qf2_target(next_obs, next_actions))
        td_target = n_step_return + args.gamma**args.n_step * (next_q - ent_coef * next_log_prob)
    q_values = sac.qf1(obs, actions)
    qf_loss = F.mse_loss(q_values, td_target) + F.mse_loss(sac.qf2(obs, actions), td_target)
    optimizers["q_optimizer"].zero_grad()
    qf_loss.backward()
    optimizers["q_optimizer"].step()
    losses = {"losses/qf_loss": qf_loss.detach(), "losses/q_values": q_values.detach().mean(), "losses/ent_coef": ent_coef}

    if update_actor:
        new_actions, log_prob = squash(*sac.actor(obs), torch.randn_like(actions))
        actor_loss = (ent_coef * log_prob - torch.min(sac.qf1(obs, new_actions), sac.qf2(obs, new_actions))).mean()
        optimizers["actor_optimizer"].zero_grad()
        actor_loss.backward(inputs=[*sac.actor.parameters()])  # the critics need no gradient of it
        optimizers["actor_optimizer"].step()

        entropy_gap = -(log_prob.detach() - ACTION_SIZE).mean()  # how far the entropy is above its target, -17
        ent_coef_loss = sac.log_ent_coef.exp() * entropy_gap
        optimizers["ent_coef_optimizer"].zero_grad()
        ent_coef_loss.backward()
        optimizers["ent_coef_optimizer"].step()
        losses |= {"losses/actor_loss": actor_loss.detach(), "losses/entropy": -log_prob.detach().mean()}

    # Polyak averaging, all in one operation: mean <- (1 - τ) mean + τ learned.
    means = [*sac.mean_actor.parameters(), *sac.qf1_target.parameters(), *sac.qf2_target.parameters()]
    learned = [*sac.actor.parameters(), *sac.qf1.parameters(), *sac.qf2.parameters()]
    get_ema_multi_avg_fn(1 - args.tau)(means, learned, None)
    return losses


# ---- The loop


@torch.no_grad()
def rollout(
    policy: nn.Module | None, noise_scale: float, envs: gymnasium.vector.VectorEnv, labeller: Labeller, seed: int, args: Args
) -> tuple[torch.Tensor, torch.Tensor]:
    """An episode in each environment, on the CPU; without a policy at random -> states (T + 1, N, S), actions (T, N, 17)."""
    rng = torch.Generator().manual_seed(seed)
    obs, _ = envs.reset(seed=seed)
    states, actions = [torch.from_numpy(obs).float()], []
    noise = torch.randn(envs.num_envs, ACTION_SIZE, generator=rng)
    for _ in range(args.episode_length):
        fresh = torch.randn(envs.num_envs, ACTION_SIZE, generator=rng)
        # Correlated with the step before, and yet standard normal at each step.
        noise = args.noise_correlation * noise + math.sqrt(1 - args.noise_correlation**2) * fresh
        if policy:
            actions.append(squash(*policy(states[-1][:, 2:]), noise_scale * noise)[0])
        else:
            actions.append(torch.erf(noise / math.sqrt(2)))  # the normal's own distribution function: uniform in [-1, 1]
        obs, _, _, _, _ = envs.step(MAX_CTRL * actions[-1].numpy())
        states.append(torch.from_numpy(obs).float())
        labeller.add(states[-1][:, :POSE_SIZE])  # the pose after each step is labelled by other threads
    return torch.stack(states), torch.stack(actions)


def train(args: Args, checkpoint: dict | None, labeller: Labeller) -> None:
    """The paper's Algorithm 1, a round at a time; all chance comes from seed and round, so that --resume repeats it.

    A round's first three phases go on at the same time; acting and learning begin with what the rounds before have left:

        act    =============          one thread: play round k with a copy of the policy
        learn  =================      this thread: update on rounds 0 to k - 1
        label     ===============     the other threads, then this one, too: draw what has been played, score the frames
        report                   ===  this thread: store round k; curves, checkpoint
    """
    device, envs = torch.device(args.device), make_envs(args.num_envs, args)
    state_size = envs.single_observation_space.shape[0]
    torch.manual_seed(args.seed)
    sac, rb = SAC(state_size, args).to(device), ReplayBuffer(state_size, args).to(device)
    optimizers = sac.optimizers(args.learning_rate)
    # Its folder, curves and checkpoints of these parts, whose policy it evaluates; --resume restores them all.
    run = Run(args, checkpoint, labeller, policy=sac.policy, sac=sac, rb=rb, **optimizers)

    while run.step < args.total_timesteps and not run.stopped:
        number = run.step // (args.num_envs * args.episode_length)  # of the round, from 0
        warmup = run.step < args.learning_starts
        play_seed, learn_seed = np.random.SeedSequence((args.seed, number)).generate_state(2).tolist()

        # ---- Act, in a thread, with the policy as it is now.
        policy = deepcopy(sac.policy).cpu()
        playing = labeller.pool.submit(rollout, None if warmup else policy, 1.0, envs, labeller, play_seed, args)

        # ---- Learn, at the same time: SAC, on the transitions of the rounds before (the first has none).
        torch.manual_seed(learn_seed)
        for optimizer in () if args.paper else optimizers.values():
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - run.step / args.total_timesteps)
        losses = {}
        for update in range(0 if warmup or number == 0 else args.gradient_steps):
            update_actor = args.paper or update % 2 == 0
            losses |= sac_update(sac, optimizers, rb.sample(args.batch_size, args.n_step, number), update_actor, args)

        # ---- Label: threads have begun to draw the states and to score the frames with CLIP (`Worker.label`); the rest is done here.
        states, actions = playing.result()
        labels = labeller.result().view(args.episode_length, args.num_envs, 2)  # CLIP rewards and true rewards
        rb.add(number, states, actions, labels[:, :, 0])
        if not args.paper:  # the buffer keeps raw values: each update scales them anew
            sac.obs_norm.update(states[..., 2:].flatten(0, 1).to(device))

        # ---- Report. This counts the steps, too, and now and then evaluates and saves a checkpoint.
        run.report(labels, losses)

    run.finish()


# ==== Nothing below belongs to the method: success, evaluation, pictures, files, and checks of the settings.

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


def summary(labels: torch.Tensor) -> dict[str, float]:
    """Labels (T, N, 2) -> means over the N episodes; one succeeds if the condition holds in half of its steps or more."""
    clip_return, ground_truth_return = labels.sum(0).mean(0).tolist()
    if math.isnan(ground_truth_return):  # no known task
        return {"clip_return": clip_return}
    success_rate = (labels[:, :, 1].mean(0) >= 0.5).float().mean().item()
    return {"success_rate": success_rate, "clip_return": clip_return, "ground_truth_return": ground_truth_return}


def pictures(states: torch.Tensor, rewards: torch.Tensor, count: int, args: Args) -> np.ndarray:
    """States (T, N, S), rewards (T, N) -> `count` captioned frames of each episode, evenly over its steps (N, count, H, W, 3)."""
    images, scene = [], Scene(240, 240, args.textures, args.camera, 2, states.shape[1], torch.device("cpu"))
    for t in tqdm(np.linspace(0, len(states) - 1, count).round().astype(int), "draw pictures", leave=False, disable=None):
        for frame, reward in zip(scene.draw(states[t, :, :POSE_SIZE])[0].permute(0, 2, 3, 1).numpy(), rewards[t]):
            image = Image.fromarray(np.pad(frame, ((0, 24), (0, 0), (0, 0))))
            text = f"step {t + 1}   CLIP reward {reward:.3f}"
            ImageDraw.Draw(image).text((8, len(frame) + 3), text, "white", ImageFont.load_default(14))
            images.append(np.asarray(image))
    return np.stack(images).reshape(count, states.shape[1], *images[0].shape).swapaxes(0, 1)


def evaluate(policy: nn.Module, episodes: int, labeller: Labeller, args: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """Play without exploration, from start states that no training sees -> states (T, N, S), labels (T, N, 2)."""
    seed = np.random.SeedSequence((args.seed, 2**32, episodes)).generate_state(1).item()
    states, _ = rollout(deepcopy(policy).cpu(), 0.0, make_envs(episodes, args), labeller, seed, args)
    return states[1:], labeller.result(f"score {episodes} episodes").view(args.episode_length, episodes, 2)


def write_result(path: str, states: torch.Tensor, labels: torch.Tensor, args: Args) -> None:
    """Print what an evaluation gave, and write path.json, .png (frames of four episodes) and .mp4 (three)."""
    metrics = summary(labels)
    for name, value in metrics.items():
        print(f"{name.replace('_', ' '):>20}  {value:10.3f}")
    versions = {name: metadata.version(name) for name in ("torch", "open_clip_torch", "gymnasium", "mujoco", "mujoco_warp")}
    result = metrics | {"settings": asdict(args), "versions": versions}
    video = np.concatenate(pictures(states[:, :3], labels[:, :3, 0], len(labels), args))
    columns = np.concatenate(pictures(states[:, :4], labels[:, :4, 0], 8, args), axis=1)  # eight frames of all four
    save(f"{path}.json", json.dumps(result, indent=2).encode())
    save(f"{path}.png", iio.imwrite("<bytes>", np.concatenate(columns, axis=1), extension=".png"))
    save(f"{path}.mp4", iio.imwrite("<bytes>", video, plugin="pyav", extension=".mp4", codec="libx264", fps=30))
    print(f"written to {path}.json, .png, .mp4")


def save(path: str, content: bytes | dict) -> None:
    """Write a file whole or not at all: a kill at any moment leaves the old one."""
    try:
        with open(f"{path}.tmp", "wb") as file:
            file.write(content) if isinstance(content, bytes) else torch.save(content, file)
        os.replace(f"{path}.tmp", path)
    except (OSError, RuntimeError) as error:  # RuntimeError is how torch.save finds a disk full
        Path(f"{path}.tmp").unlink(missing_ok=True)
        raise UsageError(f"cannot write {path} ({first_line(error)}); once it can be, go on with --resume") from error


def load(path: str, part: str) -> dict:
    """A file of a run of this script, checkpoint.pt or best.pt, that holds this part."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        Args(**content["settings"]), content["progress"], content[part]
        if content["script"] != SCRIPT:
            raise ValueError(f"it is of {content['script']}.py")
        return content
    except Exception as error:  # whatever the file holds instead
        raise UsageError(f"{path} is not a checkpoint of {SCRIPT}.py ({first_line(error)})") from error


class Run:
    """A training's folder: curves, the best policy, and checkpoints of `parts`, all that the rest of the training depends on."""

    def __init__(self, args: Args, checkpoint: dict | None, labeller: Labeller, **parts):
        self.args, self.labeller, self.parts, self.stopped = args, labeller, parts, 0
        self.step, self.best_return = checkpoint["progress"] if checkpoint else (0, -math.inf)
        if checkpoint and parts.keys() - checkpoint.keys():
            raise UsageError(f"{args.run_dir}/checkpoint.pt lacks {', '.join(parts.keys() - checkpoint.keys())}")
        for name, part in parts.items() if checkpoint else ():
            part.load_state_dict(checkpoint.pop(name))  # a second buffer would be a waste of memory
        os.makedirs(args.run_dir, exist_ok=True)
        self.lock = os.open(args.run_dir, os.O_RDONLY)  # held to the end of the training, or of this process
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{args.run_dir} belongs to a training that is still going") from None
        if args.track:
            try:
                import wandb

                name = re.sub(r"[^\w.-]", "-", os.path.basename(os.path.abspath(args.run_dir)))
                wandb.init(id=name, config=asdict(args), resume="allow", sync_tensorboard=True)
            except Exception as error:  # no package, no API key, no network: a run that has begun goes on without
                print(f"--track does not work ({first_line(error)}): pip install wandb, and wandb login")
                if not checkpoint:
                    os.rmdir(args.run_dir)
                    sys.exit(2)
        self.save("checkpoint.pt", **parts)
        self.writer = SummaryWriter(args.run_dir, purge_step=self.step + 1)  # forget what a killed run logged beyond
        self.writer.add_text("settings", "\n".join(f"    {name} = {value}" for name, value in asdict(args).items()))
        self.bar = tqdm(total=args.total_timesteps, initial=self.step, unit="step", smoothing=0.05, disable=None)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.stop)
        if self.bar.disable:
            print(f"training goes from step {self.step:,} to {args.total_timesteps:,}", file=sys.stderr)
        self.started = self.told = time.perf_counter()

    def stop(self, number: int, _) -> None:
        """Ctrl-C and SIGTERM let the round in progress finish first; the second one does not."""
        self.stopped = number
        signal.signal(number, signal.default_int_handler)
        os.write(2, b"\nfinishing this round first (once more: stop at once, back to the last checkpoint)\n")

    def report(self, labels: torch.Tensor, losses: dict) -> None:
        """The end of a round: curves, progress (without a terminal a line every 30 s) and, when it is time, a checkpoint."""
        before, now = self.step, time.perf_counter()
        self.step += labels[:, :, 0].numel()
        values = summary(labels)
        scalars = {f"charts/{name}": value for name, value in values.items()} | losses
        scalars["charts/SPS"], self.started = (self.step - before) / (now - self.started), now
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, self.step)
        every, total = self.args.checkpoint_every, self.args.total_timesteps
        self.bar.update(min(self.step, total) - self.bar.n)
        words = [f"{name.replace('_', ' ')} {value:.2f}" for name, value in values.items()]
        self.bar.set_description(", ".join(words[:2]))  # in front: a narrow terminal cuts off the bar's end
        if self.bar.disable and (now - self.told > 30 or self.step >= total):
            self.told = now
            print(f"step {self.step:,} of {total:,}: {', '.join(words)}", file=sys.stderr)
        if before == 0:
            tqdm.write(f"to compare with, a policy that has learned nothing: {', '.join(words)}")
        if before // every < self.step // every or self.step >= total:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Evaluate the policy as it is now, keep it if it earned more than all before (as in the paper), and save all parts."""
        states, labels = evaluate(self.parts["policy"], self.args.num_envs, self.labeller, self.args)
        values = summary(labels)
        for name, value in values.items():
            self.writer.add_scalar(f"evaluation/{name}", value, self.step)
        frames = pictures(states[:, :1], labels[:, :1, 0], 8, self.args)[0]
        self.writer.add_images("frames", frames, self.step, dataformats="NHWC")
        self.writer.flush()
        if values["clip_return"] > self.best_return:
            self.best_return = values["clip_return"]
            self.save("best.pt", policy=self.parts["policy"])
        self.save("checkpoint.pt", **self.parts)

    def save(self, name: str, **parts) -> None:
        content = {"script": SCRIPT, "settings": asdict(self.args), "progress": (self.step, self.best_return)}
        save(f"{self.args.run_dir}/{name}", content | {name: part.state_dict() for name, part in parts.items()})

    def finish(self) -> None:
        """After the loop, which ends the program if it was stopped."""
        self.bar.close()
        self.writer.close()
        if self.stopped:
            self.save("checkpoint.pt", **self.parts)
        os.close(self.lock)
        if self.stopped:
            print(f"stopped at step {self.step}, nothing lost; go on with: python {SCRIPT}.py --resume {self.args.run_dir}")
            sys.exit(128 + self.stopped)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)


def read_settings() -> tuple[Args, dict | None]:
    """The command line -> checked settings and, with --resume or --evaluate, the checkpoint that most of them come from."""
    args, checkpoint = tyro.cli(Args), None
    if args.resume or args.evaluate:
        path = f"{args.resume}/checkpoint.pt" if args.resume else args.evaluate
        takes = {"--resume"} if args.resume else {"--evaluate", "--episodes", "--seed", "--device"}
        others = {word.split("=")[0] for word in sys.argv[1:] if word.startswith("--")} - takes - {"--reward-program"}
        if others:
            raise UsageError(f"a checkpoint brings its own settings: leave out {', '.join(sorted(others))}")
        checkpoint = load(path, "rb" if args.resume else "policy")
        settings = Args(**checkpoint["settings"])
        settings.run_dir, settings.device = os.path.dirname(path) or ".", settings.device if args.resume else None
        named, settings.reward_program = settings.reward_program, None
        args = tyro.cli(Args, default=settings)
        if Path(named or "").name != Path(args.reward_program or "").name:  # a checkpoint runs nothing
            raise UsageError(f"add --reward-program {named}" if named else "leave out --reward-program: this run had none")
    elif args.run_dir and os.path.isdir(args.run_dir) and {*os.listdir(args.run_dir)} - {"checkpoint.pt.tmp"}:
        raise UsageError(f"{args.run_dir} exists: choose another --run-dir, or --resume {args.run_dir}")
    elif args.paper:
        args = tyro.cli(Args, default=replace(args, **PAPER))
    if args.task not in (None, *TASKS):
        raise UsageError(f"no task {args.task}: there are {', '.join(TASKS)}")
    args.prompt = (TASKS[args.task or "kneeling"][0],) if args.prompt is None else args.prompt
    args.task = args.task or next((task for task, (prompt, _) in TASKS.items() if args.prompt == (prompt,)), None)
    if not args.ent_coef > 0:
        raise UsageError("--ent-coef must be above 0: its logarithm is what is tuned")
    if args.n_step > args.episode_length:
        raise UsageError(f"--n-step {args.n_step} is more than the {args.episode_length} steps of an episode")
    for name, value in asdict(args).items():
        least = 0 if name in ("seed", "learning_starts", "ray_workers") else 1
        if type(value) is int and not least <= value < 2**40:
            raise UsageError(f"--{name.replace('_', '-')} must be at least {least} and less than 2^40, not {value}")
        if type(value) is float and name != "temperature" and not 0 <= value <= 1:
            raise UsageError(f"--{name.replace('_', '-')} must lie between 0 and 1, not {value}")
    for name in ("prompt", "baseline_prompt", "negative_prompt"):
        if sum(len(text.split()) == 1 for text in getattr(args, name)) > 1:
            raise UsageError(f"--{name.replace('_', '-')} takes sentences, not words: put quotes around each")
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("PyTorch sees no CUDA GPU here" + ("" if args.resume else ": leave out --device cuda"))
    args.precision = args.precision or native_precision(args.device)
    if args.clip_model is None:
        args.clip_model = "tiny" if args.device == "cpu" else "ViT-bigG-14/laion2b_s39b_b160k"
    if args.total_timesteps is None:
        args.total_timesteps = 128_000 if args.clip_model == "tiny" or args.reward_program else 10_000_000
    args.run_dir = args.run_dir or f"runs/{SCRIPT}__{args.seed}__{int(time.time())}"
    return args, checkpoint


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout.reconfigure(line_buffering=True, errors="replace")
    threading.excepthook = lambda _: None  # TensorBoard's thread hands its errors on to this one
    args, checkpoint = read_settings()
    about = " (bundled: trained on CartPole, MountainCar and the humanoid as drawn here, no evidence of zero-shot ability)"
    labeller = Labeller(Worker, args, torch.device(args.device))
    if not args.reward_program:
        print(f"CLIP model {args.clip_model}{about if args.clip_model == 'tiny' else ''} in {args.precision} on {args.device}")
    prompt = "not used" if args.reward_program else "the mean of " * (len(args.prompt) > 1) + "; ".join(args.prompt)
    print(f"prompt {prompt}; {args.total_timesteps:,} steps; run folder {args.run_dir}")
    print(f"task {args.task or 'unknown, without a success rate'}")
    if not args.evaluate:
        train(args, checkpoint, labeller)
    path = args.evaluate or f"{args.run_dir}/best.pt"
    policy = SAC(make_envs(1, args).single_observation_space.shape[0], args).policy
    policy.load_state_dict(load(path, "policy")["policy"])
    path = f"{path[:-3]}_evaluation" if args.evaluate else f"{args.run_dir}/result"
    states, labels = evaluate(policy, args.episodes, labeller, args)
    if not args.evaluate:
        with SummaryWriter(args.run_dir) as writer:
            for name, value in summary(labels).items():
                writer.add_scalar(f"result/{name}", value, args.total_timesteps)
    write_result(path, states, labels, args)


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # … | head
        os._exit(141)
    except (UsageError, OSError, ImportError) as error:
        tqdm.write(f"{SCRIPT}.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not re.search("allocate|out of memory", str(error)):
            raise
        advice = "try less of --num-envs, --buffer-size, --clip-batch-size"
        tqdm.write(f"{SCRIPT}.py: error: out of memory: {advice}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        tqdm.write("interrupted; a training goes on from its last checkpoint with --resume", file=sys.stderr)
        os._exit(130)  # sys.exit would wait until the threads have labelled what they were given
