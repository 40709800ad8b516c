"""The Runner: one model, its tokenizer, and the entry that keeps what a request evaluated."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from os import PathLike
from typing import Any, Unpack

import mlx.core as mx

from mlxrunner.cache.entry import CacheEntry
from mlxrunner.cache.tokens import TokenArray, common_prefix
from mlxrunner.config.option import Option, check_callable, check_flag, check_kind
from mlxrunner.engine.answer import Clock
from mlxrunner.engine.control import EntryControl
from mlxrunner.engine.one_slot import HEADROOM, OneSlot
from mlxrunner.engine.owner import Owned
from mlxrunner.engine.pace import Pace
from mlxrunner.engine.requests import Progress, Request, prepare
from mlxrunner.engine.sampling import LogitsProcessor, NextToken
from mlxrunner.engine.settings import EngineSettings
from mlxrunner.loading import cache_options, load
from mlxrunner.memory.plan import Plan
from mlxrunner.models.facts import ModelFacts
from mlxrunner.models.load import LoadProgress, tell_nobody
from mlxrunner.models.resolve import name_of
from mlxrunner.options import (
    PER_REQUEST,
    WIRE,
    GenerateKwargs,
    GenerateOptions,
    Reserve,
    RunnerKwargs,
    RunnerSettings,
)
from mlxrunner.results import Chunk, Result
from mlxrunner.tokenizer import Tokenizer
from mlxrunner.tokenizer.prompt import (
    Prompt,
    check_length,
    check_tokens,
    tokenize_prompt,
)

FIRST, FEWEST, PAUSE_S = 8, 2, 0.04
"""Pieces of a prompt that is evaluated ahead.

Tokens of the first piece, tokens of the smallest piece, and seconds that a piece may take.
"""
CHECKPOINT_BUDGET = 2**30
"""Bytes for checkpoints if no plan gives another number."""


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
        pace = Pace(PAUSE_S, first=FIRST, fewest=FEWEST, growth=2)
        return self._evaluate(request, pace, cancelled)
