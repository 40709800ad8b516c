"""The bytes of each protocol, to the letter: `golden/wire` has requests, and answers to them.

Each answer is there whole and as a stream, with what the model was asked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import httpx
import pytest
from support.golden import check
from support.requests import CLAUDE_CODE, CODEX, OPENCODE
from support.scripted import (
    CALLS,
    HELLO,
    HI,
    TOOL,
    Scripted,
    call,
    ended,
)

from mlxrunner.batch.openai_format import TokenLogprob
from mlxrunner.server.events import AnswerEvent, Ping, ServerRequest, TextDelta, ThinkingDelta

Script = Sequence[AnswerEvent]


@dataclass
class Scene:
    """A request, and the events of its answers."""

    name: str
    body: dict[str, Any]
    scripts: list[Script]
    headers: dict[str, str]


def scene(name: str, body: dict[str, Any], *scripts: Script, **headers: str) -> Scene:
    return Scene(name, body, [*scripts] or [HELLO], headers)


def token(text: str, other: str) -> TokenLogprob:
    return TokenLogprob(text, 1, -0.5, ((text, 1, -0.5), (other, 2, float("-inf"))))


SEALED = [
    {"type": "thinking", "thinking": "", "signature": "x"},
    {"type": "redacted_thinking", "data": "x"},
    {"type": "text", "text": "a"},
]
"""An answer whose thinking is empty here, or only another server can read it."""
HALF = [TextDelta("Hé", (token("Hé", "bytes:\\xc3"),)), ended()]
"""An answer whose likeliest other token is a part of a character."""
LETTERS = [TextDelta(letter, (token(letter, "x"),)) for letter in "ab"]
WITH_USAGE = {"stream_options": {"include_usage": True}}
SCHEMA = {"type": "object", "properties": {}}
FORM = {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}
SCENES: dict[str, list[Scene]] = {
    "/v1/chat/completions": [
        scene(
            "options",
            {"messages": HI, "temperature": 0.5, "max_completion_tokens": 9, "seed": 3}
            | {"stop": ["END"], "user": "me"},
        ),
        scene("heartbeats, thinking and calls", {"messages": HI, "tools": [TOOL]}, CALLS),
        scene(
            "opencode",
            OPENCODE,
            user_agent="opencode/1.18.33 ai-sdk/provider-utils",
            x_session_id="ses_1",
        ),
        scene(
            "two answers, each with a seed of its own",
            {"messages": HI, "n": 2, "seed": 5, **WITH_USAGE},
            [TextDelta("one"), ended()],
            [TextDelta("two"), ended()],
        ),
        scene("logprobs", {"messages": HI, "logprobs": True, "top_logprobs": 2}, HALF),
        scene(
            "a tool that is no function, and variables of the template",
            {
                "messages": HI,
                "tools": [{"type": "custom", "custom": {"name": "patch"}}, TOOL],
                "chat_template_kwargs": {"enable_thinking": False},
                "top_k": 4,
                "metadata": {"a": "b"},
            },
        ),
    ],
    "/v1/completions": [
        scene("options", {"prompt": "Once", "max_tokens": 9, "temperature": 0.5, "stop": "E"}),
        scene(
            "nothing is thinking in raw text",
            {"prompt": "Once", **WITH_USAGE},
            [Ping(), ThinkingDelta("a "), TextDelta("b"), ended("length")],
        ),
        *(
            scene(f"answers to {name}", {"prompt": prompt, "n": 2, "seed": 5})
            for name, prompt in {
                "two texts": ["Once", "Twice"],
                "tokens": [5, 6],
                "lists of tokens": [[5, 6], [7]],
            }.items()
        ),
        scene("echo", {"prompt": "Once ", "echo": True}),
        scene("logprobs", {"prompt": "Once", "logprobs": 2}, [*LETTERS, ended()]),
    ],
    "/v1/responses": [
        scene(
            "options",
            {"input": "Hi", "instructions": "Be brief.", "max_output_tokens": 9}
            | {"temperature": 0.5},
        ),
        scene("heartbeats, thinking and calls", {"input": "Hi"}, CALLS),
        scene(
            "Codex",
            CODEX,
            [ThinkingDelta("Go on."), call(0, "collab__spawn", "{}"), ended("tool_calls")],
        ),
        scene("an answer that was cut", {"input": "Hi"}, [TextDelta("Hel"), ended("length")]),
        scene(
            "logprobs and a form",
            {
                "input": "Hi",
                "include": ["message.output_text.logprobs"],
                "top_logprobs": 1,
                "text": {"format": FORM},
            },
            HALF,
        ),
    ],
    "/v1/messages": [
        scene(
            "options",
            {"messages": HI, "max_tokens": 100, "system": "Be brief.", "temperature": 0.5},
        ),
        scene("heartbeats, thinking and calls", {"messages": HI, "max_tokens": 9}, CALLS),
        scene(
            "a stop sequence",
            {"messages": HI, "max_tokens": 9, "stop_sequences": ["END"]},
            [TextDelta("a"), ended("stop_sequence", stop_sequence="END")],
        ),
        scene("Claude Code", CLAUDE_CODE),
        scene("a session", {"messages": HI, "max_tokens": 9}, x_claude_code_session_id="s1"),
        scene(
            "thinking that says nothing",
            {"max_tokens": 5, "messages": [*HI, {"role": "assistant", "content": SEALED}, *HI]},
        ),
    ],
    "/api/chat": [
        scene(
            "options",
            {
                "messages": HI,
                "options": {"temperature": 0.5, "num_predict": 9, "num_ctx": 8192, "seed": 3}
                | {"stop": ["E"]},
                "keep_alive": "5m",
            },
        ),
        scene(
            "heartbeats, thinking and calls",
            {"messages": HI, "tools": [TOOL], "think": True},
            CALLS,
        ),
        scene("logprobs", {"messages": HI, "logprobs": True, "top_logprobs": 2}, HALF),
    ],
    "/api/generate": [
        scene("a system prompt", {"prompt": "Hi", "system": "Be brief."}),
        scene("raw", {"prompt": "Hi", "raw": True}),
    ],
}
NEUTRAL = ServerRequest(protocol="chat", model="")
TIME = re.compile(r'\b(created|\w+_at|(?:total|load)_duration)("?: ?)("[^"]*"|\d+)')
ID = re.compile(r"\b(msg|rs|fc|req|resp|cmpl|chatcmpl)[-_][0-9a-f]{8,}")
"""Parts that differ in each run."""
HEADERS = ("content-type", "x-mlxrunner-cache", "request-id", "x-request-id")


as_json = partial(json.dumps, ensure_ascii=False)


def described(asked: ServerRequest) -> Iterator[str]:
    """Yield the fields of a request that a client has set."""
    for field in fields(asked):
        value = getattr(asked, field.name)
        if field.name != "id" and value != getattr(NEUTRAL, field.name):
            yield f"{field.name} = {value!r}"


def told(client: httpx.Client, path: str, scene: Scene, answers: Scripted) -> Iterator[str]:
    """Yield the lines of a scene: the request, what was asked for, and both forms of the answer.

    A stream of several answers has no order of its own.
    """
    headers = {"user-agent": "me/1"} | {k.replace("_", "-"): v for k, v in scene.headers.items()}
    yield f"=== {scene.name}\n{as_json(scene.body)}"
    for stream in (False, True)[: 1 if "n" in scene.body else 2]:
        answers.begin()
        answers.scripts = [*scene.scripts]
        body = {"model": "tiny", **scene.body, "stream": stream}
        response = client.post(path, json=body, headers=headers)
        if not stream:
            for asked in sorted(answers.asked, key=lambda one: one.id):
                yield from ("--- asked", *described(asked))
        yield f"--- {'stream' if stream else 'whole'} {response.status_code}"
        found = response.headers
        yield from (f"{name}: {found[name]}" for name in HEADERS if name in found)
        if stream:
            yield from (line for line in response.text.splitlines() if line)
        else:
            yield from (f"{name}: {as_json(value)}" for name, value in response.json().items())


@pytest.mark.parametrize("path", SCENES)
@pytest.mark.exhaustive(len(SCENES))
def test_requests_and_answers_are_those_of_the_protocol(
    path: str, url: str, answers: Scripted
) -> None:
    with httpx.Client(base_url=url) as client:
        lines = [line for one in SCENES[path] for line in told(client, path, one, answers)]
    text = ID.sub(r"\1_ID", TIME.sub(r"\1\2TIME", "\n".join(lines)))
    check(f"wire/{path.strip('/').replace('/', '-')}.txt", f"{text}\n")
