"""Move stored keys to other positions: re-rotate them with each layer's own rope, after a proof that this is what its keys need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from mlxrunner.cache.layer import LayerCache

Rotate = Callable[[mx.array, int], mx.array]
"""Keys `[1, kv_heads, n, head_dim]` and a number of positions (negative: towards the beginning) -> keys at those positions."""

TOLERANCE = 2e-3
"""Of the largest number in a key, for the proof; a wrong rope makes far more. The tests hold float32 keys to 2e-4."""
ROUNDINGS = 3
"""Of each number in a key that was turned there and back: coarser types need so many of their own steps as tolerance."""


def rotators(model: Any, caches: Sequence[LayerCache], by: int) -> list[Rotate] | None:
    """How the keys of each of `caches` move by `by` < 0 positions; None where some layer's can't be moved.

    Not guessed from names: one token is run at position -by + 1 and at position 1 with caches in which it sees only itself, so that
    nothing but its position differs, and the keys that a layer stores are compared. They are equal (no positions in them), or the
    layer's rope turns one into the other, or the layer can't be moved. `model` is mlx-lm's; `caches` are all full or sliding.
    """
    layers = list(getattr(model, "layers", []))
    if len(layers) != len(caches) or any(cache.kind not in ("full", "sliding") for cache in caches):
        return None
    try:
        far, near = _keys_at(model, len(caches), 1 - by), _keys_at(model, len(caches), 1)
    except Exception:
        return None
    found = []
    for layer, (there, there_values), (here, here_values) in zip(layers, far, near, strict=True):
        if not _is_close(there_values, here_values):  # some latent caches keep positions in what they store as values
            return None
        rotate = next((way for way in (_stay, *_ropes(layer)) if _is_close(way(there, by), here)), None)
        if rotate is None:
            return None
        found.append(rotate)
    return found


def _stay(keys: mx.array, by: int) -> mx.array:
    return keys


def _ropes(layer: Any) -> list[Rotate]:
    """One for each rope that a module of this layer has."""
    modules = layer.modules() if hasattr(layer, "modules") else []
    return [partial(turned, module.rope) for module in modules if callable(getattr(module, "rope", None))]


def turned(rope: Any, keys: mx.array, by: int | mx.array) -> mx.array:
    """Keys moved by `by` positions, or each by its own: the layer's rope (its base, scaling, order of the pairs) with that offset.

    A rope with an amplitude (YaRN) would apply it twice: what it makes of ones at position 0 is divided out.
    """
    heads = keys.transpose(2, 1, 0, 3)  # each key a sequence of its own
    amplitude = rope(mx.ones((1, 1, 1, keys.shape[3]), keys.dtype), offset=0)
    moved: mx.array = rope(heads, offset=by) / amplitude
    return moved.transpose(2, 1, 0, 3)


def _keys_at(model: Any, layers: int, position: int) -> list[tuple[mx.array, mx.array]]:
    probes = [_Probe(position) for _ in range(layers)]
    model(mx.array([[1]]), cache=probes)
    stored = [(probe.keys, probe.values) for probe in probes]
    mx.eval(stored)
    return stored


def _is_close(a: mx.array, b: mx.array) -> bool:
    scale = float(mx.abs(b).max().astype(mx.float32).item())  # type: ignore[arg-type]
    gap = float(mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max().item())  # type: ignore[arg-type]
    return gap <= max(TOLERANCE, ROUNDINGS * float(mx.finfo(b.dtype).eps)) * max(scale, 1e-6)


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
