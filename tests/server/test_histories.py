"""Histories as agents repeat them: nothing in one is refused, however odd, and prompts stay whole.

The prompts are made by the chat templates of nine families, for a model that sees no pictures.
"""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.scripted import Scripted, app_of, ended, serving

from mlxrunner.server.events import AnswerEvent, ServerRequest, TextDelta
from mlxrunner.server.prompts.builder import BuiltPrompt, PromptBuilder
from mlxrunner.templates.messages import NO_PICTURE, common

PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5Erk"
    "Jggg=="
)
PNG = {"type": "base64", "media_type": "image/png", "data": PIXEL}
URL = f"data:image/png;base64,{PIXEL}"
PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0xLjEK"}
SECRET = "R0lGODlh" * 200
"""Stands for what only another server can read."""
HALF = "half an emoji: \ud83d"

USER_BLOCKS: list[Any] = [
    {"type": "text", "text": HALF},
    {"type": "image", "source": PNG},
    {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}},
    {"type": "image", "source": {"type": "file", "file_id": "file_1"}},
    {"type": "image", "source": {"type": "base64", "data": "not base64"}},
    {"type": "document", "source": PDF, "title": "A report"},
    {"type": "document", "source": {"type": "url", "url": "https://example.com/a.pdf"}},
    {"type": "document", "source": {"type": "file", "file_id": "file_1"}},
    {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "plain"}},
    {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "c"}]}},
    {
        "type": "search_result",
        "source": "s",
        "title": "t",
        "content": [{"type": "text", "text": "x"}],
    },
    {"type": "container_upload", "file_id": "file_1"},
    {"type": "of_the_future", "deep": {"er": ["a", None, {}]}},
    "a bare text",
]
"""Blocks of a user, and of a tool's result, in Anthropic's form."""
ANSWER_BLOCKS: list[Any] = [
    {"type": "text", "text": "An answer."},
    {"type": "text", "text": ""},
    {"type": "text", "text": "<|channel|>analysis<|message|>hm<|end|>"},
    {"type": "thinking", "thinking": "Hm.", "signature": SECRET},
    {"type": "redacted_thinking", "data": SECRET},
    {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "q"}},
    {
        "type": "web_search_tool_result",
        "tool_use_id": "srvtoolu_1",
        "content": [
            {"type": "web_search_result", "url": "u", "title": "t", "encrypted_content": SECRET}
        ],
    },
    {
        "type": "web_search_tool_result",
        "tool_use_id": "a",
        "content": {"error_code": "unavailable"},
    },
    {"type": "web_fetch_tool_result", "tool_use_id": "a", "content": {"url": "u", "content": {}}},
    {"type": "code_execution_tool_result", "tool_use_id": "a", "content": {"stdout": "1\n"}},
    {"type": "bash_code_execution_tool_result", "tool_use_id": "a", "content": {"return_code": 0}},
    {"type": "text_editor_code_execution_tool_result", "tool_use_id": "a", "content": None},
    {"type": "mcp_tool_use", "id": "mcptoolu_1", "name": "n", "server_name": "s", "input": {}},
    {"type": "mcp_tool_result", "tool_use_id": "mcptoolu_1", "is_error": True, "content": []},
    {"type": "compaction", "content": "What was said before."},
    {"type": "compaction", "content": None},
    {"type": "container_upload", "file_id": "file_1"},
    {"type": "image", "source": PNG},
    {"type": "fallback", "from": {"model": "a"}},
]
"""Blocks of an answer in Anthropic's form."""
TOOL_BLOCKS: list[Any] = [*USER_BLOCKS, {"type": "tool_reference", "tool_name": "Read"}, {}]
ARGUMENTS: list[Any] = [
    *({}, {"a": 1}, None, "", '{"a": 1}', '{"a": "cut o', "[1]", "null", 5, HALF),
    '{"half an emoji": "\\ud83d"}',
]
ODD: list[Any] = [None, 5, True, {"a": 1}, [None], [5, "a text"], [{"type": 5}], [[]]]
"""Contents that are neither texts nor lists of parts."""
CHAT_PARTS: list[Any] = [
    {"type": "text", "text": HALF},
    {"type": "image_url", "image_url": {"url": URL}},
    {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
    {"type": "image_url"},
    {"type": "input_audio", "input_audio": {"data": SECRET, "format": "wav"}},
    {
        "type": "file",
        "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,AAAA"},
    },
    {"type": "file", "file": {"filename": "a.txt", "file_data": "data:text/plain;base64,YWJj"}},
    {"type": "file", "file": {"file_id": "file_1"}},
    {"type": "refusal", "refusal": "No."},
    {"type": "of_the_future", "key": 1},
]
RESPONSE_PARTS: list[Any] = [
    {"type": "input_text", "text": HALF},
    {"type": "output_text", "text": "said", "annotations": []},
    {"type": "refusal", "refusal": "No."},
    {"type": "input_image", "image_url": URL, "detail": "high"},
    {"type": "input_image", "file_id": "file_1"},
    {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,AAAA"},
    {"type": "input_file", "file_url": "https://example.com/a.pdf"},
    {"type": "of_the_future", "key": 1},
]
ITEMS: list[Any] = [
    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": SECRET},
    {"type": "item_reference", "id": "rs_2"},
    {"type": "compaction", "encrypted_content": SECRET},
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"query": "q"}},
    {"type": "file_search_call", "id": "fs_1", "queries": ["q"], "results": None},
    {"type": "computer_call", "id": "c", "action": {"type": "click"}},
    {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": SECRET},
    {"type": "code_interpreter_call", "id": "ci_1", "code": "1", "outputs": []},
    {"type": "mcp_list_tools", "id": "m", "server_label": "s", "tools": []},
    {"type": "mcp_approval_request", "id": "m", "name": "n", "arguments": "{}"},
    {"type": "mcp_approval_response", "approval_request_id": "m", "approve": True},
    {"type": "mcp_call", "id": "m", "name": "n", "arguments": "{", "output": "o"},
    {"type": "local_shell_call_output", "id": "lost", "output": "o"},
    {"type": "shell_call_output", "call_id": "lost", "output": [{"stdout": "o", "stderr": ""}]},
    {"type": "function_call_output", "call_id": "lost", "output": "o"},
    {"type": "function_call", "name": "without_an_id"},
    {"type": "of_the_future"},
]
"""Items that no message is made of, or that lack the other half."""
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("function_call", {"name": "look", "arguments": "{}"}),
    ("function_call", {"name": "look", "namespace": "of", "arguments": '{"a": "cut o'}),
    ("custom_tool_call", {"name": "apply_patch", "input": "*** Begin Patch"}),
    ("local_shell_call", {"action": {"type": "exec", "command": ["ls"]}, "status": "completed"}),
    ("shell_call", {"action": {"commands": ["ls"]}}),
    ("apply_patch_call", {"operation": {"type": "update_file", "path": "a", "diff": "+a"}}),
    ("computer_call", {"action": {"type": "screenshot"}}),
]


