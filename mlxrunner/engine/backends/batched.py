"""Adapt a stock mlx-lm model to run tokens of many sequences as one row.

Each token has its own position. Keys and values lie in shared cells, and what can't be one row runs
for each sequence. mlx-lm's code is not changed: while a model is adapted, wrappers replace each
attention's `rope`, which takes one position per token, the mixers of layers that are apart, and the
last norm, which passes only the rows whose logits are wanted. `proof.py` finds out if that gives
the right answers: nothing follows from a model's name.

A layer whose caches are not rows of shared cells is a `PerSequenceLayer`: each sequence has layer
caches of its own for it. Everything around such a layer's mixer runs once over the row; the mixer
runs once for each sequence. Recurrent mixers hold the states of several sequences as one batch
(`cache.layers.recurrent.Stack`). They run once for all answers of a step, and in stages for its
prompts: a stage has the same number of tokens of each prompt, up to the end of the shortest.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ChunkedKVCache, make_prompt_cache

from mlxrunner.cache.layers.factory import CacheOptions, make_layer_caches
from mlxrunner.cache.layers.recurrent import RecurrentCache, Stack
from mlxrunner.cache.pool.attention_split import WORTH_SPLITTING, Split
from mlxrunner.cache.pool.causal import CausalCache
from mlxrunner.cache.protocol import Batch, LayerCache
from mlxrunner.engine.backends.attention import SplitAttention
from mlxrunner.engine.backends.backend import (
    Backend,
    BatchingMode,
    Rotate,
    falls_apart,
    joined,
    marker,
    rotators,
    shares,
    window_of,
    windows_of,
)
from mlxrunner.errors import NotSupportedError
from mlxrunner.memory.reserve import shapes_of
from mlxrunner.system.mlx_lm_internals import (
    Attention,
    calls_attention,
    class_with,
    has_rope,
    last_norm,
)

AHEAD_TOKENS = 10
"""Tokens per layer from which on a pass of their own, without a last layer, is worth it.

