"""Write and read the files of parked conversations (`mlxrunner.stored.parked` describes them)."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrunner.cache.layers.protocol import LayerCache
from mlxrunner.cache.saved import Saved, SavedCheckpoint, Unread, dtype_name, mismatch
from mlxrunner.cache.tokens import TokenArray
from mlxrunner.errors import SessionError
from mlxrunner.stored.entry import Packer, read_layer, stored_layer
from mlxrunner.stored.folder import Folder
from mlxrunner.stored.host import View, from_host, host_type
from mlxrunner.stored.parked import Parked, Rows, State
from mlxrunner.stored.tensors import Source, TensorFile, file_size, writing

OPEN = 64
"""Most files that are kept open while a conversation is read."""

Structure = Mapping[str, Any]
"""A layer as JSON: its kind, and one of three things that it may be.

"rows": type and shape of each array with a row per token, with 0 for the number of rows. "within":
the layers of a composite layer. Else "arrays", "numbers" and "parts", as in a session.
"""


class Layers:
    """The layers of an entry, divided into those with a row per token and all others."""

    def __init__(self, caches: Sequence[LayerCache], saved: Sequence[Saved], tokens: int) -> None:
        """Divide `caches` with `tokens` tokens. `saved`: what they export, at least outlined."""
        self._tokens = tokens
        self._rows: dict[str, LayerCache] = {}
        self._like: dict[str, dict[str, tuple[str, list[int]]]] = {}
        self._states, self._num_states = Packer(View), 0
        self.can_be_cut = True
        """False if a layer has no rows and no checkpoints."""
        self.structure: list[Structure] = [
            self._layer(str(index), *pair)
            for index, pair in enumerate(zip(caches, saved, strict=True))
        ]

    @property
    def has_rows(self) -> bool:
        return bool(self._rows)

    @property
    def has_only_rows(self) -> bool:
        return self.has_rows and self._num_states == 0

    @property
    def states(self) -> Mapping[str, Source]:
        """The arrays of the layers without rows, by name."""
        return self._states.arrays

    def rows(self, begin: int, end: int) -> dict[str, Source]:
        """Return the rows of the tokens `begin .. end - 1`, by the name of their array.

        They are copied when the first of them is written.
        """
        return {
            f"{path}.{name}": _Row(copied, name, dtype, tuple(shape))
            for path, cache in self._rows.items()
            for copied in [_Copied(cache, begin, end)]
            for name, (dtype, shape) in self._like[path].items()
        }

    def _layer(self, path: str, cache: LayerCache, saved: Saved) -> Structure:
        if cache.parts and len(cache.parts) == len(saved.parts):
            pairs = enumerate(zip(cache.parts, saved.parts, strict=True))
            within = [self._layer(f"{path}.{index}", *pair) for index, pair in pairs]
            return {"kind": saved.kind, "within": within}
        if not cache.has_plain_rows and (
            cache.needs_checkpoints or not _has_rows(saved, self._tokens)
        ):
            self._num_states += 1
            self.can_be_cut = self.can_be_cut and cache.needs_checkpoints
            return self._states.layer(path, saved)
        self._rows[path] = cache
        self._like[path] = {
            name: (dtype_name(array.dtype), [*array.shape[:2], 0, *array.shape[3:]])
            for name, array in saved.arrays.items()
        }
        return {
            "kind": saved.kind,
            "rows": {name: list(about) for name, about in self._like[path].items()},
        }


class _Copied:
    """Some rows of a layer, copied when they are first asked for."""

    def __init__(self, cache: LayerCache, begin: int, end: int) -> None:
        self._cache, self.begin, self.end = cache, begin, end

    @cached_property
    def arrays(self) -> Mapping[str, mx.array]:
        return self._cache.export_rows(self.begin, self.end).arrays


@dataclass(frozen=True)
class _Row:
    """One array of some rows of a layer, to be written."""

    copied: _Copied
    name: str
    dtype: str
    like: tuple[int, ...]
    """Its shape, with 0 for the number of rows."""

    @property
    def shape(self) -> Sequence[int]:
        return (*self.like[:2], self.copied.end - self.copied.begin, *self.like[3:])

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * host_type(self.dtype).itemsize

    @property
    def data(self) -> memoryview:
        return View(self.copied.arrays[self.name]).data


def _has_rows(saved: Saved, tokens: int) -> bool:
    arrays = saved.arrays.values()
    only_arrays = bool(arrays) and not saved.numbers and not saved.parts
    return only_arrays and all(len(one.shape) > 2 and one.shape[2] == tokens for one in arrays)


def checkpoint_file(name: str, item: SavedCheckpoint) -> Unwritten:
    """Return the file of a checkpoint."""
    packer = Packer(View)
    layers = [
        None if layer is None else packer.layer(str(index), layer)
        for index, layer in enumerate(item.layers)
    ]
    return Unwritten(name, packer.arrays, {"layers": layers})


@dataclass(frozen=True)
class Unwritten:
    """A file that is to be written."""

    name: str
    arrays: Mapping[str, Source]
    about: Mapping[str, Any] = field(default_factory=dict)
    """The file's description of itself, for JSON."""

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes."""
        return file_size(self.arrays, self._metadata)

    def writing(self, folder: Folder) -> Iterator[None]:
        """Write the file, and yield after each array. Raise OSError if that fails.

        It is not forced to the disk: what a power cut damages is found by its checksums.
        """
        with folder.replacing(self.name, sync=False) as fd:
            yield from writing(fd, self.arrays, self._metadata)

    @property
    def _metadata(self) -> dict[str, str]:
        return {"name": self.name, "about": json.dumps(self.about)}


class Reader:
    """Reads the files of one folder, and keeps a few of them open.

    `on_damage` is called with the name of the first file that is missing or damaged. Then a
    SessionError is raised.
    """

    def __init__(self, folder: Folder, on_damage: Callable[[str], None]) -> None:
        self._folder, self._on_damage = folder, on_damage
        self._open: OrderedDict[str, TensorFile] = OrderedDict()
        self._is_damaged = False

    @contextmanager
    def file(self, name: str) -> Iterator[TensorFile]:
        """Yield the open file `name`; an error in the block counts as damage of the file."""
        try:
            yield self._file(name)
        except (SessionError, OSError, LookupError, TypeError, ValueError, RecursionError) as error:
            if self._is_damaged:
                raise
            self._is_damaged = True
            self._on_damage(name)
            said = " ".join(str(error).split())[:200]
            raise SessionError(f"{name} is missing or damaged: {said}") from error

    def about(self, name: str) -> dict[str, Any]:
        """Return what a file says about itself."""
        with self.file(name) as file:
            return dict(json.loads(file.metadata["about"]))

    def _file(self, name: str) -> TensorFile:
        folder = self._folder
        file = self._open.pop(name, None) or TensorFile(folder.open(name))
        if not file.is_sealed or file.metadata.get("name") != name:
            raise SessionError("it has another name, or no checksum")
        self._open[name] = file
        if len(self._open) > OPEN:
            self._open.popitem(last=False)
        return file


@dataclass(frozen=True)
class Joined:
    """An array whose rows are in several files."""

    reader: Reader
    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Sequence[tuple[Rows, int]]
    """The files, and where the use of each ends."""
    first: int = 0
    """The token of the first row."""

    def read(self) -> mx.array:
        host = np.empty(self.shape, host_type(self.dtype))
        for piece, end in self.pieces:
            with self.reader.file(piece.name) as file:
                stored = file.arrays[self.name]
                shape = (*self.shape[:2], piece.end - piece.begin, *self.shape[3:])
                if (stored.dtype, stored.shape) != (self.dtype, shape):
                    raise SessionError(f"{self.name} is {stored.dtype} {list(stored.shape)}")
                into = host[:, :, piece.begin - self.first : end - self.first]
                if end == piece.end:
                    stored.read_into(_views(into))
                else:
                    whole = np.empty(shape, host.dtype)
                    stored.read_into(_views(whole))
                    into[:] = whole[:, :, : end - piece.begin]
        return from_host(host, self.dtype)


def _views(array: np.ndarray[Any, Any]) -> list[memoryview]:
    """Return the bytes of an array whose slices along the first two axes are contiguous."""
    return [array[index].reshape(-1).view(np.uint8).data for index in np.ndindex(array.shape[:2])]


class Restored:
    """A `SavedEntry` that reads a parked conversation, layer by layer.

    It has all tokens, or those before a checkpoint, or any number if all layers have rows. Reading
    raises SessionError if a file is missing or damaged.
    """

    def __init__(
        self, parked: Parked, upto: int | None, reader: Reader, outline: Sequence[Saved] | None
    ) -> None:
        self.parked, self.is_exact = parked, parked.is_exact
        self._reader, self._outline = reader, outline
        self._state: State | None = None
        self._length = len(parked.tokens)
        upto = self._length if upto is None else min(upto, self._length)
        if upto < self._length and parked.has_only_rows:
            self._length = upto
        elif upto < parked.lowest:
            self._state = parked.checkpoint(upto)
            self._length = 0 if self._state is None else self._state.offset

    @property
    def tokens(self) -> TokenArray:
        return self.parked.tokens[: self._length]

    @property
    def layers(self) -> Iterator[Saved | Unread]:
        """The layers, each read when it is reached, or when its rows are asked for."""
        for index, found in enumerate(self._reader.about(self.parked.name)["layers"]):
            if "rows" in found:
                yield _Unread(self, index, found)
            elif self._state is None:
                yield self._read(index, found, None)
            else:
                with self._reader.file(self._state.name) as file:
                    layer = self._read(index, found, self._kept(file)[index])
                yield layer

    def _read(self, index: int, found: Structure, kept: Saved | None) -> Saved:
        """Read a layer. `kept`: that layer in the checkpoint, if one takes the place of the end."""
        with self._reader.file(self.parked.name) as head:
            layer = self._layer(head, str(index), found, kept)
            self._check(index, layer, self._length)
            return read_layer(layer)

    def read_rows(self, index: int, found: Structure) -> Saved:
        """Read all rows of a layer."""
        return self._read(index, found, None)

    def read_pieces(self, index: int, found: Structure) -> Iterator[Saved | None]:
        """Read the rows of a layer file by file. None comes after each array."""
        for piece, end in self.parked.used(self._length):
            with self._reader.file(self.parked.name):
                layer = self._rows(str(index), found, [(piece, end)])
                self._check(index, layer, end - piece.begin)
            arrays = {}
            for name, array in layer.arrays.items():
                with self._reader.file(self.parked.name):
                    arrays[name] = array.read()
                yield None
            yield Saved(layer.kind, arrays)

    def _check(self, index: int, layer: Saved, tokens: int) -> None:
        like = None if self._outline is None else self._outline[index]
        if like is not None and (why := mismatch(layer, like, tokens)):
            raise SessionError(why)

    def _rows(self, path: str, found: Structure, pieces: Sequence[tuple[Rows, int]]) -> Saved:
        """Return a layer with the rows in `pieces`, not read yet."""
        first, end = pieces[0][0].begin if pieces else 0, pieces[-1][1] if pieces else 0
        return Saved(
            found["kind"],
            {
                name: Joined(
                    self._reader,
                    f"{path}.{name}",
                    dtype,
                    (*shape[:2], end - first, *shape[3:]),
                    pieces,
                    first,
                )
                for name, (dtype, shape) in found["rows"].items()
            },
        )

    @property
    def checkpoints(self) -> Iterator[SavedCheckpoint]:
        """The checkpoints, each read when it is reached."""
        for state in self.parked.states:
            if state.offset <= self._length:
                with self._reader.file(state.name) as file:
                    kept = [layer and read_layer(layer) for layer in self._kept(file)]
                yield SavedCheckpoint(state.offset, state.role, kept)

    def _kept(self, file: TensorFile) -> list[Saved | None]:
        """Return the layers in the file of a checkpoint, not read yet."""
        return [
            None if found is None else stored_layer(file, str(index), found)
            for index, found in enumerate(json.loads(file.metadata["about"])["layers"])
        ]

    def _layer(self, head: TensorFile, path: str, found: Structure, kept: Saved | None) -> Saved:
        """Return a layer, not read yet. `kept`: the layer in the checkpoint in its place."""
        if "rows" in found:
            return self._rows(path, found, self.parked.used(self._length))
        if "within" in found:
            parts = [
                self._layer(head, f"{path}.{index}", part, kept and kept.parts[index])
                for index, part in enumerate(found["within"])
            ]
            return Saved(found["kind"], parts=parts)
        return stored_layer(head, path, found) if self._state is None else _required(kept)


@dataclass(frozen=True)
class _Unread:
    """A layer with rows, in its files."""

    entry: Restored
    index: int
    found: Structure

    def read(self) -> Saved:
        return self.entry.read_rows(self.index, self.found)

    def pieces(self) -> Iterator[Saved | None]:
        return self.entry.read_pieces(self.index, self.found)


def _required(kept: Saved | None) -> Saved:
    if kept is None:
        raise SessionError("a checkpoint lacks a layer")
    return kept
