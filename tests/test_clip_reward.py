"""The reward module against its definitions, its limits, and open_clip's transform, tokenizers and loader."""

import json
import logging
import os
import pickle
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import huggingface_hub
import numpy as np
import open_clip
import pytest
import safetensors.torch
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from PIL import Image

import clip_reward
from clip_reward import HERE, CLIPReward, UsageError
from tiny_clip.words import never_read

GOAL, BASELINE = "pole vertically upright on top of the cart", "pole and cart"
TEXT_CFG = {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1}
VISION_CFG = {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8}
VIT = {"embed_dim": 24, "vision_cfg": VISION_CFG, "text_cfg": TEXT_CFG}
WEIGHTS = "open_clip_model.safetensors"


def save_model(folder: Path, model_cfg: dict, kind: type = open_clip.CLIP, **preprocess) -> str:
    """A model with random weights, saved as open_clip saves it -> its name for CLIPReward."""
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(kind(**model_cfg).state_dict(), folder / WEIGHTS)
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


# ---- Rewards


@pytest.mark.parametrize("goals, baselines", [([GOAL], [BASELINE]), (["a pole", GOAL], ["a cart", BASELINE])])
def test_reward_is_definition_1(random_vit, goals, baselines):
    """Word for word: project s onto the line through b and g, mix, measure the distance to g."""
    reward = CLIPReward(random_vit, goals, baselines)
    g, b = (embed(reward, *texts).mean(0) for texts in (goals, baselines))
    s = F.normalize(torch.randn(50, 24, generator=torch.Generator().manual_seed(1)).double(), dim=-1)
    direction = g - b
    share = ((s - b) @ direction / (direction @ direction))[:, None]
    projected = b + share * direction
    for alpha in (0.0, 0.3, 1.0):
        reward.alpha, reward.threshold = alpha, None
        expected = 1 - 0.5 * (alpha * projected + (1 - alpha) * s - g).norm(dim=-1) ** 2
        torch.testing.assert_close(reward.reward(s.float()).double(), expected, atol=1e-6, rtol=0)
        reward.threshold = expected.median().item() - 1e-4
        binary = reward.reward(s.float())
        assert torch.equal(binary, (expected > reward.threshold).float()) and 0 < binary.sum() < 50


@pytest.mark.parametrize("temperature", [None, 1e-7, 1.0])
def test_contrastive_reward_is_the_softmax_probability_of_the_goal(random_vit, temperature):
    """Several goals are averaged, negatives are not. If it is very cold, the nearest text takes it all."""
    goals, negatives = [GOAL, "a balanced pole"], ["a fallen pole", "a cart", "nothing"]
    reward = CLIPReward(random_vit, goals, negative_prompts=negatives, temperature=temperature)
    texts = torch.cat([embed(reward, *goals).mean(0, keepdim=True), embed(reward, *negatives)])
    frames = frames_like(20, 32, 32)
    logits = reward.embed(frames).double() @ texts.T
    logits /= temperature or 1 / reward.model.logit_scale.exp().item()
    expected = logits.softmax(dim=1)[:, 0]
    torch.testing.assert_close(reward(frames).double(), expected, atol=1e-5, rtol=0)


def test_any_number_of_frames_in_chunks(random_vit):
    chunked, whole = CLIPReward(random_vit, GOAL, batch_size=8), CLIPReward(random_vit, GOAL)
    frames = frames_like(17, 40, 60)
    expected = whole(frames)
    for n in (1, 7, 8, 9, 17):
        rewards = chunked(frames[:n])
        assert rewards.shape == (n,) and rewards.dtype == torch.float32
        torch.testing.assert_close(rewards, expected[:n], atol=1e-6, rtol=0)
    for other in (frames.float(), frames / 255, frames.int()):
        with pytest.raises(UsageError, match="uint8"):
            whole(other)


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
    assert (1 - (reward.embed(frames) * expected).sum(-1)).max() < 1e-5


def test_an_encoder_in_bf16_has_a_reward_in_float32(random_vit):
    half, full = (CLIPReward(random_vit, GOAL, BASELINE, 0.5, precision=kind) for kind in ("bf16", "fp32"))
    assert half.model.visual.conv1.weight.dtype == torch.bfloat16
    frames = frames_like(30, 32, 32)
    assert half(frames).dtype == half.goal.dtype == torch.float32
    assert (half.embed(frames).norm(dim=-1) - 1).abs().max() < 1e-6
    assert (half(frames) - full(frames)).abs().max() < 0.03


