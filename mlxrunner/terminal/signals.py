"""Handle Ctrl-C, and end a command in order after `kill` or when its window is closed."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

ENDS = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command in order."""


class Interrupts:
    """Handles Ctrl-C while it is entered, as the innermost `listening` or `asking` says.

    A press outside of these blocks waits for the next one. Nothing changes if the parent ignores
    Ctrl-C, as a shell does for background jobs, or outside the main thread.
    """

    def __init__(self, *others: signal.Signals) -> None:
        """Handle the signals `others` like Ctrl-C, but raise SystemExit for them.

        The exit code is 128 + the signal's number. `others` may hold some of `ENDS`.
        """
        self._act: Callable[[], None] = self._wait
        self._waits = False
        self._numbers, self._last = (signal.SIGINT, *others), int(signal.SIGINT)
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in self._numbers if is_main_thread() else ():
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN:
                self._before[number] = before
                signal.signal(number, self._heard)
        return self

    def __exit__(self, *error: object) -> None:
        for number, before in self._before.items():
            if signal.getsignal(number) == self._heard:
                signal.signal(number, before)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Raise KeyboardInterrupt at the first press, or at once if a press waits.

        Later presses do nothing until the next block, so that nothing interrupts the handling of
        the first.
        """
        self._act = self._raise
        try:
            if self._waits:
                self._raise()
            yield
        finally:
            if self._act == self._raise:
                self._act = self._wait

    @contextmanager
    def asking(
        self, first: Callable[[], None] = lambda: None, *, is_settled_when_seen: bool = True
    ) -> Iterator[Callable[[], bool]]:
        """Yield a function that returns True once Ctrl-C was pressed.

        A second press raises KeyboardInterrupt (SystemExit for another signal); later ones do
        nothing. The handler calls `first` at the first press. If `is_settled_when_seen` is true,
        the second press does nothing once the function has returned True, because the caller is
        ending.
        """
        asked, outer = False, self._act

        def ask() -> None:
            nonlocal asked
            asked, self._act = True, self._raise
            first()

        def is_asked() -> bool:
            if asked and is_settled_when_seen:
                self._act = _ignore
            return asked

        self._act = ask
        try:
            if self._waits:
                self._waits = False
                ask()
            yield is_asked
        finally:
            self._act = _ignore if asked else outer

    def _heard(self, number: int, frame: FrameType | None) -> None:
        self._last = number
        self._act()

    def _wait(self) -> None:
        self._waits = True

    def _raise(self) -> None:
        self._act, self._waits = _ignore, False
        if self._last != signal.SIGINT:
            raise SystemExit(128 + self._last)
        raise KeyboardInterrupt


def _ignore() -> None:
    """Do nothing, because an interrupt is being handled."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back until the block ends. Use it in the main thread."""
    pressed = False

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        signal.raise_signal(signal.SIGINT)


HELD_UP_S = 0.3
"""Seconds in which the main thread handles a signal unless a long step of MLX holds it up."""
GIVES_BACK: list[Callable[[], None]] = []
"""Functions that give the terminal back, if the process has to leave from another thread."""


@contextmanager
def heard_at_once(act: Callable[[int], None], patience_s: float = HELD_UP_S) -> Iterator[None]:
    """Call `act` with the number of a signal that ends the command, although its handler waits.

    Python runs handlers between two instructions of the main thread, so a long step of MLX holds
    them up. `act` runs in another thread, unless the block ends within `patience_s` seconds after
    the signal; without patience, always. Outside the main thread nothing is heard.
    """
    if not is_main_thread():
        yield
        return
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    ended = threading.Event()

    def listen() -> None:
        while number := os.read(woken, 1):
            if number[0] in (signal.SIGINT, *ENDS) and not (patience_s and ended.wait(patience_s)):
                act(number[0])

    thread = threading.Thread(target=listen, daemon=True, name="signals")
    thread.start()
    before = signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    try:
        yield
    finally:
        ended.set()
        signal.set_wakeup_fd(before)
        os.close(waker)
        thread.join()
        os.close(woken)


def leave_at_once(number: int) -> None:
    """Give the terminal back and end the process, from any thread, without further cleaning up."""
    for give_back in GIVES_BACK:
        give_back()
    os._exit(128 + number)


def say_now(text: str) -> None:
    """Write a line to stderr from a signal handler, which may interrupt a `print`."""
    if sys.stderr is not None:  # otherwise 2 may be any file
        with suppress(OSError):
            os.write(2, f"\n{text}\n".encode())


def is_main_thread() -> bool:
    """Return True in the main thread, the only one that may set signal handlers."""
    return threading.current_thread() is threading.main_thread()


def wait_readable(descriptor: int) -> None:
    """Wait until `descriptor` can be read, and run signal handlers at once.

    A plain read cannot promise this: Python notes a signal that comes shortly before the read, and
    runs its handler only after it. Use it in the main thread.
    """
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    before = signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    try:
        while descriptor not in select.select([descriptor, woken], [], [])[0]:
            os.read(woken, 100)
    finally:
        signal.set_wakeup_fd(before)
        os.close(woken)
        os.close(waker)


@contextmanager
def orderly_end() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into a SystemExit with code 128 + the signal's number.

    So the command can clean up after `kill`, or when its window is closed. Later signals do
    nothing. A signal that the parent ignores, as nohup does, stays ignored.
    """
    handlers = {number: signal.getsignal(number) for number in ENDS}
    for number in ENDS:
        if handlers[number] is not signal.SIG_IGN:
            signal.signal(number, _leave)
    try:
        yield
    finally:
        for number in ENDS:
            if signal.getsignal(number) is _leave:
                signal.signal(number, handlers[number])


def _leave(number: int, frame: FrameType | None) -> None:
    for one in ENDS:
        signal.signal(one, _do_nothing)
    raise SystemExit(128 + number)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Do nothing. Unlike SIG_IGN, this can handle a signal that came at the same moment."""
