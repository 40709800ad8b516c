"""mlx-lm caches that can be trimmed as long as enough is stored: chunked attention, and windows that keep their first tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlxrunner.cache.layer import RewindError
from mlxrunner.cache.stock import StockCache


class TrimmableCache(StockCache):
    """A layer cache that can be trimmed as long as nothing has been dropped at its front."""

    def __init__(self, inner: Any, kind: str, holds_enough: Callable[[Any, int], bool]) -> None:
        """`holds_enough(inner, to)`: whether everything that a query at `to` sees is still stored."""
        super().__init__(inner)
        self.kind, self._holds_enough = kind, holds_enough

    def _cut(self, inner: Any) -> Any:
        keys, values, *numbers = inner.state
        rows = inner.offset - getattr(inner, "start_position", 0)
        return keys[..., :rows, :], values[..., :rows, :], *numbers

    def reachable(self, to: int) -> int:
        if self._interrupted or to >= self.offset or not self._holds_enough(self.inner, to):
            return super().reachable(to)
        return to

    def rewind(self, to: int) -> None:
        if not self.can_rewind(to):
            raise RewindError(self.kind, self.offset, to)
        if to == 0:
            self.free()
            return
        surplus = self.offset - to
        trimmed = self.inner.trim(surplus) if surplus else 0
        # Another number than asked for, or a count of its own that disagrees: the entry is freed, never used.
        self.offset = to if trimmed == surplus and self.inner.offset == to else -1
