"""Which part of which message a place in a rendered conversation belongs to, as the chat template itself lays it out. No tensors.

The conversation is rendered once more with a mark in place of each content. What lies between the marks is the template's own, to the
letter, and tells where each content begins and ends in the real text, whatever that says. A template that leaves something out (the
thinking of earlier turns), moves it (a system prompt into the last message) or trims it does the same with the marks.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from mlxrunner.errors import PromptError
from mlxrunner.tokenizer.base import Message

THINKING = (("<think>", "</think>"), ("<|channel|>analysis<|message|>", "<|end|>"), ("[THINK]", "[/THINK]"))
"""What encloses a thinking block: Qwen, DeepSeek and others; gpt-oss; Mistral."""

_OPEN, _CLOSE = "\ue0f0", "\ue0f1"
_MARK = re.compile(f"{_OPEN}(\\d+)\\.(\\d+){_CLOSE}")
_BLOCK = re.compile("|".join(f"{re.escape(begin)}.*?(?:{re.escape(end)}|\\Z)" for begin, end in THINKING), re.DOTALL)


class Place(NamedTuple):
    """`message` and `role` are None where the text is of no message, `part` where it is not known."""

    message: int | None = None
    role: str | None = None
    part: str | None = None


class Segment(NamedTuple):
    """The text up to character `end` belongs to `place`; `is_gap`: it is the template's, between two contents."""

    end: int
    place: Place
    is_gap: bool = False


@dataclass
class Rendered:
    """A conversation: its `messages`, and the `text` that the template (`render`: `Tokenizer.render`) made of them with `variables`."""

    render: Callable[..., str]
    messages: Sequence[Message]
    text: str
    variables: Mapping[str, Any] = field(default_factory=dict)

    def place(self, at: int) -> Place:
        """What the character at index `at` belongs to; past the end: nothing."""
        if at >= len(self.text):
            return Place()
        segments = self.segments
        index = bisect_right([segment.end for segment in segments], at)
        if index == len(segments):
            return Place()
        begin = segments[index - 1].end if index else 0
        segment = segments[index]
        if not segment.is_gap:
            return _thinking(segment.place, self.text[begin : segment.end], at - begin)
        return self._in_gap(segments, index, begin, at)

    @cached_property
    def segments(self) -> list[Segment]:
        """The contents and the gaps between them; shorter than the text where the template does something that was not foreseen."""
        try:
            template = self._marked(len(self.messages), True)
        except PromptError:
            return []
        found: list[Segment] = []
        literals, marks = _MARK.split(template)[::3], _MARK.findall(template)
        at = 0
        for index, literal in enumerate(literals):
            message = int(marks[index][0]) if index < len(marks) else len(self.messages)
            if not self.text.startswith(literal, at):
                return found
            at += len(literal)
            if literal:
                found.append(Segment(at, self._role(message), True))
            if index == len(marks):
                return found if at == len(self.text) else []
            pieces, number = _pieces(self.messages[message]), int(marks[index][1])
            end = self._end_of_content(at, pieces[number], literals[index + 1])
            if end is None:
                return found
            at = end
            found.append(Segment(at, self._role(message, "thinking" if number < len(pieces) - 1 else "text")))
        return found

    def _end_of_content(self, at: int, content: str, following: str) -> int | None:
        """Where `content`, as it is or trimmed, ends and the template goes on with `following`."""
        for variant in (content, content.strip(), content.lstrip(), content.rstrip()):
            end = at + len(variant)
            if self.text.startswith(variant, at) and self.text.startswith(following, end):
                return end
        # Something that the template would not have written (thinking that was kept) stands before it.
        found = self.text.find(content.strip() + following, at) if following else -1
        return None if found < 0 else found + len(content.strip())

    def _in_gap(self, segments: list[Segment], index: int, begin: int, at: int) -> Place:
        """Between two contents: the end mark of the one, then the header of the other or the generation prompt."""
        gap = self.text[begin : segments[index].end]
        here, offset = segments[index].place, at - begin
        before = segments[index - 1].place if index else Place()
        tools = self._tools()
        if tools is not None and tools[0] <= at < tools[1]:
            return (here if before.message is None else before)._replace(part="tools")
        if before.message is not None:
            if before.message == here.message:
                ends = (gap.find(end) + len(end) for _, end in THINKING if end in gap)
                return before if offset < min(ends, default=0) else here._replace(part="text")
            if offset < len(self._mark_after(before.message, gap)):
                return before._replace(part="message_end")
        if here.message is not None and here.message < len(self.messages):
            return _thinking(here._replace(part="template_header"), gap, offset)
        return Place(len(self.messages), "assistant", "generation_prompt")

    def _mark_after(self, message: int, gap: str) -> str:
        """What the template writes behind `message` at the end of a conversation, if the gap begins with it."""
        try:
            ended = _MARK.split(self._marked(message + 1, False))[-1]
        except PromptError:
            return ""
        return ended if gap.startswith(ended) else ""

    def _tools(self) -> tuple[int, int] | None:
        """Begin and end of what the template adds for the tools it was given."""
        if not self.variables.get("tools"):
            return None
        try:
            without = self.render(self.messages, **{**self.variables, "tools": None})
        except PromptError:
            return None
        begin = _common(self.text, without)
        end = _common(self.text[begin:][::-1], without[begin:][::-1])
        return begin, len(self.text) - end

    def _marked(self, count: int, add_generation_prompt: bool) -> str:
        marked: list[Message] = [
            {**message, "content": _mark(index, message)} for index, message in enumerate(self.messages[:count])
        ]
        return self.render(marked, add_generation_prompt=add_generation_prompt, **self.variables)

    def _role(self, message: int, part: str | None = None) -> Place:
        return Place(message, self.messages[message]["role"] if message < len(self.messages) else "assistant", part)


def is_thinking(text: str, at: int) -> bool:
    """Whether the character at `at` lies in a thinking block of `text`."""
    return any(found.start() <= at < found.end() for found in _BLOCK.finditer(text))


def _thinking(place: Place, text: str, at: int) -> Place:
    return place._replace(part="thinking") if place.role == "assistant" and is_thinking(text, at) else place


def _pieces(message: Message) -> list[str]:
    """A content as a thinking block and the rest, or as one piece."""
    content = message["content"]
    for begin, end in THINKING if message["role"] == "assistant" else ():
        if content.lstrip().startswith(begin) and end in content:
            thought, _, rest = content.lstrip()[len(begin) :].partition(end)
            return [thought, rest]
    return [content]


def _mark(index: int, message: Message) -> str:
    """The content with marks in place of its pieces; what is empty stays empty, as templates ask for that."""
    pieces = _pieces(message)
    marks = [f"{_OPEN}{index}.{number}{_CLOSE}" if piece.strip() else piece for number, piece in enumerate(pieces)]
    if len(pieces) == 1:
        return marks[0]
    begin, end = next(pair for pair in THINKING if message["content"].lstrip().startswith(pair[0]))
    return f"{begin}{marks[0]}{end}{marks[1]}"


def _common(a: str, b: str) -> int:
    """Length of the common prefix."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a.startswith(b[:middle]):
            low = middle
        else:
            high = middle - 1
    return low
