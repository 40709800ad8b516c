"""Two rows that are not a warm request against a cold one: keys that a shift has moved, and two sequences in one row."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxrunner.cache.full import FullAttentionCache
from mlxrunner.cache.layer import LayerCache
from mlxrunner.cache.quantized import QuantizedAttentionCache
from mlxrunner.cache.sequences import NotSupportedError
from mlxrunner.cache.sliding import SlidingWindowCache
from mlxrunner.events import Usage
from mlxrunner.parallel.runner import ParallelRunner
from mlxrunner.verify.answer import ask, same_tokens
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
    gaps = mx.abs(
        moved[:, :, -count:].astype(mx.float32) - computed[:, :, -count:].astype(mx.float32)
    ).max(axis=(0, 2))
    apart = mx.where(
        gaps == 0, 0, gaps / mx.abs(computed.astype(mx.float32)).max(axis=(0, 2))
    ).max()
    limit = FACTOR * (
        2 * float(mx.finfo(moved.dtype).eps) + runner.context * float(mx.finfo(mx.float32).eps)
    )
    return Row(MOVED_KEYS, found=Difference(0, 0, float(apart.item())), limit=limit)  # type: ignore[arg-type]  # a float array


def _keys(cache: LayerCache) -> mx.array | None:
    """`[1, kv_heads, n, head_dim]` of the last tokens, copied."""
    if not isinstance(cache, FullAttentionCache | SlidingWindowCache):
        return None
    keys = mx.contiguous(cache.keys_and_values()[0])
    mx.eval(keys)
    return keys


def parallel(talk: Talk) -> Row:
    """Two prompts with half of their tokens in common, at once and each alone.

    What the device makes of a row that holds tokens of two is measured beside it: two prompts with nothing in common at once against
    each alone, and the attention to a common prefix in parts against one product.
    """
    runner, half = talk.runner, len(talk.base) // 2
    shared = [talk.base, [*talk.base[:half], *talk.more(half // 2)]]
    unlike = [talk.base, talk.unlike(talk.base)]
    base, *others = [_alone(talk, prompt) for prompt in (*shared, unlike[1])]
    if any(isinstance(cache, QuantizedAttentionCache) for cache in runner.entry.caches):
        return Row(PARALLEL, untested="parallel requests have no quantized caches")
    runner.reset()
    try:
        in_parts, at_once = _together(talk, shared), _together(talk, shared, at_once=True)
        apart = _together(talk, unlike)
    except NotSupportedError as error:
        return Row(PARALLEL, untested=str(error))
    noise = [_worst(apart, [base, others[1]]), _worst(in_parts, at_once)]
    usages, none = _usages(in_parts), sum(usage.cached_tokens for usage in _usages(apart))
    return Row(
        PARALLEL,
        found=_worst(in_parts, [base, others[0]]),
        apart=max(noise, key=lambda one: one.logits if one.logits == one.logits else np.inf),
        reused=sum(usage.cached_tokens for usage in usages),
        prompt=sum(usage.prompt_tokens for usage in usages),
        fault=f"{none} tokens were shared by prompts with nothing in common" if none else None,
    )


@dataclass(frozen=True)
class _Said:
    """An answer's tokens, the log-probabilities of the likeliest at each, and the usage."""

    tokens: list[int]
    logprobs: list[dict[int, float]]
    usage: Usage | None


def _alone(talk: Talk, prompt: list[int]) -> _Said:
    talk.runner.reset()
    answer = ask(talk.runner, Case(prompt), talk.answer)
    exact = answer.logits.astype(
        np.float64
    )  # a sum over a vocabulary in float32 would differ more than the two runs
    with np.errstate(
        invalid="ignore"
    ):  # of a model that answers with infinities, which the table says
        logprobs = exact - np.logaddexp.reduce(exact, axis=1, keepdims=True)
    return _Said(answer.tokens, [dict(enumerate(row.tolist())) for row in logprobs], answer.usage)


def _together(talk: Talk, prompts: list[list[int]], *, at_once: bool = False) -> list[_Said]:
    runner = talk.runner
    with ParallelRunner(
        runner.model,
        runner.tokenizer,
        runner.facts,
        max_sequences=len(prompts),
        capacity=runner.context,
    ) as together:
        if at_once:
            together.attend_at_once()
        handles = [
            together.submit(prompt, max_tokens=talk.answer, stop_tokens=[], logprobs=LIKELIEST)
            for prompt in prompts
        ]
        answers = [list(handle) for handle in handles]
    return [
        _Said(
            [chunk.token or 0 for chunk in chunks],
            [dict(chunk.top_logprobs or {}) for chunk in chunks],
            chunks[-1].usage,
        )
        for chunks in answers
    ]


def _usages(answers: list[_Said]) -> list[Usage]:
    return [answer.usage for answer in answers if answer.usage is not None]


def _worst(answers: list[_Said], others: list[_Said]) -> Difference:
    """Of all of them; what is not a number stays."""
    found = [_against(one, other) for one, other in zip(answers, others, strict=True)]
    return Difference(
        sum(d.equal for d in found),
        sum(d.tokens for d in found),
        float(np.max([d.logits for d in found])),
    )


def _against(one: _Said, other: _Said) -> Difference:
    """By the log-probabilities that both have, up to and including the first token that differs."""
    equal = same_tokens(one.tokens, other.tokens)
    pairs = list(zip(one.logprobs, other.logprobs, strict=False))[: equal + 1]
    apart = [
        abs(value - there[token])
        for here, there in pairs
        for token, value in here.items()
        if token in there
    ]
    return Difference(equal, max(len(one.tokens), len(other.tokens)), float(np.max([0.0, *apart])))
