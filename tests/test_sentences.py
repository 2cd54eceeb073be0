"""neighbours/sac_sentences_humanoid.py: rewards by each sentence, relabelling, a sentence that changes, a run."""

import json

import pytest
import torch

import sac_clip_humanoid
from clip_reward import UsageError
from neighbours import sac_sentences_humanoid as script
from results import sentences, tables
from sac_clip_humanoid import TASKS

CPU = torch.device("cpu")
PROMPTS = ("a humanoid robot kneeling", "a humanoid robot standing up", "the robot waves")


def settings(**how) -> script.Args:
    return script.Args(prompt=PROMPTS, device="cpu", precision="fp32", **how)


def test_the_rewards_of_several_sentences_are_each_ones_own():
    torch.manual_seed(0)
    poses = torch.zeros(6, 24)
    poses[:, 2:4] = torch.tensor([1.3, 1.0])  # height and quaternion
    poses[:, 7:] = 0.5 * torch.randn(6, 17)
    labels = script.Worker(settings(), CPU).label(poses)
    assert labels.shape == (6, 3 + len(TASKS))
    for k, prompt in enumerate(PROMPTS):
        own = sac_clip_humanoid.Args(prompt=(prompt,), task="standing-up", device="cpu", precision="fp32")
        single = sac_clip_humanoid.Worker(own, CPU).label(poses)
        torch.testing.assert_close(labels[:, k], single[:, 0])
        assert torch.equal(labels[:, 3 + list(TASKS).index("standing-up")], single[:, 1])
    worker = script.Worker(settings(contrastive=True, threshold=0.4), CPU)
    likely = (labels[:, :3] / worker.reward_model.temperature).softmax(1) > 0.4
    assert torch.equal(worker.label(poses)[:, :3], likely.float())


