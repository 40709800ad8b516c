"""Chats without a name are kept and found again, and nobody else's session is lost."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.checks import raising
from support.forking import run_program
from support.models import write_model
from support.waiting import until

from mlxrunner.chat.session_commands import Saving
from mlxrunner.errors import SessionError
from mlxrunner.sessions.session import Session
from mlxrunner.sessions.store import (
    MOST_CHATS,
    SessionStore,
    drop_oldest,
    is_unnamed,
    must_be_free,
    new_name,
    unnamed_chats,
)

CHAT = ("-m", "mlxrunner", "chat", "--no-reserve")


def test_a_chat_without_a_name_is_kept_and_goes_on(typed: Any) -> None:
    """Its text, for the owner only, with what commands took away."""
    one = typed()
    one.type("/stats")
    assert one.store.names() == []
    assert list(one.store.folder.iterdir()) == []
    one.type("My name is Ana.", "/clear", "I have a dog.")
    (name,) = one.store.names()
    assert is_unnamed(name)
    folder = one.store.folder / name
    assert sorted(path.name for path in folder.iterdir()) == ["conversation.json", "state-1.json"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    two = typed()
    two.type("What is it called?", "/redo", goes_on=True)
    assert two.users == ["My name is Ana."]
    assert two.store.names() == [name]
    assert two.store.load(name).history.turns[0].user == "My name is Ana."


def test_a_chat_that_ends_cleared_keeps_its_text(typed: Any) -> None:
    """/clear and leaving is no wish to forget."""
    typed().type("My name is Ana.", "/clear")
    two = typed()
    two.type(goes_on=True)
    assert two.users == ["My name is Ana."]


def test_loading_a_session_begins_another_chat(typed: Any) -> None:
    """The turns that were kept before stay as they are."""
    one = typed()
    one.type("Hello!", session="trip")
    two = typed()
    two.type("My name is Ana.", "/load -f trip", "How are you?")
    saved = [[turn.user for turn in two.store.load(name).history.turns] for name in
             unnamed_chats(two.store)]  # fmt: skip  # one list
    assert sorted(saved) == [["Hello!", "How are you?"], ["My name is Ana."]]
    assert [turn.user for turn in two.store.load("trip").history.turns] == ["Hello!"]


def test_loading_keeps_an_unnamed_chat_and_says_where(
    typed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its present state is kept, so that nothing is given up."""
    typed().type("Hello!", session="trip")
    two = typed()
    two.type("My name is Ana.", "/undo", "I have a dog.", "/load trip")
    (kept,) = unnamed_chats(two.store)
    assert f"the chat so far is saved as {kept}: /load {kept} returns to it" in (
        capsys.readouterr().err
    )
    assert two.users == ["Hello!"]
    three = typed()
    three.type(f"/load {kept}")
    assert three.users == ["I have a dog."]


def test_the_last_twenty_chats_are_kept(tmp_path: Path) -> None:
    """The oldest go, but none that is open, and no session that has a name."""
    store, names = SessionStore(tmp_path), []
    store.save("unnamed-trip", Session("demo"))
    for number in range(MOST_CHATS + 3):
        # The first has a shorter name, as chats have that were saved earlier.
        names.append(new_name() if number else "unnamed-20261122-073401-5f2a")
        store.save(names[-1], Session("demo"))
        os.utime(tmp_path / names[-1] / "conversation.json", (number, number))
    assert unnamed_chats(store) == names[::-1]
    other = SessionStore(tmp_path)
    with other.lock(names[1]):
        drop_oldest(store)
    assert unnamed_chats(store) == [*names[:2:-1], names[1]]
    assert "unnamed-trip" in store.names()


def test_two_chats_go_on_with_two_conversations(tmp_path: Path) -> None:
    """The second takes the one before the last; a third has none."""
    store = SessionStore(tmp_path)
    names = [new_name(), new_name()]
    for number, name in enumerate(names):
        store.save(name, Session("demo"))
        os.utime(tmp_path / name / "conversation.json", (number, number))
    first, second = Saving(store), Saving(SessionStore(tmp_path))
    with first.opened(None, goes_on=True), second.opened(None, goes_on=True):
        assert [first.kept_as, second.kept_as] == names[::-1]
        third = Saving(SessionStore(tmp_path))
        with (
            pytest.raises(
                SessionError, match=f"{names[1]} is open in another chat, and so is {names[0]}; "
            ),
            third.opened(None, goes_on=True),
        ):
            raise AssertionError("it was opened")


def test_the_names_of_unnamed_chats_are_not_for_sessions(typed: Any, tmp_path: Path) -> None:
    """The program would remove it one day."""
    name = new_name()
    with pytest.raises(SessionError, match="use another name"):
        must_be_free(SessionStore(tmp_path), name)
    one = typed()
    one.type("Hello!", f"/save {name}")
    assert name not in one.store.names()


