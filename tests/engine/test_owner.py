"""One thread owns a runner.

Calls from another thread are refused with both names, and change nothing.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.engine import Engine
from support.histories import Parts, alone, computed, tiny_parts

from mlxrunner import MlxrunnerError, Runner
from mlxrunner.cache.prefix import PrefixCache
from mlxrunner.errors import WrongThreadError

pytestmark = pytest.mark.usefixtures("proved_once")

PROMPT = [i * 7 % 290 for i in range(40)]
LIMITS: dict[str, Any] = {"max_tokens": 6, "stop_tokens": []}


@pytest.fixture
def fast_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def elsewhere(act: Callable[[], object], name: str = "worker") -> BaseException | None:
    """Return what `act` raises in a thread of its own."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join()
    return raised[0] if raised else None


ON_MANY: dict[str, Callable[[Engine, Any], object]] = {
    "submit": lambda runner, handle: runner.submit(PROMPT, **LIMITS),
    "run": lambda runner, handle: runner.run([PROMPT], **LIMITS),
    "run_each": lambda runner, handle: runner.run_each([(PROMPT, LIMITS)]),
    "step": lambda runner, handle: runner.step(),
    "close": lambda runner, handle: runner.close(),
    "iterate": lambda runner, handle: next(iter(handle)),
    "poll": lambda runner, handle: handle.poll(),
    "cancel": lambda runner, handle: handle.cancel(),
    "result": lambda runner, handle: handle.result(),
}
ON_ONE: dict[str, Callable[[Runner, Any], object]] = {
    "generate": lambda runner, chunks: runner.generate(PROMPT, **LIMITS),
    "evaluate": lambda runner, chunks: runner.evaluate(PROMPT),
    "entry": lambda runner, chunks: runner.entry,
    "keep": lambda runner, chunks: runner.cache.keep(PROMPT[:3]),
    "reset": lambda runner, chunks: runner.reset(),
    "free": lambda runner, chunks: runner.cache.free("nothing"),
    "iterate": lambda runner, chunks: next(chunks),
    "close": lambda runner, chunks: chunks.close(),
}


@pytest.mark.parametrize("call", ON_MANY)
def test_many_sequences_belong_to_the_thread_that_opened_them(llama: Parts, call: str) -> None:
    """The error names both threads and says what to do; the request continues undisturbed."""
    with Engine(*llama, max_sequences=2, context=80, prefill_step=16) as runner:
        handle = runner.submit(PROMPT, **LIMITS)
        for _ in range(4):
            runner.step()
        error = elsewhere(lambda: ON_MANY[call](runner, handle))
        assert isinstance(error, WrongThreadError)
        assert isinstance(error, MlxrunnerError)
        assert "this Engine belongs to the thread 'MainThread'" in str(error)
        assert "thread 'worker' called it: make all calls in 'MainThread'" in str(error)
        assert handle.result().tokens == alone(llama, PROMPT, **LIMITS)


@pytest.mark.parametrize("call", ON_ONE)
def test_the_one_entry_belongs_to_the_thread_that_opened_it(llama: Parts, call: str) -> None:
    """Also where its chunks are asked for, or not wanted any more."""
    runner = Runner(*llama)
    chunks = runner.generate(PROMPT, **LIMITS)
    tokens = [next(chunks).token]
    error = elsewhere(lambda: ON_ONE[call](runner, chunks))
    assert isinstance(error, WrongThreadError)
    assert (
        "this Runner belongs to the thread 'MainThread', which opened it, but thread 'worker' "
        "called it" in str(error)
    )
    assert tokens + [chunk.token for chunk in chunks] == alone(llama, PROMPT, **LIMITS)


def test_eight_threads_change_nothing_for_the_owner(llama: Parts, fast_switches: None) -> None:
    """The owner's answers stay as they are alone while eight threads call everything."""
    prompts = [[*PROMPT[: 5 * i], i] for i in range(6)]
    refused = Counter[str]()
    over = threading.Event()
    with Engine(*llama, max_sequences=3, context=80, prefill_step=16) as runner:
        first = runner.submit(PROMPT, **LIMITS)

        def disturb(name: str) -> None:
            while not over.is_set():
                try:
                    ON_MANY[name](runner, first)
                except WrongThreadError:
                    refused[name] += 1

        threads = [threading.Thread(target=disturb, args=(name,)) for name in list(ON_MANY)[:8]]
        for thread in threads:
            thread.start()
        try:
            results = runner.run(prompts, **LIMITS)
        finally:
            over.set()
            for thread in threads:
                thread.join()
        assert first.result().tokens == alone(llama, PROMPT, **LIMITS)
        assert [result.tokens for result in results] == [
            alone(llama, prompt, **LIMITS) for prompt in prompts
        ]
    assert all(refused[name] for name in list(ON_MANY)[:8])


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "lfm2"])
def test_chunks_that_another_thread_drops_are_settled_by_the_owner(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dropped answer does no work on the entry elsewhere; the owner's next one is exact."""
    given = tiny_parts(architecture)
    runner, dice = Runner(*given, context=400, prefill_step=16), random.Random(architecture)
    settle, threads = PrefixCache.settle, set[str]()

    def watched(self: PrefixCache, *why: str) -> None:
        threads.add(threading.current_thread().name)
        settle(self, *why)

    monkeypatch.setattr(PrefixCache, "settle", watched)
    for _ in range(17 if architecture != "llama" else 50):
        begin = PROMPT[: dice.randrange(1, 41)]
        held = [runner.generate([*begin, dice.randrange(290)], max_tokens=9, stop_tokens=[])]
        for _ in range(dice.randrange(9)):
            next(held[0])
        assert elsewhere(held.clear) is None
        prompt = [*begin, *(dice.randrange(290) for _ in range(dice.randrange(1, 20)))]
        assert [chunk.token for chunk in runner.generate(prompt, **LIMITS)] == alone(
            given, prompt, **LIMITS
        )
        assert runner.entry.is_true
    assert threads == {"MainThread"}


def test_answers_that_another_thread_drops_are_cancelled_by_the_owner(llama: Parts) -> None:
    with Engine(*llama, max_sequences=1, context=80) as runner:
        held = [runner.run_each([([1, 2], LIMITS), (PROMPT, LIMITS), ([3], LIMITS)])]
        next(held[0])
        assert elsewhere(held.clear) is None
        assert runner.submit([5], **LIMITS).result().tokens == alone(llama, [5], **LIMITS)
        assert not any(slot.is_busy for slot in runner.slots)


def test_a_runner_belongs_to_the_thread_that_opened_it_not_to_the_main_one(llama: Parts) -> None:
    found: list[list[int]] = []
    assert elsewhere(lambda: found.append(computed(llama, PROMPT, **LIMITS))) is None
    assert found == [alone(llama, PROMPT, **LIMITS)]
