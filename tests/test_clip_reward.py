"""The reward module against its definitions, its limits, and open_clip's transform, tokenizers and loader."""

import json
import os
import pickle
import subprocess
import sys
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler
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
VIT = {"embed_dim": 24, "vision_cfg": VISION_CFG, "text_cfg": TEXT_CFG}


def save_model(folder: Path, model_cfg: dict, kind: type = open_clip.CLIP, **preprocess) -> str:
    """A model with random weights, saved as open_clip saves it -> its name for CLIPReward."""
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(kind(**model_cfg).state_dict(), folder / "open_clip_pytorch_model.bin")
    model_cfg = model_cfg | {"custom_text": kind is open_clip.CustomTextCLIP}
    pixels = {"mean": [0.48, 0.46, 0.41], "std": [0.27, 0.26, 0.28], "interpolation": "bicubic"}
    config = {"model_cfg": model_cfg, "preprocess_cfg": pixels | preprocess}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    return f"local-dir:{folder}"


@pytest.fixture(scope="module")
def random_vit(tmp_path_factory) -> str:
    return save_model(tmp_path_factory.mktemp("vit"), VIT)


def frames_like(n: int, height: int, width: int) -> torch.Tensor:
    """Frames with edges, smooth parts and colour, not noise."""
    rng, frames = np.random.default_rng(0), []
    for i in range(n):
        small = Image.fromarray(rng.integers(0, 255, (6, 9, 3), dtype=np.uint8))
        mode = Image.Resampling.NEAREST if i % 2 else Image.Resampling.BILINEAR
        frames.append(np.asarray(small.resize((width, height), mode)))
    return torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2).contiguous()


def embed(reward: CLIPReward, *texts: str) -> torch.Tensor:
    """-> their unit embeddings, one by one (N, D)."""
    tokens = open_clip.SimpleTokenizer(context_length=16)(texts)
    return F.normalize(reward.model.encode_text(tokens), dim=-1).double()


@pytest.mark.parametrize(
    "goals, baselines", [([GOAL], [BASELINE]), (["a pole", GOAL, "up"], ["a cart", BASELINE])]
)
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.75, 1.0])
def test_reward_is_definition_1(random_vit, alpha, goals, baselines):
    """Word for word: project s onto the line through b and g, mix, measure the distance to g."""
    reward = CLIPReward(random_vit, goals, baselines, alpha)
    g, b = (embed(reward, *texts).mean(0) for texts in (goals, baselines))
    s = F.normalize(torch.randn(50, 24, generator=torch.Generator().manual_seed(1)).double(), dim=-1)
    direction = g - b
    share = ((s - b) @ direction / (direction @ direction))[:, None]
    projected = b + share * direction
    expected = 1 - 0.5 * (alpha * projected + (1 - alpha) * s - g).norm(dim=-1) ** 2
    torch.testing.assert_close(reward.reward(s.float()).double(), expected, atol=1e-6, rtol=0)
    reward.threshold = beta = expected.median().item() - 1e-4
    assert (
        torch.equal(reward.reward(s.float()), (expected > beta).float()) and 0 < (expected > beta).sum() < 50
    )


@pytest.mark.parametrize("temperature", [None, 1e-7, 0.05, 1.0, 1e6])
def test_contrastive_reward_is_the_softmax_probability_of_the_goal(random_vit, temperature):
    """Several goals are averaged, negatives are not. If it is very cold, the nearest text takes it all."""
    goals, negatives = [GOAL, "a balanced pole"], ["a fallen pole", "a cart", "nothing"]
    contrast = {"negative_prompts": negatives, "temperature": temperature}
    reward = CLIPReward(random_vit, goals, **contrast)
    texts = torch.cat([embed(reward, *goals).mean(0, keepdim=True), embed(reward, *negatives)])
    s = reward.embed(frames_like(20, 32, 32)).double()
    logits = s @ texts.T / (temperature or 1 / reward.model.logit_scale.exp().item())
    e = (logits - logits.amax(1, keepdim=True)).exp()
    expected = e[:, 0] / e.sum(1)
    torch.testing.assert_close(reward.reward(s.float()).double(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(reward(frames_like(20, 32, 32)).double(), expected, atol=1e-5, rtol=0)
    if temperature == 1.0:
        for beta in (0.0, expected.median().item() + 1e-4):
            binary = CLIPReward(random_vit, goals, **contrast, threshold=beta).reward(s.float())
            assert torch.equal(binary, (expected > beta).float()) and (binary.mean() < 1) == (beta > 0)
            assert binary.any()


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 17])
def test_any_number_of_frames_in_chunks(random_vit, n):
    frames = frames_like(17, 40, 60)[:n]
    chunked, whole = CLIPReward(random_vit, GOAL, batch_size=8), CLIPReward(random_vit, GOAL, batch_size=100)
    rewards = chunked(frames)
    assert rewards.shape == (n,) and rewards.dtype == torch.float32
    torch.testing.assert_close(rewards, whole(frames), atol=1e-6, rtol=0)


