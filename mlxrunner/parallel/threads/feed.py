"""Chunks on their way from the engine's thread to the readers of one request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from mlxrunner.errors import BusyError, MlxrunnerError
from mlxrunner.parallel.scheduling.request import ActiveRequest
from mlxrunner.results import Chunk

MOST_UNREAD = 4096
"""Chunks that nobody has read at which a request pauses."""
Lock = AbstractContextManager[bool, None]
"""A lock that its owner may take again, because the garbage collector may call anything."""
Wake = Callable[[], object]
"""A function that lets somebody look again. It may be called more than once, in any thread."""


class Feed:
    """The chunks of one request that nobody has read yet, and its end.

    The lock of its runner guards all fields: the engine's thread adds, and readers take.
    """

    def __init__(self, lock: Lock, request: ActiveRequest, *, is_whole: bool = False) -> None:
        """Make the feed of `request`. `is_whole`: somebody wants all of it, so it never pauses."""
        self.lock, self.request = lock, request
        self.error: MlxrunnerError | None = None
        """The error that ended the request; None if no error did."""
        self.is_ended = False
        """True if no chunk comes any more."""
        self.is_read = False
        """True while a reader takes a chunk or waits for one."""
        self.num_whole = int(is_whole)
        """Number of those that want all of it. While there are any, the request does not pause."""
        self._chunks: deque[Chunk] = deque()
        self._wake_for_news: list[Wake] = []
        self._wake_at_end: list[Wake] = []

    @property
    def is_full(self) -> bool:
        """True if the request has to pause until somebody reads. A pause ends at half."""
        most = MOST_UNREAD // 2 if self.request.is_paused else MOST_UNREAD
        return not self.num_whole and len(self._chunks) > most

    def take_over(self) -> list[Wake]:
        """Take what the request has made since the last call; return the functions to call."""
        made = self.request.chunks
        is_new = bool(made)
        while made:
            self._chunks.append(made.popleft())
        if self.request.finished:
            return self.end(self.request.error)
        return _emptied(self._wake_for_news) if is_new else []

    def end(self, error: MlxrunnerError | None) -> list[Wake]:
        """Let no chunk come any more; return the functions to call."""
        if not self.is_ended:
            self.is_ended, self.error = True, error
        return _emptied(self._wake_for_news) + _emptied(self._wake_at_end)

    def begin_to_read(self) -> bool:
        """Set `is_read`. Raise BusyError if somebody else is reading."""
        with self.lock:
            if self.is_read:
                raise BusyError(
                    "another thread or task is reading this handle: let one read at a time, or "
                    "submit a request for each"
                )
            self.is_read = True
            return True

    def take(self) -> Chunk | None:
        """Return the next chunk; None if it has not come yet.

        After the last one, raise the error that ended the request, or StopIteration.
        """
        with self.lock:
            if self._chunks:
                return self._chunks.popleft()
            if not self.is_ended:
                return None
        self.check()
        raise StopIteration

    def take_all(self) -> list[Chunk]:
        """Return the chunks that have come, and forget them."""
        with self.lock:
            chunks = list(self._chunks)
            self._chunks.clear()
            return chunks

    def check(self) -> None:
        """Raise the error that ended the request, if one did."""
        if self.error is not None:
            raise self.error.with_traceback(None)

    def await_news(self, wake: Wake, *, at_end: bool = False) -> bool:
        """Return True if there are chunks or the end; else leave `wake` for when there are.

        `at_end`: only the end is waited for.
        """
        with self.lock:
            has_news = self.is_ended or (bool(self._chunks) and not at_end)
            left = self._wake_at_end if at_end else self._wake_for_news
            if not has_news and wake not in left:
                left.append(wake)
            return has_news

    def forget(self, wake: Wake) -> None:
        """Drop a function that was left."""
        with self.lock:
            for left in (self._wake_for_news, self._wake_at_end):
                if wake in left:
                    left.remove(wake)

    @contextmanager
    def wanted_whole(self) -> Iterator[None]:
        """Let the request not pause within the block."""
        with self.lock:
            self.num_whole += 1
        try:
            yield
        finally:
            with self.lock:
                self.num_whole -= 1


def _emptied(left: list[Wake]) -> list[Wake]:
    taken = left[:]
    left.clear()
    return taken
