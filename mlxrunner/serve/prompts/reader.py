"""Read an answer, while it streams, into thinking, text and tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from mlxrunner.serve.events import CUT_OFF, Note
from mlxrunner.serve.prompts.arguments import name_of
from mlxrunner.serve.prompts.channels import ChannelReader
from mlxrunner.serve.prompts.formats import Call, CallFormat, Piece, Tools
from mlxrunner.templates.thinking import ThinkingSplitter, overlap, without_thinking

_HEADER = re.compile(r"\s*(?:\[TOOL_CALLS\])?\s*[\w.-]+\s*\[ARGS\]\s*")
SEPARATORS = " \t\n;,"
"""Characters between two calls without tags."""
_DECODER = json.JSONDecoder()
NO_CALLS = CallFormat("text", "tags", "\ue0f2\ue0f3")
"""Stands for the format of an answer without calls: its tag is private characters."""


class CallReader:
    """Takes the calls out of a text that streams.

    The pieces do not depend on how the text was cut, once neighbouring texts are joined.
    """

    def __init__(self, form: CallFormat, tools: Tools) -> None:
        """Begin an answer with calls in the format `form` of any of `tools`."""
        self._form, self._tools = form, tools
        self._held = ""
        self._in_call = form.kind == "bare"
        self._is_after_call = False
        self._searched = 0
        self._may_go_on = True  # an end tag in a text of the arguments does not end the call
        self._gap = ""  # white space between a text and a call
        self._may_end = False  # the last part may have ended a JSON value
        self._pieces: list[Piece] = []
        self.note: Note | None = None
        """The reason why a text was not read as a call, or None."""

    def add(self, text: str) -> list[Piece]:
        """Take the next part of the text, and return the pieces that are certain now."""
        self._held += text
        self._may_end = "}" in text or "]" in text
        self._go_on()
        return self._taken()

    def finish(self, *, is_whole: bool = True) -> list[Piece]:
        """End the text, and return the rest. `is_whole`: the model ended it, not a limit."""
        if is_whole and self._in_call and self._form.kind == "tags":
            self._may_go_on, self._searched = False, 0  # a text was begun that has no end
            self._go_on()
        held, self._held = self._held, ""
        if not self._in_call:
            self._show(held.rstrip() if self._is_after_call else held)
        elif self._form.kind == "bare":
            self._show(held)
        elif held.strip() and (is_whole or _json_end(held.strip(), 0) == len(held.strip())):
            self._read(held, "")
        elif not (self._is_after_call and not held.strip()):
            self._misread(CUT_OFF, held)
        return self._taken()

    def _go_on(self) -> None:
        while self._step_in_call() if self._in_call else self._step_in_text():
            pass

    def _taken(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _step_in_text(self) -> bool:
        """Show text up to a call. Return True if a call begins."""
        if self._is_after_call:
            self._held = self._held.lstrip()
        before, found, rest = self._held.partition(self._form.start)
        if found:
            text = before.rstrip()
            self._show(text)
            self._gap = before[len(text) :]
            self._held, self._in_call, self._searched = rest, True, 0
            return True
        shown = len(self._held) - overlap(self._held, self._form.start)
        shown = len(self._held[:shown].rstrip())
        self._show(self._held[:shown])
        self._held = self._held[shown:]
        return False

    def _step_in_call(self) -> bool:
        """Read a call if it is whole. Return True if more may be certain."""
        if self._form.kind == "bare":
            return self._step_bare()
        if self._form.kind == "open":
            return self._step_open()
        at = self._held.find(self._form.end, self._searched)
        if at < 0:
            self._searched = max(self._searched, len(self._held) - len(self._form.end) + 1, 0)
            return False
        body = self._held[:at]
        if self._may_go_on and self._form.is_in_value(body, self._tools):
            self._searched = at + 1  # the tag is in a text of the arguments
            return True
        self._held, self._in_call = self._held[at + len(self._form.end) :], False
        self._read(body, self._form.end)
        return True

    def _step_open(self) -> bool:
        """Read a call of a format without an end tag: a list, or a name and an object."""
        if header := _HEADER.match(self._held):
            begin = header.end()
        elif self._held.lstrip().startswith("["):
            begin = len(self._held) - len(self._held.lstrip())
        else:
            return False
        end = _json_end(self._held, begin) if self._may_end else None
        if end is None:
            return False
        body, self._held = self._held[:end], self._held[end:]
        self._read(body, "")
        return bool(self._held.strip())

    def _step_bare(self) -> bool:
        """Read a call of a format without tags, or show that the answer is a text."""
        if self._is_after_call:
            self._held = self._held.lstrip(SEPARATORS)
        start = self._held.lstrip()
        if self._form.start.startswith(start):
            return False
        start = start.removeprefix(self._form.start).lstrip()
        if not start:
            return False
        begin = len(self._held) - len(start)
        if not start.startswith("{") or not _may_name(start):
            self._become_text()
            return False
        end = _json_end(self._held, begin) if self._may_end else None
        if end is None:
            return False
        body = self._held[begin:end]
        try:
            calls = self._form.calls(body, self._tools)
        except ValueError:
            calls = []
        names = {name_of(tool) for tool in self._tools}
        if not calls or any(call.name not in names for call in calls):
            self._become_text()
            return False
        self._calls(calls)
        self._held = self._held[end:]
        return True

    def _become_text(self) -> None:
        """Show the rest of the answer as a text: it is no call."""
        self._form = NO_CALLS
        self._in_call = False
        self._step_in_text()

    def _read(self, body: str, end: str) -> None:
        try:
            self._calls(self._form.calls(body, self._tools))
        except ValueError as error:
            self._misread(str(error), body + end)

    def _misread(self, why: str, body: str) -> None:
        self.note = self.note or Note.unread(why)
        self._show(self._gap + self._form.start + body)
        self._is_after_call = False

    def _calls(self, calls: list[Call]) -> None:
        self._pieces += [Piece("call", call=call) for call in calls]
        self._is_after_call = True

    def _show(self, text: str) -> None:
        if text:
            self._pieces.append(Piece("text", text))
            self._is_after_call = False


def _may_name(start: str) -> bool:
    """Return True if a JSON text that begins with `start` may be a call."""
    compact = "".join(start[:40].split())
    keys = ('{"name":', '{"type":"function"', '{"function":')
    return any(key.startswith(compact) or compact.startswith(key) for key in keys)


def _json_end(text: str, begin: int) -> int | None:
    """Return the end of the JSON value at `begin`, or None if it is not whole."""
    try:
        return _DECODER.raw_decode(text, begin)[1]
    except (ValueError, RecursionError):
        return None


class AnswerReader:
    """Takes the thinking and the calls out of an answer that streams."""

    def __init__(self, form: CallFormat | None, tools: Tools = (), *, prompt: str = "") -> None:
        """Begin an answer that continues the text `prompt`, which may have opened the thinking.

        `form`: the format of calls; None if none are expected.
        """
        self._thinking = ThinkingSplitter(prompt)
        self._calls = CallReader(form or NO_CALLS, tools)

    @property
    def is_thinking(self) -> bool:
        """True while the answer is within its thinking."""
        return self._thinking.is_thinking

    @property
    def note(self) -> Note | None:
        """The reason why a text was not read as a call, or None."""
        return self._calls.note

    def add(self, text: str) -> Iterator[Piece]:
        """Take the next part of the answer, and yield the pieces that are certain now."""
        return self._read(self._thinking.add(text))

    def finish(self, *, is_whole: bool = True) -> Iterator[Piece]:
        """End the answer, and yield the rest. `is_whole`: the model ended it, not a limit."""
        yield from self._read(self._thinking.finish())
        yield from self._calls.finish(is_whole=is_whole)

    def _read(self, split: Iterator[tuple[bool, str]]) -> Iterator[Piece]:
        for is_thinking, text in split:
            if is_thinking:
                yield Piece("thought", text)
            else:
                yield from self._calls.add(text)


Calls = tuple[tuple[str, str, str | None], ...]
"""The meanings of calls: see `Call.meaning`."""


@dataclass(frozen=True)
class Said:
    """The parts of a whole answer, without the white space around them."""

    thinking: str
    text: str
    calls: Calls
    """The meaning of each call."""
    begins: int
    """Characters of the answer before the text and the calls."""

    @classmethod
    def of(cls, answer: str, form: CallFormat | None, tools: Tools, prompt: str) -> Said:
        """Read a whole `answer` that continues the text `prompt`. See `reader_of`."""
        reader = reader_of(form, tools, prompt)
        pieces = [*reader.add(answer), *reader.finish()]
        rest = without_thinking(answer, prompt)
        return cls(
            "".join(piece.text for piece in pieces if piece.kind == "thought").strip(),
            "".join(piece.text for piece in pieces if piece.kind == "text").strip(),
            tuple(piece.call.meaning for piece in pieces if piece.call is not None),
            len(answer) - len(rest) if answer.endswith(rest) else 0,
        )


def reader_of(
    form: CallFormat | None, tools: Tools = (), prompt: str = ""
) -> AnswerReader | ChannelReader:
    """Return a reader for an answer that continues the text `prompt`.

    `form`: the format of calls; None if none are expected.
    """
    if form is not None and form.kind == "channels":
        return ChannelReader(prompt)
    return AnswerReader(form, tools, prompt=prompt)
