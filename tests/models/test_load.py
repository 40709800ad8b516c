"""A model loads whole, and a broken directory is one line with the file or the folder."""

from __future__ import annotations

import builtins
import json
import logging
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from support.architectures import build as build_model
from support.architectures import settings_of
from support.models import (
    BOS,
    EOS,
    change_json,
    error_line,
    save_model,
    tiny_config,
    write_model,
    write_tokenizer,
)

from mlxrunner import ModelError, ParallelRunner, Runner
from mlxrunner.cache.layers.base import tree_bytes
from mlxrunner.models.load import describe, load_model, tokenizer_of, unread_model


def refusal(folder: Path, **options: Any) -> str:
    """The message of the ModelError: one line, without a traceback, that names the folder."""
    text = error_line(ModelError, load_model, str(folder), **options)
    assert len(text) < 600
    assert text.startswith(str(folder))
    return text


def test_a_whole_directory_loads(folder: Path) -> None:
    """The model is evaluated and described, and the tokenizer knows config.json's end tokens."""
    loaded = load_model(str(folder))
    assert (loaded.name, loaded.folder) == (str(folder), folder)
    assert loaded.facts.architecture == "llama"
    assert EOS in loaded.tokenizer.stop_tokens
    assert loaded.model(mx.array([[BOS]])).shape == (1, 1, loaded.facts.vocab)


def test_a_model_is_loaded_by_its_hub_id(
    hub_cache: Path, cache_repository: Any, whole: Path
) -> None:
    """From the cache, where it is a directory like any other."""
    copy = partial(shutil.copytree, whole, dirs_exist_ok=True)
    snapshot = cache_repository("org/name", copy)
    runners = Runner.load("org/name"), Runner.load(str(snapshot))
    assert runners[0].name == "org/name"
    one, other = (
        runner.complete([1, 2, 3], max_tokens=4, stop_tokens=[]).tokens for runner in runners
    )
    assert one == other


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_weights_become_float32_on_a_cpu(tmp_path: Path, dtype: mx.Dtype) -> None:
    """The only type for which the CPU backend has fast matrix products."""
    model = write_model(tmp_path)
    model.set_dtype(dtype)
    save_model(tmp_path, model, tiny_config())
    parameters: Any = tree_flatten(load_model(str(tmp_path)).model.parameters())
    assert {array.dtype for _, array in parameters} == {mx.float32}


@pytest.mark.parametrize("kind", ["nosuch", "", "a.b", "..", "../llama", "llama.Model", "x y"])
def test_an_unknown_model_type_is_named(folder: Path, kind: str) -> None:
    """Also one that is not a module name."""
    change_json(folder / "config.json", model_type=kind)
    said = f"model_type {kind!r} is not one that mlx-lm supports"
    assert refusal(folder) == f"{folder / 'config.json'}: {said}"


LACKS = "config.json lacks a setting that this architecture needs: 'hidden_size'"


@pytest.mark.parametrize(
    ("settings", "messages"),
    [
        # Modules of mlx-lm without a Model class are no architectures.
        *(({"model_type": kind}, [kind]) for kind in ("cache", "base", "rope_utils")),
        ({"hidden_size": None}, [LACKS]),
        ({"hidden_size": None, "vocab_size": None}, ["'hidden_size' and 'vocab_size'"]),
        ({"quantization": {"bits": 4}}, ["'group_size'"]),
        # Both shapes are named, the configuration's and the file's.
        ({"intermediate_size": 96}, ["model.layers.0.mlp", "96", "128"]),
        # Nothing is filled in at random, nothing is passed over.
        ({"num_hidden_layers": 3}, ["Missing 9 parameters: model.layers.2"]),
        ({"num_hidden_layers": 1}, ["9 parameters not in model"]),
    ],
    ids=str,
)
def test_a_configuration_that_does_not_fit_is_an_error(
    folder: Path, settings: dict[str, Any], messages: list[str]
) -> None:
    change_json(folder / "config.json", **settings)
    said = refusal(folder)
    assert [message for message in messages if message not in said] == []


