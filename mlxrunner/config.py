"""The options of one request, checked when they are made. Knows nothing about models or tokens' meaning."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

from mlxrunner.errors import OptionError

MAX_LOGPROBS = 100
OVERFLOW = ("stop", "shift", "error")
MAX_SCHEMA = 2**17
"""Characters of a JSON schema: what takes longer to compile than anybody would wait is refused."""


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """How to continue a prompt. `max_tokens=None`: until the model stops or the context is full; `temperature=0` (or next to it): greedy.

    `overflow`: what happens when the context is full: the answer ends ("stop"), the oldest tokens after the first `keep` make room
    ("shift"), or ContextFullError ("error"). `schema`: the text of a JSON schema, of which the answer is an instance; `choices`: it is
    one of these texts (at most one of the two). Such an answer ends where its form is complete: `stop`, which would cut it
    elsewhere, has no effect on it, and stop tokens can only come there.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] | None = None
    logprobs: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    penalty_context: int = 20
    overflow: str = "stop"
    keep: int | None = None
    schema: str | None = None
    choices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in _WHOLE:
            _check_whole(name, getattr(self, name))
        _check("max_tokens", self.max_tokens, low=1)
        _check("temperature", self.temperature, low=0, high=100)
        _check("top_k", self.top_k, low=0, high=2**31 - 1)
        _check("top_p", self.top_p, low=0, high=1)
        _check("min_p", self.min_p, low=0, high=1)
        _check("seed", self.seed, low=0, high=2**64 - 1)
        _check("logprobs", self.logprobs, low=0, high=MAX_LOGPROBS)
        _check("repetition_penalty", self.repetition_penalty, low=0.01, high=100)
        _check("presence_penalty", self.presence_penalty, low=-100, high=100)
        _check("frequency_penalty", self.frequency_penalty, low=-100, high=100)
        _check("penalty_context", self.penalty_context, low=1, high=2**31 - 1)
        _check("keep", self.keep, low=0)
        if self.overflow not in OVERFLOW:
            raise OptionError(
                f"overflow: {self.overflow!r} is not known, it has to be one of {', '.join(OVERFLOW)}"
            )
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise OptionError("stop: each stop string has to be a text of at least one character")
        for token in self.stop_tokens or ():
            _check_whole("stop_tokens", token)
        _check_form(self.schema, self.choices)

    @property
    def has_form(self) -> bool:
        """Whether the answer is held to a schema or to choices."""
        return self.schema is not None or bool(self.choices)

    def ends(self, default: frozenset[int]) -> frozenset[int]:
        """The tokens that end the answer; `default`: the tokenizer's."""
        return default if self.stop_tokens is None else frozenset(self.stop_tokens)

    def stops(self, default: Sequence[str]) -> tuple[str, ...]:
        """The texts before which the answer ends; `default`: the chat template's."""
        return () if self.has_form else (*self.stop, *default)

    @classmethod
    def of(cls, **options: Any) -> GenerateOptions:
        """From loosely typed options: `stop` and `choices` as a string or a list, `schema` also as a dictionary; None: not given.

        An unknown name is an error that lists the known ones.
        """
        known = {field.name for field in fields(cls)}
        unknown = sorted(options.keys() - known)
        if unknown:
            raise OptionError(
                f"unknown option {unknown[0]!r}: known are {', '.join(sorted(known))}"
            )
        stop_tokens: Sequence[int] | None = options.pop("stop_tokens", None)
        return cls(
            stop=_texts("stop", options.pop("stop", None)),
            stop_tokens=None if stop_tokens is None else _tuple("stop_tokens", stop_tokens),
            schema=_json_text(options.pop("schema", None)),
            choices=_choices(options.pop("choices", None)),
            **options,
        )


_WHOLE = ("max_tokens", "top_k", "seed", "logprobs", "penalty_context", "keep")


def _texts(name: str, given: Any) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else _tuple(name, () if given is None else given)


def _choices(given: Any) -> tuple[str, ...]:
    choices = _texts("choices", given)
    if given is not None and not choices:
        raise OptionError(
            "choices: the list is empty, it has to have at least one text (leave the option out for a free answer)"
        )
    return choices


def _json_text(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    try:
        return json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(f"schema: it can't be written as JSON: {error}") from error


def _check_form(schema: str | None, choices: tuple[str, ...]) -> None:
    for text in choices:
        if not isinstance(text, str) or not text:
            raise OptionError("choices: each one has to be a text of at least one character")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise OptionError(f"choices: {text!r} is not valid Unicode") from error
    if schema is None:
        return
    if choices:
        raise OptionError("schema, choices: an answer has one form, use one of them")
    if not isinstance(schema, str):
        raise OptionError(
            f"schema: it has to be the text of a JSON object or a dictionary, not {type(schema).__name__}"
        )
    if len(schema) > MAX_SCHEMA:
        raise OptionError(
            f"schema: {len(schema)} characters are too many, it may have at most {MAX_SCHEMA}"
        )
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"schema: not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise OptionError(
            f'schema: it has to be a JSON object, such as {{"type": "object"}}, not {schema.strip()[:40]}'
        )


def _tuple(name: str, values: Any) -> tuple[Any, ...]:
    try:
        return tuple(values)
    except TypeError as error:
        raise OptionError(f"{name}: {values!r} is not a list") from error


def _check_whole(name: str, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, Integral)):
        raise OptionError(f"{name}: {value!r} is not a whole number")


def _check(name: str, value: float | None, *, low: float, high: float | None = None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, Real):
        raise OptionError(f"{name}: {value!r} is not a number")
    if not value >= low or (high is not None and not value <= high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise OptionError(f"{name}: {value} is out of range, it has to be {bounds}")
