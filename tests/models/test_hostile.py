"""Harmful or damaged model folders end in one line with the file, before they take memory."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support.checks import raising
from support.models import change_json, error_line
from support.sample import fewer

from mlxrunner import ModelError, PromptError
from mlxrunner.errors import MlxrunnerError
from mlxrunner.models.files import MOST_PARTS, check_settings, size_of, wrong_setting
from mlxrunner.models.fingerprint import fingerprint
from mlxrunner.models.load import describe, load_model, tokenizer_of
from mlxrunner.system.foreign import ForeignError, foreign_code


def refused(call: Callable[[str], object], folder: Path) -> str:
    return error_line(MlxrunnerError, call, str(folder))


# Kinds of files


def link_to_fifo(file: Path) -> None:
    os.mkfifo(file.with_name("pipe"))
    file.symlink_to("pipe")


def dangling(file: Path) -> None:
    file.symlink_to("nowhere")


def loop(file: Path) -> None:
    file.symlink_to(file.name)


def hole(file: Path) -> None:
    file.touch()
    os.truncate(file, 2**36)


KINDS: dict[Callable[[Path], None], str] = {
    os.mkfifo: "is a FIFO, not a regular file",
    link_to_fifo: "is a FIFO, not a regular file",
    Path.mkdir: "is a directory, not a regular file",
    dangling: "a link to nowhere, which is missing",
    loop: "Too many levels of symbolic links",
    hole: "at most",
}
FILES = (
    "config.json generation_config.json tokenizer.json tokenizer_config.json "
    "special_tokens_map.json chat_template.jinja"
).split()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(("make", "message"), KINDS.items(), ids=[make.__name__ for make in KINDS])
def test_what_is_no_ordinary_file_is_not_opened(
    make: Callable[[Path], None], message: str, name: str, folder: Path
) -> None:
    """Nothing waits for a FIFO or reads a file without end, whatever library would open it."""
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    for call in (describe, load_model, tokenizer_of):
        said = refused(call, folder)
        assert str(folder / name) in said
        assert message in said


WEIGHTS = "model.safetensors model-00002.safetensors model.safetensors.index.json".split()


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("make", [os.mkfifo, dangling, loop, Path.mkdir])
def test_weights_are_ordinary_files_too(
    make: Callable[[Path], None], name: str, folder: Path
) -> None:
    """The index is one, too; one more file that would be loaded counts as well."""
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    for call in (describe, load_model):
        assert str(folder / name) in refused(call, folder)


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="only Linux shows the kernel's state as files"
)
def test_a_file_of_the_kernel_is_not_handed_to_a_library(folder: Path) -> None:
    """It says that it is a regular file, and reading it may wait for ever."""
    (folder / "chat_template.jinja").symlink_to("/proc/version")
    said = refused(load_model, folder)
    assert "chat_template.jinja: is a file of the kernel, not a regular file" in said


def test_a_fingerprint_reads_only_ordinary_files(folder: Path) -> None:
    """Each of the tokenizer's files is one."""
    os.mkfifo(folder / "merges.txt")
    with pytest.raises(ModelError, match=r"merges\.txt: is a FIFO"):
        fingerprint(folder)


# Settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; no model has more than 1"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000; no model"),
        ({"num_hidden_layers": 1000}, "1,000 layers, but the weight files have 21 tensors in all"),
        ({"num_hidden_layers": -5}, "num_hidden_layers is -5"),
        ({"num_hidden_layers": 1e400}, "num_hidden_layers is a huge number"),
        ({"num_hidden_layers": 10**400}, "num_hidden_layers is a huge number"),
        ({"num_local_experts": 10**7}, "num_local_experts is 10000000"),
        ({"hidden_size": 10**12}, "hidden_size is 1000000000000"),
        ({"vision": {"depth": 10**7}}, "vision.depth is 10000000"),
        ({"layer_types": ["full_attention"] * 10**5}, "layer_types is a list of 100,000 values"),
        ({"num_attention_heads": 0}, "config.json"),
        ({"num_attention_heads": "4"}, "config.json"),
        ({"hidden_size": 64.0}, "config.json: no model can be built from it: hidden_size is 64.0"),
        ({"quantization": {}, "hidden_size": "64"}, "write a number"),
        ({"rope_scaling": {"type": "linear"}}, "config.json"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": "x"}}, "config.json"),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": [1], "rope_type": "y"}}, "config"),
        ({"head_dim": 7}, "config.json"),
        ({"text_config": [1], "vocab_size": "many"}, "config.json"),
        ({"model_type": "../x"}, "config.json"),
        ({"model_type": "x" * 5000}, "config.json"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_a_setting_that_no_model_has_is_one_line(
    settings: dict[str, Any], message: str, folder: Path
) -> None:
    """The name, its value, and what is possible; nothing was built from it."""
    change_json(folder / "config.json", **settings)
    assert message in refused(describe, folder)
    assert len(refused(load_model, folder)) < 1000


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"hidden_size": 64.0}, "hidden_size is 64.0: write 64"),
        ({"text_config": {"num_layers": 2.5}}, "num_layers is 2.5: write a whole number"),
        ({"rope_scaling": {"factor": "4"}}, "rope_scaling.factor is the text '4': write 4"),
        ({"quantization": {}}, "quantization is {}: write group_size and bits into it, or remove"),
        ({"hidden_size": None}, "hidden_size is None: write a whole number"),
        ({"vocab_size": ["x"] * 999}, "...]: write a whole number"),
        ({"num_attention_heads": True}, "num_attention_heads is True: write a whole number"),
        ({"transformers_version": "5.0", "hidden_size": 64, "rope_theta": 1e4}, None),
        ({"hidden_size": 64, "head_dim": None}, None),
    ],
)
def test_a_setting_of_a_wrong_kind_is_named_with_its_remedy(
    config: dict[str, Any], words: str | None
) -> None:
    found = wrong_setting(config)
    assert found is None if words is None else words in str(found)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0a\nsize 123456789\n"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_pointer_of_git_lfs_is_named_with_its_remedy(name: str, folder: Path) -> None:
    (folder / name).write_bytes(POINTER)
    for call in (describe, load_model):
        message = f"{name}: is a Git LFS pointer, not the file itself: run git lfs pull"
        assert message in refused(call, folder)


def test_a_byte_order_mark_is_named_with_its_remedy(folder: Path) -> None:
    """mlx-lm reads the file without one only."""
    file = folder / "config.json"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert "begins with a byte order mark (BOM)" in refused(load_model, folder)


def test_a_setting_with_two_values_is_named_with_both(folder: Path) -> None:
    """Each reader would take the one it likes."""
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text[:-1] + ', "num_hidden_layers": 7}')
    assert "'num_hidden_layers' is there twice, as 2 and as 7" in refused(describe, folder)


def test_sizes_of_a_layer_are_no_numbers_of_layers(tmp_path: Path) -> None:
    """Settings of published models that only look alike."""
    config = {
        "vocab_size_per_layer_input": 262_144,
        "hidden_size_per_layer": 2048,
        "num_experts": 512,
        "max_window_layers": 48,
        "moe_intermediate_size": 2048,
        "time_step_limit": [0.0, float("inf")],
        "num_nextn_predict_layers": 1,
        "n_layers": MOST_PARTS,
    }
    check_settings(tmp_path, config)


@pytest.mark.parametrize(
    "config",
    [
        {"tie_word_embeddings": "false"},
        {"text_config": {"tie_word_embeddings": 0}},
        {"rope_scaling": ["linear", 2]},
        {"rope_parameters": "linear"},
    ],
)
def test_a_setting_of_another_form_is_named(tmp_path: Path, config: dict[str, Any]) -> None:
    """A text such as "false" counts as true, and the model would use its embeddings as its head."""
    with pytest.raises(ModelError, match=r"(tie_word_embeddings|rope_\w+) is .*: write "):
        check_settings(tmp_path, config)
    check_settings(tmp_path, {"tie_word_embeddings": None, "rope_scaling": None})


