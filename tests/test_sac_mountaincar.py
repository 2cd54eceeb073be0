"""SAC of both scripts, and MountainCar's realistic look; the rest is in tests/test_dqn_cartpole.py."""

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from torch.distributions import Normal, TanhTransform, TransformedDistribution
from torch.nn.utils import parameters_to_vector as flat

import sac_clip_humanoid
import sac_clip_mountaincar

SACS = [sac_clip_mountaincar, sac_clip_humanoid]
ACTION_SIZE = {sac_clip_mountaincar: 1, sac_clip_humanoid: 17}


def test_the_realistic_look_shows_what_its_words_say():
    x = torch.linspace(-1.1, 0.3, 7)
    scene = sac_clip_mountaincar.Scene(400, 600, "realistic", torch.device("cpu"))
    frames = scene.render(x[:, None].expand(7, 2))
    assert torch.equal(torch.cat([scene.render(place.expand(1, 2)) for place in x]), frames)
    probes = [
        (60, 20, (66, 132, 208)), (60, 80, (86, 151, 214)),  # blue sky, paler to the horizon
        (150, 140, (128, 148, 184)), (150, 210, (78, 108, 112)),  # mountains far away
        (500, 350, (92, 80, 72)), (225, 373, (74, 125, 50)),  # rock, grass
        (570, 77, (235, 240, 250)), (580, 20, (255, 214, 0)),  # snow, yellow flag
    ]  # fmt: skip
    lean = torch.cos(3 * x)  # as of Gymnasium's car
    for right, up, color in ((36, 18, (214, 32, 28)), (-24, 9, (196, 200, 206)), (24, 9, (196, 200, 206))):
        columns = 600 / 1.8 * (x + 1.2) + lean.cos() * right - lean.sin() * up
        rows = 400 - 600 / 1.8 * (0.45 * (3 * x).sin() + 0.55) - lean.sin() * right - lean.cos() * up
        probes.append((columns, rows, color))  # the red car, its hubs
    for columns, rows, color in probes:
        seen = frames[range(7), :, torch.as_tensor(rows).long(), torch.as_tensor(columns).long()]
        assert (seen - torch.tensor(color)).abs().max() < 10


@pytest.mark.parametrize("script, num_envs", [(sac_clip_mountaincar, 80), (sac_clip_humanoid, 16)])
def test_sac_explores_with_correlated_noise(script, num_envs):
    """Random actions are uniform, a policy's noise is standard normal, both alike from step to step."""
    args = script.Args()
    envs = script.Humanoids(16) if script is sac_clip_humanoid else script.MountainCar(80)
    gaussian = torch.zeros(2, num_envs, ACTION_SIZE[script])  # mean and log σ
    for policy in (None, lambda obs: gaussian):
        states, actions = script.rollout(policy, 1.0, envs, SimpleNamespace(add=lambda _: None), 5, args)
        actions = actions.flatten(1).double()
        normal = actions.atanh() if policy else torch.erfinv(actions.clamp(-0.999999, 0.999999)) * 2**0.5
        assert normal.mean().abs() < 0.1 and normal.std().item() == pytest.approx(1, abs=0.05)
        for lag in (1, 10, 30):
            assert ((normal[:-lag] * normal[lag:]).mean() - args.noise_correlation**lag).abs() < 0.08
        n = normal.shape[1]  # one environment's noise, or motor's, is not another's
        assert (torch.corrcoef(normal.T).sum() - n).abs() / (n * (n - 1)) < 0.05
        if not policy:
            assert (torch.histc(actions, 10, -1, 1) / actions.numel() - 0.1).abs().max() < 0.03
            there = (states[-1, :, 0] >= 0.45).float().mean()  # some cars get there by chance
            assert script is sac_clip_humanoid or 0.02 < there < 0.25


def make_sac(script) -> tuple:
    """-> settings, and networks in float64 that see two numbers."""
    torch.manual_seed(0)
    args = script.Args(gamma=0.9, ent_coef=0.2, tau=0.25, n_step=3)
    sac = script.SAC(2, 17, args) if script is sac_clip_humanoid else script.SAC()
    sac.actor = sac.policy if script is sac_clip_mountaincar else sac.actor
    return args, sac.double()


