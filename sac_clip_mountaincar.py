"""MountainCar learned from one sentence: SAC whose only reward is a CLIP model's opinion of the frame.

    python sac_clip_mountaincar.py --prompt "a car at the peak of the mountain, next to the yellow flag"

The method is VLM-RM (Rocamonde et al., ICLR 2024, arXiv 2310.12921), its Algorithm 1 with SAC (Haarnoja et al., 2018). Read from
top to bottom: settings, environment and drawing, replay buffer, networks, labelling, evaluation, and the loop: act, learn, label,
report.

A reward for pictures of the goal says little in the valley, where the start is, and a car that rolls there with SAC's own noise,
new at every step, never leaves it. So the exploration is part of the method: the noise is correlated in time (an
Ornstein-Uhlenbeck process, as in DDPG), in step with the valley. The car swings there with a period of 2π/√0.0075 = 73 steps, and
of all such noises one that forgets as e^(-√0.0075 t), 0.917 a step, has the most power at that period: one random episode in ten
reaches the goal. At each step by itself the noise is the standard normal that SAC wants, and SAC, being off-policy, does not mind
where its transitions come from: nothing else changes. (The paper does not say what it explored with.)
"""

import json
import math
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import imageio.v3 as iio
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from PIL import Image, ImageDraw, ImageFont
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from clip_reward import CLIPReward, RewardModelError, native_precision

SCRIPT = Path(__file__).stem
THREADS = torch.get_num_threads()  # one a core, or OMP_NUM_THREADS


@dataclass
class Args:
    """Teach MountainCar with a sentence: SAC on the reward of a CLIP model. The paper's values are defaults unless said otherwise."""

    prompt: tuple[str, ...] = ("a car at the peak of the mountain, next to the yellow flag",)
    """what the goal looks like; several sentences are averaged"""
    baseline_prompt: tuple[str, ...] = ("a car in the mountain",)
    """what the scene looks like in general"""
    goal_baseline_alpha: float = 0.5
    """α of goal-baseline regularization, 0 (plain cosine) to 1; most values in between work (paper, Section 4.2)"""
    textures: Literal["realistic", "original"] = "realistic"
    """how the scene is drawn: as mountains with a red car, or as Gymnasium does"""
    clip_model: str | None = None
    """NAME/TAG, NAME//path/to/weights, hf-hub:ORG/NAME, local-dir:PATH or tiny
    (default: the paper's ViT-bigG-14/laion2b_s39b_b160k on CUDA, the bundled tiny on a CPU)"""
    clip_batch_size: int = 128
    """frames drawn and scored at once"""
    precision: Literal["fp32", "bf16"] | None = None
    """what the CLIP model computes in (default: bf16 where the processor or GPU has instructions for it, else fp32)"""
    reward: Literal["clip", "contrastive", "ground-truth"] = "clip"
    """what the agent learns from: clip is goal-baseline regularization, contrastive (without baseline and α) the probability of the
    prompt among it and the negative ones (Baumli et al., 2023); ground-truth, 1 per step at the goal, is for reference curves"""
    negative_prompt: tuple[str, ...] = ("a car in the valley", "a car on the left hill, far from the flag")
    """contrastive: what else there might be to see"""
    temperature: float | None = None
    """contrastive: τ of the softmax (default: the model's own)"""
    threshold: float | None = None
    """contrastive: β, above which the reward is 1, and else 0 (default: the probability itself is the reward)"""

    seed: int = 1
    """seed of the weights, the start states and the exploration"""
    device: str | None = None
    """cpu or cuda (default: cuda where there is one)"""
    total_timesteps: int = 320_000
    """environment steps over all environments, rounded up to whole rounds of one episode in each of them
    (paper: 3,000,000, with a model that has never seen the scene)"""
    num_envs: int = 16
    """environments simulated side by side"""
    episode_length: int = 200
    """steps of every episode (the paper does not say; its code's example has 200)"""
    gradient_steps: int = 200
    """updates per round: one for each step of all environments, as in Stable-Baselines3"""

    learning_starts: int = 3_200
    """random steps before learning, by default the first round (paper: Stable-Baselines3's default, 100)"""
    learning_rate: float = 1e-4
    """of Adam, for actor and critics"""
    buffer_size: int = 1_000_000
    """transitions kept, at least one round of them (Stable-Baselines3's default, as in the paper)"""
    gamma: float = 0.9999
    """discount factor"""
    tau: float = 0.01
    """share of the critics that the target critics take over at each update"""
    batch_size: int = 256
    """transitions per update (Stable-Baselines3's default, as in the paper)"""
    ent_coef: float = 0.1
    """weight of the policy's entropy in its objective, fixed"""
    noise_correlation: float = 0.917
    """of the exploration noise from one step to the next (see the top of this file); 0 is SAC's own"""

    run_dir: Path | None = None
    """folder of this run, made anew (default: runs/SCRIPT__SEED__TIME)"""
    checkpoint_every: int = 16_000
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


