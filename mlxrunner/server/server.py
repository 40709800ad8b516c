"""Run the server: take a port, build the application, answer connections, and stop in order.

The middleware bounds connections and requests before any protocol: who may ask, how much, and how
slowly.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import os
import re
import signal
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from types import FrameType

import h11
import uvicorn
import uvloop
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import HANDLED_SIGNALS

from mlxrunner.engine.thread import has_work
from mlxrunner.options import ServeSettings
from mlxrunner.profiling.metrics import RequestLog
from mlxrunner.results import logger
from mlxrunner.server import anthropic, ollama, openai, responses
from mlxrunner.server.events import SOON, ApiError, api_error_of, error_response
from mlxrunner.server.manager import ModelManager
from mlxrunner.server.models import ServedModel, parking_folder
from mlxrunner.server.supervisor import SUSPICIOUS, RequestJournal, digest_of, is_loopback
from mlxrunner.server.watch import watch_router
from mlxrunner.system.imports import limit
from mlxrunner.terminal.control import say_now, uninterrupted
from mlxrunner.terminal.early import INTERRUPTED
from mlxrunner.terminal.output import size

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
        parking_folder()
        if runner.keeps_parked
        else f"{runner.parked_in}, until the model is unloaded"
    )
    parked = f"; {size(settings.disk_cache_bytes)} on disk in {where}"
    key = "the server's key" if settings.api_key else "any key"
    claude = f"{address} ANTHROPIC_MODEL={shown}"
    if not settings.claude_names:  # the names that Claude Code's subagents use are refused
        claude += f" CLAUDE_CODE_SUBAGENT_MODEL={shown} ANTHROPIC_DEFAULT_HAIKU_MODEL={shown}"
    return [
        f"serving {shown} at {address} ({places})",
        f"memory: {size(opened.bytes)} with {runner.kv_cache_tokens} tokens of conversations"
        + (parked if settings.disk_cache else "; what finds no room is lost"),
        f"  OpenAI clients:     base URL {address}/v1, {key}",
        f"  Anthropic clients:  ANTHROPIC_BASE_URL={claude}",
        f"  Ollama clients:     OLLAMA_HOST={address}",
    ]


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
    """Return the application with `routers`, after a guard with `rules`, and behind `gate`.

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
    "/api/push": "the hub's own program publishes models: `hf upload`",
    "/api/copy": "an alias in the config file gives a model another name",
}
"""The way to the same, by the beginnings of paths of other servers without their /v1."""


async def _refuse(request: Request, error: Exception) -> Response:
    """Answer a request that no route has answered."""
    path = request.url.path
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        allowed = (error.headers or {}).get("Allow", "another method")
        said = f"{path:.200} does not take {request.method}: send {allowed}"
        if error.status_code == 404:
            there = _elsewhere(path[:200], request.app.state.paths)
            said = f"there is nothing at {path:.200}: {there}"
        error = ApiError(error.status_code, said, code="not_found")
    return error_response(path, api_error_of(error), request.state.id)


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
    return [
        anthropic.router(answers),
        openai.router(answers),
        responses.router(answers),
        openai.completions_router(answers),
        ollama.router(answers),
        openai.models_router(answers),
    ]


MOST_BYTES, MOST_TOGETHER, VALUE = 64 * 2**20, 256 * 2**20, 128
"""Most bytes of a body (a context of a million tokens is about 4 MB), and of those of all requests
that are read or answered. There each value counts with the bytes that it takes beside its text."""
MOST_DEPTH, MOST_PARTS = 128, 2**20
"""Most brackets of a body within each other, and most of its values, each name of a field counted
as one: they take far more memory than bytes, and all requests wait while they are checked."""
IN_BETWEEN = 2**16
"""Bytes of a body up to which it is looked at between two steps of the event loop."""
MOST_SECONDS, SLOWEST = 30.0, 8192
"""Most seconds without a new part of a body, after which so many bytes have to come in a second."""
_PARTS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]|[-+.\w]+', re.DOTALL)
_OPENING, _CLOSING = frozenset(b"[{"), frozenset(b"]}")
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
OPEN = frozenset({("GET", "/health"), ("HEAD", "/health"), ("HEAD", "/")})
"""Requests that need no key: they tell nothing of anybody's requests."""
PROBED = frozenset({"/", "/v1/messages"})
"""Paths that answer HEAD by themselves."""
ASK_FOR_KEY = {"www-authenticate": 'Basic realm="the key of mlxrunner serve, as the password"'}
"""Header that lets a browser ask its user for the key of the status page."""
METHODS = ("GET", "HEAD", "POST", "DELETE", "OPTIONS")
EXPOSED = ("x-request-id", "x-mlxrunner-cache", "retry-after")
"""Headers of answers that pages of known origins may read."""


