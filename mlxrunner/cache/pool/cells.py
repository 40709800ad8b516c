"""The position and the owners of each cell. Bookkeeping only: numpy, no tensors.

A cell is one row of every layer's buffers. `KVPool` is a value: each operation returns the next
value, together with the plan for moving the rows, and changes nothing. Therefore a failed operation
leaves no trace, and keeping the old value undoes an operation.

Tokens that were stored one after another lie side by side. So a sequence of any length is mostly
one span, or two: the prefix that it shares, and its own tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mlxrunner.cache.pool.cell_table import (
    Bools,
    CellChange,
    CellRun,
    CellSpan,
    CellTable,
    CellVersion,
    Ints,
    Spans,
    between,
    breaks,
    cells_in,
    grown,
    num_covered,
    pieces,
    runs,
    runs_of,
    spans_of,
)
from mlxrunner.cache.protocol import END, Batch
from mlxrunner.errors import CacheFullError


@dataclass(frozen=True)
class AttentionWindow:
    """The range that a query sees, and the number of tokens that are stored for it."""

    window: int | None = None
    """Tokens that a query at position p sees, from p - window + 1 on; None: all."""
    memory: int | None = None
    """Tokens of a sequence that are kept, the next one included; at least `window`, the default.

    More than `window` tokens make small rewinds possible.
    """
    chunk: int | None = None
    """Tokens of a chunk, of which a query sees those up to its own; None: no chunks.

    A query at position p sees from p - p % chunk on.
    """

    def __post_init__(self) -> None:
        for name in ("window", "memory", "chunk"):
            if (size := getattr(self, name)) is not None and size < 1:
                raise ValueError(f"{name} has to be at least 1, not {size}")
        reach = self.chunk if self.window is None else self.window
        if self.memory is None:
            object.__setattr__(self, "memory", self.window)
        elif reach is None or self.memory < reach:
            raise ValueError(
                f"a memory of {self.memory} tokens does not hold what a query may see "
                f"({reach or 'everything'})"
            )

    @property
    def is_limited(self) -> bool:
        """True if a query may not see all tokens before it."""
        return self.window is not None or self.chunk is not None

    def first_seen(self, positions: Ints) -> Ints:
        """Return the first position that each query sees."""
        first = (
            np.zeros_like(positions) if self.chunk is None else positions - positions % self.chunk
        )
        return first if self.window is None else np.maximum(first, positions - (self.window - 1))

    def first_kept(self, positions: Ints) -> Ints:
        """Return the first position that is kept when a batch begins at each position."""
        return np.zeros_like(positions) if self.memory is None else positions - (self.memory - 1)

    def num_cells(self, max_sequences: int, capacity: int, max_batch: int) -> int:
        """Return the cells for `max_sequences` sequences of `capacity` tokens each.

        With a memory, each sequence needs only that, and one batch of `max_batch` tokens comes on
        top.
        """
        everything = max_sequences * capacity
        return (
            everything
            if self.memory is None
            else min(everything, max_sequences * self.memory + max_batch)
        )


class Move(NamedTuple):
    """Rows to move: those of the cells `sources`, in this order, to the cells from `begin` on.

    All rows are read before the first is written.
    """

    begin: int
    sources: Ints


class PositionShift(NamedTuple):
    """Tokens that change their position."""

    sources: Ints
    targets: Ints
    """The new cells of the tokens. Shared tokens get other cells than `sources`."""
    by: int
    """Number of positions to move by."""

    @property
    def copies(self) -> PositionShift:
        """The tokens that get another cell."""
        moved = self.sources != self.targets
        return PositionShift(self.sources[moved], self.targets[moved], self.by)


SHORT_PREFIX = 64
"""Most tokens of a shared prefix that a sequence copies, to read it with its own tokens.

Attention in two parts costs more than reading so few cells once for each sequence.
"""
MOST_MOVED = 512
"""Most tokens of a conversation that move to where a step reads them with those of others."""
MIN_RESERVATION = 32
"""Cells of the smallest reservation.

