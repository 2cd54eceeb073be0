"""A success signal and a sentence: SAC on MountainCar, paid for the flag, with CLIP's opinion as a help.

    python neighbours/sac_shaped_mountaincar.py --reward shaped --rho 10
    python neighbours/sac_shaped_mountaincar.py --reward sum --rho 10 --prompt "a car in the valley"

With the success signal g(s) (1 at the flag, else 0) and CLIP's reward R(s), a step from s to s′ earns

    success   g(s′)
    sum       g(s′) + ρ R(s′)
    shaped    g(s′) + ρ (γ R(s′) - R(s))    the potential is R: no optimal policy changes (Ng et al., 1999)
    furl      g(s′) + ρ cos(f(s′), h)       FuRL (Fu et al., ICML 2024, arXiv 2406.00645)

A sum can pay more for staying where R is high than for the flag. Shaping cannot, however wrong the sentence:
discounted over an episode its terms add up to ρ (γᵀ R(s_T) - R(s₀)). FuRL calls R fuzzy and mends it. Two
small heads on the frozen embeddings of frame and sentence, f and h, learn from a margin ranking loss,

    max(0, δ - cos(f(s⁺), h) + cos(f(s⁻), h)),

s⁺ from a successful episode up to the flag, s⁻ from a failed one, or earlier in the same. And while successes
are few, two policies relay each other within an episode, one paid as above, the other by g alone: one goes on
where the other is stuck. Otherwise than in the paper there is no picture of the goal, so that before the
first success f and h say nothing and g is all; ρ, the turns' lengths and the relay's end are for this car.
Environment, networks, update: sac_clip_mountaincar.py. Here is what is different: reward, relay, loop.
"""

import math
import os
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
import sac_clip_mountaincar as car
from clip_reward import Labeller, UsageError


@dataclass
class Args(car.Args):
    """Teach MountainCar with a success signal and a sentence (no --evaluate or --ray-workers)."""

    reward: Literal["success", "sum", "shaped", "furl"] = "shaped"  # what a step earns
    rho: float = 1.0  # ρ, the weight of the sentence
    margin: float = 0.1  # furl: δ of the ranking loss
    relay_until: int = 32  # furl: successful episodes kept, from which on the first policy acts alone

    def __post_init__(self):
        if self.evaluate or self.ray_workers or self.clip_model.endswith(".py"):
            raise UsageError("there is no --evaluate, --ray-workers or reward program here")


class Worker(car.Worker):
    """Renders states and embeds the frames."""

    @torch.no_grad()
    def label(self, states: torch.Tensor) -> torch.Tensor:
        """States (N, 2) -> embeddings, CLIP reward and success, side by side (N, D + 2), on the CPU."""
        embeddings = self.reward_model.embed(self.scene.render(states))
        columns = [self.reward_model.reward(embeddings).cpu(), car.ground_truth_reward(states)]
        return torch.cat([embeddings.cpu(), torch.stack(columns, dim=1)], dim=1)


# ---- The reward


class Heads(nn.Module):
    """FuRL's reward: embeddings of frames (…, D) -> cosines with the sentence's, a head before each (…,)."""

    def __init__(self, text: torch.Tensor):
        super().__init__()
        size = len(text)
        self.image = nn.Sequential(nn.Linear(size, 256), nn.ReLU(), nn.Linear(256, 64))
        self.sentence = nn.Sequential(nn.Linear(size, 256), nn.ReLU(), nn.Linear(256, 64))
        self.register_buffer("text", text.clone(), persistent=False)

    def forward(self, embeddings: torch.Tensor) -> torch.Tensor:
        return F.cosine_similarity(self.image(embeddings), self.sentence(self.text), dim=-1)


def ranking_loss(better: torch.Tensor, worse: torch.Tensor, margin: float | torch.Tensor) -> torch.Tensor:
    """Rewards of pairs (B,) -> by how much the better is not `margin` above the worse, on average."""
    return (margin - better + worse).clamp(min=0).mean()


