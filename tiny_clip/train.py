"""Train the bundled model: a small CLIP that knows nothing but the scenes of this project.

    python -m tiny_clip.train             # train, write the model here, and print the held-out figures
    python -m tiny_clip.train --evaluate  # only the held-out figures

To add a scene, write a function like `mountaincar` in scenes.py, lines of captions.csv, and its share below.
"""

import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import open_clip
import torch
import torch.nn.functional as F
import tyro
from safetensors.torch import load_file, save_file
from torch.optim.lr_scheduler import OneCycleLR
from tqdm import trange

from clip_reward import CLIPReward, goal_baseline_reward, native_precision
from tiny_clip.captions import BASELINES, PROMPTS, SCRIPTS, Captions, is_true, tokenize
from tiny_clip.scenes import SIZE, Humanoids, cartpole, mountaincar

HERE = Path(__file__).resolve().parent
CONFIG = json.loads((HERE / "open_clip_config.json").read_text())
SHARES = {"cartpole": 0.21, "mountaincar": 0.22, "humanoid": 0.57}  # of a batch
FACTS = 5  # weight of `fact_loss`
ALPHAS = (0.0, 0.5, 1.0)  # of the held-out figures
LOOKS = {"cartpole": [{}], "mountaincar": [{}, {"textures": "original"}]}
LOOKS["humanoid"] = [{}, {"textures": "original", "camera": "original"}]


@dataclass
class Args:
    """Train tiny_clip from nothing and write it into this folder."""

    evaluate: bool = False  # only print the held-out figures of the model in `output`
    output: Path = HERE  # folder for the model
    start: Path | None = None  # folder of a model to go on with, instead of from nothing
    steps: int = 2400  # optimizer steps
    keep: tuple[int, ...] = ()  # write the model as it is before these steps, too: into folders OUTPUT/STEP
    batch_size: int = 1024  # image-text pairs a step, over all scenes
    humanoid_states: int = 120_000  # simulated and rendered before the training; all else is for each batch
    learning_rate: float = 2e-3  # peak of the cosine schedule
    seed: int = 1  # of weights, states and captions


def make_batch(scenes: dict[str, Callable], captions: dict, size: int, rng: np.random.Generator) -> tuple:
    """Of all scenes at once, as batch normalization has to see the mixture that it uses later.

    -> frames (N, 3, SIZE, SIZE), tokens (N, 32), facts (n, F) of each scene, and 1 for each true pair (N, N).
    """
    frames = []
    texts = []
    all_facts = {}
    true = []
    for name, scene in scenes.items():
        rendered, known = scene(int(SHARES[name] * size), rng)
        facts = captions[name].judge(known)
        mentioned = np.zeros(facts.shape, dtype=bool)
        for own, mentions in zip(facts, mentioned):
            text, said = captions[name].describe(own, rng)
            texts.append(text)
            mentions[said] = True
        frames.append(rendered)
        all_facts[name] = torch.from_numpy(facts)
        true.append(is_true(all_facts[name], torch.from_numpy(mentioned)).float())
    return torch.cat(frames), tokenize(texts, rng), all_facts, torch.block_diag(*true)


def contrastive_loss(
    image: torch.Tensor, text: torch.Tensor, scale: float, true: torch.Tensor
) -> torch.Tensor:
    """CLIP's loss with all true pairs as targets, not only the diagonal (as in UniCL, Yang et al. 2022).

    A caption is true of many frames. Were those its negatives, the loss would fight itself; as positives they
    also give a general caption ("a cart with a pole") its place: equally close to all frames of its scene.
    """
    logits = scale * text @ image.T  # (captions i, frames j)
    of_text = F.cross_entropy(logits, F.normalize(true, p=1))
    of_image = F.cross_entropy(logits.T, F.normalize(true.T, p=1))
    return (of_text + of_image) / 2


def fact_loss(logits: torch.Tensor, facts: torch.Tensor) -> torch.Tensor:
    """Cross entropy of what embeddings tell of each fact (N, F), mentioned or not; 0 where it is not known."""
    known = (facts < 2).float()
    return F.binary_cross_entropy_with_logits(logits, facts.clamp(max=1).float(), known, reduction="none")


