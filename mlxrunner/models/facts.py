"""Read the facts of a model from its configuration and its shapes, without its weights.

Here are also the probe of a loaded model, which finds out if its answer depends on how its prompt
was cut into chunks, the width of its windows, and the models that mlx-vlm runs.

The rotary positions (RoPE) of an architecture stand under the names that it reads. transformers 4
wrote `rope_theta` and `rope_scaling`. transformers 5 writes `rope_parameters`, with a dict for each
kind of layer where those differ. An architecture of mlx-lm reads one of these forms, and takes
defaults in silence where it does not find it. So each form is made of the others, and a setting
that the built model has not read is an error.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList, RotatingKVCache, make_prompt_cache

from mlxrunner.cache.layers.factory import CacheOptions, layouts_of, make_layer_caches, run_lazily
from mlxrunner.errors import ModelError, reason
from mlxrunner.models.files import (
    check_files,
    check_layers,
    read_config,
    read_headers,
    size_of,
    text_settings,
    wrong_setting,
)
from mlxrunner.models.resolve import resolve
from mlxrunner.system import device
from mlxrunner.system import mlx_vlm_internals as internals
from mlxrunner.system.foreign import foreign_code
from mlxrunner.system.imports import how_to_install
from mlxrunner.system.mlx_lm_internals import has_architecture, model_classes
from mlxrunner.system.tensorfile import TensorPlace

THETA = ("rope_theta", "rotary_emb_base")
"""Names of the base of the rotations."""
LOCAL_THETA = ("rope_local_base_freq", "rope_local_theta", "swa_rope_theta", "local_rope_theta")
"""Names of the base of the rotations in layers with a sliding window."""
PARTIAL = ("partial_rotary_factor", "rotary_pct")
"""Names of the part of each head that is rotated."""
FULL, SLIDING = "full_attention", "sliding_attention"
ORIGINAL = "original_max_position_embeddings"
KIND = ("rope_type", "type")
"""Names of the kind of scaling. An architecture reads one or the other."""
PLAIN = ("default", "mrope")
"""Kinds of scaling that change nothing for a text."""
DESCRIPTIVE = {*KIND, "rope_theta", "partial_rotary_factor", ORIGINAL, "mrope_section"}
"""Settings of a scaling that do not say how much it scales."""
HAS_DEFAULTS = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
"""Types of models whose layers have ropes of their own where config.json names none."""


class RopeSettings(dict[str, Any]):
    """The settings of a rope, which know the names that a model has read."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self.read = set[str]()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)

    def __iter__(self) -> Iterator[str]:
        self.read.update(super().keys())
        return super().__iter__()

    def items(self) -> Any:
        self.read.update(super().keys())
        return super().items()


Forms = list[RopeSettings]
"""The same rope in each place where a model may read it."""


@dataclass
class Ropes:
    """The ropes of a model in every form, and those that it must not overlook."""

    file: Path
    settings: dict[str, Any] = field(default_factory=dict)
    """The settings to put over those of config.json."""
    scaled: list[tuple[str, Forms]] = field(default_factory=list)
    """Each scaled rope, with its kind."""
    local: list[tuple[Any, Forms]] = field(default_factory=list)
    """Each rope of layers with a window that has a base of its own, with that base."""

    def check(self, model_class: Any) -> None:
        """Raise ModelError unless a model of `model_class`, which was built, has read them."""
        name = str(model_class.__module__).rpartition(".")[2]
        if not _has_setting(model_class, (*THETA, "rope_parameters")):
            return  # it does not rotate, or always in the same way
        for kind, forms in self.scaled:
            if not any(form.read - DESCRIPTIVE for form in forms):
                raise ModelError(
                    f"{self.file}: rope_type {kind!r:.40} scales the rotary positions, and "
                    f"mlx-lm's {name} does not read it: the answers would be wrong. Without the "
                    "scaling the model runs as far as it was trained before"
                )
        for theta, forms in self.local:
            if not any("rope_theta" in form.read for form in forms) and not _has_setting(
                model_class, LOCAL_THETA
            ):
                raise ModelError(
                    f"{self.file}: layers with a sliding window have the rope_theta {theta!r:.40}, "
                    f"and mlx-lm's {name} has one for all layers: the answers would be wrong"
                )


