"""A vision-language model writes a reward program, verified on a run's random first round and on its last.

    python -m code_reward.write --run-dir runs/NAME --model MODEL --output FILE.py

After Code as Reward (VLM-CaR, Venuto et al., ICML 2024, arXiv 2402.04764): the model sees frames, names the
sub-tasks, and writes a function for each. A function must hold in frames of the expert and rarely in random
ones; else it goes back with what went wrong.
"""

import ast
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro

from clip_reward import UsageError
from code_reward.client import Client, message, picture, plain, write
from code_reward.program import ProgramError, check, verify
from reward_check.dataset import renderer
from reward_check.runs import rounds_of, settings_of, states_of


@dataclass
class Args:
    """Have a vision-language model write and mend a reward program; no question is asked twice."""

    run_dir: Path  # a run whose agent reached the goal: its first round is random, its last is the expert's
    output: Path  # the program, NAME.py; NAME.answers.jsonl beside it keeps questions, answers and tokens
    model: str  # as OpenAI calls it (OPENAI_API_KEY), or the endpoint at OPENAI_BASE_URL
    rounds: int = 3  # repairs of a function before its sub-task is given up
    size: tuple[int, int] = (64, 96)  # height and width of the frames that the program sees
    episodes: int = 8  # of each kind to verify on


# ---- What the model is shown and asked

PLAN = """These are frames of one simulated scene, seen by the same camera.
First {n} frames of agents that act at random, then {n} frames of agents that have reached the goal.

Say in two sentences what the scene shows and what the goal is. Then split the way to the goal into 2 to 5 \
sub-tasks, from the first to the last, such that whether each is done can be seen in a single frame, and a \
later one is only reached with the earlier ones done. End with one JSON object:
{{"description": "...", "subtasks": [{{"name": "a_python_name", "what": "when is it done?"}}, ...]}}"""

CODE = """The scene: {description}
The sub-task "{name}": {what}
First {n} frames of agents that act at random, then {n} of agents that have reached the goal, all enlarged: \
a program sees them at {height} x {width} pixels.

Write a Python function that tells from the pixels in which frames this sub-task is done:

```python
def {name}(frames):  # (N, {height}, {width}, 3) uint8, red, green, blue
    ...
    return done  # (N,) bool
```

Only NumPy, as np, and no other import; plain functions and expressions, no classes, no while, no try, no \
f-strings, no printing, no out= or where=. frames cannot be written to. Each frame is judged alone, whatever \
the others are. Constants and helpers belong inside the function. Answer with one block of Python."""

REPAIR = "That does not do. {problem}\nMend it, and give the whole answer again."


