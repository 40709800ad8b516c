"""Change a conversation so that its template takes it, or so that its beginning stays the same.

Each function of a draft and a probe is the effect of a rule: see `rules.py`. It returns the same
draft if there is nothing to change.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlxrunner.serve.prompts.probe import MARK, Probe, ordered
from mlxrunner.templates.messages import SYSTEM_ROLES, system_count
from mlxrunner.templates.remembered import Remembered, sign

MOST_BYTES = 16_000_000
"""Most bytes of tools that are remembered as the rules changed them."""
Messages = list[dict[str, Any]]
JOINT = "\n\n"
"""The text between two contents that become one."""
REMINDER = "<system-reminder>\n{}\n</system-reminder>"
"""The form of a system message that the user's message carries."""
PLACE = "<tool_response>{}</tool_response>"
"""The form of the user's message that keeps a place for a system message.

Templates of Qwen don't take a message of this form for the last question, up to which they leave
out thinking.
"""


@dataclass(frozen=True)
class Draft:
    """A conversation on its way to a prompt."""

    messages: Messages
    tools: list[dict[str, Any]] = field(default_factory=list)
    places: tuple[str, ...] = ()
    """The system messages for which `PLACE` stands in the messages."""


_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")


def without_billing(messages: Sequence[Mapping[str, Any]]) -> Messages:
    """Return messages without the billing header of the system messages that begin them."""
    count = system_count(messages)
    first = [{**one, "content": _BILLING.sub("", one["content"])} for one in messages[:count]]
    return [*first, *map(dict, messages[count:])]


def leave_out_billing(draft: Draft, probe: Probe) -> Draft:
    """Leave out the billing header."""
    first = draft.messages[: system_count(draft.messages)]
    if not any(_BILLING.match(message["content"]) for message in first):
        return draft
    stripped = without_billing(draft.messages)
    pairs = zip(draft.messages, stripped, strict=True)
    messages = [new for old, new in pairs if new["content"] or not old["content"]]
    return replace(draft, messages=messages or stripped)


def leave_out_marks(draft: Draft, probe: Probe) -> Draft:
    """Leave out marks for caches in the descriptions of tools."""
    tools = list(map(_unmarked, draft.tools))
    return draft if tools == draft.tools else replace(draft, tools=tools)


def _without(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return {key: _without(one, name) for key, one in value.items() if key != name}
    return [_without(one, name) for one in value] if isinstance(value, list) else value


_unmarked = Remembered(lambda tool: _without(tool, "cache_control"), MOST_BYTES)


def order_keys(draft: Draft, probe: Probe) -> Draft:
    """Write the keys of the tools' JSON in one order."""
    tools = list(map(_in_order, draft.tools))
    is_same = all(a is b or sign(a) == sign(b) for a, b in zip(tools, draft.tools, strict=True))
    return draft if is_same else replace(draft, tools=tools)


_in_order = Remembered(ordered, MOST_BYTES)


def developer_as_system(draft: Draft, probe: Probe) -> Draft:
    """Give developers the role of the system, if the template has no developers."""
    if probe.names_developer or all(one["role"] != "developer" for one in draft.messages):
        return draft
    messages = [
        {**message, "role": "system"} if message["role"] == "developer" else message
        for message in draft.messages
    ]
    return replace(draft, messages=messages)


def join_systems(draft: Draft, probe: Probe) -> Draft:
    """Join the system messages that begin, if the template takes only one."""
    count = system_count(draft.messages)
    if count < 2 or (probe.keeps_two_systems and not probe.names_developer):
        return draft
    texts = [message["content"] for message in draft.messages[:count]]
    first = {**draft.messages[0], "content": JOINT.join(texts)}
    return replace(draft, messages=[first, *draft.messages[count:]])


def write_tools(draft: Draft, probe: Probe) -> Draft:
    """Describe tools in the system prompt, if the template does not write them."""
    if not draft.tools or probe.writes_tools:
        return draft
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in draft.tools)
    text = TOOLS_TEXT.format(lines)
    messages = list(draft.messages)
    if messages and messages[0]["role"] in SYSTEM_ROLES:
        messages[0] = {**messages[0], "content": messages[0]["content"] + JOINT + text}
    else:
        messages.insert(0, {"role": "system", "content": text})
    return Draft([_call_as_text(message) for message in messages], [], draft.places)


TOOLS_TEXT = """\
# Tools

You may call functions. Their descriptions are within <tools></tools>:
<tools>
{}
</tools>

To call one, write its name and arguments as a JSON object within <tool_call></tool_call>:
<tool_call>
{{"name": <name>, "arguments": <object>}}
</tool_call>"""
"""The system prompt's part for tools, for templates that have none."""


