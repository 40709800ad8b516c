"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from mlxrunner.writing import whole_sync, written


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "file"


def test_only_its_owner_can_read_what_was_written(file: Path) -> None:
    """Mode 0600, nothing beside it, and half a character is an escape."""
    with written(file) as stream:
        stream.write("caf\u00e9 \ud83d\n")
    assert file.read_bytes() == "café \\ud83d\n".encode()
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_file_stays_as_it_was_where_the_new_one_fails(file: Path, error: BaseException) -> None:
    """A full disk or Ctrl-C in the middle: the old content, and no temporary file."""
    file.write_text("old")
    with pytest.raises(type(error)), written(file) as stream:
        stream.write("new")
        raise error
    assert file.read_text() == "old"
    assert list(file.parent.iterdir()) == [file]


def test_a_name_that_cannot_be_given_leaves_nothing_behind(file: Path) -> None:
    """There is a directory of that name."""
    file.mkdir()
    with pytest.raises(IsADirectoryError), written(file) as stream:
        stream.write("new")
    assert list(file.parent.iterdir()) == [file]


def test_a_link_stays_a_link(file: Path, tmp_path: Path) -> None:
    """What it points to is written."""
    link = tmp_path / "link"
    link.symlink_to(file)
    with written(link) as stream:
        stream.write("new")
    assert link.is_symlink()
    assert file.read_text() == "new"


def test_without_force_a_file_is_never_overwritten(file: Path) -> None:
    """Not one that was there before, and not one that came while ours was written."""
    with pytest.raises(FileExistsError), written(file, force=False) as stream:
        stream.write("ours")
        file.write_text("theirs")
    assert file.read_text() == "theirs"
    with pytest.raises(FileExistsError), written(file, force=False):
        pytest.fail("it was there before")
    assert list(file.parent.iterdir()) == [file]


def test_a_file_system_without_links_is_written_too(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """exFAT knows none."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr("os.link", refuse)
    with written(file, force=False) as stream:
        stream.write("ours")
    assert file.read_text() == "ours"
    assert list(file.parent.iterdir()) == [file]


def test_a_volume_that_does_not_know_the_whole_sync(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Network and FUSE volumes of macOS: the plain one is done, and its errors are errors."""
    synced = []

    def refuse(descriptor: int, command: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    monkeypatch.setattr(os, "fsync", synced.append)
    whole_sync(7)
    assert synced == [7]
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match="Input/output error"):
        whole_sync(7)
