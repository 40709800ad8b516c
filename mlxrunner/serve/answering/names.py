"""Find the model that a client means. A client can name what is on this machine, and nothing else.

A request for an answer never downloads a model, and never names a folder that the server's user has
not named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mlxrunner.config.names import did_you_mean
from mlxrunner.errors import ModelError
from mlxrunner.models.catalog import cached_models
from mlxrunner.models.resolve import HUB_ID, folder_if_here, lasting
from mlxrunner.options import EMBEDDED
from mlxrunner.serve.events import RefusedError

LATEST = ":latest"
"""The tag that Ollama's clients add to a name."""
CLAUDE = "claude-"
"""The beginning of the names of Anthropic's models, which no other has.

Their clients name several for their own tasks: titles, subagents, the check of commands.
"""


@dataclass(frozen=True)
class ModelNames:
    """The names of models that requests may give."""

    first: str
    """The model of requests that name none, as the user named it."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of models, from the config file."""
    only_first: bool = False
    """True if requests get no other model than the first."""
    has_claude: bool = True
    """True if a name of Anthropic's that no model has here means the first model."""

    @property
    def shown(self) -> str:
        """The name that clients see of the first model: a folder's is its last part."""
        place = Path(lasting(self.first))
        return place.name if place.is_absolute() else self.first

    def find(self, asked: str) -> str:
        """Return the model that a request means by `asked`. Raise RefusedError if it is unknown."""
        for name in (asked, asked.removesuffix(LATEST)):
            if name in ("", self.shown, self.first):
                return self.first
            if name in self.aliases and self._may_be(self.aliases[name]):
                return self.aliases[name]
            if self.only_first:
                continue
            if name in EMBEDDED or (HUB_ID.fullmatch(name) and _is_here(name)):
                return name
        if self.has_claude and asked.startswith(CLAUDE):
            return self.first
        known = list(self)
        raise RefusedError(
            404,
            f"there is no model {asked:.100}: {did_you_mean(asked, known)}"
            f"this server has {', '.join(known)}. Set the client to one of these, or add an alias "
            "to the config file",
            code="model_not_found",
            param="model",
        )

    def known_as(self, asked: str) -> str:
        """Return `asked`, a name that `find` finds, as the lists of models have it."""
        if asked in self.aliases:
            return asked
        return asked.removesuffix(LATEST) or self.shown

    def show(self, name: str) -> str:
        """Return the name that clients see of the model `name`."""
        return self.shown if name == self.first else name

    def __iter__(self) -> Iterator[str]:
        """Yield the names that clients can give, the first model's first."""
        aliases = [alias for alias, name in self.aliases.items() if self._may_be(name)]
        others = () if self.only_first else _cached()
        yield from dict.fromkeys((self.shown, *aliases, *others))

    def _may_be(self, name: str) -> bool:
        """Return True if requests may get the model `name`."""
        return not self.only_first or name == self.first


def _is_here(name: str) -> bool:
    """Return True if a hub id is in the local cache. A path of two parts is none."""
    return not Path(name).is_dir() and folder_if_here(name) is not None


def _cached() -> list[str]:
    try:
        return [model.name for model in cached_models()]
    except ModelError:
        return []
