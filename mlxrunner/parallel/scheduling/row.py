"""Compose the row of each step: which requests it carries, and how many tokens of each.

`pace.py` says how many tokens a step carries beside the answers that must not stall, `turns.py`
whose they are. An answer of priority "batch" counts as such a token while another one decodes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlxrunner.engine.sampling import Sampled
from mlxrunner.parallel.rows.engine import Engine
from mlxrunner.parallel.scheduling.pace import Planned, StepPace
from mlxrunner.parallel.scheduling.request import ActiveRequest
from mlxrunner.parallel.scheduling.turns import Turns, Want
from mlxrunner.system.device import work_clock

Row = list[tuple[ActiveRequest, int]]
"""The requests of a step, with the number of tokens of each."""


@dataclass(frozen=True)
class Step:
    """A dispatched forward pass."""

    planned: Planned
    sampled: list[tuple[ActiveRequest, list[Sampled]]]
    """Requests, and what the step sampled for each: behind a draft, one for each of its tokens."""
    awaited: list[mx.array]
    """Arrays that are ready when the step has ended."""
    drafted: int
    """Its rows that are guesses."""
    more: int
    """Its rows beside one for each request."""
    late_s: float
    """Seconds in which the device had nothing to do, because a guess was waited for in vain."""
    seconds: float
    """Seconds that its dispatch took. A device without a long queue runs it meanwhile."""
    work_s: float
    """The same by `Composer.clock`."""

    @property
    def begins_answers(self) -> bool:
        """True if a client waits for the first token of its answer, which the step samples."""
        return any(not request.said and not request.finished for request, _ in self.sampled)


class Composer:
    """The rows of an engine, and the time that they take."""

    def __init__(
        self, engine: Engine, requests: Sequence[ActiveRequest], most: int, pace: StepPace
    ) -> None:
        """Compose rows of at most `most` tokens of the running `requests`."""
        self._engine, self._requests, self._most, self._pace = engine, requests, most, pace
        self._turns = Turns()
        self._was_prefill = False
        self.clock = work_clock()
        """Returns the seconds by which guesses are judged."""
        self._is_disturbed = False
        """True if other work took place while the last step was running."""

    def row(self, requests: Sequence[ActiveRequest]) -> Row:
        """Return the tokens of the next step for some of the requests."""
        for request in requests:
            request.draft = []
        decoding = [request for request in requests if request.is_decoding]
        kept = [request for request in decoding if request.priority == "interactive"] or decoding
        others = [request for request in decoding if request not in kept]
        others += [request for request in requests if request.is_placed and request.left]
        budget = self._budget(kept, others)
        if self._engine.most_sequences == 1 and len(kept) + len(others) > 1:
            return [_whole(*one) for one in self._alone(kept, others, budget)]
        if budget:
            undone = sum(request.waiting - 1 for request in decoding)
            budget = min(budget, self._most - len(kept) - undone)
        wants = [self._want(request) for request in others]
        shares = self._turns.deal(budget, wants) if budget and others else [0] * len(others)
        carried = [(one, count) for one, count in zip(others, shares, strict=True) if count]
        return [_whole(*one) for one in [(request, 1) for request in kept] + carried]

    def errand_s(self) -> float:
        """Return the seconds that work beside the next step may take; 0: none now."""
        return self._pace.errand_s(self._num_kept())

    def spend(self, seconds: float) -> None:
        """Note that work beside the next step took time, while the last one was running."""
        self._pace.spend(self._num_kept(), seconds)
        self._is_disturbed = True

    def planned(self, row: Row) -> Planned:
        """Note that a row is dispatched now, and return what `wait` needs."""
        rows = [request for request, _ in row if not request.left]
        interactive = [request for request in rows if request.priority == "interactive"]
        others = [one for one in row if one[0] not in (interactive or rows)]
        cells = max((request.place for request, _ in others), default=0)
        tokens = sum(count for _, count in others)
        return self._pace.plan(len(row) - len(others), tokens, cells, kept=self._num_kept())

    def _num_kept(self) -> int:
        """Return the number of answers that must not stall."""
        return sum(one.is_decoding and one.priority == "interactive" for one in self._requests)

    def wait(self, step: Step) -> float | None:
        """Wait for the end of a step, note how long it took, and return its seconds of `clock`.

        Return None if other work took place meanwhile. The seconds of a step are those of its
        dispatch and of this wait: the device may run the step during either of them.
        """
        began, worked = time.perf_counter(), self.clock()
        mx.eval(step.awaited)
        seconds, work_s = time.perf_counter() - began, self.clock() - worked
        was_disturbed, self._is_disturbed = self._is_disturbed, False
        if was_disturbed:
            return None
        if not step.drafted:
            self._pace.measure(step.planned, step.seconds + seconds)
        return step.work_s + work_s

    def _budget(self, kept: Sequence[ActiveRequest], others: Sequence[ActiveRequest]) -> int:
        """Return how many tokens of `others` a step carries beside the `kept` answers."""
        if not others:
            return 0
        cells = max(request.place for request in others)
        if any(request.priority == "interactive" for request in kept):
            return self._pace.allowance(len(kept), cells)
        wanted = sum(self._want(request).tokens for request in others)
        return max(1, min(self._pace.allowance(0, cells, wanted), self._most - len(kept)))

    def _alone(
        self, kept: Sequence[ActiveRequest], others: Sequence[ActiveRequest], budget: int
    ) -> Row:
        """Return a row of one request: the kept answers and the others take turns."""
        self._was_prefill = bool(others) and bool(budget) and not (self._was_prefill and kept)
        group = others if self._was_prefill else kept
        wants = [self._want(request) for request in group]
        turn = self._turns.deal(1, wants).index(1)
        piece = self._most if budget >= self._most - len(kept) else budget
        return [(group[turn], min(wants[turn].tokens, piece if self._was_prefill else 1))]

    def _want(self, request: ActiveRequest) -> Want:
        tokens = self._stop(request) - request.place if request.left else 1
        return Want(tokens, request.priority, request.due)

    def _stop(self, request: ActiveRequest) -> int:
        """Return the offset at which the next piece of the request's prefill has to end.

        Windows drop tokens and states have no past: a prefix has to be shared, or copied by a
        checkpoint, while it is there.
        """
        end = (
            len(request.todo) if request.shift is None else min(len(request.todo), request.context)
        )
        if not any(cache.needs_checkpoints for cache in request.lease.caches):
            return end
        ends = [
            other.promised
            for other in self._requests
            if not other.is_placed and other.source is request.slot
        ]
        stop = request.lease.next_stop if request.lease.needs_checkpoints else end
        return min(end, *(place for place in (stop, *ends) if place > request.place), end)


def _whole(request: ActiveRequest, count: int) -> tuple[ActiveRequest, int]:
    """Return the tokens of a step: all that an answer waits for, or a piece of a prompt."""
    is_one = request.drafting is None or request.left
    return request, count if is_one else request.waiting


def wanted_rows(row: Row) -> tuple[list[int], list[tuple[ActiveRequest, range]]]:
    """Return the rows whose logits are wanted, and for each request that samples its part of them.

    A draft has the logits of all its rows, so that an engine runs them as one pass.
    """
    wanted: list[int] = []
    sampling, end, rows = [], 0, 0
    for request, count in row:
        end += count
        if request.left <= count:
            own = count if request.draft else 1
            wanted += range(end - own, end)
            sampling.append((request, range(rows, rows + own)))
            rows += own
    return wanted, sampling


def stops_at(request: ActiveRequest, count: int) -> bool:
    """Return True if a piece of `count` tokens ends where the request wants a checkpoint."""
    is_prefill, lease = request.left > count, request.lease
    return is_prefill and lease.needs_checkpoints and lease.next_stop == request.place + count
