"""All code that relies on private parts of mlx-lm and MLX: names, attributes and code.

The docstring of each function names its expectations. tests/system/test_mlx_lm_internals.py checks
them against the installed mlx-lm, whose version has to be one of VERSIONS. What importing mlx-lm
does to the process is in mlxrunner.system.foreign.

Public and used elsewhere: `load_model`, `load_tokenizer`, `make_prompt_cache`, the cache classes
with their `state`, `from_state` and `offset`, `create_attention_mask`, the samplers.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path

VERSIONS = ("0.32.2",)
"""Tested versions of mlx-lm; pyproject.toml allows 0.32.2 up to 0.33."""
ATTENTION = "scaled_dot_product_attention"
LAST_NORMS = ("norm", "final_layernorm", "final_norm")
"""Names under which a model's body has its last norm."""

Attention = Callable[..., mx.array]


def model_classes(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the classes of a model and of its arguments.

    Expects `mlx_lm.utils._get_classes`, which finds the module by `model_type`. Raise ValueError if
    there is none.
    """
    from mlx_lm.utils import _get_classes

    model_class, arguments_class = _get_classes(config)
    return model_class, arguments_class


def has_pipeline(model: type) -> bool:
    """Return True if the layers of a class of models are in a class that ranks can share.

    Expects a subclass of `PipelineMixin` in the module of the model.
    """
    from mlx_lm.models.pipeline import PipelineMixin

    classes = vars(sys.modules[model.__module__]).values()
    return any(
        isinstance(one, type) and one is not PipelineMixin and hasattr(one, "pipeline")
        for one in classes
    )


Tensors = dict[str, mx.array]


def classes_that_show(
    take: Callable[[Tensors], Tensors], complete: Callable[[Tensors, Tensors], Tensors]
) -> Callable[[Mapping[str, Any]], tuple[Any, Any]]:
    """Return the `get_model_classes` of a `load_model` that shows the tensors of the files.

    The model has those that `take(tensors)` returns. It loads `complete(made, parameters)`: `made`
    is what mlx-lm makes of them, and `parameters` are those that the model begins with.
    Expects that `load_model` calls `sanitize(tensors)` of the model where there is one, and then
    `load_weights(list of pairs, strict=...)`.
    """

    def classes(config: Mapping[str, Any]) -> tuple[Any, Any]:
        model_class, arguments_class = model_classes(config)

        def make(arguments: Any) -> Any:
            model = model_class(arguments)
            sanitize = getattr(model, "sanitize", dict)

            def taken(tensors: Tensors) -> Tensors:
                del model.sanitize  # that of its class is back
                made: Tensors = sanitize(take(tensors))
                return made

            def load(weights: Iterable[tuple[str, mx.array]], strict: bool = True) -> Any:
                del model.load_weights
                parameters: Any = tree_flatten(model.parameters())
                whole = complete(dict(weights), dict(parameters))
                return model.load_weights([*whole.items()], strict=strict)

            model.sanitize, model.load_weights = taken, load
            return model

        return make, arguments_class

    return classes


def load_model(
    folder: Path,
    weight_files: Sequence[Path],
    settings: Mapping[str, Any],
    classes: Callable[[Mapping[str, Any]], tuple[Any, Any]],
    *,
    trust_remote_code: bool,
) -> tuple[Any, dict[str, Any]]:
    """Return the model in `folder` with the weights of `weight_files`, unread, and its config.

    `settings` are put over those of config.json. Expects that `mlx_lm.utils.load_model` finds the
    files by `glob.glob`, and uses the classes of `get_model_classes`.
    """
    from mlx_lm import utils

    found = SimpleNamespace(glob=lambda pattern: list(map(str, weight_files)))
    load = with_globals(utils.load_model, glob=found)
    model, config = load(
        folder,
        lazy=True,
        model_config=dict(settings),
        get_model_classes=classes,
        trust_remote_code=trust_remote_code,
    )
    return model, config


@contextmanager
def cutting(
    part_of: Callable[[mx.array, int, list[int]], mx.array | None],
) -> Iterator[None]:
    """Let the `shard()` of a model take each part from `part_of(array, axis, indices)`.

    Where that returns None, the part is cut from the array. Expects
    `mlx.nn.layers.distributed._shard(parameters, predicate, group)`, whose predicate returns None,
    an axis, or an axis and segments for a path and an array. Without it all parts are cut from
    arrays.
    """
    from mlx.nn.layers import distributed

    if not hasattr(distributed, "_shard"):
        yield
        return
    whole = distributed._shard

    def shard(parameters: Any, predicate: Callable[..., Any], group: Any = None) -> Any:
        taken = set[str]()

        def taken_part(path: str, array: Any) -> Any:
            how = predicate(path, array) if isinstance(array, mx.array) else None
            if how is None:
                return array
            axis, segments = how if isinstance(how, tuple) else (how, 1)
            axis %= array.ndim
            indices = {"": mx.arange(array.shape[axis])}
            kept = whole(indices, lambda *_: (0, segments), group)[""]
            part = part_of(array, axis, kept.tolist())
            if part is None:
                return array
            taken.add(path)
            return part

        parts = tree_map_with_path(taken_part, parameters)
        return whole(
            parts, lambda path, array: None if path in taken else predicate(path, array), group
        )

    distributed._shard = shard  # type: ignore[assignment]  # called by position
    try:
        yield
    finally:
        distributed._shard = whole


def has_architecture(model_type: str) -> bool:
    """Return True if mlx-lm has a module for `model_type`, without importing it.

    Expects `mlx_lm.utils.MODEL_REMAPPING` and a module `mlx_lm.models.NAME` for each.
    """
    from mlx_lm.utils import MODEL_REMAPPING

    module = MODEL_REMAPPING.get(model_type, model_type)
    return module.isidentifier() and importlib.util.find_spec(f"mlx_lm.models.{module}") is not None


def has_module(package: str, name: Any) -> bool:
    """Return True if mlx-lm has the module `name` in its `package`, without importing it."""
    return (
        isinstance(name, str)
        and name.isidentifier()
        and importlib.util.find_spec(f"mlx_lm.{package}.{name}") is not None
    )


def tool_parser_name(template: str, vocabulary: Any) -> str | None:
    """Return the name of the module of `mlx_lm.tool_parsers` that reads a model's tool calls.

    `vocabulary` says with `in` if a text is a token. Expects
    `mlx_lm.tokenizer_utils._infer_tool_parser`, which reads `chat_template` and `get_vocab()` of a
    tokenizer. Return None if mlx-lm knows no parser.
    """
    from mlx_lm.tokenizer_utils import _infer_tool_parser

    class Stub:
        chat_template = template

        def get_vocab(self) -> Any:
            return vocabulary

    name: str | None = _infer_tool_parser(Stub())
    return name


def tool_parser(name: str) -> tuple[Callable[..., Any], str, str] | None:
    """Return a parser of tool calls, and the texts before and after the calls that it reads.

    Expects `parse_tool_call(text, tools)`, which raises any exception for a text without a call,
    `tool_call_start` and `tool_call_end` in `mlx_lm.tool_parsers.NAME`. Return None if there is no
    such module.
    """
    if not has_module("tool_parsers", name):
        return None
    module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    return module.parse_tool_call, module.tool_call_start, module.tool_call_end


def transformers_tokenizer(wrapper: Any) -> Any:
    """Return transformers' tokenizer behind mlx-lm's `TokenizerWrapper`.

    Expects its attribute `_tokenizer`.
    """
    return wrapper._tokenizer


def with_rope(layer: Any) -> list[Any]:
    """Return the modules of `layer` that rotate keys and queries: those with a callable `rope`.

    Expects `rope(x [batch, heads, n, head_dim], offset=int or array)`.
    """
    modules = layer.modules() if hasattr(layer, "modules") else []
    return [module for module in modules if has_rope(module)]


def has_rope(module: Any) -> bool:
    """Return True if `module` rotates keys and queries: see `with_rope`."""
    return callable(getattr(module, "rope", None))


def last_norm(model: Any) -> tuple[Any, str] | None:
    """Return the body of `model` and the name of the norm before its output projection.

    Expects the body under `model`, or under `language_model.model`. Return None if it is not there.
    """
    body = getattr(getattr(model, "language_model", model), "model", None)
    name = next((name for name in LAST_NORMS if callable(getattr(body, name, None))), None)
    return None if name is None else (body, name)


def calls_attention(module: Any) -> bool:
    """Return True if `module` calls an attention function that can be replaced.

    Expects a `__call__` in Python that looks ATTENTION up among the names of its own module.
    """
    call = type(module).__call__
    return (
        isinstance(call, FunctionType)
        and ATTENTION in call.__code__.co_names
        and ATTENTION in call.__globals__
    )


def class_with(module: Any, attention: Callable[[Attention], Attention]) -> type:
    """Return a subclass of `module`'s class that calls `attention(original)`.

    Set it as the `__class__` of a module that `calls_attention`. The copied `__call__` has its own
    globals, so that the module's file, other models and other layers don't change.
    """
    old = type(module)
    call = old.__call__
    new = with_globals(call, **{ATTENTION: attention(call.__globals__[ATTENTION])})
    return type(old.__name__, (old,), {"__call__": new, "__module__": old.__module__})


def with_globals(function: Any, **names: Any) -> Callable[..., Any]:
    """Return a copy of a Python `function` that finds `names` among the names of its module."""
    new = FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    new.__kwdefaults__ = function.__kwdefaults__
    return new


def is_stock_cache(cache: Any) -> bool:
    """Return True if the class of `cache` is in `mlx_lm.models.cache`, not in a model's file."""
    return type(cache).__module__ == "mlx_lm.models.cache"


def has_settable_state(cache: Any) -> bool:
    """Return True if a cache can be restored from its `state`, as mlx-lm's caches can.

    A cache that a model's file defines (DeepSeek-V4.1) is restored from its attributes.
    """
    state = getattr(type(cache), "state", None)
    return not isinstance(state, property) or state.fset is not None


def rows_in_order(cache: Any, rows: mx.array) -> mx.array:
    """Return the `rows` of a RotatingKVCache by their positions, without unused ones.

    Expects its attribute `_idx`: the row after the newest one. The cache keeps no first tokens.
    """
    at = cache._idx
    if at < cache.offset and at < rows.shape[2]:
        rows = mx.concatenate([rows[..., at:, :], rows[..., :at, :]], axis=2)
    return rows[..., : min(at, rows.shape[2]), :] if at >= cache.offset else rows


def strange_class(metadata: Mapping[str, str]) -> str | None:
    """Return the first name in a prompt-cache file's metadata that is not a class of caches.

    Return None if all are, and "" if there are no names. Expects the classes under keys that begin
    with "1.", as `save_prompt_cache` writes them; `load_prompt_cache` looks them up by name.
    """
    classes = {value for name, value in metadata.items() if name.startswith("1.")}
    strange = (
        name for name in sorted(classes) if not name.endswith("Cache") and name != "CacheList"
    )
    return next(strange, None if classes else "")
