"""The messages of a conversation: check, forms for templates, thinking, and parts of contents.

Clients send contents in parts: texts, pictures, and what is neither. Every form of a part that a
client of OpenAI's, Anthropic's or Ollama's API sends is read here. A part that a model can't be
shown becomes a `StandIn`, a short text in its place: a client repeats its history with each
request, so that refusing it would end the conversation for good.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NotRequired, TypedDict

from mlxrunner.config.option import parsed_json, shown, with_whole_characters
from mlxrunner.errors import PromptError

Messages = list[dict[str, Any]]
JOINT = "\n\n"
"""The text between two contents that become one."""
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
"""The roles that a template is asked about."""
SYSTEM_ROLES = ("system", "developer")
"""The roles of messages that make up a system prompt."""


class TextPart(TypedDict):
    """A part of a message's content, in OpenAI's form."""

    type: str
    """Always "text"."""
    text: str


class PicturePart(TypedDict):
    """A picture in a message's content."""

    type: str
    """Always "image"."""
    image: Any
    """The path of a file, the bytes of one, or pixels `[height, width, 3]` of type uint8."""


class Function(TypedDict):
    """The function that a tool call names."""

    name: str
    arguments: Mapping[str, Any] | str
    """The arguments by name, or the text of a JSON object of them."""


class ToolCall(TypedDict):
    """A call that the model asks for, in OpenAI's form."""

    id: NotRequired[str]
    type: NotRequired[str]
    """Always "function", if it is given."""
    function: Function


class Message(TypedDict):
    """One message of a conversation, in any form that a runner takes."""

    role: str
    """Usually "system", "user", "assistant" or "tool"."""
    content: NotRequired[str | Sequence[TextPart | PicturePart] | None]
    """A text, or a list of parts as OpenAI has them. Text parts are joined.

    It may be missing, or None, beside tool calls.
    """
    tool_calls: NotRequired[Sequence[ToolCall] | None]
    """The calls that a message of the assistant asks for."""
    reasoning_content: NotRequired[str | None]
    """The thinking before the assistant's content, for templates that write it."""
    tool_call_id: NotRequired[str | None]
    """For role "tool": the id of the call whose result the content is."""
    name: NotRequired[str | None]
    """The name of the author; for role "tool" that of the function that was called.

    Many templates write no names.
    """


class PlainMessage(TypedDict):
    """One message in the only form that chat templates are given."""

    role: str
    content: str
    """The text of the message, with PICTURE in place of each; empty if it has tool calls only."""
    pictures: NotRequired[Sequence[Any]]
    """The pixels of each picture, `[height, width, 3]`, or what else `see` returned for it."""
    tool_calls: NotRequired[Sequence[ToolCall]]
    """Calls whose arguments are objects."""
    reasoning_content: NotRequired[str]
    thinking: NotRequired[str]
    """The same as `reasoning_content`, for templates that call it so."""
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


class CheckedMessages(list[PlainMessage]):
    """Messages that have been checked, and are not checked again."""


See = Callable[[Any, str], Any]
"""A function from the picture of a part, and its name for errors, to what is kept of it."""
PICTURE = "\ufffc"
"""Unicode's own character in place of an object, here of a picture."""
SHAPE = '{"role": text, "content": text}'
"""Form of a message, for errors."""
TOOL_CALL = '{"function": {"name": text, "arguments": object}}'
"""Form of a tool call, for errors."""
FIELDS = {"tool": ("tool_call_id",), "assistant": ("reasoning_content", "thinking")}
"""Further texts of a message that templates read, by role, beside the name of its author."""


def has_picture(message: Any) -> bool:
    """Return True if a part of a message's content is a picture."""
    content = message.get("content") if isinstance(message, dict) else None
    parts = content if isinstance(content, list | tuple) else ()
    return any(isinstance(part, dict) and part.get("type") == "image" for part in parts)


def system_count(
    messages: Sequence[Mapping[str, Any]], roles: Container[str] = SYSTEM_ROLES
) -> int:
    """Return the number of system messages at the beginning: those of one of `roles`."""
    places = (n for n, message in enumerate(messages) if message["role"] not in roles)
    return next(places, len(messages))


