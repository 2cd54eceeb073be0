"""Reward programs: a few lines of NumPy that say of frames which sub-tasks are done, written by a vision-language model or by hand.

A program is a file like those in programs/: `import numpy as np`, `SIZE = height, width` of the frames that it was written for, perhaps
other constants and functions, and for each sub-task, in their order, one that takes `frames` (N, H, W, 3) uint8 to N booleans.

It is text from outside. `check` reads it before anything runs and lets nothing through that is not on the lists below; `verify` runs it
for the first time, in a process of its own with limits on time and memory. Training runs what has been checked, with nothing in reach but
NumPy and the built-in functions of the list. That keeps arithmetic from becoming anything else; it is no proof against all malice.
"""

import ast
import builtins
import hashlib
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

SYNTAX = set(
    """Module FunctionDef arguments arg Import alias Return Assign AugAssign Expr If For Break Continue Pass Lambda Name Load
    Store Constant Tuple List Subscript Slice Attribute Call keyword IfExp Compare BoolOp BinOp UnaryOp ListComp GeneratorExp
    comprehension And Or Not Invert USub UAdd Add Sub Mult Div FloorDiv Mod Pow MatMult BitAnd BitOr BitXor LShift RShift Eq NotEq Lt
    LtE Gt GtE Is IsNot In NotIn""".split()
)
BUILTINS = "abs all any bool enumerate float int len list max min range reversed round sorted sum tuple zip".split()
ATTRIBUTES = set(  # of NumPy and of its arrays: what computes, nothing that reads, writes, formats, or leads elsewhere
    """abs absolute all any arange arctan arctan2 argmax argmin argsort array asarray astype bincount bool_ broadcast_to ceil clip
    concatenate copy cos count_nonzero cumsum deg2rad degrees diff divide dot exp expand_dims flatten flip float32 float64 floor
    full full_like greater greater_equal hypot inf int16 int32 int64 isclose isfinite isnan less less_equal linalg linspace log logical_and
    logical_not logical_or logical_xor max maximum mean median meshgrid min minimum moveaxis nan nan_to_num nanmax nanmean nanmin
    ndim newaxis nonzero norm ones ones_like percentile pi power prod quantile rad2deg radians ravel repeat reshape roll round
    shape sign sin size sort sqrt square squeeze stack std sum swapaxes take tan tile T transpose uint8 var where zeros
    zeros_like""".split()
)
SECONDS, MEMORY = 10, 2**31  # of `verify`; MEMORY in bytes, of addresses


class ProgramError(Exception):
    """What is wrong with a program, in one line."""


