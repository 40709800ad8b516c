"""Run the layers whose caches are no rows of shared cells.

Each sequence has layer caches of its own for them. Everything around such a layer's mixer runs once
over the row; the mixer runs once for each sequence. Recurrent mixers run once for all sequences
that have as many tokens in a step: their states are a batch then (`cache.layers.recurrent.Stack`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ChunkedKVCache

from mlxrunner.cache.layers.protocol import LayerCache
from mlxrunner.cache.layers.recurrent import RecurrentCache, Stack
from mlxrunner.cache.pool.interface import Batch

Tree = Any
"""An array, or a tuple or list of trees; anything else is left as it is."""


@dataclass(frozen=True)
class Group:
    """Sequences that have `count` tokens each in a step, side by side in the row."""

    sequences: tuple[int, ...]
    count: int
    begin: int
    starts: tuple[int, ...]
    """The position of the first token of each sequence."""

    @property
    def end(self) -> int:
        return self.begin + self.count * len(self.sequences)

    def singles(self) -> Iterator[Group]:
        """Yield one group for each sequence."""
        for index, (sequence, start) in enumerate(zip(self.sequences, self.starts, strict=True)):
            yield Group((sequence,), self.count, self.begin + index * self.count, (start,))

    def take(self, row: mx.array) -> mx.array:
        """Return this group's tokens of a row: `[1, T, ...]` to `[sequences, count, ...]`."""
        own = row[:, self.begin : self.end]
        return own.reshape(len(self.sequences), self.count, *row.shape[2:])

    def give(self, batch: mx.array) -> mx.array:
        """Return a part of a row: `[sequences, count, ...]` to `[1, tokens, ...]`."""
        return batch.reshape(1, -1, *batch.shape[2:])


@dataclass(frozen=True)
class StepPlan:
    """The groups of a step, one behind the other."""

    groups: list[Group]
    order: list[int] | None
    """The index that each token of the row had before it was sorted by group; None: the same."""
    tokens: int

    @classmethod
    def of(cls, sequences: Sequence[int], positions: Sequence[int]) -> StepPlan:
        """Plan a step of tokens of `sequences` at `positions`, ascending in each sequence."""
        places: dict[int, list[int]] = {}
        for index, sequence in enumerate(sequences):
            places.setdefault(sequence, []).append(index)
        # Sorted by number, a stack stays the same if requests come in another order.
        by_count = sorted(places, key=lambda sequence: (len(places[sequence]), sequence))
        order: list[int] = []
        groups = []
        for count, found in groupby(by_count, key=lambda sequence: len(places[sequence])):
            members = tuple(found)
            starts = tuple(positions[places[sequence][0]] for sequence in members)
            groups.append(Group(members, count, len(order), starts))
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
            cache.end_forward(group.count)
        return [cache.state for _, cache in self.groups]

    def make_mask(self, n: int, **how: Any) -> Masks | None:
        """Return a mask for each group. Models call it before their layers run."""
        masks = {
            group.sequences: self.given(cache).make_mask(group.count, **how)
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
            yield from zip(group.singles(), caches, strict=True)


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
        seen = mx.arange(inner.start_position, inner.offset + group.count)
        own = mx.arange(inner.offset, inner.offset + group.count)[:, None]
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
            whole(self, **{name: _part(view, name, given[name], *pair) for name in given})
            for pair in view.groups
        ]
        return _joined(view, results)

    return type(old.__name__, (old,), {"__call__": call, "__module__": old.__module__})


def _part(
    view: PerSequenceLayer, name: str, value: Any, group: Group, cache: LayerCache | Stack
) -> Any:
    """Return the part of a mixer's argument that belongs to `group`."""
    if isinstance(value, PerSequenceLayer):
        return value.given(cache)
    if name == "mask" or isinstance(value, Masks):
        return view.mask(value, group, cache)
    if value is view.step.offset:
        return group.starts[0] if len(group.starts) == 1 else mx.array(group.starts, mx.int32)
    return _mapped(lambda array: _taken(view, name, array, group), value)


def _taken(view: PerSequenceLayer, name: str, array: mx.array, group: Group) -> mx.array:
    if array.ndim < 2 or array.shape[:2] != (1, view.step.tokens):
        raise TypeError(f"{name}: an array of shape {array.shape} is not a row of tokens")
    return group.take(array)


def _joined(view: PerSequenceLayer, results: list[Tree]) -> Tree:
    """Return results of all groups, which have the same structure, as rows."""
    if isinstance(results[0], tuple | list):
        return type(results[0])(_joined(view, list(parts)) for parts in zip(*results, strict=True))
    if not isinstance(results[0], mx.array):
        return results[0]
    rows = [group.give(part) for (group, _), part in zip(view.groups, results, strict=True)]
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
