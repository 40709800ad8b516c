"""The place where a protocol gets its answers: `Answers.answer`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from mlxrunner.serve.asked import Asked
from mlxrunner.serve.events import Event


@dataclass(frozen=True)
class ModelCard:
    """A model that the server can answer with, as far as clients may know it."""

    name: str
    is_loaded: bool
    context: int
    """Tokens of a prompt and its answer; 0 if it is not known before the model is loaded."""
    bytes: int = 0
    """Bytes of its files."""
    modified: float = 0.0
    """Unix time at which its files changed last."""
    architecture: str = ""
    digest: str = ""
    """The fingerprint of the files."""
    has_tools: bool = False
    has_thinking: bool = False
    template: str = ""
    """The text of its chat template."""
    sees: bool = False
    """True if requests may have pictures."""
    expires: float | None = None
    """Unix time at which it is unloaded if nobody asks; None: never, or not loaded."""


class Answers(Protocol):
    """The functions of the server that protocols use."""

    def answer(self, asked: Asked) -> AsyncIterator[Event]:
        """Yield the events of an answer. Closing the iterator ends the request within one step.

        Raise RefusedError, before the first event or later.
        """
        ...

    async def count(self, asked: Asked) -> int:
        """Return the number of tokens of the prompt, without evaluating it. Raise RefusedError."""
        ...

    def models(self) -> Sequence[ModelCard]:
        """Return the models that a request may name."""
        ...

    def card(self, model: str) -> ModelCard:
        """Return the model that a request means by `model`. Raise RefusedError if it is unknown."""
        ...

    async def hold(self, model: str, keep_alive: float | None) -> None:
        """Load a model, and unload it `keep_alive` seconds after its last answer.

        0 unloads it now, a negative number never; None: as the server is set. Raise RefusedError.
        """
        ...
