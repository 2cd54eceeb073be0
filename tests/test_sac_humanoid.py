"""Physics, observations and start states against Gymnasium, both looks, the tasks' conditions, and the parts of SAC."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gymnasium as gym
import mujoco
import numpy as np
import pytest
import torch
from PIL import Image
from torch.distributions import Normal, TanhTransform, TransformedDistribution

import sac_clip_humanoid
from clip_reward import CLIPReward
from sac_clip_humanoid import (
    TASKS,
    XML,
    Actor,
    Args,
    Humanoid,
    Labeller,
    Normalize,
    ReplayBuffer,
    Scene,
    SoftQNetwork,
    doing_splits,
    succeeded,
    tilt,
)

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
MODEL = mujoco.MjModel.from_xml_path(str(XML))
DATA = mujoco.MjData(MODEL)


@pytest.mark.parametrize("threads", [1, 2])
def test_physics_start_states_and_observations_are_gymnasiums(threads):
    envs = Humanoid(3, 100, threads)
    references = [gym.make("Humanoid-v5", terminate_when_unhealthy=False).unwrapped for _ in range(3)]
    obs, infos = envs.reset(seed=5)
    assert obs.shape == (3, 348) and obs.dtype == infos["states"].dtype == torch.float32
    rng, moved = np.random.default_rng(0), 0
    for episode in range(2):
        starts = [env.reset(seed=None if episode else 5 + i)[0] for i, env in enumerate(references)]
        obs = obs if episode == 0 else envs.reset()[0]
        assert np.abs(envs.obs - starts).max() < 1e-6
        for t in range(100):
            actions = rng.uniform(-0.4, 0.4, (3, 17)).astype(np.float32)
            obs, rewards, terminations, truncations, infos = envs.step(torch.from_numpy(actions))
            expected = np.stack([env.step(action)[0] for env, action in zip(references, actions)])
            assert np.abs(envs.obs - expected).max() < 1e-6
            assert np.abs(envs.states - [env.data.qpos for env in references]).max() < 1e-6
            assert torch.equal(obs, torch.tensor(envs.obs, dtype=torch.float32))
            assert not rewards.any() and not terminations.any() and (truncations == (t == 99)).all()
        moved = max(moved, np.abs(envs.states - MODEL.qpos0).max())
    assert moved > 0.5


def test_any_number_of_threads_gives_the_same(monkeypatch):
    results, reward_model = [], CLIPReward("tiny", "a humanoid robot kneeling")
    for threads in (1, 3, 5):
        monkeypatch.setattr(sac_clip_humanoid, "THREADS", threads)
        envs, rng = Humanoid(7, 100, threads), torch.Generator().manual_seed(0)
        envs.reset(seed=1)
        for _ in range(30):
            obs, _, _, _, infos = envs.step(torch.rand(7, 17, generator=rng) * 0.8 - 0.4)
        labeller = Labeller(reward_model, Args(task="kneeling", clip_batch_size=2), ThreadPoolExecutor(max(threads - 1, 1)))
        assert labeller.scenes.qsize() == max(threads, 2)  # the pool's and the one that asks
        labeller.submit(infos["states"])
        results.append([obs, infos["states"], *labeller.result()[:2]])
        assert labeller.scenes.qsize() == max(threads, 2)  # all are back
        frames, points = labeller.scenes.get().draw(infos["states"])
        torch.testing.assert_close(results[-1][2], reward_model(frames), atol=1e-5, rtol=0)
        assert torch.equal(results[-1][3], TASKS["kneeling"][1](points).float())
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


# ---- Drawing


def pose(pitch: float = 0, roll: float = 0, yaw: float = 0, lift: float = 0, **degrees: float) -> list[float]:
    """A state on the floor (or `lift` m above it) from joint angles; `hip_y` means both hips', `right_hip_y` only one."""
    data = DATA
    data.qpos[:] = MODEL.qpos0
    mujoco.mju_euler2Quat(data.qpos[3:7], np.radians([yaw, pitch, roll]), "zyx")
    for name, angle in degrees.items():
        found = [
            MODEL.joint(i)
            for i in range(1, MODEL.njnt)
            if MODEL.joint(i).name.removeprefix("left_").removeprefix("right_") == name
        ]
        for joint in found or [MODEL.joint(name)]:
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
    for side in ("right", "left"):
        for point, body in (("hip", "thigh"), ("knee", "shin"), ("shoulder", "upper_arm"), ("elbow", "lower_arm")):
            np.testing.assert_allclose(points[f"{side}_{point}"][0], DATA.body(f"{side}_{body}").xpos, atol=1e-5)
        for part in ("hand", "foot"):
            np.testing.assert_allclose(points[f"{side}_{part}"][0], DATA.geom(f"{side}_{part}").xpos, atol=1e-5)
    np.testing.assert_allclose(points["head"][0], DATA.geom("head").xpos, atol=1e-5)
    np.testing.assert_allclose(points["seat"][0], DATA.geom("butt").xpos, atol=1e-5)


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
    """Where a ball of light would be seen: azimuth 180°, elevation -10°, distance 3.5 m, looking at (0, 0, 1), 45° high."""
    model = sac_clip_humanoid.scene_model("realistic")
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    camera = model.camera("fixed").id
    position, axes = data.cam_xpos[camera], data.cam_xmat[camera].reshape(3, 3)
    looks = -axes[:, 2]
    elevation = np.radians(-10)
    np.testing.assert_allclose(looks, [-np.cos(elevation), 0, np.sin(elevation)], atol=1e-6)  # azimuth 180°: towards -x
    np.testing.assert_allclose(position + 3.5 * looks, [0, 0, 1], atol=1e-6)
    np.testing.assert_allclose(axes[:, 0], [0, 1, 0], atol=1e-6)  # the robot, facing us, has its left on our right
    assert model.cam_fovy[camera] == 45


