"""Choose how many tokens to draft, from what was right before and what passes cost here.

It knows numbers only: no tokens, no model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median_low

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
        """Begin an answer. What earlier ones gained is no reason to lose time in this one."""
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
    def can_tell(self) -> bool:
        """True if a pass of one row was measured, with which others are compared."""
        return bool(self._single)

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
    """The choice of a depth, 0 included. It outlives requests: the device stays the same."""

    def __init__(
        self, budget: DraftBudget | None = None, like: PassCosts | None = None, kept: float = 0.0
    ) -> None:
        """Begin without measurements. `budget`: bounds what drafts lose; None: nothing does.

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

    def pay(self, depth: int, tokens: int, lost: float = 0.0) -> None:
        """Note that a pass with `depth` more rows gave `tokens`, and what was `lost` beside it."""
        if self._budget is not None:
            self._budget.pay(self.costs.ratio(depth) + lost, tokens)

    def depth(self, shares: Sequence[float], most: int, first: float = 1.0) -> int:
        """Return how many tokens to draft, at most `most`; 0: a draft would cost time.

        `shares`: the probability of each drafted token, if those before it are right. `first`: the
        probability that there will be a draft, if the loop has to wait for a token before it.
        """
        expected = _expected(shares)
        depths = [depth for depth in _depths(most) if self._affords(depth)]
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

    @property
    def may_draft(self) -> bool:
        """True if the budget has room for the shortest draft."""
        return self._affords(1)

    def _affords(self, depth: int) -> bool:
        """Return True if a draft of `depth` may be wrong altogether. The first one is short."""
        if self._budget is None:
            return True
        if not self.costs.can_tell:
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


def _expected(shares: Sequence[float]) -> list[float]:
    """Return for each depth the number of tokens that are right on the average."""
    expected, chance = [0.0], 1.0
    for share in shares:
        chance *= share
        expected.append(expected[-1] + chance)
    return expected


def _depths(most: int) -> list[int]:
    """Return the depths to choose from, none of which is larger than `most`."""
    return sorted({min(depth, most) for depth in DEPTHS} - {0})


def _rounded(depth: int) -> int:
    return next(size for size in DEPTHS if size >= depth)
