"""What is known about a model from its configuration and its shapes, without reading its weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxrunner import device
from mlxrunner.errors import ModelError
from mlxrunner.models.resolve import check_files, read_config, read_headers, resolve, rope_settings
from mlxrunner.models.settings import check_layers, size_of, text_settings

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
    """`context`: tokens that the model was made for; `layers`: layers by kind of cache; `vocab`: width of the logits.

    `depends_on_chunks`: whether its answer is another one when its prompt comes in other chunks (see `mlxrunner.models.chunks`), so that
    nothing that was evaluated is used again; None where that was not tried, for lack of weights.
    """

    architecture: str
    context: int
    context_is_known: bool
    layers: dict[str, int]
    vocab: int
    depends_on_chunks: bool | None = None


@dataclass(frozen=True)
class CacheCost:
    """Bytes that one more token adds to the entry, and bytes that do not depend on the tokens (states; windows once full)."""

    per_token: int
    fixed: int


def facts_of(model: Any, config: dict[str, Any]) -> ModelFacts:
    """The facts of a model that was built from `config`, once its windows hold what it asks for; nothing is evaluated."""
    from mlxrunner.cache.factory import make_layer_caches
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
    vocab = size_of(config, "vocab_size") or _width_of_logits(model)
    return ModelFacts(
        config["model_type"], context or DEFAULT_CONTEXT, context is not None, dict(kinds), vocab
    )


def build(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The model of `folder` with its shapes but without its weights: nothing is read but config.json, nothing is evaluated."""
    from mlx_lm.utils import _get_classes

    config = read_config(folder)
    config |= rope_settings(config)
    try:
        model_class, args_class = _get_classes(config)
        return model_class(args_class.from_dict(config)), config
    except Exception as error:
        raise ModelError(
            f"{folder / 'config.json'}: no model can be built from it: {' '.join(str(error).split())[:300]}"
        ) from error


def cache_cost(model: Any) -> CacheCost:
    """From the shapes of the caches after one unevaluated token."""
    from mlxrunner.cache.factory import CacheOptions, layouts_of

    layouts = layouts_of(model, CacheOptions())
    growing = sum(layout.row_bytes for layout in layouts if layout.most_rows is None)
    return CacheCost(
        growing,
        sum((layout.most_rows or 0) * layout.row_bytes + layout.fixed_bytes for layout in layouts),
    )


@dataclass(frozen=True)
class Shapes:
    """A model with its shapes but without its weights. `weight_bytes`: what they will take once loaded."""

    model: Any
    config: dict[str, Any]
    facts: ModelFacts
    weight_bytes: int


def without_weights(name: str) -> Shapes:
    """Model `name` from its config.json and the headers of its weight files."""
    folder = resolve(name)
    check_files(folder)
    config = read_config(folder)
    # The files first: a model can be built without them, for nothing.
    tensors = _tensors(folder)
    check_layers(folder / "config.json", config, len(tensors))
    model, config = build(folder)
    _set_dtype(model, config)
    return Shapes(model, config, usable_facts(folder, model, config), loaded_bytes(tensors, config))


def usable_facts(folder: Path, model: Any, config: dict[str, Any]) -> ModelFacts:
    """`facts_of` a model through which a token can be run, as far as its shapes say; ModelError otherwise. Nothing is evaluated."""
    from mlxrunner.cache.factory import make_layer_caches, run_lazily

    try:
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


@dataclass(frozen=True)
class Description:
    """Return the figures of `mlxrunner show`: the ModelFacts that need no weights, and bytes."""

    architecture: str
    context: int
    context_is_known: bool
    layers: dict[str, int]
    vocab: int
    weight_bytes: int
    cache: CacheCost

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def describe(name: str) -> Description:
    """Everything about a model that can be said without loading its weights."""
    shapes = without_weights(name)
    known = {
        name: value for name, value in vars(shapes.facts).items() if name != "depends_on_chunks"
    }
    return Description(
        **known, weight_bytes=weight_bytes(resolve(name)), cache=cache_cost(shapes.model)
    )


def weight_bytes(folder: Path) -> int:
    """Bytes of all tensors, from the safetensors headers."""
    return _stored_bytes(_tensors(folder))


def _stored_bytes(tensors: Sequence[dict[str, Any]]) -> int:
    return sum(end - begin for entry in tensors for begin, end in [entry["data_offsets"]])


def loaded_bytes(tensors: Sequence[dict[str, Any]], config: dict[str, Any]) -> int:
    """Bytes of all tensors once loaded: a device may want another type than the file has."""
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
    """Give an unevaluated model the type that it would compute with on this device."""
    names = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}
    stored = names.get(str(config.get("torch_dtype") or config.get("dtype")), mx.bfloat16)
    model.set_dtype(stored if _is_quantized(config) else device.preferred_dtype() or stored)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value < 10**9


def _width_of_logits(model: Any) -> int:
    tables: Any = tree_flatten(model.parameters())
    return max(
        (table.shape[0] for name, table in tables if "embed" in name and table.ndim == 2), default=0
    )
