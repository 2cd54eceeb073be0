"""CartPole learned from one sentence: DQN whose only reward is a CLIP model's opinion of the frame.

    python dqn_clip_cartpole.py --prompt "pole vertically upright on top of the cart"

The method is VLM-RM (Rocamonde et al., ICLR 2024, arXiv 2310.12921), its Algorithm 1 with DQN (Mnih et al., 2015).
Read from top to bottom: settings, environment, rendering and labelling, replay buffer, network and update, and the
loop: act, learn, label, report. `clip_reward.py` has the reward.
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
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from PIL import Image, ImageDraw, ImageFont
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from clip_reward import Labeller, RewardArgs, UsageError, make_reward

SCRIPT = Path(__file__).stem


@dataclass
class Args(RewardArgs):
    """Teach CartPole with a sentence: DQN on the reward of a CLIP model. Defaults are the paper's unless said so."""

    prompt: tuple[str, ...] = (
        "pole vertically upright on top of the cart",
    )  # the goal; several are averaged
    baseline_prompt: tuple[str, ...] = ("pole and cart",)  # what the scene looks like in general
    reward: Literal["clip", "ground-truth"] = (
        "clip"  # ground-truth is for reference: 1 within CartPole-v1's limits
    )
    seed: int = 1  # of the weights, the start states and the exploration
    total_timesteps: int | None = (
        None  # of all environments (default: 64,000 with tiny or a program, else 3,000,000)
    )
    num_envs: int = 16  # environments side by side
    episode_length: int = 200  # steps; a round is one episode in every environment
    gradient_steps: int = 400  # updates per round
    learning_starts: int = (
        6_400  # rounds that begin before this step are random, without learning (paper: 75,000)
    )
    learning_rate: float = 5e-4  # of Adam, at first; it falls to 0 (paper: 2.3e-3, constant)
    buffer_size: int = (
        1_000_000  # transitions kept, in whole rounds (Stable-Baselines3's default, as in the paper)
    )
    gamma: float = 0.99  # discount factor
    tau: float = 0.0025  # how far the target network follows at each update (paper: copied every 625 updates)
    batch_size: int = 128  # transitions per update (paper: Stable-Baselines3's default, 32)
    end_e: float = 0.05  # share of random actions at the end; it falls from 1 as 1 - step / ...
    exploration_fraction: float = 0.1  # ... this share of all steps (no earlier than learning starts)

    run_dir: str | None = None  # folder of this run, made anew (default: runs/SCRIPT__SEED__TIME)
    checkpoint_every: int = (
        32_000  # steps between two evaluations, of which the best policy is kept (paper: 64,000)
    )
    episodes: int = 100  # of the final evaluation, or of --evaluate
    resume: str | None = None  # go on with the run in this folder; its settings hold but for those named here
    evaluate: str | None = None  # only evaluate this checkpoint, with its settings but for those named here
    track: bool = False  # log to Weights & Biases as well (WANDB_PROJECT names the project there)


# ---- Environment

X_LIMIT = 2.4  # m
THETA_LIMIT = math.radians(12)  # where, with X_LIMIT, the original CartPole-v1 ends an episode
STATE_SIZE = 4  # S below; the agent observes the state
NUM_ACTIONS = 2  # A below


class CartPole(CartPoleVectorEnv):
    """Gymnasium's CartPole-v1, many at once; no episode ends early, as in the paper: that would give the task away.

    A state is (position x in m, its velocity in m/s, pole angle θ in rad, its velocity in rad/s); θ = 0 is upright,
    θ > 0 to the right. θ is wrapped to [-π, π), and x, but not its velocity, clipped to ±2.4 m so that the cart stays
    in view.
    """

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        _, rewards, terminations, truncations, infos = super().step(actions)
        terminations[:] = False
        truncations[:] = False
        self.prev_done[:] = False  # or Gymnasium's next step would start these episodes anew
        self.state[0] = self.state[0].clip(-X_LIMIT, X_LIMIT)
        self.state[2] = (self.state[2] + math.pi) % (2 * math.pi) - math.pi
        return self.state.T.astype(np.float32), rewards, terminations, truncations, infos


