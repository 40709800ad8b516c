"""Contents of messages that clients send in parts: texts, and pictures as OpenAI writes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

Content = str | list[dict[str, Any]]
"""A text, or a list of parts in the form of `mlxrunner.templates.messages.Message`."""


class Shown(NamedTuple):
    """A picture among the parts of a content."""

    image: str
    """Its base64, or its URL."""


def content_of(parts: Iterable[str | Shown], by: str = "") -> Content:
    """Return texts and pictures as a content: one text if there are no pictures.

    `by`: the text between two neighbouring texts.
    """
    found: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, Shown):
            found.append({"type": "image", "image": part.image})
        elif found and found[-1]["type"] == "text":
            found[-1]["texts"].append(part)
        else:
            found.append({"type": "text", "texts": [part]})
    whole = [
        {"type": "text", "text": by.join(one["texts"])} if "texts" in one else one for one in found
    ]
    if all(one["type"] == "text" for one in whole):
        return "".join(one["text"] for one in whole)
    return whole


def picture_of(part: Mapping[str, Any]) -> Shown | None:
    """Return the picture of a part in one of OpenAI's forms; None if it is none."""
    match part:
        case {"type": "image_url", "image_url": {"url": str(url)}}:
            return Shown(url)
        case {"type": "image_url" | "input_image", "image_url": str(url)}:
            return Shown(url)
    return None
