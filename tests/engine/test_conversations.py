"""Many conversations on one runner: none destroys another; what they share is evaluated once."""

from __future__ import annotations

import pytest
from support.conversations import Ideal, Trace, play
from support.engine import Engine
from support.histories import Parts, tiny_parts

from mlxrunner.cache.disk.disk_cache import DiskCache

ENOUGH = 0.97
"""The share of the shareable tokens that a runner reuses, whatever its number of slots."""


@pytest.fixture(scope="module")
def llama() -> Parts:
    return tiny_parts("llama", max_position_embeddings=8192)


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("slots", [1, 3, 8])
def test_interleaved_conversations_reuse_what_they_share(llama: Parts, slots: int) -> None:
    """More conversations than slots: what is given up comes back, and no request fails."""
    trace = Trace(conversations=12, requests=100, context=600, scale=0.6)
    parking = DiskCache(None, {"model": "llama"}, limit=2**30)
    with Engine(
        *llama, max_sequences=slots, context=600, prefill_step=128, parking=parking
    ) as runner:
        played = play(runner, trace)
    assert not played.failures
    assert played.requests == trace.requests
    assert played.lost == 0
    assert played.share >= ENOUGH, f"{played.reused} of {played.shareable}"


def test_a_trace_is_the_same_each_time() -> None:
    """Its prompts come from its seed and from the answers."""

    def prompts(seed: int) -> list[list[int]]:
        trace, found = Trace(seed, conversations=5, requests=60, scale=0.2), []
        while (ask := trace.next()) is not None:
            ask.answer = [7] * ask.max_tokens
            found.append(ask.prompt)
        assert trace.is_over
        return found

    assert prompts(3) == prompts(3) != prompts(4)
    assert len(prompts(3)) == 60


def test_the_ideal_cache_reuses_the_longest_prefix_seen() -> None:
    """All but the last token of a prompt, however it was put together from earlier ones."""
    ideal = Ideal()
    ideal.add([1, 2, 3, 4])
    ideal.add([1, 2, 9])
    assert [ideal.shared(prompt) for prompt in ([1, 2, 3, 4], [1, 2, 9, 9, 9], [1, 5], [4])] == [
        3,
        3,
        1,
        0,
    ]
