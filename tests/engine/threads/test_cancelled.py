"""Requests are cancelled by any thread, by a handle that is dropped, and by the end of a block."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
from support.threads import LONG, alone, opened
from support.waiting import until

from mlxrunner import CancelledError


def test_another_thread_cancels(llama: Any) -> None:
    """The reader ends at once, and the slot is free again."""
    with opened(llama, 1) as runner:
        handle = runner.submit([1], **LONG)
        next(handle)
        thread = threading.Thread(target=handle.cancel)
        thread.start()
        assert len(list(handle)) < 100
        thread.join()
        assert handle.finished
        with pytest.raises(CancelledError):
            handle.result()
        assert runner.complete([7], max_tokens=2, stop_tokens=[]).tokens == alone(
            llama, [7], max_tokens=2, stop_tokens=[]
        )


def test_a_waiting_request_can_be_cancelled(llama: Any) -> None:
    """It leaves the queue."""
    with opened(llama, 1) as runner:
        first, second = runner.submit([1], **LONG), runner.submit([2], **LONG)
        second.cancel()
        assert list(second) == []
        until(lambda: runner.stats().waiting == 0)
        assert len(first.result().tokens) == 100


@pytest.mark.parametrize("is_running", [True, False])
def test_a_handle_that_is_dropped_cancels_its_request(llama: Any, is_running: bool) -> None:
    """In any thread, also from the garbage collector, and also if it pauses or waits."""
    with opened(llama, 1) as runner:
        first = runner.submit([1], **LONG)
        held: list[Any] = [first if is_running else runner.submit([2], **LONG)]
        next(first)
        held.append(held)  # a circle, which only the collector breaks
        if is_running:
            del first
        thread = threading.Thread(target=held.pop)
        thread.start()
        thread.join()
        del held
        gc.collect()
        until(lambda: runner.stats().busy == (not is_running) and runner.stats().waiting == 0)


def test_the_end_of_a_block_cancels(llama: Any) -> None:
    """Closing the iterator of `run_each` does, too."""
    with opened(llama, 1) as runner:
        with runner.submit([1], **LONG) as handle:
            next(handle)
        until(lambda: runner.stats().busy == 0)
        results = runner.run_each([([1], {"max_tokens": 1}), ([2], LONG), ([3], LONG)])
        next(results)
        results.close()  # type: ignore[attr-defined]
        until(lambda: runner.stats().busy == runner.stats().waiting == 0)
