"""A request waits for a slot in order, until its deadline, and a caller as long as it says."""

from __future__ import annotations

import math
from typing import Any

import pytest
from support.threads import LONG, alone, opened
from support.waiting import until

from mlxrunner import OptionError, TimeLimitError
from mlxrunner.engine import thread


def test_a_request_waits_for_a_slot_in_the_order_of_arrival(llama: Any) -> None:
    """It does not fail; statistics count it."""
    ended: list[int] = []
    with opened(llama, 1) as runner:
        runner.observers.append(lambda _, seen: ended.append(int(seen.prompt[0])))
        handles = [runner.submit([i], max_tokens=3, stop_tokens=[]) for i in range(9)]
        assert runner.stats().slots == 1
        for i, handle in reversed(list(enumerate(handles))):
            assert handle.result().tokens == alone(llama, [i], max_tokens=3, stop_tokens=[])
        until(lambda: runner.stats().busy == 0)
        assert (runner.stats().waiting, runner.stats().tokens > 0) == (0, True)
        assert runner.stats().steps > 9
        assert runner.stats().bytes > 0
    assert ended == list(range(9))


def test_those_of_a_higher_priority_wait_in_front(llama: Any) -> None:
    """The others go by the nearest deadline; each eighth turn is that of the first to arrive."""
    ended: list[int] = []
    given: list[dict[str, Any]] = [{"priority": "batch"}, {}, {"deadline": 900}, {"deadline": 800}]
    with opened(llama, 1) as runner:
        running = runner.submit([99], **LONG)
        until(lambda: runner.stats().busy == 1)
        runner.observers.append(lambda _, seen: ended.append(int(seen.prompt[0])))
        handles = [
            runner.submit([i], max_tokens=1, **options)
            for i, options in enumerate([*given, *[{}] * 6])
        ]
        until(lambda: runner.stats().waiting == len(handles))
        running.cancel()
        assert all(handle.wait() for handle in handles)
        until(lambda: len(ended) == 11)
    assert ended == [99, 3, 2, 1, 4, 5, 6, 0, 7, 8, 9]


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_deadline_ends_a_request_that_waits(
    llama: Any, monkeypatch: pytest.MonkeyPatch, is_paused: bool
) -> None:
    """For a slot, or for a reader."""
    monkeypatch.setattr(thread, "MOST_UNREAD", 2)
    with opened(llama, 1) as runner:
        running = runner.submit([9], **LONG, **({"deadline": 0.5} if is_paused else {}))
        late = running if is_paused else runner.submit([1], **LONG, deadline=1e-6)
        until(lambda: late.finished)
        with pytest.raises(TimeLimitError):
            list(late)


@pytest.mark.parametrize("deadline", [math.inf, 1e300])
def test_a_deadline_that_never_comes_lets_a_paused_request_wait(
    llama: Any, monkeypatch: pytest.MonkeyPatch, deadline: float
) -> None:
    monkeypatch.setattr(thread, "MOST_UNREAD", 2)
    with opened(llama, 1) as runner:
        handle = runner.submit([9], **LONG, deadline=deadline)
        until(lambda: runner.stats().paused == 1)
        assert len(list(handle)) > 90
        assert runner.complete([1], max_tokens=3, stop_tokens=[]).tokens


@pytest.mark.parametrize("timeout", ["1", True, 10**400], ids=["text", "flag", "huge"])
def test_a_wait_refuses_what_is_no_number_of_seconds(llama: Any, timeout: Any) -> None:
    with opened(llama, 1) as runner:
        handle = runner.submit([9], **LONG)
        with pytest.raises(OptionError, match="timeout"):
            handle.wait(timeout)
        assert not handle.wait(math.nan) or handle.finished


def test_waiting_ends_after_a_time(llama: Any) -> None:
    """It says that the request has not ended."""
    with opened(llama, 1) as runner:
        first = runner.submit([9], **LONG)
        second = runner.submit([1], **LONG)
        assert not second.wait(0)
        assert first.wait(1000)
        assert first.reached == 1
        assert second.wait()