# ---- Rendering and labelling

# Gymnasium's frame, in whose pixels the scene is described: 125 a metre, the axle at (300 + 125 x, 107.5) from the
# lower left, the cart 50 x 30, the pole 10 x 125. Half sizes have half a pixel more, as its polygon filling adds.
SCREEN_WIDTH, SCREEN_HEIGHT = 600, 400
COLORS = (
    (255, 255, 255),
    (202, 152, 101),
    (129, 132, 203),
)  # background, pole, axle; cart and track are black


def overlap(position: torch.Tensor, half: float, pixel: torch.Tensor | float) -> torch.Tensor:
    """Share of a pixel, `pixel` wide, that a part covers whose middle is `position` away and whose half width is `half`."""
    return ((position + pixel / 2).clamp(max=half) - (position - pixel / 2).clamp(min=-half)).clamp(
        min=0
    ) / pixel


def render(states: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """States (N, 4) -> frames (N, 3, height, width) uint8: Gymnasium's, squashed, but batched, on the states' device."""
    x = states[:, 0, None, None].float()  # (N, 1, 1)
    theta = states[:, 2, None, None].float()
    pixel_x = SCREEN_WIDTH / width
    pixel_y = SCREEN_HEIGHT / height
    columns = (torch.arange(width, device=states.device) + 0.5) * pixel_x - 0.5  # in Gymnasium's pixels
    rows = SCREEN_HEIGHT - 0.5 - (torch.arange(height, device=states.device) + 0.5) * pixel_y
    top = int((SCREEN_HEIGHT - 230) / pixel_y)  # the rows above are white: the pole's tip reaches y = 228
    dx = columns - (125 * x + 300)  # from the axle, to the right
    dy = rows[top:, None] - 107.5  # from the axle, up

    # Share of each pixel that a part covers.
    cart = overlap(dx, 25.5, pixel_x) * overlap(dy + 7.5, 15.5, pixel_y)
    track = overlap(dy + 7.5, 0.5, pixel_y)
    axle = ((5.5 - (dx.square() + dy.square()).sqrt()) / math.sqrt(pixel_x * pixel_y) + 0.5).clamp(
        0, 1
    )  # soft edge
    sin, cos = theta.sin(), theta.cos()
    across = cos * dx - sin * dy  # in the pole's frame, from its middle
    along = sin * dx + cos * dy - 57.5
    pixel_across = torch.hypot(cos * pixel_x, sin * pixel_y)
    pixel_along = torch.hypot(sin * pixel_x, cos * pixel_y)
    pole = overlap(across, 5.5, pixel_across) * overlap(along, 63, pixel_along)

    # What of it is seen, the track lying over the axle, the axle over the pole, the pole over the cart. Black adds nothing.
    white = (1 - track) * (1 - axle) * (1 - pole) * (1 - cart)
    shares = (white, (1 - track) * (1 - axle) * pole, (1 - track) * axle)  # each (N, height - top, width)
    pixels = torch.stack(
        [sum(level * share for level, share in zip(levels, shares)) for levels in zip(*COLORS)], dim=1
    )
    frames = torch.full((len(states), 3, height, width), 255, dtype=torch.uint8, device=states.device)
    frames[:, :, top:] = pixels.round().to(torch.uint8)
    return frames


class Worker:
    """Renders states and rewards the frames on one device; the `Labeller` has one for each core or GPU."""

    def __init__(self, args: Args, device: torch.device, reward_model: nn.Module | None = None):
        self.reward_model = reward_model or make_reward(args, device)  # a `CLIPReward`, see clip_reward.py

    @torch.no_grad()
    def label(self, states: torch.Tensor) -> torch.Tensor:
        """States (N, S) -> rewards and ground-truth rewards (N, 2), on the CPU."""
        frames = render(states.to(self.reward_model.device), *self.reward_model.size)  # uint8, never stored
        rewards = self.reward_model(frames)  # R(s): `CLIPReward.reward` in clip_reward.py
        return torch.stack([rewards.cpu(), ground_truth_reward(states)], dim=1)


# ---- Replay buffer


class ReplayBuffer:
    """The newest rounds, played and rewarded, in preallocated tensors on the learner's device.

    What is learned from are rewards standardized by the mean and deviation of all kept. As episodes never end early,
    that changes no optimal policy; but CLIP's rewards lie close together and far from 0, and would bury the values'
    differences under their sum.

    There is no "done": the value of every next state is bootstrapped. An episode only ever ends by its time limit,
    which is no property of the state. (The paper's code treats the last step as terminal, although the agent cannot
    see the time.)
    """

    def __init__(self, args: Args, device: torch.device):
        self.capacity = math.ceil(
            min(args.buffer_size, args.total_timesteps) / (args.episode_length * args.num_envs)
        )
        shape = (self.capacity, args.episode_length, args.num_envs)  # rounds, T, N
        # Step t leads from state t to state t + 1.
        self.states = torch.zeros(
            self.capacity, args.episode_length + 1, args.num_envs, STATE_SIZE, device=device
        )
        self.actions = torch.zeros(shape, dtype=torch.int64, device=device)
        self.rewards = torch.zeros(shape, device=device)
        self.rounds = 0  # taken in so far

    def add(self, states: torch.Tensor, actions: torch.Tensor, rewards: torch.Tensor) -> None:
        """Take in the next round: states (T + 1, N, S), actions and rewards (T, N); once full, over the oldest."""
        i = self.rounds % self.capacity
        self.states[i] = states
        self.actions[i] = actions
        self.rewards[i] = rewards
        self.rounds += 1
        kept = self.rewards[: self.rounds]
        self.mean = kept.mean()
        self.std = kept.std() + 1e-8

    def sample(self, batch_size: int) -> tuple[torch.Tensor, ...]:
        """Transitions, uniformly with replacement -> obs, next_obs (B, S), actions, rewards (B,)."""
        _, steps, num_envs = self.rewards.shape
        size = min(self.rounds, self.capacity) * steps * num_envs
        k = torch.randint(size, (batch_size,), device=self.rewards.device)
        i, t, n = k // (steps * num_envs), k // num_envs % steps, k % num_envs
        rewards = (self.rewards[i, t, n] - self.mean) / self.std
        return self.states[i, t, n], self.states[i, t + 1, n], self.actions[i, t, n], rewards


# ---- Network and update


class QNetwork(nn.Sequential):
    """Observations (N, S) -> action values (N, A)."""

    def __init__(self):
        super().__init__(
            nn.Linear(STATE_SIZE, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, NUM_ACTIONS)
        )


def dqn_update(
    q_network: QNetwork, target_network: QNetwork, optimizer: torch.optim.Adam, batch: tuple, args: Args
) -> dict:
    """One update by a batch of transitions -> what to log."""
    obs, next_obs, actions, rewards = batch
    with torch.no_grad():  # every next state bootstraps: see ReplayBuffer
        td_target = rewards + args.gamma * target_network(next_obs).max(dim=1).values
    q_values = q_network(obs).gather(1, actions[:, None]).squeeze(1)
    td_loss = F.smooth_l1_loss(q_values, td_target)
    optimizer.zero_grad()
    td_loss.backward()
    nn.utils.clip_grad_norm_(q_network.parameters(), 10)  # Stable-Baselines3's default
    optimizer.step()
    with torch.no_grad():  # target <- (1 - τ) target + τ learned
        for target, learned in zip(target_network.parameters(), q_network.parameters()):
            target.lerp_(learned, args.tau)
    return {"td_loss": td_loss.detach(), "q_values": q_values.detach().mean()}


# ---- The loop


@torch.no_grad()
def rollout(
    policy: QNetwork, epsilon: float, envs: CartPole, labeller: Labeller, seed: int, args: Args
) -> tuple:
    """An episode in each environment, ε-greedily, on the CPU -> states (T + 1, N, S), actions (T, N)."""
    obs, _ = envs.reset(seed=seed)
    rng = envs.np_random  # the environments' generator: it has drawn the start states, and goes on here
    states = [torch.from_numpy(obs)]
    actions = []
    for _ in range(args.episode_length):
        explore = torch.from_numpy(rng.random(envs.num_envs) < epsilon)
        random_actions = torch.from_numpy(rng.integers(NUM_ACTIONS, size=envs.num_envs))
        actions.append(torch.where(explore, random_actions, policy(states[-1]).argmax(dim=1)))
        obs, _, _, _, _ = envs.step(actions[-1].numpy())
        states.append(torch.from_numpy(obs))
        labeller.add(states[-1])  # the state after each step is rendered and rewarded by other threads
    return torch.stack(states), torch.stack(actions)


def train(args: Args, labeller: Labeller) -> None:
    """The paper's Algorithm 1, a round at a time; all chance comes from seed and round, so that --resume repeats it.

    A round's first three phases go on at the same time; acting and learning begin with what the rounds before left:

        act    =============          one thread: play round k with a copy of the policy
        learn  =================      this thread: update on rounds 0 to k - 1
        label     ===============     the other threads, then this one, too: render what was played, reward the frames
        report                   ===  this thread: store round k; curves, evaluation, checkpoint
    """
    device = torch.device(args.device)
    envs = CartPole(args.num_envs)
    torch.manual_seed(args.seed)
    q_network = QNetwork().to(device)
    target_network = deepcopy(
        q_network
    )  # a running mean of its weights, which acts, too: it is the steadier of the two
    optimizer = torch.optim.Adam(q_network.parameters(), lr=args.learning_rate, fused=True)
    rb = ReplayBuffer(args, device)
    # The run's folder: a checkpoint of these parts after each round. --resume restores them and the rounds.
    run = Run(args, labeller, rb, policy=target_network, q_network=q_network, optimizer=optimizer)

    while run.step < args.total_timesteps:
        warmup = run.step < args.learning_starts
        play_seed, learn_seed = np.random.SeedSequence((args.seed, rb.rounds)).generate_state(2).tolist()

        # ---- Act, in a thread, with the policy as it is now.
        policy = deepcopy(target_network).cpu()
        epsilon = max(args.end_e, 1 - run.step / max(args.exploration_fraction * args.total_timesteps, 1))
        epsilon = 1.0 if warmup else epsilon
        playing = labeller.pool.submit(rollout, policy, epsilon, envs, labeller, play_seed, args)

        # ---- Learn, at the same time: DQN, on the transitions of the rounds before (the first has none).
        torch.manual_seed(learn_seed)
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - run.step / args.total_timesteps)
        losses = defaultdict(list)
        if rb.rounds > 0 and not warmup:
            for _ in range(args.gradient_steps):
                update = dqn_update(q_network, target_network, optimizer, rb.sample(args.batch_size), args)
                for name, value in update.items():
                    losses[name].append(value)

        # ---- Label: threads have begun to render the states and to reward the frames (`Worker.label`); the rest is done here.
        states, actions = playing.result()
        labels = labeller.result().view(args.episode_length, args.num_envs, 2)
        clip_rewards, ground_truth_rewards = labels.unbind(dim=2)
        rewards = ground_truth_rewards if args.reward == "ground-truth" else clip_rewards
        rb.add(states, actions, rewards)

        # ---- Report: the round's file, curves, now and then an evaluation, and a checkpoint. This counts the steps, too.
        run.report((states, actions, rewards), labels, losses)

    run.finish()


