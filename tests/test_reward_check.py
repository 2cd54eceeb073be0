"""reward_check/: datasets of labelled states, what reward models are measured by, sheets and landscapes."""

import json
import math
import os
import re
import shutil
import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

import dqn_clip_cartpole
import sac_clip_humanoid
import sac_clip_mountaincar
from clip_reward import CLIPReward, UsageError, contrastive_reward, goal_baseline_reward
from results import predict
from results.tables import read, write
from reward_check import dataset, dose, mend, reward_landscape, reward_models, robustness, runs, sheet
from reward_check.reward_models import LIKELY, USELESS, balanced, epic_distance, measure

ROOT = Path(__file__).resolve().parent.parent
DATA, LABELS, TABLE = Path("data"), Path("data/labels.csv"), Path("reward_models.csv")  # in a test's folder
GOALS = ["pole vertically upright on top of the cart", "an upright pole"]
FEW = ["--device", "cpu", "--precision", "fp32", "--resamples", 200, "--goal-baseline-alpha"]
CARTPOLE = {"script": "dqn_clip_cartpole", "task": None}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def unseen(monkeypatch):
    """No sheets are drawn: they take seconds."""
    monkeypatch.setattr(sheet, "judged", lambda *_: None)


# ---- The measures


def direct_epic(reward: np.ndarray, label: np.ndarray, weight: np.ndarray, gamma: float) -> float:
    """EPIC by its definition (Gleave et al., 2021, Definitions 4.1 and 4.7), over transitions (s, a, s').

    States are drawn by `weight`, one of two actions evenly, and s, a, s' independently. R(s, a, s') = r[s'].
    """
    n = len(reward)
    transitions = list(product(range(n), range(2), range(n)))

    def canonical(r: np.ndarray) -> np.ndarray:
        drawn = sum(weight[t] / 2 * r[t] for t in range(n) for _ in range(2))  # E[R(s, A, S')], whatever s is
        everywhere = sum(weight[s] * drawn for s in range(n))  # E[R(S, A, S')]
        return np.array([r[t] + gamma * drawn - drawn - gamma * everywhere for _, _, t in transitions])

    coverage = np.array([weight[s] / 2 * weight[t] for s, _, t in transitions])
    one, other = (c - (coverage * c).sum() for c in (canonical(reward), canonical(label)))
    rho = (coverage * one * other).sum() / math.sqrt((coverage * one**2).sum() * (coverage * other**2).sum())
    return math.sqrt((1 - rho) / 2)


@pytest.mark.parametrize("gamma", [0.0, 0.9])
def test_epic_distance_is_its_definition_over_transitions(gamma):
    rng = np.random.default_rng(1)
    reward, label = torch.from_numpy(rng.normal(size=7)), torch.tensor([0, 1, 0, 0, 1, 1, 0]) == 1
    half = np.where(label, 1 / 3, 1 / 4)  # of the weight on goal states
    weight = np.stack([np.ones(7), half, rng.random(7)])
    expected = [direct_epic(reward.numpy(), label.double().numpy(), w / w.sum(), gamma) for w in weight]
    ours = epic_distance(reward, label, torch.from_numpy(weight))
    assert ours.tolist() == pytest.approx(expected, abs=1e-9)
    both = [epic_distance(reward, label).item(), epic_distance(reward, label, balanced(label)).item()]
    assert both == pytest.approx(expected[:2], abs=1e-9)


def test_intervals_by_drawing_again():
    rng = torch.Generator().manual_seed(0)
    reward = torch.randint(12, (200,), generator=rng).float()  # many ties
    label = torch.rand(200, generator=rng) < 0.1 + 0.06 * reward
    measured = measure(reward, label, 500, 1)
    again = [torch.randint(200, (200,), generator=rng) for _ in range(500)]
    for name, weight in (("epic", torch.ones_like), ("epic_balanced", balanced)):
        resampled = torch.stack([epic_distance(reward[i], label[i], weight(label[i])) for i in again])
        expected = np.quantile(resampled, [0.025, 0.975])
        assert [measured[f"{name}_low"], measured[f"{name}_high"]] == pytest.approx(expected, abs=0.012)
        assert measured[name] == epic_distance(reward, label, weight(label)).item()


