"""A small model guesses what a larger one says, and keeps an entry of its own in step.

Whatever it guesses, the larger model checks it: the answer does not depend on it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrunner.cache.entry import CacheEntry, TokenArray, common_prefix
from mlxrunner.cache.layers.factory import CacheOptions, evaluate, make_layer_caches
from mlxrunner.cache.prefix import EntryLease, PrefixCache
from mlxrunner.cache.protocol import LayerCache
from mlxrunner.engine.sampling import NextToken, dispatch
from mlxrunner.errors import LogitsError, OptionError
from mlxrunner.results import logger
from mlxrunner.tokenizer import Tokenizer

Guess = Callable[[mx.array], mx.array]
"""A function that samples a token `[1]` from logits `[1, vocab]`, at one place after the other."""
FAILED = "the draft model failed, and the answer continues without it: %s"


class DraftModel:
    """A model that continues a text, with the layer caches of the text so far."""

    def __init__(
        self,
        model: Any,
        vocab: int,
        options: CacheOptions,
        budget: int,
        step: int,
        *,
        table: int | None = None,
        in_pieces: bool = False,
    ) -> None:
        """Prepare `model`. `vocab`: the number of tokens of the model for which it guesses.

        `table`: the number of its own tokens, by default as many. It reads its last one in place of
        a token that it lacks: beyond its table there is other memory, or none.
        `options`: those of its layer caches. `budget`: bytes for its checkpoints. `step`: most
        tokens of a pass. `in_pieces`: a text of which more is new is evaluated in several calls,
        one pass each, because others wait meanwhile.
        """
        self._model, self._vocab, self._step = model, vocab, step
        self._last = (vocab if table is None else table) - 1
        self._in_pieces = in_pieces
        self._context = options.context
        self._cache = PrefixCache(partial(make_layer_caches, model, options), budget)
        self._lease: EntryLease | None = None
        self._peaks: list[mx.array] = []
        """The largest logit of each pass of the draft under way."""
        self._begun: tuple[int, TokenArray] | None = None
        """The offset where the last draft began, and the tokens of its passes."""

    def draft(self, tokens: TokenArray, most: int, guess: Guess) -> list[int]:
        """Return at most `most` tokens that may follow `tokens`, the whole text so far.

        `guess` samples each. There are none before the whole text is evaluated, or if it is full. A
        call may be repeated after an interrupt.
        """
        if self._context is not None:
            most = min(most, self._context - len(tokens))
        if most <= 0:
            return []
        lease = self._lease_for(tokens)
        if not self._prefill(lease, tokens):
            return []
        rows = tokens[lease.recorded :]
        lease.begin_draft(len(rows), *[1] * (most - 1))
        self._peaks = list[mx.array]()
        guesses = [guess(self._forward(lease, self._readable(rows)))]
        for _ in range(most - 1):
            lease.begin_next()
            guesses.append(guess(self._forward(lease, guesses[-1])))
        dispatch([*guesses, *self._peaks])
        found = [int(token.item()) for token in guesses]  # type: ignore[arg-type]
        if not all(map(math.isfinite, (peak.item() for peak in self._peaks))):  # type: ignore[arg-type]
            raise LogitsError("the logits of the draft model are NaN or infinite")
        fed = np.concatenate([rows, np.array(found[:-1], np.int32)])
        self._begun = (lease.recorded, fed)
        return found

    def is_full(self, tokens: TokenArray) -> bool:
        """Return True if nothing can follow `tokens`."""
        return self._context is not None and len(tokens) >= self._context

    def gain(self, tokens: TokenArray) -> int:
        """Return how many of `tokens` the entry has, less those that it would lose for them."""
        there = self._cache.entry.tokens.array
        return 2 * common_prefix(there, tokens) - len(there)

    def seat(self) -> DraftModel:
        """Return the place of an answer, which is the only one at its time."""
        return self

    def propose(self, next_token: NextToken, tokens: TokenArray, most: int) -> list[int] | None:
        """Return what `draft` does for the answer of `next_token`; None if the model failed."""
        try:
            return self.draft(tokens, most, next_token.guesses())
        except LogitsError as error:
            self.forget()
            logger.warning(FAILED, error)
            return None

    def leave(self) -> None:
        """Note the end of an answer: the entry stays for the next one."""

    @property
    def entry(self) -> CacheEntry:
        """The entry between two answers."""
        return self._cache.current

    def empty_caches(self) -> list[LayerCache]:
        """Return the layer caches after freeing them, to allocate them."""
        return self._cache.empty_caches()

    def forget(self) -> None:
        """Free the entry and its buffers: what they hold may have failed."""
        self.close()
        self._cache.free("a draft that failed", with_buffers=True)

    def close(self) -> None:
        """Give the entry back, as after a request. A later `draft` takes it again."""
        lease, self._lease, self._begun = self._lease, None, None
        if lease is not None:
            lease.close()

    def _lease_for(self, tokens: TokenArray) -> EntryLease:
        """Return the lease whose entry is a beginning of `tokens`, with at least one left."""
        lease, begun = self._lease, self._begun
        self._begun = None
        if lease is not None and begun is not None and self._goes_on(lease, begun[0], tokens):
            lease.accept(begun[1][: common_prefix(begun[1], tokens[begun[0] : -1])])
            return lease
        self.close()
        self._lease = self._cache.begin(tokens).take()
        return self._lease

    def _goes_on(self, lease: EntryLease, offset: int, tokens: TokenArray) -> bool:
        there = self._cache.entry.tokens.array
        return offset < len(tokens) and common_prefix(there, tokens) >= offset == lease.recorded

    def _prefill(self, lease: EntryLease, tokens: TokenArray) -> bool:
        """Evaluate `tokens` but for the last few, with a checkpoint where one is due.

        Return False if that takes another call.
        """
        while len(tokens) - lease.recorded > self._step:
            rows = tokens[lease.recorded : lease.recorded + self._step]
            lease.begin_forward()
            self._forward(lease, self._readable(rows))
            evaluate(lease.caches)
            lease.record(rows)
            if lease.needs_checkpoints and lease.recorded >= lease.checkpoint_due:
                dispatch(lease.checkpoint())
            if self._in_pieces:
                return False
        return True

    def _readable(self, tokens: TokenArray) -> mx.array:
        return mx.array(np.minimum(tokens, self._last))

    def _forward(self, lease: EntryLease, tokens: mx.array) -> mx.array:
        """Return the logits `[1, vocab]` behind `tokens` `[n]`, for the tokens of both models."""
        logits: mx.array = self._model(tokens[None], cache=lease.model_caches)
        lease.end_forward(tokens.shape[0])
        known = logits[:, -1, : self._vocab]
        self._peaks.append(mx.max(known))
        lacking = self._vocab - known.shape[1]
        return mx.pad(known, [(0, 0), (0, lacking)], constant_values=-mx.inf) if lacking else known


class DraftCachePool:
    """The entries of a draft model, each for one answer at a time."""

    def __init__(self, entries: Sequence[DraftModel], nbytes: int = 0) -> None:
        """Lend `entries`. `nbytes`: those of the draft model with all that it stores."""
        self.entries, self.nbytes = tuple(entries), nbytes
        # Weak: an answer whose end was itself interrupted must not keep an entry for ever.
        self._holders: dict[int, weakref.ref[DraftSlot]] = {}

    def seat(self) -> DraftSlot:
        """Return the seat of an answer. It takes an entry when it is first asked to guess."""
        return DraftSlot(self)

    def take(self, seat: DraftSlot, tokens: TokenArray) -> DraftModel | None:
        """Return an entry for the answer of `seat`, whose text is `tokens`; None if all are in use.

        It is the one that has most of them, and loses least.
        """
        free = [number for number in range(len(self.entries)) if self._holder(number) is None]
        if not free:
            return None
        best = max(free, key=lambda number: self.entries[number].gain(tokens))
        self._holders[best] = weakref.ref(seat)
        return self.entries[best]

    def leave(self, seat: DraftSlot) -> None:
        """Give back the entry of `seat`, if it has one. It keeps its text for a later answer."""
        for number, entry in enumerate(self.entries):
            if self._holder(number) is seat:
                entry.close()
                del self._holders[number]

    def _holder(self, number: int) -> DraftSlot | None:
        holder = self._holders.get(number)
        return None if holder is None else holder()


class DraftSlot:
    """The place of one answer at a draft model."""

    def __init__(self, seats: DraftCachePool) -> None:
        self._seats, self._is_over = seats, False
        self._entry: DraftModel | None = None

    def propose(self, next_token: NextToken, tokens: TokenArray, most: int) -> list[int] | None:
        """Return what `DraftModel.draft` does; None if there will be no more guesses."""
        if self._is_over:
            return None
        if self._entry is None:
            self._entry = self._seats.take(self, tokens)
        entry = self._entry
        if entry is None or entry.is_full(tokens):
            self.leave()
            return None
        try:
            return entry.draft(tokens, most, next_token.guesses())
        except Exception as error:
            entry.forget()
            self.leave()
            logger.warning(FAILED, error)
            return None

    def leave(self) -> None:
        """End the use of the entry. Nothing is guessed any more."""
        self._is_over, self._entry = True, None
        self._seats.leave(self)


def check_vocabularies(name: str, draft: Tokenizer, own: Tokenizer) -> None:
    """Raise OptionError unless each token that both have stands for the same text in both.

    `name`: that of the draft model. Tokens that only one of them has, such as those that end a
    turn, do no harm: a guess of another kind is only wrong.
    """
    theirs, ours = draft.vocabulary.pieces, own.vocabulary.pieces
    for token, (there, here) in enumerate(zip(theirs, ours, strict=False)):
        if there != here and there is not None and here is not None:
            raise OptionError(
                f"speculate: a draft model has to have the vocabulary of the model: token {token} "
                f"is {_text(there)} in {name}, and {_text(here)} here"
            )


def _text(piece: bytes) -> str:
    return repr(piece.decode("utf-8", "replace"))
