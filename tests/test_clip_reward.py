"""The reward module against its closed form, its limits, and open_clip's own transform, tokenizers and loader."""

import json
import os
import pickle
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
    preprocess = {
        "mean": [0.48, 0.46, 0.41],
        "std": [0.27, 0.26, 0.28],
        "interpolation": "bicubic",
    } | preprocess
    (folder / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": model_cfg, "preprocess_cfg": preprocess})
    )
    return f"local-dir:{folder}"


@pytest.fixture(scope="module")
def random_vit(tmp_path_factory) -> str:
    return save_model(
        tmp_path_factory.mktemp("vit"), {"embed_dim": 24, "vision_cfg": VISION_CFG, "text_cfg": TEXT_CFG}
    )


def frames_like(n: int, height: int, width: int) -> torch.Tensor:
    """Frames with edges, smooth parts and colour, not noise."""
    rng, frames = np.random.default_rng(0), []
    for i in range(n):
        small = Image.fromarray(rng.integers(0, 255, (6, 9, 3), dtype=np.uint8))
        mode = Image.Resampling.NEAREST if i % 2 else Image.Resampling.BILINEAR
        frames.append(np.asarray(small.resize((width, height), mode)))
    return torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2).contiguous()


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.75, 1.0])
def test_reward_is_definition_1(random_vit, alpha):
    reward = CLIPReward(random_vit, GOAL, BASELINE, alpha)
    tokens = open_clip.SimpleTokenizer(context_length=16)([GOAL, BASELINE])
    g, b = F.normalize(reward.model.encode_text(tokens), dim=-1).double()
    s = F.normalize(
        torch.randn(50, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), dim=-1
    )
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
    texts = torch.cat(
        [texts[:2].mean(0, keepdim=True), texts[2:]]
    )  # several goals are averaged, negatives are not
    s = reward.embed(frames_like(20, 32, 32)).double()
    e = (s @ texts.T / (temperature or 1 / reward.model.logit_scale.exp().item())).exp()
    expected = e[:, 0] / e.sum(1)
    torch.testing.assert_close(reward.reward(s.float()).double(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(reward(frames_like(20, 32, 32)).double(), expected, atol=1e-5, rtol=0)
    beta = expected.median().item() + 1e-4
    binary = CLIPReward(
        random_vit, goals, negative_prompts=negatives, temperature=temperature, threshold=beta
    )
    assert (
        torch.equal(binary.reward(s.float()), (expected > beta).float())
        and 0 < binary.reward(s.float()).mean() < 1
    )


def test_contrastive_reward_at_its_limits(random_vit):
    s = CLIPReward(random_vit, GOAL).embed(frames_like(8, 32, 32))
    same = CLIPReward(random_vit, GOAL, negative_prompts=[GOAL] * 3)
    torch.testing.assert_close(
        same.reward(s), torch.full((8,), 0.25), atol=1e-6, rtol=0
    )  # it cannot tell the four apart
    cold = CLIPReward(
        random_vit, GOAL, negative_prompts="a cart", temperature=1e-7
    )  # the nearest text takes it all
    nearer = (s @ cold.goal > s @ cold.negatives[0]).float()
    torch.testing.assert_close(cold.reward(s), nearer, atol=1e-3, rtol=0)
    hot = CLIPReward(random_vit, GOAL, negative_prompts="a cart", temperature=1e6)
    torch.testing.assert_close(hot.reward(s), torch.full((8,), 0.5), atol=1e-5, rtol=0)
    reward = CLIPReward(random_vit, GOAL, negative_prompts="a cart", threshold=0.0)
    assert torch.equal(reward.reward(s), torch.ones(8))


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
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="</s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.save_pretrained(tmp_path)
    text_cfg = {
        "context_length": 10,
        "vocab_size": 32,
        "width": 32,
        "heads": 2,
        "layers": 1,
        "hf_tokenizer_name": "own",
    }
    text_cfg |= {
        "no_causal_mask": True,
        "proj_bias": True,
        "pool_type": "last",
        "tokenizer_kwargs": {"clean": "canonicalize"},
    }
    cfg = {
        "embed_dim": 24,
        "init_logit_bias": -10,
        "custom_text": True,
        "vision_cfg": VISION_CFG,
        "text_cfg": text_cfg,
    }
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
    assert "mean nothing to it: kneeels, waving\n" in capsys.readouterr().out
    CLIPReward("tiny", "a humanoid robot practicing gymnastics, doing the side splits")
    assert capsys.readouterr().out == ""


@pytest.fixture
def small_clip(tmp_path, monkeypatch) -> Path:
    """The weights file of an architecture "test-clip", which open_clip knows for a while."""
    cfg = {"embed_dim": 24, "vision_cfg": VISION_CFG, "text_cfg": TEXT_CFG}
    (tmp_path / "test-clip.json").write_text(json.dumps(cfg))
    for name in ("_MODEL_CONFIGS", "_MODEL_CONFIG_PATHS"):
        known = getattr(open_clip.factory, name)
        monkeypatch.setattr(open_clip.factory, name, known.copy())
    open_clip.add_model_config(tmp_path / "test-clip.json")
    save_model(tmp_path / "saved", cfg)
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


@pytest.mark.parametrize("prefix, unknown", [("module.", False), ("_orig_mod.", True), ("model.", True)])
def test_weights_that_do_not_fit_are_named_by_a_key(prefix, unknown, small_clip):
    """DDP's prefix is known to open_clip; others, as users bring them, are shown."""
    weights = torch.load(small_clip, weights_only=True)
    torch.save({prefix + name: weight for name, weight in weights.items()}, small_clip)
    if unknown:
        with pytest.raises(
            UsageError, match=f"cannot load .*key.*{prefix}|cannot load .*Missing key"
        ) as error:
            CLIPReward(f"test-clip/{small_clip}", GOAL)
        assert str(error.value).isprintable()
    else:
        CLIPReward(f"test-clip/{small_clip}", GOAL)


class Code:
    """What runs where it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_a_strangers_model_runs_nothing(small_clip, tmp_path, monkeypatch):
    """Pickles, passed off as a TorchScript archive too, and tokenizers that bring code of their own."""
    monkeypatch.chdir(tmp_path)
    config = json.loads((small_clip.parent / "open_clip_config.json").read_text())
    import zipfile

    torch.save({"visual.proj": Code()}, small_clip)
    with zipfile.ZipFile(small_clip, "a") as archive:
        archive.writestr("constants.pkl", b"")
    for name in (f"test-clip/{small_clip}", f"local-dir:{small_clip.parent}"):
        with pytest.raises(UsageError, match="cannot load") as error:
            CLIPReward(name, GOAL)
        assert str(error.value).isprintable()
    Path("evil.pt").write_bytes(pickle.dumps(Code()))
    with pytest.raises(UsageError, match="cannot load"):
        CLIPReward("test-clip/evil.pt", GOAL)
    text_cfg = TEXT_CFG | {"hf_tokenizer_name": "own", "tokenizer_kwargs": {"trust_remote_code": True}}
    config["model_cfg"]["text_cfg"] = text_cfg
    (small_clip.parent / "open_clip_config.json").write_text(
        json.dumps(config).replace('"trust_', '"\\u0074rust_')
    )
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (small_clip.parent / "tokenizer_config.json").write_text(json.dumps(own))
    (small_clip.parent / "own.py").write_text("import os; os.mkdir('ran')\nclass Own: pass\n")
    with pytest.raises(UsageError, match="code of its own, which is not run"):
        CLIPReward(f"local-dir:{small_clip.parent}", GOAL)
    assert not Path("ran").exists()


@pytest.mark.parametrize("arguments, expected", [
    ({"clip_model": "ViT-B-23/openai"}, "unknown CLIP model 'ViT-B-23', did you mean ViT-B-32"),
    ({"clip_model": "ViT-B-32/openia"}, "'openia' is not a known tag or valid file path"),
    ({"clip_model": "ViT-B-32"}, "pretrained=''"),
    ({"clip_model": "tinny"}, "did you mean tiny"),
    ({"clip_model": str(Path(__file__).resolve().parent)}, "local-dir:FOLDER"),
    ({"clip_model": "local-dir:/no/such/folder"}, "/no/such/folder/open_clip_config.json"),
    ({"alpha": -0.1}, "must lie in"),
    ({"alpha": 1.1}, "must lie in"),
    ({"alpha": float("nan")}, "must lie in"),
    ({"alpha": 0.5}, "needs a baseline prompt"),
    ({"prompts": ""}, "prompt is empty"),
    ({"prompts": []}, "prompt is empty"),
    ({"baseline_prompts": ["a cart", "  "]}, "prompt is empty"),
    ({"alpha": 0.5, "baseline_prompts": GOAL}, "no line"),
    ({"negative_prompts": ["a cart", ""]}, "prompt is empty"),
    ({"negative_prompts": "cart " * 40}, "too long for this model"),
    ({"negative_prompts": "a cart", "temperature": 0.0}, "temperature must be above 0"),
    ({"negative_prompts": "a cart", "temperature": float("nan")}, "temperature must be above 0"),
    ({"negative_prompts": "a cart", "threshold": 1.5}, "the threshold in"),
    ({"temperature": 0.1}, "give a negative prompt"),
    ({"threshold": 0.5}, "give a negative prompt"),
    ({"negative_prompts": "a cart", "threshold": float("nan")}, "the threshold in"),
])  # fmt: skip
def test_bad_input(random_vit, arguments, expected):
    with pytest.raises(UsageError) as error:
        CLIPReward(**{"clip_model": random_vit, "prompts": GOAL} | arguments)
    assert expected in str(error.value) and "\n" not in str(error.value)


def test_broken_files_are_one_line(tmp_path, random_vit):
    config = Path(random_vit.removeprefix("local-dir:")) / "open_clip_config.json"
    for text, weights in (
        ("{", None),
        ("[]", None),
        (config.read_text(), None),
        (config.read_text(), b"not a checkpoint"),
    ):
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
    how = clip_reward.about_file(name, "weights.pt")
    assert how.get("image_mean") == (tuple(mean) if mean else None)
    assert how.get("image_interpolation") == interpolation
    out = capsys.readouterr().out
    assert said in out if said else out == ""


# ---- The hub


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ViT-B-32/openai", "hf-hub:org/name", "ViT-B-16-SigLIP/FILE"])
def test_hub_out_of_reach_is_one_line(tmp_path, name):
    (tmp_path / "FILE").write_bytes(b"")
    code = f"from clip_reward import *\ntry: CLIPReward({name!r}, 'a cart')\nexcept UsageError as error: print(error)"
    env = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hub")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    *_, line = done.stdout.splitlines()
    assert f"cannot load {name}" in line and "--clip-model" in line and "tiny" in line
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("*.incomplete")) and not list(tmp_path.rglob("open_clip*"))


@pytest.fixture
def hub(tmp_path):
    """A hub on the loopback that has a folder's files in one repository, org/model -> its address, the paths asked for."""
    asked, folder = [], tmp_path / "served"

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            path = folder / self.path.rpartition("/")[2]
            found = path.is_file() and "/org/model/resolve/" in self.path
            content = path.read_bytes() if found else b"{}"
            if self.path.startswith("/api/models/org/model"):
                content = json.dumps({"id": "org/model", "siblings": [], "sha": "0" * 40}).encode()
            self.send_response(200 if found or "/api/" in self.path else 404)
            self.send_header("ETag", f'"{len(content)}"')
            self.send_header("X-Repo-Commit", "0" * 40)
            if not found and "/api/" not in self.path:
                self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()


TRAIN = """
import sys, open_clip, dqn_clip_cartpole
open_clip.add_model_config("test-clip.json")
tag = {"hf_hub": "org/model/", "mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bicubic"}
open_clip.pretrained._PRETRAINED["test-clip"] = {"tag": tag}
sys.argv[1:] = sys.argv[1:] + "--num-envs 2 --episode-length 5 --total-timesteps 30 --learning-starts 10".split()
sys.argv[1:] += "--gradient-steps 1 --episodes 1 --device cpu".split()
dqn_clip_cartpole.main()
"""


@pytest.mark.parametrize("name", ["hf-hub:org/model", "test-clip/tag"])
def test_real_weights_are_fetched_trained_with_and_found_again_without_the_hub(name, hub, tmp_path):
    """What every user with real weights does first, with random ones."""
    url, asked = hub
    cfg = {"embed_dim": 24, "vision_cfg": VISION_CFG, "text_cfg": TEXT_CFG}
    save_model(tmp_path / "served", cfg)
    (tmp_path / "test-clip.json").write_text(json.dumps(cfg))
    env = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
    for run_dir, endpoint in (("first", url), ("second", "http://127.0.0.1:9")):
        env |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "cache")}
        command = [sys.executable, "-c", TRAIN, "--clip-model", name, "--run-dir", run_dir]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    assert any("resolve" in path for path in asked)
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("first", "second")]
    assert (
        results[0]["clip_return"] == results[1]["clip_return"]
        and results[0]["settings"]["clip_model"] == name
    )


@pytest.mark.parametrize("capabilities, expected", [
    ({}, "fp32"),
    ({"avx512_bf16": False, "amx_bf16": False, "avx512_f": True}, "fp32"),
    ({"avx512_bf16": True, "amx_bf16": False}, "bf16"),
    ({"avx512_bf16": False, "amx_bf16": True}, "bf16"),
])  # fmt: skip
def test_native_precision_is_what_the_processor_has_instructions_for(capabilities, expected, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert (
        clip_reward.native_precision("cpu") == clip_reward.native_precision(torch.device("cpu")) == expected
    )


@pytest.mark.parametrize("capability, expected", [((7, 5), "fp32"), ((8, 0), "bf16"), ((9, 0), "bf16")])
def test_native_precision_is_what_the_gpu_has_instructions_for(capability, expected, monkeypatch):
    monkeypatch.setattr(
        torch.cpu, "get_capabilities", lambda: {"avx512_bf16": expected == "fp32"}
    )  # which does not matter
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert clip_reward.native_precision("cuda") == clip_reward.native_precision("cuda:1") == expected
