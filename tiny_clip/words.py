"""What must be said where `tiny` is used, and which words mean something to it."""

import csv
import re
import sys
from collections.abc import Iterable
from pathlib import Path


def caution(args) -> str:
    """Settings of a script -> a line about the model and, where there are any, one with unknown words."""
    caution = "tiny knows only the scenes of this project: no evidence of zero-shot ability"
    script = sys.modules[type(args).__module__].__file__
    unknown = never_read(args.prompt + args.baseline_prompt + args.negative_prompt, script)
    if unknown:
        caution += f"\ntiny has never read these words, which mean nothing to it: {', '.join(unknown)}"
    return caution


def never_read(texts: Iterable[str], script: str) -> list[str]:
    """-> the words of these texts in no caption of the scene that the script is named after, or of any."""
    with open(Path(__file__).parent / "captions.csv", encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["kind"] != "rewording"]
    own = [row for row in rows if row["scene"] in Path(script).stem]
    captions = [f"{row['words']} {row['otherwise']} {row['N']}" for row in own or rows]
    read = re.findall(r"\b(?![A-Z]{2})\w+", " ".join(captions))  # capitals stand for other words
    asked = re.findall(r"\w+", " ".join(texts).lower())
    return sorted({*asked} - {word.lower() for word in read})
