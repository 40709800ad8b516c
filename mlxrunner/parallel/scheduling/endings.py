"""End requests: with their answer, with an error, or because their time is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from mlxrunner.cache.pool.interface import END
from mlxrunner.errors import MlxrunnerError, StepFailedError, TimeLimitError
from mlxrunner.parallel.scheduling.request import ActiveRequest
from mlxrunner.parallel.scheduling.residents import Residents
from mlxrunner.results import Chunk, FinishReason, Usage

Ended = Callable[[ActiveRequest, FinishReason | None, str | None], Usage]
"""A function of an ended request, its finish reason, and the name of its error."""


class Endings:
    """The ends of the requests of a scheduler."""

    def __init__(
        self,
        requests: list[ActiveRequest],
        residents: Residents,
        moment: Callable[[], tuple[int, int]],
        tell: Ended,
    ) -> None:
        """End some of `requests`, the running ones.

        `moment` returns that of `Scheduler.moment`. `tell` is called for each request at its end.
        """
        self._requests, self._residents = requests, residents
        self._moment, self._tell = moment, tell

    def end_overdue(self) -> None:
        """End the requests whose deadline has come."""
        now = time.perf_counter()
        for request in list(self._requests):
            if request.due is not None and request.due <= now:
                request.ending = "cancelled"
                self.fail(request, TimeLimitError(request.deadline or 0))

    def fail_alone(self, request: ActiveRequest, error: Exception) -> None:
        """End one request with a StepFailedError about `error`."""
        request.ending = "failed"
        why = StepFailedError(f"this request made a step fail: {_named(error)}")
        why.__cause__ = error
        self.fail(request, why, type(error).__name__)

    def fail(self, request: ActiveRequest, error: MlxrunnerError, name: str | None = "") -> None:
        """End a request with `error`. `name`: the recorded name of the error.

        None stands for an interrupt, and "" for the name of the error's class.
        """
        request.error = error
        self.retire(request, error=type(error).__name__ if name == "" else name)

    def retire(
        self,
        request: ActiveRequest,
        reason: FinishReason | None = None,
        error: str | None = None,
        last: Chunk | None = None,
    ) -> None:
        """End a request and free its slot, whose tokens stay for others to share.

        A sampled token that was not read yet is dropped.
        """
        request.stop_errand()
        if request.drafting is not None:
            request.drafting.close()
        slot = request.slot
        if request.is_placed:
            slot.tokens.truncate(slot.exact)
            request.lease.close()
        self._residents.fit(request)
        request.ended = moment = self._moment()
        usage = self._tell(request, reason, error)
        if last is not None:
            request.chunks.append(replace(last, usage=usage))
        request.finished = True
        self._requests.remove(request)
        slot.is_busy, slot.rests = False, False
        slot.last_used, slot.asked = (
            moment[0],
            min(len(request.tokens), len(slot.tokens)),
        )
        slot.planned, slot.exact = slot.planned[:0], END
        slot.cache.entry.is_shifted = False  # only exact tokens are left
        self._residents.use(slot)
        self._residents.fit()


def step_failed(error: BaseException) -> StepFailedError:
    return StepFailedError(
        f"a step that carried this request, and others, was ended by {_named(error)}: "
        "submit it again"
    )


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
