"""What the scripts share, its parts and each script as a user runs it: bad input, kill -9, Ctrl-C, evaluation."""

import io
import json
import os
import runpy
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
import open_clip
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import dqn_clip_cartpole
import sac_clip_humanoid
import sac_clip_mountaincar
from clip_reward import CLIPReward, UsageError, native_precision

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
SCRIPTS = {
    "dqn_clip_cartpole": dqn_clip_cartpole,
    "sac_clip_mountaincar": sac_clip_mountaincar,
    "sac_clip_humanoid": sac_clip_humanoid,
}
DRAW = {
    "dqn_clip_cartpole": lambda states: dqn_clip_cartpole.draw(states, 64, 64),
    "sac_clip_mountaincar": lambda states: sac_clip_mountaincar.Scene(64, 64, "realistic", CPU).draw(states),
    "sac_clip_humanoid": lambda states: sac_clip_humanoid.Scene(64, 64, "realistic", "fixed", 1, 256, CPU).draw(
        states[:, :24]
    )[0],
}
ENVS = {
    "dqn_clip_cartpole": lambda n, args: dqn_clip_cartpole.CartPole(n),
    "sac_clip_mountaincar": lambda n, args: sac_clip_mountaincar.MountainCar(n),
    "sac_clip_humanoid": sac_clip_humanoid.make_envs,
}
POLICY = {  # what acts, with new weights
    "dqn_clip_cartpole": lambda args: dqn_clip_cartpole.QNetwork(),
    "sac_clip_mountaincar": lambda args: sac_clip_mountaincar.Actor(),
    "sac_clip_humanoid": lambda args: sac_clip_humanoid.SAC(177, args).policy,
}
SHORT = (
    "--total-timesteps 1440 --num-envs 4 --episode-length 30 --learning-starts 300 --checkpoint-every 240 --buffer-size 1000 "
    "--gradient-steps 10 --episodes 5 --seed 3 --device cpu --clip-model tiny"
).split()


def start(script: str, *arguments, folder: Path, **env: str) -> subprocess.Popen:
    command = [sys.executable, ROOT / f"{script}.py", *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=os.environ | env, stdout=pipe, stderr=pipe, text=True)


def run(script: str, *arguments, folder: Path, **env: str) -> str:
    process = start(script, *arguments, folder=folder, **env)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert not set("\r\x1b") & set(out + err)  # where there is no terminal
    return out


def result(run_dir: Path) -> dict:
    figures = json.loads((run_dir / "result.json").read_text())
    for name in ("run_dir", "resume"):
        figures["settings"].pop(name)
    return figures


def load(path: Path) -> dict:
    return torch.load(path, weights_only=True)


def step_of(run_dir: Path) -> int:
    return load(run_dir / "checkpoint.pt")["progress"][0]


def curve(run_dir: Path) -> list[tuple[int, float]]:
    events = EventAccumulator(str(run_dir), {"scalars": 0}).Reload()
    return [(event.step, event.value) for event in events.Scalars("charts/clip_return")]


def same_run(a: Path, b: Path) -> None:
    """Nothing that two runs left differs: what came out, the best policy, and all that the last one depends on."""
    assert result(a) == result(b) and curve(a) == curve(b)
    for name in ("best.pt", "checkpoint.pt"):
        one, other = load(a / name), load(b / name)
        assert one["progress"] == other["progress"]
        for part in one.keys() - {"script", "settings", "progress"}:
            if not part.endswith("optimizer"):
                assert all(torch.equal(value, other[part][key]) for key, value in one[part].items()), (name, part)


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
        monkeypatch.setattr(SCRIPTS[script], "pictures", lambda states, *_: np.zeros((1, 8, 16, 16, 3), np.uint8))
        SCRIPTS[script].main()
        return load(Path(arguments[-1]) / "checkpoint.pt")

    yield train
    for number, handler in handlers.items():
        signal.signal(number, handler)


# ---- The parts that all scripts have


def make_buffer(script: str, steps: int, num_envs: int, rounds: int):
    args = SCRIPTS[script].Args(
        episode_length=steps, num_envs=num_envs, buffer_size=rounds * steps * num_envs, total_timesteps=10**6
    )
    return SCRIPTS[script].ReplayBuffer(*((177, args) if script == "sac_clip_humanoid" else (args,)))


