"""Each script as a user runs it: bad input, resume after kill -9, Ctrl-C, evaluation, and a training that succeeds."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import av
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import clip_reward
import dqn_clip_cartpole
import sac_clip_humanoid
import sac_clip_mountaincar
from clip_reward import CLIPReward

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {
    "dqn_clip_cartpole": dqn_clip_cartpole,
    "sac_clip_mountaincar": sac_clip_mountaincar,
    "sac_clip_humanoid": sac_clip_humanoid,
}
POLICY = {"dqn_clip_cartpole": "q_network", "sac_clip_mountaincar": "actor", "sac_clip_humanoid": "actor"}
DRAW = {
    "dqn_clip_cartpole": lambda states: dqn_clip_cartpole.draw(states, 64, 64),
    "sac_clip_mountaincar": lambda states: sac_clip_mountaincar.draw(states, 64, 64, "realistic"),
    "sac_clip_humanoid": lambda states: sac_clip_humanoid.Scene(
        64, 64, "realistic", "fixed", 1, 256, torch.device("cpu")
    ).draw(states)[0],
}
SHORT = dict.fromkeys(
    SCRIPTS,
    "--total-timesteps 6000 --num-envs 4 --episode-length 30 --learning-starts 300 --checkpoint-every 240 --buffer-size 1000 "
    "--gradient-steps 10 --episodes 5 --seed 3 --device cpu --clip-model tiny",
)


def start(script: str, *arguments, folder: Path) -> subprocess.Popen:
    command = [sys.executable, ROOT / f"{script}.py", *map(str, arguments)]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(script: str, *arguments, folder: Path) -> str:
    process = start(script, *arguments, folder=folder)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return out


def result(run_dir: Path) -> dict:
    figures = json.loads((run_dir / "result.json").read_text())
    assert figures.pop("steps_per_second") > 0
    figures["settings"].pop("run_dir")
    return figures


@pytest.fixture(scope="module", params=SCRIPTS)
def unbroken(request, tmp_path_factory) -> tuple[str, Path]:
    """A short run that nothing disturbed -> script, run folder."""
    folder = tmp_path_factory.mktemp("unbroken")
    out = run(request.param, *SHORT[request.param].split(), "--run-dir", folder / "run", folder=folder)
    first, *_ = out.splitlines()
    assert "CLIP model tiny" in first and "trained on these very scenes" in first and "no evidence of zero-shot" in first
    for name in ("success rate", "clip return", "ground truth return", "steps per second"):
        assert re.search(rf"{name} +-?\d", out)
    return request.param, folder / "run"


def test_a_run_leaves_what_it_promises(unbroken):
    _, run_dir = unbroken
    figures = result(run_dir)
    assert {"success_rate", "clip_return", "ground_truth_return", "settings", "versions"} <= set(figures)
    assert figures["settings"]["seed"] == 3 and figures["versions"]["torch"] == version("torch")
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


def test_rewards_in_the_buffer_are_clips_of_the_states_after_the_steps(unbroken):
    script, run_dir = unbroken
    checkpoint = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    settings, rb = checkpoint["settings"], checkpoint["rb"]
    reward_model = CLIPReward("tiny", settings["prompt"], settings["baseline_prompt"], settings["goal_baseline_alpha"])
    assert rb["size"] == 1000 and rb["num_unlabelled"] == 0
    states = rb["states" if "states" in rb else "next_obs"]
    torch.testing.assert_close(rb["rewards"], reward_model(DRAW[script](states)), atol=1e-5, rtol=0)
    before = states[: -settings["num_envs"]]  # each environment's states one step earlier
    assert (reward_model(DRAW[script](before)) - rb["rewards"][settings["num_envs"] :]).abs().max() > 0.01


@pytest.mark.parametrize("script", ["dqn_clip_cartpole", "sac_clip_mountaincar"])
def test_ground_truth_reward_is_what_the_flag_trains_on(script, tmp_path):
    options = "--reward ground-truth --total-timesteps 3200 --num-envs 16 --episode-length 200 --episodes 2 --device cpu"
    out = run(script, *options.split(), "--run-dir", "run", folder=tmp_path)
    rb = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["rb"]
    assert torch.equal(rb["rewards"], SCRIPTS[script].ground_truth_reward(rb["next_obs"])) and rb["rewards"].sum() > 0
    assert "clip return" in out  # still logged, for comparison


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
    ("--seed 99999999999999999999", "less than 2^62"),
    ("--device meta", "only cpu and cuda"),
    ("--run-dir LOCKED/run", "cannot write to LOCKED/run"),
    ("--evaluate LOCKED/best.pt", "cannot write to LOCKED/best.pt"),
    ("--evaluate RUN/best.pt --prompt x", "leave out --prompt"),
    ("--no-such-flag", "no-such-flag"),
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
    monkeypatch.setattr(clip_reward.open_clip, "create_model_from_pretrained", lambda *a, **k: pytest.fail("loaded a model"))
    monkeypatch.setattr(SCRIPTS[script], "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stopped:
        SCRIPTS[script].main()
    out, err = capsys.readouterr()
    assert stopped.value.code == 2 and expected.replace("SCRIPT", script) in err
    if expected not in ("x", "no-such-flag"):  # those are tyro's, which frames its errors
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
    state_size = {"dqn_clip_cartpole": 4, "sac_clip_mountaincar": 2, "sac_clip_humanoid": 24}[script]
    states, rewards = torch.zeros(4, 1, state_size), torch.zeros(4, 1)
    args = {"dqn_clip_cartpole": (), "sac_clip_mountaincar": ("plain",), "sac_clip_humanoid": (module.Args(),)}[script]
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
