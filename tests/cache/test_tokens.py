"""Tokens on the host and the longest common prefix."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxrunner import PromptError
from mlxrunner.cache.entry import TokenBuffer, as_tokens, common_prefix
from mlxrunner.cache.layers.extents import window_closes

tokens = st.lists(st.integers(0, 5), max_size=40)


def naive(a: list[int], b: list[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


@given(tokens, tokens)
def test_common_prefix_is_what_a_loop_finds(a: list[int], b: list[int]) -> None:
    """Also when one list is empty or the beginning of the other."""
    assert common_prefix(as_tokens(a), as_tokens(b)) == naive(a, b)
    assert common_prefix(as_tokens(a), as_tokens(a + b)) == len(a)


@given(st.lists(st.one_of(tokens, st.integers(0, 40), st.integers(0, 5).map(lambda t: (t,)))))
def test_a_buffer_behaves_like_a_list(steps: list[list[int] | int | tuple[int]]) -> None:
    """extend, truncate and append in any order."""
    buffer, reference = TokenBuffer(), list[int]()
    for step in steps:
        if isinstance(step, int):
            buffer.truncate(step)
            del reference[step:]
        elif isinstance(step, tuple):
            buffer.append(*step)
            reference.extend(step)
        else:
            buffer.extend(step)
            reference.extend(step)
        assert buffer == reference
        assert list(buffer) == reference
        assert buffer[1:3] == reference[1:3]
        assert len(buffer) == len(reference)


def test_a_buffer_grows_past_its_first_allocation() -> None:
    """One by one and at once."""
    buffer = TokenBuffer(range(1000))
    for token in range(1000, 3000):
        buffer.append(token)
    assert buffer == list(range(3000))
    assert buffer[-1] == 2999
    assert buffer == TokenBuffer(range(3000))
    assert buffer != TokenBuffer(range(2999))


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param([1, -1], id="negative"),
        pytest.param([2**31], id="too-large"),
        pytest.param([1.5], id="float"),
        pytest.param(["a"], id="text"),
        pytest.param([[1, 2]], id="nested"),
        pytest.param([2**70], id="huge"),
    ],
)
def test_what_is_no_token_id_is_refused(bad: list[object]) -> None:
    """With a message that says what was found."""
    with pytest.raises(PromptError, match="token ids have to be"):
        as_tokens(bad)  # type: ignore[arg-type]


def test_no_tokens_are_an_empty_array() -> None:
    """The array has the right type."""
    assert as_tokens([]).dtype == np.int32


@pytest.mark.parametrize(
    ("tokens", "closes"), [(7, True), (8, False), (9, False), (12, False), (13, True), (30, True)]
)
@pytest.mark.exhaustive(6)
def test_a_window_is_complete_behind_a_gap(tokens: int, closes: bool) -> None:
    """Before a token has left it, or once the tokens behind the gap fill it.

    8 tokens are seen, 2 are kept and 4 are dropped.
    """
    assert window_closes(8, tokens, keep=2, discard=4) == closes
