"""Fakes that are as strict as the real thing, for this project's tests and for yours.

    from mlxrunner.testing import oracle_runner

    runner = oracle_runner()
    answer = [chunk.token for chunk in runner.generate([1, 2, 3], max_tokens=5)]

`oracle_runner` gives a `Runner` without files, weights or randomness. Its model is the judge of
every cache: the next token is a function of every (token, position) that is visible through the
caches, so a stale, missing, doubled or shifted key changes the answer. It talks to its caches
exactly as mlx-lm's models do.
"""

from __future__ import annotations

import dis
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import CodeType, FrameType
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache

from mlxrunner.models.facts import ModelFacts
from mlxrunner.runner import Runner
from mlxrunner.tokenizer.base import BOS, EOS, VOCAB, ByteTokenizer

__all__ = [
    "BOS",
    "EOS",
    "LAYERS",
    "VOCAB",
    "WINDOW",
    "ByteTokenizer",
    "OracleLayer",
    "OracleModel",
    "UnknownCache",
    "interrupt_at",
    "oracle_runner",
]

PRIME = 4093
"""Modulus of the marks that stand for keys and values."""
WINDOW = 12
"""Tokens that the sliding and the chunked layers see."""
PACKAGE = os.path.join(os.path.dirname(__file__), "")
"""The path of this package, with a separator at its end."""


class UnknownCache(KVCache):  # type: ignore[misc]  # mlx-lm has no annotations
    """A layer cache of a kind that the package does not know."""


class OracleModel:
    """A model whose answers depend on all that its layers can see through their caches."""

    def __init__(
        self,
        kinds: Sequence[str] = ("full", "full"),
        on_layer: Callable[[int], None] = lambda index: None,
    ) -> None:
        self.kinds = list(kinds)
        """The kind of each layer, a key of `LAYERS`."""
        self.layers = self.kinds
        self.on_layer = on_layer
        """Called with the index of each layer before it, so that a test can interrupt it."""
        self.forwards: list[int] = []
        """The number of tokens of each forward pass so far."""

    def make_cache(self) -> list[Any]:
        """Return an empty layer cache of mlx-lm for each layer."""
        return [LAYERS[kind].make_cache() for kind in self.kinds]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        """Return logits `[1, n, VOCAB]` for `tokens` `[1, n]`, and add these to each `cache`."""
        n = tokens.shape[1]
        self.forwards.append(n)
        total = mx.zeros((n,), mx.int32)
        for index, (kind, layer) in enumerate(zip(self.kinds, cache, strict=True)):
            self.on_layer(index)
            seen = LAYERS[kind].seen(tokens[0].astype(mx.int32), layer)
            total = total + (index + 1) * seen
        target = total % (VOCAB - 3)
        distance = (mx.arange(VOCAB)[None] - target[:, None]) % VOCAB
        return (distance.astype(mx.float32) * -0.25)[None]

    def parameters(self) -> dict[str, mx.array]:
        """Return an empty dictionary: the model has no weights."""
        return {}


