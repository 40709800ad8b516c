"""Adapt a stock mlx-lm model to run tokens of many sequences as one row.

Each token has its own position. Keys and values lie in shared cells. mlx-lm's code is not changed:
while a model is adapted, wrappers replace each attention's `rope`, which takes one position per
token, and the last norm, which passes only the rows whose logits are wanted. A model qualifies by a
proof, not by its name: it runs two sequences in one row and separately, and the logits have to
agree.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlxrunner.cache.layers.extents import Window
from mlxrunner.cache.layers.factory import CacheOptions, make_layer_caches
from mlxrunner.cache.layers.rotate import Rotate, rotators
from mlxrunner.cache.overflow import window_closes
from mlxrunner.cache.shared.causal import CausalCache
from mlxrunner.cache.shared.sequences import Batch, Cache
from mlxrunner.cache.shared.split import WORTH_SPLITTING
from mlxrunner.cache.shared.wrapper import WrapperCache
from mlxrunner.errors import NotSupportedError
from mlxrunner.parallel.attention import Parts
from mlxrunner.system.mlx_lm_internals import (
    Attention,
    calls_attention,
    class_with,
    last_norm,
    with_rope,
)

WINDOWS_KEEP = 64
"""Tokens that a window keeps beyond itself.

With them, a prompt that differs in its last few tokens can resume.
"""
TOLERANCE = 0.02
"""Largest accepted difference of logits, as a share of the largest one.

Half-precision sums in another order differ by less. A wrong position makes a far larger difference.
"""


class PerTokenRope(nn.Module):  # type: ignore[misc,name-defined]  # mlx.nn has no annotations
    """A rope that also takes one offset per token: `x [1, heads, n, head_dim]`, `offset [n]`."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def __call__(self, x: mx.array, offset: Any = 0, **more: Any) -> mx.array:
        if not isinstance(offset, mx.array) or offset.ndim != 1:
            same: mx.array = self.inner(x, offset=offset, **more)
            return same
        rows: mx.array = self.inner(x.transpose(2, 1, 0, 3), offset=offset, **more)
        return rows.transpose(2, 1, 0, 3)


class SomeRows(nn.Module):  # type: ignore[misc,name-defined]
    """The last norm, applied to the wanted rows only."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.rows: mx.array | None = None

    def __call__(self, x: mx.array) -> mx.array:
        normed: mx.array = self.inner(x if self.rows is None else x[:, self.rows])
        return normed


class LayerView:
    """One layer's part of the shared cells, in place of the layer's cache."""

    def __init__(self, step: Adapted, layer: int, group: int) -> None:
        self._step, self._layer, self._group = step, layer, group

    @property
    def offset(self) -> mx.array:
        return self._step.positions

    def make_mask(
        self, n: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        return self._step.masks[self._group]

    @property
    def parts(self) -> Parts | None:
        """The parts in which this step computes its attention; None: one product."""
        return self._step.parts[self._group]

    def buffers(self) -> tuple[mx.array, mx.array]:
        """Return keys and values of all cells of the layer. Call it after the layer has written."""
        return self._step.groups[self._group].buffers()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        cache = self._step.groups[self._group]
        self._step.layer = self._layer
        cache.set_layer(self._layer)
        cache.put(keys, values)
        fetched, stored, _ = cache.get()
        return fetched, stored


def attention_in_parts(whole: Attention) -> Attention:
    """Return mlx-lm's attention function, changed to compute in parts if a step asks for it."""

    def attend(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        parts = cache.parts if isinstance(cache, LayerView) else None
        if parts is not None:
            return parts.attend(
                whole, queries, *cache.buffers(), scale=scale, sinks=sinks, cache=cache
            )
        more = {} if sinks is None else {"sinks": sinks}
        return whole(queries, keys, values, cache=cache, scale=scale, mask=mask, **more)

    return attend


class Engine(ABC):
    """The interface for running a scheduler's rows.

    An engine stores the keys and values of each sequence.
    """

    def __init__(self, windows: Iterable[int], memory: int = WINDOWS_KEEP) -> None:
        """Make one group of cells for each width of window.

        `windows`: the window of each layer in tokens, 0 for full attention. `memory`: tokens that
        windows keep beyond themselves.
        """
        self._kinds, self._memory = sorted(set(windows)), memory
        self.groups = self._make_groups()
        """One CausalCache for each kind of layer: full attention, and each width of window."""
        self.cache = _joined(self.groups)
        """All groups as one cache."""

    @abstractmethod
    def forward(self, tokens: mx.array, batch: Batch, rows: Sequence[int]) -> mx.array:
        """Return the logits `[len(rows), vocab]` of some rows of `tokens [n]`.

        `batch`: the positions and sequences of the tokens. `rows`: indices of the tokens whose
        logits are wanted. Raise CacheFullError, with nothing changed, if cells are missing.
        """

    @abstractmethod
    def expect(self, sequence: int, count: int) -> None:
        """Prepare for `count` more tokens of the sequence.

        They lie side by side if the engine can compute attention in parts.
        """

    @abstractmethod
    def _make_group(self, window: int | None, memory: int | None) -> CausalCache:
        """Return the cache of one kind of layer."""

    @property
    def has_windows(self) -> bool:
        return any(self._kinds)

    def can_shift(self, tokens: int, keep: int, discard: int) -> bool:
        """Return True if every window still holds all that the next token sees after a shift.

        The shift drops `discard` of the sequence's `tokens` tokens, behind the first `keep`.
        """
        return all(window_closes(window, tokens, keep, discard) for window in self._kinds if window)

    def _make_groups(self) -> list[CausalCache]:
        windows = (
            (window, window + self._memory) if window else (None, None) for window in self._kinds
        )
        return [self._make_group(window, memory) for window, memory in windows]


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
        self.positions = mx.array([], mx.int32)
        self.masks: list[mx.array] = []
        self.parts: list[Parts | None] = []
        self._worth_splitting = WORTH_SPLITTING
        self._rotations: dict[int, list[Rotate] | None] = {}
        self.layer = -1
        """The layer that wrote last, for error messages; -1 before the first."""
        attentions = [module for layer in model.layers for module in with_rope(layer)]
        self.can_split = bool(attentions) and all(map(calls_attention, attentions))
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
        self.positions = mx.array(list(batch.positions), mx.int32)
        self.masks = [group.mask for group in self.groups]
        splits = [
            group.split(self._worth_splitting) if self.can_split else None for group in self.groups
        ]
        self.parts = [None if split is None else Parts(split) for split in splits]
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

    def state(self) -> list[mx.array]:
        """Return all buffers, to be evaluated."""
        return [array for group in self.groups for array in group.state]

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
                if self.can_split:
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
        if by not in self._rotations:
            self._rotations[by] = rotators(
                self.model, make_layer_caches(self.model, CacheOptions()), by
            )
        ways = self._rotations[by]
        if ways is None:
            raise NotSupportedError(
                "this model's keys can't be moved to other positions: "
                "what is kept has to be evaluated again"
            )
        return ways[layer](keys, by)

    def _prove(self, reference: list[mx.array]) -> None:
        """Run two sequences in one row, in two steps, and compare each with its logits run alone.

        Raise NotSupportedError if they differ, or if a step fails.
        """
        groups, cache = self.groups, self.cache
        self.groups = self._make_groups()
        self.cache = _joined(self.groups)
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


def _joined(groups: list[CausalCache]) -> Cache:
    return groups[0] if len(groups) == 1 else WrapperCache(*groups)


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
