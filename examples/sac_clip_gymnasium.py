"""Any Gymnasium environment with continuous actions, learned from one sentence and its own frames.

    python examples/sac_clip_gymnasium.py --env-id MountainCarContinuous-v0 --clip-model tiny \
        --prompt "a car at the peak of the mountain, next to the yellow flag"
    python examples/sac_clip_gymnasium.py --env-id Pusher-v5 --clip-model ViT-L-14/laion2b_s32b_b82k \
        --prompt "a robot arm touching a white cylinder"

Networks and update are those of sac_clip_humanoid.py. A process for each environment renders its frames and
shrinks them; they are rewarded while the round goes on, and dropped. The environment's own return and success
are logged and never learned from.

Who is paid for every frame avoids what ends an episode, even the goal, if nothing is earned afterwards. So a
terminal state counts as absorbing: it earns its R(s) for ever, R(s) + γ R(s) + γ² R(s) + … = R(s) / (1 - γ).
An episode that is cut short, by a limit or the round's end, has its last state's value bootstrapped. A round
is an episode of each environment, from `reset(seed=…)`; one that has ended stands still.
"""

import json
import math
import os
import sys
import time
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import gymnasium
import imageio.v3 as iio
import numpy as np
import torch
from gymnasium.spaces import Box, Dict
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import AddRenderObservation, FlattenObservation, RescaleAction
from PIL import Image, ImageOps
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm, trange

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
OPENGL = os.environ.get("MUJOCO_GL", "egl")
from clip_reward import Labeller, RewardArgs, UsageError, make_reward
from sac_clip_humanoid import CHOOSE, REPORT, SAC, in_words, load, read_settings, sac_update, save, squash

os.environ["MUJOCO_GL"] = OPENGL  # which the robot's script turns off, and Gymnasium's renderer needs


@dataclass
class Args(RewardArgs):
    """Teach an agent in a Gymnasium environment with a sentence: SAC on a CLIP model's reward."""

    env_id: str = ""  # as registered, or MODULE:NAME; its actions are a Box
    env_kwargs: str = "{}"  # for gymnasium.make, as JSON
    goal_baseline_alpha: float = 0.0  # α: 0 plain cosine
    terminal: Literal["absorbing", "plain"] = (
        "absorbing"  # what a terminal state earns: R(s) for ever, or once
    )
    pad: bool = False  # frames of other proportions than the model's are padded, not squashed
    vectorization: Literal["async", "sync"] = "async"  # a process for each environment, or one for all

    seed: int = 1  # of weights, environments and exploration
    total_timesteps: int = 100_000  # of all environments
    num_envs: int = 16  # side by side
    episode_length: int | None = None  # steps of a round (default: the environment's limit, at most 200)
    gradient_steps: int | None = None  # updates a round (default: one for eight steps)
    policy_frequency: int = 2  # updates of the critics for each of the actor
    learning_starts: int = 10_000  # steps; rounds that begin before are random
    learning_rate: float = 6e-4  # of Adam, at first; it falls to 0
    gamma: float | None = None  # discount factor (default: half a round ahead, 1 - 2 / episode_length)
    n_step: int = 3  # rewards before the critics' value stands for the rest
    tau: float = 0.005  # how far the targets and the mean actor follow at each update
    batch_size: int = 256  # transitions per update
    ent_coef: float = 0.03  # weight of the entropy, at first; tuned for -1 an action
    noise_correlation: float = 0.9  # of the exploration noise, from step to step

    run_dir: str | None = None  # made anew (runs/SCRIPT__SEED__TIME)
    evaluate_every: int = 10_000  # steps between evaluations, which choose the best policy
    episodes: int = 100  # of the final evaluation, or of --evaluate; rounded up to whole rounds
    resume: str | None = None  # go on with the run in this folder, by its settings
    evaluate: str | None = None  # only evaluate this checkpoint, by its settings but for those named

    def check(self) -> None:
        if not self.env_id or not self.prompt and not self.clip_model.endswith(".py"):
            raise UsageError("--env-id and --prompt must be given")
        limit = gymnasium.spec(self.env_id).max_episode_steps
        self.episode_length = self.episode_length or min(limit or 200, 200)
        self.gradient_steps = self.gradient_steps or self.episode_length * self.num_envs // 8
        self.gamma = self.gamma or 1 - 2 / self.episode_length
        super().check()


# ---- Environment


