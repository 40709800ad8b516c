"""Run the lines of a store on a runner, one at a time or several at once.

Outcomes come out as the lines end; a failed line gives one, too. No files here.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlxrunner.batch.options import BatchOptions
from mlxrunner.batch.pictures import again, shows
from mlxrunner.batch.prompts import Begun
from mlxrunner.batch.records import StoredLine
from mlxrunner.cache.lookup import Earlier
from mlxrunner.errors import (
    BusyError,
    CacheFullError,
    ContextFullError,
    FormError,
    LogitsError,
    MlxrunnerError,
    NoFreeSlotError,
    OptionError,
    OutputError,
    PromptError,
    StepFailedError,
    StoreError,
    TimeLimitError,
)
from mlxrunner.options import GenerateOptions
from mlxrunner.parallel.driven import DrivenHandle
from mlxrunner.parallel.handle import Handle, wait_for_news
from mlxrunner.parallel.runner import ParallelRunner
from mlxrunner.parallel.several import Several
from mlxrunner.parallel.stepper import Stepper
from mlxrunner.results import Chunk, Result
from mlxrunner.runner import Runner
from mlxrunner.terminal.text import one_line
from mlxrunner.tokenizer.prompt import LineOfBatch, TokenizedPrompt

GIVE_BACK_EVERY = 256
"""The number of lines after which the memory that MLX keeps for later is given back."""
FATAL = (BusyError, StoreError, OutputError, BrokenPipeError)
"""The runner or a file failed, not the request; stop the batch."""
Parallel = Stepper | ParallelRunner
AnyRunner = Runner | Parallel
KINDS: dict[type[Exception], str] = {
    TimeLimitError: "timeout",
    ContextFullError: "context_full",
    FormError: "form",
    LogitsError: "logits",
    CacheFullError: "memory",
}
"""The names of failures in the summary of a batch."""


@dataclass(frozen=True)
class Outcome:
    """The end of one line: a `result` or an `error`."""

    line: StoredLine
    result: Result | None = None
    error: str | None = None
    """The reason for the failure, in one line; None if there is a result."""
    is_refused: bool = False
    """True if the request was at fault and was not run."""
    kind: str = ""
    """The kind of the failure: "refused", one of `KINDS` or "other"; empty if there is a result."""


Outcomes = Generator[Outcome, None, None]


def refused(line: StoredLine, error: str) -> Outcome:
    """Return the outcome of a line that is wrong in itself."""
    return Outcome(line, error=one_line(error), is_refused=True, kind="refused")


def _failed(line: StoredLine, error: Exception) -> Outcome:
    if isinstance(error, StepFailedError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # what the line gives when it runs alone
    text = one_line(" ".join(str(error).split()))
    kind = next((KINDS[known] for known in KINDS if isinstance(error, known)), "other")
    return Outcome(
        line,
        error=text if isinstance(error, MlxrunnerError) else f"{type(error).__name__}: {text}",
        kind=kind,
    )


@dataclass(frozen=True)
class Execution:
    """The run of the lines of a batch on a runner."""

    runner: AnyRunner | None
    """The runner; None if no line can be run."""
    options: BatchOptions
    """The options of the batch."""
    begun: Begun
    """The lines that have begun."""
    is_stopping: Callable[[], bool] = lambda: False
    """A function that returns True when no further line may begin."""
    tick: Callable[[], None] = lambda: None
    """A function that is called after each token and each piece of a prompt."""

    def run(self, lines: Iterator[StoredLine]) -> Outcomes:
        """Yield the outcomes as they end. A line is read when it can begin."""
        if isinstance(self.runner, Several):
            return _giving_back(_Together(self, self.runner, lines).run())
        return self._one_by_one(self.runner, lines)

    def _one_by_one(self, runner: Runner | None, lines: Iterator[StoredLine]) -> Outcomes:
        for line in lines:
            if self.is_stopping():
                return
            if line.error is not None:
                yield refused(line, line.error)
            else:
                assert runner is not None
                yield self._tried(runner, line)

    def _tried(self, runner: Runner, line: StoredLine) -> Outcome:
        """Run a line, again if it fails and retries are left, and return its outcome."""
        for left in range(self.options.retries, -1, -1):
            deadline, chunks = Deadline(self), list[Chunk]()
            options = self.options.of_line(line.index, line.options)
            try:
                prompt = self.prompt_of(line, runner)
                with closing(runner.generate(prompt, progress=deadline, **options)) as answered:
                    for chunk in answered:
                        chunks.append(chunk)
                        if chunk.finish_reason is None:
                            deadline()
                return Outcome(line, Result.of(chunks))
            except FATAL:
                raise
            except (PromptError, OptionError) as error:
                self.begun.failed(line.index, 0)
                return refused(line, str(error))
            except Exception as error:
                self.begun.failed(line.index, len(line.tokens) if chunks else deadline.reached)
                if not left:
                    return _failed(line, error)
        raise AssertionError  # the last try returns

    def prompt_of(self, line: StoredLine, runner: AnyRunner) -> TokenizedPrompt:
        """Return the prompt of a line: its tokens, and the number that earlier lines share.

        If the runner is observed, the prompt also has its text and messages.
        """
        earlier: Earlier | None = self.begun.begin(line.index, line.tokens)
        if len(line.tokens) >= runner.context:
            earlier = None  # a shift makes another prompt of it
        own = self.begun.line(line.index + 1)
        if shows(line.prompt):
            return self._shown(line, runner, earlier, own)
        if not runner.observers or line.prompt is None:
            return TokenizedPrompt(line.tokens, earlier=earlier, line=own)
        if isinstance(line.prompt, str):
            return TokenizedPrompt(line.tokens, "text", text=line.prompt, earlier=earlier, line=own)
        options = self.options.of_line(line.index, line.options)
        variables = GenerateOptions.of(**options).variables
        text = runner.tokenizer.render(line.prompt, **variables)
        return TokenizedPrompt(
            line.tokens, "messages", line.prompt, text, variables, earlier=earlier, line=own
        )

    def _shown(
        self, line: StoredLine, runner: AnyRunner, earlier: Earlier | None, own: LineOfBatch | None
    ) -> TokenizedPrompt:
        """Return the prompt of a line with pictures. Raise PromptError if one has changed."""
        messages: Any = line.prompt
        views, said = again(messages, runner.tokenizer, self.options.picture_folder)
        options = self.options.of_line(line.index, line.options)
        variables = GenerateOptions.of(**options).variables
        return TokenizedPrompt(
            line.tokens,
            "messages",
            said,
            runner.tokenizer.render(said, **variables) if runner.observers else "",
            variables,
            earlier=earlier,
            line=own,
            pictures=len(views),
            views=views,
        )


class Deadline:
    """A callable that ticks, and raises TimeLimitError when the time of a try is over.

    Call it often.
    """

    def __init__(self, execution: Execution) -> None:
        """Begin the time of a try, which is the `timeout` of the execution's options."""
        self._tick, self._timeout = execution.tick, execution.options.timeout
        self._end = time.monotonic() + (self._timeout or 0)
        self.reached = 0
        """Tokens of the prompt that are evaluated."""

    @property
    def left(self) -> float | None:
        """Seconds that are left; None without a limit."""
        return None if self._timeout is None else max(0.0, self._end - time.monotonic())

    def __call__(self, reached: int = 0, *_: object) -> None:
        self.reached = max(self.reached, reached)
        self._tick()
        if self._timeout is not None and time.monotonic() > self._end:
            raise TimeLimitError(self._timeout)


