"""Write text for people: units, counts, safe characters, pictures, and the progress of long work.

Every command shows its work with a `Progress` on stderr: a bar in a terminal, plain lines
elsewhere. Its subclasses know the words. Nothing of it goes to stdout.
"""

from __future__ import annotations

import base64
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from threading import Lock, Timer
from typing import IO, TYPE_CHECKING, TextIO

from mlxrunner.terminal.control import heard_at_once, leave_at_once

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live


def _shown(ranges: str) -> dict[int, str]:
    """Return what is shown for each character of `ranges`, as 7F-9F or AD."""
    bounds = ([int(end, 16) for end in one.split("-")] for one in ranges.split())
    codes = (code for ends in bounds for code in range(ends[0], ends[-1] + 1))
    return {code: ascii(chr(code))[1:-1] for code in codes}


# C0 without newline and tab, DEL, C1, and characters that reorder or hide text: bidirectional
# controls, line separators, tags, and characters without a width. The table leaves out characters
# that writing systems and emoji need.
SHOWN = _shown(
    "0-8 B-1F 7F-9F AD 34F 61C 115F-1160 17B4-17B5 180B-180F 200B 200E-200F 2028-202E 2060-206F "
    "3164 FEFF FFA0 FFF0-FFFB 1BCA0-1BCA3 1D173-1D17A E0000-E00FF E01F0-E0FFF"
)
r"""The text that is shown instead of each control character: `\x1b`, `\u202e`."""
SHOWN[ord("\r")] = r"\x0d"
# Names and errors need no joiners, no variation selectors, no second line and no half characters.
_SHOWN_IN_LINES = SHOWN | _shown("9-A 200C-200D D800-DFFF FE00-FE0F E0100-E01EF")
LONGEST_LINE = 500
"""Most characters of a text within an error."""


def visible(text: str) -> str:
    """Return `text` with control characters made visible; newline and tab stay."""
    return text.translate(SHOWN)


def wrapped(text: str, width: int | None = None) -> str:
    """Return a note broken between words into lines of `width`, by default the terminal's.

    Text after a gap of two spaces stays a column of its own.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(width=width)
    gap = re.match(r"\s*\S+(?: \S+)*\s{2,}|\s*", text)
    indent = gap.end() if gap and gap.end() < console.width // 2 else 0
    lines = Text(visible(text[indent:])).wrap(console, console.width - indent)
    return text[:indent] + f"\n{' ' * indent}".join(line.plain.rstrip() for line in lines)


def one_line(text: str, longest: int = LONGEST_LINE) -> str:
    """Return a text from a file, a model or a client as part of one line.

    Nothing in it ends the line, controls the terminal or hides. If it has more than `longest`
    characters, its middle is left out, because an error says at its end what to do.
    """
    if len(text) > longest:
        begin, end = text[: longest * 3 // 5], text[len(text) - longest * 2 // 5 :]
        text = f"{begin} ... ({len(text) - len(begin) - len(end):,} characters left out) ... {end}"
    return text.translate(_SHOWN_IN_LINES)


class FilteredStream:
    """Writes and flushes text: `visible` text to a terminal, every character elsewhere."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        """Write to `stream`, by default stdout."""
        self._stream = stream or sys.stdout
        self._filter = visible if self._stream.isatty() else str

    def write(self, text: str) -> None:
        if text:
            self._stream.write(self._filter(text))
            self._stream.flush()


def size(nbytes: float) -> str:
    """Return bytes for people, such as 1.5 MB (decimal, as disks and Apple's tools count)."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return (
                f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.3g} {unit}"
            )
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def count_of(count: int, noun: str) -> str:
    """Return a number with its noun: "1 turn", "2 turns"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """Return a time for people, such as 40 s, 3 min 20 s or 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def number(value: int) -> str:
    """Write a whole number with commas."""
    return f"{value:,}"


def percent(share: float) -> str:
    """Write a share of 1 in percent; "100 %" and "0 %" only for exactly all and nothing."""
    if 0 < share < 0.001:
        return "< 0.1 %"
    if 0.999 < share < 1:
        return "> 99.9 %"
    return f"{share:.1%}".replace(".0%", "%").replace("%", " %")


def seconds(value: float | None) -> str:
    """Write a time, given in seconds, with three digits and a unit; "-" if it is unknown."""
    if value is None:
        return "-"
    if value == 0:
        return "0 s"
    if value < 0.001:
        return f"{value * 1e6:.0f} µs"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    if value < 120:
        return f"{value:.3g} s"
    if value < 7200:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:,.1f} h"


def rate(value: float | None) -> str:
    """Write a rate in tokens per second; "-" if it is unknown."""
    if value is None:
        return "-"
    return f"{value:,.0f} tokens/s" if value >= 10 else f"{value:.2g} tokens/s"


def moment(time: str) -> str:
    """Write a time in RFC 3339 without fractions and zone: all times are UTC."""
    return time[:19].replace("T", " ")


COLUMNS = 40
"""Columns that a picture takes at most."""
PIXELS_OF_COLUMN = 8
"""About as many as a column has; smaller pictures take fewer columns."""
CHUNK = 4096
"""Most characters of a part of a picture in Kitty's way."""


def shows_pictures(environment: Mapping[str, str]) -> bool:
    """Return True if the terminal of this environment shows pictures."""
    return bool(_way(environment))


def inline(png: bytes, width: int, environment: Mapping[str, str]) -> str:
    """Return what makes the terminal show a PNG of `width` pixels, or "" if it can't."""
    data = base64.b64encode(png).decode()
    columns = max(1, min(COLUMNS, width // PIXELS_OF_COLUMN))
    way = _way(environment)
    if way == "iterm2":
        size = f"size={len(png)};width={columns};preserveAspectRatio=1"
        return f"\x1b]1337;File=inline=1;{size}:{data}\a\n"
    if way == "kitty":
        parts = [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]
        heads = [f"a=T,f=100,q=2,c={columns},", *([""] * (len(parts) - 1))]
        more = [1] * (len(parts) - 1) + [0]
        chunks = zip(heads, more, parts, strict=True)
        return "".join(f"\x1b_G{head}m={one};{part}\x1b\\" for head, one, part in chunks) + "\n"
    return ""


def _way(environment: Mapping[str, str]) -> str:
    """Return the terminal's way to show pictures, or "" if none is known.

    What runs several terminals in one passes no pictures on.
    """
    if environment.get("TMUX") or environment.get("STY"):
        return ""
    program = environment.get("TERM_PROGRAM", "")
    if program in ("iTerm.app", "WezTerm") or environment.get("LC_TERMINAL") == "iTerm2":
        return "iterm2"
    is_kitty = environment.get("TERM") == "xterm-kitty" or environment.get("KITTY_WINDOW_ID")
    return "kitty" if is_kitty or program == "ghostty" else ""


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
