"""The driver of a batch over workers, with workers that a test plays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, cast

import pytest
from support.batches import filled
from support.checks import raising

from mlxrunner.batch.execution import Outcome
from mlxrunner.batch.job import Job
from mlxrunner.batch.plan import survey
from mlxrunner.batch.store import Store, StoredLine
from mlxrunner.cluster import driver as driving
from mlxrunner.cluster import worker as remote
from mlxrunner.cluster.dask_workers import LostCallError
from mlxrunner.cluster.driver import MOST_ENDS, Driver
from mlxrunner.cluster.worker import LineReply, WorkerBatch
from mlxrunner.errors import CutOffError, MemoryPlanError
from mlxrunner.profiling.profile import Profile

LINES = 12
PARTS = {"model": "demo", "set of weights": "aa", "tokenizer": "bb"}


class PlayedWorkers:
    """Workers that answer at once, unless a test says what they do instead.

    A worker in `holds` keeps its answers, until `release`. `does` has what a function does on a
    worker in the place of what it does elsewhere.
    """

    def __init__(self, *workers: str) -> None:
        self._pulse = self.calls = 0
        self.names = list(workers)
        self.stopped: set[str] = set()
        self.holds: set[str] = set()
        self.held: list[tuple[str, Future[Any]]] = []
        self.does: dict[tuple[str, str], Callable[..., Any]] = {}
        self.sent: list[tuple[str, int]] = []
        self.told: set[str] = set()
        self.each: Callable[[], None] = lambda: None
        self.done: list[Future[Any]] = []

    @property
    def signs(self) -> dict[str, Any]:
        self._pulse += 1
        return {one: 0 if one in self.stopped else self._pulse for one in self.names}

    def call(self, worker: str, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        self.calls += 1
        name, future = function.__name__, Future[Any]()
        if name == "answer":
            self.sent.append((worker, arguments[1].index))
        if name == "end":
            self.told.add(worker)
        does = self.does.get((worker, name)) or getattr(self, f"_{name}")
        try:
            future.set_result(does(*arguments))
        except Exception as error:
            future.set_exception(error)
        if worker in self.holds and name == "answer":
            self.held.append((worker, future))
        else:
            self.done.append(future)
        return future

    def release(self) -> None:
        """Let the calls that were held end now."""
        self.done += [future for _, future in self.held]
        self.holds.clear()
        self.held.clear()

    def ended(self, timeout: float) -> list[Future[Any]]:
        self.each()
        found, self.done = self.done, []
        return found

    def _describe(self, model: str) -> dict[str, Any]:
        return {"versions": remote.versions(), "parts": PARTS | {"model": "/other/path"}}

    def _begin(self, batch: WorkerBatch, sharers: int) -> tuple[int, list[str]]:
        return 2, ["two at a time"]

    def _answer(self, key: str, line: StoredLine) -> LineReply:
        return LineReply(Outcome(line, error=f"answer {line.index}", kind="other"), [])

    def _end(self, key: str) -> None:
        pass


def fail_first(workers: PlayedWorkers, worker: str, errors: Iterable[Exception]) -> None:
    """Let the first answers of a worker be these errors."""
    left, own = [*errors], workers._answer

    def fails(key: str, line: StoredLine) -> LineReply:
        if left:
            raise left.pop()
        return own(key, line)

    workers.does[worker, "answer"] = fails


@pytest.fixture
def store() -> Iterator[Store]:
    with filled([[1, number] for number in range(LINES)]) as made:
        yield made


class Run:
    """A run of the lines of a store on played workers, and what it said."""

    def __init__(self, workers: PlayedWorkers, store: Store) -> None:
        self.names, self.store = workers, store
        self.said: list[str] = []
        self.is_stopping = False
        job = Job(inputs=["-"])
        found = survey(store.pending(), {}, 64)
        batch = WorkerBatch("key", job, found, store.counts, 64)
        self.driver = Driver(cast(Any, workers), batch, PARTS, Profile(), self.said.append)

    def outcomes(self) -> list[tuple[int, str | None]]:
        """Run to the end, and return index and error of each outcome, in the order of the input."""
        found = []
        begun = self.driver.run(self.store, "prefix", lambda: self.is_stopping, lambda: None)
        for outcome in begun:
            self.store.record(outcome.line.index, b"{}")
            found.append((outcome.line.index, outcome.error))
        return sorted(found)

    def is_said(self, text: str) -> bool:
        return any(text in line for line in self.said)


ALL = [(index, f"answer {index}") for index in range(LINES)]


def test_every_line_is_answered_once_and_the_workers_are_told_of_the_end(store: Store) -> None:
    workers = PlayedWorkers("a", "b")
    run = Run(workers, store)
    assert run.outcomes() == ALL
    assert {worker for worker, _ in workers.sent} == {"a", "b"} == workers.told
    assert run.said == ["two at a time"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"versions": {"mlxrunner": "0.0.1"}}, "has another mlxrunner: 0.0.1 there, "),
        ({"versions": {"mlx": "0.1"}}, "has another mlx: 0.1 there, "),
        ({"parts": {"set of weights": "cc"}}, "has another set of weights: cc there, aa here"),
    ],
)
def test_a_worker_that_would_answer_otherwise_is_refused_by_name(
    store: Store, changes: dict[str, Any], why: str
) -> None:
    workers = PlayedWorkers("good", "bad")
    described = workers._describe("demo")
    found = {name: described[name] | changes.get(name, {}) for name in described}
    workers.does["bad", "describe"] = lambda model: found
    run = Run(workers, store)
    assert run.outcomes() == ALL
    assert {worker for worker, _ in workers.sent} == {"good"}
    assert run.is_said(f"worker bad: {why}")
    assert run.is_said("it gets no lines")


def test_a_batch_with_refused_workers_only_ends(store: Store) -> None:
    workers = PlayedWorkers("a", "b")

    fails = raising(MemoryPlanError("this does not fit"))
    workers.does["a", "begin"] = workers.does["b", "begin"] = fails
    with pytest.raises(CutOffError, match="no worker can be used: worker a: this does not fit"):
        Run(workers, store).outcomes()


def test_the_lines_of_a_worker_that_ends_run_elsewhere(store: Store) -> None:
    workers = PlayedWorkers("a", "b")
    workers.holds.add("a")

    def ends_when_it_is_the_last_one() -> None:
        if len({index for worker, index in workers.sent if worker == "b"}) >= 5:
            workers.names = ["b"]

    workers.each = ends_when_it_is_the_last_one
    run = Run(workers, store)
    assert run.outcomes() == ALL
    had = [index for worker, index in workers.sent if worker == "a"]
    assert set(had) <= {index for worker, index in workers.sent if worker == "b"}
    assert run.is_said(f"worker a has ended: its {len(had)} unfinished lines run elsewhere")


def test_a_worker_without_a_sign_of_life_loses_its_lines_and_its_late_answers_count_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped with lines, and continues after the others have answered some of them."""
    monkeypatch.setattr(driving, "SILENT_S", 0.0)
    workers = PlayedWorkers("a", "b")
    workers.holds.add("a")

    def each() -> None:
        sent = {index for worker, index in workers.sent if worker == "b"}
        if {index for worker, index in workers.sent if worker == "a"} and len(sent) >= 4:
            workers.stopped = {"a"} if len(sent) < LINES else set()
            if len(sent) >= LINES - 1:
                workers.release()

    workers.each = each
    run = Run(workers, store)
    assert run.outcomes() == ALL
    assert run.is_said("worker a: no sign of life for 0 s: its "), (run.said, workers.sent)
    indexes = [index for _, index in workers.sent]
    assert len(indexes) > LINES, "some lines ran twice"


