"""What the scripts share, and each as a user runs it: files, kills, resume, evaluation, likely mistakes."""

import gc
import json
import logging
import multiprocessing
import os
import pkgutil
import resource
import runpy
import shlex
import shutil
import signal
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache, partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import imageio.v3 as iio
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import dqn_clip_cartpole
import sac_clip_humanoid
import sac_clip_mountaincar
from clip_reward import CLIPReward, UsageError

gc.freeze()  # imageio collects garbage for each film

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
SCRIPTS = {module.__name__: module for module in (dqn_clip_cartpole, sac_clip_mountaincar, sac_clip_humanoid)}
Scene = sac_clip_humanoid.Scene
# Six rounds of 30 steps, the first two at random, the last four kept; weights that a few updates change.
SHORT = """--num-envs 3 --episode-length 10 --total-timesteps 180 --learning-starts 60 --evaluate-every 60
    --buffer-size 100 --gradient-steps 3 --batch-size 32 --learning-rate 0.01 --tau 1 --episodes 3 --seed 3
    --clip-batch-size 8 --precision fp32 --device cpu --clip-model tiny""".split()


@pytest.fixture(autouse=True)
def quick_and_clean(monkeypatch):
    """The humanoid's films are small; a script silences the loggers of its own process, not of this one."""

    class Small(Scene):
        def __init__(self, height: int, width: int, *others):
            super().__init__(min(height, 64), min(width, 64), *others)

    monkeypatch.setattr(sac_clip_humanoid, "Scene", Small)
    yield
    logging.disable(logging.NOTSET)


@contextmanager
def command_line(script: str, *words):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{script}.py", *map(str, words)])
        yield SCRIPTS[script]


def train(script: str, *words) -> Path:
    """Runs a script in this process -> the last word, which is its run's folder."""
    with command_line(script, *words) as module:
        module.main()
    return Path(words[-1])


@pytest.fixture
def refused(capsys):
    """Runs a script to its end by a mistake -> the line on stderr, after a look at the exit code."""

    def refused(script: str, *words) -> str:
        with command_line(script, *words), pytest.raises(SystemExit) as stopped:
            runpy.run_path(str(ROOT / f"{script}.py"), run_name="__main__")
        error = capsys.readouterr().err
        assert stopped.value.code == 2 and "Traceback" not in error
        assert "error: " not in error or error.startswith("error: ") and error.count("\n") == 1
        return error

    return refused


def read(path: Path) -> dict:
    """-> a checkpoint or result, without what two runs may differ in."""
    text = path.suffix == ".json"
    content = json.loads(path.read_text()) if text else torch.load(path, weights_only=True)
    for name in ("run_dir", "resume"):
        content["settings"].pop(name)
    return content


def rounds(run_dir: Path) -> dict[int, tuple]:
    """Number -> states, actions, rewards."""
    return {int(path.stem): torch.load(path)["round"] for path in (run_dir / "rounds").iterdir()}


def curves(run_dir: Path) -> dict[str, list]:
    """Name -> steps and values."""
    events = EventAccumulator(str(run_dir), {"scalars": 0}).Reload()
    names = events.Tags()["scalars"]
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in names}


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def same_run(a: Path, b: Path) -> None:
    """Nothing that two runs left differs: results, curves, the best policy, all that a resumed one needs."""
    found = [curves(run_dir) for run_dir in (a, b)]
    for curve in found:
        del curve["charts/SPS"]
    assert found[0] == found[1] and same(rounds(a), rounds(b)) and not [*b.rglob("*.tmp")]
    for name in ("best.pt", "checkpoint.pt", "result.json"):
        assert same(read(a / name), read(b / name)), name


@pytest.fixture(scope="module", params=SCRIPTS)
def unbroken(request, tmp_path_factory) -> SimpleNamespace:
    """A short run that nothing disturbed: script, run_dir, and the first states of all that was played.

    By its clock a round takes a second, an evaluation a hundred more.
    """
    module = SCRIPTS[request.param]
    rollout, evaluate = module.rollout, module.evaluate
    starts, clock = [], [0]

    def play(*arguments):
        states, actions = rollout(*arguments)
        starts.append(tuple(states[0].flatten().tolist()))
        clock[0] += 1
        return states, actions

    def slow(*arguments):
        clock[0] += 100
        return evaluate(*arguments)

    run_dir = tmp_path_factory.mktemp("unbroken") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("clip_reward.THREADS", 3)
        patch.setattr(module, "rollout", play)
        patch.setattr(module, "evaluate", slow)
        patch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
        train(request.param, *SHORT, "--run-dir", run_dir)
    return SimpleNamespace(script=request.param, run_dir=run_dir, starts=starts)