@pytest.mark.parametrize("value", [None, True, "5", 5.0, -5, [5], 0])
def test_a_size_is_a_whole_number_above_0(value: Any) -> None:
    """Everything else is as if it were not there."""
    assert size_of({"vocab_size": value, "text_config": {"vocab_size": 9}}, "vocab_size") == 9
    assert size_of({"vocab_size": value, "text_config": value}, "vocab_size") == 0


@pytest.mark.parametrize(
    "value",
    [10**30, -1, 2**31, [10**30, -5], True, ["</s>", [1]], {"a": 1}, float("nan")],
    ids=repr,
)
def test_an_end_token_that_no_vocabulary_has_is_passed_over(value: Any, folder: Path) -> None:
    """The tokenizer's own is left."""
    change_json(folder / "config.json", eos_token_id=value)
    assert load_model(str(folder)).tokenizer.stop_tokens == {257}


# Weights


NORM = "model.norm.weight"


def changed(header: dict[str, Any], **settings: Any) -> object:
    return header[NORM].update(settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda it: changed(it, data_offsets=it["lm_head.weight"]["data_offsets"]), "can't be"),
        (lambda it: changed(it, data_offsets=[0, 256]), "overlap"),
        (lambda it: it.pop(NORM), "bytes between them"),
        (lambda it: changed(it, data_offsets=[-256, 0]), "can't be"),
        (
            lambda it: changed(it, data_offsets=[0, float("inf")]),
            "Infinity is not a number of JSON",
        ),
        (lambda it: changed(it, shape=[True] * 64), "can't be"),
        (lambda it: changed(it, shape=[2**62, 4]), "can't be"),
        (lambda it: changed(it, dtype="F99"), "its header describes 'model.norm.weight' as"),
        (lambda it: it.update(__metadata__={"a": 1}), "are not texts"),
        (lambda it: it.update({"x" * 10**6: 3}), "its header describes 'xxx"),
    ],
    ids=(
        "another's, overlap, gap, negative, infinity, flags, huge, type, metadata, long name"
    ).split(", "),
)
def test_a_header_is_compared_with_the_file(
    change: Callable[[dict[str, Any]], object], message: str, folder: Path
) -> None:
    """The header of a session's caches is compared likewise."""
    file = folder / "model.safetensors"
    data = file.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:end])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[end:])
    for call in (describe, load_model):
        said = refused(call, folder)
        assert said.startswith(f"{file}: ")
        assert message in said
        assert len(said) < 1000


def test_a_name_that_is_twice_in_a_header_is_damage(folder: Path) -> None:
    """One of the tensors would not be seen."""
    entry = b'"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}'
    text = b"{%s, %s}" % (entry, entry)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"x")
    assert "a name is there twice" in refused(load_model, folder)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_weights_without_a_number_are_named(dtype: mx.Dtype, folder: Path) -> None:
    """All of one tensor, or one value of it that makes all logits NaN."""
    weights: Any = mx.load(str(folder / "model.safetensors"))
    weights = {name: array.astype(dtype) for name, array in weights.items()}
    name = "model.layers.1.mlp.up_proj.weight"
    one = mx.where(mx.arange(8192).reshape(128, 64) == 0, float("nan"), 1.0)
    for bad, why in (
        (mx.full((128, 64), float("nan")), f"the 8192 values of the tensor {name} are all NaN"),
        (one, f"the tensor {name} holds NaN"),
    ):
        mx.save_safetensors(str(folder / "model.safetensors"), weights | {name: bad.astype(dtype)})
        assert why in refused(load_model, folder)


# Tokenizers


