"""Choose the folder in which one process parks conversations of one model."""

from __future__ import annotations

import logging
import os
import stat
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

from mlxrunner.errors import SessionError
from mlxrunner.stored.folder import Folder
from mlxrunner.system.folders import cache_folder

PREFIX = "own-"
"""The beginning of the names of folders that go with their process."""

logger = logging.getLogger("mlxrunner")


class Place:
    """A locked folder, for this process only. `close` unlocks it, and removes a private one."""

    def __init__(self, folder: Folder, *, is_private: bool) -> None:
        self.folder, self.is_private = folder, is_private
        self.close = weakref.finalize(self, _remove if is_private else _close, folder)


def kept_place(parent: Path, name: str) -> Place:
    """Return the folder `name` in `parent`, both made if they are missing (mode 0700).

    If another process uses it, say so and return a private one. Raise SessionError if it can't be
    made, or if others can write to it.
    """
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = Folder(parent / name, make=True)
        found = folder.stat()
    except (OSError, ValueError) as error:  # a name may hold what no path can
        raise SessionError(f"conversations can't be parked in {parent}: {_said(error)}") from error
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise SessionError(
            f"conversations can't be parked in {folder.path}: it has to be yours, and others may "
            f"not write to it (it belongs to user {found.st_uid}, mode "
            f"{stat.S_IMODE(found.st_mode):04o}): chmod 700 it, or choose another folder"
        )
    if folder.lock():
        return Place(folder, is_private=False)
    folder.close()
    logger.warning(
        "another process parks conversations of this model in %s: those of this one are parked "
        "elsewhere, and go with it",
        parent,
    )
    return private_place()


def private_place() -> Place:
    """Return a new folder in the user's cache folder, which goes with this process.

    Folders of processes that were killed are removed first. Raise SessionError if none can be made.
    """
    try:
        parent = cache_folder() / "parked"
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in parent.glob(f"{PREFIX}*"):
            _remove_abandoned(path)
        while True:
            folder = Folder(Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent)))
            if folder.lock():  # or else another process took it for abandoned
                return Place(folder, is_private=True)
    except (OSError, RuntimeError) as error:
        raise SessionError(f"conversations can't be parked: {_said(error)}") from error


def _remove_abandoned(path: Path) -> None:
    """Remove the folder of a process that does not run any more."""
    with suppress(OSError), Folder(path) as folder:
        if folder.lock():
            _remove(folder)


def _remove(folder: Folder) -> None:
    with suppress(OSError):
        for name in folder.names():
            folder.remove(name)
        folder.path.rmdir()
    _close(folder)


def _close(folder: Folder) -> None:
    folder.close()


def _said(error: Exception) -> str:
    return " ".join(str(getattr(error, "strerror", None) or error).split())
