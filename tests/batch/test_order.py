"""Lines run in an order that evaluates as little as can be, and early lines of the input early."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxrunner.batch.inputs import InputLine
from mlxrunner.batch.order import run_order, wait
from mlxrunner.batch.prompts import PromptCost, cost, tokenize_lines
from mlxrunner.batch.records import StoredLine, sort_key
from mlxrunner.batch.store import Store
from mlxrunner.cache.tokens import as_tokens
from mlxrunner.testing import ByteTokenizer

Prompts = Sequence[Sequence[int]]
TREES = st.lists(
    st.lists(st.integers(0, 2) | st.sampled_from([255, 256, 2**31 - 1]), max_size=6), max_size=40
)


def by_tokens(prompts: Prompts) -> list[int]:
    return sorted(range(len(prompts)), key=lambda index: (prompts[index], index))


def chosen(prompts: Prompts) -> list[int]:
    keys = [sort_key(as_tokens(prompt)) for prompt in prompts]
    return list(run_order(((index, keys[index]) for index in by_tokens(prompts)), len(prompts)))


def cost_of(prompts: Prompts, order: Sequence[int]) -> PromptCost:
    return cost(as_tokens(prompts[index]) for index in order)


def written(order: Sequence[int]) -> list[int]:
    """Return how many lines the file has after each line that ends, one at a time."""
    counts, done, count = [], set(), 0
    for index in order:
        done.add(index)
        while count in done:
            count += 1
        counts.append(count)
    return counts


@given(TREES)
def test_it_costs_what_the_order_of_the_tokens_costs(prompts: Prompts) -> None:
    """Tokens evaluated, nodes and repeats, on any tree; each line comes once."""
    order = chosen(prompts)
    assert sorted(order) == list(range(len(prompts)))
    assert cost_of(prompts, order) == cost_of(prompts, by_tokens(prompts))


@given(TREES)
def test_the_file_is_never_empty_longer_and_never_shorter_on_average(prompts: Prompts) -> None:
    """The comparison is with the order of the tokens, counted in lines that end."""
    before, now = written(by_tokens(prompts)), written(chosen(prompts))
    assert now.count(0) <= before.count(0)
    assert sum(now) >= sum(before)


SHORT = st.lists(st.integers(0, 1), min_size=1, max_size=4)


@given(st.lists(SHORT, min_size=1, max_size=5, unique_by=tuple))
def test_no_order_at_all_evaluates_less(prompts: Prompts) -> None:
    """By brute force; and of those that cost the same, none writes the first line earlier.

    An order that is better on average may write the first line later; it is that of the tokens.
    Prompts that are equal run in a row, which may be later, too.
    """
    orders = list(permutations(range(len(prompts))))
    least = min(cost_of(prompts, order).evaluated for order in orders)
    order = chosen(prompts)
    assert cost_of(prompts, order).evaluated == least
    if order != by_tokens(prompts):
        best = [one for one in orders if cost_of(prompts, one).evaluated == least]
        assert written(order).count(0) == min(written(one).count(0) for one in best)


def test_an_input_that_is_grouped_runs_as_it_came() -> None:
    """Its output grows with every line, though the token ids come the other way round."""
    prompts = [[9 - group, 1, 9 - question] for group in range(5) for question in range(7)]
    assert chosen(prompts) == list(range(35))
    assert written(by_tokens(prompts))[-8] == 0  # as it was before


def test_a_prompt_comes_before_those_that_go_on_from_it() -> None:
    """Also if its line comes later: otherwise its last token would be evaluated twice."""
    assert chosen([[1, 2, 3], [4], [1, 2], [1, 2]]) == [2, 3, 0, 1]


def test_the_order_of_the_tokens_stays_where_it_is_better_on_average() -> None:
    """One early line in a large group must not hold up everybody."""
    prompts = [[2], *[[1, number] for number in range(50)], *[[2, number] for number in range(50)]]
    assert chosen(prompts) == by_tokens(prompts)


def test_deep_and_wide_trees_need_no_recursion() -> None:
    """Prompts that go on from each other, and many that share nothing."""
    deep = [[7] * length for length in range(3000, 0, -1)]
    assert chosen(deep) == by_tokens(deep)
    wide = [[number] for number in random.Random(1).sample(range(10**6), 20_000)]
    assert chosen(wide) == list(range(20_000))


def test_the_wait_is_that_of_the_written_lines() -> None:
    """Both count the same: an answer that waits longer is missing from the file for longer."""
    for seed in range(20):
        order = random.Random(seed).sample(range(30), 30)
        counts = written(order)
        written_after = [next(k for k in range(30) if counts[k] > line) for line in range(30)]
        assert wait(order) == sum(written_after)  # type: ignore[arg-type]


@pytest.mark.parametrize("overflow", ["stop", "shift"])
def test_a_context_that_is_shifted_keeps_the_order_of_the_tokens(overflow: str) -> None:
    """A shifted prompt does not share with the next one what their tokens share."""
    texts = ["b" * 30, "a" * 40, "b" * 20] if overflow == "shift" else ["bbb", "a", "bb"]
    lines = [InputLine(index, index + 1, text) for index, text in enumerate(texts)]
    with Store.create() as store:
        is_shifted = tokenize_lines(
            store, lines, ByteTokenizer(), context=35, defaults={"overflow": overflow}
        )
        store.finish(by_tokens=is_shifted)
        order = [line.index for line in store.pending()]
    assert (is_shifted, order) == ((True, [1, 2, 0]) if overflow == "shift" else (False, [2, 0, 1]))


def test_lines_that_can_t_be_run_come_first() -> None:
    """Their errors cost nothing."""
    with Store.create() as store:
        for index, tokens in enumerate([[2], [], [1]]):
            error = None if tokens else "line 2: empty"
            store.add(StoredLine(index, index + 1, as_tokens(tokens), error=error))
        store.finish()
        assert [line.index for line in store.pending()] == [1, 0, 2]
