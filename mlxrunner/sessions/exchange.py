"""Exchange caches between saved sessions and mlx-lm, without reading the model's weights."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import cache as mlx_lm_cache

from mlxrunner.cache.disk.pieces import LazyArray
from mlxrunner.cache.entry import CacheEntry, TokenArray, as_tokens, has_pictures
from mlxrunner.cache.layers.factory import CacheOptions, layouts_of, make_layer_caches, outline_of
from mlxrunner.cache.saved import Exported, Saved, mismatch
from mlxrunner.errors import ModelError, OptionError, PromptError, SessionError
from mlxrunner.models.fingerprint import PARTS, differences, fingerprint, with_format
from mlxrunner.models.load import unread_model
from mlxrunner.models.resolve import folder_if_here, lasting, resolve
from mlxrunner.sessions.caches import cache_writer, stored_entry
from mlxrunner.sessions.session import MAIN, Branch, History, Rendering, Session
from mlxrunner.sessions.store import SessionStore
from mlxrunner.system.folders import Folder
from mlxrunner.system.mlx_lm_internals import strange_class
from mlxrunner.system.tensorfile import TensorFile
from mlxrunner.system.writing import check_own

SUFFIX = ".safetensors"
TOKENS = "tokens"
"""Name of a text in the file's metadata that only mlxrunner writes: the tokens, as JSON."""
STATES = "states_crc32"
"""Name of the checksum of what these tokens have made. Version 0.2 wrote none."""


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
    tokens = json.dumps(saved.tokens.tolist())
    about = {
        "model": model_name,
        "tokenizer_config": "{}",
        TOKENS: tokens,
        STATES: _states_sum(caches, tokens),
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
    file: Path,
    model: Any,
    options: CacheOptions,
    tokens: Sequence[int] | None,
    folder: Path | None = None,
    *,
    trust: bool = False,
) -> CacheEntry:
    """Return the entry that a file of mlx-lm holds.

    `tokens` are those that the file was made from; None takes them from the file, if it holds them.
    `folder`: that of `model`, if it is to be compared with the one that the file names. `trust`
    takes the caller's word where the file does not say how many tokens it holds, or names another
    model. Raise SessionError if the file is damaged, or was made with another model or another
    number of tokens.
    """
    caches, metadata = _load(file)
    known = _known_tokens(file, caches, metadata)
    found = as_tokens(tokens) if tokens is not None else known
    if found is None:
        raise SessionError(f"{file}: does not say which tokens it is of: give them with --tokens")
    if folder is not None and not trust:
        _check_model(file, metadata.get("model"), folder)
    outline = outline_of(model, options)
    if len(caches) != len(outline):
        raise SessionError(f"{file}: has {len(caches)} layers, and the model {len(outline)}")
    _check_count(file, caches, known, found, trust)
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


def _check_model(file: Path, name: str | None, folder: Path) -> None:
    """Raise SessionError if the file names another model that is on this machine."""
    other = folder_if_here(name) if name else None
    if other is None or other.resolve() == folder.resolve():
        return
    with suppress(ModelError):  # a part of it only: nothing can be compared
        if different := differences(fingerprint(other), fingerprint(folder)):
            raise SessionError(
                f"{file}: was made with {name}, and {folder} has "
                f"{', '.join(PARTS[part] for part in different)}: name the model that made it with "
                "-m; if that is this one, add --trust"
            )


def _check_count(
    file: Path, caches: list[Any], known: TokenArray | None, found: TokenArray, trust: bool
) -> None:
    """Raise SessionError unless the layers hold as many tokens as `found` has.

    Layers with keys and values count them. States don't: a file of nothing else has to come with
    its own tokens, or the caller has to `trust` that these are all.
    """
    counts = _counts(caches)
    if counts - {len(found)}:
        raise SessionError(
            f"{file}: holds {' and '.join(map(str, sorted(counts)))} tokens, not {len(found)} "
            "tokens: --tokens has to name exactly those that were evaluated. These are the "
            "prompt's and, after mlx-lm has answered, those of the answer but the last"
        )
    if not counts and not trust and (known is None or known.tolist() != found.tolist()):
        raise SessionError(
            f"{file}: has states only, which do not tell how many tokens made them: with one more "
            "or fewer, answers would be wrong. If the file is of exactly the "
            f"{len(found)} tokens given, add --trust"
        )


def _counts(caches: Sequence[Any]) -> set[int]:
    """Return the numbers of tokens that mlx-lm's caches count, of those that hold any."""
    found = set[int]()
    for one in caches:
        if isinstance(one, mlx_lm_cache.CacheList):
            found |= _counts(one.caches)
        elif type(offset := getattr(one, "offset", None)) is int and not one.empty():
            found.add(offset)
    return found


def _known_tokens(file: Path, caches: list[Any], metadata: Mapping[str, Any]) -> TokenArray | None:
    """Return the tokens that the file holds, or None if something has changed it since."""
    if TOKENS not in metadata:
        return None
    if STATES in metadata and metadata[STATES] != _states_sum(caches, metadata[TOKENS]):
        return None
    try:
        return as_tokens(json.loads(metadata[TOKENS]))
    except (PromptError, ValueError, TypeError, RecursionError) as error:
        said = " ".join(str(error).split())[:200]
        raise SessionError(f"{file}: its tokens are damaged: {said}") from error