def test_the_realistic_look_shows_what_its_words_say():
    still = pose(knee=-5)
    empty = list(still)
    empty[0] = 100  # far behind the camera
    frames, _ = Scene(128, 128, "realistic", "fixed", 2, 2, CPU).draw(torch.tensor([still, empty]))
    robot, scene = frames.float()
    sky, floor = scene[:, :35], scene[:, 64:]
    assert (sky[2] >= sky[0]).all() and (sky[2] - sky[0]).mean() > 20  # blue ...
    assert (sky.amin(0) > 235).float().mean() > 0.02 and (sky[2] - sky[0] > 60).float().mean() > 0.1  # ... with white clouds
    assert (floor.amax(0) - floor.amin(0)).max() < 25 and 90 < floor.mean() < 190 and floor.std() < 25  # grey and calm
    joints = floor.mean(0) < floor.mean() - 12
    assert 0.02 < joints.float().mean() < 0.3  # tiles
    there = (robot - scene).abs().amax(0) > 30
    red, green, blue = robot
    parts = {
        "thighs": there & (blue > red + 60) & (blue > green + 40),
        "arms": there & (red > blue + 90),
        "light parts": there & (robot.amin(0) > 170),
        "shadow": ~(robot.amax(0) > 110) & (scene.mean(0) > robot.mean(0) + 25) & (torch.arange(128)[:, None] > 90),
    }
    for name, pixels in parts.items():
        assert pixels.sum() > 20, name
    rows = torch.arange(128.0)[:, None]
    assert (rows * parts["arms"]).sum() / parts["arms"].sum() < (rows * parts["thighs"]).sum() / parts["thighs"].sum()


def test_cameras_and_looks_differ_and_the_original_camera_follows():
    away = pose(knee=-5)
    away[0], away[1] = -1.0, 0.8
    states = torch.tensor([STANDING, away])
    looks = [(textures, camera) for textures in ("realistic", "original") for camera in ("fixed", "original")]
    frames = {look: Scene(64, 64, *look, 1, 2, CPU).draw(states)[0].float() for look in looks}
    for i, look in enumerate(looks):
        for other in looks[:i]:
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
    assert tilt(points).diff().min() > 10
    assert scene.draw(states[:0])[0].shape == (0, 3, 32, 32)


