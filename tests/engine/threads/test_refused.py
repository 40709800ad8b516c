"""Requests that no runner can serve are refused by submit, and the others go on."""

from __future__ import annotations

from typing import Any

import pytest
from support.threads import LONG, opened

from mlxrunner import ContextLengthError, OptionError, PromptError

NESTED: list[Any] = []
for _ in range(10_000):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ([1], {"deadline": 10**400}),
        ([1], {"deadline": 10**5000}),
        ([1], {"temperature": 10**5000}),
        ([1], {"tools": NESTED}),
        ([1], {"template": {"a": NESTED}}),
        ([1], {"schema": {"a": NESTED}}),
        ([1], {"max_tokens": NESTED}),
        ([{"role": "user", "content": NESTED}], {}),
        ([{"role": NESTED, "content": "a"}], {}),
        (NESTED, {}),
    ],
    ids="deadline digits number tools template schema limit content role prompt".split(),
)
def test_values_of_any_size_and_depth_are_refused(
    llama: Any, prompt: Any, options: dict[str, Any]
) -> None:
    """Those that Python can't write as well; the other requests go on."""
    with opened(llama, 2) as runner:
        running = runner.submit([9], **LONG)
        with pytest.raises((OptionError, PromptError)):
            runner.submit(prompt, **options)
        assert len(running.result().tokens) == 100


def test_a_request_that_never_fits_is_refused_at_once(llama: Any) -> None:
    """One that fits alone waits for the others."""
    with opened(llama, 3, kv_cache_tokens=64) as runner:
        with pytest.raises(ContextLengthError):
            runner.submit([1] * 64, max_tokens=30)
        first = runner.submit([1, 2], max_tokens=40, stop_tokens=[])
        second = runner.submit([3, 4], max_tokens=40, stop_tokens=[])
        assert len(second.result().tokens) == len(first.result().tokens) == 40


def test_a_wrong_prompt_or_option_is_raised_by_submit(llama: Any) -> None:
    """In the thread that submits, before anything is queued."""
    with opened(llama) as runner:
        with pytest.raises(PromptError):
            runner.submit([])
        with pytest.raises(OptionError):
            runner.submit([1], temperature=-1)
        assert runner.stats().waiting == 0
