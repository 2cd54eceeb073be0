"""neighbours/: losses by hand, shaping's sum, relabelling, teachers, short trainings, broken and resumed."""

import json
import math
import sys
from collections import deque
from http.server import BaseHTTPRequestHandler

import pytest
import torch

import dqn_clip_cartpole
import sac_clip_humanoid
import sac_clip_mountaincar
from clip_reward import CLIPReward, UsageError
from code_reward.client import picture
from neighbours import dqn_preference_cartpole as preference
from neighbours import sac_distractors_humanoid as distractors
from neighbours import sac_shaped_mountaincar as shaped
from reward_check import robustness

SHORT = """--clip-model tiny --device cpu --precision fp32 --num-envs 4 --episode-length 20 --total-timesteps 400
    --learning-starts 80 --batch-size 32 --gradient-steps 5 --episodes 2 --clip-batch-size 32""".split()


@pytest.fixture(autouse=True)
def as_it_was():
    threads, interval = torch.get_num_threads(), sys.getswitchinterval()
    yield
    torch.set_num_threads(threads)
    sys.setswitchinterval(interval)


# ---- Preferences


def test_the_preference_loss_is_bradley_and_terrys():
    torch.manual_seed(0)
    reward = preference.PreferenceReward(3)
    pairs, answers = torch.randn(4, 2, 3), torch.tensor([0, 1, 1, 0])
    expected = 0
    for member in reward.ensemble:
        for pair, answer in zip(pairs, answers):
            first, second = (math.exp(member(one).item()) for one in pair)
            expected -= math.log((second if answer else first) / (first + second)) / 4
    assert reward.loss(pairs, answers).item() == pytest.approx(expected, rel=1e-5)
    assert reward(pairs).shape == (4, 2) and reward(100 * pairs).abs().max() <= 1


def test_a_reward_is_learned_from_what_is_decided():
    torch.manual_seed(0)
    reward = preference.PreferenceReward(3)
    pairs = torch.randn(50, 2, 3)
    answers = (pairs[:, 1, 0] > pairs[:, 0, 0]).long()
    reward.learn()  # nothing to learn from
    reward.keep(pairs[:20], answers[:20])
    reward.learn()
    reward.keep(pairs[20:], answers[20:])
    reward.learn()
    assert torch.equal(reward.pairs, pairs) and torch.equal(reward.answers, answers)
    unseen = torch.randn(200, 3)
    assert torch.corrcoef(torch.stack([reward(unseen), unseen[:, 0]]))[0, 1] > 0.8


def test_pairs_are_states_after_steps_with_their_labels_and_rewards_are_those_of_now():
    """Of three rounds of 5 steps in 2 environments; an embedding has 3 numbers."""
    torch.manual_seed(0)
    rounds = deque((torch.rand(6, 2, 4), torch.zeros(5, 2), torch.rand(5, 2, 5)) for _ in range(3))
    known = {}
    for played, _, found in rounds:
        for state, label in zip(played[1:].flatten(0, 1), found.flatten(0, 1)):
            known[tuple(state.tolist())] = label
    states, labels = preference.draw_pairs(rounds, 300)
    seen = {tuple(state.tolist()) for state in states.reshape(-1, 4)}
    assert states.shape == (300, 2, 4) and len(seen) == len(known) == 30
    for state, label in zip(states.reshape(-1, 4), labels.reshape(-1, 5)):
        assert torch.equal(known[tuple(state.tolist())], label)

    reward = preference.PreferenceReward(3)
    rewards = preference.standardized(reward, labels)
    assert rewards.mean().abs() < 1e-5 and rewards.std(correction=0) == pytest.approx(1, abs=1e-5)
    both = torch.stack([rewards.flatten(), reward(labels[..., :3]).detach().flatten()])
    assert torch.corrcoef(both)[0, 1] == pytest.approx(1, abs=1e-4)


def test_a_teacher_compares_and_errs():
    torch.manual_seed(0)
    labels = torch.rand(4000, 2, 5)
    labels[..., -1] = torch.tensor([[1, 0], [0, 1], [1, 1], [0, 0]]).repeat(1000, 1)
    args = preference.Args()
    assert preference.compare(labels, args).view(1000, 4).unique(dim=0).tolist() == [[0, 1, -1, -1]]
    args.teacher_error = 0.3
    answers = preference.compare(labels, args).view(1000, 4)
    assert (answers[:, 2:] == -1).all()
    assert (answers[:, :2] != torch.tensor([0, 1])).float().mean().item() == pytest.approx(0.3, abs=0.03)
    args = preference.Args(teacher="clip")
    assert torch.equal(preference.compare(labels, args) == 0, labels[:, 0, 3] > labels[:, 1, 3])


