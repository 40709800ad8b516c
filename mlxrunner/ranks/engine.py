"""The first rank of a model that answers several conversations: one request in a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import mlx.core as mx

from mlxrunner.cache.layers.factory import CacheOptions
from mlxrunner.cache.layers.protocol import LayerCache
from mlxrunner.errors import ModelError
from mlxrunner.parallel.rows.sequential import SequentialModel
from mlxrunner.ranks.leading import COPY, DROP, LeadingModel

WHY = "ranks that share a model run one request in a step"


class SharedModel(LeadingModel):
    """A model that brings the engine of its conversations."""

    def own_engine(self, options: CacheOptions) -> LeadingEngine:
        """Return the engine, with layer caches of `options`."""
        engine = LeadingEngine(self, options, WHY)
        self.caches = lambda: engine.sequences
        return engine


class LeadingEngine(SequentialModel):
    """The first rank's engine. The other ranks run its steps, and copy and drop what it does."""

    model: SharedModel

    def copied(self, source: int, target: int, count: int) -> None:
        self.model.tell([COPY, source, target, count])
        self.model.held.of(self.model)[target] = count

    def rotate(
        self, caches: Sequence[LayerCache], by: int
    ) -> Sequence[Callable[[Any, int], Any]] | None:
        """Return None: no keys are moved."""
        return None

    def close(self) -> None:
        """Forget all sequences, and let the other ranks drop their parts of the model.

        The last pass ends first: the others are in it, too.
        """
        if self.sequences:
            with suppress(RuntimeError):  # a rank is lost: the guard says so
                mx.synchronize()
            with suppress(ModelError):  # another model has taken its place
                self.model.tell(DROP)
        super().close()
