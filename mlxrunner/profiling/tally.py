"""What is counted of many events, each in memory that does not grow with them (but for eight bytes a time)."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

BINS = 240


@dataclass
class Times:
    """Seconds, in the order in which they came."""

    values: array[float] = field(default_factory=lambda: array("d"))

    def percentile(self, share: float) -> float | None:
        """The smallest time that at least this share of all does not exceed; None without any."""
        if not self.values:
            return None
        return sorted(self.values)[max(0, math.ceil(share * len(self.values)) - 1)]

    def as_dict(self) -> dict[str, float | int | None]:
        ordered = Times(array("d", sorted(self.values)))
        return {
            "requests": len(ordered.values),
            **{f"p{p}": ordered.percentile(p / 100) for p in (50, 90, 99)},
        }


@dataclass
class Loss:
    """What a reason or a place cost: `seconds` at the prefill rate of each request, those of which it is known."""

    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self.requests += 1
        self.tokens += tokens
        self.seconds += seconds


@dataclass
class Bin:
    """Consecutive requests: sums of prompt tokens (`cached`: reused; `new`: evaluated, maybe in advance, and not lost), the largest
    of the bytes, when the first began."""

    time: str = ""
    requests: int = 0
    matched: int = 0
    cached: int = 0
    lost: int = 0
    new: int = 0
    used_bytes: int = 0
    cache_bytes: int = 0
    peak_bytes: int = 0

    def merge(self, other: Bin) -> None:
        self.time = self.time or other.time
        for name in ("requests", "matched", "cached", "lost", "new"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("used_bytes", "cache_bytes", "peak_bytes"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))

    @property
    def prompt(self) -> int:
        return self.cached + self.lost + self.new


class Timeline:
    """The requests in their order, at most BINS bins of `width` requests each."""

    def __init__(self) -> None:
        self.bins: list[Bin] = []
        self.width = 1

    def add(self, one: Bin) -> None:
        if self.bins and self.bins[-1].requests < self.width:
            self.bins[-1].merge(one)
            return
        if len(self.bins) == BINS:
            self._halve()
        self.bins.append(one)

    def _halve(self) -> None:
        pairs = zip(self.bins[::2], self.bins[1::2], strict=True)
        for left, right in pairs:
            left.merge(right)
        self.bins = self.bins[::2]
        self.width *= 2


@dataclass(frozen=True)
class Sample:
    """One request of the plot of first tokens."""

    evaluated: int
    ttft_s: float
    outcome: str


@dataclass(frozen=True)
class Miss:
    """A request that lost tokens. `seconds`: what evaluating them took, 0 where that is not known."""

    seconds: float
    tokens: int
    id: str
    time: str
    model: str
    outcome: str
    reason: str
    place: str

    @property
    def order(self) -> tuple[float, int, str]:
        return self.seconds, self.tokens, self.id


def by_tokens(losses: Mapping[str, Loss]) -> list[tuple[str, Loss]]:
    """The largest loss first."""
    return sorted(losses.items(), key=lambda item: (-item[1].tokens, -item[1].requests, item[0]))
