"""Saving continues beside the next turn, and an interrupt or a full disk loses nothing."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import pytest
from support.checks import raising
from support.prompts import PROMPT
from support.reused import CHECKPOINTS
from support.sample import fewer
from support.saving import Make, answer, last, restored_by, save, session
from support.waiting import PATIENCE_S

from mlxrunner import Runner
from mlxrunner.errors import SessionError
from mlxrunner.sessions.store import SessionStore
from mlxrunner.testing import interrupt_at, oracle_runner

pytestmark = pytest.mark.usefixtures("small_steps")


def test_an_interrupt_while_reading_costs_nothing(
    saver: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle of it: the next turn reads it."""
    runner = oracle_runner()
    answer(runner, PROMPT)
    said = list(runner.entry.tokens)
    save(saver(runner))
    restored, _ = restored_by(saver)
    from mlxrunner.system.tensorfile import StoredArray

    original = StoredArray.read_into

    def interrupted(array: StoredArray, views: Any) -> None:
        if array.name == "1.values":
            raise KeyboardInterrupt
        original(array, views)

    monkeypatch.setattr(StoredArray, "read_into", interrupted)
    with pytest.raises(KeyboardInterrupt):
        last(restored, [*said, 5])
    monkeypatch.setattr(StoredArray, "read_into", original)
    assert last(restored, [*said, 5]).cached_tokens == len(said)


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize(
    "kinds", [["full", "full"], ["sliding", "recurrent", "chunked"]], ids=lambda kinds: kinds[0]
)
def test_ctrl_c_at_any_line_of_a_restore_costs_nothing(saver: Make, kinds: list[str]) -> None:
    """An interrupted restore leaves a true entry or a later read, and a cold run's answer."""
    runner = oracle_runner(kinds, **CHECKPOINTS)
    answer(runner, PROMPT)
    said = list(runner.entry.tokens)
    save(saver(runner))
    cold = answer(oracle_runner(kinds, **CHECKPOINTS), [*said, 5], 3)

    def opened() -> Runner:
        restored = oracle_runner(kinds, **CHECKPOINTS)
        saver(restored).load("one")
        return restored

    restored = opened()
    with interrupt_at(-1) as seen:
        assert answer(restored, [*said, 5], 3) == cold
    for line in range(1, seen[0] + 1, max(1, seen[0] // fewer(200, 40))):
        restored = opened()
        with suppress(KeyboardInterrupt), interrupt_at(line):
            answer(restored, [*said, 5], 3)
        assert restored.entry.is_true, line
        assert answer(restored, [*said, 5], 3) == cold, line


@pytest.mark.exhaustive(0)
def test_ctrl_c_at_any_line_of_a_save_loses_nothing(saver: Make, store: SessionStore) -> None:
    """Text and caches are whole, old or new, and the session is unlocked and usable."""
    kinds = ["full", "sliding", "recurrent"]
    runner = oracle_runner(kinds, **CHECKPOINTS)
    answer(runner, PROMPT)
    kept, said = saver(runner), session(runner)
    with interrupt_at(-1) as seen:
        kept.save("one", said)
    kept.wait()
    cold = answer(oracle_runner(kinds, **CHECKPOINTS), [*said.history.rendering.tokens, 5])
    for line in range(1, seen[0] + 1, max(1, seen[0] // fewer(150, 40))):
        with suppress(KeyboardInterrupt), interrupt_at(line):
            kept.save("one", said)
        kept.wait()
        assert store.load("one").history == said.history, line
        with SessionStore(store.folder).lock("one"):
            pass
        restored = oracle_runner(kinds, **CHECKPOINTS)
        assert saver(restored).load("one")[1].startswith("30 tokens restored"), line
    assert answer(runner, [*said.history.rendering.tokens, 5]) == cold


def test_the_next_turn_runs_while_the_last_one_is_written(
    saver: Make, store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has the moment of the save, one copy is held, and `wait` writes what is newer."""
    runner = oracle_runner()
    answer(runner, PROMPT)
    first = list(runner.entry.tokens)
    may_write, writes = threading.Event(), []
    original = store.save_cache

    def slowly(name: str, *arguments: Any) -> None:
        may_write.wait(PATIENCE_S)
        writes.append(name)
        original(name, *arguments)

    monkeypatch.setattr(store, "save_cache", slowly)
    kept = saver(runner)
    kept.save("one", session(runner, "first"))
    answer(runner, [*first, 5, 6])
    kept.save("one", session(runner, "second"))  # the first is not written yet
    assert store.load("one").history.turns[0].user == "second"
    assert writes == []
    second = list(runner.entry.tokens)
    runner.evaluate([*second, 70, 71, 72, 73, 74, 75, 76, 77])  # typed, and not sent yet
    may_write.set()
    kept.wait()
    assert writes == ["one", "one"]
    restored, _ = restored_by(saver)
    assert list(restored.entry.tokens) == second


def test_what_is_not_written_yet_is_written_before_another_session_is_loaded(
    saver: Make, store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file has its own tokens."""
    runner = oracle_runner()
    answer(runner, [99, 98, 97])
    save(saver(runner), "other")
    answer(runner, PROMPT)
    original = store.save_cache
    writing = threading.Event()
    monkeypatch.setattr(
        store, "save_cache", lambda *arguments: (writing.wait(0.2), original(*arguments))
    )
    kept = saver(runner)
    kept.save("one", session(runner))
    answer(runner, [*runner.entry.tokens, 5])
    said = list(runner.entry.tokens)
    kept.save("one", session(runner))
    kept.load("other")
    assert list(runner.entry.tokens)[:3] == [99, 98, 97]
    saver(runner).load("one")
    assert list(runner.entry.tokens) == said


def test_caches_that_could_not_be_written_are_said_later(
    saver: Make, store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the next save or by `wait`; the text was saved."""
    runner = oracle_runner()
    answer(runner, PROMPT)
    kept = saver(runner)
    monkeypatch.setattr(store, "save_cache", raising(SessionError("no room")))
    with pytest.raises(SessionError, match="no room"):
        kept.save("one", session(runner))
        kept.wait()
    kept.wait()  # said once
    assert store.load("one") is not None


def test_a_runner_that_is_gone_is_let_go(
    saver: Make, store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The saver of a chat that changes its model neither holds nor writes the old one."""
    import gc
    import weakref

    runner = oracle_runner()
    answer(runner, PROMPT)
    may_write = threading.Event()
    original = store.save_cache
    monkeypatch.setattr(
        store, "save_cache", lambda *arguments: (may_write.wait(PATIENCE_S), original(*arguments))
    )
    kept = saver(runner, holds=False)
    kept.save("one", session(runner))
    kept.save("one", session(runner))
    gone = weakref.ref(runner)
    del runner
    gc.collect()
    assert gone() is None
    may_write.set()
    kept.wait()
    _, line = saver(oracle_runner()).load("one")
    assert line.startswith("30 tokens restored")
