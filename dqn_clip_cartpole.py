"""CartPole learned from one sentence: DQN whose only reward is a CLIP model's opinion of the frame.

    python dqn_clip_cartpole.py --prompt "pole vertically upright on top of the cart"

The method is VLM-RM (Rocamonde et al., ICLR 2024, arXiv 2310.12921), its Algorithm 1 with DQN (Mnih et al., 2015). Read from top
to bottom: settings, environment and drawing, replay buffer, network, labelling, evaluation, and the loop: act, learn, label, report.
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
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from clip_reward import CLIPReward, RewardModelError, native_precision

SCRIPT = Path(__file__).stem
THREADS = torch.get_num_threads()  # one a core, or OMP_NUM_THREADS


@dataclass
class Args:
    """Teach CartPole with a sentence: DQN on the reward of a CLIP model. The paper's values are defaults unless said otherwise."""

    prompt: tuple[str, ...] = ("pole vertically upright on top of the cart",)
    """what the goal looks like; several sentences are averaged"""
    baseline_prompt: tuple[str, ...] = ("pole and cart",)
    """what the scene looks like in general"""
    goal_baseline_alpha: float = 0.5
    """α of goal-baseline regularization, 0 (plain cosine) to 1; most values in between work (paper, Section 4.2)"""
    clip_model: str | None = None
    """NAME/TAG, NAME//path/to/weights, hf-hub:ORG/NAME, local-dir:PATH or tiny
    (default: the paper's ViT-bigG-14/laion2b_s39b_b160k on CUDA, the bundled tiny on a CPU)"""
    clip_batch_size: int = 128
    """frames drawn and scored at once"""
    precision: Literal["fp32", "bf16"] | None = None
    """what the CLIP model computes in (default: bf16 where the processor or GPU has instructions for it, else fp32)"""
    reward: Literal["clip", "contrastive", "ground-truth"] = "clip"
    """what the agent learns from: clip is goal-baseline regularization, contrastive (without baseline and α) the probability of the
    prompt among it and the negative ones (Baumli et al., 2023); ground-truth, 1 per step within CartPole-v1's limits, is for reference curves"""
    negative_prompt: tuple[str, ...] = ("pole leaning to the side on top of the cart", "pole hanging down from the cart")
    """contrastive: what else there might be to see"""
    temperature: float | None = None
    """contrastive: τ of the softmax (default: the model's own)"""
    threshold: float | None = None
    """contrastive: β, above which the reward is 1, and else 0 (default: the probability itself is the reward)"""

    seed: int = 1
    """seed of the weights, the start states and the exploration"""
    device: str | None = None
    """cpu or cuda (default: cuda where there is one)"""
    total_timesteps: int = 160_000
    """environment steps over all environments, rounded up to whole rounds of one episode in each of them
    (paper: 3,000,000, with a model that has never seen the scene)"""
    num_envs: int = 16
    """environments simulated side by side"""
    episode_length: int = 200
    """steps of every episode"""
    gradient_steps: int = 200
    """updates per round (the paper's value)"""

    learning_starts: int = 6_400
    """random steps before learning (paper: 75,000 of its 3,000,000)"""
    learning_rate: float = 5e-4
    """of Adam (paper: 2.3e-3; see README, Results)"""
    buffer_size: int = 1_000_000
    """transitions kept, at least one round of them (Stable-Baselines3's default, as in the paper)"""
    gamma: float = 0.99
    """discount factor"""
    target_network_frequency: int = 200
    """the target network is a copy of the Q-network, renewed every so many updates
    (paper: Stable-Baselines3's default, every 10,000 steps)"""
    batch_size: int = 128
    """transitions per update (paper: Stable-Baselines3's default, 32)"""
    start_e: float = 1.0
    """share of random actions from which it falls; until `learning_starts` all are"""
    end_e: float = 0.05
    """share of random actions from `exploration_fraction` on"""
    exploration_fraction: float = 0.1
    """share of the steps in which the share of random actions falls linearly"""

    run_dir: Path | None = None
    """folder of this run, made anew (default: runs/SCRIPT__SEED__TIME)"""
    checkpoint_every: int = 16_000
    """environment steps between two checkpoints (paper: 64,000)"""
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
COLORS = ((255, 255, 255), (202, 152, 101), (129, 132, 203))  # background, pole, axle; cart and track are black
X_LIMIT, THETA_LIMIT = 2.4, math.radians(12)  # where the original CartPole-v1 ends an episode
STATE_SIZE, NUM_ACTIONS = 4, 2  # the state is what is observed