It reads all weights once more, which takes as long as evaluating about this number of tokens.
"""


class BatchedModel(Backend):
    """A model that is adapted to rows of many sequences. `close` undoes everything."""

    def __init__(self, model: Any, options: CacheOptions, mode: BatchingMode) -> None:
        """Prepare to adapt `model`. Call `wrap` and `allocate` before the first pass.

        `options`: those of the layer caches. Windows in shared cells have the same slack.
        """
        self.model, self._options, self.mode = model, options, mode
        self._wrapped: list[tuple[Any, str, Any]] = []
        likes = make_layer_caches(model, options)
        super().__init__(windows_of(likes, mode.sharing), options.rewind_slack)
        self.step = LayerStep(mode.adds_starts)
        self._caches: dict[int, list[LayerCache]] = {}
        self._rows: list[LayerView] = []
        self._apart: list[PerSequenceLayer] = []
        self._paths: list[tuple[int, ...]] = []
        self._views = [self._view(like, (index,)) for index, like in enumerate(likes)]
        self._head: SomeRows | None = None
        self.parts: list[SplitAttention | None] = []
        self.masks_parts: list[bool] = []
        """True for a group whose attention needs no mask of all queries and cells."""
        self.worth_splitting = WORTH_SPLITTING
        self._rotations: dict[int, list[Rotate] | None] = {}
        self.layer = -1
        """The layer that wrote last, for error messages; -1 before the first."""
        self.stops_at = -1
        """The layer at which a pass ends; -1: none."""
        self.is_reserving = False
        """True in a reserve pass, which stores nothing."""
        modules = _model_modules(model)
        self._roped = [module for module in modules if has_rope(module)]
        self._attentions = [module for module in modules if calls_attention(module)]
        self.can_split = (
            mode.splits and bool(self._attentions) and all(map(calls_attention, self._roped))
        )
        self._dtype = _dtype(model)

    def wrap(self) -> None:
        """Replace the parts of the model that can't run a row. Call `close` also after an error."""
        if self._rows:
            for module in self._roped:
                self._replace(module, "rope", PerTokenRope(module.rope))
            for module in self._attentions if self.can_split else []:
                self._replace(module, "__class__", class_with(module, attention_in_parts))
        for module in mixers(self.model) if self._apart else []:
            self._replace(module, "__class__", class_apart(module))
        found = last_norm(self.model) if self.mode.cuts_head else None
        if found is not None:
            self._head = SomeRows(getattr(*found))
            self._replace(*found, self._head)

    def allocate(self, max_sequences: int, capacity: int, max_batch: int) -> None:
        """Make the cells again, and forget all sequences.

        `capacity`: tokens per sequence. `max_batch`: tokens per step.
        """
        self.cache.close()
        self._drop_caches()
        self.groups = self._make_groups()
        self.cache = joined(self.groups)
        self.cache.init(self._dtype, max_sequences, capacity, max_batch)

    @property
    def ways(self) -> list[str]:
        return [_way(view) for view in self._views]

    def caches(self, sequence: int) -> list[LayerCache]:
        return super().caches(sequence) + [view.cache_of(sequence) for view in self._apart]

    def forward(
        self, tokens: mx.array, batch: Batch, rows: Sequence[int], *, reserve: bool = False
    ) -> mx.array:
        """Return the unevaluated logits; see `Backend.forward`.

        `reserve`: let the row see every cell, and store nothing. If the pass raises an error, the
        layers that are apart are left as after `begin_forward`.
        """
        if reserve:
            return self._pass(tokens, batch, rows or [0], reserve=True)
        if not rows:
            self._pass(tokens, batch, [0])
            apart = [cache.state for view in self._apart for _, cache in view.groups]
            return marker([*apart, *(group.state for group in self.groups)])
        if ahead := self._ahead(batch, rows):
            # Both passes fit if one does: a pass that lacks cells raises, with nothing changed.
            self.cache.start_forward(batch)
            self.cache.undo_forward()
            self._pass(*_selected(tokens, batch, ahead), [0])
            # The second pass writes into the same buffers: while an attention of the first one is
            # to be computed, that would copy them.
            mx.eval([group.state for group in self.groups])
            tokens, batch = _selected(tokens, batch, rows)
            rows = range(len(rows))
        return self._pass(tokens, batch, rows)

    def _ahead(self, batch: Batch, rows: Sequence[int]) -> list[int]:
        """Return the tokens that run in a pass before that of `rows`, if such a pass is worth it.

        Nothing reads its logits, so that its last layer stores keys and values and computes no
        more.
        """
        without = len(batch) - len(rows)
        if without < AHEAD_TOKENS * len(self._views):
            return []
        wanted = set(rows)
        return [index for index in range(len(batch)) if index not in wanted]

    def first_layers(self, tokens: mx.array, batch: Batch, context: int) -> list[mx.array]:
        """Dispatch reserve passes. Return arrays that need a layer of each kind.

        `context`: most tokens of a sequence. Attention that can't be split sees every cell. If
        layers are apart, all of them run.
        """
        layers = getattr(self.model, "layers", ())
        if [row.layer for row in self._rows] == list(range(len(layers))):
            rows = zip(self._rows, layers, strict=True)
            kinds = [(row.group, shapes_of(layer)) for row, layer in rows]
            self.stops_at = max(map(kinds.index, kinds), default=-1) + 1
        passes: list[Sequence[Split | None]] = [[None] * len(self.groups)]
        if self.can_split and self.groups:
            each = [group.largest_splits(len(batch), context) for group in self.groups]
            passes = [*zip(*each, strict=True)]
        arrays: list[mx.array] = []
        try:
            for splits in passes:
                try:
                    arrays.append(self._pass(tokens, batch, [0], reserve=True, splits=splits))
                except Enough as enough:
                    arrays += enough.arrays
                mx.async_eval(arrays)  # type: ignore[no-untyped-call]  # before the next pass
        finally:
            self.stops_at = -1
        return arrays

    def _pass(
        self,
        tokens: mx.array,
        batch: Batch,
        rows: Sequence[int],
        *,
        reserve: bool = False,
        splits: Sequence[Split | None] | None = None,
    ) -> mx.array:
        where = batch.sequences, batch.positions
        plan = StepPlan.of(*where, in_stages=self.mode.stages) if self._apart else None
        if plan is not None and plan.order is not None:
            tokens, batch, rows = _sorted(plan.order, tokens, batch, rows)
        self.cache.start_forward(batch, reserve=reserve)
        self.is_reserving = reserve
        self.step.begin(batch)
        if splits is None:
            splits = [
                group.split(self.worth_splitting) if self.can_split else None
                for group in self.groups
            ]
        self.parts = [None if split is None else SplitAttention(split) for split in splits]
        self.masks_parts = [(reserve and self.can_split) or bool(parts) for parts in self.parts]
        is_all = list(rows) == list(range(len(batch)))
        with self._scratch() if reserve else nullcontext():
            return self._run(tokens, plan, None if is_all else mx.array(list(rows), mx.int32))

    def _run(self, tokens: mx.array, plan: StepPlan | None, wanted: mx.array | None) -> mx.array:
        """Return the `wanted` rows' logits (None: of all), after a pass in all layers apart."""
        if plan is not None:
            for view in self._apart:
                view.begin_forward(plan)
        if self._head is not None:
            self._head.rows = wanted
        try:
            logits: mx.array = self.model(tokens[None], cache=self._views).squeeze(0)
        finally:
            for row in self._rows:
                row.forget()
            if self._head is not None:
                self._head.rows = None
        if plan is not None:
            ended = [view.end_forward() for view in self._apart]
            mx.async_eval(ended)  # type: ignore[no-untyped-call]
        return logits if wanted is None or self._head is not None else logits[wanted]

    @contextmanager
    def _scratch(self) -> Iterator[None]:
        """Let a pass write to caches that are dropped afterwards, in place of all sequences'."""
        kept, self._caches = self._caches, {}
        try:
            yield
        finally:
            self._caches = kept

    def broken(self) -> set[int] | None:
        for row in self._rows:  # in a later layer, others have seen it
            group = self.groups[row.group]
            if (cells := group.broken(row.number)) is not None:
                return group.owners_of(cells)
        return None

    def forget(self) -> None:
        super().forget()
        for caches in self._caches.values():
            for cache in caches:
                cache.free()

    def state(self) -> list[Any]:
        """Return all buffers, to be evaluated."""
        return super().state() + [
            cache.state for caches in self._caches.values() for cache in caches
        ]

    def rotate(
        self, caches: Sequence[LayerCache], by: int
    ) -> Sequence[Callable[[Any, int], Any]] | None:
        """Return a function for each cache; those of cells move their keys by themselves."""
        ways = self._rotators(by)
        if ways is None or not self._apart:
            return ways and [lambda keys, by: keys for _ in caches]
        return None if self.groups or self._options.kv_bits else ways

    def close(self) -> None:
        """Restore the model. A second call, also after an interrupt, is allowed."""
        while self._wrapped:
            owner, name, inner = self._wrapped[-1]
            setattr(owner, name, inner)
            self._wrapped.pop()
        self.cache.close()
        self._drop_caches()

    def _drop_caches(self) -> None:
        """Drop the caches that are apart. Freed first, they and their stacks form no cycles."""
        for view in self._apart:
            view.groups = []
        for cache in (cache for caches in self._caches.values() for cache in caches):
            cache.free()
        self._caches.clear()

    def _make_group(self, window: int | None, memory: int | None) -> CausalCache:
        return CausalCache(shift=self._shift, window=window, memory=memory)

    def expect(
        self, sequence: int, count: int, *, may_copy: bool = False, beside: Sequence[int] = ()
    ) -> None:
        if self.can_split:
            for group in self.groups:
                group.expect(sequence, count, may_copy=may_copy, beside=beside)

    def _view(self, like: LayerCache, path: tuple[int, ...]) -> Any:
        """Return what the model gets in place of a cache that is like `like`.

        `path`: the index of the cache among the model's, and then those of parts.
        """
        if shares(like, self.mode.sharing):
            group = self._kinds.index(window_of(like))
            self._rows.append(LayerView(self, len(self._rows), path[0], group))
            return self._rows[-1]
        if falls_apart(like, self.mode.sharing):
            return [self._view(part, (*path, index)) for index, part in enumerate(like.parts)]
        self._paths.append(path)
        self._apart.append(view_of(self.step, partial(self._cache_of, path), like))
        return self._apart[-1]

    def _cache_of(self, path: tuple[int, ...], sequence: int) -> LayerCache:
        """Return a sequence's cache of one layer, or of a part of it."""
        if sequence not in self._caches:
            self._caches[sequence] = make_layer_caches(self.model, self._options)
        cache = self._caches[sequence][path[0]]
        for index in path[1:]:
            cache = cache.parts[index]
        return cache

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
                "this model's keys can't be moved to other positions: the kept tokens have "
                "to be evaluated again"
            )
        return ways[self._rows[layer].layer](keys, by)

    def _rotators(self, by: int) -> list[Rotate] | None:
        """Return how the keys of each layer of the model move; None if some can't."""
        if by not in self._rotations:
            self._rotations[by] = rotators(
                self.model, make_layer_caches(self.model, CacheOptions()), by
            )
        return self._rotations[by]