def test_supersampling_is_the_mean_of_finer_pixels():
    states = torch.tensor([STANDING])
    smooth, fine = (
        Scene(size, size, "realistic", "fixed", n, 1, CPU).draw(states)[0].float() for size, n in ((32, 2), (64, 1))
    )
    coarse = Scene(32, 32, "realistic", "fixed", 1, 1, CPU).draw(states)[0].float()
    mean = torch.nn.functional.avg_pool2d(fine, 2)
    assert (smooth - mean).abs().mean() < 1.5 < (coarse - mean).abs().mean()


# ---- The tasks

TRUE = {
    "kneeling": [
        pose(**KNEELING),
        pose(hip_y=-70, knee=-155, pitch=15),
        pose(**KNEELING, **RAISED),
        pose(yaw=120, **KNEELING),
        pose(pitch=45, hip_y=-50, knee=-95),  # bowing
    ],
    "lotus-position": [pose(**LOTUS)],
    "standing-up": [STANDING, pose(), pose(hip_y=-30, knee=-50, pitch=10), pose(knee=-5, **RAISED), pose(yaw=90, knee=-5)],
    "arms-raised": [pose(knee=-5, **RAISED), pose(yaw=-70, knee=-5, **RAISED)],
    "doing-splits": [pose(**SPLITS), pose(yaw=40, **SPLITS)],
    "hands-on-hips": [pose(knee=-5, **ON_HIPS)],
    "arms-crossed": [pose(knee=-5, **CROSSED)],
    "standing-on-one-leg": [pose(knee=-5, **RIGHT_UP), pose(knee=-5, left_hip_y=-60, left_knee=-60)],
}
FALSE = {
    "kneeling": [
        STANDING,
        pose(**KNEELING, lift=0.15),  # in the air
        pose(knee=-5, left_hip_y=-90, left_knee=-95, right_knee=-95),  # on one knee
        pose(pitch=80, hip_y=-80, knee=-90),  # on all fours
        pose(hip_y=-90, knee=-5),  # sitting
        pose(**LOTUS),
        pose(pitch=90),  # lying on the belly: the knees are down
        pose(pitch=60, **KNEELING),  # falling over
    ],
    "lotus-position": [
        STANDING,
        pose(**KNEELING),
        pose(hip_x=-20, hip_z=-30, hip_y=-60, knee=-155),  # kneeling wide on the heels
        pose(hip_y=-90, knee=-5),
        pose(**SPLITS),
        pose(lift=0.3, **LOTUS),
    ],
    "standing-up": [
        pose(lift=0.3),
        pose(**KNEELING),
        pose(pitch=90),
        pose(pitch=45),
        pose(hip_y=-100, knee=-130),
        pose(**SPLITS),
    ],
    "arms-raised": [
        STANDING,
        pose(knee=-5, right_shoulder1=-84, right_shoulder2=20, right_elbow=-85),
        pose(**KNEELING, **RAISED),
    ],
    "doing-splits": [
        STANDING,
        pose(hip_y=-90, knee=-5),
        pose(**LOTUS),
        pose(lift=0.4, **SPLITS),
        pose(pitch=-90),
        pose(pitch=-60, **SPLITS),
    ],
    "hands-on-hips": [
        STANDING,
        pose(knee=-5, **RAISED),
        pose(**KNEELING, **ON_HIPS),
        pose(knee=-5, **CROSSED),
        pose(knee=-5, shoulder1=45, shoulder2=-20, elbow=-20),  # hands on the belly
        pose(knee=-5, shoulder1=42, shoulder2=-39, elbow=-85),  # hanging arms, 18 cm from the hips
    ],
    "arms-crossed": [
        STANDING,
        pose(knee=-5, **RAISED),
        pose(knee=-5, **ON_HIPS),
        pose(**KNEELING, **CROSSED),
        pose(knee=-5, shoulder1=-57, shoulder2=56, elbow=4),  # in front of the face
        pose(knee=-5, shoulder1=27.5, shoulder2=35.4, elbow=-53.7),  # hands that merely touch
    ],
    "standing-on-one-leg": [
        STANDING,
        pose(lift=0.2, knee=-5, **RIGHT_UP),
        pose(**KNEELING),
        pose(pitch=50, knee=-5, **RIGHT_UP),
    ],
}


