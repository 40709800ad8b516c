"""Limits of connections and requests: names, origins, keys, sizes, depths, slowness, files."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from support.program import program
from support.scripted import serving

from mlxrunner.errors import ContextLengthError
from mlxrunner.server import server as middleware
from mlxrunner.server.anthropic import MessageRequest
from mlxrunner.server.events import ApiError, ServerRequest
from mlxrunner.server.manager import MOST_MESSAGES, MOST_STOPS, MOST_TOOLS, check_counts
from mlxrunner.server.ollama import OllamaChatRequest
from mlxrunner.server.openai import ChatCompletionRequest, CompletionRequest
from mlxrunner.server.protocol import RequestBody
from mlxrunner.server.responses import ResponseRequest
from mlxrunner.server.server import (
    EVERY_S,
    KEPT,
    LOOPBACK,
    MOST_DEPTH,
    VALUE,
    AccessMiddleware,
    AccessRules,
    ConnectionLimit,
    HttpConnection,
    check_form,
    form_of,
    hosts_of,
    make_app,
)


def router(seen: list[Any]) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/messages")
    @routes.post("/v1/chat/completions")
    @routes.post("/api/chat")
    async def take(request: Request) -> dict[str, Any]:
        seen.append(await request.json())
        return {"id": request.state.id}

    @routes.get("/health")
    @routes.get("/")
    @routes.head("/")
    async def health() -> dict[str, Any]:
        return {}

    @routes.get("/v1/fails/{how}")
    async def fail(how: str) -> None:
        if how == "slowly":
            await asyncio.sleep(0.5)
            return
        if how == "refused":
            raise ApiError(429, "later", code="rate", retry_after=7)
        if how == "long":
            raise ContextLengthError(10, 5)
        raise RuntimeError("a secret of the inside")

    return routes


def served(rules: AccessRules, **more: Any) -> AbstractContextManager[str]:
    """Serve the routes above after a guard, on a free port."""
    return serving(make_app([router([])], rules), **more)


def connected(address: str) -> socket.socket:
    """Return a connection to a server on this machine."""
    return socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=60)


def head(path: str = "/api/chat", **more: str) -> bytes:
    """Return the head of a request without the empty line at its end."""
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in more.items()]
    return "\r\n".join([f"POST {path} HTTP/1.1", "host: localhost", *lines]).encode()


def asgi(guard: AccessMiddleware, **more: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(guard, **more)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server without a key that reads bodies of at most 1,000 bytes."""
    rules = AccessRules(most_bytes=1000, origins=frozenset({"http://app.example"}))
    with served(rules) as address:
        yield address


@pytest.fixture(scope="module")
def locked() -> Iterator[str]:
    """A server with a key."""
    with served(AccessRules(key="secret")) as address:
        yield address


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((host, 200) for host in ("localhost:80", "LOCALHOST", "[::1]:8080", "127.0.0.1")),
        *((f"{host}evil.example", 403) for host in ("", "localhost.", "127.0.0.1.")),
        ("", 403),
    ],
)
@pytest.mark.exhaustive(8)
def test_the_host_is_a_name_of_this_machine(url: str, host: str, status: int) -> None:
    """A page whose name leads here by DNS gets nothing."""
    answer = httpx.get(f"{url}/health", headers={"host": host})
    assert answer.status_code == status
    if status == 403:
        assert "Host header" in answer.json()["error"]["message"]


def test_head_and_a_slash_at_the_end(url: str) -> None:
    """Each GET route answers HEAD without a body, and each route takes a slash at its end."""
    for path in ("/health", "/health/", "/v1/fails/never", "/v1/fails/never/"):
        asked, probed = httpx.get(f"{url}{path}"), httpx.head(f"{url}{path}")
        assert asked.status_code == probed.status_code == (500 if "fails" in path else 200)
        assert (asked.content != b"", probed.content) == (True, b"")


def test_the_names_of_a_server() -> None:
    """Only one that others may reach takes any name: a key keeps them out."""
    assert hosts_of("127.0.0.1", is_open=False) == hosts_of("localhost", is_open=True) == LOOPBACK
    assert hosts_of("mac.local", is_open=False) == LOOPBACK | {"mac.local"}
    assert hosts_of("0.0.0.0", is_open=True) == frozenset()


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://evil.example", 403),
        ("null", 403),
        ("http://app.example.evil.example", 403),
        ("http://app.example", 200),
        ("http://localhost:8080", 403),
        ("http://localhost:9", 200),
        ("file://localhost:9", 403),
    ],
)
@pytest.mark.exhaustive(7)
def test_pages_of_other_origins(url: str, origin: str, status: int) -> None:
    """Only a page of this server, or of an origin that the user named, is answered."""
    headers = {"origin": origin, "host": "localhost:9"}
    answer = httpx.post(f"{url}/api/chat", json={}, headers=headers)
    assert answer.status_code == status
    allowed = answer.headers.get("access-control-allow-origin")
    assert allowed == (origin if origin == "http://app.example" else None)


