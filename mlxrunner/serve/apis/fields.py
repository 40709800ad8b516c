"""Bodies of requests: fields that are not known are tolerated, those in the way are refused."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, core_schema

from mlxrunner.batch.translate import READ
from mlxrunner.config.arguments import as_whole, without_nulls
from mlxrunner.config.names import SAME
from mlxrunner.config.option import names
from mlxrunner.config.request_fields import is_known
from mlxrunner.options import GenerateOptions
from mlxrunner.serve.asked import Asked
from mlxrunner.serve.events import Ended, RefusedError
from mlxrunner.templates.parts import Content, Shown, content_of, picture_of
from mlxrunner.terminal.text import one_line

LONGEST_NAME = 60
"""Most characters of a field's name in the list of what was left out."""
MOST_LEFT_OUT = 40
"""Most entries of that list."""


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
            exact = {**items, "strict": True}
            float_too = core_schema.no_info_before_validator_function(as_whole, {**exact})
            either = {"type": "union", "choices": [exact, float_too], "mode": "left_to_right"}
            schema["items_schema"] = either
    if schema.get("type") == "float":
        schema["strict"] = True
    if schema.get("type") == "int" and not schema.get("strict"):
        exact = {**schema, "strict": True}
        schema.clear()
        schema.update(core_schema.no_info_before_validator_function(as_whole, exact))
    for part in schema.values():
        _read_as_json(part)


class Body(BaseModel):
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


class Part(Body):
    """A part of a content. Its other fields depend on its type."""

    type: str


def text_of(where: str, content: str | list[Part] | None, types: tuple[str, ...], by: str) -> str:
    """Return the text of a content: its parts of `types`, with `by` between them.

    `where` names the content for errors. Raise RefusedError for a part that is not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return by.join(
        part_text(f"{where}.{number}", part, types) for number, part in enumerate(content)
    )


def content_with(
    where: str,
    content: str | list[Part] | None,
    types: tuple[str, ...],
    by: str,
    picture: Callable[[str, Mapping[str, Any]], Shown | None],
) -> Content:
    """Return a content as `text_of` does, with its pictures among the texts.

    `picture` returns the picture of a part, if it is one. It also gets the part's name for errors.
    """
    if content is None or isinstance(content, str):
        return content or ""
    found = list[str | Shown]()
    for number, part in enumerate(content):
        place, fields = f"{where}.{number}", {"type": part.type, **(part.model_extra or {})}
        found.append(picture(place, fields) or part_text(place, part, types))
    return content_of(found, by)


def openai_picture(where: str, part: Mapping[str, Any]) -> Shown | None:
    """Return the picture of a part in one of OpenAI's forms; None if it is no picture.

    Raise RefusedError if it is one in another form.
    """
    found = picture_of(part)
    if found is None and part["type"] in ("image_url", "input_image"):
        raise RefusedError(
            400,
            f"{where}.image_url: it has to be a URL that begins as data:image/png;base64,",
            param=f"{where}.image_url",
        )
    return found


def part_text(where: str, part: Part, types: tuple[str, ...]) -> str:
    """Return the text of a part. Raise RefusedError if it is not a text."""
    text = (part.model_extra or {}).get("text")
    if part.type in types and isinstance(text, str):
        return text
    if part.type in types:
        raise RefusedError(400, f"{where}.text: it has to be a text", param=f"{where}.text")
    raise RefusedError(
        400,
        f"{where}: content of type {part.type!r:.60} is not supported here, only text",
        param=where,
    )


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


def report(ended: Ended, left_out: Sequence[str] = ()) -> dict[str, Any]:
    """Return the field `mlxrunner` of a response: what was reused, and what was left out."""
    body = ended.cache.body
    if ended.note:
        body["note"] = ended.note.text
    if left_out:
        body["left_out"] = list(left_out[:MOST_LEFT_OUT])
    return body


def headers(asked: Asked, ended: Ended) -> dict[str, str]:
    """Return the headers of a whole answer."""
    return {
        "x-mlxrunner-cache": ended.cache.header,
        "request-id": asked.id,
        "x-request-id": asked.id,
    }
