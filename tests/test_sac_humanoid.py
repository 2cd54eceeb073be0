"""The environment against Gymnasium, both looks, the tasks' conditions, the parts of SAC, and a training."""

import math
import subprocess
import sys
from copy import deepcopy
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import mujoco
import numpy as np
import pytest
import torch
from PIL import Image
from torch.distributions import Normal, TanhTransform, TransformedDistribution

import sac_clip_humanoid
from sac_clip_humanoid import SAC, TASKS, Actor, Args, Normalize, Scene, make_envs, rollout, sac_update, squash, summary

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
MODEL = gym.make("Humanoid-v5").unwrapped.model
DATA = mujoco.MjData(MODEL)


@pytest.mark.parametrize("paper", [False, True])
def test_environment_is_gymnasiums(paper):
    """Two episodes in each of three, played by Gymnasium again from the same seeds with the same actions."""
    args, size, labelled = Args(paper=paper), 350 if paper else 177, []
    envs, labeller = make_envs(3, args), SimpleNamespace(add=labelled.append)
    references = [gym.make("Humanoid-v5", terminate_when_unhealthy=False).unwrapped for _ in range(3)]
    torch.manual_seed(0)
    agent = SAC(size, args)
    for seed, policy in ((5, None), (9, agent.policy)):
        labelled.clear()
        states, actions = rollout(policy, 1.0, envs, labeller, seed, args)
        assert states.shape == (101, 3, size) and states.dtype == torch.float32
        assert actions.shape == (100, 3, 17) and 0.95 < actions.abs().max() <= 1
        assert torch.equal(torch.stack(labelled), states[1:, :, :24])  # the poses after each step
        starts = [env.reset(seed=seed + i)[0] for i, env in enumerate(references)]
        for t in range(101):  # Gymnasium's own observation leaves out the place on the floor
            observed = starts if t == 0 else [env.step(0.4 * a)[0] for env, a in zip(references, actions[t - 1].numpy())]
            observed = torch.tensor(np.stack(observed), dtype=torch.float32)
            torch.testing.assert_close(states[t, :, 2:], observed[:, : size - 2], atol=1e-4, rtol=1e-4)
            qpos = torch.tensor(np.stack([env.data.qpos for env in references]), dtype=torch.float32)
            torch.testing.assert_close(states[t, :, :24], qpos, atol=1e-4, rtol=1e-4)
        assert states[-1, :, 2].max() < 1  # they have fallen, where Gymnasium's own would have started again
    with torch.no_grad():  # the policy sees the states as they are but for their first two numbers
        rng = torch.Generator().manual_seed(9)
        before, fresh = torch.randn(3, 17, generator=rng), torch.randn(3, 17, generator=rng)
        noise = 0.9 * before + math.sqrt(1 - 0.9**2) * fresh
        torch.testing.assert_close(actions[0], squash(*agent.policy(states[0, :, 2:]), noise)[0])


def test_random_actions_are_uniform_and_an_evaluation_has_no_noise():
    args, labeller = Args(episode_length=10), SimpleNamespace(add=lambda poses: None)
    envs, agent = make_envs(100, args), SAC(177, args)
    actions = rollout(None, 1.0, envs, labeller, 0, args)[1].flatten()
    share = (actions[:, None] < torch.linspace(-1, 1, 21)).float().mean(0)
    assert (share - torch.linspace(0, 1, 21)).abs().max() < 0.03
    states, actions = rollout(agent.policy, 0.0, envs, labeller, 0, args)
    torch.testing.assert_close(actions, agent.policy(states[:-1, :, 2:].flatten(0, 1))[0].tanh().view_as(actions))


# ---- Drawing


def pose(pitch: float = 0, roll: float = 0, yaw: float = 0, lift: float = 0, **degrees: float) -> list[float]:
    """A state on the floor (or `lift` m above it) from joint angles; `hip_y` means both hips', `right_hip_y` only one."""
    data = DATA
    data.qpos[:] = MODEL.qpos0
    mujoco.mju_euler2Quat(data.qpos[3:7], np.radians([yaw, pitch, roll]), "zyx")
    joints = [MODEL.joint(i) for i in range(1, MODEL.njnt)]
    for name, angle in degrees.items():
        for joint in [joint for joint in joints if joint.name in (name, f"left_{name}", f"right_{name}")]:
            mirrored = "left_shoulder" in joint.name and not name.startswith("left")
            data.qpos[joint.qposadr] = np.radians(-angle if mirrored else angle)
    mujoco.mj_kinematics(MODEL, data)
    below = data.geom_xpos[1:, 2] - MODEL.geom_size[1:, 0] - abs(data.geom_xmat[1:, 8]) * MODEL.geom_size[1:, 1]
    data.qpos[2] += lift - below.min()
    return data.qpos.tolist()


