"""CartPole learned from one sentence: DQN whose only reward is a CLIP model's opinion of the frame.

    python dqn_clip_cartpole.py --prompt "pole vertically upright on top of the cart"

The method is VLM-RM (Rocamonde et al., ICLR 2024, arXiv 2310.12921), its Algorithm 1 with DQN (Mnih et al.,
2015). Read from top to bottom; the loop is in `train`, the reward in clip_reward.py.
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

from clip_reward import Labeller, RewardArgs, UsageError, make_reward, replayed

SCRIPT = Path(__file__).stem


@dataclass
class Args(RewardArgs):
    """Teach CartPole with a sentence: DQN on a CLIP model's reward (in brackets: the paper's values)."""

    prompt: tuple[str, ...] = ("pole vertically upright on top of the cart",)  # the goal
    baseline_prompt: tuple[str, ...] = ("pole and cart",)  # what the scene looks like in general
    reward: Literal["clip", "ground-truth"] = "clip"  # ground truth, for reference: 1 while it is up
    seed: int = 1  # of weights, start states and exploration
    total_timesteps: int | None = None  # of all environments (default: 64,000 with tiny, else 3,000,000)
    num_envs: int = 16  # environments side by side
    episode_length: int = 200  # steps; a round is one episode in every environment
    gradient_steps: int = 400  # updates per round
    learning_starts: int = 3_200  # rounds that begin before this step are random, nothing is learned (75,000)
    learning_rate: float = 5e-4  # of Adam, at first; it falls to 0 (2.3e-3, constant)
    buffer_size: int = 1_000_000  # transitions kept, in whole rounds (Stable-Baselines3's default)
    gamma: float = 0.99  # discount factor
    n_step: int = 3  # rewards summed before the target network's value stands for the rest (1)
    tau: float = 0.01  # how far the target network follows at each update (copied every 625 updates)
    batch_size: int = 128  # transitions per update (Stable-Baselines3's default, 32)
    # The share of random actions falls as 1 - step / (exploration_fraction * all steps), not below end_e.
    end_e: float = 0.05
    exploration_fraction: float = 0.25  # (0.1)
    layer_norm: bool = True  # in the network: without it and n_step, what was learned is lost again (not)

    run_dir: str | None = None  # folder of this run, made anew (default: runs/SCRIPT__SEED__TIME)
    # steps between two evaluations; the newest of the best is kept (default: 6,400 with tiny) (64,000)
    evaluate_every: int | None = None
    episodes: int = 100  # of the final evaluation, or of --evaluate
    resume: str | None = None  # go on with the run in this folder; its settings hold, but for those named
    evaluate: str | None = None  # only evaluate this checkpoint, with its settings, but for those named
    track: bool = False  # log to Weights & Biases, too (WANDB_PROJECT names the project)


# ---- Environment

X_LIMIT = 2.4  # m
THETA_LIMIT = math.radians(12)  # where, with X_LIMIT, the original CartPole-v1 ends an episode
STATE_SIZE = 4  # S below; the agent observes the state
NUM_ACTIONS = 2  # A below


class CartPole(CartPoleVectorEnv):
    """Gymnasium's CartPole-v1, many at once; as in the paper no episode ends early: that would tell the task.

    A state is position x in m, its velocity, pole angle θ in rad, its velocity; θ = 0: upright, θ > 0: right.
    θ is wrapped to [-π, π), and x, but not its velocity, clipped to ±2.4 m: the cart stays in view.
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

# Gymnasium's frame, in whose pixels the scene is described: 125 a metre, the axle at (300 + 125 x,
# 107.5) from the lower left, cart 50 x 30, pole 10 x 125; below half of that, and half a pixel of outline.
SCREEN_WIDTH, SCREEN_HEIGHT = 600, 400
COLORS = ((255, 255, 255), (202, 152, 101), (129, 132, 203))  # background, pole, axle; the rest is black


def overlap(position: torch.Tensor, half: float, pixel: torch.Tensor | float) -> torch.Tensor:
    """Share of a pixel, `pixel` wide, covered by a part of half width `half` that is `position` away."""
    left = (position - pixel / 2).clamp(min=-half)
    right = (position + pixel / 2).clamp(max=half)
    return (right - left).clamp(min=0) / pixel


