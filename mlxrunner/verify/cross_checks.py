"""Three checks beside the scenarios.

Keys that a shift has moved, guessed tokens, and two sequences in one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlxrunner.cache.layers.factory import make_layer_caches
from mlxrunner.cache.layers.protocol import LayerCache
from mlxrunner.errors import NotSupportedError
from mlxrunner.parallel.stepper import Stepper
from mlxrunner.results import Chunk, Usage
from mlxrunner.runner import Runner
from mlxrunner.verify.findings import FACTOR, Check, Difference
from mlxrunner.verify.scenarios import GUESSING, PLAIN, Case, Talk, overflow

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class AnswerLogits:
    """An answer with the logits that it was chosen from."""

    tokens: list[int]
    logits: Logits
    """The logits from which each token was chosen, `[tokens, vocab]`."""
    epsilon: float
    """The relative rounding step of the type in which the logits were computed."""
    usage: Usage | None

    @property
    def largest(self) -> float:
        """The largest absolute value of a finite logit."""
        return float(np.abs(self.logits[np.isfinite(self.logits)]).max(initial=0))


def ask(runner: Runner, case: Case, count: int) -> AnswerLogits:
    """Return the greedy answer to `case`, of `count` tokens."""
    rows: list[mx.array] = []

    def keep(tokens: mx.array, logits: mx.array) -> mx.array:
        rows.append(logits)
        return logits

    chunks = list(
        runner.generate(
            case.prompt, max_tokens=count, stop_tokens=[], logits_processors=[keep], **case.options
        )
    )
    logits = np.array(mx.concatenate(rows).astype(mx.float32))[: len(chunks)]
    return AnswerLogits(
        [chunk.token or 0 for chunk in chunks],
        logits,
        float(mx.finfo(rows[0].dtype).eps),
        chunks[-1].usage,
    )


def difference(one: AnswerLogits, other: AnswerLogits) -> Difference:
    """Return the difference of two answers, up to and including the first token that differs."""
    equal = same_tokens(one.tokens, other.tokens)
    count = min(equal + 1, len(one.tokens), len(other.tokens))
    return Difference(
        equal,
        max(len(one.tokens), len(other.tokens)),
        largest(one.logits[:count], other.logits[:count]),
    )


def same_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of equal tokens, from the first on."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def largest(one: Logits, other: Logits) -> float:
    """Return the largest difference. Logits masked (minus infinity) in both are equal."""
    with np.errstate(invalid="ignore"):
        return float(np.where(one == other, 0, np.abs(one - other)).max(initial=0))


MOVED_KEYS, GUESSED, PARALLEL = "overflow: moved keys", "guessed tokens", "two in parallel"
LIKELIEST = 20
"""Number of tokens whose log-probabilities are compared if there are no logits."""


def moved_keys(talk: Talk) -> Check:
    """Compare the first layer's keys after a shift with newly evaluated keys of the same tokens.

    Keys of the first layer depend on token and position only. They are compared relative to the
    largest key of each channel, because a channel with large keys would hide the others. A key was
    rotated three times, by angles that are as large as positions and are rounded like them.
    """
    runner = talk.runner
    runner.reset()
    case = overflow(talk)
    usage = ask(runner, case, talk.answer).usage
    if not runner.entry.caches:
        return Check(MOVED_KEYS, fault="the entry is empty")
    moved = _keys(runner.entry.caches[0])
    if moved is None:
        return Check(MOVED_KEYS, untested="the first layer stores no keys as they were computed")
    if usage is None or usage.cached_tokens <= case.options["keep"]:
        return Check(MOVED_KEYS, untested="nothing was moved: what is left was evaluated again")
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
    gap = float(apart.item())  # type: ignore[arg-type]  # a float array
    return Check(MOVED_KEYS, found=Difference(0, 0, gap), limit=limit)


def _keys(cache: LayerCache) -> mx.array | None:
    """Return a copy of the keys of the last tokens, `[1, kv_heads, n, head_dim]`.

    Return None if the layer does not store them as computed.
    """
    if not cache.stores_plain_rows:
        return None
    keys = mx.contiguous(cache.export().arrays["keys"])
    mx.eval(keys)
    return keys


def guessed(talk: Talk) -> Check:
    """Compare answers whose tokens are guessed with answers without guesses.

    The earlier answer is what is guessed. The first answer repeats it, so the guesses are right.
    The second one, to another last token, has to undo them. The third one comes to what is left.
    """
    runner = talk.runner
    changed = talk.changed(len(talk.base) - 1)
    prompts = [talk.base, changed, [*changed, *talk.more()]]
    expected = [_alone(talk, prompt) for prompt in prompts]
    runner.reset()
    talk.say(talk.base, talk.answer)
    found = [_guessing(runner, prompt, talk.answer) for prompt in prompts]
    usages = _usages(found)
    if not any(use.drafted for usage in usages for use in usage.drafts):
        return Check(GUESSED, untested="nothing was guessed")
    return Check(
        GUESSED,
        found=_worst(found, expected),
        reused=sum(usage.cached_tokens for usage in usages),
        prompt=sum(usage.prompt_tokens for usage in usages),
        fault=None if runner.entry.is_true else "the layers do not hold the tokens of the entry",
    )


def parallel(talk: Talk) -> Check:
    """Compare two prompts with half of their tokens in common, at once and each alone.

    The check also measures the noise of a device with two prompts at once. It compares two prompts
    with nothing in common, at once and each alone. It also compares the attention to a common
    prefix in parts and in one product.
    """
    runner, half = talk.runner, len(talk.base) // 2
    shared = [talk.base, [*talk.base[:half], *talk.more(half // 2)]]
    unlike = [talk.base, talk.unlike(talk.base)]
    base, *others = [_alone(talk, prompt) for prompt in (*shared, unlike[1])]
    as_computed = make_layer_caches(runner.model)
    pairs = zip(runner.entry.caches, as_computed, strict=False)
    if any(other.stores_plain_rows > one.stores_plain_rows for one, other in pairs):
        return Check(PARALLEL, untested="parallel requests have no quantized caches")
    runner.reset()
    try:
        in_parts, at_once = _together(talk, shared), _together(talk, shared, at_once=True)
        apart = _together(talk, unlike)
    except NotSupportedError as error:
        return Check(PARALLEL, untested=str(error))
    noise = [_worst(apart, [base, others[1]]), _worst(in_parts, at_once)]
    usages, none = _usages(in_parts), sum(usage.cached_tokens for usage in _usages(apart))
    return Check(
        PARALLEL,
        found=_worst(in_parts, [base, others[0]]),
        apart=max(noise, key=lambda one: one.logits if one.logits == one.logits else np.inf),
        reused=sum(usage.cached_tokens for usage in usages),
        prompt=sum(usage.prompt_tokens for usage in usages),
        fault=f"{none} tokens were shared by prompts with nothing in common" if none else None,
    )


@dataclass(frozen=True)
class _Said:
    """An answer of a runner that gives no logits."""

    tokens: list[int]
    logprobs: list[dict[int, float]]
    """Log-probabilities of the likeliest tokens, by token id, for each place of the answer."""
    usage: Usage | None


def _alone(talk: Talk, prompt: list[int]) -> _Said:
    talk.runner.reset()
    answer = ask(talk.runner, Case(prompt), talk.answer)
    # A sum over a vocabulary in float32 would differ more than the two runs.
    exact = answer.logits.astype(np.float64)
    # A model may answer with infinities, which the table shows.
    with np.errstate(invalid="ignore"):
        logprobs = exact - np.logaddexp.reduce(exact, axis=1, keepdims=True)
    return _Said(answer.tokens, [dict(enumerate(row.tolist())) for row in logprobs], answer.usage)


def _guessing(runner: Runner, prompt: list[int], count: int) -> _Said:
    return _said(list(runner.generate(prompt, max_tokens=count, logprobs=LIKELIEST, **GUESSING)))


def _together(talk: Talk, prompts: list[list[int]], *, at_once: bool = False) -> list[_Said]:
    runner = talk.runner
    with Stepper(
        runner.model,
        runner.tokenizer,
        runner.facts,
        max_sequences=len(prompts),
        context=runner.context,
    ) as together:
        if at_once:
            together.attend_at_once()
        handles = [
            together.submit(prompt, max_tokens=talk.answer, logprobs=LIKELIEST, **PLAIN)
            for prompt in prompts
        ]
        answers = [list(handle) for handle in handles]
    return [_said(chunks) for chunks in answers]


def _said(chunks: list[Chunk]) -> _Said:
    return _Said(
        [chunk.token or 0 for chunk in chunks],
        [dict(chunk.top_logprobs or {}) for chunk in chunks],
        chunks[-1].usage,
    )


def _usages(answers: list[_Said]) -> list[Usage]:
    return [answer.usage for answer in answers if answer.usage is not None]


def _worst(answers: list[_Said], others: list[_Said]) -> Difference:
    """Return the largest difference; NaN if one of them is not a number."""
    found = [_against(one, other) for one, other in zip(answers, others, strict=True)]
    return Difference(
        sum(d.equal for d in found),
        sum(d.tokens for d in found),
        float(np.max([d.logits for d in found])),
    )


def _against(one: _Said, other: _Said) -> Difference:
    """Compare the log-probabilities that both have, up to the first token that differs."""
    equal = same_tokens(one.tokens, other.tokens)
    pairs = list(zip(one.logprobs, other.logprobs, strict=False))[: equal + 1]
    apart = [
        abs(value - there[token])
        for here, there in pairs
        for token, value in here.items()
        if token in there
    ]
    return Difference(equal, max(len(one.tokens), len(other.tokens)), float(np.max([0.0, *apart])))
