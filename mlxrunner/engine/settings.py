"""The settings of a runner of many requests, each described once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, Self

from mlxrunner.config.option import Option, check_path, names, option
from mlxrunner.errors import OptionError
from mlxrunner.options import (
    DISK_WRITE_BYTES,
    DISK_WRITES,
    MOST_TOKENS,
    WIRE,
    RunnerKwargs,
    RunnerSettings,
)

CHECKPOINT_BUDGET = 2**30
"""Bytes for the checkpoints of all slots if neither a setting nor a plan gives another number."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings(RunnerSettings):
    """The settings of an engine of many requests that is made from loaded parts.

    Raise OptionError if a value is of the wrong type or out of range.
    """

    max_sequences: int = field(
        metadata={"option": Option(int, "Maximum parallel requests.", low=1)}
    )
    prefill_step: int = option(
        1024, int, "Maximum tokens per step, for all requests together.", low=1, high=MOST_TOKENS
    )
    kv_cache_tokens: int | None = option(
        None,
        int,
        "Size of the KV pool in tokens; a shared token counts once. [default: what fits, or "
        "is always enough]",
        low=2,
        high=MOST_TOKENS,
        was=("cells",),
    )
    cache_memory: int | None = option(
        None,
        int,
        "Memory limit for the caches of all requests. Idle conversations are "
        "evicted first. [default: what fits]",
        low=1,
        metavar="SIZE",
        is_size=True,
        was=("memory",),
    )
    max_step_ms: float | None = option(
        None,
        float,
        "Maximum milliseconds of a step while answers are generated; 0 = no limit.",
        low=0,
        metavar="MS",
        was=("step_ms",),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prefill_step >= self.max_sequences:
            return
        default = type(self).__dataclass_fields__["prefill_step"].default
        if self.prefill_step == default:
            raise OptionError(
                f"max_sequences: {self.max_sequences} is out of range, a step of {default} tokens "
                "has to hold one of each"
            )
        Option(low=self.max_sequences, high=MOST_TOKENS).check("prefill_step", self.prefill_step)

    @property
    def engine(self) -> dict[str, Any]:
        """The settings of the engine alone, by name."""
        return {name: getattr(self, name) for name in names(EngineSettings)}

    def complete(self, context: int) -> Self:
        """Return the settings in use for a model of `context` tokens.

        The context of a request is never longer than all cells.
        """
        context = self.context or context
        chosen = replace(self, context=min(context, self.kv_cache_tokens or context))
        budget = self.checkpoint_budget
        return replace(
            chosen,
            kv_cache_tokens=self.kv_cache_tokens or chosen.most_cells,
            prefill_step=chosen.step,
            checkpoint_budget=CHECKPOINT_BUDGET if budget is None else budget,
        )

    @property
    def most_cells(self) -> int:
        """Cells that are always enough. The settings need to have a context."""
        return self.max_sequences * (self.context or MOST_TOKENS)

    @property
    def step(self) -> int:
        """The most tokens of a step: no more than all sequences can have."""
        return min(self.prefill_step, self.most_cells)


@dataclass(frozen=True, kw_only=True)
class OpenSettings(EngineSettings):
    """The settings with which an engine is opened on a loaded model."""

    disk_cache_bytes: int = option(
        0,
        int,
        "Disk cache size, for conversations evicted from memory; 0 = none.",
        low=0,
        metavar="SIZE",
        is_size=True,
        was=("park_bytes",),
    )
    disk_cache_dir: str | PathLike[str] | None = option(
        None,
        Path,
        "Folder of the disk cache, kept for the next start. [default: a private one, removed "
        "at the end]",
        metavar="FOLDER",
        was=("park_folder",),
    )
    disk_write_bytes: int = option(
        DISK_WRITE_BYTES,
        int,
        DISK_WRITES,
        low=0,
        metavar="SIZE",
        is_size=True,
    )
    reserve: bool = option(True, bool, "Allocate memory as needed, not at start.")
    wire: str = option(
        "weights",
        str,
        "Memory that macOS may not swap out: weights, all (caches, too) or none.",
        among=tuple(WIRE),
    )
    draft_model: str | None = option(
        None,
        str,
        "Draft model for speculative decoding: a smaller model with the same vocabulary. "
        "Answers stay the same.",
        metavar="MODEL",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.disk_cache_dir is not None:
            check_path("disk_cache_dir", self.disk_cache_dir)
            if not self.disk_cache_bytes:
                raise OptionError("disk_cache_dir: needs disk_cache_bytes, too")


class EngineKwargs(RunnerKwargs, total=False):
    """The settings of EngineSettings but `max_sequences`, for type checkers."""

    context: int | None
    kv_cache_tokens: int | None
    cache_memory: int | None
    max_step_ms: float | None


class OpenKwargs(EngineKwargs, total=False):
    """The settings of OpenSettings but `max_sequences`, for type checkers."""

    disk_cache_bytes: int
    disk_cache_dir: str | PathLike[str] | None
    disk_write_bytes: int
    reserve: bool
    wire: str
    draft_model: str | None