def render(states: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """States (N, 4) -> frames (N, 3, height, width) uint8 on their device: Gymnasium's, squashed."""
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
    inside = 5.5 - (dx.square() + dy.square()).sqrt()
    axle = (inside / math.sqrt(pixel_x * pixel_y) + 0.5).clamp(0, 1)  # its edge is one pixel soft
    sin, cos = theta.sin(), theta.cos()
    across = cos * dx - sin * dy  # in the pole's frame, from its middle
    along = sin * dx + cos * dy - 57.5
    pixel_across = torch.hypot(cos * pixel_x, sin * pixel_y)
    pixel_along = torch.hypot(sin * pixel_x, cos * pixel_y)
    pole = overlap(across, 5.5, pixel_across) * overlap(along, 63, pixel_along)

    # What is seen of it: the track over the axle, over the pole, over the cart. Black adds nothing.
    white = (1 - track) * (1 - axle) * (1 - pole) * (1 - cart)
    shares = (white, (1 - track) * (1 - axle) * pole, (1 - track) * axle)  # each (N, height - top, width)
    channels = [sum(level * share for level, share in zip(levels, shares)) for levels in zip(*COLORS)]
    pixels = torch.stack(channels, dim=1)
    frames = torch.full((len(states), 3, height, width), 255, dtype=torch.uint8, device=states.device)
    frames[:, :, top:] = pixels.round().to(torch.uint8)
    return frames


class Worker:
    """Renders states and rewards the frames on one device; the `Labeller` has one for each core or GPU."""

    def __init__(self, args: Args, device: torch.device, reward_model: nn.Module | None = None):
        self.reward_model = reward_model or make_reward(args, device)  # a CPU's workers share one

    @torch.no_grad()
    def label(self, states: torch.Tensor) -> torch.Tensor:
        """States (N, S) -> rewards and ground-truth rewards (N, 2), on the CPU."""
        frames = render(states.to(self.reward_model.device), *self.reward_model.size)  # uint8, never stored
        rewards = self.reward_model(frames)  # R(s): `CLIPReward.reward` in clip_reward.py
        return torch.stack([rewards.cpu(), ground_truth_reward(states)], dim=1)


# ---- Replay buffer


class ReplayBuffer:
    """The newest rounds, played and rewarded, in preallocated tensors on the learner's device.

    Rewards are standardized by the mean and deviation of all kept. As no episode ends early, that changes no
    optimal policy; without it the values' differences would be lost, as CLIP's rewards are nearly alike.

    There is no "done": every next state's value is bootstrapped. An episode ends by its time limit alone, no
    property of the state. (The paper's code makes the last step terminal; the agent cannot see the time.)
    """

    def __init__(self, args: Args, device: torch.device):
        steps, num_envs = args.episode_length, args.num_envs
        self.capacity = math.ceil(min(args.buffer_size, args.total_timesteps) / (steps * num_envs))  # rounds
        shape = (self.capacity, steps, num_envs)
        self.states = torch.zeros(self.capacity, steps + 1, num_envs, STATE_SIZE, device=device)
        self.actions = torch.zeros(shape, dtype=torch.int64, device=device)
        self.rewards = torch.zeros(shape, device=device)
        self.rounds = 0  # taken in so far

    def add(self, states: torch.Tensor, actions: torch.Tensor, rewards: torch.Tensor) -> None:
        """Take in a round: states (T + 1, N, S), actions and rewards (T, N), over the oldest."""
        i = self.rounds % self.capacity
        self.states[i] = states
        self.actions[i] = actions
        self.rewards[i] = rewards
        self.rounds += 1
        kept = self.rewards[: self.rounds].double()  # so that equal rewards come out as 0
        self.mean = kept.mean()
        self.std = kept.std(correction=0) + 1e-8

    def sample(self, batch_size: int, n_step: int) -> tuple[torch.Tensor, ...]:
        """Uniformly -> obs (B, S), those n_step later, actions (B,), rewards between (n_step, B)."""
        _, steps, num_envs = self.rewards.shape
        starts = steps - n_step + 1  # nothing reaches beyond the end of an episode
        size = min(self.rounds, self.capacity) * starts * num_envs
        k = torch.randint(size, (batch_size,), device=self.rewards.device)
        i, t, n = k // (starts * num_envs), k // num_envs % starts, k % num_envs
        rewards = (torch.stack([self.rewards[i, t + j, n] for j in range(n_step)]) - self.mean) / self.std
        return self.states[i, t, n], self.states[i, t + n_step, n], self.actions[i, t, n], rewards


# ---- Network and update


class QNetwork(nn.Sequential):
    """Observations (N, S) -> action values (N, A)."""

    def __init__(self, args: Args):
        norm = nn.LayerNorm if args.layer_norm else nn.Identity
        super().__init__(
            nn.Linear(STATE_SIZE, 256), norm(256), nn.ReLU(),
            nn.Linear(256, 256), norm(256), nn.ReLU(), nn.Linear(256, NUM_ACTIONS)
        )  # fmt: skip


def dqn_update(
    q_network: QNetwork, target_network: QNetwork, optimizer: torch.optim.Adam, batch: tuple, args: Args
) -> dict:
    """One update by a batch of transitions -> what to log."""
    obs, next_obs, actions, rewards = batch
    n_step_return = sum(args.gamma**k * reward for k, reward in enumerate(rewards))
    with torch.no_grad():  # every last state bootstraps: see ReplayBuffer
        td_target = n_step_return + args.gamma**args.n_step * target_network(next_obs).max(dim=1).values
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
    envs = CartPole(args.num_envs)
    torch.manual_seed(args.seed)
    q_network = QNetwork(args).to(device)
    target_network = deepcopy(q_network)  # the running mean of its weights acts, too: it is steadier
    optimizer = torch.optim.Adam(q_network.parameters(), lr=args.learning_rate, fused=True)
    rb = ReplayBuffer(args, device)
    parts = {"policy": target_network, "q_network": q_network, "optimizer": optimizer}  # of a checkpoint
    global_step, best_return, _lock = open_run(args, labeller, rb, parts)  # locked as long as _lock lives

    def update() -> dict:
        batch = rb.sample(args.batch_size, args.n_step)
        return dqn_update(q_network, target_network, optimizer, batch, args)

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
        policy = deepcopy(target_network).cpu()
        epsilon = max(args.end_e, 1 - global_step / max(args.exploration_fraction * args.total_timesteps, 1))
        epsilon = 1.0 if warmup else epsilon
        playing = labeller.pool.submit(rollout, policy, epsilon, envs, labeller, play_seed, args)

        # ---- Learn, at the same time: DQN on the rounds before (the first has none).
        torch.manual_seed(learn_seed)
        learning_rate = args.learning_rate * (1 - global_step / args.total_timesteps)
        optimizer.param_groups[0] |= {"lr": learning_rate, "capturable": True}
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
            states, labels = evaluate(target_network, args.num_envs, labeller, args)
            means = summary(labels)
            tqdm.write(f"step {global_step:,} of {args.total_timesteps:,}: {in_words(means)}")
            scalars |= {f"evaluation/{name}": value for name, value in means.items()}
            frames = pictures(states[:, :1], labels[:, :1, 0], 8)[:, 0]
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
    load(f"{args.run_dir}/best.pt", policy=target_network)
    states, labels = evaluate(target_network, args.episodes, labeller, args)
    for name, value in summary(labels).items():
        writer.add_scalar(f"result/{name}", value, global_step + 1)  # --resume drops it
    writer.close()
    write_result(Path(args.run_dir, "result"), states, labels, args)


# ==== Nothing below belongs to the method: success, evaluation, pictures, files, and the command line.


def ground_truth_reward(states: torch.Tensor) -> torch.Tensor:
    """States (N, 4) -> 1.0 within the limits where CartPole-v1 would go on, else 0.0 (N,)."""
    inside = (states[:, 0].abs() < X_LIMIT) & (states[:, 2].abs() <= THETA_LIMIT)  # a clipped x is outside
    return inside.float()


def summary(labels: torch.Tensor) -> dict[str, float]:
    """Labels (T, N, 2) -> means over the N episodes; one succeeds if no step leaves CartPole-v1's limits."""
    success = labels[:, :, 1].bool().all(0).float().mean().item()
    clip, truth = labels.sum(0).mean(0).tolist()
    return {"success_rate": success, "clip_return": clip, "ground_truth_return": truth}


def in_words(means: dict[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in means.items())


def evaluate(policy: nn.Module, episodes: int, labeller: Labeller, args: Args) -> tuple:
    """Play without exploration, from starts of its own -> states (T, N, S), labels (T, N, 2)."""
    seed = np.random.SeedSequence((args.seed, 2**32, episodes)).generate_state(1).item()
    states, _ = rollout(deepcopy(policy).cpu(), 0.0, CartPole(episodes), labeller, seed, args)
    return states[1:], labeller.result(show="evaluate").view(args.episode_length, episodes, -1)


def pictures(states: torch.Tensor, rewards: torch.Tensor, count: int) -> np.ndarray:
    """States (T, N, S), rewards (T, N) -> captioned frames of `count` steps (count, N, H, W, 3)."""
    images = []
    steps = np.linspace(0, len(states) - 1, count).round().astype(int)
    for t in tqdm(steps, "render pictures", leave=False, disable=None):
        frames = render(states[t], SCREEN_HEIGHT // 2, SCREEN_WIDTH // 2)
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
    result["versions"] = {name: metadata.version(name) for name in ("torch", "open_clip_torch", "gymnasium")}
    Path(f"{path}.json").write_text(json.dumps(result, indent=2))
    sheet = pictures(states[:, :4], labels[:, :4, 0], 8).transpose(1, 2, 0, 3, 4)  # (4, H, 8, W, 3)
    iio.imwrite(f"{path}.png", sheet.reshape(-1, 8 * sheet.shape[3], 3))
    film = pictures(states[:, :3], labels[:, :3, 0], len(states)).swapaxes(0, 1)  # (3, T, H, W, 3)
    iio.imwrite(f"{path}.mp4", film.reshape(-1, *film.shape[2:]), plugin="pyav", codec="libx264", fps=50)
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
        print("success rate and ground truth are of the pole upright, whatever the prompt says")
    labeller = Labeller(Worker, args)
    if args.evaluate is None:
        print(f"{args.total_timesteps:,} steps; run folder {args.run_dir}")
        train(args, labeller)
    else:
        policy = QNetwork(args)
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
