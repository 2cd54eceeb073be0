"""The GPU path, on a machine without a GPU: tensors that say they are on cuda:0 refuse to meet those that are not.

Their numbers are on the CPU, so a run with them must end like one on the CPU; and each way between CPU and GPU is counted. Below,
where there is a GPU, the same on it (`device`).
"""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import Future
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

SCRIPTS = {module.SCRIPT: module for module in (dqn_clip_cartpole, sac_clip_mountaincar, sac_clip_humanoid)}
aten = torch.ops.aten
OWN_TO = torch.Tensor.to
ways = Counter()  # between CPU and GPU: "to GPU", "to CPU", "item"
moved = []  # bytes of each


class Cuda(torch.Tensor):
    """A tensor that says it is on cuda:0; `host` holds its numbers."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device, is_cuda, is_cpu = torch.device("cuda", 0), True, False

    @staticmethod
    def __new__(cls, real: torch.Tensor):
        layout = {"strides": real.stride(), "storage_offset": real.storage_offset(), "dtype": real.dtype}
        return torch.Tensor._make_wrapper_subclass(cls, real.shape, **layout)

    def __init__(self, real: torch.Tensor):
        self.host = real

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {})

    def tolist(self):
        ways["to CPU"] += 1
        return self.host.tolist()

    def numpy(self, *_):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    __array__ = numpy

    def __deepcopy__(self, memo: dict):
        copy = Cuda(self.detach().host.clone())
        return torch.nn.Parameter(copy, self.requires_grad) if isinstance(self, torch.nn.Parameter) else copy

    def __reduce_ex__(self, protocol: int):  # in a file it is what `map_location="cpu"` makes of it
        return self.detach().host.__reduce_ex__(protocol)


def dispatch(func, args, kwargs):
    """One operation: on the GPU if its tensors are, or if it makes one there."""
    operation, target = func.overloadpacket, kwargs.get("device")
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    on_gpu = [isinstance(tensor, Cuda) for tensor in tensors]
    gpu = any(on_gpu) if target is None else torch.device(target).type == "cuda"
    if operation in (aten._to_copy, aten.copy_):
        source, here = on_gpu[-1], on_gpu[0] if operation is aten.copy_ else gpu
        if source != here:
            ways["to GPU" if here else "to CPU"] += 1
            moved.append(out_bytes(tensors[-1], kwargs.get("dtype")))
    elif operation is aten._local_scalar_dense:
        ways["item"] += any(on_gpu)
    elif (
        operation in (aten.index, aten.index_put_, aten.index_put) and on_gpu[0]
    ):  # a list, or an index on the CPU, is taken there
        ways["to GPU"] += sum(not flag for flag in on_gpu)
    elif any(on_gpu) and not all(on_gpu):
        lists = operation.__name__.startswith(("_foreach", "_fused"))
        if lists or any(tensor.dim() for tensor, flag in zip(tensors, on_gpu) if not flag):
            raise RuntimeError(f"{func}: expected all tensors to be on the same device, but found cuda:0 and cpu")

    def real(leaf):
        return leaf.host if isinstance(leaf, Cuda) else torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    out = func(*tree_map(real, args), **tree_map(real, kwargs))
    wrapped = {
        id(tensor.host): tensor for tensor in tensors if isinstance(tensor, Cuda)
    }  # an operation in place returns its argument

    def wrap(leaf):
        return wrapped.get(id(leaf)) if id(leaf) in wrapped else Cuda(leaf) if gpu and isinstance(leaf, torch.Tensor) else leaf

    return tree_map(wrap, out)


def to(self: torch.Tensor, *args, **kwargs) -> torch.Tensor:
    """Tensor.to, which would ask the driver for the number of a GPU that has none, and think that all is on the CPU already."""
    device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    self = (
        self
        if dtype in (None, self.dtype) and memory_format is None
        else OWN_TO(self, dtype or self.dtype, memory_format=memory_format)
    )
    if device is None or device.type == self.device.type:
        return self
    return OWN_TO(self, torch.device(device.type, 0), copy=True) if device.type == "cuda" else Down.apply(self)


class Down(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: Cuda) -> torch.Tensor:
        ways["to CPU"] += 1
        return tensor.host.clone()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        return Cuda(grad)


def out_bytes(tensor: torch.Tensor, dtype: torch.dtype | None) -> int:
    return tensor.numel() * (dtype or tensor.dtype).itemsize


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {})


class Inline:
    """A pool that does what it is given at once: modes hold for one thread."""

    def __init__(self, *_, **__):
        pass

    __enter__ = __exit__ = lambda self, *_: self
    map = staticmethod(map)

    def submit(self, work, *args) -> Future:
        future = Future()
        future.set_result(work(*args))
        return future

    def shutdown(self, **_) -> None:
        pass


@pytest.fixture
def gpu(monkeypatch):
    """A machine with one GPU, until the test ends."""
    cuda = {
        "_lazy_init": lambda: None, "is_available": lambda: True, "device_count": lambda: 1,
        "set_sync_debug_mode": lambda _: None, "get_device_capability": lambda *_: (9, 0), "current_stream": lambda *_: None, "synchronize": lambda *_: None,
        "max_memory_allocated": lambda *_: 0,
    }  # fmt: skip
    for name, function in cuda.items():
        monkeypatch.setattr(torch.cuda, name, function)

    current = []

    def get_device(name=None, own=warp.get_device):
        return name if str(name).startswith("cuda") else own(name)

    def render(model, data, context, own=mujoco_warp.render):
        scene = sys._getframe(1).f_locals["self"]
        assert str(current[-1]).startswith(scene.device.type), "would be drawn on another device"
        own(model, data, context)

    load = torch.load

    def load_to_cpu(*args, map_location=None, **kwargs):
        assert map_location == "cpu", "what was saved on a GPU would go there again"
        return load(*args, map_location=map_location, **kwargs)

    def to_torch(array, own=warp.to_torch):  # as the scene that asks for it
        return Cuda(own(array)) if sys._getframe(1).f_locals["self"].device.type == "cuda" else own(array)

    for name, function in {
        "get_device": get_device, "set_device": current.append, "set_stream": lambda *_: None,
        "stream_from_torch": lambda _: None, "to_torch": to_torch,
    }.items():  # fmt: skip
        monkeypatch.setattr(warp, name, function)
    monkeypatch.setattr(mujoco_warp, "render", render)
    monkeypatch.setattr(torch, "load", load_to_cpu)
    monkeypatch.setattr(clip_reward, "ThreadPoolExecutor", Inline)
    monkeypatch.setattr(torch.optim.Optimizer, "_accelerator_graph_capture_health_check", lambda _: None)
    grouped = torch._C._group_tensors_by_device_and_dtype

    def by_device(lists, with_indices):
        groups = grouped(lists, with_indices)
        return {(group[0][0][0].device, dtype): group for (_, dtype), group in groups.items()}

    monkeypatch.setattr(torch._C, "_group_tensors_by_device_and_dtype", by_device)
    tensor = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda data, dtype=None, device="cpu": tensor(data, dtype=dtype).to(device))
    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: to(tensor, "cpu"))
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    ways.clear()
    with Mode():
        yield
    torch.__future__.set_overwrite_module_params_on_conversion(False)


SHORT = (
    "--total-timesteps 480 --num-envs 4 --episode-length 30 --learning-starts 120 --checkpoint-every 240 --gradient-steps 6 "
    "--episodes 3 --seed 3 --clip-model tiny --clip-batch-size 50 --precision fp32"
).split()


@pytest.fixture
def main(monkeypatch):
    """A function that runs a script in this process, without pictures."""

    def main(module, *words) -> None:
        monkeypatch.setattr(sys, "argv", [f"{module.SCRIPT}.py", *map(str, words)])
        own = module.pictures
        monkeypatch.setattr(module, "pictures", lambda states, rewards, count, args: own(states[:8], rewards[:8], 2, args))
        module.main()

    return main


def figures(path: Path) -> dict:
    result = json.loads(path.read_text())
    return {name: value for name, value in result.items() if name not in ("settings", "versions")}


def counted(function, most: dict):
    """The function, but it may not take more ways between CPU and GPU than these."""

    def call(*args):
        before = ways.copy()
        result = function(*args)
        taken = ways - before
        assert all(taken[way] <= most.get(way, 0) for way in taken), taken
        return result

    return call


def watch(module: ModuleType, monkeypatch) -> None:
    """No update leaves the GPU, and a batch of labels does so only for its states and its rewards."""
    update = "dqn_update" if hasattr(module, "dqn_update") else "sac_update"
    monkeypatch.setattr(module, update, counted(getattr(module, update), {}))
    monkeypatch.setattr(module.ReplayBuffer, "sample", counted(module.ReplayBuffer.sample, {}))
    monkeypatch.setattr(module.Worker, "label", counted(module.Worker.label, {"to GPU": 1, "to CPU": 1}))


@pytest.mark.slow("humanoid", "mountaincar")
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_on_a_gpu_is_that_on_a_cpu(script, main, gpu, tmp_path, monkeypatch):
    """Trained on both, interrupted there and resumed, and its best policy evaluated on both."""
    module = SCRIPTS[script]
    main(module, *SHORT, "--device", "cpu", "--run-dir", tmp_path / "cpu")
    assert not ways.total()
    report = module.Run.report

    def report_and_stop(run, labels, losses):
        report(run, labels, losses)
        run.stopped = 2 if run.step == 360 else 0

    monkeypatch.setattr(module.Run, "report", report_and_stop)
    watch(module, monkeypatch)
    with pytest.raises(SystemExit):
        main(module, *SHORT, "--device", "cuda", "--run-dir", tmp_path / "gpu")
    assert ways["to GPU"] and ways["to CPU"]
    main(module, "--resume", tmp_path / "gpu")
    assert figures(tmp_path / "gpu/result.json") == figures(tmp_path / "cpu/result.json")
    for device in ("cpu", "cuda"):
        main(module, "--evaluate", tmp_path / "gpu/best.pt", "--episodes", 3, "--device", device)
        assert figures(tmp_path / "gpu/best_evaluation.json") == figures(tmp_path / "cpu/result.json")


DEFECTS = [
    ("dqn_clip_cartpole", "ReplayBuffer(args).to(device)", "ReplayBuffer(args)"),
    ("dqn_clip_cartpole", "mean_network = deepcopy(q_network)", "mean_network = QNetwork()"),
    ("dqn_clip_cartpole", "policy = deepcopy(mean_network).cpu()", "policy = deepcopy(mean_network)"),
    ("dqn_clip_cartpole", "torch.arange(width, device=states.device)", "torch.arange(width)"),
    ("dqn_clip_cartpole", "(batch_size,), device=self.rewards.device)", "(batch_size,))"),
    ("dqn_clip_cartpole", "torch.stack([rewards.cpu(), ", "torch.stack([rewards, "),
    ("dqn_clip_cartpole", 'map_location="cpu", weights_only=True)', 'weights_only=True)'),
    ("sac_clip_mountaincar", "column = left + torch.arange(columns, device=self.device)", "column = left + torch.arange(columns)"),
    ("sac_clip_mountaincar", "torch.randn_like(actions)", "torch.randn(actions.shape)"),
    ("sac_clip_mountaincar", "actor_loss.detach(), ", "actor_loss.item(), "),
    ("sac_clip_humanoid", "2:].flatten(0, 1).to(device))", "2:].flatten(0, 1))"),
    ("sac_clip_humanoid", 'self.register_buffer("mean", torch.zeros(size))', "self.mean = torch.zeros(size)"),
    ("sac_clip_humanoid", "            with self.lock:\n                wp.set_device(self.warp_device)", "            if True:"),
    ("sac_clip_humanoid", "GEOM_POINTS.values()], device=device)", "GEOM_POINTS.values()])"),
]  # fmt: skip


@pytest.mark.parametrize(("script", "right", "wrong"), DEFECTS)
def test_what_would_be_wrong_on_a_gpu_is_found_without_one(script, right, wrong, main, gpu, tmp_path, monkeypatch):
    source = Path(SCRIPTS[script].__file__).read_text()
    assert right in source
    module = ModuleType(script)
    module.__file__ = SCRIPTS[script].__file__
    monkeypatch.setitem(sys.modules, script, module)
    exec(compile(source.replace(right, wrong), script, "exec"), module.__dict__)
    watch(module, monkeypatch)
    with pytest.raises((RuntimeError, AssertionError, TypeError, clip_reward.UsageError)):
        main(module, *SHORT, "--device", "cuda", "--run-dir", tmp_path / "run")


def test_weights_go_to_the_gpu_in_their_precision(gpu):
    moved.clear()
    model = clip_reward.CLIPReward("tiny", "a cart", device="cuda", precision="bf16").model
    weights = [*model.parameters(), *model.buffers()]
    assert {weight.device for weight in weights} == {torch.device("cuda:0")}
    assert sum(moved) < 1.1 * sum(weight.numel() * weight.dtype.itemsize for weight in weights)


@pytest.mark.slow
def test_the_tools_run_on_a_gpu(gpu, tmp_path, monkeypatch, capsys):
    """The figures of the CPU, by the tools for datasets, reward models, landscapes and speed."""
    for folder in ("figures", "benchmarks"):
        monkeypatch.syspath_prepend(str(Path(clip_reward.__file__).parent / folder))
    import dataset
    import reward_landscape
    import reward_models
    import throughput

    def call(module, *words) -> None:
        monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *map(str, words)])
        try:
            module.main()
        except SystemExit as end:
            assert not end.code

    for script in SCRIPTS:
        call(dataset, "--script", script, "--states", "100", "--output", tmp_path / script)
        tables = []
        for device in ("cpu", "cuda"):
            options = "--clip-model tiny --precision fp32 --resamples 10".split()
            sheet = tmp_path / f"{script}_{device}.png"
            call(reward_models, "--dataset", tmp_path / script, *options, "--device", device, "--output", sheet)
            tables.append(sheet.with_suffix(".csv").read_text())
            for kept in (tmp_path / script / "embeddings").iterdir():
                kept.unlink()
        assert tables[0] == tables[1]
    curves = []
    for device in ("cpu", "cuda"):
        path = tmp_path / f"{device}.png"
        call(reward_landscape, "--points", "9", "--clip-model", "tiny", "--device", device, "--output", path)
        curves.append(path.with_suffix(".csv").read_text())
    assert curves[0] == curves[1]

    monkeypatch.setattr(throughput, "run_loop", lambda *_: 100.0)
    monkeypatch.setattr(throughput, "matmul_rate", lambda device: 1e12)
    monkeypatch.setattr(throughput, "ThreadPoolExecutor", Inline)
    monkeypatch.setattr(throughput.rate, "__defaults__", (0.0,))
    for script in SCRIPTS:
        args = throughput.Args(device="cuda", steps_per_round=32, repetitions=1, clip_batch_size=16)
        assert len(throughput.measure(script, "tiny", "fp32", 8, args).split("|")) == 15


def test_the_page_of_a_gpu_machine(tmp_path):
    """`benchmarks/gpu.sh` with an nvidia-smi that knows two GPUs, and a python that answers at once."""
    root = Path(clip_reward.__file__).parent
    commands = {
        "nvidia-smi": "echo NVIDIA H200, 570; echo NVIDIA H200, 570",
        "python": 'case "$*" in *throughput*) printf "cuda\\n| script | loop |\\n|---|---|\\n| dqn | 1,234 |\\n";; *pytest*) echo 12 passed;; esac',
        "git": "echo abc",
    }
    for name, command in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{command}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "results").mkdir()
    script = shutil.copy(root / "benchmarks" / "gpu.sh", tmp_path / "benchmarks")
    paths = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run([script], env=os.environ | {"PATH": paths}, check=True, capture_output=True)
    page = (tmp_path / "results" / "gpu.md").read_text()
    table = "| GPUs | script | loop |\n|---|---|---|\n| 0 | dqn | 1,234 |\n| 0,1 | dqn | 1,234 |\n"
    assert page.endswith(table) and "12 passed" in page and "- NVIDIA H200, 570" in page
    assert (tmp_path / "results" / "gpu.csv").read_text() == "GPUs,script,loop\n0,dqn,1;234\n0;1,dqn,1;234\n"


# ---- On the device itself, the GPU where there is one


@pytest.fixture(params=["cpu", "cuda"])
def device(request) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    return torch.device(request.param, 0 if request.param == "cuda" else None)


def some_states(script: str, n: int = 40) -> torch.Tensor:
    """States that differ, as they are drawn."""
    module, args = SCRIPTS[script], SCRIPTS[script].Args(episode_length=n // 4)
    envs = {"dqn_clip_cartpole": "CartPole", "sac_clip_mountaincar": "MountainCar"}
    envs = getattr(module, envs[script])(4) if script in envs else module.make_envs(4, args)
    drawn, policy = [], (module.QNetwork(),) if script == "dqn_clip_cartpole" else (None,)
    module.rollout(*policy, 1.0, envs, SimpleNamespace(add=drawn.append), 1, args)
    return torch.cat(drawn)


def frames_of(script: str, states: torch.Tensor, device: torch.device) -> torch.Tensor:
    if script == "dqn_clip_cartpole":
        return dqn_clip_cartpole.draw(states.to(device), 96, 96).cpu()
    look = ("realistic",) if script == "sac_clip_mountaincar" else ("realistic", "fixed", 1, 16)
    frames = SCRIPTS[script].Scene(96, 96, *look, device).draw(states)
    return (frames[0] if script == "sac_clip_humanoid" else frames).cpu()


@pytest.mark.parametrize("script", SCRIPTS)
def test_frames_are_those_of_a_cpu(script, device):
    """To 2 of 255; at the edges of what is ray-traced a ray may just miss on one of the two."""
    states = some_states(script)
    there, here = frames_of(script, states, device), frames_of(script, states, torch.device("cpu"))
    apart = (there.int() - here.int()).abs()
    assert (apart > 2).float().mean() <= (1e-3 if script == "sac_clip_humanoid" else 0)
    assert here.float().std() > 10


@pytest.mark.parametrize("how", [{"alpha": 0.0}, {"alpha": 0.5}, {"negative_prompts": ["a cart", "a pole that lies down"]}])
def test_rewards_are_those_of_a_cpu(how, device):
    frames = frames_of("dqn_clip_cartpole", some_states("dqn_clip_cartpole"), torch.device("cpu"))
    prompts = "pole vertically upright on top of the cart", "pole and cart"
    there, here = (clip_reward.CLIPReward("tiny", *prompts, device=place, **how)(frames).cpu() for place in (device, "cpu"))
    assert here.std() > 0.01
    torch.testing.assert_close(there, here, atol=2e-3, rtol=0)


@pytest.mark.parametrize("script", SCRIPTS)
def test_labels_come_in_the_order_of_the_states(script, device):
    module, states = SCRIPTS[script], some_states(script)
    prompt = ("a humanoid robot kneeling",) if script == "sac_clip_humanoid" else module.Args().prompt
    settings = module.Args(prompt=prompt, clip_model="tiny", precision="fp32", clip_batch_size=7)
    threads = torch.get_num_threads()
    labeller = clip_reward.Labeller(module.Worker, settings, torch.device(device.type))
    for part in states.split(9):
        labeller.add(part)
    labels = labeller.result()
    labeller.pool.shutdown()
    torch.set_num_threads(threads)
    alone = torch.cat([module.Worker(settings, torch.device("cpu")).label(state[None]) for state in states[::5]])
    torch.testing.assert_close(labels[::5], alone, atol=5e-3, rtol=0, equal_nan=True)


@pytest.mark.slow("humanoid", "mountaincar")
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_there_is_resumed_and_its_policy_plays_on_both(script, device, main, tmp_path):
    module = SCRIPTS[script]
    main(module, *SHORT, "--device", device.type, "--run-dir", tmp_path / "run")
    before = torch.load(tmp_path / "run/checkpoint.pt", map_location="cpu", weights_only=True)
    assert before["rb"]["states"].abs().sum() > 0 and before["progress"][0] == 480
    main(module, "--resume", tmp_path / "run")
    returns = [figures(tmp_path / "run/result.json")["clip_return"]]
    for place in ("cpu", device.type):
        main(module, "--evaluate", tmp_path / "run/best.pt", "--episodes", 3, "--device", place)
        returns.append(figures(tmp_path / "run/best_evaluation.json")["clip_return"])
    assert returns == pytest.approx([returns[0]] * 3, rel=0.05)
