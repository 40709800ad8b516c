"""One request among others: its state, the step that carries it, its answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from mlxrunner.answer import Answer, Clock
from mlxrunner.cache.lookup import Lookup
from mlxrunner.cache.tokens import TokenArray, as_tokens
from mlxrunner.config import GenerateOptions
from mlxrunner.errors import MlxrunnerError
from mlxrunner.events import Chunk, FinishReason, Usage
from mlxrunner.observation import Beside, Ending, Observation, finish_of
from mlxrunner.overflow import Shift
from mlxrunner.parallel.slots import Slot
from mlxrunner.sampling import NextToken, Sampled
from mlxrunner.tokenizer.prompt import Prepared


@dataclass(frozen=True)
class Result:
    """A finished answer. `logprobs`, if they were asked for: of each token, its own and those of the likeliest ones by id."""

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    usage: Usage
    logprobs: list[tuple[float, dict[int, float]]] | None = None

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> Result:
        """From all chunks of a request; MlxrunnerError if it was cancelled before it ended."""
        last = chunks[-1] if chunks else None
        if last is None or last.usage is None or last.finish_reason is None:
            raise MlxrunnerError("the request was cancelled before it ended")
        tokens = [chunk.token for chunk in chunks if chunk.token is not None]
        logprobs = [
            (chunk.logprob, chunk.top_logprobs or {})
            for chunk in chunks
            if chunk.logprob is not None
        ]
        return cls(
            "".join(chunk.text for chunk in chunks),
            tokens,
            last.finish_reason,
            last.usage,
            logprobs or None,
        )


class StepFailedError(MlxrunnerError):
    """A step that carried a request failed, maybe because of another one that it carried as well."""


@dataclass(eq=False)
class Request:
    """One sequence on its way.

    `todo`: tokens that are evaluated before it decodes: the prompt, or what a shift has kept of the conversation where keys can't be moved;
    empty from then on. `place`: tokens whose forward pass was dispatched; `sampled`: answers dispatched, `last` the last of them.
    """

    prompt: TokenArray
    options: GenerateOptions
    limit: int
    answer: Answer
    clock: Clock
    next_token: NextToken
    prepared: Prepared
    lookup: Lookup
    slot: Slot = field(init=False)
    todo: TokenArray = field(init=False)
    trimmed: int = 0
    place: int = 0
    sampled: int = 0
    last: mx.array | None = None
    is_placed: bool = False
    """True once its slot has the prefix it shares with others, so that the rest can be evaluated."""
    source: Slot | None = None
    """Until it is placed: waits until this slot has the `promised` tokens of a common prefix; None: waits for room."""
    promised: int = 0
    shift: Shift | None = None
    shifted: int = 0
    reevaluated: int = 0
    chunks: deque[Chunk] = field(default_factory=deque)
    finished: bool = False
    error: MlxrunnerError | None = None
    history: mx.array | None = None
    active_bytes: int = 0
    said: list[int] = field(default_factory=list)
    """Tokens of the answer that were read."""
    began: tuple[int, int] = (0, 0)
    ended: tuple[int, int] = (0, 0)
    """When, as the scheduler's `moment` says."""
    ending: Ending = "own"
    is_stuck: bool = False
    """Its keys could not be moved in a full context."""

    def __post_init__(self) -> None:
        self.todo = self.prompt

    @property
    def left(self) -> int:
        """Tokens to do that were not dispatched yet."""
        return max(0, len(self.todo) - self.place)

    @property
    def evaluated(self) -> int:
        """Tokens of its prompt whose forward pass was dispatched."""
        return (len(self.prompt) if self.sampled else self.place) - self.lookup.cached

    @property
    def is_decoding(self) -> bool:
        """Whether the next thing it needs is the forward pass of the token that was sampled last."""
        return self.is_placed and not self.left and self.sampled < self.limit

    def coming_tokens(self, count: int) -> mx.array:
        """The next `count` that are to be dispatched, `[count]`; the one that was sampled may still be on its way."""
        if self.left:
            return mx.array(self.todo[self.place : self.place + count])
        assert self.last is not None
        return self.last

    def advance(self, count: int) -> None:
        """The forward pass of its next `count` tokens was dispatched."""
        self.slot.tokens.extend(self.todo[self.place : self.place + count])
        self.place += count
        if not self.left:
            self.todo = self.todo[:0]

    def observation(
        self, usage: Usage, reason: FinishReason | None, error: str | None
    ) -> Observation:
        """For whoever watches, at its end."""
        clock = self.clock
        # One span, as its steps are others' as well.
        prefill = (clock.lookup_began + clock.lookup_s, clock.first, usage.evaluated_tokens)
        return Observation(
            self.prepared, self.prompt, self.options, self.lookup, usage, finish_of(reason, error), error, clock,
            chunks=[prefill] if self.answer.count else [], entry=self.slot.tokens, active_bytes=self.active_bytes,
            beside=self.beside,
        )  # fmt: skip

    @property
    def beside(self) -> Beside:
        """What it takes to replay it. A sampled token is run when the next one is sampled."""
        answer = as_tokens(self.said[: max(0, self.sampled - 1)])
        keep = None if self.shift is None else self.shift.keep
        return Beside(
            self.slot.number, self.began, self.ended, self.ending, self.limit, keep, len(self.said), self.sampled, self.is_stuck,
            answer,
        )  # fmt: skip


Step = list[tuple[Request, Sampled]]
"""A dispatched forward pass: what it sampled, and for whom."""
