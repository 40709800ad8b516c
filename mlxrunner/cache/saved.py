"""The form of layers and entries outside of their caches: in files, and while they are moved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from mlxrunner.cache.entry import Role, TokenArray

ROWS = ("full", "quantized", "sliding")
"""Saved kinds with at most one row per token.

A file with more rows is refused before its arrays are read.
"""
STATES = ("recurrent",)
"""Saved kinds whose arrays have no rows. Of others, an array of four axes has rows on the third."""
QUANTIZABLE = ("full", "sliding")
"""Saved kinds whose keys and values a file may store in fewer bits; it would harm other states."""


@dataclass(frozen=True)
class Saved:
    """One layer, or one checkpoint of it, without trimmed rows."""

    kind: str
    arrays: Mapping[str, Any] = field(default_factory=dict)
    """Arrays by name; keys and values are `[1, kv_heads, rows, ...]`.

    The arrays that a layer returns are views of its buffers. Copy them before the next forward
    pass.
    """
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """The other values that a cache of mlx-lm keeps, by name."""
    parts: Sequence[Saved] = ()
    """The layers within a composite one."""


class Unread(Protocol):
    """A layer in a file. Its rows may be taken over one piece after the other."""

    def read(self) -> Saved:
        """Read the whole layer."""

    def pieces(self) -> Iterator[Saved | None]:
        """Read the layer piece by piece, from the first row on. None: a piece is not complete."""


@dataclass(frozen=True)
class ArrayShape:
    """An array without its content."""

    dtype: str
    shape: tuple[int | None, ...]
    """The sizes of the axes; None for an axis that depends on the number of tokens."""
    may_lack: bool = False
    """True if the array exists only after later tokens."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint of an entry."""

    offset: int
    role: Role | None
    layers: Sequence[Saved | None]
    """One per layer; None for a layer that needs no checkpoint."""


class SavedEntry(Protocol):
    """An entry that can be taken over. Iterating reads it from its file, one layer at a time."""

    @property
    def tokens(self) -> TokenArray: ...

    @property
    def layers(self) -> Iterable[Saved | Unread]: ...

    @property
    def checkpoints(self) -> Iterable[SavedCheckpoint]: ...

    @property
    def is_exact(self) -> bool: ...


@dataclass(frozen=True, eq=False)
class Exported:
    """An entry, or a part of one, as it is now."""

    tokens: TokenArray
    layers: Sequence[Saved]
    checkpoints: Sequence[SavedCheckpoint]
    is_exact: bool = True
    """True if a cold run on its tokens would store the same: not after a shift."""


def mismatch(saved: Saved, like: Saved, tokens: int) -> str | None:
    """Return the reason why `saved` can't be a layer with the outline `like`; None if it can.

    `tokens`: the number of tokens in `saved`.
    """
    if not (saved.arrays or saved.numbers or saved.parts):
        return None  # a part that needs no checkpoint
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
            here, there = (
                f"{dtype_name(array.dtype)} {list(array.shape)}" for array in (found, expected)
            )
            return (
                f"the {name} of a {like.kind} layer are {here}, "
                f"which does not go with {there} and {tokens} tokens"
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
    """Return the shapes of `saved`, without references to its arrays."""
    arrays = {
        name: ArrayShape(dtype_name(array.dtype), tuple(array.shape))
        for name, array in saved.arrays.items()
    }
    return Saved(saved.kind, arrays, saved.numbers, [shapes(part) for part in saved.parts])


def combined(found: Sequence[Saved]) -> Saved:
    """Return the outline of a layer from its `shapes` after several numbers of tokens.

    Axes whose sizes differ are None. An array that is missing in some of `found` may lack.
    """
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


def _common(found: Sequence[ArrayShape | None]) -> ArrayShape:
    there = [shape for shape in found if shape is not None]
    open_axes = [
        axis[0] if len(set(axis)) == 1 else None
        for axis in zip(*(shape.shape for shape in there), strict=True)
    ]
    return ArrayShape(there[0].dtype, tuple(open_axes), may_lack=len(there) < len(found))


def _fits(shape: Sequence[int | None], expected: Sequence[int | None]) -> bool:
    return len(shape) == len(expected) and all(
        size is None or size == one for one, size in zip(shape, expected, strict=True)
    )


def outline(saved: Saved) -> list[Any]:
    """Return the properties that don't depend on the number of tokens.

    These are the kind, the names, the types and the shapes.
    """
    arrays = {
        name: [dtype_name(array.dtype), _without_rows(saved.kind, array.shape)]
        for name, array in saved.arrays.items()
    }
    return [saved.kind, arrays, sorted(saved.numbers), [outline(part) for part in saved.parts]]


def dtype_name(dtype: Any) -> str:
    """Return "float32" for "float32" and for mlx.core.float32."""
    return str(dtype).rpartition(".")[2]


def _without_rows(kind: str, shape: Sequence[int | None]) -> list[int | None]:
    """Return `shape` with None for the number of rows."""
    return [
        None if axis == 2 and len(shape) == 4 and kind not in STATES else size
        for axis, size in enumerate(shape)
    ]
