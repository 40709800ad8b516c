"""The pictures of a batch's lines, which no store and no line in memory holds decoded.

A line keeps the text that names its picture: base64, or a URL. With its tokens it keeps the
picture's SHA-256 and the ids of its positions, so that the ids mean the same after a restart.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxrunner.errors import MlxrunnerError, PromptError
from mlxrunner.pictures.table import Picture
from mlxrunner.system.picture_files import MOST_BYTES, decode_picture, encoded, pixels_of
from mlxrunner.system.picture_texts import picture_bytes
from mlxrunner.system.reading import read_bytes
from mlxrunner.templates.messages import CheckedMessages, PlainMessage, check_messages
from mlxrunner.tokenizer.prompt import Seeing, TokenizedPrompt, tokenize_prompt

if TYPE_CHECKING:
    from mlxrunner.pictures.vision_encoder import Prepared


def named(image: Any, name: str) -> str:
    """Return the text of a picture in a line, undecoded. Raise PromptError if it is no text."""
    if isinstance(image, str):
        return image
    raise PromptError(f"{name}: a picture has to be a text: base64, or a URL")


def portable(image: Any, name: str) -> str:
    """Return the text for a picture of a program: a path, the bytes of a file, or pixels.

    Raise PictureError or ReadError.
    """
    if isinstance(image, str | os.PathLike):
        content = read_bytes(Path(image), MOST_BYTES)
    elif isinstance(image, bytes):
        content = image
    else:
        content = encoded(pixels_of(image, name))
    return base64.b64encode(content).decode()


def shows(prompt: Any) -> bool:
    """Return True if a prompt has messages with pictures."""
    return isinstance(prompt, list | tuple) and any(
        isinstance(message, Mapping) and message.get("pictures") for message in prompt
    )


def tokenized(
    messages: Sequence[PlainMessage],
    tokenizer: Any,
    variables: Mapping[str, Any],
    folder: str | None,
    continues: bool | None = None,
) -> tuple[TokenizedPrompt, list[PlainMessage]]:
    """Return the prompt of a line with pictures, and its messages as they are stored.

    `folder`: the folder of files that lines may name. `continues` is that of `tokenize_prompt`.
    Raise PromptError.
    """
    if not _sees(tokenizer):
        raise PromptError("its messages have pictures, and the model was loaded without its eyes")
    numbers = count(1)
    shown: Any = [
        {**one, "pictures": [_pixels(next(numbers), text, folder) for text in one["pictures"]]}
        if one.get("pictures")
        else one
        for one in messages
    ]
    prompt = tokenize_prompt(tokenizer, CheckedMessages(shown), variables, None, continues)
    left = iter(prompt.views)
    stored: Any = [
        {**one, "pictures": [_row(text, next(left)) for text in one["pictures"]]}
        if one.get("pictures")
        else one
        for one in messages
    ]
    return prompt, stored


def again(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, folder: str | None
) -> tuple[list[Prepared], list[PlainMessage]]:
    """Return the pictures of a stored line, and its messages as observers get them.

    Raise PromptError if a picture can't be read any more, or is another one.
    """
    rows = [row for message in messages for row in message.get("pictures", ())]
    found: list[Prepared] = []
    for number, row in enumerate(rows, 1):
        frames = row["grid"]
        grid: Any = None if frames is None else tuple(frames)
        picture = Picture(bytes.fromhex(row["digest"]), row["first"], row["count"], grid)
        pixels = _pixels(number, row["image"], folder)
        if tokenizer.digest_of(pixels) != picture.digest:  # another one must take no ids
            raise PromptError(
                f"picture {number} of the line is another one than when the batch was read: put "
                "the file back, or begin again with another -o"
            )
        tokenizer.restore(picture)
        found.append(tokenizer.prepare(pixels))
    said: Any = messages
    return found, tokenizer.worded(said, found)


def _sees(tokenizer: Any) -> bool:
    return isinstance(tokenizer, Seeing)


def _pixels(number: int, text: str, folder: str | None) -> Any:
    """Return the pixels of a line's picture. Raise PromptError if it can't be used."""
    name = f"picture {number}"
    try:
        content = picture_bytes(text, name, None if folder is None else Path(folder))
        return decode_picture(content, name)
    except MlxrunnerError as error:
        raise PromptError(str(error)) from error


def _row(text: str, one: Prepared) -> dict[str, Any]:
    """Return what a line keeps of a picture."""
    picture = one.picture
    return {
        "image": text,
        "digest": picture.digest.hex(),
        "first": picture.first,
        "count": picture.count,
        "grid": picture.grid,
    }


def messages_of(prompt: Any) -> list[PlainMessage]:
    """Return the messages of a program with each picture as a text. Raise PromptError."""
    try:
        return check_messages(prompt, portable)
    except PromptError:
        raise
    except MlxrunnerError as error:
        raise PromptError(str(error)) from error
