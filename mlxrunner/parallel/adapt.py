"""Let a stock mlx-lm model run tokens of many sequences as one row: positions per token, keys and values in shared cells.

mlx-lm's code is not changed: for the life of the adaptation each attention's `rope` is wrapped so that it takes one position per
token, and the last norm so that only the rows whose logits somebody wants go through the output projection. Whether a model works
this way is not guessed from its name: two sequences are run in one row and separately, and the logits have to agree.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlxrunner.cache.causal import CausalCache
from mlxrunner.cache.factory import CacheOptions, make_layer_caches
from mlxrunner.cache.rotate import Rotate, rotators
from mlxrunner.cache.sequences import Batch, Cache, NotSupportedError
from mlxrunner.cache.sliding import SlidingWindowCache
from mlxrunner.cache.split import WORTH_SPLITTING
from mlxrunner.cache.wrapper import WrapperCache
from mlxrunner.overflow import window_closes
from mlxrunner.parallel.attention import Attention, Parts, calls_attention, class_with

WINDOWS_KEEP = 64
"""Tokens that a window keeps beyond itself, so that a prompt that differs in its last few tokens can resume."""
TOLERANCE = 0.02
"""Of the largest logit: what another order of sums makes in half precision; a wrong position makes far more."""


LAST_NORMS = ("norm", "final_layernorm", "final_norm")
"""Names under which a model's body has its last norm."""


class PerTokenRope(nn.Module):  # type: ignore[misc,name-defined]  # mlx.nn has no annotations
    """A rope that also takes an offset per token: `x [1, heads, n, head_dim]` with `offset [n]`."""

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
    """The last norm, of the wanted rows only."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.rows: mx.array | None = None

    def __call__(self, x: mx.array) -> mx.array:
        normed: mx.array = self.inner(x if self.rows is None else x[:, self.rows])
        return normed


class LayerView:
    """What a model's layer is handed instead of a cache of its own: its share of the cells."""

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
        """How the attention of this step is to be computed, if not at once."""
        return self._step.parts[self._group]

    def buffers(self) -> tuple[mx.array, mx.array]:
        """All cells of the layer, once it has written."""
        return self._step.groups[self._group].buffers()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        cache = self._step.groups[self._group]
        self._step.layer = self._layer
        cache.set_layer(self._layer)
        cache.put(keys, values)
        fetched, stored, _ = cache.get()
        return fetched, stored


def attention_in_parts(whole: Attention) -> Attention:
    """mlx-lm's attention function, but in parts where a step of many sequences asks for it."""

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
    """What runs the rows of a scheduler, and what is stored of each sequence.

    `groups`: a CausalCache for each kind of layer (full, and each width of window); `cache`: all of them as one.
    """

    def __init__(self, windows: Iterable[int], memory: int = WINDOWS_KEEP) -> None:
        """`windows`: of each layer, 0 for full attention; `memory`: tokens that they keep beyond themselves."""
        self._kinds, self._memory = sorted(set(windows)), memory
        self.groups = self._make_groups()
        self.cache = _joined(self.groups)

    @abstractmethod
    def forward(self, tokens: mx.array, batch: Batch, rows: Sequence[int]) -> mx.array:
        """`tokens [n]` of `batch` -> logits `[len(rows), vocab]` of the wanted rows. CacheFullError changes nothing."""

    @abstractmethod
    def expect(self, sequence: int, count: int) -> None:
        """So many more tokens of the sequence will come; where its attention can be computed by itself, they should lie side by side."""

    @abstractmethod
    def _make_group(self, window: int | None, memory: int | None) -> CausalCache:
        """The cache of one kind of layer."""

    @property
    def has_windows(self) -> bool:
        return any(self._kinds)

    def can_shift(self, tokens: int, keep: int, discard: int) -> bool:
        """Return True if no window lacks what the next token of a sequence sees once `keep .. keep + discard - 1` of `tokens` are gone."""
        return all(window_closes(window, tokens, keep, discard) for window in self._kinds if window)

    def _make_groups(self) -> list[CausalCache]:
        windows = (
            (window, window + self._memory) if window else (None, None) for window in self._kinds
        )
        return [self._make_group(window, memory) for window, memory in windows]


