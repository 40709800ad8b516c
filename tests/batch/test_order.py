"""Lines run in an order that evaluates as little as can be, and early lines of the input early."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence
from itertools import combinations_with_replacement, pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import entry, filled, indices
from support.prompts import shared_prefixes
from support.sample import examples

from mlxrunner.batch.order import (
    BLOCK,
    FREE,
    LONG_KEY,
    SLACK,
    LineCosts,
    cut,
    extra_of,
    run_order,
    shared_tokens,
    sort_key,
    split,
    tokens_of,
)
from mlxrunner.batch.prompts import PromptCost, cost, tokenize_lines
from mlxrunner.batch.store import InputLine, Store
from mlxrunner.cache.entry import TokenArray, as_tokens, common_prefix
from mlxrunner.testing import ByteTokenizer, oracle_runner

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
    """Tokens evaluated, nodes and repeats, on any tree; each line comes once.

    Counted in lines that end, the file is never empty longer, and never shorter on average.
    """
    order, tokens = chosen(prompts), by_tokens(prompts)
    assert sorted(order) == list(range(len(prompts)))
    assert cost_of(prompts, order) == cost_of(prompts, tokens)
    assert written(order).count(0) <= written(tokens).count(0)
    assert sum(written(order)) >= sum(written(tokens))


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


ROWS, MANY = range(50), range(1, 101)


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        # Grouped: the output grows with every line, though the ids come the other way round.
        ([[9 - group, 1, 9 - question] for group in range(5) for question in range(7)], range(35)),
        # A prompt comes before those that continue from it: else its last token is evaluated twice.
        ([[1, 2, 3], [4], [1, 2], [1, 2]], [2, 3, 0, 1]),
        # One early line in a large group must not hold up everybody.
        ([[2], *([1, n] for n in ROWS), *([2, n] for n in ROWS)], [*MANY[:50], 0, *MANY[50:]]),
    ],
    ids=["grouped", "grown", "better on average"],
)
def test_the_order_of(prompts: Prompts, expected: Sequence[int]) -> None:
    assert chosen(prompts) == list(expected)


def test_deep_and_wide_trees_need_no_recursion() -> None:
    """Prompts that continue from each other, and many that share nothing."""
    deep = [[7] * length for length in range(3000, 0, -1)]
    assert chosen(deep) == by_tokens(deep)
    wide = [[number] for number in random.Random(1).sample(range(10**6), 20_000)]
    assert chosen(wide) == list(range(20_000))


@pytest.mark.parametrize("overflow", ["stop", "shift"])
def test_a_context_that_is_shifted_keeps_the_order_of_the_tokens(overflow: str) -> None:
    """A shifted prompt does not share with the next one what their tokens share."""
    texts = ["b" * 30, "a" * 40, "b" * 20] if overflow == "shift" else ["bbb", "a", "bb"]
    lines = [InputLine(index, index + 1, text) for index, text in enumerate(texts)]
    defaults = {"overflow": overflow}
    with Store.create() as store:
        is_shifted = tokenize_lines(store, lines, ByteTokenizer(), context=35, defaults=defaults)
        store.finish(by_tokens=is_shifted)
        order = indices(store.pending())
    assert (is_shifted, order) == ((True, [1, 2, 0]) if overflow == "shift" else (False, [2, 0, 1]))


def test_lines_that_can_t_be_run_come_first() -> None:
    """Their errors cost nothing."""
    with filled([[2], entry(1, [], error="line 2: empty"), [1]]) as store:
        assert indices(store.pending()) == [1, 0, 2]


Lines = Sequence[TokenArray]
SMALL_TREES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=9)
"""Lines of tokens that share much."""


def costs_of(prompts: Lines, answer: int) -> LineCosts:
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    reused = np.zeros_like(lengths)
    for place, (before, prompt) in enumerate(pairwise(prompts), 1):
        reused[place] = min(common_prefix(before, prompt), len(prompt) - 1)
    return LineCosts(lengths - reused, reused, np.full_like(lengths, answer))


def parts_of(costs: LineCosts, places: Sequence[int]) -> list[int]:
    return [costs.of(first, end) for first, end in pairwise(places)]


def documents(answer: int) -> LineCosts:
    """40 questions on each of 5 documents."""
    return costs_of(sorted(shared_prefixes(), key=sort_key), answer)


def one_document(lines: int, answer: int) -> LineCosts:
    reused = np.full(lines, 2_000)
    reused[0] = 0
    return LineCosts(np.where(reused, 50, 2_050), reused, np.full(lines, answer))


@given(SMALL_TREES, st.integers(0, 5), st.integers(1, 4))
@settings(deadline=None)
def test_a_cut_is_as_even_as_any_unless_it_evaluates_less(
    prompts: list[list[int]], answer: int, parts: int
) -> None:
    """Every line is in one part, in its order; against all cuts of small trees."""
    costs = costs_of([as_tokens(prompt) for prompt in sorted(prompts)], answer)
    found, end = cut(costs, parts), len(costs)
    assert (found[0], found[-1], len(found)) == (0, end, parts + 1)
    assert found == sorted(found)
    cuts = [[0, *inner, end] for inner in combinations_with_replacement(range(end + 1), parts - 1)]
    best = min(max(parts_of(costs, places)) for places in cuts)
    again = max(extra_of(costs, found), FREE * int(costs.evaluated.sum()))
    longer = max(parts_of(costs, found)) / best
    if longer > 1 + SLACK:
        even = [places for places in cuts if max(parts_of(costs, places)) <= best * (1 + SLACK)]
        most = max(extra_of(costs, places) for places in even)
        assert longer * (costs.total + again) <= (costs.total + most) * (1 + SLACK)


@given(SMALL_TREES, st.integers(1, 4))
@settings(deadline=None)
def test_a_part_evaluates_what_is_said(prompts: list[list[int]], parts: int) -> None:
    """The tokens of each part are those that an empty entry evaluates for its lines."""
    tokens = [as_tokens(prompt) for prompt in sorted(prompts)]
    costs = costs_of(tokens, 0)
    for first, end in pairwise(cut(costs, parts)):
        evaluated = cost(tokens[first:end]).evaluated
        assert costs.evaluated_of(first, end) == costs.of(first, end) == evaluated


@pytest.mark.parametrize("answer", [0, 16, 64])
def test_eight_machines_evaluate_little_more_than_one(answer: int) -> None:
    """They take a document each: splitting one evaluates 9 % more."""
    costs = documents(answer)
    places = cut(costs, 8)
    assert places == [0, 40, 80, 120, 160, 200, 200, 200, 200]
    assert extra_of(costs, places) == 4 * 203 <= FREE * cost(shared_prefixes()).nodes


def test_long_answers_are_worth_evaluating_documents_again() -> None:
    costs = documents(1000)
    found = parts_of(costs, cut(costs, 8))
    assert max(found) < 0.8 * max(parts_of(costs, range(0, 201, 40)))


@pytest.mark.parametrize("parts", [2, 8, 64])
def test_a_long_subtree_is_split(parts: int) -> None:
    """Questions on one document are shared by all machines, which end together."""
    found = parts_of(costs := one_document(20_000, 100), cut(costs, parts))
    assert len(found) == parts
    assert max(found) <= 1.1 * min(found)


def test_more_machines_than_lines_leave_some_empty() -> None:
    assert cut(one_document(2, 5_000), 4) == [0, 1, 2, 2, 2]
    assert cut(one_document(7, 0).between(0, 0), 3) == [0, 0, 0, 0]
    assert cut(one_document(7, 0), 1) == [0, 7]


def test_a_cut_takes_a_sum_of_eight_bytes_for_each_line() -> None:
    """Other numbers are made for BLOCK lines at a time, and the costliest may be in any block."""
    costs = one_document(10 * BLOCK, 100)
    costs.answers[7 * BLOCK] = 10**6
    tracemalloc.start()
    try:
        cut(costs, 8)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 8 * len(costs) <= peak <= 12 * len(costs)
    assert costs.costliest == costs.of(7 * BLOCK, 7 * BLOCK + 1) >= 10**6


def test_the_rest_of_a_part_is_split_so_that_both_end_together() -> None:
    """The machine that runs it has the document; the other one has to evaluate it."""
    costs = one_document(100, 50)
    place = split(costs, 20, 100)
    assert place is not None
    own, other = 100 * (place - 20), costs.of(place, 100)
    assert own <= 1.1 * other
    assert other <= 1.1 * own


@pytest.mark.parametrize("at", [85, 99, 100])
def test_a_rest_is_not_split_where_that_takes_longer(at: int) -> None:
    assert split(one_document(100, 50), at, 100) is None


PROMPTS = st.lists(
    st.lists(st.integers(0, 3) | st.sampled_from([255, 256, 2**31 - 1]), min_size=1, max_size=8),
    max_size=20,
)


def arrays(prompts: Prompts) -> list[TokenArray]:
    return [as_tokens(prompt) for prompt in prompts]


@given(PROMPTS)
def test_bytes_are_in_the_order_of_the_tokens(prompts: list[list[int]]) -> None:
    """Sorted by their keys, prompts are sorted as lists of numbers, and the keys give them back."""
    assert [tokens_of(key).tolist() for key in sorted(map(sort_key, arrays(prompts)))] == sorted(
        prompts
    )


@pytest.mark.parametrize("length", [0, 1, 7, LONG_KEY // 4, LONG_KEY // 4 + 1, 3 * LONG_KEY])
@pytest.mark.parametrize("more", [0, 1, 300])
def test_sort_keys_share_what_their_tokens_share(length: int, more: int) -> None:
    """Short keys are compared as whole numbers, and long ones by numpy."""
    numbers = random.Random(length)
    one = as_tokens([numbers.randrange(2**31) for _ in range(length)])
    for place in {0, length // 2, max(length - 1, 0), length}:
        other = np.concatenate([one[:place], one[place:] ^ 256, np.arange(more, dtype=np.int32)])
        found = shared_tokens(sort_key(one), sort_key(other))
        assert found == common_prefix(one, other) == place


@given(PROMPTS)
def test_prefix_order_costs_a_nodes_count_and_a_token_per_repeat(prompts: list[list[int]]) -> None:
    """Prefix order evaluates a naive tree's nodes, and one more token for each repeated prompt."""
    found = cost(sorted(arrays(prompts), key=sort_key))
    prefixes = {tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)}
    assert found.nodes == len(prefixes)
    assert found.repeats == len(prompts) - len({tuple(prompt) for prompt in prompts})
    assert found.evaluated == found.nodes + found.repeats


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ([], PromptCost()),
        ([[5]], PromptCost(prompts=1, tokens=1, evaluated=1, nodes=1)),
        ([[1, 2], [1, 2, 3, 4]], PromptCost(prompts=2, tokens=6, evaluated=4, nodes=4)),
        ([[1, 2], [1, 2]], PromptCost(prompts=2, tokens=4, evaluated=3, nodes=2, repeats=1)),
        ([[1, 2, 3], [1, 2]], PromptCost(prompts=2, tokens=5, evaluated=4, nodes=3, repeats=1)),
        ([[1, 2], [3], [1, 2]], PromptCost(prompts=3, tokens=5, evaluated=5, nodes=5)),
    ],
    ids=["none", "one", "grown", "equal", "contained", "there and back"],
)
def test_cost_of_an_order(prompts: list[list[int]], expected: PromptCost) -> None:
    """Each prompt pays for what it does not share with the one before, and at least one token."""
    assert cost(arrays(prompts)) == expected


@examples(30)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=8), max_size=6))
def test_the_runner_evaluates_what_was_computed(prompts: list[list[int]]) -> None:
    """In the given order and in prefix order, answers of one token: it is not part of the entry."""
    for order in (arrays(prompts), sorted(arrays(prompts), key=sort_key)):
        runner = oracle_runner()
        evaluated = 0
        for prompt in order:
            *_, last = runner.generate(prompt, max_tokens=1)
            assert last.usage is not None
            evaluated += last.usage.evaluated_tokens
        assert evaluated == cost(order).evaluated
