"""The arrays in a tree of them. mlx's own helpers, with types."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten


def leaves(tree: Any) -> list[mx.array]:
    """All arrays in nested lists, tuples and dicts."""
    pairs: Any = tree_flatten(tree)
    return [leaf for _, leaf in pairs if isinstance(leaf, mx.array)]


def tree_bytes(tree: Any) -> int:
    """Bytes of all arrays in the tree."""
    return sum(leaf.nbytes for leaf in leaves(tree))


def contiguous(array: mx.array) -> mx.array:
    """A copy of its own where `array` is a view, so that what it was cut from can be freed."""
    return mx.contiguous(array)
