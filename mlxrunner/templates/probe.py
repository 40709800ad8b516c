"""Render conversations of marks, to learn from a chat template what it does with real ones.

`FormatProbe` and `TemplateProbe` ask each question about a template once for a model. So the
answer, and with it the text of a prompt, does not change while a conversation grows.

`Rendered` finds the message, and the part of it, that a place in a rendered conversation belongs
to. It renders the conversation once more with a mark in place of each content. The text between the
marks is the template's own, to the letter. It shows where each content begins and ends in the real
text, whatever that content is. If a template leaves a content out (the thinking of earlier turns),
moves it (a system prompt into the last message) or trims it, it does the same with the marks. No
tensors here.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cached_property
from itertools import accumulate, pairwise, takewhile
from typing import Any, NamedTuple

from mlxrunner.errors import OptionError, PromptError, TemplateLimitError
from mlxrunner.templates.messages import (
    ROLES,
    THINKING_TAGS,
    MessageFormat,
    Messages,
    PlainMessage,
    common,
    common_end,
)

MARK = "qzj{}x"
"""Stands for a text: letters and a number, which no filter changes."""
CALL_ID = "probe0001"
"""The id of a call that all templates take: Mistral's have nine letters or digits."""
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probetool",
        "description": "d",
        "parameters": {"type": "object", "properties": {"p": {"type": "string"}}},
    },
}
"""The tool of a call."""
PARTS_SHOWN = ("'type': 'text'", '"type": "text"')
"""Signs that a template wrote a list of parts as it is."""
_ARGUMENTS = {"p": MARK.format("v")}
_THOUGHT = MARK.format("h")
_ROLES = {"s": "system", "u": "user", "a": "assistant", "c": "assistant", "t": "tool"}


def probe_messages(letters: str) -> Messages:
    """Return a conversation of marks, from letters for system, user, assistant, call and result."""
    messages = []
    for number, letter in enumerate(letters):
        message: dict[str, Any] = {"role": _ROLES[letter], "content": MARK.format(number)}
        if letter == "c":
            function = {"name": "probetool", "arguments": _ARGUMENTS}
            call = {"type": "function", "id": CALL_ID, "function": function}
            message |= {"content": "", "tool_calls": [call]}
        elif letter == "t":
            message |= {"tool_call_id": CALL_ID, "name": "probetool"}
        messages.append(message)
    return messages


class FormatProbe:
    """The form in which a template takes messages."""

    def __init__(self, write: Callable[[Messages, bool, Mapping[str, Any]], str]) -> None:
        """Ask `write`, a function of messages, `add_generation_prompt` and other variables."""
        self._write = write

    @cached_property
    def parts(self) -> frozenset[str]:
        """The roles whose contents the template writes only if they are lists of parts."""
        if self._writes("u", MessageFormat()):
            return frozenset()
        roles = {"user": "u", "system": "su", "assistant": "uau", "tool": "uct"}
        as_parts = frozenset(ROLES)
        return frozenset(
            role
            for role, letters in roles.items()
            if not self._writes(letters, MessageFormat(as_parts - {role}), role)
            and self._writes(letters, MessageFormat(as_parts), role)
        )

    @cached_property
    def of_calls(self) -> tuple[bool, bool]:
        """The form of calls: if arguments are JSON texts, and if the content beside is None.

        Each is True only if the template writes the JSON of a call so, and not otherwise.
        """
        shown = json.dumps(_ARGUMENTS, ensure_ascii=False)
        for is_silent in (False, True):
            objects, texts = (
                self._text("uct", MessageFormat(self.parts, has_text, is_silent=is_silent)) or ""
                for has_text in (False, True)
            )
            is_text = shown in texts and (
                not objects or (str(_ARGUMENTS) in objects and shown not in objects)
            )
            if is_text or _ARGUMENTS["p"] in objects:
                return is_text, is_silent
        return False, False

    def _text(self, letters: str, form: MessageFormat) -> str | None:
        """Return the text of a conversation of marks in a form, or None if it is refused.

        Raise TemplateLimitError if the template was stopped: each further question would take as
        long.
        """
        messages: Any = probe_messages(letters)
        for tools in (None, [TOOL]):
            try:
                return self._write(form.of(messages), True, {"tools": tools})
            except TemplateLimitError:
                raise
            except Exception:
                continue
        return None

    def _writes(self, letters: str, form: MessageFormat, role: str = "user") -> bool:
        """Return True if the template writes all marks of a role, and not as lists."""
        text = self._text(letters, form)
        if text is None or any(sign in text for sign in PARTS_SHOWN):
            return False
        return all(
            MARK.format(number) in text
            for number, letter in enumerate(letters)
            if letter != "c" and _ROLES[letter] == role
        )


