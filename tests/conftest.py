"""For all tests."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest


def pytest_configure() -> None:
    """Give the processes that tests start the signals back that a script's background jobs and nohup ignore.

    A signal that is handled here has its default effect in them, one that is ignored here would be ignored there.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda number, frame: None)


@pytest.fixture(autouse=True)
def no_freed_buffers() -> None:
    """Tests that measure memory must not be handed larger buffers than they ask for, which an earlier test has freed."""
    mx.clear_cache()


@pytest.fixture(autouse=True)
def no_process_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End the processes that a test has started and not waited for, so that a failed test leaves none behind."""
    started: list[subprocess.Popen[Any]] = []
    begin = subprocess.Popen.__init__

    def record(self: subprocess.Popen[Any], *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        started.append(self)

    monkeypatch.setattr(subprocess.Popen, "__init__", record)
    yield
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.fixture
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A descriptor of a disk that is always full: of a copy of the device, so that nothing can replace the real one."""
    device = tmp_path_factory.mktemp("device") / "full"
    try:
        os.mknod(device, stat.S_IFCHR | 0o600, os.makedev(1, 7))
        descriptor = os.open(device, os.O_WRONLY)
    except OSError:
        pytest.skip("only root, on Linux, can make a disk that is always full")
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def null(tmp_path: Path) -> Path:
    """A copy of the null device."""
    device = tmp_path / "null"
    try:
        os.mknod(device, stat.S_IFCHR | 0o600, os.stat(os.devnull).st_rdev)
    except OSError:
        pytest.skip("only root can make devices")
    return device
