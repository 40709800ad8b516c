"""One rank of several, without the others: what it downloads, reads and keeps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from mlxrunner.models.files import ModelShard, be_rank
from mlxrunner.models.sharding import share_among


def group_of(part: ModelShard) -> Any:
    """Return what stands for a group of MLX, of which loading asks only the rank and the size."""
    return SimpleNamespace(rank=lambda: part.own, size=lambda: part.ranks)


@contextmanager
def sharing(part: ModelShard) -> Iterator[None]:
    """Resolve and load models in the block as a rank that has `part` of each."""
    be_rank(part)
    share_among(group_of(part))
    try:
        yield
    finally:
        share_among(None)
        be_rank(None)
