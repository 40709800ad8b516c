"""Compute the attention of one row of tokens in parts.

One part covers the cells that all sequences share; the others cover each sequence's own cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrunner.cache.shared.split import Part, Split, StackedParts
from mlxrunner.system.mlx_lm_internals import Attention


class _Single:
    """A part: some queries of one sequence, over a run of cells."""

    def __init__(self, part: Part) -> None:
        self.queries, self.cells = slice(part.begin, part.end), slice(*part.cells)
        self.mask = None if part.visible is None else mx.array(part.visible)
        self.is_causal = part.visible is not None and _is_causal(part.visible)

    def take(self, rows: mx.array) -> mx.array:
        """Return this part's rows: `[1, groups, per_group, n, d]` to `[..., queries, d]`."""
        return rows[..., self.queries, :]

    def product(self, rows: mx.array, buffer: mx.array, *, transposed: bool = False) -> mx.array:
        """Multiply `rows` by this part's cells of `buffer`.

        Shapes: `rows [1, groups, per_group, queries, k]`, `buffer [1, groups, cells, d]`.
        """
        own = buffer[..., self.cells, :]
        return product(rows, own.swapaxes(-1, -2) if transposed else own)

    def whole(
        self, attention: Attention, queries: mx.array, keys: mx.array, values: mx.array, **more: Any
    ) -> mx.array:
        """Return the attention `[1, heads, queries, d]` of this part's `queries`.

        `queries [1, heads, n, d]` are those of all parts.
        """
        mask = "causal" if self.is_causal else self.mask
        own = queries[..., self.queries, :]
        stored = keys[..., self.cells, :], values[..., self.cells, :]
        return attention(own, *stored, mask=mask, **more)

    def drop(self, rows: mx.array) -> mx.array:
        return rows

    @property
    def order(self) -> Sequence[int]:
        return range(self.queries.start, self.queries.stop)


class _Stack:
    """Stacked parts: one query of each of many sequences.

    Their cells are a stretch of the buffer that is a batch without any copy.
    """

    def __init__(self, stacked: StackedParts) -> None:
        self._stacked, self._queries = stacked, mx.array(stacked.queries)
        self._wanted = (
            mx.array(stacked.wanted) if len(stacked.wanted) < len(stacked.queries) else None
        )
        self.mask = None if stacked.visible is None else mx.array(stacked.visible)[None, None, None]
        self.order = [stacked.queries[index] for index in stacked.wanted]

    def take(self, rows: mx.array) -> mx.array:
        return mx.take(rows, self._queries, axis=-2)

    def product(self, rows: mx.array, buffer: mx.array, *, transposed: bool = False) -> mx.array:
        own = self._view(buffer)
        batched = rows.transpose(3, 1, 2, 0, 4)[..., 0, :] @ (
            own.swapaxes(-1, -2) if transposed else own
        )
        return batched[..., None, :].transpose(3, 1, 2, 0, 4)

    def whole(
        self, attention: Attention, queries: mx.array, keys: mx.array, values: mx.array, **more: Any
    ) -> mx.array:
        mine = mx.take(queries, self._queries, axis=2).transpose(2, 1, 0, 3)
        mask = None if self.mask is None else self.mask[0, 0, 0][:, None, None]
        return self.drop(
            attention(mine, self._view(keys), self._view(values), mask=mask, **more).transpose(
                2, 1, 0, 3
            )
        )

    def drop(self, rows: mx.array) -> mx.array:
        """Drop the rows of lanes whose results are not used."""
        return rows if self._wanted is None else mx.take(rows, self._wanted, axis=-2)

    def _view(self, buffer: mx.array) -> mx.array:
        """View `buffer [1, groups, cells, d]` as `[stacked, groups, length, d]`, without a copy."""
        stacked, count = self._stacked, len(self._stacked.queries)
        stretch = buffer[0, :, stacked.begin : stacked.begin + count * stacked.size]
        return stretch.reshape(buffer.shape[1], count, stacked.size, -1)[
            :, :, : stacked.length
        ].swapaxes(0, 1)


class Parts:
    """A split with its masks on the device, made once for all layers of a step."""

    def __init__(self, split: Split) -> None:
        self._common = split.common
        self._parts: list[_Single | _Stack] = [
            *map(_Single, split.parts),
            *map(_Stack, split.stacks),
        ]
        order = [query for part in self._parts for query in part.order]
        self._order = None if order == sorted(order) else mx.array(np.argsort(order))

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
        function for parts without common cells.
        """
        if self._common.end > self._common.begin:
            return self._with_common(queries, keys, values, scale, sinks)
        more = (
            {"cache": cache, "scale": scale}
            if sinks is None
            else {"cache": cache, "scale": scale, "sinks": sinks}
        )
        return self._in_order(
            [part.whole(attention, queries, keys, values, **more) for part in self._parts]
        )

    def _with_common(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        """Compute one softmax over the scores of common and own cells, from dense products."""
        _, heads, n, _ = queries.shape
        groups, common = keys.shape[1], slice(*self._common)
        shared = self._common.end - self._common.begin
        grouped = (queries * scale).reshape(1, groups, heads // groups, n, -1)
        shared_scores = product(grouped, keys[..., common, :].swapaxes(-1, -2))
        shared_weights, own = [], []
        for part in self._parts:
            scores = part.product(part.take(grouped), keys, transposed=True)
            if part.mask is not None:
                scores = mx.where(part.mask, scores, mx.array(-mx.inf, scores.dtype))
            columns = [part.take(shared_scores), scores]
            if sinks is not None:
                sink = sinks.reshape(1, groups, heads // groups, 1, 1).astype(scores.dtype)
                columns.append(mx.broadcast_to(sink, (*scores.shape[:4], 1)))
            weights = mx.softmax(mx.concatenate(columns, axis=-1), axis=-1, precise=True)
            of_own = part.product(weights[..., shared : shared + scores.shape[-1]], values)
            shared_weights.append(part.drop(weights[..., :shared]))
            own.append(part.drop(of_own))
        both = product(self._in_order(shared_weights), values[..., common, :]) + self._in_order(own)
        return both.reshape(1, heads, n, -1)

    def _in_order(self, rows: list[mx.array]) -> mx.array:
        """Join the rows of all parts, in the order of the queries."""
        joined = rows[0] if len(rows) == 1 else mx.concatenate(rows, axis=-2)
        return joined if self._order is None else mx.take(joined, self._order, axis=-2)


def product(a: mx.array, b: mx.array) -> mx.array:
    """Return `[1, groups, per_group, n, k] @ [1, groups, k, m]`, a group's heads as one matrix."""
    _, groups, per_group, n, k = a.shape
    return (a.reshape(1, groups, per_group * n, k) @ b).reshape(1, groups, per_group, n, -1)


def _is_causal(visible: np.ndarray[Any, Any]) -> bool:
    """Return True if each query sees itself and all cells before it, and the last one sees all."""
    queries, cells = visible.shape
    return cells >= queries and bool(
        (visible == np.tri(queries, cells, cells - queries, dtype=np.bool_)).all()
    )