def _call_as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return a call of the assistant, or a tool's result, as a message with text only."""
    if message["role"] == "tool":
        text = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": text} | _pictures(message)
    if not message.get("tool_calls"):
        return message
    calls = [
        json.dumps(
            {"name": call["function"]["name"], "arguments": call["function"]["arguments"]},
            ensure_ascii=False,
        )
        for call in message["tool_calls"]
    ]
    texts = [message["content"], *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)]
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return kept | {"content": "\n".join(text for text in texts if text)}


def write_calls(draft: Draft, probe: Probe) -> Draft:
    """Write calls and results as text, if the template does not write them."""
    writes = probe.writes_calls if draft.tools else probe.writes_calls_without_tools
    has_calls = any(one["role"] == "tool" or one.get("tool_calls") for one in draft.messages)
    if writes or not has_calls:
        return draft
    return replace(draft, messages=[_call_as_text(message) for message in draft.messages])


NO_RESULT = "[no result]"
"""Stands for the result of a call that the conversation has none for."""


def pair_results(draft: Draft, probe: Probe) -> Draft:
    """Put each result behind its call, if the template takes none alone."""
    has_calls = any(one["role"] == "tool" or one.get("tool_calls") for one in draft.messages)
    if not has_calls or probe.takes_unpaired:
        return draft
    messages: Messages = []
    paired, last = set[int](), len(draft.messages) - 1
    for number, message in enumerate(draft.messages):
        if number in paired:
            continue
        messages.append(_call_as_text(message) if message["role"] == "tool" else message)
        for call in message.get("tool_calls", ()) if number < last else ():
            at = _result_of(call, draft.messages, number, paired)
            if at is None:
                lost = {"role": "tool", "content": NO_RESULT, "tool_call_id": call.get("id", "")}
                messages.append(lost)
            else:
                paired.add(at)
                messages.append(draft.messages[at])
    return replace(draft, messages=messages)


def _result_of(
    call: Mapping[str, Any], messages: Messages, begin: int, paired: set[int]
) -> int | None:
    """Return the number of the result of a call in message `begin`, before the next answer."""
    for number in range(begin + 1, len(messages)):
        role = messages[number]["role"]
        if role == "assistant":
            return None
        identity = messages[number].get("tool_call_id")
        if role == "tool" and number not in paired and identity == call.get("id", identity):
            return number
    return None


def text_in_thinking(draft: Draft, probe: Probe) -> Draft:
    """Append the text before a call to the thinking, if the template takes only one of them."""
    if not any(_thinks_and_says(one) for one in draft.messages) or probe.takes_text_and_thinking:
        return draft
    messages: Messages = []
    for message in draft.messages:
        if name := _thinks_and_says(message):
            whole = message[name] + JOINT + message["content"]
            message = {**message, name: whole, "content": ""}
        messages.append(message)
    return replace(draft, messages=messages)


def _thinks_and_says(message: Mapping[str, Any]) -> str | None:
    """Return the field of the thinking of a message that has a text and a call beside it."""
    if not message.get("tool_calls") or not message["content"]:
        return None
    return next((name for name in ("reasoning_content", "thinking") if message.get(name)), None)


CHANNEL = "<|channel|>"


def without_channels(draft: Draft, probe: Probe) -> Draft:
    """Break up the tags of channels in answers, if the template refuses them there."""
    if not any(CHANNEL in text for one in draft.messages for text in _said(one).values()):
        return draft
    if probe.takes_channels:
        return draft
    broken = CHANNEL.replace("|", "")
    messages = [
        one | {name: text.replace(CHANNEL, broken) for name, text in _said(one).items()}
        for one in draft.messages
    ]
    return replace(draft, messages=messages)


