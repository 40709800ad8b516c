"""A request: a checked prompt with its options, its state while it runs, its answer, and its end.

`prepare` checks a prompt and makes a `Request`, for both runners. `ActiveRequest` is the state of
one that runs beside others, and knows nothing about the others. `AnswerStream` turns its tokens
into chunks. `Observation` describes it for observers once it has ended.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import mlx.core as mx
import numpy as np

from mlxrunner.cache.account import (
    Evicted,
    Lookup,
    OpenAccount,
    PromptAccount,
    TokenAccounting,
)
from mlxrunner.cache.entry import Shift, TokenArray, TokenBuffer, as_tokens, words
from mlxrunner.cache.prefix import EntryLease
from mlxrunner.cache.protocol import END
from mlxrunner.engine.constrain import constraint_of
from mlxrunner.engine.drafting import Drafting
from mlxrunner.engine.sampling import (
    Decoded,
    LogitsProcessor,
    NextToken,
    checked_processors,
    dispatch,
)
from mlxrunner.engine.scheduling.pacing import Priority
from mlxrunner.errors import ContextFullError, LogitsError, MlxrunnerError, OptionError
from mlxrunner.models.facts import ModelFacts
from mlxrunner.options import STOP_IDS, GenerateOptions
from mlxrunner.results import Chunk, FinishReason, Usage, logger
from mlxrunner.templates.chat_template import is_continued
from mlxrunner.tokenizer import Tokenizer
from mlxrunner.tokenizer.base import StopScanner
from mlxrunner.tokenizer.prompt import (
    Prompt,
    TokenizedPrompt,
    check_length,
    check_tokens,
    room_of,
    sees,
    shift_of,
    tokenize_prompt,
)

if TYPE_CHECKING:
    from mlxrunner.engine.scheduling.allocation import Slot


@dataclass
class Clock:
    """The times of a request, in seconds. Moments are on `time.perf_counter`."""

    began: float
    """The moment of the caller's request."""
    tokenized: float
    """The moment at which the prompt was tokenized."""
    lookup_began: float = 0.0
    lookup_s: float = 0.0
    """Seconds that the lookup took."""
    first: float = 0.0
    """The moment at which the first token of the answer was read."""
    last: float = 0.0
    """The moment at which the last token so far was read."""

    def postpone(self) -> None:
        """Move the beginning to now, as if the prompt had just been tokenized."""
        now = time.perf_counter()
        self.began, self.tokenized = now - (self.tokenized - self.began), now


Progress = Callable[[int, int], None]
"""A function of two counts: the prompt tokens that are in the entry, and all prompt tokens."""


@dataclass(eq=False, kw_only=True)
class Request:
    """A prompt and its options, checked and ready to be run."""

    prompt: TokenizedPrompt
    """The prompt that the caller gave."""
    tokens: TokenArray
    """The tokens to evaluate: those of the prompt, shortened by a shift if it is too long."""
    options: GenerateOptions
    next_token: NextToken
    clock: Clock
    context: int
    """Most tokens of the prompt and its answer together."""
    limit: int
    """Most tokens of the answer."""
    shift: Shift | None = None
    """The rule that makes room in a full context; None: the answer ends there."""
    discarded: int = 0
    """Tokens of the prompt that were dropped because it was too long."""

    def error_at(self, last: Chunk) -> ContextFullError | None:
        """Return the error that ends the request after its `last` chunk, or None.

        With `overflow="error"` it is an error if the full context ended the answer.
        """
        is_full = last.finish_reason == "length" and self.limit != self.options.max_tokens
        if self.options.overflow == "error" and is_full:
            return ContextFullError(self.limit, self.context)
        return None


