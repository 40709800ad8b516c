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
from unittest import mock

import httpx
import pytest
from click.testing import CliRunner, Result
from support.program import program, started
from support.scripted import asking

from mlxrunner.cli import main
from mlxrunner.config.file import read_config_file
from mlxrunner.profiling.report.screen import find_event
from mlxrunner.server.launch import unit

CONTEXT = 1500


def left(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    """Wait for the end of a process; return its exit code and what it said last."""
    _, said = process.communicate(timeout=300)
    return process.returncode, said.decode()


@pytest.mark.exhaustive(0)
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
                r"on disk in (\S+/parked/own-\w+), until the model is unloaded\n", second.said
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


@pytest.mark.exhaustive(0)
def test_answers_are_stored_as_the_model_wrote_them() -> None:
    """They are there after kill -9, in the folder of the conversations, for this user alone."""
    with program("demo") as server:
        answer = server.ask("Hello", model="", temperature=0).json()["content"][0]["text"]
        parent = Path(server.said.partition("on disk in ")[2].splitlines()[0])
        server.process.kill()
    stored = [path for path in parent.glob("*/answers.jsonl") if answer in path.read_text()]
    assert stored
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in stored)


@pytest.mark.exhaustive(0)
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


BESIDE = """
import signal, uvloop
from mlxrunner.cli import main
from mlxrunner.server.manager import ModelManager
run, close = uvloop.run, ModelManager.close
def begin(main):
    START
    run(main)
async def end(self):
    END
    await close(self)
    print('closed')
uvloop.run, ModelManager.close = begin, end
main()
"""


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("at", ["START", "END"])
def test_a_signal_beside_the_event_loop(model: Path, number: signal.Signals, at: str) -> None:
    """Before it begins, and while conversations are parked, a signal ends the server in order."""
    code = BESIDE.replace(at, f"signal.raise_signal({int(number)})")
    code = code.replace("START", "pass").replace("END", "pass")
    command = [sys.executable, "-c", code, "serve", str(model), "--no-disk-cache", "--port", "0"]
    command += ["--prefill-step", "64"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if at == "END":
        started(process)
        process.send_signal(signal.SIGTERM)
    told, said = process.communicate(timeout=300)
    leaves_at_once = at == "END" and number == signal.SIGINT
    assert process.returncode == (130 if leaves_at_once else 0)
    assert told.decode() == ("" if leaves_at_once else "closed\n")
    assert said.decode().count("stopping; Ctrl-C leaves at once") == 1
    assert "Traceback" not in said.decode()


STUCK = """
import sys, threading
from mlxrunner.server.models import ModelLoader
from mlxrunner.cli import main
load = ModelLoader.load
def stuck(self, name, *more):
    if name != 'demo':
        return load(self, name, *more)
    print('stuck', file=sys.stderr, flush=True)
    threading.Event().wait()
ModelLoader.load = stuck
main()
"""


@pytest.mark.exhaustive(0)
def test_a_stop_while_a_model_is_loaded(model: Path) -> None:
    """The server does not wait for it, and ends in order."""
    with (
        program(str(model), "--no-disk-cache", "--set", "drain=0", code=STUCK) as server,
        asking(f"{server.url}/v1/messages", server.body("Hello", model="demo")),
    ):
        assert server.process.stderr.readline() == b"stuck\n"
        server.process.send_signal(signal.SIGTERM)
        code, said = left(server.process)
    assert (code, "Traceback" in said) == (0, False), said


def serve(*arguments: str, config: Path | None = None, **variables: str) -> Result:
    """Run the command in this process, as if it had been typed so."""
    words = ["serve", *arguments]
    if config is not None:
        variables["MLXRUNNER_CONFIG"] = str(config)
    with mock.patch.object(sys, "argv", ["mlxrunner", *words]):
        return CliRunner(env=variables).invoke(main, words)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config file that has a key, which others can't read."""
    file = tmp_path / "config.toml"
    file.write_text('[serve]\napi_key = "secret"\n')
    file.chmod(0o600)
    return file


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--host 0.0.0.0", "lets other machines ask: give --api-key KEY, or --no-key"),
        ("--host 0.0.0.0 --unit systemd", "lets other machines ask: give --api-key"),
        ("--api-key x --no-key", "contradict each other"),
        ("--host not.a.host.invalid --no-key", "--host not.a.host.invalid: no such address"),
        ("--slots 0", "slots: 0 is out of range"),
        ("--port 70000", "port: 70000 is out of range"),
        ("--set disable_rewrite=billing", "there is no such rule: did you mean 'billing-header'?"),
        *(
            (f"--allow-origin {one}", f"--allow-origin {one}: has to be the beginning of a page's")
            for one in "foo http:// http://a/b localhost:3000 http://localhost:*".split()
        ),
    ],
)
@pytest.mark.exhaustive(8)
def test_what_is_refused_at_once(words: str, said: str) -> None:
    """Nothing is loaded before the options are right."""
    result = serve(*words.split())
    assert (result.exit_code, said in result.stderr) == (2, True), result.stderr