def test_a_full_disk_ends_the_keeping_and_not_the_chat(
    typed: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said once."""

    monkeypatch.setattr(SessionStore, "save", raising(SessionError("the disk is full")))
    one = typed()
    one.type("My name is Ana.", "Hello!")
    assert one.users == ["My name is Ana.", "Hello!"]
    assert (
        capsys.readouterr().err.count("this chat is not saved from now on: the disk is full") == 1
    )


def chat(typed: str, *arguments: str, data: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "MLXRUNNER_DATA": str(data)}
    return run_program(*CHAT, *arguments, input=typed, text=True, env=environment)


def test_chats_in_a_terminal_are_kept_and_those_in_a_pipe_are_not(
    open_screen: Any, tmp_path: Path
) -> None:
    """--continue shows the last turn and the model; --no-save keeps nothing."""
    data = tmp_path / "data"
    assert chat("Hello!\n", data=data).returncode == 0
    secret = open_screen(*CHAT, "--no-save")
    secret.say("My name is Bo.")
    assert secret.leave() == 0
    assert list(data.glob("sessions/*")) == []
    screen = open_screen(*CHAT, size=(80, 24))
    screen.say("My name is Ana.")
    screen.say("/clear")
    screen.say("My name is \u202eAna.")
    screen.kill()  # with SIGKILL
    again = open_screen(*CHAT, "--continue", size=(80, 24))
    again.prompt()
    name = next(data.glob("sessions/unnamed-*")).name
    shown = again.lines
    at = next(i for i, line in enumerate(shown) if line.startswith(f"session {name}: 1 turn"))
    assert "model demo, context window of 2048 tokens; /help lists the commands" in shown[at:]
    assert r">>> My name is \u202eAna." in shown[at:]
    assert "\u202e" not in again.raw
    assert again.say("/redo").startswith("restored, 1 turn: ")
    assert again.leave() == 0
    assert chat("What is my name?\n", "--continue", data=data).stdout == "Your name is Ana.\n"


@pytest.mark.exhaustive(0)
def test_another_model_of_a_session_is_asked_for(open_screen: Any, tmp_path: Path) -> None:
    """In a terminal by a question, which no earlier key answers; elsewhere by an option."""
    write_model(tmp_path / "model")
    data, other = tmp_path / "data", ("--session", "trip", "-m", str(tmp_path / "model"))
    chat("My name is Ana.\n", "--session", "trip", data=data)
    refused = chat("Hello!\n", *other, data=data)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--switch-model continues with " in refused.stderr
    switched = chat("/show\n", *other, "--switch-model", data=data)
    assert switched.returncode == 0
    assert f"model     {tmp_path}/model" in switched.stderr
    screen = open_screen(*CHAT, *other, imports=True)  # the keys come first
    screen.child.send("yes\r")
    screen.until("[y/N]")
    assert screen.child.isalive()
    screen.child.send("n\r")
    assert screen.end() == 2
    said = "nothing has changed: without -m, session trip continues with"
    assert said in " ".join(screen.raw.split())
    screen = open_screen(*CHAT, *other, "--max-tokens", "4")
    screen.child.send("What is my name?\r")
    screen.until("[y/N]")
    screen.child.send("y\r")
    screen.until(">>> What is my name?").prompt()
    assert "model     demo" not in screen.say("/show")
    assert screen.leave() == 0


@pytest.mark.exhaustive(0)
def test_two_kinds_of_going_on_are_refused(tmp_path: Path) -> None:
    """--continue and --session name two conversations."""
    done = chat("", "--continue", "--session", "trip", data=tmp_path)
    assert done.returncode == 2
    assert "use one of them" in done.stderr
    none = chat("", "--continue", data=tmp_path)
    assert none.returncode == 2
    assert "there is no unnamed chat to continue" in none.stderr


@pytest.mark.exhaustive(0)
def test_sessions_lists_unnamed_chats_last_and_shows_states(typed: Any, tmp_path: Path) -> None:
    """`show` and `export` take a state; `rm` removes an unnamed chat."""
    one = typed()
    one.type("My name is Ana.", "/clear", "Hello!")
    typed().type("Hello!", session="zoo")
    (name,) = unnamed_chats(one.store)
    environment = {**os.environ, "MLXRUNNER_DATA": str(tmp_path)}

    def sessions(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run_program("-m", "mlxrunner", "sessions", *arguments, text=True, env=environment)

    listed = json.loads(sessions("list", "--json").stdout)
    assert [session["name"] for session in listed] == ["zoo", name]
    assert "states    1 before commands" in sessions("show", name).stdout
    assert "user: My name is Ana." in sessions("show", name, "--state", "1").stdout
    assert "My name is Ana." in sessions("export", name, "-", "--state", "1").stdout
    missing = sessions("show", name, "--state", "2")
    assert f"the session '{name}' has no state 2: it has 1" in missing.stderr
    assert sessions("rm", name).returncode == 0
    until(lambda: unnamed_chats(one.store) == [])
