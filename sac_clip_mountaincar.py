"""MountainCar learned from one sentence: SAC whose only reward is a CLIP model's opinion of the frame.

    python sac_clip_mountaincar.py --prompt "a car at the peak of the mountain, next to the yellow flag"

VLM-RM (Rocamonde et al., ICLR 2024, arXiv 2310.12921), its Algorithm 1 with SAC (Haarnoja et al., 2018). Read
it from top to bottom; the loop is in `train`, the reward in clip_reward.py.

Rewards for pictures of the goal say little in the valley, where the start is, and SAC's noise, new at every
step, never leaves it. So the noise is correlated in time (an Ornstein-Uhlenbeck process, as in DDPG), in step
with the valley, where a car swings with a period of 2π/√0.0075 = 73 steps: noise that forgets as
e^(-√0.0075 t), 0.917 a step, has the most power there, and takes one random episode in ten to the goal. At
each step by itself it is the standard normal that SAC wants.
"""

import io
import json
import math
import os
import sys
import time
from collections import defaultdict, deque
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import imageio.v3 as iio
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from PIL import Image, ImageDraw
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm, trange

from clip_reward import Labeller, RewardArgs, UsageError, make_reward


@dataclass
class Args(RewardArgs):
    """Teach MountainCar with a sentence: SAC on a CLIP model's reward (in brackets: the paper's values)."""

    prompt: tuple[str, ...] = ("a car at the peak of the mountain, next to the yellow flag",)  # the goal
    baseline_prompt: tuple[str, ...] = ("a car in the mountain",)  # the scene in general
    reward: Literal["clip", "ground-truth"] = "clip"  # ground truth: 1 at the goal
    textures: Literal["realistic", "original"] = "realistic"  # mountains and a red car, or Gymnasium's
    seed: int = 1  # of weights, start states and exploration
    total_timesteps: int = 64_000  # of all environments (3,000,000)
    num_envs: int = 16  # side by side
    episode_length: int = 200  # steps; a round is one episode in every environment
    gradient_steps: int = 200  # updates a round
    learning_starts: int = 12_800  # steps; rounds that begin before are random (100)
    learning_rate: float = 3e-4  # of Adam (1e-4)
    buffer_size: int = 1_000_000  # transitions kept, in whole rounds
    gamma: float = 0.9999  # discount factor
    n_step: int = 5  # rewards before the critics' value stands for the rest (1)
    tau: float = 0.01  # how far the targets follow the critics at each update
    batch_size: int = 256  # transitions per update
    ent_coef: float = 0.1  # weight of the policy's entropy, fixed
    noise_correlation: float = 0.917  # of the exploration noise, from step to step (0)

    run_dir: str | None = None  # made anew (runs/SCRIPT__SEED__TIME)
    evaluate_every: int = 6_400  # steps between evaluations, which choose the best policy (64,000)
    episodes: int = 100  # of the final evaluation, or of --evaluate
    resume: str | None = None  # go on with the run in this folder, by its settings
    evaluate: str | None = None  # only evaluate this checkpoint, by its settings but for those named


# ---- Environment

X_MIN, X_MAX = -1.2, 0.6  # the ends of the track
X_GOAL = 0.45  # where the flag stands
MAX_SPEED = 0.07  # a step


class MountainCar:
    """`num_envs` cars with the dynamics of Gymnasium's MountainCarContinuous-v0, in float64.

    A state, which the agent observes: position x and speed; the valley's bottom is at -π/6, the goal at 0.45.
    As in the paper no episode ends early: that would tell the task. A car at the goal stays there.
    """

    def __init__(self, num_envs: int):
        self.num_envs = num_envs

    def reset(self, seed: int) -> np.ndarray:
        """Start all episodes anew, at rest near the bottom of the valley -> states (num_envs, 2) float32."""
        x = np.random.default_rng(seed).uniform(-0.6, -0.4, self.num_envs)
        self.state = np.stack([x, 0 * x], axis=1)
        return self.state.astype(np.float32)

    def step(self, actions: np.ndarray) -> np.ndarray:
        """Actions (num_envs, 1) in [-1, 1], the engine's force -> the states after them, float32."""
        x, speed = self.state.T
        speed = speed + 0.0015 * actions[:, 0].clip(-1, 1) - 0.0025 * np.cos(3 * x)
        speed = speed.clip(-MAX_SPEED, MAX_SPEED)
        moved = (x + speed).clip(X_MIN, X_MAX)
        speed = np.where((moved == X_MIN) & (speed < 0), 0, speed)  # the wall on the left
        self.state = np.where(x[:, None] >= X_GOAL, self.state, np.stack([moved, speed], axis=1))
        return self.state.astype(np.float32)