def test_a_browser_that_asks_first() -> None:
    """It sends no key with this question, and takes no answer but one of success."""
    rules = AccessRules(key="secret", origins=frozenset({"http://app.example"}))
    headers = {
        "origin": "http://app.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    with served(rules) as url:
        answer = httpx.options(f"{url}/v1/messages", headers=headers)
        other = {**headers, "origin": "http://evil.example"}
        assert httpx.options(f"{url}/v1/messages", headers=other).status_code == 403
        assert httpx.options(f"{url}/v1/messages").status_code == 401
    assert (answer.status_code, answer.content) == (200, b"OK")
    assert answer.headers["access-control-allow-origin"] == "http://app.example"
    assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "POST" in answer.headers["access-control-allow-methods"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer secret"}, 200),
        ({"authorization": "bearer secret"}, 200),
        ({"x-api-key": "secret"}, 200),
        ({"authorization": "Bearer other", "x-api-key": "secret"}, 200),
        ({"authorization": "Basic secret"}, 401),
        ({"authorization": "Bearer secre"}, 401),
        ({"x-api-key": ""}, 401),
    ],
    ids=["none", "bearer", "lower", "x-api-key", "either", "basic", "wrong", "empty"],
)
@pytest.mark.exhaustive(8)
def test_the_key(locked: str, headers: dict[str, str], status: int) -> None:
    """It comes as a bearer token or as x-api-key; nothing else opens."""
    answer = httpx.post(f"{locked}/v1/messages", json={}, headers=headers)
    assert answer.status_code == status
    if status == 401:
        assert answer.json()["error"]["type"] == "authentication_error"
        assert "secret" not in answer.text
    assert httpx.get(f"{locked}/health").status_code == 200


def test_the_status_page_needs_the_key(locked: str) -> None:
    """A browser asks its user for it. HEAD tells Ollama's clients only that a server is there."""
    assert httpx.head(f"{locked}/").status_code == 200
    for key, status in ((None, 401), ("secret", 200), ("wrong", 401), ("", 401)):
        answer = httpx.get(f"{locked}/", auth=None if key is None else ("me", key))
        assert answer.status_code == status
        assert answer.headers.get("www-authenticate", "").startswith("Basic") == (status == 401)


def test_a_broken_password_is_no_key(locked: str) -> None:
    """Damaged, cut off, no UTF-8, no colon: each is refused. Other paths ask no browser."""
    for token in ("bWU6c2VjcmV0x", "bWU6c2Vj", "/////w==", "c2VjcmV0", "="):
        answer = httpx.get(f"{locked}/slots", headers={"authorization": f"Basic {token}"})
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")


SHAPES = {
    "/v1/messages": lambda body: (body["type"], body["error"]["message"]),
    "/v1/chat/completions": lambda body: ("error", body["error"]["message"]),
    "/api/chat": lambda body: ("error", body["error"]),
}


@pytest.mark.parametrize("path", SHAPES)
@pytest.mark.exhaustive(3)
def test_a_body_that_is_too_large(url: str, path: str) -> None:
    """It is refused by its length or while it is read, in the shape of each protocol."""
    for content in (b"x" * 2000, iter([b"x" * 600, b"y" * 600])):
        answer = httpx.post(f"{url}{path}", content=content)
        assert answer.status_code == 413
        kind, message = SHAPES[path](answer.json())
        assert kind == "error"
        assert "1000 are the most" in message
        assert answer.headers["x-request-id"]


def test_a_body_that_is_too_deep(url: str) -> None:
    """Brackets within texts do not count."""
    deep = b"[" * (MOST_DEPTH + 1) + b"]" * (MOST_DEPTH + 1)
    answer = httpx.post(f"{url}/api/chat", content=deep)
    assert (answer.status_code, "128 brackets" in answer.json()["error"]) == (400, True)
    assert httpx.post(f"{url}/api/chat", json={"text": "[" * 500}).status_code == 200


