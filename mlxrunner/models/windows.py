"""Sliding windows as wide as the masks that a model asks for: what a query sees is what its mask says.

mlx-lm's PLaMo 3 wants one token more than it has its caches keep. With those, a query sees that token if it is in the same chunk and
misses it if not, so that an answer depends on how its prompt was cut, and on what was reused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, RotatingKVCache, make_prompt_cache


def widen_windows(model: Any) -> None:
    """Have mlx-lm's `model` make its windows as wide as its masks, if they aren't; may be called again. Nothing is evaluated."""
    narrow = {size: width for size, width in masks_asked(model).items() if width > size}
    if narrow:
        model.make_cache = partial(_made_wider, model.make_cache, narrow)


def _made_wider(make: Callable[[], list[Any]], widths: dict[int, int]) -> list[Any]:
    inners = make()
    for window in _windows(inners):
        window.max_size = widths.get(window.max_size, window.max_size)
    return inners


def masks_asked(model: Any) -> dict[int, int]:
    """By size of a window, the widest mask that `model` asks a window of that size for: one for all of them, as a rule."""
    inners = make_prompt_cache(model)
    asked: dict[int, int] = {}
    for window in _windows(inners):
        window.make_mask = partial(_note, asked, window.max_size, window.make_mask)
        asked[window.max_size] = 0
    if asked:
        try:
            model(mx.zeros((1, 1), mx.int32), cache=inners)
        except Exception:  # a model that can't be run says so to who runs it
            return {}
    return asked


def _note(
    asked: dict[int, int],
    size: int,
    make: Callable[..., Any],
    *args: Any,
    window_size: int | None = None,
    **more: Any,
) -> Any:
    asked[size] = max(asked[size], window_size or 0)
    return make(*args, window_size=window_size, **more)


def _windows(inners: Sequence[Any]) -> Iterator[RotatingKVCache]:
    for inner in inners:
        if isinstance(inner, CacheList):
            yield from _windows(inner.caches)
        elif type(inner) is RotatingKVCache and not inner.keep:
            yield inner