class CartPole:
    """`num_envs` cart-poles with the dynamics of Gymnasium's CartPole-v1, in float64 on `device`, all at the same step.

    A state is (position x in m, its speed in m/s, pole angle θ in rad, its speed in rad/s); θ = 0 is upright, θ > 0 to the right.
    As in the paper, no episode ends early, because that would tell the agent what the task is: each lasts `episode_length`
    steps, θ is wrapped to [-π, π] and x clipped to ±2.4 m so that the cart stays in view. Nothing resets itself: call `reset`.
    """

    def __init__(self, num_envs: int, episode_length: int, device: torch.device):
        self.num_envs, self.episode_length, self.device = num_envs, episode_length, device
        self.rng = torch.Generator(device)

    def reset(self, seed: int | None = None) -> tuple[torch.Tensor, dict]:
        """Start all episodes anew, near upright -> obs (num_envs, 4) float32, {}."""
        if seed is not None:
            self.rng.manual_seed(seed)
        uniform = torch.rand(self.num_envs, 4, generator=self.rng, dtype=torch.float64, device=self.device)
        self.state = 0.1 * uniform - 0.05
        self.success = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        self.t = 0
        return self.state.float(), {}

    def step(self, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, dict]:
        """Actions (num_envs,) int, 0 = push left, 1 = right -> obs, rewards, terminations, truncations, infos.

        The reward is the ground truth; infos["success"] (num_envs,) says whether no step so far left CartPole-v1's limits.
        """
        x, x_dot, theta, theta_dot = self.state.unbind(1)
        force = 20.0 * actions - 10.0  # N
        sin, cos = theta.sin(), theta.cos()
        # Cart 1 kg, pole 0.1 kg, half its length 0.5 m, g = 9.8 m/s², Euler steps of 0.02 s; Gymnasium's names.
        temp = (force + 0.05 * theta_dot.square() * sin) / 1.1
        theta_acc = (9.8 * sin - cos * temp) / (0.5 * (4.0 / 3.0 - 0.1 * cos.square() / 1.1))
        x_acc = temp - 0.05 * theta_acc * cos / 1.1
        x, x_dot = x + 0.02 * x_dot, x_dot + 0.02 * x_acc
        theta, theta_dot = theta + 0.02 * theta_dot, theta_dot + 0.02 * theta_acc
        theta = torch.remainder(theta + math.pi, 2 * math.pi) - math.pi
        self.state = torch.stack([x.clamp(-X_LIMIT, X_LIMIT), x_dot, theta, theta_dot], dim=1)
        self.t += 1

        obs = self.state.float()
        rewards = ground_truth_reward(obs)
        self.success &= rewards > 0
        terminations = torch.zeros_like(self.success)  # no state is terminal
        truncations = torch.full_like(self.success, self.t >= self.episode_length)
        return obs, rewards, terminations, truncations, {"success": self.success}


def ground_truth_reward(states: torch.Tensor) -> torch.Tensor:
    """States (N, 4) -> 1.0 within CartPole-v1's limits, else 0.0 (N,): Gymnasium's reward, which there ends with the episode."""
    return ((states[:, 0].abs() < X_LIMIT) & (states[:, 2].abs() <= THETA_LIMIT)).float()  # a clipped x was outside


def overlap(position: torch.Tensor, half: float, pixel: torch.Tensor | float) -> torch.Tensor:
    """Share of a pixel, `pixel` wide and centred at `position`, that lies within [-half, half]: exact anti-aliasing in 1-D."""
    return ((position + pixel / 2).clamp(max=half) - (position - pixel / 2).clamp(min=-half)).clamp(min=0) / pixel


