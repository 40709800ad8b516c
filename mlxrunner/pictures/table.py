"""The positions of pictures among tokens: each has an id of its own, beyond every vocabulary.

Two positions have the same id only if the picture's pixels, the processor's settings and the place
in the picture are the same. What compares tokens therefore compares pictures. No tensors.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mlxrunner.cache.tokens import FIRST_OF_PICTURES as FIRST
from mlxrunner.cache.tokens import TokenArray
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
