"""Tokens that spell a session's text are known as such, for any text and tokenizer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxrunner import Runner
from mlxrunner.chat.conversation import Conversation
from mlxrunner.sessions.session import Branch, History, Rendering, Session, SessionTurn
from mlxrunner.testing import ByteTokenizer, oracle_runner

VOCAB = 300


def is_kept(history: History, tokenizer: ByteTokenizer | None = None) -> bool:
    """Return True if the tokens stay, by default with a tokenizer of bytes."""
    session = Session("x", {"main": Branch(), "other": Branch(None, history)})
    found = session.forget_mismatched(tokenizer or ByteTokenizer(), VOCAB)
    after = session.branches["other"].history
    assert after.rendering.tokens == (() if found else history.rendering.tokens)
    return not found


def spelled(text: str, tokens: list[int], dropped: int = 0) -> History:
    return History((SessionTurn("a", "b"),), Rendering(text, tuple(tokens)), dropped=dropped)


@pytest.mark.parametrize("text", ["hello", "naïve 🙂 日本", " two  spaces\n", "\ufffd as it is"])
def test_tokens_of_the_text_are_kept(text: str) -> None:
    """A token that is wrong, missing, extra or unknown to the model drops them."""
    tokens = list(text.encode())
    assert is_kept(spelled(text, tokens))
    for wrong in (
        [*tokens[:-2], 65, 66],
        [65, *tokens],
        [*tokens, 65],
        [*tokens, VOCAB],
        tokens[: len(tokens) // 2],
    ):
        assert not is_kept(spelled(text, wrong))


def test_halves_of_characters_may_take_others_with_them() -> None:
    """Some tokenizers decode them so: at most one for each."""

    class Greedy(ByteTokenizer):
        def decode(self, tokens: object) -> str:
            return (
                super()
                .decode(tokens)  # type: ignore[arg-type]
                .replace("]\ufffd", "\ufffd\ufffd")
            )

    assert is_kept(spelled("[x]abc", [*b"[x]", 0xE2, *b"abc"]), Greedy())
    assert not is_kept(spelled("[x]abcdefgh", [*b"[x]", 0xE2, *b"abc"]), Greedy())


def test_a_token_in_front_that_is_no_text_is_known() -> None:
    """BOS, where the template does not write it."""

    class Begins(ByteTokenizer):
        def decode(self, tokens: object) -> str:
            return "<s>" * (list(tokens)[:1] == [258]) + super().decode(
                tokens  # type: ignore[arg-type,call-overload]
            )

        def encode(self, text: str) -> list[int]:
            return [258, *self.encode_more(text)]

    assert is_kept(spelled("hello", [258, *b"hello"]), Begins())
    assert not is_kept(spelled("hello", [258, *b"hallo"]), Begins())


def test_tokens_without_a_text_are_those_of_caches_from_elsewhere() -> None:
    """Before the first turn only."""
    assert is_kept(History(rendering=Rendering("", (1, 2, 3))))
    assert not is_kept(spelled("", [1, 2, 3]))


def test_a_text_that_is_none_is_not_spelled() -> None:
    """Half a character, as JSON can name it."""
    assert not is_kept(spelled("\ud800", [*b"abc"]))


@pytest.fixture
def shifted() -> Conversation:
    """A conversation that has outgrown its context."""
    conversation = Conversation(
        oracle_runner(context=120), options={"stop_tokens": [], "max_tokens": 30}
    )
    for text in ("hello", "and what else?", "naïve", "go on"):
        list(conversation.send(text))
    assert conversation.history.dropped
    return conversation


def test_what_a_full_context_has_dropped_is_not_missed(shifted: Conversation) -> None:
    """The text is whole, the tokens are its two ends; other tokens are still seen."""
    history = shifted.history
    assert is_kept(history)
    tokens = history.rendering.tokens
    other = Rendering(history.rendering.text, (*tokens[:30], *b"other", *tokens[35:]))
    assert not is_kept(replace(history, rendering=other))


def test_tokens_of_a_real_tokenizer_are_known() -> None:
    """Any answer is, one that was stopped in the middle included."""
    conversation = Conversation(
        Runner.load("demo", reserve=False),
        "Be brief.",
        {"temperature": 3.0, "seed": 1, "max_tokens": 12},
    )
    for text in ("My name is Zorblin.", " two  spaces\n\n", "naïve 🙂 日本", "<s>[INST]"):
        list(conversation.send(text))
        runner, session = (
            conversation.runner,
            Session("demo", {"main": Branch(None, conversation.history)}),
        )
        assert conversation.history.rendering.tokens
        assert not session.forget_mismatched(runner.tokenizer, runner.facts.vocab)
