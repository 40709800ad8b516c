"""Laws of all protocols, each asked by its own client: refusals, errors, clients that leave."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest
from support.scripted import FUNCTION, HELLO, HI, PARAMETERS, TOOL, Scripted, asking, ended
from support.waiting import until

from mlxrunner.server.events import ApiError, TextDelta, ToolChoice

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "tiny", "messages": HI, "n": 2},
    "/v1/completions": {"model": "tiny", "prompt": ["a", "b"]},
    "/v1/responses": {"model": "tiny", "input": "Hi"},
    "/v1/messages": {"model": "tiny", "messages": HI, "max_tokens": 9},
    "/api/chat": {"model": "tiny", "messages": HI},
}
"""A request of each protocol. The first two ask for two answers."""
TOOLS: dict[str, Any] = {
    "/v1/chat/completions": TOOL,
    "/v1/responses": {"type": "function", **FUNCTION},
    "/v1/messages": {"name": "read", "description": "Read a file", "input_schema": PARAMETERS},
}
"""The same function as protocols describe it."""


def of_openai(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)


def of_anthropic(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="x", max_retries=0)


CLIENTS: dict[str, Callable[[str], Callable[..., Any]]] = {
    "/v1/chat/completions": lambda url: of_openai(url).chat.completions.create,
    "/v1/completions": lambda url: of_openai(url).completions.create,
    "/v1/responses": lambda url: of_openai(url).responses.create,
    "/v1/messages": lambda url: of_anthropic(url).messages.create,
    "/api/chat": lambda url: ollama.Client(url).chat,
}
ERRORS = (openai.APIError, anthropic.APIError, ollama.ResponseError)


def ask(url: str, path: str, streams: bool) -> Any:
    """Ask as a protocol's own client does, and read the whole answer."""
    found = CLIENTS[path](url)(**BODIES[path] | {"stream": streams})
    return list(found) if streams else found


@pytest.fixture(params=BODIES)
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[False, True], ids=["whole", "stream"])
def streams(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 429, 500, 503])
@pytest.mark.exhaustive(30)
def test_a_refusal_has_its_status(
    url: str, answers: Scripted, path: str, streams: bool, status: int
) -> None:
    """In a stream, too, as long as nothing was sent."""
    answers.script = [ApiError(status, "no", code="context_length_exceeded", retry_after=3)]
    with pytest.raises(ERRORS, match="no") as raised:
        ask(url, path, streams)
    error: Any = raised.value
    assert error.status_code == status
    if path != "/api/chat":
        assert error.response.headers["retry-after"] == "3"
        assert answers.asked[0].id.startswith(error.request_id)
        assert path == "/v1/messages" or error.code == "context_length_exceeded"


@pytest.mark.parametrize(
    "error", [ApiError(503, "out of memory"), RuntimeError("a bug"), None], ids=str
)
def test_an_error_in_the_middle_ends_the_stream(
    url: str, answers: Scripted, path: str, error: Exception | None
) -> None:
    """Their client raises it, and it shows nothing of the server's inside. None: no end comes."""
    answers.script = [TextDelta("Hel"), *([] if error is None else [error])]
    said = "out of memory" if isinstance(error, ApiError) else "log says more"
    if path == "/v1/responses":
        failed = ask(url, path, True)[-1]
        assert failed.type == "response.failed"
        assert said in failed.response.error.message
    else:
        with pytest.raises(ERRORS, match=said):
            ask(url, path, True)
    with pytest.raises(ERRORS, match=said):
        ask(url, path, False)


def test_an_error_of_one_answer_ends_the_others(url: str, answers: Scripted) -> None:
    """Nothing continues that nobody reads."""
    answers.is_stuck = True
    answers.scripts = [[TextDelta("one")], [TextDelta("two"), ApiError(503, "out of memory")]]
    with pytest.raises(openai.InternalServerError):
        ask(url, "/v1/chat/completions", False)
    assert answers.closed == 2


def test_a_client_that_leaves_ends_its_answers(
    url: str, answers: Scripted, path: str, streams: bool
) -> None:
    """All of them are closed, though they would never end by themselves."""
    answers.script, answers.is_stuck = HELLO[:1], True
    count = 2 if path.endswith("completions") else 1
    with asking(f"{url}{path}", BODIES[path] | {"stream": streams}):
        until(lambda: len(answers.asked) == count, "for the request")
    until(lambda: answers.closed == count, "for the end of the answers")


