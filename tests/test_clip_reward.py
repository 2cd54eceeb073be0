"""The reward module against its closed form, its limits, and open_clip's own transform, tokenizers and loader."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import clip_reward
from clip_reward import CLIPReward, UsageError

GOAL, BASELINE = "pole vertically upright on top of the cart", "pole and cart"
TEXT_CFG = {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1}
VISION_CFG = {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8}


def save_model(folder: Path, model_cfg: dict, **preprocess) -> str:
    """A model with random weights, saved as open_clip saves it -> its name for CLIPReward."""
    torch.manual_seed(0)
    custom_text = model_cfg.get("custom_text", False)
    cfg = {k: v for k, v in model_cfg.items() if k != "custom_text"}
    model = (open_clip.CustomTextCLIP if custom_text else open_clip.CLIP)(**cfg)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), folder / "open_clip_pytorch_model.bin")
    preprocess = {"mean": [0.48, 0.46, 0.41], "std": [0.27, 0.26, 0.28], "interpolation": "bicubic"} | preprocess
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": model_cfg, "preprocess_cfg": preprocess}))
    return f"local-dir:{folder}"


@pytest.fixture(scope="module")
def random_vit(tmp_path_factory) -> str:
    return save_model(tmp_path_factory.mktemp("vit"), {"embed_dim": 24, "vision_cfg": VISION_CFG, "text_cfg": TEXT_CFG})


def frames_like(n: int, height: int, width: int) -> torch.Tensor:
    """Frames with edges, smooth parts and colour, not noise."""
    rng = np.random.default_rng(0)
    frames = []
    for _ in range(n):
        small = Image.fromarray(rng.integers(0, 255, (6, 9, 3), dtype=np.uint8))
        frames.append(
            np.asarray(small.resize((width, height), Image.Resampling.NEAREST if len(frames) % 2 else Image.BILINEAR))
        )
    return torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2).contiguous()


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.75, 1.0])
def test_reward_is_definition_1(random_vit, alpha):
    reward = CLIPReward(random_vit, GOAL, BASELINE, alpha)
    tokens = open_clip.SimpleTokenizer(context_length=16)([GOAL, BASELINE])
    g, b = F.normalize(reward.model.encode_text(tokens), dim=-1).double()
    s = F.normalize(torch.randn(50, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), dim=-1)
    # Definition 1 word for word: project s onto the line through b and g, mix, measure the distance to g.
    direction = g - b
    share = ((s - b) @ direction / (direction @ direction))[:, None]
    projected = b + share * direction
    expected = 1 - 0.5 * (alpha * projected + (1 - alpha) * s - g).norm(dim=-1) ** 2
    torch.testing.assert_close(reward.reward(s.float()).double(), expected, atol=1e-6, rtol=0)


def test_alpha_0_is_the_cosine(random_vit):
    reward = CLIPReward(random_vit, GOAL, BASELINE, 0.0)
    s = reward.embed(frames_like(8, 32, 32))
    torch.testing.assert_close(reward.reward(s), F.cosine_similarity(s, reward.goal[None]), atol=1e-6, rtol=0)
    assert s.norm(dim=-1).sub(1).abs().max() < 1e-6 and reward.goal.norm().sub(1).abs() < 1e-6


def test_alpha_1_depends_on_the_component_along_the_line_alone(random_vit):
    reward = CLIPReward(random_vit, GOAL, BASELINE, 1.0)
    s = reward.embed(frames_like(8, 32, 32))
    across = torch.randn_like(s)
    direction = F.normalize(reward.goal - reward.baseline, dim=0)
    across -= (across @ direction)[:, None] * direction
    torch.testing.assert_close(reward.reward(s + across), reward.reward(s), atol=1e-5, rtol=0)
    assert (reward.reward(s + 0.5 * direction) - reward.reward(s)).abs().min() > 0.01


def test_several_prompts_are_the_mean_of_unit_embeddings(random_vit):
    texts = ["a pole", "an upright pole on a cart", "balance"]
    reward = CLIPReward(random_vit, texts, [BASELINE, "a cart"], 0.5)
    single = [CLIPReward(random_vit, text).goal for text in texts]
    torch.testing.assert_close(reward.goal, torch.stack(single).mean(0))
    cosines = torch.stack([CLIPReward(random_vit, text)(frames_like(5, 32, 32)) for text in texts]).mean(0)
    offset = CLIPReward(random_vit, texts)(frames_like(5, 32, 32)) - cosines  # a constant, as documented
    assert offset.std() < 1e-6


@pytest.mark.parametrize("temperature", [None, 0.05, 1.0])
def test_contrastive_reward_is_the_softmax_probability_of_the_goal(random_vit, temperature):
    goals, negatives = [GOAL, "a balanced pole"], ["a fallen pole", "a cart", "nothing"]
    reward = CLIPReward(random_vit, goals, negative_prompts=negatives, temperature=temperature)
    tokens = open_clip.SimpleTokenizer(context_length=16)(goals + negatives)
    texts = F.normalize(reward.model.encode_text(tokens), dim=-1).double()
    texts = torch.cat([texts[:2].mean(0, keepdim=True), texts[2:]])  # several goals are averaged, negatives are not
    s = reward.embed(frames_like(20, 32, 32)).double()
    e = (s @ texts.T / (temperature or 1 / reward.model.logit_scale.exp().item())).exp()
    expected = e[:, 0] / e.sum(1)
    torch.testing.assert_close(reward.reward(s.float()).double(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(reward(frames_like(20, 32, 32)).double(), expected, atol=1e-5, rtol=0)
    beta = expected.median().item() + 1e-4
    binary = CLIPReward(random_vit, goals, negative_prompts=negatives, temperature=temperature, threshold=beta)
    assert torch.equal(binary.reward(s.float()), (expected > beta).float()) and 0 < binary.reward(s.float()).mean() < 1


def test_contrastive_reward_at_its_limits(random_vit):
    s = CLIPReward(random_vit, GOAL).embed(frames_like(8, 32, 32))
    same = CLIPReward(random_vit, GOAL, negative_prompts=[GOAL] * 3)
    torch.testing.assert_close(same.reward(s), torch.full((8,), 0.25), atol=1e-6, rtol=0)  # it cannot tell the four apart
    cold = CLIPReward(random_vit, GOAL, negative_prompts="a cart", temperature=1e-7)  # the nearest text takes it all
    nearer = (s @ cold.goal > s @ cold.negatives[0]).float()
    torch.testing.assert_close(cold.reward(s), nearer, atol=1e-3, rtol=0)
    hot = CLIPReward(random_vit, GOAL, negative_prompts="a cart", temperature=1e6)
    torch.testing.assert_close(hot.reward(s), torch.full((8,), 0.5), atol=1e-5, rtol=0)
    for threshold, value in ((0.0, 1.0), (1.0, 0.0)):
        reward = CLIPReward(random_vit, GOAL, negative_prompts="a cart", threshold=threshold)
        assert torch.equal(reward.reward(s), torch.full((8,), value))


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 17])
def test_any_number_of_frames_in_chunks(random_vit, n):
    frames = frames_like(17, 40, 60)[:n]
    chunked, whole = CLIPReward(random_vit, GOAL, batch_size=8), CLIPReward(random_vit, GOAL, batch_size=100)
    rewards = chunked(frames)
    assert rewards.shape == (n,) and rewards.dtype == torch.float32
    torch.testing.assert_close(rewards, whole(frames), atol=1e-6, rtol=0)


@pytest.mark.parametrize("model_cfg, interpolation, shape", [
    ({"embed_dim": 24, "vision_cfg": VISION_CFG, "text_cfg": TEXT_CFG}, "bicubic", (400, 600)),
    ({"embed_dim": 24, "vision_cfg": VISION_CFG, "text_cfg": TEXT_CFG}, "bilinear", (20, 30)),
    ({"embed_dim": 24, "vision_cfg": VISION_CFG | {"image_size": [32, 48]}, "text_cfg": TEXT_CFG}, "bicubic", (90, 80)),
    ({"embed_dim": 24, "vision_cfg": VISION_CFG | {"layers": [1, 1, 1, 1], "width": 8}, "text_cfg": TEXT_CFG}, "bicubic", (64, 64)),
])  # fmt: skip
def test_preprocessing_is_open_clips_with_squash(tmp_path, model_cfg, interpolation, shape):
    name = save_model(tmp_path, model_cfg, interpolation=interpolation)
    reward = CLIPReward(name, GOAL)
    model, transform = open_clip.create_model_from_pretrained(name, image_resize_mode="squash")
    frames = frames_like(12, *shape)
    images = torch.stack([transform(Image.fromarray(frame.permute(1, 2, 0).numpy())) for frame in frames])
    with torch.no_grad():
        expected = model.eval().encode_image(images, normalize=True)
    assert (reward.embed(frames) @ reward.goal - expected @ reward.goal).abs().max() < 1e-3
    assert (1 - (reward.embed(frames) * expected).sum(-1)).max() < 1e-3


def test_low_precision_encoder_float32_reward(random_vit):
    reward = CLIPReward(random_vit, GOAL, BASELINE, 0.5, precision="bf16")
    assert reward.model.visual.conv1.weight.dtype == torch.bfloat16
    frames = frames_like(30, 32, 32)
    rewards = reward(frames)
    assert rewards.dtype == reward.goal.dtype == torch.float32
    assert (reward.embed(frames).norm(dim=-1) - 1).abs().max() < 1e-6
    assert (rewards - CLIPReward(random_vit, GOAL, BASELINE, 0.5)(frames)).abs().max() < 0.03


def test_siglip_model_with_its_own_tokenizer(tmp_path):
    """SigLIP's shape of a model: its own tokenizer, a text tower without a class token, a bias, another mean and size."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    words = "pole vertically upright on top of the cart and a".split()
    vocab = {"<pad>": 0, "</s>": 1, "<unk>": 2} | {word: i + 3 for i, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="</s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.save_pretrained(tmp_path)
    text_cfg = {"context_length": 10, "vocab_size": 32, "width": 32, "heads": 2, "layers": 1, "hf_tokenizer_name": "own"}
    text_cfg |= {"no_causal_mask": True, "proj_bias": True, "pool_type": "last", "tokenizer_kwargs": {"clean": "canonicalize"}}
    cfg = {"embed_dim": 24, "init_logit_bias": -10, "custom_text": True, "vision_cfg": VISION_CFG, "text_cfg": text_cfg}
    name = save_model(tmp_path, cfg, mean=[0.5] * 3, std=[0.5] * 3, resize_mode="squash")
    reward = CLIPReward(name, GOAL, BASELINE, 0.5)
    assert reward.mean.flatten().tolist() == [127.5] * 3
    assert reward(frames_like(3, 64, 64)).isfinite().all()
    CLIPReward(name, " ".join(words[:9]))  # nine words and the end: exactly the ten places
    with pytest.raises(UsageError, match="reads 10 tokens"):
        CLIPReward(name, " ".join(words))


def test_context_length_is_used_to_its_end_and_no_further(random_vit):
    fits = " ".join(["cart"] * 14)  # plus a start and an end token: 16
    CLIPReward(random_vit, fits)
    for texts in ({"prompts": fits + " cart"}, {"prompts": "a", "baseline_prompts": [fits, fits + " pole"]}):
        with pytest.raises(UsageError, match="cart cart") as error:
            CLIPReward(random_vit, **texts)
        assert str(error.value).count("\n") == 0 and "16" in str(error.value)


def test_words_that_tiny_has_never_read_are_named(capsys):
    CLIPReward("tiny", ["a humanoid robot waving"], ["a Robot"], negative_prompts=["the robot kneeels"])
    assert capsys.readouterr().out == "tiny has no captions with these words, which mean nothing to it: kneeels, waving\n"
    CLIPReward("tiny", "a humanoid robot practicing gymnastics, doing the side splits")
    assert capsys.readouterr().out == ""


def test_weights_from_a_file_by_name(tmp_path, monkeypatch, capsys):
    """NAME//path/to/weights and NAME/TAG, with a small architecture added to open_clip's own list."""
    cfg = {"embed_dim": 24, "vision_cfg": VISION_CFG, "text_cfg": TEXT_CFG}
    (tmp_path / "test-clip.json").write_text(json.dumps(cfg))
    save_model(tmp_path / "saved", cfg)
    weights = tmp_path / "saved" / "open_clip_pytorch_model.bin"
    known = dict(open_clip.factory._MODEL_CONFIGS)
    try:
        open_clip.add_model_config(tmp_path / "test-clip.json")
        by_file = CLIPReward(f"test-clip/{weights}", GOAL)
        by_folder = CLIPReward(f"local-dir:{tmp_path / 'saved'}", GOAL)
        assert torch.equal(by_file.goal, by_folder.goal)
        with pytest.raises(UsageError, match="no weights file"):
            CLIPReward("test-clip//no/such/file.pt", GOAL)
        assert "assumed to be normalized as OpenAI's" in capsys.readouterr().out  # no tag says anything about this one
        with pytest.raises(UsageError, match=r"cannot load test-clip//etc/passwd as a CLIP model") as error:
            CLIPReward("test-clip//etc/passwd", GOAL)
        assert "\n" not in str(error.value)

        # A TorchScript archive, as OpenAI's own are.
        class Archive(torch.nn.Module):
            def __init__(self):
                super().__init__()
                for name, value in torch.load(weights, weights_only=True).items():
                    own, *path, last = self, *name.split(".")
                    for part in path:
                        if not hasattr(own, part):
                            own.add_module(part, torch.nn.Module())
                        own = getattr(own, part)
                    own.register_buffer(last, value)
                self.register_buffer("context_length", torch.tensor(16))

        torch.jit.script(Archive()).save(str(tmp_path / "archive.pt"))
        assert torch.equal(CLIPReward(f"test-clip/{tmp_path / 'archive.pt'}", GOAL).goal, by_folder.goal)

        # A tag whose weights were trained with QuickGELU, like OpenAI's, must be run with it; the download is replaced.
        tag = {"hf_hub": "org/model/", "quick_gelu": True, "mean": (0.1, 0.2, 0.3), "std": (0.5, 0.6, 0.7)}
        monkeypatch.setitem(
            open_clip.pretrained._PRETRAINED, "test-clip", {"quick": tag, "plain": tag | {"quick_gelu": False}}
        )
        monkeypatch.setattr(open_clip.factory, "download_pretrained", lambda *args, **kwargs: str(weights))
        monkeypatch.setattr(clip_reward, "check_hub", lambda *args: None)
        quick, plain = CLIPReward("test-clip/quick", GOAL), CLIPReward("test-clip/plain", GOAL)
        assert quick.mean.flatten().tolist() == pytest.approx([25.5, 51, 76.5])
        assert any(isinstance(module, open_clip.transformer.QuickGELU) for module in quick.model.modules())
        assert not any(isinstance(module, open_clip.transformer.QuickGELU) for module in plain.model.modules())
    finally:
        open_clip.factory._MODEL_CONFIGS.clear()
        open_clip.factory._MODEL_CONFIGS.update(known)
        open_clip.factory._MODEL_CONFIG_PATHS[:] = [
            p for p in open_clip.factory._MODEL_CONFIG_PATHS if tmp_path not in p.parents
        ]


@pytest.mark.parametrize("arguments, expected", [
    ({"clip_model": "ViT-B-23/openai"}, "unknown CLIP model ViT-B-23; did you mean ViT-B-32"),
    ({"clip_model": "ViT-B-32/openia"}, "no weights file or tag openia; did you mean openai"),
    ({"clip_model": "ViT-B-32"}, "ViT-B-32 needs a weights tag or file, as in ViT-B-32/openai"),
    ({"clip_model": "tinny"}, "did you mean tiny"),
    ({"clip_model": str(Path(__file__).resolve().parent)}, "for the model in it write local-dir:/"),
    ({"clip_model": "local-dir:/no/such/folder"}, "no CLIP model in /no/such/folder"),
    ({"alpha": -0.1}, "between 0 and 1"),
    ({"alpha": 1.1}, "between 0 and 1"),
    ({"alpha": float("nan")}, "between 0 and 1"),
    ({"alpha": 0.5}, "needs a baseline prompt"),
    ({"prompts": ""}, "prompt is empty"),
    ({"prompts": []}, "prompt is empty"),
    ({"baseline_prompts": ["a cart", "  "]}, "prompt is empty"),
    ({"alpha": 0.5, "baseline_prompts": GOAL}, "no line runs"),
    ({"negative_prompts": ["a cart", ""]}, "prompt is empty"),
    ({"negative_prompts": "cart " * 40}, "too long for this model"),
    ({"negative_prompts": "a cart", "temperature": 0.0}, "temperature must be above 0"),
    ({"negative_prompts": "a cart", "temperature": float("nan")}, "temperature must be above 0"),
    ({"negative_prompts": "a cart", "threshold": 1.5}, "threshold must lie between 0 and 1"),
    ({"temperature": 0.1}, "give a negative prompt"),
    ({"threshold": 0.5}, "give a negative prompt"),
    ({"negative_prompts": "a cart", "threshold": float("nan")}, "threshold must lie between 0 and 1"),
])  # fmt: skip
def test_bad_input(random_vit, arguments, expected):
    with pytest.raises(UsageError) as error:
        CLIPReward(**{"clip_model": random_vit, "prompts": GOAL} | arguments)
    assert expected in str(error.value) and "\n" not in str(error.value)


def test_broken_files_are_one_line(tmp_path, random_vit):
    broken = tmp_path / "model"
    broken.mkdir()
    (broken / "open_clip_config.json").write_text("{")
    with pytest.raises(UsageError, match="as a CLIP model"):
        CLIPReward(f"local-dir:{broken}", GOAL)
    config = Path(random_vit.removeprefix("local-dir:")) / "open_clip_config.json"
    (broken / "open_clip_config.json").write_text(config.read_text())
    with pytest.raises(UsageError, match="as a CLIP model"):  # no weights
        CLIPReward(f"local-dir:{broken}", GOAL)
    (broken / "open_clip_pytorch_model.bin").write_bytes(b"not a checkpoint")
    with pytest.raises(UsageError, match="as a CLIP model") as error:
        CLIPReward(f"local-dir:{broken}", GOAL)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name, mean, interpolation", [
    ("ViT-B-32", [0.48145466, 0.4578275, 0.40821073], "bicubic"),
    ("MobileCLIP-S1", [0, 0, 0], "bilinear"),
    ("ViT-B-16-SigLIP", [0.5, 0.5, 0.5], "bicubic"),
    ("PE-Core-T-16-384", [0.5, 0.5, 0.5], "bilinear"),
    ("ViT-L-14", None, None),  # OpenAI's, or 0.5: its tags disagree
])  # fmt: skip
def test_a_file_is_normalized_as_the_tags_of_its_model(name, mean, interpolation, tmp_path, capsys):
    torch.save({}, tmp_path / "weights.pt")
    tags = [open_clip.get_pretrained_cfg(name, tag) for tag in open_clip.list_pretrained_tags_by_model(name)]
    how = clip_reward.about_file(name, str(tmp_path / "weights.pt"), tags)
    assert how.get("image_mean") == (tuple(mean) if mean else None) and how.get("image_interpolation") == interpolation
    assert ("assumed" in capsys.readouterr().out) == (mean is None) and how["weights_only"]


