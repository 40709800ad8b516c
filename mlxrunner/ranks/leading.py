"""The first rank: it tells the others of each forward pass, and ends when one of them is lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

from mlxrunner.cache.layers.protocol import LayerCache
from mlxrunner.engine.sampling import dispatch
from mlxrunner.errors import NotSupportedError

LOAD = "load"
"""The message that lets all ranks load the model that they have compared."""
WITH_LOGITS = 64
"""Most tokens of a forward pass whose logits are computed. A longer one only fills the caches."""


COPY, FREE, DROP = "copy", "free", "drop"
"""Messages: give a sequence the first tokens of another one, free its caches, drop the model."""


class RankTokens:
    """The tokens in the caches of the other ranks."""

    def __init__(self) -> None:
        self.tokens: dict[int, int] = {}
        """The number of tokens of each sequence."""
        self.model: LeadingModel | None = None
        """The model whose sequences they are."""

    def of(self, model: LeadingModel) -> dict[int, int]:
        """Return the tokens of each sequence of `model`. Forget those of any other model."""
        if self.model is not model:
            self.model, self.tokens = model, {}
        return self.tokens


class LeadingModel:
    """A model on the first rank, which runs every pass together with the other ranks.

    Each pass names the offset where it begins. The others go back to it first, so that their caches
    hold what the entry holds, however the request before has ended.
    """

    def __init__(
        self,
        model: Any,
        caches: Callable[[], Mapping[int, Sequence[LayerCache]]],
        group: mx.distributed.Group,
        tell: Callable[[Any], None],
        held: RankTokens,
    ) -> None:
        """Wrap this rank's part of a model.

        `caches` returns the layers of each sequence: of an entry alone, those of sequence 0. `tell`
        sends a message to all other ranks. `held` is common to all models whose passes the other
        ranks run.
        """
        self.own_part = model
        """The part of this rank, for passes of which only shapes are asked."""
        self.caches, self.group, self.tell = caches, group, tell
        self.held = held

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own_part, name)

    def __call__(self, tokens: mx.array, cache: Sequence[Any]) -> mx.array:
        """Return the logits of `tokens [1, n]`; of more than WITH_LOGITS tokens, only zeros.

        Raise NotSupportedError if `cache` is not the entry's, which the other ranks lack.
        """
        sequence, count = self._sequence(cache), tokens.shape[1]
        layers, held = self.caches()[sequence], self.held.of(self)
        offset = layers[0].offset
        if offset > (known := held.get(sequence, 0)):
            raise NotSupportedError(
                f"the other ranks hold {known} tokens of the cache, which has {offset}"
            )
        self._free_as_here()
        with undisturbed():
            self.tell([offset, count, sequence] if sequence else [offset, count])
            held[sequence] = offset + count
            passed = hand_on(tokens.astype(mx.int32), self.group)
            logits: mx.array = self.own_part(passed, cache=cache)
            if count <= WITH_LOGITS:
                dispatch([logits])
                return logits
            dispatch([layer.state for layer in layers])
            return mx.zeros(logits.shape, logits.dtype)

    def _sequence(self, cache: Sequence[Any]) -> int:
        """Return the sequence whose caches are `cache`."""
        asked = list(map(id, cache))
        for sequence, layers in self.caches().items():
            if [id(layer.model_cache) for layer in layers] == asked:
                return sequence
        raise NotSupportedError("a model on several ranks runs only the passes of its own cache")

    def _free_as_here(self) -> None:
        """Let the other ranks free the caches of sequences that have none here any more."""
        held, here = self.held.of(self), self.caches()
        if len(held) > 1:
            for sequence in [one for one in held if not here[one][0].nbytes]:
                self.tell([FREE, sequence])
                del held[sequence]


def hand_on(tokens: mx.array, group: mx.distributed.Group) -> mx.array:
    """Return `tokens`, and give them to the rank behind this one in the ring, if there is one.

    A sum over all ranks would do the same, but every rank waits for the others in it.
    """
    behind = group.rank() + 1
    if behind == group.size():
        return tokens
    given = mx.distributed.send(tokens, behind, group=group)
    dispatch([given])  # a rank that has the last layers computes nothing from tokens
    return given


def receive(count: int, group: mx.distributed.Group) -> mx.array:
    """Return the `count` tokens that come from the first rank, `[1, count]`."""
    tokens = mx.distributed.recv((1, count), mx.int32, group.rank() - 1, group=group)
    return hand_on(tokens, group)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Delay Ctrl-C and `kill` until the block ends, so that all ranks begin a pass or none does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    numbers: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM)
    before = {one: signal.signal(one, lambda number, _: came.append(number)) for one in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in came[:1]:
            signal.raise_signal(number)


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
