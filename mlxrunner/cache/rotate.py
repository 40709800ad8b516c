"""Move stored keys to other positions: re-rotate them with each layer's own rope, after a proof that this is what its keys need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from mlxrunner.cache.layer import LayerCache

Rotate = Callable[[mx.array, int], mx.array]
"""Keys `[1, kv_heads, n, head_dim]` and a number of positions (negative: towards the beginning) -> keys at those positions."""

TOLERANCE = 2e-3
"""Of a channel's own scale, for the proof; a wrong rope makes far more. The tests hold float32 keys to 2e-4."""
ROUNDINGS = 4
"""Of a channel's scale: a coarse type needs so many of its own steps as tolerance, for keys that were turned there and back; and so
many of float32 for each position, since angles are as large as positions and are rounded like them."""
BETTER = 4
"""Of two ways that both fit, one is the better explanation if it misses the keys by so many times less than the other."""
TOKENS = (1, 2, 3, 4)
"""The proof's tokens: a channel that is empty for one of them is not for all."""


def rotators(model: Any, caches: Sequence[LayerCache], by: int) -> list[Rotate] | None:
    """How the keys of each of `caches` move by `by` < 0 positions; None where some layer's can't be moved.

    Not guessed from names: a few tokens are run at position -by + 1 and at position 1 with caches in which each sees only itself, so
    that nothing but its position differs, and the keys that a layer stores are compared. They are equal (no positions in them), or the
    layer's rope turns one into the other, or the layer can't be moved. Where one thing would explain them as well as the other, or
    anything raises, it can't be either. `model` is mlx-lm's; `caches` are all full or sliding.
    """
    layers = list(getattr(model, "layers", []))
    if len(layers) != len(caches) or any(cache.kind not in ("full", "sliding") for cache in caches):
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
    except Exception:  # what raises in the proof would raise in the middle of an answer
        return None
    ways = [way for way in found if way is not None]
    return ways if len(ways) == len(layers) else None


@dataclass(frozen=True)
class _Way:
    """A candidate, the matrix that it multiplies keys with, and its largest miss in units of what is tolerated of each channel."""

    rotate: Rotate
    matrix: mx.array
    miss: float

    def does_as(self, other: _Way) -> bool:
        """Return True if the other one moves any keys in the same way."""
        return _number(mx.abs(self.matrix - other.matrix).max()) <= TOLERANCE


def _rotator(layer: Any, there: mx.array, here: mx.array, by: int) -> Rotate | None:
    """The way that turns the keys `there` into those `here`: the best that fits, unless another does nearly as well."""
    ways = sorted(
        (_judged(way, there, here, by) for way in (_stay, *_ropes(layer))), key=lambda way: way.miss
    )
    best = ways[0]
    rivals = [way for way in ways[1:] if way.miss <= 1 and not way.does_as(best)]
    if not best.miss <= 1 or any(rival.miss <= BETTER * best.miss for rival in rivals):
        return None
    return best.rotate


def _judged(rotate: Rotate, there: mx.array, here: mx.array, by: int) -> _Way:
    """Each channel is held against its own scale: how large it is here, and what the rope mixes into it from there."""
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
    """One for each rope that a module of this layer has."""
    modules = layer.modules() if hasattr(layer, "modules") else []
    return [
        partial(turned, module.rope)
        for module in modules
        if callable(getattr(module, "rope", None))
    ]


def turned(rope: Any, keys: mx.array, by: int | mx.array) -> mx.array:
    """Keys moved by `by` positions, or each by its own: the layer's rope (its base, scaling, order of the pairs) with that offset.

    A rope with an amplitude (YaRN) would apply it twice: what it makes of ones at position 0 is divided out.
    """
    heads = keys.transpose(2, 1, 0, 3)  # each key a sequence of its own
    amplitude = rope(mx.ones((1, 1, 1, keys.shape[3]), keys.dtype), offset=0)
    moved: mx.array = rope(heads, offset=by) / amplitude
    return moved.transpose(2, 1, 0, 3)


def _keys_at(model: Any, layers: int, position: int) -> list[tuple[mx.array, mx.array]]:
    """The keys and values `[1, kv_heads, len(TOKENS), head_dim]` that each layer stores for TOKENS, each alone at `position`."""
    probes = [_Probe(position) for _ in range(layers)]
    model(mx.array(TOKENS)[:, None], cache=probes)
    stored = [
        (probe.keys.transpose(2, 1, 0, 3), probe.values.transpose(2, 1, 0, 3)) for probe in probes
    ]
    mx.eval(stored)
    return stored


class _Probe:
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