@pytest.mark.parametrize("script", SCRIPTS)
def test_replay_buffer_keeps_the_newest_rounds_and_pairs_each_state_with_the_next(script):
    """In round k step t of environment n has the state 1000 k + 10 t + n, that number modulo 2 as action, and it by ten as reward."""
    rb = make_buffer(script, 5, 3, 4)
    t, n = torch.arange(6.0)[:, None], torch.arange(3.0)
    sizes = (3000, 1) if script == "sac_clip_humanoid" else (3000,)
    for number in range(7):
        values = 1000 * number + 10 * t + n  # (T + 1, N)
        fill = [values, values[:-1] % 2, 10 * values[:-1]]
        shapes = [rb.states.shape[1:], rb.actions.shape[1:], rb.rewards.shape[1:]]
        fill = [value.view(*value.shape, *[1] * (len(shape) - 2)).expand(shape) for value, shape in zip(fill, shapes)]
        rb.add(number, *fill)
        torch.manual_seed(0)
        obs, next_obs, actions, rewards = rb.sample(*sizes, number + 1)
        rewards = rewards[0] if rewards.dim() == 2 else rewards  # the humanoid's: one step's only
        kept = [
            10.0 * (1000 * k + 10 * a + b) for k in range(max(0, number - 3), number + 1) for a in range(5) for b in range(3)
        ]
        if hasattr(rb, "std"):  # standardized
            rewards = rewards * np.std(kept, ddof=1) + np.mean(kept)
        numbers = obs[:, 0]
        newest = {1000 * k + 10 * a + b for k in range(max(0, number - 3), number + 1) for a in range(5) for b in range(3)}
        assert set(numbers.int().tolist()) == newest
        assert torch.equal(next_obs[:, 0], numbers + 10)
        torch.testing.assert_close(rewards.float(), 10 * numbers, rtol=1e-4, atol=0.05)
        assert torch.equal(actions.view(3000, -1)[:, 0].float(), numbers % 2)
        counts = torch.bincount(numbers.int())
        assert counts[counts > 0].min() > 0.5 * 3000 / len(newest)  # uniform
        file, loaded = io.BytesIO(), make_buffer(script, 5, 3, 4)
        torch.save(rb.state_dict(), file)
        file.seek(0)
        loaded.load_state_dict(torch.load(file, weights_only=True))
        torch.manual_seed(0)
        assert torch.equal(loaded.sample(*sizes, number + 1)[0], obs)
        rb = loaded  # it is the one that goes on


