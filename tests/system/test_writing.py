"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.checks import raising

from mlxrunner.system.writing import (
    SQLITE_ENDS,
    RefusedFileError,
    is_stream,
    open_database,
    open_new,
    open_own,
    open_stream,
    whole_sync,
    written,
)

WAYS: dict[str, Callable[[Any], object]] = {
    "written": lambda path: written(path).__enter__(),
    "own": open_own,
    "appended": partial(open_own, append=True),
    "database": partial(open_database, new=False),
    "only if new": lambda path: written(path, force=False).__enter__(),
    "new": open_new,
    "new database": partial(open_database, new=True),
}
"""Ways to open a file."""


def refused(path: Path | str, message: str, ways: str) -> None:
    """Assert that each of these ways to open a file is refused, with this message."""
    for way in ways.split(", "):
        with pytest.raises(RefusedFileError, match=message):
            WAYS[way](path)


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


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()]
)
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


def test_a_link_is_refused_and_stays(file: Path, tmp_path: Path) -> None:
    """Neither the link nor its target is written: somebody else may have put it there."""
    link = tmp_path / "link"
    link.symlink_to(file)
    told = f"link: it is a link to {file}: name the file itself"
    refused(link, told, "written, own, database")
    assert link.is_symlink()
    assert not file.exists()


def test_a_folder_may_be_a_link(tmp_path: Path) -> None:
    """It is the user's own way to keep files elsewhere."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with written(tmp_path / "link" / "file") as stream:
        stream.write("new")
    os.close(open_own(tmp_path / "link" / "other"))
    assert {path.name for path in (tmp_path / "real").iterdir()} == {"file", "other"}


@pytest.mark.parametrize("kind", ["fifo", "device", "socket"])
def test_what_is_no_file_is_never_opened_or_replaced(file: Path, kind: str) -> None:
    """It would hang, or be gone; a device is a copy of the one that is always full."""
    _make(file, kind)
    before = file.lstat()
    told = r"file: it is a (FIFO|device|socket), not a regular file: choose"
    refused(file, told, "written, own, appended, database")
    for way in ("only if new", "new", "new database"):
        with pytest.raises(FileExistsError):
            WAYS[way](file)
    assert os.path.samestat(before, file.lstat())
    assert list(file.parent.iterdir()) == [file]


def _make(file: Path, kind: str) -> None:
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as own, pytest.MonkeyPatch.context() as patch:
            patch.chdir(file.parent)  # the names of sockets are short
            own.bind(file.name)
    else:
        try:
            os.mknod(file, stat.S_IFCHR | 0o600, os.makedev(1, 7))
        except OSError as error:
            pytest.skip(f"makes a device, which this user may not: {error}")


@pytest.mark.parametrize("mode", [0o666, 0o620, 0o602])
def test_a_file_that_others_may_write_to_is_refused(file: Path, mode: int) -> None:
    """With the remedy; a new file takes its place all the same."""
    file.touch()
    file.chmod(mode)
    told = f"others may write to it .mode {mode:04o}.: chmod 600 it, or remove it"
    refused(file, told, "own, database")
    assert file.stat().st_mode & 0o777 == mode
    with written(file) as stream:
        stream.write("new")
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_file_with_another_name_is_refused(file: Path, tmp_path: Path) -> None:
    """A hard link to a file of ours is refused, and a new file takes the one name."""
    precious = tmp_path / "precious"
    precious.write_text("precious")
    os.link(precious, file)
    told = r"it is one of 2 names of the same file .hard links.*: choose another name"
    refused(file, told, "appended, database")
    with written(file) as stream:
        stream.write("new")
    assert (file.read_text(), precious.read_text()) == ("new", "precious")


def test_a_file_of_another_user_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other user could read what is written to it, or change it."""
    file.touch(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
    told = r"it belongs to the user .*: choose another name, or remove it"
    refused(file, told, "written, own, database")


def test_what_others_could_read_is_closed_to_them(file: Path) -> None:
    """When it is opened; metrics keep what their reader needs, but never a right to write."""
    file.touch()
    file.chmod(0o644)
    os.close(open_own(file))
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o664)
    with written(file, shared=True) as stream:
        stream.write("new")
    assert file.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("end", SQLITE_ENDS)
def test_what_lies_beside_a_database_is_looked_at(file: Path, end: str) -> None:
    """SQLite would believe it: a journal of somebody else changes the database."""
    Path(f"{file}{end}").symlink_to("/etc/passwd")
    with pytest.raises(RefusedFileError, match=f"file{end}: it is a link to /etc/passwd"):
        open_database(file, new=True)
    assert not file.exists()


