"""Reward programs: what is refused, what is limited, the pipeline against a server that plays recorded answers, and training on one."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

import dqn_clip_cartpole
import sac_clip_mountaincar
from clip_reward import UsageError
from code_reward import program
from code_reward.program import ProgramError, ProgramReward, check, load, verify

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ROOT / "code_reward" / "programs"
HEAD = "import numpy as np\nSIZE = 8, 8\n"
ONE = HEAD + "def done(frames):\n    return {}\n"

HOSTILE = {  # what it tries -> source, and what it is refused for
    "reads a file": (ONE.format("open('/etc/passwd')"), "open"),
    "imports a module": ("import os\n" + ONE.format("os.system('true')"), "import os"),
    "imports from a module": ("from os import system\n" + ONE.format("system('true')"), "ImportFrom"),
    "imports NumPy under another name": ("import numpy\n" + ONE.format("frames"), "import numpy"),
    "calls __import__": (ONE.format("__import__('os')"), "__import__"),
    "evaluates text": (ONE.format("eval('1')"), "eval"),
    "executes text": (ONE.format("exec('import os')"), "exec"),
    "climbs to the class of a value": (ONE.format("().__class__.__base__.__subclasses__()"), ".__subclasses__"),
    "climbs by an f-string": (ONE.format("f'{frames.__class__}'"), "JoinedStr"),
    "climbs by format": (ONE.format("'{0.__class__}'.format(frames)"), ".format"),
    "gets an attribute by its name": (ONE.format("getattr(frames, 'tofile')"), "getattr"),
    "reads a file with NumPy": (ONE.format("np.load('x.npy', allow_pickle=True)"), ".load"),
    "writes a file with NumPy": (ONE.format("frames.tofile('x')"), ".tofile"),
    "reaches another module by NumPy": (ONE.format("np.ctypeslib.ctypes"), ".ctypes"),
    "reads a global by its dictionary": (ONE.format("globals()"), "globals"),
    "shows memory by a dtype": (ONE.format("np.array(frames, dtype='V8')"), "text"),
    "shows memory by an array's constructor": (ONE.format("np.ndarray((1,), np.int64, frames)"), ".ndarray"),
    "is a class": (HEAD + "class done:\n    pass\n", "ClassDef"),
    "decorates": (HEAD + "@sum\ndef done(frames):\n    return frames\n", "decorator"),
    "rebinds a built-in": (HEAD + "len = 1\n" + ONE.format("frames"), "the name len"),
    "rebinds NumPy": (HEAD + "np = 1\n" + ONE.format("frames"), "the name np"),
    "changes NumPy": (HEAD + "np.pi = 3\n" + ONE.format("frames"), ".pi"),
    "matches a class": (HEAD + "def done(frames):\n    match frames:\n        case 1: pass\n", "Match"),
    "waits in a loop": (HEAD + "def done(frames):\n    while True: pass\n", "While"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_programs_are_refused_before_anything_runs(what, monkeypatch):
    source, expected = HOSTILE[what]
    monkeypatch.setattr(program, "exec", lambda *_: pytest.fail("it ran"), raising=False)
    monkeypatch.setattr(program.subprocess, "run", lambda *_, **__: pytest.fail("it ran"))
    for refuse in (check, load, lambda source: verify(source, np.zeros((2, 8, 8, 3), np.uint8))):
        with pytest.raises(ProgramError) as error:
            refuse(source)
        assert expected in str(error.value) and "not allowed" in str(error.value) and "\n" not in str(error.value)
    assert f"| {what} | {error.value} |" in (ROOT / "code_reward" / "README.md").read_text()  # its table


WRONG = {  # what passes the parser and fails when it runs
    "an endless loop": ("[0 for _ in range(10**12)]", "longer than 2 s"),
    "all memory": ("np.zeros(10**11) > 0", "MemoryError"),
    "a wrong shape": ("frames > 0", r"boolean array of shape \(N,\), here \(2,\), not bool \(2, 8, 8, 3\)"),
    "a wrong type": ("len(frames)", "not int"),
    "an exception": ("np.zeros(2) @ frames", "done: ValueError"),
    "changed frames": ("frames.sort()", "read-only"),
    "a look at other frames": ("frames[:, 0, 0, 0] < frames.mean() + len(frames) - 1", "depends on the frames beside it"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_a_program_may_take_is_limited(what, monkeypatch):
    monkeypatch.setattr(program, "SECONDS", 2)
    with pytest.raises(ProgramError, match=WRONG[what][1]):
        verify(ONE.format(WRONG[what][0]), np.zeros((2, 8, 8, 3), np.uint8))


def test_shipped_programs_pay_more_the_nearer_the_goal():
    reward, degrees = ProgramReward(str(PROGRAMS / "cartpole.py")), torch.tensor([-170, -60, -30, -8, 0, 8, 30, 60, 170.0])
    states = torch.zeros(len(degrees), 4)
    states[:, 2] = torch.deg2rad(degrees)
    assert reward(dqn_clip_cartpole.draw(states, *reward.size)).tolist() == [0, 1, 1, 3, 4, 3, 1, 1, 0]
    states[:, 0] = 2
    assert reward(dqn_clip_cartpole.draw(states, *reward.size)).tolist() == [0, 1, 1, 2, 2, 2, 1, 1, 0]
    reward, x = ProgramReward(str(PROGRAMS / "mountaincar.py")), torch.tensor([-1.2, -0.52, -0.2, 0.2, 0.4, 0.46, 0.6])
    for textures in ("realistic", "original"):
        draw = sac_clip_mountaincar.Scene(*reward.size, textures, torch.device("cpu")).draw
        assert reward(draw(x[:, None])).tolist() == [0, 0, 0, 1, 2, 3, 3], textures


# ---- The pipeline, against a server


UP = """Here it is.
```python
import numpy as np
def pole_up(frames):
    tan = np.maximum(frames[..., 0].astype(np.int16) - frames[..., 2], 0).sum(2)
    return (tan * np.arange(64)).sum(1) < 40 * tan.sum(1)
```"""
UPRIGHT = """```python
def upright(frames):
    tan = np.maximum(frames[..., 0].astype(np.int16) - frames[..., 2], 0)
    return ((tan.sum(1) > 0).sum(1) < 5)
```"""
PLAN = {
    "description": "A pole on a cart.",
    "subtasks": [{"name": "pole_up", "what": "up"}, {"name": "upright", "what": "still"}],
}
ANSWERS = [  # as a model might give them, one after the other
    "I cannot see the pictures.",  # no plan
    "Here: " + json.dumps(PLAN),
    "It should look at the pole.",  # no code
    "```python\ndef pole_up(frames):\n    return np.ones(len(frames)",  # half an answer
    "```python\ndef pole_up(frames):\n    return frames > 0\n```",  # wrong shape
    UP,
    "```python\ndef upright(frames):\n    return np.ones(len(frames), dtype=bool)\n```",  # random as often as expert
    "```python\ndef upright(frames):\n    return np.array([sum(range(10**9)) for _ in frames]) > 0\n```",  # never ends
    "```python\ndef upright(frames):\n    return frames[:, 99, 0, 0] > 0\n```",  # an exception
    UPRIGHT,
]


@pytest.fixture
def server():
    """-> base URL, the questions asked; plays ANSWERS, the second question after a 429, the third after a connection that breaks."""
    asked, trouble = [], {1: "busy", 2: "broken"}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/chat/completions" and question["model"] == "recorded"
            match trouble.pop(len(asked), None):
                case "busy":
                    self.send_response(429)
                    self.send_header("Retry-After", "1")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                case "broken":
                    self.send_response(200)
                    self.send_header("Content-Length", "1000")
                    self.end_headers()
                    self.wfile.write(b'{"choices": [{"mess')
                    return
            asked.append(question)
            said = {"role": "assistant", "content": ANSWERS[len(asked) - 1]}
            body = {"id": "1", "object": "chat.completion", "created": 0, "model": "recorded"}
            body["choices"] = [{"index": 0, "finish_reason": "stop", "message": said}]
            body["usage"] = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
            body = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_port}/v1", asked
    httpd.shutdown()


@pytest.fixture
def run_dir(tmp_path) -> Path:
    """A run of CartPole whose first round is random and whose last keeps the pole upright, by a hand-written rule."""
    envs, rng, rounds = dqn_clip_cartpole.CartPole(4), np.random.default_rng(0), []
    for expert in (False, True):
        states = [envs.reset(seed=1)[0]]
        for _ in range(150):
            x, speed, angle, turning = states[-1].T
            rule = angle + 0.5 * turning + 0.05 * x + 0.1 * speed > 0
            states.append(envs.step(rule.astype(int) if expert else rng.integers(2, size=4))[0])
        rounds.append(np.stack(states))
    rb = {"states": torch.from_numpy(np.stack(rounds)), "rewards": torch.zeros(2, 150, 4)}
    (tmp_path / "run").mkdir()
    content = {"script": "dqn_clip_cartpole", "settings": asdict(dqn_clip_cartpole.Args()), "progress": (1200, 0.0), "rb": rb}
    torch.save(content, tmp_path / "run" / "checkpoint.pt")
    return tmp_path / "run"


@pytest.mark.slow
def test_a_program_is_written_killed_in_the_middle_and_taken_up_again(server, run_dir, tmp_path):
    pytest.importorskip("openai")
    url, asked = server
    command = [
        sys.executable,
        ROOT / "code_reward" / "write.py",
        "--run-dir",
        run_dir,
        "--base-url",
        url,
        "--model",
        "recorded",
    ]
    command += ["--output", tmp_path / "cartpole.py", "--episodes", "4"]
    env = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path, "env": env}
    process = subprocess.Popen(command, **pipes)
    while len(asked) < 5:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert not (tmp_path / "cartpole.py").exists()
    kept = len(json.loads((tmp_path / "cartpole.json").read_text()))
    del asked[kept:]  # an answer that was under way is given once more
    done = subprocess.run(command, timeout=300, **{name: value for name, value in pipes.items()})
    assert done.returncode == 0, done.stderr
    assert len(asked) == len(ANSWERS) == len(json.loads((tmp_path / "cartpole.json").read_text()))
    assert "10 answers, 1,100 tokens" in done.stdout and "| pole_up |" in done.stdout and "| upright |" in done.stdout
    said = [question["messages"][-1]["content"] for question in asked]
    for number, (words, pictures) in {
        0: ("agents that act at random", 6),
        1: ("must end with that JSON", 0),
        2: ("(N, 64, 96, 3) uint8", 6),
        3: ("no whole block", 0),
        4: ("no whole block", 0),
        5: ("boolean array", 0),
        7: ("in 100% of the random frames", 4),
        8: ("longer than", 0),
        9: ("IndexError", 0),
    }.items():
        assert words in said[number][0]["text"] and len(said[number]) == 1 + pictures, said[number][0]["text"]
    size, subtasks = load((tmp_path / "cartpole.py").read_text())
    assert size == (64, 96) and list(subtasks) == ["pole_up", "upright"]
    again = subprocess.run(command, timeout=60, **pipes)
    assert again.returncode == 2 and "must be a new file" in again.stderr and again.stderr.count("\n") == 1


def test_without_an_endpoint_a_line_says_so(run_dir, tmp_path):
    pytest.importorskip("openai")
    command = [sys.executable, ROOT / "code_reward" / "write.py", "--run-dir", run_dir]
    command += ["--model", "m", "--output", tmp_path / "a.py"]
    env = {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 2 and "no endpoint" in done.stderr and "Traceback" not in done.stderr


# ---- Training on a program

SHORT = "--total-timesteps 480 --num-envs 4 --episode-length 30 --learning-starts 120 --checkpoint-every 240 --gradient-steps 2".split()


def train(script, monkeypatch, *arguments) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    threads = torch.get_num_threads()
    monkeypatch.setattr(sys, "argv", [script.__name__, *map(str, arguments)])
    try:
        script.main()
    finally:
        torch.set_num_threads(threads)
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("script, name", [(dqn_clip_cartpole, "cartpole"), (sac_clip_mountaincar, "mountaincar")])
def test_the_labels_of_a_training_are_the_programs_and_a_checkpoint_runs_none(script, name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "CLIPReward", lambda *_, **__: pytest.fail("a CLIP model"))
    path = tmp_path / f"{name}.py"  # the car's pays in the valley, too, or so short a run would earn nothing
    path.write_text((PROGRAMS / f"{name}.py").read_text().replace("> 62", "> 35"))
    train(script, monkeypatch, "--reward-program", path, *SHORT, "--episodes=2", "--device=cpu", "--run-dir", tmp_path / "run")
    out = capsys.readouterr().out
    assert f"reward program {path}, sha256 " in out and "CLIP model" not in out
    rb = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["rb"]
    reward = ProgramReward(str(path))
    draw = script.draw if script is dqn_clip_cartpole else script.Scene(*reward.size, "realistic", torch.device("cpu")).draw
    states = rb["states"][:, 1:].flatten(0, 2)
    frames = draw(states, *reward.size) if script is dqn_clip_cartpole else draw(states)
    assert torch.equal(rb["rewards"].flatten(), reward(frames)) and len(rb["rewards"].unique()) > 1
    another = ["--reward-program", tmp_path / "another.py"]
    for words in (
        ["--resume", tmp_path / "run"],
        ["--resume", tmp_path / "run", *another],
        ["--evaluate", tmp_path / "run/best.pt"],
    ):
        with pytest.raises(UsageError, match="add --reward-program"):
            train(script, monkeypatch, *words)
    train(script, monkeypatch, "--resume", tmp_path / "run", "--reward-program", path)


def test_a_program_that_is_none_is_a_line(tmp_path, monkeypatch):
    (tmp_path / "bad.py").write_text(HOSTILE["reads a file"][0])
    (tmp_path / "long.py").write_text(ONE.format("frames[:, 0, 0, 0] > 9") + "A = sum(range(10**12))\n")
    monkeypatch.setattr(program, "SECONDS", 1)
    lines = {"bad.py": "line 4: open is not allowed", "none.py": "No such file", "long.py": "longer than 1 s"}
    for path, words in ((tmp_path / name, line) for name, line in lines.items()):
        with pytest.raises(UsageError, match=words):
            train(
                dqn_clip_cartpole, monkeypatch, "--reward-program", path, *SHORT, "--device=cpu", "--run-dir", tmp_path / "run"
            )
        assert not (tmp_path / "run").exists()
