"""Answers in a given form: JSON of a schema, or one of some choices. llguidance says which tokens may come next.

Knows text and tokens, no tensors. A schema is compiled once for a vocabulary, and nothing is ever fetched for it.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlxrunner.config import GenerateOptions
from mlxrunner.errors import FormError, OptionError
from mlxrunner.tokenizer.base import Tokenizer
from mlxrunner.tokenizer.vocabulary import library

JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As json.dumps writes it: a model that loves spaces would never come to an end."""
HEAD = '%llguidance {"no_forcing": true}\nstart: '
"""The model decides how a text is spelled, also one without alternatives: llguidance would ask the tokenizer, in Python, whose
errors and interrupts it can't pass on."""


class Constraint:
    """What may come next in one answer. `count`: tokens that it has taken; `is_done`: the answer is complete, nothing can follow."""

    def __init__(self, matcher: Any, num_tokens: int, ends: frozenset[int]) -> None:
        """`num_tokens`: of the vocabulary that llguidance's `matcher` is for; `ends`: tokens that may come where the form is complete."""
        self._matcher, self._num_tokens, self._ends = matcher, num_tokens, ends
        self.count, self.is_done = 0, False

    def mask(self, width: int) -> NDArray[np.bool_]:
        """`[width]`, of the logits: True for the tokens that may come next. FormError where there is none."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, count=width, bitorder="little").view(np.bool_)
        allowed[self._num_tokens :] = False
        may_end = self._matcher.is_accepting()
        for token in self._ends:
            if 0 <= token < width:
                allowed[token] = may_end
        if not allowed.any():  # also after an error of llguidance
            why = _one_line(self._matcher.get_error())
            raise FormError(
                self.count, why if " " in why else ""
            )  # one word names a state of llguidance
        return allowed

    def advance(self, token: int) -> None:
        """The answer went on with `token`."""
        self.count += 1
        if token in self._ends:
            self.is_done = True
        elif not self.is_done:
            self._matcher.consume_token(token)
            self.is_done = self._matcher.is_stopped() and not self._matcher.is_error()


def constraint_of(options: GenerateOptions, tokenizer: Tokenizer, width: int) -> Constraint | None:
    """What `options` ask for, or None; `width`: of the logits. OptionError for a form that can't be had, from this model or at all."""
    if not options.has_form:
        return None
    llguidance = library()
    vocabulary = tokenizer.vocabulary
    for text in options.choices:
        if not vocabulary.can_spell(text):
            raise OptionError(f"choices: this model's vocabulary can't spell {text[:60]!r}")
    limits = llguidance.LLParserLimits(verbose_errors=False)
    matcher = llguidance.LLMatcher(vocabulary.guide, _grammar(options), log_level=0, limits=limits)
    _refuse(options, matcher.get_error())
    constraint = Constraint(matcher, len(vocabulary.pieces), options.ends(tokenizer.stop_tokens))
    try:
        constraint.mask(width)
    except FormError as error:
        raise OptionError(f"{_name(options)}: {error}") from error
    return constraint


def check_form(options: GenerateOptions) -> None:
    """OptionError where the library is missing or refuses the form: all that can be known without a model."""
    if options.has_form:
        _refuse(options, _problem(library(), _grammar(options)))


@lru_cache(maxsize=16)
def _problem(llguidance: Any, grammar: str) -> str:
    """What llguidance has against a grammar; empty: nothing. Many lines of a batch have the same one."""
    problem: str = llguidance.LLMatcher.validate_grammar(grammar)
    return problem


def _grammar(options: GenerateOptions) -> str:
    """In llguidance's dialect of Lark."""
    if options.schema is None:
        return f"{HEAD}/{'|'.join(map(_literal, options.choices))}/"
    return f"{HEAD}%json {json.dumps(json.loads(options.schema) | {'x-guidance': JSON_STYLE})}"


def _literal(text: str) -> str:
    """As a regular expression: one with thousands of alternatives costs no more than one with two."""
    return "".join(
        letter if letter.isascii() and letter.isalnum() else f"\\x{{{ord(letter):x}}}"
        for letter in text
    )


def _refuse(options: GenerateOptions, message: str) -> None:
    if message:
        raise OptionError(f"{_name(options)}: {_one_line(message)}")


def _name(options: GenerateOptions) -> str:
    return "choices" if options.schema is None else "schema"


def _one_line(message: str) -> str:
    """Without the place in a grammar that the user has not written."""
    message = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", message)
    return " ".join(re.split(r"\n +1 \| |\n<", message)[0].split())[:300]
