"""Share the weights of a model among the ranks of a group, and read one rank's part alone.

mlx-lm's `shard()` takes a part of each tensor after MLX has read the whole of it. Where a
parameter is a tensor of a file, unchanged, this module reads the part alone. The other parameters
are read whole: those that mlx-lm makes of several tensors, such as experts that a file has one by
one. Without a group, nothing happens.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxrunner.cache.layers.attention import FullAttentionCache
from mlxrunner.cache.layers.factory import make_layer_caches
from mlxrunner.errors import ModelError, ReadError
from mlxrunner.models.files import (
    check_shard,
    check_weights,
    missing_files,
    needed_tensors,
    own_shard,
    read_config,
    read_header,
)
from mlxrunner.system.mlx_lm_internals import cutting
from mlxrunner.system.reading import open_file
from mlxrunner.system.tensorfile import TensorPlace
from mlxrunner.terminal.output import one_line

_group: mx.distributed.Group | None = None


def share_among(group: mx.distributed.Group | None) -> None:
    """Share every model that this process loads from now on as its part says; None: no longer."""
    global _group
    _group = group


def is_sharing() -> bool:
    """Return True if a model that is loaded now would be shared."""
    return _group is not None


def share(folder: Path, model: Any, config: dict[str, Any], files: WeightFiles) -> None:
    """Keep only this rank's part of `model`, whose weights are not read yet.

    The parts of tensors that `files` has seen are read. Raise ModelError if a file can't be read,
    if the model can't be shared, or if a layer can't be rewound by itself.
    """
    group, part = _group, own_shard()
    assert group is not None
    assert part is not None
    check_shard(folder, config)
    if not all(type(cache) is FullAttentionCache for cache in make_layer_caches(model)):
        raise ModelError(
            f"{folder}: the architecture {config['model_type']!r:.80} has layers other than "
            "full attention, which several ranks can't keep equal"
        )
    try:
        if part.way == "pipeline":
            model.model.pipeline(group)
        else:
            with cutting(files.part):
                model.shard(group)
    except ValueError as error:  # a tensor whose sides do not follow from DIVIDED
        raise ModelError(
            f"{folder}: {group.size()} ranks can't share it equally: {one_line(str(error))}"
        ) from error


DIRECT = 2**16
"""Bytes that lie together from which on they are read by themselves."""
BLOCK = 2**24
"""Bytes of whole rows that are read at once, where the parts of each row are short."""

Runs = list[tuple[int, int]]
"""The first index of each stretch, and the one after its last."""


class WeightFiles:
    """The tensors in the weight files of a model, by the arrays that stand for them unread.

    Files of layers that this rank does not have may be missing.
    """

    def __init__(self, folder: Path, progress: Callable[[int], None] = lambda nbytes: None) -> None:
        """`progress` is told the bytes of the parts that are read.

        Raise ModelError if a file is missing or broken.
        """
        self._folder, self._progress, self.nbytes = folder, progress, 0
        self.is_whole = not missing_files(folder)
        """True if the files of the other ranks are here, too."""
        self._places: dict[str, tuple[Path, TensorPlace]] = {}
        self._names: dict[int, str] = {}
        self._arrays: list[mx.array] = []  # kept, so that each has an id of its own
        for file in check_weights(folder):
            for name, place in read_header(file).tensors.items():
                self._places[name] = (file, place)

    def take(self, tensors: dict[str, mx.array]) -> dict[str, mx.array]:
        """Remember the arrays that stand for the `tensors` of the files, by name.

        Return those that this rank needs. A layer of another rank may be there in part only, and
        mlx-lm would miss the rest.
        """
        self._names |= {id(array): name for name, array in tensors.items()}
        self._arrays += tensors.values()
        if self.is_whole:
            return tensors
        needed = needed_tensors(tensors, read_config(self._folder))
        return {name: tensors[name] for name in needed}

    def complete(
        self, made: dict[str, mx.array], parameters: dict[str, mx.array]
    ) -> dict[str, mx.array]:
        """Return what mlx-lm has `made` of the tensors, with the `parameters` of other ranks.

        Those stand for tensors of files that are not here, and are dropped unread.
        """
        if self.is_whole:
            return made
        own = needed_tensors(parameters, read_config(self._folder))
        return {name: parameters[name] for name in parameters.keys() - own} | made

    def part(self, array: mx.array, axis: int, kept: list[int]) -> mx.array | None:
        """Read the indices `kept` of `axis` of the tensor that `array` stands for.

        Return None if `array` is not a tensor of a file as it is there. Raise ModelError if the
        file can't be read.
        """
        found = self._places.get(self._names.get(id(array), ""))
        if found is None or not kept:
            return None
        file, place = found
        if place.shape != tuple(array.shape) or place.nbytes != array.nbytes:
            return None
        try:
            descriptor, _ = open_file(file)
            with os.fdopen(descriptor, "rb", buffering=0) as stream:
                part = _read(stream, place, array.dtype.size, axis, kept)
        except (OSError, ReadError) as error:
            raise ModelError(f"{file}: can't be read: {error}") from error
        self.nbytes += part.nbytes
        self._progress(self.nbytes)
        return mx.array(part).view(array.dtype)


def _read(
    stream: BinaryIO, place: TensorPlace, width: int, axis: int, kept: list[int]
) -> npt.NDArray[np.unsignedinteger]:
    """Return the indices `kept` of `axis` of a tensor whose elements have `width` bytes."""
    shape = place.shape
    outer, side, inner = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    part = np.empty((outer, len(kept), inner), f"<u{width}")
    runs = _runs(kept)
    if min(last - first for first, last in runs) * inner * width >= DIRECT:
        for row in range(outer):
            at = 0
            for first, last in runs:
                begin = place.begin + (row * side + first) * inner * width
                _fill(stream, part[row, at : at + last - first], begin)
                at += last - first
    else:
        step = max(1, BLOCK // (side * inner * width))
        for row in range(0, outer, step):
            block = np.empty((min(step, outer - row), side, inner), part.dtype)
            _fill(stream, block, place.begin + row * side * inner * width)
            at = 0
            for first, last in runs:
                part[row : row + step, at : at + last - first] = block[:, first:last]
                at += last - first
    return part.reshape(*shape[:axis], len(kept), *shape[axis + 1 :])


def _runs(kept: list[int]) -> Runs:
    """Return the stretches of indices in `kept` that lie together in a file."""
    breaks = [at for at, (one, next_one) in enumerate(pairwise(kept), 1) if next_one != one + 1]
    return [(kept[first], kept[last - 1] + 1) for first, last in pairwise([0, *breaks, len(kept)])]


def _fill(stream: BinaryIO, array: npt.NDArray[np.unsignedinteger], begin: int) -> None:
    """Read the bytes of a contiguous `array` from the offset `begin`. Raise OSError if it ends."""
    left = array.data.cast("B")
    stream.seek(begin)
    while left:
        count = stream.readinto(left)  # type: ignore[attr-defined]  # a raw file has it
        if not count:
            raise OSError("it has become shorter")
        left = left[count:]
