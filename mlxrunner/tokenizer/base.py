"""What the runner needs of a tokenizer, whatever library is behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypedDict

from mlxrunner.errors import PromptError
from mlxrunner.tokenizer.vocabulary import Vocabulary


class Message(TypedDict):
    """One turn of a conversation. `role`: usually "system", "user" or "assistant"."""

    role: str
    content: str


class TextStream(Protocol):
    """Turns tokens into text as they come: never half a character, no leading space lost."""

    def add(self, token: int) -> str:
        """The text that became complete with this token."""
        ...

    def finish(self) -> str:
        """What is left; an incomplete character becomes U+FFFD."""
        ...


class Tokenizer(Protocol):
    """Text <-> token ids, and the chat template."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Tokens that end an answer."""
        ...

    @property
    def message_ends(self) -> frozenset[int]:
        """Tokens that end a message, of whatever role: where the next prompt may differ from this one."""
        ...

    @property
    def template_stops(self) -> tuple[str, ...]:
        """Stop strings that the fallback template needs; empty where the model has a template of its own."""
        ...

    def encode(self, text: str) -> list[int]:
        """Text with its special tokens recognized; BOS in front if the model wants one, never twice. PromptError if not Unicode."""
        ...

    def encode_more(self, text: str) -> list[int]:
        """Text that goes on after other tokens: no BOS."""
        ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The conversation as the model's chat template writes it. PromptError where the template refuses it.

        variables: what else the template may look at, such as `enable_thinking`.
        """
        ...

    def stream(self, context: Sequence[int]) -> TextStream:
        """A stream for the tokens that follow `context`."""
        ...

    @property
    def vocabulary(self) -> Vocabulary:
        """The bytes of each token, made when first asked for. OptionError for a tokenizer whose tokens are not made of bytes."""
        ...


def checked_text(text: str) -> str:
    """`text`, or PromptError for what no tokenizer takes: halves of characters, as they come from files that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"the text is not valid Unicode: {error.reason} at character {error.start}; is it UTF-8?"
        ) from error
    return text


def with_bos(tokens: list[int], bos: int | None) -> list[int]:
    """BOS in front, once."""
    return tokens if bos is None or tokens[:1] == [bos] else [bos, *tokens]