class Worker:
    """Renders and rewards states on one device; the `Labeller` has one for each core or GPU."""

    def __init__(self, args: Args, device: torch.device, reward_model: nn.Module | None = None):
        self.reward_model = reward_model or make_reward(args, device)  # a CPU's workers share one
        self.scene = Scene(*self.reward_model.size, args.textures, device)

    @torch.no_grad()
    def label(self, states: torch.Tensor) -> torch.Tensor:
        """States (N, 2) -> rewards and ground-truth rewards (N, 2), on the CPU."""
        frames = self.scene.render(states)  # (N, 3, height, width) uint8, drawn and never stored
        rewards = self.reward_model(frames)  # R(s): `CLIPReward.reward` in clip_reward.py
        return torch.stack([rewards.cpu(), ground_truth_reward(states)], dim=1)


# ---- Networks, replay and update


def normalize(obs: torch.Tensor) -> torch.Tensor:
    """Observations (N, 2) -> the same, each in [-1, 1]."""
    x = (obs[:, 0] - (X_MIN + X_MAX) / 2) / ((X_MAX - X_MIN) / 2)
    return torch.stack([x, obs[:, 1] / MAX_SPEED], dim=1)


class SoftQNetwork(nn.Sequential):
    """Observations (N, 2) and actions (N, 1) -> action values (N,)."""

    def __init__(self):
        super().__init__(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, obs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.cat([normalize(obs), actions], dim=1)).squeeze(1)


