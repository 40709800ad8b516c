"""Which checkpoints to take and which to keep. Bookkeeping only: what a checkpoint holds is opaque here, no tensors.

A checkpoint is what the layers that can't compute backwards (windows, states) looked like at one offset. For a model whose layers
all rewind by themselves the set stays empty and costs nothing.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

SPACING = 256
"""Message ends closer than this to another checkpoint are not worth splitting a chunk for."""
HEADER = 64
"""A message end so close to the end of the prompt is followed only by the header of the answer."""
NEAR_END = 8
"""Tokens before the end of a prompt without messages: templates and retries change the last few."""


@dataclass(frozen=True)
class Checkpoint:
    """`snapshots`: one per layer, None for a layer that rewinds by itself. `is_anchor`: the end of the system prompt."""

    offset: int
    nbytes: int
    snapshots: Sequence[Any] = ()
    is_anchor: bool = False


class Checkpoints:
    """A set bounded by `budget` bytes, sorted by offset."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._items: list[Checkpoint] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._items)

    @property
    def offsets(self) -> list[int]:
        return [item.offset for item in self._items]

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self._items)

    def at(self, offset: int) -> Checkpoint | None:
        return next((item for item in self._items if item.offset == offset), None)

    def before(self, to: int) -> list[Checkpoint]:
        """Those at offsets <= `to`, the largest first."""
        return self._items[: bisect_right(self._items, to, key=_offset)][::-1]

    def truncate(self, to: int) -> None:
        """Drop those beyond `to`."""
        del self._items[bisect_right(self._items, to, key=_offset) :]

    def add(self, new: Checkpoint) -> bool:
        """Keep `new` (unless one is there, or it is larger than the budget) and make room for it; returns whether it is kept."""
        if self.at(new.offset) is not None or new.nbytes > self.budget:
            return False
        insort(self._items, new, key=_offset)
        while self.nbytes > self.budget:
            self._items.remove(self._least_useful(new))
        return True

    def _least_useful(self, new: Checkpoint) -> Checkpoint:
        """The one whose loss leaves the smallest gap; the anchor last, the new one never."""
        offsets = [0, *self.offsets, self._items[-1].offset * 2]
        gaps = {item.offset: offsets[i + 2] - offsets[i] for i, item in enumerate(self._items)}
        return min((item for item in self._items if item is not new), key=lambda item: (item.is_anchor, gaps[item.offset]))


def stops(start: int, total: int, message_ends: Sequence[int], interval: int) -> list[int]:
    """Offsets in (start, total) at which a prefill should pause for a checkpoint.

    The end of the system prompt (the first message end), where the last message begins, shortly before the end of the prompt, other
    message ends that are SPACING away from these, and one every `interval` tokens where there is none. The last stop is shortly
    before the end: what follows is evaluated in one pass, as the seed of the answer.
    """
    ends = [end for end in message_ends if start < end < total]
    near = ends[-1] if ends and total - ends[-1] <= HEADER else total - NEAR_END
    chosen = {near} if near > start else set()
    chosen.update(end for end in (*message_ends[:1], *ends[-2:]) if start < end <= near)
    for end in ends:
        if all(abs(end - other) >= SPACING for other in chosen):
            chosen.add(end)
    for left, right in pairwise(sorted({start, *chosen})):
        chosen.update(range(left + interval, right - SPACING, interval))
    return sorted(chosen)


def _offset(checkpoint: Checkpoint) -> int:
    return checkpoint.offset
