"""A disk without files, on which the replay of a parallel runner parks conversations.

What is stored once, what it takes and what goes first is decided as on a real disk, by
`mlxrunner.stored.shelf`. The bytes are those of rows, states and tokens, not of headers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from mlxrunner.cache.checkpoints import Checkpoint
from mlxrunner.cache.entry import CacheEntry
from mlxrunner.cache.layers.extents import Extent
from mlxrunner.cache.layers.protocol import LayerCache, Snapshot
from mlxrunner.cache.saved import Exported, Saved, SavedCheckpoint
from mlxrunner.cache.tokens import TokenArray, TokenBuffer
from mlxrunner.errors import SessionError
from mlxrunner.profiling.replay.engine import row_bytes_of, saved_extent
from mlxrunner.stored.parked import Parked
from mlxrunner.stored.shelf import Form, Shelf

TOKEN_BYTES = 4
"""Bytes of a token in the file of a conversation."""


class _Held(LayerCache):
    """A layer of a parked conversation: its extent alone."""

    def __init__(self, saved: Saved) -> None:
        self.kind, self._extent = saved.kind, saved.numbers["extent"]

    @property
    def extent(self) -> Extent:
        extent: Extent = self._extent
        return extent

    def go_back(self, to: int) -> None:
        self._extent = self.extent.rewound(to)

    def free(self) -> None:
        self._extent = self.extent.empty()

    def snapshot(self) -> Snapshot:
        return Snapshot(self.extent.checkpoint(), 0)

    def restore(self, snapshot: Snapshot, offset: int) -> None:
        self._extent = snapshot.content


class ReplayedParking:
    """A place for conversations, with the methods of `mlxrunner.stored.parking.Parking`."""

    def __init__(self, limit: int) -> None:
        """Park at most `limit` bytes."""
        self._shelf = Shelf(lambda name: None, limit)
        self._entries: weakref.WeakKeyDictionary[Parked, CacheEntry] = weakref.WeakKeyDictionary()

    def park(self, entry: CacheEntry) -> Parked | None:
        """Keep an entry, unless it does not fit or what it holds is not exact."""
        if not entry.tokens or entry.is_shifted:
            return None
        held = CacheEntry(
            TokenBuffer(entry.tokens[:]), [_Held(one.export()) for one in entry.caches]
        )
        held.checkpoints.budget = entry.checkpoints.budget
        for item in entry.checkpoints:
            held.checkpoints.add(item)
        shelf, parked = self._shelf, self._shelf.plan(b"", _form(held, entry))
        if (there := shelf.named(parked.name)) is not None:
            shelf.use(there)
            return there
        shelf.claim(parked)
        new = {
            name: nbytes
            for name, nbytes in _sizes(parked, entry).items()
            if name not in shelf.sizes
        }
        try:
            shelf.make_room(sum(new.values()), parked)
        except SessionError:
            shelf.remove(parked)
            return None
        for name, nbytes in new.items():
            shelf.wrote(name, nbytes)
        shelf.add(parked)
        self._entries[parked] = held
        shelf.drop_earlier(parked, None)
        return parked

    def find(self, prompt: TokenArray) -> tuple[Parked, int] | None:
        """Return the conversation that has most of a prompt, and how many of its tokens."""
        return self._shelf.find(prompt)

    def restore(self, parked: Parked, upto: int | None = None) -> Exported:
        """Return the first `upto` tokens of a conversation."""
        held = self._entries[parked]
        to = len(held.tokens) if upto is None else upto
        copy = CacheEntry(caches=[_Held(saved_extent(one.kind, one.extent)) for one in held.caches])
        copy.checkpoints.budget = held.checkpoints.budget
        copy.tokens.extend(held.tokens.array)
        for item in held.checkpoints:
            copy.checkpoints.add(item)
        if to < len(held.tokens):
            copy.tokens.truncate(to)
            copy.rewind(to)
        found = Exported(
            copy.tokens.array,
            [saved_extent(one.kind, one.extent.saved()) for one in copy.caches],
            [_saved_checkpoint(item, copy.caches) for item in copy.checkpoints],
        )
        if parked in self._shelf:
            self._shelf.use(parked, found)
        return found

    def tell(self, on_given_up: Callable[[Parked], None]) -> None:
        """Call `on_given_up` with each conversation that is given up to make room."""
        self._shelf.on_given_up = on_given_up


def _form(held: CacheEntry, entry: CacheEntry) -> Form:
    """Return the form in which the real place stores `entry`, which is held as `held`."""
    has_rows = [row_bytes_of(cache) is not None for cache in entry.caches]
    can_be_cut = all(
        rows or cache.needs_checkpoints for rows, cache in zip(has_rows, entry.caches, strict=True)
    )
    return Form(
        held.tokens.array,
        [cache.extent for cache in held.caches],
        [(item.offset, item.role) for item in held.checkpoints] if can_be_cut else [],
        any(has_rows),
        all(has_rows),
        can_be_cut,
        is_exact=True,
        spelled=held.tokens.array,
    )


def _sizes(parked: Parked, entry: CacheEntry) -> dict[str, int]:
    """Return the bytes of each file of a conversation."""
    rows = [row_bytes_of(cache) for cache in entry.caches]
    each = sum(nbytes or 0 for nbytes in rows)
    states = sum(
        cache.snapshot().nbytes
        for cache, nbytes in zip(entry.caches, rows, strict=True)
        if nbytes is None
    )
    kept = {item.offset: item.nbytes for item in entry.checkpoints}
    return {
        **{piece.name: (piece.end - piece.begin) * each for piece in parked.rows},
        **{state.name: kept[state.offset] for state in parked.states},
        parked.name: TOKEN_BYTES * len(parked.tokens) + states,
    }


def _saved_checkpoint(item: Checkpoint, caches: Sequence[LayerCache]) -> SavedCheckpoint:
    return SavedCheckpoint(
        item.offset,
        item.role,
        [
            None if kept is None else saved_extent(cache.kind, kept.content)
            for cache, kept in zip(caches, item.snapshots, strict=True)
        ],
    )
