"""/save, /load and an open session lose or overwrite no text unasked, whatever fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from support.checks import raising
from support.models import write_model
from support.waiting import PATIENCE_S

from mlxrunner import Runner
from mlxrunner.chat.conversation import Conversation
from mlxrunner.chat.repl import Chat, commands
from mlxrunner.chat.session_commands import Saving
from mlxrunner.errors import SessionError
from mlxrunner.models.files import read_config
from mlxrunner.models.resolve import DEMO_FOLDER
from mlxrunner.sessions.store import SessionStore

ANA, ZORBLIN, WHO = "My name is Ana.", "My name is Zorblin.", "What is my name?"


class Talk:
    """A chat that is kept: lines go in, what was said comes out, answers first."""

    def __init__(
        self,
        runner: Runner,
        store: SessionStore,
        capsys: Any,
        name: str | None = None,
        model: str = "demo",
    ) -> None:
        self.saving, self._capsys, self._open = Saving(store), capsys, ExitStack()
        self.chat = Chat(Conversation(runner), model=model, loading={"reserve": False})
        self._table, self._lines = commands(*self.saving.commands), []
        self.chat.reader = self
        resumed = self._open.enter_context(self.saving.opened(name))
        self.saving.begin(self.chat, resumed is not None)

    def read(self, idle: Any, default: str = "") -> str:
        if not self._lines:
            raise EOFError
        return self._lines.pop(0)

    def __call__(self, *lines: str) -> list[str]:
        self._capsys.readouterr()
        self._lines: list[str] = list(lines)
        self.chat.run(self._table)
        out, err = self._capsys.readouterr()
        return [*out.splitlines(), *err.splitlines()]

    def leave(self) -> None:
        """Leave the chat as Ctrl-D does."""
        self.saving.end(self.chat)
        self._open.close()

    def give_up(self) -> None:
        """End the chat as kill -9 does, but release the lock."""
        self._open.pop_all()
        self.saving._lock.close()


@pytest.fixture(scope="module")
def demo() -> Runner:
    return Runner.load("demo", reserve=False)


@pytest.fixture
def talk(
    demo: Runner, store: SessionStore, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Talk]]:
    """Return `talk(NAME)`, which opens a chat with that session and a store of its own."""
    begun: list[Talk] = []

    def begin(name: str | None = None, runner: Runner | None = None, **options: Any) -> Talk:
        demo.reset()
        begun.append(Talk(runner or demo, SessionStore(store.folder), capsys, name, **options))
        return begun[-1]

    yield begin
    for one in begun:
        with suppress(SessionError):
            one.leave()


Begin = Callable[..., Talk]


def users(store: SessionStore, name: str) -> list[str]:
    return [turn.user for turn in store.load(name).history.turns]


def test_a_load_that_fails_leaves_both_sessions_as_they_were(
    talk: Begin, store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed load the text goes to the open session, and the other one stays free."""
    one = talk("other")
    one(ANA)
    one.leave()
    one = talk("one")
    sessions, loading = one.saving.store, threading.Event()
    load = sessions.load

    def failing(*arguments: Any) -> None:
        loading.wait(PATIENCE_S)
        raise SessionError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(sessions, "save_cache", failing)
        patch.setattr(sessions, "load", lambda name: (loading.set(), load(name))[1])
        assert one(ZORBLIN, "/load other")[-1] == "error: no room; on the disk: all of 1 turn"
    assert one(WHO) == ["Your name is Zorblin."]
    assert (users(store, "other"), users(store, "one")) == ([ANA], [ZORBLIN, WHO])
    with store.lock("other"):
        pass
    assert one("/load other", WHO)[0] == "Your name is Ana."
    assert users(store, "other") == [ANA, WHO]
    with store.lock("one"):
        pass


