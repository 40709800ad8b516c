"""The routes of OpenAI's chat completions."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from mlxrunner.serve.answering.answers import Answers
from mlxrunner.serve.apis.delivery import EVENT_STREAM, frames, stream, while_connected
from mlxrunner.serve.apis.fields import headers, replaced_before
from mlxrunner.serve.apis.openai import chat_request, chat_writing
from mlxrunner.serve.apis.openai.chat_request import ChatRequest
from mlxrunner.serve.apis.route import client_of, route_class
from mlxrunner.serve.apis.whole import merged, wholes
from mlxrunner.serve.shapes import openai_response


def router(answers: Answers) -> APIRouter:
    """Return the routes of chat completions."""
    routes = APIRouter(route_class=route_class(openai_response, "chatcmpl-"), tags=["openai"])

    @routes.post("/v1/chat/completions")
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation, as a completion or as a stream of chunks."""
        body.model = body.model or answers.card("").name
        client = client_of(request, body.prompt_cache_key or body.user)
        several = chat_request.read(body, client, request.state.id)
        out = chat_request.left_out(body)
        if body.stream:
            writer = chat_writing.StreamWriter(several, usage=body.has_usage, left_out=out)
            events = merged(answers, several)
            said = replaced_before(several[0], answers)
            return await stream(request, frames(events, writer), EVENT_STREAM, several[0].id, said)
        found = await while_connected(request, wholes(answers, several))
        written = chat_writing.completion_body(several[0], found, out)
        return JSONResponse(written, headers=headers(several[0], found[0].end))

    return routes
