"""Masks are as long as what somebody sees, of the type that was asked for, and made once."""

from __future__ import annotations

import mlx.core as mx
import pytest
from support.causal import drawn, forward, made

from mlxrunner.cache import Batch


def test_a_plain_mask_is_boolean() -> None:
    """It is there before a layer writes, for models that ask first."""
    cache = made()
    cache.start_forward(Batch([0, 1], [0, 0]))
    assert (cache.mask.dtype, cache.mask.tolist()) == (mx.bool_, [[True, False], [True, True]])


def test_the_history_leaves_out_what_nobody_sees() -> None:
    """Cells before the window or of other sequences cost nothing to read."""
    cache = made(2, capacity=100, max_batch=100, window=4, memory=60)
    drawn(cache, "1" * 20, range(20), [1] * 20)
    drawn(cache, "2" * 30, range(30))
    drawn(cache, "3", [30])
    assert cache.mask.shape == (1, 4)


@pytest.mark.parametrize(
    ("options", "masks"),
    [
        ({}, ["causal", None, "causal", None]),
        ({"window": 4, "memory": 9}, ["an array", None, "an array", None]),
        ({"window": 9}, ["causal", None, "causal", None]),
        ({"chunk": 4}, ["an array", None, "causal", None]),
    ],
    ids=str,
)
def test_a_sequence_alone_needs_no_mask_of_cells(
    options: dict[str, int], masks: list[str | None]
) -> None:
    """Where its tokens lie side by side, they are fetched alone, as a cache of its own does it."""
    cache, at, found = made(3, capacity=30, max_batch=30, **options), 0, []
    drawn(cache, "99", [0, 1], [1, 1])
    cache.expect(0, 20)
    for tokens in ("12345", "6", "78", "9"):
        drawn(cache, tokens, range(at, at + len(tokens)))
        at += len(tokens)
        mask = cache.attention_mask(is_split=False, as_array=False)
        found.append("an array" if isinstance(mask, mx.array) else mask)
        assert cache.split(worth=0) is None
        assert cache.fetch()[0].shape[2] <= at
    assert found == masks


@pytest.mark.parametrize(("gap", "is_one"), [(1, True), (500, True), (1500, False)])
def test_a_query_sees_over_a_gap_in_one_product(gap: int, is_one: bool) -> None:
    """Where the gap is long, two products are less work."""
    cache = made(4, capacity=600, max_batch=600)
    forward(cache, Batch(range(5), [0] * 5), range(5))
    for sequence in range(1, 1 + -(-gap // 500)):
        count = min(gap, 500)
        forward(cache, Batch(range(count), [sequence] * count), range(count))
    forward(cache, Batch([5, 6], [0, 0]), range(2))
    forward(cache, Batch([7], [0]), range(1))
    assert (cache.split() is None) == is_one
    if is_one:
        mask = cache.attention_mask(is_split=True, as_array=False)
        assert isinstance(mask, mx.array)
        assert mask.tolist() == cache.mask.tolist() == [[True] * 5 + [False] * gap + [True] * 3]
        assert cache.fetch()[0].shape[2] == gap + 8


def test_a_step_in_parts_makes_no_mask() -> None:
    """The mask of all queries and cells is made when it is asked for, and once."""
    cache = made(2, capacity=900, max_batch=900)
    for sequence in (0, 1):
        forward(cache, Batch(range(510), [sequence] * 510), range(510))
    cache.start_forward(Batch([510, 510], [0, 1]))
    assert cache.split(worth=0.5) is not None
    assert cache.attention_mask(is_split=True, as_array=False) == "causal"
    assert "visible" not in vars(cache._current().forward)
    assert cache.mask is cache.attention_mask(is_split=True, as_array=True)
    assert cache.mask.shape == (2, 1022)
