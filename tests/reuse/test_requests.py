"""A request is checked before it begins, runs alone, and says what was asked for."""

from __future__ import annotations

from typing import Any

import pytest
from support.prompts import PROMPT
from support.reused import cold, tokens

from mlxrunner import BusyError, ContextLengthError, OptionError, PromptError
from mlxrunner.testing import VOCAB, oracle_runner


def test_unseeded_requests_differ_after_a_seeded_one() -> None:
    """Each request has random numbers of its own."""
    runner = oracle_runner()
    answers = []
    for _ in range(3):
        tokens(runner, PROMPT, 5, temperature=5.0, seed=7)
        answers.append(tuple(tokens(runner, PROMPT, 20, temperature=5.0)))
    assert len(set(answers)) == 3


def test_only_one_request_at_a_time() -> None:
    """A second one and a reset are refused until the first is closed, or forgotten."""
    runner, cold_tokens = oracle_runner(), cold(["full", "full"], PROMPT)
    first = runner.generate(PROMPT, max_tokens=6)
    said = [next(first).token for _ in range(3)]
    with pytest.raises(BusyError, match="another request"):
        runner.generate(PROMPT)
    with pytest.raises(BusyError):
        runner.reset()
    assert said + [chunk.token for chunk in first] == cold_tokens
    for end in ("close", "forget"):
        answers: list[Any] = [runner.generate(PROMPT)]
        next(answers[0])
        if end == "close":
            answers[0].close()
        answers.clear()
        assert tokens(runner, PROMPT) == cold_tokens


UNKNOWN = f"token id {VOCAB} is beyond the model's vocabulary of {VOCAB}"
PROMPTS: dict[str, tuple[Any, type[Exception], str]] = {
    "empty": ([], PromptError, "the prompt is empty"),
    "too long": (list(range(100)), ContextLengthError, "has 100 tokens.*context of 100 tokens"),
    "ragged": ([[1, 2], [3]], PromptError, "flat list of integers"),
    "none": (None, PromptError, "a prompt is a text, token ids or messages, not NoneType"),
    "set": ({1, 2}, PromptError, "not set"),
    "unknown token": ([1, VOCAB], PromptError, UNKNOWN),
}


@pytest.mark.parametrize(("prompt", "error", "message"), PROMPTS.values(), ids=PROMPTS)
def test_a_prompt_that_cannot_be_run_is_refused_at_once(
    prompt: Any, error: type[Exception], message: str
) -> None:
    """Before anything is iterated, and without touching the entry."""
    runner = oracle_runner(context=100)
    tokens(runner, PROMPT)
    before = list(runner.entry.tokens)
    with pytest.raises(error, match=message):
        runner.generate(prompt)
    assert runner.entry.tokens == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": float("nan")}, "temperature: nan is out of range"),
        ({"temperature": "hot"}, "temperature: 'hot' is not a number"),
        ({"min_p": 2}, "min_p"),
        ({"top_k": -5}, "top_k"),
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
    with pytest.raises(OptionError, match=message):
        oracle_runner().generate(PROMPT, **options)


def test_log_probabilities_are_there_when_asked_for() -> None:
    """The token's own and the most likely ones, in order."""
    runner = oracle_runner()
    for chunk in runner.generate(PROMPT, max_tokens=3):
        assert (chunk.logprob, chunk.top_logprobs) == (None, None)
    for chunk in runner.generate(PROMPT, max_tokens=3, logprobs=5):
        top = chunk.top_logprobs
        assert top is not None
        assert (len(top), next(iter(top)), top[chunk.token]) == (5, chunk.token, chunk.logprob)
        assert [*top.values()] == sorted(top.values(), reverse=True)


def test_progress_counts_the_prompt_up() -> None:
    seen: list[tuple[int, int]] = []
    runner = oracle_runner(prefill_step=10)
    runner.complete(list(range(40)), max_tokens=1, progress=lambda *told: seen.append(told))
    assert (seen[0], seen[-1]) == ((0, 40), (40, 40))
    assert seen == sorted(seen)
