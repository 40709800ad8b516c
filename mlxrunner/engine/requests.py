"""Turn a prompt and options into a checked request, for both runners."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mlxrunner.cache.tokens import Shift, TokenArray
from mlxrunner.engine.answer import Clock
from mlxrunner.engine.constrain import constraint_of
from mlxrunner.engine.sampling import LogitsProcessor, NextToken, checked_processors
from mlxrunner.errors import ContextFullError, OptionError
from mlxrunner.models.facts import ModelFacts
from mlxrunner.options import STOP_IDS, GenerateOptions
from mlxrunner.results import Chunk
from mlxrunner.templates.chat_template import is_continued
from mlxrunner.tokenizer import Tokenizer
from mlxrunner.tokenizer.prompt import (
    Prompt,
    Seeing,
    TokenizedPrompt,
    check_length,
    check_tokens,
    room_of,
    shift_of,
    tokenize_prompt,
)

Progress = Callable[[int, int], None]
"""A function of two counts: the prompt tokens that are in the entry, and all prompt tokens."""


@dataclass(eq=False, kw_only=True)
class Request:
    """A prompt and its options, checked and ready to be run."""

    prompt: TokenizedPrompt
    """The prompt that the caller gave."""
    tokens: TokenArray
    """The tokens to evaluate: those of the prompt, shortened by a shift if it is too long."""
    options: GenerateOptions
    next_token: NextToken
    clock: Clock
    context: int
    """Most tokens of the prompt and its answer together."""
    limit: int
    """Most tokens of the answer."""
    shift: Shift | None = None
    """The rule that makes room in a full context; None: the answer ends there."""
    discarded: int = 0
    """Tokens of the prompt that were dropped because it was too long."""

    def error_at(self, last: Chunk) -> ContextFullError | None:
        """Return the error that ends the request after its `last` chunk, or None.

        With `overflow="error"` it is an error if the full context ended the answer.
        """
        is_full = last.finish_reason == "length" and self.limit != self.options.max_tokens
        if self.options.overflow == "error" and is_full:
            return ContextFullError(self.limit, self.context)
        return None


def prepare(
    prompt: Prompt,
    options: GenerateOptions,
    *,
    tokenizer: Tokenizer,
    facts: ModelFacts,
    context: int,
    began: float,
    processors: Sequence[LogitsProcessor] = (),
) -> Request:
    """Tokenize `prompt`, check it, and make it fit into `context` tokens.

    `began`: the moment of the caller's request, on `time.perf_counter`. `processors`: functions of
    all tokens so far and the logits that return changed logits. Raise PromptError,
    ContextLengthError or OptionError if the request can't be run.
    """
    tokenized = tokenize_prompt(
        tokenizer,
        prompt,
        options.variables,
        room_of(options, context),
        options.continue_final_message,
    )
    tokens = tokenized.tokens
    check_tokens(tokens, facts.vocab, has_pictures=bool(tokenized.pictures))
    _check_ends(options, facts.vocab)
    if isinstance(tokenizer, Seeing):
        _check_seeing(options)
    shift = shift_of(options, tokenizer, tokenized, context)
    discarded = 0
    if shift is None:
        check_length(tokens, context)
    elif len(tokens) >= context:
        discarded = shift.discard(len(tokens))
        tokens = np.concatenate([tokens[: shift.keep], tokens[shift.keep + discarded :]])
    constraint = constraint_of(options, tokenizer, facts.vocab, _words(tokenized, options))
    if constraint is None and tokenized.constraint is not None:
        constraint = tokenized.constraint(options.ends(tokenizer.stop_tokens))
    return Request(
        prompt=tokenized,
        tokens=tokens,
        options=options,
        next_token=NextToken(options, facts.vocab, checked_processors(processors), constraint),
        clock=Clock(began - tokenized.seconds, time.perf_counter()),
        context=context,
        limit=_limit(options, context, len(tokens)),
        shift=shift,
        discarded=discarded,
    )


def _words(prompt: TokenizedPrompt, options: GenerateOptions) -> str:
    """Return the words of the assistant that the answer continues, or nothing."""
    messages = prompt.messages
    if messages and is_continued(messages, options.continue_final_message):
        return messages[-1]["content"]
    return ""


def _check_ends(options: GenerateOptions, vocab: int) -> None:
    """Raise OptionError for a stop token beyond the vocabulary, which could never come."""
    for name in STOP_IDS:
        beyond = [token for token in getattr(options, name) or () if vocab and token >= vocab]
        if beyond:
            raise OptionError(
                f"{name}: {beyond[0]} is beyond the model's vocabulary, it has to be between 0 "
                f"and {vocab - 1}"
            )


def _check_seeing(options: GenerateOptions) -> None:
    """Raise OptionError for what a model that sees pictures can't do."""
    if options.overflow == "shift":
        raise OptionError(
            "overflow: a model that sees pictures can't drop a part of its context: use 'stop'"
        )
    if options.speculate == "lookup":
        raise OptionError("speculate: nothing is guessed for a model that sees pictures: use 'off'")


def _limit(options: GenerateOptions, context: int, prompt: int) -> int:
    """Return the most tokens of the answer to `prompt` tokens.

    With shifts, an answer without a limit ends after `context` tokens.
    """
    if options.overflow == "shift":
        return options.max_tokens or context
    room = context - prompt
    return min(options.max_tokens or room, room)
