"""What an entry holds, as plain data for files: arrays by name, and numbers. No tensors: arrays are known by `shape` and `dtype` only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mlxrunner.cache.checkpoints import Role
from mlxrunner.cache.tokens import TokenArray

ROWS = ("full", "quantized", "sliding")
"""Kinds that store a row per token, and no more."""
STATES = "recurrent"
"""The kind whose arrays have no rows: as a rule, their shape does not depend on the number of tokens."""


@dataclass(frozen=True)
class Saved:
    """One layer, or one checkpoint of it, cut to what counts: nothing that was trimmed is in it.

    `arrays`: keys and values are `[1, kv_heads, rows, ...]`. As a layer gives them they are views of its buffers, to be copied before
    the next forward pass. `numbers`: what else a cache of mlx-lm keeps. `parts`: the layers within a composite one.
    """

    kind: str
    arrays: Mapping[str, Any] = field(default_factory=dict)
    numbers: Mapping[str, Any] = field(default_factory=dict)
    parts: Sequence[Saved] = ()


@dataclass(frozen=True)
class Shape:
    """An array without its content; None for an axis that depends on the number of tokens. `may_lack`: it comes with later tokens only."""

    dtype: str
    shape: tuple[int | None, ...]
    may_lack: bool = False


@dataclass(frozen=True)
class SavedCheckpoint:
    """`layers`: one per layer, None for a layer that needs none."""

    offset: int
    role: Role | None
    layers: Sequence[Saved | None]


class SavedEntry(Protocol):
    """An entry that can be taken over: read from its file a layer at a time, as it is iterated over."""

    @property
    def tokens(self) -> TokenArray: ...

    @property
    def layers(self) -> Iterable[Saved]: ...

    @property
    def checkpoints(self) -> Iterable[SavedCheckpoint]: ...

    @property
    def is_exact(self) -> bool: ...


@dataclass(frozen=True)
class Exported:
    """An entry as it is now. `is_exact`: a cold run on its tokens would store the same, which a shift or fewer bits undo."""

    tokens: TokenArray
    layers: Sequence[Saved]
    checkpoints: Sequence[SavedCheckpoint]
    is_exact: bool = True


def mismatch(saved: Saved, like: Saved, tokens: int) -> str | None:
    """Why `saved`, of so many tokens, can't be a layer that is `like` this outline of one; None where it can."""
    if not (saved.arrays or saved.numbers or saved.parts):
        return None  # of a checkpoint: a part that needs none
    if saved.kind != like.kind or len(saved.parts) != len(like.parts):
        return f"a layer is of the kind {saved.kind!r:.40} instead of {like.kind!r}"
    lacking = {
        name
        for name, expected in like.arrays.items()
        if name not in saved.arrays and not expected.may_lack
    }
    empty = {
        name
        for name, expected in like.arrays.items()
        if expected.may_lack and saved.numbers.get(name, "") is None
    }
    if (
        lacking
        or set(saved.arrays) - set(like.arrays)
        or set(saved.numbers) - empty != set(like.numbers)
    ):
        return f"a {like.kind} layer lacks a part, or has one too many"
    for name, found in saved.arrays.items():
        expected = like.arrays[name]
        shapes = [_without_rows(like.kind, array.shape) for array in (found, expected)]
        too_many = like.kind in ROWS and len(found.shape) == 4 and found.shape[2] > tokens
        if too_many or not _fits(*shapes) or dtype_name(found.dtype) != dtype_name(expected.dtype):
            return (
                f"the {name} of a {like.kind} layer are {dtype_name(found.dtype)} {list(found.shape)}, "
                f"which does not go with {dtype_name(expected.dtype)} {list(expected.shape)} and {tokens} tokens"
            )
    for name, number in like.numbers.items():
        if type(saved.numbers[name]) is not type(number) or (
            isinstance(number, int) and not 0 <= saved.numbers[name] < 2**31
        ):
            return f"a number of a {like.kind} layer is {saved.numbers[name]!r:.50}"
    return next(
        (
            found
            for part in zip(saved.parts, like.parts, strict=True)
            if (found := mismatch(*part, tokens))
        ),
        None,
    )


def shapes(saved: Saved) -> Saved:
    """The same without any content, and without what that would keep alive."""
    arrays = {
        name: Shape(dtype_name(array.dtype), tuple(array.shape))
        for name, array in saved.arrays.items()
    }
    return Saved(saved.kind, arrays, saved.numbers, [shapes(part) for part in saved.parts])


def combined(found: Sequence[Saved]) -> Saved:
    """The outline of a layer from its `shapes` after several numbers of tokens: axes that are not the same stand open, and what is an
    array in some and nothing in others may lack."""
    first = found[0]
    names = dict.fromkeys(name for one in found for name in one.arrays)
    numbers = {name: value for name, value in first.numbers.items() if name not in names}
    parts = [combined(parts) for parts in zip(*(one.parts for one in found), strict=True)]
    return Saved(
        first.kind,
        {name: _common([one.arrays.get(name) for one in found]) for name in names},
        numbers,
        parts,
    )


def _common(found: Sequence[Shape | None]) -> Shape:
    there = [shape for shape in found if shape is not None]
    open_axes = [
        axis[0] if len(set(axis)) == 1 else None
        for axis in zip(*(shape.shape for shape in there), strict=True)
    ]
    return Shape(there[0].dtype, tuple(open_axes), may_lack=len(there) < len(found))


def _fits(shape: Sequence[int | None], expected: Sequence[int | None]) -> bool:
    return len(shape) == len(expected) and all(
        size is None or size == one for one, size in zip(shape, expected, strict=True)
    )


def outline(saved: Saved) -> list[Any]:
    """What is the same for any number of tokens, for comparing formats: kind, names, types, shapes."""
    arrays = {
        name: [dtype_name(array.dtype), _without_rows(saved.kind, array.shape)]
        for name, array in saved.arrays.items()
    }
    return [saved.kind, arrays, sorted(saved.numbers), [outline(part) for part in saved.parts]]


def dtype_name(dtype: Any) -> str:
    """ "float32" of "float32" and of mlx.core.float32."""
    return str(dtype).rpartition(".")[2]


def _without_rows(kind: str, shape: Sequence[int | None]) -> list[int | None]:
    """A shape in which the number of rows stands open."""
    return [
        None if axis == 2 and len(shape) == 4 and kind != STATES else size
        for axis, size in enumerate(shape)
    ]