def test_a_parent_in_training_leaves_the_frozen_model_as_it_is():
    logging.disable(logging.NOTSET)
    reward = CLIPReward("tiny", GOAL)
    parent = torch.nn.Sequential(reward)
    frames = frames_like(8, 96, 96)
    before = {name: value.clone() for name, value in reward.state_dict().items()}
    assert any("running_mean" in name for name in before)  # of BatchNorm
    expected = reward(frames)
    assert torch.equal(parent.train()(frames), expected) and not reward.model.training
    assert all(torch.equal(value, before[name]) for name, value in reward.state_dict().items())
    assert logging.root.manager.disable == logging.NOTSET  # the scripts alone silence other libraries


@pytest.mark.parametrize("device, cpu, gpu, expected", [
    ("cpu", {}, None, "fp32"),
    ("cpu", {"avx512_bf16": False, "avx512_f": True}, None, "fp32"),
    (torch.device("cpu"), {"avx512_bf16": True, "amx_bf16": False}, None, "bf16"),
    ("cpu", {"avx512_bf16": False, "amx_bf16": True}, None, "bf16"),
    ("cuda:1", {"avx512_bf16": True}, (7, 5), "fp32"),
    ("cuda", {}, (8, 0), "bf16"),
])  # fmt: skip
def test_native_precision_is_what_the_hardware_has_instructions_for(device, cpu, gpu, expected, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: cpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: gpu)
    assert clip_reward.native_precision(device) == expected


# ---- Texts


def test_context_length_is_used_to_its_end_and_no_further(random_vit):
    fits = " ".join(["cart"] * 14)  # plus a start and an end token: 16
    reward = CLIPReward(random_vit, fits)
    assert torch.equal(reward.embed_text(fits)[0], reward.goal)
    for texts in (fits + " cart", ["a", fits + " pole"], [fits + " pole" * 40, "a"]):
        with pytest.raises(UsageError, match="16 tokens.*cart cart") as error:
            reward.embed_text(texts)
        assert "\n" not in str(error.value)
    with pytest.raises(UsageError, match="16 tokens"):
        CLIPReward(random_vit, "a", [fits, fits + " pole"])


def test_siglip_model_with_its_own_tokenizer(tmp_path):
    """SigLIP's shape of a model: a tokenizer, text tower without class token, bias and mean of its own."""
    words = "pole vertically upright on top of the cart and a".split()
    vocab = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *words])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    end = {"single": "$A </s>", "special_tokens": [("</s>", 1)]}
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(**end)
    tokens = {
        "pad_token": "</s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }  # SigLIP's pad with the end, too
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens).save_pretrained(tmp_path)
    text_cfg = TEXT_CFG | {"context_length": 10, "vocab_size": 32, "pool_type": "last", "proj_bias": True}
    text_cfg |= {"no_causal_mask": True, "hf_tokenizer_name": "own"}
    text_cfg |= {"tokenizer_kwargs": {"clean": "canonicalize"}}
    cfg = VIT | {"text_cfg": text_cfg, "init_logit_bias": -10}
    pixels = {"mean": [0.5] * 3, "std": [0.5] * 3, "resize_mode": "squash"}
    name = save_model(tmp_path, cfg, open_clip.CustomTextCLIP, **pixels)
    reward = CLIPReward(name, " ".join(words[:9]))  # nine words and the end: exactly the ten places
    assert reward.mean.flatten().tolist() == [127.5] * 3
    assert reward(frames_like(3, 64, 64)).isfinite().all()
    for n in (10, 11, 30):
        with pytest.raises(UsageError, match="10 tokens"):
            reward.embed_text(" ".join((words * 3)[:n]))


@pytest.mark.parametrize("scene, texts, expected", [
    ("humanoid", ["The robot dropped, resting in prayer", "tilt"], ["dropped", "prayer", "resting", "tilt"]),
    ("humanoid", ["a humanoid robot practicing gymnastics, doing the side splits"], []),
    ("cartpole", ["a Robot", "the pole dropped more than 30 degrees from upright"], ["robot"]),
    ("cartpole", ["the PHRASE has an N"], ["has", "phrase"]),
    ("gymnasium", ["a car or a robot meditating in a spaceship"], ["spaceship"]),  # any scene's words
])  # fmt: skip
def test_words_that_tiny_has_never_read_are_those_of_no_caption_of_the_scene(scene, texts, expected):
    """Neither of other scenes, held-out rewordings, conditions (tilt <= 3) nor placeholders."""
    unknown = never_read(texts, f"somewhere/dqn_clip_{scene}.py")
    assert [word for word in unknown if word not in ("an", "n")] == expected


