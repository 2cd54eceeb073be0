"""CartPole learned from one sentence: DQN whose only reward is a CLIP model's opinion of the frame.

    python dqn_clip_cartpole.py --prompt "pole vertically upright on top of the cart"

The method is VLM-RM (Rocamonde et al., ICLR 2024, arXiv 2310.12921), its Algorithm 1 with DQN (Mnih et al., 2015). Read from top
to bottom: settings, environment, drawing and labelling, replay buffer, network and update, and the loop: act, learn, label, report.
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
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from PIL import Image, ImageDraw, ImageFont
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from clip_reward import CLIPReward, Labeller, UsageError, first_line, native_precision

SCRIPT = Path(__file__).stem


@dataclass
class Args:
    """Teach CartPole with a sentence: DQN on the reward of a CLIP model. The paper's values are defaults unless said otherwise."""

    prompt: tuple[str, ...] = ("pole vertically upright on top of the cart",)  # the goal; several sentences are averaged
    baseline_prompt: tuple[str, ...] = ("pole and cart",)  # what the scene looks like in general
    goal_baseline_alpha: float = 0.5  # α of the regularization: 0 plain cosine, 1 only what lies along baseline-goal
    negative_prompt: tuple[str, ...] = ()  # a contrastive reward instead: what else might be seen (Baumli et al., 2023)
    temperature: float | None = None  # contrastive: τ of the softmax; None is the model's own
    threshold: float | None = None  # contrastive: β, above which the reward is 1, else 0; None pays the probability itself
    reward: Literal["clip", "ground-truth"] = "clip"  # ground-truth is for reference: 1 per step within CartPole-v1's limits
    reward_program: str | None = None  # a file, as those in code_reward/programs, that pays instead of the CLIP model
    clip_model: str | None = None  # NAME/TAG, NAME//FILE, hf-hub:ORG/NAME, local-dir:FOLDER or tiny; None: tiny, on CUDA bigG
    clip_batch_size: int = 128  # frames drawn and scored at once
    precision: Literal["fp32", "bf16"] | None = None  # of the CLIP model; None is bf16 where the hardware has it
    ray_workers: int = 0  # more workers that label, on the Ray cluster that RAY_ADDRESS names or on this machine

    seed: int = 1  # of the weights, the start states and the exploration
    device: Literal["cpu", "cuda"] | None = None  # cuda is every GPU in sight; None takes it where there is one
    total_timesteps: int | None = None  # of all environments, in whole rounds; None is 64,000 with tiny, else 3,000,000
    num_envs: int = 16  # environments side by side
    episode_length: int = 200  # steps; a round is one episode in every environment
    gradient_steps: int = 400  # updates per round
    learning_starts: int = 6_400  # rounds that begin before this step are random, without learning (paper: 75,000)
    learning_rate: float = 5e-4  # of Adam, at first; it falls to 0 (paper: 2.3e-3, constant)
    buffer_size: int = 1_000_000  # transitions kept, in whole rounds (Stable-Baselines3's default, as in the paper)
    gamma: float = 0.99  # discount factor
    tau: float = 0.0025  # how far, at each update, the mean network moves towards the network (paper: copied every 625)
    batch_size: int = 128  # transitions per update (paper: Stable-Baselines3's default, 32)
    end_e: float = 0.05  # share of random actions at the end; it falls from 1, round by round ...
    exploration_fraction: float = 0.1  # ... and would reach 0 in this share of the steps

    run_dir: str | None = None  # folder of this run, made anew; None is runs/SCRIPT__SEED__TIME
    checkpoint_every: int = 32_000  # steps between two checkpoints, each evaluated (paper: 64,000)
    episodes: int = 100  # of the final evaluation, or of --evaluate
    resume: str | None = None  # go on with the run in this folder, exactly and with its own settings
    evaluate: str | None = None  # only evaluate this checkpoint (with --episodes, --seed, --device) and make its video
    track: bool = False  # log to Weights & Biases as well (WANDB_PROJECT names the project there)


# ---- Environment

X_LIMIT, THETA_LIMIT = 2.4, math.radians(12)  # where the original CartPole-v1 ends an episode
STATE_SIZE, NUM_ACTIONS = 4, 2  # S and A below; the agent observes the state


class CartPole(CartPoleVectorEnv):
    """Gymnasium's CartPole-v1, many side by side, but no episode ends early, as in the paper: that would tell what the task is.

    A state is (position x in m, its velocity in m/s, pole angle θ in rad, its velocity in rad/s); θ = 0 is upright, θ > 0 to the right.
    θ is wrapped to [-π, π), and x, but not its velocity, clipped to ±2.4 m so that the cart stays in view.
    """

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        _, rewards, terminations, truncations, infos = super().step(actions)
        self.prev_done[:] = terminations[:] = truncations[:] = False  # or the next step would start these episodes anew
        self.state[0] = self.state[0].clip(-X_LIMIT, X_LIMIT)
        self.state[2] = (self.state[2] + math.pi) % (2 * math.pi) - math.pi
        return self.state.T.astype(np.float32), rewards, terminations, truncations, infos