def check(source: str) -> ast.Module:
    """The syntax tree of a program that consists of nothing but what is on the lists; else ProgramError, with the line."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ProgramError(f"not Python: {error}") from None
    for node in ast.walk(tree):  # annotations would be evaluated
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
    nodes = list(ast.walk(tree))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}

    def refuse(node: ast.AST, what: str) -> None:
        raise ProgramError(f"line {getattr(node, 'lineno', 1)}: {what} is not allowed")

    for node in nodes:
        if type(node).__name__ not in SYNTAX:
            refuse(node, type(node).__name__)
        elif isinstance(node, ast.Import) and ast.unparse(node) != "import numpy as np":
            refuse(node, ast.unparse(node))
        elif isinstance(node, ast.Attribute) and (node.attr not in ATTRIBUTES or not isinstance(node.ctx, ast.Load)):
            refuse(node, f".{node.attr}")
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in {*BUILTINS, "np"} | bound:
            refuse(node, node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str | bytes) and id(node) not in docstrings:
            refuse(node, "text")  # a dtype in words can show memory
        elif isinstance(node, ast.FunctionDef) and node.decorator_list:
            refuse(node, "a decorator")
    for name in bound:
        if name.startswith("_") and name != "_" or name in BUILTINS or name == "np":
            raise ProgramError(f"the name {name} is not allowed")
    return tree


def import_numpy(name: str, *how) -> object:
    """The only `__import__` in reach (NumPy itself needs one)."""
    if name.split(".")[0] != "numpy":
        raise ImportError(f"{name} is not NumPy")
    return __import__(name, *how)


def load(source: str) -> tuple[tuple[int, int], dict[str, Callable]]:
    """A checked program -> (height, width) of its frames, and its sub-tasks by name, in order."""
    tree = check(source)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    names = [node.name for node in functions if ast.unparse(node.args) == "frames"]
    scope = {"__builtins__": {name: getattr(builtins, name) for name in BUILTINS} | {"__import__": import_numpy}}
    try:
        exec(compile(tree, "program", "exec"), scope)
    except Exception as error:
        raise ProgramError(f"{type(error).__name__}: {error}".split("\n")[0]) from None
    size = scope.get("SIZE")
    if not (isinstance(size, tuple) and len(size) == 2 and all(type(n) is int and 8 <= n <= 1024 for n in size)):
        raise ProgramError("SIZE must be a height and a width between 8 and 1024, as in SIZE = 100, 150")
    if not 1 <= len(names) <= 9:
        raise ProgramError("it needs one to nine functions of `frames`, one for each sub-task")
    return size, {name: scope[name] for name in names}


def run(subtasks: dict[str, Callable], frames: np.ndarray) -> np.ndarray:
    """Frames (N, H, W, 3) uint8, which cannot be written to -> whether each sub-task is done (K, N) bool; ProgramError if one fails."""
    done = []
    for name, subtask in subtasks.items():
        try:
            value = subtask(frames)
        except Exception as error:
            raise ProgramError(f"{name}: {type(error).__name__}: {error}".split("\n")[0][:300]) from None
        if not (isinstance(value, np.ndarray) and value.dtype == bool and value.shape == (len(frames),)):
            given = f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
            raise ProgramError(f"{name} must return a boolean array of shape (N,), here ({len(frames)},), not {given}")
        done.append(value)
    return np.stack(done)


def in_order(done: np.ndarray) -> np.ndarray:
    """(K, N) -> (K, N): a sub-task counts where all before it in the list are done in the same frame, too."""
    return np.logical_and.accumulate(done, axis=0)


def verify(source: str, frames: np.ndarray | None = None) -> np.ndarray:
    """`check` and `run` (on two black frames if there are none), the latter in a process of its own with limits: SECONDS, MEMORY."""
    check(source)
    with tempfile.TemporaryDirectory() as folder:
        program, data, answer = (f"{folder}/{name}" for name in ("program.py", "frames.npy", "done.npy"))
        Path(program).write_text(source)
        if frames is not None:
            np.save(data, frames)
        command = [sys.executable, "-I", __file__, program, data, answer, str(SECONDS)]
        env = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PATH": os.defpath}
        try:
            ended = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=2 * SECONDS)
        except subprocess.TimeoutExpired:
            raise ProgramError(f"it takes longer than {SECONDS} s") from None
        if ended.returncode < 0:  # a signal: the kernel's answer to too much time
            raise ProgramError(f"it takes longer than {SECONDS} s, or crashes (signal {-ended.returncode})")
        if ended.returncode:
            raise ProgramError((ended.stderr.strip().splitlines() or ["it ends without a word"])[-1][:300])
        return np.load(answer, allow_pickle=False)


def main() -> None:
    """The process that `verify` starts: PROGRAM FRAMES ANSWER SECONDS."""
    program, data, answer, seconds = sys.argv[1:]
    source, frames = Path(program).read_text(), np.load(data, mmap_mode="r") if os.path.exists(data) else None
    for limit, most in ("CPU", int(seconds)), ("AS", MEMORY), ("FSIZE", 2**24), ("NPROC", 0), ("CORE", 0):
        resource.setrlimit(getattr(resource, f"RLIMIT_{limit}"), (most, most))
    try:
        size, subtasks = load(source)
        frames = np.zeros((2, *size, 3), np.uint8) if frames is None else frames
        frames.flags.writeable = False
        done = run(subtasks, frames)
        if (run(subtasks, frames[::2]) != done[:, ::2]).any():  # states are labelled in batches of any kind
            raise ProgramError("what it says of a frame depends on the frames beside it")
        np.save(answer, done)
    except ProgramError as error:
        sys.exit(str(error))


class ProgramReward:
    """A reward model like `CLIPReward`: frames (N, 3, H, W) uint8 -> rewards (N,), how many sub-tasks are done, in order.

    VLM-CaR (Venuto et al., ICML 2024) pays 1 for each sub-task. A frame alone has to tell what it is worth here, since transitions are
    labelled in any order; so a sub-task is paid in every frame in which it and all before it are done, not once in an episode.
    """

    def __init__(self, path: str):
        import torch

        from clip_reward import UsageError

        self.device, self.path, self.UsageError = torch.device("cpu"), path, UsageError
        try:
            source = Path(path).read_text()
            verify(source)
            self.size, self.subtasks = load(source)
        except Exception as error:
            raise UsageError(f"{path} is no reward program: {error}") from None
        digest = hashlib.sha256(source.encode()).hexdigest()
        print(f"reward program {path}, sha256 {digest[:16]}, is what runs here: {', '.join(self.subtasks)}")

    def __call__(self, frames):
        import torch

        pixels = frames.cpu().permute(0, 2, 3, 1).numpy()
        pixels.flags.writeable = False
        try:
            return torch.from_numpy(in_order(run(self.subtasks, pixels)).sum(0)).float()
        except ProgramError as error:
            raise self.UsageError(f"{self.path} fails: {error}") from None


if __name__ == "__main__":
    main()
