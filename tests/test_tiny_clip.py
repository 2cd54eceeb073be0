"""The bundled model: what it claims, and that its training cannot have seen the paper's prompts."""

import math
import re
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


@pytest.mark.slow
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
    assert degrees[curve.argmax()].abs() <= 8  # the top is flat
    assert curve.max() - curve[degrees == 0] <= 0.04 * (curve.max() - curve.min())


@pytest.mark.slow("0.25", "0.75")
@pytest.mark.parametrize("textures", ["original", "realistic"])
@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_the_flag_is_paid_best(textures, alpha):
    reward = CLIPReward("tiny", "a car at the peak of the mountain, next to the yellow flag", "a car in the mountain", alpha)
    draw = sac_clip_mountaincar.Scene(64, 64, textures, torch.device("cpu")).draw
    x = torch.from_numpy(np.random.default_rng(123).uniform(-1.2, 0.6, 2000))
    rewards = reward(draw(x[:, None]))
    label = ((x + math.pi / 6) / (0.45 + math.pi / 6)).clamp(0, 1)  # progress from the bottom of the valley to the goal
    assert (
        math.sqrt((1 - np.corrcoef(rewards, label)[0, 1]) / 2) <= 0.45
    )  # the valley is paid more than half of the way: see the card
    assert (torch.from_numpy(train.mountaincar_progress(x.numpy())) - label).abs().max() < 1e-12
    places = torch.linspace(-1.2, 0.6, 181)
    assert places[reward(draw(places[:, None])).argmax()] >= 0.449


@pytest.fixture(scope="module")
def states() -> torch.Tensor:
    return train.humanoid_states(4000, np.random.default_rng(123))


@pytest.mark.parametrize(
    "textures, camera, area, distance", [("realistic", "fixed", 0.95, 0.35), ("original", "original", 0.85, 0.45)]
)
@pytest.mark.slow("original")
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


SCENES = list(train.SHARES)


@pytest.fixture(scope="module")
def captions() -> dict[str, train.Captions]:
    return {name: train.Captions(name) for name in SCENES}


@pytest.fixture(scope="module")
def scenes() -> dict:
    humanoids = train.Humanoids(1500, np.random.default_rng(0))
    return {"cartpole": train.cartpole, "mountaincar": train.mountaincar, "humanoid": humanoids}


@pytest.fixture(scope="module")
def described(scenes, captions) -> dict:
    """What is known of 4000 frames of each scene, name -> (n,), their captions, facts (n, F), and the lines that each mentions."""
    found = {}
    for name, scene in scenes.items():
        rng = np.random.default_rng(1)
        _, known = scene(4000, rng)
        facts = captions[name].judge(known)
        texts, said = zip(*(captions[name].describe(own, rng) for own in facts))
        mentioned = np.zeros(facts.shape, dtype=bool)
        for lines, row in zip(said, mentioned):
            row[lines] = True
        found[name] = known, texts, torch.from_numpy(facts), torch.from_numpy(mentioned)
    return found


@pytest.mark.parametrize("scene", SCENES)
def test_no_caption_holds_a_held_out_prompt_and_all_fit_the_context(scene, described):
    assert PAPER - {"a humanoid robot"} < train.HELD_OUT and train.HUMANOID_BASELINE == "a humanoid robot"
    assert len(train.HELD_OUT) == 4 + 8 + 4 + 4 + 7
    texts = set(described[scene][1])
    assert len(texts) > 1500
    assert not any(sentence in text for text in texts for sentence in train.HELD_OUT)
    assert "a humanoid robot" not in texts  # that baseline is held out as a whole: every other caption may say what it does
    assert not any(re.search("[A-Z]{2}|[|]", text) for text in texts)
    assert max(len(train.TOKENIZER.encode(text)) for text in texts) + 2 <= train.TOKENIZER.context_length


def test_a_caption_that_holds_a_held_out_prompt_is_made_again(captions, monkeypatch):
    _, known = train.mountaincar(50, np.random.default_rng(0))
    facts = captions["mountaincar"].judge(known)
    before, _ = captions["mountaincar"].describe(facts[3], np.random.default_rng(0))
    monkeypatch.setattr(train, "HELD_OUT", {before})
    after, _ = captions["mountaincar"].describe(facts[3], np.random.default_rng(0))
    assert before not in after


@pytest.mark.parametrize("scene", SCENES)
def test_each_caption_is_true_of_its_own_frame_and_of_those_that_agree_in_what_it_mentions(scene, described):
    facts, mentioned = (part[:400] for part in described[scene][2:])
    true = train.is_true(facts, mentioned)
    slow = (facts[:, None] == facts[None]) | ~mentioned[:, None]
    assert torch.equal(true, slow.all(-1)) and true.diagonal().all() and not true.all()
    assert not (facts[mentioned.nonzero(as_tuple=True)] == 2).any()  # of what nobody can tell nothing is said


