"""A request for an answer, the events of the answer, and its errors, in one form for all protocols.

`api_error_of` turns every error into what a client is told; `error_response` gives it the shape of
the client's protocol.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from mlxrunner.batch.openai_format import TokenLogprob, error_object
from mlxrunner.config.option import shown
from mlxrunner.errors import (
    CacheFullError,
    ClosedError,
    ContextFullError,
    ContextLengthError,
    EngineError,
    FormError,
    LogitsError,
    MemoryPlanError,
    MlxrunnerError,
    ModelError,
    NoSuchModelError,
    OptionError,
    PictureError,
    PicturesFullError,
    PromptError,
    StepFailedError,
    TimeLimitError,
)
from mlxrunner.profiling.divergence import Cause
from mlxrunner.profiling.schema import NoteKind
from mlxrunner.results import Usage, logger
from mlxrunner.terminal.output import SHOWN

EndReason = Literal["stop", "stop_sequence", "length", "tool_calls"]
CUT_OFF = "it was cut off"
"""The reason why a call can't be read of which only the beginning came."""


@dataclass(frozen=True)
class AnswerNote:
    """A remark on an answer."""

    kind: NoteKind
    """The remark in one word, for events."""
    text: str
    """The remark for the client, which may have words of the answer."""

    @classmethod
    def unread(cls, why: str) -> AnswerNote:
        """Remark that a tool call could not be read, and is in the text."""
        text = f"a tool call could not be read, it is in the text: {why}"[:300]
        return cls("call-cut" if why == CUT_OFF else "call-unread", text)


@dataclass(frozen=True, slots=True)
class Ping:
    """Nothing has come for a while: the request waits, or its prompt is being evaluated."""


@dataclass(frozen=True, slots=True)
class ThinkingDelta:
    """A piece of the model's thinking, without its tags."""

    text: str


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of the answer."""

    text: str
    tokens: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallEvent:
    """The model calls a tool."""

    index: int
    """Number of the call in this answer, from 0."""
    id: str
    name: str
    arguments: str
    """The JSON text of an object."""


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """The end of the answer."""

    reason: EndReason
    usage: Usage
    rules: tuple[str, ...] = ()
    """The names of the rules that changed the prompt."""
    cause: Cause | None = None
    """A known cause on the client's side why not more was reused."""
    stop_sequence: str | None = None
    """The stop string before which the answer ended; only if `reason` is "stop_sequence"."""
    thinking_tokens: int = 0
    """Tokens of the answer that were thinking."""
    note: AnswerNote | None = None
    replaced: tuple[str, ...] = ()
    """The types of what the prompt has as short texts, since the model can't be shown it."""


AnswerPart = ThinkingDelta | TextDelta | ToolCallEvent
AnswerEvent = Ping | AnswerPart | AnswerEnd


class ApiError(Exception):
    """A request that gets no answer, or whose answer ends early, with what the client is told."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str = "invalid_request",
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        """Make the refusal. `status` is one of HTTP, `param` the field of the body at fault."""
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.retry_after = retry_after


def field_error(
    name: str, why: str, *, status: int = 400, code: str = "invalid_request"
) -> ApiError:
    """Return the refusal of the field `name` of a body."""
    return ApiError(status, f"{name}: {why}", code=code, param=name)


ProtocolName = Literal["anthropic", "chat", "completions", "responses", "ollama"]


@dataclass(frozen=True)
class ToolChoice:
    """The choice of tools: the model may, must or must not call them."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str | None = None
    """The function that has to be called; only if `mode` is "named"."""


@dataclass(frozen=True)
class Client:
    """The program that asks, as far as the request says so."""

    name: str = ""
    """The program, such as "claude-cli" or "opencode", from the User-Agent header."""
    session: str | None = None
    """The client's name of the conversation: a session's, user's or prompt cache's id."""


