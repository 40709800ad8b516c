"""The drafts of one request: who guesses, how much, and what became of it. No tensors."""

from __future__ import annotations

import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field

import numpy as np

from mlxrunner.cache.tokens import TokenArray, TokenBuffer
from mlxrunner.engine.speculation.controller import DEEPEST, KEPT, Controller, DraftBudget, Trust

ASSUMED = {2: 0.3, 3: 0.55, 4: 0.75, 5: 0.9}
"""Assumed probability of a guess, by the bits of the length of its match."""
LONG = 1 << max(ASSUMED) - 1
"""Length of a match from which on all are trusted alike."""
FORCED = 0.9
"""Assumed probability that the only text is spelled as drafted."""
ALIKE = 0.7
"""Assumed probability that the model says what the draft model says."""
BEHIND = 4 * DEEPEST
"""Tokens behind the last draft of the draft model from which on the next one tells no cost.

It evaluates them first, as it does with the prompt.
"""
FOLLOWING = 0.0025
"""Passes of one row, for each token of an answer, in which a draft model may read what it lacks.

What its guesses gain may be spent, too.
"""
WAITS, RATE = 0.15, 1 / 16
"""Forced tokens per token of the answer that are worth waiting for, and the rate of the average."""


@dataclass
class SourceCounts:
    """Tokens that one source drafted, and those of them that were right."""

    drafted: int = 0
    accepted: int = 0


