"""Pages and events of a server: what runs, the latest misses, and what became of answers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from support.actor import playing
from support.browser import WIDTHS, browse, measure, needs_chromium
from support.events import as_event, example_event
from support.managers import asked, open_manager, served

from mlxrunner.options import ServeSettings
from mlxrunner.profiling.metrics import RequestLog
from mlxrunner.profiling.report.page import TableLink, table
from mlxrunner.profiling.schema import Event
from mlxrunner.server.manager import ModelNames
from mlxrunner.server.watch import explained, status_page

HOSTILE = "<script>alert(1)</script>\"'>"


ADDRESS = "http://127.0.0.1:8080/"


def event(number: int, client: str = "opencode", **more: Any) -> Event:
    caller = {"request": f"req-{number}", "client": client, "session": "one", "rules": [], **more}
    return as_event(example_event(number=number, caller=caller))


def model(client: str = "claude-cli", name: str = "tiny") -> dict[str, Any]:
    held = {"slot": 0, "state": "busy", "tokens": 12345, "bytes": 2**20, "request": "req-9"}
    held |= {"client": client, "session": None}
    counts = {"context": 4096, "slots": 8, "busy": 1, "waiting": 2, "parked_bytes": 0}
    others = [held | {"slot": 1, "state": "idle", "client": None}]
    return {"model": name, "bytes": 2**20, "conversations": [held, *others], **counts}


def test_the_page_shows_who_runs_and_what_was_lost() -> None:
    text = status_page([model()], [event(2), event(1)], ADDRESS)
    for said in ("claude-cli", "12,345", "1 of 8 slots busy, 2 waiting", "req-2", "opencode"):
        assert said in text
    assert 'http-equiv="refresh"' in text
    empty = status_page([], [], ADDRESS)
    for said in ("No model is loaded", "Connect a client", f"base URL {ADDRESS}v1"):
        assert said in empty


def test_what_clients_say_is_escaped() -> None:
    """Names of clients, sessions, models and requests come from outside."""
    text = status_page([model(HOSTILE, HOSTILE)], [event(1, HOSTILE)], ADDRESS)
    assert "&lt;script&gt;" in text
    cell = table(["request"], [[TableLink(HOSTILE, f"/explain/{HOSTILE}")]])
    assert f'href="/explain/{quote(HOSTILE)}"' in cell
    assert "<script" not in text + cell


def test_each_miss_leads_to_its_explanation() -> None:
    text = status_page([], [event(2), event(1), as_event(example_event())], ADDRESS)
    assert re.findall(r'<a href="([^"]+)">([^<]+)</a>', text) == [
        ("/explain/req-2", "req-2"),
        ("/explain/req-1", "req-1"),
        (f"/explain/{example_event()['id']}", example_event()["id"]),
    ]


def test_a_miss_has_the_remedy_of_its_cause() -> None:
    """One whose cause is not known has that of its reason."""
    known = event(1, cause="changing-date", remedy="Take the date out.", message=3)
    text = status_page([], [known], ADDRESS)
    assert "opencode writes a date or time into message 3" in text
    assert "Take the date out." in text
    assert "put changing text" not in text
    assert "put changing text" in status_page([], [event(1)], ADDRESS)


DONE = playing(lambda text: "Done.")(settings=ServeSettings(disk_cache=False))
"""A loader of a model that says that it is done."""


@pytest.mark.parametrize("path", ["/", "/slots", "/metrics", "/explain/{id}", "/explain/{odd}"])
def test_no_text_of_a_client_drives_a_terminal(
    tmp_path: Path, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Not the names of client, session and model: they are shown with their codes."""
    odd = "".join(map(chr, [*range(0x7F, 0xA0), 0x202E, 0x2028])) + "odd"
    record = RequestLog(tmp_path / "events.jsonl", log_text=True)
    with served("actor", DONE, record) as (url, _):
        body = {"model": "actor", "messages": [{"role": "user", "content": f"Hello {odd}\x1b[2J"}]}
        body |= {"user": f"\x1b]0;{odd}\n\r"}
        headers = {"user-agent": f"{odd[:33]}odd/1".encode("latin-1")}
        for text in ("", " and more"):
            body["messages"][0]["content"] += text
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers)
            assert answer.status_code == 200
        found = httpx.get(url + path.format(id=answer.json()["id"], odd=quote(odd))).text
        refused = httpx.post(f"{url}/v1/chat/completions", json={**body, "model": odd}).text
    record.close()
    shown = [found, refused, caplog.text, (tmp_path / "events.jsonl").read_text()]
    for text in shown if path == "/slots" else shown[:2]:
        assert not CONTROLS.search(text)
    assert path == "/metrics" or "odd" in found
    assert "odd" in refused


CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u2028]")
"""Characters that drive a terminal, or end a line or turn it around."""


def test_a_server_shows_its_requests() -> None:
    """The page at `/` of a running server has what was just asked."""
    with served("actor", DONE) as (url, _):
        headers = {"user-agent": "my-client/1.0"}
        body = {"model": "actor", "messages": HI}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200
        page = httpx.get(f"{url}/")
    assert page.headers["content-type"].startswith("text/html")
    assert "my-client" in page.text
    assert "of the last request were cached" in page.text


@needs_chromium
def test_a_browser_shows_the_page_whole_at_any_width(tmp_path: Path) -> None:
    """Nothing is clipped or outside the window, and the console has no error."""
    pages = {
        "busy": status_page([model()], [event(n) for n in range(40, 0, -1)], ADDRESS),
        "empty": status_page([], [], ADDRESS),
        "hostile": status_page(
            [model(HOSTILE + 300 * "M", HOSTILE)], [event(1, 300 * "W")], ADDRESS
        ),
    }
    found = measure(pages, tmp_path)
    assert set(found) == {(name, width) for name in pages for width in WIDTHS}
    assert {key: one["faults"] for key, one in found.items() if one["faults"]} == {}
    file = tmp_path / "page.html"
    file.write_text(pages["hostile"], encoding="utf-8")
    assert "CONSOLE" not in browse(file, tmp_path, "--dump-dom")


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
    tools = [{"type": "function", "function": {"name": "gaze", "parameters": NARROW}}]
    body = {"model": "actor", "messages": HI, "max_tokens": limit, "stream": stream}
    body |= {"tools": tools, "parallel_tool_calls": False}
    with served("actor", opening, record) as (url, _):
        response = httpx.post(f"{url}/v1/chat/completions", json=body)
        assert response.status_code == 200
        (line,) = file.read_text().splitlines()
        known = record.event(response.headers["x-request-id"])
    assert json.loads(line)["caller"]["note"] == note == known.caller.note
    assert ("could not be read" in response.text) == (str(note).startswith("call-"))
    assert "gaze" not in line
    assert (f"its answer: {note}" in " ".join(explained(known).split())) == (note is not None)


async def test_events_wait_for_the_end_of_an_answer(tmp_path: Path) -> None:
    """A client that leaves ends it, too, and at the end of the server all are written."""
    file = tmp_path / "events.jsonl"
    record, settings = RequestLog(file), ServeSettings(slots=2, disk_cache=False)
    opening = playing(lambda text: "Well, " * 90)(settings=settings, runner={"context": 4000})
    async with open_manager(ModelNames("actor"), opening, record) as manager:
        for number in range(4):
            stream = manager.answer(asked(model="actor", id=f"left-{number}"))
            if number:
                await anext(stream)
            await stream.aclose()
    record.close()
    found = [json.loads(line)["caller"]["request"] for line in file.read_text().splitlines()]
    assert sorted(found) == [f"left-{number}" for number in (1, 2, 3)]
