"""`mlxrunner launch`: a client gets its settings, and nothing is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.checks import ends

from mlxrunner import cli
from mlxrunner.cli.launch import NAMES
from mlxrunner.server.launch import CLIENTS, ServerAddress

MODELS = {
    "data": [
        {"id": "first/model", "context_length": 65536, "input_modalities": ["text"]},
        {"id": "other"},
        {"id": "eyes", "input_modalities": ["text", "image"]},
    ]
}


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    """Serve a list of models, to those with the key "secret" or without one."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(MODELS).encode() if self.path == "/v1/models" else b"no"
            keys = ("Bearer secret", "Bearer none")
            self.send_response(200 if self.headers["Authorization"] in keys else 401)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    found = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield found
    found.shutdown()
    found.server_close()


def launch(server: ThreadingHTTPServer | str, *arguments: str) -> Result:
    url = server if isinstance(server, str) else f"http://127.0.0.1:{server.server_port}"
    return CliRunner().invoke(cli.main, ["launch", "--url", url, *arguments])


def test_claude_gets_the_model_under_each_name_that_it_uses() -> None:
    """Its subagents name haiku, sonnet, opus or fable, or follow a variable of their own."""
    assert tuple(CLIENTS) == NAMES
    found = CLIENTS["claude"](ServerAddress("http://127.0.0.1:1", "first/model")).environment
    own = {"ANTHROPIC_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL"}
    names = own | {f"ANTHROPIC_DEFAULT_{n}_MODEL" for n in ("HAIKU", "SONNET", "OPUS", "FABLE")}
    assert {name for name, value in found.items() if value == "first/model"} == names


@pytest.mark.parametrize("client", NAMES)
def test_print_shows_settings_for_a_shell(server: ThreadingHTTPServer, client: str) -> None:
    """They name the address, the first model and its context."""
    result = launch(server, "--print", client, "--version", "--", "--print")
    assert result.exit_code == 0
    for said in (f"http://127.0.0.1:{server.server_port}", "first/model", "65536"):
        assert said in result.stdout
    last = result.stdout.splitlines()[-1]
    assert last.startswith(client)
    assert last.endswith("--version -- --print")


@pytest.mark.parametrize("url", ["127.0.0.1:{}", "http://127.0.0.1:{}/v1/"])
def test_an_address_is_taken_as_people_write_it(server: ThreadingHTTPServer, url: str) -> None:
    """Without its scheme, or as the base URL of an OpenAI client."""
    result = launch(url.format(server.server_port), "--print", "codex")
    assert f'http://127.0.0.1:{server.server_port}/v1"' in result.stdout


@pytest.mark.parametrize("url", ["", "http://", "ftp://127.0.0.1", "127.0.0.1:port", "[::1", "a b"])
def test_what_is_no_address_is_refused(url: str) -> None:
    result = launch(url, "--print", "codex")
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"--url {url}: it has to be an address such as http://127.0.0.1:8080" in result.stderr


@pytest.mark.parametrize(("model", "sees"), [("first/model", False), ("eyes", True)])
def test_opencode_is_told_that_a_model_takes_pictures(
    server: ThreadingHTTPServer, model: str, sees: bool
) -> None:
    """It does not send them otherwise."""
    result = launch(server, "--model", model, "--print", "opencode")
    assert result.exit_code == 0
    assert ('"modalities": {"input": ["text", "image"]' in result.stdout) == sees
    assert ('"attachment": true' in result.stdout) == sees


@pytest.mark.parametrize("client", NAMES)
def test_a_client_is_started_with_its_settings(
    server: ThreadingHTTPServer, client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program in place of the client tells what it was given; no file is written beside."""
    told = tmp_path / "told"
    program = tmp_path / "bin" / client
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nenv > {told}\nprintf "%s\\n" "$@" >> {told}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    before = set(tmp_path.rglob("*"))
    url = f"http://127.0.0.1:{server.server_port}"
    words = ["--url", url, "--model", "other", "--api-key", "secret", client]
    words += ["-p", "--model", "x y"]
    code = subprocess.call([sys.executable, "-m", "mlxrunner", "launch", *words])
    assert code == 0
    text = told.read_text()
    assert text.endswith("-p\n--model\nx y\n")
    assert all(word in text for word in (url, "secret", "other"))
    assert set(tmp_path.rglob("*")) - before == {told}


@pytest.mark.parametrize(
    ("url", "words", "said"),
    [
        ("", "--model nothing", "has no model 'nothing', only eyes, first/model, other"),
        ("", "--api-key wrong", "answers with status 401; give its key with --api-key"),
        ("", "", "claude is not installed: npm install -g @anthropic-ai/claude-code"),
        ("/x", "", "is not an mlxrunner server"),
        ("http://127.0.0.1:9", "", "nothing answers at http://127.0.0.1:9: start a server"),
    ],
    ids=["model", "key", "client", "other server", "no server"],
)
@pytest.mark.exhaustive(5)
def test_what_is_wrong_is_one_line(
    server: ThreadingHTTPServer, url: str, words: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says what to do: how to install the client, or how to start a server."""
    monkeypatch.setenv("PATH", "/nowhere")
    address = url if "://" in url else f"http://127.0.0.1:{server.server_port}{url}"
    result = launch(address, *words.split(), "claude")
    ends(result, 1, said)
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ("codex --print", "--print"),
        ("opencode -m x --print", "--print"),
        ("claude --url=http://127.0.0.1:9", "--url"),
    ],
)
def test_an_option_after_the_client_that_only_launch_has_is_an_error(words: str, flag: str) -> None:
    """The client would be started, and refuse it."""
    name = words.split()[0]
    result = launch("http://127.0.0.1:9", *words.split())
    ends(
        result, 2, f"{flag} after {name} is given to {name}", f"mlxrunner launch {flag} ... {name}"
    )
