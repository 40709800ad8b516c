"""Every command: what it does, what it says, and what it says when it can't."""

from __future__ import annotations

import base64
import json
import re
import stat
import threading
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from support.models import write_model
from support.typist import Typist
from support.waiting import until

from mlxrunner import Runner
from mlxrunner.chat.commands.reports import explanation, saved_seconds
from mlxrunner.chat.commands.table import is_open
from mlxrunner.chat.conversation import Conversation
from mlxrunner.chat.repl import Chat
from mlxrunner.chat.start import commands
from mlxrunner.chat.typeahead import Draft
from mlxrunner.config.layering import MODEL, layer
from mlxrunner.options import OVERFLOW
from mlxrunner.profiling.reasons import REASONS
from mlxrunner.results import CacheUse, MemoryUse, Timing, Usage
from mlxrunner.terminal import clipboard

TABLE = commands()


@pytest.fixture(scope="module")
def demo() -> Runner:
    return Runner.load("demo", reserve=False)


@pytest.fixture
def chat(demo: Runner) -> Chat:
    demo.reset()
    return Chat(Conversation(demo), model="demo", loading={"reserve": False})


@pytest.fixture
def do(chat: Chat, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Types texts; returns the lines that came, answers first."""

    def typed(*texts: str) -> list[str]:
        chat.reader = Typist(list(texts))
        chat.run(TABLE)
        out, err = capsys.readouterr()
        return [*out.splitlines(), *err.splitlines()]

    return typed


Do = Callable[..., list[str]]


FENCED = "Look:\n```py\nx = 1\ny = 2\n```\nand so on"


def test_code_is_copied_from_the_last_answer_that_has_some(
    chat: Chat, do: Do, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last block, with a note of its message."""
    copied: list[str] = []

    def copy(text: str) -> str:
        copied.append(text)
        return "by hand"

    monkeypatch.setattr("mlxrunner.chat.commands.files.copy", copy)
    do("Hello!", "How are you?")
    assert do("/copy code") == [
        "error: no answer has a block of code: /copy copies the last answer whole"
    ]
    chat.conversation.answer_with(0, FENCED)
    do("Thanks!")
    assert do("/copy code") == ["copied 2 lines of code in message 2 by hand"]
    assert copied == ["x = 1\ny = 2\n"]
    assert do("/copy it") == ["error: /copy it: /copy copies the last answer, /copy code its code"]


def test_a_message_is_shown_whole(chat: Chat, do: Do) -> None:
    """It is sent as it is, with its lines and spaces; there has to be one."""
    assert do("/show 1") == ["error: there is no message 1: nothing was said yet"]
    do("Hello!")
    text = f"{FENCED}   {'x' * 200}"
    chat.conversation.answer_with(0, text)
    assert do("/show 2") == ["2 assistant:", *text.splitlines()]
    assert do("/show x")[0].startswith("error: 'x' is not a whole number")


def test_the_values_of_a_setting_are_completed(chat: Chat) -> None:
    """The names once and in order, and then the values of that one."""
    words = {command.name: command.words for command in TABLE}
    names = list(words["/set"](chat, ""))
    assert len(set(names)) == len(names)
    assert names[-2:] == ["context", "history"]
    assert list(words["/set"](chat, "history ")) == ["exact", "template"]
    assert list(words["/set"](chat, "overflow ")) == [*OVERFLOW, "default"]
    assert list(words["/set"](chat, "seed ")) == ["default"]
    assert list(words["/set"](chat, "history exact ")) == []
    assert "temperature=" in words["/retry"](chat, "")


def test_help_has_every_command(do: Do) -> None:
    """From the table itself, each with a line of help."""
    lines = do("/help all")
    for command in TABLE:
        assert any(line.startswith(command.usage) and line.endswith(command.help) for line in lines)
        assert command.help


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/stat", "error: no such command: /stat (did you mean /stats? /help lists them)"),
        ("/stats2", "error: no such command: /stats2 (did you mean /stats? /help lists them)"),
        ("/exi", "error: no such command: /exi (did you mean /exit? /help lists them)"),
        ("/x-y_z", "error: no such command: /x-y_z (/help lists them)"),
        (
            "/clear the table please",
            'error: /clear takes no argument; """ around a text sends it as it is',
        ),
        (
            "/set system Be brief.",
            "error: the system prompt is no setting: /system Be brief. sets it",
        ),
        ('/system ""', "system prompt: (none)"),
        ("/set parameter top_k 7", "top_k = 7"),
        ("/undo x", "error: 'x' is not a whole number between 1 and 999999999"),
        ("/undo 0", "error: '0' is not a whole number between 1 and 999999999"),
        (
            "/undo " + "1" * 5000,
            "error: '11111111111111111111' is not a whole number between 1 and 999999999",
        ),
        ("/edit 1", "error: there is nothing to edit yet"),
        ("/retry", "error: there is no answer to try again"),
        ("/switch", "error: there is no branch '': there are main"),
        (
            "/branch two words",
            "error: 'two words' is not a name for a branch: it has to be one word",
        ),
        ("/branch main", "error: there is a branch main already: /switch main goes to it"),
        ("/stats", "no turn yet"),
        ("/explain", "no turn yet"),
        ("/copy", "error: there is no answer to copy yet"),
        ("/file", "no file goes with the next message"),
        (
            "/file -d a.txt",
            "error: a.txt does not wait for the next message: /file lists those that do",
        ),
        ("/file nowhere.txt", "error: nowhere.txt: no such file"),
        ("/file /dev/zero", "error: /dev/zero: is a device, not a regular file"),
        ("/file /", "error: /: is a directory, not a regular file"),
        (
            "/export",
            "error: /export FILE: which file? FILE.json for JSON, anything else is Markdown",
        ),
        ("/set nonsense 3", "error: there is no setting nonsense: there are max_tokens"),
        ("/set temperature warm", "error: temperature: 'warm' is not a number"),
        ("/set top_k 1.5", "error: top_k: '1.5' is not a whole number"),
        ("/set top_p 3", "error: top_p: 3.0 is out of range, it has to be between 0 and 1"),
        (
            "/set overflow sideways",
            "error: overflow: 'sideways' is not known, it has to be one of stop, shift, error",
        ),
        (
            "/set history perfect",
            "error: history: 'perfect' is not known, it has to be one of exact, template",
        ),
        ("/set context 1", "error: context: 1 is out of range"),
        ("/set stop [1", "error: stop: [1 is not readable as JSON"),
        ("/set stop [1]", "error: stop: each stop string has to be a text"),
        ("/model nowhere", "error: nowhere: no such model"),
        ("/think hard", "error: /think hard: has to be show, hide, on or off"),
        ("/think on", "error: this model's template has no switch for thinking"),
    ],
)
def test_what_cannot_be_done_is_one_line(do: Do, line: str, said: str) -> None:
    """With what to do instead where there is something; the chat goes on."""
    lines = do(line, "Hello!")
    assert lines[0] == "Hello! How can I help you?"
    assert len(lines) == 2
    assert lines[1].startswith(said)


