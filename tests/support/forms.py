"""Forms of answers, and models of random weights that are asked for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx
from support.models import tiny_config, tiny_model

from mlxrunner import Runner
from mlxrunner.models.facts import facts_of
from mlxrunner.results import Chunk
from mlxrunner.testing import VOCAB, ByteTokenizer
from mlxrunner.tokenizer.base import Vocabulary

NAME = {"type": "string", "maxLength": 6}
WHOLE = {"type": "integer"}


def closed(required: Sequence[str], **properties: Any) -> dict[str, Any]:
    """Return the schema of an object that has no other properties."""
    found = {"type": "object", "properties": properties, "required": [*required]}
    return found | {"additionalProperties": False}


def array(least: int, most: int, items: Any) -> dict[str, Any]:
    return {"type": "array", "minItems": least, "maxItems": most, "items": items}


POINT = {"type": "array", "prefixItems": [{"enum": [0, 1]}, NAME], "items": False, "minItems": 2}
TREE = closed(["of"], of={"anyOf": [{"const": 0}, {"$ref": "#/$defs/tree"}]})
ENDS = {key: {"$ref": "#/$defs/point"} for key in ("from", "to")}
SCHEMAS: dict[str, dict[str, Any]] = {
    "object": closed(
        ["name", "age"],
        name=NAME,
        age=WHOLE | {"minimum": 0, "maximum": 150},
        **{"is": {"type": "boolean"}},
    ),
    "nested arrays": array(2, 3, array(1, 2, WHOLE | {"minimum": -99, "maximum": 99})),
    "enum": {"enum": ["red", "green", 7, None, True, ["a", {"b": 1.5}], "größer"]},
    "const": {"const": {"a": [1, '日本 " \\ \n 😀']}},
    "number": {"type": "number", "minimum": 0.5, "exclusiveMaximum": 2, "multipleOf": 0.25},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}(x|yy)$"},
    "length": {"type": "string", "minLength": 3, "maxLength": 5},
    "format": {"type": "string", "format": "date"},
    "anyOf": {"anyOf": [{"type": "boolean"}, {"type": "null"}, array(2, 2, NAME)]},
    "allOf": {
        "allOf": [
            {"type": "object", "properties": {"a": NAME}, "required": ["a"]},
            {"properties": {"b": {"enum": [1, 2]}}, "required": ["b"]},
        ],
        "properties": {"a": True, "b": True},
        "additionalProperties": False,
    },
    "$ref": {"$defs": {"point": POINT}} | closed([*ENDS], **ENDS),
    "recursive": {"$defs": {"tree": TREE}, "$ref": "#/$defs/tree"},
    "additional properties": closed(["a"], a={"const": 1}) | {"additionalProperties": {"const": 2}},
    "anything": {},
}


def build(
    architecture: str = "llama", tokenizer: ByteTokenizer | None = None, **options: Any
) -> Runner:
    """Random weights, which never write JSON by themselves."""
    config = tiny_config(architecture, max_position_embeddings=4096, vocab_size=VOCAB)
    model = tiny_model(config)
    return Runner(model, tokenizer or ByteTokenizer(), facts_of(model, config), **options)


def ask(runner: Runner, prompt: Any = (1, 2, 3), **options: Any) -> list[Chunk]:
    return list(runner.generate(list(prompt), **options))


def text(chunks: Sequence[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def tokens(chunks: Sequence[Chunk]) -> list[int]:
    return [chunk.token for chunk in chunks if chunk.token is not None]


def boost(token: int) -> Any:
    """A logits processor that makes `token` the most likely one wherever it is possible at all."""
    return lambda history, logits: logits + 1000.0 * (mx.arange(logits.shape[-1]) == token)


class FewLetters(ByteTokenizer):
    """It has no token for most letters."""

    letters = b'{}[]": ,abcd'

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary([bytes([byte]) if byte in self.letters else None for byte in range(256)])
