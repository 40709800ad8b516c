"""Guess the answers of a token log, as `--speculate lookup` would have done."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from mlxrunner.cache.prefix import leaving
from mlxrunner.cache.tokens import TokenArray, as_tokens, common_prefix
from mlxrunner.profiling.tokenlog import LoggedRequest
from mlxrunner.speculation.drafting import Counts, Drafting, Experience


class Guesses:
    """The guesses in all answers of a log, and the forward passes that they leave."""

    def __init__(self) -> None:
        self.tokens = 0
        """The tokens of answers that were run: so many passes there are without guesses."""
        self.passes = 0
        """The forward passes with guesses."""
        self.by_source: defaultdict[str, Counts] = defaultdict(Counts)
        self._before: dict[str, TokenArray] = {}

    def add(self, logged: LoggedRequest, *, is_beside: bool) -> None:
        """Guess the answer of the next request.

        `is_beside`: it ran beside others, and what its slot held before is not looked up.
        """
        before = as_tokens([]) if is_beside else self._before.get(logged.process["process"])
        earlier = logged.prompt[:0] if before is None else leaving(before, logged.prompt)
        self._guess(logged.prompt, earlier, logged.answer.tolist())
        if not is_beside:
            self._before[logged.process["process"]] = np.concatenate([logged.prompt, logged.answer])

    def _guess(self, prompt: TokenArray, earlier: TokenArray, answer: list[int]) -> None:
        drafting = Drafting(Experience(), prompt, earlier, always=True)
        place = 0
        while place < len(answer):
            # The next pass begins before the token is read, unless a guess is likely.
            may_draft = not place or drafting.is_worth_waiting
            drafting.add(answer[place])
            draft = drafting.draft(len(answer) - 1 - place) if may_draft else []
            right = common_prefix(as_tokens(draft), as_tokens(answer[place + 1 :][: len(draft)]))
            if draft:
                drafting.judge(len(draft), right, 0.0)
            for token in draft[:right]:
                drafting.add(token)
            place += 1 + right
            self.passes += 1
        self.tokens += len(answer)
        for source, counts in drafting.by_source.items():
            self.by_source[source].drafted += counts.drafted
            self.by_source[source].accepted += counts.accepted

    def as_dict(self) -> dict[str, Any]:
        """Return the counts, with those of each source."""
        sources = [
            {"source": source, "drafted": counts.drafted, "accepted": counts.accepted}
            for source, counts in sorted(self.by_source.items())
        ]
        return {"tokens": self.tokens, "passes": self.passes, "drafts": sources}

    @property
    def drafted(self) -> int:
        """The tokens that were guessed."""
        return sum(counts.drafted for counts in self.by_source.values())

    @property
    def accepted(self) -> int:
        """The tokens that were guessed and right."""
        return sum(counts.accepted for counts in self.by_source.values())
