"""Print an answer: plain text or Markdown, and thinking apart from it.

This knows nothing about models.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from logging.handlers import MemoryHandler
from typing import ClassVar, Protocol

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import CodeBlock, Heading, Markdown
from rich.segment import Segment
from rich.syntax import Syntax

from mlxrunner.templates.messages import ThinkingSplitter
from mlxrunner.terminal.output import FilteredStream, visible

LOGGER = logging.getLogger("mlxrunner")
MOST_LINES, MOST_CHARACTERS = 10, 1000
"""Most lines and characters of a message that is recalled."""
DIM, UNDIM, ERASE_LINE = "\x1b[2m", "\x1b[22m", "\r\x1b[K"


class View(Protocol):
    """Shows an answer piece by piece."""

    def write(self, text: str) -> None: ...

    def pause(self) -> None:
        """Leave the screen to others until the next `write`.

        A drawing that is not final is removed, and the next `write` draws it again.
        """
        ...

    def close(self) -> None:
        """End the answer."""
        ...


class PlainView:
    """Writes the text as it is, then a newline."""

    def __init__(self) -> None:
        self._stream = FilteredStream()

    def write(self, text: str) -> None:
        self._stream.write(text)

    def pause(self) -> None:
        pass

    def close(self) -> None:
        self._stream.write("\n")


class ThinkingView:
    """Shows thinking dimmed, or only a note of it, and hands the rest to another view.

    Without a terminal it hands everything on as it comes, or leaves the thinking out.
    """

    def __init__(self, view: Callable[[], View], prompt: str, show: bool, terminal: bool) -> None:
        """Show the answer that continues `prompt` in the view that `view` makes.

        `show` says to show the thinking, `terminal` that there is a terminal.
        """
        self._view, self._splitter = view(), ThinkingSplitter(prompt)
        self._show, self._terminal = show, terminal
        self._stream, self._is_noted = FilteredStream(), False

    def write(self, text: str) -> None:
        if self._show and not self._terminal:
            self._view.write(text)
        else:
            self._write_pieces(self._splitter.add(text))

    def pause(self) -> None:
        self._clear_note(shown=UNDIM)
        self._view.pause()

    def close(self) -> None:
        self._write_pieces(self._splitter.finish())
        self._clear_note(shown=f"{UNDIM}\n\n")
        self._view.close()

    def _write_pieces(self, pieces: Iterator[tuple[bool, str]]) -> None:
        for is_thinking, text in pieces:
            if not is_thinking:
                self._clear_note(shown=f"{UNDIM}\n\n")
                self._view.write(text)
            elif self._terminal:
                self._write_thinking(text)

    def _write_thinking(self, text: str) -> None:
        if not self._is_noted:
            sys.stdout.write(DIM if self._show else f"{DIM}thinking ...{UNDIM}")
            text = text.lstrip("\n")
        if self._show:
            self._stream.write(text)
        sys.stdout.flush()
        self._is_noted = True

    def _clear_note(self, *, shown: str) -> None:
        """End the thinking on the screen: write `shown` after it, or erase the note of it."""
        if self._is_noted:
            sys.stdout.write(shown if self._show else ERASE_LINE)
            sys.stdout.flush()
            self._is_noted = False


def beginning(text: str, rest: str) -> str:
    """Return the first lines of `text`, and the line `rest` in the place of more."""
    first = "\n".join(text[:MOST_CHARACTERS].split("\n")[:MOST_LINES])
    return text if first == text else f"{first}\n{rest}"


@contextmanager
def held_log() -> Iterator[None]:
    """Hold back log lines until the block ends, and then print them in order.

    Otherwise they would stand in the middle of an answer or of the line being typed.
    """
    before = LOGGER.handlers
    if not before:
        yield
        return
    held = [
        MemoryHandler(sys.maxsize, flushLevel=sys.maxsize, target=handler) for handler in before
    ]
    LOGGER.handlers = list(held)
    try:
        yield
    finally:
        LOGGER.handlers = before
        for handler in held:
            handler.close()


REDRAW_S = 0.05
"""Least seconds between two drawings of the block that still grows.

