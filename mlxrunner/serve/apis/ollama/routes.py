"""The routes of Ollama's API."""

from __future__ import annotations

from contextlib import aclosing, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import Field

from mlxrunner.models.resolve import HUB_ID, folder_if_here
from mlxrunner.models.resolve import pull as pull_model
from mlxrunner.serve.answering.answers import Answers
from mlxrunner.serve.apis.delivery import frames, stream, while_connected
from mlxrunner.serve.apis.fields import Body, headers, replaced_before
from mlxrunner.serve.apis.ollama.catalog import described, listed, running
from mlxrunner.serve.apis.ollama.pulling import Pull, lines, present, progress
from mlxrunner.serve.apis.ollama.request import (
    ChatRequest,
    GenerateRequest,
    is_empty,
    left_out,
    read,
    seconds_of,
)
from mlxrunner.serve.apis.ollama.writing import Shape, StreamWriter
from mlxrunner.serve.apis.route import client_of, route_class
from mlxrunner.serve.apis.whole import merged, whole
from mlxrunner.serve.asked import Asked
from mlxrunner.serve.events import RefusedError
from mlxrunner.serve.shapes import ollama_response

NDJSON = "application/x-ndjson"
"""The media type of a stream of lines."""


class Named(Body):
    """A body that names a model. Older clients say `name`."""

    model: str = ""
    name: str = ""

    @property
    def given(self) -> str:
        """The name. Raise RefusedError if there is none."""
        if not (self.model or self.name):
            raise RefusedError(400, "model: it has to be the name of a model", param="model")
        return self.model or self.name


class PullRequest(Named):
    """The body of a request to download a model."""

    stream: bool = Field(default=True)


def router(answers: Answers, pull: Pull = pull_model) -> APIRouter:
    """Return the routes. `pull` downloads models."""
    routes = APIRouter(
        route_class=route_class(ollama_response, "req_", any_type=True), tags=["ollama"]
    )

    async def answer(body: ChatRequest | GenerateRequest, request: Request) -> Response:
        asked = read(body, client_of(request), request.state.id)
        _check_thinking(answers, asked)
        is_chat = isinstance(body, ChatRequest)
        shape = Shape(asked, body.model, is_chat=is_chat, left_out=left_out(body))
        if is_empty(body):
            seconds = seconds_of(body.keep_alive)
            await while_connected(request, answers.hold(asked.model, seconds))
            return JSONResponse(shape.empty("unload" if seconds == 0 else "load"))
        if body.stream:
            source = frames(merged(answers, [asked]), StreamWriter(shape))
            return await stream(request, source, NDJSON, asked.id, replaced_before(asked, answers))
        found = await while_connected(request, whole(answers, asked))
        return JSONResponse(shape.whole(found), headers=headers(asked, found.end))

    @routes.post("/api/chat")
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation. An empty one loads the model, or unloads it."""
        return await answer(body, request)

    @routes.post("/api/generate")
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Answer a prompt. An empty one loads the model, or unloads it."""
        return await answer(body, request)

    @routes.post("/api/pull")
    async def pull_from_hub(body: PullRequest, request: Request) -> Response:
        """Download a model of the hub. One that is here and not of the hub succeeds at once."""
        name = body.given.removesuffix(":latest")
        events = present() if _is_only_here(answers, name) else progress(name, pull)
        if body.stream:
            return await stream(request, lines(events), NDJSON, request.state.id)

        async def last() -> dict[str, object]:
            async with aclosing(events):
                return [event async for event in events][-1]

        return JSONResponse(await while_connected(request, last()))

    _add_catalog(routes, answers)
    return routes


def _add_catalog(routes: APIRouter, answers: Answers) -> None:
    """Add the routes that tell of models and of the server."""

    @routes.head("/api/tags", include_in_schema=False)
    @routes.get("/api/tags")
    async def list_models() -> Response:
        """List the models that a request may name."""
        return JSONResponse({"models": [listed(card) for card in answers.models()]})

    @routes.get("/api/ps")
    async def list_running() -> Response:
        """List the models that are loaded."""
        cards = [card for card in answers.models() if card.is_loaded]
        return JSONResponse({"models": [running(card) for card in cards]})

    @routes.post("/api/show")
    async def show(body: Named) -> Response:
        """Describe a model."""
        return JSONResponse(described(answers.card(body.given)))

    @routes.head("/api/version", include_in_schema=False)
    @routes.get("/api/version")
    async def say_version() -> Response:
        """Say which version this is. Clients compare it with those of Ollama."""
        return JSONResponse({"version": OLLAMA_VERSION, "mlxrunner": _version()})

    @routes.head("/", include_in_schema=False)
    async def probe() -> Response:
        """Say that the server is there, as Ollama's clients ask."""
        return PlainTextResponse("Ollama is running")


OLLAMA_VERSION = "0.14.0"
"""The version of Ollama whose API this is: its clients refuse servers that are too old.

Codex wants 0.13.4, for the Responses API; from 0.14.0 on Ollama also speaks Anthropic's.
"""


def _version() -> str:
    try:
        return version("mlxrunner")
    except PackageNotFoundError:
        return "unknown"


def _is_only_here(answers: Answers, name: str) -> bool:
    """Return True for a model with files on this machine that are not in the hub's cache.

    A folder or an alias may have a name like one of the hub.
    """
    with suppress(RefusedError):
        is_here = answers.card(name).bytes > 0
        named_so = HUB_ID.fullmatch(name) and not Path(name).is_dir()
        return is_here and not (named_so and folder_if_here(name) is not None)
    return False


def _check_thinking(answers: Answers, asked: Asked) -> None:
    """Raise RefusedError, as Ollama does, if a model is to think that can't."""
    if asked.thinking and not answers.card(asked.model).has_thinking:
        raise RefusedError(
            400,
            f'"{asked.model}" does not support thinking: leave out think, or say think: false',
            param="think",
        )