def check_messages(
    messages: Sequence[Mapping[str, Any]], see: See | None = None
) -> list[PlainMessage]:
    """Return plain copies, each with a text as its content and objects as arguments of calls.

    Fields that no chat template reads are left out. `see` reads pictures; None: they are refused.
    Raise PromptError, which says which message is wrong and why, and what `see` raises.
    """
    if not messages:
        raise PromptError("the conversation is empty: at least one message is needed")
    if isinstance(messages, CheckedMessages):
        return messages
    return CheckedMessages(
        check_message(index, message, see) for index, message in enumerate(messages)
    )


def check_message(index: int, message: Any, see: See | None = None) -> PlainMessage:
    """Return a plain copy of message number `index`: see `check_messages`.

    Raise PromptError if the message is wrong.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise PromptError(f"message {index} has to be {SHAPE}, not {shown(message)}")
    role, calls = message["role"], message.get("tool_calls")
    if calls and role != "assistant":
        raise PromptError(f"message {index}: only an assistant has tool_calls, not {shown(role)}")
    content, pictures = message.get("content"), list[Any]()
    checked: PlainMessage = {
        "role": role,
        "content": "" if content is None and calls else _text(index, content, pictures, see),
    }
    if pictures:
        checked["pictures"] = pictures
    if calls:
        if not isinstance(calls, list | tuple):
            raise PromptError(f"message {index}: tool_calls has to be a list, not {shown(calls)}")
        checked["tool_calls"] = [_tool_call(index, call) for call in calls]
    for name in (*FIELDS.get(role, ()), "name"):
        value = message.get(name)
        if value is not None and not isinstance(value, str):
            raise PromptError(f"message {index}: {name} has to be a text, not {shown(value)}")
        if value is not None:
            checked[name] = value  # type: ignore[literal-required]
    return checked


def _text(index: int, content: Any, pictures: list[Any], see: See | None) -> str:
    """Return the text of a message's content, and append its pictures to `pictures`."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise PromptError(
            f"message {index}: content has to be a text or a list of text parts, "
            f"not {shown(content)}"
        )
    texts = [_part(index, part, pictures, see) for part in content]
    if pictures and sum(text.count(PICTURE) for text in texts) > len(pictures):
        raise PromptError(
            f"message {index}: its text has the character U+FFFC, which stands for a picture"
        )
    return "".join(texts)


def _part(index: int, part: Any, pictures: list[Any], see: See | None) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "image", "image": image} if see is not None:
            pictures.append(see(image, f"message {index}, picture {len(pictures) + 1}"))
            return PICTURE
        case {"type": kind}:
            unknown = kind
        case _:
            unknown = part
    raise PromptError(
        f"message {index}: content of type {shown(unknown)} is not supported, only text "
        '({"type": "text", "text": text})'
    )


def _tool_call(index: int, call: Any) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise PromptError(f"message {index}: a tool call has to be {TOOL_CALL}, not {shown(call)}")
    kind = call.get("type")
    if kind not in (None, "function"):
        raise PromptError(
            f'message {index}: a tool call of type {shown(kind)} is not supported, only "function"'
        )
    checked: ToolCall = {
        "type": "function",
        "function": {"name": function["name"], "arguments": _arguments(index, function)},
    }
    if isinstance(call.get("id"), str):
        checked["id"] = call["id"]
    return checked


