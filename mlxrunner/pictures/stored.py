"""Pictures among stored tokens: what their ids stood for, and the ids that they have now.

An id holds in the process that gave it. What is stored names the picture by its digest, and the
form of its positions, so that another process can tell whether its own picture is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mlxrunner.cache.tokens import FIRST_OF_PICTURES as FIRST
from mlxrunner.cache.tokens import TokenArray, as_tokens
from mlxrunner.errors import PromptError
from mlxrunner.pictures.table import Picture, PictureTable, has_pictures

MOST_PICTURES = 2**16
"""Most pictures that stored tokens may have."""


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
            table.restore(Picture(bytes.fromhex(digest), first, count, grid))
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
