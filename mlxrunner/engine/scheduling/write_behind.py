"""Write conversations to the disk cache while they stay in memory, so that a crash loses little.

A turn is written once its slot has been idle for a moment, or soon while others keep the engine at
work. The slot may go on meanwhile: the first tokens stay as they were. Bookkeeping only: no
tensors.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from mlxrunner.cache.entry import CacheEntry
from mlxrunner.engine.scheduling.slots import Slot

QUIET_S = 0.5
"""Seconds after the end of a conversation's last turn until it is written, if nothing runs.

A tool's result often comes within this time, and then one save has both turns.
"""
BUSY_S = 3.0
"""Seconds after its end until a turn is written between the steps of others."""
LATE_S = 5.0
"""Seconds after its end from which on a turn is written although answers have fallen behind."""
POLL_S = 0.01
"""Seconds between two looks at a file that a thread writes."""
IDLE_S = 0.02
"""Seconds of work, if nothing runs, until new requests are looked for."""
DAY_S = 86_400.0
SAVES = 2
"""The last saves of a conversation that stay on disk.

A prompt that leaves the last one, as a regenerated answer does, may go on from the one before.
"""

logger = logging.getLogger("mlxrunner")


@runtime_checkable
class SaveTarget(Protocol):
    """The disk cache, as it saves what stays in memory: see `DiskCache`."""

    daily_bytes: int
    written: int

    def saving(
        self, entry: CacheEntry, upto: int, replaces: Any = None
    ) -> Generator[bool, None, Any]: ...


@dataclass(frozen=True)
class UnsavedTurns:
    """The turns of a slot that have ended since it was saved."""

    first: float
    """The moment at which the first of them ended."""
    last: float
    tokens: int
    """Tokens in the slot at the end of the last one."""

    def due(self, *, is_idle: bool) -> float:
        """Return the moment from which on they are written. `is_idle`: nothing runs."""
        return self.last + QUIET_S if is_idle else self.first + BUSY_S


class WriteBehind:
    """The turns that are not on disk yet, and the save that is going on."""

    def __init__(self, slots: Sequence[Slot], place: object) -> None:
        """Save what `slots` hold in `place`, if it is a SaveTarget that takes some bytes a day."""
        self._slots = slots
        is_on = isinstance(place, SaveTarget) and place.daily_bytes > 0
        self._place = place if is_on and isinstance(place, SaveTarget) else None
        self._ended: dict[int, UnsavedTurns] = {}
        """The turns of each slot that are not on disk."""
        self._saved: dict[int, list[Any]] = {}
        """The last saves of each slot."""
        self._work: Generator[bool, None, None] | None = None
        self._of = 0.0
        """The end of the turn that is being saved."""
        self._again = 0.0
        """The moment before which a save that waits for the disk is not looked at."""
        self._left = 0.0 if self._place is None else float(self._place.daily_bytes)
        """Bytes that may be written now; as many come back in a day as are written in one."""
        self._counted, self._looked, self._is_told = 0, time.monotonic(), False

    def note(self, slot: Slot) -> None:
        """Note that a turn has ended in `slot`."""
        if self._place is not None and slot.tokens:
            now, before = time.monotonic(), self._ended.get(slot.number)
            first = now if before is None else before.first
            self._ended[slot.number] = UnsavedTurns(first, now, len(slot.tokens))

    def wait_s(self, *, is_idle: bool) -> float | None:
        """Return the seconds until there is something to do; None: nothing before the next turn."""
        now = time.monotonic()
        if self._work is not None:
            return max(0.0, self._again - now)
        if not self._ended:
            return None
        due = min(one.due(is_idle=is_idle) for one in self._ended.values())
        return max(0.0, due - now, self._pause_s(now))

    @property
    def is_late(self) -> bool:
        """True if a turn is overdue: its save then takes time from running answers."""
        now = time.monotonic()
        if self._work is not None:
            return self._of + LATE_S < now and self._again <= now
        return any(one.first + LATE_S < now for one in self._ended.values())

    def go_on(self, seconds: float, *, is_idle: bool) -> None:
        """Save for about some seconds. Stop earlier where a thread waits for the disk.

        A turn that is late is waited for.
        """
        until = time.monotonic() + seconds
        while (work := self._work or self._next(is_idle=is_idle)) is not None:
            waits, now = next(work, None), time.monotonic()
            self._work = None if waits is None else work
            if waits:
                self._again = now + POLL_S
            if now >= until or (waits and now < self._of + LATE_S):
                return
            if waits:
                time.sleep(POLL_S)

    def stop(self) -> None:
        """Leave a save undone."""
        work, self._work = self._work, None
        if work is not None:
            work.close()

    def _next(self, *, is_idle: bool) -> Generator[bool, None, None] | None:
        """Return the save of the turns that are due first; None if none are due."""
        if self.wait_s(is_idle=is_idle) != 0:
            return None
        number = min(self._ended, key=lambda number: self._ended[number].due(is_idle=is_idle))
        turns, slot = self._ended.pop(number), self._slots[number]
        self._of = turns.first
        return self._saving(slot, min(turns.tokens, len(slot.tokens)))

    def _saving(self, slot: Slot, upto: int) -> Generator[bool, None, None]:
        """Save the first `upto` tokens of a slot. End without it if the slot drops some of them."""
        assert self._place is not None
        entry = slot.cache.entry if slot.is_busy else slot.cache.current
        tokens, saved = slot.tokens.array[:upto].copy(), self._saved.get(slot.number, [])
        if not len(tokens) or slot.shared_with(tokens) < len(tokens):
            return
        replaces = saved[0] if len(saved) == SAVES else None
        with closing(self._place.saving(entry, len(tokens), replaces)) as work:
            while True:
                try:
                    waits = next(work)
                except StopIteration as done:
                    found = done.value
                    break
                yield waits
                if slot.cache.entry is not entry or slot.shared_with(tokens) < len(tokens):
                    return
        if found is not None and found not in saved:
            seconds = time.monotonic() - self._of
            logger.debug("%d tokens are on disk, %.2f s after a turn's end", len(tokens), seconds)
            self._saved[slot.number] = [*saved, found][-SAVES:]

    def _pause_s(self, now: float) -> float:
        """Return the seconds until something may be written; say so once if it has to wait."""
        assert self._place is not None
        each = self._place.daily_bytes / DAY_S
        self._left = min(self._left + (now - self._looked) * each, self._place.daily_bytes)
        self._left -= self._place.written - self._counted
        self._looked, self._counted = now, self._place.written
        if self._left > 0:
            self._is_told = False
            return 0.0
        if not self._is_told:
            self._is_told = True
            logger.warning(
                "idle conversations are not written to disk for %d s: %d bytes a day are the most "
                "(disk_write_bytes); a crash would lose their last turns",
                -self._left // each + 1,
                self._place.daily_bytes,
            )
        return -self._left / each + POLL_S
