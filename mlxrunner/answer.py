"""Tokens to chunks: text, stop tokens, stop strings, the limit. Knows nothing about models."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from mlxrunner.cache.tokens import TokenArray
from mlxrunner.config import GenerateOptions
from mlxrunner.events import Chunk, FinishReason
from mlxrunner.sampling import Decoded
from mlxrunner.tokenizer import Tokenizer
from mlxrunner.tokenizer.stream import StopScanner


@dataclass
class Clock:
    """Moments on time.perf_counter, and the seconds that the lookup took."""

    began: float
    tokenized: float
    lookup_began: float = 0.0
    lookup_s: float = 0.0
    first: float = 0.0
    last: float = 0.0

    def postpone(self) -> None:
        """The request begins only now, as if it had just been tokenized."""
        now = time.perf_counter()
        self.began, self.tokenized = now - (self.tokenized - self.began), now


class Answer:
    """Tokens to chunks: text, stop tokens, stop strings, the limit. The last chunk has a `finish_reason`."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: TokenArray, options: GenerateOptions, limit: int
    ) -> None:
        self._stream = tokenizer.stream(prompt[-8:].tolist())
        self._scanner = StopScanner(options.stops(tokenizer.template_stops))
        self._ends = options.ends(tokenizer.stop_tokens)
        self._limit = limit
        self.count = 0

    def chunks(self, decoded: Iterator[Decoded], clock: Clock) -> Iterator[Chunk]:
        return (self.take(one, clock) for one in decoded)

    def take(self, one: Decoded, clock: Clock) -> Chunk:
        """The chunk of the next token."""
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
