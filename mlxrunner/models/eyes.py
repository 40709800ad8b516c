"""Say which models have eyes: an encoder of pictures that mlx-vlm runs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from mlxrunner.errors import ModelError
from mlxrunner.models.files import read_config
from mlxrunner.models.resolve import resolve
from mlxrunner.system import mlx_vlm_internals as internals
from mlxrunner.system.mlx_lm_internals import has_architecture

ARCHITECTURES = (
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
HOW = "pictures need mlx-vlm: pip install 'mlxrunner[vision]'"


def has_eyes(config: Mapping[str, Any]) -> bool:
    """Return True if a model with this configuration has an encoder that can be used."""
    return config["model_type"] in ARCHITECTURES and isinstance(config.get("vision_config"), dict)


def runs_only_seeing(name: str) -> bool:
    """Return True if `name` can be run with its encoder of pictures alone.

    mlx-lm runs the text's half of other models, and lacks that of some.
    """
    with suppress(ModelError):  # loading it explains better what is wrong with it
        return has_only_eyes(read_config(resolve(name)))
    return False


def has_only_eyes(config: Mapping[str, Any]) -> bool:
    """Return True if mlx-lm lacks a model with this configuration, and mlx-vlm runs it here."""
    is_lacking = not has_architecture(config["model_type"])
    return internals.is_installed() and has_eyes(config) and is_lacking
