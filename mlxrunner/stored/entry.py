"""Convert the prefix-cache entry to the arrays of a file, and back.

Packing copies the whole entry at once, in the thread that owns the model. Reading a file goes layer
by layer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import mlx.core as mx
import numpy as np

from mlxrunner.cache.checkpoints import ROLES
from mlxrunner.cache.saved import Exported, Saved, SavedCheckpoint, mismatch
from mlxrunner.cache.tokens import TokenArray, as_tokens
from mlxrunner.errors import PromptError, SessionError
from mlxrunner.pictures.stored import renumbered
from mlxrunner.pictures.table import Picture
from mlxrunner.stored.host import from_host, host_copy, host_type
from mlxrunner.stored.tensors import Buffer, StoredArray, TensorFile

QUANTIZED = ("full", "sliding")
"""Kinds of layer whose keys and values can be stored in fewer bits; it would harm other states."""
MOST_TOKENS = 2**24
"""Most tokens that a stored entry may have."""
PACKED = ("packed", "scales", "biases")
"""Suffixes of the three arrays that store one quantized array."""

Array = TypeVar("Array")


@dataclass(frozen=True)
class Packed:
    """A copy of an entry in host memory, ready for `SessionStore.save_cache`."""

    arrays: dict[str, Buffer]
    """The tokens and the arrays of all layers and checkpoints, by name."""
    metadata: dict[str, str]
    """The structure of the entry and the fingerprint of the model, as JSON texts."""

    @property
    def nbytes(self) -> int:
        """Size of all arrays in bytes."""
        return sum(buffer.data.nbytes for buffer in self.arrays.values())


def pack(
    entry: Exported,
    fingerprint: Mapping[str, str],
    bits: int | None = None,
    pictures: Mapping[str, Sequence[int]] | None = None,
) -> Packed:
    """Return a copy of `entry` in host memory.

    `fingerprint` is that of the model, and is stored with the entry. `bits` (4 or 8) stores keys
    and values in fewer bits: what is restored is then close to the original, not equal. None stores
    them exactly. `pictures`: what the ids of those among the tokens stand for.
    """
    packer = Packer(host_copy, bits)
    packer.arrays["tokens"] = host_copy(mx.array(entry.tokens))
    structure = {
        "is_exact": entry.is_exact and bits is None,
        "layers": [
            packer.layer(f"layers.{index}", layer) for index, layer in enumerate(entry.layers)
        ],
        "checkpoints": [
            {
                "offset": item.offset,
                "role": item.role,
                "layers": [
                    None if layer is None else packer.layer(f"checkpoints.{place}.{index}", layer)
                    for index, layer in enumerate(item.layers)
                ],
            }
            for place, item in enumerate(entry.checkpoints)
        ],
    }
    metadata = {"entry": structure, "fingerprint": dict(fingerprint)}
    if pictures:
        metadata["pictures"] = dict(pictures)
    return Packed(packer.arrays, {name: json.dumps(one) for name, one in metadata.items()})


class Packer(Generic[Array]):
    """Collects the arrays of layers by name, as `store` makes them of MLX's."""

    def __init__(self, store: Callable[[mx.array], Array], bits: int | None = None) -> None:
        self.arrays: dict[str, Array] = {}
        self._store, self._bits = store, bits

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
        if self._bits is None or kind not in QUANTIZED or size is None:
            self.arrays[name] = self._store(array)
            return None
        for part, stored in zip(
            PACKED, mx.quantize(array, group_size=size, bits=self._bits), strict=True
        ):
            self.arrays[f"{name}.{part}"] = self._store(stored)
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
                    next((role for role in ROLES if role == found.get("role")), None),
                    [
                        layer and stored_layer(file, f"checkpoints.{place}.{index}", layer)
                        for index, layer in enumerate(found["layers"])
                    ],
                )
                for place, found in enumerate(structure["checkpoints"])
            ]
            self.is_exact = structure.get("is_exact") is True
            self.pictures = json.loads(file.metadata.get("pictures", "{}"))
            self.tokens = _tokens(file.arrays["tokens"])
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

    parts: Sequence[_Stored]
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


def _quantized(parts: Sequence[_Stored], bits: int, group: int) -> _Quantized:
    """Return the three arrays as one. Raise ValueError if they do not belong together."""
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


def _tokens(array: StoredArray) -> TokenArray:
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
        bits, group = how
        if bits not in (4, 8) or group not in (32, 64):
            raise ValueError(
                f"{name}.{key} is stored in {bits!r:.20} bits, in groups of {group!r:.20}"
            )
        arrays[key] = _quantized(
            [_Stored(file.arrays[f"{name}.{key}.{part}"]) for part in PACKED], bits, group
        )
    parts = [
        stored_layer(file, f"{name}.{index}", part) for index, part in enumerate(found["parts"])
    ]
    return Saved(found["kind"], arrays, dict(found["numbers"]), parts)


def read_layer(layer: Saved) -> Saved:
    """Return a layer with its arrays read."""
    arrays = {key: array.read() for key, array in layer.arrays.items()}
    return Saved(layer.kind, arrays, layer.numbers, [read_layer(part) for part in layer.parts])
