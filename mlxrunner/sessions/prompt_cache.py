"""Read and write the prompt-cache files of mlx-lm, which hold caches and usually no tokens.

mlx-lm's own functions read and write them, so the format is that of the installed version. A file
is checked before mlx-lm reads it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlx_lm.models import cache as mlx_lm_cache

from mlxrunner.cache.entry import CacheEntry
from mlxrunner.cache.layers.factory import CacheOptions, make_layer_caches, outline_of
from mlxrunner.cache.saved import Exported, mismatch
from mlxrunner.cache.tokens import TokenArray, as_tokens
from mlxrunner.errors import PromptError, SessionError
from mlxrunner.stored.folder import Folder
from mlxrunner.stored.tensors import TensorFile
from mlxrunner.system.mlx_lm_internals import strange_class
from mlxrunner.system.writing import check_own

SUFFIX = ".safetensors"
TOKENS = "tokens"
"""Name of a text in the file's metadata that only mlxrunner writes: the tokens, as JSON."""


def export_file(
    file: Path, model: Any, model_name: str, options: CacheOptions, saved: Exported
) -> None:
    """Write an exported entry of `model` to `file` for mlx-lm.

    `model_name` is noted in the file. Raise SessionError if `file` does not end in .safetensors or
    cannot be written.
    """
    if file.suffix != SUFFIX:
        raise SessionError(f"{file}: has to end in {SUFFIX}: mlx-lm and MLX tell the format by it")
    offset = len(saved.tokens)
    layers = zip(make_layer_caches(model, options), saved.layers, strict=True)
    caches = [cache.to_mlx_lm(layer, offset) for cache, layer in layers]
    about = {
        "model": model_name,
        "tokenizer_config": "{}",
        TOKENS: json.dumps(saved.tokens.tolist()),
    }
    try:
        with suppress(FileNotFoundError):
            check_own(file, replaced=True)
        with Folder(file.absolute().parent.resolve()) as folder:
            folder.write(file.name, lambda fd: _write(fd, caches, about))
    except (OSError, RuntimeError) as error:
        raise SessionError(
            f"{file}: could not be written: {' '.join(str(error).split())[:200]}"
        ) from error


def import_file(
    file: Path, model: Any, options: CacheOptions, tokens: Sequence[int] | None
) -> CacheEntry:
    """Return the entry that a file of mlx-lm holds.

    `tokens` are those that the file was made from; None takes them from the file, if it holds them.
    Raise SessionError if the file is damaged, or was made with another model or another number of
    tokens.
    """
    caches, known = _load(file)
    found = as_tokens(tokens) if tokens is not None else known
    if found is None:
        raise SessionError(f"{file}: does not say which tokens it is of: give them with --tokens")
    outline = outline_of(model, options)
    if len(caches) != len(outline):
        raise SessionError(f"{file}: has {len(caches)} layers, and the model {len(outline)}")
    layers = make_layer_caches(model, options)
    try:
        saved = [layer.from_mlx_lm(cache) for layer, cache in zip(layers, caches, strict=True)]
        wrong = next(
            (
                why
                for one, like in zip(saved, outline, strict=True)
                if (why := mismatch(one, like, len(found)))
            ),
            None,
        )
        if wrong is not None:
            raise SessionError(
                f"{file}: is of another model, or not of {len(found)} tokens: {wrong}"
            )
        entry = CacheEntry(caches=layers)
        entry.adopt(Exported(found, saved, []))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        raise SessionError(
            f"{file}: is not of {len(found)} tokens of this model: "
            f"{' '.join(str(error).split())[:200]}"
        ) from error
    return entry


def _write(fd: int, caches: list[Any], about: dict[str, str]) -> None:
    with os.fdopen(fd, "wb", closefd=False) as stream:
        mlx_lm_cache.save_prompt_cache(stream, caches, about)


def _load(file: Path) -> tuple[list[Any], TokenArray | None]:
    """Return mlx-lm's caches, and the tokens if the file holds them."""
    try:
        with Folder(file.absolute().parent.resolve()) as folder:
            header = TensorFile(folder.open(file.name)).metadata
        strange = strange_class(header)
        if strange is not None:
            named = f": it names {strange[:40]!r}" if strange else ""
            raise SessionError(f"{file}: no prompt cache of mlx-lm{named}")
        caches, metadata = mlx_lm_cache.load_prompt_cache(str(file), return_metadata=True)
        tokens = metadata.get(TOKENS) if isinstance(metadata, dict) else None
        return caches, None if tokens is None else as_tokens(json.loads(tokens))
    except OSError as error:
        raise SessionError(f"{file}: can't be read: {error.strerror or error}") from error
    except PromptError as error:
        raise SessionError(f"{file}: its tokens are damaged: {error}") from error
    except SessionError as error:
        raise (
            error if str(error).startswith(str(file)) else SessionError(f"{file}: {error}")
        ) from error
    except Exception as error:  # mlx-lm raises anything for a foreign file
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise SessionError(f"{file}: mlx-lm can't read it: {why}") from error
