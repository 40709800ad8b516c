"""A rank reads its part of each tensor, and has what it would have cut from the whole one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from mlx.utils import tree_flatten
from support.architectures import build, settings_of
from support.models import one_line, save_model, write_model
from support.sample import examples
from support.shares import sharing

from mlxrunner.errors import ModelError
from mlxrunner.models import sharding
from mlxrunner.models.files import ModelShard
from mlxrunner.models.load import unread_model
from mlxrunner.models.sharding import WeightFiles

KINDS = ["llama", "qwen2", "qwen3", "qwen3_moe", "minimax", "glm4_moe", "deepseek_v3", "mistral4"]
TYPES = [mx.float32, mx.bfloat16, mx.float16, mx.uint32, mx.uint8, mx.bool_]


def loaded(folder: Path, rank: int, ranks: int) -> dict[str, mx.array]:
    """Return the parameters of a rank."""
    with sharing(ModelShard(rank, ranks, "tensor-parallel")):
        parameters: Any = tree_flatten(unread_model(folder).parameters())
    mx.eval([array for _, array in parameters])
    return dict(parameters)


def write(folder: Path, kind: str, bits: int | None, **more: Any) -> None:
    """Write a model of `kind` in two files, quantized where `bits` says so."""
    settings = {**settings_of(kind), "num_attention_heads": 4, "num_key_value_heads": 4}
    settings |= {"vocab_size": 300, **more}
    if bits:
        settings |= {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    model = build(kind, **settings)
    if bits:
        nn.quantize(model, group_size=32, bits=bits)
        settings["quantization"] = {"group_size": 32, "bits": bits}
    save_model(folder, model, settings, shards=2)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("kind", "bits"), [(kind, None) for kind in KINDS] + [("llama", 4), ("qwen2", 8)]
)
def test_parts_are_those_of_whole_tensors(
    kind: str, bits: int | None, ranks: int, tmp_path: Path
) -> None:
    """On every rank, for rows and columns, experts and quantized weights."""
    write(tmp_path, kind, bits)
    for rank in range(ranks):
        by_parts = loaded(tmp_path, rank, ranks)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(WeightFiles, "part", lambda *_: None)
            whole = loaded(tmp_path, rank, ranks)
        assert by_parts.keys() == whole.keys()
        for name, array in whole.items():
            assert by_parts[name].dtype == array.dtype, name
            assert mx.array_equal(by_parts[name], array), name


@examples(200)
@given(some.data())
def test_any_indices_of_any_axis(data: some.DataObject) -> None:
    """They may lie in one stretch or in several, be read by themselves or in blocks of rows."""
    shape = data.draw(some.lists(some.integers(1, 5), min_size=1, max_size=4))
    axis = data.draw(some.integers(0, len(shape) - 1))
    kept = sorted(data.draw(some.sets(some.integers(0, shape[axis] - 1), min_size=1)))
    dtype = data.draw(some.sampled_from(TYPES))
    array = (mx.arange(int(np.prod(shape))) * 7 % 251).reshape(shape).astype(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "DIRECT", data.draw(some.sampled_from([1, 8, 2**16])))
        patch.setattr(sharding, "BLOCK", data.draw(some.sampled_from([1, 24, 2**24])))
        folder = _folder({"before": mx.zeros(3), "it": array, "behind": mx.ones(2)})
        files = WeightFiles(folder)
        tensors: Any = mx.load(str(folder / "model.safetensors"))
        files.take(tensors)
        found = files.part(tensors["it"], axis, kept)
    assert found is not None
    assert found.dtype == dtype
    assert files.nbytes == found.nbytes
    assert mx.array_equal(found, mx.take(array, mx.array(kept), axis=axis))


_folders: list[Path] = []


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    """Give `_folder` a place."""
    _folders.append(tmp_path)
    yield tmp_path
    _folders.clear()


def _folder(tensors: dict[str, mx.array]) -> Path:
    mx.save_safetensors(str(_folders[0] / "model.safetensors"), tensors)
    return _folders[0]


def test_an_array_that_is_no_tensor_of_a_file_is_not_read(folder: Path) -> None:
    """One that mlx-lm has made of a tensor is cut by MLX."""
    files = WeightFiles(_folder({"it": mx.ones((4, 4))}))
    tensors: Any = mx.load(str(folder / "model.safetensors"))
    files.take(tensors)
    assert files.part(tensors["it"] + 1, 0, [0]) is None
    assert files.part(tensors["it"], 0, []) is None


def test_a_file_that_becomes_shorter_is_named(folder: Path) -> None:
    """Between the check of its header and the reading of a part."""
    files = WeightFiles(_folder({"it": mx.ones((400, 400))}))
    tensors: Any = mx.load(str(folder / "model.safetensors"))
    files.take(tensors)
    os.truncate(folder / "model.safetensors", 1000)
    with pytest.raises(ModelError, match="can't be read: it has become shorter") as error:
        files.part(tensors["it"], 0, [0, 1, 2])
    assert "model.safetensors" in one_line(error)


def test_sides_that_ranks_cannot_share_are_one_line(tmp_path: Path) -> None:
    """A quantized tensor may have too few groups for all ranks, whatever the heads say."""
    write(tmp_path, "qwen3_moe", 4, moe_intermediate_size=32)
    with pytest.raises(ModelError, match="2 ranks can't share it equally: ") as error:
        loaded(tmp_path, 0, 2)
    one_line(error)


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="only Linux counts what is read")
def test_less_is_read(tmp_path: Path) -> None:
    """Each of two ranks reads half of the rows of a tensor, but all columns of another one."""
    write_model(
        tmp_path,
        hidden_size=512,
        intermediate_size=2048,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        num_hidden_layers=2,
    )
    whole = (tmp_path / "model.safetensors").stat().st_size
    before = _bytes_read()
    loaded(tmp_path, 0, 2)
    assert 0.5 * whole < _bytes_read() - before < 0.75 * whole


def _bytes_read() -> int:
    """Return the bytes that this process has asked the system for."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])
