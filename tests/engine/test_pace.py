"""Answers keep their speed while prompts are evaluated, whatever the costs of a device are."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest

from mlxrunner import Runner
from mlxrunner.engine.scheduling.pacing import (
    CREDIT,
    FEWEST,
    FEWEST_TOKENS,
    FIRST_PIECE,
    LONGEST,
    SPEED,
    FairShare,
    Pace,
    PlannedStep,
    StepCosts,
    StepPace,
    TokenDemand,
)
from mlxrunner.testing import oracle_runner

Cost = Callable[[int, int, int], float]
"""The seconds of a step of some decoding rows and prefill tokens that see some cells."""
DECODE = 0.02
MOST = 1024


def linear(rows: int, prefill: int, cells: int) -> float:
    """A CPU: each token costs the same, whether alone or among many."""
    return (DECODE if rows else 0.0) + prefill * 0.001 * (1 + cells / 1000)


def roofline(rows: int, prefill: int, cells: int) -> float:
    """A GPU that waits for memory while it decodes: few tokens beside cost nothing."""
    return max(DECODE * (rows > 0 or prefill > 0), 0.0002 * prefill)


def stepped(rows: int, prefill: int, cells: int) -> float:
    """A GPU whose small products cost nearly as much as larger ones."""
    return (DECODE if rows else 0.0) + (0.03 + 0.0005 * prefill if prefill else 0.0)


COSTS = {"linear": linear, "roofline": roofline, "stepped": stepped}


@dataclass
class Device:
    """A device that runs the steps of one answer and a prompt, the next before the last is read."""

    cost: Cost
    pace: StepPace
    rng: random.Random | None = None
    gaps: list[float] = field(default_factory=list)
    before: tuple[PlannedStep, float] | None = None

    def step(self, rows: int, wanted: int, cells: int) -> int:
        """Run a step of up to `wanted` prefill tokens; return how many it carried."""
        prefill = min(self.pace.allowance(rows, cells) if wanted else 0, wanted)
        took = self.cost(rows, prefill, cells) * (self.rng.uniform(0.9, 1.1) if self.rng else 1)
        planned = self.pace.plan(rows, prefill, cells)
        if self.before is not None:
            self.pace.measure(*self.before)
        self.before = planned, took
        self.gaps.append(took)
        return prefill

    def evaluate(self, prompt: int, rows: int = 1) -> float:
        """Evaluate a prompt beside `rows` answers and return the seconds that it took."""
        self.gaps, done = [], 0
        while done < prompt:
            done += self.step(rows, prompt - done, done)
            assert len(self.gaps) < 100_000
        return sum(self.gaps)


def alone(cost: Cost, prompt: int) -> float:
    return sum(cost(0, 100, begin) for begin in range(0, prompt, 100))


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("noisy", [False, True], ids=["steady", "noisy"])
def test_an_answer_keeps_its_speed_and_has_no_gap(name: str, noisy: bool) -> None:
    device = Device(COSTS[name], StepPace(MOST), random.Random(1) if noisy else None)
    for _ in range(10):
        device.step(1, 0, 0)
    for _ in range(2):  # what is learnt from one prompt serves the next one
        seconds = device.evaluate(4000)
        assert max(device.gaps) < 5 * DECODE
        assert (len(device.gaps) + CREDIT) * DECODE / seconds > SPEED * 0.97
        assert len(device.gaps) * DECODE / seconds > 0.6


def test_a_device_with_time_to_spare_evaluates_a_prompt_as_fast_as_alone() -> None:
    device = Device(roofline, StepPace(MOST))
    device.evaluate(4000)
    assert device.evaluate(4000) < 1.15 * 4000 * 0.0002


@pytest.mark.parametrize("name", COSTS)
def test_no_fixed_size_of_piece_evaluates_a_prompt_much_sooner(name: str) -> None:
    """Beside an answer that keeps its share; the size is learnt."""
    cost, device = COSTS[name], Device(COSTS[name], StepPace(MOST))
    device.evaluate(4000)

    def fixed(size: int) -> float:
        """Return the seconds of the prompt in pieces of `size`, with the rests that follow."""
        steps = [cost(1, size, begin) for begin in range(0, 4000, size)]
        if max(steps) > LONGEST * DECODE:
            return float("inf")
        rests = max(0.0, (SPEED * sum(steps) - len(steps) * DECODE) / (1 - SPEED))
        return sum(steps) + rests

    assert device.evaluate(4000) < 1.15 * min(map(fixed, (1, 2, 4, 8, 16, 32, 64, 100, 200, 400)))


def test_many_answers_are_compared_with_their_own_steps() -> None:
    """A step of eight rows takes longer, and leaves more time beside it."""

    def cost(rows: int, prefill: int, cells: int) -> float:
        return linear(rows, prefill, 0) + 0.005 * rows

    device = Device(cost, StepPace(MOST))
    one = device.evaluate(4000, rows=1)
    for _ in range(10):
        device.step(8, 0, 0)
    assert device.evaluate(4000, rows=8) < one
    assert max(device.gaps) < 5 * (DECODE + 8 * 0.005)


def test_a_limit_in_milliseconds_is_kept_without_rests() -> None:
    device = Device(linear, StepPace(MOST, max_step_ms=100))
    device.evaluate(4000)
    device.evaluate(4000)
    assert 0.08 < max(device.gaps) < 0.11
    assert sum(gap < 0.05 for gap in device.gaps) < 10


@pytest.mark.parametrize(
    ("most", "limit", "rows", "carried"),
    [(MOST, 1, 1, FEWEST), (MOST, 0, 1, MOST - 1), (MOST, 0, 0, MOST), (8, None, 8, 0)],
    ids=["a limit below a step", "no limit", "no limit and no answer", "a full row"],
)
def test_what_a_step_carries(most: int, limit: float | None, rows: int, carried: int) -> None:
    """A prompt of 4,000 tokens continues beside `rows` answers, whose steps are known."""
    device = Device(linear, StepPace(most, max_step_ms=limit))
    for _ in range(9):
        device.step(rows, 0, 0)
    assert device.step(rows, 4000, 0) == carried


def test_a_step_alone_grows_to_half_a_second() -> None:
    device = Device(linear, StepPace(MOST))
    device.evaluate(9000, rows=0)
    assert max(device.gaps) < 0.6
    assert device.gaps[0] < 0.3


def test_a_prompt_goes_on_after_a_hiccup_of_the_machine() -> None:
    """A step that took a minute is owed for a few steps only."""
    device = Device(linear, StepPace(MOST))
    device.evaluate(1000)
    assert device.before is not None
    device.before = device.before[0], 60.0
    carried = [device.step(1, 4000, 1000) for _ in range(20)]
    assert any(carried)


def test_a_slower_device_is_noticed() -> None:
    """The steps that only decode are measured again while prompts come without end."""
    device = Device(roofline, StepPace(MOST))
    device.evaluate(4000)
    device.cost = lambda rows, prefill, cells: 3 * linear(rows, prefill, 0)
    device.evaluate(3000)
    seconds = device.evaluate(4000)
    assert max(device.gaps) < 5 * 3 * DECODE
    assert len(device.gaps) * 3 * DECODE / seconds > SPEED * 0.97


def test_costs_grow_with_the_cells_that_a_piece_sees() -> None:
    costs = StepCosts()
    assert costs.piece(64, 0) is None
    costs.measure(1, 0, 0, DECODE)
    for cells in range(0, 1000, 100):
        costs.measure(1, 64, cells, linear(1, 64, cells))
    assert costs.decode(1) == DECODE
    assert costs.decode(2) is None
    expected = linear(1, 64, 4000) - DECODE
    assert costs.piece(64, 4000) == pytest.approx(expected)


def test_one_slow_step_changes_no_cost() -> None:
    costs = StepCosts()
    for took in (0.02, 0.02, 9.0, 0.02, 0.02):
        costs.measure(1, 0, 0, took)
    for took in (0.05, 9.0, 0.05):
        costs.measure(1, 30, 0, took)
    assert costs.decode(1) == 0.02
    assert costs.piece(30, 500) == pytest.approx(0.03)


def test_a_slow_first_step_of_answers_makes_no_piece_cheaper() -> None:
    """It may build kernels: then pieces beside it seem to take less than no time."""
    costs = StepCosts()
    for _ in range(3):
        costs.measure(0, 64, 0, 0.064)
    costs.measure(1, 0, 0, 9.0)
    for _ in range(3):
        costs.measure(1, 64, 0, 0.084)
    assert (costs.piece(64, 0) or 0.0) >= 0.0
    for _ in range(40):
        costs.measure(1, 0, 0, 0.02)
        costs.measure(1, 64, 0, 0.084)
    assert costs.piece(64, 0) == pytest.approx(0.064)


def test_noise_of_pieces_that_cost_nothing_makes_no_other_dearer() -> None:
    """A step takes as long with few tokens as without: what they seem to take is noise."""
    costs, rng = StepCosts(), random.Random(0)
    for _ in range(200):
        costs.measure(2, 0, 0, 0.003 * rng.uniform(0.8, 1.2))
        costs.measure(2, 12, 0, 0.003 * rng.uniform(0.8, 1.6))
        if rng.random() < 0.1:
            costs.measure(0, 100, 0, 0.01 * rng.uniform(0.9, 1.1))
    assert costs.piece(100, 0) == pytest.approx(0.01, rel=0.3)


def test_pieces_that_see_less_than_any_before_are_not_taken_for_free() -> None:
    """A line through far histories may fall to nothing before it reaches near ones."""
    costs = StepCosts()
    for cells in (1400, 1600, 1800):
        costs.measure(0, 192, cells, 192 * (cells - 1300) / 1e5)
    assert (costs.piece(192, 0) or 0.0) >= 192 * 100 / 1e5 / 2


@dataclass
class Stacks:
    """A device whose layers run several prompts as one batch; more of them cost a share."""

    share: float
    pace: StepPace = field(default_factory=lambda: StepPace(2048, stacks=True))
    turns: FairShare = field(default_factory=FairShare)
    gaps: list[float] = field(default_factory=list)

    def evaluate(self, prompts: Sequence[int], rows: int = 0) -> list[float]:
        """Evaluate prompts beside `rows` answers; return the seconds until each ended."""
        lefts, ends, now = list(prompts), [0.0] * len(prompts), 0.0
        self.gaps = []
        while any(lefts):
            budget = min(self.pace.allowance(rows, 0, sum(lefts)), 2048 - rows)
            wants = [TokenDemand(left, left=left) for left in lefts if left]
            given = self.turns.deal(budget, wants, self.pace.costs.share, 2048 - rows)
            pieces = iter(given if budget else [0] * len(wants))
            step = [next(pieces) if left else 0 for left in lefts]
            assert sum(step) <= 2048 - rows
            longest = max(step)
            work = longest + self.share * (sum(step) - longest)
            took = DECODE * (rows > 0) + 0.001 * work + 0.0001
            self.pace.measure(self.pace.plan(rows, sum(step), 0, longest=longest), took)
            self.gaps.append(took)
            now += took
            for number, tokens in enumerate(step):
                lefts[number] -= tokens
                if tokens and not lefts[number]:
                    ends[number] = now
        return ends


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 1.0])
def test_prompts_are_evaluated_side_by_side_where_that_is_sooner(share: float) -> None:
    """The share is learnt, and first tokens come about as soon as with the best fixed width."""
    device, prompts, rng = Stacks(share), [800] * 5 + [160] * 5, random.Random(2)
    for _ in range(4):
        device.evaluate([rng.choice([30, 160, 500, 900])])
    for _ in range(4):
        device.evaluate(prompts)
    ends, lefts = device.evaluate(prompts), sorted(prompts)

    def mean(width: int) -> float:
        begin = waited = 0.0
        for first in range(0, len(lefts), width):
            group, end = lefts[first : first + width], begin
            for number, left in enumerate(group):
                tokens = sum(group[:number]) + left * (len(group) - number)
                end = begin + 0.001 * (left + share * (tokens - left))
                waited += end
            begin = end
        return waited / len(lefts)

    assert abs(device.pace.costs.share - share) < 0.15
    assert sum(ends) / len(ends) < 1.2 * min(map(mean, (1, 2, 4, 8, 10)))


@pytest.mark.parametrize("share", [0.02, 0.6])
def test_an_answer_has_no_gap_beside_prompts_of_any_shape(share: float) -> None:
    """One prompt after many, and many after one: none takes the other's cost for its own."""
    device = Stacks(share)
    for _ in range(10):
        device.pace.measure(device.pace.plan(1, 0, 0), DECODE)
    for prompts in ([100], [400], [300] * 8, [900], [64, 900], [200] * 4, [1500]):
        device.evaluate(prompts, rows=1)
        assert max(device.gaps) < 5 * DECODE, prompts


