"""Size steps and share their tokens: what a step costs, what it may take, and whose turn it is.

No tensors, no clock. Prefill tokens make a step longer, and the answers beside them slower. Two
rules bound that. No step takes much longer than one that only decodes: that is the largest gap in
an answer. And on average the answers keep a share of their speed: after a piece that took more than
its part, some steps only decode. Within these rules the pace chooses the size of piece that
evaluates a prompt soonest, from the costs that it has measured: small pieces in each step where a
device has time to spare while it decodes, larger ones between steps of rest where small pieces cost
nearly as much.

Requests of a higher priority come first; within a priority, those with a deadline, the nearest
first. Among equal ones the request that needs fewest tokens comes first, so that a short prompt is
done soon. One turn in FAIR is shared evenly by all, so that none starves.

Where recurrent layers run several prompts as one batch, a step takes little longer with more of
them: its work is counted so (`StepCosts.work`), and prompts that are done sooner together than one
after the other are evaluated side by side.

`Pace` sizes the pieces of a runner of one request.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, groupby, pairwise
from statistics import median
from typing import Literal

from mlxrunner.config.option import Option, check_above

RECENT = 15
"""Number of last measurements that count."""
SURPRISES, FACTOR = 3, 2.0
"""Number of pieces, one after another, that show another speed of the device.

