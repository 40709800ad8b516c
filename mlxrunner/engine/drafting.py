"""Draft the next tokens of an answer, so that one pass checks several. No tensors.

`StepController` chooses how many tokens to draft, from what was right before and what steps cost.
`Drafting` is the drafts of one request: who guesses, how much, and what became of it.
`DraftSources` outlives requests, and makes the drafts of each.
"""

from __future__ import annotations

import time
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median_low
from typing import TYPE_CHECKING

import numpy as np

from mlxrunner.cache.entry import TokenArray, TokenBuffer
from mlxrunner.cache.prefix import EntryLease

if TYPE_CHECKING:
    from mlxrunner.engine.draft_model import DraftCachePool, DraftModel
    from mlxrunner.engine.sampling import NextToken
    from mlxrunner.models.facts import ModelFacts


DEPTHS = (1, 3, 7, 15)
"""The lengths of a draft that are compared. With the token before it a pass has a power of two."""
DEEPEST = DEPTHS[-1]
SLOPE = 0.15
"""Assumed cost of one more row of a pass, as a share of a pass of one row, until it is measured."""
REMEMBERED = 7
"""Passes of one size, the middle one of which tells the cost: other work disturbs some."""
LEAST_GAIN = 0.3
"""Passes that a draft has to save on the average: what waiting and going back cost beside it."""
PROBE_SHARE = 0.01
"""Most that may be spent on measuring costs again, as a share of plain decoding."""
LATER = 32
"""Drafts after which a longer one is tried, because its cost may have been measured badly."""
PRIOR_WEIGHT, EVIDENCE = 8, 64
"""Guesses that the assumption about a source counts as, and guesses that are remembered."""
AT_FIRST, LOSS, MOST_LEFT = 1.0, 0.01, 4.0
"""Passes of one row that drafts may lose.

At most `AT_FIRST` in a whole answer, and `LOSS` for each of its tokens. Those that were gained may
be lost again, up to `MOST_LEFT`: the text may have changed.
"""
KEPT = 0.25
"""Passes of `AT_FIRST` that a draft model may not lose: other sources begin with so few."""


class Trust:
    """The share of right guesses of one kind."""

    def __init__(self, assumed: float) -> None:
        self._assumed = assumed
        self._right = self._asked = 0.0

    @property
    def share(self) -> float:
        """The probability that the next guess is right."""
        return (self._assumed * PRIOR_WEIGHT + self._right) / (PRIOR_WEIGHT + self._asked)

    def learn(self, right: int, wrong: int) -> None:
        """Note how many guesses were right and wrong."""
        self._right += right
        self._asked += right + wrong
        if self._asked > EVIDENCE:
            self.fade()

    def fade(self) -> None:
        """Let what was learned weigh half as much."""
        self._right, self._asked = self._right / 2, self._asked / 2


class DraftBudget:
    """The passes of one row that drafts may still lose. Several controllers may share one.

    Whatever the text is, and whatever is guessed, all answers so far took at most the time of
    plain decoding, `LOSS` of it and `AT_FIRST` passes. So did each of them by itself.
    """

    def __init__(self) -> None:
        self.left = AT_FIRST
        self.held = 0.0
        """Passes that the drafts of the step under way may lose: no other draft may."""

    def begin(self) -> None:
        """Begin an answer. Gains of earlier ones do not justify a loss in this one."""
        self.left = min(self.left, AT_FIRST)

    def pay(self, passes: float, tokens: float) -> None:
        """Note that `tokens` of the answer took the time of `passes` of one row."""
        self.left = min(self.left + tokens * (1 + LOSS) - passes, MOST_LEFT)
        self.held = 0.0


