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
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ModelError(f"{name}: is a file; name the directory that holds config.json and the weights")
    if HUB_ID.fullmatch(name):
        return _from_hub(name)
    raise ModelError(f"{name}: no such model: neither a directory, nor a hub id (owner/name), nor {DEMO!r}")


def _from_hub(name: str) -> Path:
    """From the local hub cache, or downloaded with huggingface_hub's progress bar."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES, local_files_only=True))
    except LocalEntryNotFoundError:
        pass
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
        raise ModelError(f"{name}: not in the local cache, and the hub can't be reached; is there a network?") from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(f"{name}: the download failed: {_one_line(error)}") from error


def read_config(folder: Path) -> dict[str, Any]:
    """config.json with the end tokens of generation_config.json; ModelError where it is missing or broken."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{file}: missing: a model directory needs config.json, *.safetensors and tokenizer files") from error
    except (OSError, ValueError) as error:
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


def check_weights(folder: Path) -> list[Path]:
    """The weight files, each one's header read and its size compared with it; ModelError names the first bad one."""
    files = sorted(folder.glob("model*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{index}: not a readable weight index: {_one_line(error)}") from error
        missing = sorted(shard for shard in shards if not (folder / str(shard)).exists())
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
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ModelError(f"{file}: not a readable safetensors file: {_one_line(error)}") from error
    need = 8 + length + max(ends, default=0)
    if need != size:
        raise ModelError(f"{file}: truncated or damaged: {size} bytes, but its header describes {need}: download it again")
    return dict(header)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
