"""Pictures are shown by the terminals that are known to show them, and by no other."""

from __future__ import annotations

import base64
import re

import pytest

from mlxrunner.terminal.output import CHUNK, inline, shows_pictures

PNG = bytes(range(256)) * 40


@pytest.mark.parametrize(
    ("environment", "way"),
    [
        ({"TERM_PROGRAM": "iTerm.app"}, "iterm2"),
        ({"LC_TERMINAL": "iTerm2"}, "iterm2"),
        ({"TERM_PROGRAM": "WezTerm"}, "iterm2"),
        ({"TERM": "xterm-kitty"}, "kitty"),
        ({"KITTY_WINDOW_ID": "1", "TERM": "xterm-256color"}, "kitty"),
        ({"TERM_PROGRAM": "ghostty"}, "kitty"),
        ({"TERM": "xterm-256color"}, ""),
        ({"TERM_PROGRAM": "Apple_Terminal"}, ""),
        ({"TERM_PROGRAM": "iTerm.app", "TMUX": "/tmp/tmux"}, ""),
        ({"TERM": "xterm-kitty", "STY": "1.pts"}, ""),
        ({}, ""),
    ],
)
def test_each_terminal_gets_its_own_way(environment: dict[str, str], way: str) -> None:
    """The bytes of the picture come out whole."""
    text = inline(PNG, 100, environment)
    assert shows_pictures(environment) == bool(way) == bool(text)
    if way == "iterm2":
        found = re.fullmatch(r"\x1b\]1337;File=inline=1;size=(\d+);width=12;[^:]*:(.*)\a\n", text)
        assert found is not None
        assert (int(found[1]), base64.b64decode(found[2])) == (len(PNG), PNG)
    elif way == "kitty":
        parts = re.findall(r"\x1b_G([^;]*);([^\x1b]*)\x1b\\", text)
        assert base64.b64decode("".join(data for _, data in parts)) == PNG
        assert parts[0][0] == "a=T,f=100,q=2,c=12,m=1"
        assert [head for head, _ in parts[1:]] == ["m=1"] * (len(parts) - 2) + ["m=0"]
        assert all(len(data) <= CHUNK for _, data in parts)
