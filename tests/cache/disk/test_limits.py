"""The files take no more than the limit, and belong to one process at a time."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from support.sample import fewer

from mlxrunner.cache.disk.disk_cache import DiskCache, announce_end
from mlxrunner.cache.disk.index import StoredConversation
from mlxrunner.errors import SessionError
from mlxrunner.testing import oracle_runner

from .conftest import PARTS, PLENTY, Desk, Make, answer, offloaded, on_disk, some


def parked(parking: DiskCache, first: int, count: int) -> StoredConversation | None:
    """Park a conversation of `count` tokens that shares nothing with one that begins otherwise."""
    runner = oracle_runner()
    runner.evaluate([first] * count)
    return offloaded(parking, runner.entry)


def sizes_of(make_parking: Make, counts: list[int]) -> list[int]:
    """Return the bytes of conversations of these lengths that share nothing."""
    parking, sizes = make_parking(), [0]
    for number, count in enumerate(counts):
        parked(parking, number + 1, count)
        sizes.append(parking.bytes)
    for one in list(parking._index):
        parking.drop(one)
    return [b - a for a, b in pairwise(sizes)]


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("kinds", [["full", "full"], ["full", "sliding", "recurrent"]])
def test_the_disk_holds_no_more_than_the_limit(make_parking: Make, kinds: list[str]) -> None:
    """Through turns, forks and edits of many conversations; answers stay right."""
    rng, given_up = random.Random(0), list[StoredConversation]()
    options = {"rewind_slack": 2, "checkpoint_interval": 12, "checkpoint_budget": 4000}
    parking = make_parking(limit=40_000)
    parking.tell(lambda one, by: given_up.append(one))
    desk = Desk(oracle_runner(kinds, **options), parking)
    talks, most = [some(rng, 30)], 0
    for _ in range(fewer(60, 40)):
        base = rng.choice(talks)
        prompt = [*base[: rng.choice([len(base), len(base), 20])], *some(rng, rng.randint(1, 30))]
        said, _ = desk.ask(prompt)
        assert said == answer(oracle_runner(kinds, **options), prompt)[0]
        talks.append([*prompt, *(token for token, _ in said if token is not None)])
        assert on_disk(parking) == parking.bytes <= parking.limit
        most = max(most, len(parking))
    assert given_up
    assert most > 2
    assert not any(one in parking for one in given_up)


def test_the_cheapest_to_evaluate_again_goes_first(make_parking: Make) -> None:
    """The conversation with less work per byte goes, though it was used last."""
    sizes = sizes_of(make_parking, [400, 30, 200])
    given_up: list[StoredConversation] = []
    parking = make_parking(limit=sum(sizes))
    parking.tell(lambda one, by: given_up.append(one))
    for number, count in enumerate([400, 30, 200, 20]):
        parked(parking, number + 1, count)
    assert [len(one.tokens) for one in given_up] == [30]


def test_what_was_never_used_again_goes_at_some_time(make_parking: Make) -> None:
    """New conversations, each worth less, push the old one out in the end."""
    sizes = sizes_of(make_parking, [300, 60])
    given_up: list[StoredConversation] = []
    parking = make_parking(limit=sizes[0] + 2 * sizes[1] + 100)
    parking.tell(lambda one, by: given_up.append(one))
    for number in range(60):
        parked(parking, number + 1, 60 if number else 300)
    lengths = [len(one.tokens) for one in given_up]
    assert 300 in lengths
    assert lengths[:2] == [60, 60]


def test_a_conversation_beyond_the_limit_costs_no_other(
    make_parking: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not parked, and one line says so."""
    parking = make_parking(limit=15_000)
    small = parked(parking, 1, 30)
    assert parked(parking, 2, 2000) is None
    assert small in parking
    assert "of at most 15,000 bytes" in caplog.text


def test_a_conversation_that_is_being_read_is_not_given_up(make_parking: Make) -> None:
    """It stays until its reader is gone, though it is worth least."""
    sizes = sizes_of(make_parking, [30, 300])
    parking = make_parking(limit=sum(sizes) + 100)
    small = parked(parking, 1, 30)
    assert small is not None
    parked(parking, 2, 300)
    reader = parking.restore(small)
    parked(parking, 3, 200)
    assert small in parking
    other = oracle_runner()
    other.cache.adopt(reader)
    assert list(other.entry.tokens) == [1] * 30
    del reader
    gc.collect()
    parked(parking, 4, 300)
    assert small not in parking


