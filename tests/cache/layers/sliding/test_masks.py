"""The mask of a chunk, drawn, and no array where none is needed."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from support.sliding import few_steps, filled, numbered, write

from mlxrunner.cache.layers.sliding import SlidingWindowCache


def test_a_window_of_one_token_sees_itself() -> None:
    """The smallest that there is."""
    cache = SlidingWindowCache(1)
    assert write(cache, numbered(3)) == [[token] for token in numbered(3)]
    assert write(cache, numbered(1, 3)) == [numbered(1, 3)]


def drawing(cache: SlidingWindowCache, n: int, **how: Any) -> list[str]:
    """One line per query of the next chunk, one character per position: `#` where it is seen."""
    offset = cache.offset
    seen = write(cache, numbered(n, offset), **how)
    return ["".join("#" if (p, p + 7) in row else "." for p in range(offset + n)) for row in seen]


@few_steps
@pytest.mark.parametrize(
    ("before", "n", "how", "lines"),
    [
        pytest.param(0, 3, {}, ["#..", "##.", "###"], id="first-chunk"),
        pytest.param(
            0,
            5,
            {},
            ["#....", "##...", "###..", ".###.", "..###"],
            id="first-chunk-longer-than-the-window",
        ),
        pytest.param(4, 3, {}, ["..###..", "...###.", "....###"], id="later-chunk"),
        pytest.param(4, 1, {}, ["..###"], id="one-token"),
        pytest.param(2, 1, {}, ["###"], id="one-token-early"),
        pytest.param(4, 1, {"window_size": 2}, ["...##"], id="one-token-in-a-smaller-window"),
        pytest.param(
            4,
            3,
            {"window_size": 2},
            ["...##..", "....##.", ".....##"],
            id="chunk-in-a-smaller-window",
        ),
        pytest.param(
            1, 2, {"window_size": 2}, ["##.", ".##"], id="early-chunk-in-a-smaller-window"
        ),
        pytest.param(
            9,
            12,
            {},
            [
                ".......###...........",
                "........###..........",
                ".........###.........",
                "..........###........",
                "...........###.......",
                "............###......",
                ".............###.....",
                "..............###....",
                "...............###...",
                "................###..",
                ".................###.",
                "..................###",
            ],
            id="chunk-longer-than-the-room",
        ),
    ],
)
def test_the_mask_of_a_chunk_after_some_tokens(
    step: int, before: int, n: int, how: dict[str, Any], lines: list[str]
) -> None:
    """A window of three tokens, drawn; the same as an array, where that is asked for."""
    assert drawing(filled(SlidingWindowCache(3), before), n, **how) == lines
    as_array = SlidingWindowCache(3)
    filled(as_array, before)
    assert isinstance(as_array.make_mask(n, return_array=True, **how), mx.array)
    assert drawing(as_array, n, return_array=True, **how) == lines


@pytest.mark.parametrize(
    ("before", "n", "how", "kind"),
    [
        pytest.param(0, 1, {}, type(None), id="one-token"),
        pytest.param(50, 1, {}, type(None), id="one-token-late"),
        pytest.param(50, 1, {"window_size": 8}, type(None), id="one-token-in-the-whole-window"),
        pytest.param(50, 1, {"window_size": 7}, mx.array, id="one-token-in-a-smaller-window"),
        pytest.param(
            5, 1, {"window_size": 7}, type(None), id="one-token-early-in-a-smaller-window"
        ),
        pytest.param(0, 8, {}, str, id="a-window"),
        pytest.param(3, 5, {}, str, id="a-window-in-two-chunks"),
        pytest.param(3, 6, {}, mx.array, id="more-than-a-window"),
        pytest.param(50, 2, {}, mx.array, id="two-tokens-late"),
        pytest.param(50, 1, {"return_array": True}, mx.array, id="one-token-as-array"),
        pytest.param(0, 3, {"return_array": True}, mx.array, id="first-chunk-as-array"),
    ],
)
def test_there_is_an_array_only_where_one_is_needed(
    before: int, n: int, how: dict[str, Any], kind: type
) -> None:
    """None and "causal" cost nothing."""
    assert isinstance(filled(SlidingWindowCache(8, 4), before).make_mask(n, **how), kind)