def test_an_answer_names_the_model_if_the_request_names_none(
    url: str, answers: Scripted, path: str, streams: bool
) -> None:
    body = {**BODIES[path], "model": "", "stream": streams}
    answer = httpx.post(f"{url}{path}", json=body)
    if path == "/api/chat":  # Ollama's clients always name one
        assert answer.status_code == 400
        return
    assert f'"model":"{answers.model.name}"' in answer.text
    assert '"model":""' not in answer.text


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORM = {"type": "json_schema", "schema": SCHEMA}
CHAT_FORM = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}
FORMS: list[tuple[str, dict[str, Any], Any]] = [
    ("/v1/chat/completions", {"response_format": {"type": "text"}}, None),
    ("/v1/chat/completions", {"response_format": {"type": "json_object"}}, '{"type": "object"}'),
    ("/v1/chat/completions", {"response_format": CHAT_FORM}, json.dumps(SCHEMA)),
    ("/v1/messages", {"output_config": {"format": FORM}}, SCHEMA),
    ("/api/chat", {"format": "json"}, '{"type": "object"}'),
    ("/api/chat", {"format": SCHEMA}, SCHEMA),
    ("/api/chat", {"format": ""}, None),
]


@pytest.mark.parametrize(("path", "given", "schema"), FORMS)
@pytest.mark.exhaustive(7)
def test_a_form_is_the_schema_of_the_answer(
    url: str, answers: Scripted, path: str, given: dict[str, Any], schema: Any
) -> None:
    assert httpx.post(f"{url}{path}", json=BODIES[path] | given).is_success
    assert answers.last.options.get("schema") == schema


THOUGHTS: list[tuple[str, dict[str, Any], bool | None, str | None]] = [
    ("/v1/chat/completions", {"reasoning_effort": "high"}, None, "high"),
    ("/v1/chat/completions", {"reasoning_effort": "none"}, False, "none"),
    ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 2000}}, True, None),
    ("/v1/messages", {"thinking": {"type": "disabled"}}, False, None),
    *(("/api/chat", {"think": think}, think, None) for think in (True, False, None)),
    ("/api/chat", {"think": "high"}, True, "high"),
]


@pytest.mark.parametrize(("path", "given", "thinking", "effort"), THOUGHTS)
@pytest.mark.exhaustive(8)
def test_thinking_is_asked_for_or_how_much_of_it(
    url: str,
    answers: Scripted,
    path: str,
    given: dict[str, Any],
    thinking: bool | None,
    effort: str | None,
) -> None:
    """No effort is no thinking; a budget is a wish."""
    assert httpx.post(f"{url}{path}", json=BODIES[path] | given).is_success
    assert (answers.last.thinking, answers.last.effort) == (thinking, effort)


REASONS: dict[str, tuple[str, dict[Any, str]]] = {
    "/v1/chat/completions": ("finish_reason", {"stop_sequence": "stop"}),
    "/v1/completions": ("finish_reason", {"stop_sequence": "stop"}),
    "/v1/messages": (
        "stop_reason",
        {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"},
    ),
    "/api/chat": ("done_reason", {"stop_sequence": "stop", "tool_calls": "stop"}),
}
"""The field of the reason of an end, and the words for reasons that have others."""


@pytest.mark.parametrize("reason", ["stop", "length", "stop_sequence", "tool_calls"])
@pytest.mark.parametrize("path", REASONS)
@pytest.mark.exhaustive(16)
def test_reasons_of_the_end(
    url: str, answers: Scripted, path: str, reason: Any, streams: bool
) -> None:
    """Each has their word, in streams, too."""
    field, words = REASONS[path]
    answers.script = [TextDelta("a"), ended(reason)]
    text = httpx.post(f"{url}{path}", json=BODIES[path] | {"stream": streams}).text
    assert f'"{field}":"{words.get(reason, reason)}"' in text


def choices() -> Iterator[tuple[str, Any, ToolChoice, bool]]:
    """Yield paths, what they call a use of tools, and what it means."""
    chat, responses, messages = TOOLS
    for path, named in ((chat, {"function": {"name": "read"}}), (responses, {"name": "read"})):
        yield path, {"tool_choice": "none"}, ToolChoice("none"), True
        yield path, {"tool_choice": "auto", "parallel_tool_calls": False}, ToolChoice(), False
        yield path, {"tool_choice": "required"}, ToolChoice("required"), True
        one = {"type": "function", **named}
        yield path, {"tool_choice": one}, ToolChoice("named", "read"), True
        for mode in ("auto", "required"):
            # The model is told of the allowed ones alone, and of no tool that is not a function.
            few: dict[str, Any] = {"mode": mode, "tools": [one, {"type": "web_search"}]}
            few = {"allowed_tools": few} if path == chat else few
            yield path, {"tool_choice": {"type": "allowed_tools", **few}}, ToolChoice(mode), True  # type: ignore[arg-type]
    for kind, mode in (("auto", "auto"), ("any", "required"), ("none", "none")):
        yield messages, {"tool_choice": {"type": kind}}, ToolChoice(mode), True  # type: ignore[arg-type]
    own = {"type": "tool", "name": "read", "disable_parallel_tool_use": True}
    yield messages, {"tool_choice": own}, ToolChoice("named", "read"), False


@pytest.mark.parametrize(("path", "given", "choice", "parallel"), [*choices()])
def test_the_choice_of_tools(
    url: str, answers: Scripted, path: str, given: Any, choice: ToolChoice, parallel: bool
) -> None:
    """Each of theirs has one of ours."""
    is_some = "allowed_tools" in str(given)
    others = [{**TOOL, "function": {**FUNCTION, "name": "write"}}]
    others = [{**TOOLS[path], "name": "write"}] if path == "/v1/responses" else others
    body = BODIES[path] | {"tools": [*others[: int(is_some)], TOOLS[path]], **given}
    answer = httpx.post(f"{url}{path}", json=body)
    assert answer.status_code == 200, answer.text
    assert list(answers.last.tools) == [TOOL]
    assert (answers.last.tool_choice, answers.last.parallel_calls) == (choice, parallel)
    assert path != "/v1/responses" or answer.json()["tool_choice"] == given["tool_choice"]


PART = [{"type": "of_the_future"}]


def user(*content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*content]}]}