def test_a_database_of_any_name(tmp_path: Path) -> None:
    """Also one that is not UTF-8, and one that an address would read otherwise."""
    for name in ("a?mode=memory#%41", os.fsdecode(b"caf\xe9")):
        with closing(open_database(tmp_path / name, new=True)) as database:
            database.execute("CREATE TABLE one (a)")
        with closing(open_database(tmp_path / name, new=False)) as database:
            assert database.execute("SELECT count(*) FROM one").fetchone() == (0,)
        assert (tmp_path / name).stat().st_size


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_what_is_no_name_is_an_error_of_the_file(tmp_path: Path, name: str) -> None:
    """NUL, and half characters."""
    refused(tmp_path / name, "not a file name", "written, own, new, database")
    assert not is_stream(tmp_path / name)


def test_a_dash_is_not_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere it means standard output, so nobody wants a file of that name."""
    monkeypatch.chdir(tmp_path)
    refused(Path("-"), "does not mean standard output here", "written, appended")
    refused("-", "does not mean standard output here", "appended")
    assert not any(tmp_path.iterdir())


def test_a_stream_is_what_the_program_was_given(tmp_path: Path) -> None:
    """A redirection or `>(command)` is written to from where it stands, and not opened again."""
    with (tmp_path / "out").open("wb") as stream:
        stream.write(b"before ")
        stream.flush()
        for folder in ("/dev/fd", "/proc/self/fd"):
            name = f"{folder}/{stream.fileno()}"
            assert is_stream(name)
            with os.fdopen(open_stream(name), "wb") as again:
                again.write(b"ours ")
    assert (tmp_path / "out").read_bytes() == b"before ours ours "
    assert is_stream("/dev/stdout")
    assert is_stream("/dev/stderr")
    assert not is_stream(tmp_path / "out")
    assert not is_stream(tmp_path / "none")


def test_a_stream_that_cannot_be_written_to_is_said(file: Path) -> None:
    """Open for reading only, or closed."""
    file.touch()
    with file.open("rb") as stream:
        name = f"/dev/fd/{stream.fileno()}"
        with pytest.raises(RefusedFileError, match="it is closed, or open for reading only"):
            open_stream(name)
    with pytest.raises(RefusedFileError, match="it is closed"):
        open_stream(name)


def test_the_null_device_is_a_stream_by_any_name(null: Path) -> None:
    """Text written to it is gone, and it stays a device."""
    before = null.lstat()
    assert is_stream(null)
    with os.fdopen(open_stream(null), "wb") as stream:
        stream.write(b"gone")
    assert os.path.samestat(before, null.lstat())


def test_without_force_a_file_is_never_overwritten(file: Path) -> None:
    """Not one that was there before, and not one that came while ours was written."""
    with pytest.raises(FileExistsError), written(file, force=False) as stream:
        stream.write("ours")
        file.write_text("theirs")
    assert file.read_text() == "theirs"
    with pytest.raises(FileExistsError), written(file, force=False):
        pytest.fail("it was there before")
    assert list(file.parent.iterdir()) == [file]


def test_what_a_killed_process_left_goes_with_the_next_writing(file: Path) -> None:
    """Other hidden files stay, and so does one that is being written."""
    code = (
        "import os; from pathlib import Path; from mlxrunner.system.writing import written\n"
        f"with written(Path({str(file)!r})) as stream: stream.write('a'); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    (left,) = file.parent.iterdir()
    theirs = file.with_name(f".{file.name}.a1b2c3d4")
    theirs.write_text("theirs")
    with written(file) as first:
        assert not left.exists()
        with written(file) as second:
            second.write("second")
        first.write("first")
    assert file.read_text() == "first"
    assert {*file.parent.iterdir()} == {file, theirs}


def test_a_file_that_is_removed_before_it_is_locked_is_made_again(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may look for what was left at that moment."""
    removed = []

    def lock(descriptor: int, how: int) -> None:
        if not removed:
            removed.extend(file.parent.iterdir())
            removed[0].unlink()

    monkeypatch.setattr(fcntl, "flock", lock)
    with written(file) as stream:
        stream.write("ours")
    assert removed
    assert list(file.parent.iterdir()) == [file]
    assert file.read_text() == "ours"


def test_a_file_system_without_links_is_written_too(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """exFAT knows none."""

    monkeypatch.setattr("os.link", raising(OSError(errno.EPERM, os.strerror(errno.EPERM))))
    with written(file, force=False) as stream:
        stream.write("ours")
    assert file.read_text() == "ours"
    assert list(file.parent.iterdir()) == [file]


def test_a_volume_that_does_not_know_the_whole_sync(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Network and FUSE volumes of macOS: the plain one is done, and its errors are errors."""
    synced = list[int]()
    refuse = raising(OSError(errno.ENOTSUP, "Operation not supported"))
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    monkeypatch.setattr(os, "fsync", synced.append)
    whole_sync(7)
    assert synced == [7]
    monkeypatch.setattr(os, "fsync", raising(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match="Input/output error"):
        whole_sync(7)
