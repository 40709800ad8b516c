"""Read an answer of gpt-oss: messages on channels, of which some are calls of tools."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from mlxrunner.serve.events import CUT_OFF, Note
from mlxrunner.serve.prompts.formats import Call, Piece

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
        self.note: Note | None = None
        """The reason why a text was not read as a call, or None."""

    @property
    def is_thinking(self) -> bool:
        """True while the answer is within its thinking."""
        return self._header is not None and self._kind == "thought"

    @property
    def _kind(self) -> str:
        if self._header and _RECIPIENT.search(self._header):
            return "call"
        return "thought" if "analysis" in (self._header or "") else "text"

    def add(self, text: str) -> Iterator[Piece]:
        """Take the next part of the answer, and yield the pieces that are certain now."""
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

    def finish(self, *, is_whole: bool = True) -> Iterator[Piece]:
        """End the answer, and yield the rest. `is_whole`: the model ended it, not a limit."""
        held, self._held = self._held, ""
        if self._header is None:
            if held and not held.startswith(BEGINS):
                yield Piece("text", held)
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

    def _part(self) -> Iterator[Piece]:
        """Yield a part of a message that goes on."""
        if self._kind == "call":
            return
        at = self._held.rfind("<|", -_MOST_END)
        shown = len(self._held) - 1 if self._held.endswith("<") else len(self._held)
        shown = shown if at < 0 else at
        text, self._held = self._held[:shown], self._held[shown:]
        if text:
            yield Piece("thought" if self._kind == "thought" else "text", text)

    def _message(self, body: str) -> Iterator[Piece]:
        if self._kind != "call":
            if body:
                yield Piece("thought" if self._kind == "thought" else "text", body)
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
        yield Piece("call", call=Call(found[1], text))

    def _misread(self, why: str, body: str) -> Iterator[Piece]:
        """Yield a call that can't be read as a text, without the tags: the template refuses them
        in an answer that comes back.
        """
        self.note = self.note or Note.unread(why)
        header = _TAGS.sub(" ", (self._header or "").rpartition(BEGINS[0])[2])
        yield Piece("text", f"{header} {body}".lstrip())
