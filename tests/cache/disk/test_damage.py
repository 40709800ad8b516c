"""Nothing wrong is ever restored, whatever happened to the files: it costs a cold evaluation."""

from __future__ import annotations

import errno
import logging
import os
import random
import re
import resource
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from support.damage import CONTENTS, KINDS, OWNERS, flip
from support.sample import fewer

from mlxrunner import Runner
from mlxrunner.cache.disk.disk_cache import DiskCache
from mlxrunner.cache.disk.pieces import completed
from mlxrunner.errors import SessionError
from mlxrunner.system import tensorfile
from mlxrunner.testing import oracle_runner

from .conftest import Make, answer, offloaded, served

LAYERS = ["full", "sliding", "recurrent", "composite"]
HEADER = list(range(1, 40))
TALKS = [[*HEADER, *range(60 + 20 * number, 70 + 20 * number)] for number in range(3)]


def small_runner() -> Runner:
    return oracle_runner(LAYERS, rewind_slack=2, checkpoint_interval=12, checkpoint_budget=10**6)


def park_all(parking: DiskCache, talks: list[list[int]] = TALKS) -> None:
    """Park conversations, each with two turns."""
    runner = small_runner()
    for talk in talks:
        runner.evaluate(talk[:-3])
        earlier = offloaded(parking, runner.entry)
        runner.evaluate(talk)
        offloaded(parking, runner.entry, replaces=earlier)


def check_all(parking: DiskCache) -> int:
    """Go on with each conversation; return the number of tokens that were reused."""
    return sum(served(small_runner, parking, [*talk, 5], 6) for talk in TALKS)


DAMAGES = CONTENTS | KINDS