class TemplateProbe:
    """The conversations that a template takes, and the parts of them that it writes."""

    def __init__(self, render: Callable[..., str], template: str = "") -> None:
        """Ask the template behind `render`, that of a tokenizer. `template` is its source."""
        self._render, self._template = render, template

    def _text(self, messages: str | Messages, **variables: Any) -> str | None:
        """Return the text of messages, or of the letters of some, or None if it is refused."""
        if isinstance(messages, str):
            messages = probe_messages(messages)
        try:
            return self._render(messages, **variables)
        except (PromptError, OptionError):
            return None

    def _writes(self, letters: str, **variables: Any) -> bool:
        """Return True if the template writes every text of a conversation, in order."""
        text = self._text(letters, **variables)
        if text is None:
            return False
        at = 0
        for number, letter in enumerate(letters):
            at = 0 if letter == "c" else text.find(MARK.format(number), at)
            if at < 0:
                return False
        return True

    def _writes_always(self, letters: str) -> bool:
        """Return True if `_writes` is true for a conversation, also with tools."""
        return all(self._writes(letters, **tools) for tools in self._with_tools)

    @cached_property
    def _with_tools(self) -> list[dict[str, Any]]:
        """The variables for conversations without tools, and with them if they are written."""
        return [{}, {"tools": [TOOL]}] if self.writes_tools else [{}]

    @cached_property
    def keeps_systems(self) -> bool:
        """True if a system message in the middle stays where it is."""
        return all(self._writes(letters) for letters in ("suasu", "susau", "suas", "sus"))

    @cached_property
    def keeps_two_systems(self) -> bool:
        """True if two system messages at the beginning are written."""
        return self._writes_always("ssu")

    @property
    def names_developer(self) -> bool:
        """True if the template has a role "developer"."""
        return "developer" in self._template

    @cached_property
    def joins_roles(self) -> bool:
        """True if the template refuses two messages of the same role, one after the other."""
        return not (self._writes("uu") and self._writes("uaau"))

    @cached_property
    def takes_assistant_first(self) -> bool:
        """True if a conversation may begin with the assistant."""
        return self._writes_always("au") and self._writes_always("sau")

    @cached_property
    def takes_user_after_tools(self) -> bool:
        """True if the user may write right after the result of a tool."""
        return self._writes("uctu", tools=[TOOL]) or not self._writes("uctau", tools=[TOOL])

    @cached_property
    def writes_tools(self) -> bool:
        """True if the template writes the descriptions of tools."""
        return "probetool" in (self._text("su", tools=[TOOL]) or "")

    @cached_property
    def writes_calls(self) -> bool:
        """True if the template writes calls of tools, and their results."""
        return self._has_call(tools=[TOOL])

    @cached_property
    def writes_calls_without_tools(self) -> bool:
        """True if it writes calls and results in a request that describes no tools."""
        return self._has_call()

    def _has_call(self, **variables: Any) -> bool:
        text = self._text("uctau", **variables) or ""
        return "probetool" in text.partition(MARK.format(0))[2] and MARK.format(2) in text

    @cached_property
    def takes_text_beside_calls(self) -> bool:
        """True if a message with calls may have a text, or a message of its own before it."""
        messages = probe_messages("uctau")
        messages[1]["content"] = MARK.format(1)
        text = self._text(messages, tools=[TOOL])
        return not self.writes_calls if text is None else MARK.format(1) in text

    @cached_property
    def needs_short_ids(self) -> bool:
        """True if the template refuses ids of calls that are longer than nine characters."""
        messages = probe_messages("uct")
        messages[1]["tool_calls"][0]["id"] = messages[2]["tool_call_id"] = "call_" + "0" * 24
        return self._text(messages, tools=[TOOL]) is None and self.writes_calls

    @cached_property
    def takes_two_calls(self) -> bool:
        """True if the template writes two calls of a message before their results."""
        messages, second = probe_messages("ucttau"), MARK.format("w")
        call = messages[1]["tool_calls"][0]
        function = call["function"] | {"arguments": {"p": second}}
        messages[1]["tool_calls"].append(call | {"id": "probe0002", "function": function})
        messages[3]["tool_call_id"] = "probe0002"
        text = self._text(messages, tools=[TOOL])
        if text is None:
            return not self.writes_calls
        return 0 <= text.find(second) < text.find(MARK.format(2))

    @cached_property
    def takes_unpaired(self) -> bool:
        """True if a call needs no result right after it, and a result no call before it."""
        return all(map(self._writes_always, ("ucu", "ucau", "ucut", "ut", "utau", "ucauta")))

    @cached_property
    def takes_text_and_thinking(self) -> bool:
        """True if a message with a call may have a text and thinking beside it."""
        name = "reasoning_content" if self.takes_thinking else "thinking"
        messages = probe_messages("uct")
        messages[1] |= {"content": MARK.format(1), name: _THOUGHT}
        return self._text(messages, **self._with_tools[-1]) is not None

    @cached_property
    def takes_channels(self) -> bool:
        """True if an answer may have the tags of channels in its text and in its thinking."""
        tag = "<|channel|>final<|message|>a<|channel|>analysis<|message|>"
        messages = probe_messages("uau")
        messages[1] |= {"content": tag, "thinking": tag}
        return self._text(messages, **self._with_tools[-1]) is not None

    @cached_property
    def takes_names(self) -> bool:
        """True if the template writes the names of authors."""
        messages = probe_messages("u")
        messages[0]["name"] = MARK.format("n")
        return MARK.format("n") in (self._text(messages) or "")

    @property
    def takes_thinking(self) -> bool:
        """True if the template reads the field `reasoning_content`."""
        return "reasoning_content" in self._template

    @property
    def splits_thinking(self) -> bool:
        """True if the template takes the thinking out of a content itself."""
        return "</think>" in self._template and not self.takes_thinking

    @cached_property
    def system_header(self) -> tuple[str, str] | None:
        """The header of a user's message and that of the system's, if both have the same form.

        None if the template has no header for system messages, or refuses two messages of the user.
        """
        text, first = self._text("uu") or "", self._text("su") or ""
        between = text.partition(MARK.format(0))[2].partition(MARK.format(1))[0]
        named = between.rfind("user")
        begin = max(between.rfind("<", 0, named), between.rfind("[", 0, named))
        if self.joins_roles or named < 0 or begin < 0:
            return None
        header = between[begin:]
        before = first.partition(MARK.format(0))[0]
        found = [
            (before.rfind(own), own)
            for role in ("system", "developer")
            if (own := header.replace("user", role)) in before
        ]
        return (header, max(found)[1]) if found else None