@pytest.mark.parametrize(
    "text",
    [
        "/usr/bin",
        "/* a comment */",
        "/",
        "//",
        "/etc/hosts is a file",
        "1/2",
        '"""/clear"""',
        "",
        "/etc\npasswd",
        " /a\n/b",
    ],
)
def test_what_is_no_command_is_a_text(text: str) -> None:
    """A slash and letters, digits, - and _ are one; a path, or what is quoted, is not."""
    assert TABLE.parse(text) is None
    assert not commands().is_command(text)


def test_a_command_is_read_at_once_whatever_it_takes() -> None:
    """Also with more white space in it than anybody types."""
    parsed = TABLE.parse("/system a" + " " * 500_000 + "b ")
    assert parsed is not None
    assert (parsed[0].name, len(parsed[1])) == ("/system", 500_002)


@pytest.mark.parametrize("space", [" ", "\t", "\n", "  \n "])
def test_what_a_command_takes_may_be_of_many_lines(chat: Chat, do: Do, space: str) -> None:
    """The lines are those that were pasted."""
    do(f"/system{space}You are nice.\nAnd brief. ")
    assert chat.conversation.system == "You are nice.\nAnd brief."


@pytest.mark.parametrize(
    ("text", "argument"),
    [
        ('/system """You are nice.\nAnd brief."""', "You are nice.\nAnd brief."),
        ('/system\n"""\n/show\n"""', "/show"),
        ('/system """open', '"""open'),
        ('/system say """x"""', 'say """x"""'),
    ],
    ids=["lines", "own lines", "open", "within"],
)
def test_what_a_command_takes_may_be_quoted(text: str, argument: str) -> None:
    """It is open until the quotes are closed, as a text is."""
    parsed = TABLE.parse(text)
    assert parsed is not None
    assert parsed[1] == argument
    assert is_open(text) == (argument == '"""open')


