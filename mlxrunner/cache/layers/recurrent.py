"""The layer cache of recurrent and convolution states.

It can stay at its offset, undo the last forward pass, or go back through a checkpoint. The states
of several sequences can lie in a stack, which a model runs as one batch. Each cache then reads its
own states out of the stack when they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from mlxrunner.cache.layers.base import ArrayCache, contiguous, leaves, tree_bytes
from mlxrunner.cache.layers.extents import LastPass
from mlxrunner.cache.protocol import Extent, LayerCache, Layout
from mlxrunner.cache.saved import Saved

States = list[mx.array | None]


class _Place(NamedTuple):
    """The place of a cache in a stack."""

    stack: Stack
    row: int
    base: int
    """Offset of the cache when the stack was made."""


class RecurrentCache(ArrayCache):
    """A state that each forward pass overwrites. The state before the last pass is kept."""

    kind = "recurrent"
    outline_after = (1, 2, 3, 7)

    def __init__(self, inner: ArraysCache) -> None:
        """Wrap `inner`, a new ArraysCache of mlx-lm."""
        self.inner = inner
        self._empty: States = list(inner.cache)
        self._before: tuple[int, States] = (0, self._empty)
        self._offset = 0
        self._place: _Place | None = None
        """The place of the states; None: in `inner`. What is in `inner` else counts for nothing."""

    @property
    def model_cache(self) -> ArraysCache:
        self.leave()
        return self.inner

    @property
    def offset(self) -> int:
        place = self._place
        return self._offset if place is None else place.base + place.stack.passed(place.row)

    @property
    def extent(self) -> Extent:
        place = self._place
        if place is None:
            return LastPass(self._offset, self._before[0])
        stack, row, base = place
        return LastPass(base + stack.passed(row), base + stack.began(row))

    @property
    def state(self) -> Any:
        """The states, to be evaluated: those of the whole stack, if it is in one."""
        return leaves(self.inner.cache) if self._place is None else self._place.stack.state

    @property
    def nbytes(self) -> int:
        parts = 1 if self._place is None else len(self._place.stack.members)
        return tree_bytes(self.state) // parts

    def begin_forward(self) -> None:
        self.leave()
        self._before = (self._offset, list(self.inner.cache))

    def end_forward(self, tokens: int) -> None:
        if tokens > 1:
            _cut_loose(self.inner)
        self._offset += tokens

    def go_back(self, to: int) -> None:
        """Undo the last pass, also one that never ended and left the offset where it was."""
        if to == self.extent.before:  # type: ignore[attr-defined]
            self._become(self._states_before(), to)

    def layouts(self) -> list[Layout]:
        return [Layout(self.kind, fixed_bytes=2 * self.nbytes, checkpoint_fixed=self.nbytes)]

    def arrays(self) -> dict[str, mx.array]:
        """Return the present states, without those before the last forward pass."""
        states = enumerate(self._states())
        return {str(index): state for index, state in states if state is not None}

    def fill(self, arrays: Mapping[str, mx.array], offset: int) -> None:
        states = [arrays.get(str(index)) for index in range(len(self._empty))]
        self._become(states if offset else list(self._empty), offset)

    def copy(self, other: LayerCache, to: int) -> None:
        """Take the states of `other` at `to`: the present ones, or those before its last pass."""
        assert isinstance(other, RecurrentCache)
        self._become(list(other._states() if to == other.offset else other._states_before()), to)

    def to_mlx_lm(self, saved: Saved, offset: int) -> ArraysCache:
        self.fill(saved.arrays, offset)
        return self.inner

    def from_mlx_lm(self, inner: Any) -> Saved:
        if type(inner) is not type(self.inner):
            return super().from_mlx_lm(inner)
        states = enumerate(inner.cache)
        return Saved(self.kind, {str(index): state for index, state in states if state is not None})

    @property
    def shape(self) -> tuple[Any, ...] | None:
        """Sizes and types that the members of a stack share: none before the first token.

        None if the layer can't be in a stack.
        """
        states = self.inner.cache if self._place is None else self._place.stack.inner.cache
        there = [state for state in states if state is not None]
        if there and len(there) < len(states):
            return None
        return tuple((state.shape[1:], state.dtype) for state in there)

    @property
    def stack(self) -> Stack | None:
        """The stack that has the states now."""
        return None if self._place is None else self._place.stack

    def leave(self) -> None:
        """Take the states, and those before the last pass, out of the stack."""
        place = self._place
        if place is None:
            return
        now, before = self._states(), self._states_before()
        _dispatch(leaves([now, before]))  # until then they keep the whole stack alive
        self.inner.cache, self._offset = now, self.offset
        self._before = (place.base + place.stack.began(place.row), before)
        self._place = None
        place.stack.lose()

    def _become(self, states: States, offset: int) -> None:
        """Replace the states by `states`, which nothing undoes."""
        place = self._place
        self._before = (offset, list(states))
        self.inner.cache, self._offset = states, offset
        self._place = None
        if place is not None:
            place.stack.lose(settle=offset > 0)

    def _states(self) -> States:
        place = self._place
        return self.inner.cache if place is None else _row(place.stack.inner.cache, place.row)

    def _states_before(self) -> States:
        place = self._place
        return list(self._before[1]) if place is None else _row(place.stack.before, place.row)

    def _join(self, stack: Stack, row: int) -> None:
        """Let `stack`, which was made with the present states, have them from now on."""
        self._place = _Place(stack, row, self.offset)
        self.inner.cache, self._before = list(self._empty), (0, self._empty)


class Stack:
    """The states of several sequences as one batch, for layers that run them at once.

    A forward pass lies between `begin_forward` and `end_forward`, as those of a layer cache do, and
    is one for all members: no array is touched for a single one as long as the members stay.
    """

    def __init__(self, members: Sequence[RecurrentCache]) -> None:
        """Move the present states of `members`, whose shapes agree, into one batch."""
        self.members = list(members)
        self.inner = _cache_of(_together(members))
        self._passed: tuple[int, Sequence[int]] = (0, (0,) * len(members))
        """Tokens that passed since the stack was made: those of all, and what each has more."""
        self._before: tuple[tuple[int, Sequence[int]], States]
        self._before = (self._passed, list(self.inner.cache))
        self.is_whole = True
        """False once a member's states are elsewhere. Then the stack takes no more passes."""
        left = {id(member.stack): member.stack for member in members if member.stack}
        for row, member in enumerate(members):
            member._join(self, row)
        for stack in left.values():
            stack.lose()

    @classmethod
    def of(cls, members: list[RecurrentCache]) -> Stack:
        """Return the stack of exactly these members, which is made if there is none."""
        stack = members[0].stack
        if stack is not None and stack.is_whole and stack.members == members:
            return stack
        return cls(members)

    @property
    def model_cache(self) -> ArraysCache:
        return self.inner

    @property
    def state(self) -> list[mx.array]:
        return leaves(self.inner.cache)

    def passed(self, row: int) -> int:
        """Return the tokens of a member that passed since the stack was made."""
        return self._passed[0] + self._passed[1][row]

    def began(self, row: int) -> int:
        """Return its tokens that had passed before the last pass."""
        return self._before[0][0] + self._before[0][1][row]

    @property
    def before(self) -> States:
        """The states before the last pass."""
        return self._before[1]

    def begin_forward(self) -> None:
        self._before = (self._passed, list(self.inner.cache))

    def end_forward(self, tokens: Sequence[int]) -> None:
        """End a pass with the `tokens` of each member."""
        least = min(tokens)
        if tokens[-1] > 1:
            _cut_loose(self.inner)
        every, more = self._passed
        if any(count > least for count in tokens):
            more = [had + count - least for had, count in zip(more, tokens, strict=True)]
        self._passed = (every + least, more)

    def stages(self, firsts: Sequence[int]) -> Iterator[ArraysCache]:
        """Yield a cache of the members from each of `firsts` on, for one stage of a pass each.

        The members before them have ended their pass. `firsts` ascend, and begin with 0.
        """
        ended, rest, at = list[States](), self.inner, 0
        for first in firsts:
            if first > at:
                ended.append([_rows(state, 0, first - at) for state in rest.cache])
                rest = _cache_of([_rows(state, first - at, None) for state in rest.cache])
            at = first
            yield rest
        if ended:
            parts = zip(*ended, rest.cache, strict=True)
            self.inner.cache = [
                None if part[0] is None else mx.concatenate(list(part)) for part in parts
            ]

    def lose(self, *, settle: bool = True) -> None:
        """Note that a member has gone.

        With `settle`, the last ones go when they are less than half: they keep the whole batch.
        """
        self.is_whole = False
        left = [member for member in self.members if member.stack is self]
        if settle and 2 * len(left) < len(self.members):
            self.members = left
            for member in left:
                member.leave()