Other reservations are 2, 4, 8 ... times as large, so that sizes repeat.
"""


class Reservation(NamedTuple):
    """Cells reserved for a sequence, so that its next tokens lie side by side.

    Those of one size begin at multiples of it, so that a buffer can be seen as a row of equal
    pieces; but for those that lie after what the sequence has.
    """

    run: CellRun
    next: int
    """The first cell that is not taken yet."""

    @property
    def is_even(self) -> bool:
        """True if it begins at a multiple of its size."""
        return self.run.begin % (self.run.end - self.run.begin) == 0


def reserve(
    free: Bools,
    reservations: Iterable[Reservation],
    count: int,
    most: int,
    *,
    near: Iterable[Reservation] = (),
    together: int = 1,
) -> Reservation | None:
    """Return a reservation of `count` to `most` cells beside other `reservations`.

    It lies near those of its size among `near`, whose sequences run, so that a step reads all of
    them as one batch. If there are none, it is the first one with room for `together` such
    reservations side by side, or for as many as there are. Return None if there is no such room in
    the `free` cells.
    """
    if not 0 < count <= most:
        return None
    size = _reserved_size(count, most)
    pieces = len(free) // size
    free = _without(free, reservations)[: pieces * size]
    fitting = size * np.flatnonzero(free.reshape(pieces, size).all(axis=1))
    if not len(fitting):
        return None
    beside = _begins(near, size)
    if beside:
        apart = np.maximum(np.maximum(beside[0] - fitting, fitting - beside[-1]), 0)
        begin = int(fitting[np.argmin(apart)])
    else:
        edges = np.flatnonzero(np.diff(fitting, prepend=-size - 1) != size)
        lengths = np.minimum(np.diff(edges, append=len(fitting)), together)
        begin = int(fitting[edges[np.argmax(lengths)]])
    return Reservation(CellRun(begin, begin + size), begin)


def _reserved_size(count: int, most: int) -> int:
    """Return the number of cells of a reservation for `count` tokens."""
    return min(MIN_RESERVATION << max(0, (-(-count // MIN_RESERVATION) - 1).bit_length()), most)


def _begins(reservations: Iterable[Reservation], size: int) -> list[int]:
    """Return where the even reservations of `size` cells begin, the first one first."""
    runs = [each.run for each in reservations if each.is_even]
    return sorted(run.begin for run in runs if run.end - run.begin == size)


def are_near(begins: Sequence[int], size: int) -> bool:
    """Return True if reservations of `size` cells are worth reading as one batch.

    The batch has all that lie between the first and the last one.
    """
    return (max(begins) - min(begins)) // size + 1 <= 2 * len(begins)


def reserve_at(
    used: Bools, reservations: Iterable[Reservation], count: int, begin: int
) -> Reservation | None:
    """Return a reservation of `count` cells from `begin` on; None if one of them is taken."""
    end = begin + count
    if count <= 0 or end > len(used) or used[begin:end].any():
        return None
    if any(max(one.next, begin) < min(one.run.end, end) for one in reservations):
        return None
    return Reservation(CellRun(begin, end), begin)


def place_tokens(
    batch: Batch, used: Bools, given: Mapping[int, Reservation]
) -> tuple[Ints, dict[int, Reservation]] | None:
    """Return the cells of the batch, and the remaining ones of the `given` reservations.

    Return None if the tokens without a reservation find no room beside the reservations.
    """
    cells, reservations = [0] * len(batch), dict(given)
    others: list[int] = []
    for sequence, own in batch.by_sequence.items():
        reservation = reservations.pop(sequence, None)
        end = 0 if reservation is None else reservation.next + len(own)
        if (
            reservation is None
            or end > reservation.run.end
            or any(used[reservation.next : end].tolist())
        ):
            others += own
        else:
            _put(cells, own, reservation.next)
            reservations[sequence] = Reservation(reservation.run, end)
    if others:
        start = _first_fit(_without(~used, [given[each] for each in reservations]), len(others))
        if start is None:
            return None
        _put(cells, sorted(others), start)
    return np.array(cells, np.int32), reservations


def _put(cells: list[int], indices: Iterable[int], first: int) -> None:
    """Give the tokens `indices` the cells from `first` on, in order."""
    for cell, index in enumerate(indices, first):
        cells[index] = cell


def _without(free: Bools, reservations: Iterable[Reservation]) -> Bools:
    """Return the cells of `free` that are in no reservation."""
    free = free.copy()
    for reservation in reservations:
        free[reservation.next : reservation.run.end] = False
    return free


def _first_fit(free: Bools, n: int) -> int | None:
    """Return the first of `n` free cells side by side; None if there are none."""
    edges = np.flatnonzero(np.diff(free, prepend=False, append=False))
    fitting = np.flatnonzero(edges[1::2] - edges[::2] >= n)
    return int(edges[2 * fitting[0]]) if len(fitting) else None


class Placement(NamedTuple):
    """The cells of a batch, and the tokens before and after it."""

    before: KVPool
    """The tokens before the batch, with the rows moved."""
    after: KVPool
    """The tokens with those of the batch."""
    cells: Ints
    """The cells of the batch, `[n_tokens]`."""
    move: Move | None
    """Rows to move first; None if no row has to move."""


Cells = tuple[int, Ints]
"""A sequence, and some cells."""


class KVPool:
    """The tokens in the cells: a value, whose arrays lie in a table that its successors share."""

    def __init__(
        self,
        positions: Ints,
        owners: Bools,
        window: AttentionWindow | None = None,
        reservations: Mapping[int, Reservation] | None = None,
    ) -> None:
        """Make a pool whose table takes over the arrays.

        `positions [cells]`: the position of the token in each cell. `owners [sequences, cells]`:
        True where a sequence owns a cell. A cell without owners is free. `reservations` of some
        sequences are given up if a batch finds no other room.
        """
        self.window = window or AttentionWindow()
        self.reservations = reservations or {}
        num_owners: Ints = np.count_nonzero(owners, axis=0).astype(np.int32)
        self._cells, self._version = CellTable(positions, owners, num_owners), CellVersion()
        self._counts: Ints = np.count_nonzero(owners, axis=1).astype(np.int32)
        self._num_used = int(np.count_nonzero(self._cells.used))
        self._known: dict[int, Spans | None] = {}
        """The spans that were asked for; None: the sequence is scattered."""
        self._scattered: dict[int, Ints] = {}
        """The cells of scattered sequences that were asked for."""

    @classmethod
    def empty(cls, num_cells: int, max_sequences: int, window: AttentionWindow) -> KVPool:
        pool = cls(np.zeros(0, np.int32), np.zeros((max_sequences, 0), np.bool_), window)
        positions, num_owners = np.zeros((2, num_cells), np.int32)
        owners = np.zeros((max_sequences, num_cells), np.bool_)
        pool._cells = CellTable(positions, owners, num_owners)
        return pool

    @property
    def num_cells(self) -> int:
        return len(self._cells.positions)

    @property
    def max_sequences(self) -> int:
        return len(self._counts)

    @property
    def num_free(self) -> int:
        return self.num_cells - self._num_used

    @property
    def positions(self) -> Ints:
        """A copy of the position in each cell, `[cells]`."""
        return self._table.positions.copy()

    @property
    def owners(self) -> Bools:
        """A copy of the owners, `[sequences, cells]`."""
        return self._table.owners.copy()

    @property
    def _table(self) -> CellTable:
        """The arrays, which hold this value until another one is made, or asked for its own."""
        self._cells.become(self._version)
        return self._cells

    def positions_of(self, cells: Ints) -> Ints:
        """Return the positions of the tokens in `cells`."""
        return self._table.positions[cells]

    def num_own(self, sequence: int) -> int:
        """Return the number of cells that no other sequence owns."""
        return int(np.count_nonzero(self._table.num_owners[self._own(sequence)] == 1))

    def glance(self, sequence: int) -> int:
        """Return `num_own` of the value that the table has. Any thread may ask: nothing changes."""
        table, known = self._cells, self._known.get(sequence)
        own = table.owners[sequence] if known is None else cells_in(known)
        return int(np.count_nonzero(table.num_owners[own] == 1))

    def num_used_by(self, sequences: Iterable[int], prefix: tuple[int, int]) -> int:
        """Return the number of cells with tokens of any of `sequences`, or of a prefix.

        `prefix`: another sequence, and how many of its first tokens count.
        """
        other, length = prefix
        used = [run for sequence in sequences for run in self._runs(sequence)]
        return num_covered([*used, *self._runs(other, length)])

    def num_shared(self, sequence: int, others: Sequence[int], begin: int) -> int:
        """Return how many tokens of `sequence`, from `begin` on, any of `others` shares."""
        own = self._own(sequence)
        own = own[self.positions_of(own) >= begin]
        owners = self._table.owners[np.ix_(np.array(others, np.int32), own)]
        return int(np.count_nonzero(owners.any(axis=0)))

    def owners_of(self, cells: Ints) -> set[int]:
        """Return the sequences that own any of `cells`."""
        return {*map(int, np.flatnonzero(self._table.owners[:, cells].any(axis=1)))}

    @property
    def sequences(self) -> tuple[int, ...]:
        """The sequences that have tokens."""
        return tuple(np.flatnonzero(self._counts).tolist())

    def next_positions(self) -> Ints:
        """Return the next position of each sequence `[sequences]`; 0 for one without tokens."""
        return np.array([self._end(each) for each in range(self.max_sequences)], np.int32)

    def spans(self, sequence: int) -> Spans | None:
        """Return the cells of the sequence as spans; None if it is scattered."""
        if sequence not in self._known:
            self._own(sequence)
        return self._known[sequence]

    def _own(self, sequence: int) -> Ints:
        """Return the cells of a sequence, in their order."""
        if (known := self._known.get(sequence)) is not None:
            return cells_in(known)
        if (own := self._scattered.get(sequence)) is not None:
            return own
        own = np.flatnonzero(self._table.owners[sequence]).astype(np.int32)
        if sequence not in self._known:
            self._known[sequence] = spans_of(own, self._table.positions[own])
        if self._known[sequence] is None:
            self._scattered[sequence] = own
        return own

    def _runs(self, sequence: int, length: int = END) -> list[CellRun]:
        """Return the cells of the first `length` tokens of a sequence."""
        known = self.spans(sequence)
        if known is not None:
            return runs_of(between(known, 0, length))
        own = self._own(sequence)
        return runs(own[self.positions_of(own) < length])

    def _end(self, sequence: int) -> int:
        """Return the position after the last token of a sequence; 0 if it has none."""
        if not self._counts[sequence]:
            return 0
        known = self.spans(sequence)
        if known is not None:
            return max([at + end - begin for begin, end, at in known])
        return int(self.positions_of(self._own(sequence)).max()) + 1

    def holds(self, sequence: int, begin: int) -> bool:
        """Return True if the sequence has tokens at positions >= `begin`."""
        self.check_sequences(sequence)
        return self._end(sequence) > begin

    def stored(self, sequence: int) -> tuple[int, int]:
        """Return the positions `first, end` of the last run of tokens of `sequence`.

        Both are 0 if it has none.
        """
        self.check_sequences(sequence)
        stored = self.positions_of(self._own(sequence))
        if not len(stored):
            return 0, 0
        first, end = int(stored.min()), int(stored.max()) + 1
        if len(stored) == end - first:
            return first, end
        stored = np.unique(stored)
        gaps = np.flatnonzero(np.diff(stored) != 1)
        return int(stored[gaps[-1] + 1 if len(gaps) else 0]), int(stored[-1]) + 1

    def cells_of(self, sequence: int, begin: int, end: int) -> Ints:
        """Return the cells of the tokens `begin .. end - 1` of `sequence`, by position.

        Raise ValueError unless all of them are stored.
        """
        self.check_sequences(sequence)
        own = self._own(sequence)
        positions = self.positions_of(own)
        is_wanted = (positions >= begin) & (positions < end)
        own, positions = own[is_wanted], positions[is_wanted]
        if len(own) != max(0, end - begin):
            raise ValueError(
                f"{len(own)} of the tokens {begin} .. {end - 1} of sequence {sequence} are stored"
            )
        return own[np.argsort(positions)]

    def seen_by(self, sequence: int, first: int, last: int) -> Ints:
        """Return the cells that queries at positions `first .. last` see, by their order."""
        low = int(self.window.first_seen(np.array([first], np.int32))[0])
        own = self._own(sequence)
        positions = self.positions_of(own)
        seen: Ints = own[(positions >= low) & (positions <= last)]
        return seen

    def can_resume(self, sequence: int, position: int) -> bool:
        """Return True if all tokens that a query at `position` may see are stored."""
        self.check_sequences(sequence)
        if not 0 <= position <= self._end(sequence):
            return False
        if self.window.memory is None:
            return True
        stored = self.positions_of(self._own(sequence))
        first = int(self.window.first_seen(np.array([position], np.int32))[0])
        return len(np.unique(stored[(stored >= first) & (stored < position)])) == position - first

    def with_prefix(self, source: int, target: int, length: int) -> KVPool:
        """Let `target` share the tokens of `source` at positions < `length`, and no others.

        Raise ValueError for a negative length or a sequence that does not exist.
        """
        self.check_sequences(source, target)
        if length < 0:
            raise ValueError(f"the length of a prefix can't be {length}")
        old, new, owners = self._own(target), self._own(source), self._table.owners
        new = new[self.positions_of(new) < length]
        is_kept = owners[source, old] & (self.positions_of(old) < length)
        added = new[~owners[target, new]]
        after = self._edited([(target, old[~is_kept])], [(target, added)])
        if (known := self._known.get(source)) is not None:
            after._known[target] = between(known, 0, length)
        return after

    def without(self, sequence: int, begin: int, end: int) -> tuple[KVPool, PositionShift | None]:
        """Drop the tokens of `sequence` at positions `begin .. end - 1`, and move up those behind.

        Return the cells and the tokens that move, if any. Raise ValueError for a range that does
        not exist, and CacheFullError if there is no room to copy shared tokens.
        """
        self.check_sequences(sequence)
        if not 0 <= begin <= end:
            raise ValueError(f"there are no positions {begin} .. {end}")
        if begin == end or not self.holds(sequence, begin):
            return self, None
        if not self.holds(sequence, end):
            return self.with_prefix(sequence, sequence, begin), None
        own, table = self._own(sequence), self._table
        positions = table.positions[own]
        dropped, sources = own[(positions >= begin) & (positions < end)], own[positions >= end]
        is_shared = table.num_owners[sources] > 1
        is_free = ~table.used
        is_free[dropped[table.num_owners[dropped] == 1]] = True
        free = np.flatnonzero(is_free).astype(np.int32)
        if (needed := int(np.count_nonzero(is_shared))) > len(free):
            what = f"removing positions {begin} .. {end - 1} of sequence {sequence}"
            raise CacheFullError(what, needed, len(free), self.num_cells)
        targets = sources.copy()
        targets[is_shared] = free[:needed]
        after = self._edited(
            [(sequence, dropped), (sequence, sources[is_shared])],
            [(sequence, targets[is_shared])],
            (targets, table.positions[sources] - (end - begin)),
        )
        return after, PositionShift(sources, targets, begin - end)

    def expecting(self, sequence: int, count: int, beside: Sequence[int] = ()) -> KVPool:
        """Give the sequence a reservation of at least `count` cells in place of the one it had.

        It is the rest of an even one that begins with the sequence's last span, or lies after its
        last token, if there is room, unless another sequence shares that token. The sequence gets
        no reservation if there is room nowhere. `beside`: the sequences that run.
        """
        self.check_sequences(sequence)
        others, near = self._reservations_of(sequence, beside)
        end, reservation = self._own_end(sequence), self._in_place(sequence, count)
        if reservation is None and end is not None and count <= self._most_reserved:
            reservation = reserve_at(self._table.used, others.values(), count, end)
        if reservation is None:
            reservation = self._reserved(others, count, near)
        if reservation is not None:
            others[sequence] = reservation
        return self._next(self._version, reservations=others)

    @property
    def _most_reserved(self) -> int:
        """Most cells of a reservation: an even share."""
        return self.num_cells // self.max_sequences

    def _reserved(
        self, others: Mapping[int, Reservation], count: int, near: Sequence[Reservation]
    ) -> Reservation | None:
        """Return a reservation of free cells; None if there is no room. See `reserve`."""
        free, most, together = ~self._table.used, self._most_reserved, self.max_sequences
        return reserve(free, others.values(), count, most, near=near, together=together)

    def _reservations_of(
        self, sequence: int, beside: Sequence[int]
    ) -> tuple[dict[int, Reservation], list[Reservation]]:
        """Return the reservations of all other sequences, and those of `beside` among them."""
        others = {each: one for each, one in self.reservations.items() if each != sequence}
        return others, [others[each] for each in beside if each in others]

    def _in_place(self, sequence: int, count: int) -> Reservation | None:
        """Return an even reservation of the last span of a sequence and `count` free cells."""
        end, spans = self._own_end(sequence), self.spans(sequence)
        if end is None or not spans:
            return None
        begin = next(span.begin for span in spans if span.end == end)
        size = _reserved_size(end - begin + count, self._most_reserved)
        if begin % size or begin + size < end + count:
            return None
        others, _ = self._reservations_of(sequence, ())
        behind = reserve_at(self._table.used, others.values(), begin + size - end, end)
        return None if behind is None else Reservation(CellRun(begin, begin + size), end)

    def _own_end(self, sequence: int) -> int | None:
        """Return the cell after the sequence's last token; None if others have that token, too."""
        spans = self.spans(sequence)
        if not spans:
            return None
        end = max(spans, key=lambda span: span.position).end
        return end if self._table.num_owners[end - 1] == 1 else None

    def place(self, batch: Batch) -> Placement:
        """Find cells for the batch, after dropping the tokens beyond each memory.

        Tokens go to the reservations of their sequences; the others lie side by side. Raise
        CacheFullError if there is no room.
        """
        self.check_sequences(*batch.sequences)
        kept, n = self._kept_for(batch), len(batch)
        if n > kept.num_free:
            raise CacheFullError(f"a batch of {n} tokens", n, kept.num_free, self.num_cells)
        before, move = self, None
        placed = place_tokens(batch, kept._table.used, kept.reservations)
        if placed is None:
            before, kept = (each._next(each._version, reservations={}) for each in (before, kept))
            placed = place_tokens(batch, kept._table.used, kept.reservations)
        if placed is None:
            order, move = self._packing(kept)
            before, kept, start = (
                before._in_order(order),
                kept._in_order(order),
                self.num_cells - kept.num_free,
            )
            placed = np.arange(start, start + n, dtype=np.int32), {}
        cells, reservations = placed
        return Placement(before, kept._with(batch, cells, reservations), cells, move)

    def relocated(
        self, sequence: int, count: int, beside: Sequence[int] = ()
    ) -> tuple[KVPool, Ints] | None:
        """Give `sequence` other cells for all its tokens, where the next `count` follow them.

        These are a short prefix that others share, or a short conversation that lies elsewhere than
        those of `beside`, the sequences that run. A step then reads all of them as one batch, not
        one part after the other. Return the cells, too, to which the rows are to be copied, or
        None: it has no such tokens, or there are no cells. Numbers of cells decide if a prefix is
        copied, never their places, which a replay does not know; where a conversation moves, the
        numbers stay.
        """
        n = int(self._counts[sequence])
        if not 0 < n <= min(MOST_MOVED, self.num_free):
            return None
        own = self.num_own(sequence)
        most = MOST_MOVED if own else SHORT_PREFIX
        if n > most or 0 < own < n or self.stored(sequence) != (0, n):
            return None
        others, near = self._reservations_of(sequence, beside)
        in_place = self._in_place(sequence, count) if own else None
        if self._is_near(in_place, near):
            return None
        reservation = self._reserved(others, n + count, near)
        if own and not (reservation and (in_place is None or self._is_near(reservation, near))):
            return None
        if reservation is None:
            cells = np.flatnonzero(~self._table.used)[:n].astype(np.int32)
        else:
            cells = np.arange(reservation.run.begin, reservation.run.begin + n, dtype=np.int32)
            others[sequence] = reservation._replace(next=reservation.run.begin + n)
        empty = self.with_prefix(sequence, sequence, 0)
        return empty._with(Batch(range(n), [sequence] * n), cells, others), cells

    @staticmethod
    def _is_near(reservation: Reservation | None, near: Sequence[Reservation]) -> bool:
        """Return True if a step reads a reservation and those `near` it as one batch."""
        if reservation is None:
            return False
        size = reservation.run.end - reservation.run.begin
        return are_near([reservation.run.begin, *_begins(near, size)], size)

    def _with(self, batch: Batch, cells: Ints, reservations: Mapping[int, Reservation]) -> KVPool:
        """Return the pool once the batch is in `cells`, which are free."""
        positions, sequences = np.array(batch.positions, np.int32), np.array(batch.sequences)
        ones = np.ones(len(cells), np.int32)
        change = CellChange(cells, positions, ones, sequences, cells, ones > 0)
        after = self._next(CellVersion((self._version, change)), reservations=reservations)
        after._counts = self._counts + np.bincount(sequences, minlength=self.max_sequences)
        after._num_used += len(cells)
        for sequence, span in _spans(batch, cells):
            if (old := after._known.get(sequence)) is not None:
                after._known[sequence] = grown(old, span)
        return after

    def packed(self) -> tuple[KVPool, Move | None]:
        """Close all holes, in the same order."""
        order, move = self._packing(self)
        return self._in_order(order), move

    def history(self, batch: Batch) -> CellRun:
        """Return the cells from the first to the last that a placed batch may see."""
        seen = [
            self.seen_by(sequence, first, END)
            for sequence, first in zip(*_lowest_positions(batch), strict=True)
        ]
        return CellRun(
            min(int(cells[0]) for cells in seen if len(cells)),
            max(int(cells[-1]) + 1 for cells in seen if len(cells)),
        )

    def mask(self, batch: Batch, history: CellRun) -> Bools:
        """Return the mask `[n_tokens, history]` of the batch: True where a token sees a cell."""
        queries, sequences = np.array(batch.positions, np.int32), np.array(batch.sequences)
        return self.visible(queries, sequences, history)

    def visible(self, queries: Ints, sequences: Ints, run: CellRun) -> Bools:
        """Return which cells of `run` tokens at positions `queries` of `sequences` look back at."""
        positions = self._table.positions[run.begin : run.end]
        visible: Bools = self._table.owners[:, run.begin : run.end][sequences]
        visible &= positions <= queries[:, None]
        if self.window.is_limited:
            visible &= positions >= self.window.first_seen(queries)[:, None]
        return visible

    def check_sequences(self, *sequences: int) -> None:
        """Raise ValueError for a sequence that does not exist."""
        most = self.max_sequences
        if not 0 <= min(sequences) <= max(sequences) < most:
            wrong = next(sequence for sequence in sequences if not 0 <= sequence < most)
            raise ValueError(
                f"there is no sequence {wrong}: "
                f"the cache was initialized for {most}, counted from 0"
            )

    def _next(
        self, version: CellVersion, *, reservations: Mapping[int, Reservation] | None = None
    ) -> KVPool:
        """Return a pool with other arrays, whose other fields are those of this one."""
        after = KVPool.__new__(KVPool)
        after.window, after._cells, after._version = self.window, self._cells, version
        self._cells.become(version)  # now, so that a glance finds it
        after.reservations = self.reservations if reservations is None else reservations
        after._counts, after._num_used = self._counts, self._num_used
        after._known, after._scattered = dict(self._known), {}
        return after

    def _edited(
        self,
        dropped: Sequence[Cells],
        added: Sequence[Cells],
        moved: tuple[Ints, Ints] | None = None,
    ) -> KVPool:
        """Let sequences drop cells, then own others. `moved`: cells, and their new positions."""
        table, edits = self._table, [*dropped, *added]
        lost, won = (_joined(part) for part in (dropped, added))
        cells = np.unique(np.concatenate([lost, won, *(moved or ())[:1]]))
        positions, before = table.positions[cells], table.num_owners[cells]
        num_owners = before.copy()
        np.subtract.at(num_owners, np.searchsorted(cells, lost), 1)
        np.add.at(num_owners, np.searchsorted(cells, won), 1)
        if moved is not None:
            positions[np.searchsorted(cells, moved[0])] = moved[1]
        sequences = np.repeat([each for each, _ in edits], [len(one) for _, one in edits])
        owned, is_owner = np.concatenate([lost, won]), np.arange(len(lost) + len(won)) >= len(lost)
        change = CellChange(cells, positions, num_owners, sequences, owned, is_owner)
        after = self._next(CellVersion((self._version, change)))
        after._counts = self._counts.copy()
        np.add.at(after._counts, sequences, np.where(is_owner, 1, -1))
        for sequence, _ in edits:
            after._known.pop(sequence, None)
        after._num_used += int(np.count_nonzero(num_owners)) - int(np.count_nonzero(before))
        return after

    def _kept_for(self, batch: Batch) -> KVPool:
        """Drop the tokens that no sequence needs once the batch has begun."""
        if self.window.memory is None:
            return self
        begins = self.next_positions()
        sequences, lowest = _lowest_positions(batch)
        begins[sequences] = lowest
        dropped = []
        for sequence, first in enumerate(self.window.first_kept(begins).tolist()):
            known = self._known.get(sequence)
            if known is not None and all(at >= first for _, _, at in known):
                continue
            own = self._own(sequence)
            too_old = self.positions_of(own) < first
            if too_old.any():
                dropped.append((sequence, own[too_old]))
        if not dropped:
            return self
        kept = self._edited(dropped, [])
        for sequence, _ in dropped:
            if (known := self._known.get(sequence)) is not None:
                first = int(self.window.first_kept(begins[sequence : sequence + 1])[0])
                kept._known[sequence] = between(known, first, END)
        return kept

    def _packing(self, kept: KVPool) -> tuple[Ints, Move | None]:
        """Return the order in which all cells would be packed, and the move that does it.

        Cells that are also used in `kept` come first.
        """
        # A copy: both values have one table.
        rank = np.where(kept._table.used.copy(), 0, np.where(self._table.used, 1, 2))
        order = np.argsort(rank, kind="stable").astype(np.int32)
        displaced = np.flatnonzero((order != np.arange(self.num_cells)) & (rank[order] < 2))
        if not len(displaced):
            return order, None
        begin, end = int(displaced[0]), int(displaced[-1]) + 1
        return order, Move(begin, order[begin:end])

    def _in_order(self, order: Ints) -> KVPool:
        table = self._table
        return KVPool(table.positions[order], table.owners[:, order], self.window)


def _joined(parts: Sequence[Cells]) -> Ints:
    """Return the cells of all `parts`, one after the other."""
    return np.concatenate([np.zeros(0, np.int32), *(cells for _, cells in parts)])


def _spans(batch: Batch, cells: Ints) -> Iterable[tuple[int, CellSpan]]:
    """Return the spans of a batch in `cells`, each with its sequence."""
    if len(batch.by_sequence) == len(batch):
        each = zip(batch.sequences, cells.tolist(), batch.positions, strict=True)
        return [(sequence, CellSpan(cell, cell + 1, at)) for sequence, cell, at in each]
    positions, sequences = np.array(batch.positions, np.int32), np.array(batch.sequences)
    begins = breaks(cells, positions, sequences)
    return zip(sequences[begins].tolist(), pieces(cells, positions, begins), strict=True)


def _lowest_positions(batch: Batch) -> tuple[Sequence[int], Ints]:
    """Return the sequences of a batch, and the lowest position of each."""
    own = batch.by_sequence
    lowest = [min(batch.positions[index] for index in indices) for indices in own.values()]
    return list(own), np.array(lowest, np.int32)
