"""A server whose answers are written by the test, on a port of this machine."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI
from support.waiting import until

from mlxrunner.results import Usage
from mlxrunner.server.events import (
    AnswerEnd,
    AnswerEvent,
    ApiError,
    EndReason,
    Ping,
    ServerRequest,
    TextDelta,
    ThinkingDelta,
    ToolCallEvent,
)
from mlxrunner.server.models import ModelCard
from mlxrunner.server.server import routers

CARD = ModelCard(
    "tiny",
    is_loaded=True,
    context=4096,
    bytes=1234,
    modified=1_700_000_000.0,
    architecture="llama",
    digest="abc123",
    has_tools=True,
    has_thinking=True,
    expires=1_900_000_000.0,
)
"""The model that the server says it has, unless a test says another."""


def usage(prompt: int = 50, completion: int = 5, cached: int = 30) -> Usage:
    """Return a usage with these counts."""
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "cached_tokens": cached}
    flat: dict[str, Any] = dict.fromkeys(_NAMES, 0) | counts
    flat |= {"evaluated_tokens": prompt - cached, "prefill_s": 0.5, "decode_s": 0.25}
    flat |= {"outcome": "partial", "reason": "prefix_changed", "lost_tokens": 7}
    return Usage.from_dict(flat)


_NAMES = """
tokenize_s lookup_s prefill_s ttft_s decode_s cache_bytes peak_bytes used_bytes matched_tokens
trimmed_tokens trim_limited_by checkpoint evicted_by shifted_tokens reevaluated_tokens lost_tokens
prefetched_tokens
""".split()


def ended(reason: EndReason = "stop", **more: Any) -> AnswerEnd:
    """Return the last event of an answer."""
    return AnswerEnd(reason, usage(), ("billing-header",), **more)


def call(index: int, name: str, arguments: str) -> AnswerEvent:
    """Return the event of a tool call."""
    return ToolCallEvent(index, f"call_{index}", name, arguments)


HELLO: list[AnswerEvent] = [TextDelta("Hel"), TextDelta("lo"), ended()]
"""The events of a short answer."""
CALLS: list[AnswerEvent] = [
    *(Ping(), Ping(), ThinkingDelta("Let me "), ThinkingDelta("see.")),
    *(TextDelta("I'll "), TextDelta("read.")),
    *(call(0, "read", '{"path": "a"}'), call(1, "read", '{"path": "b"}')),
    ended("tool_calls", thinking_tokens=2),
]
"""The events of an answer with thinking, text and two calls, after two heartbeats."""
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}}
FUNCTION: dict[str, Any] = {
    "name": "read",
    "description": "Read a file",
    "parameters": PARAMETERS,
}
TOOL: Any = {"type": "function", "function": FUNCTION}
"""The function that is called, as OpenAI's chats and Ollama describe it."""
HI: Any = [{"role": "user", "content": "Hi"}]
"""The messages of a short conversation."""


class Scripted:
    """Answers with the events that the test writes, and remembers what was asked."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget what was asked, and what is to be answered."""
        self.script: Sequence[AnswerEvent | Exception] = HELLO
        """The events of the next answers. An error is raised."""
        self.scripts: list[Sequence[AnswerEvent | Exception]] = []
        """Scripts for one answer each, which come before `script`."""
        self.asked: list[ServerRequest] = []
        self.held: list[tuple[str, float | None]] = []
        self.model = CARD
        """The model that the server says it has."""
        self.is_stuck = False
        """True: answers never end by themselves."""
        self.closed = 0
        """The number of answers that have ended, in any way."""

    async def answer(self, asked: ServerRequest) -> AsyncIterator[AnswerEvent]:
        self.asked.append(asked)
        script = self.scripts.pop(0) if self.scripts else self.script
        try:
            for event in script:
                if isinstance(event, Exception):
                    raise event
                await asyncio.sleep(0)
                yield event
            if self.is_stuck:
                await asyncio.Event().wait()
        finally:
            self.closed += 1

    async def count(self, asked: ServerRequest) -> int:
        self.asked.append(asked)
        return 42

    def models(self) -> Sequence[ModelCard]:
        return [self.model]

    def card(self, model: str) -> ModelCard:
        if model.removesuffix(":latest") not in ("", self.model.name):
            raise ApiError(404, f"there is no model {model}", code="model_not_found")
        return self.model

    async def hold(self, model: str, keep_alive: float | None) -> None:
        if model == "absent":
            raise ApiError(404, "no model 'absent'", code="model_not_found")
        self.held.append((model, keep_alive))

    @property
    def last(self) -> ServerRequest:
        """The latest request."""
        return self.asked[-1]


def app_of(answers: Scripted) -> FastAPI:
    """Return an application that has the routes of all protocols and nothing else."""
    app = FastAPI(docs_url=None, redoc_url=None)
    for router in routers(answers):
        app.include_router(router)
    return app


@contextmanager
def serving(app: Any, **more: Any) -> Iterator[str]:
    """Serve `app` on a free port of this machine, and yield its address.

    `more`: further settings of uvicorn.
    """
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="error", log_config=None, lifespan="off", **more)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        until(lambda: server.started, "for the server")
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join()
        listening.close()


@contextmanager
def asking(url: str, body: Mapping[str, Any]) -> Iterator[socket.socket]:
    """Send a request and don't wait for its answer. Leave at the end."""
    place = urlsplit(url)
    content = json.dumps(body).encode()
    head = (
        f"POST {place.path} HTTP/1.1\r\nHost: {place.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection((str(place.hostname), place.port)) as connection:
        connection.sendall(head.encode() + content)
        yield connection
