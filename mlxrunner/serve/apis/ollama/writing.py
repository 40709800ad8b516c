"""Answers as Ollama's objects: one, or a line for each piece."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from mlxrunner.batch.answers import IMPOSSIBLE
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
    Token,
)

NS = 1_000_000_000
"""Nanoseconds of a second."""


def line(body: Any) -> bytes:
    """Return an object as a line of a stream."""
    return msgspec.json.encode(body) + b"\n"


def now() -> str:
    """Return the time as Ollama writes it."""
    return stamp(time.time())


def stamp(seconds: float) -> str:
    """Return a Unix time as Ollama writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


class Shape:
    """The object of a piece of an answer: that of a chat, or of a single prompt."""

    def __init__(
        self, asked: Asked, name: str, *, is_chat: bool, left_out: Sequence[str] = ()
    ) -> None:
        """Write answers of the model with this `name`. `left_out`: what is ignored."""
        self._asked, self._name, self._is_chat = asked, name, is_chat
        self._left_out = left_out
        self._began = time.monotonic()

    def piece(
        self,
        text: str = "",
        thought: str = "",
        calls: Sequence[Call] = (),
        tokens: Sequence[Token] = (),
    ) -> dict[str, Any]:
        """Return an object that is not the last one."""
        body: dict[str, Any] = {"model": self._name, "created_at": now()}
        if not self._is_chat:
            body |= {"response": text} | ({"thinking": thought} if thought else {})
        else:
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if thought:
                message["thinking"] = thought
            if calls:
                message["tool_calls"] = [_call(number, call) for number, call in enumerate(calls)]
            body["message"] = message
        if tokens:
            body["logprobs"] = [_logprob(token) for token in tokens]
        return body | {"done": False}

    def end(self, ended: Ended) -> dict[str, Any]:
        """Return the fields of the last object."""
        used = ended.usage
        timing = used.timing
        total = time.monotonic() - self._began
        parts = timing.prefill_s + timing.decode_s
        return {
            "done": True,
            "done_reason": "length" if ended.reason == "length" else "stop",
            "total_duration": int(max(total, parts) * NS),
            "load_duration": int(max(total - parts, 0) * NS),
            "prompt_eval_count": used.prompt_tokens,
            "prompt_eval_duration": int(timing.prefill_s * NS),
            "eval_count": used.completion_tokens,
            "eval_duration": int(timing.decode_s * NS),
            "mlxrunner": report(ended, self._left_out),
        }

    def whole(self, answer: Whole) -> dict[str, Any]:
        """Return the object of a whole answer."""
        body = self.piece(answer.text, answer.thought, answer.calls, answer.tokens)
        return body | self.end(answer.end)

    def empty(self, reason: str) -> dict[str, Any]:
        """Return the object for a request that only loads a model, or unloads it."""
        return self.piece() | {"done": True, "done_reason": reason}


def _call(number: int, call: Call) -> dict[str, Any]:
    given = json.loads(call.arguments or "{}")
    return {"id": call.id, "function": {"index": number, "name": call.name, "arguments": given}}


def _logprob(token: Token) -> dict[str, Any]:
    others = [_shown(text, logprob) for text, _, logprob in token.top]
    return {**_shown(token.text, token.logprob), "top_logprobs": others}


def _shown(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": max(logprob, IMPOSSIBLE)}


class StreamWriter:
    """Writes the events of one answer as lines. A call comes when it is whole."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._call = Call("", "")

    def begin(self) -> Iterator[bytes]:
        """Yield nothing: each line stands for itself."""
        yield from ()

    def write(self, index: int, event: Event) -> Iterator[bytes]:
        """Yield the lines of an event. A heartbeat is a line without text."""
        match event:
            case Text(text, tokens):
                if text or tokens:
                    yield line(self._shape.piece(text, tokens=tokens))
            case Thought(text):
                if text:
                    yield line(self._shape.piece(thought=text))
            case CallBegan(_, call_id, name):
                self._call = Call(call_id, name)
            case CallArguments(_, text):
                self._call.arguments += text
            case CallEnded():
                yield line(self._shape.piece(calls=[self._call]))
            case Ended():
                yield line(self._shape.piece() | self._shape.end(event))
            case _:
                yield line(self._shape.piece())

    def finish(self) -> Iterator[bytes]:
        """Yield nothing: the last event has ended the stream."""
        yield from ()

    def error(self, refused: RefusedError) -> bytes:
        """Return the line of an error, which is the last one."""
        return line({"error": refused.message})
