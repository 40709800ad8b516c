"""Describe a model by figures that need no weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mlxrunner.models.eyes import runs_only_seeing
from mlxrunner.models.facts import CacheCost, cache_cost, weight_bytes, without_weights
from mlxrunner.models.resolve import resolve
from mlxrunner.models.seeing import unread_seeing


@dataclass(frozen=True)
class Description:
    """The figures of `mlxrunner show`: the facts that need no weights, and sizes in bytes."""

    architecture: str
    context: int
    context_is_known: bool
    layers: dict[str, int]
    vocab: int
    weight_bytes: int
    cache: CacheCost

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def describe(name: str) -> Description:
    """Describe the model `name` without loading its weights. Raise ModelError if it is broken."""
    found = unread_seeing(name) if runs_only_seeing(name) else without_weights(name)
    known = {
        name: value for name, value in vars(found.facts).items() if name != "depends_on_chunks"
    }
    return Description(
        **known, weight_bytes=weight_bytes(resolve(name)), cache=cache_cost(found.model)
    )
