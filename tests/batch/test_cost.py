"""The order of prompts: what it costs, and that nothing could cost less."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.prompts import shared_prefixes
from support.sample import examples

from mlxrunner.batch.prompts import PromptCost, cost
from mlxrunner.batch.records import LONG_KEY, shared_tokens, sort_key, tokens_of
from mlxrunner.cache.tokens import TokenArray, as_tokens, common_prefix
from mlxrunner.testing import oracle_runner

PROMPTS = st.lists(
    st.lists(st.integers(0, 3) | st.sampled_from([255, 256, 2**31 - 1]), min_size=1, max_size=8),
    max_size=20,
)


def arrays(prompts: list[list[int]]) -> list[TokenArray]:
    return [as_tokens(prompt) for prompt in prompts]


def trie_nodes(prompts: list[TokenArray]) -> int:
    """Nodes of the tree of prefixes, by building it: the root is not counted."""
    root: dict[int, dict] = {}  # type: ignore[type-arg]
    nodes = 0
    for prompt in prompts:
        place = root
        for token in prompt.tolist():
            nodes += token not in place
            place = place.setdefault(token, {})
    return nodes


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
    distinct = len({tuple(prompt) for prompt in prompts})
    assert found.nodes == trie_nodes(arrays(prompts))
    assert found.repeats == len(prompts) - distinct
    assert found.evaluated == found.nodes + found.repeats


@given(PROMPTS, st.randoms())
def test_no_order_costs_less_than_prefix_order(
    prompts: list[list[int]], shuffle: random.Random
) -> None:
    """Any other order evaluates at least as many tokens."""
    least = cost(sorted(arrays(prompts), key=sort_key)).evaluated
    shuffle.shuffle(prompts)
    found = cost(arrays(prompts))
    assert found.evaluated >= least
    assert (found.prompts, found.tokens) == (len(prompts), sum(map(len, prompts)))


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


def test_the_case_of_two_hundred_prompts() -> None:
    """The input order evaluates about 281,000 of 388,000 tokens, the sorted one the nodes."""
    prompts = shared_prefixes()
    shuffled, in_order = cost(prompts), cost(sorted(prompts, key=sort_key))
    assert (shuffled.prompts, shuffled.tokens) == (200, 388_000)
    assert 260_000 < shuffled.evaluated < 305_000
    assert in_order.evaluated == in_order.nodes == trie_nodes(prompts) == 20_393
    assert max(map(len, prompts)) < 2000


def test_the_case_is_the_same_each_time() -> None:
    """One seed gives one list of prompts, another one another."""
    first, again, other = shared_prefixes(1), shared_prefixes(1), shared_prefixes(2)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
