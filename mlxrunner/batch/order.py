"""Choose the order in which the lines of a batch run, and cut it into parts for several machines.

An order that goes depth-first through the tree of the prompts' prefixes, each prompt before those
that begin with it, evaluates every node of the tree once. All such orders cost the same. This is
the choice among them: early lines of the input come early, so that answers can be written in the
order of the input while others still run.

A part is a range of that order, so it holds whole subtrees, and what shares a prefix stays
together. A part that begins within a subtree evaluates again what its first line shares with the
line before it. The same costs give the same cut on every machine. Plain arithmetic: no files and no
models.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlxrunner.cache.entry import TokenArray, common_prefix

LONG_KEY = 1000
"""The bytes of a sort key above which numpy finds a common prefix faster than whole numbers do."""
NONE = -1
FREE = 0.05
"""The share of the tokens of one machine that a cut may evaluate again to be more even."""
LONGER, TRIED = 8, 32
"""The cuts that are tried to evaluate less: how much longer the longest takes, and their number."""
SLACK = 0.02
"""The share by which a part may exceed the costliest part of the most even cut."""
EVENNESS = 0.1
"""The tokens evaluated again that are worth one token less between a part and the even share."""
BLOCK = 2**16
"""The lines that are added up at a time, so that few sums are in memory."""


def sort_key(tokens: TokenArray) -> bytes:
    """Return the tokens as bytes that sort like the tokens, prefixes first.

    Each token takes 4 bytes, the most significant one first.
    """
    return tokens.astype(">u4").tobytes()


def tokens_of(key: bytes) -> TokenArray:
    """Return the tokens of a `sort_key`."""
    return np.frombuffer(key, ">u4").astype(np.int32)


def shared_tokens(one: bytes, other: bytes) -> int:
    """Return the tokens of the longest common prefix of two sort keys."""
    size = min(len(one), len(other))
    if size > LONG_KEY:
        return common_prefix(np.frombuffer(one, np.int32), np.frombuffer(other, np.int32))
    differing = int.from_bytes(one[:size]) ^ int.from_bytes(other[:size])
    return (8 * size - differing.bit_length()) // 32


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
class _PrefixNode:
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

    def add(self, node: _PrefixNode, index: int) -> None:
        """Add a line whose key is the node's prefix; lines come in the order of their indexes."""
        if node.last == NONE:
            node.first = index
        else:
            self._next[node.last] = index
        node.last = index

    def finish(self, node: _PrefixNode) -> int:
        """Chain the subtrees below the node after its own lines, and return its smallest index."""
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
    chains, opened = _Chains(count), list[_PrefixNode]()
    before = b""
    for index, key in lines:
        shared = 4 * shared_tokens(before, key)
        if opened and opened[-1].depth > shared:
            _close(opened, shared, chains)
        if not opened or opened[-1].depth < len(key):
            opened.append(_PrefixNode(len(key)))
        chains.add(opened[-1], index)
        before = key
    return array("i", chains.lines(_close(opened, NONE, chains)) if opened else ())


def _close(opened: list[_PrefixNode], depth: int, chains: _Chains) -> int:
    """Finish the nodes deeper than `depth`; the last open node is then one of this depth.

    Return the subtree that was finished last.
    """
    while True:
        subtree = chains.finish(opened.pop())
        if not opened and depth == NONE:
            return subtree
        if not opened or opened[-1].depth < depth:
            opened.append(_PrefixNode(depth))
        opened[-1].below.append(subtree)
        if opened[-1].depth == depth:
            return subtree


@dataclass(frozen=True, eq=False)
class LineCosts:
    """The cost of each line, in the order in which lines run one after the other."""

    evaluated: NDArray[Any]
    """The tokens of each prompt that are evaluated after the line before it."""
    reused: NDArray[Any]
    """The other tokens of each prompt, which the line before it leaves; 0 for the first line."""
    answers: NDArray[Any]
    """The tokens that each answer is expected to have."""

    def __len__(self) -> int:
        return len(self.evaluated)

    @cached_property
    def sums(self) -> NDArray[np.int64]:
        """The cost of the first n lines, for each n from 0 on."""
        sums = np.zeros(len(self) + 1, np.int64)
        np.add(self.evaluated, self.answers, out=sums[1:], dtype=np.int64)
        return np.cumsum(sums, out=sums)

    @property
    def total(self) -> int:
        """The cost of all lines on one machine."""
        return int(self.sums[-1])

    @property
    def costliest(self) -> int:
        """The cost of the costliest line on a machine of its own."""
        return max(
            int((own.evaluated + own.reused.astype(np.int64) + own.answers).max())
            for own in (self.between(n, n + BLOCK) for n in range(0, len(self), BLOCK))
        )

    def extra(self, first: int) -> int:
        """Return the tokens that are evaluated again if a part begins with line `first`."""
        return int(self.reused[first]) if 0 < first < len(self) else 0

    def of(self, first: int, end: int) -> int:
        """Return the cost of a part of the lines from `first` to before `end`."""
        return int(self.sums[end] - self.sums[first]) + (self.extra(first) if first < end else 0)

    def evaluated_of(self, first: int, end: int) -> int:
        """Return the prompt tokens that a part evaluates."""
        own = int(self.evaluated[first:end].sum(dtype=np.int64))
        return own + (self.extra(first) if first < end else 0)

    def between(self, first: int, end: int) -> LineCosts:
        """Return the costs of the lines from `first` to before `end`, without copying them."""
        own = slice(first, end)
        return LineCosts(self.evaluated[own], self.reused[own], self.answers[own])


