"""The rules by which a prompt may differ from what a client sent.

Each rule has a name, a reason and a switch, and is named in the report of a request that it
changed. Nothing else about a prompt is ever changed. What is made of messages and tools is
remembered, up to a size in bytes (`LRUCache`).
"""

from __future__ import annotations

import hashlib
import json
import marshal
import re
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from sys import getsizeof
from threading import Lock
from typing import Any, Generic, TypeVar

from mlxrunner.templates.messages import (
    JOINT,
    SYSTEM_ROLES,
    Messages,
    result_of,
    system_count,
    with_one_call_each,
)
from mlxrunner.templates.probe import TemplateProbe

T = TypeVar("T")
ENTRY = 256
"""Bytes that a mapping takes for an entry, beside its key and its value."""
_SIMPLE = {str, bytes, int, float, bool, type(None)}
"""Types of objects without others in them."""


def sign(value: Any) -> bytes:
    """Return bytes that two values have in common only if they are the same plain data.

    The order of keys counts, and so does the type of a number. Raise ValueError for other objects.
    """
    return marshal.dumps(value, 0)  # version 0 has no references, which depend on more than values


def footprint(*values: Any) -> int:
    """Return about how many bytes plain objects take in memory, with all that is in them."""
    size, seen, left = 0, set[int](), [*values]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        size += getsizeof(one)
        if type(one) in _SIMPLE:
            continue
        if isinstance(one, dict):
            left += (*one, *one.values())
        elif isinstance(one, list | tuple):
            left += one
        elif is_dataclass(one):
            left += (getattr(one, part.name) for part in fields(one))
    return size


class LRUCache(Generic[T]):
    """Values by their keys, up to a size; those used last stay. Any thread may use it."""

    def __init__(self, most: int) -> None:
        """Begin with nothing. `most`: the most bytes of memory of all keys and values."""
        self._most, self._size = most, 0
        self._known: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: Hashable) -> T | None:
        """Return a value, or None if it is not known, or not any more."""
        with self._lock:
            found = self._known.get(key)
            if found is None:
                return None
            self._known.move_to_end(key)
            return found[0]

    def put(self, key: Hashable, value: T) -> None:
        """Remember a value, in place of an earlier one."""
        size = ENTRY + footprint(key, value)
        with self._lock:
            self._size += size - self._known.pop(key, (None, 0))[1]
            self._known[key] = value, size
            while self._size > self._most:
                self._size -= self._known.popitem(last=False)[1][1]


class MemoizedFunction(Generic[T]):
    """A function of plain data that remembers its results. Nobody may change them."""

    def __init__(self, work: Callable[[Any], T], most: int) -> None:
        """Remember results of `work` in at most `most` bytes of memory."""
        self._work, self._known = work, LRUCache[T](most)

    def __call__(self, value: Any) -> T:
        """Return what `work` returns, and raise what it raises.

        It works on a copy that is made of the key, so that no later change of `value` matters.
        """
        try:
            key = sign(value)
        except ValueError:
            return self._work(value)
        found = self._known.get(key)
        if found is None:
            found = self._work(marshal.loads(key))
            self._known.put(key, found)
        return found


MOST_BYTES = 16_000_000
"""Most bytes of tools that are remembered as the rules changed them."""
REMINDER = "<system-reminder>\n{}\n</system-reminder>"
"""The form of a system message that the user's message carries."""
PLACE_MARK = "\ue0f4{}\ue0f5"
"""Stands for a system message: private characters with its number."""
PLACE = "<tool_response>{}</tool_response>"
"""The form of the user's message that keeps a place for a system message.

Templates of Qwen don't take a message of this form for the last question, up to which they leave
out thinking.
"""


