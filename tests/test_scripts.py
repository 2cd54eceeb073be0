"""What the scripts share, its parts and each script as a user runs it: bad input, kill -9, Ctrl-C, evaluation, success."""

import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import av
import open_clip
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import dqn_clip_cartpole
import sac_clip_humanoid
import sac_clip_mountaincar
from clip_reward import CLIPReward, native_precision

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
SCRIPTS = {
    "dqn_clip_cartpole": dqn_clip_cartpole,
    "sac_clip_mountaincar": sac_clip_mountaincar,
    "sac_clip_humanoid": sac_clip_humanoid,
}
POLICY = {"dqn_clip_cartpole": "q_network", "sac_clip_mountaincar": "actor", "sac_clip_humanoid": "actor"}
DRAW = {
    "dqn_clip_cartpole": lambda states: dqn_clip_cartpole.draw(states, 64, 64),
    "sac_clip_mountaincar": lambda states: sac_clip_mountaincar.draw(states, 64, 64, "realistic"),
    "sac_clip_humanoid": lambda states: sac_clip_humanoid.Scene(64, 64, "realistic", "fixed", 1, 256, CPU).draw(states)[0],
}
ENVS = {
    "dqn_clip_cartpole": lambda num_envs, length: dqn_clip_cartpole.CartPole(num_envs, length, CPU),
    "sac_clip_mountaincar": lambda num_envs, length: sac_clip_mountaincar.MountainCar(num_envs, length, CPU),
    "sac_clip_humanoid": lambda num_envs, length: sac_clip_humanoid.Humanoid(num_envs, length, 2),
}
FORCE = {"dqn_clip_cartpole": 1, "sac_clip_mountaincar": 1, "sac_clip_humanoid": 0.4}  # of an environment's action 1
PLAYERS = {  # what acts, with new weights
    "dqn_clip_cartpole": lambda: [dqn_clip_cartpole.QNetwork()],
    "sac_clip_mountaincar": lambda: [sac_clip_mountaincar.Actor()],
    "sac_clip_humanoid": lambda: [sac_clip_humanoid.Actor(), torch.nn.Identity()],
}
SHORT = dict.fromkeys(
    SCRIPTS,
    "--total-timesteps 6000 --num-envs 4 --episode-length 30 --learning-starts 300 --checkpoint-every 240 --buffer-size 1000 "
    "--gradient-steps 10 --episodes 5 --seed 3 --device cpu --clip-model tiny",
)


def start(script: str, *arguments, folder: Path, **env: str) -> subprocess.Popen:
    command = [sys.executable, ROOT / f"{script}.py", *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=os.environ | env, stdout=pipe, stderr=pipe, text=True)


def run(script: str, *arguments, folder: Path, **env: str) -> str:
    process = start(script, *arguments, folder=folder, **env)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return out


def result(run_dir: Path) -> dict:
    figures = json.loads((run_dir / "result.json").read_text())
    assert figures.pop("steps_per_second") > 0
    figures["settings"].pop("run_dir")
    return figures


def states_of(script: str, n: int) -> torch.Tensor:
    """n states from all over."""
    rng = torch.Generator().manual_seed(0)
    if script == "sac_clip_humanoid":  # whatever it falls into
        envs = ENVS[script](-(-n // 20), 100)
        envs.reset(seed=0)
        states = [envs.step(torch.rand(envs.num_envs, 17, generator=rng) * 0.8 - 0.4)[4]["states"] for _ in range(100)]
        return torch.cat(states[4::5])[:n]
    states, uniform = torch.zeros(n, 4 if script == "dqn_clip_cartpole" else 2), torch.rand(2, n, generator=rng) * 2 - 1
    states[:, 0] = uniform[0] * 2.4 if script == "dqn_clip_cartpole" else uniform[0] * 0.9 - 0.3
    if script == "dqn_clip_cartpole":
        states[:, 2] = uniform[1] * torch.pi
    return states


@pytest.fixture
def one_thread():
    """Inside PyTorch's operations, as in the scripts."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def train(one_thread, monkeypatch):
    """A function that runs a script in this process, without pictures -> the checkpoint in the run folder, its last argument."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def train(script: str, *arguments) -> dict:
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *map(str, arguments)])
        monkeypatch.setattr(SCRIPTS[script], "picture", lambda *_: Image.new("RGB", (8, 8)))
        monkeypatch.setattr(SCRIPTS[script], "write_video", lambda *_: None)
        SCRIPTS[script].main()
        return torch.load(arguments[-1] / "checkpoint.pt", weights_only=True)

    yield train
    for number, handler in handlers.items():
        signal.signal(number, handler)


# ---- The parts that all scripts have


def transitions(rb, numbers: torch.Tensor) -> list[torch.Tensor]:
    """For each n: observation n, next observation n + 0.5, action n % 2, reward 10 n."""
    values = {"obs": numbers, "next_obs": numbers + 0.5, "actions": numbers % 2, "rewards": 10 * numbers, "states": -numbers}
    fields = [(getattr(rb, name), values[name]) for name in rb.FIELDS]
    return [value.to(f.dtype).view(-1, *[1] * (f.ndim - 1)).expand(-1, *f.shape[1:]) for f, value in fields]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("sizes", [[3] * 9, [4, 4, 7, 9, 0, 5], [10, 10, 1, 10], [1, 10, 9]])
