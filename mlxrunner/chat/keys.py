"""What the keyboard may do while an answer comes: Ctrl-C stops it, and what is typed waits, unseen, for the next text."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C sets a flag that is looked at between tokens and prefill chunks; a second one interrupts wherever it comes."""
    pressed: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        pressed.append(number)
        if len(pressed) > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def unseen_typing(terminal: bool) -> Iterator[None]:
    """What is typed while an answer comes does not get into it: it is there, as it was typed, when the next text is read."""
    if not terminal:
        yield
        return
    import termios

    terminal_in = sys.stdin.fileno()
    before = termios.tcgetattr(terminal_in)
    quiet = termios.tcgetattr(terminal_in)
    quiet[0] &= ~termios.ICRNL
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(terminal_in, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(terminal_in, termios.TCSANOW, before)
