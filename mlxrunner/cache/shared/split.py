"""Split the attention of one row into parts: one for all queries, and one per sequence.

Bookkeeping only: numpy, no tensors.

One product over all cells is fastest if few sequences share a long prefix. If sequences have many
tokens of their own, most of that product would be masked. Then each part is computed by itself, and
the work grows with the number of visible cells. Single queries whose sequences have lanes of one
size form one part: such a stretch of the buffer is a batch already, without any copy.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mlxrunner.cache.shared.cells import Bools, Lane, Run, runs

WORTH_SPLITTING = 1.2
"""Smallest ratio of the cost of one product to that of its parts at which it is split."""
PART_COST = 500
"""Fixed cost of a part, in pairs of query and cell.

Measured on a CPU by benchmarks/parallel.py; larger models have a lower cost.
"""
MOST_SHARED = 2**20
"""Most pairs of query and common cell in a pass that is split.

A split pass holds their scores in memory, which is too much for long prompts.
"""


class Part(NamedTuple):
    """The queries `begin .. end - 1`, and the cells that they see beside the common ones."""

    begin: int
    end: int
    cells: Run
    visible: Bools | None
    """The mask `[queries, cells]`; None: all are visible."""


class StackedParts(NamedTuple):
    """One query for each of many lanes that follow each other."""

    queries: tuple[int, ...]
    """Indices of the queries, one per lane: `queries[i]` sees some of the first cells of lane i."""
    wanted: tuple[int, ...]
    """Indices of the lanes whose results are used.

    Each other lane gets one of the queries, which sees nothing of it.
    """
    begin: int
    """The first cell of the first lane."""
    size: int
    """Number of cells of each lane."""
    length: int
    """Most cells that a query sees."""
    visible: Bools | None
    """The mask `[lanes, length]`; None: all are visible."""


class Split(NamedTuple):
    """Attention in parts. Each query is in one of `parts` or in one of `stacks`."""

    common: Run
    """Cells that all queries see; may be empty."""
    parts: tuple[Part, ...]
    stacks: tuple[StackedParts, ...]


def split(
    visible: Bools,
    sequences: Sequence[int],
    history: Run,
    lanes: Mapping[int, Lane],
    worth: float = WORTH_SPLITTING,
) -> Split | None:
    """Split the attention of the mask `visible [queries, history]`.

    Return None if one product is faster. `sequences`: the sequence of each query. `history`: the
    cells of the mask. `lanes`: the lane of each sequence that has one. `worth`: the smallest ratio
    of costs at which the product is split.
    """
    owners = np.asarray(sequences)
    borders = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(owners)]
    if len(borders) == 2:
        return None
    shared = runs(np.flatnonzero(visible.all(axis=0)).astype(np.int32))
    common = max(shared, key=lambda run: run.end - run.begin, default=Run(0, 0))
    if len(owners) * (common.end - common.begin) > MOST_SHARED:
        return None
    parts, in_lanes = [], defaultdict(list)
    pieces = Counter(sequences[begin] for begin in borders[:-1])
    for begin, end in pairwise(borders):
        own = visible[begin:end].copy()
        own[:, common.begin : common.end] = False
        seen = np.flatnonzero(own.any(axis=0))
        cells = Run(int(seen[0]), int(seen[-1]) + 1) if len(seen) else Run(common.end, common.end)
        own = own[:, cells.begin : cells.end]
        part = Part(begin, end, _moved(cells, history.begin), None if own.all() else own)
        lane = lanes.get(sequences[begin]) if pieces[sequences[begin]] == 1 else None
        if (
            lane is not None
            and end == begin + 1
            and lane.run.begin <= part.cells.begin
            and part.cells.end <= lane.run.end
        ):
            in_lanes[lane.run.end - lane.run.begin].append((part, lane.run))
        else:
            parts.append(part)
    together = []
    for size, members in in_lanes.items():
        first, last = min(run.begin for _, run in members), max(run.begin for _, run in members)
        if len(members) < 2 or (last - first) // size + 1 > 2 * len(members):
            parts += [part for part, _ in members]
        else:
            together.append(_stacked(members, first, (last - first) // size + 1, size))
    cost = len(owners) * (common.end - common.begin) + PART_COST * (len(parts) + len(together))
    cost += sum((part.end - part.begin) * (part.cells.end - part.cells.begin) for part in parts)
    cost += sum(len(lane.queries) * lane.length for lane in together)
    if visible.size < worth * cost:
        return None
    return Split(_moved(common, history.begin), tuple(parts), tuple(together))


def _stacked(members: list[tuple[Part, Run]], first: int, count: int, size: int) -> StackedParts:
    length = max(part.cells.end - run.begin for part, run in members)
    queries, visible = [members[0][0].begin] * count, np.zeros((count, length), np.bool_)
    wanted = []
    for part, run in members:
        index = (run.begin - first) // size
        queries[index] = part.begin
        wanted.append(index)
        columns = visible[index, part.cells.begin - run.begin : part.cells.end - run.begin]
        columns[:] = True if part.visible is None else part.visible[0]
    return StackedParts(
        tuple(queries),
        tuple(sorted(wanted)),
        first,
        size,
        length,
        None if visible.all() else visible,
    )


def _moved(run: Run, by: int) -> Run:
    return Run(run.begin + by, run.end + by)
