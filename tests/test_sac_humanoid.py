"""The humanoid: environment, both looks, the tasks' conditions, and what its SAC alone has."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import mujoco
import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import avg_pool2d

import sac_clip_humanoid
from sac_clip_humanoid import BODY_POINTS, GEOM_POINTS, SAC, TASKS, Args, Normalize, Scene, rollout, summary

HERE = Path(__file__).parent
MODEL = gym.make("Humanoid-v5").unwrapped.model
DATA = mujoco.MjData(MODEL)


def test_environment_is_gymnasiums_and_an_evaluation_has_no_noise():
    """Two episodes in each of three, played by Gymnasium again from the same seeds with the same actions."""
    torch.manual_seed(0)
    args, size = Args(), 177
    envs = sac_clip_humanoid.Humanoids(3)
    options = {"terminate_when_unhealthy": False, "exclude_current_positions_from_observation": False}
    env = gym.make("Humanoid-v5", **options).unwrapped
    for seed, policy in ((5, None), (9, SAC(size - 2, 17, args).policy)):
        states, actions = rollout(policy, 0.0, envs, SimpleNamespace(add=lambda _: None), seed, args)
        assert states.shape == (101, 3, size) and actions.shape == (100, 3, 17)
        if policy:  # it sees all but the place on the floor
            expected = policy(states[:-1, :, 2:].flatten(0, 1))[0].tanh()
            torch.testing.assert_close(actions.flatten(0, 1), expected)
        for i in range(3):
            observed = [env.reset(seed=seed + i)[0]]
            observed += [env.step(0.4 * action)[0] for action in actions[:, i].numpy()]
            np.testing.assert_allclose(states[:, i], np.stack(observed)[:, :size], atol=1e-4, rtol=1e-4)
            np.testing.assert_allclose(states[-1, i, :24], env.data.qpos, atol=1e-4, rtol=1e-4)
        assert states[-1, :, 2].max() < 1  # they have fallen, where Gymnasium's own would have started again


def pose(pitch: float = 0, roll: float = 0, yaw: float = 0, lift: float = 0, **degrees: float) -> list[float]:
    """On the floor, or `lift` m above, from joint angles; `hip_y` means both hips', `right_hip_y` one."""
    DATA.qpos[:] = MODEL.qpos0
    mujoco.mju_euler2Quat(DATA.qpos[3:7], np.radians([yaw, pitch, roll]), "zyx")
    for name, angle in degrees.items():
        for joint in map(MODEL.joint, range(1, MODEL.njnt)):
            if joint.name in (name, f"left_{name}", f"right_{name}"):
                mirrored = "left_shoulder" in joint.name and joint.name != name
                DATA.qpos[joint.qposadr] = np.radians(-angle if mirrored else angle)
    mujoco.mj_kinematics(MODEL, DATA)
    reach = MODEL.geom_size[1:, 0] + abs(DATA.geom_xmat[1:, 8]) * MODEL.geom_size[1:, 1]
    DATA.qpos[2] += lift - (DATA.geom_xpos[1:, 2] - reach).min()
    return DATA.qpos.tolist()


def render(states: list, size: int = 8, textures="realistic", camera="fixed", supersample=1, batch_size=8):
    scene = Scene(size, size, textures, camera, supersample, batch_size, torch.device("cpu"))
    return scene.render(torch.tensor(states).view(-1, 24))


stand = partial(pose, knee=-5)
kneel = partial(pose, knee=-95, hip_y=-5)
splits = partial(pose, hip_x=-18, hip_z=-58, hip_y=-78, knee=-8)
RAISED = {"shoulder1": -84, "shoulder2": 20, "elbow": -85}
ON_HIPS = {"shoulder1": 48, "shoulder2": -75, "elbow": -15}
CROSSED = {"shoulder1": 58, "shoulder2": 38, "elbow": -83}
LOTUS = {"hip_x": 3, "hip_z": -58, "hip_y": -41, "knee": -158, "abdomen_y": -32, "pitch": -10}
RIGHT_UP = {"right_hip_y": -80, "right_knee": -90}