@dataclass(frozen=True)
class PromptDraft:
    """A conversation on its way to a prompt."""

    messages: Messages
    tools: list[dict[str, Any]] = field(default_factory=list)
    places: tuple[str, ...] = ()
    """The system messages for which `PLACE` stands in the messages."""

    def with_messages(self, messages: Messages) -> PromptDraft:
        """Return it with other messages; itself if they are the same."""
        return self if messages == self.messages else replace(self, messages=messages)

    def each(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> PromptDraft:
        """Return it with what `change` makes of each message; itself if that changes none."""
        return self.with_messages(list(map(change, self.messages)))


_Rewrite = Callable[[PromptDraft, TemplateProbe], PromptDraft]


@dataclass(frozen=True)
class RewriteRule:
    """A rule, as docs/serve-prefixes.md lists it."""

    name: str
    does: str
    """The effect, in one sentence."""
    reason: str
    clients: str
    """The clients or models that it is for."""
    apply: _Rewrite
    """Its effect: a function that returns the same draft if there is nothing to change."""


RULES: list[RewriteRule] = []
"""The rules, in the order in which they stand below and act."""


def _rule(name: str, does: str, reason: str, clients: str) -> Callable[[_Rewrite], _Rewrite]:
    def add(apply: _Rewrite) -> _Rewrite:
        RULES.append(RewriteRule(name, does, reason, clients, apply))
        return apply

    return add


_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")


def without_billing(messages: Sequence[Mapping[str, Any]]) -> Messages:
    """Return messages without the billing header of the system messages that begin them."""
    count = system_count(messages)
    first = [{**one, "content": _BILLING.sub("", one["content"])} for one in messages[:count]]
    return [*first, *map(dict, messages[count:])]


@_rule(
    "billing-header",
    "Leaves out the line `x-anthropic-billing-header: ...` that begins the system prompt.",
    "It changes with the client's version and request, and no model needs it.",
    "Claude Code",
)
def _leave_out_billing(draft: PromptDraft, probe: TemplateProbe) -> PromptDraft:
    first = draft.messages[: system_count(draft.messages)]
    if not any(_BILLING.match(message["content"]) for message in first):
        return draft
    stripped = without_billing(draft.messages)
    pairs = zip(draft.messages, stripped, strict=True)
    messages = [new for old, new in pairs if new["content"] or not old["content"]]
    return draft.with_messages(messages or stripped)


@_rule(
    "cache-control",
    "Leaves `cache_control` marks out of the descriptions of tools.",
    "They move from request to request, and a template may write them.",
    "Claude Code, Cline",
)
def _leave_out_marks(draft: PromptDraft, probe: TemplateProbe) -> PromptDraft:
    tools = list(map(_unmarked, draft.tools))
    return draft if tools == draft.tools else replace(draft, tools=tools)


def _without_marks(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_marks(one) for key, one in _left(value, "cache_control").items()}
    return [_without_marks(one) for one in value] if isinstance(value, list) else value


_unmarked = MemoizedFunction(_without_marks, MOST_BYTES)


@_rule(
    "tool-keys",
    "Writes the keys of the tools' JSON in one order; the tools stay in theirs.",
    "Some clients write the same tool with other orders of keys each time.",
    "clients whose dictionaries have no order (Go, Swift)",
)
def _order_keys(draft: PromptDraft, probe: TemplateProbe) -> PromptDraft:
    tools = list(map(_in_order, draft.tools))
    is_same = all(a is b or sign(a) == sign(b) for a, b in zip(tools, draft.tools, strict=True))
    return draft if is_same else replace(draft, tools=tools)


_FIRST = ("type", "function", "name", "description", "parameters", "properties", "required")


def _ordered(value: Any) -> Any:
    """Return JSON with its keys in an order that does not depend on the client."""
    if isinstance(value, Mapping):
        names = sorted(
            value, key=lambda name: (_FIRST.index(name) if name in _FIRST else len(_FIRST), name)
        )
        return {name: _ordered(value[name]) for name in names}
    return [_ordered(one) for one in value] if isinstance(value, list | tuple) else value


_in_order = MemoizedFunction(_ordered, MOST_BYTES)


@_rule(
    "developer-as-system",
    "Gives messages of role `developer` the role `system`.",
    "The template does not know this role, and would drop or refuse them.",
    "Codex; templates other than that of gpt-oss",
)
def _developer_as_system(draft: PromptDraft, probe: TemplateProbe) -> PromptDraft:
    change = {"role": "system"}
    after = draft.each(lambda one: one | change if one["role"] == "developer" else one)
    return draft if after is draft or probe.names_developer else after


@_rule(
    "no-names",
    "Leaves out the names of messages' authors.",
    "The template does not write them.",
    "AutoGen, LangChain",
)
def _leave_out_names(draft: PromptDraft, probe: TemplateProbe) -> PromptDraft:
    after = draft.each(lambda one: one if one["role"] == "tool" else _left(one, "name"))
    return draft if after is draft or probe.takes_names else after


@_rule(
    "two-systems",
    "Joins system messages at the beginning into one.",
    "The template takes only one, or writes only the first.",
    "Codex, Claude Code; Gemma, Mistral, gpt-oss",
)
def _join_systems(draft: PromptDraft, probe: TemplateProbe) -> PromptDraft:
    count = system_count(draft.messages)
    if count < 2 or (probe.keeps_two_systems and not probe.names_developer):
        return draft
    texts = [message["content"] for message in draft.messages[:count]]
    first = {**draft.messages[0], "content": JOINT.join(texts)}
    return draft.with_messages([first, *draft.messages[count:]])


@_rule(
    "tools-as-text",
    "Describes tools at the end of the system prompt, and writes calls and results as text.",
    "The template does not write tools, so the model would not know of them.",
    "all with tools; Gemma 3, Phi-4",
)
def _write_tools(draft: PromptDraft, probe: TemplateProbe) -> PromptDraft:
    if not draft.tools or probe.writes_tools:
        return draft
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in draft.tools)
    text = TOOLS_TEXT.format(lines)
    messages = list(draft.messages)
    if messages and messages[0]["role"] in SYSTEM_ROLES:
        messages[0] = {**messages[0], "content": messages[0]["content"] + JOINT + text}
    else:
        messages.insert(0, {"role": "system", "content": text})
    return PromptDraft(list(map(_call_as_text, messages)), [], draft.places)


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
    texts = [message["content"]]
    for call in message["tool_calls"]:
        found = {name: call["function"][name] for name in ("name", "arguments")}
        texts.append(f"<tool_call>\n{json.dumps(found, ensure_ascii=False)}\n</tool_call>")
    return _left(message, "tool_calls") | {"content": "\n".join(filter(None, texts))}


