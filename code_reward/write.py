"""A vision-language model writes a reward program, which is verified on what a run's agent did at first, at random, and at its end.

    python code_reward/write.py --run-dir runs/NAME --base-url http://localhost:8000/v1 --model MODEL --output cartpole.py

After Code as Reward (VLM-CaR, Venuto et al., ICML 2024, arXiv 2402.04764): the model is shown frames and asked for the sub-tasks, then for
a function for each. A function must hold in frames of the expert's and rarely in random ones; else it goes back with what went wrong.
"""

import ast
import base64
import hashlib
import io
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from PIL import Image
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "figures")]
from dataset import DatasetError, drawer, states_of_runs  # noqa: E402

from code_reward.program import ProgramError, check, in_order, verify  # noqa: E402


class WriteError(Exception):
    """What went wrong, in one line."""


@dataclass
class Args:
    """Have a vision-language model write and mend a reward program; what it has answered once it is not asked again."""

    run_dir: str  # a run whose agent reached the goal, with any reward: its first round is random play, its last the expert's
    output: Path  # the program, NAME.py; NAME.json beside it keeps questions, answers and tokens
    model: str  # as the endpoint calls it
    base_url: str | None = None  # of an OpenAI-compatible endpoint (OPENAI_API_KEY is its key); None is OpenAI's own
    rounds: int = 3  # repairs of a function before its sub-task is given up
    size: tuple[int, int] = (64, 96)  # height and width of the frames that the program sees
    episodes: int = 8  # of each kind to verify on


# ---- What the model is shown and asked

PLAN = """These are frames of one simulated scene, seen by the same camera.
First {n} frames of agents that act at random, then {n} frames of agents that have reached the goal of the task.

Say in two sentences what the scene shows and what the goal is. Then split the way to the goal into 2 to 5 sub-tasks, from the first to \
the last, such that whether each is done can be seen in a single frame, and a later one is only reached with the earlier ones done.
End with one JSON object: {{"description": "...", "subtasks": [{{"name": "a_python_name", "what": "when is it done?"}}, ...]}}"""

CODE = """The scene: {description}
The sub-task "{name}": {what}
First {n} frames of agents that act at random, then {n} frames of agents that have reached the goal. They are shown {zoom} times as large \
as a program sees them, {height} x {width} pixels.

Write a Python function that tells from the pixels in which frames this sub-task is done:

```python
def {name}(frames):  # (N, {height}, {width}, 3) uint8, red, green, blue
    ...
    return done  # (N,) bool
```

Only NumPy, as np, and no other import; plain functions and expressions, no classes, no while, no try, no f-strings, no printing. frames \
cannot be written to. Constants and helpers belong inside the function. Answer with this one function in a block of Python."""

REPAIR = """That does not do. {problem}
Mend it, and give the whole answer again."""


def picture(frame: np.ndarray, zoom: int) -> dict:
    """A frame (H, W, 3), enlarged, as a part of a message."""
    file = io.BytesIO()
    Image.fromarray(frame.repeat(zoom, axis=0).repeat(zoom, axis=1)).save(file, "PNG")
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()}}


def message(role: str, text: str, pictures: list[dict] = ()) -> dict:
    return {"role": role, "content": [{"type": "text", "text": text}, *pictures]}


def write(path: Path, text: str) -> None:
    """Whole or not at all."""
    path.with_suffix(".tmp").write_text(text)
    os.replace(path.with_suffix(".tmp"), path)