def words_are_true(described: tuple, checks: dict) -> None:
    """Each caption with these words must be of frames for which the condition (n,) holds; "not" before the words turns them round."""
    _, texts, facts, mentioned = described
    true, seen = train.is_true(facts[:800], mentioned[:800]), set()
    for i, text in enumerate(texts):
        for words, holds in checks.items():
            if words in text and "not " + words not in text:
                assert holds[i], text
                seen.add(words)
                if i < 800:
                    assert holds[:800][true[i].numpy()].all(), text
    assert seen == set(checks)


def test_cartpole_captions_say_what_holds(described):
    """Words against the state that was drawn: 25.5 of Gymnasium's pixels are half a cart, 300 half a picture, 125 a metre."""
    known = described["cartpole"][0]
    tilt, place = known["tilt"], known["place"]
    whole = ~known["cut"]
    checks = {
        "unbalanced": (tilt > 12) & whole,
        "less than 30 degrees": (tilt < 30) & whole,
        "over 30 degrees": (tilt >= 30) & whole,
    }
    checks |= {
        "cut off": known["cut"],
        "in full view": whole,
        "upside down": (tilt > 150) & whole,
        "horizontal": abs(tilt - 90) < 15,
    }
    checks |= {"leaning to the left": known["angle"] < 0, "far right": place == 4, "in the middle": place == 2}
    words_are_true(described["cartpole"], checks)
    assert 0.05 < known["cut"].mean() < 0.2
    _, texts, facts, mentioned = described["cartpole"]
    general = [i for i, text in enumerate(texts) if text == "cart pole"]
    assert general and train.is_true(facts, mentioned)[general].all()


def test_what_is_known_of_cartpole_is_what_was_drawn(monkeypatch):
    drawn, draw = [], dqn_clip_cartpole.draw
    monkeypatch.setattr(train.dqn_clip_cartpole, "draw", lambda states, *a: drawn.append(states) or draw(states, *a))
    _, known = train.cartpole(3000, np.random.default_rng(1))
    x, edge = drawn[0][:, 0].numpy(), (300 - 25.5) / 125
    assert np.allclose(np.degrees(drawn[0][:, 2].numpy()), known["angle"]) and (known["tilt"] == abs(known["angle"])).all()
    assert known["cut"][abs(x) > edge + 0.15].all() and not known["cut"][abs(x) < edge - 0.15].any()
    assert (known["place"] == np.digitize(x, [-1.44, -0.48, 0.48, 1.44])).all()


def test_mountaincar_captions_say_where_the_car_is(described, monkeypatch):
    """Words against the x that was drawn, which captions may misjudge a little."""
    x = described["mountaincar"][0]["x"]
    percent = (x + math.pi / 6) / (0.45 + math.pi / 6)
    checks = {"at the peak": x >= 0.45, "not yet at the": x < 0.45, "high up on the right": x >= 0}
    checks |= {"in the valley": abs(x + math.pi / 6) < 0.2, "on the left hill": x < -0.75, "at the left edge": x < -1}
    checks |= {"over 50 percent of the way": percent >= 0.5, "less than 50 percent of the way": percent < 0.5}
    checks |= {"red car": described["mountaincar"][0]["realistic"], "black car": ~described["mountaincar"][0]["realistic"]}
    words_are_true(described["mountaincar"], checks)
    drawn, draw_cars = [], train.draw_cars
    monkeypatch.setattr(train, "draw_cars", lambda look: lambda cars: drawn.append(cars[:, 0]) or draw_cars(look)(cars))
    frames, known = train.mountaincar(1000, np.random.default_rng(0))
    assert abs(torch.stack(drawn, dim=1).flatten().numpy() - known["x"]).max() < 0.25  # five standard deviations
    assert ((frames[:, :, 0, 20] == 255).all(1).numpy() == ~known["realistic"]).all()  # only a plain sky is white


def test_humanoid_captions_say_what_holds(described):
    """Words against where the parts of the body are."""
    known = described["humanoid"][0]
    head, tilt, knees, over = (known[name] for name in ("head", "tilt", "knee_high", "over_low"))
    checks = {"head above 90 cm": head > 0.9, "head lower than 60 cm": head < 0.6, "losing its balance": tilt >= 35}
    checks |= {"on both knees": (knees < 0.1) & (tilt <= 45), "standing on its feet": head > 1.15}
    checks |= {"lying on its back": (head < 0.4) & (known["chest_up"] > 0.6), "knees below 20 cm": knees < 0.2}
    checks |= {
        "no higher than its head": (over < 0.04) & (head > 1.1),
        "reaching forwards": known["front_low"] > 0.4,
    }
    checks |= {"standing, both hands low": known["hand_high"] < known["seat"] + 0.15, "hunched on the floor": tilt > 35}
    checks |= {"with its hands on its hips": (known["hips_high"] < 0.21) & (known["elbow_low"] > 35)}
    checks |= {"knees more than 40 cm apart": known["between_knees"] > 0.4, "in the dark": ~known["realistic"]}
    words_are_true(described["humanoid"], checks)


