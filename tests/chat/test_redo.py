"""/redo brings back what a command took away, also in a later chat and after a kill."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
from support.chats import branch
from support.damage import kill_at_calls
from support.sample import fewer

from mlxrunner.chat.conversation import MOST, Branches, UndoHistory, UndoState
from mlxrunner.errors import SessionError
from mlxrunner.sessions.session import Branch
from mlxrunner.sessions.store import MOST_STATES, SessionStore

TOKENS = r"\d+ of \d+ tokens reused, \d+ to evaluate"


def test_states_are_taken_newest_first_and_for_one_branch() -> None:
    """Those that lack nothing are passed over, and each is taken once."""
    taken, full, cut = UndoHistory(), branch("a", "b"), branch("a")
    taken.push(UndoState("main", full))
    taken.push(UndoState("other", branch("x")))
    taken.push(UndoState("main", cut))
    assert taken.pop("main", branch()) == cut
    assert taken.pop("main", cut) == full
    assert taken.pop("main", cut) is None
    assert taken.pop("other", full) == branch("x")
    for number in range(MOST + 1):
        taken.push(UndoState("main", branch(str(number))))
    found = [taken.pop("main", branch()) for _ in range(MOST + 1)]
    assert found == [*(branch(str(number)) for number in range(MOST, 0, -1)), None]


@pytest.mark.parametrize(
    ("before", "after", "is_lost"),
    [
        (branch("a"), branch("a", "b"), False),
        (branch("a", "b"), branch("a"), True),
        (branch("a"), branch("b"), True),
        (branch(system="s"), branch(), True),
        (branch("a"), branch("a", system="s"), True),
        (branch(), branch("a"), False),
        (branch("a"), None, True),
        (branch(), None, False),
    ],
)
def test_a_state_is_lost_if_turns_or_the_system_prompt_are_gone(
    before: Branch, after: Branch | None, is_lost: bool
) -> None:
    assert UndoState("main", before).is_lost_in(after) is is_lost


def test_redo_brings_back_what_each_command_took(
    typed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """/undo, /clear, /system, /edit's kin: one after the other, with the tokens as they were."""
    one = typed()
    one.type("My name is Ana.", "I have a dog.")
    whole = one.chat.conversation.history
    one.type("/undo 99", "/redo")
    assert one.chat.conversation.history is whole
    one.type("/undo", "/clear", "/redo", "/redo")
    assert one.chat.conversation.history is whole
    one.type("/redo")
    assert "error: there is nothing to restore on branch main" in capsys.readouterr().err
    one.type("/system You are a parrot.", "/redo")
    assert (one.chat.conversation.history, one.chat.conversation.system) == (whole, None)
    one.type("/retry seed=3 temperature=2", "/redo")
    assert one.chat.conversation.history is whole