def points_of(*states: list[float]) -> dict[str, torch.Tensor]:
    return Scene(8, 8, "original", "fixed", 1, len(states), CPU).draw(torch.tensor(states))[1]


STANDING = pose(knee=-5)
RAISED = {"shoulder1": -84, "shoulder2": 20, "elbow": -85}
ON_HIPS = {"shoulder1": 48, "shoulder2": -75, "elbow": -15}
CROSSED = {"shoulder1": 58, "shoulder2": 38, "elbow": -83}
KNEELING = {"knee": -95, "hip_y": -5}
SPLITS = {"hip_x": -18, "hip_z": -58, "hip_y": -78, "knee": -8}
LOTUS = {"hip_x": 3, "hip_z": -58, "hip_y": -41, "knee": -158, "abdomen_y": -32, "pitch": -10}
RIGHT_UP = {"right_hip_y": -80, "right_knee": -90}


def test_points_are_where_mujoco_says():
    state = pose(20, 10, 30, hip_y=-40, knee=-70, right_elbow=-60)
    points = points_of(state)
    DATA.qpos[:] = state
    mujoco.mj_kinematics(MODEL, DATA)
    where = {"head": DATA.geom("head").xpos, "seat": DATA.geom("butt").xpos}
    for side in ("right", "left"):
        for point, body in (("hip", "thigh"), ("knee", "shin"), ("shoulder", "upper_arm"), ("elbow", "lower_arm")):
            where[f"{side}_{point}"] = DATA.body(f"{side}_{body}").xpos
        where |= {f"{side}_{part}": DATA.geom(f"{side}_{part}").xpos for part in ("hand", "foot")}
    assert points.keys() == where.keys()
    for name, place in where.items():
        np.testing.assert_allclose(points[name][0], place, atol=1e-5)


@pytest.mark.parametrize("textures, camera", [("realistic", "fixed"), ("original", "original")])
def test_a_frame_is_the_stored_one(textures, camera):
    """tests/humanoid_TEXTURES_CAMERA.png, 96 x 96: standing with raised arms, and kneeling."""
    frames, _ = Scene(96, 96, textures, camera, 1, 2, CPU).draw(torch.tensor([pose(knee=-5, **RAISED), pose(**KNEELING)]))
    path = Path(__file__).with_name(f"humanoid_{textures}_{camera}.png")
    reference = torch.from_numpy(np.array(Image.open(path))).unflatten(1, (2, 96)).permute(1, 3, 0, 2).float()
    difference = (frames.float() - reference).abs().mean((1, 2, 3))
    apart = (reference[0] - reference[1]).abs().mean()
    assert difference.max() < 1 < apart / 3


def test_the_fixed_camera_is_the_papers():
    """Azimuth 180°, elevation -10°, distance 3.5 m, looking at (0, 0, 1), 45° high."""
    model = sac_clip_humanoid.scene_model("realistic")
    data, camera, elevation = mujoco.MjData(model), model.camera("fixed").id, np.radians(-10)
    mujoco.mj_forward(model, data)
    axes = data.cam_xmat[camera].reshape(3, 3)
    np.testing.assert_allclose(-axes[:, 2], [-np.cos(elevation), 0, np.sin(elevation)], atol=1e-6)  # it looks towards -x
    np.testing.assert_allclose(data.cam_xpos[camera] - 3.5 * axes[:, 2], [0, 0, 1], atol=1e-6)
    np.testing.assert_allclose(axes[:, 0], [0, 1, 0], atol=1e-6)  # the robot, facing us, has its left on our right
    assert model.cam_fovy[camera] == 45


