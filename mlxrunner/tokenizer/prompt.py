"""Turn a prompt in any of its forms into tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

import numpy as np

from mlxrunner.cache.account import ConversationName, Earlier
from mlxrunner.cache.entry import Shift, TokenArray, as_tokens, common_prefix, words
from mlxrunner.config.option import shown
from mlxrunner.errors import ContextLengthError, OptionError, PromptError
from mlxrunner.options import GenerateOptions
from mlxrunner.system.picture_files import pixels_of
from mlxrunner.templates.chat_template import continued, is_continued
from mlxrunner.templates.messages import (
    PlainMessage,
    check_messages,
    has_picture,
    system_count,
)
from mlxrunner.tokenizer.base import Tokenizer, check_text

if TYPE_CHECKING:
    from mlxrunner.pictures.tokenizer import SeeingTokenizer


def sees(tokenizer: Any) -> TypeGuard[SeeingTokenizer]:
    """Return True if a tokenizer puts pictures where a conversation has them."""
    return hasattr(tokenizer, "tokens_of")


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
    record: Any = None
    """The request as it is compared with others to find the cause of a miss; None: it is not."""
    is_title: bool = False
    """True for a request for the title of the conversation."""
    replaced: tuple[str, ...] = ()
    """The types of what the prompt has as short texts, since the model can't be shown it."""


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
    is_shifted: bool = False
    """True for a conversation of which a full context has dropped a part."""

    @property
    def conversation(self) -> ConversationName | None:
        """The names of its conversation; None for a line of a batch, which is one of its own."""
        if self.earlier is not None:
            return None
        caller = self.caller
        if caller is None:
            return ConversationName()
        return ConversationName(caller.client, caller.session, caller.is_title)


OTHER = "\ue0f2another message\ue0f3"
"""Stands for the text after a system prompt: private characters, which no template changes."""
MOST_MERGED = 4
"""Most tokens by which a system prompt's last token may differ with the text after it."""
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | TokenizedPrompt
"""Raw text, token ids, messages for the chat template, or a prompt that the caller tokenized."""


def tokenize_prompt(
    tokenizer: Tokenizer,
    prompt: Prompt,
    variables: Mapping[str, Any] = MappingProxyType({}),
    context: int | None = None,
    continues: bool | None = None,
) -> TokenizedPrompt:
    """Return the tokens of `prompt`.

    A `str` is raw text, messages go through the chat template, and token ids are used unchanged.
    `variables` are the other variables of the template, such as `tools`. `context` is the number of
    tokens that the prompt and its answer may have; None: any number. `continues`: True if the
    answer continues from the last message, which is the assistant's; False if it is a new message;
    None: it continues wherever the last message is the assistant's.

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
        takes_pictures = has_parts and sees(tokenizer)
        if not takes_pictures and any(has_picture(message) for message in messages):
            raise PromptError(
                "the model was loaded without its eyes: pictures need Runner.load(MODEL, "
                "pictures=True), or ParallelRunner.load(MODEL, pictures=True, ...)"
            )
        checked = check_messages(messages, pixels_of if takes_pictures else None)
        return _tokenize_messages(tokenizer, checked, variables, context, continues)
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
    continues: bool | None,
) -> TokenizedPrompt:
    if is_continued(messages, continues):
        render = partial(tokenizer.render, **variables)
        text = continued(render, messages, end_texts(tokenizer)).text
    else:
        text = tokenizer.render(messages, **variables)
    check_text(tokenizer, text, context)
    pictures = [picture for message in messages for picture in message.get("pictures", ())]
    views = None
    if pictures and sees(tokenizer):
        tokens, views = tokenizer.tokens_of(text, pictures)
        text = tokenizer.spelled(tokenizer.filled(text, views), views)
        messages = tokenizer.worded(messages, views)
    else:
        tokens = as_tokens(tokenizer.encode(text))
    count = len(pictures)
    return TokenizedPrompt(
        tokens, "messages", messages, text, variables, pictures=count, views=views
    )


def end_texts(tokenizer: Tokenizer) -> list[str]:
    """Return the texts of the tokens that end messages."""
    return [tokenizer.decode([end]) for end in {*tokenizer.message_ends, *tokenizer.stop_tokens}]


def system_tokens(tokenizer: Tokenizer, prompt: TokenizedPrompt, context: int) -> int:
    """Return the number of first tokens that a full context of `context` tokens keeps.

    These are the system prompt and all that the template writes before it, or BOS alone. A system
    prompt that the template writes so late that more than half of the context lies before its end
    can't be kept.
    """
    first = common_prefix(as_tokens(tokenizer.encode("")), prompt.tokens)
    systems = prompt.messages[: system_count(prompt.messages)]
    texts = [message["content"].strip() for message in systems]
    if not any(texts):
        return first
    head = _head(tokenizer, prompt, texts)
    is_late = head is None
    if head is None:
        ends = [prompt.text.find(one) + len(one) for one in texts if one in prompt.text]
        head = prompt.text[: max(ends, default=0)]
    kept = max(first, common_prefix(as_tokens(tokenizer.encode(head)), prompt.tokens))
    # The last token of the head may be one with the text after it.
    for count in range(kept, min(kept + MOST_MERGED, len(prompt.tokens)) + 1):
        text = tokenizer.decode(words(prompt.tokens[:count]).tolist())
        if all(one in text for one in texts):
            kept = count
            break
    return first if is_late and kept > context // 2 else kept


def _head(tokenizer: Tokenizer, prompt: TokenizedPrompt, systems: Sequence[str]) -> str | None:
    """Return the beginning of a prompt's text with its system messages, whose texts are `systems`.

    That is their rendering alone if the template takes them alone, or else all that stays the same
    with another message after them. None: the template writes them later.
    """
    count = system_count(prompt.messages)
    alone, after = prompt.messages[:count], prompt.messages[count : count + 1]
    other: Any = [{**message, "content": OTHER} for message in after]
    for messages, add_generation_prompt in ((alone, False), ([*alone, *other], True)):
        with suppress(PromptError, OptionError):  # the template refuses it, or leaves it out
            text = tokenizer.render(
                messages, add_generation_prompt=add_generation_prompt, **prompt.variables
            )
            head = text.partition(OTHER)[0]
            if prompt.text.startswith(head) and all(one in head for one in systems):
                return head
    return None


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
    keep = options.keep
    if keep is None:
        keep = system_tokens(tokenizer, prompt, context)
    return Shift(context, keep)
