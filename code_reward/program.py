"""Reward programs: a few lines of NumPy that say which sub-tasks are done in a frame.

A program is a file like those in programs/: `import numpy as np`, `SIZE = height, width` of the frames that
it was written for, perhaps other constants and functions, and for each sub-task, in order, a function from
`frames` (N, H, W, 3) uint8 to N booleans. It is text from outside: `check` reads it before anything runs and
lets nothing through that is not on the lists below; `verify` runs it for the first time, in a process of its
own with limits on time and memory (on macOS on time alone). Training runs what has been verified, with
nothing in reach but NumPy and the built-in functions of the list. That keeps arithmetic from becoming anything
else; it is no proof against all malice.
"""

import ast
import builtins
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

if __name__ != "__main__":  # the process that `verify` starts does without
    import torch

SYNTAX = set(
    """Module FunctionDef arguments arg Import alias Return Assign AugAssign Expr If For Break Continue Pass
    Lambda Name Load Store Constant Tuple List Subscript Slice Attribute Call keyword IfExp Compare BoolOp
    BinOp UnaryOp ListComp GeneratorExp comprehension And Or Not Invert USub UAdd Add Sub Mult Div FloorDiv
    Mod Pow MatMult BitAnd BitOr BitXor LShift RShift Eq NotEq Lt LtE Gt GtE Is IsNot In NotIn""".split()
)
DEPTH = 100  # levels of the syntax tree; with more, Python's own functions give up
NAMES = """abs all any bool enumerate float int len list max min range reversed round sorted sum tuple
    zip""".split()
# Of NumPy and its arrays: what computes; nothing that reads, writes, formats or leads elsewhere. Left out are
# repeat, tile, bincount and broadcast_to: with huge numbers NumPy writes beyond their results, and crashes.
ATTRIBUTES = set(
    """abs absolute all any arange arctan arctan2 argmax argmin argsort array asarray astype bool_ ceil clip
    concatenate copy cos count_nonzero cumsum deg2rad degrees diff divide dot exp expand_dims flatten flip
    float32 float64 floor full full_like greater greater_equal hypot inf int16 int32 int64 isclose isfinite
    isnan less less_equal linalg linspace log logical_and logical_not logical_or logical_xor max maximum mean
    median meshgrid min minimum moveaxis nan nan_to_num nanmax nanmean nanmin ndim newaxis nonzero norm ones
    ones_like percentile pi power prod quantile rad2deg radians ravel reshape roll round shape sign sin size
    sort sqrt square squeeze stack std sum swapaxes take tan T transpose uint8 var where zeros
    zeros_like""".split()
)
SECONDS = 10  # that `verify` gives a program
MEMORY = 2**31  # bytes of addresses, likewise


class ProgramError(Exception):
    """What is wrong with a program, in one line."""