def test_the_realistic_look_shows_what_its_words_say():
    still = pose(knee=-5, **RAISED)
    empty = list(still)
    empty[0] = 100  # far behind the camera
    robot, scene = Scene(128, 128, "realistic", "fixed", 2, 2, CPU).draw(torch.tensor([still, empty]))[0].float()
    sky, floor, rows = scene[:, :46], scene[:, 50:], scene[:, :46].mean(2)
    assert (sky[2] > sky[1]).all() and (sky[1] > sky[0]).all() and (rows[2] - rows[0]).min() > 60  # blue ...
    assert (rows.diff(dim=1) > -1).all() and rows[0, -1] - rows[0, 0] > 15  # ... and paler towards the horizon ...
    assert sky.std(2).max() < 6  # ... without clouds
    assert (floor.amax(0) - floor.amin(0)).max() < 25 and 90 < floor.mean() < 190 and floor.std() < 25  # grey and calm
    assert 0.02 < (floor.mean(0) < floor.mean() - 8).float().mean() < 0.3  # tiles
    there, (red, green, blue) = (robot - scene).abs().amax(0) > 30, robot
    parts = {
        "arms": there & (red > blue + 90),
        "light parts": there & (robot.amin(0) > 170),
        "thighs": there & (blue > red + 60) & (blue > green + 40),
        "shadow": ~(robot.amax(0) > 115) & (scene.mean(0) > robot.mean(0) + 25) & (torch.arange(128)[:, None] > 90),
    }
    assert min(pixels.sum() for pixels in parts.values()) > 20
    orange, yellow = (parts["arms"] & (green < 0.6 * red)).sum(), (parts["arms"] & (green > 0.65 * red)).sum()
    assert orange > 10 and yellow > 10  # upper and lower arms
    heights = [(torch.arange(128)[:, None] * pixels).sum() / pixels.sum() for pixels in parts.values()]
    assert heights == sorted(heights)  # from above to below


def test_cameras_and_looks_differ_and_the_original_camera_follows():
    away = pose(knee=-5)
    away[0], away[1] = -1.0, 0.8
    states = torch.tensor([STANDING, away])
    looks = [(textures, camera) for textures in ("realistic", "original") for camera in ("fixed", "original")]
    frames = {look: Scene(64, 64, *look, 1, 2, CPU).draw(states)[0].float() for look in looks}
    for look, other in combinations(looks, 2):
        assert (frames[look] - frames[other]).abs().mean() > 5
    for camera, moves in (("fixed", True), ("original", False)):
        red, green, blue = frames["realistic", camera].unbind(1)
        thighs = (blue > red + 60) & (blue > green + 40) & (torch.arange(64)[:, None] > 28)  # below the sky
        column = (thighs * torch.arange(64)).sum((1, 2)) / thighs.sum((1, 2))
        assert thighs.sum((1, 2)).min() > 5 and ((column[0] - column[1]).abs() > 6) == moves


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_every_frame_is_drawn_from_its_own_state(batch_size):
    states = torch.tensor([pose(pitch, knee=-20) for pitch in (0, 15, 30, 45, 60, 75, 90)])
    scene = Scene(32, 32, "realistic", "fixed", 1, batch_size, CPU)
    frames, points = scene.draw(states)
    assert frames.shape == (7, 3, 32, 32) and frames.dtype == torch.uint8
    for i in range(7):
        alone, where = scene.draw(states[i : i + 1])
        assert torch.equal(alone[0], frames[i]) and torch.equal(where["head"][0], points["head"][i])
        assert i == 0 or not torch.equal(frames[i], frames[i - 1])
    assert sac_clip_humanoid.tilt(points).diff().min() > 10
    assert scene.draw(states[:0])[0].shape == (0, 3, 32, 32)


def test_supersampling_is_the_mean_of_finer_pixels():
    looks = [Scene(size, size, "realistic", "fixed", n, 1, CPU) for size, n in ((32, 2), (64, 1), (32, 1))]
    smooth, fine, coarse = (scene.draw(torch.tensor([STANDING]))[0].float() for scene in looks)
    mean = torch.nn.functional.avg_pool2d(fine, 2)
    assert (smooth - mean).abs().mean() < 1.5 < (coarse - mean).abs().mean()


# ---- The tasks

