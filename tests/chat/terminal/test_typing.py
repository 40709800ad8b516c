"""Texts are typed at the prompt, key by key."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path
from typing import Any

import pexpect
import pytest
from support.chats import ALT_ENTER, CHAT, CTRL_C, CTRL_J, DEMO, PASTE, PASTED, TAB, UP

from mlxrunner.templates.messages import PlainMessage
from mlxrunner.tokenizer import load_tokenizer


def test_line_editing(open_screen: Any, tmp_path: Path) -> None:
    """Several lines by three ways, a line given up, completion, suggestion, history."""
    screen = open_screen(*CHAT, size=(300, 30))  # paths stand on one line
    screen.prompt()
    screen.child.send(f"My name{CTRL_J}is{ALT_ENTER}Ana.\r")
    screen.until("... is\n... Ana.\n").until("Nice to meet you").prompt()
    screen.child.send('"""What is\rmy name?\r"""\r')
    screen.until('>>> """What is\n... my name?\n... """\n').until("Your name is Ana.").prompt()
    screen.child.send("half a line")
    screen.until(">>> half a line")
    screen.child.send(CTRL_C)
    screen.prompt()
    assert screen.say("/show").splitlines()[-4:] == [
        "   1 user      My name is Ana.",
        "   2 assistant Nice to meet you.",
        "   3 user      What is my name?",
        "   4 assistant Your name is Ana.",
    ]
    screen.child.send("/expl" + TAB)
    screen.until(">>> /explain")
    screen.child.send("\r")
    screen.until("prompt tokens were reused").prompt()
    assert (
        screen.say("/clera")
        == "error: no such command: /clera (did you mean /clear? /help lists them)"
    )
    (tmp_path / "a long name.txt").write_text("My dog is called Rex.")
    screen.child.send(f"/file {tmp_path}/a lo{TAB}")
    screen.until("a long name.txt")
    screen.child.send("\r")
    screen.until("is attached to the next message").prompt()
    screen.child.send(UP + UP + UP)
    screen.until(">>> /explain")
    screen.child.send(UP)
    screen.until(">>> /show")
    screen.child.send(CTRL_C)
    screen.prompt()
    assert screen.leave() == 0


def test_the_first_and_the_last_line_say_what_to_do(open_screen: Any) -> None:
    """The model, its context and /help; then how to continue. Three Ctrl-C leave."""
    screen = open_screen(*CHAT, size=(100, 30))
    screen.until("model demo, context window of 2048 tokens; /help lists the commands").prompt()
    screen.child.send("half a line" + CTRL_C)
    screen.until(">>> half a line").prompt()
    screen.child.send(CTRL_C)
    screen.until("to leave: Ctrl-D, /bye, or Ctrl-C twice more").prompt()
    assert screen.say("My name is Ana.").startswith("Nice to meet you")
    screen.child.send(CTRL_C)
    screen.until(lambda: screen.shown.count("twice more") == 2).prompt()
    screen.child.send(CTRL_C)
    screen.until("Ctrl-C once more").prompt()
    screen.child.send(CTRL_C)
    screen.until("the conversation is kept: mlxrunner chat --continue")
    screen.child.expect(pexpect.EOF)
    screen.child.close()
    assert screen.child.exitstatus == 0


def test_a_chat_that_was_just_saved_is_continued_by_its_name(open_screen: Any) -> None:
    screen = open_screen(*CHAT)
    screen.prompt()
    screen.say("My name is Ana.")
    assert screen.say("/save ana").startswith("saved as ana: 1 turn")
    screen.child.send("\x04")
    screen.until("the conversation is kept: mlxrunner chat --session ana")


def test_a_paste_of_many_lines_is_shown_as_one(open_screen: Any, tmp_path: Path) -> None:
    """The model, the conversation and the arrow keys have all of it; a backspace removes it."""
    screen = open_screen(*CHAT, size=(100, 50))
    screen.prompt()
    text = "\r".join(f"line {number}" for number in range(40))
    screen.child.send(f"{PASTE}{text}{PASTED}")
    screen.until(">>> [pasted text 1: 40 lines]")
    screen.child.send("\x7fMy name is ")
    screen.until(">>> My name is")
    screen.child.send(f"{PASTE}Ana.\r{text}{PASTED}\r")
    screen.until(">>> My name is [pasted text 2: 41 lines]").prompt()
    assert "line 39" in screen.say("/show 1")
    screen.leave()
    assert b"+line 39\n" in (tmp_path / "data" / "history").read_bytes()


@pytest.mark.exhaustive(0)
def test_texts_are_kept_for_the_next_time(open_screen: Any, tmp_path: Path) -> None:
    """Texts of several lines are whole, in the owner's file; no_input_history keeps none."""
    screen = open_screen(*CHAT)
    screen.prompt()
    screen.child.send(f"Hello!{CTRL_J}How are you?\r")
    screen.until("... How are you?").prompt()
    screen.leave()
    file = tmp_path / "data" / "history"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    before = file.read_bytes()
    again = open_screen(*CHAT)
    again.prompt()
    again.child.send(UP)
    again.until(">>> Hello!\n... How are you?")
    again.child.send(CTRL_C)
    again.prompt()
    again.leave()
    secret = open_screen(*CHAT, "--set", "no_input_history=true")
    secret.say("My name is Ana.")
    secret.leave()
    assert file.read_bytes() == before


