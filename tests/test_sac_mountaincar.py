"""The environment and both looks of the drawing, the actor's distribution, and trainings."""

from copy import deepcopy
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch.distributions import Normal, TanhTransform, TransformedDistribution
from torchvision.transforms.functional import resize

from sac_clip_mountaincar import SAC, Actor, Args, MountainCar, Scene, ground_truth_reward, sac_update, squash, summary


def draw(states: torch.Tensor, height: int, width: int, textures: str) -> torch.Tensor:
    return Scene(height, width, textures, torch.device("cpu")).draw(states)


def test_dynamics_are_gymnasiums_until_the_goal_which_is_absorbing():
    envs = MountainCar(48)
    obs, _ = envs.reset(seed=3)
    assert obs[:, 0].min() >= -0.6 and obs[:, 0].max() <= -0.4 and obs[:, 0].std() > 0.04 and not obs[:, 1].any()
    assert np.array_equal(MountainCar(48).reset(seed=3)[0], obs) and not np.array_equal(MountainCar(48).reset(seed=4)[0], obs)
    references = [gym.make("MountainCarContinuous-v0").unwrapped for _ in range(48)]
    for reference, state in zip(references, envs.state):
        reference.reset()
        reference.state = state.copy()
    rng = np.random.default_rng(0)
    there, walls, last = np.zeros(48, dtype=bool), 0, obs
    for t in range(200):
        actions = rng.uniform(-1.5, 1.5, (48, 1))  # beyond the limits, too
        actions[:24] = np.where(obs[:24, 1:] < 0, -1, 1)  # half of the cars swing themselves up
        actions[:4] = -1 if t < 40 else actions[:4]
        obs, _, terminations, truncations, _ = envs.step(actions)
        assert obs.dtype == np.float32 and not terminations.any() and not truncations.any()
        for i in np.flatnonzero(~there):
            expected, _, terminated, _, _ = references[i].step(actions[i])
            assert np.abs(obs[i] - expected).max() < 1e-5
            walls += expected[0] == np.float32(-1.2)
            there[i] |= terminated
        assert np.array_equal(obs[last[:, 0] >= 0.45], last[last[:, 0] >= 0.45])
        assert (ground_truth_reward(torch.from_numpy(obs)).bool().numpy() == there).all()
        last = obs
    assert there[:24].all() and not there[24:].all() and walls > 0


def test_ground_truth_is_one_at_the_goal_and_beyond():
    states = torch.tensor([[0.44, 0.07], [0.45, 0.0], [0.6, 0.01], [-1.2, 0.0], [-0.5, 0.0]])
    assert ground_truth_reward(states).tolist() == [0, 1, 1, 0, 0]


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
    meadow = frames[0, :, -size // 9 : -size // 16, size * 3 // 8].mean(1)  # in the valley
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


def test_an_episode_succeeds_if_the_car_is_at_the_goal_once():
    labels = torch.zeros(10, 4, 2)
    labels[3, 1, 1], labels[5:, 2, 1] = 1, 1
    assert summary(labels)["success_rate"] == 0.5 and summary(labels)["ground_truth_return"] == pytest.approx(6 / 4)


def test_actions_have_the_density_that_the_actor_says():
    torch.manual_seed(0)
    actor, obs, noise = Actor(), torch.randn(64, 2), torch.randn(64, 1)
    mean, log_std = actor(obs)
    actions, log_prob = squash(mean, log_std, noise)
    assert actions.abs().max() < 1
    expected = TransformedDistribution(Normal(mean, log_std.exp()), TanhTransform(cache_size=1)).log_prob(actions)
    torch.testing.assert_close(log_prob, expected.squeeze(1), atol=1e-4, rtol=1e-4)
    log_prob.sum().backward()
    assert all(value.isfinite().all() for value in squash(mean, log_std, 1000 * noise))


def test_one_update_is_sacs():
    """The gradients of critics and actor, calculated again, the actor's with the critics as they are after their step."""
    torch.manual_seed(0)
    args, sac = Args(gamma=0.9, ent_coef=0.2, tau=0.25), SAC()
    batch = torch.randn(16, 2) * 0.3, torch.randn(16, 2) * 0.3, torch.rand(16, 1) * 2 - 1, torch.rand(16)
    obs, next_obs, actions, rewards = batch
    before = deepcopy(sac)
    groups = {"q_optimizer": [*sac.qf1.parameters(), *sac.qf2.parameters()], "actor_optimizer": [*sac.policy.parameters()]}
    torch.manual_seed(1)
    sac_update(sac, {name: torch.optim.SGD(group, lr=0.1) for name, group in groups.items()}, batch, args)
    torch.manual_seed(1)
    noise = [torch.randn_like(actions), torch.randn_like(actions)]

    def act(states: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_std = before.policy(states)
        squashed = TransformedDistribution(Normal(mean, log_std.exp()), TanhTransform(cache_size=1))
        taken = (mean + log_std.exp() * noise).tanh()
        return taken, squashed.log_prob(taken).squeeze(1)

    with torch.no_grad():
        next_actions, next_log_prob = act(next_obs, noise[0])
        next_q = torch.minimum(before.qf1_target(next_obs, next_actions), before.qf2_target(next_obs, next_actions))
        td_target = rewards + 0.9 * (next_q - 0.2 * next_log_prob)
    for name in ("qf1", "qf2"):
        critic, after, target = getattr(before, name), getattr(sac, name), getattr(sac, f"{name}_target")
        gradients = torch.autograd.grad(((critic(obs, actions) - td_target) ** 2).mean(), list(critic.parameters()))
        for new, old, gradient, mean in zip(after.parameters(), critic.parameters(), gradients, target.parameters()):
            torch.testing.assert_close(new, old - 0.1 * gradient, rtol=1e-3, atol=1e-6)
            torch.testing.assert_close(mean, 0.75 * old + 0.25 * new)  # the targets began as copies
    taken, log_prob = act(obs, noise[1])
    loss = (0.2 * log_prob - torch.minimum(sac.qf1(obs, taken), sac.qf2(obs, taken))).mean()
    gradients = torch.autograd.grad(loss, list(before.policy.parameters()))
    for new, old, gradient in zip(sac.policy.parameters(), before.policy.parameters(), gradients):
        torch.testing.assert_close(new, old - 0.1 * gradient, rtol=1e-3, atol=1e-6)


def test_it_is_learned_from_a_program(learned):
    program = Path(__file__).parent.parent / "code_reward/programs/mountaincar.py"
    assert learned("sac_clip_mountaincar", "--total-timesteps=128000", f"--reward-program={program}") >= 0.7


@pytest.mark.slow
def test_it_is_learned_from_its_sentence(learned):
    assert learned("sac_clip_mountaincar") >= 0.7
