"""The cache of an encoder's output for one input, such as an image.

It holds keys and values for cross-attention, and the position of the input. Only the latest output
is stored, for one sequence. Its keys have no positions in them and are never re-rotated.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import mlx.core as mx
import numpy as np

from mlxrunner.cache.shared.buffers import Layer, Places
from mlxrunner.cache.shared.runs import Run
from mlxrunner.cache.shared.sequences import END, Batch, Cache, CacheConfig, Commit, Lifecycle
from mlxrunner.errors import CacheFullError, NotSupportedError


@dataclass(frozen=True)
class Contents:
    """The stored output, and the positions of all inputs."""

    position: int | None = None
    """Position of the input whose output is stored; None: no output is stored."""
    inputs: frozenset[int] = frozenset()
    """Positions of all inputs so far, with their outputs stored or replaced."""
    lengths: dict[int, int] = field(default_factory=dict)
    """Number of rows stored, by layer."""

    def without(self, begin: int, end: int) -> Contents:
        """Return the contents without the inputs at `begin .. end - 1`; later ones move up."""
        by = 0 if end == END else end - begin
        moved = {
            position: position - by if position >= end else position
            for position in self.inputs
            if not begin <= position < end
        }
        position = None if self.position is None else moved.get(self.position)
        return Contents(
            position, frozenset(moved.values()), {} if position is None else self.lengths
        )


@dataclass(frozen=True)
class Forward:
    """The pass under way, with the positions of the encoder inputs in its batch."""

    inputs: tuple[int, ...]
    """Positions of the encoder inputs in the batch."""
    is_reserve: bool
    """True for a pass that allocates the tensors and stores nothing."""
    has_output: bool = False
    """True once its output has begun to arrive."""


class EncoderCache(Cache):
    """The cache of the latest output of an encoder.

    `put` takes an output of at most as many rows as the first one; a reserve pass sets this
    maximum. The output belongs to the last of the batch's `encoder_inputs`, or to the first token
    of a batch without any. Removing the position of the input also removes its output. Removing
    earlier positions keeps it.
    """

    def __init__(self) -> None:
        self._lifecycle = Lifecycle()
        self._dtype = mx.float32
        self._layers: dict[int, Layer] = {}
        self._layer = 0
        self._contents = Contents()
        self._forward: Forward | None = None
        self._undo: tuple[Contents, Forward | None] | None = None

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self._layers.values())

    @property
    def position(self) -> int | None:
        """Position of the input whose output is stored in every layer.

        None: no output is stored, and cross-attention sees nothing.
        """
        is_whole = self._contents.lengths.keys() == self._layers.keys()
        return self._contents.position if is_whole else None

    def set_config(self, config: CacheConfig) -> None:
        """Set the model's wishes, which change nothing here.

        This cache has no mask, and its history is the whole output of the encoder.
        """
        self._lifecycle.configure(config)

    def init(self, dtype: mx.Dtype, max_sequences: int, capacity: int, max_batch: int) -> None:
        if max_sequences > 1:
            raise NotSupportedError(
                f"an encoder cache serves 1 sequence, not {max_sequences}: "
                "run such a model one sequence at a time"
            )
        self._lifecycle.initialize(
            max_sequences=max_sequences, capacity=capacity, max_batch=max_batch
        )
        self._dtype = dtype

    def start_forward(self, batch: Batch, reserve: bool = False) -> None:
        self._undo = None
        self._check(*batch.sequences)
        self._undo = self._contents, self._forward
        if self.position is None:  # an interrupted pass has written to some layers only
            self._contents = replace(self._contents, position=None, lengths={})
        inputs = tuple(batch.positions[index] for index in batch.encoder_inputs) or (
            batch.positions[0],
        )
        self._forward = Forward(inputs, reserve)

    def undo_forward(self) -> None:
        if self._undo is not None:
            (self._contents, self._forward), self._undo = self._undo, None

    def set_layer(self, layer: int) -> None:
        self._layer = layer

    def put(self, keys: mx.array, values: mx.array) -> None:
        forward, length = self._current(), keys.shape[2]
        layer = self._layers.get(self._layer) or Layer.like(keys, values, length, self._dtype)
        layer.check(self._layer, keys, values)
        if values.shape[2] != length:
            raise ValueError(f"layer {self._layer}: {length} keys, but {values.shape[2]} values")
        if length > (room := layer.keys.shape[2]):
            what = f"layer {self._layer}: an encoder output of {length} rows"
            raise CacheFullError(what, length, room, room, remedy="reserve with the longest one")
        self._layers[self._layer] = layer
        if forward.is_reserve:
            return
        self._undo = None
        if not forward.has_output:  # the first write destroys the output before it
            self._contents = Contents(
                forward.inputs[-1], self._contents.inputs.union(forward.inputs)
            )
            self._forward = replace(forward, has_output=True)
        layer.write(Places(np.arange(length, dtype=np.int32)), keys, values)
        self._contents.lengths[self._layer] = length

    def get(self) -> tuple[mx.array, mx.array, None]:
        """Return the keys and values of the whole output, without a mask."""
        forward, layer = self._current(), self._layers.get(self._layer)
        length = (
            layer.keys.shape[2]
            if layer and forward.is_reserve
            else self._contents.lengths.get(self._layer)
        )
        if layer is None or length is None:
            raise RuntimeError(f"layer {self._layer}: no encoder output is stored")
        return *layer.read(Run(0, length)), None

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        self.prepare_copy_prefix(source, target, length)()

    def prepare_copy_prefix(self, source: int, target: int, length: int) -> Commit:
        self._lifecycle.check()
        raise NotSupportedError(
            "an encoder cache serves one sequence: there is no other one to share a prefix with"
        )

    def can_resume(self, sequence: int, position: int) -> bool:
        """Return True if the output of the latest input before `position` is stored.

        The end of the sequence is not known here.
        """
        self._check(sequence)
        before = [at for at in self._contents.inputs if at < position]
        return position >= 0 and (not before or max(before) == self.position)

    def remove(self, sequence: int, begin: int, end: int = END) -> None:
        self.prepare_remove(sequence, begin, end)()

    def prepare_remove(self, sequence: int, begin: int, end: int = END) -> Commit:
        self._check(sequence)
        if not 0 <= begin <= end:
            raise ValueError(f"there are no positions {begin} .. {end}")
        return partial(self._become, self._contents.without(begin, end))

    def close(self) -> None:
        self._lifecycle.close()
        self._layers.clear()
        self._contents, self._forward, self._undo = Contents(), None, None

    def _check(self, *sequences: int) -> None:
        self._lifecycle.check()
        if any(sequences):
            raise NotSupportedError(
                f"an encoder cache serves sequence 0 only, not {max(sequences, key=abs)}"
            )

    def _current(self) -> Forward:
        self._lifecycle.check()
        if self._forward is None:
            raise RuntimeError("no forward pass is under way: call start_forward first")
        return self._forward

    def _become(self, contents: Contents) -> None:
        self._contents, self._undo = contents, None
