"""A humanoid robot learned from one sentence: SAC whose only reward is a CLIP model's opinion of the frame.

    python sac_clip_humanoid.py --prompt "a humanoid robot kneeling"

VLM-RM (Rocamonde et al., ICLR 2024, arXiv 2310.12921), its Algorithm 1 with SAC (Haarnoja et al., 2018). Read
it from top to bottom; the loop is in `train`, the reward in clip_reward.py.

C MuJoCo moves the robots, mujoco_warp renders them, without OpenGL or a display.
"""

import io
import json
import math
import os
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Literal

os.environ["MUJOCO_GL"] = "disable"  # or a library that is not there fails the import

import gymnasium
import imageio.v3 as iio
import mujoco
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from PIL import Image, ImageDraw
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm, trange

from clip_reward import THREADS, Labeller, RewardArgs, UsageError, make_reward

Task = Literal[
    "kneeling", "lotus-position", "standing-up", "arms-raised", "doing-splits", "hands-on-hips",
    "arms-crossed", "standing-on-one-leg"
]  # fmt: skip


@dataclass
class Args(RewardArgs):
    """Teach a humanoid with a sentence: SAC on a CLIP model's reward (in brackets: the paper's values)."""

    prompt: tuple[str, ...] | None = None  # the goal (default: that of --task)
    task: Task | None = None  # whose success is measured (default: the prompt's)
    baseline_prompt: tuple[str, ...] = ("a humanoid robot",)  # the scene in general
    goal_baseline_alpha: float = 0.0  # α: 0 plain cosine (as in Table 1)
    textures: Literal["realistic", "original"] = "realistic"  # plastic and metal, or Gymnasium's
    camera: Literal["fixed", "original"] = "fixed"  # the paper's, or Gymnasium's, which follows
    supersample: int = 1  # N: N x N rays a pixel of what CLIP sees
    reward: Literal["clip", "ground-truth"] = "clip"  # ground truth: the task's condition

    seed: int = 1  # of weights, start states and exploration
    total_timesteps: int = 128_000  # of all environments (10,000,000)
    num_envs: int = 16  # side by side (32)
    episode_length: int = 100  # steps of 15 ms; a round is one episode in every environment
    gradient_steps: int = 200  # updates a round (100)
    policy_frequency: int = 2  # updates of the critics for each of the actor (1)
    learning_starts: int = 6_400  # steps; rounds that begin before are random (50,000)
    learning_rate: float = 6e-4  # of Adam, at first; it falls to 0 (constant)
    buffer_size: int = 1_000_000  # transitions kept, in whole rounds
    gamma: float = 0.98  # discount factor: some 50 steps ahead (0.95: 20)
    n_step: int = 3  # rewards before the critics' value stands for the rest (1)
    tau: float = 0.005  # how far the targets and the mean actor follow at each update
    batch_size: int = 256  # transitions per update (512)
    ent_coef: float = 0.03  # weight of the entropy, at first; tuned for -17, -1 a motor (1.0)
    noise_correlation: float = 0.9  # of the exploration noise, from step to step (0)

    run_dir: str | None = None  # made anew (runs/SCRIPT__SEED__TIME)
    evaluate_every: int = 16_000  # steps between evaluations, which choose the best policy (64,000)
    episodes: int = 100  # of the final evaluation, or of --evaluate
    resume: str | None = None  # go on with the run in this folder, by its settings
    evaluate: str | None = None  # only evaluate this checkpoint, by its settings but for those named

    def __post_init__(self):
        if self.ent_coef <= 0:
            raise UsageError("--ent-coef must be above 0: its logarithm is learned")
        self.prompt = self.prompt or (TASKS[self.task or "kneeling"][0],)
        for task, (prompt, _) in TASKS.items():
            if self.task is None and self.prompt == (prompt,):
                self.task = task


# ---- Environment

POSE_SIZE = 24  # a state's first 24 numbers are the pose, all that a frame shows
ACTION_SIZE = 17  # motors
MAX_CTRL = 0.4  # the motors' control goes from -0.4 to 0.4, actions from -1 to 1