class Framed(gymnasium.Wrapper):
    """Observes "state", "pixels" as the model sees them (H, W, 3), and "end": 1 if the episode was cut short,
    2 if it ended. Then it stands still: to Gymnasium it goes on, and nothing is reset unasked."""

    def __init__(self, env: gymnasium.Env, size: tuple[int, int], pad: bool):
        super().__init__(env)
        self.fit = partial(ImageOps.pad if pad else Image.Image.resize, size=size[::-1])  # bicubic
        state = Box(-np.inf, np.inf, env.observation_space["state"].shape)
        pixels = Box(0, 255, (*size, 3), np.uint8)
        self.observation_space = Dict({"state": state, "pixels": pixels, "end": Box(0, 2, (), np.uint8)})

    def see(self, obs: dict, end: int) -> dict:
        pixels = np.asarray(self.fit(Image.fromarray(obs["pixels"])))
        self.seen = {"state": np.float32(obs["state"]), "pixels": pixels, "end": np.uint8(end)}
        return self.seen

    def reset(self, **how) -> tuple:
        obs, info = self.env.reset(**how)
        return self.see(obs, 0), info

    def step(self, action: np.ndarray) -> tuple:
        if self.seen["end"]:
            return self.seen, 0.0, False, False, self.info
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.info = {"success": float(info.get("success", info.get("is_success", math.nan)))}
        return self.see(obs, 2 if terminated else int(truncated)), reward, False, False, self.info


def make_envs(args: Args, size: tuple[int, int]) -> gymnasium.vector.VectorEnv:
    """-> `num_envs` environments with frames of this size (height, width), which nothing resets unasked."""
    kwargs = json.loads(args.env_kwargs)
    space = gymnasium.make(args.env_id, **kwargs).action_space
    if not isinstance(space, Box):
        raise UsageError(f"{args.env_id} has actions {space}: dqn_clip_cartpole.py is for discrete ones")
    see = partial(AddRenderObservation, render_only=False)
    scale = partial(RescaleAction, min_action=np.float32(-1), max_action=np.float32(1))
    wrappers = [FlattenObservation, see, partial(Framed, size=size, pad=args.pad), scale]
    how = {"vector_kwargs": {"autoreset_mode": AutoresetMode.DISABLED}, "wrappers": wrappers}
    return gymnasium.make_vec(
        args.env_id, args.num_envs, args.vectorization, render_mode="rgb_array", **how, **kwargs
    )


class Worker:
    """Rewards frames (N, 3, H, W) on one device; the `Labeller` has one for each core or GPU."""

    def __init__(self, args: Args, device: torch.device, reward_model: nn.Module | None = None):
        self.reward_model = reward_model or make_reward(args, device)

    def label(self, frames: torch.Tensor) -> torch.Tensor:
        return self.reward_model(frames)[:, None].cpu()


# ---- Replay


def stacked(rounds: list) -> tuple:
    """Rounds -> all, their rewards standardized, and the steps before the episodes' ends (K, 3): i, t, n."""
    *played, rewards = map(torch.stack, zip(*rounds))
    before = torch.arange(rewards.shape[1], device=rewards.device)[:, None] < played[2][:, None]
    kept = rewards[before].double()
    rewards = ((rewards - kept.mean()) / (kept.std(correction=0) + 1e-8)).float()
    return *played, rewards, before.nonzero()


def sample(buffer: tuple, args: Args) -> tuple:
    """Uniformly -> obs (B, O), those n steps later or at the end, actions (B, A), n-step returns (B,), and
    the weight of the last value (B,): γⁿ, or 0 at a terminal state, whose own worth the return holds."""
    states, actions, ends, terminated, rewards, steps = buffer
    i, t, n = steps[torch.randint(len(steps), (args.batch_size,), device=steps.device)].T
    left = ends[i, n] - t  # steps to the episode's end, which no window crosses
    size = left.clamp(max=args.n_step)
    k = torch.arange(args.n_step, device=steps.device)[:, None]
    between = rewards[i, (t + k).clamp(max=rewards.shape[1] - 1), n]
    returns = (args.gamma**k * torch.where(k < size, between, 0)).sum(0)
    weight = args.gamma**size
    terminal = terminated[i, n] & (left == size)
    if args.terminal == "absorbing":
        last = rewards[i, ends[i, n] - 1, n]  # R(s) of the terminal state
        returns += torch.where(terminal, weight * last / (1 - args.gamma), 0)
    return states[i, t, n], states[i, t + size, n], actions[i, t, n], returns, weight * ~terminal


