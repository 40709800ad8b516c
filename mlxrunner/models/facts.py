"""Read the facts of a model from its configuration and its shapes, without its weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxrunner.errors import ModelError
from mlxrunner.models.files import check_files, read_config, read_headers
from mlxrunner.models.resolve import resolve
from mlxrunner.models.rope import ropes_of
from mlxrunner.models.settings import check_layers, size_of, text_settings
from mlxrunner.system import device
from mlxrunner.system.foreign import foreign_code
from mlxrunner.system.mlx_lm_internals import model_classes

DEFAULT_CONTEXT = 4096
_CONTEXT_NAMES = (
    "max_position_embeddings",
    "max_sequence_length",
    "seq_length",
    "n_positions",
    "n_ctx",
    "model_max_length",
)


@dataclass(frozen=True)
class ModelFacts:
    """The facts that decide how a model is run."""

    architecture: str
    """mlx-lm's name of the model type."""
    context: int
    """Tokens that the model was made for."""
    context_is_known: bool
    """False if `context` is a default, because config.json does not give it."""
    layers: dict[str, int]
    """Number of layers by kind of cache."""
    vocab: int
    """Width of the logits."""
    depends_on_chunks: bool | None = None
    """True if the answer changes when the prompt comes in other chunks. Nothing is then reused.

    None: not tried, because no weights are loaded. See `mlxrunner.models.chunks`.
    """


@dataclass(frozen=True)
class CacheCost:
    """The cost of the caches in bytes."""

    per_token: int
    """Bytes that one more token adds."""
    fixed: int
    """Bytes that do not depend on the tokens: states, and windows once full."""


def facts_of(model: Any, config: dict[str, Any]) -> ModelFacts:
    """Return the facts of a model that was built from `config`. Evaluate nothing.

    Windows are first made as wide as the model's masks.
    """
    from mlxrunner.cache.layers.factory import make_layer_caches
    from mlxrunner.models.windows import widen_windows

    widen_windows(model)
    sources = (config, text_settings(config))
    context = next(
        (
            c
            for c in (source.get(name) for source in sources for name in _CONTEXT_NAMES)
            if _is_size(c)
        ),
        None,
    )
    kinds = Counter(cache.kind for cache in make_layer_caches(model))
    return ModelFacts(
        config["model_type"],
        context or DEFAULT_CONTEXT,
        context is not None,
        dict(kinds),
        _vocabulary(model, config),
    )


def build(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Build the model of `folder` with its shapes but without its weights.

    Read config.json only, and evaluate nothing. Raise ModelError if no model can be built.
    """
    config = read_config(folder)
    ropes = ropes_of(folder / "config.json", config)
    config |= ropes.settings
    try:
        with foreign_code():
            model_class, arguments_class = model_classes(config)
            model = model_class(arguments_class.from_dict(config))
    except Exception as error:
        raise ModelError(
            f"{folder / 'config.json'}: no model can be built from it: "
            f"{' '.join(str(error).split())[:300]}"
        ) from error
    ropes.check(model_class)
    return model, config


def cache_cost(model: Any) -> CacheCost:
    """Return the cost of the caches, from their shapes after one unevaluated token."""
    from mlxrunner.cache.layers.factory import CacheOptions, layouts_of

    layouts = layouts_of(model, CacheOptions())
    growing = sum(layout.row_bytes for layout in layouts if layout.most_rows is None)
    return CacheCost(
        growing,
        sum((layout.most_rows or 0) * layout.row_bytes + layout.fixed_bytes for layout in layouts),
    )


@dataclass(frozen=True)
class Shapes:
    """A model with its shapes but without its weights."""

    model: Any
    config: dict[str, Any]
    facts: ModelFacts
    weight_bytes: int
    """Bytes of the weights once loaded."""


def without_weights(name: str) -> Shapes:
    """Return model `name`, from its config.json and the headers of its weight files.

    Raise ModelError if these files are missing or broken.
    """
    folder = resolve(name)
    check_files(folder)
    config = read_config(folder)
    # Read the files first: a model without them would be built for nothing.
    tensors = _tensors(folder)
    check_layers(folder / "config.json", config, len(tensors))
    model, config = build(folder)
    _set_dtype(model, config)
    return Shapes(model, config, usable_facts(folder, model, config), loaded_bytes(tensors, config))


def usable_facts(folder: Path, model: Any, config: dict[str, Any]) -> ModelFacts:
    """Return `facts_of` a model, after checking that a token can run through its shapes.

    Evaluate nothing. Raise ModelError if no token can run.
    """
    from mlxrunner.cache.layers.factory import make_layer_caches, run_lazily

    try:
        with foreign_code():
            caches = make_layer_caches(model)
            logits = run_lazily(model, caches, 1)
        if logits.ndim != 3 or not logits.size:
            raise ValueError(f"its logits have the shape {logits.shape}")
        for cache in caches:
            cache.layouts()
        return facts_of(model, config)
    except Exception as error:
        raise ModelError(
            f"{folder / 'config.json'}: no token can be run through the model that it describes: "
            f"{' '.join(str(error).split())[:300] or type(error).__name__}"
        ) from error


def weight_bytes(folder: Path) -> int:
    """Return the bytes of all tensors, from the safetensors headers."""
    return _stored_bytes(_tensors(folder))


def _stored_bytes(tensors: Sequence[dict[str, Any]]) -> int:
    return sum(end - begin for entry in tensors for begin, end in [entry["data_offsets"]])


def loaded_bytes(tensors: Sequence[dict[str, Any]], config: dict[str, Any]) -> int:
    """Return the bytes of all tensors once loaded.

    A device may need another type than that of the file.
    """
    dtype = device.preferred_dtype()
    if dtype is None or _is_quantized(config):
        return _stored_bytes(tensors)
    return sum(math.prod(entry["shape"]) * dtype.size for entry in tensors)


def _tensors(folder: Path) -> list[dict[str, Any]]:
    return [
        entry
        for header in read_headers(folder).values()
        for name, entry in header.items()
        if name != "__metadata__"
    ]


def _is_quantized(config: dict[str, Any]) -> bool:
    return bool(config.get("quantization") or config.get("quantization_config"))


def _set_dtype(model: Any, config: dict[str, Any]) -> None:
    """Give an unevaluated model the type in which it computes on this device."""
    names = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}
    stored = names.get(str(config.get("torch_dtype") or config.get("dtype")), mx.bfloat16)
    model.set_dtype(stored if _is_quantized(config) else device.preferred_dtype() or stored)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value < 10**9


def _vocabulary(model: Any, config: dict[str, Any]) -> int:
    """Return the number of tokens, 0 if it is not known.

    MLX checks no index. A token beyond the model's table of tokens would be read and written
    outside of arrays, so the table counts where the configuration names more.
    """
    weights: Any = tree_flatten(model.parameters())
    tables = {
        name: table.shape[0] for name, table in weights if "embed" in name and table.ndim == 2
    }
    most = max((rows for name, rows in tables.items() if "embed_tokens.weight" in name), default=0)
    named = size_of(config, "vocab_size")
    return min(named, most) if named and most else named or max(tables.values(), default=0)
