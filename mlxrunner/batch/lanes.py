"""How many lines run at a time, and the runner that does it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mlxrunner.batch.order import cost
from mlxrunner.batch.store import Entry
from mlxrunner.cache.sequences import NotSupportedError
from mlxrunner.cache.tokens import TokenArray
from mlxrunner.errors import MemoryPlanError
from mlxrunner.models.load import load_model
from mlxrunner.parallel.runner import ParallelRunner
from mlxrunner.runner import Runner

STEPS = ((128, 8), (256, 4))
"""Up to so many new tokens a line, so many lines at a time. Measured on MLX's CPU backend (3 M and 98 M parameters, answers of 8 and 32
tokens): 64 new tokens a line, 8 at a time: 1.7 to 3.7 times as fast as one; 512: 0.4 times, when each token still looked
at all lines' cells; since attention falls into parts that is on the safe side."""
MAX_BATCH = 256
"""Tokens of a step: pieces of several prompts in one row cost more than they bring where rows are long."""


@dataclass(frozen=True)
class Survey:
    """What is to be run: `lines`, and in tokens: `evaluated` by one entry in the order chosen, the `longest` prompt and answer (None: no limit)."""

    lines: int
    evaluated: int
    longest_prompt: int
    longest_answer: int | None

    @property
    def new_tokens(self) -> float:
        """That a line has beyond what it shares with the one before."""
        return self.evaluated / self.lines if self.lines else 0.0

    def cells(self, lanes: int, context: int) -> int:
        """Tokens that may have to be stored at once, as if nothing was shared."""
        answer = context if self.longest_answer is None else self.longest_answer
        return lanes * min(context, self.longest_prompt + answer)


def worth(evaluated: int, lines: int) -> int:
    """How many lines at a time are likely to be fastest, by the prompt tokens that one entry would evaluate for them."""
    most = next((lanes for tokens, lanes in STEPS if evaluated <= tokens * lines), 1)
    return max(1, min(most, lines))


def survey(entries: Iterable[Entry], defaults: Mapping[str, Any]) -> Survey:
    """Of the entries that can be run, in their order. One of them is in memory at a time."""
    longest = answer = 0
    is_limited = True

    def prompts() -> Iterable[TokenArray]:
        nonlocal longest, answer, is_limited
        for entry in entries:
            if entry.error is None:
                limit = entry.options.get("max_tokens", defaults.get("max_tokens"))
                longest, answer = max(longest, len(entry.tokens)), max(answer, limit or 0)
                is_limited = is_limited and limit is not None
                yield entry.tokens

    found = cost(prompts())
    return Survey(found.prompts, found.evaluated, longest, answer if is_limited else None)


def open_runner(
    model: str, loading: Mapping[str, Any], wanted: int | None, found: Survey, context: int, say: Callable[[str], None]
) -> Runner | ParallelRunner:
    """The runner for these lines; `say` is told how many it runs at a time, and why.

    `wanted`: at a time; None: as many as are worth it and fit into memory. `loading`: options of `Runner.load`. ModelError,
    MemoryPlanError.
    """
    lanes = worth(found.evaluated, found.lines) if wanted is None else max(1, min(wanted, found.lines))
    if lanes > 1 and loading.get("kv_bits"):
        lanes = say_one("--kv-bits stores one sequence only", say)
    elif lanes == 1 and wanted is None and found.lines > 1:
        say_one(f"with {found.new_tokens:.0f} new tokens a line that is faster (--parallel N runs N)", say)
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
            say_one(str(error), say)
            return None
        except MemoryPlanError:
            if not may_be_fewer:
                raise
            lanes //= 2
        else:
            say(f"{lanes} lines at a time, prefixes that they share stored once ({found.new_tokens:.0f} new tokens a line)")
            return runner
    say_one("more do not fit into memory; --max-tokens would bound what each line needs", say)
    return None


def say_one(reason: str, say: Callable[[str], None]) -> int:
    say(f"one line at a time: {reason}")
    return 1