def _states_sum(caches: list[Any], tokens: str) -> str:
    """Return a checksum of all arrays in mlx-lm's caches, and of the tokens that made them.

    It tells if the file is damaged, or if another program has gone on from it and kept the tokens.
    """
    found = zlib.crc32(str(tokens).encode())
    for array in dict(tree_flatten([cache.state for cache in caches])).values():
        if isinstance(array, mx.array):
            found = zlib.crc32(LazyArray(array).data, found)
    return str(found)


def _write(fd: int, caches: list[Any], about: dict[str, str]) -> None:
    with os.fdopen(fd, "wb", closefd=False) as stream:
        mlx_lm_cache.save_prompt_cache(stream, caches, about)


def _load(file: Path) -> tuple[list[Any], dict[str, Any]]:
    """Return mlx-lm's caches, and what the file says about them."""
    try:
        with Folder(file.absolute().parent.resolve()) as folder:
            header = TensorFile(folder.open(file.name)).metadata
        strange = strange_class(header)
        if strange is not None:
            named = f": it names {strange[:40]!r}" if strange else ""
            raise SessionError(f"{file}: no prompt cache of mlx-lm{named}")
        caches, metadata = mlx_lm_cache.load_prompt_cache(str(file), return_metadata=True)
        return caches, metadata if isinstance(metadata, dict) else {}
    except OSError as error:
        raise SessionError(f"{file}: can't be read: {error.strerror or error}") from error
    except SessionError as error:
        raise (
            error if str(error).startswith(str(file)) else SessionError(f"{file}: {error}")
        ) from error
    except Exception as error:  # mlx-lm raises anything for a foreign file
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise SessionError(f"{file}: mlx-lm can't read it: {why}") from error


def export_session(name: str, file: Path, sessions: SessionStore | None = None) -> int:
    """Write the caches of the session `name` to `file` for mlx-lm. Return the number of tokens.

    `sessions` is by default the user's store. Raise SessionError if the session has no caches, or
    if its model has changed since they were made.
    """
    sessions = sessions or SessionStore()
    session, entry = sessions.load(name), stored_entry(sessions.folder_of(name))
    if entry is None:
        raise SessionError(f"the session {name!r} was saved without caches")
    folder = resolve(session.model)
    if has_pictures(entry.tokens):
        raise SessionError(f"the session {name!r} has pictures, which no file of mlx-lm can name")
    model, known = unread_model(folder), fingerprint(folder)
    for bits in (None, 8, 4):  # the file does not name its bits, but they show
        options = CacheOptions(kv_bits=bits)
        with suppress(ValueError):  # these heads can't be quantized
            outlines = outline_of(model, options)
            different = differences(entry.fingerprint, with_format(known, outlines))
            if "kv" not in different:
                break
    if different:
        raise SessionError(
            f"the session {name!r} was made with {', '.join(PARTS[part] for part in different)} "
            f"than {session.model} has now"
        )
    entry.check(outlines)
    layers = [one if isinstance(one, Saved) else one.read() for one in entry.layers]
    export_file(file, model, str(folder), options, Exported(entry.tokens, layers, []))
    return len(entry.tokens)


def import_session(
    file: Path,
    name: str,
    model: str,
    tokens: Sequence[int] | None,
    kv_bits: int | None = None,
    sessions: SessionStore | None = None,
    *,
    trust: bool = False,
) -> int:
    """Make a session from a prompt-cache file of mlx-lm, and return its number of tokens.

    `tokens` are those that the file was made from; None takes them from the file, if it holds them.
    `kv_bits` (4, 8 or None) tells in how many bits the file stores keys and values. `trust`: see
    `import_file`. Raise SessionError if a session `name` exists or if `file` does not fit `model`,
    and OptionError if the model does not support `kv_bits`.
    """
    if kv_bits not in (None, 4, 8):
        raise OptionError(f"kv_bits: {kv_bits} is out of range, it has to be 4 or 8")
    sessions = sessions or SessionStore()
    if sessions.exists(name):
        raise SessionError(
            f"the session {name!r} exists already: `mlxrunner sessions rm {name}` removes it"
        )
    folder = resolve(model)
    unread, options = unread_model(folder), CacheOptions(kv_bits=kv_bits)
    layouts_of(unread, options)  # raises OptionError for kv_bits that the model can't have
    entry = import_file(file, unread, options, tokens, folder, trust=trust)
    known = with_format(fingerprint(folder), outline_of(unread, options))
    with sessions.lock(name) as held:
        present = Branch(None, History(rendering=Rendering("", tuple(entry.tokens))))
        sessions.save(
            name,
            Session(
                lasting(model), {MAIN: present}, fingerprint=known, settings={"kv_bits": kv_bits}
            ),
        )
        sessions.save_cache(name, cache_writer(entry, held, known))
    return len(entry.tokens)
