"""From logits to the next token: chosen once per request, mlx-lm's sampler functions, no work that nobody asked for."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, make_logits_processors

from mlxrunner.config import GenerateOptions
from mlxrunner.constrain import Constraint

COLDEST = 1e-4
"""A lower temperature is greedy: its inverse would overflow."""
Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
dispatch: Callable[[list[mx.array]], None] = mx.async_eval
"""Begin to evaluate arrays; whoever reads one waits for it."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """A token of the answer, on the host. `is_last`: the form that was asked for is complete with it."""

    token: int
    logprob: float | None = None
    top_logprobs: dict[int, float] | None = None
    is_last: bool = False


@dataclass(frozen=True)
class Sampled:
    """A token that may still be on its way: arrays, `token` of shape [1]; the others only if log-probabilities were asked for."""

    token: mx.array
    logprob: mx.array | None = None
    top_tokens: mx.array | None = None
    top_logprobs: mx.array | None = None

    def read(self) -> int:
        """The token, waited for."""
        token: Any = self.token.item()
        return int(token)

    def decoded(self, token: int) -> Decoded:
        """With its log-probabilities, if they were asked for; `token`: as it was read."""
        if self.logprob is None:
            return Decoded(token)
        logprob: Any = self.logprob.item()
        return Decoded(token, logprob, self.top())

    @property
    def arrays(self) -> list[mx.array]:
        return [
            a
            for a in (self.token, self.logprob, self.top_tokens, self.top_logprobs)
            if a is not None
        ]

    def top(self) -> dict[int, float] | None:
        """Token id -> log-probability, most likely first."""
        if self.top_tokens is None or self.top_logprobs is None:
            return None
        tokens: Any = self.top_tokens.tolist()
        logprobs: Any = self.top_logprobs.tolist()
        possible = [pair for pair in zip(tokens, logprobs, strict=True) if pair[1] > -math.inf]
        return dict(sorted(possible, key=lambda pair: -pair[1]))


@dataclass(frozen=True, kw_only=True)
class Constrained(Sampled):
    """The token at `place` of an answer in a given form: the constraint goes on by it when it is first read."""

    constraint: Constraint
    place: int

    def read(self) -> int:
        token = super().read()
        if self.constraint.count == self.place:
            self.constraint.advance(token)
        return token

    def decoded(self, token: int) -> Decoded:
        decoded = super().decoded(token)
        return replace(decoded, is_last=True) if self.constraint.is_done else decoded


class NextToken:
    """Logits `[1, vocab]` -> Sampled, by the options of one request. Its random numbers are its own: nobody else's change them.

    With a `constraint`, the token before is read when the next one is asked for; the device evaluates the logits meanwhile.
    """

    def __init__(
        self,
        options: GenerateOptions,
        vocab: int,
        processors: Sequence[LogitsProcessor] = (),
        constraint: Constraint | None = None,
    ) -> None:
        self._constraint = constraint
        self._before: Constrained | None = None
        self._logprobs = None if options.logprobs is None else min(options.logprobs, vocab - 1)
        self._filters = _filters(options, vocab)
        self._needs_normalized = options.temperature > 0 and options.top_p < 1
        self._processors = [*_penalties(options), *processors]
        self._temperature = options.temperature if options.temperature >= COLDEST else 0.0
        self._key = mx.random.key(secrets.randbits(64) if options.seed is None else options.seed)

    @property
    def is_greedy(self) -> bool:
        """Whether the token is the likeliest one by the model's own logits."""
        return self._temperature == 0 and not self._processors and self._constraint is None

    @property
    def is_plain(self) -> bool:
        """Whether it is that, and nothing else is asked for."""
        return self.is_greedy and self._logprobs is None

    @property
    def needs_history(self) -> bool:
        """Whether `history` has to be given."""
        return bool(self._processors)

    def _sample(self, logprobs: mx.array) -> mx.array:
        if self._temperature == 0:
            return mx.argmax(logprobs, axis=-1)
        for keep_likely in self._filters:
            logprobs = keep_likely(logprobs)
        self._key, now = mx.random.split(self._key)
        return mx.random.categorical(logprobs * (1 / self._temperature), key=now)

    def __call__(self, logits: mx.array, history: mx.array | None = None) -> Sampled:
        """`history`: all tokens so far, prompt included, of shape [n]. FormError where no token is in the form."""
        if self._constraint is None:
            return self._next(logits, history)
        masked = self._masked(logits, self._constraint)
        sampled = self._next(masked, history)
        arrays = sampled.token, sampled.logprob, sampled.top_tokens, sampled.top_logprobs
        self._before = Constrained(
            *arrays, constraint=self._constraint, place=self._constraint.count
        )
        return self._before

    def _masked(self, logits: mx.array, constraint: Constraint) -> mx.array:
        """Only the tokens that may come next; after the last one, whatever comes is not read."""
        dispatch([logits])
        if self._before is not None:
            self._before.read()
        if constraint.is_done:
            return logits
        return mx.where(mx.array(constraint.mask(logits.shape[-1])), logits, -mx.inf)

    def _next(self, logits: mx.array, history: mx.array | None) -> Sampled:
        for process in self._processors:
            logits = process(history, logits) if history is not None else logits
        if self._logprobs is None and not self._needs_normalized:
            return Sampled(self._sample(logits))
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        token = self._sample(logprobs)
        if self._logprobs is None:
            return Sampled(token)
        row = logprobs[0].astype(mx.float32)
        if self._logprobs == 0:
            return Sampled(token, row[token])
        best = mx.argpartition(-row, kth=self._logprobs - 1)[: self._logprobs]
        return Sampled(token, row[token], best, row[best])


def _filters(options: GenerateOptions, vocab: int) -> list[Sampler]:
    """top-p, min-p and top-k, in mlx-lm's order."""
    filters: list[Sampler] = []
    if options.top_p < 1:
        # At 0 the most likely token stays.
        filters.append(lambda logprobs: apply_top_p(logprobs, max(options.top_p, 1e-9)))
    if options.min_p > 0:
        filters.append(lambda logprobs: apply_min_p(logprobs, options.min_p))
    if 0 < options.top_k < vocab:
        filters.append(lambda logprobs: apply_top_k(logprobs, options.top_k))
    return filters


def _penalties(options: GenerateOptions) -> list[LogitsProcessor]:
    size = options.penalty_context
    repetition = options.repetition_penalty if options.repetition_penalty != 1 else None
    processors: list[LogitsProcessor] = make_logits_processors(
        None, repetition, size, options.presence_penalty, size, options.frequency_penalty, size
    )
    return processors
