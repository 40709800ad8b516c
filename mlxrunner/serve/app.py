"""The application: the routes of the protocols and of the watch, behind the guard."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from fastapi import APIRouter, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp

from mlxrunner.serve.answering.refusing import refusal_of
from mlxrunner.serve.events import RefusedError
from mlxrunner.serve.guard import Guard, Rules
from mlxrunner.serve.shapes import refusal_response


def make_app(routers: Sequence[APIRouter], rules: Rules) -> ASGIApp:
    """Return the application with `routers`, behind a guard with `rules`.

    `/openapi.json` describes it. There is no page for that document, because FastAPI's would fetch
    its script from the network.
    """
    app = FastAPI(title="mlxrunner", version=_version(), docs_url=None, redoc_url=None)
    for router in routers:
        app.include_router(router)
    for kind in (RefusedError, RequestValidationError, StarletteHTTPException, Exception):
        app.add_exception_handler(kind, _refuse)
    return Guard(app, rules)


def _version() -> str:
    try:
        return version("mlxrunner")
    except PackageNotFoundError:
        return "unknown"


async def _refuse(request: Request, error: Exception) -> Response:
    """Answer a request that no route has answered."""
    refused = _refusal_of(request, error)
    return refusal_response(request.url.path, refused, request.state.id)


def _refusal_of(request: Request, error: Exception) -> RefusedError:
    path, method = request.url.path, request.method
    if isinstance(error, HTTPException | StarletteHTTPException):
        said = {
            404: f"there is nothing at {path:.200}: /openapi.json lists the paths",
            405: f"{path:.200} does not take {method}",
        }
        message = said.get(error.status_code, str(error.detail))
        return RefusedError(error.status_code, message, code="not_found")
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        return RefusedError(422, f"{place}: {first['msg']}", param=place)
    return refusal_of(error)
