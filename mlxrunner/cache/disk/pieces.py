"""Write conversations and entries as files of tensors, and read them: arrays, layers, pieces."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlxrunner.cache.disk.index import RowsPiece, StatePiece, StoredConversation, digests, file_name
from mlxrunner.cache.entry import Role, TokenArray, as_tokens, role_named
from mlxrunner.cache.protocol import LayerCache
from mlxrunner.cache.saved import (
    QUANTIZABLE,
    Exported,
    Saved,
    SavedCheckpoint,
    Unread,
    dtype_name,
    mismatch,
)
from mlxrunner.errors import PromptError, SessionError
from mlxrunner.pictures.table import Picture, PictureNames, renumbered
from mlxrunner.system.folders import Folder
from mlxrunner.system.tensorfile import (
    ArraySource,
    Buffer,
    StoredArray,
    TensorFile,
    file_size,
    write,
)


@dataclass(frozen=True)
class LazyArray:
    """An array of MLX to write soon, copied when its bytes are asked for, and only if need be."""

    array: mx.array

    @property
    def dtype(self) -> str:
        return dtype_name(self.array.dtype)

    @property
    def shape(self) -> Sequence[int]:
        return self.array.shape

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    @property
    def data(self) -> memoryview:
        raw = self.array.view(mx.uint16) if self.array.dtype == mx.bfloat16 else self.array
        return np.ascontiguousarray(np.asarray(raw)).reshape(-1).view(np.uint8).data


def host_type(dtype: str) -> np.dtype[Any]:
    """Return numpy's type for the bytes of an array of MLX's type `dtype`."""
    return np.dtype(np.uint16 if dtype == "bfloat16" else dtype)


def from_host(host: NDArray[Any], dtype: str) -> mx.array:
    """Return the array of MLX's type `dtype` whose bytes are in `host`, of `host_type(dtype)`."""
    array = mx.array(host)
    return array.view(mx.bfloat16) if dtype == "bfloat16" else array


MOST_TOKENS = 2**24
"""Most tokens that a stored entry may have."""
PACKED = ("packed", "scales", "biases")
"""Suffixes of the three arrays that store one quantized array."""

T = TypeVar("T")


class Packer:
    """Collects the arrays of layers by name."""

    def __init__(self, bits: int | None = None) -> None:
        """`bits` (4 or 8) stores keys and values in fewer bits."""
        self.arrays: dict[str, ArraySource] = {}
        self._bits = bits

    def layer(self, name: str, saved: Saved) -> dict[str, Any]:
        """Add the arrays of a layer, and return its structure for JSON."""
        arrays = {
            key: self._array(f"{name}.{key}", array, saved.kind)
            for key, array in saved.arrays.items()
        }
        parts = [self.layer(f"{name}.{index}", part) for index, part in enumerate(saved.parts)]
        return {
            "kind": saved.kind,
            "arrays": arrays,
            "numbers": dict(saved.numbers),
            "parts": parts,
        }

    def _array(self, name: str, array: mx.array, kind: str) -> list[int] | None:
        """Add an array. Return its bits and group size if it was quantized, or None."""
        size = (
            next((size for size in (64, 32) if array.shape[-1] % size == 0), None)
            if array.size and array.ndim > 1
            else None
        )
        if self._bits is None or kind not in QUANTIZABLE or size is None:
            self.arrays[name] = LazyArray(array)
            return None
        for part, stored in zip(
            PACKED, mx.quantize(array, group_size=size, bits=self._bits), strict=True
        ):
            self.arrays[f"{name}.{part}"] = LazyArray(stored)
        return [self._bits, size]