# ---- Environment and drawing

SCREEN_WIDTH, SCREEN_HEIGHT = 600, 400  # of Gymnasium's frame, in whose pixels the scene is described
X_MIN, X_MAX, X_GOAL = -1.2, 0.6, 0.45  # the ends of the track, and where the flag stands
MAX_SPEED = 0.07
STATE_SIZE, ACTION_SIZE = 2, 1  # the state is what is observed


class MountainCar:
    """`num_envs` cars with the dynamics of Gymnasium's MountainCarContinuous-v0, in float64 on `device`, all at the same step.

    A state is (position x, its speed, both in the environment's own units); the bottom of the valley is at x = -π/6, the goal at
    x ≥ 0.45. As in the paper, no episode ends early, because that would tell the agent what the task is: each lasts
    `episode_length` steps, and the goal is absorbing: a car that has reached it stays there. Nothing resets itself: call `reset`.
    """

    def __init__(self, num_envs: int, episode_length: int, device: torch.device):
        self.num_envs, self.episode_length, self.device = num_envs, episode_length, device
        self.rng = torch.Generator(device)

    def reset(self, seed: int | None = None) -> tuple[torch.Tensor, dict]:
        """Start all episodes anew, at rest near the bottom of the valley -> obs (num_envs, 2) float32, {}."""
        if seed is not None:
            self.rng.manual_seed(seed)
        uniform = torch.rand(self.num_envs, generator=self.rng, dtype=torch.float64, device=self.device)
        self.state = torch.stack([0.2 * uniform - 0.6, 0 * uniform], dim=1)
        self.success = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        self.t = 0
        return self.state.float(), {}

    def step(self, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, dict]:
        """Actions (num_envs, 1), the engine's force in [-1, 1] -> obs, rewards, terminations, truncations, infos.

        The reward is the ground truth; infos["success"] (num_envs,) says whether the goal has been reached.
        """
        x, speed = self.state.unbind(1)
        speed = speed + 0.0015 * actions[:, 0].clamp(-1, 1) - 0.0025 * (3 * x).cos()
        speed = speed.clamp(-MAX_SPEED, MAX_SPEED)
        x = (x + speed).clamp(X_MIN, X_MAX)
        speed = torch.where((x == X_MIN) & (speed < 0), 0.0, speed)  # the wall on the left
        self.state = torch.where(self.success[:, None], self.state, torch.stack([x, speed], dim=1))
        self.t += 1

        obs = self.state.float()
        rewards = ground_truth_reward(obs)
        self.success = rewards > 0
        terminations = torch.zeros_like(self.success)  # no state is terminal, the goal neither: the episode goes on
        truncations = torch.full_like(self.success, self.t >= self.episode_length)
        return obs, rewards, terminations, truncations, {"success": self.success}


def ground_truth_reward(states: torch.Tensor) -> torch.Tensor:
    """States (N, 2) -> 1.0 at the goal, else 0.0 (N,), for each step there. (Gymnasium pays 100, once, less a cost of the actions.)"""
    return (states[:, 0] >= X_GOAL).float()


def ground(x: torch.Tensor) -> torch.Tensor:
    """Height of the ground at x, in the same units."""
    return 0.45 * (3 * x).sin() + 0.55


SCALE = SCREEN_WIDTH / (X_MAX - X_MIN)  # Gymnasium's pixels per unit of x and of height
DETAIL = 3  # pixels of the two paintings below per pixel of Gymnasium's
SAMPLES = 3  # points per pixel and direction at which the car is looked up
CAR_RADIUS = 48  # no part of the car is further from its middle, in Gymnasium's pixels


