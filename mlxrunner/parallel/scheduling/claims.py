"""Decide which requests may begin, what each may take, and which one steps back. Numbers only.

A request claims cells for its prompt and for a part of its answer, and claims more as the answer
grows. Where nothing is left, the youngest request of the lowest priority steps back: it waits, and
goes on later where it was. The first request of the highest priority never steps back for another,
and each fits alone, since the context is never longer than all cells. Therefore each request that
begins comes to its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxrunner.errors import CacheFullError
from mlxrunner.parallel.scheduling.turns import PRIORITIES, Priority

LEAST = 256
"""Least tokens of an answer that a request claims at once, unless its answer is shorter."""
LATER = "submit it again when another request has ended"


@dataclass(frozen=True)
class Need:
    """The cells that a request needs."""

    prompt: int
    """Tokens of its prompt that need cells; a prefix that is shared needs none."""
    answer: int
    """Most tokens of its answer that are still to come."""


@dataclass(frozen=True)
class Standing:
    """The place of a running request among the others."""

    priority: Priority
    arrival: int
    """A number that is higher for each later request."""


def claimed(need: Need, free: int, total: int, slots: int) -> int:
    """Return the tokens of its answer that a request claims at its begin.

    These are an even share of the `free` cells of `total`, if `slots` slots are free, its own
    included. Raise CacheFullError if the request has to wait.
    """
    least = min(need.answer, LEAST)
    left = free - need.prompt
    if left < least:
        raise CacheFullError("this request", need.prompt + least, max(0, free), total, LATER)
    return min(need.answer, max(least, left // max(1, slots)))


def grown(left: int, free: int, running: int) -> int:
    """Return the tokens that a request claims when its answer reaches the end of its claim.

    `left`: most tokens of the answer that are still to come. `free`: cells that nobody claims.
    `running`: number of requests that may grow. The result is 0 if there is no cell.
    """
    return max(0, min(left, free, max(LEAST, free // max(1, running))))


def steps_back(running: Sequence[Standing]) -> int:
    """Return the index of the request that gives its cells up: the youngest of lowest priority."""
    return max(
        range(len(running)),
        key=lambda i: (PRIORITIES.index(running[i].priority), running[i].arrival),
    )