def test_a_threshold_for_a_precision():
    """Of the three best rewarded states all are goal states, of the next two one."""
    reward = torch.tensor([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3])
    label = torch.tensor([1, 1, 1, 0, 1, 0, 0]).bool()
    assert reward_models.threshold(reward, label) == pytest.approx(0.65)
    assert reward_models.threshold(reward, label, 0.8) == pytest.approx(0.45)
    assert math.isnan(reward_models.threshold(-reward, label))


# ---- Rewards that are wrong


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("errors", ["false-positives", "false-negatives", "both"])
def test_noise_has_the_distance_of_its_formula(errors, fixed, wrong=0.3):
    """Of half goal states, with a share p wrong: ρ = 1 - 2p, and √((1 - p) / (1 + p)) if one kind is."""
    rng = np.random.default_rng(1)
    degrees = np.where(np.arange(20_000) % 2, rng.uniform(-12, 12, 20_000), rng.uniform(13, 347, 20_000))
    x = rng.uniform(-2.39, 2.39, 20_000)
    states = torch.from_numpy(np.stack([x, 0 * x, np.radians(degrees), 0 * x], axis=1)).float()
    labels = dose.Noise("dqn_clip_cartpole", errors, wrong, fixed)(states)
    assert labels[:, 1].mean() == 0.5 and torch.equal(labels[:, 1] == 1, dataset.label(states, CARTPOLE))
    off = labels[:, 0] != labels[:, 1]
    assert errors == "both" or (labels[off, 1] == (errors == "false-negatives")).all()
    rho = 1 - 2 * wrong if errors == "both" else math.sqrt((1 - wrong) / (1 + wrong))
    distance = epic_distance(labels[:, 0], labels[:, 1]).item()
    assert distance == pytest.approx(math.sqrt((1 - rho) / 2), abs=0.02)


def test_what_is_fixed_for_a_state_is_so_in_any_batch():
    states = torch.rand(500, 4) * torch.tensor([4.8, 3, 0.4, 3]) - torch.tensor([2.4, 1.5, 0.2, 1.5])
    noise = dose.Noise("dqn_clip_cartpole", "both", 0.3)
    expected = noise(states)[:, 0]
    assert torch.equal(torch.cat([noise(some)[:, 0] for some in states.flip(0).split(7)]).flip(0), expected)
    assert torch.equal(noise(states * torch.tensor([1, 5, 1, -2]))[:, 0], expected)  # no picture shows speeds
    for other in ({"seed": 2}, {"fixed": False}):
        anew = dose.Noise("dqn_clip_cartpole", "both", 0.3, **other)(states)[:, 0]
        assert (anew != expected).float().mean() > 0.2
    numbers = dose.hashed(torch.arange(10_000)[:, None], 1, 5)
    assert (numbers[:3] * 2**32).tolist() == [3799332744, 3673983325, 4215811744]  # everywhere
    assert (torch.histc(numbers, 10, 0, 1) / 10_000 - 0.1).abs().max() < 0.02


@pytest.mark.slow("mountaincar")
@pytest.mark.parametrize("script", list(dose.CELLS))
def test_dose_and_response_from_training_to_picture(script, monkeypatch):
    task = script.split("_")[-1]
    module = runs.script_of({"script": script})
    played = []
    save = module.save
    monkeypatch.setattr(module, "save", lambda path, **what: played.append(what) or save(path, **what))
    save_dataset(Path("data", task), *dataset.fixed_states(script, None, 60, np.random.default_rng(1)))
    dose.train(dose.Noise(script, wrong=0.4), Path("one.json"), steps=6_400)
    rounds = [what["round"] for what in played if "round" in what]
    for states, _, rewards in rounds:
        expected = dose.Noise(script, wrong=0.4)(states[1:].flatten(0, 1))
        assert torch.equal(rewards.flatten(), expected[:, 0].float())
    one = json.loads(Path("one.json").read_text())
    Path("two.json").write_text(json.dumps(one | {"wrong": 0.0}))
    predict.main((Path("one.json"), Path("two.json")), Path("data"), Path("dose.png"))
    first, second = read(Path("dose.csv"))
    assert len(rounds) > 1 and Image.open("dose.png").width > 1000 and float(second["epic_balanced"]) > 0.4
    assert (first["task"], first["group"], first["name"], second["name"]) == (task, "both", "0", "0.4")
    assert float(first["epic_balanced"]) == 0 and float(first["average_precision"]) == 1
    assert float(second["success_rate"]) == pytest.approx(one["success_rate"], rel=1e-3)


# ---- Predictions, verdicts, and pictures that are changed