@pytest.fixture
def copied(unbroken, tmp_path) -> tuple[str, Path]:
    """Script and a copy of its run's folder."""
    shutil.copytree(unbroken.run_dir, tmp_path / "run")
    return unbroken.script, tmp_path / "run"


# ---- What a run leaves


def test_a_run_leaves_what_it_promises(unbroken):
    figures = read(unbroken.run_dir / "result.json")
    assert figures.keys() == {"success_rate", "clip_return", "ground_truth_return", "settings"}
    assert figures["settings"]["seed"] == 3 and not list(unbroken.run_dir.rglob("*.tmp"))
    film = iio.imread(unbroken.run_dir / "result.mp4", plugin="pyav").astype(int)
    humanoid = unbroken.script == "sac_clip_humanoid"
    assert film.shape == (3 * 10, *((264, 240) if humanoid else (224, 300)), 3)
    assert all(abs(film[one] - film[other]).max() > 50 for one, other in ((0, 9), (0, 10), (10, 20)))
    assert film[:, -24:].max((1, 2, 3)).min() > 200  # each frame's step and reward

    found = curves(unbroken.run_dir)
    for name in ("clip_return", "ground_truth_return", "success_rate"):
        assert [step for step, _ in found[f"charts/{name}"]] == [30, 60, 90, 120, 150, 180]
        assert [step for step, _ in found[f"evaluation/{name}"]] == [60, 120, 180]
    assert found["charts/SPS"] == [(step, 30) for step in range(30, 181, 30)]  # without the evaluations
    losses = [found[name] for name in found if name.startswith("losses/")]
    assert losses and all([step for step, _ in loss] == [90, 120, 150, 180] for loss in losses)
    returns = [earned for _, earned in found["evaluation/clip_return"]]
    highest = [max(returns[: k + 1]) for k in range(3)]
    alike = [k for k, earned in enumerate(returns) if earned >= highest[k] - 0.001 * abs(highest[k])]
    best = read(unbroken.run_dir / "best.pt")  # the newest of those that earn what the best before earns
    assert best["step"] == 60 * (alike[-1] + 1)
    assert best["best_return"] == pytest.approx(highest[alike[-1]], rel=1e-6)


def test_the_report_has_start_states_of_its_own(unbroken):
    """Not those of the three evaluations, of as many episodes, by which the best policy was chosen."""
    *played, report = unbroken.starts
    assert played[2] == played[5] == played[8] and len(played) == 9
    assert len({*played}) == 7 and report not in played


def render_humanoid(states: torch.Tensor) -> torch.Tensor:
    return Scene(64, 64, "realistic", "fixed", 1, 64, CPU).render(states[:, :24])[0]


ENVS = (dqn_clip_cartpole.CartPole, sac_clip_mountaincar.MountainCar, sac_clip_humanoid.Humanoids)
render_cart = partial(dqn_clip_cartpole.render, height=64, width=64)
RENDER = (render_cart, sac_clip_mountaincar.Scene(64, 64, "realistic", CPU).render, render_humanoid)
PARTS = dict(zip(SCRIPTS, zip(ENVS, RENDER, (1, 1, 0.4))))  # the last: force of an action


def test_the_rounds_are_what_was_played_and_clips_rewards_of_the_states_after_the_steps(unbroken):
    """They are played again with their actions."""
    kept, (Envs, render, force) = rounds(unbroken.run_dir), PARTS[unbroken.script]
    assert sorted(kept) == [2, 3, 4, 5]
    envs = Envs(3)
    for number in (2, 5):
        seed = np.random.SeedSequence((3, number)).generate_state(2)[0].item()
        states, all_actions, rewards = kept[number]
        start = envs.reset(seed=seed)
        assert np.allclose(start[0] if isinstance(start, tuple) else start, states[0], atol=1e-6)
        for t, actions in enumerate(all_actions):
            assert np.allclose(envs.step(force * actions.numpy()), states[t + 1], atol=1e-4, rtol=1e-4)
    args = SCRIPTS[unbroken.script].Args()
    reward_model = CLIPReward("tiny", args.prompt, args.baseline_prompt, args.goal_baseline_alpha)
    after, before = (reward_model(render(s.flatten(0, 1))) for s in (states[1:], states[:-1]))
    torch.testing.assert_close(rewards.flatten(), after, atol=1e-4, rtol=0)
    assert (before - rewards.flatten()).abs().max() > 1e-3


