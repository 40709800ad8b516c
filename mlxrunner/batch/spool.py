"""From lines or requests to a complete store: each prompt becomes its tokens, one at a time, or an error."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from mlxrunner.batch.fields import Rules, checked_id, checked_options
from mlxrunner.batch.lines import Line
from mlxrunner.batch.request import BatchRequest
from mlxrunner.batch.store import Entry, Store
from mlxrunner.cache.tokens import TokenArray, as_tokens
from mlxrunner.errors import ContextLengthError, OptionError, PromptError
from mlxrunner.overflow import Shift
from mlxrunner.terminal import one_line
from mlxrunner.tokenizer import Message, Tokenizer
from mlxrunner.tokenizer.prompt import Prompt, system_tokens, tokenize


def lines_of(
    requests: Iterable[BatchRequest], defaults: Mapping[str, Any] | None = None
) -> Iterator[Line]:
    """The requests of a program as lines. An id or options that can't be, with the defaults, become the line's error."""
    rules = Rules(defaults or {})
    for index, request in enumerate(requests):
        options: dict[str, Any] = {}
        name = error = None
        try:
            name = checked_id("id", request.id)
            options = json.loads(json.dumps(checked_options(dict(request.options), None, rules)))
        except (OptionError, PromptError) as problem:
            error = str(problem)
        except (TypeError, ValueError, RecursionError) as problem:
            error = f"the options have to be values that JSON knows: {problem}"
        yield Line(index, index + 1, request.prompt, name, options=options, error=error)


def spool(
    store: Store,
    lines: Iterable[Line],
    tokenizer: Tokenizer,
    *,
    context: int,
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Add the lines to the store, with their tokens; `finish` it afterwards.

    A prompt that the tokenizer or the chat template refuses, or that leaves no room in `context` (or what a shift keeps of it, where a full
    context is shifted), becomes an error.
    """
    for line in lines:
        tokens, options, error = as_tokens([]), line.options, line.error
        if error is None:
            try:
                tokens = _tokens(line, tokenizer)
                options = _within(context, line, tokens, tokenizer, defaults or {})
            except (PromptError, OptionError) as problem:
                tokens, error = as_tokens([]), f"line {line.number}: {one_line(str(problem))}"
        prompt = line.prompt if error is None and made_of_text(line.prompt) else None
        store.add(
            Entry(line.index, line.number, tokens, line.id, line.format, options, error, prompt)
        )


def made_of_text(prompt: Prompt) -> TypeGuard[str | Sequence[Message]]:
    """Whether it is a text or messages, not tokens."""
    return isinstance(prompt, str) or (
        isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
    )


def _tokens(line: Line, tokenizer: Tokenizer) -> TokenArray:
    tokens = tokenize(tokenizer, line.prompt)
    if len(tokens) == 0:
        raise PromptError("the prompt is empty: at least one token is needed")
    return tokens


def _within(
    context: int, line: Line, tokens: TokenArray, tokenizer: Tokenizer, defaults: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The line's options; with what a shift keeps by default, as only the messages tell where the system prompt ends."""
    together = {**defaults, **line.options}
    if together.get("overflow") != "shift":
        if len(tokens) >= context:
            raise ContextLengthError(len(tokens), context)
        return line.options
    keep = together.get("keep")
    shift = Shift(context, system_tokens(tokenizer, line.prompt, tokens) if keep is None else keep)
    return {**line.options, "keep": shift.keep}
