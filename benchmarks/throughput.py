"""How close each script's training loop comes to the bare image encoder, and where the rest of the time goes.

    python -m benchmarks.throughput
    python -m benchmarks.throughput --models tiny --num-envs 8 64 512 4096 --steps-per-round 12800

Each row is measured in a process of its own: first each phase alone, by the script's own functions, then the
bare `encode_image` and the script in turns. `render` and `CLIP` (pixels to rewards) use all cores, simulation
and updates one, as in the loop. Efficiency is the loop's steps/s ÷ the bare encoder's frames/s; `of the
cores` is the loop's steps/s ÷ what the cores would allow if they were never idle: steps ÷ (the sum of the
phases' core-seconds ÷ cores). Every step is one frame. The loop's figure is the script's `charts/SPS`,
without evaluations. A row that fails says so.
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
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import harmonic_mean, median
from types import ModuleType, SimpleNamespace

import open_clip
import torch
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tqdm import tqdm

from clip_reward import native_precision
from reward_check.dataset import Script, renderer
from scale.cuda_graphs import replayed

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Args:
    """Time the loops, their phases and the bare encoder."""

    scripts: tuple[Script, ...] = Script.__args__  # which of the scripts
    models: tuple[str, ...] = ("tiny", "ViT-B-32")  # tiny, NAME/TAG, or open_clip's NAME with random weights
    precisions: tuple[str, ...] = ()  # fp32, bf16 (default: what the scripts choose on this device)
    num_envs: tuple[int, ...] = ()  # environments side by side (default: the script's)
    steps_per_round: int = 0  # with as many updates a step as the script makes (default: the script's)
    rounds: int = 3  # measured rounds of the loop in a repetition
    repetitions: int = 3  # of encoder and loop in turns: median, and range of the efficiency
    clip_batch_size: int = 0  # frames rendered and scored at once (default: the script's)
    device: str = "cuda" if torch.cuda.is_available() else "cpu"  # cpu or cuda


def model_and_note(name: str, folder: str) -> tuple[str, str]:
    """An architecture without weights -> the same with random ones, and what to call it."""
    if name == "tiny" or "/" in name or ":" in name:
        return name, name
    torch.save(open_clip.create_model(name).state_dict(), f"{folder}/random.pt")
    return f"{name}/{folder}/random.pt", f"{name} (random weights)"


def settings_of_loop(script: str, options: dict, rounds: int) -> dict:
    """Options of a script -> these for a random round, one to warm up, and so many without evaluations."""
    settings = importlib.import_module(script).Args(**options)
    steps = settings.num_envs * settings.episode_length
    measured = {"learning_starts": steps, "total_timesteps": (2 + rounds) * steps, "evaluate_every": 2**39}
    return options | measured


def run_loop(script: str, options: dict, rounds: int) -> float:
    """Train in a process of its own -> steps/s over so many rounds that learn, without evaluations."""
    words = [f"--{name}={value}" for name, value in settings_of_loop(script, options, rounds).items()]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, f"{script}.py", *words, "--episodes=1", f"--run-dir={folder}/run"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{script}.py failed: {done.stderr.strip().splitlines()[-1]}")
        events = EventAccumulator(f"{folder}/run", {"scalars": 0}).Reload()
        return harmonic_mean([event.value for event in events.Scalars("charts/SPS")][-rounds:])


def parts(script: ModuleType, settings) -> tuple:
    """-> the script's environments, its policy, and its update of (batch, …, settings)."""
    device = torch.device(settings.device)
    if hasattr(script, "QNetwork"):
        policy = script.QNetwork().to(device)
        optimizer = torch.optim.Adam(policy.parameters(), fused=True, capturable=True)
        update = partial(script.dqn_update, policy, deepcopy(policy), optimizer)
        return script.CartPole(settings.num_envs), policy, update
    if hasattr(script, "MountainCar"):
        envs = script.MountainCar(settings.num_envs)
        sac = script.SAC().to(device)
    else:
        envs = script.Humanoids(settings.num_envs)
        envs.pool = ThreadPoolExecutor(1)  # alone on one core, as the other phases
        obs_size = envs.single_observation_space.shape[0] - 2
        sac = script.SAC(obs_size, script.ACTION_SIZE, settings).to(device)
    optimizers = sac.optimizers(settings.learning_rate)
    for optimizer in optimizers.values():
        optimizer.param_groups[0]["capturable"] = True
    return envs, sac.policy, partial(script.sac_update, sac, optimizers)


def sampler(script: ModuleType, states: torch.Tensor, actions: torch.Tensor, settings) -> Callable[[], tuple]:
    """A round -> a function that draws a batch of it, as the script does; all rewards are 0."""
    device = torch.device(settings.device)
    a_round = (states.to(device), actions.to(device), torch.zeros(actions.shape[:2], device=device))
    if hasattr(script, "sample"):
        return partial(script.sample, tuple(part[None] for part in a_round), settings)
    rb = script.ReplayBuffer(states.shape[2], settings, device)
    rb.add(*a_round)
    return partial(rb.sample, settings)


def rate(work: Callable, batches: list, threads: int = 1) -> float:
    """Items per second of work(thread, batch) on the batches, for 3 seconds or more, by so many threads."""

    def one_pass() -> None:
        list(pool.map(lambda k: [work(k, batch) for batch in batches[k::threads]], range(threads)))
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    own_threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(own_threads,)) as pool:
        one_pass()
        start = time.perf_counter()
        passes = 0
        while time.perf_counter() - start < 3:
            one_pass()
            passes += 1
        return passes * sum(len(batch) for batch in batches) / (time.perf_counter() - start)


