"""Routes whose errors have the shape of their protocol, and what a request says of its client."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec
from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute

from mlxrunner.config.json_options import with_whole_characters
from mlxrunner.serve.apis.delivery import ClientLeftError
from mlxrunner.serve.apis.refusals import refusal_of
from mlxrunner.serve.asked import Client
from mlxrunner.serve.events import RefusedError
from mlxrunner.terminal.text import one_line

WriteError = Callable[[RefusedError, str], Response]
"""A function from a refusal and the id of the request to the response of a protocol."""
SESSIONS = (
    "x-claude-code-session-id",
    "session_id",
    "session-id",
    "x-session-id",
    "x-session-affinity",
)
"""Headers in which clients name the conversation."""
LONGEST_NAME, LONGEST_SESSION = 80, 256
"""Most characters of the names of a client and of its conversation: longer ones are shortened."""
LEFT = 499
"""The status of a request whose client left: nobody reads it but the log."""


class CheckedRequest(Request):
    """A request whose body is JSON that can be written as JSON again."""

    async def json(self) -> Any:
        """Return the body. Raise HTTPException if it is not JSON, as NaN is not.

        Half of a character is U+FFFD: programs cut texts within an emoji, and send what is left
        with each request from then on.
        """
        body = await self.body()
        try:
            try:
                return msgspec.json.decode(body)
            except msgspec.ValidationError:
                raise
            except (msgspec.MsgspecError, UnicodeError):
                text = body.decode(errors="replace")
                whole = await asyncio.to_thread(with_whole_characters, text)
                return msgspec.json.decode(whole)
        except msgspec.ValidationError as error:  # nothing but a number can be one too many
            raise HTTPException(
                400,
                f"the body is not valid JSON: {error}; a number has to be between -1.8e308 and "
                "1.8e308, with at most 4,300 digits",
            ) from error
        except RecursionError as error:
            raise HTTPException(400, "the body is nested too deeply") from error
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise HTTPException(400, f"the body is not valid JSON: {error}") from error


def route_class(write_error: WriteError, prefix: str, *, any_type: bool = False) -> type[APIRoute]:
    """Return the class of the routes of a protocol, for `APIRouter(route_class=...)`.

    `write_error` writes its errors. The ids of its requests begin with `prefix`. With `any_type` a
    body is JSON whatever its Content-Type says, as for a bare `curl -d`.
    """

    class Route(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handler = super().get_route_handler()

            async def answered(request: Request) -> Response:
                scope = _as_json(request.scope) if any_type else request.scope
                request = CheckedRequest(scope, request.receive)
                request.state.id = new_id(prefix)
                try:
                    return await handler(request)
                except ClientLeftError:
                    return Response(status_code=LEFT)
                except Exception as error:  # each has to come in the protocol's own shape
                    return write_error(refusal_of(error), request.state.id)

            return answered

    return Route


def _as_json(scope: Any) -> Any:
    """Return the scope of a request with the Content-Type of JSON."""
    others = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
    return {**scope, "headers": [*others, (b"content-type", b"application/json")]}


def new_id(prefix: str) -> str:
    """Return a new id that begins with `prefix`."""
    return prefix + uuid.uuid4().hex[:24]


def client_of(request: Request, session: object = None) -> Client:
    """Return who asks. `session` is what the body says of the conversation, if no header does.

    What is meant for a user may be long there: Claude Code's is an object with its device, too.
    The names are shown on pages and in terminals, so nothing in them controls one.
    """
    agent = request.headers.get("user-agent", "").split(" ")[0].partition("/")[0]
    named = _session(request.headers)
    if named is None and isinstance(session, str):
        named = session or None
    return Client(
        name=one_line(agent, LONGEST_NAME),
        session=None if named is None else one_line(named, LONGEST_SESSION),
        address=request.client.host if request.client else "",
    )


def _session(headers: Mapping[str, str]) -> str | None:
    return next((headers[name] for name in SESSIONS if headers.get(name)), None)
