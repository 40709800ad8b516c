"""Files that are there as a whole or not at all, readable by their owner alone, in a folder that is held open.

Every name is looked up in that folder and never through a link, whatever somebody else may have put there.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from mlxrunner.reading import ReadError, open_file
from mlxrunner.writing import open_new, whole_sync

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Folder:
    """An open directory. OSError where it is missing, or a link; `make`: create it (mode 0700) where it is missing.

    It is closed, and with that unlocked, when nobody refers to it any more, so that no interrupt can leave it locked.
    """

    def __init__(self, path: Path, *, make: bool = False) -> None:
        if make:
            with suppress(FileExistsError):
                path.mkdir(mode=0o700)
        self.path = path
        self._fd = os.open(path, FOLDER_FLAGS)
        self.close = weakref.finalize(self, os.close, self._fd)

    def __enter__(self) -> Folder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def lock(self) -> bool:
        """Take the folder until it is closed; False where somebody else has it, or has removed it meanwhile."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self.path))
        except FileNotFoundError:
            return False

    def open(self, name: str) -> int:
        """A file to be read. OSError where it is missing, a link, or no regular file."""
        try:
            return open_file(name, dir_fd=self._fd, follow=False)[0]
        except ReadError as error:
            cause = error.__cause__
            raise cause if isinstance(cause, OSError) else OSError(str(error)) from error

    def write(self, name: str, write: Callable[[int], None]) -> None:
        """`write(fd)` makes the new content; afterwards the file has it, on the disk, or an error came and the file is as it was.

        What a killed process left of an earlier attempt is replaced by the next one. One writer per name at a time.
        """
        fresh = f".{name}.new"
        if fresh in self.names():
            self.remove(fresh)
        fd = open_new(fresh, dir_fd=self._fd)
        try:
            try:
                write(fd)
                whole_sync(fd)
            finally:
                os.close(fd)
            os.rename(fresh, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except BaseException:
            self.remove(fresh)
            raise
        whole_sync(self._fd)

    def size(self, name: str) -> int:
        """Bytes of a file; 0 where there is none."""
        try:
            return os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_size
        except FileNotFoundError:
            return 0

    def names(self) -> list[str]:
        return os.listdir(self._fd)

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)
