"""Find which of many sequences of tokens share the longest prefix with a prompt: a radix tree.

Bookkeeping only: no tensors, and nothing about files.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import pairwise
from typing import Generic, TypeVar

import numpy as np

from mlxrunner.cache.tokens import TokenArray, common_prefix

Key = TypeVar("Key", bound=Hashable)


class Prefixes(Generic[Key]):
    """Keys, each with a sequence of at least one token. A lookup compares each token once."""

    def __init__(self) -> None:
        self._root = _Node[Key](np.empty(0, np.int32))

    def add(self, key: Key, tokens: TokenArray) -> None:
        """Add `key`, whose sequence is `tokens`. The array must not change from then on."""
        node, at = self._root, 0
        node.keys[key] = None
        while at < len(tokens):
            child = node.children.get(int(tokens[at]))
            if child is None:
                child = node.children[int(tokens[at])] = _Node(tokens[at:])
            elif (shared := common_prefix(child.tokens, tokens[at:])) < len(child.tokens):
                child = node.split(child, shared)
            child.keys[key] = None
            node, at = child, at + len(child.tokens)

    def remove(self, key: Key, tokens: TokenArray) -> None:
        """Remove `key`, which was added with `tokens`."""
        path, at = [self._root], 0
        while at < len(tokens):
            path.append(path[-1].children[int(tokens[at])])
            at += len(path[-1].tokens)
        for node in path:
            del node.keys[key]
        for parent, node in pairwise(path):
            if not node.keys:
                del parent.children[int(node.tokens[0])]
                break
        for node in path[1:]:
            node.join()

    def sharing(self, prompt: TokenArray) -> Iterator[tuple[int, list[Key]]]:
        """Yield the keys that share tokens with `prompt`, those that share most first.

        With them comes the number of tokens that all of them share with it at least. Later groups
        repeat the keys of earlier ones.
        """
        path: list[tuple[int, _Node[Key]]] = []
        node, at = self._root, 0
        while at < len(prompt) and (child := node.children.get(int(prompt[at]))) is not None:
            shared = common_prefix(child.tokens, prompt[at:])
            node, at = child, at + shared
            path.append((at, node))
            if shared < len(node.tokens):
                break
        for shared, node in reversed(path):
            yield shared, list(node.keys)


class _Node(Generic[Key]):
    """A piece of text that all `keys` have, and the pieces that follow it, by their first token."""

    __slots__ = ("children", "keys", "tokens")

    def __init__(self, tokens: TokenArray) -> None:
        self.tokens = tokens
        self.children: dict[int, _Node[Key]] = {}
        self.keys: dict[Key, None] = {}  # in the order in which they were added

    def split(self, child: _Node[Key], at: int) -> _Node[Key]:
        """Put a node with the first `at` tokens of `child` before it, and return that."""
        before = _Node[Key](child.tokens[:at])
        before.keys = dict(child.keys)
        child.tokens = child.tokens[at:]
        before.children[int(child.tokens[0])] = child
        self.children[int(before.tokens[0])] = before
        return before

    def join(self) -> None:
        """Take over the only child, as long as no key ends here."""
        while len(self.children) == 1:
            (child,) = self.children.values()
            if len(child.keys) < len(self.keys):
                break
            self.tokens = np.concatenate([self.tokens, child.tokens])
            self.children = child.children
