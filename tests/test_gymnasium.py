"""examples/sac_clip_gymnasium.py: what ends are worth, windows, frames, resuming, a toy that is learned."""

import os
import signal
import subprocess
import sys
from ctypes.util import find_library
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from clip_reward import UsageError
from code_reward.program import ProgramReward
from examples import sac_clip_gymnasium as script

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """
import numpy as np
SIZE = 16, 24
def column(pixels):
    return (255 - pixels[..., 0].astype(np.int32)).sum(1).argmax(1)
"""
PROGRAM += "".join(f"def beyond_{k}(frames):\n    return column(frames) > {k}\n" for k in range(2, 22, 2))


class Dot(gymnasium.Env):
    """A dot on a white picture; actions in [-2, 2] move it; at the right edge the episode ends."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}
    observation_space = gymnasium.spaces.Dict({"x": gymnasium.spaces.Box(-1, 1, (1,))})
    action_space = gymnasium.spaces.Box(-2, 2, (1,))

    def __init__(self, render_mode=None, what=""):
        self.render_mode = render_mode
        self.what = what
        if what == "discrete":
            self.action_space = gymnasium.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.x = self.np_random.uniform(-0.5, 0)
        return {"x": np.float32([self.x])}, {}

    def step(self, action):
        self.x = np.clip(self.x + 0.05 * action[0], -1, 1)
        if os.path.exists(self.what) and self.np_random.random() < 0.003:
            os.remove(self.what)  # it dies only once
            os.kill(os.getpid(), signal.SIGKILL)
        x = np.nan if self.what == "nan" else self.x
        told = {} if self.what == "seldom" and self.x <= 0.5 else {"is_success": self.x > 0.5}
        return {"x": np.float32([x])}, self.x, bool(self.x > 0.9), False, told

    def render(self):
        if self.what == "none":
            return None
        frame = np.full((64, 96, 3), 255, np.uint8)
        column = round(47 + 40 * self.x)
        frame[24:40, max(column - 6, 0) : column + 6] = (0, 0, 200)
        return frame


gymnasium.register("Dot-v0", Dot, max_episode_steps=30)
SHORT = """--env-id Dot-v0 --num-envs 4 --device cpu --total-timesteps 720 --learning-starts 240
    --update-every 15
    --evaluate-every 240 --episodes 4""".split()


@pytest.fixture
def run(call, tmp_path, monkeypatch):
    """Runs the script with the program above as reward: words -> the run's folder."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def run(*words):
        call(script, "--clip-model", program, *words)

    return run


# ---- What an end is worth


def a_round(length: int, terminated: bool) -> list[torch.Tensor]:
    """Of one environment, T = 6: state t is t, action t is 10 t, and the reward after step t is t²."""
    times = torch.arange(7.0)
    rewards = times[:6].square()
    rewards[length:] = rewards[length - 1]  # it stands still
    parts = (
        times.view(7, 1, 1),
        10 * times[:6].view(6, 1, 1),
        times[:6].view(6, 1) < length,
        torch.tensor([terminated]),
    )
    return [*parts, rewards[:, None]]


@pytest.mark.parametrize("plain", [False, True])
def test_a_terminal_state_earns_its_reward_for_ever_and_no_window_crosses_an_end(plain):
    args = script.Args(gamma=0.5, n_step=2, batch_size=500, plain_terminal=plain)
    buffer = script.stacked([a_round(3, True), a_round(5, False)], args)
    earned = torch.tensor([0, 1, 4, 0, 1, 4, 9, 16.0])  # not after the ends
    r = (torch.arange(6.0).square() - (0 if plain else earned.mean())) / earned.std(correction=0) * (1 - 0.5)
    torch.manual_seed(0)
    obs, next_obs, actions, returns, weight = script.sample(buffer, args)
    assert torch.equal(actions, 10 * obs)
    expected = {(0, 2): (r[0] + r[1] / 2, 0.25), (1, 3): (r[1] + r[2] / 2, 0.25)}  # bootstrapped from states
    expected |= {(2, 4): (r[2] + r[3] / 2, 0.25), (3, 5): (r[3] + r[4] / 2, 0.25), (4, 5): (r[4], 0.5)}
    # In the first round state 3 is terminal: r₂ is earned for ever, γ² r₂ / (1 - γ) after two steps.
    ends = {(1, 3): (r[1] + r[2] / 2, r[2] / 2), (2, 3): (r[2], r[2])}
    seen = set()
    for row in zip(obs[:, 0].tolist(), next_obs[:, 0].tolist(), returns.tolist(), weight.tolist()):
        *between, value, last = row
        if last == 0:
            earlier, forever = ends[tuple(between)]
            assert value == pytest.approx(float(earlier + forever * (not plain)), abs=1e-5)
        else:
            assert (value, last) == pytest.approx(tuple(map(float, expected[tuple(between)])), abs=1e-5)
        seen.add((*between, last == 0))
    assert seen == {(*k, False) for k in expected} | {(*k, True) for k in ends}
    if not plain:  # from the step before, all in all R / (1 - γ)
        (value,) = {round(v, 4) for o, v, w in zip(obs[:, 0], returns.tolist(), weight) if o == 2 and w == 0}
        assert value == pytest.approx(r[2].item() / (1 - 0.5), abs=1e-3)


