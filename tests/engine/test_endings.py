"""Other requests keep their answers and all slots stay usable, however a request ends."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import mlx.nn as nn
import pytest
from support.engine import Engine, backend, request_of, scheduler
from support.histories import Parts, alone, computed, tiny_parts

from mlxrunner import CancelledError, ContextLengthError
from mlxrunner.errors import StepFailedError
from mlxrunner.testing import interrupt_at

LONG, OTHER = [i * 7 % 290 for i in range(40)], [i * 11 % 290 for i in range(30)]
SHARING = [*LONG[:25], 9, 9]


def is_consistent(runner: Engine) -> bool:
    """Each slot has the cells of its tokens, and is busy where it has a request."""
    ends = backend(runner).groups[0]._cells.next_positions()
    busy = {request.slot.number for request in scheduler(runner).requests}
    return all(
        len(slot.tokens) == ends[slot.number] and slot.is_busy == (slot.number in busy)
        for slot in runner.slots
    )


@pytest.mark.exhaustive(0)
def test_ctrl_c_while_a_model_is_adapted_or_given_back_leaves_it_as_it_was(llama: Parts) -> None:
    """At any line of the constructor; at any line of `close`, which can be called again."""
    model = llama[0]
    with interrupt_at(-1) as seen:
        runner = Engine(*llama, max_sequences=2, context=20)
    with interrupt_at(-1) as closing:
        runner.close()
    for line in range(1, seen[0], max(1, seen[0] // 60)):
        with suppress(KeyboardInterrupt), interrupt_at(line):
            Engine(*llama, max_sequences=2, context=20)
        assert is_as_it_was(model), f"line {line}"
    for line in range(1, closing[0] + 1):
        runner = Engine(*llama, max_sequences=2, context=20)
        with suppress(KeyboardInterrupt), interrupt_at(line):
            runner.close()
        runner.close()
        assert is_as_it_was(model), f"line {line} of close"


def is_as_it_was(model: Any) -> bool:
    return type(model.model.norm) is nn.RMSNorm and all(
        type(layer.self_attn.rope) is nn.RoPE for layer in model.layers
    )


def test_an_error_while_a_token_is_read_ends_one_request_and_says_so(
    llama: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others continue, and the slot of the failed one can be used."""
    with Engine(*llama, max_sequences=2, context=80) as runner:
        first = runner.submit(LONG, max_tokens=9, stop_tokens=[])
        second = runner.submit(OTHER, max_tokens=9, stop_tokens=[])
        for _ in range(3):
            runner.step()

        def fail(*_: object) -> None:
            raise RuntimeError("a tokenizer's fault")

        monkeypatch.setattr(request_of(second).answer, "take", fail)
        assert first.result().tokens == alone(llama, LONG, 9)
        with pytest.raises(
            StepFailedError, match="made a step fail: RuntimeError: a tokenizer's fault"
        ):
            second.result()
        assert runner.submit(OTHER, max_tokens=9, stop_tokens=[]).result().tokens == alone(
            llama, OTHER, 9
        )


def test_run_leaves_nothing_running(llama: Parts) -> None:
    """Where a prompt can't be run, and where nobody wants the other answers any more."""
    with Engine(*llama, max_sequences=1, context=60) as runner:
        with pytest.raises(ContextLengthError):
            runner.run([[1, 2], list(range(70))], max_tokens=40, stop_tokens=[])
        answers = runner.run_each(([i], {"max_tokens": 2 + i, "stop_tokens": []}) for i in range(5))
        assert next(answers).tokens == alone(llama, [0], 2)
        answers.close()  # type: ignore[attr-defined]
        assert runner.submit([1], max_tokens=3, stop_tokens=[]).result().tokens == alone(
            llama, [1], 3
        )