@dataclass
class Experience:
    """The experience of a runner with drafts. It outlives requests."""

    budget: DraftBudget = field(default_factory=DraftBudget)
    forced: Trust = field(default_factory=lambda: Trust(FORCED))
    alike: Trust = field(default_factory=lambda: Trust(ALIKE))
    matches: dict[tuple[str, int], Trust] = field(default_factory=dict)
    """The trust in the lookup, by source and bits of the length of the match."""
    of_steps: InitVar[tuple[Controller, Controller] | None] = None
    """The controllers of steps with many answers, with this budget: see those below."""

    def __post_init__(self, of_steps: tuple[Controller, Controller] | None) -> None:
        self.controller, self.modelled = of_steps or (
            Controller(self.budget),
            Controller(self.budget, kept=KEPT),
        )
        """The second one is for drafts by a model, which cost more than those that are looked up.
        """
        self.following = 0.0
        """The passes of one row in which the draft model may read a prompt, or an answer in which
        it said nothing for long. The first time may take more, as may any if there is something
        left; then they are paid back.
        """

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

    Call `add` with every token as soon as it is read. Each token is compared with the guess for it,
    also where that guess was not drafted. So the share of right guesses is known at no cost.
    """

    def __init__(
        self,
        experience: Experience,
        prompt: TokenArray,
        earlier: TokenArray,
        forced: Callable[[], list[int]] | None = None,
        model: Callable[[TokenArray, int], list[int] | None] | None = None,
        *,
        always: bool = False,
    ) -> None:
        """Begin the drafts of the answer to `prompt`.

        `earlier`: tokens of an earlier text, which the answer may repeat: those that the entry held
        behind the point where the prompt leaves it, with a few before that point. `forced`: a
        function that returns the only tokens that may come next. `model`: a function from a text
        and a number to at most that number of tokens, which a draft model expects behind the text;
        it returns None when it will expect nothing more. It is called where the text does not
        repeat itself. `always`: draft as many tokens as possible, whatever that costs.
        """
        experience.fade()
        experience.budget.begin()
        self._experience, self._forced = experience, forced
        self.always = always
        """True if it drafts without asking what that costs."""
        self._lookup = TextLookup(earlier, prompt)
        self._model, self._unsaid, self._follows = model, BEHIND, False
        self.model_s: float | None = None
        """The seconds of the last draft by a model; None if it had more to read than usual."""
        self.close: Callable[[], None] = _do_nothing
        """Gives up what the draft model keeps for this request."""
        self.clock: Callable[[], float] = time.perf_counter
        """Returns the seconds by which costs are compared."""
        self.source, self._forced_share = "", 1.0
        """The source of the last draft."""
        self.by_source: defaultdict[str, SourceCounts] = defaultdict(SourceCounts)
        self.passes = 0
        """Forward passes that checked a draft."""

    def add(self, token: int) -> None:
        """Note a token of the answer."""
        lookup = self._lookup
        self._unsaid += 1
        self._experience.following += FOLLOWING if self._model is not None else 0.0
        if lookup.length:
            right = lookup.expected == token
            self._experience.of(self._found_in, lookup.length).learn(right, not right)
        lookup.add(token)

    @property
    def is_worth_waiting(self) -> bool:
        """True if a draft is likely enough to wait for the next token before the next pass."""
        if self.always:
            return self._forced is not None or self._lookup.length > 0
        if self._modelled(DEEPEST):
            return True
        if not self._experience.controller.may_draft:
            return False
        if self._forced is not None and self._forced_share > WAITS and self._forced_depth(DEEPEST):
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
                self.source = "form"
                return found[: self._forced_depth(most)]
        depth = self._depth(self._shares(DEEPEST), most) if self._lookup.length else 0
        if depth:
            self.source = self._found_in
            return self._lookup.ahead(depth)
        return self._said_by_model(most)

    def _said_by_model(self, most: int) -> list[int]:
        depth = self._modelled(most)
        if not depth or self._model is None:
            return []
        self.source, self._follows, began = "model", True, self.clock()
        found = self._model(self._lookup.text, depth)
        took = self.clock() - began
        if found is None:
            self._model = None
            return []
        self.model_s = took if self._unsaid < BEHIND else None
        single = self._experience.modelled.costs.single
        if self.model_s is None and single:
            self._experience.following -= took / single
        if found:
            self._unsaid = 0
        return found

    def _modelled(self, most: int) -> int:
        """Return how many tokens the draft model should be asked for."""
        experience = self._experience
        is_near = (self._follows and self._unsaid < BEHIND) or experience.following >= 0
        if self._model is None or not is_near:
            return 0
        return experience.modelled.depth([experience.alike.share] * DEEPEST, most)

    def judge(self, drafted: int, accepted: int, seconds: float, before: int = 0) -> None:
        """Note that `accepted` of `drafted` tokens were right, and what the pass cost.

        `before`: its rows before the current token, which an earlier pass has evaluated, too.
        """
        counts = self.by_source[self.source]
        counts.drafted += drafted
        counts.accepted += accepted
        self.passes += 1
        experience, controller = self._experience, self._experience.controller
        if self.source == "form":
            experience.forced.learn(accepted, int(accepted < drafted))
        if self.source == "model":
            experience.alike.learn(accepted, int(accepted < drafted))
            controller, seconds = experience.modelled, seconds + (self.model_s or 0.0)
        if self.source != "model" or self.model_s is not None:
            controller.verified(drafted + before, seconds)
        if self.source == "model":
            experience.following += accepted + 1 - controller.costs.ratio(drafted + before)
        controller.pay(drafted + before, accepted + 1)

    def passed(self, seconds: float | None, before: int = 0, late: float = 0.0) -> None:
        """Note a pass without a draft.

        `seconds`: None if they are not comparable. `before`: as for `judge`. `late`: seconds in
        which the device had nothing to do, because a draft was waited for.
        """
        experience, costs = self._experience, self._experience.controller.costs
        if seconds is not None and before:
            costs.measure(before, seconds)
        elif seconds is not None:
            experience.controller.passed(seconds)
            if self._model is not None:
                experience.modelled.passed(seconds)
        lost = late / costs.single if late and costs.single else 0.0
        experience.controller.pay(before, 1, lost)

    def evaluated_again(self, rows: int) -> None:
        """Note a pass over tokens of the answer that were undone with wrong ones."""
        experience = self._experience
        experience.budget.pay(experience.controller.costs.ratio(rows - 1), 0)

    def _forced_depth(self, most: int) -> int:
        return self._depth([self._experience.forced.share] * DEEPEST, most)

    def _depth(self, shares: Sequence[float], most: int) -> int:
        return most if self.always else self._experience.controller.depth(shares, most)

    def _shares(self, count: int) -> list[float]:
        """Return the probabilities of the next `count` guesses: the match grows with each."""
        source, length, shares = self._found_in, self._lookup.length, list[float]()
        while len(shares) < count:
            longer = 1 << length.bit_length()  # of which the trust is another one
            alike = longer - length if longer <= LONG else count
            shares += [self._experience.of(source, length).share] * alike
            length = longer
        return shares[:count]

    @property
    def _found_in(self) -> str:
        return "earlier" if self._lookup.is_earlier else "lookup"


def _do_nothing() -> None:
    """Stand for the end of what no request has."""


FEWEST = 2
"""Tokens that have to agree before a place counts as a match."""
MOST = 24
"""Tokens after which two matches count as equally long. The later place then wins."""
CANDIDATES = 64
"""Most places that are compared, the latest ones: a text of one token has nothing but places."""
SPREAD, FEWEST_HEADS = 40503, 1 << 12
"""A number by which a token is multiplied, so that few pairs share a chain; least chains."""


class TextLookup:
    """The texts of one request, with the place that the present end of the answer repeats.

    The texts are what the entry held before, the prompt and the answer, one behind the other.
    Places behind the same two tokens form a chain, the latest first. Making the chains takes
    0.1 ms for 1,000 tokens.
    """

    def __init__(self, earlier: TokenArray, prompt: TokenArray) -> None:
        """Begin with the tokens `earlier`, which are no part of the conversation, and `prompt`."""
        self._said = TokenBuffer()
        self._said.extend(prompt)
        self._tokens: list[int] = [*earlier.tolist(), *prompt.tolist()]
        self._earlier = len(earlier)
        self._next = 0
        self.length = 0
        """Tokens before the end that agree with those before the place; 0: there is no place."""
        self._chain()
        self._search()

    @property
    def is_earlier(self) -> bool:
        """True if the place lies in the earlier tokens."""
        return self._next < self._earlier

    @property
    def expected(self) -> int | None:
        """The token that came at the place; None if there is no place."""
        return self._tokens[self._next] if self.length else None

    @property
    def text(self) -> TokenArray:
        """The prompt and the answer so far, as a view that is valid until the next token."""
        return self._said.array

    def add(self, token: int) -> None:
        """Append a token of the answer, and follow the place or find another one."""
        tokens = self._tokens
        agrees = self.length and tokens[self._next] == token
        self._said.append(token)
        chain = (tokens[-1] * SPREAD + token) & self._mask
        tokens.append(token)
        self._before.append(self._heads[chain])
        self._heads[chain] = len(tokens)
        if agrees:
            self._next += 1
            self.length += 1
        elif self._before[-1]:
            self._search()
        else:
            self.length = 0

    def ahead(self, most: int) -> list[int]:
        """Return at most `most` tokens that came at the place.

        Where they reach the end of the answer, the text repeats itself: they go round.
        """
        if not self.length or most <= 0:
            return []
        found = self._tokens[self._next : self._next + most]
        return (found * (most // len(found) + 1))[:most]

    def _chain(self) -> None:
        """Chain the places of all tokens so far. A place is the index behind two tokens."""
        tokens = np.array(self._tokens, np.int64)
        self._mask = (1 << (len(tokens) + FEWEST_HEADS).bit_length()) - 1
        chains = (tokens[:-1] * SPREAD + tokens[1:]) & self._mask
        order = np.argsort(chains, kind="stable")
        ordered = chains[order]
        before, heads = np.zeros(len(tokens) + 1, np.int32), np.zeros(self._mask + 1, np.int32)
        before[order[1:] + 2] = np.where(ordered[1:] == ordered[:-1], order[:-1] + 2, 0)
        heads[ordered] = order + 2  # the last one of each chain stays
        self._before, self._heads = array("i", before.tobytes()), array("i", heads.tobytes())

    def _search(self) -> None:
        """Find the place with the longest match, the latest of several."""
        tokens, before, place = self._tokens, self._before, len(self._tokens)
        end, longest, self.length = place - 1, 0, 0
        for _ in range(CANDIDATES):
            place = before[place]
            if not place or longest == MOST:
                break
            if longest >= place or tokens[place - 1 - longest] != tokens[end - longest]:
                continue  # no longer than the one that was found
            length, most = 0, min(MOST, place)
            while length < most and tokens[place - 1 - length] == tokens[end - length]:
                length += 1
            if length > longest:
                longest, self._next = length, place
        self.length = longest if longest >= FEWEST else 0