@pytest.mark.parametrize("when", ["before it is opened", "while it is open"])
@pytest.mark.parametrize("what", DAMAGES)
@pytest.mark.exhaustive(0)
def test_damage_costs_a_cold_evaluation(
    make_parking: Make, what: str, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Some file is damaged: answers stay right, and what needs it is forgotten."""
    parking = make_parking()
    park_all(parking)
    good = check_all(parking)
    kept = parking.folder.parent.with_name("good")
    shutil.copytree(parking.folder, kept)
    names = sorted(os.listdir(kept))
    for name in random.Random(what + when).sample(names, fewer(3, 2)):
        parking.close()
        shutil.rmtree(parking.folder)
        shutil.copytree(kept, parking.folder)
        parking = make_parking()
        if when == "before it is opened":
            parking.close()
            DAMAGES[what](parking.folder / name)
            parking = make_parking()
        else:
            DAMAGES[what](parking.folder / name)
        caplog.clear()
        first = check_all(parking)
        assert len(caplog.records) <= 1
        second = check_all(parking)
        assert first <= second <= good


@pytest.mark.parametrize("kind", ["talk", "rows", "state"])
def test_a_restart_says_which_conversations_are_damaged(
    make_parking: Make, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One line of the log counts them; an undamaged folder has none."""
    parking = make_parking()
    park_all(parking)
    make_parking()
    assert not caplog.records
    there = len(parking)
    os.truncate(next(parking.folder.glob(f"{kind}-*")), 100)
    lost = there - len(make_parking())
    (line,) = caplog.messages
    # The pieces that are whole may tell the beginning of a conversation.
    assert lost == 0 if kind == "talk" else lost >= 0
    said = re.match(rf"(\d) of {there} conversations in {parking.folder} can't be restored", line)
    assert said
    assert max(lost, 1) <= int(said[1]) <= there
    make_parking()
    assert len(caplog.records) == 1


BY_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")


@pytest.mark.parametrize(
    "what", [pytest.param("another owner", marks=BY_ROOT), "writable by others", "a second name"]
)
def test_files_that_others_could_have_made_are_not_used(make_parking: Make, what: str) -> None:
    """They are removed, as what they belong to."""
    parking = make_parking()
    park_all(parking, TALKS[:1])
    parking.close()
    names = sorted(os.listdir(parking.folder))
    for path in parking.folder.iterdir():
        OWNERS[what](path)
    parking = make_parking()
    assert len(parking) == 0
    assert os.listdir(parking.folder) == []
    assert names


def test_what_belongs_to_others_is_left_alone(make_parking: Make) -> None:
    """Only files with names of this program are removed."""
    parking = make_parking()
    park_all(parking, TALKS[:1])
    there = parking.bytes
    parking.close()
    orphan = next(parking.folder.glob("rows-*"))
    shutil.copy(orphan, orphan.with_name(orphan.name.replace("rows-", "rows-0")))
    (parking.folder / "notes.txt").write_text("mine")
    unused = parking.folder / f"state-{'0' * 32}-7.safetensors"
    unused.write_bytes(b"x")
    unfinished = parking.folder / f".talk-{'0' * 32}-7.safetensors.new"
    unfinished.write_bytes(b"x")
    parking = make_parking()
    assert parking.bytes == there
    assert (parking.folder / "notes.txt").read_text() == "mine"
    assert not unused.exists()
    assert not unfinished.exists()
    assert check_all(parking)


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond `nbytes`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_the_conversation_and_a_line(
    make_parking: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """Earlier conversations stay parked, nothing half-written does, and it works again later."""
    parking = make_parking()
    park_all(parking, TALKS[:1])
    names, before = sorted(os.listdir(parking.folder)), parking.bytes
    runner = small_runner()
    runner.evaluate(TALKS[1])
    with file_size_limit(1500):
        assert offloaded(parking, runner.entry) is None
        assert offloaded(parking, runner.entry) is None
    assert [one.levelno for one in caplog.records] == [logging.WARNING]
    assert "not written to the disk cache: File too large" in caplog.text
    assert (sorted(os.listdir(parking.folder)), parking.bytes) == (names, before)
    assert offloaded(parking, runner.entry) is not None
    with file_size_limit(1500):
        runner.evaluate(TALKS[2])
        assert offloaded(parking, runner.entry) is None
    assert len(caplog.records) == 2
    assert check_all(parking)


def test_a_write_that_fails_anywhere_leaves_no_file(
    make_parking: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write in turn finds the disk full."""
    parking = make_parking()
    park_all(parking, TALKS[:1])
    names, before = sorted(os.listdir(parking.folder)), parking.bytes
    runner, write = small_runner(), tensorfile.write_all
    runner.evaluate(TALKS[1])
    left = 0

    def write_all(fd: int, data: bytes | memoryview) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(fd, data)

    monkeypatch.setattr(tensorfile, "write_all", write_all)
    for count in range(1000):
        left = count
        if offloaded(parking, runner.entry) is not None:
            break
        assert (sorted(os.listdir(parking.folder)), parking.bytes) == (names, before)
    assert count > 10
    assert check_all(parking)


@pytest.mark.parametrize("saves", [True, False])
def test_an_interrupt_leaves_all_or_nothing(
    make_parking: Make, monkeypatch: pytest.MonkeyPatch, saves: bool
) -> None:
    """Ctrl-C is no failure to swallow. It drops a save, and only the wait for an offload."""
    parking = make_parking()
    runner = small_runner()
    runner.evaluate(TALKS[0])
    join = threading.Thread.join

    def interrupted(thread: threading.Thread, timeout: float | None = None) -> None:
        if timeout is not None:
            raise KeyboardInterrupt
        join(thread)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(threading.Thread, "join", interrupted)
        if saves:
            completed(parking.saving(runner.entry, len(runner.entry.tokens)))
        offloaded(parking, runner.entry)
    parking.settle()
    if saves:
        assert (os.listdir(parking.folder), parking.bytes) == ([], 0)
    assert len(parking) == (not saves)
    assert offloaded(parking, runner.entry) is not None


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_thread_that_is_interrupted_at_its_start_writes_nothing(
    make_parking: Make, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Ctrl-C comes when it runs already; the system may have no thread left. It is tried again."""
    parking, start, begun = make_parking(), threading.Thread.start, list[threading.Thread]()
    runner = small_runner()
    runner.evaluate(TALKS[0])

    def failing(thread: threading.Thread) -> None:
        if error is KeyboardInterrupt:
            begun.append(thread)
            start(thread)
        raise error

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(threading.Thread, "start", failing)
        assert offloaded(parking, runner.entry) is None
    for thread in begun:
        thread.join()
    assert (os.listdir(parking.folder), parking.bytes, len(parking)) == ([], 0, 0)
    assert offloaded(parking, runner.entry) is not None


def test_a_damaged_header_is_not_shared_again(make_parking: Make) -> None:
    """Once damage was found, new conversations write the rows again."""
    parking = make_parking()
    park_all(parking)
    flip(0.9)(next(parking.folder.glob("rows-*-0-16.safetensors")))
    assert check_all(parking) == 0
    assert len(parking) == 0
    park_all(parking)
    assert check_all(parking) == sum(map(len, TALKS))


def test_reading_what_is_gone_raises(make_parking: Make) -> None:
    """A cache that adopts it begins cold, and says why."""
    parking = make_parking()
    park_all(parking, TALKS[:1])
    (parked,) = parking._index
    entry = parking.restore(parked)
    parking.drop(parked)
    with pytest.raises(SessionError, match="missing or damaged"):
        [layer.read() for layer in entry.layers]
    runner = small_runner()
    runner.cache.adopt(parking.restore(parked), "the disk")
    usage = answer(runner, [*TALKS[0], 5])[1]
    assert (usage.cached_tokens, usage.reason) == (0, "entry_freed")


def test_files_are_for_their_owner_only(make_parking: Make) -> None:
    parking = make_parking()
    park_all(parking, TALKS[:1])
    assert stat.S_IMODE(parking.folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in parking.folder.iterdir()} == {0o600}
