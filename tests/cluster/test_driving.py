"""The driver of a batch over workers, with workers that a test plays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.batches import filled, user

from mlxrunner.batch.execution import Outcome
from mlxrunner.batch.job import Job
from mlxrunner.batch.plan import survey
from mlxrunner.batch.store import Store
from mlxrunner.cluster import answering, driving
from mlxrunner.cluster.dealing import MOST_ENDS
from mlxrunner.cluster.driving import Driver
from mlxrunner.cluster.over_dask import Reply
from mlxrunner.cluster.wire import Plain, SentBatch, line_of, plain_line, plain_outcome
from mlxrunner.errors import CutOffError, MemoryPlanError
from mlxrunner.profiling.profile import Profile

LINES = 12
PARTS = {"model": "demo", "set of weights": "aa", "tokenizer": "bb"}


class Played:
    """Workers that answer at once, unless a test says what they do instead.

    It is a `Machines`. A worker in `holds` keeps its calls, until `release`. `does` has what a
    function does on a worker in the place of what it does elsewhere.
    """

    def __init__(self, *workers: str) -> None:
        self._pulse, self._count = 0, 0
        self.workers = list(workers)
        self.stopped: set[str] = set()
        self.holds: set[str] = set()
        self.held: list[tuple[str, Reply]] = []
        self.does: dict[tuple[str, str], Callable[..., Any]] = {}
        self.sent: list[tuple[str, int]] = []
        self.ended: set[str] = set()
        self.forgotten: set[int] = set()
        self.each: Callable[[], None] = lambda: None
        self._replies: list[Reply] = []

    @property
    def signs(self) -> dict[str, Any]:
        self._pulse += 1
        return {one: 0 if one in self.stopped else self._pulse for one in self.workers}

    def call(self, worker: str, function: Callable[..., Any], *arguments: Any) -> int:
        self._count += 1
        name = function.__name__
        if name == "answer":
            self.sent.append((worker, arguments[1]["index"]))
        if name == "end":
            self.ended.add(worker)
        does = self.does.get((worker, name)) or getattr(self, f"_{name}")
        try:
            reply = Reply(self._count, does(*arguments))
        except Exception as error:
            reply = Reply(self._count, error=error)
        if worker in self.holds and name == "answer":
            self.held.append((worker, reply))
        else:
            self._replies.append(reply)
        return self._count

    def release(self) -> None:
        """Let the calls that were held end now."""
        self._replies += [reply for _, reply in self.held]
        self.holds.clear()
        self.held.clear()

    def forget(self, call: int) -> None:
        self.forgotten.add(call)

    def replies(self, timeout: float) -> list[Reply]:
        self.each()
        found, self._replies = self._replies, []
        return [reply for reply in found if reply.call not in self.forgotten]

    def _describe(self, model: str) -> Plain:
        return {"versions": answering.versions(), "parts": PARTS | {"model": "/other/path"}}

    def _begin(self, batch: SentBatch, sharers: int) -> Plain:
        return {"lanes": 2, "said": ["two at a time"]}

    def _answer(self, key: str, plain: Plain) -> Plain:
        line = line_of(plain)
        outcome = Outcome(line, error=f"answer {line.index}", kind="other")
        return {"outcome": plain_outcome(outcome), "events": []}

    def _end(self, key: str) -> None:
        pass


@pytest.fixture
def store() -> Iterator[Store]:
    with filled([[1, number] for number in range(LINES)]) as made:
        yield made


class Run:
    """A run of the lines of a store on played workers, and what it said."""

    def __init__(self, machines: Played, store: Store) -> None:
        self.machines, self.store = machines, store
        self.said: list[str] = []
        self.is_stopping = False
        job = Job(inputs=["-"])
        found = survey(store.pending(), {}, 64)
        batch = SentBatch.of("key", job, found, store.counts, 64, has_events=False, log_text=False)
        self.driver = Driver(machines, batch, PARTS, Profile(), self.said.append)

    def outcomes(self) -> list[tuple[int, str | None]]:
        """Run to the end, and return index and error of each outcome, in the order of the input."""
        found = []
        for outcome in self.driver.run(
            self.store, "prefix", lambda: self.is_stopping, lambda: None
        ):
            self.store.record(outcome.line.index, b"{}")
            found.append((outcome.line.index, outcome.error))
        return sorted(found)

    def is_said(self, text: str) -> bool:
        return any(text in line for line in self.said)


ALL = [(index, f"answer {index}") for index in range(LINES)]


def test_every_line_is_answered_once_and_the_workers_are_told_of_the_end(store: Store) -> None:
    machines = Played("a", "b")
    run = Run(machines, store)
    assert run.outcomes() == ALL
    assert {worker for worker, _ in machines.sent} == {"a", "b"} == machines.ended
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
    store: Store, changes: dict[str, Plain], why: str
) -> None:
    machines = Played("good", "bad")
    described = machines._describe("demo")
    found = {name: described[name] | changes.get(name, {}) for name in described}
    machines.does["bad", "describe"] = lambda model: found
    run = Run(machines, store)
    assert run.outcomes() == ALL
    assert {worker for worker, _ in machines.sent} == {"good"}
    assert run.is_said(f"worker bad: {why}")
    assert run.is_said("it gets no lines")


def test_a_batch_with_refused_workers_only_ends(store: Store) -> None:
    machines = Played("a", "b")

    def fails(*_: object) -> None:
        raise MemoryPlanError("this does not fit")

    machines.does["a", "begin"] = machines.does["b", "begin"] = fails
    with pytest.raises(CutOffError, match="no worker can be used: worker a: this does not fit"):
        Run(machines, store).outcomes()


def test_the_lines_of_a_worker_that_ends_run_elsewhere(store: Store) -> None:
    machines = Played("a", "b")
    machines.holds.add("a")

    def ends_when_it_is_the_last_one() -> None:
        if len({index for worker, index in machines.sent if worker == "b"}) >= 5:
            machines.workers = ["b"]

    machines.each = ends_when_it_is_the_last_one
    run = Run(machines, store)
    assert run.outcomes() == ALL
    had = [index for worker, index in machines.sent if worker == "a"]
    assert set(had) <= {index for worker, index in machines.sent if worker == "b"}
    assert run.is_said(f"worker a has ended: its {len(had)} unfinished lines run elsewhere")


def test_a_worker_without_a_sign_of_life_loses_its_lines_and_its_late_answers_count_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped with lines, and goes on after the others have answered some of them."""
    monkeypatch.setattr(driving, "SILENT_S", 0.0)
    machines = Played("a", "b")
    machines.holds.add("a")

    def each() -> None:
        sent = {index for worker, index in machines.sent if worker == "b"}
        if {index for worker, index in machines.sent if worker == "a"} and len(sent) >= 4:
            machines.stopped = {"a"} if len(sent) < LINES else set()
            if len(sent) >= LINES - 1:
                machines.release()

    machines.each = each
    run = Run(machines, store)
    assert run.outcomes() == ALL
    assert run.is_said("worker a: no sign of life for 0 s: its "), (run.said, machines.sent)
    indexes = [index for _, index in machines.sent]
    assert len(indexes) > LINES, "some lines ran twice"


