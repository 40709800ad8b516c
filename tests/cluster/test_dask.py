"""A batch over the workers of a Dask cluster: killed, stopped, interrupted, without a disk."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.batches import OUT, STORE, lines, run, unbroken
from support.checks import ends, read_lines
from support.waiting import PATIENCE_S, until

from mlxrunner.batch.execution import Outcome
from mlxrunner.batch.store import Store, StoredLine
from mlxrunner.cli import main
from mlxrunner.cluster import dask_workers, driver
from mlxrunner.cluster.dask_workers import (
    GONE_S,
    MOST_STARTS,
    SIGN,
    DaskWorkers,
    RestartLimit,
    opened_dask,
)
from mlxrunner.cluster.driver import MOST_ENDS, Driver
from mlxrunner.cluster.options import ClusterOptions
from mlxrunner.errors import CutOffError

MANY = 60


@pytest.fixture(autouse=True)
def many(folder: Path) -> None:
    Path("in.jsonl").write_text(lines(MANY, broken=(5,)))


def batch(cluster: Any, *arguments: object) -> Result:
    return started("--dask", cluster.scheduler_address, *arguments)


def started(*arguments: object) -> Result:
    return run("in.jsonl", "-o", OUT, "--no-usage", *arguments)


@pytest.fixture(autouse=True)
def both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deal no line before both workers can take one, so that both have a part."""
    if "cluster" not in request.fixturenames:
        return
    cluster, deal = request.getfixturevalue("cluster"), Driver._send_lines
    until(lambda: len(cluster.scheduler.workers) == 2)
    is_begun = list[bool]()

    def deal_once_both_are_ready(driver: Driver) -> Iterator[Outcome]:
        ready = [one for one in driver._workers.values() if one.state == "ready"]
        if is_begun or len(ready) == 2:
            is_begun.append(True)
            yield from deal(driver)

    monkeypatch.setattr(Driver, "_send_lines", deal_once_both_are_ready)


@pytest.fixture
def victim(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[signal.Signals], list[int]]:
    """Return a function that has a worker get a signal when it is sent its twelfth line.

    It returns a list for the process of the worker.
    """

    def choose(number: signal.Signals) -> list[int]:
        send, sent, hit = Driver._send, Counter[str](), list[int]()

        def sends(driver: Driver, worker: Any, line: StoredLine) -> None:
            send(driver, worker, line)
            sent[worker.name] += 1
            if sent[worker.name] == 12 and not hit:
                own = {one.worker_address: one.process.pid for one in cluster.workers.values()}
                process = own[worker.name]
                hit.append(process)
                os.kill(process, number)

        monkeypatch.setattr(Driver, "_send", sends)
        return hit

    return choose


@pytest.mark.exhaustive(0)
def test_the_answers_are_those_of_one_process(cluster: Any) -> None:
    """Greedy and seeded lines have the same bytes, and both workers did a part."""
    expected = unbroken()
    ends(batch(cluster, "--events", "events.jsonl", "--summary", "summary.json"), 3)
    assert OUT.read_bytes() == expected
    found = read_lines(Path("events.jsonl"))
    lines_of_events = sorted(one["line"]["number"] for one in found)
    assert lines_of_events == [number for number in range(1, MANY + 1) if number != 6]
    assert {one["line"]["lines"] for one in found} == {MANY}
    assert len({one["process"] for one in found}) == 2
    summary = json.loads(Path("summary.json").read_text())
    assert (summary["answered"], summary["failed"]) == (MANY - 1, 1)
    assert summary["run"]["evaluated_tokens"] == sum(one["evaluated_tokens"] for one in found)


def test_another_address_than_loopback_has_to_be_called_insecure(cluster: Any) -> None:
    """Without a host in it, an address may be any of this machine."""
    address = cluster.scheduler_address.replace("127.0.0.1", "0.0.0.0")
    ends(started("--dask", address), 2, f"{address}: is another host, and without TLS")
    assert not OUT.exists()
    ends(started("--dask", address, "--insecure"), 3)
    assert OUT.read_bytes() == unbroken()


def test_a_killed_worker_costs_its_unfinished_lines(
    cluster: Any, victim: Callable[[signal.Signals], list[int]]
) -> None:
    assert victim(signal.SIGKILL) == []
    result = batch(cluster)
    ends(result, 3, "unfinished lines run elsewhere")
    assert OUT.read_bytes() == unbroken()


