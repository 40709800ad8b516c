"""Events say in one word what became of the calls of an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.actor import playing
from support.houses import asked, open_house, served

from mlxrunner.options import ServeSettings
from mlxrunner.serve.models import ModelNames
from mlxrunner.serve.watch import RequestLog, explained

HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
NARROW = {"type": "object", "properties": {"how": {"type": "string"}}}
ANSWERS = {
    "call-unread": ("<tool_call>\n{'name': gaze}\n</tool_call>", 200),
    "call-cut": ('<tool_call>\n{"name": "gaze", "arguments": {"how": "', 30),
    "calls-left-out": ('<tool_call>\n{"name": "gaze", "arguments": {}}\n</tool_call>\n' * 2, 200),
    None: ("Nothing to do.", 200),
}
"""Answers and their limits, by the remarks on them."""


@pytest.mark.parametrize("note", ANSWERS)
@pytest.mark.parametrize("stream", [False, True])
def test_the_event_says_what_became_of_a_call(
    note: str | None, stream: bool, tmp_path: Path
) -> None:
    """In one word: what the model wrote is in the response alone."""
    answer, limit = ANSWERS[note]
    file, settings = tmp_path / "events.jsonl", ServeSettings(slots=2, disk_cache=False)
    record = RequestLog(file)
    opening = playing(lambda text: answer)(settings=settings, runner={"context": 4000})
    function = {"name": "gaze", "parameters": NARROW}
    body = {
        "model": "actor",
        "messages": HI,
        "max_tokens": limit,
        "stream": stream,
        "tools": [{"type": "function", "function": function}],
        "parallel_tool_calls": False,
    }
    with served("actor", opening, record) as (url, _):
        response = httpx.post(f"{url}/v1/chat/completions", json=body)
        assert response.status_code == 200
        request = response.headers["x-request-id"]
        (line,) = file.read_text().splitlines()
        known = record.event(request)
    assert json.loads(line)["caller"]["note"] == note
    assert ("could not be read" in response.text) == (str(note).startswith("call-"))
    assert known is not None
    assert known.caller is not None
    assert known.caller.note == note
    assert "gaze" not in line
    assert (f"its answer: {note}" in " ".join(explained(known).split())) == (note is not None)


async def test_events_wait_for_the_end_of_an_answer(tmp_path: Path) -> None:
    """A client that leaves ends it, too, and at the end of the server all are written."""
    file = tmp_path / "events.jsonl"
    record, settings = RequestLog(file), ServeSettings(slots=2, disk_cache=False)
    opening = playing(lambda text: "Well, " * 90)(settings=settings, runner={"context": 4000})
    async with open_house(ModelNames("actor"), opening, record) as house:
        for number in range(4):
            stream = house.answer(asked(model="actor", id=f"left-{number}"))
            if number:
                await anext(stream)
            await stream.aclose()
    record.close()
    found = [json.loads(line)["caller"]["request"] for line in file.read_text().splitlines()]
    assert sorted(found) == [f"left-{number}" for number in (1, 2, 3)]
