"""Learn what a step costs, from the steps that ran. No tensors, no clock.

The cost of a step is that of its decoding rows, and of each prefill token beside them. A prefill
token costs more the more cells it sees, and less in a large piece than in a small one.
"""

from __future__ import annotations

from collections import defaultdict, deque
from itertools import combinations, pairwise
from statistics import median

RECENT = 15
"""Number of last measurements that count."""
FAR = 128
"""Least difference of two histories, in cells, that shows what a cell costs."""


class StepCosts:
    """The costs of steps, as medians of the last ones. A single slow step changes little."""

    def __init__(self) -> None:
        self._decode: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))
        self._pieces: dict[int, _Line] = {}

    def measure(self, rows: int, prefill: int, cells: int, seconds: float) -> None:
        """Note that a step took `seconds`.

        `rows`: its decoding rows. `prefill`: its prefill tokens, which saw up to `cells` cells.
        """
        if prefill:
            own = seconds - (self.decode(rows) or 0.0)
            line = self._pieces.get(_size(prefill)) or _Line()
            line.add(prefill, cells, max(own, 0.0) / prefill)
            self._pieces[_size(prefill)] = line  # an interrupt leaves no line without a sample
        elif rows:
            self._decode[_size(rows)].append(seconds)

    def decode(self, rows: int) -> float | None:
        """Return the seconds of a step of `rows` decoding rows; None if they are unknown."""
        if not rows:
            return 0.0
        known = self._decode.get(_size(rows))
        return median(known) if known else None

    def piece(self, prefill: int, cells: int) -> float | None:
        """Return the seconds that `prefill` tokens add to a step; None before the first piece.

        Lines join the sizes that were measured. The last one goes on beyond them, but a token there
        costs at least half of what it costs in the largest size, and at most as much.
        """
        if not self._pieces:
            return None
        if not prefill:
            return 0.0
        known = [(0.0, 0.0), *sorted(line.point(cells) for line in self._pieces.values())]
        for (left, low), (right, high) in pairwise(known):
            slope = (high - low) / (right - left)
            if prefill <= right:
                return low + slope * (prefill - left)
        each = high / right
        return high + min(max(slope, each / 2), each) * (prefill - right)

    @property
    def largest(self) -> int:
        """Number of tokens of the largest pieces that were measured; 0 before the first one."""
        return int(2 ** max(self._pieces)) if self._pieces else 0


class _Line:
    """The seconds of a token as a line over the cells that it sees, after Theil and Sen."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, int, float]] = deque(maxlen=RECENT)
        self._fit = (0.0, 0.0, 0.0)
        """The usual size of the pieces, and the line: its start and its slope."""

    def add(self, prefill: int, cells: int, seconds: float) -> None:
        """Add the `seconds` of each token of a piece.

        The slope is the median of the slopes of all pairs.
        """
        self._samples.append((prefill, cells, seconds))
        slopes = [
            (took - before) / (here - there)
            for (_, there, before), (_, here, took) in combinations(self._samples, 2)
            if abs(here - there) >= FAR
        ]
        slope = max(0.0, median(slopes)) if slopes else 0.0
        size = median(size for size, _, _ in self._samples)
        start = median(took - slope * seen for _, seen, took in self._samples)
        self._fit = (size, start, slope)

    def point(self, cells: int) -> tuple[float, float]:
        """Return the usual size of these pieces, and the seconds of one that sees `cells` cells."""
        size, start, slope = self._fit
        return size, size * max(0.0, start + slope * cells)


def _size(count: int) -> int:
    """Return the class of a count: its power of two."""
    return count.bit_length() - 1
