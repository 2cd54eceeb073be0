"""One policy for many sentences: the humanoid does what it is told.

    python neighbours/sac_sentences_humanoid.py
    python neighbours/sac_sentences_humanoid.py --evaluate runs/NAME/best.pt --prompt "the robot kneels"

Agents with many goals (Baumli et al., 2023, arXiv 2312.09187): actor and critics see, behind the observation,
the embedding of the sentence to obey. A frame's embedding gives its reward by every sentence: a share of a
batch is learned from as if another had been pursued. Environment, networks and update are the robot's.
"""

import json
import math
import os
import sys
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import imageio.v3 as iio
import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm, trange

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import sac_clip_humanoid as humanoid
from clip_reward import Labeller, UsageError
from sac_clip_humanoid import CHOOSE, POSE_SIZE, REPORT, TASKS, Humanoids, load, sac_update, save


@dataclass
class Args(humanoid.Args):
    """Teach a humanoid to do what each of several sentences says."""

    prompt: tuple[str, ...] = tuple(prompt for prompt, _ in TASKS.values())[:5]  # the goals, each by itself
    reward: str = "sentences"  # the cosine with each of them
    contrastive: bool = False  # a sentence's probability among all, with --threshold (Baumli et al.)
    relabel: float = 0.5  # share of a batch that is learned from with any sentence, not the one pursued
    change: float = 0.25  # share of the episodes in which another sentence is given half-way
    total_timesteps: int = 640_000  # of all environments
    num_envs: int = 20  # side by side
    gradient_steps: int = 250  # updates a round
    evaluate_every: int = 40_000  # steps between evaluations, which choose the best policy

    def check(self) -> None:
        if self.goal_baseline_alpha or self.negative_prompt or self.head or self.reward != "sentences":
            raise UsageError("here are no α, ground truth, head, or negative prompts (but --contrastive)")
        super().check()


class Worker(humanoid.Worker):
    """Renders states and rewards the frames by every sentence."""

    def __init__(self, args: Args, device: torch.device, reward_model: nn.Module | None = None):
        super().__init__(args, device, reward_model)
        self.args = args
        self.goals = self.reward_model.embed_text(args.prompt)  # (K, D)

    @torch.no_grad()
    def label(self, poses: torch.Tensor) -> torch.Tensor:
        """Poses (N, 24) -> rewards by the K sentences, and which of the 8 conditions hold (N, K + 8)."""
        frames, points = self.scene.render(poses)
        rewards = self.reward_model.embed(frames) @ self.goals.T  # (N, K)
        if self.args.contrastive and len(self.goals) > 1:
            rewards = (rewards / self.reward_model.temperature).softmax(dim=1)
        if self.args.threshold is not None:
            rewards = (rewards > self.args.threshold).float()
        holds = torch.stack([condition(points).float() for _, condition in TASKS.values()], dim=1)
        return torch.cat([rewards, holds], dim=1).cpu()


def plan(k: int, sentences: int, args: Args) -> torch.Tensor:
    """-> the sentence that is pursued at each step of round k (T, N)."""
    rng = torch.Generator().manual_seed(np.random.SeedSequence((args.seed, k, 1)).generate_state(1).item())
    first = (torch.arange(args.num_envs) + k * args.num_envs) % sentences
    other = torch.randint(sentences, (args.num_envs,), generator=rng)
    second = torch.where(torch.rand(args.num_envs, generator=rng) < args.change, other, first)
    late = torch.arange(args.episode_length)[:, None] >= args.episode_length // 2
    return torch.where(late, second, first)


class Told(nn.Module):
    """The policy of N observations, which is told at step t the sentences pursued[t] (T, N)."""

    def __init__(self, policy: nn.Module, goals: torch.Tensor, pursued: torch.Tensor):
        super().__init__()
        self.obs_norm, self.actor = deepcopy(policy).cpu()
        self.sentences = iter(goals.cpu()[pursued])  # T times (N, D)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.actor(torch.cat([self.obs_norm(obs), next(self.sentences)], dim=1))


