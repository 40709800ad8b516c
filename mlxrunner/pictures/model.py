"""Let a model of mlx-vlm run on tokens alone, some of which are positions of pictures.

The embeddings of a picture are computed once. Wherever its positions are among the tokens, they
take the place of embeddings from the vocabulary. To the entry and its caches a picture is tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from mlxrunner.cache.entry import FIRST_OF_PICTURES as FIRST
from mlxrunner.cache.entry import TokenArray
from mlxrunner.errors import PromptError
from mlxrunner.pictures.table import Picture, PictureTable, has_pictures
from mlxrunner.pictures.vision_encoder import LOOKED_AT, VisionEncoder
from mlxrunner.system import mlx_vlm_internals as internals
from mlxrunner.system.mlx_vlm_internals import Projected


def delta(table: PictureTable, tokens: TokenArray) -> int:
    """Return what has to be added to the offset behind `tokens` to get the next position.

    `tokens` end with no part of a picture.
    """
    return sum(picture.advance - picture.count for _, _, picture in table.among(tokens))


def axes(table: PictureTable, before: TokenArray, tokens: TokenArray) -> NDArray[np.int32]:
    """Return the positions `[3, n]` of n `tokens` that follow the tokens `before`."""
    both = np.concatenate([before, tokens])
    found = np.empty((3, len(both)), np.int32)
    position = place = 0
    for begin, end, picture in table.among(both):
        found[:, place:begin] = position + np.arange(begin - place)
        position += begin - place
        if picture.grid is None:
            found[:, begin:end] = position + np.arange(end - begin)
        else:
            grid = np.stack(np.unravel_index(np.arange(picture.count), picture.grid))
            found[:, begin:end] = position + grid[:, : end - begin]
        position += picture.advance
        place = end
    found[:, place:] = position + np.arange(len(both) - place)
    return found[:, len(before) :]


@dataclass(frozen=True)
class _Ahead:
    """The tokens of the next call, and their positions if those have three axes."""

    tokens: TokenArray
    positions: mx.array | None


class SeeingModel(nn.Module):  # type: ignore[misc,name-defined]  # mlx.nn has no annotations
    """A model of mlx-vlm behind the interface of mlx-lm's models.

    Call `look` before each call whose tokens are known, and after any other change of the caches.
    The model needs no such call for the tokens that it samples itself.
    """

    def __init__(self, inner: Any, sight: VisionEncoder) -> None:
        """Run `inner`, a model of mlx-vlm, on tokens with pictures of `sight` among them."""
        super().__init__()
        self.inner = inner
        self.sight, self._table = sight, sight.table
        self._has_axes = internals.has_axes(inner)
        self._delta = 0
        self._ahead: _Ahead | None = None

    @property
    def layers(self) -> Any:
        return self.inner.language_model.layers

    def make_cache(self) -> list[Any]:
        """Return new caches of mlx-lm, in the order in which the layers expect them."""
        return internals.new_caches(self.inner)

    def look(self, before: TokenArray, tokens: TokenArray) -> None:
        """Prepare for `tokens`, which the next call has, after those `before` in the caches."""
        self._ahead, positions = None, None
        if self._has_axes:
            self._delta = delta(self._table, np.concatenate([before, tokens]))
        if has_pictures(tokens):
            if self._has_axes:
                positions = mx.array(axes(self._table, before, tokens)[:, None])
            self._ahead = _Ahead(tokens, positions)

    def __call__(self, tokens: mx.array, cache: Any = None, **_: Any) -> mx.array:
        """Return the logits `[1, n, vocab]` of `tokens [1, n]`."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            embeddings = internals.embedding(self.inner)(tokens)
            positions = self._line(tokens.shape[1], cache)
            return internals.logits_of(self.inner, tokens, embeddings, cache, positions)
        embeddings, deep = self._embedded(ahead.tokens)
        is_picture = mx.array(ahead.tokens >= FIRST)[None]
        return internals.logits_of(
            self.inner, tokens, embeddings, cache, ahead.positions, is_picture, deep
        )

    def _line(self, count: int, cache: Any) -> mx.array | None:
        """Return the positions `[3, 1, n]` of text, or None if positions have one axis."""
        if not self._has_axes:
            return None
        first = (cache[0].offset if cache else 0) + self._delta
        return mx.broadcast_to(mx.arange(first, first + count)[None, None], (3, 1, count))

    def _embedded(self, tokens: TokenArray) -> tuple[mx.array, tuple[mx.array, ...]]:
        """Return the embeddings `[1, n, hidden]` of tokens, and what the first layers add."""
        embed = internals.embedding(self.inner)
        table = embed(mx.array(np.where(tokens < FIRST, tokens, 0))[None])
        parts, deep, place = list[mx.array](), list[tuple[mx.array, ...]](), 0
        for begin, end, picture in self._table.among(tokens):
            first = int(tokens[begin]) - picture.first
            rows = slice(first, first + end - begin)
            seen = self.sight.seen(picture)
            parts += [table[0, place:begin], seen.embeddings[rows].astype(table.dtype)]
            deep.append(tuple(one[rows] for one in seen.deep))
            place = end
        joined = mx.concatenate([*parts, table[0, place:]])
        return joined[None], tuple(
            mx.concatenate(ones) for ones in map(list, zip(*deep, strict=True))
        )


MOST_TOGETHER = LOOKED_AT // 2
"""Most pictures side by side: making their keys and values leaves room for those made before."""
Together = tuple[Picture, ...]
"""The pictures that a token looks at; none: ()."""


class CrossingModel(SeeingModel):
    """A model that looks at pictures beside the tokens; see `SeeingModel` for its use.

    Only the layers that do not cross to pictures have caches. The keys and values of pictures are
    made from what the encoder returned, and shared by all conversations.
    """

    def __init__(self, inner: Any, sight: VisionEncoder) -> None:
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

    def __init__(self, model: Any, sight: VisionEncoder) -> None:
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
            while sum(map(len, self._kept)) + len(together) > LOOKED_AT:
                self._kept.popitem(last=False)
            dtype = internals.embedding(self._model)(mx.array([0])).dtype
            states = [self._sight.seen(picture).embeddings for picture in together]
            joined = mx.concatenate(states).astype(dtype)
            self._kept[digests] = internals.projected(self._model, joined)
        self._kept.move_to_end(digests)
        return self._kept[digests]


def stretches(
    table: PictureTable, before: TokenArray, tokens: TokenArray
) -> list[tuple[int, Together]]:
    """Return where each stretch of `tokens` begins that looks at the same pictures, and at which.

    `before`: the tokens in front of them. Tokens after the last stretch continue with its pictures.
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
