"""Servers on real layers of four kinds, and a table of what their clients reused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from support.jobs import Recorder, Shared, script
from support.layered import KINDS, LayeredOpening, Played, trained_tokenizer, write_kind
from support.scripted import serving

from mlxrunner import ParallelRunner
from mlxrunner.options import ServeSettings
from mlxrunner.profiling.metrics import RequestLog
from mlxrunner.server.manager import ModelManager, ModelNames
from mlxrunner.server.server import application

ROWS = pytest.StashKey[list[str]]()
HEAD = "| client | layers | requests | prompt tokens | evaluated | reused of what could be |"
SETTINGS = ServeSettings(disk_cache=False, slots=4, memory=720_000_000)


@dataclass
class Layered:
    """A server whose model has layers of one kind."""

    kind: str
    url: str
    model: Any
    """The same model with mlx-lm's own layers."""
    runner: ParallelRunner
    played: Played
    recorder: Recorder

    def begin(self) -> Shared:
        """Forget what was asked so far, and return what counts from now on."""
        shared = Shared()
        self.runner.observers[1:] = [shared]
        self.recorder.requests.clear()
        self.played.begin()
        return shared


@pytest.fixture(scope="session")
def tokenizer() -> bytes:
    return trained_tokenizer()


@pytest.fixture(scope="module", params=KINDS)
def layered(
    request: pytest.FixtureRequest, tokenizer: bytes, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Layered]:
    """A server for each kind of layers, and for all tests of a module."""
    kind: str = request.param
    folder = tmp_path_factory.mktemp("models") / kind
    model = write_kind(folder, kind, tokenizer)
    record, played = RequestLog(), Played(script)
    opening = LayeredOpening(settings=SETTINGS, played=played)
    manager = ModelManager(ModelNames(str(folder)), opening, record.watch, record.ended)
    recorder = Recorder(application(manager, record, SETTINGS))
    with manager.load_first().runner as runner, serving(recorder) as url:
        yield Layered(kind, url, model, runner, played, recorder)


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Callable[[str, str, Shared], None]:
    """Put a row into the table that is printed at the end."""

    def add(client: str, kind: str, shared: Shared) -> None:
        counts = shared.requests, shared.tokens, shared.tokens - shared.reused
        row = [client, kind, *(f"{count:,}" for count in counts), f"{shared.share:.1%}"]
        request.config.stash.setdefault(ROWS, []).append(f"| {' | '.join(row)} |")

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rows = terminalreporter.config.stash.get(ROWS, [])
    if rows:
        terminalreporter.section("reuse")
        for line in [HEAD, "|---|---|---|---|---|---|", *sorted(rows)]:
            terminalreporter.write_line(line)
