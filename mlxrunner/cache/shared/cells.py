"""The position and the owners of each cell. Bookkeeping only: numpy, no tensors.

A cell is one row of every layer's buffers. `Cells` is a value: each operation returns the next
value, together with the plan for moving the rows, and changes nothing. Therefore a failed operation
leaves no trace, and keeping the old value undoes an operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from mlxrunner.cache.shared.lanes import Lane, in_lanes, lane_behind, new_lane
from mlxrunner.cache.shared.runs import Lift, Move, Run
from mlxrunner.cache.shared.sequences import END, Batch
from mlxrunner.cache.shared.sight import Bools, Ints, Sight
from mlxrunner.cache.shared.stretches import (
    Stretch,
    Stretches,
    between,
    breaks,
    grown,
    pieces,
    stretches_of,
)
from mlxrunner.errors import CacheFullError


class Placement(NamedTuple):
    """The cells of a batch, and the tokens before and after it."""

    before: Cells
    """The tokens before the batch, with the rows moved."""
    after: Cells
    """The tokens with those of the batch."""
    cells: Ints
    """The cells of the batch, `[n_tokens]`."""
    move: Move | None
    """Rows to move first; None if no row has to move."""


@dataclass(frozen=True, eq=False)
class Cells:
    """The tokens in the cells. The arrays are never written to."""

    positions: Ints
    """The position of the token in each cell, `[cells]`."""
    owners: Bools
    """True where a sequence owns a cell, `[sequences, cells]`. A cell without owners is free."""
    sight: Sight = field(default_factory=Sight)
    lanes: Mapping[int, Lane] = field(default_factory=dict)
    """The lanes of some sequences. They are given up if a batch finds no other room."""
    _known: dict[int, Stretches] = field(default_factory=dict, init=False, repr=False)
    """The stretches that were asked for."""

    @classmethod
    def empty(cls, num_cells: int, max_sequences: int, sight: Sight) -> Cells:
        return cls(
            np.zeros(num_cells, np.int32), np.zeros((max_sequences, num_cells), np.bool_), sight
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

    @cached_property
    def unshared(self) -> Bools:
        """True for cells with one owner, `[cells]`."""
        unshared: Bools = self.owners.sum(axis=0, dtype=np.int32) == 1
        return unshared

    @property
    def sequences(self) -> tuple[int, ...]:
        """The sequences that have tokens."""
        return tuple(np.flatnonzero(self.owners.any(axis=1)).tolist())

    def next_positions(self) -> Ints:
        """Return the next position of each sequence `[sequences]`; 0 for one without tokens."""
        ends: Ints = (self.owners * (self.positions + 1)).max(axis=1)
        return ends

    def stretches(self, sequence: int) -> Stretches | None:
        """Return the cells of the sequence as stretches; None if it is scattered."""
        found = self._known.get(sequence)
        if found is None:
            own = np.flatnonzero(self.owners[sequence]).astype(np.int32)
            found = stretches_of(own, self.positions[own])
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
            self.visible(query, np.array([sequence]), Run(0, self.num_cells))[0]
        ).astype(np.int32)
        return seen

    def can_resume(self, sequence: int, position: int) -> bool:
        """Return True if all tokens that a query at `position` may see are stored."""
        self.check_sequences(sequence)
        own = self.owners[sequence]
        stored = self.positions[own]
        if not 0 <= position <= stored.max(initial=-1) + 1:
            return False
        if self.sight.memory is None:
            return True
        first = int(self.sight.first_seen(np.array([position], np.int32))[0])
        return len(np.unique(stored[(stored >= first) & (stored < position)])) == position - first

    def with_prefix(self, source: int, target: int, length: int) -> Cells:
        """Let `target` share the tokens of `source` at positions < `length`, and no others.

        Raise ValueError for a negative length or a sequence that does not exist.
        """
        self.check_sequences(source, target)
        if length < 0:
            raise ValueError(f"the length of a prefix can't be {length}")
        owners = self.owners.copy()
        owners[target] = self.owners[source] & (self.positions < length)
        return self._changed(target, owners=owners)

    def without(self, sequence: int, begin: int, end: int) -> tuple[Cells, Lift | None]:
        """Drop the tokens of `sequence` at positions `begin .. end - 1`, and move up those behind.

        Return the cells and the tokens that move, if any. Raise ValueError for a range that does
        not exist, and CacheFullError if there is no room to copy shared tokens.
        """
        self.check_sequences(sequence)
        if not 0 <= begin <= end:
            raise ValueError(f"there are no positions {begin} .. {end}")
        if begin == end or not self.holds(sequence, begin):
            return self, None
        own, positions, owners = self.owners[sequence], self.positions.copy(), self.owners.copy()
        lifted = own & (positions >= end)
        owners[sequence] = own & (positions < begin)
        sources = np.flatnonzero(lifted).astype(np.int32)
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
        return after, Lift(sources, targets, begin - end) if len(sources) else None

    def expecting(self, sequence: int, count: int) -> Cells:
        """Give the sequence a lane of at least `count` cells in place of the one it had.

        It lies behind the sequence's last token if there is room, unless another sequence shares
        that token. The sequence gets no lane if there is room nowhere.
        """
        self.check_sequences(sequence)
        lanes = {other: lane for other, lane in self.lanes.items() if other != sequence}
        free, most = ~self.used, self.num_cells // len(self.owners)
        end, lane = self._own_end(sequence), None
        if end is not None and count <= most:
            lane = lane_behind(free, lanes.values(), count, end)
        if lane is None:
            lane = new_lane(free, lanes.values(), count, most)
        if lane is not None:
            lanes[sequence] = lane
        return self._changed(None, lanes=lanes)

    def _own_end(self, sequence: int) -> int | None:
        """Return the cell behind the sequence's last token; None if others have that token, too."""
        stretches = self.stretches(sequence)
        if not stretches:
            return None
        end = max(stretches, key=lambda stretch: stretch.position).end
        return end if np.count_nonzero(self.owners[:, end - 1]) == 1 else None

    def place(self, batch: Batch) -> Placement:
        """Find cells for the batch, after dropping the tokens beyond each memory.

        Tokens go to the lanes of their sequences; the others lie side by side. Raise CacheFullError
        if there is no room.
        """
        self.check_sequences(*batch.sequences)
        kept, n = self._kept_for(batch), len(batch)
        if n > kept.num_free:
            raise CacheFullError(f"a batch of {n} tokens", n, kept.num_free, self.num_cells)
        before, move = self, None
        placed = in_lanes(batch, kept.used, kept.lanes)
        if placed is None:
            before, kept = replace(before, lanes={}), replace(kept, lanes={})
            placed = in_lanes(batch, kept.used, kept.lanes)
        if placed is None:
            order, move = self._packing(kept)
            before, kept, start = (
                before._in_order(order),
                kept._in_order(order),
                self.num_cells - kept.num_free,
            )
            placed = np.arange(start, start + n, dtype=np.int32), {}
        cells, lanes = placed
        positions, owners, used = kept.positions.copy(), kept.owners.copy(), kept.used.copy()
        positions[cells], used[cells] = batch.positions, True
        owners[batch.sequences, cells] = True
        after = Cells(positions, owners, self.sight, lanes)
        after._known.update(kept._grown(batch, cells))
        after.__dict__["used"] = used
        return Placement(before, after, cells, move)

    def packed(self) -> tuple[Cells, Move | None]:
        """Close all holes, in the same order."""
        order, move = self._packing(self)
        return self._in_order(order), move

    def history(self, batch: Batch) -> Run:
        """Return the cells from the first to the last that a placed batch may see."""
        sequences, lowest = _lowest_positions(batch)
        seen = self.owners[sequences] & (self.positions >= self.sight.first_seen(lowest)[:, None])
        cells = np.flatnonzero(seen.any(axis=0))
        return Run(int(cells[0]), int(cells[-1]) + 1)

    def mask(self, batch: Batch, history: Run) -> Bools:
        """Return the mask `[n_tokens, history]` of the batch: True where a token sees a cell."""
        queries, sequences = np.array(batch.positions, np.int32), np.array(batch.sequences)
        return self.visible(queries, sequences, history)

    def visible(self, queries: Ints, sequences: Ints, run: Run) -> Bools:
        """Return which cells of `run` tokens at positions `queries` of `sequences` look back at."""
        positions = self.positions[run.begin : run.end]
        visible: Bools = self.owners[:, run.begin : run.end][sequences]
        visible &= positions <= queries[:, None]
        if self.sight.is_limited:
            visible &= positions >= self.sight.first_seen(queries)[:, None]
        return visible

    def check_sequences(self, *sequences: int) -> None:
        """Raise ValueError for a sequence that does not exist."""
        if not 0 <= min(sequences) <= max(sequences) < len(self.owners):
            wrong = next(sequence for sequence in sequences if not 0 <= sequence < len(self.owners))
            raise ValueError(
                f"there is no sequence {wrong}: "
                f"the cache was initialized for {len(self.owners)}, counted from 0"
            )

    def _changed(self, sequence: int | None, **fields: Any) -> Cells:
        """Replace `fields`, which changes the tokens of no sequence but `sequence`."""
        after = replace(self, **fields)
        after._known.update(self._known)
        if sequence is not None:
            after._known.pop(sequence, None)
        return after

    def _kept_for(self, batch: Batch) -> Cells:
        """Drop the tokens that no sequence needs once the batch has begun."""
        if self.sight.memory is None:
            return self
        begins = self.next_positions()
        sequences, lowest = _lowest_positions(batch)
        begins[sequences] = lowest
        first = self.sight.first_kept(begins)
        kept = replace(self, owners=self.owners & (self.positions >= first[:, None]))
        for sequence, found in self._known.items():
            kept._known[sequence] = between(found, int(first[sequence]), END)
        return kept

    def _grown(self, batch: Batch, cells: Ints) -> dict[int, Stretches]:
        """Return the known stretches once the batch is in `cells`."""
        known = dict(self._known)
        for sequence, stretch in _stretches(batch, cells):
            old = known.pop(sequence, None)
            if old is not None and (more := grown(old, stretch)) is not None:
                known[sequence] = more
        return known

    def _packing(self, kept: Cells) -> tuple[Ints, Move | None]:
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

    def _in_order(self, order: Ints) -> Cells:
        return replace(
            self, positions=self.positions[order], owners=self.owners[:, order], lanes={}
        )


def _stretches(batch: Batch, cells: Ints) -> Iterable[tuple[int, Stretch]]:
    """Return the stretches of a batch in `cells`, each with its sequence."""
    if len(batch.by_sequence) == len(batch):
        each = zip(batch.sequences, cells.tolist(), batch.positions, strict=True)
        return [(sequence, Stretch(cell, cell + 1, at)) for sequence, cell, at in each]
    positions, sequences = np.array(batch.positions, np.int32), np.array(batch.sequences)
    begins = breaks(cells, positions, sequences)
    return zip(sequences[begins].tolist(), pieces(cells, positions, begins), strict=True)


def _lowest_positions(batch: Batch) -> tuple[Sequence[int], Ints]:
    """Return the sequences of a batch, and the lowest position of each."""
    own = batch.by_sequence
    lowest = [min(batch.positions[index] for index in indices) for indices in own.values()]
    return list(own), np.array(lowest, np.int32)
