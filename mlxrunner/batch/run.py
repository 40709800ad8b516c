"""Run requests, one at a time or several at once, so that one that fails is an answer like any other. No files here.

`run_batch` is the way in for programs; `answer` is what it and the command share: entries of a store in, outcomes out as they end.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any

import mlx.core as mx

from mlxrunner.batch.earlier import Begun, begun_of
from mlxrunner.batch.output import OutputError
from mlxrunner.batch.request import BatchRequest, BatchResult
from mlxrunner.batch.spool import lines_of, spool
from mlxrunner.batch.store import Entry, Order, Store, StoreError
from mlxrunner.cache.lookup import Earlier
from mlxrunner.cache.sequences import CacheFullError
from mlxrunner.config import GenerateOptions
from mlxrunner.errors import BusyError, MlxrunnerError, OptionError, PromptError
from mlxrunner.events import Chunk, Usage
from mlxrunner.parallel.handle import Handle
from mlxrunner.parallel.request import Result
from mlxrunner.parallel.runner import ParallelRunner
from mlxrunner.parallel.slots import NoFreeSlotError
from mlxrunner.runner import Runner
from mlxrunner.terminal import one_line
from mlxrunner.tokenizer.prompt import Prepared

ORDERS: tuple[Order, ...] = ("prefix", "input")
OUTPUT_ORDERS = ("input", "done")
GIVE_BACK_EVERY = 256
"""Lines after which memory that MLX keeps for later is given back."""
FATAL = (BusyError, StoreError, OutputError, BrokenPipeError)
"""No fault of a request, and no good for the next one."""


class TimeLimitError(MlxrunnerError):
    """A request that did not end in its time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"stopped after {seconds:g} s without an end: allow more time, or a shorter answer (max_tokens)"
        )


@dataclass(frozen=True)
class Outcome:
    """How one entry ended: with a `result`, or with an `error` in one line; `is_refused`: the request was at fault, and was not run."""

    entry: Entry
    result: Result | None = None
    error: str | None = None
    is_refused: bool = False


