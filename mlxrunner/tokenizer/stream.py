"""Text that grows token by token: whole characters only, and stop strings held back until they can't be one."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

INCOMPLETE = "\ufffd"
LONGEST_CHARACTER = 4
"""Bytes of the longest character, and so the most tokens that it can be made of."""
MOST_PENDING = 2 * LONGEST_CHARACTER
CONTEXT = 6


class ByteStream:
    """For tokenizers whose tokens are byte strings: linear, exact, even where `context` ends within a character."""

    def __init__(self, piece_bytes: Callable[[int], bytes], context: Sequence[int] = ()) -> None:
        self._piece_bytes = piece_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in context[-CONTEXT:]:
            self.add(token)

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
        while self._shown and decode(self._shown).startswith(INCOMPLETE):  # cut within a character
            del self._shown[0]
        self._shown_text = decode(self._shown)
        self._pending: list[int] = []

    def add(self, token: int) -> str:
        self._pending.append(token)
        text = self._text(len(self._pending))
        if not text.endswith(INCOMPLETE):
            return self._show(len(self._pending), text)
        if len(self._pending) < MOST_PENDING:
            return ""
        # Broken characters only, so far: show all but the last tokens, which may be the beginning of a whole one.
        for count in range(len(self._pending) - LONGEST_CHARACTER + 1, 0, -1):
            if text.startswith(whole := self._text(count)):
                return self._show(count, whole)
        return ""

    def finish(self) -> str:
        return self._show(len(self._pending), self._text(len(self._pending)))

    def _text(self, count: int) -> str:
        """What the first `count` pending tokens add to the text."""
        pending = self._pending[:count]
        text = self._decode(self._shown + pending)
        if text.startswith(self._shown_text):
            return text[len(self._shown_text) :]
        return self._decode(pending)  # a decoder that gives up the bytes before a broken one, too

    def _show(self, count: int, text: str) -> str:
        shown, self._pending = self._pending[:count], self._pending[count:]
        shown_text = self._decode(shown)
        if shown_text:  # else what was shown before still says more about a leading space
            self._shown, self._shown_text = shown, shown_text
        return text


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
        # The one that ends first, so that it does not matter how the text was cut into pieces.
        found = [
            (place + len(stop), place) for stop in self._stops if (place := held.find(stop)) >= 0
        ]
        if found:
            self.stopped, self._held = True, ""
            return held[: min(found)[1]]
        keep = max(_overlap(held, stop) for stop in self._stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def finish(self) -> str:
        """What was held back and turned out not to be a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    return next(
        (n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0
    )
