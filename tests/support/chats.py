"""Chats whose lines are typed by a test."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import Result
from support.typist import Typist

from mlxrunner import Runner
from mlxrunner.chat.commands.sessions import Saving
from mlxrunner.chat.conversation import Conversation
from mlxrunner.chat.repl import Chat
from mlxrunner.chat.start import commands
from mlxrunner.sessions.session import Branch, History, SessionTurn
from mlxrunner.sessions.store import TEXT, SessionStore

TABLE = commands()
Do = Callable[..., list[str]]
"""Types texts into a chat, and returns the lines that came."""
Talk = Callable[..., Result]
"""Runs a chat in a pipe, with the lines and options that it is given."""
FENCED = "Look:\n```py\nx = 1\ny = 2\n```\nand so on"
HIT = "last turn  hit (restored: session zor): 58 prompt tokens, 38 matched"


def content(data: Path, name: str) -> Any:
    return json.loads((data / "sessions" / name / TEXT).read_text())


def branch(*users: str, system: str | None = None) -> Branch:
    return Branch(system, History(tuple(SessionTurn(user, f"answer to {user}") for user in users)))


class Typed:
    """A chat with a store, to which texts are typed."""

    def __init__(self, demo: Runner, store: SessionStore) -> None:
        demo.reset()
        self.store = store
        self.chat = Chat(Conversation(demo), model="demo", loading={"reserve": False})

    def type(self, *texts: str, session: str | None = None, goes_on: bool = False) -> None:
        """Type the texts into a chat of its own, and leave it."""
        saving = Saving(self.store, keeps_unnamed=True)
        self.chat.after_turn, self.chat.after_command, self.chat.after_load = [], [], []
        with saving.opened(session, goes_on=goes_on) as resumed:
            saving.begin(self.chat, resumed is not None)
            self.chat.reader = Typist(list(texts))
            self.chat.run(commands(*saving.commands))
            saving.end(self.chat)

    @property
    def users(self) -> list[str]:
        return [turn.user for turn in self.chat.conversation.history.turns]