class StoredEntry:
    """A `SavedEntry` in a file. Opening it reads the tokens; a layer is read when it is used.

    Raise SessionError if the file is damaged. If `fingerprint` equals that of the model, call
    `check` before using the layers.
    """

    def __init__(self, file: TensorFile) -> None:
        self._file = file
        try:
            structure = json.loads(file.metadata["entry"])
            self.fingerprint: dict[str, str] = dict(json.loads(file.metadata["fingerprint"]))
            self._layers = [
                stored_layer(file, f"layers.{index}", found)
                for index, found in enumerate(structure["layers"])
            ]
            self._checkpoints = [
                SavedCheckpoint(
                    int(found["offset"]),
                    role_named(found.get("role")),
                    [
                        layer and stored_layer(file, f"checkpoints.{place}.{index}", layer)
                        for index, layer in enumerate(found["layers"])
                    ],
                )
                for place, found in enumerate(structure["checkpoints"])
            ]
            self.is_exact = structure.get("is_exact") is True
            self.pictures = json.loads(file.metadata.get("pictures", "{}"))
            self.tokens = stored_tokens(file.arrays["tokens"])
        except (
            KeyError,
            TypeError,
            ValueError,
            OverflowError,
            RecursionError,
            AttributeError,
            PromptError,
        ) as error:
            raise SessionError(
                "the cache is damaged, or not the cache of a session: "
                f"{' '.join(str(error).split())[:100]}"
            ) from error

    def renumber(self, known: Mapping[bytes, Picture]) -> None:
        """Give pictures among the tokens the ids that they have in this process.

        `known`: the pictures of this process, by digest. Raise SessionError if another one is among
        the tokens.
        """
        try:
            self.tokens = renumbered(self.tokens, self.pictures, known)
        except PromptError as error:
            raise SessionError(str(error)) from error

    def check(self, outline: Sequence[Saved]) -> None:
        """Raise SessionError unless every array has the type and shape that the model stores.

        `outline` describes the model's layers: see `EntryControl.outline`.
        """
        for layers in (self._layers, *(item.layers for item in self._checkpoints)):
            if len(layers) != len(outline):
                raise SessionError(
                    f"the cache has {len(layers)} layers, and the model {len(outline)}"
                )
            for layer, like in zip(layers, outline, strict=True):
                if layer is not None and (why := _mismatch(layer, like, len(self.tokens))):
                    raise SessionError(f"the cache is damaged: {why}")

    @property
    def nbytes(self) -> int:
        """Size of all arrays in bytes."""
        return sum(array.nbytes for array in self._file.arrays.values())

    @property
    def layers(self) -> Iterator[Saved]:
        """The layers, each read from the file when it is reached."""
        return (read_layer(layer) for layer in self._layers)

    @property
    def checkpoints(self) -> Iterator[SavedCheckpoint]:
        """The checkpoints, each read from the file when it is reached."""
        for item in self._checkpoints:
            yield SavedCheckpoint(
                item.offset, item.role, [layer and read_layer(layer) for layer in item.layers]
            )


@dataclass(frozen=True)
class _Stored:
    """An array that is stored in the file as it is."""

    array: StoredArray

    @property
    def dtype(self) -> str:
        return self.array.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def read(self) -> mx.array:
        host = np.frombuffer(self.array.read(), host_type(self.dtype))
        return from_host(host.reshape(self.shape), self.dtype)


