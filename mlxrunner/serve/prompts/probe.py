"""Find out what a chat template does with conversations that not every template takes.

Each question is answered once for a model, with short conversations of marks. So the answer, and
with it the text of a prompt, does not change while a conversation grows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from mlxrunner.errors import OptionError, PromptError
from mlxrunner.templates.ends import CALL_ID, TOOL

MARK = "\ue0f4{}\ue0f5"
"""Stands for a text: private characters with a number."""


class Probe:
    """The conversations that a template takes, and the parts of them that it writes."""

    def __init__(self, render: Callable[..., str], template: str = "") -> None:
        """Ask the template behind `render`, that of a tokenizer. `template` is its source."""
        self._render, self._template = render, template

    def _text(self, roles: str, **variables: Any) -> str | None:
        """Return the text of a conversation of marks, or None if it is refused.

        `roles`: letters for system, user, assistant, call of a tool and tool's result.
        """
        try:
            return self._render(_messages(roles), **variables)
        except (PromptError, OptionError):
            return None

    def _writes(self, roles: str, **variables: Any) -> bool:
        """Return True if the template writes every text of a conversation, in order."""
        text = self._text(roles, **variables)
        if text is None:
            return False
        at = 0
        for number, role in enumerate(roles):
            at = 0 if role == "c" else text.find(MARK.format(number), at)
            if at < 0:
                return False
        return True

    def _writes_always(self, roles: str) -> bool:
        """Return True if `_writes` is true for a conversation, also with tools."""
        return self._writes(roles) and (not self.writes_tools or self._writes(roles, tools=[TOOL]))

    @cached_property
    def keeps_systems(self) -> bool:
        """True if a system message in the middle stays where it is."""
        return all(self._writes(roles) for roles in ("suasu", "susau", "suas", "sus"))

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
        text = self._text("su", tools=[TOOL])
        return text is not None and "probetool" in text

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
        messages = _messages("uctau")
        messages[1]["content"] = MARK.format(1)
        try:
            return MARK.format(1) in self._render(messages, tools=[TOOL])
        except (PromptError, OptionError):
            return not self.writes_calls

    @cached_property
    def needs_short_ids(self) -> bool:
        """True if the template refuses ids of calls that are longer than nine characters."""
        messages = _messages("uct")
        messages[1]["tool_calls"][0]["id"] = messages[2]["tool_call_id"] = "call_" + "0" * 24
        try:
            self._render(messages, tools=[TOOL])
        except (PromptError, OptionError):
            return self.writes_calls
        return False

    @cached_property
    def takes_two_calls(self) -> bool:
        """True if a message of the assistant may have two calls."""
        messages = _messages("uctau")
        messages[1]["tool_calls"] *= 2
        try:
            return self._render(messages, tools=[TOOL]).count("probetool") > 2
        except (PromptError, OptionError):
            return not self.writes_calls

    @cached_property
    def takes_unpaired(self) -> bool:
        """True if a call needs no result right behind it, and a result no call before it."""
        return all(
            self._writes(roles, **tools)
            for roles in ("ucu", "ucau", "ucut", "ut", "utau", "ucauta")
            for tools in ([{}, {"tools": [TOOL]}] if self.writes_tools else [{}])
        )

    @cached_property
    def takes_text_and_thinking(self) -> bool:
        """True if a message with a call may have a text and thinking beside it."""
        name = "reasoning_content" if self.takes_thinking else "thinking"
        messages = _messages("uct")
        messages[1] |= {"content": "probetext", name: "probethought"}
        return self._takes(messages)

    @cached_property
    def takes_channels(self) -> bool:
        """True if an answer may have the tags of channels in its text and in its thinking."""
        tag = "<|channel|>final<|message|>a<|channel|>analysis<|message|>"
        messages = _messages("uau")
        messages[1] |= {"content": tag, "thinking": tag}
        return self._takes(messages)

    def _takes(self, messages: list[Any]) -> bool:
        try:
            self._render(messages, **({"tools": [TOOL]} if self.writes_tools else {}))
        except (PromptError, OptionError):
            return False
        return True

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


def _messages(roles: str) -> list[Any]:
    return [_message(role, number) for number, role in enumerate(roles)]


def _message(role: str, number: int) -> Mapping[str, Any]:
    names = {"s": "system", "u": "user", "a": "assistant", "c": "assistant", "t": "tool"}
    message: dict[str, Any] = {"role": names[role], "content": MARK.format(number)}
    if role == "c":
        function = {"name": "probetool", "arguments": {"p": "v"}}
        call = {"type": "function", "id": CALL_ID, "function": function}
        return message | {"content": "", "tool_calls": [call]}
    return message | {"tool_call_id": CALL_ID, "name": "probetool"} if role == "t" else message


_FIRST = ("type", "function", "name", "description", "parameters", "properties", "required")


def ordered(value: Any) -> Any:
    """Return JSON with its keys in an order that does not depend on the client."""
    if isinstance(value, Mapping):
        names = sorted(
            value, key=lambda name: (_FIRST.index(name) if name in _FIRST else len(_FIRST), name)
        )
        return {name: ordered(value[name]) for name in names}
    return [ordered(one) for one in value] if isinstance(value, list | tuple) else value