class Humanoids(gymnasium.vector.SyncVectorEnv):
    """Gymnasium's Humanoid-v5, many at once; as in the paper no episode ends early: that would tell the task.

    A state is MuJoCo's qpos, the pose (position in m and quaternion of the torso, 17 joint angles in rad),
    qvel, 23 speeds, and cinert, the inertia of its bodies about the centre of mass, which tells where the
    limbs are. The agent does not see the first two numbers, the place on the floor.
    """

    def __init__(self, num_envs: int):
        left_out = ("cvel_in_observation", "qfrc_actuator_in_observation", "cfrc_ext_in_observation")
        options = {f"include_{name}": False for name in left_out}
        options["exclude_current_positions_from_observation"] = False
        super().__init__([lambda: gymnasium.make("Humanoid-v5", **options)] * num_envs)
        self.pool = ThreadPoolExecutor(min(THREADS, 8))  # more than 8 were slower on 16 cores

    def step(self, actions: np.ndarray) -> np.ndarray:
        """Controls (num_envs, 17) -> the states after them; MuJoCo's C code lets other threads run."""

        def move(env: gymnasium.Env, action: np.ndarray) -> np.ndarray:
            env.unwrapped.do_simulation(action, env.unwrapped.frame_skip)
            return env.unwrapped._get_obs()

        return np.stack([*self.pool.map(move, self.envs, actions)])


class Worker:
    """Renders and rewards states on one device; the `Labeller` has one for each core or GPU."""

    def __init__(self, args: Args, device: torch.device, reward_model: nn.Module | None = None):
        self.reward_model = reward_model or make_reward(args, device)  # a CPU's workers share one
        look = (args.textures, args.camera, args.supersample)
        self.scene = Scene(*self.reward_model.size, *look, args.clip_batch_size, device)
        self.condition = TASKS[args.task][1] if args.task else lambda points: torch.nan * points["head"][:, 0]

    @torch.no_grad()
    def label(self, poses: torch.Tensor) -> torch.Tensor:
        """Poses (N, 24) -> rewards, and 1 where the condition holds, else 0 (N, 2), on the CPU."""
        frames, points = self.scene.render(poses)  # (N, 3, height, width) uint8, never stored
        rewards = self.reward_model(frames)  # R(s): `CLIPReward.reward` in clip_reward.py
        return torch.stack([rewards.cpu(), self.condition(points).float().cpu()], dim=1)


# ---- Replay buffer


class ReplayBuffer:
    """The newest rounds, played and rewarded, in preallocated tensors on the learner's device.

    There is no "done": every next state's value is bootstrapped. Only time ends an episode.
    """

    def __init__(self, state_size: int, args: Args, device: torch.device):
        steps, num_envs = args.episode_length, args.num_envs
        self.capacity = math.ceil(min(args.buffer_size, args.total_timesteps) / (steps * num_envs))  # rounds
        shape = (self.capacity, steps, num_envs)
        self.states = torch.zeros(self.capacity, steps + 1, num_envs, state_size, device=device)
        self.actions = torch.zeros(*shape, ACTION_SIZE, device=device)
        self.rewards = torch.zeros(shape, device=device)
        self.rounds = 0  # taken in so far

    def add(self, states: torch.Tensor, actions: torch.Tensor, rewards: torch.Tensor) -> None:
        """Take in a round, over the oldest: states (T + 1, N, S), actions (T, N, 17), rewards (T, N)."""
        i = self.rounds % self.capacity
        self.states[i] = states
        self.actions[i] = actions
        self.rewards[i] = rewards
        self.rounds += 1
        kept = self.rewards[: self.rounds].double()  # so that equal rewards come out as 0
        self.mean = kept.mean()
        self.std = kept.std(correction=0) + 1e-8

    def sample(self, args: Args) -> tuple:
        """Uniformly -> obs (B, S - 2), those n steps later, actions (B, 17), n-step returns (B,), γⁿ.

        Rewards are standardized: CLIP's are nearly alike. Without early ends no best policy changes.
        """
        steps, num_envs = self.rewards.shape[1:3]
        starts = steps - args.n_step + 1  # nothing reaches beyond the end of an episode
        size = min(self.rounds, self.capacity) * starts * num_envs
        k = torch.randint(size, (args.batch_size,), device=self.rewards.device)
        i, t, n = k // (starts * num_envs), k // num_envs % starts, k % num_envs
        between = [(self.rewards[i, t + j, n] - self.mean) / self.std for j in range(args.n_step)]
        n_step_return = sum(args.gamma**j * reward for j, reward in enumerate(between))
        obs, next_obs = (self.states[i, at, n][:, 2:] for at in (t, t + args.n_step))
        return obs, next_obs, self.actions[i, t, n], n_step_return, args.gamma**args.n_step


# ---- Networks and update


class Normalize(nn.Module):
    """Values (N, size) -> scaled by mean and variance of all that `update` has seen, cut to ±10."""

    def __init__(self, size: int):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("var", torch.ones(size))

    def update(self, values: torch.Tensor) -> None:
        values = values.double()  # or the variance of what hardly varies would be lost to rounding
        share = len(values) / (self.count + len(values))
        delta = values.mean(0) - self.mean
        within = (1 - share) * self.var + share * values.var(0, correction=0)
        self.var.copy_(within + share * (1 - share) * delta.square())  # Chan et al.'s parallel variance
        self.mean.add_(share * delta)
        self.count.add_(len(values))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return ((values - self.mean) * (self.var + 1e-8).rsqrt()).clamp(-10, 10)


