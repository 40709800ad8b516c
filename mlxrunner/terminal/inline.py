"""Pictures in terminals that can show them: iTerm2, WezTerm, Kitty and Ghostty.

The two ways are those of iTerm2 (https://iterm2.com/documentation-images.html) and of Kitty
(https://sw.kovidgoyal.net/kitty/graphics-protocol). No terminal is asked what it can do.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping

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
