"""Split the attention of a step into products over the cells that its queries really see.

Bookkeeping only: numpy, no tensors, and no mask of all queries and all cells.

A long piece of a prompt attends by itself: its own cells, in the order of their positions, need no
mask. Of all other queries, those that see the same cells read them together, once: what all share,
what a group shares, and what each has alone. Single queries whose sequences have reservations of
one size are one part: such a span of the buffer is a batch already, without any copy.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mlxrunner.cache.pool.cell_table import Bools, CellRun, Ints, Spans, between, cells_in
from mlxrunner.cache.pool.cells import KVPool, are_near
from mlxrunner.cache.protocol import Batch

PART_COST = 500
"""Fixed cost of a part, in pairs of query and cell.

Measured on a CPU by benchmarks/parallel.py; larger models have a lower cost.
"""


class Block(NamedTuple):
    """The queries `begin .. end - 1` of a step: tokens of one sequence, one after another."""

    begin: int
    end: int
    sequence: int
    position: int
    """The position of the first token."""
    seen: Spans | None
    """The cells that any of the queries sees; None: too many pieces to list."""

    @property
    def num_queries(self) -> int:
        return self.end - self.begin

    @property
    def is_alone(self) -> bool:
        """True if the queries attend by themselves: they are many, or their cells are scattered."""
        return self.num_queries >= (LONG if self.seen is not None else 2)


class Own(NamedTuple):
    """The queries `begin .. end - 1`, which attend by themselves."""

    begin: int
    end: int
    cells: Ints
    """All that they see, in the order of positions."""
    visible: Bools | None
    """The mask `[queries, cells]`; None: each sees all cells up to its own."""


class SplitPart(NamedTuple):
    """Some queries, and a run of cells that they see."""

    queries: tuple[int, ...]
    cells: CellRun
    visible: Bools | None
    """The mask `[queries, cells]`; None: all are visible."""


class StackedParts(NamedTuple):
    """One query for each of many reservations that follow each other."""

    queries: tuple[int, ...]
    """Indices of the queries, one per reservation.

    `queries[i]` sees some of the first cells of reservation i.
    """
    wanted: tuple[int, ...]
    """Indices of the reservations whose results are used.

    Each other reservation gets one of the queries, which sees nothing of it.
    """
    begin: int
    """The first cell of the first reservation."""
    size: int
    """Number of cells of each reservation."""
    length: int
    """Most cells that a query sees."""
    visible: Bools | None
    """The mask `[reservations, length]`; None: all are visible."""


class Gathered(NamedTuple):
    """One query of each of some sequences, whose cells lie anywhere and are copied."""

    queries: tuple[int, ...]
    cells: Ints
    """The cells that each query sees, `[queries, length]`, filled up with any others."""
    visible: Bools | None
    """The mask `[queries, length]`; None: all are visible."""


AnyPart = SplitPart | StackedParts | Gathered
Level = tuple[AnyPart, ...]
"""Parts of which each query is in at most one."""


class Split(NamedTuple):
    """Attention in parts.

    Each query is in one of `own`, or in one part or more of different `levels`.
    """

    own: tuple[Own, ...]
    levels: tuple[Level, ...]


class SeenCells(NamedTuple):
    """A run of cells, and which blocks see them, as the bits of a number."""

    cells: CellRun
    blocks: int

    @property
    def numbers(self) -> list[int]:
        """The numbers of the blocks."""
        found, blocks = [], self.blocks
        while blocks:
            found.append(blocks.bit_length() - 1)
            blocks ^= 1 << found[-1]
        return found[::-1]


COPY_COST = 3
"""Cost of copying the keys and values of a cell, in pairs of query and cell."""
SHORTEST = 128
"""Sequences with up to this many cells are one part; longer ones are, if they are as long."""
MOST_GATHERED = 2**15
"""Most cells that a step copies at once."""

Found = list[tuple[int, Gathered]]
"""Parts, each with its blocks as the bits of a number."""


def gather(blocks: Sequence[Block], seen: Sequence[SeenCells]) -> tuple[Found, list[SeenCells]]:
    """Gather the cells that single queries see, where a part for them would cost more.

    Return what is gathered, and the rest of `seen`.
    """
    single = sum(1 << number for number, block in enumerate(blocks) if block.num_queries == 1)
    runs: defaultdict[int, list[CellRun]] = defaultdict(list)
    may_be = {one for one in seen if not one.blocks & ~single and _is_worth_copying(one)}
    for one in seen:
        for number in one.numbers if one in may_be else ():
            runs[number].append(one.cells)
    short = {
        number: _cells(own)
        for number, own in runs.items()
        if COPY_COST * sum(run.end - run.begin for run in own) < PART_COST
    }
    if len(short) < 2:
        return [], list(seen)
    taken = sum(1 << number for number in short)
    rest = [SeenCells(one.cells, one.blocks & ~taken) if one in may_be else one for one in seen]
    return _by_length(blocks, short), [one for one in rest if one.blocks]


def gather_scattered(cells: KVPool, blocks: Sequence[Block]) -> list[tuple[int, AnyPart]]:
    """Return parts for the single queries whose cells lie in too many pieces to list.

    The cells are gathered, unless one product over all from the first to the last is faster or they
    are too many.
    """
    found = {
        number: cells.seen_by(block.sequence, block.position, block.position)
        for number, block in enumerate(blocks)
        if block.seen is None
    }
    if not found:
        return []
    parts = _by_length(blocks, found)
    run = CellRun(
        min(int(own[0]) for own in found.values()), max(int(own[-1]) + 1 for own in found.values())
    )
    copied = sum(part.cells.size for _, part in parts)
    in_one = PART_COST + len(found) * (run.end - run.begin)
    if copied <= MOST_GATHERED and sum(cost_of(part) for _, part in parts) < in_one:
        return [*parts]
    visible = np.concatenate([_visible(cells, blocks[number], run) for number in found])
    queries = tuple(blocks[number].begin for number in found)
    return [(sum(1 << number for number in found), SplitPart(queries, run, visible))]


def cost_of(part: Gathered) -> int:
    """Return the cost of a part, in pairs of query and cell."""
    return PART_COST + (1 + COPY_COST) * part.cells.size


def _is_worth_copying(one: SeenCells) -> bool:
    """Return True if one query sees the cells, or if a copy for each costs less than a part."""
    sharers = one.blocks.bit_count()
    return sharers == 1 or COPY_COST * sharers * (one.cells.end - one.cells.begin) < PART_COST


def _cells(runs: Sequence[CellRun]) -> Ints:
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


WORTH_SPLITTING = 1.2
"""Smallest ratio of the cost of one product to that of its parts at which it is split."""
MOST_SHARED = 2**20
"""Most pairs of query and cell in a part that several sequences share.

