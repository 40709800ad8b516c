"""Load on a server: clients, what they send and hear, and what they measure."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

Body = dict[str, Any]
Message = Mapping[str, str]


@dataclass(frozen=True)
class Wire:
    """A way to ask for an answer to messages."""

    name: str
    path: str
    body: Callable[[Sequence[Message], int], Body]
    """A function of the messages and of the most tokens of the answer."""
    piece: Callable[[Body], str]
    """A function that returns the text of one event of a stream."""
    whole: Callable[[Body], str]
    """A function that returns the text of a body that is no stream."""
    ends: tuple[str, ...]
    """Texts of which the last line of a whole stream has one."""


def _chat(messages: Sequence[Message], tokens: int) -> Body:
    return {"messages": [*messages], "max_tokens": tokens}


def _completions(messages: Sequence[Message], tokens: int) -> Body:
    return {"prompt": _flat(messages), "max_tokens": tokens}


def _messages(messages: Sequence[Message], tokens: int) -> Body:
    system, *rest = messages
    return {"system": system["content"], "messages": rest, "max_tokens": tokens}


def _responses(messages: Sequence[Message], tokens: int) -> Body:
    return {"input": [*messages], "max_output_tokens": tokens, "store": False}


def _ollama(messages: Sequence[Message], tokens: int) -> Body:
    return {"messages": [*messages], "options": {"num_predict": tokens}}


def _generate(messages: Sequence[Message], tokens: int) -> Body:
    return {"prompt": _flat(messages), "options": {"num_predict": tokens}}


def _flat(messages: Sequence[Message]) -> str:
    return "\n".join(message["content"] for message in messages)


def _first_choice(event: Body) -> Body:
    return next(iter(event.get("choices") or ()), {})


def _said(found: Body, *names: str) -> str:
    """Return the texts of some names: answers and thinking."""
    return "".join(found.get(name) or "" for name in names)


WIRES = (
    Wire(
        "chat",
        "/v1/chat/completions",
        _chat,
        lambda event: _said(_first_choice(event).get("delta", {}), "content", "reasoning_content"),
        lambda body: body["choices"][0]["message"]["content"] or "",
        ("data: [DONE]",),
    ),
    Wire(
        "completions",
        "/v1/completions",
        _completions,
        lambda event: _first_choice(event).get("text") or "",
        lambda body: body["choices"][0]["text"],
        ("data: [DONE]",),
    ),
    Wire(
        "messages",
        "/v1/messages",
        _messages,
        lambda event: _said(event.get("delta", {}), "text", "thinking"),
        lambda body: "".join(block.get("text", "") for block in body["content"]),
        ('"type":"message_stop"',),
    ),
    Wire(
        "responses",
        "/v1/responses",
        _responses,
        lambda event: event["delta"] if event["type"].endswith("text.delta") else "",
        lambda body: "".join(
            part.get("text", "") for item in body["output"] for part in item.get("content", ())
        ),
        ('"type":"response.completed"', '"type":"response.incomplete"'),
    ),
    Wire(
        "ollama chat",
        "/api/chat",
        _ollama,
        lambda event: _said(event["message"], "content", "thinking"),
        lambda body: body["message"]["content"],
        ('"done":true',),
    ),
    Wire(
        "ollama generate",
        "/api/generate",
        _generate,
        lambda event: _said(event, "response", "thinking"),
        lambda body: body["response"],
        ('"done":true',),
    ),
)


def event_of(line: str) -> Body | None:
    """Return the event that a line of a stream has; None for lines that have none."""
    text = line.removeprefix("data: ")
    found: Body | None = json.loads(text) if text.startswith("{") else None
    return found


WORDS = "alpha beta gamma delta main test build file error result value return import class".split()
TURNS = 5
"""Turns after which a client begins a new conversation."""
TEAMS = 4
"""Different system prompts: the clients of a team have the same one."""
MANY = 400
"""Tokens of an answer that a client asks for and does not read."""


@dataclass
class Tally:
    """The sum of all that the clients have seen."""

    done: Counter[str] = field(default_factory=Counter)
    """Counts of things that were done to their end, by name."""
    later: int = 0
    """Requests that were told to come later."""
    wrong: list[str] = field(default_factory=list)
    """Lines about answers that were not as they have to be."""
    firsts: list[float] = field(default_factory=list)
    """Seconds until the first text of a stream."""
    gaps: list[float] = field(default_factory=list)
    """Seconds between two texts of a stream."""

    @property
    def answers(self) -> int:
        """Answers that were read to their end."""
        return self.done["turn"]


class LaterError(Exception):
    """The server told the client to come later."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


