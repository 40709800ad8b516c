"""Ollama's API, asked by its own Python client and as curl does."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
from fastapi import FastAPI
from support.scripted import CALLS, CARD, HI, TOOL, Scripted, asking, call, ended, serving
from support.waiting import until

from mlxrunner.batch.openai_format import TokenLogprob
from mlxrunner.errors import ModelError, NoSuchModelError
from mlxrunner.server.events import ApiError, TextDelta, ThinkingDelta
from mlxrunner.server.ollama import router, seconds_of


@pytest.fixture
def client(url: str) -> ollama.Client:
    return ollama.Client(url)


def test_a_stream_says_what_a_whole_answer_does(client: ollama.Client, answers: Scripted) -> None:
    """A call comes when it is whole. The times are in nanoseconds."""
    answers.script = CALLS
    whole = client.chat("tiny", HI, tools=[TOOL], think=True)
    assert (whole.message.content, whole.message.thinking) == ("I'll read.", "Let me see.")
    assert whole.total_duration is not None
    assert whole.total_duration >= 750_000_000
    assert answers.last.client.name == "ollama-python"
    lines = list(client.chat("tiny", HI, tools=[TOOL], stream=True, think=True))
    assert "".join(line.message.content or "" for line in lines) == "I'll read."
    assert "".join(line.message.thinking or "" for line in lines) == "Let me see."
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    streamed = [one for line in lines for one in line.message.tool_calls or ()]
    for calls in (streamed, whole.message.tool_calls or ()):
        functions = [(one.function.name, one.function.arguments) for one in calls]
        assert functions == [("read", {"path": "a"}), ("read", {"path": "b"})]


def test_what_came_out_goes_in_again(client: ollama.Client, answers: Scripted) -> None:
    """Calls get ids, and results theirs, though the messages have none."""
    answers.script = [ThinkingDelta("See."), call(0, "read", "{}"), call(1, "read", "{}"), ended()]
    message = client.chat("tiny", HI).message
    results = [{"role": "tool", "tool_name": "read", "content": text} for text in "ab"]
    client.chat("tiny", [*HI, message, *results])
    _, assistant, one, other = answers.last.messages
    assert assistant["reasoning_content"] == "See."
    ids = [called["id"] for called in assistant["tool_calls"]]
    assert len(set(ids)) == 2
    assert [one["tool_call_id"], other["tool_call_id"]] == ids
    assert (one["name"], one["content"], other["content"]) == ("read", "a", "b")


def test_a_prompt(client: ollama.Client, answers: Scripted) -> None:
    """It comes with a system prompt, or raw, whole or streamed."""
    response = client.generate("tiny", "Hi", system="Be brief.")
    assert (response.response, response.done_reason) == ("Hello", "stop")
    lines = list(client.generate("tiny", "Hi", raw=True, stream=True))
    assert "".join(line.response or "" for line in lines) == "Hello"
    assert (answers.last.prompt, list(answers.last.messages)) == ("Hi", [])


@pytest.mark.parametrize("think", [True, "low"])
def test_a_model_that_does_not_think(url: str, answers: Scripted, think: object) -> None:
    """It is refused to think, as Ollama does, and answers otherwise."""
    answers.model = replace(CARD, has_thinking=False)
    prompts: dict[str, dict[str, object]] = {"chat": {"messages": HI}, "generate": {"prompt": "Hi"}}
    for path, prompt in prompts.items():
        body = {"model": "tiny", **prompt, "think": think, "stream": False}
        refused = httpx.post(f"{url}/api/{path}", json=body)
        assert refused.status_code == 400
        assert refused.json()["error"].startswith('"tiny" does not support thinking')
        assert httpx.post(f"{url}/api/{path}", json={**body, "think": False}).is_success
    assert [one.thinking for one in answers.asked] == [False, False]


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({"num_predict": -1, "seed": -1, "repeat_last_n": -1}, {}),
        ({"repeat_penalty": 1.1, "repeat_last_n": 64}, (1.1, 64)),
        ({"repeat_penalty": 1.1, "repeat_last_n": 0}, {}),
        ({"num_gpu": 1, "num_thread": 4, "mirostat": 0, "min_p": 0.1}, {"min_p": 0.1}),
    ],
    ids=["no limit", "penalty", "no penalty", "others"],
)
def test_options(client: ollama.Client, answers: Scripted, given: Any, options: Any) -> None:
    """Their words for "no limit" are ours; what concerns only loading is left out."""
    client.chat("tiny", HI, options=given)
    if isinstance(options, tuple):
        options = dict(zip(("repetition_penalty", "penalty_context"), options, strict=True))
    assert answers.last.options == options


def test_logprobs(client: ollama.Client, answers: Scripted) -> None:
    token = TokenLogprob("Hi", 1, -0.5, (("Hi", 1, -0.5), ("Ho", 2, float("-inf"))))
    answers.script = [TextDelta("Hi", (token,)), ended()]
    (one,) = client.chat("tiny", HI, logprobs=True, top_logprobs=2).logprobs or ()
    assert (one.token, one.logprob) == ("Hi", -0.5)
    assert [other.logprob for other in one.top_logprobs or ()] == [-0.5, -9999.0]


def test_an_empty_request_loads_or_unloads(client: ollama.Client, answers: Scripted) -> None:
    """Commands of Ollama do so."""
    assert client.generate("tiny").done_reason == "load"
    assert client.chat("tiny", keep_alive=-1).done_reason == "load"
    assert client.generate("tiny", keep_alive=0).done_reason == "unload"
    assert answers.held == [("tiny", None), ("tiny", -1), ("tiny", 0)]
    with pytest.raises(ollama.ResponseError, match="no model 'absent'"):
        client.generate("absent")


def test_durations() -> None:
    """Numbers are seconds, texts have units; anything else is refused by name."""
    texts = {"90": 90, "5m": 300, "1h30m": 5400, "-1m": -60, "500ms": 0.5}
    known: dict[Any, float | None] = {None: None, 90: 90, **texts}
    assert {given: seconds_of(given) for given in known} == known
    for wrong in ("soon", "5 m", "", "5m!", float("inf"), "nan"):
        with pytest.raises(ApiError, match="keep_alive: it has to be seconds"):
            seconds_of(wrong)


def test_models(client: ollama.Client) -> None:
    """Clients learn which are here, which are loaded, and what one can do."""
    (listed,) = client.list().models
    assert (listed.model, listed.digest, listed.size) == ("tiny", "abc123", 1234)
    assert listed.modified_at is not None
    (running,) = client.ps().models
    assert (running.model, running.context_length, running.size_vram) == ("tiny", 4096, 1234)
    assert running.expires_at is not None
    for name in ("tiny", "tiny:latest"):
        shown = client.show(name)
        assert shown.capabilities == ["completion", "tools", "thinking"]
        assert shown.modelinfo["llama.context_length"] == 4096
    with pytest.raises(ollama.ResponseError, match="there is no model other") as raised:
        client.show("other")
    assert raised.value.status_code == 404


def test_probes(url: str) -> None:
    """A client finds out that it is Ollama's API, and which version."""
    for path in ("", "/api/tags", "/api/version"):
        assert httpx.head(f"{url}{path}").status_code == 200
    version = httpx.get(f"{url}/api/version").json()["version"].split(".")
    assert (0, 13, 4) <= tuple(map(int, version)) < (1, 0, 0)  # Codex refuses older ones


