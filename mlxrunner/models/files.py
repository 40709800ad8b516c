"""Read the files of a model's folder, checked before a library opens them."""

from __future__ import annotations

import os
from contextlib import suppress
from fnmatch import fnmatch
from glob import escape
from pathlib import Path
from typing import Any

from mlxrunner.errors import MissingFileError, ModelError, ReadError
from mlxrunner.models.part import needed_tensors, own_part
from mlxrunner.models.settings import check_settings
from mlxrunner.system.reading import is_of_kernel, is_there, open_file, read_json
from mlxrunner.system.tensorfile import Header, HeaderError
from mlxrunner.system.tensorfile import read_header as read_tensors

WEIGHTS = "model*.safetensors"
"""The files of weights that are read."""
INDEX = "model.safetensors.index.json"
"""The file that says in which file each tensor is, where there are several."""
MOST_SETTINGS = 2**24
"""Largest size of a config.json in bytes.

The largest one in use, with a setting for each of a hundred thousand tensors, has half this size.
"""
MOST_HEADER = 2**26
"""Largest size of the header of a weight file, in bytes."""
MOST_SIDE = 2**31 - 1
"""Largest side of a tensor: MLX counts with 32 bits."""
MOST_BYTES = {
    ".json": 2**27,
    ".jinja": 2**20,
    ".jsonl": 2**27,
    ".txt": 2**26,
    ".model": 2**27,
    ".tiktoken": 2**26,
    ".py": 2**22,
}
"""Largest size in bytes of a file that a tokenizer is made from, by its suffix.

Each is several times the size of the largest file in use.
"""
LAST_TOKEN = 2**31 - 1
TEXT_PARTS = ("text_config", "llm_config", "language_config")
"""Names of the settings of the part of a model that writes text."""


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json after checking its values.

    Raise ModelError if it is missing or broken.
    """
    file = folder / "config.json"
    try:
        config = read_json(file, MOST_SETTINGS)
    except MissingFileError as error:
        if is_there(file):
            raise ModelError(str(error)) from error
        raise ModelError(
            f"{file}: missing: a model directory needs config.json, *.safetensors and tokenizer "
            "files"
        ) from error
    except ReadError as error:
        raise ModelError(str(error)) from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(f"{file}: has no model_type")
    check_settings(file, config)
    return config


def eos_tokens(folder: Path, config: dict[str, Any]) -> dict[int, tuple[str, ...]]:
    """Return the end-of-sequence ids of config.json and generation_config.json, with their files.

    The ids in the settings of a part that writes text count, too. Values that are not token ids are
    ignored.
    """
    sources: list[tuple[str, Any]] = [("config.json", config)]
    sources += [("config.json", config.get(name)) for name in TEXT_PARTS]
    with suppress(ReadError):
        file = "generation_config.json"
        sources.append((file, read_json(folder / file, MOST_SETTINGS)))
    found: dict[int, tuple[str, ...]] = {}
    for file, source in sources:
        ids = source.get("eos_token_id") if isinstance(source, dict) else None
        for token in ids if isinstance(ids, list) else [ids]:
            if type(token) is int and 0 <= token <= LAST_TOKEN:
                found[token] = tuple(dict.fromkeys((*found.get(token, ()), file)))
    return found


def rope_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters`, as transformers 5 writes them, under the names that mlx-lm reads.

    Without them a Llama would silently run with rotary positions that it was not trained with.
    """
    rope = config.get("rope_parameters")
    if (
        not isinstance(rope, dict) or "rope_theta" not in rope
    ):  # a dict per kind of layer is read by the architecture itself
        return {}
    settings = {
        "rope_theta": rope["rope_theta"],
        "partial_rotary_factor": rope.get("partial_rotary_factor"),
    }
    if rope.get("rope_type", "default") != "default":
        settings["rope_scaling"] = rope
    return {
        name: value
        for name, value in settings.items()
        if value is not None and config.get(name) is None
    }