def test_replay_buffer_wraps_around_keeps_the_newest_and_its_state_goes_round(script, sizes):
    rb, rng, total = SCRIPTS[script].ReplayBuffer(10, CPU), torch.Generator(), 0
    for size in sizes:
        rb.add(*transitions(rb, torch.arange(total, total + size)))
        total += size
        sampled = rb.sample(2000, rng.manual_seed(total))
        numbers = sampled[0].flatten(1)[:, 0].long()
        newest = list(range(max(total - 10, 0), total))
        assert sorted(set(numbers.tolist())) == newest and rb.size == len(newest)
        assert all(torch.equal(a, b) for a, b in zip(sampled, transitions(rb, numbers)))
        assert torch.bincount(numbers)[newest].min() > 0.7 * 2000 / len(newest)  # uniform
        file, loaded = io.BytesIO(), SCRIPTS[script].ReplayBuffer(10, CPU)
        torch.save(rb.state_dict(), file)
        file.seek(0)
        loaded.load_state_dict(torch.load(file, weights_only=True))
        assert all(torch.equal(a, b) for a, b in zip(sampled, loaded.sample(2000, rng.manual_seed(total))))
        rb = loaded  # it is the one that goes on


class AtLast(ThreadPoolExecutor):
    """Does nothing before somebody asks for it: all threads are busy, and a round is only played when the learning is over."""

    def submit(self, work, *arguments) -> Future:
        task = Task()
        task.work = lambda: work(*arguments)
        return task


class AtOnce(AtLast):
    """Does all at once: what the learning finds, a round has been played, and labelled, before it begins."""

    def submit(self, work, *arguments) -> Future:
        task = super().submit(work, *arguments)
        task.result()
        return task


class Task(Future):
    def result(self, timeout=None):
        if not self.done():
            self.set_result(self.work())
        return super().result(timeout)


def make_labeller(script: str, monkeypatch, batch_size: int, reward_model=None):
    monkeypatch.setattr(SCRIPTS[script], "THREADS", 4)  # a pool of three, and the one that asks
    reward_model = reward_model or CLIPReward("tiny", "a scene", precision=native_precision("cpu"))
    args = SCRIPTS[script].Args(clip_batch_size=batch_size)
    return SCRIPTS[script].Labeller(reward_model, args, ThreadPoolExecutor(1))


@pytest.mark.parametrize("script", SCRIPTS)
def test_labels_come_in_the_order_of_submission_and_are_the_same_whoever_makes_them(script, one_thread, monkeypatch):
    labeller, states, makers = make_labeller(script, monkeypatch, 4), states_of(script, 40)[10:36], []
    expected = torch.cat([labeller.reward_model(DRAW[script](batch)) for batch in states.split(4)])
    assert len(expected.unique()) > 20
    label, asking = labeller.label, threading.get_ident()
    monkeypatch.setattr(labeller, "label", lambda batch: makers.append(threading.get_ident()) or label(batch))

    def submit(sizes: list[int]) -> None:
        for part in states.split([*sizes, 26 - sum(sizes)]):
            labeller.submit(part)

    def check(n: int = 26) -> None:
        assert torch.equal(labeller.result()[0], expected[:n])
        assert labeller.result()[0].shape == (0,)  # nothing was submitted since
        makers.clear()

    for workers in (1, 2, 3):
        with ThreadPoolExecutor(workers) as labeller.pool:
            for sizes in ([], [4] * 6, [1] * 25, [3, 0, 5, 4, 13], [8, 8, 8]):
                submit(sizes)
                check()
            for part in states[:24].split(12):  # nothing is left over at the end
                labeller.submit(part)
            check(24)
            for _ in range(3):  # rounds one after the other
                submit([7])
                assert torch.equal(labeller.result()[0], expected)
            free = threading.Event()
            busy = [labeller.pool.submit(free.wait) for _ in range(workers)]
            submit([5, 5])
            makers.clear()
            assert torch.equal(labeller.result()[0], expected) and set(makers) == {asking} and len(makers) == 7
            free.set()
            assert all(task.result() for task in busy)
    with ThreadPoolExecutor(1) as labeller.pool:
        submit([9])
        labeller.pool.submit(int).result()  # it has begun, so that all before it are done
        assert len(makers) == 6 + 7 and asking not in makers[7:]
        check()