def test_a_vlm_is_asked_about_both_pictures_and_about_none_twice(serve, tmp_path, monkeypatch):
    pytest.importorskip("openai")
    said = ["It is up in the first.\n1", "…\n**(2)**", "Alike.\n0", "Up by 1.5 or 10 degrees."]
    said += ["Answer: 1", "The answer is 2.", r"1. Up. 2. Down. \boxed{2}", "<answer>1</answer>", "-1"]
    said += ["I cannot tell."]
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            message = {"role": "assistant", "content": said[len(asked) - 1]}
            answer = {"choices": [{"index": 0, "finish_reason": "stop", "message": message}]}
            answer |= {"id": "1", "object": "chat.completion", "usage": {"total_tokens": 9}}
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

    monkeypatch.setenv("OPENAI_BASE_URL", serve(Handler) + "/v1")
    args = preference.Args(teacher="vlm", vlm="recorded", run_dir=str(tmp_path))
    states = torch.rand(10, 2, 4)
    for _ in range(2):
        assert preference.look(states[:9], args).tolist() == [0, 1, -1, -1, 0, 1, 1, 0, -1]
    assert len(asked) == 9 and (tmp_path / "vlm.answers.jsonl").read_text().count("\n") == 9
    assert all(question["temperature"] == 0 for question in asked)
    with pytest.raises(UsageError, match="no answer says 1, 2 or 0, but: 'I cannot tell.'"):
        preference.look(states[9:], args)
    text, *pictures = asked[0]["messages"][0]["content"]
    frames = dqn_clip_cartpole.render(states[0], 200, 300).permute(0, 2, 3, 1).numpy()
    assert args.prompt[0] in text["text"] and pictures == [picture(frame) for frame in frames]


def test_a_vlm_needs_a_name_and_a_reward_embeddings():
    for how, refused in (({"teacher": "vlm"}, "needs --vlm"), ({"clip_model": "x.py"}, "or reward program")):
        with pytest.raises(UsageError, match=refused):
            preference.Args(**how)


# ---- A success signal and a sentence


def test_the_ranking_loss_by_hand():
    better, worse = torch.tensor([0.5, 0.2, 0.0]), torch.tensor([0.1, 0.15, 0.3])
    assert shaped.ranking_loss(better, worse, 0.1).item() == pytest.approx((0 + 0.05 + 0.4) / 3)


@pytest.fixture
def labels() -> torch.Tensor:
    """Of 3 rounds of 6 steps in 4 environments, embeddings of 3 numbers; half of the episodes succeed."""
    labels = torch.rand(3, 7, 4, 5, generator=torch.Generator().manual_seed(0))
    labels[..., -1] = 0
    labels[:, 4:, :2, -1] = 1
    return labels


def test_what_shaping_adds_over_an_episode_is_the_potential_of_its_ends(labels):
    args = shaped.Args(rho=2.5, gamma=0.9)
    added = shaped.rewards_of(labels, "shaped", None, args) - shaped.rewards_of(labels, "success", None, args)
    discounts = args.gamma ** torch.arange(6)[:, None]
    potential = labels[..., -2]
    ends = args.gamma**6 * potential[:, 6] - potential[:, 0]
    torch.testing.assert_close((discounts * added).sum(1), args.rho * ends)


def test_what_each_reward_pays(labels):
    args, heads = shaped.Args(rho=0.5), shaped.Heads(torch.rand(3))
    success, opinion = labels[:, 1:, :, -1], labels[:, 1:, :, -2]
    assert torch.equal(shaped.rewards_of(labels, "success", heads, args), success)
    assert torch.equal(shaped.rewards_of(labels, "sum", heads, args), success + 0.5 * opinion)
    assert not shaped.rewards_of(labels[:, :4], "furl", heads, args).any()  # before the first success
    text = heads.sentence(heads.text)
    one = heads.image(labels[2, 3, 1, :3])
    cosine = (one @ text / one.norm() / text.norm()).item()
    paid = shaped.rewards_of(labels, "furl", heads, args)[2, 2, 1] - success[2, 2, 1]
    assert paid.item() == pytest.approx(0.5 * cosine, abs=1e-6)


