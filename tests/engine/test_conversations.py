"""Many conversations on one runner: none destroys another; what they share is evaluated once."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.conversations import Ideal, Trace, play
from support.engine import Engine
from support.histories import Parts, tiny_parts
from support.sample import fewer

from mlxrunner.cache.disk.disk_cache import DiskCache
from mlxrunner.engine.observation import Observation

ENOUGH = 0.97
"""The share of the shareable tokens that a runner reuses, whatever its number of slots."""


@pytest.fixture(scope="module")
def llama() -> Parts:
    return tiny_parts("llama", max_position_embeddings=8192)


def some(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(250) for _ in range(count)]


def evaluated_of(runner: Engine) -> list[int]:
    """Return a list to which each ended request appends the tokens of its prompt that it ran."""
    found: list[int] = []

    def see(_: Any, observed: Observation) -> None:
        found.append(observed.usage.evaluated_tokens)

    runner.observers.append(see)
    return found


@pytest.mark.parametrize("header", [1, 20])
def test_four_users_in_rotation_evaluate_only_their_new_tokens(llama: Parts, header: int) -> None:
    """Over a header that all have, each keeps a slot of its own."""
    rng = random.Random(header)
    said = [some(random.Random(0), header) for _ in range(4)]
    with Engine(*llama, max_sequences=4, context=400) as runner:
        for turn in range(8):
            for user in range(4):
                new = [251 + user, *some(rng, 11)]
                prompt = [*said[user], *new]
                result = runner.complete(prompt, max_tokens=5, stop_tokens=[])
                said[user] = [*prompt, *result.tokens]
                own = len(prompt) if turn == 0 else 1 + len(new)  # and the answer's last token
                shared = header if turn == 0 and user else 0
                assert result.usage.evaluated_tokens == own - shared, (turn, user)


def test_cold_requests_over_one_trunk_that_come_together_evaluate_it_once(llama: Parts) -> None:
    """The first evaluates the trunk, in pieces; the others wait, and then evaluate their own."""
    rng, length = random.Random(1), fewer(2500, 740)
    trunk = some(rng, length)
    own = [some(rng, count) for count in (30, 41, 17, 25)]
    with Engine(*llama, max_sequences=4, context=length + 60, prefill_step=256) as runner:
        evaluated = evaluated_of(runner)
        runner.run([[*trunk, *end] for end in own], max_tokens=4, stop_tokens=[])
    least = length + sum(map(len, own))
    assert least <= sum(evaluated) <= 1.01 * least


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_interleaved_conversations_reuse_what_they_share(llama: Parts, slots: int) -> None:
    """More conversations than slots: what is given up comes back, and no request fails."""
    trace = Trace(conversations=12, requests=fewer(150, 100), context=600, scale=0.6)
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


def test_a_model_without_cells_has_room_for_all() -> None:
    """Its layers are states of each slot, so few cells don't limit it."""
    with Engine(*tiny_parts("mamba2"), max_sequences=3, context=80, kv_cache_tokens=80) as runner:
        results = runner.run([[i, 2, 3] * 10 for i in range(5)], max_tokens=4, stop_tokens=[])
    assert [len(result.tokens) for result in results] == [4] * 5
