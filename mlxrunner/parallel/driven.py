"""The handle of a request of a Stepper, whose reader drives the steps."""

from __future__ import annotations

from collections.abc import Iterator

from mlxrunner.engine.owner import Owner
from mlxrunner.errors import MlxrunnerError
from mlxrunner.parallel.scheduling.request import ActiveRequest
from mlxrunner.parallel.scheduling.scheduler import Scheduler
from mlxrunner.results import Chunk, Result


class DrivenHandle:
    """The growing answer of a request.

    Iterating it yields its chunks and drives the steps of all requests of the runner. All members
    but `error` and `finished` raise WrongThreadError in any thread but the runner's.
    """

    def __init__(self, owner: Owner, scheduler: Scheduler, request: ActiveRequest) -> None:
        self._owner, self._scheduler, self._request = owner, scheduler, request

    def __iter__(self) -> Iterator[Chunk]:
        request = self._request
        while True:
            self._owner.check()
            if request.chunks:
                yield request.chunks.popleft()
                continue
            if request.error is not None:
                raise request.error
            if request.finished:
                return
            self._scheduler.step()

    @property
    def error(self) -> MlxrunnerError | None:
        """The error that ended the request, or None."""
        return self._request.error

    @property
    def finished(self) -> bool:
        """True once the last chunk is ready, or will never come."""
        return self._request.finished

    @property
    def reached(self) -> int:
        """Number of the prompt's tokens that are evaluated or reused so far."""
        return min(self._request.place, len(self._request.tokens))

    def poll(self) -> list[Chunk]:
        """Return the chunks since the last call, without running a step.

        A caller that drives many requests uses it.
        """
        self._owner.check()
        chunks = list(self._request.chunks)
        self._request.chunks.clear()
        return chunks

    def cancel(self) -> None:
        """End the request and free its slot. Its evaluated tokens can be reused.

        A second call is allowed, also after the runner was closed.
        """
        self._owner.check_thread()
        if not self._owner.is_closed:
            self._scheduler.cancel(self._request)

    def result(self) -> Result:
        """Run the request to its end and return its result, or raise the error that ended it."""
        return Result.of(list(self))
