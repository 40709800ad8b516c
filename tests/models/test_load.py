"""A model loads whole, and a broken directory is one line with the file or the folder."""

from __future__ import annotations

import builtins
import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
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


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with nothing wrong, to be copied."""
    folder = tmp_path_factory.mktemp("whole")
    write_model(folder, eos_token_id=EOS)
    return folder


@pytest.fixture
def folder(tmp_path: Path, whole: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


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
    snapshot = cache_repository(
        "org/name", lambda snapshot: shutil.copytree(whole, snapshot, dirs_exist_ok=True)
    )
    runner = Runner.load("org/name")
    assert runner.name == "org/name"
    local = Runner.load(str(snapshot))
    answers = [
        [chunk.token for chunk in one.generate([1, 2, 3], max_tokens=4, stop_tokens=[])]
        for one in (runner, local)
    ]
    assert answers[0] == answers[1]


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
    """Also one that is no module name."""
    change_json(folder / "config.json", model_type=kind)
    assert (
        refusal(folder)
        == f"{folder / 'config.json'}: model_type {kind!r} is not one that mlx-lm supports"
    )


@pytest.mark.parametrize("kind", ["cache", "base", "rope_utils"])
def test_a_module_of_mlx_lm_that_is_no_architecture_is_refused(folder: Path, kind: str) -> None:
    """It has no Model class."""
    change_json(folder / "config.json", model_type=kind)
    assert kind in refusal(folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"hidden_size": None},
            "config.json lacks a setting that this architecture needs: 'hidden_size'",
        ),
        ({"hidden_size": None, "vocab_size": None}, "'hidden_size' and 'vocab_size'"),
        ({"quantization": {"bits": 4}}, "'group_size'"),
    ],
    ids="no hidden_size, two missing, no group_size".split(", "),
)
def test_a_setting_that_is_missing_or_wrong_is_an_error(
    folder: Path, settings: dict[str, Any], message: str
) -> None:
    """The setting, or what was wrong with it, is in the message."""
    change_json(folder / "config.json", **settings)
    assert message in refusal(folder)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder: Path) -> None:
    """The shapes are the configuration's and the file's."""
    change_json(folder / "config.json", intermediate_size=96)
    text = refusal(folder)
    assert "model.layers.0.mlp" in text
    assert "96" in text
    assert "128" in text


@pytest.mark.parametrize(
    ("layers", "message"),
    [(3, "Missing 9 parameters: model.layers.2"), (1, "9 parameters not in model")],
)
def test_tensors_too_few_or_too_many_are_an_error(folder: Path, layers: int, message: str) -> None:
    """Nothing is filled in at random, nothing is passed over."""
    change_json(folder / "config.json", num_hidden_layers=layers)
    assert message in refusal(folder)


# Tokenizers


def replaced(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def without(*names: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return damage


def only_sentencepiece(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"not a model")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            without("tokenizer.json", "tokenizer_config.json"),
            ": no tokenizer could be loaded: neither tokenizer.json nor",
        ),
        (without("tokenizer.json"), ": no tokenizer could be loaded: neither tokenizer.json nor"),
        (replaced("tokenizer.json", b""), "/tokenizer.json: not readable as JSON"),
        (replaced("tokenizer.json", b'{"model": '), "/tokenizer.json: not readable as JSON"),
        (replaced("tokenizer.json", b"\xff\xfe"), "/tokenizer.json: not readable as JSON"),
        (replaced("tokenizer.json", b"[" * 100_000), "/tokenizer.json: not readable as JSON"),
        (replaced("tokenizer.json", b"[]"), "/tokenizer.json: has to be a JSON object, not list"),
        (replaced("tokenizer.json", b"{}"), ": no tokenizer could be loaded"),
        (replaced("tokenizer_config.json", b"{"), "/tokenizer_config.json: not readable as JSON"),
        (
            replaced("tokenizer_config.json", b"null"),
            "/tokenizer_config.json: has to be a JSON object",
        ),
        (
            replaced("tokenizer_config.json", b'{"bos_token": 3}'),
            ": no tokenizer could be loaded: TypeError: Special token bos_token",
        ),
        (
            replaced("generation_config.json", b"[]"),
            "/generation_config.json: has to be a JSON object",
        ),
        (
            replaced("chat_template.jinja", b"\xff\xfe"),
            "/chat_template.jinja: can't be read: not UTF-8",
        ),
        (only_sentencepiece, "/tokenizer.model: not a SentencePiece model, or damaged"),
    ],
    ids=(
        "no files, no tokenizer.json, empty, cut off, not UTF-8, too deep, list, "
        "not a tokenizer, broken config, null config, wrong config, generation is a list, "
        "template not UTF-8, broken tokenizer.model"
    ).split(", "),
)
def test_a_tokenizer_that_is_missing_or_broken_is_an_error(
    folder: Path, damage: Callable[[Path], None], message: str
) -> None:
    """The broken file is named where it is known."""
    damage(folder)
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
    """The libraries behind it have nothing to say about what they lack."""
    program = (
        "from mlxrunner.models.load import tokenizer_of; tokenizer_of('demo').render([{'role': "
        "'user', 'content': 'Hello'}])"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert (said.stdout, said.stderr) == ("", "")


@pytest.mark.parametrize("kind", [Runner, ParallelRunner], ids=["one", "several"])
def test_loading_tells_its_steps(
    kind: type[Runner | ParallelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of the weights in groups, up to nearly all; then the longest step, for a runner."""
    monkeypatch.setattr("mlxrunner.models.load.GROUP", 2**20)
    told: list[tuple[str, int, int | None]] = []
    slots: dict[str, Any] = {"max_sequences": 1} if kind is ParallelRunner else {}
    with kind.load(
        "demo", context=300, progress=lambda *step: told.append(step), **slots
    ) as runner:
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
