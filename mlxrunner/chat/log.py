"""The log beside an answer: on a screen, it waits until the answer, or the line that is being typed, is over."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import MemoryHandler

LOGGER = logging.getLogger("mlxrunner")


@contextmanager
def held_log(terminal: bool) -> Iterator[None]:
    """Hold back log lines until this ends, and then print them in order; without a `terminal` nothing changes."""
    before = LOGGER.handlers
    if not terminal or not before:
        yield
        return
    held = [
        MemoryHandler(sys.maxsize, flushLevel=sys.maxsize, target=handler) for handler in before
    ]
    LOGGER.handlers = list(held)
    try:
        yield
    finally:
        LOGGER.handlers = before
        for handler in held:
            handler.close()