def test_one_update_is_dqns():
    torch.manual_seed(0)
    q_network, mean_network = dqn_clip_cartpole.QNetwork(), dqn_clip_cartpole.QNetwork()
    batch = torch.randn(32, 4), torch.randn(32, 4), torch.randint(2, (32,)), 5 * torch.rand(32)
    expected = []
    for obs, next_obs, action, reward in zip(*batch):  # a transition at a time
        with torch.no_grad():
            td_target = reward + 0.9 * mean_network(next_obs).max()
        error = (q_network(obs)[action] - td_target).abs()
        expected.append(0.5 * error**2 if error < 1 else error - 0.5)  # Huber's loss
    gradients = torch.autograd.grad(torch.stack(expected).mean(), list(q_network.parameters()))
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    before = [p.clone() for p in q_network.parameters()]
    mean = [p.clone() for p in mean_network.parameters()]
    optimizer = torch.optim.SGD(q_network.parameters(), lr=0.1)
    losses = dqn_clip_cartpole.dqn_update(
        q_network, mean_network, optimizer, batch, dqn_clip_cartpole.Args(gamma=0.9, tau=0.1)
    )
    assert losses["losses/td_loss"].item() == pytest.approx(torch.stack(expected).mean().item(), rel=1e-4)
    for new, old, gradient in zip(q_network.parameters(), before, gradients):
        torch.testing.assert_close(new, old - 0.1 * gradient * min(1, 10 / norm), rtol=1e-3, atol=1e-6)
    for new, old, learned in zip(mean_network.parameters(), mean, q_network.parameters()):
        torch.testing.assert_close(new, 0.9 * old + 0.1 * learned)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_rollout_is_its_seeds_and_its_policys_alone(script):
    module = SCRIPTS[script]
    args, policies = module.Args(num_envs=3, episode_length=20), []
    envs = ENVS[script](3, args)
    for seed in (0, 1):
        torch.manual_seed(seed)
        policies.append(POLICY[script](args))

    def play(policy, noise: float, seed: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
        heard = []
        states, actions = module.rollout(policy, noise, envs, SimpleNamespace(add=heard.append), seed, args)
        assert len(states) == 21 and len(actions) == len(heard) == 20 and not actions.requires_grad
        assert torch.equal(torch.stack(heard), states[1:, :, :24])  # the states after the steps
        return states, actions

    def same(a, b) -> bool:
        return all(torch.equal(x, y) for x, y in zip(a, b))

    one, other = policies
    for noise in (0.0, 0.5):
        assert same(play(one, noise), play(one, noise)) and not same(play(one, noise), play(other, noise))
        assert not same(play(one, noise), play(one, noise, seed=3))
    assert not same(play(one, 0.0), play(one, 0.5))
    random = [play(policy, 1.0) for policy in ((one, other) if script == "dqn_clip_cartpole" else (None, None))]
    assert same(*random) and not same(random[0], play(one, 1.0, seed=3))
    if script != "dqn_clip_cartpole":
        assert play(None, 1.0)[1].abs().max() <= 1 and not same(random[0], play(one, 1.0))


@pytest.mark.parametrize("script", SCRIPTS)
def test_half_precision_ranks_frames_as_single_precision_does(script, one_thread):
    module, rng = SCRIPTS[script], torch.Generator().manual_seed(0)
    args = module.Args(num_envs=25, episode_length=20)
    envs = ENVS[script](25, args)
    heard = []
    module.rollout(None if "sac" in script else POLICY[script](args), 1.0, envs, SimpleNamespace(add=heard.append), 0, args)
    states = torch.cat(heard)
    if script != "sac_clip_humanoid":  # from all over
        states[:, 0] = torch.rand(500, generator=rng) * 1.8 - 1.2
        states[:, -2] = states[:, -2] if script == "sac_clip_mountaincar" else torch.rand(500, generator=rng) * 6.28 - 3.14
    frames = DRAW[script](states)
    prompts = args.prompt or "a humanoid robot kneeling", args.baseline_prompt, args.goal_baseline_alpha
    rewards = [CLIPReward("tiny", *prompts, precision=precision)(frames) for precision in ("fp32", "bf16")]
    assert rewards[0].std() > 0.02 and not torch.equal(*rewards)
    ranks = torch.stack([reward.argsort().argsort().double() for reward in rewards])
    assert torch.corrcoef(ranks)[0, 1] >= 0.998


class AtLast(ThreadPoolExecutor):
    """Does nothing before somebody asks for it: a round is only played when the learning is over."""

    def submit(self, work, *arguments) -> Future:
        task = Task()
        task.work = lambda: work(*arguments)
        return task


class AtOnce(AtLast):
    """Does all at once: a round has been played, and labelled, before the learning begins."""

    def submit(self, work, *arguments) -> Future:
        task = super().submit(work, *arguments)
        task.result()
        return task


class Task(Future):
    def result(self, timeout=None):
        if not self.done():
            self.set_result(self.work())
        return super().result(timeout)


@pytest.mark.slow("humanoid", "mountaincar")
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_learning_and_the_round_played_meanwhile_see_nothing_of_each_other(script, train, tmp_path, monkeypatch):
    """Whether a round is played before, after or during the learning: it is the policy's from before, and is not learned from yet."""
    options = "--num-envs 4 --episode-length 20 --total-timesteps 400 --learning-starts 160 --gradient-steps 15 --episodes 2"
    options += " --learning-rate 0.01 --device cpu --clip-model tiny --clip-batch-size 32 --batch-size 64 --run-dir"
    module, added, sampled = SCRIPTS[script], [], []

    class Spy(module.ReplayBuffer):
        def add(self, number, *values):
            assert number == len(added)
            super().add(number, *values)
            added.append(number)

        def sample(self, *sizes_and_rounds):
            assert sizes_and_rounds[-1] == len(added)
            sampled.append(len(added))
            return super().sample(*sizes_and_rounds)

    monkeypatch.setattr(module, "ReplayBuffer", Spy)
    for pool in (AtOnce, AtLast, ThreadPoolExecutor):
        added.clear()
        sampled.clear()
        monkeypatch.setattr("clip_reward.ThreadPoolExecutor", pool)
        train(script, *options.split(), tmp_path / pool.__name__)
        assert sampled == [k for k in (2, 3, 4) for _ in range(15)] and len(added) == 5
        same_run(tmp_path / "AtOnce", tmp_path / pool.__name__)


@pytest.mark.slow("mountaincar")
@pytest.mark.parametrize("script", ["dqn_clip_cartpole", "sac_clip_mountaincar"])
def test_ground_truth_reward_is_what_the_flag_trains_on(script, train, tmp_path):
    options = "--reward ground-truth --total-timesteps 6400 --num-envs 16 --episode-length 200 --episodes 2 --gradient-steps 1"
    rb = train(script, *options.split(), "--device", "cpu", "--clip-model", "tiny", "--run-dir", tmp_path / "run")["rb"]
    true_rewards = SCRIPTS[script].ground_truth_reward(rb["states"][:, 1:].flatten(0, 2)).view(rb["rewards"].shape)
    assert torch.equal(rb["rewards"], true_rewards) and rb["rewards"].sum() > 0


@pytest.mark.slow("humanoid", "mountaincar")
@pytest.mark.parametrize("script, threshold", [*((script, None) for script in SCRIPTS), ("dqn_clip_cartpole", 0.5)])
def test_negative_prompts_make_the_reward_contrastive(script, threshold, train, tmp_path):
    options = "--total-timesteps 240 --num-envs 4 --episode-length 30 --episodes 2 --device cpu --clip-model tiny"
    temperature = 0.3 if threshold is None else None  # with the model's own the car's start is worth 0.00
    options += f" --temperature {temperature}" if threshold is None else f" --threshold {threshold}"
    negatives = ["a pole leaning to the side", "a car in the valley", "a humanoid robot standing up"]
    checkpoint = train(script, *options.split(), "--negative-prompt", *negatives, "--run-dir", tmp_path / "run")
    settings, rb = checkpoint["settings"], checkpoint["rb"]
    assert list(settings["negative_prompt"]) == negatives
    how = {"precision": settings["precision"], "negative_prompts": negatives, "temperature": temperature}
    p = CLIPReward("tiny", settings["prompt"], **how)(DRAW[script](rb["states"][:, 1:].flatten(0, 2)))
    rewards = rb["rewards"].flatten()
    if threshold is None:
        torch.testing.assert_close(rewards, p, atol=2e-3, rtol=0)
        assert rewards.std() > 3e-3 and 0 <= rewards.min() and rewards.max() <= 1
    else:
        clear = (p - threshold).abs() > 1e-3
        assert torch.equal(rewards[clear], (p > threshold).float()[clear]) and set(rewards.tolist()) <= {0.0, 1.0}
    train(script, "--resume", tmp_path / "run")  # brings the negatives along


@pytest.mark.parametrize("script, num_envs", [("sac_clip_mountaincar", 80), ("sac_clip_humanoid", 16)])
def test_sac_explores_with_correlated_noise(script, num_envs):
    """Random actions are uniform in [-1, 1]; theirs and a policy's noise is standard normal, and alike from step to step."""
    module = SCRIPTS[script]
    args, labeller = module.Args(), SimpleNamespace(add=lambda _: None)
    envs, shape = ENVS[script](num_envs, args), (num_envs, module.ACTION_SIZE)
    for policy in (None, lambda obs: (torch.zeros(shape), torch.zeros(shape))):
        states, actions = module.rollout(policy, 1.0, envs, labeller, 5, args)
        actions = actions.flatten(1).double()
        if policy is None:
            assert (torch.histc(actions, 10, -1, 1) / actions.numel() - 0.1).abs().max() < 0.03
            normal = torch.erfinv(actions.clamp(-0.999999, 0.999999)) * 2**0.5
        else:
            normal = actions.atanh()
        assert normal.mean().abs() < 0.1 and normal.std().item() == pytest.approx(1, abs=0.05)
        for lag in (1, 10, 30):
            alike = (normal[:-lag] * normal[lag:]).mean().item()
            assert alike == pytest.approx(args.noise_correlation**lag, abs=0.08)
        n = normal.shape[1]  # one environment's noise, or motor's, is not another's
        assert (torch.corrcoef(normal.T).sum() - n).abs() / (n * (n - 1)) < 0.05
        if script == "sac_clip_mountaincar" and policy is None:
            assert 0.02 < (states[-1, :, 0] >= 0.45).float().mean() < 0.25  # now and then the car gets there by chance


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    for script in SCRIPTS.values():
        script.save(f"{tmp_path}/checkpoint.pt", {"step": 1})
        with pytest.raises(Exception, match="pickle"):
            script.save(f"{tmp_path}/checkpoint.pt", {"step": 2, "bad": lambda: None})
        assert load(tmp_path / "checkpoint.pt") == {"step": 1}


# ---- Each script as a user runs it


@pytest.fixture(scope="module", params=SCRIPTS)
def unbroken(request, tmp_path_factory) -> tuple[str, Path]:
    """A short run that nothing disturbed -> script, run folder."""
    folder = tmp_path_factory.mktemp("unbroken")
    out = run(request.param, *SHORT, "--run-dir", folder / "run", folder=folder, OMP_NUM_THREADS="2")
    first = next(line for line in out.splitlines() if line.startswith("CLIP model tiny ("))
    assert first.endswith(f") in {native_precision('cpu')} on cpu")
    assert "trained on CartPole, MountainCar and the humanoid as drawn here" in first and "no evidence of zero-shot" in first
    for name in ("success rate", "clip return", "ground truth return"):
        assert f"{name}  " in out
    (untrained,) = (
        line for line in out.splitlines() if line.startswith("to compare with, a policy that has learned nothing: ")
    )
    curve = EventAccumulator(str(folder / "run")).Reload().Scalars("charts/clip_return")
    assert f"clip return {curve[0].value:.2f}" in untrained
    assert "whatever the prompt says" not in out
    return request.param, folder / "run"


def test_a_run_leaves_what_it_promises(unbroken):
    _, run_dir = unbroken
    figures = result(run_dir)
    assert {"success_rate", "clip_return", "ground_truth_return", "settings", "versions"} <= set(figures)
    assert figures["settings"]["seed"] == 3 and figures["settings"]["precision"] == native_precision("cpu")
    assert not list(run_dir.glob("*tmp*"))
    with av.open(str(run_dir / "result.mp4")) as video:
        assert video.streams.video[0].codec_context.name == "h264" and video.streams.video[0].format.name == "yuv420p"
        frames = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
    assert len(frames) == 3 * figures["settings"]["episode_length"]
    assert abs(frames[0].astype(int) - frames[25]).max() > 50  # something moves
    events = EventAccumulator(str(run_dir), {"images": 0, "scalars": 0}).Reload()
    scalars = set(events.Tags()["scalars"])
    assert {"charts/clip_return", "charts/ground_truth_return", "charts/success_rate", "charts/SPS"} <= scalars
    assert any(name.startswith("losses/") for name in scalars)
    assert events.Scalars("result/clip_return")[-1].value == pytest.approx(figures["clip_return"])
    assert [event.step for event in events.Images("frames")][:3] == [240, 480, 720]
    assert "settings/text_summary" in events.Tags()["tensors"]
    evaluations = events.Scalars("evaluation/clip_return")
    assert [event.step for event in evaluations] == list(range(240, 1441, 240))
    best = max(evaluations, key=lambda event: event.value)
    step, best_return = load(run_dir / "best.pt")["progress"]
    assert step == best.step and best_return == pytest.approx(best.value, rel=1e-6)


def test_the_buffer_holds_the_last_rounds_and_clips_rewards_of_the_states_after_the_steps(unbroken, one_thread):
    """Of twelve rounds of 4 x 30 steps the nine places hold the last nine: played again with their actions from their start states."""
    script, run_dir = unbroken
    checkpoint = load(run_dir / "checkpoint.pt")
    settings, rb = checkpoint["settings"], checkpoint["rb"]
    assert rb["rewards"].shape == (9, 30, 4)
    for number in (3, 11):
        seed = np.random.SeedSequence((3, number)).generate_state(2)[0].item()
        envs = ENVS[script](4, SCRIPTS[script].Args(episode_length=30))
        states, force = rb["states"][number % 9], 0.4 if script == "sac_clip_humanoid" else 1
        assert np.allclose(envs.reset(seed=seed)[0], states[0], atol=1e-6)
        for t, actions in enumerate(rb["actions"][number % 9]):
            assert np.allclose(envs.step(force * actions.numpy())[0], states[t + 1], atol=1e-4, rtol=1e-4)
    prompts = settings["prompt"], settings["baseline_prompt"], settings["goal_baseline_alpha"]
    reward_model = CLIPReward("tiny", *prompts, precision=settings["precision"])
    after, before = (reward_model(DRAW[script](rb["states"][:, part].flatten(0, 2))) for part in (slice(1, None), slice(-1)))
    torch.testing.assert_close(rb["rewards"].flatten(), after, atol=1e-4, rtol=0)
    assert (before - rb["rewards"].flatten()).abs().max() > 0.01


def test_killed_at_any_moment_and_resumed_is_the_unbroken_run(unbroken, tmp_path, request):
    """Once, and three times with --slow."""
    script, whole = unbroken
    checkpoint, killed_at = tmp_path / "run" / "checkpoint.pt", []
    process = start(script, *SHORT, "--run-dir", tmp_path / "run", folder=tmp_path)
    for life in range(3 if request.config.getoption("--slow") else 1):
        seen = 0
        while seen < 2:  # checkpoints of this life, the first at its beginning; then kill, wherever the run is
            before = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
            while not checkpoint.exists() or checkpoint.stat().st_mtime_ns == before:
                assert process.poll() is None, process.communicate()
                time.sleep(0.001)
            seen += 1
        time.sleep(0.02 * life)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        killed_at.append(step_of(tmp_path / "run"))
        process = start(script, "--resume", tmp_path / "run", folder=tmp_path)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert killed_at == sorted(set(killed_at)) and 0 < killed_at[0] and killed_at[-1] < 1440
    same_run(whole, tmp_path / "run")
    assert len(curve(whole)) == 12  # nothing twice, nothing missing


@pytest.mark.slow("humanoid", "mountaincar", "15")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_saves_says_how_to_go_on_and_goes_on(unbroken, tmp_path, number):
    script, whole = unbroken
    process = start(script, *SHORT, "--run-dir", "run", folder=tmp_path)
    while not (tmp_path / "run" / "best.pt").exists():  # the end of the second round
        time.sleep(0.002)
        assert process.poll() is None, process.communicate()
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number and "Traceback" not in err
    assert f"python {script}.py --resume run" in out
    assert 0 < step_of(tmp_path / "run") < 1440
    if number == signal.SIGINT:
        run(script, "--resume", "run", folder=tmp_path)
        same_run(whole, tmp_path / "run")


@pytest.mark.slow
def test_second_ctrl_c_stops_at_once(tmp_path):
    """In the middle of a round that would take minutes: no thread finishes it first, and nothing is lost but that round."""
    long = "--num-envs 64 --episode-length 20000 --episodes 1 --device cpu --clip-model tiny --total-timesteps 1280000"
    processes = {script: start(script, *long.split(), "--run-dir", script, folder=tmp_path) for script in SCRIPTS}
    try:
        for script, process in processes.items():
            for number, awaited in enumerate(("training goes", "finishing this round first")):
                read = ""
                while awaited not in read:
                    read += process.stderr.read(1)
                    assert process.poll() is None, read
                time.sleep(1 - number)
                process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
            assert process.returncode == 130 and "Traceback" not in err
            assert "goes on from its last checkpoint with --resume" in err
            assert step_of(tmp_path / script) == 0
    finally:
        for process in processes.values():
            process.kill()


@pytest.mark.slow
def test_any_number_of_cores_gives_the_same_run(unbroken, tmp_path):
    script, two = unbroken
    run(script, *SHORT, "--run-dir", "run", folder=tmp_path, OMP_NUM_THREADS="1")
    same_run(two, tmp_path / "run")


@pytest.mark.slow("humanoid", "mountaincar")
def test_evaluate_a_checkpoint(unbroken, tmp_path):
    script, run_dir = unbroken
    before = {path: path.stat().st_mtime_ns for path in run_dir.iterdir()}
    out = run(script, "--evaluate", run_dir / "best.pt", "--device", "cpu", folder=tmp_path)
    figures = json.loads((run_dir / "best_evaluation.json").read_text())
    for name in ("success_rate", "clip_return", "ground_truth_return"):
        assert figures[name] == result(run_dir)[name]
    assert "success rate" in out and (run_dir / "best_evaluation.mp4").stat().st_size > 1000
    assert {path: path.stat().st_mtime_ns for path in before} == before
    run(script, "--evaluate", run_dir / "checkpoint.pt", "--episodes", 10, "--seed=1", folder=tmp_path)
    settings = json.loads((run_dir / "checkpoint_evaluation.json").read_text())["settings"]
    assert settings["episodes"] == 10 and settings["seed"] == 1 and settings["num_envs"] == 4
    assert settings["run_dir"] == str(run_dir) and not list(tmp_path.iterdir())


def test_an_evaluation_that_is_interrupted_leaves_no_half_file(unbroken, tmp_path, monkeypatch):
    script, run_dir = unbroken
    shutil.copy(run_dir / "best.pt", tmp_path)
    monkeypatch.setattr(
        sys, "argv", [f"{script}.py", "--evaluate", f"{tmp_path}/best.pt", "--episodes", "2", "--device", "cpu"]
    )

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(SCRIPTS[script].ImageDraw, "Draw", interrupted)
    with pytest.raises(KeyboardInterrupt):
        SCRIPTS[script].main()
    assert [path.name for path in tmp_path.iterdir()] == ["best.pt"]


BAD = [
    ("--clip-model ViT-B-23/openai", "did you mean ViT-B-32"),
    ("--clip-model ViT-B-32//no/such/weights.pt", "no weights file"),
    ("--clip-model local-dir:/no/such", "no CLIP model in"),
    ("--goal-baseline-alpha 1.5", "--goal-baseline-alpha must lie between 0 and 1, not 1.5"),
    ("--goal-baseline-alpha x", "x"),
    ("--prompt ''", "prompt is empty"),
    ("--prompt", "prompt is empty"),
    ("--baseline-prompt ' '", "prompt is empty"),
    ("--prompt '" + "upright " * 40 + "'", "too long for this model"),
    ("--device cuda", "no CUDA GPU"),
    ("--device cpu:3", "cpu:3"),
    ("--num-envs 0", "--num-envs must be at least 1"),
    ("--total-timesteps -5", "--total-timesteps must be at least 1"),
    ("--clip-batch-size 0", "--clip-batch-size must be at least 1"),
    ("--learning-rate 2", "--learning-rate must lie between 0 and 1"),
    ("--learning-starts -1", "--learning-starts must be at least 0"),
    ("--seed 99999999999999999999", "less than 2^40"),
    ("--run-dir FILE/run", "FILE"),
    ("--run-dir .", "exists"),
    ("--resume no/such/run", "no/such/run/checkpoint.pt is not a checkpoint"),
    ("--evaluate no/such/best.pt", "No such file"),
    ("--evaluate RUN", "is not a checkpoint of"),
    ("--evaluate FILE", "is not a checkpoint of"),
    ("--evaluate FOREIGN", "is not a checkpoint of"),
    ("--evaluate COPYS", "is not a checkpoint of SCRIPT.py (ValueError: it is of copy_of_it.py)"),
    ("--resume . --evaluate FILE", "leave out --evaluate"),
    ("--resume RUN --seed 1", "leave out --seed"),
    ("--resume RUN --gamma=0.5", "leave out --gamma"),
    ("--evaluate RUN/best.pt --prompt x", "leave out --prompt"),
    ("--resume ONLYBEST", "is not a checkpoint of SCRIPT.py"),
    ("--no-such-flag", "no-such-flag"),
    ("--precision fp64", "fp64"),
    ("--negative-prompt ''", "prompt is empty"),
    ("--negative-prompt x --temperature 0", "temperature must be above 0"),
    ("--negative-prompt x --threshold 1.5", "--threshold must lie between 0 and 1"),
    ("--threshold 0.5", "give a negative prompt"),
    ("--negative-prompt x --temperature inf", "temperature must be above 0 and finite"),
    ("--prompt pole upright on the cart", "--prompt takes sentences, not words: put quotes around each"),
    ("--negative-prompt pole lying", "--negative-prompt takes sentences"),
    ("--clip-model ''", "unknown CLIP model ''"),
    ("--clip-model FILE", "Write NAME/FILE"),
    ("--prompt '" + "x" * 10_000 + "'", "xxx…"),
]


@pytest.mark.parametrize("arguments, expected", BAD)
def test_bad_input_is_one_line_and_leaves_nothing(arguments, expected, unbroken, tmp_path, monkeypatch, capsys):
    script, run_dir = unbroken
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("a GPU is here: that --device cuda is refused where there is none can only be seen without one")
    (tmp_path / "FILE").write_text("not a checkpoint")
    torch.save({"settings": {"another": 1}, "policy": {}}, tmp_path / "FOREIGN")
    torch.save(load(run_dir / "best.pt") | {"script": "copy_of_it"}, tmp_path / "COPYS")
    (tmp_path / "ONLYBEST").mkdir()
    shutil.copy(run_dir / "best.pt", tmp_path / "ONLYBEST" / "checkpoint.pt")
    left = sorted(tmp_path.rglob("*"))
    device = [] if "--device" in arguments or "--resume" in arguments else ["--device", "cpu"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *shlex.split(arguments.replace("RUN", str(run_dir))), *device])
    if "FILE/run" not in arguments:
        monkeypatch.setattr(open_clip, "create_model_from_pretrained", lambda *a, **k: pytest.fail("loaded a model"))
    with pytest.raises((UsageError, OSError, SystemExit)) as stopped:
        SCRIPTS[script].main()
    _, err = capsys.readouterr()
    message = err if stopped.type is SystemExit else str(stopped.value)
    assert expected.replace("SCRIPT", script) in message
    if stopped.type is SystemExit:  # tyro's own, which frames its errors
        assert stopped.value.code == 2 and expected in ("x", "no-such-flag", "fp64", "cpu:3")
    else:
        assert "\n" not in message and "Traceback" not in err and len(message) < 500
    assert sorted(tmp_path.rglob("*")) == left


