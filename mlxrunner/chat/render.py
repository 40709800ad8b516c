"""Where an answer goes: plain text, thinking apart from it; and notes that fit the width. Knows nothing about models."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import Protocol

from mlxrunner.chat.thinking import Thinking
from mlxrunner.terminal import Output, visible

DIM, UNDIM, ERASE_LINE = "\x1b[2m", "\x1b[22m", "\r\x1b[K"


class View(Protocol):
    """Takes an answer piece by piece."""

    def write(self, text: str) -> None: ...

    def pause(self) -> None:
        """Leave the screen to others for a while: what is not on it for good is taken away, and drawn again by the next `write`."""
        ...

    def close(self) -> None:
        """The answer has ended."""
        ...


class Plain:
    """The text itself, then a newline."""

    def __init__(self) -> None:
        self._output = Output()

    def write(self, text: str) -> None:
        self._output.write(text)

    def pause(self) -> None:
        pass

    def close(self) -> None:
        self._output.write("\n")


class ThinkingApart:
    """Shows thinking dimmed, or that there is some, and hands the rest to a view. Not in a terminal: everything as it comes."""

    def __init__(self, view: Callable[[], View], prompt: str, show: bool, terminal: bool) -> None:
        self._view, self._thinking = view(), Thinking(prompt)
        self._show, self._terminal = show, terminal
        self._output, self._noted = Output(), False

    def write(self, text: str) -> None:
        if self._show and not self._terminal:
            self._view.write(text)
        else:
            self._pieces(self._thinking.add(text))

    def pause(self) -> None:
        if self._noted:
            sys.stdout.write(UNDIM if self._show else ERASE_LINE)
            sys.stdout.flush()
            self._noted = False
        self._view.pause()

    def close(self) -> None:
        self._pieces(self._thinking.finish())
        self._end_of_thinking()
        self._view.close()

    def _pieces(self, pieces: Iterator[tuple[bool, str]]) -> None:
        for is_thinking, text in pieces:
            if not is_thinking:
                self._end_of_thinking()
                self._view.write(text)
            elif self._terminal:
                self._think(text)

    def _think(self, text: str) -> None:
        if not self._noted:
            sys.stdout.write(DIM if self._show else f"{DIM}thinking ...{UNDIM}")
            text = text.lstrip("\n")
        if self._show:
            self._output.write(text)
        sys.stdout.flush()
        self._noted = True

    def _end_of_thinking(self) -> None:
        if self._noted:
            sys.stdout.write(f"{UNDIM}\n\n" if self._show else ERASE_LINE)
            sys.stdout.flush()
            self._noted = False


def wrapped(text: str, width: int | None = None) -> str:
    """A note in lines of a terminal's width, broken between words; what follows a gap of two spaces stays a column of its own."""
    from rich.console import Console
    from rich.text import Text

    console = Console(width=width)
    gap = re.match(r"\s*\S+(?: \S+)*\s{2,}|\s*", text)
    indent = gap.end() if gap and gap.end() < console.width // 2 else 0
    lines = Text(visible(text[indent:])).wrap(console, console.width - indent)
    return text[:indent] + f"\n{' ' * indent}".join(line.plain.rstrip() for line in lines)
