"""mlx-lm's own loop on every rank, greedy and without an entry: what a bench compares with."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

BARE = "bare"
"""Begins the message that lets the other ranks run the loop, too."""


class BareLoop:
    """One rank's part of a model, with a prompt cache of mlx-lm. Every rank samples by itself."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache: list[Any] = []

    def run(self, kept: int, rest: list[int], count: int) -> None:
        """Run the loop as the other ranks do."""
        for _ in self.steps(kept, rest, count):
            pass

    def steps(self, kept: int, rest: list[int], count: int) -> Generator[int, None, None]:
        """Yield `count` tokens that answer a prompt.

        The prompt is the first `kept` tokens of the last call, whose caches are kept, and then
        `rest`. The loop runs to its end even if its reader leaves, because the other ranks do.
        """
        mx.synchronize()  # the loop has a stream of its own: sums of two streams must not mix
        if not kept:
            self._cache = make_prompt_cache(self._model)
        trim_prompt_cache(self._cache, (self._cache[0].offset if kept else 0) - kept)
        loop = generate_step(
            mx.array(rest), self._model, max_tokens=count, prompt_cache=self._cache
        )
        try:
            for token, _ in loop:
                yield token
        finally:
            for _ in loop:
                pass
            mx.synchronize(generation_stream)  # a pass whose token nobody reads is still under way


def lead(
    model: Any, tell: Callable[[Any], None]
) -> Callable[[int, list[int], int], Generator[int, None, None]]:
    """Return `steps` of a loop on the first rank, which tells the others to run it."""
    bare = BareLoop(model)

    def steps(kept: int, rest: list[int], count: int) -> Generator[int, None, None]:
        tell([BARE, kept, rest, count])
        yield from bare.steps(kept, rest, count)

    return steps
