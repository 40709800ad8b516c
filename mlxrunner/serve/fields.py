"""Bodies of requests: fields that are not known are tolerated, those in the way are refused."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from mlxrunner.batch.openai_format import READ
from mlxrunner.config.names import SAME
from mlxrunner.config.option import as_whole, names, without_nulls
from mlxrunner.config.request_fields import is_known
from mlxrunner.options import GenerateOptions
from mlxrunner.serve.errors import BAD_DOCUMENT, BAD_PICTURE
from mlxrunner.serve.events import AnswerEnd, ApiError, ServerRequest
from mlxrunner.serve.models import AnswerBackend
from mlxrunner.templates.parts import PartError, arguments_of_call, parts_of, settled
from mlxrunner.terminal.text import one_line

LONGEST_NAME = 60
"""Most characters of a field's name in the list of what was left out."""
MOST_LEFT_OUT = 40
"""Most entries of that list."""


_BOUNDS = {"ge": -(2**63), "le": 2**63 - 1}
"""The bounds of an integer without bounds of its own: 64 bits."""


def _read_as_json(schema: Any) -> None:
    """Change a pydantic schema, and those in it, so that they read values as JSON has them.

    A whole float is an integer, and a boolean is no number. A list ends its check at its first
    wrong item: a body has room for millions of them.
    """
    if isinstance(schema, list | tuple):
        for part in schema:
            _read_as_json(part)
    if not isinstance(schema, dict):
        return
    if schema.get("type") == "list":
        schema["fail_fast"] = True
        items = schema.get("items_schema", {})
        if items.get("type") == "int" and not items.get("strict"):
            # Python is called for floats only: a prompt may have a million tokens.
            exact = _BOUNDS | {**items, "strict": True}
            float_too = core_schema.no_info_before_validator_function(as_whole, {**exact})
            either = {"type": "union", "choices": [exact, float_too], "mode": "left_to_right"}
            schema["items_schema"] = either
    if schema.get("type") == "float":
        schema["strict"] = True
    if schema.get("type") == "int" and not schema.get("strict"):
        exact = _BOUNDS | {**schema, "strict": True}
        schema.clear()
        schema.update(core_schema.no_info_before_validator_function(as_whole, exact))
    for part in schema.values():
        _read_as_json(part)


class RequestBody(BaseModel):
    """An object of a request. A null counts as not given. Fields that are not known are kept."""

    model_config = ConfigDict(extra="allow", strict=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return without_nulls(given) if isinstance(given, dict) else given

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of the class, changed by `_read_as_json`."""
        schema = handler(source)
        _read_as_json(schema)
        return schema


_PART = {"type": "object", "properties": {"type": {"type": "string"}}}
SentContent = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"anyOf": [_PART, {"type": "string"}]}},
                {"type": "null"},
            ]
        }
    ),
]
"""A content as a client sent it: a text or a list of parts, and whatever `parts_of` makes of
another value, which a client would repeat with each request.
"""


def _as_text(value: Any) -> str | None:
    """Return a value as a text; None for one that says nothing, such as null or an empty list."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value) if value or isinstance(value, (int, float)) else None


HistoryText = Annotated[str | None, BeforeValidator(_as_text)]
"""A text of an earlier message, such as the id of a call. Another value is taken as its JSON: a
client would repeat it with each request.
"""


def present(items: Any) -> Any:
    """Return a list without its nulls, which count as not given."""
    return [one for one in items if one is not None] if isinstance(items, list) else items


def plain(content: Any) -> Any:
    """Return a content without the nulls of its parts, which count as not given."""
    if not isinstance(content, list):
        return content
    return [without_nulls(one) if isinstance(one, dict) else one for one in content]


def text_of(content: Any) -> str:
    """Return a content that can only be a text, such as that of a thought; else an empty text."""
    found = parts_of("", plain(content)).content
    return found if isinstance(found, str) else ""


def shown_messages(
    messages: Sequence[dict[str, Any]],
) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Return messages as `ServerRequest` has them, and the types that became short texts.

    Arguments of calls that are no JSON object are the text of one argument. Raise ApiError for
    a part that the user has just sent and a model can't be shown.
    """
    try:
        found, kinds = settled(messages)
    except PartError as error:
        code = {"picture": BAD_PICTURE, "document": BAD_DOCUMENT}.get(error.kind, "invalid_request")
        where = error.where.replace(" ", ".")
        raise ApiError(400, str(error), code=code, param=where) from error
    for message in found:
        for call in message.get("tool_calls", ()):
            arguments, is_object = arguments_of_call(call["function"]["arguments"])
            call["function"]["arguments"] = arguments
            if not is_object:
                kinds = tuple(sorted({*kinds, "arguments"}))
    return found, kinds


OPTIONS = frozenset((*names(GenerateOptions), *SAME))
"""The names of our options, and those of other programs for them."""


def unread(fields: Mapping[str, Any], reads: Container[str] = (), prefix: str = "") -> list[str]:
    """Return what a client is told of the fields that nobody here knows, and that are ignored.

    `reads` are those that the protocol reads itself. `prefix` comes before each name.
    """
    return [
        f"field {prefix}{one_line(name, LONGEST_NAME)}"
        for name in fields
        if not (name in OPTIONS or name in READ or name in reads or is_known(name))
    ]


def report(ended: AnswerEnd, left_out: Sequence[str] = ()) -> dict[str, Any]:
    """Return the field `mlxrunner` of a response: what was reused, and what was left out."""
    body = ended.cache.body
    if ended.note:
        body["note"] = ended.note.text
    if ended.replaced:
        body["replaced"] = list(ended.replaced)
    if left_out:
        body["left_out"] = list(left_out[:MOST_LEFT_OUT])
    return body


def headers(asked: ServerRequest, ended: AnswerEnd) -> dict[str, str]:
    """Return the headers of a whole answer."""
    return {
        "x-mlxrunner-cache": ended.cache.header,
        "request-id": asked.id,
        "x-request-id": asked.id,
        **replaced_header(ended.replaced),
    }


def replaced_before(asked: ServerRequest, answers: AnswerBackend) -> dict[str, str]:
    """Return what `replaced_header` can say of a stream, before its prompt is made."""
    has_picture = any(
        part["type"] == "image"
        for message in asked.messages
        if not isinstance(message["content"], str)
        for part in message["content"]
    )
    unseen = ["picture"] if has_picture and not answers.card(asked.model).sees else []
    return replaced_header(sorted({*asked.replaced, *unseen}))


def replaced_header(kinds: Sequence[str]) -> dict[str, str]:
    """Return the header that names the types of what became short texts, if anything did."""
    return {"x-mlxrunner-replaced": ", ".join(kinds)} if kinds else {}
