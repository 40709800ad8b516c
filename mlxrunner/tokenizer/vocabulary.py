"""The bytes of each token, in the form for llguidance. Knows nothing about grammars."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from mlxrunner.errors import OptionError

IN_UTF8 = {bytes([byte]) for byte in range(256)} - {
    bytes([byte]) for byte in (0xC0, 0xC1, *range(0xF5, 0x100))
}


class Vocabulary:
    """The bytes of each token id, and llguidance's form of them, which is computed once."""

    def __init__(self, pieces: Sequence[bytes | None]) -> None:
        """Wrap `pieces`, the bytes of each token.

        The bytes are None for a token that is not text (BOS, the end of a turn).
        """
        self.pieces = pieces

    @cached_property
    def guide(self) -> Any:
        """The vocabulary in llguidance's form. Computing it takes a second per 100,000 tokens.

        Its end token is one behind the last, which no model has. The stop tokens of a request
        decide where an answer may end.
        """
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(_Library(self.pieces)))

    @cached_property
    def _tokens(self) -> dict[bytes, int]:
        """A token for each piece."""
        return {piece: token for token, piece in enumerate(self.pieces) if piece}

    def can_spell(self, text: str) -> bool:
        """Return True if some sequence of tokens is exactly `text`."""
        known, data = self._tokens, text.encode()
        if known.keys() >= IN_UTF8:
            return True
        longest = max(map(len, known), default=0)
        ends = [True]  # at n: the first n bytes can be spelled
        for end in range(1, len(data) + 1):
            begins = range(max(0, end - longest), end)
            ends.append(any(ends[begin] and data[begin:end] in known for begin in begins))
        return ends[-1]

    def spelled(self, text: str) -> list[int]:
        """Return tokens of one character or byte each that are `text`; none if it has others."""
        known = self._tokens
        letters = (letter.encode() for letter in text)
        pieces = [
            piece
            for data in letters
            for piece in ([data] if data in known else (bytes([byte]) for byte in data))
        ]
        return [known[piece] for piece in pieces] if all(map(known.__contains__, pieces)) else []


class _Library:
    """The attributes of a tokenizer that llguidance reads."""

    bos_token_id = None
    special_token_ids: Sequence[int] = ()

    def __init__(self, pieces: Sequence[bytes | None]) -> None:
        self.tokens = [*(piece or b"" for piece in pieces), b"\xff<end>"]
        self.eos_token_id = len(pieces)

    def __call__(self, text: str) -> list[int]:
        """Fail: llguidance only tokenizes forced text, and there is none (`constrain.HEAD`)."""
        raise AssertionError("the model decides how a text is spelled")


def library() -> Any:
    """Return the module llguidance. Raise OptionError if it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise OptionError(
            "schema, choices: answers in a given form need llguidance, which is not installed: "
            "pip install llguidance"
        ) from error
    return llguidance
