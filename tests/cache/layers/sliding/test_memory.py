"""The sliding-window cache holds no more bytes than its window, its slack and a step."""

from __future__ import annotations

import mlx.core as mx
import pytest
from support.sliding import filled

from mlxrunner.cache.layers.extents import STEP
from mlxrunner.cache.layers.sliding import SlidingWindowCache

SCRAPS = 16 * 1024
"""Bytes that buffers may be rounded up by."""


def long_rows(n: int) -> mx.array:
    """`[1, 1, n, 64]`: 256 bytes a token."""
    return mx.ones((1, 1, n, 64))


def decode(cache: SlidingWindowCache) -> int:
    """One token; the most memory that it took beyond what there was."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    keys, values = cache.update_and_fetch(long_rows(1), long_rows(1))
    mx.eval(cache.state, keys.sum() + values.sum())
    del keys, values
    return int(mx.get_peak_memory()) - before


def test_a_decode_step_is_in_place_but_for_every_step_th() -> None:
    """No copy of the buffer, and no scrap of one afterwards."""
    cache = SlidingWindowCache(2000, 100)
    cache.update_and_fetch(long_rows(2300), long_rows(2300))
    mx.eval(cache.state)
    active = mx.get_active_memory()
    peaks = [decode(cache) for _ in range(2 * STEP)]
    assert sum(peak > cache.nbytes // 8 for peak in peaks) <= 2
    assert max(peaks) < cache.nbytes * 1.1
    assert mx.get_active_memory() <= active + SCRAPS


@pytest.mark.parametrize("slack", [0, 100], ids=["no-slack", "slack"])
def test_a_long_chunk_is_given_back_when_its_pass_has_ended(slack: int) -> None:
    """Window + slack + STEP rows stay, whatever was written."""
    before = mx.get_active_memory()
    cache = SlidingWindowCache(50, slack)
    for n in (20_000, 1, 30_000, 7):
        cache.begin_forward()
        shape = cache.update_and_fetch(long_rows(n), long_rows(n))[0].shape
        assert cache.keys_and_values()[0].shape == shape
        cache.end_forward(n)
        mx.eval(cache.state)
        assert mx.get_active_memory() - before <= cache.nbytes + SCRAPS
        assert cache.nbytes == 2 * 256 * (50 + slack + STEP)


def test_a_snapshot_does_not_hold_the_buffer() -> None:
    """Only the window, once the cache has gone on."""
    before = mx.get_active_memory()
    cache = SlidingWindowCache(20, 1000)
    cache.update_and_fetch(long_rows(1200), long_rows(1200))
    snapshot = cache.snapshot()
    mx.eval(snapshot.arrays)
    cache.free()
    assert snapshot.nbytes == 2 * 19 * 256
    assert mx.get_active_memory() - before <= snapshot.nbytes + SCRAPS


def test_what_was_never_written_cannot_be_read() -> None:
    """A clear error, before and after it was used."""
    cache = SlidingWindowCache(4)
    for _ in range(2):
        assert (cache.offset, cache.state, cache.nbytes, cache.used_bytes) == (0, [], 0, 0)
        with pytest.raises(ValueError, match="nothing was stored yet"):
            cache.keys_and_values()
        filled(cache, 3)
        cache.free()