If a drawing takes long, the time is ten times as long as the drawing.
"""


class StreamedMarkdown:
    """A view that prints complete blocks for good, and draws the last one again as it grows.

    If the last block is taller than the screen, only its end is drawn.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._text, self._is_first = "", True
        self._live: Live | None = None
        self._drawn, self._cost = 0.0, 0.0

    def write(self, text: str) -> None:
        self._text += visible(text)
        if not self._text.strip() or time.monotonic() - self._drawn < max(
            REDRAW_S, 10 * self._cost
        ):
            return
        began = time.monotonic()
        *finished, self._text = _blocks(self._text)
        for block in finished:
            self._stop()
            self._print(block)
        if self._live is None:
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        self._live.update(
            _Block(self._text, newest=max(self._console.height - 2, 1), gap=not self._is_first),
            refresh=True,
        )
        self._drawn = time.monotonic()
        self._cost = self._drawn - began

    def pause(self) -> None:
        self._stop()
        self._drawn = 0.0

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


def code_blocks(text: str) -> list[str]:
    """Return the code in the fences of `text`, or in its indented blocks, in order."""
    kinds = ("fence", "code_block")
    return [token.content for token in _parser().parse(text) if token.type in kinds]


class _Block:
    """Markdown without the spaces that would fill its lines."""

    def __init__(self, text: str, newest: int | None = None, gap: bool = False) -> None:
        """Show `text`, only its last `newest` lines if given, after an empty line if `gap`."""
        self._text, self._newest, self._gap = text, newest, gap

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [
            _trimmed(line)
            for line in console.render_lines(_markdown(self._text), options, pad=False)
        ]
        first = next((index for index, line in enumerate(lines) if line), 0)
        lines = [[], *lines[first:]] if self._gap else lines[first:]
        for line in lines[-self._newest :] if self._newest else lines:
            yield from line
            yield Segment.line()


def _trimmed(line: list[Segment]) -> list[Segment]:
    line = list(line)
    while (
        line and not line[-1].text.rstrip(" ") and not (line[-1].style and line[-1].style.bgcolor)
    ):
        line.pop()
    if line and not (line[-1].style and line[-1].style.bgcolor):
        line[-1] = Segment(line[-1].text.rstrip(" "), line[-1].style)
    return line


def _parser() -> MarkdownIt:
    """Return a parser that takes angle brackets for text, because models write code."""
    return (
        MarkdownIt("commonmark", {"html": False})
        .enable(["strikethrough", "table"])
        .disable("reference")
    )


class _LeftHeading(Heading):
    """A heading at the left margin, so that copied text has no spaces before it."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        yield self.text


class _BareCode(CodeBlock):
    """A block of code without margin and background, so that it is copied as it is."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).rstrip()
        yield Syntax(
            code, self.lexer_name, theme="ansi_light", word_wrap=True, background_color="default"
        )


class _CopiedMarkdown(Markdown):
    """Markdown whose headings and code are copied without padding."""

    elements: ClassVar = {
        **Markdown.elements,
        "heading_open": _LeftHeading,
        "fence": _BareCode,
        "code_block": _BareCode,
    }


def _markdown(text: str) -> Markdown:
    """Return parsed Markdown whose lines end where the model ended them.

    Links and images show their address. Entities show their character, unless that could control
    the terminal.
    """
    markdown = _CopiedMarkdown("", hyperlinks=False)
    markdown.parsed = _parser().parse(text)
    for token in markdown.parsed:
        token.content = visible(token.content)
        for child in token.children or ():
            child.content = visible(child.content)
            if child.type == "softbreak":
                child.type = "hardbreak"
            elif child.type == "image":
                child.type, child.children = "text", None
                child.content = f"{child.content} ({child.attrs['src']})".lstrip()
    return markdown


def _blocks(text: str) -> list[str]:
    """Return the blocks of `text` in order; the last one may still grow."""
    begins = [
        token.map[0]
        for token in _parser().parse(text)
        if token.level == 0 and token.map and token.nesting >= 0
    ]
    lines = text.split("\n")
    cuts = [0, *begins[1:], len(lines)]
    return ["\n".join(lines[begin:end]) for begin, end in pairwise(cuts)]
