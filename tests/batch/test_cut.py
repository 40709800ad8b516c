"""A batch is cut into parts of about equal cost, and what shares a prefix stays together."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from itertools import combinations_with_replacement, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.prompts import shared_prefixes

from mlxrunner.batch.order import BLOCK, FREE, SLACK, LineCosts, cut, extra_of, split
from mlxrunner.batch.prompts import cost
from mlxrunner.batch.records import sort_key
from mlxrunner.cache.tokens import TokenArray, as_tokens, common_prefix

Prompts = Sequence[TokenArray]
TREES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=9)
"""Prompts of tokens that share much."""


def costs_of(prompts: Prompts, answer: int) -> LineCosts:
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


@given(TREES, st.integers(0, 5), st.integers(1, 4))
@settings(deadline=None)
def test_a_cut_is_as_even_as_any_unless_it_evaluates_less(
    prompts: list[list[int]], answer: int, parts: int
) -> None:
    """Every line is in one part, in its order; against all cuts of small trees."""
    costs = costs_of([as_tokens(prompt) for prompt in sorted(prompts)], answer)
    found, end = cut(costs, parts), len(costs)
    assert found[0] == 0
    assert found[-1] == end
    assert len(found) == parts + 1
    assert found == sorted(found)
    cuts = [[0, *inner, end] for inner in combinations_with_replacement(range(end + 1), parts - 1)]
    best = min(max(parts_of(costs, places)) for places in cuts)
    again = max(extra_of(costs, found), FREE * int(costs.evaluated.sum()))
    longer = max(parts_of(costs, found)) / best
    if longer > 1 + SLACK:
        even = [places for places in cuts if max(parts_of(costs, places)) <= best * (1 + SLACK)]
        most = max(extra_of(costs, places) for places in even)
        assert longer * (costs.total + again) <= (costs.total + most) * (1 + SLACK)


@given(TREES, st.integers(1, 4))
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


def test_many_machines_share_a_large_batch() -> None:
    """A thousand parts of a million lines, 100 of each document, end within 10 % of each other."""
    random, lines = np.random.default_rng(0), 1_000_000
    begins = np.arange(lines) % 100 == 0
    lengths = np.repeat(random.integers(300, 600, lines // 100), 100)
    evaluated = np.where(begins, lengths, 0) + random.integers(10, 90, lines)
    reused = np.where(begins, 0, lengths)
    costs = LineCosts(evaluated, reused, np.full(lines, 64))
    places = cut(costs, 1000)
    found = parts_of(costs, places)
    assert max(found) <= 1.1 * min(found)
    assert extra_of(costs, places) <= 0.01 * evaluated.sum()


def test_the_rest_of_a_part_is_split_so_that_both_end_together() -> None:
    """The machine that runs it has the document; the other one has to evaluate it."""
    costs = one_document(100, 50)
    place = split(costs, 20, 100)
    assert place is not None
    own, other = 100 * (place - 20), costs.of(place, 100)
    assert own <= 1.1 * other
    assert other <= 1.1 * own


def test_a_rest_is_not_split_where_that_takes_longer() -> None:
    costs = one_document(100, 50)
    assert split(costs, 85, 100) is None
    assert split(costs, 99, 100) is None
    assert split(costs, 100, 100) is None