def test_tokenizers_that_are_not_there_are_a_line_soon(tmp_path, monkeypatch):
    cfg = {"embed_dim": 24, "vision_cfg": VISION_CFG, "text_cfg": TEXT_CFG | {"hf_tokenizer_name": "org/own"}}
    name = save_model(tmp_path / "model", {**cfg, "text_cfg": TEXT_CFG})
    (tmp_path / "model" / "open_clip_config.json").write_text(json.dumps({"model_cfg": cfg, "preprocess_cfg": {}}))
    with pytest.raises(UsageError, match="holds no tokenizer"):
        CLIPReward(name, GOAL)
    (tmp_path / "weights.pt").write_bytes(b"")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    asked = []
    monkeypatch.setattr(clip_reward, "check_hub", lambda *what: asked.append(what))
    monkeypatch.setattr(open_clip, "get_tokenizer", lambda _: (_ for _ in ()).throw(OSError("no tokenizer")))
    with pytest.raises(UsageError, match="cannot load .*OSError: no tokenizer"):
        CLIPReward(f"ViT-B-16-SigLIP/{tmp_path / 'weights.pt'}", GOAL)
    assert asked == [("the tokenizer of ViT-B-16-SigLIP", "timm/ViT-B-16-SigLIP", "tokenizer_config.json")]