class Model:
    """Questions -> answers, each asked once: those in NAME.json are taken from there."""

    def __init__(self, args: Args):
        import openai

        self.args, self.path, self.Error = args, args.output.with_suffix(".json"), openai.OpenAIError
        try:
            self.calls = dict(json.loads(self.path.read_text())) if self.path.exists() else {}
        except (ValueError, TypeError):
            raise WriteError(f"{self.path} holds no answers: move it away, or choose another --output") from None
        key = os.environ.get("OPENAI_API_KEY") or ("none" if args.base_url else None)  # a local server takes any
        try:
            self.client = openai.OpenAI(base_url=args.base_url, api_key=key, max_retries=6)  # waits as long as a 429 says
        except self.Error as error:
            raise WriteError(f"no endpoint: {error}") from None
        self.bar = tqdm(desc="ask", unit="answer", disable=None)

    def ask(self, messages: list[dict]) -> str:
        question = {"model": self.args.model, "messages": messages}
        key = hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()
        if key not in self.calls:
            try:
                response = self.client.chat.completions.create(**question)
                answer = response.choices[0].message.content.encode().decode()
            except (self.Error, IndexError, AttributeError, TypeError, ValueError) as error:
                line = f"{type(error).__name__}: {error}".splitlines()[0][:300]
                raise WriteError(f"no answer ({line}); the same command goes on") from None
            (text, *pictures), tokens = messages[-1]["content"], getattr(response.usage, "total_tokens", 0) or 0
            self.calls[key] = dict(question=text["text"], pictures=len(pictures), answer=answer, tokens=tokens)
            write(self.path, json.dumps(self.calls, indent=1))
        self.bar.update()
        self.bar.set_postfix_str(f"{self.tokens():,} tokens")
        return self.calls[key]["answer"]

    def tokens(self) -> int:
        return sum(call["tokens"] for call in self.calls.values())


# ---- The stages


