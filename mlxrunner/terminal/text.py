"""Write text for people: units, counts, safe characters; show pictures in terminals."""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterable, Mapping
from typing import IO

# C0 without newline and tab, DEL, C1, and characters that reorder or hide text: bidirectional
# controls, line separators, tags, and characters without a width. The table leaves out characters
# that writing systems and emoji need.
_RANGES = (
    (0x00, 0x08),
    (0x0B, 0x1F),
    (0x7F, 0x9F),
    (0xAD, 0xAD),
    (0x34F, 0x34F),
    (0x61C, 0x61C),
    (0x115F, 0x1160),
    (0x17B4, 0x17B5),
    (0x180B, 0x180F),
    (0x200B, 0x200B),
    (0x200E, 0x200F),
    (0x2028, 0x202E),
    (0x2060, 0x206F),
    (0x3164, 0x3164),
    (0xFEFF, 0xFEFF),
    (0xFFA0, 0xFFA0),
    (0xFFF0, 0xFFFB),
    (0x1BCA0, 0x1BCA3),
    (0x1D173, 0x1D17A),
    (0xE0000, 0xE00FF),
    (0xE01F0, 0xE0FFF),
)
# Names and errors need no joiners, no variation selectors, no second line and no half characters.
_RANGES_OF_LINES = (
    (0x09, 0x0A),
    (0x200C, 0x200D),
    (0xD800, 0xDFFF),
    (0xFE00, 0xFE0F),
    (0xE0100, 0xE01EF),
)


def _shown(ranges: Iterable[tuple[int, int]]) -> dict[int, str]:
    return {
        code: ascii(chr(code))[1:-1] for first, last in ranges for code in range(first, last + 1)
    }


SHOWN = _shown(_RANGES)
r"""The text that is shown instead of each control character: `\x1b`, `\u202e`."""
SHOWN[ord("\r")] = r"\x0d"
_SHOWN_IN_LINES = SHOWN | _shown(_RANGES_OF_LINES)
LONGEST_LINE = 500
"""Most characters of a text within an error."""


def visible(text: str) -> str:
    """Return `text` with control characters made visible; newline and tab stay."""
    return text.translate(SHOWN)


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
