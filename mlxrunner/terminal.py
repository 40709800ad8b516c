"""Text for a terminal: what a model prints can't drive it. Knows nothing about models."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from threading import Lock, Timer
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

# C0 without newline and tab, DEL, C1, and what reorders or hides text: bidirectional controls, line
# separators, tags, and characters without a width. Those that writing systems and emoji need stay.
_RANGES = (
    (0x00, 0x08), (0x0B, 0x1F), (0x7F, 0x9F), (0xAD, 0xAD), (0x34F, 0x34F), (0x61C, 0x61C),
    (0x115F, 0x1160), (0x17B4, 0x17B5), (0x180B, 0x180F), (0x200B, 0x200B), (0x200E, 0x200F),
    (0x2028, 0x202E), (0x2060, 0x206F), (0x3164, 0x3164), (0xFEFF, 0xFEFF), (0xFFA0, 0xFFA0),
    (0xFFF0, 0xFFFB), (0x1BCA0, 0x1BCA3), (0x1D173, 0x1D17A), (0xE0000, 0xE00FF), (0xE01F0, 0xE0FFF),
)  # fmt: skip
# Names and errors have no need of joiners and variation selectors, of more than one line, or of half characters.
_RANGES_OF_LINES = (
    (0x09, 0x0A), (0x200C, 0x200D), (0xD800, 0xDFFF), (0xFE00, 0xFE0F), (0xE0100, 0xE01EF),
)  # fmt: skip


def _shown(ranges: Iterable[tuple[int, int]]) -> dict[int, str]:
    return {
        code: ascii(chr(code))[1:-1] for first, last in ranges for code in range(first, last + 1)
    }


SHOWN = _shown(_RANGES)
r"""Control characters, and what is shown instead of each: `\x1b`, `\u202e`."""
SHOWN[ord("\r")] = r"\x0d"
_SHOWN_IN_LINES = SHOWN | _shown(_RANGES_OF_LINES)
LONGEST_LINE = 500
"""Characters of a text in an error."""


def visible(text: str) -> str:
    """`text` with control characters shown instead of sent; newline and tab stay."""
    return text.translate(SHOWN)


def one_line(text: str, longest: int = LONGEST_LINE) -> str:
    """`text` of a file, a model or a client as a part of one line: nothing in it ends the line, drives the terminal or hides.

    Of more than `longest` characters the middle is left out, and how much that is said: what to do stands at the end.
    """
    if len(text) > longest:
        begin, end = text[: longest * 3 // 5], text[len(text) - longest * 2 // 5 :]
        text = f"{begin} ... ({len(text) - len(begin) - len(end):,} characters left out) ... {end}"
    return text.translate(_SHOWN_IN_LINES)


class Output:
    """An answer on its way out: filtered when `stream` is a terminal, byte for byte otherwise."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stdout
        self._filter = visible if self._stream.isatty() else str

    def write(self, text: str) -> None:
        if text:
            self._stream.write(self._filter(text))
            self._stream.flush()


class PrefillBar:
    """The `progress` of a request: a bar on stderr, if that is a terminal and the prefill lasts; gone when it is done."""

    PATIENCE_S = 1.0
    """A prefill that takes longer shows the bar."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._timer: Timer | None = None
        self._bar: tuple[Progress, TaskID] | None = None
        self._cached, self._done, self._total = 0, 0, 0
        self._is_paused = False

    def __call__(self, done: int, total: int) -> None:
        with self._lock:
            self._done, self._total = done, total
            if self._is_paused:
                self._bar, self._is_paused = self._start(self._cached, total), False
            if self._bar is not None:
                self._bar[0].update(self._bar[1], completed=done)
            elif self._timer is None and done < total and sys.stderr.isatty():
                self._cached = done
                self._timer = Timer(self.PATIENCE_S, self._show)
                self._timer.daemon = True
                self._timer.start()
        if done >= total:
            self.close()

    def pause(self) -> None:
        """Take the bar away; the next call shows it again."""
        with self._lock:
            if self._bar is not None:
                self._bar[0].stop()
                self._bar, self._is_paused = None, True

    def close(self) -> None:
        with self._lock:
            self._is_paused = False
            if self._timer is not None:
                self._timer.cancel()
            if self._bar is not None:
                self._bar[0].stop()
            self._timer, self._bar = None, None

    def _show(self) -> None:
        with self._lock:
            if self._timer is not None:
                self._bar = self._start(self._cached, self._total)
                self._bar[0].update(self._bar[1], completed=self._done)

    def _start(self, cached: int, total: int) -> tuple[Progress, TaskID]:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        text = TextColumn(f"evaluating the prompt ({cached / total:.0%} was cached)")
        columns = (
            text,
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("tokens,"),
            TimeRemainingColumn(),
            TextColumn("left"),
        )
        progress = Progress(*columns, console=Console(stderr=True), transient=True)
        progress.start()
        return progress, progress.add_task("prefill", total=total, completed=cached)


class Steps:
    """What a long command does at the moment, on stderr: a bar that goes away in a terminal, a line each otherwise."""

    def __init__(self, command: str, total: int) -> None:
        """`total`: how many times it will be called."""
        self._command, self._total, self._done = command, total, 0
        self._bar: tuple[Progress, TaskID] | None = None

    def __call__(self, name: str) -> None:
        """The next step begins."""
        if not sys.stderr.isatty():
            print(f"{self._command}: {name}", file=sys.stderr, flush=True)
            return
        if self._bar is None:
            self._bar = self._start()
        progress, task = self._bar
        progress.update(task, completed=self._done, step=visible(name))
        self._done += 1

    def close(self) -> None:
        if self._bar is not None:
            self._bar[0].stop()
            self._bar = None

    def _start(self) -> tuple[Progress, TaskID]:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        text = TextColumn(f"{self._command}: {{task.fields[step]}}", markup=False)
        progress = Progress(
            BarColumn(), TimeElapsedColumn(), text, console=Console(stderr=True), transient=True
        )
        progress.start()
        return progress, progress.add_task(self._command, total=self._total, step="")


def size(nbytes: float) -> str:
    """Bytes for people: 1.5 MB (decimal, as disks and Apple's tools count)."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return (
                f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.3g} {unit}"
            )
        nbytes /= 1000
    return f"{nbytes:.3g} TB"
