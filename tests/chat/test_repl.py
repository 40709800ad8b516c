"""The chat without a terminal: a line is a turn, answers on stdout, the rest on stderr."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from functools import partial

import pytest
from click.testing import CliRunner, Result
from support.forking import run_program
from support.waiting import PATIENCE_S

from mlxrunner import cli

PIPE = [sys.executable, "-m", "mlxrunner", "chat"]


def piped(stdin: str) -> Result:
    return CliRunner().invoke(cli.main, ["chat"], input=stdin)


def test_in_a_pipe_each_line_is_a_turn() -> None:
    """Answers on stdout, a line each; no banner, no prompt."""
    typed = "My name is Ana.\n\nWhat is my name?\n"
    result = run_program(*PIPE[1:], input=typed, text=True, timeout=PATIENCE_S)
    assert result.returncode == 0
    assert result.stdout.splitlines()[-1] == "Your name is Ana."
    assert len(result.stdout.splitlines()) == 2
    assert result.stderr == ""


def test_commands_work_in_a_pipe_and_talk_on_stderr() -> None:
    """/system, /clear, /stats, /help, and one that does not exist."""
    lines = [
        "/stats",
        "/system The user's name is Ana.",
        "What is my name?",
        "/stats",
        "/clear",
        "What is my name?",
        "/nonsense",
        "/help",
    ]
    result = piped("\n".join(lines))
    assert result.stdout.splitlines() == ["Your name is Ana.", "Your name is Ana."]
    notes = result.stderr.splitlines()
    assert notes[0] == "no turn yet"
    assert notes[1] == "system prompt: The user's name is Ana."
    assert re.fullmatch(r"last turn  miss \(empty\): \d+ prompt tokens, 0 matched", notes[2])
    assert re.fullmatch(r"           0 cached, 0 missed, 0 displaced, \d+ new; 0 trimmed", notes[3])
    assert re.fullmatch(r"           first token after \d+ ms, prefill \d+ tokens/s", notes[4])
    assert re.fullmatch(r"           answer of \d+ tokens, \d+ tokens/s(, .*)?", notes[5])
    assert re.fullmatch(
        r"session    1 turn; 0 of \d+ prompt tokens reused \(0%\), 0 missed, 0 displaced", notes[6]
    )
    assert re.fullmatch(r"KV cache   49 of 2048 tokens", notes[7])  # nothing was reused or saved
    assert re.fullmatch(r"           .* used, .* allocated", notes[8])
    assert notes[9] == "history    exact; drift from the template: none"
    assert notes[10].startswith("conversation cleared")
    assert notes[11] == "error: no such command: /nonsense (/help lists them)"
    assert any(note.startswith("/clear") for note in notes[12:])


def test_a_mistyped_command_in_a_pipe_is_an_error() -> None:
    """With its exit code; so is one that takes nothing and got something."""
    for line in ("/clera", "/stats2", "/clear the table please"):
        result = piped(f"{line}\n")
        assert (result.exit_code, result.stdout) == (2, "")


def test_an_error_in_a_pipe_is_a_line_and_an_exit_code() -> None:
    """The lines after it are still answered."""
    result = piped("word " * 3000 + "\nHello!\n")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: the prompt has ")
    assert result.stdout == "Hello! How can I help you?\n"


def test_quotes_in_a_pipe_are_one_text() -> None:
    """The lines between quotes are one text, for a message as for /system, also if left open."""
    lines = [
        '/system """The user has a dog.',
        'The user\'s name is Ana."""',
        '"""What is',
        "my name?",
        '"""',
        "/show",
        '"""Hello',
        "you",
    ]
    result = piped("\n".join(lines))
    assert result.stdout.splitlines()[0] == "Your name is Ana."
    assert len(result.stdout.splitlines()) == 2
    assert "system prompt: The user has a dog.\nThe user's name is Ana.\n" in result.stderr
    assert "   1 user      What is my name?\n" in result.stderr
    assert result.stderr.count("user   ") == 1


@pytest.mark.exhaustive(0)
def test_ctrl_c_in_a_pipe_ends_with_130() -> None:
    """The exit code is that of `generate`, and of every program."""
    # Where the tests run in the background of a shell, Ctrl-C is ignored, and that is inherited.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    child = subprocess.Popen(
        PIPE,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("My name is Ana.\n")
    child.stdin.flush()
    assert child.stdout.readline() == "Nice to meet you.\n"
    child.send_signal(signal.SIGINT)
    assert child.wait(PATIENCE_S) == 130
    assert child.stderr is not None
    assert "Traceback" not in child.stderr.read()
