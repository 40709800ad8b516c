"""The Engine: many requests at once on one model, driven step by step by one thread.

A prefix that several requests share is stored and read once. Each step runs one row of tokens
through the model: a token of each request that decodes, and pieces of the prompts of the others.
The next step is dispatched before the tokens of the last one are read. There is no thread:
iterating a handle drives the steps of all requests.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, Unpack

import mlx.core as mx
import numpy as np

from mlxrunner.cache.account import TokenAccounting
from mlxrunner.cache.layers.factory import check_quantized
from mlxrunner.config.option import check_flag, check_kind, listed, shown, with_current_names
from mlxrunner.engine.backends.proof import engine_for
from mlxrunner.engine.draft_model import DraftCachePool
from mlxrunner.engine.opening import EngineConfig, check_seeing, parking_of, seats_of, seeing
from mlxrunner.engine.request import (
    ActiveRequest,
    AnswerStream,
    Observation,
    Observer,
    prepare,
    tell,
)
from mlxrunner.engine.scheduling.allocation import Slot
from mlxrunner.engine.scheduling.pacing import Priority
from mlxrunner.engine.scheduling.pacing import check as check_turn
from mlxrunner.engine.scheduling.scheduler import Closing, Owned, Owner, Scheduler
from mlxrunner.errors import CacheFullError, MlxrunnerError, NoFreeSlotError, OptionError
from mlxrunner.loading import cache_options
from mlxrunner.memory.plan import Plan
from mlxrunner.models.facts import ModelFacts, is_run_by_mlx_vlm
from mlxrunner.models.load import LoadedModel, LoadProgress, load_model, tell_nobody
from mlxrunner.models.resolve import name_of
from mlxrunner.options import (
    EngineKwargs,
    EngineSettings,
    GenerateOptions,
    OpenKwargs,
    OpenSettings,
    SubmitKwargs,
)
from mlxrunner.results import Chunk, FinishReason, Result, Usage
from mlxrunner.system import device
from mlxrunner.tokenizer import Tokenizer
from mlxrunner.tokenizer.prompt import Prompt

if TYPE_CHECKING:
    from mlxrunner.cache.disk.disk_cache import DiskCache


AHEAD = 4
"""Most requests per slot that `run_each` has read and whose results it has not yielded yet."""


class AnswerHandle(Protocol):
    """A handle whose answer is wanted as a whole."""

    def __iter__(self) -> Iterator[Chunk]: ...

    @property
    def finished(self) -> bool: ...

    def result(self) -> Result: ...

    def cancel(self) -> None: ...


class MultiRequestRunner(Closing):
    """A runner of several requests at a time."""

    @property
    @abstractmethod
    def num_slots(self) -> int:
        """The most requests that run at a time."""

    @abstractmethod
    def _enqueue(self, prompt: Prompt, options: dict[str, Any]) -> AnswerHandle:
        """Begin a request whose whole answer is wanted, as soon as it can begin."""

    def complete(self, prompt: Prompt, **options: Unpack[SubmitKwargs]) -> Result:
        """Run one request to its end, beside the running ones, and return its result.

        Raise the errors of `submit`. If the call is interrupted, the request is cancelled.
        """
        handle = self._enqueue(prompt, dict(options))
        try:
            return handle.result()
        finally:
            handle.cancel()

    def run(self, prompts: Sequence[Prompt], **options: Unpack[SubmitKwargs]) -> list[Result]:
        """Return all answers in the order of the prompts. Each free slot starts the next prompt.

        Raise OptionError if `prompts` is not a list, such as a single text.
        """
        listed("prompts", prompts, '["Hello", [1, 2]]')
        return list(self.run_each((prompt, dict(options)) for prompt in prompts))

    def run_each(self, requests: Iterable[tuple[Prompt, dict[str, Any]]]) -> Iterator[Result]:
        """Yield the answers of `requests`, pairs of a prompt and its options, in their order.

        Only a few more requests are read than can run. If a request can't be submitted or fails, or
        if the iterator is closed, the running requests are cancelled.
        """
        listed("requests", requests, '[("Hello", {"max_tokens": 9})]')
        return self._run_each(requests)

    def _run_each(
        self, requests: Iterable[tuple[Prompt, dict[str, Any]]]
    ) -> Generator[Result, None, None]:
        with closing(self._run_handles(requests)) as handles:
            for handle in handles:
                yield handle.result()

    def _run_handles(
        self, requests: Iterable[tuple[Prompt, dict[str, Any]]]
    ) -> Generator[AnswerHandle, None, None]:
        """Yield the handles of `requests` in their order, each to be read to its end at once."""
        handles: deque[AnswerHandle] = deque()
        try:
            for number, pair in enumerate(requests):
                handles.append(self._enqueue(*_pair(number, pair)))
                while handles and (handles[0].finished or len(handles) > AHEAD * self.num_slots):
                    yield handles.popleft()
            while handles:
                yield handles.popleft()
        finally:
            for handle in handles:
                self._give_up(handle)

    def _give_up(self, handle: AnswerHandle) -> None:
        handle.cancel()


def _pair(number: int, request: Any) -> tuple[Prompt, dict[str, Any]]:
    """Return request `number` of `run_each`. Raise OptionError unless it is a pair."""
    match request:
        case (prompt, Mapping() as options):
            return prompt, dict(options)
    raise OptionError(
        f"request {number} has to be a pair of a prompt and its options, such as "
        f'("Hello", {{"max_tokens": 9}}), not {shown(request)}'
    )


class Engine(MultiRequestRunner):
    """A runner of up to `max_sequences` requests at once, of up to `context` tokens each.

    The thread that opened it owns it; calls from any other raise WrongThreadError. Use it as a
    context manager, or call `close`, after which calls raise ClosedError. Every model runs, some
    with one request in a step: see `why_alone`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        facts: ModelFacts,
        *,
        max_sequences: int,
        parking: DiskCache | None = None,
        name: str = "",
        **settings: Unpack[EngineKwargs],
    ) -> None:
        """Make a runner from loaded parts; `Engine.load` is the usual way.

        The settings are those of EngineSettings, but a step may take any time unless `max_step_ms`
        is given; None: as long as keeps the speed of the answers, see
        `mlxrunner.engine.scheduling.pacing`. `context` is the most tokens of one prompt and its
        answer. `parking`: where conversations go that are given up; None: they are lost. Raise
        OptionError for numbers that are out of range, and for `kv_bits` that the model can't have.
        """
        check_kind("facts", facts, ModelFacts, "use Engine.load, which finds them")
        given = {"max_step_ms": 0, **with_current_names(EngineSettings, settings)}
        chosen = EngineSettings.of(max_sequences=max_sequences, **given).complete(facts.context)
        self.owner = Owner(type(self).__name__)
        self.context, self.kv_cache_tokens = chosen.context or 0, chosen.kv_cache_tokens or 0
        self.max_step_ms, self.prefill_step = chosen.max_step_ms, chosen.step
        self.model, self.tokenizer, self.facts, self.name = model, tokenizer, facts, name
        self._parking, self._settings = parking, chosen
        self._sight = getattr(model, "sight", None)
        self.plan: Plan | None = None
        self.suggested_options: dict[str, Any] = {}
        """The sampling that the model suggests: see `Runner.suggested_options`."""
        self.observers: list[Observer] = []
        """Functions that are called with every ended request (see `mlxrunner.profiling`)."""
        self.shown_as: Callable[[], Any] = lambda: self
        """A function that returns what observers get as the runner."""
        options = cache_options(chosen, whole=False)
        check_quantized(model, options)
        self._adapted = engine_for(
            model,
            options,
            max_sequences=max_sequences,
            capacity=-(-self.kv_cache_tokens // max_sequences),
            max_batch=self.prefill_step,
            depends_on_chunks=bool(facts.depends_on_chunks),
        )
        try:
            self._scheduler = Scheduler(
                self._adapted,
                chosen,
                ended=self._ended,
                message_ends=np.array(sorted(tokenizer.message_ends), np.int32),
                parking=parking,
                is_reusable=not facts.depends_on_chunks,
                facts=None if self._sight is not None else facts,
                accounting=TokenAccounting(None if parking is None else parking.prefixes()),
            )
        except BaseException:
            self._adapted.close()
            raise

    @classmethod
    def load(
        cls,
        model: str | PathLike[str] = "demo",
        *,
        max_sequences: int,
        trust_remote_code: bool = False,
        pictures: bool = False,
        progress: LoadProgress = tell_nobody,
        **settings: Unpack[OpenKwargs],
    ) -> Self:
        """Load "demo", a model directory or a hub id, and make a runner as `of` does.

        `pictures` and `progress`: see `Runner.load`. Raise ModelError, which names the missing or
        broken file, and the errors of `of`.
        """
        check_flag("trust_remote_code", trust_remote_code)
        check_flag("pictures", pictures)
        asked = OpenSettings.of(max_sequences=max_sequences, **settings)
        if pictures or is_run_by_mlx_vlm(name_of(model)):
            loaded = seeing(name_of(model), asked, progress, trust_remote_code=trust_remote_code)
        else:
            loaded = load_model(
                name_of(model), trust_remote_code=trust_remote_code, progress=progress
            )
        return cls.of(loaded, max_sequences=max_sequences, progress=progress, **settings)

    @classmethod
    def of(
        cls,
        loaded: LoadedModel,
        *,
        max_sequences: int,
        progress: LoadProgress = tell_nobody,
        **settings: Unpack[OpenKwargs],
    ) -> Self:
        """Make a runner for a loaded model. The settings are those of OpenSettings.

        `max_step_ms` is as for `Engine`. With `reserve` the runner allocates all cells now and
        runs the largest step once. Without `kv_cache_tokens` there are as many as fit into
        `memory` bytes, or with `reserve` into what the plan leaves, and at most `max_sequences *
        context`. Raise MemoryPlanError with the plan's table, before anything is allocated, if it
        does not fit, SessionError if the folder for parking can't be used, and OptionError if a
        draft model has another vocabulary.
        """
        given = {"max_step_ms": 0, **with_current_names(OpenSettings, settings)}
        asked = OpenSettings.of(max_sequences=max_sequences, **given)
        check_seeing(loaded.model, asked)
        seats = seats_of(loaded, asked)
        opening = EngineConfig.of(loaded, asked, 0 if seats is None else seats.nbytes)
        chosen = opening.settings()
        parts, parking = (loaded.model, loaded.tokenizer, loaded.facts), parking_of(loaded, chosen)
        try:
            runner = cls(*parts, parking=parking, name=loaded.name, **chosen.engine)
        except BaseException:
            if parking is not None:
                parking.close()
            raise
        runner.suggested_options = dict(loaded.suggested)
        runner.guess_with(seats)
        try:
            if chosen.reserve:
                cells = runner.kv_cache_tokens
                progress(f"trying the longest step, at the end of {cells} tokens", 0, None)
                opening = replace(opening, asked=chosen)
                runner.plan = opening.reserve(runner._adapted, runner.kv_cache_tokens)
                runner.prefill_step = runner.plan.prefill_step
                runner._scheduler.composer.most = runner.prefill_step
            plan = runner.plan or opening.plan(runner.kv_cache_tokens)
            device.wire(loaded.model, plan.wired(chosen.wire))
        except BaseException:
            runner.close()
            raise
        return runner

    @property
    def slots(self) -> Sequence[Slot]:
        """The slots, one for each sequence."""
        return self._scheduler.slots

    @property
    def num_slots(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        """Tokens that the slots hold; a token that several slots share counts for each."""
        return sum(len(slot.tokens) for slot in self.slots)

    @property
    def used_bytes(self) -> int:
        """Bytes of the keys and values in use."""
        return self._scheduler.residents.used_bytes

    @property
    def steps(self) -> int:
        """The number of steps so far."""
        return self._scheduler.ticks

    @property
    def is_idle(self) -> bool:
        """True if the last step had nothing to dispatch."""
        return self._scheduler.is_idle

    @property
    def settings(self) -> dict[str, Any]:
        """The options that decide what is stored."""
        return {
            **vars(self._settings),
            "parks": self._parking is not None,
            "park_bytes": 0 if self._parking is None else self._parking.limit,
            "ways": sorted(set(self._adapted.ways)),
            "splits": self._adapted.can_split,
        }

    @property
    def parked_in(self) -> Path | None:
        """The folder of parked conversations; None: they are lost."""
        return None if self._parking is None else self._parking.folder

    @property
    def keeps_parked(self) -> bool:
        """True if `parked_in` is found again after a restart. Else it goes with this process."""
        return self._parking is not None and self._parking.is_kept

    @property
    def parked_bytes(self) -> int:
        """Bytes on disk of parked conversations."""
        return 0 if self._parking is None else self._parking.bytes

    @property
    def why_alone(self) -> str | None:
        """Why a step carries one request only, with this model; None if it may carry several."""
        return self._adapted.why_alone

    def attend_at_once(self) -> None:
        """Compute each attention as one product from now on, never in parts.

        Parts (`mlxrunner.cache.pool.attention_split`) add their sums in another order.
        """
        self._adapted.can_split = False

    def guess_with(self, seats: DraftCachePool | None) -> None:
        """Let a draft model guess from now on; None: none does."""
        sources = self._scheduler.sources
        if sources is not None:
            sources.model = seats

    @property
    def draft_bytes(self) -> int:
        """Bytes of the draft model with all that it may store."""
        sources = self._scheduler.sources
        seats = None if sources is None else sources.model
        return seats.nbytes if isinstance(seats, DraftCachePool) else 0

    def __repr__(self) -> str:
        if self.owner.is_closed:
            return f"{type(self).__name__}({self.name!r}, closed)"
        running, slots = len(self._scheduler.requests), len(self.slots)
        busy = f"{running} of {slots} slots busy"
        return f"{type(self).__name__}({self.name!r}, context={self.context}, {busy})"

    def close(self) -> None:
        """Cancel all requests, free what the slots hold, and restore the model.

        A second call is allowed, also after an interrupt.
        """
        if self.owner.is_closed:
            return
        self.owner.check()
        try:
            for request in list(self._scheduler.requests):
                self.cancel(request)
            self._scheduler.offload_tasks.stop()
            if self._parking is not None and self._parking.is_kept:
                self._scheduler.residents.park_all()
        finally:
            self.guess_with(None)
            self._scheduler.drop()
            self._adapted.close()
            if self._parking is not None:
                self._parking.close()
        self.model = self._adapted.model = None
        self.owner.close()

    def submit(self, prompt: Prompt, **options: Unpack[SubmitKwargs]) -> EngineHandle:
        """Begin a request. Prompt and options are those of `Runner.generate`, without callbacks.

        Raise NoFreeSlotError if every slot has a request, and CacheFullError if there is no room
        to begin before another one has ended.
        """
        self.owner.check()
        return self._begin(self.prepare(prompt, dict(options)))

    def run_each(self, requests: Iterable[tuple[Prompt, dict[str, Any]]]) -> Iterator[Result]:
        self.owner.check()
        listed("requests", requests, '[("Hello", {"max_tokens": 9})]')
        return Owned(self._run_each(requests), self.owner)

    def _enqueue(self, prompt: Prompt, options: dict[str, Any]) -> EngineHandle:
        self.owner.check()
        return self._begin_when_possible(self.prepare(prompt, options))

    def _give_up(self, handle: AnswerHandle) -> None:
        self.owner.do(handle.cancel)  # an iterator may be dropped in any thread

    def _begin_when_possible(self, request: ActiveRequest) -> EngineHandle:
        while True:
            try:
                return self._begin(request)
            except (NoFreeSlotError, CacheFullError):
                if not self._scheduler.requests:
                    raise
                self.step()
                request.clock.postpone()

    def _begin(self, request: ActiveRequest) -> EngineHandle:
        self.admit(request)
        return EngineHandle(self.owner, self._scheduler, request)

    def admit(self, request: ActiveRequest) -> None:
        """Begin a prepared request. Raise NoFreeSlotError or CacheFullError if it has to wait."""
        self.owner.check()
        if not self._scheduler.requests:
            mx.reset_peak_memory()
        request.active_bytes = mx.get_active_memory()
        self._scheduler.admit(request)

    def cancel(self, request: ActiveRequest) -> None:
        """End a request without affecting the others."""
        self.owner.check()
        self._scheduler.cancel(request)

    def step(self) -> None:
        """Run one forward pass for all requests.

        An error in it ends the request that makes it fail, with a StepFailedError: the requests
        of the step run again in halves. An interrupt ends all of them.
        """
        self.owner.check()
        self._scheduler.step()

    def save_idle(self) -> None:
        """Write idle conversations to disk for a moment, so that a crash does not lose them."""
        self.owner.check()
        self._scheduler.save_idle()

    @property
    def save_in_s(self) -> float | None:
        """Seconds until `save_idle` has something to do; None: nothing before the next turn."""
        return self._scheduler.save_in_s

    def tell_first(self, on_first: Callable[[], object]) -> None:
        """Call `on_first` in each step that has read first tokens, before it dispatches."""
        self._scheduler.on_first = on_first

    def prepare(self, prompt: Prompt, given: dict[str, Any]) -> ActiveRequest:
        """Tokenize a prompt and check its options. Any thread may do that."""
        began = time.perf_counter()
        priority: Priority = given.pop("priority", "interactive")
        deadline: float | None = given.pop("deadline", None)
        check_turn(priority, deadline)
        request = prepare(
            prompt,
            GenerateOptions.of(**given),
            tokenizer=self.tokenizer,
            facts=self.facts,
            context=self.context,
            began=began,
        )
        answer = AnswerStream(self.tokenizer, request.tokens, request.options, request.limit)
        active = ActiveRequest.of(request, answer)
        active.priority, active.deadline, active.asked = priority, deadline, began
        return active

    def _ended(
        self, request: ActiveRequest, reason: FinishReason | None, error: str | None
    ) -> Usage:
        clock = request.clock
        usage = request.usage(
            trimmed_tokens=request.trimmed,
            prefill_s=clock.first - clock.tokenized if request.answer.count else 0.0,
            cache_bytes=self._scheduler.residents.allocated_bytes,
            used_bytes=self.used_bytes,
        )
        if self.observers:
            tell(
                self.observers,
                self.shown_as() or self,
                lambda: _observation(request, usage, reason, error),
            )
        if self._sight is not None:
            request.prompt = replace(request.prompt, views=None)
            self._sight.settle()
        return usage


def _observation(
    request: ActiveRequest, usage: Usage, reason: FinishReason | None, error: str | None
) -> Observation:
    clock = request.clock
    # One span, because its steps also serve other requests.
    prefill = (clock.lookup_began + clock.lookup_s, clock.first, usage.evaluated_tokens)
    chunks = [prefill] if request.answer.count else []
    return request.observation(usage, reason, error, chunks=chunks, scheduling=request.scheduling)


class EngineHandle:
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
