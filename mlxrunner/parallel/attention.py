"""Attention of one row of tokens in parts: what all sequences share once, and what each has of its own by itself.

mlx-lm's attention layers call a function `scaled_dot_product_attention` of their module. For the life of an adaptation a layer gets a
class of its own in which that name means ours; the module, other models and other layers are as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrunner.cache.split import Lanes, Part, Split

NAME = "scaled_dot_product_attention"
Attention = Callable[..., mx.array]


def calls_attention(module: Any) -> bool:
    """Whether a layer gets its attention through the function that can be exchanged."""
    call = type(module).__call__
    return (
        isinstance(call, FunctionType)
        and NAME in call.__code__.co_names
        and NAME in call.__globals__
    )


def class_with(module: Any, attention: Callable[[Attention], Attention]) -> type:
    """The class of `module`, but with `attention(original)` instead of the original function."""
    old = type(module)
    call = old.__call__
    names = {**call.__globals__, NAME: attention(call.__globals__[NAME])}
    new = FunctionType(call.__code__, names, call.__name__, call.__defaults__, call.__closure__)
    new.__kwdefaults__ = call.__kwdefaults__
    return type(old.__name__, (old,), {"__call__": new, "__module__": old.__module__})


class _Single:
    """A part: some queries of one sequence, over a run of cells."""

    def __init__(self, part: Part) -> None:
        self.queries, self.cells = slice(part.begin, part.end), slice(*part.cells)
        self.mask = None if part.visible is None else mx.array(part.visible)
        self.is_causal = part.visible is not None and _is_causal(part.visible)

    def take(self, rows: mx.array) -> mx.array:
        """Of `[1, groups, per_group, n, d]`, its own: `[1, groups, per_group, queries, d]`."""
        return rows[..., self.queries, :]

    def product(self, rows: mx.array, buffer: mx.array, *, transposed: bool = False) -> mx.array:
        """`rows [1, groups, per_group, queries, k]`, times its cells of `buffer [1, groups, cells, d]`."""
        own = buffer[..., self.cells, :]
        return product(rows, own.swapaxes(-1, -2) if transposed else own)

    def whole(
        self, attention: Attention, queries: mx.array, keys: mx.array, values: mx.array, **more: Any
    ) -> mx.array:
        """`queries [1, heads, n, d]` -> its own, `[1, heads, queries, d]`."""
        return attention(
            queries[..., self.queries, :], keys[..., self.cells, :], values[..., self.cells, :],
            mask="causal" if self.is_causal else self.mask, **more,
        )  # fmt: skip

    def drop(self, rows: mx.array) -> mx.array:
        return rows

    @property
    def order(self) -> Sequence[int]:
        return range(self.queries.start, self.queries.stop)


class _Batch:
    """Lanes: a query of each of many sequences, over a stretch of the buffer that is a batch already."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes, self._queries = lanes, mx.array(lanes.queries)
        self._wanted = mx.array(lanes.wanted) if len(lanes.wanted) < len(lanes.queries) else None
        self.mask = None if lanes.visible is None else mx.array(lanes.visible)[None, None, None]
        self.order = [lanes.queries[index] for index in lanes.wanted]

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
        """Without what nobody asked for."""
        return rows if self._wanted is None else mx.take(rows, self._wanted, axis=-2)

    def _view(self, buffer: mx.array) -> mx.array:
        """`[1, groups, cells, d]` -> `[lanes, groups, length, d]`, the same memory."""
        lanes, count = self._lanes, len(self._lanes.queries)
        stretch = buffer[0, :, lanes.begin : lanes.begin + count * lanes.size]
        return stretch.reshape(buffer.shape[1], count, lanes.size, -1)[
            :, :, : lanes.length
        ].swapaxes(0, 1)


class Parts:
    """A split with its masks on the device, made once for all layers of a step."""

    def __init__(self, split: Split) -> None:
        self._common = split.common
        self._parts: list[_Single | _Batch] = [
            *map(_Single, split.parts),
            *map(_Batch, split.lanes),
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
        """`queries [1, heads, n, head_dim]`; `keys` and `values [1, kv_heads, cells, head_dim]`: whole buffers."""
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
        """One softmax over the scores of both; each product is made where it is dense."""
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
        """Those of all parts, in the order of the queries."""
        joined = rows[0] if len(rows) == 1 else mx.concatenate(rows, axis=-2)
        return joined if self._order is None else mx.take(joined, self._order, axis=-2)


def product(a: mx.array, b: mx.array) -> mx.array:
    """`[1, groups, per_group, n, k] @ [1, groups, k, m]`, the heads of a group as one matrix."""
    _, groups, per_group, n, k = a.shape
    return (a.reshape(1, groups, per_group * n, k) @ b).reshape(1, groups, per_group, n, -1)


def _is_causal(visible: np.ndarray[Any, Any]) -> bool:
    """Whether each query sees exactly what is before it and itself, the last one all."""
    queries, cells = visible.shape
    return cells >= queries and bool(
        (visible == np.tri(queries, cells, cells - queries, dtype=np.bool_)).all()
    )
