"""Make sliding windows as wide as the masks that a model asks for.

mlx-lm's PLaMo 3 asks for one token more than its caches keep. A query then sees that token if it is
in the same chunk, and misses it if not. The answer would depend on the chunks of the prompt, and on
reuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, RotatingKVCache, make_prompt_cache


def widen_windows(model: Any) -> None:
    """Make the windows of mlx-lm's `model` as wide as its masks. Evaluate nothing.

    A second call changes nothing.
    """
    narrow = {size: width for size, width in masks_asked(model).items() if width > size}
    if narrow:
        model.make_cache = partial(_made_wider, model.make_cache, narrow)


def _made_wider(make: Callable[[], list[Any]], widths: dict[int, int]) -> list[Any]:
    inners = make()
    for window in _windows(inners):
        window.max_size = widths.get(window.max_size, window.max_size)
    return inners


def masks_asked(model: Any) -> dict[int, int]:
    """Return the widest mask that `model` asks for, in tokens, by the size of the window.

    Models usually ask all windows of a size for the same mask.
    """
    inners = make_prompt_cache(model)
    asked: dict[int, int] = {}
    for window in _windows(inners):
        window.make_mask = partial(_note, asked, window.max_size, window.make_mask)
        asked[window.max_size] = 0
    if asked:
        try:
            model(mx.zeros((1, 1), mx.int32), cache=inners)
        except Exception:  # running the model raises the same error
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
