"""From what a user names (demo, a directory, a hub id) to a model directory on disk, checked before anything is loaded."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlxrunner.errors import ModelError
from mlxrunner.models.settings import check_settings
from mlxrunner.reading import (
    MissingFileError,
    ReadError,
    is_of_kernel,
    is_there,
    open_file,
    read_json,
)
from mlxrunner.tensorfile import HeaderError
from mlxrunner.tensorfile import read_header as read_tensors

DEMO = "demo"
DEMO_FOLDER = Path(__file__).parent / "demo"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HUB_FILES = [
    "*.json",
    "model*.safetensors",
    "tokenizer.model",
    "*.tiktoken",
    "tiktoken.model",
    "*.txt",
    "*.jsonl",
    "*.jinja",
    "*.py",
]
"""What mlx-lm needs of a repository; *.py is only run with --trust-remote-code."""

MOST_SETTINGS = 2**24
"""Bytes of a config.json; the largest in use, with a setting for each of a hundred thousand tensors, have half of that."""
MOST_HEADER = 2**26
"""Of the header of one weight file."""
MOST_SIDE = 2**31 - 1
"""Of a tensor: what MLX counts with."""
MOST_BYTES = {
    ".json": 2**27,
    ".jinja": 2**20,
    ".jsonl": 2**27,
    ".txt": 2**26,
    ".model": 2**27,
    ".tiktoken": 2**26,
    ".py": 2**22,
}
"""Of a file that a tokenizer is made from, by its suffix: several times what the largest ones in use have."""
LAST_TOKEN = 2**31 - 1


def resolve(name: str) -> Path:
    """The directory of model `name`: "demo", a directory, or a hub id, downloaded if it is not in the cache yet."""
    if name == DEMO:
        return DEMO_FOLDER
    shown = name if name.strip() and name.isprintable() and len(name) < 300 else f"{name[:300]!r}"
    try:
        folder = Path(name).expanduser()
        if name and folder.is_dir():
            return folder
        if name and folder.exists():
            raise ModelError(
                f"{shown}: is a file; name the directory that holds config.json and the weights"
            )
    except (
        OSError,
        RuntimeError,
    ) as error:  # a name that is too long, the home directory of nobody
        raise ModelError(f"{shown}: not a usable path: {_one_line(error)}") from error
    if HUB_ID.fullmatch(name):
        return _from_hub(name)
    raise ModelError(
        f"{shown}: no such model: neither a directory, nor a hub id (owner/name), nor {DEMO!r}"
    )


def lasting(name: str) -> str:
    """The name that means the same from everywhere: a directory by its whole path."""
    try:
        folder = Path(name).expanduser()
        return str(folder.resolve()) if name != DEMO and folder.is_dir() else name
    except (OSError, RuntimeError):  # a name that is no path, which `resolve` says
        return name


def _from_hub(name: str) -> Path:
    """From the local hub cache if it is whole there, else downloaded with huggingface_hub's progress bar."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    partial: str | None = None
    try:
        cached = Path(snapshot_download(name, allow_patterns=HUB_FILES, local_files_only=True))
        if _is_whole(cached):
            return cached
    except LocalEntryNotFoundError as error:
        # Set if files of the repository are known to be missing, which may be files that nobody needs.
        partial = getattr(error, "snapshot_path", None)
    except HFValidationError as error:
        raise ModelError(f"{name}: not a valid hub id: {_one_line(error)}") from error
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except GatedRepoError as error:
        raise ModelError(
            f"{name}: access is restricted: accept its terms on the hub, then log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{name}: no such repository on the hub (or a private one: `hf auth login`)"
        ) from error
    except LocalEntryNotFoundError as error:
        if partial is not None and _is_whole(Path(partial)):
            return Path(partial)
        part, cause = (
            "not" if partial is None else "only in part",
            _one_line(error.__cause__ or error),
        )
        raise ModelError(
            f"{name}: {part} in the local cache, and the hub can't be reached: {cause}"
        ) from error
    except Exception as error:  # HTTP errors, a full disk, or whatever a proxy made of the answer
        raise ModelError(f"{name}: the download failed: {_one_line(error)}") from error