class Client:
    """A client with a conversation of its own."""

    def __init__(self, number: int, url: str, tally: Tally, *, size: int, stall: float) -> None:
        """Ask the server at `url`. System prompts have `size` characters.

        `stall`: seconds for which the client does not read, now and then.
        """
        self._rng, self._tally = random.Random(number), tally
        self._team, self._size, self._stall = number % TEAMS, size, stall
        address = urlsplit(url)
        self._address = (address.hostname or "", address.port or 0)
        self._client = httpx.AsyncClient(base_url=url, timeout=None, verify=False)
        self._messages: list[dict[str, str]] = []
        self._model = ""

    async def run(self, is_over: Callable[[], bool]) -> None:
        """Do one thing after the other until `is_over`."""
        acts = [("turn", self._turn)] * 8 + [*self._faults().items()]
        async with self._client:
            self._model = (await self._client.get("/v1/models")).json()["data"][0]["id"]
            while not is_over():
                name, act = self._rng.choice(acts)
                try:
                    await act()
                    self._tally.done[name] += 1
                except LaterError as error:
                    self._tally.later += 1
                    await asyncio.sleep(min(error.seconds, 5) * self._rng.random())
                except Exception as error:
                    self._tally.wrong.append(f"{name}: {error!r}"[:500])

    def _faults(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        return {
            "leaves in a stream": self._leave,
            "leaves at once": self._leave_at_once,
            "does not read": self._not_read,
            "sends half a body": self._half_a_body,
            "sends too much": self._too_much,
            "sends broken JSON": self._broken,
            "sends wrong types": self._wrong_types,
            "asks for too long a prompt": self._too_long,
            "looks": self._look,
        }

    def _body(self, wire: Wire, tokens: int) -> Body:
        """Ask the next question in the words of a protocol."""
        self._ask_next()
        return {**wire.body(self._messages, tokens), "model": self._model}

    def _ask_next(self) -> None:
        """Put the next question into the conversation, or begin a new one."""
        if not self._messages or len(self._messages) > 2 * TURNS:
            system = self._text(self._size, random.Random(self._team))
            self._messages = [{"role": "system", "content": system}]
        if self._messages[-1]["role"] != "user":
            question = self._text(self._rng.randint(10, self._size // 3))
            self._messages.append({"role": "user", "content": question})

    def _text(self, size: int, rng: random.Random | None = None) -> str:
        return " ".join((rng or self._rng).choice(WORDS) for _ in range(size // 6 + 1))

    async def _turn(self) -> None:
        """Ask, in any protocol, as a stream or not, and read the whole answer."""
        wire, streams = self._rng.choice(WIRES), self._rng.random() < 0.6
        body = {**self._body(wire, self._rng.randint(2, 24)), "stream": streams}
        answer = await (self._read(wire, body) if streams else self._whole(wire, body))
        self._messages.append({"role": "assistant", "content": answer})
        self._tally.done[wire.name] += 1

    async def _whole(self, wire: Wire, body: Body) -> str:
        answer = await self._client.post(wire.path, json=body)
        _check(answer, answer.text)
        return wire.whole(answer.json())

    async def _read(self, wire: Wire, body: Body) -> str:
        """Read a stream to its end."""
        texts, last, before = list[str](), "", time.monotonic()
        times = self._tally.firsts
        async with self._client.stream("POST", wire.path, json=body) as answer:
            if answer.status_code != 200:
                _check(answer, (await answer.aread()).decode())
            async for line in answer.aiter_lines():
                event = event_of(line)
                assert event is None or event.get("error") is None, line
                piece = wire.piece(event) if event else ""
                if piece:
                    now = time.monotonic()
                    times.append(now - before)
                    times, before = self._tally.gaps, now
                    texts.append(piece)
                last = line or last
        assert any(end in last for end in wire.ends), f"{wire.name} ended with {last!r}"
        return "".join(texts)

    async def _leave(self) -> None:
        """Go away after some lines."""
        wire, lines = self._rng.choice(WIRES), self._rng.randint(0, 12)
        body = {**self._body(wire, MANY), "stream": True}
        async with self._client.stream("POST", wire.path, json=body) as answer:
            if answer.status_code != 200:
                _check(answer, (await answer.aread()).decode())
            async for _ in answer.aiter_lines():
                lines -= 1
                if lines < 0:
                    break

    async def _leave_at_once(self) -> None:
        """Send a whole request and close the connection."""
        wire = self._rng.choice(WIRES)
        body = {**self._body(wire, MANY), "stream": self._rng.random() < 0.5}
        await self._send(request(wire.path, body))

    async def _not_read(self) -> None:
        """Ask for a long stream and read nothing of it."""
        wire = WIRES[0]
        more = {"stream": True, "logprobs": True, "top_logprobs": 20}
        body = {**self._body(wire, MANY), **more}
        await self._send(request(wire.path, body), wait=self._stall)

    async def _half_a_body(self) -> None:
        """Announce more than is sent, and go away."""
        wire = self._rng.choice(WIRES)
        body = wire.body([{"role": "system", "content": "x"}] * 2, 1)
        await self._send(request(wire.path, body)[: -self._rng.randint(1, 20)])

    async def _too_much(self) -> None:
        """Announce 100 MB."""
        head = f"POST {WIRES[0].path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100000000\r\n"
        answer = await self._send(f"{head}\r\n".encode(), reads=True)
        assert b" 413 " in answer.partition(b"\r\n")[0], answer[:200]

    async def _broken(self) -> None:
        """Send a text that is no JSON."""
        wire = self._rng.choice(WIRES)
        text = json.dumps(wire.body([{"role": "user", "content": "x"}] * 2, 1))[:-2]
        await self._refused(wire.path, text.encode(), 400)

    async def _wrong_types(self) -> None:
        """Send a number where a list is wanted."""
        wire = self._rng.choice(WIRES)
        body = wire.body([{"role": "user", "content": "x"}] * 2, 1)
        wrong: Body = {name: 5 for name in ("messages", "prompt", "input") if name in body}
        await self._refused(wire.path, json.dumps({**body, **wrong}).encode(), 400)

    async def _too_long(self) -> None:
        """Send a prompt that no context holds."""
        messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "x" * 200_000}]
        await self._refused(WIRES[0].path, json.dumps(WIRES[0].body(messages, 1)).encode(), 400)

    async def _refused(self, path: str, content: bytes, status: int) -> None:
        headers = {"Content-Type": "application/json"}
        answer = await self._client.post(path, content=content, headers=headers)
        if answer.status_code == 429:
            _check(answer, answer.text)
        assert answer.status_code == status, f"{path}: {answer.status_code} {answer.text:.200}"
        assert answer.json()["error"], answer.text
        assert "Traceback" not in answer.text

    async def _look(self) -> None:
        """Look at the pages about the server."""
        for path in ("/health", "/slots", "/metrics", "/", "/v1/models", "/api/ps"):
            answer = await self._client.get(path)
            assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text:.200}"

    async def _send(self, content: bytes, *, wait: float = 0.0, reads: bool = False) -> bytes:
        """Send bytes on a connection of their own, and close it after `wait` seconds."""
        loop, found = asyncio.get_running_loop(), b""
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.setblocking(False)
            await loop.sock_connect(connection, self._address)
            await loop.sock_sendall(connection, content)
            if reads:
                found = await loop.sock_recv(connection, 65536)
            await asyncio.sleep(wait)
        return found


def request(path: str, body: Any) -> bytes:
    """Return an HTTP request with a JSON body."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def _check(answer: httpx.Response, text: str) -> None:
    """Raise LaterError if the client has to come later, and AssertionError for other failures."""
    if answer.status_code == 429:
        raise LaterError(float(answer.headers["retry-after"]))
    assert answer.status_code == 200, f"{answer.url.path}: {answer.status_code} {text:.300}"


async def load(
    url: str, count: int, is_over: Callable[[Tally], bool], *, size: int = 600, stall: float = 0.0
) -> Tally:
    """Let `count` clients ask the server at `url` until `is_over`; return what they saw."""
    tally = Tally()
    clients = [Client(number, url, tally, size=size, stall=stall) for number in range(count)]
    await asyncio.gather(*(client.run(lambda: is_over(tally)) for client in clients))
    return tally
