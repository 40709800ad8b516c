"""Pictures among stored tokens: what their ids stood for, and the ids that they have now.

An id holds in the process that gave it. What is stored names the picture by its digest, and the
form of its positions, so that another process can tell whether its own picture is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlxrunner.cache.tokens import FIRST_OF_PICTURES as FIRST
from mlxrunner.cache.tokens import TokenArray, as_tokens
from mlxrunner.errors import PromptError
from mlxrunner.pictures.table import Picture, PictureTable, has_pictures

WORDS = 8
"""The 32-bit words of a digest."""
MOST_PICTURES = 2**16
"""Most pictures that stored tokens may have."""


class PictureNames:
    """The pictures of one model, in a form that holds in every process."""

    def __init__(self, table: PictureTable) -> None:
        self._table = table

    def of(self, tokens: TokenArray) -> dict[str, list[int]]:
        """Return what the ids of pictures among `tokens` stand for, to be stored beside them.

        Raise KeyError if one is of another model.
        """
        return as_json(one for _, _, one in self._table.among(tokens))

    def spelled(self, tokens: TokenArray) -> NDArray[np.int32]:
        """Return tokens as every process spells them: `[n]`, or `[n, 9]` with pictures among them.

        A row is a token, or the place in a picture and the digest of that.
        """
        if not has_pictures(tokens):
            return tokens
        found = np.zeros((len(tokens), 1 + WORDS), np.int32)
        found[:, 0] = tokens
        for begin, end, picture in self._table.among(tokens):
            found[begin:end, 0] -= picture.first
            found[begin:end, 1:] = np.frombuffer(picture.digest, np.int32)
        return found

    def adopted(self, tokens: TokenArray, stored: Any) -> TokenArray:
        """Return stored tokens with the ids that their pictures get here. Raise PromptError."""
        if not has_pictures(tokens):
            return tokens
        named = from_json(stored).pictures
        known = {one.digest: self._table.add(one.digest, one.count, one.grid) for one in named}
        return renumbered(tokens, stored, known)


def as_json(pictures: Iterable[Picture]) -> dict[str, list[int]]:
    """Return for the digest of each picture its first id, its positions, and its grid if any."""
    return {one.digest.hex(): [one.first, one.count, *(one.grid or ())] for one in pictures}


def from_json(found: Any) -> PictureTable:
    """Return the pictures that `as_json` wrote, with their ids. Raise PromptError if damaged."""
    if not isinstance(found, dict) or len(found) > MOST_PICTURES:
        raise PromptError("the pictures among the tokens are damaged")
    table = PictureTable()
    for digest, numbers in found.items():
        try:
            first, count, *axes = numbers
            if not all(type(one) is int and 0 < one < 2**31 for one in numbers) or first < FIRST:
                raise ValueError
            frames, rows, columns = axes or (1, 1, count)
            if frames * rows * columns != count or first + count >= 2**31:
                raise ValueError
            grid = (frames, rows, columns) if axes else None
            if len(found_digest := bytes.fromhex(digest)) != 4 * WORDS:
                raise ValueError
            table.restore(Picture(found_digest, first, count, grid))
        except (TypeError, ValueError) as error:  # PromptError is one
            raise PromptError("the pictures among the tokens are damaged") from error
    return table


def renumbered(tokens: TokenArray, stored: Any, known: Mapping[bytes, Picture]) -> TokenArray:
    """Return stored tokens with the ids that their pictures have in this process.

    `stored`: what `as_json` wrote of them. `known`: the pictures of this process, by digest. Raise
    PromptError if one is not known, has other positions, or if `stored` is damaged.
    """
    if not has_pictures(tokens):
        return tokens
    table, found = from_json(stored), as_tokens(tokens).copy()
    for old in table.pictures:
        here = (tokens >= old.first) & (tokens < old.first + old.count)
        if not here.any():
            continue
        new = known.get(old.digest)
        if new is None or (new.count, new.grid) != (old.count, old.grid):
            raise PromptError("a picture among them is not there, or the model sees it otherwise")
        found[here] -= old.first
        found[here] += new.first
        tokens = tokens.copy()
        tokens[here] = 0
    if has_pictures(tokens):
        raise PromptError("a picture among them is not named")
    return found