@cache
def paint_background(textures: str) -> Image.Image:
    """What never moves, painted once, DETAIL times Gymnasium's size: the sky, the mountains and the flag."""
    y = (SCREEN_HEIGHT - (torch.arange(SCREEN_HEIGHT * DETAIL) + 0.5) / DETAIL)[:, None] / SCALE  # of each row and
    x = (torch.arange(SCREEN_WIDTH * DETAIL) + 0.5) / DETAIL / SCALE + X_MIN  # of each column, in the environment's units
    rng = torch.Generator().manual_seed(6)  # the clouds leave the flag free

    def smooth_noise(cells: int) -> torch.Tensor:
        """Smooth random values in [0, 1] (rows, columns): static of ever finer grain, the finer the fainter."""
        static = [torch.rand(1, 1, cells << k, cells * 3 // 2 << k, generator=rng) / 2**k for k in range(4)]
        smooth = sum(F.interpolate(grain, size=(len(y), len(x)), mode="bicubic") for grain in static)[0, 0]
        return (smooth - smooth.min()) / (smooth.max() - smooth.min())

    def ridge(peaks: int) -> torch.Tensor:
        """A jagged line: its height, from 0 to 1, in each column."""
        jags = [torch.rand(1, 1, peaks << 2 * k, generator=rng) / 4**k for k in range(3)]
        return sum(F.interpolate(jag, size=len(x), mode="linear") for jag in jags)[0, 0] / 1.3

    def mix(one: tuple | torch.Tensor, other: tuple | torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        """Two colours or pictures (3, rows, columns), the second with a share, cut to [0, 1], of each pixel."""
        one, other = (torch.tensor(it).view(3, 1, 1) if isinstance(it, tuple) else it for it in (one, other))
        return one + (other - one) * share.clamp(0, 1)

    pixels = torch.full((3, len(y), len(x)), 255.0)
    if textures == "realistic":
        pixels = mix((60, 126, 206), (190, 220, 246), 1.2 - y)  # the sky, paler towards the horizon
        pixels = mix(pixels, (255, 255, 255), (smooth_noise(4) - 0.55) * 4 * ((y - 0.55) * 4).clamp(0, 1))  # clouds
        for bottom, top, colour in ((0.55, 0.95, (128, 148, 184)), (0.35, 0.68, (78, 108, 112))):  # two ranges far away
            far = mix(colour, (240, 244, 250), (y - 0.72 + 0.1 * smooth_noise(16)) * 20)  # with snow on their tops
            pixels = mix(pixels, far, (bottom + (top - bottom) * ridge(9) - y) * 200)
        depth, grain, patches = ground(x) - y, smooth_noise(24), smooth_noise(6)
        rock, grass = mix((122, 106, 94), (62, 54, 50), grain), mix((98, 152, 62), (50, 98, 38), grain)
        snow, snows = mix((252, 253, 255), (200, 212, 230), grain), ((ground(x) - 0.85 + 0.1 * patches) * 40).clamp(0, 1)
        mountain = mix(rock, grass, (0.05 + 0.1 * patches - depth) * 100)
        mountain = mix(mountain, snow, (0.04 + 0.2 * patches - depth) * 100 * snows)
        pixels = mix(pixels, mountain, depth * 200)

    image = Image.fromarray(pixels.permute(1, 2, 0).clamp(0, 255).byte().numpy())
    pen = ImageDraw.Draw(image)

    def at(column: float, row: float) -> tuple[float, float]:
        return ((column + 0.5) * DETAIL, (SCREEN_HEIGHT - 0.5 - row) * DETAIL)

    flag_x, flag_y = int((X_GOAL - X_MIN) * SCALE), int(ground(torch.tensor(X_GOAL)) * SCALE)
    if textures != "realistic":
        pen.line([at((a - X_MIN) * SCALE, ground(a) * SCALE) for a in torch.linspace(X_MIN, X_MAX, 100)], "black", DETAIL)
        pen.line([at(flag_x, flag_y - 0.5), at(flag_x, flag_y + 50.5)], "black", DETAIL)
        pen.polygon([at(flag_x, flag_y + 50), at(flag_x, flag_y + 40), at(flag_x + 25, flag_y + 45)], (204, 204, 0))
    else:
        pen.line([at(flag_x, flag_y - 4), at(flag_x, flag_y + 64)], (60, 50, 40), 3 * DETAIL)
        cloth = ((1, 64), (15, 60), (30, 63), (45, 59), (45, 37), (30, 41), (15, 38), (1, 42))
        pen.polygon([at(flag_x + a, flag_y + b) for a, b in cloth], (255, 214, 0), (190, 150, 0))
    return image


def paint_car(textures: str) -> Image.Image:
    """The car on transparent ground, DETAIL times its size in Gymnasium's pixels; it is turned around the middle of the picture."""
    image = Image.new("RGBA", (2 * CAR_RADIUS * DETAIL,) * 2)
    pen = ImageDraw.Draw(image)

    def at(*points: tuple[float, float]) -> list[tuple[float, float]]:
        return [((CAR_RADIUS + right) * DETAIL, (CAR_RADIUS - up) * DETAIL) for right, up in points]

    def wheel(right: float, up: float, radius: float, colour: tuple[int, int, int]) -> None:
        pen.ellipse(at((right - radius, up + radius), (right + radius, up - radius)), colour)

    if textures != "realistic":  # with the half pixel that Gymnasium's polygon filling adds
        pen.polygon(at((-20.5, -0.5), (-20.5, 20.5), (20.5, 20.5), (20.5, -0.5)), "black")
        for right in (-10, 10):
            wheel(right, 0, 8.5, (128, 128, 128))
    else:
        red, dark, glass = (214, 32, 28), (140, 14, 16), (176, 222, 244)
        pen.polygon(at((-26, 21), (-19, 37), (8, 37), (19, 21)), red)
        pen.polygon(at((-21, 22), (-16, 33.5), (-6, 33.5), (-6, 22)), glass)
        pen.polygon(at((-3, 22), (-3, 33.5), (6.5, 33.5), (14.5, 22)), glass)
        pen.rounded_rectangle(at((-40, 23), (40, 7)), 5 * DETAIL, red)
        pen.rectangle(at((-39, 11), (39, 8)), dark)
        pen.line(at((-4.5, 21), (-4.5, 10)), dark, DETAIL)  # the door
        pen.rectangle(at((36, 20), (40, 15)), (255, 240, 150))  # lights
        pen.rectangle(at((-40, 20), (-37, 15)), (255, 130, 40))
        for right in (-24, 24):
            wheel(right, 9, 11, (24, 24, 26))
            wheel(right, 9, 5, (196, 200, 206))
    return image


@lru_cache(maxsize=8)
def paintings(textures: str, height: int, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The background at the size of a frame (3, height, width) and the car (4, …), its colours times its opacity, on the device."""
    background = paint_background(textures).resize((width, height), Image.BOX)
    car = torch.from_numpy(np.array(paint_car(textures))).permute(2, 0, 1).float()
    car[:3] *= car[3:] / 255
    return torch.from_numpy(np.array(background)).permute(2, 0, 1).to(device), car.to(device)


def draw(states: torch.Tensor, height: int, width: int, textures: str) -> torch.Tensor:
    """States (N, 2) -> frames (N, 3, height, width) uint8 on the same device: the scene squashed to that size.

    Only a window around the car, the same size for all, is computed, with SAMPLES x SAMPLES points in every pixel.
    """
    background, car = paintings(textures, height, width, states.device)
    n, x = len(states), states[:, 0].float()
    pixel_x, pixel_y = SCREEN_WIDTH / width, SCREEN_HEIGHT / height
    if textures != "realistic":
        up, lean = SCALE * ground(x) + 10.5, (3 * x).cos()  # Gymnasium's
    else:  # both wheels on the ground, whose slope is 1.35 cos 3x
        wheel = 24 / SCALE / (1 + (1.35 * (3 * x).cos()).square()).sqrt()
        back, front = ground(x - wheel), ground(x + wheel)
        up, lean = SCALE * (back + front) / 2, torch.atan2(front - back, 2 * wheel)
    x, y = SCALE * (x - X_MIN), SCREEN_HEIGHT - up  # the car's middle, from the upper left corner

    columns, rows = (min(size, int(2 * CAR_RADIUS / pixel) + 2) for size, pixel in ((width, pixel_x), (height, pixel_y)))
    left = (x / pixel_x - columns / 2).round().long().clamp(0, width - columns)[:, None]
    top = (y / pixel_y - rows / 2).round().long().clamp(0, height - rows)[:, None]
    column, row = (torch.arange(SAMPLES * size, device=x.device) / SAMPLES + 0.5 / SAMPLES for size in (columns, rows))
    right = (((left + column) * pixel_x - x[:, None]) / CAR_RADIUS)[:, None, :]  # (N, 1, SAMPLES * columns)
    down = (((top + row) * pixel_y - y[:, None]) / CAR_RADIUS)[:, :, None]  # (N, SAMPLES * rows, 1)
    sin, cos = lean.sin()[:, None, None], lean.cos()[:, None, None]
    grid = torch.stack([cos * right - sin * down, sin * right + cos * down], dim=-1)  # in the car's own frame
    window = F.grid_sample(car.expand(n, -1, -1, -1), grid, mode="nearest", align_corners=False)
    window = F.avg_pool2d(window, SAMPLES)  # (N, 4, rows, columns)

    where_row = (top + torch.arange(rows, device=x.device))[:, :, None]
    where_column = (left + torch.arange(columns, device=x.device))[:, None, :]
    behind = background[:, where_row, where_column].transpose(0, 1)
    pixels = behind * (1 - window[:, 3:] / 255) + window[:, :3]
    frames = background.expand(n, -1, -1, -1).clone()
    each = torch.arange(n, device=x.device)[:, None, None]
    frames[each, :, where_row, where_column] = pixels.round().to(torch.uint8).permute(0, 2, 3, 1)
    return frames


# ---- Replay buffer and networks


class ReplayBuffer:
    """A ring of labelled transitions in preallocated tensors on the device.

    There is no "done": the value of every next state is bootstrapped. An episode only ever ends by its time limit, which is no
    property of the state. (The paper's code treats the last step as terminal, although the agent cannot see the time.) And the
    goal is absorbing but not terminal: a car there goes on earning the goal's reward, step by step, in transitions from the goal
    to itself, so that the goal is worth R / (1 - γ), and the entropy bonus besides. As a terminal state it would be worth one R,
    and since R is as a rule positive, driving on for ever would be worth more.
    """

    FIELDS = ("obs", "next_obs", "actions", "rewards")

    def __init__(self, capacity: int, device: torch.device):
        self.capacity, self.device = capacity, device
        # Empty, not zeros: on a CPU memory is taken only as the buffer fills.
        self.obs = torch.empty(capacity, STATE_SIZE, device=device)
        self.next_obs = torch.empty(capacity, STATE_SIZE, device=device)
        self.actions = torch.empty(capacity, ACTION_SIZE, device=device)
        self.rewards = torch.empty(capacity, device=device)
        self.pos = self.size = 0  # next place to write; transitions held

    def add(self, *transitions: torch.Tensor) -> None:
        """Append N transitions: obs (N, 2), next_obs (N, 2), actions (N, 1), rewards (N,)."""
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


def normalize(obs: torch.Tensor) -> torch.Tensor:
    """Observations (N, 2) -> the same with x and speed, whose ranges differ thirteenfold, in [-1, 1]."""
    return torch.stack([(obs[:, 0] - (X_MIN + X_MAX) / 2) / ((X_MAX - X_MIN) / 2), obs[:, 1] / MAX_SPEED], dim=1)


LOG_STD_MIN, LOG_STD_MAX = -5, 2


class SoftQNetwork(nn.Module):
    """Normalized observations (N, 2) and actions (N, 1) -> action values (N,)."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(STATE_SIZE + ACTION_SIZE, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, obs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        return self.net(torch.cat([obs, actions], dim=1)).squeeze(1)


class Actor(nn.Module):
    """Normalized observations (N, 2) -> mean and log standard deviation (N, 1) of a Gaussian; its sample's tanh is the action."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(STATE_SIZE, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2 * ACTION_SIZE)
        )

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_std = self.net(obs).split(ACTION_SIZE, dim=1)
        return mean, log_std.clamp(LOG_STD_MIN, LOG_STD_MAX)

    def get_action(self, obs: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalized observations (N, 2), standard normal noise (N, 1) -> actions (N, 1) in (-1, 1), their log probabilities (N,)."""
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
        self.reward_model, self.textures, self.batch_size, self.pool = reward_model, args.textures, args.clip_batch_size, pool
        self.batches, self.rest = [], torch.empty(0, STATE_SIZE, device=reward_model.device)

    def submit(self, states: torch.Tensor) -> None:
        """Take in states (N, 2); a batch begins when it is full and more come."""
        *full, self.rest = torch.cat([self.rest, states]).split(self.batch_size)
        self.batches += [(self.pool.submit(self.label, batch), batch) for batch in full]

    @torch.no_grad()
    def label(self, states: torch.Tensor) -> tuple[torch.Tensor, float, float]:
        """States (N, 2) -> rewards (N,), seconds spent drawing, and scoring."""
        start = time.perf_counter()
        frames = draw(states, *self.reward_model.size, self.textures)  # (N, 3, height, width) uint8, never stored
        drawn = time.perf_counter()
        rewards = self.reward_model(frames)
        return rewards, drawn - start, time.perf_counter() - drawn

    def result(self, show: str | None = None) -> tuple[torch.Tensor, dict[str, float]]:
        """-> rewards of all states since the last result, in their order; seconds spent on them, the sum of all threads'."""
        self.batches.append((self.pool.submit(self.label, self.rest), self.rest))
        batches = tqdm(self.batches, desc=show, leave=False, disable=not show)
        own = [self.label(states) if task.cancel() else None for task, states in batches]  # what no thread has begun yet
        labels = [mine or task.result() for mine, (task, _) in zip(own, self.batches)]
        self.batches, self.rest = [], self.rest[:0]
        rewards, draw_seconds, clip_seconds = zip(*labels)
        return torch.cat(rewards), {"draw": sum(draw_seconds), "clip": sum(clip_seconds)}


# ---- Evaluation, pictures, files


@torch.no_grad()
def evaluate(actor: Actor, labeller: Labeller, args: Args) -> tuple[dict, torch.Tensor, torch.Tensor]:
    """Play `args.episodes` episodes without exploration -> metrics, states (episode_length, episodes, 2), their CLIP rewards."""
    envs = MountainCar(args.episodes, args.episode_length, labeller.reward_model.device)
    obs, _ = envs.reset(seed=(args.seed + 1) * 1_000_000)  # start states that no training sees, and no other seed
    states = []
    for _ in range(args.episode_length):
        obs, _, _, _, infos = envs.step(actor(normalize(obs))[0].tanh())
        states.append(obs)
    states = torch.stack(states)
    labeller.submit(states.flatten(0, 1))
    rewards = labeller.result(f"score {args.episodes} episodes")[0].view(states.shape[:2])
    true_rewards = ground_truth_reward(states.flatten(0, 1)).view(states.shape[:2])
    metrics = {
        "success_rate": infos["success"].float().mean().item(),
        "clip_return": rewards.sum(0).mean().item(),
        "ground_truth_return": true_rewards.sum(0).mean().item(),
    }
    return metrics, states, rewards


def picture(states: torch.Tensor, rewards: torch.Tensor, args: Args) -> Image.Image:
    """States (T, N, 2) and their rewards (T, N) -> a contact sheet: eight frames of an episode a row, with step and CLIP reward."""
    width, height = 200, 150
    steps = torch.linspace(0, len(states) - 1, 8).round().long().to(states.device)
    frames = draw(states[steps].transpose(0, 1).flatten(0, 1), height - 26, width - 4, args.textures)
    sheet = Image.new("RGB", (8 * width, states.shape[1] * height), "gray")
    pen = ImageDraw.Draw(sheet)
    for n, frame in enumerate(frames.permute(0, 2, 3, 1).cpu().numpy()):
        row, k = divmod(n, 8)
        sheet.paste(Image.fromarray(frame), (k * width + 2, row * height + 2))
        text = f"step {steps[k] + 1}   reward {rewards[steps[k], row]:.3f}"
        pen.text((k * width + 20, row * height + height - 20), text, "white", ImageFont.load_default(14))
    return sheet


def write_video(path: Path, states: torch.Tensor, rewards: torch.Tensor, args: Args) -> None:
    """States (T, N, 2) and rewards (T, N) -> the N episodes one after another as an mp4, each frame with its CLIP reward."""
    temporary = path.with_suffix(".tmp.mp4")
    try:
        with iio.imopen(temporary, "w", plugin="pyav") as file:
            file.init_video_stream("libx264", fps=30)  # as in Gymnasium
            for episode in range(states.shape[1]):
                for state, reward in zip(states[:, episode].split(1), rewards[:, episode]):
                    frame = Image.fromarray(draw(state, 400, 600, args.textures)[0].permute(1, 2, 0).cpu().numpy())
                    text = f"episode {episode + 1}   CLIP reward {reward:.3f}"
                    ImageDraw.Draw(frame).text((10, 10), text, "black", ImageFont.load_default(20))
                    file.write_frame(np.asarray(frame))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def report_evaluation(path: Path, args: Args, metrics: dict, states: torch.Tensor, rewards: torch.Tensor) -> Image.Image:
    """Write an evaluation to path.json, path.mp4 and path.png and print its table -> the picture."""
    versions = {name: version(name) for name in ("torch", "open_clip_torch")}
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
    except Exception:  # whatever the file holds instead
        fail(f"{path} is not a checkpoint of {SCRIPT}.py{' that can be resumed' if args.resume else ''}")
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
    for name, value in asdict(args).items():
        flag, least = "--" + name.replace("_", "-"), 0 if name in ("seed", "learning_starts") else 1
        if type(value) is int and not least <= value < 2**40:
            fail(f"{flag} must be at least {least}{' and less than 2^40' if value > least else ''}, not {value}")
        if type(value) is float and name != "temperature" and not 0 <= value <= 1:
            fail(f"{flag} must lie between 0 and 1, not {value}")
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.device.split(":")[0] not in ("cpu", "cuda"):
        fail(f"no device {args.device} here: only cpu and cuda are supported")
    try:
        torch.zeros(1, device=args.device)
    except (RuntimeError, AssertionError) as error:  # no driver, no such GPU, a CPU-only build of PyTorch
        hint = "a run goes on only on its own kind of device" if args.resume else "try --device cpu"
        fail(f"no device {args.device} here ({str(error).splitlines()[0]}); {hint}")
    args.precision = args.precision or native_precision(args.device)
    args.clip_model = args.clip_model or ("ViT-bigG-14/laion2b_s39b_b160k" if args.device.startswith("cuda") else "tiny")
    args.run_dir = args.run_dir or Path("runs") / f"{SCRIPT}__{args.seed}__{int(time.time())}"
    if not checkpoint and os.path.exists(args.run_dir):
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
    actor: Actor, envs: MountainCar, labeller: Labeller, rng: torch.Generator, step: int, args: Args
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """One episode in all environments at once; the labeller gets the states as they come.

    -> obs (episode_length + 1, num_envs, 2), actions (episode_length, num_envs, 1), success (num_envs,), seconds.
    """
    start = time.perf_counter()
    obs, _ = envs.reset()
    all_obs, all_actions = [obs], []
    noise = torch.randn(envs.num_envs, ACTION_SIZE, generator=rng, device=obs.device)
    for _ in range(args.episode_length):
        fresh = torch.randn(envs.num_envs, ACTION_SIZE, generator=rng, device=obs.device)
        # Correlated with the step before, and yet standard normal at each step.
        noise = args.noise_correlation * noise + math.sqrt(1 - args.noise_correlation**2) * fresh
        if step < args.learning_starts:
            actions = torch.erf(noise / math.sqrt(2))  # uniform in [-1, 1]
        else:
            actions, _ = actor.get_action(normalize(obs), noise)
        obs, _, _, _, infos = envs.step(actions)
        labeller.submit(obs)
        all_obs.append(obs)
        all_actions.append(actions)
        step += args.num_envs
    return torch.stack(all_obs), torch.stack(all_actions), infos["success"], time.perf_counter() - start


def main() -> None:
    args, checkpoint = read_settings()
    torch.set_num_threads(1)  # threads of our own are faster: see Labeller
    device = torch.device(args.device)
    try:
        reward_model = CLIPReward(
            *(args.clip_model, args.prompt, args.baseline_prompt, args.goal_baseline_alpha),
            *(device, args.clip_batch_size, args.precision),
            *(args.negative_prompt if args.reward == "contrastive" else (), args.temperature, args.threshold),
        )
    except RewardModelError as error:
        fail(str(error))
    about = " (bundled: trained on these very scenes, good for trying and testing, no evidence of zero-shot ability)"
    print(f"CLIP model {args.clip_model}{about if args.clip_model == 'tiny' else ''} in {args.precision} on {args.device}")
    print(f"prompt {'; '.join(args.prompt)}")
    if not args.evaluate:
        print(f"run folder {args.run_dir}; watch it with: tensorboard --logdir {args.run_dir.parent}")

    # One core is left to the learning, here; on a GPU one thread acts and one labels.
    threads = max(THREADS - 1, 1) if device.type == "cpu" else 2
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    labeller = Labeller(reward_model, args, pool)

    torch.manual_seed(args.seed)
    actor = Actor().to(device)
    qf1, qf2, qf1_target, qf2_target = (SoftQNetwork().to(device) for _ in range(4))
    qf1_target.load_state_dict(qf1.state_dict())
    qf2_target.load_state_dict(qf2.state_dict())
    if args.evaluate:
        actor.load_state_dict(checkpoint["actor"])
        path = args.evaluate.with_name(f"{args.evaluate.stem}_evaluation")
        report_evaluation(path, args, *evaluate(actor, labeller, args))
        return
    actor_parameters, q_parameters = list(actor.parameters()), [*qf1.parameters(), *qf2.parameters()]
    averages = [*qf1_target.parameters(), *qf2_target.parameters()]
    follow = get_ema_multi_avg_fn(1 - args.tau)  # moves the running means, all in one operation
    actor_optimizer = torch.optim.Adam(actor_parameters, lr=args.learning_rate, fused=True)
    q_optimizer = torch.optim.Adam(q_parameters, lr=args.learning_rate, fused=True)
    rb = ReplayBuffer(max(args.buffer_size, args.num_envs * args.episode_length), device)
    envs = MountainCar(args.num_envs, args.episode_length, device)
    envs.reset(seed=args.seed)
    rngs = {"act": torch.Generator(device), "sample": torch.Generator(device)}
    for k, rng in enumerate(rngs.values(), 1):
        rng.manual_seed(args.seed + 1_000 * k)
    rngs["envs"] = envs.rng
    global_step, best_return, training_seconds = 0, -math.inf, 0.0
    parts = {"actor": actor, "qf1": qf1, "qf2": qf2, "qf1_target": qf1_target, "qf2_target": qf2_target}
    parts |= {"actor_optimizer": actor_optimizer, "q_optimizer": q_optimizer, "rb": rb}

    def save_checkpoint() -> None:
        """All that the rest of the run depends on between two rounds: a resumed run is the unbroken one, bit for bit on a CPU."""
        counters = {"global_step": global_step, "best_return": best_return}
        content = {"script": SCRIPT, "settings": args.to_save(), "training_seconds": training_seconds} | counters
        content |= {"rngs": {name: rng.get_state() for name, rng in rngs.items()}}
        save(args.run_dir / "checkpoint.pt", content | {name: part.state_dict() for name, part in parts.items()})

    if args.track:
        import wandb

        name = args.run_dir.name
        wandb.init(project=args.wandb_project_name, id=name, config=args.to_save(), resume="allow", sync_tensorboard=True)
    if args.resume:
        global_step, best_return = checkpoint["global_step"], checkpoint["best_return"]
        training_seconds = checkpoint["training_seconds"]
        if global_step >= args.total_timesteps:
            print("this run is already trained: only its evaluation is made again")
        for name, rng in rngs.items():
            rng.set_state(checkpoint["rngs"][name])
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])
    else:
        try:
            args.run_dir.mkdir(parents=True)
        except OSError as error:
            fail(f"cannot write to {args.run_dir}: {error.strerror}")
        save_checkpoint()
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

    progress = tqdm(total=args.total_timesteps, initial=global_step, unit="step", desc="train", smoothing=0.05)
    signal.signal(signal.SIGINT, request_stop)
    signal.signal(signal.SIGTERM, request_stop)
    while global_step < args.total_timesteps and not stop:
        start, step_before = time.perf_counter(), global_step
        learning = step_before >= max(args.learning_starts, 1)

        # ---- Act, in a thread, with the policy as it is now: its successor is learned meanwhile.
        played = deepcopy(actor)
        acting = pool.submit(act, played, envs, labeller, rngs["act"], step_before, args)

        # ---- Learn: SAC, on the transitions of the rounds before.
        for _ in range(args.gradient_steps if learning else 0):
            b_obs, b_next_obs, b_actions, b_rewards = rb.sample(args.batch_size, rngs["sample"])
            b_obs, b_next_obs = normalize(b_obs), normalize(b_next_obs)
            b_noise = torch.randn(2, args.batch_size, ACTION_SIZE, generator=rngs["sample"], device=device)
            with torch.no_grad():  # every next state bootstraps: see ReplayBuffer
                next_actions, next_log_prob = actor.get_action(b_next_obs, b_noise[0])
                next_q = torch.min(qf1_target(b_next_obs, next_actions), qf2_target(b_next_obs, next_actions))
                td_target = b_rewards + args.gamma * (next_q - args.ent_coef * next_log_prob)
            q_values = qf1(b_obs, b_actions)
            qf_loss = F.mse_loss(q_values, td_target) + F.mse_loss(qf2(b_obs, b_actions), td_target)
            q_optimizer.zero_grad()
            qf_loss.backward()
            q_optimizer.step()

            actions, log_prob = actor.get_action(b_obs, b_noise[1])
            actor_loss = (args.ent_coef * log_prob - torch.min(qf1(b_obs, actions), qf2(b_obs, actions))).mean()
            actor_optimizer.zero_grad()
            actor_loss.backward(inputs=actor_parameters)  # the critics need no gradient of it
            actor_optimizer.step()
            follow(averages, q_parameters, None)
        seconds = {"update": time.perf_counter() - start}

        # ---- Label: the frame after each step is drawn and scored with CLIP (Algorithm 1; Definition 1), by whatever threads
        # are free, and now by this one, too. Then the round enters the buffer.
        all_obs, actions, success, seconds["simulate"] = acting.result()
        clip_rewards, label_seconds = labeller.result()
        seconds |= label_seconds
        obs, next_obs, actions = all_obs[:-1].flatten(0, 1), all_obs[1:].flatten(0, 1), actions.flatten(0, 1)
        true_rewards = ground_truth_reward(next_obs)
        rb.add(obs, next_obs, actions, true_rewards if args.reward == "ground-truth" else clip_rewards)
        global_step += args.num_envs * args.episode_length

        # ---- Report.
        sums = torch.stack([clip_rewards.sum(), true_rewards.sum(), success.sum()]) / args.num_envs
        clip_return, ground_truth_return, success_rate = sums.tolist()
        training_return = ground_truth_return if args.reward == "ground-truth" else clip_return
        if training_return > best_return:
            best_return = training_return if step_before >= args.learning_starts else -math.inf  # random actions do not count
            best = {"script": SCRIPT, "settings": args.to_save(), "global_step": step_before}
            save(args.run_dir / "best.pt", best | {"actor": played.state_dict()})
        elapsed = time.perf_counter() - start
        training_seconds += elapsed
        progress.update(min(global_step, args.total_timesteps) - progress.n)
        progress.set_postfix(clip_return=f"{clip_return:.1f}", success=f"{success_rate:.2f}")
        scalars = {"charts/clip_return": clip_return, "charts/ground_truth_return": ground_truth_return}
        scalars |= {"charts/success_rate": success_rate, "charts/SPS": (global_step - step_before) / elapsed}
        scalars |= {f"seconds_per_round/{phase}": value for phase, value in seconds.items()}
        if learning:
            scalars |= {"losses/qf_loss": qf_loss.item(), "losses/actor_loss": actor_loss.item()}
            scalars |= {"losses/q_values": q_values.mean().item(), "losses/entropy": -log_prob.mean().item()}
        for name, value in scalars.items():
            writer.add_scalar(name, value, global_step)
        if step_before == 0 or step_before < args.total_timesteps / 2 <= global_step:
            first = clip_rewards.view(args.episode_length, args.num_envs)[:, :1]
            sheet = picture(all_obs[1:, :1], first, args)  # the first environment's
            writer.add_image("frames", np.asarray(sheet), global_step, dataformats="HWC")
            sheet.save(args.run_dir / f"frames_{'middle' if step_before else 'start'}.png")
        if step_before // args.checkpoint_every < global_step // args.checkpoint_every and global_step < args.total_timesteps:
            writer.flush()
            save_checkpoint()

    progress.close()
    writer.flush()
    save_checkpoint()
    if stop:
        print(f"stopped at step {global_step}, nothing lost; go on with: python {SCRIPT}.py --resume {args.run_dir}")
        sys.exit(128 + stop[0])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # No round has played the last policy: it takes the place of the best one if it earns more.
    best = torch.load(args.run_dir / "best.pt", map_location=device, weights_only=True)
    last = deepcopy(best | {"actor": actor.state_dict(), "global_step": global_step})
    evaluations = []
    for policy in (best, last):
        actor.load_state_dict(policy["actor"])
        evaluations.append(evaluate(actor, labeller, args))
    criterion = "ground_truth_return" if args.reward == "ground-truth" else "clip_return"
    metrics, states, rewards = max(evaluations, key=lambda evaluation: evaluation[0][criterion])
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
