"""Positions along three axes (M-RoPE): a text's tokens count on all of them, a picture's do not.

A picture begins where the text before it ends. Its rows and columns count from there, and the text
goes on behind the largest of them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mlxrunner.cache.tokens import TokenArray
from mlxrunner.pictures.table import PictureTable


def delta(table: PictureTable, tokens: TokenArray) -> int:
    """Return what has to be added to the offset behind `tokens` to get the next position.

    `tokens` end with no part of a picture.
    """
    return sum(picture.advance - picture.count for _, _, picture in table.among(tokens))


def axes(table: PictureTable, before: TokenArray, tokens: TokenArray) -> NDArray[np.int32]:
    """Return the positions `[3, n]` of n `tokens` that follow the tokens `before`."""
    both = np.concatenate([before, tokens])
    found = np.empty((3, len(both)), np.int32)
    position = place = 0
    for begin, end, picture in table.among(both):
        found[:, place:begin] = position + np.arange(begin - place)
        position += begin - place
        if picture.grid is None:
            found[:, begin:end] = position + np.arange(end - begin)
        else:
            grid = np.stack(np.unravel_index(np.arange(picture.count), picture.grid))
            found[:, begin:end] = position + grid[:, : end - begin]
        position += picture.advance
        place = end
    found[:, place:] = position + np.arange(len(both) - place)
    return found[:, len(before) :]