def plan(client: Client, shown: list[dict], rounds: int) -> tuple[str, dict[str, str]]:
    """Stage 1: pictures -> a description of the scene, and of each sub-task, by name, when it is done."""
    messages = [message("user", PLAN.format(n=len(shown) // 2), shown)]
    for _ in range(rounds + 1):
        answer = client.ask(messages)
        try:
            found = json.loads(answer[answer.index("{") : answer.rindex("}") + 1])
            description = plain(found["description"])
            subtasks = {subtask["name"]: plain(subtask["what"]) for subtask in found["subtasks"]}
            check("".join(f"def {name}(frames): pass\n" for name in subtasks))
            named = all(re.fullmatch("[a-z][a-z0-9_]*", name) and what for name, what in subtasks.items())
            if named and 2 <= len(subtasks) == len(found["subtasks"]) <= 5:
                return description, subtasks
            problem = "There must be 2 to 5 sub-tasks, each with a name of its own, of a-z, 0-9 and _."
        except Exception as error:  # whatever it answered instead
            problem = f"The answer must end with that JSON object ({plain(repr(error))[:300]})."
        messages += [message("assistant", answer), message("user", REPAIR.format(problem=problem))]
    raise UsageError(f"no plan after {rounds + 1} answers: {problem}")


def function(answer: str, name: str) -> str:
    """The function in an answer -> its source; ProgramError if it is not just that."""
    *_, block = re.findall(r"```[A-Za-z0-9]*[ \t\r]*\n(.*?)```", answer, re.DOTALL) or [""]
    source = re.sub(r"^import numpy as np\n", "", block, flags=re.MULTILINE).strip() + "\n"
    match check(source).body:
        case [ast.FunctionDef(name=found, args=taken)] if found == name and ast.unparse(taken) == "frames":
            return source
    raise ProgramError(f"It must hold one whole block, of the function {name}(frames) and nothing else.")


def program_of(functions: dict[str, str], args: Args, about: str = "") -> str:
    about = plain(f"{about} Written by {args.model}.").replace('"', "'").replace("\\", "")
    head = f'"""{about}"""\n\nimport numpy as np\n\nSIZE = {args.size[0]}, {args.size[1]}\n'
    return head + "".join(f"\n\n{source}" for source in functions.values())


def write_function(
    client: Client, messages: list, name: str, before: dict, frames: np.ndarray, args: Args
) -> str | None:
    """Stages 2 to 4 for a sub-task -> its function, or None; frames (2, E, T, H, W, 3), expert and random."""
    for _ in range(args.rounds + 1):
        answer = client.ask(messages)
        pictures = []
        try:
            source = function(answer, name)
            program = program_of(before | {name: source}, args)
            done = verify(program, frames.reshape(-1, *frames.shape[3:])).reshape(-1, *frames.shape[:3])
            expert, random = done[-1]
            ordered = done[:, 0].all(0)  # with the sub-tasks before it
            reached = ordered.any(1).mean()
            shares = f"{expert.mean():.0%} of the expert's frames and {random.mean():.0%} of the random ones"
            if reached < 0.9:
                wrong = frames[0][~ordered]
                problem = f"It is done in {reached:.0%} of the episodes that reach the goal. Not done in:"
            elif random.mean() > expert.mean() / 2:
                wrong = frames[1][random]
                problem = f"It is done in {shares}. Wrong are:"
            else:
                print(f"{name}: done in {shares}, in order in {reached:.0%} of the expert's episodes")
                return source
            pictures = [picture(wrong[i]) for i in np.linspace(0, len(wrong) - 1, 4).astype(int)]
        except ProgramError as error:
            problem = str(error)
        messages += [message("assistant", answer), message("user", REPAIR.format(problem=problem), pictures)]
    print(f"{name}: given up after {args.rounds} repairs: {problem}")


def trajectories(args: Args) -> np.ndarray:
    """-> frames (2, E, T, H, W, 3) uint8 of episodes of a run's last, expert, and its first, random round."""
    settings = settings_of(args.run_dir)
    rounds = rounds_of(args.run_dir)
    if len(rounds) < 2 or rounds[0].stem != "0":
        raise UsageError(f"{args.run_dir} holds one round only, or no longer its first (--buffer-size)")
    states = torch.stack([states_of(rounds[-1]), states_of(rounds[0])])[..., :24]  # numbers that can be seen
    stride = max(1, (states.shape[1] - 1) // 50)
    states = states[:, stride::stride, : args.episodes].transpose(1, 2)  # (2, E, T, S)
    render = renderer(settings, *args.size, 64, torch.device("cpu"))
    frames = torch.cat([render(chunk) for chunk in states.flatten(0, 2).split(64)]).permute(0, 2, 3, 1)
    return frames.reshape(*states.shape[:3], *args.size, 3).numpy()


def main() -> None:
    args = tyro.cli(Args)
    if args.output.suffix != ".py" or args.output.exists():
        raise UsageError(f"--output {args.output} must be a new file NAME.py")
    if not all(8 <= n <= 1024 for n in args.size):
        raise UsageError("--size is two numbers from 8 to 1024")
    frames = trajectories(args)
    shown = [picture(frame) for kind in (1, 0) for frame in frames[kind, :3, -1]]
    client = Client(args.model, args.output.with_suffix(".answers.jsonl"))
    description, subtasks = plan(client, shown, args.rounds)
    about = {"description": description, "n": len(shown) // 2, "height": args.size[0], "width": args.size[1]}
    functions = {}
    for name, what in subtasks.items():
        messages = [message("user", CODE.format(name=name, what=what, **about), shown)]
        source = write_function(client, messages, name, functions, frames, args)
        functions |= {name: source} if source else {}
    if not functions:
        raise UsageError(f"no sub-task passed; {client.path} holds what was asked and answered")
    write(args.output, program_of(functions, args, description))
    print(f"written to {args.output}; read it, then train with --clip-model {args.output}")


if __name__ == "__main__":
    try:
        main()
    except (UsageError, OSError) as error:
        print(f"write.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on with what has been answered", file=sys.stderr)
        sys.exit(130)
