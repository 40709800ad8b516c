"""Pictures of chats in tests, and the answers of a model that has kept nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mlxrunner import Runner
from mlxrunner.chat.pictures import NAME, Album


def draw(file: Path, seed: int) -> Path:
    """Write a picture of noise, and return its path."""
    noise = np.random.default_rng(seed).integers(0, 255, (20 + seed, 30, 3), np.uint8)
    Image.fromarray(noise).save(file)
    return file


def cold_answer(runner: Runner, album: Album, messages: list[Any]) -> str:
    """Return the answer of an empty runner to messages whose pictures are named in their texts."""
    asked = []
    for message in messages:
        parts = re.split(f"{NAME.pattern}\n?", message["content"])
        shown = [*album.named(message["content"]), None]
        content = list[dict[str, Any]]()
        for text, name in zip(parts, shown, strict=True):
            content += [{"type": "text", "text": text}] if text else []
            content += [{"type": "image", "image": album._pixels[name]}] if name else []
        is_user = message["role"] == "user"
        asked.append({**message, "content": content if is_user else message["content"]})
    runner.reset()
    return runner.complete(asked, max_tokens=8, temperature=0.0).text
