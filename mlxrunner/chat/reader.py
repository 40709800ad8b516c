"""The source of a chat's texts, and the one that reads standard input.

The line editor of a terminal is another one: see `mlxrunner.chat.editor`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from threading import Condition
from typing import Protocol

from mlxrunner.chat.command_table import is_continued, is_open
from mlxrunner.terminal.signals import wait_readable

PIECE = 2**16
"""Most bytes read from standard input at once."""


class DraftInterrupt(KeyboardInterrupt):
    """Ctrl-C that gives up a text which the user was typing."""


class Reader(Protocol):
    """A source of texts."""

    def read(self, idle: Callable[[TypedText], None], default: str = "") -> str:
        """Return the next text. `default` is there to be edited.

        `idle(draft)` works until the text is complete. Raise EOFError at the end of the input,
        DraftInterrupt if the user gives up what was typed, and KeyboardInterrupt at a press of
        Ctrl-C before anything was typed.
        """
        ...


class StdinReader:
    '''Reads a text from each line of standard input; lines between """ are one text.

    So are a line that ends with a backslash and the next one. Nobody edits these lines: `default`
    and `idle` are ignored.
    '''

    def __init__(self) -> None:
        self._unread = b""

    def read(self, idle: Callable[[TypedText], None], default: str = "") -> str:
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


logger = logging.getLogger("mlxrunner")

PAUSE_S = 0.15
"""Seconds without a key before the typed text is evaluated."""
SIGNAL_S = 1.0
"""Most seconds until a signal is handled that comes as a wait begins, which it does not end."""


class TypedText:
    """A text that one thread edits and another one evaluates."""

    def __init__(self, text: str = "") -> None:
        self._condition = Condition()
        self._text, self._over = text, False

    @property
    def text(self) -> str:
        """The text typed so far."""
        return self._text

    @property
    def is_over(self) -> bool:
        """True once the editing has ended."""
        return self._over

    def update(self, text: str) -> None:
        """Replace the text."""
        with self._condition:
            self._text = text
            self._condition.notify_all()

    def finish(self) -> None:
        """End the editing."""
        with self._condition:
            self._over = True
            self._condition.notify_all()

    def changes(self, text: str, seconds: float) -> bool:
        """Wait until the draft differs from `text`, or is over.

        Return False if neither happens within `seconds`.
        """
        with self._condition:
            return self._condition.wait_for(lambda: self._over or self._text != text, seconds)

    def wait_until_over(self, idle: Callable[[], object] = lambda: None) -> None:
        """Wait until the editing has ended, and call `idle` about once a second."""
        while not self._over:
            with self._condition:
                if self._condition.wait_for(lambda: self._over, SIGNAL_S):
                    return
            idle()


class TypeAhead:
    """Evaluates a draft while the user edits it."""

    def __init__(
        self,
        evaluate: Callable[[str, Callable[[], bool]], None],
        *,
        reads_draft: Callable[[], bool],
        idle: Callable[[], bool] = lambda: False,
    ) -> None:
        """Call `evaluate(text, cancelled)` to evaluate a prompt that begins with `text`.

        It calls `cancelled` between chunks, and ends once that returns True. If `reads_draft`
        returns False, only the conversation before the draft is evaluated. `idle` is called about
        once a second while nothing is to be evaluated. It returns True if it has dropped the draft.
        """
        self._evaluate, self._reads_draft, self._idle = evaluate, reads_draft, idle

    def __call__(self, draft: TypedText) -> None:
        """Work until the draft is over.

        Evaluate first what comes before the draft, and then, in each pause, the typed text.
        """
        reads_draft = self._reads_draft()
        evaluated: str | None = self._work("", draft)
        if not reads_draft:
            draft.wait_until_over(self._idle)
        while not draft.is_over:
            text = draft.text
            if draft.changes(text, SIGNAL_S if text == evaluated else PAUSE_S):
                continue
            if text != evaluated:
                evaluated = self._work(text, draft)
            elif self._idle():
                evaluated = None

    def _work(self, text: str, draft: TypedText) -> str:
        """Evaluate `text` as long as the draft begins with it.

        Return `text` if it was evaluated, or "".
        """

        def outdated() -> bool:
            return draft.is_over or not draft.text.startswith(text)

        try:
            self._evaluate(text, outdated)
        except Exception as error:  # sending the message raises it again
            logger.debug("nothing was evaluated in advance: %s", error)
        return "" if outdated() else text
