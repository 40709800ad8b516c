"""Buffers are allocated once, of the shapes and types that were agreed, and written in place."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from support.causal import DIMS, HEADS, drawn, made, put, stored

from mlxrunner.cache import Batch, CausalCache
from mlxrunner.cache.pool.causal import BatchPlaces


def test_buffers_are_allocated_once_and_written_in_place() -> None:
    """By the reserve pass; a step needs no second buffer."""
    cache = made(4, capacity=4096, max_batch=64)
    assert cache.nbytes == 0
    cache.start_forward(Batch(range(64), [0] * 64), reserve=True)
    cache.put(mx.ones((1, 2, 64, 16)), mx.ones((1, 2, 64, 8)))
    assert cache.nbytes == 4 * 4096 * 2 * (16 + 8) * 4
    assert [part.shape for part in cache.get()] == [
        (1, 2, 4 * 4096, 16),
        (1, 2, 4 * 4096, 8),
        (64, 4 * 4096),
    ]
    mx.eval(cache.state)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for position in range(20):
        cache.start_forward(Batch([position], [0]))
        cache.put(mx.ones((1, 2, 1, 16)), mx.ones((1, 2, 1, 8)))
        keys, values, mask = cache.get()
        mx.eval(mask.astype(mx.float32) @ keys[0, 0], values.sum())
        del keys, values, mask
    assert mx.get_peak_memory() - before < cache.nbytes // 8


def test_a_reserve_pass_stores_nothing() -> None:
    """Worst-case shapes, whatever is in the cache; then work goes on."""
    cache = made(2, capacity=4, max_batch=3)
    drawn(cache, "123", range(3))
    held = stored(cache)
    batch = Batch([0, 0, 0], [0, 1, 1])
    cache.start_forward(batch, reserve=True)
    for layer in (0, 1):
        put(cache, layer, [7, 8, 9], batch)
        assert cache.get()[0].shape == (1, HEADS, 8, DIMS)
    assert (cache.mask.shape, cache.num_free, stored(cache)) == ((3, 8), 5, held)
    assert drawn(cache, "4", [3]) == "1234"


def test_values_of_another_width_and_type() -> None:
    """Are stored as `init` says."""
    cache = CausalCache()
    cache.init(mx.float16, 1, 8, 8)
    cache.start_forward(Batch([0, 1], [0, 0]))
    cache.put(mx.ones((1, 3, 2, 4)), mx.ones((1, 1, 2, 6), mx.bfloat16))
    keys, values, _ = cache.get()
    assert (keys.shape, values.shape, keys.dtype, values.dtype) == (
        (1, 3, 2, 4),
        (1, 1, 2, 6),
        mx.float16,
        mx.float16,
    )


def test_another_length_than_announced() -> None:
    """Names the layer and both lengths."""
    cache = made()
    cache.start_forward(Batch([0, 1], [0, 0]))
    cache.set_layer(7)
    with pytest.raises(
        ValueError, match="layer 7: 3 keys were put, but start_forward announced 2 tokens"
    ):
        cache.put(mx.zeros((1, 1, 3, 4)), mx.zeros((1, 1, 3, 4)))
    with pytest.raises(
        ValueError, match="layer 7: 1 values were put, but start_forward announced 2 tokens"
    ):
        cache.put(mx.zeros((1, 1, 2, 4)), mx.zeros((1, 1, 1, 4)))
    assert cache.nbytes == 0


def test_another_shape_than_allocated() -> None:
    """Would otherwise be broadcast without a word."""
    cache = made()
    cache.start_forward(Batch([0, 1], [0, 0]))
    cache.put(mx.zeros((1, 2, 2, 4)), mx.zeros((1, 2, 2, 4)))
    with pytest.raises(
        ValueError,
        match=r"layer 0: values of shape \(1, 1, 2, 4\), "
        r"but the cache was allocated for \(1, 2, 2, 4\)",
    ):
        cache.put(mx.zeros((1, 2, 2, 4)), mx.zeros((1, 1, 2, 4)))
    with pytest.raises(ValueError, match=r"layer 1: keys of shape \(2, 2, 2, 4\)"):
        cache.set_layer(1)
        cache.put(mx.zeros((2, 2, 2, 4)), mx.zeros((2, 2, 2, 4)))


@pytest.mark.parametrize("distance", [2, 7, -3, 0], ids=["two", "seven", "back", "irregular"])
def test_rows_at_equal_distances_are_written_at_once(distance: int) -> None:
    """By a stride, where the lanes of many sequences are as full; else by a scatter."""
    cells = np.arange(1, 1 + 9 * (distance or 5), distance or 5, dtype=np.int32)
    cells = cells if distance >= 0 else np.arange(40, 20, distance, dtype=np.int32)
    cells[3] += distance == 0
    places, rows = BatchPlaces(cells), mx.random.normal((1, 2, len(cells), 4))
    assert isinstance(places._cells, slice) == (distance > 0)
    buffer = mx.zeros((1, 2, 80, 4))
    places.put(buffer, rows)
    expected = np.zeros((1, 2, 80, 4), np.float32)
    expected[:, :, cells] = np.array(rows)
    assert (np.array(buffer) == expected).all()
