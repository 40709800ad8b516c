"""What is saved of a conversation, and its JSON. Every text that is read may be anybody's: it is checked before it is believed."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from mlxrunner.chat.branches import MAIN
from mlxrunner.chat.history import History, Mark, Spelling, Turn, common
from mlxrunner.chat.spelling import messages
from mlxrunner.errors import PromptError, SessionError
from mlxrunner.tokenizer.base import Message, Tokenizer

SCHEMA = 1
MOST_TOKENS = 2**31 - 1
LATEST = 4e9
"""The end of what a session can say about when it was saved, in seconds since 1970: in 2096."""
HALF = "\ufffd"
"""What bytes are decoded to that are no character."""


@dataclass
class Branch:
    """One line of a conversation, with its system prompt."""

    system: str | None = None
    history: History = field(default_factory=History)


@dataclass
class Session:
    """`branches` by name, one of which, `branch`, is the present one. `settings`: of the chat, as JSON knows them.

    `fingerprint`: of the model that it was made with, a text for each part (see `fingerprint.py`). `saved_at`: seconds since 1970.
    """

    model: str
    branches: dict[str, Branch] = field(default_factory=lambda: {MAIN: Branch()})
    branch: str = MAIN
    settings: dict[str, Any] = field(default_factory=dict)
    fingerprint: dict[str, str] = field(default_factory=dict)
    saved_at: float = 0.0

    @property
    def system(self) -> str | None:
        return self.branches[self.branch].system

    @property
    def history(self) -> History:
        return self.branches[self.branch].history

    @property
    def messages(self) -> list[Message]:
        """All turns of the present branch, without the system prompt."""
        return messages(replace(self.history, first=0), None)

    def forget_tokens(self) -> None:
        """The text stays: for a model that would spell it otherwise."""
        for branch in self.branches.values():
            branch.history.forget_tokens()

    def forget_misspelled(self, tokenizer: Tokenizer, vocab: int) -> bool:
        """Forget tokens that do not spell the text beside them, or are none of the `vocab` (0: not known); whether there were any."""
        found = [
            one.history
            for one in self.branches.values()
            if not _is_spelled(one.history, tokenizer, vocab)
        ]
        for history in found:
            history.forget_tokens()
        return bool(found)

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA, **vars(self)}, default=vars)

    @classmethod
    def from_json(cls, text: str | bytes) -> Session:
        """SessionError that says what is wrong with it."""
        try:
            found = json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise SessionError(
                f"is not readable as JSON ({' '.join(str(error).split())[:100]})"
            ) from error
        read = _Reader(found, "the session")
        schema = read.take("schema", int)
        if schema != SCHEMA:
            raise SessionError(
                f"was written in format {schema}, and this version reads format {SCHEMA}"
            )
        branches = {
            _one_word(name): _branch(value) for name, value in read.take("branches", dict).items()
        }
        session = cls(
            model=read.take("model", str),
            branches=branches,
            branch=read.take("branch", str),
            settings=read.take("settings", dict),
            fingerprint={
                str(name): str(value) for name, value in read.take("fingerprint", dict).items()
            },
            saved_at=float(min(max(read.take("saved_at", float, int), 0), LATEST)),
        )
        if session.branch not in branches:
            raise SessionError(
                f"has no branch {session.branch[:50]!r}, which it says is the present one"
            )
        return session


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


class _Reader:
    """Takes values of the right types out of a JSON object."""

    def __init__(self, found: Any, what: str) -> None:
        if not isinstance(found, dict):
            raise SessionError(f"is damaged: {what} is no object")
        self._found, self._what = found, what

    def take(self, name: str, *types: type | None) -> Any:
        value = self._found.get(name)
        if not any(value is None if one is None else type(value) is one for one in types):
            raise SessionError(f"is damaged: {name!r} of {self._what} is {repr(value)[:50]}")
        return value


def _one_word(name: str) -> str:
    if name.split() != [name]:
        raise SessionError(f"is damaged: {name[:50]!r} is no name for a branch")
    return name


def _branch(value: Any) -> Branch:
    read = _Reader(value, "a branch")
    return Branch(read.take("system", str, None), _history(read.take("history", dict)))


def _history(value: Any) -> History:
    read = _Reader(value, "a history")
    spelling = _Reader(read.take("spelling", dict), "a spelling")
    text, tokens = spelling.take("text", str), spelling.take("tokens", list)
    if any(type(token) is not int or not 0 <= token <= MOST_TOKENS for token in tokens):
        raise SessionError("is damaged: a token is no whole number from 0 to 2147483647")
    turns = [_turn(turn, Mark(len(text), len(tokens))) for turn in read.take("turns", list)]
    marks = [mark for turn in turns for mark in (turn.begins, turn.ends) if mark is not None]
    for one, other in pairwise(marks):
        if one.characters > other.characters or one.tokens > other.tokens:
            raise SessionError(
                f"is damaged: a mark at {other.tokens} of {len(tokens)} tokens comes after one at {one.tokens}"
            )
    first, dropped = read.take("first", int), read.take("dropped", int)
    if not 0 <= first <= len(turns) or dropped < 0:
        raise SessionError(
            f"is damaged: the first of {len(turns)} turns is {first}, and {dropped} tokens were dropped"
        )
    return History(turns, Spelling(text, tokens), first, dropped)


def _turn(value: Any, most: Mark) -> Turn:
    read = _Reader(value, "a turn")
    begins, ends = (_mark(read.take(name, dict, None), most) for name in ("begins", "ends"))
    return Turn(
        read.take("user", str), read.take("answer", str), begins, ends, read.take("closing", str)
    )


def _mark(value: Any, most: Mark) -> Mark | None:
    if value is None:
        return None
    read = _Reader(value, "a mark")
    mark = Mark(read.take("characters", int), read.take("tokens", int))
    if not (0 <= mark.characters <= most.characters and 0 <= mark.tokens <= most.tokens):
        raise SessionError(f"is damaged: a mark at {mark.tokens} of {most.tokens} tokens")
    return mark


def _is_spelled(history: History, tokenizer: Tokenizer, vocab: int) -> bool:
    """Whether the tokens are those of the text, but for white space, which some tokenizers add or take away, and halves of characters."""
    text, tokens = history.spelling.text, history.spelling.tokens
    if vocab and max(tokens, default=0) >= vocab:
        return False
    if not text and not history.turns:  # as caches come from elsewhere
        return True
    spelled = _bare(tokenizer.decode(tokens))
    compare = _are_ends if history.dropped else _is_whole
    try:
        # A tokenizer may write some texts otherwise, or put a token in front.
        return compare(spelled, _bare(text)) or compare(
            spelled, _bare(tokenizer.decode(tokenizer.encode(text)))
        )
    except PromptError:
        return False


def _bare(text: str) -> str:
    return "".join(text.split())


def _is_whole(spelled: str, text: str) -> bool:
    """Where bytes are no character, those around them may be lost with them: at most a character for each mark."""
    text, place = text.replace(HALF, ""), 0
    for part in spelled.split(HALF):
        found = text.find(part, place)
        if found < 0:
            return False
        place = found + len(part)
    return len(text) <= len(spelled)


def _are_ends(spelled: str, text: str) -> bool:
    """A full context has dropped what was between them."""
    spelled, text = spelled.replace(HALF, ""), text.replace(HALF, "")
    return common(spelled, text) + common(spelled[::-1], text[::-1]) >= len(spelled)
