"""Describe models for the lists that clients ask for, without loading them."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from mlxrunner.errors import MlxrunnerError
from mlxrunner.models.eyes import has_eyes, has_only_eyes
from mlxrunner.models.facts import weight_bytes
from mlxrunner.models.files import read_config
from mlxrunner.models.resolve import folder_if_here
from mlxrunner.serve.answering.answers import ModelCard
from mlxrunner.serve.answering.loaded import Place
from mlxrunner.templates.rendering import read_json, read_template


def card_of(shown: str, name: str, place: Place | None, *, pictures: bool) -> ModelCard:
    """Return the card of the model `name`, which clients know as `shown`.

    `place` is where it is loaded, if it is. `pictures`: models that see are loaded with their
    encoders.
    """
    opened = None if place is None else place.opened
    folder = folder_if_here(name)
    found: dict[str, Any] = {}
    with suppress(OSError):
        if folder:
            found = dict(_described(folder, (folder / "config.json").stat().st_mtime))
    eyes, only_eyes = found.pop("has_eyes", False), found.pop("has_only_eyes", False)
    return ModelCard(
        shown,
        opened is not None,
        0 if opened is None else opened.room,
        digest="" if opened is None else opened.digest,
        sees=(pictures and eyes) or only_eyes if opened is None else opened.sees,
        expires=None if place is None else place.expires,
        **found,
    )


@lru_cache(maxsize=256)
def _described(folder: Path, modified: float) -> dict[str, Any]:
    """Return what the files of a model say; less if some can't be read."""
    found: dict[str, Any] = {"modified": modified}
    with suppress(MlxrunnerError, OSError, ValueError):
        config = read_config(folder)
        found["architecture"] = config["model_type"]
        found |= {"has_eyes": has_eyes(config), "has_only_eyes": has_only_eyes(config)}
        found["bytes"] = weight_bytes(folder)
        template = read_template(folder, read_json(folder / "tokenizer_config.json")) or ""
        found["template"] = template
        found |= {"has_tools": "tools" in template, "has_thinking": "think" in template}
    return found
