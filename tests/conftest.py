"""For all tests."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest


def pytest_configure() -> None:
    """Give processes that tests start Ctrl-C back: a shell script's background jobs inherit a SIGINT that is ignored."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


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
