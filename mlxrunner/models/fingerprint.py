"""Make short digests of a model and a run. Sessions, batches and events compare them.

`fingerprint` describes a model's files, `model_parts` and `option_parts` what a batch depends on,
and `loaded_fingerprint` a model in memory with the options that decide what it stores. Users' files
hold these digests: if the content of a digest changes, all older files look foreign.

Not every byte of the weights is read. The digest of the files covers each file's size, its header
(names, types, shapes), and 64 bytes at the beginning, in the middle and at the end of every tensor.
This takes milliseconds; whole files take seconds. Further training, merging and quantizing change
all of these. A change that leaves exactly those bytes alone stays unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlxrunner.cache.saved import Saved, outline
from mlxrunner.errors import ModelError, ReadError
from mlxrunner.models.files import MOST_BYTES, config_as_written, placed_tensors, read_headers
from mlxrunner.system.reading import is_there, open_file, read_bytes
from mlxrunner.system.tensorfile import Header
from mlxrunner.templates.rendering import read_json, read_templates

if TYPE_CHECKING:
    from mlxrunner.models.facts import ModelFacts

PARTS = {
    "weights": "other weights",
    "config": "another config.json",
    "tokenizer": "another tokenizer",
    "template": "another chat template",
    "kv": "caches of another format",
}
"""The description of a difference, by part."""
STORED_NAMES = {
    "weights": "set of weights",
    "config": "config.json",
    "tokenizer": "tokenizer",
    "template": "chat template",
}
"""The name under which a batch stores a part."""
SPELLING = ("tokenizer", "template")
"""The parts that tokens depend on."""
FLAGS = {"template": "template_var"}
"""The names on the command line of options that have another name there."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "added_tokens.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tiktoken.model",
)
UNIMPORTANT = ("_name_or_path", "transformers_version")
SAMPLE = 64
"""Bytes that are read at each place of a tensor in a file."""
SAMPLED_WEIGHTS = 16
"""Approximate number of sampled weights in memory, and number of sampled values of each."""


def fingerprint(folder: Path) -> dict[str, str]:
    """Return the fingerprint of the model directory `folder`, without its cache format.

    `with_format` adds the format of its caches. Raise ModelError if the directory is broken.
    """
    return {"weights": _weights(folder), **_settings(folder)}


def probe_key(folder: Path, *about: Any) -> str:
    """Return a digest of what the outputs of a model depend on: its weights and config.json.

    `about`: the code and the device that compute them. Raise ModelError if the directory is
    broken.
    """
    return digest([_weights(folder), config_as_written(folder), *about])


def _weights(folder: Path) -> str:
    headers = read_headers(folder).items()
    return _digest(*(part for file, header in headers for part in _samples(file, header)))


def by_files(folder: Path) -> dict[str, str]:
    """Return the fingerprint of a model by its files, of which each rank may have only some.

    The weights are a digest for each file, and one of the file in which each tensor is: where that
    is the same, a file that only one rank has is one that the other rank does not need. Raise
    ModelError if the directory is broken.
    """
    headers, placed = read_headers(folder), placed_tensors(folder)
    names = {file.relative_to(folder).as_posix(): file for file in headers}
    others = sorted(names.keys() - {*placed.values()})
    weights = {
        f"weights ({name})": _digest(*_samples(file, headers[file])) for name, file in names.items()
    }
    weights["division of the weights into files"] = digest([placed, others])
    return {**weights, **_settings(folder)}


def different_files(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """List what differs between two fingerprints `by_files`, of what both have."""
    return [name for name in one if name in other and one[name] != other[name]]


def _settings(folder: Path) -> dict[str, str]:
    """Return the digests of all but the weights."""
    settings = read_json(folder / "tokenizer_config.json")
    templates = read_templates(folder, settings)
    of_processor = read_templates(folder, settings, of_processor=True)
    is_one = of_processor == templates and templates.keys() <= {"default"}
    template = templates.get("default", "").encode()
    if not is_one:
        template = _canonical([templates, of_processor])
    words = [_content(folder / name) for name in TOKENIZER_FILES if is_there(folder / name)]
    words.append(_canonical({name: settings[name] for name in settings.keys() - {"chat_template"}}))
    config = config_as_written(folder)
    return {
        "config": digest({name: config[name] for name in config.keys() - {*UNIMPORTANT}}),
        "tokenizer": _digest(*words),
        "template": _digest(template),
    }


def with_format(known: Mapping[str, str], outlines: Sequence[Saved]) -> dict[str, str]:
    """Add the part "kv": the format of a model's layer caches."""
    return {**known, "kv": digest([outline(layer) for layer in outlines])}


def differences(saved: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """List the parts that differ between two fingerprints."""
    return [part for part in PARTS if saved.get(part) != now.get(part)]


def model_parts(name: str, folder: Path) -> dict[str, str]:
    """Return the name of a model and a digest of each part of it, by the names that batches store.

    Raise ModelError if the model directory `folder` is broken.
    """
    parts = fingerprint(folder)
    return {"model": name, **{STORED_NAMES[part]: found for part, found in parts.items()}}


def option_parts(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the options that are set, by their names on the command line, with values in JSON."""
    return {
        f"--{FLAGS.get(name, name).replace('_', '-')}": json.dumps(value)
        for name, value in options.items()
        if value not in (None, (), [])
    }


def loaded_fingerprint(
    weights: Iterable[tuple[str, Any]], facts: ModelFacts, settings: Mapping[str, Any]
) -> str:
    """Return a digest of a model in memory: 16 hexadecimal digits.

    It covers the architecture, the shapes and a sample of the `weights` (name and array of each),
    and `settings`. The model's name and files don't matter.
    """
    ordered = sorted(weights)
    shapes = [[name, list(array.shape), str(array.dtype)] for name, array in ordered]
    described = [facts.architecture, facts.layers, facts.vocab, dict(settings), shapes]
    found = hashlib.blake2b(digest_size=8)
    found.update(json.dumps(described, sort_keys=True).encode())
    for _, array in ordered[:: max(1, len(ordered) // SAMPLED_WEIGHTS)]:
        values = np.array(array.reshape(-1)[:SAMPLED_WEIGHTS].tolist(), np.float32)
        found.update(json.dumps(values.tolist()).encode())
    return found.hexdigest()


def digest(value: Any) -> str:
    """Return a short digest of a value that JSON can hold."""
    return _digest(_canonical(value))


def _content(file: Path) -> bytes:
    try:
        return read_bytes(file, MOST_BYTES[file.suffix])
    except ReadError as error:
        raise ModelError(str(error)) from error


def _samples(file: Path, header: Header) -> list[bytes]:
    fd, size = open_file(file)
    with os.fdopen(fd, "rb"):
        found = [str(size).encode(), _canonical(header.entries)]
        for tensor in header.tensors.values():
            first, last = tensor.begin, tensor.begin + tensor.nbytes
            places = {first, max(first, (first + last - SAMPLE) // 2), max(first, last - SAMPLE)}
            found += [os.pread(fd, min(SAMPLE, last - place), place) for place in sorted(places)]
    return found


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()


def _digest(*parts: bytes) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()[:16]
