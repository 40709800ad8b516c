"""End the threads that own models before the interpreter ends, and in the child of a fork."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from contextlib import suppress
from typing import Protocol

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


class Ending(Protocol):
    """A thread that can be ended: see `EngineThread`."""

    def stop(self) -> None: ...

    def join(self) -> None: ...

    def end_after_fork(self) -> None: ...


_OPEN: weakref.WeakSet[Ending] = weakref.WeakSet()
"""The threads that have to end before the interpreter does."""


def end_at_exit(thread: Ending) -> None:
    """End the work of `thread` before the interpreter ends, and in the child of a fork."""
    if not _OPEN:
        atexit.unregister(_end_all)
        atexit.register(_end_all)
    _OPEN.add(thread)


def _end_all() -> None:
    """End the work of all threads before the interpreter ends: see `workers.py`.

    Ctrl-C while it waits for their last steps leaves at once.
    """
    # A thread that has ended its work keeps the interpreter's lock until it waits for the next.
    sys.setswitchinterval(60)
    threads = list(_OPEN)
    try:
        for thread in threads:
            thread.stop()
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(INTERRUPTED)


def _end_after_fork() -> None:
    for thread in list(_OPEN):
        thread.end_after_fork()
    _OPEN.clear()


os.register_at_fork(after_in_child=_end_after_fork)
