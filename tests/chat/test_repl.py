"""The chat as a person meets it: in a real pseudo-terminal, and in a pipe."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pexpect
import pyte
import pytest

ENV = {**os.environ, "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"}  # nobody answers its question for the cursor
PIPE = [sys.executable, "-m", "mlxrunner", "chat"]

# An endless, slow answer: Ctrl-C has something to interrupt. After each turn the entry is compared with the conversation.
SLOW = """
import sys, time
from mlxrunner.chat.conversation import Conversation
from mlxrunner.chat.start import open_chat
from mlxrunner.testing import OracleModel, oracle_runner

model = OracleModel(["full", "recurrent"], on_layer=lambda index: time.sleep(0.004))
runner = oracle_runner(model=model, prefill_step=3)
conversation = Conversation(runner, options={"stop_tokens": [], "max_tokens": 400})
chat, table = open_chat(conversation, history=False)
read = chat.reader.read

def checked(*arguments):
    model.on_layer = lambda index: None
    assert runner.entry.is_true, "the entry is not true"
    cold = oracle_runner(["full", "recurrent"])
    prompt = list(runner.entry.tokens)
    if prompt:
        def tail(r):
            return [c.token for c in r.generate([*prompt, 5], max_tokens=4, stop_tokens=[])]
        warm, want = tail(runner), tail(cold)
        assert warm == want, (warm, want)
    model.on_layer = lambda index: time.sleep(0.004)
    print(f"<true {len(conversation.messages)}>", flush=True)
    return read(*arguments)

chat.reader.read = checked
sys.exit(chat.run(table))
"""


def piped(stdin: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PIPE, *arguments], input=stdin, capture_output=True, text=True, timeout=120)


def test_in_a_pipe_each_line_is_a_turn() -> None:
    """Answers on stdout, a line each; no banner, no prompt."""
    result = piped("My name is Ana.\n\nWhat is my name?\n")
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
    assert re.match(
        r"last turn: miss \(empty\); prompt \d+ = cached 0 \+ evaluated \d+, matched 0; answer \d+ tokens; first token after",
        notes[2],
    )
    assert re.match(
        r"session: 1 turns; 0 of \d+ prompt tokens reused \(0%\), which saved about 0.0 s; entry \d+ of \d+ tokens, .* used, .* allocated",
        notes[3],
    )
    assert notes[4] == "history: exact; drift from the template: none: the 49 tokens that were evaluated are the template's"
    assert notes[5].startswith("cleared: ")
    assert notes[6] == "no such command: /nonsense (/help lists them)"
    assert any(note.startswith("/clear") for note in notes[7:])


def test_a_path_is_not_a_command() -> None:
    """Everything that is not a command is sent."""
    result = piped("/usr/bin is a folder\n")
    assert "no such command" not in result.stderr
    assert result.stdout.strip()


def test_an_error_in_a_pipe_is_a_line_and_an_exit_code() -> None:
    """And the lines after it are still answered."""
    result = piped("word " * 3000 + "\nHello!\n")
    assert result.returncode == 2
    assert result.stderr.startswith("error: the prompt has ")
    assert result.stdout == "Hello! How can I help you?\n"


def screen_after(child: pexpect.spawn, screen: pyte.Screen, stream: pyte.Stream, until: str, times: int = 1) -> str:
    """Feed the terminal until `until` is on the screen so many times."""
    while "\n".join(screen.display).count(until) < times:
        stream.feed(child.read_nonblocking(4096, timeout=60))
    return "\n".join(line.rstrip() for line in screen.display).rstrip()


@pytest.fixture
def terminal() -> tuple[pyte.Screen, pyte.Stream]:
    screen = pyte.Screen(100, 30)
    return screen, pyte.Stream(screen)


def test_in_a_terminal_there_is_a_banner_a_prompt_and_an_answer(terminal: tuple[pyte.Screen, pyte.Stream]) -> None:
    """The exact transcript, as it stands on the screen."""
    screen, stream = terminal
    child = pexpect.spawn(PIPE[0], PIPE[1:], encoding="utf-8", dimensions=(30, 100), env=ENV, timeout=60)
    screen_after(child, screen, stream, ">>>")
    child.send("My name is Ana. What is my name?\r")
    shown = screen_after(child, screen, stream, ">>>", times=2)
    child.sendeof()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    assert "a toy of 2.8 million parameters" in shown
    assert "-m mlx-community/Llama-3.2-1B-Instruct-4bit" in shown
    lines = shown.splitlines()
    place = lines.index(">>> My name is Ana. What is my name?")
    assert lines[place + 1] == "Your name is Ana."


def test_ctrl_c_at_random_moments_leaves_an_exact_conversation(tmp_path: Path) -> None:
    """During prefill and decode; the next turn is that of a cold run. Once more at the prompt: it only clears the line."""
    script = tmp_path / "slow.py"
    script.write_text(textwrap.dedent(SLOW))
    rng = random.Random(4)
    child = pexpect.spawn(sys.executable, [str(script)], encoding="utf-8", dimensions=(40, 200), env=ENV, timeout=60)
    child.expect("<true 0>")
    for turn in range(12):
        child.expect(">>>")
        child.send(f"turn {turn}: a question of several chunks\r")
        child.expect("chunks")
        pexpect.run(f"sleep {rng.uniform(0.0, 0.4):.3f}")
        child.sendintr()
        child.expect(r"<true (\d+)>")
    child.expect(">>>")
    child.send("half a line")
    child.sendintr()
    child.expect(r"<true \d+>")
    child.expect(">>>")
    child.sendeof()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0, child.before
