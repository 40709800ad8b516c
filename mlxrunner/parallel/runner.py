"""ParallelRunner: many requests at once on one model, beside `Runner`; a prefix that several share is stored and read once.

Each step is one row of tokens through the model: a token of each request that is decoding, and pieces of the prompts of those that
are not yet. The next step is dispatched before the tokens of the last one are read. There is no thread: whoever iterates a handle
drives the steps of all.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from mlxrunner import device
from mlxrunner.answer import Answer, Clock
from mlxrunner.cache.factory import CacheOptions, layouts_of
from mlxrunner.cache.lookup import WINDOW, Lookup, explained
from mlxrunner.cache.sequences import END, Batch, CacheFullError
from mlxrunner.cache.tokens import TokenArray
from mlxrunner.config import GenerateOptions
from mlxrunner.constrain import constraint_of
from mlxrunner.errors import ContextLengthError, FormError, OptionError, PromptError
from mlxrunner.events import FinishReason, Usage, log_lookup
from mlxrunner.models.facts import ModelFacts
from mlxrunner.models.load import LoadedModel, load_model
from mlxrunner.observation import Observer, tell, usage_of
from mlxrunner.overflow import Shift
from mlxrunner.parallel.adapt import WINDOWS_KEEP, Adapted
from mlxrunner.parallel.handle import Handle
from mlxrunner.parallel.request import Request, Result, Step
from mlxrunner.parallel.slots import NoFreeSlotError, Slot, choose, share
from mlxrunner.plan import Batch as WorstBatch
from mlxrunner.plan import Plan
from mlxrunner.reserve import choose as choose_plan
from mlxrunner.reserve import demand_of, must_fit, weights_of
from mlxrunner.sampling import Decoded, NextToken, Sampled, dispatch
from mlxrunner.tokenizer import Tokenizer
from mlxrunner.tokenizer.prompt import Prompt, prepare, system_tokens

DEFAULT_MAX_BATCH = 1024
T = TypeVar("T")
AHEAD = 4
"""Requests per slot that `run_each` has read and not given back yet, at most."""


class ParallelRunner:
    """`max_sequences` requests at once, each of up to `capacity` tokens, `max_batch` tokens a step. Use as a context manager, or `close`.

    Not for several threads. NotSupportedError for models with layers that can't share a row: run those one at a time.
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
        self.capacity = capacity or facts.context
        self.cells = cells or max_sequences * self.capacity
        self.max_batch = min(max_batch or DEFAULT_MAX_BATCH, max_sequences * self.capacity)
        if max_sequences < 1 or self.capacity < 2 or self.max_batch < max_sequences:
            raise OptionError(
                f"max_sequences {max_sequences}, capacity {self.capacity}, max_batch {self.max_batch}: at least one sequence of "
                "two tokens is needed, and a step has to hold a token of each"
            )
        self.model, self.tokenizer, self.facts, self.name = model, tokenizer, facts, name
        self.slots = [Slot(number) for number in range(max_sequences)]
        share_of_cells = -(-self.cells // max_sequences)
        self._adapted = Adapted(model, max_sequences=max_sequences, capacity=share_of_cells, max_batch=self.max_batch)
        self.plan: Plan | None = None
        self.observer: Observer | None = None
        """Is told of every request after it has ended (see `mlxrunner.profiling`)."""
        self._requests: list[Request] = []
        self._pending: Step | None = None
        self._ticks = 0

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
        return cls.of(loaded, max_sequences=max_sequences, capacity=capacity, max_batch=max_batch, cells=cells, reserve=reserve)

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
            layout if layout.most_rows is None else replace(layout, most_rows=len(self.slots) * layout.checkpoint_rows + windows)
            for layout in layouts_of(self.model, CacheOptions())
        ]
        demand = demand_of(
            self.model, loaded.config, CacheOptions(), self.max_batch, weights=weights_of(self.model), checkpoint_budget=0
        )
        demand = replace(demand, layouts=layouts)
        offered = device.offered_bytes()
        must_fit(choose_plan(demand, self.cells, self.max_batch, offered=offered, limit=self.cells))
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        batch = Batch(list(range(self.max_batch)), [0] * self.max_batch)
        logits = self._adapted.forward(mx.zeros((self.max_batch,), mx.int32), batch, [self.max_batch - 1], reserve=True)
        mx.eval(logits, self._adapted.state())
        peak, stored = mx.get_peak_memory(), sum(group.nbytes for group in self._adapted.groups)
        mx.clear_cache()
        measured = replace(demand, batch=WorstBatch(max(0, peak - before - stored), is_measured=True))
        plan = must_fit(choose_plan(measured, self.cells, self.max_batch, offered=offered, limit=self.cells))
        device.set_limits(plan.total, measured.batch.fixed)
        return plan

    @property
    def settings(self) -> dict[str, Any]:
        """The options that decide what is stored."""
        return {"context": self.capacity, "cells": self.cells, "max_sequences": len(self.slots), "max_batch": self.max_batch}

    def explain_loss(self, reason: str, by: str, tokens: TokenArray) -> None:
        """An entry that was there before is none of the slots' affair."""

    def __enter__(self) -> ParallelRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what runs, free the cells, and give the model back as it was."""
        for request in list(self._requests):
            self.cancel(request)
        self._pending = None
        self._adapted.close()

    def submit(self, prompt: Prompt, **options: Any) -> Handle:
        """Begin a request; prompt and options as in `Runner.generate`, but for its callbacks and overflow="error".

        NoFreeSlotError if every slot has a request, CacheFullError if there might not be room to its end.
        """
        return Handle(self, self._admit(prompt, options))

    def run(self, prompts: Sequence[Prompt], **options: Any) -> list[Result]:
        """All answers, in the order of the prompts; as many at a time as there are slots."""
        return list(self.run_each((prompt, options) for prompt in prompts))

    def run_each(self, requests: Iterable[tuple[Prompt, dict[str, Any]]]) -> Iterator[Result]:
        """As `run`, each prompt with options of its own. Of `requests` as many are read as can run, and a few of whose answers wait."""
        handles: deque[Handle] = deque()
        for prompt, options in requests:
            handles.append(self._submit_when_possible(prompt, options))
            while handles[0].finished or len(handles) > AHEAD * len(self.slots):
                yield handles.popleft().result()
                if not handles:
                    break
        while handles:
            yield handles.popleft().result()

    def _submit_when_possible(self, prompt: Prompt, options: dict[str, Any]) -> Handle:
        prompt = prepare(self.tokenizer, prompt)  # once, however long it waits
        while True:
            try:
                return self.submit(prompt, **options)
            except (NoFreeSlotError, CacheFullError):
                if not self._requests:
                    raise
                self.step()

    def cancel(self, request: Request) -> None:
        """End a request without touching the others."""
        if not request.finished:
            self._retire(request)

    def step(self) -> None:
        """Dispatch the next forward pass, then read the tokens of the one before."""
        self._follow_sources()
        dispatched = self._dispatch()
        before, self._pending = self._pending, dispatched
        if before is not None:
            for request, sampled in zip(before.requests, before.sampled, strict=True):
                if not request.finished:
                    self._deliver(request, sampled)

    def _admit(self, prompt: Prompt, given: dict[str, Any]) -> Request:
        began = time.perf_counter()
        options = GenerateOptions.of(**given)
        if options.overflow == "error":
            raise OptionError("overflow: a parallel runner can stop or shift, but not fail")
        prepared = prepare(self.tokenizer, prompt)
        tokens = prepared.tokens
        self._check(tokens)
        keep = system_tokens(self.tokenizer, prompt, tokens) if options.keep is None else options.keep
        shift = Shift(self.capacity, keep) if options.overflow == "shift" else None
        clock = Clock(began, time.perf_counter())
        self._follow_sources()  # who waits for a slot that is free again goes on first: it may be given away now
        choice = choose(self.slots, tokens)
        slot, room = choice.slot, self.capacity - len(tokens)
        limit = (options.max_tokens or self.capacity) if options.overflow == "shift" else min(options.max_tokens or room, room)
        self._check_room(len(tokens) - choice.matched + limit, (choice.source.number, choice.matched if choice.ready else 0))
        next_token = NextToken(options, self.facts.vocab, constraint=constraint_of(options, self.tokenizer, self.facts.vocab))
        if not self._requests:
            mx.reset_peak_memory()
        clock.lookup_began = time.perf_counter()
        answer, found = Answer(self.tokenizer, tokens, options, limit), Lookup(len(tokens), 0, 0, 0)
        request = Request(slot, tokens, options, limit, answer, clock, next_token, prepared, found)
        request.active_bytes = mx.get_active_memory()
        request.shift = shift
        request.history = mx.array(tokens) if next_token.needs_history else None
        request.trimmed = len(slot.tokens)
        slot.is_busy, slot.planned = True, tokens
        if choice.ready:
            self._resume(request, choice.source, choice.matched)
        else:
            request.source = (choice.source, choice.matched)
        clock.lookup_s = time.perf_counter() - clock.tokenized
        self._requests.append(request)
        return request

    def _check(self, tokens: TokenArray) -> None:
        if len(tokens) == 0:
            raise PromptError("the prompt is empty: at least one token is needed")
        if len(tokens) >= self.capacity:
            raise ContextLengthError(len(tokens), self.capacity)
        if self.facts.vocab and int(tokens.max()) >= self.facts.vocab:
            raise PromptError(f"token id {int(tokens.max())} is beyond the model's vocabulary of {self.facts.vocab}")

    def _check_room(self, wanted: int, prefix: tuple[int, int]) -> None:
        """That `wanted` more tokens will fit, whatever the others still do; idle slots give way, but for the `prefix` that is shared."""
        if self.cells >= len(self.slots) * self.capacity:
            return
        busy = [slot.number for slot in self.slots if slot.is_busy]
        used = max(group.num_used_by(busy, prefix) for group in self._adapted.groups)
        coming = sum(max(0, r.left - r.promised) + r.limit - r.sampled for r in self._requests)
        if used + coming + wanted > self.cells:
            raise CacheFullError("this request", wanted, max(0, self.cells - used - coming), self.cells)

    def _resume(self, request: Request, source: Slot, matched: int) -> None:
        """Give the request's slot the first `matched` tokens of `source`, as far as it can go on from there."""
        slot, cache = request.slot, self._adapted.cache
        before, dropped, limited_by = len(source.tokens), tuple(source.tokens[matched : matched + WINDOW]), None
        cached = min(matched, len(request.prompt) - 1)
        if source is not slot:
            cache.copy_prefix(source.number, slot.number, cached)
        else:
            cache.remove(slot.number, cached, END)
        if not cache.can_resume(slot.number, cached):
            cache.remove(slot.number, 0, END)
            cached, limited_by = 0, "sliding"
        self._adapted.expect(slot.number, len(request.prompt) - cached + request.limit)
        slot.tokens.truncate(0)
        slot.tokens.extend(request.prompt[:cached])
        request.place = cached
        request.lookup = explained(Lookup(len(request.prompt), before, matched, cached, limited_by=limited_by, dropped=dropped))
        request.trimmed = max(0, request.trimmed - cached) if source is slot else request.trimmed
        log_lookup(len(request.prompt), matched, cached)

    def _follow_sources(self) -> None:
        """Requests that wait for a prefix: copy it once it is there, or as much as there is when its request has ended."""
        for request in self._requests:
            if request.source is None:
                continue
            slot, matched = request.source
            if len(slot.tokens) >= matched or not slot.is_busy or slot.planned.size < matched:
                request.source = None
                again = np.array_equal(slot.tokens.array[:matched], request.prompt[: len(slot.tokens.array[:matched])])
                self._resume(request, slot, min(matched, len(slot.tokens)) if again else 0)

    def _dispatch(self) -> Step | None:
        """Build and dispatch the next row; None if there is nothing to do.

        After an error or an interrupt in it nobody knows what was written: the requests are ended and their slots forgotten.
        """
        try:
            return self._build_and_dispatch()
        except BaseException as error:
            self._pending = None
            name = type(error).__name__ if isinstance(error, Exception) else None
            for request in list(self._requests):
                self._retire(request, error=name)
            for slot in self.slots:
                self._adapted.cache.remove(slot.number, 0, END)
                slot.tokens.truncate(0)
            raise

    def _build_and_dispatch(self) -> Step | None:
        decoding = [r for r in self._requests if r.source is None and not r.left and r.sampled < r.limit]
        prefilling = [r for r in self._requests if r.source is None and r.left]
        self._ticks += 1
        shares = share(self.max_batch - len(decoding), [r.left for r in prefilling], self._ticks) if prefilling else []
        parts: list[mx.array] = []
        positions: list[int] = []
        sequences: list[int] = []
        rows: list[int] = []
        sampling: list[Request] = []
        for request in decoding:
            self._make_room(request)
            parts.append(self._last_sampled(request))
            self._place(request, 1, positions, sequences)
            rows.append(len(positions) - 1)
            sampling.append(request)
        for request, count in zip(prefilling, shares, strict=True):
            if count:
                piece = request.prompt[request.place : request.place + count]
                parts.append(mx.array(piece))
                request.slot.tokens.extend(piece)
                self._place(request, count, positions, sequences)
                if not request.left:
                    rows.append(len(positions) - 1)
                    sampling.append(request)
        if not positions:
            return None
        row, batch = mx.concatenate(parts), Batch(positions, sequences)
        logits = self._with_room(lambda: self._adapted.forward(row, batch, rows or [0]))
        step = self._sample(sampling, logits)
        dispatch([array for sampled in step.sampled for array in sampled.arrays] or [logits])
        return step

    def _with_room(self, act: Callable[[], T]) -> T:
        """Idle slots give way, the least recently used first, where there is no room for what `act` does."""
        while True:
            try:
                return act()
            except CacheFullError:
                idle = [slot for slot in self.slots if not slot.is_busy and slot.tokens]
                if not idle:
                    raise
                oldest = min(idle, key=lambda slot: slot.last_used)
                self._adapted.cache.remove(oldest.number, 0, END)
                oldest.tokens.truncate(0)

    def _place(self, request: Request, count: int, positions: list[int], sequences: list[int]) -> None:
        positions += range(request.place, request.place + count)
        sequences += [request.slot.number] * count
        request.place += count

    def _last_sampled(self, request: Request) -> mx.array:
        """The token that was sampled last, `[1]`, maybe still on its way; its value is recorded when it is read."""
        assert self._pending is not None
        index = next(i for i, other in enumerate(self._pending.requests) if other is request)
        token = self._pending.sampled[index].token.astype(mx.int32)
        if request.history is not None:
            request.history = mx.concatenate([request.history, token])
        return token

    def _sample(self, requests: list[Request], logits: mx.array) -> Step:
        """A token for each request, with its own sampler; plain greedy ones all at once. One that can't go on ends with its error."""
        best = mx.argmax(logits, axis=-1) if any(r.next_token.is_plain for r in requests) else None
        step = Step([], [])
        for row, request in enumerate(requests):
            try:
                if best is not None and request.next_token.is_plain:
                    sampled = Sampled(best[row : row + 1])
                else:
                    sampled = request.next_token(logits[row : row + 1], request.history)
            except FormError as error:
                request.error = error
                self._retire(request, error=type(error).__name__)
                continue
            request.sampled += 1
            step.requests.append(request)
            step.sampled.append(sampled)
        return step

    def _deliver(self, request: Request, sampled: Sampled) -> None:
        decoded: Decoded = sampled.decoded(sampled.read())
        chunk = request.answer.take(decoded, request.clock)
        if chunk.finish_reason is None:
            request.chunks.append(chunk)
        if request.place > len(request.slot.tokens):
            request.slot.tokens.append(decoded.token)  # its forward pass was dispatched with this step
        if chunk.finish_reason is not None:
            request.chunks.append(replace(chunk, usage=self._retire(request, chunk.finish_reason)))

    def _retire(self, request: Request, reason: FinishReason | None = None, error: str | None = None) -> Usage:
        """Free the slot; its tokens stay for whoever shares them. A token of it that is still on its way is dropped."""
        request.finished = True
        self._requests.remove(request)
        slot = request.slot
        slot.is_busy, slot.last_used = False, self._ticks
        slot.planned = slot.planned[:0]
        self._adapted.cache.remove(slot.number, len(slot.tokens), END)
        usage = self._usage(request)
        if self.observer is not None:
            tell(self.observer, self, lambda: request.observation(usage, reason, error))
        return usage

    def _make_room(self, request: Request) -> None:
        """Before a token that would not fit any more: drop the oldest half after what is kept."""
        if request.shift is None or request.place < self.capacity:
            return
        assert request.shift is not None
        keep, discard = request.shift.keep, request.shift.discard(request.place)
        self._with_room(lambda: self._adapted.cache.remove(request.slot.number, keep, keep + discard))
        tokens = list(request.slot.tokens)
        request.slot.tokens.truncate(keep)
        request.slot.tokens.extend(tokens[keep + discard :])
        request.place -= discard
        request.shifted += discard

    def _usage(self, request: Request) -> Usage:
        clock, groups = request.clock, self._adapted.groups
        return usage_of(
            request.lookup, clock, request.answer.count,
            trimmed_tokens=request.trimmed, shifted_tokens=request.shifted, reevaluated_tokens=0,
            prefill_s=clock.first - clock.tokenized if request.answer.count else 0.0,
            cache_bytes=sum(group.nbytes for group in groups), used_bytes=sum(group.used_bytes for group in groups),
            peak_bytes=mx.get_peak_memory(),
        )  # fmt: skip
