"""transformers reads a tokenizer.json without asking or looking anything up."""

from __future__ import annotations

import builtins
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.checks import raising
from support.models import change_json, error_line
from support.tokenizers import Load

from mlxrunner import ModelError
from mlxrunner.tokenizer import load_tokenizer
from mlxrunner.tokenizer.huggingface import HuggingFaceTokenizer

CODE = "def f():\n    return 'x'  # y\n\n"
TEXTS = ["the quick fox", " leading", "größer 日本語 😀", CODE, "don't 12345", "x\u0301\0"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["byte_level", "byte_level_bos", "metaspace", "metaspace_legacy"])
def test_text_is_encoded_as_the_file_says(
    directories: dict[str, Path], kind: str, text: str
) -> None:
    """The tokens of the tokenizers library itself, its BOS included, and its text."""
    from tokenizers import Tokenizer

    file = Tokenizer.from_file(str(directories[kind] / "tokenizer.json"))
    tokenizer = load_tokenizer(directories[kind])
    tokens = file.encode(text).ids
    assert tokenizer.encode(text) == tokens
    assert tokenizer.decode(tokens) == file.decode(tokens, skip_special_tokens=False)
    assert tokenizer.vocab_size == file.get_vocab_size()


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(
    ("kind", "name", "model_type"),
    [
        ("byte_level_bos", "PreTrainedTokenizerFast", "llama"),
        ("byte_level_bos", "PreTrainedTokenizer", "llama"),
        ("byte_level_bos", "NoSuchTokenizer", "llama"),
        ("byte_level_bos", "LlamaTokenizerFast", "llama"),
        ("byte_level_bos", None, "llama"),
        ("byte_level", "GPT2Tokenizer", "gpt2"),
        ("metaspace", "LlamaTokenizer", "llama"),
        ("metaspace", "LlamaTokenizerFast", "mistral"),
        ("metaspace_legacy", "LlamaTokenizer", "mistral"),
    ],
)
def test_a_class_name_in_the_configuration_changes_no_tokens(
    copy_of: Callable[..., Path], kind: str, name: str | None, model_type: str, text: str
) -> None:
    """Published Llama and Mistral models have one, right or wrong."""
    from tokenizers import Tokenizer

    folder = copy_of(kind, tokenizer_class=name)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    file = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert load_tokenizer(folder).encode(text) == file.encode(text).ids


@pytest.mark.parametrize("legacy", [None, True, False])
@pytest.mark.parametrize(
    ("kind", "name", "model_type"),
    [
        ("metaspace_legacy", "LlamaTokenizer", "llama"),
        ("metaspace", "LlamaTokenizerFast", "llama"),
        ("byte_level", "Qwen2Tokenizer", "qwen2"),
    ],
)
def test_a_tokenizer_that_transformers_builds_anew_keeps_every_promise(
    copy_of: Callable[..., Path], kind: str, name: str, model_type: str, legacy: bool | None
) -> None:
    """The text, BOS and the stream are right where only the vocabulary comes from the file."""
    folder = copy_of(kind, tokenizer_class=name, legacy=legacy)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    tokenizer = load_tokenizer(folder)
    bos, end = tokenizer.encode(""), "<|im_end|>" if kind == "byte_level" else "</s>"
    assert len(bos) == (kind != "byte_level")
    for text in (text for text in TEXTS if not text.startswith(" ")):
        tokens = tokenizer.encode(text)
        assert tokens[: len(bos)] == bos
        assert tokenizer.decode(tokens[len(bos) :]) == text
        both = tokenizer.encode(text + end) + tokenizer.encode_more(text)
        assert both == tokenizer.encode(text + end + text)
        stream = tokenizer.stream(bos or tokenizer.encode("a"))
        shown = "".join(stream.add(token) for token in tokens[len(bos) :]) + stream.finish()
        assert shown.removeprefix(" ") == text


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
def test_decoding_cleans_nothing_up(loaded: Load, kind: str) -> None:
    """Spaces before a comma are text, whatever the configuration asks for."""
    tokenizer = loaded(kind, clean_up_tokenization_spaces=True)
    assert tokenizer.decode(tokenizer.encode_more("a , b . c ' d n't")) == "a , b . c ' d n't"


def test_a_beginning_token_that_nothing_puts_in_front_is_not_wanted(
    loaded: Load,
) -> None:
    """Qwen names one here and there; its post-processor adds none."""
    tokenizer = loaded("byte_level", bos_token="<|endoftext|>")
    assert tokenizer.encode("") == []
    assert tokenizer.encode("hi") == tokenizer.encode_more("hi")


def test_a_tokenizer_without_an_end_token_works(loaded: Load, templates: dict[str, str]) -> None:
    """Only the template's end of a turn stops an answer then."""
    tokenizer = loaded("byte_level", eos_token=None)
    assert tokenizer.stop_tokens == set(tokenizer.encode_more("<|im_end|>"))
    assert tokenizer.decode(tokenizer.encode_more(" hi")) == " hi"


@pytest.mark.parametrize("place", ["config.json", "tokenizer_config.json"])
def test_nobody_is_asked_whether_code_may_run(
    copy_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """A class of the model's own is refused; one for its configuration is not needed."""
    asked: list[str] = []
    monkeypatch.setattr(builtins, "input", lambda prompt="": asked.append(prompt) or "n")
    folder = copy_of("byte_level", tokenizer_class="Custom")
    code = {"AutoConfig": "custom.Config", "AutoTokenizer": ["custom.Custom", None]}
    change_json(folder / place, model_type="custom", auto_map=code)
    if place == "config.json":
        assert load_tokenizer(folder).encode("hi")
    else:
        with pytest.raises(ModelError, match="--trust-remote-code"):
            load_tokenizer(folder)
    assert asked == []


def test_a_folder_of_other_files_has_no_tokenizer(tmp_path: Path) -> None:
    """The error says which files are needed."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "notes.txt").write_text("x")
    said = "no tokenizer could be loaded: neither tokenizer.json nor tokenizer.model is there"
    text = error_line(ModelError, load_tokenizer, tmp_path)
    assert text.startswith(f"{tmp_path}: {said}")


def test_nothing_is_looked_up_on_the_hub(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory is all there is to a tokenizer."""
    opened = raising(AssertionError("a connection was opened"))
    monkeypatch.setattr(socket.socket, "connect", opened)
    for folder in directories.values():
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("other", "options"),
    [("a<|im_end|>", {}), ("<|im_end|>b", {}), ("x<|im", {}), ("|>", {"single_word": True})],
    ids=["longer", "goes on", "runs into it", "whole words"],
)
def test_a_token_that_takes_a_part_of_another_makes_no_parts(
    copy_of: Callable[..., Path], other: str, options: dict[str, Any]
) -> None:
    """The end of a message is a place to cut only if it is always found there."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Fast

    folder = copy_of("byte_level")
    text = "a<|im_end|>b x<|im_end|>c"
    assert len(HuggingFaceTokenizer(folder).parts(text)) == 3
    fast = Fast.from_file(str(folder / "tokenizer.json"))
    fast.add_special_tokens([AddedToken(other, normalized=False, **options)])
    fast.save(str(folder / "tokenizer.json"))
    assert HuggingFaceTokenizer(folder).parts(text) == [text]