# Tokenizers


NEITHER = ": no tokenizer could be loaded: neither tokenizer.json nor"
NO_JSON = "/tokenizer.json: not readable as JSON"
WRONG_BOS = ": no tokenizer could be loaded: TypeError: Special token bos_token"
DAMAGED = "/tokenizer.model: not a SentencePiece model, or damaged"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer.json": None, "tokenizer_config.json": None}, NEITHER),
        ({"tokenizer.json": None}, NEITHER),
        ({"tokenizer.json": b""}, NO_JSON),
        ({"tokenizer.json": b'{"model": '}, NO_JSON),
        ({"tokenizer.json": b"\xff\xfe"}, NO_JSON),
        ({"tokenizer.json": b"[" * 100_000}, NO_JSON),
        ({"tokenizer.json": b"[]"}, "/tokenizer.json: has to be a JSON object, not list"),
        ({"tokenizer.json": b"{}"}, ": no tokenizer could be loaded"),
        ({"tokenizer_config.json": b"{"}, "/tokenizer_config.json: not readable as JSON"),
        ({"tokenizer_config.json": b"null"}, "/tokenizer_config.json: has to be a JSON object"),
        ({"tokenizer_config.json": b'{"bos_token": 3}'}, WRONG_BOS),
        ({"generation_config.json": b"[]"}, "/generation_config.json: has to be a JSON object"),
        ({"generation_config.json": b"\xff\xfe"}, "/generation_config.json: not readable as JSON"),
        ({"chat_template.jinja": b"\xff\xfe"}, "/chat_template.jinja: can't be read: not UTF-8"),
        ({"tokenizer.json": None, "tokenizer.model": b"not a model"}, DAMAGED),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_tokenizer_that_is_missing_or_broken_is_an_error(
    folder: Path, files: dict[str, bytes | None], message: str
) -> None:
    """The broken file is named where it is known."""
    for name, content in files.items():
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content)
    assert f"{folder}{message}" in refusal(folder)


# Code that a model brings along

MODEL_CODE = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
from mlx_lm.models.llama import Model, ModelArgs
"""


def test_a_model_with_code_of_its_own_is_refused_unless_trusted(folder: Path) -> None:
    """The code does not run before the flag is given, and then the model loads."""
    (folder / "custom.py").write_text(MODEL_CODE)
    change_json(folder / "config.json", model_file="custom.py", model_type="custom")
    text = refusal(folder)
    assert "--trust-remote-code" in text
    assert not (folder / "ran").exists()
    load_model(str(folder), trust_remote_code=True)
    assert (folder / "ran").exists()


TOKENIZER_CODE = """
from pathlib import Path
Path({ran!r}).touch()
from transformers import PreTrainedTokenizerFast
class Custom(PreTrainedTokenizerFast):
    pass
"""


def test_a_tokenizer_with_code_of_its_own_is_refused_unless_trusted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is asked on the terminal."""
    asked: list[str] = []
    monkeypatch.setattr(builtins, "input", lambda prompt="": asked.append(prompt) or "y")
    modules = folder.parent / "modules"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(modules))
    monkeypatch.syspath_prepend(str(modules))
    ran = folder.parent / "ran"
    (folder / "custom.py").write_text(TOKENIZER_CODE.format(ran=str(ran)))
    settings = {
        "tokenizer_class": "Custom",
        "auto_map": {"AutoTokenizer": [None, "custom.Custom"]},
        "eos_token": "</s>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    text = refusal(folder)
    assert "--trust-remote-code" in text
    assert not ran.exists()
    assert asked == []
    tokenizer = load_model(str(folder), trust_remote_code=True).tokenizer
    assert ran.exists()
    assert tokenizer.decode(tokenizer.encode("hi")) == "hi"


def test_the_tokenizer_alone_needs_no_weights(folder: Path) -> None:
    """The tokenizer of a folder without weights has the model's tokens and ends of an answer."""
    loaded = load_model(str(folder)).tokenizer
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    alone = tokenizer_of(str(folder))
    assert alone.encode("Hello there") == loaded.encode("Hello there")
    assert alone.stop_tokens == loaded.stop_tokens
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match="missing: a model directory needs"):
        tokenizer_of(str(folder))


