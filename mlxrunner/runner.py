"""The Runner: one model, its tokenizer, and the entry that keeps what a request evaluated."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any, Unpack

import mlx.core as mx
import numpy as np

from mlxrunner.cache.entry import CacheEntry
from mlxrunner.cache.layers.factory import check_quantized, make_layer_caches
from mlxrunner.cache.layers.protocol import LayerCache
from mlxrunner.cache.layers.rotate import rotators
from mlxrunner.cache.prefix import EntryLease, PrefixCache
from mlxrunner.cache.tokens import TokenArray, common_prefix
from mlxrunner.config.option import check_callable, check_flag, check_kind
from mlxrunner.engine.answer import AnswerStream
from mlxrunner.engine.control import EntryControl
from mlxrunner.engine.owner import Owned
from mlxrunner.engine.pace import Pace
from mlxrunner.engine.pipeline import Pipeline, Progress
from mlxrunner.engine.requests import Request, prepare
from mlxrunner.engine.run import Run, keep_only_what_can_be_evaluated, mark
from mlxrunner.engine.sampling import LogitsProcessor
from mlxrunner.engine.telling import Telling
from mlxrunner.errors import BusyError, LogitsError
from mlxrunner.loading import cache_options, load
from mlxrunner.memory.plan import Demand, Plan
from mlxrunner.memory.reserve import must_have_room
from mlxrunner.models.facts import DEPENDS, ModelFacts
from mlxrunner.models.load import LoadProgress, tell_nobody
from mlxrunner.models.resolve import name_of
from mlxrunner.options import GenerateKwargs, GenerateOptions, RunnerKwargs, RunnerSettings
from mlxrunner.results import Chunk, Result, log_lookup
from mlxrunner.speculation.sources import DraftSources
from mlxrunner.tokenizer import Tokenizer
from mlxrunner.tokenizer.prompt import Prompt, check_length, check_tokens, tokenize_prompt

HEADROOM = 256
"""Tokens for which room is made in advance when the length of an answer is unknown."""
CHECKPOINT_BUDGET = 2**30
"""Bytes for checkpoints if no plan gives another number."""


class Runner(Telling):
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
        super().__init__("Runner")
        self.model, self.tokenizer, self.facts, self.name = model, tokenizer, facts, name
        self.context = chosen.context or facts.context
        """Most tokens of a prompt and its answer together."""
        self.pace: Pace | None = None
        """Sizes the chunks of a prefill by the measured speed; None: `prefill_step` tokens each."""
        self.plan: Plan | None = None
        """The memory plan, if the model was loaded by `load`."""
        self.suggested_options: dict[str, Any] = {}
        """The sampling that the model suggests, for `generate(prompt, **suggested_options)`."""
        self.growing: Demand | None = None
        """The memory that tokens need, if it is taken as the conversation grows."""
        self._answers: weakref.WeakSet[Owned[Chunk]] = weakref.WeakSet()
        self._options = cache_options(chosen, facts.context, whole=whole)
        self._sight = getattr(model, "sight", None)
        check_quantized(model, self._options)
        self._cache = PrefixCache(
            partial(make_layer_caches, model, self._options),
            self._settings.checkpoint_budget or 0,
            chosen.checkpoint_interval,
        )
        self.sources = DraftSources(facts)
        self._message_ends = np.array(sorted(tokenizer.message_ends), np.int32)

    @classmethod
    def load(
        cls,
        model: str | PathLike[str] = "demo",
        context: int | None = None,
        *,
        reserve: bool = True,
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
        (`ulimit`) or its cgroup leaves no room. `trust_remote_code` runs Python code that comes
        with the model. `draft_model`, a smaller one of the same vocabulary, guesses what the model
        says. `pictures` loads the model with its encoder of pictures, which needs the extra
        "vision". `progress` is told of each step, and how many of how many bytes of it are done.

        Raise ModelError if something is missing or broken, MemoryPlanError with a table if the
        memory does not suffice, and OptionError if a setting is out of range.
        """
        chosen = RunnerSettings.of(context=context, **settings)
        check_flag("reserve", reserve)
        check_flag("trust_remote_code", trust_remote_code)
        check_flag("pictures", pictures)
        return load(
            cls,
            name_of(model),
            chosen,
            reserve=reserve,
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
        self._cache.reset()
        self._cache, self.sources = PrefixCache(list), DraftSources(self.facts)
        self.model = self._sight = None
        self.owner.close()
        mx.clear_cache()

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by the names of RunnerSettings, with the context in use."""
        return dict(vars(self._settings))

    @property
    def prefill_step(self) -> int:
        """Prompt tokens evaluated at once."""
        return self._settings.prefill_step

    @prefill_step.setter
    def prefill_step(self, tokens: int) -> None:
        self._settings = replace(self._settings, prefill_step=tokens)

    @property
    def cache(self) -> EntryControl:
        """Operations on the entry that only this package needs."""
        self.owner.check()
        return EntryControl(self.model, self._options, self._cache, self._enter)

    @property
    def entry(self) -> CacheEntry:
        """The entry as it is between requests."""
        self.owner.check()
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
        self._must_have_room(len(request.tokens) + min(chosen.max_tokens or HEADROOM, HEADROOM))
        lease = self._cache.begin(request.tokens)
        self._note(request.discarded)
        answer = Owned(self._run(Run(request, lease, progress)), self.owner)
        self._answers.add(answer)
        return answer

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
        self._must_have_room(len(tokens))
        lease = self._cache.begin(tokens, ahead=True)
        try:
            return self._evaluate(lease, cancelled)
        finally:
            lease.close()  # a second time: Ctrl-C may have cut off the first
            self._forget_pictures()

    def _evaluate(self, lease: EntryLease, cancelled: Callable[[], bool]) -> int:
        with lease:
            for cache in lease.caches:
                cache.reserve(min(len(lease.prompt) + HEADROOM, self.context))
            pipeline = Pipeline(
                self.model,
                lease,
                self.prefill_step,
                takes_checkpoints=mark(lease, self._message_ends),
            )
            try:
                return pipeline.evaluate(cancelled)
            except Exception:
                keep_only_what_can_be_evaluated(lease)
                raise

    def _must_have_room(self, tokens: int) -> None:
        """Raise MemoryPlanError if memory that was not reserved exceeds a limit with `tokens`."""
        if self.growing is not None:
            must_have_room(self.growing, min(tokens, self.context), self.prefill_step)

    def _prepare_entry(self, request: Request) -> None:
        """Change the entry as `request` needs it, at its begin. Raise BusyError while one runs.

        Nothing is reused if the model's answers depend on chunks. A prompt that was too long is
        shortened, and so is the entry.
        """
        self._enter()
        if self.facts.depends_on_chunks:
            self._cache.reset(DEPENDS)
        shift, discarded = request.shift, request.discarded
        if shift is not None and discarded:
            self._cache.prepare(request.prompt.tokens, shift.keep, discarded, self._rotate)

    def _rotate(self, caches: Sequence[LayerCache], by: int) -> Any:
        return rotators(self.model, caches, by)

    def _chunks(self, run: Run) -> Iterator[Chunk]:
        request, lease = run.request, run.lease
        options, clock = request.options, request.clock
        self._prepare_entry(request)
        clock.lookup_began = time.perf_counter()
        with lease:
            self._note(request.discarded, run)
            mx.reset_peak_memory()
            run.active_bytes = mx.get_active_memory()
            coming = min(request.limit, options.max_tokens or HEADROOM)
            for cache in lease.caches:
                cache.reserve(min(len(lease.prompt) + coming, self.context))
            clock.lookup_s = time.perf_counter() - clock.lookup_began
            lookup = lease.lookup
            log_lookup(lookup.prompt_tokens, lookup.matched, lookup.cached)
            pipeline = run.pipeline = Pipeline(
                self.model,
                lease,
                self.prefill_step,
                run.progress,
                mark(lease, self._message_ends),
                request.shift,
                self._rotate,
                None if self.facts.depends_on_chunks else self.pace,
                self.sources.drafting(
                    request.next_token, lease, "off" if self._sight else options.speculate
                ),
            )
            answer = AnswerStream(self.tokenizer, lease.prompt, options, request.limit)
            decoded = pipeline.run(request.next_token, request.limit)
            try:
                for chunk in answer.chunks(decoded, clock):
                    if chunk.finish_reason is not None:
                        break
                    if answer.count % HEADROOM == 0:
                        self._must_have_room(lease.recorded + HEADROOM)
                    yield chunk
            except LogitsError:
                lease.free("logits that were NaN or infinite")
                raise
            except Exception:
                keep_only_what_can_be_evaluated(lease)
                raise
            finally:
                decoded.close()  # this records a token that is on its way
                if self.owner.is_here:
                    run.usage = run.counted(answer, pipeline, self._cache.entry)
            run.finish_reason = chunk.finish_reason
        self._untold = run
        error = request.error_at(chunk)
        if error is not None:
            yield replace(chunk, finish_reason=None)
            raise error
        # Yield it last, so that a caller who sees the end of the answer sees the final entry.
        yield replace(chunk, usage=run.usage)