class PassCosts:
    """The seconds that passes of one row and of several rows kept the caller waiting."""

    def __init__(self, like: PassCosts | None = None) -> None:
        """Begin without measurements. `like`: those that hold until there are own ones."""
        self._like = like
        self._single: deque[float] = deque(maxlen=REMEMBERED)
        # In passes of one row of that time: a longer context makes both slower.
        self._checked = {depth: deque[float](maxlen=REMEMBERED) for depth in DEPTHS}
        self._ratios: dict[int, float] = {}

    @property
    def single(self) -> float:
        """The seconds of a pass of one row; 0 until one was measured."""
        return max(median_low(self._single), 1e-9) if self._single else 0.0

    @property
    def is_known(self) -> bool:
        """True if a pass of several rows was measured."""
        return any(self._checked.values()) or (self._like is not None and self._like.is_known)

    def measure_single(self, seconds: float) -> None:
        """Note the seconds of a pass of one row."""
        self._single.append(seconds)

    def measure(self, depth: int, seconds: float) -> None:
        """Note the seconds of a pass that checked `depth` drafted tokens."""
        if single := self.single:
            self._checked[_rounded(depth)].append(seconds / single)
            self._ratios.clear()

    def ratio(self, depth: int) -> float:
        """Return the cost of a pass with a draft of `depth`, in passes of one row."""
        if not depth:
            return 1.0
        if self._like is not None and not any(self._checked.values()):
            return self._like.ratio(depth)
        if depth not in self._ratios:
            self._ratios[depth] = self._ratio(depth)
        return self._ratios[depth]

    def hoped(self, depth: int) -> float:
        """Return what such a pass may cost once one of its size has run before.

        The first one may take longer: a device prepares its kernels.
        """
        ratio, measured = self.ratio(depth), self._checked[_rounded(depth)]
        return min(ratio, 1 + depth * SLOPE) if len(measured) == 1 else ratio

    def _ratio(self, depth: int) -> float:
        if measured := self._checked[_rounded(depth)]:
            return median_low(measured)
        known = [(size, median_low(seen) - 1) for size, seen in self._checked.items() if seen]
        size, more = known[-1] if known else (0, 0.0)
        slope = max(more / size, 0) if size else SLOPE
        # A short pass tells little of a long one: less the shorter it is.
        beyond = max(depth - size, 0)
        return 1 + (depth - beyond) * slope + beyond * max(slope, SLOPE / max(size, 1))


class Controller:
    """The choice of a depth, 0 included, for steps of about as many answers.

    It outlives requests: the device stays the same.
    """

    def __init__(
        self, budget: DraftBudget, like: PassCosts | None = None, kept: float = 0.0
    ) -> None:
        """Begin without measurements. `budget`: bounds what drafts lose.

        `like`: see `PassCosts`. `kept`: passes of the budget that are left to other drafts.
        """
        self.costs, self._budget, self._kept = PassCosts(like), budget, kept
        self._drafts = 0
        self._single_since_probe = 0

    def passed(self, seconds: float) -> None:
        """Note a pass without a draft."""
        self.costs.measure_single(seconds)
        self._single_since_probe += 1

    def verified(self, depth: int, seconds: float) -> None:
        """Note a pass that checked `depth` drafted tokens."""
        self.costs.measure(depth, seconds)
        self._drafts += 1

    def depth(self, shares: Sequence[float], most: int, first: float = 1.0) -> int:
        """Return how many tokens to draft, at most `most`; 0: a draft would cost time.

        `shares`: the probability of each drafted token, if those before it are right. `first`: the
        probability that there will be a draft, if the loop has to wait for a token before it.
        """
        expected = _expected(shares)
        depths = sorted({min(depth, most) for depth in DEPTHS} - {0})
        depths = [depth for depth in depths if self.affords(depth)]
        if not depths:
            return 0
        costs = {depth: self.costs.hoped(depth) for depth in depths}
        best = max(depths, key=lambda depth: (1 + expected[depth]) / costs[depth])
        saved = 1 + expected[best] - costs[best]
        if first * saved < LEAST_GAIN:
            return self._probe(expected, depths) if first == 1 else 0
        if self._drafts % LATER == LATER - 1:
            return min((depth for depth in depths if depth > best), default=best)
        return best

    def affords(self, depth: int) -> bool:
        """Return True if a draft of `depth` may be wrong altogether. The first one is short."""
        if not self.costs.single:  # there is nothing to compare with
            return False
        most = DEEPEST if self.costs.is_known else 1
        left = self._budget.left - self._budget.held - self._kept
        return depth <= most and self.costs.ratio(depth) - 1 <= left

    def _probe(self, expected: Sequence[float], depths: Sequence[int]) -> int:
        """Return a depth to measure once more, if its loss is small beside plain decoding."""
        for depth in depths:
            loss = self.costs.ratio(depth) - 1 - expected[depth]
            if expected[depth] > depth / 2 and loss < PROBE_SHARE * self._single_since_probe:
                self._single_since_probe = 0
                return depth
        return 0