def test_an_interrupt_from_outside_while_typing_is_a_ctrl_c(open_screen: Any) -> None:
    """`kill -INT`: the line is given up, the chat continues."""
    screen = open_screen(*CHAT)
    screen.prompt()
    screen.child.send("half a line")
    screen.until(">>> half a line")
    os.kill(screen.child.pid, signal.SIGINT)
    screen.prompt()
    assert screen.say("My name is Ana.") == "Nice to meet you."
    assert screen.leave() == 0


def test_what_is_edited_cannot_drive_the_terminal(open_screen: Any) -> None:
    """Characters that hide or reorder text are shown, and stay in the text."""
    screen = open_screen(*CHAT)
    screen.say("My name is \u202eAna.")
    screen.child.send("/edit 1\r")
    screen.until(r">>> My name is \u202eAna.")
    screen.child.send("\x7f!\r")
    screen.until("to evaluate").prompt()
    assert "user      My name is \\u202eAna!" in screen.say("/show")
    assert "\u202e" not in screen.raw


@pytest.mark.exhaustive(1)
@pytest.mark.parametrize("size", [(100, 30), (24, 8)], ids=["wide", "narrow"])
def test_a_paste_of_5000_lines_is_one_message(open_screen: Any, size: tuple[int, int]) -> None:
    """It does not fit the context, which is said in one line; what was there before still is."""
    screen = open_screen(*CHAT, "--set", "no_input_history=true", size=size)
    screen.say("My name is Ana.")
    screen.prompt()
    lines = [f"line {number}" for number in range(5000)]
    screen.child.send(PASTE + "\r".join(lines) + PASTED)
    screen.until(lambda: "[pasted text 1: 5000 lines]" in "".join(screen.shown.split("\n")))
    screen.child.send("\r")
    screen.until(lambda: "a longer --context" in " ".join(screen.shown.split())).prompt()
    messages: list[PlainMessage] = [
        {"role": "user", "content": "My name is Ana."},
        {"role": "assistant", "content": "Nice to meet you."},
        {"role": "user", "content": "\n".join(lines)},
    ]
    tokenizer = load_tokenizer(DEMO)
    tokens = len(tokenizer.encode(tokenizer.render(messages)))  # not a line of it was lost
    said = " ".join(" ".join(screen.everything[-12:]).split())
    assert f"error: the prompt has {tokens} tokens" in said
    assert "/clear" not in said
    assert screen.say("What is my name?") == "Your name is Ana."
    assert screen.leave() == 0


def test_a_resize_while_typing_and_while_answering(open_screen: Any, tmp_path: Path) -> None:
    """The line is drawn again in the new width, and the answers are right."""
    screen = open_screen(*CHAT)
    screen.prompt()
    screen.child.send("Hello! My name ")
    screen.until(">>> Hello! My name")
    screen.resize(18, 12)
    screen.child.send("is Ana.")
    screen.until(lambda: screen.lines[-2:] == [">>> Hello! My name", " is Ana."])
    screen.child.send("\r")
    screen.until("Nice to meet you").prompt()
    screen.child.send("What is my name?\r")
    screen.resize(90, 20)
    screen.until("Your name is Ana.").prompt()
    assert screen.leave() == 0


WARNS = """
import logging, time
from mlxrunner.chat.editor import Editor
from mlxrunner.chat.repl import commands
from mlxrunner.terminal.output import log_to_stderr
def idle(draft):
    while draft.text != "hello":
        time.sleep(0.01)
    logging.getLogger("mlxrunner").warning("a warning")
    draft.wait_until_over()
log_to_stderr(logging.WARNING)
editor = Editor(commands(), lambda name, before: [])
print("read:", editor.read(idle))
"""


def test_what_is_logged_while_the_user_types_goes_above_the_line(open_screen: Any) -> None:
    """Not into it, where it would look like a part of the text."""
    screen = open_screen("-c", WARNS).prompt()
    screen.child.send("hello")
    screen.until(lambda: screen.lines == ["a warning", ">>> hello"])
    screen.child.send("\r")
    screen.until(lambda: screen.lines[-1:] == ["read: hello"])
    assert screen.lines == ["a warning", ">>> hello", "read: hello"]