def test_a_line_that_ends_three_workers_gets_an_error_and_no_fourth(store: Store) -> None:
    machines = Played("w0")

    def each() -> None:
        if machines.workers and (machines.workers[0], 7) in machines.sent:
            machines.workers = [f"w{int(machines.workers[0][1:]) + 1}"]
            machines._replies.clear()

    machines.each = each
    run = Run(machines, store)
    found = run.outcomes()
    assert [one for one in found if one[0] != 7] == [one for one in ALL if one[0] != 7]
    assert found[7] == (
        7,
        "3 workers ended while they ran this line; it is not tried again",
    )
    assert len([index for _, index in machines.sent if index == 7]) == MOST_ENDS


def test_a_worker_that_does_not_know_the_batch_begins_it_again(store: Store) -> None:
    """Another batch took its place meanwhile. That is no fault of the lines."""
    machines = Played("a")
    left = [answering.NotOpenError("key") for _ in range(2 * MOST_ENDS)]
    own = machines._answer

    def forgets(key: str, line: Plain) -> Plain:
        if left:
            raise left.pop()
        return own(key, line)

    machines.does["a", "answer"] = forgets
    assert Run(machines, store).outcomes() == ALL


def test_a_worker_whose_engine_breaks_begins_again_and_says_why(store: Store) -> None:
    machines, broken = Played("a"), [ZeroDivisionError("by zero")]
    own = machines._answer

    def breaks(key: str, line: Plain) -> Plain:
        if broken:
            raise broken.pop()
        return own(key, line)

    machines.does["a", "answer"] = breaks
    run = Run(machines, store)
    assert run.outcomes() == ALL
    assert run.is_said("worker a: ZeroDivisionError: by zero; it begins again")


