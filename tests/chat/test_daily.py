"""Leaving, help, editors and keys: what is typed every day, in a real terminal."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from support.chats import CHAT, CTRL_C, TAB, UP
from support.forking import run_program

from mlxrunner.chat.input import StdinReader, TypedText, is_continued
from mlxrunner.chat.view import code_blocks
from mlxrunner.errors import MlxrunnerError, ReadError
from mlxrunner.terminal.control import Keyboard, edit_outside

CTRL_X_E = "\x18\x05"


def editor(folder: Path, code: str) -> str:
    """Write an editor: a program that changes the text `t` of its file by `code`."""
    script = folder / "editor.py"
    script.write_text(
        f"import os, sys\np = sys.argv[-1]\nt = open(p).read()\n{code}\nopen(p, 'w').write(t)\n"
    )
    return f"{sys.executable} {script}"


@pytest.mark.parametrize("goodbye", ["/exit", "/quit", "/q", "exit", " quit "])
def test_a_goodbye_leaves(open_screen: Any, goodbye: str) -> None:
    """Those of other chats too, and with exit code 0."""
    screen = open_screen(*CHAT)
    screen.prompt()
    screen.child.send(goodbye + "\r")
    assert screen.end() == 0


def test_help_fits_a_small_screen(open_screen: Any) -> None:
    """With the prompt before and after it; /help all has every command, and /? is /help."""
    screen = open_screen(*CHAT, size=(80, 24))
    short = screen.say("/help")
    assert ">>> /help" in screen.lines
    assert short.splitlines()[0].startswith("/undo")
    assert "/explain" in short
    assert "/editor" not in short
    assert screen.say("/?") == short
    assert "/editor" in screen.say("/help all")
    said = screen.say("/help me please")
    assert said == (
        "error: /help me please: /help shows the common commands, /help all every command"
    )


def test_a_word_that_says_goodbye_in_a_pipe_is_a_text() -> None:
    """A list of words must not end in the middle; the commands do end it."""
    typed = "exit\nHello!\n/exit\nHello!\n"
    done = run_program(*CHAT, input=typed, text=True)
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 2)


def test_keys_of_every_day(open_screen: Any, tmp_path: Path) -> None:
    """A backslash continues, the arrow finds what begins alike, and settings are completed."""
    screen = open_screen(*CHAT)
    screen.prompt()
    screen.child.send("My name\\\r")
    screen.until(">>> My name\n...")
    screen.child.send("is Ana.\r")
    screen.until("Nice to meet you.").prompt()
    assert screen.say("/show 1") == "1 user:\nMy name\nis Ana."
    assert screen.say("/show 3") == "error: there is no message 3: the last one is 2"
    screen.say("/explain")
    screen.child.send("My" + UP)
    screen.until(lambda: screen.lines[-2:] == [">>> My name", "... is Ana."])
    screen.child.send(CTRL_C)
    screen.prompt()
    screen.child.send("/set history t" + TAB)
    screen.until(lambda: screen.lines[-1] == ">>> /set history template")
    screen.child.send(CTRL_C)
    screen.prompt()
    assert screen.leave() == 0


def test_a_text_is_written_in_the_users_own_editor(open_screen: Any, tmp_path: Path) -> None:
    """By /editor and by Ctrl-X Ctrl-E; it is sent when Enter says so, and nothing is left."""
    code = "t = t + 'is Ana.\\nI have a dog.\\n'; print(oct(os.stat(os.path.dirname(p)).st_mode))"
    screen = open_screen(*CHAT, EDITOR=editor(tmp_path, code), TMPDIR=str(tmp_path))
    screen.prompt()
    screen.child.send("/editor My name\r")
    screen.until(lambda: screen.lines[-3:] == [">>> My name", "... is Ana.", "... I have a dog."])
    assert "0o40700" in screen.raw
    screen.child.send("\r")
    screen.until("good friend").prompt()
    screen.child.send("My dog" + CTRL_X_E)
    screen.until(lambda: screen.lines[-3:] == [">>> My dog", "... is Ana.", "... I have a dog."])
    screen.child.send(CTRL_C)
    screen.prompt()
    assert list(tmp_path.glob("mlxrunner-*")) == []
    assert screen.leave() == 0


def test_an_editor_that_fails_changes_nothing(open_screen: Any, tmp_path: Path) -> None:
    """The text is there, and one line says why; Ctrl-C in the editor is the editor's."""
    waits = "import time\ntry:\n print('ready', flush=True)\n time.sleep(600)\n"
    waits += "except KeyboardInterrupt: sys.exit(3)"
    screen = open_screen(*CHAT, EDITOR=editor(tmp_path, waits))
    screen.prompt()
    screen.child.send("half a line" + CTRL_X_E)
    screen.until("ready")
    screen.child.send(CTRL_C)
    screen.until(lambda: screen.lines[-1] == ">>> half a line")
    assert "ended with code 3: the text is unchanged" in " ".join(screen.shown.split())
    screen.child.send(CTRL_C)
    screen.prompt()
    screen.child.send("/editor\r")
    screen.until(lambda: screen.raw.count("ready") == 2)
    screen.child.send(CTRL_C)
    screen.until(lambda: " ".join(screen.shown.split()).count("ended with code 3") == 2).prompt()
    assert screen.leave() == 0