def the_error(code: int, err: str) -> str:
    """What a script says that ends with exit code 2: one line, whatever else is said of the training."""
    lines = [line for line in err.replace("\r", "\n").splitlines() if ".py: error: " in line]
    assert code == 2 and "Traceback" not in err and len(lines) == 1, err
    return lines[0]


def failed(process: subprocess.Popen) -> str:
    _, err = process.communicate(timeout=120)
    return the_error(process.returncode, err)


@pytest.fixture
def fails(one_thread, monkeypatch, capsys):
    """A function that runs a script as `python SCRIPT.py` does, but in this process -> its error."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def fails(script: str, *words) -> str:
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *map(str, words)])
        with pytest.raises(SystemExit) as stopped:
            runpy.run_path(str(ROOT / f"{script}.py"), run_name="__main__")
        return the_error(stopped.value.code, capsys.readouterr().err)

    yield fails
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def copied(unbroken, tmp_path) -> tuple[str, Path]:
    """Script and a copy of its run's folder."""
    shutil.copytree(unbroken[1], tmp_path / "run")
    return unbroken[0], tmp_path / "run"


def test_files_that_are_broken_are_named_in_a_line(copied, fails):
    script, run_dir = copied
    (run_dir / "best.pt").write_bytes((run_dir / "best.pt").read_bytes()[:5000])
    assert "run/best.pt is not a checkpoint" in fails(script, "--resume", run_dir)
    checkpoint = load(run_dir / "checkpoint.pt")
    optimizer = next(name for name in checkpoint if name.endswith("optimizer"))
    del checkpoint[optimizer]
    torch.save(checkpoint, run_dir / "checkpoint.pt")
    assert f"run/checkpoint.pt lacks {optimizer}" in fails(script, "--resume", run_dir)


