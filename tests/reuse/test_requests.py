"""A request is checked before it begins, runs alone, and says what was asked for."""

from __future__ import annotations

from typing import Any

import pytest
from support.prompts import PROMPT
from support.reused import cold, tokens

from mlxrunner import BusyError, ContextLengthError, OptionError, PromptError
from mlxrunner.testing import VOCAB, oracle_runner


def test_a_reset_during_a_request_is_refused() -> None:
    """It would take the caches from under it."""
    runner = oracle_runner()
    answer = runner.generate(PROMPT, max_tokens=6)
    first = [next(answer).token for _ in range(3)]
    with pytest.raises(BusyError):
        runner.reset()
    assert first + [chunk.token for chunk in answer] == cold(["full", "full"], PROMPT)


def test_unseeded_requests_differ_after_a_seeded_one() -> None:
    """Each request has random numbers of its own."""
    runner = oracle_runner()
    answers = []
    for _ in range(3):
        tokens(runner, PROMPT, 5, temperature=5.0, seed=7)
        answers.append(tuple(tokens(runner, PROMPT, 20, temperature=5.0)))
    assert len(set(answers)) == 3


def test_only_one_request_at_a_time() -> None:
    """A second one is refused until the first is closed, or forgotten."""
    runner = oracle_runner()
    first = runner.generate(PROMPT)
    next(first)
    with pytest.raises(BusyError, match="another request"):
        runner.generate(PROMPT)
    first.close()  # type: ignore[attr-defined]
    assert tokens(runner, PROMPT) == cold(["full", "full"], PROMPT)
    forgotten = runner.generate(PROMPT)
    next(forgotten)
    del forgotten
    assert tokens(runner, PROMPT) == cold(["full", "full"], PROMPT)


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        pytest.param([], PromptError, "the prompt is empty", id="empty"),
        pytest.param(
            list(range(100)),
            ContextLengthError,
            "has 100 tokens.*context of 100 tokens",
            id="too-long",
        ),
        pytest.param([[1, 2], [3]], PromptError, "flat list of integers", id="ragged"),
        pytest.param(
            None, PromptError, "a prompt is a text, token ids or messages, not NoneType", id="none"
        ),
        pytest.param({1, 2}, PromptError, "not set", id="set"),
        pytest.param(
            [1, VOCAB],
            PromptError,
            f"token id {VOCAB} is beyond the model's vocabulary of {VOCAB}",
            id="unknown-token",
        ),
    ],
)
def test_a_prompt_that_cannot_be_run_is_refused_at_once(
    prompt: list[int], error: type[Exception], message: str
) -> None:
    """Before anything is iterated, and without touching the entry."""
    runner = oracle_runner(context=100)
    tokens(runner, PROMPT)
    before = list(runner.entry.tokens)
    with pytest.raises(error, match=message):
        runner.generate(prompt)
    assert runner.entry.tokens == before


def test_the_answer_ends_where_the_context_ends() -> None:
    """With the reason "length", and not one token later."""
    runner = oracle_runner(context=len(PROMPT) + 4)
    chunks = list(runner.generate(PROMPT))
    assert len(chunks) == 4
    assert chunks[-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens: 0 is out of range, it has to be at least 1"),
        ({"temperature": -1}, "temperature: -1 is out of range"),
        ({"temperature": float("nan")}, "temperature: nan is out of range"),
        ({"temperature": "hot"}, "temperature: 'hot' is not a number"),
        ({"top_p": 1.5}, "top_p: 1.5 is out of range, it has to be between 0 and 1"),
        ({"min_p": 2}, "min_p"),
        ({"top_k": -5}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"logprobs": 1000}, "logprobs: 1000 is out of range, it has to be between 0 and 100"),
        ({"stop": [""]}, "each stop string"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"top_k": 1.5}, "top_k: 1.5 is not a whole number"),
        ({"max_tokens": 2.5}, "max_tokens: 2.5 is not a whole number"),
        ({"max_tokens": float("inf")}, "max_tokens: inf is not a whole number"),
        ({"seed": 1.5}, "seed"),
        ({"stop_tokens": "ab"}, "stop_tokens: 'ab' is not a list; give one"),
        ({"stop_tokens": 5}, "stop_tokens: 5 is not a list"),
        ({"stop": 5}, "stop: 5 is not a list"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_option_out_of_range_is_named_with_its_range(
    options: dict[str, Any], message: str
) -> None:
    """Before the request begins."""
    with pytest.raises(OptionError, match=message):
        oracle_runner().generate(PROMPT, **options)


def test_log_probabilities_are_there_when_asked_for() -> None:
    """The token's own and the most likely ones, in order, summing to less than one."""
    runner = oracle_runner()
    assert all(
        chunk.logprob is None and chunk.top_logprobs is None
        for chunk in runner.generate(PROMPT, max_tokens=3)
    )
    for chunk in runner.generate(PROMPT, max_tokens=3, logprobs=5):
        assert chunk.top_logprobs is not None
        assert next(iter(chunk.top_logprobs)) == chunk.token
        assert chunk.top_logprobs[chunk.token] == chunk.logprob
        assert list(chunk.top_logprobs.values()) == sorted(
            chunk.top_logprobs.values(), reverse=True
        )
        assert len(chunk.top_logprobs) == 5
    assert all(
        chunk.top_logprobs is None
        for chunk in runner.generate(PROMPT, max_tokens=3, logprobs=0)
        if chunk.logprob is None
    )


def test_progress_counts_the_prompt_up() -> None:
    """From what is in the entry to the whole prompt."""
    seen: list[tuple[int, int]] = []
    runner = oracle_runner(prefill_step=10)
    prompt = list(range(40))
    list(
        runner.generate(
            prompt, max_tokens=1, progress=lambda done, total: seen.append((done, total))
        )
    )
    assert seen[0] == (0, 40)
    assert seen[-1] == (40, 40)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
