"""The progress of long work, on stderr: a bar in a terminal, plain lines elsewhere.

Every command shows its work with a `Progress`; its subclasses know the words. Nothing goes to
stdout.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from threading import Lock, Timer
from typing import TYPE_CHECKING, TextIO

from mlxrunner.terminal.signals import heard_at_once, leave_at_once
from mlxrunner.terminal.text import duration, size, visible

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live


PATIENCE_S = 1.0
"""Seconds that work has to last before a patient bar is shown."""
LINE_EVERY_S = 5.0
"""Seconds between two plain lines of a batch."""
FRAMES_PER_S = 10
"""Drawings of a bar per second."""
WIDTH = 20
"""Width of a bar in characters."""


class Progress:
    """A line of text with a bar, which `update` replaces and `close` removes.

    The bar says so if Ctrl-C has to wait for a long step. It can be used again after `close`.
    """

    def __init__(
        self,
        *,
        has_bar: bool | None = None,
        line_every_s: float | None = None,
        patience_s: float = 0.0,
        is_quiet: bool = False,
    ) -> None:
        """Show a bar if `has_bar` is true; None means if stderr is a terminal.

        Without a bar, print a line every `line_every_s` seconds, or nothing if that is None. Show
        the bar only once the work has lasted `patience_s` seconds. Print nothing at all if
        `is_quiet` is true.
        """
        self._is_quiet = is_quiet or sys.stderr is None
        self.has_bar = not self._is_quiet and (sys.stderr.isatty() if has_bar is None else has_bar)
        self._line_every_s, self._patience_s = line_every_s, patience_s
        self._lock = Lock()
        self._timer: Timer | None = None
        self._live: Live | None = None
        self._text: str | Callable[[], str] = ""
        self._done = 0
        self._total: int | None = None
        self._hearing = ExitStack()
        self._is_stopping = False
        self._began = self._last_line = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the progress was made, or since the first call for a prompt."""
        return time.monotonic() - self._began

    def update(
        self, text: str | Callable[[], str], done: int = 0, total: int | None = None
    ) -> None:
        """Show `text` and that `done` of `total` is done. Frequent calls cost little.

        A `text` that is a function is called only when it is shown, maybe in another thread.
        Without a `total` the bar moves to and fro.
        """
        self._text, self._done, self._total = text, done, total
        if self._is_quiet or self._live is not None:
            return
        if self.has_bar:
            self._show_in_time()
        elif self._line_every_s is not None:
            now = time.monotonic()
            if now - self._last_line >= self._line_every_s:
                self._last_line = now
                self.say(self._words())

    def say(self, text: str) -> None:
        """Print `text` on a line of its own, which stays."""
        if self._is_quiet:
            return
        if self._live is None:
            print(visible(text), file=sys.stderr, flush=True)
        else:
            self._live.console.print(visible(text), markup=False, highlight=False, soft_wrap=True)

    def pause(self) -> None:
        """Remove the bar; the next `update` shows it again at once."""
        with self._lock:
            if self._live is not None:
                self._live.stop()
                self._live = None

    def close(self) -> None:
        """Remove the bar; the next `update` begins new work."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            if self._live is not None:
                self._live.stop()
            self._timer, self._live = None, None
        self._hearing.close()
        self._is_stopping = False

    def _show_in_time(self) -> None:
        with self._lock:
            if self._timer is None:
                self._timer = Timer(self._patience_s, self._show)
                self._timer.daemon = True
                self._hearing.enter_context(heard_at_once(self._held_up))
                if self._patience_s:
                    self._timer.start()
                    return
            elif self._timer.is_alive():
                return
        self._show()

    def _show(self) -> None:
        from rich.console import Console
        from rich.live import Live

        with self._lock:
            if self._timer is None or self._live is not None:
                return  # closed meanwhile
            live = Live(
                console=Console(stderr=True),
                get_renderable=self._drawn,
                refresh_per_second=FRAMES_PER_S,
                transient=True,
                redirect_stdout=False,
            )
            live.start()
            self._live = live

    def _drawn(self) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        line = Table.grid(padding=(0, 1))
        line.add_column(no_wrap=True)
        line.add_column(no_wrap=True)
        done, total = self._done, self._total
        bar = ProgressBar(total, done, width=WIDTH, animation_time=time.monotonic())
        line.add_row(bar, Text(visible(self._words())))
        return line

    def _words(self) -> str:
        text = self._text if isinstance(self._text, str) else self._text()
        return f"stopping after this step: {text}" if self._is_stopping else text

    def _held_up(self, number: int) -> None:
        self._is_stopping = True


class PrefillBar(Progress):
    """The evaluated tokens of a prompt; pass it as `progress` of a request."""

    def __init__(self) -> None:
        super().__init__(patience_s=PATIENCE_S)
        self._cached: int | None = None

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` prompt tokens are in the cache.

        The first call tells how many were there before.
        """
        if self._cached is None:
            self._cached, self._began = done, time.monotonic()
        if done < total:
            self.update(self._tokens, done, total)
        else:
            self.close()

    def close(self) -> None:
        super().close()
        self._cached = None

    def _tokens(self) -> str:
        done, total, cached = self._done, self._total or 1, self._cached or 0
        text = f"evaluating the prompt ({cached / total:.0%} was cached): {done}/{total} tokens"
        if done <= cached:
            return f"{text}, {duration(self.elapsed_s)}"
        left_s = self.elapsed_s / (done - cached) * (total - done)
        return f"{text}, {duration(left_s)} left"


