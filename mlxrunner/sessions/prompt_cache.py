"""mlx-lm's prompt-cache files, which hold caches but no tokens: what was saved here as theirs, and theirs as what is saved here.

Written and read by mlx-lm's own functions, so that it is the format of the version that is installed; what is read is checked first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_unflatten
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache, RotatingKVCache

from mlxrunner.cache.entry import CacheEntry
from mlxrunner.cache.factory import CacheOptions, make_layer_caches, outline_of
from mlxrunner.cache.layer import LayerCache, Snapshot
from mlxrunner.cache.quantized import PARTS, QuantizedAttentionCache
from mlxrunner.cache.saved import Exported, Saved, mismatch
from mlxrunner.cache.sliding import SlidingWindowCache
from mlxrunner.cache.stock import StockCache
from mlxrunner.cache.tokens import TokenArray, as_tokens
from mlxrunner.errors import PromptError, SessionError
from mlxrunner.sessions.files import Folder
from mlxrunner.sessions.tensors import TensorFile
from mlxrunner.writing import check_own

SUFFIX = ".safetensors"
TOKENS = "tokens"
"""The text in the file's metadata that mlx-lm does not know: the tokens that the caches are of, as JSON."""


def export_file(
    file: Path, model: Any, model_name: str, options: CacheOptions, saved: Exported
) -> None:
    """Write what was saved of `model` as a file for mlx-lm. SessionError where it can't be written."""
    if file.suffix != SUFFIX:
        raise SessionError(f"{file}: has to end in {SUFFIX}: mlx-lm and MLX tell the format by it")
    offset = len(saved.tokens)
    layers = zip(make_layer_caches(model, options), saved.layers, strict=True)
    caches = [to_mlx_lm(cache, layer, offset) for cache, layer in layers]
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
    """The entry of a file of mlx-lm's. `tokens`: those that it is of, where the file does not say so itself.

    SessionError where it is damaged, or is of another model or of another number of tokens.
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
        saved = [from_mlx_lm(layer, cache) for layer, cache in zip(layers, caches, strict=True)]
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
            f"{file}: is not of {len(found)} tokens of this model: {' '.join(str(error).split())[:200]}"
        ) from error
    return entry


def to_mlx_lm(cache: LayerCache, saved: Saved, offset: int) -> Any:
    """mlx-lm's cache for a layer like `cache`, holding what was saved."""
    arrays = dict(saved.arrays)
    if isinstance(cache, SlidingWindowCache):
        keys, values = (
            _last(arrays[name], min(offset, cache.window)) for name in ("keys", "values")
        )
        return RotatingKVCache.from_state((keys, values, offset, 0, cache.window, keys.shape[2]))
    if isinstance(cache, QuantizedAttentionCache):
        packed = [tuple(arrays[f"{name} {part}"] for part in PARTS) for name in ("keys", "values")]
        group = packed[0][0].shape[3] * 32 // cache.bits // packed[0][1].shape[3]
        return QuantizedKVCache.from_state((*packed, offset, group, cache.bits))
    if saved.parts:
        parts = zip(cache.parts, saved.parts, strict=True)  # type: ignore[attr-defined]  # a composite one
        return CacheList(*(to_mlx_lm(part, one, offset) for part, one in parts))
    if isinstance(cache.model_cache, ArraysCache):
        cache.model_cache.cache = [
            arrays.get(str(index)) for index in range(len(cache.model_cache.cache))
        ]
        return cache.model_cache
    if isinstance(cache, StockCache):
        cache.inner.state = tree_unflatten([*arrays.items(), *saved.numbers.items()])
        return cache.inner
    return KVCache.from_state((arrays["keys"], arrays["values"], offset))


def from_mlx_lm(layer: LayerCache, cache: Any) -> Saved:
    """What one of mlx-lm's caches holds, for a layer like `layer`. ValueError where it is for another kind."""
    if isinstance(layer, StockCache) and type(cache) is type(layer.inner):
        return layer.export(Snapshot(cache.cache if isinstance(cache, ArraysCache) else cache, 0))
    if type(cache) is KVCache:
        rows = slice(0, cache.offset)
        return Saved(
            "full", {"keys": cache.keys[..., rows, :], "values": cache.values[..., rows, :]}
        )
    if type(cache) is QuantizedKVCache:
        cut = {("keys", part): rows for part, rows in zip(PARTS, cache.keys, strict=True)}
        cut |= {("values", part): rows for part, rows in zip(PARTS, cache.values, strict=True)}
        return Saved(
            "quantized",
            {
                f"{which} {part}": rows[..., : cache.offset, :]
                for (which, part), rows in cut.items()
            },
        )
    if type(cache) is RotatingKVCache and not cache.keep and isinstance(layer, SlidingWindowCache):
        if cache.max_size != layer.window:
            raise ValueError(
                f"a window is of {cache.max_size} tokens, and the model's of {layer.window}"
            )
        return Saved(
            "sliding",
            {"keys": _in_order(cache, cache.keys), "values": _in_order(cache, cache.values)},
        )
    if type(cache) is CacheList:
        parts = zip(getattr(layer, "parts", ()), cache.caches, strict=True)
        return Saved("composite", parts=[from_mlx_lm(part, one) for part, one in parts])
    raise ValueError(f"it has a {type(cache).__name__} for a {layer.kind} layer")


def _write(fd: int, caches: list[Any], about: dict[str, str]) -> None:
    with os.fdopen(fd, "wb", closefd=False) as stream:
        mlx_lm_cache.save_prompt_cache(stream, caches, about)


def _in_order(cache: RotatingKVCache, rows: mx.array) -> mx.array:
    """The rows of a rotating cache by their positions, the unused ones left out."""
    at = cache._idx
    if at < cache.offset and at < rows.shape[2]:
        rows = mx.concatenate([rows[..., at:, :], rows[..., :at, :]], axis=2)
    return rows[..., : min(at, rows.shape[2]), :] if at >= cache.offset else rows


def _last(rows: mx.array, count: int) -> mx.array:
    """The last `count` rows; what is missing in front, which no query will see, is zeros."""
    missing = count - rows.shape[2]
    if missing > 0:
        rows = mx.concatenate(
            [mx.zeros((*rows.shape[:2], missing, rows.shape[3]), rows.dtype), rows], axis=2
        )
    return rows[..., rows.shape[2] - count :, :]


def _load(file: Path) -> tuple[list[Any], TokenArray | None]:
    """mlx-lm's caches, and the tokens if the file has them."""
    try:
        with Folder(file.absolute().parent.resolve()) as folder:
            header = TensorFile(folder.open(file.name)).metadata
        classes = {value for name, value in header.items() if name.startswith("1.")}
        strange = [
            name for name in sorted(classes) if not name.endswith("Cache") and name != "CacheList"
        ]
        if strange or not classes:
            raise SessionError(
                f"{file}: no prompt cache of mlx-lm{f': it names {strange[0][:40]!r}' if strange else ''}"
            )
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
    except Exception as error:  # whatever mlx-lm makes of a file that is none of its own
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise SessionError(f"{file}: mlx-lm can't read it: {why}") from error