@pytest.mark.parametrize("vision_cfg, interpolation, shape", [
    ({}, "bicubic", (400, 600)),
    ({}, "bilinear", (20, 30)),
    ({"image_size": [32, 48]}, "bicubic", (90, 80)),
    ({"layers": [1, 1, 1, 1], "width": 8}, "bicubic", (64, 64)),  # a ResNet
])  # fmt: skip
def test_preprocessing_is_open_clips_with_squash(tmp_path, vision_cfg, interpolation, shape):
    model_cfg = VIT | {"vision_cfg": VISION_CFG | vision_cfg}
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
    whole = CLIPReward(random_vit, GOAL, BASELINE, 0.5)
    for model in (reward, whole):
        assert (model.embed(frames).norm(dim=-1) - 1).abs().max() < 1e-6
    assert (rewards - whole(frames)).abs().max() < 0.03


def test_siglip_model_with_its_own_tokenizer(tmp_path):
    """SigLIP's shape of a model: a tokenizer, text tower without class token, bias and mean of its own."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    words = "pole vertically upright on top of the cart and a".split()
    vocab = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *words])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    end = {"single": "$A </s>", "special_tokens": [("</s>", 1)]}
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(**end)
    tokens = {"pad_token": "</s>", "eos_token": "</s>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens).save_pretrained(tmp_path)
    text_cfg = TEXT_CFG | {"context_length": 10, "vocab_size": 32, "pool_type": "last", "proj_bias": True}
    text_cfg |= {"no_causal_mask": True, "hf_tokenizer_name": "own"}
    text_cfg |= {"tokenizer_kwargs": {"clean": "canonicalize"}}
    cfg = VIT | {"text_cfg": text_cfg, "init_logit_bias": -10}
    pixels = {"mean": [0.5] * 3, "std": [0.5] * 3, "resize_mode": "squash"}
    name = save_model(tmp_path, cfg, open_clip.CustomTextCLIP, **pixels)
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
    assert "mean nothing to it: kneeels, waving\n" in capsys.readouterr().out
    CLIPReward("tiny", "a humanoid robot practicing gymnastics, doing the side splits")
    assert capsys.readouterr().out == ""


@pytest.fixture
def small_clip(tmp_path, monkeypatch) -> Path:
    """The weights file of an architecture "test-clip", which open_clip knows for a while."""
    (tmp_path / "test-clip.json").write_text(json.dumps(VIT))
    for name in ("_MODEL_CONFIGS", "_MODEL_CONFIG_PATHS"):
        known = getattr(open_clip.factory, name)
        monkeypatch.setattr(open_clip.factory, name, known.copy())
    open_clip.add_model_config(tmp_path / "test-clip.json")
    save_model(tmp_path / "saved", VIT)
    return tmp_path / "saved" / "open_clip_pytorch_model.bin"


def test_weights_from_a_file_and_by_tag(small_clip, tmp_path, monkeypatch, capsys):
    by_file = CLIPReward(f"test-clip/{small_clip}", GOAL)
    assert "normalized as OpenAI's" in capsys.readouterr().out  # no tag says anything about this one
    assert torch.equal(by_file.goal, CLIPReward(f"local-dir:{small_clip.parent}", GOAL).goal)
    # A tag whose weights were trained with QuickGELU, like OpenAI's, must be run with it; the download is replaced.
    tag = {"hf_hub": "org/model/", "quick_gelu": True, "mean": (0.1, 0.2, 0.3), "std": (0.5, 0.6, 0.7)}
    tags = {"quick": tag, "plain": tag | {"quick_gelu": False}}
    monkeypatch.setitem(open_clip.pretrained._PRETRAINED, "test-clip", tags)
    monkeypatch.setattr(open_clip.factory, "download_pretrained", lambda *args, **kwargs: str(small_clip))
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *args, **kwargs: None)
    quick, plain = CLIPReward("test-clip/quick", GOAL), CLIPReward("test-clip/plain", GOAL)
    assert quick.mean.flatten().tolist() == pytest.approx([25.5, 51, 76.5])
    for reward, expected in ((quick, True), (plain, False)):
        activations = [isinstance(m, open_clip.transformer.QuickGELU) for m in reward.model.modules()]
        assert any(activations) == expected


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model."])
def test_weights_that_do_not_fit_are_named_by_a_key(prefix, small_clip):
    """DDP's prefix is known to open_clip; others, as users bring them, are shown."""
    weights = torch.load(small_clip, weights_only=True)
    torch.save({prefix + name: weight for name, weight in weights.items()}, small_clip)
    if prefix == "module.":
        CLIPReward(f"test-clip/{small_clip}", GOAL)
        return
    with pytest.raises(UsageError, match=f"cannot load .*key.*{prefix}|cannot load .*Missing key") as error:
        CLIPReward(f"test-clip/{small_clip}", GOAL)
    assert str(error.value).isprintable()


