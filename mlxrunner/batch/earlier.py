"""How much of each line other lines had evaluated before it, so that an order or a cache of any size could have kept it.

The sum over all lines is what was evaluated beyond the tree of their prefixes. No tensors, no files.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from mlxrunner.batch.store import Entry, Order, Store
from mlxrunner.cache.lookup import Earlier
from mlxrunner.cache.tokens import TokenArray, common_prefix

RECENT = 64
"""Lines that are remembered. In prefix order what a line shares with any before it, it shares with the last of them."""


@dataclass
class _Line:
    """A line that has begun: `reached` of its tokens are evaluated, or will be."""

    index: int
    tokens: TokenArray
    reached: int


class Begun:
    """The lines that have begun. `known`: what `shared_before` found for all lines; None if they run in prefix order."""

    def __init__(self, known: array[int] | None = None, *, parallel: bool = False) -> None:
        self._known, self._recent = known, deque[_Line](maxlen=RECENT)
        self._reason = (
            "batch_order" if known is not None else "side_by_side" if parallel else "line_failed"
        )

    def begin(self, index: int, tokens: TokenArray) -> Earlier:
        """Begin line `index` with these tokens; return how much of it the lines before it have."""
        own = next((line for line in self._recent if line.index == index), None)
        shared, is_repeat = self._shared(index, tokens)
        if own is not None:
            self._recent.remove(own)
        self._recent.append(_Line(index, tokens, len(tokens)))
        if own is not None and own.reached > shared:
            return Earlier(own.reached, is_repeat, "line_failed")
        return Earlier(shared, is_repeat, self._reason)

    def failed(self, index: int, reached: int) -> None:
        """End line `index` early: only `reached` of its tokens were evaluated or reused."""
        for line in self._recent:
            if line.index == index:
                line.reached = min(reached, len(line.tokens))

    def _shared(self, index: int, tokens: TokenArray) -> tuple[int, bool]:
        if self._known is not None:
            return self._known[index] >> 1, bool(self._known[index] & 1)
        others = [line for line in self._recent if line.index != index]
        shared = [min(common_prefix(line.tokens, tokens), line.reached) for line in others]
        same = [
            count == len(tokens) == len(line.tokens)
            for count, line in zip(shared, others, strict=True)
        ]
        return max(shared, default=0), any(same)


def begun_of(store: Store, order: Order, *, parallel: bool) -> Begun:
    """Make the `Begun` of the lines of `store` that are run in `order`."""
    if order == "prefix":
        return Begun(parallel=parallel)
    return Begun(shared_before(store.pending("prefix"), store.counts.lines), parallel=parallel)


def shared_before(entries: Iterable[Entry], lines: int) -> array[int]:
    """Return for each line, by index, twice the tokens it shares with any line before it in the input, plus one for the same prompt.

    `entries` come in prefix order. Of the neighbours that come earlier in the input the nearest on each side share most.
    """
    found = array("q", bytes(8 * lines))
    stack: list[
        tuple[int, int]
    ] = []  # lines, each earlier in the input than the one above it, and what it shares with the one below
    before: TokenArray | None = None
    for entry in entries:
        if entry.error is not None:
            continue
        shared = 0 if before is None else common_prefix(before, entry.tokens)
        is_repeat = before is not None and shared == len(before) == len(entry.tokens)
        before = entry.tokens
        while stack and stack[-1][0] > entry.index:
            index, below = stack.pop()
            found[index] = max(found[index], 2 * shared)
            shared = min(shared, below)
        shared = shared if stack else 0
        found[entry.index] = 2 * shared + is_repeat
        stack.append((entry.index, shared))
    return found
