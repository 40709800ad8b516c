"""The server comes back by itself: its parent keeps the socket, and starts the worker again."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest
from support.forking import run_program
from support.program import Running, program
from support.waiting import until

from mlxrunner.errors import OutputError
from mlxrunner.server.events import ApiError
from mlxrunner.server.server import RequestGate
from mlxrunner.server.supervisor import (
    LONG,
    PASSED,
    RequestJournal,
    Supervisor,
    Suspicions,
    begin_journal,
    digest_of,
    open_journal,
    read_journal,
)

POISON = "poison"


@pytest.fixture
def journal() -> Iterator[int]:
    """A file as a parent opens it."""
    with open_journal() as file:
        yield file.fileno()


def worker_of(server: Running) -> int:
    """Return the process id of the worker; 0 while there is none."""
    found = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
    )
    pairs = [tuple(map(int, line.split())) for line in found.stdout.splitlines()]
    return next((pid for pid, parent in pairs if parent == server.process.pid), 0)


def died(known: Suspicions, descriptor: int, *running: str) -> RequestJournal:
    """Let a worker run requests, by digest, and die; return the journal of the next one."""
    journal = RequestJournal(descriptor)
    journal.ready()
    for number, digest in enumerate(running):
        journal.begin(str(number), digest, 100)
    known.learn(read_journal(descriptor, 0.0), "aborted")
    begin_journal(descriptor, known)
    return RequestJournal(descriptor)


def test_only_a_request_that_dies_alone_is_refused(journal: int) -> None:
    """Those that ran at two deaths are tried alone; the others of the second death are not."""
    known = Suspicions()
    begin_journal(journal, known)
    assert died(known, journal, "bad", "one", "two").suspects == set()
    assert died(known, journal, "bad", "two", "three").suspects == {"bad", "two"}
    worker = RequestJournal(journal)
    worker.begin("1", "two", 5)
    worker.clear("two")
    worker.end("1")
    after = died(known, journal, "bad")
    assert (after.suspects, after.refused, after.restarts) == ({"bad"}, {"bad": "aborted"}, 3)
    assert died(known, journal, "two").suspects == {"bad"}


def test_a_request_that_has_ended_is_not_suspicious(journal: int) -> None:
    """Kills of the system at random moments make no suspects of what is answered."""
    known = Suspicions()
    begin_journal(journal, known)
    for _ in range(4):
        worker = died(known, journal, "one")
        assert worker.suspects == set()
        worker.begin("1", "one", 5)
        worker.end("1")
        worker = died(known, journal)
        assert not known.refused


def test_a_journal_tells_what_runs(journal: int) -> None:
    """Damaged lines are skipped, and the file does not grow for ever."""
    begin_journal(journal, Suspicions())
    assert read_journal(journal, 0.0).ready_s is None
    worker = RequestJournal(journal)
    worker.ready()
    worker.begin("a", "first", 10)
    worker.begin("b", "second", 20)
    os.write(journal, b"{broken\n[1]\n" + b"\xff\n")
    worker.prompt(684)
    worker.clear("suspect")
    worker.end("a")
    left = read_journal(journal, 0.0)
    assert left.ready_s is not None
    assert [(one.digest, one.nbytes, one.tokens) for one in left.running.values()] == [
        ("second", 20, 684)
    ]
    for number in range(LONG // 20):
        worker.begin(str(number), "more", 1)
        worker.end(str(number))
    assert os.fstat(journal).st_size < LONG
    later = read_journal(journal, 0.0)
    assert (later.ready_s, later.running, later.cleared) == (
        left.ready_s,
        left.running,
        {"suspect"},
    )


def test_suspects_run_alone(journal: int) -> None:
    """They wait for what runs, and what comes later waits for them; nobody waits for ever."""
    known = Suspicions()
    begin_journal(journal, known)
    body = {name: name.encode() for name in ("bad", "worse", "one", "two")}
    digests = {name: digest_of("/", text) for name, text in body.items()}
    for _ in range(2):
        worker = died(known, journal, digests["bad"], digests["worse"])
    assert worker.suspects == {digests["bad"], digests["worse"]}
    gate, running, order = RequestGate(worker), set[str](), list[str]()

    async def run(name: str, steps: int) -> None:
        async with gate.running(name, "/", body[name]):
            running.add(name)
            order.append(name)
            for _ in range(steps):
                assert len(running) == 1 or not running & {"bad", "worse"}
                await asyncio.sleep(0)
            running.discard(name)

    async def together() -> None:
        first = asyncio.create_task(run("one", 20))
        await asyncio.sleep(0)
        leaves = asyncio.create_task(run("worse", 9))
        others = [asyncio.create_task(run(name, 9)) for name in ("bad", "two", "bad")]
        await asyncio.sleep(0)
        leaves.cancel()  # its client has left
        await asyncio.gather(first, *others)

    asyncio.run(together())
    assert sorted(order) == ["bad", "bad", "one", "two"]
    assert order[:2] == ["one", "bad"]
    assert worker.suspects == {digests["worse"]}
    known.refused[digests["one"]] = "aborted"
    begin_journal(journal, known)

    async def refused() -> None:
        async with RequestGate(RequestJournal(journal)).running("x", "/", body["one"]):
            raise AssertionError

    with pytest.raises(ApiError, match=r"3 times, the last time while nothing else ran \(aborted"):
        asyncio.run(refused())


WORKER = """
import os, sys
from pathlib import Path
from mlxrunner.server.supervisor import RequestJournal
journal = RequestJournal(int(os.environ["MLXRUNNER_SERVE_WORKER"].split()[1]))
plan = Path(sys.argv[1])
act, _, rest = plan.read_text().partition(" ")
plan.write_text(rest)
if act.startswith("ready-"):
    journal.ready()
