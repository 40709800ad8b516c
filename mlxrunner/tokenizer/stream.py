"""Text that grows token by token: whole characters only, and stop strings held back until they can't be one."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

INCOMPLETE = "\ufffd"
LONGEST_CHARACTER = 8
"""More pending tokens than any character has bytes are not a character that is still to come."""
CONTEXT = 6


class ByteStream:
    """For tokenizers whose tokens are byte strings: linear, exact."""

    def __init__(self, piece_bytes: Callable[[int], bytes]) -> None:
        self._piece_bytes = piece_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        return self._decoder.decode(self._piece_bytes(token))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class DecodeStream:
    """For any tokenizer with a `decode`: the text of a few tokens with and without the new one, compared.

    The tokens before the answer are decoded along, so that a decoder that strips the space of a first word does not strip ours.
    """

    def __init__(self, decode: Callable[[list[int]], str], context: Sequence[int]) -> None:
        self._decode = decode
        self._shown = [int(token) for token in context[-CONTEXT:]]
        self._shown_text = decode(self._shown)
        self._pending: list[int] = []

    def add(self, token: int) -> str:
        self._pending.append(token)
        text = self._decode(self._shown + self._pending)
        if text.endswith(INCOMPLETE) and len(self._pending) < LONGEST_CHARACTER:
            return ""
        return self._show(text)

    def finish(self) -> str:
        return self._show(self._decode(self._shown + self._pending)) if self._pending else ""

    def _show(self, text: str) -> str:
        new = text[len(self._shown_text) :]
        self._shown, self._pending = self._pending, []
        self._shown_text = self._decode(self._shown)
        return new


class StopScanner:
    """Holds back what may be the start of a stop string, and cuts exactly before one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def add(self, text: str) -> str:
        """The text that may be shown now; after a match, `stopped` is True and nothing more is to come."""
        if not self._stops:
            return text
        held = self._held + text
        found = [place for stop in self._stops if (place := held.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return held[: min(found)]
        keep = max(_overlap(held, stop) for stop in self._stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def finish(self) -> str:
        """What was held back and turned out not to be a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