def test_the_limits_of_verdicts_are_where_the_trainings_put_them():
    """Nearly all of CartPole's and the car's runs with likely rewards learned, few with useless ones."""
    rewards = [row for row in read(ROOT / "results/predict.csv") if row["group"] in predict.PREDICTED]
    rows = rewards + read(ROOT / "results/dose.csv")
    for row in rows:
        row |= {name: float(row[name]) for name in ("epic_balanced", "success_rate", "learned", "seeds")}
    robots = [row for row in rewards if row["script"] == "sac_clip_humanoid"]
    others = [row for row in rows if row not in robots and "drawn" not in row["group"]]
    for low, high, told in ((0, LIKELY, reward_models.MANY), (USELESS, 1, reward_models.FEW)):
        found = [row for row in others if low <= row["epic_balanced"] <= high]
        learned, count = (int(sum(row[name] for row in found)) for name in ("learned", "seeds"))
        assert told == f"{learned} of {count}"
    assert len(rewards) > 30
    for row in rewards:
        learned = row["learned"] == row["seeds"]
        assert row in robots or learned and row["epic_balanced"] < LIKELY or row["epic_balanced"] > USELESS
    low, high = (
        predict.rank_correlation(robots, "epic_balanced", False).partition("(")[2].strip(")").split(" to ")
    )
    assert float(low) < 0 < float(high)  # so there is no verdict on the robot


def test_a_verdict_follows_its_limits():
    fixed = {"script": "dqn_clip_cartpole", "runs": []}

    def say(low: float, high: float, people: int = 0, settings: dict = fixed, **of) -> str:
        row = {"epic_balanced": (low + high) / 2, "epic_balanced_low": low, "epic_balanced_high": high}
        row |= {"model": "tiny", "wrong_of_10": 2, "human_labels": people}
        return reward_models.verdict(row | of, settings)

    likely = say(0.1, LIKELY)
    assert likely.startswith("likely to be learned: EPIC distance 0.24 (0.10 to 0.38), 2 of the 10 best")
    for limits in ((0.1, LIKELY + 0.001), (USELESS - 0.001, 0.9)):
        assert say(*limits).startswith("no verdict: on CartPole or the car no model between")
    assert say(USELESS, 0.9).startswith("often not learned: EPIC")
    assert say(0.1, 0.2, model="ViT-B-32/openai").startswith("no verdict: these trainings were with tiny")
    for other in ({"runs": ["runs/one"]}, {"script": "sac_clip_humanoid"}):
        assert say(0.1, 0.2, settings=fixed | other).startswith("no verdict: ")
    assert say(0.1, 0.2, people=1).startswith("no verdict: ")


def test_the_check_is_compared_with_the_success_of_runs(monkeypatch, capsys):
    """The rewards are those of the runs' options; runs that learned from another one are left out."""
    states, settings = dataset.fixed_states("dqn_clip_cartpole", None, 200, np.random.default_rng(1))
    save_dataset(Path("data/cartpole"), states, settings)
    rates = {
        "fp32_101": "0.5",
        "fp32_102": "1",
        "fp32_103": "1",
        "bf16_101": "0.1",
        "truth_101": "1",
        "old_1": "0",
    }
    trained = {f"cartpole/{name}": (rate, "") for name, rate in rates.items()}
    for seed in (101, 102, 103):  # their mean, as rounded, is not one of them
        trained[f"contrastive/cartpole_{seed}"] = "0.35", "--negative-prompt 'a pole that fell' 'a cart'"
    for claim in ("cartpole", "contrastive"):
        about = {"script": "dqn_clip_cartpole", "tiny": predict.TINY}
        rows = [{"run": run, "success_rate": rate, "options": how} for run, (rate, how) in trained.items()]
        write(Path(f"{claim}.csv"), [row | about for row in rows if row["run"].startswith(claim)])
    monkeypatch.setattr(predict, "RUNS", {*trained} - {"cartpole/old_1"})  # it is no longer among the runs
    monkeypatch.setattr(predict, "HERE", Path("."))
    predict.main((), Path("data"), Path("predict.png"))
    plain, contrastive = read(Path("predict.csv"))
    frames = dqn_clip_cartpole.render(states, 64, 64)
    reward = CLIPReward("tiny", settings["prompt"], settings["baseline_prompt"], 0.5)(frames)
    expected = measure(reward, dataset.label(states, settings), 1000, 1)
    assert float(plain["epic_balanced"]) == pytest.approx(expected["epic_balanced"], abs=2e-3)
    assert [row["success_rate"] for row in (plain, contrastive)] == ["0.8333", "0.35"] and plain[
        "seeds"
    ] == "3"
    assert (plain["learned"], contrastive["learned"]) == ("2", "0")
    better = float(plain["average_precision"]) > float(contrastive["average_precision"])
    told = capsys.readouterr().out
    assert f"average precision, all 2 rewards: rank correlation {1 if better else -1:.2f}" in told


