"""Several answers to one prompt, whose tokens are stored once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from mlxrunner.cache.sequences import NotSupportedError
from mlxrunner.errors import ContextLengthError
from mlxrunner.events import logger
from mlxrunner.models.load import LoadedModel, load_model
from mlxrunner.parallel.request import Result
from mlxrunner.parallel.runner import ParallelRunner
from mlxrunner.parallel.slots import WORTH_WAITING
from mlxrunner.runner import Runner
from mlxrunner.tokenizer.prompt import Prompt, tokenize

DEFAULT_MAX_TOKENS = 1024
"""Room for each answer where no limit is given: it has to be known before the first token."""


def sample(
    model: str, prompt: Prompt, count: int, *, parallel: int, context: int | None, trust_remote_code: bool,
    watch: Callable[[Any], None] = lambda runner: None, **options: Any,
) -> Iterator[Result]:  # fmt: skip
    """`count` answers, at most `parallel` at a time, with the seeds `seed`, `seed + 1` ...; one by one if the model can't share a row.

    `watch` is given the runner before its first request.
    """
    loaded = load_model(model, trust_remote_code=trust_remote_code)
    seed = options.pop("seed", None)
    each = [options | {"seed": None if seed is None else seed + i} for i in range(count)]
    try:
        yield from _together(
            loaded, prompt, each, min(parallel, count), context or loaded.facts.context, watch
        )
    except NotSupportedError as error:
        logger.warning("one at a time: %s", error)
        runner = Runner(loaded.model, loaded.tokenizer, loaded.facts, name=model, context=context)
        watch(runner)
        for one in each:
            yield _alone(runner, prompt, one)


def _together(
    loaded: LoadedModel,
    prompt: Prompt,
    each: list[dict[str, Any]],
    parallel: int,
    context: int,
    watch: Callable[[Any], None],
) -> Iterator[Result]:
    length = len(tokenize(loaded.tokenizer, prompt))
    if length >= context:
        raise ContextLengthError(length, context)
    room = min(each[0].get("max_tokens") or DEFAULT_MAX_TOKENS, context - length)
    # What shifts shares nothing in the end.
    cells = (
        None if each[0].get("overflow") == "shift" else length + parallel * (room + WORTH_WAITING)
    )
    with ParallelRunner.of(
        loaded, max_sequences=parallel, capacity=length + room, cells=cells
    ) as runner:
        watch(runner)
        yield from runner.run_each((prompt, one) for one in each)


def _alone(runner: Runner, prompt: Prompt, options: dict[str, Any]) -> Result:
    return Result.of(list(runner.generate(prompt, **options)))
