"""A scheduler and workers that are started by hand, as docs/machines.md says."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from support.batches import OUT, lines, resume, run, unbroken
from support.checks import ends
from support.waiting import until

import mlxrunner.models
from mlxrunner.batch.store import StoredLine
from mlxrunner.cluster import dask_workers
from mlxrunner.cluster.driver import Driver

PAGE = Path(__file__).parents[2] / "docs/machines.md"
DASK_TLS = ("--tls-ca-file", "ca.pem", "--tls-cert", "cert.pem", "--tls-key", "key.pem")
OUR_TLS = ("--tls-ca", "ca.pem", "--tls-cert", "cert.pem", "--tls-key", "key.pem")

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Return a function that starts a Python module, and that ends it after the test."""
    started: list[subprocess.Popen[bytes]] = []

    def starts(*words: object, cwd: Path = folder) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", *map(str, words)]
        with open(folder / "started.log", "ab") as log:
            started.append(subprocess.Popen(command, stderr=log, stdout=log, cwd=cwd))
        return started[-1]

    yield starts
    for one in started:
        one.send_signal(signal.SIGTERM)
    for one in started:
        one.wait()


def scheduler(start: Start, *options: str) -> tuple[str, subprocess.Popen[bytes]]:
    """Start a scheduler on loopback, and return its address and its process."""
    told = Path("scheduler.json")
    given = ("--host", "127.0.0.1", "--port", 0, "--no-dashboard", "--scheduler-file", told)
    process = start("dask", "scheduler", *given, *options)
    until(lambda: told.exists() and told.read_text().rstrip().endswith("}"))
    return str(json.loads(told.read_text())["address"]), process


def make_certificates() -> None:
    """Make certificates in this folder by the commands of the page."""
    commands = re.findall(r"^ *(openssl .*)$", PAGE.read_text(), re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        subprocess.run(shlex.split(command), check=True, capture_output=True)


def batch(address: str, *options: object) -> Result:
    return run("in.jsonl", "-o", "out.jsonl", "--no-usage", "--dask", address, *options)


@pytest.mark.exhaustive(0)
@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")
def test_only_those_with_certificates_belong_to_a_cluster_with_tls(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_certificates()
    address, _ = scheduler(start, "--protocol", "tls", *DASK_TLS)
    assert address.startswith("tls://127.0.0.1:")
    start("mlxrunner", "worker", address, *OUR_TLS)
    ends(batch(address, *OUR_TLS), 3)
    assert OUT.read_bytes() == unbroken()
    monkeypatch.setattr(dask_workers, "CONNECT_S", 2.0)
    plain = run("in.jsonl", "-o", "no.jsonl", "--dask", address.replace("tls", "tcp"))
    ends(plain, 2, "no scheduler answers there")
    (folder / "strangers").mkdir()
    monkeypatch.chdir(folder / "strangers")
    make_certificates()
    strange = run("../in.jsonl", "-o", "no.jsonl", "--dask", address, *OUR_TLS)
    ends(strange, 2, "are its certificates from the same authority?")


@pytest.mark.exhaustive(0)
def test_a_worker_without_the_model_is_refused_by_name(start: Start, folder: Path) -> None:
    """The model is a folder under a relative name, and the worker runs in another folder."""
    (folder / "elsewhere").mkdir()
    shutil.copytree(Path(mlxrunner.models.__file__).parent / "demo", folder / "own-model")
    address, _ = scheduler(start)
    start("mlxrunner", "worker", address, cwd=folder / "elsewhere")
    said = ("own-model", "it gets no lines", "no worker can be used: worker tcp://127.0.0.1:")
    ends(batch(address, "-m", "./own-model"), 1, *said)
    assert not OUT.exists() or not OUT.read_bytes()


@pytest.mark.exhaustive(0)
def test_a_scheduler_that_dies_ends_the_run_and_resume_goes_on(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("in.jsonl").write_text(lines(60, broken=(5,)))
    address, process = scheduler(start)
    start("mlxrunner", "worker", address)
    send, sent = Driver._send, list[int]()

    def sends(driver: Driver, worker: Any, line: StoredLine) -> None:
        send(driver, worker, line)
        sent.append(line.index)
        if len(sent) == 15:
            os.kill(process.pid, signal.SIGKILL)

    monkeypatch.setattr(Driver, "_send", sends)
    ends(batch(address), 1, "the connection to the scheduler of the cluster is lost", "--resume")
    assert resume().exit_code == 3
    assert OUT.read_bytes() == unbroken()
