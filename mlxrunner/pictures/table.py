"""The positions of pictures among tokens: each has an id of its own, beyond every vocabulary.

Two positions have the same id only if the picture's pixels, the processor's settings and the place
in the picture are the same. What compares tokens therefore compares pictures. No tensors.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlxrunner.cache.entry import FIRST_OF_PICTURES as FIRST
from mlxrunner.cache.entry import TokenArray, as_tokens
from mlxrunner.errors import PromptError


@dataclass(frozen=True)
class Picture:
    """A picture that the model may see."""

    digest: bytes
    """The SHA-256 of its pixels and of the settings of the processor."""
    first: int
    """The id of its first position."""
    count: int
    """The positions that it takes."""
    grid: tuple[int, int, int] | None = None
    """Frames, rows and columns of its positions, if the model counts them along three axes."""

    @property
    def ids(self) -> TokenArray:
        """The ids of its positions, in order."""
        return np.arange(self.first, self.first + self.count, dtype=np.int32)

    @property
    def advance(self) -> int:
        """The distance of the next token's position from that of the picture's first one."""
        return self.count if self.grid is None else max(self.grid)


class PictureTable:
    """All pictures that a model was given. An id is never used again."""

    def __init__(self) -> None:
        self._by_digest: dict[bytes, Picture] = {}
        self._firsts: list[int] = []
        self._pictures: list[Picture] = []
        self._next = FIRST

    def add(self, digest: bytes, count: int, grid: tuple[int, int, int] | None = None) -> Picture:
        """Return the picture with this digest; see `Picture` for the other arguments.

        One that was stored with other positions gets new ids. Raise PromptError if no ids are left.
        """
        known = self._by_digest.get(digest)
        if known is not None and (known.count, known.grid) == (count, grid):
            return known
        if self._next + count > np.iinfo(np.int32).max:
            raise PromptError("too many pictures for one process: start it again")
        picture = Picture(digest, self._next, count, grid)
        self._put(picture)
        return picture

    def restore(self, picture: Picture) -> None:
        """Take in a picture with the ids that another process gave it, unless it is known.

        Raise PromptError if other pictures have these ids.
        """
        if picture.digest not in self._by_digest:
            self._put(picture)

    def _put(self, picture: Picture) -> None:
        at = bisect_right(self._firsts, picture.first)
        before = self._pictures[at - 1] if at else None
        after = self._pictures[at] if at < len(self._pictures) else None
        if (before is not None and before.first + before.count > picture.first) or (
            after is not None and picture.first + picture.count > after.first
        ):
            raise PromptError("two pictures have the same ids: tokenize both with one model")
        self._by_digest[picture.digest] = picture
        self._pictures.insert(at, picture)
        self._firsts.insert(at, picture.first)
        self._next = max(self._next, picture.first + picture.count)

    @property
    def pictures(self) -> Sequence[Picture]:
        """All pictures, in the order of their ids."""
        return self._pictures

    def at(self, token: int) -> Picture:
        """Return the picture of a position's id. Raise KeyError if there is none."""
        index = bisect_right(self._firsts, token) - 1
        if index < 0 or token >= self._firsts[index] + self._pictures[index].count:
            raise KeyError(token)
        return self._pictures[index]

    def among(self, tokens: TokenArray) -> Iterator[tuple[int, int, Picture]]:
        """Yield for each run of a picture's positions its begin, its end and the picture."""
        if not has_pictures(tokens):
            return
        place = 0
        while True:
            seen = tokens[place:] >= FIRST
            if not seen.any():
                return
            begin = place + int(seen.argmax())
            picture = self.at(int(tokens[begin]))
            left = picture.first + picture.count - int(tokens[begin])
            place = min(begin + left, len(tokens))
            yield begin, place, picture


def has_pictures(tokens: TokenArray) -> bool:
    """Return True if a position of a picture is among `tokens`."""
    return bool(len(tokens)) and int(tokens.max()) >= FIRST


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
