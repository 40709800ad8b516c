"""Replay requests that ran side by side, with the real scheduler. Nothing is computed.

`mlxrunner.parallel.scheduling` and `mlxrunner.cache.shared.cells` themselves decide who gets which
slot, who waits for whom, what a window still has, and who lacks room. This module has requests that
repeat the answers of the log, and the order in which they are submitted and cancelled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import numpy as np

from mlxrunner.batch.order import order_of
from mlxrunner.batch.store import sort_key
from mlxrunner.cache.overflow import Shift
from mlxrunner.cache.tokens import TokenArray, as_tokens
from mlxrunner.engine.answer import AnswerStream, Clock
from mlxrunner.engine.observation import usage_of
from mlxrunner.engine.requests import Request
from mlxrunner.engine.sampling import Decoded, NextToken, Sampled
from mlxrunner.errors import CacheFullError, FormError, MlxrunnerError, NoFreeSlotError
from mlxrunner.options import GenerateOptions
from mlxrunner.parallel.scheduling.request import ActiveRequest
from mlxrunner.parallel.scheduling.scheduler import Scheduler
from mlxrunner.parallel.settings import EngineSettings
from mlxrunner.profiling.record.tokenlog import LoggedRequest
from mlxrunner.profiling.replay.engine import ReplayedEngine, ReplayedParking
from mlxrunner.results import Chunk, FinishReason, Usage
from mlxrunner.tokenizer.prompt import TokenizedPrompt

if TYPE_CHECKING:
    from mlxrunner.stored.parking import Parking

MOST_CELLS = 2**28
"""The most slots times cells of a replay, which takes a byte for each."""
BLOCK = 16
"""Tokens that are compared at once to find the conversation of a request."""
FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""An odd number, for hashes of tokens."""
ENDINGS = ("own", "cancelled", "forgotten", "no room", "no token")
"""The ways in which a request may end."""


class SideBySide:
    """The requests of one process that ran in slots."""

    def __init__(self, process: Mapping[str, Any]) -> None:
        """Begin without requests. `process` is its line of the token log."""
        self.process = process
        self.requests: list[LoggedRequest] = []

    def as_run(self) -> list[ActiveRequest]:
        """Return the requests with their lookups, submitted and ended as the log says.

        They come in the log's order.
        """
        runner = self._runner(self.process["max_sequences"])
        made = [runner.request(logged) for logged in self.requests]
        for moment, request, ending in sorted(
            self._events(made), key=lambda event: (event[0], event[2] == "begins")
        ):
            runner.advance(*moment)
            if ending == "forgotten":
                runner.scheduler.forget_everything(MlxrunnerError("as the log says"))
            elif ending == "cancelled":
                runner.scheduler.cancel(request)
            else:
                runner.begin(request)
        runner.finish()
        return made

    def packed(self, slots: int | None = None, *, by_prefix: bool = False) -> list[ActiveRequest]:
        """Return the requests with their lookups if each begins as soon as it can.

        `slots` is the number of slots; None for that of the runner. The requests begin in the order
        of the log's begins, or with `by_prefix` in that of a batch. One that continues a
        conversation waits for the answer before, and lets later ones pass. A request that was ended
        from outside ends with its last token.
        """
        runner = self._runner(slots or self.process["max_sequences"])
        logged = self.requests
        waits = [None] * len(logged) if by_prefix else continued(logged)
        made = [runner.request(one, ends_itself=True) for one in logged]
        order = sorted(range(len(logged)), key=lambda i: logged[i].facts["beside"]["began"])
        if by_prefix:
            keys = [sort_key(logged[i].prompt) for i in order]
            order = [order[place] for place in order_of(keys)]
        runner.begin_all(
            [(made[i], None if (before := waits[i]) is None else made[before]) for i in order]
        )
        return made

    def _events(
        self, made: Sequence[ActiveRequest]
    ) -> Iterator[tuple[list[int], ActiveRequest, str]]:
        """Yield the begin of each request, and its end if it was ended from outside."""
        for logged, request in zip(self.requests, made, strict=True):
            beside = logged.facts["beside"]
            yield beside["began"], request, "begins"
            if beside["ending"] in ("cancelled", "forgotten"):
                yield beside["ended"], request, beside["ending"]

    def _runner(self, slots: int) -> _ReplayedRunner:
        is_movable = not any(logged.facts["beside"]["stuck"] for logged in self.requests)
        longest = max(
            (len(logged.prompt) + logged.facts["beside"]["sampled"] for logged in self.requests),
            default=1,
        )
        return _ReplayedRunner(self.process, slots, longest, is_movable=is_movable)


