"""DQN; dynamics and frames of CartPole and MountainCar; what all scripts sample; whole trainings."""

import json
import math
import sys
from collections import deque
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch.nn.utils import parameters_to_vector as flat
from torchvision.transforms.functional import resize

import dqn_clip_cartpole
import sac_clip_humanoid
import sac_clip_mountaincar
from dqn_clip_cartpole import Args, CartPole, QNetwork, dqn_update, render
from sac_clip_mountaincar import MountainCar, Scene


def play(envs, name: str, starts: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, ...]:
    """Actions (T, N, …) -> states (T, N, S) of ours, of Gymnasium's, and whether that says `terminated`."""
    states = np.stack([envs.step(action) for action in actions])
    expected = np.empty(states.shape)
    terminated = np.empty(states.shape[:2], dtype=bool)
    env = gym.make(name).unwrapped
    for n, start in enumerate(starts):
        env.state = start
        for t in range(len(actions)):
            expected[t, n], _, terminated[t, n], _, _ = env.step(actions[t, n])
    return states, expected, terminated


def ground_truth(script, states: np.ndarray, success: np.ndarray) -> np.ndarray:
    """Success until each step (T, N); -> ground-truth rewards (T, N), after a look at the summary."""
    truth = script.ground_truth_reward(torch.from_numpy(states).flatten(0, 1)).view(success.shape)
    for t in (10, 30, 60, len(truth)):
        returned = truth[:t].sum(0).mean().item()
        means = {"success_rate": success[t - 1].mean(), "ground_truth_return": returned}
        labels = torch.stack([truth + 1, truth], dim=2)[:t]
        assert script.summary(labels) == pytest.approx(means | {"clip_return": t + returned}, rel=1e-5)
    return truth.numpy()


@pytest.mark.filterwarnings("ignore:.*already returned terminated.*")  # Gymnasium's, which plays on here
def test_cartpole_and_its_success_are_gymnasiums_but_for_the_edges():
    envs = CartPole(32)
    envs.reset(seed=3)
    actions = np.random.default_rng(0).integers(2, size=(200, 32))
    actions[:, :2] = (0, 1)  # these drive straight to the edges of the picture
    states, expected, terminated = play(envs, "CartPole-v1", envs.state.T.copy(), actions)
    in_view = np.logical_and.accumulate(np.abs(expected[:, :, 0]) < 2.4)  # Gymnasium's drives on
    difference = states - expected
    difference[:, :, 2] = (difference[:, :, 2] + math.pi) % (2 * math.pi) - math.pi  # ours is wrapped
    assert np.abs(difference[in_view]).max() < 1e-5 and 8 <= in_view[-1].sum() < 32
    x, _, theta, _ = states.transpose(2, 0, 1)
    assert np.abs(x).max() <= 2.4 + 1e-6 and 3 < np.abs(theta).max() <= math.pi + 1e-6
    assert x[-1, :2].tolist() == pytest.approx([-2.4, 2.4])
    truth = ground_truth(dqn_clip_cartpole, states, ~np.logical_or.accumulate(terminated))
    unturned = in_view & (np.abs(expected[:, :, 2]) < math.pi)
    assert np.array_equal(truth[unturned], ~terminated[unturned]) and not truth[np.abs(x) > 2.399].any()