def some(of: list[Any], most: int = 3) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.sampled_from(of), max_size=most)


def content(parts: list[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(some(parts), st.sampled_from(["a text", HALF, "", *ODD]))


@st.composite
def anthropic_turn(draw: st.DrawFn) -> list[dict[str, Any]]:
    """A question, and an answer with calls of which some have results, which are anything."""
    answer = draw(some(ANSWER_BLOCKS))
    results = draw(some(USER_BLOCKS, 1))
    for number in range(draw(st.integers(0, 2))):
        use = {"type": "tool_use", "id": f"toolu_{number}", "name": "look"}
        answer.append(use | {"input": draw(st.sampled_from(ARGUMENTS))})
        block = {"type": "tool_result", "content": draw(content(TOOL_BLOCKS))}
        block["tool_use_id"] = draw(st.sampled_from([f"toolu_{number}", "toolu_lost"]))
        results[len(results) :] = [block] * draw(st.sampled_from([1, 1, 1, 0, 2]))
    turn = [{"role": "user", "content": draw(content(USER_BLOCKS))}] * draw(st.integers(0, 1))
    odd = draw(st.sampled_from([False, False, False, True]))
    turn.append({"role": "assistant", "content": draw(st.sampled_from(ODD)) if odd else answer})
    if draw(st.booleans()):
        turn.append({"role": "user", "content": results})
    return turn


@st.composite
def chat_turn(draw: st.DrawFn) -> list[dict[str, Any]]:
    turn: list[dict[str, Any]] = []
    if draw(st.booleans()):
        turn.append({"role": "user", "content": draw(content(CHAT_PARTS))})
    if draw(st.booleans()):
        turn.append({"role": "thinking", "content": "Hm."})
    answer = {"role": "assistant", "content": draw(st.one_of(st.none(), content(CHAT_PARTS)))}
    shape = draw(st.sampled_from(["none", "tools", "custom", "function", "refusal", "odd"]))
    function = {"name": "look", "arguments": draw(st.sampled_from(ARGUMENTS))}
    results: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": draw(st.sampled_from(["call_1", "lost", None]))}
    ]
    if shape in ("tools", "custom", "odd"):
        custom = {"type": "custom", "custom": {"name": "patch", "input": "x"}}
        made = {"tools": {"type": "function", "function": function}, "custom": custom}
        answer["tool_calls"] = [{"id": "call_1", **made.get(shape, {"type": "of_the_future"})}]
    elif shape == "function":
        answer["function_call"], results = function, [{"role": "function", "name": "look"}]
    elif shape == "refusal":
        answer |= {"content": None, "refusal": "No."}
    results = [one | {"content": draw(content(CHAT_PARTS))} for one in results]
    return [*turn, answer, *results * draw(st.integers(0, 2))]


@st.composite
def response_turn(draw: st.DrawFn) -> list[dict[str, Any]]:
    turn = [{"type": "message", "role": "user", "content": draw(content(RESPONSE_PARTS))}]
    turn += draw(some(ITEMS, 2))
    for number in range(draw(st.integers(0, 2))):
        kind, fields = draw(st.sampled_from(CALLS))
        turn.append({"type": kind, "call_id": f"call_{number}", **fields})
        output = draw(
            st.one_of(content(RESPONSE_PARTS), st.just({"content": "o", "success": True}))
        )
        done = {"type": f"{kind}_output", "call_id": f"call_{number}", "output": output}
        turn[len(turn) :] = [done] * draw(st.sampled_from([1, 1, 0, 2]))
    answer = {"role": "assistant", "content": draw(content(RESPONSE_PARTS))}
    return [*turn, *[answer] * draw(st.integers(0, 1))]


@st.composite
def ollama_turn(draw: st.DrawFn) -> list[dict[str, Any]]:
    images = some([PIXEL, "not base64", 5], 2)
    turn = [{"role": "user", "content": draw(content(CHAT_PARTS)), "images": draw(images)}]
    if draw(st.booleans()):
        turn.append({"role": "thinking", "content": "Hm."})
    answer: dict[str, Any] = {"role": "assistant", "content": "", "images": draw(images)}
    if draw(st.booleans()):
        function = {"name": "look", "arguments": draw(st.sampled_from(ARGUMENTS))}
        answer["tool_calls"] = [{"function": function}, {}][: draw(st.integers(0, 2))]
    result: dict[str, Any] = {"role": draw(st.sampled_from(["tool", "function"]))}
    result["content"] = draw(content(TOOL_BLOCKS))
    result["images"] = draw(images)
    return [*turn, answer, *[result] * draw(st.integers(0, 2))]


@dataclass(frozen=True)
class Protocol:
    """A path of the server, and the histories that its clients send there."""

    path: str
    turn: st.SearchStrategy[list[dict[str, Any]]]
    parts: list[Any]
    """Parts of a user's message."""

    def body(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        name = "input" if self.path.endswith("responses") else "messages"
        more = {"stream": False} if self.path.startswith("/api") else {"max_tokens": 9}
        return {"model": "tiny", name: messages, **more}

    def asks(self, parts: list[Any]) -> dict[str, Any]:
        """Return a message of the user with `parts`."""
        if self.path.startswith("/api"):
            return {"role": "user", "content": "Well?", "images": parts}
        return {"role": "user", "content": parts}


PROTOCOLS = {
    "anthropic": Protocol("/v1/messages", anthropic_turn(), USER_BLOCKS),
    "chat": Protocol("/v1/chat/completions", chat_turn(), CHAT_PARTS),
    "responses": Protocol("/v1/responses", response_turn(), RESPONSE_PARTS),
    "ollama": Protocol("/api/chat", ollama_turn(), [PIXEL, "not base64", 5]),
}
SAID: Any = {"role": "user", "content": "And now?"}
DONE: Any = {"role": "assistant", "content": "Well."}


class Making(Scripted):
    """Answers each request once its prompt is made."""

    def __init__(self, makers: dict[str, PromptBuilder]) -> None:
        super().__init__()
        self._makers = makers
        self.made: list[BuiltPrompt] = []

    async def answer(self, asked: ServerRequest) -> AsyncIterator[AnswerEvent]:
        for maker in self._makers.values():
            self.made.append(maker.make(asked))
        self.script = [TextDelta("Well."), ended(replaced=self.made[-1].replaced)]
        async for event in super().answer(asked):
            yield event


Send = Callable[..., httpx.Response]


@pytest.fixture(scope="module")
def making(makers: dict[str, PromptBuilder]) -> Making:
    return Making(makers)


@pytest.fixture(scope="module")
def send(making: Making) -> Iterator[Send]:
    """Send a history, with the halves of characters that JSON can have, and more fields."""
    kind = {"content-type": "application/json"}
    with serving(app_of(making)) as url, httpx.Client(base_url=url, headers=kind) as client:

        def sent(protocol: Protocol, messages: list[dict[str, Any]], **more: Any) -> httpx.Response:
            making.made.clear()
            body = json.dumps(protocol.body(copy.deepcopy(messages)) | more)
            return client.post(protocol.path, content=body)

        yield sent


@pytest.mark.parametrize("name", PROTOCOLS)
@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
@pytest.mark.exhaustive(0)
def test_no_history_ends_a_session(
    name: str, data: st.DataObject, send: Send, making: Making
) -> None:
    """All of it is taken by every template, and the prompt of the next turn begins with this one.

    A part that the user has just sent may be refused; then it is taken with the next message.
    """
    protocol = PROTOCOLS[name]
    turns = data.draw(st.lists(protocol.turn, min_size=1, max_size=3))
    history = [message for turn in turns for message in turn]
    response = send(protocol, [*history, SAID])
    assert response.status_code == 200, response.text
    before = [made.rendered for made in making.made]
    grown = send(protocol, [*history, SAID, DONE, SAID])
    assert grown.status_code == 200, grown.text
    for first, made in zip(before, making.made, strict=True):
        asked = first.rindex("And now?") + len("And now?")
        assert common(first, made.rendered) >= asked
    message = protocol.asks(data.draw(some(protocol.parts)))
    refused = send(protocol, [*history, DONE, message])
    assert refused.status_code in (200, 400)
    after = send(protocol, [*history, DONE, message, DONE, SAID])
    assert after.status_code == 200, after.text


REPLACED: list[tuple[str, list[dict[str, Any]], str, str]] = [
    (
        "anthropic",
        [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "Read"}]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "a", "content": [USER_BLOCKS[1]]},
                    {"type": "document", "source": PDF},
                ],
            },
        ],
        "[document (application/pdf): this model reads only text]",
        "document, picture",
    ),
    (
        "anthropic",
        [{"role": "assistant", "content": [ANSWER_BLOCKS[6]]}, SAID],
        '[web_search_tool_result: {"content": [{"type": "web_search_result", "url": "u", '
        '"title": "t"}]}]',
        "web_search_tool_result",
    ),
    (
        "chat",
        [{"role": "user", "content": [CHAT_PARTS[4]]}, DONE, SAID],
        "[input_audio: this model takes none]",
        "input_audio",
    ),
    (
        "chat",
        [
            {
                "role": "assistant",
                "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": '{"a'}}],
            },
            {"role": "tool", "tool_call_id": "a", "content": "no"},
        ],
        "no",
        "arguments",
    ),
    (
        "responses",
        [
            {"type": "function_call", "call_id": "a", "name": "view_image", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": [RESPONSE_PARTS[3]]},
        ],
        NO_PICTURE,
        "picture",
    ),
    ("responses", [ITEMS[6], SAID], "[image_generation_call]", "image_generation_call"),
    ("chat", [{"role": "tool", "content": {"degrees": 5}}, SAID], '[item: {"degrees": 5}]', "item"),
    (
        "ollama",
        [{"role": "user", "content": "Look", "images": [PIXEL]}, DONE, SAID],
        f"{NO_PICTURE}\nLook",
        "picture",
    ),
]