def can_be_replayed(logged: LoggedRequest) -> bool:
    """Return True if a log says what the replay of a request beside others needs."""
    process = logged.process
    if "beside" not in logged.facts:
        return False
    try:
        return (
            _is_process(process) and len(logged.prompt) < process["context"] and _is_beside(logged)
        )
    except (KeyError, TypeError, ValueError):
        return False


def has_room(process: Mapping[str, Any], slots: int) -> bool:
    """Return True if a replay with `slots` slots is small enough."""
    cells: int = max(process["cells"], slots * process["context"])
    return slots * (cells + slots) <= MOST_CELLS


def _is_process(process: Mapping[str, Any]) -> bool:
    """Return True if the line of a process has possible values."""
    slots, context, cells = (process[name] for name in ("max_sequences", "context", "cells"))
    most = _step(process)
    return (
        all(_is_count(size, 1) for size in (slots, context, cells, most))
        and context > 1
        and slots <= most <= MOST_CELLS
        and has_room(process, slots)
    )


def _step(process: Mapping[str, Any]) -> Any:
    """Return the most tokens of a step, which older logs call `max_batch`."""
    return process.get("max_batch", process["prefill_step"])


def _is_beside(logged: LoggedRequest) -> bool:
    """Return True if what the log says of a request beside others is possible."""
    beside, answer = logged.facts["beside"], len(logged.answer)
    said, sampled, keep = beside["said"], beside["sampled"], beside["keep"]
    (began, call), (ended, last_call) = beside["began"], beside["ended"]
    counts = [said, sampled, began, call, ended, last_call, keep or 0, beside["slot"]]
    return (
        all(map(_is_count, counts))
        and _is_count(beside["limit"], 1)
        and answer == min(said, max(sampled - 1, 0))
        and said <= sampled <= answer + 2
        and (began, call) <= (ended, last_call)
        and (keep is None or keep <= logged.process["context"] - 2)
        and beside["ending"] in ENDINGS
        and isinstance(beside["stuck"], bool)
    )


def _is_count(value: Any, least: int = 0) -> bool:
    """Return True if `value` is a whole number of at least `least`."""
    return type(value) is int and least <= value <= 2**53


def continued(requests: Sequence[LoggedRequest]) -> list[int | None]:
    """Return for each request the index of the one whose answer it waited for; None: none.

    A request goes on with a conversation if the whole prompt of another one, which had ended when
    it began, is its beginning. Of all that had ended it waited for the one with the longest common
    beginning, in blocks of tokens, and of several for the last.
    """
    besides = [logged.facts["beside"] for logged in requests]
    moments = [(tuple(beside["began"]), 1, index) for index, beside in enumerate(besides)]
    moments += [(tuple(beside["ended"]), 0, index) for index, beside in enumerate(besides)]
    found: list[int | None] = [None] * len(requests)
    whole: set[int] = set()
    last: dict[int, int] = {}
    for _, is_begin, index in sorted(moments):
        hashes = _hashes(requests[index].prompt)
        blocks = hashes[BLOCK - 1 :: BLOCK]
        if not is_begin:
            whole.add(hashes[-1])
            last.update(dict.fromkeys(blocks, index))
        elif not whole.isdisjoint(hashes[:-1]):
            found[index] = next((last[one] for one in reversed(blocks) if one in last), None)
    return found


def _hashes(tokens: TokenArray) -> list[int]:
    """Return a hash of each beginning of `tokens`."""
    factors = np.cumprod(np.full(len(tokens), FACTOR, np.uint64))
    hashes: list[int] = np.cumsum((tokens + np.uint64(1)) * factors).tolist()
    return hashes


