"""What the scripts share, and each as a user runs it: files, kills, resume, evaluation, likely mistakes."""

import json
import os
import pickle
import shlex
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import av
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import dqn_clip_cartpole
import sac_clip_humanoid
import sac_clip_mountaincar
from clip_reward import CLIPReward, UsageError

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
SCRIPTS = {module.SCRIPT: module for module in (dqn_clip_cartpole, sac_clip_mountaincar, sac_clip_humanoid)}


def render_humanoid(states: torch.Tensor) -> torch.Tensor:
    scene = sac_clip_humanoid.Scene(64, 64, "realistic", "fixed", 1, 256, CPU)
    return scene.render(states[:, :24])[0]


RENDER = {
    "dqn_clip_cartpole": lambda states: dqn_clip_cartpole.render(states, 64, 64),
    "sac_clip_mountaincar": sac_clip_mountaincar.Scene(64, 64, "realistic", CPU).render,
    "sac_clip_humanoid": render_humanoid,
}
ENVS = {
    "dqn_clip_cartpole": lambda n, args: dqn_clip_cartpole.CartPole(n),
    "sac_clip_mountaincar": lambda n, args: sac_clip_mountaincar.MountainCar(n),
    "sac_clip_humanoid": sac_clip_humanoid.Humanoids,
}
POLICY = {  # what acts, with new weights
    "dqn_clip_cartpole": dqn_clip_cartpole.QNetwork,
    "sac_clip_mountaincar": lambda args: sac_clip_mountaincar.Actor(),
    "sac_clip_humanoid": lambda args: sac_clip_humanoid.SAC(177, args).policy,
}
SHORT = (
    "--total-timesteps 1440 --num-envs 4 --episode-length 30 --learning-starts 300 --evaluate-every 240 "
    "--buffer-size 1000 --gradient-steps 10 --episodes 5 --seed 3 --device cpu --clip-model tiny"
).split()
each_script = pytest.mark.parametrize("script", SCRIPTS)
slow_but_for_cartpole = pytest.mark.slow("humanoid", "mountaincar")


def start(script: str, *arguments, folder: Path, before: str = "", **env: str) -> subprocess.Popen:
    """A script in a process of its own, perhaps with some lines of Python run before it."""
    code = f"import runpy, sys; sys.path.insert(0, {str(ROOT)!r})\n{before}\n"
    code += f"sys.argv[0] = {str(ROOT / script)!r} + '.py'; runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=os.environ | env, stdout=pipe, stderr=pipe, text=True)


def run(script: str, *arguments, folder: Path, **env: str) -> str:
    process = start(script, *arguments, folder=folder, **env)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert not set("\r\x1b") & set(out + err)  # where there is no terminal
    return out


def load(path: Path) -> dict:
    return torch.load(path, weights_only=True)


def rounds(run_dir: Path) -> dict[int, tuple]:
    """Number -> states, actions, rewards."""
    return {int(path.stem): load(path)["round"] for path in (run_dir / "rounds").iterdir()}


def result(run_dir: Path) -> dict:
    figures = json.loads((run_dir / "result.json").read_text())
    for name in ("run_dir", "resume"):
        figures["settings"].pop(name)
    return figures


def curve(run_dir: Path, name: str = "charts/clip_return") -> list[tuple[int, float]]:
    events = EventAccumulator(str(run_dir), {"scalars": 0}).Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def same_run(a: Path, b: Path) -> None:
    """Nothing that two runs left differs: results, the best policy, and all that the last one depends on."""
    assert result(a) == result(b) and curve(a) == curve(b) and same(rounds(a), rounds(b))
    for name in ("best.pt", "checkpoint.pt"):
        one, other = load(a / name), load(b / name)
        del one["settings"], other["settings"]
        assert same(one, other)


@pytest.fixture
def train(call, monkeypatch):
    """Runs a script in this process, without pictures -> the run folder, its last argument."""
    threads, interval = torch.get_num_threads(), sys.getswitchinterval()

    def train(script: str, *arguments) -> Path:
        black = np.zeros((1, 8, 16, 16, 3), np.uint8)
        monkeypatch.setattr(SCRIPTS[script], "pictures", lambda states, *_: black)
        call(SCRIPTS[script], *arguments)
        return Path(arguments[-1])

    yield train
    torch.set_num_threads(threads)
    sys.setswitchinterval(interval)


