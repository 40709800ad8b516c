"""A sliding-window cache whose rows say which token they are of."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxrunner.cache.layers.sliding import SlidingWindowCache

Token = tuple[int, int]
"""A position, and a number that no other write has: a stale row is not an equal row."""


def rows(tokens: list[Token]) -> mx.array:
    """`[1, 1, n, 2]`: one row per token."""
    return mx.array(tokens, mx.float32)[None, None]


def stored(keys: mx.array, values: mx.array) -> list[Token]:
    """The tokens of fetched keys, whose values have to fit."""
    assert keys.shape == values.shape
    assert mx.array_equal(keys * 2, values)
    return [(int(position), int(mark)) for position, mark in np.array(keys[0, 0])]


def visible(mask: Any, n: int, total: int) -> np.ndarray[Any, Any]:
    """Return `[n, total]`, true where a mask of `n` queries over `total` rows lets them see."""
    if mask is None:
        return np.ones((n, total), bool)
    if isinstance(mask, str):
        assert mask == "causal"
        return np.arange(total - n, total)[:, None] >= np.arange(total)[None]
    assert mask.dtype == mx.bool_
    return np.broadcast_to(np.array(mask), (n, total))


def write(cache: Any, tokens: list[Token], **mask: Any) -> list[list[Token]]:
    """Ask for the mask, then write, as mlx-lm's models do.

    Returns what each of the queries sees.
    """
    asked = cache.make_mask(len(tokens), **mask)
    keys, values = cache.update_and_fetch(rows(tokens), rows(tokens) * 2)
    held = stored(keys, values)
    return [
        [held[i] for i in np.flatnonzero(seen)] for seen in visible(asked, len(tokens), len(held))
    ]


def numbered(n: int, start: int = 0) -> list[Token]:
    return [(position, position + 7) for position in range(start, start + n)]


def filled(cache: SlidingWindowCache, n: int, *, ones: int = 0) -> SlidingWindowCache:
    """`n` tokens at once, then `ones` one by one."""
    if n:
        write(cache, numbered(n))
    for position in range(n, n + ones):
        write(cache, numbered(1, position))
    return cache


def held_by(cache: SlidingWindowCache) -> list[Token]:
    """Every row that the next tokens can see, or that a rewind can bring back."""
    if cache._stored is None:
        return []
    kept = cache._stored
    return stored(kept.keys[..., : kept.rows, :], kept.values[..., : kept.rows, :])


few_steps = pytest.mark.parametrize(
    "step", [1, 3, 8], indirect=True, ids=lambda step: f"step-{step}"
)