def test_evaluate_a_checkpoint(copied, tmp_path, monkeypatch):
    """A film's sizes are even, whatever those of the screen."""
    script, run_dir = copied
    before = {path: path.stat().st_mtime_ns for path in run_dir.iterdir()}
    train(script, "--evaluate", run_dir / "best.pt")
    figures, report = (read(run_dir / f"{name}.json") for name in ("best_evaluation", "result"))
    assert all(figures[name] == report[name] for name in report if name != "settings")
    assert {path: path.stat().st_mtime_ns for path in before} == before

    shutil.copy(run_dir / "checkpoint.pt", tmp_path / "policy.ckpt")
    for name, value in (("SCREEN_WIDTH", 550), ("SCREEN_HEIGHT", 350)):
        monkeypatch.setattr(SCRIPTS[script], name, value, raising=False)
    train(script, "--episodes", 2, "--seed", 1, "--evaluate", tmp_path / "policy.ckpt")
    used = read(tmp_path / "policy.ckpt_evaluation.json")["settings"]
    assert used["episodes"] == 2 and used["seed"] == 1 and used["num_envs"] == 3
    film = iio.imread(tmp_path / "policy.ckpt_evaluation.mp4", plugin="pyav")
    assert film.shape == (20, *((88, 64) if script == "sac_clip_humanoid" else (198, 274)), 3)


# ---- A run is the same however it comes about


class AtLast(ThreadPoolExecutor):
    """Does nothing before somebody asks for it: a round is only played when the learning is over."""

    def submit(self, work, *arguments) -> Future:
        task = Future()
        task.result = cache(lambda: work(*arguments))
        return task


class AtOnce(ThreadPoolExecutor):
    """Does all at once: a round has been played, and rewarded, before the learning begins."""

    def submit(self, work, *arguments) -> Future:
        task = Future()
        task.set_result(work(*arguments))
        return task


@pytest.mark.parametrize(("pool", "threads"), [(AtOnce, 1), (AtLast, 4)])
def test_acting_learning_and_labelling_see_nothing_of_each_other(
    pool, threads, unbroken, tmp_path, monkeypatch
):
    """A round is the policy's from before, whether played before, after or during the learning, and the
    same for any number of threads."""
    monkeypatch.setattr("clip_reward.THREADS", threads)
    monkeypatch.setattr("clip_reward.ThreadPoolExecutor", pool)
    same_run(unbroken.run_dir, train(unbroken.script, *SHORT, "--run-dir", tmp_path / "run"))


PROCESSES = multiprocessing.get_context("forkserver")  # which have imported what takes long
PROCESSES.set_forkserver_preload([*SCRIPTS, "open_clip", "torch._dynamo", "pytest", "av"])


def as_a_user(script: str, words: list[str], log: Path, where: str, n: int, sign: int) -> None:
    """A process runs a script until, in the n-th call of what is named, it gets a signal."""
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    owner, _, name = where.rpartition(".")
    own, calls = getattr(pkgutil.resolve_name(owner), name), count(1)

    def deadly(*arguments, **options):
        if next(calls) == n:
            if name == "write_bytes":  # in the middle of a file
                own(arguments[0], arguments[1][:1000])
            os.kill(os.getpid(), sign)
        return own(*arguments, **options)

    setattr(pkgutil.resolve_name(owner), name, deadly)
    sys.argv = [f"{script}.py", *words]
    runpy.run_path(str(ROOT / f"{script}.py"), run_name="__main__")


MOMENTS = [
    ("pathlib.Path.write_bytes", 2, signal.SIGKILL, 0),  # the first round's file; 0 steps are kept
    (
        "pathlib.Path.write_bytes",
        6,
        signal.SIGKILL,
        30,
    ),  # the checkpoint after the first evaluation and best.pt
    ("torch.optim.Adam.step", 4, signal.SIGINT, None),  # Ctrl-C while it learns
    ("os.replace", 2, signal.SIGKILL, None),  # a round's file is there, but has no name yet
    ("PIL.Image.fromarray", 5, signal.SIGKILL, 180),  # in the film
    ("os.replace", 99, signal.SIGKILL, 180),  # never
]


