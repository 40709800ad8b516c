"""The sources of guesses of a runner. They outlive requests, and make the drafts of each."""

from __future__ import annotations

from functools import partial

from mlxrunner.cache.prefix import EntryLease
from mlxrunner.cache.tokens import TokenArray
from mlxrunner.engine.sampling import NextToken
from mlxrunner.errors import LogitsError
from mlxrunner.models.facts import ModelFacts
from mlxrunner.results import logger
from mlxrunner.speculation.drafting import Drafting, Experience
from mlxrunner.speculation.model import DraftModel
from mlxrunner.speculation.seats import DraftSeats, Seat


class Sources:
    """The draft model, if there is one, and what was learned about guesses."""

    def __init__(self, facts: ModelFacts, experience: Experience | None = None) -> None:
        """Prepare drafts for the model of `facts`."""
        self._facts = facts
        self.model: DraftModel | DraftSeats | None = None
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
        if isinstance(seat, Seat):
            drafting.close = seat.close
        return drafting


def _said(
    seat: DraftModel | Seat, next_token: NextToken, text: TokenArray, most: int
) -> list[int] | None:
    try:
        return seat.draft(text, most, next_token.guesses())
    except LogitsError as error:
        if isinstance(seat, DraftModel):
            seat.forget()
        logger.warning("the draft model failed, and an answer goes on without: %s", error)
        return None