Each takes more than FACTOR times what was expected, or less than a FACTOR-th of it.
"""
FAR = 128
"""Least difference of two histories, in cells, that shows what a cell costs."""


class StepCosts:
    """The costs of steps, as medians of the last ones. A single slow step changes little."""

    def __init__(self, *, stacks: bool = False) -> None:
        """Begin without measurements. `stacks`: some layers run several prompts as one batch."""
        self._decode: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))
        self._pieces: dict[int, _Line] = {}
        self._surprises: list[float] = []
        """The times of the last pieces in relation to what was expected, if they were far off."""
        self._stacks = stacks
        self._shares: deque[float] = deque(maxlen=RECENT)
        self._alone = set[int]()
        """The sizes of pieces that were measured with one prompt, which tell what a token costs."""

    @property
    def share(self) -> float:
        """Cost of a token beside a longer piece, as a share of its cost alone."""
        if not self._stacks:
            return 1.0
        return median([FIRST_SHARE, *self._shares])

    def work(self, tokens: int, longest: int) -> int:
        """Return how many tokens of one prompt cost as much as pieces of `tokens` in all.

        `longest`: the tokens of the longest piece.
        """
        return _work(tokens, longest, self.share)

    def measure(
        self, rows: int, prefill: int, cells: int, seconds: float, beside: tuple[int, int] = (0, 0)
    ) -> None:
        """Note that a step took `seconds`.

        `rows`: its decoding rows. `prefill`: the work of its pieces, which saw up to `cells` cells.
        `beside`: the tokens of the longest piece, and those of all others.
        """
        if prefill:
            own, size = max(seconds - self._base(rows), 0.0), _size(prefill)
            expected, line = self.piece(prefill, cells), self._pieces.get(size)
            longest, others = beside
            if others and size in self._alone and expected:
                share = (prefill * own / expected - longest) / others
                self._shares.append(min(max(share, 0.0), 1.0))
                return
            self._compare(own, expected, rows)
            if line is None or (self._stacks and not others and size not in self._alone):
                line = _Line()  # what other shapes told of this size counts no more
            line.add(prefill, cells, own / prefill)
            self._pieces[size] = line  # an interrupt leaves no line without a sample
            if not others:
                self._alone.add(size)
        elif rows:
            self._decode[_size(rows)].append(seconds)

    def _compare(self, own: float, expected: float | None, rows: int) -> None:
        """Note how far a step is off. Scale the costs of all sizes if the device has changed.

        The whole step counts: of a piece that takes next to nothing beside answers, nothing but
        noise is known.
        """
        base = self._base(rows)
        ratio = (own + base) / (expected + base) if expected and own else 1.0
        is_far = not 1 / FACTOR <= ratio <= FACTOR
        self._surprises = [*self._surprises, ratio] if is_far else []
        if len(self._surprises) == SURPRISES:
            factor = median(self._surprises)
            self._surprises = []
            for line in self._pieces.values():
                line.scale(factor)

    def _base(self, rows: int) -> float:
        """Return the seconds of a step without its pieces, as far as they are known."""
        known = self.decode(rows) if rows else None
        return known or min(map(median, self._decode.values()), default=0.0)

    def num_samples(self, prefill: int) -> int:
        """Return how many pieces of about a size were measured lately."""
        line = self._pieces.get(_size(prefill))
        return 0 if line is None else line.num_samples

    def decode(self, rows: int) -> float | None:
        """Return the seconds of a step of `rows` decoding rows; None if they are unknown."""
        if not rows:
            return 0.0
        known = self._decode.get(_size(rows))
        return median(known) if known else None

    def piece(self, prefill: int, cells: int) -> float | None:
        """Return the seconds that `prefill` tokens add to a step; None before the first piece.

        Lines join the sizes that were measured. The last one extends beyond them, but a token there
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
        self._least = 0.0
        """Seconds of a token at fewer cells than were measured, at least."""

    @property
    def num_samples(self) -> int:
        return len(self._samples)

    def add(self, prefill: int, cells: int, seconds: float) -> None:
        """Add the `seconds` of each token of a piece.

        The slope is the median of the slopes of all pairs.
        """
        self._samples.append((prefill, cells, seconds))
        self._fit = self._fitted()

    def scale(self, factor: float) -> None:
        """Multiply all seconds."""
        scaled = [(prefill, cells, factor * seconds) for prefill, cells, seconds in self._samples]
        self._samples = deque(scaled, maxlen=RECENT)
        self._fit = self._fitted()

    def _fitted(self) -> tuple[float, float, float]:
        slopes = [
            (took - before) / (here - there)
            for (_, there, before), (_, here, took) in combinations(self._samples, 2)
            if abs(here - there) >= FAR
        ]
        slope = max(0.0, median(slopes)) if slopes else 0.0
        size = median(size for size, _, _ in self._samples)
        start = median(took - slope * seen for _, seen, took in self._samples)
        self._least = min(took for _, _, took in self._samples) / 2
        return size, start, slope

    def point(self, cells: int) -> tuple[float, float]:
        """Return the usual size of these pieces, and the seconds of one that sees `cells` cells."""
        size, start, slope = self._fit
        return size, size * max(self._least, start + slope * cells)


def _size(count: int) -> int:
    """Return the class of a count: its power of two."""
    return count.bit_length() - 1


