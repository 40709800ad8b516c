"""Adapt a stock mlx-lm model to run tokens of many sequences as one row.

Each token has its own position. Keys and values lie in shared cells. mlx-lm's code is not changed:
while a model is adapted, wrappers replace each attention's `rope`, which takes one position per
token, and the last norm, which passes only the rows whose logits are wanted. A model qualifies by a
proof, not by its name: it runs two sequences in one row and separately, and the logits have to
agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlxrunner.cache.layers.extents import Window
from mlxrunner.cache.layers.factory import CacheOptions, make_layer_caches
from mlxrunner.cache.layers.protocol import LayerCache
from mlxrunner.cache.layers.rotate import Rotate, rotators
from mlxrunner.cache.shared.causal import CausalCache
from mlxrunner.cache.shared.sequences import Batch
from mlxrunner.cache.shared.split import WORTH_SPLITTING
from mlxrunner.errors import NotSupportedError
from mlxrunner.parallel.attention import Parts
from mlxrunner.parallel.engine import WINDOWS_KEEP, Engine, joined
from mlxrunner.parallel.views import LayerView, PerTokenRope, SomeRows, attention_in_parts
from mlxrunner.system.mlx_lm_internals import (
    calls_attention,
    class_with,
    last_norm,
    with_rope,
)

TOLERANCE = 0.02
"""Largest accepted difference of logits, as a share of the largest one.

