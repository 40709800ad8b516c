"""What a model prints can't drive the terminal."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxrunner.terminal import Output, size, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\n\ttext", "plain\n\ttext"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("over\rwritten", "over\\x0dwritten"),
        ("\x9b2J", "\\x9b2J"),
        ("back\x08\x7f", "back\\x08\\x7f"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\U000e0041", "\\U000e0041"),
        ("日本 👩‍👩‍👧 é", "日本 👩‍👩‍👧 é"),
    ],
)
def test_control_characters_are_shown(text: str, shown: str) -> None:
    """Newline, tab and what writing systems need stay."""
    assert visible(text) == shown


@given(st.text())
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    """No C0 but newline and tab, no DEL, no C1."""
    assert not any((ord(c) < 32 and c not in "\n\t") or 0x7F <= ord(c) <= 0x9F for c in visible(text))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_only_a_terminal_is_protected() -> None:
    """A file gets every byte."""
    terminal, file = Terminal(), io.StringIO()
    Output(terminal).write("\x1b[1m")
    Output(file).write("\x1b[1m")
    assert (terminal.getvalue(), file.getvalue()) == ("\\x1b[1m", "\x1b[1m")


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (5_510_000, "5.51 MB"), (123_456, "123 kB"), (7e12, "7 TB")]
)
def test_sizes_are_for_people(nbytes: float, text: str) -> None:
    """Decimal units, three digits."""
    assert size(nbytes) == text
