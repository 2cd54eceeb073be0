"""Labels in their order whoever makes them: threads, workers that fail, Ray actors."""

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

    failing = ()  # states that are an error

    def __init__(self, args, device, reward_model=None):
        self.number = len(self.made)
        self.made.append(self)
        self.reward_model = reward_model or object()
        self.busy = threading.Lock()

    def label(self, states: torch.Tensor) -> torch.Tensor:
        assert self.busy.acquire(blocking=False), "one worker is never used by two threads at once"
        self.asked.append((self.number, states[0].item()))
        time.sleep(0.001 * (1 + hash(states[0].item()) % 3))
        self.busy.release()
        if set(states.tolist()) & set(self.failing):
            raise ArithmeticError
        return expected(states, len(states))


def expected(states: torch.Tensor, batch_size: int = 10) -> torch.Tensor:
    return torch.cat([torch.stack([b, b.sum().expand(len(b))], dim=1) for b in states.split(batch_size)])


@pytest.fixture
def fake(monkeypatch):
    """(threads, batch_size=10, what else the class has) -> a Labeller of FakeWorkers, and their class."""

    def build(threads: int, batch_size: int = 10, threshold=None, **attributes) -> tuple[Labeller, type]:
        monkeypatch.setattr(clip_reward, "THREADS", threads)
        Worker = type("Worker", (FakeWorker,), {"made": [], "asked": [], **attributes})
        how = {"clip_batch_size": batch_size, "clip_model": "tiny", "threshold": threshold}
        return Labeller(Worker, SimpleNamespace(device="cpu", ray_workers=0, **how)), Worker

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
    assert not any(held for held, _ in labeller.tasks)  # nor are 40 labelled frames kept until then
    assert len(labeller.result()) == 41


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("failing, reward", [([3], 5), ([47], 5), (range(100), 5), ((), torch.nan)])
def test_a_worker_that_raises_or_a_reward_that_is_none_is_an_error(fake, threads, failing, reward):
    labeller, _ = fake(threads, failing=failing)
    states = torch.arange(100.0)
    states[55] = reward
    labeller.add(states)
    with pytest.raises(ArithmeticError if failing else UsageError):
        labeller.result()
    labeller.pool.shutdown()  # the other threads go on to the end
    assert labeller.free.qsize() == threads  # with all the workers


def test_a_reward_that_is_the_same_everywhere_is_an_error_but_a_single_one_or_a_binary_one_is_not(fake):
    for threshold, size in ((None, 30), (None, 1), (0.5, 30)):
        labeller, _ = fake(2, threshold=threshold)
        labeller.add(torch.ones(size))
        if (threshold, size) == (None, 30):
            with pytest.raises(UsageError, match="the same everywhere"):
                labeller.result()
        else:
            assert labeller.result()[:, 0].tolist() == [1] * size


def test_a_reward_is_checked_up_to_rounding(fake):
    labeller, _ = fake(2)
    states = torch.randn(100, generator=torch.Generator().manual_seed(0))
    labeller.check(states, states + 1e-3)
    for other in (states + 0.2, states.roll(1), 1.2 * states):
        with pytest.raises(UsageError, match="another reward"):
            labeller.check(states, other)


# ---- Ray


@pytest.fixture
def ray(monkeypatch):
    ray = pytest.importorskip("ray")
    signal.alarm(600)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    yield ray
    ray.shutdown()


@pytest.mark.slow
def test_ray_starts_an_actor_that_was_killed_anew_and_the_labels_are_the_same(ray, tmp_path, monkeypatch):
    """Another actor dies in the middle of its work; the model's path is relative."""
    monkeypatch.chdir(tmp_path)
    Path("model").symlink_to(ROOT / "tiny_clip")
    how = {"clip_model": "local-dir:model", "precision": "fp32", "clip_batch_size": 8, "device": "cpu"}
    settings = (dqn_clip_cartpole.Args(**how, ray_workers=workers) for workers in (0, 2))
    alone, labeller = (Labeller(dqn_clip_cartpole.Worker, args) for args in settings)
    states = torch.rand(5000, 4, generator=torch.Generator().manual_seed(0)) - 0.5
    alone.add(states)
    expected = alone.result()
    workers = [labeller.free.get() for _ in range(labeller.free.qsize())]
    actors = [worker for worker in workers if hasattr(worker, "actor")]
    assert len(actors) == 2 and len(workers) == 2 + clip_reward.THREADS
    for worker in actors:  # they alone
        labeller.free.put(worker)

    def pid(worker) -> int:
        return ray.get(worker.actor.__ray_call__.remote(lambda _: os.getpid()))

    first, second = map(pid, actors)
    os.kill(first, signal.SIGKILL)
    threading.Timer(1, os.kill, (second, signal.SIGKILL)).start()
    for _ in range(3):
        labeller.add(states)
        torch.testing.assert_close(labeller.result(), expected, atol=1e-5, rtol=0)
    assert first != pid(actors[0]) and second != pid(actors[1])


@pytest.mark.slow
def test_ray_actors_change_nothing_in_a_training(ray, tmp_path):
    words = """--device cpu --precision fp32 --num-envs 8 --episode-length 25 --gradient-steps 3 --episodes 4
        --clip-batch-size 16 --learning-starts 200 --total-timesteps 800 --run-dir"""
    for workers in ("0", "2"):
        command = [sys.executable, ROOT / "dqn_clip_cartpole.py", *words.split(), workers]
        subprocess.run([*command, "--ray-workers", workers], cwd=tmp_path, check=True)
    alone, together = (torch.load(tmp_path / workers / "checkpoint.pt") for workers in ("0", "2"))
    assert alone["best_return"] == pytest.approx(together["best_return"], rel=1e-5)
    for name, weight in alone["policy"].items():
        torch.testing.assert_close(weight, together["policy"][name], atol=1e-4, rtol=0)
