"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from mlxrunner.serve.answering.answers import Answers
from mlxrunner.serve.apis.anthropic.request import (
    CountRequest,
    MessageRequest,
    left_out,
    marks_cache,
    read,
)
from mlxrunner.serve.apis.anthropic.writing import StreamWriter, message_body
from mlxrunner.serve.apis.delivery import EVENT_STREAM, frames, stream, while_connected
from mlxrunner.serve.apis.fields import headers, replaced_before
from mlxrunner.serve.apis.route import client_of, route_class
from mlxrunner.serve.apis.whole import merged, whole
from mlxrunner.serve.events import RefusedError
from mlxrunner.serve.shapes import anthropic_response


def router(answers: Answers) -> APIRouter:
    """Return the routes."""
    routes = APIRouter(route_class=route_class(anthropic_response, "msg_"), tags=["anthropic"])

    @routes.post("/v1/messages")
    async def create_message(body: MessageRequest, request: Request) -> Response:
        """Answer a conversation, as a message or as a stream of events."""
        body.model = body.model or answers.card("").name
        user = body.metadata and body.metadata.user_id
        asked = read(body, client_of(request, user), request.state.id)
        marked, out = marks_cache(body), left_out(body)
        if body.stream:
            writer = StreamWriter(asked, is_marked=marked, left_out=out)
            events = merged(answers, [asked])
            said = replaced_before(asked, answers)
            return await stream(request, frames(events, writer), EVENT_STREAM, asked.id, said)
        answer = await while_connected(request, whole(answers, asked))
        written = message_body(asked, answer, is_marked=marked, left_out=out)
        return JSONResponse(written, headers=headers(asked, answer.end))

    @routes.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountRequest, request: Request) -> Response:
        """Count the tokens of a prompt."""
        asked = read(body, client_of(request), request.state.id)
        count = await while_connected(request, answers.count(asked))
        return JSONResponse({"input_tokens": count})

    @routes.head("/v1/messages", include_in_schema=False)
    async def probe() -> Response:
        """Say that the server is there."""
        return Response()

    @routes.get("/v1/messages", include_in_schema=False)
    async def refuse_get() -> Response:
        """Say how the address is used."""
        raise RefusedError(405, "use POST: this address answers conversations")

    return routes
