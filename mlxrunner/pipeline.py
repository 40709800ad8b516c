"""Run a model over a session: prefill in chunks, then decode one step ahead of the reader.

Knows nothing about text. Every token that was run through the model is recorded in the session, however this is left.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator
from typing import Any

import mlx.core as mx

from mlxrunner.cache.entry import Rotators, Session
from mlxrunner.cache.factory import evaluate
from mlxrunner.cache.tokens import TokenArray
from mlxrunner.overflow import Shift
from mlxrunner.sampling import Decoded, NextToken, Sampled, dispatch

Progress = Callable[[int, int], None]
"""Called with the prompt tokens that are in the entry, and those of the whole prompt."""

SEED_TOKENS = 16
"""A rest of at most so many tokens is evaluated in one forward pass: on most devices as fast as a single token."""

CLEAR_EVERY = 256
FIRST, FEWEST, PAUSE_S = 8, 2, 0.04
"""While a prompt is evaluated in advance: tokens of the first chunk and of the smallest, and seconds that one may take."""


class Pipeline:
    """One request on one model. `prefill_s` is valid once the first token has been read.

    `takes_checkpoints`: whether the prefill pauses, and the decode stops for a moment, where the session wants one.
    `shift`: what to do when the context is full (`rotate`: how keys are moved);
    None: the caller's `max_tokens` ends the answer before. `shifted` counts the tokens that were dropped for it, `reevaluated` those
    that had to be evaluated again because a layer could not move them. `chunks`: begin, end and tokens of each forward pass of the
    prefill, on time.perf_counter. `logits`: those that follow the last token that was run, `[1, vocab]`.
    """

    def __init__(
        self,
        model: Any,
        session: Session,
        prefill_step: int,
        progress: Progress | None = None,
        takes_checkpoints: bool = False,
        shift: Shift | None = None,
        rotate: Rotators = lambda caches, by: None,
    ) -> None:
        self._model, self._session = model, session
        self._shift, self._rotate = shift, rotate
        self.shifted, self.reevaluated = 0, 0
        self._step, self._progress = prefill_step, progress
        self._takes_checkpoints, self._due = takes_checkpoints, math.inf
        self.prefill_s = 0.0
        self.chunks: list[tuple[float, float, int]] = []
        self.logits: mx.array | None = None

    def run(self, next_token: NextToken, max_tokens: int) -> Generator[Decoded, None, None]:
        """At most `max_tokens` tokens. The last one's forward pass is not run: nobody asked what follows it."""
        began = time.perf_counter()
        session = self._session
        self._prefill()
        history = mx.array(session.prompt) if next_token.needs_history else None
        seed, seed_began = session.remaining, time.perf_counter()
        logits = self.logits = self._forward(mx.array(seed)[None])[:, -1, :]
        sampled = next_token(logits, history)
        dispatch(sampled.arrays)
        session.record(seed)
        self._checkpoint_if_due()
        on_its_way: Sampled | None = (
            None  # a token whose forward pass was begun and that is not recorded yet
        )
        try:
            for count in range(1, max_tokens + 1):
                current = sampled
                if count == 1:
                    # Before the next pass is started: on a CPU, async_eval returns only when most of the work is done.
                    token = current.read()
                    ended = time.perf_counter()
                    self.prefill_s = ended - began
                    self.chunks.append((seed_began, ended, len(seed)))
                    self._report(len(session.prompt))
                    yield current.decoded(token)
                if count < max_tokens:
                    self._make_room()
                    on_its_way = current
                    logits = self.logits = self._forward(current.token[None])[:, -1, :]
                    if history is not None:
                        history = mx.concatenate([history, current.token.astype(mx.int32)])
                    sampled = next_token(logits, history)
                    dispatch(sampled.arrays)
                token = current.read()
                if on_its_way is not None:
                    session.record((token,))
                    on_its_way = None
                    if session.recorded >= self._due:
                        self._checkpoint_if_due()
                if count > 1:
                    yield current.decoded(token)
                if count % CLEAR_EVERY == 0:
                    mx.clear_cache()
        finally:
            if on_its_way is not None and session.forwarded > session.recorded:
                # Interrupted between a forward pass and the reading of its token.
                session.record((on_its_way.read(),))

    def evaluate(self, cancelled: Callable[[], bool]) -> int:
        """The prompt without an answer, in chunks of at most about `PAUSE_S` seconds, until `cancelled()`; returns the tokens evaluated."""
        session, size, done, total = self._session, FIRST, 0, len(self._session.prompt)
        self._checkpoint_if_due()
        stop = session.next_stop if self._takes_checkpoints else total
        while session.recorded < total and not cancelled():
            began = time.perf_counter()
            chunk = session.remaining[: min(size, self._step, stop - session.recorded)]
            self._evaluate(chunk)
            done += len(chunk)
            seconds = time.perf_counter() - began
            size = max(FEWEST, min(2 * size, int(len(chunk) * PAUSE_S / seconds)))
            if session.recorded == stop:
                self._checkpoint()
                stop = session.next_stop if self._takes_checkpoints else total
        return done

    def _prefill(self) -> None:
        """All but the last tokens of the prompt, in chunks that are evaluated and recorded one by one."""
        session = self._session
        self._report(session.recorded)
        self._checkpoint_if_due()
        while (stop := self._next_stop()) < len(session.prompt):
            while session.recorded < stop:
                chunk = session.remaining[: min(self._step, stop - session.recorded)]
                self._evaluate(chunk)
                self._report(session.recorded)
            self._checkpoint()

    def _evaluate(self, chunk: TokenArray) -> None:
        began = time.perf_counter()
        self._forward(mx.array(chunk)[None])
        evaluate(self._session.caches)
        self._session.record(chunk)
        self.chunks.append((began, time.perf_counter(), len(chunk)))
        mx.clear_cache()

    def _make_room(self) -> None:
        """Before a forward pass: shift if the context is full."""
        shift, session = self._shift, self._session
        if shift is None or session.recorded < shift.context:
            return
        tokens = session.tokens
        discard = shift.discard(len(tokens))
        self.shifted += discard
        if not session.shift(shift.keep, discard, self._rotate):
            left = session.restart(tokens[: shift.keep] + tokens[shift.keep + discard :])
            self.reevaluated += len(left)
            for begin in range(0, len(left), self._step):
                self._evaluate(left[begin : begin + self._step])
        self._due = 0  # offsets have moved: ask again

    def _next_stop(self) -> int:
        """Where the next chunks have to end; from the last stop on to the prompt's end it is the seed of the answer."""
        session = self._session
        if self._takes_checkpoints:
            return session.next_stop
        return len(session.prompt) - (len(session.remaining) > SEED_TOKENS)

    def _checkpoint(self) -> None:
        if self._takes_checkpoints:
            dispatch(self._session.checkpoint())

    def _checkpoint_if_due(self) -> None:
        """Also look up from which offset on the next one will be."""
        if self._takes_checkpoints:
            if self._session.recorded >= self._session.checkpoint_due:
                self._checkpoint()
            self._due = self._session.checkpoint_due

    def _forward(self, tokens: mx.array) -> mx.array:
        """`tokens [1, n]` -> logits `[1, n, vocab]`, not evaluated yet."""
        session = self._session
        session.begin_forward()
        logits: mx.array = self._model(tokens, cache=session.model_caches)
        session.end_forward(tokens.shape[1])
        return logits

    def _report(self, done: int) -> None:
        if self._progress is not None:
            self._progress(done, len(self._session.prompt))
