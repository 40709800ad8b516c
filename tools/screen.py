"""A terminal for a program that wants one: pexpect gives it a pseudo-terminal, pyte is the screen that a person would see."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import pexpect
import pyte

SECONDS = 60


class Screen:
    """Runs `arguments` of the program, or a script, on a screen with scrollback."""

    def __init__(self, arguments: list[str], env: dict[str, str], size: tuple[int, int]) -> None:
        self._screen = pyte.HistoryScreen(*size, history=20_000, ratio=1)
        self._stream = pyte.Stream(self._screen)
        # Nobody answers its question for the cursor.
        environment = {**os.environ, "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", **env}
        self.raw = ""
        self.child = pexpect.spawn(
            sys.executable,
            arguments,
            encoding="utf-8",
            dimensions=(size[1], size[0]),
            env=environment,
            timeout=SECONDS,
        )
        self.child.delaybeforesend = None

    def read(self, seconds: float = 0.0) -> bool:
        """What the program wrote by now; whether there was anything."""
        try:
            text = self.child.read_nonblocking(65536, timeout=seconds)
        except pexpect.TIMEOUT:
            return False
        self.raw += text
        self._stream.feed(text)
        return True

    def until(self, holds: Callable[[], bool] | str) -> Screen:
        """Until a text is on the screen or a condition holds."""
        condition = holds if callable(holds) else lambda: holds in self.shown
        end = time.monotonic() + SECONDS
        while not condition():
            if time.monotonic() > end:
                raise AssertionError(f"waited in vain for {holds!r}; the screen is\n{self.shown}")
            try:
                self.read(0.2)
            except pexpect.EOF as error:
                raise AssertionError(f"the program ended; the screen is\n{self.shown}") from error
        return self

    def prompt(self) -> Screen:
        """Until a new, empty prompt is the last line."""
        return self.until(lambda: self.lines[-1:] == [">>>"])

    def say(self, text: str) -> str:
        """Type a line, Enter; returns the lines between it and the next prompt."""
        self.prompt()
        before = len(self.everything)
        self.child.send(text + "\r")
        self.until(lambda: len(self.everything) > before and self.lines[-1:] == [">>>"])
        return "\n".join(self.everything[before:-1])

    @property
    def lines(self) -> list[str]:
        """The screen, without what is empty below."""
        return "\n".join(line.rstrip() for line in self._screen.display).rstrip().split("\n")

    @property
    def shown(self) -> str:
        return "\n".join(self.lines)

    @property
    def everything(self) -> list[str]:
        """The screen and what was scrolled out of it."""
        gone = [
            "".join(line[x].data for x in range(self._screen.columns)).rstrip()
            for line in self._screen.history.top
        ]
        return [*gone, *self.lines]

    def resize(self, columns: int, lines: int) -> None:
        self.child.setwinsize(lines, columns)
        self._screen.resize(lines, columns)

    def leave(self) -> int:
        """Ctrl-D; the exit code."""
        self.child.sendeof()
        self.child.expect(pexpect.EOF)
        self.raw += self.child.before
        self.child.close()
        return int(
            self.child.exitstatus if self.child.exitstatus is not None else -self.child.signalstatus
        )
