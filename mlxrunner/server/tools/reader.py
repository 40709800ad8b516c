"""Read an answer, while it streams, into thinking, text and tool calls."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from mlxrunner.batch.openai_format import TokenLogprob
from mlxrunner.results import Chunk
from mlxrunner.server.events import (
    CUT_OFF,
    AnswerNote,
    AnswerPart,
    TextDelta,
    ThinkingDelta,
    ToolCallEvent,
)
from mlxrunner.server.tools.formats import CallFormat, ParsedCall, Tools, name_of
from mlxrunner.templates.messages import ThinkingSplitter, common, overlap, without_thinking

_HEADER = re.compile(r"\s*(?:\[TOOL_CALLS\])?\s*[\w.-]+\s*\[ARGS\]\s*")
AnswerPiece = TextDelta | ThinkingDelta | ParsedCall
"""A piece of an answer, as readers find it."""
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
        self._pieces: list[AnswerPiece] = []
        self.note: AnswerNote | None = None
        """The reason why a text was not read as a call, or None."""

    def add(self, text: str) -> list[AnswerPiece]:
        """Take the next part of the text, and return the pieces that are certain now."""
        self._held += text
        self._may_end = "}" in text or "]" in text
        self._go_on()
        return self._taken()

    def finish(self, *, is_whole: bool = True) -> list[AnswerPiece]:
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

    def _taken(self) -> list[AnswerPiece]:
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
        """Show the rest of the answer as a text: it is not a call."""
        self._form = NO_CALLS
        self._in_call = False
        self._step_in_text()

    def _read(self, body: str, end: str) -> None:
        try:
            self._calls(self._form.calls(body, self._tools))
        except ValueError as error:
            self._misread(str(error), body + end)

    def _misread(self, why: str, body: str) -> None:
        self.note = self.note or AnswerNote.unread(why)
        self._show(self._gap + self._form.start + body)
        self._is_after_call = False

    def _calls(self, calls: list[ParsedCall]) -> None:
        self._pieces += calls
        self._is_after_call = True

    def _show(self, text: str) -> None:
        if text:
            self._pieces.append(TextDelta(text))
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
    def note(self) -> AnswerNote | None:
        """The reason why a text was not read as a call, or None."""
        return self._calls.note

    def add(self, text: str) -> Iterator[AnswerPiece]:
        """Take the next part of the answer, and yield the pieces that are certain now."""
        return self._read(self._thinking.add(text))

    def finish(self, *, is_whole: bool = True) -> Iterator[AnswerPiece]:
        """End the answer, and yield the rest. `is_whole`: the model ended it, not a limit."""
        yield from self._read(self._thinking.finish())
        yield from self._calls.finish(is_whole=is_whole)

    def _read(self, split: Iterator[tuple[bool, str]]) -> Iterator[AnswerPiece]:
        for is_thinking, text in split:
            if is_thinking:
                yield ThinkingDelta(text)
            else:
                yield from self._calls.add(text)


Calls = tuple[tuple[str, str, str | None], ...]
"""The meanings of calls: see `ParsedCall.meaning`."""


@dataclass(frozen=True)
class ParsedAnswer:
    """The parts of a whole answer, without the white space around them."""

    thinking: str
    text: str
    calls: Calls
    """The meaning of each call."""
    begins: int
    """Characters of the answer before the text and the calls."""

    @classmethod
    def of(cls, answer: str, form: CallFormat | None, tools: Tools, prompt: str) -> ParsedAnswer:
        """Read a whole `answer` that continues the text `prompt`. See `reader_of`."""
        reader = reader_of(form, tools, prompt)
        pieces = [*reader.add(answer), *reader.finish()]
        rest = without_thinking(answer, prompt)
        return cls(
            _joined(pieces, ThinkingDelta).strip(),
            _joined(pieces, TextDelta).strip(),
            tuple(piece.meaning for piece in pieces if isinstance(piece, ParsedCall)),
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


BEGINS = ("<|channel|>", "<|start|>")
"""The texts that a message's header begins with."""
BODY = "<|message|>"
"""The text between a header and the message."""
_ENDS = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|start\|>)")
_TAGS = re.compile(r"(?:<\|\w+\|>|\s)+")
_MOST_END = len("<|return|>")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")