def test_a_smaller_limit_holds_at_the_next_start(make_parking: Make) -> None:
    parking = make_parking()
    for number in range(5):
        parked(parking, number + 1, 50)
    half = parking.bytes // 2
    parking = make_parking(limit=half)
    assert 0 < parking.bytes <= half
    assert on_disk(parking) == parking.bytes


def test_a_second_process_parks_elsewhere(
    make_parking: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so in a line; its folder goes with it, and the first one's stays as it is."""
    first = make_parking()
    parked(first, 1, 30)
    second = DiskCache(first.folder.parent, PARTS, limit=PLENTY)
    assert second.folder != first.folder
    assert (first.is_kept, second.is_kept) == (True, False)
    assert len(second) == 0
    assert "another process uses the disk cache" in caplog.text
    parked(second, 1, 30)
    folder = second.folder
    assert os.listdir(folder)
    second.close()
    assert not folder.exists()
    assert on_disk(first) == first.bytes > 0


def test_a_process_waits_for_one_that_is_ending(
    make_parking: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so, and finds what the other one has written. A third one does not wait for it."""
    first, runner = make_parking(), oracle_runner()
    announce_end(first.folder)
    runner.evaluate([1] * 30)

    def end() -> None:
        while "waiting for it" not in caplog.text:
            time.sleep(0.01)
        first.close()

    first.offload(runner.entry)
    ending = threading.Thread(target=end)
    ending.start()
    second = DiskCache(first.folder.parent, PARTS, limit=PLENTY)
    ending.join()
    assert (second.is_kept, len(second)) == (True, 1)
    assert not DiskCache(first.folder.parent, PARTS, limit=PLENTY).is_kept


def test_a_private_folder_goes_with_its_owner() -> None:
    """It is removed when the parking is dropped; one of a killed process when another begins."""
    first = DiskCache(None, PARTS, limit=PLENTY)
    one = parked(first, 1, 30)
    folder = first.folder
    assert folder.stat().st_mode & 0o777 == 0o700
    abandoned = folder.with_name("own-abandoned")
    abandoned.mkdir(0o700)
    (abandoned / "rows-x").write_bytes(b"x")
    second = DiskCache(None, PARTS, limit=PLENTY)
    assert not abandoned.exists()
    assert one in first
    assert on_disk(first) == first.bytes > 0
    del first
    gc.collect()
    assert not folder.exists()
    assert second.folder.exists()


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    """The error says what to do."""
    folder = DiskCache(tmp_path, PARTS, limit=PLENTY).folder
    folder.chmod(0o777)
    with pytest.raises(SessionError, match=r"mode 0777.*chmod 700 it"):
        DiskCache(tmp_path, PARTS, limit=PLENTY)
    folder.chmod(0o700)
    if os.geteuid() == 0:
        os.chown(folder, 12345, 12345)
        with pytest.raises(SessionError, match="belongs to user 12345"):
            DiskCache(tmp_path, PARTS, limit=PLENTY)


def test_a_folder_that_cant_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SessionError, match="can't be made in"):
        DiskCache(tmp_path / "file" / "folder", PARTS, limit=PLENTY)
    parking = DiskCache(tmp_path, PARTS, limit=PLENTY)
    folder = parking.folder
    parking.close()
    folder.rmdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SessionError, match="can't be made in"):
        DiskCache(tmp_path, PARTS, limit=PLENTY)


def test_a_lookup_among_many_is_that_of_a_search(make_parking: Make) -> None:
    """`find` gives what comparing every conversation gives."""
    rng, parking = random.Random(0), make_parking()
    runner = oracle_runner(["full", "recurrent"], checkpoint_interval=7, checkpoint_budget=3000)
    for _ in range(20):
        runner.evaluate([rng.randrange(1, 3) for _ in range(rng.randint(1, 40))])
        offloaded(parking, runner.entry)
    for _ in range(100):
        prompt = np.array([rng.randrange(1, 3) for _ in range(rng.randint(1, 12))], np.int32)
        best = 0
        for one in parking._index:
            same = one.tokens[: len(prompt)] == prompt[: len(one.tokens)]
            shared = len(same) if same.all() else int(same.argmin())
            best = max(best, one.resumable(min(shared, len(prompt) - 1)))
        found = parking.find(prompt)
        assert (found[1] if found is not None else 0) == best
