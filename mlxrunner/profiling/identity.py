"""What a runner is, for those who compare events: a fingerprint, its layers, what encloses thinking."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxrunner.cache.factory import run_lazily
from mlxrunner.cache.layer import LayerCache
from mlxrunner.models.facts import ModelFacts
from mlxrunner.tokenizer import Tokenizer
from mlxrunner.tokenizer.thinking import THINKING

SAMPLE = 16
"""So many weights go into a fingerprint, with as many values of each."""


def fingerprint(model: Any, facts: ModelFacts, settings: Mapping[str, Any]) -> str:
    """16 hexadecimal digits: equal for equal weights (a sample of them), shapes and settings, whatever the model is called."""
    parameters: Any = (
        sorted(tree_flatten(model.parameters())) if hasattr(model, "parameters") else []
    )
    shapes = [[name, list(array.shape), str(array.dtype)] for name, array in parameters]
    digest = hashlib.blake2b(digest_size=8)
    digest.update(
        json.dumps(
            [facts.architecture, facts.layers, facts.vocab, dict(settings), shapes], sort_keys=True
        ).encode()
    )
    for _, array in parameters[:: max(1, len(parameters) // SAMPLE)]:
        digest.update(json.dumps(array.reshape(-1)[:SAMPLE].astype(mx.float32).tolist()).encode())
    return digest.hexdigest()


def describe_layers(model: Any, caches: Sequence[LayerCache]) -> list[dict[str, Any]]:
    """The `layers` of a token log's process line, from the shapes of an unevaluated token; `caches`: empty ones, to be thrown away."""
    run_lazily(model, caches, 1)
    lines = [_layer(cache) for cache in caches]
    return [
        line | {"count": lines.count(line)}
        for index, line in enumerate(lines)
        if lines.index(line) == index
    ]


def thinking_marks(tokenizer: Tokenizer) -> list[dict[str, list[int]]]:
    """What encloses a thinking block, in tokens: of the known pairs, those whose marks are tokens of this model."""
    pairs = [(tokenizer.encode_more(begin), tokenizer.encode_more(end)) for begin, end in THINKING]
    return [
        {"begin": begin, "end": end} for begin, end in pairs if len(begin) <= 3 and len(end) == 1
    ]


def _layer(cache: LayerCache) -> dict[str, Any]:
    layouts, parts = cache.layouts(), getattr(cache, "parts", [])
    inner = getattr(cache, "inner", None)
    return {
        "kind": cache.kind,
        "needs_checkpoints": cache.needs_checkpoints,
        "row_bytes": sum(layout.row_bytes for layout in layouts),
        "checkpoint_rows": max((layout.checkpoint_rows for layout in layouts), default=0),
        "checkpoint_fixed": sum(layout.checkpoint_fixed for layout in layouts),
        "window": getattr(cache, "window", getattr(inner, "chunk_size", None)),
        "slack": getattr(cache, "slack", None),
        "room": getattr(cache, "room", None),
        "parts": [_layer(part) for part in parts],
    }
