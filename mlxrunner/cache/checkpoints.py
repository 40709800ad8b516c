"""Decide which checkpoints to take and which to keep. Bookkeeping only: no tensors.

A checkpoint is a copy, at one offset, of the layers that can't compute backwards (windows, states).
A model whose layers all rewind by themselves needs no checkpoints.

Three offsets of a prompt have a role, because later prompts go back to them. The other checkpoints
are spread between these. Only evaluating its tokens again brings a dropped checkpoint back.
Therefore the spacing grows with the text: one checkpoint per `length / (free + 1)` tokens, where
`free` is the number of checkpoints that the budget holds beside the PINNED ones.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

SPACING = 256
"""Smallest spacing in tokens. A chunk is split for less only at an offset that has a role."""
HEADER = 64
"""Most tokens between the last message end and the end of the prompt: the header of the answer."""
NEAR_END = 8
"""Tokens between a checkpoint and an end that is likely to move.

Templates and retries change the last few tokens; users append lines to system prompts.
"""
INTERVAL = 1024
"""Tokens between two checkpoints while the budget has room for many."""

Role = Literal["answer", "system", "message"]
"""The place where an answer, the text behind the first message or the last message begins.

Files on disk name it.
"""
ROLES: tuple[Role, ...] = ("answer", "system", "message")
"""The roles in the order in which their checkpoints are dropped, after all without a role.

