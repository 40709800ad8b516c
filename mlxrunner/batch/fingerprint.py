"""What the answers of a batch depend on, by name, so that a run is only gone on with where it would go on the same. No tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxrunner.errors import MlxrunnerError
from mlxrunner.models.fingerprint import fingerprint

INPUT = "input"
"""The name of the input's SHA-256 among the parts."""
NAMES = {
    "weights": "set of weights",
    "config": "config.json",
    "tokenizer": "tokenizer",
    "template": "chat template",
}
"""How a part of a model is called where it is another one."""
_SHOWN = 80


class DifferentRunError(MlxrunnerError):
    """The run that is to be gone on with was begun with something else. Exit code 2: it can be mended."""

    exit_code = 2


def model_parts(name: str, folder: Path) -> dict[str, str]:
    """The model: its name, and a hash of each part of it. ModelError where it is broken."""
    return {"model": name, **{NAMES[part]: found for part, found in fingerprint(folder).items()}}


def option_parts(options: Mapping[str, Any]) -> dict[str, str]:
    """Options as the command line calls them, those that are not set left out."""
    return {
        f"--{name.replace('_', '-')}": json.dumps(value)
        for name, value in options.items()
        if value not in (None, (), [])
    }


def check_same(was: Mapping[str, str], now: Mapping[str, str], what: str) -> None:
    """DifferentRunError names the first part that is not the same, with both values. `what`: the file to be gone on with."""
    for name in [*now, *(name for name in was if name not in now)]:
        before, after = (_shown(parts.get(name)) for parts in (was, now))
        if was.get(name) != now.get(name):
            raise DifferentRunError(
                f"{what} was begun with another {name}: {before} then, {after} now; --resume needs the same, or choose another -o"
            )


def _shown(value: str | None) -> str:
    if value is None:
        return "not set"
    return value if len(value) <= _SHOWN else f"{value[:_SHOWN]} ..."
