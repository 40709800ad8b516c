"""The usage says what was reused, and why not more."""

from __future__ import annotations

from typing import Any

import pytest
from mlx_lm.models.cache import ChunkedKVCache
from support.prompts import PROMPT
from support.reused import NO_HELP, cold, fail, is_consistent, tokens, usage_of

from mlxrunner.results import Usage
from mlxrunner.testing import EOS, WINDOW, oracle_runner


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ([1, 2, 3], ("miss", "no_common_token", 0, 0, len(PROMPT) + 2)),
        ([*PROMPT[:10], 1, 2], ("partial", "diverged", 10, 10, len(PROMPT) - 8)),
        (PROMPT[:10], ("hit", "prompt_shorter", 10, 9, len(PROMPT) - 7)),
        # There are no logits without evaluating something. The entry holds the answer, too.
        (PROMPT, ("hit", "prompt_shorter", len(PROMPT), len(PROMPT) - 1, 3)),
    ],
    ids=["nothing in common", "diverged", "shorter", "full hit"],
)
def test_the_usage_says_what_was_reused_and_why_not_more(
    second: list[int], expected: tuple[Any, ...]
) -> None:
    """outcome, reason, matched, cached, trimmed."""
    runner = oracle_runner()
    usage_of(runner, PROMPT)
    usage = usage_of(runner, second)
    cache = usage.cache
    found = usage.outcome, usage.reason, cache.matched_tokens, usage.cached_tokens
    assert (*found, cache.trimmed_tokens) == expected
    assert usage.evaluated_tokens == len(second) - usage.cached_tokens


def test_the_first_request_is_a_miss_because_the_entry_was_empty() -> None:
    runner = oracle_runner()
    assert usage_of(runner, PROMPT).reason == "empty"
    runner.reset()
    usage = usage_of(runner, PROMPT)
    assert (usage.reason, usage.cache.evicted_by) == ("entry_freed", "a reset")
    assert usage_of(runner, [*PROMPT, 1]).cache.evicted_by is None


@pytest.mark.parametrize("kind", ["sliding", "recurrent", "unknown"])
def test_a_layer_that_cannot_rewind_is_named(kind: str) -> None:
    """Without slack and checkpoints it starts cold and says so."""
    runner = oracle_runner(["full", kind], **NO_HELP)
    assert len(PROMPT) > WINDOW
    usage_of(runner, PROMPT)
    usage = usage_of(runner, [*PROMPT[:18], 1, 2])
    assert (usage.outcome, usage.reason, usage.cache.trim_limited_by) == (
        "miss",
        "rewind_limited",
        kind,
    )
    assert (usage.cache.matched_tokens, usage.cached_tokens) == (18, 0)


@pytest.mark.parametrize("kind", ["sliding", "recurrent", "unknown", "composite", "chunked"])
def test_a_checkpoint_is_the_way_back(kind: str) -> None:
    """The usage names the layer and the last checkpoint that a request goes back to."""
    runner = oracle_runner(
        ["full", kind], rewind_slack=0, checkpoint_interval=1000, checkpoint_budget=10**6
    )
    prompt = [*PROMPT[:9], EOS, *PROMPT[10:]]  # one message of 10 tokens
    usage_of(runner, prompt)
    assert runner.entry.checkpoints.offsets[0] == 10
    usage = usage_of(runner, [*prompt[:14], 1, 2])
    assert (usage.outcome, usage.cache.matched_tokens, usage.cached_tokens) == ("partial", 14, 10)
    assert (usage.cache.trim_limited_by, usage.cache.checkpoint, usage.reason) == (
        kind,
        10,
        "rewind_limited",
    )


def test_a_layer_that_trims_another_number_than_asked_frees_the_entry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Correct first: the answer is that of a cold run, and the event says why."""
    kinds, second = ["full", "chunked"], [*PROMPT[:5], 1]
    runner = oracle_runner(kinds, **NO_HELP)
    usage_of(runner, PROMPT[:8])
    monkeypatch.setattr(ChunkedKVCache, "trim", lambda self, n: n - 1)
    found = runner.complete(second, max_tokens=6)
    said, cause = (found.usage.outcome, found.usage.reason), found.usage.cache.evicted_by
    assert (said, cause) == (("miss", "entry_freed"), "layers that disagreed after a rewind")
    assert found.tokens == cold(kinds, second)
    assert is_consistent(runner)


def test_an_interrupted_prefill_keeps_its_finished_chunks() -> None:
    """The same prompt again continues from there."""
    runner = oracle_runner(["full", "recurrent"], prefill_step=8)
    prompt = list(range(60))
    fail(runner, prompt, KeyboardInterrupt(), 4, 1)
    assert runner.entry.tokens == prompt[:24]
    usage = usage_of(runner, prompt)
    assert (usage.outcome, usage.cached_tokens, usage.evaluated_tokens) == ("hit", 24, 36)


def test_checkpoints_go_on_after_a_full_context_was_evaluated_again() -> None:
    """The entry that is begun again has the same budget."""
    runner = oracle_runner(
        ["recurrent", "full"], context=60, checkpoint_interval=5, checkpoint_budget=10**6
    )
    tokens(runner, list(range(50)), 30, overflow="shift", keep=4)
    assert runner.entry.checkpoints.budget == 10**6


def test_the_names_of_an_earlier_program_are_read() -> None:
    """In a stored usage, and as attributes, with a warning that names the new one."""
    runner = oracle_runner()
    usage = list(runner.generate([1, 2, 3], max_tokens=2))[-1].usage
    assert usage is not None
    flat = usage.as_dict()
    for old, new in [
        ("ahead_tokens", "prefetched_tokens"),
        ("freed_by", "evicted_by"),
        ("rewind_limited_by", "trim_limited_by"),
    ]:
        flat[old] = flat.pop(new)
        with pytest.warns(DeprecationWarning, match=f"{old} is called {new}"):
            assert getattr(usage.cache, old) == getattr(usage.cache, new)
    assert Usage.from_dict(flat) == usage
    assert not hasattr(usage.cache, "other")
