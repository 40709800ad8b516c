"""The full-attention cache against plain concatenation."""

from __future__ import annotations

from contextlib import suppress
from itertools import count

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sample import examples

from mlxrunner.cache import RewindError
from mlxrunner.cache.layers.attention import STEP, FullAttentionCache
from mlxrunner.testing import interrupt_at


def rows(n: int, start: int = 0) -> mx.array:
    """`[1, 2, n, 4]` with the position in every number."""
    return mx.contiguous(
        mx.broadcast_to(
            mx.arange(start, start + n, dtype=mx.float32)[None, None, :, None], (1, 2, n, 4)
        )
    )


def filled(n: int) -> FullAttentionCache:
    cache = FullAttentionCache()
    cache.update_and_fetch(rows(n), rows(n) * 2)
    return cache


def positions(cache: FullAttentionCache) -> list[int]:
    keys, values = cache.keys_and_values()
    assert keys.shape == values.shape == (1, 2, cache.offset, 4)
    assert mx.array_equal(keys * 2, values)
    return [int(x) for x in np.array(keys[0, 1, :, 3])]


@examples(60)
@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "rewind", "trim", "reserve"]), st.integers(0, 700)),
        max_size=12,
    )
)
def test_it_holds_what_concatenation_would(steps: list[tuple[str, int]]) -> None:
    """Writes, rewinds, trims and reservations come in any order."""
    cache, expected = FullAttentionCache(), list[int]()
    for what, n in steps:
        if what == "add" and n:
            cache.update_and_fetch(rows(n, len(expected)), rows(n, len(expected)) * 2)
            expected += range(len(expected), len(expected) + n)
        elif what == "rewind":
            to = min(n, len(expected))
            cache.rewind(to)
            del expected[to:]
        elif what == "trim":
            assert cache.trim(n) == (n if n <= len(expected) else 0)
            if n <= len(expected):
                del expected[len(expected) - n :]
        elif what == "reserve":
            cache.reserve(n)
        assert cache.offset == len(expected)
        if expected:
            assert positions(cache) == expected


def test_a_reserved_capacity_is_one_allocation() -> None:
    """Writes up to there never change the buffer's size."""
    cache = FullAttentionCache()
    cache.reserve(1000)
    sizes = set()
    for start in range(0, 1000, 10):
        cache.update_and_fetch(rows(10, start), rows(10, start) * 2)
        sizes.add(cache.capacity)
    assert sizes == {1024}
    assert cache.nbytes == 2 * 2 * 1024 * 4 * 4
    assert cache.used_bytes == 2 * 2 * 1000 * 4 * 4


def test_trimming_most_of_the_buffer_gives_memory_back() -> None:
    """It keeps what is left. The room after a few tokens will be needed again."""
    cache = filled(10 * STEP)
    assert cache.trim(10) == 10
    assert cache.capacity == 10 * STEP
    assert cache.trim(9 * STEP - 9) == 9 * STEP - 9
    assert cache.capacity == STEP
    assert positions(cache) == list(range(STEP - 1))


def test_growing_one_layer_costs_that_layer_at_most() -> None:
    """The peak while `reserve` grows a cache is its old and new buffers, not its neighbours'."""
    layers = [filled(64 * STEP - 1) for _ in range(8)]
    mx.eval([layer.state for layer in layers])
    one = layers[0].nbytes
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for layer in layers:
        layer.reserve(96 * STEP)
    growth = 8 * one // 2
    assert mx.get_active_memory() - before <= growth * 1.01
    assert mx.get_peak_memory() - before <= growth + 2 * one


def test_a_single_write_is_in_place() -> None:
    """No copy of the buffer: the peak does not grow by its size."""
    cache = filled(128 * STEP - 50)
    mx.eval(cache.state)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for start in range(40):
        keys, values = cache.update_and_fetch(rows(1, start), rows(1, start))
        mx.eval(keys[..., -1:, :] + values[..., -1:, :])
        del keys, values
    mx.eval(cache.state)
    assert mx.get_peak_memory() - before < cache.nbytes // 8


@pytest.mark.parametrize("to", [11, 10_000], ids=["one-too-far", "far"])
def test_rewinding_forwards_is_refused(to: int) -> None:
    cache = filled(10)
    assert not cache.can_rewind(to)
    assert cache.reachable(to) == 10
    with pytest.raises(RewindError, match=f"full layer at offset 10 can't be rewound to {to}"):
        cache.rewind(to)
    assert positions(cache) == list(range(10))
    assert cache.trim(11) == 0
    assert cache.offset == 10


def test_free_drops_the_buffers() -> None:
    """Offset 0, no bytes, ready for another use with another shape."""
    cache = filled(10)
    cache.free()
    assert (cache.offset, cache.nbytes, cache.used_bytes, cache.state) == (0, 0, 0, [])
    cache.update_and_fetch(mx.zeros((1, 1, 3, 8)), mx.zeros((1, 1, 3, 6)))
    assert cache.offset == 3


def test_an_interrupt_at_any_line_of_a_resize_leaves_buffers_of_one_size() -> None:
    """The tokens that were stored stay, and further ones find room in both."""
    for line in count(1):
        cache = filled(9)
        with suppress(KeyboardInterrupt), interrupt_at(line) as lines:
            cache.reserve(2000)
        keys, values = cache.state
        assert keys.shape == values.shape, f"line {line}"
        assert positions(cache) == list(range(9))
        if lines[0] < line:
            break
    assert line > 5
