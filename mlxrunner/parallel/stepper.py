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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

import mlx.core as mx
import numpy as np

from mlxrunner.cache.layers.factory import CacheOptions
from mlxrunner.cache.shared.sequences import Batch
from mlxrunner.config.arguments import check_flag, check_kind, check_path, listed
from mlxrunner.engine.answer import AnswerStream
from mlxrunner.engine.observation import Observer, tell, usage_of
from mlxrunner.engine.owner import Owned, Owner
from mlxrunner.engine.requests import Request, prepare
from mlxrunner.engine.sampling import NextToken, dispatch
from mlxrunner.errors import CacheFullError, NoFreeSlotError, OptionError
from mlxrunner.memory.plan import Batch as WorstBatch
from mlxrunner.memory.plan import Demand, Plan
from mlxrunner.memory.reserve import choose as choose_plan
from mlxrunner.memory.reserve import must_fit
from mlxrunner.memory.slots import cells_within, demand_of_slots, must_have_cells
from mlxrunner.models.facts import ModelFacts
from mlxrunner.models.load import LoadedModel, load_model
from mlxrunner.models.resolve import name_of
from mlxrunner.options import (
    MOST_TOKENS,
    GenerateOptions,
    Option,
    RunnerKwargs,
    RunnerSettings,
    SubmitKwargs,
)
from mlxrunner.parallel.driven import DrivenHandle
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
from mlxrunner.system import device
from mlxrunner.tokenizer import Tokenizer
from mlxrunner.tokenizer.prompt import Prompt

if TYPE_CHECKING:
    from mlxrunner.stored.parking import Parking

DEFAULT_PREFILL_STEP = 1024
CHECKPOINT_BUDGET = 2**30
"""Bytes for the checkpoints of all slots if no plan gives another number."""


