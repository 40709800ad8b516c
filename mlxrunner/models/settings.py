"""Check the values of a config.json before a model is built: one number can take all memory."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlxrunner.errors import ModelError

COUNTS = re.compile(
    r"(?!.*(?:size|dim|tokens)_)(?:.*_)?"
    r"(?:layers?|experts?|loops|blocks|codebooks|depth|embedders|ngram)"
)
"""Names of settings that count parts of a model. Building each part costs time in Python."""
MOST_PARTS = 1024
"""Largest number of parts. The deepest models have 200 layers, the widest 512 experts."""
ALWAYS_BUILT = 64
"""Number of layers up to which building the model costs nothing."""
SIZES = re.compile(
    r"(?:.*_)?(?:(?:hidden|intermediate|vocab)_size|d_model|n_embd|n_inner|dim|heads?|rank)"
)
MOST_SIZE = 2**27
"""Largest side of a matrix."""
FORMS: dict[str, tuple[type, str]] = {
    "tie_word_embeddings": (bool, "true or false"),
    "rope_scaling": (dict, "an object"),
    "rope_parameters": (dict, "an object"),
}
"""The forms of settings with which a model would be built wrongly in silence, or fail elsewhere."""
MOST_LIST = 2**16
"""Longest list of settings, such as the kinds of all layers."""


def check_settings(file: Path, config: dict[str, Any]) -> None:
    """Raise ModelError for the first setting of `config` that no model can have.

    Nested settings are checked, too. The message names `file`.
    """
    for name, value in _settings(config):
        last = name.rpartition(".")[2]
        if isinstance(value, list) and len(value) > MOST_LIST:
            raise ModelError(
                f"{file}: {name[:200]} is a list of {len(value):,} values, and {MOST_LIST:,} are "
                "the most"
            )
        form, shown = FORMS.get(last, (object, ""))
        if value is not None and not isinstance(value, form):
            raise ModelError(f"{file}: {name[:200]} is {reprlib.repr(value)}: write {shown}")
        is_size = COUNTS.fullmatch(last) or SIZES.fullmatch(last)
        if isinstance(value, str) and value.strip().isdecimal() and is_size:
            raise ModelError(f"{file}: {name[:200]} is the text {value[:40]!r}: write a number")
        for pattern, most in ((COUNTS, MOST_PARTS), (SIZES, MOST_SIZE)):
            if (
                isinstance(value, int | float)
                and pattern.fullmatch(last)
                and not -1 <= value <= most
            ):
                shown = (
                    repr(value)
                    if abs(value) < 10**20
                    else f"{value:.0e}"
                    if abs(value) < 10**300
                    else "a huge number"
                )
                raise ModelError(
                    f"{file}: {name[:200]} is {shown}; no model has more than {most:,}: download "
                    "the file again"
                )


def check_layers(file: Path, config: dict[str, Any], tensors: int) -> None:
    """Raise ModelError if the model has more layers than its weight files have `tensors`.

    Each layer has at least one tensor of its own.
    """
    layers = size_of(config, "num_hidden_layers", "n_layers", "n_layer", "num_layers")
    if layers > max(tensors, ALWAYS_BUILT):
        raise ModelError(
            f"{file}: {layers:,} layers, but the weight files have {tensors:,} tensors in all: "
            "they are not of one model"
        )


def size_of(config: dict[str, Any], *names: str) -> int:
    """Return the value of the first of `names` that is a positive whole number.

    It may be in `config` or its `text_config`. Return 0 if there is none.
    """
    sources = (config, text_settings(config))
    return next(
        (s[name] for name in names for s in sources if type(s.get(name)) is int and s[name] > 0), 0
    )


def text_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the text settings of a model with several kinds of input; empty if it has none."""
    found = config.get("text_config")
    return found if isinstance(found, dict) else {}


def _settings(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every setting with its name, `a.b` for a nested one."""
    for name, value in config.items():
        yield prefix + name, value
        if isinstance(value, dict):
            yield from _settings(value, f"{prefix}{name}.")
