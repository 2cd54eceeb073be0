"""Captions of frames: what captions.csv lets one say of them, as sentences and as tokens.

The file has a line for each thing that can be said of a scene's frames, with a condition on what is known of
a frame. Alternatives are separated by |, and words in capitals are replaced by an alternative of the line of
that kind. Kinds: "posture" is what somebody does, "part" a detail, "measure" one with numbers (a line for
each number N), "whole" a sentence by itself, "caption" a sentence around a PHRASE of the other kinds. `words`
are for frames in which the condition holds, `otherwise` for those in which it does not. Where `unless` holds
neither is said.
"""

import csv
import re
from pathlib import Path

import numpy as np
import open_clip
import torch

import dqn_clip_cartpole as pole
import sac_clip_humanoid as humanoid
import sac_clip_mountaincar as car

with open(Path(__file__).parent / "captions.csv", newline="") as file:
    TABLE = list(csv.DictReader(file))
TOKENIZER = open_clip.SimpleTokenizer(context_length=32)

# Never in a caption: the paper's prompts (the reward has to come from understanding other wordings), and
# rewordings, to see how much depends on the words. Nothing was ever tuned for the last two of kneeling.
PROMPTS = {row["scene"]: row["words"].split("|") for row in TABLE if row["kind"] == "rewording"}
PROMPTS["cartpole"][:0] = pole.Args.prompt
PROMPTS["mountaincar"][:0] = car.Args.prompt
PROMPTS["humanoid"][:0] = [prompt for prompt, _ in humanoid.TASKS.values()]
SCRIPTS = {"cartpole": pole, "mountaincar": car, "humanoid": humanoid}
BASELINES = {scene: script.Args.baseline_prompt[0] for scene, script in SCRIPTS.items()}
HELD_OUT = {*sum(PROMPTS.values(), []), BASELINES["cartpole"], BASELINES["mountaincar"]}

# Of what is said first, and second: postures that a frame shows, others that it lacks, parts, measures.
# For the car of each line by itself, as that the flag is far shows the way to it.
CHANCES = (0.55, 0.15, 0.15, 0.15), (0.1, 0.1, 0.45, 0.35)
CAR_CHANCES = (1, 1, 0, 0.25), (1, 1, 0, 0.25)
SECOND = 0.4  # how many captions say a second thing
STREWN = 0.3  # how many have words of no meaning strewn in


class Captions:
    """What may be said of a scene's frames: its lines of captions.csv."""

    def __init__(self, scene: str):
        rows = [row for row in TABLE if row["scene"] == scene and row["kind"] != "rewording"]
        self.alternatives = {row["kind"]: row["words"].split("|") for row in rows if not row["condition"]}
        lines = [(row, number) for row in rows if row["condition"] for number in row["N"].split() or [""]]
        self.lines = [{k: re.sub(r"\bN\b", number, text) for k, text in row.items()} for row, number in lines]
        self.words = [(line["otherwise"], line["words"], "") for line in self.lines]  # by fact
        self.can_say = np.array([[len(text) > 0 for text in texts] for texts in self.words])  # (F, 3)
        self.kinds = np.array([line["kind"] for line in self.lines])
        self.by_line = scene == "mountaincar"
        self.rarity = None  # of each line: of what the first frames show

    def judge(self, known: dict[str, np.ndarray]) -> np.ndarray:
        """Knowledge, name -> (n,) -> facts (n, F): 2 if a line's `unless` holds, 1 if its condition does."""
        facts = []
        for line in self.lines:
            fact = np.where(eval(line["unless"] or "False", {}, known), 2, eval(line["condition"], {}, known))
            facts.append(np.broadcast_to(fact, len(next(iter(known.values())))))
        facts = np.stack(facts, axis=1)
        if self.rarity is None:
            self.rarity = (facts == 1).mean(0).clip(1e-3) ** -0.5
        return facts

    def describe(self, facts: np.ndarray, rng: np.random.Generator) -> tuple[str, list[int]]:
        """Facts of a frame (F,) -> a caption, and which lines it speaks of."""
        can_say = self.can_say[np.arange(len(facts)), facts]
        kinds = np.where((self.kinds == "posture") & (facts == 0), "no posture", self.kinds)
        names = "posture", "no posture", "part", "measure", "whole"
        *groups, wholes = (np.flatnonzero(can_say & (kinds == name)) for name in names)

        def pick(alternatives: list[str]) -> str:
            return alternatives[rng.integers(len(alternatives))]

        def say(k: int) -> str:
            return pick(self.words[k][facts[k]].split("|"))

        def choose(chances: tuple[float, ...]) -> int:
            weights = [len(group) if self.by_line else len(group) > 0 for group in groups]
            weights = np.multiply(chances, weights)
            k = rng.choice(len(groups), p=weights / weights.sum())
            if k > 0:
                return int(rng.choice(groups[k]))
            rarity = self.rarity[groups[0]]  # the rarer a posture, the more it is worth telling
            return int(rng.choice(groups[0], p=rarity / rarity.sum()))

        while True:
            if rng.random() < 0.1:
                said = [int(rng.choice(wholes))]
                text = say(said[0])
            else:
                first, second = CAR_CHANCES if self.by_line else CHANCES
                said = [choose(first)]
                if rng.random() < SECOND:
                    said = list(dict.fromkeys([*said, choose(second)]))
                phrases = pick([", ", " and ", ", "]).join(say(k) for k in said)
                text = pick(self.alternatives["caption"]).replace("PHRASE", phrases)
            while found := re.search("[A-Z]{2,}", text):
                text = text[: found.start()] + pick(self.alternatives[found[0]]) + text[found.end() :]
            text = re.sub(r" is (with|that|after|without)\b", r" \1", text).replace(" ,", ",")
            text = " ".join(text.split())
            # The humanoid's baseline is held out as a whole only: every other caption may say what it does.
            if text != BASELINES["humanoid"] and not any(sentence in text for sentence in HELD_OUT):
                return text, said


def is_true(facts: torch.Tensor, mentioned: torch.Tensor) -> torch.Tensor:
    """Facts of frames and which their captions mention (n, F) -> does caption i hold for frame j? (n, n)."""
    facts, mentioned = facts.float(), mentioned.float()
    # Sum over the mentioned facts of (fact of i - fact of j)², multiplied out: exact, of small numbers.
    mine = mentioned * facts
    return (mine * facts).sum(1, keepdim=True) - 2 * mine @ facts.T + mentioned @ facts.square().T == 0


def tokenize(captions: list[str], rng: np.random.Generator) -> torch.Tensor:
    """Captions -> tokens (N, 32), in some of them random ones strewn in: other words shall mean nothing."""
    tokens = torch.zeros(len(captions), TOKENIZER.context_length, dtype=torch.long)
    for row, caption in zip(tokens, captions):
        ids = TOKENIZER.encode(caption)[: len(row) - 2]  # hardly any is longer
        while rng.random() < STREWN and len(ids) < len(row) - 2:
            ids.insert(rng.integers(len(ids) + 1), int(rng.integers(TOKENIZER.sot_token_id)))
        row[: len(ids) + 2] = torch.tensor([TOKENIZER.sot_token_id, *ids, TOKENIZER.eot_token_id])
    return tokens
