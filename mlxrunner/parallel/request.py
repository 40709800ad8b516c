"""One request among others: its state, the step that carries it, its answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from mlxrunner.answer import Answer, Clock
from mlxrunner.cache.lookup import Lookup
from mlxrunner.cache.tokens import TokenArray
from mlxrunner.config import GenerateOptions
from mlxrunner.errors import MlxrunnerError
from mlxrunner.events import Chunk, FinishReason, Usage
from mlxrunner.observation import Observation, finish_of
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
        logprobs = [(chunk.logprob, chunk.top_logprobs or {}) for chunk in chunks if chunk.logprob is not None]
        return cls("".join(chunk.text for chunk in chunks), tokens, last.finish_reason, last.usage, logprobs or None)


@dataclass(eq=False)
class Request:
    """One sequence on its way. `place`: tokens whose forward pass was dispatched; `sampled`: answers dispatched."""

    slot: Slot
    prompt: TokenArray
    options: GenerateOptions
    limit: int
    answer: Answer
    clock: Clock
    next_token: NextToken
    prepared: Prepared
    lookup: Lookup
    trimmed: int = 0
    place: int = 0
    sampled: int = 0
    source: tuple[Slot, int] | None = None  # waits until this slot has evaluated so many tokens of the common prefix
    shift: Shift | None = None
    shifted: int = 0
    chunks: deque[Chunk] = field(default_factory=deque)
    finished: bool = False
    error: MlxrunnerError | None = None
    history: mx.array | None = None
    active_bytes: int = 0

    @property
    def promised(self) -> int:
        """Prompt tokens that it will not have to store, because it waits for somebody else's."""
        return min(self.source[1], len(self.prompt) - 1) if self.source is not None else 0

    @property
    def left(self) -> int:
        """Prompt tokens that were not dispatched yet."""
        return max(0, len(self.prompt) - self.place)

    def observation(self, usage: Usage, reason: FinishReason | None, error: str | None) -> Observation:
        """For whoever watches, at its end."""
        clock = self.clock
        # One span, as its steps are others' as well.
        prefill = (clock.lookup_began + clock.lookup_s, clock.first, usage.evaluated_tokens)
        return Observation(
            self.prepared, self.prompt, self.options, self.lookup, usage, finish_of(reason, error), error, clock,
            chunks=[prefill] if self.answer.count else [], entry=self.slot.tokens, active_bytes=self.active_bytes,
        )  # fmt: skip


@dataclass(frozen=True)
class Step:
    """A dispatched forward pass: which requests it sampled for, and the tokens that are on their way."""

    requests: list[Request]
    sampled: list[Sampled]
