"""What `ParallelRunner.submit` gives back: a request's answer, as it comes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mlxrunner.errors import MlxrunnerError
from mlxrunner.events import Chunk
from mlxrunner.parallel.request import Request, Result

if TYPE_CHECKING:
    from mlxrunner.parallel.runner import ParallelRunner


class Handle:
    """A request's answer: iterate it for its chunks, as they come; `cancel` ends it without touching the others.

    WrongThreadError from any thread but the runner's; only `error` and `finished` may be read from others.
    """

    def __init__(self, runner: ParallelRunner, request: Request) -> None:
        self._runner, self._request = runner, request

    def __iter__(self) -> Iterator[Chunk]:
        request = self._request
        while True:
            self._runner.owner.check()
            if request.chunks:
                yield request.chunks.popleft()
                continue
            if request.error is not None:
                raise request.error
            if request.finished:
                return
            self._runner.step()

    @property
    def error(self) -> MlxrunnerError | None:
        """What ended it, if it was an error of its own."""
        return self._request.error

    @property
    def finished(self) -> bool:
        """Whether no more chunks will come than those that are there."""
        return self._request.finished

    @property
    def reached(self) -> int:
        """Tokens of the prompt that were evaluated or reused so far."""
        return min(self._request.place, len(self._request.prompt))

    def poll(self) -> list[Chunk]:
        """The chunks that came since the last time, without a step: for whoever drives many requests at once."""
        self._runner.owner.check()
        chunks = list(self._request.chunks)
        self._request.chunks.clear()
        return chunks

    def cancel(self) -> None:
        """End the request; its slot is free, and what it evaluated can be reused."""
        self._runner.cancel(self._request)

    def result(self) -> Result:
        """Wait for the end."""
        return Result.of(list(self))
