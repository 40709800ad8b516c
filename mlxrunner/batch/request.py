"""What a batch is made of for a program, and what it gives back. Files of lines are in `mlxrunner.batch.lines`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlxrunner.tokenizer.prompt import Prompt

if TYPE_CHECKING:
    from mlxrunner.parallel.request import Result


@dataclass(frozen=True)
class BatchRequest:
    """One prompt: raw text, token ids or messages. `options`: those of `GenerateOptions`, for this prompt only."""

    prompt: Prompt
    options: Mapping[str, Any] = field(default_factory=dict)
    id: str | int | None = None


@dataclass(frozen=True)
class BatchResult:
    """The answer to the request that came as number `index` (from 0): either `result`, or `error`, one line that says what was wrong."""

    index: int
    id: str | int | None
    result: Result | None
    error: str | None = None
