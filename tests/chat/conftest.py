"""Chats with the demo model: one whose commands are typed, and the program in a pipe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.chats import TABLE, Talk, Typed, Typist, draw

from mlxrunner import Runner, cli
from mlxrunner.chat.conversation import Conversation
from mlxrunner.chat.repl import Chat
from mlxrunner.sessions.store import SessionStore


@pytest.fixture(scope="module")
def demo() -> Runner:
    return Runner.load("demo", reserve=False)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("pictures")
    return [draw(folder / f"{number}.png", number) for number in range(3)]


@pytest.fixture(scope="module")
def seeing() -> Runner:
    return Runner.load("demo-pictures", pictures=True, reserve=False)


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


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's data folder."""
    monkeypatch.setenv("MLXRUNNER_DATA", str(tmp_path / "data"))
    monkeypatch.delenv("MLXRUNNER_MODEL", raising=False)
    return tmp_path / "data"


@pytest.fixture
def talk(data: Path) -> Talk:
    """A chat that is given these lines, with these options."""

    def run(lines: list[str], *options: str) -> Result:
        result = CliRunner().invoke(
            cli.main, ["chat", "--no-reserve", *options], input="\n".join([*lines, ""])
        )
        assert "Traceback" not in result.stderr
        return result

    return run


@pytest.fixture
def typed(demo: Runner, tmp_path: Path) -> Any:
    """Return a new chat, each on the same store."""
    return lambda: Typed(demo, SessionStore(tmp_path / "sessions"))
