"""A text that can't fit is refused before it is tokenized, and no other text is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.tokenizers import train_sentencepiece
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from mlxrunner import ContextLengthError
from mlxrunner.testing import ByteTokenizer
from mlxrunner.tokenizer import load_tokenizer
from mlxrunner.tokenizer.base import SHRINKS, check_text, letters_per_token
from mlxrunner.tokenizer.prompt import tokenize_prompt
from mlxrunner.tokenizer.sentencepiece import SentencePieceTokenizer

CONTEXT = 50
KNOWN = "byte_level byte_level_bos metaspace metaspace_legacy spm_prefix spm_plain".split()
TEXTS = [
    "again and again ",
    "日本語のテキスト",
    "ᄒ\u1161ᆫ",
    "aaaa",
    "xyz123,",
    "größer als früher ",
]


class Untouched:
    """A tokenizer that must not tokenize."""

    letters_per_token = 3

    def encode(self, text: str) -> list[int]:
        raise AssertionError("the text is tokenized")

    def render(self, messages: Any, **variables: Any) -> str:
        return "".join(str(message["content"]) for message in messages)


@pytest.mark.parametrize("kind", KNOWN)
@pytest.mark.parametrize("text", TEXTS)
def test_what_is_refused_has_too_many_tokens(
    directories: dict[str, Path], kind: str, text: str
) -> None:
    """Each tokenizer knows its longest token; a text that fits is never refused."""
    tokenizer: Any = load_tokenizer(directories[kind])
    letters = sum(map(str.isalnum, text))
    for count in (1, 10, 50, 400, tokenizer.letters_per_token * SHRINKS * CONTEXT // letters + 1):
        try:
            check_text(tokenizer, text * count, CONTEXT)
        except ContextLengthError:
            assert len(tokenizer.encode(text * count)) >= CONTEXT
            break
    else:
        raise AssertionError("the longest text is not refused")


@pytest.mark.parametrize("prompt", ["a" * 600, [{"role": "user", "content": "b" * 600}]])
def test_a_text_that_cannot_fit_is_not_tokenized(prompt: Any) -> None:
    """The error says both numbers, that the first is the least, and what to do."""
    tokenizer: Any = Untouched()
    with pytest.raises(
        ContextLengthError,
        match=r"has at least 50 tokens, .* in the context of 50 tokens: shorten it or load",
    ) as refused:
        tokenize_prompt(tokenizer, prompt, context=CONTEXT)
    assert (refused.value.tokens, refused.value.is_least) == (50, True)
    with pytest.raises(AssertionError, match="is tokenized"):
        tokenize_prompt(tokenizer, prompt)  # a full context is shifted
    with pytest.raises(AssertionError, match="is tokenized"):
        tokenize_prompt(tokenizer, "a" * 599, context=CONTEXT)


def test_what_may_be_dropped_is_not_counted() -> None:
    """White space, signs and accents have no least number of tokens."""
    check_text(Untouched(), " \n\t.-\u0301" * 10_000, CONTEXT)


def test_an_unknown_tokenizer_refuses_nothing() -> None:
    """A tokenizer of a user need not know its longest token."""
    check_text(object(), "a" * 10_000, CONTEXT)
    with pytest.raises(ContextLengthError):
        check_text(ByteTokenizer(), "a" * 10_000, CONTEXT)


def backend(**parts: Any) -> Tokenizer:
    """A tokenizer with a token per byte, and one of five letters."""
    letters = [*pre_tokenizers.ByteLevel.alphabet(), "hello"]
    vocab = {letter: token for token, letter in enumerate(letters)}
    made = Tokenizer(parts.pop("model", None) or models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    for name, part in parts.items():
        setattr(made, name, part)
    return made


@pytest.mark.parametrize(
    ("parts", "longest"),
    [
        ({}, 5),
        ({"normalizer": normalizers.NFC()}, 5),
        ({"normalizer": normalizers.Replace("  ", " ")}, 5),
        ({"normalizer": normalizers.Replace("the", "")}, None),
        ({"normalizer": normalizers.Replace(Regex("."), "")}, None),
        ({"normalizer": normalizers.Sequence([normalizers.StripAccents()])}, None),
        ({"pre_tokenizer": None}, None),
        ({"pre_tokenizer": pre_tokenizers.Split(Regex("a+"), "removed")}, None),
        ({"model": models.BPE(vocab={"a": 0, "<unk>": 1}, merges=[], unk_token="<unk>")}, None),
        ({"model": models.WordLevel(vocab={"a": 0}, unk_token="a")}, None),
        ({"model": models.Unigram([("a", 0.0)], 0, False)}, None),
    ],
    ids=[
        "bytes", "nfc", "spaces", "dropped word", "regex", "unknown normalizer", "no bytes",
        "removed", "unknown letters", "words", "unigram",
    ],
)  # fmt: skip  # names by rows
def test_only_certain_tokenizers_have_a_longest_token(
    parts: dict[str, Any], longest: int | None
) -> None:
    """There is none if something may be dropped, or is one token as unknown, however long."""
    assert letters_per_token(backend(**parts)) == longest


@pytest.mark.parametrize("rules", ["nmt_nfkc", "nmt_nfkc_cf", "own"])
def test_own_rules_of_sentencepiece_have_no_longest_token(tmp_path: Path, rules: str) -> None:
    """A model's own rules may drop letters, so a text of them fits however long it is."""
    dropping = tmp_path / "rules.tsv"
    dropping.write_text("61\t\n")  # the letter a becomes nothing
    own = {"normalization_rule_name": "", "normalization_rule_tsv": str(dropping)}
    options = own if rules == "own" else {"normalization_rule_name": rules}
    (tmp_path / "tokenizer.model").write_bytes(train_sentencepiece(**options))
    tokenizer = SentencePieceTokenizer(tmp_path)
    text = "a" * 10_000
    if rules == "own":
        assert len(tokenizer.encode(text)) < CONTEXT
        check_text(tokenizer, text, CONTEXT)
    else:
        with pytest.raises(ContextLengthError):
            check_text(tokenizer, text, CONTEXT)
