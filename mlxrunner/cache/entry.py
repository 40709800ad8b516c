"""The prefix-cache entry: the evaluated tokens and one cache per layer.

This module is bookkeeping and never imports mlx. `mlxrunner.cache.prefix` decides what a request
reuses of the entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxrunner.cache.checkpoints import Checkpoint, Checkpoints
from mlxrunner.cache.layers.extents import Extent
from mlxrunner.cache.layers.protocol import (
    Exported,
    LayerCache,
    Saved,
    SavedCheckpoint,
    SavedEntry,
    reach,
)
from mlxrunner.cache.pool.interface import END
from mlxrunner.cache.tokens import TokenArray, TokenBuffer, common_prefix

Rotators = Callable[[Sequence[LayerCache], int], Sequence[Callable[[Any, int], Any]] | None]
"""A function that returns one rotation of keys per layer, or None if a layer's keys can't move.

Its arguments are the layers and a number of positions. See `mlxrunner.cache.layers.rotate`.
"""


@dataclass
class CacheEntry:
    """The evaluated tokens, with one cache per layer that stores them."""

    tokens: TokenBuffer = field(default_factory=TokenBuffer)
    caches: list[LayerCache] = field(default_factory=list)
    """One per layer; each holds exactly `tokens`."""
    checkpoints: Checkpoints = field(default_factory=lambda: Checkpoints(0))
    """Copies of the layers that can't rewind by themselves."""
    held: Checkpoint | None = None
    """The state before the draft, of the layers that could not undo its passes by themselves.

    None if each can, or if there is no draft. Its arrays are those of the layers.
    """
    exact: int = END
    """Number of first tokens that a cold run would store; END: all.

    Those behind them were moved in a full context (see docs/troubleshooting.md).
    """

    @property
    def offsets(self) -> list[int]:
        """The number of tokens that each layer holds."""
        return [cache.offset for cache in self.caches]

    @property
    def is_shifted(self) -> bool:
        """True if it has tokens that a cold run would store otherwise."""
        return self.exact < len(self.tokens)

    def shared(self, prompt: TokenArray, *, is_shifted: bool = False) -> int:
        """Return how many first tokens `prompt` may reuse.

        Moved tokens are reused if the prompt `is_shifted` as they are, or goes on from all of them.
        Otherwise they only look like its own.
        """
        matched = common_prefix(self.tokens.array, prompt)
        goes_on = is_shifted or matched == len(self.tokens)
        return matched if goes_on else min(matched, self.exact)

    def forget_shift(self) -> None:
        """Note that only exact tokens are left."""
        self.exact = END

    @property
    def is_true(self) -> bool:
        """True if every layer holds exactly the tokens: the invariant."""
        num_tokens = len(self.tokens)
        return set(self.offsets) <= {num_tokens} and bool(self.caches or not num_tokens)

    @property
    def nbytes(self) -> int:
        """Bytes that all layers and checkpoints have allocated."""
        held = 0 if self.held is None else self.held.nbytes
        return sum([cache.nbytes for cache in self.caches]) + self.checkpoints.nbytes + held

    def reach(self, to: int) -> tuple[int, str | None]:
        """Return the largest reachable offset <= `to`, and the kind of layer that limits it.

        The offset may be one at which a checkpoint was taken. The kind is None if no layer limits
        it.
        """
        direct, limited_by = reach(self.caches, to)
        found = next(
            (
                item.offset
                for item in self._copies(to)
                if item.offset > direct
                and all(
                    kept is not None or cache.can_rewind(item.offset)
                    for cache, kept in zip(self.caches, item.snapshots, strict=True)
                )
            ),
            direct,
        )
        return found, limited_by if found < to else None

    def _copies(self, to: int) -> list[Checkpoint]:
        """Return the checkpoints and what is held, at offsets <= `to`, the largest offset first."""
        before = self.checkpoints.before(to)
        if self.held is not None and self.held.offset <= to:
            before = sorted([*before, self.held], key=lambda item: -item.offset)
        return before

    def _copy_at(self, offset: int) -> Checkpoint | None:
        return next((item for item in self._copies(offset) if item.offset == offset), None)

    def hold(self, passes: Sequence[int]) -> None:
        """Keep what undoes the next forward passes; `passes` has the number of tokens of each.

        Layers that could not go back behind them are held by reference: their arrays are copied
        when a pass writes to them. What was held before is dropped.
        """
        offset = len(self.tokens)
        snapshots = [
            None
            if not cache.needs_checkpoints or _can_undo(cache.extent, passes)
            else cache.snapshot()
            for cache in self.caches
        ]
        nbytes = sum(kept.nbytes for kept in snapshots if kept is not None)
        self.held = Checkpoint(offset, nbytes, snapshots) if any(snapshots) else None

    def rewind(self, to: int) -> None:
        """Rewind every layer to offset `to`, by itself or from the checkpoint there.

        A call may be repeated after an interrupt.
        """
        checkpoint = self._copy_at(to)
        for index, cache in enumerate(self.caches):
            if checkpoint is None or cache.can_rewind(to):
                cache.rewind(to)
            else:
                cache.restore(checkpoint.snapshots[index], to)
        self.checkpoints.truncate(to)
        if self.held is not None and self.held.offset > to:
            self.held = None

    def copy(self, other: CacheEntry, to: int) -> None:
        """Fill this empty entry with the first `to` tokens of `other`, an offset it can reach.

        `other` does not change. Both have the caches of the same layers, and share the checkpoints.
        """
        checkpoint = other._copy_at(to)
        pairs = zip(self.caches, other.caches, strict=True)
        for index, (cache, source) in enumerate(pairs):
            if checkpoint is None or source.can_rewind(to):
                cache.copy(source, to)
            else:
                cache.copy_checkpoint(source, checkpoint.snapshots[index], to)
        for item in other.checkpoints:
            if item.offset <= to:
                self.checkpoints.add(item)
        self.tokens.extend(other.tokens.array[:to])

    @property
    def used_bytes(self) -> int:
        """Bytes that hold the entry's tokens."""
        return sum([cache.used_bytes for cache in self.caches])

    def export(self, *, outlined: bool = False) -> Exported:
        """Return the content of the entry, as views of its buffers.

        Copy the views before the next request changes the buffers. `outlined`: layers with plain
        rows that rewind by themselves have only their first row, which shows what they store.
        """
        checkpoints = [
            SavedCheckpoint(
                item.offset,
                item.role,
                [
                    None if kept is None else cache.export(kept)
                    for cache, kept in zip(self.caches, item.snapshots, strict=True)
                ],
            )
            for item in self.checkpoints
        ]
        return Exported(
            self.tokens.array.copy(),
            [
                cache.export_rows(0, 1) if outlined and cache.has_plain_rows else cache.export()
                for cache in self.caches
            ],
            checkpoints,
            not self.is_shifted,
        )

    def adopt(self, saved: SavedEntry) -> None:
        """Fill an empty entry from `saved`, layer by layer.

        Raise ValueError if the parts of `saved` contradict each other.
        """
        for _ in self.adopting(saved):
            pass

    def adopting(self, saved: SavedEntry) -> Iterator[None]:
        """Fill an empty entry from `saved`, and yield after each piece.

        The entry has no tokens before the last piece: free its caches if that does not come. Raise
        ValueError if the parts of `saved` contradict each other.
        """
        offset = len(saved.tokens)
        for cache, layer in zip(self.caches, saved.layers, strict=True):
            if isinstance(layer, Saved):
                cache.adopt(layer, offset)
                yield
            elif cache.takes_pieces:
                for piece in layer.pieces():
                    if piece is not None:
                        cache.extend(piece)
                    yield
            else:
                cache.adopt(layer.read(), offset)
                yield
        for item in saved.checkpoints:
            if not 0 < item.offset <= offset:
                raise ValueError(f"a checkpoint is at {item.offset} of {offset} tokens")
            pairs = zip(self.caches, item.layers, strict=True)
            snapshots = [
                None if kept is None else cache.snapshot_of(kept, item.offset)
                for cache, kept in pairs
            ]
            if any(
                cache.needs_checkpoints and kept is None
                for cache, kept in zip(self.caches, snapshots, strict=True)
            ):
                raise ValueError(f"the checkpoint at {item.offset} lacks a layer")
            nbytes = sum(snapshot.nbytes for snapshot in snapshots if snapshot is not None)
            self.checkpoints.add(Checkpoint(item.offset, nbytes, snapshots, item.role))
            yield
        self.tokens.extend(saved.tokens)
        self.exact = END if saved.is_exact else 0
        if not self.is_true:
            raise ValueError(
                f"its layers are at {sorted(set(self.offsets))}, and it has {offset} tokens"
            )

    def shift(self, keep: int, discard: int, rotate: Rotators) -> bool:
        """Drop the tokens `keep .. keep + discard - 1` of every layer; move up those behind them.

        Return False, with nothing changed, if a layer can't move its tokens. `rotate` gives the
        rotation of each layer's keys. The entry has only its first `keep` tokens until the move is
        complete: an interrupt leaves these, or an empty entry.
        """
        if discard <= 0 or not all(cache.can_shift(keep, discard) for cache in self.caches):
            return False
        ways = rotate(self.caches, -discard)
        if ways is None:
            return False
        tail = self.tokens[keep + discard :]
        self.exact = min(self.exact, keep)
        self.tokens.truncate(keep)
        self.checkpoints.truncate(keep)
        self.held = None
        for cache, way in zip(self.caches, ways, strict=True):
            cache.shift(keep, discard, way)
        self.tokens.extend(tail)
        return True


def _can_undo(extent: Extent, passes: Sequence[int]) -> bool:
    """Return True if a layer with `extent` can go back to it after `passes`."""
    later = extent
    for tokens in passes:
        later = later.after(tokens)
    return later.reachable(extent.offset) == extent.offset