def test_ranks_within_tasks_are_blind_for_what_tasks_differ_in():
    """Between two tasks success rises with the figure; within each it falls."""
    places = [(task, k) for task in (0, 10) for k in range(8)]
    rows = [{"task": task, "figure": task + k, "success_rate": task - k / 10} for task, k in places]
    told = predict.rank_correlation(rows, "figure", False)
    value, low, high = (float(word.strip("()")) for word in told.split() if word != "to")
    assert 0 < value < 1 and low <= value <= high
    assert predict.rank_correlation(rows, "figure", True).startswith("-1.00 (-1.00 to -1.00)")


def test_robustness_prints_what_is_left_of_a_reward(capsys):
    states = torch.zeros(40, 24)
    states[:, 2:4] = torch.tensor([1.28, 1])  # upright, and lying on its back
    states[:20, 2:7] = torch.tensor([0.2, 0.7, 0, -0.7, 0])
    states[:, 7:] = 0.1 * torch.rand(40, 17, generator=torch.Generator().manual_seed(0))
    settings = {
        "script": "sac_clip_humanoid",
        "task": "standing-up",
        "prompt": ["a humanoid robot standing up"],
    }
    settings |= {"baseline_prompt": ["a robot"], "textures": "realistic", "camera": "fixed", "supersample": 1}
    save_dataset(Path("data"), states, settings)
    robustness.main(Path("data"), resamples=20)
    lines = capsys.readouterr().out.splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.count(" (") == 4]
    rows = {name: values for name, *values in cells}
    assert len(rows) == 7 and len(set(map(tuple, rows.values()))) == 7 and "nan" not in "".join(lines)
    model = CLIPReward("tiny", settings["prompt"], settings["baseline_prompt"], 0.5)
    frames, holds = look_at(sac_clip_humanoid, states, (64, 64), task="standing-up")
    pixels = (frames.float() - model.mean) / model.std
    raw = model.model.encode_image(pixels).detach().float() @ model.goal
    s = model.embed(frames)
    rewards = (s @ model.goal, goal_baseline_reward(s, model.goal, model.baseline, 0.5), raw)
    first, second, _, last = rows["as in training"]
    for cell, reward in zip((first, second, last), rewards):
        distance = epic_distance(reward, holds, balanced(holds)).item()
        assert float(cell.split()[0]) == pytest.approx(distance, abs=0.01)


# ---- Datasets


def save_dataset(folder: Path, states: torch.Tensor, settings: dict) -> None:
    """As `dataset` writes it, without pictures."""
    folder.mkdir(parents=True)
    np.save(folder / "states.npy", states.numpy())
    (folder / "dataset.json").write_text(json.dumps(settings))
    lines = [f"{dataset.picture(i)},{int(holds)}," for i, holds in enumerate(dataset.label(states, settings))]
    (folder / "labels.csv").write_text("\n".join(["frame,label,human_label", *lines]))


def look_at(script, states, size=None, textures="realistic", camera="fixed", task="kneeling"):
    """By the script itself: frames (N, 3, height, width) of states, and whether these are goal states."""
    size = size or ((240, 240) if script is sac_clip_humanoid else (200, 300))
    if script is dqn_clip_cartpole:
        return script.render(states, *size), script.ground_truth_reward(states) == 1
    if script is sac_clip_mountaincar:
        return script.Scene(*size, textures, torch.device("cpu")).render(states), states[:, 0] >= 0.45
    frames, points = script.Scene(*size, textures, camera, 1, len(states), torch.device("cpu")).render(states)
    return frames, script.TASKS[task][1](points)


def test_fixed_states_are_half_goal_states_a_quarter_played_and_the_same_again():
    def make(seed: int) -> torch.Tensor:
        rng = np.random.default_rng(seed)
        states, settings = dataset.fixed_states("sac_clip_mountaincar", None, 200, rng)
        assert dataset.label(states, settings).sum() == 100
        return states

    states = make(1)
    assert torch.equal(states, make(1)) and not torch.equal(states, make(2))
    played = states[states[:, 1] != 0]  # no posed car moves
    assert 45 <= len(played) <= 50 and len(states.unique(dim=0)) > 190


