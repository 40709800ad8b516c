"""Tell observers of each ended request once, whatever thread drops its iterator.

What belongs to one request is kept in its `Run`: several may be prepared, and any may begin next.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Generator, Iterator
from functools import partial
from typing import Any

from mlxrunner.cache.entry import CacheEntry
from mlxrunner.engine.observation import Observer, tell
from mlxrunner.engine.owner import Closing, Owner
from mlxrunner.engine.run import Run
from mlxrunner.results import Chunk, Usage


class Telling(Closing):
    """The part of a runner of one request at a time that tells of its requests."""

    def __init__(self, what: str) -> None:
        self.owner = Owner(what)
        self.observers: list[Observer] = []
        """Functions called with every request after its end: see `mlxrunner.profiling`."""
        self.usage: Usage | None = None
        """The usage of the last request after its end, even if it failed; None until then."""
        # Weak: a request whose end was itself interrupted must not keep the entry for ever.
        self._last: weakref.ref[Run] | None = None
        self._shifted = 0
        self._untold: Run | None = None
        self._sight: Any = None
        """The eyes of a model that sees pictures; None: it sees none."""

    @property
    @abstractmethod
    def entry(self) -> CacheEntry:
        """The entry as it is between requests."""

    @property
    def shifted_tokens(self) -> int:
        """Tokens that the last request, running or not, dropped because the context was full."""
        last = self._begun
        return self._shifted if last is None else last.shifted

    @property
    def _begun(self) -> Run | None:
        """The last request that has begun; None if it ended, or if another one was prepared."""
        return None if self._last is None else self._last()

    @abstractmethod
    def _chunks(self, run: Run) -> Iterator[Chunk]:
        """Yield the chunks of a request."""

    def _run(self, run: Run) -> Generator[Chunk, None, None]:
        """Yield the chunks, then tell the observers, even if the request fails."""
        try:
            yield from self._chunks(run)
        except Exception as error:
            run.error = type(error).__name__
            raise
        finally:
            run.is_over = True
            # If another thread has dropped the iterator, this waits for the owner's next call.
            self.owner.do(partial(self._end, run))

    def _enter(self) -> None:
        """Check the thread, and tell of a request whose iterator was not read to its end.

        The caller is about to change the entry, which still describes that request. A request whose
        end was cut off by a second Ctrl-C ends now.
        """
        self.owner.check()
        last = self._begun
        if last is not None and last.is_over and last.lease.is_open:
            self._end(last)
        if self._untold is not None:
            self._tell(self._untold)

    def _note(self, discarded: int, run: Run | None = None) -> None:
        """Let `usage` and `shifted_tokens` be those of a request that is prepared, or begins."""
        self._last = None if run is None else weakref.ref(run)
        self._shifted, self.usage = discarded, None

    def _end(self, run: Run) -> None:
        """Give the entry back and tell the observers, also if Ctrl-C has cut this off before."""
        try:
            if run.pipeline is not None:
                run.pipeline.finish()
        finally:
            run.lease.close()
            self._forget_pictures()
        self._tell(run)

    def _forget_pictures(self) -> None:
        """Drop what only a request that has ended needed of its pictures."""
        if self._sight is not None:
            self._sight.settle()

    def _tell(self, run: Run) -> None:
        """Tell the observers of a request that has ended, once. It may never have begun."""
        if run.is_told:
            return
        run.is_told = True
        if self._untold is run:
            self._untold = None
        usage = run.usage
        if self._begun is run:
            self._shifted, self.usage = run.shifted, usage
        if self.observers and usage is not None:
            tell(self.observers, self, lambda: run.observation(usage, self.entry))
        if run.pipeline is not None:
            run.pipeline.logits = None  # they are large, and nobody else needs them
