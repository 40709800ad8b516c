"""The terminal while no line is edited.

Typed keys wait, unseen, for the next line, and Ctrl-Z stops the program until `fg`.
"""

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
"""Most bytes to read of the keys typed while the program starts."""
STOPPED_S = 1.0
"""Seconds to wait for the system to stop the program.

The system does not stop it if nobody could continue it.
"""
COOKED = bytes.maketrans(b"\n\0", b"\r\x04")
"""Translates Enter and Ctrl-D from what a line-editing terminal reads to the keys as typed."""


class Keyboard:
    """Keeps typed keys off the screen while it is entered, and saves them for the next line.

    The terminal marks pasted text, which is kept, too. On leaving, and while the program is
    stopped, the terminal is as it was before. Without a `terminal` nothing happens. It may be
    entered again within itself. Use it in the main thread.
    """

    def __init__(self, terminal: bool = False) -> None:
        self._terminal = terminal
        self._depth = self._cooked = 0
        self._earlier = b""
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
        """Return the text typed while the program started, as keys for a line editor.

        The second call returns an empty text.
        """
        earlier, self._earlier = self._earlier, b""
        typed = earlier + (self._typed() if self._cooked or earlier else b"")
        return typed.decode(errors="surrogateescape")

    def ask(self, question: str) -> str:
        """Return the line that the user types after `question`, or "" at the end of the input.

        Keys that were typed before the question are no answer: they wait for the next line.
        """
        self._earlier += self._typed()
        with self.lent():
            print(question, end="", file=sys.stderr, flush=True)
            return os.read(sys.stdin.fileno(), MOST_TYPED).decode(errors="replace").strip()

    def _typed(self) -> bytes:
        """Read the keys that wait, as a line editor gets them."""
        cooked, self._cooked = self._cooked, 0
        if not (waiting := _waiting()):
            return b""
        typed = os.read(sys.stdin.fileno(), min(waiting, MOST_TYPED))
        return typed[:cooked].translate(COOKED) + typed[cooked:]

    @contextmanager
    def editing(self) -> Iterator[None]:
        """Lend the terminal to a line editor, which gives it back around `stop_group`."""
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

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Lend the terminal, as it was before, to another program that runs in it."""
        with self.editing():
            if self._terminal:
                self._release()
            try:
                yield
            finally:
                if self._terminal:
                    self._take()

    def stop_group(self) -> None:
        """Stop this program and those started with it, as a terminal does at Ctrl-Z.

        Use it from any thread while `editing`.
        """
        with suppress(OSError):
            os.write(sys.stdout.fileno(), UNMARK_PASTES)
        self._continued.clear()
        os.kill(0, signal.SIGTSTP)  # another thread may be the first to see it
        self._continued.wait(STOPPED_S)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Let Ctrl-Z only ask to stop: see `asks_to_stop`."""
        self._holds = True
        try:
            yield
        finally:
            self._holds = False
            if self._is_asked:
                self.stop()

    @property
    def asks_to_stop(self) -> bool:
        """True once Ctrl-Z is pressed: clear what is drawn, and call `stop`."""
        return self._is_asked

    def stop(self) -> None:
        """Stop until somebody continues the program, with the terminal as it was before."""
        self._is_asked = False
        self._release()
        before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.pthread_kill(
            threading.get_ident(), signal.SIGTSTP
        )  # this thread, so that it does not run on before it stops
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
        """Take the terminal, but not from the background: the system stops a program that tries."""
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
    """Return True if standard input and output are a terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def _waiting() -> int:
    """Return the number of bytes that were typed and not read yet."""
    import fcntl
    import termios

    try:
        return int.from_bytes(
            fcntl.ioctl(sys.stdin.fileno(), termios.FIONREAD, bytes(4)), sys.byteorder
        )
    except OSError:
        return 0
