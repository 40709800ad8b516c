"""Run requests one at a time on a scheduler of one slot, in the owner's thread, and tell of them.

What belongs to one request is kept in it: several may be prepared, and any may begin next.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrunner.cache.layers.factory import CacheOptions, check_quantized
from mlxrunner.cache.prefix import PrefixCache
from mlxrunner.engine.answer import CLEAR_EVERY, AnswerStream
from mlxrunner.engine.backends.sequential import SequentialModel
from mlxrunner.engine.observation import (
    Finish,
    Observation,
    Observer,
    drafted,
    finish_of,
    tell,
    usage_of,
)
from mlxrunner.engine.owner import Closing, Owned, Owner
from mlxrunner.engine.pace import Pace
from mlxrunner.engine.requests import Progress, Request
from mlxrunner.engine.scheduling.request import ActiveRequest
from mlxrunner.engine.scheduling.scheduler import Scheduler
from mlxrunner.engine.settings import EngineSettings
from mlxrunner.engine.speculation.sources import DraftSources
from mlxrunner.errors import BusyError, StepFailedError
from mlxrunner.memory.plan import Demand
from mlxrunner.memory.reserve import must_be_offered, must_have_room
from mlxrunner.models.facts import DEPENDS, ModelFacts
from mlxrunner.results import Chunk, FinishReason, Usage
from mlxrunner.tokenizer import Tokenizer

HEADROOM = 256
"""Tokens for which room is made in advance when the length of an answer is unknown."""


class OneSlot(Closing):
    """A scheduler with one slot, whose requests run where they are read."""

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        facts: ModelFacts,
        options: CacheOptions,
        settings: EngineSettings,
    ) -> None:
        """Make one with layer caches of `options`. The `settings` are those in use."""
        check_quantized(model, options)
        self.owner = Owner("Runner")
        self.tokenizer, self.facts, self.context = tokenizer, facts, settings.context or 0
        self._prefill_step = settings.prefill_step
        self.observers: list[Observer] = []
        """Functions called with every request after its end: see `mlxrunner.profiling`."""
        self.usage: Usage | None = None
        """The usage of the last request after its end, even if it failed; None until then."""
        self.pace: Pace | None = None
        """Sizes the pieces of a prefill by the measured speed; None: `prefill_step` tokens each."""
        self.growing: Demand | None = None
        """The memory that tokens need, if it is taken as the conversation grows."""
        self.reserves_requests = False
        """True if a growing runner refuses what the device does not offer."""
        self._answers: weakref.WeakSet[Owned[Chunk]] = weakref.WeakSet()
        self._last: ActiveRequest | None = None
        self._untold: ActiveRequest | None = None
        self._sight = getattr(model, "sight", None)
        self._engine = SequentialModel(model, options, is_single=True)
        self._scheduler = Scheduler(
            self._engine,
            settings,
            ended=self._usage,
            message_ends=np.array(sorted(tokenizer.message_ends), np.int32),
            facts=None if self._sight is not None else facts,
        )

    @property
    def model(self) -> Any:
        """The model; None once the runner is closed."""
        return self._engine.model

    @model.setter
    def model(self, model: Any) -> None:
        self._engine.model = model

    @property
    def sources(self) -> DraftSources:
        """The sources of guesses. A model that sees pictures has none."""
        sources = self._scheduler.sources
        assert sources is not None
        return sources

    @property
    def prefill_step(self) -> int:
        """Prompt tokens evaluated per step."""
        return self._prefill_step

    @prefill_step.setter
    def prefill_step(self, tokens: int) -> None:
        self._prefill_step = self._scheduler.prefill_step = tokens

    @property
    def shifted_tokens(self) -> int:
        """Tokens that the last request, running or not, dropped because the context was full."""
        return 0 if self._last is None else self._last.shifted

    @property
    def _cache(self) -> PrefixCache:
        return self._scheduler.slots[0].cache

    def close(self) -> None:
        """End the running request, free the entry, and drop the model.

        It may be called again, also after an interrupt. Raise BusyError within a callback of the
        running request.
        """
        if self.owner.is_closed:
            return
        self.owner.check()
        answers = list(self._answers)
        if any(answer.is_running for answer in answers):
            raise BusyError()
        for answer in answers:
            answer.close()
        self._enter()
        self._scheduler.drop()
        self._engine.close()
        if self._scheduler.sources is not None:
            self._scheduler.sources.model = None
        self.model = self._sight = None
        self.owner.close()
        mx.clear_cache()

    def _answer(self, request: Request, progress: Progress | None) -> Owned[Chunk]:
        """Return the chunks of a prepared request. Raise BusyError while another one runs."""
        if self._scheduler.requests:
            raise BusyError()
        stream = AnswerStream(self.tokenizer, request.tokens, request.options, request.limit)
        active = ActiveRequest.of(request, stream)
        self._last, self.usage = active, None
        return self._owned(active, self._chunks(active, progress))

    def _evaluate(self, request: Request, pace: Pace, cancelled: Callable[[], bool]) -> int:
        """Evaluate the prompt of a request without an answer, and return the number of tokens."""
        stream = AnswerStream(self.tokenizer, request.tokens, request.options, 0)
        active = ActiveRequest.of(request, stream)
        active.is_ahead = True
        pieces = self._owned(active, self._pieces(active, pace, cancelled))
        for _ in pieces:
            pass
        return active.place - active.lookup.cached

    def _pieces(
        self, request: ActiveRequest, pace: Pace, cancelled: Callable[[], bool]
    ) -> Generator[Chunk, None, None]:
        """Evaluate a prompt piece by piece. There are no chunks."""
        try:
            self._begin(request, pace)
            while request.left and not cancelled():
                self._step(request)
        finally:
            if request in self._scheduler.requests:
                self._scheduler.cancel(request)
            self._forget_pictures()
        yield from ()

    def _owned(self, request: ActiveRequest, chunks: Generator[Chunk, None, None]) -> Owned[Chunk]:
        """Return an iterator without which the request has no reader."""
        owned = Owned(chunks, self.owner)
        request.reader = weakref.ref(owned)
        self._answers.add(owned)
        return owned

    def _chunks(
        self, request: ActiveRequest, progress: Progress | None
    ) -> Generator[Chunk, None, None]:
        """Yield the chunks of a request, then tell the observers, even if the request fails."""
        total = len(request.tokens)
        try:
            self._begin(request, None if self.facts.depends_on_chunks else self.pace)
            self._last, self.usage = request, None
            done = -1
            while True:
                if progress is not None and request.place != done and done < total:
                    done = request.place
                    progress(min(done, total), total)
                while request.chunks:
                    chunk = request.chunks.popleft()
                    if not request.finished and request.answer.count % CLEAR_EVERY == 0:
                        mx.clear_cache()
                        most = len(request.tokens) + request.limit
                        self._must_have_room(min(request.place + HEADROOM, most))
                    yield chunk
                if request.finished:
                    break
                self._step(request)
            if request.error is not None:
                raise request.error
        except Exception as error:
            if not request.finished and request in self._scheduler.requests:
                self._scheduler.cancel(request, type(error).__name__)
            raise
        finally:
            self._end(request)

    def _enter(self) -> None:
        """Check the thread, and end a request that nobody reads any more.

        The caller is about to change the entry, which still describes that request.
        """
        self.owner.check()
        self._scheduler.mend()
        for request in list(self._scheduler.requests):
            reader = request.reader()
            if reader is None or reader.is_over:
                self._scheduler.cancel(request)
                self._untold = request
        if self._untold is not None:
            self._tell(self._untold)

    def _begin(self, request: ActiveRequest, pace: Pace | None) -> None:
        """Give a request the entry, as it needs it. Raise BusyError while another one runs.

        Nothing is reused if the model's answers depend on chunks. A prompt that was too long is
        shortened, and so is the entry.
        """
        self._enter()
        if self._scheduler.requests:
            raise BusyError()
        if self.facts.depends_on_chunks:
            self._cache.reset(DEPENDS)
        shift, discarded = request.shift, request.discarded
        if shift is not None and discarded:
            given, rotate = request.prompt, self._engine.rotate
            self._cache.prepare(
                given.tokens, shift.keep, discarded, rotate, is_shifted=given.is_shifted
            )
        mx.reset_peak_memory()
        request.active_bytes = mx.get_active_memory()
        self._scheduler.piece_pace = pace
        self._scheduler.admit(request)
        coming = HEADROOM if request.is_ahead else request.limit
        coming = min(coming, request.options.max_tokens or HEADROOM)
        for cache in request.lease.caches:
            cache.reserve(min(len(request.tokens) + coming, self.context))

    def _step(self, request: ActiveRequest) -> None:
        """Run a step. Raise the error of the request as it is."""
        self._scheduler.step()
        error = request.error
        if isinstance(error, StepFailedError) and error.__cause__ is not None:
            try:
                raise error.__cause__
            finally:
                del error  # the traceback holds this frame, which would hold the traceback

    def _end(self, request: ActiveRequest) -> None:
        """End a request and tell of it. In another thread, leave that to the owner's next call."""
        if not self.owner.is_here:
            request.is_dropped = True
            return
        if request in self._scheduler.requests:
            self._scheduler.cancel(request)
        self._tell(request)

    def _usage(
        self, request: ActiveRequest, reason: FinishReason | None, error: str | None
    ) -> Usage:
        """Return the usage of a request that has ended. Observers are told of it later."""
        self._forget_pictures()
        lookup, clock, entry = request.lookup, request.clock, self._cache.entry
        usage = usage_of(
            lookup,
            clock,
            request.answer.count,
            request.account,
            request.prompt.earlier,
            evaluated_tokens=request.evaluated,
            trimmed_tokens=lookup.entry_tokens - lookup.reused,
            shifted_tokens=request.shifted,
            reevaluated_tokens=request.reevaluated,
            prefill_s=clock.first - clock.lookup_began - clock.lookup_s if clock.first else 0.0,
            cache_bytes=entry.nbytes,
            used_bytes=entry.used_bytes,
            peak_bytes=mx.get_peak_memory(),
            **drafted(request.drafting),
        )
        if not request.is_ahead and not request.is_dropped:
            self._untold = request
            request.end = (usage, finish_of(reason, error), error)
        return usage

    def _tell(self, request: ActiveRequest) -> None:
        """Tell the observers of a request that has ended, once. It may never have begun."""
        end, request.end = request.end, None
        if self._untold is request:
            self._untold = None
        if end is not None:
            usage, finish, error = end
            if self._last is request:
                self.usage = usage
            if self.observers:
                tell(self.observers, self, lambda: self._observation(request, usage, finish, error))
        request.logits = None  # they are large, and nobody else needs them
        if self._sight is not None:
            request.prompt = replace(request.prompt, views=None)
            request.error = None  # its traceback holds the pictures, too

    def _observation(
        self, request: ActiveRequest, usage: Usage, finish: Finish, error: str | None
    ) -> Observation:
        """Return a request as observers see it, with the entry after the request."""
        entry = self._cache.entry
        return Observation(
            prepared=request.prompt,
            prompt=request.tokens,
            options=request.options,
            lookup=request.lookup,
            account=request.account,
            usage=usage,
            finish=finish,
            error=error,
            clock=request.clock,
            chunks=request.spans,
            entry=entry.tokens,
            active_bytes=request.active_bytes,
            checkpoints=entry.checkpoints.offsets,
            logits=None if entry.is_shifted else request.logits_behind(len(entry.tokens)),
            is_greedy=request.next_token.is_greedy,
        )

    def _forget_pictures(self) -> None:
        """Drop what only a request that has ended needed of its pictures."""
        if self._sight is not None:
            self._sight.settle()

    def _must_have_room(self, tokens: int, *, begins: bool = False) -> None:
        """Raise MemoryPlanError if memory that was not reserved exceeds a limit with `tokens`.

        A request that `begins` shrinks its prefill step before that.
        """
        if self.growing is None:
            return
        tokens, step = min(tokens, self.context), self._scheduler.prefill_step
        if self.reserves_requests:
            most = self.prefill_step if begins else step
            step = must_be_offered(self.growing, tokens, most, before=step, shrinks=begins)
            self._scheduler.prefill_step = step
        must_have_room(self.growing, tokens, step)