@pytest.mark.parametrize("name", ["suffix", "template", "context"])
def test_what_would_change_the_answer_is_refused(url: str, name: str) -> None:
    """Their clients send these fields empty, too. Tokens have a remedy, and are not repeated."""
    empty, given = ([], list(range(10_000))) if name == "context" else ("", "a")
    body = {"model": "tiny", "prompt": "Hi"}
    assert httpx.post(f"{url}/api/generate", json=body | {name: empty}).is_success
    refused = httpx.post(f"{url}/api/generate", json=body | {name: given})
    error = refused.json()["error"]
    assert (refused.status_code, len(error) < 200) == (400, True)
    if name == "context":
        assert "not supported: this server gives and takes no tokens" in error
        assert "messages to /api/chat" in error


def test_curl_names_no_type(url: str, answers: Scripted) -> None:
    """The body of a bare `curl -d` is JSON whatever its header says."""
    content = json.dumps({"model": "tiny", "prompt": "Hi", "stream": False})
    headers = {"content-type": "application/x-www-form-urlencoded"}
    response = httpx.post(f"{url}/api/generate", content=content, headers=headers)
    assert response.json()["response"] == "Hello"


class Download:
    """A download that continues only as the test says."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.error: Exception | None = None
        self.is_waiting = False
        self.stopped = threading.Event()

    def __call__(self, name: str, *, tell: Callable[[str, int, int], None]) -> Path:
        self.names.append(name)
        try:
            tell("model.safetensors", 10, 20)
            while self.is_waiting:
                tell("model.safetensors", 15, 20)
            if self.error is not None:
                raise self.error
            tell("model.safetensors", 20, 20)
        finally:
            self.stopped.set()
        return Path()


@pytest.fixture
def download() -> Download:
    return Download()


@pytest.fixture
def pulling(answers: Scripted, download: Download) -> Iterator[str]:
    """The address of a server that downloads so."""
    app = FastAPI()
    app.include_router(router(answers, download))
    with serving(app) as address:
        yield address


def test_a_model_is_pulled(pulling: str, download: Download) -> None:
    """The lines say how far it is."""
    client = ollama.Client(pulling)
    first, *rest, last = client.pull("org/name", stream=True)
    assert (first.status, last.status) == ("pulling manifest", "success")
    assert rest[-1].status == "pulling model.safetensors"
    assert (rest[-1].completed, rest[-1].total) == (20, 20)
    assert client.pull("org/name:latest").status == "success"
    assert client.pull("llama3.2:1b").status == "success"
    short = "mlx-community/Llama-3.2-1B-Instruct-4bit"
    assert download.names == ["org/name", "org/name", short]


@pytest.mark.parametrize("name", ["tiny", "tiny:latest"])
def test_a_model_that_is_not_of_the_hub_is_there(
    pulling: str, download: Download, name: str
) -> None:
    """Nothing is downloaded, and the pull succeeds, as one of a model that Ollama has."""
    client = ollama.Client(pulling)
    assert client.pull(name).status == "success"
    assert [one.status for one in client.pull(name, stream=True)][-1] == "success"
    assert download.names == []


@pytest.mark.parametrize("is_folder", [True, False], ids=["folder", "alias"])
def test_what_has_a_name_like_one_of_the_hub_is_there(
    answers: Scripted,
    pulling: str,
    download: Download,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_folder: bool,
) -> None:
    """A folder in another one that is served, or an alias: the hub's model is another one."""
    monkeypatch.chdir(tmp_path)
    if is_folder:
        (tmp_path / "models" / "tiny").mkdir(parents=True)
    answers.model = replace(CARD, name="models/tiny")
    assert ollama.Client(pulling).pull("models/tiny").status == "success"
    assert download.names == []


