"""One policy for many sentences: the humanoid does what it is told.

    python neighbours/sac_sentences_humanoid.py
    python neighbours/sac_sentences_humanoid.py --evaluate runs/NAME/best.pt --prompt "the robot has knelt down"

Agents with many goals, rewarded by a vision-language model, after Baumli et al. (2023, arXiv 2312.09187). Actor
and critics see, behind the observation, the embedding of the sentence that is to be obeyed. A frame's embedding
gives its reward by every sentence, so each frame teaches all of them: a share of a batch is learned from as if
another sentence had been pursued. Environment, networks and update are those of sac_clip_humanoid.py.
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
from sac_clip_humanoid import POSE_SIZE, TASKS, Humanoids, load, save


@dataclass
class Args(humanoid.Args):
    """Teach a humanoid to do what each of several sentences says."""

    prompt: tuple[str, ...] = tuple(prompt for prompt, _ in TASKS.values())[:5]  # the goals, each by itself
    reward: str = "sentences"  # by each of them
    contrastive: bool = False  # a sentence's probability among all, with --threshold (Baumli et al.)
    relabel: float = 0.5  # share of a batch that is learned from with any sentence, not the one pursued
    change: float = 0.25  # share of the episodes in which another sentence is given half-way
    total_timesteps: int = 640_000  # of all environments
    num_envs: int = 20  # side by side
    gradient_steps: int = 250  # updates a round
    evaluate_every: int = 40_000  # steps between evaluations, which choose the best policy


class Worker(humanoid.Worker):
    """Renders states and rewards the frames by every sentence."""

    def __init__(self, args: Args, device: torch.device, reward_model: nn.Module | None = None):
        super().__init__(args, device, reward_model)
        self.args = args
        self.goals = self.reward_model.embed_text(args.prompt)  # (K, D)

    @torch.no_grad()
    def label(self, poses: torch.Tensor) -> torch.Tensor:
        """Poses (N, 24) -> rewards by the K sentences and whether each of the 8 conditions holds (N, K + 8)."""
        frames, points = self.scene.render(poses)
        rewards = self.reward_model.embed(frames) @ self.goals.T  # (N, K)
        if self.args.contrastive:
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


def told(policy: nn.Module, goals: torch.Tensor, pursued: torch.Tensor):
    """-> the policy of N observations, which is told at step t the sentences pursued[t] (T, N)."""
    sentences = iter(goals.cpu()[pursued])  # T times (N, D)
    return lambda obs: policy(torch.cat([obs, next(sentences)], dim=1))


class Normalize(humanoid.Normalize):
    """Scales the observation, and the unit embedding behind it to entries of about ±½."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        obs, sentence = values.tensor_split([len(self.mean)], dim=1)
        return torch.cat([super().forward(obs), 0.5 * math.sqrt(sentence.shape[1]) * sentence], dim=1)


def make_sac(obs_size: int, goals: torch.Tensor, args: Args) -> humanoid.SAC:
    sac = humanoid.SAC(obs_size + goals.shape[1], humanoid.ACTION_SIZE, args)
    sac.obs_norm = Normalize(obs_size)
    sac.policy = nn.Sequential(sac.obs_norm, sac.mean_actor)
    return sac.to(goals.device)


