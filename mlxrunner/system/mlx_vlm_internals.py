"""All code that relies on mlx-vlm: its modules, their names, and what its models return.

The docstring of each function names its expectations. tests/pictures/test_mlx_vlm_internals.py
checks them against the installed mlx-vlm, whose version has to be one of VERSIONS.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlxrunner.errors import ModelError, PictureError, reason
from mlxrunner.system.foreign import foreign_code
from mlxrunner.system.mlx_lm_internals import with_globals
from mlxrunner.system.reading import untagged

VERSIONS = ("0.7.10",)
"""Tested versions of mlx-vlm; pyproject.toml allows 0.7.10 up to 0.8."""


def is_installed() -> bool:
    """Return True if mlx-vlm can be imported."""
    return importlib.util.find_spec("mlx_vlm") is not None


def version() -> str:
    """Return the version of the installed mlx-vlm."""
    return importlib.metadata.version("mlx-vlm")


def load_model(folder: Path, weight_files: Sequence[Path]) -> Any:
    """Return the model in `folder` with the weights of `weight_files`, which are not read yet.

    Expects that `utils.load_model` reads config.json by `load_config(folder)`, each file of weights
    that it finds by `_load_safetensors(path)`, and puts the tensors together.
    """
    from mlx_vlm import utils

    left = list(map(str, weight_files))

    def all_at_once(path: str) -> dict[str, mx.array]:
        tensors = dict[str, mx.array]()
        while left:
            tensors |= utils._load_safetensors(left.pop())
        return tensors

    def settings(path: Path, **given: Any) -> dict[str, Any]:
        config: dict[str, Any] = untagged(utils.load_config(path, **given))
        return config

    names = {"_load_safetensors": all_at_once, "load_config": settings}
    with _silence():
        return with_globals(utils.load_model, **names)(folder, lazy=True)


@contextmanager
def _silence() -> Iterator[None]:
    """Let transformers say nothing about settings that mlx-vlm chose for it."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def load_processor(folder: Path) -> Any:
    """Return the processor in `folder`. Expects `utils.load_processor`.

    Raise ModelError if there is none that can be used.
    """
    from mlx_vlm.utils import load_processor

    try:
        with _silence(), foreign_code():
            return load_processor(folder, add_detokenizer=False, trust_remote_code=False)
    except Exception as error:
        raise ModelError(
            f"{folder}: no processor of pictures could be loaded: {reason(error)}"
        ) from error


@dataclass(frozen=True)
class ProcessorOutput:
    """The picture as a model sees it, for each of its positions."""

    embeddings: mx.array
    """The rows in place of embeddings of the vocabulary, `[n, hidden]`."""
    deep: tuple[mx.array, ...] = ()
    """The rows that the first layers add, `[n, hidden]` each (Qwen3-VL's DeepStack)."""

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (self.embeddings, *self.deep))


def embedding(model: Any) -> Callable[[mx.array], mx.array]:
    """Return the function from token ids to embeddings.

    Expects `embed_tokens` in `model.language_model` or in its `model`.
    """
    language = model.language_model
    embed: Callable[[mx.array], mx.array] = getattr(language, "model", language).embed_tokens
    return embed


def has_axes(model: Any) -> bool:
    """Return True if positions have three axes.

    Expects `get_rope_index` in the language models that have them, and only there.
    """
    return hasattr(model.language_model, "get_rope_index")


def image_token(model: Any) -> int:
    """Return the id that stands for each position of a picture.

    Expects `image_token_id` or `image_token_index` in the model's configuration.
    """
    config = model.config
    for name in ("image_token_id", "image_token_index"):
        if (found := getattr(config, name, None)) is not None:
            return int(found)
    raise ModelError(f"mlx-vlm's {config.model_type} has no token for pictures")


def new_caches(model: Any) -> list[Any]:
    """Return caches of mlx-lm like those that mlx-vlm would make, but none for crossing layers.

    Expects `KVCache` and `RotatingKVCache` with `max_size` and `keep` in `mlx_vlm.models.cache`.
    Raise ModelError for a cache of another class.
    """
    from mlx_lm.models.cache import KVCache, RotatingKVCache
    from mlx_vlm.models import cache as theirs

    language = model.language_model
    if not hasattr(language, "make_cache"):
        return [KVCache() for _ in range(len(language.layers) - len(crossing_layers(model)))]
    caches = list[Any]()
    for one in language.make_cache():
        if type(one) is theirs.KVCache:
            caches.append(KVCache())
        elif type(one) is theirs.RotatingKVCache:
            caches.append(RotatingKVCache(one.max_size, one.keep))
        else:
            raise ModelError(f"mlx-vlm's {type(one).__name__} is a cache that is not supported")
    return caches