Half-precision sums in another order differ by less. A wrong position makes a far larger difference.
"""


class Adapted(Engine):
    """A model that is adapted to rows of many sequences. `close` undoes everything."""

    def __init__(
        self,
        model: Any,
        *,
        max_sequences: int,
        capacity: int,
        max_batch: int,
        memory: int = WINDOWS_KEEP,
    ) -> None:
        """Wrap the parts of `model`, prove that it can share a row, and make the cells.

        `capacity`: tokens per sequence. `max_batch`: tokens per step. `memory`: tokens that windows
        keep beyond themselves. Raise NotSupportedError, with nothing changed, if a layer can't
        share a row.
        """
        self.model = model
        self._wrapped: list[tuple[Any, str, Any]] = []
        windows = _windows(model)
        super().__init__(windows, memory)
        self._views = [
            LayerView(self, layer, self._kinds.index(window))
            for layer, window in enumerate(windows)
        ]
        self._head: SomeRows | None = None
        self.positions: mx.array | int = 0
        """The position of each token, or of the first token of a step of one sequence."""
        self.parts: list[Parts | None] = []
        self.masks_parts: list[bool] = []
        """True for a group whose attention needs no mask of all queries and cells."""
        self._worth_splitting = WORTH_SPLITTING
        self._rotations: dict[int, list[Rotate] | None] = {}
        self.layer = -1
        """The layer that wrote last, for error messages; -1 before the first."""
        roped = [module for layer in model.layers for module in with_rope(layer)]
        modules = [module for layer in model.layers for module in layer.modules()]
        self._attentions = [module for module in modules if calls_attention(module)]
        self.can_split = bool(self._attentions) and all(map(calls_attention, roped))
        reference = _separately(model)
        try:
            self._wrap()
            self._prove(reference)
            self.cache.init(_dtype(model), max_sequences, capacity, max_batch)
        except BaseException:
            self.close()
            raise

    def forward(
        self, tokens: mx.array, batch: Batch, rows: Sequence[int], *, reserve: bool = False
    ) -> mx.array:
        """Return the unevaluated logits; see `Engine.forward`.

        `reserve`: let the row see every cell, and store nothing.
        """
        self.cache.start_forward(batch, reserve=reserve)
        self.positions = (
            batch.positions[0] if batch.is_plain else mx.array(list(batch.positions), mx.int32)
        )
        splits = [
            group.split(self._worth_splitting) if self.can_split else None for group in self.groups
        ]
        self.parts = [None if split is None else Parts(split) for split in splits]
        self.masks_parts = [(reserve and self.can_split) or bool(parts) for parts in self.parts]
        if list(rows) == list(range(len(batch))):
            return self._logits(tokens)
        wanted = mx.array(list(rows), mx.int32)
        if self._head is None:
            return self._logits(tokens)[wanted]
        self._head.rows = wanted
        try:
            return self._logits(tokens)
        finally:
            self._head.rows = None

    def _logits(self, tokens: mx.array) -> mx.array:
        logits: mx.array = self.model(tokens[None], cache=self._views)
        return logits[0]

    def rotate(
        self, caches: Sequence[LayerCache], by: int
    ) -> Sequence[Callable[[Any, int], Any]] | None:
        """Return a function for each cache; those of cells move their keys by themselves."""
        if self._rotators(by) is None:
            return None
        return [lambda keys, by: keys for _ in caches]

    def close(self) -> None:
        """Restore the model. A second call, also after an interrupt, is allowed."""
        while self._wrapped:
            owner, name, inner = self._wrapped[-1]
            setattr(owner, name, inner)
            self._wrapped.pop()
        self.cache.close()

    def _make_group(self, window: int | None, memory: int | None) -> CausalCache:
        return CausalCache(shift=self._shift, window=window, memory=memory)

    def expect(self, sequence: int, count: int) -> None:
        if self.can_split:
            for group in self.groups:
                group.expect(sequence, count)

    def _wrap(self) -> None:
        for layer in self.model.layers:
            for module in with_rope(layer):
                self._replace(module, "rope", PerTokenRope(module.rope))
        for module in self._attentions if self.can_split else []:
            self._replace(module, "__class__", class_with(module, attention_in_parts))
        found = last_norm(self.model)
        if found is not None:
            self._head = SomeRows(getattr(*found))
            self._replace(*found, self._head)

    def _replace(self, owner: Any, name: str, wrapper: Any) -> None:
        self._wrapped.append((owner, name, getattr(owner, name)))
        setattr(owner, name, wrapper)

    def _shift(self, layer: int, keys: mx.array, offsets: mx.array) -> mx.array:
        """Move keys in the way that was proved for this layer.

        Raise NotSupportedError if the keys of some layer can't be moved.
        """
        by = int(offsets[0].item())  # type: ignore[arg-type]  # all the same
        ways = self._rotators(by)
        if ways is None:
            raise NotSupportedError(
                "this model's keys can't be moved to other positions: "
                "what is kept has to be evaluated again"
            )
        return ways[layer](keys, by)

    def _rotators(self, by: int) -> list[Rotate] | None:
        """Return how the keys of each layer of the model move; None if some can't."""
        if by not in self._rotations:
            self._rotations[by] = rotators(
                self.model, make_layer_caches(self.model, CacheOptions()), by
            )
        return self._rotations[by]

    def _prove(self, reference: list[mx.array]) -> None:
        """Run two sequences in one row, in two steps, and compare each with its logits run alone.

        Raise NotSupportedError if they differ, or if a step fails.
        """
        groups, cache = self.groups, self.cache
        self.groups = self._make_groups()
        self.cache = joined(self.groups)
        try:
            self.cache.init(_dtype(self.model), 2, 16, 16)
            self.forward(mx.array([5, 9, 6, 10]), Batch([0, 0, 1, 1], [0, 1, 0, 1]), [0])
            self._worth_splitting = 0  # the first step was one product, this one is in parts
            logits = self.forward(mx.array([7, 11, 12]), Batch([2, 2, 3], [0, 1, 1]), [0, 2])
            mx.eval(logits)
            gap = max(_largest(a - b) for a, b in zip(logits, reference, strict=True))
            scale = max(_largest(b) for b in reference)
        except Exception as error:
            text = " ".join(str(error).split())[:200]
            at = (
                ""
                if self.layer < 0
                else f"layer {self.layer} ({type(self.model.layers[self.layer]).__name__}): "
            )
            raise NotSupportedError(
                f"{at}this model can't run several sequences in one row, run one at a time: "
                f"{type(error).__name__}: {text}"
            ) from error
        finally:
            self.cache.close()
            self.groups, self.cache = groups, cache
            self._worth_splitting = WORTH_SPLITTING
        if not gap <= TOLERANCE * max(scale, 1e-6):
            raise NotSupportedError(
                "this model answers otherwise with several sequences in one row "
                f"(logits differ by {gap:.2g})"
            )


def _windows(model: Any) -> list[int]:
    """Return the window of each layer in tokens, 0 for full attention.

    Raise NotSupportedError, which names the first layer of another kind.
    """
    windows = []
    for number, cache in enumerate(make_layer_caches(model, CacheOptions())):
        if not cache.stores_plain_rows:
            raise NotSupportedError(
                f"layer {number} is {cache.kind}: only full and sliding-window attention can run "
                "several sequences in one row; run one at a time"
            )
        windows.append(cache.extent.window if isinstance(cache.extent, Window) else 0)
    return windows


def _separately(model: Any) -> list[mx.array]:
    """Return the logits after each of the two sequences of the proof, run alone."""
    logits = [
        model(mx.array([tokens]), cache=make_prompt_cache(model))[0, -1]
        for tokens in ([5, 6, 7], [9, 10, 11, 12])
    ]
    mx.eval(logits)
    return logits


def _dtype(model: Any) -> mx.Dtype:
    """Return the type in which the model computes and its keys and values are stored."""
    logits: mx.array = model(mx.array([[1]]), cache=make_prompt_cache(model))
    return logits.dtype


def _largest(array: mx.array) -> float:
    return float(mx.abs(array).max().item())  # type: ignore[arg-type]
