"""A terminal for a program: pexpect gives it a pseudo-terminal, pyte draws its screen."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pexpect
import pyte
from ptyprocess import PtyProcess
from support.waiting import PATIENCE_S


class Screen:
    """Runs `arguments` of the program, or a script, on a screen with scrollback."""

    def __init__(
        self,
        arguments: list[str],
        env: dict[str, str],
        size: tuple[int, int],
        folder: str | None = None,
        spawn: Callable[..., pexpect.spawn] = pexpect.spawn,
    ) -> None:
        self._screen = pyte.HistoryScreen(*size, history=20_000, ratio=1)
        self._stream = pyte.Stream(self._screen)
        # Nobody answers its question for the cursor.
        environment = {**os.environ, "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", **env}
        self.raw = ""
        self.child = spawn(
            sys.executable,
            arguments,
            encoding="utf-8",
            dimensions=(size[1], size[0]),
            env=environment,
            timeout=PATIENCE_S,
            cwd=folder,
        )
        self.child.delaybeforesend = None

    def read(self, seconds: float = 0.0) -> bool:
        """Read what the program wrote by now; return True if there was anything."""
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
        end = time.monotonic() + PATIENCE_S
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

    def idle(self) -> Screen:
        """Until no thread of the program ran or wanted to in several looks, where Linux says so.

        It has then evaluated what precedes the next text.
        """
        tasks, looks = Path(f"/proc/{self.child.pid}/task"), 0

        def rests() -> bool:
            nonlocal looks
            with suppress(OSError):  # a thread may end meanwhile
                states = {one.read_text().rpartition(")")[2][1] for one in tasks.glob("*/stat")}
                looks = 0 if "R" in states else looks + 1
            return looks > 5

        return self.until(rests)

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
        """Press Ctrl-D; return the exit code."""
        self.child.sendeof()
        return self.end()

    def end(self) -> int:
        """Wait until the program has ended by itself; return its exit code, or minus a signal."""
        self.child.expect(pexpect.EOF)
        self.raw += self.child.before
        self.child.wait()
        code, number = self.child.exitstatus, self.child.signalstatus
        self.child.close()
        return int(-number if code is None else code)

    def kill(self) -> None:
        """End the program if it still runs."""
        end(self.child.ptyproc)


def end(terminal: PtyProcess) -> None:
    """Kill what runs in a terminal, and wait for its end however busy the machine is."""
    if not terminal.terminated:
        with suppress(ProcessLookupError):  # a fork that has ended is waited for elsewhere
            os.kill(terminal.pid, signal.SIGKILL)
        terminal.wait()
    if not terminal.closed:
        terminal.close()
