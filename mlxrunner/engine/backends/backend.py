"""The interface between a scheduler and what runs its rows: a model, or a replay without one.

`SequentialModel` runs one sequence at a time, for a runner of one request and for models that
can't run several in one step. `rotators` moves stored keys to other positions: each layer's own
rope re-rotates its keys, after a proof that this gives the right keys.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlxrunner.cache.entry import HEADER, TokenArray, as_tokens
from mlxrunner.cache.layers.extents import Window
from mlxrunner.cache.layers.factory import CacheOptions, make_layer_caches
from mlxrunner.cache.pool.causal import CausalCache, CellsLayer
from mlxrunner.cache.protocol import Batch, Cache, LayerCache, WrapperCache
from mlxrunner.engine.request import SEED_TOKENS
from mlxrunner.system.mlx_lm_internals import with_rope

WINDOWS_KEEP = 64
"""Tokens that a window keeps beyond itself.

With them, a prompt that differs in its last few tokens can resume.
"""


class Backend(ABC):
    """The interface for running a scheduler's rows.

    An engine stores the keys and values of each sequence.
    """

    is_single = False
    """True if there is one sequence only, for a runner of one request at a time."""
    takes_checkpoints = True
    """False if there is no budget for checkpoints of its sequences."""

    def __init__(self, windows: Iterable[int], memory: int = WINDOWS_KEEP) -> None:
        """Make one group of cells for each width of window.

        `windows`: the window of each layer in tokens, 0 for full attention. `memory`: tokens that
        windows keep beyond themselves.
        """
        self._kinds, self._memory = sorted(set(windows)), memory
        self.groups = self._make_groups()
        """One CausalCache for each kind of layer: full attention, and each width of window."""
        self.cache = joined(self.groups)
        """All groups as one cache."""

    @abstractmethod
    def forward(self, tokens: mx.array, batch: Batch, rows: Sequence[int]) -> mx.array:
        """Return the logits `[len(rows), vocab]` of some rows of `tokens [n]`.

        `batch`: the positions and sequences of the tokens. `rows`: indices of the tokens whose
        logits are wanted; if there are none, the result is some array that is ready when the pass
        is. Raise CacheFullError, with nothing changed, if cells are missing.
        """

    def caches(self, sequence: int) -> list[LayerCache]:
        """Return the layer caches that hold the tokens of `sequence`, always the same ones.

        The cells of each group come first, then the layers that are apart. `forward` itself begins
        and ends a pass in the latter.
        """
        return [CellsLayer(group, sequence) for group in self.groups]

    def has_stops(self, caches: Sequence[LayerCache]) -> bool:
        """Return True if prompts are cut where checkpoints of `caches` are taken."""
        return self.takes_checkpoints and any(cache.needs_checkpoints for cache in caches)

    def look(self, before: TokenArray, tokens: TokenArray) -> None:  # noqa: B027  # most see none
        """Prepare for a pass of `tokens`, which are known, after those `before` of a sequence.

        Only a model that sees pictures needs it. `tokens` are empty for those that it samples.
        """

    def copied(self, source: int, target: int, count: int) -> None:  # noqa: B027  # most need not
        """Note that `target` was empty, and has taken the first `count` tokens of `source`."""

    @property
    def most_sequences(self) -> int | None:
        """Most sequences that one step may carry; None: any number."""
        return None

    @property
    def why_alone(self) -> str | None:
        """Why a step carries one sequence only; None if it may carry several."""
        return None

    @property
    def ways(self) -> list[str]:
        """The way in which each layer runs several sequences.

        "row": in shared cells, "stacked": as a batch of states, "per sequence": one by one. A layer
        with several caches may have two of them. "one at a time": no step carries several.
        """
        return []

    @property
    def stacks(self) -> bool:
        """True if some layers run the states of several sequences as one batch."""
        return any("stacked" in way for way in self.ways)

    @abstractmethod
    def rotate(
        self, caches: Sequence[LayerCache], by: int
    ) -> Sequence[Callable[[Any, int], Any]] | None:
        """Return the rotation of the keys of each cache by `by` positions.

        Return None if some keys can't be moved. See `mlxrunner.cache.entry.Rotators`.
        """

    def broken(self) -> set[int] | None:
        """Return the sequences that have brought NaN or infinities into what all others read.

        There may be none any more. Return None if no such value is there.
        """
        return None

    def forget(self) -> None:
        """Drop all buffers, after a forward pass that can't be evaluated."""
        for group in self.groups:
            group.forget()

    def state(self) -> list[Any]:
        """Return all buffers, to be evaluated."""
        return [array for group in self.groups for array in group.state]

    @abstractmethod
    def expect(
        self, sequence: int, count: int, *, may_copy: bool = False, beside: Sequence[int] = ()
    ) -> None:
        """Prepare for `count` more tokens of the sequence.

        They lie side by side if the engine can compute attention in parts. `may_copy`: there are
        cells for a copy of a short prefix that the sequence shares. `beside`: the sequences that
        run.
        """

    @abstractmethod
    def _make_group(self, window: int | None, memory: int | None) -> CausalCache:
        """Return the cache of one kind of layer."""

    def _make_groups(self) -> list[CausalCache]:
        windows = (
            (window, window + self._memory) if window else (None, None) for window in self._kinds
        )
        return [self._make_group(window, memory) for window, memory in windows]


