"""The GPU path, without a GPU: tensors that say they are on cuda:0 or cuda:1 refuse to meet others.

Their numbers are on the CPU, so a run with them must end like one on the CPU; and each way between CPU and
GPU is counted. Below, where there is a GPU, the same on it (`device`).
"""

import json
import sys
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import mujoco_warp
import pytest
import torch
import warp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import clip_reward
import dqn_clip_cartpole
import sac_clip_humanoid
import sac_clip_mountaincar
from scale.cuda_graphs import replayed

SCRIPTS = {module.__name__: module for module in (dqn_clip_cartpole, sac_clip_mountaincar, sac_clip_humanoid)}
CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
aten = torch.ops.aten
own_to = torch.Tensor.to
ways = Counter()  # between CPU and GPU: "to GPU", "to CPU"
numbers = []  # Python's own, of each operation


class Cuda(torch.Tensor):
    """A tensor that says it is on a GPU, `device`; `host` holds its numbers."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    __torch_dispatch__ = None  # the Mode makes all operations
    device, is_cuda, is_cpu = None, True, False

    @staticmethod
    def __new__(cls, host: torch.Tensor, device: torch.device):
        layout = {"strides": host.stride(), "storage_offset": host.storage_offset(), "dtype": host.dtype}
        return torch.Tensor._make_wrapper_subclass(cls, host.shape, **layout)

    def __init__(self, host: torch.Tensor, device: torch.device):
        self.host = host
        self.device = device

    def __deepcopy__(self, memo: dict):
        copy = Cuda(self.detach().host.clone(), self.device)
        return torch.nn.Parameter(copy, self.requires_grad) if isinstance(self, torch.nn.Parameter) else copy

    def __reduce_ex__(self, protocol: int):  # in a file it is what `map_location="cpu"` makes of it
        return self.detach().host.__reduce_ex__(protocol)


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """One operation: on the GPU if its tensors are, or if it makes one there."""
        operation, kwargs = func.overloadpacket, kwargs or {}
        leaves = tree_leaves((args, kwargs))
        numbers.append((func, [leaf for leaf in leaves if isinstance(leaf, (int, float))]))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        on_gpu = [isinstance(tensor, Cuda) for tensor in tensors]
        target = kwargs.get("device")
        places = {tensor.device for tensor, there in zip(tensors, on_gpu) if there}
        place = torch.device(target) if target is not None else next(iter(places), CPU)
        gpu = place.type == "cuda"
        assert not gpu or place.index is not None, "which of the two GPUs?"
        if operation in (aten._to_copy, aten.copy_):
            here = on_gpu[0] if operation is aten.copy_ else gpu
            if on_gpu[-1] != here:
                ways["to GPU" if here else "to CPU"] += 1
        elif len(places) > 1:
            raise RuntimeError(f"{func}: tensors on cuda:0 and cuda:1")
        elif operation is aten._local_scalar_dense:
            ways["to CPU"] += any(on_gpu)
        elif operation in (aten.index, aten.index_put_) and on_gpu[0]:
            ways["to GPU"] += on_gpu.count(False)  # a list, or an index on the CPU, is taken there
        elif any(on_gpu) and any(tensor.dim() for tensor, there in zip(tensors, on_gpu) if not there):
            raise RuntimeError(f"{func}: expected all tensors to be on the same device")

        def real(leaf):
            return CPU if isinstance(leaf, torch.device) else getattr(leaf, "host", leaf)

        out = func(*tree_map(real, args), **tree_map(real, kwargs))
        given = {id(real(tensor)): tensor for tensor in tensors}  # comes back from an operation in place

        def wrap(leaf):
            if not gpu or not isinstance(leaf, torch.Tensor):
                return leaf
            return given[id(leaf)] if id(leaf) in given else Cuda(leaf, place)

        return tree_map(wrap, out)


def to(self: torch.Tensor, *args, **kwargs) -> torch.Tensor:
    """Tensor.to, which would ask the driver for a GPU's number, and think that all is on the CPU already."""
    device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    if dtype not in (None, self.dtype) or memory_format is not None:
        self = own_to(self, dtype or self.dtype, memory_format=memory_format)
    if device is None or device == self.device:
        return self
    if device.type == "cuda":
        return own_to(self, device, copy=True)
    ways["to CPU"] += 1
    return self.detach().host.clone()


