"""Check tables of special tokens before a library reads them.

Reading takes quadratic time, and memory for the highest id.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mlxrunner.errors import ModelError, ReadError
from mlxrunner.system.reading import is_there, read_bytes
from mlxrunner.templates.rendering import MOST_JSON, read_json

MOST_SPECIAL = 2**15
"""Most special tokens of a model. Some speech models have 28,000."""
MOST_NAMED = 2**12
"""Most tokens listed as `additional_special_tokens`, which take longest to load."""
LAST_TOKEN = 2**22 - 1
"""The highest token id. The largest vocabularies in use have a million tokens."""


def check_tables(folder: Path) -> None:
    """Raise ModelError if a file of `folder` has too many special tokens, or too high ids."""
    settings, added = (
        read_json(folder / "tokenizer_config.json"),
        read_json(folder / "added_tokens.json"),
    )
    decoder = _of(settings, "added_tokens_decoder", dict)
    _check_count(
        folder / "tokenizer_config.json", "added_tokens_decoder", len(decoder), MOST_SPECIAL
    )
    check_ids(
        folder / "tokenizer_config.json",
        (int(token) for token in decoder if token.isdecimal() and len(token) < 100),
    )
    _check_count(folder / "added_tokens.json", "the file", len(added), MOST_SPECIAL)
    check_ids(
        folder / "added_tokens.json", (token for token in added.values() if type(token) is int)
    )
    for name, table in (
        ("tokenizer_config.json", settings),
        ("special_tokens_map.json", read_json(folder / "special_tokens_map.json")),
    ):
        for setting in ("additional_special_tokens", "extra_special_tokens"):
            _check_count(folder / name, setting, len(_of(table, setting, (list, dict))), MOST_NAMED)
    file = folder / "tokenizer.json"
    if is_there(file):
        try:
            _check_count(
                file, "the file", read_bytes(file, MOST_JSON).count(b'"special"'), MOST_SPECIAL
            )
        except ReadError as error:
            raise ModelError(str(error)) from error


def check_ids(file: Path, tokens: Iterable[int]) -> None:
    """Raise ModelError for an id that no vocabulary has. The message names `file`."""
    wrong = next((token for token in tokens if not 0 <= token <= LAST_TOKEN), None)
    if wrong is not None:
        shown = wrong if abs(wrong) < 10**20 else "a number of more than 20 digits"
        raise ModelError(
            f"{file}: a token has the id {shown}, and {LAST_TOKEN:,} is the last that one can have"
        )


def _of(table: dict[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    found = table.get(name)
    return found if isinstance(found, kind) else ()


def _check_count(file: Path, name: str, count: int, most: int) -> None:
    if count > most:
        raise ModelError(
            f"{file}: {name} has {count:,} special tokens, and {most:,} are the most: "
            "loading them would take minutes"
        )
