"""The drafts of one request: who guesses, how much is guessed, and what became of it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mlxrunner.cache.tokens import TokenArray
from mlxrunner.speculation.controller import DEEPEST, Controller, Trust
from mlxrunner.speculation.lookup import TextLookup

ASSUMED = {2: 0.3, 3: 0.55, 4: 0.75, 5: 0.9}
"""Assumed probability of a guess, by the bits of the length of its match."""
FORCED = 0.9
"""Assumed probability that the only text is spelled as drafted."""
ALIKE = 0.7
"""Assumed probability that the model says what the draft model says."""
WAITS, RATE = 0.15, 1 / 16
"""Forced tokens per token of the answer that are worth waiting for, and the rate of the average."""


@dataclass
class Counts:
    """Tokens that one source drafted, and those of them that were right."""

    drafted: int = 0
    accepted: int = 0


@dataclass
class Experience:
    """The experience of a runner with drafts. It outlives requests."""

    controller: Controller = field(default_factory=Controller)
    forced: Trust = field(default_factory=lambda: Trust(FORCED))
    modelled: Controller = field(default_factory=Controller)
    """The controller of drafts by a model, which cost more than those that are looked up."""
    alike: Trust = field(default_factory=lambda: Trust(ALIKE))
    matches: dict[tuple[str, int], Trust] = field(default_factory=dict)
    """The trust in the lookup, by source and bits of the length of the match."""

    def of(self, source: str, length: int) -> Trust:
        """Return the trust in a match of `length` tokens."""
        bits = min(length.bit_length(), max(ASSUMED))
        if (source, bits) not in self.matches:
            self.matches[source, bits] = Trust(ASSUMED[bits])
        return self.matches[source, bits]

    def fade(self) -> None:
        """Let what was learned from earlier texts weigh half as much: the next text may differ."""
        for trust in (self.forced, self.alike, *self.matches.values()):
            trust.fade()


class Drafting:
    """The drafts of one request.

    Tell it of every token as soon as it is read. It compares each with its guess, drafted or not,
    so that it knows at no cost how often a draft would have been right.
    """

    def __init__(
        self,
        experience: Experience,
        prompt: TokenArray,
        earlier: TokenArray,
        forced: Callable[[], list[int]] | None = None,
        model: Callable[[TokenArray, int], list[int]] | None = None,
        *,
        always: bool = False,
    ) -> None:
        """Take what drafts the answer to `prompt`.

        `earlier`: tokens that the entry held where the prompt leaves it, and some before them, by
        which the lookup finds the place. `forced`: returns the tokens that spell what has to
        come next. `model`: returns at most so many tokens that a draft model says behind the text.
        It is asked where the text does not repeat itself. `always`: draft as much as there is,
        without asking what it costs.
        """
        experience.fade()
        self._experience, self._forced, self._always = experience, forced, always
        self._lookup = TextLookup(earlier, prompt)
        self._model, self._model_s = model, 0.0
        self.clock: Callable[[], float] = time.perf_counter
        """Returns the seconds by which costs are compared."""
        self._source, self._forced_share = "", 1.0
        self.by_source: defaultdict[str, Counts] = defaultdict(Counts)
        self.passes = 0
        """Forward passes that checked a draft."""

    def add(self, token: int) -> None:
        """Note a token of the answer."""
        lookup = self._lookup
        if lookup.length:
            trust = self._experience.of(self._found_in, lookup.length)
            right = lookup.expected == token
            trust.learn(right, not right)
        lookup.add(token)

    @property
    def is_worth_waiting(self) -> bool:
        """True if a draft is likely enough to wait for the next token before the next pass."""
        if self._always:
            return self._forced is not None or self._lookup.length > 0
        if self._forced is not None and self._forced_share > WAITS:
            return True
        if self._modelled(DEEPEST):
            return True
        if not self._lookup.length:
            return False
        first, *shares = self._shares(DEEPEST + 1)
        return self._experience.controller.depth(shares, DEEPEST, first) > 0

    def draft(self, most: int) -> list[int]:
        """Return at most `most` tokens that are likely to come next, or none."""
        most = min(most, DEEPEST)
        if most <= 0:
            return []
        if self._forced is not None:
            found = self._forced()
            self._forced_share += RATE * (min(len(found), DEEPEST) - self._forced_share)
            if found:
                self._source = "form"
                return found[: self._depth([self._experience.forced.share] * DEEPEST, most)]
        depth = self._depth(self._shares(DEEPEST), most) if self._lookup.length else 0
        if depth:
            self._source = self._found_in
            return self._lookup.ahead(depth)
        return self._said_by_model(most)

    def _said_by_model(self, most: int) -> list[int]:
        depth = self._modelled(most)
        if not depth or self._model is None:
            return []
        self._source, began = "model", self.clock()
        found = self._model(self._lookup.text, depth)
        self._model_s = self.clock() - began
        return found

    def _modelled(self, most: int) -> int:
        """Return how many tokens the draft model should be asked for."""
        if self._model is None:
            return 0
        experience = self._experience
        return experience.modelled.depth([experience.alike.share] * DEEPEST, most)

    def judge(self, drafted: int, accepted: int, seconds: float) -> None:
        """Note that `accepted` of `drafted` tokens were right, and what the pass cost."""
        counts = self.by_source[self._source]
        counts.drafted += drafted
        counts.accepted += accepted
        self.passes += 1
        if self._source == "form":
            self._experience.forced.learn(accepted, int(accepted < drafted))
        if self._source == "model":
            self._experience.alike.learn(accepted, int(accepted < drafted))
            self._experience.modelled.verified(drafted, seconds + self._model_s)
        else:
            self._experience.controller.verified(drafted, seconds)

    def passed(self, seconds: float) -> None:
        """Note what a pass without a draft cost."""
        self._experience.controller.passed(seconds)
        self._experience.modelled.passed(seconds)

    def _depth(self, shares: Sequence[float], most: int) -> int:
        return most if self._always else self._experience.controller.depth(shares, most)

    def _shares(self, count: int) -> list[float]:
        """Return the probabilities of the next `count` guesses: the match grows with each."""
        source, length = self._found_in, self._lookup.length
        return [self._experience.of(source, length + more).share for more in range(count)]

    @property
    def _found_in(self) -> str:
        return "earlier" if self._lookup.is_earlier else "lookup"
