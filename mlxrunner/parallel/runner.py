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
from itertools import accumulate
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from mlxrunner import device
from mlxrunner.answer import Answer, Clock
from mlxrunner.cache.factory import CacheOptions, layouts_of
from mlxrunner.cache.lookup import WINDOW, Lookup, explained
from mlxrunner.cache.sequences import END, Batch, CacheFullError, NotSupportedError
from mlxrunner.cache.tokens import TokenArray, common_prefix
from mlxrunner.config import GenerateOptions
from mlxrunner.constrain import constraint_of
from mlxrunner.errors import ContextFullError, ContextLengthError, FormError, MlxrunnerError, OptionError, PromptError
from mlxrunner.events import FinishReason, Usage, log_lookup
from mlxrunner.models.facts import ModelFacts
from mlxrunner.models.load import LoadedModel, load_model
from mlxrunner.observation import Observer, tell, usage_of
from mlxrunner.overflow import Shift
from mlxrunner.parallel.adapt import WINDOWS_KEEP, Adapted
from mlxrunner.parallel.handle import Handle
from mlxrunner.parallel.request import Request, Result, Step, StepFailedError
from mlxrunner.parallel.slots import Choice, NoFreeSlotError, Slot, choose, share
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
        self.plan: Plan | None = None
        self.observer: Observer | None = None
        """Is told of every request after it has ended (see `mlxrunner.profiling`)."""
        self._requests: list[Request] = []
        self._pending: Step | None = None
        self._ticks = 0
        self._adapted = Adapted(model, max_sequences=max_sequences, capacity=share_of_cells, max_batch=self.max_batch)

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
        in_flight = [self._largest_step(), self._largest_step()]  # the second is dispatched before the first is read
        mx.eval(in_flight, self._adapted.state())
        peak, stored = mx.get_peak_memory(), sum(group.nbytes for group in self._adapted.groups)
        del in_flight
        mx.clear_cache()
        # A shift, between two steps, holds the moved half of a sequence, and its keys once more.
        shifted = stored * self.capacity // self.cells
        measured = replace(demand, batch=WorstBatch(max(0, peak - before - stored, shifted), is_measured=True))
        plan = must_fit(choose_plan(measured, self.cells, self.max_batch, offered=offered, limit=self.cells))
        device.set_limits(plan.total, measured.batch.fixed)
        return plan

    def _largest_step(self) -> list[mx.array]:
        """Dispatched: a full row with every cell in sight, and a token for each slot, sampled in the costliest way. Nothing is stored."""
        batch = Batch(list(range(self.max_batch)), [0] * self.max_batch)
        rows = range(self.max_batch - len(self.slots), self.max_batch)
        logits = self._adapted.forward(mx.zeros((self.max_batch,), mx.int32), batch, rows, reserve=True)
        costliest = NextToken(GenerateOptions.of(temperature=1.0, top_p=0.9, logprobs=5, seed=0), logits.shape[-1])
        arrays = [array for row in range(len(rows)) for array in costliest(logits[row : row + 1]).arrays]
        dispatch(arrays)
        return arrays

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
        """Cancel what runs, free the cells, and give the model back as it was. May be called again, also after an interrupt."""
        try:
            for request in list(self._requests):
                self.cancel(request)
        finally:
            self._pending = None
            self._adapted.close()

    def submit(self, prompt: Prompt, **options: Any) -> Handle:
        """Begin a request; prompt and options as in `Runner.generate`, but for its callbacks.

        NoFreeSlotError if every slot has a request, CacheFullError if there might not be room to its end.
        """
        return Handle(self, self._admit(prompt, options))

    def run(self, prompts: Sequence[Prompt], **options: Any) -> list[Result]:
        """All answers, in the order of the prompts; as many at a time as there are slots."""
        return list(self.run_each((prompt, options) for prompt in prompts))

    def run_each(self, requests: Iterable[tuple[Prompt, dict[str, Any]]]) -> Iterator[Result]:
        """As `run`, each prompt with options of its own. Of `requests` as many are read as can run, and a few of whose answers wait.

        What runs is cancelled when one of them can't be submitted or fails, or when the iterator is closed.
        """
        handles: deque[Handle] = deque()
        try:
            for prompt, options in requests:
                handles.append(self._submit_when_possible(prompt, options))
                while handles and (handles[0].finished or len(handles) > AHEAD * len(self.slots)):
                    yield handles.popleft().result()
            while handles:
                yield handles.popleft().result()
        finally:
            for handle in handles:
                handle.cancel()

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
        """Dispatch the next forward pass, then read the tokens of the one before.

        After an error or an interrupt in it nobody knows what was written: all requests are ended, and what the slots hold is forgotten.
        """
        try:
            self._follow_sources()
            before, self._pending = self._pending, self._dispatch()
            for request, sampled in before or ():
                if not request.finished:
                    self._deliver(request, sampled)
        except BaseException as error:
            self._forget_everything(error)
            raise

    def _forget_everything(self, error: BaseException) -> None:
        self._pending = None
        for slot in self.slots:
            slot.tokens.truncate(0)
        why = StepFailedError(f"a step that carried this request, and others, was ended by {_named(error)}: submit it again")
        for request in list(self._requests):
            self._fail(request, why, type(error).__name__ if isinstance(error, Exception) else None)
        for slot in self.slots:
            self._clear(slot)

    def _clear(self, slot: Slot) -> None:
        """Forget the tokens of a slot."""
        slot.tokens.truncate(0)
        self._adapted.cache.remove(slot.number, 0, END)

    def _admit(self, prompt: Prompt, given: dict[str, Any]) -> Request:
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
        limit = (options.max_tokens or self.capacity) if shift else min(options.max_tokens or room, room)
        next_token = NextToken(options, self.facts.vocab, constraint=constraint_of(options, self.tokenizer, self.facts.vocab))
        self._follow_sources()  # who waits for a slot that is free again goes on first: it may be given away now
        choice = choose(self.slots, tokens, can_resume=self._can_resume)
        slot = choice.slot
        request = Request(
            slot, tokens, options, limit, Answer(self.tokenizer, tokens, options, limit), clock, next_token, prepared,
            Lookup(len(tokens), 0, 0, 0), tokens, trimmed=len(slot.tokens), shift=shift, shifted=shifted,
            history=mx.array(tokens) if next_token.needs_history else None,
        )  # fmt: skip
        self._check_room(request, choice)
        if not self._requests:
            mx.reset_peak_memory()
        request.active_bytes = mx.get_active_memory()
        try:
            clock.lookup_began = time.perf_counter()
            slot.is_busy, slot.planned = True, tokens
            self._follow(request, choice)
            clock.lookup_s = time.perf_counter() - clock.lookup_began
            self._requests.append(request)
        except BaseException:
            self._clear(slot)
            slot.is_busy, slot.planned = False, tokens[:0]
            raise
        return request

    def _shift(self, prompt: Prompt, tokens: TokenArray, options: GenerateOptions) -> Shift | None:
        if options.overflow != "shift":
            return None
        return Shift(self.capacity, system_tokens(self.tokenizer, prompt, tokens) if options.keep is None else options.keep)

    def _check(self, tokens: TokenArray) -> None:
        if len(tokens) == 0:
            raise PromptError("the prompt is empty: at least one token is needed")
        if self.facts.vocab and int(tokens.max()) >= self.facts.vocab:
            raise PromptError(f"token id {int(tokens.max())} is beyond the model's vocabulary of {self.facts.vocab}")

    def _check_room(self, request: Request, choice: Choice) -> None:
        """That it will fit, whatever the others still do; idle slots give way, but for the prefix that is shared."""
        if self.cells >= len(self.slots) * self.capacity:
            return
        shared = choice.matched if request.shift is None else 0
        wanted = request.coming_cells(self.capacity) - min(shared, len(request.prompt) - 1)
        busy = [slot.number for slot in self.slots if slot.is_busy]
        prefix = choice.source.number, shared if choice.ready else 0
        used = max(group.num_used_by(busy, prefix) for group in self._adapted.groups)
        coming = sum(other.coming_cells(self.capacity) for other in self._requests)
        if used + coming + wanted > self.cells:
            raise CacheFullError("this request", wanted, max(0, self.cells - used - coming), self.cells)

    def _can_resume(self, slot: Slot, matched: int) -> bool:
        return matched == 0 or self._adapted.cache.can_resume(slot.number, matched)

    def _follow(self, request: Request, choice: Choice) -> None:
        """Take what another slot has, or wait for what it will have."""
        if choice.ready:
            self._resume(request, choice.source, choice.matched)
        else:
            self._clear(request.slot)  # nobody may take what is going to be replaced
            request.source, request.promised = choice.source, choice.matched

    def _resume(self, request: Request, source: Slot, matched: int) -> None:
        """Give the request's slot the first `matched` tokens of `source`, as far as it can go on from there."""
        slot, cache = request.slot, self._adapted.cache
        before, dropped, limited_by = len(source.tokens), tuple(source.tokens[matched : matched + WINDOW]), None
        cached = min(matched, len(request.prompt) - 1)
        slot.tokens.truncate(0)
        if source is not slot:
            cache.copy_prefix(source.number, slot.number, cached)
        else:
            cache.remove(slot.number, cached, END)
        if not cache.can_resume(slot.number, cached):
            cache.remove(slot.number, 0, END)
            cached, limited_by = 0, "sliding"
        self._adapted.expect(slot.number, len(request.prompt) - cached + request.limit)
        slot.tokens.extend(request.prompt[:cached])
        request.place, request.source, request.promised = cached, None, 0
        request.lookup = explained(Lookup(len(request.prompt), before, matched, cached, limited_by=limited_by, dropped=dropped))
        request.trimmed = max(0, request.trimmed - cached) if source is slot else request.trimmed
        log_lookup(len(request.prompt), matched, cached)

    def _follow_sources(self) -> None:
        """Requests that wait for a prefix: share it once it is there; look again where it will not come any more."""
        for number, request in enumerate(self._requests):
            source, promised = request.source, request.promised
            if source is None:
                continue
            if common_prefix(source.tokens.array, request.prompt) >= promised:
                self._resume(request, source, promised)
            elif not source.is_busy or common_prefix(source.planned, request.prompt) < promised:
                ahead = [other.slot for other in self._requests[:number]]
                self._follow(
                    request, choose(self.slots, request.prompt, own=request.slot, ahead=ahead, can_resume=self._can_resume)
                )

    def _dispatch(self) -> Step | None:
        """Build and dispatch the next row; None if there is nothing to do. Where cells are missing, the youngest requests end."""
        self._ticks += 1
        for request in [request for request in self._requests if request.is_decoding]:
            try:
                self._make_room(request)
            except CacheFullError as error:
                self._fail(request, error)
        while row := self._row():
            try:
                return self._forward(row)
            except CacheFullError as error:
                self._fail(self._requests[-1], error)
        return None

    def _row(self) -> list[tuple[Request, int]]:
        """How many tokens of which requests go into the next step."""
        row = [(request, 1) for request in self._requests if request.is_decoding]
        prefilling = [request for request in self._requests if request.source is None and request.left]
        if prefilling:
            wanted = [request.left for request in prefilling]
            if self._adapted.has_windows:  # they forget: who shares a prefix has to take it while it is there
                wanted = [min(left, *self._waited_for(request, left)) for request, left in zip(prefilling, wanted, strict=True)]
            shares = share(self.max_batch - len(row), wanted, self._ticks)
            row += [(request, count) for request, count in zip(prefilling, shares, strict=True) if count]
        return row

    def _waited_for(self, request: Request, left: int) -> list[int]:
        """How far it is to the ends of the prefixes for which others wait."""
        ends = [other.promised - request.place for other in self._requests if other.source is request.slot]
        return [left, *(end for end in ends if end > 0)]

    def _forward(self, row: list[tuple[Request, int]]) -> Step:
        """Dispatch the forward pass of a row, and what samples from it."""
        ends = accumulate(count for _, count in row)
        sampling = {end - 1: request for (request, count), end in zip(row, ends, strict=True) if request.left <= count}
        batch = Batch(
            [position for request, count in row for position in range(request.place, request.place + count)],
            [request.slot.number for request, count in row for _ in range(count)],
        )
        tokens = mx.concatenate([request.coming_tokens(count) for request, count in row])
        logits = self._with_room(lambda: self._adapted.forward(tokens, batch, list(sampling) or [0]))
        for request, count in row:
            request.advance(count)
        step = self._sample(list(sampling.values()), logits)
        dispatch([array for _, sampled in step for array in sampled.arrays] or [logits])
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
                self._clear(min(idle, key=lambda slot: slot.last_used))

    def _sample(self, requests: list[Request], logits: mx.array) -> Step:
        """A token for each request, with its own sampler; plain greedy ones all at once. One that can't go on ends with its error."""
        best = mx.argmax(logits, axis=-1) if any(r.next_token.is_plain for r in requests) else None
        step: Step = []
        for row, request in enumerate(requests):
            try:
                if best is not None and request.next_token.is_plain:
                    sampled = Sampled(best[row : row + 1])
                else:
                    sampled = request.next_token(logits[row : row + 1], request.history)
            except FormError as error:
                self._fail(request, error)
                continue
            request.sampled += 1
            request.last = sampled.token.astype(mx.int32)
            if request.history is not None:
                request.history = mx.concatenate([request.history, request.last])
            step.append((request, sampled))
        return step

    def _deliver(self, request: Request, sampled: Sampled) -> None:
        decoded: Decoded = sampled.decoded(sampled.read())
        chunk = request.answer.take(decoded, request.clock)
        if request.place > len(request.slot.tokens):
            request.slot.tokens.append(decoded.token)  # its forward pass was dispatched with this step
        if chunk.finish_reason is None:
            request.chunks.append(chunk)
            return
        room = self.capacity - len(request.prompt)
        if (
            request.options.overflow == "error"
            and chunk.finish_reason == "length"
            and request.limit == room != request.options.max_tokens
        ):
            request.chunks.append(replace(chunk, finish_reason=None))
            self._fail(request, ContextFullError(room, self.capacity))
        else:
            request.chunks.append(replace(chunk, usage=self._retire(request, chunk.finish_reason)))

    def _fail(self, request: Request, error: MlxrunnerError, name: str | None = "") -> None:
        """End a request with an error of its own; `name`: what is recorded of it, None for an interrupt."""
        request.error = error
        self._retire(request, error=type(error).__name__ if name == "" else name)

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
        """Before a token that would not fit any more: drop the oldest half after what is kept.

        Where keys can't be moved, what is left is evaluated again, with the token that was sampled last.
        """
        shift, slot = request.shift, request.slot
        if shift is None or request.place < self.capacity:
            return
        keep, discard = shift.keep, shift.discard(request.place)
        tokens = slot.tokens.array
        kept = np.concatenate([tokens[:keep], tokens[keep + discard :]])
        slot.planned, request.shifted = slot.planned[:0], request.shifted + discard
        try:
            self._with_room(lambda: self._adapted.cache.remove(slot.number, keep, keep + discard))
        except NotSupportedError:
            assert request.last is not None
            self._adapted.cache.remove(slot.number, keep, END)
            request.place = keep if self._adapted.cache.can_resume(slot.number, keep) else 0
            slot.tokens.truncate(request.place)
            if not request.place:
                self._clear(slot)
            request.todo = np.append(kept, np.array(request.last))
            request.reevaluated += len(kept) - request.place
        else:
            slot.tokens.truncate(0)
            slot.tokens.extend(kept)
            request.place, request.is_apart = len(kept), True

    def _usage(self, request: Request) -> Usage:
        clock, groups = request.clock, self._adapted.groups
        return usage_of(
            request.lookup, clock, request.answer.count,
            trimmed_tokens=request.trimmed, shifted_tokens=request.shifted, reevaluated_tokens=request.reevaluated,
            prefill_s=clock.first - clock.tokenized if request.answer.count else 0.0,
            cache_bytes=sum(group.nbytes for group in groups), used_bytes=sum(group.used_bytes for group in groups),
            peak_bytes=mx.get_peak_memory(),
        )  # fmt: skip


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
