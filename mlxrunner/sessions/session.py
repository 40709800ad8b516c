"""The saved form of a conversation: `Session` and its JSON.

A file may come from anybody, so each value is checked before it is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec

from mlxrunner.errors import PictureError, PromptError, SessionError
from mlxrunner.options import LARGEST_TOKEN
from mlxrunner.system.reading import no_constant, said_once, unsealed
from mlxrunner.templates.messages import PlainMessage, common, content_for_template

if TYPE_CHECKING:
    from mlxrunner.pictures.table import Picture
    from mlxrunner.tokenizer.base import Tokenizer


@dataclass(frozen=True)
class Position:
    """A position in a rendering."""

    characters: int
    tokens: int


@dataclass(frozen=True)
class Rendering:
    """A text and its tokens."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    """The tokens of `text`, without those that were dropped when the context was full."""

    @property
    def end(self) -> Position:
        """The position after the last character and token."""
        return Position(len(self.text), len(self.tokens))

    def shared(self, other: Rendering) -> Position:
        """Return the position up to which both are the same."""
        return Position(common(self.text, other.text), common(self.tokens, other.tokens))

    def up_to(self, position: Position) -> Rendering:
        """Return the rendering up to `position`."""
        return Rendering(self.text[: position.characters], self.tokens[: position.tokens])

    def and_then(self, text: str, tokens: Sequence[int]) -> Rendering:
        """Return the rendering with `text` and `tokens` added."""
        return Rendering(self.text + text, (*self.tokens, *tokens))


@dataclass(frozen=True)
class SessionTurn:
    """A message of the user and its answer."""

    user: str
    answer: str
    """The answer, with its thinking."""
    begins: Position | None = None
    """The beginning of the answer in the history's rendering, or None if it is not known."""
    ends: Position | None = None
    """The end of the answer and of `closing`, or None if it is not known."""
    closing: str = ""
    """The text of the token that ended the answer, if one did."""


