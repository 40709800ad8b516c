"""Limit the prefill that a step carries while something decodes. No tensors, no clock.

Prefill tokens make a step longer, and the answers beside them slower. Two rules bound that. No step
takes much longer than one that only decodes: that is the largest gap in an answer. And on average
the answers keep a share of their speed: after a piece that took more than its part, some steps only
decode. Within these rules the pace chooses the size of piece that evaluates a prompt soonest, from
the costs that it has measured: small pieces in each step where a device has time to spare while it
decodes, larger ones between steps of rest where small pieces cost nearly as much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlxrunner.parallel.scheduling.costs import StepCosts

SPEED = 0.71
"""Share of its speed alone that a decoding answer keeps; in practice 0.6 to 0.7.

Beside others a step is not the same pass as alone, and sees more cells.
"""
LONGEST = 3.5
"""Longest step that is planned, in steps that only decode.

Steps vary: few of these take more than 5.
"""
FIRST = 16
"""Tokens of the first piece beside an answer, whose cost is not known yet."""
FEWEST = 8
"""Least tokens of a piece if even a step without prefill is longer than `max_step_ms`."""
ALONE_S = 0.5
"""Longest step in seconds that is planned while nothing decodes.

A forward pass cannot be interrupted: new requests and cancels wait for its end.
"""
SHORTEST_S = 1e-3
"""Seconds that work beside a step may take at least, if it may take any."""
FIRST_ALONE = 256
"""Tokens of the first piece while nothing decodes."""
EXPLORE = 16
"""One in EXPLORE pieces is twice as large as the best known size, to measure that."""
STALE = 32
"""Steps with prefill after which one that only decodes is measured again."""
TIE = 1.05
"""Sizes whose costs differ by less than this factor are alike; the smallest is taken."""


@dataclass(frozen=True)
class Planned:
    """A step that is dispatched and not measured yet."""

    rows: int
    """Its rows that decode."""
    kept: int
    """Answers that must not stall meanwhile."""
    prefill: int
    """Its other tokens."""
    cells: int
    """Most cells that one of these sees."""
    normal: float
    """Seconds of a step with these rows only, as known when it was planned."""
    expected: float
    """Seconds that it was expected to take."""


class StepPace:
    """The pace of a runner. It outlives requests and learns from each step."""

    def __init__(self, most: int, max_step_ms: float | None = None) -> None:
        """Plan steps of at most `most` tokens.

        `max_step_ms`: milliseconds that a step may take while something decodes, whatever its
        answers lose by it; 0: any number; None: as `SPEED` and `LONGEST` say.
        """
        self.costs = StepCosts()
        self._most, self._max_step_ms = most, max_step_ms
        self._owed = 0.0
        """Seconds that answers got less than their share; below 0: more."""
        self._spent = 0.0
        """Seconds of the work beside the next step."""
        self._since = self._pieces = 0
        """Steps with prefill since one that only decoded, and all pieces beside answers."""

    def allowance(self, rows: int, cells: int, wanted: int | None = None) -> int:
        """Return how many tokens the next step may carry beside `rows` decoding rows.

        `cells`: the most cells that one of these tokens sees. `wanted`: how many there are; None:
        any number.
        """
        room = max(0, self._most - rows)
        if self._max_step_ms == 0:
            return room
        if not rows:
            few = room if wanted is None else min(room, wanted)
            if (self.costs.piece(few, cells) or math.inf) <= ALONE_S:
                return few
            return self._fitting(0.0, ALONE_S, cells, room, least=FIRST)
        normal = self.costs.decode(rows)
        if normal is None or self._since >= STALE:
            return 0  # measure a step that only decodes
        if self._max_step_ms is not None:
            limit = self._max_step_ms / 1e3 - self._spent
            return self._fitting(normal, limit, cells, room, least=FEWEST)
        if self._owed > 0:
            return 0
        return self._best(normal, cells, room)

    def errand_s(self, rows: int) -> float:
        """Return the seconds that work beside the next step may take; 0: none, it has to wait.

        `rows`: the answers that must not stall.
        """
        if self._max_step_ms == 0:
            return math.inf
        if not rows:
            return ALONE_S
        normal = self.costs.decode(rows)
        if normal is None or (self._max_step_ms is None and self._owed > 0):
            return 0.0
        longest = LONGEST * normal if self._max_step_ms is None else self._max_step_ms / 1e3
        return max(longest - normal, SHORTEST_S)

    def spend(self, rows: int, seconds: float) -> None:
        """Note that work beside the step took time from answers that must not stall."""
        self._spent = seconds
        if rows and (normal := self.costs.decode(rows)) is not None:
            self._owe(normal, SPEED * seconds)

    def plan(self, rows: int, prefill: int, cells: int, *, kept: int | None = None) -> Planned:
        """Note that a step is dispatched now, and return what `measure` needs.

        `kept`: the answers that must not stall, whether they are in this step or not; by default
        its rows.
        """
        kept, self._spent = rows if kept is None else kept, 0.0
        normal = self.costs.decode(rows or min(kept, 1)) or 0.0
        expected = (normal if rows else 0.0) + (self.costs.piece(prefill, cells) or 0.0)
        if not kept:
            self._owed = 0.0
        else:
            self._since = self._since + 1 if prefill else 0
            self._pieces += prefill > 0
            self._owe(normal, SPEED * expected - (normal if rows else 0.0))
        return Planned(rows, kept, prefill, cells, normal, expected)

    def measure(self, step: Planned, seconds: float) -> None:
        """Note how many seconds a step took."""
        self.costs.measure(step.rows, step.prefill, step.cells, seconds)
        if step.kept and step.normal:
            self._owe(step.normal, SPEED * (seconds - step.expected))

    def _owe(self, normal: float, seconds: float) -> None:
        """Add to what is owed, within bounds: neither a lull nor a hiccup counts for long."""
        self._owed = min(max(self._owed + seconds, -normal), LONGEST * normal)

    def _best(self, normal: float, cells: int, room: int) -> int:
        """Return the size of piece that takes least time per token, with the rests that follow."""
        best, least = 0, 0.0
        for size in self._sizes(room):
            piece = self.costs.piece(size, cells)
            if piece is None:
                return min(FIRST, room)
            took = normal + piece
            if best and took > LONGEST * normal:
                continue
            rest = max(0.0, (SPEED * took - normal) / (1 - SPEED))
            each = (took + rest) / size
            if not best or each * TIE < least:
                best, least = size, each
        return self._explored(best, normal, cells, room)

    def _explored(self, size: int, normal: float, cells: int, room: int) -> int:
        """Return twice `size` from time to time, if that is not too long."""
        double = 2 * size
        is_due = self._pieces % EXPLORE == EXPLORE - 1 and double <= room
        too_long = normal + (self.costs.piece(double, cells) or 0.0) > LONGEST * normal
        return double if is_due and not too_long else size

    def _fitting(self, normal: float, limit: float, cells: int, room: int, least: int) -> int:
        """Return the most tokens with which a step takes at most `limit` seconds."""
        best = min(least, room)
        for size in self._sizes(room):
            piece = self.costs.piece(size, cells)
            if piece is None:
                return best if normal else min(FIRST_ALONE, room)
            if normal + piece > limit:
                break
            best = max(best, size)
        return best

    def _sizes(self, room: int) -> list[int]:
        """Return sizes of pieces to choose from, up to twice what was measured."""
        most = min(room, max(FIRST, 2 * self.costs.largest))
        powers = [2**power for power in range(most.bit_length())]
        sizes = {size for power in powers for size in (power, 3 * power // 2) if size < most}
        return sorted(sizes | {most}) if most else []