class ReplayBuffer(humanoid.ReplayBuffer):
    """The robot's, with a reward of each frame by every sentence, each sentence's standardized by itself."""

    def __init__(self, state_size: int, goals: torch.Tensor, args: Args):
        super().__init__(state_size, args, goals.device)
        self.args = args
        self.goals = goals
        self.rewards = torch.zeros(*self.rewards.shape, len(goals), device=goals.device)
        self.actions = torch.cat([self.actions, self.actions[..., :1]], dim=3)  # last, which was pursued

    def add(self, states: torch.Tensor, actions: torch.Tensor, rewards: torch.Tensor) -> None:
        """Take in a round: states (T + 1, N, S), actions (T, N, 17), rewards (T, N, K)."""
        pursued = plan(self.rounds, len(self.goals), self.args)
        super().add(states, torch.cat([actions, pursued[..., None]], dim=2), rewards)
        kept = self.rewards[: self.rounds].flatten(0, 2).double()
        self.mean = kept.mean(0).float()
        self.std = kept.std(0, correction=0).float() + 1e-8

    def sample(self, args: Args) -> tuple:
        """As the robot's, for the sentence that was pursued or, for the share `relabel`, for any."""
        *seen, actions, returns, discount = super().sample(args)  # returns by all sentences (B, K)
        pursued = actions[:, -1].long()
        other = torch.rand(len(pursued), device=pursued.device) < args.relabel
        goal = torch.where(other, torch.randint_like(pursued, len(self.goals)), pursued)
        obs, next_obs = (torch.cat([one, self.goals[goal]], dim=1) for one in seen)
        return obs, next_obs, actions[:, :-1], returns.gather(1, goal[:, None]).squeeze(1), discount


def train(args: Args, labeller: Labeller, goals: torch.Tensor) -> None:
    """As in sac_clip_humanoid.py: a round is played and rewarded while those before are learned from."""
    envs = Humanoids(args.num_envs)
    state_size = envs.single_observation_space.shape[0]
    torch.manual_seed(args.seed)
    sac = make_sac(state_size - 2, goals, args)
    optimizers = sac.optimizers(args.learning_rate)
    rb = ReplayBuffer(state_size, goals, args)
    a_round = args.num_envs * args.episode_length  # steps
    parts = {"policy": sac.policy, "sac": sac, **optimizers}  # of a checkpoint
    global_step, best = humanoid.open_run(args, labeller, rb, parts)

    def checkpoint(name: str) -> None:
        content = {name: part.state_dict() for name, part in parts.items()}
        content |= {"script": Path(__file__).stem, "settings": asdict(args)}
        save(f"{args.run_dir}/{name}", step=global_step, best_return=best, **content)

    checkpoint("checkpoint.pt")
    writer = SummaryWriter(args.run_dir, purge_step=global_step + 1)
    for k in trange(rb.rounds, math.ceil(args.total_timesteps / a_round), unit="round", disable=None):
        play_seed, learn_seed = np.random.SeedSequence((args.seed, k)).generate_state(2).tolist()

        # ---- Act, in a thread, each robot by its own sentence.
        ready = global_step >= args.learning_starts
        policy = told(deepcopy(sac.policy).cpu(), goals, plan(k, len(goals), args)) if ready else None
        playing = labeller.pool.submit(humanoid.rollout, policy, 1.0, envs, labeller, play_seed, args)

        # ---- Learn, at the same time.
        torch.manual_seed(learn_seed)
        for optimizer in optimizers.values():
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - global_step / args.total_timesteps)
        if rb.rounds and ready:
            for i in range(args.gradient_steps):
                humanoid.sac_update(sac, optimizers, rb.sample(args), i % args.policy_frequency == 0, args)

        # ---- Label what is left, and report.
        states, actions = playing.result()
        rewards = labeller.result()[:, : len(goals)].reshape(args.episode_length, args.num_envs, -1)
        rb.add(states, actions, rewards)
        sac.obs_norm.update(states[..., 2:].flatten(0, 1).to(labeller.device))
        save(f"{args.run_dir}/rounds/{k}.pt", round=(states, actions, rewards))
        global_step += a_round
        if global_step % args.evaluate_every < a_round or global_step >= args.total_timesteps:
            means, rates = evaluate(sac.policy, args.num_envs, humanoid.CHOOSE, labeller, goals, args)
            tqdm.write(f"step {global_step:,} of {args.total_timesteps:,}: success rates {rates}")
            for name, of_one in means.items():
                writer.add_scalar(f"success_rate/{name}", rates[name], global_step)
                writer.add_scalar(f"clip_return/{name}", of_one["clip_return"], global_step)
            writer.flush()
            earned = torch.tensor([of_one["clip_return"] for of_one in means.values()])
            if ((earned - best) / rb.std.cpu()).mean() >= 0:
                best = earned
                checkpoint("best.pt")
        checkpoint("checkpoint.pt")

    load(f"{args.run_dir}/best.pt", Args, policy=sac.policy)
    write_result(f"{args.run_dir}/result", sac.policy, labeller, goals, args)


