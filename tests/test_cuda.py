"""The GPU path, without a GPU: tensors that say they are on cuda:0 or cuda:1 refuse to meet others.

Their numbers are on the CPU, so a run with them must end like one on the CPU; and each way between CPU and
GPU is counted. Below, where there is a GPU, the same on it (`device`).
"""

import json
import sys
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from types import ModuleType, SimpleNamespace

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
from benchmarks import throughput

SCRIPTS = {module.SCRIPT: module for module in (dqn_clip_cartpole, sac_clip_mountaincar, sac_clip_humanoid)}
CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
aten = torch.ops.aten
own_to = torch.Tensor.to
ways = Counter()  # between CPU and GPU: "to GPU", "to CPU", "item"
moved = []  # bytes of each
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
        numbers.append(
            (func, [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, (int, float))])
        )
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_gpu = [isinstance(tensor, Cuda) for tensor in tensors]
        target = kwargs.get("device")
        places = {tensor.device for tensor, there in zip(tensors, on_gpu) if there}
        place = torch.device(target) if target is not None else next(iter(places), CPU)
        gpu = place.type == "cuda"
        assert not gpu or place.index is not None, "which of the two GPUs?"
        if len(places) > 1 and operation not in (aten._to_copy, aten.copy_):
            raise RuntimeError(f"{func}: tensors on cuda:0 and cuda:1")
        if operation in (aten._to_copy, aten.copy_):
            here = on_gpu[0] if operation is aten.copy_ else gpu
            if on_gpu[-1] != here:
                ways["to GPU" if here else "to CPU"] += 1
                moved.append(tensors[-1].numel() * (kwargs.get("dtype") or tensors[-1].dtype).itemsize)
        elif operation is aten._local_scalar_dense:
            ways["item"] += any(on_gpu)
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
        self.recorder = sys._getframe(1).f_locals  # of `replay` in clip_reward.py
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


@pytest.fixture(params=[2], ids=["two"])
def gpu(request, monkeypatch):
    """A machine with GPUs, until the test ends."""
    if torch.cuda.is_available():
        pytest.skip("a pretended GPU is for machines without one; here the tests below use the real one")
    tensor, load, get_device = torch.tensor, torch.load, warp.get_device
    to_torch, render, current = warp.to_torch, mujoco_warp.render, []
    recording = []

    def load_on_cpu(*args, map_location=None, **how):
        assert map_location == "cpu", "what was saved on a GPU would go there again"
        return load(*args, map_location=map_location, **how)

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
        "torch.cuda.device_count": lambda: request.param,
        "torch.cuda.get_device_capability": lambda *_: (9, 0),
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
    moved.clear()
    numbers.clear()
    Graph.made = 0
    with Mode():
        yield


@pytest.fixture
def run(monkeypatch):
    """A function that runs a script in this process and returns the figures that it has left in a file."""
    monkeypatch.setattr("imageio.v3.imwrite", lambda *_, **__: None)  # films take long

    def run(module: ModuleType, options: str, path: Path | None = None) -> dict:
        monkeypatch.setattr(sys, "argv", [f"{module.SCRIPT}.py", *options.split()])
        module.main()
        result = json.loads(path.read_text()) if path else {}
        return {name: value for name, value in result.items() if name not in ("settings", "versions")}

    return run


SHORT = """--total-timesteps 240 --num-envs 4 --episode-length 15 --learning-starts 60 --gradient-steps 6
    --evaluate-every 120 --episodes 3 --seed 3 --clip-model tiny --clip-batch-size 15 --precision fp32"""


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
    limit(module.ReplayBuffer, "sample", {})
    back = 2 if module.SCRIPT == "sac_clip_humanoid" else 1
    limit(module.Worker, "label", {"to GPU": 1, "to CPU": back})


@pytest.mark.slow("humanoid", "mountaincar")
@pytest.mark.parametrize("gpu", [1, 2], indirect=True)
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_on_gpus_is_that_on_a_cpu(script, run, gpu, tmp_path, monkeypatch):
    module, folder = SCRIPTS[script], tmp_path / "cpu"
    expected = run(module, f"{SHORT} --device cpu --run-dir {folder}", folder / "result.json")
    assert not ways.total()
    watch(module, monkeypatch)
    assert interrupted_and_evaluated(run, module, "cuda", tmp_path / "gpu") == [expected] * 3
    assert ways["to GPU"] and ways["to CPU"]