# ---- Drawing and labelling

SCREEN_WIDTH, SCREEN_HEIGHT = 600, 400  # of Gymnasium's frame, in whose pixels the scene is described
COLORS = ((255, 255, 255), (202, 152, 101), (129, 132, 203))  # background, pole, axle; cart and track are black


def overlap(position: torch.Tensor, half: float, pixel: torch.Tensor | float) -> torch.Tensor:
    """Share of a pixel, `pixel` wide, that a part covers whose middle is `position` away and whose half width is `half`."""
    return ((position + pixel / 2).clamp(max=half) - (position - pixel / 2).clamp(min=-half)).clamp(min=0) / pixel


def draw(states: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """States (N, 4) -> frames (N, 3, height, width) uint8: Gymnasium's, squashed, but batched and on the states' device."""
    x, theta = states[:, 0, None, None].float(), states[:, 2, None, None].float()  # (N, 1, 1)
    pixel_x, pixel_y = SCREEN_WIDTH / width, SCREEN_HEIGHT / height
    columns = (torch.arange(width, device=states.device) + 0.5) * pixel_x - 0.5  # in Gymnasium's pixels
    rows = SCREEN_HEIGHT - 0.5 - (torch.arange(height, device=states.device) + 0.5) * pixel_y
    top = int((SCREEN_HEIGHT - 230) / pixel_y)  # the rows above are white: the pole's tip reaches y = 228
    dx, dy = columns - (125 * x + 300), rows[top:, None] - 107.5  # from the axle, to the right and up; 125 pixels a metre

    # Share of each pixel that a part covers; the sizes are Gymnasium's plus the half pixel that its polygon filling adds.
    cart = overlap(dx, 25.5, pixel_x) * overlap(dy + 7.5, 15.5, pixel_y)
    track = overlap(dy + 7.5, 0.5, pixel_y)
    axle = ((5.5 - (dx.square() + dy.square()).sqrt()) / math.sqrt(pixel_x * pixel_y) + 0.5).clamp(0, 1)  # one pixel soft
    sin, cos = theta.sin(), theta.cos()
    across, along = cos * dx - sin * dy, sin * dx + cos * dy - 57.5  # in the pole's frame, from its middle
    pixel_across, pixel_along = torch.hypot(cos * pixel_x, sin * pixel_y), torch.hypot(sin * pixel_x, cos * pixel_y)
    pole = overlap(across, 5.5, pixel_across) * overlap(along, 63, pixel_along)

    # What of it is seen, the track lying over the axle, the axle over the pole, the pole over the cart. Black parts add nothing.
    white = (1 - track) * (1 - axle) * (1 - pole) * (1 - cart)
    shares = (white, (1 - track) * (1 - axle) * pole, (1 - track) * axle)  # each (N, height - top, width)
    pixels = torch.stack([sum(level * share for level, share in zip(levels, shares)) for levels in zip(*COLORS)], dim=1)
    frames = torch.full((len(states), 3, height, width), 255, dtype=torch.uint8, device=states.device)
    frames[:, :, top:] = pixels.round().to(torch.uint8)
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

    @torch.no_grad()
    def label(self, states: torch.Tensor) -> torch.Tensor:
        """States (N, S) -> CLIP rewards and true rewards (N, 2), both on the CPU."""
        frames = draw(states.to(self.reward_model.device), *self.reward_model.size)  # uint8, never stored
        rewards = self.reward_model(frames)  # R(s): `CLIPReward.reward` in clip_reward.py
        return torch.stack([rewards.cpu(), ground_truth_reward(states)], dim=1)


# ---- Replay buffer


class ReplayBuffer(nn.Module):
    """The newest rounds, played and labelled, in preallocated tensors (a Module for its `to` and `state_dict`).

    What is learned from are rewards standardized by the mean and deviation of all kept. As episodes never end early, that changes
    no optimal policy; but CLIP's rewards lie close together and far from 0, and would bury the values' differences under their sum.

    There is no "done": the value of every next state is bootstrapped. An episode only ever ends by its time limit, which is no
    property of the state. (The paper's code treats the last step as terminal, although the agent cannot see the time.)
    """

    def __init__(self, args: Args):
        super().__init__()
        steps, num_envs = args.episode_length, args.num_envs
        rounds = math.ceil(min(args.buffer_size, args.total_timesteps) / (steps * num_envs))
        self.register_buffer("states", torch.zeros(rounds, steps + 1, num_envs, STATE_SIZE))  # step t leads from t to t + 1
        self.register_buffer("actions", torch.zeros(rounds, steps, num_envs, dtype=torch.int64))
        self.register_buffer("rewards", torch.zeros(rounds, steps, num_envs))
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("std", torch.ones(()))

    def add(self, number: int, states: torch.Tensor, actions: torch.Tensor, rewards: torch.Tensor) -> None:
        """Store round `number` (the first is 0): states (T + 1, num_envs, S), actions and rewards (T, num_envs)."""
        place = number % len(self.rewards)  # once full, over the oldest
        self.states[place], self.actions[place], self.rewards[place] = states, actions, rewards
        kept = self.rewards[: number + 1]
        self.mean, self.std = kept.mean(), kept.std() + 1e-8

    def sample(self, batch_size: int, rounds: int) -> tuple[torch.Tensor, ...]:
        """Transitions of the `rounds` so far, uniformly with replacement -> obs, next_obs (N, S), actions, rewards (N,)."""
        kept, steps, num_envs = self.rewards.shape
        i = torch.randint(min(rounds, kept) * steps * num_envs, (batch_size,), device=self.rewards.device)
        place, t, n = i // (steps * num_envs), i // num_envs % steps, i % num_envs
        rewards = (self.rewards[place, t, n] - self.mean) / self.std
        return self.states[place, t, n], self.states[place, t + 1, n], self.actions[place, t, n], rewards


# ---- Network and update


class QNetwork(nn.Sequential):
    """Observations (N, S) -> action values (N, A)."""

    def __init__(self):
        super().__init__(nn.Linear(STATE_SIZE, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, NUM_ACTIONS))


def dqn_update(q_network: QNetwork, mean_network: QNetwork, optimizer: torch.optim.Adam, batch: tuple, args: Args) -> dict:
    """One update by a batch of transitions -> what to log. The mean network, which acts, is the target network, too."""
    obs, next_obs, actions, rewards = batch
    with torch.no_grad():  # every next state bootstraps: see ReplayBuffer
        td_target = rewards + args.gamma * mean_network(next_obs).max(dim=1).values
    q_values = q_network(obs).gather(1, actions[:, None]).squeeze(1)
    td_loss = F.smooth_l1_loss(q_values, td_target)
    optimizer.zero_grad()
    td_loss.backward()
    nn.utils.clip_grad_norm_(q_network.parameters(), 10)  # Stable-Baselines3's default
    optimizer.step()
    # Polyak averaging, all in one operation: mean <- (1 - τ) mean + τ learned.
    get_ema_multi_avg_fn(1 - args.tau)([*mean_network.parameters()], [*q_network.parameters()], None)
    return {"losses/td_loss": td_loss.detach(), "losses/q_values": q_values.detach().mean()}


# ---- The loop


@torch.no_grad()
def rollout(policy: QNetwork, epsilon: float, envs: CartPole, labeller: Labeller, seed: int, args: Args) -> tuple:
    """An episode in each environment, ε-greedily, on the CPU -> states (T + 1, N, S), actions (T, N)."""
    obs, _ = envs.reset(seed=seed)
    rng = envs.np_random  # which has drawn the start states
    states, actions = [torch.from_numpy(obs)], []
    for _ in range(args.episode_length):
        explore = torch.from_numpy(rng.random(envs.num_envs) < epsilon)
        random_actions = torch.from_numpy(rng.integers(NUM_ACTIONS, size=envs.num_envs))
        actions.append(torch.where(explore, random_actions, policy(states[-1]).argmax(dim=1)))
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
    device, envs = torch.device(args.device), CartPole(args.num_envs)
    torch.manual_seed(args.seed)
    q_network, rb = QNetwork().to(device), ReplayBuffer(args).to(device)
    mean_network = deepcopy(q_network)  # the running mean of its weights
    optimizer = torch.optim.Adam(q_network.parameters(), lr=args.learning_rate, fused=True)
    # Its folder, curves and checkpoints of these parts, whose policy it evaluates; --resume restores them all.
    run = Run(args, checkpoint, labeller, policy=mean_network, q_network=q_network, optimizer=optimizer, rb=rb)

    while run.step < args.total_timesteps and not run.stopped:
        number = run.step // (args.num_envs * args.episode_length)  # of the round, from 0
        warmup = run.step < args.learning_starts
        play_seed, learn_seed = np.random.SeedSequence((args.seed, number)).generate_state(2).tolist()

        # ---- Act, in a thread, with the policy as it is now.
        policy = deepcopy(mean_network).cpu()
        epsilon = 1.0 if warmup else max(args.end_e, 1 - run.step / max(args.exploration_fraction * args.total_timesteps, 1))
        playing = labeller.pool.submit(rollout, policy, epsilon, envs, labeller, play_seed, args)

        # ---- Learn, at the same time: DQN, on the transitions of the rounds before (the first has none).
        torch.manual_seed(learn_seed)
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - run.step / args.total_timesteps)
        losses = {}
        for _ in range(0 if warmup or number == 0 else args.gradient_steps):
            losses = dqn_update(q_network, mean_network, optimizer, rb.sample(args.batch_size, number), args)

        # ---- Label: threads have begun to draw the states and to score the frames with CLIP (`Worker.label`); the rest is done here.
        states, actions = playing.result()
        labels = labeller.result().view(args.episode_length, args.num_envs, 2)  # CLIP rewards and true rewards
        rb.add(number, states, actions, labels[:, :, 1 if args.reward == "ground-truth" else 0])

        # ---- Report. This counts the steps, too, and now and then evaluates and saves a checkpoint.
        run.report(labels, losses)

    run.finish()