class Steps(Progress):
    """The steps of a long command, each on a plain line if stderr is not a terminal."""

    def __init__(self, command: str, total: int) -> None:
        """Expect `total` calls, one for each step of `command`."""
        super().__init__(line_every_s=0.0)
        self._command, self._steps, self._number = command, total, 0

    def __call__(self, name: str) -> None:
        """Show that the step `name` begins."""

        def timed() -> str:
            return f"{text} ({duration(self.elapsed_s)})"

        text = f"{self._command}: {name}"
        self.update(timed if self.has_bar else text, self._number, self._steps)
        self._number += 1


@contextmanager
def reading(things: str) -> Iterator[Callable[[int], None]]:
    """Yield a function that shows, in a terminal only, how many `things` of a file are read."""
    progress = Progress()
    try:
        progress.update(f"reading {things}")
        yield lambda count: progress.update(lambda: f"reading {things}: {count:,}")
    finally:
        progress.close()


@contextmanager
def loading(
    model: str, *, is_quiet: bool = False, leaves: bool = False
) -> Iterator[Callable[[str, int, int | None], None]]:
    """Show, in a terminal only, that `model` is being loaded, if that takes long.

    Yield a function that shows a step of it, and how many of how many bytes are done. `leaves`:
    nothing can be lost, so Ctrl-C and `kill` end the process at once, in the midst of a step.
    """
    progress = Progress(patience_s=PATIENCE_S, is_quiet=is_quiet)

    def show(step: str, done: int, total: int | None) -> None:
        began = time.monotonic()

        def shown() -> str:
            part = f"{size(done)} of {size(total)}" if total else duration(time.monotonic() - began)
            return f"loading {model}, {part}: {step}"

        progress.update(shown, done, total)

    def leave(number: int) -> None:
        progress.pause()
        leave_at_once(number)

    try:
        progress.update(f"loading {model}")
        with heard_at_once(leave, patience_s=0.0) if leaves else nullcontext():
            yield show
    finally:
        progress.close()


class StderrHandler(logging.StreamHandler[TextIO]):
    """A handler that writes each line, cleaned, to what `sys.stderr` is at that moment.

    While a bar is shown, rich puts a stream of its own there, which prints above the bar.
    """

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]  # the base class has an attribute
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is not None:
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def log_to_stderr(level: int) -> None:
    """Show what mlxrunner logs from `level` on."""
    logger = logging.getLogger("mlxrunner")
    logger.handlers = [StderrHandler()]
    logger.setLevel(level)
