"""CartPole learned from one sentence: DQN whose only reward is a CLIP model's opinion of the frame.

    python dqn_clip_cartpole.py --prompt "pole vertically upright on top of the cart"

VLM-RM (Rocamonde et al., ICLR 2024, arXiv 2310.12921), its Algorithm 1 with DQN (Mnih et al., 2015). Read
it from top to bottom; the loop is in `train`, the reward in clip_reward.py.
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
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from PIL import Image, ImageDraw
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm, trange

from clip_reward import Labeller, RewardArgs, UsageError, make_reward


@dataclass
class Args(RewardArgs):
    """Teach CartPole with a sentence: DQN on a CLIP model's reward (in brackets: the paper's values)."""

    prompt: tuple[str, ...] = ("pole vertically upright on top of the cart",)  # the goal
    baseline_prompt: tuple[str, ...] = ("pole and cart",)  # the scene in general
    reward: Literal["clip", "ground-truth"] = "clip"  # ground truth: 1 while CartPole-v1 goes on
    seed: int = 1  # of weights, start states and exploration
    total_timesteps: int = 64_000  # of all environments (3,000,000)
    num_envs: int = 16  # side by side
    episode_length: int = 200  # steps; a round is one episode in every environment
    gradient_steps: int = 400  # updates a round
    learning_starts: int = 3_200  # steps; rounds that begin before are random (75,000)
    learning_rate: float = 5e-4  # of Adam, at first; it falls to 0 (2.3e-3, constant)
    buffer_size: int = 1_000_000  # transitions kept, in whole rounds
    gamma: float = 0.99  # discount factor
    n_step: int = 3  # rewards before the target network's value stands for the rest (1)
    tau: float = 0.01  # how far the target network follows an update (copied every 625 updates)
    batch_size: int = 128  # transitions per update (32)
    exploration_fraction: float = 0.25  # of all steps, over which ε falls from 1 to 0 (0.1), ...
    end_e: float = 0.05  # ... but not below this

    run_dir: str | None = None  # made anew (runs/SCRIPT__SEED__TIME)
    evaluate_every: int = 6_400  # steps between evaluations, which choose the best policy (64,000)
    episodes: int = 100  # of the final evaluation, or of --evaluate
    resume: str | None = None  # go on with the run in this folder, by its settings
    evaluate: str | None = None  # only evaluate this checkpoint, by its settings but for those named


# ---- Environment

X_LIMIT = 2.4  # m
THETA_LIMIT = math.radians(12)  # where, with X_LIMIT, the original CartPole-v1 ends an episode


class CartPole(CartPoleVectorEnv):
    """Gymnasium's CartPole-v1, many at once; as in the paper no episode ends early: that would tell the task.

    A state, which the agent observes: position x in m, its velocity, pole angle θ in rad (0: upright, > 0:
    right), its velocity. θ is wrapped to [-π, π), and x, but not its velocity, clipped.
    """

    def step(self, actions: np.ndarray) -> np.ndarray:
        """Actions (num_envs,) -> the states after them (num_envs, 4) float32."""
        super().step(actions)
        self.prev_done[:] = False  # or Gymnasium's next step would start these episodes anew
        self.state[0] = self.state[0].clip(-X_LIMIT, X_LIMIT)
        self.state[2] = (self.state[2] + math.pi) % (2 * math.pi) - math.pi
        return self.state.T.astype(np.float32)


class Worker:
    """Renders and rewards states on one device; the `Labeller` has one for each core or GPU."""

    def __init__(self, args: Args, device: torch.device, reward_model: nn.Module | None = None):
        self.reward_model = reward_model or make_reward(args, device)  # a CPU's workers share one

    @torch.no_grad()
    def label(self, states: torch.Tensor) -> torch.Tensor:
        """States (N, 4) -> rewards and ground-truth rewards (N, 2), on the CPU."""
        # (N, 3, height, width) uint8: like Gymnasium's, drawn from the states and never stored
        frames = render(states.to(self.reward_model.device), *self.reward_model.size)
        rewards = self.reward_model(frames)  # R(s): `CLIPReward.reward` in clip_reward.py
        return torch.stack([rewards.cpu(), ground_truth_reward(states)], dim=1)


# ---- Network, replay and update


class QNetwork(nn.Sequential):
    """Observations (N, 4) -> action values (N, 2)."""

    def __init__(self):
        super().__init__(
            nn.Linear(4, 256), nn.LayerNorm(256), nn.ReLU(),
            nn.Linear(256, 256), nn.LayerNorm(256), nn.ReLU(), nn.Linear(256, 2)
        )  # fmt: skip


def sample(buffer: tuple, args: Args) -> tuple:
    """Uniformly -> obs (B, 4), those n steps later, actions (B,), n-step returns (B,), γⁿ.

    There is no "done": every next state's value is bootstrapped. An episode ends by its time limit alone, no
    property of the state. (The paper's code makes the last step terminal; the agent cannot see the time.)
    """
    states, actions, rewards = buffer  # (rounds, T + 1, N, 4), (rounds, T, N) each
    rounds, steps, num_envs = rewards.shape
    starts = steps - args.n_step + 1  # nothing reaches beyond the end of an episode
    k = torch.randint(rounds * starts * num_envs, (args.batch_size,), device=rewards.device)
    i, t, n = k // (starts * num_envs), k // num_envs % starts, k % num_envs
    returns = sum(args.gamma**j * rewards[i, t + j, n] for j in range(args.n_step))  # of the states after
    return states[i, t, n], states[i, t + args.n_step, n], actions[i, t, n], returns, args.gamma**args.n_step


def dqn_update(
    q_network: QNetwork, target_network: QNetwork, optimizer: torch.optim.Adam, batch: tuple, args: Args
) -> dict:
    """One update by a batch of transitions -> what to log."""
    obs, next_obs, actions, n_step_return, discount = batch
    with torch.no_grad():  # every last state bootstraps: see `sample`
        td_target = n_step_return + discount * target_network(next_obs).max(dim=1).values
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
    """An episode in each environment, ε-greedily, on the CPU -> states (T + 1, N, 4), actions (T, N)."""
    obs, _ = envs.reset(seed=seed)
    rng = envs.np_random  # it has drawn the start states, and goes on here
    states = [torch.from_numpy(obs)]
    actions = []
    for _ in range(args.episode_length):
        explore = torch.from_numpy(rng.random(envs.num_envs) < epsilon)
        random_actions = torch.from_numpy(rng.integers(2, size=envs.num_envs))
        actions.append(torch.where(explore, random_actions, policy(states[-1]).argmax(dim=1)))
        states.append(torch.from_numpy(envs.step(actions[-1].numpy())))
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
    envs = CartPole(args.num_envs)
    torch.manual_seed(args.seed)
    q_network = QNetwork().to(device)
    target_network = deepcopy(q_network)  # q_network's running mean; unlike in DQN it acts, too
    optimizer = torch.optim.Adam(q_network.parameters(), lr=args.learning_rate, fused=True)
    a_round = args.num_envs * args.episode_length  # steps
    last_round = math.ceil(args.total_timesteps / a_round) - 1
    rounds = deque(maxlen=math.ceil(args.buffer_size / a_round))  # the newest; older ones drop out
    parts = {"policy": target_network, "q_network": q_network, "optimizer": optimizer}  # of a checkpoint
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
        epsilon = 1 - global_step / max(args.exploration_fraction * args.total_timesteps, 1)
        epsilon = 1.0 if warmup else max(args.end_e, epsilon)
        policy = deepcopy(target_network).cpu()
        playing = labeller.pool.submit(rollout, policy, epsilon, envs, labeller, play_seed, args)

        # ---- Learn, at the same time: DQN on the rounds before (the first has none).
        torch.manual_seed(learn_seed)
        learning_rate = args.learning_rate * (1 - global_step / args.total_timesteps)
        optimizer.param_groups[0] |= {"lr": learning_rate, "capturable": True}
        losses = defaultdict(list)
        if rounds and not warmup:
            states, actions, rewards = map(torch.stack, zip(*rounds))
            # Standardized: CLIP's rewards are nearly alike. Without early ends no best policy changes.
            rewards = (rewards - rewards.double().mean()) / (rewards.double().std(correction=0) + 1e-8)
            buffer = (states, actions, rewards)

            def update() -> dict:
                return dqn_update(q_network, target_network, optimizer, sample(buffer, args), args)

            if device.type == "cuda":
                from scale.cuda_graphs import replayed

                update = replayed(update, device)  # a CUDA graph, made anew each round
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
            _, evaluated = evaluate(target_network, args.num_envs, CHOOSE, labeller, args)
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
    load(f"{args.run_dir}/best.pt", Args, policy=target_network)
    write_result(f"{args.run_dir}/result", target_network, labeller, args)


# ==== Nothing below belongs to the method: success, rendering, evaluation, files, and the command line.


def ground_truth_reward(states: torch.Tensor) -> torch.Tensor:
    """States (N, 4) -> 1.0 within the limits where CartPole-v1 would go on, else 0.0 (N,)."""
    return ((states[:, 0].abs() < X_LIMIT) & (states[:, 2].abs() <= THETA_LIMIT)).float()


def summary(labels: torch.Tensor) -> dict[str, float]:
    """Labels (T, N, 2) -> means over N episodes; one succeeds if no step leaves the limits."""
    success = labels[:, :, 1].bool().all(0).float().mean().item()
    clip, truth = labels.sum(0).mean(0).tolist()
    return {"success_rate": success, "clip_return": clip, "ground_truth_return": truth}


def in_words(means: dict[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in means.items())


CHOOSE = 2**32  # of the seeds for choosing and reporting: no round's number
REPORT = 2**32 + 1


def evaluate(policy: nn.Module, episodes: int, purpose: int, labeller: Labeller, args: Args) -> tuple:
    """Play without exploration -> states (T, N, 4), labels (T, N, 2)."""
    seed = np.random.SeedSequence((args.seed, purpose, episodes)).generate_state(1).item()
    states, _ = rollout(deepcopy(policy).cpu(), 0.0, CartPole(episodes), labeller, seed, args)
    return states[1:], labeller.result().view(args.episode_length, episodes, -1)


# Gymnasium's frame, in whose pixels the scene is described: 125 a metre, the axle at (300 + 125 x,
# 107.5) from the lower left, cart 50 x 30, pole 10 x 125; below half of that, and half a pixel of outline.
SCREEN_WIDTH, SCREEN_HEIGHT = 600, 400
COLORS = ((255, 255, 255), (202, 152, 101), (129, 132, 203))  # background, pole, axle; else black


def overlap(position: torch.Tensor, half: float, pixel: torch.Tensor | float) -> torch.Tensor:
    """Share of a pixel, so wide, that a part of half width `half` covers, `position` away."""
    left = (position - pixel / 2).clamp(min=-half)
    right = (position + pixel / 2).clamp(max=half)
    return (right - left).clamp(min=0) / pixel


def render(states: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """States (N, 4) -> frames (N, 3, height, width) uint8: Gymnasium's, squashed."""
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
    axle = (inside / math.sqrt(pixel_x * pixel_y) + 0.5).clamp(0, 1)
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
    frames = torch.full((len(states), 3, height, width), 255, dtype=torch.uint8, device=states.device)
    frames[:, :, top:] = torch.stack(channels, dim=1).round().to(torch.uint8)
    return frames


def write_result(path: str, policy: nn.Module, labeller: Labeller, args: Args) -> None:
    """Evaluate; write path.json, and path.mp4 with three episodes and their rewards."""
    states, labels = evaluate(policy, args.episodes, REPORT, labeller, args)
    result = summary(labels)
    print(f"{args.episodes} episodes: {in_words(result)}; {path}.json, .mp4")
    Path(f"{path}.json").write_text(json.dumps(result | {"settings": asdict(args)}, indent=2))
    film = iio.imopen(f"{path}.mp4", "w", plugin="pyav")
    film.init_video_stream("libx264", fps=50)
    for n in range(min(3, args.episodes)):
        for t in range(args.episode_length):
            frame = render(states[t, n : n + 1], SCREEN_HEIGHT // 2, SCREEN_WIDTH // 2)[0]
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
        policy = QNetwork()
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