@pytest.mark.parametrize("task", TASKS)
def test_success_condition(task):
    _, holds = TASKS[task]
    assert holds(points_of(*TRUE[task])).tolist() == [True] * len(TRUE[task])
    assert holds(points_of(*FALSE[task])).tolist() == [False] * len(FALSE[task])


def test_splits_need_legs_that_are_straight_and_wide_apart():
    narrow, bent = pose(hip_x=-18, hip_z=-20, hip_y=-85, knee=-8), pose(hip_x=-18, hip_z=-58, hip_y=-100, knee=-90)
    half_bent, hardly_bent = (pose(**SPLITS | {"knee": -degrees, "hip_y": -78 - degrees / 3}) for degrees in (40, 22))
    assert doing_splits(points_of(narrow, bent, half_bent, hardly_bent)).tolist() == [False, False, False, True]


def test_an_episode_succeeds_if_the_condition_holds_in_half_of_its_steps():
    true_rewards = torch.zeros(10, 4)
    true_rewards[5:, 1], true_rewards[6:, 2], true_rewards[::2, 3] = 1, 1, 1  # 5, 4 and 5 of 10
    assert succeeded(true_rewards).tolist() == [False, True, False, True]


# ---- SAC


def test_actions_have_the_density_that_the_actor_says():
    torch.manual_seed(0)
    actor, obs, noise = Actor(), torch.randn(64, 348), torch.randn(64, 17)
    actions, log_prob = actor.get_action(obs, noise)
    mean, log_std = actor(obs)
    assert actions.abs().max() < 1
    expected = TransformedDistribution(Normal(mean, log_std.exp()), TanhTransform(cache_size=1)).log_prob(actions)
    torch.testing.assert_close(log_prob, expected.sum(1), atol=1e-3, rtol=1e-4)
    _, extreme = actor.get_action(obs, 1000 * noise)
    assert extreme.isfinite().all()


