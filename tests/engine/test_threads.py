"""A ParallelRunner in many threads: answers, waits, cancels, ends, refusals and asyncio."""

from __future__ import annotations

import asyncio
import gc
import math
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.engine import Engine, backend, engine_of
from support.families import write_family
from support.histories import alone
from support.threads import LONG, asked, in_threads, opened
from support.waiting import until

from mlxrunner import (
    BatchRequest,
    BusyError,
    CancelledError,
    ClosedError,
    ContextLengthError,
    EngineError,
    Handle,
    MlxrunnerError,
    OptionError,
    ParallelRunner,
    PromptError,
    Runner,
    StepFailedError,
    TimeLimitError,
    run_batch,
)
from mlxrunner.cache.pool.cells import KVPool, Placement
from mlxrunner.cache.protocol import Batch
from mlxrunner.engine import thread
from mlxrunner.engine.thread import run_in_worker
from mlxrunner.models.load import tokenizer_of
from mlxrunner.tokenizer import load_tokenizer

pytestmark = pytest.mark.usefixtures("proved_once")


@pytest.fixture(autouse=True)
def fast_switches() -> Iterator[None]:
    """Let threads take turns as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


WAYS: list[Callable[[Handle], list[int | None]]] = [
    lambda handle: list(handle.result().tokens),
    lambda handle: [chunk.token for chunk in handle],
    lambda handle: [next(handle).token, *(chunk.token for chunk in handle)],
    lambda handle: [chunk.token for chunk in handle.poll()] if handle.wait() else [],
]
"""Ways to read a whole answer."""


def test_a_look_at_the_slots_in_the_middle_of_a_step_changes_no_cells(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread looks when the cells of a batch are taken, and the step uses them."""
    place, looks, kept = KVPool.place, list[int](), list[bool]()
    with opened(llama, 3) as runner, ThreadPoolExecutor(1) as other:

        def placed(pool: KVPool, batch: Batch) -> Placement:
            placement = place(pool, batch)
            looks.append(sum(held.bytes for held in other.submit(runner.held).result()))
            kept.append(placement.after._version.origin is None)
            return placement

        monkeypatch.setattr(KVPool, "place", placed)
        handles = [runner.submit([1, 2, 3, end], max_tokens=6) for end in (4, 5)]
        for handle in handles:
            handle.result()
    assert looks[-1] > 0
    assert len(kept) >= 6
    assert all(kept)


def test_eight_threads_get_the_answers_of_a_runner_alone(llama: Any) -> None:
    """The 96 requests sample in every way and are read in every way; some are cancelled."""
    rng = random.Random(5)
    trunk = [rng.randrange(290) for _ in range(30)]
    requests = [asked(rng, trunk) for _ in range(96)]
    expected = [alone(llama, prompt, **options) for prompt, options in requests]
    seen = Counter[str]()
    with opened(llama, 3) as runner:

        def work(number: int) -> None:
            mine = random.Random(number)
            for index in range(number, len(requests), 8):
                prompt, options = requests[index]
                handle = runner.submit(prompt, **options)
                if mine.random() < 0.15:
                    handle.cancel()
                    tokens: list[int | None] = [chunk.token for chunk in handle]
                    assert tokens == expected[index][: len(tokens)]
                    seen["cancelled"] += 1
                    continue
                way = mine.randrange(len(WAYS))
                assert WAYS[way](handle) == expected[index]
                seen[str(way)] += 1

        in_threads(8, work)
        until(lambda: runner.stats().busy == runner.stats().waiting == 0)
        assert not any(slot.is_busy for slot in engine_of(runner).slots)
    assert len(seen) == 5


