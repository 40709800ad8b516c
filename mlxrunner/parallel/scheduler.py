"""Schedule requests: choose the tokens of each step and their cells, and end failed requests.

Knows nothing about prompts or loading.

A request may wait for a prefix that another one is evaluating. Then its prompt is evaluated in
pieces, and then it decodes. One forward pass carries a token or a piece of each request. If the
awaited prefix does not come, the request waits for room. It never ends for lack of room. Slots
change in an order that an interrupt may cut anywhere: see `Slot`.
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
from mlxrunner.cache.shared.sequences import END, Batch
from mlxrunner.cache.tokens import TokenArray
from mlxrunner.engine.sampling import Decoded, Sampled, dispatch
from mlxrunner.errors import (
    CacheFullError,
    FormError,
    MlxrunnerError,
    NotSupportedError,
    StepFailedError,
)
from mlxrunner.parallel.engine import Engine
from mlxrunner.parallel.request import ActiveRequest, Step
from mlxrunner.parallel.room import Room
from mlxrunner.parallel.slots import Choice, Slot, choose, share
from mlxrunner.results import Chunk, FinishReason, Usage, log_lookup

Ended = Callable[[ActiveRequest, FinishReason | None, str | None], Usage]
"""A function of an ended request, its finish reason, and the name of its error."""


class Scheduler:
    """The scheduler of all requests on an engine."""

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
        """Make a scheduler of at most `max_sequences` requests of up to `capacity` tokens each.

        `cells`: the most cells per layer that all requests take together. `max_batch`: the most
        tokens of a step. `ended`: called for each request at its end.
        """
        self.slots = [Slot(number) for number in range(max_sequences)]
        self.requests: list[ActiveRequest] = []
        """The running requests, in order of arrival. A request waits only for earlier ones."""
        self._adapted, self._ended = adapted, ended
        self._capacity, self._max_batch = capacity, max_batch
        self._room = Room(adapted, self.slots, self.requests, capacity=capacity, cells=cells)
        self._pending: Step | None = None
        self.ticks = 0
        """Number of steps so far."""
        self._calls = 0
        self._is_whole = True

    @property
    def moment(self) -> tuple[int, int]:
        """The steps so far, and the calls of `admit` and `cancel` since the last step.

        A replay needs both to find the same tokens in the same slots.
        """
        return self.ticks, self._calls

    @property
    def is_idle(self) -> bool:
        """True if the last step had nothing to dispatch."""
        return self._pending is None

    def admit(self, request: ActiveRequest) -> None:
        """Give a request a slot and the prefix that it can share.

        Raise NoFreeSlotError or CacheFullError if there is no room now. The request may be admitted
        later.
        """
        clock = request.clock
        self._calls += 1
        self._mend()
        # Place waiting requests first: the slot whose prefix they share may be taken now.
        self.place_waiting()
        choice = choose(self.slots, request.tokens, can_resume=self._can_resume)
        self._room.check(request, choice, self.requests)
        slot = request.slot = choice.slot
        request.trimmed = len(slot.tokens)
        try:
            clock.lookup_began = time.perf_counter()
            slot.is_busy, slot.planned = True, request.tokens
            request.began = self.moment
            self._follow(request, choice)
            clock.lookup_s = time.perf_counter() - clock.lookup_began
            self.requests.append(request)
        except BaseException:
            self._free(slot)
            raise

    def cancel(self, request: ActiveRequest) -> None:
        """End a request without affecting the others."""
        self._calls += 1
        with self._whole():
            if not request.finished:
                request.ending = "cancelled"
                self._retire(request)

    def step(self) -> None:
        """Dispatch the next forward pass, then read the tokens of the last one."""
        self.ticks, self._calls = self.ticks + 1, 0
        with self._whole():
            self.place_waiting()
            before, self._pending = self._pending, self._dispatch()
            for request, sampled in before or ():
                if not request.finished:
                    self._deliver(request, sampled)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """End all requests and empty all slots if the block raises an error or is interrupted.

        Nobody knows then which cells were written.
        """
        self._mend()
        self._is_whole = False
        try:
            yield
        except BaseException as error:
            self.forget_everything(error)
            raise
        self._is_whole = True

    def _mend(self) -> None:
        """End all requests if a second interrupt has cut `forget_everything` short."""
        if not self._is_whole:
            self.forget_everything(KeyboardInterrupt())

    def forget_everything(self, error: BaseException) -> None:
        """End all requests and empty the slots, after an `error` in a step."""
        self._pending = None
        for slot in self.slots:
            slot.tokens.truncate(0)
        why = StepFailedError(
            f"a step that carried this request, and others, was ended by {_named(error)}: "
            "submit it again"
        )
        for request in list(self.requests):
            if request.finished:  # an interrupt came before it was removed
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
        """Forget the tokens and the request of a slot."""
        self._clear(slot)
        slot.is_busy, slot.planned = False, slot.planned[:0]

    def _can_resume(self, slot: Slot, matched: int) -> bool:
        return matched == 0 or self._adapted.cache.can_resume(slot.number, matched)

    def _follow(self, request: ActiveRequest, choice: Choice) -> None:
        """Take the prefix that another slot has, or begin to wait for it."""
        if choice.ready:
            self._resume(request, choice.source, choice.matched)
        else:
            self._clear(request.slot)  # others must not share tokens that will be replaced
            request.source, request.promised = choice.source, choice.matched

    def _resume(self, request: ActiveRequest, source: Slot, cached: int) -> None:
        """Give the request's slot the first `cached` tokens of `source`."""
        slot, cache = request.slot, self._adapted.cache
        before, matched = len(source.tokens), source.shared_with(request.tokens)
        dropped = tuple(source.tokens[matched : matched + WINDOW])
        limited_by = "sliding" if cached < min(matched, len(request.tokens) - 1) else None
        slot.tokens.truncate(0)
        if source is not slot:
            cache.copy_prefix(source.number, slot.number, cached)
        else:
            cache.remove(slot.number, cached, END)
        slot.exact = END
        self._adapted.expect(slot.number, len(request.tokens) - cached + request.limit)
        slot.tokens.extend(request.tokens[:cached])
        request.place, request.is_placed = cached, True
        request.lookup = explained(
            Lookup(
                len(request.tokens), before, matched, cached, limited_by=limited_by, dropped=dropped
            )
        )
        request.trimmed = max(0, request.trimmed - cached) if source is slot else request.trimmed
        log_lookup(len(request.tokens), matched, cached)

    def place_waiting(self) -> None:
        """Give waiting requests their prefix, once it is evaluated.

        Requests whose prefix will not come, or that lacked room, choose again.
        """
        for number, request in enumerate(self.requests):
            if request.is_placed:
                continue
            source, promised = request.source, request.promised
            if source is None:
                self._place_again(request, self.requests[:number])
            elif source.shared_with(request.tokens) >= promised and self._can_resume(
                source, promised
            ):
                self._resume(request, source, promised)
            elif not source.is_busy or source.will_share_with(request.tokens) < promised:
                self._place_again(request, self.requests[:number])

    def _place_again(self, request: ActiveRequest, ahead: Sequence[ActiveRequest]) -> None:
        """Choose again, from the present content of the slots. Without room the request waits."""
        request.source, request.promised = None, 0
        before = [other.slot for other in ahead]
        choice = choose(
            self.slots, request.tokens, own=request.slot, ahead=before, can_resume=self._can_resume
        )
        others = [other for other in self.requests if other.is_placed or other.source is not None]
        with suppress(CacheFullError):
            self._room.check(request, choice, others)
            self._follow(request, choice)

    def _dispatch(self) -> Step | None:
        """Build and dispatch the next row; return None if there is nothing to do.

        If cells are missing, the youngest requests end.
        """
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

    def _row(self) -> list[tuple[ActiveRequest, int]]:
        """Return the requests of the next step, with the number of tokens of each."""
        row = [(request, 1) for request in self.requests if request.is_decoding]
        prefilling = [request for request in self.requests if request.is_placed and request.left]
        if prefilling:
            wanted = [request.left for request in prefilling]
            if self._adapted.has_windows:
                # Windows drop tokens: a prefix has to be shared while it is stored.
                wanted = [
                    min(left, *self._waited_for(request, left))
                    for request, left in zip(prefilling, wanted, strict=True)
                ]
            shares = share(self._max_batch - len(row), wanted, self.ticks)
            row += [
                (request, count) for request, count in zip(prefilling, shares, strict=True) if count
            ]
        return row

    def _waited_for(self, request: ActiveRequest, left: int) -> list[int]:
        """Return `left`, and the distances to the ends of the prefixes that others wait for.

        All are numbers of tokens.
        """
        ends = [
            other.promised - request.place
            for other in self.requests
            if not other.is_placed and other.source is request.slot
        ]
        return [left, *(end for end in ends if end > 0)]

    def _forward(self, row: list[tuple[ActiveRequest, int]]) -> Step:
        """Dispatch the forward pass of a row, and the sampling from it."""
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

    def _sample(self, requests: list[ActiveRequest], logits: mx.array) -> Step:
        """Sample a token for each request, at once for all plain greedy ones.

        A request whose form allows no token ends with a FormError.
        """
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

    def _deliver(self, request: ActiveRequest, sampled: Sampled) -> None:
        decoded: Decoded = sampled.decoded(sampled.read())
        chunk = request.answer.take(decoded, request.clock)
        request.said.append(decoded.token)
        if request.place > len(request.slot.tokens):
            # Its forward pass was dispatched with this step.
            request.slot.tokens.append(decoded.token)
        if chunk.finish_reason is None:
            request.chunks.append(chunk)
            return
        error = request.error_at(chunk)
        if error is not None:
            request.chunks.append(replace(chunk, finish_reason=None))
            self._fail(request, error)
        else:
            self._retire(request, chunk.finish_reason, last=chunk)

    def _fail(self, request: ActiveRequest, error: MlxrunnerError, name: str | None = "") -> None:
        """End a request with `error`. `name`: the recorded name of the error.

        None stands for an interrupt, and "" for the name of the error's class.
        """
        request.error = error
        self._retire(request, error=type(error).__name__ if name == "" else name)

    def _retire(
        self,
        request: ActiveRequest,
        reason: FinishReason | None = None,
        error: str | None = None,
        last: Chunk | None = None,
    ) -> None:
        """End a request and free its slot, whose tokens stay for others to share.

        A sampled token that was not read yet is dropped.
        """
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
            min(len(request.tokens), len(slot.tokens)),
        )
        slot.planned, slot.exact = slot.planned[:0], END

    def _make_room(self, request: ActiveRequest) -> None:
        """Drop the oldest half behind the kept tokens if the next token would not fit.

        The remaining tokens are evaluated again if keys can't be moved, or if a window lacks tokens
        that the next one sees.
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

    def _evaluate_again(self, request: ActiveRequest, kept: TokenArray) -> None:
        """Go back to the last offset at which the request can resume.

        The rest of `kept` is evaluated again, with the token that was sampled last.
        """
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