def picture(**source: Any) -> dict[str, Any]:
    return user({"type": "image", **({"source": source} if source else {})})


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": []}, "messages: it has to be a list of at least 1"),
    ("/v1/chat/completions", {"messages": [{"role": "bot"}]}, "messages.0.role: it has to be 'sys"),
    ("/v1/chat/completions", {"messages": [{"role": "tool"}]}, "messages.0.tool_call_id: it has"),
    ("/v1/chat/completions", {"n": 99}, "n: it has to be at most 16, not 99"),
    ("/v1/chat/completions", {"temperature": -1}, "temperature: "),
    ("/v1/chat/completions", {"temperature": "hot"}, "temperature: "),
    ("/v1/chat/completions", {"tools": [{"type": "function"}]}, "tools.0.function: "),
    ("/v1/chat/completions", {"tool_choice": "required"}, "tool_choice: there are no tools"),
    (
        "/v1/chat/completions",
        {"tools": [TOOL], "tool_choice": "read"},
        "tool_choice: 'read' is not supported; it has to be none, auto or required, or an object",
    ),
    ("/v1/chat/completions", {"reasoning_effort": "wild"}, "reasoning_effort: 'wild' is not"),
    ("/v1/chat/completions", {"response_format": {"type": "xml"}}, "response_format: "),
    ("/v1/chat/completions", {"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs: "),
    ("/v1/chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens: 0 is out of"),
    ("/v1/chat/completions", {"top_logprobs": 3}, "top_logprobs needs logprobs"),
    ("/v1/chat/completions", {"stop_token_ids": [-1]}, "stop_token_ids: -1 is out of range"),
    ("/v1/chat/completions", {"guided_json": 5}, "guided_json has to be a JSON schema"),
    ("/v1/chat/completions", {"structured_outputs": {"choice": []}}, "structured_outputs: the li"),
    ("/v1/completions", {"best_of": 3}, "best_of: 3 is not supported"),
    ("/v1/completions", {"prompt": ""}, "prompt: it is empty"),
    ("/v1/completions", {"prompt": [""]}, "prompt: it is empty"),
    ("/v1/completions", {"prompt": {"a": 1}}, "prompt: it has to be a text or a list, not {'a': 1"),
    ("/v1/completions", {"prompt": None}, "prompt: it has to be given"),
    ("/v1/completions", {"prompt": ["a"] * 9, "n": 2}, "prompt: 9 prompts with n=2 are more than"),
    ("/v1/completions", {"prompt": [5], "echo": True}, "echo: it is not supported with logprobs"),
    ("/v1/completions", {"echo": True, "logprobs": 1}, "echo: it is not supported with logprobs"),
    ("/v1/completions", {"logprobs": 101}, "logprobs: 101"),
    ("/v1/responses", {"input": []}, "input has to be a text or a list"),
    ("/v1/responses", {"input": [{"role": "user", "content": PART}]}, "input 0: content of type"),
    ("/v1/responses", {"input": [{"role": "bot", "content": "a"}]}, "input: role 'bot' is not kno"),
    ("/v1/responses", {"tools": [{"type": "function"}]}, "tools.0.name: "),
    ("/v1/responses", {"text": {"format": {"type": "xml"}}}, "response_format: "),
    ("/v1/responses", {"reasoning": {"effort": "wild"}}, "reasoning.effort: 'wild'"),
    ("/v1/responses", {"previous_response_id": "a"}, "previous_response_id: 'a' is not kept"),
    ("/v1/messages", {"messages": None}, "messages: it has to be given"),
    ("/v1/messages", {"messages": [{"role": "tool"}]}, "messages.0.role: it has to be 'user'"),
    (
        "/v1/messages",
        user(*PART),
        "messages.0.content.0: content of type 'of_the_future' is not supported here, only",
    ),
    (
        "/v1/messages",
        user({"type": "tool_result"}),
        "messages.0.content.0.tool_use_id: it has to be the id of a tool_use block",
    ),
    ("/v1/messages", user({"type": "text"}), "messages.0.content.0.text: it has to be a text"),
    ("/v1/messages", picture(), "messages.0.content.0.source: it has to be"),
    ("/v1/messages", picture(type="file", file_id="a"), "messages.0.content.0.source"),
    ("/v1/messages", picture(type="base64", data=1), "messages.0.content.0.source"),
    ("/v1/chat/completions", user({"type": "image_url"}), "messages.0.content.0.image_url"),
    (
        "/v1/chat/completions",
        user({"type": "image_url", "image_url": {}}),
        "messages.0.content.0.image_url: it has to be",
    ),
    (
        "/v1/chat/completions",
        user({"type": "input_audio"}),
        "messages.0.content.0: content of type 'input_audio' is not supported",
    ),
    ("/v1/messages", {"max_tokens": 0}, "max_tokens: it has to be at least 1, not 0"),
    ("/v1/messages", {"tools": [{"description": "a"}]}, "tools.0.name: a tool needs a name"),
    ("/v1/messages", {"tool_choice": {"type": "any"}}, "tool_choice: there are no tools"),
    (
        "/v1/messages",
        {"tools": [{"name": "a"}], "tool_choice": {"type": "tool", "name": "B"}},
        "tool_choice.name: 'B' is not among the tools",
    ),
    ("/api/chat", {"model": ""}, "model: it has to be a text of at least 1 character"),
    (
        "/api/chat",
        {"messages": [{"role": "user", "content": "a", "images": [1]}]},
        "messages.0.images.0: a picture has to be base64",
    ),
    ("/api/chat", {"tools": [{"type": "function"}]}, "tools.0: it has to be a function"),
    ("/api/chat", {"format": "xml"}, "format: 'xml' is neither"),
    ("/api/chat", {"options": {"mirostat": 2}}, "options.mirostat: 2 is not supported"),
    ("/api/chat", {"options": {"temperature": "hot"}}, "temperature: "),
    ("/api/chat", {"think": "wildly"}, "think: 'wildly' is not known"),
    ("/api/chat", {"keep_alive": "soon"}, "keep_alive: it has to be seconds"),
]
"""Paths, changes of a request, and how the message of the error begins."""


