"""Move stored keys to other positions.

Each layer's own rope re-rotates its keys, after a proof that this gives the right keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from mlxrunner.cache.layers.protocol import LayerCache
from mlxrunner.system.mlx_lm_internals import with_rope

Rotate = Callable[[mx.array, int], mx.array]
"""A function of keys and a number of positions that returns the keys at their new positions.

Keys are `[1, kv_heads, n, head_dim]`. A negative number moves them towards the beginning.
"""

TOLERANCE = 2e-3
"""Largest error in the proof, as a fraction of a channel's own scale.

A wrong rope makes a far larger error. The tests hold float32 keys to 2e-4.
"""
ROUNDINGS = 4
"""Tolerance in rounding steps, if this is more than TOLERANCE.

It counts steps of the keys' type, because keys are turned there and back. It also counts steps of
float32 for each position, because angles are as large as positions and are rounded like them.
"""
BETTER = 4
"""Smallest ratio of two errors at which the way with the smaller error counts as the right one."""
TOKENS = (1, 2, 3, 4)
"""Tokens of the proof. A channel may be empty for one of them, but not for all."""


def rotators(model: Any, caches: Sequence[LayerCache], by: int) -> list[Rotate] | None:
    """Return one rotation per cache that moves keys by `by` < 0 positions; None if some can't move.

    `model` is an mlx-lm model. Names prove nothing. Therefore a few tokens run at position -by + 1
    and at position 1, with caches in which each token sees only itself: only the positions differ.
    Then the keys that each layer stores are compared. Keys without positions are equal. Otherwise
    the layer's rope has to turn one into the other. The result is None if neither holds, if both
    explain the keys equally well, or if the proof raises an error.
    """
    layers = list(getattr(model, "layers", []))
    if len(layers) != len(caches) or not all(cache.stores_plain_rows for cache in caches):
        return None
    try:
        far, near = _keys_at(model, len(caches), 1 - by), _keys_at(model, len(caches), 1)
        found = [
            _rotator(layer, there, here, by)
            if _judged(_stay, there_values, here_values, by).miss
            <= 1  # some latent caches keep positions in what they store as values
            else None
            for layer, (there, there_values), (here, here_values) in zip(
                layers, far, near, strict=True
            )
        ]
    except Exception:  # the same error would otherwise come in the middle of an answer
        return None
    ways = [way for way in found if way is not None]
    return ways if len(ways) == len(layers) else None


@dataclass(frozen=True)
class _Way:
    """A way in which keys may move."""

    rotate: Rotate
    matrix: mx.array
    """The matrix by which the way multiplies keys, `[head_dim, head_dim]`."""
    miss: float
    """Its largest error, as a multiple of the tolerance of each channel."""

    def does_as(self, other: _Way) -> bool:
        """Return True if the other one moves any keys in the same way."""
        return _number(mx.abs(self.matrix - other.matrix).max()) <= TOLERANCE


def _rotator(layer: Any, there: mx.array, here: mx.array, by: int) -> Rotate | None:
    """Return the way that turns the keys `there` into those `here`.

    That is the way with the smallest error. Return None if it does not fit, or if another way fits
    nearly as well.
    """
    ways = sorted(
        (_judged(way, there, here, by) for way in (_stay, *_ropes(layer))), key=lambda way: way.miss
    )
    best = ways[0]
    rivals = [way for way in ways[1:] if way.miss <= 1 and not way.does_as(best)]
    if not best.miss <= 1 or any(rival.miss <= BETTER * best.miss for rival in rivals):
        return None
    return best.rotate


def _judged(rotate: Rotate, there: mx.array, here: mx.array, by: int) -> _Way:
    """Return the way with its largest error, each channel measured by its own scale.

    The scale is the channel's largest value `here`, or that of the channels that the rope mixes
    into it from `there`.
    """
    matrix = rotate(mx.eye(there.shape[3])[None, None], by)[0, 0]  # row c: where channel c goes
    sizes = [
        mx.abs(keys.astype(mx.float32)).max(axis=(0, 2)) for keys in (here, there)
    ]  # [kv_heads, head_dim]
    scale = mx.maximum(sizes[0], sizes[1] @ mx.abs(matrix))
    apart = mx.abs(rotate(there, by).astype(mx.float32) - here.astype(mx.float32)).max(axis=(0, 2))
    tolerance = max(TOLERANCE, ROUNDINGS * _step(here.dtype), -ROUNDINGS * by * _step(mx.float32))
    return _Way(rotate, matrix, _number(mx.where(apart == 0, 0, apart / (tolerance * scale)).max()))


def _step(dtype: mx.Dtype) -> float:
    return float(mx.finfo(dtype).eps)


def _number(array: mx.array) -> float:
    return float(array.item())  # type: ignore[arg-type]  # real


def _stay(keys: mx.array, by: int) -> mx.array:
    return keys


def _ropes(layer: Any) -> list[Rotate]:
    """Return one way for each rope that a module of this layer has."""
    return [partial(turned, module.rope) for module in with_rope(layer)]


def turned(rope: Any, keys: mx.array, by: int | mx.array) -> mx.array:
    """Return keys moved with the layer's rope by `by` positions, or each by its own number.

    `keys` are `[1, kv_heads, n, head_dim]`. The rope's amplitude (YaRN) would apply twice.
    Therefore it is divided out: it is the rope's result for ones at position 0.
    """
    heads = keys.transpose(2, 1, 0, 3)  # each key a sequence of its own
    amplitude = rope(mx.ones((1, 1, 1, keys.shape[3]), keys.dtype), offset=0)
    moved: mx.array = rope(heads, offset=by) / amplitude
    return moved.transpose(2, 1, 0, 3)


def _keys_at(model: Any, layers: int, position: int) -> list[tuple[mx.array, mx.array]]:
    """Return the keys and values that each layer stores for TOKENS, each alone at `position`.

    They are `[1, kv_heads, len(TOKENS), head_dim]`.
    """
    probes = [RotationProbe(position) for _ in range(layers)]
    model(mx.array(TOKENS)[:, None], cache=probes)
    stored = [
        (probe.keys.transpose(2, 1, 0, 3), probe.values.transpose(2, 1, 0, 3)) for probe in probes
    ]
    mx.eval(stored)
    return stored


class RotationProbe:
    """A layer cache that pretends to be at `offset` and lets a token see only itself."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.keys = mx.zeros((1,))
        self.values = mx.zeros((1,))

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> None:
        return None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys, self.values = keys, values
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return self.keys, self.values
