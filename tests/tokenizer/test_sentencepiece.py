"""A `tokenizer.model` has pieces, symbols and tokens beyond them, or damaged side files."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.models import error_line
from support.tokenizers import Load

from mlxrunner import ModelError
from mlxrunner.tokenizer import Tokenizer, load_tokenizer
from mlxrunner.tokenizer.sentencepiece import SentencePieceTokenizer

SAYS = "{{ messages[0].content }}"
"""A template of one message."""


@pytest.fixture
def prefix(tokenizers: dict[str, Tokenizer]) -> SentencePieceTokenizer:
    """Puts a space in front of a text."""
    tokenizer = tokenizers["spm_prefix"]
    assert isinstance(tokenizer, SentencePieceTokenizer)
    return tokenizer


@pytest.fixture
def plain(tokenizers: dict[str, Tokenizer]) -> SentencePieceTokenizer:
    """Does not."""
    tokenizer = tokenizers["spm_plain"]
    assert isinstance(tokenizer, SentencePieceTokenizer)
    return tokenizer


def test_a_tokenizer_json_wins_over_a_tokenizer_model(
    copy_of: Callable[..., Path], directories: dict[str, Path]
) -> None:
    """It is the one that the publisher changed last."""
    folder = copy_of("spm_prefix", eos_token="</s>")
    assert isinstance(load_tokenizer(folder), SentencePieceTokenizer)
    shutil.copy(directories["metaspace"] / "tokenizer.json", folder)
    assert not isinstance(load_tokenizer(folder), SentencePieceTokenizer)


@pytest.mark.parametrize("text", ["the quick fox", "größer 日本語 😀", "  two", "", "\n"])
def test_text_is_encoded_as_sentencepiece_itself_does(
    directories: dict[str, Path], text: str
) -> None:
    """BOS aside."""
    import sentencepiece

    for kind in ("spm_prefix", "spm_plain"):
        file = str(directories[kind] / "tokenizer.model")
        model = sentencepiece.SentencePieceProcessor(model_file=file)
        tokenizer = load_tokenizer(directories[kind])
        assert tokenizer.encode_more(text) == model.encode(text)
        assert tokenizer.encode(text) == [model.bos_id(), *model.encode(text)]
        assert tokenizer.decode(model.encode(text)) == model.decode(model.encode(text))
        assert tokenizer.vocab_size == model.get_piece_size()


def test_the_space_in_front_is_taken_away_once(
    prefix: SentencePieceTokenizer, plain: SentencePieceTokenizer
) -> None:
    """Only the tokenizer that adds it takes it away."""
    assert prefix.decode(prefix.encode_more(" x")) == " x"
    assert prefix.decode(prefix.encode_more("x")) == "x"
    assert plain.decode(plain.encode_more(" x")) == " x"
    assert prefix.piece_bytes(prefix.encode_more("x")[0]) == b" "


@pytest.mark.parametrize("symbol", ["<ud>", "<ctl>", "</s>"])
def test_a_symbol_within_a_text_is_one_token(prefix: SentencePieceTokenizer, symbol: str) -> None:
    """User-defined ones are found by sentencepiece, control symbols by us."""
    tokens = prefix.encode_more(f"a{symbol}b")
    (token,) = [token for token in tokens if prefix.decode([token]) == symbol]
    assert prefix.piece_bytes(token) == symbol.encode()


def test_a_symbol_that_begins_like_another_is_found_whole(loaded: Load) -> None:
    """The longest name first."""
    added = {"500": {"content": "<a>"}, "501": {"content": "<a><b>"}, "502": {"content": "<a>x"}}
    tokenizer = loaded("spm_plain", added_tokens_decoder=added)
    assert tokenizer.encode_more("<a><b><a>x<a>") == [501, 502, 500]


def test_names_of_tokens_are_no_patterns(loaded: Load) -> None:
    """Dots and brackets in them are meant as they are."""
    tokenizer = loaded("spm_plain", added_tokens_decoder={"500": {"content": "[.*]|"}})
    assert 500 in tokenizer.encode_more("a[.*]|b")
    assert 500 not in tokenizer.encode_more("axb|")


@pytest.mark.parametrize("place", ["tokenizer_config.json", "added_tokens.json"])
def test_tokens_beyond_the_pieces_are_known(copy_of: Callable[..., Path], place: str) -> None:
    """Publishers add them without training again; the vocabulary grows by them."""
    added = {"430": {"content": "<|im_end|>", "special": True}}
    if place == "tokenizer_config.json":
        folder = copy_of("spm_plain", added_tokens_decoder=added)
    else:
        folder = copy_of("spm_plain")
        (folder / place).write_text(json.dumps({"<|im_end|>": 430}))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.vocab_size == 431
    assert tokenizer.encode_more("a<|im_end|>")[-1] == 430
    assert tokenizer.decode([430]) == "<|im_end|>"
    stream = tokenizer.stream(tokenizer.encode("a"))
    assert stream.add(430) == "<|im_end|>"


def test_an_added_end_of_turn_that_the_template_writes_is_a_stop(
    loaded: Load, templates: dict[str, str]
) -> None:
    """Many chat models that were made from Mistral have one."""
    added = {"420": {"content": "<|im_end|>"}, "421": {"content": "<|im_start|>"}}
    tokenizer = loaded("spm_prefix", added_tokens_decoder=added, chat_template=templates["chatml"])
    assert tokenizer.stop_tokens == {2, 420}
    rendered = tokenizer.encode(tokenizer.render([{"role": "user", "content": "hi"}]))
    assert (rendered.count(421), rendered.count(420)) == (2, 1)


@pytest.mark.parametrize(
    "name", ["<|im_end|>", {"content": "<|im_end|>", "special": True}], ids=["text", "object"]
)
def test_end_and_beginning_may_be_named_in_the_configuration(
    copy_of: Callable[..., Path], name: Any
) -> None:
    """They are texts or objects, also beyond the pieces."""
    added = {"420": {"content": "<|im_end|>"}}
    folder = copy_of(
        "spm_plain",
        added_tokens_decoder=added,
        eos_token=name,
        bos_token="</s>",
        chat_template="{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
    )
    tokenizer = load_tokenizer(folder)
    assert tokenizer.stop_tokens == {420}
    assert tokenizer.encode("") == [2]
    assert tokenizer.render([{"role": "user", "content": "hi"}]) == "</s>hi<|im_end|>"


def test_a_named_token_that_does_not_exist_is_none(loaded: Load) -> None:
    """No BOS rather than an unknown token."""
    tokenizer = loaded("spm_prefix", bos_token="<nosuch>", eos_token="<nosuch>")
    assert tokenizer.encode("") == []
    assert tokenizer.stop_tokens == frozenset()


@pytest.mark.parametrize("token", [-1, 420, 10**6])
def test_an_id_that_is_no_token_stands_for_nothing(
    prefix: SentencePieceTokenizer, token: int
) -> None:
    """A model's logits may be wider than its vocabulary."""
    assert prefix.piece_bytes(token) == b""
    assert prefix.decode([*prefix.encode_more("a"), token]) == "a"


