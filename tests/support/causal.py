"""A causal cache of two layers whose keys and values tell what each query sees."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.rope_utils import initialize_rope
from numpy.typing import NDArray
from support.models import LLAMA3

from mlxrunner.cache import Batch, CausalCache

HEADS, DIMS = 2, 8
ROPES = [
    initialize_rope(DIMS, 10_000.0, False, None, 512),
    initialize_rope(DIMS, 500.0, True, LLAMA3, 512),
]
"""One per layer: another base, another order of pairs, scaled."""


def rotated(layer: int, keys: mx.array, offsets: mx.array) -> mx.array:
    """Rotate each of the keys `[1, heads, n, dims]` by its own offset, as a model's layer would."""
    turned: mx.array = ROPES[layer](keys.transpose(2, 1, 0, 3), offset=offsets)
    return turned.transpose(2, 1, 0, 3)


@lru_cache
def rotations(layer: int) -> NDArray[np.float64]:
    """Return the matrices `[positions, dims, dims]` by which the layer's rope multiplies a key."""
    units = mx.broadcast_to(mx.eye(DIMS)[None, :, None], (512, DIMS, 1, DIMS))
    return np.array(ROPES[layer](units, offset=mx.arange(512)))[:, :, 0].astype(np.float64)


def raw_keys(layer: int, tokens: Sequence[int]) -> NDArray[np.float64]:
    """`[heads, n, dims]`, other ones for each token."""
    numbers: NDArray[np.float64] = np.sin(
        np.array(tokens)[None, :, None] * np.arange(1, HEADS * DIMS + 1).reshape(HEADS, 1, DIMS)
        + layer
    )
    return numbers


def keys_of(layer: int, tokens: Sequence[int], positions: Sequence[int]) -> NDArray[np.float32]:
    """Return `[1, heads, n, dims]`, the keys that the layer stores for tokens at positions."""
    turned = np.einsum("hnd,nde->hne", raw_keys(layer, tokens), rotations(layer)[list(positions)])
    return turned[None].astype(np.float32)


def values_of(tokens: Sequence[int]) -> NDArray[np.float32]:
    """`[1, heads, n, 1]`, the token in every head."""
    return np.broadcast_to(
        np.array(tokens, np.float32)[None, None, :, None], (1, HEADS, len(tokens), 1)
    )


def made(
    max_sequences: int = 1, capacity: int = 16, max_batch: int = 16, **options: Any
) -> CausalCache:
    cache = CausalCache(**{"shift": rotated} | options)
    cache.init(mx.float32, max_sequences, capacity, max_batch)
    return cache


def put(cache: CausalCache, layer: int, tokens: Sequence[int], batch: Batch) -> None:
    cache.set_layer(layer)
    cache.put(mx.array(keys_of(layer, tokens, batch.positions)), mx.array(values_of(tokens)))


def forward(cache: CausalCache, batch: Batch, tokens: Sequence[int]) -> list[list[int]]:
    """Run a batch through two layers and return the tokens that each query sees, equal in both."""
    cache.start_forward(batch)
    seen = []
    for layer in (0, 1):
        put(cache, layer, tokens, batch)
        _, values, mask = cache.get()
        contents = np.array(values)[0, HEADS - 1, :, 0]
        assert mask.shape == (len(batch), len(contents))
        seen.append([sorted(int(token) for token in contents[row]) for row in np.array(mask)])
        assert fetched(cache, len(batch)) == seen[-1]
    assert seen[0] == seen[1]
    return seen[0]


def fetched(cache: CausalCache, queries: int) -> list[list[int]]:
    """Return the tokens that each query sees of what is fetched, under mlx-lm's mask."""
    _, values = cache.fetch()
    contents = np.array(values)[0, HEADS - 1, :, 0]
    mask = cache.attention_mask(is_split=False, as_array=False)
    if mask is None or isinstance(mask, str):
        assert mask == (None if queries == 1 else "causal")
        mask = mx.array(np.tri(queries, len(contents), len(contents) - queries, dtype=np.bool_))
    as_array = cache.attention_mask(is_split=False, as_array=True)
    assert isinstance(as_array, mx.array)
    assert as_array.tolist() == mask.tolist()
    return [sorted(int(token) for token in contents[row]) for row in np.array(mask)]


def drawn(
    cache: CausalCache,
    tokens: str,
    positions: Sequence[int],
    sequences: Sequence[int] | None = None,
    **more: Any,
) -> str:
    """Draw one row per query with the digits of the tokens that it sees: `1 12 123`"""
    batch = Batch(positions, sequences or [0] * len(tokens), **more)
    return " ".join(
        "".join(map(str, row)) for row in forward(cache, batch, [int(token) for token in tokens])
    )


def stored(cache: CausalCache) -> dict[int, list[tuple[int, int]]]:
    """Return (position, token) of each sequence, and check the keys in the buffers."""
    cells, found = cache._cells, {}
    buffers = [
        (np.array(layer.keys)[0], np.array(layer.values)[0]) for layer in cache._layers.values()
    ]
    for sequence in cells.sequences:
        own = np.flatnonzero(cells.owners[sequence])
        positions = cells.positions[own].tolist()
        tokens = buffers[0][1][0, own, 0].astype(int).tolist()
        for layer, (keys, values) in enumerate(buffers):
            assert np.abs(keys[:, own] - keys_of(layer, tokens, positions)[0]).max() < 2e-4
            assert (values[:, own] == values_of(tokens)[0]).all()
        found[sequence] = sorted(zip(positions, tokens, strict=True))
    return found