@pytest.mark.parametrize("relabel", [0, 0.5, 1])
def test_a_batch_has_the_sentences_and_their_standardized_rewards(relabel):
    """Reward by sentence k after step t of robot n in round i: (k + 1) (10 i + t + n / 10)."""
    how = {
        "episode_length": 6,
        "num_envs": 4,
        "total_timesteps": 72,
        "change": 1.0,
        "n_step": 2,
        "gamma": 0.5,
    }
    args = settings(relabel=relabel, batch_size=4000, **how)
    goals = torch.eye(3)
    norm = sac_clip_humanoid.Normalize(3)
    norm.var.fill_(100.0**2)  # it cuts what is above 10
    rb = script.ReplayBuffer(norm, goals, args)
    base = torch.arange(6.0)[:, None] + torch.arange(4) / 10
    for i in range(3):
        rewards = (10 * i + base)[..., None] * torch.arange(1, 4)
        states = torch.zeros(7, 4, 5)
        states[..., 2] = torch.cat([10 * i + base, 10 * i + base[-1:] + 1])  # told by what is seen
        actions = states[:-1, :, 2:3].expand(6, 4, 17)
        rb.add(states, torch.cat([actions, script.plan(i, 3, args)[..., None]], dim=2), rewards)
    obs, next_obs, actions, returns, discount = rb.sample(args)
    own_goal = torch.arange(4000) >= round(4000 * relabel)
    assert torch.equal(obs[:, 1:], next_obs[:, 1:])  # the same sentence
    seen = 100 * obs[:, 0]
    torch.testing.assert_close(100 * next_obs[:, 0], seen + 2, rtol=0, atol=1e-3)
    torch.testing.assert_close(actions[:, 0], seen, rtol=0, atol=1e-3)
    assert discount == 0.25
    every = torch.stack([10 * i + base for i in range(3)])
    own = (seen - every.mean()) / every.std(correction=0)  # (k + 1) falls out
    after = own + 1 / every.std(correction=0)
    torch.testing.assert_close(returns, own + 0.5 * after, rtol=1e-4, atol=1e-4)
    goal = obs[:, 3:].argmax(1)
    assert torch.equal(obs[:, 3:], goals[goal])
    code = (10 * seen).round().long()
    plans = torch.stack([script.plan(k, 3, args) for k in range(3)])
    pursued = plans[code // 100, code % 100 // 10, code % 10]
    assert torch.equal(pursued[own_goal], goal[own_goal])
    changed = (pursued != goal).float().mean().item()
    assert changed == pytest.approx(relabel * 2 / 3, abs=0.04)


def test_a_sentence_changes_half_way_in_a_share_of_the_episodes():
    args = settings(num_envs=12, episode_length=10, change=0.5)
    plans = torch.stack([script.plan(k, 3, args) for k in range(200)])
    assert torch.equal(plans[7], script.plan(7, 3, args))
    first, second = plans[:, :5], plans[:, 5:]
    assert (first == first[:, :1]).all() and (second == second[:, :1]).all()
    assert torch.equal(plans[:, 0].flatten().bincount(), torch.full((3,), 800))  # evenly
    assert (first[:, 0] != second[:, 0]).float().mean().item() == pytest.approx(0.5 * 2 / 3, abs=0.03)


def test_the_policy_sees_at_each_step_the_sentence_of_then():
    goals = torch.randn(3, 4)
    pursued = torch.tensor([[0, 1], [2, 1]])
    norm = sac_clip_humanoid.Normalize(2)
    norm.update(torch.tensor([[0.0, 2], [2, 2]]))
    policy = script.Told(torch.nn.ModuleList([norm, torch.nn.Identity()]), goals, pursued)
    for step in range(2):
        seen = policy(torch.tensor([[2.0, 2], [0, 2]]))
        expected = torch.cat([torch.tensor([[1.0, 0], [-1, 0]]), goals[pursued[step]]], 1)
        torch.testing.assert_close(seen, expected)


SHORT = """--device cpu --precision fp32 --num-envs 6 --episode-length 16 --total-timesteps 384 --batch-size 32
    --learning-starts 96 --gradient-steps 4 --evaluate-every 192 --episodes 2""".split()


def test_a_run_taken_up_again_is_the_unbroken_one_and_obeys_a_sentence_that_it_never_read(
    call, tmp_path, monkeypatch
):
    given = [*SHORT, "--prompt", *PROMPTS[:2]]
    call(script, *given, "--run-dir", tmp_path / "unbroken")
    rollout, calls = sac_clip_humanoid.rollout, []

    def interrupted(*words):
        calls.append(words)
        if len(calls) == 4:  # round 2, after an evaluation
            raise KeyboardInterrupt
        return rollout(*words)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(sac_clip_humanoid, "rollout", interrupted)
        call(script, *given, "--run-dir", tmp_path / "broken")
    call(script, "--resume", tmp_path / "broken")
    one, other = (
        torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)["sac"]
        for name in ("unbroken", "broken")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("unbroken", "broken")]
    assert results[0]["sentences"] == results[1]["sentences"]
    assert (tmp_path / "broken/result.mp4").stat().st_size > 500
    words = ["--prompt", "the robot has knelt down", "--task", "kneeling"]
    call(script, "--evaluate", tmp_path / "broken/best.pt", *words)
    told = json.loads((tmp_path / "broken/best_evaluation.json").read_text())
    assert told["success"] == {words[1]: told["sentences"][words[1]]["kneeling"]}

    monkeypatch.setattr(sentences, "HERE", tmp_path)
    sentences.main((tmp_path / "broken",))
    rows = tables.read(tmp_path / "sentences.csv")
    assert [row["told"] for row in rows] == [*PROMPTS[:2], words[1]]
    assert [float(row["success"]) for row in rows[:2]] == [*results[1]["success"].values()]
    assert [row["in_training"] for row in rows] == ["True", "True", "False"]

    kept = torch.load(tmp_path / "broken/best.pt", weights_only=True)
    torch.save(kept | {"goals": -kept["goals"]}, tmp_path / "other.pt")
    with pytest.raises(UsageError, match="another model's embeddings"):
        call(script, "--evaluate", tmp_path / "other.pt", *words)
    *played, rewards = torch.load(tmp_path / "broken/rounds/0.pt")["round"]
    torch.save({"round": (*played, -rewards)}, tmp_path / "broken/rounds/0.pt")
    with pytest.raises(UsageError, match="another reward"):
        call(script, "--resume", tmp_path / "broken")


@pytest.mark.parametrize(
    "words, says",
    [
        (["--prompt", "a", "robot", "kneeling"], "quotes"),
        (["--negative-prompt", "a robot lying"], "contrastive"),
    ],
)
def test_what_would_have_no_effect_is_refused(words, says, call, tmp_path):
    with pytest.raises(UsageError, match=says):
        call(script, *SHORT, *words, "--run-dir", tmp_path / "run")
