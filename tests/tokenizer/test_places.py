"""Each token of a conversation leads to its character, for each kind of tokenizer.

Divergences are placed by this.
"""

from __future__ import annotations

from mlxrunner.models.resolve import DEMO_FOLDER
from mlxrunner.profiling.divergence import Divergences
from mlxrunner.templates.messages import PlainMessage
from mlxrunner.tokenizer import Tokenizer, load_tokenizer
from mlxrunner.tokenizer.prompt import tokenize_prompt

CHAT: list[PlainMessage] = [
    {"role": "user", "content": "the quick brown fox größer 日本語 😀"},
    {"role": "assistant", "content": "jumps over"},
    {"role": "user", "content": "the lazy dog, again"},
]


def check(tokenizer: Tokenizer) -> None:
    prepared, divergences = tokenize_prompt(tokenizer, CHAT), Divergences(tokenizer)
    parts, before = set(), 0
    for index, token in enumerate(prepared.tokens.tolist()):
        at = divergences._character(prepared, prepared.tokens, index)
        assert at is not None
        assert at >= before
        piece = tokenizer.decode([token]).strip()
        assert index == 0 or "\ufffd" in piece or prepared.text[at:].lstrip().startswith(piece), (
            index,
            piece,
        )
        parts.add(divergences._place(prepared, at).part)
        before = at
    assert {"text", "template_header", "message_end"} <= parts


def test_every_token_is_found_in_the_text(tokenizer: Tokenizer) -> None:
    """A token is found behind BOS, changed spaces, and characters of several tokens."""
    check(tokenizer)


def test_every_token_of_the_demo_is_found_in_the_text() -> None:
    """SentencePiece with marks as tokens."""
    check(load_tokenizer(DEMO_FOLDER))
