"""RL-VLM-F on CartPole: a teacher says in which of two frames the goal is better achieved.

    python neighbours/dqn_preference_cartpole.py --teacher truth --teacher-error 0.2

After every other round a teacher compares pairs of stored frames (o₁, o₂). From its answers y ∈ {1, 2}, not
from undecided ones, a reward r is learned by Bradley and Terry's model (Wang et al., 2024, arXiv 2402.03681),

    P(o₁ ≻ o₂) = exp r(o₁) / (exp r(o₁) + exp r(o₂)),    loss = cross entropy of P with y,

the mean of three networks that end in tanh. Then **all** rewards in the replay buffer are made anew. The
paper's networks see pixels, these CLIP embeddings, which the buffer keeps. Teachers: `truth` compares what
the environment knows, `clip` CLIP's rewards, so that r only repeats them; `vlm` shows a model both frames.
"""

import math
import os
import re
import sys
from collections import deque
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm, trange

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import dqn_clip_cartpole as dqn
from clip_reward import Labeller, UsageError
from code_reward.client import Client, message, picture


@dataclass
class Args(dqn.Args):
    """Teach CartPole by comparisons (no --evaluate or --ray-workers here, and no reward program)."""

    reward: Literal["preferences"] = "preferences"  # learned from comparisons
    teacher: Literal["truth", "clip", "vlm"] = "truth"  # who compares
    teacher_error: float = 0.0  # truth, clip: the share of answers that are turned round
    queries: int = 50  # pairs a session (paper: 50, every 5,000 steps)
    max_queries: int = 10_000  # after which nothing more is asked (paper's code: the same)
    session_every: int = 2  # rounds from session to session
    vlm: str | None = None  # vlm: the model, as OpenAI calls it or what is at OPENAI_BASE_URL

    def __post_init__(self):
        if self.evaluate or self.ray_workers or self.clip_model.endswith(".py"):
            raise UsageError("there is no --evaluate, --ray-workers or reward program here")
        if self.teacher == "vlm" and self.vlm is None:
            raise UsageError("--teacher vlm needs --vlm, the name of a model")


class Worker(dqn.Worker):
    """Renders states and embeds the frames."""

    @torch.no_grad()
    def label(self, states: torch.Tensor) -> torch.Tensor:
        """States (N, 4) -> embeddings, CLIP reward and ground-truth reward, side by side (N, D + 2)."""
        size = self.reward_model.size
        embeddings = self.reward_model.embed(dqn.render(states.to(self.reward_model.device), *size))
        columns = [self.reward_model.reward(embeddings).cpu(), dqn.ground_truth_reward(states)]
        return torch.cat([embeddings.cpu(), torch.stack(columns, dim=1)], dim=1)


# ---- The teacher

QUESTION = """These are two pictures of a cart on a track, with a pole on it. The goal is: {goal}.
1. What is shown in the first picture? 2. What in the second? 3. In which one is the goal better achieved?
Answer the questions, and end with a line that is only 1 or 2, or 0 if there is no difference."""


def compare(labels: torch.Tensor, args: Args) -> torch.Tensor:
    """Labels of pairs (n, 2, D + 2) -> the better of each (n,): 0, 1, or undecided -1."""
    worth = labels[..., -1 if args.teacher == "truth" else -2]
    answers = torch.where(torch.rand(len(worth)) < args.teacher_error, worth.argmin(1), worth.argmax(1))
    return torch.where(worth[:, 0] == worth[:, 1], -1, answers)


def look(states: torch.Tensor, args: Args) -> torch.Tensor:
    """The same of a vision-language model that sees states (n, 2, 4); the run's folder keeps its answers."""
    client = Client(args.vlm, Path(args.run_dir, "vlm.answers.jsonl"))
    question = QUESTION.format(goal="; ".join(args.prompt))
    answers = []
    for pair in tqdm(states, "ask", leave=False, disable=None):
        frames = dqn.render(pair, 200, 300).permute(0, 2, 3, 1).numpy()
        said = client.ask([message("user", question, [picture(frame) for frame in frames])])
        numbers = re.findall(r"(?<![\w.-])(?:-1|[012])(?!\w|\.\d)", said)
        answers.append(numbers[-1] if numbers else None)
    if not any(answers):
        raise UsageError(f"no answer says 1, 2 or 0, but: {said[:200]!r}")
    return torch.tensor([{"1": 0, "2": 1}.get(answer, -1) for answer in answers])


