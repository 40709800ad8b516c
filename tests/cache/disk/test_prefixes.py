"""The radix tree finds what a search through all sequences finds."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxrunner.cache.disk.index import PrefixTree
from mlxrunner.cache.entry import TokenArray, common_prefix

FEW = st.lists(st.integers(0, 2), min_size=1, max_size=12)


def array(tokens: list[int]) -> TokenArray:
    return np.array(tokens, np.int32)


@given(st.lists(st.tuples(FEW, st.booleans()), max_size=12), FEW)
@settings(max_examples=200)
def test_every_key_is_found_with_what_it_shares(
    history: list[tuple[list[int], bool]], prompt: list[int]
) -> None:
    """The first group in which a key appears says how much it shares, whatever was removed."""
    tree, there = PrefixTree[int](), dict[int, list[int]]()
    for key, (tokens, then_removes) in enumerate(history):
        tree.add(key, array(tokens))
        there[key] = tokens
        if then_removes:
            gone = next(iter(there))
            tree.remove(gone, array(there.pop(gone)))
    found: dict[int, int] = {}
    before = len(prompt)
    for shared, keys in tree.sharing(array(prompt)):
        assert shared <= before
        before = shared
        for key in keys:
            found.setdefault(key, shared)
    expected = {key: common_prefix(array(tokens), array(prompt)) for key, tokens in there.items()}
    assert found == {key: shared for key, shared in expected.items() if shared}


def test_the_tree_is_as_small_as_before_once_keys_are_removed() -> None:
    """A conversation that grows by turns leaves one node behind, and an empty tree none."""
    rng = random.Random(0)
    tree, tokens = PrefixTree[int](), array([rng.randrange(9) for _ in range(300)])
    for turn in range(1, 31):
        tree.add(turn, tokens[: 10 * turn])
        if turn > 1:
            tree.remove(turn - 1, tokens[: 10 * (turn - 1)])
    (node,) = tree._root.children.values()
    assert list(node.tokens) == list(tokens)
    assert not node.children
    tree.remove(30, tokens)
    assert not tree._root.children
    assert not tree._root.keys


def test_two_keys_may_have_the_same_tokens() -> None:
    tree = PrefixTree[str]()
    tree.add("a", array([1, 2, 3]))
    tree.add("b", array([1, 2, 3]))
    assert list(tree.sharing(array([1, 2, 9]))) == [(2, ["a", "b"])]
    tree.remove("a", array([1, 2, 3]))
    assert list(tree.sharing(array([1, 2, 3, 4]))) == [(3, ["b"])]
    with pytest.raises(KeyError):
        tree.remove("a", array([1, 2, 3]))