def _arguments(index: int, function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments as an object, the form that chat templates expect."""
    given = function.get("arguments")
    given = {} if given is None else given
    arguments = given
    why = ""
    try:
        if isinstance(given, str):
            arguments = parsed_json(given or "{}")
        else:
            json.dumps(given, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        arguments, why = None, f": {error}"
    if not isinstance(arguments, Mapping):
        raise PromptError(
            f"message {index}: the arguments of {function['name']!r:.80} have to be a JSON object, "
            f'such as {{"city": "Oslo"}}, not {shown(given)}{why}'
        )
    return arguments


class MessageFormat(NamedTuple):
    """A form in which a template may take a conversation."""

    parts: frozenset[str] = frozenset()
    """Roles whose contents are lists of parts."""
    has_text_arguments: bool = False
    """True if the arguments of calls are JSON texts."""
    is_split: bool = False
    """True if a text beside calls is a message of its own before them."""
    is_folded: bool = False
    """True if the system prompt begins the first user message."""
    is_silent: bool = False
    """True if a message with calls and no text has None for its content."""
    has_one_call: bool = False
    """True if each call is a message of its own, before its result."""

    def of(self, messages: Sequence[PlainMessage]) -> Messages:
        """Return `messages` in this form."""
        shaped: Messages = [dict(message) for message in messages]
        if self.has_one_call:
            shaped = with_one_call_each(shaped)
        if self.is_folded:
            shaped = _folded(shaped)
        if self.is_split:
            shaped = [one for message in shaped for one in _split(message)]
        if self.has_text_arguments:
            shaped = [
                one | {"tool_calls": list(map(_with_text, calls_of(one)))} if calls_of(one) else one
                for one in shaped
            ]
        if self.is_silent:
            shaped = [
                one | {"content": None} if calls_of(one) and not one["content"] else one
                for one in shaped
            ]
        return [
            message | {"content": [{"type": "text", "text": message["content"]}]}
            if message["role"] in self.parts and (message["content"] or not calls_of(message))
            else message
            for message in shaped
        ]


def calls_of(message: Mapping[str, Any]) -> Sequence[Any]:
    """Return the calls of a message."""
    calls: Sequence[Any] = message.get("tool_calls") or ()
    return calls


def with_one_call_each(messages: Messages) -> Messages:
    """Return messages in which each call is a message of its own, before its result.

    Text and thinking stay before the first call of their message.
    """
    found: Messages = []
    moved = set[int]()
    for number, message in enumerate(messages):
        calls = calls_of(message)
        if number not in moved and len(calls) < 2:
            found.append(message)
        for place, call in enumerate(calls if len(calls) > 1 else ()):
            own = {"role": message["role"], "content": ""} if place else message
            found.append({**own, "tool_calls": [call]})
            at = result_of(call, messages, number, moved)
            if at is not None:
                moved.add(at)
                found.append(messages[at])
    return found


def result_of(
    call: Mapping[str, Any], messages: Messages, begin: int, taken: Container[int]
) -> int | None:
    """Return the number of the result of a call in message `begin`, before the next answer.

    Results that are `taken` are those of other calls.
    """
    for number in range(begin + 1, len(messages)):
        role = messages[number]["role"]
        if role == "assistant":
            return None
        identity = messages[number].get("tool_call_id")
        if role == "tool" and number not in taken and identity == call.get("id", identity):
            return number
    return None


def can_fold(messages: Sequence[PlainMessage]) -> bool:
    """Return True if the system prompt may begin the first user message."""
    count = system_count(messages, ("system",))
    return 0 < count < len(messages) and messages[count]["role"] == "user"


def _folded(messages: Messages) -> Messages:
    """Return messages whose system prompt begins the first user message."""
    count = system_count(messages, ("system",))
    texts = [message["content"] for message in messages[: count + 1]]
    return [messages[count] | {"content": JOINT.join(texts)}, *messages[count + 1 :]]


def _split(message: dict[str, Any]) -> Messages:
    """Return a message as two: its text, and its calls."""
    if not (message["content"] and calls_of(message)):
        return [message]
    text = {name: value for name, value in message.items() if name != "tool_calls"}
    calls = {"role": message["role"], "content": "", "tool_calls": message["tool_calls"]}
    return [text, calls]


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call whose arguments are a JSON text."""
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return call | {"function": call["function"] | {"arguments": text}}


_FINAL = "<|channel|>final<|message|>"
"""The header of an answer of gpt-oss, which the model also writes without thinking."""


class Tags(NamedTuple):
    """The texts that a model writes around its thinking."""

    begin: str
    """The text before the thinking."""
    end: str
    """The text after the thinking."""
    header: str = ""
    """The text between `end` and the answer."""


THINKING_TAGS = (
    Tags("<think>", "</think>"),
    Tags("<longcat_think>", "</longcat_think>"),
    Tags("<|think:start|>", "<|think:end|>"),
    Tags("<|channel>thought", "<channel|>"),
    Tags("[THINK]", "[/THINK]"),
    Tags("<|channel|>analysis<|message|>", "<|end|>", f"<|start|>assistant{_FINAL}"),
)
_SPLITS = (*((tags.begin, tags.end + tags.header) for tags in THINKING_TAGS), (_FINAL, ""))
"""The texts that an answer may begin with, each with the text before the answer proper."""


class ThinkingSplitter:
    """Splits a streamed answer into pieces `(is_thinking, text)`, without the tags."""

    def __init__(self, prompt: str = "") -> None:
        """Begin an answer that continues the text `prompt`, which may have opened the thinking."""
        ends = prompt.rstrip()
        self._close = next((close for begin, close in _SPLITS if ends.endswith(begin)), "")
        self._begun = bool(self._close)
        self._held = ""
        self._between = False  # right after the thinking, where empty lines are dropped

    @property
    def is_thinking(self) -> bool:
        """True while the answer is within its thinking."""
        return bool(self._close)

    def add(self, text: str) -> Iterator[tuple[bool, str]]:
        """Take `text` as the next part of the answer, and yield the pieces that are certain now."""
        self._held += text
        if not self._begun and not self._begins():
            return
        if self._close:
            thought = self._take_thinking()
            if thought:
                yield True, thought
        if not self._close and (rest := self._held.lstrip("\n") if self._between else self._held):
            self._held, self._between = "", False
            yield False, rest

    def finish(self) -> Iterator[tuple[bool, str]]:
        """End the answer, and yield what was held back."""
        if self._held:
            yield self.is_thinking, self._held
            self._held = ""

    def _begins(self) -> bool:
        """Look for a tag at the beginning. Return False while one may still come."""
        start = self._held.lstrip()
        if any(begin.startswith(start) for begin, _ in _SPLITS) and start not in dict(_SPLITS):
            return False
        self._begun = True
        for begin, close in _SPLITS:
            if start.startswith(begin):
                self._close, self._held = close, start[len(begin) :]
        return True

    def _take_thinking(self) -> str:
        """Return the thinking so far, and hold back what may be the beginning of its end tag."""
        thought, found, rest = self._held.partition(self._close)
        if found:
            self._close, self._held, self._between = "", rest, True
            return thought
        shown = len(thought) - overlap(thought, self._close)
        self._held = thought[shown:]
        return thought[:shown]


def overlap(text: str, tag: str) -> int:
    """Return the length of the longest end of `text` that begins `tag`, and is not all of it."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0


def without_thinking(answer: str, prompt: str = "") -> str:
    """Return `answer` without its thinking. `prompt` is the text that the answer continues."""
    splitter = ThinkingSplitter(prompt)
    pieces = [*splitter.add(answer), *splitter.finish()]
    return "".join(text for is_thinking, text in pieces if not is_thinking)


def opens_thinking(prompt: str) -> bool:
    """Return True if `prompt` ends with a tag: it opens the answer's thinking, or skips it."""
    return prompt.rstrip().endswith(tuple(tag for tags in _SPLITS for tag in tags if tag))


def has_thinking(answer: str) -> bool:
    """Return True if `answer` has thinking that a template may leave out.

    If the prompt has opened the thinking, the answer has only the end tag.
    """
    has_end = any(close in answer for _, close in _SPLITS if close)
    return has_end or without_thinking(answer) != answer


def content_for_template(answer: str) -> str:
    """Return the part of `answer` that a template is given.

    The template of gpt-oss refuses messages that name their channels.
    """
    return without_thinking(answer) if answer.startswith("<|channel|>") else answer


def thinking_tokens(encode_more: Callable[[str], list[int]]) -> list[dict[str, list[int]]]:
    """Return the thinking tags that are tokens of a model's vocabulary, as token ids.

    `encode_more` is that of the model's tokenizer. Tags are left out if their begin has more than
    three tokens or their end more than one.
    """
    pairs = [(encode_more(tags.begin), encode_more(tags.end)) for tags in THINKING_TAGS]
    return [
        {"begin": begin, "end": end} for begin, end in pairs if len(begin) <= 3 and len(end) == 1
    ]


def common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the length of the longest common beginning."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def common_end(a: str, b: str) -> int:
    """Return the length of the longest common end of two texts."""
    return common(a[::-1], b[::-1])


Content = str | list[dict[str, Any]]
"""A text, or a list of parts in the form of `mlxrunner.templates.messages.Message`."""
NO_PICTURE = "[picture: this model sees none]"
"""Stands for a picture that a model can't see."""
UNREAD_PICTURE = "[picture: it can't be read]"
"""Stands for a picture whose file is broken, is too large, or is not in the request."""


class Shown(NamedTuple):
    """A picture among the parts of a content."""

    image: str
    """Its base64, or its URL."""


class StandIn(NamedTuple):
    """A text in place of a part or an item that a model can't be shown."""

    kind: str
    """The type of the part in one word, for reports."""
    text: str
    where: str
    """The name of the part, for errors."""
    why: str
    """The reason to refuse the part where it is refused."""

    @property
    def error(self) -> str:
        """The message of an error about the part."""
        return f"{self.where}: {self.why}"


class Parts(list["str | Shown | StandIn"]):
    """A content that has been read. `by`: the text between two neighbouring texts."""

    def __init__(self, parts: Iterable[str | Shown | StandIn] = (), by: str = "") -> None:
        super().__init__(parts)
        self.by = by

    @property
    def content(self) -> Content:
        """The content, with the text of each stand-in in its place, in lines of its own."""
        found: list[dict[str, Any]] = []
        is_alone = False
        for part in self:
            if isinstance(part, Shown):
                found.append({"type": "image", "image": part.image})
                continue
            text = part.text if isinstance(part, StandIn) else part
            if found and found[-1]["type"] == "text":
                by = self.by or ("\n" if is_alone or isinstance(part, StandIn) else "")
                found[-1]["texts"] += [by, text]
            else:
                found.append({"type": "text", "texts": [text]})
            is_alone = isinstance(part, StandIn)
        whole = [
            {"type": "text", "text": "".join(one["texts"])} if "texts" in one else one
            for one in found
        ]
        if all(one["type"] == "text" for one in whole):
            return "".join(one["text"] for one in whole)
        return whole


class PartError(Exception):
    """A part that the user has just sent can't be shown to the model."""

    def __init__(self, part: StandIn) -> None:
        super().__init__(part.error)
        self.where, self.kind = part.where, part.kind


def settled(messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Return messages whose `Parts` are contents, and the kinds of the parts that became texts.

    Raise PartError for the first of them that the user has just sent: see `own_message`.
    """
    own, kinds, found = own_message(messages), set[str](), list[dict[str, Any]]()
    for number, message in enumerate(messages):
        parts = message.get("content")
        if not isinstance(parts, Parts):
            found.append(message)
            continue
        for part in parts:
            if isinstance(part, StandIn):
                if number == own:
                    raise PartError(part)
                kinds.add(part.kind)
        found.append({**message, "content": parts.content})
    return found, tuple(sorted(kinds))


def own_message(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of the message that the user has just written; -1 if there is none.

    A message beside a tool's result is not the user's: clients put there what a tool has read.
    """
    own = -1
    for number in range(len(messages) - 1, -1, -1):
        role = messages[number]["role"]
        if role == "tool":
            return -1
        if role == "user" and own < 0:
            own = number
        elif role == "assistant":
            break
    return own


def without_pictures(content: Any, text: str = NO_PICTURE) -> str:
    """Return a content with `text` in place of each picture."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] if part["type"] == "text" else text for part in content)


def picture_of(part: Mapping[str, Any]) -> Shown | None:
    """Return the picture of a part in one of OpenAI's forms; None if it is none."""
    match part:
        case {"type": "image_url", "image_url": {"url": str(url)}}:
            return Shown(url)
        case {"type": "image_url" | "input_image" | "computer_screenshot", "image_url": str(url)}:
            return Shown(url)
    return None


_TEXTS = ("text", "input_text", "output_text", "summary_text", "reasoning_text")
_PICTURES = ("image", "image_url", "input_image", "computer_screenshot")
_FILES = ("document", "file", "input_file")
_HEARD = ("audio", "input_audio", "video", "video_url", "input_video")
_KIND = re.compile(r"[\w.-]{1,60}", re.ASCII)
_OPAQUE = re.compile(r"(?<![\w+/=.-])[\w+/=.-]{257}", re.ASCII)
"""A stretch of a text that no person wrote: base64, a signature, a key.

Each one is looked at from its beginning only, so that the time is linear in the text.
"""
_NOT_SAID = frozenset(
    "id call_id tool_use_id item_id signature cache_control citations annotations logprobs "
    "encrypted_content encrypted_index caller".split()
)
"""Fields of an item that tell a model nothing."""


def parts_of(where: str, content: Any, by: str = "") -> Parts:
    """Return the parts of a content, in any form in which clients send one.

    `where` names it for errors. `by`: the text between two neighbouring texts.
    """
    if content is None or isinstance(content, str):
        return Parts([content or ""], by)
    if not isinstance(content, list | tuple):
        why = f"it has to be a text or parts, not {content!r:.60}"
        is_part = isinstance(content, Mapping) and ("type" in content or "text" in content)
        return Parts(_read(where, content) if is_part else [item_text(where, content, why)], by)
    found = (_read(f"{where}.{number}", part) for number, part in enumerate(content))
    return Parts((one for parts in found for one in parts), by)


def _read(where: str, part: Any) -> Iterator[str | Shown | StandIn]:
    """Yield what a part is: a text, a picture, a text in its place, or several of them."""
    if isinstance(part, str):
        yield part
        return
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping):
        yield item_text(where, part, f"it has to be an object or a text, not {part!r:.60}")
    elif kind and not isinstance(kind, str):
        yield item_text(where, part)
    elif kind == "refusal" or kind in _TEXTS or (not kind and "text" in part):
        yield _text_part(where, part)
    elif kind in _PICTURES:
        yield _picture(where, part)
    elif kind in _FILES:
        yield from _document(where, part)
    elif kind == "search_result":
        head = [part[name] for name in ("title", "source") if isinstance(part.get(name), str)]
        yield "\n".join(head)
        yield from parts_of(f"{where}.content", part.get("content"))
    elif kind == "compaction" and isinstance(part.get("content"), str):
        yield part["content"]
    elif kind == "tool_reference" and isinstance(part.get("tool_name"), str):
        yield StandIn(kind, f"[tool: {part['tool_name']}]", where, _unsupported(kind))
    elif kind in _HEARD:
        yield StandIn(kind, f"[{kind}: this model takes none]", where, _unsupported(kind))
    else:
        yield item_text(where, part)


def _unsupported(kind: object) -> str:
    return f"content of type {kind!r:.60} is not supported here, only text and pictures"


def _text_part(where: str, part: Mapping[str, Any]) -> str | StandIn:
    given = part.get("refusal") if part.get("type") == "refusal" else None
    text = part.get("text") if given is None else given
    if isinstance(text, str):
        return text
    shown = "" if text is None else _said(text)
    return StandIn("text", shown, f"{where}.text", "it has to be a text")


def _picture(where: str, part: Mapping[str, Any]) -> Shown | StandIn:
    """Return a picture in one of OpenAI's forms, or in Anthropic's."""
    if (found := picture_of(part)) is not None:
        return found
    match part.get("source"):
        case {"type": "base64", "data": str(image)} | {"type": "url", "url": str(image)}:
            return Shown(image)
    if part["type"] == "image":
        why = 'it has to be {"type": "base64", "media_type": text, "data": text}'
        return StandIn("picture", UNREAD_PICTURE, f"{where}.source", why)
    why = "it has to be a URL that begins as data:image/png;base64,"
    return StandIn("picture", UNREAD_PICTURE, f"{where}.image_url", why)


def _document(where: str, part: Mapping[str, Any]) -> Iterator[str | Shown | StandIn]:
    """Yield the texts and pictures of a document; a text in its place if it can't be read."""
    inner = part.get("file")
    part = {**part, **inner} if isinstance(inner, Mapping) else part
    name = next((one for key in ("title", "filename") if isinstance(one := part.get(key), str)), "")
    said = [one for key in ("title", "context") if isinstance(one := part.get(key), str) and one]
    kind, data = "", None
    match part.get("source"):
        case {"type": "text", "data": str(text)}:
            yield "\n".join([*said, text])
            return
        case {"type": "content", "content": content}:
            if said:
                yield "\n".join(said)
            yield from parts_of(f"{where}.source.content", content)
            return
        case {"media_type": str(media), "data": str(given)}:
            kind, data = media, given
    if isinstance(file := part.get("file_data"), str):
        head, comma, data = file.rpartition(",")
        kind = head.removeprefix("data:").partition(";")[0] if comma else ""
    decoded = _decoded(kind, data)
    if decoded is not None:
        yield "\n".join([*said, decoded])
        return
    named = " ".join(
        one for one in (f'"{name}"' if name else "", f"({kind})" if kind else "") if one
    )
    shown = f"[document{' ' + named if named else ''}: this model reads only text]"
    yield StandIn("document", shown, where, _unsupported(part["type"]))


def _decoded(kind: str, data: str | None) -> str | None:
    """Return the text of a file in base64; None if it is not text."""
    if data is None or not (kind.startswith("text/") or kind in ("application/json", "")):
        return None
    try:
        text = base64.b64decode(data, validate=True).decode()
    except (binascii.Error, ValueError):
        return None
    return None if "\0" in text else text


def item_text(where: str, item: Any, why: str | None = None) -> StandIn:
    """Return the text in place of an item of any kind: its type, and what can be read in it.

    The text depends on nothing but the item, so that it is the same in each request.
    """
    kind = item.get("type") if isinstance(item, Mapping) else None
    named = kind if isinstance(kind, str) and _KIND.fullmatch(kind) else "item"
    fields = {key: one for key, one in item.items() if key != "type"} if kind else item
    said = _said(fields)
    text = f"[{named}]" if said in ("", "{}", "[]", "null") else f"[{named}: {said}]"
    shown = item if kind is None else kind
    return StandIn(named, text, where, _unsupported(shown) if why is None else why)


def _said(value: Any) -> str:
    """Return a JSON value as a text, without what tells a model nothing."""
    readable = _readable(value)
    if isinstance(readable, str):
        return readable
    return json.dumps(readable, ensure_ascii=False, default=str)


def _readable(value: Any) -> Any:
    if isinstance(value, Mapping):
        found = {key: _readable(one) for key, one in value.items() if key not in _NOT_SAID}
        if found.get("status") == "completed":
            del found["status"]
        return {key: one for key, one in found.items() if one not in (None, "", [], {})}
    if isinstance(value, list | tuple):
        return [one for one in map(_readable, value) if one not in (None, "", [], {})]
    return "" if isinstance(value, str) and _OPAQUE.search(value) else value


def arguments_of_call(given: Any) -> tuple[Any, bool]:
    """Return the arguments of a call as an object or the JSON text of one.

    The second value is False if they are something else: then they are the text of `arguments` in
    an object, as chat templates write nothing but objects.
    """
    if given is None or given == "":
        return {}, True
    if isinstance(given, Mapping):
        return given, True
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    text = with_whole_characters(text)
    try:
        if isinstance(parsed_json(text), Mapping):
            return text, True
    except (ValueError, RecursionError):
        pass
    return {"arguments": text}, False
