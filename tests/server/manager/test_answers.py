"""The manager answers or refuses, and says what was reused and why not more."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.managers import asked, events_of, manager_of, open_manager, opening

from mlxrunner import ParallelRunner
from mlxrunner.profiling.metrics import RequestLog
from mlxrunner.profiling.report.screen import find_event
from mlxrunner.server.events import AnswerEnd, ApiError, Client, ServerRequest, TextDelta
from mlxrunner.server.manager import ModelManager, ModelNames
from mlxrunner.server.protocol import headers, report
from mlxrunner.server.watch import explained


async def test_an_answer_and_the_next_turn(folder: Path) -> None:
    """The second request reuses the first one, and says so; both say what they cost."""

    async with manager_of(folder, opening()) as manager:
        first = (await events_of(manager, asked()))[-1]
        again = await events_of(manager, asked())
        used = first.usage
        assert (first.reason, used.outcome, used.reason) == ("length", "miss", "empty")
        assert again[-1].usage.cached_tokens == first.usage.prompt_tokens - 1
        assert [type(event) for event in again[:-1]] == [TextDelta] * (len(again) - 1)
        count = await manager.count(asked())
        assert count == first.usage.prompt_tokens


async def test_a_queue_that_is_full(folder: Path) -> None:
    """The request beyond it is told when to come again; the others are answered."""

    async with manager_of(folder, opening()) as manager:
        running = [asyncio.create_task(events_of(manager, asked(str(n)))) for n in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as refused:
            await events_of(manager, asked())
        assert refused.value.status == 429
        assert refused.value.retry_after
        assert (
            "requests that wait for one of 2 slots: 1, and at most 1 may" in refused.value.message
        )
        for events in await asyncio.gather(*running):
            assert isinstance(events[-1], AnswerEnd)
        assert manager.refused == 1


@pytest.mark.parametrize(
    ("one", "status", "words"),
    [
        (asked("x" * 500), 400, r"the prompt is too long: it has 5\d\d tokens, .* room for 400"),
        (asked("x" * 50_000), 400, r"too long: it has at least 400 tokens, .* room for 400"),
        (asked(model="gpt-4"), 404, "there is no model gpt-4: .*first, second, third"),
        (asked(model="llama3.2:1b"), 404, "`mlxrunner models pull llama3.2:1b` downloads it; "),
        (asked(options={"temperature": -1}), 400, "temperature: -1 is out of range"),
        (asked(model="../first"), 404, "there is no model"),
        (asked(tools=[{}] * 2_001), 400, "tools: there are 2001, and 2000 are the most"),
    ],
    ids=["too long", "far too long", "unknown", "known", "option", "path", "tools"],
)
@pytest.mark.exhaustive(0)
async def test_refusals(folder: Path, one: ServerRequest, status: int, words: str) -> None:
    """They have a status and a sentence with both values, and leave the manager as it was."""

    async with manager_of(folder, opening()) as manager:
        with pytest.raises(ApiError, match=words) as refused:
            await events_of(manager, one)
        assert refused.value.status == status
        assert isinstance((await events_of(manager, asked()))[-1], AnswerEnd)


async def test_more_tokens_than_there_is_room_for(folder: Path) -> None:
    """Clients ask for 32,000 tokens of any model: the answer ends where the context does.

    The tokens of a prompt are counted, though the context has no room for them.
    """
    async with manager_of(folder, opening()) as manager:
        assert await manager.count(asked("x" * 50_000)) > 50_000
        one = asked(options={"max_tokens": 32_000, "stop_tokens": []})
        ended = (await events_of(manager, one))[-1]
        assert (ended.reason, ended.usage.total_tokens) == ("length", 400)


async def test_stop_strings(folder: Path) -> None:
    """The end names the string that ended the answer."""

    async with manager_of(folder, opening()) as manager:
        long = asked(options={"max_tokens": 30, "stop_tokens": []})
        text = "".join(
            event.text for event in await events_of(manager, long) if isinstance(event, TextDelta)
        )
        stop = next(one for one in text[3:] if one.isascii())
        one = asked(options={"max_tokens": 30, "stop": [stop, "never"], "stop_tokens": []})
        ended = (await events_of(manager, one))[-1]
        assert (ended.reason, ended.stop_sequence) == ("stop_sequence", stop)


async def test_the_client_is_named(folder: Path) -> None:
    """The event of a request names client, session and request."""
    seen: list[Any] = []

    def watch(runner: ParallelRunner) -> None:
        runner.observers.append(lambda _, observed: seen.append(observed))

    manager = ModelManager(ModelNames(str(folder / "first")), opening(), watch)
    await events_of(manager, asked(id="msg_1", client=Client("claude-cli", "a session")))
    await manager.close()
    caller = seen[0].prepared.caller
    assert (caller.request, caller.client, caller.session) == ("msg_1", "claude-cli", "a session")


async def test_the_cause_of_a_miss(folder: Path, tmp_path: Path) -> None:
    """The response, the event and its explanation name the same cause, message and remedy.

    A hit has no cause.
    """
    record, reports = RequestLog(tmp_path / "events.jsonl"), list[dict[str, Any]]()
    async with open_manager(ModelNames(str(folder / "first")), opening(), record) as manager:
        for day in (21, 21, 22):
            messages = [
                {"role": "system", "content": f"Today is 2026-11-{day}. " + "Be brief. " * 9},
                {"role": "user", "content": "Hello"},
            ]
            one = asked(messages=messages, id=f"msg_{day}")
            ended = (await events_of(manager, one))[-1]
            assert isinstance(ended, AnswerEnd)
            reports.append(report(ended))
    record.close()
    causes = [(each["cause"], each["message"]) for each in reports]
    assert causes == [("first-request", None), (None, None), ("changing-date", 0)]
    said, found = headers(one, ended)["x-mlxrunner-cache"], reports[-1]
    assert said.endswith("cause=changing-date; message=0")
    assert (found["outcome"], "message 0" in found["remedy"]) == ("partial", True)
    caller = find_event([tmp_path / "events.jsonl"], "msg_22").caller
    assert (caller.cause, caller.remedy, caller.message) == (found["cause"], found["remedy"], 0)
    known = record.event("msg_22")
    assert known is not None
    text = " ".join(explained(known).split())
    assert "cause: changing-date in message 0" in text
    assert f"What to change: {found['remedy']}" in text


@pytest.mark.parametrize("model", ["claude-haiku-4-5", "claude-opus-4-1[1m]", "claude-x:latest"])
def test_a_name_of_anthropics_models_means_the_first_model(model: str) -> None:
    """Unless an alias has it, or the server's user has turned that off."""
    assert ModelNames("first").find(model) == "first"
    assert ModelNames("first", {model: "demo"}).find(model) == "demo"
    assert ModelNames("first", {}, only_first=True).find(model) == "first"
    assert not any("claude" in name for name in ModelNames("first", only_first=True))
    with pytest.raises(ApiError, match="there is no model claude"):
        ModelNames("first", has_claude=False).find(model)
    with pytest.raises(ApiError, match="there is no model my-claude"):
        ModelNames("first").find("my-claude-3")


def test_a_short_name_means_its_repository() -> None:
    """Also as Ollama's clients ask for it, with `:latest`, and in the lists."""
    repository = "mlx-community/Llama-3.2-3B-Instruct-4bit"
    names = ModelNames(repository)
    for name in ("llama3.2", "llama3.2:3b", "llama3.2:latest", repository):
        assert names.find(name) == repository
        assert names.known_as(name) == repository
    with pytest.raises(ApiError):
        names.find("qwen3:4b")  # not in the hub cache
