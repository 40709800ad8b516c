"""Split the attention of a step into products over the cells that its queries really see.

Bookkeeping only: numpy, no tensors, and no mask of all queries and all cells.

A long piece of a prompt attends by itself: its own cells, in the order of their positions, need no
mask. Of all other queries, those that see the same cells read them together, once: what all share,
what a group shares, and what each has alone. Single queries whose sequences have lanes of one size
are one part: such a stretch of the buffer is a batch already, without any copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from mlxrunner.cache.shared.cells import Cells
from mlxrunner.cache.shared.gather import cost_of, gather, gather_scattered
from mlxrunner.cache.shared.parts import (
    PART_COST,
    AnyPart,
    Block,
    Gathered,
    Level,
    Own,
    Part,
    Seen,
    Split,
    StackedParts,
)
from mlxrunner.cache.shared.runs import Run
from mlxrunner.cache.shared.sequences import Batch
from mlxrunner.cache.shared.sight import Bools
from mlxrunner.cache.shared.stretches import between

WORTH_SPLITTING = 1.2
"""Smallest ratio of the cost of one product to that of its parts at which it is split."""
MOST_SHARED = 2**20
"""Most pairs of query and cell in a part that several sequences share.

Its scores are held in memory.
"""
LONG = 64
"""Fewest tokens of a piece that attends by itself. It reads what it shares once more."""


def blocks_of(cells: Cells, batch: Batch) -> list[Block] | None:
    """Return the blocks of a placed batch; None if its tokens are in no such order."""
    if batch.is_plain:
        return [_block(cells, batch, 0, len(batch))]
    positions, sequences = np.array(batch.positions, np.int32), np.array(batch.sequences)
    is_other = sequences[1:] != sequences[:-1]
    borders = [0, *(np.flatnonzero(is_other) + 1).tolist(), len(batch)]
    in_order = (positions[1:] == positions[:-1] + 1) | is_other
    if not in_order.all() or len(borders) > len(batch.by_sequence) + 1:
        return None
    return [_block(cells, batch, begin, end) for begin, end in pairwise(borders)]


def _block(cells: Cells, batch: Batch, begin: int, end: int) -> Block:
    sequence, position = batch.sequences[begin], batch.positions[begin]
    known, low = cells.stretches(sequence), 0
    if cells.sight.is_limited:
        low = int(cells.sight.first_seen(np.array([position], np.int32))[0])
    seen = None if known is None else between(known, low, position + end - begin)
    return Block(begin, end, sequence, position, seen)


def split(
    cells: Cells, batch: Batch, blocks: Sequence[Block], worth: float = WORTH_SPLITTING
) -> Split | None:
    """Split the attention of a placed batch; return None if one product is faster.

    `worth`: the smallest ratio of costs at which the product is split.
    """
    own = tuple(_own(cells, block) for block in blocks if block.num_queries >= LONG)
    levels = _levels(cells, [block for block in blocks if block.num_queries < LONG])
    parts = [part for level in levels for part in level]
    if not own and len(parts) == 1 and isinstance(parts[0], Part):
        return None
    span = history_of(cells, batch, blocks)
    cost = sum(_cost_of_own(piece) for piece in own) + sum(map(_cost_of, parts))
    return None if len(batch) * (span.end - span.begin) < worth * cost else Split(own, levels)


def history_of(cells: Cells, batch: Batch, blocks: Sequence[Block] | None) -> Run:
    """Return the cells from the first to the last that a placed batch sees."""
    seen = [] if blocks is None else [block.seen for block in blocks]
    stretches = [stretch for found in seen if found is not None for stretch in found]
    if not stretches or None in seen:
        return cells.history(batch)
    return Run(min(each.begin for each in stretches), max(each.end for each in stretches))


def _own(cells: Cells, block: Block) -> Own:
    """Return a long block: its cells in the order of positions, with a mask if it needs one."""
    queries = np.arange(block.position, block.position + block.num_queries, dtype=np.int32)
    first = cells.sight.first_seen(queries)
    if block.seen is None:
        held, positions = cells.owners[block.sequence], cells.positions
        found = np.flatnonzero(held & (positions >= first[0]) & (positions <= queries[-1]))
        found = found[np.argsort(positions[found], kind="stable")]
    else:
        in_order = sorted(block.seen, key=lambda stretch: stretch.position)
        found = np.concatenate([np.arange(each.begin, each.end) for each in in_order])
    positions = cells.positions[found]
    is_causal = (np.diff(positions) == 1).all() and first[-1] <= positions[0]
    visible = None if is_causal else (positions <= queries[:, None]) & (positions >= first[:, None])
    return Own(block.begin, block.end, found.astype(np.int32), visible)


def _levels(cells: Cells, blocks: Sequence[Block]) -> tuple[Level, ...]:
    """Return the parts of short blocks, those with the most queries first."""
    if not blocks:
        return ()
    levels: list[tuple[int, list[AnyPart]]] = []
    for bits, part in sorted(_all_parts(cells, blocks), key=lambda pair: -pair[0].bit_count()):
        for index, (taken, level) in enumerate(levels):
            if not taken & bits:
                levels[index] = taken | bits, [*level, part]
                break
        else:
            levels.append((bits, [part]))
    return tuple(tuple(level) for _, level in levels)


def _all_parts(cells: Cells, blocks: Sequence[Block]) -> list[tuple[int, AnyPart]]:
    """Return the parts, each with its blocks as the bits of a number."""
    scattered = gather_scattered(cells, blocks)
    if scattered is None:
        return [_all_at_once(cells, blocks)]
    seen = [[Run(each.begin, each.end) for each in block.seen or ()] for block in blocks]
    rows = [block.num_queries for block in blocks]
    stacks, rest = _stacks(cells, blocks, _overlaps(seen))
    joined = _joined(rest, rows)
    gathered, others = gather(blocks, rest)
    if gathered:
        without = _joined(others, rows)
        copied = sum(cost_of(part) for _, part in gathered)
        if copied + _cost_of_joined(without, rows) < _cost_of_joined(joined, rows):
            return [*scattered, *stacks, *gathered, *_parts(cells, blocks, without)]
    return [*scattered, *stacks, *_parts(cells, blocks, joined)]


def _overlaps(seen: Sequence[Sequence[Run]]) -> list[Seen]:
    """Return the cells that any of the blocks sees, wherever another set of blocks sees them."""
    changes: defaultdict[int, int] = defaultdict(int)
    for number, runs in enumerate(seen):
        for run in runs:
            changes[run.begin] ^= 1 << number
            changes[run.end] ^= 1 << number
    found, blocks = [], 0
    for begin, end in pairwise([*sorted(changes), 0]):
        blocks ^= changes[begin]
        if blocks:
            found.append(Seen(Run(begin, end), blocks))
    return found


def _stacks(
    cells: Cells, blocks: Sequence[Block], seen: Sequence[Seen]
) -> tuple[list[tuple[int, StackedParts]], list[Seen]]:
    """Stack what single queries see alone in even lanes of one size. Return the rest, too."""
    in_lanes: defaultdict[int, dict[int, list[Run]]] = defaultdict(dict)
    rest = []
    for one in seen:
        number = one.blocks.bit_length() - 1
        lane = cells.lanes.get(blocks[number].sequence)
        if (
            lane is None
            or not lane.is_even
            or one.blocks.bit_count() > 1
            or blocks[number].num_queries > 1
            or not lane.run.begin <= one.cells.begin < one.cells.end <= lane.run.end
        ):
            rest.append(one)
        else:
            size = lane.run.end - lane.run.begin
            in_lanes[size].setdefault(number, []).append(one.cells)
    stacks = []
    for size, members in in_lanes.items():
        begins = {number: cells.lanes[blocks[number].sequence].run.begin for number in members}
        first, last = min(begins.values()), max(begins.values())
        count = (last - first) // size + 1
        if len(members) > 1 and count <= 2 * len(members):
            bits = sum(1 << number for number in members)
            stacks.append((bits, _stacked(blocks, members, begins, Run(first, size), count)))
        else:
            rest += [Seen(run, 1 << number) for number, runs in members.items() for run in runs]
    return stacks, sorted(rest)


def _stacked(
    blocks: Sequence[Block],
    members: dict[int, list[Run]],
    begins: dict[int, int],
    lanes: tuple[int, int],
    count: int,
) -> StackedParts:
    """Stack `members`, the cells that each block sees in its lane, which begins at `begins`.

    `lanes`: the first cell of the first lane, and the size of each. `count`: number of lanes.
    """
    first, size = lanes
    length = max(runs[-1].end - begins[number] for number, runs in members.items())
    queries, visible = [blocks[min(members)].begin] * count, np.zeros((count, length), np.bool_)
    wanted = []
    for number, runs in members.items():
        index = (begins[number] - first) // size
        queries[index] = blocks[number].begin
        wanted.append(index)
        for run in runs:
            visible[index, run.begin - begins[number] : run.end - begins[number]] = True
    mask = None if visible.all() else visible
    return StackedParts(tuple(queries), tuple(sorted(wanted)), first, size, length, mask)


Joined = list[tuple[Seen, list[Seen]]]
"""Runs of cells, each with those that it was joined from."""


def _joined(seen: Sequence[Seen], rows: Sequence[int]) -> Joined:
    """Join neighbours where one product is less work. `rows`: the queries of each block."""
    joined: Joined = []
    for one in seen:
        if joined:
            last, members = joined[-1]
            both = Seen(Run(last.cells.begin, one.cells.end), last.blocks | one.blocks)
            if _pairs(both, rows) <= PART_COST + _pairs(last, rows) + _pairs(one, rows):
                joined[-1] = both, [*members, one]
                continue
        joined.append((one, [one]))
    return joined


def _cost_of_joined(joined: Joined, rows: Sequence[int]) -> int:
    return sum(PART_COST + _pairs(whole, rows) for whole, _ in joined)


def _parts(cells: Cells, blocks: Sequence[Block], joined: Joined) -> list[tuple[int, AnyPart]]:
    rows = [block.num_queries for block in blocks]
    return [
        (part.blocks, _part(cells, blocks, part, members))
        for whole, members in joined
        for part in _small_enough(whole, rows)
    ]


def _small_enough(seen: Seen, rows: Sequence[int]) -> list[Seen]:
    """Divide the blocks that see some cells, so that no part has too many scores."""
    most = max(1, MOST_SHARED // (seen.cells.end - seen.cells.begin))
    found, count = [], most
    for number in seen.numbers:
        if count + rows[number] > most:
            found.append(0)
            count = 0
        found[-1] |= 1 << number
        count += rows[number]
    return [Seen(seen.cells, bits) for bits in found]


def _part(cells: Cells, blocks: Sequence[Block], whole: Seen, members: Sequence[Seen]) -> Part:
    """Return a part over `members`, which lie in the run of `whole`, for the blocks of `whole`."""
    run, own = whole.cells, [blocks[number] for number in whole.numbers]
    queries = tuple(query for block in own for query in range(block.begin, block.end))
    if len(members) == 1 and len(queries) == len(own):
        return Part(queries, run, None)
    visible = np.zeros((len(queries), run.end - run.begin), np.bool_)
    row = 0
    for number, block in zip(whole.numbers, own, strict=True):
        rows = visible[row : row + block.num_queries]
        for one in members:
            rows[:, one.cells.begin - run.begin : one.cells.end - run.begin] = (
                one.blocks >> number & 1
            )
        if block.num_queries > 1:
            rows &= _visible(cells, block, run)
        row += block.num_queries
    return Part(queries, run, None if visible.all() else visible)


def _visible(cells: Cells, block: Block, run: Run) -> Bools:
    queries = np.arange(block.position, block.position + block.num_queries, dtype=np.int32)
    return cells.visible(queries, np.full_like(queries, block.sequence), run)


def _all_at_once(cells: Cells, blocks: Sequence[Block]) -> tuple[int, Part]:
    """Return one part for all blocks, where the cells of some are scattered."""
    masks = [_visible(cells, block, Run(0, cells.num_cells)) for block in blocks]
    visible = np.concatenate(masks)
    seen = np.flatnonzero(visible.any(axis=0))
    run = Run(int(seen[0]), int(seen[-1]) + 1)
    queries = tuple(query for block in blocks for query in range(block.begin, block.end))
    return (1 << len(blocks)) - 1, Part(queries, run, visible[:, run.begin : run.end])


def _pairs(seen: Seen, rows: Sequence[int]) -> int:
    """Return the pairs of query and cell in one product over `seen`."""
    count = sum(rows[number] for number in seen.numbers)
    return count * (seen.cells.end - seen.cells.begin)


def _cost_of(part: AnyPart) -> int:
    if isinstance(part, Gathered):
        return cost_of(part)
    length = part.cells.end - part.cells.begin if isinstance(part, Part) else part.length
    return PART_COST + len(part.queries) * length


def _cost_of_own(piece: Own) -> int:
    return PART_COST + (piece.end - piece.begin) * len(piece.cells)