def cut(costs: LineCosts, parts: int) -> list[int]:
    """Cut the lines into `parts` stretches, and return the `parts` + 1 places where they meet.

    Part i, from 0, has the lines from place i to before place i + 1. Costs are counted in tokens.
    The function tries to make the costliest part as cheap as it can be. Each part that begins
    within a subtree evaluates a prefix again. If all parts together would evaluate more than the
    share FREE again, another cut may be better: the one for which the cost of its costliest part
    times the cost of all parts is least. The last parts are empty if there are too few lines, or if
    more parts would cost more than they save.
    """
    if parts < 2 or len(costs) < 2:
        return [0, *[len(costs)] * parts]
    least, free = _least(costs, parts), FREE * int(costs.evaluated.sum(dtype=np.int64))
    even = _cheap(costs, parts, least)
    if extra_of(costs, even) <= free:
        return even

    def product(places: Sequence[int]) -> float:
        longest = max(costs.of(first, end) for first, end in pairwise(places))
        return longest * (costs.total + max(extra_of(costs, places), free))

    shares = np.geomspace(least, min(LONGER * least, costs.total), TRIED)
    others = (_cheap(costs, parts, int(share), to_all=False) for share in shares)
    return min((even, *others), key=product)


def split(
    costs: LineCosts,
    first: int,
    end: int,
    *,
    held: int = 0,
    speed: float = 1.0,
    last: int | None = None,
) -> int | None:
    """Return the line from which on another worker takes over a part; None if that gains nothing.

    The lines from `first` to before `end` have not begun. The worker of the part has other lines to
    finish first, which cost `held` tokens. The other worker is `speed` times as fast, and line
    `last` is the one that it ran last. The place is where both workers end at about the same time.
    Splitting gains nothing if the first worker alone would end as early.
    """
    rest = int(costs.sums[end] - costs.sums[first])
    earliest = first + (held == 0)
    if earliest >= end:
        return None
    place, extra = earliest, 0
    for _ in range(2):
        own = (rest + extra - speed * held) / (1 + speed)
        place = _cheapest(costs, earliest, end - 1, int(costs.sums[first]) + int(max(own, 0)))
        extra = max(costs.extra(place) - _known(costs, last, place), 0)
    other = (int(costs.sums[end] - costs.sums[place]) + extra) / speed
    return place if other < held + rest else None


def _known(costs: LineCosts, last: int | None, place: int) -> int:
    """Return the tokens that line `place` has in common with line `last`."""
    if last is None or last == place:
        return 0
    return int(costs.reused[min(last, place) + 1 : max(last, place) + 1].min())


def extra_of(costs: LineCosts, places: Sequence[int]) -> int:
    """Return how many more tokens the parts evaluate together than one machine would."""
    return sum(costs.extra(first) for first, end in pairwise(places) if first < end)


def _least(costs: LineCosts, parts: int) -> int:
    """Return the cost of the costliest part of the most even cut.

    A part that begins later never costs more, so that taking as much as fits is best.
    """
    low, high = max(costs.costliest, -(-costs.total // parts)), costs.total
    while low < high:
        middle = (low + high) // 2
        if _fits(costs, parts, middle):
            high = middle
        else:
            low = middle + 1
    return low


def _fits(costs: LineCosts, parts: int, most: int) -> bool:
    """Return True if the lines fit into parts of at most this cost."""
    place = 0
    for _ in range(parts):
        place = _reach(costs, place, most)
        if place == len(costs):
            return True
    return False


def _reach(costs: LineCosts, first: int, most: int) -> int:
    """Return the end of the longest part that begins with line `first` and costs at most `most`."""
    room = most - costs.extra(first) + int(costs.sums[first])
    return int(costs.sums.searchsorted(room, "right")) - 1


def _cheap(costs: LineCosts, parts: int, share: int, *, to_all: bool = True) -> list[int]:
    """Return the places of a cut that evaluates little again.

    Parts cost about `share`, and at most SLACK more. With `to_all` the last ones are no smaller.
    """
    places, most = [0], share + int(SLACK * share)
    again = share * parts / costs.total
    for left, earliest in zip(range(parts, 0, -1), _earliest(costs, parts, most), strict=True):
        first = places[-1]
        last = _reach(costs, first, most)
        earliest = min(max(earliest, first + 1), last)
        own = again * costs.of(first, len(costs)) / left if to_all else share
        even = int(costs.sums[first]) - costs.extra(first) + int(own)
        places.append(_cheapest(costs, earliest, last, even))
    return places


def _earliest(costs: LineCosts, parts: int, most: int) -> list[int]:
    """Return for each part the first place at which it may end, so that the rest still fits."""
    places, end = [len(costs)], len(costs)
    for _ in range(parts - 1):
        room = int(costs.sums[end]) - most
        end = bisect_left(
            range(end), room, key=lambda place: int(costs.sums[place]) - costs.extra(place)
        )
        places.append(end)
    return places[::-1]


def _cheapest(costs: LineCosts, earliest: int, last: int, even: int) -> int:
    """Return the place in this range at which it is best to end a part.

    `even` is the sum of the costs at which an even part ends.
    """
    place = min(max(int(costs.sums.searchsorted(even)), earliest), last)
    far = abs(int(costs.sums[place]) - even) + int(costs.extra(place) / EVENNESS)
    low = max(earliest, int(costs.sums.searchsorted(even - far)))
    high = min(last, int(costs.sums.searchsorted(even + far, "right")) - 1)
    uneven = np.abs(costs.sums[low : high + 1] - even) * EVENNESS
    uneven[: len(costs) - low] += costs.reused[low : min(high + 1, len(costs))]
    return low + int(uneven.argmin())