TRUE = {
    "kneeling": [
        pose(**KNEELING), pose(hip_y=-70, knee=-155, pitch=15), pose(**KNEELING, **RAISED), pose(yaw=120, **KNEELING),
        pose(pitch=45, hip_y=-50, knee=-95),  # bowing
    ],
    "lotus-position": [pose(**LOTUS)],
    "standing-up": [STANDING, pose(), pose(hip_y=-30, knee=-50, pitch=10), pose(knee=-5, **RAISED), pose(yaw=90, knee=-5)],
    "arms-raised": [pose(knee=-5, **RAISED), pose(yaw=-70, knee=-5, **RAISED)],
    "doing-splits": [pose(**SPLITS), pose(yaw=40, **SPLITS), pose(**SPLITS | {"knee": -22, "hip_y": -85})],  # hardly bent
    "hands-on-hips": [pose(knee=-5, **ON_HIPS)],
    "arms-crossed": [pose(knee=-5, **CROSSED)],
    "standing-on-one-leg": [pose(knee=-5, **RIGHT_UP), pose(knee=-5, left_hip_y=-60, left_knee=-60)],
}  # fmt: skip
SITTING = pose(hip_y=-90, knee=-5)
FALSE = {
    "kneeling": [
        STANDING, SITTING, pose(**LOTUS), pose(**KNEELING, lift=0.15),  # in the air
        pose(knee=-5, left_hip_y=-90, left_knee=-95, right_knee=-95),  # on one knee
        pose(pitch=80, hip_y=-80, knee=-90),  # on all fours
        pose(pitch=90), pose(pitch=60, **KNEELING),  # lying on the belly: the knees are down; falling over
    ],
    "lotus-position": [
        STANDING, SITTING, pose(**KNEELING), pose(**SPLITS), pose(lift=0.3, **LOTUS),
        pose(hip_x=-20, hip_z=-30, hip_y=-60, knee=-155),  # kneeling wide on the heels
    ],
    "standing-up": [
        pose(lift=0.3), pose(**KNEELING), pose(pitch=90), pose(pitch=45), pose(hip_y=-100, knee=-130), pose(**SPLITS)
    ],
    "arms-raised": [
        STANDING, pose(knee=-5, right_shoulder1=-84, right_shoulder2=20, right_elbow=-85), pose(**KNEELING, **RAISED)
    ],
    "doing-splits": [
        STANDING, SITTING, pose(**LOTUS), pose(lift=0.4, **SPLITS), pose(pitch=-90), pose(pitch=-60, **SPLITS),
        pose(**SPLITS | {"hip_z": -20, "hip_y": -85}),  # narrow
        pose(**SPLITS | {"knee": -40, "hip_y": -91}), pose(**SPLITS | {"knee": -90, "hip_y": -100}),  # bent knees
    ],
    "hands-on-hips": [
        STANDING, pose(knee=-5, **RAISED), pose(**KNEELING, **ON_HIPS), pose(knee=-5, **CROSSED),
        pose(knee=-5, shoulder1=45, shoulder2=-20, elbow=-20),  # hands on the belly
        pose(knee=-5, shoulder1=42, shoulder2=-39, elbow=-85),  # hanging arms, 18 cm from the hips
    ],
    "arms-crossed": [
        STANDING, pose(knee=-5, **RAISED), pose(knee=-5, **ON_HIPS), pose(**KNEELING, **CROSSED),
        pose(knee=-5, shoulder1=-57, shoulder2=56, elbow=4),  # in front of the face
        pose(knee=-5, shoulder1=27.5, shoulder2=35.4, elbow=-53.7),  # hands that merely touch
    ],
    "standing-on-one-leg": [
        STANDING, pose(lift=0.2, knee=-5, **RIGHT_UP), pose(**KNEELING), pose(pitch=50, knee=-5, **RIGHT_UP)
    ],
}  # fmt: skip


@pytest.mark.parametrize("task", TASKS)
def test_success_condition(task):
    _, holds = TASKS[task]
    assert holds(points_of(*TRUE[task])).tolist() == [True] * len(TRUE[task])
    assert holds(points_of(*FALSE[task])).tolist() == [False] * len(FALSE[task])


