"""Typing during the start, Ctrl-Z and the log beside an answer work as a person sees it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

CHAT = ("-m", "mlxrunner", "chat", "--no-reserve", "--set", "no_input_history=true")
CTRL_D, CTRL_Z = "\x04", "\x1a"
SHELL = ("-c", "import os; os.execvp('bash', ['bash', '--norc', '--noprofile', '-i'])")
MODES = (
    "stty -a | tr ' ' '\\n' | grep -x -e '-*icanon;*' -e '-*echo;*' -e '-*icrnl;*' | sort | paste "
    "-sd+"
)

# Answers in Markdown, a character at a time, and waits before the last word until a file is there.
SLOW = """
import logging, sys, time
from pathlib import Path
import mlx.core as mx
from mlxrunner.chat.conversation import Conversation
from mlxrunner.chat.repl import open_chat
from mlxrunner.testing import EOS, oracle_runner

if "-v" in sys.argv:
    logger = logging.getLogger("mlxrunner")
    logger.handlers = [logging.StreamHandler()]
    logger.setLevel(logging.DEBUG)
go_on, left = Path(sys.argv[1]), []

def script(tokens, logits):
    global left
    if tokens[-1].item() == EOS:
        return logits  # of the step that is always one ahead
    if not left:
        left = [*b"# Title\\n\\nSome **bold** words, and the end.", EOS]
    if bytes(left[:-1]) == b" the end.":
        logging.getLogger("mlxrunner").info("logged")
        while not go_on.exists():
            time.sleep(0.01)
    time.sleep(0.02)
    return mx.where(mx.arange(logits.shape[-1]) == left.pop(0), 1e4, logits)

conversation = Conversation(oracle_runner(), options={"logits_processors": [script]})
chat, table = open_chat(conversation, history=False, plain="--plain" in sys.argv, model="oracle")
sys.exit(chat.run(table))
"""


@pytest.mark.parametrize("wait", ["", "half a draft"], ids=["at once", "half a line"])
def test_lines_that_are_typed_while_the_program_starts_are_turns(
    open_screen: Any, wait: str
) -> None:
    """Lines ended by Enter are turns in their order, and the rest is the draft."""
    screen = open_screen(*CHAT, imports=True)
    screen.child.send("My name is Ana.\r")
    screen.until("My name is Ana.\n")  # the terminal shows it; the program may not even have begun
    screen.child.send(f"What is my name?\r{wait}")
    screen.until("Your name is Ana.").until(lambda: screen.lines[-1] == f">>> {wait}".strip())
    assert screen.everything[-5:-1] == [
        ">>> My name is Ana.",
        "Nice to meet you.",
        ">>> What is my name?",
        "Your name is Ana.",
    ]


def test_ctrl_d_that_is_typed_while_the_program_starts_leaves(open_screen: Any) -> None:
    """After what was typed before it has been answered."""
    screen = open_screen(*CHAT, imports=True)
    screen.child.send(f"My name is Ana.\r{CTRL_D}")
    screen.until("Nice to meet you.")
    screen.child.wait()
    assert screen.child.exitstatus == 0


def shell(open_screen: Any, command: str) -> Any:
    """A shell on a screen, which runs `command`; its prompt is `$`."""
    screen = open_screen(*SHELL, PS1="$ ", PS2="")
    screen.until("$")
    screen.child.send(f"clear; {command}\r")
    return screen


def test_ctrl_z_at_the_prompt_suspends(open_screen: Any) -> None:
    """The shell has its terminal as it was; after `fg` the line is there again, and continues."""
    screen = shell(open_screen, " ".join([sys.executable, *CHAT]))
    screen.prompt()
    screen.child.send("My name")
    screen.until(">>> My name")
    screen.child.send(CTRL_Z)
    screen.until("Stopped").until(lambda: screen.lines[-1] == "$")
    screen.child.send(f"{MODES}\r")
    screen.until("echo+icanon+icrnl")
    assert not screen.raw.rfind("\x1b[?2004h", 0, screen.raw.rfind("Stopped")) > screen.raw.rfind(
        "\x1b[?2004l"
    )
    screen.child.send("fg\r")
    screen.until(lambda: screen.lines[-1] == ">>> My name")
    screen.child.send(" is Ana.\r")
    screen.until("Nice to meet you.").prompt()
    screen.child.send(CTRL_D)
    screen.until(lambda: screen.lines[-1] == "$")


@pytest.mark.exhaustive(1)
@pytest.mark.parametrize("options", ["", "--plain"], ids=["markdown", "plain"])
def test_ctrl_z_in_an_answer_suspends(open_screen: Any, tmp_path: Path, options: str) -> None:
    """After `fg` the answer continues: drawn again while it grew, and whole in the conversation."""
    script, go_on = tmp_path / "slow.py", tmp_path / "go on"
    script.write_text(SLOW)
    screen = shell(open_screen, f"{sys.executable} {script} '{go_on}' {options}")
    screen.prompt()
    screen.child.send("hello\r")
    screen.until("words," if options else "Some bold")
    screen.child.send(CTRL_Z)
    go_on.touch()
    screen.until("Stopped").until(lambda: screen.lines[-1] == "$")
    assert "the end." not in screen.shown
    screen.child.send(f"{MODES}\r")
    screen.until("echo+icanon+icrnl")
    screen.child.send("fg\r")
    screen.until("the end.").prompt()
    after = screen.shown.rpartition("fg\n")[2]
    assert ("Some bold words, and the end." in after) == (not options)
    assert "assistant # Title Some **bold** words, and the end." in screen.say("/show")
    screen.child.send(CTRL_D)
    screen.until(lambda: screen.lines[-1] == "$")


def test_the_log_waits_until_the_answer_is_over(open_screen: Any, tmp_path: Path) -> None:
    """`-v`: it does not get between the drawings of an answer, which is on the screen once."""
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    (tmp_path / "go on").touch()
    screen = open_screen(str(script), str(tmp_path / "go on"), "-v")
    screen.prompt()
    said = screen.say("hello")
    assert said.count("Some bold words, and the end.") == 1
    assert said.index("the end.") < said.index("logged")
    screen.child.send("what is logged while it is typed")
    screen.until(">>> what is logged while it is typed")
