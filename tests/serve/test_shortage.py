"""A server without a file for another connection says so, and answers again afterwards."""

from __future__ import annotations

import logging
import resource
import socket
from contextlib import ExitStack

import httpx
import pytest
from support.program import program

from mlxrunner.serve.shortage import EVERY_S, Shortage

CODE = """\
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 6000))
from mlxrunner.cli import main
from mlxrunner.serve.server import Door
connect = Door.connection_made
def made(self, transport):
    resource.setrlimit(resource.RLIMIT_NOFILE, (60, 6000))
    connect(self, transport)
Door.connection_made = made
main()
"""
"""A server whose limit falls to 60 files with the first connection."""


def test_more_connections_than_files() -> None:
    """One line names the limit and the remedy. Later connections are answered."""
    with program("demo", "--no-park", code=CODE) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        host, port = server.url.removeprefix("http://").split(":")
        with ExitStack() as connections:
            for _ in range(80):
                connections.enter_context(socket.create_connection((host, int(port))))
            assert server.process.stderr is not None
            said = server.process.stderr.readline().decode()
        assert "all 60 files that this process may have open are in use" in said
        assert "ulimit -n" in said
        assert httpx.get(f"{server.url}/health").status_code == 200
        server.process.terminate()
        _, rest = server.process.communicate(timeout=300)
        assert "files" not in rest.decode()


def test_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """The line comes with the last file only, and at most once a minute."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    now = 0.0
    shortage = Shortage(lambda: now)
    with caplog.at_level(logging.WARNING, "mlxrunner"):
        shortage.notice(most - 2)
        assert caplog.messages == []
        shortage.notice(most - 1)
        shortage.notice(most - 1)
        assert len(caplog.messages) == 1
        now = EVERY_S
        shortage.notice(most - 1)
        assert len(caplog.messages) == 2
    assert f"all {most} files" in caplog.messages[0]
