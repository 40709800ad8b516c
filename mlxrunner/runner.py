"""The Runner: one model, its tokenizer and the one entry. `load` and `generate`; everything else hangs off these two."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrunner import device
from mlxrunner.answer import Answer, Clock
from mlxrunner.cache.checkpoints import INTERVAL, places_of
from mlxrunner.cache.entry import CacheEntry, PrefixCache, Session
from mlxrunner.cache.factory import DEFAULT_SLACK, CacheOptions, make_layer_caches, outline_of
from mlxrunner.cache.layer import LayerCache
from mlxrunner.cache.lookup import Lookup
from mlxrunner.cache.rotate import rotators
from mlxrunner.cache.saved import Saved, SavedEntry
from mlxrunner.cache.tokens import TokenArray, common_prefix
from mlxrunner.config import GenerateOptions
from mlxrunner.constrain import constraint_of
from mlxrunner.errors import (
    ContextFullError,
    ContextLengthError,
    ModelError,
    OptionError,
    PromptError,
)
from mlxrunner.events import Chunk, FinishReason, Usage, log_lookup
from mlxrunner.models.chunks import DEPENDS
from mlxrunner.models.facts import ModelFacts, without_weights
from mlxrunner.models.load import LoadedModel, load_model
from mlxrunner.observation import Observation, Observer, finish_of, tell, usage_of
from mlxrunner.overflow import Shift
from mlxrunner.owner import Owned, Owner
from mlxrunner.pipeline import Pipeline, Progress
from mlxrunner.plan import Demand, Plan, make_plan
from mlxrunner.reserve import announce, choose, demand_of, must_fit, must_have_room, weights_of
from mlxrunner.reserve import reserve as reserve_memory
from mlxrunner.sampling import LogitsProcessor, NextToken
from mlxrunner.tokenizer import Tokenizer
from mlxrunner.tokenizer.prompt import Prepared, Prompt, prepare, system_tokens

DEFAULT_PREFILL_STEP = 2048
HEADROOM = 256
"""Tokens of an answer of unknown length for which room is made in advance."""


class Runner:
    """Generates text with one model and keeps what it evaluated for the next prompt.

    The thread that opened it owns the model: WrongThreadError from any other. One request at a time owns the entry: BusyError otherwise.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        facts: ModelFacts,
        *,
        name: str = "",
        context: int | None = None,
        prefill_step: int = DEFAULT_PREFILL_STEP,
        kv_bits: int | None = None,
        rewind_slack: int = DEFAULT_SLACK,
        checkpoint_interval: int = INTERVAL,
        checkpoint_budget: int = 2**30,
        whole: bool = False,
    ) -> None:
        """From parts that are loaded already; `Runner.load` is the usual way, and plans the memory."""
        self.owner = Owner("Runner")
        self.context = facts.context if context is None else context
        _check_settings(
            self.context,
            prefill_step,
            kv_bits,
            rewind_slack,
            checkpoint_interval,
            checkpoint_budget,
        )
        self.model, self.tokenizer, self.facts, self.name = model, tokenizer, facts, name
        self.prefill_step, self.checkpoint_interval = prefill_step, checkpoint_interval
        self.plan: Plan | None = None
        self.observer: Observer | None = None
        """Is told of every request after it has ended (see `mlxrunner.profiling`)."""
        self.usage: Usage | None = None
        """Of the last request, once it has ended, however it has."""
        self._growing: Demand | None = None
        """What is needed, where memory is taken as the conversation grows."""
        self._pipeline: Pipeline | None = None
        self._discarded = 0
        self._untold: _Request | None = None
        self._options = CacheOptions(self.context, whole, rewind_slack, kv_bits)
        self._cache = PrefixCache(
            lambda: make_layer_caches(model, self._options), checkpoint_budget, checkpoint_interval
        )
        self._message_ends = np.array(sorted(tokenizer.message_ends), np.int32)

    @classmethod
    def load(
        cls,
        model: str = "demo",
        context: int | None = None,
        *,
        prefill_step: int = DEFAULT_PREFILL_STEP,
        kv_bits: int | None = None,
        rewind_slack: int = DEFAULT_SLACK,
        checkpoint_interval: int = INTERVAL,
        checkpoint_budget: int | None = None,
        reserve: bool = True,
        trust_remote_code: bool = False,
    ) -> Runner:
        """Load "demo", a model directory or a hub id, and take the memory that it will need.

        context: most tokens of prompt and answer together (default: what the model was made for, or the most that fits).
        prefill_step: prompt tokens evaluated at once. kv_bits: 8 or 4, to store full attention's keys and values in so many bits.
        rewind_slack: tokens that a sliding window keeps beyond itself. checkpoint_interval, checkpoint_budget: tokens between
        checkpoints of windows and states, and the bytes they may take. reserve: allocate everything and run the worst-case batch now;
        False: take memory as the conversation grows, and raise MemoryPlanError where a limit of the process (`ulimit`) or its cgroup leaves no room.

        ModelError names what is missing or broken; MemoryPlanError has the table of what does not fit.
        """
        _check_settings(
            2 if context is None else context,
            prefill_step,
            kv_bits,
            rewind_slack,
            checkpoint_interval,
            checkpoint_budget or 0,
        )
        if reserve:
            with suppress(ModelError):  # what is wrong with the model is said better by loading it
                must_fit(
                    plan_model(
                        model, context, prefill_step=prefill_step, kv_bits=kv_bits, rewind_slack=rewind_slack,
                        checkpoint_budget=checkpoint_budget,
                    )
                )  # fmt: skip
        loaded: LoadedModel = load_model(model, trust_remote_code=trust_remote_code)
        options = CacheOptions(context or loaded.facts.context, True, rewind_slack, kv_bits)
        weights, offered = weights_of(loaded.model), device.offered_bytes()
        demand = demand_of(
            loaded.model, loaded.config, options, prefill_step, weights=weights, checkpoint_budget=checkpoint_budget
        )  # fmt: skip
        limit = loaded.facts.context
        plan = choose(demand, context, prefill_step, offered=offered, limit=limit)
        while True:
            runner = cls(
                loaded.model, loaded.tokenizer, loaded.facts, name=model, context=plan.context, prefill_step=prefill_step,
                kv_bits=kv_bits, rewind_slack=rewind_slack, checkpoint_interval=checkpoint_interval,
                checkpoint_budget=plan.checkpoint_budget, whole=reserve,
            )  # fmt: skip
            if not reserve:
                runner._growing = demand
                must_have_room(demand, 1, prefill_step)
                break
            must_fit(plan)
            demand = runner._reserve(demand)
            plan = make_plan(
                demand,
                context=plan.context,
                prefill_step=prefill_step,
                offered=offered,
                limit=limit,
            )
            if plan.fits or context is not None:
                break
            # It took more than was estimated, and nobody asked for this context: the most that fits by what was measured.
            del runner
            plan = choose(demand, None, prefill_step, offered=offered, limit=plan.context - 1)
        if reserve:
            device.set_limits(must_fit(plan).total, demand.batch.nbytes(plan.context))
        announce(plan, context, limit)
        runner.plan = plan
        return runner

    def _reserve(self, demand: Demand) -> Demand:
        """Allocate the caches and run the worst-case batch; returns `demand` with what that took."""
        caches, scratch = self._cache.empty_caches(), make_layer_caches(self.model, self._options)
        taken = reserve_memory(self.model, caches, self.context, self.prefill_step, scratch)
        return replace(demand, batch=demand.batch.measured(taken.batch, self.context))

    @property
    def settings(self) -> dict[str, Any]:
        """The options that decide what is stored, and how far back it can go."""
        return {
            "context": self.context, "kv_bits": self._options.kv_bits, "prefill_step": self.prefill_step,
            "rewind_slack": self._options.rewind_slack, "checkpoint_interval": self.checkpoint_interval,
            "checkpoint_budget": self._cache.checkpoint_budget,
        }  # fmt: skip

    def cold_caches(self) -> list[LayerCache]:
        """Empty caches like the entry's, beside them; they take memory as they grow."""
        return make_layer_caches(self.model, replace(self._options, whole=False))

    @property
    def entry(self) -> CacheEntry:
        """The entry as it is between requests."""
        self.owner.check()
        return self._cache.current

    @property
    def shifted_tokens(self) -> int:
        """Tokens that the last request, running or not, dropped because the context was full."""
        return self._discarded + (self._pipeline.shifted if self._pipeline is not None else 0)

    def reset(self) -> None:
        """Free the entry: the next request starts cold."""
        self._enter()
        self._cache.reset()
        mx.clear_cache()

    def explain_loss(self, reason: str, by: str, tokens: TokenArray) -> None:
        """Have the next request say that an entry with `tokens` was there before this runner, and why it is gone."""
        self._cache.lose(reason, by, tokens)

    def free(self, why: str, reason: str = "entry_freed") -> None:
        """Free the entry, and have the next request say why. BusyError while one is running."""
        self._enter()
        self._cache.reset(why, reason)

    def keep(self, tokens: Sequence[int]) -> None:
        """Rewind the entry to what it shares with `tokens`. BusyError during a request."""
        self._enter()
        self._cache.keep(tokens)

    def adopt(self, saved: SavedEntry, source: str = "a file") -> None:
        """Take over a saved entry; it is read when the next request begins, or when `entry` is looked at. BusyError during a request.

        `source`: what the next request calls it (reason `restored`)."""
        self._enter()
        self._cache.adopt(saved, source)

    def outline(self) -> list[Saved]:
        """What each layer stores, as the shapes of one unevaluated token."""
        return outline_of(self.model, self._options)

    def tokenize(self, prompt: Prompt) -> TokenArray:
        """A `str` is raw text, integers are taken as they are, messages go through the chat template."""
        return prepare(self.tokenizer, prompt).tokens

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        stop_tokens: Sequence[int] | None = None,
        logprobs: int | None = None,
        repetition_penalty: float | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        penalty_context: int = 20,
        overflow: str = "stop",
        keep: int | None = None,
        schema: str | dict[str, Any] | None = None,
        choices: str | Sequence[str] | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        progress: Progress | None = None,
    ) -> Iterator[Chunk]:
        """Continue `prompt`, token by token; the last Chunk carries `finish_reason` and `usage`.

        prompt: raw text (`str`), token ids, or messages (`{"role", "content"}`) for the chat template.
        max_tokens: None = until the model stops or the context is full (or, with overflow="shift", has been filled once). temperature: 0 = greedy.
        stop: text that ends the answer, which then ends before it. stop_tokens: token ids that end it (default: the model's own;
        `[]`: none does). logprobs: give each token's log-probability and the k most likely ones. penalties: over
        the last `penalty_context` tokens of prompt and answer, reused or not. logits_processors: `(tokens [n], logits [1, vocab])` -> logits.
        overflow: what to do when the context is full: "stop", "shift" (keep the first `keep` tokens, by default the system prompt,
        drop half of the rest) or "error". schema: a JSON schema, of which the answer is an instance; choices: texts, of which it is one.
        Both need the package llguidance; FormError if the model has no token to go on with. Such an answer ends where its form is complete, or
        at `max_tokens`: `stop` has no effect on it, and stop tokens can only come there.
        progress: called during the prefill with (tokens in the entry, prompt tokens).

        The prompt and the options are checked before this returns: PromptError, ContextLengthError, OptionError. Closing the
        iterator ends the request; however it ends, the entry holds exactly the tokens that were evaluated. Where another thread drops the
        last reference to it, nothing of MLX is touched there: the entry is made true by the owner's next call, and no usage is told.
        """
        self._enter()
        began = time.perf_counter()
        options = GenerateOptions.of(
            max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, stop=stop,
            stop_tokens=stop_tokens, logprobs=logprobs, repetition_penalty=repetition_penalty, presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty, penalty_context=penalty_context, overflow=overflow, keep=keep,
            schema=schema, choices=choices,
        )  # fmt: skip
        prepared = prepare(self.tokenizer, prompt)
        tokens = prepared.tokens
        self._check(tokens)
        constraint = constraint_of(options, self.tokenizer, self.facts.vocab)
        clock = Clock(began - prepared.seconds, time.perf_counter())
        self._forget_what_may_differ()
        shift = self._shift(prompt, tokens, options)
        discard = (
            shift.discard(len(tokens)) if shift is not None and len(tokens) >= self.context else 0
        )
        if shift is not None and discard:
            self._cache.prepare(tokens, shift.keep, discard, self._rotate)
            tokens = np.concatenate([tokens[: shift.keep], tokens[shift.keep + discard :]])
        elif len(tokens) >= self.context:
            raise ContextLengthError(len(tokens), self.context)
        self._must_have_room(len(tokens) + min(options.max_tokens or HEADROOM, HEADROOM))
        next_token = NextToken(options, self.facts.vocab, logits_processors, constraint)
        session = self._cache.begin(tokens)
        self._pipeline, self._discarded, self.usage = None, discard, None
        return Owned(
            self._run(
                _Request(prepared, session, options, next_token, progress, clock, shift, discard)
            ),
            self.owner,
        )

    def evaluate(self, prompt: Prompt, *, cancelled: Callable[[], bool] = lambda: False) -> int:
        """Evaluate `prompt` in advance, without an answer: what the entry shares with it stays, the rest is evaluated.

        `cancelled` is asked between small chunks; those that were finished stay in the entry. Returns how many tokens were evaluated.
        An entry that begins with the whole prompt is left as it is, and so is one that can't be reused. Errors as for `generate`.
        """
        self._enter()
        tokens = self.tokenize(prompt)
        self._check(tokens)
        if len(tokens) >= self.context:
            raise ContextLengthError(len(tokens), self.context)
        if self.facts.depends_on_chunks or common_prefix(self.entry.tokens.array, tokens) == len(
            tokens
        ):
            return 0
        self._must_have_room(len(tokens))
        session = self._cache.begin(tokens, ahead=True)
        try:
            return self._evaluate(session, cancelled)
        finally:
            session.close()  # again: Ctrl-C may have come on the way in or out

    def _evaluate(self, session: Session, cancelled: Callable[[], bool]) -> int:
        with session:
            for cache in session.caches:
                cache.reserve(min(len(session.prompt) + HEADROOM, self.context))
            pipeline = Pipeline(
                self.model, session, self.prefill_step, takes_checkpoints=self._mark(session)
            )
            try:
                return pipeline.evaluate(cancelled)
            except Exception:
                _keep_only_what_can_be_evaluated(session)
                raise

    def _must_have_room(self, tokens: int) -> None:
        """MemoryPlanError before memory grows beyond what there is; what was taken at start is there."""
        if self._growing is not None:
            must_have_room(self._growing, min(tokens, self.context), self.prefill_step)

    def _shift(self, prompt: Prompt, tokens: TokenArray, options: GenerateOptions) -> Shift | None:
        """How to make room in a full context, if that is wanted."""
        if options.overflow != "shift":
            return None
        return Shift(
            self.context,
            system_tokens(self.tokenizer, prompt, tokens) if options.keep is None else options.keep,
        )

    def _forget_what_may_differ(self) -> None:
        """Of a model whose answers depend on chunks no token is reused: each request is a cold one, and says why."""
        if self.facts.depends_on_chunks and not self._cache.is_busy:
            self._cache.reset(DEPENDS)

    def _rotate(self, caches: Sequence[LayerCache], by: int) -> Any:
        return rotators(self.model, caches, by)

    def _check(self, tokens: TokenArray) -> None:
        if self.facts.vocab and len(tokens) and int(tokens.max()) >= self.facts.vocab:
            raise PromptError(
                f"token id {int(tokens.max())} is beyond the model's vocabulary of {self.facts.vocab}"
            )

    def _run(self, request: _Request) -> Generator[Chunk, None, None]:
        """The chunks, and then a word to the observer, however the request has ended."""
        try:
            yield from self._chunks(request)
        except Exception as error:
            request.error = type(error).__name__
            raise
        finally:
            self.owner.do(
                partial(self._end, request)
            )  # where another thread has dropped the iterator: with the owner's next call

    def _end(self, request: _Request) -> None:
        """Give the entry back, again, as Ctrl-C may have come on the way in or out, and tell of the request."""
        request.session.close()
        self._tell(request)

    def _enter(self) -> None:
        """Check the thread, and tell of a request whose end was read but whose iterator was not.

        What comes now changes the entry, and that request is described by what it left there.
        """
        self.owner.check()
        if self._untold is not None:
            self._tell(self._untold)

    def _tell(self, request: _Request) -> None:
        """Tell the observer of a request that has ended; nothing to do if that was done."""
        if request.is_told:
            return
        request.is_told, self._untold = True, None
        usage = self.usage = request.usage
        if self.observer is not None and usage is not None:
            tell(self.observer, self, lambda: self._observation(request, usage))
        if self._pipeline is not None:
            self._pipeline.logits = None  # nobody else needs them, and a vocabulary is wide

    def _chunks(self, request: _Request) -> Iterator[Chunk]:
        mx.reset_peak_memory()
        request.active_bytes = mx.get_active_memory()
        session, options, clock = request.session, request.options, request.clock
        clock.lookup_began = time.perf_counter()
        with session:
            room = self.context - len(session.prompt)
            # A model that never stops is stopped after a context's worth, even where a full context goes on.
            limit = (
                (options.max_tokens or self.context)
                if request.shift
                else min(options.max_tokens or room, room)
            )
            for cache in session.caches:
                cache.reserve(
                    min(
                        len(session.prompt) + min(limit, options.max_tokens or HEADROOM),
                        self.context,
                    )
                )
            clock.lookup_s = time.perf_counter() - clock.lookup_began
            lookup = session.lookup
            log_lookup(lookup.prompt_tokens, lookup.matched, lookup.cached)
            pipeline = self._pipeline = Pipeline(
                self.model,
                session,
                self.prefill_step,
                request.progress,
                self._mark(session),
                request.shift,
                self._rotate,
            )
            answer = Answer(self.tokenizer, session.prompt, options, limit)
            decoded = pipeline.run(request.next_token, limit)
            try:
                for chunk in answer.chunks(decoded, clock):
                    if chunk.finish_reason is not None:
                        break
                    if answer.count % HEADROOM == 0:
                        self._must_have_room(session.recorded + HEADROOM)
                    yield chunk
            except Exception:
                _keep_only_what_can_be_evaluated(session)
                raise
            finally:
                decoded.close()  # a token that is on its way is recorded now
                if self.owner.is_here:
                    request.usage = self._usage(request, answer, pipeline)
            request.finish_reason = chunk.finish_reason
        self._untold = request
        if (
            options.overflow == "error"
            and chunk.finish_reason == "length"
            and answer.count == room != options.max_tokens
        ):
            yield replace(chunk, finish_reason=None)
            raise ContextFullError(answer.count, self.context)
        # Last of all, so that whoever sees the end of the answer sees the entry as it stays.
        yield replace(chunk, usage=request.usage)

    def _mark(self, session: Session) -> bool:
        """Mark the ends of this prompt's messages for checkpoints, because the next prompt may differ there; return True if any are taken."""
        if session.needs_checkpoints:
            ends = (np.flatnonzero(np.isin(session.prompt, self._message_ends)) + 1).tolist()
            session.mark(places_of(len(session.prompt), ends, ahead=session.is_ahead))
        return session.needs_checkpoints

    def _usage(self, request: _Request, answer: Answer, pipeline: Pipeline) -> Usage:
        session, clock, entry = request.session, request.clock, self._cache.entry
        lookup: Lookup = session.lookup
        evaluated = min(
            sum(count for _, _, count in pipeline.chunks), lookup.prompt_tokens - lookup.cached
        )
        return usage_of(
            lookup, clock, answer.count, request.prepared.earlier, evaluated_tokens=evaluated,
            trimmed_tokens=lookup.entry_tokens - lookup.reused, shifted_tokens=request.discarded + pipeline.shifted,
            reevaluated_tokens=pipeline.reevaluated, prefill_s=pipeline.prefill_s, cache_bytes=entry.nbytes, used_bytes=entry.used_bytes,
            peak_bytes=mx.get_peak_memory(),
        )  # fmt: skip

    def _observation(self, request: _Request, usage: Usage) -> Observation:
        entry, session, pipeline = self.entry, request.session, self._pipeline
        is_known = (
            pipeline is not None and session.forwarded == len(entry.tokens) and not entry.is_shifted
        )
        return Observation(
            prepared=request.prepared,
            prompt=session.prompt,
            options=request.options,
            lookup=session.lookup,
            usage=usage,
            finish=finish_of(request.finish_reason, request.error),
            error=request.error,
            clock=request.clock,
            chunks=pipeline.chunks if pipeline is not None else (),
            entry=entry.tokens,
            active_bytes=request.active_bytes,
            checkpoints=entry.checkpoints.offsets,
            logits=pipeline.logits if pipeline is not None and is_known else None,
            is_greedy=request.next_token.is_greedy,
        )


