"""Labels in their order whoever makes them: threads, workers that fail or are lost, and Ray actors, one of them killed."""

import json
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
from clip_reward import CLIPReward, Labeller

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")


class FakeWorker:
    """Labels each state (a number) with itself and with the sum of its batch, which tells how it was cut; notes who did it."""

    lost = failing = ()  # numbers of the workers that are lost, states that are an error
    made: list["FakeWorker"]

    def __init__(self, args, device, reward_model=None):
        self.number, self.reward_model, self.threads, self.busy = len(self.made), reward_model or object(), [], False
        self.made.append(self)

    def label(self, states: torch.Tensor) -> torch.Tensor:
        assert not self.busy, "one worker is never used by two threads at once"
        self.busy = True
        time.sleep(0.001 * (1 + states.sum().item() % 3))
        self.threads.append(threading.current_thread())
        self.busy = False
        if self.number in self.lost:
            raise ConnectionError(f"worker {self.number} does not answer")
        if set(states.tolist()) & set(self.failing):
            raise ArithmeticError("no label for this")
        return torch.stack([states, states.sum().expand(len(states))], dim=1)


@pytest.fixture
def fake(monkeypatch):
    """(threads, batch_size=10, ...) -> a new Labeller of new FakeWorkers."""

    def build(threads: int, batch_size: int = 10, **attributes) -> Labeller:
        monkeypatch.setattr(clip_reward, "THREADS", threads)
        Worker = type("Worker", (FakeWorker,), {"made": [], **attributes})
        labeller = Labeller(Worker, SimpleNamespace(clip_batch_size=batch_size, ray_workers=0), CPU)
        labeller.made = Worker.made
        return labeller

    return build