def test_the_single_runner_beside_it_is_not_disturbed_by_an_error(
    llama: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the same model: which rows are wanted is forgotten however a pass ends."""
    expected = alone(llama, LONG, 5)
    with Engine(*llama, max_sequences=2, context=80) as runner:
        view = backend(runner)._views[1]

        def fail(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(view, "update_and_fetch", fail)
        with pytest.raises(KeyboardInterrupt):
            list(runner.submit(OTHER, max_tokens=2))
        assert computed(llama, LONG, 5) == expected


@pytest.mark.parametrize("is_dirty", [False, True])
def test_a_chain_of_prefixes_is_evaluated_once(llama: Parts, is_dirty: bool) -> None:
    """A request that waits for a waiting one does not use what that one's slot held before."""
    first = list(range(1, 61))
    second = [*first, *range(100, 160)]
    with Engine(*llama, max_sequences=3, context=200, prefill_step=16) as runner:
        if is_dirty:
            runner.run([[250 + i] * 150 for i in range(3)], max_tokens=1)
        results = runner.run(
            [[*first, 9], [*second, 9], [*second, 200, 201]], max_tokens=2, stop_tokens=[]
        )
        assert [result.usage.cached_tokens for result in results] == [0, 60, 120]


def test_those_that_wait_for_a_cancelled_prefix_evaluate_it_once(llama: Parts) -> None:
    """Where cells are few, so that two copies of it would not fit beside an unrelated request."""
    prefix = list(range(1, 101))
    with Engine(*llama, max_sequences=4, context=150, kv_cache_tokens=200) as runner:
        first = runner.submit([*prefix, 5], max_tokens=10, stop_tokens=[])
        waiting = [runner.submit([*prefix, end], max_tokens=10, stop_tokens=[]) for end in (6, 7)]
        other = runner.submit([290, 291], max_tokens=30, stop_tokens=[])
        for _ in range(2):
            first.cancel()
        with pytest.raises(CancelledError):
            first.result()
        results = [handle.result() for handle in waiting]
        assert [result.usage.cached_tokens for result in results] == [0, 100]
        assert [result.tokens for result in results] == [
            alone(llama, [*prefix, end], 10) for end in (6, 7)
        ]
        assert other.result().tokens == alone(llama, [290, 291], 30)


def test_windows_share_a_prefix_in_every_wave() -> None:
    """The first of each wave evaluates the prefix and the others share it, without idle slots."""
    given = tiny_parts("gemma3_text", sliding_window=16)
    prefix = [i * 7 % 290 for i in range(200)]
    with Engine(
        *given,
        max_sequences=4,
        context=400,
        prefill_step=64,
        rewind_slack=64,
        checkpoint_budget=0,
    ) as runner:
        for wave in range(2):
            prompts = [
                [*prefix, *((10 * wave + i + 2) * k % 290 for k in range(1, 120))] for i in range(4)
            ]
            results = runner.run(prompts, max_tokens=3, stop_tokens=[])
            assert [result.usage.cached_tokens for result in results] == [0, 200, 200, 200]
            for prompt, result in zip(prompts, results, strict=True):
                assert result.tokens == alone(given, prompt, 3)


def test_a_prompt_that_was_cancelled_counts_what_was_evaluated_of_it(llama: Parts) -> None:
    """Not what would have been."""
    with Engine(*llama, max_sequences=2, context=80, prefill_step=16) as runner:
        seen: list[Any] = []
        runner.observers.append(lambda _, observation: seen.append(observation.usage))
        first = runner.submit(LONG, max_tokens=3, stop_tokens=[])
        waiting = runner.submit(SHARING, max_tokens=3, stop_tokens=[])
        runner.step()
        waiting.cancel()
        first.cancel()
        assert [(usage.evaluated_tokens, usage.completion_tokens) for usage in seen] == [
            (0, 0),
            (16, 0),
        ]
        runner.submit(LONG, max_tokens=3, stop_tokens=[]).result()
        assert (seen[2].cached_tokens, seen[2].evaluated_tokens) == (16, 24)