# ==== Nothing below belongs to the method: success, evaluation, pictures, files, and the command line.


def ground_truth_reward(states: torch.Tensor) -> torch.Tensor:
    """States (N, 4) -> 1.0 within CartPole-v1's limits, else 0.0 (N,): Gymnasium's reward, which ends with the episode."""
    return (
        (states[:, 0].abs() < X_LIMIT) & (states[:, 2].abs() <= THETA_LIMIT)
    ).float()  # a clipped x was outside


def summary(labels: torch.Tensor) -> dict[str, float]:
    """Labels (T, N, 2) -> means over the N episodes; one succeeds if no step leaves CartPole-v1's limits."""
    clip_return, ground_truth_return = labels.sum(0).mean(0).tolist()
    success_rate = labels[:, :, 1].bool().all(0).float().mean().item()
    return {
        "success_rate": success_rate,
        "clip_return": clip_return,
        "ground_truth_return": ground_truth_return,
    }


def evaluate(
    policy: nn.Module, episodes: int, labeller: Labeller, args: Args
) -> tuple[torch.Tensor, torch.Tensor]:
    """Play without exploration, from start states that no training sees -> states (T, N, S), labels (T, N, 2)."""
    seed = np.random.SeedSequence((args.seed, 2**32, episodes)).generate_state(1).item()
    states, _ = rollout(deepcopy(policy).cpu(), 0.0, CartPole(episodes), labeller, seed, args)
    return states[1:], labeller.result(f"evaluate {episodes} episodes").view(args.episode_length, episodes, 2)


