"""Little work for many bytes is given up first, and so is what nobody came back to."""

from __future__ import annotations

import pytest

from mlxrunner.cache.entry import EVEN_TOKENS, GreedyDual, evaluation_cost, eviction_score


def test_the_cost_grows_with_the_square_of_the_tokens() -> None:
    """Attention costs as much as the rest at EVEN tokens, and parts add up to the whole."""
    assert evaluation_cost(EVEN_TOKENS) == 2 * EVEN_TOKENS
    assert evaluation_cost(3000, 1000) + evaluation_cost(1000) == evaluation_cost(3000)
    assert evaluation_cost(0) == evaluation_cost(500, 500) == 0


def test_worth_is_the_cost_of_what_would_be_lost_for_its_bytes() -> None:
    """A longer conversation of equal bytes is worth more; so is a smaller one of equal length."""
    assert eviction_score(2000, 100) > eviction_score(1000, 100) > eviction_score(1000, 200)
    assert eviction_score(2000, 100, begin=1900) < eviction_score(100, 10)
    assert eviction_score(10, 0) == evaluation_cost(10)


def test_the_least_valuable_is_chosen() -> None:
    """Only the worth counts while the clock stands still; ties go to the first."""
    dual = GreedyDual[str]()
    for name in "abc":
        dual.use(name)
    assert dual.least({"a": 2.0, "b": 1.0, "c": 3.0}) == "b"
    assert dual.least({"c": 1.0, "a": 1.0}) == "c"
    with pytest.raises(ValueError, match="empty"):
        dual.least({})


def test_what_is_never_used_again_goes_at_some_time() -> None:
    """Each one that is given up lets the clock go on, and others gain on the unused one."""
    dual = GreedyDual[int]()
    dual.use(0)
    given_up = []
    for number in range(1, 9):
        dual.use(number)
        key = dual.least({0: 5.0, number: 1.5})
        dual.evict(key, 5.0 if key == 0 else 1.5)
        given_up.append(key)
        if key == 0:
            break
    assert given_up == [1, 2, 3, 0]
    assert dual.clock == 5.0


def test_a_use_brings_a_key_up_to_the_clock_and_the_clock_never_goes_back() -> None:
    dual = GreedyDual[str]()
    dual.use("old")
    dual.use("big")
    dual.evict("big", 4.0)
    assert dual.value("old", 1.0) == 1.0
    dual.use("old")
    assert dual.value("old", 1.0) == 5.0
    dual.evict("never used", 1.0)
    assert dual.clock == 4.0
    dual.forget("old")
    assert dual.value("old", 1.0) == 1.0
