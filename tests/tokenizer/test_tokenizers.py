"""Texts come back, BOS stands there once and answers end, with any tokenizer library."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sample import examples
from support.tokenizers import Load

from mlxrunner import PromptError
from mlxrunner.tokenizer import Tokenizer, load_tokenizer

FIXTURE = examples(80)
HOSTILE = {
    "empty": "",
    "one space": " ",
    "spaces": "  two   three    ",
    "leading space": " x",
    "newlines": "\n\n\r\n\t",
    "emoji": "😀👩‍👩‍👧‍👦🏳️‍🌈",
    "combining": "e\u0301\u0323 n\u0303 \u0301",
    "right to left": "שלום عالم \u202e",
    "CJK": "日本語、中文。한국어",
    "NUL": "a\0b\0",
    "control characters": "\x01\x02\x1b[31m\x7f\x85",
    "zero width": "a\u200b\ufeffb\u2060",
    "beyond the BMP": "𝄞𐍈\U0010ffff",
    "10,000 characters": "a b" * 3333 + "!",
    "10,000 of one": "x" * 10_000,
    "looks like a byte": "<0x41> <0x00>",
    "looks like a token": "<s </s <|im_start <pad>",
    "replacement character": "\ufffd",
}
BOS = dict.fromkeys(("spm_prefix", "spm_plain", "metaspace", "metaspace_legacy"), "<s>")
BOS["byte_level_bos"] = "<|begin_of_text|>"
END = {"spm_plain": "<end_of_turn>", "byte_level": "<|im_end|>", "byte_level_bos": "<|eot_id|>"}
"""A special token of each kind's template; "</s>" for the others."""
USER: Any = [{"role": "user", "content": "hi"}]


def comes_back(tokenizer: Tokenizer, kind: str, text: str) -> bool:
    """Return True if `text` encoded and decoded is the same.

    Metaspace takes a first space for the one that it would add.
    """
    tokens = tokenizer.encode(text)[1 if kind in BOS else 0 :]
    return tokenizer.decode(tokens) == (text.removeprefix(" ") if kind == "metaspace" else text)


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_text_comes_back(tokenizer: Tokenizer, kind: str, text: str) -> None:
    """Byte for byte."""
    assert comes_back(tokenizer, kind, text)


@FIXTURE
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁<")))
def test_any_text_comes_back(tokenizer: Tokenizer, kind: str, text: str) -> None:
    """Every character has a token or bytes.

    Not here: names of tokens, and SentencePiece's mark for a space, which is read as one.
    """
    assert comes_back(tokenizer, kind, text)


@FIXTURE
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_every_token_of_a_text_is_in_the_vocabulary(tokenizer: Tokenizer, text: str) -> None:
    """The embedding needs that."""
    tokens = tokenizer.encode(text)
    assert all(isinstance(token, int) and 0 <= token < tokenizer.vocab_size for token in tokens)


@pytest.mark.parametrize("text", ["\ud800", "a\udcffb", "ok \udfff"])
def test_half_a_character_is_a_prompt_error(tokenizer: Tokenizer, text: str) -> None:
    """Python makes one of bytes that are not UTF-8; the place is in the message."""
    place = next(i for i, character in enumerate(text) if "\ud800" <= character <= "\udfff")
    for encode in (tokenizer.encode, tokenizer.encode_more):
        with pytest.raises(PromptError, match=f"not valid Unicode: .* at character {place}"):
            encode(text)