@pytest.mark.parametrize(("name", "messages", "text", "kinds"), REPLACED)
@pytest.mark.parametrize("stream", [False, True])
def test_what_can_not_be_shown_is_a_short_text(
    name: str, messages: Any, text: str, kinds: str, stream: bool, send: Send, making: Making
) -> None:
    """It stands in the prompt; the body and the header of the response name its type.

    The header of a stream comes before the prompt is made.
    """
    response = send(PROTOCOLS[name], messages, stream=stream)
    assert response.status_code == 200, response.text
    assert text in making.made[0].rendered
    assert response.headers["x-mlxrunner-replaced"] == kinds
    assert f'"replaced":{json.dumps(kinds.split(", "), separators=(",", ":"))}' in response.text


@pytest.mark.parametrize(
    "source",
    [
        {"type": "text", "media_type": "text/plain", "data": "plain"},
        {"type": "base64", "media_type": "text/plain", "data": "cGxhaW4="},
        {"type": "content", "content": [{"type": "text", "text": "plain"}]},
    ],
    ids=["text", "base64", "content"],
)
def test_a_document_has_its_title_and_context(source: Any, send: Send, making: Making) -> None:
    """Before its text, as Anthropic's models see them."""
    document = {"type": "document", "source": source, "title": "T", "context": "from a file"}
    assert send(PROTOCOLS["anthropic"], [{"role": "user", "content": [document]}]).is_success
    assert making.last.messages[0]["content"] == "T\nfrom a file\nplain"


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_picture_that_the_user_has_just_sent_is_refused(name: str, send: Send) -> None:
    """Also before a reminder of the system. Beside a tool's result it is the tool's."""
    protocol = PROTOCOLS[name]
    shown = {"anthropic": USER_BLOCKS[1], "chat": CHAT_PARTS[1], "responses": RESPONSE_PARTS[3]}
    message = protocol.asks([shown.get(name, PIXEL)])
    for behind in ([], [{"role": "system", "content": "Be brief."}]):
        response = send(protocol, [SAID, DONE, message, *behind])
        assert response.status_code == 400
        assert "this model sees none" in response.text
    assert ("could not process image" in response.text) == (name == "anthropic")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (5, "messages.0.content: it has to be a text or parts, not 5"),
        ({"a": 1}, "messages.0.content: it has to be a text or parts, not {'a': 1}"),
        ([None], "messages.0.content.0: it has to be"),
    ],
)
def test_an_odd_content_that_the_user_has_just_sent_is_refused(
    content: Any, said: str, send: Send
) -> None:
    """By its name, with what it may be."""
    for name in ("chat", "ollama"):
        response = send(PROTOCOLS[name], [{"role": "user", "content": content}])
        assert response.status_code == 400
        assert said in response.text


