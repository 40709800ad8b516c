"""Read the bodies of requests: their size, their form, their pace, and what all take together."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.datastructures import Headers
from starlette.types import Message, Receive

from mlxrunner.serve.events import RefusedError

MOST_BYTES = 64 * 2**20
"""Most bytes of a body: a context of a million tokens is about 4 MB."""
MOST_TOGETHER = 256 * 2**20
"""Most bytes of the bodies of all requests that are read or answered, with VALUE for each value."""
VALUE = 128
"""Bytes that a value of a body takes in memory, beside its text."""
MOST_DEPTH = 128
"""Most brackets of a body within each other."""
MOST_PARTS = 2**20
"""Most values of a body, each name of a field counted as one: they take far more memory than bytes,
and the time in which they are checked is taken from all requests."""
IN_BETWEEN = 2**16
"""Bytes of a body up to which it is looked at between two steps of the event loop."""
MOST_SECONDS = 30.0
"""Most seconds without a new part of a body."""
SLOWEST = 8192
"""Bytes of a body that have to come in a second, once MOST_SECONDS are over."""
SOON = 5
"""Seconds after which a client may ask again if there is no room for its body."""
_PARTS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]|[-+.\w]+', re.DOTALL)
_OPENING, _CLOSING = frozenset(b"[{"), frozenset(b"]}")


class Bodies:
    """The bodies of all requests that are read or answered."""

    def __init__(self, most: int, together: int, seconds: float) -> None:
        """Begin without bodies. `most`: bytes of a body; `together`: those of all.

        `seconds`: the most without a new part of a body.
        """
        self._most, self._together, self._seconds = most, together, seconds
        self.held = 0
        """Bytes of the bodies that are held, with `VALUE` for each value."""

    @contextmanager
    def place(self) -> Iterator[BodyPlace]:
        """Enter a place for the body of a request, which is held until the place is left."""
        place = BodyPlace(self)
        try:
            yield place
        finally:
            self.held -= place.held

    def take(self, nbytes: int) -> None:
        """Hold `nbytes` more. Raise RefusedError if there is no room for them."""
        self.check(nbytes)
        self.held += nbytes

    def check(self, nbytes: int) -> None:
        """Raise RefusedError if there is no room for `nbytes` more."""
        if self.held + nbytes > self._together:
            raise RefusedError(
                503,
                f"requests at work take {self.held} bytes, this one {nbytes} more, and "
                f"{self._together} are the most: ask again later",
                code="overloaded",
                retry_after=SOON,
            )

    async def read(self, place: BodyPlace, headers: Headers, receive: Receive) -> bytes | None:
        """Return the whole body; None if the client left. Raise RefusedError if it is wrong."""
        length = headers.get("content-length", "0")
        if length.isdecimal():
            self._check_size(int(length[:20]))
            self.check(int(length[:20]))
        parts, size, is_last, began = list[bytes](), 0, False, time.monotonic()
        while not is_last:
            message = await self._next(receive, size, time.monotonic() - began)
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            self._check_size(size)
            place.take(len(parts[-1]))
            is_last = not message.get("more_body", False)
        body = b"".join(parts)
        if size <= IN_BETWEEN:
            count = check_form(body)
        else:
            count = await asyncio.to_thread(check_form, body)
        place.take(VALUE * count)
        return body

    def _check_size(self, size: int) -> None:
        if size > self._most:
            message = f"the body has {size} bytes, and {self._most} are the most: send less"
            raise RefusedError(413, message, code="too_large")

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
        raise RefusedError(408, f"{said}: send it whole", code="timeout")


class BodyPlace:
    """The place of one request among all bodies."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self.held = 0

    def take(self, nbytes: int) -> None:
        """Hold `nbytes` more. Raise RefusedError if there is no room for them."""
        self._bodies.take(nbytes)
        self.held += nbytes

    async def read(self, headers: Headers, receive: Receive) -> bytes | None:
        """Return the whole body; None if the client left. Raise RefusedError if it is wrong."""
        return await self._bodies.read(self, headers, receive)


def check_form(body: bytes) -> int:
    """Return the number of values of a JSON text.

    Raise RefusedError if it is too deep, or has too many.
    """
    depth, parts = form_of(body)
    if depth > MOST_DEPTH:
        raise RefusedError(
            400,
            f"the body has more than {MOST_DEPTH} brackets within each other: make it flatter",
            code="too_deep",
        )
    return parts


def form_of(body: bytes) -> tuple[int, int]:
    """Return how many brackets of a JSON text lie within each other, at most, and its values.

    Raise RefusedError if it has too many values.
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
    return most, parts
