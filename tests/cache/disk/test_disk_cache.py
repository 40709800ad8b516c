"""A conversation that comes back from the disk goes on as if it had never left."""

from __future__ import annotations

import os
import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.histories import tiny_parts
from support.models import ARCHITECTURES
from support.prompts import PROMPT
from support.reused import (
    CHECKPOINTS,
    each_kind_and_all,
    next_prompts,
    with_and_without_checkpoints,
)
from support.sample import fewer

from mlxrunner import Runner
from mlxrunner.cache.disk.disk_cache import DiskCache
from mlxrunner.cache.disk.index import StoredConversation
from mlxrunner.testing import oracle_runner

from .conftest import Desk, Make, answer, offloaded, some


def array(tokens: list[int]) -> Any:
    return np.array(tokens, np.int32)


def files(parking: DiskCache, kind: str = "") -> list[str]:
    """Return the names of the files whose names begin with `kind`."""
    return sorted(name for name in os.listdir(parking.folder) if name.startswith(kind))


def parked(parking: DiskCache, runner: Runner, **options: Any) -> StoredConversation:
    """Park the entry of a runner, which has to succeed."""
    found = offloaded(parking, runner.entry, **options)
    assert found is not None
    return found


def tokens(runner: Runner, prompt: list[int], count: int = 6) -> list[int | None]:
    """Return the tokens of an answer."""
    return [token for token, _ in answer(runner, prompt, count)[0]]


@with_and_without_checkpoints
@each_kind_and_all
def test_every_kind_of_layer_comes_back(
    make_parking: Make, kinds: list[str], options: dict[str, int]
) -> None:
    """Answers equal a cold run's, and as many tokens are reused as by an entry that stayed."""
    runner = oracle_runner(kinds, **options)
    answer(runner, PROMPT)
    answer(runner, [*PROMPT[:-3], 40, 41], 20)
    said = list(runner.entry.tokens)
    offloaded(make_parking(), runner.entry)
    for what, prompt in next_prompts(said).items():
        restored = oracle_runner(kinds, **options)
        parking = make_parking()
        assert len(parking) == 1
        found = parking.find(array(prompt))
        if found is not None:
            entry = parking.restore(*found)
            restored.cache.adopt(entry, "the disk")
        there, usage = answer(restored, prompt)
        assert there == answer(oracle_runner(kinds, **options), prompt)[0], what
        assert usage.cached_tokens == (found[1] if found is not None else 0), what
        assert restored.entry.is_true
        stayed = oracle_runner(kinds, **options)
        whole = parking.restore(next(iter(parking._index)))
        stayed.cache.adopt(whole, "the disk")
        assert answer(stayed, prompt)[1].cached_tokens == usage.cached_tokens, what


parts = cache(tiny_parts)


def tiny_runner(name: str, **options: Any) -> Runner:
    return Runner(*parts(name), context=400, prefill_step=16, **{**CHECKPOINTS, **options})


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.exhaustive(4)
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
    assert desk.parking.bytes == sum(
        (desk.parking.folder / name).stat().st_size for name in files(desk.parking)
    )


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "deepseek_v3", "mamba2"])
def test_a_conversation_in_rotation_evaluates_only_what_is_new(
    make_parking: Make, name: str
) -> None:
    """Each of six conversations that take turns finds all it said before."""
    rng = random.Random(0)
    desk = Desk(tiny_runner(name), make_parking())
    talks = [some(rng, 20 + number) for number in range(6)]
    for turn in range(3):
        for number, talk in enumerate(talks):
            said, usage = desk.ask(talk, 5)
            before = len(talk) - 4 - 1 if turn else 0
            assert usage.cached_tokens == before
            new = [token for token, _ in said if token is not None]
            talks[number] = [*talk, *new, *some(rng, 4)]
    assert desk.restored == 12


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
        other = tiny_runner("llama")
        found = parking.find(array([*prompt, 1]))
        assert found is not None
        assert found[1] == len(prompt)
        entry = parking.restore(*found)
        other.cache.adopt(entry)
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
    """A last file of a few tokens is written anew together with the next ones."""
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


def test_the_same_entry_is_parked_once(make_parking: Make) -> None:
    runner, parking = tiny_runner("llama"), make_parking()
    runner.evaluate(list(range(1, 50)))
    first = parked(parking, runner)
    times = {name: (parking.folder / name).stat().st_mtime_ns for name in files(parking)}
    assert offloaded(parking, runner.entry, replaces=first) is first
    assert {name: (parking.folder / name).stat().st_mtime_ns for name in files(parking)} == times


def test_an_empty_entry_is_not_parked(make_parking: Make) -> None:
    assert offloaded(make_parking(), tiny_runner("llama").entry) is None


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
