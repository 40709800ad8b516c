"""Commands that put files into messages, and messages into files or onto the clipboard."""

from __future__ import annotations

import base64
import json
import re
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from support.chats import FENCED, Do

from mlxrunner.chat.repl import Chat
from mlxrunner.terminal import control


def test_code_is_copied_from_the_last_answer_that_has_some(
    chat: Chat, do: Do, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last block, with a note of its message."""
    copied: list[str] = []

    def copy(text: str) -> str:
        copied.append(text)
        return "by hand"

    monkeypatch.setattr("mlxrunner.chat.commands.copy", copy)
    do("Hello!", "How are you?")
    none = "error: no answer has a block of code: /copy copies the whole last answer"
    assert do("/copy code") == [none]
    chat.conversation.answer_with(0, FENCED)
    do("Thanks!")
    assert do("/copy code") == ["copied 2 lines of code in message 2 by hand"]
    assert copied == ["x = 1\ny = 2\n"]
    assert do("/copy it") == ["error: /copy it: /copy copies the last answer, /copy code its code"]


def test_a_text_file_goes_into_the_message(chat: Chat, do: Do, tmp_path: Path) -> None:
    """With /file before it, so that it is evaluated while one types; with @ after it."""
    (tmp_path / "note.txt").write_text("My name is Ana.\n```\nx\n```")
    (tmp_path / "two words.txt").write_text("spaces")
    chat.conversation.options["max_tokens"] = 3
    lines = do(
        f"/file {tmp_path}/note.txt",
        "What is in it?",
        f"/file {tmp_path}/two words.txt",
        f"And @{tmp_path}/note.txt here?",
        "and @home?",
        "or @no/such.txt",
        f'both @"{tmp_path}/two words.txt" and @"{tmp_path}/two words.txt" and @"no such"',
    )
    users = [turn.user for turn in chat.conversation.history.turns]
    quoted = f"{tmp_path}/note.txt:\n````\nMy name is Ana.\n```\nx\n```\n````\n"
    assert users[0] == f"{quoted}\nWhat is in it?"
    assert users[1].startswith(f"{tmp_path}/two words.txt:\n```\nspaces\n```\n\nAnd @")
    assert users[1].endswith(f"here?\n\n{quoted}".rstrip("\n"))
    assert users[2:4] == ["and @home?", "or @no/such.txt"]
    assert users[4].endswith(f'and @"no such"\n\n{tmp_path}/two words.txt:\n```\nspaces\n```')
    assert users[4].count("\nspaces\n") == 1
    assert f"{tmp_path}/note.txt (25 B) is attached to the next message" in lines
    assert "no such file: no/such.txt; sent as text" in lines
    assert "no such file: no such; sent as text" in lines


def test_clearing_is_offered_only_where_it_makes_room(chat: Chat, do: Do, tmp_path: Path) -> None:
    """Clearing is offered unless the message itself is too long; waiting files are named first."""
    chat.conversation.options = {"overflow": "stop", "max_tokens": 3}
    (tmp_path / "a.txt").write_text("word " * 600)
    texts = [
        "word " * 3000,
        "half \udc80",
        *["word " * 800] * 2,
        f"/file {tmp_path}/a.txt",
        "Hello!",
    ]
    too_long, damaged, cut, due_to_turns, *_, with_files = do(*texts)[1:]
    assert too_long.endswith("with a longer --context")
    assert damaged.startswith("error: ")
    assert "/clear" not in damaged
    assert cut.startswith("(stopped at max_tokens 3: ")
    assert due_to_turns.endswith("; /undo removes turns, /clear all of them")
    assert with_files.endswith("; /file -d removes the attached files")


def test_files_that_wait_are_listed_and_dropped(chat: Chat, do: Do, tmp_path: Path) -> None:
    """A file that does not fit costs no conversation; a file waits once, as it was last."""
    first, second = tmp_path / "a b.txt", tmp_path / "c.txt"
    first.write_text("abc")
    second.write_text("word " * 990)
    attached = [f"/file {first}", f"/file {second}", f"/file {first}"]
    lines = do("My name is Ana.", *attached, "word " * 600, "/file")
    waiting = [
        f"{first} (3 B) is attached to the next message",
        f"{second} (4.95 kB) is attached to the next message",
    ]
    assert lines[1:6] == [waiting[0], *waiting, *waiting]
    assert lines[6].startswith("error: the prompt has")
    assert lines[7:] == waiting
    assert do(f"/file -d {second}") == waiting[:1]
    dropped = ["Your name is Ana.", "no file is attached to the next message"]
    assert do("/file -d", "What is my name?") == dropped
    assert len(chat.conversation.history.turns) == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfe\x00", "not a text (byte 0 is not UTF-8)"),
        (b"abc\x00def", "not a text (byte 3 is 0)"),
        (b"word " * 20_000, "100 kB are more than the context of 2048 tokens holds"),
        (b"word " * 5_000, "its 10002 tokens are more than the context of 2048 tokens holds"),
    ],
    ids=["binary", "zero", "huge", "long"],
)
def test_what_is_no_text_or_too_long_is_one_line(
    chat: Chat, do: Do, tmp_path: Path, content: bytes, said: str
) -> None:
    """The message is not sent without it."""
    file = tmp_path / "file"
    file.write_bytes(content)
    for line in (f"/file {file}", f"What is in @{file}"):
        (shown,) = do(line)
        assert shown.startswith(f"error: {file}: {said}")
    assert chat.conversation.history.turns == ()


def test_a_message_that_failed_keeps_its_files(chat: Chat, do: Do, tmp_path: Path) -> None:
    """The next one takes them."""
    (tmp_path / "a.txt").write_text("abc")
    chat.conversation.options["max_tokens"] = 3
    do(f"/file {tmp_path}/a.txt", "word " * 3000, "Hello!")
    assert chat.conversation.history.turns[0].user.startswith(f"{tmp_path}/a.txt:\n```\nabc")


def test_exports_are_whole_private_and_overwrite_nothing(
    chat: Chat, do: Do, tmp_path: Path
) -> None:
    """Markdown, and JSON that can be read again."""
    chat.conversation.system = "Be brief."
    markdown, as_json = tmp_path / "talk.md", tmp_path / "talk.json"
    lines = do("My name is Ana.", *(f"/export {file}" for file in (markdown, as_json, markdown)))
    assert lines[-1] == f"error: {markdown} is there already: /export -f {markdown} overwrites it"
    said = ("## System\n\nBe brief.", "## User\n\nMy name is Ana.", "## Assistant\n\nNice to meet")
    assert markdown.read_text() == "\n\n".join(said) + " you.\n"
    messages = chat.conversation.messages
    found = json.loads(as_json.read_text())
    assert found == {"model": "demo", "system": "Be brief.", "messages": messages}
    assert stat.S_IMODE(markdown.stat().st_mode) == 0o600
    assert do("Hello!", f"/export -f {markdown}")[-1] == f"2 turns written to {markdown}"
    assert "Hello!" in markdown.read_text()
    (refusal,) = do(f"/export {tmp_path}/nowhere/talk.md")
    assert refusal == f"error: {tmp_path}/nowhere/talk.md: there is no folder {tmp_path}/nowhere"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["talk.json", "talk.md"]


def test_a_name_that_begins_like_a_flag_is_a_name(
    do: Do, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It forces nothing, and is whole."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inal.md").write_text("mine")
    assert do("Hello!", "/export -final.md")[-1] == "1 turn written to -final.md"
    assert (tmp_path / "inal.md").read_text() == "mine"


def test_copy_says_by_what(
    chat: Chat, do: Do, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first program that works gets the answer without its thinking.

    With none of them, and no terminal, it is an error.
    """
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.delenv("SSH_TTY", raising=False)
    assert do("Hello!", "/copy")[-1].startswith(
        "error: there is no clipboard: neither pbcopy, wl-copy nor xclip works"
    )
    program = tmp_path / "xclip"
    program.write_text(f'#!/bin/sh\nexec /bin/cat > "{tmp_path}/copied"\n')
    program.chmod(0o700)
    *earlier, last = chat.conversation.history.turns
    changed = replace(last, answer="<think>x</think>\n\nHow é?")
    chat.conversation.history = replace(chat.conversation.history, turns=(*earlier, changed))
    assert do("/copy") == ["copied 6 characters with xclip"]
    assert (tmp_path / "copied").read_text() == "How é?"
    chat.conversation.answer_with(0, "Write </think> at the end.")
    do("/copy")
    assert (tmp_path / "copied").read_text() == "Write </think> at the end."


def test_a_terminal_can_be_the_clipboard(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(
        "SSH_TTY", "/dev/pts/0"
    )  # programs of this machine would reach the wrong one
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert control.copy("How é?") == "through the terminal (OSC 52), if it allows that"
    code = re.fullmatch("\x1b]52;c;(.*)\a", capsys.readouterr().out)
    assert code is not None
    assert base64.b64decode(code[1]).decode() == "How é?"


def test_files_go_into_a_message_that_is_edited(
    chat: Chat, do: Do, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting and named files go in once, however often a message is edited, without nesting."""
    chat.interactive = True
    monkeypatch.chdir(tmp_path)
    (tmp_path / "note.txt").write_text("My name is Ana.\n@other.py and @no/such.txt")
    (tmp_path / "other.py").write_text("x = 1")
    (tmp_path / "last.txt").write_text("last")
    chat.conversation.options["max_tokens"] = 3
    note = "note.txt:\n```\nMy name is Ana.\n@other.py and @no/such.txt\n```"
    do("Hello!", "I have a dog.", "/file last.txt", "/edit 1", "See @note.txt!")
    (turn,) = chat.conversation.history.turns
    assert turn.user == f"last.txt:\n```\nlast\n```\n\nSee @note.txt!\n\n{note}"
    assert chat.attachments.texts == {}
    assert not any(
        "no such file" in line for line in do("/edit 1", turn.user.replace("See", "Read"))
    )
    assert chat.conversation.history.turns[0].user == turn.user.replace("See", "Read")