def _way(view: Any) -> str:
    if isinstance(view, list):
        return " and ".join(sorted(_way(part) for part in view))
    if isinstance(view, LayerView):
        return "row"
    return "stacked" if view.can_stack else "per sequence"


def _model_modules(model: Any) -> list[Any]:
    """Return all modules of the layers, once each."""
    layers = [layer for layer in getattr(model, "layers", []) if hasattr(layer, "modules")]
    return list({id(module): module for layer in layers for module in layer.modules()}.values())


def _selected(tokens: mx.array, batch: Batch, kept: Sequence[int]) -> tuple[mx.array, Batch]:
    """Return the step of some of the tokens."""
    part = Batch([batch.positions[i] for i in kept], [batch.sequences[i] for i in kept])
    return tokens[mx.array(list(kept))], part


def _sorted(
    order: list[int], tokens: mx.array, batch: Batch, rows: Sequence[int]
) -> tuple[mx.array, Batch, list[int]]:
    """Return the step with its tokens in `order`, and where the wanted rows are then."""
    places = {before: now for now, before in enumerate(order)}
    moved = replace(
        batch,
        positions=[batch.positions[index] for index in order],
        sequences=[batch.sequences[index] for index in order],
    )
    return tokens[mx.array(order)], moved, [places[row] for row in rows]


