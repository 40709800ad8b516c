"""Sessions on disk: a folder each, with the text in one file and the caches in another. No tensors.

    <data folder>/sessions/NAME/conversation.json     what was said, settings, tokens: written first, small
    <data folder>/sessions/NAME/cache.safetensors     what the entry held, with its own tokens: may be older, or missing

The two need not be of the same moment: the caches know their tokens, and are compared with a prompt as ever. So nothing that happens
between the two, or to the second, costs any text. A session that is open is locked, by a lock on its folder.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from weakref import WeakValueDictionary

from mlxrunner.errors import SessionError
from mlxrunner.folders import data_folder
from mlxrunner.sessions.files import Folder
from mlxrunner.sessions.session import Session
from mlxrunner.sessions.tensors import Buffer, TensorFile, write
from mlxrunner.writing import write_all

NAME = re.compile(r"\w[\w.-]{0,47}")
TEXT, CACHE = "conversation.json", "cache.safetensors"
MOST_TEXT = 64 * 2**20
"""Bytes of a conversation: more than that is no conversation."""


class Sessions:
    """The sessions in `folder` (default: the user's). Every error is a SessionError of one line."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._held: WeakValueDictionary[str, Folder] = WeakValueDictionary()

    @property
    def folder(self) -> Path:
        """Made when it is first needed."""
        try:
            folder = data_folder() / "sessions" if self._folder is None else self._folder
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise SessionError(f"no folder for sessions can be made: {_reason(error)}") from error
        return folder

    def names(self) -> list[str]:
        """In alphabetical order."""
        return sorted(
            path.parent.name
            for path in self.folder.glob(f"*/{TEXT}")
            if NAME.fullmatch(path.parent.name)
        )

    def exists(self, name: str) -> bool:
        return (self.folder / checked(name) / TEXT).exists()

    def load(self, name: str) -> Session:
        """SessionError where there is none of that name, or it is damaged."""
        with self._open(name) as folder, _said(f"the session {name!r} can't be read"):
            fd = folder.open(TEXT)
            with os.fdopen(fd, "rb") as file:
                if os.fstat(fd).st_size > MOST_TEXT:
                    raise SessionError(
                        f"the session {name!r} is too large: {os.fstat(fd).st_size} of at most {MOST_TEXT} bytes"
                    )
                text = file.read(MOST_TEXT)
        try:
            return Session.from_json(text)
        except SessionError as error:
            raise SessionError(f"the session {name!r} ({folder.path / TEXT}) {error}") from error

    def save(self, name: str, session: Session) -> None:
        """The text. Afterwards it is on the disk, and `session.saved_at` says so; after an error, what was there before is still there."""
        now = time.time()
        text = replace(session, saved_at=now).to_json().encode()
        if len(text) > MOST_TEXT:
            raise SessionError(
                f"the session {name!r} could not be saved: {len(text)} of at most {MOST_TEXT} bytes: "
                "/branch -d drops a branch, /export writes the text elsewhere"
            )
        with self.lock(name) as folder, _said(f"the session {name!r} could not be saved"):
            folder.write(TEXT, lambda fd: write_all(fd, text))
        session.saved_at = now

    def save_cache(
        self, name: str, arrays: Mapping[str, Buffer], metadata: Mapping[str, str]
    ) -> None:
        """The caches, of a session whose text is there. As `save`."""
        with (
            self.lock(name) as folder,
            _said(f"the caches of the session {name!r} could not be saved"),
        ):
            folder.write(CACHE, lambda fd: write(fd, arrays, metadata))

    def load_cache(self, name: str) -> TensorFile | None:
        """Open; None where there are none. SessionError where they are damaged."""
        with self._open(name) as folder:
            try:
                fd = folder.open(CACHE)
            except FileNotFoundError:
                return None
            except OSError as error:
                raise SessionError(f"the cache can't be read: {_reason(error)}") from error
        return TensorFile(fd)

    def drop_cache(self, name: str) -> None:
        with (
            self.lock(name) as folder,
            _said(f"the caches of the session {name!r} can't be removed"),
        ):
            folder.remove(CACHE)

    def nbytes(self, name: str) -> tuple[int, int]:
        """Bytes of the text and of the caches."""
        with self._open(name) as folder, _said(f"the session {name!r} can't be read"):
            return folder.size(TEXT), folder.size(CACHE)

    def remove(self, name: str) -> None:
        """SessionError where there is none, or somebody has it open."""
        self._open(name).close()
        with self.lock(name) as folder, _said(f"the session {name!r} can't be removed"):
            for file in folder.names():
                folder.remove(file)

    @contextmanager
    def lock(self, name: str) -> Iterator[Folder]:
        """Hold the session, which is made if it is not there: nobody else can open it to write.

        May be nested; a thread may do so only while the one that made these `Sessions` holds it, or the folder that is yielded.
        """
        if checked(name) in self._held:
            yield self._held[name]
            return
        folder = self._held[name] = self._lock(name)
        try:
            yield folder
        finally:
            with suppress(OSError):  # only an empty one can be removed
                folder.path.rmdir()

    def _lock(self, name: str) -> Folder:
        with _said(f"the session {name!r} can't be opened"):
            folder = Folder(self.folder / name, make=True)
        if folder.lock():
            return folder
        raise SessionError(
            f"the session {name!r} is open in another chat: close that, or use another name"
        )

    def _open(self, name: str) -> Folder:
        try:
            return Folder(self.folder / checked(name))
        except FileNotFoundError as error:
            raise SessionError(
                f"no session is called {name!r}; `mlxrunner sessions list` lists them"
            ) from error
        except OSError as error:
            raise SessionError(f"the session {name!r} can't be opened: {_reason(error)}") from error


def checked(name: str) -> str:
    """SessionError unless it can be the name of a folder, here and everywhere."""
    if not NAME.fullmatch(name):
        raise SessionError(
            f"{name[:60]!r} can't be a session's name: letters, digits, . - and _, at most 48 of them, a letter or digit first"
        )
    return name


@contextmanager
def _said(what: str) -> Iterator[None]:
    """An OSError as one line."""
    try:
        yield
    except OSError as error:
        raise SessionError(f"{what}: {_reason(error)}") from error


def _reason(error: OSError) -> str:
    return f"{error.strerror or ' '.join(str(error).split())}{f' ({error.filename})' if error.filename else ''}"
