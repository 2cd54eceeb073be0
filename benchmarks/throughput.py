"""How close each script's training loop comes to the bare image encoder, and where the rest of the time goes.

    python benchmarks/throughput.py
    python benchmarks/throughput.py --models tiny --num-envs 8 64 512 4096 --steps-per-round 12800

Each row is measured in a process of its own: first each phase alone, then the bare `encode_image` and the loop in turns. `draw` and
`CLIP` (pixels to rewards) use all cores; the humanoid's simulation uses all but one, the others' and all updates use one, as in the
loop. Efficiency is the loop's steps/s ÷ the bare encoder's frames/s; `of the cores` is the loop's steps/s ÷ what the cores would
allow if they were never idle: steps ÷ (the sum of the phases' core-seconds ÷ cores). Every step is one frame. The loop's figure is
that of TensorBoard, without writing logs, pictures and checkpoints.
"""

import contextlib
import importlib
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from unittest import mock

import numpy as np
import open_clip
import torch
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from clip_reward import CLIPReward, native_precision  # noqa: E402

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


def run_loop(script, options: list[str]) -> dict[str, float]:
    """Train with these options, without evaluation and pictures -> steps/s and seconds a round by phase, after two rounds."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        quiet = stack.enter_context(open(os.devnull, "w"))
        for redirect in (contextlib.redirect_stdout, contextlib.redirect_stderr):
            stack.enter_context(redirect(quiet))
        nothing = ({"clip_return": 0.0, "ground_truth_return": 0.0}, None, None)
        stack.enter_context(mock.patch.object(script, "evaluate", lambda *_: nothing))
        blank = np.zeros((8, 8, 3), np.uint8)
        stack.enter_context(mock.patch.object(script, "report_evaluation", lambda *_: blank))
        stack.enter_context(mock.patch.object(script, "picture", lambda *_: script.Image.fromarray(blank)))
        stack.enter_context(mock.patch.object(sys, "argv", [script.SCRIPT, *options, "--run-dir", f"{folder}/run"]))
        script.main()
        events = EventAccumulator(f"{folder}/run", {"scalars": 0}).Reload()
    names = [name for name in events.Tags()["scalars"] if name.startswith("seconds_per_round/") or name == "charts/SPS"]
    rounds = {name.split("/")[1]: [event.value for event in events.Scalars(name)][2:] for name in names}
    steps_per_second = rounds.pop("SPS")
    means = {name: sum(values) / len(values) for name, values in rounds.items()}
    return means | {"steps/s": len(steps_per_second) / sum(1 / value for value in steps_per_second)}


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
        options = f"--clip-model {model} --precision {precision} --device {args.device} --clip-batch-size {batch_size} "
        options += f"--num-envs {num_envs} --episode-length {length} --gradient-steps {updates} --learning-starts {steps} "
        options += f"--total-timesteps {steps * (2 + args.rounds)}"
        options = options.split()

        # The phases alone, in the script's own loop with the others left out.
        reward_model = CLIPReward(model, "one thing", "another thing", 0.5, device, batch_size, precision)
        played, act = [], script.act

        def act_and_keep(*arguments):
            played[:] = act(*arguments)
            return played

        def act_again(*arguments):
            labeller = next(argument for argument in arguments if isinstance(argument, script.Labeller))
            labeller.submit(states.flatten(0, 1))
            return played

        def alone(phase: str, options: list[str]) -> float:
            """Seconds a round of a loop in which only this phase is left; on a GPU a phase's own clock sees only the launches."""
            run = run_loop(script, options)
            return run[phase] if device.type == "cpu" else steps / run["steps/s"]

        def no_labels(self, states):
            rewards = torch.zeros(len(states), device=device)
            return (rewards, rewards, 0.0, 0.0) if name == "sac_clip_humanoid" else (rewards, 0.0, 0.0)

        with mock.patch.object(script.Labeller, "label", no_labels):
            with mock.patch.object(script, "act", act_and_keep):
                simulate = alone("simulate", [*options, "--gradient-steps", "1"])
            states = played[2] if name == "sac_clip_humanoid" else played[0][1:]  # (steps of an episode, environments, …)
            with mock.patch.object(script, "act", act_again):
                update = alone("update", options)
        torch.set_num_threads(1)
        if name == "sac_clip_humanoid":
            look = (defaults.textures, defaults.camera, defaults.supersample, batch_size, device)
            scenes = [script.Scene(*reward_model.size, *look) for _ in range(cores if device.type == "cpu" else 1)]

            def draw(thread: int, states: torch.Tensor) -> torch.Tensor:
                return scenes[thread].draw(states.to(device))[0]

        else:
            look = (defaults.textures,) if name == "sac_clip_mountaincar" else ()

            def draw(thread: int, states: torch.Tensor) -> torch.Tensor:
                return script.draw(states, *reward_model.size, *look)

        threads = cores if device.type == "cpu" else 1
        flat, wanted = states.flatten(0, 1), 8 * threads * batch_size  # so that all threads have as much to do
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

        pairs = []
        for _ in range(args.repetitions):
            pairs.append((bare(), run_loop(script, options)["steps/s"]))
    encoder, loop = (median(column) for column in zip(*pairs))
    efficiencies = sorted(b / a for a, b in pairs)
    simulate_cores = min(max(cores - 1, 1), num_envs) if name == "sac_clip_humanoid" else 1
    core_seconds = simulate * simulate_cores + update + steps * cores * (1 / draws + 1 / scores)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    memory = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else memory
    columns = [name, shown, precision, num_envs, *(f"{v:.0f}" for v in (steps / simulate, draws, scores, steps / update))]
    columns += [f"{encoder:.0f}", f"{loop:.0f}"]
    columns += [f"{median(efficiencies):.2f} ({efficiencies[0]:.2f} to {efficiencies[-1]:.2f})"]
    if device.type == "cuda":
        columns += [f"{flops * loop / 1e12:.1f}", f"{flops * loop / matmul_rate(device):.2f}"]
    else:
        columns += [f"{loop / (steps * cores / core_seconds):.2f}"]
    return " | ".join(map(str, [*columns, f"{memory:.1f}"]))


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
        ("TFLOP/s", "of a bf16 matrix product", "GPU memory, GiB") if args.device != "cpu" else ("of the cores", "memory, GiB")
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