def test_an_episode_succeeds_if_the_condition_holds_in_half_of_its_steps():
    labels = torch.ones(10, 4, 2)
    labels[:, :, 1] = 0
    labels[5:, 1, 1], labels[6:, 2, 1], labels[::2, 3, 1] = 1, 1, 1  # 0, 5, 4 and 5 of 10
    assert summary(labels) == {"success_rate": 0.5, "clip_return": 10, "ground_truth_return": 14 / 4}
    assert summary(labels[:, 1:2])["success_rate"] == 1 and summary(labels[:, 2:3])["success_rate"] == 0
    assert summary(torch.cat([labels[:, :, :1], torch.nan * labels[:, :, :1]], dim=2)) == {"clip_return": 10}  # no known task


# ---- SAC


def density(mean: torch.Tensor, log_std: torch.Tensor) -> TransformedDistribution:
    return TransformedDistribution(Normal(mean, log_std.exp()), TanhTransform(cache_size=1))


@pytest.mark.parametrize("paper, lowest", [(False, -5), (True, -20)])
def test_actions_have_the_density_that_the_actor_says(paper, lowest):
    torch.manual_seed(0)
    actor, obs, noise = Actor(45, paper), torch.randn(64, 45), torch.randn(64, 17)
    mean, log_std = actor(obs)
    actions, log_prob = squash(mean, log_std, noise)
    torch.testing.assert_close(actions, (mean + log_std.exp() * noise).tanh())
    torch.testing.assert_close(log_prob, density(mean, log_std).log_prob(actions).sum(1), atol=1e-3, rtol=1e-4)
    assert squash(mean, log_std, 1000 * noise)[1].isfinite().all()
    _, log_std = actor(1e4 * obs)
    assert log_std.min() == lowest and log_std.max() == 2


