"""The Runner: one model, its tokenizer, and the entry that keeps what a request evaluated.

A runner is a scheduler of one slot, whose requests run in the owner's thread, where they are read.
`OneSlot` runs them and tells of them: what belongs to one request is kept in it, so several may be
prepared, and any may begin next.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, Unpack

import mlx.core as mx
import numpy as np

from mlxrunner.cache.entry import CacheEntry, TokenArray, common_prefix
from mlxrunner.cache.layers.factory import (
    CacheOptions,
    check_quantized,
    make_layer_caches,
    outline_of,
)
from mlxrunner.cache.prefix import PrefixCache
from mlxrunner.cache.protocol import LayerCache
from mlxrunner.cache.saved import Saved, SavedEntry
from mlxrunner.config.option import Option, check_callable, check_flag, check_kind
from mlxrunner.engine.backends.backend import SequentialModel
from mlxrunner.engine.drafting import DraftSources
from mlxrunner.engine.request import (
    CLEAR_EVERY,
    ActiveRequest,
    AnswerStream,
    Clock,
    Observation,
    Observer,
    Progress,
    Request,
    prepare,
    tell,
)
from mlxrunner.engine.sampling import LogitsProcessor, NextToken
from mlxrunner.engine.scheduling.pacing import Pace
from mlxrunner.engine.scheduling.scheduler import Closing, Owned, Owner, Scheduler
from mlxrunner.errors import BusyError, StepFailedError
from mlxrunner.loading import cache_options, load
from mlxrunner.memory.plan import Demand, Plan
from mlxrunner.memory.reserve import must_be_offered, must_have_room
from mlxrunner.models.facts import DEPENDS, ModelFacts
from mlxrunner.models.load import LoadProgress, tell_nobody
from mlxrunner.models.resolve import name_of
from mlxrunner.options import (
    CHECKPOINT_BUDGET,
    PER_REQUEST,
    WIRE,
    EngineSettings,
    GenerateKwargs,
    GenerateOptions,
    Reserve,
    RunnerKwargs,
    RunnerSettings,
)
from mlxrunner.results import Chunk, FinishReason, Result, Usage
from mlxrunner.tokenizer import Tokenizer
from mlxrunner.tokenizer.prompt import (
    Prompt,
    check_length,
    check_tokens,
    tokenize_prompt,
)


@dataclass(frozen=True)
class EntryControl:
    """The entry of one runner. Its methods raise the runner's BusyError and WrongThreadError."""

    model: Any
    """The model that the layer caches are for."""
    options: CacheOptions
    entries: PrefixCache
    enter: Callable[[], None]
    """A function that checks the thread and reports the last request before the entry changes."""

    def explain_loss(self, reason: str, by: str, tokens: TokenArray) -> None:
        """Let the next request report that an earlier entry with `tokens` was lost, and why."""
        self.entries.lose(reason, by, tokens)

    def free(self, why: str, reason: str = "entry_freed") -> None:
        """Free the entry, and let the next request report why. Raise BusyError during a request."""
        self.enter()
        self.entries.reset(why, reason)

    def keep(self, tokens: Sequence[int]) -> None:
        """Rewind the entry to its common prefix with `tokens`. Raise BusyError during a request."""
        self.enter()
        self.entries.keep(tokens)

    def adopt(self, saved: SavedEntry, source: str = "a file") -> None:
        """Replace the entry by a saved one. Raise BusyError during a request.

        The saved entry is read when the next request begins, or at the first access to
        `Runner.entry`. The next request reports `source` with the reason `restored`.
        """
        self.enter()
        self.entries.adopt(saved, source)

    def outline(self) -> list[Saved]:
        """Return the outline of each layer, from the shapes of unevaluated tokens."""
        return outline_of(self.model, self.options)

    def cold_caches(self) -> list[LayerCache]:
        """Return new empty caches like those of the entry, which allocate memory as they grow."""
        return make_layer_caches(self.model, replace(self.options, whole=False))

    def empty_caches(self) -> list[LayerCache]:
        """Return the entry's own caches, emptied.

        The worst-case batch before the first request uses them.
        """
        return self.entries.empty_caches()


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
        self._prefill_step = self._scheduler.composer.most = tokens

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
        self._scheduler.composer.piece_pace = pace
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
        usage = request.usage(
            trimmed_tokens=lookup.entry_tokens - lookup.reused,
            prefill_s=clock.first - clock.lookup_began - clock.lookup_s if clock.first else 0.0,
            cache_bytes=entry.nbytes,
            used_bytes=entry.used_bytes,
        )
        if not request.is_ahead and not request.is_dropped:
            self._untold = request
            request.end = usage, reason, error
        return usage

    def _tell(self, request: ActiveRequest) -> None:
        """Tell the observers of a request that has ended, once. It may never have begun."""
        end, request.end = request.end, None
        if self._untold is request:
            self._untold = None
        if end is not None:
            usage, reason, error = end
            if self._last is request:
                self.usage = usage
            if self.observers:
                tell(self.observers, self, lambda: self._observation(request, usage, reason, error))
        request.logits = None  # they are large, and nobody else needs them
        if self._sight is not None:
            request.prompt = replace(request.prompt, views=None)
            request.error = None  # its traceback holds the pictures, too

    def _observation(
        self, request: ActiveRequest, usage: Usage, reason: FinishReason | None, error: str | None
    ) -> Observation:
        """Return a request as observers see it, with the entry after the request."""
        entry = self._cache.entry
        return request.observation(
            usage,
            reason,
            error,
            chunks=request.spans,
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
        tokens, step = min(tokens, self.context), self._scheduler.composer.most
        if self.reserves_requests:
            most = self.prefill_step if begins else step
            step = must_be_offered(self.growing, tokens, most, before=step, shrinks=begins)
            self._scheduler.composer.most = step
        must_have_room(self.growing, tokens, step)


AHEAD_FIRST, AHEAD_FEWEST, PAUSE_S = 8, 2, 0.04
"""Pieces of a prompt that is evaluated ahead.

Tokens of the first piece, tokens of the smallest piece, and seconds that a piece may take.
"""


class Runner(OneSlot):
    """Generates text with one model, and keeps what it evaluated for the next prompt.

    The thread that made the runner owns it: a call from another thread raises WrongThreadError. One
    request at a time uses the entry: a second one raises BusyError. Use the runner as a context
    manager, or call `close`: a later call raises ClosedError.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        facts: ModelFacts,
        *,
        name: str = "",
        context: int | None = None,
        whole: bool = False,
        **settings: Unpack[RunnerKwargs],
    ) -> None:
        """Make a runner from loaded parts; `Runner.load` is the usual way, and plans the memory.

        The settings are those of RunnerSettings. `context` is in tokens, by default the model's
        own. `whole` allocates the caches for the whole context at once.
        """
        check_kind("facts", facts, ModelFacts, "use Runner.load, which finds them")
        check_flag("whole", whole)
        chosen = RunnerSettings.of(
            context=facts.context if context is None else context, **settings
        )
        budget = chosen.checkpoint_budget
        self._settings = replace(
            chosen, checkpoint_budget=CHECKPOINT_BUDGET if budget is None else budget
        )
        self._options = cache_options(chosen, facts.context, whole=whole)
        context = chosen.context or facts.context
        engine = EngineSettings.of(max_sequences=1, **vars(self._settings))
        engine = replace(engine, context=context, kv_cache_tokens=context, max_step_ms=0)
        super().__init__(model, tokenizer, facts, self._options, engine)
        self.name = name
        self.plan: Plan | None = None
        """The memory plan, if the model was loaded by `load`."""
        self.wire = "none"
        """The part of WIRE of this model's memory that is wired."""
        self.suggested_options: dict[str, Any] = {}
        """The sampling that the model suggests, for `generate(prompt, **suggested_options)`."""

    @classmethod
    def load(
        cls,
        model: str | PathLike[str] = "demo",
        context: int | None = None,
        *,
        reserve: Reserve = True,
        wire: str = "weights",
        trust_remote_code: bool = False,
        draft_model: str | PathLike[str] | None = None,
        pictures: bool = False,
        progress: LoadProgress = tell_nobody,
        **settings: Unpack[RunnerKwargs],
    ) -> Runner:
        """Load "demo", a model directory or a hub id, and take the memory that it will need.

        `context` (in tokens) and the other settings are those of RunnerSettings. If `reserve` is
        true, the runner allocates everything and runs the worst-case batch now. Otherwise it takes
        memory as the conversation grows, and raises MemoryPlanError if a limit of the process
        (`ulimit`) or its cgroup leaves no room; with "request", a request whose prompt and
        `max_tokens` do not fit is refused when it begins. `wire` ("weights", "all" or "none") is
        the memory that macOS may not swap out. `trust_remote_code` runs Python code that comes
        with the model. `draft_model`, a smaller one of the same vocabulary, guesses what the model
        says. `pictures` loads the model with its encoder of pictures, which needs the extra
        "vision". `progress` is told of each step, and how many of how many bytes of it are done.

        Raise ModelError if something is missing or broken, MemoryPlanError with a table if the
        memory does not suffice, and OptionError if a setting is out of range.
        """
        chosen = RunnerSettings.of(context=context, **settings)
        if reserve != PER_REQUEST:
            check_flag("reserve", reserve)
        Option(str, among=tuple(WIRE)).check("wire", wire)
        check_flag("trust_remote_code", trust_remote_code)
        check_flag("pictures", pictures)
        return load(
            cls,
            name_of(model),
            chosen,
            reserve=reserve,
            wire=wire,
            trust_remote_code=trust_remote_code,
            draft_model=None if draft_model is None else name_of(draft_model),
            pictures=pictures,
            progress=progress,
        )

    def __repr__(self) -> str:
        if self.owner.is_closed:
            return f"Runner({self.name!r}, closed)"
        tokens = len(self._cache.entry.tokens)
        return f"Runner({self.name!r}, context={self.context}, entry of {tokens} tokens)"

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by the names of RunnerSettings, with the context in use."""
        chosen = vars(self._settings)
        # A setting that is a property, too, may have been changed since.
        return chosen | {name: getattr(self, name) for name in chosen if hasattr(type(self), name)}

    @property
    def cache(self) -> EntryControl:
        """Operations on the entry that only this package needs."""
        self.owner.check()
        return EntryControl(self.model, self._options, self._cache, self._enter)

    @property
    def entry(self) -> CacheEntry:
        """The entry as it is between requests. A callback of a request sees it as it is then."""
        if any(answer.is_running for answer in self._answers):
            self.owner.check()
        else:
            self._enter()
        return self._cache.current

    def reset(self) -> None:
        """Free the entry: the next request reuses nothing."""
        self._enter()
        self._cache.reset()
        mx.clear_cache()

    def tokenize(self, prompt: Prompt) -> TokenArray:
        """Return the token ids of `prompt`, `[n]`: see `generate`.

        Raise PromptError if it cannot be tokenized.
        """
        self.owner.check()
        return tokenize_prompt(self.tokenizer, prompt).tokens

    def complete(
        self,
        prompt: Prompt,
        *,
        logits_processors: Sequence[LogitsProcessor] = (),
        progress: Progress | None = None,
        **options: Unpack[GenerateKwargs],
    ) -> Result:
        """Continue `prompt` and return the whole answer.

        The arguments and errors are those of `generate`.
        """
        chunks = self.generate(
            prompt, logits_processors=logits_processors, progress=progress, **options
        )
        with closing(chunks):
            return Result.of(list(chunks))

    def generate(
        self,
        prompt: Prompt,
        *,
        logits_processors: Sequence[LogitsProcessor] = (),
        progress: Progress | None = None,
        **options: Unpack[GenerateKwargs],
    ) -> Owned[Chunk]:
        """Continue `prompt`, token by token; the last Chunk has `finish_reason` and `usage`.

        `prompt` is raw text (`str`), token ids, or messages (`{"role", "content"}`) for the chat
        template. `logits_processors` are functions of (tokens `[n]`, logits `[1, vocab]`) that
        return logits. `progress` is called during the prefill with (tokens in the entry, prompt
        tokens). `options` are those of GenerateOptions.

        The prompt and the options are checked before this returns. Raise OptionError if an option
        is wrong, PromptError if the prompt cannot be run, and ContextLengthError if it is too long.
        FormError, ContextFullError and LogitsError are raised during the answer.

        Closing the iterator ends the request. However the request ends, the entry holds exactly the
        evaluated tokens. If another thread drops the last reference to the iterator, that thread
        touches nothing of MLX: the owner's next call settles the entry, and no usage is reported.
        """
        self._enter()
        began = time.perf_counter()
        if progress is not None:
            check_callable("progress", progress, "(tokens in the entry, prompt tokens)")
        chosen = GenerateOptions.of(**options)
        request = prepare(
            prompt,
            chosen,
            tokenizer=self.tokenizer,
            facts=self.facts,
            context=self.context,
            began=began,
            processors=logits_processors,
        )
        answer = min(chosen.max_tokens or HEADROOM, request.limit)
        if not self.reserves_requests:
            answer = min(answer, HEADROOM)
        self._must_have_room(len(request.tokens) + answer, begins=True)
        return self._answer(request, progress)

    def evaluate(self, prompt: Prompt, *, cancelled: Callable[[], bool] = lambda: False) -> int:
        """Evaluate `prompt` in advance, and return the number of tokens evaluated.

        The entry keeps the tokens that it shares with `prompt`. `cancelled` is called between small
        chunks; chunks evaluated before it returns True stay in the entry. Nothing happens if the
        entry begins with the whole prompt, or if the model's entry cannot be reused. The errors are
        those of `generate`.
        """
        self._enter()
        check_callable("cancelled", cancelled, "no arguments")
        tokenized = tokenize_prompt(self.tokenizer, prompt, context=self.context)
        if not len(tokens := tokenized.tokens):
            return 0
        check_tokens(tokens, self.facts.vocab, has_pictures=tokenized.pictures > 0)
        check_length(tokens, self.context)
        if self.facts.depends_on_chunks or common_prefix(self.entry.tokens.array, tokens) == len(
            tokens
        ):
            return 0
        self._must_have_room(len(tokens), begins=True)
        options = GenerateOptions()
        request = Request(
            prompt=tokenized,
            tokens=tokens,
            options=options,
            next_token=NextToken(options, self.facts.vocab),
            clock=Clock(0.0, 0.0),
            context=self.context,
            limit=0,
        )
        pace = Pace(PAUSE_S, first=AHEAD_FIRST, fewest=AHEAD_FEWEST, growth=2)
        return self._evaluate(request, pace, cancelled)