class Adapted(Engine):
    """A model that runs rows of many sequences. `close` undoes everything."""

    def __init__(
        self,
        model: Any,
        *,
        max_sequences: int,
        capacity: int,
        max_batch: int,
        memory: int = WINDOWS_KEEP,
    ) -> None:
        """`capacity`: tokens per sequence; `max_batch`: tokens per step; `memory`: tokens that windows keep beyond themselves.

        NotSupportedError, with nothing changed, names the layer that can't share a row.
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
        """The last one that has written."""
        attentions = [
            module
            for layer in model.layers
            for module in layer.modules()
            if callable(getattr(module, "rope", None))
        ]
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
        """`tokens [n]` of `batch` -> logits `[len(rows), vocab]` of the wanted rows, not evaluated yet. CacheFullError changes nothing."""
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
        """All buffers, to be evaluated."""
        return [array for group in self.groups for array in group.state]

    def close(self) -> None:
        """May be called again, and goes on where it was interrupted."""
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
            for module in [
                module for module in layer.modules() if callable(getattr(module, "rope", None))
            ]:
                self._replace(module, "rope", PerTokenRope(module.rope))
                if self.can_split:
                    self._replace(module, "__class__", class_with(module, attention_in_parts))
        inner = getattr(getattr(self.model, "language_model", self.model), "model", None)
        name = next((name for name in LAST_NORMS if callable(getattr(inner, name, None))), None)
        if name is not None:
            self._head = SomeRows(getattr(inner, name))
            self._replace(inner, name, self._head)

    def _replace(self, owner: Any, name: str, wrapper: Any) -> None:
        self._wrapped.append((owner, name, getattr(owner, name)))
        setattr(owner, name, wrapper)

    def _shift(self, layer: int, keys: mx.array, offsets: mx.array) -> mx.array:
        """Moved as it was proved for this layer. NotSupportedError where some layer's keys can't be moved."""
        by = int(offsets[0].item())  # type: ignore[arg-type]  # all the same
        if by not in self._rotations:
            self._rotations[by] = rotators(
                self.model, make_layer_caches(self.model, CacheOptions()), by
            )
        ways = self._rotations[by]
        if ways is None:
            raise NotSupportedError(
                "this model's keys can't be moved to other positions: what is kept has to be evaluated again"
            )
        return ways[layer](keys, by)

    def _prove(self, reference: list[mx.array]) -> None:
        """Two sequences in one row, in two steps, against each one alone."""
        groups, cache = self.groups, self.cache
        self.groups = self._make_groups()
        self.cache = _joined(self.groups)
        try:
            self.cache.init(_dtype(self.model), 2, 16, 16)
            self.forward(mx.array([5, 9, 6, 10]), Batch([0, 0, 1, 1], [0, 1, 0, 1]), [0])
            self._worth_splitting = 0  # the first step was one product, this one is in parts
            logits = self.forward(mx.array([7, 11, 12]), Batch([2, 2, 3], [0, 1, 1]), [0, 2])
            mx.eval(logits)
            gap = max(
                float(mx.abs(a - b).max().item()) for a, b in zip(logits, reference, strict=True)
            )  # type: ignore[arg-type]
            scale = max(float(mx.abs(b).max().item()) for b in reference)  # type: ignore[arg-type]
        except Exception as error:
            text = " ".join(str(error).split())[:200]
            at = (
                ""
                if self.layer < 0
                else f"layer {self.layer} ({type(self.model.layers[self.layer]).__name__}): "
            )
            raise NotSupportedError(
                f"{at}this model can't run several sequences in one row, run one at a time: {type(error).__name__}: {text}"
            ) from error
        finally:
            self.cache.close()
            self.groups, self.cache = groups, cache
            self._worth_splitting = WORTH_SPLITTING
        if not gap <= TOLERANCE * max(scale, 1e-6):
            raise NotSupportedError(
                f"this model answers otherwise with several sequences in one row (logits differ by {gap:.2g})"
            )


def _joined(groups: list[CausalCache]) -> Cache:
    return groups[0] if len(groups) == 1 else WrapperCache(*groups)


def _windows(model: Any) -> list[int]:
    """The window of each layer, 0 for full attention. NotSupportedError names the first layer of another kind."""
    windows = []
    for number, cache in enumerate(make_layer_caches(model, CacheOptions())):
        if cache.kind not in ("full", "sliding") or (
            cache.kind == "sliding" and not isinstance(cache, SlidingWindowCache)
        ):
            raise NotSupportedError(
                f"layer {number} is {cache.kind}: only full and sliding-window attention can run several sequences in one row; "
                "run one at a time"
            )
        windows.append(cache.window if isinstance(cache, SlidingWindowCache) else 0)
    return windows


def _separately(model: Any) -> list[mx.array]:
    """The logits after each of the two sequences of the proof, alone."""
    logits = [
        model(mx.array([tokens]), cache=make_prompt_cache(model))[0, -1]
        for tokens in ([5, 6, 7], [9, 10, 11, 12])
    ]
    mx.eval(logits)
    return logits


def _dtype(model: Any) -> mx.Dtype:
    """What the model computes in: keys and values are stored as they come."""
    logits: mx.array = model(mx.array([[1]]), cache=make_prompt_cache(model))
    return logits.dtype