Without "answer", a regenerated answer costs the evaluation of one message.
"""
PINNED = len(ROLES)
"""Checkpoints that are dropped last. The others share the rest of the budget."""


@dataclass(frozen=True)
class Checkpoint:
    """The state of all layers at one offset."""

    offset: int
    nbytes: int
    snapshots: Sequence[Any] = ()
    """One per layer; None for a layer that rewinds by itself."""
    role: Role | None = None


@dataclass(frozen=True)
class CheckpointPlaces:
    """Offsets of one prompt at which checkpoints are worth taking."""

    roles: Mapping[int, Role] = field(default_factory=dict)
    ends: Sequence[int] = ()
    """Offsets at which the messages of the prompt end."""
    until: int = 0
    """The offset from which on no prefill pauses."""
    ahead: bool = False
    """True if the prompt is evaluated before its answer is asked for."""


def places_of(
    total: int, message_ends: Sequence[int], *, ahead: bool = False, at: int | None = None
) -> CheckpointPlaces:
    """Return the offsets at which the next prompt is likely to leave a prompt of `total` tokens.

    At most HEADER tokens follow the answer's place. They are evaluated in one pass, as the seed of
    the answer. The place of a long system prompt is shortly before its end, so that a system prompt
    with another line appended still finds it. `message_ends`: offsets at which the messages end.
    `ahead`: the last message has no end yet. `at`: the offset up to which the prompt is evaluated;
    the last message's place is there if it is a few tokens behind, which would cost a pass.
    """
    ends = [end for end in message_ends if end < total]
    answer = (
        total if ahead else ends[-1] if ends and total - ends[-1] <= HEADER else total - NEAR_END
    )
    before = [end for end in ends if end < answer]
    roles: dict[int, Role] = {}
    if before:
        roles[before[0] - NEAR_END if before[0] >= SPACING else before[0]] = "system"
        last, here = before[-1], -1 if at is None or at in roles else at
        roles[here if 0 <= here < last <= here + NEAR_END else last] = "message"
        roles.pop(0, None)  # a cold start is there without a checkpoint
    if not ahead and answer > 0:
        roles[answer] = "answer"
    return CheckpointPlaces(roles, ends, max(answer, 0), ahead)


def spacing(length: int, slots: int, interval: int) -> int:
    """Return the tokens between two checkpoints, at least `interval`.

    `length`: tokens of the text. `slots`: number of checkpoints that the budget has room for.
    """
    return max(interval, length // (max(slots - PINNED, 0) + 1))


def thinned(items: Sequence[Checkpoint], budget: int, interval: int) -> list[Checkpoint]:
    """Return the `items` (sorted by offset) that fit into `budget` bytes.

    The last one is kept as long as others without a role can be dropped. `interval`: tokens between
    two checkpoints.
    """
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
    """Return the number of checkpoints of `nbytes` bytes that fit into `budget` bytes."""
    return budget // max(nbytes, 1)


def _least_useful(items: Sequence[Checkpoint], allowed: int) -> int:
    """Return the index of the checkpoint to drop.

    Checkpoints without a role come first. Of these, drop the one whose loss leaves the largest gap
    of about `allowed` tokens or less, or else the smallest gap. The last one comes next if it has
    no role. Then the order is that of ROLES.
    """
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
    """A set of checkpoints, sorted by offset, of at most `budget` bytes.

    An interrupt at any line leaves the set either unchanged or completely changed.
    """

    def __init__(self, budget: int, interval: int = INTERVAL) -> None:
        self.budget, self.interval = budget, interval
        self._items: list[Checkpoint] = []
        self._places = CheckpointPlaces()
        # Offset of the last one added, kept or not. The next comes a spacing later.
        self._offered = 0

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
        """Return the checkpoint at exactly `offset`; None if there is none."""
        return next((item for item in self._items if item.offset == offset), None)

    def before(self, to: int) -> list[Checkpoint]:
        """Return the checkpoints at offsets <= `to`, the largest offset first."""
        return self._items[: bisect_right(self._items, to, key=_offset)][::-1]

    def truncate(self, to: int) -> None:
        """Drop the checkpoints and the roles beyond offset `to`."""
        self._items = self._items[: bisect_right(self._items, to, key=_offset)]
        roles = {offset: role for offset, role in self._places.roles.items() if offset <= to}
        self._places = replace(self._places, roles=roles, until=min(self._places.until, to))
        self._offered = min(self._offered, to)

    def mark(self, places: CheckpointPlaces) -> None:
        """Set the places of the next prompt.

        If `places` are of a prompt evaluated ahead, the checkpoint of the last answer keeps its
        role.
        """
        last: tuple[Role | None, ...] = ("answer",) if places.ahead else ()
        self._items = [
            replace(
                item, role=places.roles.get(item.offset, item.role if item.role in last else None)
            )
            for item in self._items
        ]
        self._places = places

    def add(self, new: Checkpoint) -> bool:
        """Add `new`, make room for it, and return True if it is kept.

        Return False if its offset is 0 or already has a checkpoint, or if it exceeds the budget.
        """
        if new.offset == 0:
            return False
        self._offered = max(self._offered, new.offset)
        if self.at(new.offset) is not None or new.nbytes > self.budget:
            return False
        items = list(self._items)
        insort(items, replace(new, role=self._places.roles.get(new.offset, new.role)), key=_offset)
        self._items = thinned(items, self.budget, self.interval)
        return self.at(new.offset) is not None

    def next_stop(self, at: int) -> int | None:
        """Return the offset of the next checkpoint of a prefill at `at`; None for no pause."""
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
        """Return the offset from which on an entry at offset `at` should take a checkpoint.

        It should take one now if the returned offset is not beyond `at`.
        """
        return at if at in self._places.roles else self._last + self._spacing

    @property
    def _last(self) -> int:
        return max(self._offered, self._items[-1].offset if self._items else 0)

    @property
    def _spacing(self) -> int:
        """Tokens from the last checkpoint to the next.

        This is the interval until a quarter of the budget is used. From then on it is a third more
        than the budget allows on average, because some checkpoints are dropped later. The factor
        was tried on thousands of histories.
        """
        slots = slots_of(
            self.budget, max((item.nbytes for item in self._items), default=self.budget)
        )
        allowed = spacing(self._last, slots, 1)
        if not self._items or (4 * len(self._items) <= slots and allowed < self.interval):
            return self.interval
        return max(min(SPACING, self.interval), allowed * 4 // 3)


def _offset(checkpoint: Checkpoint) -> int:
    return checkpoint.offset
