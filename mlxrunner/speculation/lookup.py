"""Find where the last tokens stood before: what came then may come again. No model, no tensors."""

from __future__ import annotations

import numpy as np

from mlxrunner.cache.tokens import TokenArray, TokenBuffer

FEWEST = 2
"""Tokens that have to agree before a place counts as a match."""
MOST = 24
"""Tokens after which two matches count as equally long. The later place then wins."""
CANDIDATES = 2048
"""Most places that are compared, the latest ones: a text of one token has nothing but places."""
PLACES, FEWEST_PLACES = 8, 4096
"""Places for marks per token of the texts, and at least."""
SPREAD = 40503
"""An odd number by which a token is multiplied, so that pairs of tokens have different marks."""


class TextLookup:
    """The texts of one request, with the place that the present end of the answer repeats.

    The texts are what the entry held before, the prompt and the answer, one behind the other.
    """

    def __init__(self, earlier: TokenArray, prompt: TokenArray) -> None:
        """Begin with the tokens `earlier`, which are no part of the conversation, and `prompt`."""
        self._tokens = TokenBuffer()
        self._tokens.extend(earlier)
        self._tokens.extend(prompt)
        self._earlier = len(earlier)
        self._next = 0
        self._last = self._tokens[-1] if self._tokens else 0
        # A mark for each two tokens that follow each other: most that are new were never together.
        self._mask = (1 << (PLACES * len(self._tokens) + FEWEST_PLACES).bit_length()) - 1
        self._marks = bytearray(self._mask + 1)
        tokens = self._tokens.array.astype(np.int64)
        there = np.frombuffer(self._marks, np.uint8)
        there[(tokens[:-1] * SPREAD + tokens[1:]) & self._mask] = 1
        self.length = 0
        """Tokens before the end that agree with those before the place; 0: there is no place."""
        self._search()

    @property
    def is_earlier(self) -> bool:
        """True if the place lies in the earlier tokens."""
        return self._next < self._earlier

    @property
    def expected(self) -> int | None:
        """The token that came at the place; None if there is no place."""
        return self._tokens[self._next] if self.length else None

    @property
    def text(self) -> TokenArray:
        """The prompt and the answer so far, as a view that is valid until the next token."""
        return self._tokens.array[self._earlier :]

    def add(self, token: int) -> None:
        """Append a token of the answer, and follow the place or find another one."""
        mark = (self._last * SPREAD + token) & self._mask
        agrees, self._last = self.expected == token, token
        self._tokens.append(token)
        if agrees:
            self._next += 1
            self.length += 1
        elif self._marks[mark]:
            self._search()
        else:
            self.length, self._marks[mark] = 0, 1

    def ahead(self, most: int) -> list[int]:
        """Return at most `most` tokens that came at the place.

        Where they reach the end of the answer, the text repeats itself: they go round.
        """
        if not self.length or most <= 0:
            return []
        found = self._tokens[self._next : self._next + most]
        return (found * (most // len(found) + 1))[:most]

    def _search(self) -> None:
        """Find the place with the longest match, the latest of several."""
        tokens = self._tokens.array
        end = len(tokens)
        places = np.flatnonzero(tokens[: end - 1] == tokens[-1])[-CANDIDATES:] + 1
        self.length = 0
        for length in range(1, min(MOST, end - 1) + 1):
            if not len(places):
                break
            self._next = int(places[-1])
            self.length = length if length >= FEWEST else 0
            places = places[places > length]
            places = places[tokens[places - length - 1] == tokens[end - length - 1]]
