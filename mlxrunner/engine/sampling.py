"""Turn logits into the next token, with mlx-lm's sampler functions."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, make_logits_processors

from mlxrunner.config.option import check_callable, listed
from mlxrunner.engine.constrain import Constraint
from mlxrunner.errors import LogitsError, OptionError
from mlxrunner.options import GenerateOptions

COLDEST = 1e-4
"""Temperature below which sampling is greedy, because the inverse would overflow."""
Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
dispatch: Callable[[list[mx.array]], None] = mx.async_eval
"""Begin to evaluate arrays. Reading one waits for it."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """A token of the answer, on the host."""

    token: int
    logprob: float | None = None
    top_logprobs: dict[int, float] | None = None
    is_last: bool = False
    """True if this token completes the form that was asked for."""


@dataclass(frozen=True, slots=True)
class Peaks:
    """The largest logits, which show if there is a token at all. The device may compute them.

    One is NaN if any logit is, -inf if all are, and +inf if any is. A single -inf does not show.
    """

    own: mx.array
    """The largest logit that the model gave in each row `[n]`."""
    row: int = 0
    final: mx.array | None = None
    """The same of this row after penalties, functions and the form; None if there are none."""

    @property
    def arrays(self) -> list[mx.array]:
        return [self.own] if self.final is None else [self.own, self.final]

    @property
    def error(self) -> LogitsError | None:
        """The error that names the likely reason; None if there is a token."""
        found: Any = self.own.tolist()
        if not math.isfinite(found[self.row]):
            return LogitsError(_broken(found[self.row], self.own.dtype))
        last: Any = 0.0 if self.final is None else self.final.item()
        if math.isfinite(last):
            return None
        return LogitsError(
            f"no token is left to sample: after penalties, logits_processors and the form that was "
            f"asked for, {_named(last)}, although the model's own are numbers: allow more tokens"
        )


def _broken(peak: float, dtype: mx.Dtype) -> str:
    if dtype == mx.float16:
        reason = (
            "most likely a number exceeds 65504, the largest of float16: use a bfloat16 or float32 "
            "version of the model"
        )
    else:
        reason = (
            "most likely its weights are damaged or were converted wrongly: download or convert it "
            "again, and try it without kv_bits if they are set"
        )
    return f"the model computed no next token: {_named(peak)}; {reason}"


def _named(peak: float) -> str:
    if math.isnan(peak):
        return "its logits are NaN (not a number)"
    return "some logits are +infinity" if peak > 0 else "all logits are -infinity"


@dataclass(frozen=True)
class Sampled:
    """A token that the device may still be computing."""

    token: mx.array
    """The token id, `[1]`."""
    logprob: mx.array | None = None
    """Its log-probability `[1]`; None if it was not asked for."""
    top_tokens: mx.array | None = None
    """The most likely tokens `[k]`, unordered; None if they were not asked for."""
    top_logprobs: mx.array | None = None
    """The log-probabilities of `top_tokens`, `[k]`."""
    peaks: Peaks | None = None
    """The largest of the logits; None: they are known to be numbers."""

    @property
    def error(self) -> LogitsError | None:
        """The error if the logits were NaN or infinite, once the token is there."""
        return None if self.peaks is None else self.peaks.error

    def read(self) -> int:
        """Wait for the token and return its id. Raise LogitsError if there is none."""
        token: Any = self.token.item()
        if (error := self.error) is not None:
            raise error
        return int(token)

    def decoded(self, token: int) -> Decoded:
        """Return `token`, which was read before, with the log-probabilities that were asked for."""
        if self.logprob is None:
            return Decoded(token)
        logprob: Any = self.logprob.item()
        return Decoded(token, logprob, self.top())

    @property
    def arrays(self) -> list[mx.array]:
        """The arrays of this token, to be evaluated."""
        found = [
            a
            for a in (self.token, self.logprob, self.top_tokens, self.top_logprobs)
            if a is not None
        ]
        return found if self.peaks is None else found + self.peaks.arrays

    def top(self) -> dict[int, float] | None:
        """Return log-probabilities by token id, most likely first; None if not asked for."""
        if self.top_tokens is None or self.top_logprobs is None:
            return None
        tokens: Any = self.top_tokens.tolist()
        logprobs: Any = self.top_logprobs.tolist()
        possible = [pair for pair in zip(tokens, logprobs, strict=True) if pair[1] > -math.inf]
        return dict(sorted(possible, key=lambda pair: -pair[1]))


@dataclass(frozen=True, kw_only=True)
class Constrained(Sampled):
    """A token of an answer in a given form. The first read advances the constraint."""

    constraint: Constraint
    place: int
    """Its index in the answer, from 0."""

    def read(self) -> int:
        token = super().read()
        if self.constraint.count == self.place:
            self.constraint.advance(token)
        return token

    def decoded(self, token: int) -> Decoded:
        decoded = super().decoded(token)
        return replace(decoded, is_last=True) if self.constraint.is_done else decoded


class NextToken:
    """A sampler of one request's tokens from logits `[1, vocab]`.

    It has its own random numbers, so that other requests don't change its answer. With a
    `constraint`, each call reads the token before, while the device evaluates the logits.
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
        self._processors, self._has_own = [*_penalties(options), *processors], bool(processors)
        self._temperature = options.temperature if options.temperature >= COLDEST else 0.0
        self._seed = secrets.randbits(64) if options.seed is None else options.seed
        self._key: mx.array | None = None  # made by the thread that samples
        self._keys: list[mx.array | None] = []  # the key after each row of a draft

    def rewind(self, count: int) -> None:
        """Go back to the state after the first `count` tokens, all of which were read."""
        self._key, self._before = None, None
        for _ in range(count if self._temperature else 0):
            self._draw()

    def _draw(self) -> mx.array:
        if self._key is None:
            self._key = mx.random.key(self._seed)
        self._key, now = mx.random.split(self._key)
        return now

    @property
    def is_greedy(self) -> bool:
        """True if each token is the most likely one by the model's own logits."""
        return self._temperature == 0 and not self._processors and self._constraint is None

    @property
    def is_plain(self) -> bool:
        """True if sampling is greedy and no log-probabilities are asked for."""
        return self.is_greedy and self._logprobs is None

    @property
    def forced(self) -> Callable[[], list[int]] | None:
        """A function that returns tokens that the form leaves no other text for; None: no form."""
        return None if self._constraint is None else self._constraint.forced

    @property
    def may_draft(self) -> bool:
        """True if rows may be sampled and thrown away: a caller's function may keep count."""
        goes_back = self._constraint is None or self._constraint.can_go_back
        return goes_back and not self._has_own

    @property
    def needs_history(self) -> bool:
        """True if calls need `history`."""
        return bool(self._processors)

    def _sample(self, logprobs: mx.array) -> mx.array:
        if self._temperature == 0:
            return mx.argmax(logprobs, axis=-1)
        for keep_likely in self._filters:
            logprobs = keep_likely(logprobs)
        return mx.random.categorical(logprobs * (1 / self._temperature), key=self._draw())

    def __call__(self, logits: mx.array, history: mx.array | None = None) -> Sampled:
        """Sample the next token. `history`: all tokens so far, prompt included, `[n]`.

        Raise FormError if no token fits the form.
        """
        own = Peaks(mx.max(logits, axis=-1))
        if self._constraint is None:
            return self._next(logits, history, own)
        self._before = self._held(self._next(self._masked(logits, self._constraint), history, own))
        return self._before

    def rows(
        self, logits: mx.array, history: mx.array | None, masks: Sequence[Any]
    ) -> list[Sampled]:
        """Sample at each row of `logits` `[1, n, vocab]`, as calls for one token each would.

        `history`: all tokens before the last row. `masks`: those of the form, or an empty list.
        Call `keep` once it is known which rows count.
        """
        count = logits.shape[1]
        self._keys = []
        peaks = mx.max(logits[0], axis=-1)
        if self.is_plain:
            tokens = mx.argmax(logits[0], axis=-1)
            return [plain(tokens, peaks, row) for row in range(count)]
        before = 0 if history is None else history.shape[0] - count + 1
        sampled = []
        for row in range(count):
            here = logits[:, row, :]
            if masks and masks[row] is not None:
                here = mx.where(mx.array(masks[row]), here, -mx.inf)
            seen = None if history is None else history[: before + row]
            one = self._next(here, seen, Peaks(peaks, row))
            sampled.append(one if self._constraint is None else self._held(one, row))
            self._keys.append(self._key)
        return sampled

    def keep(self, sampled: Sequence[Sampled]) -> None:
        """Take the samples of `rows` up to here as the answer. They were read."""
        if self._keys:
            self._key = self._keys[len(sampled) - 1]
        if isinstance(sampled[-1], Constrained):
            self._before = sampled[-1]

    def guesses(self) -> Callable[[mx.array], mx.array]:
        """Return a function that samples the coming tokens from another model's logits.

        Each call is for the next place of the answer, and uses the random numbers of that place:
        where the two models agree, so do the samples. Penalties and forms are not asked.
        """
        key = self._key

        def guess(logits: mx.array) -> mx.array:
            nonlocal key
            if self._needs_normalized:
                logits = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            own, self._key = self._key, key
            try:
                return self._sample(logits)
            finally:
                self._key, key = own, self._key

        return guess

    def masks(self, draft: Sequence[int], width: int) -> list[Any]:
        """Return the masks for `draft` and after it; none if no form is asked for.

        There are fewer if the form does not allow a token of it. Raise FormError if it allows none
        at all next.
        """
        constraint = self._constraint
        if constraint is None or constraint.is_done:
            return []
        return list(constraint.masks(draft, width))

    def _held(self, sampled: Sampled, later: int = 0) -> Constrained:
        """Return `sampled` so that its first read advances the form."""
        assert self._constraint is not None
        place = self._constraint.count + later
        return Constrained(**vars(sampled), constraint=self._constraint, place=place)

    def _masked(self, logits: mx.array, constraint: Constraint) -> mx.array:
        """Return the logits of the tokens that may come next, -inf for the others.

        Once the form is complete every token may come, because its result is never read.
        """
        dispatch([logits])
        if self._before is not None:
            self._before.read()
        if constraint.is_done:
            return logits
        return mx.where(mx.array(constraint.mask(logits.shape[-1])), logits, -mx.inf)

    def _next(self, logits: mx.array, history: mx.array | None, peaks: Peaks) -> Sampled:
        if self._processors:
            logits = mx.array(logits)  # some change it in place, and observers see the model's own
        for process in self._processors:
            logits = _processed(process, history, logits) if history is not None else logits
        if self._has_own:  # +inf means that this token has to come
            logits = mx.minimum(logits, mx.finfo(logits.dtype).max)
        if self._processors or self._constraint is not None:
            peaks = replace(peaks, final=mx.max(logits))
        if self._logprobs is None and not self._needs_normalized:
            return Sampled(self._sample(logits), peaks=peaks)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        token = self._sample(logprobs)
        if self._logprobs is None:
            return Sampled(token, peaks=peaks)
        row = logprobs[0].astype(mx.float32)
        if self._logprobs == 0:
            return Sampled(token, row[token], peaks=peaks)
        best = mx.argpartition(-row, kth=self._logprobs - 1)[: self._logprobs]
        return Sampled(token, row[token], best, row[best], peaks)


