"""The description of all addresses, and requests made from it by schemathesis: none breaks it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.sample import fewer
from support.scripted import Scripted, app_of

SCHEMA: Any = schemathesis.openapi.from_asgi("/openapi.json", app_of(Scripted()))
OPERATIONS = {
    f"{operation.ok().method.upper()} {operation.ok().path}": operation.ok()
    for operation in SCHEMA.get_all_operations()
}


def nothing_downloads(name: str, **_: Any) -> Path:
    raise AssertionError(name)


@pytest.fixture(autouse=True)
def without_downloads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No request of a test reaches a hub."""
    monkeypatch.setattr("mlxrunner.models.resolve.download", nothing_downloads)
    return


def test_each_address_is_described() -> None:
    """Their bodies have names, and their types are in the document."""
    assert {
        "POST /v1/messages",
        "POST /v1/messages/count_tokens",
        "POST /v1/chat/completions",
        "POST /v1/completions",
        "POST /v1/responses",
        "GET /v1/models",
        "POST /api/chat",
        "POST /api/generate",
        "GET /api/tags",
        "POST /api/show",
        "GET /api/ps",
        "GET /api/version",
        "POST /api/pull",
    } <= OPERATIONS.keys()


BODIES = {
    name: body["properties"]
    for name, body in SCHEMA.raw_schema["components"]["schemas"].items()
    if name.endswith("Request")
}
"""The fields of each body that a client sends, by the name of its class."""
DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", BODIES)
def test_each_field_of_a_body_is_named_on_a_page(name: str) -> None:
    """A client's author reads there what may be sent."""
    pages = "".join(page.read_text() for page in DOCS.glob("*.md"))
    assert {one for one in BODIES[name] if not re.search(rf'[`."]{one}[`:"]', pages)} == set()


def test_the_bodies_of_all_protocols_are_among_them() -> None:
    """Each protocol's class of bodies is known by the end of its name."""
    assert {
        "ChatCompletionRequest",
        "CompletionRequest",
        "ResponseRequest",
        "MessageRequest",
        "OllamaChatRequest",
    } <= BODIES.keys()


@pytest.mark.parametrize("name", OPERATIONS)
def test_no_request_breaks_the_server(name: str) -> None:
    """Each gets an answer, or an error of its own."""
    operation = OPERATIONS[name]

    @given(case=operation.as_strategy())
    @settings(
        max_examples=fewer(20, 3),
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def run(case: Any) -> None:
        response = case.call()
        assert response.status_code < 500 or name == "POST /api/pull", response.text
        assert "Traceback" not in response.text

    run()


@pytest.mark.exhaustive(2)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"model": "a", "messages": [{"role": "user", "content": "a"}]}),
        ("/v1/chat/completions", {"model": "a", "messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"model": "a", "input": "a"}),
        ("/v1/completions", {"model": "a", "prompt": "a"}),
        ("/api/chat", {"model": "a", "messages": [{"role": "user", "content": "a"}]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_no_value_of_a_field_breaks_the_server(path: str, body: dict[str, Any]) -> None:
    """Each field of a request that would be answered gets any JSON value."""
    from starlette.testclient import TestClient

    client = TestClient(app_of(Scripted()), raise_server_exceptions=False)
    operation = OPERATIONS[f"POST {path}"]
    names = sorted(FIELDS | set(operation.body[0].definition["schema"].get("properties", ())))
    values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(KEYS) | st.text(), inner, max_size=3)
        ),
        max_leaves=5,
    )

    @given(name=st.sampled_from(names), value=values)
    @settings(
        max_examples=fewer(100, 20),
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def run(name: str, value: Any) -> None:
        try:
            response = client.post(path, json=body | {name: value})
        except (ValueError, UnicodeEncodeError):
            return  # the client can't write it
        assert response.status_code < 500, (name, value, response.text)

    run()


FIELDS = frozenset(
    "stop seed temperature top_p top_k max_tokens logprobs top_logprobs response_format text tools "
    "tool_choice logit_bias include reasoning schema template chat_template_kwargs "
    "structured_outputs system format options messages input prompt".split()
)
"""Fields that are read, whether the document names them or not."""
KEYS = (
    "type",
    "role",
    "content",
    "text",
    "name",
    "function",
    "id",
    "arguments",
    "schema",
    "effort",
)
"""Keys of objects in fields."""
