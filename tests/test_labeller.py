"""Labels in their order whoever makes them: threads, workers that fail or are lost, Ray actors."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import clip_reward
import dqn_clip_cartpole
from clip_reward import Labeller, UsageError

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def no_endless_wait():
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits for ever"))
    signal.alarm(120)
    yield
    signal.alarm(0)


class FakeWorker:
    """Labels each state (a number) with itself and with the sum of its batch, which tells how it was cut."""

    lost = ()  # numbers of the workers that are lost
    failing = ()  # states that are an error

    def __init__(self, args, device, reward_model=None):
        self.number = len(self.made)
        self.made.append(self)
        self.reward_model = reward_model or SimpleNamespace(fingerprint=None)
        self.busy = threading.Lock()

    def label(self, states: torch.Tensor) -> torch.Tensor:
        assert self.busy.acquire(blocking=False), "one worker is never used by two threads at once"
        self.asked.append((self.number, states[0].item()))
        time.sleep(0.001 * (1 + hash(states[0].item()) % 3))
        self.busy.release()
        if self.number in self.lost:
            raise ConnectionError(f"worker {self.number} does not answer")
        if set(states.tolist()) & set(self.failing):
            raise ArithmeticError
        return expected(states, len(states))


def expected(states: torch.Tensor, batch_size: int = 10) -> torch.Tensor:
    return torch.cat([torch.stack([b, b.sum().expand(len(b))], dim=1) for b in states.split(batch_size)])


@pytest.fixture
def fake(monkeypatch):
    """(threads, batch_size=10, what else the class has) -> a Labeller of FakeWorkers, and their class."""

    def build(threads: int, batch_size: int = 10, **attributes) -> tuple[Labeller, type]:
        monkeypatch.setattr(clip_reward, "THREADS", threads)
        Worker = type("Worker", (FakeWorker,), {"made": [], "asked": [], **attributes})
        settings = SimpleNamespace(device="cpu", clip_batch_size=batch_size, ray_workers=0)
        return Labeller(Worker, settings), Worker

    return build


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("batch_size", [1, 7, 10, 1000])
def test_labels_come_in_the_order_of_submission_and_parts_do_not_matter(fake, threads, batch_size):
    labeller, Worker = fake(threads, batch_size)
    assert len({id(worker.reward_model) for worker in Worker.made}) == 1  # they share the weights
    for sizes in ([7, 1, 30, 12], [5] * 10, [1], [60], [10, 0, 10]):
        states = torch.randn(sum(sizes)).round(decimals=2)
        for part in states.split(sizes):
            labeller.add(part)
        assert torch.equal(labeller.result(), expected(states, batch_size))
    assert {number for number, _ in Worker.asked} == {*range(threads)}


def test_a_batch_begins_when_it_is_full_and_more_come(fake):
    labelled = threading.Semaphore(0)

    def label(worker, states):
        labelled.release()
        return FakeWorker.label(worker, states)

    labeller, _ = fake(2, label=label)
    for size, batches in ((10, 0), (1, 1), (30, 3)):  # the first ten may be the last
        labeller.add(torch.arange(float(size)))
        assert all(labelled.acquire(timeout=60) for _ in range(batches))  # before anybody asks
        assert not labelled.acquire(timeout=0.1)
    assert len(labeller.result()) == 41


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_the_thread_that_asks_makes_what_no_other_has_begun_from_the_end_backwards(fake, threads):
    labeller, Worker = fake(threads)
    over = threading.Event()
    for _ in range(threads):  # the pool has something else to do
        labeller.pool.submit(over.wait, 20)
    labeller.add(torch.arange(45.0))
    assert torch.equal(labeller.result(), expected(torch.arange(45.0)))
    over.set()
    assert [first for _, first in Worker.asked] == [40, 30, 20, 10, 0]


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize(
    ("failing", "reward", "error"),
    [([3], 55, ArithmeticError), ([47], 55, ArithmeticError), (range(100), 55, ArithmeticError)]
    + [((), torch.nan, UsageError), ((), -torch.inf, UsageError)],
)
def test_a_worker_that_raises_or_rewards_that_are_none_are_an_error(fake, threads, failing, reward, error):
    labeller, _ = fake(threads, failing=failing)
    states = torch.arange(100.0)
    states[55] = reward
    labeller.add(states)
    with pytest.raises(error):
        labeller.result()
    labeller.pool.shutdown()  # the other threads go on to the end
    assert labeller.free.qsize() == threads  # with all the workers


@pytest.mark.parametrize(("threads", "lost"), [(2, [0]), (2, [1]), (4, [2]), (4, [0, 1, 3])])
def test_a_worker_that_is_lost_leaves_its_batch_to_another(fake, threads, lost, capsys):
    labeller, Worker = fake(threads, lost=lost)
    for _ in range(3):
        states = torch.randn(234)
        labeller.add(states)
        assert torch.equal(labeller.result(), expected(states))
    asked = [number for number, _ in Worker.asked]
    assert all(asked.count(number) == 1 for number in lost)  # nobody asks it again
    assert labeller.free.qsize() == threads - len(lost)
    assert capsys.readouterr().out.count("does not answer") == len(lost)


def test_labels_of_cartpole_are_the_same_for_any_number_of_threads(monkeypatch):
    args = dqn_clip_cartpole.Args(clip_model="tiny", precision="fp32", clip_batch_size=8, device="cpu")
    states = torch.rand(50, 4, generator=torch.Generator().manual_seed(0)) - 0.5
    alone = dqn_clip_cartpole.Worker(args, torch.device("cpu")).label(states)
    assert (alone.std(0) > 0.05).all()
    found = []
    for threads in (1, 2, 4):
        monkeypatch.setattr(clip_reward, "THREADS", threads)
        labeller = Labeller(dqn_clip_cartpole.Worker, args)
        for part in states.split(11):
            labeller.add(part)
        found.append(labeller.result())
        assert torch.equal(found[-1], found[0])
    torch.testing.assert_close(found[0], alone, atol=1e-5, rtol=0)


# ---- Ray


def test_files_are_named_by_whole_paths_as_rays_workers_run_in_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("openai").mkdir()  # no weights, whatever its name
    expected = {name: name for name in ("tiny", "hf-hub:org/name", "ViT-B-32/openai", "/no/such.py")}
    for kind, path in (
        ("", "programs/cartpole.py"),
        ("local-dir:", "models/tiny"),
        ("ViT-B-32/", "weights.pt"),
    ):
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).mkdir() if kind == "local-dir:" else Path(path).touch()
        expected[kind + path] = f"{kind}{tmp_path}/{path}"
    for given, whole in expected.items():
        args = dqn_clip_cartpole.Args(clip_model=given, device="cpu")
        args.complete()
        assert args.clip_model == whole


def kept(folder: Path) -> dict:
    path = folder / "run" / "checkpoint.pt"
    return torch.load(path, weights_only=True) if path.exists() else {"step": 0}


@pytest.mark.slow
@pytest.mark.parametrize("script", ["dqn_clip_cartpole", "sac_clip_humanoid"])
def test_ray_actors_change_nothing_but_the_speed_and_one_may_be_killed(script, tmp_path):
    """Runs by a model whose path is relative, in turns without and with two actors."""
    pytest.importorskip("ray")
    psutil = pytest.importorskip("psutil")  # Ray brings it
    signal.alarm(900)
    options = """--device cpu --clip-model local-dir:model --num-envs 8 --episode-length 25 --episodes 4
        --gradient-steps 3 --clip-batch-size 16 --learning-starts 200 --total-timesteps 2000 --run-dir run"""
    command = [sys.executable, ROOT / f"{script}.py", *options.split(), "--ray-workers"]
    for workers in ("0", "2"):
        folder = tmp_path / workers
        folder.mkdir()
        (folder / "model").symlink_to(ROOT / "tiny_clip")
        with open(folder / "log", "w") as log:
            env = os.environ | {"RAY_ADDRESS": "local"}
            process = subprocess.Popen([*command, workers], cwd=folder, env=env, stdout=log, stderr=log)
        while kept(folder)["step"] < 400:
            assert process.poll() is None, (folder / "log").read_text()
            time.sleep(0.05)
        family = psutil.Process(process.pid).children(recursive=True)
        actors = [member for member in family if "ray::Worker" in "".join(member.cmdline())]
        assert len(actors) == int(workers)
        for actor in actors[:1]:
            actor.kill()
        assert process.wait() == 0, (folder / "log").read_text()
        assert (folder / "log").read_text().count("worker is lost") == len(actors[:1])
    alone, ray = (kept(tmp_path / workers) for workers in ("0", "2"))
    assert alone["best_return"] == ray["best_return"]
    assert all(torch.equal(weight, ray["policy"][name]) for name, weight in alone["policy"].items())
    while any(map(psutil.Process.is_running, family)):  # none of Ray's processes stays
        time.sleep(0.2)
