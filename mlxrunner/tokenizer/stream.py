"""Text that grows token by token, in whole characters, stop strings in it, and the tokens of it."""

from __future__ import annotations

import codecs
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from mlxrunner.templates.segments import common
from mlxrunner.templates.thinking import overlap

if TYPE_CHECKING:
    from mlxrunner.cache.tokens import TokenArray
    from mlxrunner.results import Chunk
    from mlxrunner.tokenizer.base import Tokenizer

INCOMPLETE = "\ufffd"
LONGEST_CHARACTER = 4
"""Bytes of the longest character, which is also the most tokens of a character."""
MOST_PENDING = 2 * LONGEST_CHARACTER
CONTEXT = 6


class ByteStream:
    """The stream of a tokenizer whose tokens are byte strings.

    It is exact even if `context` ends within a character.
    """

    def __init__(self, piece_bytes: Callable[[int], bytes], context: Sequence[int] = ()) -> None:
        self._piece_bytes = piece_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(b"".join(map(piece_bytes, context[-CONTEXT:])))

    def add(self, token: int) -> str:
        return self._decoder.decode(self._piece_bytes(token))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class DecodeStream:
    """The stream of any tokenizer with a `decode` function.

    It compares the text of a few tokens with and without the new one. The last tokens before the
    answer are decoded, too, because a decoder may strip the space of the first word.
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
        # All characters so far are broken. Show all but the last tokens, which may begin a whole
        # character.
        for count in range(len(self._pending) - LONGEST_CHARACTER + 1, 0, -1):
            if text.startswith(whole := self._text(count)):
                return self._show(count, whole)
        return ""

    def finish(self) -> str:
        return self._show(len(self._pending), self._text(len(self._pending)))

    def _text(self, count: int) -> str:
        """Return the text that the first `count` pending tokens add."""
        pending = self._pending[:count]
        text = self._decode(self._shown + pending)
        if text.startswith(self._shown_text):
            return text[len(self._shown_text) :]
        return self._decode(pending)  # this decoder also drops the bytes before a broken one

    def _show(self, count: int, text: str) -> str:
        shown, self._pending = self._pending[:count], self._pending[count:]
        shown_text = self._decode(shown)
        if shown_text:  # else keep the earlier tokens, which decide about a leading space
            self._shown, self._shown_text = shown, shown_text
        return text


class StopScanner:
    """A scanner that cuts a text before a stop string, and holds back a possible start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def add(self, text: str) -> str:
        """Return the text that may be shown now.

        After a match `stopped` is True, and no more text may be added.
        """
        if not self._stops:
            return text
        held = self._held + text
        # Take the match that ends first: it does not depend on how the text was cut.
        found = [
            (place + len(stop), place) for stop in self._stops if (place := held.find(stop)) >= 0
        ]
        if found:
            self.stopped, self._held = True, ""
            return held[: min(found)[1]]
        keep = max(overlap(held, stop) for stop in self._stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def finish(self) -> str:
        """Return the text that was held back and is not a stop string."""
        held, self._held = self._held, ""
        return held


class AnswerTokens(NamedTuple):
    """The tokens of an answer as they were generated, as far as their text was shown."""

    text: str
    """The text of the tokens."""
    tokens: TokenArray
    ends: Sequence[int]
    """The number of characters up to each token's end."""
    closing: str = ""
    """The text of the token that ended the answer, or nothing."""
    closing_token: int | None = None

    @classmethod
    def of(
        cls, chunks: Sequence[Chunk], tokenizer: Tokenizer, context: Sequence[int]
    ) -> AnswerTokens:
        """Return the tokens of an answer behind the tokens `context`.

        Those of half a character, of a stop string, and after that are left out.
        """
        from mlxrunner.cache.tokens import as_tokens  # with numpy, which completion has not

        shown = "".join(chunk.text for chunk in chunks)
        tokens = [chunk.token for chunk in chunks if chunk.token is not None]
        last = tokens.pop() if tokens and tokens[-1] in tokenizer.stop_tokens else None
        texts = [chunk.text for chunk in chunks[: len(tokens)]]
        if last is None or "".join(texts) != shown:
            stream = tokenizer.stream(context)
            texts = [stream.add(token) for token in tokens]
        whole = cls("".join(texts), as_tokens(tokens), array("q", accumulate(map(len, texts))))
        if last is not None and whole.text == shown:
            return whole._replace(closing=tokenizer.decode([last]), closing_token=last)
        end, count = whole.within(common(whole.text, shown))
        return cls(shown[:end], whole.tokens[:count], whole.ends[:count])

    def within(self, most: int) -> tuple[int, int]:
        """Return the most characters, up to `most`, that tokens end with, and those tokens."""
        count = bisect_right(self.ends, most)
        end = self.ends[count - 1] if count else 0
        # Later tokens with the same end begin a character.
        return end, bisect_left(self.ends, end) + 1 if end else 0
