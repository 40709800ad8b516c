"""Lanes: cells that are reserved for a sequence. Bookkeeping only: numpy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from mlxrunner.cache.shared.runs import Run
from mlxrunner.cache.shared.sequences import Batch
from mlxrunner.cache.shared.sight import Bools, Ints

SMALLEST_LANE = 32
"""Cells of the smallest lane. Other lanes are 2, 4, 8 ... times as large, so that sizes repeat."""


class Lane(NamedTuple):
    """Cells reserved for a sequence, so that its next tokens lie side by side.

    Lanes of one size begin at multiples of it, so that a buffer can be seen as a row of equal
    pieces; but for those that lie behind what the sequence has.
    """

    run: Run
    next: int
    """The first cell that is not taken yet."""

    @property
    def is_even(self) -> bool:
        """True if it begins at a multiple of its size."""
        return self.run.begin % (self.run.end - self.run.begin) == 0


def new_lane(free: Bools, lanes: Iterable[Lane], count: int, most: int) -> Lane | None:
    """Return a lane of at least `count` and at most `most` cells beside other `lanes`.

    Return None if there is no such room in the `free` cells.
    """
    if not 0 < count <= most:
        return None
    size = min(SMALLEST_LANE << max(0, (-(-count // SMALLEST_LANE) - 1).bit_length()), most)
    begins = np.arange(0, len(free) - size + 1, size)
    total = np.concatenate([[0], np.cumsum(_without(free, lanes))])
    fitting = begins[total[begins + size] - total[begins] == size]
    if not len(fitting):
        return None
    begin = int(fitting[0])
    return Lane(Run(begin, begin + size), begin)


def lane_behind(free: Bools, lanes: Iterable[Lane], count: int, begin: int) -> Lane | None:
    """Return a lane of `count` cells from `begin` on beside other `lanes`; None if one is taken."""
    end = begin + count
    if count <= 0 or end > len(free) or not _without(free, lanes)[begin:end].all():
        return None
    return Lane(Run(begin, end), begin)


def in_lanes(
    batch: Batch, used: Bools, given: Mapping[int, Lane]
) -> tuple[Ints, dict[int, Lane]] | None:
    """Return the cells of the batch, and the remaining ones of the `given` lanes.

    Return None if the tokens without a lane find no room beside the lanes.
    """
    cells, lanes = [0] * len(batch), dict(given)
    others: list[int] = []
    for sequence, own in batch.by_sequence.items():
        lane = lanes.pop(sequence, None)
        end = 0 if lane is None else lane.next + len(own)
        if lane is None or end > lane.run.end or any(used[lane.next : end].tolist()):
            others += own
        else:
            _put(cells, own, lane.next)
            lanes[sequence] = Lane(lane.run, end)
    if others:
        start = _first_fit(_without(~used, [given[each] for each in lanes]), len(others))
        if start is None:
            return None
        _put(cells, sorted(others), start)
    return np.array(cells, np.int32), lanes


def _put(cells: list[int], indices: Iterable[int], first: int) -> None:
    """Give the tokens `indices` the cells from `first` on, in order."""
    for cell, index in enumerate(indices, first):
        cells[index] = cell


def _without(free: Bools, lanes: Iterable[Lane]) -> Bools:
    """Return the cells of `free` that are in no lane."""
    free = free.copy()
    for lane in lanes:
        free[lane.next : lane.run.end] = False
    return free


def _first_fit(free: Bools, n: int) -> int | None:
    """Return the first of `n` free cells side by side; None if there are none."""
    edges = np.flatnonzero(np.diff(free, prepend=False, append=False))
    fitting = np.flatnonzero(edges[1::2] - edges[::2] >= n)
    return int(edges[2 * fitting[0]]) if len(fitting) else None
