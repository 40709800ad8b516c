"""What a saved entry depends on, as a short text for each part. No tensors.

Of the weights not every byte is read: a file's size, its header (names, types, shapes) and 64 bytes at the beginning, in the middle and
at the end of every tensor. That takes milliseconds where a whole file takes seconds, and a model that was trained further, merged or
quantized otherwise differs in all of them; a change that was made so as to leave those bytes alone is not seen.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlxrunner.cache.saved import Saved, outline
from mlxrunner.errors import ModelError
from mlxrunner.models.resolve import MOST_BYTES, read_config, read_headers
from mlxrunner.reading import ReadError, is_there, open_file, read_bytes
from mlxrunner.tokenizer.template import read_json, read_template

PARTS = {
    "weights": "other weights",
    "config": "another config.json",
    "tokenizer": "another tokenizer",
    "template": "another chat template",
    "kv": "caches of another format",
}
"""And how a difference is called."""
SPELLING = ("tokenizer", "template")
"""The parts that tokens depend on."""
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "added_tokens.json", "special_tokens_map.json", "vocab.json", "merges.txt", "tiktoken.model",
)  # fmt: skip
UNIMPORTANT = ("_name_or_path", "transformers_version")
SAMPLE = 64


def fingerprint(folder: Path) -> dict[str, str]:
    """Of the model directory `folder`, but for the format of its caches (`with_format`). ModelError where it is broken."""
    settings = read_json(folder / "tokenizer_config.json")
    template = read_template(folder, settings)
    words = [_content(folder / name) for name in TOKENIZER_FILES if is_there(folder / name)]
    return {
        "weights": _digest(
            *(
                part
                for file, header in read_headers(folder).items()
                for part in _samples(file, header)
            )
        ),
        "config": digest(
            {name: value for name, value in read_config(folder).items() if name not in UNIMPORTANT}
        ),
        "tokenizer": _digest(
            *words,
            _canonical(
                {name: value for name, value in settings.items() if name != "chat_template"}
            ),
        ),
        "template": _digest((template or "").encode()),
    }


def with_format(known: Mapping[str, str], outlines: Sequence[Saved]) -> dict[str, str]:
    """With the part "kv": the format of a model's layer caches."""
    return {**known, "kv": digest([outline(layer) for layer in outlines])}


def differences(saved: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Which parts are not the same."""
    return [part for part in PARTS if saved.get(part) != now.get(part)]


def digest(value: Any) -> str:
    """Of anything that JSON knows."""
    return _digest(_canonical(value))


def _content(file: Path) -> bytes:
    try:
        return read_bytes(file, MOST_BYTES[file.suffix])
    except ReadError as error:
        raise ModelError(str(error)) from error


def _samples(file: Path, header: dict[str, Any]) -> list[bytes]:
    fd, size = open_file(file)
    with os.fdopen(fd, "rb"):
        begin = size - max(
            (entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"),
            default=0,
        )
        found = [str(size).encode(), _canonical(header)]
        for name, entry in header.items():
            if name != "__metadata__":
                first, last = (begin + offset for offset in entry["data_offsets"])
                places = {
                    first,
                    max(first, (first + last - SAMPLE) // 2),
                    max(first, last - SAMPLE),
                }
                found += [
                    os.pread(fd, min(SAMPLE, last - place), place) for place in sorted(places)
                ]
    return found


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()


def _digest(*parts: bytes) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()[:16]