def draw(states: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """States (N, 4) -> frames (N, 3, height, width) uint8 on the same device: the scene squashed to that size."""
    x, theta = states[:, 0, None, None].float(), states[:, 2, None, None].float()  # (N, 1, 1)
    pixel_x, pixel_y = SCREEN_WIDTH / width, SCREEN_HEIGHT / height
    columns = (torch.arange(width, device=states.device) + 0.5) * pixel_x - 0.5  # a pixel's centre is an integer there
    rows = SCREEN_HEIGHT - 0.5 - (torch.arange(height, device=states.device) + 0.5) * pixel_y
    top = int((SCREEN_HEIGHT - 230) / pixel_y)  # above, all is white wherever the pole points
    dx, dy = columns - (125 * x + 300), rows[top:, None] - 107.5  # from the axle: (N, 1, width), (height - top, 1)

    # Coverage of each pixel by each part; the sizes are Gymnasium's plus the half pixel that its polygon filling adds.
    cart = overlap(dx, 25.5, pixel_x) * overlap(dy + 7.5, 15.5, pixel_y)
    track = overlap(dy + 7.5, 0.5, pixel_y)
    axle = ((5.5 - (dx.square() + dy.square()).sqrt()) / math.sqrt(pixel_x * pixel_y) + 0.5).clamp(0, 1) * (1 - track)
    sin, cos = theta.sin(), theta.cos()
    across, along = cos * dx - sin * dy, sin * dx + cos * dy - 57.5  # in the pole's frame, from its middle
    pixel_across, pixel_along = torch.hypot(cos * pixel_x, sin * pixel_y), torch.hypot(sin * pixel_x, cos * pixel_y)
    pole = overlap(across, 5.5, pixel_across) * overlap(along, 63, pixel_along) * (1 - track) * (1 - axle)
    white = (1 - cart) * (1 - track) * (1 - pole - axle)

    shares = torch.stack([white, pole, axle])  # (3 parts, N, height - top, width)
    pixels = torch.einsum("pnhw,pc->nchw", shares, torch.tensor(COLORS, dtype=torch.float32, device=states.device))
    frames = torch.full((len(states), 3, height, width), 255, dtype=torch.uint8, device=states.device)
    frames[:, :, top:] = pixels.round_().clamp_(0, 255).to(torch.uint8)
    return frames


# ---- Replay buffer and network


class ReplayBuffer:
    """A ring of labelled transitions in preallocated tensors on the device.

    There is no "done": the value of every next state is bootstrapped. An episode only ever ends by its time limit, which is no
    property of the state. (The paper's code treats the last step as terminal, although the agent cannot see the time.)
    """

    FIELDS = ("obs", "next_obs", "actions", "rewards")

    def __init__(self, capacity: int, device: torch.device):
        self.capacity, self.device = capacity, device
        # Empty, not zeros: on a CPU memory is taken only as the buffer fills.
        self.obs = torch.empty(capacity, STATE_SIZE, device=device)
        self.next_obs = torch.empty(capacity, STATE_SIZE, device=device)
        self.actions = torch.empty(capacity, dtype=torch.int64, device=device)
        self.rewards = torch.empty(capacity, device=device)
        self.pos = self.size = 0  # next place to write; transitions held

    def add(self, *transitions: torch.Tensor) -> None:
        """Append N transitions: obs (N, 4), next_obs (N, 4), actions (N,), rewards (N,)."""
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


class QNetwork(nn.Sequential):
    """Observations (N, 4) -> action values (N, 2)."""

    def __init__(self):
        super().__init__(nn.Linear(STATE_SIZE, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, NUM_ACTIONS))


# ---- Labelling


class Labeller:
    """States -> CLIP rewards, batch by batch, by the threads of `pool` and, while it waits for them, the one that asks for the result.

    On a CPU one thread a core, with PyTorch's operations on one thread each, is faster than PyTorch's own threads: most operations
    here are small. The batches, and so the rewards, are the same whoever labels them.
    """

    def __init__(self, reward_model: CLIPReward, args: Args, pool: ThreadPoolExecutor):
        self.reward_model, self.batch_size, self.pool = reward_model, args.clip_batch_size, pool
        self.batches, self.rest = [], torch.empty(0, STATE_SIZE, device=reward_model.device)

    def submit(self, states: torch.Tensor) -> None:
        """Take in states (N, 4); a batch begins when it is full and more come."""
        *full, self.rest = torch.cat([self.rest, states]).split(self.batch_size)
        self.batches += [(self.pool.submit(self.label, batch), batch) for batch in full]

    @torch.no_grad()
    def label(self, states: torch.Tensor) -> tuple[torch.Tensor, float, float]:
        """States (N, 4) -> rewards (N,), seconds spent drawing, and scoring."""
        start = time.perf_counter()
        frames = draw(states, *self.reward_model.size)  # (N, 3, height, width) uint8, never stored
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
def evaluate(q_network: QNetwork, labeller: Labeller, args: Args) -> tuple[dict, torch.Tensor, torch.Tensor]:
    """Play `args.episodes` episodes without exploration -> metrics, states (episode_length, episodes, 4), their CLIP rewards."""
    envs = CartPole(args.episodes, args.episode_length, labeller.reward_model.device)
    obs, _ = envs.reset(seed=(args.seed + 1) * 1_000_000)  # start states that no training sees, and no other seed
    states = []
    for _ in range(args.episode_length):
        obs, _, _, _, infos = envs.step(q_network(obs).argmax(dim=1))
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


def picture(states: torch.Tensor, rewards: torch.Tensor) -> Image.Image:
    """States (T, N, 4) and their rewards (T, N) -> a contact sheet: eight frames of an episode a row, with step and CLIP reward."""
    width, height = 200, 150
    steps = torch.linspace(0, len(states) - 1, 8).round().long().to(states.device)
    frames = draw(states[steps].transpose(0, 1).flatten(0, 1), height - 26, width - 4)
    sheet = Image.new("RGB", (8 * width, states.shape[1] * height), "gray")
    pen = ImageDraw.Draw(sheet)
    for n, frame in enumerate(frames.permute(0, 2, 3, 1).cpu().numpy()):
        row, k = divmod(n, 8)
        sheet.paste(Image.fromarray(frame), (k * width + 2, row * height + 2))
        text = f"step {steps[k] + 1}   reward {rewards[steps[k], row]:.3f}"
        pen.text((k * width + 20, row * height + height - 20), text, "white", ImageFont.load_default(14))
    return sheet


def write_video(path: Path, states: torch.Tensor, rewards: torch.Tensor) -> None:
    """States (T, N, 4) and rewards (T, N) -> the N episodes one after another as an mp4, each frame with its CLIP reward."""
    temporary = path.with_suffix(".tmp.mp4")
    try:
        with iio.imopen(temporary, "w", plugin="pyav") as file:
            file.init_video_stream("libx264", fps=50)  # real time: a step is 0.02 s
            for episode in range(states.shape[1]):
                for state, reward in zip(states[:, episode].split(1), rewards[:, episode]):
                    frame = Image.fromarray(draw(state, 400, 600)[0].permute(1, 2, 0).cpu().numpy())
                    text = f"episode {episode + 1}   CLIP reward {reward:.3f}"
                    ImageDraw.Draw(frame).text((10, 10), text, "black", ImageFont.load_default(20))
                    file.write_frame(np.asarray(frame))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def report_evaluation(path: Path, args: Args, metrics: dict, states: torch.Tensor, rewards: torch.Tensor) -> Image.Image:
    """Write an evaluation to path.json, path.mp4 and path.png and print its table -> the picture."""
    versions = {name: version(name) for name in ("torch", "open_clip_torch")}
    sheet = picture(states[:, :4], rewards[:, :4])
    write_video(Path(f"{path}.mp4"), states[:, :3], rewards[:, :3])
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
        if checkpoint["script"] != SCRIPT or ("q_network" if args.evaluate else "rngs") not in checkpoint:
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


def random_share(step: int, args: Args) -> float:
    """The ε of ε-greedy after so many steps."""
    decayed = step / max(1, args.exploration_fraction * args.total_timesteps)
    return 1.0 if step < args.learning_starts else max(args.end_e, args.start_e + (args.end_e - args.start_e) * decayed)


@torch.no_grad()
def act(
    q_network: QNetwork, envs: CartPole, labeller: Labeller, rng: torch.Generator, step: int, args: Args
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """One episode in all environments at once, ε-greedily; the labeller gets the states as they come.

    -> obs (episode_length + 1, num_envs, 4), actions (episode_length, num_envs), success (num_envs,), seconds.
    """
    start = time.perf_counter()
    obs, _ = envs.reset()
    all_obs, all_actions = [obs], []
    for _ in range(args.episode_length):
        explore = torch.rand(envs.num_envs, generator=rng, device=obs.device) < random_share(step, args)
        random_actions = torch.randint(NUM_ACTIONS, (envs.num_envs,), generator=rng, device=obs.device)
        actions = torch.where(explore, random_actions, q_network(obs).argmax(dim=1))
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
    q_network, target_network = QNetwork().to(device), QNetwork().to(device)
    target_network.load_state_dict(q_network.state_dict())
    if args.evaluate:
        q_network.load_state_dict(checkpoint["q_network"])
        path = args.evaluate.with_name(f"{args.evaluate.stem}_evaluation")
        report_evaluation(path, args, *evaluate(q_network, labeller, args))
        return
    optimizer = torch.optim.Adam(q_network.parameters(), lr=args.learning_rate, fused=True)
    rb = ReplayBuffer(max(args.buffer_size, args.num_envs * args.episode_length), device)
    envs = CartPole(args.num_envs, args.episode_length, device)
    envs.reset(seed=args.seed)
    rngs = {"act": torch.Generator(device), "sample": torch.Generator(device)}
    for k, rng in enumerate(rngs.values(), 1):
        rng.manual_seed(args.seed + 1_000 * k)
    rngs["envs"] = envs.rng
    global_step, best_return, updates, training_seconds = 0, -math.inf, 0, 0.0
    parts = {"q_network": q_network, "target_network": target_network, "optimizer": optimizer, "rb": rb}

    def save_checkpoint() -> None:
        """All that the rest of the run depends on between two rounds: a resumed run is the unbroken one, bit for bit on a CPU."""
        counters = {"global_step": global_step, "best_return": best_return, "updates": updates}
        content = {"script": SCRIPT, "settings": args.to_save(), "training_seconds": training_seconds} | counters
        content |= {"rngs": {name: rng.get_state() for name, rng in rngs.items()}}
        save(args.run_dir / "checkpoint.pt", content | {name: part.state_dict() for name, part in parts.items()})

    if args.track:
        import wandb

        name = args.run_dir.name
        wandb.init(project=args.wandb_project_name, id=name, config=args.to_save(), resume="allow", sync_tensorboard=True)
    if args.resume:
        global_step, best_return = checkpoint["global_step"], checkpoint["best_return"]
        updates, training_seconds = checkpoint["updates"], checkpoint["training_seconds"]
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
        played = deepcopy(q_network)
        acting = pool.submit(act, played, envs, labeller, rngs["act"], step_before, args)

        # ---- Learn: DQN, on the transitions of the rounds before.
        for _ in range(args.gradient_steps if learning else 0):
            b_obs, b_next_obs, b_actions, b_rewards = rb.sample(args.batch_size, rngs["sample"])
            with torch.no_grad():  # every next state bootstraps: see ReplayBuffer
                td_target = b_rewards + args.gamma * target_network(b_next_obs).max(dim=1).values
            q_values = q_network(b_obs).gather(1, b_actions[:, None]).squeeze(1)
            td_loss = F.smooth_l1_loss(q_values, td_target)
            optimizer.zero_grad()
            td_loss.backward()
            nn.utils.clip_grad_norm_(q_network.parameters(), 10)  # Stable-Baselines3's default
            optimizer.step()
            updates += 1
            if updates % args.target_network_frequency == 0:
                target_network.load_state_dict(q_network.state_dict())
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
            save(args.run_dir / "best.pt", best | {"q_network": played.state_dict()})
        elapsed = time.perf_counter() - start
        training_seconds += elapsed
        progress.update(min(global_step, args.total_timesteps) - progress.n)
        progress.set_postfix(clip_return=f"{clip_return:.1f}", success=f"{success_rate:.2f}")
        scalars = {"charts/clip_return": clip_return, "charts/ground_truth_return": ground_truth_return}
        scalars |= {"charts/success_rate": success_rate, "charts/epsilon": random_share(step_before, args)}
        scalars |= {"charts/SPS": (global_step - step_before) / elapsed}
        scalars |= {f"seconds_per_round/{phase}": value for phase, value in seconds.items()}
        if learning:
            scalars |= {"losses/td_loss": td_loss.item(), "losses/q_values": q_values.mean().item()}
        for name, value in scalars.items():
            writer.add_scalar(name, value, global_step)
        if step_before == 0 or step_before < args.total_timesteps / 2 <= global_step:
            first = clip_rewards.view(args.episode_length, args.num_envs)[:, :1]
            sheet = picture(all_obs[1:, :1], first)  # the first environment's
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
    last = deepcopy(best | {"q_network": q_network.state_dict(), "global_step": global_step})
    evaluations = []
    for policy in (best, last):
        q_network.load_state_dict(policy["q_network"])
        evaluations.append(evaluate(q_network, labeller, args))
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
