"""The pictures of requests: what a prompt holds of each, and where each stands in its text.

A client sends all pictures of a conversation again with each request. A file that was read before
is known by its bytes, and is not decoded again while what the model saw of it is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import Any

from mlxrunner.cache.tokens import TokenArray
from mlxrunner.errors import PictureError
from mlxrunner.pictures.tokenizer import SeeingTokenizer
from mlxrunner.pictures.vision_encoder import Prepared
from mlxrunner.system.picture_files import decode_picture
from mlxrunner.system.picture_texts import picture_bytes
from mlxrunner.templates.messages import PlainMessage
from mlxrunner.templates.remembered import Bounded

MOST_BYTES = 4_000_000
"""Most bytes of the digests of files that are remembered."""
SHOW = ("user", "tool")
"""The roles whose messages may have pictures."""


class Eyes:
    """Reads the pictures of all requests to a model. Any thread may use it."""

    def __init__(self, tokenizer: SeeingTokenizer, folder: Path | None = None) -> None:
        """Prepare pictures with `tokenizer`. `folder`: the folder of files that may be named."""
        self.tokenizer = tokenizer
        self._folder = folder
        self._known = Bounded[bytes](MOST_BYTES)
        self._one_at_a_time = Lock()

    def read(self, image: Any, name: str) -> Prepared:
        """Return the picture of a message's part, which errors call `name`.

        Raise PictureError if it can't be used or seen.
        """
        if not isinstance(image, str):
            raise PictureError(f"{name}: a picture has to be base64, or a data URL")
        content = picture_bytes(image, name, self._folder)
        file = blake2b(content, digest_size=16).digest()
        digest = self._known.get(file)
        found = None if digest is None else self.tokenizer.held(digest)
        if found is None:
            with self._one_at_a_time:  # the plan has room for one that is decoded
                found = self.tokenizer.prepare(decode_picture(content, name))
            self._known.put(file, found.picture.digest)
        return found


class Shown:
    """The pictures of one request."""

    def __init__(self, eyes: Eyes) -> None:
        """Begin without pictures."""
        self._eyes = eyes
        self._by_name: dict[str, Prepared] = {}

    def see(self, image: Any, name: str) -> str:
        """Read a picture, and return its digest, which stands for it. Raise PictureError."""
        found = self._eyes.read(image, name)
        digest = found.picture.digest.hex()
        self._by_name[digest] = found
        return digest

    def of(self, messages: Sequence[Mapping[str, Any]]) -> list[Prepared]:
        """Return the pictures of `messages`, in order."""
        names = [name for message in messages for name in message.get("pictures", ())]
        return [self._by_name[name] for name in names]

    def filled(self, text: str, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return rendered `messages` with the text of each picture. Raise PromptError."""
        pictures = self.of(messages)
        return self._eyes.tokenizer.filled(text, pictures) if pictures else text

    def placed(
        self, tokens: TokenArray, text: str, messages: Any
    ) -> tuple[TokenArray, str, list[PlainMessage]]:
        """Return the tokens of a filled text with the positions of the pictures of `messages`.

        Text and messages follow as observers get them. Raise PromptError.
        """
        tokenizer, pictures = self._eyes.tokenizer, self.of(messages)
        placed = tokenizer.placed(tokens, pictures)
        return placed, tokenizer.spelled(text, pictures), tokenizer.worded(messages, pictures)