FLAGS = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
FAR = range(300, 10**5)
ADDED = [{"id": i, "content": f"<{i}>", "special": True, **FLAGS} for i in FAR]
NAMED = [f"<{i}>" for i in range(10**5)]
STRIP = {"type": "Strip", "content": "x", "start": 10**9, "stop": 10**9}
BPE = {"type": "BPE", "vocab": {}, "merges": []}
FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
NONE, MANY = "no tokenizer could be loaded", "99,700 special tokens"


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (CONFIG, {"added_tokens_decoder": {i: {"content": f"<{i}>"} for i in FAR}}, MANY),
        (
            CONFIG,
            {"added_tokens_decoder": {10**9: {"content": "x"}}},
            "a token has the id 1000000000",
        ),
        (CONFIG, {"additional_special_tokens": NAMED}, "100,000 special tokens"),
        ("special_tokens_map.json", {"additional_special_tokens": NAMED}, "100,000 special tokens"),
        (
            "added_tokens.json",
            {text: 300 + i for i, text in enumerate(NAMED)},
            "100,000 special tokens",
        ),
        ("added_tokens.json", {"<a>": -1}, "a token has the id -1"),
        (FILE, {"added_tokens": ADDED}, MANY),
        (FILE, {"model": {**BPE, "vocab": {"a": 0, "</s>": 4 * 10**9}}}, NONE),
        (FILE, {"model": {**BPE, "unk_token": "none"}}, NONE),
        (FILE, {"decoder": STRIP}, "can't decode its tokens: index out"),
        (FILE, {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "none"}}, NONE),
    ],
    ids=(
        "decoder, far id, named, map, added, negative id, tokenizer.json, far vocabulary, "
        "unknown token, panic, word level"
    ).split(", "),
)
def test_a_tokenizer_that_can_not_be_is_one_line(
    name: str, settings: Any, message: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The line has the file, the number and what is possible, without a panic's print."""
    change_json(folder / name, **settings)
    assert message in refused(tokenizer_of, folder)
    assert capfd.readouterr().err == ""


class PanicException(BaseException):
    """One for each library, all of this name."""


def test_a_panic_is_an_error_in_one_line_and_prints_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A panic shows nothing that the library prints; without one all of it appears afterwards."""
    with pytest.raises(ForeignError, match=r"^index out of bounds$"), foreign_code():
        os.write(2, b"thread panicked\n" * 200)
        raise PanicException("index out of bounds\nmore")
    assert capfd.readouterr().err == ""
    with foreign_code():
        os.write(2, b"a warning\n")
        assert capfd.readouterr().err == ""
    assert capfd.readouterr().err == "a warning\n"
    with foreign_code():
        os.write(2, "of \x1b]52;c;aGk=\x07\u202e\r and \x9b\n".encode() + b"\xff\n")
    assert capfd.readouterr().err == "of \\x1b]52;c;aGk=\\x07\\u202e\\x0d and \\x9b\n\ufffd\n"
    with pytest.raises(ValueError, match="x"), foreign_code():
        raise ValueError("x")


def test_a_text_that_a_tokenizer_gives_up_is_a_prompt_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's own exception is none of ours."""
    tokenizer: Any = tokenizer_of(str(folder))
    panic = raising(PanicException("no entry found for key"))
    monkeypatch.setattr(tokenizer._wrapper._tokenizer, "encode", panic)
    said = "tokenizer can't encode this text: no entry found for key"
    with pytest.raises(PromptError, match=said):
        tokenizer.encode("x")


# Everything together


@pytest.mark.exhaustive(0)
@pytest.mark.skipif(sys.platform != "linux", reason="forks processes with limits on their memory")
def test_mutated_folders_end_in_one_clear_line(tmp_path: Path) -> None:
    """A few mutations of many thousands end in one clear line each.

    `python tests/models/mutations.py SEED COUNT FOLDER` tries others.
    """
    seed, count = random.Random(11).randrange(10**6), fewer(16, 6)
    script = [sys.executable, str(Path(__file__).with_name("mutations.py"))]
    for numbers in (["0", "0"], [str(seed), str(count)]):
        done = subprocess.run([*script, *numbers, tmp_path], capture_output=True, text=True)
    said = done.stdout.splitlines()[-1:]
    assert said == [f"{count} folders, 0 complaints"], done.stdout + done.stderr
