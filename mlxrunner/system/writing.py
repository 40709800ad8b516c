"""Write files: only to our own regular files, which only their owner can read.

All writing of this program goes through here. A stranger, or a mistake, may give a name another
meaning: a link, a FIFO, a device, a file of another user. None of them is written to, replaced or
waited for. A folder may be a link; the file itself may not.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import sqlite3
import stat
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from mlxrunner.errors import MlxrunnerError, OutputError
from mlxrunner.system.reading import kind_of

FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
OTHERS_READ = stat.S_IRGRP | stat.S_IROTH
SQLITE_ENDS = ("-journal", "-wal", "-shm")
"""Suffixes of the files that SQLite keeps beside a database, and trusts."""
UNFINISHED = ".mlxrunner"
"""The end of the name of a file that is being written, until it gets its own name."""
_GIVEN = re.compile(r"/dev/std(?P<name>out|err)|/(?:dev|proc/self)/fd/(?P<number>\d{1,6})")

Name = str | os.PathLike[str]


class RefusedFileError(OSError):
    """The error of a name that must not be written to. `strerror` gives the reason and a remedy."""

    def __init__(self, path: Name, why: str) -> None:
        super().__init__(errno.EPERM, why, os.fspath(path))

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def open_new(path: Name, *, dir_fd: int | None = None) -> int:
    """Make the file `path` with mode 0600 and return its descriptor, for reading and writing.

    Raise FileExistsError if the name is taken.
    """
    with _names_checked(path):
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | FLAGS, 0o600, dir_fd=dir_fd)


def open_own(path: Name, *, append: bool = False, make: bool = True) -> int:
    """Open the file `path` and return its descriptor, for reading and writing.

    With `make`, a missing file is made with mode 0600. Others can't read the file from then on.
    Raise RefusedFileError for a link, for anything but a regular file, for another user's file, and
    for one that others may write to.
    """
    flags = os.O_RDWR | FLAGS | (os.O_APPEND if append else 0)
    for _ in range(100):  # retry while another program makes or removes it
        if make:
            with suppress(FileExistsError), _names_checked(path):
                return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            check_own(path)  # before it is opened: opening a device may act on it
            return _private(path, os.open(path, flags))
        except FileNotFoundError:
            if not make:
                raise
    raise RefusedFileError(
        path, "it comes and goes: another program makes and removes it, choose another name"
    )


def check_own(path: Name, *, replaced: bool = False) -> None:
    """Raise RefusedFileError for a name that must not be written to.

    Raise FileNotFoundError if nothing has the name. `replaced`: a new file will take the name; then
    others may have write access to the old one.
    """
    with _names_checked(path):
        _check(path, os.lstat(path), replaced=replaced)


def is_stream(path: Name) -> bool:
    """Return True if `path` is written to as a stream, and never replaced.

    These are the descriptors that this program was given (/dev/stdout, and /dev/fd/N for
    `>(command)`), and the null device.
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
    """Open the stream `path` and return a new descriptor.

    Raise RefusedFileError if it is closed, open for reading only, or no longer the null device.
    """
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
    """Connect to the SQLite file `path`, or make it if it is `new`.

    Raise RefusedFileError if it, or a file beside it, belongs to another user.
    """
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
    """Open a file without a name, which vanishes with the process. Or raise OutputError."""
    with write_errors_as(OutputError, "a temporary file (TMPDIR)"):
        return tempfile.TemporaryFile()


def open_temporary_database() -> sqlite3.Connection:
    """Open a SQLite file without a name, which vanishes with the process."""
    return sqlite3.connect("", timeout=0, isolation_level=None)


@contextmanager
def write_errors_as(kind: type[MlxrunnerError], file: Name) -> Iterator[None]:
    """Raise an error of this kind, in one line that names the file, for one of the system.

    A pipe that nobody reads any more is left as it is.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise kind(f"{os.fspath(file)}: can't be written: {why_not(error, file)}") from error


def why_not(error: OSError, file: Name) -> str:
    """Return why `file` can't be written, which may be that its folder does not exist."""
    folder = missing_folder(file) if error.errno == errno.ENOENT else ""
    return f"there is no folder {folder}" if folder else error.strerror or str(error)


