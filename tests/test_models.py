"""Large models of each family, with random weights, as local-dir: and NAME/file, against open_clip.

`python -m pytest -s --slow tests/test_models.py` prints a table. Their tokenizers come from the hub, which a
test must not need.
"""

import json
import logging

import numpy as np
import open_clip
import pytest
import tokenizers
import torch
import transformers
from open_clip.pretrained import get_pretrained_cfg
from PIL import Image

from clip_reward import CLIPReward

FAMILIES = [
    "EVA02-B-16", "convnext_base", "MobileCLIP-S1", "ViT-B-16-SigLIP", "ViT-B-32-SigLIP2-256",
    "coca_ViT-B-32", "RN50", "PE-Core-T-16-384"
]  # fmt: skip
GOAL = "pole vertically upright on top of the cart"


@pytest.fixture(scope="module")
def tokenizer() -> transformers.PreTrainedTokenizerFast:
    vocab = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *GOAL.split()])}
    own = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    own.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def frames(n: int, height: int, width: int) -> torch.Tensor:
    """Frames of a few large rectangles."""
    rng, images = np.random.default_rng(0), np.zeros((n, height, width, 3), np.uint8)
    for image in images:
        image[:] = rng.integers(256, size=3)
        for _ in range(4):
            y, x = rng.integers(height), rng.integers(width)
            image[y : y + height // 3, x : x + width // 3] = rng.integers(256, size=3)
    return torch.from_numpy(images).permute(0, 3, 1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_embeddings_are_open_clips(name, tokenizer, tmp_path, monkeypatch):
    logging.disable()
    torch.manual_seed(0)
    model = open_clip.create_model(name)
    for key, weight in model.visual.named_parameters():
        if weight.dim() == 1 and not key.endswith("bias") or "gamma" in key:
            torch.nn.init.uniform_(weight, 0.5, 1.5)  # scales that begin near 0 would make all frames alike
    weights = tmp_path / "open_clip_pytorch_model.bin"
    torch.save(model.state_dict(), weights)
    tag = get_pretrained_cfg(name, open_clip.list_pretrained_tags_by_model(name)[0])
    own = {key: tag[key] for key in ("mean", "std", "interpolation")} | {"resize_mode": "squash"}
    config = {"model_cfg": open_clip.get_model_config(name), "preprocess_cfg": own}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)

    images = frames(6, 90, 120)
    model, transform = open_clip.create_model_from_pretrained(f"local-dir:{tmp_path}")
    with torch.no_grad():
        pixels = torch.stack([transform(Image.fromarray(image.permute(1, 2, 0).numpy())) for image in images])
        expected = model.eval().encode_image(pixels, normalize=True)
    spread = (1 - expected @ expected.T).max().item()  # between frames
    assert spread > 1e-3
    logging.disable(logging.NOTSET)
    row = [name]
    cases = [(f"local-dir:{tmp_path}", "fp32", 1e-3), (f"local-dir:{tmp_path}", "bf16", 0.1)]
    if own["mean"] == open_clip.OPENAI_DATASET_MEAN:  # what is assumed of a file
        cases.append((f"{name}/{weights}", "fp32", 1e-3))
    if name.startswith("coca"):
        del cases[1]  # its text encoder does not work in bf16
    for clip_model, precision, most in cases:
        reward = CLIPReward(clip_model, GOAL, precision=precision)
        apart = (1 - (reward.embed(images) * expected).sum(1)).max().item()
        assert apart < most * spread and reward(images).isfinite().all()
        row.append(f"{precision} {apart:.1e}")
    print("\n|", " | ".join(row), "| between frames", f"{spread:.1e} |")
