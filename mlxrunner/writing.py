"""Files that are there whole or not at all, and that only their owner can read."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


@contextmanager
def written(path: Path, *, force: bool = True, newline: str | None = None) -> Iterator[IO[str]]:
    """A stream whose text becomes the file `path` (mode 0600), on the disk, when the block has ended well; of a link, what it points to.

    FileExistsError, before the block and after it, where there is a file already and not `force`. Half characters, which JSON can name and
    no file can hold, are written as escapes. OSError for what can't be written; the file is then as it was.
    """
    if not force and path.exists():
        raise FileExistsError(path)
    path = Path(os.path.realpath(path))
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(handle, "w", encoding="utf-8", errors="backslashreplace", newline=newline) as stream:
            yield stream
            stream.flush()
            whole_sync(stream.fileno())
        _give_name(name, path, force)
    finally:
        with suppress(OSError):
            os.unlink(name)


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
