"""A batch over workers that is broken: by its lines, by Ctrl-C, by a disk that is full."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from support.batches import lines, run, unbroken
from support.waiting import PATIENCE_S, until

from mlxrunner.batch.store import Store, StoredLine
from mlxrunner.cluster.driver import MOST_ENDS, Driver

MANY, BAD = 60, 7
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


@pytest.fixture(autouse=True)
def many(folder: Path) -> None:
    Path("in.jsonl").write_text(lines(MANY, broken=(5,)))


def batch(cluster: Any, *arguments: object) -> Result:
    until(lambda: len(cluster.scheduler.workers) == 2)
    where = ("--dask", cluster.scheduler_address)
    return run("in.jsonl", "-o", "out.jsonl", "--no-usage", *where, *arguments)


@pytest.mark.exhaustive(0)
def test_a_line_that_kills_three_processes_gets_an_error_and_no_fourth(folder: Path) -> None:
    """Dask runs a file in each worker that it starts, which makes the line deadly."""
    import dask
    import distributed  # noqa: F401  # its settings have to be there before one is changed

    Path("in.jsonl").write_text(lines(12, broken=(5,)))
    deadly = folder / "deadly.py"
    deadly.write_text(KILLS.replace('"killed"', repr(str(folder / "killed"))))
    with dask.config.set({"distributed.worker.preload": [str(deadly)]}):
        result = run("in.jsonl", "-o", "out.jsonl", "--no-usage", "--workers", 2)
    assert result.exit_code == 3, result.stderr
    assert Path("killed").read_text() == "x" * MOST_ENDS
    found, expected = Path("out.jsonl").read_text().splitlines(), unbroken().decode().splitlines()
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
        assert unbroken().startswith(Path("out.jsonl").read_bytes())
        if result.exit_code == 3:
            break
        broken += 1
    assert broken >= 3
    presses.clear()
    result = batch(cluster, "--resume")
    assert result.exit_code == 3, result.stderr
    assert Path("out.jsonl").read_bytes() == unbroken()


@pytest.mark.exhaustive(0)
def test_a_full_disk_ends_the_run_and_resume_goes_on(cluster: Any) -> None:
    """From its third group of answers on, no file of the driver may grow any more."""
    code = (
        "import os, resource\nfrom mlxrunner.batch import output\nfrom mlxrunner.cli import main\n"
        "output.SHORTEST_S = output.SHARE = 0\n"
        "flush, flushes = output.AnswerWriter.flush, []\n"
        "def fills(self):\n"
        "    flushes.append(1)\n"
        "    if len(flushes) == 3:\n"
        "        size = os.path.getsize('out.jsonl')\n"
        "        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))\n"
        "    flush(self)\n"
        "output.AnswerWriter.flush = fills\n"
        "main()\n"
    )
    command = [sys.executable, "-c", code, "batch", "in.jsonl", "-o", "out.jsonl", "-q"]
    options = ["--no-usage", "--no-reserve", "--dask", cluster.scheduler_address]
    driver = subprocess.run([*command, *options], capture_output=True, text=True)
    assert driver.returncode == 1, driver.stderr
    assert "Traceback" not in driver.stderr
    assert "--resume" in driver.stderr
    with Store.open(Path("out.jsonl.run")) as store:
        assert store.counts.done < MANY
    result = batch(cluster, "--resume")
    assert result.exit_code == 3, result.stderr
    assert Path("out.jsonl").read_bytes() == unbroken()


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
    out = Path("out.jsonl")
    with open("driver.log", "wb") as log:
        driver = subprocess.Popen(command, stderr=log, start_new_session=True)
    try:
        is_starting = moment == "starting"
        until(lambda: len(members(driver.pid)) > 2 if is_starting else size(out) > 0)
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
    assert unbroken().startswith(out.read_bytes() if out.exists() else b"")
    result = run("in.jsonl", "-o", out, "--no-usage", "--resume")
    assert result.exit_code == 3, result.stderr
    assert out.read_bytes() == unbroken()


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def members(group: int) -> list[int]:
    """Return the processes of a group that have not ended."""
    found = subprocess.run(["ps", "-A", "-o", "pid=,pgid=,stat="], capture_output=True, text=True)
    rows = [line.split() for line in found.stdout.splitlines()]
    return [int(row[0]) for row in rows if row[1] == str(group) and row[2][0] != "Z"]
