"""How one row's attention falls into parts: what all queries see, and what each sequence sees alone. Bookkeeping only: numpy, no tensors.

One product over all cells is right where a long prefix is shared by few. Where sequences have much of their own, most of it would be
masked: then each part is computed by itself, and the work grows with what is seen. Single queries whose sequences have lanes of one
size are one part together: such a stretch of the buffer is a batch already, without copying anything.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mlxrunner.cache.cells import Bools, Lane, Run, runs

WORTH_SPLITTING = 1.2
"""Times the cost of the parts that one product has to cost, before it is taken apart."""
PART_COST = 500
"""What a part costs beside its pairs of query and cell, in such pairs (benchmarks/parallel.py, on a CPU; larger models: less)."""
MOST_SHARED = 2**20
"""Pairs of query and common cell of a pass that is split: their scores are held for a moment, which is too much for long prompts."""


class Part(NamedTuple):
    """The queries `begin .. end - 1` see, beside what is common, some of `cells`: `visible [queries, cells]`, None: all."""

    begin: int
    end: int
    cells: Run
    visible: Bools | None


class Lanes(NamedTuple):
    """One query for each of many lanes that follow each other: `queries[i]` sees some of the first cells of lane i.

    `wanted`: the lanes that are asked for; those in between have some query, too, and see nothing. `begin`: the first cell of the first
    lane; `size`: of each; `length`: the most cells that one sees; `visible [lanes, length]`, None: all.
    """

    queries: tuple[int, ...]
    wanted: tuple[int, ...]
    begin: int
    size: int
    length: int
    visible: Bools | None


class Split(NamedTuple):
    """All queries see all cells of `common` (maybe none), and each is in one part or in one of `lanes`."""

    common: Run
    parts: tuple[Part, ...]
    lanes: tuple[Lanes, ...]


def split(
    visible: Bools,
    sequences: Sequence[int],
    history: Run,
    lanes: Mapping[int, Lane],
    worth: float = WORTH_SPLITTING,
) -> Split | None:
    """Of a mask `[queries, history]`, with the sequence of each query. None where one product is the better way."""
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
            together.append(_lanes(members, first, (last - first) // size + 1, size))
    cost = len(owners) * (common.end - common.begin) + PART_COST * (len(parts) + len(together))
    cost += sum((part.end - part.begin) * (part.cells.end - part.cells.begin) for part in parts)
    cost += sum(len(lane.queries) * lane.length for lane in together)
    if visible.size < worth * cost:
        return None
    return Split(_moved(common, history.begin), tuple(parts), tuple(together))


def _lanes(members: list[tuple[Part, Run]], first: int, count: int, size: int) -> Lanes:
    length = max(part.cells.end - run.begin for part, run in members)
    queries, visible = [members[0][0].begin] * count, np.zeros((count, length), np.bool_)
    wanted = []
    for part, run in members:
        index = (run.begin - first) // size
        queries[index] = part.begin
        wanted.append(index)
        columns = visible[index, part.cells.begin - run.begin : part.cells.end - run.begin]
        columns[:] = True if part.visible is None else part.visible[0]
    return Lanes(
        tuple(queries),
        tuple(sorted(wanted)),
        first,
        size,
        length,
        None if visible.all() else visible,
    )


def _moved(run: Run, by: int) -> Run:
    return Run(run.begin + by, run.end + by)