def test_the_tokenizer_alone_prints_nothing() -> None:
    """The libraries after it have nothing to say about what they lack."""
    talk = [{"role": "user", "content": "Hello"}]
    code = f"from mlxrunner.models.load import tokenizer_of; tokenizer_of('demo').render({talk})"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert (said.stdout, said.stderr) == (b"", b"")


@pytest.mark.parametrize("kind", [Runner, ParallelRunner], ids=["one", "several"])
def test_loading_tells_its_steps(
    kind: type[Runner | ParallelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of the weights in groups, up to nearly all; then the longest step, for a runner."""
    monkeypatch.setattr("mlxrunner.models.load.GROUP", 2**20)
    told: list[tuple[str, int, int | None]] = []
    options: dict[str, Any] = {"max_sequences": 1} if kind is ParallelRunner else {}
    options |= {"progress": lambda *step: told.append(step)}
    with kind.load("demo", context=300, **options) as runner:
        weights = tree_bytes(runner.model.parameters())
    *groups, last = told
    assert last == ("trying the longest step, at the end of 300 tokens", 0, None)
    assert {(step, total) for step, _, total in groups} == {("reading the weights", weights)}
    done = [done for _, done, _ in groups]
    assert len(done) > 5
    assert done == sorted(set(done))
    assert 0 == done[0] < done[-1] < weights


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama4", {}),
        ("llama", {"initializer_range": {"a": 1}}),
        ("qwen3", {"attention_dropout": "0.0", "layer_types": ["full_attention"] * 9}),
        ("mamba2", {"time_step_limit": [0.0, {"__float__": "Infinity"}]}),
    ],
    ids=["llama 4", "nested", "more layers", "tagged float"],
)
def test_settings_that_only_transformers_refuses_load(
    tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    """The tokenizer is the one that a plain config.json has."""
    write_model(tmp_path, kind)
    change_json(tmp_path / "config.json", **settings)
    loaded = load_model(str(tmp_path))
    describe(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    text = "Käfer 日本 </s> x"
    assert loaded.tokenizer.encode(text) == tokenizer_of(str(tmp_path)).encode(text)


@pytest.mark.parametrize("name", ["chat_template_type", "tool_parser_type"])
def test_a_module_that_this_mlx_lm_lacks_is_a_warning(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The template in the folder is used."""
    write_model(tmp_path)
    write_tokenizer(tmp_path, chat_template="{{ messages[0].content }}!", **{name: "of_tomorrow"})
    with caplog.at_level(logging.WARNING, "mlxrunner"):
        tokenizer = load_model(str(tmp_path)).tokenizer
    assert tokenizer.render([{"role": "user", "content": "Hi"}]) == "Hi!"
    assert f"{name} is 'of_tomorrow', which the installed mlx-lm lacks" in caplog.text


@pytest.mark.parametrize("kind", ["llama", "gemma2", "cohere2", "gemma", "granite", "exaone4"])
def test_a_projection_beside_tied_embeddings_is_left_out(tmp_path: Path, kind: str) -> None:
    """The embeddings take its place. Where the configuration unties them, it is an error."""
    settings = settings_of(kind) | {"tie_word_embeddings": True}
    model = build_model(kind, tie_word_embeddings=True)
    save_model(tmp_path, model, settings)
    write_tokenizer(tmp_path)
    weights: Any = dict(mx.load(str(tmp_path / "model.safetensors")))
    mx.eval(weights)
    weights["lm_head.weight"] = mx.ones((settings["vocab_size"], settings["hidden_size"]))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights, {"format": "mlx"})
    tokens = mx.array([[5, 6, 7]])
    assert mx.array_equal(unread_model(tmp_path)(tokens), model(tokens))