@dataclass(frozen=True)
class History:
    """The turns of a conversation and their rendering."""

    turns: tuple[SessionTurn, ...] = ()
    rendering: Rendering = field(default_factory=Rendering)
    """The rendering of the turns from `first` on; empty if their tokens are not known."""
    first: int = 0
    """Index of the first turn that is rendered; earlier turns were left out to make room."""
    dropped: int = 0
    """Number of tokens dropped from the rendering because the context was full."""

    def messages(self, system: str | None) -> list[PlainMessage]:
        """Return the messages for the template: the system prompt and the turns from `first` on."""
        messages: list[PlainMessage] = [{"role": "system", "content": system}] if system else []
        for turn in self.turns[self.first :]:
            messages += [
                {"role": "user", "content": turn.user},
                {"role": "assistant", "content": content_for_template(turn.answer)},
            ]
        return messages

    @property
    def all_messages(self) -> list[PlainMessage]:
        """The messages of all turns, without a system prompt."""
        return replace(self, first=0).messages(None)

    @property
    def _said(self) -> list[tuple[str, str]]:
        return [(turn.user, turn.answer) for turn in self.turns]

    def is_within(self, other: History) -> bool:
        """Return True if `other` begins with all these turns.

        The last answer of this history may be only the beginning of the answer in `other`.
        """
        if not self.turns:
            return True
        if len(other.turns) < len(self.turns):
            return False
        *earlier, (user, answer) = self._said
        *others, (other_user, other_answer) = other._said[: len(self.turns)]
        return earlier == others and user == other_user and other_answer.startswith(answer)

    def shared_turns(self, other: History) -> int:
        """Return the number of turns at the beginning that are equal in both."""
        return common(self._said, other._said)

    def cut(self, turns: int) -> History:
        """Return the first `turns` turns, with their tokens if those are known."""
        kept = replace(self, turns=self.turns[:turns], first=min(self.first, turns))
        end = kept.turns[-1].ends if kept.turns else None
        if end is None:
            return kept.without_tokens()
        return replace(kept, rendering=self.rendering.up_to(end))

    def with_turn(self, turn: SessionTurn, rendering: Rendering) -> History:
        """Return the history with one turn more.

        `rendering` is the rendering of the new history as a whole. If it differs from the present
        one within earlier turns, their positions after the difference are forgotten.
        """
        earlier = self._with_positions_up_to(self.rendering.shared(rendering))
        turns = (*earlier, replace(turn, ends=rendering.end))
        return replace(self, turns=turns, rendering=rendering)

    def rerendered(self, kept: Position | None, rendering: Rendering, closing: str) -> History:
        """Return the history with another rendering of all that follows `kept`.

        `kept` is None to replace the whole rendering. `closing` is the text after the last answer.
        """
        *earlier, last = self._with_positions_up_to(kept or Position(0, 0))
        turns = (*earlier, replace(last, ends=rendering.end, closing=closing))
        dropped = 0 if kept is None else self.dropped
        return replace(self, turns=turns, rendering=rendering, dropped=dropped)

    @property
    def shows_pictures(self) -> bool:
        """True if pictures are among the tokens, whose ids hold for one loaded model only."""
        from mlxrunner.cache.entry import FIRST_OF_PICTURES  # with numpy, which completion has not

        return max(self.rendering.tokens, default=0) >= FIRST_OF_PICTURES

    def without_tokens(self) -> History:
        """Return the turns as texts only."""
        turns = tuple(replace(turn, begins=None, ends=None) for turn in self.turns)
        return History(turns, first=self.first)

    def without_range(self, keep: int, discard: int) -> History:
        """Return the history without the tokens `keep` to `keep + discard`.

        A full context drops such a range.
        """
        if discard <= 0:
            return self

        def moved(position: Position | None) -> Position | None:
            if position is None or position.tokens <= keep:
                return position
            if position.tokens < keep + discard:
                return None
            return replace(position, tokens=position.tokens - discard)

        turns = tuple(
            replace(turn, begins=moved(turn.begins), ends=moved(turn.ends)) for turn in self.turns
        )
        text, tokens = self.rendering.text, self.rendering.tokens
        rendering = Rendering(text, tokens[:keep] + tokens[keep + discard :])
        return replace(self, turns=turns, rendering=rendering, dropped=self.dropped + discard)

    def last_position(self, characters: int) -> Position | None:
        """Return the last known position within the first `characters` characters."""
        positions = (one for turn in reversed(self.turns) for one in (turn.ends, turn.begins))
        return next((one for one in positions if one and one.characters <= characters), None)

    def _with_positions_up_to(self, kept: Position) -> list[SessionTurn]:
        """Return the turns without the positions after `kept`."""

        def within(one: Position | None) -> Position | None:
            is_kept = one and one.tokens <= kept.tokens and one.characters <= kept.characters
            return one if is_kept else None

        return [
            replace(turn, begins=within(turn.begins), ends=within(turn.ends)) for turn in self.turns
        ]


SCHEMA = 1
"""Version of the JSON format."""
MAIN = "main"
"""The name of the first branch."""
LATEST = 4e9
"""The latest accepted time of saving, in seconds since 1970: in the year 2096."""
HALF = "\ufffd"
"""The character that stands for bytes that are not a whole character."""
NAMES = {
    *("schema", "model", "branches", "branch", "settings", "fingerprint", "saved_at", "pictures")
}
"""Names of the fields in the JSON of a session."""
SAVED_AS = {"rendering": "spelling"}
"""Names of fields that have another name in the JSON of a session."""


@dataclass(frozen=True)
class Branch:
    """One line of a conversation, with its system prompt."""

    system: str | None = None
    history: History = field(default_factory=History)