class Inline(ThreadPoolExecutor):
    """Does what it is given at once: modes hold for one thread."""

    def submit(self, work, *args) -> Future:
        future = Future()
        future.set_result(work(*args))
        return future


class Graph:
    """A CUDA graph: what is recorded is done at once here, and anew at every replay but the first.

    A real one would go on with the numbers that Python had when it was recorded: no others may come.
    """

    made = 0

    def __init__(self):
        Graph.made += 1
        self.recorder = sys._getframe(1).f_locals  # of `replay` in scale/cuda_graphs.py
        self.is_done = True

    def replay(self) -> None:
        if not self.is_done:
            update, arguments, graphs = (self.recorder[name] for name in ("update", "arguments", "graphs"))
            first = len(numbers)
            losses = update(*arguments)
            assert numbers[first:] == self.numbers, "what Python knows has changed since it was recorded"
            for name, loss in losses.items():
                graphs[arguments][1][name].copy_(loss)
        self.is_done = False


@pytest.fixture
def gpu(monkeypatch):
    """A machine with two GPUs, until the test ends."""
    if torch.cuda.is_available():
        pytest.skip("a pretended GPU is for machines without one; here the tests below use the real one")
    tensor, load, get_device = torch.tensor, torch.load, warp.get_device
    to_torch, render = warp.to_torch, mujoco_warp.render
    current, recording = [], []

    def load_on_cpu(path, map_location=None, **how):  # a round was never on a GPU
        assert map_location == "cpu" or "rounds" in path, "what was saved on a GPU would go there again"
        return load(path, map_location=map_location, **how)

    def device_of_scene() -> torch.device:  # that calls one of these:
        return sys._getframe(2).f_locals["self"].device

    def to_torch_there(array):
        device = device_of_scene()
        return to_torch(array) if device == CPU else Cuda(to_torch(array), device)

    def render_there(*args):
        assert str(current[-1]) == str(device_of_scene()), "would be rendered on another device"
        render(*args)

    @contextmanager
    def current_device(device):
        current.append(device)
        yield
        current.pop()

    @contextmanager
    def record(graph, capture_error_mode):
        assert current[-1] == CUDA and capture_error_mode == "thread_local"
        first = len(numbers)
        recording.append(graph)
        yield
        recording.pop()
        graph.numbers = numbers[first:]

    def check(optimizer):
        assert not recording or all(group["capturable"] for group in optimizer.param_groups)

    def group(lists, *_):
        return {(lists[0][0].device, None): (lists, None)}

    quiet = "torch.cuda._lazy_init", "torch.cuda.current_stream", "warp.set_stream", "warp.stream_from_torch"
    fakes = dict.fromkeys(quiet, lambda *_: None) | {
        "torch.__future__.get_overwrite_module_params_on_conversion": lambda: True,
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.device_count": lambda: 2,
        "torch.tensor": lambda data, device="cpu", **how: tensor(data, **how).to(device),
        "torch.Tensor.to": to,
        "torch.Tensor.cpu": lambda tensor: to(tensor, "cpu"),
        "torch.load": load_on_cpu,
        "torch.optim.Optimizer._group_tensors_by_device_and_dtype": group,
        "torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype": group,
        "warp.is_cuda_available": lambda: True,
        "warp.get_device": lambda name=None: name if "cuda" in str(name) else get_device(name),
        "warp.set_device": current.append,
        "warp.to_torch": to_torch_there,
        "mujoco_warp.render": render_there,
        "clip_reward.ThreadPoolExecutor": Inline,
        "torch.optim.Optimizer._accelerator_graph_capture_health_check": check,
        "torch.cuda.CUDAGraph": Graph,
        "torch.cuda.graph": record,
        "torch.cuda.device": current_device,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(name, fake)
    ways.clear()
    numbers.clear()
    Graph.made = 0
    with Mode():
        yield


SHORT = """--total-timesteps 72 --num-envs 3 --episode-length 6 --learning-starts 18 --gradient-steps 6
    --evaluate-every 36 --episodes 3 --seed 3 --clip-batch-size 6 --precision fp32"""


@pytest.fixture
def run(call, monkeypatch):
    """A function that runs a script in this process and returns the figures that it has left in a file."""
    monkeypatch.setattr("imageio.v3.imopen", MagicMock())

    def run(module: ModuleType, options: str, path: Path | None = None) -> dict:
        call(module, *options.split())
        figures = json.loads(path.read_text()) if path else {}
        figures.pop("settings", None)
        return figures

    return run


def interrupted_and_evaluated(run, module: ModuleType, device: str, folder: Path) -> list[dict]:
    """Figures of a run there, interrupted in its third round and resumed, and of its best policy on both."""

    def stop(path, save=module.save, **content):
        if path.endswith("rounds/2.pt"):
            raise KeyboardInterrupt
        save(path, **content)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "save", stop)
        run(module, f"{SHORT} --device {device} --run-dir {folder}")
    found = [run(module, f"--resume {folder}", folder / "result.json")]
    for place in ("cpu", device):
        options = f"--evaluate {folder}/best.pt --episodes 3 --device {place}"
        found.append(run(module, options, folder / "best_evaluation.json"))
    return found


