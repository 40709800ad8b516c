"""Weight files of a model are whole, and an index names them all."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from support.models import error_line, save_model, tiny_config, tiny_model, write_model
from support.sample import examples

from mlxrunner import ModelError
from mlxrunner.models.facts import weight_bytes
from mlxrunner.models.files import check_weights, read_header
from mlxrunner.models.fingerprint import by_files, fingerprint
from mlxrunner.models.load import unread_model

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
    shards = [tmp_path / "three" / f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert check_weights(tmp_path / "three") == shards


@pytest.mark.parametrize("cut", [0, 1, 4, 7, 8, 9, 100, -1000, -1])
def test_a_truncated_file_is_named(tmp_path: Path, weights: bytes, cut: int) -> None:
    """Wherever the download broke off."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(weights[:cut])
    said = error_line(ModelError, check_weights, tmp_path)
    assert f"{file}: truncated" in said
    assert f"{len(weights[:cut])} bytes" in said


@given(st.binary(max_size=200))
def test_garbage_is_a_model_error_or_a_header(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    """No other exception, whatever the bytes."""
    file = tmp_path_factory.getbasetemp() / "garbage.safetensors"
    file.write_bytes(content)
    with suppress(ModelError):
        assert read_header(file).entries == json.loads(content[8:])


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
    ids=(
        "text, huge length, not UTF-8, list, number, no offsets, empty offsets, text offset, "
        "null offset, byte missing, byte too many, too deep"
    ).split(", "),
)
def test_a_file_that_is_not_safetensors_is_named(tmp_path: Path, content: bytes) -> None:
    """Before mlx is asked to read it."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    assert error_line(ModelError, check_weights, tmp_path).startswith(f"{file}: ")


@pytest.mark.parametrize(
    "name", [None, "pytorch_model.bin", "consolidated.00.pth", "model.gguf", "adapter.safetensors"]
)
def test_a_directory_without_weights_says_which_are_needed(
    tmp_path: Path, name: str | None
) -> None:
    """Other formats are no help."""
    if name:
        (tmp_path / name).write_bytes(b"x")
    said = error_line(ModelError, check_weights, tmp_path)
    assert f"{tmp_path}: no weights: no model*.safetensors" in said


@pytest.mark.parametrize(("number", "kept"), [(1, None), (3, -5)], ids=["missing", "cut off"])
def test_a_damaged_shard_is_named(tmp_path: Path, number: int, kept: int | None) -> None:
    """The shard, not the index."""
    save_model(tmp_path, tiny_model(tiny_config()), tiny_config(), shards=3)
    file = tmp_path / f"model-0000{number}-of-00003.safetensors"
    content = file.read_bytes()
    file.unlink()
    if kept is not None:
        file.write_bytes(content[:kept])
    assert error_line(ModelError, check_weights, tmp_path).startswith(f"{file}: ")


NUMBER = '{"weight_map": {"a": 1, "b": "c"}}'


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"weight_map": []}', NUMBER, "[" * 100_000],
    ids=["empty", "cut off", "list", "no map", "map is a list", "a number", "too deep"],
)
def test_a_broken_index_is_named(tmp_path: Path, weights: bytes, content: str) -> None:
    """A file that it names instead of a shard is named, too."""
    (tmp_path / "model.safetensors").write_bytes(weights)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    said = error_line(ModelError, check_weights, tmp_path)
    assert said.startswith(str(tmp_path))
    assert "remove" in said  # the weights may be whole without it


# The index decides


def split(weights: dict[str, mx.array], folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Write `weights` in turn into the files `names`. Return the file of each tensor."""
    placed = {tensor: names[at % len(names)] for at, tensor in enumerate(weights)}
    for name in names:
        part = {tensor: weights[tensor] for tensor in weights if placed[tensor] == name}
        (folder / name).parent.mkdir(exist_ok=True)
        mx.save_safetensors(str(folder / name), part, {"format": "mlx"})
    return placed


