"""Answers to the store and from there to the output, in groups: each costs the disk a few writes that have to be waited for."""

from __future__ import annotations

import time
from contextlib import suppress
from types import TracebackType
from typing import Literal

from mlxrunner.batch.output import Output
from mlxrunner.batch.store import Store
from mlxrunner.errors import MlxrunnerError

SHORTEST = 0.1
"""Seconds between two groups, at least: what a kill can cost."""
SHARE = 20
"""A slow disk gets at most one part in so many of the time."""


class Writer:
    """A context manager: when it is left, however that is, what was written is on the disk. StoreError, OutputError."""

    def __init__(self, store: Store, output: Output, order: Literal["input", "done"]) -> None:
        self._store, self.output, self._order = store, output, order
        self._is_waiting = False
        self._due = 0.0

    def mend(self) -> None:
        """Bring the output to what the store has: cut off a torn end, add what is missing."""
        if self.output.is_file:
            self.output.mend(self._store.bodies(self._order))
        self.flush()

    def write(self, index: int, line: bytes, *, failed: bool) -> None:
        """The answer of a line; it is safe after the next `flush`, which comes by itself."""
        self._store.record(index, line, failed=failed)
        self._is_waiting = True
        self.tick()

    def tick(self) -> None:
        """Call it often: flushes if something has waited long enough."""
        if self._is_waiting and time.monotonic() >= self._due:
            self.flush()

    def flush(self) -> None:
        """First the store, then the output: it never has more than the store knows of."""
        began = time.monotonic()
        self._is_waiting = False
        self._store.commit()
        self.output.append(self._store.bodies(self._order, after=self.output.place))
        now = time.monotonic()
        self._due = now + max(SHORTEST, SHARE * (now - began))

    def seal(self) -> None:
        """The whole output stays, whatever happens."""
        self.output.seal()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.flush()
            return
        with suppress(MlxrunnerError, OSError):
            self.flush()
