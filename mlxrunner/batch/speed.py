"""Keep the speed of each model in its last batch, for the estimates of the next one.

It is in one small file of the user's cache folder. A file that can't be read or written, or that is
damaged, counts as no file and never raises an error.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mlxrunner.errors import ReadError
from mlxrunner.system.folders import cache_folder
from mlxrunner.system.reading import read_json
from mlxrunner.system.writing import sealed, written

MOST_MODELS = 100
"""The number of models whose speed is kept, those used last, so that the file stays small."""
LARGEST = 2**20
"""The most bytes of the file of speeds."""


@dataclass(frozen=True)
class Speed:
    """The speed of a model in its last batch."""

    prefill_rate: float
    """Prompt tokens evaluated per second."""
    decode_rate: float
    """Answer tokens per second, of all lines that ran at once."""
    answer_tokens: float
    """The mean number of tokens of an answer."""

    def seconds(self, evaluated: int, answers: float) -> float:
        """Return the seconds for `evaluated` prompt tokens and `answers` answer tokens."""
        return evaluated / self.prefill_rate + answers / self.decode_rate


def speed_file() -> Path:
    """Return the path `$XDG_CACHE_HOME/mlxrunner/speed.json`, by default in ~/.cache."""
    return cache_folder() / "speed.json"


def known_speed(model: str) -> Speed | None:
    """Return the last measured speed of `model`, as the user names it.

    Return None if there is none, or if its figures are not positive numbers.
    """
    with suppress(TypeError, ValueError, KeyError):
        speed = Speed(**_speeds()[_key(model)])
        if all(_is_measured(getattr(speed, field.name)) for field in fields(speed)):
            return speed
    return None


def remember_speed(model: str, speed: Speed) -> None:
    """Keep the speed for the next estimate, in a file with mode 0600.

    Nothing happens if the file can't be written.
    """
    models = _speeds()
    models.pop(_key(model), None)
    models[_key(model)] = asdict(speed)
    with suppress(OSError, RuntimeError):
        file = speed_file()
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with written(file) as stream:
            stream.write(sealed(json.dumps(dict(list(models.items())[-MOST_MODELS:]), indent=1)))


def _is_measured(value: Any) -> bool:
    """Return True if `value` is a positive, finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > 0


def _key(model: str) -> str:
    """Return the name of a model in the file; for a directory its absolute path."""
    with suppress(OSError, ValueError, RuntimeError):
        folder = Path(model).expanduser()
        if folder.is_dir():
            return str(folder.resolve())
    return model


def _speeds() -> dict[str, Any]:
    """Return the speeds in the file by model; empty if it can't be read."""
    with suppress(ReadError, RuntimeError):  # RuntimeError: there is no home directory
        found = read_json(speed_file(), LARGEST, sealed=True)
        if isinstance(found, dict):
            return found
    return {}