code = int(act.removeprefix("ready-"))
os._exit(code) if code >= 0 else os.kill(os.getpid(), -code)
"""


def supervised(tmp_path: Path, plan: str, code: str = WORKER) -> tuple[int, str]:
    """Run workers by a plan of their ends; return the exit code and what is left of the plan."""
    file = tmp_path / "plan"
    file.write_text(f"{plan} ")
    with socket.socket() as listening:
        ended = Supervisor(listening, [sys.executable, "-c", code, str(file)]).run()
    return ended, file.read_text()


@pytest.fixture
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxrunner.server.supervisor.LONGEST_S", 0.0)


@pytest.mark.parametrize(
    ("plan", "code", "told"),
    [
        pytest.param("-9", 137, ["the server can't start"], id="killed at its first start"),
        pytest.param("3", 3, [], id="an error of its own at its first start"),
        pytest.param(
            "ready--9 -9 4 ready-0",
            0,
            ["no request was running", "SIGKILL.* not ready yet", "code 4.* not ready yet"],
            id="killed while it starts again",
        ),
        pytest.param(
            "ready--6 ready--6 -6 -6 -6", 134, ["(SIGABRT)"] * 4 + ["died 5 times"], id="for ever"
        ),
    ],
)
@pytest.mark.usefixtures("without_pauses")
def test_a_worker_that_dies_while_it_starts(
    plan: str, code: int, told: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is started again if one was ready before; there is a line for each death."""
    assert supervised(tmp_path, plan) == (code, "")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(told)
    assert all(re.search(one, line) for one, line in zip(told, lines, strict=True)), lines


def full(*_: object, **__: object) -> int:
    raise OSError(28, os.strerror(28))


def test_a_journal_on_a_full_disk_gives_nobody_up(
    journal: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that could not say that it is ready counts as one that was, from its start."""
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        begin_journal(journal, Suspicions())
        worker = RequestJournal(journal)
        worker.begin("a", "first", 10)
        worker.prompt(684)
        worker.end("a")
    assert read_journal(journal, 5.0).ready_s == 5.0


def test_the_parent_loads_no_model() -> None:
    """It has neither mlx nor numpy nor a web framework."""
    code = (
        "import sys, mlxrunner.cli.serve, mlxrunner.server.supervisor\n"
        "heavy = {'mlx', 'mlx_lm', 'numpy', 'fastapi', 'starlette', 'uvicorn', 'transformers'}\n"
        "print(sorted(heavy & {name.partition('.')[0] for name in sys.modules}))\n"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


@pytest.mark.usefixtures("without_pauses")
def test_workers_that_die_at_once_on_a_full_disk_are_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that they write says that they were never ready."""
    monkeypatch.setattr("mlxrunner.server.supervisor.begin_journal", lambda *_: None)
    code = WORKER.replace("journal = ", "journal = None and ")
    assert supervised(tmp_path, "3 3 3 3 3 3", code) == (3, "3 ")


def test_a_server_without_room_for_a_temporary_file_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The journal of its workers is one."""
    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(OutputError, match=r"temporary file \(TMPDIR\): .*No space left"):
        open_journal()


def test_a_worker_that_cant_start_ends_the_parent(tmp_path: Path) -> None:
    """One line says why, with the exit code of that error."""
    command = [sys.executable, "-m", "mlxrunner", "serve", "--port", "0", str(tmp_path / "none")]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode > 0
    assert found.stderr.count("\n") == 1, found.stderr
    assert "none" in found.stderr


DYING = f"""
import os, sys
if "MLXRUNNER_SERVE_WORKER" in os.environ:
    from mlxrunner.engine.engine import Engine
    prepare, step = Engine.prepare, Engine.step
    def prepared(self, prompt, given):
        request = prepare(self, prompt, given)
        request.is_poison = {POISON!r} in self.tokenizer.decode(request.tokens)
        return request
    def stepped(self):
        step(self)
        if any(getattr(one, "is_poison", False) for one in self._scheduler.requests):
            os.abort()
    Engine.prepare, Engine.step = prepared, stepped
from mlxrunner.cli import main
main()
"""


@pytest.mark.exhaustive(0)
def test_a_request_that_aborts_each_step_is_refused_and_costs_nobody_else(model: Path) -> None:
    """The client asks again by itself; another one's conversation continues where it was."""
    with program(str(model), code=DYING) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=9)
        first = worker_of(server)

        def ask(messages: list[dict[str, Any]]) -> Any:
            return client.chat.completions.with_raw_response.create(
                model="tiny", messages=messages, max_tokens=8, temperature=0
            )

        messages = [{"role": "user", "content": "Once upon a time " * 20}]
        begun = ask(messages)
        text = begun.parse().choices[0].message.content
        parent = Path(server.said.partition("on disk in ")[2].splitlines()[0])
        until(lambda: [*parent.glob("*/talk-*")])
        with pytest.raises(openai.BadRequestError, match="ended the server's worker 3 times"):
            ask([{"role": "user", "content": f"a {POISON} of the machine"}])
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": "And then?"},
        ]
        again = ask(messages)
        cached = int(again.headers["x-mlxrunner-cache"].split("cached=")[1].split(";")[0])
        assert cached >= begun.parse().usage.prompt_tokens
        assert worker_of(server) != first
        assert httpx.get(f"{server.url}/health").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        _, said = server.process.communicate(timeout=300)
    told = [line for line in said.decode().splitlines() if "worker has died" in line]
    assert len(told) == 3
    assert all("aborted (SIGABRT)" in line for line in told)
    assert all("1 request was running, with " in line for line in told)
    assert all(" tokens of prompt; it starts again" in line for line in told), told
    assert server.process.returncode == 0