def rewards_of(run_dir: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """-> of all rounds kept, the states after the steps (N, S) and their rewards (N,)."""
    states, _, rewards = map(torch.stack, zip(*rounds(run_dir).values()))
    return states[:, 1:].flatten(0, 2), rewards.flatten()


# ---- The parts that all scripts have


@each_script
def test_a_rollout_is_its_seeds_and_its_policys_alone(script):
    module = SCRIPTS[script]
    args, policies = module.Args(num_envs=3, episode_length=20), []
    envs, labeller = ENVS[script](3, args), SimpleNamespace(add=lambda _: None)
    for seed in (0, 1):
        torch.manual_seed(seed)
        policies.append(POLICY[script](args))

    def play(policy, noise: float, seed: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
        states, actions = module.rollout(policy, noise, envs, labeller, seed, args)
        assert len(states) == 21 and len(actions) == 20 and not actions.requires_grad
        return states, actions

    one, other = policies
    for noise in (0.0, 0.5):
        assert same(play(one, noise), play(one, noise)) and not same(play(one, noise), play(other, noise))
        assert not same(play(one, noise), play(one, noise, seed=3))
    assert not same(play(one, 0.0), play(one, 0.5))
    at_random = policies if script == "dqn_clip_cartpole" else (None, None)
    random = [play(policy, 1.0) for policy in at_random]
    assert same(*random) and not same(random[0], play(one, 1.0, seed=3))
    if script != "dqn_clip_cartpole":
        assert random[0][1].abs().max() <= 1 and not same(random[0], play(one, 1.0))


@each_script
def test_half_precision_ranks_frames_as_single_precision_does(script):
    module, rng = SCRIPTS[script], torch.Generator().manual_seed(0)
    args = module.Args(num_envs=25, episode_length=20)
    heard, policy = [], None if "sac" in script else POLICY[script](args)
    module.rollout(policy, 1.0, ENVS[script](25, args), SimpleNamespace(add=heard.append), 0, args)
    states = torch.cat(heard)
    if script != "sac_clip_humanoid":  # from all over
        states[:, 0] = torch.rand(500, generator=rng) * 1.8 - 1.2
    if script == "dqn_clip_cartpole":
        states[:, 2] = torch.rand(500, generator=rng) * 6.28 - 3.14
    frames = RENDER[script](states)
    prompts = args.prompt or "a humanoid robot kneeling", args.baseline_prompt, args.goal_baseline_alpha
    rewards = [CLIPReward("tiny", *prompts, precision=precision)(frames) for precision in ("fp32", "bf16")]
    assert rewards[0].std() > 0.02 and not torch.equal(*rewards)
    ranks = torch.stack([reward.argsort().argsort().double() for reward in rewards])
    assert torch.corrcoef(ranks)[0, 1] >= 0.998


class AtLast(ThreadPoolExecutor):
    """Does nothing before somebody asks for it: a round is only played when the learning is over."""

    def submit(self, work, *arguments) -> Future:
        task = Future()

        def result(timeout=None):
            if not task.done():
                task.set_result(work(*arguments))
            return Future.result(task, timeout)

        task.result = result
        return task


class AtOnce(AtLast):
    """Does all at once: a round has been played, and rewarded, before the learning begins."""

    def submit(self, work, *arguments) -> Future:
        task = super().submit(work, *arguments)
        task.result()
        return task


FEW_STEPS = """--num-envs 4 --episode-length 20 --total-timesteps 400 --learning-starts 160 --batch-size 64
    --gradient-steps 15 --episodes 2 --learning-rate 0.01 --clip-batch-size 32"""


@slow_but_for_cartpole
@each_script
def test_the_learning_and_the_round_played_meanwhile_see_nothing_of_each_other(
    script, train, tmp_path, monkeypatch
):
    """A round is the policy's from before, whether it is played before, after or during the learning."""
    module, sampled = SCRIPTS[script], []

    class Spy(module.ReplayBuffer):
        def sample(self, *sizes):
            sampled.append(self.rounds)
            return super().sample(*sizes)

    monkeypatch.setattr(module, "ReplayBuffer", Spy)
    for pool in (AtOnce, AtLast, ThreadPoolExecutor):
        sampled.clear()
        monkeypatch.setattr("clip_reward.ThreadPoolExecutor", pool)
        run_dir = train(script, *SHORT, *FEW_STEPS.split(), "--run-dir", tmp_path / pool.__name__)
        assert sampled == [k for k in (2, 3, 4) for _ in range(15)] and len(rounds(run_dir)) == 5
        same_run(tmp_path / "AtOnce", run_dir)


@pytest.mark.slow("mountaincar")
@pytest.mark.parametrize("script", ["dqn_clip_cartpole", "sac_clip_mountaincar"])
def test_ground_truth_reward_is_what_the_flag_trains_on(script, train, tmp_path):
    options = "--total-timesteps 6400 --num-envs 16 --episode-length 200 --gradient-steps 1".split()
    options += ["--reward", "ground-truth", "--run-dir", tmp_path / "run"]
    run_dir = train(script, *SHORT, *options)
    states, rewards = rewards_of(run_dir)
    assert torch.equal(rewards, SCRIPTS[script].ground_truth_reward(states)) and rewards.sum() > 0


@slow_but_for_cartpole
@pytest.mark.parametrize(
    "script, threshold", [*((script, None) for script in SCRIPTS), ("dqn_clip_cartpole", 0.5)]
)
def test_negative_prompts_make_the_reward_contrastive(script, threshold, train, tmp_path):
    temperature = 0.3 if threshold is None else None  # with the model's own the car's start is worth 0.00
    option = f"--temperature={temperature}" if threshold is None else f"--threshold={threshold}"
    negatives = ["a pole leaning to the side", "a car in the valley", "a humanoid robot standing up"]
    words = ["--total-timesteps=480", option, "--negative-prompt", *negatives]
    run_dir = train(script, *SHORT, *words, "--run-dir", tmp_path / "run")
    settings = load(run_dir / "checkpoint.pt")["settings"]
    states, rewards = rewards_of(run_dir)
    how = {"precision": settings["precision"], "negative_prompts": negatives, "temperature": temperature}
    p = CLIPReward("tiny", settings["prompt"], **how)(RENDER[script](states))
    if threshold is None:
        torch.testing.assert_close(rewards, p, atol=2e-3, rtol=0)
        assert rewards.std() > 3e-3 and 0 <= rewards.min() and rewards.max() <= 1
    else:
        clear = (p - threshold).abs() > 1e-3
        assert torch.equal(rewards[clear], (p > threshold).float()[clear])
    train(script, "--resume", run_dir)  # brings the negatives along


# ---- Each script as a user runs it


@pytest.fixture(scope="module", params=SCRIPTS)
def unbroken(request, tmp_path_factory) -> tuple[str, Path]:
    """A short run that nothing disturbed -> script, run folder."""
    folder = tmp_path_factory.mktemp("unbroken")
    out = run(request.param, *SHORT, "--run-dir", folder / "run", folder=folder, OMP_NUM_THREADS="2")
    assert "CLIP model tiny" in out and "no evidence of zero-shot" in out
    untrained = f"learned nothing: success rate 0.00, clip return {curve(folder / 'run')[0][1]:.2f}"
    assert untrained in out and "whatever the prompt says" not in out
    return request.param, folder / "run"


@pytest.fixture
def copied(unbroken, tmp_path) -> tuple[str, Path]:
    """Script and a copy of its run's folder."""
    shutil.copytree(unbroken[1], tmp_path / "run")
    return unbroken[0], tmp_path / "run"


def test_a_run_leaves_what_it_promises(unbroken):
    _, run_dir = unbroken
    figures = result(run_dir)
    assert {"success_rate", "clip_return", "ground_truth_return", "settings", "versions"} <= set(figures)
    assert figures["settings"]["seed"] == 3 and not list(run_dir.rglob("*tmp"))
    with av.open(str(run_dir / "result.mp4")) as video:
        assert video.streams.video[0].codec_context.name == "h264"
        assert video.streams.video[0].format.name == "yuv420p"
        frames = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
    assert len(frames) == 3 * figures["settings"]["episode_length"]
    assert abs(frames[0].astype(int) - frames[25]).max() > 50  # something moves
    events = EventAccumulator(str(run_dir), {"images": 0, "scalars": 0}).Reload()
    charts = {"charts/clip_return", "charts/ground_truth_return", "charts/success_rate", "charts/SPS"}
    assert charts <= set(events.Tags()["scalars"])
    losses = [name for name in events.Tags()["scalars"] if name.startswith("losses/")]
    assert losses and len(curve(run_dir)) == 12
    assert all(step in range(480, 1441, 120) for name in losses for step, _ in curve(run_dir, name))
    assert curve(run_dir, "result/clip_return") == [(1441, pytest.approx(figures["clip_return"]))]
    assert [event.step for event in events.Images("frames")][:3] == [240, 480, 720]
    evaluations = curve(run_dir, "evaluation/clip_return")
    assert [step for step, _ in evaluations] == list(range(240, 1441, 240))
    highest = [max(earned for _, earned in evaluations[: k + 1]) for k in range(len(evaluations))]
    alike = [k for k, (_, earned) in enumerate(evaluations) if earned >= 0.999 * highest[k]]
    best = load(run_dir / "best.pt")  # the newest of those that earn what the best before earns, within 0.1 %
    assert best["step"] == evaluations[alike[-1]][0]
    assert best["best_return"] == pytest.approx(highest[alike[-1]], rel=1e-6)


def test_the_rounds_are_what_was_played_and_clips_rewards_of_the_states_after_the_steps(unbroken):
    """Of twelve rounds of 4 x 30 steps the last nine are kept; they are played again with their actions."""
    script, run_dir = unbroken
    settings, kept = load(run_dir / "checkpoint.pt")["settings"], rounds(run_dir)
    assert sorted(kept) == list(range(3, 12))
    for number in (3, 11):
        seed = np.random.SeedSequence((3, number)).generate_state(2)[0].item()
        envs = ENVS[script](4, SCRIPTS[script].Args(episode_length=30))
        states, all_actions, _ = kept[number]
        force = 0.4 if script == "sac_clip_humanoid" else 1
        assert np.allclose(envs.reset(seed=seed)[0], states[0], atol=1e-6)
        for t, actions in enumerate(all_actions):
            assert np.allclose(envs.step(force * actions.numpy())[0], states[t + 1], atol=1e-4, rtol=1e-4)
    prompts = settings["prompt"], settings["baseline_prompt"], settings["goal_baseline_alpha"]
    reward_model = CLIPReward("tiny", *prompts, precision=settings["precision"])
    states, _, rewards = kept[11]
    after, before = (reward_model(RENDER[script](s.flatten(0, 1))) for s in (states[1:], states[:-1]))
    torch.testing.assert_close(rewards.flatten(), after, atol=1e-4, rtol=0)
    assert (before - rewards.flatten()).abs().max() > 1e-3


# What kills or interrupts the process, in the middle of the n-th call. A save writes half of its file before.
KILLER = """
import imageio.v3, os, signal, torch
signal.signal(signal.SIGINT, signal.default_int_handler)  # or a job in the background does not hear it
owner, name, left = {}, "{}", [None] * {}
own = getattr(owner, name)
def deadly(*args, **kwargs):
    left.pop()
    if not left:
        if name == "save":
            own(*args)
            os.truncate(args[1], os.path.getsize(args[1]) // 2)
        os.kill(os.getpid(), signal.{})
    return own(*args, **kwargs)
setattr(owner, name, deadly)
"""
MOMENTS = [
    ("torch", "save", 2, "SIGKILL"),  # the first round's file
    ("torch", "save", 5, "SIGKILL"),  # a checkpoint, after its round's file and best.pt
    ("torch.optim.Adam", "step", 5, "SIGINT"),  # Ctrl-C, in the first round that learns
    ("os", "replace", 7, "SIGKILL"),
    ("os", "replace", 10, "SIGKILL"),
    ("imageio.v3", "imwrite", 2, "SIGKILL"),  # the video
]


def test_killed_or_interrupted_in_the_middle_and_resumed_is_the_unbroken_run(unbroken, tmp_path, request):
    """Two scripts without --slow by Ctrl-C alone, which says how to go on."""
    script, whole = unbroken
    words, steps = [*SHORT, "--run-dir", "run"], []
    all_moments = script == "dqn_clip_cartpole" or request.config.getoption("--slow")
    for moment in MOMENTS if all_moments else MOMENTS[2:3]:
        process = start(script, *words, folder=tmp_path, before=KILLER.format(*moment))
        _, err = process.communicate(timeout=300)
        if "SIGINT" in moment:
            assert process.returncode == 130 and "Traceback" not in err and "--resume" in err
        else:
            assert process.returncode == -signal.SIGKILL, err
        steps.append(load(tmp_path / "run" / "checkpoint.pt")["step"])
        words = ["--resume", "run"]
    assert steps == sorted(set(steps)) and 360 in steps
    assert (steps[0], steps[-1]) == ((0, 1440) if all_moments else (360, 360))
    run(script, *words, folder=tmp_path)
    same_run(whole, tmp_path / "run")
    assert curve(tmp_path / "run", "result/clip_return") == curve(whole, "result/clip_return")  # once


@pytest.mark.slow
def test_any_number_of_cores_gives_the_same_run(unbroken, tmp_path):
    script, two = unbroken
    run(script, *SHORT, "--run-dir", "run", folder=tmp_path, OMP_NUM_THREADS="1")
    same_run(two, tmp_path / "run")


def test_a_finished_run_is_lengthened_with_other_settings_and_by_any_clock(copied, train, monkeypatch):
    """The clock was set back: the curves stay whole, and the shorter run's result goes."""
    script, run_dir = copied
    before = curve(run_dir)
    monkeypatch.setattr(time, "time", lambda: 1.0)
    train(script, "--total-timesteps", 1700, "--learning-rate", 1e-5, "--resume", run_dir)
    kept = load(run_dir / "checkpoint.pt")
    assert kept["step"] == 1800
    assert kept["settings"]["learning_rate"] == 1e-5 and kept["settings"]["seed"] == 3
    optimizer = next(value for name, value in kept.items() if name.endswith("optimizer"))
    share = 1 if script == "sac_clip_mountaincar" else 1 - 1680 / 1700  # of the last round
    assert optimizer["param_groups"][0]["lr"] == pytest.approx(1e-5 * share)
    assert curve(run_dir)[:12] == before and [step for step, _ in curve(run_dir)[12:]] == [1560, 1680, 1800]
    assert [step for step, _ in curve(run_dir, "result/clip_return")] == [1801]
    assert sorted(rounds(run_dir)) == list(range(6, 15))


@slow_but_for_cartpole
def test_evaluate_a_checkpoint(copied, tmp_path):
    script, run_dir = copied
    before = {path: path.stat().st_mtime_ns for path in run_dir.iterdir()}
    out = run(script, "--evaluate", "run/best.pt", folder=tmp_path)
    figures = json.loads((run_dir / "best_evaluation.json").read_text())
    for name in ("success_rate", "clip_return", "ground_truth_return"):
        assert figures[name] == result(run_dir)[name]
    assert "success rate" in out and (run_dir / "best_evaluation.mp4").stat().st_size > 1000
    assert {path: path.stat().st_mtime_ns for path in before} == before
    shutil.copy(run_dir / "checkpoint.pt", tmp_path / "policy.ckpt")
    run(script, *"--evaluate policy.ckpt --episodes 10 --seed 1 --run-dir other".split(), folder=tmp_path)
    settings = json.loads((tmp_path / "other" / "policy_evaluation.json").read_text())["settings"]
    assert settings["episodes"] == 10 and settings["seed"] == 1 and settings["num_envs"] == 4
    assert {path.name for path in tmp_path.iterdir()} == {"run", "other", "policy.ckpt"}


BAD = [
    ("--clip-model ViT-B-23/openai", "did you mean ViT-B-32"),
    ("--clip-model local-dir:/no/such", "/no/such/open_clip_config.json"),
    ("--clip-model ''", "unknown CLIP model ''"),
    ("--clip-model FILE", "local-dir:FOLDER"),
    ("--clip-model no/such.py", "no reward program"),
    ("--goal-baseline-alpha 1.5", "--goal-baseline-alpha must lie between 0 and 1, not 1.5"),
    ("--prompt ''", "prompt is empty"),
    ("--prompt", "prompt is empty"),
    ("--prompt '" + "upright " * 40 + "'", "too long for this model"),
    ("--prompt pole upright on the cart", "--prompt takes sentences, not words: put quotes around each"),
    ("--negative-prompt pole lying", "--negative-prompt takes sentences"),
    ("--device cuda", "no CUDA GPU"),
    ("--device cpu:3", None),
    ("--no-such-flag", None),
    ("--track", "pip install wandb"),
    ("--num-envs 0", "--num-envs must be at least 1"),
    ("--learning-rate 2", "--learning-rate must lie between 0 and 1"),
    ("--learning-starts -1", "--learning-starts must be at least 0"),
    ("--threshold 1.5", "the threshold in [-1, 1)"),
    ("--negative-prompt x --temperature 0", "temperature must be above 0"),
    ("--total-timesteps 3200 --learning-starts 3200", "nothing would be learned"),
    ("--total-timesteps 100 --learning-starts 0", "nothing would be learned"),
    ("--run-dir FILE/run", "FILE"),
    ("--run-dir .", "exists"),
    ("--resume ''", "checkpoint.pt is missing"),
    ("--resume no/such/run", "no/such/run/checkpoint.pt is missing"),
    ("--evaluate FILE", "is missing, damaged, or no checkpoint"),
    ("--evaluate RUN", "is missing, damaged, or no checkpoint"),
    ("--evaluate FOREIGN", "is no checkpoint of"),
    ("--evaluate PROGRAMS", None),  # of a reward program, which has to be named
]


@pytest.mark.parametrize("arguments, expected", BAD)
def test_likely_mistakes_are_one_line_and_leave_nothing(
    arguments, expected, unbroken, tmp_path, call, monkeypatch, capsys
):
    script, run_dir = unbroken
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("that --device cuda is refused where there is no GPU can only be seen without one")
    best = load(run_dir / "best.pt")
    (tmp_path / "FILE").write_text("not a checkpoint")
    torch.save(best | {"script": "copy_of_it"}, tmp_path / "FOREIGN")
    torch.save(best | {"settings": best["settings"] | {"clip_model": "/a.py"}}, tmp_path / "PROGRAMS")
    left = sorted(tmp_path.rglob("*"))
    device = [] if "--device" in arguments or "--resume" in arguments else ["--device", "cpu"]
    monkeypatch.chdir(tmp_path)
    words = shlex.split(arguments.replace("RUN", str(run_dir)))
    if "FILE/run" not in arguments:
        unwanted = "open_clip.create_model_from_pretrained"
        monkeypatch.setattr(unwanted, lambda *_, **__: pytest.fail("loaded a model"))
    # SystemExit is tyro's, which frames its errors.
    with pytest.raises(SystemExit if expected is None else (UsageError, OSError)) as stopped:
        call(SCRIPTS[script], *words, *device)
    assert "Traceback" not in capsys.readouterr().err
    if expected is None:
        assert stopped.value.code == 2
    else:
        assert expected in str(stopped.value) and "\n" not in str(stopped.value)
    assert sorted(tmp_path.rglob("*")) == left


@pytest.mark.slow
@each_script
def test_an_error_is_a_line_and_exit_code_2(script, tmp_path):
    process = start(script, "--clip-model", "ViT-B-23/openai", "--device", "cpu", folder=tmp_path)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2 and err.startswith(f"{script}.py: error: "), err
    assert err.count("\n") == 1 and "ViT-B-23" in err and not list(tmp_path.iterdir())


def test_a_strangers_files_run_nothing(copied, code, call, monkeypatch):
    """Code in a checkpoint or in a round; and the settings of a checkpoint steer nothing."""
    script, run_dir = copied
    monkeypatch.chdir(run_dir.parent)
    kept = load(run_dir / "checkpoint.pt")
    for content in (kept | {"step": code}, kept | {"settings": code}, {"round": code}):
        torch.save(content, "run/checkpoint.pt")
        for words in (["--evaluate", "run/checkpoint.pt"], ["--resume", "run"]):
            with pytest.raises((pickle.UnpicklingError, UsageError)):
                call(SCRIPTS[script], *words)
    settings = kept["settings"] | {"evaluate": "run/best.pt", "run_dir": "elsewhere", "resume": "elsewhere"}
    torch.save(kept | {"settings": settings}, "run/checkpoint.pt")
    args = SCRIPTS[script].read_settings()
    assert (args.resume, args.evaluate, args.run_dir) == ("run", None, "run")
    assert not Path("ran").exists() and not Path("elsewhere").exists()


def test_damaged_and_changed_files_are_a_line(copied, train):
    script, run_dir = copied
    kept = load(run_dir / "checkpoint.pt")
    weights = max(kept["policy"].values(), key=torch.numel)
    for name, tensor in (("checkpoint.pt", weights), ("rounds/7.pt", rounds(run_dir)[7][0])):
        content = (run_dir / name).read_bytes()
        flipped = bytearray(content)
        flipped[content.index(tensor.numpy().tobytes()) + 9] ^= 4  # PyTorch would load it
        for broken in (flipped, content[:-300]):
            (run_dir / name).write_bytes(broken)
            with pytest.raises(UsageError, match=f"{name} is missing, damaged"):
                train(script, "--resume", run_dir)
        (run_dir / name).write_bytes(content)
    smaller = {name: value[..., :-1] for name, value in kept["policy"].items() if value.dim()}
    for change, message in (
        ({"policy": kept["policy"] | smaller}, "has other networks than this"),
        ({"reward": kept["reward"].roll(1)}, "another reward model, or its weights have changed"),
        ({"reward": kept["reward"][:9]}, "another reward model, or its weights have changed"),
    ):
        torch.save(kept | change, run_dir / "checkpoint.pt")
        with pytest.raises(UsageError, match=message):
            train(script, "--resume", run_dir)
    torch.save(kept, run_dir / "checkpoint.pt")
    with pytest.raises(UsageError, match="can only be made longer"):
        train(script, "--total-timesteps=720", "--resume", run_dir)
    for other in ("--seed=4", "--num-envs=1", "--goal-baseline-alpha=0.25", "--prompt=of another goal"):
        with pytest.raises(UsageError, match=f"this run began with {other.partition('=')[0]}"):
            train(script, other, "--resume", run_dir)


def test_a_run_is_not_resumed_while_it_goes_on(copied, train, monkeypatch):
    """Nor is its checkpoint read before; and a file system without locks is no obstacle."""
    import fcntl

    script, run_dir = copied
    before = (run_dir / "checkpoint.pt").read_bytes()
    with open(run_dir / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="belongs to a training that still goes on"):
            train(script, "--resume", run_dir)
    assert (run_dir / "checkpoint.pt").read_bytes() == before

    def no_locks(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    train(script, "--resume", run_dir)


@each_script
def test_what_cannot_be_learned_stops_with_a_line(script, train, tmp_path, monkeypatch):
    """Rewards that are the same in all states or no numbers, and losses that are not finite."""
    same_everywhere = ["--negative-prompt", "the goal", "--prompt", "the goal", "--goal-baseline-alpha=0"]
    for k, (words, message) in enumerate((
        (["--negative-prompt", "x", "--threshold=1"], "threshold in"),
        (same_everywhere, "same in all states"),
        (["--negative-prompt", "x", "--temperature=1e-42"], "NaN or infinite"),
        ([], "losses are not finite"),
    )):  # fmt: skip
        if not words:
            update = "dqn_update" if script == "dqn_clip_cartpole" else "sac_update"
            monkeypatch.setattr(SCRIPTS[script], update, lambda *_: {"loss": torch.tensor(torch.nan)})
        with pytest.raises(UsageError, match=message):
            train(script, *SHORT, *words, "--run-dir", tmp_path / str(k))


@pytest.mark.slow
def test_tracking_lets_wandb_choose_the_run_and_keeps_it_in_the_folder(train, tmp_path, monkeypatch):
    started = []
    wandb = SimpleNamespace(init=lambda **how: started.append(how), __spec__=True)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    one, other = tmp_path / "a/run_1", tmp_path / "b/run_1"
    for folder in (one, other):
        train("dqn_clip_cartpole", *SHORT, "--total-timesteps=480", "--track", "--run-dir", folder)
    train("dqn_clip_cartpole", "--resume", other)
    assert [how["dir"] for how in started] == [str(one), str(other), str(other)]
    assert all(how["resume"] == "auto" and "id" not in how and how["sync_tensorboard"] for how in started)


@pytest.mark.parametrize("script, ours, papers", [
    ("dqn_clip_cartpole", 64_000, 3_000_000),
    ("sac_clip_mountaincar", 64_000, 3_000_000),
    ("sac_clip_humanoid", 128_000, 10_000_000),
])  # fmt: skip
def test_steps_are_ours_with_tiny_and_the_papers_with_other_models(script, ours, papers, monkeypatch):
    for words, expected in (
        ("tiny", ours),
        ("code_reward/programs/cartpole.py", ours),
        ("ViT-B-32/openai", papers),
        ("ViT-B-32/openai --total-timesteps 70000", 70_000),
    ):
        monkeypatch.setattr(sys, "argv", [f"{script}.py", "--device", "cpu", "--clip-model", *words.split()])
        args = SCRIPTS[script].read_settings()
        assert args.total_timesteps == expected and str(os.getpid()) in args.run_dir
        if script != "sac_clip_humanoid":
            assert args.evaluate_every == (6_400 if expected == ours else 64_000)


@pytest.mark.slow
def test_the_humanoid_needs_no_opengl(tmp_path):
    assert "--task" in run("sac_clip_humanoid", "--help", folder=tmp_path, MUJOCO_GL="osmesa")
