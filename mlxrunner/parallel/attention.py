"""Attention of one row of tokens in parts: what all sequences share once, and what each has of its own by itself.

mlx-lm's attention layers call a function `scaled_dot_product_attention` of their module. For the life of an adaptation a layer gets a
class of its own in which that name means `in_parts`; the module, other models and other layers are as they were.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrunner.cache.cells import Run
from mlxrunner.cache.split import Split

NAME = "scaled_dot_product_attention"
Attention = Callable[..., mx.array]


def calls_attention(module: Any) -> bool:
    """Whether a layer gets its attention through the function that can be exchanged."""
    call = type(module).__call__
    return isinstance(call, FunctionType) and NAME in call.__code__.co_names and NAME in call.__globals__


def class_with(module: Any, attention: Callable[[Attention], Attention]) -> type:
    """The class of `module`, but with `attention(original)` instead of the original function."""
    old = type(module)
    call = old.__call__
    names = {**call.__globals__, NAME: attention(call.__globals__[NAME])}
    new = FunctionType(call.__code__, names, call.__name__, call.__defaults__, call.__closure__)
    new.__kwdefaults__ = call.__kwdefaults__
    return type(old.__name__, (old,), {"__call__": new, "__module__": old.__module__})


class Parts:
    """A split with its masks on the device, made once for all layers of a step."""

    def __init__(self, split: Split) -> None:
        self.common = split.common
        self.parts = [
            (part.begin, part.end, part.cells, None if part.visible is None else mx.array(part.visible)) for part in split.parts
        ]
        self._causal = [part.visible is not None and _is_causal(part.visible) for part in split.parts]

    def attend(
        self,
        whole: Attention,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        """`queries [1, heads, n, head_dim]`, `keys` and `values [1, kv_heads, history, head_dim]` -> `[1, heads, n, head_dim]`."""
        if self.common.end > self.common.begin:
            return self._with_common(queries, keys, values, scale, sinks)
        more = {} if sinks is None else {"sinks": sinks}
        return mx.concatenate(
            [
                whole(
                    queries[..., begin:end, :], _rows(keys, cells), _rows(values, cells),
                    cache=cache, scale=scale, mask="causal" if causal else mask, **more,
                )
                for (begin, end, cells, mask), causal in zip(self.parts, self._causal, strict=True)
            ],
            axis=2,
        )  # fmt: skip

    def _with_common(self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        """One softmax over the scores of both; each product is made where it is dense."""
        _, heads, n, _ = queries.shape
        groups, shared = keys.shape[1], self.common.end - self.common.begin
        grouped = (queries * scale).reshape(1, groups, heads // groups, n, -1)
        shared_scores = _product(grouped, _rows(keys, self.common).swapaxes(-1, -2))
        sink = None if sinks is None else sinks.reshape(1, groups, heads // groups, 1, 1).astype(shared_scores.dtype)
        shared_weights, own = [], []
        for begin, end, cells, mask in self.parts:
            scores = _product(grouped[..., begin:end, :], _rows(keys, cells).swapaxes(-1, -2))
            if mask is not None:
                scores = mx.where(mask, scores, mx.array(-mx.inf, scores.dtype))
            columns = [shared_scores[..., begin:end, :], scores]
            if sink is not None:
                columns.append(mx.broadcast_to(sink, (*sink.shape[:3], end - begin, 1)))
            weights = mx.softmax(mx.concatenate(columns, axis=-1), axis=-1, precise=True)
            shared_weights.append(weights[..., :shared])
            own.append(_product(weights[..., shared : shared + cells.end - cells.begin], _rows(values, cells)))
        common = _product(mx.concatenate(shared_weights, axis=3), _rows(values, self.common))
        return (common + mx.concatenate(own, axis=3)).reshape(1, heads, n, -1)


def _rows(buffer: mx.array, cells: Run) -> mx.array:
    return buffer[..., cells.begin : cells.end, :]


def _product(a: mx.array, b: mx.array) -> mx.array:
    """`[1, groups, per_group, n, k] @ [1, groups, k, m]`, the heads of a group as one matrix."""
    _, groups, per_group, n, k = a.shape
    return (a.reshape(1, groups, per_group * n, k) @ b).reshape(1, groups, per_group, n, -1)


def _is_causal(visible: np.ndarray[Any, Any]) -> bool:
    """Whether each query sees exactly what is before it and itself, the last one all."""
    queries, cells = visible.shape
    return cells >= queries and bool((visible == np.tri(queries, cells, cells - queries, dtype=np.bool_)).all())