def _left(value: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return an object without one of its fields."""
    return {key: one for key, one in value.items() if key != name}


@_rule(
    "calls-as-text",
    "Writes calls and results of tools as text, each in its place.",
    "The template refuses them or leaves them out in a request that describes no tools.",
    "opencode's and Claude Code's compaction",
)
def _write_calls(draft: PromptDraft, probe: TemplateProbe) -> PromptDraft:
    writes = probe.writes_calls if draft.tools else probe.writes_calls_without_tools
    return draft if writes else draft.each(_call_as_text)


NO_RESULT = "[no result]"
"""Stands for the result of a call that the conversation has none for."""


@_rule(
    "results-behind-calls",
    "Puts each result after its call; a call without one gets `[no result]`, and a result "
    "without a call becomes a text of the user.",
    "The template refuses a call without its result, or a result without its call.",
    "all with tools, after an interruption or a compaction; Mistral, gpt-oss",
)
def _pair_results(draft: PromptDraft, probe: TemplateProbe) -> PromptDraft:
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
            at = result_of(call, draft.messages, number, paired)
            if at is None:
                lost = {"role": "tool", "content": NO_RESULT, "tool_call_id": call.get("id", "")}
                messages.append(lost)
            else:
                paired.add(at)
                messages.append(draft.messages[at])
    return draft.with_messages(messages)


_THOUGHTS = ("reasoning_content", "thinking")
"""The fields of a message's thinking."""
_SAID = ("content", *_THOUGHTS)


@_rule(
    "text-in-thinking",
    "Appends the text before a call to the thinking before it.",
    "The template refuses text and thinking in one message with a call.",
    "all with tools; gpt-oss",
)
def _text_in_thinking(draft: PromptDraft, probe: TemplateProbe) -> PromptDraft:
    after = draft.each(_thinking_with_text)
    return draft if after is draft or probe.takes_text_and_thinking else after


def _thinking_with_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with a call and thinking, with its text in the thinking."""
    if not message.get("tool_calls") or not message["content"]:
        return message
    name = next((name for name in _THOUGHTS if message.get(name)), None)
    if name is None:
        return message
    return {**message, name: message[name] + JOINT + message["content"], "content": ""}


CHANNEL, _BROKEN = "<|channel|>", "<channel>"


@_rule(
    "channel-tags",
    "Writes the tag `<|channel|>` in earlier answers as `<channel>`.",
    "The template refuses an answer with such a tag, and so each later request.",
    "agents that work on chat templates; gpt-oss",
)
def _without_channels(draft: PromptDraft, probe: TemplateProbe) -> PromptDraft:
    after = draft.each(_without_channel)
    return draft if after is draft or probe.takes_channels else after


def _without_channel(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] != "assistant":
        return message
    said = {name: message[name] for name in _SAID if CHANNEL in (message.get(name) or "")}
    broken = {name: text.replace(CHANNEL, _BROKEN) for name, text in said.items()}
    return message | broken if broken else message


@_rule(
    "one-call-a-message",
    "Writes several calls of one message as several messages, each before its result.",
    "The template refuses a message with two calls.",
    "all with tools; Llama 3",
)
def _one_call_a_message(draft: PromptDraft, probe: TemplateProbe) -> PromptDraft:
    if probe.takes_two_calls or all(len(m.get("tool_calls", ())) < 2 for m in draft.messages):
        return draft
    return draft.with_messages(with_one_call_each(draft.messages))


@_rule(
    "text-beside-calls",
    "Leaves out the text of an assistant's message that has calls.",
    "The template leaves it out, and refuses it as a message of its own before the calls.",
    "all with tools; Mistral",
)
def _leave_out_text_beside_calls(draft: PromptDraft, probe: TemplateProbe) -> PromptDraft:
    if probe.takes_text_beside_calls:
        return draft
    return draft.each(lambda one: {**one, "content": ""} if one.get("tool_calls") else one)


@_rule(
    "system-in-the-middle",
    "Writes a later system message where it stands: with the template's own header for system "
    "messages, or else in the user's message, within `<system-reminder>`.",
    "The template refuses it, leaves it out, or moves it to the front, which changes the "
    "beginning of all that was evaluated.",
    "Claude Code; Qwen 3.5, Gemma, Mistral, gpt-oss, DeepSeek",
)
def _keep_system_in_place(draft: PromptDraft, probe: TemplateProbe) -> PromptDraft:
    first = system_count(draft.messages)
    later = (one["role"] for one in draft.messages[first:])
    if probe.keeps_systems or not any(role in SYSTEM_ROLES for role in later):
        return draft
    messages, places = draft.messages[:first], list[str]()
    for message in draft.messages[first:]:
        if message["role"] not in SYSTEM_ROLES:
            messages.append(message)
        elif probe.system_header is not None:
            content = PLACE.format(PLACE_MARK.format(len(places)))
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


@_rule(
    "same-roles",
    "Joins neighbouring messages of the same role.",
    "The template wants user and assistant in turn.",
    "all; Gemma, Mistral",
)
def _join_roles(draft: PromptDraft, probe: TemplateProbe) -> PromptDraft:
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
    return draft.with_messages(messages)


@_rule(
    "assistant-first",
    "Puts an empty message of the user before an assistant, or a result, that begins.",
    "The template refuses a conversation that the user does not begin.",
    "chat programs with a greeting; Gemma, Mistral, Llama 3 with tools",
)
def _begin_with_user(draft: PromptDraft, probe: TemplateProbe) -> PromptDraft:
    at = system_count(draft.messages)
    is_first = at < len(draft.messages) and draft.messages[at]["role"] != "user"
    if not is_first or probe.takes_assistant_first:
        return draft
    empty = {"role": "user", "content": ""}
    return draft.with_messages([*draft.messages[:at], empty, *draft.messages[at:]])


@_rule(
    "user-after-tools",
    "Puts an empty message of the assistant between a tool's result and the user's message.",
    "The template refuses a user who writes right after a result.",
    "Claude Code; Mistral",
)
def _answer_after_tools(draft: PromptDraft, probe: TemplateProbe) -> PromptDraft:
    if probe.takes_user_after_tools:
        return draft
    messages: Messages = []
    for message in draft.messages:
        if message["role"] == "user" and messages and messages[-1]["role"] == "tool":
            messages.append({"role": "assistant", "content": ""})
        messages.append(message)
    return draft.with_messages(messages)


@_rule(
    "short-call-ids",
    "Replaces the ids of calls by nine letters and digits.",
    "The template refuses others.",
    "all with tools; Mistral",
)
def _shorten_ids(draft: PromptDraft, probe: TemplateProbe) -> PromptDraft:
    return draft.each(_with_short_ids) if probe.needs_short_ids else draft


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    short = dict(message)
    if "tool_call_id" in message:
        short["tool_call_id"] = short_id(message["tool_call_id"])
    if calls := message.get("tool_calls"):
        short["tool_calls"] = [{**call, "id": short_id(call.get("id", ""))} for call in calls]
    return short


def short_id(identity: str) -> str:
    """Return an id of nine letters or digits for the id of a call; such an id stays as it is."""
    if re.fullmatch("[A-Za-z0-9]{9}", identity):
        return identity
    return hashlib.sha256(identity.encode()).hexdigest()[:9]


def written(text: str, draft: PromptDraft, probe: TemplateProbe) -> str:
    """Return the template's text with the system messages of `draft.places` in their places."""
    if not draft.places:
        return text
    user, own = probe.system_header or ("", "")
    place = re.escape(PLACE).replace(r"\{\}", re.escape(PLACE_MARK).replace(r"\{\}", r"(\d+)"))

    def put(found: re.Match[str]) -> str:
        number = int(found[1])
        return own + draft.places[number] if number < len(draft.places) else found[0]

    return re.sub(f"(?:{re.escape(user)})?{place}", put, text)


def apply(
    draft: PromptDraft,
    probe: TemplateProbe,
    off: Iterable[str] = (),
    rules: Sequence[RewriteRule] = RULES,
) -> tuple[PromptDraft, tuple[str, ...]]:
    """Return a conversation after all rules, and the names of the rules that changed it.

    `off`: the names of the rules that are off.
    """
    acted, off = [], set(off)
    for rule in rules:
        after = draft if rule.name in off else rule.apply(draft, probe)
        if after is not draft:
            acted.append(rule.name)
            draft = after
    return draft, tuple(acted)