def _said(message: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of an answer by their fields; nothing of another message."""
    if message["role"] != "assistant":
        return {}
    names = ("content", "reasoning_content", "thinking")
    return {name: message[name] for name in names if message.get(name)}


def one_call_a_message(draft: Draft, probe: Probe) -> Draft:
    """Write several calls as several messages, if the template takes only one."""
    if probe.takes_two_calls or all(len(m.get("tool_calls", ())) < 2 for m in draft.messages):
        return draft
    messages: Messages = []
    results = {one.get("tool_call_id"): one for one in draft.messages if one["role"] == "tool"}
    moved = set[int]()
    for message in draft.messages:
        calls = message.get("tool_calls", ())
        if len(calls) < 2 and id(message) not in moved:
            messages.append(message)
        for number, call in enumerate(calls if len(calls) > 1 else ()):
            content = "" if number else message["content"]
            messages.append({**message, "content": content, "tool_calls": [call]})
            if (result := results.get(call.get("id"))) is not None:
                messages.append(result)
                moved.add(id(result))
    return replace(draft, messages=messages)


def leave_out_text_beside_calls(draft: Draft, probe: Probe) -> Draft:
    """Leave out the texts of messages with calls, if the template has no place for them."""
    if probe.takes_text_beside_calls:
        return draft
    messages = [
        {**message, "content": ""} if message.get("tool_calls") else message
        for message in draft.messages
    ]
    return replace(draft, messages=messages)


def keep_system_in_place(draft: Draft, probe: Probe) -> Draft:
    """Write later system messages where they stand, if the template does not."""
    first = system_count(draft.messages)
    later = (one["role"] for one in draft.messages[first:])
    if probe.keeps_systems or not any(role in SYSTEM_ROLES for role in later):
        return draft
    messages, places = draft.messages[:first], list[str]()
    for message in draft.messages[first:]:
        if message["role"] not in SYSTEM_ROLES:
            messages.append(message)
        elif probe.system_header is not None:
            content = PLACE.format(MARK.format(len(places)))
            messages.append({"role": "user", "content": content})
            places.append(message["content"])
        else:
            text = REMINDER.format(message["content"])
            if messages and messages[-1]["role"] in ("user", "tool"):
                messages[-1] = _joined(messages[-1], text)
            else:
                messages.append({"role": "user", "content": text})
    return replace(draft, messages=messages, places=tuple(places))


def _joined(message: dict[str, Any], text: str) -> dict[str, Any]:
    return {**message, "content": JOINT.join(one for one in (message["content"], text) if one)}


def _pictures(*messages: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field of the pictures of one or more messages, in order, if they have any."""
    found = [one for message in messages for one in message.get("pictures", ())]
    return {"pictures": found} if found else {}


def join_roles(draft: Draft, probe: Probe) -> Draft:
    """Join neighbouring messages of one role, if the template wants them in turn."""
    if not probe.joins_roles:
        return draft
    messages: Messages = []
    for message in draft.messages:
        last = messages[-1] if messages else {"role": ""}
        is_call_after_text = message.get("tool_calls") and last["role"] == "assistant"
        if is_call_after_text and last["content"] and not probe.takes_text_beside_calls:
            messages += [{"role": "user", "content": ""}, message]  # joined, the text would be lost
        elif message["role"] == last["role"] and message["role"] in ("user", "assistant"):
            joined = _joined(last, message["content"])
            calls = [*last.get("tool_calls", []), *message.get("tool_calls", [])]
            joined |= {"tool_calls": calls} if calls else {}
            messages[-1] = joined | _pictures(last, message)
        else:
            messages.append(message)
    return replace(draft, messages=messages)


def begin_with_user(draft: Draft, probe: Probe) -> Draft:
    """Put an empty message of the user first, if the template needs one there."""
    at = system_count(draft.messages)
    is_first = at < len(draft.messages) and draft.messages[at]["role"] != "user"
    if not is_first or probe.takes_assistant_first:
        return draft
    empty = {"role": "user", "content": ""}
    return replace(draft, messages=[*draft.messages[:at], empty, *draft.messages[at:]])


def answer_after_tools(draft: Draft, probe: Probe) -> Draft:
    """Put an empty answer between result and user, if the template needs one."""
    if probe.takes_user_after_tools:
        return draft
    messages: Messages = []
    for message in draft.messages:
        if message["role"] == "user" and messages and messages[-1]["role"] == "tool":
            messages.append({"role": "assistant", "content": ""})
        messages.append(message)
    return replace(draft, messages=messages)


def shorten_ids(draft: Draft, probe: Probe) -> Draft:
    """Shorten the ids of calls, if the template refuses long ones."""
    if not probe.needs_short_ids:
        return draft
    messages = []
    for message in draft.messages:
        short = dict(message)
        if "tool_call_id" in message:
            short["tool_call_id"] = short_id(message["tool_call_id"])
        if message.get("tool_calls"):
            calls = message["tool_calls"]
            short["tool_calls"] = [{**call, "id": short_id(call.get("id", ""))} for call in calls]
        messages.append(short)
    return replace(draft, messages=messages)


def short_id(identity: str) -> str:
    """Return an id of nine letters or digits for the id of a call; such an id stays as it is."""
    if re.fullmatch("[A-Za-z0-9]{9}", identity):
        return identity
    return hashlib.sha256(identity.encode()).hexdigest()[:9]


def written(text: str, draft: Draft, probe: Probe) -> str:
    """Return the template's text with the system messages of `draft.places` in their places."""
    if not draft.places:
        return text
    user, own = probe.system_header or ("", "")
    place = re.escape(PLACE).replace(r"\{\}", re.escape(MARK).replace(r"\{\}", r"(\d+)"))

    def put(found: re.Match[str]) -> str:
        number = int(found[1])
        return own + draft.places[number] if number < len(draft.places) else found[0]

    return re.sub(f"(?:{re.escape(user)})?{place}", put, text)
