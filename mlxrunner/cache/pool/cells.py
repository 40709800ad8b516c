"""The position and the owners of each cell. Bookkeeping only: numpy, no tensors.

A cell is one row of every layer's buffers. `KVPool` is a value: each operation returns the next
value, together with the plan for moving the rows, and changes nothing. Therefore a failed operation
leaves no trace, and keeping the old value undoes an operation.

Tokens that were stored one after another lie side by side. So a sequence of any length is mostly
one span, or two: the prefix that it shares, and its own tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlxrunner.cache.protocol import END, Batch
from mlxrunner.errors import CacheFullError

Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]


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


class CellRun(NamedTuple):
    """Cells `begin .. end - 1`."""

    begin: int
    end: int


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


def runs(cells: Ints) -> list[CellRun]:
    """Return the cells as runs of neighbours."""
    if len(cells) == 1:
        return [CellRun(int(cells[0]), int(cells[0]) + 1)]
    ends = [*(np.flatnonzero(cells[1:] != cells[:-1] + 1) + 1).tolist(), len(cells)]
    bounds = pairwise([0, *ends]) if len(cells) else ()
    return [CellRun(int(cells[begin]), int(cells[end - 1]) + 1) for begin, end in bounds]


MAX_SPANS = 32
"""Most spans that are listed. A sequence that lies in more pieces is scattered."""


class CellSpan(NamedTuple):
    """Cells `begin .. end - 1` with the tokens at `position`, `position + 1`, ..."""

    begin: int
    end: int
    position: int

    def between(self, low: int, high: int) -> CellSpan:
        """Return the cells at positions `low .. high - 1`; they may be none."""
        begin = self.begin + max(0, low - self.position)
        end = min(self.end, self.begin + high - self.position)
        return CellSpan(begin, max(begin, end), self.position + begin - self.begin)


Spans = tuple[CellSpan, ...]
"""Spans in the order of their cells."""


def spans_of(cells: Ints, positions: Ints) -> Spans | None:
    """Return `cells`, which hold the tokens at `positions`, as spans; None if scattered."""
    begins = breaks(cells, positions)
    return tuple(pieces(cells, positions, begins)) if len(begins) <= MAX_SPANS else None


def breaks(cells: Ints, positions: Ints, sequences: Ints | None = None) -> Ints:
    """Return the indices at which another span begins: of one of `sequences`, if given."""
    are = np.ones(len(cells), np.bool_)
    are[1:] = (cells[1:] != cells[:-1] + 1) | (positions[1:] != positions[:-1] + 1)
    if sequences is not None:
        are[1:] |= sequences[1:] != sequences[:-1]
    return np.flatnonzero(are).astype(np.int32)


def pieces(cells: Ints, positions: Ints, begins: Ints) -> list[CellSpan]:
    """Return the spans that begin at the indices `begins`."""
    bounds = pairwise([*begins.tolist(), len(cells)])
    first = zip(cells[begins].tolist(), positions[begins].tolist(), bounds, strict=True)
    return [CellSpan(cell, cell + end - begin, at) for cell, at, (begin, end) in first]


def grown(old: Spans, new: CellSpan) -> Spans | None:
    """Return the spans of a sequence that had `old` and got `new`; None if scattered."""
    for index, other in enumerate(old):
        if other.end == new.begin and other.position + other.end - other.begin == new.position:
            return (*old[:index], CellSpan(other.begin, new.end, other.position), *old[index + 1 :])
    return tuple(sorted((*old, new))) if len(old) < MAX_SPANS else None


def between(spans: Iterable[CellSpan], low: int, high: int) -> Spans:
    """Return the spans with the tokens at positions `low .. high - 1`."""
    if all(low <= at and at + end - begin <= high for begin, end, at in spans):
        return tuple(spans)
    clipped = (span.between(low, high) for span in spans)
    return tuple(span for span in clipped if span.end > span.begin)


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
    pieces; but for those that lie behind what the sequence has.
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
    free: Bools, reservations: Iterable[Reservation], count: int, begin: int
) -> Reservation | None:
    """Return a reservation of `count` cells from `begin` on; None if one of them is taken."""
    end = begin + count
    if count <= 0 or end > len(free) or not free[begin:end].all():
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


@dataclass(frozen=True, eq=False)
class KVPool:
    """The tokens in the cells. The arrays are never written to."""

    positions: Ints
    """The position of the token in each cell, `[cells]`."""
    owners: Bools
    """True where a sequence owns a cell, `[sequences, cells]`. A cell without owners is free."""
    window: AttentionWindow = field(default_factory=AttentionWindow)
    reservations: Mapping[int, Reservation] = field(default_factory=dict)
    """The reservations of some sequences. They are given up if a batch finds no other room."""
    _known: dict[int, Spans] = field(default_factory=dict, init=False, repr=False)
    """The spans that were asked for."""

    @classmethod
    def empty(cls, num_cells: int, max_sequences: int, window: AttentionWindow) -> KVPool:
        return cls(
            np.zeros(num_cells, np.int32), np.zeros((max_sequences, num_cells), np.bool_), window
        )

    @property
    def num_cells(self) -> int:
        return len(self.positions)

    @property
    def num_free(self) -> int:
        return self.num_cells - int(np.count_nonzero(self.used))

    @cached_property
    def used(self) -> Bools:
        """True for cells with an owner, `[cells]`."""
        used: Bools = np.logical_or.reduce(self.owners, axis=0)
        return used

    def num_own(self, sequence: int) -> int:
        """Return the number of cells that no other sequence owns."""
        owners = self.owners[:, np.flatnonzero(self.owners[sequence])]
        return int(np.count_nonzero(np.count_nonzero(owners, axis=0) == 1))

    @property
    def sequences(self) -> tuple[int, ...]:
        """The sequences that have tokens."""
        return tuple(np.flatnonzero(self.owners.any(axis=1)).tolist())

    def next_positions(self) -> Ints:
        """Return the next position of each sequence `[sequences]`; 0 for one without tokens."""
        ends: Ints = (self.owners * (self.positions + 1)).max(axis=1)
        return ends

    def spans(self, sequence: int) -> Spans | None:
        """Return the cells of the sequence as spans; None if it is scattered."""
        found = self._known.get(sequence)
        if found is None:
            own = np.flatnonzero(self.owners[sequence]).astype(np.int32)
            found = spans_of(own, self.positions[own])
            if found is not None:
                self._known[sequence] = found
        return found

    def holds(self, sequence: int, begin: int) -> bool:
        """Return True if the sequence has tokens at positions >= `begin`."""
        self.check_sequences(sequence)
        return bool((self.owners[sequence] & (self.positions >= begin)).any())

    def stored(self, sequence: int) -> tuple[int, int]:
        """Return the positions `first, end` of the last run of tokens of `sequence`.

        Both are 0 if it has none.
        """
        self.check_sequences(sequence)
        stored = self.positions[self.owners[sequence]]
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
        own = np.flatnonzero(
            self.owners[sequence] & (self.positions >= begin) & (self.positions < end)
        )
        if len(own) != max(0, end - begin):
            raise ValueError(
                f"{len(own)} of the tokens {begin} .. {end - 1} of sequence {sequence} are stored"
            )
        cells: Ints = own[np.argsort(self.positions[own])].astype(np.int32)
        return cells

    def seen_by(self, sequence: int, position: int) -> Ints:
        """Return the cells that a query at `position` of a placed batch sees, in any order."""
        query = np.array([position], np.int32)
        seen: Ints = np.flatnonzero(
            self.visible(query, np.array([sequence]), CellRun(0, self.num_cells))[0]
        ).astype(np.int32)
        return seen

    def can_resume(self, sequence: int, position: int) -> bool:
        """Return True if all tokens that a query at `position` may see are stored."""
        self.check_sequences(sequence)
        own = self.owners[sequence]
        stored = self.positions[own]
        if not 0 <= position <= stored.max(initial=-1) + 1:
            return False
        if self.window.memory is None:
            return True
        first = int(self.window.first_seen(np.array([position], np.int32))[0])
        return len(np.unique(stored[(stored >= first) & (stored < position)])) == position - first

    def with_prefix(self, source: int, target: int, length: int) -> KVPool:
        """Let `target` share the tokens of `source` at positions < `length`, and no others.

        Raise ValueError for a negative length or a sequence that does not exist.
        """
        self.check_sequences(source, target)
        if length < 0:
            raise ValueError(f"the length of a prefix can't be {length}")
        owners = self.owners.copy()
        owners[target] = self.owners[source] & (self.positions < length)
        return self._changed(target, owners=owners)

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
        own, owners = self.owners[sequence], self.owners.copy()
        sources = np.flatnonzero(own & (self.positions >= end)).astype(np.int32)
        owners[sequence] = own & (self.positions < begin)
        if not len(sources):
            return self._changed(sequence, owners=owners), None
        positions = self.positions.copy()
        shared = owners[:, sources].any(axis=0)
        owners[sequence, sources[~shared]] = True
        free = np.flatnonzero(~owners.any(axis=0))
        if (needed := int(np.count_nonzero(shared))) > len(free):
            what = f"removing positions {begin} .. {end - 1} of sequence {sequence}"
            raise CacheFullError(what, needed, len(free), self.num_cells)
        targets = sources.copy()
        targets[shared] = free[:needed]
        owners[sequence, targets] = True
        positions[targets] = self.positions[sources] - (end - begin)
        after = self._changed(sequence, positions=positions, owners=owners)
        return after, PositionShift(sources, targets, begin - end)

    def expecting(self, sequence: int, count: int, beside: Sequence[int] = ()) -> KVPool:
        """Give the sequence a reservation of at least `count` cells in place of the one it had.

        It is the rest of an even one that begins with the sequence's last span, or lies behind its
        last token, if there is room, unless another sequence shares that token. The sequence gets
        no reservation if there is room nowhere. `beside`: the sequences that run.
        """
        self.check_sequences(sequence)
        others, near = self._reservations_of(sequence, beside)
        end, reservation = self._own_end(sequence), self._in_place(sequence, count)
        if reservation is None and end is not None and count <= self._most_reserved:
            reservation = reserve_at(~self.used, others.values(), count, end)
        if reservation is None:
            reservation = self._reserved(others, count, near)
        if reservation is not None:
            others[sequence] = reservation
        return self._changed(None, reservations=others)

    @property
    def _most_reserved(self) -> int:
        """Most cells of a reservation: an even share."""
        return self.num_cells // len(self.owners)

    def _reserved(
        self, others: Mapping[int, Reservation], count: int, near: Sequence[Reservation]
    ) -> Reservation | None:
        """Return a reservation of free cells; None if there is no room. See `reserve`."""
        free, most, together = ~self.used, self._most_reserved, len(self.owners)
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
        behind = reserve_at(~self.used, others.values(), begin + size - end, end)
        return None if behind is None else Reservation(CellRun(begin, begin + size), end)

    def _own_end(self, sequence: int) -> int | None:
        """Return the cell behind the sequence's last token; None if others have that token, too."""
        spans = self.spans(sequence)
        if not spans:
            return None
        end = max(spans, key=lambda span: span.position).end
        return end if np.count_nonzero(self.owners[:, end - 1]) == 1 else None

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
        placed = place_tokens(batch, kept.used, kept.reservations)
        if placed is None:
            before, kept = replace(before, reservations={}), replace(kept, reservations={})
            placed = place_tokens(batch, kept.used, kept.reservations)
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
        held = self.owners[sequence]
        n = int(np.count_nonzero(held))
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
        cells = np.flatnonzero(~self.used)[:n].astype(np.int32)
        if reservation is not None:
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
        """Return the pool once the batch is in `cells`."""
        positions, owners, used = self.positions.copy(), self.owners.copy(), self.used.copy()
        positions[cells], used[cells] = batch.positions, True
        owners[batch.sequences, cells] = True
        after = KVPool(positions, owners, self.window, dict(reservations))
        after._known.update(self._grown(batch, cells))
        after.__dict__["used"] = used
        return after

    def packed(self) -> tuple[KVPool, Move | None]:
        """Close all holes, in the same order."""
        order, move = self._packing(self)
        return self._in_order(order), move

    def history(self, batch: Batch) -> CellRun:
        """Return the cells from the first to the last that a placed batch may see."""
        sequences, lowest = _lowest_positions(batch)
        seen = self.owners[sequences] & (self.positions >= self.window.first_seen(lowest)[:, None])
        cells = np.flatnonzero(seen.any(axis=0))
        return CellRun(int(cells[0]), int(cells[-1]) + 1)

    def mask(self, batch: Batch, history: CellRun) -> Bools:
        """Return the mask `[n_tokens, history]` of the batch: True where a token sees a cell."""
        queries, sequences = np.array(batch.positions, np.int32), np.array(batch.sequences)
        return self.visible(queries, sequences, history)

    def visible(self, queries: Ints, sequences: Ints, run: CellRun) -> Bools:
        """Return which cells of `run` tokens at positions `queries` of `sequences` look back at."""
        positions = self.positions[run.begin : run.end]
        visible: Bools = self.owners[:, run.begin : run.end][sequences]
        visible &= positions <= queries[:, None]
        if self.window.is_limited:
            visible &= positions >= self.window.first_seen(queries)[:, None]
        return visible

    def check_sequences(self, *sequences: int) -> None:
        """Raise ValueError for a sequence that does not exist."""
        if not 0 <= min(sequences) <= max(sequences) < len(self.owners):
            wrong = next(sequence for sequence in sequences if not 0 <= sequence < len(self.owners))
            raise ValueError(
                f"there is no sequence {wrong}: "
                f"the cache was initialized for {len(self.owners)}, counted from 0"
            )

    def _changed(self, sequence: int | None, **fields: Any) -> KVPool:
        """Replace `fields`, which changes the tokens of no sequence but `sequence`."""
        after = replace(self, **fields)
        after._known.update(self._known)
        if sequence is not None:
            after._known.pop(sequence, None)
        return after

    def _kept_for(self, batch: Batch) -> KVPool:
        """Drop the tokens that no sequence needs once the batch has begun."""
        if self.window.memory is None:
            return self
        begins = self.next_positions()
        sequences, lowest = _lowest_positions(batch)
        begins[sequences] = lowest
        first = self.window.first_kept(begins)
        kept = replace(self, owners=self.owners & (self.positions >= first[:, None]))
        for sequence, found in self._known.items():
            kept._known[sequence] = between(found, int(first[sequence]), END)
        return kept

    def _grown(self, batch: Batch, cells: Ints) -> dict[int, Spans]:
        """Return the known spans once the batch is in `cells`."""
        known = dict(self._known)
        for sequence, span in _spans(batch, cells):
            old = known.pop(sequence, None)
            if old is not None and (more := grown(old, span)) is not None:
                known[sequence] = more
        return known

    def _packing(self, kept: KVPool) -> tuple[Ints, Move | None]:
        """Return the order in which all cells would be packed, and the move that does it.

        Cells that are also used in `kept` come first.
        """
        rank = np.where(kept.used, 0, np.where(self.used, 1, 2))
        order = np.argsort(rank, kind="stable").astype(np.int32)
        displaced = np.flatnonzero((order != np.arange(self.num_cells)) & (rank[order] < 2))
        if not len(displaced):
            return order, None
        begin, end = int(displaced[0]), int(displaced[-1]) + 1
        return order, Move(begin, order[begin:end])

    def _in_order(self, order: Ints) -> KVPool:
        return replace(
            self, positions=self.positions[order], owners=self.owners[:, order], reservations={}
        )


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
