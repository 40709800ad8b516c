"""Choose the order in which the lines of a batch run.

An order that goes depth-first through the tree of the prompts' prefixes, each prompt before those
that begin with it, evaluates every node of the tree once. All such orders cost the same. This is
the choice among them: early lines of the input come early, so that answers can be written in the
order of the input while others still run. No files, no models.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mlxrunner.batch.records import shared_tokens

NONE = -1


def run_order(lines: Iterable[tuple[int, bytes]], count: int) -> array[int]:
    """Return the order in which `count` lines run, as their indexes.

    `lines` are their indexes and sort keys, sorted by key and index. In each place of the tree the
    subtree with the smallest index comes first. If answers could be written earlier, on average, in
    the sorted order, that is returned instead.
    """
    by_key = array("i", bytes(4 * count))
    early = _by_least_index(_noted(lines, by_key), count)
    return early if wait(early) <= wait(by_key) else by_key


def order_of(keys: Sequence[bytes]) -> array[int]:
    """Return the order in which lines with these sort keys run, as `run_order` does."""
    lines = sorted(enumerate(keys), key=lambda line: (line[1], line[0]))
    return run_order(lines, len(keys))


def wait(order: array[int]) -> int:
    """Return how long answers wait, in lines that end one after the other, added up.

    The answer of a line can be written when this line and all before it in the input have ended.
    """
    places = np.empty(len(order), np.int32)
    places[np.asarray(order, np.int32)] = np.arange(len(order), dtype=np.int32)
    return int(np.maximum.accumulate(places).sum(dtype=np.int64)) if len(order) else 0


def _noted(lines: Iterable[tuple[int, bytes]], order: array[int]) -> Iterable[tuple[int, bytes]]:
    """Yield the lines, and write their indexes into `order`."""
    for place, line in enumerate(lines):
        order[place] = line[0]
        yield line


@dataclass(slots=True)
class _Node:
    """A place in the tree, while lines below it may still come."""

    depth: int
    """The bytes of its prefix."""
    first: int = NONE
    """The first line whose key is this prefix."""
    last: int = NONE
    """The last line whose key is this prefix."""
    below: list[int] = field(default_factory=list)
    """The subtrees below, each by the smallest index in it."""


class _Chains:
    """The finished subtrees, as chains of lines in the order in which they run."""

    def __init__(self, count: int) -> None:
        """Make room for `count` lines. A subtree is found by the smallest index in it."""
        self._heads, self._tails = array("i", bytes(4 * count)), array("i", bytes(4 * count))
        self._next = array("i", [NONE]) * count

    def add(self, node: _Node, index: int) -> None:
        """Add a line whose key is the node's prefix; lines come in the order of their indexes."""
        if node.last == NONE:
            node.first = index
        else:
            self._next[node.last] = index
        node.last = index

    def finish(self, node: _Node) -> int:
        """Chain the subtrees below the node behind its own lines, and return its smallest index."""
        head, tail, least = node.first, node.last, node.first
        if node.below:
            node.below.sort()
            least = node.below[0] if head == NONE else min(head, node.below[0])
        for subtree in node.below:
            if tail == NONE:
                head = self._heads[subtree]
            else:
                self._next[tail] = self._heads[subtree]
            tail = self._tails[subtree]
        self._heads[least], self._tails[least] = head, tail
        return least

    def lines(self, subtree: int) -> Iterable[int]:
        """Yield the lines of a subtree in their order."""
        line = self._heads[subtree]
        while line != NONE:
            yield line
            line = self._next[line]


def _by_least_index(lines: Iterable[tuple[int, bytes]], count: int) -> array[int]:
    """Return the order in which the subtree with the smallest index comes first everywhere.

    The tree is never whole in memory: only the nodes above the line that was read last are.
    """
    chains, opened = _Chains(count), list[_Node]()
    before = b""
    for index, key in lines:
        shared = 4 * shared_tokens(before, key)
        if opened and opened[-1].depth > shared:
            _close(opened, shared, chains)
        if not opened or opened[-1].depth < len(key):
            opened.append(_Node(len(key)))
        chains.add(opened[-1], index)
        before = key
    return array("i", chains.lines(_close(opened, NONE, chains)) if opened else ())


def _close(opened: list[_Node], depth: int, chains: _Chains) -> int:
    """Finish the nodes deeper than `depth`; the last open node is then one of this depth.

    Return the subtree that was finished last.
    """
    while True:
        subtree = chains.finish(opened.pop())
        if not opened and depth == NONE:
            return subtree
        if not opened or opened[-1].depth < depth:
            opened.append(_Node(depth))
        opened[-1].below.append(subtree)
        if opened[-1].depth == depth:
            return subtree
