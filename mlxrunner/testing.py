"""Fakes that are as strict as the real thing, for this project's tests and for yours.

The oracle model is the judge of every cache: its next token is a function of every (token, position) that is visible through its
caches, so a stale, missing, doubled or shifted key changes the answer. It talks to its caches exactly as mlx-lm's models do.
"""

from __future__ import annotations

import dis
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import FrameType
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache

from mlxrunner.models.facts import ModelFacts
from mlxrunner.runner import Runner
from mlxrunner.tokenizer.base import Message, checked_text
from mlxrunner.tokenizer.stream import ByteStream
from mlxrunner.tokenizer.template import check_messages
from mlxrunner.tokenizer.vocabulary import Vocabulary

VOCAB = 300
EOS = 299
BOS = 298
PRIME = 4093
WINDOW = 12
PACKAGE = os.path.join(os.path.dirname(__file__), "")
"""The folder of this package, whatever the folders above it are called."""
LAYERS: dict[str, Callable[[], Any]] = {
    "full": KVCache,
    "sliding": lambda: RotatingKVCache(max_size=WINDOW),
    "chunked": lambda: ChunkedKVCache(WINDOW),
    "unknown": lambda: UnknownCache(),
    "recurrent": lambda: ArraysCache(size=1),
    "composite": lambda: CacheList(KVCache(), ArraysCache(size=1)),
}


class UnknownCache(KVCache):  # type: ignore[misc]  # mlx-lm has no annotations
    """A layer cache of a kind that nobody has heard of."""


class OracleModel:
    """`kinds`: the layers, by name of LAYERS. `on_layer(index)` is called before each layer, to interrupt a forward pass."""

    def __init__(
        self,
        kinds: Sequence[str] = ("full", "full"),
        on_layer: Callable[[int], None] = lambda index: None,
    ) -> None:
        self.kinds = list(kinds)
        self.layers = self.kinds
        self.on_layer = on_layer
        self.forwards: list[int] = []

    def make_cache(self) -> list[Any]:
        return [LAYERS[kind]() for kind in self.kinds]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        """`tokens [1, n]` -> logits `[1, n, VOCAB]`."""
        n = tokens.shape[1]
        self.forwards.append(n)
        total = mx.zeros((n,), mx.int32)
        for index, (kind, layer) in enumerate(zip(self.kinds, cache, strict=True)):
            self.on_layer(index)
            total = total + (index + 1) * _seen(kind, tokens[0].astype(mx.int32), layer)
        target = total % (VOCAB - 3)
        distance = (mx.arange(VOCAB)[None] - target[:, None]) % VOCAB
        return (distance.astype(mx.float32) * -0.25)[None]

    def parameters(self) -> dict[str, mx.array]:
        return {}


def _seen(kind: str, tokens: mx.array, cache: Any) -> mx.array:
    """`[n]`: what each token sees of the past through one layer, as a number."""
    if kind == "recurrent":
        return _recur(tokens, cache)
    if kind == "composite":
        return _attend(tokens, cache[0], None) + 7 * _recur(tokens, cache[1])
    if kind == "chunked":
        return _attend_chunk(tokens, cache)
    return _attend(tokens, cache, WINDOW if kind == "sliding" else None)


def _attend_chunk(tokens: mx.array, cache: Any) -> mx.array:
    """As Llama 4 does it: a token sees its own chunk only."""
    cache.maybe_trim_front()
    queries = mx.arange(cache.offset, cache.offset + tokens.shape[0])[:, None]
    stored = mx.arange(cache.start_position, cache.offset + tokens.shape[0])[None]
    return _attend(
        tokens, cache, None, (stored // WINDOW == queries // WINDOW) & (stored <= queries)
    )


def _attend(tokens: mx.array, cache: Any, window: int | None, mask: Any = "ask") -> mx.array:
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


class ByteTokenizer:
    """One token per UTF-8 byte, and a chat template of one line a message: `role: text`, ended by EOS."""

    vocab_size = VOCAB
    stop_tokens = frozenset({EOS})
    message_ends = frozenset({EOS})
    template_stops: tuple[str, ...] = ()

    def encode(self, text: str) -> list[int]:
        return [BOS, *self.encode_more(text)]

    def encode_more(self, text: str) -> list[int]:
        tokens: list[int] = []
        for index, part in enumerate(checked_text(text).split("\x1e")):
            tokens += [EOS] * (index > 0) + list(part.encode())
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(map(self._bytes, tokens)).decode("utf-8", "replace")

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        text = "".join(
            f"{message['role']}: {message['content']}\x1e" for message in check_messages(messages)
        )
        return text + ("assistant: " if add_generation_prompt else "")

    def stream(self, context: Sequence[int]) -> ByteStream:
        return ByteStream(self._bytes)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary([*(bytes([byte]) for byte in range(256)), *[None] * (VOCAB - 256)])

    @staticmethod
    def _bytes(token: int) -> bytes:
        return bytes([token]) if token < 256 else b"\x1e" if token == EOS else b""


def oracle_runner(
    kinds: Sequence[str] = ("full", "full"),
    *,
    context: int = 4096,
    prefill_step: int = 8,
    model: OracleModel | None = None,
    **options: Any,
) -> Runner:
    """A Runner on the oracle model and the byte tokenizer, which never ends an answer by itself. `options`: those of Runner."""
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


@contextmanager
def interrupt_at(line: int) -> Iterator[list[int]]:
    """KeyboardInterrupt before the `line`-th line that is executed in this package, wherever that is.

    But for lines that compile to nothing (a bare `try:`): no signal is handled there, and CPython lets no handler see it.
    """
    seen = [0]

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line" and frame.f_code.co_code[frame.f_lasti] != dis.opmap["NOP"]:
            seen[0] += 1
            if seen[0] == line:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        yield seen
    finally:
        sys.settrace(None)