@pytest.mark.parametrize("batch_size", [1, 3])
def test_frames_and_points_are_each_states_own(batch_size):
    states = [pose(pitch, 10, 30, knee=-20, right_elbow=-60) for pitch in range(0, 91, 15)]
    frames, points = render(states, 32, batch_size=batch_size)
    assert frames.shape == (7, 3, 32, 32) and frames.dtype == torch.uint8
    assert points.keys() == {**GEOM_POINTS, **BODY_POINTS}.keys()
    for i, state in enumerate(states):
        assert torch.equal(render(state, 32)[0][0], frames[i]) and not torch.equal(frames[i], frames[i - 1])
        DATA.qpos[:] = state
        mujoco.mj_kinematics(MODEL, DATA)
        for name, place in points.items():
            part = DATA.geom(GEOM_POINTS[name]) if name in GEOM_POINTS else DATA.body(BODY_POINTS[name])
            np.testing.assert_allclose(place[i], part.xpos, atol=1e-5)
    assert render([], 32)[0].shape == (0, 3, 32, 32)


@pytest.mark.parametrize("textures, camera", [("realistic", "fixed"), ("original", "original")])
def test_a_frame_is_the_stored_one(textures, camera):
    """tests/humanoid_TEXTURES_CAMERA.png, 96 x 96: standing with raised arms, and kneeling."""
    frames, _ = render([stand(**RAISED), kneel()], 96, textures, camera)
    image = torch.from_numpy(np.array(Image.open(HERE / f"humanoid_{textures}_{camera}.png")))
    stored = image.unflatten(1, (2, 96)).permute(1, 3, 0, 2).float()
    assert avg_pool2d((frames - stored).abs(), 8).max() < 4 < (stored[0] - stored[1]).abs().mean()


def test_the_fixed_camera_is_the_papers():
    """Azimuth 180°, elevation -10°, distance 3.5 m, looking at (0, 0, 1), 45° high."""
    model = sac_clip_humanoid.scene_spec("realistic").compile()
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    right, _, back = data.cam("fixed").xmat.reshape(3, 3).T
    expected = [[0, 1, 0], [np.cos(np.radians(10)), 0, np.sin(np.radians(10))], [0, 0, 1]]
    np.testing.assert_allclose([right, back, data.cam("fixed").xpos - 3.5 * back], expected, atol=1e-6)
    assert model.cam("fixed").fovy == 45


def test_supersampling_is_the_mean_of_finer_pixels():
    looks = ((32, 2), (64, 1), (32, 1))
    smooth, fine, coarse = (render(stand(), size, supersample=n)[0].float() for size, n in looks)
    mean = avg_pool2d(fine, 2)
    assert (smooth - mean).abs().mean() < 1.5 < (coarse - mean).abs().mean()


