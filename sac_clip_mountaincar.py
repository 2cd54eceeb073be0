"""MountainCar learned from one sentence: SAC whose only reward is a CLIP model's opinion of the frame.

    python sac_clip_mountaincar.py --prompt "a car at the peak of the mountain, next to the yellow flag"

The method is VLM-RM (Rocamonde et al., ICLR 2024, arXiv 2310.12921), its Algorithm 1 with SAC (Haarnoja et
al., 2018). Read from top to bottom; the loop is in `train`, the reward in clip_reward.py.

A reward for pictures of the goal says little in the valley, where the start is, and a car that rolls there
with SAC's own noise, new at every step, never leaves it. So the noise is correlated in time (an
Ornstein-Uhlenbeck process, as in DDPG), in step with the valley, where a car swings with a period of
2π/√0.0075 = 73 steps: of such noises the one that forgets as e^(-√0.0075 t), 0.917 a step, has the most power
there, and one random episode in ten reaches the goal, so that of the 64 with which a run begins some do. At
each step by itself the noise is the standard normal that SAC wants. (The paper does not say what it explored
with.)
"""

import fcntl
import json
import math
import os
import sys
import time
import zipfile
from collections import defaultdict
from copy import deepcopy
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import imageio.v3 as iio
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from PIL import Image, ImageDraw, ImageFont
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from clip_reward import Labeller, RewardArgs, UsageError, make_reward, replayed

SCRIPT = Path(__file__).stem


@dataclass
class Args(RewardArgs):
    """Teach MountainCar with a sentence: SAC on a CLIP model's reward (in brackets: the paper's values)."""

    prompt: tuple[str, ...] = ("a car at the peak of the mountain, next to the yellow flag",)  # the goal
    baseline_prompt: tuple[str, ...] = ("a car in the mountain",)  # what the scene looks like in general
    reward: Literal["clip", "ground-truth"] = "clip"  # ground-truth, for reference: 1 per step at the goal
    textures: Literal["realistic", "original"] = "realistic"  # mountains with a red car, or Gymnasium's
    seed: int = 1  # of weights, start states and exploration
    total_timesteps: int | None = None  # of all environments (default: 64,000 with tiny, else 3,000,000)
    num_envs: int = 16  # environments side by side
    episode_length: int = 200  # steps; a round is one episode in every environment
    gradient_steps: int = 200  # updates per round: one for each step of all, as in Stable-Baselines3
    learning_starts: int = 12_800  # rounds that begin before this step are random, nothing is learned (100)
    learning_rate: float = 3e-4  # of Adam, for actor and critics (1e-4)
    buffer_size: int = 1_000_000  # transitions kept, in whole rounds (Stable-Baselines3's default)
    gamma: float = 0.9999  # discount factor
    n_step: int = 5  # rewards summed before the critics' value stands for the rest (1)
    tau: float = 0.01  # how far the targets follow the critics at each update: 0 not at all, 1 all the way
    batch_size: int = 256  # transitions per update (Stable-Baselines3's default)
    ent_coef: float = 0.1  # weight of the policy's entropy in its objective, fixed
    noise_correlation: float = 0.917  # of the exploration noise from step to step (see the top); 0: SAC's own

    run_dir: str | None = None  # folder of this run, made anew (default: runs/SCRIPT__SEED__TIME)
    # steps between two evaluations; the newest of the best is kept (default: 6,400 with tiny) (64,000)
    evaluate_every: int | None = None
    episodes: int = 100  # of the final evaluation, or of --evaluate
    resume: str | None = None  # go on with the run in this folder; its settings hold, but for those named
    evaluate: str | None = None  # only evaluate this checkpoint, with its settings, but for those named
    track: bool = False  # log to Weights & Biases, too (WANDB_PROJECT names the project)


# ---- Environment

X_MIN, X_MAX = -1.2, 0.6  # the ends of the track
X_GOAL = 0.45  # where the flag stands
MAX_SPEED = 0.07  # a step
STATE_SIZE = 2  # S below; the agent observes the state
ACTION_SIZE = 1  # A below