def test_a_line_that_ends_three_workers_gets_an_error_and_no_fourth(store: Store) -> None:
    workers = PlayedWorkers("w0")

    def each() -> None:
        if workers.names and (workers.names[0], 7) in workers.sent:
            workers.names = [f"w{int(workers.names[0][1:]) + 1}"]
            workers.done.clear()

    workers.each = each
    run = Run(workers, store)
    found = run.outcomes()
    assert [one for one in found if one[0] != 7] == [one for one in ALL if one[0] != 7]
    assert found[7] == (7, "3 workers ended while they ran this line; it is not tried again")
    assert len([index for _, index in workers.sent if index == 7]) == MOST_ENDS


def test_a_worker_that_does_not_know_the_batch_begins_it_again(store: Store) -> None:
    """Another batch took its place meanwhile. That is no fault of the lines."""
    workers = PlayedWorkers("a")
    fail_first(workers, "a", [remote.NotOpenError("key") for _ in range(2 * MOST_ENDS)])
    assert Run(workers, store).outcomes() == ALL


def test_a_worker_whose_engine_breaks_begins_again_and_says_why(store: Store) -> None:
    workers = PlayedWorkers("a")
    fail_first(workers, "a", [ZeroDivisionError("by zero")])
    run = Run(workers, store)
    assert run.outcomes() == ALL
    assert run.is_said("worker a: ZeroDivisionError: by zero; it begins again")


