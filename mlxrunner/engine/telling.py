"""Tell observers of each ended request once, whatever thread drops its iterator."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterator
from functools import partial
from typing import Any

from mlxrunner.cache.entry import CacheEntry
from mlxrunner.engine.observation import Observer, tell
from mlxrunner.engine.owner import Closing, Owner
from mlxrunner.engine.pipeline import Pipeline
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
        self._pipeline: Pipeline | None = None
        self._untold: Run | None = None
        self._sight: Any = None
        """The eyes of a model that sees pictures; None: it sees none."""

    @property
    @abstractmethod
    def entry(self) -> CacheEntry:
        """The entry as it is between requests."""

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
            # If another thread has dropped the iterator, this waits for the owner's next call.
            self.owner.do(partial(self._end, run))

    def _enter(self) -> None:
        """Check the thread, and tell of a request whose iterator was not read to its end.

        The caller is about to change the entry, which still describes that request.
        """
        self.owner.check()
        if self._untold is not None:
            self._tell(self._untold)

    def _end(self, run: Run) -> None:
        """Give the entry back and tell the observers, also if Ctrl-C has cut this off before."""
        try:
            if self._pipeline is not None:
                self._pipeline.finish()
        finally:
            run.lease.close()
            self._forget_pictures()
        self._tell(run)

    def _forget_pictures(self) -> None:
        """Drop what only a request that has ended needed of its pictures."""
        if self._sight is not None:
            self._sight.settle()

    def _tell(self, run: Run) -> None:
        """Tell the observers of a request that has ended, once."""
        if run.is_told:
            return
        run.is_told, self._untold = True, None
        usage = self.usage = run.usage
        if self.observers and usage is not None:
            tell(self.observers, self, lambda: run.observation(usage, self.entry, self._pipeline))
        if self._pipeline is not None:
            self._pipeline.logits = None  # they are large, and nobody else needs them
