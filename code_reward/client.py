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
    """Questions -> answers, each asked once: `path` (JSON) keeps questions, answers and tokens.

    `model` is what the endpoint calls it; without a `base_url` it is OpenAI's, with OPENAI_API_KEY.
    """

    def __init__(self, model: str, base_url: str | None, path: Path):
        self.model = model
        self.base_url = base_url
        self.path = path
        self.calls = json.loads(path.read_text()) if path.exists() else {}

    def ask(self, messages: list[dict]) -> str:
        question = {"model": self.model, "messages": messages}
        key = hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()
        if key not in self.calls:
            secret = os.environ.get("OPENAI_API_KEY") or ("none" if self.base_url else None)
            try:  # a retry waits for as long as a 429 says
                from openai import OpenAI

                client = OpenAI(base_url=self.base_url, api_key=secret, max_retries=6)
                response = client.chat.completions.create(**question)
                answer = response.choices[0].message.content.encode().decode()
                tokens = getattr(response.usage, "total_tokens", 0)
            except Exception as error:  # whatever the endpoint sends instead
                raise UsageError(f"no answer ({plain(repr(error))[:300]}); those before are kept") from None
            text = messages[-1]["content"][0]["text"]
            self.calls[key] = {"question": text, "answer": answer, "tokens": tokens}
            write(self.path, json.dumps(self.calls, indent=1))
            tokens = sum(call["tokens"] for call in self.calls.values())
            print(f"{len(self.calls)} answers, {tokens:,} tokens", file=sys.stderr)
        return self.calls[key]["answer"]
