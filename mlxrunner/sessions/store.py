"""Sessions on disk: a folder each, with the text in one file and the caches in others.

    <data folder>/sessions/NAME/
        conversation.json    text, settings, tokens: small, and written first
        rows-, state-, talk-...safetensors   the prefix-cache entry with its tokens, in pieces: may
                             be older, or missing; version 0.2 wrote one file, cache.safetensors
        state-N.json         the text before a command that took some of it away, the last ten
        picture-KEY.png      a picture that a message shows, by the SHA-256 of its name there

Text and caches may be of different times: the caches know their tokens, which are compared with the
next prompt. So losing the caches, or a crash between the two writes, costs no text. A lock on
the folder keeps others from writing a session that is open.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

from mlxrunner.errors import SessionError
from mlxrunner.sessions.session import Session
from mlxrunner.system.folders import Folder, data_folder
from mlxrunner.system.writing import sealed, write_all

NAME = re.compile(r"\w[\w.-]{0,47}")
TEXT, CACHE = "conversation.json", "cache.safetensors"
CACHE_FILE = re.compile(
    r"\.?(cache|(rows|state|talk)-[0-9a-f]{32}(-\d{1,9}){1,2})\.safetensors(\.new)?"
)
"""The names of the files of caches: pieces, and the one file of version 0.2."""
STATE = re.compile(r"state-(\d{1,9})\.json")
PICTURE = re.compile(r"picture-[0-9a-f]{16}\.png")
MOST_STATES = 10
"""Most states of a session; a new one takes the place of the oldest."""
MOST_PICTURE = 160 * 2**20
"""Most bytes of the file of a picture: what the largest takes that can be shown."""
MOST_TEXT = 64 * 2**20
"""Most bytes that the file of a conversation may have."""


class SessionStore:
    """The sessions in `folder`, by default the user's.

    Every error is a SessionError of one line.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._held: WeakValueDictionary[str, Folder] = WeakValueDictionary()

    @property
    def folder(self) -> Path:
        """The folder of the sessions, which is made when it is first needed."""
        try:
            folder = data_folder() / "sessions" if self._folder is None else self._folder
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise SessionError(
                f"no folder for sessions can be made: {_reason(error)}; name another in "
                "MLXRUNNER_DATA"
            ) from error
        return folder

    def names(self) -> list[str]:
        """Return the names of all sessions, in alphabetical order."""
        return sorted(
            path.parent.name
            for path in self.folder.glob(f"*/{TEXT}")
            if NAME.fullmatch(path.parent.name)
        )

    def exists(self, name: str) -> bool:
        """Return True if a session `name` is saved."""
        return (self.folder / checked(name) / TEXT).exists()

    def saved_ns(self, name: str) -> int:
        """Return when a session was saved, in nanoseconds since 1970, or 0 if it is missing."""
        try:
            return (self.folder / checked(name) / TEXT).stat(follow_symlinks=False).st_mtime_ns
        except OSError:
            return 0

    def load(self, name: str) -> Session:
        """Return a session. Raise SessionError if it is missing or damaged."""
        with self._open(name) as folder:
            return _read(folder, name, TEXT)

    def save(self, name: str, session: Session) -> None:
        """Write the text of a session to the disk, then set its `saved_at`.

        After a SessionError the old text is still there.
        """
        now = time.time()
        with self.lock(name) as folder:
            _write(folder, name, TEXT, replace(session, saved_at=now))
        session.saved_at = now

    def save_state(self, name: str, session: Session) -> None:
        """Write a state of a session's text beside it, and remove the oldest of too many.

        The state has its texts only, no tokens.
        """
        state = replace(session, branches=dict(session.branches), saved_at=time.time())
        state.forget_tokens()
        with self.lock(name) as folder:
            numbers = _states(folder)
            _write(folder, name, f"state-{max(numbers, default=0) + 1}.json", state)
            with _as_session_error(f"a state of the session {name!r} can't be removed"):
                for number in numbers[: max(len(numbers) + 1 - MOST_STATES, 0)]:
                    folder.remove(f"state-{number}.json")

    def load_states(self, name: str) -> list[Session]:
        """Return the states of a session, the newest first. A damaged one is left out."""
        found = []
        with self._open(name) as folder:
            for number in reversed(_states(folder)):
                with suppress(SessionError):
                    found.append(_read(folder, name, f"state-{number}.json"))
        return found

    def save_pictures(self, name: str, pictures: Mapping[str, Callable[[], bytes]]) -> None:
        """Write the pictures of a session whose text is saved.

        `pictures`: functions that return the PNG of each, by its name in the texts. Those that are
        there already are not written again, and none is removed: a state may name it.
        """
        with (
            self.lock(name) as folder,
            _as_session_error(f"the pictures of the session {name!r} could not be saved"),
        ):
            there = set(folder.names()) if pictures else set()
            for one, content in pictures.items():
                if (file := _picture_file(one)) not in there:
                    folder.write(file, partial(write_all, data=content()))

    def load_pictures(self, name: str, named: Iterable[str]) -> dict[str, bytes]:
        """Return the files of the pictures that are there, by their names in the texts.

        One that is too large is left out. Raise SessionError if one can't be read.
        """
        found = dict[str, bytes]()
        with (
            self._open(name) as folder,
            _as_session_error(f"the pictures of the session {name!r} can't be read"),
        ):
            for one in named:
                with (
                    suppress(FileNotFoundError),
                    os.fdopen(folder.open(_picture_file(one)), "rb") as stream,
                ):
                    content = stream.read(MOST_PICTURE + 1)
                    if len(content) <= MOST_PICTURE:
                        found[one] = content
        return found

    def save_cache(self, name: str, write: Callable[[Folder], object]) -> None:
        """Write the caches of a session whose text is saved; see `mlxrunner.sessions.caches`.

        After a SessionError the old caches are still there.
        """
        with (
            self.lock(name) as folder,
            _as_session_error(f"the caches of the session {name!r} could not be saved"),
        ):
            write(folder)

    def folder_of(self, name: str) -> Folder:
        """Return the open folder of a session. Raise SessionError if it is missing."""
        return self._open(name)

    def drop_cache(self, name: str) -> None:
        """Remove the caches of a session. Its text stays."""
        with (
            self.lock(name) as folder,
            _as_session_error(f"the caches of the session {name!r} can't be removed"),
        ):
            for file in filter(CACHE_FILE.fullmatch, folder.names()):
                folder.remove(file)

    def nbytes(self, name: str) -> tuple[int, int]:
        """Return the sizes of the text with its pictures, and of the caches, in bytes."""
        with self._open(name) as folder, _as_session_error(f"the session {name!r} can't be read"):
            names = folder.names()
            pictures, caches = filter(PICTURE.fullmatch, names), filter(CACHE_FILE.fullmatch, names)
            sizes = folder.size(TEXT) + sum(map(folder.size, pictures))
            return sizes, sum(map(folder.size, caches))

    def remove(self, name: str) -> None:
        """Remove a session. Raise SessionError if it is missing or open in a chat."""
        self._open(name).close()
        with self.lock(name) as folder, _as_session_error(f"the session {name!r} can't be removed"):
            for file in folder.names():
                folder.remove(file)

    @contextmanager
    def lock(self, name: str) -> Iterator[Folder]:
        """Lock a session, so that nobody else can write it. A missing session's folder is made.

        Locks may be nested. Another thread may nest a lock only while the thread that made this
        store holds the lock or the folder that is yielded. Raise SessionError if another chat holds
        the lock.
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
        with _as_session_error(f"the session {name!r} can't be opened"):
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


def _picture_file(name: str) -> str:
    """Return the name of the file of a picture, by its name in the texts."""
    return f"picture-{hashlib.sha256(name.encode()).hexdigest()[:16]}.png"


def _states(folder: Folder) -> list[int]:
    """Return the numbers of the states in a session's folder, the newest last."""
    matches = (STATE.fullmatch(file) for file in folder.names())
    return sorted(int(match[1]) for match in matches if match)


