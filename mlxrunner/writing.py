"""Everything that this program writes goes through here: only to our own regular files, which only their owner can read.

A name may have been given another meaning by somebody else, or by mistake: a link, a FIFO, a device, a file of another user.
None of them is written to, replaced, or waited for. A folder may be a link; the file itself may not.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import sqlite3
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from mlxrunner.reading import kind_of

FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
OTHERS_READ = stat.S_IRGRP | stat.S_IROTH
SQLITE_ENDS = ("-journal", "-wal", "-shm")
"""Of the names of the files that SQLite keeps beside a database, and believes."""
_GIVEN = re.compile(r"/dev/std(?P<name>out|err)|/(?:dev|proc/self)/fd/(?P<number>\d{1,6})")

Name = str | os.PathLike[str]


class RefusedFileError(OSError):
    """A name that is not written to. `strerror`: what it means, and what to do."""

    def __init__(self, path: Name, why: str) -> None:
        super().__init__(errno.EPERM, why, os.fspath(path))

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def open_new(path: Name, *, dir_fd: int | None = None) -> int:
    """Make the file `path` (mode 0600): its descriptor, to be read and written. FileExistsError where anything is there."""
    with _names_checked(path):
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | FLAGS, 0o600, dir_fd=dir_fd)


def open_own(path: Name, *, append: bool = False, make: bool = True) -> int:
    """Open the file `path`, or `make` it (mode 0600): its descriptor, to be read and written.

    Others can't read the file from then on. RefusedFileError where it is no regular file, a link, another user's, or
    one that others may write to.
    """
    flags = os.O_RDWR | FLAGS | (os.O_APPEND if append else 0)
    for _ in range(100):  # as often as somebody else makes or removes it in between
        if make:
            with suppress(FileExistsError), _names_checked(path):
                return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            check_own(path)  # before it is opened: opening a device may do something
            return _private(path, os.open(path, flags))
        except FileNotFoundError:
            if not make:
                raise
    raise RefusedFileError(
        path, "it comes and goes: another program makes and removes it, choose another name"
    )


def check_own(path: Name, *, replaced: bool = False) -> None:
    """RefusedFileError for a name that is not to be written to; FileNotFoundError where there is nothing.

    `replaced`: another file will take the name, so that it does not matter who else may write to this one.
    """
    with _names_checked(path):
        _check(path, os.lstat(path), replaced=replaced)


def is_stream(path: Name) -> bool:
    """Return True if `path` is written to as a stream, and never replaced.

    These are the descriptors that this program was given (/dev/stdout, and /dev/fd/N for `>(command)`), and the null device.
    """
    return bool(_GIVEN.fullmatch(os.fspath(path))) or is_null(path)


def is_null(path: Name | int) -> bool:
    """Return True if `path`, or an open descriptor, is the null device, which may have any name."""
    try:
        status = os.fstat(path) if isinstance(path, int) else os.lstat(path)
        return stat.S_ISCHR(status.st_mode) and status.st_rdev == os.stat(os.devnull).st_rdev
    except (OSError, ValueError):
        return False


def open_stream(path: Name) -> int:
    """A descriptor of its own for the stream `path`. RefusedFileError where it can't be written to."""
    given = _GIVEN.fullmatch(os.fspath(path))
    if given is None:
        descriptor = os.open(path, os.O_WRONLY | FLAGS)
        if is_null(descriptor):
            return descriptor
        os.close(descriptor)
        raise RefusedFileError(path, "it is not the null device any more: choose another name")
    number = {"out": 1, "err": 2}.get(given["name"]) or int(given["number"])
    if not is_writable(number):
        raise RefusedFileError(path, "it is closed, or open for reading only: choose another name")
    return os.dup(number)


def is_writable(descriptor: int) -> bool:
    """Return True if an open descriptor can be written to."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
    except OSError:
        return False


def open_database(path: Name, *, new: bool) -> sqlite3.Connection:
    """Connect to the SQLite file `path`, which is made if it is `new`; neither it nor the files beside it may be anybody else's."""
    for end in SQLITE_ENDS:
        with suppress(FileNotFoundError):
            check_own(f"{os.fspath(path)}{end}")
    descriptor = open_new(path) if new else open_own(path, make=False)
    try:
        name = f"{Path(path).absolute().as_uri()}?mode=rw"
        database = sqlite3.connect(name, uri=True, timeout=0, isolation_level=None)
        if not os.path.samestat(os.lstat(path), os.fstat(descriptor)):
            database.close()
            raise RefusedFileError(path, "another program has replaced it: choose another name")
    finally:
        os.close(descriptor)  # before SQLite takes its locks, which this would undo
    return database