@pytest.mark.parametrize(
    ("body", "depth"),
    [
        (b"", 0),
        (b'{"a": [1, [2]], "b": {}}', 3),
        (b'{"a": "[[[[", "b\\"[": 1}', 1),
        (b'"[[[', 0),
        (b'["\\\\", [[]]]', 3),
        (b"]]][[", 0),
    ],
)
@pytest.mark.exhaustive(6)
def test_the_depth_of_a_body(body: bytes, depth: int) -> None:
    """It is found without parsing, also of what is no JSON."""
    assert form_of(body)[0] == depth


@pytest.mark.parametrize(
    ("part", "count"),
    [
        *((b"1,", 1), (b"-1.5e3,", 1), (b"null,", 1), (b'"",', 1), (b"{},", 1), (b"[],", 1)),
        (b'{"a":1},', 3),
    ],
)
@pytest.mark.exhaustive(3)
def test_the_values_of_a_body(part: bytes, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are counted before they are parsed: each would take 50 times its bytes.

    Numbers count as texts do: a list of a million tokens takes all requests' time to check.
    """
    monkeypatch.setattr(middleware, "MOST_PARTS", 30)
    most = 29 // count  # the list itself is a value
    assert check_form(b"[" + part * most + b"]") == 1 + most * count
    with pytest.raises(ApiError, match="more than 30 values") as refused:
        check_form(b"[" + part * (most + 1) + b"]")
    assert refused.value.status == 413


BODY = b"[1" + b" " * 400 + b"]"
HELD = len(BODY) + 2 * VALUE
"""Bytes that this body is counted as: the list and the number are values."""


class Slow:
    """An application that answers when it is told to."""

    def __init__(self) -> None:
        self.goes_on = asyncio.Event()
        self.seen = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.seen += 1
        await self.goes_on.wait()
        if scope["path"] == "/v1/fails":
            raise RuntimeError("in the application")
        await PlainTextResponse("")(scope, receive, send)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/fails"])
async def test_bodies_share_a_limit(path: str) -> None:
    """One for which there is no room is refused. It is let in as soon as others are answered."""
    app, answers = Slow(), list[httpx.Response]()
    guard = AccessMiddleware(app, AccessRules(most_together=2 * HELD))
    async with asgi(guard, raise_app_exceptions=False) as client:

        async def ask(content: Any) -> httpx.Response:
            return await client.post(path, content=content)

        running = [asyncio.ensure_future(ask(BODY)) for _ in range(2)]
        while app.seen < 2:
            await asyncio.sleep(0)
        assert guard.bodies.held == 2 * HELD

        async def parts() -> AsyncIterator[bytes]:
            yield BODY

        answers += [await ask(BODY), await ask(parts()), await ask(b"[")]
        assert guard.bodies.held == 2 * HELD
        app.goes_on.set()
        await asyncio.gather(*running)
        assert guard.bodies.held == 0
        (*refused, last) = [*answers, await ask(BODY)]
    for answer in refused:
        assert (answer.status_code, answer.headers["retry-after"]) == (503, str(middleware.SOON))
        assert f"{2 * HELD} are the most" in answer.json()["error"]["message"]
    assert last.status_code == (200 if path == "/v1/messages" else 500)


async def test_a_second_host_is_no_way_in() -> None:
    """Starlette's middleware, which reads the first header alone, would let this page through."""
    async with asgi(AccessMiddleware(Slow(), AccessRules())) as client:
        hosts = [("host", "localhost"), ("host", "evil.example")]
        assert (await client.get("/", headers=hosts)).status_code == 403


async def test_a_part_of_a_body_is_held_until_its_client_leaves() -> None:
    """Half a body counts while it is waited for, and not when its client has left."""

    guard = AccessMiddleware(Slow(), AccessRules(most_together=100))
    parts = [b"x" * 60, b"y" * 60]

    async def receive() -> dict[str, Any]:
        if not parts:
            return {"type": "http.disconnect"}
        assert guard.bodies.held == (0 if len(parts) == 2 else 60)
        return {"type": "http.request", "body": parts.pop(), "more_body": True}

    sent: list[Any] = []

    async def send(message: Any) -> None:
        assert guard.bodies.held == 0
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/api/chat", "headers": []}
    scope["headers"] = [(b"host", b"localhost")]
    await guard(scope, receive, send)
    assert sent[0]["status"] == 503
    sent.clear()
    await guard(scope, receive, send)
    assert (sent, guard.bodies.held) == ([], 0)


@pytest.mark.exhaustive(0)
def test_a_body_that_does_not_come() -> None:
    """A client that stalls is told so, and keeps nothing busy."""
    with served(AccessRules(most_seconds=0.2)) as url, connected(url) as slow:
        slow.sendall(head(content_length="100") + b'\r\n\r\n{"a')
        found = b"".join(iter(lambda: slow.recv(4000), b"")).decode()
    assert found.startswith("HTTP/1.1 408")
    assert "after 3 bytes" in found


async def test_a_body_that_trickles() -> None:
    """A client that sends a byte now and then is told so too."""

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(1000):
            yield b" "
            await asyncio.sleep(0.01)

    guard = AccessMiddleware(Slow(), AccessRules(most_seconds=0.1))
    async with asgi(guard) as client:
        answer = await client.post("/v1/messages", content=parts())
    assert (answer.status_code, guard.bodies.held) == (408, 0)
    assert "too slowly" in answer.json()["error"]["message"]


def received(used: socket.socket, end: bytes) -> bytes:
    """Read an answer up to its end."""
    found = b""
    while not found.endswith(end):
        found += used.recv(4000)
    return found


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HttpConnection, "patience", 0.2)


