"""Tell Ollama's clients of models."""

from __future__ import annotations

import time
from typing import Any

from mlxrunner.serve.answering.answers import ModelCard
from mlxrunner.serve.apis.ollama.writing import stamp

FOR_EVER = 100 * 365 * 24 * 3600
"""Seconds until a model is unloaded that never is: Ollama's clients want a time."""


def listed(card: ModelCard) -> dict[str, Any]:
    """Return the entry of a model in the list of all."""
    return {
        "name": card.name,
        "model": card.name,
        "modified_at": stamp(card.modified),
        "size": card.bytes,
        "digest": card.digest,
        "details": _details(card),
    }


def running(card: ModelCard) -> dict[str, Any]:
    """Return the entry of a model in the list of those that are loaded."""
    expires = time.time() + FOR_EVER if card.expires is None else card.expires
    entry = {name: value for name, value in listed(card).items() if name != "modified_at"}
    return {
        **entry,
        "expires_at": stamp(expires),
        "size_vram": card.bytes,
        "context_length": card.context,
    }


def described(card: ModelCard) -> dict[str, Any]:
    """Return all that is known of a model."""
    has = {"completion": True, "tools": card.has_tools, "thinking": card.has_thinking}
    has["vision"] = card.sees
    family = card.architecture or "unknown"
    info: dict[str, Any] = {"general.architecture": family, "general.basename": card.name}
    if card.context:
        info[f"{family}.context_length"] = card.context
    return {
        "license": "",
        "modelfile": f"FROM {card.name}",
        "parameters": "",
        "template": card.template,
        "modified_at": stamp(card.modified),
        "details": _details(card),
        "model_info": info,
        "capabilities": [name for name, is_there in has.items() if is_there],
    }


def _details(card: ModelCard) -> dict[str, Any]:
    families = [card.architecture] if card.architecture else []
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": card.architecture,
        "families": families,
        "parameter_size": "",
        "quantization_level": "",
    }