SLOWER = [(FIRST_PIECE, FIRST_PIECE / 1000), (500, 5.0)]
PIECES: dict[str, tuple[list[tuple[int, float]], int, int]] = {
    "the first one": ([], 2048, FIRST_PIECE),
    "a fast device": (SLOWER[:1], 2048, 500),
    "a slower one": (SLOWER, 2048, 50),
    "never more than a step": (SLOWER, 20, 20),
    "one that took no time is no promise": (
        [(FIRST_PIECE, 0.0)],
        2**30,
        16 * FIRST_PIECE,
    ),
    "a slow piece leaves a small one": ([(FIRST_PIECE, 1e6)], 2048, FEWEST_TOKENS),
    "a short last piece says nothing": ([(10, 0.1)], 2048, FIRST_PIECE),
    "unless it took too long already": ([(10, 0.1), (10, 1.0)], 2048, FEWEST_TOKENS),
}


@pytest.mark.parametrize(("measured", "most", "size"), PIECES.values(), ids=PIECES)
@pytest.mark.exhaustive(len(PIECES))
def test_a_piece_takes_half_a_second(
    measured: list[tuple[int, float]], most: int, size: int
) -> None:
    pace = Pace(0.5)
    for tokens, seconds in measured:
        pace.measure(tokens, seconds)
    assert pace.size(most) == size


