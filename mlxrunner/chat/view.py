"""Print an answer: plain text, thinking apart from it, and notes that fit the width.

This knows nothing about models.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging.handlers import MemoryHandler
from typing import Protocol

from mlxrunner.templates.messages import ThinkingSplitter
from mlxrunner.terminal.output import FilteredStream, visible

LOGGER = logging.getLogger("mlxrunner")
MOST_LINES, MOST_CHARACTERS = 10, 1000
"""Most lines and characters of a message that is recalled."""
DIM, UNDIM, ERASE_LINE = "\x1b[2m", "\x1b[22m", "\r\x1b[K"


class View(Protocol):
    """Shows an answer piece by piece."""

    def write(self, text: str) -> None: ...

    def pause(self) -> None:
        """Leave the screen to others until the next `write`.

        A drawing that is not final is removed, and the next `write` draws it again.
        """
        ...

    def close(self) -> None:
        """End the answer."""
        ...


class PlainView:
    """Writes the text as it is, then a newline."""

    def __init__(self) -> None:
        self._stream = FilteredStream()

    def write(self, text: str) -> None:
        self._stream.write(text)

    def pause(self) -> None:
        pass

    def close(self) -> None:
        self._stream.write("\n")


class ThinkingView:
    """Shows thinking dimmed, or only a note of it, and hands the rest to another view.

    Without a terminal it hands everything on as it comes, or leaves the thinking out.
    """

    def __init__(self, view: Callable[[], View], prompt: str, show: bool, terminal: bool) -> None:
        """Show the answer that continues `prompt` in the view that `view` makes.

        `show` says to show the thinking, `terminal` that there is a terminal.
        """
        self._view, self._splitter = view(), ThinkingSplitter(prompt)
        self._show, self._terminal = show, terminal
        self._stream, self._is_noted = FilteredStream(), False

    def write(self, text: str) -> None:
        if self._show and not self._terminal:
            self._view.write(text)
        else:
            self._write_pieces(self._splitter.add(text))

    def pause(self) -> None:
        self._clear_note(shown=UNDIM)
        self._view.pause()

    def close(self) -> None:
        self._write_pieces(self._splitter.finish())
        self._clear_note(shown=f"{UNDIM}\n\n")
        self._view.close()

    def _write_pieces(self, pieces: Iterator[tuple[bool, str]]) -> None:
        for is_thinking, text in pieces:
            if not is_thinking:
                self._clear_note(shown=f"{UNDIM}\n\n")
                self._view.write(text)
            elif self._terminal:
                self._write_thinking(text)

    def _write_thinking(self, text: str) -> None:
        if not self._is_noted:
            sys.stdout.write(DIM if self._show else f"{DIM}thinking ...{UNDIM}")
            text = text.lstrip("\n")
        if self._show:
            self._stream.write(text)
        sys.stdout.flush()
        self._is_noted = True

    def _clear_note(self, *, shown: str) -> None:
        """End the thinking on the screen: write `shown` after it, or erase the note of it."""
        if self._is_noted:
            sys.stdout.write(shown if self._show else ERASE_LINE)
            sys.stdout.flush()
            self._is_noted = False


def beginning(text: str, rest: str) -> str:
    """Return the first lines of `text`, and the line `rest` in the place of more."""
    first = "\n".join(text[:MOST_CHARACTERS].split("\n")[:MOST_LINES])
    return text if first == text else f"{first}\n{rest}"


def wrapped(text: str, width: int | None = None) -> str:
    """Return a note broken between words into lines of `width`, by default the terminal's.

    Text after a gap of two spaces stays a column of its own.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(width=width)
    gap = re.match(r"\s*\S+(?: \S+)*\s{2,}|\s*", text)
    indent = gap.end() if gap and gap.end() < console.width // 2 else 0
    lines = Text(visible(text[indent:])).wrap(console, console.width - indent)
    return text[:indent] + f"\n{' ' * indent}".join(line.plain.rstrip() for line in lines)


@contextmanager
def held_log() -> Iterator[None]:
    """Hold back log lines until the block ends, and then print them in order.

    Otherwise they would stand in the middle of an answer or of the line being typed.
    """
    before = LOGGER.handlers
    if not before:
        yield
        return
    held = [
        MemoryHandler(sys.maxsize, flushLevel=sys.maxsize, target=handler) for handler in before
    ]
    LOGGER.handlers = list(held)
    try:
        yield
    finally:
        LOGGER.handlers = before
        for handler in held:
            handler.close()
