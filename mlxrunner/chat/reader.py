"""The source of a chat's texts, and the one that reads standard input.

The line editor of a terminal is another one: see `mlxrunner.chat.editor`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Protocol

from mlxrunner.chat.commands.table import is_continued, is_open
from mlxrunner.chat.typeahead import Draft
from mlxrunner.terminal.signals import wait_readable

PIECE = 2**16
"""Most bytes read from standard input at once."""


class Reader(Protocol):
    """A source of texts."""

    def read(self, idle: Callable[[Draft], None], default: str = "") -> str:
        """Return the next text. `default` is there to be edited.

        `idle(draft)` works until the text is complete. Raise EOFError at the end of the input, and
        KeyboardInterrupt if the user gives the text up.
        """
        ...


class StdinReader:
    '''Reads a text from each line of standard input; lines between """ are one text.

    So are a line that ends with a backslash and the next one. Nobody edits these lines: `default`
    and `idle` are ignored.
    '''

    def __init__(self) -> None:
        self._unread = b""

    def read(self, idle: Callable[[Draft], None], default: str = "") -> str:
        text = self._line()
        if not text:
            raise EOFError
        while is_open(text) and (line := self._line()):
            text += line
        while is_continued(text.rstrip("\n")):
            text = text.rstrip("\n")[:-1] + "\n"
            if not (line := self._line()):
                break
            text += line
        return text.rstrip("\n")

    def _line(self) -> str:
        """Return the next line with its end, or "" after the last one.

        Ctrl-C ends the wait for it at any time.
        """
        try:
            descriptor = sys.stdin.fileno()
        except (OSError, ValueError):  # a program may have replaced sys.stdin
            return sys.stdin.readline()
        while b"\n" not in self._unread:
            wait_readable(descriptor)
            piece = os.read(descriptor, PIECE)
            if not piece:
                break
            self._unread += piece
        line, end, self._unread = self._unread.partition(b"\n")
        text = (line + end).decode(sys.stdin.encoding or "utf-8", sys.stdin.errors or "strict")
        return text.replace("\r\n", "\n")
