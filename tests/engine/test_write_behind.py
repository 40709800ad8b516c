"""Conversations that stay in memory are written to disk, beside whatever runs."""

from __future__ import annotations

import logging
import math
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.engine import Engine, park_in_pieces_of, scheduler
from support.histories import tiny_parts
from support.waiting import until

from mlxrunner import ParallelRunner, Runner
from mlxrunner.cache.disk.disk_cache import FILE, DiskCache
from mlxrunner.cache.entry import TokenBuffer
from mlxrunner.engine.scheduling import eviction
from mlxrunner.engine.scheduling.eviction import IDLE_S, WriteBehind
from mlxrunner.engine.scheduling.pacing import StepPace

from .test_offloading import KINDS, SETTINGS, Talks

PLENTY = 10**9


@pytest.fixture(autouse=True)
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a turn as soon as it has ended, in files of 16 tokens."""
    if "on_a_clock" in request.fixturenames:
        return
    park_in_pieces_of(16, monkeypatch)
    monkeypatch.setattr("mlxrunner.engine.scheduling.eviction.QUIET_S", 0.0)
    monkeypatch.setattr("mlxrunner.engine.scheduling.eviction.BUSY_S", 0.0)
    monkeypatch.setattr("mlxrunner.engine.scheduling.eviction.POLL_S", 0.0)


class FakeDisk:
    """A disk on a clock: the engine copies some arrays, and a thread writes them."""

    daily_bytes, written = PLENTY, 0

    def __init__(self, arrays: int) -> None:
        self.now, self._arrays = 0.0, arrays
        self.saves: list[tuple[float, int, int]] = []
        """The moment of each save, its slot, and its tokens."""

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def saving(self, entry: Any, upto: int, replaces: Any = None) -> Iterator[bool]:
        for _ in range(self._arrays):
            self.now += 0.001
            yield False
        end = self.now + 0.03
        while self.now < end:
            yield True
        self.saves.append((self.now, entry, upto))


class FakeSlots:
    """Slots in which turns end, and how long it took until each was on disk."""

    def __init__(self, count: int, disk: FakeDisk) -> None:
        self._disk, self._ends = disk, list[tuple[float, int, int]]()
        self.slots: list[Any] = [
            SimpleNamespace(
                number=number,
                tokens=TokenBuffer(),
                is_busy=False,
                cache=SimpleNamespace(entry=number, current=number),
                shared_with=len,
            )
            for number in range(count)
        ]
        self.behind = WriteBehind(self.slots, disk)

    def end_turn(self, number: int) -> None:
        slot = self.slots[number]
        slot.tokens.extend([1, 2, 3])
        self._ends.append((self._disk.now, number, len(slot.tokens)))
        self.behind.note(slot)

    def delays(self) -> list[float]:
        return [
            min(
                at - moment
                for at, of, upto in [*self._disk.saves, (math.inf, number, tokens)]
                if of == number and upto >= tokens and at > moment
            )
            for moment, number, tokens in self._ends
        ]


@pytest.fixture
def on_a_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], tuple[FakeDisk, FakeSlots]]:
    """Return a function that makes slots on a clock; each turn has that many arrays to copy."""

    def make(count: int, arrays: int) -> tuple[FakeDisk, FakeSlots]:
        disk = FakeDisk(arrays)
        monkeypatch.setattr(eviction, "time", disk)
        return disk, FakeSlots(count, disk)

    return make


@pytest.mark.parametrize(
    ("slots", "step_s", "arrays"),
    [(16, 0.02, 10), (16, 0.02, 300), (16, 0.3, 300), (64, 0.5, 10), (8, 2.0, 300)],
)
def test_a_turn_is_on_disk_within_10_s_beside_answers_that_have_fallen_behind(
    on_a_clock: Any, slots: int, step_s: float, arrays: int
) -> None:
    """Turns of 1 to 9 s end in all slots all the time, and a save gets what `StepPace` gives it."""
    disk, busy = on_a_clock(slots, arrays)
    pace, rng = StepPace(512), random.Random(slots)
    for _ in range(3):
        pace.measure(pace.plan(slots, 0, 0), step_s)
    pace.spend(slots, 1000.0)
    assert pace.offload_s(slots) == 0.0
    ends = [rng.uniform(0, 9) for _ in range(slots)]
    while disk.now < 80:
        disk.now += step_s
        for number in range(slots):
            if disk.now < 60 and ends[number] < disk.now:
                ends[number] = disk.now + rng.uniform(1, 9)
                busy.end_turn(number)
        if busy.behind.wait_s(is_idle=False) == 0:
            seconds = pace.offload_s(slots, is_late=busy.behind.is_late)
            if seconds:
                busy.behind.go_on(seconds, is_idle=False)
    assert 0.0 < max(busy.delays()) < 10.0


def test_a_turn_is_on_disk_within_2_s_if_nothing_runs(on_a_clock: Any) -> None:
    """Also if several end at once, and others soon after."""
    disk, idle = on_a_clock(8, 30)
    for _ in range(20):
        for number in range(8):
            idle.end_turn(number)
        while (seconds := idle.behind.wait_s(is_idle=True)) is not None:
            disk.now += seconds
            idle.behind.go_on(IDLE_S, is_idle=True)
    assert 0.0 < max(idle.delays()) < 2.0


def test_turns_that_may_go_on_at_once_wait_while_others_are_written(on_a_clock: Any) -> None:
    """A conversation whose tool has just answered is not due, though its first turn is oldest."""
    disk, idle = on_a_clock(2, 1)
    for moment, number in ((0.0, 0), (0.1, 1), (0.55, 0)):
        disk.now = moment
        idle.end_turn(number)
    while (seconds := idle.behind.wait_s(is_idle=True)) is not None:
        disk.now += seconds
        idle.behind.go_on(IDLE_S, is_idle=True)
    assert [number for _, number, _ in disk.saves] == [1, 0]
    assert disk.saves[1][0] >= 0.55 + eviction.QUIET_S


def opened(folder: Path, name: str, daily: int = PLENTY) -> DiskCache:
    return DiskCache(folder, {"model": name}, limit=PLENTY, daily=daily)


def after_a_kill(place: DiskCache, copy: Path, name: str) -> DiskCache:
    """Open what the folder has at this moment, as a process does after a kill."""
    (copy / place.folder.name).mkdir(parents=True)
    for path in place.folder.iterdir():
        with suppress(FileNotFoundError):  # a thread may rename it meanwhile
            shutil.copy2(path, copy / place.folder.name)
    return opened(copy, name)


def most(place: DiskCache, tokens: list[int]) -> int:
    """Return how many of `tokens` a prompt that continues from them finds."""
    found = place._index.find(np.array([*tokens, 1], np.int32))  # from another thread
    return 0 if found is None else found[1]


@pytest.mark.parametrize("name", [*KINDS, "mamba2"])
def test_turns_of_an_idle_runner_survive_a_kill(tmp_path: Path, name: str) -> None:
    """The next turn of each evaluates what is new, and answers as a cold run does."""
    rng, parts = random.Random(name), tiny_parts(name)
    talks = [[rng.randrange(1, 250) for _ in range(70 + number)] for number in range(3)]
    place = opened(tmp_path / "kept", name)
    with ParallelRunner(*parts, max_sequences=3, parking=place, **SETTINGS) as runner:
        for _ in range(2):
            for talk in talks:
                found = runner.complete(talk, max_tokens=6, stop_tokens=[])
                talk.extend([*found.tokens, *(rng.randrange(1, 250) for _ in range(9))])
        until(lambda: all(most(place, talk[:-10]) == len(talk) - 10 for talk in talks))
        other = after_a_kill(place, tmp_path / "copy", name)
    with ParallelRunner(*parts, max_sequences=2, parking=other, **SETTINGS) as runner:
        for talk in talks:
            found = runner.complete(talk, max_tokens=6, stop_tokens=[])
            assert found.usage.cached_tokens == len(talk) - 10
            cold = Runner(*parts, **SETTINGS).complete(talk, max_tokens=6, stop_tokens=[])
            assert found.tokens == cold.tokens


@pytest.fixture
def talks(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Talks]:
    found = Talks(request.param, tmp_path / "parked", daily=PLENTY)
    yield found
    found.close()


def step_until_saved(talks: Talks) -> None:
    """Step until the disk has all that the first conversation has evaluated."""
    tokens, steps = talks.talks[0][:-4], 0
    while most(talks.parking, tokens) < len(tokens):
        talks.runner.step()
        for writer in list(talks.parking._writers.values()):
            writer.wait()
        steps += 1
        assert steps < 400


@pytest.mark.parametrize("talks", KINDS, indirect=True)
def test_a_turn_is_written_between_the_steps_of_others(talks: Talks, tmp_path: Path) -> None:
    """Also while its slot continues with the next turn, whose request is not disturbed."""
    answer = talks.begin_answer()
    talks.say(0)
    step_until_saved(talks)
    for _ in range(2):  # one turn after the other
        talks.say(0)  # compares it with a cold run
    step_until_saved(talks)
    assert not answer.finished
    tokens = talks.talks[0][:-4]
    other = after_a_kill(talks.parking, tmp_path / "copy", talks.name)
    assert most(other, tokens) == len(tokens)
    other.close()
    assert talks.say(0).cached_tokens == len(tokens)


def test_a_turn_that_waits_for_long_is_written_at_any_pace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers that have fallen behind leave no time for it before that."""
    monkeypatch.setattr(StepPace, "offload_s", lambda *_, is_late: 1e-9 * is_late)
    talks = Talks("llama", tmp_path / "parked", daily=PLENTY)
    talks.begin_answer()
    talks.say(0)
    for _ in range(20):
        talks.runner.step()
    assert talks.parking.written == 0
    monkeypatch.setattr("mlxrunner.engine.scheduling.eviction.LATE_S", 0.0)
    step_until_saved(talks)
    talks.close()