def watch(module: ModuleType, monkeypatch) -> None:
    """No update leaves the GPU; a batch of labels does so for its states, rewards and conditions alone."""

    def limit(where, name: str, most: dict) -> None:
        own = getattr(where, name)

        def counted(*args):
            before = ways.copy()
            result = own(*args)
            assert ways - before <= Counter(most), ways - before
            return result

        monkeypatch.setattr(where, name, counted)

    limit(module, "dqn_update" if hasattr(module, "dqn_update") else "sac_update", {})
    limit(getattr(module, "ReplayBuffer", module), "sample", {})
    back = 2 if hasattr(module, "Humanoids") else 1
    limit(module.Worker, "label", {"to GPU": 1, "to CPU": back})


@pytest.mark.slow("humanoid", "mountaincar")
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_on_two_gpus_is_that_on_a_cpu(script, run, gpu, tmp_path, monkeypatch):
    module, folder = SCRIPTS[script], tmp_path / "cpu"
    expected = run(module, f"{SHORT} --device cpu --run-dir {folder}", folder / "result.json")
    assert not ways.total()
    watch(module, monkeypatch)
    assert interrupted_and_evaluated(run, module, "cuda", tmp_path / "gpu") == [expected] * 3
    assert ways["to GPU"] and ways["to CPU"]
    kinds = 2 if hasattr(module, "Humanoids") else 1  # of updates: each is recorded once a round
    assert Graph.made == kinds * 4  # rounds that learn: the second, the third twice, the last