@dataclass(frozen=True)
class _Quantized:
    """An array that is stored in fewer bits, as packed values, scales and biases."""

    parts: Sequence[_Stored | JoinedRows]
    """Packed values (uint32), scales and biases."""
    bits: int
    group: int
    """Number of values that share a scale and a bias."""

    @property
    def dtype(self) -> str:
        return self.parts[1].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        *rows, columns = self.parts[0].shape
        return (*rows, columns * 32 // self.bits)

    def read(self) -> mx.array:
        packed, scales, biases = (part.read() for part in self.parts)
        return mx.dequantize(packed, scales, biases, group_size=self.group, bits=self.bits)


def _quantized(parts: Sequence[_Stored | JoinedRows], bits: int, group: int) -> _Quantized:
    """Return the three arrays as one. Raise ValueError if they do not belong together."""
    if bits not in (4, 8) or group not in (32, 64):
        raise ValueError(f"arrays are stored in {bits!r:.20} bits, in groups of {group!r:.20}")
    found = _Quantized(parts, bits, group)
    *rows, columns = found.shape
    like = [("uint32", parts[0].shape), *[(found.dtype, (*rows, columns // group))] * 2]
    if [(part.dtype, part.shape) for part in parts] != like or columns % group:
        shapes = ", ".join(f"{part.dtype} {list(part.shape)}"[:50] for part in parts)
        raise ValueError(f"arrays stored in {bits} bits are {shapes}")
    return found


def _mismatch(layer: Saved, like: Saved, tokens: int) -> str | None:
    try:
        return mismatch(layer, like, tokens)
    except ValueError:
        return "an array has no rows"


def stored_tokens(array: StoredArray) -> TokenArray:
    """Return the tokens in a file."""
    if array.dtype != "int32" or array.nbytes > MOST_TOKENS * 4:
        raise SessionError(
            f"the cache is damaged: its tokens are {array.dtype} {list(array.shape)}"
        )
    return as_tokens(np.frombuffer(array.read(), np.int32).reshape(array.shape))


def stored_layer(file: TensorFile, name: str, found: Mapping[str, Any]) -> Saved:
    """Return a layer whose arrays are not read yet."""
    arrays: dict[str, _Stored | _Quantized] = {}
    for key, how in found["arrays"].items():
        if how is None:
            arrays[key] = _Stored(file.arrays[f"{name}.{key}"])
            continue
        packed = [_Stored(file.arrays[f"{name}.{key}.{part}"]) for part in PACKED]
        arrays[key] = _quantized(packed, *how)
    parts = [
        stored_layer(file, f"{name}.{index}", part) for index, part in enumerate(found["parts"])
    ]
    return Saved(found["kind"], arrays, dict(found["numbers"]), parts)


def read_layer(layer: Saved) -> Saved:
    """Return a layer with its arrays read."""
    arrays = {key: array.read() for key, array in layer.arrays.items()}
    return Saved(layer.kind, arrays, layer.numbers, [read_layer(part) for part in layer.parts])


OPEN = 64
"""Most files that are kept open while a conversation is read."""

Structure = Mapping[str, Any]
"""A layer as JSON: its kind, and one of three things that it may be.

"rows": type and shape of each array with a row per token, with 0 for the number of rows; "packed":
bits and group size of those that are stored in fewer bits. "within": the layers of a composite
layer. Else "arrays", "numbers" and "parts", as `Packer.layer` returns them.
"""


def has_only_rows(structure: Sequence[Structure]) -> bool:
    """Return True if every layer has rows, so that any number of first tokens can be read."""
    return all(
        has_only_rows(layer["within"]) if "within" in layer else "rows" in layer
        for layer in structure
    )


class DividedLayers:
    """The layers of an entry, divided into those with a row per token and all others."""

    def __init__(
        self,
        caches: Sequence[LayerCache],
        saved: Sequence[Saved],
        tokens: int,
        bits: int | None = None,
    ) -> None:
        """Divide `caches` with `tokens` tokens. `saved`: what they export, at least outlined.

        `bits` (4 or 8) stores keys and values in fewer bits.
        """
        self._tokens, self._bits = tokens, bits
        self._rows: dict[str, LayerCache] = {}
        self._like: dict[str, dict[str, tuple[str, list[int]]]] = {}
        self._states, self._num_states = Packer(bits), 0
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
    def states(self) -> Mapping[str, ArraySource]:
        """The arrays of the layers without rows, by name."""
        return self._states.arrays

    def rows(self, begin: int, end: int) -> dict[str, ArraySource]:
        """Return the rows of the tokens `begin .. end - 1`, by the name of their array.

        They are copied when the first of them is written.
        """
        return {
            f"{path}.{name}": _Row(copied, name, dtype, tuple(shape))
            for path, cache in self._rows.items()
            for copied in [_Copied(cache, begin, end, self._bits)]
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
        packer = Packer(self._bits)
        how = packer.layer("", saved)["arrays"]
        self._like[path] = {
            name[1:]: (array.dtype, [*array.shape[:2], 0, *array.shape[3:]])
            for name, array in packer.arrays.items()
        }
        rows = {name: list(about) for name, about in self._like[path].items()}
        packed = {name: one for name, one in how.items() if one is not None}
        return {"kind": saved.kind, "rows": rows, **({"packed": packed} if packed else {})}


class _Copied:
    """Some rows of a layer, copied when they are first asked for."""

    def __init__(self, cache: LayerCache, begin: int, end: int, bits: int | None) -> None:
        self._cache, self.begin, self.end, self._bits = cache, begin, end, bits

    @cached_property
    def arrays(self) -> Mapping[str, ArraySource]:
        packer = Packer(self._bits)
        packer.layer("", self._cache.export_rows(self.begin, self.end))
        return {name[1:]: array for name, array in packer.arrays.items()}


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
        return self.copied.arrays[self.name].data


def _has_rows(saved: Saved, tokens: int) -> bool:
    arrays = saved.arrays.values()
    only_arrays = bool(arrays) and not saved.numbers and not saved.parts
    return only_arrays and all(len(one.shape) > 2 and one.shape[2] == tokens for one in arrays)


def piece_files(
    conversation: StoredConversation,
    exported: Exported,
    layers: DividedLayers,
    there: Mapping[str, int],
    *,
    salt: str,
    pictures: PictureNames,
    bits: int | None = None,
) -> list[PieceFile]:
    """Return the files of a conversation that are not in `there`, but for its own one.

    Each comes after those that it needs, so that after a crash those that were written are of use:
    a file says how to continue without the conversation's own one.
    """
    tokens, files = conversation.tokens, list[tuple[int, int, PieceFile]]()
    shared = {"salt": salt, "structure": layers.structure}
    for before, piece in zip([None, *conversation.rows], conversation.rows, strict=False):
        if piece.name not in there:
            about: dict[str, Any] = {**shared, "after": None if before is None else before.name}
            rows = layers.rows(piece.begin, piece.end)
            spoken = _spoken(tokens[piece.begin : piece.end], about, pictures)
            files.append((piece.end, 0, PieceFile(piece.name, {**spoken, **rows}, about)))
    for state, item in zip(conversation.states, exported.checkpoints, strict=False):
        if state.name not in there:
            packer = Packer(bits)
            kept = [
                None if layer is None else packer.layer(str(index), layer)
                for index, layer in enumerate(item.layers)
            ]
            about = {**shared, "role": item.role, "layers": kept}
            spoken = {} if conversation.rows else _spoken(tokens[: state.offset], about, pictures)
            file = PieceFile(state.name, {**spoken, **packer.arrays}, about)
            needed = [piece.end for piece, end in conversation.used(state.offset)]
            files.append((max(needed, default=state.offset), 1, file))
    return [file for _, _, file in sorted(files, key=lambda one: one[:2])]


def head_file(
    conversation: StoredConversation,
    sizes: Mapping[str, int],
    structure: Sequence[Structure],
    states: Mapping[str, ArraySource],
    *,
    salt: str,
    pictures: PictureNames,
    has_tokens: bool = True,
    **more: Any,
) -> PieceFile:
    """Return a conversation's own file. `sizes`: bytes of the others. `states`: those at its end.

    `has_tokens`: the tokens are in it, also if files with rows have them. `more`: what else it says
    about itself.
    """
    about = {"salt": salt, "layers": structure, **conversation.describe(sizes), **more}
    is_told = has_tokens or not conversation.rows
    spoken = _spoken(conversation.tokens, about, pictures) if is_told else {}
    return PieceFile(conversation.name, {**spoken, **states}, about)


def _spoken(
    tokens: TokenArray, about: dict[str, Any], pictures: PictureNames
) -> dict[str, ArraySource]:
    """Return the array of tokens in a file, and note in `about` the pictures among them."""
    if found := pictures.of(tokens):
        about["pictures"] = found
    return {"tokens": Buffer("int32", [len(tokens)], tokens.view(np.uint8).data)}


def completed(work: Generator[Any, None, T]) -> T:
    """Run work that yields in between to its end, and return its result."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            found: T = done.value
            return found


@dataclass(frozen=True)
class PieceFile:
    """A file that is to be written."""

    name: str
    arrays: Mapping[str, ArraySource]
    about: Mapping[str, Any] = field(default_factory=dict)
    """The file's description of itself, for JSON."""

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes."""
        return file_size(self.arrays, self._metadata)

    def copied(self) -> PieceFile:
        """Return the file with its arrays in host memory, so that any thread may write it."""
        return completed(self.copying())

    def copying(self) -> Generator[bool, None, PieceFile]:
        """Return what `copied` does, and yield False after each array: nothing is waited for."""
        arrays: dict[str, ArraySource] = {}
        for name, array in self.arrays.items():
            arrays[name] = Buffer(array.dtype, array.shape, memoryview(bytes(array.data)))
            yield False
        return replace(self, arrays=arrays)

    def write(self, folder: Folder, *, sync: bool = False, more: bool = False) -> None:
        """Write the file; `more` as for `Folder.replacing`. Raise OSError if that fails.

        Without `sync` it is not forced to the disk: what a power cut damages is found by its
        checksums.
        """
        with folder.replacing(self.name, sync=sync, more=more) as fd:
            write(fd, self.arrays, self._metadata)

    @property
    def _metadata(self) -> dict[str, str]:
        return {"name": self.name, "about": json.dumps(self.about)}


class PieceReader:
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

    def tokens(self, name: str, pictures: PictureNames) -> TokenArray:
        """Return the tokens that a file has."""
        with self.file(name) as file:
            stored = np.frombuffer(file.arrays["tokens"].read(), np.int32)
            about = json.loads(file.metadata["about"])
            return pictures.adopted(stored, about.get("pictures"))

    def all_tokens(self, name: str, pictures: PictureNames) -> TokenArray:
        """Return the tokens of the conversation whose own file is `name`.

        They are in it, or in the files with its rows.
        """
        with self.file(name) as file:
            if "tokens" in file.arrays:
                return self.tokens(name, pictures)
            rows = [(str(one[0]), int(one[1])) for one in self.about(name)["rows"]]
            ends = [begin for _, begin in rows[1:]] + [int(name.split(".")[0].split("-")[2])]
            parts = [
                self.tokens(piece, pictures)[: end - begin]
                for (piece, begin), end in zip(rows, ends, strict=True)
            ]
            return np.concatenate(parts)

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
class JoinedRows:
    """An array whose rows are in several files."""

    reader: PieceReader
    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Sequence[tuple[RowsPiece, int]]
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


class RestoredEntry:
    """A `SavedEntry` that reads a conversation on disk, layer by layer.

    It has all tokens, or those before a checkpoint, or any number if all layers have rows. Reading
    raises SessionError if a file is missing or damaged.
    """

    def __init__(
        self, conversation: StoredConversation, upto: int | None, reader: PieceReader
    ) -> None:
        self.conversation, self.is_exact = conversation, conversation.is_exact
        self._reader = reader
        self._outline: Sequence[Saved] | None = None
        """The model's layers, once `check` was called."""
        self._state: StatePiece | None = None
        self._length = len(conversation.tokens)
        upto = self._length if upto is None else min(upto, self._length)
        if upto < self._length and conversation.has_only_rows:
            self._length = upto
        elif upto < conversation.lowest:
            self._state = conversation.checkpoint(upto)
            self._length = 0 if self._state is None else self._state.offset

    @property
    def tokens(self) -> TokenArray:
        return self.conversation.tokens[: self._length]

    @property
    def layers(self) -> Iterator[Saved | Unread]:
        """The layers, each read when it is reached, or when its rows are asked for."""
        for index, found in enumerate(self._reader.about(self.conversation.name)["layers"]):
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
        with self._reader.file(self.conversation.name) as head:
            layer = self._layer(head, str(index), found, kept)
            self._check(index, layer, self._length)
            return read_layer(layer)

    def read_rows(self, index: int, found: Structure) -> Saved:
        """Read all rows of a layer."""
        return self._read(index, found, None)

    def read_pieces(self, index: int, found: Structure) -> Iterator[Saved | None]:
        """Read the rows of a layer file by file. None comes after each array."""
        for piece, end in self.conversation.used(self._length):
            with self._reader.file(self.conversation.name):
                layer = self._rows(str(index), found, [(piece, end)])
                self._check(index, layer, end - piece.begin)
            arrays = {}
            for name, array in layer.arrays.items():
                with self._reader.file(self.conversation.name):
                    arrays[name] = array.read()
                yield None
            yield Saved(layer.kind, arrays)

    def check(self, outline: Sequence[Saved]) -> None:
        """Raise SessionError unless every array has the type and shape that the model stores.

        `outline` describes the model's layers: see `EntryControl.outline`.
        """
        self._outline = outline
        layers = self._reader.about(self.conversation.name)["layers"]
        if len(layers) != len(outline):
            raise SessionError(f"the cache has {len(layers)} layers, and the model {len(outline)}")
        with self._reader.file(self.conversation.name) as head:
            ends = [
                self._layer(head, str(index), found, None) for index, found in enumerate(layers)
            ]
        groups: list[tuple[int, Sequence[Saved | None]]] = [(self._length, ends)]
        for state in self.conversation.states:
            with self._reader.file(state.name) as file:
                groups.append((state.offset, self._kept(file)))
        for offset, group in groups:
            if len(group) != len(outline):
                raise SessionError(f"the cache is damaged: a checkpoint has {len(group)} layers")
            for index, layer in enumerate(group):
                if layer is not None:
                    self._check(index, layer, offset)

    def _check(self, index: int, layer: Saved, tokens: int) -> None:
        like = None if self._outline is None else self._outline[index]
        if like is not None and (why := _mismatch(layer, like, tokens)):
            raise SessionError(f"the cache is damaged: {why}")

    def _rows(self, path: str, found: Structure, pieces: Sequence[tuple[RowsPiece, int]]) -> Saved:
        """Return a layer with the rows in `pieces`, not read yet."""
        first, end = pieces[0][0].begin if pieces else 0, pieces[-1][1] if pieces else 0
        rows = {
            name: JoinedRows(
                self._reader,
                f"{path}.{name}",
                dtype,
                (*shape[:2], end - first, *shape[3:]),
                pieces,
                first,
            )
            for name, (dtype, shape) in found["rows"].items()
        }
        packed = {
            name: _quantized([rows.pop(f"{name}.{part}") for part in PACKED], *how)
            for name, how in found.get("packed", {}).items()
        }
        return Saved(found["kind"], {**rows, **packed})

    @property
    def checkpoints(self) -> Iterator[SavedCheckpoint]:
        """The checkpoints, each read when it is reached."""
        for state in self.conversation.states:
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
            return self._rows(path, found, self.conversation.used(self._length))
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

    entry: RestoredEntry
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


@dataclass(frozen=True)
class Recovered:
    """A conversation that its pieces tell, and what its own file has to say."""

    conversation: StoredConversation
    structure: Sequence[Structure]
    salt: str

    @property
    def tokens(self) -> TokenArray:
        return self.conversation.tokens


def is_piece(name: str) -> bool:
    """Return True for the name of a file that several conversations may use."""
    return name.startswith(("rows-", "state-"))


class Pieces:
    """The files of one folder, as far as they tell of conversations without their own files.

    Version 0.2 wrote files that don't: these raise SessionError.
    """

    def __init__(self, folder: Folder, pictures: PictureNames, names: Iterable[str]) -> None:
        self._folder, self._pictures = folder, pictures
        self._states = [name for name in names if name.startswith("state-")]
        self._names = frozenset(names)

    def conversation(self, name: str, seed: bytes) -> Recovered:
        """Return the longest conversation that ends with the file `name`, or before its end.

        Raise SessionError or ValueError if there is none: files are missing or damaged, or there is
        no checkpoint for layers that can't be cut.
        """
        self._reader = PieceReader(self._folder, lambda name: None)
        about = self._reader.about(name)
        structure, salt = about["structure"], str(about["salt"])
        rows, tokens = (
            self._chain(name)
            if name.startswith("rows-")
            else (
                [],
                self._reader.tokens(name, self._pictures),
            )
        )
        spelled, seed = self._pictures.spelled(tokens), seed + salt.encode()
        offsets = {int(one.split(".")[0].split("-")[2]) for one in self._states}
        named = digests(
            seed, spelled, [len(tokens), *(one for one in offsets if one <= len(tokens))]
        )
        kind, *numbers = ("rows", rows[-1].begin, rows[-1].end) if rows else ("state", len(tokens))
        if name != file_name(kind, named[len(tokens)], *numbers):
            raise SessionError("it is of another model, or has other tokens")
        names = {file_name("state", digest, offset): offset for offset, digest in named.items()}
        states = [
            StatePiece(one, names[one], self._role(one))
            for one in sorted(names.keys() & self._names, key=lambda one: names[one])
        ]
        only_rows = has_only_rows(structure)
        if not only_rows:
            if not states:
                raise SessionError("there is no checkpoint")
            tokens = tokens[: states[-1].offset]
            rows = [piece for piece in rows if piece.begin < len(tokens)]
        return Recovered(
            StoredConversation(
                file_name("talk", named[len(tokens)], len(tokens)),
                tokens,
                rows,
                states,
                1 if only_rows else len(tokens) + 1,
                only_rows,
                not salt,
            ),
            structure,
            salt,
        )

    def _role(self, name: str) -> Role | None:
        return role_named(self._reader.about(name).get("role"))

    def _chain(self, name: str) -> tuple[list[RowsPiece], TokenArray]:
        """Return the files up to `name` that have rows, and their tokens."""
        rows, parts, upto = list[RowsPiece](), list[TokenArray](), 0
        after: str | None = name
        while after is not None:
            begin, end = map(int, after.split(".")[0].split("-")[2:])
            upto = upto if rows else end
            if not begin < upto <= end:
                raise SessionError(f"{after} does not lead to what comes after it")
            rows.append(RowsPiece(after, begin, end))
            parts.append(self._reader.tokens(after, self._pictures)[: upto - begin])
            after, upto = self._reader.about(after)["after"], begin
        if upto:
            raise SessionError("its beginning is missing")
        return rows[::-1], np.concatenate(parts[::-1])
