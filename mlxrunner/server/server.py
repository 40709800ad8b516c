"""Run the server: take a port, build the application, answer connections, and stop in order."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from types import FrameType

import uvicorn
import uvloop
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp
from uvicorn.server import HANDLED_SIGNALS

from mlxrunner.engine.thread import has_work
from mlxrunner.options import ServeSettings
from mlxrunner.server import anthropic, ollama, openai, responses
from mlxrunner.server.errors import api_error_of, error_response
from mlxrunner.server.events import ApiError
from mlxrunner.server.manager import ModelManager
from mlxrunner.server.middleware import (
    AccessMiddleware,
    AccessRules,
    HttpConnection,
    RequestGate,
    hosts_of,
)
from mlxrunner.server.models import ServedModel, parking_folder
from mlxrunner.server.supervisor import RequestJournal
from mlxrunner.server.watch import RequestLog, watch_router
from mlxrunner.terminal.signals import say_now, uninterrupted
from mlxrunner.terminal.text import size

INTERRUPTED = 130
"""Exit code after a second Ctrl-C."""
LAST_S = 1.0
"""Seconds that a client has to read that its answer ends because the server stops."""


def application(
    manager: ModelManager,
    record: RequestLog,
    settings: ServeSettings,
    journal: RequestJournal | None = None,
) -> ASGIApp:
    """Return the whole application of a server. `journal`: that of a worker."""
    is_open = settings.api_key is not None or settings.no_key
    rules = AccessRules(
        hosts_of(settings.host, is_open=is_open), settings.api_key, frozenset(settings.allow_origin)
    )
    gate = None if journal is None else RequestGate(journal)
    return make_app([*routers(manager), watch_router(manager, record)], rules, gate)


def welcome(
    opened: ServedModel, shown: str, address: str, settings: ServeSettings, ranks: int = 1
) -> list[str]:
    """Return the lines that say where the server is, what it holds, and how clients find it.

    `ranks`: how many share the model.
    """
    runner = opened.runner
    shared = f"{ranks} ranks, " if ranks > 1 else ""
    places = f"{shared}{opened.slots} slots, {opened.room} tokens of context"
    where = (
        parking_folder() if runner.keeps_parked else f"{runner.parked_in}, until this server ends"
    )
    parked = f"; {size(settings.disk_cache_bytes)} on disk in {where}"
    claude = f"{address} ANTHROPIC_MODEL={shown}"
    if not settings.claude_names:  # the names that Claude Code's subagents use are refused
        claude += f" CLAUDE_CODE_SUBAGENT_MODEL={shown} ANTHROPIC_DEFAULT_HAIKU_MODEL={shown}"
    return [
        f"serving {shown} at {address} ({places})",
        f"memory: {size(opened.bytes)} with {runner.kv_cache_tokens} tokens of conversations"
        + (parked if settings.disk_cache else "; what finds no room is lost"),
        f"  OpenAI clients:     base URL {address}/v1, {_key(settings)}",
        f"  Anthropic clients:  ANTHROPIC_BASE_URL={claude}",
        f"  Ollama clients:     OLLAMA_HOST={address}",
    ]


def _key(settings: ServeSettings) -> str:
    return "the server's key" if settings.api_key else "any key"


class UvicornServer(uvicorn.Server):
    """A server that ends its running requests before it stops. A second Ctrl-C leaves at once."""

    def __init__(
        self, app: ASGIApp, manager: ModelManager, drain: float, ready: Callable[[], None]
    ) -> None:
        """Serve `app`. Running requests have `drain` seconds to end after a signal to stop.

        `ready` is called once requests and signals are heeded.
        """
        super().__init__(
            uvicorn.Config(
                app,
                http=HttpConnection,
                lifespan="off",
                log_config=None,
                log_level="critical",  # what fails is logged by us, in one line
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=drain + LAST_S,  # type: ignore[arg-type]  # any number
                timeout_keep_alive=75,
            )
        )
        self._manager, self._drain, self._ready = manager, drain, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer."""
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let running requests end. Those that take longer end with an error of their protocol."""
        self._manager.announce_end()  # before the port is free for another server
        over = asyncio.get_running_loop().call_later(self._drain, self._manager.end_answers)
        await super().shutdown(sockets)
        over.cancel()

    @contextmanager
    def heeding(self) -> Iterator[None]:
        """Handle signals from before the event loop begins until it has ended.

        uvicorn does so only while it answers. An exception of a handler in an event loop that is
        starting can be lost, and with it the signal.
        """
        before = {number: signal.signal(number, self.handle_exit) for number in HANDLED_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop at the first signal; leave at once at a second Ctrl-C."""
        if self.should_exit and sig == signal.SIGINT:
            os._exit(INTERRUPTED)
        if not self.should_exit:
            running = sum(place.users for place in self._manager.models_held)
            wait = f"; up to {self._drain:g} s for {running} running requests" if running else ""
            say_now(f"stopping{wait}; Ctrl-C leaves at once")
        self.should_exit = self._manager.is_stopping = True


