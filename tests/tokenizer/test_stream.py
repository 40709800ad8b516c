"""The stream gives what decoding at once gives, whole characters and exact stops."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sample import examples

from mlxrunner.templates.messages import overlap
from mlxrunner.tokenizer import Tokenizer
from mlxrunner.tokenizer.base import ByteStream, DecodeStream, StopScanner

BROKEN = "\ufffd"
FIXTURE = examples(60)
"""For tests that use a tokenizer, which no example changes."""
# SentencePiece's and Metaspace's mark for a space can't be told from one; U+FFFD is the subject of
# tests of its own.
texts = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="▁" + BROKEN), max_size=40
)
LIVELY = "the | dog|é|ß|日本|😀|👩‍👧|e\u0301|\n|  |\0|\x7f|<s>|x".split("|")
lively = st.lists(st.sampled_from(LIVELY)).map("".join)


def streamed(tokenizer: Tokenizer, context: Sequence[int], tokens: Sequence[int]) -> list[str]:
    """The pieces, the last one from `finish`."""
    stream = tokenizer.stream(context)
    return [*(stream.add(token) for token in tokens), stream.finish()]


def shown(tokenizer: Tokenizer, context: Sequence[int], tokens: Sequence[int]) -> str:
    return "".join(streamed(tokenizer, context, tokens))


def decoded_after(tokenizer: Tokenizer, context: Sequence[int], tokens: Sequence[int]) -> str:
    """Return what decoding everything at once adds to the context."""
    before = tokenizer.decode(context)
    text = tokenizer.decode([*context, *tokens])
    assert text.startswith(before)
    return text[len(before) :]


@FIXTURE
@given(before=texts | lively, text=texts | lively)
def test_a_stream_adds_up_to_the_decoded_text(tokenizer: Tokenizer, before: str, text: str) -> None:
    """For any text after any other, and no piece holds a broken character."""
    context = [*tokenizer.encode("a"), *tokenizer.encode_more(before)]
    tokens = tokenizer.encode_more(text)
    text = shown(tokenizer, context, tokens)
    assert text == decoded_after(tokenizer, context, tokens)
    assert BROKEN not in text


@FIXTURE
@given(text=texts | lively, data=st.data())
def test_a_stream_cut_anywhere_shows_whole_characters_and_marks_the_broken_one(
    tokenizer: Tokenizer, text: str, data: Any
) -> None:
    """Every piece before the end is a piece of the whole text; only `finish` may give U+FFFD."""
    context = tokenizer.encode("a")
    tokens = tokenizer.encode_more(text)
    whole = decoded_after(tokenizer, context, tokens)
    count = data.draw(st.integers(0, len(tokens)))
    *pieces, last = streamed(tokenizer, context, tokens[:count])
    shown = "".join(pieces)
    assert whole.startswith(shown + last.rstrip(BROKEN))
    assert BROKEN not in shown
    assert len(last) <= 4


@FIXTURE
@given(text=lively, data=st.data())
def test_a_stream_goes_on_from_any_context_that_ends_with_a_character(
    tokenizer: Tokenizer, text: str, data: Any
) -> None:
    """The context and the answer may share a text in any way."""
    tokens = tokenizer.encode("a" + text)
    at = data.draw(st.integers(1, len(tokens)))
    while tokenizer.decode(tokens[:at]).endswith(BROKEN):
        at -= 1
    context, rest = tokens[:at], tokens[at:]
    assert shown(tokenizer, context, rest) == decoded_after(tokenizer, context, rest)


@pytest.mark.parametrize("kind", ["spm_prefix", "spm_plain", "byte_level", "byte_level_bos"])
@FIXTURE
@given(data=st.data())
def test_a_stream_of_random_tokens_adds_up_to_the_decoded_text(
    tokenizers: dict[str, Tokenizer], kind: str, data: Any
) -> None:
    """The bytes may be broken in any way, for any length."""
    tokenizer = tokenizers[kind]
    context = tokenizer.encode("a dog")
    byte_like = st.integers(0, 260)
    tokens = data.draw(st.lists(byte_like | st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    assert shown(tokenizer, context, tokens) == decoded_after(tokenizer, context, tokens)


@FIXTURE
@given(data=st.data())
def test_random_tokens_never_break_a_stream(tokenizer: Tokenizer, data: Any) -> None:
    """Text after random ids, also beyond the vocabulary, is whole again."""
    context = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=12))
    tokens = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    text = shown(tokenizer, context, [*tokens, *tokenizer.encode_more("the dog")])
    assert text.endswith("the dog")


@pytest.mark.parametrize("count", [0, 1], ids=["at once", "behind a token without text"])
def test_a_leading_space_of_the_answer_is_kept(tokenizer: Tokenizer, count: int) -> None:
    """Decoding the first word alone would strip it; an id beyond the vocabulary is no word."""
    tokens = tokenizer.encode("the lazy dog")
    at = next(i for i in range(len(tokens)) if tokenizer.decode(tokens[: i + 1]).endswith("the"))
    answer = [*[tokenizer.vocab_size + 1] * count, *tokens[at + 1 :]]
    assert shown(tokenizer, tokens[: at + 1], answer) == " lazy dog"


def test_a_character_of_several_tokens_comes_with_its_last_one(tokenizer: Tokenizer) -> None:
    """Nothing, nothing, nothing, then all of it."""
    context, character = tokenizer.encode("a"), "𝄞"
    tokens = tokenizer.encode(f"a{character}")[len(context) :]
    assert len(tokens) == 4
    assert streamed(tokenizer, context, tokens) == ["", "", "", character, ""]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_incomplete_character_at_the_end_is_marked(tokenizer: Tokenizer, count: int) -> None:
    """Behind another one that is shown whole."""
    context = tokenizer.encode("a")
    tokens = tokenizer.encode("a𝄞𝄞")[len(context) : len(context) + 4 + count]
    *pieces, last = streamed(tokenizer, context, tokens)
    assert "".join(pieces) == "𝄞"
    assert set(last) == {BROKEN}


def test_a_real_replacement_character_is_shown(tokenizer: Tokenizer) -> None:
    """The model may mean it."""
    context = tokenizer.encode("a")
    tokens = tokenizer.encode(f"a{BROKEN}b{BROKEN * 2}c{BROKEN}")[len(context) :]
    assert shown(tokenizer, context, tokens) == f"{BROKEN}b{BROKEN * 2}c{BROKEN}"


def test_an_endless_run_of_broken_bytes_is_shown_as_it_comes(tokenizer: Tokenizer) -> None:
    """Not held back until the end."""
    context = tokenizer.encode("a")
    byte = tokenizer.encode("a𝄞")[len(context)]
    pieces = streamed(tokenizer, context, [byte] * 100)
    assert len("".join(pieces[:-1])) > 80
    assert len("".join(pieces)) == 100


def test_a_context_that_ends_within_a_character_costs_no_more_than_that_one(
    tokenizer: Tokenizer, kind: str
) -> None:
    """An answer that was cut there by its limit and continues.

    Bytes that a decoder of whole texts can't tell are marked as broken.
    """
    tokens = tokenizer.encode("a𝄞b𝄞")
    rest = shown(tokenizer, tokens[:-7], tokens[-7:])
    assert (rest if kind.startswith("spm") else "𝄞" + rest.lstrip(BROKEN)) == "𝄞b𝄞"


@pytest.mark.parametrize("length", range(1, 13))
def test_a_context_that_is_cut_within_a_character_does_no_harm(
    tokenizer: Tokenizer, length: int
) -> None:
    """The runner hands over the last few tokens only."""
    tokens = tokenizer.encode("a 𝄞𝄞𝄞")
    answer = tokenizer.encode("a𝄞b")[-5:]
    assert shown(tokenizer, tokens[-length:], answer) == "𝄞b"


def test_special_tokens_are_shown_by_name(tokenizer: Tokenizer, kind: str) -> None:
    """The runner, not the stream, decides what ends an answer."""
    name = {"byte_level": "<|im_end|>", "byte_level_bos": "<|eot_id|>"}.get(kind, "</s>")
    context = tokenizer.encode("a")
    assert shown(tokenizer, context, tokenizer.encode_more(name)) == name


def test_streams_are_independent(tokenizer: Tokenizer) -> None:
    """Two answers may be read in turn."""
    context = tokenizer.encode("a")
    tokens = tokenizer.encode("a𝄞")[len(context) :]
    first, second = tokenizer.stream(context), tokenizer.stream(context)
    assert [first.add(tokens[0]), second.add(tokens[0])] == ["", ""]
    rests = [[stream.add(token) for token in tokens[1:]] for stream in (first, second)]
    assert rests == [["", "", "𝄞"]] * 2


def test_a_byte_stream_needs_no_context() -> None:
    """A tokenizer of bytes."""
    stream = ByteStream(lambda token: bytes([token]))
    assert [stream.add(byte) for byte in "né".encode()] + [stream.finish()] == ["n", "", "é", ""]


def test_a_decode_stream_decodes_a_few_tokens_at_a_time() -> None:
    """Its work does not grow with the text."""
    longest = 0

    def decode(tokens: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return bytes(tokens).decode("utf-8", "replace")

    stream = DecodeStream(decode, list(b"context" * 100))
    text = "größer 𝄞 " * 50
    assert "".join(stream.add(byte) for byte in text.encode()) == text
    assert longest < 20


def test_finishing_twice_adds_nothing(tokenizer: Tokenizer) -> None:
    """Whoever closes an answer may do so again."""
    stream = tokenizer.stream(tokenizer.encode("a"))
    stream.add(tokenizer.encode("a𝄞")[-4])
    assert stream.finish()
    assert stream.finish() == ""


# Stop strings


def cut(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """`text` up to the stop string that is complete first, found the slow way."""
    for end in range(len(text) + 1):
        found = [start for start in range(end) if text[start:end] in stops]
        if found:
            return text[: found[0]], True
    return text, False


few_letters = st.text("abc", max_size=14)
stop_lists = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = [0, *sorted(place % (len(text) + 1) for place in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(places)]


@given(text=few_letters, stops=stop_lists, cuts=st.lists(st.integers(0, 20), max_size=6))
def test_a_text_is_cut_at_the_first_stop_string_however_it_comes(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    """Any split gives what the whole text gives."""
    scanner, shown = StopScanner(stops), ""
    for piece in pieces_of(text, cuts):
        shown += scanner.add(piece)
        if scanner.stopped:
            break
    else:
        shown += scanner.finish()
    assert (shown, scanner.stopped) == cut(text, stops)


@given(text=few_letters, stops=stop_lists, cuts=st.lists(st.integers(0, 20), max_size=6))
def test_exactly_what_may_begin_a_stop_string_is_held_back(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    """Nothing less, and everything else is shown at once."""
    scanner, shown, so_far = StopScanner(stops), "", ""
    for piece in pieces_of(text, cuts):
        shown, so_far = shown + scanner.add(piece), so_far + piece
        if scanner.stopped:
            return
        beginnings = {stop[:n] for stop in stops for n in range(1, len(stop))}
        held = max((len(b) for b in beginnings if so_far.endswith(b)), default=0)
        assert shown == so_far[: len(so_far) - held]


@given(st.text("ab", max_size=8), st.text("ab", min_size=1, max_size=6))
def test_overlap(text: str, tag: str) -> None:
    """It is the longest end of a text that begins a tag, but for the whole tag."""
    ends = [n for n in range(len(tag)) if text[len(text) - n :] == tag[:n] and n <= len(text)]
    assert overlap(text, tag) == max(ends)