ONCE = """
import os
from pathlib import Path
if "MLXRUNNER_SERVE_WORKER" in os.environ:
    from mlxrunner.engine.engine import Engine
    prepare = Engine.prepare
    def prepared(self, prompt, given):
        request = prepare(self, prompt, given)
        text = self.tokenizer.decode(request.tokens)
        for name in ("first", "second", "third"):
            mark = Path(os.environ["XDG_CACHE_HOME"]) / name
            if name in text and not mark.exists():
                mark.touch()
                os.abort()
        return request
    Engine.prepare = prepared
from mlxrunner.cli import main
main()
"""


class RetryTransport(httpx.HTTPTransport):
    """Asks again if a connection breaks before its answer begins."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        while True:
            try:
                return super().handle_request(request)
            except httpx.RemoteProtocolError:
                pass


@pytest.mark.exhaustive(0)
def test_libraries_ask_again_by_themselves(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their streams come to an end although the worker died when they asked.

    The library ollama leaves that to its transport.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with program(str(model), code=ONCE) as server:
        of_openai = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x")
        stream = of_openai.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "the first"}],
            max_tokens=8,
            stream=True,
        )
        assert [*stream][-1].choices[0].finish_reason in ("stop", "length")
        of_anthropic = anthropic.Anthropic(base_url=server.url, api_key="x")
        with of_anthropic.messages.stream(
            model="tiny", max_tokens=8, messages=[{"role": "user", "content": "the second"}]
        ) as answer:
            assert answer.get_final_message().stop_reason in ("end_turn", "max_tokens")
        of_ollama = ollama.Client(host=server.url, transport=RetryTransport())
        *_, last = of_ollama.generate(
            "tiny", "the third", stream=True, raw=True, options={"num_predict": 8}
        )
        assert last.done_reason in ("stop", "length")
        assert {path.name for path in tmp_path.iterdir()} >= {"first", "second", "third"}


@pytest.mark.exhaustive(0)
def test_a_worker_whose_parent_has_died_before_it_looked_ends() -> None:
    """It is no server of its own, which nobody could stop."""
    told = run_program(
        *("-m", "mlxrunner", "serve", "--port", "0"),
        env=os.environ | {PASSED: f"3 4 {os.getpid()}"},
        timeout=300,
    )
    assert (told.returncode, told.stdout, told.stderr) == (128 + signal.SIGTERM, b"", b"")


@pytest.mark.exhaustive(0)
def test_a_worker_ends_with_its_parent(model: Path) -> None:
    """Also while it loads; its conversations are on disk."""
    with program(str(model)) as server:
        server.ask("Once upon a time " * 20)
        worker = worker_of(server)
        server.process.kill()
        server.process.wait()

        def is_gone() -> bool:
            try:
                os.kill(worker, 0)
            except ProcessLookupError:
                return True
            return False

        until(is_gone)
    parent = Path(server.said.partition("on disk in ")[2].splitlines()[0])
    assert [*parent.glob("*/talk-*")]
