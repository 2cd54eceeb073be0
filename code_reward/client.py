"""Asks a vision-language model behind an OpenAI-compatible endpoint, and nothing twice."""

import base64
import hashlib
import io
import json
import os
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from clip_reward import UsageError


def picture(frame: np.ndarray) -> dict:
    """A frame (H, W, 3), enlarged, as a part of a message."""
    zoom = max(1, 400 // len(frame))
    file = io.BytesIO()
    Image.fromarray(frame.repeat(zoom, axis=0).repeat(zoom, axis=1)).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def message(role: str, text: str, pictures: list[dict] = ()) -> dict:
    return {"role": role, "content": [{"type": "text", "text": text}, *pictures]}


def plain(text: str) -> str:
    """A text from outside -> one line that can be printed and written."""
    return "".join(filter(str.isprintable, " ".join(text.split())))


def write(path: Path, text: str) -> None:
    """Whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, "utf-8")
    temporary.replace(path)


class Client:
    """Questions -> answers, each asked once: those in `path` (a line of JSON each) are taken from there.

    `model` is what the endpoint calls it. That is OpenAI's, with OPENAI_API_KEY, or the one at OPENAI_BASE_URL:
    no file says where a key is sent.
    """

    def __init__(self, model: str, path: Path):
        self.model = model
        self.path = path
        self.calls = {}
        lines = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
        for line in lines:
            if line.endswith("\n"):  # or a kill has cut it off
                call = json.loads(line)
                self.calls[call["key"]] = call

    def ask(self, messages: list[dict]) -> str:
        question = {"model": self.model, "messages": messages}
        key = hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()
        if key not in self.calls:
            secret = os.environ.get("OPENAI_API_KEY") or ("none" if "OPENAI_BASE_URL" in os.environ else None)
            try:  # a retry waits for as long as a 429 says
                from openai import OpenAI

                client = OpenAI(api_key=secret, max_retries=6)
                response = client.chat.completions.create(temperature=0, **question)
                answer = response.choices[0].message.content.encode().decode()
                end = response.choices[0].finish_reason
                tokens = getattr(response.usage, "total_tokens", 0)
            except Exception as error:  # whatever the endpoint sends instead
                raise UsageError(f"no answer ({plain(repr(error))[:300]}); those before are kept") from None
            if end != "stop":
                raise UsageError(f"an answer was cut off ({end}), and is not kept: {plain(answer)[-200:]}")
            text = messages[-1]["content"][0]["text"]
            call = {"key": key, "question": text, "answer": answer, "tokens": tokens}
            self.calls[key] = call
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(call) + "\n")
            tokens = sum(call["tokens"] for call in self.calls.values())
            print(f"{len(self.calls)} answers, {tokens:,} tokens", file=sys.stderr)
        return self.calls[key]["answer"]
