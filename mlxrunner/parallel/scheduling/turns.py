"""Decide whose tokens come first. Numbers only.

Requests of a higher priority come first; within a priority, those with a deadline, the nearest
first. All others share evenly. One turn in FAIR is shared by all, so that none starves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from mlxrunner.config.option import Option, check_above

Priority = Literal["interactive", "batch"]
PRIORITIES: tuple[Priority, ...] = ("interactive", "batch")
"""The priorities of requests, the highest first."""
FAIR = 8
"""One turn in FAIR is shared evenly by all requests."""


@dataclass(frozen=True)
class Want:
    """The wish of a request for tokens of a step."""

    tokens: int
    """Most tokens that it can use."""
    priority: Priority = "interactive"
    due: float | None = None
    """The moment of its deadline; None: it has time."""

    @property
    def order(self) -> tuple[int, float]:
        """A key that is lower for requests that come earlier."""
        return order(self.priority, self.due)


def order(priority: Priority, due: float | None) -> tuple[int, float]:
    """Return a key that is lower for requests that come earlier; equal ones share evenly."""
    return PRIORITIES.index(priority), float("inf") if due is None else due


def check(priority: Priority, deadline: float | None) -> None:
    """Raise OptionError for a priority that does not exist or a deadline that is not above 0."""
    Option(str, among=PRIORITIES).check("priority", priority)
    if deadline is not None:
        check_above("deadline", deadline, 0)


class Turns:
    """The turns of a runner's requests."""

    def __init__(self) -> None:
        self._count = 0

    def deal(self, budget: int, wants: Sequence[Want]) -> list[int]:
        """Return how many of `budget` tokens each request gets."""
        self._count += 1
        everyone = list(range(len(wants)))
        if self._count % FAIR == 0:
            return self._shared(budget, wants, everyone)
        given = [0] * len(wants)
        everyone.sort(key=lambda i: wants[i].order)
        for _, equals in groupby(everyone, key=lambda i: wants[i].order):
            of_these = self._shared(budget, wants, list(equals))
            given = [a + b for a, b in zip(given, of_these, strict=True)]
            budget -= sum(of_these)
        return given

    def _shared(self, budget: int, wants: Sequence[Want], some: list[int]) -> list[int]:
        """Share `budget` evenly among `some` of the wants."""
        given = [0] * len(wants)
        shares = share(budget, [wants[i].tokens for i in some], self._count)
        for i, tokens in zip(some, shares, strict=True):
            given[i] = tokens
        return given


def share(budget: int, wants: Sequence[int], first: int) -> list[int]:
    """Return the tokens of a step's `budget` that each of several prefills gets.

    `wants`: the tokens that each has left. They take turns, beginning with number `first`, so that
    none starves.
    """
    given = [0] * len(wants)
    order = [(first + i) % len(wants) for i in range(len(wants))]
    hungry = [i for i in order if wants[i]]
    while budget and hungry:
        each = max(1, budget // len(hungry))
        for i in hungry:
            take = min(each, wants[i] - given[i], budget)
            given[i] += take
            budget -= take
        hungry = [i for i in hungry if given[i] < wants[i]]
    return given