@pytest.mark.parametrize("streams", [True, False])
def test_a_pull_that_fails_says_why(pulling: str, download: Download, streams: bool) -> None:
    """An impossible name gets 400, as by Ollama, and one that the hub does not have 404.

    A stream says it in its last line.
    """
    asked = {"model": "qwen3:4", "stream": streams}
    refused = httpx.post(f"{pulling}/api/pull", json=asked)
    assert refused.status_code == 400
    assert refused.json()["error"].startswith("'qwen3:4': not a hub id, which has the form")
    assert download.names == []
    client = ollama.Client(pulling)
    for error, status in ((NoSuchModelError, 404), (ModelError, 503)):
        download.error = error("org/name: no such repository")
        answer = httpx.post(f"{pulling}/api/pull", json=asked | {"model": "org/name"})
        assert answer.status_code == (200 if streams else status)
        assert json.loads(answer.text.splitlines()[-1]) == {"error": "org/name: no such repository"}
        with pytest.raises(ollama.ResponseError, match="no such repository"):
            list(client.pull("org/name", stream=streams))


def test_a_pull_ends_when_its_client_leaves(pulling: str, download: Download) -> None:
    """Nobody waits for it any more."""
    download.is_waiting = True
    with asking(f"{pulling}/api/pull", {"model": "org/name"}):
        until(lambda: download.names, "for the request")
    until(download.stopped.is_set, "for the end of the download")