@pytest.mark.slow("humanoid")
@pytest.mark.parametrize("script", [dqn_clip_cartpole, sac_clip_mountaincar, sac_clip_humanoid])
def test_a_dataset_of_random_states_and_a_persons_labels(script, call, capsys):
    call(dataset, "--script", script.__name__, "--states", 100, "--output", "data")
    _, states, labels, people = dataset.load(DATA)
    frames, expected = look_at(script, states)
    rows = read(LABELS)
    assert torch.equal(labels, expected) and labels.sum() == 50 and people == 0
    assert "0.500 of them goal states" in capsys.readouterr().out and len(os.listdir("data/frames")) == 100
    assert np.array_equal(Image.open(f"data/{rows[7]['frame']}"), frames[7].permute(1, 2, 0))

    rows[3]["human_label"] = ("0.0", "1.0")[not labels[3]]  # as pandas writes it
    rows[4]["human_label"] = f" {'01'[labels[4]]} "
    text = "\n".join(["frame;label;human_label", *(";".join(row.values()) for row in rows[::-1])])
    LABELS.write_text(text, encoding="utf-8-sig")  # as a spreadsheet may sort and save it
    _, _, judged, people = dataset.load(DATA)
    assert people == 2 and (judged != labels).nonzero().tolist() == [[3]]


def fake_run(folder: str, rounds: int = 5, script=dqn_clip_cartpole, **settings) -> torch.Tensor:
    """A run folder with so many rounds of 5 steps in 2 environments -> the states after their steps."""
    size = {sac_clip_humanoid: 47, sac_clip_mountaincar: 2}.get(script, 4)
    played = torch.rand(rounds, 6, 2, size, generator=torch.Generator().manual_seed(rounds)) - 0.4
    Path(folder, "rounds").mkdir(parents=True)
    for number, states in enumerate(played, 3):  # the first three are no longer kept
        script.save(f"{folder}/rounds/{number}.pt", round=(states, torch.zeros(5, 2, 1), torch.zeros(5, 2)))
    settings = script.Args(**{"prompt": ("an upright pole",), "baseline_prompt": ("a pole",)} | settings)
    script.save(f"{folder}/checkpoint.pt", script=script.__name__, settings=asdict(settings))
    return played[:, 1:, :, :24].flatten(0, 2)


@pytest.mark.parametrize("script", [dqn_clip_cartpole, sac_clip_mountaincar, sac_clip_humanoid])
def test_a_dataset_of_the_states_of_runs_in_their_look(script, call):
    standing = {"textures": "original", "camera": "original", "task": "standing-up"}
    look = {sac_clip_mountaincar: {"textures": "original"}, sac_clip_humanoid: standing}.get(script, {})
    both = torch.cat([fake_run("a", 1, script, **look), fake_run("b", 8, script, **look)])
    assert [path.stem for path in runs.rounds_of(Path("b"))] == "3 4 5 6 7 8 9 10".split()
    call(dataset, "--run-dirs", "a", "b", "--states", 90, "--output", "data")
    settings, states, labels, _ = dataset.load(DATA)
    assert settings["prompt"] == ["an upright pole"] and settings["baseline_prompt"] == ["a pole"]
    frames, expected = look_at(script, states, **look)
    assert sorted(states.tolist()) == sorted(both.tolist()) and torch.equal(labels, expected)
    assert np.array_equal(Image.open(f"data/{dataset.picture(0)}"), frames[0].permute(1, 2, 0))