DEFECTS = [
    ("dqn_clip_cartpole", "target_network = deepcopy(q_network)", "target_network = QNetwork(args)"),
    ("dqn_clip_cartpole", "device = labeller.device", "device = torch.device(args.device)"),
    ("dqn_clip_cartpole", "policy = deepcopy(target_network).cpu()", "policy = deepcopy(target_network)"),
    ("dqn_clip_cartpole", "(batch_size,), device=self.rewards.device)", "(batch_size,))"),
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


@pytest.mark.slow("humanoid", "map_location")
@pytest.mark.parametrize(("script", "right", "wrong"), DEFECTS)
def test_what_would_be_wrong_on_a_gpu_is_found(script, right, wrong, run, gpu, tmp_path, monkeypatch):
    source = Path(SCRIPTS[script].__file__).read_text()
    assert right in source
    module = ModuleType(script)
    module.__file__ = SCRIPTS[script].__file__
    monkeypatch.setitem(sys.modules, script, module)
    exec(source.replace(right, wrong), module.__dict__)
    watch(module, monkeypatch)
    with pytest.raises((RuntimeError, AssertionError, TypeError)):
        run(module, f"{SHORT} --device cuda --run-dir {tmp_path}/run")


def test_weights_go_to_the_gpu_in_their_precision(gpu):
    model = clip_reward.CLIPReward("tiny", "a cart", device="cuda:0", precision="bf16").model
    weights = [*model.parameters(), *model.buffers()]
    assert {weight.device for weight in weights} == {CUDA}
    assert sum(moved) < 1.1 * sum(weight.numel() * weight.dtype.itemsize for weight in weights)


@pytest.mark.parametrize("clip_model", ["tiny", clip_reward.HERE / "code_reward/programs/cartpole.py"])
def test_two_gpus_have_the_same_model_loaded_once_and_even_batches(clip_model, gpu, monkeypatch):
    module, states = module_and_states("dqn_clip_cartpole")
    args = settings(module.SCRIPT, "cuda", clip_model)
    args.num_envs, args.episode_length = 1, len(states)
    loaded = []
    monkeypatch.setattr(
        module, "make_reward", lambda *how: loaded.append(how) or clip_reward.make_reward(*how)
    )
    labeller = clip_reward.Labeller(module.Worker, args)
    labeller.add(states)
    labels = labeller.result()
    workers = [labeller.free.get() for _ in range(2)]
    places = {worker.reward_model.device for worker in workers}
    assert len(loaded) == 1 and places == ({CUDA, torch.device("cuda", 1)} if clip_model == "tiny" else {CPU})
    assert labeller.batch_size == 7  # 41 states, at most 10 a batch: three for each GPU, not five in all
    alone = module.Worker(settings(module.SCRIPT, "cpu", clip_model), CPU).label(states)
    torch.testing.assert_close(labels, alone)


def test_a_driver_that_warp_cannot_use_is_said(gpu, monkeypatch):
    monkeypatch.setattr("warp.is_cuda_available", lambda: False)
    with pytest.raises(clip_reward.UsageError, match="driver 580"):
        sac_clip_humanoid.Worker(settings("sac_clip_humanoid", "cuda"), CUDA)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_reward_program_works_beside_a_gpu(script, gpu, tmp_path, monkeypatch):
    """Its rewards are on the CPU, where it runs, and the humanoid's conditions on the GPU."""
    module, states = module_and_states(script)
    odd = "    return frames.sum((1, 2, 3)) % 2 == 1"
    (tmp_path / "odd.py").write_text(f"import numpy as np\nSIZE = 32, 48\ndef odd(frames):\n{odd}\n")
    watch(module, monkeypatch)
    labels = []
    for place in (CPU, CUDA):
        labels.append(module.Worker(settings(script, place, tmp_path / "odd.py"), place).label(states[:10]))
    assert torch.equal(*labels) and 0 < labels[0][:, 0].mean() < 1


# ---- On the device itself, the GPU where there is one


@pytest.fixture(params=["cpu", "cuda"])
def device(request) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a real GPU; on the CPU the same test runs")
    return request.param


def module_and_states(script: str) -> tuple[ModuleType, torch.Tensor]:
    size = {"dqn_clip_cartpole": 4, "sac_clip_mountaincar": 2, "sac_clip_humanoid": 24}[script]
    return SCRIPTS[script], torch.rand(41, size, generator=torch.Generator().manual_seed(1)) - 0.5


def settings(script: str, device: str | torch.device, clip_model: str | Path = "tiny"):
    """Of a reward of each kind: contrastive, α = 0.5, α = 0."""
    own = {
        "dqn_clip_cartpole": {"negative_prompt": ("pole and cart",), "temperature": 0.5},
        "sac_clip_mountaincar": {},
        "sac_clip_humanoid": {"prompt": ("a humanoid robot kneeling",), "task": "kneeling"},
    }[script]
    options = {"device": str(device), "clip_model": str(clip_model), "precision": "fp32"}
    return SCRIPTS[script].Args(clip_batch_size=10, **options, **own)


@pytest.mark.parametrize("script", SCRIPTS)
def test_frames_and_rewards_are_those_of_a_cpu_in_the_order_of_the_states(script, device):
    """Frames to 2 of 255; at the edges of what is ray-traced a ray may just miss on one of the two."""
    module, states = module_and_states(script)
    labeller = clip_reward.Labeller(module.Worker, settings(script, device))
    for part in states.split(9):
        labeller.add(part)
    together = labeller.result()  # threads render no more: Warp has one device at a time
    here = module.Worker(settings(script, "cpu"), CPU)
    alone = torch.cat([here.label(state[None]) for state in states])
    assert alone[:, 0].std() > 0.01
    torch.testing.assert_close(together, alone, atol=5e-3, rtol=0)

    frames = []
    for worker in (here, labeller.free.get()):
        worker.reward_model.register_forward_pre_hook(lambda _, seen: frames.append(seen[0].cpu().int()))
        worker.label(states)
    apart = (frames[0] - frames[1]).abs() > 2
    assert apart.float().mean() <= (1e-3 if script == "sac_clip_humanoid" else 0)


def compare_updates(script: str) -> None:
    """Replayed ones and others have the same samples, noise, losses and weights."""
    module, args = SCRIPTS[script], settings(script, "cuda:0")
    args.num_envs, args.episode_length, args.total_timesteps = 4, 20, 800
    kinds = [(k % 2 == 0,) if script == "sac_clip_humanoid" else () for k in range(20)]
    found = []
    for wrap in (lambda update, _: update, clip_reward.replayed):
        torch.manual_seed(1)
        envs, policy, rb, update = throughput.parts(module, args)
        played = module.rollout(deepcopy(policy).cpu(), 0.5, envs, SimpleNamespace(add=len), 1, args)
        rb.add(*played, torch.rand(20, 4).to(CUDA))
        weights = [weight.detach() for weight in policy.parameters()]
        before = [weight.cpu() for weight in weights]
        torch.manual_seed(2)
        fast_update = wrap(update, CUDA)
        losses = [fast_update(*kind) for kind in kinds]
        found.append([weight.cpu() for weight in weights])
        found[-1] += [value.cpu() for loss in losses for value in loss.values()]
        assert not torch.equal(before[0], found[-1][0]) and losses[-1]["q_values"] != losses[-3]["q_values"]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("script", SCRIPTS)
def test_updates_that_are_replayed_are_those_that_are_not(script, gpu):
    compare_updates(script)
    assert Graph.made == (2 if script == "sac_clip_humanoid" else 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a real GPU; the test above pretends one")
@pytest.mark.parametrize("script", SCRIPTS)
def test_updates_that_a_gpu_replays_are_those_that_it_does_not(script):
    compare_updates(script)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_there_is_resumed_and_its_policy_plays_on_both(script, run, device, tmp_path):
    found = interrupted_and_evaluated(run, SCRIPTS[script], device, tmp_path / "run")
    returns = [figures["clip_return"] for figures in found]
    assert returns == pytest.approx([returns[0]] * 3, rel=0.05)
