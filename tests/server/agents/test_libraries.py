"""Python's clients do a job of six tool calls, each in the way that its own pages show.

A model that plays a part answers, through the real engine. It reads the conversation from the keys
that it kept.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import SecretStr
from support.actor import playing
from support.jobs import DONE, SHARE, STEPS, TASK, Shared, script
from support.managers import served

from mlxrunner.options import ServeSettings
from mlxrunner.server.models import ServedModel

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"text": {"type": "string"}},
    "required": ["text"],
}
Note = Callable[[str], str]


@pytest.fixture(scope="module")
def actor() -> Iterator[tuple[str, ServedModel]]:
    """A server whose model follows the script."""
    with served("actor", playing(script)(settings=ServeSettings(disk_cache=False))) as found:
        yield found


@pytest.fixture
def shared(actor: tuple[str, ServedModel]) -> Shared:
    """Count of what is asked in a test."""
    actor[1].runner.observers[1:] = [found := Shared()]
    return found


@pytest.fixture
def url(actor: tuple[str, ServedModel]) -> str:
    return actor[0]


def of_openai(url: str, note: Note) -> str:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
    function = {"name": "note", "description": "Write a line.", "parameters": PARAMETERS}
    messages: list[Any] = [{"role": "user", "content": TASK}]
    while True:
        answer = client.chat.completions.create(
            model="actor",
            messages=messages,
            tools=[{"type": "function", "function": function}],  # type: ignore[list-item]
        )
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return str(message.content)
        for call in message.tool_calls:
            said = note(**json.loads(call.function.arguments))  # type: ignore[union-attr]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})


def of_responses(url: str, note: Note) -> str:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
    given: Any = TASK
    earlier: str | None = None
    while True:
        with client.responses.stream(
            model="actor",
            input=given,
            previous_response_id=earlier,  # type: ignore[arg-type]
            tools=[{"type": "function", "name": "note", "parameters": PARAMETERS, "strict": True}],
        ) as stream:
            answer = stream.get_final_response()
        earlier = answer.id
        given = [
            {
                "type": "function_call_output",
                "call_id": item.call_id,
                "output": note(**json.loads(item.arguments)),
            }
            for item in answer.output
            if item.type == "function_call"
        ]
        if not given:
            return answer.output_text


def of_anthropic(url: str, note: Note) -> str:
    client = anthropic.Anthropic(base_url=url, api_key="x", max_retries=0)
    function = anthropic.beta_tool(note, name="note", description="Write a line.")
    runner = client.beta.messages.tool_runner(
        model="actor",
        max_tokens=1000,
        tools=[function],
        messages=[{"role": "user", "content": TASK}],
    )
    return "".join(block.text for block in runner.until_done().content if block.type == "text")


def of_ollama(url: str, note: Note) -> str:
    client = ollama.Client(host=url)
    messages: list[Any] = [{"role": "user", "content": TASK}]
    while True:
        message = client.chat("actor", messages, tools=[note]).message
        messages.append(message)
        if not message.tool_calls:
            return str(message.content)
        for call in message.tool_calls:
            said = note(**call.function.arguments)
            messages.append({"role": "tool", "tool_name": "note", "content": said})


def of_langchain(url: str, note: Note) -> str:
    key = SecretStr("x")
    model = ChatOpenAI(base_url=f"{url}/v1", api_key=key, model="actor", max_retries=0)
    function = tool(note)
    bound, messages = model.bind_tools([function]), list[Any]([HumanMessage(TASK)])
    while True:
        message = bound.invoke(messages)
        assert isinstance(message, AIMessage)
        messages.append(message)
        if not message.tool_calls:
            return str(message.content)
        messages += [function.invoke(call) for call in message.tool_calls]  # type: ignore[arg-type]


def of_llm(url: str, note: Note) -> str:
    """Run the program `llm` itself, which calls a function that it is given as text."""
    home = Path(os.environ["HOME"])
    (home / "extra-openai-models.yaml").write_text(
        "- model_id: actor\n  model_name: actor\n  supports_tools: true\n"
        f"  api_base: {url}/v1\n  api_key_name: actor\n"
    )
    function = (
        "def note(text: str) -> str:\n"
        '    """Write a line."""\n'
        f"    open({str(home / 'notes')!r}, 'a').write(text + '\\n')\n"
        "    return 'written: ' + text\n"
    )
    command = [sys.executable, "-m", "llm", "-m", "actor", "--key", "x", "--chain-limit", "0"]
    result = subprocess.run(
        [*command, "--functions", function, TASK],
        env={**os.environ, "LLM_USER_PATH": str(home)},
        capture_output=True,
        text=True,
        check=True,
    )
    for line in (home / "notes").read_text().splitlines():
        note(line)
    return result.stdout


CLIENTS = [of_openai, of_responses, of_anthropic, of_ollama, of_langchain, of_llm]


@pytest.mark.parametrize("client", CLIENTS, ids=[one.__name__[3:] for one in CLIENTS])
@pytest.mark.exhaustive(6)
def test_a_client_does_a_job_of_six_tool_calls(
    client: Callable[[str, Note], str], url: str, shared: Shared
) -> None:
    """The notes say so, its last words say so, and 97 % of what could be reused was."""
    notes: list[str] = []

    def note(text: str) -> str:
        """Write a line."""
        notes.append(text)
        return f"written: {text}"

    said = client(url, note)
    assert notes == [f"step {number}" for number in range(STEPS)]
    assert DONE in said
    assert shared.requests == STEPS + 1
    assert shared.reused >= SHARE * shared.shareable > 0
