"""The parts of the line editor that need no terminal."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from mlxrunner.chat.editor import ChatCompleter, Editor, FoldedPastes, PrivateHistory
from mlxrunner.chat.input import TypedText, is_open, quoted, unquoted
from mlxrunner.chat.repl import commands


def completions(text: str) -> list[str]:
    completer = ChatCompleter(
        commands(),
        lambda name, before: {"/switch": ["main", "other"], "/set": ["seed", "stop", "stop"]}.get(
            name, []
        ),
    )
    return [one.text for one in completer.get_completions(Document(text), CompleteEvent())]


@pytest.mark.parametrize(
    ("text", "offered"),
    [
        ("/ex", ["/explain", "/export"]),
        ("/switch ", ["main", "other"]),
        ("/switch o", ["other"]),
        ("/set s", ["seed", "stop"]),
        ("/nonsense x", []),
        ("hello", []),
        ("", []),
        ("ex", []),
    ],
)
def test_commands_and_what_they_take_are_completed(text: str, offered: list[str]) -> None:
    """From the table; a text is left alone."""
    assert completions(text) == offered


def test_paths_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a command that takes one, and behind @ anywhere."""
    (tmp_path / "notes.txt").touch()
    monkeypatch.chdir(tmp_path)
    assert completions(f"/file {tmp_path}/no") == ["tes.txt"]
    assert completions("/export no") == ["tes.txt"]
    assert completions("/export -f no") == ["tes.txt"]
    assert completions("what is in @no") == ["@notes.txt"]
    assert completions("what is in no") == []


def test_a_path_with_spaces_is_completed_in_quotes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder leaves the quotes open, as its path continues."""
    (tmp_path / "my notes").mkdir()
    (tmp_path / "my notes" / "of may.txt").touch()
    monkeypatch.chdir(tmp_path)
    assert completions("read @my") == ['@"my notes']
    assert completions('read @"my notes/') == ['@"my notes/of may.txt"']
    assert completions('read @"my notes/of m') == ['@"my notes/of may.txt"']
    assert completions('read @"my notes/of may.txt" and') == []


def test_a_second_interrupt_leaves_no_line_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second interrupt, while the first ends the line, does not stop the next from being read."""
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        editor = Editor(commands(), lambda name, before: [])

        def interrupt(*arguments: object) -> None:
            raise KeyboardInterrupt

        def interrupt_once_it_edits(draft: TypedText) -> None:
            while not editor._session.app.is_running:
                time.sleep(0.01)
            interrupt()

        with monkeypatch.context() as patched:
            patched.setattr("threading.Thread.join", interrupt)
            with pytest.raises(KeyboardInterrupt):
                editor.read(interrupt_once_it_edits)
        keys.send_text("hello\r")
        assert editor.read(TypedText.wait_until_over) == "hello"


@pytest.mark.parametrize(
    ("text", "open_", "sent"),
    [
        ("hello", False, "hello"),
        ('"""', True, ""),
        ('"""hello', True, "hello"),
        ('"""\na\nb', True, "a\nb"),
        ('"""a\nb"""', False, "a\nb"),
        ('"""\na\nb\n"""  ', False, "a\nb"),
        ('""""""', False, ""),
        ('say """ twice', False, 'say """ twice'),
    ],
)
def test_quotes_hold_several_lines_together(text: str, open_: bool, sent: str) -> None:
    """Only at the beginning of a text."""
    assert is_open(text) == open_
    assert unquoted(text) == sent


@pytest.mark.parametrize(
    "text", ["hello", "two\nlines ", '"""x""" is a docstring', '"""all of it"""', ' """ open']
)
def test_what_is_quoted_for_editing_is_the_same_text_again(text: str) -> None:
    """Also where it begins with quotes of its own."""
    assert unquoted(quoted(text)) == text
    assert not is_open(quoted(text))


def test_history_keeps_texts_whole_and_private(tmp_path: Path) -> None:
    """Also with half characters in them, and next to what another chat writes."""
    file = tmp_path / "history"
    texts = ["one", "two\n\n+lines", "três", "half \udc80"]
    for text in texts:
        PrivateHistory(file).store_string(text)
    assert list(PrivateHistory(file).load_history_strings()) == ["half ?", *texts[2::-1]]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@contextmanager
def as_anyone() -> Iterator[None]:
    """Give up the rights of root, who may write anywhere, for a while."""
    before = os.geteuid()
    os.seteuid(before or 65534)
    try:
        yield
    finally:
        os.seteuid(before)


def test_a_history_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    """Nothing is said: it is not a reason not to talk."""
    tmp_path.chmod(0o500)
    with as_anyone():
        PrivateHistory(tmp_path / "history").store_string("one")
    tmp_path.chmod(0o700)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["FIFO", "hole", "folder"])
def test_a_history_that_is_no_file_or_never_ends_is_done_without(kind: str, tmp_path: Path) -> None:
    """Nobody waits for it, or reads it whole."""
    file = tmp_path / "history"
    if kind == "FIFO":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
        PrivateHistory(file).store_string("one")
    else:
        file.touch()
        os.truncate(file, 2**40)
    assert list(PrivateHistory(file).load_history_strings()) == []


def test_a_long_paste_stands_in_the_line_as_one_name() -> None:
    """Every reader of the line gets the text; a short paste is itself."""
    pastes, text = FoldedPastes(), "\n".join(f"line {number}" for number in range(40))
    assert pastes.fold("a\nb") == "a\nb"
    first, second = pastes.fold(text), pastes.fold(text.upper())
    assert (first, second) == ("[pasted text 1: 40 lines]", "[pasted text 2: 40 lines]")
    assert pastes.unfold(f"Sum up {first} and {second}.") == f"Sum up {text} and {text.upper()}."
    assert pastes.unfold("[pasted text 3: 40 lines]") == "[pasted text 3: 40 lines]"
    assert pastes.at_the_end(f"Sum up {first}") == len(first)
    assert pastes.at_the_end("Sum up") == 0


def test_a_paste_that_names_a_paste_stays_as_it_is() -> None:
    """A text that holds the name of an earlier one is not unfolded within."""
    pastes = FoldedPastes()
    first = pastes.fold("a\n" * 20)
    second = pastes.fold(f"{first}\n" * 20)
    assert pastes.unfold(second) == f"{first}\n" * 20
