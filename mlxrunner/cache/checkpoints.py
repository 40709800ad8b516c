"""Which checkpoints to take and which to keep. Bookkeeping only: what a checkpoint holds is opaque here, no tensors.

A checkpoint is what the layers that can't compute backwards (windows, states) looked like at one offset. For a model whose layers
all rewind by themselves the set stays empty and costs nothing.

Three offsets of a prompt have a role, as prompts go back to them; the others are spread over what lies between. Nothing that was given
up can be had again without evaluating it, so the spacing grows with the text: one checkpoint in `length / (free + 1)` tokens, where
`free` is how many the budget has room for beside the PINNED ones.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

SPACING = 256
"""Fewest tokens that are worth splitting a chunk for, unless something asks for that very offset."""
HEADER = 64
"""Most tokens between the last message end and the end of the prompt: the header of the answer."""
NEAR_END = 8
"""Tokens before an end that is likely to move: templates and retries change the last few, a line is appended to a system prompt."""
INTERVAL = 1024
"""Tokens between two checkpoints where the budget has room for many."""

Role = Literal["answer", "system", "message"]
"""Where an answer, a system prompt's successor or the last message begins, or shortly before."""
ROLES: tuple[Role, ...] = ("answer", "system", "message")
"""In the order in which they are given up, after all that have none: without the first, a regenerated answer costs one message."""
PINNED = len(ROLES)


@dataclass(frozen=True)
class Checkpoint:
    """The state of all layers at one offset. `snapshots`: one per layer, None for a layer that rewinds by itself."""

    offset: int
    nbytes: int
    snapshots: Sequence[Any] = ()
    role: Role | None = None


@dataclass(frozen=True)
class Places:
    """Offsets of one prompt: those with a role, the ends of its messages, and `until`, beyond which no prefill pauses.

    `ahead`: nobody has asked for an answer yet.
    """

    roles: Mapping[int, Role] = field(default_factory=dict)
    ends: Sequence[int] = ()
    until: int = 0
    ahead: bool = False


def places_of(total: int, message_ends: Sequence[int], *, ahead: bool = False) -> Places:
    """Find where the next prompt is likely to leave a prompt of `total` tokens.

    What follows the answer's place, at most HEADER tokens, is evaluated in one pass, as the seed of the answer. A long system prompt has its
    place shortly before its end, where one with another line appended still finds it. `ahead`: the last message has no end yet.
    """
    ends = [end for end in message_ends if end < total]
    answer = (
        total if ahead else ends[-1] if ends and total - ends[-1] <= HEADER else total - NEAR_END
    )
    before = [end for end in ends if end < answer]
    roles: dict[int, Role] = {}
    if before:
        roles[before[0] - NEAR_END if before[0] >= SPACING else before[0]] = "system"
        roles[before[-1]] = "message"
    if not ahead and answer > 0:
        roles[answer] = "answer"
    return Places(roles, ends, max(answer, 0), ahead)


def spacing(length: int, slots: int, interval: int) -> int:
    """Return the tokens between two checkpoints in a text of `length` with room for `slots`; at least `interval`."""
    return max(interval, length // (max(slots - PINNED, 0) + 1))


def thinned(items: Sequence[Checkpoint], budget: int, interval: int) -> list[Checkpoint]:
    """Return the `items` (sorted by offset) that fit into `budget` bytes. The last one stays while another without a role is left."""
    kept = list(items)
    size = max((item.nbytes for item in kept), default=0)
    while sum(item.nbytes for item in kept) > budget:
        del kept[
            _least_useful(
                kept, spacing(kept[-1].offset, slots_of(budget, size), min(SPACING, interval))
            )
        ]
    return kept


def slots_of(budget: int, nbytes: int) -> int:
    """Return how many checkpoints of `nbytes` fit into the budget."""
    return budget // max(nbytes, 1)


def _least_useful(items: Sequence[Checkpoint], allowed: int) -> int:
    """The index of the one without a role whose loss leaves a gap that fills the `allowed` one best, or else the smallest gap; then the last
    one if it has no role, and then by role."""
    offsets = [0, *(item.offset for item in items)]
    gaps = {
        i: offsets[i + 2] - offsets[i] for i, item in enumerate(items[:-1]) if item.role is None
    }
    if gaps:
        harmless = [i for i, gap in gaps.items() if gap <= allowed * 11 // 10]
        return (
            max(harmless, key=lambda i: gaps[i]) if harmless else min(gaps, key=lambda i: gaps[i])
        )
    if items[-1].role is None:
        return len(items) - 1
    return min(range(len(items)), key=lambda i: ROLES.index(items[i].role or "answer"))


class Checkpoints:
    """A set bounded by `budget` bytes, sorted by offset. An interrupt at any line leaves it as it was, or as it was to become."""

    def __init__(self, budget: int, interval: int = INTERVAL) -> None:
        self.budget, self.interval = budget, interval
        self._items: list[Checkpoint] = []
        self._places = Places()
        self._offered = 0  # offset of the last one, kept or not: the next one comes a spacing later

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
        """Drop those beyond `to`, and the roles of what lies there."""
        self._items = self._items[: bisect_right(self._items, to, key=_offset)]
        roles = {offset: role for offset, role in self._places.roles.items() if offset <= to}
        self._places = replace(self._places, roles=roles, until=min(self._places.until, to))
        self._offered = min(self._offered, to)

    def mark(self, places: Places) -> None:
        """Set the places of the next prompt. Evaluating ahead leaves the last answer's place its role."""
        last: tuple[Role | None, ...] = ("answer",) if places.ahead else ()
        self._items = [
            replace(
                item, role=places.roles.get(item.offset, item.role if item.role in last else None)
            )
            for item in self._items
        ]
        self._places = places

    def add(self, new: Checkpoint) -> bool:
        """Keep `new` (unless one is there) and make room for it; returns whether it is kept."""
        self._offered = max(self._offered, new.offset)
        if self.at(new.offset) is not None or new.nbytes > self.budget:
            return False
        items = list(self._items)
        insort(items, replace(new, role=self._places.roles.get(new.offset, new.role)), key=_offset)
        self._items = thinned(items, self.budget, self.interval)
        return self.at(new.offset) is not None

    def next_stop(self, at: int) -> int | None:
        """Return the offset where a prefill at `at` pauses for the next checkpoint; None for no pause."""
        if at >= self._places.until:
            return None
        wanted = min(offset for offset in (*self._places.roles, self._places.until) if offset > at)
        apart = self._spacing
        due = max(self._last + apart, at + 1)
        if wanted - due < apart // 4:
            return wanted
        ends = self._places.ends
        end = ends[index - 1] if (index := bisect_right(ends, due)) else 0
        return end if end > max(at, due - apart // 2) else due

    def due(self, at: int) -> int:
        """Return the offset from which on a checkpoint is due for an entry at `at`; due now if not beyond `at`."""
        return at if at in self._places.roles else self._last + self._spacing

    @property
    def _last(self) -> int:
        return max(self._offered, self._items[-1].offset if self._items else 0)

    @property
    def _spacing(self) -> int:
        """From the last one to the next: the interval, until a quarter of the budget is used. From then on a third more than the budget allows
        on an average, which makes up for what is given up later (tried on thousands of histories)."""
        slots = slots_of(
            self.budget, max((item.nbytes for item in self._items), default=self.budget)
        )
        allowed = spacing(self._last, slots, 1)
        if not self._items or (4 * len(self._items) <= slots and allowed < self.interval):
            return self.interval
        return max(min(SPACING, self.interval), allowed * 4 // 3)


def _offset(checkpoint: Checkpoint) -> int:
    return checkpoint.offset
