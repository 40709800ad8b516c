"""The values of options that hold, and the source of each.

A later layer is stronger: built-in defaults, the model's generation_config.json, the config file,
and what the user types. This knows nothing about files or commands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DEFAULT = "default"
MODEL = "model"
HERE = "here"
"""The source of what the user typed: on the command line, with `/set`, or in a session."""


@dataclass(frozen=True)
class Setting:
    """A value and its source."""

    value: Any
    source: str = HERE
    """DEFAULT, MODEL, HERE, or the place in the config file."""
    note: str | None = None
    """A note for the user about the name that it has at its source."""


Settings = Mapping[str, Setting]


def layer(options: Mapping[str, Any], source: str) -> dict[str, Setting]:
    """Return a layer whose values all come from one source."""
    return {name: Setting(value, source) for name, value in options.items()}


def settled(*layers: Settings) -> dict[str, Setting]:
    """Return the settings that hold. The weakest layer comes first."""
    return {name: setting for one in layers for name, setting in one.items()}


def values(settings: Settings) -> dict[str, Any]:
    """Return the values without their sources."""
    return {name: setting.value for name, setting in settings.items()}
