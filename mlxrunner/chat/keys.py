"""Signals: Ctrl-C stops an answer, and `kill` or closing the window ends the chat in order."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

ENDS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interruptible(first: Callable[[], None] = lambda: None) -> Iterator[Callable[[], bool]]:
    """Ctrl-C sets a flag that is looked at between tokens and prefill chunks; a second one interrupts what lasts too long.

    Once the flag was seen, or the interrupt was raised, more of them do nothing: what was answered is being put away.
    `first` is called when Ctrl-C comes for the first time.
    """
    pressed, is_ending = 0, False

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal pressed, is_ending
        pressed += 1
        if pressed == 1:
            first()
        if pressed > 1 and not is_ending:
            is_ending = True
            raise KeyboardInterrupt

    def interrupted() -> bool:
        nonlocal is_ending
        is_ending = is_ending or pressed > 0
        return is_ending

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


class Interrupts:
    """Ctrl-C is one KeyboardInterrupt while `listening`, however often it is pressed, so that what handles it is not interrupted.

    One that is pressed between two times of listening comes with the second. For the main thread.
    """

    def __init__(self) -> None:
        self._listens = self._is_handled = self._waits = False

    def __enter__(self) -> Interrupts:
        self._before = signal.getsignal(signal.SIGINT)
        if self._before is not signal.SIG_IGN:  # as a shell wants it in the background
            signal.signal(signal.SIGINT, self._heard)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._before)

    @contextmanager
    def listening(self) -> Iterator[None]:
        self._is_handled, self._listens = False, True
        try:
            if self._waits:
                self.ignore()
                raise KeyboardInterrupt
            yield
        finally:
            self._listens = False

    def ignore(self) -> None:
        """Stop listening: an interrupt is on its way already."""
        self._listens, self._waits, self._is_handled = False, False, True

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self._listens:
            self.ignore()
            raise KeyboardInterrupt
        self._waits = not self._is_handled


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until this is left."""
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


def wait_readable(descriptor: int) -> None:
    """Wait until `descriptor` can be read; the handler of a signal runs at once, also where that comes just before the wait.

    A read can't promise this: Python notes a signal that comes shortly before, and runs its handler when the read is over.
    For the main thread.
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
    """`kill`, or a window that is closed, is a SystemExit, so that what was said can be put away; more of them do nothing."""
    handlers = {number: signal.getsignal(number) for number in ENDS}
    for number in ENDS:
        if handlers[number] is not signal.SIG_IGN:  # as nohup wants it
            signal.signal(number, _leave)
    try:
        yield
    finally:
        for number in ENDS:
            if signal.getsignal(number) is _leave:
                signal.signal(number, handlers[number])


def _leave(number: int, frame: FrameType | None) -> None:
    for one in ENDS:
        signal.signal(one, _heard)
    raise SystemExit(128 + number)


def _heard(number: int, frame: FrameType | None) -> None:
    """Not SIG_IGN: one that came at the same moment is still to be handled."""