@dataclass(frozen=True, kw_only=True)
class ServerRequest:
    """One request for an answer.

    Exactly one of `messages` and `prompt` is given.
    """

    protocol: ProtocolName
    model: str
    """The name of the model as the client gave it; empty: the server's first model."""
    messages: Sequence[Mapping[str, Any]] = ()
    """The conversation in OpenAI's form, in the order in which the client sent it.

    Roles are "system", "developer", "user", "assistant" and "tool", wherever they stand. `content`
    is a text, or a list of texts and pictures, of which `image` is base64 or a URL. An assistant's
    message may have `tool_calls` and `reasoning_content`, a tool's has `tool_call_id`. Nothing has
    been moved or left out.
    """
    replaced: Sequence[str] = ()
    """The types of parts and items that `messages` have as short texts, since no model reads them.
    """
    prompt: str | Sequence[int] | None = None
    """Raw text or tokens, for requests without a conversation."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Functions in OpenAI's form, `{"type": "function", "function": {...}}`, in their order.

    `function` may have `strict`.
    """
    tool_choice: ToolChoice = ToolChoice()
    parallel_calls: bool = True
    """False: the answer has at most one tool call."""
    thinking: bool | None = None
    """True if the model is to think first; None: as its template does by itself."""
    effort: str | None = None
    """The amount of thinking, as the client said it ("low", "high"), for templates that ask."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of `GenerateOptions`: max_tokens, temperature, stop, seed, schema, logprobs, ..."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the chat template."""
    keep_alive: float | None = None
    """Seconds for which the model stays loaded afterwards; None: as the server is set."""
    is_whole: bool = False
    """True if the client gets nothing before the whole answer is there."""
    client: Client = Client()
    id: str = ""
    """The id of the request, which responses, events and `/explain/{request}` name."""


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
OPENAI = {status: ANTHROPIC[status] for status in (401, 403, 404, 429)}
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


class PrintableResponse(JSONResponse):
    """JSON that people read in terminals: no character in it controls one."""

    def render(self, content: Any) -> bytes:
        """Return `content` as JSON, with escapes for control characters beyond those of ASCII."""
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.translate(_ESCAPED).encode()


def error_response(path: str, refused: ApiError, request_id: str) -> Response:
    """Return the response to a request for `path` that is refused, in the shape of its protocol."""
    if path.startswith("/v1/messages"):
        body = anthropic_error(refused, request_id)
    elif path.startswith("/api/"):
        body = {"error": refused.message}
    else:
        body = {"error": openai_error(refused)}
    headers = {"x-request-id": request_id, "request-id": request_id}
    if refused.retry_after is not None:
        headers["retry-after"] = str(refused.retry_after)
    if refused.status == 401:
        headers["www-authenticate"] = "Bearer"
    return PrintableResponse(body, refused.status, headers)


def anthropic_error(refused: ApiError, request_id: str) -> dict[str, Any]:
    """Return Anthropic's object of an error, which is an event of a stream, too."""
    default = "invalid_request_error" if refused.status < 500 else "api_error"
    error: dict[str, Any] = {"type": ANTHROPIC.get(refused.status, default)}
    words = FAMILIAR.get(refused.code)
    error["message"] = f"{refused.message} ({words})" if words else refused.message
    if refused.code == THREAD_NOT_FOUND:
        error["details"] = {"error_code": refused.code}
    return {"type": "error", "error": error, "request_id": request_id or None}


def openai_error(refused: ApiError) -> dict[str, Any]:
    default = "invalid_request_error" if refused.status < 500 else "server_error"
    kind = OPENAI.get(refused.status, default)
    return error_object(refused.message, kind, refused.param, refused.code)


