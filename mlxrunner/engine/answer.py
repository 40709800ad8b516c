"""Turn the tokens of an answer into chunks. Knows nothing about models."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from mlxrunner.cache.tokens import TokenArray, words
from mlxrunner.engine.sampling import Decoded
from mlxrunner.options import GenerateOptions
from mlxrunner.results import Chunk, FinishReason
from mlxrunner.tokenizer import Tokenizer
from mlxrunner.tokenizer.base import StopScanner

SEED_TOKENS = 16
"""Most tokens in the last forward pass of a prefill.

This pass gives the logits of the answer's first token. On most devices it takes no longer than a
pass of one token.
"""
CLEAR_EVERY = 256
"""Tokens of an answer after which MLX's unused buffers are freed."""


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

    def chunks(self, decoded: Iterator[Decoded], clock: Clock) -> Iterator[Chunk]:
        """Yield one chunk for each token."""
        return (self.take(one, clock) for one in decoded)

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