# ---- The loop


@torch.no_grad()
def rollout(policy, noise_scale: float, envs, labeller: Labeller, seed: int, args: Args) -> tuple:
    """An episode of a policy, or at random -> a round: states (T + 1, N, O), actions (T, N, A), after how
    many steps each ended and if in a terminal state (N,); and means of what the environments tell."""
    rng = torch.Generator().manual_seed(seed)
    obs, _ = envs.reset(seed=seed)
    states = [torch.from_numpy(obs["state"])]
    actions = []
    ends = np.zeros(args.num_envs, int)
    own = {"success_rate": np.nan, "env_return": 0}
    noise = torch.randn(envs.action_space.shape, generator=rng)
    for _ in range(args.episode_length):
        fresh = torch.randn(noise.shape, generator=rng)
        noise = args.noise_correlation * noise + math.sqrt(1 - args.noise_correlation**2) * fresh
        if policy:
            action, _ = squash(*policy(states[-1]), noise_scale * noise)
        else:
            action = torch.erf(noise / math.sqrt(2))  # the normal's distribution: uniform in [-1, 1]
        ends += obs["end"] == 0
        obs, reward, _, _, info = envs.step(action.numpy())
        labeller.add(torch.from_numpy(obs["pixels"]).permute(0, 3, 1, 2))
        actions.append(action)
        states.append(torch.from_numpy(obs["state"]))
        own["env_return"] += reward
        own["success_rate"] = np.fmax(own["success_rate"], info["success"])  # once is enough
    states = torch.stack(states)
    if not states.isfinite().all():
        raise UsageError(f"{args.env_id} observed what is not finite")
    played = states, torch.stack(actions), torch.from_numpy(ends), torch.from_numpy(obs["end"] == 2)
    own = {name: np.mean(values) for name, values in own.items()}
    return played, {name: float(mean) for name, mean in own.items() if not np.isnan(mean)}