def write_index(folder: Path, placed: dict[str, str]) -> None:
    text = json.dumps({"metadata": {}, "weight_map": placed})
    (folder / "model.safetensors.index.json").write_text(text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "model"


def whole(folder: Path) -> dict[str, mx.array]:
    """Write config.json of a tiny model, and return its weights."""
    config = tiny_config(num_hidden_layers=1)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return dict(tree_flatten(tiny_model(config).parameters()))


def is_loaded(folder: Path, weights: dict[str, mx.array]) -> bool:
    """Return True if the model in `folder` has these `weights`."""
    found: Any = tree_flatten(unread_model(folder).parameters())
    return all(mx.array_equal(array, weights[name]) for name, array in found)


NAMES = (
    "model.safetensors model-00001-of-00002.safetensors model-00002-of-00002.safetensors "
    "model-00003-of-00003.safetensors model_old.safetensors weights.safetensors "
    "parts/model-1.safetensors"
).split()


@examples(40)
@given(st.data())
def test_the_index_decides_which_files_are_read(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Strays of other weights, damaged ones and broken links change nothing, wherever they are."""
    folder = tmp_path_factory.mktemp("index") / "model"
    weights = whole(folder)
    named = data.draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True))
    strays = data.draw(st.lists(st.sampled_from(NAMES), max_size=4, unique=True))
    for name in {*strays} - {*named}:
        kind = data.draw(st.sampled_from(["other", "damaged", "link"]))
        (folder / name).parent.mkdir(exist_ok=True)
        if kind == "other":
            split({one: array + 1 for one, array in weights.items()}, folder, [name])
        elif kind == "damaged":
            (folder / name).write_bytes(b"damaged")
        else:
            (folder / name).symlink_to("nowhere")
    write_index(folder, split(weights, folder, named))
    assert check_weights(folder) == sorted(folder / name for name in named)
    assert is_loaded(folder, weights)
    assert weight_bytes(folder) == sum(array.nbytes for array in weights.values())
    before = by_files(folder), fingerprint(folder)
    for name in {*strays} - {*named}:
        (folder / name).unlink()
    assert (by_files(folder), fingerprint(folder)) == before


@pytest.mark.parametrize(
    "names",
    [
        ["model.safetensors"],
        ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
        ["model-00000-of-000002.safetensors", "model-00001-of-000002.safetensors"],
    ],
    ids=["one file", "numbered", "numbered from 0"],
)
@pytest.mark.parametrize("absent", ["model-00001-of-00005.safetensors", "pytorch_model.bin"])
def test_whole_weights_beside_a_stale_index_are_read(
    folder: Path, names: list[str], absent: str
) -> None:
    """The index is of files that were there before a conversion."""
    weights = whole(folder)
    split(weights, folder, names)
    write_index(folder, dict.fromkeys([*weights, "of.the.original"], absent))
    assert is_loaded(folder, weights)


def test_weights_in_part_are_no_whole_ones(folder: Path) -> None:
    """A file that has every tensor of the index is read; one that lacks some is not."""
    weights = whole(folder)
    placed = split(weights, folder, NAMES[1:3])
    write_index(folder, placed)
    (folder / NAMES[1]).unlink()
    said = error_line(ModelError, check_weights, folder)
    assert said.startswith(f"{folder / NAMES[1]}: missing: 1 of 2 weight files")
    some = dict(list(weights.items())[:-1])
    split(some, folder, ["model.safetensors"])
    with pytest.raises(ModelError, match="missing: 1 of 2"):
        check_weights(folder)
    split(weights, folder, ["model.safetensors"])
    assert is_loaded(folder, weights)


@pytest.mark.parametrize("has_index", [True, False])
def test_a_tensor_that_two_files_have_is_an_error(folder: Path, has_index: bool) -> None:
    """The message names both files and the tensor."""
    weights = whole(folder)
    names = ["model-a.safetensors", "model-b.safetensors"]
    placed = split(weights, folder, names)
    tensor = next(iter(weights))
    second = {name for name in weights if placed[name] == names[1]} | {tensor}
    split({name: weights[name] for name in second}, folder, names[1:])
    if has_index:
        write_index(folder, placed)
    said = error_line(ModelError, check_weights, folder)
    assert all(name in said for name in [*names, repr(tensor)])


@pytest.mark.parametrize(
    "file", ["../model.safetensors", "/model.safetensors", "a/../../x.safetensors", ".."]
)
def test_an_index_that_leads_out_of_the_folder_is_refused(folder: Path, file: str) -> None:
    """Also beside a whole file, because such an index is not of this model."""
    weights = whole(folder)
    split(weights, folder, ["model.safetensors"])
    split(weights, folder.parent, ["model.safetensors"])
    write_index(folder, dict.fromkeys(weights, file))
    said = error_line(ModelError, check_weights, folder)
    assert f"names {file!r}, which is not a file in this folder" in said


def test_numbered_files_without_an_index_are_all_there(folder: Path) -> None:
    """The numbers say what a broken download lacks. An empty index says nothing."""
    weights = whole(folder)
    split(weights, folder, NAMES[1:3])
    assert is_loaded(folder, weights)
    write_index(folder, {})
    assert is_loaded(folder, weights)
    (folder / NAMES[2]).unlink()
    said = error_line(ModelError, check_weights, folder)
    assert said.startswith(f"{folder / NAMES[2]}: missing, by the numbers")