@pytest.mark.slow
def test_a_file_that_cannot_be_written_is_named_and_the_old_one_stays(tmp_path):
    """No file may become larger than what the first checkpoint has, nor may they be where there is no folder any more."""
    limit = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)\n"
    limit += (
        "sys.argv = sys.argv[2:]; sys.path.insert(0, '" + str(ROOT) + "'); runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", limit, "100000", ROOT / "dqn_clip_cartpole.py", *SHORT, "--run-dir", tmp_path / "run"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert "cannot write" in failed(process) and not list(tmp_path.rglob("*.tmp"))
    process = start("dqn_clip_cartpole", *SHORT, "--run-dir", "gone", folder=tmp_path)
    while not (tmp_path / "gone" / "best.pt").exists():
        time.sleep(0.002)
    (tmp_path / "gone").rename(tmp_path / "elsewhere")
    line = failed(process)
    assert "cannot write gone/" in line or "No such file" in line


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_curves_that_cannot_be_written_are_a_line(script, tmp_path):
    """TensorBoard writes in a thread of its own, whose traceback is not to be seen beside that line."""
    full = "import runpy, sys; from tensorboard.summary.writer.record_writer import RecordWriter\n"
    full += "def write(self, data): raise OSError('no space for the curves')\n"
    full += f"RecordWriter.write = write; sys.argv = sys.argv[1:]; sys.path.insert(0, {str(ROOT)!r})\n"
    full += "runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", full, ROOT / f"{script}.py", *SHORT, "--run-dir", tmp_path / "run"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert "no space for the curves" in failed(process)


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_begins_anew_in_its_folder(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint.pt.tmp").write_bytes(b"half")
    out = run("sac_clip_mountaincar", *SHORT, "--total-timesteps=240", "--run-dir", "run", folder=tmp_path)
    assert "written to run/result" in out


@pytest.mark.slow
def test_a_run_is_not_resumed_while_it_goes_on(tmp_path):
    long = [*SHORT, "--total-timesteps=600000", "--run-dir", "run"]
    process = start("sac_clip_mountaincar", *long, folder=tmp_path)
    try:
        while not (tmp_path / "run" / "best.pt").exists():
            time.sleep(0.01)
        other = start("sac_clip_mountaincar", "--resume", "run", folder=tmp_path)
        assert "run belongs to a training that is still going" in failed(other)
        assert process.poll() is None
    finally:
        process.kill()
    process.communicate()
    resumed = start("sac_clip_mountaincar", "--resume", "run", folder=tmp_path)  # what was killed keeps nothing
    assert "training goes from step" in resumed.stderr.readline()
    resumed.kill()


@pytest.mark.parametrize("script", SCRIPTS)
def test_out_of_memory_and_rewards_that_are_no_numbers_are_a_line(script, fails, tmp_path):
    common = ("--device", "cpu", "--clip-model", "tiny", "--num-envs=2", "--episode-length=5", "--run-dir")
    much = "--buffer-size=1000000000000", "--total-timesteps=1000000000000"
    assert "out of memory" in fails(script, *much, *common, tmp_path / "much")
    small = "--negative-prompt", "x", "--temperature", "1e-42"
    assert "pays NaN or infinity" in fails(script, *small, *common, tmp_path / "small")


@pytest.mark.slow("humanoid", "mountaincar")
def test_terminals_of_every_kind(unbroken, tmp_path):
    """One that knows ASCII alone, one that is closed after a line, and Ctrl-C while the packages are imported."""
    script, _ = unbroken
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert "goal-baseline-alpha" in run(script, "--help", folder=tmp_path, **ascii_only)
    line = f"set -o pipefail; {shlex.join([sys.executable, f'{ROOT}/{script}.py'])} --help | head -1"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr == "" and done.returncode in (0, 141)
    process = start(script, *SHORT, folder=tmp_path)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert err == "" and process.returncode == -signal.SIGINT


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_tracking_that_does_not_work_is_a_line_and_a_run_that_has_begun_goes_on(script, train, tmp_path, monkeypatch, capsys):
    """`wandb/`, the folder that Weights & Biases leaves, passes for the package."""
    started = []
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **settings: started.append(settings["id"])))
    options = [*SHORT, "--total-timesteps=240", "--checkpoint-every=120", "--track", "--run-dir"]
    train(script, *options, tmp_path / "a run: #1")
    assert started == ["a-run---1"]
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace())
    train(script, "--resume", tmp_path / "a run: #1")
    assert "--track does not work (AttributeError" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        train(script, *options, tmp_path / "new")
    assert stopped.value.code == 2 and not (tmp_path / "new").exists()