def test_what_is_known_of_the_humanoid_is_where_its_parts_are(scenes):
    """By eye: within five standard deviations of 1 cm."""
    rng = np.random.default_rng(5)
    states = train.humanoid_states(600, rng)
    points = sac_clip_humanoid.Scene(8, 8, "original", "fixed", 1, 600, torch.device("cpu")).draw(states)[1]
    known = train.humanoid_knowledge(points, "realistic", "fixed", rng)
    both = {
        part: torch.stack([points[f"{side}_{part}"][:, 2] for side in ("right", "left")]) for part in ("hand", "foot", "knee")
    }
    for part, heights in both.items():
        assert abs(known[f"{part}_low"] - heights.amin(0).numpy()).max() < 0.05
        assert abs(known[f"{part}_high"] - heights.amax(0).numpy()).max() < 0.05
    hips = torch.stack([(points[f"{side}_hand"] - points[f"{side}_hip"]).norm(dim=-1) for side in ("right", "left")])
    assert (
        abs(known["hips_high"] - hips.amax(0).numpy()).max() < 0.1
        and abs(known["head"] - points["head"][:, 2].numpy()).max() < 0.05
    )
    assert abs(known["tilt"] - sac_clip_humanoid.tilt(points).numpy()).mean() < 3
    seen = sac_clip_humanoid.Scene(64, 64, "realistic", "fixed", 1, 600, torch.device("cpu"))
    front = torch.zeros(2, 24)
    front[:, 2], front[0, 3], front[1, 6] = 1.4, 1, 1  # as at the start, facing the camera, and turned round
    assert (np.sign(train.humanoid_knowledge(seen.draw(front)[1], "realistic", "fixed", rng)["facing"]) == [1, -1]).all()
    posture = scenes["humanoid"].showing
    assert len(posture) > 25 and all(len(frames) for frames in posture)


def test_tokens_are_the_captions_with_a_few_words_strewn_in(monkeypatch):
    text = "a humanoid robot lying on its back"
    plain = open_clip.SimpleTokenizer(context_length=32)([text])[0]
    tokens = train.tokenize([text] * 500, np.random.default_rng(0))
    same = (tokens == plain).all(1).float().mean()
    assert (
        abs(same - (1 - train.STREWN)) < 0.08 and (tokens.amax(1) == plain.amax()).all() and (tokens[:, 0] == plain[0]).all()
    )
    kept = [[token for token in row.tolist() if token in set(plain.tolist())] for row in tokens[:50]]
    assert all(row[: plain.argmax() + 1] == plain[: plain.argmax() + 1].tolist() for row in kept)
    monkeypatch.setattr(train, "STREWN", 0)
    assert torch.equal(train.tokenize([text], np.random.default_rng(0))[0], plain)


def test_the_loss_of_facts_leaves_out_what_nobody_can_tell():
    facts, logits = torch.tensor([[0, 1, 2], [2, 1, 2]]), torch.tensor([[-9.0, 9.0, 9.0], [9.0, 9.0, -9.0]])
    assert train.fact_loss(logits, facts) < 1e-3
    assert train.fact_loss(-logits, facts) == pytest.approx(9, abs=1e-2)


def test_loss_asks_for_all_true_pairs():
    eye = torch.eye(6)
    true = torch.block_diag(torch.ones(2, 2), torch.ones(4, 4))
    together = torch.cat([eye[:1].expand(2, -1), eye[1:2].expand(4, -1)])  # one embedding for all that is true together
    scale = torch.tensor(50.0)
    best = train.contrastive_loss(together, together, scale, true)
    assert best == pytest.approx((2 * math.log(2) + 4 * math.log(4)) / 6, abs=1e-4)
    assert train.contrastive_loss(eye, eye, scale, true) > best + 1  # each pair by itself
    assert train.contrastive_loss(together, together.flip(0), scale, true) > best + 1


@pytest.mark.slow
def test_training_writes_a_model_that_loads_and_is_the_same_if_it_was_interrupted(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "SAVE_EVERY", 2)
    few = {"steps": 3, "batch_size": 32, "humanoid_states": 50}
    train.train(train.Args(output=tmp_path / "unbroken", **few))
    step, steps = train.Learner.step, iter(range(2))

    def interrupted(self, *batch):
        if next(steps, None) is None:  # the third
            raise KeyboardInterrupt
        return step(self, *batch)

    monkeypatch.setattr(train.Learner, "step", interrupted)
    resumed = train.Args(output=tmp_path / "resumed", **few)
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
    assert len(made) == 1  # the third step

    def weights(folder: str) -> bytes:
        return (tmp_path / folder / "open_clip_model.safetensors").read_bytes()

    assert weights("unbroken") == weights("resumed") and not (tmp_path / "resumed" / "training.pt").exists()
    assert CLIPReward(f"local-dir:{tmp_path / 'resumed'}", "pole upright").size == (64, 64)
    with pytest.raises(UsageError, match="no training was interrupted"):
        train.train(resumed)