# ==== Nothing below belongs to the method: evaluation, film, and the command line.


def play(policy: nn.Module, purpose: int, pursued: torch.Tensor, labeller: Labeller, goals, args) -> tuple:
    """Obey pursued (T, N) without exploration -> states (T, N, S), labels (T, N, K + 8)."""
    steps, episodes = pursued.shape
    seed = np.random.SeedSequence((args.seed, purpose, episodes)).generate_state(1).item()
    how = (Humanoids(episodes), labeller, seed, replace(args, episode_length=steps))
    states, _ = humanoid.rollout(told(deepcopy(policy).cpu(), goals, pursued), 0.0, *how)
    return states[1:], labeller.result().view(steps, episodes, -1)


def evaluate(policy: nn.Module, episodes: int, purpose: int, labeller: Labeller, goals, args) -> tuple:
    """-> of each sentence return and how often each condition was met; and, where known, its own's success."""
    pursued = torch.arange(len(goals)).repeat_interleave(episodes).expand(args.episode_length, -1)
    _, labels = play(policy, purpose, pursued, labeller, goals, args)
    tasks = {prompt: args.task or task for task, (prompt, _) in TASKS.items()}
    means = {}
    for k, (prompt, mine) in enumerate(zip(args.prompt, labels.split(episodes, dim=1))):
        met = (mine[..., len(goals) :].mean(0) >= 0.5).float().mean(0).tolist()  # as the robot's `summary`
        means[prompt] = {"clip_return": mine[..., k].sum(0).mean().item(), **dict(zip(TASKS, met))}
    return means, {prompt: means[prompt].get(tasks.get(prompt, args.task), math.nan) for prompt in means}


def write_result(path: str, policy: nn.Module, labeller: Labeller, goals, args: Args) -> None:
    """Evaluate; write path.json, and path.mp4, in which one robot is told one sentence after the other."""
    means, rates = evaluate(policy, args.episodes, humanoid.REPORT, labeller, goals, args)
    print(f"{args.episodes} episodes each, success rates {rates}; {path}.json, .mp4")
    found = {"success": rates, "sentences": means, "settings": asdict(args)}
    Path(f"{path}.json").write_text(json.dumps(found, indent=2))
    pursued = torch.arange(len(goals)).repeat_interleave(args.episode_length)[:, None]
    states, _ = play(policy, humanoid.REPORT, pursued, labeller, goals, args)
    scene = humanoid.Scene(240, 240, args.textures, args.camera, 2, 1, labeller.device)
    with iio.imopen(f"{path}.mp4", "w", plugin="pyav") as film:
        film.init_video_stream("libx264", fps=30)
        for pose, k in zip(tqdm(states[..., :POSE_SIZE], "film", leave=False, disable=None), pursued):
            image = Image.fromarray(scene.render(pose)[0][0].permute(1, 2, 0).cpu().numpy())
            image = image.resize((480, 480)).crop((0, 0, 480, 508))  # with a strip below
            ImageDraw.Draw(image).text((8, 487), args.prompt[k], "white", font_size=13)
            film.write_frame(np.asarray(image))


def main() -> None:
    args = humanoid.read_settings(Args)
    labeller = Labeller(Worker, args)
    goals = labeller.reward_model.embed_text(args.prompt)
    if args.evaluate:
        policy = make_sac(Humanoids(1).single_observation_space.shape[0] - 2, goals, args).policy
        load(args.evaluate, Args, policy=policy)
        write_result(f"{args.evaluate.removesuffix('.pt')}_evaluation", policy, labeller, goals, args)
        return
    print(f"{args.total_timesteps:,} steps; run folder {args.run_dir}")
    train(args, labeller, goals)


if __name__ == "__main__":
    try:
        main()
    except (UsageError, OSError, torch.OutOfMemoryError) as error:
        print(f"error: {error} (a run goes on with --resume)", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        os._exit(130)  # at once