def test_a_strangers_model_runs_nothing(small_clip, code, tmp_path, monkeypatch):
    """Pickles, passed off as a TorchScript archive too, and tokenizers that bring code of their own."""
    monkeypatch.chdir(tmp_path)
    folder = small_clip.parent
    torch.save({"visual.proj": code}, small_clip)
    with zipfile.ZipFile(small_clip, "a") as archive:
        archive.writestr("constants.pkl", b"")
        archive.writestr("x/constants.pkl", b"")
    Path("evil.pt").write_bytes(pickle.dumps(code))
    for name in (f"test-clip/{small_clip}", f"local-dir:{folder}", "test-clip/evil.pt"):
        with pytest.raises(UsageError, match="cannot load") as error:
            CLIPReward(name, GOAL)
        assert str(error.value).isprintable()
    config = json.loads((folder / "open_clip_config.json").read_text())
    own = {"hf_tokenizer_name": "own", "tokenizer_kwargs": {"trust_remote_code": True}}
    config["model_cfg"]["text_cfg"] |= own
    text = json.dumps(config).replace('"trust_', '"\\u0074rust_')
    (folder / "open_clip_config.json").write_text(text)
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    (folder / "own.py").write_text("import os; os.mkdir('ran')\nclass Own: pass\n")
    with pytest.raises(UsageError, match="code of its own, which is not run"):
        CLIPReward(f"local-dir:{folder}", GOAL)
    assert not Path("ran").exists()


@pytest.mark.parametrize("arguments, expected", [
    ({"clip_model": "ViT-B-32/openia"}, "has no weights 'openia', but openai, laion400m_e31"),
    ({"clip_model": "ViT-B-32"}, "ViT-B-32 has no weights '', but openai"),
    ({"clip_model": "tinny"}, "did you mean tiny"),
    ({"clip_model": str(Path(__file__).resolve().parent)}, "local-dir:FOLDER"),
    ({"alpha": -0.1}, "must lie in"),
    ({"alpha": 1.1}, "must lie in"),
    ({"alpha": float("nan")}, "must lie in"),
    ({"alpha": 0.5}, "needs a baseline prompt"),
    ({"baseline_prompts": ["a cart", "  "]}, "prompt is empty"),
    ({"alpha": 0.5, "baseline_prompts": GOAL}, "no line"),
    ({"negative_prompts": ["a cart", ""]}, "prompt is empty"),
    ({"negative_prompts": "cart " * 40}, "too long for this model"),
    ({"negative_prompts": "a cart", "temperature": float("nan")}, "temperature must be above 0"),
    ({"negative_prompts": "a cart", "threshold": 1.5}, "the threshold in"),
    ({"temperature": 0.1}, "give a negative prompt"),
    ({"negative_prompts": "a cart", "threshold": float("nan")}, "the threshold in"),
])  # fmt: skip
def test_bad_input(random_vit, arguments, expected):
    """More of it in tests/test_scripts.py, as a user brings it."""
    with pytest.raises(UsageError) as error:
        CLIPReward(**{"clip_model": random_vit, "prompts": GOAL} | arguments)
    assert expected in str(error.value) and "\n" not in str(error.value)


def test_broken_files_are_one_line(tmp_path, random_vit):
    config = Path(random_vit.removeprefix("local-dir:"), "open_clip_config.json").read_text()
    for text, weights in (("{", b""), ("[]", b""), (config, b""), (config, b"not a checkpoint")):
        (tmp_path / "open_clip_config.json").write_text(text)
        if weights:
            (tmp_path / "open_clip_pytorch_model.bin").write_bytes(weights)
        with pytest.raises(UsageError, match="cannot load local-dir:.*take another --clip-model") as error:
            CLIPReward(f"local-dir:{tmp_path}", GOAL)
        assert str(error.value).isprintable()