# ---- Models


@pytest.fixture
def small_clip(tmp_path, monkeypatch) -> Path:
    """The weights file of an architecture "test-clip", which open_clip knows for a while."""
    (tmp_path / "test-clip.json").write_text(json.dumps(VIT))
    for name in ("_MODEL_CONFIGS", "_MODEL_CONFIG_PATHS"):
        known = getattr(open_clip.factory, name)
        monkeypatch.setattr(open_clip.factory, name, known.copy())
    open_clip.add_model_config(tmp_path / "test-clip.json")
    save_model(tmp_path / "saved", VIT)
    return tmp_path / "saved" / WEIGHTS


def test_weights_from_a_file_and_by_tag(small_clip, monkeypatch, capsys):
    by_file = CLIPReward(f"test-clip/{small_clip}", GOAL)
    assert "pixels as OpenAI's; if made with QuickGELU" in capsys.readouterr().out
    assert torch.equal(by_file.goal, CLIPReward(f"local-dir:{small_clip.parent}", GOAL).goal)
    # A tag whose weights were trained with QuickGELU, like OpenAI's, must be run with it; no download here.
    tag = {"hf_hub": "org/model/", "quick_gelu": True, "mean": (0.1, 0.2, 0.3), "std": (0.5, 0.6, 0.7)}
    tags = {"quick": tag, "plain": tag | {"quick_gelu": False}}
    monkeypatch.setitem(open_clip.pretrained._PRETRAINED, "test-clip", tags)
    monkeypatch.setattr(open_clip.factory, "download_pretrained", lambda *args, **kwargs: str(small_clip))
    for name, expected in (("quick", True), ("plain", False)):
        reward = CLIPReward(f"test-clip/{name}", GOAL)
        assert reward.mean.flatten().tolist() == pytest.approx([25.5, 51, 76.5])
        assert any(isinstance(m, open_clip.transformer.QuickGELU) for m in reward.model.modules()) == expected


OWN = """import os
os.makedirs("ran", exist_ok=True)
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast as Own
class Config(PretrainedConfig): model_type = "own"
class Model(PreTrainedModel): config_class = Config
"""
CONFIG = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModel": "own.Model"}}
TOKENIZER = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
BERT = {"model_type": "bert", "vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1} | {
    "num_attention_heads": 1, "intermediate_size": 8
}  # fmt: skip
HF = {"hf_tokenizer_name": "own"}
TRUST, UNSAFE = ({"tokenizer_kwargs": own} for own in ({"trust_remote_code": True}, {"weights_only": False}))


@pytest.fixture
def stranger(code, tmp_path, monkeypatch):
    """A function that makes a folder with a model and, beside it, code that nobody may run, or ask for."""
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr("builtins.input", lambda *_: asked.append(1) or "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.TIME_OUT_REMOTE_CODE", 15)  # as at first

    def stranger(folder: Path, of_text: dict, config: dict, tokenizer: dict = {}) -> None:  # noqa: B006
        save_model(folder, VIT)
        text = json.dumps({"model_cfg": VIT | {"text_cfg": TEXT_CFG | of_text}, "preprocess_cfg": {}})
        text = text.replace('"trust_', '"\\u0074rust_')  # the same, written in another way
        (folder / "open_clip_config.json").write_text(text)
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
        (folder / "own.py").write_text(OWN)
        torch.save({"embeddings.word_embeddings.weight": code}, folder / "pytorch_model.bin")

    yield stranger
    assert not asked and not Path("ran").exists()


