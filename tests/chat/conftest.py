"""A chat with the demo model, and its user."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.chats import TABLE
from support.typist import Typist

from mlxrunner import Runner
from mlxrunner.chat.conversation import Conversation
from mlxrunner.chat.repl import Chat


@pytest.fixture(scope="module")
def demo() -> Runner:
    return Runner.load("demo", reserve=False)


@pytest.fixture
def chat(demo: Runner) -> Chat:
    demo.reset()
    return Chat(Conversation(demo), model="demo", loading={"reserve": False})


@pytest.fixture
def do(chat: Chat, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Types texts; returns the lines that came, answers first."""

    def typed(*texts: str) -> list[str]:
        chat.reader = Typist(list(texts))
        chat.run(TABLE)
        out, err = capsys.readouterr()
        return [*out.splitlines(), *err.splitlines()]

    return typed
