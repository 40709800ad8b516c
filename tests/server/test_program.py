"""The program itself: what it prints, how it is stopped, and what the next one finds."""

from __future__ import annotations

import json
import os
import plistlib
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner
from support.program import program, started

from mlxrunner.cli import main
from mlxrunner.config.file import read_config_file
from mlxrunner.profiling.report.screen import find_event
from mlxrunner.server.launch import unit

CONTEXT = 1500


def left(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    """Wait for the end of a process; return its exit code and what it said last."""
    _, said = process.communicate(timeout=300)
    return process.returncode, said.decode()


def test_from_start_to_the_next_start(model: Path, tmp_path: Path) -> None:
    """SIGTERM lets a running stream end, parks what is idle, and the next server finds it.

    A server beside the first has a folder of its own, which goes with it, as its welcome says.
    """
    events = tmp_path / "events.jsonl"
    options = (str(model), "--slots", "2", "--events", str(events), "--set", "drain=300")
    prompt = "Once upon a time " * 20
    with program(*options) as server:
        assert "serving tiny at http://127.0.0.1:" in server.said
        assert f"{CONTEXT} tokens of context" in server.said
        assert re.search(r"on disk in \S+/serve\n", server.said)
        with program(str(model)) as second:
            own = re.search(
                r"on disk in (\S+/parked/own-\w+), until this server ends\n", second.said
            )
            assert own is not None, second.said
            assert Path(own[1]).is_dir()
            second.process.send_signal(signal.SIGTERM)
            assert left(second.process)[0] == 0
        assert not Path(own[1]).exists()
        assert f"ANTHROPIC_BASE_URL={server.url} ANTHROPIC_MODEL=tiny" in server.said
        first = server.ask(prompt)
        assert first.headers["x-mlxrunner-cache"].startswith("outcome=miss; cached=0")
        request = first.headers["x-request-id"]
        slots = httpx.get(f"{server.url}/slots").json()["models"][0]["conversations"]
        assert [(one["state"], one["request"], one["client"]) for one in slots] == [
            ("idle", request, "python-httpx")
        ]
        assert slots[0]["tokens"] > len(prompt)
        assert slots[0]["bytes"] > 0
        explained = httpx.get(f"{server.url}/explain/{request}").text
        assert f"request {request} of python-httpx" in explained
        assert "0 of 341 prompt tokens were reused" in explained
        while_running = find_event([events], request)
        assert while_running.caller.request == request
        metrics = httpx.get(f"{server.url}/metrics").text
        assert 'mlxrunner_requests_total{finish="length",model="' in metrics
        assert "mlxrunner_server_slots{" in metrics
        body = server.body("And then?", stream=True, max_tokens=CONTEXT)
        with httpx.stream("POST", f"{server.url}/v1/messages", json=body, timeout=300) as stream:
            lines = stream.iter_lines()
            assert next(lines) == "event: message_start"
            assert httpx.head(f"{server.url}/health").status_code == 200
            busy = httpx.get(f"{server.url}/health").json()
            assert busy["status"] == "ok"
            server.process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert "event: message_stop" in rest
        code, said = left(server.process)
        assert code == 0
        assert "stopping; up to 300 s for 1 running requests; Ctrl-C leaves at once" in said
    with program(*options) as server:
        again = server.ask(prompt)
        cached = int(again.headers["x-mlxrunner-cache"].split("cached=")[1].split(";")[0])
        assert cached == json.loads(first.text)["usage"]["input_tokens"] - 1
        server.process.send_signal(signal.SIGINT)
        assert left(server.process)[0] == 0


def test_answers_are_stored_as_the_model_wrote_them() -> None:
    """They are there after kill -9, in the folder of the conversations, for this user alone."""
    with program("demo") as server:
        answer = server.ask("Hello", model="", temperature=0).json()["content"][0]["text"]
        parent = Path(server.said.partition("on disk in ")[2].splitlines()[0])
        server.process.kill()
    stored = [path for path in parent.glob("*/answers.jsonl") if answer in path.read_text()]
    assert stored
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in stored)


def test_a_stream_that_takes_longer_than_the_drain(model: Path) -> None:
    """It ends with an error that says why, and the server ends in order."""
    with program(str(model), "--no-disk-cache", "--set", "drain=0") as server:
        body = server.body("And then?", stream=True, max_tokens=CONTEXT)
        with httpx.stream("POST", f"{server.url}/v1/messages", json=body, timeout=300) as stream:
            lines = stream.iter_lines()
            assert next(lines) == "event: message_start"
            server.process.send_signal(signal.SIGTERM)
            *_, event, data, end = lines
        assert (event, end) == ("event: error", "")
        assert "the server is stopping" in data
        code, said = left(server.process)
        assert code == 0
        assert "Traceback" not in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("at", ["start", "end"])
