"""Answer the prompts of a program as a batch: `run_batch`.

It shares `Execution` with the command. No files here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Unpack

from mlxrunner.batch.execution import AnyRunner, Execution
from mlxrunner.batch.fields import checked_id, checked_options
from mlxrunner.batch.lines import Line
from mlxrunner.batch.options import BatchOptions, Order, OutputOrder
from mlxrunner.batch.pictures import messages_of
from mlxrunner.batch.prompts import Begun, tokenize_lines
from mlxrunner.batch.records import place_of, plain_result, result_of
from mlxrunner.batch.store import Store
from mlxrunner.config.arguments import check_kind, listed
from mlxrunner.errors import (
    OptionError,
    PromptError,
    RequestError,
)
from mlxrunner.options import GenerateKwargs
from mlxrunner.parallel.runner import ParallelRunner
from mlxrunner.parallel.several import Several
from mlxrunner.parallel.stepper import Stepper
from mlxrunner.results import Result, Usage
from mlxrunner.runner import Runner
from mlxrunner.templates.messages import has_picture
from mlxrunner.tokenizer.prompt import Prompt


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
    """The id of the request."""
    result: Result | None
    """The answer; None if there is an error."""
    error: RequestError | None = None
    """The reason, in one line, why there is no answer; None if there is one."""

    @property
    def text(self) -> str:
        """The text of the answer. Raise the request's `error` if there is no answer."""
        return self._answered().text

    @property
    def usage(self) -> Usage:
        """The usage of the answer. Raise the request's `error` if there is no answer."""
        return self._answered().usage

    def _answered(self) -> Result:
        """Return the answer. Raise the request's error if there is none."""
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
    if not isinstance(runner, Stepper):
        check_kind("runner", runner, (Runner, ParallelRunner), "load one with Runner.load(model)")
    listed("requests", requests, '[BatchRequest("Hello")]')
    options = BatchOptions(
        defaults=defaults,
        order=order,
        output_order=output_order,
        retries=retries,
        timeout=timeout,
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
        begun = Begun.of(store, options.order, parallel=isinstance(runner, Several))
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
                store.record(result.index, _to_bytes(result))
                for answer in store.answers(after=place):
                    place = answer.place
                    yield _from_bytes(answer.body)


def lines_of(requests: Iterable[BatchRequest], batch: BatchOptions | None = None) -> Iterator[Line]:
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
        yield Line(index, index + 1, prompt, name, options=options, error=error)


def _to_bytes(result: BatchResult) -> bytes:
    """Return a result as JSON, to be read by `_from_bytes`."""
    stored = vars(result)
    if result.error is not None:
        stored = {**stored, "error": [str(result.error), result.error.is_refused]}
    if result.result is not None:
        stored = {**stored, "result": plain_result(result.result)}
    return json.dumps(stored).encode()


def _from_bytes(body: bytes) -> BatchResult:
    """Return the result that `_to_bytes` wrote."""
    stored = json.loads(body)
    result = stored["result"]
    if result is not None:
        result = result_of(result)
    error = stored["error"]
    if error is not None:
        message, is_refused = error
        error = RequestError(message, is_refused=is_refused)
    return BatchResult(stored["index"], stored["id"], result, error)
