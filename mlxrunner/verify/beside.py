"""Two rows that are not a warm request against a cold one: keys that a shift has moved, and two sequences in one row."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from mlxrunner.cache.full import FullAttentionCache
from mlxrunner.cache.layer import LayerCache
from mlxrunner.cache.quantized import QuantizedAttentionCache
from mlxrunner.cache.sequences import NotSupportedError
from mlxrunner.cache.sliding import SlidingWindowCache
from mlxrunner.events import Usage
from mlxrunner.parallel.runner import ParallelRunner
from mlxrunner.verify.answer import Answer, ask, same_tokens
from mlxrunner.verify.report import FACTOR, Difference, Row
from mlxrunner.verify.scenarios import Case, Talk, overflow

MOVED_KEYS, PARALLEL = "overflow: moved keys", "two in parallel"
LIKELIEST = 20
"""Tokens whose log-probabilities are compared, where the logits themselves can't be had."""


def moved_keys(talk: Talk) -> Row:
    """The first layer's keys after a shift against those of the same tokens evaluated where they are now: they depend on nothing else.

    Relative to the largest of each channel: a channel with large keys would hide the others. A key was rotated three times, by angles that
    are as large as positions and are rounded like them.
    """
    runner = talk.runner
    runner.reset()
    case = overflow(talk)
    usage = ask(runner, case, talk.answer).usage
    if not runner.entry.caches:
        return Row(MOVED_KEYS, fault="the entry is empty")
    moved = _keys(runner.entry.caches[0])
    if moved is None:
        return Row(MOVED_KEYS, untested="the first layer stores no keys as they were computed")
    if usage is None or usage.cached_tokens <= case.options["keep"]:
        return Row(MOVED_KEYS, untested="nothing was moved: what is left was evaluated again")
    tokens = list(runner.entry.tokens)
    runner.reset()
    talk.say(tokens, 1)
    computed = _keys(runner.entry.caches[0])
    assert computed is not None
    count = min(moved.shape[2], computed.shape[2])
    gaps = mx.abs(moved[:, :, -count:].astype(mx.float32) - computed[:, :, -count:].astype(mx.float32)).max(axis=(0, 2))
    apart = mx.where(gaps == 0, 0, gaps / mx.abs(computed.astype(mx.float32)).max(axis=(0, 2))).max()
    limit = FACTOR * (2 * float(mx.finfo(moved.dtype).eps) + runner.context * float(mx.finfo(mx.float32).eps))
    return Row(MOVED_KEYS, found=Difference(0, 0, float(apart.item())), limit=limit)  # type: ignore[arg-type]  # a float array


def _keys(cache: LayerCache) -> mx.array | None:
    """`[1, kv_heads, n, head_dim]` of the last tokens, copied."""
    if not isinstance(cache, FullAttentionCache | SlidingWindowCache):
        return None
    keys = mx.contiguous(cache.keys_and_values()[0])
    mx.eval(keys)
    return keys


def parallel(talk: Talk) -> Row:
    """Two prompts with half of their tokens in common, at once and each alone; and the same with nothing in common, for the noise of
    a row that holds tokens of two."""
    runner, half = talk.runner, len(talk.base) // 2
    shared = [talk.base, [*talk.base[:half], *talk.more(half // 2)]]
    apart = [talk.base, talk.unlike(talk.base)]
    alone = {tuple(prompt): _alone(talk, prompt) for prompt in (*shared, apart[1])}
    if any(isinstance(cache, QuantizedAttentionCache) for cache in runner.entry.caches):
        return Row(PARALLEL, untested="parallel requests have no quantized caches")
    runner.reset()
    try:
        (found, usages), (noise, none) = (_together(talk, prompts, alone) for prompts in (shared, apart))
    except NotSupportedError as error:
        return Row(PARALLEL, untested=str(error))
    reused = sum(usage.cached_tokens for usage in none)
    return Row(
        PARALLEL,
        found=found,
        apart=noise,
        reused=sum(usage.cached_tokens for usage in usages),
        prompt=sum(usage.prompt_tokens for usage in usages),
        fault=f"{reused} tokens were shared by prompts with nothing in common" if reused else None,
    )


def _alone(talk: Talk, prompt: list[int]) -> Answer:
    talk.runner.reset()
    return ask(talk.runner, Case(prompt), talk.answer)


def _together(talk: Talk, prompts: list[list[int]], alone: dict[tuple[int, ...], Answer]) -> tuple[Difference, list[Usage]]:
    """How the answers to `prompts`, given at once, differ from those `alone`."""
    runner = talk.runner
    with ParallelRunner(
        runner.model, runner.tokenizer, runner.facts, max_sequences=len(prompts), capacity=runner.context
    ) as together:
        handles = [together.submit(prompt, max_tokens=talk.answer, stop_tokens=[], logprobs=LIKELIEST) for prompt in prompts]
        answers = [list(handle) for handle in handles]
    found = [_against(chunks, alone[tuple(prompt)]) for chunks, prompt in zip(answers, prompts, strict=True)]
    whole = Difference(sum(d.equal for d in found), sum(d.tokens for d in found), float(np.max([d.logits for d in found])))
    return whole, [chunks[-1].usage for chunks in answers if chunks[-1].usage is not None]


def _against(chunks: list[Any], alone: Answer) -> Difference:
    """By the log-probabilities of the likeliest tokens."""
    tokens = [chunk.token for chunk in chunks]
    equal = same_tokens(tokens, alone.tokens)
    worst = 0.0
    for chunk, logits in list(zip(chunks, alone.logits, strict=False))[: equal + 1]:
        exact = logits.astype(np.float64)  # a sum over a vocabulary in float32 would differ more than the two runs
        logprobs = exact - np.logaddexp.reduce(exact)
        apart = [abs(value - float(logprobs[token])) for token, value in chunk.top_logprobs.items()]
        worst = float(np.max([worst, *apart]))  # what is not a number stays
    return Difference(equal, max(len(tokens), len(alone.tokens)), worst)
