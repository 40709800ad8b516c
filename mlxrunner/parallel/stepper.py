"""The Stepper: many requests at once on one model, driven step by step by one thread.

A prefix that several requests share is stored and read once. Each step runs one row of tokens
through the model: a token of each request that decodes, and pieces of the prompts of the others.
The next step is dispatched before the tokens of the last one are read. There is no thread:
iterating a handle drives the steps of all requests.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, Self, Unpack

import mlx.core as mx

from mlxrunner.cache.layers.factory import CacheOptions, layouts_of
from mlxrunner.cache.shared.sequences import Batch
from mlxrunner.config.arguments import check_flag, check_kind, listed
from mlxrunner.engine.answer import AnswerStream
from mlxrunner.engine.observation import Observer, tell, usage_of
from mlxrunner.engine.owner import Owned, Owner
from mlxrunner.engine.requests import Request, prepare
from mlxrunner.engine.sampling import NextToken, dispatch
from mlxrunner.errors import CacheFullError, NoFreeSlotError, NotSupportedError, OptionError
from mlxrunner.memory.plan import Batch as WorstBatch
from mlxrunner.memory.plan import Plan
from mlxrunner.memory.reserve import choose as choose_plan
from mlxrunner.memory.reserve import demand_of, must_fit, weights_of
from mlxrunner.models.chunks import DEPENDS
from mlxrunner.models.facts import ModelFacts
from mlxrunner.models.load import LoadedModel, load_model
from mlxrunner.models.resolve import name_of
from mlxrunner.options import MOST_TOKENS, GenerateOptions, Option, SubmitKwargs
from mlxrunner.parallel.adapt import Adapted
from mlxrunner.parallel.engine import WINDOWS_KEEP
from mlxrunner.parallel.handle import Handle
from mlxrunner.parallel.pace import StepPace
from mlxrunner.parallel.request import ActiveRequest
from mlxrunner.parallel.scheduler import Scheduler
from mlxrunner.parallel.slots import Slot
from mlxrunner.parallel.turns import Priority
from mlxrunner.parallel.turns import check as check_turn
from mlxrunner.results import FinishReason, Result, Usage
from mlxrunner.system import device
from mlxrunner.tokenizer import Tokenizer
from mlxrunner.tokenizer.prompt import Prompt

DEFAULT_PREFILL_STEP = 1024
AHEAD = 4
"""Most requests per slot that `run_each` has read and whose results it has not yielded yet."""


class Stepper:
    """A runner of up to `max_sequences` requests at once, of up to `context` tokens each.

    The thread that opened it owns it; calls from any other raise WrongThreadError. Use it as a
    context manager, or call `close`, after which calls raise ClosedError. A model with layers that
    can't share a row raises NotSupportedError: run its requests one at a time with `Runner`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        facts: ModelFacts,
        *,
        max_sequences: int,
        context: int | None = None,
        prefill_step: int | None = None,
        cells: int | None = None,
        step_ms: float | None = 0,
        name: str = "",
    ) -> None:
        """Make a runner from loaded parts; `Stepper.load` is the usual way.

        `context` is the most tokens of one prompt and its answer, `prefill_step` the most tokens of
        one step of all requests. `cells` is the most tokens stored for all requests together, where
        a shared token counts once. Its default, `max_sequences * context`, is always enough. With
        fewer cells, a request that finds no room is refused with CacheFullError. `step_ms`: the
        milliseconds that a step may take while something decodes; 0: any number; None: as many as
        keep the speed of the answers (see `StepPace`). Raise OptionError for numbers that are too
        small, and NotSupportedError for a model that can't share a row.
        """
        check_kind("facts", facts, ModelFacts, "use Stepper.load, which finds them")
        Option(low=1).check("max_sequences", max_sequences)
        for option, value in (("context", context), ("cells", cells)):
            if value is not None:
                Option(low=2, high=MOST_TOKENS).check(option, value)
        if prefill_step is not None:
            Option(low=max_sequences, high=MOST_TOKENS).check("prefill_step", prefill_step)
        self.owner = Owner(type(self).__name__)
        self.context = context or facts.context
        self.cells = cells or max_sequences * self.context
        if step_ms is not None:
            Option(float, low=0).check("step_ms", step_ms)
        self.step_ms = step_ms
        self.prefill_step = min(prefill_step or DEFAULT_PREFILL_STEP, max_sequences * self.context)
        if self.prefill_step < max_sequences:
            raise OptionError(
                f"max_sequences: {max_sequences} is out of range, a step of {self.prefill_step} "
                "tokens has to hold one of each"
            )
        if facts.depends_on_chunks:
            raise NotSupportedError(f"{DEPENDS}: run one at a time")
        self.model, self.tokenizer, self.facts, self.name = model, tokenizer, facts, name
        share_of_cells = -(-self.cells // max_sequences)
        self.plan: Plan | None = None
        self.suggested_options: dict[str, Any] = {}
        """The sampling that the model suggests: see `Runner.suggested_options`."""
        self.observers: list[Observer] = []
        """Functions that are called with every ended request (see `mlxrunner.profiling`)."""
        self._adapted = Adapted(
            model, max_sequences=max_sequences, capacity=share_of_cells, max_batch=self.prefill_step
        )
        try:
            self._scheduler = Scheduler(
                self._adapted,
                max_sequences,
                capacity=self.context,
                cells=self.cells,
                max_batch=self.prefill_step,
                ended=self._ended,
                pace=StepPace(self.prefill_step, step_ms),
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
        prefill_step: int | None = None,
        cells: int | None = None,
        step_ms: float | None = 0,
        reserve: bool = True,
        trust_remote_code: bool = False,
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
            prefill_step=prefill_step,
            cells=cells,
            step_ms=step_ms,
            reserve=reserve,
        )

    @classmethod
    def of(
        cls,
        loaded: LoadedModel,
        *,
        max_sequences: int,
        context: int | None = None,
        prefill_step: int | None = None,
        cells: int | None = None,
        step_ms: float | None = 0,
        reserve: bool = True,
    ) -> Self:
        """Make a runner for a loaded model. See `Stepper.load` for the arguments.

        Raise MemoryPlanError, before anything is allocated, if the plan does not fit.
        """
        runner = cls(
            loaded.model,
            loaded.tokenizer,
            loaded.facts,
            max_sequences=max_sequences,
            context=context,
            prefill_step=prefill_step,
            cells=cells,
            step_ms=step_ms,
            name=loaded.name,
        )
        runner.suggested_options = dict(loaded.suggested)
        if reserve:
            try:
                runner.plan = runner._reserve(loaded)
            except BaseException:
                runner.close()
                raise
        return runner

    def _reserve(self, loaded: LoadedModel) -> Plan:
        """Check the plan against the device's offer, and allocate all cells.

        To measure it, run the largest step, which sees every cell.
        """
        windows = len(self.slots) * WINDOWS_KEEP + self.prefill_step
        layouts = [
            layout
            if layout.most_rows is None
            else replace(layout, most_rows=len(self.slots) * layout.checkpoint_rows + windows)
            for layout in layouts_of(self.model, CacheOptions())
        ]
        demand = demand_of(
            self.model,
            loaded.config,
            CacheOptions(),
            self.prefill_step,
            weights=weights_of(self.model),
            checkpoint_budget=0,
        )
        demand = replace(demand, layouts=layouts)
        offered = device.offered_bytes()
        must_fit(
            choose_plan(demand, self.cells, self.prefill_step, offered=offered, limit=self.cells)
        )
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
        measured = replace(
            demand, batch=WorstBatch(max(0, peak - before - stored, shifted), is_measured=True)
        )
        plan = must_fit(
            choose_plan(measured, self.cells, self.prefill_step, offered=offered, limit=self.cells)
        )
        device.set_limits(plan.total, measured.batch.fixed)
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
    def settings(self) -> dict[str, Any]:
        """The options that decide what is stored."""
        return {
            "context": self.context,
            "cells": self.cells,
            "max_sequences": len(self.slots),
            "prefill_step": self.prefill_step,
            "step_ms": self.step_ms,
        }

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
        finally:
            self._adapted.close()
        self.model = self._adapted.model = None
        self.owner.close()

    def complete(self, prompt: Prompt, **options: Unpack[SubmitKwargs]) -> Result:
        """Run one request to its end, beside the running ones, and return its result.

        Raise the errors of `submit`. If the call is interrupted, the request is cancelled.
        """
        handle = self.submit(prompt, **options)
        try:
            return handle.result()
        finally:
            handle.cancel()

    def submit(self, prompt: Prompt, **options: Unpack[SubmitKwargs]) -> Handle:
        """Begin a request. Prompt and options are those of `Runner.generate`, without callbacks.

        Raise NoFreeSlotError if every slot has a request, and CacheFullError if the request might
        not find room to its end.
        """
        self.owner.check()
        return self._begin(self._request(prompt, dict(options)))

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
        self.owner.check()
        listed("requests", requests, '[("Hello", {"max_tokens": 9})]')
        return Owned(self._run_each(requests), self.owner)

    def _run_each(
        self, requests: Iterable[tuple[Prompt, dict[str, Any]]]
    ) -> Generator[Result, None, None]:
        handles: deque[Handle] = deque()
        try:
            for number, pair in enumerate(requests):
                prompt, options = _pair(number, pair)
                handles.append(self._begin_when_possible(self._request(prompt, options)))
                while handles and (handles[0].finished or len(handles) > AHEAD * len(self.slots)):
                    yield handles.popleft().result()
            while handles:
                yield handles.popleft().result()
        finally:
            for handle in handles:
                self.owner.do(handle.cancel)  # an iterator may be dropped in any thread

    def _begin_when_possible(self, request: ActiveRequest) -> Handle:
        while True:
            try:
                return self._begin(request)
            except (NoFreeSlotError, CacheFullError) as error:
                if error.never or not self._scheduler.requests:
                    raise
                self.step()
                request.clock.postpone()

    def _begin(self, request: ActiveRequest) -> Handle:
        if not self._scheduler.requests:
            mx.reset_peak_memory()
        request.active_bytes = mx.get_active_memory()
        self._scheduler.admit(request)
        return Handle(self.owner, self._scheduler, request)

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

    def _request(self, prompt: Prompt, given: dict[str, Any]) -> ActiveRequest:
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
            tell(self.observers, self, lambda: request.observation(usage, reason, error))
        return usage

    def _usage(self, request: ActiveRequest) -> Usage:
        clock, groups = request.clock, self._adapted.groups
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
            cache_bytes=sum(group.nbytes for group in groups),
            used_bytes=sum(group.used_bytes for group in groups),
            peak_bytes=mx.get_peak_memory(),
        )


def _pair(number: int, request: Any) -> tuple[Prompt, dict[str, Any]]:
    """Return request `number` of `run_each`. Raise OptionError unless it is a pair."""
    match request:
        case (prompt, Mapping() as options):
            return prompt, dict(options)
    raise OptionError(
        f"request {number} has to be a pair of a prompt and its options, such as "
        f'("Hello", {{"max_tokens": 9}}), not {request!r:.80}'
    )