def check_files(folder: Path) -> None:
    """Raise ModelError for a file that is not a regular file of a sensible size.

    The libraries open files by name without checks. A FIFO would block them, and a device would
    feed them forever.
    """
    for place in (folder, folder / "additional_chat_templates"):
        try:
            names = sorted(os.listdir(place))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ModelError(f"{place}: can't be read: {error.strerror or error}") from error
        for name in names:
            suffix = os.path.splitext(name)[1]
            if suffix in MOST_BYTES or suffix == ".safetensors":
                _check_file(place / name, MOST_BYTES.get(suffix))


def _check_file(file: Path, limit: int | None) -> None:
    if is_of_kernel(file):
        raise ModelError(
            f"{file}: is a file of the kernel, not a regular file: copy what it holds into a file"
        )
    try:
        os.close(open_file(file, limit)[0])
    except ReadError as error:
        raise ModelError(str(error)) from error


def check_weights(folder: Path) -> list[Path]:
    """Return the weight files after comparing each one with its header.

    Raise ModelError, which names the first bad file.
    """
    return list(read_headers(folder))


def read_headers(folder: Path) -> dict[Path, dict[str, Any]]:
    """Return the header of each weight file, as `read_header` reads it.

    Raise ModelError if a file is broken, or one that this process needs is missing.
    """
    files = sorted(folder.glob(WEIGHTS))
    needed = _needed(folder)
    missing = sorted(needed.intersection(missing_files(folder)))
    if missing:
        raise ModelError(
            f"{folder / missing[0]}: missing: {len(missing)} of {len(needed)} weight files "
            f"that {INDEX} lists"
        )
    if not files:
        raise ModelError(
            f"{folder}: no weights: no model*.safetensors in it (other formats are not loaded)"
        )
    return {file: read_header(file) for file in files}


def tensor_count(folder: Path) -> int:
    """Return the number of tensors of a model, also of those in files that a rank does not need.

    Raise ModelError as `read_headers` does.
    """
    here = sum(map(len, read_headers(folder).values()))
    return max(here, len(placed_tensors(folder))) if missing_files(folder) else here


def missing_files(folder: Path) -> list[str]:
    """Return the weight files that the weight index names, and that are not there."""
    return sorted(
        file for file in {*placed_tensors(folder).values()} if not is_there(folder / file)
    )


def weight_patterns(folder: Path) -> list[str]:
    """Return the patterns of the weight files that this process needs.

    Other files that the weight index may name are none, and its names are no patterns.
    """
    named = sorted(escape(name) for name in _needed(folder) if fnmatch(name, WEIGHTS))
    return named or [WEIGHTS]


def _needed(folder: Path) -> set[str]:
    """Return the weight files that the weight index names, and that this process needs."""
    placed = placed_tensors(folder)
    if not placed or own_part() is None:
        return set(placed.values())
    return {placed[name] for name in needed_tensors(placed, read_config(folder))}


def placed_tensors(folder: Path) -> dict[str, str]:
    """Return the name of the file of each tensor by the weight index, or nothing without one."""
    index = folder / INDEX
    if not is_there(index):
        return {}
    try:
        found = read_json(index, MOST_BYTES[".json"])["weight_map"]
        return {name: str(file) for name, file in found.items()}
    except ReadError as error:
        raise ModelError(f"{error}; it is the weight index") from error
    except (KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index}: not a readable weight index: {_one_line(error)}") from error


def read_header(file: Path) -> dict[str, Any]:
    """Return a safetensors file's header: name -> dtype, shape, data_offsets.

    Raise ModelError as `tensors_of` does.
    """
    return tensors_of(file).entries


def tensors_of(file: Path) -> Header:
    """Return the checked header of a safetensors file.

    Raise ModelError if the file is cut off or is not a safetensors file.
    """
    try:
        descriptor, size = open_file(file)
    except ReadError as error:
        raise ModelError(str(error)) from error
    try:
        header = read_tensors(descriptor, size, MOST_HEADER)
        for name, place in header.tensors.items():
            if max(place.shape, default=0) > MOST_SIDE:
                raise HeaderError(
                    f"damaged: {name[:80]!r} has the shape {place.shape}, and {MOST_SIDE:,} is the "
                    "longest side"
                )
        return header
    except (HeaderError, OSError) as error:
        raise ModelError(f"{file}: {_one_line(error)}: download it again") from error
    finally:
        os.close(descriptor)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
