"""Text for a terminal: what a model prints can't drive it. Knows nothing about models."""

from __future__ import annotations

import re
import sys
from typing import IO

# C0 without newline and tab, DEL, C1, and the marks that reorder or hide text: bidirectional controls, line separators, tags.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)


def visible(text: str) -> str:
    r"""`text` with control characters shown (`\x1b`, `\u202e`) instead of sent; newline and tab stay."""
    return _CONTROL.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


class Output:
    """An answer on its way out: filtered when `stream` is a terminal, byte for byte otherwise."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stdout
        self._filter = visible if self._stream.isatty() else str

    def write(self, text: str) -> None:
        if text:
            self._stream.write(self._filter(text))
            self._stream.flush()


def size(nbytes: float) -> str:
    """Bytes for people: 1.5 MB (decimal, as disks and Apple's tools count)."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"
