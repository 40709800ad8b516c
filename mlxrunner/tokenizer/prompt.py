"""Turn a prompt in any of its forms into tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from mlxrunner.cache.lookup import Earlier
from mlxrunner.cache.overflow import Shift
from mlxrunner.cache.tokens import TokenArray, as_tokens, common_prefix, words
from mlxrunner.config.arguments import shown
from mlxrunner.errors import ContextLengthError, OptionError, PromptError
from mlxrunner.options import GenerateOptions
from mlxrunner.results import Usage
from mlxrunner.system.picture_files import pixels_of
from mlxrunner.templates.messages import PlainMessage, check_messages, has_picture
from mlxrunner.tokenizer.base import Tokenizer
from mlxrunner.tokenizer.longest import check_text


@runtime_checkable
class Seeing(Protocol):
    """A tokenizer that puts pictures where a conversation has them."""

    def tokens_of(self, text: str, pictures: Sequence[Any]) -> tuple[TokenArray, Any]:
        """Return the tokens of a rendered conversation, and what it holds of its `pictures`."""
        ...

    def filled(self, text: str, pictures: Any) -> str:
        """Return the text of a rendered conversation as it is tokenized with its `pictures`."""
        ...

    def spelled(self, text: str, pictures: Any) -> str:
        """Return a filled text with PICTURE in place of each picture, as `decode` writes it."""
        ...

    def worded(self, messages: Sequence[PlainMessage], pictures: Any) -> Sequence[PlainMessage]:
        """Return messages with PICTURE in their contents, and without pictures."""
        ...


@dataclass(frozen=True)
class LineOfBatch:
    """A line of a batch, which observers of its request may want to name."""

    number: int
    """The number of the line among those of all inputs that are not empty, from 1."""
    lines: int
    """The number of lines of the input, or of the shard of it that runs."""
    refused: int
    """The number of those that can't be run, so that they make no request."""
    order: Literal["prefix", "input"]
    """The order in which the lines run."""


class KnownCause(Protocol):
    """A cause on the client's side for which a prompt reused little."""

    @property
    def name(self) -> str: ...

    @property
    def remedy(self) -> str: ...

    @property
    def message(self) -> int | None: ...


@dataclass(frozen=True)
class Caller:
    """The client of a server, which observers of its request may want to name."""

    request: str
    """The id of the request in the server's responses."""
    client: str
    """The name of the client's program; empty if it is not known."""
    session: str | None = None
    """The client's name of the conversation, or None."""
    rules: tuple[str, ...] = ()
    """The names of the rules that changed the prompt."""
    cause: Callable[[Usage], KnownCause | None] = lambda usage: None
    """The function that finds the cause once the usage is known."""