def plain(tokens: mx.array, peaks: mx.array, row: int) -> Sampled:
    """Return the token of a row, the likeliest of which are `tokens [n]`, with `peaks [n]`."""
    return Sampled(tokens[row : row + 1], peaks=Peaks(peaks, row))


def checked_processors(processors: Any) -> list[LogitsProcessor]:
    """Return `processors` as a list. Raise OptionError unless it is one of functions."""
    found = list(listed("logits_processors", processors, "[function]"))
    for process in found:
        check_callable("logits_processors", process, "(tokens, logits)")
    return found


def _processed(process: LogitsProcessor, history: mx.array, logits: mx.array) -> mx.array:
    """Return what `process` makes of `logits`. Raise OptionError if that is something else."""
    changed = process(history, logits)
    if not isinstance(changed, mx.array) or changed.shape != logits.shape:
        found = f"an array of shape {changed.shape}" if isinstance(changed, mx.array) else changed
        raise OptionError(
            f"logits_processors: {process!r:.80} returned {found!s:.80}, it has to return an array "
            f"of shape {logits.shape}"
        )
    return changed


def _filters(options: GenerateOptions, vocab: int) -> list[Sampler]:
    """Return the filters top-p, min-p and top-k, in mlx-lm's order."""
    filters: list[Sampler] = []
    if options.top_p < 1:
        # At 0 only the most likely token is kept.
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
