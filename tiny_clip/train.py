"""Train the bundled model: a small CLIP that knows nothing but the scenes of this project.

    python tiny_clip/train.py             # train, write the model into this folder, print the held-out figures
    python tiny_clip/train.py --evaluate  # only the held-out figures

Frames are drawn anew for every batch by the scripts' own drawing functions; captions are composed from the states. To add a
scene, write one function like `mountaincar_scene` and add it to SCENES.
"""

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import open_clip
import torch
import torch.nn.functional as F
import tyro
from safetensors.torch import save_file
from tqdm import trange

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import dqn_clip_cartpole  # noqa: E402
import sac_clip_mountaincar  # noqa: E402
from clip_reward import CLIPReward, RewardModelError  # noqa: E402

SIZE = 64  # pixels, frames are square
MODEL_CFG = {
    "embed_dim": 128,
    "vision_cfg": {"image_size": SIZE, "layers": [2, 2, 2, 2], "width": 8, "patch_size": None},
    "text_cfg": {"context_length": 32, "vocab_size": 49408, "width": 64, "heads": 4, "layers": 2},
}
PREPROCESS_CFG = {"size": SIZE, "mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic", "resize_mode": "squash"}

# Never in a caption: the paper's goal and baseline prompts (the reward has to come from understanding other wordings) ...
CARTPOLE_PROMPT, CARTPOLE_BASELINE = "pole vertically upright on top of the cart", "pole and cart"
# ... and these further wordings, to see how much depends on the words.
CARTPOLE_REWORDINGS = (
    "a pole balanced vertically on the cart",
    "the stick stands straight up on the cart",
    "a vertical pole on a cart",
    "the pole is in an upright position",
)
MOUNTAINCAR_PROMPT = "a car at the peak of the mountain, next to the yellow flag"
MOUNTAINCAR_BASELINE = "a car in the mountain"
MOUNTAINCAR_REWORDINGS = (
    "the car has climbed all the way up to the yellow flag",
    "a car on the mountain top beside the flag",
    "the vehicle is at the summit",
    "a car at the flag",
)
HELD_OUT = {CARTPOLE_PROMPT, CARTPOLE_BASELINE, *CARTPOLE_REWORDINGS}
HELD_OUT |= {MOUNTAINCAR_PROMPT, MOUNTAINCAR_BASELINE, *MOUNTAINCAR_REWORDINGS}


@dataclass
class Args:
    """Train tiny_clip from nothing and write it into this folder."""

    evaluate: bool = False
    """only print the held-out figures of the model in `output`"""
    output: Path = HERE
    """folder for the model"""
    steps: int = 600
    """optimizer steps"""
    batch_size: int = 768
    """image-text pairs a step, as many of each scene"""
    learning_rate: float = 2e-3
    """peak of the cosine schedule"""
    weight_decay: float = 0.05
    """of AdamW, on matrices only"""
    seed: int = 1
    """of weights, states and captions"""


# ---- Scenes: n -> frames (n, 3, SIZE, SIZE) uint8, n captions, facts (n, F) int, mentioned (n, F) bool. A fact is a number that
# holds for the frame (is the pole within 12° of upright, in which fifth of the track is the cart, …); `mentioned` marks those
# that the caption speaks of. Caption i is true of frame j if the two agree in every fact that i mentions: the loss asks for it.


def pick(rng: np.random.Generator, words: str) -> str:
    """One of the alternatives "a|b|c"."""
    options = words.split("|")
    return options[rng.integers(len(options))]


def holds_held_out(caption: str) -> bool:
    return any(sentence in caption for sentence in HELD_OUT)


EXACTLY = "perfectly|exactly|precisely|completely|absolutely|quite"
CARTPOLE_POSTURES = (  # at most so many degrees from upright: what one says where that holds, and where it does not
    (
        3,
        "EXACTLY upright|EXACTLY vertical|EXACTLY balanced|EXACTLY straight",
        "",
    ),
    (
        6,
        "upright and vertical|vertical and upright|straight and upright|standing vertical and straight|well balanced and upright|"
        "upright in balance",
        "",
    ),
    (
        12,
        "upright|vertical|standing upright|balanced|standing straight|held upright|standing up|erect|in balance|"
        "standing vertically|held vertically|vertically balanced|pointing vertically up",
        "tilted|leaning|not upright|not vertical|off balance|no longer vertical|tipping over|unbalanced|slanted",
    ),
    (
        30,
        "roughly upright|mostly upright|nearly vertical|close to upright|almost balanced",
        "leaning far over|falling|strongly tilted",
    ),
    (60, "pointing up|rather steep|not fallen yet", "fallen|fallen over|toppled|fallen down|knocked over"),
    (90, "pointing upwards|above the track|rising", "pointing below the track|hanging|pointing down|dropped|hanging down"),
    (
        150,
        "",
        "hanging straight down|upside down|pointing straight down|hanging vertically below the cart|fallen all the way down",
    ),
)
DEGREES = np.array([5, 10, 15, 20, 30, 45, 60, 75, 90, 105, 120, 135, 150, 165])  # from upright
HORIZONTAL, SIDE, PLACE = len(CARTPOLE_POSTURES) + len(DEGREES) + np.arange(3)  # the other facts
CARTPOLE_PLACES = ("at the far left", "to the left", "in the middle", "to the right", "at the far right")


