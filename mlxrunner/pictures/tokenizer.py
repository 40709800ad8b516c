"""A tokenizer that puts pictures where a conversation has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby, islice
from typing import Any, cast

from mlxrunner.cache.entry import FIRST_OF_PICTURES, TokenArray, as_tokens
from mlxrunner.errors import ModelError, PromptError, reason
from mlxrunner.pictures.vision_encoder import Prepared, VisionEncoder
from mlxrunner.system.picture_files import Pixels
from mlxrunner.templates.messages import PICTURE, PlainMessage
from mlxrunner.tokenizer.base import Tokenizer

PROBES = (("", "a"), ("a", ""), ("a", "b"), ("a", "", "b"), ("a", "b", "c"))
"""The texts around the pictures of a message, with which the chat template is tried."""


class SeeingTokenizer:
    """The tokenizer of a model that sees. All but pictures is left to the model's own."""

    def __init__(self, inner: Tokenizer, sight: VisionEncoder) -> None:
        """Tokenize text with `inner`.

        Raise ModelError if its chat template has no place for pictures.
        """
        self._inner, self.sight = inner, sight
        self.written = self._what_is_written()
        """The text that the chat template writes for a picture."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def render(self, messages: Sequence[PlainMessage], **variables: Any) -> str:
        """Return the conversation with the model's own text in place of each picture."""
        plain: Any = [self._plain(message) for message in messages]
        return self._inner.render(plain, **variables)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`, with PICTURE in place of each picture."""
        text = list[str]()
        for is_picture, some in groupby(tokens, lambda token: token >= FIRST_OF_PICTURES):
            own = list(some)
            runs = self.sight.table.among(as_tokens(own)) if is_picture else ()
            text += [PICTURE for _ in runs] if is_picture else [self._inner.decode(own)]
        return "".join(text)

    def tokens_of(
        self,
        text: str,
        pictures: Sequence[Pixels],
        encode: Callable[[str], list[int]] | None = None,
    ) -> tuple[TokenArray, list[Prepared]]:
        """Return the tokens of a rendered conversation with its `pictures`, in order.

        The prompt has to hold what is returned beside them until it has run. `encode` makes the
        tokens, by default those of a whole conversation. Raise PromptError if
        they do not fit together, and PictureError if one can't be seen.
        """
        prepared = [self.sight.prepare(one) for one in pictures]
        tokens = (encode or self._inner.encode)(self.filled(text, prepared))
        return self.sight.placed(as_tokens(tokens), prepared), prepared

    def filled(self, text: str, pictures: Sequence[Prepared]) -> str:
        """Return a rendered conversation with the text of each of its `pictures` in its place.

        Raise PromptError if they do not fit together.
        """
        parts = text.split(self.sight.marker)
        if len(parts) != len(pictures) + 1:
            raise PromptError(
                f"the conversation has {len(pictures)} pictures, and {self.sight.marker!r}, which "
                f"stands for one, is {len(parts) - 1} times in its text"
            )
        whole = [parts[0]]
        for one, part in zip(pictures, parts[1:], strict=True):
            whole += [one.text, part]
        return "".join(whole)

    def spelled(self, text: str, pictures: Sequence[Prepared]) -> str:
        """Return a filled text as `decode` writes it, with PICTURE in place of each picture."""
        parts, at = list[str](), 0
        for one in pictures:
            begin = text.index(one.text, at)
            parts += [text[at:begin], one.spelled]
            at = begin + len(one.text)
        return "".join([*parts, text[at:]])

    def worded(
        self, messages: Sequence[PlainMessage], pictures: Sequence[Prepared]
    ) -> list[PlainMessage]:
        """Return messages whose contents say their `pictures` as `spelled` does, and have none."""
        left, found = iter(pictures), list[PlainMessage]()
        for message in messages:
            plain = message.copy()
            own = list(islice(left, len(plain.pop("pictures", ()))))
            if own:
                text = self.filled(message["content"].replace(PICTURE, self.written), own)
                plain["content"] = self.spelled(text, own)
            found.append(plain)
        return found

    def _plain(self, message: PlainMessage) -> dict[str, Any]:
        plain = dict(message)
        if plain.pop("pictures", ()):
            plain["content"] = message["content"].replace(PICTURE, self.written)
        return plain

    def _what_is_written(self) -> str:
        """Return what the chat template writes for a picture, the same wherever it is.

        Raise ModelError if it writes nothing, or something else in another place.
        """
        try:
            rest = self._probed(("\ue000", "\ue001")).partition("\ue000")[2]
            written = rest.partition("\ue001")[0]
            is_same = all(self._probed(texts) == self._joined(texts, written) for texts in PROBES)
        except Exception as error:
            raise ModelError(
                f"the model's chat template refuses pictures: {reason(error, 200)}"
            ) from error
        if self.sight.marker not in written or not is_same:
            raise ModelError("the model's chat template has no place for pictures")
        return written

    def _joined(self, texts: Sequence[str], written: str) -> str:
        return self._inner.render([{"role": "user", "content": written.join(texts)}])

    def _probed(self, texts: Sequence[str]) -> str:
        """Return a message with pictures between `texts`, in the form that templates expect."""
        parts: list[dict[str, str]] = []
        for text in texts:
            parts += [{"type": "text", "text": text}, {"type": "image"}]
        message: Any = {"role": "user", "content": parts[:-1]}
        return str(cast(Any, self._inner).render_parts([message]))