@dataclass
class Session:
    """A conversation with all its branches."""

    model: str
    branches: dict[str, Branch] = field(default_factory=lambda: {MAIN: Branch()})
    branch: str = MAIN
    """The name of the present branch."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The settings of the chat, as JSON values."""
    fingerprint: dict[str, str] = field(default_factory=dict)
    """A text for each part of the model that made the tokens; see `models.fingerprint`."""
    saved_at: float = 0.0
    """The time of the last save in seconds since 1970, or 0."""
    pictures: dict[str, list[int]] = field(default_factory=dict)
    """The pictures among the tokens, by digest, with their ids; see `mlxrunner.pictures.table`."""
    is_changed: bool = False
    """True if the file is not as this program left it: then the texts are all that was read."""

    @property
    def system(self) -> str | None:
        """The system prompt of the present branch."""
        return self.branches[self.branch].system

    @property
    def history(self) -> History:
        """The history of the present branch."""
        return self.branches[self.branch].history

    @property
    def messages(self) -> list[PlainMessage]:
        """The messages of all turns of the present branch, without the system prompt."""
        return self.history.all_messages

    def forget_tokens(self) -> None:
        """Keep only the texts, for a model that renders or tokenizes them differently."""
        self._forget_where(lambda history: True)

    def forget_mismatched(self, tokenizer: Tokenizer, vocab: int) -> bool:
        """Forget tokens that do not decode to their text. Return True if there were any.

        `vocab` is the model's number of tokens, or 0 if it is not known.
        """
        return self._forget_where(lambda history: not _matches(history, tokenizer, vocab))

    def renumber(self, known: Mapping[bytes, Picture]) -> None:
        """Give pictures among the tokens the ids that they have in this process.

        `known`: the pictures of this process, by digest. A branch that has another one keeps its
        texts only.
        """
        from mlxrunner.cache.entry import as_tokens  # with numpy, which completion has not
        from mlxrunner.pictures.table import renumbered

        for name, branch in self.branches.items():
            history = branch.history
            try:
                tokens = renumbered(as_tokens(history.rendering.tokens), self.pictures, known)
                rendering = replace(history.rendering, tokens=tuple(tokens.tolist()))
                history = replace(history, rendering=rendering)
            except PromptError:
                history = history.without_tokens()
            self.branches[name] = replace(branch, history=history)
        self.pictures = {}

    def _forget_where(self, holds: Callable[[History], bool]) -> bool:
        found = {name: one for name, one in self.branches.items() if holds(one.history)}
        self.branches |= {
            name: replace(one, history=one.history.without_tokens()) for name, one in found.items()
        }
        return bool(found)

    def to_json(self) -> str:
        """Return the session as JSON, which `from_json` reads."""
        branches = self.branches
        if not self.pictures:
            branches = {name: _lasting(branch) for name, branch in branches.items()}
        fields = {"schema": SCHEMA, **vars(self), "branches": branches}
        del fields["is_changed"]
        return json.dumps(fields, default=_fields)

    @classmethod
    def from_json(cls, text: str | bytes) -> Session:
        """Return the session in `text`, or only its texts and settings if its checksum is wrong.

        Raise SessionError if it is damaged or in another format.
        """
        is_whole, content = unsealed(text.encode() if isinstance(text, str) else text)
        try:
            found = json.loads(
                content if is_whole is None else content.decode(errors="replace"),
                parse_constant=no_constant,
                object_pairs_hook=said_once,
            )
        except (ValueError, RecursionError) as error:
            raise SessionError(
                f"is not readable as JSON ({' '.join(str(error).split())[:100]})"
            ) from error
        # A name that is not known may be a damaged one, as that of the checksum.
        is_changed = not is_whole and (
            is_whole is False or (isinstance(found, dict) and bool(found.keys() - NAMES))
        )
        try:
            kind: type[_SavedTexts | _SavedSession] = _SavedTexts if is_changed else _SavedSession
            read = msgspec.convert(found, kind)
        except msgspec.ValidationError as error:
            raise SessionError(f"is damaged: {error}") from error
        if read.schema != SCHEMA:
            raise SessionError(
                f"was written in format {read.schema}, and this version reads format {SCHEMA}: "
                "update mlxrunner"
            )
        for name in read.branches:
            if name.split() != [name]:
                raise SessionError(f"is damaged: {name[:50]!r} is not a name for a branch")
        session = read.session()
        if session.branch not in session.branches:
            raise SessionError(
                f"has no branch {session.branch[:50]!r}, which it says is the present one"
            )
        return session


class _SavedHistory(msgspec.Struct):
    """A history in the JSON of a session."""

    turns: tuple[SessionTurn, ...]
    spelling: Rendering
    first: int
    dropped: int

    def history(self) -> History:
        """Return the history. Raise SessionError if its numbers contradict each other."""
        tokens, most = self.spelling.tokens, self.spelling.end
        if any(not 0 <= token <= LARGEST_TOKEN for token in tokens):
            raise SessionError("is damaged: a token is not a whole number between 0 and 2147483647")
        before = Position(0, 0)
        for one in (mark for turn in self.turns for mark in (turn.begins, turn.ends) if mark):
            if not (
                before.characters <= one.characters <= most.characters
                and before.tokens <= one.tokens <= most.tokens
            ):
                raise SessionError(f"is damaged: a mark at {one.tokens} of {most.tokens} tokens")
            before = one
        if not 0 <= self.first <= len(self.turns) or self.dropped < 0:
            raise SessionError(
                f"is damaged: the first of {len(self.turns)} turns is {self.first}, "
                f"and {self.dropped} tokens were dropped"
            )
        return History(self.turns, self.spelling, self.first, self.dropped)


