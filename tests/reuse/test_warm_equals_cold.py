"""A warm answer is that of a cold runner, for every cache kind, split point and way to end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any
from zlib import crc32

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.prompts import PROMPT
from support.reused import ENDS, MIXES, Mix, cold, is_consistent, mixes, tokens
from support.sample import examples

from mlxrunner import Runner
from mlxrunner.testing import LAYERS, interrupt_at, oracle_runner


def test_each_kind_of_layer_is_in_a_mix() -> None:
    """A new kind without one would not be held against a cold runner."""
    assert {kind for kinds, _ in MIXES.values() for kind in kinds} == LAYERS.keys()


@pytest.mark.exhaustive(10)
@mixes
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_warm_equals_cold_for_every_split_after_every_end(
    mix: Mix, end: Callable[[Runner, list[int]], None]
) -> None:
    """A prompt that leaves the first one at any position, after any end, has the cold tokens.

    A case tries every third position; the others are those of the next ends and mixes.
    """
    first = crc32(repr((mix.kinds, mix.options, end.__name__)).encode()) % 3
    for split in range(first, len(PROMPT) + 1, 3):
        second = [*PROMPT[:split], 111, 112] if split < len(PROMPT) else PROMPT
        answer = cold(mix.kinds, second)
        runner = mix.runner()
        end(runner, PROMPT)
        assert is_consistent(runner)
        assert tokens(runner, second) == answer
        assert is_consistent(runner)


@mixes
def test_the_entry_holds_exactly_what_was_evaluated(mix: Mix) -> None:
    """Prompt and answer, but for the last token, which nobody asked to continue from."""
    runner = mix.runner()
    answer = tokens(runner, PROMPT)
    assert runner.entry.tokens == PROMPT + answer[:-1]
    assert sum(runner.model.forwards) == len(runner.entry.tokens)


@mixes
def test_a_conversation_evaluates_only_what_is_new(mix: Mix) -> None:
    runner, history = mix.runner(), list(PROMPT)
    for turn in range(6):
        before = len(runner.entry.tokens)
        answer = list(runner.generate(history, max_tokens=5))
        usage = answer[-1].usage
        assert usage is not None
        assert usage.cached_tokens == before
        assert usage.evaluated_tokens == len(history) - before
        assert usage.outcome == ("hit" if turn else "miss")
        history += [chunk.token for chunk in answer if chunk.token is not None] + [turn, 100 + turn]


edits = st.lists(
    st.tuples(
        st.sampled_from(["append", "cut", "edit", "new"]),
        st.integers(0, 60),
        st.lists(st.integers(0, 9), min_size=1, max_size=12),
        st.sampled_from(["end", "close", "interrupt", "one"]),
    ),
    min_size=1,
    max_size=8,
)


@mixes
@examples(15)
@given(edits=edits, data=st.data())
def test_random_conversations_are_as_if_cold(
    mix: Mix, edits: list[Any], data: st.DataObject
) -> None:
    """Random prompts after ended, closed and interrupted requests give the cold tokens."""
    runner, history = mix.runner(prefill_step=5), [1]
    for change, place, new, end in edits:
        if change == "append":
            history = history + new
        elif change == "new":
            history = list(new)
        elif change == "cut":
            history = history[: max(1, place % (len(history) + 1))]
        else:
            at = place % (len(history) + 1)
            history = [*history[:at], *new, *history[at + 1 :]]
        if end == "end":
            answer = tokens(runner, history, 4)
            assert answer == cold(mix.kinds, history, 4)
            history = history + answer
        elif end == "one":
            assert tokens(runner, history, 1) == cold(mix.kinds, history, 1)
        elif end == "close":
            iterator = runner.generate(history)
            next(iterator)
            iterator.close()  # type: ignore[attr-defined]
        else:
            with suppress(KeyboardInterrupt), interrupt_at(data.draw(st.integers(1, 900))):
                tokens(runner, history, 4)
        assert is_consistent(runner)
    assert tokens(runner, history, 4) == cold(mix.kinds, history, 4)


@mixes
def test_a_prompt_that_leaves_a_shifted_entry_anywhere_has_the_cold_tokens(mix: Mix) -> None:
    """No layer goes back to a place that its tokens had before they were moved."""
    for place in range(3, 40, 5):
        runner = mix.runner(context=40)
        tokens(runner, list(range(30)), 25, overflow="shift", keep=4)
        second = [*runner.entry.tokens[:place], 111, 112][:36]
        assert tokens(runner, second, 3) == cold(mix.kinds, second, 3), place
        assert is_consistent(runner)


def test_penalties_see_the_whole_prompt_warm_or_cold() -> None:
    """mlx-lm's processors see only the suffix on a hit; these do not."""
    options = {
        "repetition_penalty": 1.7,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.4,
        "penalty_context": 1000,
    }
    runner = oracle_runner()
    tokens(runner, PROMPT)
    assert tokens(runner, PROMPT, 12, **options) == cold(["full", "full"], PROMPT, 12, **options)
    assert tokens(runner, PROMPT, 12, **options) != tokens(runner, PROMPT, 12)
    seen: list[list[int]] = []

    def spy(history: mx.array, logits: mx.array) -> mx.array:
        seen.append(history.tolist())  # type: ignore[arg-type]
        return logits

    answer = tokens(runner, PROMPT, 3, logits_processors=[spy])
    assert seen == [PROMPT, PROMPT + answer[:1], PROMPT + answer[:2]]


def test_a_seed_decides_the_answer_warm_or_cold() -> None:
    options = {"temperature": 1.5, "top_k": 50, "top_p": 0.9, "min_p": 0.01}
    first = cold(["full", "full"], PROMPT, 20, seed=1, **options)
    runner = oracle_runner()
    tokens(runner, [*PROMPT, 5])
    assert tokens(runner, PROMPT, 20, seed=1, **options) == first
    assert tokens(runner, PROMPT, 20, seed=2, **options) != first
