"""The prefix-cache entry: the evaluated tokens, one cache per layer, and its checkpoints.

This module is bookkeeping and never imports mlx. `mlxrunner.cache.prefix` decides what a request
reuses of the entry. Tokens are on the host, in a growing numpy buffer.

A checkpoint is a copy, at one offset, of the layers that can't compute backwards (windows, states).
A model whose layers all rewind by themselves needs no checkpoints.

Three offsets of a prompt have a role, because later prompts go back to them. The other checkpoints
are spread between these. Only evaluating its tokens again brings a dropped checkpoint back.
Therefore the spacing grows with the text: one checkpoint per `length / (free + 1)` tokens, where
`free` is the number of checkpoints that the budget holds beside the PINNED ones.

Of several entries, in memory or on disk, `GreedyDual` chooses the one to evict by GreedyDual-Size
(Cao and Irani, 1997): the value of an entry is its cost per byte, plus the clock at its last use.
Whatever is evicted moves the clock to its value. So one that is never used again goes at some time,
however expensive it was.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from reprlib import repr
from typing import Any, Generic, Literal, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from mlxrunner.cache.protocol import END, Extent, LayerCache, reach
from mlxrunner.cache.saved import Exported, Saved, SavedCheckpoint, SavedEntry
from mlxrunner.errors import OptionError, PromptError

TokenArray = NDArray[np.int32]
SHORT_TAIL = 4
"""Most last tokens of a conversation that its continuation may lack.

Templates end an answer in their own way.
"""


FIRST_OF_PICTURES = 2**30
"""The first id of a position of a picture. No vocabulary is as large."""


def has_pictures(tokens: TokenArray) -> bool:
    """Return True if positions of pictures are among the tokens."""
    return len(tokens) > 0 and int(tokens.max()) >= FIRST_OF_PICTURES


def words(tokens: TokenArray) -> TokenArray:
    """Return `tokens` without the positions of pictures, as a view if there are none."""
    if not has_pictures(tokens):
        return tokens
    return tokens[tokens < FIRST_OF_PICTURES]


def as_tokens(tokens: Sequence[int] | NDArray[Any]) -> TokenArray:
    """Return a copy of the token ids as an int32 array.

    Raise PromptError unless they are whole numbers from 0 to 2**31 - 1.
    """
    try:
        array = np.array(tokens)
    except (ValueError, OverflowError) as error:
        raise PromptError(
            f"token ids have to be a flat list of integers, not {repr(tokens)}"
        ) from error
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise PromptError(
            f"token ids have to be a flat list of integers, not {repr(tokens)} "
            f"({array.dtype} of shape {array.shape})"
        )
    if array.min() < 0 or array.max() > np.iinfo(np.int32).max:
        raise PromptError(
            f"token ids have to be between 0 and {np.iinfo(np.int32).max}, "
            f"not {array.min()} to {array.max()}"
        )
    return array.astype(np.int32, copy=False)


def common_prefix(a: TokenArray, b: TokenArray) -> int:
    """Return the length in tokens of the longest common prefix (0.03 ms for 128k tokens)."""
    length = min(len(a), len(b))
    if not length or a[0] != b[0]:
        return 0
    different = a[:length] != b[:length]
    first = int(different.argmax())
    return first if different[first] else length


def goes_on(shared: int, length: int) -> bool:
    """Return True if a prompt continues a conversation of `length` tokens.

    `shared`: the first tokens that they have in common. It is all of them but a short tail.
    """
    return length - shared <= min(SHORT_TAIL, shared // 2)


class TokenBuffer(Sequence[int]):
    """An append-and-truncate list of token ids that numpy compares without a conversion.

    The length changes last, so that an interrupt leaves either the old or the new content.
    """

    __slots__ = ("_data", "_length")

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._data = np.empty(256, np.int32)
        self._length = 0
        self.extend(tokens)

    @property
    def array(self) -> TokenArray:
        """The tokens, as a view that is valid until the next change."""
        return self._data[: self._length]

    def append(self, token: int) -> None:
        if self._length == len(self._data):
            self._grow(self._length + 1)
        self._data[self._length] = token
        self._length += 1

    def extend(self, tokens: Sequence[int] | TokenArray) -> None:
        end = self._length + len(tokens)
        if end > len(self._data):
            self._grow(end)
        self._data[self._length : end] = tokens
        self._length = end

    def truncate(self, length: int) -> None:
        self._length = min(self._length, length)

    def _grow(self, need: int) -> None:
        data = np.empty(max(need, 2 * len(self._data)), np.int32)
        data[: self._length] = self.array
        self._data = data

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return iter(self.array.tolist())

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        found = self.array[index]
        return found.tolist() if isinstance(index, slice) else int(found)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenBuffer):
            return np.array_equal(self.array, other.array)
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        return f"TokenBuffer({self.array.tolist()})"


@dataclass(frozen=True)
class Shift:
    """The rule that keeps the first `keep` tokens, drops half of the rest, and moves up the end."""

    context: int
    keep: int

    def __post_init__(self) -> None:
        if self.keep > self.context - 2:
            raise OptionError(
                f"keep: {self.keep} tokens leave no room in the context of {self.context} tokens"
            )

    @property
    def target_free(self) -> int:
        """Number of tokens that are free after a shift."""
        return max((self.context - self.keep) // 2, 1)

    def discard(self, tokens: int) -> int:
        """Return how many of `tokens` tokens are dropped, right after the first `keep`."""
        return max(tokens - (self.context - self.target_free), 0)


SPACING = 256
"""Smallest spacing in tokens. A chunk is split for less only at an offset that has a role."""
HEADER = 64
"""Most tokens between the last message end and the end of the prompt: the header of the answer."""
NEAR_END = 8
"""Tokens between a checkpoint and an end that is likely to move.