def _has_setting(model_class: Any, names: Container[str]) -> bool:
    """Return True if the arguments of a model or of its parts have a field of one of `names`."""
    module = sys.modules[model_class.__module__]
    modules = [module, *(one for one in vars(module).values() if isinstance(one, ModuleType))]
    classes = [one for place in modules for one in vars(place).values() if isinstance(one, type)]
    return any(one.name in names for kind in classes if is_dataclass(kind) for one in fields(kind))


def ropes_of(file: Path, config: Mapping[str, Any]) -> Ropes:
    """Return the ropes that `config`, read from `file`, describes, also in nested settings.

    Raise ModelError if it describes a rope in two ways that differ.
    """
    ropes = Ropes(file)
    completed = _completed(ropes, config)
    ropes.settings = {
        name: value for name, value in completed.items() if value is not config.get(name, ropes)
    }
    return ropes


def _completed(ropes: Ropes, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` with its rope in every form, and note it in `ropes`."""
    found = dict(config)
    for name, value in config.items():
        if isinstance(value, dict) and name.endswith("_config") and "vision" not in name:
            found[name] = _completed(ropes, value)
    parameters = _dict(config.get("rope_parameters"))
    layers = {kind: rope for kind, rope in parameters.items() if isinstance(rope, dict)}
    flat = {name: value for name, value in parameters.items() if name not in layers}
    main = {**flat, **(layers.get(FULL) or next(iter(layers.values()), {}))}
    rope = _merged(ropes.file, config, main)
    if not rope:
        return found
    theta, part = rope.get("rope_theta"), rope.get("partial_rotary_factor")
    local = _agreed(
        ropes.file,
        "rope_theta of layers with a sliding window",
        [*map(config.get, LOCAL_THETA), layers.get(SLIDING, {}).get("rope_theta")],
    )
    names = dict.fromkeys(THETA, theta) | dict.fromkeys(PARTIAL, part)
    names |= dict.fromkeys(LOCAL_THETA, local) | {ORIGINAL: rope.get(ORIGINAL)}
    if part is not None and type(config.get("head_dim")) is int:
        names["rotary_dim"] = int(config["head_dim"] * part)
    for name, value in names.items():
        if value is not None and found.get(name) is None:
            found[name] = value
    if isinstance(found.get("attn_config"), dict) and theta is not None:
        found["attn_config"] = {"rope_theta": theta, **found["attn_config"]}
    if local is not None:
        layers = {SLIDING: {"rope_theta": local}, **layers}
    _put(ropes, found, rope, {kind: {**flat, **layer} for kind, layer in layers.items()})
    return found


def _put(
    ropes: Ropes, found: dict[str, Any], rope: dict[str, Any], layers: dict[str, dict[str, Any]]
) -> None:
    """Put `rope`, and those of `layers`, into `found` as `rope_scaling` and `rope_parameters`."""
    kind, theta = rope["rope_type"], rope.get("rope_theta")
    scaling, parameters, layer = (RopeSettings(rope) for _ in range(3))
    kinds = [one for one in found.get("layer_types") or () if isinstance(one, str)]
    own = dict.fromkeys([FULL, SLIDING, *kinds], layer)
    for name, given in layers.items():
        whole = _with_kind(ropes.file, {"rope_theta": theta, **given})
        own[name] = layer if whole == rope else RopeSettings(whole)
    if kind not in PLAIN and not (kind == "linear" and rope.get("factor") == 1):
        found["rope_scaling"] = scaling
        ropes.scaled.append((kind, [scaling, parameters, layer, own[FULL]]))
    elif {*_dict(found.get("rope_scaling"))} <= DESCRIPTIVE:
        found["rope_scaling"] = None
    window = own[SLIDING]
    if window.get("rope_theta") != theta and (not kinds or SLIDING in kinds):
        ropes.local.append((window["rope_theta"], [window]))
        window.read.clear()
    if "rope_parameters" in found or found.get("model_type") not in HAS_DEFAULTS:
        parameters.update(own)
        found["rope_parameters"] = parameters


def _merged(file: Path, config: Mapping[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the rope of `config` whose `rope_parameters` are `parameters`; {} if it has none."""
    scaling = _dict(config.get("rope_scaling"))
    thetas = [*map(config.get, THETA), parameters.get("rope_theta"), scaling.get("rope_theta")]
    parts = [
        *map(config.get, PARTIAL),
        *(one.get("partial_rotary_factor") for one in (parameters, scaling)),
    ]
    named = {
        "rope_theta": _agreed(file, "rope_theta", thetas),
        "partial_rotary_factor": _agreed(file, "partial_rotary_factor", parts),
    }
    named = {name: value for name, value in named.items() if value is not None}
    if not named and not parameters and not scaling:
        return {}
    forms = [_with_kind(file, one) for one in (parameters, scaling) if one]
    scaled = [one for one in forms if one["rope_type"] not in PLAIN]
    for name in {*scaled[0]} & {*scaled[-1]} if scaled else ():
        _agreed(file, f"{name} of rope_scaling", [one[name] for one in scaled])
    rope = {name: value for one in (*forms, *scaled) for name, value in one.items()}
    rope = {**dict.fromkeys(KIND, "default"), **rope, **named}
    if rope["rope_type"] not in PLAIN and config.get(ORIGINAL) is not None:
        rope.setdefault(ORIGINAL, config[ORIGINAL])
    return rope


def _with_kind(file: Path, rope: dict[str, Any]) -> dict[str, Any]:
    """Return `rope` with its kind under both names."""
    kinds = ["longrope" if kind == "su" else kind for kind in map(rope.get, KIND) if kind]
    if not {*kinds} <= {*PLAIN}:
        _agreed(file, "rope_type", kinds)
    return {**rope, **dict.fromkeys(KIND, kinds[0] if kinds else "default")}


def _agreed(file: Path, name: str, values: list[Any]) -> Any:
    """Return the value of a setting that is in several places, or None.

    Raise ModelError if they differ.
    """
    given = [value for value in values if value is not None]
    for other in given[1:]:
        if other != given[0]:
            raise ModelError(
                f"{file}: {name} is both {given[0]!r:.60} and {other!r:.60}: keep the one that the "
                "model was trained with"
            )
    return given[0] if given else None


def _dict(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {}


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

    None: not tried, because no weights are loaded. See `depends_on_chunks`.
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
        why = wrong_setting(config) or reason(error)
        raise ModelError(
            f"{folder / 'config.json'}: no model can be built from it: {why}"
        ) from error
    ropes.check(model_class)
    return model, config


def cache_cost(model: Any) -> CacheCost:
    """Return the cost of the caches, from their shapes after one unevaluated token."""
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
        why = wrong_setting(config) or reason(error)
        raise ModelError(
            f"{folder / 'config.json'}: no token can be run through the model that it describes: "
            f"{why}"
        ) from error


def weight_bytes(folder: Path) -> int:
    """Return the bytes of all tensors, from the safetensors headers."""
    return sum(tensor.nbytes for tensor in _tensors(folder))


def loaded_bytes(tensors: Sequence[TensorPlace], config: dict[str, Any]) -> int:
    """Return the bytes of all tensors once loaded.

    A device may need another type than that of the file.
    """
    dtype = device.preferred_dtype()
    if dtype is None or _is_quantized(config):
        return sum(tensor.nbytes for tensor in tensors)
    return sum(math.prod(tensor.shape) * dtype.size for tensor in tensors)


def _tensors(folder: Path) -> list[TensorPlace]:
    headers = read_headers(folder).values()
    return [tensor for header in headers for tensor in header.tensors.values()]


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


def widen_windows(model: Any) -> None:
    """Make the windows of mlx-lm's `model` as wide as its masks. Evaluate nothing.

    A second call changes nothing.
    """
    narrow = {size: width for size, width in masks_asked(model).items() if width > size}
    if narrow:
        model.make_cache = partial(_made_wider, model.make_cache, narrow)


def _made_wider(make: Callable[[], list[Any]], widths: dict[int, int]) -> list[Any]:
    inners = make()
    for window in _windows(inners):
        window.max_size = widths.get(window.max_size, window.max_size)
    return inners


def masks_asked(model: Any) -> dict[int, int]:
    """Return the widest mask that `model` asks for, in tokens, by the size of the window.

    Models usually ask all windows of a size for the same mask.
    """
    inners = make_prompt_cache(model)
    asked: dict[int, int] = {}
    for window in _windows(inners):
        window.make_mask = partial(_note, asked, window.max_size, window.make_mask)
        asked[window.max_size] = 0
    if asked:
        try:
            model(mx.zeros((1, 1), mx.int32), cache=inners)
        except Exception:  # running the model raises the same error
            return {}
    return asked


def _note(
    asked: dict[int, int],
    size: int,
    make: Callable[..., Any],
    *args: Any,
    window_size: int | None = None,
    **more: Any,
) -> Any:
    asked[size] = max(asked[size], window_size or 0)
    return make(*args, window_size=window_size, **more)


def _windows(inners: Sequence[Any]) -> Iterator[RotatingKVCache]:
    for inner in inners:
        if isinstance(inner, CacheList):
            yield from _windows(inner.caches)
        elif type(inner) is RotatingKVCache and not inner.keep:
            yield inner


DEPENDS = "this model's answers depend on how a prompt is cut into chunks"
TOKENS = 8
CHUNKS = (4, 3, 1)
"""Tokens of each chunk of the second run; the last one is a decode step."""
NARROW = 2
"""Tokens of a window during the probe."""
TOLERANCE = 0.05
"""Largest accepted difference, as a share of the largest logit.

Half-precision sums in another order differ by less. A missing token makes a larger difference.
"""
PROMPTS = 3
"""Number of prompts that all have to differ.

In a single prompt, a close choice of an expert may differ without a fault.
"""


def depends_on_chunks(model: Any, vocab: int) -> bool:
    """Return True if the answers of `model` depend on how a prompt is cut into chunks.

    Evaluate TOKENS tokens twice, PROMPTS times. Return False for a model that can't be run.
    """
    try:
        return all(_gap(model, _prompt(number, vocab)) > TOLERANCE for number in range(PROMPTS))
    except Exception:  # running the model raises the same error
        return False


def computes_only_nan(model: Any, vocab: int) -> bool:
    """Return True if the logits of `model` are NaN, or all infinite, after each of some prompts.

    Return False for a model that can't be run.
    """
    try:
        prompts = (_prompt(number, vocab) for number in range(PROMPTS))
        if any(mx.isfinite(_logits(model, one, (TOKENS,)).max()).item() for one in prompts):
            return False
        caches = make_layer_caches(model)  # as wide as they are: narrow ones may see nothing
        prompt = mx.array([_prompt(PROMPTS, vocab)])
        logits = model(prompt, cache=[cache.model_cache for cache in caches])
        return not mx.isfinite(logits[0, -1].max()).item()
    except Exception:  # running the model raises the same error
        return False


def _prompt(number: int, vocab: int) -> list[int]:
    return [
        (11 + 7 * number + (13 + number) * place) % max(min(vocab, 251), 2)
        for place in range(TOKENS)
    ]


def _gap(model: Any, prompt: list[int]) -> float:
    """Return the largest difference of the logits after `prompt`.

    The result is a share of the largest logit.
    """
    whole, parts = (_logits(model, prompt, chunks) for chunks in ((TOKENS,), CHUNKS))
    gap = mx.abs(parts - whole).max() / mx.maximum(mx.abs(whole).max(), 1e-6)
    return float(gap.item())  # type: ignore[arg-type]  # real


def _logits(model: Any, prompt: list[int], chunks: Sequence[int]) -> mx.array:
    caches = [cache.narrowed(NARROW) for cache in make_layer_caches(model)]
    for count in chunks:
        tokens, prompt = prompt[:count], prompt[count:]
        for cache in caches:
            cache.begin_forward()
        logits = model(mx.array([tokens]), cache=[cache.model_cache for cache in caches])
        for cache in caches:
            cache.end_forward(count)
        mx.eval(logits)  # in this order on all ranks that share the layers
    last: mx.array = logits[0, -1].astype(mx.float32)
    return last


VISION_ARCHITECTURES = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "gemma3",
    "idefics3",
    "smolvlm",
    "mistral3",
    "pixtral",
    "internvl_chat",
    "llava",
    "mllama",
)
"""The architectures whose answers were compared with mlx-vlm's own."""


def how_to_see() -> str:
    """Return the command that installs the reader of pictures."""
    return f"pictures need mlx-vlm: {how_to_install('vision')}"


def has_vision_encoder(config: Mapping[str, Any]) -> bool:
    """Return True if a model with this configuration has an encoder that can be used."""
    return config["model_type"] in VISION_ARCHITECTURES and isinstance(
        config.get("vision_config"), dict
    )


def is_run_by_mlx_vlm(name: str) -> bool:
    """Return True if `name` can be run with its encoder of pictures alone.

    mlx-lm runs the text's half of other models, and lacks that of some.
    """
    with suppress(ModelError):  # loading it explains better what is wrong with it
        return needs_mlx_vlm(read_config(resolve(name)))
    return False


def needs_mlx_vlm(config: Mapping[str, Any]) -> bool:
    """Return True if mlx-lm lacks a model with this configuration, and mlx-vlm runs it here."""
    is_lacking = not has_architecture(config["model_type"])
    return internals.is_installed() and has_vision_encoder(config) and is_lacking
