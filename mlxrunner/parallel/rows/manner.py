"""The manner in which a model is adapted to rows of many sequences: what lies in shared cells.

A manner is a guess about a model. `mlxrunner.parallel.rows.proof` tries several, and keeps the
first one that gives the right answers. No tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from mlxrunner.cache.layers.extents import Window
from mlxrunner.cache.layers.protocol import LayerCache


class Sharing(Enum):
    """The layers that lie in shared cells."""

    PARTS = "attention, also where it is a part of a layer"
    WHOLE = "layers that are nothing but attention"
    NONE = "no layer"


@dataclass(frozen=True)
class Manner:
    """The way in which a model is adapted."""

    sharing: Sharing = Sharing.PARTS
    splits: bool = True
    """True if attention may be computed in parts."""
    adds_starts: bool = False
    """See `Step.adds_starts`."""
    cuts_head: bool = True
    """True if the last norm gets only the rows whose logits are wanted."""


def shares(like: LayerCache, sharing: Sharing) -> bool:
    """Return True if a layer lies in shared cells as a whole."""
    return like.stores_plain_rows and sharing is not Sharing.NONE


def falls_apart(like: LayerCache, sharing: Sharing) -> bool:
    """Return True if some parts of a composite layer, but not all, lie in shared cells.

    A layer of nothing but attention reads its parts together: it chooses what to attend.
    """
    plain = {part.stores_plain_rows for part in like.parts}
    return sharing is Sharing.PARTS and plain == {True, False}


def windows_of(likes: Sequence[LayerCache], sharing: Sharing) -> list[int]:
    """Return the window of each layer in shared cells, in tokens; 0 for full attention."""
    own = [window_of(like) for like in likes if shares(like, sharing)]
    parts = [windows_of(like.parts, sharing) for like in likes if falls_apart(like, sharing)]
    return own + [window for windows in parts for window in windows]


def window_of(like: LayerCache) -> int:
    """Return the window of a layer in tokens; 0 for full attention."""
    return like.extent.window if isinstance(like.extent, Window) else 0
