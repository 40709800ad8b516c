"""Work while somebody types: when it begins, what stops it, and that nobody ever waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from support.waiting import PATIENCE_S, until

from mlxrunner.chat import input as ahead
from mlxrunner.chat.input import TypeAhead, TypedText


class Worker:
    """Evaluates a text in `chunks` chunks; `seen` has each text, and True if it came to its end."""

    def __init__(self, chunks: int = 1) -> None:
        self.chunks, self.seen = chunks, []  # type: ignore[var-annotated]
        self.may_go_on = threading.Semaphore(0)

    def __call__(self, text: str, cancelled: Callable[[], bool]) -> None:
        for _ in range(self.chunks):
            self.may_go_on.acquire()
            if cancelled():
                self.seen.append((text, False))
                return
        self.seen.append((text, True))


def run(worker: Worker, draft: TypedText, *, reads_draft: bool = True) -> threading.Thread:
    thread = threading.Thread(
        target=TypeAhead(worker, reads_draft=lambda: reads_draft), args=(draft,)
    )
    thread.start()
    return thread


@pytest.fixture(autouse=True)
def short_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "PAUSE_S", 0.02)


def test_first_what_comes_before_then_what_is_typed() -> None:
    """Each text once, in the thread that called; then it waits."""
    worker, draft = Worker(), TypedText()
    worker.may_go_on.release(100)
    thread = run(worker, draft)
    until(lambda: worker.seen == [("", True)])
    draft.update("hello")
    until(lambda: worker.seen[1:] == [("hello", True)])
    draft.update("hello world")
    until(lambda: worker.seen[2:] == [("hello world", True)])
    draft.finish()
    thread.join(PATIENCE_S)
    assert len(worker.seen) == 3


def test_enter_stops_it_after_the_chunk_at_hand() -> None:
    """Anything may be in evaluation."""
    for typed in ("", "hello"):
        worker, draft = Worker(chunks=10), TypedText()
        if typed:
            worker.may_go_on.release(10)
        thread = run(worker, draft)
        if typed:
            until(lambda worker=worker: worker.seen == [("", True)])
            draft.update(typed)
        worker.may_go_on.release(3)
        draft.finish()
        worker.may_go_on.release(1)
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        assert worker.seen[-1] == (typed, False) or worker.seen == [("", True)]


def test_typing_on_does_not_stop_what_stays_true() -> None:
    """Evaluation continues when the text grows, and stops for another text, which comes next."""
    worker, draft = Worker(chunks=2), TypedText()
    worker.may_go_on.release(2)
    thread = run(worker, draft)
    until(lambda: worker.seen == [("", True)])
    draft.update("hello")
    worker.may_go_on.release(1)
    until(lambda: worker.may_go_on._value == 0)
    draft.update("hello world")
    worker.may_go_on.release(3)
    until(lambda: len(worker.seen) == 3)
    assert worker.seen[-1] == ("hello world", True)
    draft.update("another")
    worker.may_go_on.release(1)
    until(lambda: worker.may_go_on._value == 0)
    draft.update("something else")
    worker.may_go_on.release(3)
    until(lambda: worker.seen[-1] == ("something else", True))
    assert ("another", False) in worker.seen
    draft.finish()
    thread.join(PATIENCE_S)


def test_without_typing_ahead_only_what_comes_before_is_evaluated() -> None:
    """Typing does not stop that."""
    worker, draft = Worker(chunks=2), TypedText()
    thread = run(worker, draft, reads_draft=False)
    worker.may_go_on.release(1)
    draft.update("hello")
    worker.may_go_on.release(1)
    until(lambda: worker.seen == [("", True)])
    draft.update("hello world")
    draft.finish()
    thread.join(PATIENCE_S)
    assert worker.seen == [("", True)]


def test_what_goes_wrong_is_nobodys_concern() -> None:
    """It will be said when the turn is sent."""
    tried = []

    def fail(text: str, cancelled: Callable[[], bool]) -> None:
        tried.append(text)
        raise RuntimeError("no memory")

    draft = TypedText("hello")
    thread = threading.Thread(target=TypeAhead(fail, reads_draft=lambda: True), args=(draft,))
    thread.start()
    until(lambda: tried == ["", "hello"])
    draft.finish()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
