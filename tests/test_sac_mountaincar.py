"""The environment and both looks of the drawing, and the actor's distribution."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch.distributions import Normal, TanhTransform, TransformedDistribution
from torchvision.transforms.functional import resize

from sac_clip_mountaincar import Actor, MountainCar, draw, ground_truth_reward

CPU = torch.device("cpu")


def references_of(envs: MountainCar) -> list[gym.Env]:
    references = [gym.make("MountainCarContinuous-v0").unwrapped for _ in range(envs.num_envs)]
    for reference, state in zip(references, envs.state.numpy()):
        reference.reset()
        reference.state = state.copy()
    return references


def test_dynamics_are_gymnasiums_until_the_goal_which_is_absorbing():
    envs = MountainCar(48, 200, CPU)
    obs, _ = envs.reset(seed=3)
    assert obs[:, 0].min() >= -0.6 and obs[:, 0].max() <= -0.4 and obs[:, 0].std() > 0.04 and not obs[:, 1].any()
    references = references_of(envs)
    rng = np.random.default_rng(0)
    there, walls, last = np.zeros(48, dtype=bool), 0, obs
    for t in range(200):
        actions = rng.uniform(-1.5, 1.5, (48, 1))  # beyond the limits, too
        actions[:24] = np.where(obs[:24, 1:] < 0, -1, 1)  # half of the cars swing themselves up
        actions[:4] = -1 if t < 40 else actions[:4]
        obs, rewards, terminations, truncations, infos = envs.step(torch.from_numpy(actions))
        for i in np.flatnonzero(~there):
            expected, _, terminated, _, _ = references[i].step(actions[i])
            assert np.abs(obs[i].numpy() - expected).max() < 1e-5
            walls += expected[0] == np.float32(-1.2)
            assert bool(infos["success"][i]) == terminated
            there[i] |= terminated
        assert torch.equal(obs[last[:, 0] >= 0.45], last[last[:, 0] >= 0.45])
        assert (infos["success"].numpy() == there).all() and torch.equal(rewards, infos["success"].float())
        assert not terminations.any() and (truncations == (t == 199)).all()
        last = obs
    assert there[:24].all() and not there[24:].all() and walls > 0


def test_ground_truth_is_one_at_the_goal_and_beyond():
    states = torch.tensor([[0.44, 0.07], [0.45, 0.0], [0.6, 0.01], [-1.2, 0.0], [-0.5, 0.0]])
    assert ground_truth_reward(states).tolist() == [0, 1, 1, 0, 0]


def test_same_seed_same_episodes():
    a, b, c = MountainCar(4, 10, CPU), MountainCar(4, 10, CPU), MountainCar(4, 10, CPU)
    assert torch.equal(a.reset(seed=1)[0], b.reset(seed=1)[0]) and not torch.equal(a.reset()[0], c.reset(seed=2)[0])


@pytest.fixture(scope="module")
def gymnasium_frames() -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(0)
    states = np.zeros((40, 2))
    states[:, 0] = rng.uniform(-1.2, 0.6, 40)
    states[:4, 0] = -1.2, 0.45, 0.5, 0.6
    env = gym.make("MountainCarContinuous-v0", render_mode="rgb_array")
    env.reset()
    frames = []
    for state in states:
        env.unwrapped.state = state
        frames.append(env.render())
    return torch.from_numpy(states), torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)


# An empty white frame would already be within 1.3 of 255 on average, so the limits are far below the 4 that were asked for; and a
# car in another place misses them.
@pytest.mark.parametrize("height, width, limit", [(64, 64, 0.7), (224, 224, 0.6), (336, 336, 0.6), (400, 600, 0.5)])
def test_original_drawing_is_gymnasiums_frame(gymnasium_frames, height, width, limit):
    states, reference = gymnasium_frames
    reference = resize(reference, [height, width], antialias=True).float()
    frames = draw(states, height, width, "original")
    assert frames.shape == (40, 3, height, width) and frames.dtype == torch.uint8
    difference = (frames.float() - reference).abs().mean(dim=(1, 2, 3))
    assert difference.max() < limit
    elsewhere = draw(states.flip(0), height, width, "original")  # another state's car
    apart = (states - states.flip(0))[:, 0].abs() > 0.2
    assert ((elsewhere.float() - reference).abs().mean(dim=(1, 2, 3)) > limit)[apart].all()


@pytest.mark.parametrize("size", [64, 224])
def test_realistic_drawing_shows_what_its_words_say(size):
    x = torch.tensor([-1.0, -0.8, -0.52, -0.2, 0.1, 0.45])
    frames = draw(torch.stack([x, 0 * x], dim=1), size, size, "realistic").float()
    red, green, blue = frames.unbind(1)
    car = (red > 150) & (green < 90) & (blue < 90)
    column = (car.sum(1) * torch.arange(size)).sum(1) / car.sum((1, 2))
    row = (car.sum(2) * torch.arange(size)).sum(1) / car.sum((1, 2))
    middle_column = (x + 1.2) / 1.8 * size
    middle_row = size - (0.45 * torch.sin(3 * x) + 0.55) / 1.2 * size
    assert ((column - middle_column).abs() < 0.05 * size).all()  # the body is above the wheels, on the side of the slope
    assert ((middle_row - row > 0) & (middle_row - row < 0.1 * size)).all()
    flag = (red > 200) & (green > 150) & (blue < 60)
    assert flag.any(2).any(1).all() and not flag[:, size // 5 :].any() and not flag[:, :, : size * 9 // 10].any()
    sky, rock = frames[:, :, : size // 16, : size // 8].mean((2, 3)), frames[:, :, -size // 4 :, -size // 4 :].mean((2, 3))
    assert (sky[:, 2] > sky[:, 0] + 50).all() and (rock.amax(1) < 120).all() and (rock[:, 0] > rock[:, 2]).all()
    snow = frames[0, :, size * 17 // 80, size * 19 // 20 :]
    assert snow.min() > 180
    meadow = frames[1, :, -size // 16 :, size * 3 // 8].mean(1)
    assert meadow[1] > meadow[0] + 20 and meadow[1] > meadow[2] + 20


def test_the_car_leans_with_the_slope():
    """The axis of the red body, by its second moments, against the slope of the ground."""
    x = torch.tensor([-0.9, -0.75, -0.524, -0.3, -0.1, 0.2, 0.42])
    frames = draw(torch.stack([x, 0 * x], dim=1), 400, 600, "realistic").float()
    car = ((frames[:, 0] > 120) & (frames[:, 1] < 60)).double()
    ups, rights = torch.meshgrid(-torch.arange(400.0), torch.arange(600.0), indexing="ij")
    weight = car / car.sum((1, 2), keepdim=True)
    right, up = (rights - (weight * rights).sum((1, 2), keepdim=True)), (ups - (weight * ups).sum((1, 2), keepdim=True))
    moments = [(weight * a * b).sum((1, 2)) for a, b in ((right, right), (up, up), (right, up))]
    lean = 0.5 * torch.atan2(2 * moments[2], moments[0] - moments[1])
    assert torch.allclose(lean, torch.atan(1.35 * torch.cos(3 * x)).double(), atol=0.12)  # 7°: the ground is curved


@pytest.mark.parametrize("textures", ["original", "realistic"])
def test_every_frame_is_drawn_from_its_own_state(textures):
    states = torch.stack([torch.linspace(-1.2, 0.6, 7), torch.zeros(7)], dim=1)
    for size in (16, 64):
        together = draw(states, size, size, textures)
        for i in range(7):
            assert torch.equal(together[i : i + 1], draw(states[i : i + 1], size, size, textures))
            assert i == 0 or not torch.equal(together[i], together[i - 1])
    assert draw(states[:0], 64, 64, textures).shape == (0, 3, 64, 64)


def test_actions_have_the_density_that_the_actor_says():
    torch.manual_seed(0)
    actor, obs, noise = Actor(), torch.randn(64, 2), torch.randn(64, 1)
    actions, log_prob = actor.get_action(obs, noise)
    mean, log_std = actor(obs)
    assert actions.abs().max() < 1
    expected = TransformedDistribution(Normal(mean, log_std.exp()), TanhTransform(cache_size=1)).log_prob(actions)
    torch.testing.assert_close(log_prob, expected.squeeze(1), atol=1e-4, rtol=1e-4)
    log_prob.sum().backward()
    _, extreme = actor.get_action(obs, 1000 * noise)
    assert extreme.isfinite().all()
