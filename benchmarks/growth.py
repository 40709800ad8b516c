"""Measure how a decode step slows down with more sequences and a longer shared prefix.

python benchmarks/parallel.py --plot docs/parallel.svg
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from mlxrunner.engine.engine import Engine
from mlxrunner.models.facts import facts_of
from mlxrunner.testing import ByteTokenizer

PREFIXES = (0, 1024, 4096, 8192)
SEQUENCES = (1, 2, 4, 8, 16, 32, 64)
OWN = 8
STEPS = 12
MOST_COPIED = 2**15
"""Tokens that copies of the prefix may take together.

Beyond, mlx-lm's side is left out: it would take gigabytes.
"""


class Point(NamedTuple):
    """One measurement: milliseconds of a step, and the bytes of keys and values that are stored."""

    side: str
    prefix: int
    sequences: int
    ms: float
    nbytes: int


def measure(model: Any) -> list[Point]:
    points = []
    for prefix in PREFIXES:
        common = np.random.default_rng(prefix).integers(10, 250, prefix).tolist()
        points += _ours(model, common)
        points += _mlx_lm(model, common)
        for point in points[-len(SEQUENCES) - 4 :]:
            print(
                f"{point.side:10} prefix {point.prefix:5} x {point.sequences:3}: {point.ms:8.1f} "
                "ms a step",
                flush=True,
            )
    return points


def _ours(model: Any, common: list[int]) -> list[Point]:
    most, each = max(SEQUENCES), OWN + STEPS + 4
    points = []
    with Engine(
        model,
        ByteTokenizer(),
        facts_of(model, vars(model.args)),
        max_sequences=most,
        context=len(common) + each,
        kv_cache_tokens=len(common) + (most + 1) * each,
    ) as runner:
        rng = np.random.default_rng(0)
        for count in SEQUENCES:
            ends = [rng.integers(10, 250, OWN).tolist() for _ in range(count)]
            handles = [
                runner.submit(common + end, max_tokens=STEPS + 2, stop_tokens=[]) for end in ends
            ]
            while any(handle._request.left for handle in handles):
                runner.step()
            times = _timed(runner.step)
            used = runner._adapted.groups[0].num_used_by(range(most))
            points.append(
                Point("mlxrunner", len(common), count, times, used * _bytes_per_token(model))
            )
            for handle in handles:
                handle.cancel()
    return points


def _mlx_lm(model: Any, common: list[int]) -> list[Point]:
    cache = make_prompt_cache(model)
    if common:
        model(mx.array([common]), cache=cache)
        mx.eval([layer.state for layer in cache])
    points = []
    rng = np.random.default_rng(0)
    for count in SEQUENCES:
        if count * len(common) > MOST_COPIED:
            break
        generator = BatchGenerator(
            model, max_tokens=STEPS + 2, completion_batch_size=count, prefill_batch_size=count
        )
        ends = [rng.integers(10, 250, OWN).tolist() for _ in range(count)]
        generator.insert(ends, caches=[copy.deepcopy(cache) for _ in ends] if common else None)
        seen = 0
        while seen < count:
            responses = generator.next()
            seen += len(responses[1] if isinstance(responses, tuple) else responses)
        stored = count * (len(common) + OWN + STEPS) * _bytes_per_token(model)
        points.append(Point("mlx-lm", len(common), count, _timed(generator.next), stored))
    return points


def _timed(step: Any) -> float:
    """Milliseconds of a step: the median of some."""
    times = []
    for _ in range(STEPS - 1):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return float(np.median(times)) * 1e3


def _bytes_per_token(model: Any) -> int:
    args = model.args
    return int(
        2
        * args.num_hidden_layers
        * args.num_key_value_heads
        * (args.hidden_size // args.num_attention_heads)
        * 4
    )


def plot(points: list[Point], file: str) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "mlxrunner"
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    colours = dict(zip(PREFIXES, ("#0072b2", "#009e73", "#d55e00", "#000000"), strict=True))
    panels: tuple[tuple[Any, str, Callable[[Point], float]], ...] = (
        (axes[0], "milliseconds of a decode step", lambda point: point.ms),
        (axes[1], "megabytes of keys and values", lambda point: point.nbytes / 1e6),
    )
    for axis, title, of in panels:
        for prefix in PREFIXES:
            for side, style in (("mlxrunner", "o-"), ("mlx-lm", "x--")):
                line = [point for point in points if (point.side, point.prefix) == (side, prefix)]
                axis.plot(
                    [p.sequences for p in line],
                    [of(p) for p in line],
                    style,
                    color=colours[prefix],
                    markersize=4,
                    linewidth=1.4,
                )
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(SEQUENCES, [str(count) for count in SEQUENCES])
        axis.set_xlabel("sequences")
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
    handles = [
        Line2D([], [], color=colours[prefix], label=f"shared prefix of {prefix}")
        for prefix in PREFIXES
    ]
    handles += [
        Line2D([], [], color="#555", marker="o", label="mlxrunner"),
        Line2D([], [], color="#555", linestyle="--", marker="x", label="mlx-lm, prefix copied"),
    ]
    axes[0].legend(handles=handles, fontsize=8, frameon=False)
    figure.savefig(file, metadata={"Date": None})
