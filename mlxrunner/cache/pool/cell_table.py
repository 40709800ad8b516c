"""The arrays behind the values of a `KVPool`, and spans of cells. Numpy, no tensors.

A value differs from the one before it in a few cells. `CellTable` has arrays of all cells, which
hold one value at a time, and writes only the cells that differ. Therefore a step costs what its own
tokens cost, however many cells there are. The method is that of persistent arrays: Baker, "Shallow
binding makes functional arrays fast", 1991.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]


class CellRun(NamedTuple):
    """Cells `begin .. end - 1`."""

    begin: int
    end: int


def runs(cells: Ints) -> list[CellRun]:
    """Return the cells as runs of neighbours."""
    if len(cells) == 1:
        return [CellRun(int(cells[0]), int(cells[0]) + 1)]
    ends = [*(np.flatnonzero(cells[1:] != cells[:-1] + 1) + 1).tolist(), len(cells)]
    bounds = pairwise([0, *ends]) if len(cells) else ()
    return [CellRun(int(cells[begin]), int(cells[end - 1]) + 1) for begin, end in bounds]


MAX_SPANS = 32
"""Most spans that are listed. A sequence that lies in more pieces is scattered."""


class CellSpan(NamedTuple):
    """Cells `begin .. end - 1` with the tokens at `position`, `position + 1`, ..."""

    begin: int
    end: int
    position: int

    def between(self, low: int, high: int) -> CellSpan:
        """Return the cells at positions `low .. high - 1`; they may be none."""
        begin = self.begin + max(0, low - self.position)
        end = min(self.end, self.begin + high - self.position)
        return CellSpan(begin, max(begin, end), self.position + begin - self.begin)


Spans = tuple[CellSpan, ...]
"""Spans in the order of their cells."""


def spans_of(cells: Ints, positions: Ints) -> Spans | None:
    """Return `cells`, which hold the tokens at `positions`, as spans; None if scattered."""
    begins = breaks(cells, positions)
    return tuple(pieces(cells, positions, begins)) if len(begins) <= MAX_SPANS else None


def breaks(cells: Ints, positions: Ints, sequences: Ints | None = None) -> Ints:
    """Return the indices at which another span begins: of one of `sequences`, if given."""
    are = np.ones(len(cells), np.bool_)
    are[1:] = (cells[1:] != cells[:-1] + 1) | (positions[1:] != positions[:-1] + 1)
    if sequences is not None:
        are[1:] |= sequences[1:] != sequences[:-1]
    return np.flatnonzero(are).astype(np.int32)


def pieces(cells: Ints, positions: Ints, begins: Ints) -> list[CellSpan]:
    """Return the spans that begin at the indices `begins`."""
    bounds = pairwise([*begins.tolist(), len(cells)])
    first = zip(cells[begins].tolist(), positions[begins].tolist(), bounds, strict=True)
    return [CellSpan(cell, cell + end - begin, at) for cell, at, (begin, end) in first]


def grown(old: Spans, new: CellSpan) -> Spans | None:
    """Return the spans of a sequence that had `old` and got `new`; None if scattered."""
    for index, other in enumerate(old):
        if other.end == new.begin and other.position + other.end - other.begin == new.position:
            return (*old[:index], CellSpan(other.begin, new.end, other.position), *old[index + 1 :])
    return tuple(sorted((*old, new))) if len(old) < MAX_SPANS else None


def between(spans: Iterable[CellSpan], low: int, high: int) -> Spans:
    """Return the spans with the tokens at positions `low .. high - 1`."""
    if all(low <= at and at + end - begin <= high for begin, end, at in spans):
        return tuple(spans)
    clipped = (span.between(low, high) for span in spans)
    return tuple(span for span in clipped if span.end > span.begin)


def runs_of(spans: Iterable[CellSpan]) -> list[CellRun]:
    """Return the cells of `spans`, without their positions."""
    return [CellRun(begin, end) for begin, end, _ in spans]


def cells_in(spans: Sequence[CellSpan]) -> Ints:
    """Return the cells of `spans`."""
    if len(spans) == 1:
        return np.arange(spans[0].begin, spans[0].end, dtype=np.int32)
    parts = [np.arange(begin, end, dtype=np.int32) for begin, end, _ in spans]
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def num_covered(runs: Iterable[CellRun]) -> int:
    """Return the number of cells in any of `runs`."""
    found = reached = 0
    for begin, end in sorted(runs):
        found += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return found


class CellChange(NamedTuple):
    """The contents of some cells. Writing them twice is the same as once."""

    cells: Ints
    """The cells whose positions and numbers of owners are given."""
    positions: Ints
    num_owners: Ints
    sequences: Ints
    """The sequence of each of `owned`."""
    owned: Ints
    is_owner: Bools
    """True where the sequence owns the cell."""


class CellVersion:
    """A value of a table. `origin`: another one, and the change from it; None: the table has it."""

    __slots__ = ("origin",)

    def __init__(self, origin: tuple[CellVersion, CellChange] | None = None) -> None:
        self.origin = origin


class CellTable:
    """Arrays of all cells that hold one of their versions.

    An interrupt at any line leaves a table that the next call brings in order.
    """

    def __init__(self, positions: Ints, owners: Bools, num_owners: Ints) -> None:
        """`positions [cells]`, `owners [sequences, cells]`: see `KVPool`; `num_owners [cells]`."""
        self.positions, self.owners, self.num_owners = positions, owners, num_owners
        self.used: Bools = num_owners > 0
        self._unwritten: tuple[CellVersion, CellVersion, CellChange, CellChange] | None = None

    def become(self, version: CellVersion) -> None:
        """Write what differs, so that the arrays hold `version`."""
        self._write()
        path = []
        while version.origin is not None:
            path.append(version)
            version = version.origin[0]
        for after in reversed(path):
            assert after.origin is not None
            before, change = after.origin
            self._unwritten = before, after, change, self._contents(change)
            self._write()

    def _contents(self, change: CellChange) -> CellChange:
        """Return what the arrays hold where `change` is to be written."""
        return change._replace(
            positions=self.positions[change.cells],
            num_owners=self.num_owners[change.cells],
            is_owner=self.owners[change.sequences, change.owned],
        )

    def _write(self) -> None:
        """Write the change that is to be written, or was interrupted."""
        if self._unwritten is None:
            return
        before, after, change, contents = self._unwritten
        self.positions[change.cells] = change.positions
        self.num_owners[change.cells] = change.num_owners
        self.used[change.cells] = change.num_owners > 0
        self.owners[change.sequences, change.owned] = change.is_owner
        before.origin, after.origin = (after, contents), None
        self._unwritten = None