def test_workers_that_end_while_they_load_are_given_up(store: Store) -> None:
    workers = PlayedWorkers("w0")
    workers.does = {(f"w{number}", "begin"): workers._begin for number in range(9)}

    def each() -> None:
        workers.done.clear()
        workers.names = [f"w{workers.calls}"]

    workers.each = each
    with pytest.raises(CutOffError, match=r"3 workers ended while they loaded the model: is there"):
        Run(workers, store).outcomes()


def test_a_worker_that_comes_later_takes_a_part(store: Store) -> None:
    workers = PlayedWorkers("a")
    workers.holds.add("a")

    def each() -> None:
        if workers.sent and "b" not in workers.names:
            workers.names.append("b")
        if len([1 for worker, _ in workers.sent if worker == "b"]) >= 4:
            workers.release()

    workers.each = each
    assert Run(workers, store).outcomes() == ALL


def test_a_stopped_run_ends_the_lines_that_run_and_begins_no_other(store: Store) -> None:
    workers = PlayedWorkers("a", "b")
    run = Run(workers, store)
    workers.holds = {"a", "b"}

    def each() -> None:
        if len(workers.held) == 8:
            run.is_stopping = True
            workers.release()

    workers.each = each
    found = run.outcomes()
    assert len(found) == len(workers.sent) == 8


@pytest.mark.parametrize("left", [[], ["b"]], ids=["all", "one of two"])
def test_a_stopped_run_does_not_wait_for_workers_that_ended(store: Store, left: list[str]) -> None:
    """A signal to a group of processes ends the workers, too. Their lines wait for --resume."""
    workers, looks = PlayedWorkers("a", "b"), list[int]()
    run = Run(workers, store)
    workers.holds = {"a", "b"}

    def each() -> None:
        looks.append(1)
        assert len(looks) < 100, "it waits"
        if len(workers.held) == 8:
            run.is_stopping, workers.names = True, left
            workers.held = [one for one in workers.held if one[0] in left]
            workers.release()

    workers.each = each
    assert len(run.outcomes()) == 4 * len(left)
    assert len(workers.sent) == 8


def test_lines_whose_call_is_lost_are_sent_again(store: Store) -> None:
    """The connection breaks in the middle, and the worker still has them."""
    workers = PlayedWorkers("a")
    fail_first(workers, "a", [LostCallError("a")] * 3)
    run = Run(workers, store)
    assert run.outcomes() == ALL
    assert len(workers.sent) == LINES + 3
    assert run.said == ["two at a time"]


def test_a_driver_without_workers_says_so_once(store: Store) -> None:
    workers, looks = PlayedWorkers(), []

    def each() -> None:
        looks.append(1)
        if len(looks) == 5:
            workers.names.append("a")

    workers.each = each
    run = Run(workers, store)
    assert run.outcomes() == ALL
    assert run.said[0] == "no worker is there: the batch waits for one"
    assert len([line for line in run.said if line.startswith("no worker")]) == 1
