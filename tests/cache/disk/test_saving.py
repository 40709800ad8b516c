"""A conversation that stays in memory is written behind: a crash costs what came after its save."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mlxrunner.cache.disk.disk_cache import DiskCache
from mlxrunner.cache.disk.index import StoredConversation
from mlxrunner.cache.disk.pieces import completed
from mlxrunner.system.reading import open_file
from mlxrunner.system.tensorfile import TensorFile

from .conftest import PARTS, PLENTY, Make, answer, offloaded, on_disk, served
from .test_recovery import FOLLOWING, KINDS, PROMPT, new


def saved(disk: DiskCache, entry: Any, upto: int, **more: Any) -> StoredConversation:
    """Save the first tokens of an entry, and return the conversation."""
    found = completed(disk.saving(entry, upto, **more))
    assert found is not None
    return found


def copied(folder: Path, to: Path) -> Path:
    """Copy what is in a folder, as a kill would leave it. A thread may rename a file meanwhile."""
    (to / folder.name).mkdir(parents=True)
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            shutil.copy2(path, to / folder.name)
    return to


def payload(folder: Path, names: set[str]) -> dict[str, int]:
    """Return the bytes of rows and of states in files, without headers and tokens."""
    found = {"rows": 0, "states": 0}
    for name in names:
        file = TensorFile(open_file(folder / name)[0])
        kind = "rows" if name.startswith("rows-") else "states"
        found[kind] += sum(one.nbytes for key, one in file.arrays.items() if key != "tokens")
    return found


@pytest.mark.parametrize("name", KINDS)
def test_a_kill_costs_what_came_after_the_last_save(
    name: str, make_parking: Make, tmp_path: Path
) -> None:
    """At each moment of a save the one before is there; afterwards all is, with equal answers."""
    runner, disk, copies = new(name), make_parking(), list[Path]()
    answer(runner, PROMPT)
    before = saved(disk, runner.entry, len(runner.entry.tokens))
    answer(runner, [*before.tokens.tolist(), *range(100, 150)])
    for number, _ in enumerate(disk.saving(runner.entry, len(runner.entry.tokens))):
        copies.append(copied(disk.folder, tmp_path / f"copy-{number}"))
    copies.append(copied(disk.folder, tmp_path / "copy-last"))
    prompt, reused = [*runner.entry.tokens.array.tolist(), 7, 8], list[int]()
    for copy in copies:
        other = DiskCache(copy, PARTS, limit=PLENTY)
        reused.append(served(partial(new, name), other, prompt))
        assert other.bytes == on_disk(other)
        other.close()
    assert min(reused) == len(before.tokens)
    assert reused[-1] == len(prompt) - 2


@pytest.mark.parametrize("name", KINDS)
def test_a_save_writes_new_rows_and_one_copy_of_the_states(name: str, make_parking: Make) -> None:
    """Many turns and many checkpoints don't change that."""
    runner, disk, prompt = new(name), make_parking(), [*PROMPT]
    replaces, before, there = None, 0, set[str]()
    for turn in range(6):
        answer(runner, prompt, 10)
        entry = runner.entry
        assert len(entry.checkpoints.offsets) > 1 or name == "rows"
        count = len(entry.tokens)
        replaces = saved(disk, entry, count, replaces=replaces)
        names = {path.name for path in disk.folder.iterdir()}
        found, there = payload(disk.folder, names - there), names
        whole = sum(one.nbytes for layer in entry.export().layers for one in layer.arrays.values())
        if name == "rows":
            assert found["rows"] <= 1.1 * (whole // count) * (count - before)
            assert found["states"] == 0
        elif name == "states":
            assert found == {"rows": 0, "states": whole}
        else:
            assert found["states"] <= whole
        before = count
        prompt = [*entry.tokens.array.tolist(), *range(30 * turn, 30 * turn + 20)]


@pytest.mark.parametrize("name", KINDS)
def test_an_entry_that_goes_on_is_saved_as_it_was(name: str, make_parking: Make) -> None:
    """The first tokens are written while a request adds others, also between two arrays."""
    runner, disk = new(name), make_parking()
    answer(runner, PROMPT)
    count = len(runner.entry.tokens)
    work = disk.saving(runner.entry, count)
    following = [*runner.entry.tokens.array.tolist(), *range(90, 130)]
    next(work)
    for _ in runner.generate(following, max_tokens=9, stop_tokens=[]):
        next(work, None)
    completed(work)
    assert served(partial(new, name), make_parking(), [*following[:count], 5, 6, 7]) == count


@pytest.mark.parametrize("name", KINDS)
def test_a_part_of_a_running_entry_is_saved(name: str, make_parking: Make) -> None:
    """Up to an offset that it has passed, or to the last checkpoint before."""
    runner, disk = new(name), make_parking()
    answer(runner, FOLLOWING, 20)
    upto = len(FOLLOWING) - 3
    done = saved(disk, runner.entry, upto)
    offsets = runner.entry.checkpoints.offsets
    most = upto if name == "rows" else max(one for one in offsets if one <= upto)
    assert len(done.tokens) == most
    assert served(partial(new, name), make_parking(), [*FOLLOWING[:most], 9, 9]) == most


def test_an_offload_adds_the_checkpoints_that_a_save_left_out(make_parking: Make) -> None:
    """They take the place of the saved conversation; its rows are not written again."""
    runner, disk = new("rows-and-states"), make_parking()
    answer(runner, FOLLOWING, 20)
    count = len(runner.entry.tokens)
    first = saved(disk, runner.entry, count)
    assert not first.states
    there = {path.name for path in disk.folder.iterdir()}
    done = offloaded(disk, runner.entry)
    assert done is not None
    assert [one.offset for one in done.states] == runner.entry.checkpoints.offsets
    assert len(disk) == 1
    added = {path.name for path in disk.folder.iterdir()} - there
    assert {name.split("-")[0] for name in added} == {"state"}
    again = make_parking()
    assert (len(again), again.bytes) == (1, on_disk(again))
    found = served(partial(new, "rows-and-states"), again, [*FOLLOWING[:-1], 250, 251])
    assert found >= max(one for one in runner.entry.checkpoints.offsets if one < len(FOLLOWING))


def test_a_save_that_is_closed_leaves_nothing(make_parking: Make) -> None:
    """Also while a thread writes its file; an offload at the same moment writes the same names."""
    runner, disk = new("rows"), make_parking()
    answer(runner, FOLLOWING)
    count = len(runner.entry.tokens)
    for number in range(12):
        work = disk.saving(runner.entry, count)
        for _ in range(number):
            next(work, None)
        work.close()
        if len(disk):
            break
        assert (disk.bytes, [*disk.folder.iterdir()]) == (0, [])
        work = disk.saving(runner.entry, count)
        for _ in range(number):
            next(work, None)
        done = offloaded(disk, runner.entry)
        work.close()
        assert done is not None
        assert disk.bytes == on_disk(disk)
        warm = new("rows")
        warm.cache.adopt(disk.restore(done), "the disk")
        assert len(warm.entry.tokens) == count
        disk.drop(done)


def test_a_full_disk_costs_a_line(
    make_parking: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The earlier save stays."""
    runner, disk = new("rows-and-states"), make_parking()
    answer(runner, PROMPT)
    before = saved(disk, runner.entry, len(runner.entry.tokens))
    answer(runner, FOLLOWING)

    def full(fd: int, data: object) -> int:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        for _ in range(2):
            assert completed(disk.saving(runner.entry, len(runner.entry.tokens))) is None
    assert caplog.text.count("was not written to the disk cache: No space left on device") == 1
    assert before in disk
    assert disk.bytes == on_disk(disk)
