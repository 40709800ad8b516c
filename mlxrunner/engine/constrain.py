"""Hold an answer to a form: JSON of a schema, or one of several choices.

llguidance computes which tokens may come next. This module knows text and tokens, no tensors. A
schema is compiled locally; nothing is fetched for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlxrunner.errors import FormError, OptionError
from mlxrunner.options import GenerateOptions
from mlxrunner.tokenizer.base import Tokenizer, Vocabulary, library

JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space as json.dumps writes it. With free white space a model may write spaces for ever."""
HEAD = '%llguidance {"no_forcing": true}\nstart: '
"""The beginning of each grammar.

With `no_forcing` the model chooses even the tokens of a text without alternatives. Otherwise
llguidance would call the tokenizer, and it can't pass on Python's errors and interrupts.
"""


class Constraint:
    """The tokens that may come next in one answer."""

    def __init__(
        self,
        matcher: Any,
        num_tokens: int,
        ends: frozenset[int],
        spell: Callable[[str], list[int]] | None = None,
    ) -> None:
        """Wrap `matcher`, a matcher of llguidance for a vocabulary of `num_tokens` tokens.

        `ends`: tokens that may come where the form is complete. `spell`: returns the usual tokens
        of a text; None: the answer can't go back, and nothing is guessed.
        """
        self._matcher, self._num_tokens, self._ends, self._spell = matcher, num_tokens, ends, spell
        self.count = 0
        """Tokens of the answer so far."""
        self.is_done = False
        """True if the answer is complete and nothing can follow."""

    def mask(self, width: int) -> NDArray[np.bool_]:
        """Return an array `[width]` that is True for the tokens that may come next.

        `width`: entries of the logits. Raise FormError if no token may come next.
        """
        return self._mask(self._matcher, width)

    def _mask(self, matcher: Any, width: int) -> NDArray[np.bool_]:
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, count=width, bitorder="little").view(np.bool_)
        allowed[self._num_tokens :] = False
        may_end = matcher.is_accepting()
        for token in self._ends:
            if 0 <= token < width:
                allowed[token] = may_end
        if not allowed.any():  # also after an error of llguidance
            why = _one_line(matcher.get_error())
            # A single word names a state of llguidance.
            raise FormError(self.count, why if " " in why else "")
        return allowed

    def masks(self, draft: Sequence[int], width: int) -> list[NDArray[np.bool_] | None]:
        """Return the mask at each place of a text that may follow, and the one after it.

        There are fewer if a token of `draft` may not come, or ends the answer. A mask is None where
        the form is complete. The answer does not change. Raise FormError if no token may come next.
        """
        masks: list[NDArray[np.bool_] | None] = [self.mask(width)]
        # A dead end leaves a matcher in an error, from which it does not go back.
        matcher = self._matcher.deep_copy() if draft else self._matcher
        for token in draft:
            allowed = masks[-1]
            if allowed is None or not allowed[token] or token in self._ends:
                break
            matcher.consume_token(token)
            if matcher.is_stopped():
                masks.append(None)
                break
            try:
                masks.append(self._mask(matcher, width))
            except FormError:  # the answer comes to it by itself, if it gets there
                break
        return masks

    def forced(self) -> list[int]:
        """Return tokens that spell the text that has to come next; the model may choose others."""
        text: bytes = b"" if self.is_done else self._matcher.compute_ff_bytes()
        return self._spell(text.decode(errors="ignore")) if text and self._spell else []

    @property
    def can_go_back(self) -> bool:
        """True if tokens may be tried and taken back."""
        return self._spell is not None

    def advance(self, token: int) -> None:
        """Append `token` to the answer."""
        self.count += 1
        if token in self._ends:
            self.is_done = True
        elif not self.is_done:
            self._matcher.consume_token(token)
            self.is_done = self._matcher.is_stopped() and not self._matcher.is_error()


def constraint_of(
    options: GenerateOptions, tokenizer: Tokenizer, width: int, words: str = ""
) -> Constraint:
    """Return the constraint that `options` with a form ask for.

    `width`: entries of the logits. `words`: the text that the answer continues. The form holds both
    together if `words` begin it, and else the answer alone. Raise OptionError if the form is not
    valid, or if this model can't produce it.
    """
    vocabulary = tokenizer.vocabulary
    for text in options.choices:
        if not vocabulary.can_spell(text):
            raise OptionError(f"choices: this model's vocabulary can't spell {text[:60]!r}")
    matcher = matcher_of(_grammar(options), vocabulary, _name(options))
    spelled = vocabulary.spelled(words)
    if spelled and matcher.validate_tokens(spelled) == len(spelled):
        matcher.consume_tokens(spelled)
    ends = options.ends(tokenizer.stop_tokens)
    constraint = Constraint(matcher, len(vocabulary.pieces), ends, tokenizer.encode_more)
    try:
        constraint.mask(width)
    except FormError as error:
        raise OptionError(f"{_name(options)}: {error}") from error
    return constraint


def matcher_of(grammar: str, vocabulary: Vocabulary, name: str) -> Any:
    """Return llguidance's matcher of a grammar. Raise OptionError for `name` if it is wrong."""
    llguidance = library()
    limits = llguidance.LLParserLimits(verbose_errors=False)
    matcher = llguidance.LLMatcher(vocabulary.guide, grammar, log_level=0, limits=limits)
    _refuse(name, matcher.get_error())
    return matcher


def check_form(options: GenerateOptions) -> None:
    """Raise OptionError if llguidance is missing or refuses the form. No model is needed."""
    if options.has_form:
        _refuse(_name(options), _problem(library(), _grammar(options)))


@lru_cache(maxsize=16)
def _problem(llguidance: Any, grammar: str) -> str:
    """Return why llguidance refuses a grammar, or "".

    The result is cached, because many lines of a batch share one grammar.
    """
    problem: str = llguidance.LLMatcher.validate_grammar(grammar)
    return problem


def _grammar(options: GenerateOptions) -> str:
    if options.schema is None:
        return f"{HEAD}/{'|'.join(map(literal, options.choices))}/"
    return f"{HEAD}%json {json.dumps(json.loads(options.schema) | {'x-guidance': JSON_STYLE})}"


def literal(text: str) -> str:
    """Return `text` as a regular expression. Thousands of such alternatives compile quickly."""
    return "".join(
        letter if letter.isascii() and letter.isalnum() else f"\\x{{{ord(letter):x}}}"
        for letter in text
    )


def _refuse(name: str, message: str) -> None:
    if message:
        raise OptionError(f"{name}: {_one_line(message)}")


def _name(options: GenerateOptions) -> str:
    return "choices" if options.schema is None else "schema"


def _one_line(message: str) -> str:
    """Return `message` in one line, without its place in the grammar, which users never see."""
    message = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", message)
    return " ".join(re.split(r"\n +1 \| |\n<", message)[0].split())[:300]