class _ReplayedRunner:
    """A scheduler whose engine computes nothing, and its calls."""

    def __init__(
        self, process: Mapping[str, Any], slots: int, longest: int, *, is_movable: bool
    ) -> None:
        """Make the scheduler. `longest` is the most tokens of a prompt and its answer."""
        self._capacity, cells = process["context"], process["cells"]
        share = -(-cells // slots)
        if (
            cells >= process["max_sequences"] * self._capacity
        ):  # enough for all requests: fewer do as well, and are faster
            cells, share = slots * self._capacity, min(self._capacity, longest)
        most = max(_step(process), slots)
        engine = ReplayedEngine(process, is_movable=is_movable)
        engine.cache.init(mx.float32, slots, share, most)
        settings = EngineSettings(
            max_sequences=slots,
            context=self._capacity,
            cells=cells,
            prefill_step=most,
            # Older logs have the budget of a runner of one request at a time.
            checkpoint_budget=process["checkpoint_budget"] if "memory" in process else 0,
            checkpoint_interval=process["checkpoint_interval"],
            memory=process.get("memory"),
            step_ms=0,
        )
        self.scheduler = Scheduler(
            engine,
            settings,
            ended=_usage,
            message_ends=as_tokens(process["message_ends"]),
            parking=cast("Parking", ReplayedParking()) if process.get("parks") else None,
            is_reusable=not process.get("never_reused"),
        )
        self._call = 0

    def request(self, logged: LoggedRequest, *, ends_itself: bool = False) -> ActiveRequest:
        """Return a request that repeats `logged`.

        With `ends_itself` it ends with its last token, even if the logged one was ended from
        outside.
        """
        beside, prompt = logged.facts["beside"], logged.prompt
        own = ends_itself or beside["ending"] == "own"
        said = beside["said"] if own else 0
        shift = None if beside["keep"] is None else Shift(self._capacity, beside["keep"])
        request = Request(
            prompt=TokenizedPrompt(prompt),
            tokens=prompt,
            options=GenerateOptions(),
            next_token=_LoggedTokens(logged.answer, beside["sampled"]),
            clock=Clock(0.0, 0.0),
            context=self._capacity,
            limit=beside["limit"],
            shift=shift,
        )
        return ActiveRequest.of(request, _LoggedAnswer(said))

    def advance(self, tick: int, call: int) -> None:
        """Advance to the call before this one.

        Calls that are not in the log were refused submissions, after which waiting requests look
        again.
        """
        scheduler = self.scheduler
        while scheduler.ticks < tick and self._step():
            self._call = 0
        if scheduler.ticks < tick:
            scheduler.ticks, self._call = tick, 0
        if call > self._call + 1:
            scheduler.place_waiting()
        self._call = call

    def begin(self, request: ActiveRequest) -> None:
        """Submit the request as soon as there is room. A request that never fits finds nothing."""
        while True:
            try:
                self.scheduler.admit(request)
            except (NoFreeSlotError, CacheFullError):
                if not self._step():
                    request.finished = True
                    return
            else:
                return

    def begin_all(self, pairs: Sequence[tuple[ActiveRequest, ActiveRequest | None]]) -> None:
        """Submit all requests, and run until they have ended.

        The next one is always the first that has not to wait for the one beside it: it is in the
        queue before a slot is free.
        """
        waiting = list(pairs)
        while waiting:
            index = next(
                (i for i, (_, before) in enumerate(waiting) if before is None or before.finished),
                None,
            )
            if index is None and self._step():
                continue
            self.begin(waiting.pop(index or 0)[0])
        self.finish()

    def finish(self) -> None:
        """Run until all requests have ended."""
        while self._step():
            pass

    def _step(self) -> bool:
        """Run a step. Return False if there was nothing to do."""
        was_idle = self.scheduler.is_idle
        if not self.scheduler.requests:
            return False
        self.scheduler.step()
        return not (was_idle and self.scheduler.is_idle)


class _LoggedAnswer(AnswerStream):
    """An answer that ends with token number `said`; 0 for an answer that has to be ended."""

    def __init__(self, said: int) -> None:
        self._said, self.count = said, 0

    def take(self, one: Decoded, clock: Clock) -> Chunk:
        self.count += 1
        reason: FinishReason | None = "stop" if self.count == self._said else None
        return Chunk("", one.token, finish_reason=reason)


class _LoggedTokens(NextToken):
    """A sampler that repeats the tokens of a logged answer.

    Tokens that were sampled but not run follow as zeros. One token more raises FormError.
    """

    def __init__(self, answer: TokenArray, sampled: int) -> None:
        self._tokens = np.append(answer, np.zeros(sampled - len(answer), np.int32))
        self._count = 0

    @property
    def is_plain(self) -> bool:
        return False

    @property
    def needs_history(self) -> bool:
        return False

    def __call__(self, logits: mx.array, history: mx.array | None = None) -> Sampled:
        if self._count == len(self._tokens):
            raise FormError(self._count, "the log has no more tokens")
        self._count += 1
        return Sampled(mx.array(self._tokens[self._count - 1 : self._count]))


def _usage(request: ActiveRequest, reason: FinishReason | None, error: str | None) -> Usage:
    """Return the usage of a replayed request, which took no time and no memory."""
    nothing: dict[str, Any] = dict.fromkeys(
        ("trimmed_tokens", "shifted_tokens", "reevaluated_tokens", "cache_bytes", "peak_bytes"), 0
    )
    return usage_of(request.lookup, request.clock, 0, prefill_s=0.0, **nothing)