class SlotsKwargs(RunnerKwargs, total=False):
    """The settings of `Stepper.of`, as keyword arguments, for type checkers."""

    context: int | None
    cells: int | None
    memory: int | None
    park_bytes: int
    park_folder: str | PathLike[str] | None
    step_ms: float | None
    reserve: bool


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
        _check_room(max_sequences, context, cells, memory)
        if "prefill_step" in settings:
            limits = Option(low=max_sequences, high=MOST_TOKENS)
            limits.check("prefill_step", settings["prefill_step"])
        prefill_step = settings.setdefault("prefill_step", DEFAULT_PREFILL_STEP)
        chosen = RunnerSettings.of(context=context, **settings)
        self.owner = Owner(type(self).__name__)
        self.context = context or facts.context
        self.cells = cells or max_sequences * self.context
        if step_ms is not None:
            Option(float, low=0).check("step_ms", step_ms)
        self.step_ms = step_ms
        self.prefill_step = min(prefill_step, max_sequences * self.context)
        if self.prefill_step < max_sequences:
            raise OptionError(
                f"max_sequences: {max_sequences} is out of range, a step of {self.prefill_step} "
                "tokens has to hold one of each"
            )
        self.model, self.tokenizer, self.facts, self.name = model, tokenizer, facts, name
        share_of_cells = -(-self.cells // max_sequences)
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
            capacity=share_of_cells,
            max_batch=self.prefill_step,
            slack=chosen.rewind_slack,
            kv_bits=chosen.kv_bits,
            depends_on_chunks=bool(facts.depends_on_chunks),
        )
        try:
            self._scheduler = Scheduler(
                self._adapted,
                max_sequences,
                capacity=self.context,
                cells=self.cells,
                max_batch=self.prefill_step,
                ended=self._ended,
                message_ends=np.array(sorted(tokenizer.message_ends), np.int32),
                checkpoint_budget=budget,
                checkpoint_interval=chosen.checkpoint_interval,
                memory=memory,
                parking=parking,
                is_reusable=not facts.depends_on_chunks,
                pace=StepPace(self.prefill_step, 0 if facts.depends_on_chunks else step_ms),
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
        context: int | None = None,
        cells: int | None = None,
        memory: int | None = None,
        park_bytes: int = 0,
        park_folder: str | PathLike[str] | None = None,
        step_ms: float | None = 0,
        reserve: bool = True,
        trust_remote_code: bool = False,
        **settings: Unpack[RunnerKwargs],
    ) -> Self:
        """Load "demo", a model directory or a hub id. See `Stepper` for the arguments.

        With `reserve` the runner allocates all cells now and runs the largest step once. Raise
        ModelError, which names the missing or broken file, or MemoryPlanError with the plan's table
        if the plan does not fit.
        """
        check_flag("reserve", reserve)
        check_flag("trust_remote_code", trust_remote_code)
        loaded = load_model(name_of(model), trust_remote_code=trust_remote_code)
        return cls.of(
            loaded,
            max_sequences=max_sequences,
            context=context,
            cells=cells,
            memory=memory,
            park_bytes=park_bytes,
            park_folder=park_folder,
            step_ms=step_ms,
            reserve=reserve,
            **settings,
        )

    @classmethod
    def of(
        cls,
        loaded: LoadedModel,
        *,
        max_sequences: int,
        context: int | None = None,
        cells: int | None = None,
        memory: int | None = None,
        park_bytes: int = 0,
        park_folder: str | PathLike[str] | None = None,
        step_ms: float | None = 0,
        reserve: bool = True,
        **settings: Unpack[RunnerKwargs],
    ) -> Self:
        """Make a runner for a loaded model. See `Stepper.load` for the arguments.

        Without `cells` there are as many as fit into `memory` bytes, or with `reserve` into what
        the plan leaves, and at most `max_sequences * context`. `park_bytes`: the most bytes on disk
        for conversations that find no place; 0: they are lost. `park_folder`: their folder, where
        they are found again by the next runner; None: a private one that goes with the runner.
        Raise MemoryPlanError, before anything is allocated, if the plan does not fit, and
        SessionError if the folder can't be used.
        """
        chosen = RunnerSettings.of(context=context, **settings)
        _check_room(max_sequences, context, cells, memory)
        limit = context or loaded.facts.context
        step = min(settings.get("prefill_step", DEFAULT_PREFILL_STEP), max_sequences * limit)
        offered = device.offered_bytes()
        demand = demand_of_slots(
            loaded.model,
            loaded.config,
            CacheOptions(rewind_slack=chosen.rewind_slack, kv_bits=chosen.kv_bits),
            slots=max_sequences,
            context=limit,
            prefill_step=step,
            checkpoint_budget=chosen.checkpoint_budget,
            offered=offered,
        )
        most = max_sequences * limit
        if memory is not None and cells is None:
            cells = cells_within(demand, memory, most)
            must_have_cells(cells, memory, demand)
        elif reserve and cells is None:
            cells = choose_plan(demand, None, step, offered=offered, limit=most).context
        settings["checkpoint_budget"] = demand.checkpoint_budget
        if reserve:
            most = cells or most
            must_fit(choose_plan(demand, most, step, offered=offered, limit=most))
        parking = _parking(loaded, park_bytes, park_folder, chosen)
        runner = cls(
            loaded.model,
            loaded.tokenizer,
            loaded.facts,
            max_sequences=max_sequences,
            context=context,
            cells=cells,
            memory=memory,
            parking=parking,
            step_ms=step_ms,
            name=loaded.name,
            **settings,
        )
        runner.suggested_options = dict(loaded.suggested)
        if reserve:
            try:
                runner.plan = runner._reserve(demand, offered)
            except BaseException:
                runner.close()
                raise
        return runner

    def _reserve(self, demand: Demand, offered: int) -> Plan:
        """Allocate all cells, run the largest step once to measure it, and return the plan.

        The step sees every cell. Raise MemoryPlanError if it needs more than the device offers.
        """
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        # As in a run, the second step is dispatched before the first is read.
        in_flight = [self._largest_step(), self._largest_step()]
        mx.eval(in_flight, self._adapted.state())
        peak, stored = mx.get_peak_memory(), sum(group.nbytes for group in self._adapted.groups)
        del in_flight
        mx.clear_cache()
        # A shift, between two steps, holds the moved half of a sequence, and its keys once more.
        shifted = stored * self.context // self.cells
        batch = WorstBatch(max(0, peak - before - stored, shifted), is_measured=True)
        plan = must_fit(
            choose_plan(
                replace(demand, batch=batch),
                self.cells,
                self.prefill_step,
                offered=offered,
                limit=self.cells,
            )
        )
        device.set_limits(plan.total, batch.fixed)
        return plan

    def _largest_step(self) -> list[mx.array]:
        """Dispatch a full row that sees every cell, and sample a token for each slot.

        The sampling is the costliest possible. Nothing is stored.
        """
        batch = Batch(list(range(self.prefill_step)), [0] * self.prefill_step)
        rows = range(self.prefill_step - len(self.slots), self.prefill_step)
        logits = self._adapted.forward(
            mx.zeros((self.prefill_step,), mx.int32), batch, rows, reserve=True
        )
        costliest = NextToken(
            GenerateOptions.of(temperature=1.0, top_p=0.9, logprobs=5, seed=0), logits.shape[-1]
        )
        arrays = [
            array for row in range(len(rows)) for array in costliest(logits[row : row + 1]).arrays
        ]
        dispatch(arrays)
        return arrays

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
        """Cancel all requests, free the cells, and restore the model.

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
            self._adapted.close()
            if self._parking is not None:
                self._parking.close()
        self.model = self._adapted.model = None
        self.owner.close()

    def submit(self, prompt: Prompt, **options: Unpack[SubmitKwargs]) -> DrivenHandle:
        """Begin a request. Prompt and options are those of `Runner.generate`, without callbacks.

        Raise NoFreeSlotError if every slot has a request, and CacheFullError if the request might
        not find room to its end.
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

        An error in it ends all of them, each with a StepFailedError.
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


def _check_room(
    max_sequences: int, context: int | None, cells: int | None, memory: int | None
) -> None:
    Option(low=1).check("max_sequences", max_sequences)
    for option, value in (("context", context), ("cells", cells)):
        if value is not None:
            Option(low=2, high=MOST_TOKENS).check(option, value)
    if memory is not None:
        Option(low=1).check("memory", memory)


def _parking(
    loaded: LoadedModel, limit: int, folder: str | PathLike[str] | None, settings: RunnerSettings
) -> Parking | None:
    """Open the parking of a model; None if `limit` is 0."""
    Option(low=0).check("park_bytes", limit)
    if folder is not None:
        check_path("park_folder", folder)
    if not limit:
        return None
    from mlxrunner.models.fingerprint import fingerprint
    from mlxrunner.stored.parking import Parking

    stored = {"kv_bits": str(settings.kv_bits), "cells": "shared"}
    place = None if folder is None else Path(folder)
    return Parking(place, fingerprint(loaded.folder) | stored, limit=limit)
