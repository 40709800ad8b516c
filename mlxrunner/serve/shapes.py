"""Write a refusal in the shape that the clients of a path understand."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse, Response

from mlxrunner.serve.events import RefusedError

ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""The type of an error in Anthropic's protocol, by status."""


def refusal_response(path: str, refused: RefusedError, request_id: str) -> Response:
    """Return the response to a request for `path` that is refused."""
    headers = {"x-request-id": request_id}
    if refused.retry_after is not None:
        headers["retry-after"] = str(refused.retry_after)
    if refused.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(_body(path, refused, request_id), refused.status, headers)


def _body(path: str, refused: RefusedError, request_id: str) -> dict[str, Any]:
    if path.startswith("/v1/messages"):
        kind = ANTHROPIC.get(refused.status, "api_error")
        error = {"type": kind, "message": refused.message}
        return {"type": "error", "error": error, "request_id": request_id}
    if path.startswith("/api/"):
        return {"error": refused.message}
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    described = {
        "message": refused.message,
        "type": kind,
        "param": refused.param,
        "code": refused.code,
    }
    return {"error": described}
