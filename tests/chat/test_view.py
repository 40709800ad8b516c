"""An answer looks right on a screen of any width while it streams."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pyte
import pytest
from rich.cells import cell_len
from rich.console import Console

from mlxrunner.chat.view import StreamedMarkdown, ThinkingView
from mlxrunner.terminal.output import visible, wrapped

TEXT = """# A title

Some *words* with `code`, **strong** ones
and a line of its own. <div> & x < y

- one
- two
  - deeper

1. first
2. second

```python
def f(x):
    return "<b>" + x  # 日本語
```

| name | value |
|------|-------|
| a    | 日本  |

> quoted

[a link](http://example.org/x) and the end: 漢字かな交じり文はとても長いので折り返します。
"""


def pieces(text: str, length: int) -> Iterator[str]:
    return (text[at : at + length] for at in range(0, len(text), length))


def view(width: int = 60, **more: Any) -> tuple[StreamedMarkdown, io.StringIO]:
    """Return a view, and what it writes."""
    out = io.StringIO()
    return StreamedMarkdown(Console(file=out, width=width, **more)), out


def shown(text: str, length: int = 10_000, **more: Any) -> str:
    """Return what a view writes for a text that comes in pieces."""
    found, out = view(**more)
    for piece in pieces(text, length):
        found.write(piece)
        found._cost = 0.0
    found.close()
    return out.getvalue()


def drawn(
    text: str, size: tuple[int, int], length: int, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Return the screen and its scrollback after `text` was drawn in pieces."""
    monkeypatch.setattr("mlxrunner.chat.view.REDRAW_S", 0.0)
    screen = pyte.HistoryScreen(*size, history=5000, ratio=1)
    screen.set_mode(pyte.modes.LNM)  # a file knows no terminal driver that would do it
    width, height = size
    more: Any = {"force_terminal": True, "color_system": "standard"}
    pyte.Stream(screen).feed(shown(text, length, width=width, height=height, **more))
    gone = ["".join(line[x].data for x in range(width)).rstrip() for line in screen.history.top]
    return "\n".join([*gone, *(line.rstrip() for line in screen.display)]).rstrip().split("\n")


@pytest.mark.parametrize("size", [(80, 40), (80, 8), (30, 12), (12, 6)], ids=str)
@pytest.mark.parametrize("length", [1, 7, 10_000])
def test_streamed_markdown_ends_as_markdown_drawn_at_once(
    size: tuple[int, int], length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawing in pieces ends like drawing at once, on any screen, with nothing left over."""
    at_once = drawn(TEXT, (size[0], 200), 10_000, monkeypatch)
    assert drawn(TEXT, size, length, monkeypatch) == at_once


def test_markdown_shows_everything_that_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Angle brackets, addresses of links, references, line ends."""
    reference = "http://example.org/reference"
    lines = drawn(f"{TEXT}\n[1]: {reference}\n", (80, 60), 5, monkeypatch)
    parts = (
        "<div> & x < y",
        "http://example.org/x",
        reference,
        'return "<b>" + x',
        " • one",
        "日本",
    )
    text = "\n".join(lines)
    assert [part for part in parts if part not in text] == []
    assert "Some words with code, strong ones" in lines
    assert "and a line of its own. <div> & x < y" in lines
    assert lines[lines.index(" • one") - 2 :][:2] == ["and a line of its own. <div> & x < y", ""]


def test_an_image_shows_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a link, and without a text of its own."""
    text = (
        "See ![a *cat*](http://example.org/cat.png), ![](http://example.org/dog.png) "
        "[![x](http://example.org/y)](http://example.org/z)"
    )
    assert drawn(text, (200, 5), 1000, monkeypatch) == [
        "See a *cat* (http://example.org/cat.png), (http://example.org/dog.png) x "
        "(http://example.org/y) (http://example.org/z)"
    ]


@pytest.mark.parametrize("entity", ["&#x202e;", "&#x2066;", "&rlm;", "&#xe0041;", "&#8238;"])
@pytest.mark.parametrize(
    "text",
    [
        "a{}b",
        "**a{}b**",
        "# a{}b",
        "[a{}b](http://x.org/{})",
        "![a{}b](x{})",
        "| a{}b |\n|---|\n| c |",
    ],
)
def test_an_entity_cannot_hide_or_reorder_text(text: str, entity: str) -> None:
    """Wherever it stands; so does an address."""
    asked = text.replace("{}", entity) + " <http://x.org/%E2%80%AE>"
    found = shown(asked, force_terminal=False, width=200)
    assert found == visible(found)
    assert "a\\" in found or "a&" in found


def test_a_block_that_is_higher_than_the_screen_is_whole_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While it grows its last lines are shown, and when it is complete all of them, once."""
    code = "```\n" + "".join(f"line {number}\n" for number in range(60)) + "```\n\nDone.\n"
    lines = drawn(code, (40, 10), 9, monkeypatch)
    assert [line.strip() for line in lines if "line" in line] == [
        f"line {number}" for number in range(60)
    ]
    assert lines[-1] == "Done."


def test_headings_and_code_are_copied_without_padding() -> None:
    """A heading is at the margin, and code has its own indentation only, in colours or not."""
    text = "# One\n\n## Two\n\n```python\ndef f():\n    return 1\n```\n"
    for system in (None, "truecolor"):
        screen = pyte.Screen(60, 20)
        found = shown(text, force_terminal=True, color_system=system)
        pyte.Stream(screen).feed(found.replace("\n", "\r\n"))
        lines = [line.rstrip() for line in screen.display if line.strip()]
        assert lines == ["One", "Two", "def f():", "    return 1"]
        cells = [cell for row in screen.buffer.values() for cell in row.values()]
        assert {cell.bg for cell in cells} == {"default"}


def test_lines_are_not_filled_with_spaces() -> None:
    """A copy from the terminal is what was said."""
    assert shown("Hello.", force_terminal=True, color_system=None).endswith("Hello.\n")


@pytest.mark.parametrize(
    "text", ["\x1b]0;owned\a", "a\x1b[2Jb", "\u202egnirts", "\x9b31m", "```\n\x1b[31m\n```"]
)
def test_a_model_cannot_drive_the_terminal(text: str) -> None:
    """Control characters are shown, also in code."""
    found = shown(text, 1, force_terminal=False)
    assert not set(found) & set("\x1b\x9b\a\u202e")
    assert "\\x" in found or "\\u" in found


class Written:
    def __init__(self) -> None:
        self.text, self.is_closed = "", False

    def write(self, text: str) -> None:
        self.text += text

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize(
    ("show", "terminal", "printed", "viewed"),
    [
        (True, True, "\x1b[2mhmm\x1b[22m\n\n", "Hello"),
        (False, True, "\x1b[2mthinking ...\x1b[22m\r\x1b[K", "Hello"),
        (True, False, "", "<think>hmm</think>\n\nHello"),
        (False, False, "", "Hello"),
    ],
    ids=["shown", "hidden", "shown in a pipe", "hidden in a pipe"],
)
def test_thinking_is_dimmed_or_hidden(
    show: bool, terminal: bool, printed: str, viewed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a pipe it comes as it is, or not at all."""
    written = Written()
    view = ThinkingView(lambda: written, "", show, terminal)
    for piece in pieces("<think>hmm</think>\n\nHello", 3):
        view.write(piece)
    view.close()
    assert capsys.readouterr().out == printed
    assert written.text == viewed
    assert written.is_closed


@pytest.mark.parametrize("width", [8, 20, 60])
def test_notes_are_broken_between_words(width: int) -> None:
    """No line is wider than the terminal, in cells, and nothing is lost."""
    for text in (
        "/edit [N]   edit a message",
        "plain words that go on and on",
        "日本語のとても長い文章です と言う",
        "",
        "x",
    ):
        shown = wrapped(text, width)
        assert all(cell_len(line) <= width for line in shown.split("\n"))
        assert "".join(shown.split()) == "".join(text.split())