def soon(function, *arguments, seconds: float = 30):
    """What the function returns or raises; waiting for ever is a failure."""
    outcome = []

    def call():
        try:
            outcome.append((function(*arguments), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    assert outcome, "it waits for ever"
    value, error = outcome[0]
    if error:
        raise error
    return value


def expected(states: torch.Tensor, batch_size: int) -> torch.Tensor:
    return torch.cat([torch.stack([b, b.sum().expand(len(b))], dim=1) for b in states.split(batch_size)])


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("batch_size", [1, 7, 10, 1000])
def test_labels_come_in_the_order_of_submission_round_after_round(fake, threads, batch_size):
    labeller = fake(threads, batch_size)
    assert len(labeller.made) == threads
    assert len({worker.reward_model for worker in labeller.made}) == 1  # they share the weights
    for sizes in ([7, 1, 30, 12], [5] * 10, [1], [60], [10, 0, 10]):
        states = torch.randn(sum(sizes)).round(decimals=2)
        for part in states.split(sizes):
            labeller.add(part)
        assert torch.equal(soon(labeller.result), expected(states, batch_size))  # the batches do not depend on the parts
    assert labeller.free.qsize() == threads  # all are back
    assert sum(len(worker.threads) > 0 for worker in labeller.made) == threads or batch_size == 1000


def test_a_batch_begins_when_it_is_full_and_more_come(fake):
    labeller = fake(2)

    def labelled(count: int) -> bool:
        deadline = time.monotonic() + 20
        while sum(len(worker.threads) for worker in labeller.made) < count and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        return sum(len(worker.threads) for worker in labeller.made) == count

    labeller.add(torch.arange(10.0))
    assert labelled(0)  # they may be the last ones
    labeller.add(torch.arange(1.0))
    assert labelled(1)  # before anybody asks
    labeller.add(torch.arange(30.0))
    assert labelled(4)
    assert len(soon(labeller.result)) == 41 and labelled(5)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_the_thread_that_asks_helps(fake, threads):
    """All the pool's threads are busy with something else, which ends only when a batch has been labelled."""
    labelled = threading.Event()

    def label(worker, states):
        labelled.set()
        return FakeWorker.label(worker, states)

    labeller = fake(threads, label=label)
    for _ in range(threads):
        labeller.pool.submit(labelled.wait, 60)
    states = torch.arange(45.0)
    labeller.add(states)
    assert torch.equal(soon(labeller.result), expected(states, 10))


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("failing", [[3], [47], list(range(100))])
def test_a_worker_that_raises_is_an_error_and_no_wait(fake, threads, failing):
    labeller = fake(threads, failing=failing)
    labeller.add(torch.arange(100.0))
    with pytest.raises(ArithmeticError, match="no label for this"):
        soon(labeller.result)
    soon(labeller.pool.shutdown)  # the other threads go on to the end
    assert labeller.free.qsize() == threads  # with all the workers
    if len(failing) == 1:
        missing = set(range(10)) - set(labeller.labels) - {number for number, _ in labeller.batches}
        assert missing == {failing[0] // 10}


@pytest.mark.parametrize("threads, lost", [(2, [0]), (2, [1]), (4, [2]), (4, [0, 1, 3])])
def test_a_worker_that_is_lost_leaves_its_batch_to_another(fake, threads, lost, capsys):
    labeller = fake(threads, lost=lost)
    for _ in range(3):
        states = torch.randn(234)
        for part in states.split(50):
            labeller.add(part)
        assert torch.equal(soon(labeller.result), expected(states, 10))
    assert labeller.free.qsize() == threads - len(lost)
    assert all(len(labeller.made[number].threads) == 1 for number in lost)  # nobody asks it again
    assert (
        capsys.readouterr().out.splitlines().count(f"a Ray worker is lost, the others go on: worker {lost[0]} does not answer")
        == 1
    )


def test_labels_of_cartpole_are_the_same_for_any_number_of_threads(monkeypatch):
    args = dqn_clip_cartpole.Args(clip_model="tiny", precision="fp32", clip_batch_size=8)
    states = torch.rand(50, 4, generator=torch.Generator().manual_seed(0)) * 0.8 - 0.4
    reward_model, found = CLIPReward("tiny", args.prompt, args.baseline_prompt, 0.5), []
    for threads in (1, 2, 4):
        monkeypatch.setattr(clip_reward, "THREADS", threads)
        labeller = Labeller(dqn_clip_cartpole.Worker, args, CPU)
        for part in states.split(11):
            labeller.add(part)
        found.append(soon(labeller.result))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    frames = dqn_clip_cartpole.draw(states, *reward_model.size)
    torch.testing.assert_close(found[0][:, 0], reward_model(frames), atol=1e-5, rtol=0)
    assert torch.equal(found[0][:, 1], ((states[:, 0].abs() < 2.4) & (states[:, 2].abs() <= 0.20943951)).float())
    assert 0 < found[0][:, 1].mean() < 1


# ---- Ray


OPTIONS = "--device cpu --clip-model tiny --num-envs 8 --episode-length 25 --clip-batch-size 16 --gradient-steps 3"
OPTIONS += " --learning-starts 200 --checkpoint-every 200 --episodes 4 --total-timesteps 4000"


def start(folder: Path, ray_workers: int) -> subprocess.Popen:
    command = f"{sys.executable} {ROOT / 'dqn_clip_cartpole.py'} {OPTIONS} --run-dir run --ray-workers {ray_workers}"
    folder.mkdir()
    with open(folder / "log", "w") as log:
        env = os.environ | {"OMP_NUM_THREADS": "1", "RAY_ADDRESS": "local", "RAY_DISABLE_DOCKER_CPU_WARNING": "1"}
        return subprocess.Popen(command.split(), cwd=folder, env=env, stdout=log, stderr=log)


def outcome(folder: Path) -> tuple[dict, dict]:
    """-> result.json without what may differ, and the network's weights."""
    result = json.loads((folder / "run" / "result.json").read_text())
    for name in ("ray_workers", "run_dir"):
        del result["settings"][name]
    return result, torch.load(folder / "run" / "checkpoint.pt", weights_only=True)["policy"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> tuple[dict, dict]:
    pytest.importorskip("ray")
    folder = tmp_path_factory.mktemp("ray") / "alone"
    assert start(folder, 0).wait(200) == 0, (folder / "log").read_text()
    return outcome(folder)


def descendants(pid: int) -> dict[int, str]:
    """Process ids and command lines of all that the process has started, and of what these have started."""
    found = {}
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found[child] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
                found |= descendants(child)
    except OSError:  # ended meanwhile
        pass
    return found


def at_work(pid: int) -> bool:
    """Is this still a process, and no zombie that waits for its parent?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("kill", [False, True])
def test_ray_actors_change_nothing_but_the_speed_and_one_may_be_killed(tmp_path, alone, kill):
    process, started, actors, killed = start(tmp_path / "ray", 2), set(), set(), False
    log, checkpoint = tmp_path / "ray" / "log", tmp_path / "ray" / "run" / "checkpoint.pt"
    deadline = time.monotonic() + 400
    try:
        while process.poll() is None:
            assert time.monotonic() < deadline, log.read_text()
            commands = descendants(process.pid)
            started |= commands.keys()
            actors |= {pid for pid, command in commands.items() if command.startswith("ray::Worker")}
            if kill and not killed and len(actors) == 2 and checkpoint.exists():
                if torch.load(checkpoint, weights_only=True)["progress"][0] >= 400:
                    os.kill(max(actors), signal.SIGKILL)
                    killed = True
            time.sleep(0.05)
    finally:
        process.kill()
    assert process.returncode == 0 and len(actors) == 2 and killed == kill, log.read_text()
    assert log.read_text().count("a Ray worker is lost, the others go on") == kill
    result, weights = outcome(tmp_path / "ray")
    assert result == alone[0]
    assert all(torch.equal(weight, alone[1][name]) for name, weight in weights.items())
    while any(map(at_work, started)):  # none of Ray's processes stays
        assert time.monotonic() < deadline
        time.sleep(0.2)
