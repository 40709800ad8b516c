"""Describe the engine that reaches the workers of a batch: the only interface to it.

Dask is one such engine (`over_dask.py`). Knows nothing about batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Reply:
    """The end of a call: a value or an error."""

    call: int
    """The number of the call, as `Machines.call` returned it."""
    value: Any = None
    """The value that the function returned."""
    error: BaseException | None = None
    """The exception that ended the function or kept it from running; None if it returned."""


class Machines(Protocol):
    """Workers that come and go, and calls of functions on them."""

    @property
    def signs(self) -> Mapping[str, Any]:
        """The last sign of life of each worker, by name: a value that changes while it lives."""

    def call(self, worker: str, function: Callable[..., Any], *arguments: Any) -> int:
        """Call a module's function with plain data on a worker. Return the number of the call.

        A call to a worker that has gone may never end.
        """

    def forget(self, call: int) -> None:
        """Drop a call: `replies` does not return it any more."""

    def replies(self, timeout: float) -> list[Reply]:
        """Return the calls that have ended; wait up to `timeout` seconds for the first.

        Raise CutOffError if the workers can't be reached any more.
        """
