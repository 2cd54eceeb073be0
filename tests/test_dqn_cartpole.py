"""The environment and the drawing against Gymnasium's, and a training."""

import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from torchvision.transforms.functional import resize

from dqn_clip_cartpole import CartPole, draw, ground_truth_reward, summary

pytestmark = pytest.mark.filterwarnings("ignore:.*already returned terminated.*")  # Gymnasium's, which plays on here


def references_of(envs: CartPole) -> list[gym.Env]:
    references = [gym.make("CartPole-v1").unwrapped for _ in range(envs.num_envs)]
    for reference, state in zip(references, envs.state.T):
        reference.reset()
        reference.state = state.copy()
    return references


def test_dynamics_are_gymnasiums_over_200_random_steps_and_nothing_ends():
    envs = CartPole(32)
    obs, _ = envs.reset(seed=3)
    assert np.abs(obs).max() <= 0.05 and obs.std() > 0.02
    references, rng = references_of(envs), np.random.default_rng(0)
    inside = np.ones(32, dtype=bool)  # a cart that ran into the edge of the picture is where Gymnasium's would drive on
    fell = 0
    for _ in range(200):
        actions = rng.integers(2, size=32)
        obs, _, terminations, truncations, _ = envs.step(actions)
        assert obs.dtype == np.float32 and not terminations.any() and not truncations.any()
        expected = np.stack([reference.step(action)[0] for reference, action in zip(references, actions)])
        inside &= np.abs(expected[:, 0]) < 2.4
        difference = obs - expected
        difference[:, 2] = (difference[:, 2] + math.pi) % (2 * math.pi) - math.pi  # ours is wrapped
        assert np.abs(difference[inside]).max() < 1e-5
        fell += (np.abs(obs[:, 2]) > math.pi / 2).sum()
    assert inside.sum() >= 8 and fell > 0  # the comparison went all the way, and past the horizontal


def test_success_and_ground_truth_are_gymnasiums_limits():
    rng, envs = np.random.default_rng(1), CartPole(16)
    envs.reset(seed=0)
    references, alive, labels = references_of(envs), np.ones(16, dtype=bool), []
    for _ in range(60):
        actions = rng.integers(2, size=16)
        obs, *_ = envs.step(actions)
        alive &= ~np.array([reference.step(action)[2] for reference, action in zip(references, actions)])
        true_rewards = ground_truth_reward(torch.from_numpy(obs))
        assert (true_rewards.bool().numpy() >= alive).all()
        labels.append(torch.stack([0.5 * torch.ones(16), true_rewards], dim=1))
        figures = summary(torch.stack(labels))
        assert figures["success_rate"] == pytest.approx(alive.mean())
    assert not alive.all()  # random actions drop the pole, and yet nobody was stopped
    assert figures["clip_return"] == pytest.approx(30)
    assert figures["ground_truth_return"] == pytest.approx(torch.stack(labels)[:, :, 1].sum().item() / 16)


def test_state_stays_in_view_and_leaving_it_is_no_success():
    envs = CartPole(2)
    envs.reset(seed=0)
    for _ in range(200):
        obs, *_ = envs.step(np.array([1, 0]))
        assert np.abs(obs[:, 0]).max() <= 2.4 + 1e-6 and np.abs(obs[:, 2]).max() <= math.pi + 1e-6
    assert obs[:, 0].tolist() == pytest.approx([2.4, -2.4])
    limits = [[2.39, 0.2], [-2.39, -0.2], [2.4, 0.0], [-2.4, 0.0], [0.0, 0.21], [0.0, -0.21], [0.0, math.pi]]
    states = torch.tensor([[x, 0.0, theta, 0.0] for x, theta in limits])
    assert ground_truth_reward(states).tolist() == [1, 1, 0, 0, 0, 0, 0]


@pytest.fixture(scope="module")
def gymnasium_frames() -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(0)
    states = np.zeros((48, 4))
    states[:, 0], states[:, 2] = rng.uniform(-2.4, 2.4, 48), rng.uniform(-math.pi, math.pi, 48)
    states[:16, 2] = rng.uniform(-0.25, 0.25, 16)
    env = gym.make("CartPole-v1", render_mode="rgb_array")
    env.reset()
    frames = []
    for state in states:
        env.unwrapped.state = state
        frames.append(env.render())
    return torch.from_numpy(states), torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)


# An empty white frame would already be within 2.6 of 255 on average, so the limits are far below the 3 that were asked for.
@pytest.mark.parametrize("height, width, limit", [(64, 64, 0.8), (224, 224, 0.5), (336, 336, 0.4), (400, 600, 0.2)])
def test_drawing_is_gymnasiums_frame(gymnasium_frames, height, width, limit):
    states, reference = gymnasium_frames
    reference = resize(reference, [height, width], antialias=True).float()
    frames = draw(states, height, width)
    assert frames.shape == (48, 3, height, width) and frames.dtype == torch.uint8
    difference = (frames.float() - reference).abs().mean(dim=(1, 2, 3))
    assert difference.max() < limit
    assert ((255 - reference).abs().mean(dim=(1, 2, 3)) > 2 * limit).all()  # a white frame fails


def test_every_frame_is_drawn_from_its_own_state():
    states = torch.zeros(5, 4)
    states[:, 0], states[:, 2] = torch.linspace(-2, 2, 5), torch.linspace(-1, 1, 5)
    together = draw(states, 64, 64)
    for i in range(5):
        assert torch.equal(together[i : i + 1], draw(states[i : i + 1], 64, 64))
    assert draw(states[:0], 64, 64).shape == (0, 3, 64, 64)


def test_it_is_learned(learned):
    assert learned("dqn_clip_cartpole", "--total-timesteps=38400") >= 0.7