def span(model: Any, block: list[int]) -> tuple[int, int]:
    """Return where a picture begins and ends among the tokens that the processor makes of it.

    Tokens between its rows are part of it. Raise ModelError if it has no position.
    """
    token = image_token(model)
    if token not in block:
        raise ModelError("mlx-vlm's processor makes no token of a picture")
    return block.index(token), len(block) - block[::-1].index(token)


def own_block(model: Any, block: list[int]) -> list[int]:
    """Return the tokens of a picture without those that begin a text.

    Expects a processor that puts those after it only where layers cross to pictures.
    """
    begin, end = span(model, block)
    return block[begin:end] if crossing_layers(model) else block


def rows_of(model: Any, block: list[int], inputs: Mapping[str, mx.array]) -> int:
    """Return how many rows the model will have of a picture.

    Expects `aspect_ratio_mask`, which says what tiles are not empty, if layers cross to pictures.
    """
    if not crossing_layers(model):
        begin, end = span(model, block)
        return end - begin
    tiles: Any = inputs["aspect_ratio_mask"].sum().item()
    return int(tiles) * _patches(model)


def process(
    processor: Any, marker: str, pixels: NDArray[np.uint8]
) -> tuple[list[int], dict[str, mx.array]]:
    """Return the tokens that the processor makes of one picture, and the encoder's inputs.

    Expects a call with `text`, `images` and `add_special_tokens`, and `input_ids` and
    `attention_mask` in its result. Raise PictureError if the processor refuses the picture.
    """
    from PIL import Image

    picture = Image.fromarray(pixels)
    try:
        found = dict(processor(text=[marker], images=[picture], add_special_tokens=False))
    except Exception as error:
        raise PictureError(
            f"the model's processor refuses the picture: {reason(error, 200)}"
        ) from error
    block = np.array(found.pop("input_ids"))[0].tolist()
    found.pop("attention_mask", None)
    inputs = {name: mx.array(value) for name, value in found.items()}
    mx.eval(list(inputs.values()))  # another thread may use them
    return block, inputs


def marker_of(processor: Any) -> str:
    """Return the text in which a processor puts a picture.

    Expects `boi_token` (Gemma 3) or `image_token`.
    """
    found = getattr(processor, "boi_token", None) or getattr(processor, "image_token", None)
    if not isinstance(found, str):
        raise ModelError(f"mlx-vlm's {type(processor).__name__} names no text for pictures")
    return found


def text_of(processor: Any, block: list[int]) -> str:
    """Return the text that is tokenized to `block`. Expects `tokenizer.decode`."""
    return str(processor.tokenizer.decode(block, skip_special_tokens=False))


def grid_of(model: Any, inputs: Mapping[str, mx.array]) -> tuple[int, int, int] | None:
    """Return frames, rows and columns of a picture's positions if those have three axes.

    Expects `image_grid_thw` in patches and `spatial_merge_size` in the vision configuration.
    """
    if not has_axes(model):
        return None
    grid: Any = inputs["image_grid_thw"][0].tolist()
    frames, rows, columns = grid
    merged = model.config.vision_config.spatial_merge_size
    return frames, rows // merged, columns // merged


def see(model: Any, block: list[int], inputs: Mapping[str, mx.array]) -> ProcessorOutput:
    """Return what the model sees of one picture, from the first of its positions to the last.

    `block`: the tokens that the processor makes of it.

    `inputs`: what the processor returns beside them. Expects `get_input_embeddings`, whose result
    has `inputs_embeds [1, n, hidden]` and may have `deepstack_visual_embeds`, or has
    `cross_attention_states [1, n, hidden]`, tile by tile with the empty ones last.
    """
    if crossing_layers(model):
        given = {name: value for name, value in inputs.items() if name != "cross_attention_mask"}
        states = model.get_input_embeddings(mx.array([block]), **given).cross_attention_states
        seen = ProcessorOutput(states[0, : rows_of(model, block, inputs)])
        mx.eval(seen.embeddings)
        return seen
    begin, end = span(model, block)
    found = model.get_input_embeddings(
        mx.array([block]), mask=mx.ones((1, len(block)), mx.int32), **inputs
    )
    deep = tuple(found.deepstack_visual_embeds or ())
    seen = ProcessorOutput(found.inputs_embeds[0, begin:end], deep)
    mx.eval(seen.embeddings, *deep)
    return seen


