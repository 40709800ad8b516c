"""How an answer looks: plain text as it comes, or Markdown that is rendered while it streams. Knows nothing about models."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Protocol

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from mlxrunner.chat.thinking import Thinking
from mlxrunner.terminal import Output, visible

DIM, UNDIM, ERASE_LINE = "\x1b[2m", "\x1b[22m", "\r\x1b[K"
REDRAW_S = 0.05
"""The least time between two drawings of the block that is still growing."""


class View(Protocol):
    """Takes an answer piece by piece."""

    def write(self, text: str) -> None: ...

    def close(self) -> None:
        """The answer has ended."""
        ...


class Plain:
    """The text itself, then a newline."""

    def __init__(self) -> None:
        self._output = Output()

    def write(self, text: str) -> None:
        self._output.write(text)

    def close(self) -> None:
        self._output.write("\n")


class StreamedMarkdown:
    """Blocks that are complete are printed for good; the last one is drawn again as it grows, its end only where it is taller than the screen."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._text, self._is_first = "", True
        self._live: Live | None = None
        self._drawn, self._cost = 0.0, 0.0

    def write(self, text: str) -> None:
        self._text += visible(text)
        if not self._text.strip() or time.monotonic() - self._drawn < max(REDRAW_S, 4 * self._cost):
            return
        began = time.monotonic()
        *finished, self._text = _blocks(self._text)
        for block in finished:
            self._stop()
            self._print(block)
        if self._live is None:
            self._live = Live(
                console=self._console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
            )
            self._live.start()
        self._live.update(_Block(self._text, newest=max(self._console.height - 2, 1), gap=not self._is_first), refresh=True)
        self._drawn = time.monotonic()
        self._cost = self._drawn - began

    def close(self) -> None:
        self._stop()
        for block in _blocks(self._text):
            if block.strip() or self._is_first:
                self._print(block)
        self._text = ""

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, text: str) -> None:
        self._console.print(_Block(text, gap=not self._is_first), end="")
        self._is_first = False


class ThinkingApart:
    """Shows thinking dimmed, or that there is some, and hands the rest to a view. Not in a terminal: everything as it comes."""

    def __init__(self, view: Callable[[], View], prompt: str, show: bool, terminal: bool) -> None:
        self._view, self._thinking = view(), Thinking(prompt)
        self._show, self._terminal = show, terminal
        self._output, self._noted = Output(), False

    def write(self, text: str) -> None:
        if self._show and not self._terminal:
            self._view.write(text)
        else:
            self._pieces(self._thinking.add(text))

    def close(self) -> None:
        self._pieces(self._thinking.finish())
        self._end_of_thinking()
        self._view.close()

    def _pieces(self, pieces: Iterator[tuple[bool, str]]) -> None:
        for is_thinking, text in pieces:
            if not is_thinking:
                self._end_of_thinking()
                self._view.write(text)
            elif self._terminal:
                self._think(text)

    def _think(self, text: str) -> None:
        if not self._noted:
            sys.stdout.write(DIM if self._show else f"{DIM}thinking ...{UNDIM}")
            text = text.lstrip("\n")
        if self._show:
            self._output.write(text)
        sys.stdout.flush()
        self._noted = True

    def _end_of_thinking(self) -> None:
        if self._noted:
            sys.stdout.write(f"{UNDIM}\n\n" if self._show else ERASE_LINE)
            sys.stdout.flush()
            self._noted = False


def wrapped(text: str, width: int | None = None) -> str:
    """A note in lines of a terminal's width, broken between words; what follows a gap of two spaces stays a column of its own."""
    console = Console(width=width)
    gap = re.match(r"\s*\S+(?: \S+)*\s{2,}|\s*", text)
    indent = gap.end() if gap and gap.end() < console.width // 2 else 0
    lines = Text(visible(text[indent:])).wrap(console, console.width - indent)
    return text[:indent] + f"\n{' ' * indent}".join(line.plain.rstrip() for line in lines)


class _Block:
    """Markdown without the spaces that would fill its lines; `newest`: only so many lines, the last; `gap`: an empty line before."""

    def __init__(self, text: str, newest: int | None = None, gap: bool = False) -> None:
        self._text, self._newest, self._gap = text, newest, gap

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [_trimmed(line) for line in console.render_lines(_markdown(self._text), options, pad=False)]
        lines = [[], *lines] if self._gap else lines
        for line in lines[-self._newest :] if self._newest else lines:
            yield from line
            yield Segment.line()


def _trimmed(line: list[Segment]) -> list[Segment]:
    line = list(line)
    while line and not line[-1].text.rstrip(" ") and not (line[-1].style and line[-1].style.bgcolor):
        line.pop()
    if line and not (line[-1].style and line[-1].style.bgcolor):
        line[-1] = Segment(line[-1].text.rstrip(" "), line[-1].style)
    return line


def _parser() -> MarkdownIt:
    """Angle brackets are text, as they are for a model that writes code."""
    return MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).disable("reference")


def _markdown(text: str) -> Markdown:
    """Lines end where the model ended them; links show their address."""
    markdown = Markdown("", hyperlinks=False)
    markdown.parsed = _parser().parse(text)
    for token in markdown.parsed:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"
    return markdown


def _blocks(text: str) -> list[str]:
    """One after the other; the last one may go on."""
    begins = [token.map[0] for token in _parser().parse(text) if token.level == 0 and token.map and token.nesting >= 0]
    lines = text.split("\n")
    cuts = [0, *begins[1:], len(lines)]
    return ["\n".join(lines[begin:end]) for begin, end in pairwise(cuts)]
