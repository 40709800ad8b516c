"""The protocols of the server as a client of few words sees them: requests, streams, answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Body = dict[str, Any]
Message = Mapping[str, str]


@dataclass(frozen=True)
class Wire:
    """A way to ask for an answer to messages."""

    name: str
    path: str
    body: Callable[[Sequence[Message], int], Body]
    """A function of the messages and of the most tokens of the answer."""
    piece: Callable[[Body], str]
    """A function that returns the text of one event of a stream."""
    whole: Callable[[Body], str]
    """A function that returns the text of a body that is no stream."""
    ends: tuple[str, ...]
    """Texts of which the last line of a whole stream has one."""


def _chat(messages: Sequence[Message], tokens: int) -> Body:
    return {"messages": [*messages], "max_tokens": tokens}


def _completions(messages: Sequence[Message], tokens: int) -> Body:
    return {"prompt": _flat(messages), "max_tokens": tokens}


def _messages(messages: Sequence[Message], tokens: int) -> Body:
    system, *rest = messages
    return {"system": system["content"], "messages": rest, "max_tokens": tokens}


def _responses(messages: Sequence[Message], tokens: int) -> Body:
    return {"input": [*messages], "max_output_tokens": tokens, "store": False}


def _ollama(messages: Sequence[Message], tokens: int) -> Body:
    return {"messages": [*messages], "options": {"num_predict": tokens}}


def _generate(messages: Sequence[Message], tokens: int) -> Body:
    return {"prompt": _flat(messages), "options": {"num_predict": tokens}}


def _flat(messages: Sequence[Message]) -> str:
    return "\n".join(message["content"] for message in messages)


def _first_choice(event: Body) -> Body:
    return next(iter(event.get("choices") or ()), {})


WIRES = (
    Wire(
        "chat",
        "/v1/chat/completions",
        _chat,
        lambda event: _first_choice(event).get("delta", {}).get("content") or "",
        lambda body: body["choices"][0]["message"]["content"] or "",
        ("data: [DONE]",),
    ),
    Wire(
        "completions",
        "/v1/completions",
        _completions,
        lambda event: _first_choice(event).get("text") or "",
        lambda body: body["choices"][0]["text"],
        ("data: [DONE]",),
    ),
    Wire(
        "messages",
        "/v1/messages",
        _messages,
        lambda event: event.get("delta", {}).get("text") or "",
        lambda body: "".join(block.get("text", "") for block in body["content"]),
        ('"type":"message_stop"',),
    ),
    Wire(
        "responses",
        "/v1/responses",
        _responses,
        lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
        lambda body: "".join(
            part.get("text", "") for item in body["output"] for part in item.get("content", ())
        ),
        ('"type":"response.completed"', '"type":"response.incomplete"'),
    ),
    Wire(
        "ollama chat",
        "/api/chat",
        _ollama,
        lambda event: event["message"]["content"],
        lambda body: body["message"]["content"],
        ('"done":true',),
    ),
    Wire(
        "ollama generate",
        "/api/generate",
        _generate,
        lambda event: event["response"],
        lambda body: body["response"],
        ('"done":true',),
    ),
)


def event_of(line: str) -> Body | None:
    """Return the event that a line of a stream has; None for lines that have none."""
    text = line.removeprefix("data: ")
    found: Body | None = json.loads(text) if text.startswith("{") else None
    return found