def _dtype(model: Any) -> mx.Dtype:
    """Return the type in which the model computes and its keys and values are stored."""
    logits: mx.array = model(mx.array([[1]]), cache=make_prompt_cache(model))
    return logits.dtype


class PerTokenRope(nn.Module):  # type: ignore[misc,name-defined]  # mlx.nn has no annotations
    """A rope that also takes one offset per token: `x [1, heads, n, head_dim]`, `offset [n]`.

    In a stack there is one offset per sequence, which the rope takes itself.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def __call__(self, x: mx.array, offset: Any = 0, **more: Any) -> mx.array:
        if isinstance(offset, int):
            alone: mx.array = self.inner(x, offset=offset, **more)
            return alone
        if isinstance(offset, Starts):
            offset = offset.positions
        is_row = isinstance(offset, mx.array) and offset.ndim == 1 and x.shape[0] == 1
        if not is_row or offset.size != x.shape[2]:
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


class Enough(BaseException):
    """Ends a pass after its first layers, and holds what the next layer would have stored."""

    def __init__(self, keys: mx.array, values: mx.array) -> None:
        self.arrays = keys, values


class LayerView:
    """One layer's part of the shared cells, in place of the layer's cache."""

    def __init__(self, step: BatchedModel, number: int, layer: int, group: int) -> None:
        """View layer `layer`, whose rows are the buffers `number` of its group."""
        self._step, self.number, self.layer, self.group = step, number, layer, group
        self._fetched: tuple[mx.array, mx.array] | None = None
        self._own = list[mx.array]()

    @property
    def offset(self) -> Any:
        """The position of each token, or of the first one of a step of one sequence."""
        return self._step.step.offset

    def make_mask(
        self, n: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        return self._step.groups[self.group].attention_mask(
            is_split=self._step.masks_parts[self.group], as_array=return_array
        )

    @property
    def parts(self) -> SplitAttention | None:
        """The parts in which this step computes its attention; None: one product."""
        return self._step.parts[self.group]

    def buffers(self) -> tuple[mx.array, mx.array]:
        """Return keys and values of all cells of the layer. Call it after the layer has written.

        In a reserve pass, too, they are not read before the layer has computed its own.
        """
        keys, values = self._step.groups[self.group].buffers()
        if self._own:
            keys, values = mx.depends([keys, values], self._own)
        return keys, values

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.layer == self._step.stops_at:
            raise Enough(keys, values)
        cache = self._step.groups[self.group]
        self._step.layer = self.layer
        cache.set_layer(self.number)
        cache.put(keys, values)
        self._fetched = cache.fetch()
        if self._step.is_reserving:
            self._own = [keys, values]
        return self._fetched

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return what `update_and_fetch` has returned, for layers that share this one's rows."""
        if self._fetched is None:
            raise ValueError("nothing was stored in this pass yet")
        return self._fetched

    def forget(self) -> None:
        """Drop what was fetched: a view of a buffer makes the next write copy the buffer."""
        self._fetched, self._own = None, []

    def is_plain(self, keys: mx.array, values: mx.array, mask: Any) -> bool:
        """Return True if an attention is over the rows as stored, under the mask as made.

        Latent attention (MLA) reads them in another form, and adds scores to the mask.
        """
        fetched = self._fetched
        if fetched is None or keys is not fetched[0] or values is not fetched[1]:
            return False
        return not isinstance(mask, mx.array) or mask.size == self.whole_mask.size

    @property
    def whole_mask(self) -> mx.array:
        """The mask of all queries and all cells, for attention that can't be split."""
        return self._step.groups[self.group].mask


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
        if parts is not None and cache.is_plain(keys, values, mask):
            return parts.attend(
                whole, queries, *cache.buffers(), scale=scale, sinks=sinks, cache=cache
            )
        if parts is not None and not isinstance(mask, mx.array):
            mask = cache.whole_mask
        more = {} if sinks is None else {"sinks": sinks}
        return whole(queries, keys, values, cache=cache, scale=scale, mask=mask, **more)

    return attend


