"""Chats whose lines are typed by a test."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import Result

from mlxrunner.chat.start import commands
from mlxrunner.sessions.store import TEXT

TABLE = commands()
Do = Callable[..., list[str]]
"""Types texts into a chat, and returns the lines that came."""
Talk = Callable[..., Result]
"""Runs a chat in a pipe, with the lines and options that it is given."""
FENCED = "Look:\n```py\nx = 1\ny = 2\n```\nand so on"
HIT = "last turn  hit (restored: session zor): 58 prompt tokens, 38 matched"


def content(data: Path, name: str) -> Any:
    return json.loads((data / "sessions" / name / TEXT).read_text())