Encode = Callable[[str], list[int]]


class _ProbedTurn(NamedTuple):
    """A turn of the assistant within a conversation."""

    before: Messages
    message: dict[str, Any]
    mark: str
    """The text of the message after which its end is looked for."""
    after: dict[str, Any]
    """A message that may follow."""
    variables: Mapping[str, Any]


def turn_ends(
    render: Callable[..., str], encode: Encode, is_mark: Callable[[int], bool]
) -> frozenset[int]:
    """Return the tokens with which a template ends the assistant's turns.

    A token is an end if the template closes a turn with it, and never writes it within one. No name
    of a token is known here: gpt-oss ends its thinking with the token with which Phi-3 ends turns.

    `render` and `encode` are `Tokenizer.render` and `Tokenizer.encode_more`. `is_mark` tells if a
    token is a special or added one. The set is empty if the template refuses the conversations, or
    ends turns with no such token.
    """
    ends, within = set[int](), set[int]()
    try:
        begun = rendered(render, probe_messages("u"), True)
        if begun is None or MARK.format(0) not in begun:
            return frozenset()
        openers = set(takewhile(is_mark, encode(begun.partition(MARK.format(0))[0])))
        for turn in _turns():
            end, inner = _look(render, encode, is_mark, turn, openers)
            ends |= {end} if end is not None else set()
            within |= inner
    except PromptError:  # the template was stopped, or a text can't be encoded
        return frozenset()
    return frozenset(ends - within - openers)


