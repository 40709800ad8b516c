"""Choose how many tokens to draft, from what was right before and what passes cost here.

It knows numbers only: no tokens, no model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

DEPTHS = (1, 3, 7, 15)
"""The lengths of a draft that are compared. With the token before it a pass has a power of two."""
DEEPEST = DEPTHS[-1]
SLOPE = 0.15
"""Assumed cost of one more row of a pass, as a share of a pass of one row, until it is measured."""
REMEMBERED = 7
"""Passes of one size, the cheapest of which tells the cost: other work only ever adds to it."""
LEAST_GAIN = 0.3
"""Passes that a draft has to save on the average: what waiting and going back cost beside it."""
PROBE_SHARE = 0.01
"""Most that may be spent on measuring costs again, as a share of plain decoding."""
LATER = 32
"""Drafts after which a longer one is tried, because its cost may have been measured badly."""
PRIOR_WEIGHT, EVIDENCE = 8, 64
"""Guesses that the assumption about a source counts as, and guesses that are remembered."""


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


class Costs:
    """The seconds that passes of one row and of several rows kept the caller waiting."""

    def __init__(self) -> None:
        self._single: deque[float] = deque(maxlen=REMEMBERED)
        self._checked = {depth: deque[float](maxlen=REMEMBERED) for depth in DEPTHS}

    def measure_single(self, seconds: float) -> None:
        """Note the seconds of a pass of one row."""
        self._single.append(seconds)

    def measure(self, depth: int, seconds: float) -> None:
        """Note the seconds of a pass that checked `depth` drafted tokens."""
        self._checked[_rounded(depth)].append(seconds)

    def ratio(self, depth: int) -> float:
        """Return the cost of a pass with a draft of `depth`, in passes of one row."""
        if not self._single:
            return 1 + depth * SLOPE
        single = max(min(self._single), 1e-9)
        if measured := self._checked[_rounded(depth)]:
            return min(measured) / single
        slopes = [(min(seen) / single - 1) / size for size, seen in self._checked.items() if seen]
        return 1 + depth * max(slopes[-1] if slopes else SLOPE, 0)


class Controller:
    """The choice of a depth, 0 included. It outlives requests: the device stays the same."""

    def __init__(self) -> None:
        self.costs = Costs()
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
        if not depths:
            return 0
        rates = {depth: (1 + expected[depth]) / self.costs.ratio(depth) for depth in depths}
        best = max(rates, key=lambda depth: rates[depth])
        saved = 1 + expected[best] - self.costs.ratio(best)
        if first * saved < LEAST_GAIN:
            return self._probe(expected, depths) if first == 1 else 0
        if self._drafts % LATER == LATER - 1:
            return min((depth for depth in depths if depth > best), default=best)
        return best

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


def _rounded(depth: int) -> int:
    return next(size for size in DEPTHS if size >= depth)
