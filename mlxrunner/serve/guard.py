"""The guard at the door: who may ask, and how much. It looks at each request before any protocol.

A page in a browser can make the browser send requests to this machine, also under a name of its own
that leads here (DNS rebinding). Therefore the Host header has to be a name of this machine, and
pages of other origins get no answer unless the user has named them.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxrunner.serve.events import RefusedError
from mlxrunner.serve.shapes import refusal_response

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
MOST_BYTES = 64 * 2**20
"""Most bytes of a body: a context of a million tokens is about 4 MB."""
MOST_DEPTH = 128
"""Most brackets of a body within each other."""
MOST_PARTS = 2**20
"""Most values of a body, each name of a field counted as one: they take far more memory than bytes,
and the time in which they are checked is taken from all requests."""
IN_BETWEEN = 2**16
"""Bytes of a body up to which it is looked at between two steps of the event loop."""
MOST_SECONDS = 30.0
"""Most seconds without a new part of a body."""
OPEN = frozenset({"/health", "/"})
"""Paths that need no key: they tell nothing of anybody's requests."""
METHODS = "GET, HEAD, POST, DELETE, OPTIONS"
_PARTS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]|[-+.\w]+', re.DOTALL)
_OPENING, _CLOSING = frozenset(b"[{"), frozenset(b"]}")


@dataclass(frozen=True)
class Rules:
    """The rules of the door."""

    hosts: frozenset[str] = LOOPBACK
    """The names under which this server may be called; empty: any."""
    key: str | None = None
    origins: frozenset[str] = frozenset()
    """The origins whose pages may use the server."""
    most_bytes: int = MOST_BYTES
    most_seconds: float = MOST_SECONDS


def hosts_of(host: str, *, is_open: bool) -> frozenset[str]:
    """Return the names under which a server that listens on `host` may be called.

    One that listens on all addresses has no name of its own: it takes any name if `is_open`, which
    means that a key or the user's word keeps others out.
    """
    if is_open and not is_loopback(host):
        return frozenset()
    return LOOPBACK | {host.lower()}


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Guard:
    """Lets requests through to `app` that keep the rules, with their bodies read."""

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self._app, self._rules = app, rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an HTTP request, or pass it on. Nothing but HTTP is known here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        state = scope.setdefault("state", {})
        state["id"] = uuid.uuid4().hex[:24]
        send = _with_headers(send, state, self._allowed(headers))
        try:
            self._check(scope, headers)
            body = await self._body(headers, receive)
        except RefusedError as refused:
            response = refusal_response(scope["path"], refused, state["id"])
            await response(scope, receive, send)
            return
        if _is_preflight(scope, headers):
            await Response(status_code=204)(scope, receive, send)
        elif body is not None:
            await self._app(scope, _again(body, receive), send)

    def _allowed(self, headers: Headers) -> Mapping[str, str]:
        """Return the headers that let a page of a known origin read the response."""
        origin = headers.get("origin")
        if origin is None or origin not in self._rules.origins:
            return {}
        return {
            "access-control-allow-origin": origin,
            "access-control-allow-methods": METHODS,
            "access-control-allow-headers": headers.get("access-control-request-headers", "*"),
            "access-control-expose-headers": "x-request-id, x-mlxrunner-cache, retry-after",
            "vary": "origin",
        }

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Raise RefusedError unless the sender of a request may ask."""
        self._check_host(headers.getlist("host"))
        origin = headers.get("origin")
        if not (origin is None or self._is_own(origin, headers) or origin in self._rules.origins):
            raise RefusedError(
                403,
                f"pages from {origin:.100} may not use this server: start it with --origin "
                f"{origin:.100} if they should",
                code="origin_not_allowed",
            )
        is_open = scope["path"] in OPEN or _is_preflight(scope, headers)
        if self._rules.key and not is_open:
            self._check_key(self._rules.key, headers)

    def _check_host(self, hosts: list[str]) -> None:
        known = self._rules.hosts
        if known and (len(hosts) != 1 or name_in(hosts[0]) not in known):
            named = hosts[0] if hosts else "nothing"
            raise RefusedError(
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
        kind, _, token = headers.get("authorization", "").partition(" ")
        given = [token.strip()] if kind.lower() == "bearer" else []
        given += headers.getlist("x-api-key")
        if not any(hmac.compare_digest(one.encode(), key.encode()) for one in given):
            what = "is not the server's" if any(given) else "is missing"
            raise RefusedError(
                401,
                f"the API key {what}: send the key that the server was started with, as "
                "'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key",
            )

    async def _body(self, headers: Headers, receive: Receive) -> bytes | None:
        """Return the whole body; None if the client left. Raise RefusedError if it is wrong."""
        most = self._rules.most_bytes
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > most:
            raise _too_large(int(length[:20]), most)
        parts, size, is_last = list[bytes](), 0, False
        while not is_last:
            message = await self._next(receive, size)
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > most:
                raise _too_large(size, most)
            is_last = not message.get("more_body", False)
        body = b"".join(parts)
        if size <= IN_BETWEEN:
            check_form(body)
        else:
            await asyncio.to_thread(check_form, body)
        return body

    async def _next(self, receive: Receive, size: int) -> Message:
        """Return the next part of a body, of which `size` bytes have come."""
        seconds = self._rules.most_seconds
        try:
            async with asyncio.timeout(seconds):
                return await receive()
        except TimeoutError:
            raise RefusedError(
                408,
                f"nothing of the body came for {seconds:g} s after {size} bytes: send it whole",
                code="timeout",
            ) from None


def _is_preflight(scope: Scope, headers: Headers) -> bool:
    """Return True if a browser asks whether a page may send a request. That has no key."""
    return scope["method"] == "OPTIONS" and "access-control-request-method" in headers


def name_in(host: str) -> str:
    """Return the name in a Host header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def check_form(body: bytes) -> None:
    """Raise RefusedError for a JSON text that is too deep, or has too many parts."""
    if depth_of(body) > MOST_DEPTH:
        raise RefusedError(
            400,
            f"the body has more than {MOST_DEPTH} brackets within each other: make it flatter",
            code="too_deep",
        )


def depth_of(body: bytes) -> int:
    """Return how many brackets of a JSON text lie within each other, at most.

    Raise RefusedError if it has too many parts.
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
            raise RefusedError(413, said, code="too_large")
        if sign in _OPENING:
            depth += 1
            most = max(most, depth)
    return most


def _too_large(size: int, most: int) -> RefusedError:
    return RefusedError(
        413, f"the body has {size} bytes, and {most} are the most: send less", code="too_large"
    )


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


def _with_headers(send: Send, state: Mapping[str, str], more: Mapping[str, str]) -> Send:
    """Return a function that adds the id of the request, and `more`, to a response."""

    async def send_more(message: Message) -> None:
        if message["type"] == "http.response.start":
            found = list(message.get("headers", ()))
            names = {name.lower() for name, _ in found}
            if b"x-request-id" not in names:
                found.append((b"x-request-id", state["id"].encode()))
            found += _encoded(more.items())
            message = {**message, "headers": found}
        await send(message)

    return send_more


def _encoded(headers: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