@pytest.mark.slow("humanoid", "mountaincar")
def test_a_run_killed_at_any_moment_and_resumed_is_the_unbroken_run(unbroken, tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    words = [*SHORT, "--run-dir", str(run_dir)]
    for where, n, sign, kept in MOMENTS:
        process = PROCESSES.Process(target=as_a_user, args=(unbroken.script, words, log, where, n, sign))
        process.start()
        process.join(300)
        expected = 0 if n == 99 else 130 if sign == signal.SIGINT else -sign
        assert process.exitcode == expected and "Traceback" not in log.read_text(), log.read_text()
        assert kept in (None, read(run_dir / "checkpoint.pt")["step"])
        words = ["--resume", str(run_dir)]
    same_run(unbroken.run_dir, run_dir)


def test_a_finished_run_is_lengthened_with_other_settings(copied):
    script, run_dir = copied
    before = curves(run_dir)
    train(script, "--total-timesteps", 200, "--learning-rate", 1e-5, "--resume", run_dir)
    kept = read(run_dir / "checkpoint.pt")
    assert kept["step"] == 210 and sorted(rounds(run_dir)) == [3, 4, 5, 6]
    assert kept["settings"]["learning_rate"] == 1e-5 and kept["settings"]["seed"] == 3
    optimizer = next(value for name, value in kept.items() if name.endswith("optimizer"))
    share = 1 if script == "sac_clip_mountaincar" else 1 - 180 / 200
    assert optimizer["param_groups"][0]["lr"] == pytest.approx(1e-5 * share)
    assert all(found[:-1] == before[name] and found[-1][0] == 210 for name, found in curves(run_dir).items())
    assert read(run_dir / "result.json")["settings"]["total_timesteps"] == 200


# ---- Mistakes and strangers

MISTAKES = [  # on the command line, what the line says; None: the framed words of tyro
    ("--no-such-flag", None),
    ("--device cpu:3", None),
    ("--prompt a humanoid robot", "put quotes around it"),
    ("--baseline-prompt pole and cart", "put quotes around it"),
    ("--device cuda", "no CUDA GPU"),
    ("--total-timesteps 6400 --learning-starts 6400 --num-envs 1", "nothing would be learned"),
    ("--total-timesteps 100 --learning-starts 0 --num-envs 1", "nothing would be learned"),
    ("--episode-length 2", "--n-step"),
    ("--clip-model ViT-B-23/openai", "cannot use ViT-B-23/openai"),
    ("--clip-model local-dir:/no/such", "cannot use local-dir:/no/such"),
    ("--goal-baseline-alpha 1.5", "α in [0, 1]"),
    ("--prompt '" + "upright " * 80 + "'", "tokens"),
    ("--run-dir RUN", "exists"),
    ("--run-dir FILE/run", "FILE/run"),
    ("--resume no/such/run", "no/such/run/checkpoint.pt is no checkpoint"),
    ("--resume RUN --run-dir other", "began with run_dir"),
    ("--resume RUN --buffer-size 1000", "began with buffer_size 100,"),
    ("--resume RUN --seed 4", "began with seed 3,"),
    ("--resume RUN --prompt 'of another goal'", "began with prompt"),
    ("--resume OTHER", "OTHER/checkpoint.pt is no checkpoint of this script"),
    ("--evaluate FILE", "FILE is no checkpoint of this script"),
    ("--evaluate OTHER/checkpoint.pt", "is no checkpoint of this script"),
    ("--evaluate PROGRAMS", None),  # of a reward program, which has to be named
]


@pytest.mark.parametrize(("words", "expected"), MISTAKES)
def test_likely_mistakes_are_one_line_and_leave_nothing(
    words, expected, unbroken, tmp_path, refused, monkeypatch
):
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("that --device cuda is refused where there is no GPU can only be seen without one")
    best = read(unbroken.run_dir / "best.pt")
    (tmp_path / "FILE").write_text("not a checkpoint")
    (tmp_path / "OTHER").mkdir()
    other = next(module for script, module in SCRIPTS.items() if script != unbroken.script)
    torch.save(best | {"settings": asdict(other.Args())}, tmp_path / "OTHER/checkpoint.pt")
    program = {"clip_model": f"{ROOT}/code_reward/programs/cartpole.py"}
    torch.save(best | {"settings": best["settings"] | program}, tmp_path / "PROGRAMS")
    files = [tmp_path, unbroken.run_dir]
    left = [{path: path.stat().st_mtime_ns for path in folder.rglob("*")} for folder in files]
    monkeypatch.chdir(tmp_path)
    device = [] if "--device" in words or "--resume" in words else ["--device", "cpu"]
    error = refused(unbroken.script, *shlex.split(words.replace("RUN", str(unbroken.run_dir))), *device)
    assert expected is None or error.startswith("error: ") and expected in error, error
    assert left == [{path: path.stat().st_mtime_ns for path in folder.rglob("*")} for folder in files]


def test_an_entropy_coefficient_of_0_has_no_logarithm(refused):
    assert "--ent-coef must be above 0" in refused("sac_clip_humanoid", "--ent-coef", 0, "--device", "cpu")


@pytest.mark.parametrize(
    "words", ["--prompt 人形机器人 跪着", "--negative-prompt fallen lying", "--prompt up"]
)
def test_prompts_that_are_none_of_these_mistakes_pass(words):
    with command_line("dqn_clip_cartpole", "--device", "cpu", *words.split()) as module:
        args = module.read_settings(module.Args)
    assert [*args.prompt, *args.negative_prompt][-1] == words.split()[-1]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(("words", "expected"), [
    ("--negative-prompt goal --prompt goal --goal-baseline-alpha 0", "the reward is the same everywhere"),
    ("--learning-rate 1e30", "losses are not finite"),
])  # fmt: skip
def test_what_cannot_be_learned_stops_with_a_line(words, expected, script, refused, tmp_path):
    error = refused(script, *SHORT, *words.split(), "--run-dir", tmp_path / "run")
    assert error.startswith("error: ") and expected in error


def test_a_full_disk_is_one_line_and_leaves_the_checkpoint(copied, refused):
    script, run_dir = copied
    before = (run_dir / "checkpoint.pt").read_bytes()
    _, limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limit))  # of each file
    try:
        error = refused(script, "--total-timesteps", 200, "--resume", run_dir)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    assert error.startswith("error: ")
    assert (run_dir / "checkpoint.pt").read_bytes() == before


