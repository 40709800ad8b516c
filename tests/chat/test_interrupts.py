"""Ctrl-C, any number of times, at any line: there is a model afterwards, and the conversation."""

from __future__ import annotations

import dis
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
from support.sample import fewer

from mlxrunner.chat.conversation import Conversation
from mlxrunner.chat.repl import Chat, commands
from mlxrunner.errors import ModelError
from mlxrunner.sessions.session import History, SessionTurn
from mlxrunner.terminal.control import Interrupts
from mlxrunner.testing import PACKAGE, oracle_runner


class Presses:
    """Presses Ctrl-C before given lines of this package, counted again after each one."""

    def __init__(self, lines: list[int]) -> None:
        self._left, self.seen, self.most = lines, 0, 0

    def begin(self) -> None:
        self.seen = 0
        sys.settrace(self._trace)
        frame = sys._getframe(1)
        while frame is not None:
            frame.f_trace, frame = self._trace, frame.f_back  # type: ignore[assignment]

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line" and frame.f_code.co_code[frame.f_lasti] != dis.opmap["NOP"]:
            self.seen += 1
            self.most = max(self.most, self.seen)
            if self._left and self.seen == self._left[0]:
                del self._left[0]
                signal.raise_signal(signal.SIGINT)
        return self._trace


class Typed:
    """Gives the lines, and begins the presses when the first has been given."""

    def __init__(self, presses: Presses, *lines: str) -> None:
        self._presses, self._lines = presses, list(lines)

    def read(self, idle: Any, default: str = "") -> str:
        if not self._lines:
            sys.settrace(None)
            raise EOFError
        self._presses.begin()
        return self._lines.pop(0)


class PressedAgain(Interrupts):
    """Begins the presses again where the chat listens again, once they have begun."""

    def __init__(self, presses: Presses) -> None:
        super().__init__()
        self._presses = presses

    @contextmanager
    def listening(self) -> Iterator[None]:
        with super().listening():
            if self._presses.seen:
                self._presses.begin()
            yield


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Models by name, in no time, but as many lines; the names that were loaded."""
    loaded: list[str] = []

    def load(name: str, progress: Any = None, **options: Any) -> Any:
        if name == "broken":
            raise ModelError("broken: it is")
        loaded.append(name)
        runner = oracle_runner(**options)
        runner.name = name
        return runner

    monkeypatch.setattr("mlxrunner.chat.repl.Runner.load", load)
    monkeypatch.setattr("mlxrunner.chat.repl.plan_model", lambda name, **plan: None)
    monkeypatch.setattr("mlxrunner.chat.repl.must_fit", lambda plan: None)
    before = signal.getsignal(signal.SIGINT)
    yield loaded
    sys.settrace(None)
    signal.signal(signal.SIGINT, before)


def change_model(lines: list[int], name: str = "other") -> tuple[Chat, Presses, list[str]]:
    """Change the model of a chat, pressing at `lines`, and return what the keepers were told."""
    presses, told = Presses(lines), []
    conversation = Conversation(oracle_runner())
    conversation.history = History((SessionTurn("hello", "well"),))
    chat = Chat(conversation, model="first", interactive=True, loading={"context": 512})
    chat.after_load.append(lambda chat: told.append(chat.runner.name))
    chat.reader = Typed(presses, f"/model {name}")
    chat.interrupts = PressedAgain(presses)
    assert chat.run(commands()) == 0
    return chat, presses, told


@pytest.mark.exhaustive(0)
def test_a_change_of_models_that_is_interrupted_anywhere_leaves_one(
    load: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """All keepers know the old or the new model, and the conversation stays after any Ctrl-C."""
    _, counted, _ = change_model([])
    total, rng, kept = counted.most, random.Random(9), set()
    assert total > 30
    for line in range(1, total, fewer(1, 3)):
        for times in (1, 2 + line % 2) if line % 3 == 0 else (1,):
            chat, _, told = change_model([line, *(rng.randrange(1, 25) for _ in range(times - 1))])
            kept.add(chat.model)
            assert (
                chat.runner.name
                == {"first": "oracle" if not told else "first", "other": "other"}[chat.model]
            )
            assert not told or told[-1] == chat.model
            assert [turn.user for turn in chat.conversation.history.turns] == ["hello"]
            assert list(chat.runner.generate([5, 6, 7], max_tokens=2))
    assert kept == {"first", "other"}
    assert "internal error" not in capsys.readouterr().err


def test_a_model_that_can_not_be_loaded_gives_the_one_before_back(
    load: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the first Ctrl-C, or any other, hits that."""
    for line in range(200):
        chat, presses, told = change_model([line] if line else [], "broken")
        assert (chat.model, chat.runner.name) in (("first", "first"), ("first", "oracle"))
        assert told in ([], ["first"])
        if line > presses.most:
            break
    said = capsys.readouterr().err
    assert "error: broken: it is\n" in said
    assert "internal error" not in said


def test_without_any_model_the_chat_says_so_and_goes_on(
    load: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Any,
) -> None:
    """The chat can be written and another model chosen when the old one cannot be loaded again."""
    conversation = Conversation(oracle_runner())
    conversation.history = History((SessionTurn("hello", "well"),))
    chat = Chat(conversation, model="broken", interactive=True)
    presses = Presses([])
    chat.reader = Typed(
        presses,
        "/model broken",
        "hello?",
        "/show",
        f"/export {tmp_path}/talk.md",
        "/model other",
        "/undo",
    )
    assert chat.run(commands()) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("error: no model is loaded (broken: it is): /model NAME loads one") == 2
    assert "1 turn written" in said
    assert "model: other, context of 4096 tokens" in said
    assert "internal error" not in said
    assert "well" in (tmp_path / "talk.md").read_text()