def learn_heads(heads: Heads, labels: torch.Tensor, args: Args, updates: int = 200) -> None:
    """From the labels of all episodes kept (M, T + 1, N, D + 2), if some succeeded and some failed."""
    _, steps, num_envs, _ = labels.shape
    success = labels[..., -1].transpose(1, 2).flatten(0, 1).bool()  # (M N, T + 1)
    won = success.any(1)
    if won.all() or not won.any():
        return
    first = success.int().argmax(1)  # the step at which the flag is reached
    optimizer = torch.optim.Adam(heads.parameters(), lr=1e-4, fused=True)
    for _ in range(updates):
        i = won.nonzero().squeeze(1)[torch.randint(int(won.sum()), (256,), device=won.device)]
        j = (~won).nonzero().squeeze(1)[torch.randint(int((~won).sum()), (256,), device=won.device)]
        late = (torch.rand(256, device=won.device) * (first[i] + 1)).long()
        early = (torch.rand(256, device=won.device) * (late + 1)).long()
        any_step = torch.randint(steps, (256,), device=won.device)
        chosen = ((i, late), (j, any_step), (i, early))
        positive, negative, before = (heads(labels[k // num_envs, t, k % num_envs, :-2]) for k, t in chosen)
        loss = ranking_loss(positive, negative, args.margin)
        margins = torch.where(late > early, args.margin, 0.0)  # a frame is not better than itself
        loss = loss + ranking_loss(positive, before, margins)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def rewards_of(labels: torch.Tensor, kind: str, heads: Heads, args: Args) -> torch.Tensor:
    """Labels (…, T + 1, N, D + 2) of an episode's states -> what its steps earn (…, T, N)."""
    opinion = labels[..., -2]
    success = labels[..., 1:, :, -1]
    if kind == "success" or (kind == "furl" and not success.any()):
        return success
    if kind == "shaped":
        return success + args.rho * (args.gamma * opinion[..., 1:, :] - opinion[..., :-1, :])
    if kind == "furl":
        opinion = heads(labels[..., :-2])
    return success + args.rho * opinion[..., 1:, :]


# ---- The relay


class Relay(nn.Module):
    """Two policies that take turns of 25 to 100 steps, in each environment in an order of its own."""

    def __init__(self, policies: list[car.Actor], num_envs: int, rng: torch.Generator):
        super().__init__()
        self.policies = nn.ModuleList(policies)
        self.turn = torch.randint(25, 101, (num_envs,), generator=rng)
        self.start = torch.randint(2, (num_envs,), generator=rng)
        self.step = 0

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        second = ((self.step // self.turn + self.start) % 2 == 1)[:, None]  # is it the second's turn? (N, 1)
        self.step += 1
        both = zip(*(policy(obs) for policy in self.policies))  # means, then deviations
        return tuple(torch.where(second, other, one) for one, other in both)


# ---- The loop


def train(args: Args, labeller: Labeller) -> None:
    """As that of sac_clip_mountaincar.py, with one policy or FuRL's two; the last policy counts."""
    device = labeller.device
    kinds = ["furl", "success"] if args.reward == "furl" else [args.reward]
    envs = car.MountainCar(args.num_envs)
    torch.manual_seed(args.seed)
    learners = [car.SAC().to(device) for _ in kinds]
    optimizers = [sac.optimizers(args.learning_rate) for sac in learners]
    heads = Heads(labeller.reward_model.goal).to(device)
    a_round = args.num_envs * args.episode_length
    rounds = deque(maxlen=math.ceil(args.buffer_size / a_round))  # labels, from which rewards are made anew
    parts = {"policy": learners[0].policy, "heads": heads}
    for kind, sac, own in zip(kinds, learners, optimizers):
        parts |= {kind: sac} | {f"{kind}_{name}": optimizer for name, optimizer in own.items()}
    global_step, _ = car.open_run(args, labeller, rounds, parts)
    if rounds:
        states, _, labels = rounds[-1]
        labeller.check(states[::25].flatten(0, 1).cpu(), labels[::25, :, 0].flatten().cpu())

    def checkpoint() -> None:
        content = {name: part.state_dict() for name, part in parts.items()}
        content |= {"script": Path(__file__).stem, "settings": asdict(args)}
        car.save(f"{args.run_dir}/checkpoint.pt", step=global_step, best_return=0.0, **content)

    checkpoint()
    writer = SummaryWriter(args.run_dir, purge_step=global_step + 1)
    for k in trange(global_step // a_round, math.ceil(args.total_timesteps / a_round), unit="round"):
        warmup = global_step < args.learning_starts
        won = sum(int(labels[..., -1].any(0).sum()) for _, _, labels in rounds)
        relay = len(learners) == 2 and won < args.relay_until
        seeds = np.random.SeedSequence((args.seed, k)).generate_state(3).tolist()

        # ---- Act, in a thread: at random, in relay, or with the policy that the sentence pays.
        policy = None if warmup else deepcopy(learners[0].policy).cpu()
        if relay and not warmup:
            rng = torch.Generator().manual_seed(seeds[2])
            policy = Relay([policy, deepcopy(learners[1].policy).cpu()], args.num_envs, rng)
        playing = labeller.pool.submit(car.rollout, policy, 1.0, envs, labeller, seeds[0], args)

        # ---- Learn, at the same time: the heads, then each policy from the same transitions and its rewards.
        torch.manual_seed(seeds[1])
        if rounds and not warmup:
            states, actions, labels = map(torch.stack, zip(*rounds))
            if args.reward == "furl":
                learn_heads(heads, labels, args)
            for kind, sac, own in list(zip(kinds, learners, optimizers))[: 2 if relay else 1]:
                buffer = (states, actions, rewards_of(labels, kind, heads, args))
                for optimizer in own.values():
                    optimizer.param_groups[0]["lr"] = args.learning_rate
                for _ in range(args.gradient_steps):
                    car.sac_update(sac, own, car.sample(buffer, args), args)

        # ---- Embed what was played, its start states last, and store it.
        states, actions = playing.result()
        labeller.add(states[0])
        labels = labeller.result().view(args.episode_length + 1, args.num_envs, -1).roll(1, dims=0)
        rounds.append([part.to(device) for part in (states, actions, labels)])
        car.save(f"{args.run_dir}/rounds/{k}.pt", round=(states, actions, labels))
        global_step += a_round

        # ---- Report.
        means = car.summary(labels[1:, :, -2:])
        for name, value in means.items():
            writer.add_scalar(f"charts/{name}", value, global_step)
        tqdm.write(f"step {global_step:,}: {car.in_words(means)}")
        checkpoint()
        Path(f"{args.run_dir}/rounds/{k - rounds.maxlen}.pt").unlink(missing_ok=True)

    writer.close()
    short = SimpleNamespace(add=labeller.add, result=lambda: labeller.result()[:, -2:])
    car.write_result(f"{args.run_dir}/result", learners[0].policy, short, args)


def main() -> None:
    car.main(Args, Worker, train)


if __name__ == "__main__":
    try:
        main()
    except (UsageError, OSError, torch.OutOfMemoryError) as error:
        print(f"error: {error} (a run goes on with --resume)", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        os._exit(130)  # at once