Tree = Any
"""An array, or a tuple or list of trees; anything else is left as it is."""


class Stage(NamedTuple):
    """Tokens that some sequences of a group have at once: as many of each."""

    first: int
    """The first of these sequences. The others are all after it."""
    places: mx.array
    """The places of their tokens in the row."""
    num_tokens: int
    """Tokens of each of them."""
    starts: tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """Sequences side by side in the row, with ascending numbers of tokens in a step."""

    sequences: tuple[int, ...]
    counts: tuple[int, ...]
    begin: int
    starts: tuple[int, ...]
    """The position of the first token of each sequence."""

    @cached_property
    def end(self) -> int:
        return self.begin + sum(self.counts)

    @cached_property
    def singles(self) -> list[Group]:
        """One group for each sequence."""
        begins = accumulate(self.counts, initial=self.begin)
        parts = zip(self.sequences, self.counts, begins, self.starts, strict=False)
        return [Group((one,), (count,), begin, (start,)) for one, count, begin, start in parts]

    @cached_property
    def stages(self) -> list[Stage]:
        """The tokens of sequences of several lengths, as many of each at once."""
        begins = np.array([one.begin for one in self.singles])
        found, before = list[Stage](), 0
        for count in sorted(set(self.counts)):
            first = self.counts.index(count)
            places = begins[first:, None] + np.arange(before, count)
            starts = tuple(start + before for start in self.starts[first:])
            found.append(Stage(first, mx.array(places.reshape(-1)), count - before, starts))
            before = count
        return found

    @cached_property
    def order(self) -> mx.array:
        """The place of each token of the group among those of all stages."""
        places = np.concatenate([np.array(stage.places) for stage in self.stages])
        return mx.array(np.argsort(places))

    def take(self, row: mx.array, stage: Stage | None) -> mx.array:
        """Return tokens of a row: `[1, T, ...]` to `[sequences, count, ...]`."""
        own = row[:, self.begin : self.end] if stage is None else row[:, stage.places]
        count = self.counts[0] if stage is None else stage.num_tokens
        return own.reshape(-1, count, *row.shape[2:])

    def give(self, batches: Sequence[mx.array]) -> mx.array:
        """Return a part of a row: `[sequences, count, ...]` of each stage to `[1, tokens, ...]`."""
        rows = [batch.reshape(1, -1, *batch.shape[2:]) for batch in batches]
        return rows[0] if len(rows) == 1 else mx.concatenate(rows, axis=1)[:, self.order]