def plan_model(
    model: str,
    context: int | None = None,
    *,
    prefill_step: int = DEFAULT_PREFILL_STEP,
    kv_bits: int | None = None,
    rewind_slack: int = DEFAULT_SLACK,
    checkpoint_budget: int | None = None,
) -> Plan:
    """The memory plan of `model` without loading its weights; the options are those of `Runner.load`."""
    _check_settings(context or 2, prefill_step, kv_bits, rewind_slack, 1, checkpoint_budget or 0)
    shapes = without_weights(model)
    options = CacheOptions(context or shapes.facts.context, True, rewind_slack, kv_bits)
    demand = demand_of(
        shapes.model,
        shapes.config,
        options,
        prefill_step,
        weights=shapes.weight_bytes,
        checkpoint_budget=checkpoint_budget,
    )
    return choose(
        demand, context, prefill_step, offered=device.offered_bytes(), limit=shapes.facts.context
    )


@dataclass
class _Request:
    """What `generate` hands to the generator. `discarded`: tokens of the prompt that were dropped because it was too long.

    `active_bytes`, `usage`, `finish_reason` and `error` are what is known at its end.
    """

    prepared: Prepared
    session: Session
    options: GenerateOptions
    next_token: NextToken
    progress: Progress | None
    clock: Clock
    shift: Shift | None
    discarded: int
    active_bytes: int = 0
    usage: Usage | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    is_told: bool = False


def _check_settings(
    context: int,
    prefill_step: int,
    kv_bits: int | None,
    rewind_slack: int,
    checkpoint_interval: int,
    checkpoint_budget: int,
) -> None:
    lowest = {
        "context": (context, 2), "prefill_step": (prefill_step, 1), "rewind_slack": (rewind_slack, 0),
        "checkpoint_interval": (checkpoint_interval, 1), "checkpoint_budget": (checkpoint_budget, 0),
    }  # fmt: skip
    for name, (value, low) in lowest.items():
        if not low <= value < 2**31 and name != "checkpoint_budget":
            raise OptionError(
                f"{name}: {value} is out of range, it has to be between {low} and {2**31 - 1}"
            )
        if value < low:
            raise OptionError(f"{name}: {value} is out of range, it has to be at least {low}")
    if kv_bits not in (None, 4, 8):
        raise OptionError(f"kv_bits: {kv_bits} is out of range, it has to be 4 or 8")


def _keep_only_what_can_be_evaluated(session: Session) -> None:
    """After an exception the arrays of the caches may be unusable: try, and free the entry if so."""
    try:
        mx.eval([cache.state for cache in session.caches])
    except Exception as error:
        session.free(f"{type(error).__name__} while evaluating")
