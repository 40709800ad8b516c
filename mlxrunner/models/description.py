"""Describe a model by figures that need no weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mlxrunner.models.eyes import runs_only_seeing
from mlxrunner.models.facts import CacheCost, cache_cost, weight_bytes, without_weights
from mlxrunner.models.load import tokenizer_of
from mlxrunner.models.resolve import resolve
from mlxrunner.models.seeing import unread_seeing
from mlxrunner.models.suggested import FILE, stop_strings


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


@dataclass(frozen=True)
class End:
    """An end of the model's answers."""

    text: str
    """The text of a token that ends an answer, or the text before which it ends."""
    token: int | None
    """The id of the token; None for a text."""
    places: tuple[str, ...]
    """The files that name it; "chat template" for a token with which it ends a turn."""


def ends_of(name: str) -> list[End]:
    """Return where the answers of the model `name` end. No weights are read.

    Raise ModelError if its tokenizer can't be loaded.
    """
    tokenizer = tokenizer_of(name)
    tokens = [
        End(tokenizer.decode([token]), token, places)
        for token, places in sorted(tokenizer.ends.items())
    ]
    texts = [End(text, None, (FILE,)) for text in stop_strings(resolve(name))]
    known = {end.text for end in texts}
    return [
        *tokens,
        *texts,
        *(
            End(text, None, ("fallback template",))
            for text in tokenizer.template_stops
            if text not in known
        ),
    ]


def describe(name: str) -> Description:
    """Describe the model `name` without loading its weights. Raise ModelError if it is broken."""
    found = unread_seeing(name) if runs_only_seeing(name) else without_weights(name)
    known = {
        name: value for name, value in vars(found.facts).items() if name != "depends_on_chunks"
    }
    return Description(
        **known, weight_bytes=weight_bytes(resolve(name)), cache=cache_cost(found.model)
    )
