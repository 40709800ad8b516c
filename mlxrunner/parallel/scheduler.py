"""Which requests share the next step, where their tokens go, and what becomes of them when something fails. No prompts, no loading.

A request waits for a prefix that another one is evaluating, then its prompt is evaluated in pieces, then it decodes; one forward pass
carries a token or a piece of each. One whose prefix does not come after all may wait for room: none is ended for want of it. What happens
to a slot is done in an order that an interrupt may cut anywhere: see `Slot`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import accumulate

import mlx.core as mx
import numpy as np

from mlxrunner.cache.lookup import WINDOW, Lookup, explained
from mlxrunner.cache.sequences import END, Batch, CacheFullError, NotSupportedError
from mlxrunner.cache.tokens import TokenArray
from mlxrunner.errors import ContextFullError, FormError, MlxrunnerError
from mlxrunner.events import Chunk, FinishReason, Usage, log_lookup
from mlxrunner.parallel.adapt import Engine
from mlxrunner.parallel.request import Request, Step, StepFailedError
from mlxrunner.parallel.room import Room
from mlxrunner.parallel.slots import Choice, Slot, choose, share
from mlxrunner.sampling import Decoded, Sampled, dispatch

Ended = Callable[[Request, FinishReason | None, str | None], Usage]
"""Is told of each request that has ended: why, or the name of its error."""


class Scheduler:
    """Runs requests on `adapted`: at most `max_sequences` of up to `capacity` tokens, `cells` in all, `max_batch` tokens a step."""

    def __init__(
        self,
        adapted: Engine,
        max_sequences: int,
        *,
        capacity: int,
        cells: int,
        max_batch: int,
        ended: Ended,
    ) -> None:
        self.slots = [Slot(number) for number in range(max_sequences)]
        self.requests: list[Request] = []
        """Those that run, in the order in which they came: one waits for those before it only."""
        self._adapted, self._ended = adapted, ended
        self._capacity, self._max_batch = capacity, max_batch
        self._room = Room(adapted, self.slots, self.requests, capacity=capacity, cells=cells)
        self._pending: Step | None = None
        self.ticks = 0
        """Steps so far."""
        self._calls = 0
        self._is_whole = True

    @property
    def moment(self) -> tuple[int, int]:
        """Steps so far, and calls of `admit` and `cancel` since the last one: they decide together what is found where."""
        return self.ticks, self._calls

    @property
    def is_idle(self) -> bool:
        """Return True if the last step had nothing to dispatch."""
        return self._pending is None

    def admit(self, request: Request) -> None:
        """Give it a slot and what it can share. NoFreeSlotError, CacheFullError: it was not admitted, and may be again."""
        clock = request.clock
        self._calls += 1
        self._mend()
        self.place_waiting()  # who waits for a slot that is free again goes on first: it may be given away now
        choice = choose(self.slots, request.prompt, can_resume=self._can_resume)
        self._room.check(request, choice, self.requests)
        slot = request.slot = choice.slot
        request.trimmed = len(slot.tokens)
        try:
            clock.lookup_began = time.perf_counter()
            slot.is_busy, slot.planned = True, request.prompt
            request.began = self.moment
            self._follow(request, choice)
            clock.lookup_s = time.perf_counter() - clock.lookup_began
            self.requests.append(request)
        except BaseException:
            self._free(slot)
            raise

    def cancel(self, request: Request) -> None:
        """End a request without touching the others."""
        self._calls += 1
        with self._whole():
            if not request.finished:
                request.ending = "cancelled"
                self._retire(request)

    def step(self) -> None:
        """Dispatch the next forward pass, then read the tokens of the one before."""
        self.ticks, self._calls = self.ticks + 1, 0
        with self._whole():
            self.place_waiting()
            before, self._pending = self._pending, self._dispatch()
            for request, sampled in before or ():
                if not request.finished:
                    self._deliver(request, sampled)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """After an error or an interrupt nobody knows what was written: all requests are ended, and what the slots hold is forgotten."""
        self._mend()
        self._is_whole = False
        try:
            yield
        except BaseException as error:
            self.forget_everything(error)
            raise
        self._is_whole = True

    def _mend(self) -> None:
        """Finish what a second interrupt has kept from being forgotten after the first one."""
        if not self._is_whole:
            self.forget_everything(KeyboardInterrupt())

    def forget_everything(self, error: BaseException) -> None:
        """End all requests, as an `error` in a step does, and empty the slots."""
        self._pending = None
        for slot in self.slots:
            slot.tokens.truncate(0)
        why = StepFailedError(
            f"a step that carried this request, and others, was ended by {_named(error)}: submit it again"
        )
        for request in list(self.requests):
            if request.finished:  # all but for its slot
                self.requests.remove(request)
            else:
                request.ending = "forgotten"
                self._fail(
                    request, why, type(error).__name__ if isinstance(error, Exception) else None
                )
        for slot in self.slots:
            self._free(slot)
        self._is_whole = True

    def _clear(self, slot: Slot) -> None:
        """Forget the tokens of a slot."""
        slot.tokens.truncate(0)
        slot.exact = END
        self._adapted.cache.remove(slot.number, 0, END)

    def _free(self, slot: Slot) -> None:
        """Forget its tokens, and that it has a request."""
        self._clear(slot)
        slot.is_busy, slot.planned = False, slot.planned[:0]

    def _can_resume(self, slot: Slot, matched: int) -> bool:
        return matched == 0 or self._adapted.cache.can_resume(slot.number, matched)

    def _follow(self, request: Request, choice: Choice) -> None:
        """Take what another slot has, or wait for what it will have."""
        if choice.ready:
            self._resume(request, choice.source, choice.matched)
        else:
            self._clear(request.slot)  # nobody may take what is going to be replaced
            request.source, request.promised = choice.source, choice.matched

    def _resume(self, request: Request, source: Slot, cached: int) -> None:
        """Give the request's slot the first `cached` tokens of `source`."""
        slot, cache = request.slot, self._adapted.cache
        before, matched = len(source.tokens), source.shared_with(request.prompt)
        dropped = tuple(source.tokens[matched : matched + WINDOW])
        limited_by = "sliding" if cached < min(matched, len(request.prompt) - 1) else None
        slot.tokens.truncate(0)
        if source is not slot:
            cache.copy_prefix(source.number, slot.number, cached)
        else:
            cache.remove(slot.number, cached, END)
        slot.exact = END
        self._adapted.expect(slot.number, len(request.prompt) - cached + request.limit)
        slot.tokens.extend(request.prompt[:cached])
        request.place, request.is_placed = cached, True
        request.lookup = explained(
            Lookup(
                len(request.prompt), before, matched, cached, limited_by=limited_by, dropped=dropped
            )
        )
        request.trimmed = max(0, request.trimmed - cached) if source is slot else request.trimmed
        log_lookup(len(request.prompt), matched, cached)

    def place_waiting(self) -> None:
        """Share a prefix with those that wait for it, once it is there.

        Look again where it will not come any more, or where room was lacking.
        """
        for number, request in enumerate(self.requests):
            if request.is_placed:
                continue
            source, promised = request.source, request.promised
            if source is None:
                self._place_again(request, self.requests[:number])
            elif source.shared_with(request.prompt) >= promised and self._can_resume(
                source, promised
            ):
                self._resume(request, source, promised)
            elif not source.is_busy or source.will_share_with(request.prompt) < promised:
                self._place_again(request, self.requests[:number])

    def _place_again(self, request: Request, ahead: Sequence[Request]) -> None:
        """By what the slots have now; where there is no room for it, it waits."""
        request.source, request.promised = None, 0
        before = [other.slot for other in ahead]
        choice = choose(
            self.slots, request.prompt, own=request.slot, ahead=before, can_resume=self._can_resume
        )
        others = [other for other in self.requests if other.is_placed or other.source is not None]
        with suppress(CacheFullError):
            self._room.check(request, choice, others)
            self._follow(request, choice)

    def _dispatch(self) -> Step | None:
        """Build and dispatch the next row; None if there is nothing to do. Where cells are missing, the youngest requests end."""
        for request in [request for request in self.requests if request.is_decoding]:
            try:
                self._make_room(request)
            except CacheFullError as error:
                request.ending = "no room"
                self._fail(request, error)
        while row := self._row():
            try:
                return self._forward(row)
            except CacheFullError as error:
                self.requests[-1].ending = "no room"
                self._fail(self.requests[-1], error)
        return None

    def _row(self) -> list[tuple[Request, int]]:
        """How many tokens of which requests go into the next step."""
        row = [(request, 1) for request in self.requests if request.is_decoding]
        prefilling = [request for request in self.requests if request.is_placed and request.left]
        if prefilling:
            wanted = [request.left for request in prefilling]
            if (
                self._adapted.has_windows
            ):  # they forget: who shares a prefix has to take it while it is there
                wanted = [
                    min(left, *self._waited_for(request, left))
                    for request, left in zip(prefilling, wanted, strict=True)
                ]
            shares = share(self._max_batch - len(row), wanted, self.ticks)
            row += [
                (request, count) for request, count in zip(prefilling, shares, strict=True) if count
            ]
        return row

    def _waited_for(self, request: Request, left: int) -> list[int]:
        """How far it is to the ends of the prefixes for which others wait."""
        ends = [
            other.promised - request.place
            for other in self.requests
            if not other.is_placed and other.source is request.slot
        ]
        return [left, *(end for end in ends if end > 0)]

    def _forward(self, row: list[tuple[Request, int]]) -> Step:
        """Dispatch the forward pass of a row, and what samples from it."""
        ends = accumulate(count for _, count in row)
        sampling = {
            end - 1: request
            for (request, count), end in zip(row, ends, strict=True)
            if request.left <= count
        }
        batch = Batch(
            [
                position
                for request, count in row
                for position in range(request.place, request.place + count)
            ],
            [request.slot.number for request, count in row for _ in range(count)],
        )
        tokens = mx.concatenate([request.coming_tokens(count) for request, count in row])
        logits = self._room.make(
            lambda: self._adapted.forward(tokens, batch, list(sampling) or [0]), self._clear
        )
        for request, count in row:
            request.advance(count)
        step = self._sample(list(sampling.values()), logits)
        dispatch([array for _, sampled in step for array in sampled.arrays] or [logits])
        return step

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
                request.ending = "no token"
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
        request.said.append(decoded.token)
        if request.place > len(request.slot.tokens):
            request.slot.tokens.append(
                decoded.token
            )  # its forward pass was dispatched with this step
        if chunk.finish_reason is None:
            request.chunks.append(chunk)
            return
        room = self._capacity - len(request.prompt)
        if (
            request.options.overflow == "error"
            and chunk.finish_reason == "length"
            and request.limit == room != request.options.max_tokens
        ):
            request.chunks.append(replace(chunk, finish_reason=None))
            self._fail(request, ContextFullError(room, self._capacity))
        else:
            self._retire(request, chunk.finish_reason, last=chunk)

    def _fail(self, request: Request, error: MlxrunnerError, name: str | None = "") -> None:
        """End a request with an error of its own; `name`: what is recorded of it, None for an interrupt."""
        request.error = error
        self._retire(request, error=type(error).__name__ if name == "" else name)

    def _retire(
        self,
        request: Request,
        reason: FinishReason | None = None,
        error: str | None = None,
        last: Chunk | None = None,
    ) -> None:
        """Free the slot; its tokens stay for whoever shares them. A token of it that is still on its way is dropped."""
        slot = request.slot
        slot.tokens.truncate(slot.exact)
        self._adapted.cache.remove(slot.number, len(slot.tokens), END)
        request.ended = self.moment
        usage = self._ended(request, reason, error)
        if last is not None:
            request.chunks.append(replace(last, usage=usage))
        request.finished = True
        self.requests.remove(request)
        slot.is_busy, slot.last_used, slot.asked = (
            False,
            self.ticks,
            min(len(request.prompt), len(slot.tokens)),
        )
        slot.planned, slot.exact = slot.planned[:0], END

    def _make_room(self, request: Request) -> None:
        """Before a token that would not fit any more: drop the oldest half after what is kept.

        Where keys can't be moved, or a window lacks what the next token sees, what is left is evaluated again.
        """
        shift, slot = request.shift, request.slot
        if shift is None or request.place < self._capacity:
            return
        keep, discard = shift.keep, shift.discard(request.place)
        tokens = slot.tokens.array
        kept = np.concatenate([tokens[:keep], tokens[keep + discard :]])
        slot.planned, request.shifted = slot.planned[:0], request.shifted + discard
        if not self._adapted.can_shift(len(tokens), keep, discard):
            self._evaluate_again(request, kept)
            return
        try:
            self._room.make(
                lambda: self._adapted.cache.remove(slot.number, keep, keep + discard), self._clear
            )
        except NotSupportedError:
            request.is_stuck = True
            self._evaluate_again(request, kept)
        else:
            slot.tokens.truncate(0)
            slot.exact = min(slot.exact, keep)
            slot.tokens.extend(kept)
            request.place = len(kept)

    def _evaluate_again(self, request: Request, kept: TokenArray) -> None:
        """Go back to where it can resume, and evaluate the rest of `kept` once more, with the token that was sampled last."""
        assert request.shift is not None
        assert request.last is not None
        slot, keep = request.slot, request.shift.keep
        self._adapted.cache.remove(slot.number, keep, END)
        request.place = keep if self._adapted.cache.can_resume(slot.number, keep) else 0
        slot.tokens.truncate(request.place)
        slot.exact = END
        if not request.place:
            self._clear(slot)
        request.todo = np.append(kept, np.array(request.last))
        request.reevaluated += len(kept) - request.place


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
