"""Long conversations are parked and come back in pieces, while answers continue."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from support.engine import (
    Engine,
    EngineHandle,
    backend,
    claim_least,
    park_in_pieces_of,
    request_of,
    scheduler,
)
from support.histories import CheckedHistory, tiny_parts
from support.histories import parts as parts_of

from mlxrunner import Runner
from mlxrunner.cache.disk.disk_cache import DiskCache
from mlxrunner.engine.scheduling.allocation import Slot
from mlxrunner.results import Usage

SETTINGS: dict[str, Any] = {"context": 1000, "prefill_step": 64, "checkpoint_budget": 10**6}
KINDS = ["llama", "gemma3_text", "qwen3_next", "deepseek_v3"]
LONG = 120


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a file have 16 tokens, and a step do one piece of what parks and restores."""
    park_in_pieces_of(16, monkeypatch)


class Talks:
    """Two slots, of which one answers for long; two long conversations take turns in the other."""

    def __init__(self, name: str, folder: Path, *, daily: int = 0, **settings: Any) -> None:
        self.name, self.parts, rng = name, tiny_parts(name), random.Random(1)
        self.talks = [[rng.randrange(1, 250) for _ in range(LONG)] for _ in range(2)]
        self.parking = DiskCache(folder, {"model": name}, limit=10**9, daily=daily)
        self.runner = Engine(
            *self.parts,
            max_sequences=2,
            parking=self.parking,
            max_step_ms=None,
            **{**SETTINGS, **settings},
        )

    def close(self) -> None:
        self.runner.close()

    def submit(self, number: int) -> EngineHandle:
        return self.runner.submit(self.talks[number], max_tokens=6, stop_tokens=[])

    def say(self, number: int) -> Usage:
        """Run a turn of a conversation to its end, and compare it with a cold one."""
        handle, talk = self.submit(number), self.talks[number]
        found = handle.result()
        assert found.tokens == cold(self.name, tuple(talk))
        self.talks[number] = [*talk, *found.tokens, 7, 8, 9]
        return found.usage

    def begin_answer(self, **options: Any) -> EngineHandle:
        """Begin the long answer, and read its first tokens."""
        answer = self.runner.submit([3, 4, 5], max_tokens=900, stop_tokens=[], **options)
        seen = 0
        while seen < 4:
            self.runner.step()
            seen += len(answer.poll())
        return answer


@cache
def cold(name: str, talk: tuple[int, ...]) -> list[int]:
    """Return what a new runner answers. The tests have the same conversations."""
    runner = Runner(*tiny_parts(name), **SETTINGS)
    return runner.complete([*talk], max_tokens=6, stop_tokens=[]).tokens


@pytest.fixture(params=KINDS)
def talks(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Talks]:
    found = Talks(request.param, tmp_path / "parked")
    yield found
    found.close()


def has_task(handle: EngineHandle) -> bool:
    return request_of(handle).offload_task is not None


@pytest.mark.exhaustive(0)
def test_an_answer_goes_on_while_conversations_are_parked_and_come_back(talks: Talks) -> None:
    """A conversation takes as many steps as it has pieces, and each is one of the answer, too.

    Guesses would let a step of the answer have several tokens, and how many depends on time.
    """
    answer = talks.begin_answer(speculate="off")
    said = []
    for number in (0, 1, 0, 1):
        before, handle, steps = request_of(answer).sampled, talks.submit(number), 0
        while has_task(handle) or not request_of(handle).is_placed:
            talks.runner.step()
            steps += 1
        said.append((steps, request_of(answer).sampled - before))
        handle.cancel()
        talks.say(number)
    assert not answer.finished
    assert all(tokens >= steps - 2 for steps, tokens in said)
    if backend(talks.runner).groups:
        assert said[1][0] > LONG // 16  # parked the other one
        assert said[2][0] > LONG // 16  # came back


def test_what_comes_back_is_reused(talks: Talks) -> None:
    for number in (0, 1):
        talks.say(number)
    talks.begin_answer()
    for number in (0, 1, 0):
        known = len(talks.talks[number]) - 4  # the last token of an answer is not evaluated
        assert talks.say(number).cached_tokens == known
    assert talks.runner.parked_bytes > 0


