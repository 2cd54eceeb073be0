"""How close each script's training loop comes to the bare image encoder, and where the rest of the time goes.

    python benchmarks/throughput.py
    python benchmarks/throughput.py --models tiny --num-envs 8 64 512 4096 --steps-per-round 12800

Each row is measured in a process of its own: first each phase alone, by the script's own functions, then the bare `encode_image` and
the script in turns. `draw` and `CLIP` (pixels to rewards) use all cores, simulation and updates one, as in the loop. Efficiency is the
loop's steps/s ÷ the bare encoder's frames/s; `of the cores` is the loop's steps/s ÷ what the cores would allow if they were never
idle: steps ÷ (the sum of the phases' core-seconds ÷ cores). Every step is one frame. The loop's figure is the script's `charts/SPS`.
"""

import importlib
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import harmonic_mean, median
from types import ModuleType, SimpleNamespace

import open_clip
import torch
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from clip_reward import native_precision  # noqa: E402

SCRIPTS = ("dqn_clip_cartpole", "sac_clip_mountaincar", "sac_clip_humanoid")


@dataclass
class Args:
    """Time the loops, their phases and the bare encoder."""

    scripts: tuple[str, ...] = SCRIPTS
    """which of the scripts"""
    models: tuple[str, ...] = ("tiny", "ViT-B-32")
    """tiny, NAME/TAG, or architectures of open_clip without a tag, which get random weights"""
    precisions: tuple[str, ...] = ()
    """fp32, bf16 (default: what the scripts choose on this device)"""
    num_envs: tuple[int, ...] = ()
    """environments side by side (default: the script's)"""
    steps_per_round: int = 0
    """steps between two labellings, with as many updates a step as the script makes (default: the script's)"""
    rounds: int = 3
    """of the loop in a repetition, after one without learning and one to warm up"""
    repetitions: int = 3
    """of encoder and loop in turns; the table gives the median and the range of the efficiency"""
    clip_batch_size: int = 0
    """frames drawn and scored at once (default: the script's)"""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """cpu or cuda"""


def model_and_note(name: str, folder: str) -> tuple[str, str]:
    """An architecture without weights -> the same with random ones, and what to call it."""
    if name == "tiny" or "/" in name or ":" in name:
        return name, name
    torch.save(open_clip.create_model(name).state_dict(), f"{folder}/random.pt")
    return f"{name}/{folder}/random.pt", f"{name} (random weights)"


def run_loop(script: str, options: dict, rounds: int) -> float:
    """Train in a process of its own -> steps/s over the last so many rounds."""
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, ROOT / f"{script}.py", *words, "--episodes=1", f"--run-dir={folder}/run"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{script}.py failed:\n{done.stderr}")
        events = EventAccumulator(f"{folder}/run", {"scalars": 0}).Reload()
        return harmonic_mean([event.value for event in events.Scalars("charts/SPS")][-rounds:])


def parts(script: ModuleType, settings) -> tuple:
    """-> the script's environments, policy and replay buffer, all new, and a function that makes update number k."""
    device = torch.device(settings.device)
    if script.SCRIPT == "dqn_clip_cartpole":
        rb, policy, target = (
            part.to(device) for part in (script.ReplayBuffer(settings), script.QNetwork(), script.QNetwork())
        )
        optimizer = torch.optim.Adam(policy.parameters(), settings.learning_rate, fused=True)
        learn = [policy, target, optimizer]
        envs = script.CartPole(settings.num_envs)
        return envs, policy, rb, lambda k: script.dqn_update(*learn, rb.sample(settings.batch_size, 1), settings)
    if script.SCRIPT == "sac_clip_mountaincar":
        envs, rb, sac = script.MountainCar(settings.num_envs), script.ReplayBuffer(settings), script.SAC()
    else:
        envs = script.make_envs(settings.num_envs, settings)
        size = envs.single_observation_space.shape[0]
        rb, sac = script.ReplayBuffer(size, settings), script.SAC(size, settings)
    rb, sac = rb.to(device), sac.to(device)
    optimizers = sac.optimizers(settings.learning_rate)

    def update(k: int) -> None:
        if script.SCRIPT == "sac_clip_humanoid":  # its actor learns by every second update
            batch = rb.sample(settings.batch_size, settings.n_step, 1)
            script.sac_update(sac, optimizers, batch, k % 2 == 0, settings)
        else:
            script.sac_update(sac, optimizers, rb.sample(settings.batch_size, 1), settings)

    return envs, sac.policy, rb, update


