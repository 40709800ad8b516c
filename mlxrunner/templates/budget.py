"""The budget of one render of a chat template, and the price of each operation.

A step (an iteration, a call, a filter, an operator) spends time and text. No step is large: its
result is measured, and estimated in advance where it could be huge. This knows nothing about
how jinja compiles a template.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from typing import Any

import jinja2.sandbox

from mlxrunner.errors import TemplateLimitError

MOST_SECONDS = 5.0
"""Most seconds of processor time for one render, whatever earlier ones took.

A conversation of a million characters takes milliseconds.
"""
LEAST_TEXT = 2**18
"""Characters of the longest text that a template may make without being given any."""
TEXT_SHARE = 4
"""Characters of the longest text that a template may make, per character given to it.

The limit is LEAST_TEXT more than that.
"""
LEAST_WORK = 2**26
"""Characters of all texts together that a template may make without being given any."""
WORK_SHARE = 128
"""Characters of all texts together that a template may make, per character given to it.

The limit is LEAST_WORK more than that.
"""
MOST_WIDTH = 10_000
"""Largest width of padding, indents and the like, in characters."""
MOST_BITS = 2**12
"""Most bits of a whole number."""
STEPS_A_LOOK = 16
"""Steps between two looks at the clock."""
MOST_SLOW = 10_000
"""Most characters for a filter that takes quadratic time."""
SLOW = frozenset({"striptags", "urlize", "wordwrap", "pprint", "xmlattr"})
"""Filters that take quadratic time."""
WIDTHS = frozenset(
    {
        "center",
        "indent",
        "wordwrap",
        "batch",
        "slice",
        "tojson",
        "ljust",
        "rjust",
        "zfill",
        "expandtabs",
        "to_bytes",
    }
)
"""Filters and methods whose whole numbers are widths or counts."""
BACKWARDS = frozenset(
    {"rfind", "rindex", "rsplit", "rpartition", "strip", "lstrip", "rstrip", "trim"}
)
"""Filters and methods that take time in proportion to the product of two lengths."""
CONTAINERS: Any = (
    list,
    tuple,
    dict,
    set,
    frozenset,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)
SIZED: Any = (str, bytes, range, *CONTAINERS)
WIDE_FIELD = {
    "{": re.compile(r"\{[^{}:]*:[^{}]*(?:\d{5}|\{)"),
    "%": re.compile(r"(?<!\d)\d{5,}(?:\.\d*)?[hlL]?[A-Za-z]|%[^%A-Za-z(]*\*"),
}
"""Fields of a format whose width has five digits or is computed, by the sign that begins them.

