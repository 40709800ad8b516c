"""The terminal while no line is edited: what is typed waits, unseen, for the next line, and Ctrl-Z stops the program until `fg`."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

MARK_PASTES, UNMARK_PASTES = b"\x1b[?2004h", b"\x1b[?2004l"
SHOW_CURSOR = b"\x1b[?25h"
MOST_TYPED = 2**16
STOPPED_S = 1.0
"""Seconds to wait for the system to stop the program, which it does not do where nobody could continue it."""
COOKED = bytes.maketrans(b"\n\0", b"\r\x04")
"""Enter and Ctrl-D, as a terminal that edits lines itself gives them, and as they are typed."""


class Keyboard:
    """Within it, what is typed does not get into what is printed: it is there, as it was typed, for the next line.

    Also what is pasted, which the terminal marks as such. Afterwards, and while the program is stopped, the terminal is as it was.
    Nothing happens without a `terminal`. May be nested. For the main thread.
    """

    def __init__(self, terminal: bool = False) -> None:
        self._terminal = terminal
        self._depth = self._cooked = 0
        self._holds = self._is_asked = self._is_lent = False
        self._continued = threading.Event()

    def __enter__(self) -> Keyboard:
        self._depth += 1
        if self._terminal and self._depth == 1:
            self._begin()
        return self

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._terminal and self._depth == 0:
            signal.signal(signal.SIGTSTP, self._on_stop)
            signal.signal(signal.SIGCONT, self._on_continue)
            self._release()

    def typed_before(self) -> str:
        """Return the text typed while the program started, as a line editor would have got it; empty the second time."""
        cooked, self._cooked = self._cooked, 0
        if not cooked or not (waiting := _waiting()):
            return ""
        typed = os.read(sys.stdin.fileno(), min(waiting, MOST_TYPED))
        return (typed[:cooked].translate(COOKED) + typed[cooked:]).decode(errors="surrogateescape")

    @contextmanager
    def editing(self) -> Iterator[None]:
        """Meanwhile a line editor has the terminal, which gives it back and takes it again around `stop_group`."""
        if not self._terminal:
            yield
            return
        before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        self._is_lent = True
        try:
            yield
        finally:
            self._is_lent = False
            signal.signal(signal.SIGTSTP, before)

    def stop_group(self) -> None:
        """Stop this program, and those that were started with it, as a terminal does at Ctrl-Z, while `editing`; from any thread."""
        with suppress(OSError):
            os.write(sys.stdout.fileno(), UNMARK_PASTES)
        self._continued.clear()
        os.kill(0, signal.SIGTSTP)  # which another thread may be the first to see
        self._continued.wait(STOPPED_S)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Meanwhile Ctrl-Z only asks to stop: see `asks_to_stop`."""
        self._holds = True
        try:
            yield
        finally:
            self._holds = False
            if self._is_asked:
                self.stop()

    @property
    def asks_to_stop(self) -> bool:
        """True if Ctrl-Z was pressed: whoever draws clears the drawing and calls `stop`."""
        return self._is_asked

    def stop(self) -> None:
        """Stop until somebody continues the program, with the terminal as it was before."""
        self._is_asked = False
        self._release()
        before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.pthread_kill(
            threading.get_ident(), signal.SIGTSTP
        )  # this thread, so that it does not go on before it stops
        signal.signal(signal.SIGTSTP, before)
        self._take()

    def _begin(self) -> None:
        import termios

        self._before = termios.tcgetattr(sys.stdin.fileno())
        self._quiet = termios.tcgetattr(sys.stdin.fileno())
        self._quiet[0] &= ~termios.ICRNL
        self._quiet[3] &= ~(termios.ECHO | termios.ICANON)
        self._take()
        self._cooked = _waiting()
        self._on_stop = signal.signal(signal.SIGTSTP, self._asked)
        self._on_continue = signal.signal(signal.SIGCONT, self._on_continued)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        self._is_asked = True
        if not self._holds:
            self.stop()

    def _on_continued(self, number: int, frame: FrameType | None) -> None:
        self._continued.set()
        if not self._is_lent:
            self._take()

    def _take(self) -> None:
        """Not from the background, where a terminal stops whoever changes it."""
        import termios

        with suppress(OSError, termios.error):
            if os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp():
                termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, self._quiet)
                os.write(sys.stdout.fileno(), MARK_PASTES)

    def _release(self) -> None:
        import termios

        with suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, self._before)
        with suppress(OSError):
            os.write(sys.stdout.fileno(), UNMARK_PASTES + SHOW_CURSOR)


def is_terminal() -> bool:
    """Return True if somebody is at the terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def _waiting() -> int:
    """Bytes that were typed and not read yet."""
    import fcntl
    import termios

    try:
        return int.from_bytes(
            fcntl.ioctl(sys.stdin.fileno(), termios.FIONREAD, bytes(4)), sys.byteorder
        )
    except OSError:
        return 0