class ReplayBuffer(humanoid.ReplayBuffer):
    """The robot's, with a reward of each frame by every sentence, each sentence's standardized by itself."""

    def __init__(self, obs_norm: nn.Module, goals: torch.Tensor, args: Args):
        super().__init__(len(obs_norm.mean) + 2, args, goals.device)
        self.obs_norm = obs_norm
        self.goals = goals
        self.least = 0.1 if args.contrastive or args.threshold is not None else 1e-8  # or one frame is all
        self.rewards = torch.zeros(*self.rewards.shape, len(goals), device=goals.device)
        self.actions = torch.cat([self.actions, self.actions[..., :1]], dim=3)  # last, which was pursued

    def add(self, states: torch.Tensor, actions: torch.Tensor, rewards: torch.Tensor) -> None:
        super().add(states, actions, rewards)  # actions and, last, what was pursued (T, N, 18)
        std, mean = torch.std_mean(self.rewards[: self.rounds].double(), (0, 1, 2), correction=0)
        self.mean, self.std = mean.float(), std.float().clamp(min=self.least)

    def sample(self, args: Args) -> tuple:
        """As the robot's, for the sentence that was pursued or, for the share `relabel`, for any."""
        *seen, actions, returns, discount = super().sample(args)
        goal = actions[:, -1].long()
        others = round(args.relabel * args.batch_size)
        goal[:others] = torch.randint(len(self.goals), (others,), device=goal.device)
        obs, next_obs = (torch.cat([self.obs_norm(one), self.goals[goal]], dim=1) for one in seen)
        return obs, next_obs, actions[:, :-1], returns.gather(1, goal[:, None]).squeeze(1), discount


def train(args: Args, labeller: Labeller, goals: torch.Tensor, sac: humanoid.SAC) -> None:
    """As in sac_clip_humanoid.py: a round is played and rewarded while those before are learned from."""
    envs = Humanoids(args.num_envs)
    optimizers = sac.optimizers(args.learning_rate)
    rb = ReplayBuffer(sac.policy[0], goals, args)
    a_round = args.num_envs * args.episode_length  # steps
    parts = {"policy": sac.policy, "sac": sac, **optimizers}  # of a checkpoint
    global_step, best = humanoid.open_run(args, labeller, rb, parts)
    if rb.rounds:
        poses = rb.states[0, 1::25, :, :POSE_SIZE].flatten(0, 1)
        labeller.check(poses.cpu(), rb.rewards[0, ::25, :, 0].flatten().cpu())

    def checkpoint(name: str) -> None:
        content = {"script": Path(__file__).stem, "settings": asdict(args), "best_return": best}
        content |= {name: part.state_dict() for name, part in parts.items()}
        save(f"{args.run_dir}/{name}", step=global_step, goals=goals, **content)

    checkpoint("checkpoint.pt")
    writer = SummaryWriter(args.run_dir, purge_step=global_step + 1)
    for k in trange(rb.rounds, math.ceil(args.total_timesteps / a_round), unit="round", disable=None):
        play_seed, learn_seed = np.random.SeedSequence((args.seed, k)).generate_state(2).tolist()

        # ---- Act, in a thread, each robot by its own sentence.
        pursued = plan(k, len(goals), args)
        policy = Told(sac.policy, goals, pursued) if global_step >= args.learning_starts else None
        playing = labeller.pool.submit(humanoid.rollout, policy, 1.0, envs, labeller, play_seed, args)

        # ---- Learn, at the same time.
        torch.manual_seed(learn_seed)
        for optimizer in optimizers.values():
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - global_step / args.total_timesteps)
        losses = {}  # of the last updates
        if rb.rounds and policy:
            for i in range(args.gradient_steps):
                losses |= sac_update(sac, optimizers, rb.sample(args), i % args.policy_frequency == 0, args)

        # ---- Label what is left, and report.
        states, actions = playing.result()
        actions = torch.cat([actions, pursued[..., None]], dim=2)
        if not all(loss.isfinite() for loss in losses.values()):
            raise UsageError("losses are not finite: --resume with a lower --learning-rate")
        rewards = labeller.result()[:, : len(goals)].reshape(args.episode_length, args.num_envs, -1)
        rb.add(states, actions, rewards)
        rb.obs_norm.update(states[..., 2:].flatten(0, 1).to(labeller.device))
        save(f"{args.run_dir}/rounds/{k}.pt", round=(states, actions, rewards))
        global_step += a_round
        for name, loss in losses.items():
            writer.add_scalar(f"losses/{name}", loss.item(), global_step)
        if global_step % args.evaluate_every < a_round or global_step >= args.total_timesteps:
            means, rates = evaluate(sac.policy, args.num_envs, CHOOSE, labeller, goals, args)
            tqdm.write(f"step {global_step:,} of {args.total_timesteps:,}: success rates {rates}")
            for name, of_one in means.items():
                writer.add_scalar(f"success_rate/{name}", rates[name], global_step)
                writer.add_scalar(f"clip_return/{name}", of_one["clip_return"], global_step)
            earned = torch.tensor([of_one["clip_return"] for of_one in means.values()])
            if ((earned - best) / rb.std.cpu()).mean() >= 0:
                best = earned
                checkpoint("best.pt")
        writer.flush()
        checkpoint("checkpoint.pt")