@pytest.mark.exhaustive(0)
def test_a_stopped_worker_costs_its_unfinished_lines(
    cluster: Any, victim: Callable[[signal.Signals], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its late answers are written once, and so are those of a worker that only seems to hang."""
    monkeypatch.setattr(driver, "SILENT_S", 2.0)
    monkeypatch.setattr(driver, "MOST_ENDS", MANY)  # a busy machine may be silent for 2 s, too
    stopped = victim(signal.SIGSTOP)
    try:
        result = batch(cluster)
    finally:
        os.kill(stopped[0], signal.SIGCONT)
    ends(result, 3, "no sign of life for 2 s")
    assert OUT.read_bytes() == unbroken()


def driver_that(does: str, cluster: Any) -> list[str]:
    """Return a command whose program does something in its third writing of answers."""
    code = (
        "import os, resource, time\nfrom mlxrunner.batch import output\n"
        "from mlxrunner.cli import main\noutput.SHORTEST_S = output.SHARE = 0\n"
        "flush, flushes = output.AnswerWriter.flush, []\n"
        "def flushing(self):\n    flushes.append(1)\n"
        f"    if len(flushes) == 3: {does}\n"
        "    flush(self)\noutput.AnswerWriter.flush = flushing\nmain()\n"
    )
    options = "batch in.jsonl -o out.jsonl -q --no-usage --no-reserve --dask".split()
    no_bytecode = "-B"  # a module's file that may not grow would be cut off
    return [sys.executable, no_bytecode, "-c", code, *options, cluster.scheduler_address]


def assert_goes_on(cluster: Any) -> None:
    """Check that a run whose driver has ended is neither done nor lost."""
    with Store.open(STORE) as store:
        assert 0 < store.counts.done < MANY
    ends(batch(cluster, "--resume"), 3)
    assert OUT.read_bytes() == unbroken()


@pytest.mark.exhaustive(0)
def test_a_killed_driver_goes_on_with_resume(cluster: Any) -> None:
    """It is killed when it has stored answers, and before it can store all of them."""
    waits = "flush(self); open('waits', 'w').close(); time.sleep(3600)"
    driver = subprocess.Popen(driver_that(waits, cluster))
    try:
        until(lambda: Path("waits").exists() or driver.poll() is not None)
    finally:
        driver.kill()
        driver.wait()
    assert_goes_on(cluster)


def test_a_worker_of_another_version_is_refused(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlxrunner.cluster import worker

    own = worker.versions()
    monkeypatch.setattr(worker, "versions", lambda: own | {"mlx": "0.0.1"})
    refused = f"has another mlx: {own['mlx']} there, 0.0.1 here; it gets no lines"
    ends(batch(cluster), 1, refused, "no worker can be used")


@pytest.fixture
def at_third_line(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], None]], None]:
    """Return a function that has a call made with the workers when the third line is sent."""

    def choose(does: Callable[[Any], None]) -> None:
        send, sent = Driver._send, list[int]()

        def sends(driver: Driver, worker: Any, line: StoredLine) -> None:
            send(driver, worker, line)
            sent.append(line.index)
            if len(sent) == 3:
                does(driver._cluster)

        monkeypatch.setattr(Driver, "_send", sends)

    return choose


@pytest.mark.exhaustive(0)
def test_local_workers_that_dask_gave_up_come_back(
    folder: Path, at_third_line: Callable[[Callable[[Any], None]], None]
) -> None:
    """Dask ends a supervisor whose worker was away for too long, and starts no other."""
    Path("in.jsonl").write_text(lines(12, broken=(5,)))

    def give_up(workers: DaskWorkers) -> None:
        async def close_all() -> None:
            supervisors = workers._client.cluster.workers
            for name in list(supervisors):
                with suppress(TimeoutError):
                    await supervisors.pop(name).close(timeout=0)

        gone = set(workers.signs)
        asyncio.run_coroutine_threadsafe(close_all(), workers._loop).result()
        until(lambda: gone.isdisjoint(workers.signs))

    at_third_line(give_up)
    ends(started("--workers", 2), 3, "has ended")
    assert OUT.read_bytes() == unbroken()


@pytest.mark.exhaustive(0)
def test_local_workers_that_end_while_they_start_are_given_up(
    folder: Path,
    at_third_line: Callable[[Callable[[Any], None]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The driver ends with one line that says why and how to continue, and keeps its answers."""
    keep, is_ending = DaskWorkers._keep, list[bool]()

    def keeps(workers: DaskWorkers) -> str | None:
        why = keep(workers)
        processes = [one.pid for one in workers._client.cluster.workers.values()]
        for process in processes if is_ending else ():
            if process is not None:
                os.kill(process, signal.SIGKILL)
        return why

    monkeypatch.setattr(DaskWorkers, "_keep", keeps)
    monkeypatch.setattr(dask_workers, "LOOK_EVERY_S", 0.05)

    def end_all(workers: DaskWorkers) -> None:
        is_ending.append(True)
        until(lambda: not workers.signs)

    at_third_line(end_all)
    left = f"no worker is left: {MOST_STARTS} processes ended in turn"
    ends(started("--workers", 1), 1, left, "--resume")
    with Store.open(STORE) as store:
        assert store.counts.done < MANY


@pytest.mark.exhaustive(0)
def test_local_workers_that_do_not_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = dask_workers.worker_settings()
    monkeypatch.setattr(dask_workers, "worker_settings", lambda: settings | {"no_such": 1})
    monkeypatch.setattr(dask_workers, "MOST_STARTS", 1)
    ends(started("--workers", 1), 1, "the workers did not start: ")


def test_an_address_where_no_scheduler_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dask_workers, "CONNECT_S", 0.5)
    said = "tcp://127.0.0.1:9: no scheduler answers there"
    ends(started("--dask", "tcp://127.0.0.1:9"), 2, said)
    ends(CliRunner().invoke(main, ["worker", "tcp://127.0.0.1:9"]), 2, said)


def test_dask_writes_no_lines_of_its_own() -> None:
    """Some of its loggers have a level of their own, which that of "distributed" doesn't change."""
    dask_workers.be_quiet()
    for name in logging.root.manager.loggerDict:
        if name.partition(".")[0] in ("distributed", "bokeh", "tornado"):
            assert not logging.getLogger(name).isEnabledFor(logging.ERROR), name


def test_a_scheduler_that_is_silent_is_given_up_after_the_time_that_is_said(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look waits for it, too, and that counts."""
    looks = list[int]()

    async def waits(workers: DaskWorkers) -> None:
        looks.append(1)
        await asyncio.Event().wait()

    with opened_dask(ClusterOptions(dask=cluster.scheduler_address)) as workers:
        monkeypatch.setattr(dask_workers, "LOOK_EVERY_S", 0.001)
        monkeypatch.setattr(dask_workers, "CONNECT_S", 0.1)
        monkeypatch.setattr(dask_workers, "LOST_S", 0.4)
        monkeypatch.setattr(DaskWorkers, "_scheduler", waits)
        with pytest.raises(CutOffError, match=r"has not answered for 0\.4 s"):
            until(lambda: workers.ended(0.01))
    assert 4 <= len(looks) <= 5


def test_calls_of_a_stopped_worker_hold_back_no_others(cluster: Any) -> None:
    """Dask's client would fetch results of all workers together, and wait for all."""
    own = {one.worker_address: one.process.pid for one in cluster.workers.values()}
    stopped, other = sorted(own)
    with opened_dask(ClusterOptions(dask=cluster.scheduler_address)) as workers:
        os.kill(own[stopped], signal.SIGSTOP)
        try:
            for _ in range(6):
                workers.call(stopped, os.getpid)
            call = workers.call(other, abs, -1)
            assert workers.ended(PATIENCE_S) == [call]
            assert call.result() == 1
        finally:
            os.kill(own[stopped], signal.SIGKILL)


def test_processes_that_end_in_turn_are_counted_for_each_worker() -> None:
    keeper, most = RestartLimit(2), 2 * MOST_STARTS
    for process in range(most):
        assert keeper.look([process], 0, 0) is None
    assert f"{most} processes ended in turn" in str(keeper.look([], 0, 0))


def test_a_worker_that_takes_part_starts_the_count_again() -> None:
    keeper = RestartLimit(1)
    for process in range(10 * MOST_STARTS):
        is_back = process % MOST_STARTS == 0
        assert keeper.look([process], int(is_back), GONE_S / 4 if is_back else 0) is None


def test_a_process_that_is_slow_to_start_is_waited_for_up_to_an_end() -> None:
    keeper = RestartLimit(1)
    assert keeper.look([1], 0, GONE_S - 1) is None
    assert "none has come for 300 s" in str(keeper.look([1], 0, 1))


def test_a_client_that_connects_again_is_waited_for() -> None:
    """Dask has no scheduler meanwhile."""

    class Scheduler:
        async def identity(self, n_workers: int) -> dict[str, Any]:
            return {"workers": {"tcp://one": {"last_seen": 7.0, "metrics": {SIGN: "well"}}}}

    async def look() -> Mapping[str, Any]:
        client = SimpleNamespace(scheduler=None)
        workers = DaskWorkers(client, None)
        looking = asyncio.create_task(workers.look())
        await asyncio.sleep(0.1)
        assert not looking.done()
        client.scheduler = Scheduler()
        await looking
        return workers.signs

    assert asyncio.run(look()) == {"tcp://one": (7.0, "well")}


BAD = 7
KILLS = f"""
import os, signal
from mlxrunner.cluster.worker import WorkerSession
answer = getattr(WorkerSession.answer, "undisturbed", WorkerSession.answer)
def answers(self, line):
    if line.index == {BAD}:
        with open("killed", "a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGKILL)
    return answer(self, line)
answers.undisturbed = answer  # Dask runs this file more than once
WorkerSession.answer = answers
"""


@pytest.mark.exhaustive(0)
def test_a_line_that_kills_three_processes_gets_an_error_and_no_fourth(folder: Path) -> None:
    """Dask runs a file in each worker that it starts, which makes the line deadly."""
    import dask
    import distributed  # noqa: F401  # its settings have to be there before one is changed

    Path("in.jsonl").write_text(lines(12, broken=(5,)))
    deadly = folder / "deadly.py"
    deadly.write_text(KILLS.replace('"killed"', repr(str(folder / "killed"))))
    with dask.config.set({"distributed.worker.preload": [str(deadly)]}):
        ends(started("--workers", 2), 3)
    assert Path("killed").read_text() == "x" * MOST_ENDS
    found, expected = OUT.read_text().splitlines(), unbroken().decode().splitlines()
    assert [one for one in found if one not in expected] == [found[BAD]]
    assert f"{MOST_ENDS} workers ended while they ran this line" in json.loads(found[BAD])["error"]


@pytest.mark.exhaustive(0)
def test_ctrl_c_at_random_moments_loses_and_doubles_nothing(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A moment is a line that is sent, or an answer. Every third time Ctrl-C is pressed twice."""
    chosen, left, presses = random.Random(5), list[int](), list[int]()
    send, landed = Driver._send, Driver._finish

    def count() -> None:
        left[0] -= 1
        if left[0] in presses:
            os.kill(os.getpid(), signal.SIGINT)

    def sends(driver: Driver, worker: Any, line: StoredLine) -> None:
        count()
        send(driver, worker, line)

    def lands(driver: Driver, reply: Any) -> Any:
        count()
        yield from landed(driver, reply)

    monkeypatch.setattr(Driver, "_send", sends)
    monkeypatch.setattr(Driver, "_finish", lands)
    broken = 0
    for time in range(12):
        left[:] = [chosen.randrange(4, 24)]
        presses[:] = [0, -chosen.randrange(1, 4)] if time % 3 == 2 else [0]
        result = batch(cluster, "--resume")
        assert result.exit_code in (1, 3, 130), result.stderr
        assert unbroken().startswith(OUT.read_bytes())
        if result.exit_code == 3:
            break
        broken += 1
    assert broken >= 3
    presses.clear()
    ends(batch(cluster, "--resume"), 3)
    assert OUT.read_bytes() == unbroken()


@pytest.mark.exhaustive(0)
def test_a_full_disk_ends_the_run_and_resume_goes_on(cluster: Any) -> None:
    """From its third group of answers on, no file of the driver may grow any more."""
    size = "os.path.getsize('out.jsonl')"
    fills = f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))"
    driver = subprocess.run(driver_that(fills, cluster), capture_output=True, text=True)
    assert driver.returncode == 1, driver.stderr
    assert "Traceback" not in driver.stderr
    assert "--resume" in driver.stderr
    assert_goes_on(cluster)


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize(
    ("moment", "number", "to"),
    [
        ("starting", signal.SIGINT, os.kill),
        ("starting", signal.SIGTERM, os.killpg),
        ("answering", signal.SIGTERM, os.kill),
        ("answering", signal.SIGINT, os.killpg),
    ],
    ids=lambda one: getattr(one, "name", getattr(one, "__name__", one)),
)
def test_a_signal_ends_driver_and_workers(
    moment: str, number: signal.Signals, to: Callable[[int, int], None]
) -> None:
    """A terminal and most schedulers signal all processes of the group, the workers included."""
    options = ["--no-usage", "--no-reserve", "--workers", "2"]
    command = [sys.executable, "-m", "mlxrunner", "batch", "in.jsonl", "-o", "out.jsonl", *options]
    with open("driver.log", "wb") as log:
        driver = subprocess.Popen(command, stderr=log, start_new_session=True)
    try:
        is_starting = moment == "starting"
        until(lambda: len(members(driver.pid)) > 2 if is_starting else size(OUT) > 0)
        to(driver.pid, number)
        code = driver.wait(PATIENCE_S)
        until(lambda: not members(driver.pid), "for the end of all processes")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
    said = Path("driver.log").read_text()
    assert code in (1, 3, 128 + number), said
    assert "Traceback" not in said
    assert "has ended" not in said
    assert unbroken().startswith(OUT.read_bytes() if OUT.exists() else b"")
    ends(started("--resume"), 3)
    assert OUT.read_bytes() == unbroken()


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def members(group: int) -> list[int]:
    """Return the processes of a group that have not ended."""
    found = subprocess.run(["ps", "-A", "-o", "pid=,pgid=,stat="], capture_output=True, text=True)
    rows = [line.split() for line in found.stdout.splitlines()]
    return [int(row[0]) for row in rows if row[1] == str(group) and row[2][0] != "Z"]