def act(actor, obs: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Actions and their log probability, as PyTorch has them."""
    mean, log_std = actor(obs)
    density = TransformedDistribution(Normal(mean, log_std.exp()), TanhTransform(cache_size=1))
    actions = density.transforms[0](mean + log_std.exp() * noise)
    return actions, density.log_prob(actions).sum(1)


@pytest.mark.parametrize("script", SACS)
def test_actions_have_the_density_that_the_actor_says(script):
    actor = make_sac(script)[1].actor
    obs = torch.randn(64, 2).double()
    mean, log_std = actor(obs)
    noise = torch.randn_like(mean)
    torch.testing.assert_close(script.squash(mean, log_std, noise), act(actor, obs, noise))
    actions, log_prob = script.squash(mean, log_std, 1000 * noise)  # tanh is flat there
    gradients = torch.autograd.grad(log_prob.sum(), [*actor.parameters()])
    assert actions.abs().max() == 1 and log_prob.isfinite().all() and flat(gradients).isfinite().all()
    _, log_std = actor(1e5 * obs)
    assert log_std.min() == -5 and log_std.max() == 2


@pytest.mark.parametrize("script", SACS)
def test_one_update_is_sacs(script):
    """Calculated again: critics, actor (with the new critics), entropy coefficient, running means."""
    args, sac = make_sac(script)
    is_car = script is sac_clip_mountaincar
    means = {"target_critics": "critics"} | ({} if is_car else {"mean_actor": "actor"})
    for name in means:  # somewhere else than what they follow
        for weight in getattr(sac, name).parameters():
            weight.data += 0.02 * torch.randn_like(weight)
    states = 0.3 * torch.randn(2, 16, 2).double()
    actions = torch.rand(16, ACTION_SIZE[script]).double() * 2 - 1
    rewards = torch.rand(args.n_step, 16).double()
    scaled = states
    td_target = sum(0.9**k * reward for k, reward in enumerate(rewards))
    batch = (*states, actions, td_target, 0.9 ** len(rewards))
    if not is_car:
        sac.obs_norm.update(0.5 * torch.randn(100, 2) + 0.1)
        scaled = (scaled - sac.obs_norm.mean) / (sac.obs_norm.var + 1e-8).sqrt()
    obs, next_obs = scaled
    old = deepcopy(sac)
    groups = {name: adam.param_groups[0]["params"] for name, adam in sac.optimizers(0.1).items()}
    optimizers = {name: torch.optim.SGD(group, 0.1) for name, group in groups.items()}
    torch.manual_seed(1)
    script.sac_update(sac, optimizers, batch, *([] if is_car else [True]), args)
    torch.manual_seed(1)
    noise = [torch.randn_like(actions) for _ in range(2)]

    next_actions, next_log_prob = act(old.actor, next_obs, noise[0])
    targets = [critic(next_obs, next_actions) for critic in old.target_critics]
    td_target = td_target + 0.9 ** len(rewards) * (torch.minimum(*targets) - 0.2 * next_log_prob).detach()
    new_actions, log_prob = act(old.actor, obs, noise[1])
    new_q = torch.minimum(*(critic(obs, new_actions) for critic in sac.critics))
    losses = {"critics": sum(((critic(obs, actions) - td_target) ** 2).mean() for critic in old.critics)}
    losses["actor"] = (0.2 * log_prob - new_q).mean()
    for name, loss in losses.items():
        before = [*getattr(old, name).parameters()]
        expected = flat(before) - 0.1 * flat(torch.autograd.grad(loss, before))
        torch.testing.assert_close(flat(getattr(sac, name).parameters()), expected)
    for name, learned in means.items():
        networks = (getattr(old, name), getattr(sac, learned), getattr(sac, name))
        before, value, after = (flat(network.parameters()) for network in networks)
        torch.testing.assert_close(after, 0.75 * before + 0.25 * value)
    if not is_car:
        gap = 17 - log_prob.mean()  # of the entropy to its target, -1 a motor
        torch.testing.assert_close(sac.log_ent_coef, old.log_ent_coef - 0.1 * 0.2 * gap)
        kept = deepcopy(sac.state_dict())
        script.sac_update(sac, optimizers, batch, False, args)
        changed = {key.split(".")[0] for key, value in sac.state_dict().items() if (value != kept[key]).any()}
        assert changed - {"policy"} == {"critics", *means}  # not the actor; its mean all the same
