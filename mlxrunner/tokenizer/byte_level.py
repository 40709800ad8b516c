"""A tokenizer without files: one token per byte. For models with random weights, and for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

from mlxrunner.templates.messages import PlainMessage, check_messages
from mlxrunner.tokenizer.base import checked_text
from mlxrunner.tokenizer.stream import ByteStream
from mlxrunner.tokenizer.vocabulary import Vocabulary

VOCAB = 300
"""Number of token ids; those from 256 to 297 stand for nothing."""
EOS = 299
"""The token that ends a message and an answer. In a text it is the byte 0x1E (record separator)."""
BOS = 298
"""The token that begins each encoded text."""


class ByteTokenizer:
    """A tokenizer with one token per UTF-8 byte.

    Its chat template has one line per message: `role: text`, then EOS. It has the members of
    `mlxrunner.tokenizer.Tokenizer`.
    """

    vocab_size = VOCAB
    stop_tokens = frozenset({EOS})
    message_ends = frozenset({EOS})
    ends: Mapping[int, tuple[str, ...]] = MappingProxyType({EOS: ("tokenizer",)})
    template_stops: tuple[str, ...] = ()
    letters_per_token = 1

    def encode(self, text: str) -> list[int]:
        """Return BOS and the tokens of `text`. Raise PromptError if `text` is not valid Unicode."""
        return [BOS, *self.encode_more(text)]

    def encode_more(self, text: str) -> list[int]:
        """Return the tokens of `text` alone: its bytes, and EOS for each byte 0x1E."""
        tokens: list[int] = []
        for index, part in enumerate(checked_text(text).split("\x1e")):
            tokens += [EOS] * (index > 0) + list(part.encode())
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`; U+FFFD stands for bytes that are not valid UTF-8."""
        return b"".join(map(self._bytes, tokens)).decode("utf-8", "replace")

    def render(
        self,
        messages: Sequence[PlainMessage],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Return the conversation as one text. `variables` of the template are ignored."""
        text = "".join(
            f"{message['role']}: {message['content']}\x1e" for message in check_messages(messages)
        )
        return text + ("assistant: " if add_generation_prompt else "")

    def stream(self, context: Sequence[int]) -> ByteStream:
        """Return a decoder for tokens that come one at a time; it needs no `context`."""
        return ByteStream(self._bytes)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The bytes of each token, for answers in a form."""
        return Vocabulary([*(bytes([byte]) for byte in range(256)), *[None] * (VOCAB - 256)])

    @staticmethod
    def _bytes(token: int) -> bytes:
        return bytes([token]) if token < 256 else b"\x1e" if token == EOS else b""