def rate(work: Callable, batches: list, threads: int, device: torch.device, seconds: float = 3.0) -> float:
    """Items per second of work(thread, batch) on the batches, again and again, by so many threads."""

    def one_pass() -> None:
        list(pool.map(lambda k: [work(k, batch) for batch in batches[k::threads]], range(threads)))
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    own_threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(own_threads,)) as pool:
        one_pass()
        start, passes = time.perf_counter(), 0
        while passes == 0 or time.perf_counter() - start < seconds:
            one_pass()
            passes += 1
        return passes * sum(len(batch) for batch in batches) / (time.perf_counter() - start)


def measure(name: str, model: str, precision: str, num_envs: int | None, args: Args) -> str:
    """One row of the table."""
    script, device = importlib.import_module(name), torch.device(args.device)
    cores, defaults = torch.get_num_threads(), script.Args()
    num_envs = num_envs or defaults.num_envs
    steps = args.steps_per_round or defaults.num_envs * defaults.episode_length
    length = max(steps // num_envs, 1)
    steps = length * num_envs
    updates = max(round(steps * defaults.gradient_steps / (defaults.num_envs * defaults.episode_length)), 1)
    batch_size = args.clip_batch_size or defaults.clip_batch_size
    with tempfile.TemporaryDirectory() as folder:
        model, shown = model_and_note(model, folder)
        options = {"clip_model": model, "precision": precision, "device": args.device, "clip_batch_size": batch_size}
        options |= {"num_envs": num_envs, "episode_length": length, "gradient_steps": updates, "learning_starts": steps}
        options |= {
            "total_timesteps": steps * (2 + args.rounds),
            "checkpoint_every": 2**39,
        }  # a round without learning, one to warm up
        if hasattr(defaults, "n_step"):
            options["n_step"] = min(defaults.n_step, length)  # an episode of 4,096 environments has two steps
        settings = script.Args(prompt=("a goal",), **options)

        # The phases alone.
        threads = cores if device.type == "cpu" else 1
        torch.set_num_threads(1)
        envs, policy, rb, update = parts(script, settings)
        actor, drawn = (
            deepcopy(policy).cpu(),
            deque(maxlen=length),
        )  # the states of an episode's steps, as they are to be drawn

        def play(*_) -> None:
            rb.add(0, *script.rollout(actor, 0.5, envs, SimpleNamespace(add=drawn.append), 1, settings), 0.0)

        simulate = rate(play, [range(steps)], 1, device)
        updating = rate(lambda _, numbers: [update(k) for k in numbers], [range(updates)], 1, device) * steps / updates
        workers = [script.Worker(settings, device)]
        reward_model = workers[0].reward_model
        workers += [script.Worker(settings, device, reward_model) for _ in range(threads - 1)]

        def draw(thread: int, states: torch.Tensor) -> torch.Tensor:
            if name == "dqn_clip_cartpole":
                return script.draw(states.to(device), *reward_model.size)
            frames = workers[thread].scene.draw(states)
            return frames[0] if name == "sac_clip_humanoid" else frames

        flat, wanted = torch.cat([*drawn]), 8 * threads * batch_size  # so that all threads have as much to do
        batches = list(flat.repeat(-(-wanted // len(flat)), 1)[:wanted].split(batch_size))
        frames = [draw(0, batch) for batch in batches]
        pixels = [((chunk - 127.0) / 64).to(reward_model.input_dtype, memory_format=torch.channels_last) for chunk in frames]
        draws = rate(draw, batches, threads, device)
        scores = rate(lambda _, chunk: reward_model(chunk), frames, threads, device)
        torch.backends.mha.set_fastpath_enabled(False)  # the counter does not know it
        with FlopCounterMode(display=False) as counter:
            reward_model.model.encode_image(pixels[0])
        torch.backends.mha.set_fastpath_enabled(True)
        flops = counter.get_total_flops() / len(pixels[0])

        def bare() -> float:
            """frames/s of encode_image with one thread a core or with PyTorch's own threads, whichever is faster."""
            rates = [rate(lambda _, chunk: reward_model.model.encode_image(chunk), pixels, threads, device)]
            if threads > 1:
                torch.set_num_threads(cores)
                rates.append(rate(lambda _, chunk: reward_model.model.encode_image(chunk), pixels, 1, device))
                torch.set_num_threads(1)
            return max(rates)

        pairs = [(bare(), run_loop(name, options, args.rounds)) for _ in range(args.repetitions)]
    encoder, loop = (median(column) for column in zip(*pairs))
    efficiencies = sorted(b / a for a, b in pairs)
    core_seconds = 1 / simulate + 1 / updating + cores * (1 / draws + 1 / scores)  # a step
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    memory = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else memory
    columns = [name, shown, precision, num_envs, *(f"{v:.0f}" for v in (simulate, draws, scores, updating))]
    columns += [f"{encoder:.0f}", f"{loop:.0f}"]
    columns += [f"{median(efficiencies):.2f} ({efficiencies[0]:.2f} to {efficiencies[-1]:.2f})"]
    if device.type == "cuda":

        def a_round() -> None:
            play()
            for k in range(updates):
                update(k)
            for states in torch.cat([*drawn]).split(batch_size):
                workers[0].label(states)

        columns += [f"{flops * loop / 1e12:.1f}", f"{flops * loop / matmul_rate(device):.2f}", synchronisations(a_round)]
    else:
        columns += [f"{loop * core_seconds / cores:.2f}"]
    return " | ".join(map(str, [*columns, f"{memory:.1f}"]))


def synchronisations(work: Callable) -> int:
    """How often the CPU waits for the GPU in work(), as PyTorch counts it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        work()
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in caught)


def matmul_rate(device: torch.device, size: int = 8192) -> float:
    """FLOP/s of a large matrix product in bfloat16."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return rate(lambda *_: a @ b, [range(1)] * 10, 1, device) * 2 * size**3


def main() -> None:
    args = tyro.cli(Args)
    unknown = set(args.scripts) - set(SCRIPTS)
    if unknown:
        sys.exit(f"no script {', '.join(unknown)}: there are {', '.join(SCRIPTS)}")
    precisions = args.precisions or (native_precision(args.device),)
    rows = [(s, m, p, n) for m in args.models for p in precisions for s in args.scripts for n in args.num_envs or (None,)]
    last = (
        ("TFLOP/s", "of a bf16 matrix product", "waits for the GPU in a round", "GPU memory of the phases, GiB")
        if args.device != "cpu"
        else ("of the cores", "memory, GiB")
    )
    head = ("script", "CLIP model", "precision", "environments", "simulate", "draw", "CLIP", "update", "encode_image", "loop")
    print(f"{args.device}, {torch.get_num_threads()} cores; steps/s or frames/s")
    print("|", " | ".join((*head, "efficiency (range)", *last)), "|")
    print("|---" * (len(head) + 1 + len(last)) + "|")
    # Each row in a process of its own, for its memory.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for row in tqdm(rows, desc="measure", unit="row"):
            tqdm.write(f"| {pool.submit(measure, *row, args).result()} |")


if __name__ == "__main__":
    main()