def _turns() -> Iterator[_ProbedTurn]:
    """Yield the turns that a template may write."""

    def turn(letters: str, more: Mapping[str, Any], variables: Mapping[str, Any]) -> _ProbedTurn:
        *before, message, after = probe_messages(letters)
        mark = message["content"] or _ARGUMENTS["p"]
        return _ProbedTurn(before, {**message, **more}, mark, after, variables)

    thought = {"reasoning_content": _THOUGHT, "thinking": _THOUGHT}
    for letters in ("uau", "uauau"):
        tagged = f"<think>\n{_THOUGHT}\n</think>\n\n{MARK.format(len(letters) - 2)}"
        for more in ({}, thought, {"content": tagged}):
            yield turn(letters, more, {})
    tools = {"tools": [TOOL]}
    calls = probe_messages("c")[0]["tool_calls"]
    for more in ({}, thought, {"tool_calls": calls * 2}, {"content": MARK.format(1)}):
        yield turn("uct", more, tools)
    yield turn("uct", {}, tools | {"builtin_tools": ["probetool"]})
    yield turn("uctau", thought, tools)


def _look(
    render: Callable[..., str],
    encode: Encode,
    is_mark: Callable[[int], bool],
    turn: _ProbedTurn,
    openers: set[int],
) -> tuple[int | None, set[int]]:
    """Return the mark that ends a turn, if one does, and those that stand within it."""
    whole, anchor = [*turn.before, turn.message], turn.before[-1]["content"]
    begun = rendered(render, turn.before, True, **turn.variables)
    last = rendered(render, whole, False, **turn.variables)
    if begun is None or last is None or anchor not in begun or turn.mark not in last:
        return None, set()
    header = encode(begun.rpartition(anchor)[2])
    texts, tails = [last], [encode(_behind(last, turn.mark))]
    longer = rendered(render, [*whole, turn.after], False, **turn.variables) or ""
    followed, found, _ = longer.rpartition(turn.after["content"])
    if found and turn.mark in followed:
        texts.append(followed)
        tails.append(encode(_behind(followed, turn.mark)))
    open_ = rendered(render, whole, True, **turn.variables) or ""
    end = _end(tails, encode(_behind(open_, turn.mark)), is_mark, openers)
    inner = set[int]()
    for text, tail in zip(texts, tails, strict=True):
        body = encode(text[: text.rindex(turn.mark)].rpartition(anchor)[2])
        begins = common(header, body)
        if any(map(is_mark, header)) and not any(map(is_mark, header[:begins])):
            return None, set()  # the turn begins in another way than with a generation prompt
        before = tail[: tail.index(end)] if end is not None and end in tail else []
        inner |= {one for one in (*body[begins:], *before) if is_mark(one)}
    return end, inner


