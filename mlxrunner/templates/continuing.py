"""Render a conversation that ends with the assistant's words, so that the answer continues them.

The template writes the whole conversation, with a mark behind the last words, and what it writes
before the mark is the prompt. So the answer has the header that the template gives to an answer
(gpt-oss: the final channel). Words that begin with thinking follow the generation prompt instead:
templates move or drop the thinking of a finished message, and a model continues its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mlxrunner.errors import PromptError, TemplateLimitError
from mlxrunner.templates.segments import common
from mlxrunner.templates.thinking import THINKING_TAGS, opens_thinking

_END = "\ue0f8\ue0f9"
"""Stands behind the words that are continued: private characters, which no template changes."""
_TAGS = re.compile(r"<[^<>]*>|\[[^\[\]]*\]")
REMEDY = (
    "end it with a message of the user, or ask for a new message of the assistant "
    "(continue_final_message: false)"
)
Render = Callable[..., str]
"""A function of `(messages, add_generation_prompt=...)` that returns the text."""


class Continued(NamedTuple):
    """A rendered conversation that ends within the assistant's turn."""

    text: str
    """The text up to the end of the words that are continued."""
    header: int
    """Characters of `text` up to the place where the model's own answer would begin."""
    words: int
    """Characters of `text` before the words that are continued."""


def is_continued(messages: Sequence[Mapping[str, Any]], wanted: bool | None = None) -> bool:
    """Return True if an answer to `messages` continues the last of them.

    `wanted`: as the caller asks for it; None: whenever the last message is the assistant's and has
    no tool calls. Raise PromptError if it is wanted and can't be.
    """
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant":
        if wanted:
            raise PromptError(
                "continue_final_message needs a last message of the assistant, and it is of role "
                f"{last.get('role')!r:.80}: leave it out, as well as add_generation_prompt: false"
            )
        return False
    if wanted is False or (last.get("tool_calls") and not wanted):
        return False
    if last.get("tool_calls"):
        raise PromptError(
            f"message {len(messages) - 1}: the conversation ends with tool calls, which have no "
            f"words to be continued: add their results, or {REMEDY}"
        )
    return True


def continued(
    render: Render, messages: Sequence[Mapping[str, Any]], ends: Iterable[str] = ()
) -> Continued:
    """Return the text of `messages`, whose last one is the assistant's, up to its end.

    `ends`: the texts of tokens that end messages. An empty last message is left out. Raise
    PromptError if the template can't write it so.
    """
    *before, last = messages
    words, thought = str(last.get("content") or ""), _thought(last)
    if not words and not thought:
        if not before:
            raise PromptError("message 0: the assistant's words are empty, and nothing is before")
        text = render(before)
        return Continued(text, len(text), len(text))
    begun = _try(render, before) if before else None
    tags = next((tags for tags in THINKING_TAGS if words.lstrip().startswith(tags.begin)), None)
    if begun is not None and words and not thought and (tags or _skips_thinking(begun)):
        own = words.lstrip() if tags else words
        head = begun
        if tags and begun.rstrip().endswith(tags.begin):
            head = begun.rstrip().removesuffix(tags.begin)
        return Continued(head + own, min(len(begun), len(head + own)), len(head))
    if (
        begun is not None
        and not words
        and any(begun.rstrip().endswith(tags.begin) for tags in THINKING_TAGS)
    ):
        return Continued(begun + thought, len(begun), len(begun))
    found = _marked(render, messages, words, thought, begun, ends)
    header = (
        len(begun)
        if begun is not None and found.text.startswith(begun)
        else common(begun or "", found.text[: found.words])
    )
    return found._replace(header=min(header, found.words))


def _thought(message: Mapping[str, Any]) -> str:
    return str(message.get("reasoning_content") or message.get("thinking") or "")


def _skips_thinking(begun: str) -> bool:
    """Return True if a generation prompt ends with thinking that is closed."""
    opened = any(begun.rstrip().endswith(tags.begin) for tags in THINKING_TAGS)
    return opens_thinking(begun) and not opened


def _marked(
    render: Render,
    messages: Sequence[Mapping[str, Any]],
    words: str,
    thought: str,
    begun: str | None,
    ends: Iterable[str],
) -> Continued:
    """Return what the template writes before the end of the last message's words.

    Without words, its thinking is continued.
    """
    last = {**messages[-1], "content": words + _END if words else ""}
    if not words:
        for name in ("reasoning_content", "thinking"):
            if last.get(name):
                last[name] = thought + _END
    number, said = len(messages) - 1, words or thought
    try:
        text = render([*messages[:-1], last], add_generation_prompt=False)
    except TemplateLimitError:
        raise
    except PromptError as error:
        raise PromptError(
            f"message {number}: the conversation ends with the assistant's words, and the model's "
            f"chat template can't end there ({_cleaned(error)}): {REMEDY}"
        ) from error
    head, found, tail = text.partition(_END)
    why = ""
    if not found or _END in tail:
        why = "leaves it out" if not found else "writes it twice"
    elif not head.endswith(said):
        said = said.lstrip()
        why = "" if head.endswith(said) else "writes other words for it"
    if not why and begun is not None and head == begun + said:
        return Continued(head, 0, len(head) - len(said))
    if not why and _is_text(tail, ends):
        why = "writes other text behind it"
    if why:
        what = "words" if words else "thinking"
        raise PromptError(
            f"message {number}: the answer can't continue the assistant's {what} "
            f"{said[:40]!r}, because the model's chat template {why}: {REMEDY}"
        )
    return Continued(head, 0, len(head) - len(said))


def _cleaned(error: PromptError) -> str:
    """Return a message without the mark, as it is or as `repr` shows it."""
    return str(error).replace(_END, "").replace(repr(_END)[1:-1], "")


def _is_text(tail: str, ends: Iterable[str]) -> bool:
    """Return True if `tail` has more than end tokens, other tags and white space."""
    for end in sorted(filter(str.strip, ends), key=len, reverse=True):
        tail = tail.replace(end, "")
    return bool(_TAGS.sub("", tail).strip())


def _try(render: Render, messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a conversation with a generation prompt, or None if the template refuses it."""
    try:
        return render(messages, add_generation_prompt=True)
    except TemplateLimitError:
        raise
    except PromptError:
        return None
