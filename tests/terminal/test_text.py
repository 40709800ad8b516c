"""A model's text can't drive the terminal."""

from __future__ import annotations

import io
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxrunner.terminal.output import FilteredStream, duration, one_line, size, visible


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
        ("日本 👩‍👩‍👧 ☺️ é", "日本 👩‍👩‍👧 ☺️ é"),
        ("a\u200bb\u00adc\u2063d\u3164e", "a\\u200bb\\xadc\\u2063d\\u3164e"),
    ],
)
def test_control_characters_are_shown(text: str, shown: str) -> None:
    """Newline, tab and what writing systems need stay."""
    assert visible(text) == shown


HIEROGLYPHS = {chr(code) for code in range(0x13430, 0x13440)}
"""Format characters that are seen, because they put signs above each other.

Those of Arabic numbers are seen as well.
"""


@given(st.text())
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    """No C0 but newline and tab, no DEL, no C1."""
    assert not any(
        (ord(c) < 32 and c not in "\n\t") or 0x7F <= ord(c) <= 0x9F for c in visible(text)
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a.json\nmlxrunner: all is well", "a.json\\nmlxrunner: all is well"),
        ("tab\tand\r", "tab\\tand\\x0d"),
        ("zero\u200d\u200c\u200b\ufe0f\U000e0101", "zero\\u200d\\u200c\\u200b\\ufe0f\\U000e0101"),
        ("half\udcff", "half\\udcff"),
        ("日本 é", "日本 é"),
        ("x" * 500, "x" * 500),
        (
            "x" * 400 + "y" * 100_001,
            "x" * 300 + " ... (99,901 characters left out) ... " + "y" * 200,
        ),
    ],
)
def test_a_text_in_an_error_is_part_of_one_line(text: str, shown: str) -> None:
    """No newline that forges a line, nothing hidden, no end without end."""
    assert one_line(text) == shown


@given(st.text())
def test_nothing_without_a_width_is_left_in_a_line(text: str) -> None:
    """No character of the categories control, format, surrogate or line end."""
    left = {
        character
        for character in one_line(text)
        if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    }
    assert (
        left
        <= set(
            "\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd"
        )
        | HIEROGLYPHS
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_only_a_terminal_is_protected() -> None:
    """A file gets every byte."""
    terminal, file = Terminal(), io.StringIO()
    FilteredStream(terminal).write("\x1b[1m")
    FilteredStream(file).write("\x1b[1m")
    assert (terminal.getvalue(), file.getvalue()) == ("\\x1b[1m", "\x1b[1m")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (5_510_000, "5.51 MB"), (123_456, "123 kB"), (7e12, "7 TB")],
)
def test_sizes_are_for_people(nbytes: float, text: str) -> None:
    """Decimal units, three digits."""
    assert size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (0.44, "0.4 s"),
        (9.94, "9.9 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    """In the two largest units."""
    assert duration(seconds) == text
