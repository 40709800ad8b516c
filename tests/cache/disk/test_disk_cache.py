"""A conversation that comes back from the disk continues as if it had never left."""

from __future__ import annotations

import os
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.histories import tiny_parts
from support.models import ARCHITECTURES
from support.reused import (
    CHECKPOINTS,
)
from support.sample import fewer

from mlxrunner import Runner
from mlxrunner.cache.disk.disk_cache import DiskCache
from mlxrunner.cache.disk.index import StoredConversation

from .conftest import Desk, Make, answer, array, offloaded, on_disk, some


def files(parking: DiskCache, kind: str = "") -> list[str]:
    return sorted(name for name in os.listdir(parking.folder) if name.startswith(kind))


def parked(parking: DiskCache, runner: Runner, **options: Any) -> StoredConversation:
    """Park the entry of a runner, which has to succeed."""
    found = offloaded(parking, runner.entry, **options)
    assert found is not None
    return found


def tokens(runner: Runner, prompt: list[int], count: int = 6) -> list[int | None]:
    return [token for token, _ in answer(runner, prompt, count)[0]]


parts = cache(tiny_parts)


def tiny_runner(name: str, **options: Any) -> Runner:
    return Runner(*parts(name), context=400, prefill_step=16, **{**CHECKPOINTS, **options})


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.exhaustive(0)
def test_random_histories_equal_cold_runs(make_parking: Make, name: str) -> None:
    """Turns, edits, forks and restarts of many conversations through one entry: same tokens."""
    rng = random.Random(name)
    desk = Desk(tiny_runner(name), make_parking())
    header, talks = some(rng, 30), [[]]
    for _ in range(fewer(25, 15)):
        kind = rng.choice(["turn", "turn", "turn", "edit", "fork", "new", "restart"])
        talk = rng.choice(talks)
        if kind == "restart":
            desk.parking.close()
            desk = Desk(tiny_runner(name), make_parking())
        elif kind == "new":
            talk = header[: rng.choice([1, 20, 30])]
        elif kind == "edit":
            talk = talk[: rng.randint(0, len(talk))]
        elif kind == "fork":
            talk = list(talk)
        prompt = [*talk, *some(rng, rng.choice([1, 5, 40]))][:300]
        said, usage = desk.ask(prompt, rng.choice([1, 8]))
        assert [token for token, _ in said] == tokens(tiny_runner(name), prompt, len(said))
        assert usage.cached_tokens <= len(prompt) - 1
        if kind in ("turn", "edit") and talk in talks:
            talks.remove(talk)
        talks.append([*prompt, *(token for token, _ in said if token is not None)])
    assert desk.parking.bytes == on_disk(desk.parking)


def test_a_turn_writes_its_own_rows_only(make_parking: Make) -> None:
    """A turn of 20 tokens writes the same rows behind 40 tokens and behind 300."""
    rng = random.Random(0)
    runner, parking = tiny_runner("qwen3"), make_parking()
    row = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head_dim, bytes
    talk = some(rng, 40)
    before: set[str] = set()
    earlier = None
    written = []
    while len(talk) < 340:
        runner.evaluate(talk)
        earlier = parked(parking, runner, replaces=earlier)
        new = set(files(parking, "rows")) - before
        rows = sum((parking.folder / name).stat().st_size for name in new)
        head = (parking.folder / earlier.name).stat().st_size
        assert head < 4 * len(talk) + 4096
        written.append(rows)
        before = set(files(parking, "rows"))
        talk = [*talk, *some(rng, 20)]
    assert all(20 * row <= nbytes <= 24 * row + 2 * 2000 for nbytes in written[1:])
    assert len(parking) == 1


def test_states_are_written_once(make_parking: Make) -> None:
    """A checkpoint stays in its file while its conversation grows."""
    runner, parking = tiny_runner("qwen3_next"), make_parking()
    talk = list(range(1, 60))
    runner.evaluate(talk)
    first = parked(parking, runner)
    times = {name: (parking.folder / name).stat().st_mtime_ns for name in files(parking, "state")}
    runner.evaluate([*talk, *range(60, 80)])
    second = parked(parking, runner, replaces=first)
    kept = set(second.pieces) & set(times)
    assert kept
    for name in kept:
        assert (parking.folder / name).stat().st_mtime_ns == times[name]


def test_forty_conversations_store_their_header_once(make_parking: Make) -> None:
    """Each one adds its own tokens; the header goes with the last of them."""
    rng = random.Random(0)
    runner, parking = tiny_runner("llama"), make_parking()
    header = some(rng, 160)
    runner.evaluate(header)
    only = parked(parking, runner)
    alone = parking.bytes
    found = []
    for _ in range(40):
        runner.evaluate([*header, *some(rng, 6)])
        found.append(parked(parking, runner))
    own = (parking.bytes - alone) / 40
    assert own < alone / 8
    parking.drop(only)
    for one in found[:-1]:
        parking.drop(one)
    assert parking.bytes < alone + 2 * own
    entry = parking.restore(found[-1])
    other = tiny_runner("llama")
    other.cache.adopt(entry)
    assert list(other.entry.tokens) == list(found[-1].tokens)
    parking.drop(found[-1])
    assert files(parking) == []
    assert parking.bytes == 0