@dataclass(frozen=True, eq=False)
class TokenizedPrompt:
    """A prompt with its tokens and the source of the tokens."""

    tokens: TokenArray
    kind: Literal["messages", "text", "tokens"] = "tokens"
    messages: Sequence[PlainMessage] = ()
    """The conversation, with PICTURE in place of each; empty unless `kind` is "messages"."""
    text: str = ""
    """The tokenized text: the raw prompt, or the messages as the chat template wrote them.

    PICTURE stands for each picture.
    """
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the chat template, `tools` among them."""
    seconds: float = 0.0
    """Seconds that the caller took to make the tokens. They count as part of the request."""
    earlier: Earlier | None = None
    """For a line of a batch: the part of its tokens that earlier lines share."""
    line: LineOfBatch | None = None
    """The line of a batch that has this prompt."""
    caller: Caller | None = None
    """The client of a server that sent this prompt."""
    pictures: int = 0
    """The number of pictures. Their positions have ids beyond the vocabulary."""
    views: Any = None
    """The pictures as the encoder needs them, or as it saw them, while this prompt lives."""
    constraint: Callable[[frozenset[int]], Any] | None = None
    """A function from the tokens that end the answer to its constraint, if no option holds it."""


Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | TokenizedPrompt
"""Raw text, token ids, messages for the chat template, or a prompt that the caller tokenized."""


def tokenize_prompt(
    tokenizer: Tokenizer,
    prompt: Prompt,
    variables: Mapping[str, Any] = MappingProxyType({}),
    context: int | None = None,
) -> TokenizedPrompt:
    """Return the tokens of `prompt`.

    A `str` is raw text, messages go through the chat template, and token ids are used unchanged.
    `variables` are the other variables of the template, such as `tools`. `context` is the number of
    tokens that the prompt and its answer may have; None: any number.

    Raise OptionError if there are variables without messages, or if the template does not use the
    tools. Raise ContextLengthError, before anything is tokenized, if the prompt is certainly too
    long. Raise PromptError for anything else that can't be tokenized.
    """
    if isinstance(prompt, TokenizedPrompt):
        return prompt
    if not isinstance(prompt, str | Sequence | np.ndarray):
        raise PromptError(
            f"a prompt is a text, token ids or messages, not {type(prompt).__name__}: "
            f"{shown(prompt)}"
        )
    if not isinstance(prompt, str) and len(prompt) and isinstance(prompt[0], dict):
        messages: Any = prompt
        has_parts = any(
            isinstance(one, dict) and not isinstance(one.get("content"), str) for one in messages
        )
        sees = has_parts and isinstance(tokenizer, Seeing)  # slow: it looks up every method
        if not sees and any(has_picture(message) for message in messages):
            raise PromptError(
                "the model was loaded without its eyes: pictures need Runner.load(MODEL, "
                "pictures=True), or ParallelRunner.load(MODEL, pictures=True, ...)"
            )
        checked = check_messages(messages, pixels_of if sees else None)
        return _tokenize_messages(tokenizer, checked, variables, context)
    if variables:
        raise OptionError(
            "template, tools: only messages go through the chat template, "
            "and this prompt is a text or tokens"
        )
    if isinstance(prompt, str):
        check_text(tokenizer, prompt, context)
        return TokenizedPrompt(as_tokens(tokenizer.encode(prompt)), "text", text=prompt)
    return TokenizedPrompt(as_tokens(prompt))  # type: ignore[arg-type]


def _tokenize_messages(
    tokenizer: Tokenizer,
    messages: Sequence[PlainMessage],
    variables: Mapping[str, Any],
    context: int | None,
) -> TokenizedPrompt:
    text = tokenizer.render(messages, **variables)
    check_text(tokenizer, text, context)
    if variables.get("tools") and text == _rendered(
        tokenizer, messages, {**variables, "tools": None}
    ):
        raise OptionError(
            f"tools: the model's chat template does not use them, and {len(variables['tools'])} "
            "are given: leave them out, or describe them in the system prompt"
        )
    if any("tool_calls" in message for message in messages):
        plain: Any = [{**message, "tool_calls": []} for message in messages]
        if text == _rendered(tokenizer, plain, variables):
            number = next(i for i, message in enumerate(messages) if "tool_calls" in message)
            raise PromptError(
                f"tool_calls: the model's chat template does not use them, and message {number} "
                "has some: write them into its content"
            )
    pictures = [picture for message in messages for picture in message.get("pictures", ())]
    views = None
    if pictures and isinstance(tokenizer, Seeing):
        tokens, views = tokenizer.tokens_of(text, pictures)
        text = tokenizer.spelled(tokenizer.filled(text, views), views)
        messages = tokenizer.worded(messages, views)
    else:
        tokens = as_tokens(tokenizer.encode(text))
    count = len(pictures)
    return TokenizedPrompt(
        tokens, "messages", messages, text, variables, pictures=count, views=views
    )


def _rendered(
    tokenizer: Tokenizer, messages: Sequence[PlainMessage], variables: Mapping[str, Any]
) -> str | None:
    """Return the conversation as the template writes it, or None if the template refuses it."""
    try:
        return tokenizer.render(messages, **variables)
    except PromptError:
        return None


def system_tokens(tokenizer: Tokenizer, prompt: TokenizedPrompt) -> int:
    """Return the number of first tokens that a full context keeps.

    These are the system prompt with BOS, or BOS alone.
    """
    first = tokenizer.encode("")
    if prompt.messages and prompt.messages[0].get("role") == "system":
        with suppress(PromptError):  # a template that refuses a system prompt alone
            system = tokenizer.render(
                prompt.messages[:1], add_generation_prompt=False, **prompt.variables
            )
            first = tokenizer.encode(system)
    return common_prefix(as_tokens(first), prompt.tokens)


def check_tokens(tokens: TokenArray, vocab: int = 0, *, has_pictures: bool = False) -> None:
    """Raise PromptError for a prompt without tokens, or with a token beyond the vocabulary.

    `vocab`: the number of tokens in the vocabulary; 0 if it is not known. `has_pictures`: the ids
    of pictures are among the tokens.
    """
    if has_pictures:
        tokens = words(tokens)
    if len(tokens) == 0:
        raise PromptError("the prompt is empty: at least one token is needed")
    if vocab and int(tokens.max()) >= vocab:
        raise PromptError(
            f"token id {int(tokens.max())} is beyond the model's vocabulary of {vocab}: tokenize "
            "the prompt with this model"
        )


def check_length(tokens: TokenArray, context: int) -> None:
    """Raise ContextLengthError for a prompt that leaves no room for an answer."""
    if len(tokens) >= context:
        raise ContextLengthError(len(tokens), context)


def room_of(options: GenerateOptions, context: int) -> int | None:
    """Return the tokens that a prompt has to fit into; None if a full context is shifted."""
    return None if options.overflow == "shift" else context


def shift_of(
    options: GenerateOptions, tokenizer: Tokenizer, prompt: TokenizedPrompt, context: int
) -> Shift | None:
    """Return the rule that makes room for `prompt` in a full context.

    Return None if `options` ask for none. `context`: tokens of the context. Raise OptionError if
    `keep` leaves no room.
    """
    if options.overflow != "shift":
        return None
    keep = system_tokens(tokenizer, prompt) if options.keep is None else options.keep
    return Shift(context, keep)
