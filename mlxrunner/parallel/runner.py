"""ParallelRunner: many requests at once on one model, beside `Runner`; a prefix that several share is stored and read once.

Each step is one row of tokens through the model: a token of each request that is decoding, and pieces of the prompts of those that
are not yet. The next step is dispatched before the tokens of the last one are read. There is no thread: whoever iterates a handle
drives the steps of all.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrunner import device
from mlxrunner.answer import Answer, Clock
from mlxrunner.cache.factory import CacheOptions, layouts_of
from mlxrunner.cache.lookup import Lookup
from mlxrunner.cache.sequences import Batch, CacheFullError, NotSupportedError
from mlxrunner.cache.tokens import TokenArray
from mlxrunner.config import GenerateOptions
from mlxrunner.constrain import constraint_of
from mlxrunner.errors import ContextLengthError, OptionError, PromptError
from mlxrunner.events import FinishReason, Usage
from mlxrunner.models.chunks import DEPENDS
from mlxrunner.models.facts import ModelFacts
from mlxrunner.models.load import LoadedModel, load_model
from mlxrunner.observation import Observer, tell, usage_of
from mlxrunner.overflow import Shift
from mlxrunner.owner import Owned, Owner
from mlxrunner.parallel.adapt import WINDOWS_KEEP, Adapted
from mlxrunner.parallel.handle import Handle
from mlxrunner.parallel.request import Request, Result
from mlxrunner.parallel.scheduler import Scheduler
from mlxrunner.parallel.slots import NoFreeSlotError, Slot
from mlxrunner.plan import Batch as WorstBatch
from mlxrunner.plan import Plan
from mlxrunner.reserve import choose as choose_plan
from mlxrunner.reserve import demand_of, must_fit, weights_of
from mlxrunner.sampling import NextToken, dispatch
from mlxrunner.tokenizer import Tokenizer
from mlxrunner.tokenizer.prompt import Prompt, prepare, system_tokens

DEFAULT_MAX_BATCH = 1024
AHEAD = 4
"""Requests per slot that `run_each` has read and not given back yet, at most."""


class ParallelRunner:
    """`max_sequences` requests at once, each of up to `capacity` tokens, `max_batch` tokens a step. Use as a context manager, or `close`.

    All calls come from the thread that opened it: WrongThreadError from any other. NotSupportedError for models with layers that can't
    share a row: run those one at a time.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        facts: ModelFacts,
        *,
        max_sequences: int,
        capacity: int | None = None,
        max_batch: int | None = None,
        cells: int | None = None,
        name: str = "",
    ) -> None:
        """`cells`: tokens that are stored at most, of all sequences together, a shared one once; None: `max_sequences * capacity`, which
        is always enough. With fewer, a request for which there may not be room to its end is refused at once: CacheFullError."""
        self.owner = Owner("ParallelRunner")
        self.capacity = capacity or facts.context
        self.cells = cells or max_sequences * self.capacity
        self.max_batch = min(max_batch or DEFAULT_MAX_BATCH, max_sequences * self.capacity)
        if max_sequences < 1 or self.capacity < 2 or self.max_batch < max_sequences:
            raise OptionError(
                f"max_sequences {max_sequences}, capacity {self.capacity}, max_batch {self.max_batch}: at least one sequence of "
                "two tokens is needed, and a step has to hold a token of each"
            )
        if facts.depends_on_chunks:
            raise NotSupportedError(f"{DEPENDS}: run one at a time")
        self.model, self.tokenizer, self.facts, self.name = model, tokenizer, facts, name
        share_of_cells = -(-self.cells // max_sequences)
        self.plan: Plan | None = None
        self.observer: Observer | None = None
        """Is told of every request after it has ended (see `mlxrunner.profiling`)."""
        self._adapted = Adapted(
            model, max_sequences=max_sequences, capacity=share_of_cells, max_batch=self.max_batch
        )
        try:
            self._scheduler = Scheduler(
                self._adapted,
                max_sequences,
                capacity=self.capacity,
                cells=self.cells,
                max_batch=self.max_batch,
                ended=self._ended,
            )
        except BaseException:
            self._adapted.close()
            raise

    @classmethod
    def load(
        cls,
        model: str = "demo",
        *,
        max_sequences: int,
        capacity: int | None = None,
        max_batch: int | None = None,
        cells: int | None = None,
        reserve: bool = True,
        trust_remote_code: bool = False,
    ) -> ParallelRunner:
        """Load "demo", a directory or a hub id. `reserve`: allocate all cells and run the largest step once, now."""
        loaded = load_model(model, trust_remote_code=trust_remote_code)
        return cls.of(
            loaded,
            max_sequences=max_sequences,
            capacity=capacity,
            max_batch=max_batch,
            cells=cells,
            reserve=reserve,
        )

    @classmethod
    def of(
        cls,
        loaded: LoadedModel,
        *,
        max_sequences: int,
        capacity: int | None = None,
        max_batch: int | None = None,
        cells: int | None = None,
        reserve: bool = True,
    ) -> ParallelRunner:
        """On a model that is loaded already; MemoryPlanError, before anything is allocated, if the plan does not fit."""
        runner = cls(
            loaded.model, loaded.tokenizer, loaded.facts, max_sequences=max_sequences, capacity=capacity, max_batch=max_batch,
            cells=cells, name=loaded.name,
        )  # fmt: skip
        if reserve:
            try:
                runner.plan = runner._reserve(loaded)
            except BaseException:
                runner.close()
                raise
        return runner

    def _reserve(self, loaded: LoadedModel) -> Plan:
        """Hold the plan against what the device offers, allocate all cells, and run the largest step once with every cell in sight."""
        windows = len(self.slots) * WINDOWS_KEEP + self.max_batch
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
            self.max_batch,
            weights=weights_of(self.model),
            checkpoint_budget=0,
        )
        demand = replace(demand, layouts=layouts)
        offered = device.offered_bytes()
        must_fit(choose_plan(demand, self.cells, self.max_batch, offered=offered, limit=self.cells))
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        in_flight = [
            self._largest_step(),
            self._largest_step(),
        ]  # the second is dispatched before the first is read
        mx.eval(in_flight, self._adapted.state())
        peak, stored = mx.get_peak_memory(), sum(group.nbytes for group in self._adapted.groups)
        del in_flight
        mx.clear_cache()
        # A shift, between two steps, holds the moved half of a sequence, and its keys once more.
        shifted = stored * self.capacity // self.cells
        measured = replace(
            demand, batch=WorstBatch(max(0, peak - before - stored, shifted), is_measured=True)
        )
        plan = must_fit(
            choose_plan(measured, self.cells, self.max_batch, offered=offered, limit=self.cells)
        )
        device.set_limits(plan.total, measured.batch.fixed)
        return plan

    def _largest_step(self) -> list[mx.array]:
        """Dispatched: a full row with every cell in sight, and a token for each slot, sampled in the costliest way. Nothing is stored."""
        batch = Batch(list(range(self.max_batch)), [0] * self.max_batch)
        rows = range(self.max_batch - len(self.slots), self.max_batch)
        logits = self._adapted.forward(
            mx.zeros((self.max_batch,), mx.int32), batch, rows, reserve=True
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
        """One for each of the sequences."""
        return self._scheduler.slots

    @property
    def settings(self) -> dict[str, Any]:
        """The options that decide what is stored."""
        return {
            "context": self.capacity,
            "cells": self.cells,
            "max_sequences": len(self.slots),
            "max_batch": self.max_batch,
        }

    def attend_at_once(self) -> None:
        """From now on compute each attention as one product where it would be in parts (`mlxrunner.cache.split`): another order of sums."""
        self._adapted.can_split = False

    def explain_loss(self, reason: str, by: str, tokens: TokenArray) -> None:
        """An entry that was there before is none of the slots' affair."""

    def __enter__(self) -> ParallelRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what runs, free the cells, and give the model back as it was. May be called again, also after an interrupt."""
        self.owner.check()
        try:
            for request in list(self._scheduler.requests):
                self.cancel(request)
        finally:
            self._adapted.close()

    def submit(self, prompt: Prompt, **options: Any) -> Handle:
        """Begin a request; prompt and options as in `Runner.generate`, but for its callbacks.

        NoFreeSlotError if every slot has a request, CacheFullError if there might not be room to its end.
        """
        self.owner.check()
        return self._begin(self._request(prompt, options))

    def run(self, prompts: Sequence[Prompt], **options: Any) -> list[Result]:
        """All answers, in the order of the prompts; as many at a time as there are slots."""
        return list(self.run_each((prompt, options) for prompt in prompts))

    def run_each(self, requests: Iterable[tuple[Prompt, dict[str, Any]]]) -> Iterator[Result]:
        """As `run`, each prompt with options of its own. Of `requests` as many are read as can run, and a few of whose answers wait.

        What runs is cancelled when one of them can't be submitted or fails, or when the iterator is closed.
        """
        self.owner.check()
        return Owned(self._run_each(requests), self.owner)

    def _run_each(
        self, requests: Iterable[tuple[Prompt, dict[str, Any]]]
    ) -> Generator[Result, None, None]:
        handles: deque[Handle] = deque()
        try:
            for prompt, options in requests:
                handles.append(self._begin_when_possible(self._request(prompt, options)))
                while handles and (handles[0].finished or len(handles) > AHEAD * len(self.slots)):
                    yield handles.popleft().result()
            while handles:
                yield handles.popleft().result()
        finally:
            for handle in handles:
                self.owner.do(handle.cancel)  # an iterator may be dropped in any thread

    def _begin_when_possible(self, request: Request) -> Handle:
        while True:
            try:
                return self._begin(request)
            except (NoFreeSlotError, CacheFullError):
                if not self._scheduler.requests:
                    raise
                self.step()
                request.clock.postpone()

    def _begin(self, request: Request) -> Handle:
        if not self._scheduler.requests:
            mx.reset_peak_memory()
        request.active_bytes = mx.get_active_memory()
        self._scheduler.admit(request)
        return Handle(self, request)

    def cancel(self, request: Request) -> None:
        """End a request without touching the others."""
        self.owner.check()
        self._scheduler.cancel(request)

    def step(self) -> None:
        """One forward pass for all that run. Whatever goes wrong in it ends them all, with a StepFailedError each."""
        self.owner.check()
        self._scheduler.step()

    def _request(self, prompt: Prompt, given: dict[str, Any]) -> Request:
        began = time.perf_counter()
        options = GenerateOptions.of(**given)
        prepared = prepare(self.tokenizer, prompt)
        tokens, shifted = prepared.tokens, 0
        shift = self._shift(prompt, tokens, options)
        self._check(tokens)
        if shift is not None and len(tokens) >= self.capacity:
            shifted = shift.discard(len(tokens))
            tokens = np.concatenate([tokens[: shift.keep], tokens[shift.keep + shifted :]])
        elif len(tokens) >= self.capacity:
            raise ContextLengthError(len(tokens), self.capacity)
        clock, room = Clock(began, time.perf_counter()), self.capacity - len(tokens)
        limit = (
            (options.max_tokens or self.capacity)
            if shift
            else min(options.max_tokens or room, room)
        )
        next_token = NextToken(
            options,
            self.facts.vocab,
            constraint=constraint_of(options, self.tokenizer, self.facts.vocab),
        )
        return Request(
            tokens, options, limit, Answer(self.tokenizer, tokens, options, limit), clock, next_token, prepared,
            Lookup(len(tokens), 0, 0, 0), shift=shift, shifted=shifted, history=mx.array(tokens) if next_token.needs_history else None,
        )  # fmt: skip

    def _shift(self, prompt: Prompt, tokens: TokenArray, options: GenerateOptions) -> Shift | None:
        if options.overflow != "shift":
            return None
        return Shift(
            self.capacity,
            system_tokens(self.tokenizer, prompt, tokens) if options.keep is None else options.keep,
        )

    def _check(self, tokens: TokenArray) -> None:
        if len(tokens) == 0:
            raise PromptError("the prompt is empty: at least one token is needed")
        if self.facts.vocab and int(tokens.max()) >= self.facts.vocab:
            raise PromptError(
                f"token id {int(tokens.max())} is beyond the model's vocabulary of {self.facts.vocab}"
            )

    def _ended(self, request: Request, reason: FinishReason | None, error: str | None) -> Usage:
        usage = self._usage(request)
        if self.observer is not None:
            tell(self.observer, self, lambda: request.observation(usage, reason, error))
        return usage

    def _usage(self, request: Request) -> Usage:
        clock, groups = request.clock, self._adapted.groups
        return usage_of(
            request.lookup, clock, request.answer.count, request.prepared.earlier, evaluated_tokens=request.evaluated,
            trimmed_tokens=request.trimmed, shifted_tokens=request.shifted, reevaluated_tokens=request.reevaluated,
            prefill_s=clock.first - clock.tokenized if request.answer.count else 0.0,
            cache_bytes=sum(group.nbytes for group in groups), used_bytes=sum(group.used_bytes for group in groups),
            peak_bytes=mx.get_peak_memory(),
        )  # fmt: skip