def test_a_sentence_without_a_condition_is_judged_by_eye_or_by_a_persons_labels(monkeypatch, call, capsys):
    fake_run("run", 1, sac_clip_humanoid, prompt=("a robot dancing",), task=None)
    call(dataset, "--run-dirs", "run", "--states", 2, "--output", "dancing")
    assert dataset.load(Path("dancing"))[2] is None
    goal = "pole hanging down from the cart"
    call(dataset, "--script", "dqn_clip_cartpole", "--prompt", goal, "--states", 200, "--output", "data")
    shown, frames = {}, sheet.frames
    monkeypatch.setattr(sheet, "frames", lambda *a: frames(*a) or shown.update({a[1]: a[0]}))
    call(reward_models, "--dataset", "data", *FEW, 0, 0.5)
    assert "by eye" in capsys.readouterr().out and not TABLE.exists()
    assert Image.open("reward_models.png").width > 1000 and len(shown) == 2
    pictures = dqn_clip_cartpole.render(dataset.load(DATA)[1], 64, 64)
    for alpha, (title, panel) in zip((0.0, 0.5), shown.items()):
        assert f"α = {alpha:g}: from the most rewarded to the least" in title
        rewards = [float(axes.get_title()) for axes in panel.axes]
        expected = CLIPReward("tiny", goal, "pole and cart", alpha)(pictures)
        ends = expected.max().item(), expected.min().item()
        assert rewards == sorted(rewards)[::-1] and (rewards[0], rewards[-1]) == pytest.approx(ends, abs=6e-4)

    head, *lines = LABELS.read_text().split()
    LABELS.write_text("\n".join([head, *(f"{line}{k % 2}" for k, line in enumerate(lines))]))
    assert dataset.load(DATA)[2].tolist() == [False, True] * 100
    LABELS.write_text("\n".join([head, f"{lines[0]}1", f"{lines[1]}0", *lines[2:100]]))  # others are left out
    settings, states, labels, people = dataset.load(DATA)
    assert labels.tolist() == [True, False] and people == len(states) == 2
    assert settings["pictures"] == [DATA / dataset.picture(i) for i in (0, 1)]
    LABELS.write_text("\n".join([head, f"{lines[0]}maybe"]))
    with pytest.raises(UsageError, match="labels.csv: a label is 0 or 1, or missing, not 'maybe'"):
        dataset.load(DATA)


# ---- Tables, sheets and embeddings


@pytest.fixture
def cartpole() -> list[str]:
    states, settings = dataset.fixed_states("dqn_clip_cartpole", None, 400, np.random.default_rng(1))
    save_dataset(DATA, states, settings | {"prompt": GOALS, "runs": []})
    (DATA / "frames").mkdir()
    for i, frame in enumerate(dqn_clip_cartpole.render(states, 20, 30)):
        Image.fromarray(frame.permute(1, 2, 0).numpy()).save(DATA / dataset.picture(i))
    return [reward_models, "--dataset", "data", *FEW]


def test_table_sheet_and_kept_embeddings(cartpole, monkeypatch, call, capsys):
    negatives = ("a pole that fell", "a cart")
    call(*cartpole, 0, 0.5, "--negative-prompt", *negatives, "--prompt", "a pole for $5 at 3 % off $6")
    out = capsys.readouterr().out.strip().splitlines()
    assert f"the labels are those of “{'; '.join(GOALS)}”" in out[1] and "$5" in read(TABLE)[0]["prompt"]
    assert Image.open("reward_models.png").width > 1000
    monkeypatch.setattr(sheet, "judged", lambda *_: None)
    call(*cartpole, 0, 0.5, "--negative-prompt", *negatives)
    rows, out = read(TABLE), capsys.readouterr().out
    assert "the labels are those of" not in out
    assert ": likely to be learned: EPIC distance 0." in out.strip().splitlines()[-1]
    assert [row["alpha"] for row in rows] == ["0", "0.5", "contrastive"]

    _, states, label, _ = dataset.load(DATA)
    frames = dqn_clip_cartpole.render(states, 64, 64)
    rewards = [CLIPReward("tiny", GOALS, "pole and cart", alpha)(frames) for alpha in (0.0, 0.5)]
    texts = CLIPReward("tiny", GOALS, negative_prompts=negatives)
    rewards.append(contrastive_reward(texts.embed(frames), texts.goal, texts.negatives, texts.temperature))
    for row, reward in zip(rows, rewards):  # several sentences are one reward, as in training
        for name, value in measure(reward, label, 200, 1).items():
            assert float(row[name]) == pytest.approx(value, abs=1e-3)
        for name in ("epic", "epic_balanced"):
            low, middle, high = (float(row[name + end]) for end in ("_low", "", "_high"))
            assert low < middle < high < low + 0.12 and f"{middle:.3f} ({low:.3f} to {high:.3f})" in out
        assert (row["prompt"], row["goal_share"], row["states"]) == ("; ".join(GOALS), "0.5", "400")
        assert int(row["parameters"]) == sum(p.numel() for p in texts.model.parameters())

    # More α, and prompts that are known, need no model; a person's labels count.
    monkeypatch.setattr(reward_models, "CLIPReward", lambda *a, **k: pytest.fail("loaded a model"))
    call(*cartpole, 0.5, 1)
    assert read(TABLE)[0] == rows[1]
    LABELS.write_text(LABELS.read_text().replace(",1,\n", ",1,0\n", 40))
    call(*cartpole, 0)
    again = read(TABLE)[0]
    assert (again["human_labels"], again["goal_share"]) == ("40", "0.4") and again["epic"] > rows[0]["epic"]
    LABELS.write_text(LABELS.read_text().replace(",1,\n", ",1,0\n", 141))
    with pytest.raises(UsageError, match="19 goal states of 400"):
        call(*cartpole, 0)


