"""What this machine can do at most, measured in the same run: bytes and operations per second.

A pass over n tokens can't be faster than reading its weights and caches once, nor than two operations per weight and token.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import get_total_parameters

from mlxrunner import device

REPEATS = 5
ENOUGH_S = 0.1
"""A matrix product that takes so long says what the device can do."""
LARGEST_SIDE = 8192
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class Ceilings:
    """Bytes per second that a copy or a matrix-vector product moves, whichever is faster; operations per second of a matrix product,
    both in `dtype`."""

    dtype: str
    bandwidth: float
    arithmetic: float


@dataclass(frozen=True)
class Cost:
    """What a pass needs of a model: `body` weights are used for each token, `head` weights for the last one only (its logits);
    `nbytes` of both are read, as they are stored."""

    body: int
    head: int
    nbytes: int

    def least_s(self, tokens: int, stored: int, ceilings: Ceilings) -> tuple[float, str]:
        """The seconds that a pass over `tokens` tokens takes at least, with `stored` bytes of caches, and by which ceiling."""
        computing = 2 * (self.body * tokens + self.head) / ceilings.arithmetic
        reading = (self.nbytes + stored) / ceilings.bandwidth
        return (computing, "arithmetic") if computing > reading else (reading, "bandwidth")


def measure_ceilings(model: Any, *, quick: bool = False) -> Ceilings:
    dtype = compute_dtype(model)
    nbytes = min(
        (2**28 if device.is_gpu() else 2**27) >> (2 if quick else 0), device.offered_bytes() // 8
    )
    return Ceilings(str(dtype).split(".")[-1], bandwidth(dtype, nbytes), arithmetic(dtype))


def bandwidth(dtype: mx.Dtype, nbytes: int) -> float:
    """Bytes per second, of arrays of `nbytes`."""
    side = 4096
    matrix = mx.ones((max(nbytes // dtype.size // side, 1), side), dtype)
    vector = mx.ones((side,), dtype)
    mx.eval(matrix, vector)
    copied = 2 * matrix.nbytes / _best(lambda: matrix + 1)
    return max(copied, matrix.nbytes / _best(lambda: matrix @ vector))


def arithmetic(dtype: mx.Dtype) -> float:
    """Operations per second, of products of matrices as large as it takes."""
    side, best = 512, 0.0
    while True:
        matrix = mx.random.normal((side, side)).astype(dtype)
        mx.eval(matrix)
        seconds = _best(lambda matrix=matrix: matrix @ matrix)  # type: ignore[misc]  # bound at once
        best = max(best, 2 * side**3 / seconds)
        if seconds > ENOUGH_S or side >= LARGEST_SIDE:
            return best
        side *= 2


def _best(work: Callable[[], mx.array]) -> float:
    """Seconds of the fastest of some runs: a ceiling is what nothing disturbed."""
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        mx.eval(work())
        times.append(time.perf_counter() - began)
    mx.clear_cache()
    return min(times)


def compute_dtype(model: Any) -> mx.Dtype:
    """The type in which a model computes: that of its weights, or of the scales of those that are quantized."""
    parameters: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # type: ignore[assignment]
    return next(array.dtype for _, array in parameters if mx.issubdtype(array.dtype, mx.floating))


def cost_of(model: Any, config: dict[str, Any]) -> Cost | None:
    """None where it depends on the tokens (experts). A table of embeddings that is not the head as well is not counted: a row of it is read."""
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
    """Numbers in all weights, packed ones too."""
    count: int = get_total_parameters(model)
    return count


def _weights(model: Any, name: str) -> int:
    """Numbers in the weight `name`, which may be packed."""
    module = dict(model.named_modules())[name.removesuffix(".weight")]
    packed = getattr(module, "bits", None)
    return int(module.weight.size * 32 // packed if packed else module.weight.size)