@pytest.mark.parametrize("maker", ["worker", "asking"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_label_that_fails_is_an_error_and_no_wait(script, maker, monkeypatch):
    """One batch of five fails, or all do, in a thread of the pool or in the one that asks."""
    for failing in ([2], range(5)):
        count = iter(range(5))

        def reward_model(frames: torch.Tensor, count=count, failing=failing) -> torch.Tensor:
            return torch.ones(len(frames)) / (next(count) not in failing or 1 // 0)

        reward_model.size, reward_model.device = (16, 16), CPU
        labeller = make_labeller(script, monkeypatch, 2, reward_model)
        labeller.pool = AtLast() if maker == "asking" else ThreadPoolExecutor(1)
        labeller.submit(states_of(script, 20)[:9])
        if maker == "worker":
            labeller.pool.submit(int).result(timeout=60)  # it has begun, so that all before it are done
        with pytest.raises(ZeroDivisionError):
            ThreadPoolExecutor(1).submit(labeller.result).result(timeout=60)


@pytest.mark.parametrize("script", SCRIPTS)
def test_half_precision_ranks_frames_as_single_precision_does(script, one_thread):
    args, frames = SCRIPTS[script].Args(), DRAW[script](states_of(script, 500))
    prompts = args.prompt or "a humanoid robot kneeling", args.baseline_prompt, args.goal_baseline_alpha
    rewards = [CLIPReward("tiny", *prompts, precision=precision)(frames) for precision in ("fp32", "bf16")]
    assert rewards[0].std() > 0.05 and not torch.equal(*rewards)
    ranks = torch.stack([reward.argsort().argsort().double() for reward in rewards])
    assert torch.corrcoef(ranks)[0, 1] >= 0.999


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_rollout_is_its_seeds_and_its_policys_alone(script):
    args, players = SCRIPTS[script].Args(num_envs=3, episode_length=20, learning_starts=500_000), []
    for seed in (0, 1):
        torch.manual_seed(seed)
        players.append(PLAYERS[script]())

    def play(player: list, step: int, seed: int = 2) -> list[torch.Tensor]:
        envs, heard = ENVS[script](3, 20), []
        envs.reset(seed=1)
        rng = torch.Generator().manual_seed(seed)
        obs, actions, last, _ = SCRIPTS[script].act(*player, envs, SimpleNamespace(submit=heard.append), rng, step, args)
        assert len(obs) == 21 and len(actions) == len(heard) == 20 and not actions.requires_grad
        assert torch.equal(torch.stack(heard), last if script == "sac_clip_humanoid" else obs[1:])
        return [obs, actions, last]

    def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
        return all(torch.equal(x, y) for x, y in zip(a, b))

    one, other = players
    assert same(play(one, 1_000_000), play(one, 1_000_000)) and not same(play(one, 1_000_000), play(other, 1_000_000))
    assert same(play(one, 0), play(other, 0)) and not same(play(one, 0), play(one, 0, seed=3))  # random actions
    assert not same(play(one, 0), play(one, 1_000_000))
    random, mixed = play(one, 0)[1], play(one, 500_000 - 3 * 10)[1]  # the policy takes over half way
    assert torch.equal(mixed[:10], random[:10]) and not torch.equal(mixed[10:], random[10:])


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_learning_and_the_round_played_meanwhile_see_nothing_of_each_other(script, train, tmp_path, monkeypatch):
    """Whether a round is played before, after or during the learning: it is the policy's from before, and is not learned from yet."""
    module = SCRIPTS[script]
    buffer, act = module.ReplayBuffer, module.act
    options = "--num-envs 4 --episode-length 20 --total-timesteps 400 --learning-starts 160 --gradient-steps 15 --episodes 2"
    options += " --learning-rate 0.01 --device cpu --clip-model tiny --clip-batch-size 32 --batch-size 64 --run-dir"
    played, rounds, sampled = [], [], []

    class Spy(buffer):
        def add(self, *values):
            super().add(*values)
            rounds.append(values)

        def sample(self, *arguments):
            assert self.size == 80 * len(rounds)
            for name, *values in zip(self.FIELDS, *rounds):
                assert torch.equal(getattr(self, name)[: self.size], torch.cat(values))
            sampled.append((len(rounds), len(played)))
            return super().sample(*arguments)

    monkeypatch.setattr(module, "ReplayBuffer", Spy)
    monkeypatch.setattr(module, "act", lambda *arguments: (act(*arguments), played.append(1))[0])
    for pool, ahead in ((AtOnce, {1}), (AtLast, {0}), (ThreadPoolExecutor, {0, 1})):
        for log in (played, rounds, sampled):
            log.clear()
        monkeypatch.setattr(module, "ThreadPoolExecutor", pool)
        train(script, *options.split(), tmp_path / pool.__name__)
        assert [k for k, _ in sampled] == [k for k in (2, 3, 4) for _ in range(15)] and len(rounds) == len(played) == 5
        assert {there - k for k, there in sampled} <= ahead
        same_run(script, tmp_path / "AtOnce", tmp_path / pool.__name__)


# ---- Each script as a user runs it


@pytest.fixture(scope="module", params=SCRIPTS)
def unbroken(request, tmp_path_factory) -> tuple[str, Path]:
    """A short run that nothing disturbed -> script, run folder."""
    folder = tmp_path_factory.mktemp("unbroken")
    out = run(request.param, *SHORT[request.param].split(), "--run-dir", folder / "run", folder=folder, OMP_NUM_THREADS="2")
    first, *_ = out.splitlines()
    assert first.startswith("CLIP model tiny (") and first.endswith(f") in {native_precision('cpu')} on cpu")
    assert "trained on these very scenes" in first and "no evidence of zero-shot" in first
    for name in ("success rate", "clip return", "ground truth return", "steps per second"):
        assert re.search(rf"{name} +-?\d", out)
    return request.param, folder / "run"


def test_a_run_leaves_what_it_promises(unbroken):
    _, run_dir = unbroken
    figures = result(run_dir)
    assert {"success_rate", "clip_return", "ground_truth_return", "settings", "versions"} <= set(figures)
    assert figures["settings"]["seed"] == 3 and figures["versions"]["torch"] == version("torch")
    assert figures["settings"]["precision"] == native_precision("cpu")
    for name in ("checkpoint.pt", "best.pt"):
        torch.load(run_dir / name, weights_only=True)
    assert not list(run_dir.glob("*tmp*"))

    with av.open(str(run_dir / "result.mp4")) as video:
        assert video.streams.video[0].codec_context.name == "h264" and video.streams.video[0].format.name == "yuv420p"
        frames = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
    assert len(frames) == 3 * figures["settings"]["episode_length"]
    assert abs(frames[0].astype(int) - frames[25]).max() > 50  # something moves

    events = EventAccumulator(str(run_dir), {"images": 0, "scalars": 0}).Reload()
    scalars = set(events.Tags()["scalars"])
    assert {"charts/clip_return", "charts/ground_truth_return", "charts/success_rate", "charts/SPS"} <= scalars
    assert {f"seconds_per_round/{phase}" for phase in ("simulate", "draw", "clip", "update")} <= scalars
    assert any(name.startswith("losses/") for name in scalars)
    assert [event.step for event in events.Images("frames")] == [120, 3000, 6000]
    assert "hyperparameters/text_summary" in events.Tags()["tensors"]
    best = max(event.value for event in events.Scalars("charts/clip_return") if event.step > 420)  # not of random actions
    assert torch.load(run_dir / "checkpoint.pt", weights_only=True)["best_return"] == pytest.approx(best, rel=1e-6)


def test_the_buffer_holds_the_last_rounds_and_clips_rewards_of_the_states_after_the_steps(unbroken, one_thread):
    """The run's 50 rounds of 4 · 30 steps, played again with its actions: the buffer's 1000 places hold the last eight, and a bit."""
    script, run_dir = unbroken
    checkpoint = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    settings, rb = checkpoint["settings"], checkpoint["rb"]
    prompts = settings["prompt"], settings["baseline_prompt"], settings["goal_baseline_alpha"]
    reward_model = CLIPReward("tiny", *prompts, batch_size=120, precision=settings["precision"])
    assert rb["size"] == 1000 and rb["pos"] == 0
    envs, states = ENVS[script](4, 30), []
    envs.reset(seed=30_000 if script == "sac_clip_humanoid" else 3)
    for number in range(50):
        obs, _ = envs.reset()
        for i in torch.arange(40 + 120 * (number - 42), 160 + 120 * (number - 42)).split(4) if number >= 42 else ():
            assert torch.equal(rb["obs"][i], obs)
            obs, _, _, _, infos = envs.step(FORCE[script] * rb["actions"][i])
            assert torch.equal(rb["next_obs"][i], obs)
            assert torch.equal(rb.get("states", rb["next_obs"])[i], infos.get("states", obs))
            states.append(infos.get("states", obs))
    states, rewards = torch.cat(states), rb["rewards"][40:]
    assert len(states) == len(rewards) == 960 and rb["rewards"].isfinite().all()
    torch.testing.assert_close(rewards, reward_model(DRAW[script](states)), atol=1e-5, rtol=0)
    before = states[:-4]  # each environment's states one step earlier
    assert (reward_model(DRAW[script](before)) - rewards[4:]).abs().max() > 0.01


@pytest.mark.parametrize("script", ["dqn_clip_cartpole", "sac_clip_mountaincar"])
def test_ground_truth_reward_is_what_the_flag_trains_on(script, tmp_path):
    options = "--reward ground-truth --total-timesteps 3200 --num-envs 16 --episode-length 200 --episodes 2 --device cpu"
    out = run(script, *options.split(), "--run-dir", "run", folder=tmp_path)
    rb = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["rb"]
    assert torch.equal(rb["rewards"], SCRIPTS[script].ground_truth_reward(rb["next_obs"])) and rb["rewards"].sum() > 0
    assert "clip return" in out  # still logged, for comparison


@pytest.mark.parametrize("script, threshold", [*((script, None) for script in SCRIPTS), ("dqn_clip_cartpole", 0.5)])
def test_contrastive_reward_is_what_the_flag_trains_on(script, threshold, train, one_thread, tmp_path):
    options = "--reward contrastive --total-timesteps 240 --num-envs 4 --episode-length 30 --episodes 2 --device cpu"
    options += " --gradient-steps 1 --learning-starts 120 --clip-model tiny"
    temperature = 0.3 if threshold is None else None  # with the model's own the car's start is worth 0.00
    options += f" --temperature {temperature}" if threshold is None else f" --threshold {threshold}"
    checkpoint = train(script, *options.split(), "--run-dir", tmp_path / "run")
    settings, rb = checkpoint["settings"], checkpoint["rb"]
    assert len(settings["negative_prompt"]) == (7 if script == "sac_clip_humanoid" else 2)
    assert settings["prompt"][0] not in settings["negative_prompt"]
    model = CLIPReward(
        *("tiny", settings["prompt"]),
        **{"precision": settings["precision"], "negative_prompts": settings["negative_prompt"], "temperature": temperature},
    )
    p = model(DRAW[script](rb.get("states", rb["next_obs"])))
    if threshold is None:
        torch.testing.assert_close(rb["rewards"], p, atol=1e-3, rtol=0)
        assert rb["rewards"].std() > 3e-3 and 0 <= rb["rewards"].min() and rb["rewards"].max() <= 1
    else:
        clear = (p - threshold).abs() > 1e-3
        assert torch.equal(rb["rewards"][clear], (p > threshold).float()[clear]) and 0 < rb["rewards"].mean() < 1
    train(script, "--resume", tmp_path / "run")  # brings the negatives along


@pytest.mark.parametrize("learning_starts", [100_000, 0])
def test_mountaincar_explores_with_correlated_noise(learning_starts, tmp_path):
    """The first round: random actions are uniform in [-1, 1], and theirs and the policy's are alike from step to step."""
    options = f"--total-timesteps 16000 --num-envs 80 --learning-starts {learning_starts} --gradient-steps 1 --episodes 1"
    run("sac_clip_mountaincar", *options.split(), "--device", "cpu", "--run-dir", "run", folder=tmp_path)
    rb = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["rb"]
    actions = rb["actions"].view(200, 80).double()
    if learning_starts:
        assert 0.02 < (rb["next_obs"][-80:, 0] >= 0.45).float().mean() < 0.25  # now and then the car gets there by chance
        assert (torch.histc(actions, 10, -1, 1) / actions.numel() - 0.1).abs().max() < 0.02
        normal = torch.erfinv(actions.clamp(-0.999999, 0.999999)) * 2**0.5
    else:
        normal = actions.atanh()
        normal = (normal - normal.mean()) / normal.std()
    for lag in (1, 10, 30):
        assert (normal[:-lag] * normal[lag:]).mean().item() == pytest.approx(0.917**lag, abs=0.08)
    assert (torch.corrcoef(normal.T).sum() - 80).abs() / (80 * 79) < 0.05  # one environment's noise is not another's


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    for script in SCRIPTS.values():
        script.save(tmp_path / "checkpoint.pt", {"step": 1})
        with pytest.raises(Exception, match="pickle"):
            script.save(tmp_path / "checkpoint.pt", {"step": 2, "bad": lambda: None})
        assert torch.load(tmp_path / "checkpoint.pt", weights_only=True) == {"step": 1}


def test_killed_at_any_moment_and_resumed_is_the_unbroken_run(unbroken, tmp_path):
    script, whole = unbroken
    process = start(script, *SHORT[script].split(), "--run-dir", tmp_path / "run", folder=tmp_path)
    checkpoint = tmp_path / "run" / "checkpoint.pt"
    killed_at = []
    for life in range(3):
        seen = 0
        while seen < 3 + 5 * life:  # kill soon after so many checkpoints of this life, wherever the run is by then
            before = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
            while not checkpoint.exists() or checkpoint.stat().st_mtime_ns == before:
                assert process.poll() is None, process.communicate()
                time.sleep(0.001)
            seen += 1
        time.sleep(0.02 * life)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        killed_at.append(torch.load(checkpoint, weights_only=True)["global_step"])
        process = start(script, "--resume", tmp_path / "run", folder=tmp_path)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert 0 < killed_at[0] < killed_at[1] < killed_at[2] < 6000
    assert result(tmp_path / "run") == result(whole)
    a, b = (torch.load(folder / "checkpoint.pt", weights_only=True) for folder in (whole, tmp_path / "run"))
    assert all(torch.equal(weight, b[POLICY[script]][name]) for name, weight in a[POLICY[script]].items())
    assert all(torch.equal(a["rb"][name], b["rb"][name]) for name in ("obs", "next_obs", "actions", "rewards"))
    curves = []
    for folder in (whole, tmp_path / "run"):  # the curves, too, are those of the unbroken run: nothing twice, nothing missing
        events = EventAccumulator(str(folder), {"scalars": 0}).Reload()
        curves.append([(event.step, event.value) for event in events.Scalars("charts/clip_return")])
    assert curves[0] == curves[1] and len(curves[0]) == 50


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_saves_says_how_to_go_on_and_goes_on(unbroken, tmp_path, number):
    script, whole = unbroken
    options = SHORT[script].replace("--checkpoint-every 240", "--checkpoint-every 1000000").split()
    process = start(script, *options, "--run-dir", "run", folder=tmp_path)
    while not (tmp_path / "run" / "best.pt").exists():  # the end of the first round
        time.sleep(0.002)
        assert process.poll() is None, process.communicate()
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number and "Traceback" not in err
    assert f"python {script}.py --resume run" in out
    saved = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert 0 < saved["global_step"] < 6000
    if number == signal.SIGINT:
        run(script, "--resume", "run", folder=tmp_path)
        again, once = result(tmp_path / "run"), result(whole)
        assert {k: again[k] for k in once if k != "settings"} == {k: once[k] for k in once if k != "settings"}


def test_evaluate_a_checkpoint(unbroken, tmp_path):
    script, run_dir = unbroken
    before = {path: path.stat().st_mtime_ns for path in run_dir.iterdir()}
    out = run(script, "--evaluate", run_dir / "best.pt", "--episodes", 5, "--device", "cpu", folder=tmp_path)
    figures = json.loads((run_dir / "best_evaluation.json").read_text())
    for name in ("success_rate", "clip_return", "ground_truth_return"):
        assert figures[name] == result(run_dir)[name]
    assert "success rate" in out and (run_dir / "best_evaluation.mp4").stat().st_size > 1000
    assert {path: path.stat().st_mtime_ns for path in before} == before
    run(
        script, "--evaluate", run_dir / "checkpoint.pt", "--episodes", 100, "--seed", 1, folder=tmp_path
    )  # the flags' defaults
    settings = json.loads((run_dir / "checkpoint_evaluation.json").read_text())["settings"]
    assert settings["episodes"] == 100 and settings["seed"] == 1 and settings["num_envs"] == 4
    assert settings["run_dir"] == str(run_dir)
    assert not list(tmp_path.iterdir())


def test_evaluate_plays_the_policy_that_acts(unbroken, monkeypatch):
    script, run_dir = unbroken
    played, threads = [], torch.get_num_threads()
    monkeypatch.setattr(SCRIPTS[script], "evaluate", lambda policy, *_: played.append(policy.state_dict()) or sys.exit())
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--evaluate", str(run_dir / "checkpoint.pt"), "--device", "cpu"])
    with pytest.raises(SystemExit):
        SCRIPTS[script].main()
    torch.set_num_threads(threads)
    checkpoint = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    acts = checkpoint.get("mean_actor", checkpoint[POLICY[script]])
    assert all(torch.equal(weight, acts[name]) for name, weight in played[0].items())
    if script == "sac_clip_humanoid":  # there it is the running mean of the weights
        assert not any(torch.equal(weight, checkpoint["actor"][name]) for name, weight in acts.items())


def test_second_ctrl_c_stops_at_once(tmp_path):
    """In the middle of a round that would take minutes: no thread finishes it first, and nothing is lost but that round."""
    long = "--num-envs 64 --episode-length 100000 --episodes 1 --device cpu --clip-model tiny --total-timesteps 6400000"
    processes = {script: start(script, *long.split(), "--run-dir", script, folder=tmp_path) for script in SCRIPTS}
    try:
        for script, process in processes.items():
            for number, awaited in enumerate(("train:", "finishing this round first")):
                read = ""
                while awaited not in read:
                    read += process.stderr.read(1)
                    assert process.poll() is None, read
                time.sleep(1 - number)
                process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
            assert process.returncode == 130 and "Traceback" not in err
            assert "goes on from its last checkpoint with --resume" in err
            assert f"run folder {script}" in out  # all that was said reached the pipe
            assert torch.load(tmp_path / script / "checkpoint.pt", weights_only=True)["global_step"] == 0
    finally:
        for process in processes.values():
            process.kill()


def test_any_number_of_cores_gives_the_same_run(unbroken, tmp_path):
    script, two = unbroken
    run(script, *SHORT[script].split(), "--run-dir", "run", folder=tmp_path, OMP_NUM_THREADS="1")
    same_run(script, two, tmp_path / "run")


def same_run(script: str, a: Path, b: Path) -> None:
    """Nothing that two runs left differs: what came out, the best policy, the last one, and all that it learned from."""
    assert result(a) == result(b)
    best, last = ([torch.load(folder / name, weights_only=True) for folder in (a, b)] for name in ("best.pt", "checkpoint.pt"))
    for one, other in (best, last):
        assert one["global_step"] == other["global_step"]
        assert all(torch.equal(weight, other[POLICY[script]][name]) for name, weight in one[POLICY[script]].items())
    one, other = last
    assert all(torch.equal(one["rb"][name], other["rb"][name]) for name in ("obs", "next_obs", "actions", "rewards"))
    assert one["rngs"].keys() == other["rngs"].keys() >= {"act", "sample"}
    assert all(torch.equal(state, other["rngs"][name]) for name, state in one["rngs"].items())


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_last_policy_becomes_the_best_if_it_earns_more(script, train, tmp_path, monkeypatch, capsys):
    module, run_dir = SCRIPTS[script], tmp_path / "run"
    seed = 2 if script == "sac_clip_humanoid" else 7  # the last policy comes out as neither the best of all nor the worst
    options = (
        f"--seed {seed} --num-envs 4 --episode-length 40 --learning-starts 160 --gradient-steps 1 --batch-size 16 --episodes 4"
    )
    options += " --total-timesteps 320 --device cpu --clip-model tiny --precision fp32"
    options += " --no-normalize-obs" if script == "sac_clip_humanoid" else ""
    checkpoint = train(script, *options.split(), "--run-dir", run_dir)
    assert capsys.readouterr().out.splitlines()[0].endswith(") in fp32 on cpu")
    best = torch.load(run_dir / "best.pt", weights_only=True)
    last = checkpoint.get("mean_actor", checkpoint[POLICY[script]])
    args = module.Args(**best["settings"])
    reward_model = CLIPReward("tiny", args.prompt, args.baseline_prompt, args.goal_baseline_alpha, CPU, args.clip_batch_size)
    labeller, player = module.Labeller(reward_model, args, ThreadPoolExecutor(1)), PLAYERS[script]()

    def clip_return(weights: dict) -> float:
        player[0].load_state_dict(weights)
        return module.evaluate(*player, labeller, args)[0]["clip_return"]

    torch.manual_seed(0)
    others = []
    for k in range(20):  # with new weights, every second one heavily biased
        weights = PLAYERS[script]()[0].state_dict()
        bias = list(weights)[-1]
        others.append(weights | {bias: 3 * (k % 2) * torch.randn(weights[bias].shape)})
    returns = [clip_return(other) for other in others]
    worst, top = (others[returns.index(choose(returns))] for choose in (min, max))
    assert min(returns) < clip_return(last) - 1e-3 and clip_return(last) < max(returns) - 1e-3
    seeds, reset = [], type(ENVS[script](1, 1)).reset
    monkeypatch.setattr(type(ENVS[script](1, 1)), "reset", lambda envs, seed=None: seeds.append(seed) or reset(envs, seed))
    for other, step, winner in ((worst, 320, last), (top, 160, top)):
        torch.save(best | {POLICY[script]: other, "global_step": 160}, run_dir / "best.pt")
        train(script, "--resume", run_dir)
        found = torch.load(run_dir / "best.pt", weights_only=True)
        assert found["global_step"] == step and found["settings"] == best["settings"]
        assert all(torch.equal(found[POLICY[script]][name], weight) for name, weight in winner.items())
        assert result(run_dir)["clip_return"] == pytest.approx(clip_return(winner), abs=1e-4)
        assert seeds == [
            seed * (10_000 if script == "sac_clip_humanoid" else 1),
            *[(seed + 1) * 1_000_000] * 3,
        ]  # the run's; those of both evaluations; and just now
        seeds.clear()


BAD = [
    ("--clip-model ViT-B-23/openai", "did you mean ViT-B-32"),
    ("--clip-model ViT-B-32//no/such/weights.pt", "no weights file"),
    ("--clip-model local-dir:/no/such", "no CLIP model in"),
    ("--goal-baseline-alpha 1.5", "--goal-baseline-alpha must lie between 0 and 1, not 1.5"),
    ("--goal-baseline-alpha -0.1", "between 0 and 1"),
    ("--goal-baseline-alpha x", "x"),
    ("--prompt", "prompt is empty"),
    ("--prompt ''", "prompt is empty"),
    ("--baseline-prompt ' '", "prompt is empty"),
    ("--prompt '" + "upright " * 40 + "'", "too long for this model"),
    ("--device cuda", "no device cuda"),
    ("--device toaster", "no device toaster"),
    ("--num-envs 0", "--num-envs must be at least 1"),
    ("--total-timesteps -5", "--total-timesteps must be at least 1"),
    ("--episodes 0", "--episodes must be at least 1"),
    ("--clip-batch-size 0", "--clip-batch-size must be at least 1"),
    ("--learning-rate 2", "--learning-rate must lie between 0 and 1"),
    ("--learning-starts -1", "--learning-starts must be at least 0"),
    ("--gamma 1.5", "--gamma must lie between 0 and 1"),
    ("--run-dir FILE/run", "cannot write to FILE/run"),
    ("--run-dir .", "exists"),
    ("--resume no/such/run", "there is no checkpoint"),
    ("--evaluate no/such/best.pt", "there is no checkpoint"),
    ("--evaluate RUN", "give the best.pt in it"),
    ("--evaluate FILE", "is not a checkpoint of"),
    ("--evaluate FOREIGN", "is not a checkpoint of"),
    ("--resume . --evaluate FILE", "give one of the two"),
    ("--resume RUN --seed 5", "leave out --seed"),
    ("--resume RUN --seed 1", "leave out --seed"),  # the flag's default, but not the run's seed
    ("--resume ONLYBEST", "not a checkpoint of SCRIPT.py that can be resumed"),
    ("--seed 99999999999999999999", "less than 2^40"),
    ("--device meta", "only cpu and cuda"),
    ("--run-dir LOCKED/run", "cannot write to LOCKED/run"),
    ("--evaluate LOCKED/best.pt", "cannot write to LOCKED/best.pt"),
    ("--evaluate RUN/best.pt --prompt x", "leave out --prompt"),
    ("--no-such-flag", "no-such-flag"),
    ("--precision fp64", "fp64"),
    ("--reward contrastive --negative-prompt", "needs a --negative-prompt"),
    ("--reward contrastive --negative-prompt ''", "prompt is empty"),
    ("--reward contrastive --temperature 0", "temperature must be above 0"),
    ("--reward contrastive --threshold 1.5", "--threshold must lie between 0 and 1"),
    ("--threshold 0.5", "--threshold belongs to --reward contrastive"),
    ("--negative-prompt x", "--negative-prompt belongs to --reward contrastive"),
    ("--reward contrastive --goal-baseline-alpha 0.3", "--goal-baseline-alpha does not go with --reward contrastive"),
    ("--reward contrastive --baseline-prompt x", "--baseline-prompt does not go with --reward contrastive"),
    ("--track", "pip install wandb"),
]


@pytest.mark.parametrize("arguments, expected", BAD)
def test_bad_input_is_one_line_and_exit_code_2(arguments, expected, unbroken, tmp_path, monkeypatch, capsys):
    script, run_dir = unbroken
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("a GPU is here: that --device cuda is refused where there is none can only be seen without one")
    (tmp_path / "FILE").write_text("not a checkpoint")
    torch.save({"script": "another", "settings": {}}, tmp_path / "FOREIGN")
    for folder in ("ONLYBEST", "LOCKED"):
        (tmp_path / folder).mkdir()
        shutil.copy(run_dir / "best.pt", tmp_path / folder / ("checkpoint.pt" if folder == "ONLYBEST" else "best.pt"))
    monkeypatch.setattr(os, "access", lambda path, mode: "LOCKED" not in str(path))  # root may write anywhere
    left = sorted(tmp_path.rglob("*"))
    device = [] if "--device" in arguments else ["--device", "cpu"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *shlex.split(arguments.replace("RUN", str(run_dir))), *device])
    monkeypatch.setattr(open_clip, "create_model_from_pretrained", lambda *a, **k: pytest.fail("loaded a model"))
    monkeypatch.setattr(SCRIPTS[script], "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stopped:
        SCRIPTS[script].main()
    out, err = capsys.readouterr()
    assert stopped.value.code == 2 and expected.replace("SCRIPT", script) in err
    if expected not in ("x", "no-such-flag", "fp64"):  # those are tyro's, which frames its errors
        assert out == "" and err.count("\n") == 1 and err.startswith(f"{script}.py: error: ")
    assert sorted(tmp_path.rglob("*")) == left


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_hub_out_of_reach_stops_a_script_the_same_way(script, tmp_path):
    env = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hub")}
    command = [sys.executable, ROOT / f"{script}.py", "--clip-model", "ViT-bigG-14/laion2b_s39b_b160k", "--device", "cpu"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert "cannot fetch ViT-bigG-14/laion2b_s39b_b160k" in done.stderr and not (tmp_path / "runs").exists()


def test_cartpole_learns_from_the_sentence(tmp_path):
    options = "--episodes 50 --seed 1 --device cpu --clip-model tiny --run-dir run"  # a shorter one may drift off the track
    run("dqn_clip_cartpole", *options.split(), folder=tmp_path)
    assert result(tmp_path / "run")["success_rate"] >= 0.95


def test_mountaincar_learns_from_the_sentence(tmp_path):
    options = (
        "--total-timesteps 224000 --learning-rate 1e-3 --episodes 50 --seed 1 --device cpu --clip-model tiny --run-dir run"
    )
    run("sac_clip_mountaincar", *options.split(), folder=tmp_path)
    assert result(tmp_path / "run")["success_rate"] >= 0.95


@pytest.mark.parametrize("script", SCRIPTS)
def test_interrupted_video_leaves_nothing_behind(script, tmp_path, monkeypatch):
    module = SCRIPTS[script]
    states, rewards = torch.zeros(4, 1, module.STATE_SIZE), torch.zeros(4, 1)
    args = {"dqn_clip_cartpole": (), "sac_clip_mountaincar": (module.Args(),), "sac_clip_humanoid": (module.Args(),)}[script]
    module.write_video(tmp_path / "whole.mp4", states, rewards, *args)
    frames = iter([module.ImageDraw.Draw] * 2)  # Ctrl-C in the third frame

    def draw(image):
        try:
            return next(frames)(image)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(module.ImageDraw, "Draw", draw)
    with pytest.raises(KeyboardInterrupt):
        module.write_video(tmp_path / "cut.mp4", states, rewards, *args)
    assert [path.name for path in tmp_path.iterdir()] == ["whole.mp4"]