@pytest.mark.parametrize("name, mean, interpolation, said", [
    ("ViT-B-32", [0.48145466, 0.4578275, 0.40821073], "bicubic", "QuickGELU write ViT-B-32-quickgelu/"),
    ("MobileCLIP-S1", [0, 0, 0], "bilinear", ""),
    ("ViT-B-16-SigLIP", [0.5, 0.5, 0.5], "bicubic", ""),
    ("PE-Core-T-16-384", [0.5, 0.5, 0.5], "bilinear", ""),
    ("ViT-L-14", None, None, "normalized as OpenAI's"),  # or 0.5: its tags disagree
])  # fmt: skip
def test_what_is_assumed_of_a_file_is_said(name, mean, interpolation, said, capsys):
    how = clip_reward.about_file(name, "weights.pt", open_clip.list_pretrained_tags_by_model(name))
    assert how.get("image_mean") == (tuple(mean) if mean else None)
    assert how.get("image_interpolation") == interpolation
    out = capsys.readouterr().out
    assert said in out if said else out == ""


# ---- The hub


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ViT-B-32/openai", "hf-hub:org/name", "ViT-B-16-SigLIP/FILE"])
def test_hub_out_of_reach_is_one_line(tmp_path, name):
    (tmp_path / "FILE").write_bytes(b"")
    code = f"from clip_reward import *\ntry: CLIPReward({name!r}, 'a cart')\n"
    code += "except UsageError as error: print(error)"
    env = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hub")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    *_, line = done.stdout.splitlines()
    assert f"cannot load {name}" in line and "--clip-model" in line and "tiny" in line
    assert done.stderr == ""
    assert not list(tmp_path.rglob("*.incomplete")) and not list(tmp_path.rglob("open_clip*"))


class Hub(SimpleHTTPRequestHandler):
    """A hub that has the files in ./served in one repository, org/model."""

    def translate_path(self, path: str) -> str:
        there = path.startswith(("/org/model/resolve/", "/api/models/org/model"))
        return super().translate_path("/served/" + path.rpartition("/")[2] if there else "/no/such")

    def end_headers(self):
        self.send_header("ETag", f'"{self.path.rpartition("/")[2]}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("X-Error-Code", "EntryNotFound")  # read of errors only
        super().end_headers()

    def log_message(self, *_):
        pass


TRAIN = """
import sys, open_clip, dqn_clip_cartpole
open_clip.add_model_config("test-clip.json")
tag = {"hf_hub": "org/model/", "mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bicubic"}
open_clip.pretrained._PRETRAINED["test-clip"] = {"tag": tag}
dqn_clip_cartpole.main()
"""
SHORT = "--num-envs 2 --episode-length 5 --total-timesteps 30 --learning-starts 10 --gradient-steps 1"


@pytest.mark.parametrize("name", ["hf-hub:org/model", "test-clip/tag"])
def test_real_weights_are_fetched_trained_with_and_found_again_without_the_hub(name, serve, tmp_path):
    """What every user with real weights does first, with random ones."""
    save_model(tmp_path / "served", VIT)
    about = {"id": "org/model", "siblings": [], "sha": "0" * 40}
    (tmp_path / "served" / "model").write_text(json.dumps(about))
    (tmp_path / "test-clip.json").write_text(json.dumps(VIT))
    env = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
    options = f"{SHORT} --episodes 1 --device cpu --clip-model {name} --run-dir".split()
    results, there = [], serve(partial(Hub, directory=tmp_path))
    for run_dir, endpoint in (("first", there), ("second", "http://127.0.0.1:9")):
        env |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "cache")}
        command = [sys.executable, "-c", TRAIN, *options, run_dir]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        results.append(json.loads((tmp_path / run_dir / "result.json").read_text()))
    assert results[0]["clip_return"] == results[1]["clip_return"]
    assert results[0]["settings"]["clip_model"] == name


@pytest.mark.parametrize("device, cpu, gpu, expected", [
    ("cpu", {}, None, "fp32"),
    ("cpu", {"avx512_bf16": False, "amx_bf16": False, "avx512_f": True}, None, "fp32"),
    ("cpu", {"avx512_bf16": True, "amx_bf16": False}, None, "bf16"),
    (torch.device("cpu"), {"avx512_bf16": False, "amx_bf16": True}, None, "bf16"),
    ("cuda:1", {"avx512_bf16": True}, (7, 5), "fp32"),
    ("cuda", {}, (8, 0), "bf16"),
    ("cuda:1", {}, (9, 0), "bf16"),
])  # fmt: skip
def test_native_precision_is_what_the_hardware_has_instructions_for(device, cpu, gpu, expected, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: cpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: gpu)
    assert clip_reward.native_precision(device) == expected
