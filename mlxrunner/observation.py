"""What a runner knows of a request that has ended, for whoever watches it. The runner itself has no use for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from mlxrunner.answer import Clock
from mlxrunner.cache.lookup import Earlier, Lookup
from mlxrunner.cache.tokens import TokenArray, TokenBuffer
from mlxrunner.config import GenerateOptions
from mlxrunner.events import FinishReason, Usage, logger
from mlxrunner.tokenizer.prompt import Prepared

Finish = FinishReason | Literal["interrupted", "error"]
Ending = Literal["own", "cancelled", "forgotten", "no room", "no token"]


@dataclass(frozen=True)
class Beside:
    """What a request among others has done, enough to replay it: see `mlxrunner.profiling.sidebyside`.

    Moments are pairs: steps of its runner so far, calls (requests submitted, also in vain, or
    cancelled) since the last one. `ending`: "own" (its answer's end), "cancelled", "forgotten" (a step failed, and every slot was emptied),
    "no room" or "no token" (that its form allows). `limit`: tokens of its answer at most; `keep`:
    tokens that a full context keeps, None if it makes no room. `said`, `sampled`: tokens of the answer that were read, and
    dispatched; `answer`: those that were run through the model. `stuck`: keys could not be moved.
    """

    slot: int
    began: tuple[int, int]
    ended: tuple[int, int]
    ending: Ending
    limit: int
    keep: int | None
    said: int
    sampled: int
    stuck: bool
    answer: TokenArray


@dataclass(frozen=True)
class Observation:
    """A request, however it ended. Moments are on time.perf_counter.

    `prompt`: the tokens that were evaluated or reused, which are those of `prepared` but for what a full context dropped. `chunks`: begin,
    end and tokens of each forward pass of the prefill. `entry`: the tokens of the entry afterwards, valid until the next request;
    `checkpoints`: offsets of those it has. `active_bytes`: MLX memory in use when the request began. `logits`: those that follow
    the entry's last token, `[1, vocab]`, where they are known; `is_greedy`: each token was the likeliest one, by the model's own logits.
    `beside`: of a request among others.
    """

    prepared: Prepared
    prompt: TokenArray
    options: GenerateOptions
    lookup: Lookup
    usage: Usage
    finish: Finish
    error: str | None
    clock: Clock
    chunks: Sequence[tuple[float, float, int]]
    entry: TokenBuffer
    active_bytes: int
    checkpoints: Sequence[int] = ()
    logits: Any = None
    is_greedy: bool = False
    beside: Beside | None = None
    ended: float = field(default_factory=time.perf_counter)


class Observer(Protocol):
    """Is told of each request once, after its last chunk was taken. What it raises is logged and forgotten: no request fails for it."""

    def __call__(self, runner: Any, observation: Observation) -> None: ...


def tell(observer: Observer, runner: Any, observe: Callable[[], Observation]) -> None:
    """Tell `observer` what `observe` finds."""
    try:
        observer(runner, observe())
    except Exception as error:
        logger.warning("the request was not recorded: %s: %s", type(error).__name__, error)


def finish_of(reason: FinishReason | None, error: str | None) -> Finish:
    """How a request ended: `error` is the name of the exception that ended it, if one did."""
    return "error" if error is not None else reason or "interrupted"


def usage_of(
    found: Lookup, clock: Clock, completion: int, earlier: Earlier | None = None, **more: Any
) -> Usage:
    """What both kinds of runner count alike: what was found, and the times; `earlier`: of a line of a batch; `more`: the rest of Usage, or
    what is otherwise (as `evaluated_tokens` after an interrupted prefill: what was not evaluated was not lost either)."""
    evaluated = more.get("evaluated_tokens", found.prompt_tokens - found.cached)
    if earlier is not None:
        found = earlier.judged(found, evaluated)
    counted: dict[str, Any] = {
        "prompt_tokens": found.prompt_tokens,
        "matched_tokens": found.matched,
        "cached_tokens": found.cached,
        "ahead_tokens": found.ahead,
        "evaluated_tokens": evaluated,
        "completion_tokens": completion,
        "lost_tokens": min(found.lost, evaluated + found.ahead),
        "outcome": found.outcome,
        "reason": found.reason,
        "rewind_limited_by": found.limited_by,
        "checkpoint": found.checkpoint,
        "freed_by": found.freed_by,
        "tokenize_s": clock.tokenized - clock.began,
        "lookup_s": clock.lookup_s,
        "ttft_s": clock.first - clock.began if completion else 0.0,
        "decode_s": clock.last - clock.first,
    }
    return Usage(**(counted | more))