def test_a_slot_that_is_given_up_meanwhile_leaves_no_wrong_file(tmp_path: Path) -> None:
    """Saves are cut short at any piece by other conversations; what is found is right."""
    talks = Talks("qwen3_next", tmp_path / "parked", daily=PLENTY)
    rng = random.Random(3)
    talks.begin_answer()
    for _ in range(12):
        number = rng.randrange(2)
        if rng.random() < 0.3:  # another answer to the last message
            talks.talks[number] = talks.talks[number][: LONG_ENOUGH + rng.randrange(9)]
        talks.say(number)  # compares it with a cold run
        for _ in range(rng.randrange(9)):
            talks.runner.step()
    talks.close()
    found = opened(tmp_path / "parked", "qwen3_next")
    there = [path for path in found.folder.iterdir() if FILE.fullmatch(path.name)]
    assert found.bytes == sum(path.stat().st_size for path in there)


LONG_ENOUGH = 60


def test_bytes_a_day_bound_what_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says so. What has to leave memory is written nevertheless."""
    place = opened(tmp_path, "llama", daily=1)
    with (
        caplog.at_level(logging.WARNING),
        ParallelRunner(*tiny_parts("llama"), max_sequences=1, parking=place, **SETTINGS) as runner,
    ):
        runner.complete([5] * 50, max_tokens=3, stop_tokens=[])
        until(lambda: most(place, [5] * 50) == 50)
        written = place.written
        runner.complete([6] * 50, max_tokens=3, stop_tokens=[])
        runner.complete([7] * 50, max_tokens=3, stop_tokens=[])
        until(lambda: "1 bytes a day are the most (disk_write_bytes)" in caplog.text)
        place.settle()  # the engine is idle
        assert most(place, [6] * 50) == 50
        assert most(place, [7] * 50) == 0
        assert place.written > written
    assert caplog.text.count("a crash would lose their last turns") == 1


@pytest.mark.parametrize("settings", [{"daily": 0}, {"folder": None}], ids=["none", "private"])
def test_nothing_is_written_behind(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Without bytes a day, and into a folder that goes with the process."""
    given = {"folder": tmp_path, "daily": PLENTY, **settings}
    place = DiskCache(given["folder"], {"model": "llama"}, limit=PLENTY, daily=given["daily"])
    parts = tiny_parts("llama")
    with Engine(*parts, max_sequences=2, parking=place, max_step_ms=None, **SETTINGS) as engine:
        engine.complete([5] * 50, max_tokens=3, stop_tokens=[])
        assert engine.save_in_s is None
        assert not scheduler(engine).offload_tasks.is_any
        assert place.bytes == 0
