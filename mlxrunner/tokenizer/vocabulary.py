"""The bytes that each token stands for, as the library for constrained decoding wants them. Knows no grammar."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from mlxrunner.errors import OptionError

IN_UTF8 = {bytes([byte]) for byte in range(256)} - {
    bytes([byte]) for byte in (0xC0, 0xC1, *range(0xF5, 0x100))
}


class Vocabulary:
    """Bytes of each token id. Kept by its tokenizer, so that what the library makes of it is made once."""

    def __init__(self, pieces: Sequence[bytes | None]) -> None:
        """`pieces`: None for a token that is no text (BOS, the end of a turn)."""
        self.pieces = pieces

    @cached_property
    def guide(self) -> Any:
        """llguidance's own form of it; about a second for 100,000 tokens.

        Its end token is one behind the last, which no model has: where an answer may end is decided by the stop tokens of a request.
        """
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(_Library(self.pieces)))

    @cached_property
    def _spells_everything(self) -> bool:
        return set(self.pieces) >= IN_UTF8

    def can_spell(self, text: str) -> bool:
        """Whether some tokens together are exactly `text`."""
        if self._spells_everything:
            return True
        data, pieces = text.encode(), {piece for piece in self.pieces if piece}
        longest = max(map(len, pieces), default=0)
        ends = [True]  # whether the first so many bytes can be spelled
        for end in range(1, len(data) + 1):
            ends.append(
                any(
                    ends[begin] and data[begin:end] in pieces
                    for begin in range(max(0, end - longest), end)
                )
            )
        return ends[-1]


class _Library:
    """The attributes that llguidance asks for."""

    bos_token_id = None
    special_token_ids: Sequence[int] = ()

    def __init__(self, pieces: Sequence[bytes | None]) -> None:
        self.tokens = [*(piece or b"" for piece in pieces), b"\xff<end>"]
        self.eos_token_id = len(pieces)

    def __call__(self, text: str) -> list[int]:
        """How it would spell forced text; it is never asked (`no_forcing` in `constrain.HEAD`), and an error if it were."""
        raise AssertionError("the model decides how a text is spelled")


def library() -> Any:
    """The module llguidance, or OptionError with the command that installs it."""
    try:
        import llguidance
    except ImportError as error:
        raise OptionError(
            "schema, choices: answers in a given form need llguidance, which is not installed: pip install llguidance"
        ) from error
    return llguidance