def cartpole_scene(n: int, rng: np.random.Generator):
    """Cart-poles: half of them within 25° of upright, the rest at any angle; the cart anywhere on the track."""
    degrees = np.where(rng.random(n) < 0.5, rng.uniform(-25, 25, n), rng.uniform(-180, 180, n))
    x = rng.uniform(-2.4, 2.4, n)
    states = np.stack([x, 0 * x, np.radians(degrees), 0 * x], axis=1)
    frames = dqn_clip_cartpole.draw(torch.from_numpy(states), SIZE, SIZE)

    within = np.stack([np.abs(degrees) <= limit for limit, _, _ in CARTPOLE_POSTURES], axis=1)
    horizontal = np.abs(np.abs(degrees) - 90) < 15
    side = degrees > 0
    place = np.floor((x + 2.4) / 0.96).clip(0, 4).astype(int)
    beyond = np.abs(degrees)[:, None] >= DEGREES
    facts = np.concatenate([within, beyond, np.stack([horizontal, side, place], axis=1)], axis=1).astype(int)
    mentioned = np.zeros(facts.shape, dtype=bool)
    captions = []
    for i, says in enumerate(mentioned):
        text = ""
        while not text or holds_held_out(text):
            says[:] = False
            pole = pick(rng, "pole|the pole|a pole|a wooden pole|a stick|the rod")
            cart = pick(rng, "the cart|a cart|a black cart|cart|the small black cart")
            on = pick(rng, f"on {cart}|on top of {cart}|attached to {cart}|of {cart}||")
            way = "right" if side[i] else "left"
            kind = rng.random()
            if kind < 0.05:  # what the baseline says, in other words: true of every frame of the scene
                text = pick(
                    rng,
                    f"{cart} with {pole}|{pole} attached to {cart}|{cart} and {pole}|{pole} and {cart} on a track|cart pole",
                )
            elif kind < 0.12:
                text = f"{cart} {CARTPOLE_PLACES[place[i]]}" + pick(rng, "| of the track| with a pole")
                says[PLACE] = True
            elif kind < 0.3:
                k = rng.integers(len(DEGREES))
                says[len(CARTPOLE_POSTURES) + k] = True
                how = pick(rng, "more than|at least|over" if beyond[i, k] else "less than|not even|under")
                text = f"{pole} {on} {how} {DEGREES[k]} degrees " + pick(rng, "from upright|from vertical|off balance")
            else:
                if horizontal[i] and rng.random() < 0.4:
                    how, says[HORIZONTAL] = pick(rng, "horizontal|lying flat|sideways|level with the ground"), True
                else:
                    can_say = [k for k, words in enumerate(CARTPOLE_POSTURES) if words[1 if within[i, k] else 2]]
                    k = rng.choice(can_say)
                    how, says[k] = pick(rng, CARTPOLE_POSTURES[k][1 if within[i, k] else 2]), True
                    how = how.replace("EXACTLY", pick(rng, EXACTLY))
                text = pick(
                    rng, f"{pole} {how} {on}|{pole} {on} {how}|{pole} is {how} {on}|{pole} {on} is {how}|{how} {pole} {on}"
                )
                if not within[i, 0] and within[i, -1] and rng.random() < 0.3:
                    text += pick(rng, " to the | towards the |, on the ") + way
                    says[SIDE] = True
                if rng.random() < 0.25:
                    text += pick(rng, ", the cart |, cart |, with the cart ") + CARTPOLE_PLACES[place[i]]
                    says[PLACE] = True
            text = " ".join(text.replace(" ,", ",").split())
        captions.append(text)
    return frames, captions, torch.from_numpy(facts), torch.from_numpy(mentioned)


