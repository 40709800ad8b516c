"""The state of a request that runs beside others. Knows nothing about the others."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrunner.cache.account import (
    OpenAccount,
    PromptAccount,
    TokenAccounting,
)
from mlxrunner.cache.lookup import Evicted, Lookup
from mlxrunner.cache.pool.interface import END
from mlxrunner.cache.prefix import EntryLease
from mlxrunner.cache.tokens import TokenArray, as_tokens, words
from mlxrunner.engine.answer import AnswerStream
from mlxrunner.engine.observation import Ending, Finish, Observation, SchedulingRecord, finish_of
from mlxrunner.engine.requests import Request
from mlxrunner.engine.sampling import Decoded, dispatch
from mlxrunner.engine.scheduling.pacing import Priority
from mlxrunner.engine.scheduling.slots import Slot
from mlxrunner.engine.speculation.drafting import Drafting
from mlxrunner.errors import LogitsError, MlxrunnerError
from mlxrunner.results import Chunk, FinishReason, Usage


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
    """Tokens that the step under way guesses behind the current one."""
    masks: list[Any] = field(default_factory=list)
    """The masks of its form at each token of the draft, and behind it."""
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
    """The logits `[n, vocab]` of its last pass for one slot, and the offset behind it."""
    is_ahead: bool = False
    """True if the prompt is evaluated before its answer is asked for: there is none."""
    reader: Callable[[], Any] = lambda: None
    """A function that returns the iterator of its chunks; None once it is gone. For one slot."""
    is_dropped: bool = False
    """True if another thread has dropped its iterator."""
    end: tuple[Usage, Finish, str | None] | None = None
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

        If a layer can't go back behind them, all go back to where the step began.
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
        """Return the logits `[1, vocab]` behind the first `offset` tokens, if they are there."""
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
        """Give the slot's tokens up, between two steps, and wait for room to go on."""
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
        self, usage: Usage, reason: FinishReason | None, error: str | None
    ) -> Observation:
        """Describe the request, at its end, for observers."""
        clock = self.clock
        # One span, because its steps also serve other requests.
        prefill = (clock.lookup_began + clock.lookup_s, clock.first, usage.evaluated_tokens)
        return Observation(
            prepared=self.prompt,
            prompt=self.tokens,
            options=self.options,
            lookup=self.lookup,
            account=self.account,
            usage=usage,
            finish=finish_of(reason, error),
            error=error,
            clock=clock,
            chunks=[prefill] if self.answer.count else [],
            entry=self.slot.tokens,
            active_bytes=self.active_bytes,
            scheduling=self.scheduling,
        )

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