def train(args: Args, labeller: Labeller, envs, sac: SAC) -> None:
    """As in sac_clip_humanoid.py: a round is played and rewarded while those before are learned from."""
    optimizers = sac.optimizers(args.learning_rate)
    a_round = args.num_envs * args.episode_length  # steps
    last_round = math.ceil(args.total_timesteps / a_round) - 1
    rounds = []
    parts = {"policy": sac.policy, "sac": sac, **optimizers}  # of a checkpoint
    global_step, best_return = 0, -math.inf
    if args.resume:
        kept = load(f"{args.run_dir}/checkpoint.pt", Args, **parts)
        global_step, best_return = kept["step"], kept["best_return"]
        files = [f"{args.run_dir}/rounds/{k}.pt" for k in range(global_step // a_round)]
        rounds = [torch.load(file, map_location=labeller.device)["round"] for file in files]
    else:
        os.makedirs(f"{args.run_dir}/rounds")

    def checkpoint(name: str) -> None:
        content = {name: part.state_dict() for name, part in parts.items()}
        about = {"script": Path(__file__).stem, "settings": asdict(args)}
        save(f"{args.run_dir}/{name}", step=global_step, best_return=best_return, **about, **content)

    checkpoint("checkpoint.pt")
    writer = SummaryWriter(args.run_dir, purge_step=global_step + 1)
    for k in trange(len(rounds), last_round + 1, unit="round", disable=None):
        started = time.perf_counter()
        warmup = global_step < args.learning_starts
        play_seed, learn_seed = np.random.SeedSequence((args.seed, k)).generate_state(2).tolist()

        # ---- Act, in a thread, with the policy as it is now.
        policy = None if warmup else deepcopy(sac.policy).cpu()
        playing = labeller.pool.submit(rollout, policy, 1.0, envs, labeller, play_seed, args)

        # ---- Learn, at the same time.
        torch.manual_seed(learn_seed)
        learning_rate = args.learning_rate * (1 - global_step / args.total_timesteps)
        for optimizer in optimizers.values():
            optimizer.param_groups[0] |= {"lr": learning_rate, "capturable": True}
        losses = {}  # of the last updates
        if rounds and not warmup:
            buffer = stacked(rounds)
            for i in range(args.gradient_steps):
                actor_too = i % args.policy_frequency == 0
                losses |= sac_update(sac, optimizers, sample(buffer, args), actor_too, args)

        # ---- Label what is left, and report.
        played, own = playing.result()
        rewards = labeller.result().view(args.episode_length, args.num_envs)
        rounds.append([part.to(labeller.device) for part in (*played, rewards)])
        sac.obs_norm.update(rounds[-1][0].flatten(0, 1))
        save(f"{args.run_dir}/rounds/{k}.pt", round=(*played, rewards))
        global_step += a_round
        own["clip_return"] = rewards.sum(0).mean().item()
        scalars = {f"charts/{name}": value for name, value in own.items()}
        scalars |= {f"losses/{name}": value.item() for name, value in losses.items()}
        scalars["charts/SPS"] = a_round / (time.perf_counter() - started)
        if not all(map(math.isfinite, scalars.values())):
            raise UsageError("losses are not finite: --resume with a lower --learning-rate")
        if global_step % args.evaluate_every < a_round or k == last_round:
            means = evaluate(sac.policy, args.num_envs, CHOOSE, envs, labeller, args)
            tqdm.write(f"step {global_step:,} of {args.total_timesteps:,}: {in_words(means)}")
            scalars |= {f"evaluation/{name}": value for name, value in means.items()}
            best_return = max(best_return, means["clip_return"])
            if means["clip_return"] >= best_return - 0.001 * abs(best_return):
                checkpoint("best.pt")
        for name, value in scalars.items():
            writer.add_scalar(name, value, global_step)
        writer.flush()
        checkpoint("checkpoint.pt")

    writer.close()
    load(f"{args.run_dir}/best.pt", Args, policy=sac.policy)
    write_result(f"{args.run_dir}/result", sac.policy, envs, labeller, args)


def evaluate(policy: nn.Module, episodes: int, purpose: int, envs, labeller: Labeller, args: Args) -> dict:
    """Whole rounds without exploration, until there are so many episodes -> their means."""
    found = []
    for k in range(math.ceil(episodes / args.num_envs)):
        seed = np.random.SeedSequence((args.seed, purpose, k)).generate_state(1).item()
        _, own = rollout(deepcopy(policy).cpu(), 0.0, envs, labeller, seed, args)
        found.append(own | {"clip_return": labeller.result().sum().item() / args.num_envs})
    return {name: float(np.mean([means[name] for means in found])) for name in found[0]}


def write_result(path: str, policy: nn.Module, envs, labeller: Labeller, args: Args) -> None:
    """Evaluate; write path.json, and path.mp4 with an episode as the environment renders it."""
    means = evaluate(policy, args.episodes, REPORT, envs, labeller, args)
    print(f"{args.episodes} episodes or a few more: {in_words(means)}; {path}.json, .mp4")
    Path(f"{path}.json").write_text(json.dumps(means | {"settings": asdict(args)}, indent=2))
    env = gymnasium.make(args.env_id, render_mode="rgb_array", **json.loads(args.env_kwargs))
    env = RescaleAction(FlattenObservation(env), np.float32(-1), np.float32(1))
    policy = deepcopy(policy).cpu()
    obs, _ = env.reset(seed=args.seed)
    with iio.imopen(f"{path}.mp4", "w", plugin="pyav") as film:
        film.init_video_stream("libx264", fps=30)
        for _ in range(args.episode_length):
            action = policy(torch.from_numpy(np.float32(obs))[None])[0].tanh()[0]
            obs, _, terminated, truncated, _ = env.step(action.detach().numpy())
            image = Image.fromarray(env.render())
            film.write_frame(np.asarray(image.crop((0, 0, image.width // 2 * 2, image.height // 2 * 2))))
            if terminated or truncated:
                break
    env.close()


def main() -> None:
    args = read_settings(Args)
    labeller = Labeller(Worker, args)
    envs = make_envs(args, labeller.reward_model.size)
    torch.manual_seed(args.seed)
    sizes = envs.single_observation_space["state"].shape[0], envs.single_action_space.shape[0]
    sac = SAC(*sizes, args).to(labeller.device)
    try:
        if args.evaluate:
            load(args.evaluate, Args, policy=sac.policy)
            write_result(f"{args.evaluate.removesuffix('.pt')}_evaluation", sac.policy, envs, labeller, args)
        else:
            print(f"{args.total_timesteps:,} steps; run folder {args.run_dir}")
            train(args, labeller, envs, sac)
    finally:
        envs.close(terminate=True)


if __name__ == "__main__":
    try:
        main()
    except (UsageError, OSError, EOFError, ImportError, TypeError, gymnasium.error.Error) as error:
        print(f"error: {' '.join(str(error).split()) or 'an environment has died'}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        os._exit(130)  # at once