@dataclass(frozen=True)
class StepPlan:
    """The groups of a step, one after the other."""

    groups: list[Group]
    order: list[int] | None
    """The index that each token of the row had before it was sorted by group; None: the same."""
    tokens: int

    @classmethod
    def of(
        cls, sequences: Sequence[int], positions: Sequence[int], *, in_stages: bool = True
    ) -> StepPlan:
        """Plan a step of tokens of `sequences` at `positions`, ascending in each sequence.

        A group has answers, prompts that begin, or prompts that were begun. Unless the mixers run
        `in_stages`, all of it have as many tokens: there are states whose shape depends on that.
        """
        places: dict[int, list[int]] = {}
        for index, sequence in enumerate(sequences):
            places.setdefault(sequence, []).append(index)

        def kind(sequence: int) -> tuple[int, bool]:
            own = places[sequence]
            return min(len(own), 2) if in_stages else len(own), positions[own[0]] == 0

        # Sorted by number, a stack stays the same if requests come in another order.
        ascending = sorted(places, key=lambda one: (kind(one), len(places[one]), one))
        order: list[int] = []
        groups = []
        for _, found in groupby(ascending, key=kind):
            members = tuple(found)
            starts = tuple(positions[places[sequence][0]] for sequence in members)
            counts = tuple(len(places[sequence]) for sequence in members)
            groups.append(Group(members, counts, len(order), starts))
            order += [index for sequence in members for index in places[sequence]]
        is_sorted = order == list(range(len(order)))
        return cls(groups, None if is_sorted else order, len(order))


class Masks:
    """The masks that a view has made, one for each of its groups."""

    def __init__(self, masks: dict[tuple[int, ...], Any]) -> None:
        self._masks = masks

    def of(self, group: Group) -> Any:
        return self._masks[group.sequences]


@dataclass
class LayerStep:
    """Facts about the step under way, which all views of a model share."""

    adds_starts: bool = False
    """True if the model's body adds the number of a token in the row to a cache's offset."""
    tokens: int = 0
    offset: Any = 0
    """The offset that models read from a cache, as for one sequence: see `begin`."""

    def begin(self, batch: Batch) -> None:
        """Set the offset for the tokens of a step.

        In a step of one sequence the offset is a number, as in a model that is not adapted. Else it
        has the position of each token, or with `adds_starts` a start to which the token's number in
        the row is added.
        """
        self.tokens = len(batch)
        if batch.is_plain:
            self.offset = batch.positions[0]
            return
        positions = mx.array(list(batch.positions), mx.int32)
        self.offset = Starts(positions) if self.adds_starts else positions


class Starts:
    """Offsets that make the position of each token if its number in the row is added.

    mlx-lm's models take it for a number. A rope that takes one position per token reads them.
    """

    def __init__(self, positions: mx.array) -> None:
        self.positions = positions

    def __mlx_array__(self) -> mx.array:
        return self.positions - mx.arange(self.positions.size)