def test_a_turn_that_found_no_room_is_saved_when_one_leaves(
    talk: Begin, store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room again by then."""
    one = talk("one")
    with monkeypatch.context() as patch:
        patch.setattr(
            "mlxrunner.sessions.store.write_all", raising(OSError(28, "No space left on device"))
        )
        assert "could not be saved: No space left on device" in one(ZORBLIN)[-1]
    assert not store.exists("one")
    one.leave()
    assert users(store, "one") == [ZORBLIN]


def test_what_another_chat_added_is_not_overwritten(talk: Begin, store: SessionStore) -> None:
    """/load, somebody else continues with the session and leaves, /save: only with -f."""
    first = talk("one")
    first(ZORBLIN)
    first.leave()
    mine, other = talk(), talk("one")
    mine("/load one")
    other(WHO, ANA)
    other.leave()
    assert mine("/save one") == [
        "error: session one was changed elsewhere: /save -f one overwrites it"
    ]
    assert users(store, "one") == [ZORBLIN, WHO, ANA]
    assert mine("/save -f one", "/save one")[0].startswith("saved as one: 1 turn")
    assert users(store, "one") == [ZORBLIN]


def test_what_somebody_damaged_is_not_overwritten(talk: Begin, store: SessionStore) -> None:
    """It is a session of that name, whatever is in it."""
    mine = talk()
    mine(ZORBLIN, "/save one")
    file = store.folder / "one" / "conversation.json"
    file.write_text("{")
    assert mine("/save one")[-1].startswith("error: session one was changed elsewhere")
    assert file.read_text() == "{"


def test_an_answer_that_failed_is_saved_at_once(talk: Begin, store: SessionStore) -> None:
    """It is in the conversation: the full context ended it."""
    one = talk("one", Runner.load("demo", 56, reserve=False))
    one.chat.conversation.options = {"overflow": "error"}
    said = one(ZORBLIN, WHO)
    assert said[-1].startswith("error: ")
    assert users(store, "one") == [ZORBLIN, WHO]
    one.give_up()


def test_an_answer_is_saved_though_the_window_is_gone(talk: Begin, store: SessionStore) -> None:
    """Nothing can be written there any more."""
    one = talk("one")

    class Gone:
        def write(self, text: str) -> None:
            raise OSError(5, "Input/output error")

        def close(self) -> None:
            raise OSError(5, "Input/output error")

    one.chat.view = Gone
    with pytest.raises(OSError, match="Input/output error"):
        one(ZORBLIN)
    assert users(store, "one") == [ZORBLIN]


def test_what_was_changed_is_not_given_up(talk: Begin, store: SessionStore) -> None:
    """An unsaved edit needs -f in any chat, as a turn does, and a saved one does not."""
    mine = talk()
    mine(ANA, "/save ana", "/clear", ZORBLIN, "/save zor")
    refused = (
        "error: the conversation is not saved (1 turn): /save NAME saves it, /load -f ana "
        "discards it"
    )
    for one in (mine, talk("own")):
        one("/load zor")
        one.chat.conversation.answer_with(0, "A long edit.")
        loads = "zor" if one.saving.name else "ana"
        assert one(f"/load {loads}") == [refused.replace("ana", loads)]
        assert one.chat.conversation.history.turns[0].answer == "A long edit."
        assert one(f"/load -f {loads}")[0].startswith(f"session {loads}: 1 turn")
        assert one("/load zor", "/load ana", "/load zor")[-1].startswith("session zor: 1 turn")
        one.leave()


def test_a_conversation_that_was_cleared_has_nothing_to_be_saved(talk: Begin) -> None:
    """No turn of it is left."""
    mine = talk()
    mine(ANA, "/save ana", ZORBLIN)
    assert mine("/clear", "/load ana")[-1].startswith("session ana: 1 turn")


def test_a_failed_turn_counts_as_said(talk: Begin) -> None:
    """In a chat without a session."""
    mine = talk(None, Runner.load("demo", 64, reserve=False))
    mine(ANA, "/save ana", "/clear")
    mine.chat.conversation.options = {"overflow": "error"}
    mine(ZORBLIN, WHO)
    assert mine("/load ana")[-1].startswith("error: the conversation is not saved (2 turns)")


def test_a_model_whose_files_are_gone_or_others_by_now(
    talk: Begin, store: SessionStore, tmp_path: Path
) -> None:
    """The text is saved, and caches of the loaded weights are not taken for the new ones'."""
    folder = tmp_path / "model"
    copytree(DEMO_FOLDER, folder)
    one = talk(None, Runner.load(str(folder), reserve=False), model=str(folder))
    one(ZORBLIN)
    (folder / "model.safetensors").rename(tmp_path / "elsewhere")
    assert one("/save rel") == ["saved as rel: 1 turn, 31 tokens"]
    assert users(store, "rel") == [ZORBLIN]
    write_model(folder, tokenizer=False, **dict(read_config(folder)))
    one(WHO, "/save rel")
    again = talk(None, Runner.load(str(folder), reserve=False), model=str(folder))
    assert again("/load rel")[-1].startswith(
        "session rel: 2 turns, its caches are dropped, its text is kept: other weights"
    )


def test_a_model_that_is_loaded_again_is_kept_as_the_first(
    talk: Begin, store: SessionStore, tmp_path: Path
) -> None:
    """/set context reads its files; so what is saved after it has caches of these."""
    one = talk()
    one(ZORBLIN, "/set context 600", WHO, "/save zor")
    assert talk()("/load zor")[-1].startswith("session zor: 2 turns, 62 tokens restored")


def test_saved_means_that_it_is_on_the_disk(
    talk: Begin, store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sessions' caches are on the disk before anything else is evaluated."""
    one = talk("one")
    sessions = one.saving.store
    save_cache, written = sessions.save_cache, []

    def slowly(name: str, *arguments: Any) -> None:
        time.sleep(0.2)
        save_cache(name, *arguments)
        written.append(name)

    monkeypatch.setattr(sessions, "save_cache", slowly)
    assert one(ZORBLIN, "/save two")[-1] == "saved as two: 1 turn, 31 tokens"
    assert sorted(written) == ["one", "two"]
    one(WHO)
    mine = talk()
    assert mine("/load two")[-1].startswith("session two: 1 turn, 31 tokens restored")
