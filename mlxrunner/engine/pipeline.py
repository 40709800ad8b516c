"""Run a model on a leased entry: prefill in chunks, then decode (`mlxrunner.engine.decode`).

Knows nothing about text. Every token that was run through the model is recorded in the entry, even
after an error or an interrupt.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import mlx.core as mx

from mlxrunner.cache.entry import Rotators
from mlxrunner.cache.layers.factory import evaluate
from mlxrunner.cache.prefix import EntryLease
from mlxrunner.cache.tokens import Shift, TokenArray, as_tokens, words
from mlxrunner.engine.decode import Decoding
from mlxrunner.engine.pace import Pace
from mlxrunner.engine.sampling import Decoded, NextToken, dispatch
from mlxrunner.speculation.drafting import Drafting

Progress = Callable[[int, int], None]
"""A function of two counts: the prompt tokens that are in the entry, and all prompt tokens."""

Look = Callable[[TokenArray, TokenArray], None]
"""Tells a model that sees pictures the tokens in the caches, and those of the next call."""

SEED_TOKENS = 16
"""Most tokens in the last forward pass of a prefill.

This pass gives the logits of the answer's first token. On most devices it takes no longer than a
pass of one token.
"""
FIRST, FEWEST, PAUSE_S = 8, 2, 0.04
"""Chunks of a prompt that is evaluated ahead.

