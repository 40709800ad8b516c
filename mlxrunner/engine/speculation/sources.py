"""The sources of guesses of a runner. They outlive requests, and make the drafts of each."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial

from mlxrunner.cache.prefix import EntryLease
from mlxrunner.cache.tokens import TokenArray
from mlxrunner.engine.sampling import NextToken
from mlxrunner.engine.speculation.drafting import Drafting, Experience
from mlxrunner.engine.speculation.model import DraftModel, Guess
from mlxrunner.errors import LogitsError
from mlxrunner.models.facts import ModelFacts
from mlxrunner.results import logger


class DraftSources:
    """The draft model, if there is one, and what was learned about guesses."""

    def __init__(self, facts: ModelFacts, experience: Experience | None = None) -> None:
        """Prepare drafts for the model of `facts`."""
        self._facts = facts
        self.model: DraftModel | DraftCachePool | None = None
        self._experience = experience or Experience()

    def drafting(self, next_token: NextToken, lease: EntryLease, how: str) -> Drafting | None:
        """Return the drafts of a request; None if nothing may be drafted.

        `how`: the option `speculate`.
        """
        if how == "off" or self._facts.depends_on_chunks or not next_token.may_draft:
            return None
        is_auto = how == "auto"
        seat = self.model.seat() if is_auto and self.model is not None else None
        model = None if seat is None else partial(_said, seat, next_token)
        forced = next_token.forced if is_auto else None
        earlier = lease.earlier
        drafting = Drafting(
            self._experience, lease.prompt, earlier, forced, model, always=how == "lookup"
        )
        if isinstance(seat, DraftSlot):
            drafting.close = seat.close
        return drafting


def _said(
    seat: DraftModel | DraftSlot, next_token: NextToken, text: TokenArray, most: int
) -> list[int] | None:
    try:
        return seat.draft(text, most, next_token.guesses())
    except LogitsError as error:
        if isinstance(seat, DraftModel):
            seat.forget()
        logger.warning("the draft model failed, and the answer continues without it: %s", error)
        return None


MOST_ANSWERS = 4
"""Most answers of a step that a draft model guesses for: it runs once for each of their guesses."""


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

    def draft(self, tokens: TokenArray, most: int, guess: Guess) -> list[int] | None:
        """Return what `DraftModel.draft` does; None if there will be no more guesses."""
        if self._is_over:
            return None
        if self._entry is None:
            self._entry = self._seats.take(self, tokens)
        entry = self._entry
        if entry is None or entry.is_full(tokens):
            self.close()
            return None
        try:
            return entry.draft(tokens, most, guess)
        except Exception as error:
            entry.forget()
            self.close()
            logger.warning("the draft model failed, and the answer continues without it: %s", error)
            return None

    def close(self) -> None:
        """End the use of the entry. Nothing is guessed any more."""
        self._is_over, self._entry = True, None
        self._seats.leave(self)