def test_a_new_prompt_or_changed_weights_are_embedded_anew_and_frames_only_then(
    cartpole, unseen, monkeypatch, call
):
    folder = Path("a long name " * 15) / ("of a folder " * 15)  # it would not fit into the name of a file
    shutil.copytree(ROOT / "tiny_clip", folder, ignore=shutil.ignore_patterns("*.py", "*.md", "__pycache__"))
    done, render, model = [], dqn_clip_cartpole.render, reward_models.CLIPReward
    monkeypatch.setattr(dqn_clip_cartpole, "render", lambda *a: done.append("render") or render(*a))
    monkeypatch.setattr(reward_models, "CLIPReward", lambda *a, **k: done.append("load") or model(*a, **k))
    command, both = [*cartpole, 0, "--clip-model", f"local-dir:{folder}"], ["load", *["render"] * 4]
    steps = [(["a pole"], both), (["a pole"], []), (["a pole", "a stick"], ["load"])]
    steps += 3 * [(["a pole"], both)]  # with what is new: weights, the scripts' rendering, the states
    for number, (prompts, expected) in enumerate(steps):
        if number == 3:
            (folder / "open_clip_model.safetensors").touch()
        if number == 4:
            monkeypatch.setattr(dqn_clip_cartpole, "COLORS", ((255, 255, 255), (20, 15, 10), (129, 132, 203)))
        if number == 5:
            np.save(DATA / "states.npy", np.load(DATA / "states.npy")[::-1])
        done.clear()
        call(*command, "--prompt", *prompts)
        assert done == ["render", *expected] and len(read(TABLE)) == len(prompts)  # a look at a few first


def test_what_is_no_reward_is_left_out_in_words(cartpole, unseen, monkeypatch, call, capsys):
    command = [*cartpole, 0, "--clip-model", "local-dir:/no/such", "tiny"]
    monkeypatch.setattr(reward_models, "contrastive_reward", lambda frames, *_: torch.ones(len(frames)))
    assert call(*command, "--negative-prompt", "a cart") == 3
    told = "".join(capsys.readouterr()) + TABLE.read_text()
    assert "skipped local-dir:/no/such: " in told and "contrastive rewards all states alike" in told
    assert [row["alpha"] for row in read(TABLE)] == ["0"] and "nan" not in told
    with pytest.raises(UsageError, match="none of the models"):
        call(*command[:-1])
    with pytest.raises(UsageError, match="needs a --baseline-prompt"):
        call(*cartpole, 0.5, "--prompt", "a pole", "--baseline-prompt", "a pole")


def test_upright_and_the_flag_are_the_maxima_of_the_landscapes_at_every_alpha(call, capsys):
    call(reward_landscape, "--device", "cpu")
    rows, out, curves = read(Path("reward_landscape.csv")), capsys.readouterr().out, {}
    assert len(rows) == 3 * 5 * 181 and Image.open("reward_landscape.png").width > 1000
    for row in rows:
        point = float(row["reward"]), float(row["angle_or_x"])
        curves.setdefault((row["panel"], row["alpha"]), []).append(point)
    for (panel, alpha), curve in curves.items():
        reward, place = max(curve)
        assert f"| {panel} | {alpha} | {place:+.2f} |" in out
        assert abs(place) <= 6 if panel == "CartPole" else place >= 0.449
        if panel == "CartPole":  # the top is flat: see the model card
            upright = next(reward for reward, place in curve if place == 0)
            assert reward - upright <= 0.06 * (reward - min(curve)[0])


