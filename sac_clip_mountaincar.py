"""MountainCar learned from one sentence: SAC whose only reward is a CLIP model's opinion of the frame.

    python sac_clip_mountaincar.py --prompt "a car at the peak of the mountain, next to the yellow flag"

The method is VLM-RM (Rocamonde et al., ICLR 2024, arXiv 2310.12921), its Algorithm 1 with SAC (Haarnoja et al., 2018). Read from
top to bottom: settings, environment, drawing and labelling, replay buffer, networks and update, and the loop: act, learn, label, report.

A reward for pictures of the goal says little in the valley, where the start is, and a car that rolls there with SAC's own noise,
new at every step, never leaves it. So the exploration noise is correlated in time (an Ornstein-Uhlenbeck process, as in DDPG), in
step with the valley, where a car swings with a period of 2π/√0.0075 = 73 steps: of all such noises the one that forgets as
e^(-√0.0075 t), 0.917 a step, has the most power there, and one random episode in ten reaches the goal. At each step by itself the
noise is the standard normal that SAC wants; nothing else changes. (The paper does not say what it explored with.)
"""

import fcntl
import json
import math
import os
import re
import signal
import sys
import threading
import time
from copy import deepcopy
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of the imports below

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

from clip_reward import CLIPReward, Labeller, UsageError, first_line, native_precision

SCRIPT = Path(__file__).stem


@dataclass
class Args:
    """Teach MountainCar with a sentence: SAC on the reward of a CLIP model. The paper's values are defaults unless said otherwise."""

    prompt: tuple[str, ...] = ("a car at the peak of the mountain, next to the yellow flag",)  # the goal; several are averaged
    baseline_prompt: tuple[str, ...] = ("a car in the mountain",)  # what the scene looks like in general
    goal_baseline_alpha: float = 0.5  # α of the regularization: 0 plain cosine, 1 only what lies along baseline-goal
    negative_prompt: tuple[str, ...] = ()  # a contrastive reward instead: what else might be seen (Baumli et al., 2023)
    temperature: float | None = None  # contrastive: τ of the softmax; None is the model's own
    threshold: float | None = None  # contrastive: β, above which the reward is 1, else 0; None pays the probability itself
    reward: Literal["clip", "ground-truth"] = "clip"  # ground-truth is for reference: 1 per step at the goal
    textures: Literal["realistic", "original"] = "realistic"  # mountains with a red car, or as Gymnasium draws it
    reward_program: str | None = None  # a file, as those in code_reward/programs, that pays instead of the CLIP model
    clip_model: str | None = None  # NAME/TAG, NAME//FILE, hf-hub:ORG/NAME, local-dir:FOLDER or tiny; None: tiny, on CUDA bigG
    clip_batch_size: int = 128  # frames drawn and scored at once
    precision: Literal["fp32", "bf16"] | None = None  # of the CLIP model; None is bf16 where the hardware has it
    ray_workers: int = 0  # more workers that label, on the Ray cluster that RAY_ADDRESS names or on this machine

    seed: int = 1  # of the weights, the start states and the exploration
    device: Literal["cpu", "cuda"] | None = None  # cuda is every GPU in sight; None takes it where there is one
    total_timesteps: int | None = None  # of all environments, in whole rounds; None is 320,000 with tiny, else 3,000,000
    num_envs: int = 16  # environments side by side
    episode_length: int = 200  # steps, as in an example of the paper's code; a round is one episode in every environment
    gradient_steps: int = 200  # updates per round: one for each step of all environments, as in Stable-Baselines3
    learning_starts: int = 3_200  # rounds that begin before this step are random, without learning (paper: 100)
    learning_rate: float = 1e-4  # of Adam, for actor and critics
    buffer_size: int = 1_000_000  # transitions kept, in whole rounds (Stable-Baselines3's default, as in the paper)
    gamma: float = 0.9999  # discount factor
    tau: float = 0.01  # how far the targets move towards the critics at each update: 0 not at all, 1 all the way
    batch_size: int = 256  # transitions per update (Stable-Baselines3's default, as in the paper)
    ent_coef: float = 0.1  # weight of the policy's entropy in its objective, fixed
    noise_correlation: float = 0.917  # of the exploration noise from one step to the next (see the top); 0 is SAC's own

    run_dir: str | None = None  # folder of this run, made anew; None is runs/SCRIPT__SEED__TIME
    checkpoint_every: int = 64_000  # steps between two checkpoints, each evaluated
    episodes: int = 100  # of the final evaluation, or of --evaluate
    resume: str | None = None  # go on with the run in this folder, exactly and with its own settings
    evaluate: str | None = None  # only evaluate this checkpoint (with --episodes, --seed, --device) and make its video
    track: bool = False  # log to Weights & Biases as well (WANDB_PROJECT names the project there)


