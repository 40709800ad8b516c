"""Answer many prompts, as many at a time as a runner has slots: what both fronts have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, Protocol, Unpack

from mlxrunner.config.option import listed, shown
from mlxrunner.engine.owner import Closing
from mlxrunner.errors import OptionError
from mlxrunner.options import SubmitKwargs
from mlxrunner.results import Chunk, Result
from mlxrunner.tokenizer.prompt import Prompt

AHEAD = 4
"""Most requests per slot that `run_each` has read and whose results it has not yielded yet."""


class Answer(Protocol):
    """A handle whose answer is wanted as a whole."""

    def __iter__(self) -> Iterator[Chunk]: ...

    @property
    def finished(self) -> bool: ...

    def result(self) -> Result: ...

    def cancel(self) -> None: ...


class Several(Closing):
    """A runner of several requests at a time."""

    @property
    @abstractmethod
    def num_slots(self) -> int:
        """The most requests that run at a time."""

    @abstractmethod
    def _enqueue(self, prompt: Prompt, options: dict[str, Any]) -> Answer:
        """Begin a request whose whole answer is wanted, as soon as it can begin."""

    def complete(self, prompt: Prompt, **options: Unpack[SubmitKwargs]) -> Result:
        """Run one request to its end, beside the running ones, and return its result.

        Raise the errors of `submit`. If the call is interrupted, the request is cancelled.
        """
        handle = self._enqueue(prompt, dict(options))
        try:
            return handle.result()
        finally:
            handle.cancel()

    def run(self, prompts: Sequence[Prompt], **options: Unpack[SubmitKwargs]) -> list[Result]:
        """Return all answers in the order of the prompts. Each free slot starts the next prompt.

        Raise OptionError if `prompts` is not a list, such as a single text.
        """
        listed("prompts", prompts, '["Hello", [1, 2]]')
        return list(self.run_each((prompt, dict(options)) for prompt in prompts))

    def run_each(self, requests: Iterable[tuple[Prompt, dict[str, Any]]]) -> Iterator[Result]:
        """Yield the answers of `requests`, pairs of a prompt and its options, in their order.

        Only a few more requests are read than can run. If a request can't be submitted or fails, or
        if the iterator is closed, the running requests are cancelled.
        """
        listed("requests", requests, '[("Hello", {"max_tokens": 9})]')
        return self._run_each(requests)

    def _run_each(
        self, requests: Iterable[tuple[Prompt, dict[str, Any]]]
    ) -> Generator[Result, None, None]:
        with closing(self._run_handles(requests)) as handles:
            for handle in handles:
                yield handle.result()

    def _run_handles(
        self, requests: Iterable[tuple[Prompt, dict[str, Any]]]
    ) -> Generator[Answer, None, None]:
        """Yield the handles of `requests` in their order, each to be read to its end at once."""
        handles: deque[Answer] = deque()
        try:
            for number, pair in enumerate(requests):
                handles.append(self._enqueue(*_pair(number, pair)))
                while handles and (handles[0].finished or len(handles) > AHEAD * self.num_slots):
                    yield handles.popleft()
            while handles:
                yield handles.popleft()
        finally:
            for handle in handles:
                self._give_up(handle)

    def _give_up(self, handle: Answer) -> None:
        handle.cancel()


def _pair(number: int, request: Any) -> tuple[Prompt, dict[str, Any]]:
    """Return request `number` of `run_each`. Raise OptionError unless it is a pair."""
    match request:
        case (prompt, Mapping() as options):
            return prompt, dict(options)
    raise OptionError(
        f"request {number} has to be a pair of a prompt and its options, such as "
        f'("Hello", {{"max_tokens": 9}}), not {shown(request)}'
    )
