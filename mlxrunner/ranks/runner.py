"""The runner of the first rank, whose entry only forward passes fill."""

from __future__ import annotations

from mlxrunner.cache.layers.protocol import SavedEntry
from mlxrunner.engine.control import EntryControl
from mlxrunner.runner import Runner


class FirstRunner(Runner):
    """A runner whose passes other ranks run, too. They have no saved entries."""

    @property
    def cache(self) -> EntryControl:
        """Operations on the entry; a saved one is not adopted."""
        return _Control(**vars(super().cache))


class _Control(EntryControl):
    def adopt(self, saved: SavedEntry, source: str = "a file") -> None:
        self.enter()
        self.entries.reset()
        self.explain_loss("entry_freed", f"{source} has the part of one rank", saved.tokens)
