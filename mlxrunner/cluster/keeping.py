"""Decide when local workers that end while they start are given up. No processes, no clocks.

A supervisor starts a worker's process again each time that it ends. A process that ends before it
takes part is seen by nobody else.
"""

from __future__ import annotations

from collections.abc import Iterable

MOST_STARTS = 4
"""The processes for each worker that may end in turn while no worker takes part."""
GONE_S = 300.0
"""Seconds without any worker after which they are given up, whatever keeps them."""


class Keeper:
    """Counts the processes that were started since a worker last took part."""

    def __init__(self, workers: int) -> None:
        """Keep this number of workers."""
        self._workers = workers
        self._started: set[int] = set()
        self._gone_s = 0.0

    def look(self, processes: Iterable[int], taking_part: int, seconds: float) -> str | None:
        """Note the processes that live, and how many of them take part, `seconds` after last time.

        Return why the workers are given up; None while they are not.
        """
        if taking_part:
            self._started.clear()
            self._gone_s = 0.0
            return None
        living = set(processes)
        self._started |= living
        self._gone_s += seconds
        ended = len(self._started - living)
        if ended >= MOST_STARTS * self._workers:
            return (
                f"no worker is left: {ended} processes ended in turn while they started: is there "
                "enough memory for all of them?"
            )
        if self._gone_s >= GONE_S:
            return f"no worker is left, and none has come for {GONE_S:g} s"
        return None