def open_temporary() -> IO[bytes]:
    """A file without a name, which is gone with the process."""
    return tempfile.TemporaryFile()


def open_temporary_database() -> sqlite3.Connection:
    """A SQLite file without a name, which is gone with the process."""
    return sqlite3.connect("", timeout=0, isolation_level=None)


@contextmanager
def written(
    path: Path,
    *,
    force: bool = True,
    newline: str | None = None,
    shared: bool = False,
    sync: bool = True,
) -> Iterator[IO[str]]:
    """A stream whose text becomes the file `path` (mode 0600), on the disk (`sync`), when the block has ended well.

    FileExistsError, before the block and after it, where there is anything already and not `force`; RefusedFileError
    for what is no regular file of ours, also a link. Half characters, which JSON can name and no file can hold, are
    written as escapes. `shared`: who could read the file that is there can read the new one. OSError for what can't be
    written; the file is then as it was.
    """
    path, mode = Path(path), 0o600
    with suppress(FileNotFoundError):
        found = _found(path)
        if not force:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        _check(path, found, replaced=True)
        mode |= found.st_mode & OTHERS_READ if shared else 0
    handle, name = tempfile.mkstemp(prefix=f".{path.name[:80]}.", dir=path.parent)
    try:
        with os.fdopen(
            handle, "w", encoding="utf-8", errors="backslashreplace", newline=newline
        ) as stream:
            yield stream
            stream.flush()
            os.fchmod(handle, mode)
            if sync:
                whole_sync(handle)
        _give_name(name, path, force)
    finally:
        with suppress(OSError):
            os.unlink(name)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Every byte of `data`; a disk that is full is an OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view[: 2**26]) :]


def whole_sync(descriptor: int) -> None:
    """What was written is on the disk: on macOS fsync stops at the drive's cache, and the other call is not known to each volume."""
    if hasattr(fcntl, "F_FULLFSYNC"):
        with suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def _give_name(name: str, path: Path, force: bool) -> None:
    """Without `force` by a link, which fails where another program was faster; not every file system can do that."""
    if force:
        os.replace(name, path)
        return
    try:
        os.link(name, path)
    except FileExistsError:
        raise
    except OSError:
        os.rename(name, path)


def _private(path: Name, descriptor: int) -> int:
    """The open file, checked again as nobody can exchange it any more, and closed to the eyes of others."""
    try:
        status = os.fstat(descriptor)
        _check(path, status)
        if status.st_mode & OTHERS_READ:
            os.fchmod(descriptor, 0o600)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check(path: Name, status: os.stat_result, *, replaced: bool = False) -> None:
    mode = status.st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if stat.S_ISLNK(mode):
        if is_stream(path):
            raise RefusedFileError(path, "it is a stream, not a regular file: choose another name")
        raise RefusedFileError(
            path, f"it is a link{_target(path)}: name the file itself, or remove the link"
        )
    if not stat.S_ISREG(mode):
        raise RefusedFileError(
            path, f"it is {kind_of(mode)}, not a regular file: choose another name"
        )
    if status.st_uid != os.geteuid():
        raise RefusedFileError(
            path, f"it belongs to {_user(status.st_uid)}: choose another name, or remove it"
        )
    if status.st_nlink > 1 and not replaced:
        raise RefusedFileError(
            path,
            f"it is one of {status.st_nlink} names of the same file (hard links), and the others would change with it: "
            "choose another name, or copy it",
        )
    if mode & OTHERS_WRITE and not replaced:
        raise RefusedFileError(
            path, f"others may write to it (mode {mode & 0o777:04o}): chmod 600 it, or remove it"
        )


def _target(path: Name) -> str:
    try:
        return f" to {os.readlink(path)}"
    except OSError:
        return ""


def _user(number: int) -> str:
    import pwd

    try:
        return f"the user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"the user {number}"


def _found(path: Name) -> os.stat_result:
    with _names_checked(path):
        return os.lstat(path)


@contextmanager
def _names_checked(path: Name) -> Iterator[None]:
    """A NUL and half characters, which no file system knows, are errors of the file like all others."""
    try:
        yield
    except ValueError as error:
        raise RefusedFileError(path, f"it is not a file name ({error}): choose another") from error