def evaluate(policy: nn.Module, episodes: int, purpose: int, labeller, goals, args, change=False) -> tuple:
    """-> of each sentence return and conditions met; its success. With change: in the half after another."""
    pursued = torch.arange(len(goals)).repeat_interleave(episodes).repeat(args.episode_length, 1)
    half = args.episode_length // 2 if change else 0
    pursued[:half] = (pursued[:half] + 1) % len(goals)
    _, labels = humanoid.evaluate(Told(policy, goals, pursued), pursued.shape[1], purpose, labeller, args)
    tasks = {prompt: task for task, (prompt, _) in TASKS.items()}  # of other sentences --task
    means = {}
    for k, (prompt, mine) in enumerate(zip(args.prompt, labels[half:].split(episodes, dim=1))):
        met = (mine[..., len(goals) :].mean(0) >= 0.5).float().mean(0).tolist()  # as the robot's `summary`
        means[prompt] = {"clip_return": mine[..., k].sum(0).mean().item(), **dict(zip(TASKS, met))}
    return means, {prompt: means[prompt].get(tasks.get(prompt, args.task), math.nan) for prompt in means}


def write_film(path: str, policy: nn.Module, labeller: Labeller, goals: torch.Tensor, args: Args) -> None:
    """Robots side by side, each told another sentence, and the next one every 100 steps."""
    pursued = torch.arange(len(goals))[:, None] + torch.arange(len(goals))
    pursued = pursued.repeat_interleave(args.episode_length, dim=0) % len(goals)
    how = (len(goals), REPORT, labeller, replace(args, episode_length=len(pursued)))
    states, _ = humanoid.evaluate(Told(policy, goals, pursued), *how)
    scene = humanoid.Scene(240, 240, args.textures, args.camera, 2, len(goals), labeller.device)
    with iio.imopen(path, "w", plugin="pyav") as film:
        film.init_video_stream("libx264", fps=30)
        for poses, now in zip(tqdm(states[..., :POSE_SIZE], "film", leave=False, disable=None), pursued):
            frames = scene.render(poses)[0].permute(2, 0, 3, 1).flatten(1, 2).cpu().numpy()  # side by side
            image = Image.fromarray(frames).crop((0, 0, frames.shape[1], 256))  # with a strip below
            for n, k in enumerate(now):
                ImageDraw.Draw(image).text((240 * n + 4, 242), args.prompt[k][:44], "white", font_size=10)
            film.write_frame(np.asarray(image))


def main() -> None:
    args = humanoid.read_settings(Args)
    labeller = Labeller(Worker, args)
    goals = labeller.reward_model.embed_text(args.prompt)
    goals *= 0.5 * math.sqrt(goals.shape[1])  # entries of about ±½
    torch.manual_seed(args.seed)
    obs_size = Humanoids(1).single_observation_space.shape[0] - 2  # without the place
    sac = humanoid.SAC(obs_size + goals.shape[1], humanoid.ACTION_SIZE, args)
    sac.obs_norm = nn.Identity()  # the sentence shall stay as it is
    sac.policy = nn.ModuleList([humanoid.Normalize(obs_size), sac.mean_actor])
    sac.to(goals.device)
    if not args.evaluate:
        print(f"{args.total_timesteps:,} steps; run folder {args.run_dir}")
        train(args, labeller, goals, sac)
    kept = load(args.evaluate or f"{args.run_dir}/best.pt", Args, policy=sac.policy)
    one = labeller.reward_model.embed_text(kept["settings"].prompt[0]).cpu()
    if nn.functional.cosine_similarity(one[0], kept["goals"][0], dim=0) < 0.999:
        raise UsageError("this policy has learned another model's embeddings")
    path = f"{args.evaluate.removesuffix('.pt')}_evaluation" if args.evaluate else f"{args.run_dir}/result"
    how = (sac.policy, args.episodes, REPORT, labeller, goals, args)
    means, rates = evaluate(*how)
    _, changed = evaluate(*how, change=True)
    print(f"{args.episodes} episodes each, success {rates}, after a change {changed}; {path}.json, .mp4")
    found = {"success": rates, "changed": changed, "sentences": means, "settings": asdict(args)}
    Path(f"{path}.json").write_text(json.dumps(found, indent=2))
    write_film(f"{path}.mp4", sac.policy, labeller, goals, args)


if __name__ == "__main__":
    try:
        main()
    except (UsageError, OSError, torch.OutOfMemoryError) as error:
        print(f"error: {error} (a run goes on with --resume)", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        os._exit(130)  # at once