TOWER = {"hf_model_name": "."}  # found from the working folder


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("of_text, config, tokenizer", [
    (HF, {}, TOKENIZER),
    (HF, CONFIG, TOKENIZER),
    (HF | TRUST, {}, TOKENIZER),
    (HF | UNSAFE, BERT, {"tokenizer_class": "BertModel"}),  # any class passes for a tokenizer's
    (HF, BERT, {"tokenizer_class": "BertModel"}),
    (HF, CONFIG, {"tokenizer_class": "AutoModel"}),
    (TOWER, CONFIG, {}),
    (TOWER, CONFIG | BERT, {}),
    (TOWER | TRUST, CONFIG, {}),
    (TOWER, BERT | {"attn_implementation": "org/kernel"}, {}),
])  # fmt: skip
def test_a_strangers_model_runs_nothing_and_asks_nothing(stranger, of_text, config, tokenizer, weights):
    """Code beside a tokenizer or a text tower of its own, and pickled weights of that one."""
    stranger(Path(), of_text, config, tokenizer)
    if not weights:  # of the whole: then transformers looks for the tower's
        Path(WEIGHTS).unlink()
    with pytest.raises(UsageError, match="cannot use"):
        CLIPReward("local-dir:.", GOAL)


def test_pickled_weights_run_nothing(small_clip, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small_clip.unlink()
    torch.save({"visual.proj": code}, "evil.pt")
    torch.save({"visual.proj": code}, small_clip.parent / "open_clip_pytorch_model.bin")
    Path("old.pt").write_bytes(pickle.dumps(code))
    np.savez("evil.npz", image=np.array([code], dtype=object))
    names = ("evil.pt", "old.pt", "evil.npz")
    for name in (f"local-dir:{small_clip.parent}", *(f"test-clip/{file}" for file in names)):
        with pytest.raises(UsageError, match="cannot use"):
            CLIPReward(name, GOAL)
    assert not Path("ran").exists()


@pytest.mark.parametrize("arguments, expected", [
    ({"clip_model": "ViT-B-32"}, "cannot use ViT-B-32"),
    ({"clip_model": "tinny"}, "cannot use tinny"),
    ({"clip_model": "local-dir:no/such"}, "no/such"),
    ({"alpha": float("nan")}, "α in"),
    ({"alpha": 0.5}, "a baseline prompt"),
    ({"prompts": []}, "a prompt"),
])  # fmt: skip
def test_what_cannot_be_is_one_line(random_vit, arguments, expected):
    """More of it in tests/test_scripts.py, as a user brings it."""
    with pytest.raises(UsageError) as error:
        CLIPReward(**{"clip_model": random_vit, "prompts": GOAL} | arguments)
    assert expected in str(error.value) and "\n" not in str(error.value)


# ---- The hub


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ViT-B-32/openai", "hf-hub:org/name", "ViT-B-16-SigLIP/FILE"])
def test_hub_out_of_reach_is_one_line(tmp_path, name):
    (tmp_path / "FILE").write_bytes(b"")
    env = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hub")}
    command = [sys.executable, HERE / "dqn_clip_cartpole.py", "--device=cpu", f"--clip-model={name}"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"cannot use {name}" in done.stderr
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


@pytest.fixture
def hub(serve, tmp_path, monkeypatch):
    """A function that makes this hub the one that models come from, or one that does not answer."""
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "HF_HUB_CACHE", tmp_path / "cache")
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    def hub(answers: bool) -> None:
        endpoint = serve(partial(Hub, directory=tmp_path)) if answers else "http://127.0.0.1:9"
        where = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", where)

    return hub


@pytest.mark.parametrize("name", ["hf-hub:org/model", "test-clip/tag"])
def test_weights_are_fetched_and_found_again_without_the_hub(name, hub, small_clip, tmp_path, monkeypatch):
    small_clip.parent.rename(tmp_path / "served")
    tag = {"hf_hub": "org/model/", "mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bicubic"}
    monkeypatch.setitem(open_clip.pretrained._PRETRAINED, "test-clip", {"tag": tag})
    rewards = []
    for answers in (True, False):
        hub(answers)
        rewards.append(CLIPReward(name, GOAL)(frames_like(3, 32, 32)))
    assert torch.equal(*rewards) and [*(tmp_path / "cache").rglob(WEIGHTS)]


@pytest.mark.parametrize("of_text", [HF | TRUST, HF | UNSAFE, {"hf_model_name": "org/model"}])
def test_a_strangers_model_from_the_hub_runs_nothing(of_text, hub, stranger, tmp_path):
    stranger(tmp_path / "served", of_text, CONFIG, TOKENIZER)
    hub(True)
    with pytest.raises(UsageError, match="cannot use.*code"):
        CLIPReward("hf-hub:org/model", GOAL)