def pictures(states: torch.Tensor, rewards: torch.Tensor, count: int, args: Args) -> np.ndarray:
    """States (T, N, S), rewards (T, N) -> `count` captioned frames of each episode, over its steps (N, count, H, W, 3)."""
    images = []
    for t in tqdm(
        np.linspace(0, len(states) - 1, count).round().astype(int), "pictures", leave=False, disable=None
    ):
        frames = render(states[t], SCREEN_HEIGHT // 2, SCREEN_WIDTH // 2).permute(0, 2, 3, 1).numpy()
        for frame, reward in zip(frames, rewards[t]):
            image = Image.fromarray(np.pad(frame, ((0, 24), (0, 0), (0, 0))))
            text = f"step {t + 1}   CLIP reward {reward:.3f}"
            ImageDraw.Draw(image).text((8, len(frame) + 3), text, "white", ImageFont.load_default(14))
            images.append(np.asarray(image))
    return np.stack(images).reshape(count, states.shape[1], *images[0].shape).swapaxes(0, 1)


def write_result(path: str, states: torch.Tensor, labels: torch.Tensor, args: Args) -> None:
    """Print what an evaluation gave, and write path.json, .png (frames of four episodes) and .mp4 (three)."""
    result = summary(labels)
    for name, value in result.items():
        print(f"{name.replace('_', ' '):>20}  {value:10.3f}")
    result["settings"] = asdict(args)
    result["versions"] = {name: metadata.version(name) for name in ("torch", "open_clip_torch", "gymnasium")}
    Path(f"{path}.json").write_text(json.dumps(result, indent=2))
    columns = np.concatenate(
        pictures(states[:, :4], labels[:, :4, 0], 8, args), axis=1
    )  # eight frames of all four
    iio.imwrite(f"{path}.png", np.concatenate(columns, axis=1))
    video = np.concatenate(pictures(states[:, :3], labels[:, :3, 0], len(labels), args))
    iio.imwrite(f"{path}.mp4", video, plugin="pyav", codec="libx264", fps=50)
    print(f"written to {path}.json, .png, .mp4")


def save(path: str, **content) -> None:
    """Write a file whole or not at all: a kill at any moment leaves the old one."""
    torch.save(content, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)


def load(path: str, **parts) -> dict:
    """Read what `save` wrote, tensors and settings but no code, and restore these parts from it."""
    if (
        not zipfile.is_zipfile(path) or zipfile.ZipFile(path).testzip()
    ):  # PyTorch would not notice a flipped bit
        raise UsageError(f"{path} is missing, damaged, or no checkpoint")
    content = torch.load(path, map_location="cpu", weights_only=True)
    try:
        for name, part in parts.items():
            part.load_state_dict(content[name])
    except RuntimeError:
        raise UsageError(f"{path} has other networks than this {SCRIPT}.py") from None
    return content


class Run:
    """A training's folder: a file for each round, curves, the best policy, and after each round a checkpoint.

    The rounds and the checkpoint's parts are all that the rest of the training depends on. A round that was
    interrupted is repeated from its seed.
    """

    def __init__(self, args: Args, labeller: Labeller, rb: ReplayBuffer, **parts):
        self.args = args
        self.labeller = labeller
        self.rb = rb
        self.parts = parts
        self.step = 0
        self.best_return = -math.inf
        os.makedirs(f"{args.run_dir}/rounds", exist_ok=args.resume is not None)
        self.lock = open(f"{args.run_dir}/lock", "w")  # held to the end of the training, or of this process
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{args.run_dir} belongs to a training that is still going") from None
        except OSError:
            pass  # a file system without locks
        if args.resume is not None:
            self.restore()
        self.save("checkpoint.pt", **parts)
        if args.track:
            import wandb

            wandb.init(config=asdict(args), dir=args.run_dir, resume="auto", sync_tensorboard=True)
        self.writer = SummaryWriter(
            args.run_dir, purge_step=self.step + 1
        )  # what a killed run logged beyond goes
        self.writer.add_text(
            "settings", "\n".join(f"    {name} = {value}" for name, value in asdict(args).items())
        )
        self.bar = tqdm(total=args.total_timesteps, initial=self.step, unit="step", disable=None)
        self.started = time.perf_counter()

    def restore(self) -> None:
        checkpoint = load(f"{self.args.run_dir}/checkpoint.pt", **self.parts)
        if (checkpoint["reward"] - self.labeller.fingerprint).norm() > 0.05:  # more than a precision makes
            raise UsageError(
                f"{self.args.run_dir} began with another prompt, or the reward model has changed"
            )
        self.step = checkpoint["step"]
        self.best_return = checkpoint["best_return"]
        rounds = self.step // (self.args.num_envs * self.args.episode_length)
        self.rb.rounds = max(0, rounds - self.rb.capacity)
        while self.rb.rounds < rounds:
            self.rb.add(*load(f"{self.args.run_dir}/rounds/{self.rb.rounds}.pt")["round"])

    def report(self, played: tuple, labels: torch.Tensor, losses: dict) -> None:
        """The end of a round: its file, curves, progress, when it is time an evaluation, and a checkpoint."""
        number = self.rb.rounds - 1
        save(f"{self.args.run_dir}/rounds/{number}.pt", round=played)
        # The file of the round that has just left the buffer stays: the last checkpoint is from before.
        Path(f"{self.args.run_dir}/rounds/{number - self.rb.capacity - 1}.pt").unlink(missing_ok=True)
        before = self.step
        self.step += labels[:, :, 0].numel()
        means = summary(labels)
        scalars = {f"charts/{name}": value for name, value in means.items()}
        scalars["charts/SPS"] = (self.step - before) / (time.perf_counter() - self.started)
        self.started = time.perf_counter()
        for name, values in losses.items():
            scalars[f"losses/{name}"] = torch.stack(values).mean().item()
            if not math.isfinite(scalars[f"losses/{name}"]):
                raise UsageError(f"{name} is not finite at step {self.step}: try a smaller --learning-rate")
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, self.step)
        self.bar.update(self.step - before)
        self.bar.set_description(f"clip return {means['clip_return']:.2f}")
        if before == 0:
            tqdm.write(f"a policy that has learned nothing: {in_words(means)}")
        every = self.args.checkpoint_every
        if before // every < self.step // every or self.step >= self.args.total_timesteps:
            self.evaluate()
        self.writer.flush()
        self.save("checkpoint.pt", **self.parts)

    def evaluate(self) -> None:
        """Evaluate the policy as it is now, and keep it if it earned more than all before (as in the paper)."""
        states, labels = evaluate(self.parts["policy"], self.args.num_envs, self.labeller, self.args)
        means = summary(labels)
        tqdm.write(f"step {self.step:,} of {self.args.total_timesteps:,}: {in_words(means)}")
        for name, value in means.items():
            self.writer.add_scalar(f"evaluation/{name}", value, self.step)
        frames = pictures(states[:, :1], labels[:, :1, 0], 8, self.args)[0]
        self.writer.add_images("frames", frames, self.step, dataformats="NHWC")
        earned = means["ground_truth_return" if self.args.reward == "ground-truth" else "clip_return"]
        if earned > self.best_return:
            self.best_return = earned
            self.save("best.pt", policy=self.parts["policy"])

    def save(self, name: str, **parts) -> None:
        content = {name: part.state_dict() for name, part in parts.items()}
        content |= {"script": SCRIPT, "settings": asdict(self.args), "reward": self.labeller.fingerprint}
        save(f"{self.args.run_dir}/{name}", step=self.step, best_return=self.best_return, **content)

    def finish(self) -> None:
        """The result of the best policy."""
        self.bar.close()
        load(f"{self.args.run_dir}/best.pt", policy=self.parts["policy"])
        states, labels = evaluate(self.parts["policy"], self.args.episodes, self.labeller, self.args)
        for name, value in summary(labels).items():
            self.writer.add_scalar(f"result/{name}", value, self.step + 1)  # which --resume forgets
        self.writer.close()
        write_result(f"{self.args.run_dir}/result", states, labels, self.args)
        self.lock.close()


