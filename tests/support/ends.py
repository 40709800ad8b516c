"""Ways for a request to end."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import pytest
from support.reused import cold, fail, tokens

from mlxrunner import Runner
from mlxrunner.testing import oracle_runner


def run_to_the_end(runner: Runner, prompt: list[int]) -> None:
    tokens(runner, prompt)


def close_early(runner: Runner, prompt: list[int]) -> None:
    iterator = runner.generate(prompt, max_tokens=20)
    next(iterator), next(iterator)
    iterator.close()  # type: ignore[attr-defined]


def drop_unread(runner: Runner, prompt: list[int]) -> None:
    runner.generate(prompt)


def stop_on_a_token(runner: Runner, prompt: list[int]) -> None:
    third = cold(runner.model.kinds, prompt)[2]
    assert list(runner.generate(prompt, stop_tokens=[third]))[-1].finish_reason == "stop"


def stop_on_text(runner: Runner, prompt: list[int]) -> None:
    answer = "".join(
        chunk.text for chunk in oracle_runner(runner.model.kinds).generate(prompt, max_tokens=8)
    )
    last = list(runner.generate(prompt, max_tokens=8, stop=answer[2]))[-1]
    assert last.finish_reason == "stop"


def one_token(runner: Runner, prompt: list[int]) -> None:
    tokens(runner, prompt, 1)


def exception_in_prefill(runner: Runner, prompt: list[int]) -> None:
    fail(runner, prompt, RuntimeError("from the model"), 1, 0)


def interrupt_in_prefill(runner: Runner, prompt: list[int]) -> None:
    fail(runner, prompt, KeyboardInterrupt(), 1, len(runner.model.kinds) - 1)


def interrupt_in_second_chunk(runner: Runner, prompt: list[int]) -> None:
    if len(prompt) - len(runner.entry.tokens) > 20:
        fail(runner, prompt, KeyboardInterrupt(), 2, len(runner.model.kinds) - 1)


def interrupt_in_decode(runner: Runner, prompt: list[int]) -> None:
    fail(runner, prompt, KeyboardInterrupt(), 7, len(runner.model.kinds) - 1)


def sampler_fails(runner: Runner, prompt: list[int]) -> None:
    def processor(history: mx.array, logits: mx.array) -> mx.array:
        if history.shape[0] > len(prompt) + 1:
            raise ZeroDivisionError
        return logits

    with pytest.raises(ZeroDivisionError):
        tokens(runner, prompt, 20, logits_processors=[processor])


def reset(runner: Runner, prompt: list[int]) -> None:
    tokens(runner, prompt)
    runner.reset()


ENDS: dict[str, Callable[[Runner, list[int]], None]] = {
    f.__name__: f
    for f in (
        run_to_the_end,
        close_early,
        drop_unread,
        stop_on_a_token,
        stop_on_text,
        one_token,
        exception_in_prefill,
        interrupt_in_prefill,
        interrupt_in_second_chunk,
        interrupt_in_decode,
        sampler_fails,
        reset,
    )
}
