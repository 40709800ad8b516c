"""Answers as a chat completion, or as the stream of its chunks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from mlxrunner.serve.apis.fields import report
from mlxrunner.serve.apis.openai.logprobs import chat_logprobs
from mlxrunner.serve.apis.whole import Whole
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
from mlxrunner.serve.shapes import openai_error

FINISH_REASONS = {
    "stop": "stop",
    "stop_sequence": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
}
"""Their word for each reason of an end."""
DONE = b"data: [DONE]\n\n"
"""The last frame of a stream."""


def frame(body: Any) -> bytes:
    """Return an object as a frame of a stream."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def head(asked: Asked, kind: str, created: int) -> dict[str, Any]:
    """Return the fields with which an object of this kind begins."""
    return {
        "id": asked.id,
        "object": kind,
        "created": created,
        "model": asked.model,
        "system_fingerprint": None,
    }


def usage_body(ends: Sequence[Ended]) -> dict[str, Any]:
    """Return the usage of several answers to one prompt, which is counted once."""
    first = ends[0].usage
    answered = sum(end.usage.completion_tokens for end in ends)
    return {
        "prompt_tokens": first.prompt_tokens,
        "completion_tokens": answered,
        "total_tokens": first.prompt_tokens + answered,
        "prompt_tokens_details": {"cached_tokens": first.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": sum(end.thinking_tokens for end in ends)},
    }


def completion_body(
    asked: Asked, answers: Sequence[Whole], left_out: tuple[str, ...]
) -> dict[str, Any]:
    """Return the object of whole answers."""
    return head(asked, "chat.completion", int(time.time())) | {
        "choices": [_choice(asked, number, answer) for number, answer in enumerate(answers)],
        "usage": usage_body([answer.end for answer in answers]),
        "mlxrunner": report(answers[0].end, left_out),
    }


def _choice(asked: Asked, number: int, answer: Whole) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.calls:
        message["content"] = answer.text or None
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in answer.calls
        ]
    if answer.thought:
        message["reasoning_content"] = answer.thought
    wanted = asked.options.get("logprobs") is not None
    return {
        "index": number,
        "message": message,
        "logprobs": _logprobs(answer.tokens) if wanted else None,
        "finish_reason": FINISH_REASONS[answer.end.reason],
    }


def _logprobs(tokens: Any) -> dict[str, Any]:
    return {"content": chat_logprobs(tokens), "refusal": None}


class StreamWriter:
    """Writes the events of answers as chunks."""

    def __init__(self, several: Sequence[Asked], *, usage: bool, left_out: tuple[str, ...]) -> None:
        """Begin a stream of `several` answers. With `usage` the last chunk has it."""
        self._several, self._usage, self._left_out = several, usage, left_out
        self._created = int(time.time())
        self._ends: dict[int, Ended] = {}

    def begin(self) -> Iterator[bytes]:
        """Yield the chunks that say who speaks."""
        for number in range(len(self._several)):
            yield self._chunk(number, {"role": "assistant", "content": ""})

    def write(self, index: int, event: Event) -> Iterator[bytes]:
        """Yield the chunks of an event. A heartbeat is a comment and a chunk without content."""
        match event:
            case Text(text, tokens):
                if text or tokens:
                    yield self._chunk(index, {"content": text}, tokens)
            case Thought(text):
                if text:
                    yield self._chunk(index, {"reasoning_content": text})
            case CallBegan(number, call_id, name):
                function = {"name": name, "arguments": ""}
                call = {"index": number, "id": call_id, "type": "function", "function": function}
                yield self._chunk(index, {"tool_calls": [call]})
            case CallArguments(number, text):
                piece = {"index": number, "function": {"arguments": text}}
                yield self._chunk(index, {"tool_calls": [piece]})
            case CallEnded():
                pass
            case Ended():
                self._ends[index] = event
                is_last = len(self._ends) == len(self._several) and not self._usage
                yield self._end(index, event, is_last)
            case _:
                yield b": heartbeat\n\n" + self._chunk(index, {})

    def finish(self) -> Iterator[bytes]:
        """Yield the usage, if it is wanted, and the end."""
        if self._usage:
            ends = [self._ends[number] for number in range(len(self._several))]
            more = {"usage": usage_body(ends), "mlxrunner": report(ends[0], self._left_out)}
            yield frame(self._head() | {"choices": []} | more)
        yield DONE

    def error(self, refused: RefusedError) -> bytes:
        """Return the frame of an error, which is the last one."""
        return frame({"error": openai_error(refused)})

    def _head(self) -> dict[str, Any]:
        return head(self._several[0], "chat.completion.chunk", self._created)

    def _chunk(self, index: int, delta: dict[str, Any], tokens: Any = ()) -> bytes:
        logprobs = _logprobs(tokens) if tokens else None
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        return frame(self._head() | {"choices": [choice]})

    def _end(self, index: int, ended: Ended, is_last: bool) -> bytes:
        """Return the chunk with the reason of the end. The last one says what was reused."""
        reason = FINISH_REASONS[ended.reason]
        choice = {"index": index, "delta": {}, "logprobs": None, "finish_reason": reason}
        body = self._head() | {"choices": [choice]}
        if is_last:
            body["mlxrunner"] = report(self._ends[0], self._left_out)
        return frame(body)