class PerSequenceLayer:
    """One layer's caches of all sequences, in place of the layer's cache."""

    def __init__(
        self, step: LayerStep, cache_of: Callable[[int], LayerCache], like: LayerCache
    ) -> None:
        """View one layer. `cache_of` returns its cache of a sequence, which is like `like`."""
        self.step, self.cache_of = step, cache_of
        self.can_stack = type(like) is RecurrentCache
        self.parts = [_CompositePart(self, index) for index in range(len(like.parts))]
        self.groups: list[tuple[Group, LayerCache | Stack]] = []
        """The groups in which the mixers of the layer run in this step, each with its cache."""

    def __getitem__(self, index: int) -> _CompositePart:
        """Return a part of a composite cache."""
        return self.parts[index]

    @property
    def offset(self) -> Any:
        """The offset for all tokens. Models may read it before their layers run."""
        return self.step.offset

    def begin_forward(self, plan: StepPlan) -> None:
        """Begin a pass in the caches of all sequences of `plan`."""
        self.groups = [pair for group in plan.groups for pair in self._run_as(group)]
        for _, cache in self.groups:
            cache.begin_forward()

    def end_forward(self) -> list[Any]:
        """End the pass, and return the arrays that it stored."""
        for group, cache in self.groups:
            if isinstance(cache, Stack):
                cache.end_forward(group.counts)
            else:
                cache.end_forward(group.counts[0])
        return [cache.state for _, cache in self.groups]

    def make_mask(self, n: int, **how: Any) -> Masks | None:
        """Return a mask for each group. Models call it before their layers run."""
        masks = {
            group.sequences: self.given(cache).make_mask(group.counts[-1], **how)
            for group, cache in self.groups
        }
        return Masks(masks) if any(mask is not None for mask in masks.values()) else None

    def given(self, cache: LayerCache | Stack) -> Any:
        """Return what a mixer gets for the sequences that `cache` belongs to."""
        return cache.model_cache

    def mask(self, mask: Any, group: Group, cache: LayerCache | Stack) -> Any:
        """Return the part of a mixer's `mask` that belongs to `group`."""
        if self.can_stack or mask is None:
            return None  # a recurrent layer has no mask of its own, and may be given another's
        if isinstance(mask, Masks):
            return mask.of(group)
        raise TypeError(f"a mask of type {type(mask).__name__} is for the row, not for a sequence")

    def _run_as(self, group: Group) -> Iterator[tuple[Group, LayerCache | Stack]]:
        caches: Any = [self.cache_of(sequence) for sequence in group.sequences]
        if len(caches) > 1 and self.can_stack and _can_stack(caches):
            yield group, Stack.of(caches)
        else:
            yield from zip(group.singles, caches, strict=True)