@pytest.mark.usefixtures("impatient")
def test_a_body_that_goes_on_after_its_answer() -> None:
    """The connection is closed, however much comes."""
    with (
        served(AccessRules(most_bytes=10), http=HttpConnection, timeout_keep_alive=600) as address,
        connected(address) as used,
    ):
        used.sendall(head(content_length="99") + b"\r\n\r\n")
        assert received(used, b"}").startswith(b"HTTP/1.1 413")
        used.sendall(b"x")
        assert used.recv(100) == b""


@pytest.mark.parametrize("is_much", [False, True])
def test_what_comes_ahead_of_an_answer(is_much: bool) -> None:
    """It does not hide that the client has left. If it is much, the connection is closed."""
    reading, has_left = threading.Event(), threading.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        reading.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        has_left.set()

    with serving(app, http=HttpConnection) as address, connected(address) as used:
        used.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert reading.wait(60)
        with suppress(ConnectionError):
            for _ in range(10):
                used.sendall(b"x" * (HttpConnection.ahead // (2 if is_much else 20)))
            if is_much:
                assert used.recv(100) == b""
        if not is_much:
            assert not has_left.is_set()
            used.close()
        assert has_left.wait(60)


@pytest.mark.parametrize("sent", [b"", head()[:-6]])
@pytest.mark.usefixtures("impatient")
def test_a_header_that_does_not_come(sent: bytes) -> None:
    """The connection is closed, so that silent ones do not take all file descriptors."""
    with served(AccessRules(), http=HttpConnection) as address, connected(address) as silent:
        silent.sendall(sent)
        assert silent.recv(100) == b""


@pytest.mark.parametrize("is_at_once", [False, True])
@pytest.mark.usefixtures("impatient")
def test_a_second_header_that_does_not_come(is_at_once: bool) -> None:
    """Half a header has the same time on a connection that was used; an answer has any time."""
    first = b"GET /v1/fails/slowly HTTP/1.1\r\nhost: localhost\r\n\r\n"
    half = head()[:-6]
    with served(AccessRules(), http=HttpConnection) as address, connected(address) as used:
        used.sendall(first + half if is_at_once else first)
        assert received(used, b"null").startswith(b"HTTP/1.1 200")
        if not is_at_once:
            used.sendall(half)
        assert used.recv(100) == b""


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/v1/fails/refused", 429, "later"),
        ("/v1/fails/long", 400, "10 tokens"),
        ("/v1/fails/inside", 500, "internal error (RuntimeError); the server's log says more"),
        ("/nothing", 404, "/openapi.json lists"),
    ],
)
@pytest.mark.exhaustive(4)
def test_errors_of_routes(url: str, path: str, status: int, words: str) -> None:
    """They are one sentence; what went wrong inside is in the log, never in a response."""
    answer = httpx.get(f"{url}{path}")
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]
    assert "Traceback" not in answer.text
    assert "secret" not in answer.text
    assert answer.headers.get("retry-after") == ("7" if status == 429 else None)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/chat/completions", "did you mean /v1/chat/completions? The base URL of an OpenAI"),
        ("/v1/v1/messages", "did you mean /v1/messages? The base URL"),
        ("/v1/api/chat", "did you mean /api/chat? The base URL"),
        ("/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("/v1/embeddings", "embeddings are not supported"),
        ("/api/embed", "embeddings are not supported"),
        ("/v1/audio/speech", "answers are text"),
        ("/v1/messages/batches", "`mlxrunner batch` answers files of prompts"),
        ("/api/delete", "`mlxrunner models rm` removes a model"),
    ],
)
def test_a_path_of_another_server_is_answered_with_ours(url: str, path: str, said: str) -> None:
    """Most often the base URL of a client ends with /v1 where it must not, or the other way."""
    answer = httpx.post(f"{url}{path}", json={})
    assert answer.status_code == 404
    assert f"there is nothing at {path}: {said}" in answer.text