def test_settings_hold_for_the_answers_that_follow(chat: Chat, do: Do) -> None:
    """Set, shown, taken back."""
    assert do(
        "/set stop .",
        "My name is Ana.",
        "/set stop default",
        "/set max-tokens 2",
        "Hello!",
        "/set stop",
    ) == [
        "Nice to meet you",
        "Hell",
        'stop = "."',
        "stop = (none)",
        "max_tokens = 2",
        "(cut off at max_tokens 2: /set max_tokens 4 allows more, /retry max_tokens=4 answers "
        "again)",
        "stop = (none)",
    ]
    assert do("/set seed 5", '/set stop "a\\n"', '/set stop ["x", "y"]') == [
        "seed = 5",
        'stop = "a\\n"',
        'stop = "x", "y"',
    ]
    assert chat.conversation.options == {"max_tokens": 2, "seed": 5, "stop": ("x", "y")}
    listed = do("/set")
    wanted = ("seed", "context", "top_p")
    assert [line.split() for line in listed if line.startswith(wanted)] == [
        ["context", "2048", "(default)"],
        ["top_p", "1.0", "(default)"],
        ["seed", "5", "(here)"],
    ]


def test_settings_say_where_they_come_from(chat: Chat, do: Do) -> None:
    """The model suggests, the user sets, and `default` goes back to what the model suggests."""
    chat.conversation.usual = layer({"temperature": 0.6, "repetition_penalty": 1.2}, MODEL)
    shown = do("/set temperature 0.5", "/set", "/set temperature default", "/show")
    assert "temperature         0.5             (here)" in shown
    assert "repetition_penalty  1.2             (model)" in shown
    assert "temperature = 0.6" in shown
    assert "sampling  temperature 0.6, repetition_penalty 1.2, as the model suggests" in shown


def test_greedy_is_one_word(chat: Chat, do: Do) -> None:
    """It overrides what the model suggests, its penalties included, and so does /retry greedy."""
    chat.conversation.usual = layer({"temperature": 50.0, "repetition_penalty": 1.9}, MODEL)
    lines = do("/set greedy", "My name is Ana.", "/retry greedy", "/set repetition_penalty")
    assert lines[:3] == ["Nice to meet you.", "Nice to meet you.", "sampling: greedy"]
    assert lines[-1] == "repetition_penalty = (none)"


