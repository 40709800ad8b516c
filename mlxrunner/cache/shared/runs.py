"""Cells that lie side by side, and rows that move between cells. Bookkeeping only: numpy."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mlxrunner.cache.shared.sight import Ints


class Run(NamedTuple):
    """Cells `begin .. end - 1`."""

    begin: int
    end: int


class Move(NamedTuple):
    """Rows to move: those of the cells `sources`, in this order, to the cells from `begin` on.

    All rows are read before the first is written.
    """

    begin: int
    sources: Ints


class Lift(NamedTuple):
    """Tokens that change their position."""

    sources: Ints
    targets: Ints
    """The new cells of the tokens. Shared tokens get other cells than `sources`."""
    by: int
    """Number of positions to move by."""

    @property
    def copies(self) -> Lift:
        """The tokens that get another cell."""
        moved = self.sources != self.targets
        return Lift(self.sources[moved], self.targets[moved], self.by)


def runs(cells: Ints) -> list[Run]:
    """Return the cells as runs of neighbours."""
    if len(cells) == 1:
        return [Run(int(cells[0]), int(cells[0]) + 1)]
    ends = [*(np.flatnonzero(cells[1:] != cells[:-1] + 1) + 1).tolist(), len(cells)]
    bounds = pairwise([0, *ends]) if len(cells) else ()
    return [Run(int(cells[begin]), int(cells[end - 1]) + 1) for begin, end in bounds]