class Critics(nn.ModuleList):
    """Two critics, asked at once: observations and actions -> action values (2, N)."""

    def forward(self, obs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        return torch.stack([critic(obs, actions) for critic in self])


class Actor(nn.Sequential):
    """Observations (N, 2) -> mean and log σ (N, 1) of a Gaussian; actions are its samples' tanh."""

    def __init__(self):
        super().__init__(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_std = super().forward(normalize(obs)).split(1, dim=1)
        return mean, log_std.clamp(-5, 2)


def squash(mean: torch.Tensor, log_std: torch.Tensor, noise: torch.Tensor) -> tuple:
    """A Gaussian and standard normal noise (N, 1) -> tanh of its sample, and log probability (N,)."""
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


def sample(buffer: tuple, args: Args) -> tuple:
    """Uniformly -> obs (B, 2), those n steps later, actions (B, 1), n-step returns (B,), γⁿ.

    There is no "done": every next state's value is bootstrapped. An episode ends by its time limit alone, no
    property of the state. (The paper's code makes the last step terminal; the agent cannot see the time.)
    The goal is absorbing but not terminal: it goes on earning R, R / (1 - γ) in all. As a terminal state it
    would be worth one R, and since R is as a rule positive, driving on for ever more.
    """
    states, actions, rewards = buffer  # (rounds, T + 1, N, 2), (rounds, T, N, 1), (rounds, T, N)
    rounds, steps, num_envs = rewards.shape
    starts = steps - args.n_step + 1  # nothing reaches beyond the end of an episode
    k = torch.randint(rounds * starts * num_envs, (args.batch_size,), device=rewards.device)
    i, t, n = k // (starts * num_envs), k // num_envs % starts, k % num_envs
    returns = sum(args.gamma**j * rewards[i, t + j, n] for j in range(args.n_step))  # of the states after
    return states[i, t, n], states[i, t + args.n_step, n], actions[i, t, n], returns, args.gamma**args.n_step


def sac_update(sac: SAC, optimizers: dict, batch: tuple, args: Args) -> dict:
    """One update by a batch of transitions -> what to log."""
    obs, next_obs, actions, n_step_return, discount = batch
    with torch.no_grad():  # every last state bootstraps: see `sample`; steps before it earn no entropy
        next_actions, next_log_prob = squash(*sac.policy(next_obs), torch.randn_like(actions))
        next_q = torch.min(*sac.target_critics(next_obs, next_actions))
        td_target = n_step_return + discount * (next_q - args.ent_coef * next_log_prob)
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
    losses = {"qf_loss": qf_loss, "q_values": q_values.mean()}
    losses |= {"actor_loss": actor_loss, "entropy": -log_prob.mean()}
    return {name: value.detach() for name, value in losses.items()}


# ---- The loop


@torch.no_grad()
def rollout(
    policy: Actor | None, noise_scale: float, envs: MountainCar, labeller: Labeller, seed: int, args: Args
) -> tuple:
    """An episode of a policy, or at random, on the CPU -> states (T + 1, N, 2), actions (T, N, 1)."""
    rng = torch.Generator().manual_seed(seed)
    states = [torch.from_numpy(envs.reset(seed))]
    actions = []
    noise = torch.randn(envs.num_envs, 1, generator=rng)
    for _ in range(args.episode_length):
        fresh = torch.randn(envs.num_envs, 1, generator=rng)
        noise = args.noise_correlation * noise + math.sqrt(1 - args.noise_correlation**2) * fresh
        if policy:
            action, _ = squash(*policy(states[-1]), noise_scale * noise)
        else:
            action = torch.erf(noise / math.sqrt(2))  # the normal's distribution: uniform in [-1, 1]
        actions.append(action)
        states.append(torch.from_numpy(envs.step(action.numpy())))
        labeller.add(states[-1])  # the state after each step, for other threads to reward
    return torch.stack(states), torch.stack(actions)


def train(args: Args, labeller: Labeller) -> None:
    """The paper's Algorithm 1, by rounds; all chance comes from seed and round, so that --resume repeats it.

    A round's first three phases go on at once; acting and learning begin with what the rounds before left:

        act    =============          one thread: play round k with a copy of the policy
        learn  =================      this thread: update on rounds 0 to k - 1
        label     ===============     other threads, then this one, too: render and reward round k
        report                   ===  this thread: store round k; curves, evaluation, checkpoint
    """
    device = labeller.device
    envs = MountainCar(args.num_envs)
    torch.manual_seed(args.seed)
    sac = SAC().to(device)
    optimizers = sac.optimizers(args.learning_rate)
    a_round = args.num_envs * args.episode_length  # steps
    last_round = math.ceil(args.total_timesteps / a_round) - 1
    rounds = deque(maxlen=math.ceil(args.buffer_size / a_round))  # the newest; older ones drop out
    parts = {"policy": sac.policy, "sac": sac, **optimizers}  # of a checkpoint
    global_step, best_return = open_run(args, labeller, rounds, parts)

    def checkpoint(name: str) -> None:  # with the rounds all that the rest depends on
        content = {name: part.state_dict() for name, part in parts.items()}
        about = {"script": Path(__file__).stem, "settings": asdict(args)}
        save(f"{args.run_dir}/{name}", step=global_step, best_return=best_return, **about, **content)

    checkpoint("checkpoint.pt")
    writer = SummaryWriter(args.run_dir, purge_step=global_step + 1)  # drops what a kill left
    for k in trange(global_step // a_round, last_round + 1, unit="round", disable=None):
        started = time.perf_counter()
        warmup = global_step < args.learning_starts
        play_seed, learn_seed = np.random.SeedSequence((args.seed, k)).generate_state(2).tolist()

        # ---- Act, in a thread, with the policy as it is now.
        policy = None if warmup else deepcopy(sac.policy).cpu()
        playing = labeller.pool.submit(rollout, policy, 1.0, envs, labeller, play_seed, args)

        # ---- Learn, at the same time: SAC on the rounds before (the first has none).
        torch.manual_seed(learn_seed)
        for optimizer in optimizers.values():
            optimizer.param_groups[0] |= {"lr": args.learning_rate, "capturable": True}
        losses = defaultdict(list)
        if rounds and not warmup:
            buffer = tuple(map(torch.stack, zip(*rounds)))  # states, actions, rewards

            def update() -> dict:
                return sac_update(sac, optimizers, sample(buffer, args), args)

            if device.type == "cuda":
                from scale.cuda_graphs import replayed

                update = replayed(update, device)  # a CUDA graph
            for _ in range(args.gradient_steps):
                for name, loss in update().items():
                    losses[name].append(loss)

        # ---- Label: threads have begun to render states and to reward the frames (`Worker.label`).
        states, actions = playing.result()
        labels = labeller.result().view(args.episode_length, args.num_envs, 2)
        clip_rewards, ground_truth_rewards = labels.unbind(dim=2)
        rewards = ground_truth_rewards if args.reward == "ground-truth" else clip_rewards

        # ---- Report: store the round; curves, now and then an evaluation, a checkpoint.
        rounds.append([part.to(device) for part in (states, actions, rewards)])
        save(f"{args.run_dir}/rounds/{k}.pt", round=(states, actions, rewards))
        global_step += a_round
        scalars = {f"charts/{name}": value for name, value in summary(labels).items()}
        scalars |= {f"losses/{name}": torch.stack(values).mean().item() for name, values in losses.items()}
        scalars["charts/SPS"] = a_round / (time.perf_counter() - started)
        if not all(map(math.isfinite, scalars.values())):
            raise UsageError("losses are not finite: --resume with a lower --learning-rate")
        if global_step % args.evaluate_every < a_round or k == last_round:  # it passed a multiple
            _, evaluated = evaluate(sac.policy, args.num_envs, CHOOSE, labeller, args)
            means = summary(evaluated)
            tqdm.write(f"step {global_step:,} of {args.total_timesteps:,}: {in_words(means)}")
            scalars |= {f"evaluation/{name}": value for name, value in means.items()}
            earned = means["ground_truth_return" if args.reward == "ground-truth" else "clip_return"]
            best_return = max(best_return, earned)
            if earned >= best_return - 0.001 * abs(best_return):  # within 0.1 % the newest
                checkpoint("best.pt")
        for name, value in scalars.items():
            writer.add_scalar(name, value, global_step)
        writer.flush()
        checkpoint("checkpoint.pt")
        Path(f"{args.run_dir}/rounds/{k - rounds.maxlen}.pt").unlink(missing_ok=True)

    writer.close()
    load(f"{args.run_dir}/best.pt", Args, policy=sac.policy)
    write_result(f"{args.run_dir}/result", sac.policy, labeller, args)


# ==== Nothing below belongs to the method: success, rendering, evaluation, files, and the command line.


def ground_truth_reward(states: torch.Tensor) -> torch.Tensor:
    """States (N, 2) -> 1.0 at the goal, else 0.0 (N,)."""
    return (states[:, 0] >= X_GOAL).float()


def summary(labels: torch.Tensor) -> dict[str, float]:
    """Labels (T, N, 2) -> means over N episodes; one succeeds if it reaches the goal."""
    success = labels[:, :, 1].bool().any(0).float().mean().item()
    clip, truth = labels.sum(0).mean(0).tolist()
    return {"success_rate": success, "clip_return": clip, "ground_truth_return": truth}


def in_words(means: dict[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in means.items())


CHOOSE = 2**32  # of the seeds for choosing and reporting: no round's number
REPORT = 2**32 + 1


def evaluate(policy: nn.Module, episodes: int, purpose: int, labeller: Labeller, args: Args) -> tuple:
    """Play without exploration -> states (T, N, 2), labels (T, N, 2)."""
    seed = np.random.SeedSequence((args.seed, purpose, episodes)).generate_state(1).item()
    states, _ = rollout(deepcopy(policy).cpu(), 0.0, MountainCar(episodes), labeller, seed, args)
    return states[1:], labeller.result().view(args.episode_length, episodes, -1)


SCREEN_WIDTH, SCREEN_HEIGHT = 600, 400  # of Gymnasium's frame, in whose pixels the scene is described
SCALE = SCREEN_WIDTH / (X_MAX - X_MIN)  # these pixels per unit of x and of height
# Parts of the car in its own frame: colour, middle (to the right, up), half of the size, or the radius. The
# original's are Gymnasium's and half a pixel that its polygon filling adds.
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
    """What never moves, `detail` times Gymnasium's size."""
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
        pen.line([(0, row), (width, row)], color)
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
    """States -> frames of one size on one device; the background is painted once."""

    def __init__(self, height: int, width: int, textures: str, device: torch.device):
        self.height = height
        self.width = width
        self.textures = textures
        self.device = device
        background = paint_background(textures).resize((width, height), Image.BOX)
        self.background = torch.from_numpy(np.array(background)).permute(2, 0, 1).to(device)

    def render(self, states: torch.Tensor) -> torch.Tensor:
        """States (N, 2) -> frames (N, 3, height, width) uint8; only a window around a car is computed."""
        x = states[:, 0, None, None].float().to(self.device)  # (N, 1, 1)
        sin = (3 * x).cos().sin()  # it leans ...
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


def write_result(path: str, policy: nn.Module, labeller: Labeller, args: Args) -> None:
    """Evaluate; write path.json, and path.mp4 with three episodes and their rewards."""
    states, labels = evaluate(policy, args.episodes, REPORT, labeller, args)
    result = summary(labels)
    print(f"{args.episodes} episodes: {in_words(result)}; {path}.json, .mp4")
    Path(f"{path}.json").write_text(json.dumps(result | {"settings": asdict(args)}, indent=2))
    film = iio.imopen(f"{path}.mp4", "w", plugin="pyav")
    film.init_video_stream("libx264", fps=30)
    scene = Scene(SCREEN_HEIGHT // 2, SCREEN_WIDTH // 2, args.textures, torch.device("cpu"))
    for n in range(min(3, args.episodes)):
        for t in range(args.episode_length):
            frame = scene.render(states[t, n : n + 1])[0]
            image = Image.fromarray(frame.permute(1, 2, 0).numpy())
            image = image.crop((0, 0, image.width // 2 * 2, image.height // 2 * 2 + 24))  # even, and a strip
            text = f"step {t + 1}   reward {labels[t, n, 0]:.3f}"
            ImageDraw.Draw(image).text((8, image.height - 21), text, "white", font_size=14)
            film.write_frame(np.asarray(image))
    film.close()


def save(path: str, **content) -> None:
    """Write a file whole or not at all: a kill at any moment leaves the old one."""
    buffer = io.BytesIO()  # so that a full disk is an OSError
    torch.save(content, buffer)
    Path(f"{path}.tmp").write_bytes(buffer.getbuffer())
    os.replace(f"{path}.tmp", path)


def load(path: str, Args: type, **parts) -> dict:
    """Read a checkpoint, tensors and settings but no code, into these parts."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        own = {"run_dir": os.path.dirname(path), "resume": None, "evaluate": None}
        content["settings"] = Args(**content["settings"] | own)  # what it lacks is as by default
        for name, part in parts.items():
            part.load_state_dict(content[name])
        return content
    except Exception as error:
        raise UsageError(f"{path} is no checkpoint of this script ({type(error).__name__})") from error


def open_run(args: Args, labeller: Labeller, rounds: deque, parts: dict) -> tuple[int, float]:
    """Make a run's folder, or restore the run -> step, best return."""
    if args.resume is None:
        os.makedirs(f"{args.run_dir}/rounds")
        return 0, -math.inf
    kept = load(f"{args.run_dir}/checkpoint.pt", type(args), **parts)
    end = kept["step"] // (args.num_envs * args.episode_length)
    for k in range(max(0, end - rounds.maxlen), end):
        states, actions, rewards = torch.load(f"{args.run_dir}/rounds/{k}.pt")["round"]
        rounds.append([part.to(labeller.device) for part in (states, actions, rewards)])
    if rounds and args.reward == "clip":
        labeller.check(states[1::25].flatten(0, 1), rewards[::25].flatten())
    return kept["step"], kept["best_return"]


def read_settings(Args: type) -> Args:
    args = tyro.cli(Args)
    path = args.evaluate or (args.resume and f"{args.resume}/checkpoint.pt")
    if path:
        before = load(path, Args)["settings"]
        if before.clip_model.endswith(".py"):  # runs only what is named again
            before.clip_model = tyro.MISSING
        args = tyro.cli(Args, default=before)
    if args.resume:
        args.check_resumed(before)
    args.check()
    args.run_dir = args.run_dir or f"runs/{Path(sys.argv[0]).stem}__{args.seed}__{int(time.time())}"
    return args


def main(Args: type = Args, Worker: type = Worker, train=train) -> None:
    args = read_settings(Args)
    labeller = Labeller(Worker, args)
    if args.evaluate:
        policy = Actor()
        load(args.evaluate, Args, policy=policy)
        write_result(f"{args.evaluate.removesuffix('.pt')}_evaluation", policy, labeller, args)
        return
    print(f"{args.total_timesteps:,} steps; run folder {args.run_dir}")
    train(args, labeller)


if __name__ == "__main__":
    try:
        main()
    except (UsageError, OSError, torch.OutOfMemoryError) as error:
        hint = "" if isinstance(error, UsageError) else "; --resume goes on"
        print(f"error: {error}{hint}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        os._exit(130)  # at once