_dispatch: Callable[[Any], None] = mx.async_eval


def _cut_loose(cache: ArraysCache) -> None:
    """Copy states that are views: mlx-lm's models leave views of a whole chunk."""
    cache.cache = [None if state is None else contiguous(state) for state in cache.cache]


def _row(states: Sequence[mx.array | None], row: int) -> States:
    return [None if state is None else contiguous(state[row : row + 1]) for state in states]


def _rows(state: mx.array | None, begin: int, end: int | None) -> mx.array | None:
    return None if state is None else state[begin:end]


def _cache_of(states: States) -> ArraysCache:
    cache = ArraysCache(len(states))
    cache.cache = states
    return cache


def _together(members: Sequence[RecurrentCache]) -> States:
    """Return the states of `members` as batches: one gather for each stack that they come from."""
    if not members[0].shape:
        return list(members[0]._empty)
    pieces = list(_pieces(members))
    return [
        parts[0] if len(parts) == 1 else mx.concatenate(list(parts))
        for parts in zip(*pieces, strict=True)
    ]


def _pieces(members: Sequence[RecurrentCache]) -> Iterator[list[mx.array]]:
    for place, found in groupby(members, key=lambda member: member.stack or member):
        run: Any = list(found)
        if isinstance(place, Stack):
            rows = mx.array([member._place.row for member in run])
            yield [mx.take(state, rows, axis=0) for state in leaves(place.inner.cache)]
        else:
            yield leaves(run[0].inner.cache)
