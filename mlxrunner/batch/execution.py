"""Run the lines of a store on a runner, one at a time or several at once; `run_batch` for programs.

Outcomes come out as the lines end; a failed line gives one, too. No files of the user here.
"""

from __future__ import annotations

import json
import pickle
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Unpack

import mlx.core as mx

from mlxrunner.batch.inputs import checked_id, checked_options
from mlxrunner.batch.options import BatchOptions, Order, OutputOrder
from mlxrunner.batch.prompts import EarlierLines, again, messages_of, shows, tokenize_lines
from mlxrunner.batch.store import InputLine, Store, StoredLine, place_of
from mlxrunner.cache.account import Earlier
from mlxrunner.config.option import check_kind, listed
from mlxrunner.engine.engine import Engine, EngineHandle, MultiRequestRunner
from mlxrunner.engine.parallel_runner import Handle, ParallelRunner, wait_for_news
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
    RequestError,
    StepFailedError,
    StoreError,
    TimeLimitError,
)
from mlxrunner.options import GenerateKwargs, GenerateOptions
from mlxrunner.results import Chunk, Result, Usage
from mlxrunner.runner import Runner
from mlxrunner.templates.messages import has_picture
from mlxrunner.terminal.output import one_line
from mlxrunner.tokenizer.prompt import Prompt, TokenizedPrompt

GIVE_BACK_EVERY = 256
"""The number of lines after which the memory that MLX keeps for later is given back."""
FATAL = (BusyError, StoreError, OutputError, BrokenPipeError)
"""The runner or a file failed, not the request; stop the batch."""
Parallel = Engine | ParallelRunner
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
class BatchRequest:
    """One prompt of a batch."""

    prompt: Prompt
    """The prompt as raw text, token ids or messages."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of `GenerateOptions` for this prompt only."""
    id: str | int | None = None
    """The id that the result carries; None for no id."""


@dataclass(frozen=True)
class BatchResult:
    """The answer to a request of `run_batch`: either a `result` or an `error`."""

    index: int
    """The number of the request, from 0."""
    id: str | int | None
    result: Result | None
    """The answer; None if there is an error."""
    error: RequestError | None = None
    """The reason, in one line, why there is no answer; None if there is one."""

    @property
    def text(self) -> str:
        """The text of the answer. Raise the request's `error` if there is no answer."""
        return self._answered.text

    @property
    def usage(self) -> Usage:
        """The usage of the answer. Raise the request's `error` if there is no answer."""
        return self._answered.usage

    @property
    def _answered(self) -> Result:
        if self.result is None:
            raise self.error or RequestError("the request has no answer")
        return self.result


def run_batch(
    runner: AnyRunner,
    requests: Iterable[BatchRequest],
    *,
    order: Order = "prefix",
    output_order: OutputOrder = "input",
    retries: int = 0,
    timeout: float | None = None,
    **defaults: Unpack[GenerateKwargs],
) -> Iterator[BatchResult]:
    """Answer all requests in the order that reuses most; yield the results as the requests came.

    The requests are first read to their end, into a temporary file; memory does not grow with their
    number. A ParallelRunner runs one request per slot at a time; the results are the same.

    `order` is "prefix", or "input" to run the requests as they come. `output_order` is "input", or
    "done" to yield each result as soon as it is there. `retries` is the number of further tries for
    a request that failed, and `timeout` the most seconds for each try. `defaults` are options of
    `Runner.generate` for requests that do not give them. With a default seed S, request number i
    (from 0) gets the seed S + i.

    A request that can't be run, fails or takes too long has a result with an `error` and never
    stops the others. Raise OptionError at once if an option of the whole batch is wrong. Ctrl-C, or
    closing the iterator, ends the requests that are running and leaves the runner usable.
    """
    if not isinstance(runner, Engine):
        check_kind("runner", runner, (Runner, ParallelRunner), "load one with Runner.load(model)")
    listed("requests", requests, '[BatchRequest("Hello")]')
    options = BatchOptions(
        defaults=defaults, order=order, output_order=output_order, retries=retries, timeout=timeout
    )
    return _run_batch(runner, requests, options)


def _run_batch(
    runner: AnyRunner, requests: Iterable[BatchRequest], options: BatchOptions
) -> Iterator[BatchResult]:
    with Store.create(unique_ids=False) as store:
        is_shifted = tokenize_lines(
            store,
            lines_of(requests, options),
            runner.tokenizer,
            context=runner.context,
            defaults=options.defaults,
        )
        store.finish(by_tokens=is_shifted)
        place = -1
        begun = EarlierLines.of(
            store, options.order, parallel=isinstance(runner, MultiRequestRunner)
        )
        execution = Execution(runner, options, begun)
        with closing(execution.run(store.pending(options.order))) as outcomes:
            for outcome in outcomes:
                line, error = outcome.line, None
                if outcome.error is not None:
                    message = outcome.error.removeprefix(f"{place_of(line.number)}: ")
                    error = RequestError(message, is_refused=outcome.is_refused)
                result = BatchResult(line.index, line.id, outcome.result, error)
                if options.output_order == "done":
                    yield result
                    continue
                store.record(result.index, pickle.dumps(result))
                for answer in store.answers(after=place):
                    place = answer.place
                    found: BatchResult = pickle.loads(answer.body)
                    yield found


