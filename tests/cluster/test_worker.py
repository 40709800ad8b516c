"""The session of a worker: what it does with a line that it gets again, and after its end."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator

import pytest
from support.batches import entry, filled

from mlxrunner.batch.job import Job
from mlxrunner.batch.plan import survey
from mlxrunner.batch.store import Store
from mlxrunner.cluster import worker
from mlxrunner.cluster.worker import LineReply, NotOpenError, WorkerBatch, WorkerSession

CONTEXT = 64
MOST = (40, 4, 4, 4)
"""The tokens of the answer to each line."""


@pytest.fixture
def store() -> Iterator[Store]:
    lines = (entry(n, [1, 2, 3, n], options={"max_tokens": most}) for n, most in enumerate(MOST))
    with filled(lines) as made:
        yield made


@pytest.fixture
def opened(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], WorkerSession]]:
    """Return a function that opens a session, which begins its lines when `begin` is set."""
    sessions = list[WorkerSession]()
    answer_all = WorkerSession._answer_all

    def waits(session: WorkerSession, runner: object) -> None:
        begin.wait()
        answer_all(session, runner)  # type: ignore[arg-type]

    monkeypatch.setattr(WorkerSession, "_answer_all", waits)

    def open_session() -> WorkerSession:
        defaults = {"temperature": 0.0, "stop_tokens": []}
        job = Job(inputs=["-"], defaults=defaults, parallel=2, loading={"memory_limit": None})
        found = survey(store.pending(), defaults, CONTEXT)
        counts = store.counts
        batch = WorkerBatch("key", job, found, counts, CONTEXT, has_events=True)
        sessions.append(WorkerSession(batch))
        return sessions[-1]

    begin.clear()
    yield open_session
    begin.set()
    for session in sessions:
        session.close()


begin = threading.Event()


def text_of(found: LineReply) -> str:
    assert found.outcome.result is not None
    return found.outcome.result.text


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("is_under_way", [False, True], ids=["before it runs", "while it runs"])
def test_a_line_that_comes_again_is_answered_once_to_both(
    opened: Callable[[], WorkerSession], store: Store, is_under_way: bool
) -> None:
    """The driver had given the worker up, and gives it the same line when it comes back."""
    session = opened()
    lines = [store.line(index) for index in range(4)]
    first = [session.answer(line) for line in lines]
    if is_under_way:
        begin.set()
    again = [session.answer(line) for line in lines]
    begin.set()
    found = [waiting.result() for waiting in first]
    assert [text_of(waiting.result()) for waiting in again] == [text_of(one) for one in found]
    late = session.answer(lines[0]).result()
    assert text_of(late) == text_of(found[0])
    assert len([json.loads(event) for one in found for event in one.events]) == len(lines)


def test_a_session_that_has_ended_leaves_nobody_waiting(
    opened: Callable[[], WorkerSession], store: Store
) -> None:
    """Lines that came after its end waited for ever."""
    session = opened()
    session._lines.put(None)
    waiting = session.answer(store.line(0))
    begin.set()
    with pytest.raises(NotOpenError):
        waiting.result()
    session._thread.join()
    with pytest.raises(NotOpenError):
        session.answer(store.line(1)).result()
    assert worker._session is None


def test_a_line_that_comes_while_another_runs_runs_beside_it(
    opened: Callable[[], WorkerSession], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No line waited at first, so that one of the two places was free."""
    session, ended, ticks = opened(), list[int](), list[None]()
    long, short = store.line(0), store.line(1)

    def tick(session: WorkerSession) -> None:
        ticks.append(None)
        if len(ticks) == 3:
            session.answer(short).add_done_callback(lambda _: ended.append(short.index))

    monkeypatch.setattr(WorkerSession, "_tick", tick)
    session.answer(long).add_done_callback(lambda _: ended.append(long.index))
    begin.set()
    session.close()
    assert ended == [short.index, long.index]