def _is_whole(folder: Path) -> bool:
    """Whether the configuration and all weights are there."""
    try:
        read_config(folder)
        check_weights(folder)
    except ModelError:
        return False
    return True


def read_config(folder: Path) -> dict[str, Any]:
    """config.json, its values within bounds; ModelError where it is missing or broken."""
    file = folder / "config.json"
    try:
        config = read_json(file, MOST_SETTINGS)
    except MissingFileError as error:
        if is_there(file):
            raise ModelError(str(error)) from error
        raise ModelError(
            f"{file}: missing: a model directory needs config.json, *.safetensors and tokenizer files"
        ) from error
    except ReadError as error:
        raise ModelError(str(error)) from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(f"{file}: has no model_type")
    check_settings(file, config)
    return config


def eos_tokens(folder: Path, config: dict[str, Any]) -> list[int]:
    """The end-of-sequence ids of config.json (its text_config too) and generation_config.json together; what is no id is passed over."""
    sources = [config, config.get("text_config")]
    with suppress(ReadError):
        sources.append(read_json(folder / "generation_config.json", MOST_SETTINGS))
    found: dict[int, None] = {}
    for source in sources:
        ids = source.get("eos_token_id") if isinstance(source, dict) else None
        given = ids if isinstance(ids, list) else [ids]
        found |= dict.fromkeys(
            token for token in given if type(token) is int and 0 <= token <= LAST_TOKEN
        )
    return list(found)


def rope_settings(config: dict[str, Any]) -> dict[str, Any]:
    """The `rope_parameters` that transformers 5 writes, under the names that most of mlx-lm's architectures read.

    Without them a Llama would be run with rotary positions that it was not trained with, and nobody would say so.
    """
    rope = config.get("rope_parameters")
    if (
        not isinstance(rope, dict) or "rope_theta" not in rope
    ):  # or one for each kind of layer: the architecture reads it itself
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
    """ModelError where a file that a library would open for us is not a regular file of a sensible size.

    The libraries open them by name, without asking: a FIFO would keep them waiting, a device feed them for ever.
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
    """The weight files, each one's header read and compared with the file; ModelError names the first bad one."""
    return list(read_headers(folder))


def read_headers(folder: Path) -> dict[Path, dict[str, Any]]:
    """The header of each weight file, as `read_header`; ModelError where one is missing or broken."""
    files = sorted(folder.glob("model*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if is_there(index):
        try:
            shards = {
                str(shard) for shard in read_json(index, MOST_BYTES[".json"])["weight_map"].values()
            }
        except ReadError as error:
            raise ModelError(f"{error}; it is the weight index") from error
        except (KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{index}: not a readable weight index: {_one_line(error)}") from error
        missing = sorted(shard for shard in shards if not is_there(folder / shard))
        if missing:
            raise ModelError(
                f"{folder / missing[0]}: missing: {len(missing)} of {len(shards)} weight files that {index.name} lists"
            )
    if not files:
        raise ModelError(
            f"{folder}: no weights: no model*.safetensors in it (other formats are not loaded)"
        )
    return {file: read_header(file) for file in files}


def read_header(file: Path) -> dict[str, Any]:
    """A safetensors file's header (name -> dtype, shape, data_offsets); ModelError where it is cut off or not one."""
    try:
        descriptor, size = open_file(file)
    except ReadError as error:
        raise ModelError(str(error)) from error
    try:
        header = read_tensors(descriptor, size, MOST_HEADER)
        for name, place in header.tensors.items():
            if max(place.shape, default=0) > MOST_SIDE:
                raise HeaderError(
                    f"damaged: {name[:80]!r} has the shape {place.shape}, and {MOST_SIDE:,} is the longest side"
                )
        return header.entries
    except (HeaderError, OSError) as error:
        raise ModelError(f"{file}: {_one_line(error)}: download it again") from error
    finally:
        os.close(descriptor)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
