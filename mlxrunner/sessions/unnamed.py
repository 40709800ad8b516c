"""Chats that nobody has named. They are kept as sessions with names of their own, the last twenty.

Each chat has its own folder and locks it, so that two chats never write the same one.
"""

from __future__ import annotations

import re
import secrets
from contextlib import suppress
from datetime import datetime

from mlxrunner.errors import SessionError
from mlxrunner.sessions.store import SessionStore

MOST_CHATS = 20
"""Most chats without a name that are kept."""
_NAME = re.compile(r"unnamed-\d{8}-\d{6}-[0-9a-f]{4}")


def is_unnamed(name: str) -> bool:
    """Return True if `name` is that of a chat without a name."""
    return _NAME.fullmatch(name) is not None


def new_name() -> str:
    """Return a name for a chat that begins now."""
    return f"unnamed-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


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
        raise SessionError(f"{name!r} is how chats without a name are called: use another name")
