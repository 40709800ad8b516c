"""A reader that does not read pauses its own request alone, and one reads at a time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.threads import LONG, alone, opened
from support.waiting import until

from mlxrunner import BusyError
from mlxrunner.engine import thread


def test_a_reader_that_does_not_read_pauses_its_request_alone(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others go on; reading lets it go on, and the answer is whole."""
    monkeypatch.setattr(thread, "MOST_UNREAD", 8)
    with opened(llama, 2) as runner:
        slow = runner.submit([1], **LONG)
        until(lambda: runner.stats().paused == 1)
        unread = len(slow._feed._chunks)
        assert runner.complete([2], **LONG).tokens == alone(llama, [2], **LONG)
        assert unread <= len(slow._feed._chunks) <= 10
        assert not slow.finished
        tokens = [chunk.token for chunk in slow]
        assert tokens == alone(llama, [1], **LONG)


@pytest.mark.parametrize("act", ["result", "wait", "poll"])
def test_a_paused_request_goes_on_when_somebody_wants_it(
    llama: Any, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    """Also if its end is waited for, and nothing read."""
    monkeypatch.setattr(thread, "MOST_UNREAD", 8)
    with opened(llama, 1) as runner:
        slow = runner.submit([1], **LONG)
        until(lambda: runner.stats().paused == 1)
        tokens: list[Any] = []
        if act == "wait":
            assert slow.wait()
        while act == "poll" and not slow.finished:
            tokens += [chunk.token for chunk in slow.poll()]
        tokens += (
            [chunk.token for chunk in slow.poll()] if act != "result" else slow.result().tokens
        )
        assert tokens == alone(llama, [1], **LONG)


def test_paused_requests_do_not_keep_others_waiting_for_ever(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers may be read in any order, though those that run first are read last."""
    monkeypatch.setattr(thread, "MOST_UNREAD", 8)
    with opened(llama, 2) as runner:
        handles = [runner.submit([i], **LONG) for i in range(6)]
        for i in reversed(range(6)):
            assert [chunk.token for chunk in handles[i]] == alone(llama, [i], **LONG)


def test_two_readers_at_once_are_refused_and_may_take_turns(llama: Any) -> None:
    """The one that waits goes on undisturbed."""
    with opened(llama, 1) as runner:
        first = runner.submit([9], **LONG)
        second = runner.submit([1], max_tokens=9, stop_tokens=[])  # waits for a slot
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(next, second)
            until(lambda: second._feed.is_read)
            with pytest.raises(BusyError, match="another thread or task is reading this handle"):
                next(second)
            with pytest.raises(BusyError):
                second.poll()
            first.cancel()
            tokens = [waiting.result().token]
            for _ in range(8):
                tokens.append(pool.submit(next, second).result().token)
        assert tokens == alone(llama, [1], max_tokens=9, stop_tokens=[])