def test_mountaincar_and_its_success_are_gymnasiums_but_the_goal_is_absorbing():
    envs = MountainCar(48)
    other, once, again = (envs.reset(seed=seed) for seed in (4, 3, 3))
    assert np.array_equal(once, again) and not np.array_equal(once, other)
    assert np.abs(once[:, 0] + 0.5).max() <= 0.1 and once[:, 0].std() > 0.04 and not once[:, 1].any()
    envs.state[24:26] = ((-1.0, 0.069), (0.2, -0.069))  # soon as fast as cars may be
    actions = np.random.default_rng(0).uniform(-1.5, 1.5, (200, 48, 1))  # beyond the limits, too
    actions[:, :24] = np.where(np.arange(200) % 86 < 43, -1, 1)[:, None, None]  # half of them swing up
    states, expected, terminated = play(envs, "MountainCarContinuous-v0", envs.state.copy(), actions)
    there = np.logical_or.accumulate(terminated)
    assert there[-1, :24].all() and not there[-1, 24:].all() and (states[..., 0] == np.float32(-1.2)).any()
    same = np.abs(states - expected).max(2) < 1e-5
    assert same[0].all() and same[1:][~there[:-1]].all()  # up to the step to the goal
    assert np.array_equal(states[1:][there[:-1]], states[:-1][there[:-1]])
    assert np.array_equal(ground_truth(sac_clip_mountaincar, states, there), there)


def render_car(states: torch.Tensor, height: int, width: int) -> torch.Tensor:
    return Scene(height, width, "original", states.device).render(states)


CART = ("CartPole-v1", render, [-2.4, 0, -math.pi, 0], [2.4, 0, math.pi, 0], (0.8, 0.5, 0.4, 0.2))
CAR = ("MountainCarContinuous-v0", render_car, [-1.2, 0], [0.6, 0], (0.7, 0.6, 0.6, 0.5))


@pytest.mark.parametrize("name, render, low, high, limits", [CART, CAR])
def test_frames_are_gymnasiums_and_each_states_own(name, render, low, high, limits):
    states = np.random.default_rng(0).uniform(low, high, (48, len(low)))
    states[:16, 2:] /= 12  # poles that are nearly upright
    states[:4, 0] = (-1.2, 0.45, 0.5, 0.6)  # cars at the wall, at the goal and beyond
    env = gym.make(name, render_mode="rgb_array").unwrapped
    frames = []
    for state in states:
        env.state = state
        frames.append(env.render())
    original = torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)
    apart = np.abs(states - states[::-1])[:, 0] > 0.2
    states = torch.from_numpy(states)
    for size, limit in zip(((64, 64), (224, 224), (336, 336), (400, 600)), limits):
        reference = resize(original, size, antialias=True).float()
        frames = render(states, *size)
        assert frames.shape == (48, 3, *size) and frames.dtype == torch.uint8
        assert (frames - reference).abs().mean((1, 2, 3)).max() < limit
        assert (frames.flip(0) - reference).abs().mean((1, 2, 3))[apart].min() > limit  # another state's
        assert torch.equal(torch.cat([render(state[None], *size) for state in states[:7]]), frames[:7])
        assert render(states[:0], *size).shape == (0, 3, *size)


N_STEP = {dqn_clip_cartpole: 3, sac_clip_mountaincar: 5, sac_clip_humanoid: 3}


@pytest.mark.parametrize("script", N_STEP)
def test_a_sample_pairs_states_that_are_n_steps_apart_with_the_rewards_between(script):
    """In round k step t of environment i has the state 1000 k + 10 t + i, and as reward its tenfold."""
    n, humanoid = N_STEP[script], script is sac_clip_humanoid
    sizes = {"episode_length": 6, "num_envs": 3, "total_timesteps": 10**6, "buffer_size": 60}
    args = replace(script.Args(), batch_size=3000, **sizes)
    rb = sac_clip_humanoid.ReplayBuffer(4, args, torch.device("cpu")) if humanoid else deque(maxlen=4)
    rounds = [1000.0 * k + 10 * torch.arange(7)[:, None] + torch.arange(3) for k in range(7)]
    for k, numbers in enumerate(rounds):
        states = numbers[:, :, None].expand(
            7, 3, 4 if humanoid else 2
        )  # the humanoid's first two are not seen
        if humanoid:
            rb.add(states, states[:-1, :, :1].expand(6, 3, 17) % 2, 10 * numbers[:-1])
            assert rb.rounds == k + 1 and rb.capacity == 4  # 60 transitions in whole rounds
            obs, next_obs, actions, n_step_return, discount = rb.sample(args)
        else:
            rb.append((states, states[:-1, :, 0] % 2, 10 * numbers[:-1]))
            batch = script.sample(tuple(map(torch.stack, zip(*rb))), args)
            obs, next_obs, actions, n_step_return, discount = batch
        kept = torch.stack(rounds[max(0, k - 3) : k + 1])[:, :-1]
        starts, counts = obs[:, 0].unique(return_counts=True)
        assert torch.equal(starts, kept[:, : 7 - n].flatten()) and counts.min() > 0.5 * counts.float().mean()
        assert torch.equal(next_obs, obs + 10 * n) and (actions.view(3000, -1) == obs[:, :1] % 2).all()
        expected = torch.stack([10 * obs[:, 0] + 100 * step for step in range(n)])
        if humanoid:  # standardized
            expected = (expected - 10 * kept.mean()) / (10 * kept.std(correction=0))
        expected = sum(args.gamma**step * reward for step, reward in enumerate(expected))
        torch.testing.assert_close(n_step_return, expected, rtol=1e-4, atol=1e-3)
        assert discount == args.gamma**n


