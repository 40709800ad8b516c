"""Say in the log that no file is left for another connection: the event loop does not."""

from __future__ import annotations

import time
from collections.abc import Callable

from mlxrunner.results import logger
from mlxrunner.system.open_files import limit

EVERY_S = 60.0
"""Seconds from one line to the next."""


class Shortage:
    """Counts nothing: the number of a connection's file says how many are open."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._next = -float("inf")

    def notice(self, file: int) -> None:
        """Say it if the file with the number `file` is the last one that this process may open.

        A system gives the lowest number that is free.
        """
        most = limit()
        if file != most - 1 or self._now() < self._next:
            return
        self._next = self._now() + EVERY_S
        logger.warning(
            "no more connections can be accepted: all %d files that this process may have open are "
            "in use; raise the limit with ulimit -n NUMBER (LimitNOFILE= in a systemd unit) before "
            "the server starts",
            most,
        )
