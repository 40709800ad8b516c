"""Resolve the name of a model (demo, a directory, a hub id) to a checked directory on disk."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxrunner.errors import MissingFileError, ModelError, ReadError
from mlxrunner.models.settings import check_settings
from mlxrunner.options import EMBEDDED
from mlxrunner.system.reading import is_of_kernel, is_there, open_file, read_json
from mlxrunner.system.tensorfile import Header, HeaderError
from mlxrunner.system.tensorfile import read_header as read_tensors

if TYPE_CHECKING:
    from mlxrunner.models.download import Tell

DEMO_FOLDER = Path(__file__).parent / "demo"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
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


def name_of(model: str | os.PathLike[str]) -> str:
    """The text that names `model`. ModelError if it is neither a text nor a path."""
    if isinstance(model, str | os.PathLike):
        return os.fspath(model)
    raise ModelError(f"{model!r:.80} names no model: give 'demo', a directory or a hub id")


def resolve(name: str, *, with_code: bool = False) -> Path:
    """Return the directory of model `name`: one of EMBEDDED, a directory, or a hub id.

    A model that is not in the hub cache is downloaded; `with_code` needs its Python files, too.
    Raise ModelError if there is no such model.
    """
    if name in EMBEDDED:
        return DEMO_FOLDER.with_name(name.replace("-", "_"))
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
    ) as error:  # a name too long, or the home of an unknown user
        raise ModelError(f"{shown}: not a usable path: {_one_line(error)}") from error
    if HUB_ID.fullmatch(name):
        return _from_hub(name, with_code)
    raise ModelError(
        f"{shown}: no such model: neither a directory, nor a hub id (owner/name), nor "
        f"{' or '.join(map(repr, EMBEDDED))}"
    )


def folder_if_here(name: str) -> Path | None:
    """Return the directory of a model on this machine, complete or not, and download nothing."""
    if name in EMBEDDED:
        return DEMO_FOLDER.with_name(name.replace("-", "_"))
    with suppress(OSError, RuntimeError, ValueError):
        folder = Path(name).expanduser()
        if name and folder.is_dir():
            return folder
    if not HUB_ID.fullmatch(name):
        return None
    from huggingface_hub import try_to_load_from_cache

    with suppress(Exception):  # a name that the hub does not allow
        found = try_to_load_from_cache(name, "config.json")
        if isinstance(found, str):
            return Path(found).parent
    return None


def lasting(name: str) -> str:
    """Return a name that is valid in every working directory: the full path of a directory.

    Other names are returned unchanged.
    """
    try:
        folder = Path(name).expanduser()
        return str(folder.resolve()) if name not in EMBEDDED and folder.is_dir() else name
    except (OSError, RuntimeError):  # not a path: `resolve` reports it
        return name


def _from_hub(name: str, with_code: bool) -> Path:
    """Return a model from the local hub cache if it is complete there, else download it."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    from mlxrunner.models.download import CODE, FILES

    patterns = [*FILES, CODE] if with_code else [*FILES]
    partial: Path | None = None
    try:
        cached = Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True))
        if _is_whole(cached):
            return cached
    except LocalEntryNotFoundError as error:
        # Set if files of the repository are missing. They may be files that the model does not
        # need.
        found = getattr(error, "snapshot_path", None)
        partial = Path(found) if found is not None else None
    except HFValidationError as error:
        raise ModelError(f"{name}: not a valid hub id: {_one_line(error)}") from error
    return pull(name, with_code=with_code, partial=partial)


def pull(
    name: str, *, with_code: bool = False, partial: Path | None = None, tell: Tell | None = None
) -> Path:
    """Download the present revision of a model of the hub, and return its directory.

    `with_code` downloads its Python files, too. `tell` is told how far each file is. `partial` is
    the directory of a part that is in the hub cache; it is returned if the hub can't be reached and
    all that is needed is there. Raise ModelError if the model can't be downloaded.
    """
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    from mlxrunner.models.download import download, tell_nobody

    if not HUB_ID.fullmatch(name):
        raise ModelError(f"{name[:300]!r}: not a hub id, which has the form OWNER/NAME")
    try:
        return download(name, with_code=with_code, tell=tell or tell_nobody)
    except ModelError:
        raise
    except HFValidationError as error:
        raise ModelError(f"{name}: not a valid hub id: {_one_line(error)}") from error
    except GatedRepoError as error:
        raise ModelError(
            f"{name}: access is restricted: accept its terms on the hub, then log in with `hf auth "
            "login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{name}: no such repository on the hub (or a private one: `hf auth login`)"
        ) from error
    except LocalEntryNotFoundError as error:
        if partial is not None and _is_whole(partial):
            return partial
        part, cause = (
            "not" if partial is None else "only in part",
            _one_line(error.__cause__ or error),
        )
        raise ModelError(
            f"{name}: {part} in the local cache, and the hub can't be reached: {cause}"
        ) from error
    except Exception as error:  # HTTP errors, a full disk, or an answer changed by a proxy
        raise ModelError(f"{name}: the download failed: {_one_line(error)}") from error


def _is_whole(folder: Path) -> bool:
    """Return True if `folder` holds the configuration and all weights."""
    try:
        read_config(folder)
        check_weights(folder)
    except ModelError:
        return False
    return True


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


def eos_tokens(folder: Path, config: dict[str, Any]) -> list[int]:
    """Return the end-of-sequence ids of config.json and generation_config.json together.

    The ids in its text_config count, too. Values that are not token ids are ignored.
    """
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

    Raise ModelError if a file is missing or broken.
    """
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
                f"{folder / missing[0]}: missing: {len(missing)} of {len(shards)} weight files "
                f"that {index.name} lists"
            )
    if not files:
        raise ModelError(
            f"{folder}: no weights: no model*.safetensors in it (other formats are not loaded)"
        )
    return {file: read_header(file) for file in files}


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