def test_bytes_are_bytes(prefix: SentencePieceTokenizer) -> None:
    """Each of the 256, wherever they lie among the pieces."""
    pieces = [prefix.piece_bytes(token) for token in range(prefix.vocab_size)]
    assert {bytes([byte]) for byte in range(256)} <= set(pieces)


def test_a_model_without_a_configuration_works(
    directories: dict[str, Path], tmp_path: Path
) -> None:
    """A tokenizer.model alone: its own BOS and end, the fallback template."""
    shutil.copy(directories["spm_prefix"] / "tokenizer.model", tmp_path)
    tokenizer = load_tokenizer(tmp_path, [9])
    assert tokenizer.encode("") == [1]
    assert tokenizer.stop_tokens == {2, 9}
    assert tokenizer.template_stops


def test_a_model_without_bos_and_end_has_none(tmp_path: Path) -> None:
    """Trained that way."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a b c d"] * 9),
        model_writer=model,
        vocab_size=7,
        bos_id=-1,
        eos_id=-1,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("") == []
    assert tokenizer.stop_tokens == frozenset()
    assert tokenizer.render([{"role": "user", "content": "a"}]) == "User: a\nAssistant:"


STRANGE = [{"x": {"content": "<x>"}}, *({"500": it} for it in ("<x>", {}, {"content": 3}))]


@pytest.mark.parametrize(
    "decoder",
    [None, [], "x", *STRANGE, {"500": {"content": ""}}],
    ids=["null", "list", "text", "no id", "no object", "no content", "number", "empty"],
)
def test_strange_added_tokens_are_passed_over(copy_of: Callable[..., Path], decoder: Any) -> None:
    """They are only an addition."""
    folder = copy_of("spm_plain")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["added_tokens_decoder"] = decoder
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_tokenizer(folder).vocab_size == 420


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer_config.json", b"{", "not readable as JSON"),
        ("tokenizer_config.json", b"[]", "has to be a JSON object, not list"),
        ("tokenizer_config.json", b"\xff", "not readable as JSON"),
        ("tokenizer_config.json", b"[" * 100_000, "not readable as JSON"),
        ("added_tokens.json", b"", "not readable as JSON"),
        ("added_tokens.json", b"3", "has to be a JSON object, not int"),
        ("chat_template.json", b"{", "not readable as JSON"),
        ("chat_template.json", b"[]", "has to be a JSON object, not list"),
        ("chat_template.jinja", b"\xff", "can't be read"),
        ("tokenizer.model", b"", "not a SentencePiece model, or damaged"),
        ("tokenizer.model", b"garbage" * 100, "not a SentencePiece model, or damaged"),
    ],
)
def test_a_broken_file_is_named(
    copy_of: Callable[..., Path], file: str, content: bytes, message: str
) -> None:
    """In one line."""
    folder = copy_of("spm_prefix")
    (folder / file).write_bytes(content)
    assert error_line(ModelError, load_tokenizer, folder).startswith(f"{folder / file}: {message}")


@pytest.mark.parametrize("cut", [1, 10, 1000, -1])
def test_a_truncated_tokenizer_model_is_named(copy_of: Callable[..., Path], cut: int) -> None:
    """Wherever the download broke off."""
    file = copy_of("spm_prefix") / "tokenizer.model"
    file.write_bytes(file.read_bytes()[:cut])
    damaged = r"tokenizer\.model: not a SentencePiece model, or damaged"
    with pytest.raises(ModelError, match=damaged):
        load_tokenizer(file.parent)


@pytest.mark.parametrize(
    ("template", "rendered"),
    [
        ([{"name": "rag", "template": "rag " + SAYS}], "rag hi"),
        (["x", {"name": "default", "template": "yes " + SAYS}], "yes hi"),
        ({"default": "x " + SAYS}, "x hi"),
        (3, None),
        ("", None),
    ],
    ids=["the only one", "strange list", "object", "number", "empty"],
)
def test_a_template_is_a_text_or_the_default_of_several(
    loaded: Load, template: Any, rendered: str | None
) -> None:
    """Anything else is none: the fallback."""
    tokenizer = loaded("spm_prefix", chat_template=template)
    expected = "User: hi\nAssistant:" if rendered is None else rendered
    assert tokenizer.render([{"role": "user", "content": "hi"}]) == expected