# ---- The reward


class PreferenceReward(nn.Module):
    """Embeddings (…, D) -> rewards (…,) in [-1, 1]; and the answers that they were learned from."""

    def __init__(self, size: int):
        super().__init__()
        self.ensemble = nn.ModuleList(
            nn.Sequential(nn.Linear(size, 128), nn.ReLU(), nn.Linear(128, 1), nn.Tanh()) for _ in range(3)
        )
        self.pairs = torch.zeros(0, 2, size)
        self.answers = torch.zeros(0, dtype=torch.int64)

    def forward(self, embeddings: torch.Tensor) -> torch.Tensor:
        return torch.stack([member(embeddings) for member in self.ensemble]).mean(0).squeeze(-1)

    def loss(self, pairs: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
        """Pairs (B, 2, D), answers (B,) -> cross entropy of softmax(r(o₁), r(o₂)), of all members."""
        return sum(F.cross_entropy(member(pairs).squeeze(-1), answers) for member in self.ensemble)

    def keep(self, pairs: torch.Tensor, answers: torch.Tensor) -> None:
        """Take in pairs (n, 2, D) with answers (n,), 0 or 1."""
        self.pairs = torch.cat([self.pairs.to(pairs.device), pairs])
        self.answers = torch.cat([self.answers.to(pairs.device), answers])

    def learn(self, updates: int = 300) -> None:
        """Learn from all that is kept."""
        optimizer = torch.optim.Adam(self.ensemble.parameters(), lr=1e-3, fused=True)
        for _ in range(updates if len(self.answers) else 0):
            batch = torch.randint(len(self.answers), (128,), device=self.answers.device)
            optimizer.zero_grad()
            self.loss(self.pairs[batch], self.answers[batch]).backward()
            optimizer.step()


@torch.no_grad()
def standardized(reward: PreferenceReward, labels: torch.Tensor) -> torch.Tensor:
    """Labels (…, D + 2) of all frames kept -> their rewards of now (…), of mean 0 and deviation 1."""
    rewards = reward(labels[..., :-2])
    return (rewards - rewards.double().mean()) / (rewards.double().std(correction=0) + 1e-8)


def draw_pairs(rounds: deque, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """-> states (n, 2, 4) and labels (n, 2, D + 2) of frames, drawn uniformly."""
    states, _, labels = map(torch.stack, zip(*rounds))
    i, t, env = (torch.randint(size, (n, 2), device=labels.device) for size in labels.shape[:3])
    return states[i, t + 1, env], labels[i, t, env]


# ---- The loop


def train(args: Args, labeller: Labeller) -> None:
    """As that of dqn_clip_cartpole.py. The reward changes, so there is no best policy: the last counts."""
    device = labeller.device
    envs = dqn.CartPole(args.num_envs)
    torch.manual_seed(args.seed)
    q_network = dqn.QNetwork().to(device)
    target_network = deepcopy(q_network)
    optimizer = torch.optim.Adam(q_network.parameters(), lr=args.learning_rate, fused=True)
    reward = PreferenceReward(len(labeller.reward_model.goal)).to(device)
    a_round = args.num_envs * args.episode_length
    rounds = deque(maxlen=math.ceil(args.buffer_size / a_round))  # labels, not rewards: these change
    parts = {"policy": target_network, "q_network": q_network, "optimizer": optimizer, "preferences": reward}
    global_step, _ = dqn.open_run(args, labeller, rounds, parts)
    os.makedirs(f"{args.run_dir}/sessions", exist_ok=True)
    for path in sorted(Path(args.run_dir, "sessions").glob("*.pt"), key=lambda path: int(path.stem)):
        if int(path.stem) < global_step // a_round:
            reward.keep(*(part.to(device) for part in torch.load(path)["session"]))
    if rounds:
        states, _, labels = rounds[-1]
        labeller.check(states[1::25].flatten(0, 1).cpu(), labels[::25, :, 0].flatten().cpu())

    def checkpoint() -> None:
        content = {name: part.state_dict() for name, part in parts.items()}
        content |= {"script": Path(__file__).stem, "settings": asdict(args)}
        dqn.save(f"{args.run_dir}/checkpoint.pt", step=global_step, best_return=0.0, **content)

    checkpoint()
    writer = SummaryWriter(args.run_dir, purge_step=global_step + 1)
    for k in trange(global_step // a_round, math.ceil(args.total_timesteps / a_round), unit="round"):
        warmup = global_step < args.learning_starts
        play_seed, learn_seed = np.random.SeedSequence((args.seed, k)).generate_state(2).tolist()

        # ---- Act, in a thread.
        epsilon = 1 - global_step / max(args.exploration_fraction * args.total_timesteps, 1)
        epsilon = 1.0 if warmup else max(args.end_e, epsilon)
        policy = deepcopy(target_network).cpu()
        playing = labeller.pool.submit(dqn.rollout, policy, epsilon, envs, labeller, play_seed, args)

        # ---- Learn, at the same time: DQN on the rounds before, with the rewards of now.
        torch.manual_seed(learn_seed)
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - global_step / args.total_timesteps)
        if rounds and not warmup:
            states, actions, labels = map(torch.stack, zip(*rounds))
            buffer = (states, actions, standardized(reward, labels))
            for _ in range(args.gradient_steps):
                dqn.dqn_update(q_network, target_network, optimizer, dqn.sample(buffer, args), args)

        # ---- Embed what was played, and store it.
        states, actions = playing.result()
        labels = labeller.result().view(args.episode_length, args.num_envs, -1)
        rounds.append([part.to(device) for part in (states, actions, labels)])
        dqn.save(f"{args.run_dir}/rounds/{k}.pt", round=(states, actions, labels))
        global_step += a_round

        # ---- Ask, and learn the reward from all answers.
        if k % args.session_every == 0 and k // args.session_every * args.queries < args.max_queries:
            pairs, seen = draw_pairs(rounds, args.queries)
            said = look(pairs.cpu(), args) if args.teacher == "vlm" else compare(seen.cpu(), args)
            session = seen[said >= 0, :, :-2], said[said >= 0].to(device)
            dqn.save(f"{args.run_dir}/sessions/{k}.pt", session=session)
            reward.keep(*session)
            reward.learn()

        # ---- Report.
        means = dqn.summary(in_short(labels, reward)) | {"answers": len(reward.answers)}
        for name, value in means.items():
            writer.add_scalar(f"charts/{name}", value, global_step)
        tqdm.write(f"step {global_step:,}: {dqn.in_words(means)}")
        checkpoint()
        Path(f"{args.run_dir}/rounds/{k - rounds.maxlen}.pt").unlink(missing_ok=True)

    writer.close()
    short = SimpleNamespace(add=labeller.add, result=lambda: in_short(labeller.result(), reward))
    dqn.write_result(f"{args.run_dir}/result", target_network, short, args)


@torch.no_grad()
def in_short(labels: torch.Tensor, reward: PreferenceReward) -> torch.Tensor:
    """Labels (…, D + 2) -> learned and ground-truth rewards (…, 2)."""
    embeddings = labels[..., :-2].to(next(reward.parameters()).device)
    return torch.stack([reward(embeddings).cpu(), labels[..., -1]], dim=-1)


def main() -> None:
    dqn.main(Args, Worker, train)


if __name__ == "__main__":
    try:
        main()
    except (UsageError, OSError, torch.OutOfMemoryError) as error:
        print(f"error: {error} (a run goes on with --resume)", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        os._exit(130)  # at once