def test_redo_keeps_what_came_after_as_a_branch(
    typed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Going back and forth loses nothing."""
    one = typed()
    one.type("My name is Ana.", "/clear", "My name is Bo.", "/redo")
    assert one.users == ["My name is Ana."]
    assert "; the previous conversation is branch main~1" in capsys.readouterr().err
    one.type("/switch main~1")
    assert one.users == ["My name is Bo."]


def test_redo_drops_the_branch_that_kept_the_same_turns(typed: Any) -> None:
    """A session keeps what it would lose as a branch, until the turns are back."""
    one = typed()
    one.type("My name is Ana.", "I have a dog.", "/undo 2", session="trip")
    assert list(one.chat.branches) == ["main", "main~1"]
    two = typed()
    two.type("/redo", session="trip")
    assert two.users == ["My name is Ana.", "I have a dog."]
    assert list(two.chat.branches) == ["main"]


def test_branches_that_were_kept_go_when_they_are_not_needed() -> None:
    """Those that the user made stay."""
    branches = Branches(others={"mine": branch("a")})
    branches.keep("main", branch("a"))
    branches.keep("main", branch("b"))
    branches.keep("main", branch("a", system="s"))
    branches.drop_kept_within(branch("a", "c"))
    assert list(branches) == ["main", "main~2", "main~3", "mine"]


def test_system_in_the_middle_keeps_the_conversation(
    typed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says what is evaluated again, and the next prompt is that of the template."""
    one = typed()
    one.type("My name is Ana.", "I have a dog.")
    capsys.readouterr()
    one.type("/system You are a parrot.")
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "system prompt: You are a parrot."
    assert said[1].startswith("the conversation stays: ")
    assert said[1].endswith(" to evaluate")
    one.type("What is my name?")
    assert one.users == ["My name is Ana.", "I have a dog.", "What is my name?"]
    conversation = one.chat.conversation
    messages = [{"role": "system", "content": "You are a parrot."}, *conversation.messages[:-1]]
    tokenizer = conversation.runner.tokenizer
    prompt = conversation.renderer.asked(conversation.history, 2)
    assert prompt.text == tokenizer.render(messages)
    assert tokenizer.decode(conversation.runner.entry.tokens).startswith(prompt.text)


def test_a_template_without_a_system_prompt_changes_nothing(
    typed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of the template is the answer, and the conversation is as it was."""
    one = typed()
    one.type("My name is Ana.")
    before = one.chat.conversation.branch

    def render(messages: Any, **variables: Any) -> str:
        raise SessionError("no system prompt here")

    with monkeypatch.context() as patched:
        patched.setattr(one.chat.runner.tokenizer, "render", render)
        one.type("/system You are a parrot.")
    assert one.chat.conversation.branch == before


def test_a_session_keeps_the_last_states(typed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text only, for the owner only; a later chat brings them back. Ten are too slow to type."""
    assert MOST_STATES == 10
    most = fewer(MOST_STATES, 3)
    monkeypatch.setattr("mlxrunner.sessions.store.MOST_STATES", most)
    one = typed()
    one.chat.conversation.options = {"max_tokens": 2}
    texts = [text for number in range(most + 2) for text in (f"Hello {number}!", "/clear")]
    one.type("My name is Ana.", "/undo", *texts, session="trip")
    folder = one.store.folder / "trip"
    files = sorted(path.name for path in folder.glob("state-*.json"))
    assert files == sorted(f"state-{number}.json" for number in range(4, 4 + most))
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    states = one.store.load_states("trip")
    assert [state.history.turns[0].user for state in states[:2]] == [
        f"Hello {most + 1}!",
        f"Hello {most}!",
    ]
    assert not any(state.history.rendering.tokens for state in states)
    two = typed()
    two.type("/redo", session="trip")
    assert two.users == [f"Hello {most + 1}!"]
    two.type("What is my name?", "/redo", session="trip")
    assert two.users == [f"Hello {most}!"]


def test_damaged_states_are_left_out(typed: Any) -> None:
    """Also a link and a FIFO, for which nobody waits; the session itself opens."""
    one = typed()
    one.type("My name is Ana.", "/clear", session="trip")
    folder = one.store.folder / "trip"
    (folder / "state-2.json").write_text("{")
    (folder / "state-3.json").symlink_to("/etc/passwd")
    os.mkfifo(folder / "state-4.json")
    (folder / "state-5.json").touch()
    os.truncate(folder / "state-5.json", 2**40)
    assert len(one.store.load_states("trip")) == 1
    two = typed()
    two.type("/redo", "/clear", session="trip")
    assert (folder / "state-6.json").exists()


KILLED = """
from mlxrunner.sessions.session import Branch, History, Session, SessionTurn
from mlxrunner.sessions.store import MOST_STATES, SessionStore

def saying(text):
    return Session("demo", {"main": Branch(None, History((SessionTurn(text, "answer"),)))})

def prepare(folder):
    store = SessionStore(folder)
    store.save("trip", saying("old"))
    for number in range(MOST_STATES):
        store.save_state("trip", saying(str(number)))

def act(folder):
    store = SessionStore(folder)
    with store.lock("trip"):
        store.save_state("trip", store.load("trip"))
        store.save("trip", saying("new"))
"""


def test_a_kill_at_any_moment_loses_no_turn(tmp_path: Path) -> None:
    """The old text is in the session or in a state of it, at every step of the writing."""
    runs = kill_at_calls(KILLED, tmp_path / "runs")
    for run in runs:
        store = SessionStore(run.folder)
        found = [store.load("trip"), *store.load_states("trip")]
        assert len(found) >= 1 + MOST_STATES - 1
        assert "old" in [session.history.turns[0].user for session in found]
    assert len(runs) > 3
    assert runs[-1].is_whole