def _attend_chunk(tokens: mx.array, cache: Any) -> mx.array:
    """Attend as in Llama 4, where a token sees its own chunk only."""
    cache.maybe_trim_front()
    queries = mx.arange(cache.offset, cache.offset + tokens.shape[0])[:, None]
    stored = mx.arange(cache.start_position, cache.offset + tokens.shape[0])[None]
    return _attend(
        tokens, cache, None, (stored // WINDOW == queries // WINDOW) & (stored <= queries)
    )


def _attend(tokens: mx.array, cache: Any, window: int | None = None, mask: Any = "ask") -> mx.array:
    n = tokens.shape[0]
    if isinstance(mask, str):
        mask = create_attention_mask(tokens[None, :, None], cache, window_size=window)
    positions = cache.offset + mx.arange(n)
    mark = ((tokens + 11) * (positions * 17 + 5)) % PRIME
    keys, values = cache.update_and_fetch(_row(mark), _row((mark * 3 + positions) % PRIME))
    seen = keys[0, 0, :, 0] + 2 * values[0, 0, :, 0]
    stored = seen.shape[0]
    if mask is None:
        visible = mx.ones((n, stored), mx.bool_)
    elif isinstance(mask, str):
        visible = mx.arange(stored - n, stored)[:, None] >= mx.arange(stored)[None]
    else:
        visible = mx.broadcast_to(mask, (n, stored)) if mask.ndim < 2 else mask
    # A sum of whole numbers below 2**24 is exact in float32, in any order.
    return mx.where(visible, seen[None], 0).sum(axis=1).astype(mx.int32)


def _recur(tokens: mx.array, cache: Any) -> mx.array:
    state = cache[0] if cache[0] is not None else mx.array([1], mx.int32)
    states = []
    for i in range(tokens.shape[0]):
        state = (state * 31 + tokens[i : i + 1] + 1) % PRIME
        states.append(state)
    cache[0] = state
    return mx.concatenate(states)


def _row(marks: mx.array) -> mx.array:
    return mx.broadcast_to(marks.astype(mx.float32)[None, None, :, None], (1, 1, marks.shape[0], 2))


class OracleLayer(NamedTuple):
    """A kind of layer of the oracle model."""

    make_cache: Callable[[], Any]
    """Makes the cache that a model of mlx-lm has for such a layer."""
    seen: Callable[[mx.array, Any], mx.array]
    """`(tokens [n], cache) -> [n]`: whole numbers that stand for the past that each token sees."""


LAYERS = {
    "full": OracleLayer(KVCache, _attend),
    "sliding": OracleLayer(
        lambda: RotatingKVCache(max_size=WINDOW), partial(_attend, window=WINDOW)
    ),
    "recurrent": OracleLayer(lambda: ArraysCache(size=1), _recur),
    "composite": OracleLayer(
        lambda: CacheList(KVCache(), ArraysCache(size=1)),
        lambda tokens, cache: _attend(tokens, cache[0]) + 7 * _recur(tokens, cache[1]),
    ),
    "chunked": OracleLayer(lambda: ChunkedKVCache(WINDOW), _attend_chunk),
    "unknown": OracleLayer(UnknownCache, _attend),
}
"""The kinds of layer that an oracle model can be made of."""


def oracle_runner(
    kinds: Sequence[str] = ("full", "full"),
    *,
    context: int = 4096,
    prefill_step: int = 8,
    model: OracleModel | None = None,
    **options: Any,
) -> Runner:
    """Return a `Runner` on the oracle model and the byte tokenizer.

    `kinds` names the layers of the model, each a key of `LAYERS`. `model` is used instead if it is
    given. `context` and `prefill_step` are in tokens. `options` are those of `Runner`. The answers
    are the same each time, and never end by themselves: give `max_tokens`.
    """
    model = model or OracleModel(kinds)
    layers = {kind: model.kinds.count(kind) for kind in model.kinds}
    facts = ModelFacts("oracle", context, True, layers, VOCAB)
    return Runner(
        model,
        ByteTokenizer(),
        facts,
        name="oracle",
        context=context,
        prefill_step=prefill_step,
        **options,
    )


@cache
def _uncounted(code: CodeType) -> frozenset[int]:
    """Return the offsets of `code` whose lines `interrupt_at` does not count."""
    instructions = code.co_code
    return frozenset(
        offset
        for offset in range(0, len(instructions), 2)
        if instructions[offset] == dis.opmap["NOP"] or _leaves_with(code, instructions[offset:])
    )


def _leaves_with(code: CodeType, instructions: bytes) -> bool:
    """Return True at the call `__exit__(None, None, None)`, which begins with these arguments."""
    loads = instructions[:6]
    return loads[::2] == bytes([dis.opmap["LOAD_CONST"]] * 3) and all(
        code.co_consts[number] is None for number in loads[1::2]
    )


@contextmanager
def interrupt_at(line: int) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt before the `line`-th line of this package that is executed.

    Yield a list of one number, the lines executed so far. A `line` of -1 only counts them. Lines
    that compile to nothing (a bare `try:`) do not count, because CPython handles no signal there.
    Nor does the second visit of a `with` line, which calls `__exit__`: a signal comes before or
    after it, and never leaves a lock taken. Nor do lines that a `__del__` runs: Python only prints
    what is raised there.
    """
    seen, in_finalizer = [0], False

    def finalize(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal in_finalizer
        in_finalizer = event != "return"
        return finalize

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if in_finalizer or not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if frame.f_code.co_name == "__del__":
            return finalize(frame, event, argument)
        uncounted = _uncounted(frame.f_code)

        def count(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "line" and frame.f_lasti not in uncounted:
                seen[0] += 1
                if seen[0] == line:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return count

        return count

    sys.settrace(trace)
    try:
        yield seen
    finally:
        sys.settrace(None)
