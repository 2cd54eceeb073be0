"""The bundled model: what it claims, and that its training cannot have seen the paper's prompts."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tiny_clip"))
import train  # noqa: E402

import dqn_clip_cartpole  # noqa: E402
import sac_clip_humanoid  # noqa: E402
import sac_clip_mountaincar  # noqa: E402
from clip_reward import CLIPReward, UsageError  # noqa: E402

PAPER = {
    "pole vertically upright on top of the cart",
    "pole and cart",
    "a car at the peak of the mountain, next to the yellow flag",
    "a car in the mountain",
    "a humanoid robot kneeling",
    "a humanoid robot seated down, meditating in the lotus position",
    "a humanoid robot standing up",
    "a humanoid robot standing up, with both arms raised",
    "a humanoid robot practicing gymnastics, doing the side splits",
    "a humanoid robot standing up with hands on hips",
    "a humanoid robot standing up, with its arms crossed",
    "a humanoid robot standing up on one leg",
}


def test_size():
    assert sum(path.stat().st_size for path in (ROOT / "tiny_clip").iterdir() if path.is_file()) < 12e6


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_reward_separates_upright_from_fallen(alpha):
    reward = CLIPReward("tiny", "pole vertically upright on top of the cart", "pole and cart", alpha)
    rng = np.random.default_rng(123)
    upright = np.arange(4000) < 2000
    beyond = rng.choice([-1, 1], 4000) * rng.uniform(12, 180, 4000)
    states = torch.zeros(4000, 4)
    states[:, 0] = torch.from_numpy(rng.uniform(-2.4, 2.4, 4000))
    states[:, 2] = torch.from_numpy(np.radians(np.where(upright, rng.uniform(-12, 12, 4000), beyond)))
    rewards = reward(dqn_clip_cartpole.draw(states, 64, 64)).numpy()
    correlation = np.corrcoef(rewards, upright)[0, 1]
    assert math.sqrt((1 - correlation) / 2) <= 0.30  # EPIC distance, Lemma 1
    assert train.epic_distance(torch.from_numpy(rewards), torch.from_numpy(upright)) == pytest.approx(
        math.sqrt((1 - correlation) / 2), abs=1e-6
    )

    degrees, places = torch.arange(-180, 180, 0.5), torch.linspace(-2, 2, 9)
    sweep = torch.zeros(len(degrees), 9, 4)
    sweep[..., 0], sweep[..., 2] = places, torch.deg2rad(degrees)[:, None]
    curve = reward(dqn_clip_cartpole.draw(sweep.flatten(0, 1), 64, 64)).view(-1, 9).mean(1)
    assert degrees[curve.argmax()].abs() <= 6  # the top is flat
    assert curve.max() - curve[degrees == 0] <= 0.04 * (curve.max() - curve.min())


@pytest.mark.parametrize("textures", ["original", "realistic"])
@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_reward_shows_the_way_to_the_flag(textures, alpha):
    reward = CLIPReward("tiny", "a car at the peak of the mountain, next to the yellow flag", "a car in the mountain", alpha)
    draw = sac_clip_mountaincar.Scene(64, 64, textures, torch.device("cpu")).draw
    x = torch.from_numpy(np.random.default_rng(123).uniform(-1.2, 0.6, 2000))
    rewards = reward(draw(x[:, None]))
    label = ((x + math.pi / 6) / (0.45 + math.pi / 6)).clamp(0, 1)  # progress from the bottom of the valley to the goal
    assert math.sqrt((1 - np.corrcoef(rewards, label)[0, 1]) / 2) <= 0.35
    assert (torch.from_numpy(train.mountaincar_progress(x.numpy())) - label).abs().max() < 1e-12
    places = torch.linspace(-1.2, 0.6, 181)
    assert places[reward(draw(places[:, None])).argmax()] >= 0.449


@pytest.fixture(scope="module")
def states() -> torch.Tensor:
    return train.humanoid_states(4000, np.random.default_rng(123))


@pytest.mark.parametrize(
    "textures, camera, area, distance", [("realistic", "fixed", 0.95, 0.35), ("original", "original", 0.85, 0.45)]
)
def test_kneeling_is_rewarded_more_than_the_rest(textures, camera, area, distance, states):
    """On as many states that fulfil the task's condition as others, in motion and at rest, of a seed that training has not seen."""
    scene = sac_clip_humanoid.Scene(64, 64, textures, camera, 1, 128, torch.device("cpu"))
    frames, points = scene.draw(states)
    kneels = sac_clip_humanoid.TASKS["kneeling"][1](points)
    rewards = CLIPReward("tiny", "a humanoid robot kneeling")(frames).double()
    yes, no = rewards[kneels], rewards[~kneels][: kneels.sum()]
    assert len(yes) == len(no) > 100
    above = (yes[:, None] > no).double().mean()
    assert above >= area
    both, label = torch.cat([yes, no]), torch.arange(2 * len(yes)) < len(yes)
    assert train.roc_auc(both, label) == pytest.approx(above.item(), abs=1e-9)
    assert math.sqrt((1 - np.corrcoef(both, label)[0, 1]) / 2) <= distance