def in_words(means: dict[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in means.items())


def read_settings() -> Args:
    """The command line -> complete settings; with --resume or --evaluate the checkpoint's are the defaults."""
    args = tyro.cli(Args)
    path = args.evaluate if args.resume is None else f"{args.resume}/checkpoint.pt"
    if path is not None:
        checkpoint = load(path)
        if checkpoint.get("script") != SCRIPT:
            raise UsageError(f"{path} is no checkpoint of {SCRIPT}.py")
        settings = checkpoint["settings"] | {
            "run_dir": os.path.dirname(path) or ".",
            "resume": None,
            "evaluate": None,
        }
        if settings["clip_model"].endswith(".py"):
            settings["clip_model"] = (
                tyro.MISSING
            )  # a checkpoint runs nothing: a program has to be named again
        args = tyro.cli(Args, default=Args(**settings))
    elif args.run_dir is not None and os.path.exists(args.run_dir):
        raise UsageError(f"{args.run_dir} exists: choose another --run-dir, or --resume {args.run_dir}")
    if args.clip_model is None and args.reward == "ground-truth":
        args.clip_model = "tiny"
    args.complete()
    if args.total_timesteps is None:
        args.total_timesteps = 64_000 if args.clip_model.endswith(("tiny", ".py")) else 3_000_000
    a_round = args.num_envs * args.episode_length
    if args.total_timesteps <= a_round * max(1, math.ceil(args.learning_starts / a_round)):
        raise UsageError("nothing would be learned: --total-timesteps ends before learning begins")
    args.run_dir = args.run_dir or f"runs/{SCRIPT}__{args.seed}__{int(time.time())}_{os.getpid()}"
    return args


def main() -> None:
    args = read_settings()
    torch.set_num_threads(1)  # the Labeller has a thread for each core
    sys.setswitchinterval(
        0.0005
    )  # s; or a thread that holds the interpreter keeps another from its next operation
    args.describe()
    if args.prompt != Args.prompt:
        print("success rate and ground truth are of the pole upright, whatever the prompt says")
    labeller = Labeller(Worker, args)
    if args.evaluate is None:
        print(f"{args.total_timesteps:,} steps; run folder {args.run_dir}")
        train(args, labeller)
        return
    policy = QNetwork()
    load(args.evaluate, policy=policy)
    os.makedirs(args.run_dir, exist_ok=True)
    states, labels = evaluate(policy, args.episodes, labeller, args)
    write_result(f"{args.run_dir}/{Path(args.evaluate).stem}_evaluation", states, labels, args)


if __name__ == "__main__":
    try:
        main()
    except (UsageError, OSError, MemoryError, torch.OutOfMemoryError) as error:
        print(f"{SCRIPT}.py: error: {error}", file=sys.stderr, flush=True)
        os._exit(2)
    except KeyboardInterrupt:
        print("interrupted; a training goes on with --resume and its folder", file=sys.stderr, flush=True)
        os._exit(130)  # without waiting for the threads
