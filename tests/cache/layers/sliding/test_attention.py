"""Attention over the sliding-window cache is that over mlx-lm's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import RotatingKVCache
from support.sample import examples
from support.sliding import few_steps

from mlxrunner.cache.layers.sliding import SlidingWindowCache


def attention(
    cache: Any, queries: mx.array, keys: mx.array, values: mx.array, **how: Any
) -> mx.array:
    """Four query heads on two key heads."""
    mask = cache.make_mask(queries.shape[2], **how)
    fetched = cache.update_and_fetch(keys, values)
    attended: mx.array = mx.fast.scaled_dot_product_attention(
        queries, *fetched, scale=0.5, mask=mask
    )
    assert all(
        mx.array_equal(again, once)
        for again, once in zip(cache.keys_and_values(), fetched, strict=True)
    )
    return attended


def pieces(sizes: list[int], seed: int = 0) -> Iterator[tuple[mx.array, mx.array, mx.array]]:
    """Random queries, keys and values in chunks."""
    random = np.random.default_rng(seed)
    for n in sizes:
        q, k, v = (random.normal(size=(1, heads, n, 8)).astype(np.float32) for heads in (4, 2, 2))
        yield mx.array(q), mx.array(k), mx.array(v)


@few_steps
@pytest.mark.parametrize("smaller", [None, 5], ids=["own-window", "smaller-window"])
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([1] * 40, id="decode"),
        pytest.param([30, *[1] * 20], id="long-chunk-and-decode"),
        pytest.param([7, *[1] * 9], id="window-and-decode"),
        pytest.param([3, 2, 4, 1, 1, 5, 1, 6, 2, *[1] * 9], id="small-chunks"),
        pytest.param([5, 25, 1, 1, 40, 3, 1, 12, *[1] * 9], id="small-and-long-chunks"),
    ],
)
def test_attention_is_that_of_mlx_lm(step: int, sizes: list[int], smaller: int | None) -> None:
    """The attention is within 1e-5 of mlx-lm's on the same chunks, also in shared layers."""
    ours, theirs = SlidingWindowCache(7, slack=3), RotatingKVCache(max_size=7)
    for queries, keys, values in pieces(sizes):
        how = {"window_size": smaller}
        gap = mx.abs(
            attention(ours, queries, keys, values, **how)
            - attention(theirs, queries, keys, values, **how)
        ).max()
        assert float(gap.item()) < 1e-5  # type: ignore[arg-type]
        assert ours.offset == theirs.offset


@few_steps
@examples(60)
@given(sizes=st.lists(st.integers(1, 25), min_size=1, max_size=10), slack=st.integers(0, 5))
def test_attention_is_that_of_mlx_lm_however_the_tokens_are_chunked(
    step: int, sizes: list[int], slack: int
) -> None:
    """Ours in these chunks, mlx-lm's in one piece."""
    ours = SlidingWindowCache(6, slack)
    parts = list(pieces(sizes))
    whole = [mx.concatenate(list(part), axis=2) for part in zip(*parts, strict=True)]
    expected = attention(RotatingKVCache(max_size=6), *whole)
    found = mx.concatenate([attention(ours, *part) for part in parts], axis=2)
    assert float(mx.abs(found - expected).max().item()) < 1e-5  # type: ignore[arg-type]