SCENES = ["cartpole_scene", "mountaincar_scene", "humanoid_scene"]


@pytest.fixture(scope="module")
def batches():
    scenes = {name: getattr(train, name) for name in SCENES[:2]} | {
        "humanoid_scene": train.HumanoidScene(1500, np.random.default_rng(0))
    }
    return {name: [scene(500, np.random.default_rng(seed)) for seed in range(20)] for name, scene in scenes.items()}


@pytest.mark.parametrize("scene", SCENES)
def test_no_caption_holds_a_held_out_prompt_and_all_fit_the_context(scene, batches):
    assert PAPER < train.HELD_OUT and train.HUMANOID_BASELINE == "a humanoid robot"
    tokenizer = open_clip.SimpleTokenizer()
    captions = {caption for _, captions, _, _ in batches[scene] for caption in captions}
    assert len(captions) > 3000
    assert not any(sentence in caption for caption in captions for sentence in train.HELD_OUT)
    assert "a humanoid robot" not in captions  # that baseline is held out as a whole: every other caption may say what it does
    assert not any(word in caption for caption in captions for word in ("MOUNTAIN", "FLAG", "EXACTLY", "|"))
    if scene == "humanoid_scene":  # the longest that may come
        subject = "the humanoid robot is"
        longest = sorted(
            (phrase for words in train.HUMANOID_WORDS.values() for w in words for phrase in w.split("|")), key=len
        )
        captions = {f"{subject} {a}, {b}" for a in longest[-30:] for b in longest[-30:] if a != b}
    assert max(len(tokenizer.encode(caption)) for caption in captions) + 2 <= train.MODEL_CFG["text_cfg"]["context_length"]


def test_a_caption_that_holds_a_held_out_prompt_is_made_again(monkeypatch):
    before = train.mountaincar_scene(50, np.random.default_rng(0))[1]
    monkeypatch.setattr(train, "HELD_OUT", {before[3]})
    _, captions, facts, mentioned = train.mountaincar_scene(50, np.random.default_rng(0))
    assert captions[:3] == before[:3] and before[3] not in captions[3]


def test_cartpole_captions_are_true_of_their_own_frames_and_of_the_right_others(batches):
    _, captions, facts, mentioned = batches["cartpole_scene"][0]
    true = train.is_true(facts, mentioned)
    assert true.diagonal().all()
    within_12, beyond_30 = facts[:, 2] == 1, facts[:, len(train.CARTPOLE_POSTURES) + 4] == 1
    whole = facts[:, train.CUT] == 0  # the cart is; of the others' poles no caption says anything
    assert 0.05 < 1 - whole.float().mean() < 0.2
    seen = set()
    for i, caption in enumerate(captions):
        place = any(word in caption for word in ("left", "right", "middle"))
        if "off balance" in caption and "degrees" not in caption and not place:
            assert torch.equal(true[i], whole & ~within_12)
            seen.add("off balance")
        if "30 degrees" in caption:
            less = any(word in caption for word in ("less", "not even", "under"))
            assert torch.equal(true[i], whole & (~beyond_30 if less else beyond_30))
            seen.add(less)
        if ("cut off" in caption or "in full view" in caption) and not place:
            assert torch.equal(true[i], whole == ("full view" in caption))
            seen.add("view")
        if caption == "cart pole":
            assert true[i].all()
            seen.add("cart pole")
    assert seen == {"off balance", True, False, "cart pole", "view"}


def test_cartpole_captions_say_where_the_cart_is(monkeypatch):
    """Words against the x that was drawn: 25.5 of Gymnasium's pixels are half a cart, 300 half a picture, 125 a metre."""
    drawn, seen = [], set()
    draw = train.dqn_clip_cartpole.draw
    monkeypatch.setattr(train.dqn_clip_cartpole, "draw", lambda states, *a: drawn.append(states[:, 0]) or draw(states, *a))
    _, captions, facts, mentioned = train.cartpole_scene(3000, np.random.default_rng(1))
    x, true, edge = drawn[0], train.is_true(facts, mentioned), (300 - 25.5) / 125
    for i, caption in enumerate(captions):
        for words, low, high in (
            ("cut off", edge, 2.4),
            ("partly outside", edge, 2.4),
            ("in full view", 0, edge),
            ("upright", 0, edge),
            ("degrees from vertical", 0, edge),
            ("at the far", 1.44, 2.4),
        ):
            if words in caption:
                assert (
                    low - 0.15 < abs(x[i]) < high + 0.15 and not true[i, (abs(x) < low - 0.15) | (abs(x) > high + 0.15)].any()
                )
                seen.add(words)
    assert len(seen) == 6


