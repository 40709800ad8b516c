"""The bytes of tokens join to the text, and masks of them lead to valid answers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from mlxrunner import OptionError
from mlxrunner.engine.constrain import constraint_of
from mlxrunner.options import GenerateOptions
from mlxrunner.tokenizer import Tokenizer, load_tokenizer
from mlxrunner.tokenizer.base import Vocabulary

TEXTS = [
    '{"name": "größer", "n": [1, 2.5]}',
    "the quick brown fox  jumps\n\tover",
    "日本語 and 😀🙂",
    "two  spaces",
]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "the quick": {"enum": ["brown fox", "größer als", "日本語", "😀", 12345, None]},
        "name": {"type": "string", "maxLength": 12},
        "tokens": {
            "type": "array",
            "items": {"type": "number", "minimum": 0, "maximum": 10},
            "maxItems": 3,
        },
    },
    "required": ["the quick", "name", "tokens"],
    "additionalProperties": False,
}


def walk(tokenizer: Tokenizer, seed: int, **form: Any) -> tuple[str, list[int]]:
    """Return a blindly chosen answer of possible tokens as its reader sees it after a prompt."""
    rng = random.Random(seed)
    width = tokenizer.vocab_size + 7
    constraint = constraint_of(GenerateOptions.of(**form), tokenizer, width)
    assert constraint is not None
    stream, shown, chosen = tokenizer.stream(tokenizer.encode("a prompt")), "", []
    while not constraint.is_done:
        token = int(rng.choice(np.flatnonzero(constraint.mask(width)).tolist()))
        chosen.append(token)
        constraint.advance(token)
        if token not in tokenizer.stop_tokens:
            shown += stream.add(token)
    return shown + stream.finish(), chosen


@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_of_a_text_are_its_bytes(tokenizer: Tokenizer, text: str) -> None:
    """Some tokenizers put a space in front."""
    pieces = tokenizer.vocabulary.pieces
    spelled = b"".join(pieces[token] or b"" for token in tokenizer.encode_more(text)).decode()
    assert spelled in (text, " " + text)
    assert tokenizer.vocabulary.can_spell(text)


def test_blind_choices_among_the_possible_tokens_make_valid_json(tokenizer: Tokenizer) -> None:
    """The reader of the chunks sees whole characters, and no space lost or added."""
    validator = Draft202012Validator(SCHEMA)
    for seed in range(40):
        shown, _ = walk(tokenizer, seed, schema=SCHEMA)
        validator.validate(json.loads(shown))


def test_blind_choices_end_in_one_of_the_choices(tokenizer: Tokenizer) -> None:
    """Also where one begins like another, with a space, or like a special token."""
    choices = [
        "größer",
        "größer als",
        "日本",
        "日本語",
        "😀",
        " space",
        "</s>",
        "<s>x",
        "<|im_end|>",
        "\n",
    ]
    seen = {walk(tokenizer, seed, choices=choices)[0] for seed in range(60)}
    assert seen <= set(choices)
    assert len(seen) >= 8


def test_special_tokens_are_no_text(tokenizer: Tokenizer) -> None:
    """None of them is ever inside an answer, however free that is; an end may be the last one."""
    vocabulary = tokenizer.vocabulary
    special = {token for token, piece in enumerate(vocabulary.pieces) if piece is None}
    assert tokenizer.stop_tokens <= special
    for seed in range(10):
        tokens = walk(tokenizer, seed, schema={"type": "string", "maxLength": 60})[1]
        assert not special & set(tokens)


def test_the_demo_model_has_marks_that_are_no_text() -> None:
    """Symbols of its tokenizer.model, not listed anywhere as special."""
    import mlxrunner.models

    tokenizer = load_tokenizer(Path(mlxrunner.models.__file__).parent / "demo")
    pieces = tokenizer.vocabulary.pieces
    assert [token for token, piece in enumerate(pieces) if piece is None] == [0, 1, 2, 3, 4]
    for seed in range(20):
        json.loads(walk(tokenizer, seed, schema=SCHEMA)[0])


def test_a_vocabulary_with_gaps_spells_what_it_can() -> None:
    """Exactly the texts that some tokens together are."""
    vocabulary = Vocabulary([b"ab", b"c", None, b"abc", "é".encode(), b""])
    assert [
        text
        for text in ("ab", "abcab", "cabc", "éab", "a", "b", "abb", "e")
        if vocabulary.can_spell(text)
    ] == ["ab", "abcab", "cabc", "éab"]


def word_pieces(folder: Path) -> None:
    """BERT: the decoder puts spaces between words by rules of its own."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers

    letters = [chr(code) for code in range(33, 127)]
    vocab = {
        piece: token
        for token, piece in enumerate(
            ["[UNK]", "</s>", *letters, *(f"##{letter}" for letter in letters)]
        )
    }
    fast = Fast(models.WordPiece(vocab, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    fast.decoder = decoders.WordPiece()
    fast.add_special_tokens(["</s>"])
    fast.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text('{"model_type": "llama"}')


def test_a_tokenizer_whose_tokens_are_not_bytes_is_refused(tmp_path: Path) -> None:
    """In one line, each time it is asked."""
    word_pieces(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    for _ in range(2):
        with pytest.raises(
            OptionError, match="this model's tokenizer does not spell its tokens byte by byte"
        ):
            constraint_of(GenerateOptions.of(choices=["yes"]), tokenizer, 300)


def test_added_words_are_not_used(copy_of: Callable[..., Path]) -> None:
    """Added words between a tokenizer.json's pieces are never part of an answer in a form."""
    folder = copy_of("byte_level")
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    added = {
        "id": 403,
        "content": "<think>",
        "special": False,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
    }
    content["added_tokens"].append(added)
    file.write_text(json.dumps(content))
    tokenizer = load_tokenizer(folder)
    token = tokenizer.encode("<think>")[0]
    assert tokenizer.vocabulary.pieces[token] is None
    shown, tokens = walk(tokenizer, 0, choices=["<think>"])
    assert shown == "<think>"
    assert token not in tokens
