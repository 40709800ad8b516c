"""Describe a request that has ended, for observers. A runner works without it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from mlxrunner.cache.account import PromptAccount
from mlxrunner.cache.lookup import Earlier, Evicted, Lookup
from mlxrunner.cache.tokens import TokenArray, TokenBuffer
from mlxrunner.engine.answer import Clock
from mlxrunner.engine.speculation.drafting import Drafting
from mlxrunner.options import GenerateOptions
from mlxrunner.results import FinishReason, Usage, logger
from mlxrunner.tokenizer.prompt import TokenizedPrompt

Finish = FinishReason | Literal["interrupted", "error"]
Ending = Literal["own", "cancelled", "forgotten", "failed", "no room", "no token"]


@dataclass(frozen=True)
class SchedulingRecord:
    """The facts about one of several parallel requests that a replay needs.

    See `mlxrunner.profiling.replay.simulate`. Moments are pairs: the steps of the runner so far,
    and the calls since the last step. A call submits a request, successfully or not, or cancels
    one.
    """

    slot: int
    """The number of its slot."""
    began: tuple[int, int]
    ended: tuple[int, int]
    ending: Ending
    """The cause of its end.

    "own": the end of its answer; "cancelled"; "forgotten": a step was interrupted; "failed":
    it made a step fail; "no room"; "no token": its form allows none.
    """
    limit: int
    """Most tokens of its answer."""
    keep: int | None
    """Tokens that a full context keeps; None if the request does not shift."""
    said: int
    """Tokens of the answer that were read."""
    sampled: int
    """Tokens of the answer that were dispatched."""
    stuck: bool
    """True if its keys could not be moved."""
    answer: TokenArray
    """The tokens of the answer that were run through the model."""
    submitted: int = 0
    """Its number among the requests that the runner began, from 1; 0 if it is not known."""
    evicted: Sequence[Evicted] = ()
    """The conversations that were given up to make room for it."""
    failures: Sequence[int] = ()
    """The steps, by number, that carried it and failed."""


@dataclass(frozen=True)
class Observation:
    """A request that has ended. Moments are on `time.perf_counter`."""

    prepared: TokenizedPrompt
    """The prompt that the caller gave."""
    prompt: TokenArray
    """The tokens that were evaluated or reused.

    These are the tokens of `prepared` without those that a full context dropped.
    """
    options: GenerateOptions
    lookup: Lookup
    account: PromptAccount
    """The account of the prompt's tokens."""
    usage: Usage
    finish: Finish
    error: str | None
    """The name of the exception that ended the request; None if no exception did."""
    clock: Clock
    chunks: Sequence[tuple[float, float, int]]
    """Begin, end and number of tokens of each forward pass of the prefill."""
    entry: TokenBuffer
    """The tokens of the entry after the request, valid until the next request."""
    active_bytes: int
    """Bytes of MLX memory in use when the request began."""
    checkpoints: Sequence[int] = ()
    """The offsets of the entry's checkpoints."""
    logits: Any = None
    """The logits behind the entry's last token, `[1, vocab]`; None if they are not known."""
    is_greedy: bool = False
    """True if each token was the most likely one by the model's own logits."""
    scheduling: SchedulingRecord | None = None
    """The facts that a replay needs of a parallel request; None for a single request."""
    ended: float = field(default_factory=time.perf_counter)


def drafted(drafting: Drafting | None) -> dict[str, Any]:
    """Return the fields of a usage that tell of drafts."""
    if drafting is None:
        return {}
    uses = [{"source": name, **vars(counts)} for name, counts in drafting.by_source.items()]
    return {"draft_passes": drafting.passes, "drafts": uses}


class Observer(Protocol):
    """A function that is called once for each request, after its last chunk was taken.

    Its exceptions are logged. They never make a request fail.
    """

    def __call__(self, runner: Any, observation: Observation, /) -> None: ...


def tell(observers: Sequence[Observer], runner: Any, observe: Callable[[], Observation]) -> None:
    """Call each observer with the result of `observe`.

    An error of one observer is logged and does not affect the others.
    """
    if not observers:
        return
    try:
        observation = observe()
    except Exception as error:
        _not_recorded(error)
        return
    for observer in tuple(observers):
        try:
            observer(runner, observation)
        except Exception as error:
            _not_recorded(error)


def _not_recorded(error: Exception) -> None:
    logger.warning("the request was not recorded: %s: %s", type(error).__name__, error)


def finish_of(reason: FinishReason | None, error: str | None) -> Finish:
    """Return how a request ended. `error`: the name of the exception that ended it, if any."""
    return "error" if error is not None else reason or "interrupted"


def usage_of(
    found: Lookup,
    clock: Clock,
    completion: int,
    account: PromptAccount,
    earlier: Earlier | None = None,
    **more: Any,
) -> Usage:
    """Return the usage of a request with the lookup `found` and `completion` tokens of answer.

    `account`: that of its prompt. `earlier`: for a line of a batch, the part of its prompt that
    earlier lines share. `more`: the other fields of Usage; if the prefill was interrupted,
    `evaluated_tokens` is among them.
    """
    missed, displaced = account.missed, account.displaced
    counted: dict[str, Any] = {
        "prompt_tokens": found.prompt_tokens,
        "matched_tokens": found.matched,
        "cached_tokens": found.cached,
        "prefetched_tokens": found.ahead,
        "evaluated_tokens": found.prompt_tokens - found.cached,
        "completion_tokens": completion,
        "missed_tokens": missed,
        "displaced_tokens": displaced,
        "new_tokens": found.prompt_tokens - found.cached - missed - displaced,
        "lost_tokens": missed + displaced,
        "outcome": found.outcome(missed),
        "reason": found.reason_for(
            missed, earlier.reason if earlier else "", is_restarted=account.is_restarted
        ),
        "trim_limited_by": found.limited_by,
        "checkpoint": found.checkpoint,
        "evicted_by": found.evicted_by,
        "tokenize_s": clock.tokenized - clock.began,
        "lookup_s": clock.lookup_s,
        "ttft_s": clock.first - clock.began if completion else 0.0,
        "decode_s": clock.last - clock.first,
    }
    return Usage.from_dict(counted | more)
