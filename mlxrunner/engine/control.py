"""Operations on a runner's entry for this package only: sessions, profiles, verification."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlxrunner.cache.layers.factory import CacheOptions, make_layer_caches, outline_of
from mlxrunner.cache.layers.protocol import LayerCache, Saved, SavedEntry
from mlxrunner.cache.prefix import PrefixCache
from mlxrunner.cache.tokens import TokenArray


@dataclass(frozen=True)
class EntryControl:
    """The entry of one runner. Its methods raise the runner's BusyError and WrongThreadError."""

    model: Any
    """The model that the layer caches are for."""
    options: CacheOptions
    """The options of its layer caches."""
    entries: PrefixCache
    """The holder of the entry."""
    enter: Callable[[], None]
    """A function that checks the thread and reports the last request before the entry changes."""

    def explain_loss(self, reason: str, by: str, tokens: TokenArray) -> None:
        """Let the next request report that an earlier entry with `tokens` was lost, and why."""
        self.entries.lose(reason, by, tokens)

    def free(self, why: str, reason: str = "entry_freed") -> None:
        """Free the entry, and let the next request report why. Raise BusyError during a request."""
        self.enter()
        self.entries.reset(why, reason)

    def keep(self, tokens: Sequence[int]) -> None:
        """Rewind the entry to its common prefix with `tokens`. Raise BusyError during a request."""
        self.enter()
        self.entries.keep(tokens)

    def adopt(self, saved: SavedEntry, source: str = "a file") -> None:
        """Replace the entry by a saved one. Raise BusyError during a request.

        The saved entry is read when the next request begins, or at the first access to
        `Runner.entry`. The next request reports `source` with the reason `restored`.
        """
        self.enter()
        self.entries.adopt(saved, source)

    def outline(self) -> list[Saved]:
        """Return the outline of each layer, from the shapes of unevaluated tokens."""
        return outline_of(self.model, self.options)

    def cold_caches(self) -> list[LayerCache]:
        """Return new empty caches like those of the entry, which allocate memory as they grow."""
        return make_layer_caches(self.model, replace(self.options, whole=False))

    def empty_caches(self) -> list[LayerCache]:
        """Return the entry's own caches, emptied.

        The worst-case batch before the first request uses them.
        """
        return self.entries.empty_caches()