SOON = 5
"""Seconds after which a client may ask again for what is not there at the moment."""
TOO_LONG = "context_length_exceeded"
STATUS: tuple[tuple[type[MlxrunnerError], int, str], ...] = (
    (ContextLengthError, 400, TOO_LONG),
    (ContextFullError, 400, TOO_LONG),
    (CacheFullError, 400, TOO_LONG),
    (PromptError, 400, "invalid_prompt"),
    (OptionError, 400, "invalid_option"),
    (FormError, 400, "invalid_form"),
    (PicturesFullError, 503, "overloaded"),
    (PictureError, 400, BAD_PICTURE),
    (TimeLimitError, 504, "timeout"),
    (NoSuchModelError, 404, "model_not_found"),
    (ModelError, 503, "model_unavailable"),
    (MemoryPlanError, 503, "model_too_large"),
    (EngineError, 503, "engine_failed"),
    (ClosedError, 503, "stopping"),
    (StepFailedError, 500, "request_failed"),
    (LogitsError, 500, "broken_logits"),
)
"""The status and the code for each class of errors; the first that fits counts."""


def api_error_of(error: BaseException) -> ApiError:
    """Return what a client is told about an error, in one sentence, and log one of ours.

    No traceback ever reaches a client.
    """
    if isinstance(error, RequestValidationError):
        return _invalid(error.errors())
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail))
    found = error if isinstance(error, ApiError) else _engine_error(error)
    if found.status == 400 and not found.param:
        # A message names its field first, as in "temperature: ..." or "input 3: ...".
        field = re.match(r"([a-z_.]+)(?: (\d+))?(?:: | has to be | needs )", found.message)
        found.param = ".".join(filter(None, field.groups())) if field else None
    return found


def _engine_error(error: BaseException) -> ApiError:
    for kind, status, code in STATUS:
        if isinstance(error, kind):
            # The other lines are a table for the terminal.
            line = str(error).splitlines()[0] if str(error) else type(error).__name__
            retry_after = SOON if status == 503 else None
            return ApiError(status, line, code=code, retry_after=retry_after)
    logger.error("a request failed: %s: %s", type(error).__name__, error)
    logger.debug("where it failed", exc_info=error)
    message = f"internal error ({type(error).__name__}); the server's log says more"
    return ApiError(500, message, code="internal")


def _invalid(errors: Sequence[Any]) -> ApiError:
    """Return the refusal for the first error of a body that pydantic refused."""
    first = errors[0]
    if first["type"] == "missing" and first["loc"] == ("body",):
        return ApiError(400, "the body is empty, it has to be a JSON object")
    if first["type"] == "model_attributes_type" and isinstance(first["input"], bytes):
        header = "Content-Type: application/json"
        return ApiError(400, f"the body has to come with {header}: curl -H '{header}'")
    field = _path(first)
    # A value that may have several types has several errors. The type that was meant is the one
    # that fits the longest part of the value.
    several = [path for path in map(_path, errors) if path[: len(field)] == field]
    path = max(several, key=lambda path: ([n for n in path if isinstance(n, int)], len(path)))
    param = ".".join(map(str, path))
    problem = _problem([one for one in errors if _path(one) == path])
    return ApiError(400, f"{param or 'the body'}: {problem}", param=param or None)


PROBLEMS = {
    "string_type": "a text",
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "literal_error": "{expected}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "too_short": "a list of at least {min_length}",
    "string_too_short": "a text of at least {min_length} character",
}
"""The values that a field may have, by the type of pydantic's error about another."""


def _path(error: Any) -> list[Any]:
    """Return the names and numbers that lead to the value that an error is about.

    Types of unions stand among them and are left out.
    """
    types = ("str", "int", "float", "bool")
    return [one for one in error["loc"][1:] if one not in types and "[" not in str(one)]


def _problem(errors: Sequence[Any]) -> str:
    """Return what is wrong with a field, of which all errors are given."""
    first = errors[0]
    if first["type"] == "missing":
        return "it has to be given"
    if first["type"] not in PROBLEMS:
        return f"{first['msg'][:1].lower()}{first['msg'][1:]}, not {shown(first['input'])}"
    known = [one for one in errors if one["type"] in PROBLEMS]
    either = [PROBLEMS[one["type"]].format(**one.get("ctx", {})) for one in known]
    return f"it has to be {' or '.join(dict.fromkeys(either))}, not {shown(first['input'])}"
