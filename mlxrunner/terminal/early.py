"""Ctrl-C while the program starts or ends: it leaves at once, without a traceback.

There is nothing to clean up then. Imports nothing that takes time, because it comes first.
"""

from __future__ import annotations

import os
import signal

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


def leave_at_once(number: int, frame: object) -> None:
    """Handle Ctrl-C by ending the process, without a word and without any cleaning up."""
    os._exit(INTERRUPTED)


def begin() -> None:
    """Leave at once at Ctrl-C, unless the parent ignores it, as for a background job."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave_at_once)


def hand_over() -> bool:
    """Raise KeyboardInterrupt at Ctrl-C from now on. Return False if `begin` had no effect."""
    if signal.getsignal(signal.SIGINT) is not leave_at_once:
        return False
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return True
