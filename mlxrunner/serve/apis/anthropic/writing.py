"""An answer as a message, or as the stream of events that build one; errors in their shape."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from mlxrunner.serve.apis.fields import report
from mlxrunner.serve.apis.whole import Call, Whole
from mlxrunner.serve.asked import Asked
from mlxrunner.serve.events import (
    CallArguments,
    CallBegan,
    CallEnded,
    Ended,
    Event,
    RefusedError,
    Text,
    Thought,
)
from mlxrunner.serve.shapes import anthropic_error

STOP_REASONS = {
    "stop": "end_turn",
    "stop_sequence": "stop_sequence",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}
"""Their word for each reason of an end."""


def usage_body(ended: Ended, *, is_marked: bool) -> dict[str, Any]:
    """Return the usage. Tokens that were evaluated are kept in the cache, all of them.

    They count as written to it if the client marked anything with `cache_control`, as it is used
    to, and as input otherwise.
    """
    usage = ended.usage
    new = usage.prompt_tokens - usage.cached_tokens
    return {
        "input_tokens": 0 if is_marked else new,
        "cache_creation_input_tokens": new if is_marked else 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": ended.thinking_tokens},
    }


def message_body(
    asked: Asked, answer: Whole, *, is_marked: bool, left_out: tuple[str, ...]
) -> dict[str, Any]:
    """Return the message of a whole answer."""
    ended = answer.end
    return {
        **_head(asked),
        "content": [_block(asked, part) for part in answer.parts],
        "stop_reason": STOP_REASONS[ended.reason],
        "stop_sequence": ended.stop_sequence,
        "usage": usage_body(ended, is_marked=is_marked),
        "mlxrunner": report(ended, left_out),
    }


def _head(asked: Asked) -> dict[str, Any]:
    return {"id": asked.id, "type": "message", "role": "assistant", "model": asked.model}


def _block(asked: Asked, part: Text | Thought | Call) -> dict[str, Any]:
    match part:
        case Text(text):
            return {"type": "text", "text": text}
        case Thought(text):
            return {"type": "thinking", "thinking": text, "signature": asked.id}
        case Call():
            given = json.loads(part.arguments or "{}")
            return {"type": "tool_use", "id": part.id, "name": part.name, "input": given}


def frame(event: Mapping[str, Any]) -> bytes:
    """Return an event as a frame of the stream."""
    return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), msgspec.json.encode(event))


PING = frame({"type": "ping"})
"""The heartbeat."""


class StreamWriter:
    """Writes the events of one answer as frames."""

    def __init__(self, asked: Asked, *, is_marked: bool, left_out: tuple[str, ...]) -> None:
        """Begin a stream. The arguments are those of `message_body`."""
        self._asked, self._is_marked, self._left_out = asked, is_marked, left_out
        self._index = -1
        self._open: str | None = None
        """The type of the block that is open."""

    def begin(self) -> Iterator[bytes]:
        """Yield the first frame. What was reused is known only at the end."""
        usage = {"input_tokens": 0, "output_tokens": 0}
        usage |= {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        rest: dict[str, Any] = {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        yield frame({"type": "message_start", "message": _head(self._asked) | rest})

    def write(self, index: int, event: Event) -> Iterator[bytes]:
        """Yield the frames of an event."""
        match event:
            case Text(text):
                if text:
                    yield from self._piece("text", {"text": ""}, {"text": text})
            case Thought(text):
                if text:
                    empty = {"thinking": "", "signature": ""}
                    yield from self._piece("thinking", empty, {"thinking": text})
            case CallBegan(_, call_id, name):
                yield from self._close()
                yield self._begin("tool_use", {"id": call_id, "name": name, "input": {}})
            case CallArguments(_, text):
                yield self._delta("input_json_delta", {"partial_json": text})
            case CallEnded():
                yield from self._close()
            case Ended():
                yield from self._end(event)
            case _:
                yield PING

    def finish(self) -> Iterator[bytes]:
        """Yield nothing: the last event has ended the stream."""
        yield from ()

    def error(self, refused: RefusedError) -> bytes:
        """Return the frame of an error, which is the last one."""
        return frame(anthropic_error(refused, self._asked.id))

    def _piece(
        self, kind: str, empty: Mapping[str, str], delta: Mapping[str, str]
    ) -> Iterator[bytes]:
        if self._open != kind:
            yield from self._close()
            yield self._begin(kind, empty)
        yield self._delta(f"{kind}_delta", delta)

    def _begin(self, kind: str, block: Mapping[str, Any]) -> bytes:
        self._open = kind
        self._index += 1
        started = {"type": kind, **block}
        return frame(
            {"type": "content_block_start", "index": self._index, "content_block": started}
        )

    def _delta(self, kind: str, delta: Mapping[str, str]) -> bytes:
        changed = {"type": kind, **delta}
        return frame({"type": "content_block_delta", "index": self._index, "delta": changed})

    def _close(self) -> Iterator[bytes]:
        if self._open == "thinking":
            yield self._delta("signature_delta", {"signature": self._asked.id})
        if self._open is not None:
            yield frame({"type": "content_block_stop", "index": self._index})
        self._open = None

    def _end(self, ended: Ended) -> Iterator[bytes]:
        yield from self._close()
        reason = STOP_REASONS[ended.reason]
        yield frame(
            {
                "type": "message_delta",
                "delta": {"stop_reason": reason, "stop_sequence": ended.stop_sequence},
                "usage": usage_body(ended, is_marked=self._is_marked),
            }
        )
        yield frame({"type": "message_stop", "mlxrunner": report(ended, self._left_out)})