SPEED = 0.71
"""Share of its speed alone that a decoding answer keeps; in practice 0.6 to 0.7.

Beside others a step is not the same pass as alone, and sees more cells.
"""
LONGEST = 3.5
"""Longest step that is planned, in steps that only decode.

Steps vary: few of these take more than 5.
"""
GAP_S = 0.08
"""Seconds of a step that may be planned in any case. A reader hardly notices a gap of 0.1 s."""
CREDIT = 40
"""Steps that only decode, in whose time an answer may fall behind before prompts have to rest.

Requests that arrive together are then evaluated together, not one after the end of the other.
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
"""One in EXPLORE pieces is larger than the best known size, to measure that."""
FEW = 4
"""Pieces of a size that tell its cost; until there are as many, it is tried sooner."""
STALE = 32
"""Steps with prefill after which one that only decodes is measured again."""
FIRST_SHARE = 0.4
"""The share of `StepCosts.share` until it is measured: low enough that it will be."""
TIE = 1.05
"""Sizes whose costs differ by less than this factor are alike; the smallest is taken."""


@dataclass(frozen=True)
class PlannedStep:
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
    longest: int = 0
    """Tokens of its longest piece."""
    work: int = 0
    """The work of all pieces: see `StepCosts.work`."""


class StepPace:
    """The pace of a runner. It outlives requests and learns from each step."""

    def __init__(
        self, most: int, max_step_ms: float | None = None, *, stacks: bool = False
    ) -> None:
        """Plan steps of at most `most` tokens. `stacks`: that of `StepCosts`.

        `max_step_ms`: milliseconds that a step may take while something decodes, whatever its
        answers lose by it; 0: any number; None: as `SPEED` and `LONGEST` say.
        """
        self.costs = StepCosts(stacks=stacks)
        self._most, self._max_step_ms = most, max_step_ms
        self._owed = -math.inf
        """Seconds that answers got less than their share; below 0: more."""
        self._spent = 0.0
        """Seconds of the work beside the next step."""
        self._since = self._pieces = 0
        """Steps with prefill since one that only decoded, and all pieces beside answers."""

    def allowance(self, rows: int, cells: int, wanted: int | None = None) -> int:
        """Return how much work the next step may carry beside `rows` decoding rows.

        `cells`: the most cells that one of its tokens sees. `wanted`: what there is; None: any
        number.
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
        return self._best(normal, cells, room, must_rest=self._owed >= -normal)

    def offload_s(self, rows: int, *, is_late: bool = False) -> float:
        """Return the seconds that work beside the next step may take; 0: none, it has to wait.

        `rows`: the answers that must not stall. `is_late`: it can't wait until they catch up.
        """
        if self._max_step_ms == 0:
            return math.inf
        if not rows:
            return ALONE_S
        normal = self.costs.decode(rows)
        if normal is None or (self._max_step_ms is None and self._owed > 0 and not is_late):
            return SHORTEST_S if is_late else 0.0
        longest = _longest(normal) if self._max_step_ms is None else self._max_step_ms / 1e3
        return max(longest - normal, SHORTEST_S)

    def spend(self, rows: int, seconds: float) -> None:
        """Note that work beside the step took time from answers that must not stall."""
        self._spent = seconds
        if rows and (normal := self.costs.decode(rows)) is not None:
            self._owe(normal, SPEED * seconds)

    def plan(
        self,
        rows: int,
        prefill: int,
        cells: int,
        *,
        longest: int | None = None,
        kept: int | None = None,
    ) -> PlannedStep:
        """Note that a step is dispatched now, and return what `measure` needs.

        `longest`: tokens of the longest piece; by default there is one. `kept`: the answers that
        must not stall, whether they are in this step or not; by default its rows.
        """
        longest = prefill if longest is None else longest
        work = self.costs.work(prefill, longest)
        kept, self._spent = rows if kept is None else kept, 0.0
        normal = self.costs.decode(rows or min(kept, 1)) or 0.0
        expected = (normal if rows else 0.0) + (self.costs.piece(work, cells) or 0.0)
        if not kept:
            self._owed = -math.inf
        else:
            self._since = self._since + 1 if prefill else 0
            self._pieces += prefill > 0
            self._owe(normal, SPEED * expected - (normal if rows else 0.0))
        return PlannedStep(rows, kept, prefill, cells, normal, expected, longest, work)

    def measure(self, step: PlannedStep, seconds: float) -> None:
        """Note how many seconds a step took."""
        beside = step.longest, step.prefill - step.longest
        self.costs.measure(step.rows, step.work, step.cells, seconds, beside)
        if step.kept and step.normal:
            self._owe(step.normal, SPEED * (seconds - step.expected))

    def _owe(self, normal: float, seconds: float) -> None:
        """Add to what is owed, within bounds: neither a lull nor a hiccup counts for long."""
        self._owed = min(max(self._owed, -CREDIT * normal) + seconds, _longest(normal))

    def _best(self, normal: float, cells: int, room: int, *, must_rest: bool) -> int:
        """Return the size of piece that takes least time per token, with the rests that follow.

        `must_rest`: the answers have to catch up after each piece.
        """
        best, least = 0, 0.0
        for size in self._sizes(room):
            piece = self.costs.piece(size, cells)
            if piece is None:
                return min(FIRST, room)
            took = normal + piece
            if best and took > _longest(normal):
                continue
            rest = max(0.0, (SPEED * took - normal) / (1 - SPEED)) if must_rest else 0.0
            each = (took + rest) / size
            if not best or each * TIE < least:
                best, least = size, each
        return self._explored(best, normal, cells, room)

    def _explored(self, size: int, normal: float, cells: int, room: int) -> int:
        """Return a larger size from time to time, if that is not too long.

        That is the next one that was measured in few pieces only, or twice `size`.
        """
        larger, every, longest = 2 * size, EXPLORE, _longest(normal)
        sizes = (size << power for power in range(1, room.bit_length()))
        few = (one for one in sizes if 0 < self.costs.num_samples(one) < FEW)
        if (found := next(few, None)) is not None:
            larger, every, longest = found, EXPLORE // FEW, longest / 2
        is_due = self._pieces % every == every - 1 and larger <= room
        too_long = normal + (self.costs.piece(larger, cells) or 0.0) > longest
        return larger if is_due and not too_long else size

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