def check(source: str) -> ast.Module:
    """-> the syntax tree of a program that holds only what is on the lists; or ProgramError."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ProgramError(f"not Python: {error}") from None
    for node in ast.walk(tree):  # annotations would be evaluated
        node.returns = None
        node.annotation = None
    nodes, level = [], [tree]
    for _ in range(DEPTH):
        nodes += level
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    if level:
        raise ProgramError("it is nested too deeply")
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    for node in nodes:
        match node:
            case ast.Import() if ast.unparse(node) != "import numpy as np":
                what = ast.unparse(node)
            case ast.Attribute() if node.attr not in ATTRIBUTES or isinstance(node.ctx, ast.Store):
                what = f".{node.attr}"
            case ast.Name(ctx=ast.Load()) if node.id not in {*NAMES, "np", *bound}:
                what = node.id
            case ast.Constant(value=str() | bytes()) if id(node) not in docstrings:
                what = "text"  # a dtype in words can show memory
            case ast.keyword(arg="out" | "where" | None):  # what they leave out is what was in memory before
                what = f"{node.arg}="
            case ast.FunctionDef() if node.decorator_list:
                what = "a decorator"
            case _ if type(node).__name__ not in SYNTAX:
                what = type(node).__name__
            case _:
                continue
        raise ProgramError(f"line {getattr(node, 'lineno', 1)}: {what} is not allowed")
    for name in bound:
        if name.startswith("_") and name != "_" or name in {*NAMES, "np"}:
            raise ProgramError(f"the name {name} is not allowed")
    return tree


def import_numpy(name: str, *how) -> object:
    """The only `__import__` in reach (NumPy itself needs one)."""
    if name.split(".")[0] != "numpy":
        raise ImportError(f"{name} is not NumPy")
    return __import__(name, *how)


class Program:
    """A checked program. It begins anew with each batch: nothing of one is there in the next."""

    def __init__(self, source: str):
        tree = check(source)
        self.code = compile(tree, "program", "exec")
        self.warned = {}  # what NumPy has warned of, so that it does once only
        self.size, self.subtasks = (0, 0), []
        for node in tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id="SIZE")], value=ast.Tuple()):
                    self.size = ast.literal_eval(node.value)
                case ast.FunctionDef() if ast.unparse(node.args) == "frames":
                    self.subtasks.append(node.name)
        if len(self.size) != 2 or not all(8 <= n <= 1024 for n in self.size) or not self.subtasks:
            raise ProgramError("it needs SIZE = height, width, from 8 to 1024, and functions of `frames`")

    def __call__(self, frames: np.ndarray) -> np.ndarray:
        """Frames (N, H, W, 3) uint8 -> whether each sub-task is done (K, N) bool; or ProgramError."""
        frames = frames.view()
        frames.flags.writeable = False
        reach = {name: getattr(builtins, name) for name in NAMES} | {"__import__": import_numpy}
        scope = {"__builtins__": reach, "__warningregistry__": self.warned}
        done, name = [], "its text"
        try:
            exec(self.code, scope)
            for name in self.subtasks:
                done.append(scope[name](frames))
        except Exception as error:
            raise ProgramError(f"{name}: {type(error).__name__}: {error}".split("\n")[0][:300]) from None
        for name, value in zip(self.subtasks, done):
            if not isinstance(value, np.ndarray) or value.dtype != bool or value.shape != (len(frames),):
                given = f"{type(value).__name__} {getattr(value, 'dtype', '')} {getattr(value, 'shape', '')}"
                raise ProgramError(f"{name} must return (N,) booleans, here ({len(frames)},), not {given}")
        return np.stack(done)


def verify(source: str, frames: np.ndarray | None = None) -> np.ndarray:
    """`check` and `try_out`, the latter in a process of its own with limits: SECONDS, MEMORY."""
    check(source)
    with tempfile.TemporaryDirectory() as folder:
        program, data, answer = (f"{folder}/{name}" for name in ("program.py", "frames.npy", "done.npy"))
        Path(program).write_text(source, "utf-8")
        if frames is not None:
            np.save(data, frames)
        command = [sys.executable, "-I", __file__, program, data, answer, str(SECONDS)]
        env = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PATH": os.defpath}
        end = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)
        if end.returncode < 0:  # a signal: the kernel's answer to too much time
            raise ProgramError(f"it takes longer than {SECONDS} s, or crashes (signal {-end.returncode})")
        if end.returncode:
            *_, last = end.stderr.splitlines()  # of the traceback
            raise ProgramError(last.removeprefix("ProgramError: ")[:300])
        return np.load(answer, allow_pickle=False)


def made_up(height: int, width: int) -> np.ndarray:
    """Frames (N, H, W, 3) uint8: black, white, noise, and boxes on grounds that change their color."""
    rng = np.random.default_rng(0)
    count = min(max(2**24 // (3 * height * width), 8), 64)
    frames = rng.integers(256, size=(count, height, width, 3), dtype=np.uint8)
    frames[0] = 0
    frames[1] = 255
    for frame in frames[3:]:
        left, right, box = rng.integers(256, size=(3, 3))
        frame[:] = left + (right - left) * np.linspace(0, 1, width)[:, None]
        (top, bottom), (first, last) = (np.sort(rng.integers(side + 1, size=2)) for side in (height, width))
        frame[top:bottom, first:last] = box
    return frames


def try_out(program: Program, frames: np.ndarray) -> np.ndarray:
    """Run a program -> (K, N). It must say the same of a frame in any batch, as training makes them."""
    done = program(frames)
    some = np.linspace(0, len(frames) - 1, min(len(frames), 64)).astype(int)
    batches = [some, some[::-1], some[::2], some[1::2], *np.array_split(some, 2), *some[:8, None]]
    for batch in 2 * batches:  # a second time, with other things in memory
        if len(batch) and (program(frames[batch]) != done[:, batch]).any():
            raise ProgramError("what it says of a frame depends on the frames beside it, or on chance")
    return done


def main() -> None:
    """The process that `verify` starts: PROGRAM FRAMES ANSWER SECONDS."""
    path, data, answer, seconds = sys.argv[1:]
    for name, most in {"CPU": int(seconds), "AS": MEMORY, "FSIZE": 2**24, "NPROC": 0, "CORE": 0}.items():
        try:
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
        except (ValueError, OSError):
            if name != "AS":  # macOS has no such limit
                raise
    program = Program(Path(path).read_text("utf-8"))
    done = try_out(program, made_up(*program.size))
    if os.path.exists(data):
        done = try_out(program, np.load(data))
    np.save(answer, done)


class ProgramReward:
    """A reward model like `CLIPReward`: frames (N, 3, H, W) uint8 -> rewards (N,), the sub-tasks done.

    VLM-CaR (Venuto et al., ICML 2024) rewards each sub-task once. Here a frame has to tell its reward alone,
    as states are rewarded in any order: a sub-task counts in each frame in which it and all before it are
    done.
    """

    def __init__(self, path: str, error: type[Exception]):
        self.path = path
        self.error = error  # raised with one line for the user
        self.device = torch.device("cpu")
        try:
            source = Path(path).read_text("utf-8")
            verify(source)
            self.program = Program(source)
        except (ProgramError, OSError, UnicodeDecodeError) as wrong:
            raise error(f"{path} is no reward program: {wrong}") from None
        self.size = self.program.size
        print(f"{path} runs here: {', '.join(self.program.subtasks)}")

    def to(self, device: "torch.device") -> "ProgramReward":
        return self  # programs run on the CPU

    def __call__(self, frames: "torch.Tensor") -> "torch.Tensor":
        try:
            done = self.program(frames.cpu().permute(0, 2, 3, 1).numpy())
        except ProgramError as wrong:
            raise self.error(f"{self.path} fails: {wrong}") from None
        return torch.from_numpy(np.logical_and.accumulate(done).sum(0)).float()


if __name__ == "__main__":
    main()