@pytest.mark.parametrize("kind", ["huggingface", "sentencepiece"])
def test_tokenizers_and_templates_work_in_eight_threads(kind: str, tmp_path: Path) -> None:
    if kind == "huggingface":
        write_family(tmp_path, "chatml")
    tokenizer = load_tokenizer(tmp_path) if kind == "huggingface" else tokenizer_of("demo")
    messages: Any = [{"role": "user", "content": "My name is Ana Bjork."}]
    texts = [f"{i} words, and then ünïcode {'x' * i}" for i in range(40)]

    def tokens() -> list[Any]:
        return [tokenizer.encode(text) for text in texts] + [
            tokenizer.render(messages),
            tokenizer.encode_more("more"),
            tokenizer.decode(tokenizer.encode(texts[3])),
        ]

    expected = tokens()

    def work(number: int) -> None:
        for _ in range(5):
            assert tokens() == expected

    in_threads(8, work)


def test_a_batch_runs_on_it(llama: Any) -> None:
    """With the results of a Runner; a request that takes too long ends alone."""
    requests = [BatchRequest([i % 3, i]) for i in range(20)]
    options: dict[str, Any] = {"max_tokens": 5, "stop_tokens": []}
    expected = [result.text for result in run_batch(Runner(*llama), requests, **options)]
    with opened(llama, 3) as runner:
        assert [result.text for result in run_batch(runner, requests, **options)] == expected
        slow = [BatchRequest([1], {"max_tokens": 120}), *requests[:2]]
        results = list(run_batch(runner, slow, timeout=1e-9, stop_tokens=[]))
        assert "stopped after" in str(results[0].error)


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


def test_waiting_ends_after_a_time(llama: Any) -> None:
    """It says that the request has not ended, and refuses what is not a number of seconds."""
    with opened(llama, 1) as runner:
        first = runner.submit([9], **LONG)
        second = runner.submit([1], **LONG)
        assert not second.wait(0)
        for wrong in ("1", True, 10**400):
            with pytest.raises(OptionError, match="timeout"):
                first.wait(wrong)  # type: ignore[arg-type]
        assert not first.wait(math.nan) or first.finished
        assert first.wait(1000)
        assert first.reached == 1
        assert second.wait()