def measure(name: str, model: str, precision: str, num_envs: int | None, args: Args) -> str:
    """One row of the table."""
    script = importlib.import_module(name)
    device = torch.device(args.device)
    cores = torch.get_num_threads()
    defaults = script.Args()
    num_envs = num_envs or defaults.num_envs
    default_steps = defaults.num_envs * defaults.episode_length
    length = max((args.steps_per_round or default_steps) // num_envs, 1)
    steps = length * num_envs
    updates = max(round(steps * defaults.gradient_steps / default_steps), 1)
    batch_size = args.clip_batch_size or defaults.clip_batch_size
    with tempfile.TemporaryDirectory() as folder:
        model, shown = model_and_note(model, folder)
        options = {"clip_model": model, "precision": precision, "device": args.device, "num_envs": num_envs}
        options |= {"clip_batch_size": batch_size, "episode_length": length, "gradient_steps": updates}
        options["n_step"] = min(defaults.n_step, length)  # an episode of 4,096 environments has two steps
        settings = script.Args(prompt=("a car",), **settings_of_loop(name, options, args.rounds))

        # The phases alone.
        threads = cores if device.type == "cpu" else 1
        torch.set_num_threads(1)
        envs, policy, update = parts(script, settings)
        actor = deepcopy(policy).cpu()
        played = deque(maxlen=length)  # the states of an episode's steps, as they are to be rendered

        def play(*_) -> tuple:
            return script.rollout(actor, 0.5, envs, SimpleNamespace(add=played.append), 1, settings)

        sample = sampler(script, *play(), settings)

        def learn(*_) -> None:
            fast_update = lambda *kind: update(sample(), *kind, settings)  # noqa: E731
            if device.type == "cuda":
                fast_update = replayed(fast_update, device)
            kinds = [()] * updates
            if hasattr(script, "TASKS"):  # does it update the actor, too?
                kinds = [(k % settings.policy_frequency == 0,) for k in range(updates)]
            for kind in kinds:
                fast_update(*kind)

        simulate = rate(play, [range(steps)])
        updating = rate(learn, [range(steps)])
        worker = script.Worker(settings, device)
        reward_model = worker.reward_model
        look = (vars(settings) | {"script": name}, *reward_model.size, batch_size, device)
        renderers = [renderer(*look) for _ in range(threads)]

        def encode(_, pixels: torch.Tensor) -> None:
            reward_model.model.encode_image(pixels)

        states = torch.cat([*played])
        wanted = 8 * threads * batch_size  # so that all threads have as much to do
        batches = states.repeat(-(-wanted // len(states)), 1)[:wanted].split(batch_size)
        frames = [renderers[0](batch) for batch in batches]
        dtype = reward_model.input_dtype
        pixels = [((some - 127.0) / 64).to(dtype, memory_format=torch.channels_last) for some in frames]
        renders = rate(lambda thread, some: renderers[thread](some), batches, threads)
        scores = rate(lambda _, some: reward_model(some), frames, threads)
        encoders = []
        loops = []
        for _ in range(args.repetitions):
            rates = [rate(encode, pixels, threads)]  # one thread a core or PyTorch's own, whichever is faster
            if threads > 1:
                torch.set_num_threads(cores)
                rates.append(rate(encode, pixels))
                torch.set_num_threads(1)
            encoders.append(max(rates))
            loops.append(run_loop(name, options, args.rounds))
    loop = median(loops)
    efficiencies = sorted(b / a for a, b in zip(encoders, loops))
    columns = [name, shown, precision, num_envs]
    columns += [f"{value:.0f}" for value in (simulate, renders, scores, updating, median(encoders), loop)]
    columns += [f"{median(efficiencies):.2f} ({efficiencies[0]:.2f} to {efficiencies[-1]:.2f})"]
    if device.type == "cuda":

        def a_round() -> None:
            play()
            learn()
            for some in torch.cat([*played]).split(batch_size):
                worker.label(some)

        columns += [synchronisations(a_round), f"{torch.cuda.max_memory_allocated(device) / 2**30:.1f}"]
    else:
        core_seconds = 1 / simulate + 1 / updating + cores * (1 / renders + 1 / scores)  # a step
        memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
        columns += [f"{loop * core_seconds / cores:.2f}", f"{memory:.1f}"]
    return " | ".join(map(str, columns))


def synchronisations(work: Callable) -> int:
    """How often the CPU waits for the GPU in work(), as PyTorch counts it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        work()
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in caught)


def main() -> None:
    args = tyro.cli(Args)
    sys.stdout.reconfigure(line_buffering=True)  # a row is out when it is measured
    precisions = args.precisions or (native_precision(args.device),)
    all_envs = args.num_envs or (None,)
    rows = list(product(args.models, precisions, args.scripts, all_envs))
    head = "script | CLIP model | precision | environments | simulate | render | CLIP | update | encode_image"
    head += " | loop | efficiency (range)"
    of_gpu = " | waits for the GPU in a round | memory of the phases, GiB"
    head += " | of the cores | memory, GiB" if args.device == "cpu" else of_gpu
    print(f"{args.device}, {torch.get_num_threads()} cores; steps/s or frames/s")
    print(f"| {head} |")
    print("|---" * (head.count("|") + 1) + "|")
    failed = 0
    for model, precision, script, num_envs in tqdm(rows, desc="measure", unit="row"):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:  # for its memory
            try:
                cells = pool.submit(measure, script, model, precision, num_envs, args).result()
            except Exception as error:  # out of memory, say: the next row may fit
                why = " ".join(f"{type(error).__name__}: {error}".split())[:300].replace("|", "/")
                cells = f"{script} | {model} | {precision} | {num_envs or ''} | failed: {why}"
                failed += 1
        tqdm.write(f"| {cells} |")
    if failed:
        sys.exit(f"{failed} of {len(rows)} rows failed")


if __name__ == "__main__":
    main()
