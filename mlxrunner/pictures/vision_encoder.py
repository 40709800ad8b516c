"""See pictures: the processor that prepares them, and the encoder, which runs only where it must.

A picture is prepared when a prompt with it comes, for the tokens that it takes. It is encoded when
a pass evaluates a position of it, unless what the model saw of it is still kept.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrunner.cache.entry import TokenArray
from mlxrunner.errors import PictureError, PicturesFullError, PromptError
from mlxrunner.pictures.table import Picture, PictureTable
from mlxrunner.system import device
from mlxrunner.system import mlx_vlm_internals as internals
from mlxrunner.system.mlx_vlm_internals import ProcessorOutput
from mlxrunner.system.picture_files import DECODED_BYTES, Pixels
from mlxrunner.templates.messages import PICTURE
from mlxrunner.terminal.output import size

KEPT_BYTES = 2**28
"""Most bytes of what the model saw of earlier pictures."""
HELD_BYTES = 2**29
"""Most bytes of pictures of requests that run or wait, beside those that are kept."""
LOOKED_AT = 8
"""Pictures whose keys and values are kept, if layers look at pictures beside the tokens."""
LARGEST = 2048
"""Rows and columns of the picture with which the encoder is tried at start."""


@dataclass(eq=False)
class PictureView:
    """The input that the encoder gets of a picture, or what the model saw of it.

    Each prompt with the picture holds it, so that it is there until the last of them has ended.
    """

    block: list[int]
    inputs: Mapping[str, mx.array] | None
    """The encoder's inputs; None once it ran."""
    seen: ProcessorOutput | None = None
    described: Prepared | None = None
    """The picture as it goes into prompts, without this view."""
    expected: int = 0
    """The bytes of what the model will have seen."""

    @property
    def nbytes(self) -> int:
        """The most bytes of the one and of the other, while only the first is there."""
        inputs, seen = self.inputs, self.seen  # the thread that encodes sets `seen` first
        return seen.nbytes if seen is not None else max(_nbytes(inputs or {}), self.expected)


@dataclass(frozen=True)
class Prepared:
    """A picture as the processor prepared it."""

    picture: Picture
    text: str
    """The text that stands for it in that of a prompt."""
    spelled: str
    """The same with PICTURE in place of all of its positions."""
    run: TokenArray
    """The tokens of the model's own vocabulary at its positions."""
    view: PictureView | None = None
    """The view that a prompt with this picture has to hold."""


