"""The Stepper: many requests at once on one model, driven step by step by one thread.

A prefix that several requests share is stored and read once. Each step runs one row of tokens
through the model: a token of each request that decodes, and pieces of the prompts of the others.
The next step is dispatched before the tokens of the last one are read. There is no thread:
iterating a handle drives the steps of all requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

import mlx.core as mx
import numpy as np

from mlxrunner.cache.layers.factory import check_quantized
from mlxrunner.config.option import check_flag, check_kind, listed, with_current_names
from mlxrunner.engine.observation import Observer, tell, usage_of
from mlxrunner.engine.owner import Owned, Owner
from mlxrunner.engine.run import drafted
from mlxrunner.errors import CacheFullError, NoFreeSlotError
from mlxrunner.loading import cache_options
from mlxrunner.memory.plan import Plan
from mlxrunner.models.facts import ModelFacts, is_run_by_mlx_vlm
from mlxrunner.models.load import LoadedModel, load_model
from mlxrunner.models.resolve import name_of
from mlxrunner.options import SubmitKwargs
from mlxrunner.parallel.draft_model import seats_of
from mlxrunner.parallel.driven import DrivenHandle
from mlxrunner.parallel.opening import Opening, check_seeing, parking_of, seeing
from mlxrunner.parallel.reception import Reception
from mlxrunner.parallel.rows.proof import engine_for
from mlxrunner.parallel.scheduling.request import ActiveRequest
from mlxrunner.parallel.scheduling.scheduler import Scheduler
from mlxrunner.parallel.scheduling.slots import Slot
from mlxrunner.parallel.settings import EngineKwargs, EngineSettings, OpenKwargs, OpenSettings
from mlxrunner.parallel.several import Answer, Several
from mlxrunner.results import FinishReason, Result, Usage
from mlxrunner.speculation.seats import DraftSeats
from mlxrunner.tokenizer import Tokenizer
from mlxrunner.tokenizer.prompt import Prompt

if TYPE_CHECKING:
    from mlxrunner.cache.disk.disk_cache import DiskCache


class Stepper(Several):
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
        """Make a runner from loaded parts; `Stepper.load` is the usual way.

        The settings are those of EngineSettings, but a step may take any time unless `max_step_ms`
        is given; None: as long as keeps the speed of the answers, see
        `mlxrunner.parallel.scheduling.pace`. `context` is the most tokens of one prompt and its
        answer. `parking`: where conversations go that are given up; None: they are lost. Raise
        OptionError for numbers that are out of range, and for `kv_bits` that the model can't have.
        """
        check_kind("facts", facts, ModelFacts, "use Stepper.load, which finds them")
        given = {"max_step_ms": 0, **with_current_names(EngineSettings, settings)}
        chosen = EngineSettings.of(max_sequences=max_sequences, **given).complete(facts.context)
        self.owner = Owner(type(self).__name__)
        self.context, self.kv_cache_tokens = chosen.context or 0, chosen.kv_cache_tokens or 0
        self.max_step_ms, self.prefill_step = chosen.max_step_ms, chosen.step
        self.model, self.tokenizer, self.facts, self.name = model, tokenizer, facts, name
        self._parking, self._settings = parking, chosen
        self._sight = getattr(model, "sight", None)
        self._reception = Reception(tokenizer, facts, self.context)
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
        **settings: Unpack[OpenKwargs],
    ) -> Self:
        """Load "demo", a model directory or a hub id, and make a runner as `of` does.

        `pictures`: see `Runner.load`. Raise ModelError, which names the missing or broken file, and
        the errors of `of`.
        """
        check_flag("trust_remote_code", trust_remote_code)
        check_flag("pictures", pictures)
        asked = OpenSettings.of(max_sequences=max_sequences, **settings)
        if pictures or is_run_by_mlx_vlm(name_of(model)):
            loaded = seeing(name_of(model), asked, trust_remote_code=trust_remote_code)
        else:
            loaded = load_model(name_of(model), trust_remote_code=trust_remote_code)
        return cls.of(loaded, max_sequences=max_sequences, **settings)

    @classmethod
    def of(cls, loaded: LoadedModel, *, max_sequences: int, **settings: Unpack[OpenKwargs]) -> Self:
        """Make a runner for a loaded model. The settings are those of OpenSettings.

        `max_step_ms` is as for `Stepper`. With `reserve` the runner allocates all cells now and
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
        opening = Opening.of(loaded, asked, 0 if seats is None else seats.nbytes)
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
                runner.plan = opening.reserve(runner._adapted, runner.kv_cache_tokens)
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

    def guess_with(self, seats: DraftSeats | None) -> None:
        """Let a draft model guess from now on; None: none does."""
        sources = self._scheduler.sources
        if sources is not None:
            sources.model = seats

    @property
    def draft_bytes(self) -> int:
        """Bytes of the draft model with all that it may store."""
        sources = self._scheduler.sources
        seats = None if sources is None else sources.model
        return seats.nbytes if isinstance(seats, DraftSeats) else 0

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
            self._scheduler.errands.stop()
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

    def submit(self, prompt: Prompt, **options: Unpack[SubmitKwargs]) -> DrivenHandle:
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

    def _enqueue(self, prompt: Prompt, options: dict[str, Any]) -> DrivenHandle:
        self.owner.check()
        return self._begin_when_possible(self.prepare(prompt, options))

    def _give_up(self, handle: Answer) -> None:
        self.owner.do(handle.cancel)  # an iterator may be dropped in any thread

    def _begin_when_possible(self, request: ActiveRequest) -> DrivenHandle:
        while True:
            try:
                return self._begin(request)
            except (NoFreeSlotError, CacheFullError):
                if not self._scheduler.requests:
                    raise
                self.step()
                request.clock.postpone()

    def _begin(self, request: ActiveRequest) -> DrivenHandle:
        self.admit(request)
        return DrivenHandle(self.owner, self._scheduler, request)

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

    def tell_first(self, on_first: Callable[[], object]) -> None:
        """Call `on_first` in each step that has read first tokens, before it dispatches."""
        self._scheduler.on_first = on_first

    def prepare(self, prompt: Prompt, given: dict[str, Any]) -> ActiveRequest:
        """Tokenize a prompt and check its options. Any thread may do that."""
        return self._reception.prepare(prompt, given)

    def _ended(
        self, request: ActiveRequest, reason: FinishReason | None, error: str | None
    ) -> Usage:
        usage = self._usage(request)
        if self.observers:
            tell(
                self.observers,
                self.shown_as() or self,
                lambda: request.observation(usage, reason, error),
            )
        if self._sight is not None:
            request.prompt = replace(request.prompt, views=None)
            self._sight.settle()
        return usage

    def _usage(self, request: ActiveRequest) -> Usage:
        clock = request.clock
        return usage_of(
            request.lookup,
            clock,
            request.answer.count,
            request.prompt.earlier,
            evaluated_tokens=request.evaluated,
            trimmed_tokens=request.trimmed,
            shifted_tokens=request.shifted,
            reevaluated_tokens=request.reevaluated,
            prefill_s=clock.first - clock.tokenized if request.answer.count else 0.0,
            cache_bytes=self._scheduler.residents.allocated_bytes,
            used_bytes=self.used_bytes,
            peak_bytes=mx.get_peak_memory(),
            **drafted(request.drafting),
        )