def test_a_request_has_an_id(url: str) -> None:
    """The route and the response name the same one."""
    first, second = (httpx.post(f"{url}/api/chat", json={}) for _ in range(2))
    assert first.headers["x-request-id"] == first.json()["id"] != second.json()["id"]


def test_the_openapi_document(url: str) -> None:
    """It is there; there is no page that would load a script from the network."""
    assert "/v1/messages" in httpx.get(f"{url}/openapi.json").json()["paths"]
    assert httpx.get(f"{url}/docs").status_code == 404


WRONG = [3.5] * 500
"""Items that no list takes."""


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (MessageRequest, {"max_tokens": 1, "messages": WRONG}),
        (ChatCompletionRequest, {"messages": WRONG}),
        (CompletionRequest, {"prompt": WRONG}),
        (CompletionRequest, {"prompt": [WRONG]}),
        (ResponseRequest, {"input": WRONG}),
        (OllamaChatRequest, {"messages": WRONG}),
    ],
)
@pytest.mark.exhaustive(6)
def test_a_list_of_wrong_items(kind: type[RequestBody], body: dict[str, Any]) -> None:
    """The first wrong item of a list ends its check: an error for each would fill the memory."""
    with pytest.raises(ValidationError) as found:
        kind.model_validate(body)
    assert found.value.error_count() < 10


@pytest.mark.parametrize("name", ["stop", "messages", "tools"])
@pytest.mark.exhaustive(3)
def test_more_than_any_conversation_has(name: str) -> None:
    """The number and the most are named. A million stop strings would hold up all others."""
    most = {"stop": MOST_STOPS, "messages": MOST_MESSAGES, "tools": MOST_TOOLS}[name]

    def ask(count: int) -> ServerRequest:
        given: list[Any] = ["x"] * count
        fields = {"options": {"stop": given}} if name == "stop" else {name: given}
        return ServerRequest(protocol="chat", model="", **fields)

    check_counts(ask(most))
    with pytest.raises(ApiError, match=f"{name}: there are {most + 1}, and {most} are the most"):
        check_counts(ask(most + 1))


CODE = """\
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 6000))
from mlxrunner.cli import main
from mlxrunner.server.server import HttpConnection
connect = HttpConnection.connection_made
def made(self, transport):
    resource.setrlimit(resource.RLIMIT_NOFILE, (60, 6000))
    connect(self, transport)
HttpConnection.connection_made = made
main()
"""
"""A server whose limit falls to 60 files with the first connection."""


@pytest.mark.exhaustive(0)
def test_more_connections_than_files() -> None:
    """One line names the limit and the remedy. Connections that are open, and later ones, are
    answered, though the first answer imports modules, and reading the page starts a thread.
    """
    question = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    with (
        program("demo", "--no-disk-cache", code=CODE) as server,
        httpx.Client(base_url=server.url, timeout=300) as client,
    ):
        assert client.get("/health").status_code == 200
        with ExitStack() as connections:
            for _ in range(80):
                connections.enter_context(connected(server.url))
            said = server.process.stderr.readline().decode()
            answers = [client.get("/"), client.post("/v1/chat/completions", json=question)]
        assert "all 60 files that this process may have open are in use" in said
        assert "ulimit -n" in said
        answers.append(httpx.get(f"{server.url}/health"))
        assert [answer.status_code for answer in answers] == [200] * 3
        server.process.terminate()
        _, rest = server.process.communicate(timeout=300)
        assert "files" not in rest.decode()


def test_one_line_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line comes where no file is left for a connection, and at most once a minute.

    A system may have no limit.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    now = 0.0
    shortage = ConnectionLimit(lambda: now)
    with caplog.at_level(logging.WARNING, "mlxrunner"):
        assert not shortage.closes(most - KEPT - 1)
        assert caplog.messages == []
        assert shortage.closes(most - KEPT)
        assert shortage.closes(most - 1)
        assert len(caplog.messages) == 1
        now = EVERY_S
        assert shortage.closes(most - 1)
        assert len(caplog.messages) == 2
    assert f"all {most} files" in caplog.messages[0]
    monkeypatch.setattr("mlxrunner.server.server.limit", lambda: -1)
    assert not ConnectionLimit().closes(100_000)
