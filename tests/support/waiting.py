"""Waits for a state, never for a time.

A test says what it waits for, and a machine that is busy takes longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 300
"""Seconds until a state that has to come is given up, longer than any busy machine needs."""


def until(holds: Callable[[], object], what: str = "") -> None:
    """Return once `holds()` is true; AssertionError if it is not after `PATIENCE_S` seconds."""
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, f"waited {PATIENCE_S} s in vain {what}"
        time.sleep(0.005)