def missing_folder(file: Name) -> str:
    """Return the name of the folder of `file` if there is no such folder, else ""."""
    folder = os.path.dirname(os.fspath(file))
    return folder if folder and not os.path.isdir(folder) else ""


@contextmanager
def written(
    path: Path,
    *,
    force: bool = True,
    newline: str | None = None,
    shared: bool = False,
    sync: bool = True,
) -> Iterator[IO[str]]:
    """Yield a stream whose text becomes the file `path` (mode 0600) when the block ends well.

    `sync` waits until the file is on the disk. With `shared`, everybody who could read the old file
    can read the new one. Half surrogates, which JSON can name and no file can hold, are written as
    escapes.

    Until then the text is in a file beside it. Such files of processes that were killed are removed
    first.

    Raise FileExistsError, before the block or after it, if the name is taken and `force` is False.
    Raise RefusedFileError for anything but a regular file of ours, also for a link. Raise OSError
    if it can't be written. After an error the old file is unchanged.
    """
    path, mode = Path(path), 0o600
    with suppress(FileNotFoundError):
        with _names_checked(path):
            found = os.lstat(path)
        if not force:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        _check(path, found, replaced=True)
        mode |= found.st_mode & OTHERS_READ if shared else 0
    handle, name = _unfinished(path)
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


def _unfinished(path: Path) -> tuple[int, str]:
    """Make a file that is to get the name `path`. Return its descriptor and its present name.

    The descriptor holds a lock, which ends with the process: a file without one was left behind.
    """
    prefix = f".{path.name[:80]}."
    _remove_unfinished(path.parent, prefix)
    while True:
        handle, name = tempfile.mkstemp(UNFINISHED, prefix, path.parent)
        with suppress(OSError):  # not every file system has locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return handle, name
        os.close(handle)  # another process has removed it before it was locked


def _remove_unfinished(folder: Path, prefix: str) -> None:
    """Remove the unfinished files that nobody holds a lock of."""
    left = list[str]()
    with suppress(OSError), os.scandir(folder) as found:
        left = [
            one.path
            for one in found
            if one.name.startswith(prefix) and one.name.endswith(UNFINISHED)
        ]
    for name in left:
        with suppress(OSError):
            handle = open_own(name, make=False)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(name)
            finally:
                os.close(handle)


def sealed(text: str) -> str:
    """Return the text of a JSON object that has fields, with a checksum of them as its first one.

    `reading.unsealed` compares it.
    """
    rest = text[1:].lstrip()
    return f'{{"crc32": "{zlib.crc32(rest.encode()):08x}", {rest}'


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write every byte of `data`. Raise OSError if the disk is full."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view[: 2**26]) :]


def whole_sync(descriptor: int) -> None:
    """Wait until a file is on the disk.

    On macOS, fsync stops at the drive's cache, and not every volume supports the full call.
    """
    if hasattr(fcntl, "F_FULLFSYNC"):
        with suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def _give_name(name: str, path: Path, force: bool) -> None:
    """Give the file its name.

    Without `force` this makes a link, which fails if another program was faster. File systems
    without links rename the file.
    """
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
    """Check the open file again, now that nobody can exchange it, and make it private."""
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
            f"it is one of {status.st_nlink} names of the same file (hard links), and the others "
            "would change with it: "
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


@contextmanager
def _names_checked(path: Name) -> Iterator[None]:
    """Raise RefusedFileError for the name `-`, and for a NUL or a half surrogate in a name."""
    if os.fspath(path) == "-":
        raise RefusedFileError(path, "it does not mean standard output here: choose another name")
    try:
        yield
    except ValueError as error:
        raise RefusedFileError(path, f"it is not a file name ({error}): choose another") from error
