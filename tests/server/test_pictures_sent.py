"""Pictures as the clients of three protocols send them, and as the rules of prompts move them."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
from support.scripted import Scripted
from support.strict_templates import TEMPLATES, load_strict

from mlxrunner.errors import PictureError
from mlxrunner.server.prompts.answer_tokens import message_digest
from mlxrunner.server.prompts.rules import PromptDraft, apply
from mlxrunner.system.picture_files import picture_bytes
from mlxrunner.templates.probe import TemplateProbe

DATA = base64.b64encode(b"a picture").decode()
URL = f"data:image/png;base64,{DATA}"
LOOK = {"type": "text", "text": "Look:"}
SHOWN_URL = {"type": "image", "image": URL}
SHOWN = {"type": "image", "image": DATA}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": {}}}


SOURCE = {"type": "base64", "media_type": "image/png", "data": DATA}
SENT: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "chat/completions": (
        "messages",
        {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
        SHOWN_URL,
    ),
    "responses": ("input", {"type": "input_image", "image_url": URL, "detail": "auto"}, SHOWN_URL),
    "messages": ("messages", {"type": "image", "source": SOURCE}, SHOWN),
}
"""The field of the messages of each path, a picture as its clients send it, and as it is shown."""


@pytest.mark.parametrize("path", SENT)
@pytest.mark.exhaustive(3)
def test_a_picture_stands_where_the_client_has_put_it(
    url: str, answers: Scripted, path: str
) -> None:
    """It is after the text, and is not decoded by the protocol."""
    field, picture, shown = SENT[path]
    text = {"type": "input_text", "text": "Look:"} if path == "responses" else LOOK
    body = {"model": "tiny", field: [{"role": "user", "content": [text, picture]}]}
    assert httpx.post(f"{url}/v1/{path}", json=body).is_success
    assert answers.asked[-1].messages == [{"role": "user", "content": [LOOK, shown]}]


def test_ollama_puts_pictures_before_the_text(url: str, answers: Scripted, tmp_path: Path) -> None:
    """Its client reads files, and sends base64."""
    (tmp_path / "a.png").write_bytes(b"a picture")
    client = ollama.Client(url)
    message = {"role": "user", "content": "Look:", "images": [str(tmp_path / "a.png")]}
    client.chat("tiny", [message])
    client.generate("tiny", "Look:", images=[b"a picture"])
    for one in answers.asked[-2:]:
        assert one.messages == [{"role": "user", "content": [SHOWN, LOOK]}]


def test_a_tool_may_answer_with_a_picture(url: str, answers: Scripted) -> None:
    """Screenshots of agents come so."""
    content = [LOOK, {"type": "image", "source": SOURCE}]
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": content}
    use = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
    turns = (("user", "Look"), ("assistant", [use]), ("user", [result]))
    messages = [{"role": role, "content": said} for role, said in turns]
    body = {"model": "tiny", "max_tokens": 9, "messages": messages}
    assert httpx.post(f"{url}/v1/messages", json=body).status_code == 200
    expected = {"role": "tool", "tool_call_id": "toolu_1", "content": [LOOK, SHOWN]}
    assert answers.asked[-1].messages[-1] == expected


def test_a_raw_prompt_has_no_pictures(url: str) -> None:
    """Nothing says where they would stand."""
    body = {"model": "tiny", "prompt": "a", "raw": True, "images": [DATA]}
    response = httpx.post(f"{url}/api/generate", json=body)
    assert response.status_code == 400
    assert "a raw prompt has no place for pictures" in response.json()["error"]


@pytest.mark.parametrize("family", TEMPLATES)
def test_rules_keep_pictures_with_their_texts(family: str, tmp_path: Path) -> None:
    """Each mark has its picture, in order, whatever is joined, moved or written as text."""
    template, _ = TEMPLATES[family]
    probe = TemplateProbe(load_strict(tmp_path / family, family).render, template)
    calls = [CALL, {**CALL, "id": "call_2"}]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "\ufffc first", "pictures": ["1"]},
        {"role": "user", "content": "then \ufffc\ufffc", "pictures": ["2", "3"]},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "b \ufffc", "tool_call_id": "call_2", "pictures": ["5"]},
        {"role": "tool", "content": "a \ufffc", "tool_call_id": "call_1", "pictures": ["4"]},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "\ufffc last", "pictures": ["6"]},
    ]
    draft, _ = apply(PromptDraft(messages), probe)
    found = list[tuple[str, str]]()
    for message in draft.messages:
        assert message["content"].count("\ufffc") == len(message.get("pictures", ()))
        texts = message["content"].split()
        marked = [
            near(texts, at) for at, text in enumerate(texts) for _ in range(text.count("\ufffc"))
        ]
        found += zip(marked, message.get("pictures", ()), strict=True)
    expected = {("first", "1"), ("then", "2"), ("then", "3"), ("b", "5"), ("a", "4"), ("last", "6")}
    assert set(found) == expected


def near(texts: list[str], at: int) -> str:
    """Return the word beside a mark."""
    behind = texts[at + 1 : at + 2]
    return behind[0] if behind in (["first"], ["last"]) else texts[at - 1]


def test_another_picture_is_another_message() -> None:
    """The digest by which an answer is known again tells them apart."""
    one = {"role": "user", "content": "\ufffc", "pictures": ["1"]}
    assert message_digest(one) != message_digest({**one, "pictures": ["2"]})
    assert message_digest(one) != message_digest({"role": "user", "content": "\ufffc"})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a" * (2**26 // 3 * 4 + 2**17), "it has more than"),
        ("abc", "its base64 is wrong"),
        ("ä", "its base64 is wrong"),
        ("ftp://x/a", "is not fetched"),
        ("javascript:alert(1)", "is not fetched"),
        ("data:;base64", "a data URL has to begin"),
        ("file:///a", "no files are opened"),
    ],
)
def test_texts_that_are_no_pictures(text: str, why: str) -> None:
    """Each has one line."""
    with pytest.raises(PictureError, match=why) as caught:
        picture_bytes(text, "picture 1")
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


def test_base64_in_lines_is_read() -> None:
    """The command `base64` writes it so."""
    content = bytes(range(256))
    text = base64.encodebytes(content).decode()
    for given in (text, f"DATA:image/png;charset=x;base64,{text}"):
        assert picture_bytes(given, "picture 1") == content