def _end(
    tails: Sequence[Sequence[int]],
    open_: Sequence[int],
    is_mark: Callable[[int], bool],
    openers: set[int],
) -> int | None:
    """Return the token that ends a turn, from the tokens after it; None if none does.

    `tails`: those of the last message, and those before a further one. `open_`: those of the last
    message with a generation prompt. Tokens that begin a message are none of the end.
    """

    def last_mark(tokens: Sequence[int]) -> int | None:
        ends = (token for token in reversed(tokens) if is_mark(token) and token not in openers)
        return next(ends, None)

    own = last_mark(tails[0])
    if len(tails) == 1:
        return own
    both = last_mark(tails[0][: common(*tails)])
    if both is not None:
        return both
    # The last message ends in its own way, as in gpt-oss, or not at all.
    return own if own is not None else last_mark(open_[: common(open_, tails[1])])


def rendered(
    render: Callable[..., str],
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    **variables: Any,
) -> str | None:
    """Return a conversation as the template writes it, or None if the template refuses it.

    Raise TemplateLimitError if the template was stopped.
    """
    try:
        return render(messages, add_generation_prompt=add_generation_prompt, **variables)
    except TemplateLimitError:
        raise
    except PromptError:
        return None


def _behind(text: str, mark: str) -> str:
    """Return the text after the last `mark`; nothing if there is none."""
    return text.rpartition(mark)[2] if mark in text else ""


_OPEN, _CLOSE = "\ue0f0", "\ue0f1"
_MARK = re.compile(f"{_OPEN}(\\d+)\\.(\\d+){_CLOSE}")
_BLOCK = re.compile(
    "|".join(f"{re.escape(tags.begin)}.*?(?:{re.escape(tags.end)}|\\Z)" for tags in THINKING_TAGS),
    re.DOTALL,
)


class Place(NamedTuple):
    """The message and the part of it that a character of a rendered conversation belongs to."""

    message: int | None = None
    """Index of the message, or None if the text belongs to no message."""
    role: str | None = None
    """Role of the message, or None if the text belongs to no message."""
    part: str | None = None
    """Name of the part, such as "text" or "message_end", or None if it is not known."""
    picture: int | None = None
    """Number of the picture in the message, from 1, or None if none begins there."""


class Segment(NamedTuple):
    """A piece of a rendered conversation, which begins at the end of the piece before."""

    end: int
    """Index of the first character after it."""
    place: Place
    gap: int | None = None
    """Number of the gap between two contents, or None if the piece is a content."""


