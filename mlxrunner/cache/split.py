"""How one row's attention falls into parts: what all queries see, and what each sequence sees alone. Bookkeeping only: numpy, no tensors.

One product over all cells is right where a long prefix is shared. Where sequences have much of their own, most of it would be masked:
then each part is computed by itself, and the work grows with what is seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mlxrunner.cache.cells import Bools, Run, runs

WORTH_SPLITTING = 2.0
"""Times as many pairs of query and cell in one product as in parts: from here on parts are faster (benchmarks/parallel.py)."""
MOST_SHARING = 256
"""Queries of a pass that is split with a common part: their scores are held for a moment, which is too much for long prompts."""


class Part(NamedTuple):
    """The queries `begin .. end - 1` see, beside what is common, some of the cells `cells`: `visible [queries, cells]`, None: all."""

    begin: int
    end: int
    cells: Run
    visible: Bools | None


class Split(NamedTuple):
    """All queries see all cells of `common` (maybe none); the parts are in the order of the queries. Runs count from the history's first."""

    common: Run
    parts: tuple[Part, ...]


def split(visible: Bools, sequences: Sequence[int], worth: float = WORTH_SPLITTING) -> Split | None:
    """Of a mask `[queries, cells]`, with the sequence of each query. None where one product is the better way."""
    owners = np.asarray(sequences)
    borders = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(owners)]
    if len(borders) == 2:
        return None
    shared = runs(np.flatnonzero(visible.all(axis=0)).astype(np.int32))
    common = max(shared, key=lambda run: run.end - run.begin, default=Run(0, 0))
    parts = []
    cost = len(owners) * (common.end - common.begin)
    for begin, end in pairwise(borders):
        own = visible[begin:end].copy()
        own[:, common.begin : common.end] = False
        seen = np.flatnonzero(own.any(axis=0))
        cells = Run(int(seen[0]), int(seen[-1]) + 1) if len(seen) else Run(common.end, common.end)
        own = own[:, cells.begin : cells.end]
        parts.append(Part(begin, end, cells, None if own.all() else own))
        cost += own.size
    too_many = common.end > common.begin and len(owners) > MOST_SHARING
    return None if too_many or visible.size < worth * cost else Split(common, tuple(parts))