def _read(folder: Folder, name: str, file: str) -> Session:
    """Return the text of the session `name`, or a state of it, from a file in its folder."""
    with _as_session_error(f"the session {name!r} can't be read"):
        fd = folder.open(file)
        with os.fdopen(fd, "rb") as stream:
            nbytes = os.fstat(fd).st_size
            text = stream.read(MOST_TEXT) if nbytes <= MOST_TEXT else b""
    called = f"the session {name!r} ({folder.path / file})"
    remedy = f"restore that file, or remove the session: `mlxrunner sessions rm {name}`"
    if nbytes > MOST_TEXT:
        raise SessionError(
            f"{called} is too large: {nbytes} of at most {MOST_TEXT} bytes; {remedy}"
        )
    try:
        return Session.from_json(text)
    except SessionError as error:
        raise SessionError(f"{called} {error}; {remedy}") from error


def _write(folder: Folder, name: str, file: str, session: Session) -> None:
    text = sealed(session.to_json()).encode()
    if len(text) > MOST_TEXT:
        raise SessionError(
            f"the session {name!r} could not be saved: {len(text)} of at most {MOST_TEXT} "
            "bytes: /branch -d drops a branch, /export writes the text elsewhere"
        )
    with _as_session_error(f"the session {name!r} could not be saved"):
        folder.write(file, lambda fd: write_all(fd, text))


def checked(name: str) -> str:
    """Return `name`. Raise SessionError unless it can name a folder on every system."""
    if not NAME.fullmatch(name):
        raise SessionError(
            f"{name[:60]!r} can't be a session's name: letters, digits, . - and _, "
            "at most 48 of them, a letter or digit first"
        )
    return name


@contextmanager
def _as_session_error(what: str) -> Iterator[None]:
    """Turn an OSError into a SessionError of one line that begins with `what`."""
    try:
        yield
    except OSError as error:
        raise SessionError(f"{what}: {_reason(error)}") from error


def _reason(error: OSError) -> str:
    file = f" ({error.filename})" if error.filename else ""
    return f"{error.strerror or ' '.join(str(error).split())}{file}"


MOST_CHATS = 20
"""Most chats without a name that are kept."""
_NAME = re.compile(r"unnamed-\d{8}-\d{6}-(?:[0-9a-f]{4}){1,2}")


def is_unnamed(name: str) -> bool:
    """Return True if `name` is that of a chat without a name."""
    return _NAME.fullmatch(name) is not None


def new_name() -> str:
    """Return a name for a chat that begins now, which no other chat of the same second gets."""
    return f"unnamed-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(4)}"


def unnamed_chats(store: SessionStore) -> list[str]:
    """Return the names of the chats without a name, the one that was saved last first."""
    return sorted(filter(is_unnamed, store.names()), key=store.saved_ns, reverse=True)


def drop_oldest(store: SessionStore) -> None:
    """Remove all but the last `MOST_CHATS` chats. One that is open in another chat stays."""
    for name in unnamed_chats(store)[MOST_CHATS:]:
        with suppress(SessionError):
            store.remove(name)


def must_be_free(store: SessionStore, name: str) -> None:
    """Raise SessionError if a new session may not be called `name`, as chats without a name are."""
    if is_unnamed(name) and not store.exists(name):
        raise SessionError(f"{name!r} is a name of unnamed chats: use another name")
