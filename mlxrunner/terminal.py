"""Text for a terminal: what a model prints can't drive it. Knows nothing about models."""

from __future__ import annotations

import sys
from threading import Lock, Timer
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

# C0 without newline and tab, DEL, C1, and the marks that reorder or hide text: bidirectional controls, line separators, tags.
_RANGES = (
    (0x00, 0x08), (0x0B, 0x1F), (0x7F, 0x9F), (0x61C, 0x61C), (0x200E, 0x200F), (0x2028, 0x202E), (0x2060, 0x206F), (0xFEFF, 0xFEFF),
    (0xFFF9, 0xFFFB), (0xE0000, 0xE007F),
)  # fmt: skip
SHOWN = {code: ascii(chr(code))[1:-1] for first, last in _RANGES for code in range(first, last + 1)}
r"""Control characters, and what is shown instead of each: `\x1b`, `\u202e`."""
SHOWN[ord("\r")] = r"\x0d"


def visible(text: str) -> str:
    """`text` with control characters shown instead of sent; newline and tab stay."""
    return text.translate(SHOWN)


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
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        text = TextColumn(f"evaluating the prompt ({cached / total:.0%} was cached)")
        columns = (text, BarColumn(), MofNCompleteColumn(), TextColumn("tokens,"), TimeRemainingColumn(), TextColumn("left"))
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
        progress = Progress(BarColumn(), TimeElapsedColumn(), text, console=Console(stderr=True), transient=True)
        progress.start()
        return progress, progress.add_task(self._command, total=self._total, step="")


def size(nbytes: float) -> str:
    """Bytes for people: 1.5 MB (decimal, as disks and Apple's tools count)."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"