class MountainCar:
    """`num_envs` cars with the dynamics of Gymnasium's MountainCarContinuous-v0, in float64.

    A state is position x and speed; the bottom of the valley is at x = -π/6, the goal at x ≥ 0.45. As in the
    paper no episode ends early: that would tell the task. The goal is absorbing: a car there stays there.
    """

    def __init__(self, num_envs: int):
        self.num_envs = num_envs

    def reset(self, seed: int) -> tuple[np.ndarray, dict]:
        """Start all episodes anew, at rest near the bottom of the valley -> obs (num_envs, 2) float32, {}."""
        x = np.random.default_rng(seed).uniform(-0.6, -0.4, self.num_envs)
        self.state = np.stack([x, 0 * x], axis=1)
        return self.state.astype(np.float32), {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        """Actions (num_envs, 1) in [-1, 1], the engine's force -> as in Gymnasium, without rewards."""
        x, speed = self.state.T
        speed = speed + 0.0015 * actions[:, 0].clip(-1, 1) - 0.0025 * np.cos(3 * x)
        speed = speed.clip(-MAX_SPEED, MAX_SPEED)
        moved = (x + speed).clip(X_MIN, X_MAX)
        speed = np.where((moved == X_MIN) & (speed < 0), 0, speed)  # the wall on the left
        self.state = np.where(x[:, None] >= X_GOAL, self.state, np.stack([moved, speed], axis=1))
        no = np.zeros(self.num_envs, dtype=bool)  # no state is terminal, the goal neither
        return self.state.astype(np.float32), no.astype(np.float32), no, no, {}


# ---- Rendering and labelling

SCREEN_WIDTH, SCREEN_HEIGHT = 600, 400  # of Gymnasium's frame, in whose pixels the scene is described
SCALE = SCREEN_WIDTH / (X_MAX - X_MIN)  # these pixels per unit of x and of height
# Parts of the car in its own frame: colour, middle (to the right, up), and half of its size, or the
# radius; the original's are Gymnasium's and half a pixel that its polygon filling adds.
CAR = {
    "original": (
        ((0, 0, 0), (0, 10), (20.5, 10.5)),
        ((128, 128, 128), (-10, 0), 8.5),
        ((128, 128, 128), (10, 0), 8.5),
    ),
    "realistic": (
        ((214, 32, 28), (-4, 29), (20, 8)),  # the cabin, its glass, the body; then the wheels
        ((176, 222, 244), (-4, 28), (15, 5.5)),
        ((214, 32, 28), (0, 15), (40, 8)),
        ((24, 24, 26), (-24, 9), 11),
        ((24, 24, 26), (24, 9), 11),
        ((196, 200, 206), (-24, 9), 5),
        ((196, 200, 206), (24, 9), 5),
    ),
}


def overlap(position: torch.Tensor, half: float, pixel: torch.Tensor | float) -> torch.Tensor:
    """Share of a pixel, `pixel` wide, covered by a part of half width `half` that is `position` away."""
    left = (position - pixel / 2).clamp(min=-half)
    right = (position + pixel / 2).clamp(max=half)
    return (right - left).clamp(min=0) / pixel


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
        color = (60 + 130 * row // height, 126 + 94 * row // height, 206 + 40 * row // height)
        pen.line(
            [(0, row), (width, row)],
            color,
        )
    for color, heights in (((128, 148, 184), (0.55, 0.9)), ((78, 108, 112), (0.35, 0.65))):  # ranges far away
        peaks = [at(X_MIN + 0.15 * k, heights[k % 2]) for k in range(13)]
        pen.polygon([(0, height), *peaks, (width, height)], color)
    pen.polygon([(0, height), *(at(*place) for place in hills), (width, height)], (92, 80, 72))  # rock ...
    grass = [at(*place, up=-8) for place in hills]  # ... under grass and, above, snow
    pen.line(grass, (74, 125, 50), 16 * detail, "curve")
    snow = [at(*place, up=-10) for place in hills if place[1] > 0.85]
    pen.line(snow, (235, 240, 250), 22 * detail, "curve")
    pen.line([at(*flag, up=-4), at(*flag, up=64)], (60, 50, 40), 3 * detail)
    pen.polygon([at(*flag, *corner) for corner in ((1, 64), (45, 60), (45, 38), (1, 42))], (255, 214, 0))
    return image


class Scene:
    """States -> frames of one size on one device, squashed to it; the background is painted once."""

    def __init__(self, height: int, width: int, textures: str, device: torch.device):
        self.height = height
        self.width = width
        self.textures = textures
        self.device = device
        background = paint_background(textures).resize((width, height), Image.BOX)
        self.background = torch.from_numpy(np.array(background)).permute(2, 0, 1).to(device)

    def render(self, states: torch.Tensor) -> torch.Tensor:
        """States (N, 2) -> frames (N, 3, height, width) uint8; only a window around each car is computed."""
        x = states[:, 0, None, None].float().to(self.device)  # (N, 1, 1)
        sin = (3 * x).cos().sin()  # it leans as in Gymnasium ...
        cos = (3 * x).cos().cos()
        hover = 10.5 if self.textures == "original" else 0  # ... whose car hovers
        y = SCREEN_HEIGHT - SCALE * ground(x) - hover
        x = SCALE * (x - X_MIN)  # the car's place, from the upper left corner: x, y
        pixel_x = SCREEN_WIDTH / self.width
        pixel_y = SCREEN_HEIGHT / self.height
        columns = min(self.width, int(96 / pixel_x) + 2)  # the car's radius is 48
        rows = min(self.height, int(96 / pixel_y) + 2)
        left = (x / pixel_x - columns / 2).round().long().clamp(0, self.width - columns)
        top = (y / pixel_y - rows / 2).round().long().clamp(0, self.height - rows)
        column = left + torch.arange(columns, device=self.device)  # (N, 1, columns)
        row = top + torch.arange(rows, device=self.device)[:, None]  # (N, rows, 1)

        right = (column + 0.5) * pixel_x - x
        up = y - (row + 0.5) * pixel_y
        across = cos * right + sin * up  # each pixel in the car's frame (N, rows, columns)
        along = cos * up - sin * right
        pixel_across = torch.hypot(cos * pixel_x, sin * pixel_y)
        pixel_along = torch.hypot(sin * pixel_x, cos * pixel_y)
        window = self.background[:, row, column].float()  # (3, N, rows, columns)
        for color, (middle_across, middle_along), size in CAR[self.textures]:
            dx = across - middle_across
            dy = along - middle_along
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
    """Renders states and rewards the frames on one device; the `Labeller` has one for each core or GPU."""

    def __init__(self, args: Args, device: torch.device, reward_model: nn.Module | None = None):
        self.reward_model = reward_model or make_reward(args, device)  # a CPU's workers share one
        self.scene = Scene(*self.reward_model.size, args.textures, device)

    @torch.no_grad()
    def label(self, states: torch.Tensor) -> torch.Tensor:
        """States (N, S) -> rewards and ground-truth rewards (N, 2), on the CPU."""
        frames = self.scene.render(states)  # (N, 3, height, width) uint8, never stored
        rewards = self.reward_model(frames)  # R(s): `CLIPReward.reward` in clip_reward.py
        return torch.stack([rewards.cpu(), ground_truth_reward(states)], dim=1)


# ---- Replay buffer


class ReplayBuffer:
    """The newest rounds, played and rewarded, in preallocated tensors on the learner's device.

    There is no "done": every next state's value is bootstrapped. An episode ends by its time limit alone, no
    property of the state. (The paper's code makes the last step terminal; the agent cannot see the time.)
    The goal is absorbing but not terminal: a car there goes on earning its reward R, R / (1 - γ) in all. As a
    terminal state it would be worth one R, and since R is as a rule positive, driving on for ever more.
    """

    def __init__(self, args: Args, device: torch.device):
        steps, num_envs = args.episode_length, args.num_envs
        self.capacity = math.ceil(min(args.buffer_size, args.total_timesteps) / (steps * num_envs))  # rounds
        shape = (self.capacity, steps, num_envs)
        self.states = torch.zeros(self.capacity, steps + 1, num_envs, STATE_SIZE, device=device)
        self.actions = torch.zeros(*shape, ACTION_SIZE, device=device)
        self.rewards = torch.zeros(shape, device=device)
        self.rounds = 0  # taken in so far

    def add(self, states: torch.Tensor, actions: torch.Tensor, rewards: torch.Tensor) -> None:
        """Take in a round: states (T + 1, N, S), actions (T, N, A), rewards (T, N), over the oldest."""
        i = self.rounds % self.capacity
        self.states[i] = states
        self.actions[i] = actions
        self.rewards[i] = rewards
        self.rounds += 1

    def sample(self, batch_size: int, n_step: int) -> tuple[torch.Tensor, ...]:
        """Uniformly -> obs (B, S), those n_step later, actions (B, A), rewards between (n_step, B)."""
        _, steps, num_envs = self.rewards.shape
        starts = steps - n_step + 1  # nothing reaches beyond the end of an episode
        size = min(self.rounds, self.capacity) * starts * num_envs
        k = torch.randint(size, (batch_size,), device=self.rewards.device)
        i, t, n = k // (starts * num_envs), k // num_envs % starts, k % num_envs
        rewards = torch.stack([self.rewards[i, t + j, n] for j in range(n_step)])
        return self.states[i, t, n], self.states[i, t + n_step, n], self.actions[i, t, n], rewards


# ---- Networks and update


def normalize(obs: torch.Tensor) -> torch.Tensor:
    """Observations (N, S) -> the same with x and speed, whose ranges differ thirteenfold, in [-1, 1]."""
    x = (obs[:, 0] - (X_MIN + X_MAX) / 2) / ((X_MAX - X_MIN) / 2)
    return torch.stack([x, obs[:, 1] / MAX_SPEED], dim=1)


class SoftQNetwork(nn.Sequential):
    """Observations (N, S) and actions (N, A) -> action values (N,)."""

    def __init__(self):
        super().__init__(
            nn.Linear(STATE_SIZE + ACTION_SIZE, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, obs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.cat([normalize(obs), actions], dim=1)).squeeze(1)


class Critics(nn.ModuleList):
    """Two critics, asked at once: observations and actions -> action values (2, N)."""

    def forward(self, obs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        return torch.stack([critic(obs, actions) for critic in self])


class Actor(nn.Sequential):
    """Observations (N, S) -> mean and log σ (N, A) of a Gaussian; actions are its samples' tanh."""

    def __init__(self):
        super().__init__(
            nn.Linear(STATE_SIZE, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(),
            nn.Linear(64, 2 * ACTION_SIZE)
        )  # fmt: skip

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_std = super().forward(normalize(obs)).split(ACTION_SIZE, dim=1)
        return mean, log_std.clamp(-5, 2)


def squash(mean: torch.Tensor, log_std: torch.Tensor, noise: torch.Tensor) -> tuple:
    """A Gaussian and standard normal noise, (N, A) each -> tanh of its sample, with log probability (N,)."""
    raw = mean + log_std.exp() * noise
    log_prob = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    log_prob -= 2 * (math.log(2) - raw - F.softplus(-2 * raw))  # log of tanh's slope, without underflow
    return raw.tanh(), log_prob.sum(1)


class SAC(nn.Module):
    """All that is learned: actor and critics, and the critics' running means."""

    def __init__(self):
        super().__init__()
        self.policy = Actor()  # what acts
        self.critics = Critics(SoftQNetwork() for _ in range(2))
        self.target_critics = deepcopy(self.critics)

    def optimizers(self, learning_rate: float) -> dict[str, torch.optim.Adam]:
        groups = {"q_optimizer": self.critics.parameters(), "actor_optimizer": self.policy.parameters()}
        return {name: torch.optim.Adam(group, learning_rate, fused=True) for name, group in groups.items()}


def sac_update(sac: SAC, optimizers: dict, batch: tuple, args: Args) -> dict:
    """One update by a batch of transitions -> what to log."""
    obs, next_obs, actions, rewards = batch
    n_step_return = sum(args.gamma**k * reward for k, reward in enumerate(rewards))
    with torch.no_grad():  # every last state bootstraps: see ReplayBuffer; steps before it earn no entropy
        next_actions, next_log_prob = squash(*sac.policy(next_obs), torch.randn_like(actions))
        next_q = torch.min(*sac.target_critics(next_obs, next_actions))
        td_target = n_step_return + args.gamma**args.n_step * (next_q - args.ent_coef * next_log_prob)
    q_values = sac.critics(obs, actions)
    qf_loss = (q_values - td_target).square().mean(dim=1).sum()
    optimizers["q_optimizer"].zero_grad()
    qf_loss.backward()
    optimizers["q_optimizer"].step()

    new_actions, log_prob = squash(*sac.policy(obs), torch.randn_like(actions))
    new_q = torch.min(*sac.critics(obs, new_actions))
    actor_loss = (args.ent_coef * log_prob - new_q).mean()
    optimizers["actor_optimizer"].zero_grad()
    actor_loss.backward(inputs=[*sac.policy.parameters()])  # the critics need no gradient of it
    optimizers["actor_optimizer"].step()

    with torch.no_grad():  # target <- (1 - τ) target + τ learned
        for target, learned in zip(sac.target_critics.parameters(), sac.critics.parameters()):
            target.lerp_(learned, args.tau)
    losses = {
        "qf_loss": qf_loss,
        "q_values": q_values.mean(),
        "actor_loss": actor_loss,
        "entropy": -log_prob.mean(),
    }
    return {name: value.detach() for name, value in losses.items()}


# ---- The loop


@torch.no_grad()
def rollout(
    policy: Actor | None, noise_scale: float, envs: MountainCar, labeller: Labeller, seed: int, args: Args
) -> tuple:
    """An episode in each environment, on the CPU; without a policy at random.

    -> states (T + 1, N, S), actions (T, N, A)
    """
    rng = torch.Generator().manual_seed(seed)
    obs, _ = envs.reset(seed=seed)
    states = [torch.from_numpy(obs)]
    actions = []
    noise = torch.randn(envs.num_envs, ACTION_SIZE, generator=rng)
    for _ in range(args.episode_length):
        fresh = torch.randn(envs.num_envs, ACTION_SIZE, generator=rng)
        # Correlated with the step before, and yet standard normal at each step.
        noise = args.noise_correlation * noise + math.sqrt(1 - args.noise_correlation**2) * fresh
        if policy:
            action, _ = squash(*policy(states[-1]), noise_scale * noise)
        else:
            action = torch.erf(noise / math.sqrt(2))  # the normal's distribution: uniform in [-1, 1]
        actions.append(action)
        obs, _, _, _, _ = envs.step(action.numpy())
        states.append(torch.from_numpy(obs))
        labeller.add(states[-1])  # the state after each step: other threads reward it
    return torch.stack(states), torch.stack(actions)


def train(args: Args, labeller: Labeller) -> None:
    """The paper's Algorithm 1, by rounds; all chance comes from seed and round, so that --resume repeats it.

    A round's first three phases go on at once; acting and learning begin with what the rounds before left:

        act    =============          one thread: play round k with a copy of the policy
        learn  =================      this thread: update on rounds 0 to k - 1
        label     ===============     other threads, then this one, too: render what was played, reward it
        report                   ===  this thread: store round k; curves, evaluation, checkpoint
    """
    device = labeller.device  # the first GPU, by its number
    envs = MountainCar(args.num_envs)
    torch.manual_seed(args.seed)
    sac = SAC().to(device)
    optimizers = sac.optimizers(args.learning_rate)
    rb = ReplayBuffer(args, device)
    parts = {"policy": sac.policy, "sac": sac, **optimizers}  # of a checkpoint
    global_step, best_return, _lock = open_run(args, labeller, rb, parts)  # locked as long as _lock lives

    def update() -> dict:
        return sac_update(sac, optimizers, rb.sample(args.batch_size, args.n_step), args)

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
        for optimizer in optimizers.values():
            # After --resume the rate is perhaps another one.
            optimizer.param_groups[0] |= {"lr": args.learning_rate, "capturable": True}
        losses = defaultdict(list)
        if rb.rounds > 0 and not warmup:
            fast_update = replayed(update, device)  # anew: there is more to sample
            for _ in range(args.gradient_steps):
                for name, loss in fast_update().items():
                    losses[name].append(loss)

        # ---- Label: threads have begun to render states and to reward the frames (`Worker.label`).
        states, actions = playing.result()
        labels = labeller.result().view(args.episode_length, args.num_envs, 2)
        clip_rewards, ground_truth_rewards = labels.unbind(dim=2)
        rewards = ground_truth_rewards if args.reward == "ground-truth" else clip_rewards

        # ---- Report: store the round; curves, now and then an evaluation, a checkpoint.
        rb.add(states, actions, rewards)
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
            if clip_rewards.min() == clip_rewards.max() and not sparse:
                raise UsageError("the reward is the same in all states: try another prompt")
        passed = global_step % args.evaluate_every < rewards.numel()  # a multiple of it
        if passed or global_step >= args.total_timesteps:
            states, labels = evaluate(sac.policy, args.num_envs, labeller, args)
            means = summary(labels)
            tqdm.write(f"step {global_step:,} of {args.total_timesteps:,}: {in_words(means)}")
            scalars |= {f"evaluation/{name}": value for name, value in means.items()}
            frames = pictures(states[:, :1], labels[:, :1, 0], 8, args)[:, 0]
            writer.add_images("frames", frames, global_step, dataformats="NHWC")
            earned = means["ground_truth_return" if args.reward == "ground-truth" else "clip_return"]
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


def ground_truth_reward(states: torch.Tensor) -> torch.Tensor:
    """States (N, 2) -> 1.0 at the goal, else 0.0 (N,). (Gymnasium's: 100, once, less the actions' cost.)"""
    return (states[:, 0] >= X_GOAL).float()


def summary(labels: torch.Tensor) -> dict[str, float]:
    """Labels (T, N, 2) -> means over the N episodes; one succeeds if the car reaches the goal."""
    success = labels[:, :, 1].bool().any(0).float().mean().item()
    clip, truth = labels.sum(0).mean(0).tolist()
    return {"success_rate": success, "clip_return": clip, "ground_truth_return": truth}


def in_words(means: dict[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in means.items())


def evaluate(policy: nn.Module, episodes: int, labeller: Labeller, args: Args) -> tuple:
    """Play without exploration, from starts of its own -> states (T, N, S), labels (T, N, 2)."""
    seed = np.random.SeedSequence((args.seed, 2**32, episodes)).generate_state(1).item()
    states, _ = rollout(deepcopy(policy).cpu(), 0.0, MountainCar(episodes), labeller, seed, args)
    return states[1:], labeller.result(show="evaluate").view(args.episode_length, episodes, -1)


def pictures(states: torch.Tensor, rewards: torch.Tensor, count: int, args: Args) -> np.ndarray:
    """States (T, N, S), rewards (T, N) -> captioned frames of `count` steps (count, N, H, W, 3)."""
    scene = Scene(SCREEN_HEIGHT // 2, SCREEN_WIDTH // 2, args.textures, torch.device("cpu"))
    images = []
    steps = np.linspace(0, len(states) - 1, count).round().astype(int)
    for t in tqdm(steps, "render pictures", leave=False, disable=None):
        frames = scene.render(states[t])
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
    result["versions"] = {name: metadata.version(name) for name in ("torch", "open_clip_torch")}
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
    if args.clip_model is None and args.reward == "ground-truth":
        args.clip_model = "tiny"
    args.complete()
    small = args.clip_model.endswith(("tiny", ".py"))
    args.total_timesteps = args.total_timesteps or (64_000 if small else 3_000_000)
    args.evaluate_every = args.evaluate_every or (6_400 if small else 64_000)
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
    if args.prompt != Args.prompt:
        print("success rate and ground truth are of the car at the flag, whatever the prompt says")
    labeller = Labeller(Worker, args)
    if args.evaluate is None:
        print(f"{args.total_timesteps:,} steps; run folder {args.run_dir}")
        train(args, labeller)
    else:
        policy = Actor()
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
