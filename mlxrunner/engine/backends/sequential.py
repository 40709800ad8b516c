"""Run one sequence at a time, for models that can't run several in one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrunner.cache.checkpoints import HEADER
from mlxrunner.cache.layers.factory import CacheOptions, make_layer_caches
from mlxrunner.cache.layers.protocol import LayerCache
from mlxrunner.cache.layers.rotate import rotators
from mlxrunner.cache.pool.causal import CausalCache
from mlxrunner.cache.pool.interface import Batch
from mlxrunner.cache.tokens import TokenArray, as_tokens
from mlxrunner.engine.answer import SEED_TOKENS
from mlxrunner.engine.backends.backend import Backend, marker

Look = Callable[[TokenArray, TokenArray], None]
"""Tells a model that sees pictures the tokens in the caches, and those of the next call."""


class SequentialModel(Backend):
    """A model as it is: a step carries tokens of one sequence, which has its own layer caches."""

    can_split = False

    def __init__(
        self, model: Any, options: CacheOptions, why: str = "", *, is_single: bool = False
    ) -> None:
        """`why`: the reason for running `model` this way. `options`: those of its layer caches.

        `is_single`: there is one sequence only, number 0.
        """
        super().__init__([], options.rewind_slack)
        self.is_single = is_single
        self.model, self._options, self._why = model, options, why
        self.sequences: dict[int, list[LayerCache]] = {}
        """The layer caches of each sequence."""
        self._prompts = PromptPasses()
        self._sees: Look | None = getattr(model, "look", None)
        self._before = self._coming = as_tokens([])

    @property
    def most_sequences(self) -> int:
        return 1

    @property
    def why_alone(self) -> str:
        return self._why

    @property
    def ways(self) -> list[str]:
        return ["one at a time"] * len(make_layer_caches(self.model, self._options))

    def caches(self, sequence: int) -> list[LayerCache]:
        if self.is_single or sequence not in self.sequences:
            self.sequences[sequence] = make_layer_caches(self.model, self._options)
        return self.sequences[sequence]

    def forward(
        self, tokens: mx.array, batch: Batch, rows: Sequence[int], *, reserve: bool = False
    ) -> mx.array:
        """Return the unevaluated logits; see `Backend.forward`. `reserve`: store nothing.

        Raise ValueError, with nothing changed, if there are tokens of several sequences.
        """
        if self.is_single:
            return self._forward(tokens, rows)
        if len(found := sorted(set(batch.sequences))) > 1:
            raise ValueError(f"a step of this model carries one sequence, not {found}")
        caches = make_layer_caches(self.model, self._options) if reserve else self.caches(found[0])
        *ahead, last = self._prompts.of(batch, rows, self.has_stops(caches))
        for count in ahead:
            self._look(0, count)
            self._pass(tokens[:count], caches, has_logits=False)
        self._look(len(batch) - last, len(batch))
        logits = self._pass(tokens[-last:], caches, has_logits=bool(rows))
        if not rows:
            return marker([cache.state for cache in caches])
        before = len(batch) - last
        return logits[0, mx.array([row - before for row in rows], mx.int32)]

    def _forward(self, tokens: mx.array, rows: Sequence[int]) -> mx.array:
        """Return the logits of the last `rows`, in a pass of the only sequence."""
        count, caches = tokens.shape[0], self.sequences[0]
        self._look(0, count)
        logits = self._pass(tokens, caches, has_logits=bool(rows))
        if not rows:
            return marker([cache.state for cache in caches])
        return logits[0, count - len(rows) :]

    def look(self, before: TokenArray, tokens: TokenArray) -> None:
        self._before, self._coming = before, tokens

    def _look(self, begin: int, end: int) -> None:
        """Tell a model that sees pictures of some of the tokens of the step."""
        if self._sees is not None:
            before = np.concatenate([self._before, self._coming[:begin]])
            self._sees(before, self._coming[begin:end])

    def _pass(
        self, tokens: mx.array, caches: Sequence[LayerCache], *, has_logits: bool
    ) -> mx.array:
        """Run some tokens, and return their logits, which are computed only if they are used.

        Unless that is the case (`has_logits`), what is stored is evaluated layer by layer.
        """
        counting = [cache for cache in caches if cache.counts_forwards]
        for cache in counting:
            cache.begin_forward()
        logits: mx.array = self.model(tokens[None], cache=[cache.model_cache for cache in caches])
        for cache in counting:
            cache.end_forward(tokens.shape[0])
        if not has_logits:
            for cache in caches:
                mx.async_eval(cache.state)  # type: ignore[no-untyped-call]
        return logits

    def rotate(
        self, caches: Sequence[LayerCache], by: int
    ) -> Sequence[Callable[[Any, int], Any]] | None:
        return rotators(self.model, caches, by)

    def forget(self) -> None:
        for caches in self.sequences.values():
            for cache in caches:
                cache.free()

    def expect(
        self, sequence: int, count: int, *, may_copy: bool = False, beside: Sequence[int] = ()
    ) -> None:
        """Do nothing: there are no cells."""

    def state(self) -> list[Any]:
        """Return all buffers, to be evaluated."""
        return [cache.state for caches in self.sequences.values() for cache in caches]

    def close(self) -> None:
        """Forget all sequences. A second call is allowed."""
        self.cache.close()
        self.sequences.clear()

    def _make_group(self, window: int | None, memory: int | None) -> CausalCache:
        raise AssertionError("there are no layers in shared cells")


class PromptPasses:
    """The forward passes of each step of one sequence, cut as `Runner` cuts them."""

    def __init__(self) -> None:
        self._begun: dict[int, tuple[int, int]] = {}
        """For each prompt that was evaluated in part: where it goes on, and its tokens so far."""

    def of(self, batch: Batch, rows: Sequence[int], has_stops: bool) -> list[int]:
        """Return the tokens of each pass of a step.

        `rows`: the tokens whose logits are wanted; none in a piece that does not end its prompt. A
        long prompt gets a pass of its own for its last token, because a pass computes the logits of
        all its tokens. `has_stops`: the prompt is cut at checkpoints, and the last piece is short.
        """
        sequence, begin = batch.sequences[0], batch.positions[0]
        goes_on, tokens = self._begun.pop(sequence, (begin, 0))
        tokens = len(batch) + (tokens if goes_on == begin else 0)
        if not rows:
            self._begun[sequence] = (batch.positions[-1] + 1, tokens)
            return [len(batch)]
        before = min(rows)
        is_long = len(batch) > HEADER if has_stops else tokens > SEED_TOKENS
        return [before, len(batch) - before] if before and is_long else [len(batch)]
