"""Keys and signals that come while the model answers."""

from __future__ import annotations

import os
import re
import signal
import termios
from pathlib import Path
from typing import Any

import pexpect
import pytest
from support.chats import CTRL_C, PASTE, PASTED, SLOW, answering, marks_pastes


@pytest.mark.exhaustive(0)
def test_ctrl_c_at_twenty_random_moments_leaves_an_exact_conversation(
    open_screen: Any, tmp_path: Path
) -> None:
    """The next turn equals a cold run, and what was shown is kept, after Ctrl-C at any moment."""
    script = tmp_path / "slow.py"
    script.write_text(SLOW.replace('"max_tokens": 400', '"max_tokens": 1500'))
    screen = open_screen(str(script), size=(200, 50), MOMENTS=str(tmp_path))
    met = {"prefill": 0, "decode": 0}
    for turn in range(22):
        screen.until(lambda count=turn: screen.raw.count("<true ") == count + 1).prompt()
        screen.child.send(f"turn {turn}: a question of several chunks")
        screen.until("several chunks")
        screen.child.send("\r")
        screen.until((tmp_path / str(turn)).exists)
        screen.child.send(CTRL_C)
    screen.until(lambda: screen.raw.count("<true ") == 23).prompt()
    for kind in re.findall("<true (decode|prefill)>", screen.raw)[1:]:
        met[kind] += 1
    assert min(met.values()) >= 4, met
    assert screen.leave() == 0


def test_what_is_typed_during_an_answer_waits_for_the_next_prompt(
    open_screen: Any, tmp_path: Path
) -> None:
    """Unseen, and not lost."""
    screen = answering(open_screen, tmp_path)
    screen.child.send("/show\r")
    screen.until("   1 user      hello").prompt()
    assert screen.shown.count("/show") == 1


def test_what_is_pasted_during_an_answer_is_one_text(open_screen: Any, tmp_path: Path) -> None:
    """It has as many lines as were pasted, which wait for Enter."""
    screen = answering(open_screen, tmp_path)
    assert marks_pastes(screen)
    screen.child.send(f"{PASTE}line a\rline b\rline c{PASTED}")
    screen.until(">>> line a\n... line b\n... line c")
    screen.child.send(CTRL_C)
    assert screen.leave() == 0
    assert not marks_pastes(screen)


@pytest.mark.parametrize("moment", ["typing", "answering"])
def test_a_killed_chat_leaves_the_terminal_as_it_was(
    open_screen: Any, tmp_path: Path, moment: str
) -> None:
    """It shows what is typed again; the exit code says what it was."""
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    screen = open_screen(str(script), size=(200, 50))
    before = termios.tcgetattr(screen.child.child_fd)
    screen.until("<true prefill>").prompt()
    screen.child.send("half a line")
    screen.until(">>> half a line")
    if moment == "answering":
        screen.child.send("\r")
        screen.until(lambda: not screen.everything[-1].startswith(">>>"))
    os.kill(screen.child.pid, signal.SIGTERM)
    screen.child.expect(pexpect.EOF)
    screen.raw += screen.child.before
    assert not marks_pastes(screen)
    assert termios.tcgetattr(screen.child.child_fd)[:4] == before[:4]
    screen.child.close()
    assert screen.child.exitstatus == 128 + signal.SIGTERM