def lines_of(
    requests: Iterable[BatchRequest], batch: BatchOptions | None = None
) -> Iterator[InputLine]:
    """Yield the requests of a program as lines.

    A line gets an error if its id or its options, together with the defaults, are wrong.
    """
    batch = batch or BatchOptions()
    for index, request in enumerate(requests):
        if not isinstance(request, BatchRequest):
            shown = f"{request!r:.80}"
            raise PromptError(f"request {index} has to be a BatchRequest(prompt), not {shown}")
        options: dict[str, Any] = {}
        name, error, prompt = None, None, request.prompt
        try:
            name = checked_id("id", request.id)
            if isinstance(prompt, list | tuple) and any(map(has_picture, prompt)):
                prompt = messages_of(prompt)
            options = json.loads(json.dumps(checked_options(dict(request.options), None, batch)))
        except (OptionError, PromptError) as problem:
            error = str(problem)
        except (TypeError, ValueError, RecursionError) as problem:
            error = (
                f"options: {request.options!r:.80} has to be a dictionary of options with values "
                f'that JSON knows, such as {{"max_tokens": 9}}: {problem}'
            )
        yield InputLine(index, index + 1, prompt, name, options=options, error=error)


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
    text = text if isinstance(error, MlxrunnerError) else f"{type(error).__name__}: {text}"
    return Outcome(line, error=text, kind=kind)


class Deadline:
    """A callable that ticks, and raises TimeLimitError when the time of a try is over."""

    def __init__(self, tick: Callable[[], None], timeout: float | None) -> None:
        """Begin the time of a try, of `timeout` seconds; None for no limit."""
        self._tick, self._timeout = tick, timeout
        self._end = time.monotonic() + (timeout or 0)
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


class _SingleRequest:
    """A request of a Runner with the members of a handle: all that one line at a time lacks."""

    def __init__(self, start: Callable[[], Iterator[Chunk]], tokens: int, deadline: Deadline):
        """`start` begins the request, whose prompt has this number of tokens."""
        self._start, self._tokens, self._deadline = start, tokens, deadline
        self._answer: Iterator[Chunk] | None = None
        self._chunks: list[Chunk] = []
        self._has_chunk = self.finished = False
        self.error: Exception | None = None

    @property
    def reached(self) -> int:
        """The number of the prompt's tokens that are evaluated."""
        return self._tokens if self._has_chunk else self._deadline.reached

    def step(self) -> None:
        """Make the next chunk; after the last one, run to the end."""
        try:
            self._answer = self._answer or self._start()
            chunk = next(self._answer)
            self._chunks.append(chunk)
            self._has_chunk = True
            if chunk.finish_reason is not None:
                next(self._answer, None)
                self.finished = True
        except Exception as error:
            self.error = error

    def poll(self) -> list[Chunk]:
        """Return the chunks since the last call."""
        chunks, self._chunks = self._chunks, []
        return chunks

    def cancel(self) -> None:
        """End the request."""
        if (close := getattr(self._answer, "close", None)) is not None:
            close()


@dataclass(eq=False)
class _RunningLine:
    line: StoredLine
    handle: Handle | EngineHandle | _SingleRequest
    deadline: Deadline
    retries: int
    chunks: list[Chunk] = field(default_factory=list)


