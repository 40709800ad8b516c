"""Move arrays between MLX and the bytes of files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlxrunner.cache.saved import dtype_name
from mlxrunner.stored.tensors import Buffer


def host_copy(array: mx.array) -> Buffer:
    """Return a copy of an array in host memory, outside MLX, so that any thread may use it."""
    raw = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    host = np.array(raw).reshape(-1)
    return Buffer(dtype_name(array.dtype), array.shape, host.view(np.uint8).data)


@dataclass(frozen=True)
class View:
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