class Given(Pace):
    """Has the sizes that it is given."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(1.0)
        self.sizes = list(sizes)

    def size(self, most: int) -> int:
        return min(self.sizes[0], most)

    def measure(self, tokens: int, seconds: float) -> None:
        self.sizes = self.sizes[1:] or self.sizes


def steps(runner: Runner, prompt: list[int]) -> tuple[list[int], list[int | None]]:
    """Return where the prefill stood after each piece, and the answer."""
    seen: list[int] = []
    chunks = runner.generate(
        prompt, max_tokens=6, stop_tokens=[], progress=lambda done, total: seen.append(done)
    )
    return seen, [chunk.token for chunk in chunks]


@pytest.mark.parametrize("kinds", [["full"], ["sliding", "full"], ["recurrent", "full"]])
@pytest.mark.parametrize("sizes", [(1,), (3, 7, 1, 30), (100,)])
def test_pieces_change_no_answer(kinds: list[str], sizes: tuple[int, ...]) -> None:
    """The pieces are at most a step, for any size, and Ctrl-C is looked for after each."""
    prompt = [(7 * number) % 250 + 1 for number in range(60)]
    runner = oracle_runner(kinds, prefill_step=10)
    runner.pace = Given(*sizes)
    seen, answer = steps(runner, prompt)
    assert answer == steps(oracle_runner(kinds, prefill_step=10), prompt)[1]
    assert runner.entry.is_true
    lengths = [after - before for before, after in pairwise(seen)]
    assert max(lengths[:-1]) <= min(10, max(sizes))
    assert lengths[0] == min(10, sizes[0])


def test_a_model_whose_answers_depend_on_chunks_has_whole_steps() -> None:
    """Its answer must not depend on the speed of a machine."""
    runner = oracle_runner(prefill_step=10)
    runner.facts = replace(runner.facts, depends_on_chunks="it does")
    runner.pace = Given(1)
    seen, _ = steps(runner, list(range(1, 36)))
    assert seen[:4] == [0, 10, 20, 30]
