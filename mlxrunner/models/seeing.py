"""Load a model that sees pictures with mlx-vlm, from the same kind of directory as any other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlxrunner.errors import ModelError, OptionError
from mlxrunner.models.catalog import remember_use
from mlxrunner.models.eyes import ARCHITECTURES, HOW, runs_only_seeing
from mlxrunner.models.facts import usable_facts
from mlxrunner.models.files import check_files, check_weights, read_config, tensor_count
from mlxrunner.models.load import (
    LoadedModel,
    LoadProgress,
    explained,
    load_model,
    read_weights,
    suggested,
    tell_nobody,
    tokenizer_in,
    tried,
)
from mlxrunner.models.resolve import HUB_ID, resolve
from mlxrunner.models.settings import check_layers
from mlxrunner.models.sharding import is_sharing
from mlxrunner.pictures.model import CrossingModel, SeeingModel
from mlxrunner.pictures.tokenizer import SeeingTokenizer
from mlxrunner.pictures.vision_encoder import VisionEncoder
from mlxrunner.system import device
from mlxrunner.system import mlx_vlm_internals as internals
from mlxrunner.system.foreign import foreign_code
from mlxrunner.system.reading import is_there, read_bytes, read_json
from mlxrunner.tokenizer import Tokenizer

SETTINGS = ("preprocessor_config.json", "processor_config.json")
"""The files that decide what the processor makes of pixels."""
MOST_SETTINGS = 2**20
"""Most bytes of such a file."""
MAY_HAVE_CODE = ("config.json", "tokenizer_config.json", *SETTINGS)
"""The files that may name Python code of the model, which mlx-vlm would run unasked."""


def why_blind(name: str) -> str | None:
    """Return why the model `name` can't be loaded with an encoder of pictures; None if it can."""
    if not internals.is_installed():
        return HOW
    try:
        folder = resolve(name)
        _check(folder, read_config(folder))
    except ModelError as error:
        return str(error)
    return None


def unread_seeing(name: str) -> LoadedModel:
    """Return `name` as `load_seeing` does, without its weights: shapes and settings are there."""
    if not internals.is_installed():
        raise OptionError(HOW)
    if is_sharing():
        raise ModelError(f"{name}: a model that sees pictures can't be shared among ranks")
    folder = resolve(name)
    config = read_config(folder)
    check_files(folder)
    _check(folder, config)
    tokenizer = tokenizer_in(folder, config, of_processor=True)
    model, seeing_tokenizer = with_eyes(folder, _unread(folder, config), tokenizer)
    facts = usable_facts(folder, model, config)
    return LoadedModel(name, folder, model, seeing_tokenizer, facts, config, suggested(folder))


def load_seeing(
    name: str, *, progress: LoadProgress, check: Callable[[LoadedModel], None]
) -> LoadedModel:
    """Load `name` (a directory or a hub id), which mlx-vlm runs, and evaluate its weights.

    `check` is called before a weight is read. Raise ModelError, which names what is missing, broken
    or not supported, and OptionError if mlx-vlm is not installed.
    """
    loaded = unread_seeing(name)
    check(loaded)
    read_weights(loaded.folder, loaded.model.inner, progress)
    if HUB_ID.fullmatch(name) and not Path(name).is_dir():
        remember_use(name)
    return replace(loaded, facts=tried(name, loaded.model, loaded.facts))


def load_either(name: str, *, trust_remote_code: bool = False) -> LoadedModel:
    """Load `name` for text, or with its encoder if mlx-lm lacks it. Raise as both do."""
    if runs_only_seeing(name):
        return load_seeing(name, progress=tell_nobody, check=lambda _: None)
    return load_model(name, trust_remote_code=trust_remote_code)


def with_eyes(
    folder: Path, model: Any, tokenizer: Tokenizer
) -> tuple[SeeingModel, SeeingTokenizer]:
    """Return `model`, which mlx-vlm loaded from `folder`, and its tokenizer, ready for pictures.

    Raise ModelError if the processor or the chat template can't be used.
    """
    model.eval()  # some encoders drop parts of a picture at random otherwise
    processor = internals.load_processor(folder)
    settings = b"\0".join(
        read_bytes(folder / name, MOST_SETTINGS) for name in SETTINGS if is_there(folder / name)
    )
    version = internals.version().encode()
    sight = VisionEncoder(
        model, processor, internals.marker_of(processor), version + b"\0" + settings
    )
    crosses = internals.crossing_layers(model)
    seeing = CrossingModel(model, sight) if crosses else SeeingModel(model, sight)
    return seeing, SeeingTokenizer(tokenizer, sight)


def _check(folder: Path, config: dict[str, Any]) -> None:
    """Raise ModelError for a model that can't be used, before mlx-vlm reads anything of it."""
    file, kind = folder / "config.json", config["model_type"]
    if kind not in ARCHITECTURES:
        raise ModelError(
            f"{file}: pictures are not supported for model_type {kind[:80]!r}, only for "
            f"{', '.join(ARCHITECTURES)}"
        )
    if not isinstance(config.get("vision_config"), dict):
        raise ModelError(f"{file}: no vision_config: this model has no encoder of pictures")
    for name in MAY_HAVE_CODE:
        found = read_json(folder / name, MOST_SETTINGS) if is_there(folder / name) else {}
        for key in ("auto_map", "model_file"):
            if isinstance(found, dict) and found.get(key):
                raise ModelError(
                    f"{folder / name}: {key} names Python code of the model, and a model that "
                    "sees pictures may have none"
                )
    check_layers(file, config, tensor_count(folder))


def _unread(folder: Path, config: dict[str, Any]) -> Any:
    """Return mlx-vlm's model in `folder`, whose weights are not read yet."""
    try:
        with foreign_code():
            model = internals.load_model(folder, check_weights(folder))
        dtype = device.preferred_dtype()
        if dtype is not None and not config.get("quantization"):
            model.set_dtype(dtype)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{folder}: {explained(error)}") from error
    return model