MOUNTAINCAR_PLACES = (  # from which x on: what one says of a car there, and of one that is not; "the mountain" has the flag on it
    (
        sac_clip_mountaincar.X_GOAL,
        "at the peak|at the peak of MOUNTAIN|on the peak|at the very top|at the very top of MOUNTAIN|on top of MOUNTAIN|on the summit|"
        "at the summit of MOUNTAIN|at the highest point|next to FLAG|beside FLAG|right by FLAG|at FLAG|arrived at FLAG|"
        "on the mountain top",
        "below the peak|below the summit|not yet at FLAG|not at FLAG|short of the summit|away from FLAG|lower than FLAG",
    ),
    (
        0.3,
        "close to FLAG|near FLAG|near the peak|close to the top of MOUNTAIN|near the summit|around the top of MOUNTAIN",
        "some way from FLAG|not near the summit|not near the top of MOUNTAIN",
    ),
    (
        0.15,
        "not far from the peak|not far from FLAG|rather close to the summit|within reach of FLAG|towards the top of MOUNTAIN",
        "well below the peak|at a distance from FLAG|still not close to the summit",
    ),
    (0, "high up on the right|well up the right slope|in the upper right", "far from FLAG|far from the peak|far from the top"),
    (
        -0.15,
        "half of the way to FLAG or more|beyond the middle of the right slope",
        "very far from FLAG|a long way from the peak|very far from the summit",
    ),
    (-0.3, "on the right slope|right of the valley|on the side of FLAG", "not on the right slope|not on the side of FLAG"),
    (-0.75, "", "on the left slope|on the left hill|on the wrong side of the valley|on the left"),
    (-1.0, "", "at the left edge|far out on the left|at the end of the track on the left"),
)
PERCENT = np.arange(10, 100, 10)  # of the way from the bottom of the valley to the flag
VALLEY, LOOK = len(MOUNTAINCAR_PLACES) + len(PERCENT), len(MOUNTAINCAR_PLACES) + len(PERCENT) + 1  # the other facts


def mountaincar_progress(x: np.ndarray) -> np.ndarray:
    """Share of the way from the bottom of the valley (0) to the goal (1, and beyond it); 0 on the left hill, which leads away."""
    return ((x + math.pi / 6) / (sac_clip_mountaincar.X_GOAL + math.pi / 6)).clip(0, 1)


def mountaincar_scene(n: int, rng: np.random.Generator):
    """Cars anywhere on the track, a third of them near the flag; every second frame in each of the two looks."""
    x = np.where(rng.random(n) < 1 / 3, rng.uniform(0.2, 0.6, n), rng.uniform(-1.2, 0.6, n))
    states = torch.from_numpy(np.stack([x, 0 * x], axis=1))
    frames = torch.empty(n, 3, SIZE, SIZE, dtype=torch.uint8)
    for k, textures in enumerate(("plain", "realistic")):
        frames[k::2] = sac_clip_mountaincar.draw(states[k::2], SIZE, SIZE, textures)

    x = x + 0.05 * rng.standard_normal(n)  # captions are judged by eye: no edge is sharp
    beyond = np.stack([x >= limit for limit, _, _ in MOUNTAINCAR_PLACES], axis=1)
    above = 100 * mountaincar_progress(x)[:, None] >= PERCENT
    valley = np.abs(x + math.pi / 6) < 0.2
    look = np.arange(n) % 2
    facts = np.concatenate([beyond, above, np.stack([valley, look], axis=1)], axis=1).astype(int)
    mentioned = np.zeros(facts.shape, dtype=bool)
    captions = []
    for i, says in enumerate(mentioned):
        text = ""
        while not text or holds_held_out(text):
            says[:] = False
            car = pick(rng, "a car|the car|car|a small car|a vehicle|an automobile")
            if rng.random() < 0.1:
                car, says[LOOK] = pick(rng, "a red car|the red car" if look[i] else "a black car|a drawing of a car"), True
            mountain = pick(rng, "the mountain|the hill|a mountain|the slope")
            flag = pick(rng, "the flag|the yellow flag|a yellow flag")
            kind = rng.random()
            if kind < 0.07:  # what the baseline says, in other words: true of every frame of the scene
                text = pick(
                    rng,
                    f"{car} in the mountains|{car} and {mountain}|{car}, {mountain} and {flag}|{car} with mountains|{mountain} with {car}|"
                    f"mountains, {car}|{car} on hilly ground|there is {car} in the hills|{car} in a mountain landscape",
                )
            elif kind < 0.3:
                k = rng.integers(len(PERCENT))
                says[len(MOUNTAINCAR_PLACES) + k] = True
                how = pick(rng, "more than|at least|over" if above[i, k] else "less than|not yet|under")
                text = f"{car} {how} {PERCENT[k]} percent of the way " + pick(rng, f"to {flag}|to the peak")
            else:
                phrases = []
                for _ in range(1 if rng.random() < 0.6 else 2):
                    if valley[i] and rng.random() < 0.4:
                        phrases.append(
                            "in the valley|at the bottom|at the bottom of the valley|at the foot of MOUNTAIN|between the hills"
                        )
                        says[VALLEY] = True
                    else:
                        can_say = [k for k, words in enumerate(MOUNTAINCAR_PLACES) if words[1 if beyond[i, k] else 2]]
                        k = rng.choice(can_say)
                        phrases.append(MOUNTAINCAR_PLACES[k][1 if beyond[i, k] else 2])
                        says[k] = True
                where = pick(rng, ", | and ").join(pick(rng, words) for words in phrases)
                text = pick(rng, f"{car} {where}|{car} {where}|{car} is {where}|{where}, {car}")
                text = text.replace("MOUNTAIN", mountain).replace("FLAG", flag)
        captions.append(text)
    return frames, captions, torch.from_numpy(facts), torch.from_numpy(mentioned)


