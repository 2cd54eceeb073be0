"""Datasets of labelled states, and what reward models are measured by on them: definitions, limits, pictures, bad input."""

import csv
import json
import math
import subprocess
import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "figures"))
import dataset  # noqa: E402
import reward_models  # noqa: E402
from reward_models import average_precision, balanced, epic_distance, precision_recall  # noqa: E402

import dqn_clip_cartpole  # noqa: E402
import sac_clip_humanoid  # noqa: E402
import sac_clip_mountaincar  # noqa: E402
from clip_reward import CLIPReward, UsageError, contrastive_reward  # noqa: E402


def call(module, monkeypatch, *arguments) -> int:
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
    try:
        module.main()
    except SystemExit as stopped:
        return stopped.code
    return 0


# ---- The measures


def direct_epic(reward: np.ndarray, label: np.ndarray, weight: np.ndarray, gamma: float, actions: int = 2) -> float:
    """EPIC by its definition (Gleave et al., 2021, Definitions 4.1 and 4.7), over transitions (s, a, s').

    States are drawn by `weight`, actions evenly; the coverage distribution is that of independent s, a, s'. Both rewards are R(s').
    """
    n = len(reward)

    def canonical(r: np.ndarray) -> np.ndarray:
        def R(s, a, s_next):
            return r[s_next]

        def expected(s):  # E[R(s, A, S')], A and S' drawn
            return sum(weight[t] / actions * R(s, a, t) for a, t in product(range(actions), range(n)))

        everywhere = sum(weight[s] * expected(s) for s in range(n))  # E[R(S, A, S')]
        return np.array([
            R(s, a, t) + gamma * expected(t) - expected(s) - gamma * everywhere
            for s, a, t in product(range(n), range(actions), range(n))
        ])  # fmt: skip

    coverage = np.array([weight[s] / actions * weight[t] for s, _, t in product(range(n), range(actions), range(n))])
    one, other = (c - (coverage * c).sum() for c in (canonical(reward), canonical(label)))
    rho = (coverage * one * other).sum() / math.sqrt((coverage * one**2).sum() * (coverage * other**2).sum())
    return math.sqrt((1 - rho) / 2)


@pytest.mark.parametrize("gamma", [0.0, 0.9])
@pytest.mark.parametrize("seed", range(3))
def test_epic_distance_is_its_definition_over_transitions(seed, gamma):
    rng = np.random.default_rng(seed)
    reward, label, weight = rng.normal(size=7), np.array([0, 1, 0, 0, 1, 1, 0]), rng.random(7)
    expected = direct_epic(reward, label.astype(float), weight / weight.sum(), gamma)
    weighted = epic_distance(torch.tensor(reward), torch.tensor(label) == 1, torch.tensor(weight)[None])
    assert weighted.shape == (1,) and weighted.item() == pytest.approx(expected, abs=1e-9)


def test_epic_distance_at_its_limits():
    rng = torch.Generator().manual_seed(0)
    label, weight = torch.rand(5000, generator=rng) < 0.3, torch.ones(1, 5000, dtype=torch.float64)
    for scale, offset, expected in ((3.0, 5.0, 0), (1e-4, 0.3, 0), (-2.0, 1.0, 1)):
        assert epic_distance(scale * label.float() + offset, label, weight).item() == pytest.approx(expected, abs=1e-3)
    noise = torch.randn(5000, generator=rng)
    assert epic_distance(noise, label, weight).item() == pytest.approx(math.sqrt(0.5), abs=0.02)


def test_balanced_weights_are_a_dataset_with_as_many_goal_states_as_others():
    rng = torch.Generator().manual_seed(0)
    label = torch.rand(400, generator=rng) < 0.2
    reward = label + torch.randn(400, generator=rng)
    weight = balanced(torch.ones(1, 400, dtype=torch.float64), label)
    n, others = int(label.sum()), int((~label).sum())
    repeated = torch.cat([reward[label].repeat(others), reward[~label].repeat(n)])
    labels = torch.cat([torch.ones(n * others), torch.zeros(n * others)])
    rho = torch.corrcoef(torch.stack([repeated, labels]).double())[0, 1].item()
    assert epic_distance(reward, label, weight).item() == pytest.approx(math.sqrt((1 - rho) / 2), abs=1e-6)
    assert epic_distance(reward, label, weight) != epic_distance(reward, label, torch.ones(1, 400))