# ==== Nothing below belongs to the method: success, evaluation, pictures, files, and checks of the settings.


def ground_truth_reward(states: torch.Tensor) -> torch.Tensor:
    """States (N, 4) -> 1.0 within CartPole-v1's limits, else 0.0 (N,): Gymnasium's reward, which there ends with the episode."""
    return ((states[:, 0].abs() < X_LIMIT) & (states[:, 2].abs() <= THETA_LIMIT)).float()  # a clipped x was outside


def summary(labels: torch.Tensor) -> dict[str, float]:
    """Labels (T, N, 2) -> means over the N episodes; one succeeds if no step leaves CartPole-v1's limits."""
    clip_return, ground_truth_return = labels.sum(0).mean(0).tolist()
    success_rate = labels[:, :, 1].bool().all(0).float().mean().item()
    return {"success_rate": success_rate, "clip_return": clip_return, "ground_truth_return": ground_truth_return}


def pictures(states: torch.Tensor, rewards: torch.Tensor, count: int, args: Args) -> np.ndarray:
    """States (T, N, S), rewards (T, N) -> `count` captioned frames of each episode, evenly over its steps (N, count, H, W, 3)."""
    images, size = [], (SCREEN_HEIGHT // 4 * 2, SCREEN_WIDTH // 4 * 2)
    for t in tqdm(np.linspace(0, len(states) - 1, count).round().astype(int), "draw pictures", leave=False, disable=None):
        for frame, reward in zip(draw(states[t], *size).permute(0, 2, 3, 1).numpy(), rewards[t]):
            image = Image.fromarray(np.pad(frame, ((0, 24), (0, 0), (0, 0))))
            text = f"step {t + 1}   CLIP reward {reward:.3f}"
            ImageDraw.Draw(image).text((8, len(frame) + 3), text, "white", ImageFont.load_default(14))
            images.append(np.asarray(image))
    return np.stack(images).reshape(count, states.shape[1], *images[0].shape).swapaxes(0, 1)


def evaluate(policy: nn.Module, episodes: int, labeller: Labeller, args: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """Play without exploration, from start states that no training sees -> states (T, N, S), labels (T, N, 2)."""
    seed = np.random.SeedSequence((args.seed, 2**32, episodes)).generate_state(1).item()
    states, _ = rollout(deepcopy(policy).cpu(), 0.0, CartPole(episodes), labeller, seed, args)
    return states[1:], labeller.result(f"score {episodes} episodes").view(args.episode_length, episodes, 2)


def write_result(path: str, states: torch.Tensor, labels: torch.Tensor, args: Args) -> None:
    """Print what an evaluation gave, and write path.json, .png (frames of four episodes) and .mp4 (three)."""
    metrics = summary(labels)
    for name, value in metrics.items():
        print(f"{name.replace('_', ' '):>20}  {value:10.3f}")
    versions = {name: metadata.version(name) for name in ("torch", "open_clip_torch", "gymnasium")}
    result = metrics | {"settings": asdict(args), "versions": versions}
    video = np.concatenate(pictures(states[:, :3], labels[:, :3, 0], len(labels), args))
    columns = np.concatenate(pictures(states[:, :4], labels[:, :4, 0], 8, args), axis=1)  # eight frames of all four
    save(f"{path}.json", json.dumps(result, indent=2).encode())
    save(f"{path}.png", iio.imwrite("<bytes>", np.concatenate(columns, axis=1), extension=".png"))
    save(f"{path}.mp4", iio.imwrite("<bytes>", video, plugin="pyav", extension=".mp4", codec="libx264", fps=50))
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
        args.total_timesteps = 64_000 if args.clip_model == "tiny" or args.reward_program else 3_000_000
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
        print("success rate and ground truth are of the pole upright, whatever the prompt says")
    if not args.evaluate:
        train(args, checkpoint, labeller)
    path = args.evaluate or f"{args.run_dir}/best.pt"
    policy = QNetwork()
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