class ChannelReader:
    """Takes the thinking and the calls out of an answer in channels."""

    def __init__(self, prompt: str = "") -> None:
        """Begin an answer that continues the text `prompt`, which may end with a header."""
        self._header: str | None = None
        if prompt.rstrip().endswith(BODY):
            self._header = prompt.rstrip()[-200:].rpartition("<|start|>")[2]
        self._held = ""
        self.note: AnswerNote | None = None
        """The reason why a text was not read as a call, or None."""

    @property
    def is_thinking(self) -> bool:
        return self._header is not None and self._kind == "thought"

    @property
    def _kind(self) -> str:
        if self._header and _RECIPIENT.search(self._header):
            return "call"
        return "thought" if "analysis" in (self._header or "") else "text"

    def _said(self, text: str) -> AnswerPiece:
        return ThinkingDelta(text) if self._kind == "thought" else TextDelta(text)

    def add(self, text: str) -> Iterator[AnswerPiece]:
        self._held += text
        while True:
            if self._header is None and not self._take_header():
                return
            found = _ENDS.search(self._held)
            if found is None:
                break
            body, self._held = self._held[: found.start()], self._held[found.end() :]
            yield from self._message(body)
            self._header = None
        yield from self._part()

    def finish(self, *, is_whole: bool = True) -> Iterator[AnswerPiece]:
        held, self._held = self._held, ""
        if self._header is None:
            if held and not held.startswith(BEGINS):
                yield TextDelta(held)
        elif self._kind == "call" and not is_whole:
            yield from self._misread(CUT_OFF, held)
        else:
            yield from self._message(held)

    def _take_header(self) -> bool:
        """Read the header of a message. Return False if more of it has to come."""
        if not self._held:
            return False
        if not any(self._held.startswith(one[: len(self._held)]) for one in BEGINS):
            self._header = ""
            return True
        header, found, rest = self._held.partition(BODY)
        if found:
            self._header, self._held = header, rest
        return bool(found)

    def _part(self) -> Iterator[AnswerPiece]:
        """Yield a part of a message that continues."""
        if self._kind == "call":
            return
        at = self._held.rfind("<|", -_MOST_END)
        shown = len(self._held) - 1 if self._held.endswith("<") else len(self._held)
        shown = shown if at < 0 else at
        text, self._held = self._held[:shown], self._held[shown:]
        if text:
            yield self._said(text)

    def _message(self, body: str) -> Iterator[AnswerPiece]:
        if self._kind != "call":
            if body:
                yield self._said(body)
            return
        found = _RECIPIENT.search(self._header or "")
        try:
            arguments = json.loads(body or "{}")
            if found is None or not isinstance(arguments, dict):
                raise ValueError("its arguments are not an object")
        except ValueError as error:
            yield from self._misread(str(error), body)
            return
        text = json.dumps(arguments, ensure_ascii=False)
        yield ParsedCall(found[1], text)

    def _misread(self, why: str, body: str) -> Iterator[AnswerPiece]:
        """Yield a call that can't be read as a text, without the tags: the template refuses them
        in an answer that comes back.
        """
        self.note = self.note or AnswerNote.unread(why)
        header = _TAGS.sub(" ", (self._header or "").rpartition(BEGINS[0])[2])
        yield TextDelta(f"{header} {body}".lstrip())