@pytest.mark.parametrize("script", SCRIPTS)
def test_steps_are_ours_with_tiny_and_the_papers_with_other_models(script, monkeypatch):
    ours = {"dqn_clip_cartpole": 64_000, "sac_clip_mountaincar": 320_000, "sac_clip_humanoid": 128_000}[script]
    papers = 10_000_000 if script == "sac_clip_humanoid" else 3_000_000
    for words, expected in (
        ("tiny", ours),
        ("ViT-B-32/openai", papers),
        ("ViT-B-32/openai --total-timesteps 7", 7),
        ("tiny --total-timesteps 7", 7),
    ):
        monkeypatch.setattr(sys, "argv", [f"{script}.py", "--device", "cpu", "--clip-model", *words.split()])
        assert SCRIPTS[script].read_settings()[0].total_timesteps == expected


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_an_error_is_a_line_and_exit_code_2_and_so_is_a_hub_out_of_reach(script, tmp_path):
    env = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hub")}
    for model, expected in (
        ("ViT-bigG-14/laion2b_s39b_b160k", "cannot fetch ViT-bigG-14"),
        ("ViT-B-23/openai", "did you mean"),
    ):
        command = [sys.executable, ROOT / f"{script}.py", "--clip-model", model, "--device", "cpu"]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
        assert done.stderr.startswith(f"{script}.py: error: ") and expected in done.stderr
        assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_home_that_cannot_be_written_to_is_no_obstacle(tmp_path):
    home = {"HOME": "/dev/null", "XDG_CACHE_HOME": "/dev/null/cache"}
    out = run("sac_clip_humanoid", *SHORT, "--total-timesteps=120", "--run-dir=run", folder=tmp_path, **home)
    assert "written to run/result" in out