@dataclass(frozen=True)
class How:
    """What holds for all entries. `defaults`: options of those that don't say otherwise; a default seed S gives number i the seed S + i.

    `retries`: of a request that failed, unless it was refused; `timeout`: seconds for each try. `is_stopping`: when true no further
    entry is begun. `tick` is called after each token and each piece of a prompt.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    retries: int = 0
    timeout: float | None = None
    is_stopping: Callable[[], bool] = lambda: False
    tick: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        if isinstance(self.retries, bool) or not isinstance(self.retries, int) or self.retries < 0:
            raise OptionError(
                f"retries: {self.retries!r} is out of range, it has to be a whole number of at least 0"
            )
        if self.timeout is not None and not self.timeout > 0:
            raise OptionError(
                f"timeout: {self.timeout!r} is out of range, it has to be more than 0 seconds"
            )

    def options(self, entry: Entry) -> dict[str, Any]:
        options = {**self.defaults, **entry.options}
        if options.get("seed") is not None and entry.options.get("seed") is None:
            options["seed"] = (self.defaults["seed"] + entry.index) % 2**64
        return options


class Deadline:
    """Call it often: it ticks, and raises TimeLimitError when the time is over. `reached`: tokens of the prompt that are evaluated."""

    def __init__(self, how: How) -> None:
        self._how, self.reached = how, 0
        self._end = time.monotonic() + (how.timeout or 0)

    def __call__(self, reached: int = 0, *_: object) -> None:
        self.reached = max(self.reached, reached)
        self._how.tick()
        if self._how.timeout is not None and time.monotonic() > self._end:
            raise TimeLimitError(self._how.timeout)


def run_batch(
    runner: Runner | ParallelRunner,
    requests: Iterable[BatchRequest],
    *,
    order: Order = "prefix",
    output_order: str = "input",
    retries: int = 0,
    timeout: float | None = None,
    **defaults: Any,
) -> Iterator[BatchResult]:
    """Answer all requests, in the order in which they reuse most of each other, and give the results back in the order they came.

    The requests are read to their end first, into a temporary file; memory does not grow with their number. order: "prefix", or
    "input" to run them as they come. output_order: "done" gives each result as soon as it is there. retries, timeout: of a request
    that failed, and seconds for each try. defaults: options of `Runner.generate` for requests that don't say otherwise; with a default
    seed S, request number i gets S + i. A ParallelRunner runs as many at a time as it has slots; the results are the same.

    A request that can't be run, fails or takes too long is a result with an `error`; it never stops the others. OptionError at once for
    options of the whole batch that are wrong. Ctrl-C, or closing the iterator, ends what is running and leaves the runner usable.
    """
    for name, value, known in (
        ("order", order, ORDERS),
        ("output_order", output_order, OUTPUT_ORDERS),
    ):
        if value not in known:
            raise OptionError(
                f"{name}: {value!r} is not known, it has to be one of {', '.join(known)}"
            )
    GenerateOptions.of(**defaults)
    how = How(defaults, retries, timeout)
    return _run_batch(runner, requests, order, output_order == "done", how)


def _run_batch(
    runner: Runner | ParallelRunner,
    requests: Iterable[BatchRequest],
    order: Order,
    as_done: bool,
    how: How,
) -> Iterator[BatchResult]:
    with Store.create(unique_ids=False) as store:
        spool(
            store,
            lines_of(requests, how.defaults),
            runner.tokenizer,
            context=context_of(runner),
            defaults=how.defaults,
        )
        store.finish()
        place = -1
        begun = begun_of(store, order, parallel=isinstance(runner, ParallelRunner))
        with closing(answer(runner, store.pending(order), how, begun)) as outcomes:  # type: ignore[type-var]
            for outcome in outcomes:
                entry, error = (
                    outcome.entry,
                    outcome.error and outcome.error.removeprefix(f"line {outcome.entry.number}: "),
                )
                result = BatchResult(entry.index, entry.id, outcome.result, error)
                if as_done:
                    yield result
                    continue
                store.record(result.index, _to_bytes(result))
                for body in store.bodies(after=place):
                    place = body.place
                    yield _from_bytes(body.body)


def answer(
    runner: Runner | ParallelRunner | None, entries: Iterator[Entry], how: How, begun: Begun
) -> Iterator[Outcome]:
    """The outcomes, as they end; entries are read one by one, as they can be begun. No runner is needed if none can be run."""
    if isinstance(runner, ParallelRunner):
        return _giving_back(Together(runner, entries, how, begun).run())
    return _one_by_one(runner, entries, how, begun)


def _giving_back(outcomes: Iterator[Outcome]) -> Iterator[Outcome]:
    """Free the unused buffers of MLX from time to time, because steps of new sizes leave more and more of them."""
    with closing(outcomes):  # type: ignore[type-var]
        for number, outcome in enumerate(outcomes, 1):
            yield outcome
            if number % GIVE_BACK_EVERY == 0:
                mx.clear_cache()


def _one_by_one(
    runner: Runner | None, entries: Iterator[Entry], how: How, begun: Begun
) -> Iterator[Outcome]:
    for entry in entries:
        if how.is_stopping():
            return
        if entry.error is not None:
            yield _refused(entry, entry.error)
        else:
            assert runner is not None
            yield _tried(runner, entry, how, begun)


def _tried(runner: Runner, entry: Entry, how: How, begun: Begun) -> Outcome:
    for left in range(how.retries, -1, -1):
        deadline, chunks = Deadline(how), list[Chunk]()
        try:
            prompt = prompt_of(entry, runner, begun)
            with closing(
                runner.generate(prompt, progress=deadline, **how.options(entry))
            ) as answered:  # type: ignore[type-var]
                for chunk in answered:
                    chunks.append(chunk)
                    if chunk.finish_reason is None:
                        deadline()
            return Outcome(entry, Result.of(chunks))
        except FATAL:
            raise
        except (PromptError, OptionError) as error:
            begun.failed(entry.index, 0)
            return _refused(entry, str(error))
        except Exception as error:
            begun.failed(entry.index, len(entry.tokens) if chunks else deadline.reached)
            if not left:
                return Outcome(entry, error=_described(error))
    raise AssertionError  # the last try returns


def prompt_of(entry: Entry, runner: Runner | ParallelRunner, begun: Begun) -> Prepared:
    """Prepare a line: its tokens, how many other lines have, and for a profile also the messages."""
    earlier: Earlier | None = begun.begin(entry.index, entry.tokens)
    if len(entry.tokens) >= context_of(runner):
        earlier = None  # what is left of it is another prompt
    if runner.observer is None or entry.prompt is None:
        return Prepared(entry.tokens, earlier=earlier)
    if isinstance(entry.prompt, str):
        return Prepared(entry.tokens, "text", text=entry.prompt, earlier=earlier)
    return Prepared(
        entry.tokens,
        "messages",
        entry.prompt,
        runner.tokenizer.render(entry.prompt),
        earlier=earlier,
    )


def context_of(runner: Runner | ParallelRunner) -> int:
    """Most tokens of a prompt and its answer."""
    return runner.capacity if isinstance(runner, ParallelRunner) else runner.context


@dataclass(eq=False)
class Flight:
    """A request that is running beside others. `left`: retries."""

    entry: Entry
    handle: Handle
    deadline: Deadline
    left: int
    chunks: list[Chunk] = field(default_factory=list)


class Together:
    """As many requests at once as the runner has slots.

    An error in a step that all share ends all of them, and nobody knows whose fault it was: each is run again, alone.
    """

    def __init__(
        self, runner: ParallelRunner, entries: Iterator[Entry], how: How, begun: Begun
    ) -> None:
        self._runner, self._entries, self._how, self._begun = runner, entries, how, begun
        self._flights: list[Flight] = []
        self._waiting: deque[tuple[Entry, int]] = deque()  # with their retries
        self._suspects: deque[tuple[Entry, int]] = deque()

    def run(self) -> Iterator[Outcome]:
        try:
            while True:
                yield from self._begin()
                if not self._flights:
                    return
                try:
                    self._runner.step()
                except Exception as error:
                    yield from self._fell(error)
                yield from self._landed()
        finally:
            for flight in self._flights:
                flight.handle.cancel()

    def _begin(self) -> Iterator[Outcome]:
        """Submit what can begin now."""
        while (taken := self._next()) is not None:
            entry, left = taken
            if entry.error is not None:
                yield _refused(entry, entry.error)
                continue
            options = self._how.options(entry)
            try:
                handle = self._runner.submit(prompt_of(entry, self._runner, self._begun), **options)
            except (NoFreeSlotError, CacheFullError) as error:
                self._begun.failed(entry.index, 0)
                if self._flights:
                    self._waiting.appendleft(taken)
                    return
                yield Outcome(entry, error=_described(error))
            except (PromptError, OptionError) as error:
                self._begun.failed(entry.index, 0)
                yield _refused(entry, str(error))
            else:
                self._flights.append(Flight(entry, handle, Deadline(self._how), left))

    def _next(self) -> tuple[Entry, int] | None:
        """What is to be begun; a suspect only where nothing else runs, and nothing beside it."""
        if self._suspects:
            return None if self._flights else self._suspects.popleft()
        if len(self._flights) == len(self._runner.slots):
            return None
        if self._waiting:
            return self._waiting.popleft()
        entry = None if self._how.is_stopping() else next(self._entries, None)
        return None if entry is None else (entry, self._how.retries)

    def _landed(self) -> Iterator[Outcome]:
        """What has ended with this step, or has no time left."""
        for flight in list(self._flights):
            flight.chunks += flight.handle.poll()
            try:
                if flight.handle.error is not None:
                    raise flight.handle.error
                if flight.handle.finished:
                    outcome = Outcome(flight.entry, Result.of(flight.chunks))
                else:
                    flight.deadline()
                    continue
            except FATAL:
                raise
            except Exception as error:
                flight.handle.cancel()
                self._begun.failed(flight.entry.index, flight.handle.reached)
                if flight.left:
                    self._flights.remove(flight)
                    self._waiting.append((flight.entry, flight.left - 1))
                    continue
                outcome = Outcome(flight.entry, error=_described(error))
            self._flights.remove(flight)
            yield outcome

    def _fell(self, error: Exception) -> Iterator[Outcome]:
        """The runner has ended all requests."""
        flights, self._flights = self._flights, []
        for flight in flights:
            self._begun.failed(flight.entry.index, flight.handle.reached)
        if len(flights) > 1:
            self._suspects.extend((flight.entry, flight.left) for flight in flights)
            return
        for flight in flights:
            if flight.left:
                self._suspects.append((flight.entry, flight.left - 1))
            else:
                yield Outcome(flight.entry, error=_described(error))


def _refused(entry: Entry, error: str) -> Outcome:
    return Outcome(entry, error=one_line(error), is_refused=True)


def _described(error: Exception) -> str:
    text = one_line(" ".join(str(error).split()))
    return text if isinstance(error, MlxrunnerError) else f"{type(error).__name__}: {text}"


def _to_bytes(result: BatchResult) -> bytes:
    return json.dumps(asdict(result)).encode()


def _from_bytes(body: bytes) -> BatchResult:
    stored = json.loads(body)
    result = stored["result"]
    if result is not None:
        result["usage"] = Usage(**result["usage"])
        logprobs = result["logprobs"]
        if logprobs is not None:
            result["logprobs"] = [
                (own, {int(token): value for token, value in top.items()}) for own, top in logprobs
            ]
        result = Result(**result)
    return BatchResult(**{**stored, "result": result})