def test_a_reader_that_does_not_read_pauses_its_request_alone(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others continue; reading lets it continue, and the answer is whole."""
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
    """The one that waits continues undisturbed."""
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
    assert threading.active_count() <= before


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


NESTED: list[Any] = []
for _ in range(10_000):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ([], {}),
        ([1], {"temperature": -1}),
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
    ids="none sign deadline digits number tools template schema limit content role prompt".split(),
)
def test_values_of_any_size_and_depth_are_refused(
    llama: Any, prompt: Any, options: dict[str, Any]
) -> None:
    """In the thread that submits, those that Python can't write as well; others continue."""
    with opened(llama, 2) as runner:
        running = runner.submit([9], **LONG)
        with pytest.raises((OptionError, PromptError)):
            runner.submit(prompt, **options)
        assert len(running.result().tokens) == 100
        assert runner.stats().waiting == 0


def test_a_request_that_never_fits_is_refused_at_once(llama: Any) -> None:
    """One that fits alone waits for the others."""
    with opened(llama, 3, kv_cache_tokens=64) as runner:
        with pytest.raises(ContextLengthError):
            runner.submit([1] * 64, max_tokens=30)
        first = runner.submit([1, 2], max_tokens=40, stop_tokens=[])
        second = runner.submit([3, 4], max_tokens=40, stop_tokens=[])
        assert len(second.result().tokens) == len(first.result().tokens) == 40


@pytest.mark.exhaustive(0)
def test_streams_of_asyncio_get_the_answers_of_a_runner_alone(llama: Any) -> None:
    """Forty tasks run on one loop, beside a thread that submits, too."""
    rng = random.Random(3)
    requests = [asked(rng, list(range(30))) for _ in range(40)]
    expected = [alone(llama, prompt, **options) for prompt, options in requests]

    async def one(runner: ParallelRunner, index: int) -> list[int | None]:
        prompt, options = requests[index]
        if index % 2:
            return [chunk.token async for chunk in runner.submit(prompt, **options)]
        return [chunk.token async for chunk in runner.stream(prompt, **options)]

    async def all_of_them(runner: ParallelRunner) -> list[list[int | None]]:
        return await asyncio.gather(*(one(runner, index) for index in range(len(requests))))

    with opened(llama, 3) as runner, ThreadPoolExecutor(1) as pool:
        beside = pool.submit(lambda: [runner.complete([i], **LONG).tokens for i in range(3)])
        assert asyncio.run(all_of_them(runner)) == expected
        assert beside.result() == [alone(llama, [i], **LONG) for i in range(3)]


@pytest.mark.parametrize("kind", ["handle", "stream"])
def test_cancelling_a_task_cancels_its_request(llama: Any, kind: str) -> None:
    """A task that waits for a chunk, of a request that waits for a slot."""

    async def cancelled(runner: ParallelRunner) -> None:
        async def read() -> None:
            source = runner.submit([1], **LONG) if kind == "handle" else runner.stream([1], **LONG)
            async for _ in source:
                pass

        task = asyncio.create_task(read())
        while runner.stats().waiting == 0:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while runner.stats().waiting:
            await asyncio.sleep(0.001)

    with opened(llama, 1) as runner:
        first = runner.submit([9], **LONG)
        asyncio.run(cancelled(runner))
        assert not first.finished or first.result().tokens


def test_leaving_a_stream_cancels_its_request(llama: Any) -> None:
    """After a break, and after an error in the task that reads."""

    async def leave(runner: ParallelRunner) -> None:
        async for _ in runner.stream([1], **LONG):
            break
        while runner.stats().busy:
            await asyncio.sleep(0.001)
        with pytest.raises(OptionError):
            async for _ in runner.stream([1], temperature=-1):
                pass

    with opened(llama, 1) as runner:
        asyncio.run(leave(runner))


def test_two_tasks_that_read_at_once_are_refused(llama: Any) -> None:
    """Two threads are, too."""

    async def twice(runner: ParallelRunner) -> None:
        first = runner.submit([9], **LONG)
        handle = runner.submit([1], max_tokens=1)
        waiting = asyncio.create_task(anext(handle))
        await asyncio.sleep(0)
        with pytest.raises(BusyError):
            await anext(handle)
        first.cancel()
        assert (await waiting).finish_reason == "length"

    with opened(llama, 1) as runner:
        asyncio.run(twice(runner))


def test_a_closed_event_loop_harms_nobody(llama: Any) -> None:
    """Its reader is gone; others get their answers."""
    with opened(llama, 1) as runner:
        first, handle = runner.submit([9], **LONG), runner.submit([1], max_tokens=3)
        loop = asyncio.new_event_loop()
        task = loop.create_task(anext(handle))
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        assert len(first.result().tokens) == 100
        assert runner.complete([3], max_tokens=3, stop_tokens=[]).tokens
        assert not task.done()
        task._log_destroy_pending = False  # type: ignore[attr-defined]


def test_the_engine_gets_no_interrupts(llama: Any) -> None:
    """Ctrl-C comes to the main thread, wherever that is, and the request continues."""
    with opened(llama, 1) as runner:
        handle = runner.submit([1], **LONG)
        for _ in range(5):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert handle.result().tokens == alone(llama, [1], **LONG)


def test_work_is_done_in_a_thread_that_stays() -> None:
    """Results and errors come back, and the thread that made them is still there."""

    async def ask() -> list[threading.Thread]:
        with pytest.raises(ValueError, match="no"):
            await run_in_worker(fail, "no")
        return [await run_in_worker(threading.current_thread) for _ in range(3)]

    def fail(text: str) -> None:
        raise ValueError(text)

    threads = asyncio.run(ask())
    assert threading.main_thread() not in threads
    assert all(thread.is_alive() and thread.daemon for thread in threads)


def test_a_program_that_compiled_in_such_a_thread_ends_well() -> None:
    """MLX keeps compiled functions of a thread, and freeing them late would abort the process."""
    code = (
        "import asyncio, mlx.core as mx\n"
        "from mlxrunner.engine.thread import run_in_worker\n"
        "def work(): return mx.compile(lambda x: x * 2)(mx.ones(3)).sum().item()\n"
        "assert asyncio.run(run_in_worker(work)) == 6\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
