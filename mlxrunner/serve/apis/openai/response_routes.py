"""The routes of OpenAI's Responses API."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from mlxrunner.serve.answering.answers import Answers
from mlxrunner.serve.apis.delivery import EVENT_STREAM, frames, stream, while_connected
from mlxrunner.serve.apis.fields import headers, replaced_before
from mlxrunner.serve.apis.openai.kept import KeptResponse, KeptResponses
from mlxrunner.serve.apis.openai.response_request import Conversation, ResponseRequest, read
from mlxrunner.serve.apis.openai.response_writing import StreamWriter
from mlxrunner.serve.apis.route import client_of, route_class
from mlxrunner.serve.apis.whole import events_of, merged
from mlxrunner.serve.asked import Asked
from mlxrunner.serve.events import Ended, RefusedError
from mlxrunner.serve.shapes import openai_response


def router(answers: Answers) -> APIRouter:
    """Return the routes. They share the responses that are kept."""
    kept = KeptResponses()
    routes = APIRouter(route_class=route_class(openai_response, "resp_"), tags=["openai"])

    def asked_for(body: ResponseRequest, request: Request) -> Conversation:
        client = client_of(request, body.prompt_cache_key or body.user)
        return read(body, client, request.state.id, kept)

    @routes.post("/v1/responses")
    async def create_response(body: ResponseRequest, request: Request) -> Response:
        """Answer a conversation, as a response or as a stream of events."""
        body.model = body.model or answers.card("").name
        conversation = asked_for(body, request)
        asked, ends = conversation.asked, list[dict[str, Any]]()

        def keep(response: dict[str, Any]) -> None:
            ends.append(response)
            if body.is_kept:
                kept.add(response, conversation.items, conversation.before)

        writer = StreamWriter(body, conversation, keep)
        if body.stream:
            events = merged(answers, [asked])
            said = replaced_before(asked, answers)
            return await stream(request, frames(events, writer), EVENT_STREAM, asked.id, said)
        ended = await while_connected(request, _whole(answers, asked, writer))
        return JSONResponse(ends[0], headers=headers(asked, ended))

    @routes.post("/v1/responses/input_tokens")
    async def count_input_tokens(body: ResponseRequest, request: Request) -> Response:
        """Count the tokens of a prompt."""
        count = await while_connected(request, answers.count(asked_for(body, request).asked))
        return JSONResponse({"object": "response.input_tokens", "input_tokens": count})

    find = partial(_found, kept)

    @routes.get("/v1/responses/{name}")
    async def retrieve_response(name: str) -> Response:
        """Return a response that is kept."""
        return JSONResponse(find(name).body)

    @routes.get("/v1/responses/{name}/input_items")
    async def list_input_items(name: str) -> Response:
        """List the items of the request for a response that is kept, the latest first."""
        items = find(name).items
        named = [{"id": f"{name}_in_{number}", **item} for number, item in enumerate(items)][::-1]
        ends = {"first_id": named[0]["id"], "last_id": named[-1]["id"]} if named else {}
        return JSONResponse({"object": "list", "data": named, "has_more": False, **ends})

    @routes.delete("/v1/responses/{name}")
    async def delete_response(name: str) -> Response:
        """Forget a response."""
        find(name)
        kept.remove(name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    return routes


def _found(kept: KeptResponses, name: str) -> KeptResponse:
    found = kept.find(name)
    if found is None:
        raise RefusedError(404, f"the response {name!r:.80} is not kept", code="not_found")
    return found


async def _whole(answers: Answers, asked: Asked, writer: StreamWriter) -> Ended:
    """Write the whole answer, and return its end. The frames are of no use."""
    ended: Ended | None = None
    async with aclosing(events_of(answers, replace(asked, is_whole=True))) as events:
        async for event in events:
            for _ in writer.write(0, event):
                pass
            if isinstance(event, Ended):
                ended = event
    if ended is None:
        raise RuntimeError("the answer has no end")
    return ended
