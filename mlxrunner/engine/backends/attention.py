"""Compute the attention of one row of tokens in parts.

A long piece of a prompt attends by itself. The other queries read the cells that they share with
each other together. The attention over all parts of a query is one softmax: the parts are added,
weighted by the logarithms of the sums of their exponentials, as in Flash Decoding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from mlxrunner.cache.pool.attention_split import (
    AnyPart,
    Gathered,
    Level,
    Own,
    Split,
    SplitPart,
    StackedParts,
)
from mlxrunner.cache.pool.cell_table import Bools, runs
from mlxrunner.system.mlx_lm_internals import Attention

MANY_RUNS = 8
"""Number of runs beyond which one gather is faster than a slice for each run."""
NOTHING = -1e30
"""The score of a cell that is not seen, and the weight of a part without cells.

It is finite, so that differences of two are numbers.
"""


class Partial(NamedTuple):
    """The attention of some queries over a part of what they see."""

    values: mx.array
    """The mean of the values, `[1, groups, per_group, n, d]`."""
    weights: mx.array
    """The logarithm of the sum of the exponentials of the scores, `[1, groups, per_group, n, 1]`.

    Always float32.
    """

    def plus(self, other: Partial) -> Partial:
        """Return the attention over this part and another one."""
        share = mx.sigmoid(self.weights - other.weights)
        values = other.values + (self.values - other.values) * share
        return Partial(values, mx.logaddexp(self.weights, other.weights))


class _Own:
    """A long piece of one sequence, which attends by itself."""

    def __init__(self, own: Own) -> None:
        self.order, self._queries = range(own.begin, own.end), slice(own.begin, own.end)
        self._mask = "causal" if own.visible is None else mx.array(own.visible)
        self._runs = runs(own.cells)
        self._cells = mx.array(own.cells) if len(self._runs) > MANY_RUNS else None

    def whole(
        self, attention: Attention, queries: mx.array, keys: mx.array, values: mx.array, **more: Any
    ) -> mx.array:
        stored = self._read(keys), self._read(values)
        return attention(queries[..., self._queries, :], *stored, mask=self._mask, **more)

    def _read(self, buffer: mx.array) -> mx.array:
        if self._cells is not None:
            return mx.take(buffer, self._cells, axis=2)
        found = [buffer[..., run.begin : run.end, :] for run in self._runs]
        return found[0] if len(found) == 1 else mx.concatenate(found, axis=2)


class _Part:
    """Some queries over a run of cells."""

    def __init__(self, part: SplitPart) -> None:
        self.order, self._cells = part.queries, slice(*part.cells)
        self._rows = _Rows(part.queries)
        self._mask = None if part.visible is None else mx.array(part.visible)

    def whole(
        self, attention: Attention, queries: mx.array, keys: mx.array, values: mx.array, **more: Any
    ) -> mx.array:
        stored = keys[..., self._cells, :], values[..., self._cells, :]
        return attention(self._rows.of(queries), *stored, mask=self._mask, **more)

    def partial(self, queries: mx.array, keys: mx.array, values: mx.array) -> Partial:
        own = keys[..., self._cells, :].swapaxes(-1, -2)
        scores = _seen(_product(self._rows.of(queries), own), self._mask)
        weights = mx.softmax(scores, axis=-1)
        found = _product(weights.astype(values.dtype), values[..., self._cells, :])
        return Partial(found, _weight(scores, weights))


class _Batch(ABC):
    """One query of each of many sequences, whose cells are a batch `[n, groups, length, d]`."""

    def __init__(self, queries: Sequence[int], visible: Bools | None) -> None:
        self.order = list(queries)
        self._rows = _Rows(queries)
        self._mask = None if visible is None else mx.array(visible)[:, None, None]

    def whole(
        self, attention: Attention, queries: mx.array, keys: mx.array, values: mx.array, **more: Any
    ) -> mx.array:
        mine = self._rows.of(queries).transpose(2, 1, 0, 3)
        found = attention(mine, self._view(keys), self._view(values), mask=self._mask, **more)
        return self._drop(found.transpose(2, 1, 0, 3))

    def partial(self, queries: mx.array, keys: mx.array, values: mx.array) -> Partial:
        mine = self._rows.of(queries).transpose(3, 1, 2, 0, 4)[..., 0, :]
        scores = _seen(mine @ self._view(keys).swapaxes(-1, -2), self._mask)
        weights = mx.softmax(scores, axis=-1)
        found = weights.astype(values.dtype) @ self._view(values)
        both = (found, _weight(scores, weights))
        return Partial(*(self._drop(part[..., None, :].transpose(3, 1, 2, 0, 4)) for part in both))

    def _drop(self, rows: mx.array) -> mx.array:
        """Drop the rows whose results are not used."""
        return rows

    @abstractmethod
    def _view(self, buffer: mx.array) -> mx.array:
        """Return the cells of `buffer [1, groups, cells, d]` as `[n, groups, length, d]`."""


class _Stack(_Batch):
    """Stacked parts: their cells are a stretch of the buffer that is a batch without any copy."""

    def __init__(self, stacked: StackedParts) -> None:
        super().__init__(stacked.queries, stacked.visible)
        self._stacked = stacked
        is_all = len(stacked.wanted) == len(stacked.queries)
        self._wanted = None if is_all else mx.array(stacked.wanted)
        self.order = [stacked.queries[index] for index in stacked.wanted]

    def _drop(self, rows: mx.array) -> mx.array:
        return rows if self._wanted is None else mx.take(rows, self._wanted, axis=-2)

    def _view(self, buffer: mx.array) -> mx.array:
        stacked, count = self._stacked, len(self._stacked.queries)
        stretch = buffer[0, :, stacked.begin : stacked.begin + count * stacked.size]
        return stretch.reshape(buffer.shape[1], count, stacked.size, -1)[
            :, :, : stacked.length
        ].swapaxes(0, 1)


class _Gathered(_Batch):
    """Cells that lie anywhere, copied into a batch."""

    def __init__(self, gathered: Gathered) -> None:
        super().__init__(gathered.queries, gathered.visible)
        self._cells = mx.array(gathered.cells)

    def _view(self, buffer: mx.array) -> mx.array:
        # Not of `buffer[0]`: an index that is a number is a gather, which copies the whole buffer.
        return mx.take(buffer, self._cells, axis=2).squeeze(0).swapaxes(0, 1)


def _prepared(part: AnyPart) -> _Part | _Batch:
    if isinstance(part, SplitPart):
        return _Part(part)
    return _Stack(part) if isinstance(part, StackedParts) else _Gathered(part)


class _Level:
    """Parts of which each query is in at most one."""

    def __init__(self, level: Level, queries: Sequence[int]) -> None:
        """Prepare a level. `queries`: the indices of all queries that are in any level."""
        self._parts = [_prepared(part) for part in level]
        self.order = [query for part in self._parts for query in part.order]
        missing = sorted({*queries}.difference(self.order))
        self._missing, self._join = len(missing), _Join([*self.order, *missing])

    def whole(self, *args: Any, **more: Any) -> list[mx.array]:
        """Return the attention of each part, for queries that are in no other level."""
        return [part.whole(*args, **more) for part in self._parts]

    def partial(self, queries: mx.array, keys: mx.array, values: mx.array) -> Partial:
        """Return the attention of all queries; those without a part here get a weight of nothing.

        `queries [1, groups, per_group, n, d]` are scaled.
        """
        found = [part.partial(queries, keys, values) for part in self._parts]
        if self._missing:
            shape = (*queries.shape[:3], self._missing)
            nothing = mx.zeros((*shape, values.shape[-1]), values.dtype)
            found.append(Partial(nothing, mx.full((*shape, 1), NOTHING, mx.float32)))
        return Partial(*(self._join([part[index] for part in found]) for index in (0, 1)))


class SplitAttention:
    """A split with its masks on the device, made once for all layers of a step."""

    def __init__(self, split: Split) -> None:
        self._own = [_Own(own) for own in split.own]
        in_parts = {query for level in split.levels for part in level for query in part.queries}
        queries = sorted(in_parts)
        self._levels = [_Level(level, queries) for level in split.levels]
        order = self._levels[0].order if len(self._levels) == 1 else queries
        self._join = _Join([*(query for own in self._own for query in own.order), *order])

    def attend(
        self,
        attention: Attention,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        sinks: mx.array | None,
        cache: Any,
    ) -> mx.array:
        """Return the attention `[1, heads, n, head_dim]` of `queries`, which have the same shape.

        `keys` and `values [1, kv_heads, cells, head_dim]` are whole buffers. `attention`: mlx-lm's
        function for queries that are in one part only.
        """
        more = {"cache": cache, "scale": scale} | ({} if sinks is None else {"sinks": sinks})
        found = [own.whole(attention, queries, keys, values, **more) for own in self._own]
        if len(self._levels) == 1:
            found += self._levels[0].whole(attention, queries, keys, values, **more)
        elif self._levels:
            found.append(self._added(queries * scale, keys, values, sinks))
        return self._join(found)

    def _added(
        self, queries: mx.array, keys: mx.array, values: mx.array, sinks: mx.array | None
    ) -> mx.array:
        """Return the attention of the queries in levels, in their order."""
        _, heads, n, _ = queries.shape
        groups = keys.shape[1]
        grouped = queries.reshape(1, groups, heads // groups, n, -1)
        total = self._levels[0].partial(grouped, keys, values)
        for level in self._levels[1:]:
            total = total.plus(level.partial(grouped, keys, values))
        found = total.values
        if sinks is not None:
            sink = sinks.reshape(1, groups, heads // groups, 1, 1).astype(mx.float32)
            found = found * mx.sigmoid(total.weights - sink)
        return found.reshape(1, heads, found.shape[3], -1).astype(queries.dtype)


class _Rows:
    """Some rows, by their indices: a slice if they follow each other."""

    def __init__(self, indices: Sequence[int]) -> None:
        begin, end = indices[0], indices[0] + len(indices)
        follow_each_other = list(indices) == list(range(begin, end))
        self._rows = slice(begin, end) if follow_each_other else mx.array(list(indices))

    def of(self, rows: mx.array) -> mx.array:
        """Return these rows of `[..., n, d]`."""
        if isinstance(self._rows, slice):
            return rows[..., self._rows, :]
        return mx.take(rows, self._rows, axis=-2)


class _Join:
    """Joins arrays whose rows have the indices `order`, so that they ascend."""

    def __init__(self, order: Sequence[int]) -> None:
        ascending = sorted(range(len(order)), key=order.__getitem__)
        is_sorted = ascending == list(range(len(order)))
        self._order = None if is_sorted else mx.array(ascending, mx.int32)

    def __call__(self, rows: list[mx.array]) -> mx.array:
        joined = rows[0] if len(rows) == 1 else mx.concatenate(rows, axis=-2)
        return joined if self._order is None else mx.take(joined, self._order, axis=-2)


def _product(a: mx.array, b: mx.array) -> mx.array:
    """Return `[1, groups, per_group, n, k] @ [1, groups, k, m]`, a group's heads as one matrix."""
    _, groups, per_group, n, k = a.shape
    return (a.reshape(1, groups, per_group * n, k) @ b).reshape(1, groups, per_group, n, -1)


def _seen(scores: mx.array, mask: mx.array | None) -> mx.array:
    """Return the scores in float32, without those of cells that are not seen."""
    scores = scores.astype(mx.float32)
    return scores if mask is None else mx.where(mask, scores, NOTHING)


def _weight(scores: mx.array, weights: mx.array) -> mx.array:
    """Return the logarithm of the sum of exponentials, from `scores` and their softmax."""
    return scores.max(axis=-1, keepdims=True) - mx.log(weights.max(axis=-1, keepdims=True))
