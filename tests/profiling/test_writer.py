"""Lines in a shared file are whole, private and bounded, and never make a request fail."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.checks import raising

from mlxrunner.profiling.logs import KEPT, LineWriter, with_rotated


def test_lines_are_appended_to_what_is_there(tmp_path: Path) -> None:
    file = tmp_path / "events"
    for word in ("a", "b"):
        writer = LineWriter(file)
        writer.write(word)
        writer.close()
    assert file.read_text() == "a\nb\n"
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_full_file_is_rotated(tmp_path: Path) -> None:
    """FILE.1 is the youngest of the kept files, and each begins with the writer's first line."""
    file = tmp_path / "events"
    writer = LineWriter(file, limit=30, first=lambda: "head")
    for number in range(20):
        writer.write(f"line {number:04}")
    kept = with_rotated(file)
    older = [f"events.{number}" for number in range(KEPT, 0, -1)]
    assert [path.name for path in kept] == [*older, "events"]
    assert all(path.stat().st_size <= 30 for path in kept)
    assert file.read_text() == "head\nline 0018\nline 0019\n"
    assert (tmp_path / "events.1").read_text() == "head\nline 0016\nline 0017\n"


@pytest.mark.parametrize("number", [1, KEPT])
def test_what_is_not_ours_is_neither_moved_nor_replaced(
    number: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is rotated where the name belongs to somebody else, and one warning says why."""
    target, link = tmp_path / "target", tmp_path / f"events.{number}"
    target.write_text("precious")
    link.symlink_to(target)
    writer = LineWriter(tmp_path / "events", limit=30)
    with caplog.at_level(logging.WARNING, "mlxrunner"):
        for line in range(20):
            writer.write(f"line {line:04}")
    assert link.is_symlink()
    assert target.read_text() == "precious"
    assert {path.name for path in tmp_path.iterdir()} == {"events", "target", link.name}
    (warning,) = (record.message for record in caplog.records)
    assert "it is a link" in warning


def test_a_line_longer_than_the_limit_is_written_all_the_same(tmp_path: Path) -> None:
    writer = LineWriter(tmp_path / "events", limit=10)
    writer.write("x" * 50)
    writer.write("y" * 50)
    assert (tmp_path / "events").read_text() == "y" * 50 + "\n"
    assert (tmp_path / "events.1").read_text() == "x" * 50 + "\n"


WRITE = """
import sys
from mlxrunner.profiling.logs import LineWriter
writer = LineWriter(sys.argv[1], limit=int(sys.argv[3]))
for number in range(400):
    writer.write('{"who": "%s", "number": %d, "fill": "%s"}' % \
(sys.argv[2], number, "x" * (number % 97)))
"""


@pytest.mark.parametrize("limit", [10**9, 30_000])
def test_several_processes_share_a_file(tmp_path: Path, limit: int) -> None:
    """Each line whole, in each writer's order, none twice; also while they rotate it."""
    file = tmp_path / "events"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITE, str(file), name, str(limit)])
        for name in "abc"
    ]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    read = [
        json.loads(line) for path in with_rotated(file) for line in path.read_text().splitlines()
    ]
    for name in "abc":
        numbers = [line["number"] for line in read if line["who"] == name]
        assert numbers == list(range(numbers[0], 400))
        assert limit < 10**9 or numbers[0] == 0


def test_a_file_that_was_taken_away_is_made_again(tmp_path: Path) -> None:
    """By logrotate, say; and again after its folder was gone for a while."""
    file = tmp_path / "logs" / "events"
    file.parent.mkdir()
    writer = LineWriter(file, patience=0)
    writer.write("a")
    file.rename(tmp_path / "old")
    writer.write("b")
    assert file.read_text() == "b\n"
    file.unlink()
    file.parent.rmdir()
    writer.write("lost")
    file.parent.mkdir()
    writer.write("c")
    assert file.read_text() == "c\n"


def test_a_full_disk_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = LineWriter(tmp_path / "events")
    monkeypatch.setattr(os, "write", raising(OSError(errno.ENOSPC, "No space left on device")))
    with caplog.at_level(logging.WARNING, "mlxrunner"):
        for _ in range(3):
            writer.write("lost")
    told = [record.message for record in caplog.records]
    assert told == [f"{tmp_path}/events: not written: No space left on device"]


def test_what_a_full_disk_cut_off_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, write = tmp_path / "events", os.write
    writer = LineWriter(file)
    writer.write("first")
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
    writer.write("second")
    monkeypatch.setattr(os, "write", write)
    writer.write("third")
    assert file.read_text() == "first\nthird\n"


def test_a_line_behind_one_that_was_cut_off_is_whole(tmp_path: Path) -> None:
    """The torn line is somebody else's, or of a machine that lost its power."""
    file = tmp_path / "events"
    file.write_text('{"cut": ')
    writer = LineWriter(file, first=lambda: "head")
    writer.write("a")
    writer.write("b")
    assert file.read_text() == '{"cut": \nhead\na\nb\n'


def test_a_stream_gets_lines_and_is_never_rotated(tmp_path: Path) -> None:
    """A shell gives streams: `--events >(command)`, /dev/stderr."""
    with (tmp_path / "out").open("wb") as stream:
        writer = LineWriter(f"/dev/fd/{stream.fileno()}", limit=4, first=lambda: "head")
        writer.write("abc")
        writer.write("def")
        writer.close()
    assert (tmp_path / "out").read_text() == "head\nabc\ndef\n"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_is_not_unicode_is_escaped(tmp_path: Path) -> None:
    LineWriter(tmp_path / "events").write("a\udcffb")
    assert (tmp_path / "events").read_text() == "a\\udcffb\n"