FORGOTTEN = 256
"""Steps without guesses after which the cost of those with guesses is measured again."""


class StepController:
    """The choice of how much one answer of a step drafts. It learns from whole steps."""

    def __init__(self, budget: DraftBudget, most: int = DEEPEST, kept: float = 0.0) -> None:
        """Begin without measurements. `budget` and `kept`: see `Controller`.

        `most`: the answers of a step beyond which there are no drafts.
        """
        self._budget, self._most, self._kept = budget, most, kept
        self._of: dict[int, Controller] = {}
        """The controllers of steps with 1, 2 to 3, 4 to 7 ... answers, by the bits of these."""
        self._plain: defaultdict[int, int] = defaultdict(int)
        self._answers, self._can_pay = 1, True

    def carry(self, answers: int) -> None:
        """Note how many answers the next step carries."""
        self._answers = max(1, answers)
        now = self._now
        self._can_pay = self._answers == 1 or any(
            depth / self._answers + 1 - now.costs.hoped(depth) >= LEAST_GAIN
            for depth in DEPTHS
            if now.affords(depth)
        )

    @property
    def costs(self) -> PassCosts:
        """The costs of steps with as many answers as the next one."""
        return self._now.costs

    @property
    def may_draft(self) -> bool:
        """True if the budget has room for a draft that would save enough if it were right."""
        return self._answers <= self._most and self._can_pay and self._now.affords(1)

    def depth(self, shares: Sequence[float], most: int, first: float = 1.0) -> int:
        """Return how many tokens to draft: see `Controller.depth`.

        A right guess saves a step for one answer only, so it counts as that answer's share of it.
        """
        if not shares or self._answers > self._most:
            return 0
        return self._now.depth([shares[0] / self._answers, *shares[1:]], most, first)

    def hold(self, depth: int) -> None:
        """Note that an answer of the next step drafts `depth` tokens, which may all be wrong."""
        if depth:
            self._budget.held += self.costs.ratio(depth) - 1

    def settle(self, answers: int, rows: int, tokens: int, late: float) -> None:
        """Note that a step gave `tokens` tokens in all, with `rows` rows beside one per answer.

        An answer that gets one token more saves its share of a step. `late`: seconds in which the
        device had nothing to do, because a draft was waited for.
        """
        costs = self._for(answers.bit_length()).costs
        lost = min(late / costs.single, 1.0) if late and costs.single else 0.0
        self._budget.pay(costs.ratio(rows) + lost, tokens / answers)

    def measure(self, answers: int, rows: int, seconds: float) -> None:
        """Note the seconds of a step with `rows` beside one for each answer."""
        size = answers.bit_length()
        if rows:
            self._plain[size] = 0
            self._for(size).verified(rows, seconds)
            return
        self._plain[size] += 1
        if self._plain[size] % FORGOTTEN == 0:
            self._of.pop(size, None)
        self._for(size).passed(seconds)

    @property
    def _now(self) -> Controller:
        return self._for(self._answers.bit_length())

    def _for(self, size: int) -> Controller:
        """Return the controller of steps of a size. It begins with what smaller ones know."""
        if size not in self._of:
            like = self._for(size - 1).costs if size > 1 else None
            self._of[size] = Controller(self._budget, like, self._kept)
        return self._of[size]