def _longest(normal: float) -> float:
    """Return the seconds that a step may take, if one that only decodes takes `normal`."""
    return max(LONGEST * normal, GAP_S)


Priority = Literal["interactive", "batch"]
PRIORITIES: tuple[Priority, ...] = ("interactive", "batch")
"""The priorities of requests, the highest first."""
FAIR = 8
"""One turn in FAIR is shared evenly by all requests."""


@dataclass(frozen=True)
class TokenDemand:
    """The wish of a request for tokens of a step."""

    tokens: int
    """Most tokens that it can use."""
    priority: Priority = "interactive"
    due: float | None = None
    """The moment of its deadline; None: it has time."""
    left: int = 0
    """Tokens of its prompt that are still to evaluate."""

    @property
    def order(self) -> tuple[int, float]:
        """A key that is lower for requests that come earlier."""
        return order(self.priority, self.due)


def order(priority: Priority, due: float | None) -> tuple[int, float]:
    """Return a key that is lower for requests that come earlier; equal ones share evenly."""
    return PRIORITIES.index(priority), float("inf") if due is None else due


def check(priority: Priority, deadline: float | None) -> None:
    """Raise OptionError for a priority that does not exist or a deadline that is not above 0."""
    Option(str, among=PRIORITIES).check("priority", priority)
    if deadline is not None:
        check_above("deadline", deadline, 0)


class FairShare:
    """The turns of a runner's requests."""

    def __init__(self) -> None:
        self._count = 0

    def deal(
        self,
        budget: int,
        wants: Sequence[TokenDemand],
        share: float = 1.0,
        most: int | None = None,
    ) -> list[int]:
        """Return how many tokens each request gets of a step with a `budget` of work.

        `share`: that of `StepCosts`. `most`: tokens of the step; by default the budget.
        """
        self._count += 1
        everyone = list(range(len(wants)))
        given, most = [0] * len(wants), budget if most is None else most
        if self._count % FAIR == 0:
            if share < 1 and wants:
                _level(given, wants, everyone, len(wants), budget, most, share)
            wanted = [one.tokens for one in wants]
            return given if any(given) else deal_evenly(budget, wanted, self._count)
        everyone.sort(key=lambda i: wants[i].order)
        for _, equals in groupby(everyone, key=lambda i: wants[i].order):
            order = sorted(equals, key=lambda i: (wants[i].left, (i - self._count) % len(wants)))
            width = best_width([wants[i].left for i in order if wants[i].left], share)
            if width > 1:
                _level(given, wants, order, width, budget, most, share)
            if width == 1 or not any(given):
                left = budget - _work(sum(given), max(given), share)
                for i in order:
                    given[i] = min(wants[i].tokens, left)
                    left -= given[i]
        return given