def plan(model: Model, shown: list[dict]) -> dict:
    """Stage 1: pictures -> {"description": ..., "subtasks": [{"name": ..., "what": ...}, ...]}."""
    messages = [message("user", PLAN.format(n=len(shown) // 2), shown)]
    for _ in range(model.args.rounds + 1):
        answer = model.ask(messages)
        try:
            found = json.loads(answer[answer.index("{") : answer.rindex("}") + 1])
            names = [re.fullmatch(r"[a-z]\w*", subtask["name"])[0] for subtask in found["subtasks"] if subtask["what"]]
            check("".join(f"def {name}(frames): pass\n" for name in names))
            if 2 <= len({*names}) == len(found["subtasks"]) <= 5 and found["description"]:
                return found
            problem = "There must be 2 to 5 sub-tasks, each with a name of its own."
        except (ValueError, KeyError, TypeError, ProgramError) as error:
            problem = f"The answer must end with that JSON object ({type(error).__name__}: {error})."
        messages += [message("assistant", answer), message("user", REPAIR.format(problem=problem))]
    raise WriteError(f"no plan after {model.args.rounds + 1} answers: {problem}")


def function(answer: str, name: str) -> str:
    """The function in an answer -> its source; ProgramError if it is not just that."""
    blocks = re.findall(r"```[A-Za-z0-9]*[ \t\r]*\n(.*?)```", answer, re.DOTALL)
    if not blocks:
        raise ProgramError("There is no whole block of Python in the answer.")
    source = re.sub(r"^import numpy as np\n", "", blocks[-1], flags=re.MULTILINE).strip() + "\n"
    match check(source).body:
        case [ast.FunctionDef(name=found, args=taken)] if found == name and ast.unparse(taken) == "frames":
            return source
    raise ProgramError(f"The block must hold the function {name}(frames) and nothing else.")


def program_of(functions: dict[str, str], args: Args, about: str = "") -> str:
    about = " ".join(f"{about} Written by {args.model}.".split()).replace('"', "'").replace("\\", "")
    head = f'"""{about}"""\n\nimport numpy as np\n\nSIZE = {args.size[0]}, {args.size[1]}\n'
    return head + "".join(f"\n\n{source}" for source in functions.values())


def outcome(source: str, frames: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Frames (2, E, T, H, W, 3), expert and random -> of a program's sub-tasks whether each is done (K, 2, E, T), and in order."""
    done = verify(source, frames.reshape(-1, *frames.shape[3:]))
    return done.reshape(-1, *frames.shape[:3]), in_order(done).reshape(-1, *frames.shape[:3])


def write_function(model: Model, text: str, name: str, before: dict, frames: np.ndarray, shown: list, zoom: int) -> str | None:
    """Stages 2 to 4 for one sub-task -> its function, None if it is given up."""
    messages = [message("user", text, shown)]
    for _ in range(model.args.rounds + 1):
        answer, pictures = model.ask(messages), []
        try:
            source = function(answer, name)
            done, ordered = (kind[-1] for kind in outcome(program_of(before | {name: source}, model.args), frames))
            reached, often, seldom = ordered[0].any(1).mean(), done[0].mean(), done[1].mean()
            if reached >= 0.9 and seldom <= often / 2:
                return source
            if reached < 0.9:
                problem = f"In {reached:.0%} of the episodes that reach the goal it is done at some time; it should be in all. Not done in:"
                wrong = frames[0][~ordered[0]]
            else:
                problem = f"It is done in {seldom:.0%} of the random frames and {often:.0%} of the others: too often. Done in:"
                wrong = frames[1][done[1]]
            pictures = [picture(wrong[i], zoom) for i in np.linspace(0, len(wrong) - 1, 4).astype(int)]
        except ProgramError as error:
            problem = str(error)
        messages += [message("assistant", answer), message("user", REPAIR.format(problem=problem), pictures)]
    tqdm.write(f"given up after {model.args.rounds} repairs: {name}: {problem}", file=sys.stderr)
    return None


def report(source: str, names: list[str], frames: np.ndarray, stride: int) -> str:
    """For people: what each sub-task says of the expert's and of random frames."""
    head = "sub-task | share of expert frames | of random frames | first done in order, at step (median; share of expert episodes)"
    lines = [f"| {head} |", "|---|---|---|---|"]
    for name, done, ordered in zip(names, *outcome(source, frames)):
        there = ordered[0].any(1)
        first = int(np.median(ordered[0].argmax(1)[there]) + 1) * stride
        lines.append(f"| {name} | {done[0].mean():.2f} | {done[1].mean():.2f} | {first} ({there.mean():.0%}) |")
    return "\n".join(lines)


def trajectories(args: Args) -> tuple[np.ndarray, int]:
    """Frames (2, E, T, H, W, 3) uint8 of E episodes of a run's last and of its first, random round; steps between two of them."""
    _, settings = states_of_runs((Path(args.run_dir),))
    checkpoint = torch.load(f"{args.run_dir}/checkpoint.pt", map_location="cpu", weights_only=True, mmap=True)
    states = checkpoint["rb"]["states"][..., :24]  # rounds, steps + 1, environments, the numbers that say what there is to see
    last = checkpoint["progress"][0] // ((states.shape[1] - 1) * states.shape[2]) - 1
    if not 1 <= last < len(states):
        raise WriteError(f"{args.run_dir} has one round only, or no longer its first: train within --buffer-size steps")
    stride = max(1, (states.shape[1] - 1) // 50)
    states = torch.stack([states[last], states[0]])[:, stride::stride, : args.episodes].transpose(1, 2)
    draw = drawer(settings, *args.size, 64, torch.device("cpu"))
    frames = torch.cat([draw(chunk) for chunk in states.flatten(0, 2).split(64)]).permute(0, 2, 3, 1)
    return frames.reshape(*states.shape[:3], *args.size, 3).numpy(), stride


def main() -> None:
    args = tyro.cli(Args)
    if args.output.suffix != ".py" or args.output.exists() or not os.access(args.output.absolute().parent, os.W_OK):
        raise WriteError(f"--output {args.output} must be a new file NAME.py in a folder that can be written to")
    if not all(8 <= n <= 1024 for n in args.size) or args.episodes < 1 or args.rounds < 0:
        raise WriteError("--size takes two numbers from 8 to 1024, --episodes at least 1, --rounds at least 0")
    frames, stride = trajectories(args)
    zoom, pairs = max(1, 400 // args.size[0]), min(3, frames.shape[1])
    shown = [picture(frames[kind, episode, -1], zoom) for kind in (1, 0) for episode in range(pairs)]
    model = Model(args)
    found, functions = plan(model, shown), {}
    about = dict(description=found["description"], n=pairs, zoom=zoom, height=args.size[0], width=args.size[1])
    for name, what in ((subtask["name"], subtask["what"]) for subtask in found["subtasks"]):
        source = write_function(model, CODE.format(name=name, what=what, **about), name, functions, frames, shown, zoom)
        functions |= {name: source} if source else {}
    model.bar.close()
    print(f"{found['description']}\n{len(model.calls)} answers, {model.tokens():,} tokens")
    if not functions:
        raise WriteError(f"no sub-task passed; {model.path} holds what was asked and answered")
    source = program_of(functions, args, found["description"])
    print(report(source, [*functions], frames, stride))
    write(args.output, source)
    print(f"written to {args.output}; read it, then train with --reward-program {args.output}")


if __name__ == "__main__":
    try:
        main()
    except (WriteError, DatasetError, ProgramError, OSError, ImportError) as error:
        tqdm.write(f"write.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        tqdm.write("interrupted; the same command goes on with what has been answered", file=sys.stderr)
        sys.exit(130)
