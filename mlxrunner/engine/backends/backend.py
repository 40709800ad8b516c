"""The interface between a scheduler and what runs its rows: a model, or a replay without one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlxrunner.cache.checkpoints import HEADER
from mlxrunner.cache.layers.extents import Window
from mlxrunner.cache.layers.factory import CacheOptions, make_layer_caches
from mlxrunner.cache.layers.protocol import LayerCache
from mlxrunner.cache.layers.rotate import rotators
from mlxrunner.cache.pool.causal import CausalCache, CellsLayer
from mlxrunner.cache.pool.interface import Batch, Cache, WrapperCache
from mlxrunner.cache.tokens import TokenArray, as_tokens
from mlxrunner.engine.request import SEED_TOKENS

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
        """Prepare for a pass of `tokens`, which are known, behind those `before` of a sequence.

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
