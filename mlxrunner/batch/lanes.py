"""How many lines run at a time, and the runner that does it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mlxrunner.batch.plan import Survey
from mlxrunner.cache.sequences import NotSupportedError
from mlxrunner.errors import MemoryPlanError
from mlxrunner.models.load import load_model
from mlxrunner.parallel.runner import ParallelRunner
from mlxrunner.runner import Runner

MOST, LONG, FEWER = 8, 1024, 4
"""So many lines at a time; from so many new tokens a line on, fewer. benchmarks/lanes.py on MLX's CPU backend: 8 bring about as much as 16,
and the less the longer the new part and the shorter the answer; what they store grows with both."""
MAX_BATCH = 256
"""Tokens of a step: pieces of several prompts in one row cost more than they bring where rows are long."""


def worth(evaluated: int, lines: int) -> int:
    """How many lines at a time are likely to be fastest, by the prompt tokens that one entry would evaluate for them."""
    return max(1, min(MOST if evaluated <= LONG * lines else FEWER, lines))


def lanes_for(found: Survey, wanted: int | None, loading: Mapping[str, Any]) -> tuple[int, str]:
    """How many lines at a time, as far as that is known without the model, and why it is one (empty where nobody will ask).

    `wanted`: as many; None: as many as are worth it. `loading`: options of `Runner.load`.
    """
    lanes = (
        worth(found.evaluated, found.lines) if wanted is None else max(1, min(wanted, found.lines))
    )
    if lanes > 1 and loading.get("kv_bits"):
        return 1, "--kv-bits stores one sequence only"
    return lanes, ""


def open_runner(
    model: str,
    loading: Mapping[str, Any],
    wanted: int | None,
    found: Survey,
    context: int,
    say: Callable[[str], None],
) -> Runner | ParallelRunner:
    """The runner for these lines, as `lanes_for` says, as far as they fit; `say` is told how many it runs at a time, and why.

    ModelError, MemoryPlanError.
    """
    lanes, why = lanes_for(found, wanted, loading)
    if why:
        _say_one(why, say)
    if lanes > 1:
        runner = _several(model, loading, lanes, found, context, say, may_be_fewer=wanted is None)
        if runner is not None:
            return runner
    return Runner.load(model, **{**loading, "context": context})


def _several(
    model: str,
    loading: Mapping[str, Any],
    lanes: int,
    found: Survey,
    context: int,
    say: Callable[[str], None],
    *,
    may_be_fewer: bool,
) -> ParallelRunner | None:
    loaded = load_model(model, trust_remote_code=bool(loading.get("trust_remote_code")))
    while lanes > 1:
        try:
            runner = ParallelRunner.of(
                loaded, max_sequences=lanes, capacity=context, cells=found.cells(lanes, context), max_batch=max(MAX_BATCH, lanes),
                reserve=bool(loading.get("reserve", True)),
            )  # fmt: skip
        except NotSupportedError as error:
            _say_one(str(error), say)
            return None
        except MemoryPlanError:
            if not may_be_fewer:
                raise
            lanes //= 2
        else:
            say(
                f"{lanes} lines at a time, prefixes that they share stored once ({found.new_tokens:.0f} new tokens a line)"
            )
            return runner
    _say_one("more do not fit into memory; --max-tokens would bound what each line needs", say)
    return None


def _say_one(reason: str, say: Callable[[str], None]) -> None:
    say(f"one line at a time: {reason}")