class Execution:
    """The run of the lines of a batch on a runner, as many side by side as it has slots."""

    def __init__(
        self,
        runner: AnyRunner | None,
        options: BatchOptions,
        begun: EarlierLines,
        is_stopping: Callable[[], bool] = lambda: False,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """Run lines on `runner`; None if no line can be run. `begun` are those that have begun.

        `is_stopping` returns True when no further line may begin. `tick` is called after each token
        and each piece of a prompt.
        """
        self._runner, self._options, self._begun = runner, options, begun
        self._is_stopping, self._tick = is_stopping, tick
        self._slots = runner.num_slots if isinstance(runner, MultiRequestRunner) else 1
        self._running: list[_RunningLine] = []
        self._waiting: deque[tuple[StoredLine, int]] = deque()  # lines and their retries

    def run(self, lines: Iterator[StoredLine]) -> Outcomes:
        """Yield the outcomes as they end. A line is read when it can begin.

        Requests that still run when the iterator is closed are cancelled.
        """
        try:
            for number, outcome in enumerate(self._outcomes(lines), 1):
                yield outcome
                # Steps of new sizes leave more and more buffers.
                if number % GIVE_BACK_EVERY == 0 and isinstance(self._runner, MultiRequestRunner):
                    mx.clear_cache()
        finally:
            for one in self._running:
                one.handle.cancel()

    def _outcomes(self, lines: Iterator[StoredLine]) -> Iterator[Outcome]:
        while True:
            yield from self._begin(lines)
            if not self._running:
                return
            self._advance()
            yield from self._ended()

    def _prompt_of(self, line: StoredLine, runner: AnyRunner) -> TokenizedPrompt:
        """Return the prompt of a line: its tokens, and the number that earlier lines share.

        If the runner is observed, the prompt also has its text and messages. Raise PromptError if a
        picture has changed.
        """
        earlier: Earlier | None = self._begun.begin(line.index, line.tokens)
        if len(line.tokens) >= runner.context:
            earlier = None  # a shift makes another prompt of it
        line_of = self._begun.line(line.index + 1)
        own: dict[str, Any] = {"earlier": earlier, "line": line_of}
        said: Any = line.prompt
        if shows(said):
            views, said = again(said, runner.tokenizer, self._options.picture_folder)
            own |= {"pictures": len(views), "views": views}
        elif not runner.observers or said is None:
            return TokenizedPrompt(line.tokens, **own)
        elif isinstance(said, str):
            return TokenizedPrompt(line.tokens, "text", text=said, **own)
        options = self._options.of_line(line.index, line.options)
        variables = GenerateOptions.of(**options).variables
        text = runner.tokenizer.render(said, **variables) if runner.observers else ""
        return TokenizedPrompt(line.tokens, "messages", said, text, variables, **own)

    def _advance(self) -> None:
        """Run a step, or wait for what the thread of the runner makes or for a deadline."""
        if isinstance(self._runner, Engine):
            self._runner.step()
            return
        handles = [one.handle for one in self._running]
        if isinstance(handles[0], _SingleRequest):
            handles[0].step()
            return
        lefts = [one.deadline.left for one in self._running if one.deadline.left is not None]
        wait_for_news([one for one in handles if isinstance(one, Handle)], min(lefts, default=None))

    def _begin(self, lines: Iterator[StoredLine]) -> Iterator[Outcome]:
        """Submit the lines that can begin now, and yield the outcomes of those that can't."""
        while (taken := self._next(lines)) is not None:
            line, retries = taken
            if line.error is not None:
                yield refused(line, line.error)
                continue
            deadline = Deadline(self._tick, self._options.timeout)
            try:
                handle = self._submit(line, deadline)
            except (NoFreeSlotError, CacheFullError) as error:
                self._begun.failed(line.index, 0)
                if self._running:
                    self._waiting.appendleft(taken)
                    return
                yield _failed(line, error)
            except (PromptError, OptionError) as error:
                self._begun.failed(line.index, 0)
                yield refused(line, str(error))
            else:
                self._running.append(_RunningLine(line, handle, deadline, retries))

    def _submit(
        self, line: StoredLine, deadline: Deadline
    ) -> Handle | EngineHandle | _SingleRequest:
        options = self._options.of_line(line.index, line.options)
        runner = self._runner
        assert runner is not None  # there is one for a line that can be run
        if isinstance(runner, MultiRequestRunner):
            return runner.submit(self._prompt_of(line, runner), **options)

        def start() -> Iterator[Chunk]:
            return runner.generate(self._prompt_of(line, runner), progress=deadline, **options)

        return _SingleRequest(start, len(line.tokens), deadline)

    def _next(self, lines: Iterator[StoredLine]) -> tuple[StoredLine, int] | None:
        """Return the next line to begin and its retries; None if none can begin now."""
        if len(self._running) == self._slots:
            return None
        if self._waiting:
            return self._waiting.popleft()
        line = None if self._is_stopping() else next(lines, None)
        return None if line is None else (line, self._options.retries)

    def _ended(self) -> Iterator[Outcome]:
        """Yield the outcomes of the requests that ended with this step or ran out of time."""
        for one in list(self._running):
            one.chunks += one.handle.poll()
            try:
                if one.handle.error is not None:
                    raise one.handle.error
                if not one.handle.finished:
                    one.deadline()
                    continue
                outcome = Outcome(one.line, Result.of(one.chunks))
            except FATAL:
                raise
            except (PromptError, OptionError) as error:
                one.handle.cancel()
                self._begun.failed(one.line.index, 0)
                outcome = refused(one.line, str(error))
            except Exception as error:
                one.handle.cancel()
                self._begun.failed(one.line.index, one.handle.reached)
                if one.retries:
                    self._running.remove(one)
                    self._waiting.append((one.line, one.retries - 1))
                    continue
                outcome = _failed(one.line, error)
            self._running.remove(one)
            yield outcome