def test_mountaincar_captions_say_where_the_car_is(batches, monkeypatch):
    """Words against the x that was drawn, which captions may misjudge a little; and that the facts mentioned are those in the words."""
    drawn = []
    draw_cars = train.draw_cars
    monkeypatch.setattr(train, "draw_cars", lambda look: lambda cars: drawn.append(cars[:, 0]) or draw_cars(look)(cars))
    seen = set()
    for seed in range(8):
        drawn.clear()
        frames, captions, facts, mentioned = train.mountaincar_scene(500, np.random.default_rng(seed))
        x = torch.stack(drawn, dim=1).flatten()
        assert ((frames[:, :, 0, 20] == 255).all(1) == ~facts[:, train.LOOK].bool()).all()  # only a plain sky is white
        true = train.is_true(facts, mentioned)
        for i, caption in enumerate(captions):
            for words, low, high in (
                ("at the peak", 0.45, 0.6),
                ("not yet at the", -1.2, 0.45),
                ("high up on the right", 0, 0.6),
                ("in the valley", -math.pi / 6 - 0.2, -math.pi / 6 + 0.2),
                ("on the left hill", -1.2, -0.75),
                ("at the left edge", -1.2, -1.0),
                ("over 50 percent of the way", -math.pi / 12 + 0.225, 0.6),
                ("less than 50 percent of the way", -1.2, -math.pi / 12 + 0.225),
            ):
                if words in caption:
                    assert low - 0.25 < x[i] < high + 0.25  # five standard deviations
                    assert not true[i, (x < low - 0.25) | (x > high + 0.25)].any()
                    seen.add(words)
            if "red car" in caption or "black car" in caption:
                assert (facts[true[i], train.LOOK] == ("red car" in caption)).all()
                seen.add("colour")
            if caption in ("the car in the mountains", "the car on hilly ground"):
                assert true[i].all()
                seen.add("general")
    assert len(seen) == 10


def test_humanoid_captions_say_what_holds(batches):
    """Words against the state from which the frame was drawn, which captions may misjudge by some centimetres."""
    states = train.humanoid_states(600, np.random.default_rng(5))
    scene = train.HumanoidScene(600, np.random.default_rng(5))  # the same states, described
    points = sac_clip_humanoid.Scene(8, 8, "original", "fixed", 1, 600, torch.device("cpu")).draw(states)[1]
    head, tilts = points["head"][:, 2], sac_clip_humanoid.tilt(points)
    knees = torch.maximum(points["right_knee"][:, 2], points["left_knee"][:, 2])
    hands = torch.minimum(points["right_hand"][:, 2], points["left_hand"][:, 2]) - head
    from_hips = torch.stack([(points[f"{s}_hand"] - points[f"{s}_hip"]).norm(dim=-1) for s in ("right", "left")])
    elbows = torch.stack([sac_clip_humanoid.bend(points, s, ("shoulder", "elbow", "hand")) for s in ("right", "left")])
    seat, apart = points["seat"][:, 2], (points["left_knee"] - points["right_knee"]).norm(dim=-1)
    rng, seen = np.random.default_rng(0), set()
    assert len(scene.names) == scene.facts.shape[1] == len(train.HUMANOID_WORDS) + 1 and scene.names[:-1] == list(
        train.HUMANOID_WORDS
    )
    for _ in range(8):
        for i, facts in enumerate(scene.facts.numpy()):
            says = np.zeros(len(facts), dtype=bool)
            caption = scene.describe(facts, says, rng)
            for words, holds in (
                ("head above 90 cm", head[i] > 0.8),
                ("head lower than 60 cm", head[i] < 0.7),
                ("leaning more than 40 degrees", tilts[i] > 25),
                ("tilted under 20 degrees", tilts[i] < 35),
                ("is on its knees", knees[i] < 0.2 and tilts[i] < 60),
                ("kneeling upright", knees[i] < 0.2 and tilts[i] < 60),
                ("standing on its feet", head[i] > 1.1),
                ("lying on its back", head[i] < 0.5 and tilts[i] > 40),
                ("knees below 20 cm", knees[i] < 0.3),
                ("hands more than 10 cm above its head", hands[i] > 0),
                ("no higher than its head", hands[i] < 0.15 and head[i] > 1.1),
                ("hands within 30 cm of its hips", from_hips[:, i].max() < 0.4),
                ("standing, both hands low", elbows[:, i].max() < 60 and hands[i] < -0.3),
                ("hands on its hips", from_hips[:, i].max() < 0.28 and elbows[:, i].min() > 30),
                ("standing, only one hand on the hips", from_hips[:, i].min() < 0.28 and from_hips[:, i].max() > 0.15),
                ("close to the hips but not on them", from_hips[:, i].max() > 0.12 and elbows[:, i].min() > 20),
                ("seated with a knee up", seat[i] < 0.3 and knees[i] > 0.05),
                ("hunched on the floor", seat[i] < 0.3 and tilts[i] > 25),
                ("knees more than 40 cm apart", apart[i] > 0.3),
            ):
                if words in caption and "not " + words not in caption:
                    assert holds, caption
                    seen.add(words)
            named = np.flatnonzero(says)
            assert all(train.HUMANOID_WORDS[scene.names[k]][0 if facts[k] else 1] for k in named if k < len(facts) - 1)
    assert len(seen) >= 15
    frames, captions, facts, mentioned = batches["humanoid_scene"][0]
    true = train.is_true(facts, mentioned)
    slow = (facts[:, None] == facts[None]) | ~mentioned[:, None]
    assert torch.equal(true, slow.all(-1)) and true.diagonal().all() and not true.all()
    look = facts[:, -1].bool()
    assert (frames[look].float().mean((1, 2, 3)).min() > 120) and (frames[~look].float().mean((1, 2, 3)).max() < 120)


