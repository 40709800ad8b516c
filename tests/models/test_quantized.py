"""Quantized directories, as mlx-community publishes them, run like the model in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from support.models import save_model, tiny_config, tiny_model, write_tokenizer

from mlxrunner import ModelError, Runner
from mlxrunner.models.facts import weight_bytes
from mlxrunner.models.load import load_model

PROMPT = np.random.default_rng(3).integers(0, 256, 24).tolist()


def write_quantized(
    folder: Path,
    *,
    bits: int = 4,
    group_size: int = 32,
    shards: int = 1,
    predicate: Any = None,
    **config: Any,
) -> Any:
    """Write a quantized tiny model with its tokenizer; returns the one that stayed in memory."""
    settings = tiny_config(**config)
    model = tiny_model(settings)
    nn.quantize(model, group_size=group_size, bits=bits, class_predicate=predicate)
    # mlx-lm's converter writes both names.
    names = ("quantization", "quantization_config")
    settings |= {name: {"group_size": group_size, "bits": bits} for name in names}
    save_model(folder, model, settings, shards)
    write_tokenizer(folder)
    return model


def greedy(model: Any, tokens: list[int], count: int) -> list[int]:
    """`count` tokens, everything computed again for each."""
    sequence = list(tokens)
    for _ in range(count):
        sequence.append(int(np.array(model(mx.array([sequence]))[0, -1]).argmax()))
    return sequence[len(tokens) :]


def not_the_head(path: str, module: nn.Module) -> bool:
    return hasattr(module, "to_quantized") and path != "lm_head"


CASES: dict[str, dict[str, Any]] = {
    "4 bits in groups of 32": {},
    "4 bits in groups of 64": {"group_size": 64},
    "8 bits": {"bits": 8},
    "two shards": {"shards": 2},
    "three shards of groups of 64": {"shards": 3, "group_size": 64},
    "tied embeddings": {"tie_word_embeddings": True},
    "mistral": {"model_type": "mistral"},
    "a head that is not quantized": {"predicate": not_the_head},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_quantized_directory_generates_what_the_model_in_memory_does(
    tmp_path: Path, case: dict[str, Any]
) -> None:
    """The same weights, bit for bit, and the same greedy answer from the cache."""
    model = write_quantized(tmp_path, **case)
    runner = Runner.load(str(tmp_path), prefill_step=7)
    expected, loaded = (dict(tree_flatten(one.parameters())) for one in (model, runner.model))
    assert expected.keys() == loaded.keys()
    for name, array in expected.items():
        assert loaded[name].dtype == array.dtype, name
        assert mx.array_equal(loaded[name], array), name
    answer = [chunk.token for chunk in runner.generate(PROMPT, max_tokens=12, stop_tokens=[])]
    assert answer == greedy(model, PROMPT, 12)


def test_the_weights_stay_quantized_in_memory(tmp_path: Path) -> None:
    """They take as many bytes as in the file, and none is unpacked."""
    write_quantized(tmp_path, shards=2)
    parameters = dict(tree_flatten(load_model(str(tmp_path)).model.parameters()))
    assert parameters["model.layers.0.mlp.up_proj.weight"].dtype == mx.uint32
    assert sum(array.nbytes for array in parameters.values()) == weight_bytes(tmp_path)


def test_weights_that_are_not_as_quantized_as_the_configuration_says_are_refused(
    tmp_path: Path,
) -> None:
    """8-bit weights under a 4-bit configuration per layer have other shapes."""
    model = write_quantized(tmp_path, bits=8)
    wrong = {"group_size": 32, "bits": 4}
    quantization = wrong | {"lm_head": wrong}
    save_model(tmp_path, model, tiny_config() | {"quantization": quantization})
    with pytest.raises(ModelError, match=r"lm_head"):
        load_model(str(tmp_path))
