"""The tokens of a sequence as stretches of cells. Bookkeeping only: numpy, no tensors.

Tokens that were stored one after another lie side by side. So a sequence of any length is mostly
one stretch, or two: the prefix that it shares, and its own tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mlxrunner.cache.shared.sight import Ints

MOST_STRETCHES = 32
"""Most stretches that are listed. A sequence that lies in more pieces is scattered."""


class Stretch(NamedTuple):
    """Cells `begin .. end - 1` with the tokens at `position`, `position + 1`, ..."""

    begin: int
    end: int
    position: int

    def between(self, low: int, high: int) -> Stretch:
        """Return the cells at positions `low .. high - 1`; they may be none."""
        begin = self.begin + max(0, low - self.position)
        end = min(self.end, self.begin + high - self.position)
        return Stretch(begin, max(begin, end), self.position + begin - self.begin)


Stretches = tuple[Stretch, ...]
"""Stretches in the order of their cells."""


def stretches_of(cells: Ints, positions: Ints) -> Stretches | None:
    """Return `cells`, which hold the tokens at `positions`, as stretches; None if scattered."""
    begins = breaks(cells, positions)
    return tuple(pieces(cells, positions, begins)) if len(begins) <= MOST_STRETCHES else None


def breaks(cells: Ints, positions: Ints, sequences: Ints | None = None) -> Ints:
    """Return the indices at which another stretch begins: of one of `sequences`, if given."""
    are = np.ones(len(cells), np.bool_)
    are[1:] = (cells[1:] != cells[:-1] + 1) | (positions[1:] != positions[:-1] + 1)
    if sequences is not None:
        are[1:] |= sequences[1:] != sequences[:-1]
    return np.flatnonzero(are).astype(np.int32)


def pieces(cells: Ints, positions: Ints, begins: Ints) -> list[Stretch]:
    """Return the stretches that begin at the indices `begins`."""
    bounds = pairwise([*begins.tolist(), len(cells)])
    first = zip(cells[begins].tolist(), positions[begins].tolist(), bounds, strict=True)
    return [Stretch(cell, cell + end - begin, at) for cell, at, (begin, end) in first]


def grown(old: Stretches, new: Stretch) -> Stretches | None:
    """Return the stretches of a sequence that had `old` and got `new`; None if scattered."""
    for index, other in enumerate(old):
        if other.end == new.begin and other.position + other.end - other.begin == new.position:
            return (*old[:index], Stretch(other.begin, new.end, other.position), *old[index + 1 :])
    return tuple(sorted((*old, new))) if len(old) < MOST_STRETCHES else None


def between(stretches: Iterable[Stretch], low: int, high: int) -> Stretches:
    """Return the stretches with the tokens at positions `low .. high - 1`."""
    if all(low <= at and at + end - begin <= high for begin, end, at in stretches):
        return tuple(stretches)
    clipped = (stretch.between(low, high) for stretch in stretches)
    return tuple(stretch for stretch in clipped if stretch.end > stretch.begin)