class Chunks(PerSequenceLayer):
    """A layer whose attention stays within chunks of the text.

    The model's body makes the mask of such a layer from the numbers in its cache. Here the body
    gets zeros, and each sequence gets a mask of its own later.
    """

    offset = start_position = 0

    def maybe_trim_front(self) -> None:
        for _, cache in self.groups:
            cache.model_cache.maybe_trim_front()

    def mask(self, mask: Any, group: Group, cache: LayerCache | Stack) -> Any:
        inner: ChunkedKVCache = cache.model_cache
        seen = mx.arange(inner.start_position, inner.offset + group.counts[0])
        own = mx.arange(inner.offset, inner.offset + group.counts[0])[:, None]
        return (seen // inner.chunk_size == own // inner.chunk_size) & (seen <= own)


class _CompositePart(PerSequenceLayer):
    """One part of a composite cache that runs as a whole."""

    def __init__(self, whole: PerSequenceLayer, index: int) -> None:
        self.step, self._whole, self._index = whole.step, whole, index
        self.can_stack = False

    @property
    def groups(self) -> list[tuple[Group, LayerCache | Stack]]:  # type: ignore[override]
        return self._whole.groups

    def given(self, cache: LayerCache | Stack) -> Any:
        return cache.model_cache[self._index]


def view_of(
    step: LayerStep, cache_of: Callable[[int], LayerCache], like: LayerCache
) -> PerSequenceLayer:
    """Return the view of a layer whose caches are like `like`."""
    inner = like.model_cache
    return (Chunks if type(inner) is ChunkedKVCache else PerSequenceLayer)(step, cache_of, like)


def mixers(model: Any) -> list[Any]:
    """Return the topmost modules that take a cache, inside of the layers and beside them."""
    found = [mixer for layer in model.layers for mixer in list(_below(layer)) or [layer]]
    within = {id(module) for layer in model.layers for module in layer.modules()}
    around = [
        module
        for module in model.modules()
        if id(module) not in within and within.isdisjoint(map(id, module.modules()))
    ]
    return found + [module for module in around if takes_cache(module)]


def _below(module: Any) -> Iterator[Any]:
    for child in _modules(list(module.children().values())):
        if takes_cache(child):
            yield child
        else:
            yield from _below(child)


def _modules(tree: Any) -> Iterator[Any]:
    """Yield the modules in nested lists and dicts."""
    if hasattr(tree, "children"):
        yield tree
    elif isinstance(tree, list | tuple | dict):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _modules(part)


def takes_cache(module: Any) -> bool:
    return "cache" in inspect.signature(type(module).__call__).parameters


def class_apart(module: Any) -> type:
    """Return a subclass of `module`'s class that runs once per group if it is given a view.

    Set it as the `__class__` of a mixer.
    """
    old = type(module)
    whole = old.__call__
    names = list(inspect.signature(whole).parameters)[1:]

    def call(self: Any, *args: Any, **more: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | more
        view = next(
            (value for value in given.values() if isinstance(value, PerSequenceLayer)), None
        )
        if view is None:
            return whole(self, *args, **more)
        results = [
            [
                whole(self, **{name: _part(view, name, given[name], *run) for name in given})
                for run in _runs(view, *pair)
            ]
            for pair in view.groups
        ]
        return _joined(view, results)

    return type(old.__name__, (old,), {"__call__": call, "__module__": old.__module__})


Run = tuple[Group, Stage | None, Any, Any]
"""A group, a stage of it (None: the whole of it), its cache, and what a mixer gets in its place."""


def _runs(view: PerSequenceLayer, group: Group, cache: LayerCache | Stack) -> Iterator[Run]:
    """Yield what runs at once, one after the other: each begins with the states of the last."""
    if group.counts[0] == group.counts[-1]:
        yield group, None, cache, view.given(cache)
        return
    assert isinstance(cache, Stack)
    firsts = [stage.first for stage in group.stages]
    for stage, part in zip(group.stages, cache.stages(firsts), strict=True):  # ends both
        yield group, stage, cache, part


def _part(
    view: PerSequenceLayer,
    name: str,
    value: Any,
    group: Group,
    stage: Stage | None,
    cache: Any,
    given: Any,
) -> Any:
    """Return the part of a mixer's argument that belongs to a run."""
    if isinstance(value, PerSequenceLayer):
        return given
    if name == "mask" or isinstance(value, Masks):
        return view.mask(value, group, cache)
    if value is view.step.offset:
        starts = group.starts if stage is None else stage.starts
        return starts[0] if len(starts) == 1 else mx.array(starts, mx.int32)
    return _mapped(lambda array: _taken(view, name, array, group, stage), value)


def _taken(
    view: PerSequenceLayer, name: str, array: mx.array, group: Group, stage: Stage | None
) -> mx.array:
    if array.ndim < 2 or array.shape[:2] != (1, view.step.tokens):
        raise TypeError(f"{name}: an array of shape {array.shape} is not a row of tokens")
    return group.take(array, stage)


def _joined(view: PerSequenceLayer, results: list[list[Tree]]) -> Tree:
    """Return results of all groups, which have the same structure, as rows."""
    first = results[0][0]
    if isinstance(first, tuple | list):
        parts = [[[tree[at] for tree in own] for own in results] for at in range(len(first))]
        return type(first)(_joined(view, part) for part in parts)
    if not isinstance(first, mx.array):
        return first
    rows = [group.give(own) for (group, _), own in zip(view.groups, results, strict=True)]
    return rows[0] if len(rows) == 1 else mx.concatenate(rows, axis=1)


def _mapped(function: Callable[[mx.array], mx.array], tree: Tree) -> Tree:
    if isinstance(tree, mx.array):
        return function(tree)
    if isinstance(tree, tuple | list):
        return type(tree)(_mapped(function, part) for part in tree)
    return tree


def _can_stack(caches: Sequence[RecurrentCache]) -> bool:
    stack = caches[0].stack
    if stack is not None and stack.is_whole and stack.members == caches:
        return True
    shapes = {cache.shape for cache in caches}
    return len(shapes) == 1 and None not in shapes
