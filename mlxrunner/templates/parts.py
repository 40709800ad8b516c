"""Contents of messages that clients send in parts: texts, pictures, and what is neither.

Every form of a part that a client of OpenAI's, Anthropic's or Ollama's API sends is read here. A
part that a model can't be shown becomes a `StandIn`, a short text in its place: a client repeats
its history with each request, so that refusing it would end the conversation for good.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mlxrunner.config.option import parsed_json, with_whole_characters

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
        yield _text(where, part)
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


def _text(where: str, part: Mapping[str, Any]) -> str | StandIn:
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
    """Return the text of a file in base64; None if it is no text."""
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