def test_loss_asks_for_all_true_pairs():
    eye = torch.eye(6)
    true = torch.block_diag(torch.ones(2, 2), torch.ones(4, 4))
    together = torch.cat([eye[:1].expand(2, -1), eye[1:2].expand(4, -1)])  # one embedding for all that is true together
    scale = torch.tensor(50.0)
    best = train.contrastive_loss(together, together, scale, true)
    assert best == pytest.approx((2 * math.log(2) + 4 * math.log(4)) / 6, abs=1e-4)
    assert train.contrastive_loss(eye, eye, scale, true) > best + 1  # each pair by itself
    assert train.contrastive_loss(together, together.flip(0), scale, true) > best + 1


def test_training_writes_models_that_load_side_by_side_or_alone_and_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "SAVE_EVERY", 2)
    few = {"steps": 3, "batch_size": 32, "humanoid_states": 50}
    train.train(train.Args(output=tmp_path / "alone", **few))
    both = train.Args(output=tmp_path / "both", widths=(8, 16), **few)
    train.train(both)
    step, steps = train.Learner.step, iter(range(5))

    def interrupted(self, *batch):
        if next(steps, None) is None:  # both models' third step would be the fifth and sixth
            raise KeyboardInterrupt
        return step(self, *batch)

    monkeypatch.setattr(train.Learner, "step", interrupted)
    resumed = train.Args(output=tmp_path / "resumed", widths=(8, 16), **few)
    with pytest.raises(KeyboardInterrupt):
        train.train(resumed)
    assert [path.name for path in (tmp_path / "resumed").iterdir()] == ["training.pt"]
    with pytest.raises(UsageError, match="--resume it, or remove the file"):
        train.train(resumed)
    made = []
    monkeypatch.setattr(train.Learner, "step", lambda self, *batch: made.append(1) or step(self, *batch))
    resumed.resume = True
    with pytest.raises(UsageError, match="had --steps 3"):
        train.train(replace(resumed, steps=4))
    train.train(resumed)
    assert len(made) == 2  # the third step of both

    def weights(folder: str) -> bytes:
        return (tmp_path / folder / "open_clip_model.safetensors").read_bytes()

    assert weights("alone") == weights("both/width_16") == weights("resumed/width_16")  # same seed, same model
    assert weights("both/width_8") == weights("resumed/width_8") and not (tmp_path / "resumed" / "training.pt").exists()
    sizes = [CLIPReward(f"local-dir:{tmp_path / 'both'}/width_{width}", "pole upright").model.visual for width in (8, 16)]
    assert sum(p.numel() for p in sizes[0].parameters()) < sum(p.numel() for p in sizes[1].parameters()) / 3
    with pytest.raises(UsageError, match="no training was interrupted"):
        train.train(resumed)


@pytest.mark.parametrize("widths", [(), (16, 16), (7,), (0,)])
def test_widths_that_make_no_model_are_one_line(widths, tmp_path):
    with pytest.raises(UsageError, match="must be different even numbers"):
        train.train(train.Args(output=tmp_path / "no", widths=widths))
    assert not (tmp_path / "no").exists()