def test_a_signal_beside_the_event_loop(model: Path, number: signal.Signals, at: str) -> None:
    """Before it begins, and while conversations are parked, a signal ends the server in order."""
    raised = f"signal.raise_signal({int(number)})"
    code = (
        "import signal, uvloop\n"
        "from mlxrunner.cli import main\n"
        "from mlxrunner.server.manager import ModelManager\n"
        "run, close = uvloop.run, ModelManager.close\n"
        "def begin(main):\n"
        f"    {raised if at == 'start' else 'pass'}\n"
        "    run(main)\n"
        "async def end(self):\n"
        f"    {raised if at == 'end' else 'pass'}\n"
        "    await close(self)\n"
        "    print('closed')\n"
        "uvloop.run, ModelManager.close = begin, end\n"
        "main()\n"
    )
    command = [sys.executable, "-c", code, "serve", str(model), "--no-disk-cache", "--port", "0"]
    command += ["--prefill-step", "64"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if at == "end":
        started(process)
        process.send_signal(signal.SIGTERM)
    told, said = process.communicate(timeout=300)
    leaves_at_once = at == "end" and number == signal.SIGINT
    assert process.returncode == (130 if leaves_at_once else 0)
    assert told.decode() == ("" if leaves_at_once else "closed\n")
    assert said.decode().count("stopping; Ctrl-C leaves at once") == 1
    assert "Traceback" not in said.decode()


def test_a_stop_while_a_model_is_loaded(model: Path) -> None:
    """The server does not wait for it, and ends in order."""
    code = (
        "import sys, threading\n"
        "from mlxrunner.server.models import ModelLoader\n"
        "from mlxrunner.cli import main\n"
        "load = ModelLoader.load\n"
        "def stuck(self, name, *more):\n"
        "    if name != 'demo':\n"
        "        return load(self, name, *more)\n"
        "    print('stuck', file=sys.stderr, flush=True)\n"
        "    threading.Event().wait()\n"
        "ModelLoader.load = stuck\n"
        "main()\n"
    )
    with program(str(model), "--no-disk-cache", "--set", "drain=0", code=code) as server:
        body = json.dumps(server.body("Hello", model="demo"))
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as waiting:
            head = f"POST /v1/messages HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}"
            kind = "Content-Type: application/json"
            waiting.sendall(f"{head}\r\n{kind}\r\n\r\n{body}".encode())
            assert server.process.stderr.readline() == b"stuck\n"
            server.process.send_signal(signal.SIGTERM)
            code_, said = left(server.process)
    assert (code_, "Traceback" in said) == (0, False), said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "lets other machines ask: give --api-key KEY, or --no-key"),
        (["--host", "0.0.0.0", "--unit", "systemd"], "lets other machines ask: give --api-key"),
        (["--api-key", "x", "--no-key"], "contradict each other"),
        (
            ["--host", "not.a.host.invalid", "--no-key"],
            "--host not.a.host.invalid: no such address",
        ),
        (["--slots", "0"], "slots: 0 is out of range"),
        (["--port", "70000"], "port: 70000 is out of range"),
        (
            ["--set", "disable_rewrite=billing"],
            "there is no such rule: did you mean 'billing-header'?",
        ),
    ],
    ids=["no key", "no key in a unit", "both", "no host", "slots", "port", "rule"],
)
@pytest.mark.exhaustive(6)
def test_what_is_refused_at_once(arguments: list[str], words: str) -> None:
    """Nothing is loaded before the options are right."""
    result = CliRunner().invoke(main, ["serve", *arguments])
    assert (result.exit_code, words in result.stderr) == (2, True), result.stderr


def test_a_port_in_use() -> None:
    """One line names the port and says what to do."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = CliRunner().invoke(main, ["serve", "--port", str(port)])
    assert result.exit_code == 2
    assert f"port {port} of 127.0.0.1 is in use" in result.stderr
    assert "choose another --port" in result.stderr
    assert result.stderr.count("\n") == 1


def test_units() -> None:
    """Both run the same command in the same folder, with the variables that decide how it runs.

    What means something to systemd is quoted, notes are comments, and no secret is in the file.
    """
    command = ["/bin/mlxrunner", "serve", "my model", "--port", "9", "--events", "50%$x"]
    folder = Path("/home/me/100% mine")
    environment = {"HF_HOME": '/a "b" 5%', "MLXRUNNER_API_KEY": "secret", "HOME": "/home/me"}
    notes = ("Mind the gap.",)
    text = unit("launchd", command, folder, drain=5, environment=environment, notes=notes)
    assert "<!-- Mind the gap. -->" in text
    agent = plistlib.loads(text.encode())
    assert agent["EnvironmentVariables"] == {"HF_HOME": '/a "b" 5%'}
    assert agent["ProgramArguments"] == command
    assert agent["WorkingDirectory"] == str(folder)
    assert agent["ExitTimeOut"] == 35
    service = unit("systemd", command, folder, drain=5, environment=environment, notes=notes)
    assert "\n# Mind the gap.\n[Unit]\n" in service
    assert 'Environment="HF_HOME=/a \\"b\\" 5%%"\n' in service
    assert service.count("Environment=") == 1
    assert "ExecStart=/bin/mlxrunner serve 'my model' --port 9 --events '50%%$$x'\n" in service
    assert "WorkingDirectory=/home/me/100%% mine\n" in service
    assert "TimeoutStopSec=35" in service


@pytest.mark.parametrize(
    ("program", "command"),
    [
        ("mlxrunner", [os.path.abspath("mlxrunner")]),
        ("/lib/mlxrunner/__main__.py", [sys.executable, "-m", "mlxrunner"]),
    ],
)
def test_the_unit_option(program: str, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It prints the command without itself, as the system can run it."""
    arguments = ["serve", "--unit", "systemd", "--slots", "3"]
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0
    assert f"ExecStart={' '.join(command)} serve --slots 3\n" in result.stdout
    assert f"WorkingDirectory={os.getcwd()}\n" in result.stdout