Templates and retries change the last few tokens; users append lines to system prompts.
"""
INTERVAL = 1024
"""Tokens between two checkpoints while the budget has room for many."""

Role = Literal["answer", "system", "message"]
"""The place where an answer, the text after the first message or the last message begins.

Files on disk name it.
"""
ROLES: tuple[Role, ...] = ("answer", "system", "message")
"""The roles in the order in which their checkpoints are dropped, after all without a role.

Without "answer", a regenerated answer costs the evaluation of one message.
"""
PINNED = len(ROLES)
"""Checkpoints that are dropped last. The others share the rest of the budget."""


def role_named(name: object) -> Role | None:
    """Return the role that a file names; None for none, and for one that is not known."""
    return next((role for role in ROLES if role == name), None)


@dataclass(frozen=True)
class Checkpoint:
    """The state of all layers at one offset."""

    offset: int
    nbytes: int
    snapshots: Sequence[Any] = ()
    """One per layer; None for a layer that rewinds by itself."""
    role: Role | None = None


@dataclass(frozen=True)
class CheckpointPlaces:
    """Offsets of one prompt at which checkpoints are worth taking."""

    roles: Mapping[int, Role] = field(default_factory=dict)
    ends: Sequence[int] = ()
    """Offsets at which the messages of the prompt end."""
    until: int = 0
    """The offset from which on no prefill pauses."""
    ahead: bool = False
    """True if the prompt is evaluated before its answer is asked for."""


def places_of(
    total: int, message_ends: Sequence[int], *, ahead: bool = False, at: int | None = None
) -> CheckpointPlaces:
    """Return the offsets at which the next prompt is likely to leave a prompt of `total` tokens.

    At most HEADER tokens follow the answer's place. They are evaluated in one pass, as the seed of
    the answer. The place of a long system prompt is shortly before its end, so that a system prompt
    with another line appended still finds it. `message_ends`: offsets at which the messages end.
    `ahead`: the last message has no end yet. `at`: the offset up to which the prompt is evaluated;
    the last message's place is there if it is a few tokens behind, which would cost a pass.
    """
    ends = [end for end in message_ends if end < total]
    answer = (
        total if ahead else ends[-1] if ends and total - ends[-1] <= HEADER else total - NEAR_END
    )
    before = [end for end in ends if end < answer]
    roles: dict[int, Role] = {}
    if before:
        roles[before[0] - NEAR_END if before[0] >= SPACING else before[0]] = "system"
        last, here = before[-1], -1 if at is None or at in roles else at
        roles[here if 0 <= here < last <= here + NEAR_END else last] = "message"
        roles.pop(0, None)  # a cold start is there without a checkpoint
    if not ahead and answer > 0:
        roles[answer] = "answer"
    return CheckpointPlaces(roles, ends, max(answer, 0), ahead)


def spacing(length: int, slots: int, interval: int) -> int:
    """Return the tokens between two checkpoints, at least `interval`.

    `length`: tokens of the text. `slots`: number of checkpoints that the budget has room for.
    """
    return max(interval, length // (max(slots - PINNED, 0) + 1))


def thinned(items: Sequence[Checkpoint], budget: int, interval: int) -> list[Checkpoint]:
    """Return the `items` (sorted by offset) that fit into `budget` bytes.

    The last one is kept as long as others without a role can be dropped. `interval`: tokens between
    two checkpoints.
    """
    kept = list(items)
    size = max((item.nbytes for item in kept), default=0)
    while sum(item.nbytes for item in kept) > budget:
        del kept[
            _least_useful(
                kept, spacing(kept[-1].offset, slots_of(budget, size), min(SPACING, interval))
            )
        ]
    return kept


def slots_of(budget: int, nbytes: int) -> int:
    """Return the number of checkpoints of `nbytes` bytes that fit into `budget` bytes."""
    return budget // max(nbytes, 1)


def _least_useful(items: Sequence[Checkpoint], allowed: int) -> int:
    """Return the index of the checkpoint to drop.

    Checkpoints without a role come first. Of these, drop the one whose loss leaves the largest gap
    of about `allowed` tokens or less, or else the smallest gap. The last one comes next if it has
    no role. Then the order is that of ROLES.
    """
    offsets = [0, *(item.offset for item in items)]
    gaps = {
        i: offsets[i + 2] - offsets[i] for i, item in enumerate(items[:-1]) if item.role is None
    }
    if gaps:
        harmless = [i for i, gap in gaps.items() if gap <= allowed * 11 // 10]
        return (
            max(harmless, key=lambda i: gaps[i]) if harmless else min(gaps, key=lambda i: gaps[i])
        )
    if items[-1].role is None:
        return len(items) - 1
    return min(range(len(items)), key=lambda i: ROLES.index(items[i].role or "answer"))


class Checkpoints:
    """A set of checkpoints, sorted by offset, of at most `budget` bytes.

    An interrupt at any line leaves the set either unchanged or completely changed.
    """

    def __init__(self, budget: int, interval: int = INTERVAL) -> None:
        self.budget, self.interval = budget, interval
        self._items: list[Checkpoint] = []
        self._places = CheckpointPlaces()
        # Offset of the last one added, kept or not. The next comes a spacing later.
        self._offered = 0

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._items)

    @property
    def offsets(self) -> list[int]:
        return [item.offset for item in self._items]

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self._items)

    def at(self, offset: int) -> Checkpoint | None:
        """Return the checkpoint at exactly `offset`; None if there is none."""
        return next((item for item in self._items if item.offset == offset), None)

    def before(self, to: int) -> list[Checkpoint]:
        """Return the checkpoints at offsets <= `to`, the largest offset first."""
        return self._items[: bisect_right(self._items, to, key=_offset)][::-1]

    def truncate(self, to: int) -> None:
        """Drop the checkpoints and the roles beyond offset `to`."""
        self._items = self._items[: bisect_right(self._items, to, key=_offset)]
        roles = {offset: role for offset, role in self._places.roles.items() if offset <= to}
        self._places = replace(self._places, roles=roles, until=min(self._places.until, to))
        self._offered = min(self._offered, to)

    def mark(self, places: CheckpointPlaces) -> None:
        """Set the places of the next prompt.

        If `places` are of a prompt evaluated ahead, the checkpoint of the last answer keeps its
        role.
        """
        last: tuple[Role | None, ...] = ("answer",) if places.ahead else ()
        self._items = [
            replace(
                item, role=places.roles.get(item.offset, item.role if item.role in last else None)
            )
            for item in self._items
        ]
        self._places = places

    def add(self, new: Checkpoint) -> bool:
        """Add `new`, make room for it, and return True if it is kept.

        Return False if its offset is 0 or already has a checkpoint, or if it exceeds the budget.
        """
        if new.offset == 0:
            return False
        self._offered = max(self._offered, new.offset)
        if self.at(new.offset) is not None or new.nbytes > self.budget:
            return False
        items = list(self._items)
        insort(items, replace(new, role=self._places.roles.get(new.offset, new.role)), key=_offset)
        self._items = thinned(items, self.budget, self.interval)
        return self.at(new.offset) is not None

    def next_stop(self, at: int) -> int | None:
        """Return the offset of the next checkpoint of a prefill at `at`; None for no pause."""
        if at >= self._places.until:
            return None
        wanted = min(offset for offset in (*self._places.roles, self._places.until) if offset > at)
        apart = self._spacing
        due = max(self._last + apart, at + 1)
        if wanted - due < apart // 4:
            return wanted
        ends = self._places.ends
        end = ends[index - 1] if (index := bisect_right(ends, due)) else 0
        return end if end > max(at, due - apart // 2) else due

    def due(self, at: int) -> int:
        """Return the offset from which on an entry at offset `at` should take a checkpoint.

        It should take one now if the returned offset is not beyond `at`.
        """
        return at if at in self._places.roles else self._last + self._spacing

    @property
    def _last(self) -> int:
        return max(self._offered, self._items[-1].offset if self._items else 0)

    @property
    def _spacing(self) -> int:
        """Tokens from the last checkpoint to the next.

        This is the interval until a quarter of the budget is used. From then on it is a third more
        than the budget allows on average, because some checkpoints are dropped later. The factor
        was tried on thousands of histories.
        """
        slots = slots_of(
            self.budget, max((item.nbytes for item in self._items), default=self.budget)
        )
        allowed = spacing(self._last, slots, 1)
        if not self._items or (4 * len(self._items) <= slots and allowed < self.interval):
            return self.interval
        return max(min(SPACING, self.interval), allowed * 4 // 3)


def _offset(checkpoint: Checkpoint) -> int:
    return checkpoint.offset


Rotators = Callable[[Sequence[LayerCache], int], Sequence[Callable[[Any, int], Any]] | None]
"""A function that returns one rotation of keys per layer, or None if a layer's keys can't move.