# ---- Environment

X_MIN, X_MAX, X_GOAL, MAX_SPEED = -1.2, 0.6, 0.45, 0.07  # the ends of the track, where the flag stands, and the speed's limit
STATE_SIZE, ACTION_SIZE = 2, 1  # S and A below; the agent observes the state


class MountainCar:
    """`num_envs` cars with the dynamics of Gymnasium's MountainCarContinuous-v0, which has no vectorized form, in float64.

    A state is (position x, its speed); the bottom of the valley is at x = -π/6, the goal at x ≥ 0.45. As in the paper, no episode
    ends early, because that would tell what the task is, and the goal is absorbing: a car that has reached it stays there.
    """

    def __init__(self, num_envs: int):
        self.num_envs = num_envs

    def reset(self, seed: int) -> tuple[np.ndarray, dict]:
        """Start all episodes anew, at rest near the bottom of the valley -> obs (num_envs, 2) float32, {}."""
        x = np.random.default_rng(seed).uniform(-0.6, -0.4, self.num_envs)
        self.state = np.stack([x, 0 * x], axis=1)
        return self.state.astype(np.float32), {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        """Actions (num_envs, 1), the engine's force in [-1, 1] -> obs, rewards (none), terminations, truncations, infos."""
        x, speed = self.state.T
        speed = speed + 0.0015 * actions[:, 0].clip(-1, 1) - 0.0025 * np.cos(3 * x)
        speed = speed.clip(-MAX_SPEED, MAX_SPEED)
        moved = (x + speed).clip(X_MIN, X_MAX)
        speed = np.where((moved == X_MIN) & (speed < 0), 0, speed)  # the wall on the left
        self.state = np.where(x[:, None] >= X_GOAL, self.state, np.stack([moved, speed], axis=1))
        no = np.zeros(self.num_envs, dtype=bool)  # no state is terminal, the goal neither: the episode goes on
        return self.state.astype(np.float32), no.astype(np.float32), no, no, {}


# ---- Drawing and labelling

SCREEN_WIDTH, SCREEN_HEIGHT = 600, 400  # of Gymnasium's frame, in whose pixels the scene is described
SCALE = SCREEN_WIDTH / (X_MAX - X_MIN)  # these pixels per unit of x and of height
# Parts of the car in its own frame: colour, middle (to the right, up), and half of width and height, or the radius; the original's
# are Gymnasium's plus the half pixel that its polygon filling adds.
CAR = {
    "original": (((0, 0, 0), (0, 10), (20.5, 10.5)), ((128, 128, 128), (-10, 0), 8.5), ((128, 128, 128), (10, 0), 8.5)),
    "realistic": (
        ((214, 32, 28), (-4, 29), (20, 8)), ((176, 222, 244), (-4, 28), (15, 5.5)), ((214, 32, 28), (0, 15), (40, 8)),  # body, glass
        ((24, 24, 26), (-24, 9), 11), ((24, 24, 26), (24, 9), 11), ((196, 200, 206), (-24, 9), 5), ((196, 200, 206), (24, 9), 5),
    ),
}  # fmt: skip


def overlap(position: torch.Tensor, half: float, pixel: torch.Tensor | float) -> torch.Tensor:
    """Share of a pixel, `pixel` wide, that a part covers whose middle is `position` away and whose half width is `half`."""
    return ((position + pixel / 2).clamp(max=half) - (position - pixel / 2).clamp(min=-half)).clamp(min=0) / pixel


def ground(x: torch.Tensor) -> torch.Tensor:
    """Height of the ground at x, in the same units."""
    return 0.45 * (3 * x).sin() + 0.55


def paint_background(textures: str, detail: int = 3) -> Image.Image:
    """What never moves, `detail` times Gymnasium's size: the sky, the mountains and the flag."""
    width, height = SCREEN_WIDTH * detail, SCREEN_HEIGHT * detail

    def at(x: float, y: float, right: float = 0, up: float = 0) -> tuple[float, float]:
        return ((x - X_MIN) * SCALE + right + 0.5) * detail, (SCREEN_HEIGHT - y * SCALE - up - 0.5) * detail

    xs = torch.linspace(X_MIN, X_MAX, 100)
    hills = list(zip(xs.tolist(), ground(xs).tolist()))
    flag = X_MIN + int((X_GOAL - X_MIN) * SCALE) / SCALE, int(ground(torch.tensor(X_GOAL)) * SCALE) / SCALE
    image = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(image)
    if textures == "original":
        pen.line([at(*place) for place in hills], "black", detail)
        pen.line([at(*flag), at(*flag, up=50)], "black", detail)
        pen.polygon([at(*flag, up=50), at(*flag, up=40), at(*flag, 25, 45)], (204, 204, 0))
        return image
    for row in range(height):  # the sky, paler towards the horizon
        pen.line([(0, row), (width, row)], (60 + 130 * row // height, 126 + 94 * row // height, 206 + 40 * row // height))
    for color, low, high in (((128, 148, 184), 0.55, 0.9), ((78, 108, 112), 0.35, 0.65)):  # two ranges far away
        pen.polygon([(0, height), *(at(X_MIN + 0.15 * k, (low, high)[k % 2]) for k in range(13)), (width, height)], color)
    pen.polygon([(0, height), *(at(*place) for place in hills), (width, height)], (92, 80, 72))  # rock ...
    pen.line([at(*place, up=-8) for place in hills], (74, 125, 50), 16 * detail, "curve")  # ... under grass and, above, snow
    pen.line([at(*place, up=-10) for place in hills if place[1] > 0.85], (235, 240, 250), 22 * detail, "curve")
    pen.line([at(*flag, up=-4), at(*flag, up=64)], (60, 50, 40), 3 * detail)
    pen.polygon([at(*flag, *corner) for corner in ((1, 64), (45, 60), (45, 38), (1, 42))], (255, 214, 0))
    return image


class Scene:
    """States -> frames of one size on one device, the scene squashed to that size; the background is painted once."""

    def __init__(self, height: int, width: int, textures: str, device: torch.device):
        self.height, self.width, self.textures, self.device = height, width, textures, device
        background = paint_background(textures).resize((width, height), Image.BOX)
        self.background = torch.from_numpy(np.array(background)).permute(2, 0, 1).to(device)

    def draw(self, states: torch.Tensor) -> torch.Tensor:
        """States (N, 2) -> frames (N, 3, height, width) uint8; only a window around the car, the same size for all, is computed."""
        x = states[:, 0, None, None].float().to(self.device)  # (N, 1, 1)
        sin, cos = (3 * x).cos().sin(), (3 * x).cos().cos()  # it leans as in Gymnasium ...
        y = SCREEN_HEIGHT - SCALE * ground(x) - (10.5 if self.textures == "original" else 0)  # ... whose car hovers
        x = SCALE * (x - X_MIN)  # the car's place, from the upper left corner: x, y
        pixel_x, pixel_y = SCREEN_WIDTH / self.width, SCREEN_HEIGHT / self.height
        columns, rows = min(self.width, int(96 / pixel_x) + 2), min(self.height, int(96 / pixel_y) + 2)  # its radius is 48
        left = (x / pixel_x - columns / 2).round().long().clamp(0, self.width - columns)
        top = (y / pixel_y - rows / 2).round().long().clamp(0, self.height - rows)
        column = left + torch.arange(columns, device=self.device)  # (N, 1, columns)
        row = top + torch.arange(rows, device=self.device)[:, None]  # (N, rows, 1)

        right, up = (column + 0.5) * pixel_x - x, y - (row + 0.5) * pixel_y
        across, along = cos * right + sin * up, cos * up - sin * right  # each pixel in the car's frame (N, rows, columns)
        pixel_across, pixel_along = torch.hypot(cos * pixel_x, sin * pixel_y), torch.hypot(sin * pixel_x, cos * pixel_y)
        window = self.background[:, row, column].float()  # (3, N, rows, columns)
        for color, (middle_across, middle_along), size in CAR[self.textures]:
            dx, dy = across - middle_across, along - middle_along
            if isinstance(size, tuple):
                share = overlap(dx, size[0], pixel_across) * overlap(dy, size[1], pixel_along)
            else:
                share = ((size - torch.hypot(dx, dy)) / math.sqrt(pixel_x * pixel_y) + 0.5).clamp(0, 1)
            for channel, value in zip(window, color):
                channel.lerp_(torch.full_like(channel, value), share)
        frames = self.background.repeat(len(states), 1, 1, 1)
        number = torch.arange(len(states), device=self.device)[:, None, None]
        frames[number, :, row, column] = window.round().to(torch.uint8).permute(1, 2, 3, 0)
        return frames


class Worker:
    """Draws states and scores the frames with CLIP on one device; the `Labeller` has one for each core or GPU."""

    def __init__(self, args: Args, device: torch.device, reward_model: CLIPReward | None = None):
        if args.reward_program and not reward_model:
            from code_reward.program import ProgramReward

            reward_model = ProgramReward(args.reward_program)
        self.reward_model = reward_model or CLIPReward(
            args.clip_model, args.prompt, args.baseline_prompt, args.goal_baseline_alpha, device, args.clip_batch_size,
            precision=args.precision, negative_prompts=args.negative_prompt,
            temperature=args.temperature, threshold=args.threshold
        )  # fmt: skip
        self.scene = Scene(*self.reward_model.size, args.textures, device)

    @torch.no_grad()
    def label(self, states: torch.Tensor) -> torch.Tensor:
        """States (N, S) -> CLIP rewards and true rewards (N, 2), both on the CPU."""
        frames = self.scene.draw(states)  # (N, 3, height, width) uint8, never stored
        rewards = self.reward_model(frames)  # R(s): `CLIPReward.reward` in clip_reward.py
        return torch.stack([rewards.cpu(), ground_truth_reward(states)], dim=1)


# ---- Replay buffer


class ReplayBuffer(nn.Module):
    """The newest rounds, played and labelled, in preallocated tensors (a Module for its `to` and `state_dict`).

    There is no "done": the value of every next state is bootstrapped. An episode only ever ends by its time limit, which is no
    property of the state. (The paper's code treats the last step as terminal, although the agent cannot see the time.) And the
    goal is absorbing but not terminal: a car there goes on earning the goal's reward, which makes it worth R / (1 - γ). As a
    terminal state it would be worth one R, and since R is as a rule positive, driving on for ever would be worth more.
    """

    def __init__(self, args: Args):
        super().__init__()
        steps, num_envs = args.episode_length, args.num_envs
        rounds = math.ceil(min(args.buffer_size, args.total_timesteps) / (steps * num_envs))
        self.register_buffer("states", torch.zeros(rounds, steps + 1, num_envs, STATE_SIZE))  # step t leads from t to t + 1
        self.register_buffer("actions", torch.zeros(rounds, steps, num_envs, ACTION_SIZE))
        self.register_buffer("rewards", torch.zeros(rounds, steps, num_envs))

    def add(self, number: int, states: torch.Tensor, actions: torch.Tensor, rewards: torch.Tensor) -> None:
        """Store round `number` (the first is 0): states (T + 1, num_envs, S), actions (T, num_envs, A), rewards (T, num_envs)."""
        place = number % len(self.rewards)  # once full, over the oldest
        self.states[place], self.actions[place], self.rewards[place] = states, actions, rewards

    def sample(self, batch_size: int, rounds: int) -> tuple[torch.Tensor, ...]:
        """Transitions of the `rounds` so far, uniformly with replacement -> obs, next_obs (N, S), actions (N, A), rewards (N,)."""
        kept, steps, num_envs = self.rewards.shape
        i = torch.randint(min(rounds, kept) * steps * num_envs, (batch_size,), device=self.rewards.device)
        place, t, n = i // (steps * num_envs), i // num_envs % steps, i % num_envs
        return self.states[place, t, n], self.states[place, t + 1, n], self.actions[place, t, n], self.rewards[place, t, n]


# ---- Networks and update


def normalize(obs: torch.Tensor) -> torch.Tensor:
    """Observations (N, S) -> the same with x and speed, whose ranges differ thirteenfold, in [-1, 1]."""
    return torch.stack([(obs[:, 0] - (X_MIN + X_MAX) / 2) / ((X_MAX - X_MIN) / 2), obs[:, 1] / MAX_SPEED], dim=1)


class SoftQNetwork(nn.Sequential):
    """Observations (N, S) and actions (N, A) -> action values (N,)."""

    def __init__(self):
        super().__init__(nn.Linear(STATE_SIZE + ACTION_SIZE, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, obs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.cat([normalize(obs), actions], dim=1)).squeeze(1)


class Actor(nn.Sequential):
    """Observations (N, S) -> mean and log standard deviation (N, A) of a Gaussian; its sample's tanh is the action."""

    def __init__(self):
        super().__init__(nn.Linear(STATE_SIZE, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2 * ACTION_SIZE))

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_std = super().forward(normalize(obs)).split(ACTION_SIZE, dim=1)
        return mean, log_std.clamp(-5, 2)


def squash(mean: torch.Tensor, log_std: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A Gaussian and standard normal noise, (N, 1) each -> its sample's tanh, the actions (N, 1), and their log probabilities (N,)."""
    raw = mean + log_std.exp() * noise
    log_prob = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    log_prob -= 2 * (math.log(2) - raw - F.softplus(-2 * raw))  # log of tanh's slope, 1 - tanh², without underflow
    return raw.tanh(), log_prob.sum(1)


class SAC(nn.Module):
    """All that is learned: actor and critics, and the critics' running means."""

    def __init__(self):
        super().__init__()
        self.policy = Actor()  # what acts
        self.qf1, self.qf2 = SoftQNetwork(), SoftQNetwork()
        self.qf1_target, self.qf2_target = deepcopy(self.qf1), deepcopy(self.qf2)

    def optimizers(self, learning_rate: float) -> dict[str, torch.optim.Adam]:
        groups = {"q": [*self.qf1.parameters(), *self.qf2.parameters()], "actor": [*self.policy.parameters()]}
        return {f"{name}_optimizer": torch.optim.Adam(group, learning_rate, fused=True) for name, group in groups.items()}


def sac_update(sac: SAC, optimizers: dict, batch: tuple, args: Args) -> dict[str, torch.Tensor]:
    """One update by a batch of transitions -> what to log."""
    obs, next_obs, actions, rewards = batch
    with torch.no_grad():  # every next state bootstraps: see ReplayBuffer
        next_actions, next_log_prob = squash(*sac.policy(next_obs), torch.randn_like(actions))
        next_q = torch.min(sac.qf1_target(next_obs, next_actions), sac.qf2_target(next_obs, next_actions))
        td_target = rewards + args.gamma * (next_q - args.ent_coef * next_log_prob)
    q_values = sac.qf1(obs, actions)
    qf_loss = F.mse_loss(q_values, td_target) + F.mse_loss(sac.qf2(obs, actions), td_target)
    optimizers["q_optimizer"].zero_grad()
    qf_loss.backward()
    optimizers["q_optimizer"].step()

    new_actions, log_prob = squash(*sac.policy(obs), torch.randn_like(actions))
    actor_loss = (args.ent_coef * log_prob - torch.min(sac.qf1(obs, new_actions), sac.qf2(obs, new_actions))).mean()
    optimizers["actor_optimizer"].zero_grad()
    actor_loss.backward(inputs=[*sac.policy.parameters()])  # the critics need no gradient of it
    optimizers["actor_optimizer"].step()
    # Polyak averaging, all in one operation: mean <- (1 - τ) mean + τ learned.
    means = [*sac.qf1_target.parameters(), *sac.qf2_target.parameters()]
    get_ema_multi_avg_fn(1 - args.tau)(means, [*sac.qf1.parameters(), *sac.qf2.parameters()], None)
    losses = {"losses/qf_loss": qf_loss.detach(), "losses/q_values": q_values.detach().mean()}
    return losses | {"losses/actor_loss": actor_loss.detach(), "losses/entropy": -log_prob.detach().mean()}


# ---- The loop


@torch.no_grad()
def rollout(policy: Actor | None, noise_scale: float, envs: MountainCar, labeller: Labeller, seed: int, args: Args) -> tuple:
    """An episode in each environment, on the CPU; without a policy at random -> states (T + 1, N, S), actions (T, N, A)."""
    rng = torch.Generator().manual_seed(seed)
    obs, _ = envs.reset(seed=seed)
    states, actions = [torch.from_numpy(obs)], []
    noise = torch.randn(envs.num_envs, ACTION_SIZE, generator=rng)
    for _ in range(args.episode_length):
        fresh = torch.randn(envs.num_envs, ACTION_SIZE, generator=rng)
        # Correlated with the step before, and yet standard normal at each step.
        noise = args.noise_correlation * noise + math.sqrt(1 - args.noise_correlation**2) * fresh
        if policy:
            actions.append(squash(*policy(states[-1]), noise_scale * noise)[0])
        else:
            actions.append(torch.erf(noise / math.sqrt(2)))  # the normal's own distribution function: uniform in [-1, 1]
        obs, _, _, _, _ = envs.step(actions[-1].numpy())
        states.append(torch.from_numpy(obs))
        labeller.add(states[-1])  # the state after each step is labelled by other threads
    return torch.stack(states), torch.stack(actions)


def train(args: Args, checkpoint: dict | None, labeller: Labeller) -> None:
    """The paper's Algorithm 1, a round at a time; all chance comes from seed and round, so that --resume repeats it.

    A round's first three phases go on at the same time; acting and learning begin with what the rounds before have left:

        act    =============          one thread: play round k with a copy of the policy
        learn  =================      this thread: update on rounds 0 to k - 1
        label     ===============     the other threads, then this one, too: draw what has been played, score the frames
        report                   ===  this thread: store round k; curves, checkpoint
    """
    device, envs = torch.device(args.device), MountainCar(args.num_envs)
    torch.manual_seed(args.seed)
    sac, rb = SAC().to(device), ReplayBuffer(args).to(device)
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
        losses = {}
        for _ in range(0 if warmup or number == 0 else args.gradient_steps):
            losses = sac_update(sac, optimizers, rb.sample(args.batch_size, number), args)

        # ---- Label: threads have begun to draw the states and to score the frames with CLIP (`Worker.label`); the rest is done here.
        states, actions = playing.result()
        labels = labeller.result().view(args.episode_length, args.num_envs, 2)  # CLIP rewards and true rewards
        rb.add(number, states, actions, labels[:, :, 1 if args.reward == "ground-truth" else 0])

        # ---- Report. This counts the steps, too, and now and then evaluates and saves a checkpoint.
        run.report(labels, losses)

    run.finish()


# ==== Nothing below belongs to the method: success, evaluation, pictures, files, and checks of the settings.


def ground_truth_reward(states: torch.Tensor) -> torch.Tensor:
    """States (N, 2) -> 1.0 at the goal, else 0.0 (N,), for each step there. (Gymnasium pays 100, once, less a cost of the actions.)"""
    return (states[:, 0] >= X_GOAL).float()


def summary(labels: torch.Tensor) -> dict[str, float]:
    """Labels (T, N, 2) -> means over the N episodes; one succeeds if the car reaches the goal."""
    clip_return, ground_truth_return = labels.sum(0).mean(0).tolist()
    success_rate = labels[:, :, 1].bool().any(0).float().mean().item()
    return {"success_rate": success_rate, "clip_return": clip_return, "ground_truth_return": ground_truth_return}


def pictures(states: torch.Tensor, rewards: torch.Tensor, count: int, args: Args) -> np.ndarray:
    """States (T, N, S), rewards (T, N) -> `count` captioned frames of each episode, evenly over its steps (N, count, H, W, 3)."""
    images, scene = [], Scene(SCREEN_HEIGHT // 4 * 2, SCREEN_WIDTH // 4 * 2, args.textures, torch.device("cpu"))
    for t in tqdm(np.linspace(0, len(states) - 1, count).round().astype(int), "draw pictures", leave=False, disable=None):
        for frame, reward in zip(scene.draw(states[t]).permute(0, 2, 3, 1).numpy(), rewards[t]):
            image = Image.fromarray(np.pad(frame, ((0, 24), (0, 0), (0, 0))))
            text = f"step {t + 1}   CLIP reward {reward:.3f}"
            ImageDraw.Draw(image).text((8, len(frame) + 3), text, "white", ImageFont.load_default(14))
            images.append(np.asarray(image))
    return np.stack(images).reshape(count, states.shape[1], *images[0].shape).swapaxes(0, 1)


def evaluate(policy: nn.Module, episodes: int, labeller: Labeller, args: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """Play without exploration, from start states that no training sees -> states (T, N, S), labels (T, N, 2)."""
    seed = np.random.SeedSequence((args.seed, 2**32, episodes)).generate_state(1).item()
    states, _ = rollout(deepcopy(policy).cpu(), 0.0, MountainCar(episodes), labeller, seed, args)
    return states[1:], labeller.result(f"score {episodes} episodes").view(args.episode_length, episodes, 2)


def write_result(path: str, states: torch.Tensor, labels: torch.Tensor, args: Args) -> None:
    """Print what an evaluation gave, and write path.json, .png (frames of four episodes) and .mp4 (three)."""
    metrics = summary(labels)
    for name, value in metrics.items():
        print(f"{name.replace('_', ' '):>20}  {value:10.3f}")
    versions = {name: metadata.version(name) for name in ("torch", "open_clip_torch")}
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
        earned = values["ground_truth_return" if self.args.reward == "ground-truth" else "clip_return"]
        if earned > self.best_return:
            self.best_return = earned
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
        args.clip_model = "tiny" if args.device == "cpu" or args.reward == "ground-truth" else "ViT-bigG-14/laion2b_s39b_b160k"
    if args.total_timesteps is None:
        args.total_timesteps = 320_000 if args.clip_model == "tiny" or args.reward_program else 3_000_000
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
    prompt += " (measured; the agent learns from the ground truth)" if args.reward == "ground-truth" else ""
    print(f"prompt {prompt}; {args.total_timesteps:,} steps; run folder {args.run_dir}")
    if args.prompt != Args.prompt:
        print("success rate and ground truth are of the car at the flag, whatever the prompt says")
    if not args.evaluate:
        train(args, checkpoint, labeller)
    path = args.evaluate or f"{args.run_dir}/best.pt"
    policy = Actor()
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