@pytest.mark.parametrize(("path", "change", "said"), WRONG)
def test_what_is_wrong_is_named(url: str, path: str, change: dict[str, Any], said: str) -> None:
    """The field, the reason, and the shape of the protocol's errors."""
    response = httpx.post(f"{url}{path}", json=BODIES[path] | {"n": 1} | change)
    assert response.status_code == 400
    body: Any = response.json()
    error = {"message": body["error"]} if path == "/api/chat" else body["error"]
    assert error["message"].startswith(said)
    if path != "/api/chat":
        assert error["type"] == "invalid_request_error"
    if path == "/v1/messages":
        assert body["type"] == "error"
    elif path != "/api/chat":
        field = said.partition(":")[0].split(" has to ")[0].split(" needs ")[0]
        assert error["param"] == field.replace(" ", ".")


@pytest.mark.parametrize(
    ("mode", "name", "said"),
    [
        ("none", "read", "mode 'none' is neither auto nor required"),
        ("auto", "absent", "'absent' is not among the tools"),
        ("required", None, "there are no tools"),
    ],
)
def test_what_is_wrong_with_allowed_tools(url: str, mode: str, name: str | None, said: str) -> None:
    few = [] if name is None else [{"type": "function", "function": {"name": name}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": few}}
    body = {"model": "tiny", "messages": HI, "tools": [TOOL], "tool_choice": choice}
    error = httpx.post(f"{url}/v1/chat/completions", json=body).json()["error"]
    assert (error["message"], error["param"]) == (f"tool_choice: {said}", "tool_choice")


def test_tokens_are_counted(url: str, answers: Scripted) -> None:
    """The same prompt is counted that an answer would have."""
    tool: Any = TOOLS["/v1/messages"]
    counted = of_anthropic(url).messages.count_tokens(model="tiny", messages=HI, tools=[tool])
    assert (counted.input_tokens, list(answers.last.tools)) == (42, [TOOL])
    body = {"messages": HI}
    assert httpx.post(f"{url}/v1/messages/count_tokens", json=body).status_code == 200
    assert of_openai(url).responses.input_tokens.count(model="tiny", input="Hi").input_tokens == 42
    assert answers.last.messages == HI