class VisionEncoder:
    """The eyes of one model. Any thread may prepare pictures; one runs the encoder."""

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
        self._views: weakref.WeakValueDictionary[bytes, PictureView] = weakref.WeakValueDictionary()
        self._seen: OrderedDict[bytes, PictureView] = OrderedDict()
        self._lock = threading.Lock()
        self._most = 0
        self._tried: int | None = None
        self._row_bytes = 0
        self.encoded = 0
        """The number of times that the encoder ran."""

    @property
    def looked_at_bytes(self) -> int:
        """Most bytes of keys and values of pictures beside the tokens."""
        return LOOKED_AT * internals.projected_bytes(self._model)

    def work_bytes(self, *, tries: bool) -> int:
        """Return the bytes that pictures need in addition to the model.

        These are pictures that are kept, held by requests, decoded and encoded.

        `tries`: encode a picture of LARGEST x LARGEST pixels, and measure it. A later picture for
        which the encoder would need more is refused. Otherwise the encoder's own need is unknown.
        """
        fixed = self._kept_bytes + HELD_BYTES + DECODED_BYTES + self.looked_at_bytes
        if not tries:
            return fixed
        if self._tried is not None:
            return fixed + self._tried
        block, inputs = internals.process(
            self._processor, self.marker, np.zeros((LARGEST, LARGEST, 3), np.uint8)
        )
        self._most = _nbytes(inputs)
        with device.no_garbage_collected():
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            self._note(internals.see(self._model, block, inputs))
            peak = mx.get_peak_memory() - before
        del inputs
        mx.clear_cache()
        self._tried = max(peak, 0) + self._most
        return fixed + self._tried

    def prepare(self, pixels: Pixels) -> Prepared:
        """Return a picture as it goes into a prompt.

        Raise PictureError if it can't be seen, or if requests hold too many already.
        """
        digest = self.digest_of(pixels)
        with self._lock:
            view = self._views.get(digest)
            if view is None:
                view = self._viewed(pixels)
                self._check_room(view)
                view.described = self._described(digest, view)
                self._views[digest] = view
        return _held(view)

    def held(self, digest: bytes) -> Prepared | None:
        """Return the picture with this digest, if a request or what was seen holds it."""
        with self._lock:
            view = self._views.get(digest)
        return None if view is None else _held(view)

    def _check_room(self, view: PictureView) -> None:
        """Raise PicturesFullError if `view` has no room beside all others that are held."""
        held, most = sum(one.nbytes for one in self._views.values()), self._kept_bytes + HELD_BYTES
        if held + view.nbytes > most:
            raise PicturesFullError(
                f"the pictures of requests take {size(held)}, this one {size(view.nbytes)} more, "
                f"and {size(most)} are the most: send fewer or smaller ones, or later"
            )

    def _viewed(self, pixels: Pixels) -> PictureView:
        block, inputs = internals.process(self._processor, self.marker, pixels)
        block = internals.own_block(self._model, block)
        if self._most and _nbytes(inputs) > self._most:
            raise PictureError(
                f"a picture of {pixels.shape[1]} x {pixels.shape[0]} needs more memory than was "
                f"planned for one of {LARGEST} x {LARGEST}: make it smaller"
            )
        rows = internals.rows_of(self._model, block, inputs)
        return PictureView(block, inputs, expected=rows * self._row_bytes)

    def _note(self, seen: ProcessorOutput) -> ProcessorOutput:
        """Remember how many bytes a row of a picture takes once it was seen."""
        self._row_bytes = -(-seen.nbytes // len(seen.embeddings))
        return seen

    def _described(self, digest: bytes, view: PictureView) -> Prepared:
        assert view.inputs is not None
        begin, end = internals.span(self._model, view.block)
        grid = internals.grid_of(self._model, view.inputs)
        whole, before, after = (
            internals.text_of(self._processor, part)
            for part in (view.block, view.block[:begin], view.block[end:])
        )
        return Prepared(
            self.table.add(digest, end - begin, grid),
            whole,
            f"{before}{PICTURE}{after}",
            np.array(view.block[begin:end], np.int32),
        )

    def seen(self, picture: Picture) -> ProcessorOutput:
        """Return what the model sees of a picture. Encode it if that is not kept.

        Raise PromptError if the picture itself is gone.
        """
        view = self._views.get(picture.digest)
        if view is None:
            raise PromptError(
                "a picture of this conversation has to be evaluated again, and was dropped: "
                "send it again"
            )
        if view.seen is None:
            assert view.inputs is not None
            view.seen = self._note(internals.see(self._model, view.block, view.inputs))
            view.inputs = None
            self.encoded += 1
        self._seen[picture.digest] = view
        self._seen.move_to_end(picture.digest)
        return view.seen

    def settle(self) -> None:
        """Keep within the budget, at the end of each request. What a prompt holds stays there."""
        sizes = {digest: view.seen.nbytes for digest, view in self._seen.items() if view.seen}
        nbytes = sum(sizes.values())
        while nbytes > self._kept_bytes:
            digest, _ = self._seen.popitem(last=False)
            nbytes -= sizes[digest]

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

    def digest_of(self, pixels: Pixels) -> bytes:
        """Return the digest of a picture and of all that decides what the model sees of it."""
        height, width, _ = pixels.shape
        digest = hashlib.sha256(b"%d %d %d " % (height, width, len(self._settings)))
        digest.update(self._settings)
        digest.update(np.ascontiguousarray(pixels).data)
        return digest.digest()


def _held(view: PictureView) -> Prepared:
    """Return a picture as it goes into a prompt that holds its view."""
    assert view.described is not None
    return replace(view.described, view=view)


def _nbytes(inputs: Mapping[str, mx.array]) -> int:
    return sum(array.nbytes for array in inputs.values())
