"""From what a user names (demo, a directory, a hub id) to a model directory on disk, checked before anything is loaded."""

from __future__ import annotations

import json
import re
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlxrunner.errors import ModelError

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
            raise ModelError(f"{shown}: is a file; name the directory that holds config.json and the weights")
    except (OSError, RuntimeError) as error:  # a name that is too long, the home directory of nobody
        raise ModelError(f"{shown}: not a usable path: {_one_line(error)}") from error
    if HUB_ID.fullmatch(name):
        return _from_hub(name)
    raise ModelError(f"{shown}: no such model: neither a directory, nor a hub id (owner/name), nor {DEMO!r}")


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
        raise ModelError(f"{name}: no such repository on the hub (or a private one: `hf auth login`)") from error
    except LocalEntryNotFoundError as error:
        if partial is not None and _is_whole(Path(partial)):
            return Path(partial)
        part, cause = "not" if partial is None else "only in part", _one_line(error.__cause__ or error)
        raise ModelError(f"{name}: {part} in the local cache, and the hub can't be reached: {cause}") from error
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
    """config.json with the end tokens of generation_config.json; ModelError where it is missing or broken."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{file}: missing: a model directory needs config.json, *.safetensors and tokenizer files") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file}: not readable as JSON: {_one_line(error)}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(f"{file}: has no model_type")
    return config


def eos_tokens(folder: Path, config: dict[str, Any]) -> list[int]:
    """The end-of-sequence ids of config.json (its text_config too) and generation_config.json together."""
    sources = [config, config.get("text_config") or {}]
    with suppress(OSError, ValueError):
        sources.append(json.loads((folder / "generation_config.json").read_text(encoding="utf-8")))
    found: list[int] = []
    for source in sources:
        ids = source.get("eos_token_id") if isinstance(source, dict) else None
        found += [i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int) and i not in found]
    return found


def rope_settings(config: dict[str, Any]) -> dict[str, Any]:
    """The `rope_parameters` that transformers 5 writes, under the names that most of mlx-lm's architectures read.

    Without them a Llama would be run with rotary positions that it was not trained with, and nobody would say so.
    """
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" not in rope:  # or one for each kind of layer: the architecture reads it itself
        return {}
    settings = {"rope_theta": rope["rope_theta"], "partial_rotary_factor": rope.get("partial_rotary_factor")}
    if rope.get("rope_type", "default") != "default":
        settings["rope_scaling"] = rope
    return {name: value for name, value in settings.items() if value is not None and config.get(name) is None}


def check_weights(folder: Path) -> list[Path]:
    """The weight files, each one's header read and its size compared with it; ModelError names the first bad one."""
    files = sorted(folder.glob("model*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            shards = {str(shard) for shard in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
            missing = sorted(shard for shard in shards if not (folder / shard).exists())
        except (OSError, ValueError, RecursionError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{index}: not a readable weight index: {_one_line(error)}") from error
        if missing:
            raise ModelError(
                f"{folder / missing[0]}: missing: {len(missing)} of {len(shards)} weight files that {index.name} lists"
            )
    if not files:
        raise ModelError(f"{folder}: no weights: no model*.safetensors in it (other formats are not loaded)")
    for file in files:
        read_header(file)
    return files


def read_header(file: Path) -> dict[str, Any]:
    """A safetensors file's header (name -> dtype, shape, data_offsets); ModelError where it is cut off or not one."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
            if length + 8 > size:
                raise ModelError(f"{file}: truncated, or not a safetensors file ({size} bytes): download it again")
            header = json.loads(stream.read(length))
        ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ModelError(f"{file}: not a readable safetensors file: {_one_line(error)}") from error
    need = 8 + length + max(ends, default=0)
    if need != size:
        raise ModelError(f"{file}: truncated or damaged: {size} bytes, but its header describes {need}: download it again")
    return dict(header)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
