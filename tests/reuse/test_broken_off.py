"""Ctrl-C at any line and errors leave an entry that is true, or none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any
from zlib import crc32

import mlx.core as mx
import pytest
from support.prompts import PROMPT
from support.reused import (
    Mix,
    cold,
    interrupted_twice,
    is_consistent,
    mixes,
    repeating_runner,
    tokens,
    usage_of,
)
from support.sample import fewer

from mlxrunner import Runner
from mlxrunner.testing import interrupt_at, oracle_runner


def warm_request(runner: Runner) -> None:
    tokens(runner, [*PROMPT[:12], *range(60, 84)], 4)


def first_line(mix: Mix, every: int) -> int:
    """Return a line up to `every`, so that all mixes together try nearly every line."""
    return 1 + crc32(repr((mix.kinds, mix.options)).encode()) % every


def assert_interrupts_leave_a_true_entry(
    mix: Mix, request: Callable[[Runner], None], follow_up: list[int], lines: int
) -> None:
    """Press Ctrl-C at `lines` lines of a request behind PROMPT. `follow_up` has to be exact."""
    answer = cold(mix.kinds, follow_up)
    runner = mix.runner()
    tokens(runner, PROMPT)
    with interrupt_at(-1) as seen:
        request(runner)
    interrupted = 0
    every = max(1, seen[0] // lines)
    for line in range(first_line(mix, every), seen[0], every):
        runner = mix.runner()
        tokens(runner, PROMPT)
        with suppress(KeyboardInterrupt), interrupt_at(line):
            try:
                request(runner)
            except KeyboardInterrupt:
                interrupted += 1
                raise
        assert is_consistent(runner), f"line {line}"
        assert tokens(runner, follow_up) == answer, f"line {line}"
    assert interrupted > lines * 4 // 5


@mixes
def test_ctrl_c_at_any_line_leaves_a_true_entry(mix: Mix) -> None:
    """The next request is exact after Ctrl-C at any of 60 lines of a warm one."""
    follow_up = [*PROMPT[:12], *range(60, 80), 5]
    assert_interrupts_leave_a_true_entry(mix, warm_request, follow_up, fewer(60, 30))


@mixes
def test_a_second_ctrl_c_while_the_first_is_mended_leaves_a_true_entry(mix: Mix) -> None:
    """It may come at any line of what ends the request and restores the entry."""
    follow_up = [*PROMPT[:12], *range(60, 80), 5]
    every = fewer(9, 13)
    for line in count(first_line(mix, every), every):
        runner = mix.runner()
        tokens(runner, PROMPT)
        with interrupted_twice(runner.model, line) as lines:
            warm_request(runner)
        assert is_consistent(runner), f"line {line}"
        assert tokens(runner, follow_up) == cold(mix.kinds, follow_up), f"line {line}"
        if lines[0][0] < line:
            break
    assert line > 20


@pytest.mark.parametrize(
    "kinds", [["full", "full"], ["recurrent", "full"]], ids=lambda kinds: kinds[0]
)
def test_ctrl_c_at_any_line_of_an_answer_in_a_form_leaves_a_true_entry(kinds: list[str]) -> None:
    """Ctrl-C may come while what may come next is found out and learned."""

    def held(runner: Runner) -> None:
        tokens(
            runner,
            [*PROMPT[:12], 60, 61],
            12,
            schema={"type": "array", "items": {"const": "ab"}, "minItems": 9},
        )

    follow_up = [*PROMPT[:12], 60, 61, *b'["ab", "a', 5]
    assert_interrupts_leave_a_true_entry(Mix(kinds, {}), held, follow_up, fewer(100, 50))


@pytest.mark.parametrize(
    "kinds",
    [["full", "full"], ["recurrent", "full"], ["sliding", "full"]],
    ids=lambda kinds: kinds[0],
)
def test_ctrl_c_at_any_line_of_a_full_context_leaves_a_true_entry(kinds: list[str]) -> None:
    """While room is made and kept tokens are evaluated again."""

    def overflowing(runner: Runner) -> None:
        tokens(runner, list(range(30)), 25, overflow="shift", keep=4)

    runner = oracle_runner(kinds, context=40)
    with interrupt_at(-1) as seen:
        overflowing(runner)
    for line in range(1, seen[0] + 1, max(1, seen[0] // fewer(100, 50))):
        runner = oracle_runner(kinds, context=40)
        with suppress(KeyboardInterrupt), interrupt_at(line):
            overflowing(runner)
        assert is_consistent(runner), f"line {line}"
        follow_up = (
            [*runner.entry.tokens, 7][-39:] if len(runner.entry.tokens) < 39 else list(range(30))
        )
        assert tokens(runner, follow_up, 1) == cold(kinds, follow_up, 1), f"line {line}"


@mixes
def test_an_answer_that_another_thread_drops_leaves_a_true_entry(mix: Mix) -> None:
    """The layers are brought to the recorded tokens before the next request uses them."""
    follow_up = [*PROMPT, 7, 8, 9]
    for read in range(1, 5):
        runner = mix.runner()
        held = [runner.generate(PROMPT, max_tokens=20)]
        for _ in range(read):
            next(held[0])
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        assert tokens(runner, follow_up) == cold(mix.kinds, follow_up)
        assert is_consistent(runner)


def test_an_answer_that_another_thread_drops_behind_guesses_shows_a_true_entry() -> None:
    """The entry is settled before anyone looks at it, also while a pass with guesses runs."""
    for read in range(14, 20):
        runner = repeating_runner(["full", "full"])
        held = [runner.generate([*range(1, 30)] * 2, max_tokens=40, speculate="lookup")]
        for _ in range(read):
            next(held[0])
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        assert is_consistent(runner), read


def test_callbacks_may_look_at_the_entry() -> None:
    """Within a step and between two of them; the answer is the same."""
    runner, sizes = repeating_runner(["full", "full"]), list[int]()
    prompt = [*range(1, 30)] * 2
    expected = runner.complete(prompt, max_tokens=9).tokens
    runner.reset()

    def look(tokens: mx.array, logits: mx.array) -> mx.array:
        sizes.append(len(runner.entry.tokens))
        return logits

    for _ in range(2):
        sizes.clear()
        result = runner.complete(
            prompt,
            max_tokens=9,
            logits_processors=[look],
            progress=lambda done, total: sizes.append(len(runner.entry.tokens)),
        )
        assert result.tokens == expected
        assert sizes == sorted(sizes)
        assert sizes[-1] >= len(prompt) + 6


def test_ctrl_c_at_any_line_of_a_close_keeps_nobody_out() -> None:
    """The next request is served while the answer that was closed is still referenced."""
    kinds, follow_up = ["recurrent", "full"], [*PROMPT, 7, 8, 9]
    for line in count(1, fewer(2, 5)):
        runner = oracle_runner(kinds)
        answer: Any = runner.generate(PROMPT, max_tokens=20)
        next(answer), next(answer)
        with suppress(KeyboardInterrupt), interrupt_at(line) as lines:
            answer.close()
        if not answer.is_over:  # it came before the close began
            answer.close()
        assert tokens(runner, follow_up) == cold(kinds, follow_up), f"line {line}"
        if lines[0] < line:
            break
    assert line > 20


def test_an_unusable_array_frees_the_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept after an exception that leaves caches which cannot be evaluated any more."""
    runner = oracle_runner(["full"])
    tokens(runner, PROMPT)

    def on_layer(index: int) -> None:
        monkeypatch.setattr(
            type(runner.entry.caches[0]),
            "state",
            property(lambda self: mx.arange(3) @ mx.arange(2)),
        )
        raise RuntimeError("out of memory")

    runner.model.on_layer = on_layer
    with pytest.raises(RuntimeError, match="out of memory"):
        tokens(runner, [*PROMPT, *range(40)])
    monkeypatch.undo()
    runner.model.on_layer = lambda index: None
    assert len(runner.entry.tokens) == 0
    assert usage_of(runner, PROMPT).cache.evicted_by == "ValueError while evaluating"


@pytest.mark.parametrize("kinds", [("full", "sliding"), ("recurrent", "composite")], ids="+".join)
def test_an_exception_that_is_still_held_keeps_nobody_out(kinds: tuple[str, ...]) -> None:
    """The next request is served while the traceback of an interrupted one is referenced."""
    runner = oracle_runner(kinds, checkpoint_interval=5)
    held = []
    for line in range(1, 420, 5):
        try:
            with interrupt_at(line):
                tokens(runner, [1, 2, 3, line % 7, *range(5, 13)], 4, stop_tokens=[])
        except KeyboardInterrupt as error:
            held = [error]
        assert tokens(runner, [1, 2, 3, 4], 2, stop_tokens=[])
    assert held