DEFECTS = [
    ("dqn_clip_cartpole", "target_network = deepcopy(q_network)", "target_network = QNetwork()"),
    ("dqn_clip_cartpole", "device = labeller.device", "device = torch.device(args.device)"),
    ("dqn_clip_cartpole", "policy = deepcopy(target_network).cpu()", "policy = deepcopy(target_network)"),
    ("dqn_clip_cartpole", "(args.batch_size,), device=rewards.device)", "(args.batch_size,))"),
    ("dqn_clip_cartpole", "torch.stack([rewards.cpu(), ", "torch.stack([rewards, "),
    ("dqn_clip_cartpole", "replayed(update, device)", "vars(args).setdefault(0, replayed(update, device))"),
    ("dqn_clip_cartpole", ', "capturable": True', ""),
    ("dqn_clip_cartpole", 'map_location="cpu", ', ""),
    ("sac_clip_mountaincar", "torch.arange(columns, device=self.device)", "torch.arange(columns)"),
    ("sac_clip_mountaincar", "torch.randn_like(actions)", "torch.randn(actions.shape)"),
    ("sac_clip_mountaincar", "value.detach() for", "value.detach().cpu() for"),
    ("sac_clip_humanoid", "2:].flatten(0, 1).to(device))", "2:].flatten(0, 1))"),
    ("sac_clip_humanoid", "with self.lock:\n                wp.set_device(self.warp_device)", "if True:"),
    ("sac_clip_humanoid", "GEOM_POINTS.values()], device=device)", "GEOM_POINTS.values()])"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("script", "right", "wrong"), DEFECTS)
def test_what_would_be_wrong_on_a_gpu_is_found(script, right, wrong, run, gpu, tmp_path, monkeypatch):
    source = Path(SCRIPTS[script].__file__).read_text()
    assert right in source
    module = ModuleType(script)
    module.__file__ = SCRIPTS[script].__file__
    monkeypatch.setitem(sys.modules, script, module)
    exec(source.replace(right, wrong), module.__dict__)
    watch(module, monkeypatch)
    with pytest.raises((RuntimeError, AssertionError, TypeError, clip_reward.UsageError)):
        run(module, f"{SHORT} --device cuda --run-dir {tmp_path}/run")


@pytest.mark.parametrize("clip_model", ["tiny", clip_reward.HERE / "code_reward/programs/cartpole.py"])
def test_two_gpus_have_the_same_model_loaded_once(clip_model, gpu, monkeypatch):
    """A reward program stays on the CPU."""
    module, states = dqn_clip_cartpole, some_states(dqn_clip_cartpole)
    make_reward = MagicMock(side_effect=clip_reward.make_reward)
    monkeypatch.setattr(module, "make_reward", make_reward)
    labeller = clip_reward.Labeller(module.Worker, settings(module, "cuda", clip_model))
    make_reward.assert_called_once()
    labeller.add(states)
    labels = labeller.result()
    places = {labeller.free.get().reward_model.device for _ in range(2)}
    assert places == ({CUDA, torch.device("cuda", 1)} if clip_model == "tiny" else {CPU})
    alone = module.Worker(settings(module, "cpu", clip_model), CPU).label(states)
    torch.testing.assert_close(labels, alone)


def test_a_driver_that_warp_cannot_use_is_said(gpu, monkeypatch):
    monkeypatch.setattr("warp.is_cuda_available", lambda: False)
    with pytest.raises(clip_reward.UsageError, match="driver 580"):
        sac_clip_humanoid.Worker(settings(sac_clip_humanoid, "cuda"), CUDA)


# ---- On the device itself, the GPU where there is one


@pytest.fixture(params=["cpu", "cuda"])
def device(request) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a real GPU; on the CPU the same test runs")
    return request.param


def some_states(module: ModuleType) -> torch.Tensor:
    size = {dqn_clip_cartpole: 4, sac_clip_mountaincar: 2, sac_clip_humanoid: 24}[module]
    return torch.rand(21, size, generator=torch.Generator().manual_seed(1)) - 0.5


def settings(module: ModuleType, device: str, clip_model: str | Path = "tiny"):
    """Of a reward of each kind: contrastive, α = 0.5, α = 0."""
    contrast = {"negative_prompt": ("pole and cart",), "temperature": 0.5}
    own = contrast if module is dqn_clip_cartpole else {}
    options = {"device": device, "clip_model": str(clip_model), "precision": "fp32"}
    return module.Args(clip_batch_size=10, **options, **own)


@pytest.mark.parametrize("script", SCRIPTS)
def test_frames_and_rewards_are_those_of_a_cpu_in_the_order_of_the_states(script, device):
    """Frames to 2 of 255; at the edges of what is ray-traced a ray may just miss on one of the two."""
    module, states = SCRIPTS[script], some_states(SCRIPTS[script])
    labeller = clip_reward.Labeller(module.Worker, settings(module, device))
    for part in states.split(9):
        labeller.add(part)
    together = labeller.result()  # threads render no more: Warp has one device at a time
    here = module.Worker(settings(module, "cpu"), CPU)
    alone = torch.cat([here.label(state[None]) for state in states])
    assert alone[:, 0].std() > 0.01
    torch.testing.assert_close(together, alone, atol=5e-3, rtol=0)

    frames = []
    for worker in (here, labeller.free.get()):
        worker.reward_model.register_forward_pre_hook(lambda _, seen: frames.append(seen[0].cpu().int()))
        worker.label(states)
    apart = (frames[0] - frames[1]).abs() > 2
    assert apart.float().mean() <= (1e-3 if script == "sac_clip_humanoid" else 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a real GPU; above one is pretended")
@pytest.mark.parametrize("script", SCRIPTS)
def test_updates_that_a_gpu_replays_are_those_that_it_does_not(script, tmp_path, run, monkeypatch):
    """A run ends with the same weights, and so had the same samples and noise."""
    module = SCRIPTS[script]
    found = []
    for wrap in (replayed, lambda update, device: update):
        monkeypatch.setattr("scale.cuda_graphs.replayed", wrap)
        folder = tmp_path / str(len(found))
        run(module, f"{SHORT} --device cuda --run-dir {folder}")
        found.append(torch.load(folder / "checkpoint.pt", map_location="cpu", weights_only=True)["policy"])
    torch.testing.assert_close(*found)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_there_is_resumed_and_its_policy_plays_on_both(script, run, device, tmp_path):
    found = interrupted_and_evaluated(run, SCRIPTS[script], device, tmp_path / "run")
    returns = [figures["clip_return"] for figures in found]
    assert returns == pytest.approx([returns[0]] * 3, rel=0.05)
