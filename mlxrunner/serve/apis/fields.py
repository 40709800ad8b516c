"""Bodies of requests: fields that are not known are tolerated, those in the way are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema

from mlxrunner.config.arguments import shown
from mlxrunner.serve.asked import Asked
from mlxrunner.serve.events import Ended, RefusedError
from mlxrunner.templates.parts import Content, Shown, content_of, picture_of


def _stop_early(schema: Any) -> None:
    """Let each list of a pydantic schema end its check at the first wrong item."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for part in schema.values():
            _stop_early(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _stop_early(part)


class Body(BaseModel):
    """An object of a request. Fields that are not known are kept, and ignored."""

    model_config = ConfigDict(extra="allow", strict=False)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Check lists up to their first wrong item: a body has room for millions of them."""
        schema = handler(source)
        _stop_early(schema)
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


def refuse(fields: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise RefusedError for the first field that has another value than those of `neutral`."""
    for name, accepted in neutral.items():
        value = fields.get(name)
        if value is not None and value not in accepted:
            raise RefusedError(
                400, f"{name}: {shown(value)} is not supported by this server", param=name
            )


def report(ended: Ended, left_out: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the field `mlxrunner` of a response: what was reused, and what was left out."""
    body = ended.cache.body
    if ended.note:
        body["note"] = ended.note.text
    if left_out:
        body["left_out"] = [f"tool {name}" for name in left_out]
    return body


def headers(asked: Asked, ended: Ended) -> dict[str, str]:
    """Return the headers of a whole answer."""
    return {
        "x-mlxrunner-cache": ended.cache.header,
        "request-id": asked.id,
        "x-request-id": asked.id,
    }