def joined(groups: list[CausalCache]) -> Cache:
    """Return all groups as one cache; without groups, one that stores nothing."""
    return groups[0] if len(groups) == 1 else WrapperCache(*groups)


def marker(states: Sequence[Any]) -> mx.array:
    """Return an array that is ready when the arrays in `states`, a tree, are."""
    leaves: Any = tree_flatten(list(states))
    arrays = [leaf for _, leaf in leaves if isinstance(leaf, mx.array) and leaf.size]
    return mx.stack([array[(0,) * array.ndim].astype(mx.float32) for array in arrays])


class Sharing(Enum):
    """The layers that lie in shared cells."""

    PARTS = "attention, also where it is a part of a layer"
    WHOLE = "layers that are nothing but attention"
    NONE = "no layer"


@dataclass(frozen=True)
class BatchingMode:
    """The way in which a model is adapted."""

    sharing: Sharing = Sharing.PARTS
    splits: bool = True
    """True if attention may be computed in parts."""
    adds_starts: bool = False
    """See `Step.adds_starts`."""
    cuts_head: bool = True
    """True if the last norm gets only the rows whose logits are wanted."""
    stages: bool = True
    """True if recurrent layers run prompts of several lengths together: see `StepPlan`."""


def shares(like: LayerCache, sharing: Sharing) -> bool:
    """Return True if a layer lies in shared cells as a whole."""
    return like.stores_plain_rows and sharing is not Sharing.NONE


def falls_apart(like: LayerCache, sharing: Sharing) -> bool:
    """Return True if some parts of a composite layer, but not all, lie in shared cells.

    A layer of nothing but attention reads its parts together: it chooses what to attend.
    """
    plain = {part.stores_plain_rows for part in like.parts}
    return sharing is Sharing.PARTS and plain == {True, False}


def windows_of(likes: Sequence[LayerCache], sharing: Sharing) -> list[int]:
    """Return the window of each layer in shared cells, in tokens; 0 for full attention."""
    own = [window_of(like) for like in likes if shares(like, sharing)]
    parts = [windows_of(like.parts, sharing) for like in likes if falls_apart(like, sharing)]
    return own + [window for windows in parts for window in windows]


def window_of(like: LayerCache) -> int:
    """Return the window of a layer in tokens; 0 for full attention."""
    return like.extent.window if isinstance(like.extent, Window) else 0


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
        """For each prompt that was evaluated in part: where it continues, and its tokens so far."""

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


Rotate = Callable[[mx.array, int], mx.array]
"""A function of keys and a number of positions that returns the keys at their new positions.

Keys are `[1, kv_heads, n, head_dim]`. A negative number moves them towards the beginning.
"""

TOLERANCE = 2e-3
"""Largest error in the proof, as a fraction of a channel's own scale.

A wrong rope makes a far larger error. The tests hold float32 keys to 2e-4.
"""
ROUNDINGS = 4
"""Tolerance in rounding steps, if this is more than TOLERANCE.

It counts steps of the keys' type, because keys are turned there and back. It also counts steps of
float32 for each position, because angles are as large as positions and are rounded like them.
"""
BETTER = 4
"""Smallest ratio of two errors at which the way with the smaller error counts as the right one."""
TOKENS = (1, 2, 3, 4)
"""Tokens of the proof. A channel may be empty for one of them, but not for all."""


def rotators(model: Any, caches: Sequence[LayerCache], by: int) -> list[Rotate] | None:
    """Return one rotation per cache that moves keys by `by` < 0 positions; None if some can't move.

    `model` is an mlx-lm model. Names prove nothing. Therefore a few tokens run at position -by + 1
    and at position 1, with caches in which each token sees only itself: only the positions differ.
    Then the keys that each layer stores are compared. Keys without positions are equal. Otherwise
    the layer's rope has to turn one into the other. The result is None if neither holds, if both
    explain the keys equally well, or if the proof raises an error.
    """
    layers = list(getattr(model, "layers", []))
    if len(layers) != len(caches) or not all(cache.stores_plain_rows for cache in caches):
        return None
    try:
        far, near = _keys_at(model, len(caches), 1 - by), _keys_at(model, len(caches), 1)
        found = [
            _rotator(layer, there, here, by)
            if _judged(_stay, there_values, here_values, by).miss
            <= 1  # some latent caches keep positions in what they store as values
            else None
            for layer, (there, there_values), (here, here_values) in zip(
                layers, far, near, strict=True
            )
        ]
    except Exception:  # the same error would otherwise come in the middle of an answer
        return None
    ways = [way for way in found if way is not None]
    return ways if len(ways) == len(layers) else None