@pytest.mark.parametrize("scale", [1, 100])  # of the last weights: with the larger ones gradients are cut
def test_one_update_is_dqns(scale):
    """Calculated again in float64."""
    torch.manual_seed(0)
    args = Args(gamma=0.9, tau=0.1, n_step=2)
    q_network, target_network = (QNetwork().double() for _ in range(2))
    q_network[-1].weight.data *= scale
    q_before, target_before = deepcopy((q_network, target_network))
    obs, next_obs = torch.randn(2, 32, 4).double()
    actions = torch.randint(2, (32,))
    rewards = 5 * torch.rand(2, 32).double()
    optimizer = torch.optim.SGD(q_network.parameters(), lr=0.1)
    batch = (obs, next_obs, actions, rewards[0] + 0.9 * rewards[1], 0.81)
    losses = dqn_update(q_network, target_network, optimizer, batch, args)
    td_target = rewards[0] + 0.9 * rewards[1] + 0.81 * target_before(next_obs).amax(1).detach()
    error = (q_before(obs)[torch.arange(32), actions] - td_target).abs()
    loss = torch.where(error < 1, 0.5 * error**2, error - 0.5).mean()  # Huber's
    gradient = flat(torch.autograd.grad(loss, [*q_before.parameters()]))
    assert losses["td_loss"].item() == pytest.approx(loss.item()) and (gradient.norm() > 10) == (scale > 1)
    networks = (q_network, q_before, target_network, target_before)
    q_values, q_old, target, target_old = (flat(net.parameters()) for net in networks)
    torch.testing.assert_close(q_values, q_old - 0.1 * gradient * min(1, 10 / gradient.norm()))
    torch.testing.assert_close(target, 0.9 * target_old + 0.1 * q_values)


PROGRAMS = Path(__file__).parent.parent / "code_reward/programs"
QUICK = f"dqn_clip_cartpole --total-timesteps=19200 --gradient-steps=300 --clip-model={PROGRAMS}/cartpole.py"
WHOLE = [
    "dqn_clip_cartpole --total-timesteps=38400",
    "dqn_clip_cartpole --reward=ground-truth",
    f"sac_clip_mountaincar --total-timesteps=128000 --clip-model={PROGRAMS}/mountaincar.py",
    "sac_clip_mountaincar",
    "sac_clip_humanoid",  # as by default: fewer steps reach 0.02 to 1
]


@pytest.mark.parametrize("words", [QUICK, *(pytest.param(words, marks=pytest.mark.slow) for words in WHOLE)])
def test_it_is_learned(words, call, tmp_path):
    script, *words = words.split()
    call(sys.modules[script], *words, "--episodes=48", "--device=cpu", f"--run-dir={tmp_path}/run")
    assert json.loads((tmp_path / "run/result.json").read_text())["success_rate"] >= 0.7
