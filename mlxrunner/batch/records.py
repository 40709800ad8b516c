"""The lines and answers that the store of a batch keeps, and the forms in which it keeps them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np

from mlxrunner.cache.tokens import TokenArray, common_prefix
from mlxrunner.templates.messages import PlainMessage

Format = Literal["plain", "chat.completion", "text_completion", "response", "unknown"]
"""The form of a line's answer: our own object, or the OpenAI object of that name.

A line that can't be read is "unknown"; `finish` gives it the format of the first line that can.
"""

CUT = "cut"
"""The name, among the parts of a shard, of the digest of the cut that it is a part of."""
FORMATS = frozenset(get_args(Format))
LONG_KEY = 1000
"""The bytes of a sort key above which numpy finds a common prefix faster than whole numbers do."""
Place = int | str
"""The number of a line in the only file, from 1, or a text of words that names its place."""


def place_of(number: Place) -> str:
    """Return a line's place for an error: `line 4`, or the text that names it."""
    return f"line {number}" if isinstance(number, int) else number


@dataclass(frozen=True)
class StoredLine:
    """A line of the input."""

    index: int
    """The number of the line among those that are not empty, from 0."""
    number: Place
    """The number of the line in the file, from 1, or a text that says where it is."""
    tokens: TokenArray
    """The tokens of its prompt; empty if there is an error."""
    id: str | int | None = None
    """The id that the line gives; None if it gives none."""
    format: Format = "plain"
    """The form of its answer."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of `GenerateOptions` that the line itself gives."""
    error: str | None = None
    """The reason why it can't be run, in one line; None if it can."""
    prompt: str | Sequence[PlainMessage] | None = None
    """The text or the messages from which the tokens were made; None for token ids."""

    @property
    def key(self) -> bytes:
        """The `sort_key` of the tokens."""
        return sort_key(self.tokens)


@dataclass(slots=True)
class BriefLine:
    """The fields of a StoredLine on which its cost depends. It is made in less time."""

    index: int
    key: bytes
    options: Mapping[str, Any]
    error: str | None

    @property
    def tokens(self) -> TokenArray:
        """The tokens of its prompt, which are made anew each time."""
        return tokens_of(self.key)


@dataclass(frozen=True)
class StoredAnswer:
    """The answer to a line."""

    place: int
    """The position of this answer, to be passed as `after` to read the answers behind it."""
    index: int
    """The index of the line."""
    body: bytes
    """The bytes of the answer."""
    failed: bool
    """True if the answer is an error."""


@dataclass(frozen=True)
class LineCounts:
    """The numbers of lines in a store."""

    lines: int
    """The lines that were added; all lines once the input is complete."""
    broken: int
    """The lines that can't be run."""
    done: int
    """The lines that have an answer."""
    failed: int
    """The lines whose answer is an error."""

    @property
    def left(self) -> int:
        """The lines that have no answer."""
        return self.lines - self.done


def sort_key(tokens: TokenArray) -> bytes:
    """Return the tokens as bytes that sort like the tokens, prefixes first.

    Each token takes 4 bytes, the most significant one first.
    """
    return tokens.astype(">u4").tobytes()


def tokens_of(key: bytes) -> TokenArray:
    """Return the tokens of a `sort_key`."""
    return np.frombuffer(key, ">u4").astype(np.int32)


def shared_tokens(one: bytes, other: bytes) -> int:
    """Return the tokens of the longest common prefix of two sort keys."""
    size = min(len(one), len(other))
    if size > LONG_KEY:
        return common_prefix(np.frombuffer(one, np.int32), np.frombuffer(other, np.int32))
    differing = int.from_bytes(one[:size]) ^ int.from_bytes(other[:size])
    return (8 * size - differing.bit_length()) // 32


def line_of(
    index: Any,
    number: Any,
    name: Any,
    options: Any,
    error: Any,
    tokens: Any,
    prompt: Any,
    form: Any,
) -> StoredLine:
    """Return the line of a row.

    Raise ValueError, TypeError or RecursionError if the columns are not those of a line, although
    their checksum is right.
    """
    options = _options_of(index, number, name, options, error)
    made_of = None if prompt is None else json.loads(prompt)
    return StoredLine(index, number, tokens_of(tokens), name, form, options, error, made_of)


def brief_of(
    index: Any, number: Any, name: Any, options: Any, error: Any, tokens: Any, *_: Any
) -> BriefLine:
    """Return the line of a row in brief. Raise what `line_of` raises, the prompt aside."""
    options = _options_of(index, number, name, options, error)
    if not isinstance(tokens, bytes) or len(tokens) % 4:
        raise TypeError("not the tokens of a line")
    return BriefLine(index, tokens, options, error)


def _options_of(index: Any, number: Any, name: Any, options: Any, error: Any) -> dict[str, Any]:
    """Return the options of a row whose columns are those of a line; TypeError if not."""
    found = json.loads(options) if options else {}
    if not (
        isinstance(found, dict)
        and isinstance(index, int)
        and isinstance(number, (int, str))
        and (name is None or isinstance(name, (str, int)))
        and (error is None or isinstance(error, str))
    ):
        raise TypeError("not the columns of a line")
    return found
