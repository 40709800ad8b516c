"""Where slots and cells are few, nothing reusable is lost and no admitted request fails."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.engine import Engine, request_of
from support.histories import Parts, alone, tiny_parts

from mlxrunner import Runner
from mlxrunner.errors import ContextFullError, ContextLengthError

WINDOWS: dict[str, Any] = {"llama": {}} | {
    name: {"sliding_window": 32} for name in ("gemma3_text", "gpt_oss")
}
TIE = 1e-5
"""Log-probabilities that are nearer to each other may change places with the order of sums."""


def same_until_a_tie(given: Parts, prompt: list[int], answer: list[int]) -> bool:
    """Compare `answer` with that of a single runner, up to a tie of the two likeliest tokens.

    The order of sums, which is another one in each BLAS, decides which of them is taken.
    """
    expected = Runner(*given).complete(prompt, max_tokens=len(answer), stop_tokens=[], logprobs=2)
    assert len(expected.tokens) == len(answer)
    for ours, its, (_, top) in zip(answer, expected.tokens, expected.logprobs or [], strict=True):
        if ours != its:
            first, second = top.values()
            return ours in top and abs(first - second) < TIE
    return True


def some(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(290) for _ in range(count)]


def test_the_context_is_never_longer_than_all_cells() -> None:
    """A prompt beyond them never fits; answers end, fail and shift as in that context alone."""
    given, prompt = tiny_parts("llama"), [5] * 80
    alone = Runner(*given, context=100)
    with Engine(*given, max_sequences=2, context=300, kv_cache_tokens=100) as runner:
        assert runner.context == runner.kv_cache_tokens == 100
        for tokens in (100, 150):
            with pytest.raises(ContextLengthError, match=f"{tokens} tokens.*context of 100 tokens"):
                runner.submit([5] * tokens)
        for options in ({}, {"overflow": "shift", "keep": 9}):
            ours, its = (
                one.complete(prompt, max_tokens=50, stop_tokens=[], **options)
                for one in (runner, alone)
            )
            assert (ours.tokens, ours.finish_reason) == (its.tokens, its.finish_reason)
            assert ours.usage.cache.shifted_tokens == its.usage.cache.shifted_tokens
        with pytest.raises(ContextFullError):
            runner.complete(prompt, max_tokens=50, stop_tokens=[], overflow="error")


@pytest.mark.exhaustive(4)
@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("header", [0, 1, 20, 200])
def test_users_with_a_common_header_keep_their_own_conversations(name: str, header: int) -> None:
    """From the second turn on each user evaluates only what is new of its own."""
    given, rng = tiny_parts(name, **WINDOWS[name]), random.Random(header)
    shared = some(rng, header)
    talks = [[*shared, *some(rng, length)] for length in (10, 60, 10, 100)]
    with Engine(*given, max_sequences=4, context=600, prefill_step=256) as runner:
        before = [0] * 4
        for turn in range(4):
            for user, talk in enumerate(talks):
                result = runner.submit(talk, max_tokens=5, stop_tokens=[]).result()
                assert turn == 0 or result.usage.cached_tokens == before[user]
                assert same_until_a_tie(given, talk, result.tokens)
                before[user] = len(talk) + 4  # nobody ran the last token
                talk += result.tokens + some(rng, 30)


def test_a_prefix_that_a_window_has_left_is_taken_from_who_still_has_it() -> None:
    """A busy slot that is past it promises nothing."""
    given, rng = tiny_parts("gemma3_text", sliding_window=32), random.Random(1)
    trunk = some(rng, 280)
    settings: dict[str, Any] = {"rewind_slack": 64, "checkpoint_budget": 0}
    with Engine(*given, max_sequences=4, context=300, prefill_step=64, **settings) as runner:
        runner.submit(trunk[:98] + some(rng, 6), max_tokens=2, stop_tokens=[]).result()
        ahead = runner.submit(trunk[:250] + some(rng, 5), max_tokens=30, stop_tokens=[])
        for _ in range(12):
            runner.step()
        late = runner.submit(trunk[:130] + some(rng, 10), max_tokens=1, stop_tokens=[])
        assert late.result().usage.cached_tokens == 98
        assert len(ahead.result().tokens) == 30


def test_who_lacks_room_when_a_prefix_does_not_come_waits_for_it() -> None:
    """It is not ended: its answer comes once it can share what another evaluates now."""
    given, trunk = tiny_parts("llama"), list(range(1, 21))
    with Engine(*given, max_sequences=3, context=30, prefill_step=10, kv_cache_tokens=38) as runner:
        first, *others = [
            runner.submit([*trunk, 100 + i], max_tokens=5, stop_tokens=[]) for i in range(3)
        ]
        runner.step()
        first.cancel()
        runner.step()
        assert [request_of(handle).is_placed for handle in others] == [True, False]
        for i, handle in enumerate(others):
            assert handle.result().tokens == alone(given, [*trunk, 101 + i], 5)