POSES = {  # of these tasks, and of no others, the conditions hold
    "kneeling": [
        kneel(), kneel(yaw=120), kneel(**RAISED), kneel(**ON_HIPS), kneel(**CROSSED),
        pose(15, hip_y=-70, knee=-155), pose(45, hip_y=-50, knee=-95),  # on the heels, bowing
        pose(hip_y=-5, knee=-140),  # upright on the knees alone, the feet in the air
    ],
    "lotus-position": [pose(**LOTUS), pose(**LOTUS | {"hip_y": -90, "knee": -155, "pitch": 0})],  # plainly
    "doing-splits": [
        splits(), splits(yaw=40), splits(knee=-22, hip_y=-85),  # the last: hardly bent
        splits(hip_x=-25, hip_y=-85, knee=-5),  # as wide as it can be, the feet 25 cm high
    ],
    "standing-up": [
        stand(), pose(), stand(yaw=90), pose(hip_y=-30, knee=-50, pitch=10),
        stand(right_shoulder1=-84, right_shoulder2=20, right_elbow=-85),  # only one arm up
        stand(shoulder1=45, shoulder2=-20, elbow=-20),  # hands on the belly
        stand(shoulder1=42, shoulder2=-39, elbow=-85),  # hanging arms, 18 cm from the hips
        stand(shoulder1=-57, shoulder2=56, elbow=4),  # arms crossed in front of the face
        stand(shoulder1=27.5, shoulder2=35.4, elbow=-53.7),  # hands that merely touch
        stand(12), stand(roll=12), stand(hip_x=-25),  # swaying, legs apart
        stand(shoulder1=-40, shoulder2=35, elbow=-75),  # hands beside the face
    ],
    "standing-up arms-raised": [stand(**RAISED), stand(yaw=-70, **RAISED)],
    "standing-up hands-on-hips": [stand(**ON_HIPS)],
    "standing-up arms-crossed": [stand(**CROSSED)],
    "standing-up standing-on-one-leg": [stand(**RIGHT_UP), stand(left_hip_y=-60, left_knee=-60)],
    "": [
        pose(lift=0.3), kneel(lift=0.15), pose(lift=0.3, **LOTUS), splits(lift=0.4),  # in the air
        stand(lift=0.2, **RIGHT_UP), stand(50, **RIGHT_UP), kneel(60), splits(-60),  # falling over
        pose(45), pose(90), pose(-90), pose(80, hip_y=-80, knee=-90),  # lying, on all fours
        pose(hip_y=-90, knee=-5), pose(hip_y=-100, knee=-130),  # sitting, squatting
        stand(-28), stand(28), stand(-20), stand(roll=28),  # stiff falls
        kneel(40), kneel(55), kneel(-55), kneel(roll=40),
        stand(left_hip_y=-90, left_knee=-95, right_knee=-95),  # on one knee
        kneel(left_hip_y=-95, left_knee=-8),  # one leg stretched forwards
        pose(hip_x=-20, hip_z=-30, hip_y=-60, knee=-155),  # kneeling wide on the heels
        splits(hip_z=-20, hip_y=-85), splits(knee=-40, hip_y=-91), splits(knee=-90, hip_y=-100),
    ],
}  # fmt: skip


@pytest.mark.parametrize("tasks", POSES)
def test_success_conditions(tasks):
    points = render(POSES[tasks])[1]
    for task, (_, holds) in TASKS.items():
        assert holds(points).tolist() == [task in tasks.split()] * len(POSES[tasks]), task


def test_an_episode_succeeds_if_the_condition_holds_in_half_of_its_steps():
    labels = torch.ones(10, 4, 2)
    labels[:, :, 1] = torch.tensor([[0] * 10, [0] * 5 + [1] * 5, [0] * 6 + [1] * 4, [1, 0] * 5]).T
    assert [summary(labels[:, i : i + 1])["success_rate"] for i in range(4)] == [0, 1, 0, 1]
    assert summary(labels) == {"success_rate": 0.5, "clip_return": 10, "ground_truth_return": 14 / 4}
    labels[:, :, 1] = torch.nan  # no known task
    assert summary(labels) == {"clip_return": 10}


def test_normalize_has_seen_it_all():
    torch.manual_seed(0)
    norm = Normalize(348)
    scale = torch.linspace(0, 50, 348)  # the first number never varies
    obs = scale * torch.randn(1000, 348) + 40 * scale - 1000.3
    for part in obs.split([1, 99, 400, 500]):
        norm.update(part)
    expected = (obs - obs.double().mean(0)) / (obs.double().var(0, correction=0) + 1e-8).sqrt()
    torch.testing.assert_close(norm(obs).double(), expected, atol=1e-3, rtol=1e-3)
    assert norm(obs + 1e6).max() == 10 and norm(obs - 1e6).min() == -10
