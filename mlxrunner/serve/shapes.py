"""Write a refusal in the shape of each protocol, for those that speak it and for the guard."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import JSONResponse, Response

from mlxrunner.serve.events import RefusedError
from mlxrunner.terminal.text import SHOWN

ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""The type of an error in Anthropic's protocol, by status."""
OPENAI = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
"""The type of an error in OpenAI's protocols, by status."""

BAD_PICTURE, BAD_DOCUMENT = "invalid_picture", "invalid_document"
"""The codes of a picture and a document that a model can't be shown."""
FAMILIAR = {BAD_PICTURE: "could not process image", BAD_DOCUMENT: "could not process PDF"}
"""Words by which Claude Code knows that it has to take a picture or a document out of the message.

Without them it sends both again, in one message with the next that its user writes.
"""
THREAD_NOT_FOUND = "thread_not_found"
"""The code by which Anthropic's clients know that they have to send a conversation again."""


_ESCAPED = {code: json.dumps(chr(code))[1:-1] for code in SHOWN}


class ShownResponse(JSONResponse):
    """JSON that people read in terminals: no character in it controls one."""

    def render(self, content: Any) -> bytes:
        """Return `content` as JSON, with escapes for control characters beyond those of ASCII."""
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.translate(_ESCAPED).encode()


def refusal_response(path: str, refused: RefusedError, request_id: str) -> Response:
    """Return the response to a request for `path` that is refused."""
    if path.startswith("/v1/messages"):
        return anthropic_response(refused, request_id)
    if path.startswith("/api/"):
        return ollama_response(refused, request_id)
    return openai_response(refused, request_id)


def anthropic_error(refused: RefusedError, request_id: str) -> dict[str, Any]:
    """Return Anthropic's object of an error, which is an event of a stream, too."""
    default = "invalid_request_error" if refused.status < 500 else "api_error"
    error: dict[str, Any] = {"type": ANTHROPIC.get(refused.status, default)}
    words = FAMILIAR.get(refused.code)
    error["message"] = f"{refused.message} ({words})" if words else refused.message
    if refused.code == THREAD_NOT_FOUND:
        error["details"] = {"error_code": refused.code}
    return {"type": "error", "error": error, "request_id": request_id or None}


def openai_error(refused: RefusedError) -> dict[str, Any]:
    """Return OpenAI's object that describes an error."""
    default = "invalid_request_error" if refused.status < 500 else "server_error"
    return {
        "message": refused.message,
        "type": OPENAI.get(refused.status, default),
        "param": refused.param,
        "code": refused.code,
    }


def anthropic_response(refused: RefusedError, request_id: str) -> Response:
    """Return the response of an error in Anthropic's protocol."""
    return _response(anthropic_error(refused, request_id), refused, request_id)


def openai_response(refused: RefusedError, request_id: str) -> Response:
    """Return the response of an error in OpenAI's protocols."""
    return _response({"error": openai_error(refused)}, refused, request_id)


def ollama_response(refused: RefusedError, request_id: str) -> Response:
    """Return the response of an error in Ollama's protocol."""
    return _response({"error": refused.message}, refused, request_id)


def _response(body: dict[str, Any], refused: RefusedError, request_id: str) -> Response:
    headers = {"x-request-id": request_id, "request-id": request_id}
    if refused.retry_after is not None:
        headers["retry-after"] = str(refused.retry_after)
    if refused.status == 401:
        headers["www-authenticate"] = "Bearer"
    return ShownResponse(body, refused.status, headers)
