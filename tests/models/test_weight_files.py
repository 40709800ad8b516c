"""Weight files of a model are whole, and an index names them all."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.models import one_line, save_model, tiny_config, tiny_model, write_model

from mlxrunner import ModelError
from mlxrunner.models.files import check_weights, read_header

# Weights


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole model.safetensors."""
    folder = tmp_path_factory.mktemp("whole")
    write_model(folder, tokenizer=False)
    return (folder / "model.safetensors").read_bytes()


def test_whole_weight_files_pass_in_order(tmp_path: Path) -> None:
    """One file, or all shards."""
    write_model(tmp_path / "one", tokenizer=False)
    assert check_weights(tmp_path / "one") == [tmp_path / "one" / "model.safetensors"]
    save_model(tmp_path / "three", tiny_model(tiny_config()), tiny_config(), shards=3)
    assert [file.name for file in check_weights(tmp_path / "three")] == [
        f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)
    ]


@pytest.mark.parametrize("cut", [0, 1, 4, 7, 8, 9, 100, -1000, -1])
def test_a_truncated_file_is_named(tmp_path: Path, weights: bytes, cut: int) -> None:
    """Wherever the download broke off."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(weights[:cut])
    with pytest.raises(ModelError) as error:
        check_weights(tmp_path)
    assert f"{file}: truncated" in one_line(error)
    assert f"{len(weights[:cut])} bytes" in str(error.value)


@given(st.binary(max_size=200))
def test_garbage_is_a_model_error_or_a_header(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    """No other exception, whatever the bytes."""
    file = tmp_path_factory.getbasetemp() / "garbage.safetensors"
    file.write_bytes(content)
    with suppress(ModelError):
        assert read_header(file) == json.loads(content[8:])


def with_header(header: bytes, rest: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + rest


@pytest.mark.parametrize(
    "content",
    [
        b"not a safetensors file, but long enough for one" * 10,
        struct.pack("<Q", 2**63) + b"{}",
        with_header(b"\xff\xff"),
        with_header(b"[1]"),
        with_header(b'{"a": 1}'),
        with_header(b'{"a": {}}'),
        with_header(b'{"a": {"data_offsets": []}}'),
        with_header(b'{"a": {"data_offsets": [0, "x"]}}'),
        with_header(b'{"a": {"data_offsets": [0, null]}}'),
        with_header(b'{"a": {"data_offsets": [0, 8]}}', b"1234567"),
        with_header(b'{"a": {"data_offsets": [0, 8]}}', b"123456789"),
        with_header(b"[" * 100_000),
    ],
    ids=[
        "text",
        "huge length",
        "not UTF-8",
        "list",
        "number",
        "no offsets",
        "empty offsets",
        "text offset",
        "null offset",
        "byte missing",
        "byte too many",
        "too deep",
    ],
)
def test_a_file_that_is_not_safetensors_is_named(tmp_path: Path, content: bytes) -> None:
    """Before mlx is asked to read it."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(ModelError) as error:
        check_weights(tmp_path)
    assert one_line(error).startswith(f"{file}: ")


@pytest.mark.parametrize(
    "name", [None, "pytorch_model.bin", "consolidated.00.pth", "model.gguf", "adapter.safetensors"]
)
def test_a_directory_without_weights_says_which_are_needed(
    tmp_path: Path, name: str | None
) -> None:
    """Other formats are no help."""
    if name:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ModelError) as error:
        check_weights(tmp_path)
    assert f"{tmp_path}: no weights: no model*.safetensors" in one_line(error)


def drop_first(folder: Path) -> Path:
    file = folder / "model-00001-of-00003.safetensors"
    file.unlink()
    return file


def cut_last(folder: Path) -> Path:
    file = folder / "model-00003-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    return file


@pytest.mark.parametrize("damage", [drop_first, cut_last])
def test_a_damaged_shard_is_named(tmp_path: Path, damage: Callable[[Path], Path]) -> None:
    """The shard, not the index."""
    save_model(tmp_path, tiny_model(tiny_config()), tiny_config(), shards=3)
    file = damage(tmp_path)
    with pytest.raises(ModelError) as error:
        check_weights(tmp_path)
    assert one_line(error).startswith(f"{file}: ")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"a": 1, "b": "c"}}',
        "[" * 100_000,
    ],
    ids=["empty", "cut off", "list", "no map", "map is a list", "no such shards", "too deep"],
)
def test_a_broken_index_is_named(tmp_path: Path, weights: bytes, content: str) -> None:
    """A file that it names instead of a shard is named, too."""
    (tmp_path / "model.safetensors").write_bytes(weights)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError) as error:
        check_weights(tmp_path)
    assert one_line(error).startswith(str(tmp_path))
