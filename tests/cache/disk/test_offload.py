"""An offload returns once all is copied: a thread writes it, and nothing is wrong meanwhile."""

from __future__ import annotations

import logging
import os
from functools import partial
from threading import Event

import pytest

from mlxrunner.cache.disk.index import StoredConversation
from mlxrunner.cache.disk.pieces import PieceFile
from mlxrunner.system.folders import Folder
from mlxrunner.testing import oracle_runner

from .conftest import Make, array, on_disk, served

KINDS = ["full", "sliding", "recurrent"]
TALKS = [[*range(1, 40), *range(60 + 20 * number, 70 + 20 * number)] for number in range(3)]


class SlowDisk:
    """Lets files wait until `may_write` is set, and then fails if there is an `error`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_write = Event()
        self.error: OSError | None = None
        write = PieceFile.write

        def late(
            file: PieceFile, folder: Folder, *, sync: bool = False, more: bool = False
        ) -> None:
            assert self.may_write.wait(20)
            if self.error is not None:
                raise self.error
            write(file, folder, sync=sync, more=more)

        self.error: OSError | None
        monkeypatch.setattr(PieceFile, "write", late)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    return SlowDisk(monkeypatch)


@pytest.mark.parametrize("ends", ["find", "settle", "reopened"])
def test_an_entry_may_change_as_soon_as_it_is_copied(
    make_parking: Make, disk: SlowDisk, ends: str
) -> None:
    """Later answers equal a cold run's: restored is what was there."""
    parking, runner = make_parking(), oracle_runner(KINDS)
    for talk in TALKS:
        runner.evaluate(talk)
        assert parking.offload(runner.entry) is not None
        runner.cache.free("a test")
    assert (os.listdir(parking.folder), len(parking)) == ([], 0)
    assert parking.lacks(array(TALKS[1])) == 0
    disk.may_write.set()
    if ends == "settle":
        parking.settle()
        assert len(parking) == 3
    parking = make_parking() if ends == "reopened" else parking
    for talk in TALKS:
        assert served(partial(oracle_runner, KINDS), parking, [*talk, 5, 6]) == len(talk)


def test_a_prompt_that_it_does_not_serve_does_not_wait(make_parking: Make, disk: SlowDisk) -> None:
    """Only a conversation that would be found is waited for."""
    parking, runner = make_parking(), oracle_runner(KINDS)
    runner.evaluate(TALKS[0])
    parking.offload(runner.entry)
    assert parking.find(array([200, 201, 202])) is None
    assert parking.offload(runner.entry) is not None  # it is being written: nothing to copy
    disk.may_write.set()
    parking.settle()
    assert len(parking) == 1


def test_a_write_that_fails_later_is_told(
    make_parking: Make, disk: SlowDisk, caplog: pytest.LogCaptureFixture
) -> None:
    """The conversation counts as evicted, the log has one line, and no file stays."""
    told: list[tuple[StoredConversation, str]] = []
    parking = make_parking()
    parking.tell(lambda one, by: told.append((one, by)))
    runner = oracle_runner(KINDS)
    runner.evaluate(TALKS[0])
    conversation = parking.offload(runner.entry)
    disk.error = OSError("no space")
    disk.may_write.set()
    assert parking.find(array([*TALKS[0], 5])) is None
    assert told == [(conversation, "a failed write")]
    assert [one.levelno for one in caplog.records] == [logging.WARNING]
    assert (os.listdir(parking.folder), parking.bytes, len(parking)) == ([], 0, 0)


def test_the_limits_count_what_is_being_written(
    make_parking: Make, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the disk's limit nor that of the copies in memory is passed."""
    disk.may_write.set()
    parking, runner = make_parking(), oracle_runner(KINDS)
    runner.evaluate(TALKS[0])
    parking.offload(runner.entry)
    parking.settle()
    one = parking.bytes
    parking = make_parking(limit=2 * one)
    monkeypatch.setattr("mlxrunner.cache.disk.disk_cache.COPIED", one)
    for talk in TALKS:
        runner.evaluate(talk)
        assert parking.offload(runner.entry) is not None
        assert sum(pending.writer.nbytes for pending in parking._pending) <= 2 * one
        assert on_disk(parking) <= 2 * one
    parking.settle()
    assert 0 < parking.bytes <= 2 * one
