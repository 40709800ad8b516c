"""Ask a chat template what it does, with short conversations of marks.

Each question is answered once for a model. So the answer, and with it the text of a prompt, does
not change while a conversation grows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from typing import Any, NamedTuple

from mlxrunner.errors import OptionError, PromptError, TemplateLimitError
from mlxrunner.templates.messages import ROLES, MessageFormat, Messages, common

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
        """True if a call needs no result right behind it, and a result no call before it."""
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
    """The text of the message behind which its end is looked for."""
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
        begun = _rendered(render, probe_messages("u"), True)
        if begun is None or MARK.format(0) not in begun:
            return frozenset()
        openers = set(takewhile(is_mark, _tokens(encode, begun.partition(MARK.format(0))[0])))
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
    begun = _rendered(render, turn.before, True, **turn.variables)
    last = _rendered(render, whole, False, **turn.variables)
    if begun is None or last is None or anchor not in begun or turn.mark not in last:
        return None, set()
    header = _tokens(encode, begun.rpartition(anchor)[2])
    texts, tails = [last], [_tokens(encode, _behind(last, turn.mark))]
    longer = _rendered(render, [*whole, turn.after], False, **turn.variables) or ""
    followed, found, _ = longer.rpartition(turn.after["content"])
    if found and turn.mark in followed:
        texts.append(followed)
        tails.append(_tokens(encode, _behind(followed, turn.mark)))
    open_ = _rendered(render, whole, True, **turn.variables) or ""
    end = _end(tails, _tokens(encode, _behind(open_, turn.mark)), is_mark, openers)
    inner = set[int]()
    for text, tail in zip(texts, tails, strict=True):
        body = _tokens(encode, text[: text.rindex(turn.mark)].rpartition(anchor)[2])
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
    """Return the token that ends a turn, from the tokens behind it; None if none does.

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


def _rendered(
    render: Callable[..., str], messages: Messages, add_generation_prompt: bool, **variables: Any
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


def _tokens(encode: Encode, text: str) -> list[int]:
    return encode(text) if text else []


def _behind(text: str, mark: str) -> str:
    """Return the text behind the last `mark`; nothing if there is none."""
    return text.rpartition(mark)[2] if mark in text else ""