@dataclass
class Rendered:
    """A conversation and the text that a chat template made of it."""

    render: Callable[..., str]
    """The template, as `Tokenizer.render`."""
    messages: Sequence[PlainMessage]
    text: str
    """The text that the template made of `messages`."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template that the text was made with."""
    _fills: bool = field(default=True, init=False)
    """True to put a mark in place of an empty content, too.

    A template may test whether there is a content.
    """

    def place(self, at: int) -> Place:
        """Return the place of the character at index `at`; past the end an empty one."""
        if at >= len(self.text):
            return Place()
        segments = self.segments
        index = bisect_right([segment.end for segment in segments], at)
        if index == len(segments):
            return Place()
        begin = segments[index - 1].end if index else 0
        segment = segments[index]
        if segment.gap is None:
            return _thinking(segment.place, self.text[begin : segment.end], at - begin)
        before = segments[index - 1].place if index else Place()
        return self._in_gap(
            segment.gap, before, segment.place, self.text[begin : segment.end], at - begin
        )

    @cached_property
    def segments(self) -> list[Segment]:
        """The contents and the gaps between them, in order.

        They end before the end of the text if the template does something unforeseen.
        """
        ways = []
        for self._fills in (True, False):
            ways.append(self._segments())
            if ways[-1] and ways[-1][-1].end == len(self.text):
                return ways[-1]
        reached = [found[-1].end if found else 0 for found in ways]
        self._fills = reached[0] >= reached[1]
        return ways[not self._fills]

    def _segments(self) -> list[Segment]:
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
                found.append(Segment(at, self._role(message), index))
            if index == len(marks):
                return found if at == len(self.text) else []
            pieces, number = _pieces(self.messages[message]), int(marks[index][1])
            end = self._end_of_content(at, pieces[number], literals[index + 1])
            if end is None:
                return found
            at = end
            found.append(
                Segment(at, self._role(message, "thinking" if number < len(pieces) - 1 else "text"))
            )
            if at == len(self.text):
                return found
        return found

    def _end_of_content(self, at: int, content: str, following: str) -> int | None:
        """Return the end of `content`, whole or trimmed, if `following` comes after it, or None."""
        for variant in (content, content.strip(), content.lstrip(), content.rstrip()):
            end = at + len(variant)
            # A text that ends here is one whose last message is continued.
            if self.text.startswith(variant, at) and (
                end == len(self.text) or self.text.startswith(following, end)
            ):
                return end
        # Text that the template does not write (thinking that was kept) may stand before it.
        found = (
            self.text.find(content.strip() + following, at) if following and content.strip() else -1
        )
        return None if found < 0 else found + len(content.strip())

    def _in_gap(self, number: int, before: Place, here: Place, gap: str, offset: int) -> Place:
        """Return the place of the character at `offset` in the gap between two contents.

        A gap holds the end mark of the first content, messages without a content, and the header of
        the second content or the generation prompt.
        """
        first, following = -1 if before.message is None else before.message, here.message or 0
        if before.part == "thinking" and offset < min(
            (gap.find(tags.end) + len(tags.end) for tags in THINKING_TAGS if tags.end in gap),
            default=0,
        ):
            return before
        if first == following:  # between the thinking and the text of one message
            return here._replace(part="text")
        held = [
            first,
            *(message for message in range(first + 1, following) if message not in self._shown),
        ]
        ends = [self._end_of(message, gap) if message >= 0 else 0 for message in held]
        for begin, end in self._tools(number):
            if begin <= offset < end:
                return self._role(
                    next(
                        (message for message, to in zip(held, ends, strict=True) if begin < to),
                        following,
                    ),
                    "tools",
                )
        if offset < ends[0]:
            return before._replace(part="message_end")
        for message, (begin, end) in zip(held[1:], pairwise(ends), strict=True):
            if begin <= offset < end:
                return self._in_empty(message, gap[begin:end], gap[: ends[0]], offset - begin)
        if following < len(self.messages):
            return _thinking(here._replace(part="template_header"), gap, offset)
        return Place(len(self.messages), "assistant", "generation_prompt")

    def _in_empty(self, message: int, text: str, mark: str, offset: int) -> Place:
        """Return the place of a character in `text`, written for a message without a content.

        `mark` is the text that ends another message.
        """
        is_end = bool(mark) and text.endswith(mark) and offset >= len(text) - len(mark)
        return _thinking(
            self._role(message, "message_end" if is_end else "template_header"), text, offset
        )

    @cached_property
    def _shown(self) -> set[int | None]:
        """Indices of the messages whose content is in the text."""
        return {segment.place.message for segment in self.segments if segment.gap is None}

    def _end_of(self, message: int, gap: str) -> int:
        """Return the length of the part of `gap` that belongs to messages up to `message`.

        That part is what the template writes if nothing, or an answer, follows.
        """
        ended = self._tail(message, False)
        begun = self._tail(message, True).removesuffix(self._generation_prompt)
        whole = [len(tail) for tail in (ended, begun) if gap.startswith(tail)]
        return max(whole) if whole else max(common(gap, ended), common(gap, begun))

    @cached_property
    def _generation_prompt(self) -> str:
        last = len(self.messages) - 1
        ended, begun = self._tail(last, False), self._tail(last, True)
        return begun.removeprefix(ended) if begun.startswith(ended) else ""

    def _tail(self, message: int, add_generation_prompt: bool) -> str:
        """Return the text after the last content of the conversation up to `message`."""
        try:
            return _MARK.split(self._marked(message + 1, add_generation_prompt))[-1]
        except PromptError:
            return ""

    def _tools(self, number: int) -> list[tuple[int, int]]:
        """Return the begin and end of each piece that the template adds to a gap for its tools."""
        listed, unlisted = self._gaps
        if len(listed) != len(unlisted) or number >= len(listed):
            return []
        return _added(listed[number], unlisted[number])

    @cached_property
    def _gaps(self) -> tuple[list[str], list[str]]:
        """All gaps with the tools that the template was given, and all gaps without them.

        Both lists are empty if it was given none, or if it refuses to render.
        """
        if not self.variables.get("tools"):
            return [], []
        try:
            both = [
                self._marked(len(self.messages), True, tools=tools)
                for tools in (self.variables["tools"], None)
            ]
        except PromptError:
            return [], []
        return _MARK.split(both[0])[::3], _MARK.split(both[1])[::3]

    def _marked(self, count: int, add_generation_prompt: bool, **changed: Any) -> str:
        marked: list[PlainMessage] = [
            {**message, "content": _mark(index, message, fills=self._fills)}
            for index, message in enumerate(self.messages[:count])
        ]
        variables = {**self.variables, **changed}
        return self.render(
            marked, add_generation_prompt=add_generation_prompt, is_partial=True, **variables
        )

    def _role(self, message: int, part: str | None = None) -> Place:
        return Place(
            message,
            self.messages[message]["role"] if message < len(self.messages) else "assistant",
            part,
        )


