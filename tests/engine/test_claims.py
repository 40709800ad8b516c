"""Requests claim cells, grow, wait and step back. Each one that begins comes to its end."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from mlxrunner.engine.scheduling.slots import (
    LEAST,
    CellDemand,
    QueuePlace,
    claimed,
    grown,
    steps_back,
)
from mlxrunner.errors import CacheFullError


def test_a_request_that_fits_claims_its_whole_answer() -> None:
    assert claimed(CellDemand(prompt=10, answer=100), free=1000, total=1000, slots=4) == 100


def test_a_long_answer_claims_an_even_share_of_what_is_left() -> None:
    assert claimed(CellDemand(prompt=1000, answer=32000), 9000, 9000, slots=4) == 2000
    assert claimed(CellDemand(prompt=1000, answer=32000), 9000, 9000, slots=1) == 8000


def test_a_claim_is_at_least_256_tokens_or_the_whole_answer() -> None:
    assert claimed(CellDemand(prompt=0, answer=32000), 300, 9000, slots=8) == LEAST
    assert claimed(CellDemand(prompt=0, answer=20), 20, 9000, slots=8) == 20


@pytest.mark.parametrize(
    ("need", "free", "numbers"),
    [
        (CellDemand(100, 50), 149, "needs 150 free cells, but 149 of 200 are free"),
        (CellDemand(100, 9000), 180, "needs 356 free cells, but 180 of 200 are free"),
        (CellDemand(100, 50), -3, "needs 150 free cells, but 0 of 200 are free"),
    ],
    ids=["an answer", "its least part", "nothing is free"],
)
def test_a_request_waits_for_what_it_needs(need: CellDemand, free: int, numbers: str) -> None:
    with pytest.raises(CacheFullError, match=f"{numbers}.*when another request has ended"):
        claimed(need, free, 200, 4)


def test_an_answer_grows_by_an_even_share() -> None:
    assert grown(left=5000, free=4000, running=4) == 1000
    assert grown(left=5000, free=400, running=4) == LEAST
    assert grown(left=5000, free=7, running=4) == 7
    assert grown(left=3, free=4000, running=4) == 3
    assert grown(left=3, free=0, running=4) == grown(left=3, free=-9, running=4) == 0


@pytest.mark.parametrize(
    ("running", "index"),
    [
        ([("interactive", 1), ("interactive", 3), ("interactive", 2)], 1),
        ([("interactive", 1), ("batch", 2), ("interactive", 3)], 1),
        ([("batch", 1), ("batch", 5), ("interactive", 9)], 1),
        ([("batch", 1)], 0),
    ],
)
def test_the_youngest_of_the_lowest_priority_steps_back(
    running: list[tuple[str, int]], index: int
) -> None:
    assert steps_back([QueuePlace(*one) for one in running]) == index


@dataclass(eq=False)
class Simulated:
    """A request whose tokens are counted."""

    arrival: int
    priority: str
    prompt: int
    length: int
    """Tokens of its answer, which nobody knows beforehand."""
    limit: int
    done: int = 0
    """Tokens of prompt and answer in cells."""
    said: int = 0
    claim: int = 0
    """Tokens of prompt and answer that it may have."""
    back: int = 0
    """Times that it stepped back."""


@dataclass
class House:
    """Requests on a number of cells, admitted and stopped as `claims` says."""

    cells: int
    slots: int
    running: list[Simulated] = field(default_factory=list)
    waiting: list[Simulated] = field(default_factory=list)
    """Those that stepped back, which keep their slots."""

    def free(self) -> int:
        return self.cells - sum(max(one.claim, one.done) for one in self.running)

    def admits(self, one: Simulated) -> bool:
        """Return True if a request may begin; it never has to wait for ever."""
        try:
            self.admit(one)
        except CacheFullError:
            return False
        return True

    def admit(self, one: Simulated) -> None:
        if len(self.running) + len(self.waiting) == self.slots:
            raise CacheFullError("this request", 1, 0, self.slots)
        reserved = sum(other.prompt + other.said + LEAST for other in self.waiting)
        self._begin(one, self.free() - reserved)

    def _begin(self, one: Simulated, free: int) -> None:
        prompt = one.prompt + one.said
        need = CellDemand(prompt, one.limit - one.said)
        slots = self.slots - len(self.running) - len(self.waiting)
        one.claim, one.done = prompt + claimed(need, free, self.cells, slots), prompt
        self.running.append(one)

    def step(self) -> None:
        for one in list(self.waiting):
            try:
                self._begin(one, self.free())
            except CacheFullError:
                continue
            self.waiting.remove(one)
        for one in list(self.running):
            if one in self.running:
                self._decode(one)

    def _decode(self, one: Simulated) -> None:
        while one.done == one.claim and one in self.running:
            left = one.limit - one.said
            more = grown(left, self.free(), len(self.running))
            one.claim += more
            if not more:
                standing = [QueuePlace(other.priority, other.arrival) for other in self.running]
                victim = self.running.pop(steps_back(standing))
                victim.claim = victim.done = 0
                victim.back += 1
                self.waiting.append(victim)
        if one not in self.running:
            return
        one.done, one.said = one.done + 1, one.said + 1
        assert sum(other.done for other in self.running) <= self.cells
        if one.said in (one.length, one.limit):
            self.running.remove(one)


@pytest.mark.parametrize("seed", range(20))
def test_each_request_that_begins_ends_and_no_cell_is_used_twice(seed: int) -> None:
    rng = random.Random(seed)
    house, back, ended = House(cells=rng.choice([700, 1500, 4000]), slots=4), 0, 0
    coming = [
        Simulated(
            arrival,
            rng.choice(["interactive", "batch"]),
            prompt := rng.randrange(1, 400),
            rng.randrange(1, 600),
            limit=house.cells - prompt if rng.random() < 0.7 else rng.randrange(1, 300),
        )
        for arrival in range(40)
    ]
    for one in coming:
        for _ in range(100_000):
            if house.admits(one):
                break
            house.step()
    while house.running or house.waiting:
        house.step()
    for one in coming:
        assert one.said == min(one.length, one.limit)
        back, ended = back + one.back, ended + 1
    assert ended == 40
    assert back < 200


def test_requests_do_step_back_where_cells_are_few() -> None:
    house = House(cells=700, slots=2)
    young = Simulated(2, "interactive", 10, 500, 690)
    house.admit(Simulated(1, "interactive", 10, 600, 690))
    house.admit(young)
    while house.running or house.waiting:
        house.step()
    assert young.back == 1
