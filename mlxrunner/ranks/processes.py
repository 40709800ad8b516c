"""The processes of the ranks of this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from mlxrunner.ranks.wire import RankLink
from mlxrunner.terminal.keyboard import SHOW_CURSOR, UNMARK_PASTES

PLAIN = b"\x1b[0m"
"""Ends bold, dim and coloured text."""


class Process:
    """A rank that the guard has started."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._code: int | None = None
        self.stopped: float | None = None
        """When the process was stopped, until it goes on."""

    def poll(self) -> int | None:
        """Return the exit code, or None while the process is there."""
        while self._code is None:
            flags = os.WNOHANG | os.WUNTRACED | os.WCONTINUED
            found, status = os.waitpid(self._pid, flags)
            if not found:
                break
            if os.WIFSTOPPED(status):
                self.stopped = time.monotonic()
            elif os.WIFCONTINUED(status):
                self.stopped = None
            else:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def send(self, number: int) -> None:
        """Send a signal, if the process is there."""
        if self.poll() is None:
            os.kill(self._pid, number)

    def kill(self) -> None:
        """End the process, also if it is stopped."""
        self.send(signal.SIGKILL)

    def wait(self, until: float) -> None:
        """Wait for the end of the process, which comes at `until` at the latest."""
        while self.poll() is None:
            if time.monotonic() > until:
                self.kill()
            time.sleep(0.01)


def start(rank: int, command: list[str]) -> tuple[Process, RankLink]:
    """Start `rank` with a connection that it inherits."""
    ours, theirs = socket.socketpair()
    with theirs:
        # Rank 0 has the terminal. Ctrl-C reaches no other rank: rank 0 decides.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL if rank else None,
            start_new_session=rank > 0,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "MLXRUNNER_RANK": f"{rank}:{theirs.fileno()}:{os.getpid()}"},
        )
    process.returncode = 0  # the guard itself waits for it
    return Process(process.pid), RankLink(ours)


@contextmanager
def terminal_kept() -> Iterator[None]:
    """Restore the terminal's settings afterwards: a rank that is killed can't.

    If there are others then, the rank may also have left pastes marked, text dim or the cursor
    hidden.
    """
    import termios

    try:
        before = termios.tcgetattr(0)
    except (termios.error, OSError):
        yield
        return
    try:
        yield
    finally:
        told = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        with suppress(termios.error, OSError):
            if os.tcgetpgrp(0) == os.getpgrp() and termios.tcgetattr(0) != before:
                termios.tcsetattr(0, termios.TCSANOW, before)
                if os.isatty(1):
                    os.write(1, PLAIN + UNMARK_PASTES + SHOW_CURSOR)
        signal.signal(signal.SIGTTOU, told)


def has_the_terminal() -> bool:
    """Return True if Ctrl-C reaches rank 0 as it reaches this process."""
    for stream in range(3):
        with suppress(OSError):
            return os.tcgetpgrp(stream) == os.getpgrp()
    return False


def hurry() -> None:
    """Let the guard run before the ranks that it watches, if the system allows that."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)


def inherited() -> socket.socket | None:
    """Return the connection to the guard that has started this process, or None without one.

    This process ends with its guard at once where the system can do that.
    """
    told = os.environ.pop("MLXRUNNER_RANK", None)
    if told is None:
        return None
    _, number, guard = told.split(":")
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != int(guard):
        os._exit(1)
    return socket.socket(fileno=int(number))
