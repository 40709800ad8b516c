"""No command of a chat wipes what its session has saved, unless it says so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.chats import Talk, content

from mlxrunner import cli
from mlxrunner.sessions.store import TEXT

WIPES = {
    "undo": ["/undo 99"],
    "clear": ["/clear"],
    "system": ["/system Be brief.", "/undo 2"],
    "undo twice": ["/undo", "/undo"],
    "clear and go on": ["/clear", "My name is Quib."],
    "undo and go on": ["/undo", "My name is Quib."],
    "undo on a branch": ["/branch other", "/undo 99", "/switch main", "/undo 99"],
    "two ways on": ["/undo", "My name is Quib.", "/undo 99", "I have a dog."],
}


@pytest.mark.parametrize("wipes", WIPES.values(), ids=WIPES)
def test_no_command_wipes_what_was_saved(talk: Talk, data: Path, wipes: list[str]) -> None:
    """The saved text is kept as a branch. A message names it, and other commands read it."""
    talk(["My name is Ana.", "I have a parrot."], "--session", "zor")
    before = [
        (turn["user"], turn["answer"])
        for turn in content(data, "zor")["branches"]["main"]["history"]["turns"]
    ]
    wiped = talk([*wipes, "/bye"], "--session", "zor")
    line = "the saved turns are branch main~1 (2 turns): /switch main~1 returns to it"
    assert wiped.stderr.count(line) == 1
    kept = content(data, "zor")["branches"]["main~1"]["history"]["turns"]
    assert [(turn["user"], turn["answer"]) for turn in kept] == before
    run = CliRunner().invoke
    assert "main~1" in run(cli.main, ["sessions", "list"]).stdout
    assert (
        "user: I have a parrot."
        in run(cli.main, ["sessions", "show", "zor", "--branch", "main~1"]).stdout
    )
    assert (
        "I have a parrot."
        in run(cli.main, ["sessions", "export", "zor", "-", "--branch", "main~1"]).stdout
    )
    wrong = run(cli.main, ["sessions", "show", "zor", "--branch", "x"])
    assert wrong.stderr.startswith("mlxrunner: the session 'zor' has no branch 'x': there are main")
    back = talk(["/switch main~1", "What is my name?"], "--session", "zor")
    assert "on branch main~1, 2 turns" in back.stderr
    assert back.stdout == "Your name is Ana.\n"


def test_a_session_whose_branch_is_empty_says_where_its_turns_are(talk: Talk) -> None:
    talk(["My name is Ana.", "/undo 99", "/bye"], "--session", "zor")
    line = "; branch main~1 has 1 turn: /switch main~1 opens it\n"
    assert line in talk(["/bye"], "--session", "zor").stderr
    talk(["/switch main~1", "/bye"], "--session", "zor")
    assert line not in talk(["/bye"], "--session", "zor").stderr


def test_an_answer_that_is_changed_or_tried_again_is_kept(talk: Talk, data: Path) -> None:
    """Where another one takes its place; not where the same one comes again."""
    talk(["My name is Ana."], "--session", "zor")
    same = talk(["/retry temperature=0"], "--session", "zor")
    assert "kept as" not in same.stderr
    other = talk(
        ["/retry temperature=3 seed=5 max_tokens=8", "/retry temperature=3 seed=6 max_tokens=8"],
        "--session",
        "zor",
    )
    assert other.stderr.count("the saved turns are branch main~") == 2
    answers = {
        branch["history"]["turns"][0]["answer"]
        for branch in content(data, "zor")["branches"].values()
    }
    assert len(answers) == 3
    assert "Nice to meet you." in answers


def test_an_explicit_flag_overwrites(talk: Talk, data: Path) -> None:
    """/save -f drops what was there, unless the chat itself has saved under that name."""
    result = talk(["My name is Ana.", "/save zor", "/clear", "My name is Quib.", "/save zor"])
    assert result.stderr.count("turns are branch main~1 (1 turn)") == 1
    assert list(content(data, "zor")["branches"]) == ["main~1", "main"]
    talk(["My name is Bo.", "/save -f zor"])
    assert list(content(data, "zor")["branches"]) == ["main"]
    assert "Ana" not in (data / "sessions" / "zor" / TEXT).read_text()


def test_the_branch_that_is_talked_on_can_not_be_dropped(talk: Talk) -> None:
    """A branch that is not there can not be dropped either."""
    result = talk(["/branch -d main", "/branch -d other", "/branch other", "/branch -d main"])
    assert result.stderr.splitlines()[:2] == [
        "error: branch main is in use: /switch to another one first",
        "error: there is no branch 'other': there is only main",
    ]
    assert result.stderr.splitlines()[3] == "branch main deleted, with 0 turns"


def test_a_session_without_a_turn_leaves_nothing(talk: Talk, data: Path) -> None:
    """A session whose model could not be loaded leaves nothing either."""
    talk([], "--session", "zor")
    talk(["Hello!"], "--session", "zor", "-m", "nowhere")
    assert os.listdir(data / "sessions") == []


def test_nothing_is_lost_without_being_said(talk: Talk, data: Path) -> None:
    """Another session is not overwritten, and unsaved turns are not given up, but with -f."""
    talk(["My name is Ana."], "--session", "ana")
    lines = [
        "My name is Zorblin.",
        "/save ana",
        "/load ana",
        "/save zor",
        "/save zor",
        "/load ana",
        "What is my name?",
        "/load -f zor",
    ]
    result = talk([*lines, "What is my name?"])
    said = result.stderr.splitlines()
    assert said[0] == "error: session ana exists already: /save -f ana overwrites it"
    assert (
        said[1] == "error: the conversation is not saved (1 turn): /save NAME saves it, "
        "/load -f ana discards it"
    )
    assert said[2].startswith("saved as zor: 1 turn")
    assert said[3].startswith("saved as zor: 1 turn")
    assert said[4].startswith("session ana: 1 turn")
    assert said[5].startswith("session zor: 1 turn")
    assert result.stdout.splitlines()[1:] == ["Your name is Ana.", "Your name is Zorblin."]
    assert len(content(data, "ana")["branches"]["main"]["history"]["turns"]) == 1
