"""Measure the most that this machine can do: bytes and operations per second.

A pass over n tokens takes at least the time of reading the weights and caches once, and of two
operations per weight and token.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import get_total_parameters

from mlxrunner.system import device

REPEATS = 5
"""The number of runs of each measurement."""
ENOUGH_S = 0.1
"""The seconds of a matrix product that is long enough to use the whole device."""
LARGEST_SIDE = 8192
"""The largest side of a matrix."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""The names that configurations use for the number of experts."""


@dataclass(frozen=True)
class Ceilings:
    """The most that a device can do with numbers of one type."""

    dtype: str
    """The name of the type."""
    bandwidth: float
    """The bytes per second that a copy or a matrix-vector product moves, whichever is faster."""
    arithmetic: float
    """The operations per second of a matrix product."""


@dataclass(frozen=True)
class Cost:
    """The weights that a pass through a model uses."""

    body: int
    """The number of weights that each token uses."""
    head: int
    """The number of weights that only the last token uses, to make its logits."""
    nbytes: int
    """The bytes of both, as they are stored."""

    def least_s(self, tokens: int, stored: int, ceilings: Ceilings) -> tuple[float, str]:
        """Return the least seconds of a pass, and the name of the ceiling that sets them.

        The pass is over `tokens` tokens with `stored` bytes of caches.
        """
        computing = 2 * (self.body * tokens + self.head) / ceilings.arithmetic
        reading = (self.nbytes + stored) / ceilings.bandwidth
        return (computing, "arithmetic") if computing > reading else (reading, "bandwidth")


def measure_ceilings(model: Any, *, quick: bool = False) -> Ceilings:
    """Measure the ceilings of the device for the type in which `model` computes.

    With `quick` the arrays that measure the bandwidth are a quarter as large.
    """
    dtype = compute_dtype(model)
    nbytes = min(
        (2**28 if device.is_gpu() else 2**27) >> (2 if quick else 0), device.offered_bytes() // 8
    )
    return Ceilings(str(dtype).split(".")[-1], bandwidth(dtype, nbytes), arithmetic(dtype))


def bandwidth(dtype: mx.Dtype, nbytes: int) -> float:
    """Measure bytes per second with arrays of `nbytes` bytes."""
    side = 4096
    matrix = mx.ones((max(nbytes // dtype.size // side, 1), side), dtype)
    vector = mx.ones((side,), dtype)
    mx.eval(matrix, vector)
    copied = 2 * matrix.nbytes / _best(lambda: matrix + 1)
    return max(copied, matrix.nbytes / _best(lambda: matrix @ vector))


def arithmetic(dtype: mx.Dtype) -> float:
    """Measure operations per second with growing matrices, until a product takes ENOUGH_S."""
    side, best = 512, 0.0
    while True:
        matrix = mx.random.normal((side, side)).astype(dtype)
        mx.eval(matrix)
        seconds = _best(partial(mx.matmul, matrix, matrix))
        best = max(best, 2 * side**3 / seconds)
        if seconds > ENOUGH_S or side >= LARGEST_SIDE:
            return best
        side *= 2


def _best(work: Callable[[], mx.array]) -> float:
    """Return the seconds of the fastest of REPEATS runs, the least disturbed one."""
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        mx.eval(work())
        times.append(time.perf_counter() - began)
    mx.clear_cache()
    return min(times)


def compute_dtype(model: Any) -> mx.Dtype:
    """Return the type in which a model computes.

    It is the type of the weights, or of the scales if they are quantized.
    """
    parameters: Any = tree_flatten(model.parameters())
    dtypes: list[mx.Dtype] = [array.dtype for _, array in parameters]
    return next(dtype for dtype in dtypes if mx.issubdtype(dtype, mx.floating))


def cost_of(model: Any, config: dict[str, Any]) -> Cost | None:
    """Return the cost of a pass; None for a model with experts, where it depends on the tokens.

    A table of embeddings that is not also the head is left out, since a pass reads one row of it.
    """
    text = config.get("text_config") or {}
    if any(
        isinstance(source.get(name), int) and source[name] > 1
        for source in (config, text)
        for name in EXPERTS
    ):
        return None
    arrays: Any = tree_flatten(model.parameters())
    total = num_parameters(model)
    is_untied = any("lm_head" in name for name, _ in arrays)
    table = sum(
        _weights(model, name) for name, _ in arrays if "embed" in name and name.endswith(".weight")
    )
    head = sum(
        _weights(model, name)
        for name, _ in arrays
        if "lm_head" in name and name.endswith(".weight")
    )
    unread = sum(array.nbytes for name, array in arrays if is_untied and "embed" in name)
    return Cost(
        total - table - head, head or table, sum(array.nbytes for _, array in arrays) - unread
    )


def num_parameters(model: Any) -> int:
    """Count the numbers in all weights, packed ones too."""
    count: int = get_total_parameters(model)
    return count


def _weights(model: Any, name: str) -> int:
    """Count the numbers in the weight `name`, which may be packed."""
    module = dict(model.named_modules())[name.removesuffix(".weight")]
    packed = getattr(module, "bits", None)
    return int(module.weight.size * 32 // packed if packed else module.weight.size)