Tokens of the first chunk, tokens of the smallest chunk, and seconds that a chunk may take.
"""


class Pipeline(Decoding):
    """One request on one model."""

    def __init__(
        self,
        model: Any,
        lease: EntryLease,
        prefill_step: int,
        progress: Progress | None = None,
        takes_checkpoints: bool = False,
        shift: Shift | None = None,
        rotate: Rotators = lambda caches, by: None,
        pace: Pace | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        """Prepare a request on `model`, with the entry that `lease` holds.

        `prefill_step`: most tokens per chunk. `takes_checkpoints`: the prefill and the decode pause
        where the lease wants a checkpoint. `shift`: the rule that makes room in a full context;
        None: `max_tokens` of `run` ends the answer before the context is full. `rotate`: how a
        shift moves keys. `pace`: sizes the chunks of the prefill; None: `prefill_step` each.
        `drafting`: guesses tokens of the answer; None: nothing is drafted.
        """
        self.drafting = drafting
        self._model, self._lease = model, lease
        self._sees: Look | None = getattr(model, "look", None)
        self._shift, self._rotate = shift, rotate
        self.shifted = 0
        """Tokens that were dropped because the context was full."""
        self.reevaluated = 0
        """Tokens that were evaluated again after a shift, because a layer could not move them."""
        self._step, self._progress, self._pace = prefill_step, progress, pace
        self._takes_checkpoints, self._due = takes_checkpoints, math.inf
        self.prefill_s = 0.0
        """Seconds of the prefill, set when the first token is read."""
        self.chunks: list[tuple[float, float, int]] = []
        """Begin, end (on `time.perf_counter`) and tokens of each forward pass of the prefill."""
        self.logits = None
        """The logits behind the last token that was run, `[1, vocab]`; None at first."""

    def run(self, next_token: NextToken, max_tokens: int) -> Generator[Decoded, None, None]:
        """Yield at most `max_tokens` tokens.

        The last one is not run through the model, because nothing follows it.
        """
        began = time.perf_counter()
        lease = self._lease
        self._prefill()
        history = mx.array(words(lease.prompt)) if next_token.needs_history else None
        seed, seed_began = lease.remaining, time.perf_counter()
        self._look(seed)
        logits = self.logits = self._forward(mx.array(seed)[None])[:, -1, :]
        sampled = next_token(logits, history)
        dispatch(sampled.arrays)
        lease.record(seed)
        self._checkpoint_if_due()
        # Read it before the next pass starts: on a CPU, async_eval returns only when most of the
        # work is done.
        token = sampled.read()
        ended = time.perf_counter()
        self.prefill_s = ended - began
        self.chunks.append((seed_began, ended, len(seed)))
        self._report(len(lease.prompt))
        yield sampled.decoded(token)
        yield from self._decode(next_token, history, sampled, max_tokens)

    def evaluate(self, cancelled: Callable[[], bool]) -> int:
        """Evaluate the prompt without an answer, and return the number of evaluated tokens.

        Chunks take about `PAUSE_S` seconds each. Stop when `cancelled()` returns True.
        """
        lease, size, done, total = self._lease, FIRST, 0, len(self._lease.prompt)
        self._checkpoint_if_due()
        stop = lease.next_stop if self._takes_checkpoints else total
        while lease.recorded < total and not cancelled():
            began = time.perf_counter()
            chunk = lease.remaining[: min(size, self._step, stop - lease.recorded)]
            self._evaluate(chunk)
            done += len(chunk)
            seconds = time.perf_counter() - began
            size = max(FEWEST, min(2 * size, int(len(chunk) * PAUSE_S / seconds)))
            if lease.recorded == stop:
                self._checkpoint()
                stop = lease.next_stop if self._takes_checkpoints else total
        return done

    def _prefill(self) -> None:
        """Evaluate and record all but the last tokens of the prompt, chunk by chunk."""
        lease = self._lease
        self._report(lease.recorded)
        self._checkpoint_if_due()
        while (stop := self._next_stop()) < len(lease.prompt):
            while lease.recorded < stop:
                size = self._step if self._pace is None else self._pace.size(self._step)
                self._evaluate(lease.remaining[: min(size, stop - lease.recorded)])
                if self._pace is not None:
                    began, ended, count = self.chunks[-1]
                    self._pace.measure(count, ended - began)
                self._report(lease.recorded)
            self._checkpoint()

    def _evaluate(self, chunk: TokenArray) -> None:
        began = time.perf_counter()
        self._look(chunk)
        self._forward(mx.array(chunk)[None])
        evaluate(self._lease.caches)
        self._lease.record(chunk)
        self.chunks.append((began, time.perf_counter(), len(chunk)))
        mx.clear_cache()

    def _make_room(self) -> None:
        """Shift if the context is full, before a forward pass."""
        shift, lease = self._shift, self._lease
        if shift is None or lease.recorded < shift.context:
            return
        tokens = lease.tokens
        discard = shift.discard(len(tokens))
        self.shifted += discard
        if not lease.shift(shift.keep, discard, self._rotate):
            left = lease.restart(tokens[: shift.keep] + tokens[shift.keep + discard :])
            self.reevaluated += len(left)
            for begin in range(0, len(left), self._step):
                self._evaluate(left[begin : begin + self._step])
        self._due = 0  # offsets have moved: ask again
        self._look([])

    def _look(self, tokens: Sequence[int] | TokenArray) -> None:
        """Tell a model that sees pictures which tokens come next, and which are before them."""
        if self._sees is not None:
            self._sees(self._lease.array, as_tokens(tokens))

    def _next_stop(self) -> int:
        """Return the offset where the next chunks have to end.

        One forward pass evaluates the tokens behind the last stop. It gives the answer's first
        logits.
        """
        lease = self._lease
        if self._takes_checkpoints:
            return lease.next_stop
        return len(lease.prompt) - (len(lease.remaining) > SEED_TOKENS)

    def _checkpoint(self) -> None:
        if self._takes_checkpoints:
            dispatch(self._lease.checkpoint())

    def _checkpoint_if_due(self) -> None:
        """Take a checkpoint if one is due, and set the offset of the next one."""
        if self._takes_checkpoints:
            if self._lease.recorded >= self._lease.checkpoint_due:
                self._checkpoint()
            self._due = self._lease.checkpoint_due

    def _forward(self, tokens: mx.array, *, is_draft: bool = False) -> mx.array:
        """Return the unevaluated logits `[1, n, vocab]` of `tokens [1, n]`."""
        lease = self._lease
        if is_draft:
            lease.begin_draft(tokens.shape[1])
        else:
            lease.begin_forward()
        logits: mx.array = self._model(tokens, cache=lease.model_caches)
        lease.end_forward(tokens.shape[1])
        return logits

    def _report(self, done: int) -> None:
        if self._progress is not None:
            self._progress(done, len(self._lease.prompt))