def train(args: Args) -> None:
    args.output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    captions = {name: Captions(name) for name in SHARES}
    model = open_clip.CLIP(**CONFIG["model_cfg"])
    if args.start:
        model.load_state_dict(load_file(args.start / "open_clip_model.safetensors"))
    model.visual.to(memory_format=torch.channels_last)  # twice as fast for convolutions on a CPU
    size = CONFIG["model_cfg"]["embed_dim"]
    heads = torch.nn.ModuleDict({k: torch.nn.Linear(size, len(own.lines)) for k, own in captions.items()})
    parameters = [*model.parameters(), *heads.parameters()]
    matrices, others = ([p for p in parameters if (p.ndim >= 2) == kind] for kind in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.98), eps=1e-6, fused=True)
    schedule = OneCycleLR(optimizer, args.learning_rate, args.steps, pct_start=0.1, cycle_momentum=False)
    humanoids = Humanoids(args.humanoid_states, rng)
    scenes = {"cartpole": cartpole, "mountaincar": mountaincar, "humanoid": humanoids}
    make_batch(scenes, captions, 8192, np.random.default_rng(0))  # tells what is rare
    humanoids.drawn.clear()
    names = [task.replace("-", "_") for task in SCRIPTS["humanoid"].TASKS]
    tasks = [k for k, line in enumerate(captions["humanoid"].lines) if line["condition"] in names]

    # The next batch is made while this one is learned from.
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        coming = pool.submit(make_batch, scenes, captions, args.batch_size, rng)
        bf16 = native_precision("cpu") == "bf16"
        hardness = None
        progress = trange(args.steps, desc="train tiny_clip", unit="step")
        for step in progress:
            if step in args.keep:
                write(model, args.output / str(step))
            frames, tokens, facts, true = coming.result()
            if hardness is not None:
                humanoids.loss[humanoids.drawn.pop(0)] = hardness
            coming = pool.submit(make_batch, scenes, captions, args.batch_size, rng)
            pixels = (frames.float() / 127.5 - 1).contiguous(memory_format=torch.channels_last)
            with torch.autocast("cpu", torch.bfloat16, bf16):  # a step takes two thirds of the time
                embedded = model.encode_image(pixels), model.encode_text(tokens)
            image, text = (F.normalize(x.float(), dim=-1) for x in embedded)
            loss = contrastive_loss(image, text, model.logit_scale.exp(), true)
            parts = image.split([len(own) for own in facts.values()])
            told = [fact_loss(heads[name](10 * part), own) for part, (name, own) in zip(parts, facts.items())]
            hardness = told[-1][:, tasks].detach().sum(1).numpy()
            optimizer.zero_grad(set_to_none=True)
            told = [losses.sum() / (own < 2).sum() for losses, own in zip(told, facts.values())]
            (loss + FACTS * sum(told)).backward()
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                model.logit_scale.clamp_(0, math.log(100))
            progress.set_postfix(loss=f"{loss:.3f}", refresh=False)
        coming.cancel()

    write(model, args.output)


def write(model: torch.nn.Module, folder: Path) -> None:
    """Write weights, in float16, and configuration into a folder that --clip-model local-dir:FOLDER takes."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: w.half() if w.is_floating_point() else w for name, w in model.state_dict().items()}
    save_file({name: w.contiguous() for name, w in weights.items()}, folder / "weights.tmp")
    (folder / "weights.tmp").replace(folder / "open_clip_model.safetensors")
    (folder / "open_clip_config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")


@torch.no_grad()
def evaluate(folder: Path, n: int = 20_000) -> None:
    """Print EPIC distances of rewards to success conditions, goal states and others of the same weight."""
    from reward_check.dataset import label, renderer, states_at_random
    from reward_check.reward_models import balanced, epic_distance

    print("| scene and look | prompt | goal states |", *(f"α = {alpha} |" for alpha in ALPHAS))
    print("|---" * (3 + len(ALPHAS)) + "|")
    tasks = {prompt: task for task, (prompt, _) in SCRIPTS["humanoid"].TASKS.items()}
    for scene, script in SCRIPTS.items():
        rng = np.random.default_rng(10_000)  # training uses other states
        states, settings = states_at_random(script.__name__, None, n, rng)
        own = {prompt: tasks.get(prompt, "kneeling") for prompt in PROMPTS[scene]}  # the rewordings' task
        goals = {task: label(states, settings | {"task": task}) for task in {*own.values()}}
        for look in LOOKS[scene]:
            render = renderer(settings | look, SIZE, SIZE, 128, torch.device("cpu"))
            model = CLIPReward(f"local-dir:{folder}", BASELINES[scene])
            embedded = torch.cat([model.embed(render(some)) for some in states.split(256)])
            for prompt, task in own.items():
                goal = CLIPReward(f"local-dir:{folder}", prompt).goal
                rewards = [goal_baseline_reward(embedded, goal, model.goal, alpha) for alpha in ALPHAS]
                weight = balanced(goals[task])
                distances = [epic_distance(reward, goals[task], weight) for reward in rewards]
                cells = [" ".join([scene, *look.values()]), prompt, goals[task].sum().item()]
                print("|", *(f"{cell} |" for cell in cells), *(f"{distance:.3f} |" for distance in distances))


if __name__ == "__main__":
    args = tyro.cli(Args)
    if not args.evaluate:
        train(args)
    evaluate(args.output)
