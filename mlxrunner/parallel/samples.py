"""Several answers to one prompt, which is stored once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from mlxrunner.errors import MlxrunnerError
from mlxrunner.models.load import LoadedModel, load_model
from mlxrunner.options import GenerateOptions
from mlxrunner.parallel.engine import Engine
from mlxrunner.parallel.opening import seeing
from mlxrunner.parallel.scheduling.slots import WORTH_WAITING
from mlxrunner.parallel.settings import OpenSettings
from mlxrunner.results import Chunk, Result
from mlxrunner.tokenizer.prompt import Prompt, check_length, room_of, shift_of, tokenize_prompt

DEFAULT_MAX_TOKENS = 1024
"""Tokens of each answer without a limit. Its room has to be known before the first token."""


@dataclass(frozen=True)
class Failed:
    """An answer that an error has ended, with its text up to the error."""

    text: str
    tokens: list[int]
    error: MlxrunnerError


def sample(
    model: str,
    prompt: Prompt,
    count: int,
    *,
    parallel: int,
    loading: Mapping[str, Any],
    watch: Callable[[Any], object] = lambda runner: None,
    **options: Any,
) -> Iterator[Result | Failed]:
    """Yield `count` answers to one prompt, at most `parallel` at a time.

    One that fails does not end the others. Their seeds are `seed`, `seed + 1` ... A model that
    can't run several in a step computes them one by one. `loading`: options of `Engine.load`, of
    which `context` is the tokens of the prompt and one answer; None: the model's own. `watch` is
    called with the runner before its first request. Raise ContextLengthError if the prompt fills
    the context, unless it is shifted.
    """
    settings, several = dict(loading), min(parallel, count)
    brings_code = settings.pop("trust_remote_code", False)
    if settings.pop("pictures", False):
        asked = OpenSettings.of(max_sequences=several, **settings)
        loaded = seeing(model, asked, trust_remote_code=brings_code)
    else:
        loaded = load_model(model, trust_remote_code=brings_code)
    seed = options.pop("seed", None)
    each = [options | {"seed": None if seed is None else seed + i} for i in range(count)]
    yield from _together(
        loaded,
        prompt,
        each,
        several,
        settings.pop("context", None) or loaded.facts.context,
        watch,
        settings,
    )


def _together(
    loaded: LoadedModel,
    prompt: Prompt,
    each: list[dict[str, Any]],
    parallel: int,
    context: int,
    watch: Callable[[Any], object],
    settings: dict[str, Any],
) -> Iterator[Result | Failed]:
    options = GenerateOptions.of(**each[0])
    room = room_of(options, context)
    tokenized = tokenize_prompt(
        loaded.tokenizer, prompt, options.variables, room, options.continue_final_message
    )
    length, most = len(tokenized.tokens), options.max_tokens or min(DEFAULT_MAX_TOKENS, context)
    if shift_of(options, loaded.tokenizer, tokenized, context) is None:
        check_length(tokenized.tokens, context)
    shifts = options.overflow == "shift" and length + most > context
    overflow = "stop" if options.overflow == "shift" and not shifts else options.overflow
    context = min(context, length + most)
    # A request that shifts copies its shared tokens.
    cells = None if shifts else length + parallel * (context - length + WORTH_WAITING)
    with Engine.of(
        loaded, max_sequences=parallel, context=context, kv_cache_tokens=cells, **settings
    ) as runner:
        watch(runner)
        own = {"max_tokens": most, "overflow": overflow}
        with closing(runner._run_handles((prompt, one | own) for one in each)) as handles:
            yield from map(_whole, handles)


def _whole(chunks: Iterable[Chunk]) -> Result | Failed:
    """Read an answer to its end, or to the error that ends it."""
    read: list[Chunk] = []
    try:
        read.extend(chunks)
    except MlxrunnerError as error:
        tokens = [chunk.token for chunk in read if chunk.token is not None]
        return Failed("".join(chunk.text for chunk in read), tokens, error)
    return Result.of(read)
