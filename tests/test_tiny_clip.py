"""The bundled model: what it claims, and that its training cannot have seen the paper's prompts."""

import math
import sys
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tiny_clip"))
import train  # noqa: E402

from clip_reward import CLIPReward  # noqa: E402
from dqn_clip_cartpole import draw  # noqa: E402

PAPER = {"pole vertically upright on top of the cart", "pole and cart"}


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
    rewards = reward(draw(states, 64, 64)).numpy()
    correlation = np.corrcoef(rewards, upright)[0, 1]
    assert math.sqrt((1 - correlation) / 2) <= 0.30  # EPIC distance, Lemma 1
    assert train.epic_distance(torch.from_numpy(rewards), torch.from_numpy(upright)) == pytest.approx(
        math.sqrt((1 - correlation) / 2), abs=1e-6
    )

    degrees, places = torch.arange(-180, 180, 0.5), torch.linspace(-2, 2, 9)
    sweep = torch.zeros(len(degrees), 9, 4)
    sweep[..., 0], sweep[..., 2] = places, torch.deg2rad(degrees)[:, None]
    curve = reward(draw(sweep.flatten(0, 1), 64, 64)).view(-1, 9).mean(1)
    assert degrees[curve.argmax()].abs() <= 3


@pytest.fixture(scope="module")
def batch():
    return [train.cartpole_scene(500, np.random.default_rng(seed)) for seed in range(20)]


def test_captions_never_hold_a_held_out_prompt_and_fit_the_context(batch):
    assert PAPER < train.HELD_OUT
    tokenizer = open_clip.SimpleTokenizer()
    captions = {caption for _, captions, _, _ in batch for caption in captions}
    assert len(captions) > 3000 and not captions & train.HELD_OUT
    assert max(len(tokenizer.encode(caption)) for caption in captions) + 2 <= train.MODEL_CFG["text_cfg"]["context_length"]


def test_captions_are_true_of_their_own_frames_and_of_the_right_others(batch):
    _, captions, facts, mentioned = batch[0]
    true = train.is_true(facts, mentioned)
    assert true.diagonal().all()
    within_12 = facts[:, 1].bool()
    for i, caption in enumerate(captions):
        if "off balance" in caption and "left" not in caption and "right" not in caption and "middle" not in caption:
            assert torch.equal(true[i], ~within_12)
        if "degrees to the left" in caption or "degrees left" in caption:
            assert not true[i][facts[:, train.SIDE] == 1].any() and true[i].float().mean() < 0.3
        if caption == "cart pole":
            assert true[i].all()


def test_loss_asks_for_all_true_pairs():
    eye = torch.eye(6)
    true = torch.block_diag(torch.ones(2, 2), torch.ones(4, 4))
    together = torch.cat([eye[:1].expand(2, -1), eye[1:2].expand(4, -1)])  # one embedding for all that is true together
    scale = torch.tensor(50.0)
    best = train.contrastive_loss(together, together, scale, true)
    assert best == pytest.approx((2 * math.log(2) + 4 * math.log(4)) / 6, abs=1e-4)
    assert train.contrastive_loss(eye, eye, scale, true) > best + 1  # each pair by itself
    assert train.contrastive_loss(together, together.flip(0), scale, true) > best + 1


def test_training_writes_a_model_that_loads(tmp_path):
    train.train(train.Args(output=tmp_path, steps=2, batch_size=16))
    train.train(train.Args(output=tmp_path / "again", steps=2, batch_size=16))
    weights = [(folder / "open_clip_model.safetensors").read_bytes() for folder in (tmp_path, tmp_path / "again")]
    assert weights[0] == weights[1]  # same seed, same model
    CLIPReward(f"local-dir:{tmp_path}", "pole upright")