def serve(
    manager: ModelManager,
    record: RequestLog,
    settings: ServeSettings,
    listening: socket.socket,
    ready: Callable[[], None],
    journal: RequestJournal | None = None,
) -> None:
    """Answer requests until a signal to stop. The first model is loaded.

    `ready` is called once requests and signals are heeded. `journal`: that of a worker.

    Afterwards running requests have their time to end, and idle conversations are parked. If a
    model is still being loaded then, the process ends here.
    """
    with uninterrupted():  # pydantic turns an interrupt of its own work into another error
        app = application(manager, record, settings, journal)
    server = UvicornServer(app, manager, settings.drain, ready)

    async def run() -> None:
        try:
            await server.serve(sockets=[listening])
        finally:
            await manager.close()
            record.close()

    with server.heeding():
        uvloop.run(run())
    if has_work():  # a model that is being loaded; the interpreter must not end beside it
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(0)


def make_app(
    routers: Sequence[APIRouter], rules: AccessRules, gate: RequestGate | None = None
) -> ASGIApp:
    """Return the application with `routers`, behind a guard with `rules`, and behind `gate`.

    `/openapi.json` describes it. There is no page for that document, because FastAPI's would fetch
    its script from the network.
    """
    app = FastAPI(
        title="mlxrunner", version=ollama.program_version(), docs_url=None, redoc_url=None
    )
    for router in routers:
        app.include_router(router)
    routes = (route for router in routers for route in router.routes)
    app.state.paths = [str(getattr(route, "path", "")) for route in routes]
    for kind in (ApiError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _refuse)
    return AccessMiddleware(app, rules, gate)


ABSENT = {
    "/embeddings": "embeddings are not supported",
    "/api/embed": "embeddings are not supported",
    "/images": "answers are text",
    "/audio": "answers are text",
    "/batches": "`mlxrunner batch` answers files of prompts",
    "/messages/batches": "`mlxrunner batch` answers files of prompts",
    "/api/delete": "`mlxrunner models rm` removes a model",
    "/api/create": "an alias in the config file gives a model another name",
    "/api/copy": "an alias in the config file gives a model another name",
}
"""The way to the same, by the beginnings of paths of other servers without their /v1."""


async def _refuse(request: Request, error: Exception) -> Response:
    """Answer a request that no route has answered."""
    refused = _error_of(request, error)
    return error_response(request.url.path, refused, request.state.id)


def _error_of(request: Request, error: Exception) -> ApiError:
    path, method = request.url.path, request.method
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        said = f"{path:.200} does not take {method}"
        if error.status_code == 404:
            there = _elsewhere(path[:200], request.app.state.paths)
            said = f"there is nothing at {path:.200}: {there}"
        return ApiError(error.status_code, said, code="not_found")
    return api_error_of(error)


def _elsewhere(path: str, known: Sequence[str]) -> str:
    """Return what to do about a path that this server does not have. `known` are its paths."""
    tail = path.rstrip("/").removeprefix("/v1")
    for name, instead in ABSENT.items():
        if tail.startswith(name):
            return instead
    if (meant := next((one for one in (f"/v1{tail}", tail) if one in known), None)) is not None:
        return (
            f"did you mean {meant}? The base URL of an OpenAI client ends with /v1, that of an "
            "Anthropic or Ollama client does not"
        )
    close = get_close_matches(tail, known, n=1, cutoff=0.75)
    return f"did you mean {close[0]}?" if close else "/openapi.json lists the paths"


def routers(answers: ModelManager) -> list[APIRouter]:
    """Return the routers of all protocols."""
    return [
        anthropic.router(answers),
        openai.router(answers),
        responses.router(answers),
        openai.completions_router(answers),
        ollama.router(answers),
        openai.models_router(answers),
    ]