def test_a_damaged_file_ends_the_return_and_the_prompt_is_evaluated(talks: Talks) -> None:
    talks.begin_answer()
    for number in (0, 1):
        talks.say(number)
    talks.parking.settle()
    for file in talks.parking.folder.iterdir():
        file.write_bytes(file.read_bytes()[:-40] + b"x" * 40)
    talks.say(0)


def watch_what_makes_room(runner: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the tokens that have to be written when a conversation is given up."""
    residents, lacking = scheduler(runner).residents, list[int]()
    give_up = residents.give_up

    def watched(slot: Slot, *more: Any) -> None:
        if slot.tokens:
            lacking.append(residents.parking.lacks(slot.tokens.array))
        give_up(slot, *more)

    monkeypatch.setattr(residents, "give_up", watched)
    return lacking


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_what_makes_room_for_a_growing_answer_is_parked_before(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In as many steps as it has pieces, while the answer continues; nothing is written at once."""
    talks = Talks(name, tmp_path / "parked", kv_cache_tokens=220, context=220)
    talks.say(0)
    lacking = watch_what_makes_room(talks.runner, monkeypatch)
    answer = talks.runner.submit([3, 4, 5], max_tokens=200, stop_tokens=[])
    steps = 0
    while not answer.finished:
        talks.runner.step()
        steps += scheduler(talks.runner).offload_tasks._ahead is not None
    assert steps > LONG // 16
    assert len(lacking) == 1
    assert lacking[0] <= 16
    known = len(talks.talks[0]) - 4
    assert talks.say(0).cached_tokens == known
    talks.close()


def test_a_request_that_steps_back_is_parked_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives its cells up when they are needed, and continues from the disk."""
    claim_least(8, 60, monkeypatch)
    talks = Talks("llama", tmp_path / "parked", kv_cache_tokens=200, context=200)
    lacking = watch_what_makes_room(talks.runner, monkeypatch)
    prompts = [talk[:60] for talk in talks.talks]
    handles = [talks.runner.submit(one, max_tokens=130, stop_tokens=[]) for one in prompts]
    rested = 0
    while not all(handle.finished for handle in handles):
        talks.runner.step()
        rested += request_of(handles[1]).slot.rests
    assert rested > 60 // 16
    assert lacking
    assert all(count <= 16 for count in lacking)
    for prompt, handle in zip(prompts, handles, strict=True):
        expected = Runner(*talks.parts, **SETTINGS).complete(prompt, max_tokens=130, stop_tokens=[])
        assert handle.result().tokens == expected.tokens
    talks.close()


def test_a_parking_that_another_one_overtakes_leaves_its_files(talks: Talks) -> None:
    """A conversation that is parked at once, while it is parked in pieces, is found again."""
    talks.say(0)
    slot = next(slot for slot in talks.runner.slots if slot.tokens)
    work = scheduler(talks.runner).residents.parking_ahead(slot)
    for _ in range(3):
        next(work)
    parked = talks.parking.offload(slot.cache.current)
    talks.parking.settle()
    work.close()
    assert parked in talks.parking
    assert (talks.parking.folder / parked.name).exists()
    for piece in parked.pieces:
        assert (talks.parking.folder / piece).exists()


@pytest.mark.usefixtures("proved_once")
@pytest.mark.exhaustive(2)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next"])
def test_any_history_in_pieces_gives_the_answers_of_cold_single_runs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few cells, cancels, interrupts, errors and restarts while pieces are moved."""
    park_in_pieces_of(4, monkeypatch)
    seen = Counter[str]()
    wanted = "answered parked restored cancelled interrupted restarted".split()
    for seed in range(40):
        one = PiecesHistory(parts_of(name, 33 if name == "gemma3_text" else 0), random.Random(seed))
        one.run(60)
        seen += one.seen
        if seed and all(seen[what] for what in wanted):
            break
    assert all(seen[what] for what in wanted), seen


class PiecesHistory(CheckedHistory):
    """A history on a runner that parks and restores in pieces."""

    weights = (8.0, 12.0, 1.0, 0.5, 0.5, 0.3, 0.3)
    failures = KeyboardInterrupt, RuntimeError

    def open(self, fewest: int = 1) -> None:
        super().open(fewest)
        self.runner.close()
        self._disk = self._disk or TemporaryDirectory()
        self._settings["max_step_ms"] = None
        self.runner = self._opened()