def prepare(
    prompt: Prompt,
    options: GenerateOptions,
    *,
    tokenizer: Tokenizer,
    facts: ModelFacts,
    context: int,
    began: float,
    processors: Sequence[LogitsProcessor] = (),
) -> Request:
    """Tokenize `prompt`, check it, and make it fit into `context` tokens.

    `began`: the moment of the caller's request, on `time.perf_counter`. `processors`: functions of
    all tokens so far and the logits that return changed logits. Raise PromptError,
    ContextLengthError or OptionError if the request can't be run.
    """
    tokenized = tokenize_prompt(
        tokenizer,
        prompt,
        options.variables,
        room_of(options, context),
        options.continue_final_message,
    )
    tokens = tokenized.tokens
    check_tokens(tokens, facts.vocab, has_pictures=bool(tokenized.pictures))
    _check_ends(options, facts.vocab)
    if sees(tokenizer):
        _check_seeing(options)
    shift = shift_of(options, tokenizer, tokenized, context)
    discarded = 0
    if shift is None:
        check_length(tokens, context)
    elif len(tokens) >= context:
        discarded = shift.discard(len(tokens))
        tokens = np.concatenate([tokens[: shift.keep], tokens[shift.keep + discarded :]])
    constraint = None
    if options.has_form:
        constraint = constraint_of(options, tokenizer, facts.vocab, _words(tokenized, options))
    elif tokenized.constraint is not None:
        constraint = tokenized.constraint(options.ends(tokenizer.stop_tokens))
    return Request(
        prompt=tokenized,
        tokens=tokens,
        options=options,
        next_token=NextToken(options, facts.vocab, checked_processors(processors), constraint),
        clock=Clock(began - tokenized.seconds, time.perf_counter()),
        context=context,
        limit=_limit(options, context, len(tokens)),
        shift=shift,
        discarded=discarded,
    )


def _words(prompt: TokenizedPrompt, options: GenerateOptions) -> str:
    messages = prompt.messages
    if messages and is_continued(messages, options.continue_final_message):
        return messages[-1]["content"]
    return ""


def _check_ends(options: GenerateOptions, vocab: int) -> None:
    """Raise OptionError for a stop token beyond the vocabulary, which could never come."""
    for name in STOP_IDS:
        beyond = [token for token in getattr(options, name) or () if vocab and token >= vocab]
        if beyond:
            raise OptionError(
                f"{name}: {beyond[0]} is beyond the model's vocabulary, it has to be between 0 "
                f"and {vocab - 1}"
            )


def _check_seeing(options: GenerateOptions) -> None:
    """Raise OptionError for what a model that sees pictures can't do."""
    if options.overflow == "shift":
        raise OptionError(
            "overflow: a model that sees pictures can't drop a part of its context: use 'stop'"
        )
    if options.speculate == "lookup":
        raise OptionError("speculate: nothing is guessed for a model that sees pictures: use 'off'")


def _limit(options: GenerateOptions, context: int, prompt: int) -> int:
    """Return the most tokens of the answer to `prompt` tokens.

    With shifts, an answer without a limit ends after `context` tokens.
    """
    if options.overflow == "shift":
        return options.max_tokens or context
    room = context - prompt
    return min(options.max_tokens or room, room)