def is_thinking(text: str, at: int) -> bool:
    """Return True if the character at index `at` is in a thinking block of `text`."""
    return any(found.start() <= at < found.end() for found in _BLOCK.finditer(text))


def _thinking(place: Place, text: str, at: int) -> Place:
    return (
        place._replace(part="thinking")
        if place.role == "assistant" and is_thinking(text, at)
        else place
    )


def _pieces(message: PlainMessage) -> list[str]:
    """Return a content as its thinking and the rest, or as one piece."""
    content = message["content"]
    for begin, end, _ in THINKING_TAGS if message["role"] == "assistant" else ():
        if content.lstrip().startswith(begin) and end in content:
            thought, _, rest = content.lstrip()[len(begin) :].partition(end)
            return [thought, rest]
    return [content]


def _mark(index: int, message: PlainMessage, *, fills: bool) -> str:
    """Return the content of a message with a mark in place of each piece.

    An empty piece stays empty. If `fills` is true, an empty last piece gets a mark, too.
    """
    pieces = _pieces(message)
    marks = [
        f"{_OPEN}{index}.{number}{_CLOSE}"
        if piece.strip() or (fills and number == len(pieces) - 1)
        else piece
        for number, piece in enumerate(pieces)
    ]
    if len(pieces) == 1:
        return marks[0]
    content = message["content"].lstrip()
    tags = next(tags for tags in THINKING_TAGS if content.startswith(tags.begin))
    return f"{tags.begin}{marks[0]}{tags.end}{marks[1]}"


def _added(text: str, without: str) -> list[tuple[int, int]]:
    """Return the begin and end of each piece that `text` has and `without` has not.

    That is one piece if it explains the difference, or else the difference line by line.
    """
    (begin, end), is_all = _middle(text, without)
    if is_all:
        return [(begin, end)] if begin < end else []
    lines, old = (one.splitlines(keepends=True) for one in (text, without))
    found, at = [], [0, *accumulate(map(len, lines))]
    for kind, first, last, old_first, old_last in SequenceMatcher(
        None, lines, old, autojunk=False
    ).get_opcodes():
        if kind in ("delete", "replace"):
            (begin, end), _ = _middle("".join(lines[first:last]), "".join(old[old_first:old_last]))
            found.append((at[first] + begin, at[first] + end))
    return found


def _middle(text: str, without: str) -> tuple[tuple[int, int], bool]:
    """Return begin and end of the part of `text` between what both texts begin and end with.

    The second value is True if that part is the only difference.
    """
    begin = common(text, without)
    after = common_end(text[begin:], without[begin:])
    end, is_all = len(text) - after, begin + after == len(without)
    while (
        is_all and 0 < begin < end and text[begin - 1] == text[end - 1]
    ):  # the same difference may begin earlier
        begin, end = begin - 1, end - 1
    return (begin, end), is_all