def test_workers_that_end_while_they_load_are_given_up(store: Store) -> None:
    machines = Played("w0")
    machines.does = {(f"w{number}", "begin"): machines._begin for number in range(9)}

    def each() -> None:
        machines._replies.clear()
        machines.workers = [f"w{machines._count}"]

    machines.each = each
    with pytest.raises(CutOffError, match=r"3 workers ended while they loaded the model: is there"):
        Run(machines, store).outcomes()


def test_a_worker_that_comes_later_takes_a_part(store: Store) -> None:
    machines = Played("a")
    machines.holds.add("a")

    def each() -> None:
        if machines.sent and "b" not in machines.workers:
            machines.workers.append("b")
        if len([1 for worker, _ in machines.sent if worker == "b"]) >= 4:
            machines.release()

    machines.each = each
    assert Run(machines, store).outcomes() == ALL


def test_a_stopped_run_ends_the_lines_that_run_and_begins_no_other(store: Store) -> None:
    machines = Played("a", "b")
    run = Run(machines, store)
    machines.holds = {"a", "b"}

    def each() -> None:
        if len(machines.held) == 8:
            run.is_stopping = True
            machines.release()

    machines.each = each
    found = run.outcomes()
    assert len(found) == len(machines.sent) == 8


@pytest.mark.parametrize("left", [[], ["b"]], ids=["all", "one of two"])
def test_a_stopped_run_does_not_wait_for_workers_that_ended(store: Store, left: list[str]) -> None:
    """A signal to a group of processes ends the workers, too. Their lines wait for --resume."""
    machines, looks = Played("a", "b"), list[int]()
    run = Run(machines, store)
    machines.holds = {"a", "b"}

    def each() -> None:
        looks.append(1)
        assert len(looks) < 100, "it waits"
        if len(machines.held) == 8:
            run.is_stopping, machines.workers = True, left
            machines.held = [one for one in machines.held if one[0] in left]
            machines.release()

    machines.each = each
    assert len(run.outcomes()) == 4 * len(left)
    assert len(machines.sent) == 8


def test_a_line_keeps_all_it_has_on_the_wire(store: Store) -> None:
    from mlxrunner.batch.records import StoredLine
    from mlxrunner.cache.tokens import as_tokens

    line = StoredLine(
        3, "row 4", as_tokens([5, 70000]), "id", "response", {"seed": 1}, None, [user("Hello")]
    )
    found = line_of(plain_line(line, with_prompt=True))
    assert found.tokens.tolist() == line.tokens.tolist()
    assert vars(found) | {"tokens": None} == vars(line) | {"tokens": None}
    assert line_of(plain_line(line, with_prompt=False)).prompt is None


def test_a_driver_without_workers_says_so_once(store: Store, tmp_path: Path) -> None:
    machines, looks = Played(), []

    def each() -> None:
        looks.append(1)
        if len(looks) == 5:
            machines.workers.append("a")

    machines.each = each
    run = Run(machines, store)
    assert run.outcomes() == ALL
    assert run.said[0] == "no worker is there: the batch waits for one"
    assert len([line for line in run.said if line.startswith("no worker")]) == 1