class _SavedBranch(msgspec.Struct):
    system: str | None
    history: _SavedHistory

    def branch(self) -> Branch:
        return Branch(self.system, self.history.history())


class _SavedSession(msgspec.Struct):
    """The JSON of a session."""

    schema: int
    model: str
    branches: dict[str, _SavedBranch]
    branch: str
    settings: dict[str, Any]
    fingerprint: dict[str, Any]
    saved_at: int | float
    pictures: dict[str, Any] | None = None

    def session(self) -> Session:
        return Session(
            self.model,
            {name: one.branch() for name, one in self.branches.items()},
            self.branch,
            self.settings,
            {name: str(value) for name, value in self.fingerprint.items()},
            float(min(max(self.saved_at, 0), LATEST)),
            self.pictures or {},
        )


class _TextsOfTurn(msgspec.Struct):
    user: str
    answer: str


class _TextsOfHistory(msgspec.Struct):
    turns: list[_TextsOfTurn]


class _TextsOfBranch(msgspec.Struct):
    system: str | None
    history: _TextsOfHistory


class _SavedTexts(msgspec.Struct):
    """The texts and settings of a session whose file was changed.

    Nothing tells if its tokens are still those of its words. A text has to be under its name.
    """

    model: str
    branches: dict[str, _TextsOfBranch]
    settings: dict[str, Any]
    branch: Any = None
    schema: int = SCHEMA

    def session(self) -> Session:
        branches = {
            name: Branch(
                one.system,
                History(tuple(SessionTurn(turn.user, turn.answer) for turn in one.history.turns)),
            )
            for name, one in self.branches.items()
        }
        present = self.branch if self.branch in [*branches] else next(iter(branches), "")
        return Session(self.model, branches, present, self.settings, is_changed=True)


def _lasting(branch: Branch) -> Branch:
    """Return a branch without tokens if pictures are among them, and nothing says which."""
    if not branch.history.shows_pictures:
        return branch
    return replace(branch, history=branch.history.without_tokens())


def _fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass under their names in the JSON."""
    return {SAVED_AS.get(name, name): field for name, field in vars(value).items()}


def _matches(history: History, tokenizer: Tokenizer, vocab: int) -> bool:
    """Return True if the tokens of `history` decode to its text.

    White space may differ, because some tokenizers add or remove it. So may broken characters.
    """
    from mlxrunner.cache.entry import FIRST_OF_PICTURES  # with numpy, which completion has not

    text, tokens = history.rendering.text, history.rendering.tokens
    if vocab and any(vocab <= token < FIRST_OF_PICTURES for token in tokens):
        return False
    if not text and not history.turns:  # imported caches come without a text
        return True
    decoded = _bare(tokenizer.decode(tokens))
    compare = _are_ends if history.dropped else _is_whole
    try:
        # A tokenizer may change some texts, or put a token in front.
        return compare(decoded, _bare(text)) or compare(
            decoded, _bare(tokenizer.decode(tokenizer.encode(text)))
        )
    except (PromptError, PictureError):
        return False


def _bare(text: str) -> str:
    return "".join(text.split())


def _is_whole(decoded: str, text: str) -> bool:
    """Return True if `decoded` is `text` with at most one character lost for each broken one."""
    text, place = text.replace(HALF, ""), 0
    for part in decoded.split(HALF):
        found = text.find(part, place)
        if found < 0:
            return False
        place = found + len(part)
    return len(text) <= len(decoded)


def _are_ends(decoded: str, text: str) -> bool:
    """Return True if `decoded` is `text` without a part in the middle."""
    decoded, text = decoded.replace(HALF, ""), text.replace(HALF, "")
    return common(decoded, text) + common(decoded[::-1], text[::-1]) >= len(decoded)
