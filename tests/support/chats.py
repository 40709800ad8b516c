"""A chat whose commands are typed by a test."""

from __future__ import annotations

from collections.abc import Callable

from mlxrunner.chat.start import commands

TABLE = commands()


Do = Callable[..., list[str]]
FENCED = "Look:\n```py\nx = 1\ny = 2\n```\nand so on"