def _giving_back(outcomes: Outcomes) -> Outcomes:
    """Yield the outcomes, and free the unused buffers of MLX from time to time.

    Steps of new sizes leave more and more of these buffers.
    """
    with closing(outcomes):
        for number, outcome in enumerate(outcomes, 1):
            yield outcome
            if number % GIVE_BACK_EVERY == 0:
                mx.clear_cache()


@dataclass(eq=False)
class _Flight:
    """A request that is running beside others."""

    line: StoredLine
    handle: Handle | DrivenHandle
    deadline: Deadline
    retries: int
    """The number of retries that are left."""
    chunks: list[Chunk] = field(default_factory=list)


class _Together:
    """The requests that run side by side, as many as the runner has slots."""

    def __init__(self, execution: Execution, runner: Parallel, lines: Iterator[StoredLine]) -> None:
        self._execution, self._runner, self._lines = execution, runner, lines
        self._begun = execution.begun
        self._flights: list[_Flight] = []
        self._waiting: deque[tuple[StoredLine, int]] = deque()  # lines and their retries

    def run(self) -> Outcomes:
        """Yield the outcomes as they end. Requests that still run are cancelled at the end."""
        try:
            while True:
                yield from self._begin()
                if not self._flights:
                    return
                self._advance()
                yield from self._landed()
        finally:
            for flight in self._flights:
                flight.handle.cancel()

    def _advance(self) -> None:
        """Run a step, or wait for what the thread of the runner makes or for a deadline."""
        if isinstance(self._runner, Stepper):
            self._runner.step()
            return
        handles = [one.handle for one in self._flights if isinstance(one.handle, Handle)]
        lefts = [one.deadline.left for one in self._flights if one.deadline.left is not None]
        wait_for_news(handles, min(lefts, default=None))

    def _begin(self) -> Iterator[Outcome]:
        """Submit the lines that can begin now, and yield the outcomes of those that can't."""
        while (taken := self._next()) is not None:
            line, retries = taken
            if line.error is not None:
                yield refused(line, line.error)
                continue
            options = self._execution.options.of_line(line.index, line.options)
            try:
                handle = self._runner.submit(
                    self._execution.prompt_of(line, self._runner), **options
                )
            except (NoFreeSlotError, CacheFullError) as error:
                self._begun.failed(line.index, 0)
                if self._flights:
                    self._waiting.appendleft(taken)
                    return
                yield _failed(line, error)
            except (PromptError, OptionError) as error:
                self._begun.failed(line.index, 0)
                yield refused(line, str(error))
            else:
                self._flights.append(_Flight(line, handle, Deadline(self._execution), retries))

    def _next(self) -> tuple[StoredLine, int] | None:
        """Return the next line to begin and its retries; None if none can begin now."""
        if len(self._flights) == self._runner.num_slots:
            return None
        if self._waiting:
            return self._waiting.popleft()
        line = None if self._execution.is_stopping() else next(self._lines, None)
        return None if line is None else (line, self._execution.options.retries)

    def _landed(self) -> Iterator[Outcome]:
        """Yield the outcomes of the requests that ended with this step or ran out of time."""
        for flight in list(self._flights):
            flight.chunks += flight.handle.poll()
            try:
                if flight.handle.error is not None:
                    raise flight.handle.error
                if not flight.handle.finished:
                    flight.deadline()
                    continue
                outcome = Outcome(flight.line, Result.of(flight.chunks))
            except FATAL:
                raise
            except Exception as error:
                flight.handle.cancel()
                self._begun.failed(flight.line.index, flight.handle.reached)
                if flight.retries:
                    self._flights.remove(flight)
                    self._waiting.append((flight.line, flight.retries - 1))
                    continue
                outcome = _failed(flight.line, error)
            self._flights.remove(flight)
            yield outcome
