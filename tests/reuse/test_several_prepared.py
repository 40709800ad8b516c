"""Several requests prepared on one runner: each answers as if alone, in whatever order they go."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.prompts import PROMPT
from support.reused import cold, is_consistent, mixes, tokens
from support.sample import examples, fewer

from mlxrunner import BusyError, ClosedError, Runner
from mlxrunner.testing import interrupt_at, oracle_runner

BASE = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
"""The beginning of all prompts."""
LONG = 40
"""Tokens of an answer that no history reads to its end."""
OPTIONS: list[dict[str, Any]] = [
    {},
    {"speculate": "off"},
    {"speculate": "lookup"},
    {"temperature": 1.0, "seed": 5},
    {"logprobs": 2},
    {"repetition_penalty": 1.3},
    {"schema": {"type": "array", "items": {"const": "ab"}, "minItems": 9}},
    {"logits_processors": [lambda seen, logits: logits + mx.sin(mx.arange(logits.shape[-1]))]},
]
ACTS = ["prepare", "read", "read", "read", "close", "drop", "thread", "evaluate", "interrupt"]


class Prepared:
    """A request that was prepared, with what it has answered and what it has to answer."""

    def __init__(self, runner: Runner, kinds: list[str], prompt: list[int], n: int, which: int):
        self.kinds, self.prompt, self.n, self.options = kinds, prompt, n, OPTIONS[which]
        self.read: list[int] = []
        self.answer: Any = runner.generate(prompt, max_tokens=n, stop_tokens=[], **self.options)
        self.is_running = False

    @cached_property
    def cold(self) -> list[int]:
        """The answer of a cold runner."""
        return cold(self.kinds, self.prompt, self.n, stop_tokens=[], **self.options)

    def check(self) -> None:
        """Compare what was read with a cold answer."""
        assert self.read == self.cold[: len(self.read)]

    def go_on(self, count: int) -> None:
        """Read `count` tokens or to the end."""
        self.is_running = True
        for _ in range(count):
            chunk = next(self.answer, None)
            if chunk is None or chunk.finish_reason is not None:
                self.read += [] if chunk is None else [chunk.token]
                self.is_running = False
                return
            self.read.append(chunk.token)


def drop_in_a_thread(requests: list[Prepared]) -> None:
    """Drop the answer of the only request of the list in another thread."""
    thread = threading.Thread(target=lambda: delattr(requests.pop(), "answer"))
    thread.start()
    thread.join()


def play(runner: Runner, kinds: list[str], history: list[tuple[str, int, int, int]]) -> None:
    """Let the acts of `history` happen, and check every answer and the entry."""
    requests: list[Prepared] = []
    for act, number, count, which in history:
        running = next((one for one in requests if one.is_running), None)
        one = requests[number % len(requests)] if requests else None
        if act == "prepare" or one is None:
            prompt = [*BASE[: 5 + 5 * (number % 4)], *range(20, 20 + count % 13)]
            try:
                n = LONG if number % 3 else 1 + count
                requests.append(Prepared(runner, kinds, prompt, n, which % len(OPTIONS)))
            except BusyError:
                assert running is not None
        elif act == "read" and running in (None, one):
            one.go_on(count)
            one.check()
        elif act == "read":
            with pytest.raises(BusyError):
                one.go_on(1)
            requests.remove(one)
        elif act == "interrupt" and running in (None, one):
            with suppress(KeyboardInterrupt), interrupt_at(1 + 37 * count + number):
                one.go_on(8)
            one.answer.close()
            requests.remove(one)
        elif act == "evaluate":
            with suppress(BusyError):
                runner.evaluate([*BASE, *range(count)])
        else:
            requests.remove(one)
            if act == "close":
                one.answer.close()
            elif act == "thread":
                one.check()
                drop_in_a_thread([one])
            running = None
            del one
    for one in sorted(requests, key=lambda one: not one.is_running):
        one.go_on(2 * LONG)
        one.check()
    requests.clear()
    runner.evaluate([])  # settles a request that another thread has dropped
    assert is_consistent(runner)
    assert tokens(runner, [*BASE, 7], 4) == cold(kinds, [*BASE, 7], 4)


histories = st.lists(
    st.tuples(st.sampled_from(ACTS), st.integers(0, 11), st.integers(1, 12), st.integers(0, 20)),
    min_size=3,
    max_size=14,
)


@mixes
@examples(12)
@given(history=histories)
def test_each_of_several_prepared_requests_answers_as_if_alone(
    mix: Any, history: list[tuple[str, int, int, int]]
) -> None:
    """They are begun, half read, closed, dropped, also by another thread, and interrupted."""
    play(mix.runner(prefill_step=5), mix.kinds, history)


@pytest.mark.parametrize("kinds", [["full", "full"], ["recurrent", "full"]], ids=lambda k: k[0])
def test_a_refused_request_leaves_the_running_one_as_it_was(kinds: list[str]) -> None:
    """The answer, its event and the entry are those of a request alone, wherever it stands."""
    asked: dict[str, Any] = {"max_tokens": 24, "stop_tokens": [], "speculate": "lookup"}
    for read in range(1, 24):
        runner, alone = oracle_runner(kinds), oracle_runner(kinds)
        told: list[list[Any]] = [[], []]
        for one, seen in zip((runner, alone), told, strict=True):
            one.observers.append(lambda _, observed, seen=seen: seen.append(observed))
            tokens(one, [*PROMPT, *cold(kinds, PROMPT, 13), 7], 9)  # some of it is guessed right
        first = runner.generate(PROMPT, **asked)
        second = runner.generate([9, 8, 7], max_tokens=3)
        said = [next(first).token for _ in range(read)]
        with pytest.raises(BusyError):
            next(second)
        rest, last = list(first), list(alone.generate(PROMPT, **asked))
        assert said + [chunk.token for chunk in rest] == [chunk.token for chunk in last]
        assert list(runner.entry.tokens) == list(alone.entry.tokens)
        assert is_consistent(runner)
        assert rest[-1].usage is runner.usage
        events = [[(len(one.chunks), one.finish, one.error) for one in seen] for seen in told]
        assert events[0] == events[1]
        after = [*runner.entry.tokens, 7]
        assert tokens(runner, after, 3) == cold(kinds, after, 3)


def test_a_request_that_is_begun_later_finds_the_entry_as_it_is_then() -> None:
    """The last chunk of the one before need not be taken first, and its event has its entry."""
    runner = oracle_runner()
    told: list[list[int]] = []
    runner.observers.append(lambda _, observed: told.append([*observed.entry]))
    first = runner.generate(PROMPT, max_tokens=3, stop_tokens=[])
    second = runner.generate([*PROMPT[:9], 5], max_tokens=9, stop_tokens=[])
    said = [next(first).token for _ in range(3)]
    assert next(second).token == cold(["full", "full"], [*PROMPT[:9], 5], 1)[0]
    assert told == [[*PROMPT, *said[:2]]]
    assert runner.usage is None
    assert list(first) == []
    assert len(list(second)) == 8
    assert runner.usage is not None
    assert runner.usage.completion_tokens == 9
    assert len(told) == 2


def test_closing_the_runner_ends_the_running_request_whichever_was_prepared_last() -> None:
    """All others are refused afterwards."""
    runner = oracle_runner()
    first, second = (runner.generate(PROMPT, max_tokens=9) for _ in range(2))
    next(first)
    third = None
    with suppress(BusyError):
        third = runner.generate(PROMPT)
    assert third is None
    runner.close()
    for answer in (first, second):
        with pytest.raises(ClosedError):
            next(answer)
        answer.close()


def test_a_prepared_request_may_begin_after_a_reset() -> None:
    runner = oracle_runner()
    tokens(runner, PROMPT, 3)
    prepared = runner.generate(PROMPT, max_tokens=5, stop_tokens=[])
    runner.reset()
    assert [chunk.token for chunk in prepared] == cold(["full", "full"], PROMPT, 5)


def test_a_callback_can_neither_go_on_with_its_request_nor_end_it() -> None:
    """It would wait for itself; nothing is changed."""
    runner = oracle_runner()
    seen: list[type[BaseException]] = []

    def progress(done: int, total: int) -> None:
        for act in (lambda: next(answer), answer.close, runner.close, runner.reset):
            try:
                act()
            except BusyError as error:
                seen.append(type(error))

    answer = runner.generate(PROMPT, max_tokens=5, stop_tokens=[], progress=progress)
    assert [chunk.token for chunk in answer] == cold(["full", "full"], PROMPT, 5)
    assert len(seen) % 4 == 0
    assert seen


def test_a_second_ctrl_c_at_any_line_keeps_nobody_out() -> None:
    """It comes while the request that the first one ended gives the entry back."""
    kinds, held = ["recurrent", "full"], list[BaseException]()
    model = oracle_runner(kinds).model

    def press(index: int) -> None:
        raise KeyboardInterrupt

    with interrupt_at(-1) as seen, suppress(KeyboardInterrupt):
        runner = oracle_runner(kinds)
        answer = runner.generate(PROMPT, max_tokens=9, stop_tokens=[])
        next(answer)
        runner.model.on_layer = press
        begin = seen[0]
        next(answer)
    lines = seen[0] - begin
    for line in range(1, lines + 1, max(1, lines // fewer(150, 40))):
        runner = oracle_runner(model=model)
        answer = runner.generate(PROMPT, max_tokens=9, stop_tokens=[])
        next(answer)
        model.on_layer = press
        try:
            with interrupt_at(line):
                next(answer)
        except KeyboardInterrupt as error:
            held = [error]
        model.on_layer = lambda index: None
        answer.close()
        assert tokens(runner, PROMPT, 3) == cold(kinds, PROMPT, 3), line
    assert held


def test_nothing_is_reused_for_a_request_that_was_prepared_before_another_one_ran() -> None:
    """A model whose answers depend on chunks starts each request cold, when it begins."""
    runner = oracle_runner()
    runner.facts = replace(runner.facts, depends_on_chunks=True)
    first, second = (runner.generate(PROMPT, max_tokens=3, stop_tokens=[]) for _ in range(2))
    list(first)
    last = list(second)[-1].usage
    assert last is not None
    assert last.cached_tokens == 0


def test_a_full_context_makes_room_when_the_request_begins() -> None:
    """Tokens that an earlier prepared request dropped are not counted for a later one."""
    runner = oracle_runner(context=40)
    prompt = list(range(60))
    options: dict[str, Any] = {"max_tokens": 4, "stop_tokens": [], "overflow": "shift", "keep": 4}
    first, second = runner.generate(prompt, **options), runner.generate([7, 8], **options)
    said = [chunk.token for chunk in first]
    dropped = runner.shifted_tokens
    assert dropped > 0
    assert [chunk.token for chunk in second] == tokens(oracle_runner(context=40), [7, 8], 4)
    assert runner.shifted_tokens == 0
    assert said == [c.token for c in oracle_runner(context=40).generate(prompt, **options)]
