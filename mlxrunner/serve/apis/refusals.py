"""The refusals that errors become: what the client is told of each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fastapi import HTTPException
from fastapi.exceptions import RequestValidationError

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
    path = [str(part) for part in first["loc"][1:] if not _is_branch(part)]
    param = ".".join(path)
    where = param or "the body"
    return RefusedError(400, f"{where}: {_lower(first['msg'])}", param=param or None)


def _is_branch(part: object) -> bool:
    """Return True if a part of a place names a type of a union, not a field."""
    return isinstance(part, str) and (part in ("str", "int", "float", "bool") or "[" in part)


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]
