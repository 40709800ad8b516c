"""One rank of several, without the others: what it downloads, reads and keeps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mlxrunner.models.files import ModelShard, take_all
from mlxrunner.models.sharding import be_rank, share_among


@contextmanager
def sharing(part: ModelShard) -> Iterator[None]:
    """Resolve and load models in the block as a rank that has `part` of each.

    It stands for a group of MLX, of which loading asks only the rank and the size.
    """
    group: Any = part
    be_rank(part)
    share_among(group)
    try:
        yield
    finally:
        share_among(None)
        take_all()
