"""Schedule requests: choose the tokens of each step, and end failed requests.

Knows nothing about prompts or loading.

A request may wait for a prefix that another one is evaluating. Then its prompt is evaluated in
pieces, and then it decodes. One forward pass carries a token or a piece of each request. If the
awaited prefix does not come, the request waits for room. It never ends for lack of room.

One thread owns a model and its scheduler: an `Owner` refuses calls from other threads.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeVar

import mlx.core as mx

from mlxrunner.cache.account import TokenAccounting
from mlxrunner.cache.entry import TokenArray, as_tokens
from mlxrunner.cache.prefix import PrefixCache
from mlxrunner.engine.backends.backend import Backend
from mlxrunner.engine.drafting import DraftSources
from mlxrunner.engine.request import ActiveRequest
from mlxrunner.engine.sampling import Sampled
from mlxrunner.engine.scheduling.allocation import KVAllocator, Slot, SlotAssigner
from mlxrunner.engine.scheduling.batching import (
    BatchBuilder,
    BatchExecutor,
    DispatchedStep,
    DraftScheduler,
    ScheduledBatch,
    error_of,
    judge,
    taken,
)
from mlxrunner.engine.scheduling.eviction import (
    IDLE_S,
    Ended,
    EvictionPolicy,
    OffloadTarget,
    RequestFinalizer,
    step_failed,
)
from mlxrunner.engine.scheduling.pacing import StepPace
from mlxrunner.errors import BusyError, CacheFullError, ClosedError, LogitsError, WrongThreadError
from mlxrunner.models.facts import ModelFacts
from mlxrunner.options import EngineSettings
from mlxrunner.results import Chunk


class Scheduler:
    """The scheduler of all requests on an engine."""

    def __init__(
        self,
        engine: Backend,
        settings: EngineSettings,
        *,
        ended: Ended,
        message_ends: TokenArray | None = None,
        parking: OffloadTarget | None = None,
        is_reusable: bool = True,
        facts: ModelFacts | None = None,
        accounting: TokenAccounting | None = None,
    ) -> None:
        """Make a scheduler. The settings are those in use: see `EngineSettings.complete`.

        `ended`: called for each request at its end. `message_ends`: the tokens that end a message.
        `parking`: see `EvictionPolicy`. `is_reusable`: False if no prompt may reuse what another
        one has evaluated. `facts`: those of the model; None: nothing is guessed.
        `accounting`: counts the tokens of prompts; None: a new one.
        """
        budget = (settings.checkpoint_budget or 0) // settings.max_sequences
        interval = settings.checkpoint_interval
        self.slots = [
            Slot(number, PrefixCache(partial(engine.caches, number), budget, interval))
            for number in range(settings.max_sequences)
        ]
        self.requests: list[ActiveRequest] = []
        """The running requests, in order of arrival. A request waits only for earlier ones."""
        self._engine = engine
        engine.takes_checkpoints = budget > 0
        capacity, cells = settings.context or 0, settings.kv_cache_tokens or 0
        room = KVAllocator(engine, self.slots, self.requests, capacity=capacity, cells=cells)
        ends = as_tokens([]) if message_ends is None else message_ends
        self.residents = EvictionPolicy(
            engine, self.slots, memory=settings.cache_memory, parking=parking
        )
        self._accounting = TokenAccounting() if accounting is None else accounting
        self._endings = RequestFinalizer(
            self.requests, self.residents, self._accounting, lambda: self.moment, ended
        )
        parts = engine, self.slots, self.requests, room, self.residents, self._endings
        self._assigner = SlotAssigner(*parts, self._accounting, ends)
        self._assigner.is_reusable = is_reusable
        self.offload_tasks = self._assigner.offload_tasks
        self.offload_tasks.are_on = is_reusable and settings.max_step_ms != 0
        longest_ms = settings.max_step_ms if is_reusable else 0
        pace = StepPace(settings.step, longest_ms, stacks=engine.stacks)
        self.composer = BatchBuilder(engine, self.requests, settings.step, pace)
        spare = None if engine.is_single else settings.step - settings.max_sequences
        self._drafts = DraftScheduler(facts, spare)
        self._passes = BatchExecutor(engine, self.residents, self.composer, self._endings)
        self._pending: DispatchedStep | None = None
        self._suspects: deque[list[ActiveRequest]] = deque()
        """Groups of requests, one of which may have made a step fail: each is run by itself."""
        self.on_first: Callable[[], object] = lambda: None
        """A function that is called when answers have begun, before the next step is dispatched."""
        self.ticks = 0
        """Number of steps so far."""
        self._calls, self._is_whole = 0, True

    @property
    def moment(self) -> tuple[int, int]:
        """The steps so far, and the calls of `admit` and `cancel` since the last step.

        A replay needs both to find the same tokens in the same slots.
        """
        return self.ticks, self._calls

    @property
    def sources(self) -> DraftSources | None:
        """The sources of guesses; None: nothing is guessed."""
        return self._drafts.sources

    @property
    def is_idle(self) -> bool:
        """True if the last step had nothing to dispatch."""
        return self._pending is None and not self._suspects

    def place_waiting(self) -> None:
        """Give waiting requests their prefix, once it is evaluated."""
        self._assigner.place_waiting()

    def admit(self, request: ActiveRequest) -> None:
        """Give a request a slot and the prefix that it can share.

        Raise NoFreeSlotError or CacheFullError if there is no room now. The request may be admitted
        later.
        """
        self._calls += 1
        self.mend()
        self._assigner.admit(request, self.moment)

    def cancel(self, request: ActiveRequest, error: str | None = None) -> None:
        """End a request without affecting the others. `error`: the name of the caller's error."""
        self._calls += 1
        self._whole(partial(self._cancel, request, error))

    def _cancel(self, request: ActiveRequest, error: str | None) -> None:
        if not request.finished:
            request.ending = "cancelled"
            self._finish(request)
            self._endings.retire(request, error=error)

    def step(self) -> None:
        """Dispatch the next forward pass, then read the last one's tokens: first ones before."""
        self.ticks, self._calls = self.ticks + 1, 0
        self._whole(self._step_alone if self._engine.is_single else self._step)

    def _step(self) -> None:
        self._run_offload_tasks()
        self._assigner.place_waiting()
        if self._suspects:
            self._run_suspects(self._suspects.popleft())
            self._endings.end_overdue()
            return
        before, self._pending = self._pending, None
        row: ScheduledBatch = []
        try:
            if before is not None and (before.begins_answers or before.again):
                self._read_at_once(before)
                before = None
                self.on_first()
            row = self._next_row()
            if waits := self._drafts.is_worth_waiting(row):
                if not self._read(before):
                    row = []
                before = None
                row = [one for one in row if not one[0].finished]
            row = self._drafts.add_to(row, self._passes.width)
            self._pending = self._passes.forward(row, waited=waits) if row else None
            self._read(before)
            before = None
            if self._pending is not None and self._pending.drafted:
                drafted, self._pending = self._pending, None
                self._read_at_once(drafted)
        except CacheFullError as error:
            running = len(self.requests)
            for request, _ in row:
                request.draft = []
            if self._read(before) and len(self.requests) == running:
                self._assigner.make_way(error)
        except Exception as error:
            self._recover(before, row, error)
        self._endings.end_overdue()

    def _step_alone(self) -> None:
        """Run a step of the only request.

        A piece of its prompt, its first token and a draft are read at once; each other token while
        the next one is computed.
        """
        request = self.requests[0]
        if request.guessed:
            self._deliver_guessed(request)
            return
        if request.late_error is not None:
            self._end_and_clear(request, request.late_error)
            return
        before, self._pending = self._pending, None
        try:
            self._assigner.make_room_for(self.requests)
        except Exception as error:
            self._fail_alone(request, None, error)
            return
        try:
            row = self.composer.piece(request)
            if waits := self._drafts.is_worth_waiting(row):
                self._read(before)
                before = None
                if request.finished:
                    return
            row = self._drafts.add_to(row, self._passes.width)
            step = self._passes.forward(row, waited=waits) if row else None
            self._read(before)
            before = None
            if request.finished:
                return
            if step is not None and (step.planned.prefill or step.drafted):
                self._read(step)
                step = None
            self._pending = step
        except Exception as error:
            self._fail_alone(request, before, error)
        except BaseException:
            self._record(request, before)
            raise

    def _record(self, request: ActiveRequest, before: DispatchedStep | None) -> None:
        """Record a token whose forward pass was dispatched, and that was not read yet."""
        lease = request.lease
        if before is not None and request.place > lease.recorded and not request.draft:
            for _, (sampled,) in before.sampled:
                with suppress(LogitsError):
                    lease.record((sampled.read(),))

    def _fail_alone(
        self, request: ActiveRequest, before: DispatchedStep | None, error: Exception
    ) -> None:
        """End the only request with an error. The entry is freed if it can't be evaluated."""
        self._pending = None
        try:
            self._record(request, before)
            mx.eval(self._engine.state())
        except Exception as lost:
            request.lease.free(f"{type(lost).__name__} while evaluating")
        if not request.finished:
            self._endings.fail_alone(request, error)

    def _finish(self, request: ActiveRequest) -> None:
        """Leave the entry of the only request as it is without drafts."""
        if self._engine.is_single:
            self._pending = None
            self._passes.finish(request)

    def _run_offload_tasks(self) -> None:
        """Park and restore conversations, a piece at a time.

        A write while the last step is running would copy all cells that the step sees.
        """
        if not self.offload_tasks.is_any:
            return
        if seconds := self.composer.offload_s(is_late=self.residents.behind.is_late):
            with suppress(Exception):  # it is raised again where the step is read
                mx.eval([] if self._pending is None else self._pending.awaited)
            began = time.perf_counter()
            self.offload_tasks.run(seconds)
            self.composer.spend(time.perf_counter() - began)

    def save_idle(self) -> None:
        """Write idle conversations to disk for a moment, while no request runs."""
        if self.offload_tasks.are_on:
            self.residents.behind.go_on(IDLE_S, is_idle=True)

    @property
    def save_in_s(self) -> float | None:
        """Seconds until `save_idle` has something to do; None: nothing before the next turn."""
        return self.residents.behind.wait_s(is_idle=True) if self.offload_tasks.are_on else None

    def _whole(self, act: Callable[[], None]) -> None:
        """Call `act`. End all requests if it raises an error or is interrupted.

        The slots keep what was recorded before.
        """
        self.mend()
        self._is_whole = False
        try:
            act()
        except BaseException as error:
            self.forget_everything(error)
            raise
        self._is_whole = True

    def mend(self) -> None:
        """End all requests if a second interrupt has cut `forget_everything` short."""
        if not self._is_whole:
            self.forget_everything(KeyboardInterrupt())

    def forget_everything(self, error: BaseException) -> None:
        """End all requests, after an `error` in a step. The slots keep what is whole."""
        self._pending = None
        self._suspects.clear()
        self._passes.formless.clear()
        for request in list(self.requests):
            if request.finished:  # an interrupt came before it was removed
                self.requests.remove(request)
            else:
                request.ending = "forgotten"
                name = type(error).__name__ if isinstance(error, Exception) else None
                self._endings.fail(request, step_failed(error), name)
        busy = {request.slot.number for request in self.requests}
        for slot in self.slots:
            if slot.is_busy and slot.number not in busy:
                self._assigner.free(slot)
            elif not slot.is_busy and not slot.cache.current.is_true:
                self.residents.clear(slot, "a failed step")
        self._is_whole = True

    def drop(self) -> None:
        """Free what the slots hold, with all buffers, and forget the step that was dispatched."""
        self._pending = None
        for slot in self.slots:
            slot.cache.free("the end", with_buffers=True)

    def _next_row(self) -> ScheduledBatch:
        """Make room in full contexts, and return the row of the next step."""
        self._assigner.make_room_for(self.requests)
        self._assigner.grow()
        return self.composer.row(self.requests)

    def _read_at_once(self, step: DispatchedStep) -> None:
        """Read a step before the next one is composed.

        Full contexts shift before that as they do in a `Runner`: the tokens that a request drops
        do not depend on the others.
        """
        self._assigner.make_room_for(step.pipelined)
        self._read(step)

    def _read(self, step: DispatchedStep | None) -> bool:
        """Wait for the end of a step and deliver its tokens. Return False after a new start."""
        broken: list[tuple[ActiveRequest, LogitsError]] = []
        if step is not None:
            seconds, right = self.composer.wait(step), 0
            if self._engine.is_single:
                self.composer.note_span(self.requests[0], step)
            for request, sampled in step.sampled:
                try:
                    if request.finished:
                        continue
                    if (wrong := error_of(request, sampled)) is not None:
                        right += self._deliver_right(request, sampled, wrong, broken)
                    else:
                        right += self._deliver(request, sampled)
                except Exception as error:
                    self._endings.fail_alone(request, error)
            self._drafts.ended(step, right, seconds)
        if broken:
            return self._end_broken(broken)
        while self._passes.formless:
            request, formless = self._passes.formless.pop()
            if not request.finished:
                request.ending = "no token"
                self._endings.fail(request, formless)
        return True

    def _end_broken(self, broken: list[tuple[ActiveRequest, LogitsError]]) -> bool:
        """End requests whose logits are NaN or infinite. Return False if all others start again.

        What a request stored is freed. If it stored NaN in cells that others read, these got NaN,
        too: they continue with new cells, and it is the only one that ends.
        """
        guilty = self._engine.broken()
        for request, error in broken:
            if guilty is None or request.slot.number in guilty:
                self._end_and_clear(request, error)
        if guilty is None:
            return True
        for request in [one for one in self.requests if one.is_placed and one.left]:
            if request.slot.number in guilty:  # of which no logits were asked for yet
                self._end_and_clear(request, broken[0][1])
        self._pending = None
        self._suspects.clear()
        for request in self.requests:
            if request.drafting is not None:
                request.drafting.close()
                request.drafting = None  # a wrong guess may be what stored NaN
        self._go_back(is_lost=True)
        return False

    def _end_and_clear(self, request: ActiveRequest, error: LogitsError) -> None:
        """End a request, and free what it stored, and what it was stored from."""
        request.ending = "failed"
        why = "logits that were NaN or infinite"
        self.residents.distrust(request)
        self.residents.clear(request.slot, why)
        for slot in self.slots:
            if not slot.is_busy and request.lookup.cached and slot.shared_with(request.tokens):
                self.residents.clear(slot, why)
        self._endings.fail(request, error)

    def _go_back(self, *, is_lost: bool) -> None:
        """Let all requests continue from the tokens that were read.

        `is_lost`: drop all buffers, so that all tokens are evaluated again.
        """
        self._passes.formless.clear()
        for request in self.requests:
            request.go_back()
        if is_lost:
            self._engine.forget()
            for request in self.requests:
                request.stop_offload_task()
            for slot in self.slots:
                self.residents.clear(slot, "a failed step")
        for request in self.requests:
            request.restart()

    def _deliver(self, request: ActiveRequest, sampled: list[Sampled]) -> int:
        """Deliver a token, and those that were guessed right. Return the number of these."""
        if not request.said:
            self._accounting.reach(request.counted, len(request.tokens))
            self._drafts.begin(request)
            if request.drafting is not None:
                self.composer.clock = self._drafts.clock
        before: list[Chunk] = []
        if request.draft and self._engine.is_single:
            request.guessed.extend(judge(request, sampled))
            request.num_read = len(request.guessed)
            if not request.chunks:  # what was not shown is not in the entry of an early end
                self._deliver_guessed(request)
            return request.num_read - 1
        if request.draft:
            *before, chunk = taken(request, sampled)
            request.chunks.extend(before)
        else:
            decoded = sampled[0].decoded(sampled[0].read())
            chunk = request.answer.take(decoded, request.clock)
            request.take(decoded.token)
        request.checkpoint_if_due()
        self._show(request, chunk)
        return len(before)

    def _deliver_right(
        self,
        request: ActiveRequest,
        sampled: list[Sampled],
        error: LogitsError,
        broken: list[tuple[ActiveRequest, LogitsError]],
    ) -> int:
        """Deliver the guesses before a token that is `error`, for one slot.

        Return their number. A request without any is `broken` at once.
        """
        right = next(place for place, one in enumerate(sampled) if one.error is not None)
        if not right or not self._engine.is_single:
            broken.append((request, error))
            return 0
        request.guessed.extend(one.decoded(one.read()) for one in sampled[:right])
        request.num_read, request.late_error = right + 1, error
        if not request.chunks:
            self._deliver_guessed(request)
        return right

    def _deliver_guessed(self, request: ActiveRequest) -> None:
        """Deliver one of the tokens that were read together."""
        decoded = request.guessed.popleft()
        chunk = request.answer.take(decoded, request.clock)
        request.take(decoded.token)
        is_last = not request.guessed and request.late_error is None
        if chunk.finish_reason is None and is_last:
            request.keep(request.num_read - 1)
            request.checkpoint_if_due()
        self._show(request, chunk)

    def _show(self, request: ActiveRequest, chunk: Chunk) -> None:
        """Give a chunk to the reader, and end the request after the last one."""
        if chunk.finish_reason is None:
            request.chunks.append(chunk)
            return
        self._finish(request)
        error = request.error_at(chunk)
        if error is not None:
            request.chunks.append(replace(chunk, finish_reason=None))
            self._endings.fail(request, error)
        else:
            self._endings.retire(request, chunk.finish_reason, last=chunk)

    def _recover(
        self, before: DispatchedStep | None, row: ScheduledBatch, error: Exception
    ) -> None:
        """Read the step `before` the failed one, and let all requests go back.

        Those of the failed `row` run again in halves. One that made a step fail by itself ends. All
        buffers are dropped if they can't be evaluated.
        """
        self._pending = None
        for request, _ in row:
            request.failures.append(self.ticks)
        try:
            self._read(before)
            mx.eval(self._engine.state())
            is_lost = False
        except Exception:
            is_lost = True
        self._go_back(is_lost=is_lost)
        running = [request for request, _ in row if not request.finished]
        if len(running) == 1:
            self._endings.fail_alone(running[0], error)
        elif running:
            half = len(running) // 2
            self._suspects.extendleft([running[half:], running[:half]])

    def _run_suspects(self, group: list[ActiveRequest]) -> None:
        """Run a step of some requests alone, to its end."""
        row: ScheduledBatch = []
        try:
            self._assigner.make_room_for([request for request in group if request in self.requests])
            row = self.composer.row([request for request in group if request in self.requests])
            step = self._passes.forward(row) if row else None
            self._read(step)
        except CacheFullError as error:
            self._assigner.make_way(error)
        except Exception as error:
            self._recover(None, row, error)