def test_normalize_has_seen_it_all():
    torch.manual_seed(0)
    norm = Normalize(348)
    obs = torch.randn(1000, 348) * torch.linspace(0, 50, 348) + torch.linspace(-1000, 1000, 348)  # the first ones never vary
    for part in obs.split([1, 99, 400, 500]):
        norm.update(part)
    torch.testing.assert_close(norm.mean, obs.mean(0), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(norm.var, obs.var(0, unbiased=False), rtol=1e-3, atol=1e-3)
    scaled = norm(obs)
    assert scaled.isfinite().all() and scaled.abs().max() <= 10
    assert scaled[:, 50:].mean().abs() < 0.01 and abs(scaled[:, 50:].std() - 1) < 0.01
    assert norm(obs + 1e6).max() == 10
    rewards = 0.35 + 0.01 * torch.randn(1000)  # CLIP's rewards: one value each, which hardly varies
    norm = Normalize(1)
    norm.update(rewards.view(-1, 1))
    torch.testing.assert_close(norm(rewards), (rewards - rewards.mean()) / rewards.std(), atol=0.01, rtol=0.01)


def test_paper_brings_the_papers_values_and_the_command_line_counts_more(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["sac_clip_humanoid.py", "--paper", "--device", "cpu", "--tau", "0.01"])
    args, _ = sac_clip_humanoid.read_settings()
    assert (args.gamma, args.learning_rate, args.batch_size, args.tau) == (0.95, 6e-4, 512, 0.01)
    assert args.num_envs * args.episode_length == 32 * args.gradient_steps == 3200 and args.learning_starts == 50_000
    assert (args.total_timesteps, args.episode_length, args.ent_coef, args.policy_frequency) == (10_000_000, 100, 1, 1)
    assert not (args.normalize_obs or args.normalize_reward or args.layer_norm or args.anneal_lr or args.average_actor)


def test_paper_trains_and_loads_again(tmp_path):
    options = "--paper --num-envs 4 --episode-length 8 --learning-starts 32 --gradient-steps 3 --batch-size 16 --episodes 1"
    command = [sys.executable, ROOT / "sac_clip_humanoid.py", *options.split(), "--device", "cpu", "--clip-model", "tiny"]
    command = [*map(str, command), "--run-dir", "run", "--total-timesteps", "96"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    before = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    subprocess.run([*command[:2], "--resume", "run"], cwd=tmp_path, check=True, capture_output=True)
    after = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    for checkpoint in (before, after):
        assert checkpoint["obs_norm"] == checkpoint["reward_norm"] == {} and len(checkpoint["qf1"]) == 6  # no normalization
        assert all(torch.equal(weight, checkpoint["mean_actor"][name]) for name, weight in checkpoint["actor"].items())
        steps = [checkpoint[f"{name}_optimizer"]["state"][0]["step"] for name in ("q", "actor", "ent_coef")]
        assert steps == [6, 6, 6] and checkpoint["q_optimizer"]["param_groups"][0]["lr"] == 6e-4


def test_one_update_is_sacs(tmp_path):
    """The first update of a run, calculated again: critics, actor, entropy coefficient (their gradients) and target critics."""
    options = (
        "--num-envs 4 --episode-length 8 --learning-starts 32 --gradient-steps 1 --batch-size 16 --buffer-size 1 --episodes 1"
    )
    options = options.split() + ["--device", "cpu", "--clip-model", "tiny", "--no-anneal-lr"]
    for steps in (32, 64, 96):  # one round at random; the same and one more, with an update beside it; and one more, another
        command = [sys.executable, ROOT / "sac_clip_humanoid.py", *options, "--total-timesteps", steps, "--run-dir", steps]
        subprocess.run(list(map(str, command)), cwd=tmp_path, check=True, capture_output=True)
    before, after, last = (torch.load(tmp_path / n / "checkpoint.pt", weights_only=True) for n in ("32", "64", "96"))

    actor, obs_norm = Actor(), Normalize(348)
    actor.load_state_dict(before["actor"])
    obs_norm.load_state_dict(before["obs_norm"])
    critics = {name: SoftQNetwork(layer_norm=True) for name in ("qf1", "qf2", "qf1_target", "qf2_target")}
    for name, critic in critics.items():
        critic.load_state_dict(before[name])
    rng = torch.Generator()
    rng.set_state(before["rngs"]["sample"])
    i, noise = torch.randint(32, (16,), generator=rng), torch.randn(2, 16, 17, generator=rng)
    obs, next_obs, actions, rewards = (before["rb"][name][i] for name in ("obs", "next_obs", "actions", "rewards"))
    obs, next_obs = obs_norm(obs), obs_norm(next_obs)
    rewards = (rewards - before["reward_norm"]["mean"]) / before["reward_norm"]["var"].sqrt()
    ent_coef = before["log_ent_coef"].exp()
    assert ent_coef == pytest.approx(0.03)

    def policy(obs: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_std = actor(obs)
        squashed = TransformedDistribution(Normal(mean, log_std.exp()), TanhTransform(cache_size=1))
        actions = squashed.transforms[0](mean + log_std.exp() * noise)
        return actions, squashed.log_prob(actions).sum(1)

    def same_gradients(optimizer: str, parameters: list) -> None:
        for k, parameter in enumerate(parameters):  # after one step Adam's first moment is a tenth of the gradient
            moment = after[f"{optimizer}_optimizer"]["state"][k]["exp_avg"]
            torch.testing.assert_close(moment, 0.1 * parameter.grad, rtol=2e-3, atol=1e-6)

    with torch.no_grad():
        next_actions, next_log_prob = policy(next_obs, noise[0])
        next_q = torch.minimum(*(critics[f"{name}_target"](next_obs, next_actions) for name in ("qf1", "qf2")))
        td_target = rewards + 0.95 * (next_q - ent_coef * next_log_prob)
    sum(((critics[name](obs, actions) - td_target) ** 2).mean() for name in ("qf1", "qf2")).backward()
    same_gradients("q", [*critics["qf1"].parameters(), *critics["qf2"].parameters()])
    for name in ("qf1", "qf2"):
        critics[name].load_state_dict(after[name])  # the actor learns from the updated ones
        for key, weight in after[f"{name}_target"].items():
            torch.testing.assert_close(weight, 0.995 * before[f"{name}_target"][key] + 0.005 * after[name][key])
    new_actions, log_prob = policy(obs, noise[1])
    (ent_coef * log_prob - torch.minimum(*(critics[name](obs, new_actions) for name in ("qf1", "qf2")))).mean().backward()
    same_gradients("actor", list(actor.parameters()))
    for key, weight in after["mean_actor"].items():
        torch.testing.assert_close(weight, 0.995 * before["mean_actor"][key] + 0.005 * after["actor"][key])
    rng.set_state(after["rngs"]["act"])
    noise = torch.randn(4, 17, generator=rng)
    acts = {}
    obs_norm.load_state_dict(after["obs_norm"])
    for name in ("mean_actor", "actor"):  # which of them acted in the last round's first step?
        actor.load_state_dict(after[name])
        with torch.no_grad():
            acts[name] = actor.get_action(obs_norm(last["rb"]["obs"][:4]), noise)[0]
    torch.testing.assert_close(last["rb"]["actions"][:4], acts["mean_actor"])
    assert (acts["actor"] - acts["mean_actor"]).abs().max() > 1e-3
    log_ent_coef = before["log_ent_coef"].clone().requires_grad_()
    (-log_ent_coef.exp() * (log_prob.detach() - 17).mean()).backward()  # target entropy: -17
    same_gradients("ent_coef", [log_ent_coef])


# ---- Several processes

PROCESS = """
import torch, torch.distributed as dist
from sac_clip_humanoid import RANK, WORLD_SIZE, Actor, Normalize, average_gradients
dist.init_process_group("gloo")
torch.manual_seed(0)
actor, norm, obs = Actor(), Normalize(348), torch.randn(30, 348) * 3 + 1
obs = obs.chunk(WORLD_SIZE)[RANK]
norm.update(obs)
loss = actor.get_action(norm(obs), torch.zeros(len(obs), 17))[1].mean()
loss.backward()
average_gradients(list(actor.parameters()))
torch.save({"norm": norm.state_dict(), "gradients": [p.grad for p in actor.parameters()]}, f"{RANK}.pt")
"""


def torchrun(*arguments, folder: Path, processes: int = 2) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *arguments]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(list(map(str, command)), cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def test_processes_see_all_observations_and_average_their_gradients(tmp_path):
    (tmp_path / "process.py").write_text(PROCESS)
    for processes in (1, 2):
        done = torchrun("process.py", folder=tmp_path, processes=processes)
        assert done.returncode == 0, done.stderr
        if processes == 1:
            alone = torch.load(tmp_path / "0.pt")
    for rank in (0, 1):
        together = torch.load(tmp_path / f"{rank}.pt")
        for name, value in alone["norm"].items():
            torch.testing.assert_close(together["norm"][name], value)
        for a, b in zip(alone["gradients"], together["gradients"]):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)


def test_two_processes_train_save_and_go_on_exactly(tmp_path, request):
    options = (
        "--num-envs 4 --episode-length 10 --total-timesteps 2400 --learning-starts 100 --gradient-steps 5 --batch-size 32"
    )
    options += " --buffer-size 200 --episodes 2 --device cpu --clip-model tiny --checkpoint-every 40"
    script, checkpoint = ROOT / "sac_clip_humanoid.py", tmp_path / "part" / "checkpoint.pt"
    done = torchrun(script, *options.split(), "--run-dir", "whole", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("CLIP model tiny") == 1 and done.stdout.count("success rate") == 1  # one process speaks
    whole = torch.load(tmp_path / "whole" / "checkpoint.pt", weights_only=True)
    assert whole["global_step"] == 2400 and len(whole["others"]) == 1
    assert whole["rb"]["size"] == whole["others"][0]["rb"]["size"] == 100
    assert not torch.equal(whole["rb"]["actions"], whole["others"][0]["rb"]["actions"])
    # 57 rounds of five updates; the actor takes part in the first, third and fifth. The learning rate falls with the steps.
    updates = [whole[f"{name}_optimizer"]["state"][0]["step"].item() for name in ("q", "actor", "ent_coef")]
    assert updates == [285, 171, 171]
    for name in ("q", "actor", "ent_coef"):
        assert whole[f"{name}_optimizer"]["param_groups"][0]["lr"] == pytest.approx(6e-4 * (1 - 2360 / 2400))
    # Of both processes; there is one more observation than rewards a round.
    assert whole["reward_norm"]["count"] == whole["obs_norm"]["count"] * 10 / 11 == 2400

    def steps_saved() -> int:
        return torch.load(checkpoint, weights_only=True)["global_step"] if checkpoint.exists() else 0

    def start_and_wait_for(step: int, *arguments) -> tuple[subprocess.Popen, list[int]]:
        """Two processes under torchrun that have saved this step -> torchrun's process, theirs."""
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script, *arguments]
        log = open(tmp_path / "log", "w")
        process = subprocess.Popen([*map(str, command)], cwd=tmp_path, start_new_session=True, stdout=log, stderr=log)
        request.addfinalizer(process.kill)
        deadline = time.monotonic() + 200
        while steps_saved() < step:
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.01)
        tasks = Path(f"/proc/{process.pid}/task").iterdir()
        return process, [int(pid) for task in tasks for pid in (task / "children").read_text().split()]

    process, ranks = start_and_wait_for(160, *options.split(), "--run-dir", "part")
    for pid in (process.pid, *ranks):  # torchrun first: it would notice
        os.kill(pid, signal.SIGKILL)
    process.wait()
    killed_at = steps_saved()
    assert len(ranks) == 2 and 160 <= killed_at < 2200
    process, ranks = start_and_wait_for(killed_at + 80, "--resume", "part")
    os.kill(ranks[1], signal.SIGTERM)  # only one of them is told to stop, and yet all stop after the same round, and save
    process.wait(timeout=60)
    assert f"stopped at step {steps_saved()}, nothing lost" in (tmp_path / "log").read_text() and steps_saved() < 2400
    alone = subprocess.run([sys.executable, script, "--resume", "part"], cwd=tmp_path, capture_output=True, text=True)
    assert alone.returncode == 2 and "this run has 2 processes, not 1" in alone.stderr and alone.stderr.count("\n") == 1
    done = torchrun(script, "--resume", "part", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    part = torch.load(checkpoint, weights_only=True)
    assert all(torch.equal(weight, part["actor"][name]) for name, weight in whole["actor"].items())
    assert all(
        torch.equal(a, part["others"][0]["rb"][name])
        for name, a in whole["others"][0]["rb"].items()
        if name in ReplayBuffer.FIELDS
    )


def test_unequal_shares_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(sac_clip_humanoid, "WORLD_SIZE", 3)
    monkeypatch.setattr(sys, "argv", ["sac_clip_humanoid.py", "--num-envs", "32", "--batch-size", "30", "--device", "cpu"])
    with pytest.raises(SystemExit) as stopped:
        sac_clip_humanoid.read_settings()
    assert stopped.value.code == 2 and "multiples of 3" in capsys.readouterr().err
