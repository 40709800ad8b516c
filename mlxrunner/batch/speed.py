"""How fast each model was when it last ran, in one small file of the user's cache folder: what estimates are made from.

It is never worth an error: a file that can't be read or written, or that is damaged, is as good as none.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mlxrunner.reading import ReadError, read_json
from mlxrunner.writing import written

MOST_MODELS = 100
"""Those used last; the file stays small."""
LARGEST = 2**20
"""Bytes of the file."""


@dataclass(frozen=True)
class Speed:
    """Tokens per second of prompts (those evaluated) and of answers (of all that run at once), and the tokens of a mean answer."""

    prefill_rate: float
    decode_rate: float
    answer_tokens: float

    def seconds(self, evaluated: int, answers: float) -> float:
        """Time for so many prompt tokens and answer tokens."""
        return evaluated / self.prefill_rate + answers / self.decode_rate


def speed_file() -> Path:
    """`$XDG_CACHE_HOME/mlxrunner/speed.json`, by default in ~/.cache."""
    folder = os.environ.get("XDG_CACHE_HOME")
    return (Path(folder) if folder else Path.home() / ".cache") / "mlxrunner" / "speed.json"


def known_speed(model: str) -> Speed | None:
    """What was measured last for `model`, as the user names it; None if nothing was, or nothing that can be believed."""
    with suppress(TypeError, ValueError, KeyError):
        speed = Speed(**_read()[_key(model)])
        if all(_is_measured(getattr(speed, field.name)) for field in fields(speed)):
            return speed
    return None


def remember_speed(model: str, speed: Speed) -> None:
    """Keep it for the next estimate, if the file can be written: whole, and for its owner only."""
    models = _read()
    models.pop(_key(model), None)
    models[_key(model)] = asdict(speed)
    with suppress(OSError, RuntimeError):
        file = speed_file()
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with written(file) as stream:
            json.dump(dict(list(models.items())[-MOST_MODELS:]), stream, indent=1)


def _is_measured(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value > 0
    )


def _key(model: str) -> str:
    """A directory by its whole path."""
    with suppress(OSError, ValueError, RuntimeError):
        folder = Path(model).expanduser()
        if folder.is_dir():
            return str(folder.resolve())
    return model


def _read() -> dict[str, Any]:
    with suppress(ReadError, RuntimeError):  # the second: a home directory of nobody
        found = read_json(speed_file(), LARGEST)
        if isinstance(found, dict):
            return found
    return {}