def test_words_to_be_continued_may_stand_beside_a_picture(send: Send) -> None:
    """White space at their end is refused there, too. A new answer has its own beginning."""
    new = {"continue_final_message": False}
    for end, more, status in (("", {}, 200), (" ", {}, 400), (" ", new, 200)):
        parts = [USER_BLOCKS[1], {"type": "text", "text": f"It is{end}"}]
        document = {"type": "document", "source": {"type": "content", "content": parts}}
        answer = {"role": "assistant", "content": [document]}
        response = send(PROTOCOLS["anthropic"], [SAID, answer], **more)
        assert response.status_code == status, response.text


def test_thinking_of_a_message_of_its_own_is_the_next_answers(send: Send, making: Making) -> None:
    """Continue sends it so."""
    messages = [SAID, {"role": "thinking", "content": "Hm, hm."}, DONE, SAID]
    for name in ("chat", "responses", "ollama"):
        assert send(PROTOCOLS[name], messages).status_code == 200
        assert making.last.messages[1] == {**DONE, "reasoning_content": "Hm, hm."}


def test_half_a_character_is_replaced_and_a_whole_one_is_not(send: Send, making: Making) -> None:
    """In escapes, behind backslashes, and as bytes."""
    whole = '"\U0001f600 \\ud83d"'
    assert send(PROTOCOLS["chat"], [{"role": "user", "content": f"{whole} \ud83d"}]).is_success
    assert making.last.messages[0]["content"] == f"{whole} \ufffd"
    call = {"name": "look", "arguments": '{"a": "\\ud83d", "b": "\\\\ud83d \\ud83d\\ude00"}'}
    answer = {"role": "assistant", "function_call": call}
    assert send(PROTOCOLS["chat"], [SAID, answer, SAID]).is_success
    text = making.last.messages[1]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(text) == {"a": "\ufffd", "b": "\\ud83d \U0001f600"}


ODD_CALLS = [{"id": 7, "type": 5, "function": {"name": "look", "arguments": "{}"}}, None]
ODD_CHAT = [
    {"role": "user", "content": "Hi", "name": 5, "tool_calls": [{"type": 4}]},
    None,
    {"role": "assistant", "content": None, "tool_calls": ODD_CALLS, "refusal": 5},
    {"role": "tool", "tool_call_id": 7, "content": "done"},
    {"role": "assistant", "content": "Yes", "reasoning_content": {}, "reasoning": [1]},
    {"role": "user", "content": "And now?"},
]


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("chat", ODD_CHAT),
        ("ollama", ODD_CHAT),
        ("anthropic", [None, {"role": "user", "content": "Hi"}]),
        ("responses", [None, {"role": "user", "content": "Hi"}, None]),
    ],
)
def test_wrong_kinds_of_values_in_a_history_end_no_session(
    name: str, messages: Any, send: Send
) -> None:
    """Ids that are numbers, nulls between messages, calls of a user: a client repeats them."""
    response = send(PROTOCOLS[name], messages)
    assert response.status_code == 200, response.text