def test_answers_are_sampled_as_the_model_suggests(
    chat: Chat, do: Do, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The options of an answer are those of the model where the user sets none."""
    asked: list[dict[str, Any]] = []
    answer = chat.runner.generate

    def generate(prompt: Any, **options: Any) -> Any:
        asked.append(options)
        return answer(prompt, **options)

    monkeypatch.setattr(chat.runner, "generate", generate)
    chat.conversation.usual = layer({"temperature": 0.6, "top_p": 0.9}, MODEL)
    chat.conversation.options = {"top_p": 0.5, "max_tokens": 2}
    do("Hello!")
    assert [(one["temperature"], one["top_p"]) for one in asked] == [(0.6, 0.5)]


def test_a_context_is_changed_by_loading_again(chat: Chat, do: Do) -> None:
    """The conversation stays, and goes on as if nothing had been."""
    lines = do("My name is Ana.", "/set context 512", "What is my name?", "/set context")
    assert lines[:2] == ["Nice to meet you.", "Your name is Ana."]
    assert lines[2:] == [
        "loaded again with a context of 512 tokens; the conversation is evaluated again",
        "context = 512",
    ]
    assert chat.loading["context"] == 512


def test_another_model_goes_on_with_the_texts(chat: Chat, do: Do, tmp_path: Path) -> None:
    """Its own tokens spell them; one that is broken leaves the present one in place."""
    write_model(tmp_path / "tiny")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    lines = do(
        "My name is Ana.",
        f"/model {tmp_path / 'broken'}",
        f"/model {tmp_path / 'tiny'}",
        "/set max_tokens 3",
        "Hi",
        "/set max_tokens default",
        "/model demo",
        "What is my name?",
    )
    assert lines[-1].startswith("model: demo")
    assert "Your name is Ana." in lines
    assert chat.model == "demo"
    assert len(chat.conversation.history.turns) == 3


def test_no_branch_keeps_tokens_of_another_model(chat: Chat, do: Do, tmp_path: Path) -> None:
    """Tokens beyond the new model's vocabulary are dropped, and no drift is reported before use."""
    write_model(tmp_path / "tiny")
    chat.conversation.options["max_tokens"] = 3
    lines = do(
        "My name is Ana.",
        "/branch b",
        f"/model {tmp_path / 'tiny'}",
        "/stats",
        "/switch main",
        "Hello!",
    )
    assert not [line for line in lines if line.startswith("error")]
    assert "history    exact; drift from the template: not known" in lines
    assert len(chat.conversation.history.turns) == 2
    asked = chat.conversation.asked
    assert list(asked.tokens) == chat.runner.tokenizer.encode(asked.text)


def test_a_text_file_goes_into_the_message(chat: Chat, do: Do, tmp_path: Path) -> None:
    """With /file before it, so that it is evaluated while one types; with @ behind it."""
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
    assert f"{tmp_path}/note.txt (25 B) goes with the next message" in lines
    assert "no such file: no/such.txt; sent as it is" in lines
    assert "no such file: no such; sent as it is" in lines


def test_clearing_is_offered_only_where_it_makes_room(chat: Chat, do: Do, tmp_path: Path) -> None:
    """Clearing is offered unless the message itself is too long; waiting files are named first."""
    chat.conversation.options = {"overflow": "stop", "max_tokens": 3}
    (tmp_path / "a.txt").write_text("word " * 600)
    too_long, damaged, cut, due_to_turns, *_, with_files = do(
        "word " * 3000,
        "half \udc80",
        "word " * 800,
        "word " * 800,
        f"/file {tmp_path}/a.txt",
        "Hello!",
    )[1:]
    assert too_long.endswith("with a longer --context")
    assert damaged.startswith("error: ")
    assert "/clear" not in damaged
    assert cut.startswith("(cut off at max_tokens 3: ")
    assert due_to_turns.endswith("; /undo takes turns back, /clear all of them")
    assert with_files.endswith("; /file -d drops the files that wait")


def test_a_longer_context_is_offered_as_the_chat_sets_it(do: Do) -> None:
    """The options of the command line are of no use at the prompt."""
    *_, full = do("/set overflow stop", "/set context 40", "My name is Ana.", "My name is Ana.")
    assert full.endswith(
        "; /set context 80 makes it longer, /undo takes turns back, /clear all of them"
    )


def test_files_that_wait_are_listed_and_dropped(chat: Chat, do: Do, tmp_path: Path) -> None:
    """A file that does not fit costs no conversation; a file waits once, as it was last."""
    first, second = tmp_path / "a b.txt", tmp_path / "c.txt"
    first.write_text("abc")
    second.write_text("word " * 990)
    lines = do(
        "My name is Ana.",
        f"/file {first}",
        f"/file {second}",
        f"/file {first}",
        "word " * 600,
        "/file",
    )
    waiting = [
        f"{first} (3 B) goes with the next message",
        f"{second} (4.95 kB) goes with the next message",
    ]
    assert lines[1:6] == [waiting[0], *waiting, *waiting]
    assert lines[6].startswith("error: the prompt has")
    assert lines[7:] == waiting
    assert do(f"/file -d {second}") == waiting[:1]
    assert do("/file -d", "What is my name?") == [
        "Your name is Ana.",
        "no file goes with the next message",
    ]
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
    lines = do(
        "My name is Ana.",
        f"/export {tmp_path}/talk.md",
        f"/export {tmp_path}/talk.json",
        f"/export {tmp_path}/talk.md",
    )
    assert (
        (tmp_path / "talk.md").read_text()
        == "## System\n\nBe brief.\n\n## User\n\nMy name is Ana.\n\n"
        "## Assistant\n\nNice to meet you.\n"
    )
    said = json.loads((tmp_path / "talk.json").read_text())
    assert said == {"model": "demo", "system": "Be brief.", "messages": chat.conversation.messages}
    assert stat.S_IMODE((tmp_path / "talk.md").stat().st_mode) == 0o600
    assert (
        lines[-1] == f"error: {tmp_path}/talk.md is there already: "
        f"/export -f {tmp_path}/talk.md overwrites it"
    )
    assert (
        do("Hello!", f"/export -f {tmp_path}/talk.md")[-1]
        == f"2 turns written to {tmp_path}/talk.md"
    )
    assert "Hello!" in (tmp_path / "talk.md").read_text()
    assert do(f"/export {tmp_path}/nowhere/talk.md") == [
        f"error: {tmp_path}/nowhere/talk.md: No such file or directory"
    ]
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
    """By OSC 52."""
    monkeypatch.setenv(
        "SSH_TTY", "/dev/pts/0"
    )  # programs of this machine would reach the wrong one
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert clipboard.copy("How é?") == "through the terminal (OSC 52), if it allows that"
    code = re.fullmatch("\x1b]52;c;(.*)\a", capsys.readouterr().out)
    assert code is not None
    assert base64.b64decode(code[1]).decode() == "How é?"


@pytest.mark.parametrize(
    "text", ["My name is Ana. ", '"""/clear"""', '"""x""" is a docstring', "two\nlines\n"]
)
def test_an_edit_that_changes_nothing_drops_nothing(
    chat: Chat, do: Do, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """The text may begin or end with any white space or quotes."""
    chat.interactive = True
    do(text, "I have a dog.")
    before = chat.conversation.history.turns

    class Enter(Typist):
        def read(self, idle: Any, default: str = "") -> str:
            return default or super().read(idle)

    chat.reader = Enter(["/edit 1", "/edit 2"])
    chat.run(TABLE)
    assert chat.conversation.history.turns == before


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


def test_an_edit_or_retry_that_is_interrupted_brings_the_turn_back(
    chat: Chat, do: Do, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No work is lost, neither by Ctrl-C in the prefill nor by an error."""
    do("My name is Ana.", "I have a dog.")
    before = chat.conversation.history.turns
    lines = do("/retry max_tokens=0")
    assert lines[-1].startswith("error: max_tokens: 0 is out of range")
    chat.interactive = True
    for text in ("word " * 3000, ""):
        do("/edit 1", text)
        assert chat.conversation.history.turns == before

    def give_up(*arguments: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(chat.conversation.runner, "generate", give_up)
    do("/retry")
    assert chat.conversation.history.turns == before


@pytest.mark.parametrize(
    ("battery", "wanted"), [(False, True), (True, False)], ids=["mains", "battery"]
)
def test_nothing_is_typed_ahead_on_battery(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, battery: bool, wanted: bool
) -> None:
    """The conversation before the draft is evaluated on both."""
    monkeypatch.setattr("mlxrunner.chat.repl.on_battery", lambda: battery)
    text = "My name is Ana and I have a very good dog."

    waits = threading.Event()

    class Watched(Draft):
        def wait_until_over(self) -> None:
            waits.set()
            super().wait_until_over()

    evaluate, evaluated = chat.conversation.evaluate, []

    def told(prompt: str, cancelled: Callable[[], bool], *after: Any) -> None:
        evaluate(prompt, cancelled, *after)
        evaluated.append(prompt)

    monkeypatch.setattr(chat.conversation, "evaluate", told)

    class Slow:
        def read(self, idle: Callable[[Draft], None], default: str = "") -> str:
            draft = Watched(text)
            reading = threading.Thread(
                target=lambda: (
                    until(lambda: waits.is_set() if battery else text in evaluated),
                    draft.finish(),
                )
            )
            reading.start()
            idle(draft)
            reading.join()
            raise EOFError

    chat.reader = Slow()
    chat.run(TABLE)
    spelled = chat.runner.tokenizer.decode(list(chat.runner.entry.tokens))
    assert spelled.startswith("<s><|im_start|>user\n")
    assert ("My name is Ana" in spelled) is wanted


FLAT = [
    field.name
    for part in (Usage, Timing, MemoryUse, CacheUse)
    for field in fields(part)
    if field.name not in ("timing", "memory", "cache")
]


def usage(**changes: Any) -> Usage:
    counts = dict.fromkeys(FLAT, 0) | {
        "outcome": "hit",
        "reason": None,
        "rewind_limited_by": None,
    }
    return Usage.from_dict(counts | {"checkpoint": None, "freed_by": None} | changes)


@pytest.mark.parametrize("reason", [None, *REASONS])
def test_every_reason_has_its_words(reason: str | None) -> None:
    """With what limited it, what freed it, what it cost."""
    lines = explanation(
        usage(
            prompt_tokens=50,
            matched_tokens=40,
            cached_tokens=30,
            ahead_tokens=10,
            evaluated_tokens=20,
            lost_tokens=9,
            trimmed_tokens=5,
            reason=reason,
            rewind_limited_by="sliding",
            freed_by="a reset",
            checkpoint=30,
            shifted_tokens=9,
            reevaluated_tokens=4,
        )
    )
    sentence = REASONS[reason].sentence if reason else "nothing was lost"
    assert lines[0].startswith(sentence)
    assert lines[0].endswith("20 of 50 prompt tokens were reused, 10 had been evaluated in advance")
    assert ("(sliding)" in lines[0]) == (reason == "rewind_limited")
    assert ("(a reset)" in lines[0]) == (reason not in (None, "rewind_limited"))
    remedy = REASONS[reason].remedy if reason else ""
    assert lines[1:-4] == ([f"what would help: {remedy}"] if remedy else [])
    assert lines[-4:] == [
        "9 tokens were evaluated that need not have been",
        "a checkpoint at token 30 was used to go back",
        "5 tokens of the entry were trimmed, as the prompt goes on otherwise",
        "the context was full: 9 of the oldest tokens were dropped, 4 evaluated again for it",
    ]


def test_explain_and_stats_tell_of_the_last_turn(do: Do) -> None:
    """After a turn that diverged."""
    lines = do(
        "My name is Ana.", "I have a dog.", "/undo 2", "My cat is Tom.", "/explain", "/stats"
    )
    assert any(line.startswith("the prompt leaves the entry in the middle; ") for line in lines)
    assert any(
        re.fullmatch(r"last turn  partial \(diverged\): \d+ prompt tokens, \d+ matched", line)
        for line in lines
    )


def test_saved_seconds_are_those_of_the_events() -> None:
    """Saved seconds come from the events' curve, and exclude typing ahead and plain guesses."""
    first = usage(cached_tokens=0, evaluated_tokens=100, prefill_s=1.0)
    assert saved_seconds(
        [first, usage(cached_tokens=60, ahead_tokens=10, evaluated_tokens=1, prefill_s=0.01)], 100
    ) == pytest.approx(0.5)
    assert saved_seconds([first, usage(cached_tokens=1000, evaluated_tokens=0)], 100) == 0.0
    assert saved_seconds([], 100) == 0.0
