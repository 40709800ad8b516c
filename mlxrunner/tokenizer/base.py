"""The tokenizer protocol of a runner, for any library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from mlxrunner.errors import PromptError
from mlxrunner.templates.messages import PlainMessage
from mlxrunner.tokenizer.vocabulary import Vocabulary

MOST_SPACE = 4096
"""Most characters at the end of a text in which a token that takes white space is looked for."""


class TextStream(Protocol):
    """A converter of tokens into text, one at a time.

    It yields whole characters, and keeps leading spaces.
    """

    def add(self, token: int) -> str:
        """Return the text that this token completes."""
        ...

    def finish(self) -> str:
        """Return the rest, with U+FFFD for an incomplete character."""
        ...


FROM_CONFIG, FROM_TEMPLATE = "tokenizer_config.json", "chat template"
"""Places that say which tokens end an answer."""
Ends = Mapping[int, tuple[str, ...]]
"""The places that say so, for each token that ends an answer."""


def joined_ends(*several: tuple[str, Iterable[int]], first: Ends | Iterable[int] = ()) -> Ends:
    """Return the ends of `first` and of further places, each with its tokens.

    `first` may be tokens alone, which the caller gave.
    """
    ends: dict[int, tuple[str, ...]] = (
        dict(first) if isinstance(first, Mapping) else dict.fromkeys(first, ("given",))
    )
    for place, tokens in several:
        for token in sorted(tokens):
            ends[token] = (*ends.get(token, ()), place)
    return ends


class Tokenizer(Protocol):
    """A converter between text and token ids that also renders the chat template."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Tokens that end an answer."""
        ...

    @property
    def ends(self) -> Ends:
        """The places that name each of `stop_tokens`, such as "config.json"."""
        ...

    @property
    def message_ends(self) -> frozenset[int]:
        """Tokens that end a message of any role. The next prompt may differ from there on."""
        ...

    @property
    def template_stops(self) -> tuple[str, ...]:
        """Texts before which an answer ends: the model's own, and those of the fallback template.

        The model's are `stop_strings` of generation_config.json.
        """
        ...

    def encode(self, text: str) -> list[int]:
        """Encode text with its special tokens, and put one BOS in front if the model uses it.

        Raise PromptError if `text` is not valid Unicode.
        """
        ...

    def encode_more(self, text: str) -> list[int]:
        """Encode text that follows other tokens, without BOS."""
        ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def render(
        self,
        messages: Sequence[PlainMessage],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Return the conversation as the model's chat template writes it.

        `variables`: the other variables of the template, such as `enable_thinking` or `tools`.
        Raise PromptError if the template refuses the conversation.
        """
        ...

    def stream(self, context: Sequence[int]) -> TextStream:
        """Return a stream for the tokens that follow `context`."""
        ...

    @property
    def vocabulary(self) -> Vocabulary:
        """The bytes of each token, computed on first use.

        Raise OptionError if the tokens are not made of bytes.
        """
        ...


def encode_after(tokenizer: Tokenizer, before: str, text: str) -> list[int]:
    """Encode `text`, which follows the text `before`, as if both were encoded together."""
    return tokenizer.encode_more(left_over(tokenizer, before, text))


def left_over(tokenizer: Tokenizer, before: str, text: str) -> str:
    """Return `text` without the white space that a token at the end of `before` takes.

    Some tokenizers have `takers`, the texts of such tokens.
    """
    takers: frozenset[str] = getattr(tokenizer, "takers", frozenset())
    takes = takers and text[:1].isspace() and before[-MOST_SPACE:].rstrip().endswith(tuple(takers))
    return text.lstrip() if takes else text


def checked_text(text: str) -> str:
    """Return `text` if it is valid Unicode, and raise PromptError otherwise.

    Half characters (lone surrogates) come from files that are not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"the text is not valid Unicode: {error.reason} at character {error.start}; "
            "is it UTF-8?"
        ) from error
    return text


def with_bos(tokens: list[int], bos: int | None) -> list[int]:
    """Return `tokens` with BOS in front, unless it is there already."""
    return tokens if bos is None or tokens[:1] == [bos] else [bos, *tokens]
