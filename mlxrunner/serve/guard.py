"""The guard at the door: who may ask, and how much. It looks at each request before any protocol.

A page in a browser can make the browser send requests to this machine, also under a name of its own
that leads here (DNS rebinding). Therefore the Host header has to be a name of this machine, and
pages of other origins get no answer unless the user has named them.
"""

from __future__ import annotations

import base64
import hmac
import ipaddress
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxrunner.serve.bodies import MOST_BYTES, MOST_SECONDS, MOST_TOGETHER, Bodies
from mlxrunner.serve.events import RefusedError
from mlxrunner.serve.shapes import refusal_response

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
OPEN = frozenset({("GET", "/health"), ("HEAD", "/health"), ("HEAD", "/")})
"""Requests that need no key: they tell nothing of anybody's requests."""
PROBED = frozenset({"/", "/v1/messages"})
"""Paths that answer HEAD by themselves."""
ASK_FOR_KEY = {"www-authenticate": 'Basic realm="the key of mlxrunner serve, as the password"'}
"""Header that lets a browser ask its user for the key of the status page."""
METHODS = "GET, HEAD, POST, DELETE, OPTIONS"


@dataclass(frozen=True)
class Rules:
    """The rules of the door."""

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
        self.bodies = Bodies(rules.most_bytes, rules.most_together, rules.most_seconds)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an HTTP request, or pass it on. Nothing but HTTP is known here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        state = scope.setdefault("state", {})
        state["id"] = uuid.uuid4().hex[:24]
        send = _with_headers(send, state, self._allowed(headers))
        refused = await self._let_in(scope, receive, send, headers)
        if refused is not None:
            response = refusal_response(scope["path"], refused, state["id"])
            if scope["path"] == "/" and refused.status == 401:
                response.headers.update(ASK_FOR_KEY)
            await response(scope, receive, send)

    async def _let_in(
        self, scope: Scope, receive: Receive, send: Send, headers: Headers
    ) -> RefusedError | None:
        """Pass a request on, and hold its body until it is answered. Return why not, or None."""
        with self.bodies.place() as place:
            try:
                self._check(scope, headers)
                body = await place.read(headers, receive)
            except RefusedError as refused:
                return refused
            if _is_preflight(scope, headers):
                await Response(status_code=204)(scope, receive, send)
            elif body is not None:
                await self._app(_routed(scope), _again(body, receive), send)
            return None

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
        if (encoding := headers.get("content-encoding", "identity").lower()) != "identity":
            raise RefusedError(
                415,
                f"the body has the Content-Encoding {encoding:.60}, which is not read here: send "
                "it without one, not compressed",
                code="unsupported_encoding",
            )
        is_open = (scope["method"], scope["path"]) in OPEN or _is_preflight(scope, headers)
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
        given = [*_token(headers.get("authorization", "")), *headers.getlist("x-api-key")]
        if not any(hmac.compare_digest(one.encode(), key.encode()) for one in given):
            what = "is not the server's" if any(given) else "is missing"
            raise RefusedError(
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
    if kind.lower() != "basic":
        return []
    try:
        return [base64.b64decode(token.strip(), validate=True).decode().partition(":")[2]]
    except ValueError:  # not base64, or not UTF-8
        return []


def _is_preflight(scope: Scope, headers: Headers) -> bool:
    """Return True if a browser asks whether a page may send a request. That has no key."""
    return scope["method"] == "OPTIONS" and "access-control-request-method" in headers


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