def best_width(lefts: Sequence[int], share: float) -> int:
    """Return how many prompts, each with its tokens left, are best evaluated side by side.

    Their answers begin soonest on average if the shortest come first, as many at once, and then the
    next ones. `lefts` ascend. `share`: that of `StepCosts`.
    """
    best, least = 1, math.inf
    if share >= 1:
        return best
    for width in sorted(
        {min(2**power, len(lefts)) for power in range(len(lefts).bit_length() + 1)}
    ):
        begin = waited = 0.0
        for first in range(0, len(lefts), max(width, 1)):
            group, done, end = lefts[first : first + width], 0, begin
            for number, left in enumerate(group):
                end = begin + _work(done + left * (len(group) - number), left, share)
                waited += end
                done += left
            begin = end
        if waited * TIE < least:
            best, least = width, waited
    return best


def _level(
    given: list[int],
    wants: Sequence[TokenDemand],
    order: Sequence[int],
    width: int,
    budget: int,
    most: int,
    share: float,
) -> None:
    """Give the first `width` requests of `order` as many tokens each, and then the next ones."""
    for first in range(0, len(order), width):
        group = order[first : first + width]
        there, longest = sum(given), max(given)
        low, high = 0, max(wants[i].tokens for i in group)
        while low < high:
            level = (low + high + 1) // 2
            pieces = [min(wants[i].tokens, level) for i in group]
            tokens = there + sum(pieces)
            fits = tokens <= most and _work(tokens, max(longest, *pieces), share) <= budget
            low, high = (level, high) if fits else (low, level - 1)
        for i in group:
            given[i] = min(wants[i].tokens, low)


def _work(tokens: int, longest: int, share: float) -> int:
    """Return the cost of pieces with `tokens` in all, in tokens of one prompt."""
    return longest + math.ceil(share * (tokens - longest))


def deal_evenly(budget: int, wants: Sequence[int], first: int) -> list[int]:
    """Return the tokens of a step's `budget` that each of several prefills gets.

    `wants`: the tokens that each has left. They take turns, beginning with number `first`, so that
    none starves.
    """
    given = [0] * len(wants)
    order = [(first + i) % len(wants) for i in range(len(wants))]
    hungry = [i for i in order if wants[i]]
    while budget and hungry:
        each = max(1, budget // len(hungry))
        for i in hungry:
            take = min(each, wants[i] - given[i], budget)
            given[i] += take
            budget -= take
        hungry = [i for i in hungry if given[i] < wants[i]]
    return given


FIRST_PIECE = 64
"""Tokens of the first piece, whose speed is not known yet."""
FEWEST_TOKENS = 8
"""Tokens of the smallest piece."""


class Pace:
    """Sizes pieces so that each takes about `seconds`, and Ctrl-C need not wait longer.

    A forward pass cannot be interrupted, so the size of a piece is the only bound. A pace outlives
    a request: the next one begins with the speed that was measured.
    """

    def __init__(
        self,
        seconds: float,
        *,
        first: int = FIRST_PIECE,
        fewest: int = FEWEST_TOKENS,
        growth: int = 16,
    ) -> None:
        """Begin with `first` tokens. A piece has at least `fewest`, and `growth` times the last."""
        self.seconds = seconds
        self._size, self._fewest, self._growth = first, fewest, growth

    def size(self, most: int) -> int:
        """Return the tokens of the next piece, at most `most`."""
        return min(self._size, most)

    def measure(self, tokens: int, seconds: float) -> None:
        """Note that a piece of `tokens` tokens took `seconds`.

        A piece that was cut short by the end of a prompt says little about a longer one.
        """
        if 2 * tokens >= self._size or seconds > self.seconds:
            fitting = int(tokens * self.seconds / max(seconds, 1e-9))
            self._size = max(self._fewest, min(fitting, self._growth * self._size))