@dataclass(frozen=True)
class _Way:
    """A way in which keys may move."""

    rotate: Rotate
    matrix: mx.array
    """The matrix by which the way multiplies keys, `[head_dim, head_dim]`."""
    miss: float
    """Its largest error, as a multiple of the tolerance of each channel."""

    def does_as(self, other: _Way) -> bool:
        """Return True if the other one moves any keys in the same way."""
        return _number(mx.abs(self.matrix - other.matrix).max()) <= TOLERANCE


def _rotator(layer: Any, there: mx.array, here: mx.array, by: int) -> Rotate | None:
    """Return the way that turns the keys `there` into those `here`.

    That is the way with the smallest error. Return None if it does not fit, or if another way fits
    nearly as well.
    """
    ropes: list[Rotate] = [partial(turned, module.rope) for module in with_rope(layer)]
    ways = sorted(
        (_judged(way, there, here, by) for way in (_stay, *ropes)), key=lambda way: way.miss
    )
    best = ways[0]
    rivals = [way for way in ways[1:] if way.miss <= 1 and not way.does_as(best)]
    if not best.miss <= 1 or any(rival.miss <= BETTER * best.miss for rival in rivals):
        return None
    return best.rotate


def _judged(rotate: Rotate, there: mx.array, here: mx.array, by: int) -> _Way:
    """Return the way with its largest error, each channel measured by its own scale.

    The scale is the channel's largest value `here`, or that of the channels that the rope mixes
    into it from `there`.
    """
    matrix = rotate(mx.eye(there.shape[3])[None, None], by)[0, 0]  # row c: where channel c goes
    sizes = [
        mx.abs(keys.astype(mx.float32)).max(axis=(0, 2)) for keys in (here, there)
    ]  # [kv_heads, head_dim]
    scale = mx.maximum(sizes[0], sizes[1] @ mx.abs(matrix))
    apart = mx.abs(rotate(there, by).astype(mx.float32) - here.astype(mx.float32)).max(axis=(0, 2))
    tolerance = max(TOLERANCE, ROUNDINGS * _step(here.dtype), -ROUNDINGS * by * _step(mx.float32))
    return _Way(rotate, matrix, _number(mx.where(apart == 0, 0, apart / (tolerance * scale)).max()))


def _step(dtype: mx.Dtype) -> float:
    return float(mx.finfo(dtype).eps)


def _number(array: mx.array) -> float:
    return float(array.item())  # type: ignore[arg-type]  # real


def _stay(keys: mx.array, by: int) -> mx.array:
    return keys


def turned(rope: Any, keys: mx.array, by: int | mx.array) -> mx.array:
    """Return keys moved with the layer's rope by `by` positions, or each by its own number.

    `keys` are `[1, kv_heads, n, head_dim]`. The rope's amplitude (YaRN) would apply twice.
    Therefore it is divided out: it is the rope's result for ones at position 0.
    """
    heads = keys.transpose(2, 1, 0, 3)  # each key a sequence of its own
    amplitude = rope(mx.ones((1, 1, 1, keys.shape[3]), keys.dtype), offset=0)
    moved: mx.array = rope(heads, offset=by) / amplitude
    return moved.transpose(2, 1, 0, 3)


def _keys_at(model: Any, layers: int, position: int) -> list[tuple[mx.array, mx.array]]:
    """Return the keys and values that each layer stores for TOKENS, each alone at `position`.

    They are `[1, kv_heads, len(TOKENS), head_dim]`.
    """
    probes = [RotationProbe(position) for _ in range(layers)]
    model(mx.array(TOKENS)[:, None], cache=probes)
    stored = [
        (probe.keys.transpose(2, 1, 0, 3), probe.values.transpose(2, 1, 0, 3)) for probe in probes
    ]
    mx.eval(stored)
    return stored


class RotationProbe:
    """A layer cache that pretends to be at `offset` and lets a token see only itself."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.keys = mx.zeros((1,))
        self.values = mx.zeros((1,))

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> None:
        return None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys, self.values = keys, values
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return self.keys, self.values
