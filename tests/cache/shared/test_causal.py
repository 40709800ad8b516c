"""The causal cache shows each query the right tokens, in drawings and in random work."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.rope_utils import initialize_rope
from numpy.typing import NDArray
from support.models import LLAMA3
from support.sample import examples

from mlxrunner.cache import Batch, CacheConfig, CacheFullError, CausalCache, NotSupportedError
from mlxrunner.cache.shared.buffers import Places

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
    max_sequences: int = 1,
    capacity: int = 16,
    max_batch: int = 16,
    config: CacheConfig | None = None,
    **options: Any,
) -> CausalCache:
    cache = CausalCache(**{"shift": rotated} | options)
    if config is not None:
        cache.set_config(config)
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
        if cache._lifecycle.config == CacheConfig():
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


@pytest.mark.parametrize("at_once", [True, False], ids=["at-once", "one-too-many"])
def test_full(at_once: bool) -> None:
    """With the sizes; what fitted before still works."""
    cache = made(capacity=4)
    if at_once:
        with pytest.raises(
            CacheFullError,
            match=r"a batch of 5 tokens needs 5 free cells, but 4 of 4 are free: remove",
        ):
            cache.start_forward(Batch(range(5), [0] * 5))
    drawn(cache, "1234", [0, 1, 2, 3])
    with pytest.raises(
        CacheFullError,
        match=r"a batch of 1 tokens needs 1 free cells, but 0 of 4 are free: remove tokens",
    ):
        cache.start_forward(Batch([4], [0]))
    _, values, mask = cache.get()
    assert np.array(values)[0, 0, :, 0].tolist() == [1, 2, 3, 4]
    assert np.array(mask).tolist() == np.tri(4, dtype=bool).tolist()
    cache.remove(0, 3)
    assert drawn(cache, "5", [3]) == "1235"


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


def test_some_tokens_see_each_other_forwards() -> None:
    """Tokens of one sequence see forwards; the rest of the batch and the window stay."""
    cache = made(2, window=3)
    assert drawn(cache, "1234", range(4), sees_forward=[1, 2]) == "1 123 123 234"
    assert (
        drawn(cache, "5678", [4, 0, 5, 1], [0, 1, 0, 1], sees_forward=[0, 1, 2]) == "3457 6 457 68"
    )


def test_a_padded_history() -> None:
    """Whole multiples, inside the buffers, with the padding masked out."""
    cache = made(2, capacity=5, max_batch=10, config=CacheConfig(history_multiple=4))
    assert drawn(cache, "123", range(3)) == "1 12 123"
    assert cache.mask.shape == (3, 4)
    assert drawn(cache, "4567", range(4), [1] * 4) == "4 45 456 4567"
    assert cache.mask.shape == (4, 8)
    assert drawn(cache, "89", [4, 3], [1, 0]) == "45678 1239"
    assert cache.mask.shape == (2, 12)
    assert cache.num_cells == 10
    with pytest.raises(CacheFullError, match="1 of 10 are free"):
        cache.start_forward(Batch([5, 4], [1, 0]))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_an_additive_mask(dtype: mx.Dtype) -> None:
    """0 where a token may attend, -inf elsewhere."""
    cache = made(config=CacheConfig(mask_dtype=dtype))
    cache.start_forward(Batch([0, 1], [0, 0]))
    assert cache.mask.dtype == dtype
    assert cache.mask.tolist() == [[0, -np.inf], [0, 0]]


def test_a_plain_mask_is_boolean() -> None:
    """It is there before a layer writes, for models that ask first."""
    cache = made(config=CacheConfig(mask_dtype=mx.bool_))
    cache.start_forward(Batch([0, 1], [0, 0]))
    assert (cache.mask.dtype, cache.mask.tolist()) == (mx.bool_, [[True, False], [True, True]])


def test_the_history_leaves_out_what_nobody_sees() -> None:
    """Cells before the window or of other sequences cost nothing to read."""
    cache = made(2, capacity=100, max_batch=100, window=4, memory=60)
    drawn(cache, "1" * 20, range(20), [1] * 20)
    drawn(cache, "2" * 30, range(30))
    drawn(cache, "3", [30])
    assert cache.mask.shape == (1, 4)


@pytest.mark.parametrize("count", [12, 400], ids=["slices", "gathers"])
def test_packing_moves_labels_and_data_together(count: int) -> None:
    """Every other token goes, and there may be any number of pieces."""
    cache = made(3, capacity=count // 2, max_batch=count)
    tokens = [*range(count)]
    forward(cache, Batch([token // 2 for token in tokens], [token % 2 for token in tokens]), tokens)
    cache.remove(1, 1)
    assert cache.num_free == count - 1
    held = stored(cache)
    batch = Batch(range(count - 4), [2] * (count - 4))
    assert forward(cache, batch, range(1000, 1000 + len(batch))) == [
        [*range(1000, 1001 + row)] for row in range(len(batch))
    ]
    assert stored(cache) == {**held, 2: [(n, 1000 + n) for n in range(len(batch))]}


def test_gaps_are_closed_in_however_many_pieces() -> None:
    """Where a sequence lies in every other cell."""
    cache, count = made(2, capacity=200, max_batch=400), 400
    forward(
        cache,
        Batch([token // 2 for token in range(count)], [token % 2 for token in range(count)]),
        range(count),
    )
    held = stored(cache)
    cache.remove(0, 10, 20)
    assert stored(cache) == {
        0: [(n, 2 * n if n < 10 else 2 * n + 20) for n in range(190)],
        1: held[1],
    }


def test_packing_by_hand_ends_the_pass() -> None:
    """Its rows are somewhere else now."""
    cache = made()
    drawn(cache, "123", range(3))
    cache.remove(0, 1, 2)
    cache.defragment()
    assert stored(cache) == {0: [(0, 1), (1, 3)]}
    with pytest.raises(RuntimeError, match="no forward pass is under way"):
        cache.get()
    cache.defragment()
    assert drawn(cache, "4", [2]) == "134"


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


def test_the_order_of_calls() -> None:
    """Each once, and nothing after the end; closing may be repeated."""
    cache = CausalCache()
    with pytest.raises(RuntimeError, match="call init first"):
        cache.start_forward(Batch([0], [0]))
    cache.set_config(CacheConfig())
    with pytest.raises(RuntimeError, match="set_config was called twice"):
        cache.set_config(CacheConfig())
    with pytest.raises(ValueError, match="capacity has to be at least 1, not 0"):
        cache.init(mx.float32, 1, 0, 1)
    cache.init(mx.float32, 1, 4, 4)
    with pytest.raises(RuntimeError, match="init was called twice"):
        cache.init(mx.float32, 1, 4, 4)
    with pytest.raises(RuntimeError, match="set_config was called after init"):
        cache.set_config(CacheConfig())
    with pytest.raises(RuntimeError, match="no forward pass is under way"):
        cache.put(mx.zeros((1, 1, 1, 1)), mx.zeros((1, 1, 1, 1)))
    cache.start_forward(Batch([0], [0]))
    with pytest.raises(RuntimeError, match="layer 0: get was called before anything was put"):
        cache.get()
    cache.put(mx.zeros((1, 1, 1, 1)), mx.zeros((1, 1, 1, 1)))
    cache.close()
    cache.close()
    assert (cache.nbytes, cache.num_cells, cache.sequences, cache.state) == (0, 0, (), [])
    calls = {
        "set_config": (CacheConfig(),),
        "init": (mx.float32, 1, 4, 4),
        "start_forward": (Batch([0], [0]),),
        "get": (),
        "defragment": (),
        "can_resume": (0, 0),
        "remove": (0, 0),
        "copy_prefix": (0, 0, 0),
    }
    for name, arguments in calls.items():
        with pytest.raises(RuntimeError, match="the cache was closed"):
            getattr(cache, name)(*arguments)


@pytest.mark.parametrize("reserve", [False, True], ids=["real", "reserve"])
def test_a_batch_beyond_what_was_agreed(reserve: bool) -> None:
    """Longer than max_batch, or of a sequence that is not there."""
    cache = made(2, capacity=16, max_batch=4)
    with pytest.raises(
        CacheFullError,
        match=r"\(max_batch is 4\) needs 5 free cells, but 4 of 4 are free: split it, or raise",
    ):
        cache.start_forward(Batch(range(5), [0] * 5), reserve)
    with pytest.raises(ValueError, match="there is no sequence 2"):
        cache.start_forward(Batch([0], [2]), reserve)


def test_without_a_way_to_rotate_gaps_stay_open() -> None:
    """Refused before anything changed; tails go all the same."""
    cache = made(2, shift=None)
    drawn(cache, "1234", range(4))
    cache.copy_prefix(0, 1, 4)
    with pytest.raises(
        NotSupportedError,
        match="the tokens behind position 0 can't move up: this cache was made without a shift",
    ):
        cache.remove(0, 0, 1)
    cache.remove(0, 3, 9)
    cache.remove(0, 1, 1)
    assert stored(cache) == {0: [(0, 1), (1, 2), (2, 3)], 1: [(0, 1), (1, 2), (2, 3), (3, 4)]}


@pytest.mark.parametrize("layer", [0, 1])
def test_a_rotation_that_fails_changes_nothing(layer: int) -> None:
    """Not even the layers for which it worked."""
    failing = [True]

    def shift(index: int, keys: mx.array, offsets: mx.array) -> mx.array:
        if index == layer and failing:
            raise NotSupportedError("no rope here")
        return rotated(index, keys, offsets)

    cache = made(2, shift=shift)
    drawn(cache, "1234", range(4))
    cache.copy_prefix(0, 1, 3)
    held, free = stored(cache), cache.num_free
    with pytest.raises(NotSupportedError, match="no rope here"):
        cache.remove(0, 1, 2)
    assert (stored(cache), cache.num_free) == (held, free)
    failing.clear()
    cache.remove(0, 1, 2)
    assert stored(cache) == {0: [(0, 1), (1, 3), (2, 4)], 1: held[1]}


def test_a_rotation_of_another_shape_is_refused() -> None:
    """It would be broadcast, or fail half-way."""
    cache = made(shift=lambda layer, keys, offsets: keys[:, :1])
    drawn(cache, "123", range(3))
    with pytest.raises(ValueError, match="layer 0: keys of shape"):
        cache.remove(0, 0, 1)
    assert stored(cache) == {0: [(0, 1), (1, 2), (2, 3)]}


def test_shared_tokens_without_room_for_a_copy() -> None:
    """Refused with the sizes, and nothing changed."""
    cache = made(2, capacity=2)
    drawn(cache, "123", range(3))
    cache.copy_prefix(0, 1, 3)
    with pytest.raises(
        CacheFullError,
        match=r"removing positions 0 .. 0 of sequence 1 needs 2 free cells, but 1 of 4 are free",
    ):
        cache.remove(1, 0, 1)
    assert stored(cache) == {0: [(0, 1), (1, 2), (2, 3)], 1: [(0, 1), (1, 2), (2, 3)]}


def test_positions_do_not_drift() -> None:
    """Shifted a hundred times, the keys are still right."""
    cache = made(capacity=120, max_batch=120)
    forward(cache, Batch(range(120), [0] * 120), range(120))
    for _ in range(100):
        cache.remove(0, 4, 5)
    assert stored(cache) == {0: [(n, n if n < 4 else n + 100) for n in range(20)]}


@pytest.mark.parametrize(
    "call",
    [lambda cache: cache.defragment(), lambda cache: cache.remove(0, 1, 2)],
    ids=["packing", "a-gap"],
)
def test_an_interrupt_while_rows_move_leaves_an_empty_cache(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[CausalCache], None]
) -> None:
    """Correct first: nobody is told that half of it is still true."""
    cache = made()
    drawn(cache, "1234", range(4))
    cache.remove(0, 0, 1)
    with monkeypatch.context() as patch:
        patch.setattr(
            "mlxrunner.cache.shared.causal.write",
            lambda *_: (_ for _ in ()).throw(KeyboardInterrupt),
        )
        with pytest.raises(KeyboardInterrupt):
            call(cache)
    assert (cache.sequences, cache.num_free, cache.can_resume(0, 1), cache.can_resume(0, 0)) == (
        (),
        16,
        False,
        True,
    )
    assert drawn(cache, "12", [0, 1]) == "1 12"


def test_taking_back_a_step() -> None:
    """It works for the last call only."""
    cache = made(2, capacity=4, max_batch=4)
    drawn(cache, "1234", range(4))
    cache.start_forward(Batch([0, 4], [1, 0]))
    cache.undo_forward()
    cache.undo_forward()
    assert (stored(cache), cache.num_free) == ({0: [(0, 1), (1, 2), (2, 3), (3, 4)]}, 4)
    assert cache.mask.shape == (4, 4)
    assert drawn(cache, "5", [4]) == "12345"
    cache.undo_forward()
    assert cache.num_free == 3


def test_only_the_last_call_is_taken_back() -> None:
    """Not a step before a removal, nor one before a step that failed."""
    cache = made(2, capacity=4, max_batch=4)
    drawn(cache, "1234", range(4))
    cache.start_forward(Batch([4], [0]))
    cache.remove(0, 3)
    cache.undo_forward()
    assert (cache.num_free, cache.can_resume(0, 4)) == (5, False)
    cache.start_forward(Batch([3, 4, 5], [0, 0, 0]))
    with pytest.raises(CacheFullError):
        cache.start_forward(Batch([0, 1, 2], [1, 1, 1]))
    cache.undo_forward()
    assert cache.num_free == 2


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


@pytest.mark.parametrize("distance", [2, 7, -3, 0], ids=["two", "seven", "back", "irregular"])
def test_rows_at_equal_distances_are_written_at_once(distance: int) -> None:
    """By a stride, where the lanes of many sequences are as full; else by a scatter."""
    cells = np.arange(1, 1 + 9 * (distance or 5), distance or 5, dtype=np.int32)
    cells = cells if distance >= 0 else np.arange(40, 20, distance, dtype=np.int32)
    cells[3] += distance == 0
    places, rows = Places(cells), mx.random.normal((1, 2, len(cells), 4))
    assert isinstance(places._cells, slice) == (distance > 0)
    buffer = mx.zeros((1, 2, 80, 4))
    places.put(buffer, rows)
    expected = np.zeros((1, 2, 80, 4), np.float32)
    expected[:, :, cells] = np.array(rows)
    assert (np.array(buffer) == expected).all()


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


@dataclass
class Naive:
    """A list of (position, token, where) per sequence; equal `where`s are shared."""

    num_cells: int
    window: int | None
    memory: int | None
    chunk: int | None
    lists: dict[int, list[tuple[int, int, int]]] = field(
        default_factory=lambda: {0: [], 1: [], 2: []}
    )
    made: int = 0

    @property
    def used(self) -> int:
        return len({where for tokens in self.lists.values() for _, _, where in tokens})

    def next(self, sequence: int) -> int:
        return max((at for at, _, _ in self.lists[sequence]), default=-1) + 1

    def stored(self) -> dict[int, list[tuple[int, int]]]:
        return {
            sequence: sorted((at, token) for at, token, _ in tokens)
            for sequence, tokens in self.lists.items()
            if tokens
        }

    def sees(self, query: int, at: int) -> bool:
        is_near = self.window is None or query - self.window < at
        return (
            at <= query
            and is_near
            and (self.chunk is None or at // self.chunk >= query // self.chunk)
        )

    def start(self, batch: Batch, tokens: Sequence[int]) -> list[list[int]] | None:
        """Return what each query sees, or None, with nothing done, where there is no room."""
        kept = {}
        for sequence, old in self.lists.items():
            own = [
                at
                for at, other in zip(batch.positions, batch.sequences, strict=True)
                if other == sequence
            ]
            begin = min(own) if own else self.next(sequence)
            kept[sequence] = [
                token for token in old if self.memory is None or token[0] >= begin - self.memory + 1
            ]
        trial = replace(self, lists=kept)
        if trial.used + len(batch) > self.num_cells:
            return None
        self.lists = kept
        for at, sequence, token in zip(batch.positions, batch.sequences, tokens, strict=True):
            self.lists[sequence].append((at, token, self.new()))
        seen = []
        for row, (query, sequence) in enumerate(zip(batch.positions, batch.sequences, strict=True)):
            ahead = {tokens[other] for other in batch.sees_forward if row in batch.sees_forward}
            own_list = self.lists[sequence]
            seen.append(
                sorted(
                    token
                    for at, token, _ in own_list
                    if self.sees(query, at) or (at > query and token in ahead)
                )
            )
        return seen

    def new(self) -> int:
        self.made += 1
        return self.made

    def remove(self, sequence: int, begin: int, end: int) -> bool:
        """Return True if there was room."""
        others = {
            where
            for other, tokens in self.lists.items()
            if other != sequence
            for _, _, where in tokens
        }
        before = [token for token in self.lists[sequence] if token[0] < begin]
        behind = [token for token in self.lists[sequence] if token[0] >= end]
        copies = sum(where in others for _, _, where in behind)
        kept = others | {where for _, _, where in before + behind}
        if len(kept) + copies > self.num_cells:
            return False
        by = end - begin
        self.lists[sequence] = before + [
            (at - by, token, self.new() if where in others else where)
            for at, token, where in behind
        ]
        return True

    def can_resume(self, sequence: int, position: int) -> bool:
        if position > self.next(sequence):
            return False
        there = {at for at, _, _ in self.lists[sequence]}
        return self.memory is None or all(
            at in there for at in range(position) if self.sees(position, at)
        )


class Work:
    """A cache and the lists that it has to agree with, under the same random calls."""

    def __init__(self, window: int | None, memory: int | None, chunk: int | None) -> None:
        self.cache = made(
            3, capacity=7, max_batch=6, window=window, memory=memory, chunk=chunk, shift=self.shift
        )
        kept = window if memory is None else memory
        self.naive = Naive(21 if kept is None else min(21, 3 * kept + 6), window, kept, chunk)
        self.tokens = 0
        self.fails = False

    def shift(self, layer: int, keys: mx.array, offsets: mx.array) -> mx.array:
        if self.fails and layer == 1:
            raise NotSupportedError("not now")
        return rotated(layer, keys, offsets)

    def step(self, what: str, rng: random.Random) -> None:
        held = self.cache._cells
        getattr(self, what)(rng)
        if what != "forward":  # which has looked already
            self.compare()
        assert self.cache.num_free == self.naive.num_cells - self.naive.used
        for sequence in range(3):
            for position in range(self.naive.next(sequence) + 2):
                assert self.cache.can_resume(sequence, position) == self.naive.can_resume(
                    sequence, position
                ), (sequence, position)
        assert what != "refused" or self.cache._cells is held

    def compare(self) -> None:
        assert (
            stored(self.cache) == self.naive.stored() if self.cache.nbytes else not self.naive.used
        )

    def batch(self, rng: random.Random) -> tuple[Batch, list[int]]:
        n = rng.choice([1, 1, 2, 3, 6])
        nexts = {sequence: self.naive.next(sequence) for sequence in range(3)}
        positions, sequences = [], []
        for _ in range(n):
            sequence = rng.randrange(3)
            jump = rng.random() < 0.05
            positions.append(rng.randrange(nexts[sequence] + 3) if jump else nexts[sequence])
            sequences.append(sequence)
            nexts[sequence] = max(nexts[sequence], positions[-1] + 1)
        self.tokens += n
        ahead = rng.sample(range(n), rng.randrange(n + 1)) if rng.random() < 0.3 else ()
        return Batch(positions, sequences, sees_forward=ahead), [
            *range(self.tokens - n, self.tokens)
        ]

    def forward(self, rng: random.Random) -> None:
        batch, tokens = self.batch(rng)
        expected, held = self.naive.start(batch, tokens), self.cache._cells
        if expected is not None:
            assert forward(self.cache, batch, tokens) == expected
            return
        with pytest.raises(CacheFullError):
            self.cache.start_forward(batch)
        assert self.cache._cells is held

    def taken_back(self, rng: random.Random) -> None:
        batch, _ = self.batch(rng)
        if (
            self.cache.nbytes
            and replace(self.naive, lists=dict(self.naive.lists)).start(batch, [0] * len(batch))
            is not None
        ):
            self.cache.start_forward(batch)
            self.cache.undo_forward()

    def reserve(self, rng: random.Random) -> None:
        batch, tokens = self.batch(rng)
        self.cache.start_forward(batch, reserve=True)
        for layer in (0, 1):
            put(self.cache, layer, tokens, batch)
            assert self.cache.get()[1].shape[2] == self.naive.num_cells

    def copy(self, rng: random.Random) -> None:
        source, target = rng.randrange(3), rng.randrange(3)
        length = rng.randrange(self.naive.next(source) + 2)
        self.cache.copy_prefix(source, target, length)
        self.naive.lists[target] = [
            token for token in self.naive.lists[source] if token[0] < length
        ]

    def cut(self, rng: random.Random) -> None:
        sequence = rng.randrange(3)
        begin = max(0, self.naive.next(sequence) - rng.randrange(5))
        self.cache.remove(sequence, begin)
        self.naive.lists[sequence] = [
            token for token in self.naive.lists[sequence] if token[0] < begin
        ]

    def close_gap(self, rng: random.Random) -> None:
        sequence = rng.randrange(3)
        begin, end = sorted(rng.randrange(self.naive.next(sequence) + 2) for _ in range(2))
        held = self.cache._cells
        if begin == end or self.naive.remove(sequence, begin, end):
            self.cache.remove(sequence, begin, end)
            return
        with pytest.raises(CacheFullError):
            self.cache.remove(sequence, begin, end)
        assert self.cache._cells is held

    def refused(self, rng: random.Random) -> None:
        sequence = rng.randrange(3)
        moved = any(at >= 1 for at, _, _ in self.naive.lists[sequence])
        if moved and self.cache.nbytes:
            self.fails = True
            with pytest.raises((NotSupportedError, CacheFullError)):
                self.cache.remove(sequence, 0, 1)
            self.fails = False

    def pack(self, rng: random.Random) -> None:
        self.cache.defragment()


CALLS = ["forward"] * 6 + [
    "copy",
    "copy",
    "cut",
    "close_gap",
    "close_gap",
    "refused",
    "pack",
    "reserve",
    "taken_back",
]


@pytest.mark.parametrize(
    ("window", "memory", "chunk"),
    [(None, None, None), (3, None, None), (2, 5, None), (None, None, 4), (4, 6, 3), (None, 5, 4)],
    ids=["full", "window", "memory", "chunk", "all", "chunk-memory"],
)
@examples(240)
@given(st.lists(st.sampled_from(CALLS), min_size=8, max_size=24), st.integers(0, 2**32))
def test_it_sees_what_lists_would_hold(
    window: int | None, memory: int | None, chunk: int | None, calls: list[str], seed: int
) -> None:
    """Any calls leave the tokens, positions, keys, room and errors that plain lists would have."""
    work, rng = Work(window, memory, chunk), random.Random(seed)
    for call in calls:
        work.step(call, rng)
    work.compare()
    work.cache.close()
    assert work.cache.nbytes == 0