def test_heads_learn_to_rank_success_above_failure(labels):
    torch.manual_seed(0)
    heads = shaped.Heads(torch.rand(3))
    before = [value.clone() for value in heads.parameters()]
    shaped.learn_heads(heads, labels[:, :, 2:], shaped.Args())  # none succeeded
    assert all(map(torch.equal, before, heads.parameters()))
    labels[:, :, :2, 0] += 1  # what success looks like
    # And how it is come by, unlike anything in failure.
    labels[:, :, :2, 1] = torch.linspace(1, -1, 7)[:, None]
    labels[:, 5:, :2, :3] = torch.nan  # beyond the flag nothing is looked at
    for _ in range(3):
        shaped.learn_heads(heads, labels, shaped.Args())
    reward = heads(labels[..., :-2]).detach()
    assert reward[:, :5, :2].mean() > reward[:, :, 2:].mean() + 0.1
    assert (reward[:, 4, :2] > reward[:, 0, :2]).all()


def test_two_policies_take_turns():
    policies = [torch.nn.Linear(1, 1) for _ in range(2)]
    says = [lambda obs: (obs, obs), lambda obs: (-obs, obs)]
    for policy, say in zip(policies, says):
        policy.forward = say
    relay = shaped.Relay(policies, 6, torch.Generator().manual_seed(0))
    means = torch.stack([relay(torch.ones(6, 1))[0][:, 0] for _ in range(200)])
    assert set(means.unique().tolist()) == {-1, 1} and len(set(means[0].tolist())) == 2
    for turn, own in zip(relay.turn.tolist(), means.T):
        changes = (own[1:] != own[:-1]).nonzero()[:, 0] + 1
        assert changes.tolist() == list(range(turn, 200, turn)) and 25 <= turn <= 100


# ---- Distractors


def test_boxes_stand_in_what_is_rewarded(call, tmp_path, monkeypatch):
    plain = sac_clip_humanoid.Scene
    monkeypatch.setattr(sac_clip_humanoid, "Scene", plain)  # put back afterwards
    monkeypatch.setattr(sac_clip_humanoid, "write_result", lambda *_: None)
    few = ["--num-envs", "2", "--episode-length", "8", "--total-timesteps", "32", "--learning-starts", "16"]
    call(distractors, *SHORT, *few, "--run-dir", tmp_path / "run")
    states, _, rewards = torch.load(tmp_path / "run/rounds/1.pt")["round"]
    args = distractors.Args(device="cpu", precision="fp32")
    for scene, same in ((robustness.Surrounded, True), (plain, False)):
        monkeypatch.setattr(sac_clip_humanoid, "Scene", scene)
        poses = states[1:, :, : sac_clip_humanoid.POSE_SIZE].flatten(0, 1)
        again = sac_clip_humanoid.Worker(args, torch.device("cpu")).label(poses)[:, 0]
        assert torch.allclose(again, rewards.flatten(), atol=1e-4) == same


# ---- Short trainings


# In the first and third, old rounds drop out; in the third, policies hand over, and the relay ends.
LONG = """--episode-length 40 --total-timesteps 800 --learning-starts 160 --buffer-size 320
    --relay-until 4""".split()
CASES = {
    "truth": (preference, dqn_clip_cartpole, ["--teacher-error", "0.2", "--buffer-size", "160"]),
    "shaped": (shaped, sac_clip_mountaincar, ["--reward", "shaped"]),
    "furl": (shaped, sac_clip_mountaincar, ["--reward", "furl", *LONG]),
    "clip": (preference, dqn_clip_cartpole, ["--teacher", "clip", "--session-every", "1"]),
    "success": (shaped, sac_clip_mountaincar, ["--reward", "success"]),
    "sum": (shaped, sac_clip_mountaincar, ["--reward", "sum", "--rho", "3"]),
}