def test_damaged_and_other_checkpoints_are_a_line_and_older_ones_are_read(copied, monkeypatch):
    script, run_dir = copied
    path = run_dir / "checkpoint.pt"
    content, kept = path.read_bytes(), torch.load(path, weights_only=True)
    smaller = {name: value[..., :-1] for name, value in kept["policy"].items() if value.dim()}
    optimizer = next(name for name in kept if name.endswith("optimizer"))
    monkeypatch.setattr(SCRIPTS[script], "Labeller", lambda *_: SimpleNamespace(device=CPU))
    broken = [{}, {"settings": {}}, kept | {"policy": kept["policy"] | smaller}, kept | {optimizer: {}}]
    broken += [{key: value for key, value in kept.items() if key != name} for name in ("policy", optimizer)]
    for damaged in (b"", content[: len(content) // 2], *broken):
        torch.save(damaged, path) if isinstance(damaged, dict) else path.write_bytes(damaged)
        with pytest.raises(UsageError, match="checkpoint.pt is no checkpoint of this script"):
            train(script, "--resume", run_dir)
    del kept["settings"]["n_step"]
    kept["settings"]["evaluate"] = "a stranger's.pt"  # steers nothing
    torch.save(kept, path)
    with command_line(script, "--resume", run_dir) as module:
        args = module.read_settings(module.Args)
    assert args.n_step == module.Args().n_step and args.evaluate is None


def test_a_strangers_files_run_nothing(copied, code, monkeypatch):
    """Code in a checkpoint or in a round."""
    script, run_dir = copied
    monkeypatch.chdir(run_dir.parent)
    kept = torch.load("run/checkpoint.pt", weights_only=True)
    for content in (kept | {"step": code}, kept | {"settings": code}):
        torch.save(content, "run/checkpoint.pt")
        for words in (["--evaluate", "run/checkpoint.pt"], ["--resume", "run"]):
            with pytest.raises(UsageError):
                train(script, *words)
    torch.save(kept, "run/checkpoint.pt")
    torch.save({"round": code}, "run/rounds/4.pt")
    with pytest.raises(Exception, match="mkdir"):
        train(script, "--resume", "run")
    assert not Path("ran").exists()


OTHER_LOOK = {
    "dqn_clip_cartpole": ("COLORS", ((255, 255, 255), (101, 152, 202), (129, 132, 203))),
    "sac_clip_mountaincar": ("CAR", {"realistic": sac_clip_mountaincar.CAR["original"]}),
    "sac_clip_humanoid": ("COLORS", dict.fromkeys(sac_clip_humanoid.COLORS, "#20e020")),
}


@pytest.mark.parametrize("changed", ["rendering", "weights"])
def test_a_run_goes_on_with_no_other_reward(changed, copied, monkeypatch):
    script, run_dir = copied
    make_reward = SCRIPTS[script].make_reward

    def other_weights(*arguments):
        reward_model = make_reward(*arguments)
        for weight in reward_model.model.visual.parameters():
            weight.mul_(1.1)
        return reward_model

    look = {"rendering": OTHER_LOOK[script], "weights": ("make_reward", other_weights)}[changed]
    monkeypatch.setattr(SCRIPTS[script], *look)
    with pytest.raises(UsageError, match="began with another reward"):
        train(script, "--resume", run_dir)


# ---- Other rewards


@pytest.mark.slow("mountaincar")
@pytest.mark.parametrize("script", ["dqn_clip_cartpole", "sac_clip_mountaincar"])
def test_ground_truth_reward_is_what_the_flag_trains_on(script, tmp_path, monkeypatch):
    """CartPole's is standardized where it is learned from."""
    module, learned = SCRIPTS[script], []
    sample = module.sample
    monkeypatch.setattr(module, "sample", lambda *given: learned.append(given[0][2]) or sample(*given))
    words = "--total-timesteps 300 --episode-length 40 --reward ground-truth".split()
    run_dir = train(script, *SHORT, *words, "--run-dir", tmp_path / "run")
    states, _, rewards = map(torch.stack, zip(*rounds(run_dir).values()))
    truth = module.ground_truth_reward(states[:, 1:].flatten(0, 2))
    assert torch.equal(rewards.flatten(), truth) and (
        script == "sac_clip_mountaincar" or 0 < truth.mean() < 1
    )
    if script == "dqn_clip_cartpole":
        assert learned[-1].mean().abs() < 1e-5 and learned[-1].std().item() == pytest.approx(1, abs=0.01)
    train(script, "--resume", run_dir)


@pytest.mark.slow
def test_the_robots_ground_truth_is_the_condition_of_its_task(tmp_path):
    words = "--reward ground-truth --task standing-up --episode-length 40 --total-timesteps 300".split()
    run_dir = train("sac_clip_humanoid", *SHORT, *words, "--run-dir", tmp_path / "run")
    states, _, rewards = map(torch.stack, zip(*rounds(run_dir).values()))
    poses = states[:, 1:, :, : sac_clip_humanoid.POSE_SIZE].flatten(0, 2)
    _, points = Scene(8, 8, "original", "fixed", 1, len(poses), CPU).render(poses)
    assert torch.equal(rewards.flatten(), sac_clip_humanoid.standing_up(points).float())
    assert 0 < rewards.mean() < 1
    best = torch.load(run_dir / "best.pt", weights_only=True)
    assert 0 <= best["best_return"] <= 40  # a count of steps, as CLIP's rewards are not
    train("sac_clip_humanoid", "--resume", run_dir)


@pytest.mark.parametrize("how", [{"temperature": 0.3}, {"threshold": 0.5}])
def test_negative_prompts_make_the_reward_contrastive(how, tmp_path):
    negatives = ["a pole leaning to the side", "a cart in the corner"]
    words = ["--total-timesteps=90", *(f"--{name}={value}" for name, value in how.items())]
    words += ["--negative-prompt", *negatives, "--run-dir", tmp_path / "run"]
    run_dir = train("dqn_clip_cartpole", *SHORT, *words)
    states, _, rewards = map(torch.stack, zip(*rounds(run_dir).values()))
    reward = CLIPReward("tiny", dqn_clip_cartpole.Args().prompt, negative_prompts=negatives, **how)
    expected = reward(render_cart(states[:, 1:].flatten(0, 2)))
    torch.testing.assert_close(rewards.flatten(), expected, atol=1e-4, rtol=0)
    train("dqn_clip_cartpole", "--resume", run_dir)  # brings the negatives along