def test_a_rewound_conversation_keeps_the_rows_before_the_edit(make_parking: Make) -> None:
    """The files before the edit stay, the one with the edit is used up to there."""
    rng = random.Random(0)
    runner, parking = tiny_runner("llama"), make_parking()
    talk = some(rng, 100)
    runner.evaluate(talk)
    first = parked(parking, runner)
    edited = [*talk[:57], *some(rng, 20)]
    runner.evaluate(edited)
    second = parked(parking, runner, replaces=first)
    assert [piece.name for piece in second.rows[:4]] == [piece.name for piece in first.rows[:4]]
    assert second.rows[4].begin == 57
    assert first in parking  # a branch: most of its end is in no other
    for prompt in (edited, talk):
        found = parking.find(array([*prompt, 1]))
        assert found is not None
        assert found[1] == len(prompt)
        other = tiny_runner("llama")
        other.cache.adopt(parking.restore(*found))
        assert tokens(other, [*prompt, 1]) == tokens(tiny_runner("llama"), [*prompt, 1])


def test_a_regenerated_answer_replaces_the_old_one(make_parking: Make) -> None:
    """A tail of a few tokens is no branch."""
    runner, parking = tiny_runner("llama"), make_parking()
    runner.evaluate(list(range(1, 50)))
    first = parked(parking, runner)
    runner.evaluate([*range(1, 47), 99, 98])
    second = parked(parking, runner, replaces=first)
    assert list(parking._index) == [second]


def test_short_conversations_with_a_header_in_common_are_kept(make_parking: Make) -> None:
    """Each is whole in no other one, however few tokens it has of its own."""
    runner, parking = tiny_runner("llama"), make_parking()
    talks = [[*range(1, 20), *[name] * own] for own in (5, 30) for name in (50, 60, 70)]
    for talk in talks:
        runner.evaluate(talk)
        parked(parking, runner)
    found = [parking.find(array([*talk, 1])) for talk in talks]
    assert [place[1] if place else 0 for place in found] == [len(talk) for talk in talks]


def test_many_short_turns_make_few_files(make_parking: Make) -> None:
    """A last file of a few tokens is written again together with the next ones."""
    runner, parking = tiny_runner("llama"), make_parking()
    earlier = None
    for count in range(1, 101):
        runner.evaluate(list(range(1, count + 1)))
        earlier = parked(parking, runner, replaces=earlier)
    assert len(files(parking, "rows")) <= 100 // 4 + 1
    assert list(parking._index) == [earlier]


def test_only_the_rows_before_the_cut_are_read(make_parking: Make) -> None:
    """A prompt that shares 20 of 200 tokens is served though all files behind are damaged."""
    runner, parking = tiny_runner("llama"), make_parking()
    talk = list(range(1, 201))
    runner.evaluate(talk)
    one = parked(parking, runner)
    for piece in one.rows[2:]:
        (parking.folder / piece.name).write_bytes(b"")
    entry = parking.restore(one, 20)
    other = tiny_runner("llama")
    other.cache.adopt(entry)
    assert answer(other, [*talk[:20], 9])[1].cached_tokens == 20
    assert one in parking


def test_the_same_entry_is_parked_once_and_an_empty_one_never(make_parking: Make) -> None:
    runner, parking = tiny_runner("llama"), make_parking()
    assert offloaded(parking, runner.entry) is None
    runner.evaluate(list(range(1, 50)))
    first = parked(parking, runner)
    times = {name: (parking.folder / name).stat().st_mtime_ns for name in files(parking)}
    assert offloaded(parking, runner.entry, replaces=first) is first
    assert {name: (parking.folder / name).stat().st_mtime_ns for name in files(parking)} == times


def test_shifted_rows_are_nobody_elses(make_parking: Make) -> None:
    """An entry whose tokens moved comes back as it was, and shares no file with equal tokens."""
    runner, parking = tiny_runner("llama"), make_parking()
    same = [7] * 390
    runner.evaluate(same)
    exact = parked(parking, runner)
    list(runner.generate(same, max_tokens=40, stop_tokens=[], overflow="shift", keep=4))
    assert runner.entry.is_shifted
    shifted = parked(parking, runner, replaces=exact)
    assert not set(shifted.pieces) & set(exact.pieces)
    said = list(runner.entry.tokens)
    parking = make_parking()
    found = parking.find(array([*said, 3]))
    assert found is not None
    assert found[1] == len(said)
    entry = parking.restore(*found)
    other = tiny_runner("llama")
    other.cache.adopt(entry)
    assert other.entry.is_shifted
    assert answer(other, [*said, 3], 3)[0] == answer(runner, [*said, 3], 3)[0]


def test_other_weights_or_settings_find_nothing(tmp_path: Path) -> None:
    """Each model has a folder of its own."""
    runner = tiny_runner("llama")
    runner.evaluate(list(range(1, 50)))
    for part in ("one", "another", "one"):
        parking = DiskCache(tmp_path, {"weights": part}, limit=10**9)
        found = parking.find(array(list(range(1, 60))))
        assert (found is not None) == (part == "one" and len(os.listdir(tmp_path)) == 2)
        offloaded(parking, runner.entry)
        parking.close()
    assert len(os.listdir(tmp_path)) == 2
