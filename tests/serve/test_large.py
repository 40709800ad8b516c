"""Large bodies that are wrong: what they cost is bounded, whatever they hold."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from mlxrunner.serve.anthropic import MessageRequest
from mlxrunner.serve.events import ApiError, ServerRequest
from mlxrunner.serve.manager import (
    MOST_MESSAGES,
    MOST_STOPS,
    MOST_TOOLS,
    check_counts,
)
from mlxrunner.serve.middleware import MOST_PARTS, check_form
from mlxrunner.serve.ollama import OllamaChatRequest
from mlxrunner.serve.openai import ChatCompletionRequest, CompletionRequest
from mlxrunner.serve.protocol import RequestBody
from mlxrunner.serve.responses import ResponseRequest

WRONG = [3.5] * 500
"""Items that no list takes."""


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (MessageRequest, {"max_tokens": 1, "messages": WRONG}),
        (ChatCompletionRequest, {"messages": WRONG}),
        (CompletionRequest, {"prompt": WRONG}),
        (CompletionRequest, {"prompt": [WRONG]}),
        (ResponseRequest, {"input": WRONG}),
        (OllamaChatRequest, {"messages": WRONG}),
    ],
)
@pytest.mark.exhaustive(6)
def test_a_list_of_wrong_items(kind: type[RequestBody], body: dict[str, Any]) -> None:
    """The first wrong item of a list ends its check: an error for each would fill the memory."""
    with pytest.raises(ValidationError) as found:
        kind.model_validate(body)
    assert found.value.error_count() < 10


@pytest.mark.parametrize("part", [b"[],", b"{},", b'"",'])
@pytest.mark.exhaustive(3)
def test_a_body_of_many_small_parts(part: bytes) -> None:
    """It is refused before it is parsed: each part would take 50 times its bytes."""
    check_form(b"[" + part * 1000 + b"1]")
    with pytest.raises(ApiError, match="more than 1048576 values") as found:
        check_form(b"[" + part * (2 * MOST_PARTS + 1) + b"1]")
    assert found.value.status == 413


@pytest.mark.parametrize("name", ["stop", "messages", "tools"])
@pytest.mark.exhaustive(3)
def test_more_than_any_conversation_has(name: str) -> None:
    """The number and the most are named. A million stop strings would hold up all others."""
    most = {"stop": MOST_STOPS, "messages": MOST_MESSAGES, "tools": MOST_TOOLS}[name]

    def ask(count: int) -> ServerRequest:
        given: list[Any] = ["x"] * count
        fields = {"options": {"stop": given}} if name == "stop" else {name: given}
        return ServerRequest(protocol="chat", model="", **fields)

    check_counts(ask(most))
    with pytest.raises(ApiError, match=f"{name}: there are {most + 1}, and {most} are the most"):
        check_counts(ask(most + 1))