def test_a_locale_that_is_not_utf_8_is_named(tokenizer: Tokenizer, monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.getfilesystemencoding", lambda: "ascii")
    with pytest.raises(PromptError, match=r"; read as ascii: set PYTHONUTF8=1$"):
        tokenizer.encode(b"Zo\xc3\xab".decode("ascii", "surrogateescape"))


def test_a_long_text_is_encoded_without_a_word(
    tokenizer: Tokenizer, capfd: pytest.CaptureFixture[str], caplog: Any
) -> None:
    """The room for it is the runner's concern; no library comments on it."""
    tokenizer.encode("x y " * 5000)
    assert capfd.readouterr() == ("", "")
    assert caplog.text == ""


def test_a_length_limit_of_the_tokenizer_is_not_commented_on(loaded: Load, caplog: Any) -> None:
    """transformers would warn."""
    tokenizer = loaded("byte_level", model_max_length=10)
    assert len(tokenizer.encode("x" * 100)) > 10
    assert caplog.text == ""


# BOS


@pytest.mark.parametrize("text", ["", "hi", " hi", "\n", "hi {bos}"])
def test_bos_stands_in_front_once(tokenizer: Tokenizer, kind: str, text: str) -> None:
    """Raw text has it, also if it begins with its name; no text has it if the model wants none."""
    if kind not in BOS:
        assert tokenizer.encode(text) == tokenizer.encode_more(text)
        return
    bos = tokenizer.encode("")
    assert len(bos) == 1
    assert tokenizer.decode(bos) == BOS[kind]
    text = text.format(bos=BOS[kind])
    for spelled in (text, BOS[kind] + text):
        tokens = tokenizer.encode(spelled)
        assert tokens[:1] == bos
        assert tokens.count(bos[0]) == 1 + text.count(BOS[kind])


def test_text_that_goes_on_has_no_bos(tokenizer: Tokenizer, kind: str) -> None:
    """Unless it is spelled."""
    bos = tokenizer.encode("")
    assert not set(bos) & set(tokenizer.encode_more("hi"))
    if kind in BOS:
        assert tokenizer.encode_more("hi" + BOS[kind])[-1:] == bos


@FIXTURE
@given(texts=st.lists(st.text("ab .\n<|>é", max_size=8), max_size=4))
def test_the_parts_of_a_text_make_its_tokens(
    tokenizer: Tokenizer, kind: str, texts: list[str]
) -> None:
    """A conversation may be encoded message by message, whatever its messages say."""
    text = END.get(kind, "</s>").join(texts)
    cut = getattr(tokenizer, "parts", lambda text: [text])
    first, *rest = cut(text)
    assert "".join([first, *rest]) == text
    apart = [token for part in rest for token in tokenizer.encode_more(part)]
    assert [*tokenizer.encode(first), *apart] == tokenizer.encode(text)


@FIXTURE
@given(before=st.text("ab .\n", max_size=8), after=st.text("ab .\n", max_size=8))
def test_a_text_may_be_encoded_in_two_parts_that_meet_at_a_special_token(
    tokenizer: Tokenizer, kind: str, before: str, after: str
) -> None:
    """A conversation that continues after an end token has the tokens of encoding it at once."""
    end = END.get(kind, "</s>")
    whole = tokenizer.encode(before + end + after)
    assert tokenizer.encode(before + end) + tokenizer.encode_more(after) == whole
    assert tokenizer.encode(before) + tokenizer.encode_more(end + after) == whole


@pytest.mark.parametrize("text", [" b", "b", "\nb", " [INST] b"])
@pytest.mark.parametrize("kind", ["spm_plain", "byte_level", "byte_level_bos", "metaspace"])
def test_text_that_goes_on_gets_no_space_of_its_own(
    tokenizers: dict[str, Tokenizer], kind: str, text: str
) -> None:
    """It is not the beginning of a text."""
    tokenizer = tokenizers[kind]
    both = tokenizer.decode([*tokenizer.encode("a"), *tokenizer.encode_more(text)])
    assert both.endswith("a" + text)


@pytest.mark.parametrize("kind", BOS)
@pytest.mark.parametrize(
    "with_bos", [True, False], ids=["template with BOS", "template without BOS"]
)
def test_a_rendered_conversation_has_bos_once(
    loaded: Load, templates: Any, kind: str, with_bos: bool
) -> None:
    """The template may write it or not."""
    template = ("{{ bos_token }}" if with_bos else "") + templates["chatml"]
    tokenizer = loaded(kind, chat_template=template)
    text = tokenizer.render(USER)
    assert text.startswith(BOS[kind]) == with_bos
    tokens = tokenizer.encode(text)
    bos = tokenizer.encode("")
    assert tokens[:1] == bos
    assert tokens.count(bos[0]) == 1


@pytest.mark.parametrize("kind", ["spm_prefix", "spm_plain"])
def test_a_tokenizer_that_wants_no_bos_gets_none(loaded: Load, kind: str) -> None:
    """`add_bos_token: false`, although the model has the token."""
    tokenizer = loaded(kind, add_bos_token=False, chat_template=None)
    assert tokenizer.encode("") == []
    assert "<s>" not in tokenizer.decode(tokenizer.encode("hi"))


# Stop tokens


@pytest.mark.parametrize("given_tokens", [(), (7,), (7, 9)], ids=["none", "one", "two"])
def test_stop_tokens_are_the_given_ones_the_tokenizers_and_the_templates(
    directories: Any, kind: str, given_tokens: Any
) -> None:
    """Stop tokens are the end of a sequence, the configuration's, and the template's turn end."""
    tokenizer = load_tokenizer(directories[kind], given_tokens)
    eos = {"byte_level": "<|endoftext|>", "byte_level_bos": "<|end_of_text|>"}.get(kind, "</s>")
    named = {eos} | ({END[kind]} if kind in END else set())
    tokens = {token for name in named for token in tokenizer.encode_more(name)}
    assert len(tokens) == len(named)
    assert tokenizer.stop_tokens == tokens | set(given_tokens)


@pytest.mark.parametrize("kind", END)
def test_an_end_of_turn_that_the_template_does_not_write_is_no_stop(
    loaded: Load, templates: Any, kind: str
) -> None:
    """A base model may have the token for other purposes."""
    ended = loaded(kind, chat_template=templates["mistral"])
    assert not set(ended.encode_more(END[kind])) & ended.stop_tokens


def test_an_end_of_turn_that_is_no_token_is_no_stop(loaded: Load, templates: Any) -> None:
    """Its letters don't end an answer."""
    assert loaded("spm_prefix", chat_template=templates["chatml"]).stop_tokens == {2}


def test_every_stop_token_ends_a_message(tokenizer: Tokenizer) -> None:
    """A token that ends an answer ends the message that it is."""
    assert tokenizer.stop_tokens <= tokenizer.message_ends


@pytest.mark.parametrize("name", ["[/INST]", "<|end|>"])
def test_the_end_of_a_users_message_ends_no_answer(loaded: Load, name: str) -> None:
    """Where the vocabulary has such a token."""
    without = loaded("spm_prefix")
    assert without.message_ends == without.stop_tokens
    with_it = loaded("spm_prefix", added_tokens_decoder={"420": {"content": name}})
    assert with_it.message_ends == with_it.stop_tokens | {420}
