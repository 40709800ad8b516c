"""Errors in the shape of OpenAI's APIs."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse

from mlxrunner.serve.events import RefusedError

KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
"""Their type of an error for each status. Others are the client's fault, or the server's."""


def error_object(refused: RefusedError) -> dict[str, Any]:
    """Return the object that describes an error."""
    default = "invalid_request_error" if refused.status < 500 else "server_error"
    return {
        "message": refused.message,
        "type": KINDS.get(refused.status, default),
        "param": refused.param,
        "code": refused.code,
    }


def write_error(refused: RefusedError, request_id: str) -> JSONResponse:
    """Return the response of an error."""
    headers = {"x-request-id": request_id}
    if refused.retry_after is not None:
        headers["retry-after"] = str(refused.retry_after)
    return JSONResponse({"error": error_object(refused)}, refused.status, headers)