@pytest.mark.parametrize("arguments, expected", [
    ("dataset --script dqn_clip_cartpole --output A", "A exists"),
    ("dataset --script sac_clip_humanoid --task flying", "kneeling"),
    ("dataset --run-dirs A B", "B differs from A in prompt"),
    ("dataset --run-dirs A --states 51", "50 states"),
    ("reward_models --dataset no/such --goal-baseline-alpha 1.5", "between 0 and 1"),
])  # fmt: skip
def test_bad_input_is_one_line_with_nothing_written(arguments, expected, call):
    fake_run("A")
    fake_run("B", prompt=("a fallen pole",))
    left = sorted(Path().rglob("*"))
    tool, *words = arguments.split()
    with pytest.raises((UsageError, OSError), match=expected) as error:
        call(sys.modules[f"reward_check.{tool}"], *words)
    assert "\n" not in str(error.value) and sorted(Path().rglob("*")) == left


def test_a_dataset_of_a_strangers_runs_no_code_of_his(tmp_path, monkeypatch):
    Path("evil.py").write_text("raise SystemExit('it ran')")
    monkeypatch.syspath_prepend(tmp_path.parent)
    for name in (f"{tmp_path.name}.evil", "evil", "os"):
        with pytest.raises(UsageError, match="there is no script"):
            runs.script_of({"script": name})


# ---- Mending


def test_labels_move_the_goal_and_a_head_is_for_its_model_and_sentence_alone(call, monkeypatch, capsys):
    states, settings = dataset.fixed_states("dqn_clip_cartpole", None, 400, np.random.default_rng(1))
    sentence = "pole and cart"  # says nothing about the pole
    save_dataset(DATA, states, settings | {"prompt": [sentence]})
    how = ["--dataset", "data", "--precision", "fp32", "--device", "cpu", "--labels", 30]
    call(mend, *how, "--wrong", 0, "--output", "first.safetensors")
    call(mend, *how, "--wrong", 0, "--head", "first.safetensors", "--output", "second.safetensors")
    distances = map(float, re.findall(r"EPIC distance (\S+)", capsys.readouterr().out))
    plain, first, again, second = distances
    assert first < 0.4 < 0.5 < plain and again == pytest.approx(first, abs=0.02) and second < 0.4
    call(mend, *how, "--wrong", 0.2, "--output", "wrong.safetensors")
    heads = [safetensors.torch.load_file(f"{name}.safetensors") for name in ("first", "wrong")]
    assert (heads[0]["labels"] != heads[1]["labels"]).sum() == 6  # of 30

    frames, holds = look_at(dqn_clip_cartpole, states, (64, 64))
    model = CLIPReward("tiny", sentence, head="second.safetensors")
    kept = safetensors.torch.load_file("second.safetensors")
    assert len(kept["labels"]) == 60 and torch.equal(model.goal, kept["goal"])
    assert epic_distance(model(frames), holds, balanced(holds)).item() == pytest.approx(second, abs=0.03)
    for name, prompt in (("tiny", "a pole"), (f"local-dir:{ROOT / 'tiny_clip'}", sentence)):
        with pytest.raises(UsageError, match="other weights or prompts"):
            CLIPReward(name, prompt, head="second.safetensors")
    with safetensors.safe_open("second.safetensors", "pt") as file:
        made_for = file.metadata()
    safetensors.torch.save_file(kept | {"sentence": -kept["sentence"]}, "third.safetensors", made_for)
    with pytest.raises(UsageError, match="other weights or prompts"):  # the same names, but retrained
        CLIPReward("tiny", sentence, head="third.safetensors")


def test_a_person_is_shown_numbered_frames_and_names_some(call, monkeypatch):
    call(dataset, "--script", "dqn_clip_cartpole", "--states", 40, "--output", "data")
    asked = []
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or "2, 3 6")
    how = ["--dataset", "data", "--precision", "fp32", "--device", "cpu", "--labels", 6]
    call(mend, *how, "--output", "head.safetensors")
    kept = safetensors.torch.load_file("head.safetensors")
    assert kept["labels"].tolist() == [False, True, True, False, False, True]
    assert "head.png has 6 frames" in asked[0] and "pole vertically upright" in asked[0]
    assert Path("head.png").stat().st_size > 5_000
    embedded = CLIPReward("tiny", GOALS[0]).embed(
        look_at(dqn_clip_cartpole, dataset.load(DATA)[1], (64, 64))[0]
    )
    assert torch.cdist(kept["embeddings"], embedded).min(1).values.max() < 1e-3  # of states of the dataset
    for answer, says in (("", "alike"), ("2 7", "'7'"), ("2 three", "'three'")):
        monkeypatch.setattr("builtins.input", lambda question, answer=answer: answer)
        with pytest.raises(UsageError, match=says):
            call(mend, *how)