T = TypeVar("T")


class Closing(ABC):
    """An object that the end of a `with` block closes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Free everything. A second call is allowed."""


class Owner:
    """The thread that opened `what`, with a flag that is set when `what` is closed."""

    def __init__(self, what: str) -> None:
        self._what, self._thread = what, threading.current_thread()
        self._left: deque[Callable[[], object]] = deque()
        self.is_closed = False

    @property
    def is_here(self) -> bool:
        """True in the owner's thread."""
        return threading.current_thread() is self._thread

    def check(self) -> None:
        """Raise WrongThreadError in any thread but the owner, and ClosedError after `close`."""
        self.check_thread()
        if self.is_closed:
            raise ClosedError(self._what)
        while self._left:
            self._left.popleft()()

    def check_thread(self) -> None:
        """Raise WrongThreadError, with both names, in any thread but the owner."""
        if not self.is_here:
            raise WrongThreadError(self._what, self._thread.name, threading.current_thread().name)

    def do(self, act: Callable[[], object]) -> None:
        """Call `act` now; in another thread, leave it to the owner's next call."""
        if self.is_here:
            act()
        else:
            self._left.append(act)

    def close(self) -> None:
        """Refuse all further calls."""
        self.is_closed = True


class Owned(Iterator[T]):
    """A generator that only its owner advances and closes."""

    def __init__(self, inner: Generator[T, None, None], owner: Owner) -> None:
        self._inner: Any = inner  # whose state typing does not know
        self._owner = owner

    def __iter__(self) -> Owned[T]:
        return self

    def __next__(self) -> T:
        self._check_idle()
        self._owner.check()
        value: T = next(self._inner)
        return value

    @property
    def is_running(self) -> bool:
        """True while the generator computes its next value, as seen from a callback."""
        return bool(self._inner.gi_running)

    @property
    def is_over(self) -> bool:
        """True once the generator has ended."""
        return self._inner.gi_frame is None

    def close(self) -> None:
        """Close the generator. A second call is allowed, also after the runner was closed."""
        self._check_idle()
        self._inner.close()

    def _check_idle(self) -> None:
        """Raise WrongThreadError in another thread, and BusyError in a callback of its own."""
        self._owner.check_thread()
        if self.is_running:
            raise BusyError()