@dataclass(eq=False, kw_only=True)
class ActiveRequest(Request):
    """A request that runs beside others, and its sequence."""

    answer: AnswerStream
    lookup: Lookup
    counted: OpenAccount = field(init=False)
    """The account of its prompt, once it has a slot."""
    account: PromptAccount = PromptAccount()  # noqa: RUF009  # immutable
    """The account of its prompt, once it has ended."""
    slot: Slot = field(init=False)
    lease: EntryLease = field(init=False)
    """Its hold on the slot's entry, once it is placed."""
    todo: TokenArray = field(init=False)
    """Tokens to evaluate before the request decodes; empty once it does.

    These are the prompt, or the part of the conversation that a shift kept if keys can't be moved,
    or all of it if moved keys were lost. Then they may be more than fit into the context.
    """
    place: int = 0
    """Number of tokens whose forward pass was dispatched."""
    evaluated_from: int = 0
    """The offset from which on `todo` had to be evaluated."""
    sampled: int = 0
    """Number of the answer's tokens that were dispatched."""
    last: mx.array | None = None
    """The last dispatched token of the answer, `[1]`; None before the first."""
    said: list[int] = field(default_factory=list)
    """Tokens of the answer that were read."""
    drafting: Drafting | None = None
    """The sources of guesses of its answer; None: nothing is guessed."""
    draft: list[int] = field(default_factory=list)
    """Tokens that the step under way guesses after the current one."""
    masks: list[Any] = field(default_factory=list)
    """The masks of its form at each token of the draft, and after it."""
    run: int = 0
    """Number of the answer's tokens that are recorded in the slot, or were before a shift."""
    history: mx.array | None = None
    """All tokens so far, `[n]`; None if the sampling does not need them."""
    guessed: deque[Decoded] = field(default_factory=deque)
    """Tokens that were read together, with guesses, and are not delivered yet: for one slot."""
    num_read: int = 0
    """Number of tokens that were read together."""
    late_error: LogitsError | None = None
    """The error that ends it behind these."""
    together: list[int] = field(default_factory=list)
    """The tokens of the answer that the last pass has recorded, if there were several."""
    spans: list[tuple[float, float, int]] = field(default_factory=list)
    """Begin, end (on `time.perf_counter`) and tokens of each pass of its prefill, for one slot."""
    next_checkpoint: float = 0
    """The offset from which on a checkpoint may be due."""
    logits: tuple[int, mx.array] | None = None
    """The logits `[n, vocab]` of its last pass for one slot, and the offset after it."""
    is_ahead: bool = False
    """True if the prompt is evaluated before its answer is asked for: there is none."""
    reader: Callable[[], Any] = lambda: None
    """A function that returns the iterator of its chunks; None once it is gone. For one slot."""
    is_dropped: bool = False
    """True if another thread has dropped its iterator."""
    end: tuple[Usage, FinishReason | None, str | None] | None = None
    """Its usage, how it has ended and the name of its error, until the observers are told."""
    chunks: deque[Chunk] = field(default_factory=deque)
    """The chunks that the caller has not taken yet."""
    priority: Priority = "interactive"
    deadline: float | None = None
    """Seconds after which it ends with an error; None: it has time."""
    asked: float = field(default_factory=time.perf_counter)
    """The moment of its submission."""
    claimed: int = 0
    """Tokens of its prompt and answer for which it has claimed cells."""
    submitted: int = 0
    """Its number among the requests that the runner began, from 1."""
    evicted: list[Evicted] = field(default_factory=list)
    """The conversations that were given up to make room for it."""
    failures: list[int] = field(default_factory=list)
    """The steps, by number, that carried it and failed."""
    is_placed: bool = False
    """True once its slot has the shared prefix, so that the rest can be evaluated."""
    source: Slot | None = None
    """The slot whose prefix the request waits for, until it is placed; None: it waits for room."""
    offload_task: Generator[None, None, int] | None = None
    """The work on its slot that has to be done before it is placed: see `OffloadTasks`."""
    parked_ahead: set[int] = field(default_factory=set)
    """The slots whose conversations were parked to make way for it."""
    promised: int = 0
    """Number of tokens of the common prefix that `source` will have."""
    trimmed: int = 0
    """Tokens that its slot dropped to get back to the reused prefix."""
    moved: int = 0
    """Number of its first tokens whose keys a shift has moved or kept; 0 before the first."""
    shifted: int = 0
    """Tokens that were dropped because the context was full."""
    reevaluated: int = 0
    """Tokens that were evaluated again after a shift."""
    is_paused: bool = False
    """True while nobody reads its chunks: it does not decode further."""
    is_stuck: bool = False
    """True if its keys could not be moved in a full context."""
    active_bytes: int = 0
    """Bytes of MLX memory in use when it began."""
    began: tuple[int, int] = (0, 0)
    """The moment of its beginning: see `Scheduler.moment`."""
    ended: tuple[int, int] = (0, 0)
    """The moment of its end: see `Scheduler.moment`."""
    ending: Ending = "own"
    finished: bool = False
    error: MlxrunnerError | None = None
    """The error that ended it; None if no error did."""

    @classmethod
    def of(cls, request: Request, answer: AnswerStream) -> ActiveRequest:
        """Make an active request of a prepared `request` that has not run yet."""
        tokens = request.tokens
        return cls(
            **vars(request),
            answer=answer,
            lookup=Lookup(len(tokens), 0, 0, 0),
            shifted=request.discarded,
            history=mx.array(words(tokens)) if request.next_token.needs_history else None,
        )

    def __post_init__(self) -> None:
        self.todo = self.tokens

    @property
    def due(self) -> float | None:
        """The moment of its deadline, or None."""
        return None if self.deadline is None else self.asked + self.deadline

    @property
    def left(self) -> int:
        """Number of tokens in `todo` that are not dispatched yet."""
        return max(0, len(self.todo) - self.place)

    @property
    def evaluated(self) -> int:
        """Number of tokens of its prompt that were dispatched, without the reused ones."""
        return (len(self.tokens) if self.sampled else self.place) - self.lookup.cached

    @property
    def holds_cells(self) -> bool:
        """True if it has cells, or claims the rest of a prefix that it waits for."""
        return self.is_placed or self.source is not None or self.offload_task is not None

    def open_account(self, accounting: TokenAccounting) -> None:
        """Begin to count the tokens of the prompt, before any of them is evaluated."""
        name = None if self.is_ahead else self.prompt.conversation
        self.counted = accounting.begin(self.tokens, self.prompt, name)

    def close_account(self, accounting: TokenAccounting) -> None:
        """Count the tokens of the prompt, at the end of the request."""
        found, earlier = self.lookup, self.prompt.earlier
        known = max(found.known, 0 if earlier is None else earlier.tokens)
        is_exact = self.shifted == self.discarded
        there = len(self.slot.tokens) - len(self.tokens) if self.is_placed else 0
        answer = self.said[: max(0, self.sampled - 1, there)] if is_exact else []
        if self.prompt.views is not None:  # pictures are large, and only their tokens are compared
            self.counted.request.source = replace(self.prompt, views=None)
        self.account = accounting.end(
            self.counted, found.cached, known, found.cached + self.evaluated, as_tokens(answer)
        )

    def stop_offload_task(self) -> None:
        """Leave the work on its slot undone: it may have to begin again."""
        offload_task, self.offload_task = self.offload_task, None
        if offload_task is not None:
            offload_task.close()

    @property
    def is_read(self) -> bool:
        """True if all of the answer's tokens that were dispatched are read."""
        return self.sampled == len(self.said)

    @property
    def waiting(self) -> int:
        """Number of the answer's tokens that a forward pass has to evaluate before the next one.

        Right guesses are among them if they were undone with wrong ones.
        """
        return len(self.said) - self.run if self.is_read else 1

    @property
    def is_decoding(self) -> bool:
        """True if it needs a forward pass of the token that was sampled last."""
        waits = self.is_paused or self.left
        return self.is_placed and not waits and self.sampled < self.limit

    def coming_tokens(self, count: int) -> mx.array:
        """Return the next tokens to dispatch: `count` of `todo`, or the last sampled one.

        The device may still be computing a sampled token. If it was read, a draft may follow it.
        """
        if self.left:
            return mx.array(self.todo[self.place : self.place + count])
        if self.run < len(self.said):
            return mx.array([*self.said[self.run :], *self.draft], mx.int32)
        assert self.last is not None
        return self.last

    def advance(self, count: int) -> None:
        """Record that the forward pass of its next `count` tokens was dispatched."""
        if self.left:
            self.lease.record(self.todo[self.place : self.place + count])
        elif self.draft:
            self.sampled += len(self.draft) + 1  # `keep` has the true number
        elif self.run < len(self.said):  # it was read before
            self.together = self.said[self.run :]
            self.lease.record(self.together)
            self.run = len(self.said)
        else:
            self.together = []
        self.place += count
        if len(self.todo) and not self.left:
            self.todo, self.run = self.todo[:0], self.sampled

    def take(self, token: int) -> None:
        """Record a token of the answer that was read."""
        self.said.append(token)
        if self.drafting is not None:
            self.drafting.add(token)
        if not self.draft and self.place > self.lease.recorded:
            # Its forward pass was dispatched with this step.
            self.lease.record((token,))
            self.run += 1

    def keep(self, right: int) -> None:
        """Keep the first `right` guesses of the draft, which were read, and undo the others.

        If a layer can't drop the wrong ones, all go back to where the step began.
        """
        before, lease = self.lease.recorded, self.lease
        end = self.run + self.place - before - len(self.draft) + right
        self.together = self.said[self.run : end]
        lease.accept(self.together)
        self.sampled, self.draft = len(self.said), []
        self.place = lease.recorded
        self.run += self.place - before
        if self.place < before:  # a layer broke: evaluate the rest as a prompt
            self.todo = as_tokens([*lease.tokens, *lease.pending, *self.said[end:]])
            self.restart()

    def logits_behind(self, offset: int) -> mx.array | None:
        """Return the logits `[1, vocab]` after the first `offset` tokens, if they are there."""
        if self.logits is None:
            return None
        end, rows = self.logits
        row = rows.shape[0] - 1 - (end - offset)
        return rows[row : row + 1] if 0 <= row < rows.shape[0] else None

    def checkpoint_if_due(self) -> None:
        """Take a checkpoint of the slot's present state if one is due."""
        lease = self.lease
        if lease.recorded < self.next_checkpoint:
            return
        if not lease.needs_checkpoints:
            self.next_checkpoint = math.inf
            return
        if lease.recorded >= lease.checkpoint_due:
            dispatch(lease.checkpoint())
        self.next_checkpoint = lease.checkpoint_due

    def go_back(self) -> None:
        """Return to the tokens that were read, between two steps. `restart` has to follow.

        Tokens that were sampled and not read are sampled again, as they were.
        """
        self.draft, is_unread = [], self.sampled > len(self.said)
        if is_unread and self.left:  # it was sampled from what a shift has dropped since
            self._repeat()
        else:
            self.todo = self._conversation()
        if is_unread:
            self.sampled = len(self.said)
            self.next_token.rewind(self.sampled)
            if self.history is not None:
                self.history = mx.array([*words(self.tokens).tolist(), *self.said], mx.int32)

    def restart(self) -> None:
        """Keep what the slot has of `todo`; the rest is evaluated again."""
        self.next_checkpoint = 0  # offsets may have moved: ask again
        if self.is_placed:
            before = self.place
            self.lease.restart(self.todo[:-1])
            if self.lease.recorded < self.moved:
                self._repeat()
                self.lease.restart(self.todo[: min(self.slot.exact, self.lease.exact)])
                self.slot.exact = END
            self.place = self.lease.recorded
            self.reevaluated += max(0, before - self.place)

    def give_way(self) -> None:
        """Give the slot's tokens up, between two steps, and wait for room to continue."""
        self.go_back()
        self.restart()
        self.lease.close()
        if self.moved:
            self._repeat()
        self.is_placed, self.source, self.place = False, None, 0

    def _repeat(self) -> None:
        """Evaluate all tokens again, with the same shifts.

        What a shift keeps was evaluated with the dropped tokens in sight. Without these its keys
        would be others, and so would the answer.
        """
        self.todo = np.append(self.tokens, as_tokens(self.said))
        self.moved, self.shifted = 0, self.discarded

    def _conversation(self) -> TokenArray:
        """Return the tokens to evaluate before the next one that was not read is sampled."""
        if self.left:
            return self.todo
        recorded = as_tokens(self.lease.tokens)
        return np.append(recorded, as_tokens(self.said[self.run :]))

    def observation(
        self, usage: Usage, reason: FinishReason | None, error: str | None, **more: Any
    ) -> Observation:
        """Describe the request, at its end, for observers. `more`: the other fields."""
        return Observation(
            prepared=self.prompt,
            prompt=self.tokens,
            options=self.options,
            lookup=self.lookup,
            account=self.account,
            usage=usage,
            finish="error" if error is not None else reason or "interrupted",
            error=error,
            clock=self.clock,
            entry=self.slot.tokens,
            active_bytes=self.active_bytes,
            **more,
        )

    def usage(self, **more: Any) -> Usage:
        """Return the usage of the request, at its end. `more`: the other fields of Usage."""
        found, clock, account, earlier = self.lookup, self.clock, self.account, self.prompt.earlier
        missed, displaced, completion = account.missed, account.displaced, self.answer.count
        counted: dict[str, Any] = {
            "prompt_tokens": found.prompt_tokens,
            "matched_tokens": found.matched,
            "cached_tokens": found.cached,
            "prefetched_tokens": found.ahead,
            "evaluated_tokens": self.evaluated,
            "completion_tokens": completion,
            "missed_tokens": missed,
            "displaced_tokens": displaced,
            "new_tokens": found.prompt_tokens - found.cached - missed - displaced,
            "lost_tokens": missed + displaced,
            "shifted_tokens": self.shifted,
            "reevaluated_tokens": self.reevaluated,
            "outcome": found.outcome(missed),
            "reason": found.reason_for(account, earlier.reason if earlier else ""),
            "trim_limited_by": found.limited_by,
            "checkpoint": found.checkpoint,
            "evicted_by": found.evicted_by,
            "tokenize_s": clock.tokenized - clock.began,
            "lookup_s": clock.lookup_s,
            "ttft_s": clock.first - clock.began if completion else 0.0,
            "decode_s": clock.last - clock.first,
            "peak_bytes": mx.get_peak_memory(),
        }
        if (drafting := self.drafting) is not None:
            sources = drafting.by_source.items()
            counted["draft_passes"] = drafting.passes
            counted["drafts"] = [{"source": name, **vars(counts)} for name, counts in sources]
        return Usage.from_dict(counted | more)

    @property
    def scheduling(self) -> SchedulingRecord:
        """The facts that a replay needs. A sampled token is run when the next one is sampled."""
        answer = as_tokens(self.said[: max(0, self.sampled - 1)])
        keep = None if self.shift is None else self.shift.keep
        return SchedulingRecord(
            slot=self.slot.number,
            began=self.began,
            ended=self.ended,
            ending=self.ending,
            limit=self.limit,
            keep=keep,
            said=len(self.said),
            sampled=self.sampled,
            stuck=self.is_stuck,
            answer=answer,
            submitted=self.submitted,
            evicted=self.evicted,
            failures=self.failures,
        )


