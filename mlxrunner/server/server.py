"""Run the server: take a port, build the application, answer connections, and stop in order."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

import uvicorn
import uvloop
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp
from uvicorn.server import HANDLED_SIGNALS

from mlxrunner.config.names import did_you_mean
from mlxrunner.engine.thread import has_work
from mlxrunner.errors import OptionError
from mlxrunner.options import ServeSettings
from mlxrunner.server import anthropic, ollama, openai, responses
from mlxrunner.server.errors import api_error_of, error_response
from mlxrunner.server.events import ApiError
from mlxrunner.server.manager import ModelManager
from mlxrunner.server.middleware import (
    AccessMiddleware,
    AccessRules,
    HttpConnection,
    hosts_of,
    is_loopback,
)
from mlxrunner.server.models import AnswerBackend, ServedModel, parking_folder
from mlxrunner.server.prompts.rules import RULES
from mlxrunner.server.watch import RequestLog, watch_router
from mlxrunner.terminal.signals import say_now, uninterrupted
from mlxrunner.terminal.text import size

INTERRUPTED = 130
"""Exit code after a second Ctrl-C."""
LAST_S = 1.0
"""Seconds that a client has to read that its answer ends because the server stops."""
WAITING = 128
"""Connections that may wait to be accepted."""


def check_access(settings: ServeSettings) -> None:
    """Raise OptionError if other machines could ask without a key and nobody has said so."""
    if settings.api_key is not None and settings.no_key:
        raise OptionError("--api-key and --no-key contradict each other: use one of them")
    if settings.api_key is not None and not settings.api_key.isascii():
        raise OptionError("--api-key: clients send it in a header: use letters, digits and signs")
    if not (is_loopback(settings.host) or settings.api_key or settings.no_key):
        raise OptionError(
            f"--host {settings.host} lets other machines ask: give --api-key KEY, or --no-key if "
            "anyone who can reach it may use it"
        )


def check_rules(settings: ServeSettings) -> None:
    """Raise OptionError for a rule that there is not."""
    known = [rule.name for rule in RULES]
    for name in settings.disable_rewrite:
        if name not in known:
            raise OptionError(
                f"--disable-rewrite {name}: there is no such rule: {did_you_mean(name, known)}"
                f"there are {', '.join(known)}"
            )


def check_origins(settings: ServeSettings) -> None:
    """Raise OptionError for an origin that no browser has."""
    for origin in settings.allow_origin:
        # Browsers send null, and some programs file://, for pages that are files.
        if not re.fullmatch(r"null|file://|[a-z][a-z0-9+.-]*://[^/?#*\s]+", origin):
            raise OptionError(
                f"--allow-origin {origin}: has to be the beginning of a page's URL, as browsers "
                "send it, such as http://localhost:3000, without * and path; or null or file:// "
                "for files"
            )


def listen(settings: ServeSettings) -> socket.socket:
    """Return a socket that listens where the settings say. Raise OptionError if it can't."""
    host, port = settings.host, settings.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
    except OSError as error:
        raise OptionError(f"--host {host}: no such address: {error.strerror or error}") from error
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(WAITING)
    except OSError as error:
        found.close()
        raise OptionError(_why_not(error, host, port)) from error
    return found


def _why_not(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} of {host} is in use, perhaps by another mlxrunner serve: stop that one, "
            "or choose another --port (0 = any free one)"
        )
    if error.errno == errno.EACCES:
        return f"port {port} needs an administrator: choose a --port from 1024 on"
    return f"can't listen on port {port} of {host}: {error.strerror or error}"


def address_of(listening: socket.socket, host: str) -> str:
    """Return the URL under which a client on this machine reaches the server."""
    port = listening.getsockname()[1]
    name = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def application(manager: ModelManager, record: RequestLog, settings: ServeSettings) -> ASGIApp:
    """Return the whole application of a server."""
    is_open = settings.api_key is not None or settings.no_key
    rules = AccessRules(
        hosts_of(settings.host, is_open=is_open), settings.api_key, frozenset(settings.allow_origin)
    )
    return make_app([*routers(manager), watch_router(manager, record)], rules)


def welcome(
    opened: ServedModel, shown: str, address: str, settings: ServeSettings, ranks: int = 1
) -> list[str]:
    """Return the lines that say where the server is, what it holds, and how clients find it.

    `ranks`: how many share the model.
    """
    runner = opened.runner
    shared = f"{ranks} ranks, " if ranks > 1 else ""
    places = f"{shared}{settings.slots} slots, {opened.room} tokens of context"
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
) -> None:
    """Answer requests until a signal to stop. The first model is loaded.

    `ready` is called once requests and signals are heeded.

    Afterwards running requests have their time to end, and idle conversations are parked. If a
    model is still being loaded then, the process ends here.
    """
    with uninterrupted():  # pydantic turns an interrupt of its own work into another error
        app = application(manager, record, settings)
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


def make_app(routers: Sequence[APIRouter], rules: AccessRules) -> ASGIApp:
    """Return the application with `routers`, behind a guard with `rules`.

    `/openapi.json` describes it. There is no page for that document, because FastAPI's would fetch
    its script from the network.
    """
    app = FastAPI(
        title="mlxrunner", version=ollama.program_version(), docs_url=None, redoc_url=None
    )
    for router in routers:
        app.include_router(router)
    for kind in (ApiError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _refuse)
    return AccessMiddleware(app, rules)


async def _refuse(request: Request, error: Exception) -> Response:
    """Answer a request that no route has answered."""
    refused = _error_of(request, error)
    return error_response(request.url.path, refused, request.state.id)


def _error_of(request: Request, error: Exception) -> ApiError:
    path, method = request.url.path, request.method
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        said = {
            404: f"there is nothing at {path:.200}: /openapi.json lists the paths",
            405: f"{path:.200} does not take {method}",
        }
        return ApiError(error.status_code, said[error.status_code], code="not_found")
    return api_error_of(error)


def routers(answers: AnswerBackend) -> list[APIRouter]:
    """Return the routers of all protocols."""
    return [
        anthropic.router(answers),
        openai.router(answers),
        responses.router(answers),
        openai.completions_router(answers),
        ollama.router(answers),
        openai.models_router(answers),
    ]
