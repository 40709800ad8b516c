"""The causal cache shows each query the right tokens, in drawings."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from support.causal import ROPES, drawn, keys_of, made, raw_keys, stored


def test_the_oracle_of_keys_is_the_rope() -> None:
    """Positions one after another, by the rope as models call it."""
    for layer, rope in enumerate(ROPES):
        expected = rope(mx.array(raw_keys(layer, range(20)).astype(np.float32))[None], offset=300)
        assert np.abs(np.array(expected) - keys_of(layer, range(20), range(300, 320))).max() < 1e-5


def test_store() -> None:
    """Each token sees itself and those before."""
    cache = made()
    assert drawn(cache, "1234", [0, 1, 2, 3]) == "1 12 123 1234"
    assert drawn(cache, "5", [4]) == "12345"


def test_window_of_two() -> None:
    """Itself and one before, across batches."""
    cache = made(window=2)
    assert drawn(cache, "1234", [0, 1, 2, 3]) == "1 12 23 34"
    assert drawn(cache, "56", [4, 5]) == "45 56"


def test_two_sequences() -> None:
    """Side by side, blind to each other."""
    cache = made(2)
    assert drawn(cache, "1234", [0, 1, 0, 1], [0, 0, 1, 1]) == "1 12 3 34"
    assert drawn(cache, "56", [2, 2], [0, 1]) == "125 346"


def test_remove_the_tail_then_the_head() -> None:
    """The tokens behind the head move up, with their keys."""
    cache = made(2)
    drawn(cache, "1234", [0, 1, 0, 1], [0, 0, 1, 1])
    cache.remove(0, 1)
    assert drawn(cache, "56", [1, 2], [0, 1]) == "15 346"
    cache.remove(0, 0, 1)
    assert stored(cache) == {0: [(0, 5)], 1: [(0, 3), (1, 4), (2, 6)]}
    assert drawn(cache, "78", [1, 2]) == "57 578"


def test_share_a_prefix() -> None:
    """Without another cell; the source keeps what it has."""
    cache = made(2)
    drawn(cache, "1234", [0, 1, 2, 3])
    free = cache.num_free
    cache.copy_prefix(0, 1, 2)
    assert cache.num_free == free
    assert [cache.num_used_by(sequences) for sequences in ([0], [1], [0, 1], [])] == [4, 2, 4, 0]
    assert drawn(cache, "56", [2, 3], [1, 1]) == "125 1256"
    assert stored(cache) == {
        0: [(0, 1), (1, 2), (2, 3), (3, 4)],
        1: [(0, 1), (1, 2), (2, 5), (3, 6)],
    }


def test_resume_with_a_window_of_five() -> None:
    """Everywhere while all is stored; then at the end, one before it, and at a fresh start."""
    cache = made(window=5)
    drawn(cache, "12345", [0, 1, 2, 3, 4])
    assert [position for position in range(-1, 9) if cache.can_resume(0, position)] == [
        0,
        1,
        2,
        3,
        4,
        5,
    ]
    drawn(cache, "6", [5])
    assert [position for position in range(-1, 9) if cache.can_resume(0, position)] == [0, 5, 6]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"window": 1}, "1 2 3 4 5 | 6 7"),
        ({"window": 3}, "1 12 123 234 345 | 456 567"),
        ({"window": 3, "memory": 9}, "1 12 123 234 345 | 456 567"),
        ({"window": 9}, "1 12 123 1234 12345 | 123456 1234567"),
        ({"chunk": 3}, "1 12 123 4 45 | 456 7"),
        ({"chunk": 3, "memory": 3}, "1 12 123 4 45 | 456 7"),
        ({"chunk": 4, "window": 2}, "1 12 23 34 5 | 56 67"),
    ],
    ids=str,
)
def test_how_far_back_a_query_sees(options: dict[str, int], expected: str) -> None:
    """Windows slide; chunks begin anew."""
    cache = made(**options)
    assert f"{drawn(cache, '12345', range(5))} | {drawn(cache, '67', [5, 6])}" == expected


def test_a_memory_beyond_the_window() -> None:
    """Allows rewinds, and is what the cells are counted by."""
    cache = made(capacity=100, max_batch=4, window=2, memory=4)
    assert (cache.num_cells, cache.window, cache.memory) == (8, 2, 4)
    for start in range(0, 8, 2):
        drawn(cache, "12", [start, start + 1])
    assert [position for position in range(10) if cache.can_resume(0, position)] == [
        0,
        4,
        5,
        6,
        7,
        8,
    ]
    cache.remove(0, 5)
    assert drawn(cache, "9", [5]) == "19"


def test_sequences_that_wait_are_cut_to_their_memory() -> None:
    """Also when it is another one's turn."""
    cache = made(2, capacity=100, max_batch=4, window=2)
    drawn(cache, "1234", [0, 1, 2, 3])
    drawn(cache, "5", [0], [1])
    assert stored(cache) == {0: [(3, 4)], 1: [(0, 5)]}
    assert cache.can_resume(0, 4)
