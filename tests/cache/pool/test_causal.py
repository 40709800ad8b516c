"""The causal cache shows each query the right tokens; what was refused leaves no trace."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from support.causal import (
    ROPES,
    drawn,
    forward,
    keys_of,
    made,
    raw_keys,
    rotated,
    stored,
)

from mlxrunner.cache import Batch, CacheFullError, CausalCache, NotSupportedError
from mlxrunner.cache.pool.causal import BatchPlaces, CellsLayer


def test_the_oracle_of_keys_is_the_rope() -> None:
    """Positions one after another, by the rope as models call it."""
    for layer, rope in enumerate(ROPES):
        expected = rope(mx.array(raw_keys(layer, range(20)).astype(np.float32))[None], offset=300)
        assert np.abs(np.array(expected) - keys_of(layer, range(20), range(300, 320))).max() < 1e-5


def test_each_token_sees_itself_and_those_before() -> None:
    """An example, drawn: two sequences, of which one continues after a prefix of the other.

    tests/cache/pool/test_causal_at_random.py tries any calls, windows and chunks.
    """
    cache = made(2, window=4, memory=8)
    assert drawn(cache, "1234", [0, 1, 2, 3]) == "1 12 123 1234"
    assert drawn(cache, "5", [4]) == "2345"
    cache.copy_prefix(0, 1, 2)
    assert drawn(cache, "67", [2, 5], [1, 0]) == "126 3457"
    cache.remove(0, 0, 1)
    assert stored(cache) == {
        0: [(0, 2), (1, 3), (2, 4), (3, 5), (4, 7)],
        1: [(0, 1), (1, 2), (2, 6)],
    }


def test_a_memory_beyond_the_window() -> None:
    """Allows rewinds, and is what the cells are counted by."""
    cache, resumable = made(capacity=100, max_batch=4, window=2, memory=4), [0, 4, 5, 6, 7, 8]
    assert (cache.num_cells, cache.window, cache.memory) == (8, 2, 4)
    for start in range(0, 8, 2):
        drawn(cache, "12", [start, start + 1])
    layer = CellsLayer(cache, 0)
    assert [to for to in range(10) if layer.can_rewind(to)] == resumable
    assert [position for position in range(10) if cache.can_resume(0, position)] == resumable
    cache.remove(0, 5)
    assert drawn(cache, "9", [5]) == "19"


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


def test_full() -> None:
    """With the sizes; what fitted before can still be read and continue."""
    cache, full = made(capacity=4), r"a batch of {0} tokens needs {0} free cells, but {1} of 4 are"
    for count, free in ((5, 4), (1, 0)):
        with pytest.raises(CacheFullError, match=full.format(count, free) + " free: remove"):
            cache.start_forward(Batch(range(4 - free, 4 - free + count), [0] * count))
        if free:
            drawn(cache, "1234", [0, 1, 2, 3])
    _, values, mask = cache.get()
    assert np.array(values)[0, 0, :, 0].tolist() == [1, 2, 3, 4]
    assert np.array(mask).tolist() == np.tri(4, dtype=bool).tolist()
    cache.remove(0, 3)
    assert drawn(cache, "5", [3]) == "1235"


def test_the_order_of_calls() -> None:
    """Each once, and nothing after the end; closing may be repeated."""
    cache = CausalCache()
    with pytest.raises(RuntimeError, match="call init first"):
        cache.start_forward(Batch([0], [0]))
    with pytest.raises(ValueError, match="capacity has to be at least 1, not 0"):
        cache.init(mx.float32, 1, 0, 1)
    cache.init(mx.float32, 1, 4, 4)
    with pytest.raises(RuntimeError, match="init was called twice"):
        cache.init(mx.float32, 1, 4, 4)
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


def test_values_of_another_width_and_type() -> None:
    """Are stored as `init` says."""
    cache = CausalCache()
    cache.init(mx.float16, 1, 8, 8)
    cache.start_forward(Batch([0, 1], [0, 0]))
    cache.put(mx.ones((1, 3, 2, 4)), mx.ones((1, 1, 2, 6), mx.bfloat16))
    found = [(part.shape, part.dtype) for part in cache.get()[:2]]
    assert found == [((1, 3, 2, 4), mx.float16), ((1, 1, 2, 6), mx.float16)]


def test_keys_and_values_of_another_size_than_announced_or_allocated() -> None:
    """Are named with the layer and both sizes, and would otherwise be broadcast without a word."""
    cache = made()
    cache.start_forward(Batch([0, 1], [0, 0]))
    cache.set_layer(7)
    lengths = r"layer 7: {} {} were put, but start_forward announced 2 tokens"
    for sizes, said in (((3, 3), (3, "keys")), ((2, 1), (1, "values"))):
        with pytest.raises(ValueError, match=lengths.format(*said)):
            cache.put(*(mx.zeros((1, 1, size, 4)) for size in sizes))
    assert cache.nbytes == 0
    cache.set_layer(0)
    cache.put(mx.zeros((1, 2, 2, 4)), mx.zeros((1, 2, 2, 4)))
    allocated = r"values of shape \(1, 1, 2, 4\), but the cache was allocated for \(1, 2, 2, 4\)"
    with pytest.raises(ValueError, match="layer 0: " + allocated):
        cache.put(mx.zeros((1, 2, 2, 4)), mx.zeros((1, 1, 2, 4)))
    cache.set_layer(1)
    with pytest.raises(ValueError, match=r"layer 1: keys of shape \(2, 2, 2, 4\)"):
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


def test_without_a_way_to_rotate_gaps_stay_open() -> None:
    """Refused before anything changed; tails go all the same."""
    cache = made(2, shift=None)
    drawn(cache, "1234", range(4))
    cache.copy_prefix(0, 1, 4)
    with pytest.raises(
        NotSupportedError,
        match="the tokens after position 0 can't move up: this cache was made without a shift",
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
            "mlxrunner.cache.pool.causal.write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
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


def test_an_interrupt_while_rows_are_stored_leaves_the_sequence_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half a piece of a conversation that comes back from disk is none of it."""
    cache = made(max_sequences=2)
    drawn(cache, "1234", range(4))
    rows = cache.read(0, 0, 4)
    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            cache.write(1, 0, rows)
    assert (cache.stored(1), cache.num_free) == ((0, 0), 28)
    cache.write(1, 0, rows)
    assert stored(cache)[1] == stored(cache)[0]


def test_a_window_comes_back_at_its_positions() -> None:
    """From a file and from a checkpoint, in another sequence."""
    cache = made(max_sequences=2, window=4, memory=6)
    for position in range(10):
        forward(cache, Batch([position], [0]), [position + 20])
    layer, other = CellsLayer(cache, 0), CellsLayer(cache, 1)
    before = cache.stored(0)
    other.adopt(layer.export(), 10)
    assert cache.stored(1) == before
    assert stored(cache)[1][-5:] == stored(cache)[0][-5:]
    other.restore(layer.snapshot(), 10)
    assert cache.stored(1) == (7, 10)
    assert stored(cache)[1] == stored(cache)[0][-3:]
