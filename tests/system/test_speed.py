"""The cost of a prefill is fitted to those that were run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxrunner.system.speed import PrefillCurve

STEP = 512


def cost(begin: int, end: int, fixed: float, linear: float, square: float) -> float:
    return fixed + linear * (end - begin) + square * (end**2 - begin**2)


def fitted(*coefficients: float, chunks: tuple[tuple[int, int], ...]) -> PrefillCurve:
    curve = PrefillCurve()
    for begin, end in chunks:
        curve.add(begin, end, cost(begin, end, *coefficients))
    return curve


CHUNKS = ((0, 512), (512, 1024), (1024, 1500), (1500, 1501), (0, 100))


@pytest.mark.parametrize(
    "coefficients", [(0.01, 2e-4, 3e-8), (0.0, 2e-4, 0.0), (0.0, 0.0, 1e-7), (0.005, 1e-4, 0.0)]
)
def test_the_curve_is_found_again(coefficients: tuple[float, float, float]) -> None:
    """From chunks of several lengths at several depths."""
    curve = fitted(*coefficients, chunks=CHUNKS)
    whole = (
        cost(0, 512, *coefficients)
        + cost(512, 1024, *coefficients)
        + cost(1024, 1400, *coefficients)
        - coefficients[0] * (3 - 1400 / STEP)  # the last chunk has other tokens, too
    )
    assert curve.seconds(1400, STEP) == pytest.approx(whole, rel=1e-3)


def test_one_chunk_is_enough_for_as_much_again() -> None:
    """Its time a token."""
    curve = fitted(0.0, 1e-3, 0.0, chunks=((0, 100),))
    assert curve.seconds(100, STEP) == pytest.approx(0.1, rel=0.01)


def test_nothing_was_saved_in_no_time() -> None:
    """No curve is needed for that."""
    assert PrefillCurve().seconds(0, STEP) == 0.0


@pytest.mark.parametrize(
    ("chunks", "tokens"),
    [((), 1), (((0, 100),), 201), (((1000, 1020),), 2000)],
    ids=["nothing measured", "twice as far", "chunks four times as long"],
)
def test_what_would_be_a_guess_is_not_said(
    chunks: tuple[tuple[int, int], ...], tokens: int
) -> None:
    """None where too little was measured."""
    assert fitted(0.0, 1e-3, 0.0, chunks=chunks).seconds(tokens, STEP) is None


@given(
    st.lists(
        st.tuples(st.integers(0, 30_000), st.integers(1, 2048), st.floats(1e-5, 100)),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 40_000),
)
def test_noise_never_makes_it_negative(chunks: list[tuple[int, int, float]], tokens: int) -> None:
    """The result is a number or nothing."""
    curve = PrefillCurve()
    for begin, count, seconds in chunks:
        curve.add(begin, begin + count, seconds)
    found = curve.seconds(tokens, 2048)
    assert found is None or 0 <= found < 1e7