def test_precision_and_recall_by_counting_with_ties():
    rng = torch.Generator().manual_seed(0)
    reward = torch.randint(12, (200,), generator=rng).float()  # many ties
    label = torch.rand(200, generator=rng) < 0.1 + 0.06 * reward
    precision, recall = precision_recall(reward, label)
    thresholds = reward.unique().flip(0)
    assert len(precision) == len(recall) == len(thresholds)
    area, before = 0.0, 0.0
    for beta, p, r in zip(thresholds, precision.tolist(), recall.tolist()):
        found = reward >= beta
        assert p == pytest.approx((label & found).sum().item() / found.sum().item())
        assert r == pytest.approx((label & found).sum().item() / label.sum().item())
        area, before = area + p * (r - before), r
    assert average_precision(reward, label) == pytest.approx(area)
    assert average_precision(label.float(), label) == 1
    assert average_precision(torch.zeros(200), label) == pytest.approx(label.float().mean().item())


# ---- Datasets


@pytest.mark.slow("humanoid")
@pytest.mark.parametrize("script", ["dqn_clip_cartpole", "sac_clip_mountaincar", "sac_clip_humanoid"])
def test_a_dataset_of_random_states(script, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "data"
    assert call(dataset, monkeypatch, "--script", script, "--states", 300, "--output", folder) == 0
    settings, states, labels, people = dataset.load(folder)
    assert settings["script"] == script and len(states) == len(labels) == 300 and people == 0
    assert labels.sum() == 75  # a quarter
    assert f"{labels.float().mean():.3f} of them goal states" in capsys.readouterr().out
    with open(folder / "labels.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["frame", "label", "human_label"] and all(row["human_label"] == "" for row in rows)
    if script == "sac_clip_humanoid":
        scene = sac_clip_humanoid.Scene(8, 8, "realistic", "fixed", 1, 300, torch.device("cpu"))
        expected = sac_clip_humanoid.kneeling(scene.draw(states)[1])
        scene = sac_clip_humanoid.Scene(240, 240, "realistic", "fixed", 1, 1, torch.device("cpu"))
        frame = scene.draw(states[7:8])[0][0].permute(1, 2, 0).numpy()
    elif script == "sac_clip_mountaincar":
        expected = states[:, 0] >= 0.45
        scene = sac_clip_mountaincar.Scene(200, 300, "realistic", torch.device("cpu"))
        frame = scene.draw(states[7:8])[0].permute(1, 2, 0).numpy()
    else:
        expected = torch.rad2deg(states[:, 2]).abs() <= 12
        frame = dqn_clip_cartpole.draw(states[7:8], 200, 300)[0].permute(1, 2, 0).numpy()
    assert torch.equal(labels, expected) and [row["label"] == "1" for row in rows] == expected.tolist()
    assert np.array_equal(np.asarray(Image.open(folder / rows[7]["frame"])), frame)
    assert len(list((folder / "frames").iterdir())) == 300 and len(list(tmp_path.iterdir())) == 1

    rows[3]["human_label"] = ("0.0", "1.0")[not labels[3]]  # as pandas writes it
    rows[4]["human_label"] = f" {'01'[labels[4]]} "
    with open(folder / "labels.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    judged = dataset.load(folder)[2]
    shuffled = (folder / "labels.csv").read_text().split("\n")[:-1]
    (folder / "labels.csv").write_text(
        "\ufeff" + "\n".join([shuffled[0], *shuffled[:0:-1]]), encoding="utf-8"
    )  # as a spreadsheet may
    assert torch.equal(dataset.load(folder)[2], judged)
    _, _, judged, people = dataset.load(folder)
    assert (
        people == 2 and judged[3] != labels[3] and torch.equal(judged[4:], labels[4:]) and torch.equal(judged[:3], labels[:3])
    )


def fake_run(
    folder: Path, rounds: int = 5, seed: int = 0, script=dqn_clip_cartpole, size: int = 4, draw=torch.randn, **settings
) -> torch.Tensor:
    """A run folder, so many rounds of 5 steps in 2 environments played of the 8 that it keeps -> the states after their steps."""
    states = torch.zeros(8, 6, 2, size)
    played = draw(rounds, 6, 2, size, generator=torch.Generator().manual_seed(seed)) * 0.3
    for number, of_round in enumerate(played):
        states[number % 8] = of_round
    settings = {"prompt": ("an upright pole",), "baseline_prompt": ("a pole",)} | settings
    content = {"script": script.__name__, "settings": asdict(script.Args(**settings)), "progress": (rounds * 10, 0.0)}
    folder.mkdir(parents=True)
    torch.save(content | {"rb": {"states": states, "rewards": torch.zeros(8, 5, 2)}}, folder / "checkpoint.pt")
    return played[-8:, 1:].flatten(0, 2)


def test_a_dataset_of_the_states_of_runs(tmp_path, monkeypatch):
    both = torch.cat([fake_run(tmp_path / "a", 2, seed=1), fake_run(tmp_path / "b", 20, seed=2)])  # all of 2, the last 8 of 20
    runs = ["--run-dirs", tmp_path / "a", tmp_path / "b"]
    for name, n in (("all", 100), ("some", 30), ("again", 30)):
        assert call(dataset, monkeypatch, *runs, "--states", n, "--output", tmp_path / name) == 0
    settings, states, labels, _ = dataset.load(tmp_path / "all")
    assert settings["prompt"] == ["an upright pole"] and settings["baseline_prompt"] == ["a pole"]
    assert sorted(states.tolist()) == sorted(both.tolist()) and torch.equal(
        labels, dqn_clip_cartpole.ground_truth_reward(states) > 0
    )
    some, again = (dataset.load(tmp_path / name)[1] for name in ("some", "again"))
    assert torch.equal(some, again) and len({tuple(state) for state in some.tolist()}) == 30


def test_a_dataset_of_a_cars_run_is_labelled_as_the_script_does(tmp_path, monkeypatch):
    own = fake_run(tmp_path / "run", script=sac_clip_mountaincar, size=2, draw=torch.rand, textures="original")
    own_frames = sac_clip_mountaincar.Scene(200, 300, "original", torch.device("cpu")).draw(own)
    assert call(dataset, monkeypatch, "--run-dirs", tmp_path / "run", "--states", 50, "--output", tmp_path / "data") == 0
    settings, states, labels, _ = dataset.load(tmp_path / "data")
    assert settings["script"] == "sac_clip_mountaincar" and torch.equal(labels, states[:, 0] >= 0.45)
    where = next(i for i, state in enumerate(own.tolist()) if state == states[0].tolist())
    frame = np.asarray(Image.open(tmp_path / "data" / dataset.picture(0)))
    assert np.array_equal(frame, own_frames[where].permute(1, 2, 0).numpy())


def test_a_dataset_of_a_humanoids_run_takes_the_poses_and_the_look(tmp_path, monkeypatch):
    settings = {"prompt": ("a robot",), "baseline_prompt": ("x",), "task": "standing-up", "camera": "original"}
    settings |= {"textures": "original", "supersample": 1}
    own = fake_run(tmp_path / "run", 4, script=sac_clip_humanoid, size=47, **settings)[:, :24]
    assert call(dataset, monkeypatch, "--run-dirs", tmp_path / "run", "--states", 40, "--output", tmp_path / "data") == 0
    loaded, states, labels, _ = dataset.load(tmp_path / "data")
    assert (loaded["task"], loaded["textures"], loaded["camera"]) == ("standing-up", "original", "original")
    assert sorted(states.tolist()) == sorted(own.tolist())
    scene = sac_clip_humanoid.Scene(8, 8, "original", "original", 1, 40, torch.device("cpu"))
    assert torch.equal(labels, sac_clip_humanoid.standing_up(scene.draw(states)[1]))


def test_states_of_a_sentence_without_a_condition_are_judged_by_eye_or_by_a_persons_labels(tmp_path, monkeypatch, capsys):
    settings = {"prompt": ("a robot dancing",), "baseline_prompt": ("x",), "task": None, "camera": "fixed"}
    fake_run(tmp_path / "run", 1, script=sac_clip_humanoid, size=47, **settings)
    assert call(dataset, monkeypatch, "--run-dirs", tmp_path / "run", "--states", 10, "--output", tmp_path / "data") == 0
    assert "without labels" in capsys.readouterr().out
    assert dataset.load(tmp_path / "data")[2] is None
    lines = (tmp_path / "data/labels.csv").read_text().split()
    (tmp_path / "data/labels.csv").write_text("\n".join([*lines[:-1], f"{lines[-1]}1"]))
    with pytest.raises(dataset.DatasetError, match="line 2: labels are 0 or 1, not ''; fill in human_label"):
        dataset.load(tmp_path / "data")
    lines[1:] = [f"{line[:-1]},{k % 2}" for k, line in enumerate(lines[1:])]
    (tmp_path / "data/labels.csv").write_text("\n".join(lines))
    _, _, labels, people = dataset.load(tmp_path / "data")
    assert labels.tolist() == [False, True] * 5 and people == 10


def test_what_a_sentence_of_ones_own_pays_is_shown_without_labels(tmp_path, monkeypatch, capsys):
    words = ["--script", "dqn_clip_cartpole", "--prompt", "pole hanging down from the cart", "--states", 200]
    assert call(dataset, monkeypatch, *words, "--output", tmp_path / "data") == 0
    shown, write_picture = {}, reward_models.write_picture

    def look(figure, path):
        for panel in figure.subfigs:
            shown[panel.get_suptitle()] = [float(axes.get_title()) for axes in panel.axes]
        write_picture(figure, path)

    monkeypatch.setattr(reward_models, "write_picture", look)
    arguments = ["--dataset", tmp_path / "data", "--output", tmp_path / "sheet.png", "--goal-baseline-alpha", 0, 0.5]
    assert call(reward_models, monkeypatch, *arguments, "--device", "cpu", "--precision", "fp32") == 0
    assert "judged by eye" in capsys.readouterr().out and not (tmp_path / "sheet.csv").exists()
    assert [title.partition("”")[2] for title in shown] == [
        f", α = {alpha}: from what is paid most to what is paid least" for alpha in (0, 0.5)
    ]
    _, states, _, _ = dataset.load(tmp_path / "data")
    frames = dqn_clip_cartpole.draw(states, 64, 64)
    for alpha, rewards in zip((0.0, 0.5), shown.values()):
        paid = CLIPReward("tiny", words[3], "pole and cart", alpha)(frames)
        assert rewards == sorted(rewards, reverse=True)
        assert (rewards[0], rewards[-1]) == pytest.approx((paid.max().item(), paid.min().item()), abs=6e-4)
    assert Image.open(tmp_path / "sheet.png").width > 1000
    with pytest.raises(dataset.DatasetError, match="--prompt belongs to --script"):
        call(dataset, monkeypatch, "--run-dirs", tmp_path, "--prompt", "a", "--output", tmp_path / "other")


def test_an_interrupted_dataset_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(states):
        raise KeyboardInterrupt

    monkeypatch.setattr(dataset, "drawer", lambda *_: interrupted)
    with pytest.raises(KeyboardInterrupt):
        call(dataset, monkeypatch, "--script", "dqn_clip_cartpole", "--output", tmp_path / "data")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments, expected", [
    ("", "give either --run-dirs or --script"),
    ("--script dqn_clip_cartpole --run-dirs A", "give either --run-dirs or --script"),
    ("--script dqn_clip_cartpole --states 0", "--states must be at least 1"),
    ("--script dqn_clip_cartpole --output A", "A exists"),
    ("--script dqn_clip_cartpole --output no/such/folder", "cannot write to no/such/folder"),
    ("--script sac_clip_humanoid --task flying", "no task flying: there are kneeling"),
    ("--run-dirs A --task kneeling", "--task belongs to --script sac_clip_humanoid"),
    ("--run-dirs TEXT", "checkpoint.pt is no checkpoint of a script here"),
    ("--run-dirs no/such/run", "no/such/run is no run folder"),
    ("--run-dirs A B", "B differs from A in prompt"),
    ("--run-dirs A --states 51", "hold 50 states: lower --states"),
    ("--run-dirs EMPTY", "nothing has been played yet"),
])  # fmt: skip
def test_bad_input_of_a_dataset_is_one_line_and_nothing_is_written(arguments, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    fake_run(Path("A"))
    fake_run(Path("B"), prompt=("a fallen pole",))
    fake_run(Path("EMPTY"), 0)
    Path("TEXT").mkdir()
    Path("TEXT/checkpoint.pt").write_text("not a checkpoint")
    left = sorted(tmp_path.rglob("*"))
    output = [] if "--output" in arguments else ["--output", "new"]
    with pytest.raises(dataset.DatasetError, match=expected) as error:
        call(dataset, monkeypatch, *arguments.split(), *output)
    assert "\n" not in str(error.value) and sorted(tmp_path.rglob("*")) == left and capsys.readouterr().out == ""


# ---- The figure


@pytest.fixture
def cartpole(tmp_path, monkeypatch) -> Path:
    assert call(dataset, monkeypatch, "--script", "dqn_clip_cartpole", "--states", 400, "--output", tmp_path / "data") == 0
    return tmp_path / "data"


def rows_of(path: Path) -> list[dict]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_table_sheet_and_kept_embeddings(cartpole, tmp_path, monkeypatch, capsys):
    goal, baseline, negatives = "pole vertically upright on top of the cart", "pole and cart", ("a pole that fell", "a cart")
    few = [
        "--device",
        "cpu",
        "--goal-baseline-alpha",
        0,
        0.5,
        "--resamples",
        200,
        "--precision",
        "fp32",
        "--output",
        tmp_path / "sheet.png",
    ]
    arguments = ["--dataset", cartpole, "--clip-model", "tiny", *few, "--negative-prompt", *negatives]
    assert call(reward_models, monkeypatch, *arguments, "--prompt", "a fallen pole") == 0
    assert f"the labels are those of “{goal}”" in capsys.readouterr().out
    assert call(reward_models, monkeypatch, *arguments) == 0
    assert Image.open(tmp_path / "sheet.png").width > 1000
    rows, out = rows_of(tmp_path / "sheet.csv"), capsys.readouterr().out
    assert "the labels are those of" not in out
    assert [row["alpha"] for row in rows] == ["0", "0.5", "contrastive"] and {row["prompt"] for row in rows} == {goal}

    _, states, label, _ = dataset.load(cartpole)
    frames = dqn_clip_cartpole.draw(states, 64, 64)
    models = [CLIPReward("tiny", goal, baseline, alpha) for alpha in (0.0, 0.5)]
    rewards = [model(frames) for model in models]
    texts = CLIPReward("tiny", goal, negative_prompts=negatives)
    rewards.append(contrastive_reward(texts.embed(frames), texts.goal, texts.negatives, texts.temperature))
    for row, reward in zip(rows, rewards):
        rho = np.corrcoef(reward.double(), label.double())[0, 1]
        assert float(row["epic"]) == pytest.approx(math.sqrt((1 - rho) / 2), abs=1e-4)
        assert float(row["average_precision"]) == pytest.approx(average_precision(reward, label), abs=1e-3)
        for name in ("epic", "epic_balanced"):
            low, middle, high = (float(row[name + end]) for end in ("_low", "", "_high"))
            assert low < middle < high < low + 0.12
            assert f"{middle:.3f} ({low:.3f} to {high:.3f})" in out
        assert float(row["goal_share"]) == pytest.approx(label.float().mean().item(), abs=1e-4) and row["states"] == "400"
        assert int(row["parameters"]) == sum(p.numel() for p in models[0].model.parameters())

    # More α, and prompts that are known, need no model; a person's labels count.
    monkeypatch.setattr(reward_models, "CLIPReward", lambda *a, **k: pytest.fail("loaded a model"))
    assert call(reward_models, monkeypatch, *arguments[:4], "--goal-baseline-alpha", 0.5, 1, *few[5:]) == 0
    assert rows_of(tmp_path / "sheet.csv")[0]["epic"] == rows[1]["epic"]
    labels = (cartpole / "labels.csv").read_text().replace(",1,\n", ",1,0\n", 40)
    (cartpole / "labels.csv").write_text(labels)
    assert call(reward_models, monkeypatch, *arguments[:4], *few) == 0
    again = rows_of(tmp_path / "sheet.csv")[0]
    assert again["human_labels"] == "40" and float(again["goal_share"]) == pytest.approx(
        label.float().mean().item() - 0.1, abs=1e-4
    )
    assert float(again["epic"]) > float(rows[0]["epic"])


def test_a_new_prompt_or_changed_weights_are_embedded_anew_and_frames_only_then(cartpole, tmp_path, monkeypatch):
    import shutil

    shutil.copytree(ROOT / "tiny_clip", tmp_path / "model", ignore=shutil.ignore_patterns("*.py", "*.md", "__pycache__"))
    loads, draws = [], []
    draw, model = dqn_clip_cartpole.draw, reward_models.CLIPReward
    monkeypatch.setattr(dqn_clip_cartpole, "draw", lambda *a: draws.append(len(a[0])) or draw(*a))
    monkeypatch.setattr(reward_models, "CLIPReward", lambda *a, **k: loads.append(1) or model(*a, **k))
    arguments = ["--dataset", cartpole, "--clip-model", f"local-dir:{tmp_path / 'model'}", "--resamples", 5]
    arguments += ["--goal-baseline-alpha", 0, "--output", tmp_path / "sheet.png", "--prompt"]
    for prompts, loaded, drawn in ((["a pole"], 1, 400), (["a pole"], 0, 0), (["a pole", "a stick on a cart"], 1, 0)):
        loads.clear(), draws.clear()
        assert call(reward_models, monkeypatch, *arguments, *prompts) == 0
        assert (len(loads), sum(draws)) == (loaded, drawn) and len(rows_of(tmp_path / "sheet.csv")) == len(prompts)
    (tmp_path / "model" / "open_clip_model.safetensors").touch()
    draws.clear()
    assert call(reward_models, monkeypatch, *arguments, "a pole") == 0 and sum(draws) == 400


@pytest.mark.slow("humanoid")
@pytest.mark.parametrize("script", ["sac_clip_mountaincar", "sac_clip_humanoid"])
def test_frames_are_embedded_as_the_script_draws_them(script, tmp_path, monkeypatch):
    folder = tmp_path / "data"
    assert call(dataset, monkeypatch, "--script", script, "--states", 200, "--output", folder) == 0
    settings, states, _, _ = dataset.load(folder)
    args = reward_models.Args(dataset=folder, device="cpu", precision="fp32")
    embedded = reward_models.embed_dataset(args, "tiny", ["a robot"])
    if script == "sac_clip_humanoid":
        frames = sac_clip_humanoid.Scene(64, 64, "realistic", "fixed", 1, 128, torch.device("cpu")).draw(states)[0]
    else:
        frames = sac_clip_mountaincar.Scene(64, 64, "realistic", torch.device("cpu")).draw(states)
    expected = CLIPReward("tiny", "a robot").embed(frames)
    torch.testing.assert_close(embedded["frames"], expected, atol=1e-4, rtol=0)
    assert settings["textures"] == "realistic"


def test_a_reward_that_is_the_same_for_all_states_is_left_out_in_words(cartpole, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reward_models, "contrastive_reward", lambda frames, *_: torch.ones(len(frames)))
    options = ["--clip-model", "tiny", "--device", "cpu", "--goal-baseline-alpha", "0", "--negative-prompt", "a cart"]
    options += ["--resamples", 10, "--output", tmp_path / "sheet.png"]
    assert call(reward_models, monkeypatch, "--dataset", cartpole, *options) == 0
    out = capsys.readouterr().out
    assert "left out: tiny, contrastive pays all states the same" in out and "nan" not in (
        out + (tmp_path / "sheet.csv").read_text()
    )
    monkeypatch.setattr(reward_models, "rewards_of", lambda *_: [(0.0, torch.ones(3))])
    with pytest.raises(reward_models.DatasetError, match="no reward tells one state from another"):
        call(reward_models, monkeypatch, "--dataset", cartpole, *options)


def test_a_model_that_cannot_be_had_is_skipped_and_the_exit_code_tells(cartpole, tmp_path, monkeypatch, capsys):
    arguments = ["--dataset", cartpole, "--resamples", 5, "--goal-baseline-alpha", 0, "--output", tmp_path / "sheet.png"]
    assert call(reward_models, monkeypatch, *arguments, "--clip-model", "local-dir:/no/such", "tiny") == 3
    captured = capsys.readouterr()
    assert "reward_models.py: skipped local-dir:/no/such: no CLIP model in /no/such" in captured.err + captured.out
    assert [row["model"] for row in rows_of(tmp_path / "sheet.csv")] == ["tiny"]
    (tmp_path / "sheet.csv").unlink()
    with pytest.raises(dataset.DatasetError, match="none of the models"):
        call(reward_models, monkeypatch, *arguments, "--clip-model", "local-dir:/no/such")
    assert not (tmp_path / "sheet.csv").exists()


@pytest.mark.parametrize("arguments, expected", [
    ("--dataset no/such", "no/such is no dataset"),
    ("--dataset GOOD --output x.jpg", "must end in .png"),
    ("--dataset GOOD --output no/such/x.png", "cannot write to"),
    ("--dataset GOOD --goal-baseline-alpha 1.5", "between 0 and 1"),
    ("--dataset GOOD --resamples 1", "--resamples must be at least 2"),
    ("--dataset GOOD --clip-batch-size 0", "--clip-batch-size must be at least 1"),
    ("--dataset SHORT", "has no line for frames/000049.png"),
    ("--dataset GOOD --temperature 0", "--temperature must be above 0"),
    ("--dataset GOOD --temperature 0.1", "--temperature belongs to the contrastive reward"),
    ("--dataset GOOD --device toaster", "no device toaster here"),
    ("--dataset COLUMNS", "the first line must be frame,label,human_label, with commas"),
    ("--dataset WRONG", "line 7: labels are 0 or 1, not 'yes'"),
    ("--dataset FEW", "19 goal states of 50: at least 20"),
    ("--dataset GOOD --prompt ''", "prompt is empty|none of the models"),
])  # fmt: skip
def test_bad_input_is_one_line_and_nothing_is_written(arguments, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, goals, person in (
        ("GOOD", 25, ""),
        ("SHORT", 25, ""),
        ("WRONG", 25, "yes"),
        ("FEW", 19, ""),
        ("COLUMNS", 25, ""),
    ):
        Path(name).mkdir()
        np.save(f"{name}/states.npy", np.zeros((50, 4), np.float32))
        settings = {"script": "dqn_clip_cartpole", "prompt": ["a"], "baseline_prompt": ["b"]}
        Path(f"{name}/dataset.json").write_text(json.dumps(settings))
        rows = [f"{dataset.picture(i)},{int(i < goals)},{person if i == 5 else ''}" for i in range(50 - (name == "SHORT"))]
        text = "\n".join(["frame,label,human_label", *rows, ""])
        Path(f"{name}/labels.csv").write_text(text.replace(",", ";") if name == "COLUMNS" else text)
    left = sorted(tmp_path.rglob("*"))
    words = [word.strip("'") for word in arguments.split()]
    with pytest.raises((dataset.DatasetError, UsageError), match=expected) as error:
        call(reward_models, monkeypatch, *words)
    assert "\n" not in str(error.value) and sorted(tmp_path.rglob("*")) == left


@pytest.mark.parametrize("script, arguments", [("dataset", ["--states", "3"]), ("reward_models", ["--dataset", "none"])])
def test_bad_input_has_exit_code_2(script, arguments, tmp_path):
    command = [sys.executable, ROOT / "figures" / f"{script}.py", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"{script}.py: error: ")


def test_several_prompts_of_a_run_are_one_reward_as_in_training_and_no_baseline_means_no_alpha(tmp_path, monkeypatch):
    goals, baseline = ("an upright pole", "a balanced pole on a cart"), ("a pole", "a cart")
    for name, base in (("a", baseline), ("b", ())):
        fake_run(tmp_path / name / "run", 8, prompt=goals, baseline_prompt=base)
        arguments = ["--run-dirs", tmp_path / name / "run", "--states", 80, "--output", tmp_path / name / "data"]
        assert call(dataset, monkeypatch, *arguments) == 0
    few = [
        "--resamples",
        3,
        "--precision",
        "fp32",
        "--device",
        "cpu",
        "--output",
        tmp_path / "sheet.png",
        "--goal-baseline-alpha",
    ]
    assert call(reward_models, monkeypatch, "--dataset", tmp_path / "a/data", *few, 0.5) == 0
    (row,) = rows_of(tmp_path / "sheet.csv")
    _, states, label, _ = dataset.load(tmp_path / "a/data")
    reward = CLIPReward("tiny", goals, baseline, 0.5)(dqn_clip_cartpole.draw(states, 64, 64))
    assert float(row["epic"]) == pytest.approx(epic_distance(reward, label, torch.ones(1, 80)).item(), abs=1e-4)
    assert call(reward_models, monkeypatch, "--dataset", tmp_path / "b/data", *few, 0) == 0
    with pytest.raises(dataset.DatasetError, match="needs a --baseline-prompt"):
        call(reward_models, monkeypatch, "--dataset", tmp_path / "b/data", *few, 0.5)