@pytest.mark.parametrize(
    ("code", "error", "says"),
    [
        ("t = 'a\\0b'", ReadError, "is not a text: it has a byte 0"),
        ("open(p, 'wb').write(b'\\xff'); sys.exit(0)", ReadError, "not UTF-8"),
        ("os.remove(p); os.mkfifo(p); sys.exit(0)", ReadError, "FIFO"),
        ("sys.exit(4)", MlxrunnerError, "ended with code 4"),
    ],
    ids=["a byte 0", "not UTF-8", "a FIFO", "a failure"],
)
def test_what_an_editor_leaves_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, error: type, says: str
) -> None:
    """It is a file that another program wrote."""
    monkeypatch.setenv("VISUAL", editor(tmp_path, code))
    with pytest.raises(error, match=says):
        edit_outside("text", Keyboard())


@pytest.mark.parametrize("command", ["/nowhere/ed", "'", "/"])
def test_an_editor_that_cannot_be_started_is_an_error(
    monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """With its name, and with what to do."""
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", command)
    with pytest.raises(MlxrunnerError, match=r"can't be used .*: set EDITOR to another one"):
        edit_outside("text", Keyboard())


@pytest.mark.parametrize(
    ("text", "goes_on"),
    [
        ("a\\", True),
        ("a\\\\", False),
        ("a\\\\\\", True),
        ("\\", True),
        ("a\\ ", False),
        ("", False),
        ('"""a\\', False),
        ('/system """a\\', False),
        ("/system a\\", True),
    ],
)
def test_a_backslash_at_the_end_continues_a_line(text: str, goes_on: bool) -> None:
    """Two are a backslash, and between quotes one is, too."""
    assert is_continued(text) is goes_on


def test_lines_of_a_pipe_are_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the last one, and a line between quotes keeps its backslash."""
    read, write = os.pipe()
    os.write(write, b'a\\\nb\\\n\nc\n"""x\\\ny"""\n/system d\\\ne\nlast\\')
    os.close(write)
    with os.fdopen(read) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        reader, texts = StdinReader(), []
        with pytest.raises(EOFError):
            while True:
                texts.append(reader.read(TypedText.wait_until_over))
    assert texts == ["a\nb", "c", '"""x\\\ny"""', "/system d\ne", "last"]


def test_blocks_of_code_are_found() -> None:
    """Fences of any length, indented blocks, and one that is cut off."""
    text = "a\n```py\nx = 1\n```\nb\n\n    indented\n\n````\n```\n````\n~~~\ncut"
    assert code_blocks(text) == ["x = 1\n", "indented\n", "```\n", "cut"]
    assert code_blocks("no `code` here") == []