Its scores are held in memory.
"""
LONG = 64
"""Fewest tokens of a piece that attends by itself. It reads what it shares once more."""


def blocks_of(cells: KVPool, batch: Batch) -> list[Block] | None:
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


def _block(cells: KVPool, batch: Batch, begin: int, end: int) -> Block:
    sequence, position = batch.sequences[begin], batch.positions[begin]
    known, low = cells.spans(sequence), 0
    if cells.window.is_limited:
        low = int(cells.window.first_seen(np.array([position], np.int32))[0])
    seen = None if known is None else between(known, low, position + end - begin)
    return Block(begin, end, sequence, position, seen)


def split(
    cells: KVPool, batch: Batch, blocks: Sequence[Block], worth: float = WORTH_SPLITTING
) -> Split | None:
    """Split the attention of a placed batch; return None if one product is faster.

    `worth`: the smallest ratio of costs at which the product is split.
    """
    own = tuple(_own(cells, block) for block in blocks if block.is_alone)
    levels = _levels(cells, [block for block in blocks if not block.is_alone])
    parts = [part for level in levels for part in level]
    if not own and len(parts) == 1 and isinstance(parts[0], SplitPart):
        return None
    span = history_of(cells, batch, blocks)
    cost = sum(PART_COST + (one.end - one.begin) * len(one.cells) for one in own)
    cost += sum(map(_cost_of, parts))
    return None if len(batch) * (span.end - span.begin) < worth * cost else Split(own, levels)


def largest_splits(tokens: int, sequences: int, num_cells: int, longest: int) -> list[Split]:
    """Return splits that take at least the memory of any other of a step.

    `tokens`: those of the step. `sequences`: most that it carries. `num_cells`: those of the pool.
    `longest`: most cells that a token sees, of its own sequence.
    """
    # A product over all parts is taken where it costs less than WORTH_SPLITTING times the parts.
    pairs = tokens * longest + sequences * (num_cells + PART_COST) + (1 + COPY_COST) * MOST_GATHERED
    seen = min(num_cells, math.ceil(WORTH_SPLITTING * pairs / tokens))
    cells = np.arange(seen - 1, -1, -1, dtype=np.int32)
    own = Own(0, tokens, cells, np.ones((tokens, seen), np.bool_))
    longest = min(longest, num_cells)
    most = min(tokens, sequences * (LONG - 1), max(1, MOST_SHARED // longest))
    sharing = tuple(range(most))
    run, rest = CellRun(0, longest), Own(most, tokens, cells[:1], None)
    part = SplitPart(sharing, run, np.ones((most, longest), np.bool_))
    shared = Split((rest,) if most < tokens else (), ((part,), (part,)))
    return [Split((own,), ()), shared]


def history_of(cells: KVPool, batch: Batch, blocks: Sequence[Block] | None) -> CellRun:
    """Return the cells from the first to the last that a placed batch sees."""
    seen = [] if blocks is None else [block.seen for block in blocks]
    spans = [span for found in seen if found is not None for span in found]
    if not spans or None in seen:
        return cells.history(batch)
    return CellRun(min(each.begin for each in spans), max(each.end for each in spans))


def _own(cells: KVPool, block: Block) -> Own:
    """Return a long block: its cells in the order of positions, with a mask if it needs one."""
    queries = np.arange(block.position, block.position + block.num_queries, dtype=np.int32)
    first = cells.window.first_seen(queries)
    if block.seen is None:
        found = cells.seen_by(block.sequence, int(queries[0]), int(queries[-1]))
        found = found[np.argsort(cells.positions_of(found), kind="stable")]
    else:
        in_order = sorted(block.seen, key=lambda span: span.position)
        found = cells_in(in_order)
    positions = cells.positions_of(found)
    is_causal = (np.diff(positions) == 1).all() and first[-1] <= positions[0]
    visible = None if is_causal else (positions <= queries[:, None]) & (positions >= first[:, None])
    return Own(block.begin, block.end, found.astype(np.int32), visible)


def _levels(cells: KVPool, blocks: Sequence[Block]) -> tuple[Level, ...]:
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


def _all_parts(cells: KVPool, blocks: Sequence[Block]) -> list[tuple[int, AnyPart]]:
    """Return the parts, each with its blocks as the bits of a number."""
    scattered = gather_scattered(cells, blocks)
    seen = [[CellRun(each.begin, each.end) for each in block.seen or ()] for block in blocks]
    rows = RowCounts(blocks)
    stacks, rest = _stacks(cells, blocks, _overlaps(seen))
    joined = _joined(rest, rows)
    gathered, others = gather(blocks, rest)
    if gathered:
        without = _joined(others, rows)
        copied = sum(cost_of(part) for _, part in gathered)
        if copied + _cost_of_joined(without, rows) < _cost_of_joined(joined, rows):
            return [*scattered, *stacks, *gathered, *_parts(cells, blocks, without)]
    return [*scattered, *stacks, *_parts(cells, blocks, joined)]


def _overlaps(seen: Sequence[Sequence[CellRun]]) -> list[SeenCells]:
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
            found.append(SeenCells(CellRun(begin, end), blocks))
    return found


def _stacks(
    cells: KVPool, blocks: Sequence[Block], seen: Sequence[SeenCells]
) -> tuple[list[tuple[int, StackedParts]], list[SeenCells]]:
    """Stack what single queries see in even reservations of one size. Return the rest, too."""
    by_size: defaultdict[int, dict[int, list[CellRun]]] = defaultdict(dict)
    rest = []
    for one in seen:
        number = one.blocks.bit_length() - 1
        reservation = cells.reservations.get(blocks[number].sequence)
        if (
            reservation is None
            or not reservation.is_even
            or one.blocks.bit_count() > 1
            or blocks[number].num_queries > 1
            or not reservation.run.begin <= one.cells.begin < one.cells.end <= reservation.run.end
        ):
            rest.append(one)
        else:
            size = reservation.run.end - reservation.run.begin
            by_size[size].setdefault(number, []).append(one.cells)
    stacks = []
    for size, members in by_size.items():
        begins = {
            number: cells.reservations[blocks[number].sequence].run.begin for number in members
        }
        for group in _neighbours(begins, size):
            some = {number: members[number] for number in group}
            if len(group) > 1:
                bits = sum(1 << number for number in group)
                stacks.append((bits, _stacked(blocks, some, begins, size)))
            else:
                rest += [SeenCells(run, 1 << group[0]) for run in some[group[0]]]
    return stacks, sorted(rest)


def _neighbours(begins: Mapping[int, int], size: int) -> list[list[int]]:
    """Return the blocks in groups whose reservations of `size` cells are read as one batch."""
    groups: list[list[int]] = []
    for number in sorted(begins, key=lambda number: begins[number]):
        if groups and are_near([begins[one] for one in (*groups[-1], number)], size):
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


def _stacked(
    blocks: Sequence[Block],
    members: dict[int, list[CellRun]],
    begins: Mapping[int, int],
    size: int,
) -> StackedParts:
    """Stack `members`, the cells that each block sees in its reservation of `size` cells.

    `begins`: the first cell of each reservation.
    """
    first, last = (edge(begins[number] for number in members) for edge in (min, max))
    count = (last - first) // size + 1
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


class RowCounts:
    """The queries of some blocks, counted by the bits of a number."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.each = [block.num_queries for block in blocks]
        self._more = [(1 << number, one - 1) for number, one in enumerate(self.each) if one > 1]

    def of(self, blocks: int) -> int:
        """Return how many queries `blocks` have."""
        return blocks.bit_count() + sum([more for bit, more in self._more if blocks & bit])

    def pairs(self, seen: SeenCells) -> int:
        """Return the pairs of query and cell in one product over `seen`."""
        return self.of(seen.blocks) * (seen.cells.end - seen.cells.begin)