SCENES: tuple[Callable, ...] = (cartpole_scene, mountaincar_scene)


# ---- Training


def is_true(facts: torch.Tensor, mentioned: torch.Tensor) -> torch.Tensor:
    """(captions i, frames j) bool: does caption i hold for frame j?"""
    agree = facts[:, None] == facts[None]  # (i, j, F)
    return (agree | ~mentioned[:, None]).all(-1)


def contrastive_loss(image: torch.Tensor, text: torch.Tensor, scale: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """CLIP's symmetric loss with all true pairs of the batch as targets, not only the diagonal (as in UniCL, Yang et al. 2022).

    Each caption is true of many frames. Were those its negatives, the loss would fight itself; as positives they also give a
    general caption ("a cart with a pole") its place: equally close to all frames of its scene.
    """
    logits = scale * text @ image.T  # (captions i, frames j)
    of_text, of_image = true / true.sum(1, keepdim=True), true.T / true.T.sum(1, keepdim=True)
    return (F.cross_entropy(logits, of_text) + F.cross_entropy(logits.T, of_image)) / 2


def train(args: Args) -> None:
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    model = open_clip.CLIP(**MODEL_CFG)
    model.visual.to(memory_format=torch.channels_last)  # twice as fast for convolutions on a CPU
    tokenizer = open_clip.SimpleTokenizer(context_length=MODEL_CFG["text_cfg"]["context_length"])
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.98), eps=1e-6, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.learning_rate, args.steps, pct_start=0.1, cycle_momentum=False
    )
    progress = trange(args.steps, desc="train tiny_clip", unit="step")
    for step in progress:
        # All scenes in each batch: batch normalization has to see the mixture of them that it uses later.
        scenes = [scene(args.batch_size // len(SCENES), rng) for scene in SCENES]
        captions = [caption for _, captions, _, _ in scenes for caption in captions]
        true = torch.block_diag(*(is_true(facts, mentioned).float() for _, _, facts, mentioned in scenes))
        pixels = torch.cat([frames for frames, _, _, _ in scenes]).float() / 127.5 - 1
        pixels = pixels.contiguous(memory_format=torch.channels_last)
        image = model.encode_image(pixels, normalize=True)
        text = model.encode_text(tokenizer(captions), normalize=True)
        loss = contrastive_loss(image, text, model.logit_scale.exp(), true)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(100))
        if step % 10 == 0:
            progress.set_postfix(loss=f"{loss.item():.3f}", scale=f"{model.logit_scale.exp().item():.1f}")
    args.output.mkdir(parents=True, exist_ok=True)
    weights = {name: w.half() if w.is_floating_point() else w for name, w in model.state_dict().items()}
    save_file({k: w.contiguous() for k, w in weights.items()}, args.output / "open_clip_model.safetensors")
    config = {"model_cfg": MODEL_CFG, "preprocess_cfg": PREPROCESS_CFG}
    (args.output / "open_clip_config.json").write_text(json.dumps(config, indent=2) + "\n")


# ---- Held-out figures


def epic_distance(reward: torch.Tensor, label: torch.Tensor) -> float:
    """EPIC distance of a reward to a label, both functions of the state: sqrt((1 - Pearson correlation) / 2) (paper, Lemma 1)."""
    correlation = torch.corrcoef(torch.stack([reward.double(), label.double()]))[0, 1].item()
    return math.sqrt((1 - correlation) / 2)


@torch.no_grad()
def evaluate_cartpole(folder: Path, n: int = 10_000) -> None:
    """Print EPIC distances and the angle of the highest reward on held-out states.

    The label is CartPole-v1's own limit, at most 12° from upright; half the states have it, the others lie anywhere beyond. The
    highest reward is looked for in steps of half a degree, averaged over cart positions.
    """
    rng = np.random.default_rng(10_000)  # training uses other states
    degrees = np.concatenate([rng.uniform(-12, 12, n // 2), rng.choice([-1, 1], n // 2) * rng.uniform(12, 180, n // 2)])
    states = torch.zeros(n, 4)
    states[:, 0] = torch.from_numpy(rng.uniform(-2.4, 2.4, n))
    states[:, 2] = torch.from_numpy(np.radians(degrees))
    upright = torch.from_numpy(np.abs(degrees) <= 12)
    angles, places = torch.linspace(-180, 180, 721), torch.linspace(-2.4, 2.4, 25)
    sweep = torch.zeros(721, 25, 4)
    sweep[..., 0], sweep[..., 2] = places, torch.deg2rad(angles)[:, None]

    reward_model = CLIPReward(f"local-dir:{folder}", CARTPOLE_PROMPT)

    def embed(states: torch.Tensor) -> torch.Tensor:
        return torch.cat([reward_model.embed(dqn_clip_cartpole.draw(chunk, SIZE, SIZE)) for chunk in states.split(256)])

    start = time.time()
    embedded = embed(states)
    speed = n / (time.time() - start)
    swept = embed(sweep.flatten(0, 1))
    print(
        f"\n{speed:.0f} frames/s drawn and encoded\n\n| prompt | α | EPIC distance | highest reward at | reward at 0, 12, 45, 180° |"
    )
    print("|---|---|---|---|---|")
    for prompt in (CARTPOLE_PROMPT, *CARTPOLE_REWORDINGS):
        for alpha in (0.0, 0.25, 0.5, 0.75, 1.0) if prompt == CARTPOLE_PROMPT else (0.0, 0.5):
            reward_model = CLIPReward(f"local-dir:{folder}", prompt, CARTPOLE_BASELINE, alpha)
            distance = epic_distance(reward_model.reward(embedded), upright)
            curve = reward_model.reward(swept).view(721, 25).mean(1)
            some = ", ".join(f"{curve[360 + 2 * degree]:.2f}" for degree in (0, 12, 45, 180))
            print(f"| {prompt} | {alpha} | {distance:.3f} | {angles[curve.argmax()]:+.1f}° | {some} |")


@torch.no_grad()
def evaluate_mountaincar(folder: Path, n: int = 10_000) -> None:
    """Print EPIC distances and the x of the highest reward on held-out states, x uniform over the track.

    The label is `mountaincar_progress`. Unlike height, it does not count the left hill as a success, and unlike a 0/1 label it
    sees whether the reward shows the way.
    """
    x = torch.from_numpy(np.random.default_rng(20_000).uniform(-1.2, 0.6, n))  # training uses other states
    label = torch.from_numpy(mountaincar_progress(x.numpy()))
    places = torch.linspace(-1.2, 0.6, 361)
    print("\n| prompt | textures | α | EPIC distance | highest reward at x | reward at x = -1.2, -0.52, 0, 0.45 |")
    print("|---|---|---|---|---|---|")
    reward_model = CLIPReward(f"local-dir:{folder}", MOUNTAINCAR_PROMPT)
    for textures in ("plain", "realistic"):

        def embed(x: torch.Tensor, textures: str = textures) -> torch.Tensor:
            chunks = torch.stack([x, 0 * x], dim=1).split(256)
            return torch.cat([reward_model.embed(sac_clip_mountaincar.draw(chunk, SIZE, SIZE, textures)) for chunk in chunks])

        embedded, swept = embed(x), embed(places)
        for prompt in (MOUNTAINCAR_PROMPT, *MOUNTAINCAR_REWORDINGS):
            for alpha in (0.0, 0.25, 0.5, 0.75, 1.0) if prompt == MOUNTAINCAR_PROMPT else (0.0, 0.5):
                scored = CLIPReward(f"local-dir:{folder}", prompt, MOUNTAINCAR_BASELINE, alpha)
                distance = epic_distance(scored.reward(embedded), label)
                curve = scored.reward(swept)
                some = ", ".join(f"{curve[k]:.2f}" for k in (0, 136, 240, 330))
                print(f"| {prompt} | {textures} | {alpha} | {distance:.3f} | {places[curve.argmax()]:+.2f} | {some} |")


if __name__ == "__main__":
    args = tyro.cli(Args)
    if not args.evaluate:
        train(args)
    try:
        evaluate_cartpole(args.output)
        evaluate_mountaincar(args.output)
    except RewardModelError as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        sys.exit(2)