class SoftQNetwork(nn.Sequential):
    """Normalized observations (N, O) and actions (N, A) -> action values (N,)."""

    def __init__(self, obs_size: int, action_size: int):
        super().__init__(
            nn.Linear(obs_size + action_size, 256), nn.LayerNorm(256), nn.ReLU(),
            nn.Linear(256, 256), nn.LayerNorm(256), nn.ReLU(), nn.Linear(256, 1)
        )  # fmt: skip

    def forward(self, obs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.cat([obs, actions], dim=1)).squeeze(1)


class Critics(nn.ModuleList):
    """Two critics, asked at once: observations and actions -> action values (2, N)."""

    def forward(self, obs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        return torch.stack([critic(obs, actions) for critic in self])


class Actor(nn.Sequential):
    """Normalized observations (N, O) -> mean and log σ (N, A) of a Gaussian, whose tanh acts."""

    def __init__(self, obs_size: int, action_size: int):
        super().__init__(
            nn.Linear(obs_size, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(),
            nn.Linear(256, 2 * action_size)
        )  # fmt: skip

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_std = super().forward(obs).chunk(2, dim=1)
        return mean, log_std.clamp(-5, 2)  # a floor for exploration (-20)


def squash(mean: torch.Tensor, log_std: torch.Tensor, noise: torch.Tensor) -> tuple:
    """A Gaussian and standard normal noise (N, A) -> tanh of its sample, and log probability (N,)."""
    raw = mean + log_std.exp() * noise
    log_prob = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    log_prob -= 2 * (math.log(2) - raw - F.softplus(-2 * raw))  # log of tanh's slope, without underflow
    return raw.tanh(), log_prob.sum(1)


class SAC(nn.Module):
    """All that is learned, with the running means and the observations' scale."""

    def __init__(self, obs_size: int, action_size: int, args: Args):
        super().__init__()
        self.obs_norm = Normalize(obs_size)
        self.actor = Actor(obs_size, action_size)
        self.critics = Critics(SoftQNetwork(obs_size, action_size) for _ in range(2))
        self.mean_actor = deepcopy(self.actor)
        self.target_critics = deepcopy(self.critics)
        self.log_ent_coef = nn.Parameter(torch.tensor(math.log(args.ent_coef)))
        self.policy = nn.Sequential(self.obs_norm, self.mean_actor)  # what acts: steadier than the actor

    def optimizers(self, learning_rate: float) -> dict[str, torch.optim.Adam]:
        groups = {
            "q_optimizer": self.critics.parameters(),
            "actor_optimizer": self.actor.parameters(),
            "ent_coef_optimizer": [self.log_ent_coef],
        }
        return {name: torch.optim.Adam(group, learning_rate, fused=True) for name, group in groups.items()}


def sac_update(sac: SAC, optimizers: dict, batch: tuple, update_actor: bool, args: Args) -> dict:
    """One update by a batch of transitions -> what to log."""
    obs, next_obs, actions, n_step_return, discount = batch
    obs = sac.obs_norm(obs)
    next_obs = sac.obs_norm(next_obs)
    ent_coef = sac.log_ent_coef.detach().exp()
    with torch.no_grad():  # every last state bootstraps
        next_actions, next_log_prob = squash(*sac.actor(next_obs), torch.randn_like(actions))
        next_q = torch.min(*sac.target_critics(next_obs, next_actions))
        td_target = n_step_return + discount * (next_q - ent_coef * next_log_prob)
    q_values = sac.critics(obs, actions)
    qf_loss = (q_values - td_target).square().mean(dim=1).sum()
    optimizers["q_optimizer"].zero_grad()
    qf_loss.backward()
    optimizers["q_optimizer"].step()
    losses = {"qf_loss": qf_loss, "q_values": q_values.mean(), "ent_coef": ent_coef}

    if update_actor:
        new_actions, log_prob = squash(*sac.actor(obs), torch.randn_like(actions))
        new_q = torch.min(*sac.critics(obs, new_actions))
        actor_loss = (ent_coef * log_prob - new_q).mean()
        optimizers["actor_optimizer"].zero_grad()
        actor_loss.backward(inputs=[*sac.actor.parameters()])  # the critics need no gradient of it
        optimizers["actor_optimizer"].step()

        entropy_gap = -(log_prob.detach() - actions.shape[1]).mean()  # above -A
        ent_coef_loss = sac.log_ent_coef.exp() * entropy_gap
        optimizers["ent_coef_optimizer"].zero_grad()
        ent_coef_loss.backward()
        optimizers["ent_coef_optimizer"].step()
        losses |= {"actor_loss": actor_loss, "entropy": -log_prob.mean()}

    with torch.no_grad():  # mean <- (1 - τ) mean + τ learned
        for target, learned in ((sac.target_critics, sac.critics), (sac.mean_actor, sac.actor)):
            for mean, value in zip(target.parameters(), learned.parameters()):
                mean.lerp_(value, args.tau)
    return {name: value.detach() for name, value in losses.items()}


# ---- The loop


@torch.no_grad()
def rollout(
    policy: nn.Module | None, noise_scale: float, envs: Humanoids, labeller: Labeller,
    seed: int, args: Args
) -> tuple:  # fmt: skip
    """An episode of a policy, or at random, on the CPU -> states (T + 1, N, S), actions (T, N, 17)."""
    rng = torch.Generator().manual_seed(seed)
    obs, _ = envs.reset(seed=seed)
    states = [torch.from_numpy(obs).float()]
    actions = []
    noise = torch.randn(envs.num_envs, ACTION_SIZE, generator=rng)
    for _ in range(args.episode_length):
        fresh = torch.randn(envs.num_envs, ACTION_SIZE, generator=rng)
        noise = args.noise_correlation * noise + math.sqrt(1 - args.noise_correlation**2) * fresh
        if policy:
            action, _ = squash(*policy(states[-1][:, 2:]), noise_scale * noise)
        else:
            action = torch.erf(noise / math.sqrt(2))  # the normal's distribution: uniform in [-1, 1]
        actions.append(action)
        states.append(torch.from_numpy(envs.step(MAX_CTRL * action.numpy())).float())
        labeller.add(states[-1][:, :POSE_SIZE])  # the pose after each step, for other threads to reward
    return torch.stack(states), torch.stack(actions)


def train(args: Args, labeller: Labeller) -> None:
    """The paper's Algorithm 1, by rounds; all chance comes from seed and round, so that --resume repeats it.

    A round's first three phases go on at once; acting and learning begin with what the rounds before left:

        act    =============          threads: play round k with a copy of the policy
        learn  =================      this thread: update on rounds 0 to k - 1
        label     ===============     other threads, then this one, too: render and reward round k
        report                   ===  this thread: store round k; curves, evaluation, checkpoint
    """
    device = labeller.device
    envs = Humanoids(args.num_envs)
    state_size = envs.single_observation_space.shape[0]
    torch.manual_seed(args.seed)
    sac = SAC(state_size - 2, ACTION_SIZE, args).to(device)
    optimizers = sac.optimizers(args.learning_rate)
    rb = ReplayBuffer(state_size, args, device)
    a_round = args.num_envs * args.episode_length  # steps
    last_round = math.ceil(args.total_timesteps / a_round) - 1
    parts = {"policy": sac.policy, "sac": sac, **optimizers}  # of a checkpoint
    global_step, best_return = open_run(args, labeller, rb, parts)

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
        learning_rate = args.learning_rate * (1 - global_step / args.total_timesteps)
        for optimizer in optimizers.values():
            optimizer.param_groups[0] |= {"lr": learning_rate, "capturable": True}
        losses = defaultdict(list)
        if rb.rounds > 0 and not warmup:

            def update(update_actor: bool) -> dict:
                return sac_update(sac, optimizers, rb.sample(args), update_actor, args)

            if device.type == "cuda":
                from scale.cuda_graphs import replayed

                update = replayed(update, device)  # a CUDA graph
            for i in range(args.gradient_steps):
                for name, loss in update(i % args.policy_frequency == 0).items():
                    losses[name].append(loss)

        # ---- Label: threads have begun to render states and to reward the frames (`Worker.label`).
        states, actions = playing.result()
        labels = labeller.result().view(args.episode_length, args.num_envs, 2)
        clip_rewards, ground_truth_rewards = labels.unbind(2)
        rewards = ground_truth_rewards if args.reward == "ground-truth" else clip_rewards

        # ---- Report: store the round; curves, now and then an evaluation, a checkpoint.
        rb.add(states, actions, rewards)
        sac.obs_norm.update(states[..., 2:].flatten(0, 1).to(device))  # the buffer keeps raw values
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
        Path(f"{args.run_dir}/rounds/{k - rb.capacity}.pt").unlink(missing_ok=True)

    writer.close()
    load(f"{args.run_dir}/best.pt", Args, policy=sac.policy)
    write_result(f"{args.run_dir}/result", sac.policy, labeller, args)


# ==== Nothing below belongs to the method: success, rendering, evaluation, files, and the command line.


# What a person would have to see (paper, Table 2), from where the parts of the body are: the ground truth
# beside the CLIP reward, so that reward hacking shows. No agent learns from these conditions.

Points = dict[str, torch.Tensor]  # where the parts are: name -> (N, 3), m
HEAD, SEAT, KNEE, FOOT = 0.09, 0.09, 0.049, 0.075  # radii, m: so high lies a part on the floor
TOUCH = 0.04  # m above the floor that pass for touching it


def tilt(p: Points) -> torch.Tensor:
    """Angle between the trunk, from seat to head, and the vertical (N,), degrees."""
    return torch.rad2deg(torch.acos(F.normalize(p["head"] - p["seat"], dim=-1)[..., 2].clamp(-1, 1)))


def bend(p: Points, side: str, limb: tuple[str, str, str] = ("hip", "knee", "foot")) -> torch.Tensor:
    """How far a knee, or another limb's joint, is bent (N,), degrees: a straight leg is 0."""
    upper, lower = (F.normalize(p[f"{side}_{b}"] - p[f"{side}_{a}"], dim=-1) for a, b in zip(limb, limb[1:]))
    return torch.rad2deg(torch.acos((upper * lower).sum(-1).clamp(-1, 1)))


def spread(p: Points) -> torch.Tensor:
    """Angle between the legs, from hips to feet, seen from above (N,), degrees."""
    legs = ((p[f"{side}_foot"] - p[f"{side}_hip"])[..., :2] for side in ("right", "left"))
    right, left = (F.normalize(leg, dim=-1) for leg in legs)
    return torch.rad2deg(torch.acos((right * left).sum(-1).clamp(-1, 1)))


def leftwards(p: Points, part: str) -> torch.Tensor:
    """How far a part is to the robot's left of its seat (N,), m."""
    left = F.normalize(p["left_shoulder"] - p["right_shoulder"], dim=-1)
    return ((p[part] - p["seat"]) * left).sum(-1)


def forwards(p: Points, part: str) -> torch.Tensor:
    """How far a part is in front of the seat, as the trunk sees it (N,), m."""
    left = F.normalize(p["left_shoulder"] - p["right_shoulder"], dim=-1)
    up = F.normalize(p["head"] - p["seat"], dim=-1)
    return ((p[part] - p["seat"]) * F.normalize(torch.linalg.cross(left, up), dim=-1)).sum(-1)


def low(p: Points, part: str, radius: float, above: float = TOUCH) -> torch.Tensor:
    """Are both knees or feet on the floor, or `above` m at most above it? (N,) bool."""
    return torch.maximum(p[f"right_{part}"][..., 2], p[f"left_{part}"][..., 2]) <= radius + above


def off_balance(p: Points, part: str, radius: float) -> torch.Tensor:
    """How far the head is from above the line between the feet, or knees, on the floor (N,), m."""
    right, left = p[f"right_{part}"], p[f"left_{part}"]
    one = torch.where((right[..., 2] <= radius + TOUCH)[..., None], right, left)[..., :2]
    other = torch.where((left[..., 2] <= radius + TOUCH)[..., None], left, right)[..., :2]
    head = p["head"][..., :2]
    along = ((head - one) * (other - one)).sum(-1) / (other - one).square().sum(-1).clamp(min=1e-8)
    return (one + along.clamp(0, 1)[..., None] * (other - one) - head).norm(dim=-1)


def kneeling(p: Points) -> torch.Tensor:
    """Both knees on the floor and bent, upright, not falling: a foot near the floor or the head above the
    knees; not sitting lower than on the heels."""
    legs = low(p, "knee", KNEE) & (torch.minimum(bend(p, "right"), bend(p, "left")) >= 60)
    feet = torch.minimum(p["right_foot"][..., 2], p["left_foot"][..., 2])
    balance = (feet <= 0.2) | (off_balance(p, "knee", KNEE) <= 0.35)
    return legs & balance & (tilt(p) <= 50) & (p["seat"][..., 2] > SEAT + 2 * FOOT)


def lotus_position(p: Points) -> torch.Tensor:
    """Seated on the floor or crossed feet, the knees low and wide apart, the feet in front of it."""
    seated = (p["seat"][..., 2] <= SEAT + 2 * FOOT) & (tilt(p) <= 45)
    wide, together = ((p[f"left_{part}"] - p[f"right_{part}"]).norm(dim=-1) for part in ("knee", "foot"))
    front = torch.minimum(forwards(p, "right_foot"), forwards(p, "left_foot")) > 0
    return seated & low(p, "knee", KNEE, 0.25) & (wide >= 0.5) & (together <= wide - 0.2) & front


def standing_up(p: Points) -> torch.Tensor:
    """On a foot and in balance, the trunk within 30° of upright, the head at 4/5 of its 1.48 m."""
    feet = torch.minimum(p["right_foot"][..., 2], p["left_foot"][..., 2])
    upright = (tilt(p) <= 30) & (p["head"][..., 2] >= 1.2)
    return (feet <= FOOT + TOUCH) & upright & (off_balance(p, "foot", FOOT) <= 0.35)


def arms_raised(p: Points) -> torch.Tensor:
    """Standing, both hands above the top of the head."""
    hands = torch.minimum(p["right_hand"][..., 2], p["left_hand"][..., 2])
    return standing_up(p) & (hands >= p["head"][..., 2] + HEAD)


def doing_splits(p: Points) -> torch.Tensor:
    """Seated, the legs straight within 30°, 90° or more between them (120° at most), the feet low."""
    down = (p["seat"][..., 2] <= SEAT + 2 * TOUCH) & low(p, "foot", FOOT, 0.18)
    straight = torch.maximum(bend(p, "right"), bend(p, "left")) <= 30
    return down & straight & (spread(p) >= 90) & (tilt(p) <= 60)


def hands_on_hips(p: Points) -> torch.Tensor:
    """Standing, each hand within 20 cm of its hip joint (the hip is 9 cm thick, the hand 4), both elbows bent
    by 40° or more: arms that merely hang down come as close."""
    far = torch.maximum(*((p[f"{side}_hand"] - p[f"{side}_hip"]).norm(dim=-1) for side in ("right", "left")))
    bent = torch.minimum(*(bend(p, side, ("shoulder", "elbow", "hand")) for side in ("right", "left")))
    return standing_up(p) & (far <= 0.2) & (bent >= 40)


def arms_crossed(p: Points) -> torch.Tensor:
    """Standing, each hand 5 cm beyond the middle or more, before the trunk."""
    beyond = torch.minimum(leftwards(p, "right_hand"), -leftwards(p, "left_hand")) >= 0.05
    front = torch.minimum(forwards(p, "right_hand"), forwards(p, "left_hand")) > 0
    above = torch.minimum(p["right_hand"][..., 2], p["left_hand"][..., 2]) > p["seat"][..., 2]
    shoulders = torch.minimum(p["right_shoulder"][..., 2], p["left_shoulder"][..., 2])
    below = torch.maximum(p["right_hand"][..., 2], p["left_hand"][..., 2]) < shoulders
    return standing_up(p) & beyond & front & above & below


def standing_on_one_leg(p: Points) -> torch.Tensor:
    """Standing with one foot on the floor, the other at least 10 cm above it."""
    return standing_up(p) & (torch.maximum(p["right_foot"][..., 2], p["left_foot"][..., 2]) >= FOOT + 0.1)


TASKS = {  # goal prompt (paper, Table 3) and success condition of each
    "kneeling": ("a humanoid robot kneeling", kneeling),
    "lotus-position": ("a humanoid robot seated down, meditating in the lotus position", lotus_position),
    "standing-up": ("a humanoid robot standing up", standing_up),
    "arms-raised": ("a humanoid robot standing up, with both arms raised", arms_raised),
    "doing-splits": ("a humanoid robot practicing gymnastics, doing the side splits", doing_splits),
    "hands-on-hips": ("a humanoid robot standing up with hands on hips", hands_on_hips),
    "arms-crossed": ("a humanoid robot standing up, with its arms crossed", arms_crossed),
    "standing-on-one-leg": ("a humanoid robot standing up on one leg", standing_on_one_leg),
}


def summary(labels: torch.Tensor) -> dict[str, float]:
    """Labels (T, N, 2) -> means over N episodes; one succeeds if half its steps fulfil the condition."""
    clip, truth = labels.sum(0).mean(0).tolist()
    if math.isnan(truth):  # no known task
        return {"clip_return": clip}
    success = (labels[:, :, 1].mean(0) >= 0.5).float().mean().item()
    return {"success_rate": success, "clip_return": clip, "ground_truth_return": truth}


def in_words(means: dict[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in means.items())


CHOOSE = 2**32  # of the seeds for choosing and reporting: no round's number
REPORT = 2**32 + 1


def evaluate(policy: nn.Module, episodes: int, purpose: int, labeller: Labeller, args: Args) -> tuple:
    """Play without exploration -> states (T, N, S), labels (T, N, 2)."""
    seed = np.random.SeedSequence((args.seed, purpose, episodes)).generate_state(1).item()
    states, _ = rollout(deepcopy(policy).cpu(), 0.0, Humanoids(episodes), labeller, seed, args)
    return states[1:], labeller.result().view(args.episode_length, episodes, -1)


COLORS = {  # of the realistic look's parts, by the ends of their names
    "torso1": "#e8eaee", "butt": "#e8eaee", "waist": "#808690", "uarm1": "#f07814", "larm": "#fac432",
    "thigh1": "#1e54be", "shin1": "#ced2d8", "hand": "#24262c", "foot": "#24262c", "head": "#eceef0",
    "floor": "#ffffff",
}  # fmt: skip


def scene_spec(textures: str) -> mujoco.MjSpec:
    """Gymnasium's humanoid, dressed as `textures` says, with the paper's camera, "fixed"."""
    spec = mujoco.MjSpec.from_file(str(Path(gymnasium.__file__).parent / "envs/mujoco/assets/humanoid.xml"))
    spec.option.solver = mujoco.mjtSolver.mjSOL_NEWTON  # mujoco_warp has no PGS
    sin, cos, distance = math.sin(math.radians(-10)), math.cos(math.radians(-10)), 3.5
    # It looks at (0, 0, 1), 10° down.
    camera = spec.worldbody.add_camera(name="fixed", pos=[distance * cos, 0, 1 - distance * sin])
    camera.alt.type = mujoco.mjtOrientation.mjORIENTATION_XYAXES
    camera.alt.xyaxes = [0, 1, 0, sin, 0, cos]  # the picture's right, and up
    if textures == "original":
        return spec

    sky = next(texture for texture in spec.textures if texture.type == mujoco.mjtTexture.mjTEXTURE_SKYBOX)
    sky.rgb1, sky.rgb2 = [0.18, 0.44, 0.78], [1, 1, 1]
    tiles = spec.texture("texplane")  # a chessboard would be most of what a model sees
    tiles.builtin = mujoco.mjtBuiltin.mjBUILTIN_FLAT
    tiles.mark = mujoco.mjtMark.mjMARK_EDGE
    tiles.rgb1, tiles.markrgb = [0.62, 0.6, 0.57], [0.44, 0.42, 0.4]
    floor = spec.material("MatPlane")
    floor.texrepeat, floor.specular, floor.reflectance = [20, 20], 0, 0
    head = spec.body("torso")
    ellipsoid, sphere = mujoco.mjtGeom.mjGEOM_ELLIPSOID, mujoco.mjtGeom.mjGEOM_SPHERE
    head.add_geom(name="visor", type=ellipsoid, pos=[0.055, 0, 0.2], size=[0.045, 0.075, 0.04])
    for y in (-0.03, 0.03):
        head.add_geom(name=f"eye{y}", type=sphere, pos=[0.09, y, 0.2], size=[0.016, 0, 0])
    for geom in spec.geoms:
        name = next((part for part in COLORS if geom.name.endswith(part)), None)
        color = COLORS[name] if name else "#181c24" if geom.name == "visor" else "#5adcff"
        geom.rgba = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)] + [1]
        if geom.name != "floor":
            geom.material = ""
    sun = spec.lights[0]
    sun.dir, sun.diffuse, sun.specular = [-0.5, 0.35, -1], [0.75, 0.73, 0.68], [0.4, 0.4, 0.4]
    spec.visual.headlight.ambient = [0.38, 0.4, 0.44]
    spec.visual.headlight.diffuse, spec.visual.headlight.specular = [0.12] * 3, [0] * 3
    return spec


# Where the body's parts are: the middle of a geom, or the joint where a body begins (shin: the knee).
GEOM_POINTS = {"head": "head", "seat": "butt"}
BODY_POINTS = {}
for side in ("right", "left"):
    GEOM_POINTS |= {f"{side}_{point}": f"{side}_{point}" for point in ("hand", "foot")}
    begin_at = {"hip": "thigh", "knee": "shin", "shoulder": "upper_arm", "elbow": "lower_arm"}
    BODY_POINTS |= {f"{side}_{point}": f"{side}_{body}" for point, body in begin_at.items()}

WARP = Lock()  # what Warp launches goes to one device, the same for all threads


class Scene:
    """Poses -> frames and body points, ray-traced by mujoco_warp, `batch_size` at once; for one thread."""

    spec = staticmethod(scene_spec)  # for others to add to

    def __init__(
        self, height: int, width: int, textures: str, camera: str, supersample: int, batch_size: int,
        device: torch.device
    ):  # fmt: skip
        import warp as wp

        wp.config.log_level = wp.LOG_WARNING  # or it reports each kernel
        import mujoco_warp

        self.height = height
        self.width = width
        self.batch_size = batch_size
        self.device = device
        wp.init()
        if device.type == "cuda" and not wp.is_cuda_available():
            raise UsageError("Warp needs NVIDIA's driver 580 or newer for a GPU: --device cpu")
        self.warp_device = wp.get_device(str(device))
        self.lock = WARP if device.type == "cuda" else nullcontext()
        wp.set_device(self.warp_device)
        model = self.spec(textures).compile()
        self.geoms = torch.tensor([model.geom(name).id for name in GEOM_POINTS.values()], device=device)
        self.bodies = torch.tensor([model.body(name).id for name in BODY_POINTS.values()], device=device)
        data = mujoco.MjData(model)
        mujoco.mj_forward(model, data)
        self.model = mujoco_warp.put_model(model)
        self.data = mujoco_warp.put_data(model, data, nworld=batch_size)
        self.context = mujoco_warp.create_render_context(
            model, batch_size, (width, height), cam_active=["fixed" if camera == "fixed" else "track"],
            render_rgb=True, render_depth=False, render_seg=False, render_skybox=True, use_shadows=True,
            samples_per_pixel=supersample, enable_emission=False, enable_per_light_ambient=False
        )  # fmt: skip
        self.render(torch.zeros(1, POSE_SIZE))  # compiles kernels, once for 20 s

    def render(self, poses: torch.Tensor) -> tuple[torch.Tensor, Points]:
        """Poses (N, 24) -> frames (N, 3, height, width) uint8, and the body's points."""
        import mujoco_warp
        import warp as wp

        frames = torch.empty(len(poses), 3, self.height, self.width, dtype=torch.uint8, device=self.device)
        points = torch.empty(len(poses), len(self.geoms) + len(self.bodies), 3, device=self.device)
        if self.device.type == "cuda":  # in step with PyTorch
            wp.set_stream(wp.stream_from_torch(torch.cuda.current_stream(self.device)), self.warp_device)
        for first in range(0, len(poses), self.batch_size):
            i = slice(first, first + self.batch_size)
            n = len(poses[i])  # the last batch may be smaller
            wp.to_torch(self.data.qpos)[:n] = poses[i].to(self.device)
            with self.lock:
                wp.set_device(self.warp_device)
                mujoco_warp.kinematics(self.model, self.data)  # bodies and geoms
                mujoco_warp.com_pos(self.model, self.data)
                mujoco_warp.camlight(self.model, self.data)
                mujoco_warp.refit_bvh(self.model, self.data, self.context)
                mujoco_warp.render(self.model, self.data, self.context)
            pixels = wp.to_torch(self.context.rgb_data)[:n].view(torch.uint8)  # blue, green, red, alpha
            frames[i] = torch.stack(pixels.view(n, self.height, self.width, 4).unbind(-1)[2::-1], dim=1)
            points[i, : len(self.geoms)] = wp.to_torch(self.data.geom_xpos)[:n, self.geoms]
            points[i, len(self.geoms) :] = wp.to_torch(self.data.xpos)[:n, self.bodies]
        return frames, dict(zip([*GEOM_POINTS, *BODY_POINTS], points.unbind(1)))


def write_result(path: str, policy: nn.Module, labeller: Labeller, args: Args) -> None:
    """Evaluate; write path.json, and path.mp4 with three episodes and their rewards."""
    states, labels = evaluate(policy, args.episodes, REPORT, labeller, args)
    result = summary(labels)
    print(f"{args.episodes} episodes: {in_words(result)}; {path}.json, .mp4")
    Path(f"{path}.json").write_text(json.dumps(result | {"settings": asdict(args)}, indent=2))
    film = iio.imopen(f"{path}.mp4", "w", plugin="pyav")
    film.init_video_stream("libx264", fps=30)
    scene = Scene(240, 240, args.textures, args.camera, 2, 1, labeller.device)
    for n in range(min(3, args.episodes)):
        for t in trange(args.episode_length, desc="film", leave=False, disable=None):
            frame = scene.render(states[t, n : n + 1, :POSE_SIZE])[0][0].cpu()
            image = Image.fromarray(frame.permute(1, 2, 0).numpy())
            image = image.crop((0, 0, image.width // 2 * 2, image.height // 2 * 2 + 24))  # even; a strip
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


def open_run(args: Args, labeller: Labeller, rb: ReplayBuffer, parts: dict) -> tuple[int, float]:
    """Make a run's folder, or restore the run -> step, best return."""
    if args.resume is None:
        os.makedirs(f"{args.run_dir}/rounds")
        return 0, -math.inf
    kept = load(f"{args.run_dir}/checkpoint.pt", type(args), **parts)
    end = kept["step"] // (args.num_envs * args.episode_length)
    rb.rounds = max(0, end - rb.capacity)
    while rb.rounds < end:
        states, actions, rewards = torch.load(f"{args.run_dir}/rounds/{rb.rounds}.pt")["round"]
        rb.add(states, actions, rewards)
    if end and args.reward == "clip":
        labeller.check(states[1::25, :, :POSE_SIZE].flatten(0, 1), rewards[::25].flatten())
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
        policy = SAC(Humanoids(1).single_observation_space.shape[0] - 2, ACTION_SIZE, args).policy
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
