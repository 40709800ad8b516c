"""The cache of an encoder's output: one at a time, with the position of its input."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlxrunner.cache import END, Batch, CacheConfig, CacheFullError, EncoderCache, NotSupportedError

LAYERS = (3, 8)


def made(config: CacheConfig | None = None) -> EncoderCache:
    cache = EncoderCache()
    if config is not None:
        cache.set_config(config)
    cache.init(mx.float32, 1, 64, 16)
    return cache


def put(
    cache: EncoderCache, content: float, length: int = 4, layers: tuple[int, ...] = LAYERS
) -> None:
    for layer in layers:
        cache.set_layer(layer)
        cache.put(
            mx.full((1, 2, length, 8), content + layer),
            mx.full((1, 2, length, 6), -content - layer),
        )


def encoded(cache: EncoderCache, content: float, at: int, length: int = 4) -> EncoderCache:
    """A batch of three tokens, the middle one of which is the input."""
    cache.start_forward(Batch([at - 1, at, at + 1], [0, 0, 0], encoder_inputs=[1]))
    put(cache, content, length)
    return cache


def contents(cache: EncoderCache) -> tuple[float, int]:
    """Return the stored output, the same in all layers, and its length."""
    found = set()
    for layer in LAYERS:
        cache.set_layer(layer)
        keys, values, mask = cache.get()
        assert mask is None
        assert mx.array_equal(keys[..., :6], -values)
        assert (keys.max() == keys.min()).item()
        found.add((keys.max().item() - layer, keys.shape[2]))
    (one,) = found
    return one


def test_what_was_put_is_there_in_later_passes() -> None:
    """Without a mask, until another input comes."""
    cache = encoded(made(), 50, at=5)
    assert (contents(cache), cache.position) == ((50, 4), 5)
    cache.start_forward(Batch([7], [0]))
    assert (contents(cache), cache.position) == ((50, 4), 5)
    encoded(cache, 90, at=9, length=3)
    assert (contents(cache), cache.position) == ((90, 3), 9)


def test_an_output_belongs_to_the_last_input_of_its_batch() -> None:
    """It belongs to the first token where none is named."""
    cache = made()
    cache.start_forward(Batch([4, 5, 6, 7], [0] * 4, encoder_inputs=[0, 2]))
    put(cache, 1)
    assert cache.position == 6
    cache.start_forward(Batch([8, 9], [0, 0]))
    put(cache, 2)
    assert cache.position == 8


@pytest.mark.parametrize(
    ("begin", "end", "position"),
    [
        (5, 6, None),
        (0, END, None),
        (3, 9, None),
        (6, END, 5),
        (0, 5, 0),
        (1, 3, 3),
        (0, 0, 5),
        (6, 9, 5),
    ],
    ids=[
        "itself",
        "everything",
        "around",
        "behind",
        "before",
        "some-before",
        "nothing",
        "a-gap-behind",
    ],
)
def test_removing_its_position_forgets_it(begin: int, end: int, position: int | None) -> None:
    """A removal before it moves it up, as every token."""
    cache = encoded(made(), 50, at=5)
    cache.remove(0, begin, end)
    assert cache.position == position
    if position is None:
        with pytest.raises(RuntimeError, match="layer 8: no encoder output is stored"):
            cache.get()
    else:
        assert contents(cache) == (50, 4)


def test_resuming_needs_the_latest_input_before() -> None:
    """A replaced one is gone for good; a fresh start needs none."""
    cache = encoded(encoded(made(), 50, at=5), 90, at=9)
    assert [position for position in range(-1, 14) if cache.can_resume(0, position)] == [
        0,
        1,
        2,
        3,
        4,
        5,
        10,
        11,
        12,
        13,
    ]
    cache.remove(0, 8)
    assert [position for position in range(-1, 14) if cache.can_resume(0, position)] == [
        0,
        1,
        2,
        3,
        4,
        5,
    ]
    cache.remove(0, 2, 4)
    assert [position for position in range(-1, 14) if cache.can_resume(0, position)] == [0, 1, 2, 3]
    cache.remove(0, 3)
    assert cache.can_resume(0, 13)


def test_an_interrupted_pass_leaves_nothing() -> None:
    """Half of the layers with one image and half with another would be worse."""
    cache = encoded(made(), 50, at=5)
    cache.start_forward(Batch([9], [0], encoder_inputs=[0]))
    put(cache, 90, layers=LAYERS[:1])
    assert cache.position is None
    cache.start_forward(Batch([9], [0]))
    for layer in LAYERS:
        cache.set_layer(layer)
        with pytest.raises(RuntimeError, match="no encoder output is stored"):
            cache.get()
    assert not cache.can_resume(0, 10)
    assert not cache.can_resume(0, 7)
    assert cache.can_resume(0, 5)


def test_buffers_are_those_of_the_reserve_pass() -> None:
    """The reserve pass stores nothing, and later outputs are no longer."""
    cache = encoded(made(), 50, at=5)
    assert cache.nbytes == 2 * 2 * 4 * (8 + 6) * 4
    cache = made()
    cache.start_forward(Batch([0], [0]), reserve=True)
    put(cache, 1, length=10)
    assert [part.shape for part in cache.get()[:2]] == [(1, 2, 10, 8), (1, 2, 10, 6)]
    assert (cache.position, cache.nbytes) == (None, 2 * 2 * 10 * (8 + 6) * 4)
    encoded(cache, 50, at=5, length=7)
    assert contents(cache) == (50, 7)
    with pytest.raises(
        CacheFullError,
        match="layer 3: an encoder output of 11 rows needs 11 free cells, "
        "but 10 of 10 are free: reserve with the longest",
    ):
        encoded(cache, 60, at=8, length=11)
    assert contents(cache) == (50, 7)


def test_taking_back_a_step() -> None:
    """Before anything was put."""
    cache = encoded(made(), 50, at=5)
    cache.start_forward(Batch([9], [0], encoder_inputs=[0]))
    cache.undo_forward()
    assert contents(cache) == (50, 4)
    put(cache, 60)
    cache.undo_forward()
    assert (contents(cache), cache.position) == ((60, 4), 5)


def test_shapes_are_checked() -> None:
    """Before anything is written."""
    cache = encoded(made(), 50, at=5)
    with pytest.raises(ValueError, match="layer 8: 4 keys, but 3 values"):
        cache.put(mx.zeros((1, 2, 4, 8)), mx.zeros((1, 2, 3, 6)))
    with pytest.raises(ValueError, match="layer 8: keys of shape"):
        cache.put(mx.zeros((1, 1, 4, 8)), mx.zeros((1, 2, 4, 6)))
    assert contents(cache) == (50, 4)


def test_one_sequence_only() -> None:
    """Every question about another one is refused."""
    with pytest.raises(NotSupportedError, match="an encoder cache serves 1 sequence, not 2"):
        EncoderCache().init(mx.float32, 2, 64, 16)
    cache = encoded(made(), 50, at=5)
    for call in (
        lambda: cache.start_forward(Batch([7, 0], [0, 1])),
        lambda: cache.copy_prefix(0, 1, 4),
        lambda: cache.remove(1, 0),
        lambda: cache.can_resume(1, 0),
    ):
        with pytest.raises(NotSupportedError, match="an encoder cache serves"):
            call()
    assert contents(cache) == (50, 4)


def test_the_order_of_calls() -> None:
    """It is that of every cache; a configuration is accepted and has no effect here."""
    cache = EncoderCache()
    with pytest.raises(RuntimeError, match="call init first"):
        cache.start_forward(Batch([0], [0]))
    cache = made(CacheConfig(mx.float16, 32))
    for call in (
        lambda: cache.init(mx.float32, 1, 1, 1),
        lambda: cache.set_config(CacheConfig()),
        cache.get,
        lambda: put(cache, 1),
    ):
        with pytest.raises(RuntimeError, match=r"twice|after init|no forward pass"):
            call()
    encoded(cache, 50, at=5)
    with pytest.raises(ValueError, match=r"there are no positions 3 .. 2"):
        cache.remove(0, 3, 2)
    cache.close()
    cache.close()
    assert (cache.nbytes, cache.position) == (0, None)
    with pytest.raises(RuntimeError, match="the cache was closed"):
        cache.get()
