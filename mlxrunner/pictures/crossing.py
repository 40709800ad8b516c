"""Let a model of mlx-vlm run whose layers look at pictures beside the tokens (cross-attention).

A picture is one token in the row. In some layers this token and those behind it, up to the next
picture, look at the keys and values of the picture. Pictures side by side are looked at together,
and tokens before the first one look at none. This is what Llama 3.2 Vision was trained with. What a
token looks at follows from the tokens before it alone, so a history can be reused.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrunner.cache.tokens import FIRST_OF_PICTURES as FIRST
from mlxrunner.cache.tokens import TokenArray
from mlxrunner.errors import PromptError
from mlxrunner.pictures.model import SeeingModel
from mlxrunner.pictures.sight import LOOKED_AT, Sight
from mlxrunner.pictures.table import Picture, PictureTable, has_pictures
from mlxrunner.system import mlx_vlm_internals as internals
from mlxrunner.system.mlx_vlm_internals import Projected

MOST_TOGETHER = LOOKED_AT // 2
"""Most pictures side by side: making their keys and values leaves room for those made before."""
Together = tuple[Picture, ...]
"""The pictures that a token looks at; none: ()."""


class CrossingModel(SeeingModel):
    """A model that looks at pictures beside the tokens; see `SeeingModel` for its use.

    Only the layers that do not cross to pictures have caches. The keys and values of pictures are
    made from what the encoder returned, and shared by all conversations.
    """

    def __init__(self, inner: Any, sight: Sight) -> None:
        super().__init__(inner, sight)
        self._looked_at = _LookedAt(inner, sight)
        self._together: Together = ()
        self._stretches: list[tuple[int, Together]] = []

    @property
    def layers(self) -> Any:
        """The layers that have caches."""
        crossing = internals.crossing_layers(self.inner)
        layers = self.inner.language_model.model.layers
        return [layer for index, layer in enumerate(layers) if index not in crossing]

    def look(self, before: TokenArray, tokens: TokenArray) -> None:
        found = stretches(self._table, before, tokens)
        self._together = found[-1][1]
        self._stretches = found if has_pictures(tokens) else []

    def __call__(self, tokens: mx.array, cache: Any = None, **_: Any) -> mx.array:
        caches = cache or [None] * len(self.layers)
        ahead, self._stretches = self._stretches, []
        if not ahead:
            looks_at = self._looked_at.by(self._together)
            return internals.crossed_logits_of(self.inner, tokens, caches, looks_at)
        known = mx.where(tokens < FIRST, tokens, internals.image_token(self.inner))
        ends = [*(begin for begin, _ in ahead), tokens.shape[1]]
        logits = [
            internals.crossed_logits_of(
                self.inner, known[:, begin:end], caches, self._looked_at.by(together)
            )
            for (begin, end), (_, together) in zip(pairwise(ends), ahead, strict=True)
        ]
        return mx.concatenate(logits, axis=1)


class _LookedAt:
    """The keys and values of the pictures that tokens looked at last."""

    def __init__(self, model: Any, sight: Sight) -> None:
        self._model, self._sight = model, sight
        self._kept: OrderedDict[tuple[bytes, ...], list[Projected]] = OrderedDict()

    def by(self, together: Together) -> list[Projected]:
        """Return what each crossing layer looks at.

        Raise PromptError if one of the pictures is gone, or if they are too many.
        """
        if not together:
            return []
        if len(together) > MOST_TOGETHER:
            raise PromptError(
                f"{len(together)} pictures are side by side, and {MOST_TOGETHER} are the most for "
                "this model: put text between them, or send fewer"
            )
        digests = tuple(picture.digest for picture in together)
        if digests not in self._kept:
            self._make_room(len(together))
            dtype = internals.embedding(self._model)(mx.array([0])).dtype
            states = [self._sight.seen(picture).embeddings for picture in together]
            joined = mx.concatenate(states).astype(dtype)
            self._kept[digests] = internals.projected(self._model, joined)
        self._kept.move_to_end(digests)
        return self._kept[digests]

    def _make_room(self, pictures: int) -> None:
        """Drop what was looked at least recently, until there is room for some pictures."""
        while sum(map(len, self._kept)) + pictures > LOOKED_AT:
            self._kept.popitem(last=False)


def stretches(
    table: PictureTable, before: TokenArray, tokens: TokenArray
) -> list[tuple[int, Together]]:
    """Return where each stretch of `tokens` begins that looks at the same pictures, and at which.

    `before`: the tokens in front of them. Tokens behind the last stretch go on with its pictures.
    """
    both = np.concatenate([before, tokens])
    together: Together = ()
    found, last = [(0, together)], -1
    for begin, end, picture in table.among(both):
        together = (*together, picture) if begin == last else (picture,)
        last, at = end, max(begin - len(before), 0)
        if at == found[-1][0]:
            found.pop()
        found.append((at, together))
    return found