@pytest.mark.parametrize("plain, last", [(False, 2), (True, 0)])
def test_what_has_ended_is_labelled_no_more(plain, last):
    labels = SimpleNamespace(result=lambda: torch.arange(1.0, 5)[:, None])
    going = torch.tensor([[True, True], [True, False], [True, False]])
    rewards = script.rewards_of(going, labels, script.Args(plain_terminal=plain))
    assert rewards.tolist() == [[1, 2], [3, last], [4, last]]


def test_pygame_leaves_sigterm_to_python():
    code = """
import signal
from examples import sac_clip_gymnasium as script
args = script.Args(env_id="MountainCarContinuous-v0", num_envs=1, vectorization="sync")
envs = script.make_envs(args, (16, 16))
signal.raise_signal(signal.SIGTERM)
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == -signal.SIGTERM


def test_an_episode_that_tells_of_no_success_has_had_none():
    args = script.Args(env_id="Dot-v0", env_kwargs='{"what": "seldom"}', num_envs=8, vectorization="sync")
    args.episode_length = 30
    envs = script.make_envs(args, (16, 16))
    nobody = SimpleNamespace(add=lambda frames: None)
    (states, *_), means = script.rollout(None, 1.0, envs, nobody, (0,), args)
    succeeded = (states[..., 0] > 0.5).any(0).float().mean().item()
    assert 0 < succeeded < 1 and means["success_rate"] == succeeded
    envs.close()


def test_a_round_that_tells_of_no_success_has_had_none(monkeypatch):
    rounds = iter([{"env_return": 1.0}, {"env_return": 3.0, "success_rate": 1.0}])
    monkeypatch.setattr(script, "rollout", lambda *how: ((None,) * 4, next(rounds)))
    monkeypatch.setattr(script, "rewards_of", lambda *how: torch.ones(3, 2))
    means = script.evaluate(torch.nn.Identity(), 4, 0, None, None, script.Args(num_envs=2))
    assert means == {"env_return": 2, "success_rate": 0.5, "clip_return": 3}


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("vectorization", ["async", "sync"])
def test_frames_are_the_environments_own_and_an_episode_that_has_ended_stands_still(pad, vectorization):
    args = script.Args(env_id="Dot-v0", num_envs=2, pad=pad, vectorization=vectorization)
    envs = script.make_envs(args, (16, 16))
    env = Dot("rgb_array")
    obs, _ = envs.reset(seed=5)
    env.reset(seed=6)  # as the second's
    fit = ImageOps.pad if pad else Image.Image.resize
    steps = earned = 0
    for _ in range(30):
        expected = np.asarray(fit(Image.fromarray(env.render()), (16, 16)))
        assert np.array_equal(obs["pixels"][1], expected) and abs(obs["state"][1, 0] - env.x) < 1e-5
        done = env.x > 0.9
        obs, *_, told = envs.step(np.float32([[0], [1]]))  # scaled to 2
        if not done:
            env.step([2.0])
            steps += 1
            earned += env.x
        assert told["over"][1] == told["terminated"][1] == (env.x > 0.9) and not told["terminated"][0]
        assert told["env_return"][1] == pytest.approx(earned) and told["success_rate"][1] == (env.x > 0.5)
    assert done and steps < 30 and told["over"][0]  # the first one's time is over
    obs, _ = envs.reset(seed=5)
    assert obs["state"][1] < 0  # it begins anew
    envs.close()


@pytest.mark.skipif(find_library("EGL") is None, reason="there is no EGL library")
def test_opengl_renders_in_processes_of_its_own(monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "disable")  # as the robot's script leaves it
    monkeypatch.setattr(script, "OPENGL", "egl")
    envs = script.make_envs(script.Args(env_id="InvertedPendulum-v5", num_envs=2), (32, 32))
    envs.reset_async(seed=1)
    obs, _ = envs.reset_wait(timeout=120)
    assert obs["pixels"].std() > 10
    envs.close()


def test_the_pendulums_program_pays_more_the_higher_it_is():
    reward = ProgramReward("code_reward/programs/pendulum.py", UsageError)
    env = gymnasium.make("Pendulum-v1", render_mode="rgb_array")
    env.reset(seed=1)
    frames = []
    for degrees in (180, 100, 75, 45, 25, 5, -5, -75):
        env.unwrapped.state = np.radians(degrees), 0
        frames.append(np.asarray(Image.fromarray(env.render()).resize(reward.size)))
    assert reward(torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)).tolist() == [0, 1, 2, 3, 4, 5, 5, 2]


# ---- Trainings


def weights(folder) -> dict:
    return torch.load(folder / "checkpoint.pt", weights_only=True)["sac"]


def test_after_an_environment_has_died_the_run_goes_on_to_the_same_end(run, tmp_path):
    how = "--env-kwargs", f'{{"what": "{tmp_path}/alive"}}'
    run(*SHORT, *how, "--run-dir", tmp_path / "unbroken")
    (tmp_path / "alive").touch()
    with pytest.raises((EOFError, OSError)):
        run(*SHORT, *how, "--run-dir", tmp_path / "broken")
    assert 1 < len(list((tmp_path / "broken/rounds").iterdir())) < 6
    run("--resume", tmp_path / "broken")
    one, other = weights(tmp_path / "unbroken"), weights(tmp_path / "broken")
    assert all(torch.equal(one[name], other[name]) for name in one)
    results = [(tmp_path / name / "result.json").read_text() for name in ("unbroken", "broken")]
    assert results[0].split('"settings"')[0] == results[1].split('"settings"')[0]
    assert (tmp_path / "broken/result.mp4").stat().st_size > 500
    run("--evaluate", tmp_path / "broken/best.pt")
    assert (tmp_path / "broken/best_evaluation.json").exists()
    (tmp_path / "program.py").write_text(PROGRAM.replace("argmax(1)", "argmin(1)"))
    with pytest.raises(UsageError, match="another reward"):
        run("--resume", tmp_path / "broken", "--total-timesteps", 960)


@pytest.mark.slow
def test_a_dot_learns_to_go_right_where_its_episode_ends(run, tmp_path, capsys):
    words = "--total-timesteps 6000 --num-envs 8 --learning-starts 480 --update-every 4 --vectorization sync"
    how = "--env-id", "Dot-v0", "--env-kwargs", '{"what": "seldom"}'
    run(*how, "--device", "cpu", *words.split(), "--run-dir", tmp_path / "run")
    assert "success rate 1.00" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    "words, says",
    [
        (["--env-id", "Nowhere-v0"], "Nowhere"),
        (["--env-kwargs", '{"what": "discrete"}'], "dqn_clip_cartpole.py"),
        (["--env-kwargs", '{"what": "none"}'], "gives no frames"),
        (["--env-kwargs", '{"what": "nan"}'], "not finite"),
    ],
)
def test_what_cannot_be_trained_in_gets_a_line(run, tmp_path, words, says):
    with pytest.raises((UsageError, gymnasium.error.Error), match=says):
        run(*SHORT, *words, "--run-dir", tmp_path / "run")


def test_losses_that_are_not_finite_end_the_run_before_they_are_saved(run, tmp_path):
    with pytest.raises(UsageError, match="--resume with a lower"):
        run(*SHORT, "--learning-rate", 1e30, "--run-dir", tmp_path / "run")
    assert all(value.isfinite().all() for value in weights(tmp_path / "run").values())


@pytest.mark.parametrize("how", ["--resume", "--evaluate"])
def test_a_strangers_checkpoint_runs_no_module(how, call, tmp_path, monkeypatch):
    (tmp_path / "stranger.py").write_text("raise SystemExit('it ran')")
    monkeypatch.syspath_prepend(tmp_path)
    settings = asdict(script.Args(env_id="stranger:X-v0", prompt=("a dot",)))
    torch.save({"settings": settings}, tmp_path / "checkpoint.pt")
    with pytest.raises(UsageError, match="stranger:X-v0 runs that module's code: name it again"):
        call(script, how, tmp_path if how == "--resume" else tmp_path / "checkpoint.pt")


if sys.version_info >= (3, 12):  # forking a process with threads is warned of
    pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
