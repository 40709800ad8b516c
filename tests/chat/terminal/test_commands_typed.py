"""Commands say what they reuse, and each one works in a terminal."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import pytest
from support.chats import CHAT, CTRL_C

from mlxrunner.chat.repl import commands
from mlxrunner.chat.session_commands import Saving
from mlxrunner.sessions.store import SessionStore


def test_going_back_says_what_is_reused(open_screen: Any) -> None:
    """/undo, /edit, /retry, /branch, /switch and /clear say what they reuse, one by one."""
    screen = open_screen(*CHAT)
    screen.prompt()
    assert screen.say("/undo") == "error: there is no turn to remove"
    assert screen.say("/edit") == "error: there is nothing to edit yet"
    assert screen.say("/retry") == "error: there is no answer to repeat"
    screen.say("My name is Ana.")
    screen.say("I have a dog.")
    undone = screen.say("/undo")
    assert re.fullmatch(
        "1 turn removed, 1 turn left: (\\d+) of \\1 tokens reused, 0 to evaluate; /redo "
        "restores it",
        undone,
    )
    assert re.fullmatch(
        r"on branch other: \d+ of \d+ tokens reused, \d+ to evaluate", screen.say("/branch other")
    )
    screen.child.send("/edit 1\r")
    screen.until(lambda: screen.lines[-1] == ">>> My name is Ana.")
    screen.child.send("\x7f" * 4 + "Bo.\r")
    screen.until("Nice to meet you").prompt()
    assert re.search(
        r"\n\d+ of \d+ tokens reused, \d+ to evaluate\nNice to meet you.*\n>>>$", screen.shown
    )
    assert screen.say("What is my name?") == "Your name is Bo."
    switched = screen.say("/switch main")
    assert re.fullmatch(
        r"on branch main, 1 turn: \d+ of \d+ tokens reused, \d+ to evaluate", switched
    )
    assert screen.say("What is my name?") == "Your name is Ana."
    assert screen.say("/branch").splitlines() == ["* main", "  other"]
    assert (
        screen.say("/switch nowhere")
        == "error: there is no branch 'nowhere': there are main, other"
    )
    screen.child.send("/edit 2\r")
    screen.until(lambda: screen.lines[-1] == ">>> Nice to meet you.")
    screen.child.send(" Your cat is Tom.\r")
    screen.until("the answer of turn 1 is changed").prompt()
    assert (
        screen.say("/show").splitlines()[-1] == "   2 assistant Nice to meet you. Your cat is Tom."
    )
    retried = screen.say("/retry temperature=1.5 seed=3").splitlines()
    assert re.fullmatch(r"(\d+) of \d+ tokens reused, 1 to evaluate", retried[0])
    assert (
        screen.say("/retry")
        .splitlines()[0]
        .startswith("the temperature is 0, so the answer will be the same")
    )
    assert screen.say("/set seed 3").endswith("seed = 3")
    screen.say("/set temperature 1.5")
    again = "the seed is 3, so the answer will be the same: try /retry seed=4"
    assert screen.say("/retry").splitlines()[0] == again
    assert screen.say("/retry temperature=hot") == "error: temperature: 'hot' is not a number"
    assert screen.say("/clear").startswith("conversation cleared")
    assert screen.say("What is my name?") != "Your name is Ana."


@pytest.mark.exhaustive(0)
def test_every_command_works_in_a_terminal(open_screen: Any, tmp_path: Path) -> None:
    """Every command works typed one after the other, and a new one has to be typed here too."""
    (tmp_path / "note.txt").write_text("My cat is Tom.")
    tokens = r"\d+ of \d+ tokens reused, \d+ to evaluate"
    said = {
        "/help": "(?s)/undo .*/bye  .*Ctrl-C stops",
        "/system The user's name is Ana.": "system prompt: The user's name is Ana.",
        "What is my name?": r"Your name is Ana\.",
        "/set temperature 0.5": r"temperature = 0\.5",
        "/show": r"(?s)sampling  temperature 0\.5.*system    The user's name is Ana"
        r".*2 assistant Your name is Ana",
        "/set temperature default": r"temperature = 0\.0",
        "/think hide": "thinking is hidden; it is the template's default",
        "/stats": "(?s)last turn  .*history    exact; drift from the template: none",
        "/explain": r"\d+ of \d+ prompt tokens were reused",
        "/copy": r"copied 17 characters through the terminal \(OSC 52\), if it allows that",
        f"/export {tmp_path}/talk.md": f"1 turn written to {tmp_path}/talk.md",
        f"/file {tmp_path}/note.txt": "note.txt \\(14 B\\) is attached to the next message",
        "/file -d": "no file is attached to the next message",
        "/image": "no picture is attached to the next message",
        "/save trip": r"saved as trip: 1 turn, \d+ tokens",
        "/branch other": f"on branch other: {tokens}",
        "/undo": f"1 turn removed, 0 turns left: {tokens}",
        "/redo": f"restored, 1 turn: {tokens}",
        "/switch main": f"on branch main, 1 turn: {tokens}",
        "/retry temperature=0": rf"(?s){tokens}\nYour name is Ana\.",
        "/edit": ">>> What is my name\\?$",  # which Ctrl-C then gives up
        "/editor Hi!": ">>> Hi!$",
        "/model demo": "model: demo, context of 2048 tokens",
        "/clear": "conversation cleared",
        "/load -f trip": "session trip: 1 turn, ",
    }
    typed = {text.split()[0] for text in said if text.startswith("/")}
    assert typed | {"/bye"} == {
        command.name for command in commands(*Saving(SessionStore(tmp_path)).commands)
    }
    screen = open_screen(*CHAT, size=(300, 60), SSH_TTY="/dev/pts/0", EDITOR="true")
    for text, answer in said.items():
        if text == "/edit":
            screen.child.send("/edit\r")
            screen.until(lambda answer=answer: re.search(answer, screen.shown) is not None)
            screen.child.send(CTRL_C)
            screen.until("nothing changed").prompt()
        elif text.startswith("/editor"):
            screen.child.send(f"{text}\r")
            screen.until(lambda answer=answer: re.search(answer, screen.shown) is not None)
            screen.child.send(CTRL_C)
            screen.prompt()
        else:
            assert re.search(answer, screen.say(text)), text
    copied = re.search("\x1b]52;c;(.*?)\a", screen.raw)
    assert copied is not None
    assert base64.b64decode(copied[1]) == b"Your name is Ana."
    assert (tmp_path / "talk.md").read_text().endswith("## Assistant\n\nYour name is Ana.\n")
    screen.child.send("/bye\r")
    assert screen.end() == 0
