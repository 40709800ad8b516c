"""The Stepper: many requests at once on one model, driven step by step by one thread.

A prefix that several requests share is stored and read once. Each step runs one row of tokens
through the model: a token of each request that decodes, and pieces of the prompts of the others.
The next step is dispatched before the tokens of the last one are read. There is no thread:
iterating a handle drives the steps of all requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Self, Unpack

import mlx.core as mx
import numpy as np

from mlxrunner.config.arguments import check_flag, check_kind, listed
from mlxrunner.engine.answer import AnswerStream
from mlxrunner.engine.observation import Observer, tell, usage_of
from mlxrunner.engine.owner import Owned, Owner
from mlxrunner.engine.requests import Request, prepare
from mlxrunner.errors import CacheFullError, NoFreeSlotError
from mlxrunner.memory.plan import Plan
from mlxrunner.models.facts import ModelFacts
from mlxrunner.models.load import LoadedModel, load_model
from mlxrunner.models.resolve import name_of
from mlxrunner.options import (
    GenerateOptions,
    RunnerKwargs,
    RunnerSettings,
    SubmitKwargs,
)
from mlxrunner.parallel.driven import DrivenHandle
from mlxrunner.parallel.opening import (
    DEFAULT_PREFILL_STEP,
    Opening,
    SizesKwargs,
    SlotsKwargs,
    check_sizes,
    must_hold_all,
    parking_of,
    settings_of,
)
from mlxrunner.parallel.rows.proof import engine_for
from mlxrunner.parallel.scheduling.claims import NEVER
from mlxrunner.parallel.scheduling.pace import StepPace
from mlxrunner.parallel.scheduling.request import ActiveRequest
from mlxrunner.parallel.scheduling.scheduler import Scheduler
from mlxrunner.parallel.scheduling.slots import Slot
from mlxrunner.parallel.scheduling.turns import Priority
from mlxrunner.parallel.scheduling.turns import check as check_turn
from mlxrunner.parallel.several import Answer, Several
from mlxrunner.results import FinishReason, Result, Usage
from mlxrunner.tokenizer import Tokenizer
from mlxrunner.tokenizer.prompt import Prompt

if TYPE_CHECKING:
    from mlxrunner.stored.parking import Parking

CHECKPOINT_BUDGET = 2**30
"""Bytes for the checkpoints of all slots if no plan gives another number."""


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
        context: int | None = None,
        cells: int | None = None,
        memory: int | None = None,
        parking: Parking | None = None,
        step_ms: float | None = 0,
        name: str = "",
        **settings: Unpack[RunnerKwargs],
    ) -> None:
        """Make a runner from loaded parts; `Stepper.load` is the usual way.

        `context` is the most tokens of one prompt and its answer. `cells` is the most tokens stored
        for all requests together, where a shared token counts once. Its default,
        `max_sequences * context`, is always enough. `memory`: bytes of cells, states and
        checkpoints beyond which idle conversations are given up; None: no limit. `parking`: where
        these go; None: they are lost. `step_ms`: the milliseconds that a step may take while
        something decodes; 0: any number; None: as many as keep the speed of the answers, see
        `mlxrunner.parallel.scheduling.pace`. The other settings are those of RunnerSettings;
        `prefill_step` is the most tokens of one step of all requests. Raise OptionError for numbers
        that are too small.
        """
        check_kind("facts", facts, ModelFacts, "use Stepper.load, which finds them")
        sizes = {"context": context, "cells": cells, "memory": memory, "step_ms": step_ms}
        check_sizes(max_sequences, sizes | settings)
        prefill_step = settings.setdefault("prefill_step", DEFAULT_PREFILL_STEP)
        chosen = RunnerSettings.of(context=context, **settings)
        self.owner = Owner(type(self).__name__)
        self.context = context or facts.context
        self.cells = cells or max_sequences * self.context
        self.step_ms = step_ms
        self.prefill_step = min(prefill_step, max_sequences * self.context)
        must_hold_all(self.prefill_step, max_sequences)
        self.model, self.tokenizer, self.facts, self.name = model, tokenizer, facts, name
        budget = chosen.checkpoint_budget
        budget = CHECKPOINT_BUDGET if budget is None else budget
        self._parking = parking
        self._settings = replace(chosen, context=self.context, checkpoint_budget=budget)
        self.plan: Plan | None = None
        self.suggested_options: dict[str, Any] = {}
        """The sampling that the model suggests: see `Runner.suggested_options`."""
        self.observers: list[Observer] = []
        """Functions that are called with every ended request (see `mlxrunner.profiling`)."""
        self.shown_as: Callable[[], Any] = lambda: self
        """A function that returns what observers get as the runner."""
        self._adapted = engine_for(
            model,
            max_sequences=max_sequences,
            capacity=-(-self.cells // max_sequences),
            max_batch=self.prefill_step,
            context=self.context,
            slack=chosen.rewind_slack,
            kv_bits=chosen.kv_bits,
            depends_on_chunks=bool(facts.depends_on_chunks),
        )
        try:
            self._scheduler = self._scheduled(max_sequences, memory)
        except BaseException:
            self._adapted.close()
            raise

    def _scheduled(self, max_sequences: int, memory: int | None) -> Scheduler:
        """Return the scheduler of this runner, within `memory` bytes."""
        is_reusable = not self.facts.depends_on_chunks
        return Scheduler(
            self._adapted,
            max_sequences,
            capacity=self.context,
            cells=self.cells,
            max_batch=self.prefill_step,
            ended=self._ended,
            message_ends=np.array(sorted(self.tokenizer.message_ends), np.int32),
            checkpoint_budget=self._settings.checkpoint_budget or 0,
            checkpoint_interval=self._settings.checkpoint_interval,
            memory=memory,
            parking=self._parking,
            is_reusable=is_reusable,
            pace=StepPace(self.prefill_step, self.step_ms if is_reusable else 0),
        )

    @classmethod
    def load(
        cls,
        model: str | PathLike[str] = "demo",
        *,
        max_sequences: int,
        trust_remote_code: bool = False,
        **settings: Unpack[SlotsKwargs],
    ) -> Self:
        """Load "demo", a model directory or a hub id, and make a runner as `of` does.

        Raise ModelError, which names the missing or broken file, and the errors of `of`.
        """
        check_flag("trust_remote_code", trust_remote_code)
        loaded = load_model(name_of(model), trust_remote_code=trust_remote_code)
        return cls.of(loaded, max_sequences=max_sequences, **settings)

    @classmethod
    def of(
        cls,
        loaded: LoadedModel,
        *,
        max_sequences: int,
        park_bytes: int = 0,
        park_folder: str | PathLike[str] | None = None,
        reserve: bool = True,
        **sizes: Unpack[SizesKwargs],
    ) -> Self:
        """Make a runner for a loaded model. See `Stepper` for the other arguments.

        With `reserve` the runner allocates all cells now and runs the largest step once. Without
        `cells` there are as many as fit into `memory` bytes, or with `reserve` into what the plan
        leaves, and at most `max_sequences * context`. `park_bytes`: the most bytes on disk for
        conversations that find no place; 0: they are lost. `park_folder`: their folder, where they
        are found again by the next runner; None: a private one that goes with the runner. Raise
        MemoryPlanError with the plan's table, before anything is allocated, if the plan does not
        fit, and SessionError if the folder can't be used.
        """
        check_flag("reserve", reserve)
        check_sizes(max_sequences, sizes)
        chosen = settings_of(sizes)
        memory = sizes.get("memory")
        opening = Opening.of(
            loaded, max_sequences, chosen, sizes.get("prefill_step", DEFAULT_PREFILL_STEP), memory
        )
        sizes["cells"] = opening.cells(sizes.get("cells"), memory, reserve=reserve)
        sizes["checkpoint_budget"] = opening.demand.checkpoint_budget
        parking = parking_of(loaded, park_bytes, park_folder, chosen)
        try:
            runner = cls(
                loaded.model,
                loaded.tokenizer,
                loaded.facts,
                max_sequences=max_sequences,
                parking=parking,
                name=loaded.name,
                **sizes,
            )
        except BaseException:
            if parking is not None:
                parking.close()
            raise
        runner.suggested_options = dict(loaded.suggested)
        try:
            if reserve:
                runner.plan = opening.reserve(
                    runner._adapted, runner.cells, runner.context, max_sequences
                )
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
            "cells": self.cells,
            "max_sequences": len(self.slots),
            "prefill_step": self.prefill_step,
            "step_ms": self.step_ms,
            "memory": self._scheduler.residents.memory,
            "parks": self._scheduler.residents.parking is not None,
            "ways": sorted(set(self._adapted.ways)),
        }

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

        Parts (`mlxrunner.cache.shared.split`) add their sums in another order.
        """
        self._adapted.can_split = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
            if self._parking is not None and self._parking.is_kept:
                self._scheduler.residents.park_all()
        finally:
            self._scheduler.drop()
            self._adapted.close()
            if self._parking is not None:
                self._parking.close()
        self.model = self._adapted.model = None
        self.owner.close()

    def submit(self, prompt: Prompt, **options: Unpack[SubmitKwargs]) -> DrivenHandle:
        """Begin a request. Prompt and options are those of `Runner.generate`, without callbacks.

        Raise NoFreeSlotError if every slot has a request, and CacheFullError if there is no room
        to begin; its `never` is True if the request does not fit even alone.
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
            except (NoFreeSlotError, CacheFullError) as error:
                if error.never or not self._scheduler.requests:
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

    def prepare(self, prompt: Prompt, given: dict[str, Any]) -> ActiveRequest:
        """Tokenize a prompt and check its options. Any thread may do that.

        Raise CacheFullError if the request would not find room even alone.
        """
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
        self._limit_to_cells(request)
        most = min(len(request.tokens) + request.limit, self.context)
        if most > self.cells:
            raise CacheFullError("this request", most, self.cells, self.cells, NEVER, never=True)
        answer = AnswerStream(self.tokenizer, request.tokens, request.options, request.limit)
        active = ActiveRequest.of(request, answer)
        active.priority, active.deadline, active.asked = priority, deadline, began
        return active

    def _limit_to_cells(self, request: Request) -> None:
        """End an answer without a limit where all cells are its own."""
        room = self.cells - len(request.tokens)
        if request.options.max_tokens is None and request.shift is None and room > 0:
            request.limit = min(request.limit, room)
            request.context = min(request.context, self.cells)

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
        )