SEED_TOKENS = 16
"""Most tokens in the last forward pass of a prefill.

This pass gives the logits of the answer's first token. On most devices it takes no longer than a
pass of one token.
"""
CLEAR_EVERY = 256
"""Tokens of an answer after which MLX's unused buffers are freed."""


class AnswerStream:
    """A converter of one answer's tokens into chunks of text.

    It ends at a stop token, a stop string or the limit. The last chunk has a `finish_reason`.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: TokenArray, options: GenerateOptions, limit: int
    ) -> None:
        """Make a stream for the answer to `prompt`, of at most `limit` tokens."""
        self._stream = tokenizer.stream(words(prompt[-8:]).tolist())
        self._scanner = StopScanner(options.stops(tokenizer.template_stops))
        self._ends = options.ends(tokenizer.stop_tokens)
        self._limit = limit
        self.count = 0
        """Tokens of the answer so far."""

    def take(self, one: Decoded, clock: Clock) -> Chunk:
        """Return the chunk of the next token, and set its time on `clock`."""
        clock.last = time.perf_counter()
        if self.count == 0:
            clock.first = clock.last
        self.count += 1
        reason, text = self._read(one)
        return Chunk(text, one.token, one.logprob, one.top_logprobs, reason)

    def _read(self, one: Decoded) -> tuple[FinishReason | None, str]:
        ended = one.token in self._ends
        text = "" if ended else self._scanner.add(self._stream.add(one.token))
        ended = ended or one.is_last
        if self._scanner.stopped:
            return "stop", text
        if not ended and self.count < self._limit:
            return None, text
        text += self._scanner.add(self._stream.finish())
        return "stop" if ended or self._scanner.stopped else "length", text + self._scanner.finish()


Finish = FinishReason | Literal["interrupted", "error"]
Ending = Literal["own", "cancelled", "forgotten", "failed", "no room", "no token"]


@dataclass(frozen=True)
class SchedulingRecord:
    """The facts about one of several parallel requests that a replay needs: see `ActiveRequest`.

    Moments are pairs: the steps of the runner so far, and the calls since the last step. A call
    submits a request, successfully or not, or cancels one.
    """

    slot: int
    began: tuple[int, int]
    ended: tuple[int, int]
    ending: Ending
    """The cause of its end.

    "own": the end of its answer; "cancelled"; "forgotten": a step was interrupted; "failed":
    it made a step fail; "no room"; "no token": its form allows none.
    """
    limit: int
    keep: int | None
    """Tokens that a full context keeps; None if the request does not shift."""
    said: int
    sampled: int
    stuck: bool
    answer: TokenArray
    """The tokens of the answer that were run through the model."""
    submitted: int = 0
    """Its number among the requests that the runner began, from 1; 0 if it is not known."""
    evicted: Sequence[Evicted] = ()
    failures: Sequence[int] = ()


@dataclass(frozen=True)
class Observation:
    """A request that has ended. Moments are on `time.perf_counter`."""

    prepared: TokenizedPrompt
    prompt: TokenArray
    """The tokens that were evaluated or reused.

    These are the tokens of `prepared` without those that a full context dropped.
    """
    options: GenerateOptions
    lookup: Lookup
    account: PromptAccount
    usage: Usage
    finish: Finish
    error: str | None
    """The name of the exception that ended the request; None if no exception did."""
    clock: Clock
    chunks: Sequence[tuple[float, float, int]]
    """Begin, end and number of tokens of each forward pass of the prefill."""
    entry: TokenBuffer
    """The tokens of the entry after the request, valid until the next request."""
    active_bytes: int
    checkpoints: Sequence[int] = ()
    """The offsets of the entry's checkpoints."""
    logits: Any = None
    """The logits after the entry's last token, `[1, vocab]`; None if they are not known."""
    is_greedy: bool = False
    """True if each token was the most likely one by the model's own logits."""
    scheduling: SchedulingRecord | None = None
    """The facts that a replay needs of a parallel request; None for a single request."""
    ended: float = field(default_factory=time.perf_counter)


class Observer(Protocol):
    """A function that is called once for each request, after its last chunk was taken.

    Its exceptions are logged. They never make a request fail.
    """

    def __call__(self, runner: Any, observation: Observation, /) -> None: ...


def tell(observers: Sequence[Observer], runner: Any, observe: Callable[[], Observation]) -> None:
    """Call each observer with the result of `observe`.

    An error of one observer is logged and does not affect the others.
    """
    if not observers:
        return
    try:
        observation = observe()
    except Exception as error:
        _not_recorded(error)
        return
    for observer in tuple(observers):
        try:
            observer(runner, observation)
        except Exception as error:
            _not_recorded(error)


def _not_recorded(error: Exception) -> None:
    logger.warning("the request was not recorded: %s: %s", type(error).__name__, error)
