"""The refusals that errors become: what the client is told of each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fastapi import HTTPException
from fastapi.exceptions import RequestValidationError

from mlxrunner.config.arguments import shown
from mlxrunner.serve.answering.refusing import refusal_of as engine_refusal
from mlxrunner.serve.events import RefusedError


def refusal_of(error: Exception) -> RefusedError:
    """Return what the client is told of an error: never more than one sentence."""
    if isinstance(error, RequestValidationError):
        return _invalid(error.errors())
    if isinstance(error, HTTPException):
        return RefusedError(error.status_code, str(error.detail))
    refused = engine_refusal(error)
    if refused.status == 400:
        refused.param = refused.param or _field(refused.message)
    return refused


def _field(message: str) -> str | None:
    """Return the field that a message names first, as in "temperature: ..." or "input 3: ..."."""
    found = re.match(r"([a-z_.]+)(?: (\d+))?(?:: | has to be | needs )", message)
    return ".".join(part for part in found.groups() if part) if found else None


def _invalid(errors: Sequence[Any]) -> RefusedError:
    """Return the refusal for the first error of a body that pydantic refused."""
    first = errors[0]
    if first["type"] == "missing" and first["loc"] == ("body",):
        return RefusedError(400, "the body is empty, it has to be a JSON object")
    if first["type"] == "model_attributes_type" and isinstance(first["input"], bytes):
        return RefusedError(400, "the body has to come with Content-Type: application/json")
    field = _path(first)
    several = [one for one in errors if _path(one)[: len(field)] == field]
    path = _path(max(several, key=_depth))
    param = ".".join(map(str, path))
    problem = _problem([one for one in several if _path(one) == path])
    return RefusedError(400, f"{param or 'the body'}: {problem}", param=param or None)


PROBLEMS = {
    "string_type": "a text",
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "literal_error": "{expected}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "too_short": "a list of at least {min_length}",
    "string_too_short": "a text of at least {min_length} character",
}
"""The values that a field may have, by the type of pydantic's error about another."""


def _path(error: Any) -> list[Any]:
    """Return the names and numbers that lead to the value that an error is about."""
    return [part for part in error["loc"][1:] if not _is_branch(part)]


def _depth(error: Any) -> tuple[list[int], int]:
    """Return how far into a value an error is: a value that may have several types has several.

    The type that was meant is the one that fits the longest part of the value.
    """
    path = _path(error)
    return [part for part in path if isinstance(part, int)], len(path)


def _problem(errors: Sequence[Any]) -> str:
    """Return what is wrong with a field, of which all errors are given."""
    first = errors[0]
    if first["type"] == "missing":
        return "it has to be given"
    if first["type"] not in PROBLEMS:
        return f"{_lower(first['msg'])}, not {shown(first['input'])}"
    known = [one for one in errors if one["type"] in PROBLEMS]
    either = [PROBLEMS[one["type"]].format(**one.get("ctx", {})) for one in known]
    return f"it has to be {' or '.join(dict.fromkeys(either))}, not {shown(first['input'])}"


_BRANCHES = ("str", "int", "float", "bool")


def _is_branch(part: object) -> bool:
    """Return True if a part of a place names a type of a union, not a field."""
    return isinstance(part, str) and (part in _BRANCHES or "[" in part)


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]