def test_a_key_of_the_environment_is_not_in_the_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line says where it belongs; OpenBLAS, without which Linux is slow, is in the unit."""
    arguments = ["serve", "--unit", "systemd"]
    monkeypatch.setattr(sys, "argv", ["mlxrunner", *arguments])
    variables = {"MLXRUNNER_API_KEY": "secret", "LD_PRELOAD": "/lib/libopenblas.so.0"}
    result = CliRunner(env=variables).invoke(main, arguments)
    assert 'Environment="LD_PRELOAD=/lib/libopenblas.so.0"\n' in result.stdout
    assert "secret" not in result.output
    assert result.stderr.count("\n") == 1
    assert "api_key in [serve]" in result.stderr
    assert "\n# the key is not in this file: put it into the config file" in result.stdout
    file = tmp_path / "config.toml"
    file.write_text('[serve]\napi_key = "secret"\n')
    file.chmod(0o600)
    result = CliRunner(env={"MLXRUNNER_CONFIG": str(file)}).invoke(main, arguments)
    assert ("secret" in result.output, result.stderr) == (False, "")


@pytest.mark.parametrize("kind", ["launchd", "systemd"])
@pytest.mark.parametrize("key", [["--api-key", "secret"], ["--api-key=secret"]], ids=str)
def test_a_typed_key_is_not_in_the_unit(
    kind: str, key: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody could read it there. A comment and one line say where it belongs."""
    arguments = ["serve", *key, "--unit", kind, "--host", "0.0.0.0", "--slots", "3"]
    monkeypatch.setattr(sys, "argv", ["mlxrunner", *arguments])
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, "secret" in result.output) == (0, False)
    assert "--api-key" not in result.stdout
    assert "api_key in [serve]" in result.stdout
    assert "api_key in [serve]" in result.stderr
    assert result.stderr.count("\n") == 1
    if kind == "systemd":
        assert "serve --host 0.0.0.0 --slots 3\n" in result.stdout


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644])
def test_a_key_that_others_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    """One line says so, before the server starts."""
    file = tmp_path / "config.toml"
    file.write_text('[serve]\napi_key = "secret"\n')
    file.chmod(mode)
    arguments = ["serve", "--unit", "systemd"]
    monkeypatch.setattr(sys, "argv", ["mlxrunner", *arguments])
    result = CliRunner(env={"MLXRUNNER_CONFIG": str(file)}).invoke(main, arguments)
    said = f"others can read the key in {file} (mode {mode:04o}): chmod 600 it\n"
    assert (result.exit_code, result.stderr) == (0, "" if mode == 0o600 else said)


@pytest.mark.parametrize(
    "origin", ["foo", "http://", "http://a/b", "localhost:3000", "http://localhost:*"]
)
def test_an_origin_that_no_page_has(origin: str) -> None:
    result = CliRunner().invoke(main, ["serve", "--allow-origin", origin])
    assert result.exit_code == 2
    assert f"--allow-origin {origin}: has to be the beginning of a page's URL" in result.stderr


def test_config_shows_no_key(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[serve]\napi_key = "secret"\n')
    for more in ([], ["--json"]):
        result = CliRunner(env={"MLXRUNNER_CONFIG": str(file)}).invoke(main, ["config", *more])
        assert (result.exit_code, "secret" in result.output) == (0, False)
        assert "***" in result.output


def test_the_config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a section for the server; a wrong value is named with its line."""
    file = tmp_path / "config.toml"
    monkeypatch.setenv("MLXRUNNER_CONFIG", str(file))
    file.write_text(
        '[serve]\nport = 9000\nallow_origin = "http://localhost:3000"\ntemperature = 0.5\n'
    )
    file.chmod(0o600)
    found = read_config_file().options("serve", "demo")
    assert {name: one.value for name, one in found.items()} == {
        "port": 9000,
        "allow_origin": ("http://localhost:3000",),
        "temperature": 0.5,
    }
    result = CliRunner().invoke(main, ["serve", "--host", "0.0.0.0"])
    assert "lets other machines ask" in result.stderr
    file.write_text("[serve]\nslots = 0\n")
    result = CliRunner().invoke(main, ["serve"])
    assert "line 2: slots: 0 is out of range" in result.stderr
