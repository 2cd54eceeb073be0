"""Reward programs: what is refused and limited, the pipeline on recorded answers, and training on one."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import dqn_clip_cartpole
import sac_clip_mountaincar
from clip_reward import UsageError
from code_reward import client, program, write
from code_reward.program import Program, ProgramError, ProgramReward, check, verify

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ROOT / "code_reward" / "programs"
HEAD = "import numpy as np\nSIZE = 8, 8\n"
ONE = HEAD + "def done(frames):\n    return {}\n"
DARK = "frames[:, 0, 0, 0] < 99"

HOSTILE = {  # what it does -> source
    "reads a file": ONE.format("open('/etc/passwd')"),
    "imports a module": "import os\n" + ONE.format("os.system('true')"),
    "imports from a module": "from os import system\n" + ONE.format("system('true')"),
    "calls __import__": ONE.format("__import__('os')"),
    "climbs to the class of a value": ONE.format("().__class__.__base__.__subclasses__()"),
    "climbs by an f-string": ONE.format("f'{frames.__class__}'"),
    "gets an attribute by its name": ONE.format("getattr(frames, 'tofile')"),
    "reads a file with NumPy": ONE.format("np.load('x.npy', allow_pickle=True)"),
    "writes a file with NumPy": ONE.format("frames.tofile('x')"),
    "shows memory by a dtype": ONE.format("np.array(frames, dtype='V8')"),
    "shows memory by an array's constructor": ONE.format("np.ndarray((1,), np.int64, frames)"),
    "shows memory by gaps in a result": ONE.format(f"np.logical_not({DARK}, where=False)"),
    "writes into another array": ONE.format("np.floor(frames, out=frames)"),
    "writes beyond an array by repeating": ONE.format("np.zeros(4).repeat(2**62)"),
    "writes beyond an array by tiling": ONE.format("np.tile(np.zeros((4, 1)), (1, 2**62))"),
    "writes beyond an array by counting": ONE.format("np.bincount(np.array([2**63 - 1]))"),
    "writes beyond an array by broadcasting": ONE.format("np.concatenate((np.broadcast_to(0, 2**62),) * 4)"),
    "is a class": HEAD + "class done:\n    pass\n",
    "decorates": HEAD + "@sum\ndef done(frames):\n    return frames\n",
    "rebinds a built-in": HEAD + "len = 1\n" + ONE.format("frames"),
    "changes NumPy": HEAD + "np.pi = 3\n" + ONE.format("frames"),
    "waits in a loop": HEAD + "def done(frames):\n    while True: pass\n",
    "is nested deeply": HEAD + "def done(frames, deep=" + 300 * "lambda: " + "0):\n    return frames\n",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_programs_are_refused_before_anything_runs(what, monkeypatch):
    monkeypatch.setattr(program, "exec", lambda *_: pytest.fail("it ran"), raising=False)
    monkeypatch.setattr(program.subprocess, "run", lambda *_, **__: pytest.fail("it ran"))
    for refuse in (check, Program, verify):
        with pytest.raises(ProgramError) as error:
            refuse(HOSTILE[what])
        assert f"| {what} | {error.value} |" in (ROOT / "code_reward" / "README.md").read_text()  # its table


WRONG = {  # what passes `check` and fails when it runs -> source, and what is said
    "an endless loop": (ONE.format("[0 for _ in range(10**12)]"), "longer than 2 s"),
    "all memory": (ONE.format("np.zeros(10**11) > 0"), "MemoryError"),
    "a wrong shape": (ONE.format("frames > 0"), r"bool \(64, 8, 8, 3\)"),
    "an exception": (ONE.format("np.zeros(2) @ frames"), "done: ValueError"),
    "changed frames": (ONE.format("frames.sort()"), "read-only"),
    "a return outside of a function": (ONE.format(DARK) + "return 1\n", "outside function"),
    "no sub-task": (HEAD, "functions of `frames`"),
    "no size": (ONE.format(DARK).replace("SIZE", "size"), "SIZE = height, width"),
    "the mean of a batch": (ONE.format("frames.sum((1, 2, 3)) >= frames.sum((1, 2, 3)).mean()"), "beside it"),
    "the size of a batch": (ONE.format(f"({DARK}) & (len(frames) > 1)"), "beside it"),
    "the place in a batch": (ONE.format("np.arange(len(frames)) < 8"), "beside it"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_a_program_may_do_is_limited(what, monkeypatch):
    monkeypatch.setattr(program, "SECONDS", 2)
    with pytest.raises(ProgramError, match=WRONG[what][1]):
        verify(WRONG[what][0])


def test_a_system_without_a_limit_on_memory_goes_without(tmp_path, monkeypatch):
    limits = []

    def setrlimit(which: int, most: tuple) -> None:  # as macOS does
        limits.append(which)
        if which == program.resource.RLIMIT_AS:
            raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(program.resource, "setrlimit", setrlimit)
    example = ROOT / "code_reward" / "programs" / "cartpole.py"
    words = ["program.py", example, tmp_path / "no frames", tmp_path / "done.npy", "10"]
    monkeypatch.setattr(sys, "argv", [*map(str, words)])
    program.main()
    assert np.load(tmp_path / "done.npy").dtype == bool and len(limits) == 5


def test_frames_that_are_given_are_tried_as_well():
    frames = np.full((3, 8, 8, 3), [[[[77]]], [[[78]]], [[[77]]]], np.uint8)
    assert verify(ONE.format("frames[:, 0, 0, 0] == 78"), frames).tolist() == [[False, True, False]]
    with pytest.raises(ProgramError, match="beside it"):  # no frame that is made up is of this color alone
        verify(ONE.format("(frames == 78).all((1, 2, 3)) & (len(frames) > 1)"), frames)


KEPT = {  # where a program may keep the number of its calls -> a function `calls` that returns it
    "a list": "kept = [0]\ndef calls():\n    kept[0] += 1\n    return kept[0]\n",
    "a default": "def calls(kept=[0]):\n    kept[0] += 1\n    return kept[0]\n",
    "an iterator": "kept = (n for n in range(99))\ndef calls():\n    return min(zip(kept, range(1)))[0]\n",
}


@pytest.mark.parametrize("what", KEPT)
def test_a_program_keeps_nothing_of_a_batch(what, tmp_path):
    source = HEAD + KEPT[what] + f"def done(frames):\n    return ({DARK}) & (calls() < 3)\n"
    (tmp_path / "program.py").write_text(source)
    reward = ProgramReward(str(tmp_path / "program.py"), UsageError)
    assert [reward(torch.zeros(1, 3, 8, 8, dtype=torch.uint8)).item() for _ in range(5)] == [1] * 5


def test_shipped_programs_reward_more_the_nearer_the_goal():
    reward, degrees = (
        ProgramReward(str(PROGRAMS / "cartpole.py"), UsageError),
        [-170, -60, -30, -8, 0, 8, 30, 60, 170.0],
    )
    states = torch.zeros(len(degrees), 4)
    states[:, 2] = torch.deg2rad(torch.tensor(degrees))
    assert reward(dqn_clip_cartpole.render(states, *reward.size)).tolist() == [0, 1, 1, 3, 4, 3, 1, 1, 0]
    states[:, 0] = 2
    assert reward(dqn_clip_cartpole.render(states, *reward.size)).tolist() == [0, 1, 1, 2, 2, 2, 1, 1, 0]
    reward, x = (
        ProgramReward(str(PROGRAMS / "mountaincar.py"), UsageError),
        [-1.2, -0.52, -0.2, 0.2, 0.4, 0.46, 0.6],
    )
    for textures in ("realistic", "original"):
        scene = sac_clip_mountaincar.Scene(*reward.size, textures, torch.device("cpu"))
        assert reward(scene.render(torch.tensor(x)[:, None])).tolist() == [0, 0, 0, 1, 2, 3, 3], textures


# ---- The pipeline, against recorded answers

PLAN = {
    "description": "A pole\ud800\n on a cart.",  # as JSON may say it, and no file can
    "subtasks": [{"name": "pole_up", "what": "up"}, {"name": "upright", "what": "still"}],
}
UP = """import numpy as np
def pole_up(frames):
    tan = np.maximum(frames[..., 0].astype(np.int16) - frames[..., 2], 0).sum(2)
    return (tan * np.arange(64)).sum(1) < 40 * tan.sum(1)"""
UPRIGHTS = [  # the first is done at random as often as by the expert, the second never ends
    "np.ones(len(frames), dtype=bool)",
    "np.array([sum(range(10**9)) for _ in frames]) > 0",
    "frames[:, 99, 0, 0] > 0",
    "(np.maximum(frames[..., 0].astype(np.int16) - frames[..., 2], 0).sum(1) > 0).sum(1) < 5",
]
ANSWERS = [  # as a model might give them, one after the other
    "I cannot see the pictures.",  # no plan
    "Here: " + json.dumps(PLAN),
    "It should look at the pole.",  # no code
    "```python\ndef pole_up(frames):\n    return np.ones(len(frames)",  # half an answer
    "```python\ndef pole_up(frames):\n    return frames > 0\n```",  # wrong shape
    f"Here it is.\n```python\n{UP}\n```",
    *(f"```python\ndef upright(frames):\n    return {code}\n```" for code in UPRIGHTS),
]
NO_PLAN = {
    "deep JSON": '{"description": ' + 5000 * "[" + 5000 * "]" + "}",
    "a description that is no text": json.dumps(PLAN | {"description": {"a": "scene"}}),
    "a sub-task that is no text": json.dumps(PLAN).replace('"up"', "1"),
    "code for a name": json.dumps(PLAN).replace("pole_up", "a(frames): pass\\ndef b"),
}


@pytest.mark.parametrize("what", NO_PLAN)
def test_what_is_no_plan_is_asked_again(what):
    answers = [NO_PLAN[what], json.dumps(PLAN)]
    model = SimpleNamespace(ask=lambda _: answers.pop(0))
    assert write.plan(model, [], 3) == ("A pole on a cart.", {"pole_up": "up", "upright": "still"})


def test_strange_responses_are_a_line_or_an_answer(tmp_path, monkeypatch):
    response = SimpleNamespace(usage=None, choices={"0": "an object"})
    completions = SimpleNamespace(create=lambda **_: response)
    endpoint = SimpleNamespace(chat=SimpleNamespace(completions=completions))
    monkeypatch.setitem(sys.modules, "openai", SimpleNamespace(OpenAI=lambda **_: endpoint))
    question = [client.message("user", "What is it?")]
    with pytest.raises(UsageError, match="no answer .*KeyError"):
        client.Client("m", tmp_path / "a.json").ask(question)
    cut_off = SimpleNamespace(message=SimpleNamespace(content="A c"), finish_reason="length")
    response.choices = [cut_off]
    with pytest.raises(UsageError, match="cut off .length., and is not kept: A c"):
        client.Client("m", tmp_path / "a.json").ask(question)
    response.choices = [SimpleNamespace(message=SimpleNamespace(content="A cart."), finish_reason="stop")]
    assert client.Client("m", tmp_path / "a.json").ask(question) == "A cart."
    monkeypatch.setitem(sys.modules, "openai", None)  # it cannot even be imported
    assert client.Client("m", tmp_path / "a.json").ask(question) == "A cart."


@pytest.fixture
def asked(monkeypatch) -> list[list]:
    """The messages of all questions to an endpoint that gives ANSWERS; the fifth is broken off, once."""
    asked = []
    breaks = [5]

    def create(**question) -> SimpleNamespace:
        if len(asked) + 1 in breaks:
            raise KeyboardInterrupt(breaks.pop())
        asked.append([*question["messages"]])
        message = SimpleNamespace(content=ANSWERS[len(asked) - 1])
        said = SimpleNamespace(message=message, finish_reason="stop")
        return SimpleNamespace(choices=[said], usage=SimpleNamespace(total_tokens=110))

    endpoint = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    monkeypatch.setitem(sys.modules, "openai", SimpleNamespace(OpenAI=lambda **_: endpoint))
    return asked


@pytest.fixture
def run_dir(tmp_path) -> Path:
    """A run of CartPole whose first round is random and whose last keeps the pole up, by a simple rule."""
    envs, rng = dqn_clip_cartpole.CartPole(4), np.random.default_rng(0)
    (tmp_path / "run" / "rounds").mkdir(parents=True)
    for number in (0, 1):
        states = [envs.reset(seed=1)[0]]
        for _ in range(150):
            right = (states[-1] @ [0.05, 0.1, 1, 0.5] > 0).astype(int) if number else rng.integers(2, size=4)
            states.append(envs.step(right))
        played = (torch.from_numpy(np.stack(states)), torch.zeros(150, 4), torch.zeros(150, 4))
        dqn_clip_cartpole.save(f"{tmp_path}/run/rounds/{number}.pt", round=played)
    content = {"script": "dqn_clip_cartpole", "settings": asdict(dqn_clip_cartpole.Args())}
    dqn_clip_cartpole.save(f"{tmp_path}/run/checkpoint.pt", **content)
    return tmp_path / "run"


def test_a_program_is_written_broken_off_in_the_middle_and_taken_up_again(
    asked, run_dir, tmp_path, call, monkeypatch
):
    monkeypatch.setattr(program, "SECONDS", 2)
    command = [write, "--model", "recorded", "--episodes", "4", "--run-dir", run_dir]
    command += ["--output", tmp_path / "cartpole.py"]
    with pytest.raises(KeyboardInterrupt):
        call(*command)
    assert len(asked) == 4 and not (tmp_path / "cartpole.py").exists()
    call(*command)
    lines = (tmp_path / "cartpole.answers.jsonl").read_text().splitlines()
    calls = {call["key"]: call for call in map(json.loads, lines)}
    assert len(asked) == len(ANSWERS) and [call["tokens"] for call in calls.values()] == [110] * len(ANSWERS)
    said = [messages[-1]["content"] for messages in asked]
    assert [len(parts) - 1 for parts in said] == [6, 0, 6, 0, 0, 0, 6, 4, 0, 0]  # pictures
    for number, words in {5: "bool (", 7: "100%", 8: "longer than", 9: "IndexError"}.items():
        assert words in said[number][0]["text"]
    written = Program((tmp_path / "cartpole.py").read_text())
    assert written.size == (64, 96) and written.subtasks == ["pole_up", "upright"]
    (run_dir / "rounds" / "0.pt").rename(run_dir / "rounds" / "2.pt")
    with pytest.raises(UsageError, match="no longer its first"):
        call(*command[:-1], tmp_path / "another.py")


@pytest.mark.parametrize("script", [dqn_clip_cartpole, sac_clip_mountaincar])
def test_a_training_is_rewarded_by_the_program_and_a_checkpoint_runs_none(script, tmp_path, call):
    path, run = tmp_path / "program.py", tmp_path / "run"
    source = (PROGRAMS / f"{script.__name__.split('_')[-1]}.py").read_text()
    path.write_text(source.replace("> 62", "> 35"))  # the car's valley, too: so short a run comes no further
    short = "--total-timesteps=480 --num-envs=4 --episode-length=30 --learning-starts=120 --gradient-steps=2"
    short = [*short.split(), "--episodes=2", "--evaluate-every=240", "--device=cpu"]
    call(script, "--clip-model", path, *short, "--run-dir", run)
    worker = script.Worker(script.Args(clip_model=str(path)), torch.device("cpu"))
    rounds = [torch.load(run / "rounds" / f"{number}.pt", weights_only=True)["round"] for number in range(4)]
    for states, _, rewards in rounds:
        assert torch.equal(rewards.flatten(), worker.label(states[1:].flatten(0, 1))[:, 0])
    assert len(torch.stack([rewards for *_, rewards in rounds]).unique()) > 1
    with pytest.raises(SystemExit):  # the program is to be named again
        call(script, "--resume", run)


def test_a_file_that_is_no_program_is_a_line(tmp_path):
    (tmp_path / "bad.py").write_text(HOSTILE["reads a file"])
    (tmp_path / "latin.py").write_bytes("# ä".encode("latin-1"))
    for name in ("bad", "latin", "none"):
        with pytest.raises(UsageError, match=f"{name}.py is no reward program"):
            ProgramReward(f"{tmp_path}/{name}.py", UsageError)