def _expected(shares: Sequence[float]) -> list[float]:
    """Return for each depth the number of tokens that are right on the average."""
    expected, chance = [0.0], 1.0
    for share in shares:
        chance *= share
        expected.append(expected[-1] + chance)
    return expected


def _rounded(depth: int) -> int:
    return next(size for size in DEPTHS if size >= depth)


ASSUMED = {2: 0.3, 3: 0.55, 4: 0.75, 5: 0.9}
"""Assumed probability of a guess, by the bits of the length of its match."""
LONG = 1 << max(ASSUMED) - 1
"""Length of a match from which on all are trusted alike."""
FORCED = 0.9
"""Assumed probability that the only text is spelled as drafted."""
ALIKE = 0.7
"""Assumed probability that the model says what the draft model says."""
MOST_ANSWERS = 4
"""Most answers of a step that a draft model guesses for: it runs once for each of their guesses."""
BEHIND = 4 * DEEPEST
"""Tokens after the last draft of the draft model from which on the next one tells no cost.

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
    following: float = 0.0
    """The passes of one row in which the draft model may read a prompt, or an answer in which it
    said nothing for long.

    The first time may take more, as may any if there is something left; then they are paid back.
    """

    def __post_init__(self) -> None:
        self.controller = StepController(self.budget)
        self.modelled = StepController(self.budget, MOST_ANSWERS, KEPT)
        """For drafts by a model, which cost more than those that are looked up."""

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
        after the point where the prompt leaves it, with a few before that point. `forced`: a
        function that returns the only tokens that may come next. `model`: a function from a text
        and a number to at most that number of tokens, which a draft model expects after the text;
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
        self.close: Callable[[], None] = lambda: None
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

    def judge(self, drafted: int, accepted: int) -> None:
        """Note that a pass has checked `drafted` tokens, of which `accepted` were right."""
        counts = self.by_source[self.source]
        counts.drafted += drafted
        counts.accepted += accepted
        self.passes += 1
        experience = self._experience
        if self.source == "form":
            experience.forced.learn(accepted, int(accepted < drafted))
        if self.source == "model":
            experience.alike.learn(accepted, int(accepted < drafted))
            experience.following += accepted + 1 - experience.modelled.costs.ratio(drafted)

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

    The texts are what the entry held before, the prompt and the answer, one after the other.
    Places after the same two tokens form a chain, the latest first. Making the chains takes
    0.1 ms for 1,000 tokens.
    """

    def __init__(self, earlier: TokenArray, prompt: TokenArray) -> None:
        """Begin with the tokens `earlier`, which are not part of the conversation, and `prompt`."""
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


class DraftSources:
    """The draft model, if there is one, and what was learned about guesses."""

    def __init__(self, facts: ModelFacts, experience: Experience) -> None:
        """Prepare drafts for the model of `facts`."""
        self._facts, self._experience = facts, experience
        self.model: DraftModel | DraftCachePool | None = None

    def drafting(self, next_token: NextToken, lease: EntryLease, how: str) -> Drafting | None:
        """Return the drafts of a request; None if nothing may be drafted.

        `how`: the option `speculate`.
        """
        if how == "off" or self._facts.depends_on_chunks or not next_token.may_draft:
            return None
        is_auto = how == "auto"
        seat = self.model.seat() if is_auto and self.model is not None else None
        model = None if seat is None else partial(seat.propose, next_token)
        forced = next_token.forced if is_auto else None
        earlier = lease.earlier
        drafting = Drafting(
            self._experience, lease.prompt, earlier, forced, model, always=how == "lookup"
        )
        if seat is not None:
            drafting.close = seat.leave
        return drafting