def logits_of(
    model: Any,
    tokens: mx.array,
    embeddings: mx.array,
    cache: Any,
    positions: mx.array | None = None,
    is_picture: mx.array | None = None,
    deep: tuple[mx.array, ...] = (),
) -> mx.array:
    """Return the logits `[1, n, vocab]` of `tokens [1, n]` whose `embeddings` are given.

    `positions`: `[3, 1, n]`, for models whose positions have three axes. `is_picture [1, n]` says
    to which tokens the first layers add `deep`. Expects those names as arguments of
    `language_model`, and `logits` in its result.
    """
    given: dict[str, Any] = {}
    if positions is not None:
        given = {"position_ids": positions, "rope_deltas": mx.array([[0]])}
    if deep:
        given |= {"visual_pos_masks": is_picture, "deepstack_visual_embeds": list(deep)}
    found = model.language_model(tokens, inputs_embeds=embeddings, cache=cache, **given)
    logits: mx.array = found.logits
    return logits


def crossing_layers(model: Any) -> tuple[int, ...]:
    """Return the layers that look at pictures beside the tokens; () if pictures are among them.

    Expects `cross_attention_layers` in the configuration of the text's half of such models.
    """
    text = getattr(model.config, "text_config", None)
    return tuple(getattr(text, "cross_attention_layers", ()))


def _patches(model: Any) -> int:
    """Return the rows of a tile. Expects `image_size`, `patch_size`, and one row for the whole."""
    eyes = model.config.vision_config
    return int((eyes.image_size // eyes.patch_size) ** 2) + 1


def projected_bytes(model: Any) -> int:
    """Return the most bytes of keys and values of one picture in all crossing layers."""
    if not (layers := crossing_layers(model)):
        return 0
    text, tiles = model.config.text_config, model.config.vision_config.max_num_tiles
    width = text.num_key_value_heads * (text.hidden_size // text.num_attention_heads)
    row = 2 * width * embedding(model)(mx.array([0])).dtype.size
    return int(len(layers) * tiles * _patches(model) * row)


@dataclass(frozen=True)
class Projected:
    """The keys and values `[1, heads, n, size]` of pictures, in the form of a layer's cache."""

    keys: mx.array
    values: mx.array

    @property
    def offset(self) -> int:
        return self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def fetch(self) -> tuple[mx.array, mx.array]:
        return self.keys, self.values


def projected(model: Any, states: mx.array) -> list[Projected]:
    """Return what each crossing layer looks at, for the `states [n, hidden]` of pictures.

    Expects `cross_attn` in those layers, with `k_proj`, `v_proj` and `k_norm`.
    """
    found = list[Projected]()
    for index in crossing_layers(model):
        attention = model.language_model.model.layers[index].cross_attn
        keys, values = (
            project(states).reshape(1, len(states), attention.num_key_value_heads, -1)
            for project in (attention.k_proj, attention.v_proj)
        )
        keys, values = attention.k_norm(keys.swapaxes(1, 2)), values.swapaxes(1, 2)
        found.append(Projected(mx.contiguous(keys), mx.contiguous(values)))
    mx.eval([array for one in found for array in one.fetch()])
    return found


def crossed_logits_of(
    model: Any, tokens: mx.array, cache: list[Any], looks_at: list[Projected]
) -> mx.array:
    """Return the logits `[1, n, vocab]` of `tokens [1, n]`, which all look at the same pictures.

    `cache`: one for each layer that does not cross. `looks_at`: one for each layer that does; []
    if there is no picture, and these layers do nothing. Expects layers that take `cache`, `mask`
    and `cross_attention_states`, and take keys and values from a cache that can `fetch`.
    """
    from mlx_vlm.models.base import create_attention_mask

    text, crossing = model.language_model.model, crossing_layers(model)
    hidden = text.embed_tokens(tokens)
    mask, own, pictures = create_attention_mask(hidden, cache), iter(cache), iter(looks_at)
    for index, layer in enumerate(text.layers):
        if index not in crossing:
            hidden = layer(hidden, mask=mask, cache=next(own))
        elif looks_at:
            hidden = layer(hidden, cross_attention_states=None, cache=next(pictures))
    logits: mx.array = model.language_model.lm_head(text.norm(hidden))
    return logits
