"""The entries of a draft model that guesses for several answers at a time.

Each answer has an entry of its own. If it finds none, or if the draft model fails, it goes on
without.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from mlxrunner.cache.tokens import TokenArray
from mlxrunner.results import logger
from mlxrunner.speculation.model import DraftModel, Guess

MOST_ANSWERS = 4
"""Most answers of a step that a draft model guesses for: it runs once for each of their guesses."""


class DraftSeats:
    """The entries of a draft model, each for one answer at a time."""

    def __init__(self, entries: Sequence[DraftModel], nbytes: int = 0) -> None:
        """Lend `entries`. `nbytes`: those of the draft model with all that it stores."""
        self.entries, self.nbytes = tuple(entries), nbytes
        # Weak: an answer whose end was itself interrupted must not keep an entry for ever.
        self._holders: dict[int, weakref.ref[Seat]] = {}

    def seat(self) -> Seat:
        """Return the seat of an answer. It takes an entry when it is first asked to guess."""
        return Seat(self)

    def take(self, seat: Seat, tokens: TokenArray) -> DraftModel | None:
        """Return an entry for the answer of `seat`, whose text is `tokens`; None if all are in use.

        It is the one that has most of them, and loses least.
        """
        free = [number for number in range(len(self.entries)) if self._holder(number) is None]
        if not free:
            return None
        best = max(free, key=lambda number: self.entries[number].gain(tokens))
        self._holders[best] = weakref.ref(seat)
        return self.entries[best]

    def leave(self, seat: Seat) -> None:
        """Give back the entry of `seat`, if it has one. It keeps its text for a later answer."""
        for number, entry in enumerate(self.entries):
            if self._holder(number) is seat:
                entry.close()
                del self._holders[number]

    def _holder(self, number: int) -> Seat | None:
        holder = self._holders.get(number)
        return None if holder is None else holder()


class Seat:
    """The place of one answer at a draft model."""

    def __init__(self, seats: DraftSeats) -> None:
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
            logger.warning("the draft model failed, and an answer goes on without: %s", error)
            return None

    def close(self) -> None:
        """End the use of the entry. Nothing is guessed any more."""
        self._is_over, self._entry = True, None
        self._seats.leave(self)