Joined = list[tuple[SeenCells, list[SeenCells]]]
"""Runs of cells, each with those that it was joined from."""


def _joined(seen: Sequence[SeenCells], rows: RowCounts) -> Joined:
    """Join neighbours where one product is less work."""
    joined: Joined = []
    before = 0  # the pairs of the last one
    for one in seen:
        pairs = rows.pairs(one)
        if joined:
            last, members = joined[-1]
            both = SeenCells(CellRun(last.cells.begin, one.cells.end), last.blocks | one.blocks)
            together = rows.pairs(both)
            if together <= PART_COST + before + pairs:
                joined[-1], before = (both, [*members, one]), together
                continue
        joined.append((one, [one]))
        before = pairs
    return joined


def _cost_of_joined(joined: Joined, rows: RowCounts) -> int:
    return sum(PART_COST + rows.pairs(whole) for whole, _ in joined)


def _parts(cells: KVPool, blocks: Sequence[Block], joined: Joined) -> list[tuple[int, AnyPart]]:
    rows = RowCounts(blocks)
    return [
        (part.blocks, _part(cells, blocks, part, members))
        for whole, members in joined
        for part in _small_enough(whole, rows)
    ]


def _small_enough(seen: SeenCells, rows: RowCounts) -> list[SeenCells]:
    """Divide the blocks that see some cells, so that no part has too many scores."""
    most = max(1, MOST_SHARED // (seen.cells.end - seen.cells.begin))
    if rows.of(seen.blocks) <= most:
        return [seen]
    found, count = [], most
    for number in seen.numbers:
        if count + rows.each[number] > most:
            found.append(0)
            count = 0
        found[-1] |= 1 << number
        count += rows.each[number]
    return [SeenCells(seen.cells, bits) for bits in found]


def _part(
    cells: KVPool, blocks: Sequence[Block], whole: SeenCells, members: Sequence[SeenCells]
) -> SplitPart:
    """Return a part over `members`, which lie in the run of `whole`, for the blocks of `whole`."""
    run, own = whole.cells, [blocks[number] for number in whole.numbers]
    queries = tuple(query for block in own for query in range(block.begin, block.end))
    if len(members) == 1 and len(queries) == len(own):
        return SplitPart(queries, run, None)
    visible = np.zeros((len(queries), run.end - run.begin), np.bool_)
    ends = np.cumsum([block.num_queries for block in own]).tolist()
    rows = dict(zip(whole.numbers, map(slice, [0, *ends], ends), strict=False))
    for one in members:
        columns = slice(one.cells.begin - run.begin, one.cells.end - run.begin)
        for number in SeenCells(run, one.blocks & whole.blocks).numbers:
            visible[rows[number], columns] = True
    for number, block in zip(whole.numbers, own, strict=True):
        if block.num_queries > 1:
            visible[rows[number]] &= _visible(cells, block, run)
    return SplitPart(queries, run, None if visible.all() else visible)


def _visible(cells: KVPool, block: Block, run: CellRun) -> Bools:
    queries = np.arange(block.position, block.position + block.num_queries, dtype=np.int32)
    return cells.visible(queries, np.full_like(queries, block.sequence), run)


def _cost_of(part: AnyPart) -> int:
    if isinstance(part, Gathered):
        return cost_of(part)
    length = part.cells.end - part.cells.begin if isinstance(part, SplitPart) else part.length
    return PART_COST + len(part.queries) * length


class Alone(NamedTuple):
    """One sequence, whose cells lie side by side in order: attention as with a cache of its own.

    Those of a single query may have gaps between them, and any order.
    """

    cells: CellRun
    visible: Bools | None
    """The mask `[queries, cells]`; None: each query sees all cells up to its own."""


@dataclass(frozen=True)
class Forward:
    """A pass of a `batch` that was placed in `places`, and `cells` as they are then."""

    batch: Batch
    cells: KVPool
    places: Ints | None
    """The cell of each token; None in a reserve pass, which sees all cells and stores nothing."""
    all_rows: CellRun
    """The rows of the buffers."""

    @cached_property
    def blocks(self) -> list[Block] | None:
        return None if self.places is None else blocks_of(self.cells, self.batch)

    @cached_property
    def history(self) -> CellRun:
        """The rows from the first to the last that the batch sees."""
        if self.places is None:
            return self.all_rows
        return history_of(self.cells, self.batch, self.blocks)

    @cached_property
    def visible(self) -> Bools:
        """The mask `[n_tokens, history]`: True where a token sees a cell."""
        if self.places is None:
            return np.ones((len(self.batch), self.all_rows.end), np.bool_)
        return self.cells.mask(self.batch, self.history)

    @cached_property
    def alone(self) -> Alone | None:
        """The cells of the batch's only sequence, if one product over them is least work."""
        if (
            self.places is None
            or self.blocks is None
            or len(self.blocks) > 1
            or not (seen := self.blocks[0].seen)
        ):
            return None
        run, queries = CellRun(seen[0].begin, seen[-1].end), len(self.batch)
        if sum(span.end - span.begin for span in seen) < run.end - run.begin:
            return _with_gaps(run, seen) if queries == 1 else None
        if queries == 1:  # sees them in any order
            return Alone(run, None)
        if len(seen) > 1:
            return None
        first = self.cells.window.first_seen(np.array(self.batch.positions[-1:], np.int32))
        if first[0] <= seen[0].position:
            return Alone(run, None)
        return Alone(run, self.cells.mask(self.batch, run))

    def split(self, worth: float) -> Split | None:
        """Split the attention; return None if one product is faster, or may be all there is."""
        if self.blocks is None or self.alone is not None:
            return None
        return split(self.cells, self.batch, self.blocks, worth)


def _with_gaps(run: CellRun, seen: Spans) -> Alone | None:
    """Return the cells that a single query sees as one product; None if parts may be less work."""
    length = run.end - run.begin
    own = sum(span.end - span.begin for span in seen)
    if length >= WORTH_SPLITTING * (own + PART_COST * len(seen)):
        return None
    visible = np.zeros((1, length), np.bool_)
    for span in seen:
        visible[0, span.begin - run.begin : span.end - run.begin] = True
    return Alone(run, visible)
