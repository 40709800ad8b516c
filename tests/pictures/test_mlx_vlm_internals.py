"""The installed mlx-vlm is as `mlx_vlm_internals` expects it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("mlx_vlm", reason="needs the extra vision")

from support.seeing import MadeUpProcessor, block_of, built

from mlxrunner.errors import ModelError, PictureError
from mlxrunner.models.facts import VISION_ARCHITECTURES
from mlxrunner.system import mlx_vlm_internals as internals


def test_the_version_was_tried() -> None:
    """A newer one is tried before it is allowed."""
    assert internals.is_installed()
    assert internals.version() in internals.VERSIONS


@pytest.mark.parametrize("kind", VISION_ARCHITECTURES)
def test_each_part_is_where_it_is_expected(kind: str) -> None:
    """Embeddings, caches, axes, the token of a picture, and what the encoder returns."""
    model = built(kind)
    block, inputs = block_of(kind, 1)
    arrays = {name: mx.array(value) for name, value in inputs.items()}
    begin, end = internals.span(model, block)
    seen = internals.see(model, block, arrays)
    rows, crossing = internals.rows_of(model, block, arrays), internals.crossing_layers(model)
    assert seen.embeddings.shape == (rows, 32)
    assert (rows == 2 * 17) if crossing else (rows == end - begin)
    assert len(seen.deep) == (2 if kind == "qwen3_vl" else 0)
    assert seen.nbytes == (1 + len(seen.deep)) * seen.embeddings.nbytes
    assert internals.embedding(model)(mx.array([[1]])).shape == (1, 1, 32)
    assert internals.has_axes(model) == ("qwen" in kind)
    assert len(internals.new_caches(model)) + len(crossing) == len(model.language_model.layers)
    grid = internals.grid_of(model, arrays)
    assert (grid is None) != internals.has_axes(model)
    assert grid is None or int(np.prod(grid)) == end - begin


def test_layers_that_cross_are_as_expected() -> None:
    """Whoever passes the pictures' states gets what keys and values made of them give."""
    model = built("mllama")
    block, inputs = block_of("mllama", 3)
    arrays = {name: mx.array(value) for name, value in inputs.items()}
    states = internals.see(model, block, arrays).embeddings
    looks_at, tokens = internals.projected(model, states), mx.array([[*block, 1, 2, 3]])
    assert sum(one.nbytes for one in looks_at) == internals.projected_bytes(model)
    found = internals.crossed_logits_of(model, tokens, internals.new_caches(model), looks_at)
    own = model.language_model(tokens, cross_attention_states=states[None]).logits
    assert mx.allclose(found, own, atol=1e-5)
    blind = internals.crossed_logits_of(model, tokens, internals.new_caches(model), [])
    assert not mx.allclose(found, blind, atol=1e-2)
    assert internals.own_block(model, [*block, 256]) == block
    assert internals.projected_bytes(built("llava")) == 0


def test_what_is_missing_is_one_line() -> None:
    """A model, a processor or a picture that can't be used."""
    nothing: Any = SimpleNamespace(config=SimpleNamespace(model_type="x"))
    with pytest.raises(ModelError, match="x has no token for pictures"):
        internals.image_token(nothing)
    with pytest.raises(ModelError, match="names no text for pictures"):
        internals.marker_of(nothing)
    model = built("llava")
    with pytest.raises(ModelError, match="makes no token of a picture"):
        internals.span(model, [1, 2])
    model.language_model.make_cache = lambda: [object()]
    with pytest.raises(ModelError, match="object is a cache that is not supported"):
        internals.new_caches(model)
    broken = MadeUpProcessor("none")
    broken.kind = None  # type: ignore[assignment]
    with pytest.raises(PictureError, match="the model's processor refuses the picture"):
        internals.process(broken, "*", np.zeros((2, 2, 3), np.uint8))