@dataclass(frozen=True)
class AccessRules:
    """The rules by which requests are let in."""

    hosts: frozenset[str] = LOOPBACK
    """The names under which this server may be called; empty: any."""
    key: str | None = None
    origins: frozenset[str] = frozenset()
    """The origins whose pages may use the server."""
    most_bytes: int = MOST_BYTES
    most_together: int = MOST_TOGETHER
    most_seconds: float = MOST_SECONDS


def hosts_of(host: str, *, is_open: bool) -> frozenset[str]:
    """Return the names under which a server that listens on `host` may be called.

    One that listens on all addresses has no name of its own: it takes any name if `is_open`, which
    means that a key or the user's word keeps others out.
    """
    if is_open and not is_loopback(host):
        return frozenset()
    return LOOPBACK | {host.lower()}


class RequestGate:
    """Lets requests run together, but each suspect alone. It belongs to one event loop."""

    def __init__(self, journal: RequestJournal) -> None:
        self._journal = journal
        self._running = self._waiting = 0
        """The requests that run, and the suspects that wait until none does."""
        self._is_alone = False
        """True while a suspect runs."""
        self._waiters: list[asyncio.Future[None]] = []

    @asynccontextmanager
    async def running(self, name: str, path: str, body: bytes) -> AsyncIterator[None]:
        """Enter when the request with the id `name` may run. Raise ApiError if it is refused."""
        is_small = len(body) <= IN_BETWEEN
        given = digest_of(path, body) if is_small else asyncio.to_thread(digest_of, path, body)
        digest = given if isinstance(given, str) else await given
        if (cause := self._journal.refused.get(digest)) is not None:
            raise ApiError(
                400,
                f"this request has ended the server's worker {SUSPICIOUS + 1} times, the last time "
                f"while nothing else ran ({cause}): shorten it, or restart the server with a "
                "smaller --memory or --context",
                code="ended_the_worker",
            )
        is_suspect = digest in self._journal.suspects
        await self._enter(is_suspect=is_suspect)
        self._journal.begin(name, digest, len(body))
        try:
            yield
            if is_suspect:
                self._journal.clear(digest)
        finally:
            self._journal.end(name)
            self._running, self._is_alone = self._running - 1, False
            self._wake()

    async def _enter(self, *, is_suspect: bool) -> None:
        self._waiting += is_suspect
        try:
            while self._running if is_suspect else self._is_alone or self._waiting:
                waiter = asyncio.get_running_loop().create_future()
                self._waiters.append(waiter)
                await waiter
        finally:
            self._waiting -= is_suspect
            self._wake()  # if it gives up, others may enter
        self._running, self._is_alone = self._running + 1, is_suspect

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class AccessMiddleware:
    """Lets requests through to `app` that keep the rules, with their bodies read.

    A page in a browser can make the browser send requests to this machine, also under a name of its
    own that leads here (DNS rebinding). Therefore the Host header has to be a name of this machine,
    and pages of other origins get no answer unless the user has named them. Starlette's
    TrustedHostMiddleware takes the first of several Host headers, and its error is a text, which no
    client of a protocol reads. Its CORSMiddleware writes the headers here, but lets requests of
    unknown origins through.
    """

    def __init__(self, app: ASGIApp, rules: AccessRules, gate: RequestGate | None = None) -> None:
        self._app, self._rules, self._gate = app, rules, gate
        self.bodies = BodyBudget(rules.most_bytes, rules.most_together, rules.most_seconds)
        self._answer: ASGIApp = self._checked
        if rules.origins:
            self._answer = CORSMiddleware(
                self._checked,
                allow_origins=rules.origins,
                allow_methods=METHODS,
                allow_headers="*",
                expose_headers=EXPOSED,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an HTTP request, or pass it on. Nothing but HTTP is known here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["id"] = uuid.uuid4().hex[:24]
        send = _with_id(send, state["id"])
        try:
            self._check_sender(Headers(scope=scope))
        except ApiError as refused:
            await error_response(scope["path"], refused, state["id"])(scope, receive, send)
        else:
            await self._answer(scope, receive, send)

    async def _checked(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request of a known sender on, and hold its body until it is answered."""
        headers = Headers(scope=scope)
        async with AsyncExitStack() as stack:
            try:
                self._check(scope, headers)
                body = await stack.enter_async_context(self.bodies.read(headers, receive))
                if body and self._gate is not None:
                    name, path = scope["state"]["id"], scope["path"]
                    await stack.enter_async_context(self._gate.running(name, path, body))
            except ApiError as refused:
                response = error_response(scope["path"], refused, scope["state"]["id"])
                if scope["path"] == "/" and refused.status == 401:
                    response.headers.update(ASK_FOR_KEY)
                await response(scope, receive, send)
                return
            if body is not None:
                await self._app(_routed(scope), _again(body, receive), send)

    def _check_sender(self, headers: Headers) -> None:
        """Raise ApiError unless the name of the server and the page of a request are known."""
        self._check_host(headers.getlist("host"))
        origin = headers.get("origin")
        if not (origin is None or self._is_own(origin, headers) or origin in self._rules.origins):
            raise ApiError(
                403,
                f"pages from {origin:.100} may not use this server: start it with --allow-origin "
                f"{origin:.100} if they should",
                code="origin_not_allowed",
            )

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Raise ApiError for a compressed body, or without the key."""
        if (encoding := headers.get("content-encoding", "identity").lower()) != "identity":
            raise ApiError(
                415,
                f"the body has the Content-Encoding {encoding:.60}, which is not read here: send "
                "it without one, not compressed",
                code="unsupported_encoding",
            )
        if self._rules.key and (scope["method"], scope["path"]) not in OPEN:
            self._check_key(self._rules.key, headers)

    def _check_host(self, hosts: list[str]) -> None:
        known = self._rules.hosts
        if known and (len(hosts) != 1 or name_in(hosts[0]) not in known):
            named = hosts[0] if hosts else "nothing"
            raise ApiError(
                403,
                f"the Host header names {named:.100}, and this server is {', '.join(sorted(known))}"
                ": use one of these names",
                code="host_not_allowed",
            )

    def _is_own(self, origin: str, headers: Headers) -> bool:
        """Return True for a page of this server itself, not of another port of this machine."""
        scheme, _, place = origin.lower().partition("://")
        is_here = scheme in ("http", "https") and place == headers.get("host", "").lower()
        return is_here and name_in(place) in (self._rules.hosts or LOOPBACK)

    def _check_key(self, key: str, headers: Headers) -> None:
        given = [*_token(headers.get("authorization", "")), *headers.getlist("x-api-key")]
        if not any(hmac.compare_digest(one.encode(), key.encode()) for one in given):
            what = "is not the server's" if any(given) else "is missing"
            raise ApiError(
                401,
                f"the API key {what}: send the key that the server was started with, as "
                "'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key",
            )


def _token(header: str) -> list[str]:
    """Return the key in an Authorization header: a bearer token, or the password of a browser."""
    kind, _, token = header.partition(" ")
    if kind.lower() == "bearer":
        return [token.strip()]
    with suppress(ValueError):  # not base64, or not UTF-8
        if kind.lower() == "basic":
            return [base64.b64decode(token.strip(), validate=True).decode().partition(":")[2]]
    return []


def name_in(host: str) -> str:
    """Return the name in a Host header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _routed(scope: Scope) -> Scope:
    """Return the scope that finds a route: a slash at the end is none, and HEAD asks as GET does.

    The server leaves out the body of the answer to HEAD.
    """
    path = scope["path"].rstrip("/") or "/"
    is_probe = scope["method"] == "HEAD" and path not in PROBED
    return {**scope, "path": path, "method": "GET" if is_probe else scope["method"]}


def _again(body: bytes, receive: Receive) -> Receive:
    """Return a function that gives the whole body, and then what else comes."""
    is_given = False

    async def give() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return give


def _with_id(send: Send, name: str) -> Send:
    """Return a function that adds the id of the request to a response without one."""

    async def send_more(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).setdefault("x-request-id", name)
        await send(message)

    return send_more


class BodyBudget:
    """The bodies of all requests that are read or answered.

    Starlette's RequestBodyLimitMiddleware bounds each body, with a text as its error. It bounds
    neither all bodies together nor their values, and waits for ever for a body that does not come.
    """

    def __init__(self, most: int, together: int, seconds: float) -> None:
        """Begin without bodies. `most`: bytes of a body; `together`: those of all.

        `seconds`: the most without a new part of a body.
        """
        self._most, self._together, self._seconds = most, together, seconds
        self.held = 0
        """Bytes of the bodies that are held, with `VALUE` for each value."""

    @asynccontextmanager
    async def read(self, headers: Headers, receive: Receive) -> AsyncIterator[bytes | None]:
        """Enter with the whole body, which is held until the exit; None if the client left.

        Raise ApiError if it is wrong.
        """
        taken = 0

        def take(nbytes: int) -> None:
            nonlocal taken
            self._check_room(nbytes)
            self.held += nbytes
            taken += nbytes

        try:
            yield await self._read(headers, receive, take)
        finally:
            self.held -= taken

    async def _read(
        self, headers: Headers, receive: Receive, take: Callable[[int], None]
    ) -> bytes | None:
        length = headers.get("content-length", "0")
        if length.isdecimal():
            self._check_size(int(length[:20]))
            self._check_room(int(length[:20]))
        parts, size, is_last, began = list[bytes](), 0, False, time.monotonic()
        while not is_last:
            message = await self._next(receive, size, time.monotonic() - began)
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            self._check_size(size)
            take(len(parts[-1]))
            is_last = not message.get("more_body", False)
        body = b"".join(parts)
        is_small = size <= IN_BETWEEN
        count = check_form(body) if is_small else await asyncio.to_thread(check_form, body)
        take(VALUE * count)
        return body

    def _check_room(self, nbytes: int) -> None:
        """Raise ApiError if there is no room for `nbytes` more."""
        if self.held + nbytes > self._together:
            raise ApiError(
                503,
                f"requests at work take {self.held} bytes, this one {nbytes} more, and "
                f"{self._together} are the most: ask again later",
                code="overloaded",
                retry_after=SOON,
            )

    def _check_size(self, size: int) -> None:
        if size > self._most:
            message = f"the body has {size} bytes, and {self._most} are the most: send less"
            raise ApiError(413, message, code="too_large")

    async def _next(self, receive: Receive, size: int, passed: float) -> Message:
        """Return the next part of a body, of which `size` bytes have come in `passed` seconds."""
        left = self._seconds + size / SLOWEST - passed
        try:
            async with asyncio.timeout(min(self._seconds, left)):
                return await receive()
        except TimeoutError:
            pass
        slow = f"the body comes too slowly: {size} bytes in {passed:.0f} s, and {SLOWEST} a second"
        still = f"nothing of the body came for {self._seconds:g} s after {size} bytes"
        said = f"{slow} are the least" if left < self._seconds else still
        raise ApiError(408, f"{said}: send it whole", code="timeout")


def check_form(body: bytes) -> int:
    """Return the number of values of a JSON text.

    Raise ApiError if it is too deep, or has too many.
    """
    depth, parts = form_of(body)
    if depth > MOST_DEPTH:
        said = f"the body has more than {MOST_DEPTH} brackets within each other: make it flatter"
        raise ApiError(400, said, code="too_deep")
    return parts


def form_of(body: bytes) -> tuple[int, int]:
    """Return how many brackets of a JSON text lie within each other, at most, and its values.

    Raise ApiError if it has too many values.
    """
    depth = most = parts = 0
    for found in _PARTS.finditer(body):
        sign = body[found.start()]
        if sign in _CLOSING:
            depth -= 1
            continue
        parts += 1
        if parts > MOST_PARTS:
            said = f"the body has more than {MOST_PARTS} values (texts, numbers, lists): send less"
            raise ApiError(413, said, code="too_large")
        if sign in _OPENING:
            depth += 1
            most = max(most, depth)
    return most, parts


EVERY_S = 60.0
"""Seconds from one line to the next."""
KEPT = 32
"""Most files that no connection gets; a quarter of the limit, if that is less."""


class ConnectionLimit:
    """Closes connections that would take the last files of this process, and says so in the log.

    The server needs some for its own work: it parks conversations, loads models and imports
    modules. uvicorn's `limit_concurrency` is a number of connections, whatever else has files open,
    and answers with a text only when a whole request has come.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._next = -float("inf")

    def closes(self, file: int) -> bool:
        """Return True if a connection has to be closed: its `file` is one of those that are kept.

        A system gives the lowest number that is free.
        """
        most = limit()
        if most < 0 or file < most - min(KEPT, most // 4):
            return False
        if self._now() >= self._next:
            self._next = self._now() + EVERY_S
            logger.warning(
                "no more connections can be accepted: all %d files that this process may have open "
                "are in use, or kept for its own work; raise the limit with ulimit -n NUMBER "
                "(LimitNOFILE= in a systemd unit) before the server starts",
                most,
            )
        return True


class HttpConnection(H11Protocol):
    """A connection that is closed if no whole header of a request comes in time.

    It is also closed if its client does not read its answer, sends more of a body that was answered
    already, or sends much ahead of an answer. uvicorn has a limit for silence after an answer only
    (`timeout_keep_alive`), and waits for ever for all of these. Each such connection takes a file
    descriptor, and a place among the requests that may wait.
    """

    patience = MOST_SECONDS
    """Seconds until a header is whole, from the beginning of the connection or its first byte."""
    ahead = 2**16
    """Most bytes that may come before the request in front of them is answered.

    They have to be read: nothing else says that a client has left.
    """
    unread = 60.0
    """Seconds for which a client may read nothing, once no more can be written."""
    shortage = ConnectionLimit()
    """All connections share the files of this process."""
    _limit: asyncio.TimerHandle | None = None
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the seconds until the first header; close a connection that is one too many."""
        super().connection_made(transport)
        if self.shortage.closes(transport.get_extra_info("socket").fileno()):
            transport.abort()
            return
        self._count()

    def data_received(self, data: bytes) -> None:
        """Read what has come, and count the seconds of a header that is not whole."""
        super().data_received(data)
        if self.conn.their_state is h11.DONE:
            if len(self.conn.trailing_data[0]) > self.ahead:
                self.transport.abort()
            self.flow.resume_reading()  # which uvicorn has paused
        self._count()

    def on_response_complete(self) -> None:
        """Continue with the next request, a part of whose header may have come already."""
        super().on_response_complete()
        self._count()

    def pause_writing(self) -> None:
        """Count the seconds from the moment at which no more can be written."""
        super().pause_writing()
        self._timer = self.loop.call_later(self.unread, self.transport.abort)

    def resume_writing(self) -> None:
        """Write again: the client has read."""
        super().resume_writing()
        self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """End what was asked for on this connection."""
        super().connection_lost(exc)
        self._stop_timer()
        self._stop_counting()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _count(self) -> None:
        """Count while a header has to come, or the rest of a body that is answered already.

        Silence between requests has a limit of its own.
        """
        is_owed = self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.DONE
        if self.conn.their_state is h11.IDLE:
            is_owed = self.cycle is None or bool(self.conn.trailing_data[0])
        if not is_owed:
            self._stop_counting()
        elif self._limit is None:
            self._limit = self.loop.call_later(self.patience, self.transport.close)

    def _stop_counting(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
