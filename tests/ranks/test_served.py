"""A server whose model several ranks share: its clients, its end, and the loss of a rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from tests.support.program import Running, program, started
from tests.support.ranks import launched, ranks_of, wait_until_gone, write_models

LONG = 4000
"""Tokens of an answer that a test ends before its end."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that 2 ranks can share."""
    return write_models(tmp_path_factory.mktemp("models"), "llama") / "llama"


@contextmanager
def serving(model: Path, folder: Path, *options: str) -> Iterator[Running]:
    """Serve `model` on 2 ranks until the block ends."""
    words = ("serve", str(model), "--tensor-parallel", "--port", "0", "--slots", "2", *options)
    with launched(folder, *words) as process:
        yield started(process)


def said_to(server: Running, text: str) -> tuple[str, int]:
    """Return the greedy answer to `text`, and the tokens of the prompt that were reused."""
    found = server.ask(text, model="", temperature=0)
    assert found.status_code == 200, found.text
    usage = found.json()["usage"]
    return found.json()["content"][0]["text"], usage["cache_read_input_tokens"]


@pytest.mark.exhaustive(0)
def test_answers_are_those_of_one_process(model: Path, tmp_path: Path) -> None:
    """Conversations take turns, fork, are given up and left by their clients; none is parked."""
    texts = ["Once upon a time", "Once upon a day", "Quite another text", "Once upon a time, yes"]
    asked = [*texts, *reversed(texts)]
    with program(str(model), "--no-disk-cache", "--slots", "2") as alone:
        expected = [said_to(alone, text) for text in asked]
    with serving(model, tmp_path) as server:
        assert "2 ranks, 2 slots, " in server.said
        assert "what finds no room is lost" in server.said
        assert [said_to(server, text) for text in asked] == expected
        body = server.body(texts[0], model="", stream=True, max_tokens=LONG)
        with httpx.stream("POST", f"{server.url}/v1/messages", json=body, timeout=300) as stream:
            assert next(stream.iter_lines()) == "event: message_start"
        assert said_to(server, texts[3])[0] == expected[3][0]
        unload = {"model": model.name, "keep_alive": 0}
        assert httpx.post(f"{server.url}/api/generate", json=unload, timeout=300).is_success
        assert httpx.get(f"{server.url}/api/ps").json()["models"] == []
        assert said_to(server, texts[0]) == (expected[0][0], 0)
        ranks = ranks_of(server.process)
        server.process.send_signal(signal.SIGTERM)
        _, told = server.process.communicate()
        assert server.process.returncode == 0, told
        assert b"[ring]" not in told
        wait_until_gone(*ranks)


@pytest.mark.exhaustive(0)
def test_only_one_model_is_served(model: Path, tmp_path: Path) -> None:
    """A client can't make a rank load what it may lack: that would end all of them."""
    with serving(model, tmp_path) as server:
        found = server.ask("Hello", model="demo")
        assert found.status_code == 404
        assert "there is no model demo: this server has llama." in found.text
        listed = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert [one["id"] for one in listed] == ["llama"]


@pytest.mark.parametrize(
    ("lost", "number", "line"),
    [
        (1, signal.SIGKILL, b"rank 1 (127.0.0.1): has ended by signal 9\n"),
        (1, signal.SIGSTOP, b"rank 1 (127.0.0.1): has been stopped for 5 s\n"),
        (0, signal.SIGKILL, b"rank 0 (127.0.0.1): has ended by signal 9\n"),
    ],
    ids=["1, killed", "1, stopped", "0, killed"],
)
@pytest.mark.exhaustive(0)
def test_a_rank_lost_in_an_answer_ends_the_server(
    lost: int, number: int, line: bytes, model: Path, tmp_path: Path
) -> None:
    """The client's stream ends, the command says which rank it was, and no rank is left."""
    with serving(model, tmp_path) as server:
        ranks = ranks_of(server.process)
        body = server.body("And then?", model="", stream=True, max_tokens=LONG)
        with httpx.stream("POST", f"{server.url}/v1/messages", json=body, timeout=300) as stream:
            lines = stream.iter_lines()
            assert next(lines) == "event: message_start"
            os.kill(ranks[lost], number)
            with suppress(httpx.HTTPError):  # the server ended before it could say so
                assert "event: error" in list(lines)
        _, told = server.process.communicate()
        assert server.process.returncode == 1
        assert b"mlxrunner: " + line in told
        assert b"Traceback" not in told
        wait_until_gone(*ranks)


@pytest.mark.exhaustive(0)
def test_a_second_interrupt_leaves_at_once(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path, "--set", "drain=3000") as server:
        ranks = ranks_of(server.process)
        body = server.body("And then?", model="", stream=True, max_tokens=LONG)
        with httpx.stream("POST", f"{server.url}/v1/messages", json=body, timeout=300) as stream:
            assert next(stream.iter_lines()) == "event: message_start"
            assert server.process.stderr is not None
            server.process.send_signal(signal.SIGINT)
            while b"stopping" not in server.process.stderr.readline():
                assert server.process.poll() is None
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait() == 130
        wait_until_gone(*ranks)
