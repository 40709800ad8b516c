"""Gather what single queries see in cells that lie anywhere, so that they are one product.

Sequences without a lane of their own have short runs of cells between those of others. Bookkeeping
only: numpy, no tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from mlxrunner.cache.shared.cells import Cells
from mlxrunner.cache.shared.parts import PART_COST, Block, Gathered, Seen
from mlxrunner.cache.shared.runs import Run
from mlxrunner.cache.shared.sight import Ints

COPY_COST = 3
"""Cost of copying the keys and values of a cell, in pairs of query and cell."""
SHORTEST = 128
"""Sequences with up to this many cells are one part; longer ones are, if they are as long."""
MOST_GATHERED = 2**15
"""Most cells that a step copies at once."""

Found = list[tuple[int, Gathered]]
"""Parts, each with its blocks as the bits of a number."""


def gather(blocks: Sequence[Block], seen: Sequence[Seen]) -> tuple[Found, list[Seen]]:
    """Gather the cells that single queries see, where a part for them would cost more.

    Return what is gathered, and the rest of `seen`.
    """
    single = sum(1 << number for number, block in enumerate(blocks) if block.num_queries == 1)
    runs: defaultdict[int, list[Run]] = defaultdict(list)
    may_be = {one for one in seen if not one.blocks & ~single and _is_worth_copying(one)}
    for one in seen:
        for number in one.numbers if one in may_be else ():
            runs[number].append(one.cells)
    short = {number: _cells(own) for number, own in runs.items() if _is_short(own)}
    if len(short) < 2:
        return [], list(seen)
    taken = sum(1 << number for number in short)
    rest = [Seen(one.cells, one.blocks & ~taken) if one in may_be else one for one in seen]
    return _by_length(blocks, short), [one for one in rest if one.blocks]


def gather_scattered(cells: Cells, blocks: Sequence[Block]) -> Found | None:
    """Gather all that the blocks see which lie in too many pieces to list.

    Return None if one product of all blocks is faster, or if one of these has several queries.
    """
    found: dict[int, Ints] = {}
    for number, block in enumerate(blocks):
        if block.seen is None:
            if block.num_queries > 1:
                return None
            found[number] = cells.seen_by(block.sequence, block.position)
    parts = _by_length(blocks, found)
    if not parts:
        return []
    first = min(int(own[0]) for own in found.values())
    end = max(int(own[-1]) + 1 for own in found.values())
    in_one = PART_COST + sum(block.num_queries for block in blocks) * (end - first)
    copied = sum(part.cells.size for _, part in parts)
    is_faster = sum(cost_of(part) for _, part in parts) < in_one
    return parts if is_faster and copied <= MOST_GATHERED else None


def cost_of(part: Gathered) -> int:
    """Return the cost of a part, in pairs of query and cell."""
    return PART_COST + (1 + COPY_COST) * part.cells.size


def _is_worth_copying(one: Seen) -> bool:
    """Return True if one query sees the cells, or if a copy for each costs less than a part."""
    sharers = one.blocks.bit_count()
    return sharers == 1 or COPY_COST * sharers * (one.cells.end - one.cells.begin) < PART_COST


def _is_short(runs: Sequence[Run]) -> bool:
    """Return True if copying the cells costs less than a part for them."""
    return COPY_COST * sum(run.end - run.begin for run in runs) < PART_COST


def _cells(runs: Sequence[Run]) -> Ints:
    return np.concatenate([np.arange(*run, dtype=np.int32) for run in runs])


def _by_length(blocks: Sequence[Block], cells: Mapping[int, Ints]) -> Found:
    """Return one part for the blocks whose `cells` are about as many."""
    groups: defaultdict[int, dict[int, Ints]] = defaultdict(dict)
    for number, own in cells.items():
        groups[max(SHORTEST, 1 << (len(own) - 1).bit_length())][number] = own
    return [
        (sum(1 << number for number in group), _gathered(blocks, group))
        for group in groups.values()
    ]


def _gathered(blocks: Sequence[Block], cells: Mapping[int, Ints]) -> Gathered:
    queries = tuple(blocks[number].begin for number in cells)
    lengths = np.array([len(own) for own in cells.values()])
    visible = np.arange(lengths.max()) < lengths[:, None]
    padded = np.zeros(visible.shape, np.int32)
    padded[visible] = np.concatenate(list(cells.values()))
    return Gathered(queries, padded, None if visible.all() else visible)
