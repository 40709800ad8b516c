"""Close connections that would take the last files of this process, and say so in the log.

The server needs some for its own work: it parks conversations, loads models and imports modules.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from mlxrunner.results import logger
from mlxrunner.system.open_files import limit

EVERY_S = 60.0
"""Seconds from one line to the next."""
KEPT = 32
"""Most files that no connection gets; a quarter of the limit, if that is less."""


class Shortage:
    """Counts nothing: the number of a connection's file says how many are open."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._next = -float("inf")

    def closes(self, file: int) -> bool:
        """Return True if a connection has to be closed: its `file` is one of those that are kept.

        A system gives the lowest number that is free.
        """
        most = limit()
        if most < 0 or file < most - min(KEPT, most // 4):
            return False
        if self._now() >= self._next:
            self._next = self._now() + EVERY_S
            logger.warning(
                "no more connections can be accepted: all %d files that this process may have open "
                "are in use, or kept for its own work; raise the limit with ulimit -n NUMBER "
                "(LimitNOFILE= in a systemd unit) before the server starts",
                most,
            )
        return True
