"""Decode: one step ahead of the reader, or several tokens at once where a draft is worth it.

Knows nothing about text. Every token that was run through the model and shown is recorded in the
entry, even after an error or an interrupt.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import suppress

import mlx.core as mx

from mlxrunner.cache.layers.protocol import LayerCache
from mlxrunner.cache.prefix import EntryLease
from mlxrunner.cache.tokens import Shift
from mlxrunner.engine.sampling import Decoded, NextToken, Sampled, dispatch
from mlxrunner.errors import FormError, LogitsError
from mlxrunner.speculation.controller import DEEPEST
from mlxrunner.speculation.drafting import Drafting
from mlxrunner.system.device import work_clock

CLEAR_EVERY = 256
"""Tokens of an answer after which MLX's unused buffers are freed."""


class Decoding(ABC):
    """The decode of one request. `mlxrunner.engine.pipeline` does what comes before it."""

    _lease: EntryLease
    _shift: Shift | None
    _due: float
    """Tokens in the entry from which on a checkpoint may be due."""
    _is_cut_off = False
    """True while tokens are shown of which the entry may lack the last ones."""
    logits: mx.array | None
    drafting: Drafting | None

    @abstractmethod
    def _forward(self, tokens: mx.array, *, is_draft: bool = False) -> mx.array:
        """Return the unevaluated logits `[1, n, vocab]` of `tokens [1, n]`."""

    @abstractmethod
    def _make_room(self) -> None:
        """Shift if the context is full, before a forward pass."""

    @abstractmethod
    def _checkpoint(self) -> None:
        """Take a checkpoint, if the model needs any."""

    @abstractmethod
    def _checkpoint_if_due(self) -> None:
        """Take a checkpoint if one is due, and set the offset of the next one."""

    def _decode(
        self, next_token: NextToken, history: mx.array | None, first: Sampled, most: int
    ) -> Generator[Decoded, None, None]:
        """Yield the tokens behind the `first`, which was read, until there are `most` in all.

        The last one is not run through the model, because nothing follows it.
        """
        self._next_token, self._history, self._most = next_token, history, most
        self._clock = work_clock()
        if self.drafting is not None:
            self.drafting.clock = self._clock
        self._current, self._count, self._told = first, 1, 0
        self._together: list[int] = []  # the tokens of the last pass
        self._is_cut_off = True
        try:
            while self._count <= most:
                draft, before = self._draft(), self._count
                yield from self._verify(draft) if draft else self._single()
                if before // CLEAR_EVERY < self._count // CLEAR_EVERY:
                    mx.clear_cache()
        except GeneratorExit:
            self.finish()
            raise
        except BaseException:
            self._is_cut_off = False
            raise
        self.finish()

    def finish(self) -> None:
        """Leave the entry as it is without drafts, if the answer ended without an error.

        Where another thread dropped the answer, this does nothing there. The owner calls it again.
        """
        lease = self._lease
        if self._is_cut_off and lease.is_here and lease.is_open:
            self._is_cut_off = False
            if lease.forwarded > lease.recorded:
                lease.accept(self._together)
            self._finish()

    def _single(self) -> Generator[Decoded, None, None]:
        """Run the current token, sample the next one, and yield the current one."""
        lease, current, count = self._lease, self._current, self._count
        # The token whose forward pass was begun and which is not recorded yet.
        on_its_way: Sampled | None = None
        formless: FormError | None = None
        is_unread, began = self._told < count, self._clock()
        late, pending = 0.0, list[int]()
        # The device has nothing to do while the pass is prepared, since a draft was waited for.
        is_late = self.drafting is not None and not is_unread and count > 1
        prepared = time.thread_time() if is_late else 0.0
        try:
            if count < self._most:
                self._make_room()
                pending = lease.pending
                on_its_way = current
                row, is_draft = _row(pending, current.token), bool(pending)
                logits = self.logits = self._forward(row, is_draft=is_draft)[:, -1, :]
                if self._history is not None:
                    self._history = mx.concatenate([self._history, current.token.astype(mx.int32)])
                try:
                    self._current = self._next_token(logits, self._history)
                    dispatch(self._current.arrays)
                except FormError as error:
                    formless = error  # the token before is not delivered yet
                late = time.thread_time() - prepared if is_late else 0.0
            token = current.read()
            if on_its_way is not None:
                self._together = [*pending, token]
                lease.record(self._together)
                on_its_way = None
                if lease.recorded >= self._due:
                    self._checkpoint_if_due()
        finally:
            if on_its_way is not None and lease.forwarded > lease.recorded:
                # Interrupted between a forward pass and the reading of its token.
                with suppress(LogitsError):
                    lease.record((*pending, on_its_way.read()))
        if self.drafting is not None and count < self._most:
            is_usual = count > 1 and (is_unread or self._waited)
            seconds = self._clock() - began + self._waited if is_usual else None
            self.drafting.passed(seconds, len(pending), late)
        self._tell(token)
        if count > 1:
            yield current.decoded(token)
        if formless is not None:
            raise formless
        self._count += 1

    def _run(self, tokens: list[int]) -> None:
        """Run and record tokens that were shown."""
        if tokens:
            self.logits = self._forward(mx.array([tokens], mx.int32))[:, -1, :]
            dispatch([self.logits])
            self._lease.record(tokens)
            if self.drafting is not None:
                self.drafting.evaluated_again(len(tokens))
            if self._lease.recorded >= self._due:
                self._checkpoint_if_due()

    def _finish(self) -> None:
        """Leave the entry as it is without drafts: all tokens are in it, the last one by itself.

        A layer that goes back only to where the last pass began then goes back as far, and one that
        drops old tokens when a pass begins has dropped as many.
        """
        lease, together = self._lease, self._together
        pending, was_taken = lease.pending, False
        if not pending and len(together) > 1:
            behind = lease.recorded - 1
            if not all(_ends_alone(cache, behind) for cache in lease.caches):
                was_taken = lease.is_at_checkpoint
                lease.accept(together[:-1])
                pending = [*lease.pending, together[-1]]
        self._run(pending[:-1])
        self._run(pending[-1:])
        if was_taken:
            self._checkpoint()

    def _tell(self, token: int) -> None:
        """Tell the sources of the current token, once."""
        if self.drafting is not None and self._told < self._count:
            self._told = self._count
            self.drafting.add(token)

    def _draft(self) -> list[int]:
        """Return the tokens that are likely to follow the current one, or none.

        The current token is only waited for where that is worth it.
        """
        drafting, self._waited = self.drafting, 0.0
        pending = self._lease.pending
        if pending and self._lease.recorded + len(pending) >= self._end:
            self._run(pending)
        if drafting is None or self._count + 1 >= self._most:
            return []
        if self._told < self._count:
            if self._count > 1 and not drafting.is_worth_waiting:
                return []
            began = self._clock()
            self._tell(self._current.read())
            self._waited = self._clock() - began if self._count > 1 else 0.0
        draft = drafting.draft(self._room())
        return self._fitting(draft) if draft else []

    def _room(self) -> int:
        """Return how many tokens may be drafted behind the current one.

        A pass ends where a checkpoint is due, where the context is full, or with the answer.
        """
        pending = len(self._lease.pending)
        here = self._lease.recorded + pending + 1
        return int(min(self._most - self._count - 1, self._end - here, DEEPEST - pending))

    @property
    def _end(self) -> float:
        """The offset that no pass may cross."""
        return min(self._due, math.inf if self._shift is None else self._shift.context)

    def _fitting(self, draft: list[int]) -> list[int]:
        """Return the beginning of `draft` that the form allows."""
        assert self.logits is not None
        try:
            self._masks = self._next_token.masks(draft, self.logits.shape[-1])
        except FormError:  # the step without a draft delivers the token before
            return []
        return draft[: len(self._masks) - 1] if self._masks else draft

    def _verify(self, draft: list[int]) -> Generator[Decoded, None, None]:
        """Run the current token and `draft`; yield it and those of the draft that are right.

        The sample behind them becomes the current token. What is not shown is undone.
        """
        lease, current, began, paused = self._lease, self._current, self._clock(), 0.0
        token = current.read()
        rows = [*lease.pending, token, *draft]
        shown = len(rows) - len(draft)
        logits = self._forward(mx.array([rows], mx.int32), is_draft=True)
        try:
            sampled = self._sample(logits[:, shown - 1 :, :], [token, *draft])
            if self._count > 1:
                left = self._clock()
                yield current.decoded(token)
                paused = self._clock() - left
            right, broken = self._judge(sampled, draft)
            assert self.drafting is not None
            seconds = self._clock() - began - paused
            self.drafting.judge(len(draft), len(right), seconds, shown - 1)
            for decoded in right:
                shown += 1
                yield decoded
            if broken is not None:
                raise broken
        finally:
            if lease.forwarded > lease.recorded:
                self._together = rows[:shown]
                if lease.is_here:
                    self.logits = logits[:, shown - 1, :]
                    lease.accept(rows[:shown])
                else:
                    lease.record(rows[:shown])  # the layers follow before the owner's next use
        if lease.recorded >= self._due:
            self._checkpoint_if_due()

    def _sample(self, logits: mx.array, tokens: list[int]) -> list[Sampled]:
        """Begin to sample at each row. `tokens`: the current one and those of the draft."""
        if self._history is not None:
            self._history = mx.concatenate([self._history, mx.array(tokens, mx.int32)])
        sampled = self._next_token.rows(logits, self._history, self._masks)
        dispatch([array for one in sampled for array in one.arrays])
        return sampled

    def _judge(
        self, sampled: list[Sampled], draft: list[int]
    ) -> tuple[list[Decoded], LogitsError | None]:
        """Return the tokens of `draft` that were sampled, and go on with the sample behind them.

        The error is that of the sample behind them, or None.
        """
        right: list[Decoded] = []
        for one, guess in zip(sampled, [*draft, None], strict=True):
            try:
                token = one.read()
            except LogitsError as error:
                return right, error
            self._count += 1
            self._tell(token)
            if token != guess:
                break
            right.append(one.decoded(token))
        self._current = sampled[len(right)]
        self._next_token.keep(sampled[: len(right) + 1])
        if self._history is not None and len(right) < len(draft):
            self._history = self._history[: len(right) - len(draft)]
        return right, None


def _ends_alone(cache: LayerCache, behind: int) -> bool:
    """Return True if `cache` is as after a pass of one token, which began at `behind`."""
    extent = cache.extent
    return cache.can_rewind(behind) and extent.rewound(behind).after(1) == extent


def _row(before: list[int], token: mx.array) -> mx.array:
    """Return the tokens `before` and `token` as a row."""
    if not before:
        return token[None]
    return mx.concatenate([mx.array(before, token.dtype), token])[None]