def test_a_port_in_use() -> None:
    """One line names the port and says what to do."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = serve("--port", str(port))
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


def test_a_key_of_the_environment_is_not_in_the_unit(config: Path) -> None:
    """One line says where it belongs; OpenBLAS, without which Linux is slow, is in the unit."""
    blas = {"LD_PRELOAD": "/lib/libopenblas.so.0"}
    result = serve("--unit", "systemd", MLXRUNNER_API_KEY="secret", **blas)
    assert 'Environment="LD_PRELOAD=/lib/libopenblas.so.0"\n' in result.stdout
    assert "secret" not in result.output
    assert result.stderr.count("\n") == 1
    assert "api_key in [serve]" in result.stderr
    assert "\n# the key is not in this file: put it into the config file" in result.stdout
    result = serve("--unit", "systemd", config=config)
    assert ("secret" in result.output, result.stderr) == (False, "")


@pytest.mark.parametrize("kind", ["launchd", "systemd"])
@pytest.mark.parametrize("key", [["--api-key", "secret"], ["--api-key=secret"]], ids=str)
def test_a_typed_key_is_not_in_the_unit(kind: str, key: list[str]) -> None:
    """Everybody could read it there. A comment and one line say where it belongs."""
    result = serve(*key, "--unit", kind, "--host", "0.0.0.0", "--slots", "3")
    assert (result.exit_code, "secret" in result.output) == (0, False)
    assert "--api-key" not in result.stdout
    assert "api_key in [serve]" in result.stdout
    assert "api_key in [serve]" in result.stderr
    assert result.stderr.count("\n") == 1
    if kind == "systemd":
        assert "serve --host 0.0.0.0 --slots 3\n" in result.stdout


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644])
def test_a_key_that_others_can_read(config: Path, mode: int) -> None:
    """One line says so, before the server starts."""
    config.chmod(mode)
    result = serve("--unit", "systemd", config=config)
    said = f"others can read the key in {config} (mode {mode:04o}): chmod 600 it\n"
    assert (result.exit_code, result.stderr) == (0, "" if mode == 0o600 else said)


def test_config_shows_no_key(config: Path) -> None:
    for more in ([], ["--json"]):
        result = CliRunner(env={"MLXRUNNER_CONFIG": str(config)}).invoke(main, ["config", *more])
        assert (result.exit_code, "secret" in result.output) == (0, False)
        assert "***" in result.output


def test_the_config_file(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a section for the server; a wrong value is named with its line."""
    monkeypatch.setenv("MLXRUNNER_CONFIG", str(config))
    origin = "http://localhost:3000"
    config.write_text(f'[serve]\nport = 9000\nallow_origin = "{origin}"\ntemperature = 0.5\n')
    found = read_config_file().options("serve", "demo")
    values = {"port": 9000, "allow_origin": (origin,), "temperature": 0.5}
    assert {name: one.value for name, one in found.items()} == values
    assert "lets other machines ask" in serve("--host", "0.0.0.0").stderr
    config.write_text("[serve]\nslots = 0\n")
    assert "line 2: slots: 0 is out of range" in serve().stderr