Its arguments are the layers and a number of positions. See `mlxrunner.engine.backends.backend`.
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

    Those after them were moved in a full context (see docs/troubleshooting.md).
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

        Moved tokens are reused if the prompt `is_shifted` as they are, or extends all of them.
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

        Layers that could not undo a part of them are held by reference: their arrays are copied
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
        """Drop the tokens `keep .. keep + discard - 1` of every layer; move up those after them.

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


Key = TypeVar("Key", bound=Hashable)
EVEN_TOKENS = 16_384
"""Tokens of a prompt at which attention costs as much as everything else.

In operations this is 12 times the hidden size: 9,216 for a model of 0.1 billion parameters, 49,152
for one of 8 billion.
"""


def evaluation_cost(tokens: int, begin: int = 0, even: int = EVEN_TOKENS) -> float:
    """Return what evaluating `tokens` tokens costs, if the first `begin` of them are there.

    The unit is a token of a short prompt. `even` is as EVEN_TOKENS describes.
    """
    return float(tokens - begin) + (tokens * tokens - begin * begin) / even


def eviction_score(tokens: int, nbytes: int, begin: int = 0) -> float:
    """Return the cost per byte of `tokens` tokens that take `nbytes`.

    `begin`: the first tokens, which stay even if the rest is given up, and whose bytes don't count.
    """
    return evaluation_cost(tokens, begin) / max(nbytes, 1)


class GreedyDual(Generic[Key]):
    """The clock, and the clock's time when each key was last used.

    What a key is worth may change, because others share its bytes: `least` is told at each choice.
    """

    def __init__(self) -> None:
        self.clock = 0.0
        self._used: dict[Key, float] = {}

    def use(self, key: Key) -> None:
        """Note that `key` is used now."""
        self._used[key] = self.clock

    def value(self, key: Key, eviction_score: float) -> float:
        """Return the value of `key`; one that was never used is as old as the clock."""
        return self._used.get(key, 0.0) + eviction_score

    def least(self, worths: Mapping[Key, float]) -> Key:
        """Return the key of `worths` with the least value. Raise ValueError if there is none.

        Of keys of equal value it is the first.
        """
        return min(worths, key=lambda key: self.value(key, worths[key]))

    def evict(self, key: Key, eviction_score: float) -> None:
        """Note that `key` is evicted, and move the clock to its value."""
        self.clock = max(self.clock, self.value(key, eviction_score))
        self.forget(key)

    def forget(self, key: Key) -> None:
        """Forget `key`, which is gone for another reason."""
        self._used.pop(key, None)
