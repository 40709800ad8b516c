"""Encode a prompt in pieces, with the tokens of answers in their places."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple

import numpy as np

from mlxrunner.cache.tokens import TokenArray, as_tokens
from mlxrunner.tokenizer import Tokenizer

MOST_CHARACTERS = 8_000_000
"""Most characters of texts whose tokens are remembered."""


class Fill(NamedTuple):
    """A place in a rendered text, and what the model wrote there."""

    begin: int
    end: int
    text: str
    tokens: TokenArray


class Encoder:
    """Encodes texts in pieces, and remembers the tokens of each."""

    def __init__(self, tokenizer: Tokenizer, most: int = MOST_CHARACTERS) -> None:
        """Encode with `tokenizer`, and remember the tokens of at most `most` characters."""
        self._tokenizer, self._most = tokenizer, most
        self._known: OrderedDict[tuple[bool, str], TokenArray] = OrderedDict()
        self._characters = 0
        self._lock = Lock()

    def encode(self, text: str, fills: Sequence[Fill]) -> tuple[TokenArray, str]:
        """Return the tokens of `text` with `fills` in their places, and their text."""
        arrays, texts, at = [], [], 0
        for fill in fills:
            arrays += [self._piece(text[at : fill.begin], at == 0), fill.tokens]
            texts += [text[at : fill.begin], fill.text]
            at = fill.end
        arrays.append(self._piece(text[at:], at == 0))
        return np.concatenate(arrays), "".join([*texts, text[at:]])

    def _piece(self, text: str, is_first: bool) -> TokenArray:
        key = is_first, text
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                return known
        encode = self._tokenizer.encode if is_first else self._tokenizer.encode_more
        tokens = as_tokens(encode(text))
        with self._lock:
            if key not in self._known:
                self._known[key] = tokens
                self._characters += len(text)
            while self._characters > self._most:
                self._characters -= len(self._known.popitem(last=False)[0][1])
        return tokens