@pytest.mark.slow("hf-hub", "SigLIP")
@pytest.mark.parametrize("name", ["ViT-B-32/openai", "hf-hub:org/name", "ViT-B-16-SigLIP//etc/hostname"])
def test_hub_out_of_reach_is_one_line_soon(tmp_path, name):
    code = f"import sys, time; from clip_reward import *; t = time.time()\ntry: CLIPReward({name!r}, 'a cart')\n"
    code += "except UsageError as error: print(error); print(time.time() - t)"
    env = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hub")}
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env=env, capture_output=True, text=True, timeout=120)
    line, seconds = done.stdout.splitlines()
    name = "the tokenizer of ViT-B-16-SigLIP" if "SigLIP" in name else name
    assert f"cannot fetch {name}" in line and "--clip-model" in line and "tiny" in line
    assert done.stderr == "" and float(seconds) < 15
    assert not list(tmp_path.rglob("*.incomplete")) and not list(tmp_path.rglob("open_clip*"))


@pytest.mark.parametrize("capabilities, expected", [
    ({}, "fp32"),
    ({"avx512_bf16": False, "amx_bf16": False, "avx512_f": True}, "fp32"),
    ({"avx512_bf16": True, "amx_bf16": False}, "bf16"),
    ({"avx512_bf16": False, "amx_bf16": True}, "bf16"),
])  # fmt: skip
def test_native_precision_is_what_the_processor_has_instructions_for(capabilities, expected, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert clip_reward.native_precision("cpu") == clip_reward.native_precision(torch.device("cpu")) == expected


@pytest.mark.parametrize("capability, expected", [((7, 5), "fp32"), ((8, 0), "bf16"), ((9, 0), "bf16")])
def test_native_precision_is_what_the_gpu_has_instructions_for(capability, expected, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": expected == "fp32"})  # which does not matter
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert clip_reward.native_precision("cuda") == clip_reward.native_precision("cuda:1") == expected