class AnswerSplitter:
    """Splits the chunks of one answer into events."""

    def __init__(
        self,
        reader: Callable[[], AnswerReader | ChannelReader],
        request: str,
        decode: Callable[[list[int]], str],
        *,
        parallel: bool = True,
        around: tuple[str, str] = ("", ""),
        note: AnswerNote | None = None,
        said: str = "",
    ) -> None:
        """Begin an answer. `reader` makes a reader of it.

        `request`: its id, which the ids of its calls are made of. `decode`: that of the tokenizer,
        for log-probabilities. Without `parallel`, calls after the first one are left out. `around`:
        texts that the reader is given before it, and after a whole one. `note`: what is to be said
        of it anyway. `said`: the beginning of the answer, which the client has written and gets no
        events of.
        """
        self._reader, self._request, self._decode = reader(), request, decode
        self._unsaid = _held_back(self._reader, reader(), said) if said else {}
        (self._before, self._after), self._parallel, self._note = around, parallel, note
        self._tokens: list[TokenLogprob] = []
        self._left_out = 0
        self.calls: list[tuple[str, ParsedCall]] = []
        """The calls so far, with their ids."""
        self.thinking_tokens = 0
        """Tokens of the answer that were thinking."""

    @property
    def is_done(self) -> bool:
        """True if all that follows is left out: the answer may have one call, and has it."""
        return bool(self.calls) and not self._parallel

    @property
    def note(self) -> AnswerNote | None:
        """The reason why a text was not read as a call, or calls were left out; or None."""
        if self._left_out:
            left_out = f"{self._left_out} tool calls after the first were left out"
            return AnswerNote("calls-left-out", left_out)
        return self._reader.note or self._note

    def add(self, chunk: Chunk) -> Iterator[AnswerPart]:
        """Take the next chunk, and yield the events that are certain now."""
        if self._reader.is_thinking:
            self.thinking_tokens += 1
        if chunk.logprob is not None and chunk.token is not None:
            self._tokens.append(self._token(chunk, chunk.token, chunk.logprob))
        text, self._before = self._before + chunk.text, ""
        yield from self._events(self._reader.add(text) if text else [])

    def finish(self, *, is_whole: bool = True) -> Iterator[AnswerPart]:
        """End the answer, and yield the rest. `is_whole`: the model ended it, not a limit."""
        after = self._after if is_whole else ""
        yield from self._events(self._reader.add(after) if after else [])
        yield from self._events(self._reader.finish(is_whole=is_whole))
        if self._tokens:
            yield TextDelta("", self._take_tokens())

    def _events(self, pieces: Iterable[AnswerPiece]) -> Iterator[AnswerPart]:
        for piece in pieces:
            if isinstance(piece, ParsedCall):
                self._unsaid = {}
                yield from self._call(piece)
            elif text := self._without_said(type(piece), piece.text):
                if isinstance(piece, ThinkingDelta):
                    self._tokens = []
                    yield ThinkingDelta(text)
                elif not self.is_done:
                    yield TextDelta(text, self._take_tokens())

    def _without_said(self, kind: type[AnswerPiece], text: str) -> str:
        """Return a text without what its client has written, which the reader had held back."""
        held = self._unsaid.get(kind, "")
        count = common(held, text)
        is_same = count == min(len(held), len(text))
        self._unsaid[kind] = held[count:] if is_same else ""
        return text[count:] if is_same else text

    def _call(self, call: ParsedCall) -> Iterator[AnswerPart]:
        index = len(self.calls)
        if self.is_done:
            self._left_out += 1
            return
        identity = call.id
        if identity is None or identity in {known for known, _ in self.calls}:
            identity = call_id(self._request, index)
        self.calls.append((identity, call))
        yield ToolCallEvent(index, identity, call.name, call.arguments)

    def _token(self, chunk: Chunk, token: int, logprob: float) -> TokenLogprob:
        top = tuple(
            (self._decode([one]), one, value) for one, value in (chunk.top_logprobs or {}).items()
        )
        return TokenLogprob(self._decode([token]), token, logprob, top)

    def _take_tokens(self) -> tuple[TokenLogprob, ...]:
        tokens, self._tokens = tuple(self._tokens), []
        return tokens


def joined(events: Iterable[AnswerPart]) -> Iterator[AnswerPart]:
    """Yield parts of an answer, neighbouring texts as one, and neighbouring thoughts as one."""
    last: AnswerPart | None = None
    for event in events:
        if isinstance(event, TextDelta) and isinstance(last, TextDelta):
            last = TextDelta(last.text + event.text, last.tokens + event.tokens)
        elif isinstance(event, ThinkingDelta) and isinstance(last, ThinkingDelta):
            last = ThinkingDelta(last.text + event.text)
        else:
            if last is not None:
                yield last
            last = event
    if last is not None:
        yield last


def _held_back(
    reader: AnswerReader | ChannelReader, other: AnswerReader | ChannelReader, said: str
) -> dict[type[AnswerPiece], str]:
    """Give `said` to a reader, and return what it holds back of it, by the type of the piece."""
    shown, whole = list(reader.add(said)), [*other.add(said), *other.finish(is_whole=False)]
    return {
        kind: _joined(whole, kind).removeprefix(_joined(shown, kind))
        for kind in (TextDelta, ThinkingDelta)
    }


def _joined(pieces: Iterable[AnswerPiece], kind: type[TextDelta | ThinkingDelta]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, kind))


def call_id(request: str, index: int) -> str:
    """Return the id of call number `index` of a request: the same each time."""
    return "call_" + hashlib.sha256(f"{request}:{index}".encode()).hexdigest()[:24]
