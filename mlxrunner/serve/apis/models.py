"""The list of models at `/v1/models`, which OpenAI's and Anthropic's clients ask for alike."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from mlxrunner.serve.answering.answers import Answers, ModelCard
from mlxrunner.serve.apis.route import route_class
from mlxrunner.serve.events import RefusedError
from mlxrunner.serve.shapes import anthropic_response, openai_response


def is_anthropic(request: Request) -> bool:
    """Return True if the client speaks Anthropic's API: it names the version of that."""
    return "anthropic-version" in request.headers


def router(answers: Answers) -> APIRouter:
    """Return the routes."""
    routes = APIRouter(route_class=route_class(openai_response, "req_"), tags=["models"])

    @routes.get("/v1/models")
    async def list_models(request: Request) -> Response:
        """List the models that a request may name."""
        cards = answers.models()
        if is_anthropic(request):
            ends = {name: cards[at].name if cards else None for name, at in _ENDS.items()}
            data = [_anthropic(card) for card in cards]
            return JSONResponse({"data": data, "has_more": False, **ends})
        return JSONResponse({"object": "list", "data": [_openai(card) for card in cards]})

    @routes.get("/v1/models/{name:path}")
    async def retrieve_model(name: str, request: Request) -> Response:
        """Describe a model."""
        try:
            card = answers.card(name)
        except RefusedError as refused:
            write = anthropic_response if is_anthropic(request) else openai_response
            return write(refused, request.state.id)
        return JSONResponse(_anthropic(card) if is_anthropic(request) else _openai(card))

    return routes


_ENDS = {"first_id": 0, "last_id": -1}


def _openai(card: ModelCard) -> dict[str, Any]:
    described = {"id": card.name, "object": "model", "created": int(card.modified)}
    described |= {"owned_by": "mlxrunner", "context_length": card.context or None}
    return {**described, "input_modalities": ["text", "image"] if card.sees else ["text"]}


def _anthropic(card: ModelCard) -> dict[str, Any]:
    created = datetime.fromtimestamp(card.modified, UTC).isoformat()
    named = {"id": card.name, "type": "model", "display_name": card.name, "created_at": created}
    return {**named, "max_input_tokens": card.context or None}
