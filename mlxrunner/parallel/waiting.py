"""The requests of a ParallelRunner that wait for a slot, or for room."""

from __future__ import annotations

from mlxrunner.parallel.feed import Feed
from mlxrunner.parallel.turns import FAIR, order


class WaitingLine:
    """A line in which those of a higher priority come first, then those with a nearer deadline.

    Equal ones come as they arrived. One turn in FAIR is that of the request that arrived first, so
    that none starves.
    """

    def __init__(self) -> None:
        self._feeds: list[Feed] = []
        self._turn = 1

    def __bool__(self) -> bool:
        return bool(self._feeds)

    def add(self, feed: Feed) -> None:
        """Let a request wait."""
        self._feeds.append(feed)

    def remove(self, feed: Feed) -> None:
        """Let a request wait no longer, if it does."""
        if feed in self._feeds:
            self._feeds.remove(feed)

    @property
    def first(self) -> Feed:
        """The request whose turn it is."""
        if self._turn % FAIR == 0:
            return self._feeds[0]
        return min(self._feeds, key=lambda feed: order(feed.request.priority, feed.request.due))

    def take(self, feed: Feed) -> None:
        """Let the first request begin; the next turn comes."""
        self._feeds.remove(feed)
        self._turn += 1

    def take_overdue(self, now: float) -> list[Feed]:
        """Remove and return the requests whose deadline has come."""
        dues = [(feed, feed.request.due) for feed in self._feeds]
        overdue = [feed for feed, due in dues if due is not None and due <= now]
        for feed in overdue:
            self._feeds.remove(feed)
        return overdue
