"""Load a model that sees with mlx-vlm, from a folder on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlxrunner.errors import OptionError
from mlxrunner.pictures.model import SeeingModel
from mlxrunner.pictures.sight import Sight
from mlxrunner.pictures.tokenizer import SeeingTokenizer
from mlxrunner.system import mlx_vlm_internals as internals
from mlxrunner.system.reading import is_there, read_bytes
from mlxrunner.tokenizer.base import Tokenizer

SETTINGS = ("preprocessor_config.json", "processor_config.json")
"""The files that decide what the processor makes of pixels."""
MOST_SETTINGS = 2**20
"""Most bytes of such a file."""


def check_installed() -> None:
    """Raise OptionError if mlx-vlm is not installed."""
    if not internals.is_installed():
        raise OptionError("pictures need mlx-vlm: pip install 'mlxrunner[vision]'")


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
    sight = Sight(model, processor, internals.marker_of(processor), version + b"\0" + settings)
    return SeeingModel(model, sight), SeeingTokenizer(tokenizer, sight)
