"""A server closes connections that would take its last files, and says so. It goes on answering."""

from __future__ import annotations

import logging
import resource
import socket
from contextlib import ExitStack

import httpx
import pytest
from support.program import program

from mlxrunner.serve.middleware import EVERY_S, KEPT, ConnectionLimit

CODE = """\
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 6000))
from mlxrunner.cli import main
from mlxrunner.serve.middleware import HttpConnection
connect = HttpConnection.connection_made
def made(self, transport):
    resource.setrlimit(resource.RLIMIT_NOFILE, (60, 6000))
    connect(self, transport)
HttpConnection.connection_made = made
main()
"""
"""A server whose limit falls to 60 files with the first connection."""


def test_more_connections_than_files() -> None:
    """One line names the limit and the remedy. Later connections are answered."""
    with program("demo", "--no-disk-cache", code=CODE) as server:
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


def test_open_connections_are_answered_without_a_file_for_another_one() -> None:
    """The first answer imports modules, and reading the page starts a thread: both take files."""
    question = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    with (
        program("demo", "--no-disk-cache", code=CODE) as server,
        httpx.Client(base_url=server.url, timeout=300) as client,
        ExitStack() as connections,
    ):
        assert client.get("/health").status_code == 200
        host, port = server.url.removeprefix("http://").split(":")
        for _ in range(80):
            connections.enter_context(socket.create_connection((host, int(port))))
        assert server.process.stderr is not None
        assert b"in use" in server.process.stderr.readline()
        answers = [client.get("/"), client.post("/v1/chat/completions", json=question)]
        assert [answer.status_code for answer in answers] == [200, 200]


def test_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """The line comes where no file is left for a connection, and at most once a minute."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    now = 0.0
    shortage = ConnectionLimit(lambda: now)
    with caplog.at_level(logging.WARNING, "mlxrunner"):
        assert not shortage.closes(most - KEPT - 1)
        assert caplog.messages == []
        assert shortage.closes(most - KEPT)
        assert shortage.closes(most - 1)
        assert len(caplog.messages) == 1
        now = EVERY_S
        assert shortage.closes(most - 1)
        assert len(caplog.messages) == 2
    assert f"all {most} files" in caplog.messages[0]


def test_no_limit_closes_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system may have no limit."""
    monkeypatch.setattr("mlxrunner.serve.middleware.limit", lambda: -1)
    assert not ConnectionLimit().closes(100_000)
