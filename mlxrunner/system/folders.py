"""Find or make the folders of a user's files. Only their owner can read them."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mlxrunner.errors import ReadError
from mlxrunner.system.reading import open_file, read_json
from mlxrunner.system.writing import open_new, sealed, whole_sync, written


def data_folder() -> Path:
    """Return this program's folder for the user's data, made if necessary with mode 0700.

    It is $MLXRUNNER_DATA if set, ~/Library/Application Support/mlxrunner on macOS, and otherwise
    $XDG_DATA_HOME/mlxrunner (~/.local/share/mlxrunner). Raise OSError if it can't be made.
    """
    if chosen := os.environ.get("MLXRUNNER_DATA"):
        try:
            folder = Path(chosen).expanduser()
        except RuntimeError as error:  # the home of an unknown user
            raise OSError(f"MLXRUNNER_DATA names {chosen}: {error}") from error
    elif sys.platform == "darwin":
        folder = Path.home() / "Library" / "Application Support" / "mlxrunner"
    else:
        folder = (
            Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "mlxrunner"
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def cache_folder() -> Path:
    """Return $XDG_CACHE_HOME/mlxrunner, by default in ~/.cache. It may not exist.

    It holds what the program can do without. Raise RuntimeError if there is no home directory.
    """
    folder = os.environ.get("XDG_CACHE_HOME")
    return (Path(folder) if folder else Path.home() / ".cache") / "mlxrunner"


class CacheFile:
    """A JSON file in the cache folder, mode 0600, with a value for each of the `most` newest keys.

    A file that is missing, damaged or changed by hand has no values.
    """

    def __init__(self, name: str, most: int = 100) -> None:
        self._name, self._most = name, most

    @property
    def path(self) -> Path:
        """The path of the file. Raise RuntimeError if there is no home directory."""
        return cache_folder() / self._name

    def values(self) -> dict[str, Any]:
        """Return all values by key; none if the file can't be read."""
        with suppress(ReadError, RuntimeError):
            found = read_json(self.path, LARGEST, sealed=True)
            if isinstance(found, dict):
                return found
        return {}

    def keep(self, key: str, value: Any) -> None:
        """Keep a value that JSON can hold. Do nothing if the file can't be written."""
        values = {name: one for name, one in self.values().items() if name != key} | {key: value}
        text = json.dumps(dict(list(values.items())[-self._most :]), indent=1)
        with suppress(OSError, RuntimeError):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with written(self.path) as stream:
                stream.write(sealed(text))


LARGEST = 2**20
"""Most bytes of such a file."""
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Folder:
    """An open directory, which is created first (mode 0700) if `make` is true and it is missing.

    The directory is closed, and so unlocked, when its last reference is dropped: no interrupt can
    leave it locked. Raise OSError if it is missing or a link.
    """

    def __init__(self, path: Path, *, make: bool = False) -> None:
        if make:
            with suppress(FileExistsError):
                path.mkdir(mode=0o700)
        self.path = path
        self._fd = os.open(path, FOLDER_FLAGS)  # noqa: TID251  # nothing in it
        self.close = weakref.finalize(self, os.close, self._fd)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def lock(self) -> bool:
        """Lock the directory until it is closed, and return True.

        Return False if another process holds the lock, or has removed the directory in the
        meantime.
        """
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self.path))
        except FileNotFoundError:
            return False

    def open(self, name: str) -> int:
        """Return a descriptor to read a file.

        Raise OSError if it is missing, a link or not a regular file.
        """
        try:
            return open_file(name, dir_fd=self._fd, follow=False)[0]
        except ReadError as error:
            raise _os_error(error) from None

    def write(self, name: str, write: Callable[[int], None], *, sync: bool = True) -> None:
        """Replace the file `name` by what `write(fd)` writes to the descriptor `fd`.

        See `replacing`.
        """
        with self.replacing(name, sync=sync) as fd:
            write(fd)

    @contextmanager
    def replacing(self, name: str, *, sync: bool = True, more: bool = False) -> Iterator[int]:
        """Yield a descriptor, and replace the file `name` by what the block writes to it.

        At its end the new content is on the disk, unless `sync` is False: then a power cut may
        damage it. With `more`, another file of the folder follows, and both are at its end. After
        an error the file is as it was. A later attempt removes what a killed process left behind.
        Only one writer at a time may write a name.
        """
        fresh = f".{name}.new"
        try:
            fd = open_new(fresh, dir_fd=self._fd)
        except FileExistsError:
            self.remove(fresh)
            fd = open_new(fresh, dir_fd=self._fd)
        try:
            try:
                yield fd
                if sync:
                    (os.fsync if more else whole_sync)(fd)
            finally:
                os.close(fd)
            os.rename(fresh, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except BaseException:
            self.remove(fresh)
            raise
        if sync and not more:
            whole_sync(self._fd)

    def size(self, name: str) -> int:
        """Return the size of a file in bytes, or 0 if it is missing."""
        try:
            return os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_size
        except FileNotFoundError:
            return 0

    def names(self) -> list[str]:
        """Return the names of all files. Several threads may call it at a time."""
        # A descriptor of its own: copies of one share their place in the directory.
        fd = os.open(".", FOLDER_FLAGS, dir_fd=self._fd)  # noqa: TID251  # nothing in it
        try:
            return os.listdir(fd)
        finally:
            os.close(fd)

    def stat(self, name: str = ".") -> os.stat_result:
        """Return what the system knows of a file, by default of the directory; follow no link.

        Raise OSError if it is missing.
        """
        return os.stat(name, dir_fd=self._fd, follow_symlinks=False)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)


def _os_error(error: ReadError) -> OSError:
    """Return the OSError of a file that can't be read.

    It is a new one: one that refers to itself, or to a local variable, keeps a directory open.
    """
    cause = error.__cause__
    if not isinstance(cause, OSError):
        return OSError(str(error))
    return OSError(cause.errno, cause.strerror, cause.filename)