def test_normalize_has_seen_it_all():
    torch.manual_seed(0)
    norm = Normalize(348)
    obs = torch.randn(1000, 348) * torch.linspace(0, 50, 348) + torch.linspace(-1000, 1000, 348)  # the first one never varies
    for part in obs.split([1, 99, 400, 500]):
        norm.update(part)
    torch.testing.assert_close(norm.mean, obs.mean(0), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(norm.var, obs.var(0, correction=0), rtol=1e-3, atol=1e-3)
    scaled = norm(obs)
    assert scaled.isfinite().all() and scaled.abs().max() <= 10
    assert scaled[:, 50:].mean().abs() < 0.01 and abs(scaled[:, 50:].std() - 1) < 0.01
    assert norm(obs + 1e6).max() == 10


@pytest.mark.parametrize("paper", [False, True])
def test_one_update_is_sacs(paper):
    """Calculated again: critics, actor, entropy coefficient (their gradients), and what follows them."""
    args = Args(paper=paper, ent_coef=0.3, gamma=0.95, n_step=1 if paper else 3)
    torch.manual_seed(0)
    sac = SAC(47, args)
    for critic in (sac.qf1_target, sac.qf2_target, sac.mean_actor):  # somewhere else than what they follow
        for weight in critic.parameters():
            weight.data += 0.02 * torch.randn_like(weight)
    states, next_states = (torch.randn(16, 47) * torch.linspace(0.1, 5, 47) + 1 for _ in range(2))
    actions, rewards = torch.rand(16, 17) * 2 - 1, 0.3 + 0.01 * torch.randn(args.n_step, 16)
    batch, optimizers = (states, next_states, actions, rewards), sac.optimizers(0.01)
    if not paper:
        sac.obs_norm.update(torch.randn(100, 45) * torch.linspace(0.1, 5, 45))
    before = deepcopy(sac)
    torch.manual_seed(1)
    losses = sac_update(sac, optimizers, batch, True, args)
    torch.manual_seed(1)
    noise = torch.randn(2, 16, 17).unbind()

    def gradients_are(learned: list, loss: torch.Tensor, parameters: list) -> bool:
        """After one step Adam's first moment is a tenth of the gradient."""
        state = {p: moments for optimizer in optimizers.values() for p, moments in optimizer.state.items()}
        pairs = zip(learned, torch.autograd.grad(loss, parameters), strict=True)
        return all(torch.allclose(state[p]["exp_avg"], 0.1 * g, rtol=2e-3, atol=1e-6) for p, g in pairs)

    obs, next_obs = states[:, 2:], next_states[:, 2:]
    if not paper:
        scaled = ((x - before.obs_norm.mean) / before.obs_norm.var.sqrt() for x in (obs, next_obs))
        obs, next_obs = (x.clamp(-10, 10) for x in scaled)
    assert sum(isinstance(module, torch.nn.LayerNorm) for module in sac.modules()) == (0 if paper else 4 * 2)

    with torch.no_grad():
        mean, log_std = before.actor(next_obs)
        next_actions = (mean + log_std.exp() * noise[0]).tanh()
        next_log_prob = density(mean, log_std).log_prob(next_actions).sum(1)
        next_q = torch.minimum(before.qf1_target(next_obs, next_actions), before.qf2_target(next_obs, next_actions))
        td_target = rewards[0] + 0.95 * (next_q - 0.3 * next_log_prob)
        if not paper:
            td_target = rewards[0] + 0.95 * rewards[1] + 0.95**2 * rewards[2] + 0.95**3 * (next_q - 0.3 * next_log_prob)
    qf_loss = sum((critic(obs, actions) - td_target).square().mean() for critic in (before.qf1, before.qf2))
    torch.testing.assert_close(losses["losses/qf_loss"], qf_loss.detach(), rtol=1e-3, atol=1e-5)
    critics = ([*now.qf1.parameters(), *now.qf2.parameters()] for now in (sac, before))
    assert gradients_are(next(critics), qf_loss, next(critics))

    mean, log_std = before.actor(obs)
    squashed = density(mean, log_std)
    new_actions = squashed.transforms[0](mean + log_std.exp() * noise[1])
    log_prob = squashed.log_prob(new_actions).sum(1)
    actor_loss, other = (
        (0.3 * log_prob - torch.minimum(now.qf1(obs, new_actions), now.qf2(obs, new_actions))).mean() for now in (sac, before)
    )
    torch.testing.assert_close(losses["losses/actor_loss"], actor_loss.detach(), rtol=1e-3, atol=1e-4)
    assert (actor_loss - other).abs() > 0.01  # the actor learns from the updated critics
    assert gradients_are([*sac.actor.parameters()], actor_loss, [*before.actor.parameters()])
    ent_coef_loss = -before.log_ent_coef.exp() * (log_prob.detach() - 17).mean()  # target entropy: -17
    assert gradients_are([sac.log_ent_coef], ent_coef_loss, [before.log_ent_coef])

    names = {"qf1_target": "qf1", "qf2_target": "qf2", "mean_actor": "actor"}
    for mean_name, name in names.items():
        old, new = getattr(before, mean_name).state_dict(), getattr(sac, name).state_dict()
        for key, weight in getattr(sac, mean_name).state_dict().items():
            torch.testing.assert_close(weight, 0.995 * old[key] + 0.005 * new[key])
    kept = deepcopy(sac.state_dict())
    sac_update(sac, optimizers, batch, False, args)
    changed = {key.split(".")[0] for key, value in sac.state_dict().items() if not torch.equal(value, kept[key])}
    assert changed - {"policy"} == {"qf1", "qf2", *names}  # neither actor nor entropy coefficient; their means all the same


def test_paper_brings_the_papers_values_and_the_command_line_counts_more(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["sac_clip_humanoid.py", "--paper", "--device", "cpu", "--tau", "0.01"])
    args, _ = sac_clip_humanoid.read_settings()
    assert (args.gamma, args.learning_rate, args.batch_size, args.tau) == (0.95, 6e-4, 512, 0.01)
    assert args.num_envs * args.episode_length == 32 * args.gradient_steps == 3200 and args.learning_starts == 50_000
    assert (args.n_step, args.noise_correlation, args.checkpoint_every) == (1, 0, 64_000)
    assert (args.total_timesteps, args.episode_length, args.ent_coef) == (10_000_000, 100, 1) and args.paper
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--batch-size", "64", "--ent-coef=0.5", "--total-timesteps", "256000"])
    args, _ = sac_clip_humanoid.read_settings()
    assert (args.batch_size, args.ent_coef, args.total_timesteps, args.gradient_steps) == (64, 0.5, 256_000, 100)


OPTIONS = "--num-envs 4 --episode-length 8 --learning-starts 32 --gradient-steps 3 --batch-size 16 --episodes 1 --run-dir run"
OPTIONS = f"{OPTIONS} --buffer-size 64 --device cpu --clip-model tiny".split()


def run(folder: Path, *arguments) -> tuple[dict, list[int]]:
    """The script in this folder, run to its end -> the checkpoint in run/, and how often each optimizer has made a step."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, str(ROOT / "sac_clip_humanoid.py"), *map(str, arguments)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=200)
    checkpoint = torch.load(folder / "run" / "checkpoint.pt", weights_only=True)
    return checkpoint, [checkpoint[f"{name}_optimizer"]["state"][0]["step"] for name in ("q", "actor", "ent_coef")]


@pytest.mark.slow
def test_paper_trains_and_goes_on(tmp_path):
    """Three rounds, one of them random, at once and in two parts; nothing falls, so that the end of the first does not matter."""
    whole, steps = run(tmp_path / "whole", "--paper", *OPTIONS, "--total-timesteps", 96)
    checkpoint, _ = run(tmp_path / "part", "--paper", *OPTIONS, "--total-timesteps", 64)
    checkpoint["settings"]["total_timesteps"] = 96
    torch.save(checkpoint, tmp_path / "part" / "run" / "checkpoint.pt")
    went_on, _ = run(tmp_path / "part", "--resume", "run")
    assert whole["progress"][0] == went_on["progress"][0] == 96 and went_on["settings"]["paper"]
    assert steps == [6, 6, 6] and whole["q_optimizer"]["param_groups"][0]["lr"] == 6e-4
    assert not any("norm" in key for key in whole["sac"]) and whole["rb"]["states"].shape == (2, 9, 4, 350)
    assert whole["rb"]["mean"] == 0 and whole["rb"]["std"] == 1
    for name in ("sac", "rb", "policy"):
        assert all(torch.equal(value, went_on[name][key]) for key, value in whole[name].items())
    assert any(not torch.equal(value, checkpoint["sac"][key]) for key, value in whole["sac"].items())
    assert all(torch.equal(value, whole["sac"][f"actor.{key[2:]}"]) for key, value in whole["policy"].items())


@pytest.mark.slow
def test_without_paper_things_are_normalized_and_fall(tmp_path):
    checkpoint, steps = run(tmp_path, *OPTIONS, "--total-timesteps", 96)
    assert steps == [6, 4, 4]  # the first and third of three updates
    for name in ("q", "actor", "ent_coef"):
        assert checkpoint[f"{name}_optimizer"]["param_groups"][0]["lr"] == pytest.approx(6e-4 / 3)
    sac = checkpoint["sac"]
    assert sac["obs_norm.count"] == 3 * 9 * 4
    rewards = checkpoint["rb"]["rewards"]
    torch.testing.assert_close(checkpoint["rb"]["mean"], rewards.mean())
    torch.testing.assert_close(checkpoint["rb"]["std"], rewards.std())
    names = {"0": "obs_norm", "1": "mean_actor"}
    assert all(torch.equal(value, sac[names[key[0]] + key[1:]]) for key, value in checkpoint["policy"].items())


def test_transitions_of_several_steps_stay_within_an_episode():
    """In round k step t of environment n has the state 100 k + 10 t + n and it as reward."""
    rb = sac_clip_humanoid.ReplayBuffer(177, Args(episode_length=5, num_envs=3, total_timesteps=30))
    for number in range(2):
        values = 100.0 * number + 10 * torch.arange(6.0)[:, None] + torch.arange(3.0)
        rb.add(number, values[..., None].expand(-1, -1, 177), values[:-1, :, None].expand(-1, -1, 17), values[:-1])
    states, next_states, actions, rewards = rb.sample(2000, 3, 2)
    first = states[:, 0]
    assert set(first.tolist()) == {100 * k + 10 * t + n for k in range(2) for t in range(3) for n in range(3)}
    assert torch.equal(next_states[:, 0], first + 30) and torch.equal(actions[:, 0], first)
    torch.testing.assert_close(rewards * rb.std + rb.mean, torch.stack([first, first + 10, first + 20]), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("paper, floor", [(False, -5), (True, -20)])
def test_the_floor_of_log_std_is_stable_baselines3s_with_the_papers_values(paper, floor):
    actor = sac_clip_humanoid.Actor(10, paper)
    with torch.no_grad():
        actor[-1].bias.fill_(-100)
    assert (actor(torch.zeros(3, 10))[1] == floor).all()


@pytest.mark.slow
def test_it_is_learned(learned):
    """Takes two minutes; with fewer steps not every seed gets there."""
    assert learned("sac_clip_humanoid", "--total-timesteps=51200") >= 0.7
