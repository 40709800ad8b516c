"""The terminal after the end of a rank that could not restore it."""

from __future__ import annotations

import sys

import pytest
from ptyprocess import PtyProcess

from mlxrunner.ranks.guard import PLAIN
from mlxrunner.terminal.control import MARK_PASTES, SHOW_CURSOR, UNMARK_PASTES


@pytest.mark.parametrize("is_left", [True, False])
def test_the_terminal_is_as_it_was(is_left: bool) -> None:
    """A shell would show what is pasted between marks. A terminal in order gets nothing."""
    code = f"""
import os, termios, tty
from mlxrunner.ranks.guard import terminal_kept
before = termios.tcgetattr(0)
with terminal_kept():
    if {is_left}:
        tty.setraw(0)
        os.write(1, {MARK_PASTES!r})
assert termios.tcgetattr(0) == before
"""
    process = PtyProcess.spawn([sys.executable, "-c", code])
    said = b""
    while True:
        try:
            said += process.read()
        except EOFError:
            break
    process.wait()
    assert process.exitstatus == 0, said
    left = MARK_PASTES + PLAIN + UNMARK_PASTES + SHOW_CURSOR
    assert said == (left if is_left else b"")
