"""A user of the chat who types given texts."""

from __future__ import annotations

from typing import Any


class Typist:
    """Types what it is given; `seen`: what was there to be edited."""

    def __init__(self, texts: list[str]) -> None:
        self.texts, self.seen = texts, [""]

    def read(self, idle: Any, default: str = "") -> str:
        self.seen.append(default)
        if not self.texts:
            raise EOFError
        return self.texts.pop(0)
