"""Encode prompts, and remember the tokens of their parts, which come back with each request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from mlxrunner.cache.tokens import TokenArray, as_tokens
from mlxrunner.templates.remembered import Bounded
from mlxrunner.tokenizer import Tokenizer
from mlxrunner.tokenizer.base import left_over
from mlxrunner.tokenizer.longest import check_text

MOST_BYTES = 64_000_000
"""Most bytes of texts whose tokens are remembered, and of the tokens."""


class Fill(NamedTuple):
    """A place in a rendered text, and what the model wrote there."""

    begin: int
    end: int
    text: str
    tokens: TokenArray


class Encoder:
    """Encodes texts in pieces, and remembers the tokens of each. Any thread may use it."""

    def __init__(self, tokenizer: Tokenizer, most: int = MOST_BYTES) -> None:
        """Encode with `tokenizer`, and remember texts and tokens of at most `most` bytes."""
        self._tokenizer = tokenizer
        self._known = Bounded[TokenArray](most)

    def encode(
        self, text: str, fills: Sequence[Fill], context: int | None = None
    ) -> tuple[TokenArray, str]:
        """Return the tokens of `text` with `fills` in their places, and their text.

        Raise ContextLengthError if they are certainly `context` tokens or more. None: no limit.
        """
        begins = [0, *(fill.end for fill in fills)]
        ends = [*(fill.begin for fill in fills), len(text)]
        others = [text[begin:end] for begin, end in zip(begins, ends, strict=True)]
        check_text(self._tokenizer, "".join(others), context)
        arrays, texts = [self._piece(others[0], True)], others[:1]
        for fill, other in zip(fills, others[1:], strict=True):
            own = left_over(self._tokenizer, fill.text, other)
            arrays += [fill.tokens, self._piece(own, False)]
            texts += [fill.text, other]
        return np.concatenate(arrays), "".join(texts)

    def _piece(self, text: str, is_first: bool) -> TokenArray:
        known = self._known.get((is_first, text))
        if known is not None:
            return known
        parts = self._parts(text)
        if len(parts) == 1:
            encode = self._tokenizer.encode if is_first else self._tokenizer.encode_more
            tokens = as_tokens(encode(text))
        else:
            pieces = [self._piece(part, is_first and n == 0) for n, part in enumerate(parts)]
            tokens = np.concatenate(pieces)
        self._known.put((is_first, text), tokens)
        return tokens

    def _parts(self, text: str) -> list[str]:
        parts: Callable[[str], list[str]] | None = getattr(self._tokenizer, "parts", None)
        return [text] if parts is None else parts(text)
