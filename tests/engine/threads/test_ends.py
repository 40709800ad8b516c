"""The engine's thread ends with its runner, and nobody waits for one that died."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.engine import Engine, backend, engine_of
from support.threads import LONG, alone, opened
from support.waiting import until

from mlxrunner import (
    BusyError,
    ClosedError,
    EngineError,
    Handle,
    MlxrunnerError,
    OptionError,
    ParallelRunner,
    Runner,
    StepFailedError,
)


@pytest.mark.parametrize("in_thread", [True, False])
def test_closing_ends_what_runs_and_waits(llama: Any, in_thread: bool) -> None:
    """Readers that wait get a ClosedError; answers that have ended can be read."""
    model = llama[0]
    runner = opened(llama, 2)
    done = runner.submit([5], max_tokens=3, stop_tokens=[])
    done.wait()
    handles = [runner.submit([i], **LONG) for i in range(8)]
    with ThreadPoolExecutor(9) as pool:
        results = [pool.submit(handle.result) for handle in handles[2:]]
        until(lambda: all(handle._feed.is_read for handle in handles[3:]))
        if in_thread:
            pool.submit(runner.close).result()
        else:
            runner.close()
        ended = [result.exception() for result in results]
    assert [type(error) for error in ended[2:]] == [ClosedError] * 4
    assert len(done.result().tokens) == 3
    runner.close()
    for call in (lambda: runner.submit([1]), lambda: runner.run([[1]]), handles[-1].result):
        with pytest.raises(ClosedError, match="this ParallelRunner is closed"):
            call()
    assert "closed" in repr(runner)
    assert Runner(model, *llama[1:]).complete([1], max_tokens=2).tokens


def test_a_runner_that_is_dropped_ends_its_thread(llama: Any) -> None:
    """Not before its last handle is dropped, too."""
    handle = opened(llama, 1).submit([1], max_tokens=9, stop_tokens=[])
    thread = handle._thread
    assert handle.result().tokens == alone(llama, [1], max_tokens=9, stop_tokens=[])
    assert not thread.is_closed
    del handle
    gc.collect()
    until(lambda: thread.is_closed)
    thread.join()


def test_an_error_of_loading_is_raised_by_the_caller(llama: Any) -> None:
    """With both ways of opening a runner; the thread is used again."""
    opened(llama).close()
    before = threading.active_count()
    with pytest.raises(OptionError, match="max_sequences"):
        opened(llama, 0)
    with pytest.raises(MlxrunnerError, match="nowhere"):
        ParallelRunner.load("./nowhere", max_sequences=1)
    assert threading.active_count() == before


def test_an_observer_may_submit_and_not_wait(llama: Any) -> None:
    """A call that would wait for its own thread raises."""
    refused: list[str] = []
    more: list[Handle] = []
    with opened(llama, 1) as runner:

        def observe(seen_runner: Any, _: object) -> None:
            assert seen_runner is runner
            if more:
                return
            more.append(runner.submit([7], max_tokens=2, stop_tokens=[]))
            for call in (runner.close, more[0].result, more[0].wait, lambda: next(more[0])):
                try:
                    call()
                except BusyError as error:
                    refused.append(str(error))

        runner.observers.append(observe)
        runner.complete([1], max_tokens=2)
        until(lambda: more)
        assert more[0].result().tokens == alone(llama, [7], max_tokens=2, stop_tokens=[])
    assert len(refused) == 4
    assert all("the engine's thread would wait for itself" in text for text in refused)


def test_a_failing_step_ends_one_request(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others in the same step get their answers."""
    with opened(llama, 3) as runner:
        adapted = backend(engine_of(runner))
        forward = adapted.forward

        def fail(tokens: Any, *rest: Any, **more: Any) -> Any:
            if 251 in tokens.tolist():
                raise RuntimeError("the device fell over")
            return forward(tokens, *rest, **more)

        monkeypatch.setattr(adapted, "forward", fail)
        options: dict[str, Any] = {"max_tokens": 5, "stop_tokens": []}
        bad = runner.submit([1, 251], **options)
        others = [runner.submit([1, i], **options) for i in range(4)]
        with pytest.raises(StepFailedError, match="the device fell over"):
            bad.result()
        assert [handle.result().tokens for handle in others] == [
            alone(llama, [1, i], **options) for i in range(4)
        ]


@pytest.mark.parametrize("where", ["step", "admit"])
def test_a_thread_that_dies_ends_every_request(
    llama: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Nobody waits for ever, and later calls say what happened."""

    def fail(self: Engine, *_: object) -> None:
        raise SystemExit("a defect")

    with opened(llama, 1) as runner:
        monkeypatch.setattr(Engine, where, fail)
        handles = []
        for i in range(3):
            try:
                handles.append(runner.submit([i], **LONG))
            except EngineError:
                assert i  # the first one has killed it
        for handle in handles:
            with pytest.raises(EngineError, match="was ended by SystemExit: a defect: close it"):
                handle.result()
        with pytest.raises(EngineError):
            runner.submit([1])
    runner.close()