@pytest.mark.slow("shaped", "clip", "success", "sum")
@pytest.mark.parametrize("case", CASES)
def test_a_run_taken_up_again_is_the_unbroken_one(case, call, tmp_path, monkeypatch):
    """Broken off before the checkpoint after the third round is written, when the round has been stored."""
    script, beside, options = CASES[case]
    monkeypatch.setattr(sac_clip_mountaincar, "X_GOAL", -0.45)  # so that some succeed and some fail
    for learn in (shaped.learn_heads, preference.PreferenceReward.learn):
        monkeypatch.setattr(learn, "__defaults__", (20,))  # updates: fewer, for time's sake
    paid, buffers, epsilons, written = [], [], [], []
    save, sample, rollout, rewards_of = beside.save, beside.sample, beside.rollout, shaped.rewards_of
    with monkeypatch.context() as spies:
        spies.setattr(beside, "rollout", lambda *a: epsilons.append(a[1]) or rollout(*a))
        spies.setattr(beside, "sample", lambda buffer, args: buffers.append(buffer) or sample(buffer, args))
        spies.setattr(shaped, "rewards_of", lambda *a: paid.append(a[1]) or rewards_of(*a))
        call(script, *SHORT, *options, "--run-dir", tmp_path / "whole")
    if script is shaped:
        assert {*paid} == ({"furl", "success"} if case == "furl" else {case})
    else:
        assert all(rewards.mean().abs() < 1e-4 and 0.99 < rewards.std() < 1.01 for _, _, rewards in buffers)
        assert epsilons[0] == 1 and epsilons[:5] == sorted(epsilons[:5], reverse=True) and epsilons[4] == 0.05

    def broken(path, **content):
        written.append(path)
        if sum("checkpoint" in name for name in written) == 4:
            raise KeyboardInterrupt
        save(path, **content)

    monkeypatch.setattr(beside, "save", broken)
    with pytest.raises(KeyboardInterrupt):
        call(script, *SHORT, *options, "--run-dir", tmp_path / "broken")
    monkeypatch.setattr(beside, "save", save)
    call(script, "--resume", tmp_path / "broken")
    runs = tmp_path / "whole", tmp_path / "broken"
    files = [sorted(path.name for path in (run / "rounds").iterdir()) for run in runs]
    assert files[0] == files[1] and len(files[0]) == (2 if "--buffer-size" in options else 5)
    for name in ("checkpoint.pt", *(f"rounds/{file}" for file in files[0])):
        whole, again = (torch.load(run / name, weights_only=True) for run in runs)
        for about in ("settings", "script"):
            whole.pop(about, None)
            again.pop(about, None)
        torch.testing.assert_close(whole, again, rtol=0, atol=0)
    results = [json.loads((run / "result.json").read_text()) for run in runs]
    for name in ("success_rate", "ground_truth_return", "clip_return"):
        assert results[0][name] == results[1][name]

    checkpoint = torch.load(tmp_path / "whole/checkpoint.pt", weights_only=True)
    if script is preference:
        sessions = [torch.load(path)["session"] for path in (tmp_path / "whole/sessions").iterdir()]
        assert sum(len(answers) for _, answers in sessions) > 10
        assert checkpoint["script"] == "dqn_preference_cartpole"
    states, _, labels = torch.load(tmp_path / "whole/rounds/4.pt", weights_only=True)["round"]
    states = states[len(states) - len(labels) :].flatten(0, 1)  # of preferences not the start
    labels = labels.flatten(0, 1)
    texts = checkpoint["settings"]["prompt"], checkpoint["settings"]["baseline_prompt"]
    model = CLIPReward("tiny", *texts, checkpoint["settings"]["goal_baseline_alpha"], precision="fp32")
    if script is shaped:
        frames = sac_clip_mountaincar.Scene(*model.size, "realistic", torch.device("cpu")).render(states)
    else:
        frames = dqn_clip_cartpole.render(states, *model.size)
    torch.testing.assert_close(labels[:, :-2], model.embed(frames), atol=1e-4, rtol=0)
    torch.testing.assert_close(labels[:, -2], model(frames), atol=1e-4, rtol=0)
    assert torch.equal(labels[:, -1], beside.ground_truth_reward(states))

    with pytest.raises(UsageError, match="keeps it"):
        call(script, "--resume", tmp_path / "broken", "--gamma", "0.4")
    with pytest.raises(SystemExit):  # there is no --evaluate
        call(script, "--evaluate", tmp_path / "whole/checkpoint.pt")
    path = tmp_path / "whole/rounds/4.pt"
    states, actions, labels = torch.load(path, weights_only=True)["round"]
    save(str(path), round=(states, actions, labels + 0.1))
    with pytest.raises(UsageError, match="another reward"):
        call(script, "--resume", tmp_path / "whole")
