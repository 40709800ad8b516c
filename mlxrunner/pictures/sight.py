"""See pictures: the processor that prepares them, and the encoder, which runs only where it must.

A picture is prepared when a prompt with it comes, for the tokens that it takes. It is encoded when
a pass evaluates a position of it, unless what the model saw of it is still kept.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrunner.cache.tokens import TokenArray
from mlxrunner.errors import PictureError, PromptError
from mlxrunner.pictures.table import Picture, PictureTable
from mlxrunner.system import mlx_vlm_internals as internals
from mlxrunner.system.mlx_vlm_internals import Seen
from mlxrunner.system.picture_files import DECODED_BYTES, Pixels

KEPT_BYTES = 2**28
"""Most bytes of what the model saw of earlier pictures."""
LARGEST = 2048
"""Rows and columns of the picture with which the encoder is tried at start."""


@dataclass(frozen=True)
class Prepared:
    """A picture as the processor prepared it."""

    picture: Picture
    text: str
    """The text that stands for it in that of a prompt."""
    run: TokenArray
    """The tokens of the model's own vocabulary at its positions."""


class Sight:
    """The eyes of one model. Not thread-safe."""

    def __init__(
        self, model: Any, processor: Any, marker: str, settings: bytes, kept_bytes: int = KEPT_BYTES
    ) -> None:
        """See with the encoder of `model`, a model of mlx-vlm, and its `processor`.

        `marker`: the text in which the processor puts a picture. `settings`: all that decides what
        the processor makes of pixels. `kept_bytes`: most bytes of what was seen earlier.
        """
        self.table = PictureTable()
        self._model, self._processor, self.marker = model, processor, marker
        self._settings, self._kept_bytes = settings, kept_bytes
        self._token = internals.image_token(model)
        self._prepared: dict[bytes, Prepared] = {}
        self._waiting: dict[bytes, tuple[list[int], Mapping[str, mx.array]]] = {}
        self._seen: OrderedDict[bytes, Seen] = OrderedDict()
        self._most = 0
        self.encoded = 0
        """The number of times that the encoder ran."""

    def work_bytes(self, *, tries: bool) -> int:
        """Return the bytes that pictures need in addition to the model: kept, decoded and encoded.

        `tries`: encode a picture of LARGEST x LARGEST pixels, and measure it. A later picture for
        which the encoder would need more is refused. Otherwise the encoder's own need is unknown.
        """
        fixed = self._kept_bytes + DECODED_BYTES
        if not tries:
            return fixed
        block, inputs = internals.process(
            self._processor, self.marker, np.zeros((LARGEST, LARGEST, 3), np.uint8)
        )
        self._most = _nbytes(inputs)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        internals.see(self._model, block, inputs)
        peak = mx.get_peak_memory() - before
        del inputs
        mx.clear_cache()
        return fixed + max(peak, 0) + self._most

    def prepare(self, pixels: Pixels) -> Prepared:
        """Return a picture as it goes into a prompt. Raise PictureError if it can't be seen."""
        digest = self._digest(pixels)
        known = self._prepared.get(digest)
        if known is not None and (digest in self._seen or digest in self._waiting):
            return known
        block, inputs = internals.process(self._processor, self.marker, pixels)
        if self._most and _nbytes(inputs) > self._most:
            raise PictureError(
                f"a picture of {pixels.shape[1]} x {pixels.shape[0]} needs more memory than was "
                f"planned for one of {LARGEST} x {LARGEST}: make it smaller"
            )
        self._waiting[digest] = block, inputs
        if known is not None:
            return known
        begin, end = internals.span(self._model, block)
        grid = internals.grid_of(self._model, inputs)
        prepared = Prepared(
            self.table.add(digest, end - begin, grid),
            internals.text_of(self._processor, block),
            np.array(block[begin:end], np.int32),
        )
        self._prepared[digest] = prepared
        return prepared

    def seen(self, picture: Picture) -> Seen:
        """Return what the model sees of a picture. Encode it if that is not kept.

        Raise PromptError if the picture itself is gone.
        """
        found = self._seen.get(picture.digest)
        if found is None:
            if picture.digest not in self._waiting:
                raise PromptError(
                    "a picture of this conversation has to be evaluated again, and is no longer "
                    "there: send it again"
                )
            found = internals.see(self._model, *self._waiting[picture.digest])
            self.encoded += 1
            self._seen[picture.digest] = found
        self._seen.move_to_end(picture.digest)
        return found

    def settle(self) -> None:
        """Drop what no request needs any more, at the end of each."""
        self._waiting.clear()
        nbytes = sum(one.nbytes for one in self._seen.values())
        while nbytes > self._kept_bytes:
            _, dropped = self._seen.popitem(last=False)
            nbytes -= dropped.nbytes

    def placed(self, tokens: TokenArray, pictures: Sequence[Prepared]) -> TokenArray:
        """Return `tokens` with the ids of the `pictures`, in order, in place of their runs.

        Raise PromptError if they do not fit together.
        """
        found, place = tokens.copy(), 0
        for number, one in enumerate(pictures, 1):
            ahead = np.flatnonzero(tokens[place:] == self._token)
            begin = place + int(ahead[0]) if len(ahead) else len(tokens)
            place = begin + len(one.run)
            if not np.array_equal(tokens[begin:place], one.run):
                raise PromptError(
                    f"picture {number} of {len(pictures)} has no place in the prompt: does its "
                    f"text hold {self.marker!r}?"
                )
            found[begin:place] = one.picture.ids
        if (tokens[place:] == self._token).any() and pictures:
            raise PromptError(
                f"the prompt has places for more than its {len(pictures)} pictures: does its text "
                f"hold {self.marker!r}?"
            )
        return found

    def _digest(self, pixels: Pixels) -> bytes:
        height, width, _ = pixels.shape
        digest = hashlib.sha256(b"%d %d %d " % (height, width, len(self._settings)))
        digest.update(self._settings)
        digest.update(np.ascontiguousarray(pixels).data)
        return digest.digest()


def _nbytes(inputs: Mapping[str, mx.array]) -> int:
    return sum(array.nbytes for array in inputs.values())