Both patterns match in time linear in the length of the text.
"""


class Budget:
    """The time and the text that one render has left."""

    def __init__(self, given: int) -> None:
        """Allow a render of variables that have `given` characters together."""
        self.most_text = LEAST_TEXT + TEXT_SHARE * given
        self._given = given
        self._work_left = LEAST_WORK + WORK_SHARE * given
        self._deadline = time.thread_time() + MOST_SECONDS
        self._steps = 0
        self._weights: dict[int, tuple[int, Any]] = {}

    def spend(self, text: int = 0) -> None:
        """Count one step that makes `text` characters.

        Raise TemplateLimitError if the render has used up its time or its text.
        """
        self._steps += 1
        if self._steps % STEPS_A_LOOK == 0 and time.thread_time() > self._deadline:
            raise TemplateLimitError(f"it was stopped after {MOST_SECONDS:.2g} seconds")
        self._work_left -= text
        if text > self.most_text or self._work_left < 0:
            raise TemplateLimitError(
                f"it was stopped when it made more than {self.most_text:,} characters "
                f"out of {self._given:,}"
            )

    def made(self, value: Any) -> Any:
        """Spend for the new `value` and return it. Raise TemplateLimitError if it is too large."""
        if isinstance(value, str | bytes):
            self.spend(len(value))
        elif isinstance(value, CONTAINERS):
            if self.weight(value) > self.most_text:
                self.spend(self.weight(value))
            self.spend(len(value))
        elif isinstance(value, int) and value.bit_length() > MOST_BITS:
            raise TemplateLimitError(
                f"it was stopped when it made a number of more than {MOST_BITS} bits"
            )
        return value

    def weight(self, value: Any) -> int:
        """Return about how many characters `value` has when it is written out.

        A list that occurs twice in another list counts twice.
        """
        if isinstance(value, str | bytes):
            return len(value) + 1
        if not isinstance(value, CONTAINERS):
            return 1
        known = self._weights.get(id(value))
        if known is None:
            parts: Iterable[Any] = (
                value if not isinstance(value, dict) else (*value.keys(), *value.values())
            )
            # Keep the value, so that no other one gets its id.
            known = self._weights[id(value)] = 1 + sum(map(self.weight, parts)), value
        return known[0]


def size_of_result(budget: Budget, operator: str, left: Any, right: Any) -> int:
    """Return the characters that an operator makes, or 0 if not more than its operands have.

    Raise TemplateLimitError for a huge number or a format that is too wide.
    """
    if operator == "*":
        for text, times in ((left, right), (right, left)):
            if isinstance(times, int) and isinstance(text, str | bytes | list | tuple):
                return max(0, times) * budget.weight(text)
    if operator == "%" and isinstance(left, str | bytes):
        check_format(
            budget, left if isinstance(left, str) else left.decode("latin-1"), (right,), "%"
        )
    if (
        operator == "**"
        and isinstance(left, int)
        and isinstance(right, int)
        and left.bit_length() * right > MOST_BITS
    ):
        raise TemplateLimitError(
            f"it was stopped when it made a number of more than {MOST_BITS} bits"
        )
    return 0


def check_operation(budget: Budget, name: str, given: tuple[Any, ...]) -> None:
    """Spend for a filter, test or method before it runs on the values `given`.

    The first value is the one that it works on. Raise TemplateLimitError if it makes too much.
    """
    first, rest = (given[0], given[1:]) if given else (None, ())
    size = len(first) if isinstance(first, SIZED) else 1
    texts = [len(value) for value in rest if isinstance(value, str | bytes)]
    budget.spend()
    if name in SLOW and budget.weight(first) > MOST_SLOW:
        raise TemplateLimitError(
            f"{name}: {budget.weight(first):,} characters are more than {MOST_SLOW:,}"
        )
    if name in BACKWARDS and texts:
        budget.spend(size * max(texts) // 64)
    if name in WIDTHS:
        _check_widths(budget, name, size, rest)
    if name == "round" and any(isinstance(value, int) and abs(value) > 100 for value in rest):
        raise TemplateLimitError("round: more than 100 digits")
    if name == "sum" and any(isinstance(value, CONTAINERS) for value in rest):
        raise TemplateLimitError("sum: adds numbers only")
    if name == "format":
        check_format(budget, str(first), rest, "%{")
    if name == "replace" and len(texts) >= 2 and isinstance(first, str):
        old = next(value for value in rest if isinstance(value, str | bytes))
        budget.spend((first.count(old) if isinstance(old, str) else size) * texts[1])
    if name == "join":
        budget.spend(_joined_size(budget, first, rest))
    if name == "translate":
        budget.spend(size * max((budget.weight(value) for value in rest), default=0))


def _joined_size(budget: Budget, first: Any, rest: tuple[Any, ...]) -> int:
    """Return the characters that `join` makes.

    The filter gets the parts first, the method gets them second.
    """
    parts, mark = (
        (rest[0], first)
        if isinstance(first, str) and rest and not isinstance(rest[0], str)
        else (first, "")
    )
    marks = [value for value in (mark, *rest) if isinstance(value, str)]
    count = len(parts) if isinstance(parts, SIZED) else jinja2.sandbox.MAX_RANGE
    return budget.weight(parts) + count * max(map(len, marks), default=0)


def _check_widths(budget: Budget, name: str, size: int, rest: tuple[Any, ...]) -> None:
    for width in (value for value in rest if isinstance(value, int)):
        if abs(width) > MOST_WIDTH:
            raise TemplateLimitError(f"{name}: {str(width)[:20]} is more than {MOST_WIDTH:,}")
        if name in ("indent", "expandtabs", "tojson"):
            budget.spend(size * abs(width) // 16)


def check_format(budget: Budget, text: str, given: tuple[Any, ...], mark: str) -> None:
    """Spend for a format. Raise TemplateLimitError if a width has five digits or is computed."""
    if any(WIDE_FIELD[sign].search(text) for sign in mark):
        raise TemplateLimitError("a format with a width of five digits, or one that is computed")
    fields = sum(text.count(sign) for sign in mark)
    budget.spend(len(text) + fields * max(map(budget.weight, given), default=0))
